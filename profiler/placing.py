"""Placements of a run's experts on its ranks: the one in force and others to compare it with, as rows of a table.

A run of one process has no ranks to place experts on; its placements are for as many as its spec's parallel section
names, or `RANKS`, so that a reader can say what its loads would have done there.

Those that follow measured loads are fitted to the first half of the recorded steps; a reader judges on the rest, or
says that it did not. Not here: the placements themselves (`execution.placement`), and judging them
(`analysis.balance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import InputError
from profiler.execution.expert_parallel import by_shape, shape_of
from profiler.execution.placement import BY_SHAPE, Placement, balanced, exact, replicated
from profiler.records import PLACEMENTS, QUALITY_CELLS, ArmRecord, ParallelRecord
from profiler.store import Run
from profiler.writer import Rows, RunWriter

#: Ranks that experts of one process are placed on for comparison, where nothing says another number.
RANKS = 4
#: Seconds HiGHS may take for one layer, and for all of an arm; `exact` then says how far from proven it is.
TIME_LIMIT_S, ARM_LIMIT_S = 2.0, 10.0

Load = dict[tuple[int, int], int]
Make = Callable[..., Placement]


def place(writer: RunWriter, arms: Iterable[ArmRecord], ranks: int | None = None) -> None:
    """Hand the writer the placements of every arm with experts, from the loads that are recorded by now.

    Args:
        writer: of a run whose other ranks have written what they have.
        arms: those of its manifest; what there is to say of placements goes into their records.
        ranks: to place the experts of one process on; None is `RANKS`. Several processes have their own number.
    """
    with_experts = [arm for arm in arms if arm.parallel is not None]
    if not with_experts:
        return
    writer.flush()
    loads = recorded(Run(writer.folder))
    for arm in with_experts:
        for rows in placement_rows(arm, loads.get(arm.name, []), RANKS if ranks is None else ranks):
            writer.append(rows.table, rows.columns, cell=rows.cell)


def recorded(run: Run) -> dict[str, list[tuple[int, Load]]]:
    """Arm → its recorded steps in order: number, and the tokens that entered each (layer, expert) on all ranks.

    Held-out inputs are left out: their steps are none of a cell that is timed.
    """
    held_out = ", ".join(f"'{cell}'" for cell in QUALITY_CELLS.values())
    rows = run.table("loads").filter(f"cell not in ({held_out})")
    summed = rows.aggregate("arm, step, layer, expert, sum(tokens)::bigint").order("step, layer, expert")
    found: dict[str, dict[int, Load]] = {}
    for arm, step, layer, expert, tokens in summed.fetchall():
        found.setdefault(arm, {}).setdefault(step, {})[layer, expert] = tokens
    return {arm: list(steps.items()) for arm, steps in found.items()}


def placement_rows(arm: ArmRecord, loads: Sequence[tuple[int, Load]], ranks: int = RANKS) -> list[Rows]:
    """Rows of `placements` of one arm; what they were fitted to goes into its record.

    Args:
        arm: one with experts.
        loads: recorded steps in order: number, and the tokens that entered each (layer, expert).
        ranks: to place the experts of one process on, or one for each expert where those are fewer.
    """
    about = arm.parallel
    assert about is not None
    if about.ranks == 1:
        ranks = min(ranks, len(about.widths_E))
        if ranks == 1:
            return []
        about.compared_on = ranks
    else:
        ranks = about.ranks
    layers = sorted({c.layer for c in arm.choices if c.site == "experts"})
    found = {name: [by_shape(name, about.widths_E, about.per_group, ranks)] * len(layers) for name in BY_SHAPE}
    fitted = list(loads)[: -(-len(loads) // 2)]
    if fitted:
        about.fitted_steps = [step for step, _ in fitted]
        tokens = {layer: _summed(fitted, layer, len(about.widths_E)) for layer in layers}
        limit_s = min(TIME_LIMIT_S, ARM_LIMIT_S / len(layers))
        makes: dict[str, Make] = {
            "balanced": balanced,
            "exact": partial(exact, time_limit_s=limit_s),
            "replicated": replicated,
        }
        for name, make in makes.items():
            try:
                found[name] = [_fit(make, tokens[layer], about, ranks) for layer in layers]
            except InputError as error:
                about.notes[name] = str(error)
                continue
            about.fitted_on[name] = f"the first {len(fitted)} of {len(loads)} recorded steps"
    for name, placements in found.items():
        notes = sorted({placement.note for placement in placements if placement.note is not None})
        if notes:
            about.notes[name] = "; ".join(notes)
    return [
        Rows("placements", PLACEMENTS, {"arm": arm.name, "placement": name, "layer": layer, **_columns(placement)})
        for name, placements in found.items()
        for layer, placement in zip(layers, placements, strict=True)
    ]


def _fit(make: Make, tokens_E: NDArray[np.int64], about: ParallelRecord, ranks: int) -> Placement:
    widths, per_group = shape_of(about.widths_E, about.per_group)
    return make(tokens_E, widths, per_group, ranks)


def _summed(loads: Sequence[tuple[int, Load]], layer: int, experts: int) -> NDArray[np.int64]:
    tokens_E = np.zeros(experts, np.int64)
    for _, load in loads:
        for (where, expert), tokens in load.items():
            if where == layer:
                tokens_E[expert] += tokens
    return tokens_E


def _columns(placement: Placement) -> dict[str, Any]:
    return {name: column.tolist() for name, column in placement.copies._asdict().items()}
