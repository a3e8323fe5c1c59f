"""Figures of tokens on their way through depth, of forget factors, and of quality against executed skip.

They draw `analysis.trajectories` and `analysis.matched` and compute nothing. The palette and the look of arms are in
`charts`; groups of tokens have colours of their own (Tol's `bright`), which no arm has.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.charts import INK, PERCENT_AXIS, Look, finished, percents, plain, tint
from analysis.trajectory_tables import half_life

GROUP_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")
#: Panels side by side.
ACROSS = 4
#: Ratio of the largest to the least perplexity from which they are drawn on a logarithmic axis.
LOG_FROM = 4
PANEL = 190


def profile(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """A panel a signal: median over tokens with its interval, and the band between the quartiles, layer by layer.

    Args:
        frame: rows of `trajectories.profile` of one arm, cell and group, not empty.
    """
    figure, panels = _panels(frame)
    colour = look.colours[arm]
    for number, (signal, rows) in enumerate(frame.groupby("signal", sort=False)):
        at = {"row": number // ACROSS + 1, "col": number % ACROSS + 1}
        layers = list(rows["layer"])
        figure.add_scatter(
            x=[*layers, *layers[::-1]], y=[*rows["upper"], *rows["lower"][::-1]], fill="toself", mode="lines",
            fillcolor=tint(colour, 0.25), line={"width": 0}, name="quartiles", showlegend=number == 0, hoverinfo="skip",
            **at,
        )  # fmt: skip
        figure.add_scatter(
            x=layers, y=list(rows["median"]), name="median, 95 % interval", mode="lines+markers",
            line={"color": colour, "width": 1.6}, marker={"color": colour, "size": 5}, showlegend=number == 0,
            error_y=_whiskers(rows, colour), customdata=rows[["lower", "upper"]].to_numpy().tolist(),
            hovertemplate="layer %{x}: median %{y:.3f}, quartiles %{customdata[0]:.3f} to %{customdata[1]:.3f}"
            f"<extra>{plain(str(signal))}</extra>",
            **at,
        )  # fmt: skip
    title = f"{look.names[arm]}: tokens through depth"
    return _finished(figure, panels, title)


def by_group(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """A panel a signal: the median over the tokens of each group, with its interval, layer by layer.

    Args:
        frame: rows of `trajectories.profile` of one arm and cell by one kind of group, not empty.
    """
    figure, panels = _panels(frame)
    colours = dict(zip(dict.fromkeys(frame["group"]), GROUP_COLOURS * len(frame), strict=False))
    for number, (signal, of_signal) in enumerate(frame.groupby("signal", sort=False)):
        at = {"row": number // ACROSS + 1, "col": number % ACROSS + 1}
        for group, rows in of_signal.groupby("group", sort=False):
            colour = colours[group]
            figure.add_scatter(
                x=list(rows["layer"]), y=list(rows["median"]), name=plain(str(group)), mode="lines+markers",
                line={"color": colour, "width": 1.6}, marker={"color": colour, "size": 5}, showlegend=number == 0,
                legendgroup=str(group), error_y=_whiskers(rows, colour),
                customdata=[wording.how_many(n, "token") for n in rows["tokens"]],
                hovertemplate="layer %{x}: median %{y:.3f} of %{customdata}"
                f"<extra>{plain(str(group))}, {plain(str(signal))}</extra>",
                **at,
            )  # fmt: skip
    title = f"{look.names[arm]}: tokens by {frame['by'].iloc[0]}, median and 95 % interval"
    return _finished(figure, panels, title)


def _finished(figure: go.Figure, rows: int, title: str) -> go.Figure:
    above = {"y": 1 + 26 / (PANEL * rows)}  # the legend stands between the title and the titles of the panels
    at_top = {"text": title, "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 8, "l": 4}}
    return finished(figure, 130 + PANEL * rows, title=at_top, margin={"t": 84, "b": 46}, legend=above)


def _panels(frame: pd.DataFrame) -> tuple[go.Figure, int]:
    signals = list(dict.fromkeys(frame["signal"]))
    rows = -(-len(signals) // ACROSS)
    figure = make_subplots(
        rows=rows, cols=min(ACROSS, len(signals)), subplot_titles=[plain(signal) for signal in signals],
        vertical_spacing=54 / (PANEL * rows) if rows > 1 else 0, horizontal_spacing=0.06,
    )  # fmt: skip
    figure.update_annotations(font={"size": 12, "color": INK})
    layers = frame["layer"].nunique()
    figure.update_xaxes(showgrid=False, dtick=-(-layers // 6), tick0=int(frame["layer"].min()))
    figure.update_xaxes(title={"text": "layer"}, row=rows)
    figure.update_yaxes(nticks=5, automargin=True)
    return figure, rows


def forgetting(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Half-life of the memory in routed layers, layer by layer; hovering tells the forget factor.

    Args:
        frame: rows of `trajectories.forgetting` of one arm, not empty.
    """
    figure = go.Figure()
    finite = [None if value == float("inf") else value for value in frame["half_life_layers"]]
    figure.add_bar(
        x=[str(layer) for layer in frame["layer"]], y=finite, marker={"color": look.colours[arm]}, showlegend=False,
        text=[half_life(row) for row in frame.itertuples()], textposition="outside", cliponaxis=False,
        textangle=0, customdata=[(f"{row.forget_factor:.4f}", half_life(row)) for row in frame.itertuples()],
        hovertemplate="layer %{x}: ρ = %{customdata[0]}, half-life %{customdata[1]}<extra></extra>",
    )  # fmt: skip
    for row in frame.itertuples():
        if row.half_life_layers == float("inf"):
            figure.add_annotation(x=str(row.layer), y=0, yanchor="bottom", text="∞", showarrow=False)
    figure.update_xaxes(type="category", showgrid=False, title={"text": "layer"})
    figure.update_yaxes(title={"text": "half-life (routed layers)"}, rangemode="tozero")
    title = f"{look.names[arm]}: after how many layers half of a memory is left"
    return finished(figure, 260, title={"text": title}, margin={"t": 48})


