"""Text files in, plain data out: YAML 1.2 scalars or JSON, with everything that could mislead refused.

Refused: bytes that are not UTF-8, a key given twice, keys that are not text, tags beyond plain data, numbers
that are not finite, anchors that contain themselves or expand into more than `MAX_NODES` values, nesting
deeper than `MAX_DEPTH`, files past `MAX_BYTES`. PyYAML's own rules (YAML 1.1) read `1e-3` as text, `no` as
false and `1:30` as ninety; the resolvers here are those of YAML 1.2's core schema instead.

Not here: what the keys mean (`spec`) and which file is read (`loading`).
"""

from __future__ import annotations

import json
import math
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from profiler.errors import InputError

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 24

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_SCALARS = {
    "merge": (r"<<", "<"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
}


class _Loader(yaml.SafeLoader):
    """Plain data only, with the scalars above."""


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would otherwise not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
for _kind, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _text(dumper: yaml.representer.BaseRepresenter, text: str) -> yaml.ScalarNode:
    # PyYAML folds some separators (U+0085 among them) into spaces in any style but the double-quoted.
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    text = str(loader.construct_scalar(node))
    try:
        if node.tag == _TAG + "float":
            return float(text)
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, "not a number we can hold", node.start_mark) from error


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return str(loader.construct_scalar(node)).lower() == "true"


_Dumper.add_representer(str, _text)
_Loader.add_constructor(_TAG + "int", _number)
_Loader.add_constructor(_TAG + "float", _number)
_Loader.add_constructor(_TAG + "bool", _boolean)


def read_bytes(path: Path, label: str, limit: int) -> bytes:
    """The bytes of a file; InputError if it is missing, no ordinary file, unreadable or larger than `limit` bytes."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise InputError(f"{label}: it is a folder; a file was expected")
        if not stat.S_ISREG(kind):
            raise InputError(
                f"{label}: it is a pipe, a device or a socket, which may never end; write what it gives into a file"
            )
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError as error:
        raise InputError(f"{label}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{label}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > limit:
        raise InputError(f"{label}: the file must be at most {limit:,} bytes, and it is larger")
    return raw


def decode(raw: bytes, label: str) -> str:
    """UTF-8 text (a byte order mark is dropped); InputError naming the first wrong byte and its line."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{label}: must be UTF-8 text, and byte 0x{raw[error.start]:02x} at offset {error.start:,} "
            f"(line {line:,}) is not"
        ) from error


def read_document(path: Path, label: str) -> Any:
    """The data of a `.json` file, or of a YAML file with any other ending.

    Raises:
        InputError: unreadable, empty, or one of the refusals of this module; the message starts with `label`.
    """
    text = decode(read_bytes(path, label, MAX_BYTES), label)
    if not text.strip():
        raise InputError(f"{label}: the file is empty")
    return parse_json(text, label) if path.suffix.lower() == ".json" else parse_yaml(text, label)


def parse_yaml(text: str, label: str) -> Any:
    """The data of one YAML document (None if it holds nothing); InputError as for `read_document`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, label, {}, set())
        return _plain(loader.construct_document(node), label)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{label}: not YAML: line {line}: character {chr(error.character)!a} is not allowed"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{label}: not YAML: {where}{error.problem or error.context}") from error
    except RecursionError as error:
        raise InputError(f"{label}: nested deeper than {MAX_DEPTH} levels") from error


def _check(node: yaml.Node, label: str, sizes: dict[int, tuple[int, int]], opened: set[int]) -> tuple[int, int]:
    """Values under `node` with anchors expanded, and their depth; counted once per node, so a bomb costs nothing."""
    line = node.start_mark.line + 1
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in opened:
        raise InputError(f"{label}: line {line}: the anchor holds an alias of itself")
    if node.tag not in _PLAIN_TAGS:
        raise InputError(f"{label}: line {line}: the tag {node.tag.replace(_TAG, '!!')} is not plain data")
    opened.add(id(node))
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
        _check_keys(node, label)
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    found = [_check(child, label, sizes, opened) for child in children]
    size = 1 + sum(s for s, _ in found)
    depth = 1 + max((d for _, d in found), default=0)
    if size > MAX_NODES:
        raise InputError(
            f"{label}: line {line}: holds {size:,} values with its anchors expanded, at most {MAX_NODES:,}"
        )
    if depth > MAX_DEPTH:
        raise InputError(f"{label}: line {line}: nested deeper than {MAX_DEPTH} levels")
    opened.discard(id(node))
    sizes[id(node)] = (size, depth)
    return size, depth


def _check_keys(node: yaml.MappingNode, label: str) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag not in (_TAG + "str", _TAG + "merge") or not isinstance(key, yaml.ScalarNode):
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise InputError(f"{label}: line {line}: keys must be text, and {shown} is not (quote it if it is meant)")
        if key.value in seen:
            raise InputError(f"{label}: line {line}: the key {key.value!r} was already given in line {seen[key.value]}")
        seen[key.value] = line


def parse_json(text: str, label: str) -> Any:
    """The data of one JSON text; InputError as for `read_document`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(items)
        if len(data) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{label}: the key {twice!r} is given twice in one object")
        return data

    def constant(name: str) -> Any:
        raise InputError(f"{label}: {name} is not a number JSON allows")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{label}: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise InputError(f"{label}: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{label}: not a number we can hold: {error}") from error
    return _plain(data, label)


def _plain(value: Any, label: str, depth: int = 1) -> Any:
    """A copy in which nothing is shared, so that changing one place (`--set`) changes no other."""
    if depth > MAX_DEPTH:
        raise InputError(f"{label}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {_plain(k, label, depth): _plain(v, label, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item, label, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{label}: numbers must be finite, and one of them is {value}")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"{label}: {ascii(value)[:80]} holds half of a surrogate pair, which is not text")
    return value


def dump_yaml(data: Any) -> str:
    """YAML that `parse_yaml` reads back to equal data; collections of plain values on one line."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))
