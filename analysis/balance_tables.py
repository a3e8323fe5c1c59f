"""Frames of `balance_ranks` and `balance_judged` as tables of text. Order, selection and pivots only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from analysis import wording
from analysis.balance import ALL_LAYERS
from analysis.latency import PERCENTILES
from analysis.tables import SMALL, Table, table, text
from profiler.records import QUALITY_CELLS


def cell_label(row: Any) -> str:
    """A cell in words, held-out inputs too, which are none of the sweep."""
    return "held-out inputs" if row.cell in QUALITY_CELLS.values() else wording.row_label(row)


_CELL = ("Cell", False, cell_label)


def of_one_cell(whole: Table) -> Table:
    """A table of this module without its first column, where the cell is said elsewhere."""
    return Table(
        whole.columns[1:], [row[1:] for row in whole.rows], frozenset(place - 1 for place in whole.numeric if place)
    )


def ranks(frame: pd.DataFrame) -> Table:
    """`balance_ranks.ranks`: a line a cell and rank."""
    return table(
        frame,
        [
            _CELL,
            ("Rank", True, lambda r: str(r.rank)),
            ("Node", True, lambda r: text(r.node)),
            ("Token-expert pairs (a step)", True, lambda r: wording.number(r.pairs / r.steps)),
            ("Pairs (% of ranks')", True, lambda r: wording.percent(r.pair_share)),
            ("Weighted FLOPs (a step)", True, lambda r: wording.quantity(r.flops / r.steps, "FLOPs")),
            ("FLOPs (% of ranks')", True, lambda r: wording.percent(r.flop_share)),
            ("FLOPs ÷ mean", True, lambda r: wording.number(r.to_mean)),
            ("Experts held", True, lambda r: wording.count(r.copies)),
            ("Their weights", True, lambda r: wording.size(r.weight_bytes)),
            ("Steps", True, lambda r: wording.count(r.steps)),
        ],
    )


def times(frame: pd.DataFrame) -> Table:
    """`balance_ranks.times`: a line a cell, rank and operation."""
    return table(
        frame,
        [
            _CELL,
            ("Rank", True, lambda r: str(r.rank)),
            ("Operation", False, lambda r: str(r.operation)),
            ("Transfer (ms a step)", True, lambda r: wording.number(r.transfer_ms)),
            ("Wait (ms a step)", True, lambda r: wording.number(r.wait_ms)),
            ("Wait (% of its step)", True, lambda r: wording.percent(r.wait_share)),
            ("Wait P50 (ms)", True, lambda r: wording.number(r.wait_p50_ms)),
            ("Wait P95 (ms)", True, lambda r: wording.number(r.wait_p95_ms)),
            ("Wait P99 (ms)", True, lambda r: wording.number(r.wait_p99_ms)),
            ("Its mean step (ms)", True, lambda r: wording.number(r.step_ms)),
            ("Steps", True, lambda r: wording.count(r.steps)),
        ],
    )


def links(frame: pd.DataFrame) -> Table:
    """`balance_ranks.links`: a line a cell, direction and kind of link."""
    return table(
        frame,
        [
            _CELL,
            ("Direction", False, lambda r: str(r.direction)),
            ("Over", False, lambda r: str(r.link)),
            ("Tokens (all steps)", True, lambda r: wording.count(r.tokens)),
            ("Bytes (a step)", True, lambda r: wording.size(r.bytes_per_step)),
            ("Share (% of the direction)", True, lambda r: wording.percent(r.share)),
        ],
    )


def traffic(frame: pd.DataFrame) -> Table:
    """`balance_ranks.traffic`: a line a cell, direction, source and destination."""
    return table(
        frame,
        [
            _CELL,
            ("Direction", False, lambda r: str(r.direction)),
            ("From rank", True, lambda r: str(r.source)),
            ("To rank", True, lambda r: str(r.destination)),
            ("Over", False, lambda r: str(r.link)),
            ("Tokens (all steps)", True, lambda r: wording.count(r.tokens)),
            ("Bytes (all steps)", True, lambda r: wording.count(r.bytes)),
            ("Bytes (a step)", True, lambda r: wording.size(r.bytes_per_step)),
        ],
    )


def widths(frame: pd.DataFrame) -> Table:
    """`balance_ranks.widths`: a line a cell, rank and width, or one of all of them where they have no times apart."""
    return table(
        frame,
        [
            _CELL,
            ("Rank", True, lambda r: str(r.rank)),
            ("Expert width", True, lambda r: ("all, at " if r.all_widths else "") + wording.count(r.width)),
            ("Time (ms a step)", True, lambda r: wording.number(r.ms_per_step)),
            ("Share (% of the rank's expert time)", True, lambda r: wording.percent(r.share)),
            ("Token-expert pairs (a step)", True, lambda r: wording.number(r.pairs_per_step)),
            ("Reached (GFLOP/s)", True, lambda r: wording.number(r.gflops_per_s)),
            ("Steps", True, lambda r: wording.count(r.steps)),
        ],
    )


def compared(frame: pd.DataFrame) -> Table:
    """`balance_judged.compared`: a line a cell and placement; the one in force is named so."""

    def name(row: Any) -> str:
        return f"{row.placement} (in force)" if row.in_force else str(row.placement)

    return table(
        frame,
        [
            _CELL,
            ("Placement", False, name),
            *((f"P{p} (max ÷ mean)", True, partial(_imbalance, p)) for p in PERCENTILES),
            ("Fullest rank's weights", True, lambda r: wording.size(r.largest_weight_bytes)),
            ("÷ mean of ranks", True, lambda r: wording.number(r.weights_to_mean)),
            ("Predicted step P50 (ms)", True, lambda r: wording.number(r.predicted_p50_ms)),
            ("P95 (ms)", True, lambda r: wording.number(r.predicted_p95_ms)),
            ("Measured P50 (ms)", True, lambda r: wording.number(r.measured_p50_ms)),
            ("Judged on (steps)", True, lambda r: wording.count(r.steps)),
            ("Fitted on", False, lambda r: text(r.fitted_on) + (", these included" if r.fitted_here else "")),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def _imbalance(percentile: int, row: Any) -> str:
    marked = SMALL if getattr(row, f"marked_p{percentile}") else ""
    return wording.number(getattr(row, f"imbalance_p{percentile}")) + marked


def imbalances(frame: pd.DataFrame) -> Table:
    """`balance_judged.imbalances`: a line a cell, placement and layer; few values beyond a percentile are marked."""

    def layer(row: Any) -> str:
        return "all" if row.layer == ALL_LAYERS else str(row.layer)

    head = [("Cell", cell_label), ("Placement", lambda r: str(r.placement)), ("Layer", layer)]
    return _pivoted(frame, ["cell", "placement", "layer"], head)


def windows(frame: pd.DataFrame) -> Table:
    """`balance_judged.window_tails`: a line a cell, order, placement and size of window."""
    head = [
        ("Cell", cell_label),
        ("Tokens that follow each other", lambda r: str(r.order)),
        ("Placement", lambda r: str(r.placement)),
        ("Window (tokens)", lambda r: wording.count(r.window)),
    ]
    return _pivoted(frame, ["cell", "order", "placement", "window"], head)


def _pivoted(frame: pd.DataFrame, key: Sequence[str], head: Sequence[tuple[str, Any]]) -> Table:
    lines = []
    for _, group in frame.groupby(list(key), sort=False):
        of: Mapping[Any, Any] = {row.percentile: row for row in group.itertuples()}
        first = of[PERCENTILES[0]]
        values = [f"{wording.number(of[p].value)}{SMALL if of[p].marked else ''}" for p in PERCENTILES]
        counts = (wording.count(first.n), wording.count(first.idle))
        lines.append((*(say(first) for _, say in head), *values, *counts))
    titles = (*(f"P{p} (max ÷ mean)" for p in PERCENTILES), "Values", "Idle (no token)")
    columns = (*(title for title, _ in head), *titles)
    return Table(columns, lines, frozenset(range(len(head), len(columns))))


def held(frame: pd.DataFrame) -> Table:
    """`balance_judged.held`: a line a placement, a column a rank."""
    every = sorted(frame["rank"].unique())
    lines = []
    for name, group in frame.groupby("placement", sort=False):
        of = group.set_index("rank")
        weights = [wording.size(of.at[rank, "weight_bytes"]) for rank in every]
        lines.append((str(name), *weights, wording.number(of["to_mean"].max())))
    columns = ("Placement", *(f"Rank {rank}" for rank in every), "Fullest ÷ mean")
    return Table(columns, lines, frozenset(range(1, len(columns))))


def layers(frame: pd.DataFrame) -> Table:
    """`balance_ranks.expert_loads`: a line a cell and layer, with its busiest and its quietest expert."""
    lines: list[tuple[str, ...]] = []
    for (_, layer), group in frame.groupby(["cell", "layer"], sort=False):
        if not group["pairs"].sum():
            continue
        first = next(group.itertuples())
        most, least = (group.loc[group["share"].agg(end)] for end in ("idxmax", "idxmin"))
        lines.append(
            (
                cell_label(first),
                str(layer),
                wording.count(group["pairs"].sum()),
                f"{most['name']} ({text(most['width'])})",
                wording.number(most["to_even"]),
                f"{least['name']} ({text(least['width'])})",
                wording.number(least["to_even"]),
                wording.count((group["pairs"] == 0).sum()),
            )
        )
    columns = (
        "Cell", "Layer", "Token-expert pairs", "Busiest expert (width)", "× an even share", "Quietest (width)",
        "× an even share ", "Experts without a token",
    )  # fmt: skip
    return Table(columns, lines, frozenset({1, 2, 4, 6, 7}))


def group_shares(frame: pd.DataFrame) -> Table:
    """`expert_shares.group_shares` over all requests: a line a layer and group."""
    return table(
        frame,
        [
            ("Layer", True, lambda r: "all" if r.layer == ALL_LAYERS else str(r.layer)),
            ("Group", True, lambda r: str(r.group)),
            ("Experts", True, lambda r: wording.count(r.experts)),
            ("Width", True, lambda r: wording.count(r.width)),
            ("Token-expert pairs", True, lambda r: wording.count(r.pairs)),
            ("Share (% of the layer's pairs)", True, lambda r: wording.percent(r.share)),
            ("× an even share", True, lambda r: wording.number(r.to_even)),
        ],
    )
