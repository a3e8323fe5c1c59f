"""Methods: what a router may leave out, and how.

A method is one file here; the file's name is the method's name. `names()` finds the files, `load()` returns the
one `Method` subclass a file defines; a dotted name (`mypackage.mymethod`) loads a method from outside this tree.

`dense.py` is the baseline, the template, and the fake. Contract tests run over `names()`, so a new file is
tested before it has tests of its own.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from profiler.execution.routes import ForcedGates
    from profiler.execution.sequences import Sequences, SequenceTracker
    from profiler.recorder import Probe, Recorder, SpanSite
    from profiler.records import Choice, MemoryRecord, ParallelRecord

Scope = Literal["none", "token", "sequence"]


class MethodConfig(BaseModel):
    """Options of a method, as an arm of a spec gives them. Unknown options are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OptionError(ValueError):
    """A rule between options is broken; for validators of a whole `MethodConfig`, to say which option to look at."""

    def __init__(self, key: str, rule: str) -> None:
        super().__init__(rule)
        self.key = key


class Method(ABC):
    """A method bound to one model tree.

    Class attributes:
        Config: its options.
        scope: who decides together: one `token`, one `sequence`, or `none` (nothing is decided).
        sites: what a decision is about (`block`, `ffn`, ...).
        signals: the method's own recorded columns, name → what it is.
        numeric_twin: the method whose output this one must equal when forced open.
        rate_option: the option that asks for the share of decisions that skip instead of giving `threshold`, where the
            method has one; `profiler.calibration` turns one into the other before an arm is built.
        latent_attention: whether it works on decoders with multi-head latent attention.
        takes_several: whether one decision takes several of its site's choices, so that none of them is skipping.
        own_experts: whether it works on models that come with experts of their own, and on no others.
    """

    Config: ClassVar[type[MethodConfig]]
    scope: ClassVar[Scope]
    sites: ClassVar[tuple[str, ...]]
    signals: ClassVar[dict[str, str]] = {}
    numeric_twin: ClassVar[str] = "dense"
    rate_option: ClassVar[str | None] = None
    latent_attention: ClassVar[bool] = False
    takes_several: ClassVar[bool] = False
    own_experts: ClassVar[bool] = False

    tracker: SequenceTracker

    def __init__(self, model: PreTrainedModel, config: Any, recorder: Recorder) -> None:
        """Prepare a handle; `wrap` is what changes the tree, so that a refused option leaves it as it was."""
        from profiler.execution.decoder import decoder

        self.model, self.config, self.recorder = model, config, recorder
        self.decoder = decoder(model, latent=self.latent_attention)

    @classmethod
    @abstractmethod
    def choices(cls, model: PreTrainedModel, config: Any) -> list[Choice]:
        """Every alternative at every site of every layer, with its costs. `model` may be on the meta device."""

    @classmethod
    def check(cls, model: PreTrainedModel, config: Any, ranks: int = 1) -> None:
        """Refuse what shows without weights: `model` may be on the meta device, and no tensor of a checkpoint is read.

        Args:
            model: the backbone.
            config: the arm's options.
            ranks: processes that are to share the experts of a layer.

        Raises:
            InputError: the checkpoint is missing, or of another method or model; a layer has fewer experts than ranks.
        """

    @classmethod
    def wrap(cls, model: PreTrainedModel, config: Any, recorder: Recorder) -> Self:
        """Change `model`'s tree in place so that it routes, and return the handle, also found as `model.gatewise`.

        Raises:
            InputError: the tree is wrapped already, its architecture is not supported, a checkpoint does not fit, or
                the config asks for a rate.
        """
        from profiler.execution.sequences import SequenceTracker

        if handle_of(model) is not None:
            raise InputError(f"this model tree is wrapped already, by {type(handle_of(model)).__name__}")
        if cls.rate_option is not None and getattr(config, cls.rate_option) is not None:
            raise InputError(f"{cls.rate_option} is met on the prompts of a spec; here there are none, give threshold")
        cls.check(model, config)
        handle = cls(model, config, recorder)
        handle.tracker = SequenceTracker(handle.decoder.base)
        handle.install()
        # Plain attribute: a user's own loop has the model in hand, not the method.
        model.gatewise = handle  # type: ignore[assignment]
        return handle

    def install(self) -> None:
        """Put the method's own parts into the tree; called once, by `wrap`."""

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
        """Forget what is held for a finished request of a serving engine; from any thread."""

    def adapt_twin(self, twin: PreTrainedModel) -> None:
        """Make `twin`, a tree of the numeric twin over the backbone, compute what this method must when forced open.

        Tensors of the twin are replaced, never written into. Where a method adds nothing to what runs, the twin
        is right as it is.
        """

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
    def signal_starts(self) -> dict[str, list[float]]:
        """Signal → its value in each layer before any training.

        For decision logits (above 0 the backbone's part runs) that then are the same for every input.
        """
        return {}

    @property
    def constants(self) -> dict[str, dict[int, float]]:
        """What has been learned that is one number a layer: name → layer → value; see `records.ArmRecord`."""
        return {}

    @property
    def caveat(self) -> str | None:
        """What a reader must know of this arm beyond `synthetic` and `untrained`, in a few words, else None."""
        return None

    @property
    def parallel(self) -> ParallelRecord | None:
        """Routed experts and how they are spread over ranks (`nodes` left out); None for a method without any."""
        return None

    @property
    def discards(self) -> bool:
        """Whether every choice computes all rows and what was not chosen is thrown away, so that nothing is saved."""
        return False

    @property
    def threshold(self) -> float:
        """Value of the gate at which a decision turns."""
        return 0.5

    @property
    def kv_policy(self) -> str | None:
        """How the cache treats what was skipped; None where nothing is."""
        return None

    @classmethod
    def memory(cls, model: PreTrainedModel, config: Any) -> MemoryRecord | None:
        """What is kept of each token row during one forward, beside the cache; None for nothing."""
        return None

    @classmethod
    def copied_parameters(cls, model: PreTrainedModel, config: Any, device: str) -> int:
        """How many parameters each tree of an arm keeps another copy of, in another layout, on a type of device."""
        return 0

    @classmethod
    def caches(cls, config: Any) -> bool:
        """Whether an arm decodes into a cache; if not, every step is given the whole sequence again."""
        return True

    @property
    def keeps_cache(self) -> bool:
        """`caches` of this arm."""
        return self.caches(self.config)

    def kv_bytes(self, output: Any) -> tuple[int, int] | None:
        """Cache bytes after a step, (allocated, live); None where the step left no cache."""
        from profiler.execution.kv import kv_bytes, paged_bytes

        sequences = self.tracker.current
        if sequences is None:
            return None
        held = [past + rows for past, rows in zip(sequences.past_S, sequences.rows_S, strict=True)]
        if sequences.packed:
            cache = self.tracker.paged
            return None if cache is None else paged_bytes(cache, held, self.layers_kept(sequences))
        cache = getattr(output, "cache", None)
        return None if cache is None else kv_bytes(cache, held)

    def layers_kept(self, sequences: Sequences) -> list[Collection[int]]:
        """The layers that each sequence of a packed step keeps keys and values for: all, unless the method skips."""
        return [range(int(self.model.config.num_hidden_layers))] * len(sequences)


