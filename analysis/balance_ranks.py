"""What each rank did, was sent and waited for, from recorded steps: tokens, weighted FLOPs, bytes, transfer, wait.

Everything is given rank by rank, never averaged over them first (MEASURES, rule 12). An all-to-all ends for nobody
before it has ended for the slowest, so of the times the ranks spend in one the smallest is the transfer, and what a
rank spends beyond it is waiting for others. Durations alone are compared: the ranks' clocks need not agree.

Not here: what other placements would have done (`balance_judged`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.balance import PLACEMENT_COLUMNS, weight_table
from analysis.balance_reading import Layout, about_cell, measured_cells, of_steps
from analysis.latency import PERCENTILES
from profiler.store import Run

_CELL = ("arm", "cell", "phase", "batch", "length")
RANK_COLUMNS = (
    *_CELL, "rank", "node", "steps", "pairs", "pair_share", "flops", "flop_share", "to_mean", "copies", "weight_bytes",
)  # fmt: skip
TRAFFIC_COLUMNS = (*_CELL, "direction", "source", "destination", "link", "steps", "tokens", "bytes", "bytes_per_step")
LINK_COLUMNS = (*_CELL, "direction", "link", "tokens", "bytes_per_step", "share")
EXCHANGE_COLUMNS = ("cell", "step", "layer", "operation", "rank", "transfer_ns", "wait_ns")
TIME_COLUMNS = (
    *_CELL, "rank", "operation", "steps", "transfer_ms", "wait_ms", "wait_p50_ms", "wait_p95_ms", "wait_p99_ms",
    "step_ms", "wait_share",
)  # fmt: skip
WIDTH_COLUMNS = (
    *_CELL, "rank", "width", "all_widths", "steps", "ms_per_step", "share", "pairs_per_step", "gflops_per_s",
)  # fmt: skip
EXPERT_COLUMNS = (*_CELL, "layer", "expert", "name", "group", "width", "pairs", "share", "flop_share", "to_even")

LOCAL, SAME_NODE, OTHER_NODE, UNKNOWN = "local copy", "same node", "other node", "node not recorded"
DISPATCH, COMBINE = "dispatch", "combine"
#: `operation` of the rows of `times` that are over all operations.
ALL_OPERATIONS = "all"


def ranks(run: Run, layout: Layout) -> pd.DataFrame:
    """Tokens and weighted FLOPs of each rank, a row a cell and rank, columns `RANK_COLUMNS`.

    Over all recorded steps and layers of the cell. `pairs`: (token, expert) pairs it computed; shares are of all
    ranks'; `to_mean`: its FLOPs ÷ the mean over all ranks, and not the imbalance of any step (`balance.imbalance`).
    `copies` and `weight_bytes`: of the routed experts it holds, NaN where the placement in force is not recorded.
    """
    loads = of_steps(run, "loads", layout.arm)
    held = _held(layout)
    lines = []
    for cell in measured_cells(run, loads):
        own = loads[loads["cell"] == cell.name]
        totals = own.groupby("rank")[["tokens", "flops"]].sum().reindex(range(layout.ran_on), fill_value=0)
        for rank, (_, line) in enumerate(totals.iterrows()):
            copies, weights = held.get(int(str(rank)), (np.nan, np.nan))
            lines.append(
                {
                    "arm": layout.arm, **about_cell(cell), "rank": rank,
                    "node": layout.nodes[rank] if layout.nodes else None, "steps": own["step"].nunique(),
                    "pairs": line["tokens"], "pair_share": line["tokens"] / totals["tokens"].sum(),
                    "flops": line["flops"], "flop_share": line["flops"] / totals["flops"].sum(),
                    "to_mean": line["flops"] / totals["flops"].mean(), "copies": copies, "weight_bytes": weights,
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(RANK_COLUMNS)).astype({"node": "Int64"})


def _held(layout: Layout) -> dict[int, tuple[float, float]]:
    """Rank → copies of experts and bytes of their weights, under the placement in force; empty where it is unknown."""
    placed, experts = layout.placements[layout.placements["placement"] == layout.in_force], layout.experts
    if layout.ran_on == 1:  # it holds all, whatever number of ranks its placements are for
        every = [("alone", layer, e, 0, 0, 1) for layer in layout.layers for e in range(len(experts.widths))]
        placed, experts = pd.DataFrame(every, columns=list(PLACEMENT_COLUMNS)), replace(experts, ranks=1)
    held = weight_table(placed, experts)
    return dict(zip(held["rank"], zip(held["copies"], held["weight_bytes"], strict=True), strict=True))


def expert_loads(run: Run, layout: Layout) -> pd.DataFrame:
    """Tokens of each expert by cell and layer, all ranks together, columns `EXPERT_COLUMNS`; those without any too.

    `share`: of the layer's (token, expert) pairs; `flop_share`: of its weighted FLOPs; `to_even`: `share` × experts.
    """
    loads = of_steps(run, "loads", layout.arm)
    frames = []
    for cell in measured_cells(run, loads):
        own = loads[loads["cell"] == cell.name].groupby(["layer", "expert"])[["tokens", "flops"]].sum()
        for layer, experts in layout.of_layer.items():
            frame = pd.DataFrame([vars(expert) for expert in experts]).rename(columns={"index": "expert"})
            counts = own.loc[layer] if layer in own.index else own.iloc[:0].droplevel(0)
            counts = counts.reindex(frame["expert"], fill_value=0).reset_index(drop=True)
            pairs, flops = counts["tokens"], counts["flops"]
            share = pairs / pairs.sum()
            frames.append(
                frame.assign(
                    arm=layout.arm, **about_cell(cell), layer=layer, pairs=pairs, share=share,
                    flop_share=flops / flops.sum(), to_even=share * len(frame),
                )
            )  # fmt: skip
    if not frames:
        return pd.DataFrame(columns=list(EXPERT_COLUMNS))
    return pd.concat(frames, ignore_index=True)[list(EXPERT_COLUMNS)]


def traffic(run: Run, layout: Layout) -> pd.DataFrame:
    """Payload of both all-to-alls by (source, destination), a row a cell, direction and pair: `TRAFFIC_COLUMNS`.

    Over all recorded steps and layers of the cell; pairs without a token have a row. `link`: `LOCAL` where source is
    destination, which is copied and never sent, else whether both ranks are on one node.
    """
    moved = traffic_rows(run, layout)
    every = [(source, destination) for source in range(layout.ran_on) for destination in range(layout.ran_on)]
    lines = []
    for cell in measured_cells(run, moved):
        own = moved[moved["cell"] == cell.name]
        steps = own["step"].nunique()
        for direction in (DISPATCH, COMBINE):
            totals = own[own["direction"] == direction].groupby(["source", "destination"])[["tokens", "bytes"]].sum()
            for pair, (tokens, size) in zip(every, totals.reindex(every, fill_value=0).to_numpy(), strict=True):
                lines.append(
                    {
                        "arm": layout.arm, **about_cell(cell), "direction": direction, "source": pair[0],
                        "destination": pair[1], "link": _link(layout, *pair), "steps": steps, "tokens": int(tokens),
                        "bytes": int(size), "bytes_per_step": size / steps,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=list(TRAFFIC_COLUMNS))


def traffic_rows(run: Run, layout: Layout) -> pd.DataFrame:
    """Rows of `dispatch` of the steps that count, with `link` as in `traffic`."""
    moved = of_steps(run, "dispatch", layout.arm)
    pairs = zip(moved["source"], moved["destination"], strict=True)
    return moved.assign(link=[_link(layout, int(source), int(destination)) for source, destination in pairs])


def _link(layout: Layout, source: int, destination: int) -> str:
    if source == destination:
        return LOCAL
    if not layout.nodes:
        return UNKNOWN
    return SAME_NODE if layout.nodes[source] == layout.nodes[destination] else OTHER_NODE


def links(moved: pd.DataFrame) -> pd.DataFrame:
    """`traffic` added up by kind of link, columns `LINK_COLUMNS`; `share` is of the direction's bytes."""
    key = [*_CELL, "direction"]
    found = moved.groupby([*key, "link"], sort=False, as_index=False)[["tokens", "bytes_per_step"]].sum()
    found["share"] = found["bytes_per_step"] / found.groupby(key)["bytes_per_step"].transform("sum")
    return found[list(LINK_COLUMNS)]


