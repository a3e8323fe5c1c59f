"""Figures of ranks and placements: what each rank computes, sends and waits for, and how even placements are.

They draw `balance_ranks` and `balance_judged` and compute nothing. Placements have colours and marks of their own, so
that none is taken for an arm. Which experts are chosen is in `expert_charts`, the look of arms in `charts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.balance import ALL_LAYERS
from analysis.balance_ranks import ALL_OPERATIONS, COMBINE, DISPATCH, LOCAL, OTHER_NODE
from analysis.charts import (
    BASELINE,
    GHOST,
    INK,
    MUTED,
    PERCENT_AXIS,
    SEGMENT_COLOURS,
    Look,
    percents,
    plain,
    tint,
)
from analysis.expert_charts import EMPTY, headed

#: Tol's `muted`, apart from the colours of arms, and a mark each.
PLACEMENTS = (
    ("#332288", "circle"), ("#cc6677", "square"), ("#117733", "diamond"), ("#999933", "triangle-up"),
    ("#aa4499", "cross"), ("#44aa99", "x"), ("#882255", "star"),
)  # fmt: skip
EXPERTS, TRANSFER, WAIT = (SEGMENT_COLOURS[name] for name in ("experts", "exchange", "dispatch"))
#: Above this many ranks a matrix has no numbers in it.
RANKS_NUMBERED = 8


# -- ranks ----------------------------------------------------------------------------------------------------------


def rank_loads(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Each rank's share of the weighted FLOPs, and of the token-expert pairs; a line where all would be even.

    Args:
        frame: rows of `balance_ranks.ranks` of one arm and cell.
    """
    names = [_rank_name(r) for r in frame.itertuples()]
    colour = look.colours[arm]
    figure = go.Figure()
    for column, what, shade in (
        ("flop_share", "weighted FLOPs", colour),
        ("pair_share", "token-expert pairs", tint(colour, 0.4)),
    ):
        figure.add_bar(
            x=names, y=percents(frame[column]), name=what, marker={"color": shade},
            hovertemplate=f"%{{x}}: %{{y:.1f}} % of all ranks' {what}<extra></extra>",
        )  # fmt: skip
    figure.add_hline(100 / len(frame), line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(rangemode="tozero", title={"text": "% of all ranks'<br>(dotted: even)"}, **PERCENT_AXIS)
    what = "What each rank computed, all steps and layers together"
    return headed(figure, 250, arm, look, what, barmode="group", bargap=0.3)


def _rank_name(row: Any) -> str:
    return f"rank {row.rank}" + ("" if wording.absent(row.node) else f"<br>node {row.node}")


def rank_times(frame: pd.DataFrame, widths: pd.DataFrame, times: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Ms a step that each rank spent in its experts, in transfers, and waiting for other ranks.

    Args:
        frame: rows of `balance_ranks.ranks` of one arm and cell.
        widths: rows of `balance_ranks.widths` of the same.
        times: rows of `balance_ranks.times` of the same.
    """
    spent = widths.groupby("rank")["ms_per_step"].sum()
    every = times[times["operation"] == ALL_OPERATIONS].set_index("rank")
    names = {rank: _rank_name(row) for rank, row in zip(frame["rank"], frame.itertuples(), strict=True)}
    figure = go.Figure()
    for what, values, colour in (
        ("experts", spent, EXPERTS),
        ("transfer", every["transfer_ms"], TRANSFER),
        ("wait for other ranks", every["wait_ms"], WAIT),
    ):
        if values.empty:
            continue
        figure.add_bar(
            x=list(names.values()), y=[float(values.get(rank, 0.0)) for rank in names], name=what,
            marker={"color": colour, "line": {"color": "#ffffff", "width": 1}},
            hovertemplate=f"%{{x}}, {what}: %{{y:.4~g}} ms a step<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(rangemode="tozero", title={"text": "ms per instrumented step"})
    what = "Time in experts and all-to-alls, and waiting"
    return headed(figure, 250, arm, look, what, barmode="stack", bargap=0.4, legend={"traceorder": "normal"})


def traffic(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Bytes a step from each rank to each, dispatch and combine side by side; local copies are not coloured.

    Args:
        frame: rows of `balance_ranks.traffic` of one arm and cell.
    """
    ranks = sorted(frame["source"].unique())
    sent = frame[frame["link"] != LOCAL]
    most = float(sent["bytes_per_step"].max()) if len(sent) else 0.0
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.16, subplot_titles=[
        "dispatch: tokens to their experts", "combine: results back"])  # fmt: skip
    for col, direction in enumerate((DISPATCH, COMBINE), start=1):
        rows = frame[frame["direction"] == direction]
        of = {(r.source, r.destination): r for r in rows.itertuples()}
        figure.add_heatmap(
            x=list(range(len(ranks))), y=list(range(len(ranks))),
            z=[[None if a == b else of[a, b].bytes_per_step for b in ranks] for a in ranks],
            customdata=[
                [f"{plain(str(of[a, b].link))}: {wording.size(of[a, b].bytes_per_step)} a step, "
                 f"{wording.how_many(of[a, b].tokens, 'token')}" for b in ranks] for a in ranks
            ],
            hovertemplate="rank %{y} to rank %{x}, %{customdata}<extra></extra>", zmin=0, zmax=most or 1.0,
            colorscale=[[0.0, EMPTY], [1.0, tint(look.colours[arm], 0.75)]], showscale=False, xgap=2, ygap=2,
            row=1, col=col,
        )  # fmt: skip
        if len(ranks) <= RANKS_NUMBERED:
            for (a, b), row in of.items():
                local = row.link == LOCAL
                size = wording.size(row.bytes_per_step)
                figure.add_annotation(
                    x=ranks.index(b), y=ranks.index(a), showarrow=False, row=1, col=col,
                    text=f"<i>({size})</i>" if local else f"<b>{size}</b>" if row.link == OTHER_NODE else size,
                    font={"size": 11, "color": MUTED if local else INK},
                )  # fmt: skip
        figure.update_xaxes(title={"text": "to rank"}, row=1, col=col)
        figure.update_yaxes(title={"text": "from rank"} if col == 1 else None, row=1, col=col)
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 12, "color": INK})
    ticks = {"tickmode": "array", "tickvals": list(range(len(ranks))), "ticktext": [str(rank) for rank in ranks]}
    figure.update_xaxes(showgrid=False, **ticks)
    figure.update_yaxes(showgrid=False, autorange="reversed", **ticks)
    return headed(figure, 60 + 44 * max(3, len(ranks)), arm, look, "Payload bytes a step")