@dataclass(frozen=True)
class Losses:
    """What one micro-batch adds to a training step.

    Attributes:
        total: its share of the loss, differentiable; the shares of a step's micro-batches add up to the loss.
        nll: Σ −log p over the tokens that are predicted, in nats.
        penalty: Σ over deciders of the method's regulariser, its weight left out.
        ran_L: `[layers]`, deciders for which each routed layer ran.
        deciders: how many there are: sequences, or predicted tokens, whichever the method decides for.
        sums: further figures by name, each a Σ over deciders.
    """

    total: Tensor
    nll: Tensor
    penalty: Tensor
    ran_L: Tensor
    deciders: int
    sums: dict[str, Tensor] = field(default_factory=dict)


class Routed(Method):
    """A method whose router can be bypassed: by open or closed gates, or by a synthetic route.

    Class attributes:
        Route: what a synthetic route of this method is; it has a `label()`.
    """

    Route: ClassVar[type[ForcedGates]]

    #: How the router is bypassed; None where it decides.
    _route: Any = None
    #: Whether parameters came from a checkpoint.
    _trained: bool = False

    def force(self, how: Any | None) -> None:
        """Bypass the router: `"open"` (everything runs), `"closed"`, a `Route`, or None to let it decide."""
        if not isinstance(how, self.Route) and how not in ("open", "closed", None):
            raise InputError(f"cannot force gates to {how!r}")
        self._route = how

    @property
    def synthetic(self) -> str | None:
        if isinstance(self._route, self.Route):
            return self._route.label()
        return None if self._route is None else f"forced: every gate {self._route}"

    @property
    def untrained(self) -> bool:
        return not self._trained and self._route is None


