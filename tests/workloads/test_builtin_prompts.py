"""The prompts that ship: enough of them, well formed, and with references that are right."""

import ast
import contextlib
import io
import json
import operator
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import workloads
from workloads.prompts import BUILTIN_DOMAINS, load_prompts
from workloads.spec import PromptsSpec

FOLDER = Path(workloads.__file__).parent / "prompts"


def rows(domain: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_ids_are_unique_and_the_domains_balanced() -> None:
    found = load_prompts(PromptsSpec())
    assert len({prompt.id for prompt in found}) == len(found)
    assert len({prompt.text for prompt in found}) == len(found)
    assert list(dict.fromkeys(prompt.domain for prompt in found)) == list(BUILTIN_DOMAINS)
    counts = {domain: sum(p.domain == domain for p in found) for domain in BUILTIN_DOMAINS}
    assert min(counts.values()) >= 10
    assert max(counts.values()) - min(counts.values()) <= 2
    assert {path.stem for path in FOLDER.iterdir()} == set(BUILTIN_DOMAINS)


def test_lengths_vary_from_a_line_to_a_page() -> None:
    words = sorted(len(prompt.text.split()) for prompt in load_prompts(PromptsSpec()))
    assert words[0] <= 20
    assert 550 <= words[-1] <= 650
    by_domain = {d: sum(len(p.text.split()) for p in load_prompts(PromptsSpec(domains=[d]))) for d in BUILTIN_DOMAINS}
    assert min(by_domain.values()) >= 1000


def exact(node: ast.AST) -> Fraction:
    """The value of an arithmetic expression in fractions."""
    operations = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }
    match node:
        case ast.Expression(body):
            return exact(body)
        case ast.Constant(int() as value):
            return Fraction(value)
        case ast.BinOp(left, operation, right):
            return Fraction(operations[type(operation)](exact(left), exact(right)))
    raise AssertionError(f"not arithmetic: {ast.dump(node)}")


@pytest.mark.parametrize("row", rows("math"), ids=lambda row: row["id"])
def test_the_answers_of_the_math_prompts_are_right(row: dict[str, Any]) -> None:
    assert exact(ast.parse(row["expression"], mode="eval")) == Fraction(row["reference"])


def test_the_tank_worked_out_day_by_day() -> None:
    (row,) = [row for row in rows("math") if row["id"] == "math-tank"]
    litres = Fraction(2350)
    litres -= 12 * 45
    litres -= 8 * 60 + 35
    litres += 80 * 22 * Fraction(3, 4)
    assert litres <= 4000
    litres -= 3 * 30 + 120
    litres -= 20 * 40
    assert litres * Fraction(95, 100) == Fraction(row["reference"])


@pytest.mark.parametrize("row", [row for row in rows("code") if "reference" in row], ids=lambda row: row["id"])
def test_the_programs_print_what_the_reference_says(row: dict[str, Any]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", row["prompt"], re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert printed.getvalue() == row["reference"] + "\n"


KINDS: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


@pytest.mark.parametrize("row", rows("tool_call"), ids=lambda row: row["id"])
def test_the_reference_calls_fit_the_functions_in_their_prompts(row: dict[str, Any]) -> None:
    described = [json.loads(line) for line in row["prompt"].splitlines() if line.startswith("{")]
    call = json.loads(row["reference"])
    (function,) = [function for function in described if function["name"] == call["name"]]
    properties = function["parameters"]["properties"]
    assert set(function["parameters"]["required"]) <= set(call["arguments"]) <= set(properties)
    for name, value in call["arguments"].items():
        assert isinstance(value, KINDS[properties[name]["type"]])
        assert value in properties[name].get("enum", [value])
    assert all(set(f["parameters"]["required"]) <= set(f["parameters"]["properties"]) for f in described)
