"""Wrong choices of generated items: what they change, what they leave, and that the items stay as they were."""

from __future__ import annotations

import json
import re

import pytest

from workloads.alternatives import WRONG, with_choices
from workloads.generated import generate
from workloads.prompts import Prompt


def test_every_generated_item_has_the_right_answer_and_three_wrong_ones() -> None:
    items = generate("math", 200) + generate("tool_call", 200)
    for before, item in zip(items, with_choices(items), strict=True):
        assert (item.id, item.text, item.reference) == (before.id, before.text, before.reference)
        assert len(item.choices) == len(set(item.choices)) == 1 + WRONG
        assert item.choices.count(item.reference or "") == 1
    places = [item.choices.index(item.reference or "") for item in with_choices(items)]
    assert {places.count(place) > 50 for place in range(1 + WRONG)} == {True}  # no place gives it away


def test_a_wrong_solution_ends_in_another_number_and_keeps_its_steps() -> None:
    for item in with_choices(generate("math", 200)):
        right = re.findall(r"Answer: (-?\d+)$", item.reference or "")
        for choice in item.choices:
            if choice == item.reference:
                continue
            assert re.findall(r"Answer: (-?\d+)$", choice) != right
            assert choice.split("\n")[:-2] == (item.reference or "").split("\n")[:-2]
            assert re.sub(r"-?\d+", "#", choice) == re.sub(r"-?\d+", "#", item.reference or "")


def test_a_wrong_call_differs_in_one_argument() -> None:
    for item in with_choices(generate("tool_call", 200)):
        right = json.loads(item.reference or "")
        for choice in item.choices:
            call = json.loads(choice)
            assert call["name"] == right["name"]
            assert list(call["arguments"]) == list(right["arguments"])
            changed = [key for key in right["arguments"] if call["arguments"][key] != right["arguments"][key]]
            assert len(changed) == (choice != item.reference)


def test_by_hand() -> None:
    solution = "The trays hold 4 × 12 = 48 seeds.\nWith the rest that makes 48 + 2 = 50 seeds.\nAnswer: 50"
    (item,) = with_choices([Prompt("a", "math", "How many?", solution)])
    for choice in item.choices:
        (number,) = re.findall(r"Answer: (\d+)", choice)
        assert choice == solution.replace("50", number)
        assert abs(int(number) - 50) in (0, 1, 2, 3, 10)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt("a", "prose", "Tell me.", "Gladly."),
        Prompt("b", "math", "How many?"),
        Prompt("c", "math", "How many?", "Plenty."),
    ],
)
def test_what_has_nothing_to_change_stays_without_choices(prompt: Prompt) -> None:
    assert with_choices([prompt]) == [prompt]


def test_they_hang_on_the_item_alone() -> None:
    items = generate("math", 5)
    assert with_choices(items)[3] == with_choices(items[3:])[0]
