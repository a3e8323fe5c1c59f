"""Which strategy of `rows` is the faster one for so many rows: tried on this machine, once for each shape.

The break-even depends on the machine (what a host's wait costs, how products do at few rows), so it is measured and not
guessed. What is chosen changes results by rounding only.

Some matrix products take longer for 2 or 3 rows than for 4 (seen: 1.4 and 1.6 against 1.15 ms for an FFN of SmolLM2 in
float32 on a CPU), so that a step that skips would lose to one that does not; the trial finds how far to fill up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from profiler.execution.rows import Fork, Strategy


@dataclass(frozen=True)
class Trial:
    """What `auto` does.

    Attributes:
        bounds: ascending row counts of a step that were tried; more rows than the last are treated as the last.
        winners: the faster strategy at each.
        seconds: (gather, grouped) at each, as measured for one layer.
        fill: entry n is how many rows branch `one` is best run with when n are its own.
    """

    bounds: tuple[int, ...]
    winners: tuple[Strategy, ...]
    seconds: tuple[tuple[float, float], ...]
    fill: tuple[int, ...]

    def winner(self, rows: int) -> Strategy:
        """The strategy for a step of so many rows."""
        for bound, strategy in zip(self.bounds, self.winners, strict=True):
            if rows <= bound:
                return strategy
        return self.winners[-1]


#: Trials made in this process, by widths, dtype, device and threads.
_TRIALS: dict[tuple[Any, ...], Trial] = {}
_TRIED_ROWS = (4, 32, 256, 1024)
#: Branch `one` is tried with 1 to so many rows.
_FILLED = 8
#: Layers that are tried one after the other, so that weights come from memory, as they do in a model.
_LAYERS = 4
#: A size is not tried where one layer at the size before took longer: there what waits cost no longer matters.
_PATIENCE_S = 0.005
#: What is not the plain thing must be faster by this much, so that noise does not choose.
_MARGIN = 0.95


def trial(forks: Sequence[Fork], widths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Trial:
    """Time `gather` and `grouped` with half of the rows each way, and branch `one` at few rows; once for each shape.

    Args:
        forks: of the layers, all of one shape.
        widths: of its products; the first is that of its rows.
        dtype: of its rows.
        device: where they are.
    """
    key = (widths, dtype, device, torch.get_num_threads())
    if key not in _TRIALS:
        _TRIALS[key] = _try(forks[:_LAYERS], widths[0], dtype, device)
    return _TRIALS[key]


def _try(forks: Sequence[Fork], width: int, dtype: torch.dtype, device: torch.device) -> Trial:
    bounds: list[int] = []
    seconds: list[tuple[float, float]] = []
    for rows in _TRIED_ROWS:
        if seconds and max(seconds[-1]) > _PATIENCE_S:
            break
        x_Nd = torch.ones((rows, width), dtype=dtype, device=device)
        one_N = torch.arange(rows, device=device) % 2 == 0
        bounds.append(rows)
        seconds.append(
            (
                _seconds([partial(fork.run, "gather", x_Nd, one_N) for fork in forks], device),
                _seconds([partial(fork.run, "grouped", x_Nd, one_N) for fork in forks], device),
            )
        )
    winners: tuple[Strategy, ...] = tuple(
        "grouped" if grouped < _MARGIN * gather else "gather" for gather, grouped in seconds
    )
    return Trial(tuple(bounds), winners, tuple(seconds), _fill(forks, width, dtype, device))


def _fill(forks: Sequence[Fork], width: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    taken = [0.0]
    for rows in range(1, _FILLED + 1):
        x_nd = torch.ones((rows, width), dtype=dtype, device=device)
        taken.append(_seconds([partial(fork.one.run, x_nd) for fork in forks], device))
    best = [0]
    for rows in range(1, _FILLED + 1):
        more = min(range(rows, _FILLED + 1), key=taken.__getitem__)
        best.append(more if taken[more] < _MARGIN * taken[rows] else rows)
    return tuple(best)


def _seconds(layers: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median of five passes over the layers, divided by their number; one more warms up."""
    taken = []
    with torch.no_grad():
        for _ in range(6):
            began = time.perf_counter()
            for layer in layers:
                layer()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
    return sorted(taken[1:])[2] / len(layers)
