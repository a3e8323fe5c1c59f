"""Pydantic's complaints as sentences: file, key, rule, and the value that was given.

Not here: the rules themselves (`spec`); sentences raised there pass through as they stand.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from profiler.errors import InputError
from workloads.keys import Path, dotted, known_keys, unknown
from workloads.spec import METHOD_PATTERN, NAME_PATTERN, Spec

MAX_SHOWN = 10

_PATTERNS = {
    NAME_PATTERN: "must be letters, digits, '.', '_' and '-', beginning with a letter or digit",
    METHOD_PATTERN: "must be a method's name, such as layerroute, or a dotted one, such as mypackage.mymethod",
}
_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text (quote it if it is meant)",
    "list_type": "must be a list, such as [1, 8]",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must hold at least {min_length} (it holds {actual_length})",
    "too_long": "must hold at most {max_length} (it holds {actual_length})",
    "string_too_short": "must be at least {min_length} characters long",
    "string_too_long": "must be at most {max_length} characters long",
}
#: A default that depends on a value which is wrong; the wrong value is a complaint of its own.
_FOLLOWS = "default_factory_not_called"
_SAYS_WHAT_WAS_GIVEN = {"rule", "missing", "extra_forbidden", "too_short", "too_long"}


def explain(
    error: ValidationError,
    data: Mapping[str, Any],
    label: str,
    overrides: Mapping[Path, str],
    root: type[BaseModel] = Spec,
) -> InputError:
    """One InputError for everything that is wrong.

    Args:
        error: what pydantic found in `data`.
        data: the spec as read, overrides applied.
        label: the file, as the user named it.
        overrides: from `overrides.apply`; a complaint about a place that one of them set says so.
        root: the model that `data` was checked by.
    """
    details = [d for d in error.errors(include_url=False) if d["type"] != _FOLLOWS]
    lines = [_line(detail, data, overrides, root) for detail in details]
    if len(lines) == 1:
        return InputError(f"{label}: {lines[0]}")
    shown = lines[:MAX_SHOWN] + ([f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else [])
    return InputError(f"{label}: {len(lines)} problems" + "".join(f"\n  {line}" for line in shown))


def _line(detail: ErrorDetails, data: Mapping[str, Any], overrides: Mapping[Path, str], root: type[BaseModel]) -> str:
    path: Path = detail["loc"]
    kind, rule = detail["type"], _rule(detail, data, root)
    given = "" if kind in _SAYS_WHAT_WAS_GIVEN else f", and {show(detail['input'])} was given"
    source = _override(path, overrides)
    return f"{dotted(path)}: {rule}{given}" + (f" (with --set {source})" if source else "")


def _rule(detail: ErrorDetails, data: Mapping[str, Any], root: type[BaseModel]) -> str:
    path: Path = detail["loc"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return unknown(path[:-1], str(path[-1]), root)
        case "missing":
            return "must be given" + _mistaken(path, data, root)
        case "literal_error":
            options = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
            near = difflib.get_close_matches(str(detail["input"]), options, n=1)
            return f"must be one of {', '.join(options)}" + (f" (nearest: {near[0]})" if near else "")
        case "string_pattern_mismatch":
            return _PATTERNS[context["pattern"]]
        case "model_type":
            return f"must be a mapping with keys such as {', '.join(known_keys(path, root)[:3])}"
        case kind if kind in _RULES:
            return _RULES[kind].format_map({key: _bound(value) for key, value in context.items()})
        case _:
            return detail["msg"]


def _mistaken(path: Path, data: Mapping[str, Any], root: type[BaseModel]) -> str:
    """Whether a required key is there under a misspelt name (an arm takes any key, so it is not unknown there)."""
    section: Any = data
    for step in path[:-1]:
        section = section[step]
    known = known_keys(path[:-1], root)
    near = difflib.get_close_matches(str(path[-1]), [key for key in section if key not in known], n=1)
    return f"; did you mean it by {near[0]!r}?" if near else ""


def _override(path: Path, overrides: Mapping[Path, str]) -> str | None:
    """The override that set this place, something in it, or the section it is in; the closest one."""
    for length in range(len(path), 0, -1):
        if path[:length] in overrides:
            return overrides[path[:length]]
    inside = [text for place, text in overrides.items() if place[: len(path)] == path]
    return inside[-1] if inside else None


def _bound(value: Any) -> str:
    return f"{value:,g}" if isinstance(value, float) else show(value)


def show(value: Any) -> str:
    """A value as a reader of the spec would write it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}…{text[0]}"