class Trainable(Routed):
    """A method with a training objective. The loop, the data and the schedule are `profiler.train`'s.

    Class attributes:
        Objective: options of what is minimised.
        skipped: what a skip rate counts, as the end of "3.0 % of ..."; of a method with words of its own, nothing.
    """

    Objective: ClassVar[type[MethodConfig]]
    skipped: ClassVar[str]

    @classmethod
    def step_words(cls, line: Mapping[str, Any]) -> str:
        """What a line of progress says of an update beside its losses and its speed; `line`: that of the log."""
        return f"skipped {line['skip_rate']:.1%}"

    @classmethod
    def held_out_words(cls, found: Mapping[str, Any]) -> str:
        """A domain's held-out figures (`train.held_out`) in words."""
        return (
            f"every gate open {found['open']:.3f}; routed {found['routed']:.3f}, {found['skip_rate']:.1%} of "
            f"{cls.skipped}, {found['deciding']} layers decide by input"
        )

    @classmethod
    def before_words(cls, found: Mapping[str, Any]) -> str:
        """What a domain's figures before training are compared with those after it by."""
        return f"untouched backbone {found['open']:.3f}"

    def prepare(self, gradient_checkpointing: bool) -> None:
        """Make ready to be trained; called once, before `trainables`, which are then float32 at least.

        Args:
            gradient_checkpointing: keep only each block's input, and compute the block again for its gradient.

        Raises:
            InputError: the arm's options or the method do not allow it.
        """
        if gradient_checkpointing:
            raise InputError(f"training.gradient_checkpointing: {type(self).__name__} does not offer it")

    @abstractmethod
    def trainables(self) -> dict[str, nn.Parameter]:
        """What training changes, by a name that is the same in every tree of the method; the backbone is not in it."""

    @abstractmethod
    def start(self, seed: int) -> None:
        """Set every trainable to the value training starts from; what is random is drawn from `seed`."""

    @abstractmethod
    def losses(
        self, ids_BT: Tensor, mask_BT: Tensor, objective: Any, *, tokens: int, sequences: int, ramp: float = 1.0
    ) -> Losses:
        """Forward one micro-batch as training does.

        Args:
            ids_BT: token ids, right-padded.
            mask_BT: True at real tokens.
            objective: an `Objective`.
            tokens: predicted tokens of the whole step, which the language-model loss is a mean over.
            sequences: sequences of the whole step, for a regulariser that is a mean over them.
            ramp: how far the warm-up has come, up to 1; for a weight that rises with it.
        """

    @abstractmethod
    def save(self, folder: Path, dtype: Any = ..., base: str | None = None) -> None:
        """As `Method.save`; `dtype` is what the numbers are stored as, `base` the name of the backbone."""


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


