"""Choices that are the same on every machine and every Python: SHA-256 of a name and a counter.

`random.Random` promises that only for `random()`, not for the choices made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices fixed by `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def below(self, bound: int) -> int:
        """A whole number from 0 to `bound − 1`, evenly: 64 bits reduced, a bias below 2⁻⁴⁰ for bounds below 2²⁴."""
        digest = hashlib.sha256(f"{self._name}/{self._count}".encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:8], "big") % bound

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """True in `percent` of a hundred draws."""
        return self.below(100) < percent

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in another order; every order is equally likely."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]
