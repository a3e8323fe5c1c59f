"""Reading of YAML and JSON: what YAML 1.1 would misread, and every refusal."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.errors import InputError
from workloads.documents import MAX_BYTES, MAX_DEPTH, MAX_NODES, dump_yaml, parse_json, parse_yaml, read_document

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1:30", "1:30"),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("2024-05-01", "2024-05-01"),
        ("~", None),
        ("", None),
        ("# nothing", None),
        ("'8'", "8"),
        (".nan", ".nan"),
        ("[1, two, {a: b}]", [1, "two", {"a": "b"}]),
        ("!!str 5", "5"),
        ("!!bool yes", False),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(text, "f") == value
    assert type(parse_yaml(text, "f")) is type(value)


@settings(deadline=None, max_examples=200)
@given(PLAIN)
def test_dumped_yaml_reads_back(data: object) -> None:
    assert parse_yaml(dump_yaml({"data": data}), "f") == {"data": data}


@settings(deadline=None)
@given(PLAIN)
def test_json_reads_as_the_json_module_does(data: object) -> None:
    assert parse_json(json.dumps(data), "f") == data


def test_merge_keys_and_anchors_work_and_share_nothing() -> None:
    data = parse_yaml("a: &a {x: {y: 1}}\nb: {<<: *a, z: 2}\nc: *a", "f")
    assert data == {"a": {"x": {"y": 1}}, "b": {"x": {"y": 1}, "z": 2}, "c": {"x": {"y": 1}}}
    data["c"]["x"]["y"] = 5
    assert data["a"]["x"]["y"] == data["b"]["x"]["y"] == 1


def bomb(levels: int, width: int) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "essentials"),
    [
        ("a: 1\nb: 2\na: 3", ["line 3", "'a'", "already given in line 1"]),
        ("x: {p: 1, p: 2}", ["line 1", "'p'"]),
        ("a: [1, 2", ["not YAML", "line 1"]),
        ("a: b: c", ["not YAML", "line 1, column 5"]),
        ("a:\n\t- b", ["not YAML", "line 2"]),
        ("a: *nowhere", ["not YAML", "undefined alias"]),
        ("a: &x [*x]", ["line 1", "alias of itself"]),
        (bomb(20, 9), ["anchors expanded", f"{MAX_NODES:,}"]),
        ("[" * 600 + "]" * 600, [f"deeper than {MAX_DEPTH} levels"]),
        ("[" * 30 + "]" * 30, [f"deeper than {MAX_DEPTH} levels"]),
        ("1: a", ["line 1", "keys must be text", "'1'"]),
        ("true: a", ["keys must be text", "'true'"]),
        ("? [1, 2]\n: a", ["keys must be text", "a list or mapping"]),
        ("a: !!python/object:os.system {}", ["line 1", "!!python/object:os.system", "plain data"]),
        ("a: !mine 1", ["!mine", "plain data"]),
        ("a: !!timestamp 2024-01-01", ["!!timestamp", "plain data"]),
        ("a: !!int abc", ["not a number"]),
        (f"a: {'9' * 5000}", ["not a number we can hold"]),
        ("a: 1e999", ["finite", "inf"]),
        ("a: 1\n---\nb: 2", ["not YAML", "line 2"]),
        ("a: \x00", ["line 1", r"'\x00'"]),
        ('a: "\\ud800"', ["half of a surrogate pair"]),
        ("a: {<<: 3}", ["not YAML", "line 1"]),
    ],
)
def test_yaml_refusals(text: str, essentials: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "the-file.yaml")
    message = str(caught.value)
    assert message.startswith("the-file.yaml: ")
    for essential in essentials:
        assert essential in message


@pytest.mark.parametrize(
    ("text", "essentials"),
    [
        ('{"a": 1, "a": 2}', ["'a'", "twice"]),
        ('{"a": }', ["not JSON", "line 1, column 7"]),
        ('{"a": NaN}', ["NaN"]),
        ('{"a": -Infinity}', ["-Infinity"]),
        ('{"a": 1e999}', ["finite"]),
        ("[" * 100_000, ["deeper than"]),
        ("[" * 30 + "]" * 30, ["deeper than"]),
        ('{"a": ' + "9" * 5000 + "}", ["not a number we can hold"]),
        ('{"a": "\\udfff"}', ["surrogate"]),
    ],
)
def test_json_refusals(text: str, essentials: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "the-file.json")
    for essential in ["the-file.json: ", *essentials]:
        assert essential in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "essentials"),
    [
        (b"", ["the file is empty"]),
        (b" \n\n", ["the file is empty"]),
        (b"name: a\nnote: caf\xe9\n", ["UTF-8", "byte 0xe9", "offset 17", "line 2"]),
        (b"#" * (MAX_BYTES + 1), ["at most 262,144 bytes"]),
    ],
)
def test_files_that_cannot_be_a_document(tmp_path: Path, raw: bytes, essentials: list[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_document(path, "s.yaml")
    for essential in ["s.yaml: ", *essentials]:
        assert essential in str(caught.value)


def test_a_folder_a_missing_file_and_an_impossible_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a folder"):
        read_document(tmp_path, "here")
    with pytest.raises(InputError, match=r"nosuch\.yaml: there is no such file"):
        read_document(tmp_path / "nosuch.yaml", "nosuch.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_document(tmp_path / "a\0b", "odd")


def test_a_byte_order_mark_is_dropped_and_json_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfname: x\n")
    (tmp_path / "a.json").write_bytes(b'{\n\t"name": "x"\n}')  # a tab, which YAML refuses
    assert read_document(tmp_path / "a.yaml", "f") == {"name": "x"} == read_document(tmp_path / "a.json", "f")


def test_a_pipe_or_a_device_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(InputError, match="x: it is a pipe, a device or a socket, which may never end"):
            read_document(path, "x")