# -- placements -----------------------------------------------------------------------------------------------------


def placement_marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each placement, in the order they first come; the eighth has the first's."""
    return {name: PLACEMENTS[k % len(PLACEMENTS)] for k, name in enumerate(dict.fromkeys(names))}


def imbalances(frame: pd.DataFrame, in_force: str | None, look: Look, arm: str) -> go.Figure:
    """P50, P95 and P99 of imbalance under each placement, all layers together.

    Args:
        frame: rows of `balance_judged.imbalances` of one arm and cell.
        in_force: name of the placement it ran with; None where it had none.
    """
    rows = frame[frame["layer"] == ALL_LAYERS]
    names = list(dict.fromkeys(rows["placement"]))
    labels = {name: f"<b>{plain(name)}</b>" if name == in_force else plain(name) for name in names}
    values = rows.set_index(["placement", "percentile"])["value"]
    figure = go.Figure()
    colour = look.colours[arm]
    for name in names:
        ends = [float(values[name, p]) for p in (50, 99)]
        figure.add_scatter(
            x=ends, y=[labels[name]] * 2, mode="lines", line={"color": tint(colour, 0.35), "width": 3},
            hoverinfo="skip", showlegend=False,
        )  # fmt: skip
    for percentile, symbol in ((50, "circle-open"), (95, "diamond"), (99, "line-ns")):
        own = rows[rows["percentile"] == percentile]
        figure.add_scatter(
            x=list(own["value"]), y=[labels[name] for name in own["placement"]], mode="markers",
            name=f"P{percentile}", customdata=[[plain(str(r.placement)), r.n] for r in own.itertuples()],
            marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}},
            hovertemplate=f"%{{customdata[0]}}, P{percentile} of %{{customdata[1]}} values: %{{x:.3f}}<extra></extra>",
        )  # fmt: skip
    figure.add_vline(1, line={"color": INK, "width": 1.2})
    figure.update_xaxes(title={"text": "imbalance of a step and layer (busiest rank ÷ mean)"}, nticks=7)
    figure.update_yaxes(categoryorder="array", categoryarray=list(labels.values()), autorange="reversed")
    figure.update_yaxes(showgrid=False)
    what = "Imbalance by placement, " + ("predicted from recorded loads" if in_force is None else "in force in bold")
    return headed(figure, 60 + 26 * len(names), arm, look, what)