def exchanges(run: Run, layout: Layout) -> pd.DataFrame:
    """Transfer and wait of each rank in each collective, columns `EXCHANGE_COLUMNS`.

    A collective is one (step, layer, operation). Those that some rank did not record, in a run that was killed, are
    left out: whose time is missing may have been the smallest.
    """
    key = ["cell", "step", "layer", "operation"]
    of_ranks = of_steps(run, "collectives", layout.arm).groupby([*key, "rank"])["dur_ns"].sum()
    spent = of_ranks.reset_index()
    grouped = spent.groupby(key)["dur_ns"]
    whole = spent[grouped.transform("size") == layout.ran_on].copy()
    whole["transfer_ns"] = grouped.transform("min")[whole.index]
    whole["wait_ns"] = whole["dur_ns"] - whole["transfer_ns"]
    return whole[list(EXCHANGE_COLUMNS)].reset_index(drop=True)


def times(run: Run, layout: Layout, found: pd.DataFrame) -> pd.DataFrame:
    """Transfer and wait of each rank a step, by operation and of all of them: columns `TIME_COLUMNS`.

    Args:
        found: `exchanges`.

    Returns:
        `transfer_ms`, `wait_ms`: means over the cell's instrumented steps; `wait_p50_ms` …: percentiles over them of
        the rank's wait in one step. `step_ms`: the rank's own mean instrumented step, and `wait_share` the part of it
        that is wait. `steps`: those with collectives.
    """
    steps = of_steps(run, "steps", layout.arm)
    lines = []
    for cell in measured_cells(run, found):
        own = found[found["cell"] == cell.name]
        both = pd.concat([own.assign(operation=ALL_OPERATIONS), own])
        per_step = both.groupby(["rank", "operation", "step"], sort=False)[["transfer_ns", "wait_ns"]].sum() / 1e6
        counted = steps[steps["step"].isin(own["step"])].groupby("rank")["wall_ns"].mean() / 1e6
        for (rank, operation), each in per_step.groupby(["rank", "operation"], sort=False):
            wait = each["wait_ns"]
            tails = {f"wait_p{p}_ms": float(np.percentile(wait, p, method="linear")) for p in PERCENTILES}
            step_ms = float(counted.get(rank, np.nan))
            lines.append(
                {
                    "arm": layout.arm, **about_cell(cell), "rank": rank, "operation": operation, "steps": len(each),
                    "transfer_ms": float(each["transfer_ns"].mean()), "wait_ms": float(wait.mean()), **tails,
                    "step_ms": step_ms, "wait_share": float(wait.mean()) / step_ms,
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(TIME_COLUMNS))


def widths(run: Run, layout: Layout) -> pd.DataFrame:
    """Time of each rank's experts of one width, columns `WIDTH_COLUMNS`; empty where none was recorded.

    `ms_per_step`: mean over instrumented steps; `share`: of the rank's expert time. `pairs_per_step` and
    `gflops_per_s` are of the steps whose loads were recorded too, NaN where there is none: weighted FLOPs ÷ the time
    of the same steps. `all_widths`: no width has a time of its own, and this is all experts', which run at `width`.
    """
    spent = of_steps(run, "expert_times", layout.arm)
    loads = of_steps(run, "loads", layout.arm)
    width_E = np.array(layout.experts.widths, np.int64)
    loads = loads.assign(width=width_E[loads["expert"].to_numpy()])
    all_widths = layout.times_note is not None and len(set(layout.experts.widths)) > 1
    if all_widths:
        loads["width"] = width_E.max()
    key = ["cell", "step", "rank", "width"]
    done = loads.groupby(key, as_index=False)[["tokens", "flops"]].sum()
    recorded = loads[["cell", "step"]].drop_duplicates().assign(counted=True)
    by_step = spent.groupby(key, as_index=False)["ns"].sum().merge(done, on=key, how="left")
    by_step = by_step.merge(recorded, on=["cell", "step"], how="left")
    lines = []
    for cell in measured_cells(run, by_step):
        own = by_step[by_step["cell"] == cell.name]
        for rank, of_rank in own.groupby("rank"):
            # Of the rank's steps, not of those in which this width had a token.
            steps, whole = of_rank["step"].nunique(), of_rank["ns"].sum()
            counted = of_rank[of_rank["counted"].notna()]
            for width, each in of_rank.groupby("width"):
                both = counted[counted["width"] == width]
                ns = both["ns"].sum()
                lines.append(
                    {
                        "arm": layout.arm, **about_cell(cell), "rank": rank, "width": width,
                        "all_widths": all_widths, "steps": steps,
                        "ms_per_step": each["ns"].sum() / 1e6 / steps, "share": each["ns"].sum() / whole,
                        "pairs_per_step": both["tokens"].sum() / counted["step"].nunique() if len(counted) else np.nan,
                        "gflops_per_s": both["flops"].sum() / ns if ns else np.nan,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=list(WIDTH_COLUMNS))
