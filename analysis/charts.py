"""The visual language of reports and pages, and the figures of skips and times.

One palette, one Plotly template, one look for each arm, defined here once. Figures draw what `analysis` returned: a
share becomes per cent and a nanosecond a second on the way to an axis, and nothing else is computed. Figures of
decisions are in `routing_charts`; tables and words are elsewhere.

Colours: an arm keeps its colour in every figure of a run; grey is the baseline. The arm colours are Okabe and Ito's,
the segment tints Tol's `light`; both stay apart for colour-blind readers. A segment never has an arm's colour.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis import wording
from analysis.ladder import refused
from profiler.records import Manifest

INK, MUTED, GRID, GHOST, PAPER = "#1f2933", "#5f6b76", "#e6e9ed", "#dfe3e8", "#ffffff"
BASELINE = "#78838e"
ARM_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Tol's `light`, and beside it what it has none for: experts, shared ones and all-to-alls stay at least 14 apart in Lab
#: from each other and all others here, as those who confuse red and green, or blue and yellow, see them.
SEGMENT_COLOURS = {
    "attention": "#77aadd",
    "ffn": "#ee8866",
    "experts": "#9988ff",
    "shared": "#88cc88",
    "head": "#eedd88",
    "embedding": "#99ddff",
    "norm": "#bbcc33",
    "router": "#ffaabb",
    "replacement": "#44bb99",
    "dispatch": "#aaaa00",
    "exchange": "#ccffcc",
    "kv": "#b79fcf",
    "unattributed": "#dddddd",
}
OTHER_SEGMENT = "#c9c2b8"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "automargin": True,
    "ticks": "",
    "title": {"standoff": 8, "font": {"size": 12}},
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "title": {"font": {"size": 13}, "x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 4}},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": GRID, "align": "left", "font": {"size": 12, "color": INK}},
        "bargap": 0.35,
        "dragmode": False,
    }
)
#: Plotly's settings wherever a figure is shown: hovering tells numbers, and nothing covers the names of arms.
CONFIG: dict[str, Any] = {"responsive": True, "displayModeBar": False, "displaylogo": False, "plotlyServerURL": ""}
PERCENT_AXIS = {"ticksuffix": " %", "tickformat": ",~r", "nticks": 6, "tickangle": 0}


@dataclass(frozen=True)
class Look:
    """How the arms of a run are shown: colour and name by arm.

    A name carries its marks (`forced (synthetic route)`), so that no picture of a result goes without.
    """

    colours: Mapping[str, str]
    names: Mapping[str, str]

    @classmethod
    def of(cls, manifest: Manifest) -> Look:
        """The look of a run. Arms that neither decide nor have a twin are the baseline's grey."""
        routed = [arm.name for arm in manifest.arms if arm.twin is not None or arm.scope != "none"]
        colours = {name: ARM_COLOURS[place % len(ARM_COLOURS)] for place, name in enumerate(routed)}
        return cls(
            colours={arm.name: colours.get(arm.name, BASELINE) for arm in manifest.arms},
            names={arm: plain(name) for arm, name in wording.arm_names(manifest).items()},
        )