def description(name: str) -> str:
    """A method and its options, for people: the docstrings of its file and of its options, and the defaults.

    Raises:
        InputError: as `load`.
    """
    method = load(name)
    defaults = []
    for option, field_ in method.Config.model_fields.items():
        default = field_.get_default(call_default_factory=True)
        plain = default.model_dump() if isinstance(default, BaseModel) else default
        values = get_args(field_.annotation) if get_origin(field_.annotation) is Literal else ()
        among = f"   one of {', '.join(map(str, values))}" if values else ""
        defaults.append(f"    {option}: {json.dumps(plain)}{among}")
    parts = [inspect.getdoc(inspect.getmodule(method))]
    parts += (
        [inspect.getdoc(method.Config), "\n".join(["Defaults:", *defaults])] if defaults else ["It has no options."]
    )
    return "\n\n".join(part for part in parts if part)


def load(name: str) -> type[Method]:
    """The method called `name` (a name of `names()`, or a dotted module path).

    Raises:
        InputError: there is no such method, or the module does not define exactly one.
    """
    path = name if "." in name else f"{__name__}.{name}"
    if "." not in name and name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"method {name!r} is not known; methods here: {', '.join(names())}{hint}")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise InputError(f"method {name!r} cannot be loaded: {error}") from error
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
    try:
        method = load(name)
    except InputError as error:
        raise InputError(f"{where}method: {error}") from error
    return _checked(name, method.Config, options, where)


def objective(name: str, options: dict[str, Any], where: str = "") -> Any:
    """Check `options` against the `Objective` of a method that can be trained, and return it.

    Raises:
        InputError: as `configure`, or the method has nothing to train.
    """
    method = load(name)
    if not issubclass(method, Trainable):
        raise InputError(f"method {name!r} has nothing to train")
    return _checked(name, method.Objective, options, where)


def _checked(name: str, config_type: type[MethodConfig], options: dict[str, Any], where: str) -> Any:
    try:
        # Strict: the text "0.3" is no number, and true is not 1. In the options inside of options too.
        return config_type.model_validate(options, strict=True)
    except ValidationError as error:
        # Where a value may be of several kinds, each kind complains; the one that looked deepest is the one meant. A
        # key that is not known comes first: the one that is missing is likely meant by it.
        problems = error.errors()
        problem = max(problems, key=lambda problem: (len(problem["loc"]), problem["type"] == "extra_forbidden"))
        keys, known = _keys(config_type, problem["loc"])
        if problem["type"] == "extra_forbidden":
            last = str(problem["loc"][-1])
            near = difflib.get_close_matches(last, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {', '.join(known) or 'none'}"
            raise InputError(f"{where}{'.'.join([*keys, last])}: method {name!r} has no such option{hint}") from None
        kinds = [
            p for p in problems if len(p["loc"]) == len(problem["loc"]) and _keys(config_type, p["loc"])[0] == keys
        ]
        rule = ", or: ".join(
            "Input should be a mapping" if p["type"] == "model_type" else p["msg"].removeprefix("Value error, ")
            for p in kinds
        )
        broken = problem.get("ctx", {}).get("error")
        if isinstance(broken, OptionError):
            keys = [*keys, broken.key]
        place = f"{where}{'.'.join(keys)}".rstrip(".") or f"method {name!r}"
        # A rule between options has its own numbers, and all of them are no help beside it.
        whole = problem["type"] in ("value_error", "missing") and isinstance(problem["input"], dict)
        given = "" if whole else f" (given: {problem['input']!r})"
        raise InputError(f"{place}: {rule}{given}") from None


def _keys(config_type: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """An error's place as the user's keys, and the options known there; pydantic's names of kinds are left out."""
    keys, models = [], [config_type]
    for part in loc:
        fields = {name: field.annotation for model in models for name, field in model.model_fields.items()}
        if part in fields:
            keys.append(str(part))
            models = list(_models_in(fields[str(part)]))
    return keys, [field for model in models for field in model.model_fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for member in get_args(annotation):
        yield from _models_in(member)
