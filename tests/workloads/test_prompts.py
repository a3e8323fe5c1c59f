"""Prompts from a JSONL file: what is read, what is chosen, what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from workloads import prompts as module
from workloads.prompts import Prompt, load_prompts
from workloads.spec import PromptsSpec, QualitySpec

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data" / "prompts"


def lines(path: Path, rows: Sequence[Any]) -> PromptsSpec:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return PromptsSpec(source=str(path))


def refusal(spec: PromptsSpec, base: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load_prompts(spec, base)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_line_needs_only_a_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": " as it stands\n"},
        {"prompt": "b", "domain": "math", "id": "m1", "reference": "4", "other": [1]},
        {"prompt": "c", "domain": None, "id": 7, "reference": {"b": 1, "a": "é"}},
        {"prompt": "d", "id": None, "reference": 0},
    ]
    assert load_prompts(lines(tmp_path / "p.jsonl", rows)) == [
        Prompt("line-1", "default", " as it stands\n", None),
        Prompt("7", "default", "c", '{"b": 1, "a": "é"}'),
        Prompt("line-4", "default", "d", "0"),
        Prompt("m1", "math", "b", "4"),
    ]


def test_blank_lines_windows_line_ends_separators_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n  \n{"prompt": "ü"}\r\n'.encode())
    found = load_prompts(PromptsSpec(source=str(path)))
    assert [(p.id, p.text) for p in found] == [("line-1", "a\u2028b"), ("line-4", "ü")]


def test_a_relative_source_starts_at_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "p.jsonl", [{"prompt": "a"}])
    assert [p.text for p in load_prompts(PromptsSpec(source="p.jsonl"), tmp_path)] == ["a"]
    monkeypatch.chdir(tmp_path)
    assert [p.text for p in load_prompts(PromptsSpec(source="p.jsonl"))] == ["a"]


def domains(spec: PromptsSpec, **changes: Any) -> list[str]:
    return [prompt.id for prompt in load_prompts(spec.model_copy(update=changes))]


def test_domains_come_in_the_order_of_the_spec(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "id": f"{d}{i}", "domain": d} for i in range(2) for d in "abc"]
    spec = lines(tmp_path / "p.jsonl", rows)
    assert domains(spec) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert domains(spec, domains=["c", "a"]) == ["c0", "c1", "a0", "a1"]


def test_count_takes_evenly_and_by_the_seed(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "id": f"{d}{i}", "domain": d} for d in "ab" for i in range(10)]
    rows.append({"prompt": "x", "id": "c0", "domain": "c"})
    spec = lines(tmp_path / "p.jsonl", rows)
    seven = domains(spec, count=7)
    assert [identity[0] for identity in seven] == list("aaabbbc")  # c has one, so the others give its share
    assert domains(spec, count=7) == seven
    assert domains(spec, count=7, seed=1) != seven
    assert set(seven) < set(domains(spec, count=9))
    assert domains(spec, count=1000) == domains(spec)
    assert "prompts.count (2) must be at least the number of domains (3)" in refusal(
        spec.model_copy(update={"count": 2})
    )


@pytest.mark.parametrize(
    ("raw", "essentials"),
    [
        (b"", ["at least one prompt", "empty"]),
        (b"\n  \n", ["at least one prompt", "empty"]),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', ["UTF-8", "byte 0xe9", "offset 31", "line 2"]),
        ('{"prompt": "a"}'.encode("utf-16"), ["UTF-8", "byte 0xff", "offset 0", "line 1"]),
        (b'{"prompt": "a"}\n{"prompt": "b"\n', ["line 2", "not JSON", "column 15"]),
        (b'{"prompt": "a"}\n\nhello\n', ["line 3", "not JSON"]),
        (b'["prompt"]', ["line 1", "must be a JSON object"]),
        (b'{"promt": "a", "id": 1}', ["line 1", "'prompt' must be given", "'promt', 'id'"]),
        (b"{}", ["line 1", "'prompt' must be given", "none"]),
        (b'{"prompt": ""}', ["line 1", "'prompt' must not be empty"]),
        (b'{"prompt": " \\n"}', ["line 1", "'prompt' must not be empty"]),
        (b'{"prompt": null}', ["line 1", "'prompt' must be text", "NoneType"]),
        (b'{"prompt": ["a"]}', ["line 1", "'prompt' must be text", "list"]),
        (b'{"prompt": "a", "domain": 3}', ["line 1", "'domain' must be text", "int"]),
        (b'{"prompt": "a", "domain": ""}', ["line 1", "'domain' must not be empty"]),
        (b'{"prompt": "a", "id": true}', ["line 1", "'id' must be text", "bool"]),
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', ["line 2", "unique", "'x' is that of line 1"]),
        (b'{"prompt": "a", "id": "line-2"}\n{"prompt": "b"}', ["line 2", "'line-2' is that of line 1"]),
        (b'{"prompt": "\\ud83d"}', ["line 1", "surrogate"]),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000, ["line 1", "not JSON"]),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", ["line 1", "not JSON"]),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, raw: bytes, essentials: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(raw)
    message = refusal(PromptsSpec(source=str(path)))
    assert message.startswith(f"prompts.source: {path}: ")
    for essential in essentials:
        assert essential in message


def test_no_file_a_folder_and_a_file_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nosuch.jsonl: there is no such file" in refusal(PromptsSpec(source="nosuch.jsonl"), tmp_path)
    assert "it is a folder" in refusal(PromptsSpec(source="."), tmp_path)
    assert module.MAX_BYTES == 67_108_864
    monkeypatch.setattr(module, "MAX_BYTES", 20)
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "123456"}\n')
    assert "must be at most 20 bytes" in refusal(PromptsSpec(source="p.jsonl"), tmp_path)


def test_a_domain_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    spec = lines(tmp_path / "p.jsonl", [{"prompt": "a", "domain": "math"}, {"prompt": "b"}])
    message = refusal(spec.model_copy(update={"domains": ["math", "maths", "code"]}))
    assert "prompts.domains" in message
    assert "no prompt of domain 'maths', 'code'; it has 'math', 'default'" in message
    builtin = refusal(PromptsSpec(domains=["poetry"]))
    assert "builtin has no prompt of domain 'poetry'; it has 'math', 'code', 'tool_call', 'prose'" in builtin


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@pytest.mark.parametrize(
    ("name", "count", "domain"), [("gsm8k", 600, "math"), ("humaneval", 100, "code"), ("bfcl_simple", 300, "tool_call")]
)
def test_real_files(name: str, count: int, domain: str) -> None:
    found = load_prompts(PromptsSpec(source=f"{name}.jsonl"), SHARED)
    assert len(found) == count
    assert {prompt.domain for prompt in found} == {domain}
    assert all(prompt.reference for prompt in found)


def test_items_of_the_quality_section_are_chosen_alike_and_its_errors_name_it(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "id": f"{d}{i}", "domain": d, "reference": "y"} for d in "ab" for i in range(10)]
    prompts = lines(tmp_path / "p.jsonl", rows).model_copy(update={"count": 6})
    quality = QualitySpec(source=prompts.source, count=6)
    assert load_prompts(quality) == load_prompts(prompts)
    assert {prompt.reference for prompt in load_prompts(quality)} == {"y"}
    for changes, said in (
        ({"count": 1}, "quality.count (1) must be at least the number of domains (2)"),
        ({"domains": ["c"]}, "quality.domains: "),
        ({"source": str(tmp_path / "none.jsonl")}, "quality.source: "),
    ):
        with pytest.raises(InputError) as caught:
            load_prompts(quality.model_copy(update=changes))
        assert str(caught.value).startswith(said)


def test_choices_are_kept_in_their_order_and_must_hold_the_reference(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "2 + 2?", "reference": "4", "choices": ["5", "4", "22"]}
    (prompt,) = load_prompts(lines(tmp_path / "p.jsonl", [row]))
    assert (prompt.reference, prompt.choices) == ("4", ("5", "4", "22"))
    for wrong, said in (
        ({"choices": ["5", "6"]}, "'reference' must be one of 'choices'"),
        ({"choices": ["4"]}, "must be two texts or more, no two of them alike; there are 1, 1 of them different"),
        ({"choices": ["4", "5", "5"]}, "there are 3, 2 of them different"),
        ({"choices": ["4", 5]}, "must be a list of texts that are not empty"),
        ({"choices": "4"}, "must be a list of texts"),
        ({"reference": None}, "'reference' must be one of 'choices'"),
    ):
        assert said in refusal(lines(tmp_path / "p.jsonl", [row | wrong]))
