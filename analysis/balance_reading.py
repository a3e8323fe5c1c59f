"""What a run folder says of its experts: their widths, the ranks they were and could be on, and who was sent to them.

One `Layout` an arm that recorded loads; its frames are read here so that everything about balance counts the same
steps. Warm-up is left out, and so are held-out inputs, except from `routes`, where nothing is timed.

Not here: what follows from them for ranks (`balance_ranks`), and for placements (`balance_judged`).

Legend: T tokens, L layers with experts, K experts a token takes at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.balance import PLACEMENT_COLUMNS, Experts
from analysis.experts import SITE, Expert, experts_of
from analysis.latency import QUALITY, cells
from analysis.skips import rows_of
from profiler.records import QUALITY_CELLS, CellRecord
from profiler.store import Run

#: How tokens follow each other in a window: those of one input, or those at one position of different inputs, which
#: is what a decode step with that many sequences has.
INPUT, BATCH = "along an input", "across inputs"


@dataclass(frozen=True)
class Layout:
    """Experts of one arm and where they are.

    Attributes:
        experts: widths and sizes; its `ranks` are those of the placements, which a single process is judged by too.
        of_layer: layer → its experts, by name, group and width.
        ran_on: ranks that ran.
        in_force: the placement they had; None of a single process, which has every expert.
        nodes: node of each rank that ran, numbered from 0; empty where it was not recorded.
        placements: `PLACEMENT_COLUMNS`, the one in force first.
        fitted_on: what placements were fitted to, by their name, and `fitted_steps` the steps that is; `notes`: what
            must be said beside one.
        times_note: why there is no time of each width; None where there is.
        products: how experts were multiplied, where that depends on the machine.
    """

    arm: str
    experts: Experts
    of_layer: dict[int, list[Expert]]
    ran_on: int
    in_force: str | None
    attention: str
    nodes: tuple[int, ...]
    placements: pd.DataFrame
    fitted_on: dict[str, str]
    fitted_steps: frozenset[int]
    notes: dict[str, str]
    times_note: str | None
    products: str | None

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have experts."""
        return tuple(self.of_layer)

    def judged(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
        """Rows of the steps that placements are judged on: those that none was fitted to.

        Args:
            frame: rows of one cell, with a column `step`.

        Returns:
            The rows; and whether there was no other step, so that they are all the cell has and some placement was
            fitted to them.
        """
        if not self.fitted_on:
            return frame, False
        others = frame[~frame["step"].isin(self.fitted_steps)]
        return (frame, True) if others.empty else (others, False)


def layouts(run: Run) -> list[Layout]:
    """One an arm of which loads were recorded, in the run's order."""
    recorded = {str(arm) for (arm,) in run.table("loads").project("arm").distinct().fetchall()}
    found = []
    for arm in run.manifest.arms:
        about = arm.parallel
        if arm.name not in recorded or about is None:
            continue
        placed = rows_of(run.table("placements"), arm=arm.name).df()[list(PLACEMENT_COLUMNS)]
        in_force = about.placement if about.ranks > 1 else None
        ahead = placed["placement"] == in_force
        placed = pd.concat([placed[ahead], placed[~ahead]], ignore_index=True)
        ranks = max(about.ranks, about.compared_on or 1)
        node_of = {name: number for number, name in enumerate(dict.fromkeys(about.nodes))}
        found.append(
            Layout(
                arm=arm.name,
                experts=Experts(tuple(about.widths_E), about.hidden, about.itemsize, ranks),
                of_layer=experts_of(arm, about.hidden),
                ran_on=about.ranks,
                in_force=in_force,
                attention=about.attention,
                nodes=tuple(node_of[name] for name in about.nodes),
                placements=placed,
                fitted_on=dict(about.fitted_on),
                fitted_steps=frozenset(about.fitted_steps),
                notes=dict(about.notes),
                times_note=about.times_note,
                products=about.products,
            )
        )
    return found


def of_steps(run: Run, table: str, arm: str) -> pd.DataFrame:
    """Rows of a table of one arm whose step counts: neither warm-up nor of held-out inputs, and recorded itself.

    A killed run may have rows of a step whose own row it lacks.
    """
    steps = rows_of(run.table("steps"), arm=arm).filter(f"pass not in ('warmup', '{QUALITY}')")
    counted = steps.project("cell, step").distinct().df()
    found: pd.DataFrame = rows_of(run.table(table), arm=arm).df().merge(counted, on=["cell", "step"])
    return found


def measured_cells(run: Run, frame: pd.DataFrame) -> list[CellRecord]:
    """The run's cells that have rows in `frame`, in its order."""
    there = set(frame["cell"])
    return [cell for cell in cells(run) if cell.name in there]


def about_cell(cell: CellRecord) -> dict[str, Any]:
    """The columns by which every table names a cell."""
    return {"cell": cell.name, "phase": cell.phase, "batch": cell.batch, "length": cell.length}


def routes(run: Run, layout: Layout, cell: str) -> tuple[dict[str, NDArray[np.int64]], bool]:
    """Experts each token of a cell takes, in both orders that make windows of them: `INPUT` and `BATCH`.

    Of the steps that `Layout.judged` says. Along an input makes no sense where a cell's steps have one token of each,
    and is left out. Tokens of which some layer is not recorded are left out too; one recorded again counts once.

    Returns:
        Order → `[T, L, K]`, −1 where a token takes fewer, empty where nothing is recorded; and as `Layout.judged`.
    """
    gates = rows_of(run.table("gates"), arm=layout.arm, cell=cell, site=SITE).filter("position >= 0")
    frame = gates.project("step, rank, request, position, layer, phase, choices").df()
    if frame.empty:
        return {}, False
    frame, fitted_here = layout.judged(frame)
    frame = frame.sort_values(["step", "rank"], kind="stable").drop_duplicates(["request", "position", "layer"])
    sizes = frame.groupby(["request", "position"])["layer"].transform("size")
    frame = frame[sizes == len(layout.layers)]
    first_seen = {request: place for place, request in enumerate(_in_order(run, cell, frame))}
    frame = frame.assign(owner=frame["request"].map(first_seen))
    widest = int(frame["choices"].map(len).max()) if len(frame) else 0
    found = {}
    for order, keys in ((INPUT, ["owner", "position"]), (BATCH, ["position", "owner"])):
        if order == INPUT and set(frame["phase"]) == {"decode"}:
            continue
        lines = frame.sort_values([*keys, "layer"], kind="stable")["choices"]
        routes_TLK = np.full((len(lines), widest), -1, np.int64)
        for line, taken in enumerate(lines):
            routes_TLK[line, : len(taken)] = taken
        found[order] = routes_TLK.reshape(-1, len(layout.layers), widest)
    return found, fitted_here


def _in_order(run: Run, cell: str, frame: pd.DataFrame) -> list[str]:
    """Requests of `frame` in the order of the cell's prompts."""
    there = set(frame["request"])
    listed = dict.fromkeys(str(name) for name in rows_of(run.table("prompts"), cell=cell).df()["request"])
    return [*(name for name in listed if name in there), *sorted(there - set(listed))]


def cells_with_routes(run: Run, arm: str) -> list[CellRecord]:
    """Cells in which an arm's choices of experts were recorded; held-out inputs last, as a cell of their own."""
    gates = rows_of(run.table("gates"), arm=arm, site=SITE)
    there = {str(cell) for (cell,) in gates.project("cell").distinct().fetchall()}
    held_out = QUALITY_CELLS["prefix"]
    extra = [CellRecord(name=held_out, phase="prefill", batch=0, length=0)] if held_out in there else []
    return [*(cell for cell in cells(run) if cell.name in there), *extra]