def matched(frame: pd.DataFrame, look: Look) -> go.Figure:
    """Each arm's perplexity against what it stands against; and quality against executed skip, a line a series of arms.

    Args:
        frame: rows of `matched.matched` that have a perplexity, not empty.
    """
    heights = [26 * len(frame) + 20, 200]
    figure = make_subplots(rows=2, cols=1, row_heights=heights, vertical_spacing=62 / (sum(heights) + 62))
    for arm, rows in frame.groupby("arm", sort=False):
        figure.add_scatter(
            x=[1.0 if wording.absent(value) else value for value in rows["ratio"]], y=[look.names[str(arm)]],
            mode="markers", marker=_marker(look, str(arm)), showlegend=False, row=1, col=1,
            error_x=_error(rows, "ratio", "ratio_low", "ratio_high", look.colours[str(arm)]),
            customdata=list(rows["verdict"]), hovertemplate="%{y}: × %{x:.4f}, %{customdata}<extra></extra>",
        )  # fmt: skip
    against_dense = bool(frame["to_dense"].notna().all())
    value, low, high = ("to_dense", "to_dense_low", "to_dense_high") if against_dense else ("perplexity", "low", "high")
    for series, rows in frame.groupby("series", sort=False):
        rows = rows.sort_values("executed_skip")
        colour = look.colours[str(series)]
        figure.add_scatter(
            x=percents(rows["executed_skip"]), y=list(rows[value]), mode="lines+markers", showlegend=False,
            line={"color": colour, "width": 1.4}, marker=_marker(look, str(series)), row=2, col=1,
            error_y=_error(rows, value, low, high, colour), customdata=[look.names[str(arm)] for arm in rows["arm"]],
            hovertemplate="%{customdata}: %{x:.1f} % skipped, %{y:.4f}<extra></extra>",
        )  # fmt: skip
    figure.add_vline(1, line={"color": INK, "width": 1.2}, layer="below", row=1, col=1)
    if against_dense:
        figure.add_hline(1, line={"color": INK, "width": 1.2}, layer="below", row=2, col=1)
    figure.update_xaxes(title={"text": "perplexity ÷ that of the reference (above 1 worse)"}, nticks=5, row=1, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=1, col=1)
    skipped = {"text": "skipped (% of pairs of token and routed layer)"}
    figure.update_xaxes(title=skipped, row=2, col=1, **PERCENT_AXIS)
    figure.update_yaxes(title={"text": "perplexity ÷ dense" if against_dense else "perplexity"}, row=2, col=1)
    if frame[value].max() > LOG_FROM * frame[value].min():
        figure.update_yaxes(type="log", row=2, col=1)
    return finished(figure, 130 + sum(heights), margin={"t": 20})


def _marker(look: Look, arm: str) -> dict[str, Any]:
    return {"color": look.colours[arm], "size": 9, "symbol": _symbol(look, arm)}


#: Arms have six colours, so that more of them differ by mark too.
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")


def _symbol(look: Look, arm: str) -> str:
    same = [name for name, colour in look.colours.items() if colour == look.colours[arm]]
    return _SYMBOLS[same.index(arm) % len(_SYMBOLS)]


def _whiskers(rows: pd.DataFrame, colour: str) -> dict[str, Any]:
    return _error(rows, "median", "low", "high", colour) | {"width": 2}


def _error(rows: pd.DataFrame, value: str, low: str, high: str, colour: str) -> dict[str, Any]:
    """Plotly's error bar from columns that hold a value and its interval; none where there is no interval."""
    above, below = (
        [None if wording.absent(v) else float(v) for v in end]
        for end in (rows[high] - rows[value], rows[value] - rows[low])
    )
    return {
        "type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "thickness": 1.2,
        "width": 4,
    }  # fmt: skip
