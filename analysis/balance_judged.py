"""Placements of a run's experts judged on what it recorded: imbalance, tails over few tokens, predicted step times.

The arithmetic is `balance`'s; here it meets a run: one phase and cell at a time, every placement on the same steps, and
for predicted times the speeds that the run itself reached. A placement looks better than it is on the steps it was
fitted to, so all are judged on the others of a cell; where it has no others, `fitted_here` says so.

Not here: making placements (the profiler does), and what ranks were measured to do (`balance_ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis import balance
from analysis.balance import COMPARISON_COLUMNS, IMBALANCE_COLUMNS, WEIGHT_COLUMNS, WINDOW_COLUMNS, WINDOWS, Speeds
from analysis.balance_ranks import COMBINE, DISPATCH, LOCAL, traffic_rows
from analysis.balance_reading import Layout, about_cell, cells_with_routes, measured_cells, of_steps, routes
from analysis.latency import PERCENTILES, SAMPLES_BEYOND, samples_beyond, step_samples
from profiler.store import Run

_CELL = ("arm", "cell", "phase", "batch", "length")
JUDGED_COLUMNS = (*_CELL, "steps", "fitted_here", *IMBALANCE_COLUMNS)
COMPARED_COLUMNS = (
    *_CELL, "steps", *COMPARISON_COLUMNS, "values", *(f"marked_p{p}" for p in PERCENTILES), "in_force", "fitted_on",
    "fitted_here", "note", "measured_p50_ms",
)  # fmt: skip
TAILS_COLUMNS = (*_CELL, "order", "tokens", "fitted_here", *WINDOW_COLUMNS)
HELD_COLUMNS = ("arm", *WEIGHT_COLUMNS)

#: `placement` of what the ranks really computed. It differs from the placement in force where experts have copies,
#: between which every rank counts its own tokens.
AS_RUN = "as run"


def imbalances(run: Run, layout: Layout) -> pd.DataFrame:
    """Imbalance per step and layer, by cell: as it ran, where several ranks did, then under each placement.

    Returns:
        Columns `JUDGED_COLUMNS`; see `balance.imbalance_table`. `steps`: those judged. Empty with one rank to be on.
    """
    if layout.experts.ranks == 1:
        return pd.DataFrame(columns=list(JUDGED_COLUMNS))
    frame = of_steps(run, "loads", layout.arm)
    ran_on = replace(layout.experts, ranks=layout.ran_on)
    tables = []
    for cell in measured_cells(run, frame):
        own, fitted_here = layout.judged(frame[frame["cell"] == cell.name])
        load = balance.loads(own, len(layout.experts.widths))
        flops = {AS_RUN: balance.recorded_flops(own, ran_on)} if layout.ran_on > 1 else {}
        for name, placed in layout.placements.groupby("placement", sort=False):
            flops[str(name)] = balance.rank_flops(load, placed, layout.experts)
        table = balance.imbalance_table(flops, load.layers)
        about = {**about_cell(cell), "steps": len(load.tokens), "fitted_here": fitted_here}
        tables.append(table.assign(arm=layout.arm, **about))
    if not tables:
        return pd.DataFrame(columns=list(JUDGED_COLUMNS))
    return pd.concat(tables, ignore_index=True)[list(JUDGED_COLUMNS)]


@dataclass(frozen=True)
class Reached:
    """Speeds of a rank that a run reached, and what must be said of them."""

    speeds: Speeds
    sentence: str


def reached(run: Run, layout: Layout, exchanged: pd.DataFrame) -> Reached | None:
    """What the ranks' experts and links reached in the recorded steps, for predictions; None without expert times.

    Args:
        exchanged: `balance_ranks.exchanges`.

    FLOPs a second, and bytes of touched weights a second: Σ ÷ Σ expert time of a cell, of the cell with the most. An
    all-to-all's fixed time and bytes a second: least squares of the transfer on the busiest rank's remote bytes, one
    way; where bytes explain nothing, its median is all fixed. A single process moves nothing, which predicts 0.
    """
    key = ["cell", "step", "layer", "rank"]
    spent = of_steps(run, "expert_times", layout.arm).groupby(key, as_index=False)["ns"].sum()
    loads = of_steps(run, "loads", layout.arm)
    size_E = 3 * layout.experts.hidden * layout.experts.itemsize * np.array(layout.experts.widths, np.int64)
    loads = loads.assign(read=size_E[loads["expert"].to_numpy()])
    both = loads.groupby(key, as_index=False)[["flops", "read"]].sum().merge(spent, on=key)
    if both.empty:
        return None
    of_cell = both.groupby("cell")[["flops", "read", "ns"]].sum()
    flops_per_s = float((of_cell["flops"] / of_cell["ns"]).max() * 1e9)
    read_per_s = float((of_cell["read"] / of_cell["ns"]).max() * 1e9)
    fixed_ns, link_per_s = _link(run, layout, exchanged)
    experts = (
        f"As fast as this run's experts were in their best cell: {flops_per_s / 1e9:,.2f} GFLOP/s where products "
        f"decide, {read_per_s / 1e9:,.2f} GB/s of weights where reading does"
    )
    if layout.ran_on == 1:
        moved = "nothing was moved in a single process, so dispatch and combine count as 0"
    elif np.isinf(link_per_s):
        moved = f"an all-to-all {fixed_ns / 1e3:,.1f} µs whatever its bytes, which did not show in its time"
    else:
        moved = f"an all-to-all {fixed_ns / 1e3:,.1f} µs and {link_per_s / 1e9:,.2f} GB/s"
    return Reached(Speeds(flops_per_s, read_per_s, link_per_s, fixed_ns), f"{experts}; {moved}.")


def _link(run: Run, layout: Layout, exchanged: pd.DataFrame) -> tuple[float, float]:
    """Fixed ns of an all-to-all, and bytes a second."""
    key = ["cell", "step", "layer", "operation"]
    moves = exchanged[exchanged["operation"].isin([DISPATCH, COMBINE])]
    transfer = moves.groupby(key, as_index=False)["transfer_ns"].first()
    moved = traffic_rows(run, layout).rename(columns={"direction": "operation"})
    moved = moved[moved["link"] != LOCAL]
    busiest = [moved.groupby([*key, end])["bytes"].sum().groupby(key).max() for end in ("source", "destination")]
    both = transfer.merge(pd.concat(busiest).groupby(key).max().reset_index(), on=key)
    if both.empty:
        return 0.0, float("inf")
    bytes_N, ns_N = both["bytes"].to_numpy(np.float64), both["transfer_ns"].to_numpy(np.float64)
    spread = bytes_N - bytes_N.mean()
    slope = float(spread @ ns_N / (spread @ spread)) if spread.any() else 0.0
    fixed = float(ns_N.mean() - slope * bytes_N.mean())
    if slope <= 0 or fixed < 0:
        return float(np.median(ns_N)), float("inf")
    return fixed, 1e9 / slope


def compared(run: Run, layout: Layout, exchanged: pd.DataFrame, found: Reached | None) -> pd.DataFrame:
    """One row a cell and placement, on the same steps: imbalance, weights, predicted step time.

    Args:
        exchanged: `balance_ranks.exchanges`.
        found: `reached`; without it predicted times are NaN.

    Returns:
        Columns `COMPARED_COLUMNS`; see `balance.comparison`. `steps`: those judged; `values`: steps and layers that
        imbalance has a value of, and `marked_*` where fewer than `SAMPLES_BEYOND` lie beyond the percentile.
        `fitted_here`: the placement was fitted to these steps. `predicted_*` are of whole steps: to the experts and
        their all-to-alls the rest of the cell's instrumented steps is added, as it was (median over steps of the
        slowest rank's time without experts, dispatch, combine, and its waits). `measured_p50_ms`: the instrumented
        steps themselves, of the placement in force; NaN elsewhere. Empty with one rank to be on.
    """
    if layout.experts.ranks == 1 or layout.placements.empty:
        return pd.DataFrame(columns=list(COMPARED_COLUMNS))
    frame = of_steps(run, "loads", layout.arm)
    samples = step_samples(run)
    timed = samples[(samples["arm"] == layout.arm) & (samples["pass"] == "instrumented")]
    rest = _rest_ns(run, layout, exchanged)
    tables = []
    for cell in measured_cells(run, frame):
        own, fitted_here = layout.judged(frame[frame["cell"] == cell.name])
        load = balance.loads(own, len(layout.experts.widths))
        speeds = None
        if found is not None and cell.name in rest:
            speeds = replace(found.speeds, rest_ns=rest[cell.name])
        table = balance.comparison(load, layout.placements, layout.experts, speeds)
        values = int((load.tokens.sum(-1) > 0).sum())
        marked = {f"marked_p{p}": samples_beyond(values, p) < SAMPLES_BEYOND for p in PERCENTILES}
        walls = timed.loc[timed["cell"] == cell.name, "wall_ns"]
        in_force = table["placement"] == layout.in_force
        tables.append(
            table.assign(
                arm=layout.arm, **about_cell(cell), steps=len(load.tokens), values=values, **marked, in_force=in_force,
                fitted_on=table["placement"].map(layout.fitted_on),
                fitted_here=table["placement"].isin(layout.fitted_on) & fitted_here,
                note=table["placement"].map(layout.notes),
                measured_p50_ms=np.where(in_force, walls.median() / 1e6, np.nan),
            )
        )  # fmt: skip
    if not tables:
        return pd.DataFrame(columns=list(COMPARED_COLUMNS))
    return pd.concat(tables, ignore_index=True)[list(COMPARED_COLUMNS)]


def _rest_ns(run: Run, layout: Layout, exchanged: pd.DataFrame) -> dict[str, float]:
    """Cell → ns of an instrumented step that are neither experts nor what a prediction says of collectives."""
    steps = of_steps(run, "steps", layout.arm)
    key = ["cell", "step", "rank"]
    walls = steps[steps["pass"] == "instrumented"].set_index(key)["wall_ns"].astype(float)
    spent = of_steps(run, "expert_times", layout.arm).groupby(key)["ns"].sum()
    moves = exchanged["operation"].isin([DISPATCH, COMBINE])
    predicted_ns = exchanged["wait_ns"] + exchanged["transfer_ns"].where(moves, 0)
    gone = predicted_ns.groupby([exchanged[column] for column in key]).sum()
    rest = walls - spent.reindex(walls.index, fill_value=0) - gone.reindex(walls.index, fill_value=0)
    timed = pd.DataFrame({"wall": walls, "rest": rest}).reset_index().sort_values("wall", kind="stable")
    slowest = timed.drop_duplicates(["cell", "step"], keep="last").merge(
        spent.reset_index()[["cell", "step"]].drop_duplicates()
    )
    return {str(cell): float(ns) for cell, ns in slowest.groupby("cell")["rest"].median().items()}


def held(layout: Layout) -> pd.DataFrame:
    """Routed experts' weight bytes on each rank under each placement, columns `HELD_COLUMNS`."""
    return balance.weight_table(layout.placements, layout.experts).assign(arm=layout.arm)[list(HELD_COLUMNS)]


def window_tails(run: Run, layout: Layout, sizes: Sequence[int] = WINDOWS) -> pd.DataFrame:
    """Imbalance over windows of so many tokens, by cell and by what follows what: columns `TAILS_COLUMNS`.

    See `balance.window_table`; `order` is one of `balance_reading`'s, `tokens` are all that windows were made of.
    Held-out inputs are a cell of their own here. Empty with one rank to be on.
    """
    tables = []
    if layout.experts.ranks > 1 and len(layout.placements):
        for cell in cells_with_routes(run, layout.arm):
            found, fitted_here = routes(run, layout, cell.name)
            for order, routes_TLK in found.items():
                table = balance.window_table(routes_TLK, layout.layers, layout.placements, layout.experts, sizes)
                about = {**about_cell(cell), "order": order, "tokens": len(routes_TLK), "fitted_here": fitted_here}
                tables.append(table.assign(arm=layout.arm, **about))
    if not tables:
        return pd.DataFrame(columns=list(TAILS_COLUMNS))
    return pd.concat(tables, ignore_index=True)[list(TAILS_COLUMNS)]
