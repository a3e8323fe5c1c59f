"""From a file or a built-in name, with overrides, to a checked `Spec`; every way this fails is an `InputError`.

Not here: YAML and JSON (`documents`), the rules (`spec`), their sentences (`explain`), prompts (`prompts`).
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from profiler.errors import InputError
from workloads import overrides as set_option
from workloads.documents import read_document
from workloads.explain import explain, show
from workloads.keys import Path as KeyPath
from workloads.recipe import builtin_recipes
from workloads.spec import BUILTIN, PromptsSpec, QualitySpec, Spec, TrainSpec

#: The built-in spec that `load()` takes when none is named.
DEFAULT = "quickstart"


def builtin_specs() -> dict[str, Path]:
    """The specs that ship with the package, by name, sorted."""
    folder = Path(str(importlib.resources.files("workloads") / "specs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


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
    return _with_absolute_recipe(spec, marks, path.parent)


def label(source: str | os.PathLike[str] | None = None) -> str:
    """What messages call a spec that `load` takes: `built-in spec quickstart`, or the path as given."""
    name = DEFAULT if source is None else source
    return f"built-in spec {name}" if isinstance(name, str) and name in builtin_specs() else str(name)


def _find(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The file, and what to call it in messages."""
    known = builtin_specs()
    if isinstance(source, str) and source in known:
        return known[source], label(source)
    path = Path(source)
    if not path.exists() and len(path.parts) <= 1 and not path.suffix:
        near = difflib.get_close_matches(str(source), known, n=1)
        hint = f"; the nearest built-in is {near[0]!r}" if near else ""
        raise InputError(f"{source}: neither a file nor a built-in spec ({', '.join(known)}){hint}")
    return path, str(source)


def _with_absolute_recipe(spec: Spec, marks: Mapping[KeyPath, str], folder: Path) -> Spec:
    """The paths that `train` names, made absolute; the name of a built-in recipe stays."""
    train = spec.train
    if train is None:
        return spec

    def absolute(file: str, *place: str) -> str:
        typed = any(place[:length] in marks for length in range(1, len(place) + 1))
        return os.path.abspath((Path.cwd() if typed else folder) / os.path.expanduser(file))

    recipe, changes = train.recipe, dict(train.set)
    found = absolute(recipe, "train", "recipe")
    if recipe not in builtin_recipes() and (
        os.path.exists(found) or Path(recipe).suffix or len(Path(recipe).parts) > 1
    ):
        recipe = found
    files = changes.get("data.files")
    if isinstance(files, list):
        place = ("train", "set", "data", "files")
        changes["data.files"] = [absolute(file, *place) if isinstance(file, str) else file for file in files]
    return spec.model_copy(update={"train": TrainSpec(recipe=recipe, set=changes)})


def _with_absolute_source(spec: Spec, section: str, folder: Path) -> Spec:
    found: PromptsSpec | QualitySpec | None = getattr(spec, section)
    if found is None or found.source == BUILTIN:
        return spec
    absolute = os.path.abspath(folder / os.path.expanduser(found.source))
    return spec.model_copy(update={section: found.model_copy(update={"source": absolute})})
