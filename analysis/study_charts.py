"""Figures of a study: which layers each seed skips, and every figure of every seed with its interval.

They draw `analysis.study` and compute nothing. The palette and the look of arms are in `charts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from analysis import wording
from analysis.charts import INK, MUTED, PERCENT_AXIS, Look, finished, percents, plain, tint
from analysis.routing_charts import EMPTY
from analysis.spread import SHARE

ROW = 24
#: Height that the seeds of one figure take together, and the gap to the next figure, in rows.
SPAN, GAP = 0.66, 1.0


def heat(rates: pd.DataFrame, arm: str, look: Look) -> go.Figure:
    """Seed × layer: the share of held-out inputs that skip.

    Args:
        rates: rows of `study.RATE_COLUMNS` of one arm, not empty.
    """
    seeds = list(dict.fromkeys(rates["seed"]))
    several = rates["site"].nunique() > 1
    keys = list(dict.fromkeys(zip(rates["layer"], rates["site"], strict=True)))
    labels = [f"{layer} {plain(str(site))}" if several else str(layer) for layer, site in keys]
    of = {(row.seed, row.layer, row.site): row.skip_rate for row in rates.itertuples()}
    figure = go.Figure()
    figure.add_heatmap(
        x=labels, y=[f"seed {seed}" for seed in seeds], zmin=0, zmax=100, xgap=1, ygap=2,
        z=[percents(of.get((seed, *key)) for key in keys) for seed in seeds],
        colorscale=[[0.0, EMPTY], [1.0, look.colours[arm]]],
        colorbar={"tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"], "tickfont": {"size": 11},
                  "thickness": 8, "outlinewidth": 0},
        hovertemplate="%{y}, layer %{x}: skipped by %{z:.1f} % of inputs<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False, title={"text": "layer"})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    title = f"{look.names[arm]}: held-out inputs, % that skip each layer, seed by seed"
    return finished(figure, 110 + ROW * max(len(seeds), 4), title={"text": title}, margin={"t": 40})


def strip(values: pd.DataFrame, lines: pd.DataFrame, arm: str, title: str, look: Look) -> go.Figure:
    """One band a place (cell or domain), the seeds in it one below the other with their intervals; the mean as a line.

    Args:
        values: rows of `study.VALUE_COLUMNS` of one arm and figure, not empty.
        lines: rows of `spread.LINE_COLUMNS` of the same, whose verdicts stand at the bands.
        title: what the figure is, with its denominator.
    """
    seeds = list(dict.fromkeys(values["seed"]))
    places = list(dict.fromkeys(values["where"]))
    shares = values["unit"].iloc[0] == SHARE
    colour = look.colours[arm]
    at = {(place, seed): GAP * k + SPAN * (_part(n, len(seeds)) - 0.5) for k, place in enumerate(places)
          for n, seed in enumerate(seeds)}  # fmt: skip
    figure = go.Figure()
    for k, row in enumerate(lines.itertuples()):
        (mean,) = _scaled([row.mean], shares)
        figure.add_scatter(
            x=[mean, mean], y=[GAP * k - SPAN / 2 - 0.08, GAP * k + SPAN / 2 + 0.08], mode="lines", showlegend=False,
            line={"color": tint(colour, 0.45), "width": 2}, hoverinfo="skip",
        )  # fmt: skip
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=8, y=GAP * k, showarrow=False, align="left",
            text=plain(str(row.verdict) or "no verdict"), font={"size": 12, "color": INK if row.verdict else MUTED},
        )  # fmt: skip
    ys = [at[row.where, row.seed] for row in values.itertuples()]
    figure.add_scatter(
        x=_scaled(values["value"], shares), y=ys, mode="markers", showlegend=False,
        marker={"color": colour, "size": 7 if len(seeds) <= 5 else 5}, error_x=_whiskers(values, shares, colour),
        customdata=[[f"seed {row.seed}", plain(str(row.where)), *_said(row, shares)] for row in values.itertuples()],
        hovertemplate="%{customdata[0]}, %{customdata[1]}: %{customdata[2]}%{customdata[3]}<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(
        tickmode="array", tickvals=[GAP * k for k in range(len(places))], ticktext=[plain(str(p)) for p in places],
        range=[GAP * (len(places) - 0.5), -GAP / 2], showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(**(PERCENT_AXIS if shares else {"nticks": 6}))
    tall = max(44, 11 * len(seeds))
    name = f"{look.names[arm]}: {plain(title)}"
    return finished(
        figure, 96 + tall * len(places), title={"text": name}, margin={"t": 36, "r": 120}, hovermode="closest"
    )


def _part(place: int, of: int) -> float:
    return place / (of - 1) if of > 1 else 0.5


def _scaled(numbers: Sequence[Any] | pd.Series[float], shares: bool) -> list[float | None]:
    return percents(numbers) if shares else [None if wording.absent(x) else float(x) for x in numbers]


def _whiskers(values: pd.DataFrame, shares: bool, colour: str) -> dict[str, Any]:
    """Plotly's error bar; none where there is no interval."""
    return {
        "type": "data", "symmetric": False, "array": _scaled(values["high"] - values["value"], shares),
        "arrayminus": _scaled(values["value"] - values["low"], shares), "color": colour, "thickness": 1.2, "width": 0,
    }  # fmt: skip


def _said(row: Any, shares: bool) -> tuple[str, str]:
    def one(number: Any) -> str:
        return wording.percent(number) if shares else wording.number(number, 4)

    interval = "" if wording.absent(row.low) else f" [{one(row.low)}, {one(row.high)}]"
    return one(row.value), interval
