"""Which strategy of `rows` is the faster one for so many rows: tried on this machine, once for each shape.

The break-even depends on the machine (what a host's wait costs, how products do at few rows), so it is measured and not
guessed. What is chosen changes results by rounding only.

A matrix product of few rows may take longer than one of more (seen: 1.4 and 1.6 ms at 2 and 3 rows against 1.15 at 4,
for an FFN of SmolLM2 in float32 on a CPU), so that a step that skips would lose to one that does not. The trial finds
how branch `one` is best run: filled up to more rows, or by another library (`products`). A dense step is left to the
library torch takes; so where the other is faster at any number of rows, a part of what an arm saves is no skip's doing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from profiler.execution import products
from profiler.execution.grouped import aligned
from profiler.execution.rows import Fork, Strategy, Way, Ways


@dataclass(frozen=True)
class Tried:
    """How each branch is best run with so many rows of its own.

    Attributes:
        few: entry n is how branch `one` is best run when n rows are its own.
        more: for more rows than `few` has, ascending bounds, and whether other products are faster up to each; beyond
            the last as up to it.
        compiled: whether torch's own products are compiled for each number of rows (`products`).
    """

    few: tuple[Way, ...] = ()
    more: tuple[tuple[int, bool], ...] = ()
    compiled: bool = False

    @property
    def ways(self) -> Ways:
        """How each branch is run, zero and one."""
        return self.zero, self.one

    def one(self, own: int) -> Way:
        """How branch `one` is run when so many rows are its own."""
        if own < len(self.few):
            return self.few[own]
        other = self.more[min(bisect_left(self.more, (own,)), len(self.more) - 1)][1] if self.more else False
        return Way(products.filled(own) if other or self.compiled else own, other)

    def zero(self, own: int) -> Way:
        """How branch `zero` is run when so many rows are its own."""
        return Way(products.filled(own) if self.compiled else own)


@dataclass(frozen=True)
class Trial:
    """What `auto` does.

    Attributes:
        bounds: ascending row counts of a step that were tried; more rows than the last are treated as the last.
        winners: the faster strategy at each.
        seconds: of each of `STRATEGIES`, at each, as measured for one layer; without `grouped` where it cannot run.
        branches: how `gather` and `overlay` run each branch.
    """

    bounds: tuple[int, ...]
    winners: tuple[Strategy, ...]
    seconds: tuple[tuple[float, ...], ...]
    branches: Tried

    def winner(self, rows: int) -> Strategy:
        """The strategy for a step of so many rows."""
        return self.winners[min(bisect_left(self.bounds, rows), len(self.winners) - 1)]


#: Trials made in this process, by widths, dtype, device and threads.
_TRIALS: dict[tuple[Any, ...], Trial] = {}
#: What is tried for a step; the first is taken unless another is clearly faster.
STRATEGIES: tuple[Strategy, ...] = ("gather", "overlay", "grouped")
_STEP_ROWS = (4, 32, 256, 1024)
#: Branch `one` is tried with 1 to `FEW` rows, and then with these.
_MORE = (16, 48, 128, 384, 1024)
#: Layers that are tried one after the other, so that weights come from memory, as they do in a model.
_LAYERS = 4
#: A step's size is not tried where one layer at the size before took longer: there what waits cost no longer matters.
_PATIENCE_S = 0.005
#: The same for branch `one`, whose products differ at any size: a trial is to stay below a second.
_PATIENCE_ONE_S = 0.012
#: What is not the plain thing must be faster by this much, so that noise does not choose.
_MARGIN = 0.95


def trial(forks: Sequence[Fork], widths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Trial:
    """Time branch `one` at few rows, and the strategies with half of the rows each way; once for each shape.

    Args:
        forks: of the layers, all of one shape.
        widths: of its products; the first is that of its rows, the second that inside branch `one`.
        dtype: of its rows.
        device: where they are.
    """
    key = (widths, dtype, device, torch.get_num_threads())
    if key not in _TRIALS:
        branches = _branches(forks[:_LAYERS], widths[0], dtype, device)
        tried = STRATEGIES if aligned(widths[:2], dtype) else STRATEGIES[:-1]
        _TRIALS[key] = _strategies(tried, forks[:_LAYERS], widths[0], dtype, device, branches)
    return _TRIALS[key]


def _strategies(
    tried: Sequence[Strategy],
    forks: Sequence[Fork],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    branches: Tried,
) -> Trial:
    bounds: list[int] = []
    seconds: list[tuple[float, ...]] = []
    for rows in _STEP_ROWS:
        if seconds and max(seconds[-1]) > _PATIENCE_S:
            break
        x_Nd = torch.ones((rows, width), dtype=dtype, device=device)
        one_N = torch.arange(rows, device=device) % 2 == 0
        bounds.append(rows)
        runs = [[partial(fork.run, by, x_Nd, one_N, ways=branches.ways) for fork in forks] for by in tried]
        seconds.append(_seconds(runs, device))
    winners = tuple(tried[_clearly(taken)] for taken in seconds)
    return Trial(tuple(bounds), winners, tuple(seconds), branches)


def _branches(forks: Sequence[Fork], width: int, dtype: torch.dtype, device: torch.device) -> Tried:
    """How each branch is best run."""
    forms = range(1 if forks[0].one.run_other is None else 2)

    def tried(rows: int) -> tuple[float, ...]:
        x_nd = torch.ones((rows, width), dtype=dtype, device=device)
        return _seconds([[partial(_one(fork, bool(form)), x_nd) for fork in forks] for form in forms], device)

    taken = [tried(rows) for rows in range(1, products.FEW + 1)]
    few = [Way(0)]
    for own in range(1, products.FEW + 1):
        options = [
            (Way(rows, bool(form)), taken[rows - 1][form]) for rows in range(own, products.FEW + 1) for form in forms
        ]
        few.append(options[_clearly([seconds for _, seconds in options])][0])
    found: list[tuple[int, bool]] = []
    for rows in _MORE:
        if taken[-1][0] > _PATIENCE_ONE_S:
            break
        taken.append(tried(rows))
        found.append((rows, bool(_clearly(taken[-1]))))
    return Tried(tuple(few), tuple(found), products.compiled(dtype, device))


def _one(fork: Fork, other: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    by = fork.one.run_other if other else None
    return fork.one.run if by is None else by


def _clearly(seconds: Sequence[float]) -> int:
    """The place of the shortest, or 0, the plain thing's, where that is nearly as short."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] < _MARGIN * seconds[0] else 0


def _seconds(runs: Sequence[Sequence[Callable[[], Any]]], device: torch.device) -> tuple[float, ...]:
    """Of each, the median of five passes over its layers, divided by their number; they take turns."""
    taken: list[list[float]] = [[] for _ in runs]
    with torch.no_grad():
        for _ in range(6):  # one of them warms up
            for layers, times in zip(runs, taken, strict=True):
                began = time.perf_counter()
                for layer in layers:
                    layer()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - began)
    return tuple(sorted(times[1:])[2] / len(layers) for layers, times in zip(runs, taken, strict=True))
