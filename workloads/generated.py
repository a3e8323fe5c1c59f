"""Training text made by rule: arithmetic word problems with worked solutions, and function calls.

    generate("math", 2000, seed=0)          generate("tool_call", 2000, seed=0)

Every item is a `Prompt` with a `reference`: the solution, step by step, ending in `Answer: N`, or the call as one
JSON object. Items of one call are distinct. Choices come from SHA-256 of the seed and a counter, not from a random
generator, so they are the same on every machine and Python. The first `n` items do not depend on how many are
asked for.

The text was written for this project. The kinds are in `generated_math` and `generated_calls`; how items are cut
into batches is not here (`profiler.training_data`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from profiler.errors import InputError
from workloads import generated_calls, generated_math
from workloads.draw import Draw
from workloads.prompts import Prompt

#: Kind → one (prompt, reference) from a draw. A kind is also the domain of its items.
KINDS: dict[str, Callable[[Draw], tuple[str, str]]] = {
    "math": generated_math.problem,
    "tool_call": generated_calls.exchange,
}
#: Draws in a row that may give nothing new before a kind counts as used up.
_PATIENCE = 10_000


def generate(kind: str, count: int, seed: int = 0) -> list[Prompt]:
    """`count` distinct items of a kind, in the order they were drawn.

    Raises:
        InputError: the kind is unknown, or it has fewer distinct items than asked for.
    """
    if kind not in KINDS:
        raise InputError(f"generated text of kind {kind!r} is not known; kinds: {', '.join(KINDS)}")
    found: list[Prompt] = []
    for text, reference in _distinct(kind, seed):
        if len(found) == count:
            break
        found.append(Prompt(id=f"{kind}-{seed}-{len(found)}", domain=kind, text=text, reference=reference))
    if len(found) < count:
        raise InputError(
            f"generated text of kind {kind!r} ends after {len(found):,} distinct items, {count:,} asked for"
        )
    return found


def _distinct(kind: str, seed: int) -> Iterator[tuple[str, str]]:
    draw = Draw(f"{kind}/{seed}")
    seen: set[str] = set()
    stale = 0
    while stale < _PATIENCE:
        text, reference = KINDS[kind](draw)
        stale += 1
        if text not in seen:
            seen.add(text)
            stale = 0
            yield text, reference
