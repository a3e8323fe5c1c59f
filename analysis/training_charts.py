"""Figures of a training: loss, skips and gradients by update, and held-out figures by domain.

They draw `analysis.training`. The palette is in `charts`.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.charts import ARM_COLOURS, MUTED, PERCENT_AXIS, finished, percents, plain
from analysis.routing_charts import EMPTY
from analysis.training import Training, in_windows

#: Columns that a grid of updates has at most; more updates are drawn as means of equally many.
COLUMNS = 400
#: What stands in the place of figures of skips that would all be empty.
UNSKIPPED = "No layer was skipped, neither in an update nor on held-out text, so skips are not drawn."
COLOUR = ARM_COLOURS[0]
PANEL = 130
_SCALE = [[0.0, EMPTY], [1.0, COLOUR]]
_BAR = {
    "tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"], "tickfont": {"size": 11}, "thickness": 8,
    "outlinewidth": 0,
}  # fmt: skip


def curves(training: Training) -> go.Figure:
    """Loss, skip rate (where anything was skipped), gradient norm and regulariser by update, over one axis.

    Args:
        training: one with an update at least.
    """
    steps = training.steps
    panels: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
        ("loss", (("loss", "loss", MUTED), ("lm_nats_per_token", "language model, nats a token", COLOUR))),
        *([("skipped", (("skip_rate", "mean skip rate", COLOUR),))] if training.skipped else []),
        ("gradient norm", (("gradient_norm", "gradient norm, before clipping", COLOUR),)),
        ("regulariser", (("regulariser", "regulariser, before its weight", COLOUR),)),
    )
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=18 / (PANEL * len(panels)),
    )  # fmt: skip
    for place, (title, lines) in enumerate(panels, start=1):
        for column, name, colour in lines:
            values = percents(steps[column]) if column == "skip_rate" else steps[column].tolist()
            figure.add_scatter(
                x=steps["step"].tolist(), y=values, mode="lines+markers" if len(steps) < 3 else "lines", name=name,
                line={"color": colour, "width": 1.6}, showlegend=place == 1, row=place, col=1,
                hovertemplate=f"update %{{x}}, {name}: %{{y:.4~r}}{' %' if column == 'skip_rate' else ''}"
                              "<extra></extra>",
            )  # fmt: skip
        figure.update_yaxes(title={"text": title}, row=place, col=1, nticks=5)
        if title == "skipped":
            figure.update_yaxes(rangemode="tozero", row=place, col=1, **(PERCENT_AXIS | {"nticks": 4}))
        # Norms span orders of magnitude, mostly; and 0 has no place on a logarithmic axis.
        if title == "gradient norm" and steps["gradient_norm"].max() >= 10 * steps["gradient_norm"].min() > 0:
            figure.update_yaxes(type="log", dtick=1, row=place, col=1)
    figure.update_xaxes(title={"text": "update"}, row=len(panels), col=1)
    return finished(figure, 90 + PANEL * len(panels), margin={"t": 36})


def skips(training: Training) -> go.Figure:
    """Share that skipped each routed layer, at every update of which the log tells.

    Args:
        training: one with an update at least of which it tells.
    """
    labels, grid = in_windows(training.skip_steps, training.skip_LK, COLUMNS)
    figure = go.Figure()
    figure.add_heatmap(
        x=list(range(len(labels))), y=list(range(len(grid))), z=(100 * grid).tolist(), customdata=[labels] * len(grid),
        zmin=0, zmax=100, colorscale=_SCALE, colorbar=_BAR,
        hovertemplate="layer %{y}, update %{customdata}: skipped by %{z:.1f} %<extra></extra>",
    )  # fmt: skip
    every = max(1, -(-len(labels) // 12))
    ticks = {"tickmode": "array", "tickvals": list(range(0, len(labels), every)), "ticktext": labels[::every]}
    figure.update_xaxes(title={"text": "update"}, showgrid=False, **ticks)
    figure.update_yaxes(title={"text": "routed layer"}, showgrid=False, autorange="reversed")
    return finished(
        figure, 110 + 11 * max(len(grid), 10), title={"text": "Skipped by layer, % of an update's deciders"},
        margin={"t": 40},
    )  # fmt: skip


def held_out(training: Training) -> go.Figure:
    """Held-out loss with gates open and routed, and the share of layers skipped if any was, by domain and evaluation.

    Args:
        training: one with an evaluation at least.
    """
    heights = [0.66, 0.34] if training.skipped else [1.0]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.08)
    for place, (domain, rows) in enumerate(training.held_out.groupby("domain", sort=False)):
        colour, name = ARM_COLOURS[place % len(ARM_COLOURS)], plain(str(domain))
        for column, what, dash, symbol in (
            ("routed_nats_per_token", "routed", "solid", "circle"),
            ("open_nats_per_token", "gates open", "dot", "circle-open"),
        ):
            figure.add_scatter(
                x=rows["step"].tolist(), y=rows[column].tolist(), mode="lines+markers", name=f"{name}, {what}",
                line={"color": colour, "width": 1.8, "dash": dash}, marker={"size": 7, "symbol": symbol}, row=1, col=1,
                hovertemplate=f"{name}, {what}, after update %{{x}}: %{{y:.3f}} nats a token<extra></extra>",
            )  # fmt: skip
        if training.skipped:
            figure.add_scatter(
                x=rows["step"].tolist(), y=percents(rows["skip_rate"]), mode="lines+markers", showlegend=False,
                line={"color": colour, "width": 1.8}, marker={"size": 7}, row=2, col=1, cliponaxis=False,
                hovertemplate=f"{name}, after update %{{x}}: %{{y:.1f}} % of layers skipped<extra></extra>",
            )  # fmt: skip
    figure.update_yaxes(title={"text": "nats a token"}, row=1, col=1)
    if training.skipped:
        figure.update_yaxes(title={"text": "layers skipped"}, rangemode="tozero", row=2, col=1, **PERCENT_AXIS)
    figure.update_xaxes(title={"text": "update (0: before the first)"}, row=len(heights), col=1)
    return finished(figure, 420 if training.skipped else 300, margin={"t": 56})


def held_out_layers(training: Training) -> go.Figure:
    """Share of each domain's held-out text that skips each routed layer, at the last evaluation.

    Args:
        training: one with an evaluation at least.
    """
    domains = list(training.held_out_skips)
    z = [percents(pd.Series(training.held_out_skips[domain])) for domain in domains]
    figure = go.Figure()
    figure.add_heatmap(
        x=[str(layer) for layer in range(max(map(len, z), default=0))], y=[plain(domain) for domain in domains], z=z,
        zmin=0, zmax=100, xgap=1, ygap=2, colorscale=_SCALE, colorbar=_BAR,
        hovertemplate="%{y}, layer %{x}: skipped by %{z:.1f} %<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(type="category", title={"text": "routed layer"}, showgrid=False, tickangle=0)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    title: dict[str, Any] = {"text": "Skipped by layer at the last evaluation, % of held-out text"}
    return finished(figure, 120 + 30 * len(domains), title=title, margin={"t": 40, "b": 40})