def windows(frame: pd.DataFrame, in_force: str | None, look: Look, arm: str) -> go.Figure:
    """P50, P95 and P99 of imbalance against the tokens of a window, a line a placement.

    Args:
        frame: rows of `balance_judged.window_tails` of one arm, cell and order.
        in_force: name of the placement it ran with, drawn thick; None where it had none.
    """
    sizes = sorted(frame["window"].unique())
    marks = placement_marks(list(frame["placement"]))
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[
        "P50", "P95", "P99"])  # fmt: skip
    for col, percentile in enumerate((50, 95, 99), start=1):
        for name, (colour, symbol) in marks.items():
            own = frame[(frame["placement"] == name) & (frame["percentile"] == percentile)]
            figure.add_scatter(
                x=[sizes.index(size) for size in own["window"]], y=list(own["value"]), mode="lines+markers",
                name=plain(name) + (" (in force)" if name == in_force else ""), legendgroup=name, showlegend=col == 1,
                line={"color": colour, "width": 3 if name == in_force else 1.5},
                marker={"symbol": symbol, "size": 8, "color": colour},
                customdata=[[wording.how_many(r.window, "token"), wording.how_many(r.n, "value")]
                            for r in own.itertuples()],
                hovertemplate=f"{plain(name)}, windows of %{{customdata[0]}}, P{percentile} of "
                              "%{customdata[1]}: %{y:.3f}<extra></extra>", row=1, col=col,
            )  # fmt: skip
        few = frame[(frame["percentile"] == percentile) & frame["marked"]]
        if len(few):
            figure.add_scatter(
                x=[sizes.index(size) for size in few["window"]], y=list(few["value"]), mode="markers",
                marker={"symbol": "circle-open", "size": 15, "color": BASELINE, "line": {"width": 1}},
                name="few values beyond", legendgroup="few", showlegend=col == 2, hoverinfo="skip", row=1, col=col,
            )  # fmt: skip
    figure.update_annotations(font={"size": 12, "color": INK})
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(sizes))), ticktext=[wording.count(size) for size in sizes],
        range=[-0.3, len(sizes) - 0.7], showgrid=False, title={"text": "tokens of a window"},
    )  # fmt: skip
    figure.update_yaxes(range=[1, None], zeroline=False, rangemode="normal")
    figure.update_yaxes(title={"text": "busiest rank ÷ mean"}, row=1, col=1)
    figure.add_hline(1, line={"color": GHOST, "width": 1})
    first = next(frame.itertuples())
    what = f"Imbalance over few tokens, {plain(str(first.order))}"
    legend = {"y": -0.28, "yanchor": "top", "traceorder": "normal"}
    return headed(figure, 340, arm, look, what, legend=legend)
