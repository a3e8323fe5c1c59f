"""From a file or a built-in name, with overrides, to a checked `Spec`; every way this fails is an `InputError`.

Not here: YAML and JSON (`documents`), the rules (`spec`), their sentences (`explain`), prompts (`prompts`).
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from profiler.errors import InputError
from workloads import overrides as set_option
from workloads.documents import read_document
from workloads.explain import explain, show
from workloads.spec import BUILTIN, PromptsSpec, QualitySpec, Spec

#: The built-in spec that `load()` takes when none is named.
DEFAULT = "quickstart"


def builtin_specs() -> dict[str, Path]:
    """The specs that ship with the package, by name, sorted."""
    folder = Path(str(importlib.resources.files("workloads") / "specs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(source: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Spec:
    """The spec as resolved: overrides applied, twins named, relative `source`s made absolute.

    Args:
        source: the path of a YAML or `.json` file, or the name of a built-in spec (a file of that very name
            needs `./` before it); None for the built-in quickstart.
        overrides: `a.b.c=value`, applied in order. A relative `source` among them starts at the
            working folder, one in the file at the file's folder.

    Raises:
        InputError: with the file, the key, the rule and the value given.
    """
    path, label = _find(DEFAULT if source is None else source)
    data = read_document(path, label)
    if not isinstance(data, dict):
        raise InputError(f"{label}: must be a mapping of keys such as name, model and arms, and it is {show(data)}")
    marks = set_option.apply(data, overrides)
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, label, marks) from error
    for section in ("prompts", "quality"):
        typed = (section, "source") in marks or (section,) in marks
        spec = _with_absolute_source(spec, section, Path.cwd() if typed else path.parent)
    return spec


def _find(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The file, and what to call it in messages."""
    known = builtin_specs()
    if isinstance(source, str) and source in known:
        return known[source], f"built-in spec {source}"
    path = Path(source)
    if not path.exists() and len(path.parts) <= 1 and not path.suffix:
        near = difflib.get_close_matches(str(source), known, n=1)
        hint = f"; the nearest built-in is {near[0]!r}" if near else ""
        raise InputError(f"{source}: neither a file nor a built-in spec ({', '.join(known)}){hint}")
    return path, str(source)


def _with_absolute_source(spec: Spec, section: str, folder: Path) -> Spec:
    found: PromptsSpec | QualitySpec | None = getattr(spec, section)
    if found is None or found.source == BUILTIN:
        return spec
    absolute = os.path.abspath(folder / os.path.expanduser(found.source))
    return spec.model_copy(update={section: found.model_copy(update={"source": absolute})})
