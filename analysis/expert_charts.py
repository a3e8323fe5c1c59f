"""Figures of which experts and groups tokens take: layer by layer, group by group, domain by domain.

They draw `expert_shares` (and `balance_ranks.expert_loads`, which has the same columns) and compute nothing. Ranks and
placements are in `balance_charts`; the palette and the look of arms in `charts`.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.charts import INK, PERCENT_AXIS, Look, finished, percents, plain
from analysis.expert_shares import ALL_LAYERS
from analysis.routing import ALL_DOMAINS

EMPTY = "#f1f3f5"
#: With more experts than this the axis names the first of each group only.
EXPERTS_NAMED = 32
#: With more groups than this only the numbers of group and width fit above them.
GROUPS_SPELT = 4
_EXPERT, _EXPERT_BELOW = "expert", "expert (above: its group, and the group's width)"
#: Characters of a title's line that fit where two figures stand side by side, and its height.
TITLE_CHARACTERS, TITLE_PIXELS = 58, 17


def headed(
    figure: go.Figure, height: int, arm: str, look: Look, what: str, *, above: int = 30, **layout: Any
) -> go.Figure:
    """`figure` finished, `what` it shows and of which arm in as many lines above it as that needs.

    Args:
        height: pixels without the title.
        above: pixels between title and plot, for a legend or labels.
    """
    lines = textwrap.wrap(f"{what}: {look.names[arm]}", TITLE_CHARACTERS, break_long_words=False)
    top = 18 + TITLE_PIXELS * len(lines)
    title = {"text": "<br>".join(lines), "y": 1, "yref": "container", "yanchor": "top", "pad": {"l": 4, "t": 16}}
    return finished(figure, height + top + above, title=title, margin={"t": top + above}, **layout)


def expert_heat(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Layer × expert, coloured by how often it was chosen beside an even share; groups and their widths above.

    Args:
        frame: rows of `expert_shares.expert_shares` (one domain) or `balance_ranks.expert_loads` of one arm and cell.
    """
    first = frame[frame["layer"] == frame["layer"].iloc[0]]
    layers = list(dict.fromkeys(frame["layer"]))
    grid = frame.pivot(index="layer", columns="expert", values="to_even").loc[layers, list(first["expert"])]
    hovers = frame.assign(
        said=[
            f"layer {r.layer}, {plain(str(r.name))}{_wide(r.width, ', width ')}: {wording.count(r.pairs)} token-expert "
            f"pairs, {wording.percent(r.share)} of the layer's"
            for r in frame.itertuples()
        ]
    ).pivot(index="layer", columns="expert", values="said")
    figure = go.Figure()
    figure.add_heatmap(
        x=list(range(len(first))), y=[str(layer) for layer in layers], z=_gaps(grid), zmin=0,
        customdata=hovers.loc[layers, list(first["expert"])].to_numpy().tolist(),
        hovertemplate="%{customdata}, %{z:.2f} × an even share<extra></extra>", xgap=1, ygap=2,
        colorscale=[[0.0, EMPTY], [1.0, look.colours[arm]]],
        colorbar={"title": {"text": "× even", "font": {"size": 11}}, "thickness": 8, "outlinewidth": 0,
                  "tickfont": {"size": 11}, "nticks": 4},
    )  # fmt: skip
    groups = list(first.reset_index(drop=True).groupby("group", sort=False))
    for place, (group, members) in enumerate(groups):
        start, end = int(members.index[0]), int(members.index[-1])
        if place:
            figure.add_vline(start - 0.5, line={"color": INK, "width": 1})
        figure.add_annotation(
            x=(start + end) / 2, y=1, yref="paper", yanchor="bottom", showarrow=False, font={"size": 11, "color": INK},
            text=_group_label(int(str(group)), members, len(groups)),
        )  # fmt: skip
    named = len(first) <= EXPERTS_NAMED
    figure.update_xaxes(
        showgrid=False, title={"text": _EXPERT if len(groups) <= GROUPS_SPELT else _EXPERT_BELOW},
        tickmode="array", tickangle=0,
        tickvals=list(range(len(first))) if named else [int(m.index[0]) for _, m in groups],
        ticktext=[str(i) for i in first["expert"]] if named else [str(m["expert"].iloc[0]) for _, m in groups],
    )  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, title={"text": "layer"})
    what = "Token-expert pairs, × an even share of the layer"
    return headed(figure, 70 + 26 * len(layers), arm, look, what, above=40)


def _group_label(group: int, members: pd.DataFrame, groups: int) -> str:
    width = members["width"].iloc[0] if members["width"].nunique() == 1 else None
    if groups == 1:
        return "one group" + _wide(width, ", width ")
    said = "mixed" if width is None else str(width)
    return f"group {group}<br>width {said}" if groups <= GROUPS_SPELT else f"g{group}<br>{said}"


def _wide(width: Any, before: str) -> str:
    return "" if wording.absent(width) else f"{before}{width}"


def _gaps(grid: pd.DataFrame) -> list[list[float | None]]:
    return [[None if wording.absent(value) else float(value) for value in line] for line in grid.to_numpy()]


def group_bars(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Share of token-expert pairs that each group got, all layers together: of all requests above, by domain below.

    Args:
        frame: rows of `expert_shares.group_shares` of one arm and cell, not empty.
    """
    rows = frame[frame["layer"] == ALL_LAYERS]
    everyone = rows[rows["domain"] == ALL_DOMAINS]
    labels = [f"group {r.group}{_wide(r.width, '<br>width ')}" for r in everyone.itertuples()]
    groups = list(everyone["group"])
    domains = [domain for domain in dict.fromkeys(rows["domain"]) if domain != ALL_DOMAINS]
    shares = rows.set_index(["domain", "group"])["share"].to_dict()
    heights = [170, 26 * len(domains)] if domains else [170]
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=14 / sum(heights), row_heights=heights
    )
    figure.add_bar(
        x=labels, y=percents(everyone["share"]), marker={"color": look.colours[arm]}, showlegend=False, row=1, col=1,
        hovertemplate="%{x}: %{y:.1f} % of token-expert pairs<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=labels, y=percents(everyone["even"]), mode="markers", name="even share", row=1, col=1, hoverinfo="skip",
        marker={"symbol": "line-ew", "size": 26, "line": {"width": 2, "color": INK}},
    )  # fmt: skip
    if domains:
        z = [percents(shares.get((domain, group)) for group in groups) for domain in domains]
        figure.add_heatmap(
            x=labels, y=[plain(domain) for domain in domains], z=z, zmin=0, xgap=1, ygap=2, row=2, col=1,
            colorscale=[[0.0, EMPTY], [1.0, look.colours[arm]]], showscale=False,
            text=[[f"{value:.0f} %" if value is not None else "" for value in line] for line in z],
            texttemplate="%{text}", textfont={"size": 11},
            hovertemplate="%{y}, %{x}: %{z:.1f} % of token-expert pairs<extra></extra>",
        )  # fmt: skip
        figure.update_yaxes(autorange="reversed", showgrid=False, row=2, col=1)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(rangemode="tozero", row=1, col=1, **PERCENT_AXIS)
    return headed(figure, 60 + sum(heights), arm, look, "Groups, % of token-expert pairs")
