"""`--set a.b.c=value`: one place of a spec changed from the command line, before the spec is checked.

A value is YAML (`[1, 8]`, `{ratio: 0.5}`, `true`, nothing for null). A number in a path is a list index.
The path must be one the spec knows; only under an arm are other keys allowed, being its method's own.

Not here: whether the value fits (`spec` says so later, and `explain` names the override).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin

from pydantic import BaseModel

from profiler.errors import InputError
from workloads.documents import parse_yaml
from workloads.keys import Path, dotted, is_closed, known_keys, shape_at, unknown
from workloads.spec import Spec


def apply(data: dict[str, Any], overrides: Sequence[str], root: type[BaseModel] = Spec) -> dict[Path, str]:
    """Change `data`, a document of the model `root`, in place, in order.

    Returns:
        The paths that were set, and those of sections made on the way, each with the override that did it.

    Raises:
        InputError: no `=`, a path that is not there, or a value that is not YAML.
    """
    marks: dict[Path, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        steps = key.strip().split(".")
        if not equals or not all(steps):
            raise InputError(f"--set {override}: must be KEY=VALUE, such as measure.budget_s=60 or arms.1.init=biased")
        value = parse_yaml(text, f"--set {override}")
        marks |= dict.fromkeys(_assign(data, steps, value, f"--set {override}", root), override)
    return marks


def _assign(data: dict[str, Any], steps: list[str], value: Any, label: str, root: type[BaseModel]) -> list[Path]:
    node: Any = data
    path: Path = ()
    made: list[Path] = []
    for number, step in enumerate(steps):
        key = _key(node, path, step, label, root)
        path = (*path, key)
        if number == len(steps) - 1:
            node[key] = value
            return [*made, path]
        child = node[key] if isinstance(key, int) else node.get(key)
        if child is None:
            _refuse_unless_section(path, steps, label, root)
            child = node[key] = {}
            made.append(path)
        node = child
    return made


def _key(node: Any, path: Path, step: str, label: str, root: type[BaseModel]) -> str | int:
    """The key or index that `step` means in `node`."""
    if isinstance(node, list):
        if step.isascii() and step.isdecimal() and int(step) < len(node):
            return int(step)
        have = f"0 to {len(node) - 1}" if node else "none, it is empty"
        raise InputError(f"{label}: {dotted(path)} is a list, and {step!r} is none of its indices ({have})")
    if not isinstance(node, dict):
        raise InputError(f"{label}: {dotted(path)} holds a single value ({node!r}), so nothing can be set under it")
    if is_closed(path, root) and step not in known_keys(path, root):
        raise InputError(f"{label}: {dotted((*path, step))}: {unknown(path, step, root)}")
    return step


def _refuse_unless_section(path: Path, steps: list[str], label: str, root: type[BaseModel]) -> None:
    """Only a section can be begun by setting something under it."""
    shape = shape_at(path, root)
    if get_origin(shape) is list:
        raise InputError(f"{label}: the list {dotted(path)} is not there; set it whole, as in {dotted(path)}=[1, 8]")
    if shape is not Any and not known_keys(path, root):
        raise InputError(f"{label}: {dotted(path)} is a single value, so nothing can be set under it")
