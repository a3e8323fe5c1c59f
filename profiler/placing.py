"""Placements of a run's experts on its ranks: the one in force and others to compare it with, as rows of a table.

Those that follow measured loads are fitted to the first half of the recorded steps; a reader judges on the rest, or
says that it did not. Not here: the placements themselves (`execution.placement`), and judging them
(`analysis.balance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import InputError
from profiler.execution.expert_parallel import by_shape, shape_of
from profiler.execution.placement import BY_SHAPE, Placement, balanced, exact, replicated
from profiler.records import ArmRecord, ParallelRecord
from profiler.writer import Rows

#: Seconds HiGHS may take for one layer; `exact` then says how far from proven it is.
TIME_LIMIT_S = 2.0
#: Cell of rows that are the whole run's.
CELL = "placements"

Load = dict[tuple[int, int], int]
Make = Callable[..., Placement]
FITTED: dict[str, Make] = {
    "balanced": balanced,
    "exact": partial(exact, time_limit_s=TIME_LIMIT_S),
    "replicated": replicated,
}


def placement_rows(arm: ArmRecord, loads: Sequence[tuple[int, Load]]) -> list[Rows]:
    """Rows of `placements` of one arm; what they were fitted to goes into its record.

    Args:
        arm: one with experts.
        loads: recorded steps in order: number, and the tokens that entered each (layer, expert).
    """
    about = arm.parallel
    assert about is not None
    layers = sorted({c.layer for c in arm.choices if c.site == "experts"})
    found = {name: [by_shape(name, about.widths_E, about.per_group, about.ranks)] * len(layers) for name in BY_SHAPE}
    fitted = list(loads)[: -(-len(loads) // 2)]
    if fitted:
        about.fitted_steps = [step for step, _ in fitted]
        tokens = {layer: _summed(fitted, layer, len(about.widths_E)) for layer in layers}
        for name, make in FITTED.items():
            try:
                found[name] = [_fit(make, tokens[layer], about) for layer in layers]
            except InputError as error:
                about.notes[name] = str(error)
                continue
            about.fitted_on[name] = f"the first {len(fitted)} of {len(loads)} recorded steps"
    for name, placements in found.items():
        notes = sorted({placement.note for placement in placements if placement.note is not None})
        if notes:
            about.notes[name] = "; ".join(notes)
    return [
        Rows("placements", CELL, {"arm": arm.name, "placement": name, "layer": layer, **_columns(placement)})
        for name, placements in found.items()
        for layer, placement in zip(layers, placements, strict=True)
    ]


def _fit(make: Make, tokens_E: NDArray[np.int64], about: ParallelRecord) -> Placement:
    widths, per_group = shape_of(about.widths_E, about.per_group)
    return make(tokens_E, widths, per_group, about.ranks)


def _summed(loads: Sequence[tuple[int, Load]], layer: int, experts: int) -> NDArray[np.int64]:
    tokens_E = np.zeros(experts, np.int64)
    for _, load in loads:
        for (where, expert), tokens in load.items():
            if where == layer:
                tokens_E[expert] += tokens
    return tokens_E


def _columns(placement: Placement) -> dict[str, Any]:
    return {name: column.tolist() for name, column in placement.copies._asdict().items()}
