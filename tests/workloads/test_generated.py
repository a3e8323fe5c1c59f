"""Generated text: every answer is worked out again from the text alone, every call held against its schema."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest

from profiler.errors import InputError
from workloads import generated, generated_calls, generated_math
from workloads.draw import Draw
from workloads.generated import generate
from workloads.prompts import Prompt

COUNT = 3000
#: Numbers a solution may bring in beside those of its question: parts of a hundred, minutes, halves, three days.
KNOWN = {2, 3, 60, 100}


@pytest.fixture(scope="module")
def problems() -> list[Prompt]:
    return generate("math", COUNT)


@pytest.fixture(scope="module")
def exchanges() -> list[Prompt]:
    return generate("tool_call", COUNT)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_items_are_distinct_and_labelled(problems: list[Prompt], exchanges: list[Prompt]) -> None:
    for items, kind in ((problems, "math"), (exchanges, "tool_call")):
        assert len({item.text for item in items}) == len({item.id for item in items}) == COUNT
        assert {item.domain for item in items} == {kind}


def test_every_equation_holds_and_the_last_one_is_the_answer(problems: list[Prompt]) -> None:
    apply = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__}
    for item in problems:
        assert item.reference is not None
        *lines, last = item.reference.split("\n")
        equations = re.findall(r"(\d+) ([-+×÷]) (\d+) = (\d+)", "\n".join(lines))
        assert len(equations) == item.reference.count(" = ")  # nothing else calculates
        for a, sign, b, result in equations:
            if sign == "÷":
                assert int(b) * int(result) == int(a), item
            else:
                assert apply[sign](int(a), int(b)) == int(result), item
            assert int(result) > 0, item
        assert last == f"Answer: {equations[-1][3]}", item


def test_a_solution_uses_the_question_s_numbers_and_earlier_results_only(problems: list[Prompt]) -> None:
    for item in problems:
        assert item.reference is not None
        available = Counter([*numbers(item.text), *KNOWN])
        for a, b, result in re.findall(r"(\d+) [-+×÷] (\d+) = (\d+)", item.reference):
            assert available[int(a)], item
            assert available[int(b)], item
            available[int(result)] += 1


def test_a_question_s_numbers_are_all_needed(problems: list[Prompt]) -> None:
    """A number that no solution uses would be a slip in its template."""
    for item in problems:
        used = numbers(item.reference or "")
        assert all(number in used or number in KNOWN for number in numbers(item.text)), item


def test_every_template_and_function_comes_up(problems: list[Prompt], exchanges: list[Prompt]) -> None:
    shapes = Counter(re.sub(r"\d+|[A-Z]\w+", "_", item.reference or "") for item in problems)
    assert len(shapes) >= len(generated_math.TEMPLATES)
    called = Counter(json.loads(item.reference or "")["name"] for item in exchanges)
    assert set(called) == {name for function in generated_calls.FUNCTIONS for name in function.names}


def functions_of(item: Prompt) -> dict[str, dict[str, Any]]:
    lines = [line for line in item.text.split("\n") if line.startswith("{")]
    return {function["name"]: function for function in map(json.loads, lines)}


def test_every_call_is_of_an_offered_function_and_fits_its_schema(exchanges: list[Prompt]) -> None:
    offered = Counter()
    for item in exchanges:
        functions = functions_of(item)
        call = json.loads(item.reference or "")
        assert set(call) == {"name", "arguments"}
        schema = functions[call["name"]]["parameters"]
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(call["arguments"], {**schema, "additionalProperties": False})
        offered[len(functions)] += 1
    assert set(offered) == {1, 2}
    assert 0.15 < offered[2] / COUNT < 0.25


def test_every_argument_is_stated_in_the_request(exchanges: list[Prompt]) -> None:
    for item in exchanges:
        request = item.text.rpartition("}\n")[2]
        for value in json.loads(item.reference or "")["arguments"].values():
            assert str(value) in request, item


def test_the_first_items_do_not_depend_on_how_many_are_asked_for(problems: list[Prompt]) -> None:
    assert generate("math", 5) == problems[:5]


def test_seeds_give_other_text() -> None:
    first, second = ({item.text for item in generate("math", 200, seed)} for seed in (0, 1))
    assert len(first & second) < 20


def test_the_text_is_the_same_everywhere() -> None:
    """What the shipped checkpoint was trained on. If this changes, the recipe no longer makes that checkpoint."""
    digests = {
        kind: hashlib.sha256(
            "\n\n".join(f"{item.text}\n{item.reference}" for item in generate(kind, COUNT)).encode()
        ).hexdigest()
        for kind in generated.KINDS
    }
    assert digests == {
        "math": "094b49b4577214252b122f042a9a828112f43812c900c59d447ec34f1c7588ae",
        "tool_call": "1b969315ad5d750e4ec358890543b09ceb34658235a5c3f173622678d3a31087",
    }


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="generated text of kind 'prose' is not known; kinds: math, tool_call"):
        generate("prose", 1)


def test_a_kind_that_runs_dry_says_how_far_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(draw: Draw) -> tuple[str, str]:
        return str(draw.below(3)), ""

    monkeypatch.setitem(generated.KINDS, "small", small)
    assert len(generate("small", 3)) == 3
    with pytest.raises(InputError, match="ends after 3 distinct items, 4 asked for"):
        generate("small", 4)