def finished(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """`figure` in our template, `height` pixels high, with further settings of its layout."""
    figure.update_layout(template=TEMPLATE, height=height, **layout)
    return figure


def plain(text: str) -> str:
    """`text` such that Plotly draws it as it stands: its labels understand a little HTML, and prompts are data."""
    return html.escape(text, quote=False)


def wrapped(text: str, width: int = 70, lines: int = 6) -> str:
    """`text` broken for a hover label, escaped, and cut after `lines` lines."""
    return "<br>".join(plain(part) for part in textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def percents(shares: Iterable[Any]) -> list[float | None]:
    """Shares of 1 as values for an axis in per cent; what is undefined leaves a gap."""
    return [None if wording.absent(share) else 100 * float(share) for share in shares]


def _whiskers(frame: pd.DataFrame, value: str, low: str, high: str, colour: str) -> dict[str, Any]:
    """Plotly's error bar from columns that hold an interval as shares of 1; none where there is no interval."""
    above, below = (percents((frame[end] - frame[value]).abs()) for end in (high, low))
    return {
        "type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "thickness": 1.4,
        "width": 4,
    }  # fmt: skip


def _zero_line(figure: go.Figure, *, vertical: bool) -> None:
    (figure.add_vline if vertical else figure.add_hline)(0, line={"color": INK, "width": 1.2}, layer="above")


# -- the ladder -----------------------------------------------------------------------------------------------------


def ladder_span(frame: pd.DataFrame) -> tuple[float, float]:
    """The x range in per cent that holds the rungs of all rows of `frame`, with room for their labels.

    Args:
        frame: rows of `analysis.ladder.ladder`, headline variants.
    """
    shown = frame[frame["rung"].isin(wording.RUNG_NAMES)]
    ends = [end for end in percents(pd.concat([shown["value"], shown["low"], shown["high"]])) if end is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    width = max(high - low, 10.0)
    return low - 0.08 * width, high + 0.3 * width


def ladder(
    frame: pd.DataFrame, arm: str, look: Look, twin: str | None, span: tuple[float, float] | None = None
) -> go.Figure:
    """The rungs of one arm in one cell, top to bottom: what was skipped above, what time was saved below.

    A pale bar reaches from a rung back to the last one above it where saving was lost on the way. A rung that was
    not measured says so.

    Args:
        frame: headline rows of `analysis.ladder.ladder` of one arm and cell.
        span: x range in per cent shared by the figures of a cell; that of `frame` if None.
    """
    rows = frame.set_index("rung").reindex(list(wording.RUNG_NAMES))
    values, highs = percents(rows["value"]), percents(rows["high"])
    names = [
        f"{wording.RUNG_NAMES[rung]}<br><span style='font-size:10px;color:{MUTED}'>"
        f"{wording.RUNG_DENOMINATORS[rung]}</span>"
        for rung in rows.index
    ]
    figure = go.Figure()
    before: float | None = None
    for name, value in zip(names, values, strict=True):
        if value is not None and before is not None and before > value:
            figure.add_bar(
                y=[name], x=[before - max(value, 0.0)], base=[max(value, 0.0)], orientation="h",
                marker={"color": GHOST}, hoverinfo="skip", showlegend=False,
            )  # fmt: skip
        before = before if value is None else value
    figure.add_bar(
        y=names, x=values, orientation="h", marker={"color": look.colours[arm]}, showlegend=False,
        customdata=[_rung_hover(str(rung), row) for rung, row in zip(rows.index, rows.itertuples(), strict=True)],
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    sampled = rows["low"].notna() & rows["high"].notna()
    figure.add_scatter(
        y=[name for name, has in zip(names, sampled, strict=True) if has], x=percents(rows.loc[sampled, "value"]),
        mode="markers", marker={"size": 1, "color": INK}, hoverinfo="skip", showlegend=False,
        error_x=_whiskers(rows[sampled], "value", "low", "high", INK),
    )  # fmt: skip
    for name, value, share, high, note in zip(names, values, rows["value"], highs, rows["note"], strict=True):
        said = _not_measured(str(note)) if value is None else wording.percent(share)
        # A reason has the whole of its row, in which there is no bar.
        place = (
            {"xref": "paper", "x": 0, "bgcolor": PAPER}
            if "<br>" in said
            else {"x": max(0.0, value or 0.0, high or 0.0)}
        )
        figure.add_annotation(
            y=name, xanchor="left", xshift=5, showarrow=False, align="left", text=said,
            font={"color": MUTED if value is None else INK, "size": 12}, **place,
        )  # fmt: skip
    _zero_line(figure, vertical=True)
    title = look.names[arm] + (f" against {plain(twin)}" if twin is not None else "")
    figure.update_xaxes(range=list(span or ladder_span(frame)), **(PERCENT_AXIS | {"nticks": 4}))
    figure.update_yaxes(categoryorder="array", categoryarray=names, autorange="reversed", showgrid=False)
    return finished(figure, 330, barmode="overlay", title={"text": title}, margin={"t": 40})


def _not_measured(note: str) -> str:
    """What stands in the place of a bar; with the reason where the machine could not give the figure."""
    why = refused(note)
    return f"not measured<br><span style='font-size:10px'>{wrapped(why, 52)}</span>" if why else "not measured"


def _rung_hover(rung: str, row: Any) -> str:
    lines = [f"{wording.RUNG_NAMES[rung]}: {wording.percent(row.value)} ({wording.RUNG_DENOMINATORS[rung]})"]
    if not wording.absent(row.low):
        lines.append(f"95 % interval {wording.percent_interval(row.low, row.high)}")
    if not wording.absent(row.note) and row.note:
        lines.append(wrapped(str(row.note)))
    return "<br>".join(lines)


_MARKS = (
    ("parameter_skip", "parameters skipped, net", "circle-open"),
    ("flop_skip", "FLOPs skipped", "diamond-open"),
    ("step_time_saved", "step time saved", "circle"),
)


def skip_against_saving(wide: pd.DataFrame, look: Look) -> go.Figure:
    """Every cell and arm on one line each: parameters skipped, FLOPs skipped, step time saved with its interval.

    Args:
        wide: rows of `analysis.ladder.ladder_wide`; those with none of the three figures are left out.
    """
    wide = wide[wide[[rung for rung, _, _ in _MARKS]].notna().any(axis=1)]
    figure = go.Figure()
    ticks: list[tuple[float, str]] = []
    places: dict[tuple[str, str], float] = {}
    place = 0.0
    for cell, group in wide.groupby("cell", sort=False):
        places |= {(str(cell), arm): place + offset for offset, arm in enumerate(group["arm"])}
        ticks.append((place + (len(group) - 1) / 2, _two_lines(wording.row_label(next(group.itertuples())))))
        place += len(group) + 0.9
    for arm, of_arm in wide.groupby("arm", sort=False):
        colour, name = look.colours[str(arm)], look.names[str(arm)]
        ys = [places[(cell, str(arm))] for cell in of_arm["cell"]]
        for y, row in zip(ys, of_arm.itertuples(), strict=True):
            found = [v for v in percents(getattr(row, rung) for rung, _, _ in _MARKS) if v is not None]
            figure.add_scatter(
                x=[min(found), max(found)], y=[y, y], mode="lines", hoverinfo="skip",
                line={"color": tint(colour, 0.35), "width": 3}, showlegend=False,
            )  # fmt: skip
        for rung, what, symbol in _MARKS:
            timed = rung == "step_time_saved"
            figure.add_scatter(
                x=percents(of_arm[rung]), y=ys, mode="markers", showlegend=False,
                error_x=_whiskers(of_arm, rung, f"{rung}_low", f"{rung}_high", colour) if timed else None,
                marker={"color": colour, "symbol": symbol, "size": 10, "line": {"width": 2, "color": colour}},
                customdata=[[plain(wording.row_label(r)), wording.percent(getattr(r, rung))]
                            for r in of_arm.itertuples()],
                hovertemplate=f"{name}<br>%{{customdata[0]}}<br>{what}: %{{customdata[1]}}<extra></extra>",
            )  # fmt: skip
        figure.add_scatter(x=[None], y=[None], mode="lines", line={"color": colour, "width": 5}, name=name)
    for _, what, symbol in _MARKS:
        mark = {"color": INK, "symbol": symbol, "size": 9, "line": {"width": 1.6, "color": INK}}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=mark, name=what)
    _zero_line(figure, vertical=True)
    axis = "% of backbone parameters,<br>of the twin's FLOPs,<br>of the twin's median step time"
    figure.update_xaxes(title={"text": axis}, **PERCENT_AXIS)
    figure.update_yaxes(
        tickmode="array", tickvals=[at for at, _ in ticks], ticktext=[name for _, name in ticks],
        range=[place - 0.9, -0.9], showgrid=False,
    )  # fmt: skip
    return finished(figure, round(165 + 30 * place), hovermode="closest")


def _two_lines(label: str) -> str:
    """`decode, batch 4, 32 tokens of context` broken before the length, as an axis has little room."""
    head, comma, length = plain(label).rpartition(", ")
    return f"{head}<br>{length}" if comma else label


def break_even(wide: pd.DataFrame, look: Look) -> go.Figure:
    """Step time saved against batch, with intervals: one line an arm.

    Args:
        wide: rows of `analysis.ladder.ladder_wide` of one phase and length that have a step time saved.
    """
    figure = go.Figure()
    batches = sorted(wide["batch"].unique())
    arms = list(dict.fromkeys(wide["arm"]))
    for arm in arms:
        rows = wide[wide["arm"] == arm].sort_values("batch")
        colour, name = look.colours[arm], look.names[arm]
        # Beside each other, or the whiskers of arms at one batch would hide one another.
        aside = 0.06 * (arms.index(arm) - (len(arms) - 1) / 2)
        figure.add_scatter(
            x=[batches.index(batch) + aside for batch in rows["batch"]],
            y=percents(rows["step_time_saved"]),
            name=name,
            mode="lines+markers",
            marker={"size": 8},
            line={"color": colour, "width": 2},
            error_y=_whiskers(rows, "step_time_saved", "step_time_saved_low", "step_time_saved_high", colour),
            customdata=[
                [
                    str(r.batch),
                    wording.percent(r.step_time_saved),
                    wording.percent_interval(r.step_time_saved_low, r.step_time_saved_high),
                ]
                for r in rows.itertuples()
            ],
            hovertemplate=f"{name}, batch %{{customdata[0]}}: %{{customdata[1]}} (%{{customdata[2]}})<extra></extra>",
        )
    _zero_line(figure, vertical=False)
    first = next(wide.itertuples())
    length = f"{wording.how_many(first.length, 'token')}{' of context' if first.phase == 'decode' else ''}"
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(batches))), ticktext=[str(batch) for batch in batches],
        range=[-0.5, len(batches) - 0.5], showgrid=False, title={"text": f"batch (sequences), {first.phase}, {length}"},
    )  # fmt: skip
    figure.update_yaxes(title={"text": "step time saved<br>(% of the twin's median step)"}, **PERCENT_AXIS)
    return finished(figure, 300, showlegend=True)


