"""Reports of a run: self-contained HTML, Markdown, CSV and JSON.

Reports draw what `analysis` returns and compute nothing. What makes a page self-contained is in `document`; the report
of a training is `training_report`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from analysis import (
    answers,
    balance_report,
    balance_tables,
    charts,
    diagnostic_charts,
    diagnostic_tables,
    document,
    expert_charts,
    expert_shares,
    kernels,
    ladder,
    ladder_tables,
    latency,
    routing,
    routing_charts,
    tables,
    training_report,
    training_tables,
    trajectory_charts,
    trajectory_report,
    trajectory_tables,
    wording,
)
from analysis.held_out import HeldOut, held_out
from analysis.overview import Overview, overview
from analysis.sharing import sharing
from analysis.tracking import SHARE
from analysis.training import Training, trainings
from profiler.errors import InputError, StoreError
from profiler.store import Run

KERNELS_SHOWN = 10
#: Frames of `HeldOut` that the JSON has.
HELD_OUT_FRAMES = (
    "perplexity", "accuracy", "retain", "pairs", "eligibility", "rates", "flips", "tracks", "confounds", "drift",
)  # fmt: skip
#: Share of a page's time that goes into reading the run, about: what progress says.
READING = 0.6
#: Prompts longer than this are cut in the report; the page shows them whole.
PROMPT_CHARACTERS = 400


@dataclass(frozen=True)
class _Contents:
    """Everything a report shows, read once."""

    run: Run
    overview: Overview
    ladder: pd.DataFrame
    wide: pd.DataFrame
    measured: pd.DataFrame
    unmeasured: list[str]
    break_even: pd.DataFrame
    tails: pd.DataFrame
    segments: pd.DataFrame
    skips: pd.DataFrame
    sharing: pd.DataFrame
    expert_shares: pd.DataFrame
    balances: list[balance_report.Balance]
    trainings: dict[str, Training]
    held_out: HeldOut
    trajectories: list[trajectory_report.Trajectory]
    look: charts.Look
    names: dict[str, str]

    @classmethod
    def of(cls, run: Run, share: document.Share = document.untold) -> _Contents:
        made = document.Steps(share, 11, end=READING)
        frame = made(ladder.ladder(run))
        wide = ladder_tables.ladder_wide(frame)
        measured, unmeasured = tables.split_measured(wide)
        return cls(
            run=run,
            overview=overview(run, frame),
            ladder=frame,
            wide=wide,
            measured=measured,
            unmeasured=unmeasured,
            break_even=made(ladder_tables.break_even(run, frame)),
            tails=made(latency.tails(run)),
            segments=made(kernels.segments(run)),
            skips=made(routing.skip_by_layer(run)),
            sharing=made(sharing(run)),
            expert_shares=made(expert_shares.expert_shares(run)),
            balances=made(balance_report.balances(run)),
            trainings=made(trainings(run)),
            held_out=made(held_out(run)),
            trajectories=made(trajectory_report.trajectories(run)),
            look=charts.Look.of(run.manifest),
            names=wording.arm_names(run.manifest),
        )


# -- HTML -----------------------------------------------------------------------------------------------------------


def render_html(run: Run, share: document.Share = document.untold) -> str:
    """The report as one HTML document that needs nothing else: no network, no other file."""
    found = _Contents.of(run, share)
    cells = list(found.measured["cell"].unique())
    plot, made = document.Figures(), document.Steps(share, len(cells) + 7, start=READING)
    return document.page(
        "report.html.j2",
        plot,
        overview=found.overview,
        labels=[wording.sentence(label) for label in found.overview.labels],
        model=run.manifest.model,
        created=run.manifest.created_utc,
        headlines=wording.headlines(found.wide, found.names),
        summary=made(_summary(found, plot)),
        cells=[made(_cell_section(found, cell, plot)) for cell in cells],
        break_even=made(_break_even(found, plot)),
        routing=made(_routing_sections(found, plot)),
        sharing=tables.sharing(found.sharing, found.names),
        sharing_caption=wording.SHARING,
        experts=_expert_sections(found, plot),
        balances=made([balance_report.section(each, found.names, found.look, plot) for each in found.balances]),
        trainings=[
            {"arm": found.names[arm], **training_report.section(each, plot)} for arm, each in found.trainings.items()
        ],
        held_out=made(_held_out_section(found, plot)),
        trajectories=made(
            [trajectory_report.section(each, found.names, found.look, plot) for each in found.trajectories]
        ),
        tails=tables.tails(found.tails, found.names),
        percentile_rule=latency.RULE,
        samples_beyond=latency.SAMPLES_BEYOND,
        small=tables.SMALL,
        telemetry=made(_telemetry(found, plot)),
        sweep=tables.cells(found.overview),
        outputs=tables.outputs(found.overview),
        outputs_caption=wording.OUTPUTS,
        rules=tables.rule_summary(found.overview),
        checks=tables.rules(found.overview),
        unsupported=tables.unsupported(found.overview),
        facts=tables.facts(found.overview),
        glossary=tables.glossary(),
    )


def _summary(found: _Contents, plot: document.Figures) -> dict[str, Any]:
    shown = found.measured[["parameter_skip", "flop_skip", "step_time_saved"]].notna().any(axis=None)
    figure = plot(charts.skip_against_saving(found.measured, found.look)) if shown else None
    return {"figure": figure, "table": tables.ladder_summary(found.measured), "unmeasured": found.unmeasured}


def _cell_section(found: _Contents, cell: str, plot: document.Figures) -> dict[str, Any]:
    rows = found.ladder[found.ladder["cell"] == cell]
    headline = tables.headline_rows(rows)
    measured = headline[headline["rung"].isin(wording.RUNG_NAMES) & headline["value"].notna()]
    span = charts.ladder_span(headline) if not measured.empty else None
    twins = {arm.name: arm.twin for arm in found.run.manifest.arms}
    ladders = [
        plot(charts.ladder(headline[headline["arm"] == arm], arm, found.look, twins[arm], span))
        for arm in measured["arm"].unique()
    ]
    segments = found.segments[found.segments["cell"] == cell]
    tops = [(arm, kernels.top(found.run, arm, cell, KERNELS_SHOWN)) for arm in rows["arm"].unique()]
    return {
        "name": cell,
        "label": wording.row_label(next(rows.itertuples())),
        "ladders": ladders,
        "detail": tables.ladder_detail(rows),
        "segments": plot(charts.segments(segments, found.look)) if not segments.empty else None,
        "segment_table": tables.segments(segments, found.names),
        "disturbed": sorted(segments.loc[segments["marked"].astype(bool), "arm"].unique()),
        "kernels": [(found.names[arm], tables.kernels(top)) for arm, top in tops if not top.empty],
    }


def _break_even(found: _Contents, plot: document.Figures) -> dict[str, Any]:
    timed = found.wide[found.wide["step_time_saved"].notna()]
    figures = [plot(charts.break_even(rows, found.look)) for _, rows in timed.groupby(["phase", "length"], sort=False)]
    return {"figures": figures, "table": tables.break_even(found.break_even)}


def _routing_sections(found: _Contents, plot: document.Figures) -> list[dict[str, Any]]:
    """One a cell, with one part an arm that decided there."""
    labels = {str(row.cell): wording.row_label(row) for row in found.wide.itertuples()}
    return [
        {
            "name": cell,
            "label": labels[str(cell)],
            "arms": [
                _routing_part(found, str(cell), str(arm), part, plot)
                for arm, part in of_cell.groupby("arm", sort=False)
            ],
        }
        for cell, of_cell in found.skips.groupby("cell", sort=False)
    ]


def _routing_part(found: _Contents, cell: str, arm: str, skips: pd.DataFrame, plot: document.Figures) -> dict[str, Any]:
    choice = skips["choice"].iloc[0]
    shares = skips[skips["choice"] == choice]
    grid = routing.heatmap(found.run, arm, cell)
    return {
        "shares": plot(routing_charts.skip_share(shares, arm, found.look)),
        "table": tables.skip_shares(shares),
        "grid": plot(routing_charts.decisions(grid, found.look, beside=False)),
        "request": grid.request,
        "note": wording.sentence(grid.note) if grid.note else "",
        "prompts": _prompts(grid),
    }


def _expert_sections(found: _Contents, plot: document.Figures) -> list[dict[str, Any]]:
    """One a cell, with one part an arm that chose experts there; without bars of groups where there is one group."""
    labels = {str(row.cell): wording.row_label(row) for row in found.wide.itertuples()}
    every = found.expert_shares[found.expert_shares["domain"] == routing.ALL_DOMAINS]
    groups = expert_shares.group_shares(found.expert_shares)
    return [
        {
            "name": cell,
            "label": labels[str(cell)],
            "arms": [
                {
                    "heat": plot(expert_charts.expert_heat(part, str(arm), found.look)),
                    "groups": plot(expert_charts.group_bars(mine, str(arm), found.look))
                    if mine["group"].nunique() > 1
                    else None,
                    "table": balance_tables.group_shares(mine[mine["domain"] == routing.ALL_DOMAINS]),
                }
                for arm, part in of_cell.groupby("arm", sort=False)
                for mine in [groups[(groups["cell"] == cell) & (groups["arm"] == arm)]]
            ],
        }
        for cell, of_cell in every.groupby("cell", sort=False)
    ]


def _held_out_section(found: _Contents, plot: document.Figures) -> dict[str, Any]:
    """Quality and diagnostics; `arms` has one part an arm that decided about held-out inputs."""
    about = found.held_out
    return {
        "measured": about.measured,
        "sentences": about.sentences,
        "perplexity": diagnostic_tables.perplexity(about.perplexity, found.names),
        "accuracy": diagnostic_tables.accuracy(about.accuracy, found.names),
        "retain": diagnostic_tables.retain(about.retain, found.names),
        "retain_rule": answers.RETAIN_RULE,
        "matched": _matched(found, plot),
        "pairs": diagnostic_tables.pairs(about.pairs, found.names),
        "eligibility": diagnostic_tables.eligibility(about.eligibility, found.names),
        "arms": [_diagnosed(found, arm, plot) for arm in about.arms],
    }


def _matched(found: _Contents, plot: document.Figures) -> dict[str, Any] | None:
    """Arms that skip at the rates they executed; None where there are no two of them."""
    about = found.held_out.matched
    if not about.worth_showing:
        return None
    scored = about.table[about.table["perplexity"].notna()]
    return {
        "sentences": about.sentences,
        "figure": plot(trajectory_charts.matched(scored, found.look)) if not scored.empty else None,
        "table": trajectory_tables.matched(about.table, found.names),
    }


def _diagnosed(found: _Contents, arm: str, plot: document.Figures) -> dict[str, Any]:
    rates, flips, drift, tracks, confounds = (
        frame[frame["arm"] == arm]
        for frame in (
            found.held_out.rates, found.held_out.flips, found.held_out.drift, found.held_out.tracks,
            found.held_out.confounds,
        )
    )  # fmt: skip
    tested = tracks[(tracks["target"] == SHARE) & tracks["rho"].notna()]
    by_token = found.run.manifest.arm(arm).by_token
    return {
        "name": found.names[arm],
        "layers": plot(diagnostic_charts.layers(rates, flips, arm, found.look, by_token=by_token)),
        "layer_table": diagnostic_tables.layers(rates, flips, by_token=by_token),
        "drift": plot(diagnostic_charts.drift(drift, arm, found.look)) if not drift.empty else None,
        "drift_table": diagnostic_tables.drift(drift),
        "forest": plot(diagnostic_charts.forest(tested, arm, found.look)) if not tested.empty else None,
        "tracks": diagnostic_tables.tracks(tracks),
        "confounds": diagnostic_tables.confounds(confounds),
    }


def _prompts(grid: routing.Heatmap) -> list[tuple[str, str, str]]:
    """(request, domain, text) of the rows of a grid; of its one request where rows are positions."""
    if grid.scope == "token":
        lines = [(str(grid.request), grid.row_domains[0], grid.prompt)] if grid.prompt is not None else []
    else:
        lines = list(zip(grid.row_labels, grid.row_domains, grid.texts or (), strict=grid.texts is not None))
    return [
        (name, domain or wording.ABSENT, text[:PROMPT_CHARACTERS] + ("…" if len(text) > PROMPT_CHARACTERS else ""))
        for name, domain, text in lines
        if text is not None
    ]


def _telemetry(found: _Contents, plot: document.Figures) -> int | None:
    frame = found.run.frame("telemetry")
    return plot(charts.telemetry(frame)) if not frame.empty else None


# -- text -----------------------------------------------------------------------------------------------------------


def render_markdown(run: Run, share: document.Share = document.untold) -> str:
    """The tables of the report as Markdown (GitHub's tables), without charts and prompts."""
    found = _Contents.of(run, share)
    about = found.overview
    lines = [f"# {wording.markdown(about.name)}", "", wording.markdown(about.sentence), ""]
    lines += [f"> **Note:** {wording.markdown(wording.sentence(label))}\n" for label in about.labels]
    lines += [f"- {wording.markdown(sentence)}" for sentence in wording.headlines(found.wide, found.names)]
    parts: list[tuple[str, tables.Table, str]] = [
        ("Ladder", tables.ladder_summary(found.measured), _not_measured(found)),
        *(
            (f"Ladder, all rungs: {cell}", tables.ladder_detail(found.ladder[found.ladder["cell"] == cell]), "")
            for cell in found.measured["cell"].unique()
        ),
        ("Batch break-even", tables.break_even(found.break_even), ""),
        (
            "Tails of step time",
            tables.tails(found.tails, found.names),
            f"Percentiles by the rule {latency.RULE}. {tables.SMALL}: fewer than {latency.SAMPLES_BEYOND} samples "
            "beyond it.",
        ),
        *(
            (f"Segments: {cell}", tables.segments(found.segments[found.segments["cell"] == cell], found.names), "")
            for cell in found.segments["cell"].unique()
        ),
        *(
            (f"Share of token rows that took {choice}: {arm}, {cell}", tables.skip_shares(shares), "")
            for (cell, arm), of_arm in found.skips.groupby(["cell", "arm"], sort=False)
            for choice, shares in list(of_arm.groupby("choice", sort=False))[:1]
        ),
        *_group_parts(found),
        *(part for each in found.balances for part in balance_report.markdown_parts(each, found.names)),
        ("What the batch shares", tables.sharing(found.sharing, found.names), wording.SHARING),
        *_held_out_parts(found),
        *(part for each in found.trajectories for part in trajectory_report.markdown_parts(each, found.names)),
        *(
            (f"Training of {found.names[arm]}: held-out figures", training_tables.held_out(each), each.sentence)
            for arm, each in found.trainings.items()
        ),
        ("Rules", tables.rule_summary(about), ""),
        ("Checks of the rules", tables.rules(about), ""),
        ("Cells", tables.cells(about), ""),
        *([] if about.outputs.empty else [("Same tokens?", tables.outputs(about), wording.OUTPUTS)]),
        ("Not measured here", tables.unsupported(about), ""),
        ("How it was made", tables.facts(about), ""),
        ("Terms", tables.glossary(), ""),
    ]
    for title, table, below in parts:
        lines += ["", f"## {wording.markdown(title)}", "", *document.markdown_table(table)]
        lines += ["", wording.markdown(below)] if below else []
    return "\n".join(lines) + "\n"


def _group_parts(found: _Contents) -> list[tuple[str, tables.Table, str]]:
    groups = expert_shares.group_shares(found.expert_shares)
    every = groups[groups["domain"] == routing.ALL_DOMAINS]
    return [
        (f"Choice of experts by group: {found.names[str(arm)]}, {cell}", balance_tables.group_shares(part), "")
        for (cell, arm), part in every.groupby(["cell", "arm"], sort=False)
    ]


def _held_out_parts(found: _Contents) -> list[tuple[str, tables.Table, str]]:
    about = found.held_out
    if not about.measured:
        return []
    said = " ".join(about.matched.sentences)
    parts = [
        ("Held-out perplexity", diagnostic_tables.perplexity(about.perplexity, found.names), ""),
        *(
            [("Multiple choice", diagnostic_tables.accuracy(about.accuracy, found.names), "")]
            if not about.accuracy.empty
            else []
        ),
        ("Retain", diagnostic_tables.retain(about.retain, found.names), answers.RETAIN_RULE),
        *(
            [("At the rates executed", trajectory_tables.matched(about.matched.table, found.names), said)]
            if about.matched.worth_showing
            else []
        ),
        ("Against baselines", diagnostic_tables.pairs(about.pairs, found.names), " ".join(about.sentences)),
        ("Eligible against executed", diagnostic_tables.eligibility(about.eligibility, found.names), ""),
    ]
    for arm in about.arms:
        name = found.names[arm]
        rates, flips, drift, tracks = (
            frame[frame["arm"] == arm] for frame in (about.rates, about.flips, about.drift, about.tracks)
        )
        layers = diagnostic_tables.layers(rates, flips, by_token=found.run.manifest.arm(arm).by_token)
        parts += [
            (f"Held-out decisions by layer: {name}", layers, ""),
            (f"What decisions follow: {name}", diagnostic_tables.tracks(tracks), ""),
            (f"Decision logits, start and now: {name}", diagnostic_tables.drift(drift), ""),
        ]
    return parts


def _not_measured(found: _Contents) -> str:
    return f"Nothing was measured in {', '.join(found.unmeasured)}." if found.unmeasured else ""


def render_csv(run: Run, share: document.Share = document.untold) -> str:
    """`analysis.ladder.ladder` as CSV; `value_unit` says what value, low and high are in. Undefined is empty."""
    out = io.StringIO()
    _with_unit(ladder.ladder(run)).to_csv(out, index=False, lineterminator="\n")
    return out.getvalue()


def _with_unit(frame: pd.DataFrame) -> pd.DataFrame:
    units = ["ms" if rung == "step_time" else "share of 1" for rung in frame["rung"]]
    before = list(frame.columns).index("high") + 1
    placed = frame.copy()
    placed.insert(before, "value_unit", units)
    return placed


def render_json(run: Run, share: document.Share = document.untold) -> str:
    """One JSON object: overview, ladder, break_even, tails, segments, sharing, expert_shares, balance,
    trainings, held_out, trajectories, rules, unsupported.

    Undefined is null.
    """
    found = _Contents.of(run, share)
    about = found.overview
    whole = {
        "overview": {
            "name": about.name,
            "state": about.state,
            "sentence": about.sentence,
            "labels": about.labels,
            "facts": dict(about.facts),
            "cells": document.records(about.cells),
            "outputs": document.records(about.outputs),
        },
        "headlines": wording.headlines(found.wide, found.names),
        "ladder": document.records(_with_unit(found.ladder)),
        "break_even": document.records(found.break_even),
        "tails": document.records(found.tails),
        "segments": document.records(found.segments),
        "sharing": document.records(found.sharing),
        "expert_shares": document.records(found.expert_shares),
        "balance": [balance_report.as_json(each) for each in found.balances],
        "trainings": {arm: json.loads(training_report.render_json(each)) for arm, each in found.trainings.items()},
        "held_out": {
            "sentences": found.held_out.sentences,
            "matched": document.records(found.held_out.matched.table),
            **{name: document.records(getattr(found.held_out, name)) for name in HELD_OUT_FRAMES},
        },
        "trajectories": [
            {
                "arm": each.arm,
                "cell": each.cell,
                "tokens": each.tokens,
                "inputs": each.inputs,
                "note": each.note,
                **{name: document.records(getattr(each, name)) for name in trajectory_report.FRAMES},
            }
            for each in found.trajectories
        ],
        "rules": document.records(about.rules),
        "unsupported": document.records(about.unsupported),
    }
    return json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


# -- files ----------------------------------------------------------------------------------------------------------

FORMATS: dict[str, Callable[[Run, document.Share], str]] = {
    "html": render_html,
    "md": render_markdown,
    "csv": render_csv,
    "json": render_json,
}


def render(run: Run, format: str, share: document.Share = document.untold) -> str:
    """The report in one of `FORMATS`; `share` is told how much of it is made.

    Raises:
        InputError: there is no such format.
        StoreError: a table of the run cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: there is no such format; choose one of {', '.join(FORMATS)}")
    try:
        return FORMATS[format](run, share)
    except duckdb.Error as error:
        raise StoreError(f"{run.path}: a table cannot be read: {error}") from error


def write(run: Run, format: str, out: Path, share: document.Share = document.untold) -> Path:
    """Write the report to the file `out`, whole or not at all, and return its path.

    Raises:
        InputError: there is no such format, or `out` is a folder.
        StoreError: a table of the run cannot be read, or the file cannot be written.
    """
    return document.write(render(run, format, share), out)
