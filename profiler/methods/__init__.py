"""Methods: what a router may leave out, and how.

A method is one file here; the file's name is the method's name. `names()` finds the files, `load()` returns the
one `Method` subclass a file defines; a dotted name (`mypackage.mymethod`) loads a method from outside this tree.

`dense.py` is the baseline, the template, and the fake. Contract tests run over `names()`, so a new file is
tested before it has tests of its own.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from profiler.execution.sequences import SequenceTracker
    from profiler.recorder import Probe, Recorder, SpanSite
    from profiler.records import Choice

Scope = Literal["none", "token", "sequence"]


class MethodConfig(BaseModel):
    """Options of a method, as an arm of a spec gives them. Unknown options are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Method(ABC):
    """A method bound to one model tree.

    Class attributes:
        Config: its options.
        scope: who decides together: one `token`, one `sequence`, or `none` (nothing is decided).
        sites: what a decision is about (`block`, `ffn`, ...).
        signals: the method's own recorded columns, name → what it is.
        numeric_twin: the method whose output this one must equal when forced open.
    """

    Config: ClassVar[type[MethodConfig]]
    scope: ClassVar[Scope]
    sites: ClassVar[tuple[str, ...]]
    signals: ClassVar[dict[str, str]] = {}
    numeric_twin: ClassVar[str] = "dense"

    def __init__(self, model: PreTrainedModel, config: Any, recorder: Recorder) -> None:
        from profiler.execution.decoder import decoder
        from profiler.execution.sequences import SequenceTracker

        self.model, self.config, self.recorder = model, config, recorder
        self.decoder = decoder(model)
        self.tracker: SequenceTracker = SequenceTracker(self.decoder.base)
        if handle_of(model) is not None:
            raise InputError(f"this model tree is wrapped already, by {type(handle_of(model)).__name__}")
        # Plain attribute: a user's own loop has the model in hand, not the method.
        model.gatewise = self  # type: ignore[assignment]

    @classmethod
    @abstractmethod
    def choices(cls, model: PreTrainedModel, config: Any) -> list[Choice]:
        """Every alternative at every site of every layer, with its costs. `model` may be on the meta device."""

    @classmethod
    def wrap(cls, model: PreTrainedModel, config: Any, recorder: Recorder) -> Self:
        """Change `model`'s tree in place so that it routes, and return the handle."""
        return cls(model, config, recorder)

    @abstractmethod
    def force(self, how: Any | None) -> None:
        """Bypass the router: `"open"` (everything runs), `"closed"`, a `ForcedGates`, or None to let it decide."""

    @abstractmethod
    def probes(self) -> list[Probe]:
        """First products of the choices, where the recorder counts rows."""

    @abstractmethod
    def spans(self) -> list[SpanSite]:
        """Modules the recorder times as segments."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything the method adds to the backbone (nothing of the backbone itself)."""

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into this wrapped tree.

        Raises:
            InputError: the checkpoint is of another model, another method, or incomplete; both sides are named.
        """

    def release(self, request: str) -> None:
        """Forget what is held for a finished request."""

    @property
    def root(self) -> nn.Module:
        """The module whose forward is one step."""
        return self.model

    @property
    def synthetic(self) -> str | None:
        """How the route is labelled where it did not come from a router, else None."""
        return None

    @property
    def untrained(self) -> bool:
        """Whether the router's parameters are those it starts training from."""
        return False

    @property
    def kv_policy(self) -> str | None:
        """How the cache treats what was skipped; None where nothing is."""
        return None

    def kv_bytes(self, output: Any) -> tuple[int, int] | None:
        """Cache bytes after a step, (allocated, live); None where the step left no cache of a known kind."""
        from profiler.execution.kv import kv_bytes

        cache, sequences = getattr(output, "cache", None), self.tracker.current
        if cache is None or sequences is None or sequences.packed or not hasattr(cache, "layers"):
            return None
        held = [past + rows for past, rows in zip(sequences.past_S, sequences.rows_S, strict=True)]
        return kv_bytes(cache, held)


def handle_of(model: nn.Module) -> Method | None:
    """The method a model was wrapped by, or None."""
    found = getattr(model, "gatewise", None)
    return found if isinstance(found, Method) else None


def names() -> list[str]:
    """Names of the methods in this tree, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def summaries() -> dict[str, str]:
    """Name → first line of the file's docstring, without importing any of them."""
    found = {}
    for name in names():
        spec = importlib.util.find_spec(f"{__name__}.{name}")
        assert spec is not None and spec.origin is not None
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        found[name] = text.partition("\n")[0]
    return found


def load(name: str) -> type[Method]:
    """The method called `name` (a name of `names()`, or a dotted module path).

    Raises:
        InputError: there is no such method, or the module does not define exactly one.
    """
    path = name if "." in name else f"{__name__}.{name}"
    if "." not in name and name not in names():
        raise InputError(f"method {name!r} is not known; methods here: {', '.join(names())}")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise InputError(f"method {name!r}: {error}") from error
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise InputError(f"method {name!r}: its module must define one Method, it defines {len(found)}")
    return found[0]


def configure(name: str, options: dict[str, Any], where: str = "") -> Any:
    """Check `options` against the method's `Config` and return it.

    Raises:
        InputError: names the option, the rule, the value, and for an unknown option the nearest known one.
    """
    import difflib

    config_type = load(name).Config
    try:
        return config_type.model_validate(options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            last = str(problem["loc"][-1])
            known = list(config_type.model_fields)
            near = difflib.get_close_matches(last, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {', '.join(known) or 'none'}"
            raise InputError(f"{where}{key}: method {name!r} has no such option{hint}") from None
        raise InputError(f"{where}{key}: {problem['msg']} (given: {problem['input']!r})") from None