# -- where the time goes --------------------------------------------------------------------------------------------


def segments(frame: pd.DataFrame, look: Look) -> go.Figure:
    """Time per instrumented step by segment, one stacked bar an arm.

    Args:
        frame: rows of `analysis.kernels.segments` of one cell.
    """
    figure = go.Figure()
    names = {arm: look.names[arm].replace(" (", "<br>(").replace(", ", ",<br>") for arm in frame["arm"]}
    found = dict.fromkeys(frame["segment"])
    known = list(SEGMENT_COLOURS)
    for name in sorted(found, key=lambda name: known.index(name) if name in known else len(known) - 2):
        rows = frame[frame["segment"] == name]
        figure.add_bar(
            y=[names[arm] for arm in rows["arm"]], x=list(rows["ms_per_step"]),
            orientation="h", name=plain(name), text=[plain(name)] * len(rows),
            marker={"color": SEGMENT_COLOURS.get(name, OTHER_SEGMENT), "line": {"color": PAPER, "width": 1}},
            textposition="inside", insidetextanchor="middle", textangle=0, insidetextfont={"color": INK, "size": 12},
            customdata=[[wording.milliseconds(r.ms_per_step), wording.percent(r.share)] for r in rows.itertuples()],
            hovertemplate="%{y}, " + plain(name) + ": %{customdata[0]} a step, %{customdata[1]} of it<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title={"text": "ms per instrumented step"}, rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=list(names.values()), autorange="reversed", showgrid=False)
    figure.update_yaxes(tickfont={"size": 11})
    return finished(
        figure, 120 + 54 * len(names), barmode="stack", uniformtext={"minsize": 11, "mode": "hide"},
        legend={"traceorder": "normal"},
    )  # fmt: skip


def telemetry(frame: pd.DataFrame) -> go.Figure:
    """Every sampled metric over the run, one panel each, against seconds from the first sample.

    Args:
        frame: the `telemetry` table, not empty.
    """
    groups = list(frame.groupby(["device", "metric", "unit"], sort=False, dropna=False))
    figure = make_subplots(
        rows=len(groups), cols=1, shared_xaxes=True, vertical_spacing=36 / (130 * len(groups)),
        subplot_titles=[plain(f"{device}: {metric} ({unit})") for (device, metric, unit), _ in groups],
    )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left", font={"size": 12, "color": INK})
    start = int(frame["time_ns"].min())
    for place, (_, group) in enumerate(groups, start=1):
        group = group.sort_values("time_ns")
        figure.add_scatter(
            x=[(int(t) - start) / 1e9 for t in group["time_ns"]], y=list(group["value"]), mode="lines+markers",
            line={"color": BASELINE, "width": 1.5}, marker={"size": 3}, showlegend=False, row=place, col=1,
            hovertemplate="%{x:.1f} s: %{y:.4s}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(rangemode="tozero", tickformat="~s", nticks=4)
    figure.update_xaxes(title={"text": "seconds since the first sample"}, row=len(groups), col=1)
    return finished(figure, 70 + 130 * len(groups), margin={"t": 28})


def tint(colour: str, strength: float) -> str:
    """`colour` over white at `strength` in 0–1, opaque, so that what lies behind does not show through."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)
