"""Figures of what decisions about held-out inputs show: layers, their logits, and what decisions follow.

They draw `analysis.diagnostics` and `analysis.tracking` and compute nothing. The palette and the look of arms are in
`charts`.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.charts import GRID, INK, MUTED, PERCENT_AXIS, Look, finished, percents, plain
from analysis.expert_charts import headed
from analysis.routing import ALL_DOMAINS
from analysis.routing_charts import EMPTY
from analysis.tracking import TRACKS


def layers(rates: pd.DataFrame, flips: pd.DataFrame, arm: str, look: Look, *, by_token: bool = False) -> go.Figure:
    """Share of held-out inputs that skip each layer, with intervals; the share that leaves the majority; by domain.

    Args:
        rates: rows of `diagnostics.skip_rates` of one arm and cell, not empty.
        flips: rows of `diagnostics.flip_rates` of the same.
        by_token: tokens decide, so that a rate is the mean over inputs of the share of an input's tokens.
    """
    labels = _labels(flips)
    skipped = "of an input's tokens, mean over inputs" if by_token else "of inputs"
    most = "most tokens decide unlike most inputs" if by_token else "decide unlike most"
    domains = [domain for domain in dict.fromkeys(rates["domain"]) if domain != ALL_DOMAINS]
    heights = [150, 26 * len(domains)] if domains else [150]
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=14 / sum(heights), row_heights=heights
    )
    colour = look.colours[arm]
    everyone = rates[rates["domain"] == ALL_DOMAINS]
    figure.add_bar(
        x=labels, y=percents(everyone["skip_rate"]), name="skipped by", marker={"color": colour},
        error_y=_whiskers(everyone, "skip_rate", percents),
        hovertemplate=f"layer %{{x}}: skipped by %{{y:.1f}} % {skipped}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    figure.add_scatter(
        x=labels, y=percents(flips["flip_rate"]), name=f"{most} (% of inputs)", mode="markers", cliponaxis=False,
        marker={"color": INK, "size": 7, "symbol": "diamond-open", "line": {"width": 1.5}},
        hovertemplate=f"layer %{{x}}: %{{y:.1f}} % of inputs: {most}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    if domains:
        grid = [percents(rates.loc[rates["domain"] == domain, "skip_rate"]) for domain in domains]
        figure.add_heatmap(
            x=labels, y=[plain(domain) for domain in domains], z=grid, zmin=0, zmax=100, xgap=1, ygap=2,
            colorscale=[[0.0, EMPTY], [1.0, colour]], showscale=False, row=2, col=1,
            hovertemplate=f"%{{y}}, layer %{{x}}: skipped by %{{z:.1f}} % {skipped}<extra></extra>",
        )  # fmt: skip
        figure.update_yaxes(autorange="reversed", showgrid=False, row=2, col=1)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title={"text": "layer"}, row=len(heights), col=1)
    figure.update_yaxes(range=[0, 100], row=1, col=1, **PERCENT_AXIS)
    what = "% of tokens that skip each layer, mean over inputs" if by_token else "% of inputs that skip each layer"
    return headed(figure, 78 + sum(heights), arm, look, f"Held-out text, {what}", above=36)


def drift(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Decision logits by layer: where training starts them, and mean and range over held-out inputs.

    Args:
        frame: rows of `diagnostics.drift` of one arm and signal, not empty.
    """
    labels = [str(layer) for layer in frame["layer"]]
    figure = go.Figure()
    figure.add_scatter(
        x=labels, y=list(frame["start"]), name="start of training", mode="markers",
        marker={"color": MUTED, "size": 9, "symbol": "circle-open", "line": {"width": 1.5}},
        hovertemplate="layer %{x}: starts at %{y:.2f}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=labels, y=list(frame["mean"]), name="recorded: mean, and range over inputs", mode="markers",
        marker={"color": look.colours[arm], "size": 8},
        error_y={
            "type": "data", "symmetric": False, "array": list(frame["highest"] - frame["mean"]),
            "arrayminus": list(frame["mean"] - frame["lowest"]), "color": look.colours[arm], "thickness": 1.4,
            "width": 0,
        },
        hovertemplate="layer %{x}: mean %{y:.2f}<extra></extra>",
    )  # fmt: skip
    figure.add_hline(0, line={"color": INK, "width": 1.2}, layer="below")
    figure.update_xaxes(type="category", showgrid=False, title={"text": "layer"})
    figure.update_yaxes(title={"text": "logit (above 0 the layer runs)"})
    return headed(figure, 248, arm, look, "Decision logits at the start and now", above=36)


def forest(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Correlations of the share of layers skipped with each figure of the input: filled where one is shown.

    Args:
        frame: rows of `tracking.tracks` of one arm and target that have a value, not empty.
    """
    colour = look.colours[arm]
    figure = go.Figure()
    for shown, mark, name in ((True, "circle", "related"), (False, "circle-open", "no relation shown")):
        rows = frame[(frame["verdict"] == TRACKS) == shown]
        if rows.empty:
            continue
        figure.add_scatter(
            x=list(rows["rho"]), y=[_tracker(row) for row in rows.itertuples()], name=name, mode="markers",
            marker={"color": colour, "size": 10, "symbol": mark, "line": {"color": colour, "width": 1.5}},
            error_x=_whiskers(rows, "rho", _numbers, colour),
            customdata=[wording.number(value, 2) for value in rows["p_corrected"]],
            hovertemplate="%{y}: ρ = %{x:.2f}, corrected p = %{customdata}<extra></extra>",
        )  # fmt: skip
    figure.add_vline(0, line={"color": INK, "width": 1.2}, layer="below")
    figure.update_xaxes(range=[-1.05, 1.05], title={"text": "Spearman's ρ"}, gridcolor=GRID)
    order = [_tracker(row) for row in frame.itertuples()]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], showgrid=False)
    title = f"{look.names[arm]}: what the share of layers skipped follows"
    return finished(figure, 130 + 30 * len(frame), title={"text": title}, margin={"t": 72})


def _labels(flips: pd.DataFrame) -> list[str]:
    several = flips["site"].nunique() > 1
    return [f"{row.layer} {plain(str(row.site))}" if several else str(row.layer) for row in flips.itertuples()]


def _tracker(row: Any) -> str:
    return plain(str(row.tracker) + ("" if row.held_fixed == "nothing" else ", length held fixed"))


def _numbers(values: pd.Series[float]) -> list[float | None]:
    return [None if wording.absent(value) else float(value) for value in values]


def _whiskers(frame: pd.DataFrame, value: str, scale: Any, colour: str = INK) -> dict[str, Any]:
    """Plotly's error bar from columns low and high, drawn from `value`; none where there is no interval."""
    return {
        "type": "data", "symmetric": False, "array": scale(frame["high"] - frame[value]),
        "arrayminus": scale(frame[value] - frame["low"]), "color": colour, "thickness": 1.4, "width": 4,
    }  # fmt: skip
