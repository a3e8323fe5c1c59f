"""Figures of decisions: how often each layer was skipped, and the grid of single decisions with the prompts.

They draw `analysis.routing` and compute nothing. The palette and the look of arms are in `charts`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.charts import MUTED, PERCENT_AXIS, Look, percents, plain, tint, wrapped
from analysis.expert_charts import headed
from analysis.routing import ALL_DOMAINS, NO_DECISION, Heatmap

#: Past this many rows a grid shows prompts on hover only, and names every few rows.
ROWS_WITH_TEXT = 40
GRID_PIXELS = 1100
#: Share of a figure's width that the grid takes where prompts stand beside it.
HEAT_WIDTH = 0.6
EMPTY = "#f1f3f5"
#: Low and high gate around the undecided middle; brown and teal stay apart for colour-blind readers.
GATE_SCALE = [[0.0, "#8c510a"], [0.5, "#f5f5f5"], [1.0, "#01665e"]]


def skip_share(frame: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Share of token rows that took one choice, by layer: all requests above, each domain below.

    Args:
        frame: rows of `analysis.routing.skip_by_layer` of one arm, one cell and one choice, not empty.
    """
    keys = list(dict.fromkeys(zip(frame["layer"], frame["site"], strict=True)))
    several = frame["site"].nunique() > 1
    labels = [f"{layer} {plain(site)}" if several else str(layer) for layer, site in keys]
    choice = plain(str(frame["choice"].iloc[0]))
    domains = [domain for domain in dict.fromkeys(frame["domain"]) if domain != ALL_DOMAINS]
    shares = frame.set_index(["domain", "layer", "site"])["row_share"].to_dict()

    def line(domain: str) -> list[float | None]:
        return percents(shares.get((domain, *key)) for key in keys)

    heights = [150, 26 * len(domains)] if domains else [150]
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=14 / sum(heights), row_heights=heights
    )
    colour = look.colours[arm]
    figure.add_bar(
        x=labels, y=line(ALL_DOMAINS), marker={"color": colour}, showlegend=False, row=1, col=1,
        hovertemplate=f"layer %{{x}}: %{{y:.1f}} % of token rows took {choice}<extra></extra>",
    )  # fmt: skip
    if domains:
        figure.add_heatmap(
            x=labels, y=[plain(domain) for domain in domains], z=[line(domain) for domain in domains], zmin=0,
            zmax=100, colorscale=[[0.0, EMPTY], [1.0, colour]], xgap=1, ygap=2, row=2, col=1,
            colorbar={"tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"], "tickfont": {"size": 11},
                      "thickness": 8, "lenmode": "pixels", "len": 110, "y": 0, "yanchor": "bottom", "outlinewidth": 0},
            hovertemplate=f"%{{y}}, layer %{{x}}: %{{z:.1f}} % of token rows took {choice}<extra></extra>",
        )  # fmt: skip
        figure.update_yaxes(autorange="reversed", showgrid=False, row=2, col=1)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title={"text": "layer"}, row=len(heights), col=1)
    figure.update_yaxes(range=[0, 100], row=1, col=1, **PERCENT_AXIS)
    return headed(figure, 70 + sum(heights), arm, look, f"Took {choice}, % of token rows", above=12)


