"""Wrong answers beside the right one, for generated items: what a multiple-choice question needs.

A worked solution keeps its steps and ends in another number; a call keeps its function and has one argument changed, to
a value that the same parameter has in other requests where it is text. So a wrong choice reads as well as the right
one, and only the question tells them apart. Choices follow from the item's own text alone, and take no draw from the
stream that made it: the items themselves, and what was trained on them, stay as they were.

The text was written for this project. Not here: the items (`generated`), and how choices are scored
(`profiler.quality`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from workloads.draw import Draw
from workloads.generated import generate
from workloads.prompts import Prompt

#: Wrong choices of an item.
WRONG = 3
#: Calls whose arguments are the store of other values.
_STORE = 400
#: Draws for one item before it counts as having no further wrong choice.
_PATIENCE = 200

_ANSWER = re.compile(r"Answer: (-?\d+)\s*$")


def with_choices(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, those of a generated kind with the right and `WRONG` wrong answers as `choices`, in drawn order.

    A prompt of another domain, without a reference, or whose reference has nothing to change, stays as it is.
    """
    return [_one(prompt) for prompt in prompts]


def _one(prompt: Prompt) -> Prompt:
    change = _CHANGES.get(prompt.domain)
    if change is None or prompt.reference is None:
        return prompt
    draw = Draw(f"choices/{prompt.id}/{prompt.text}")
    found = [prompt.reference]
    for _ in range(_PATIENCE):
        wrong = change(prompt.reference, draw)
        if wrong is None:
            return prompt
        if wrong not in found:
            found.append(wrong)
        if len(found) == 1 + WRONG:
            return replace(prompt, choices=tuple(draw.shuffled(found)))
    return prompt


def _another_number(reference: str, draw: Draw) -> str | None:
    """The solution with another last number, in its last step too."""
    answer = _ANSWER.search(reference)
    if answer is None:
        return None
    value = int(answer[1])
    other = value + draw.pick((-1, 1)) * draw.pick((1, 2, 3, 10))
    lines = reference.split("\n")
    for number in range(max(0, len(lines) - 2), len(lines)):
        lines[number] = re.sub(rf"(?<![\d-]){answer[1]}(?!\d)", str(other), lines[number])
    return "\n".join(lines)


def _another_argument(reference: str, draw: Draw) -> str | None:
    """The call with one argument changed."""
    call = json.loads(reference)
    arguments: dict[str, Any] = call["arguments"]
    name = draw.pick(sorted(arguments))
    value = arguments[name]
    if isinstance(value, float):
        arguments[name] = max(0.5, value + draw.pick((-1, 1)) * draw.pick((0.5, 1.0, 2.0)))
    elif isinstance(value, int):
        arguments[name] = max(1, value + draw.pick((-1, 1)) * draw.pick((1, 2, 5, 10)))
    else:
        arguments[name] = draw.pick(_values()[name])
    return json.dumps(call, ensure_ascii=False)


@cache
def _values() -> dict[str, tuple[str, ...]]:
    """Text that generated calls give to a parameter of that name, sorted."""
    found: dict[str, set[str]] = {}
    for name, value in _arguments():
        if isinstance(value, str):
            found.setdefault(name, set()).add(value)
    return {name: tuple(sorted(values)) for name, values in found.items()}


def _arguments() -> Iterator[tuple[str, Any]]:
    for prompt in generate("tool_call", _STORE):
        yield from json.loads(prompt.reference or "{}")["arguments"].items()


_CHANGES: dict[str, Callable[[str, Draw], str | None]] = {"math": _another_number, "tool_call": _another_argument}
