"""Key paths of a spec, such as `cells.prefill.batch.0`: what may stand there, and which known key is nearest.

Read off the models' annotations, so a new field is known here without an edit; `root` is the model of the whole
document (a spec, unless a recipe is meant). Not here: values.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from workloads.spec import LATER_KEYS, Spec

Path = tuple[str | int, ...]


def dotted(path: Iterable[str | int]) -> str:
    """`("arms", 1, "gates")` as `arms.1.gates`."""
    return ".".join(str(step) for step in path)


def shape_at(path: Sequence[str | int], root: type[BaseModel] = Spec) -> Any:
    """What may stand at a path: a model class, `list[...]`, a scalar type, or Any under an arm's own options."""
    shape: Any = root
    for step in path:
        if get_origin(shape) is list:
            shape = _bare(get_args(shape)[0])
        elif _is_model(shape) and step in shape.model_fields:
            shape = _bare(shape.model_fields[step].annotation)
        else:
            return Any
    return shape


def known_keys(path: Sequence[str | int], root: type[BaseModel] = Spec) -> list[str]:
    """Keys of the section at a path; empty where there is no section."""
    shape = shape_at(path, root)
    return list(shape.model_fields) if _is_model(shape) else []


def is_closed(path: Sequence[str | int], root: type[BaseModel] = Spec) -> bool:
    """Whether the section at a path takes its known keys only."""
    shape = shape_at(path, root)
    return _is_model(shape) and shape.model_config.get("extra") == "forbid"


def unknown(path: Sequence[str | int], key: str, root: type[BaseModel] = Spec) -> str:
    """The sentence about a key that the section at `path` does not have."""
    if root is Spec and not path and key in LATER_KEYS:
        return "is not part of this version"
    known = known_keys(path, root)
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key; the nearest known is {near[0]!r}" if near else f"unknown key; known here: {', '.join(known)}"


def _is_model(shape: Any) -> bool:
    return isinstance(shape, type) and issubclass(shape, BaseModel)


def _bare(annotation: Any) -> Any:
    """The annotation without constraints and without None; a mapping of any keys is Any."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(arg for arg in get_args(annotation) if arg is not types.NoneType))
    if get_origin(annotation) is dict:
        return Any
    return annotation