def decisions(grid: Heatmap, look: Look, *, by_gate: bool = False, beside: bool = True) -> go.Figure:
    """Request (or token position) × layer, coloured by the choice taken, or by the gate; prompts beside the rows.

    Saturated is the choice named first in the manifest (what skips), pale the last (what runs in full).

    Args:
        grid: one with decisions.
        by_gate: colour by gate value instead; decisions without one stay empty.
        beside: print the start of each prompt at the right of its row, where there are few enough rows.
    """
    rows = [
        plain(f"{label} {domain}" if domain and grid.scope == "sequence" else label)
        for label, domain in zip(grid.row_labels, grid.row_domains, strict=True)
    ]
    texts = grid.texts if grid.texts is not None else [""] * len(rows)
    row_name = "position" if grid.scope == "token" else "request"
    figure = go.Figure()
    figure.add_heatmap(
        x=list(range(len(grid.column_labels))), y=list(range(len(rows))), customdata=_hovers(grid, rows, texts),
        hovertemplate=f"{row_name} %{{customdata[0]}}, layer %{{customdata[1]}}: %{{customdata[2]}}"
                      "%{customdata[3]}<extra></extra>",
        xgap=1, ygap=1 if len(rows) <= 100 else 0, **(_by_gate(grid) if by_gate else _by_choice(grid, look)),
    )  # fmt: skip
    figure.update_traces(
        colorbar={"thickness": 10, "orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom",
                  "lenmode": "pixels", "len": 90 * max(2, len(grid.choice_names)), "outlinewidth": 0,
                  "tickfont": {"size": 12}}
    )  # fmt: skip
    named = beside and grid.texts is not None and len(rows) <= ROWS_WITH_TEXT
    for place, text in enumerate(texts if named else ()):
        figure.add_annotation(
            x=HEAT_WIDTH, xref="paper", xanchor="left", xshift=8, y=place, showarrow=False, align="left",
            text=plain(textwrap.shorten(text, 44, placeholder=" …")), font={"size": 12, "color": MUTED},
        )  # fmt: skip
    figure.update_xaxes(domain=[0, HEAT_WIDTH if named else 1], title={"text": "layer", "standoff": 18}, showgrid=False)
    figure.update_xaxes(**_named([plain(c) for c in grid.column_labels], 32))
    figure.update_yaxes(title={"text": row_name}, showgrid=False, autorange="reversed", **_named(rows, ROWS_WITH_TEXT))
    per_row = 26 if len(rows) <= ROWS_WITH_TEXT else 6
    height = min(76 + per_row * len(rows), GRID_PIXELS - 140)
    what = "Gate value" if by_gate else "Choice taken"
    figure.update_layout(margin={"b": 48})
    return headed(figure, height, grid.arm, look, what, above=50)


def _by_choice(grid: Heatmap, look: Look) -> dict[str, Any]:
    """One step of colour a choice, from the arm's colour to pale."""
    names = grid.choice_names
    last = max(len(names) - 1, 1)
    shades = [tint(look.colours[grid.arm], 1 - 0.85 * place / last) for place in range(len(names))]
    return {
        "z": [[None if taken == NO_DECISION else taken for taken in line] for line in grid.choice.tolist()],
        "zmin": -0.5,
        "zmax": len(names) - 0.5,
        "colorscale": [[(place + side) / len(names), shade] for place, shade in enumerate(shades) for side in (0, 1)],
        "colorbar": {"tickvals": list(range(len(names))), "ticktext": [plain(name) for name in names]},
    }


def _by_gate(grid: Heatmap) -> dict[str, Any]:
    return {
        "z": [[None if wording.absent(gate) else gate for gate in line] for line in grid.gate.tolist()],
        "zmin": 0,
        "zmax": 1,
        "colorscale": GATE_SCALE,
        "colorbar": {"tickvals": [0, 0.5, 1]},
    }


def _hovers(grid: Heatmap, rows: Sequence[str], texts: Sequence[str]) -> list[list[list[str]]]:
    """[R, C] of (row, column, what was decided, the prompt's start)."""
    columns = [plain(column) for column in grid.column_labels]
    return [
        [
            [row, column, _decided(grid, taken, gate), said]
            for column, taken, gate in zip(columns, choice_C, gate_C, strict=True)
        ]
        for row, said, choice_C, gate_C in zip(
            rows,
            [f"<br>{wrapped(text, lines=3)}" if text else "" for text in texts],
            grid.choice.tolist(),
            grid.gate.tolist(),
            strict=True,
        )
    ]


def _decided(grid: Heatmap, taken: int, gate: float) -> str:
    if taken == NO_DECISION:
        return "nothing decided"
    return plain(grid.choice_names[taken]) + ("" if wording.absent(gate) else f", gate {gate:.3f}")


def _named(names: Sequence[str], at_most: int) -> dict[str, Any]:
    """Tick settings that name (in escaped `names`) every place, or every few where there are more than `at_most`."""
    every = max(1, -(-len(names) // at_most))
    return {
        "tickmode": "array",
        "tickvals": list(range(0, len(names), every)),
        "ticktext": list(names[::every]),
    }
