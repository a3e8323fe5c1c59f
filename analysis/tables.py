"""Frames of the analysis as tables of text, shared by the HTML and Markdown reports and by the pages.

A table says for each column what its unit and denominator are, because a number without them is worth nothing.
Order, selection and pivots only; no figure is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis import wording
from analysis.ladder import HEADLINE
from analysis.overview import Overview
from analysis.routing import ALL_DOMAINS
from profiler.records import RECORDER_COST

SMALL = "†"
LONG_TEXT = 40


@dataclass(frozen=True)
class Table:
    """Column titles, rows of text, which columns are numbers (to be aligned right), and rows that need attention."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = field(default_factory=frozenset)

    @property
    def long(self) -> frozenset[int]:
        """Columns that hold sentences, which need room to be read."""
        return frozenset(
            place for place in range(len(self.columns)) if any(len(row[place]) > LONG_TEXT for row in self.rows)
        )

    def frame(self) -> pd.DataFrame:
        """The same as a frame of text."""
        return pd.DataFrame(self.rows, columns=list(self.columns))


#: Title of a column, whether it is a number, and its text from a frame's row.
_Column = tuple[str, bool, Callable[[Any], str]]


def table(frame: pd.DataFrame, columns: Sequence[_Column], marked: Sequence[bool] = ()) -> Table:
    """A line a row of `frame`; each column says its title, whether it holds numbers, and its text of a row."""
    return Table(
        columns=tuple(title for title, _, _ in columns),
        rows=[tuple(say(row) for _, _, say in columns) for row in frame.itertuples()],
        numeric=frozenset(place for place, (_, numeric, _) in enumerate(columns) if numeric),
        marked=frozenset(place for place, mark in enumerate(marked) if mark),
    )


def text(value: Any) -> str:
    """A value as it stands, `ABSENT` where there is none or nothing to read."""
    return wording.ABSENT if wording.absent(value) or value == "" else str(value)


_CELL: _Column = ("Cell", False, wording.row_label)
_ARM: _Column = ("Arm", False, lambda r: text(r.arm))


def split_measured(wide: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows of `ladder_wide` whose cell has a figure of any arm, and the names of the cells that have none."""
    figures = wide[["step_ms", "parameter_skip", "flop_skip", "kernel_time_saved"]].notna().any(axis=1)
    measured = wide["cell"].isin(wide.loc[figures, "cell"])
    return wide[measured], [str(cell) for cell in wide.loc[~measured, "cell"].unique()]


def ladder_summary(wide: pd.DataFrame) -> Table:
    """`ladder_wide`: one line a cell and arm."""
    return table(
        wide,
        [
            _CELL,
            _ARM,
            ("Parameters skipped, net (% of backbone)", True, lambda r: wording.percent(r.parameter_skip)),
            ("FLOPs skipped (% of twin)", True, lambda r: wording.percent(r.flop_skip)),
            ("Weight bytes not read (% of twin)", True, lambda r: wording.percent(r.weight_byte_skip)),
            ("Kernel time saved (% of twin)", True, lambda r: wording.percent(r.kernel_time_saved)),
            ("Step time saved (% of twin)", True, lambda r: wording.percent(r.step_time_saved)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.step_time_saved_low, r.step_time_saved_high)),
            ("Time ÷ FLOPs saved", True, lambda r: wording.number(r.realised_fraction, 2)),
            ("Median step (ms)", True, lambda r: wording.number(r.step_ms)),
            ("Twin's (ms)", True, lambda r: wording.number(r.twin_step_ms)),
            ("Pairs", True, lambda r: wording.count(r.n)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def ladder_detail(frame: pd.DataFrame) -> Table:
    """Every rung and variant of one cell, with numerator, denominator and what they mean."""

    def value(row: Any) -> str:
        if row.rung == "step_time":
            return wording.milliseconds(row.value)
        return wording.number(row.value, 2) if row.rung == "realised_fraction" else wording.percent(row.value)

    def interval(row: Any) -> str:
        if wording.absent(row.low):
            return wording.ABSENT
        if row.rung in ("step_time", "realised_fraction"):
            unit = f"{wording.NBSP}ms" if row.rung == "step_time" else ""
            return f"{wording.number(row.low)} to {wording.number(row.high)}{unit}"
        return wording.percent_interval(row.low, row.high)

    def samples(row: Any) -> str:
        if not row.n:
            return wording.ABSENT
        return wording.how_many(row.n, wording.RUNG_SAMPLES[row.rung])

    names = wording.RUNG_NAMES | wording.OTHER_NAMES
    return table(
        frame,
        [
            _ARM,
            ("Rung", False, lambda r: names[r.rung]),
            ("Variant", False, lambda r: text(r.variant)),
            ("Value", True, value),
            ("95 % interval", True, interval),
            ("Numerator", True, lambda r: wording.quantity(r.numerator, r.unit)),
            ("Denominator", True, lambda r: wording.quantity(r.denominator, r.unit)),
            ("Samples", True, samples),
            ("Meaning", False, lambda r: text(r.meaning)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def headline_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `ladder` in the variant that stands for its rung."""
    return frame[frame["variant"] == frame["rung"].map(HEADLINE)]


def break_even(frame: pd.DataFrame) -> Table:
    """`break_even`: one line a phase, length and arm."""

    def batches(row: Any, state: str) -> str:
        low, high = getattr(row, f"{state}_from"), getattr(row, f"{state}_to")
        if wording.absent(low):
            return wording.ABSENT
        return str(low) if low == high else f"{low} to {high}"

    return table(
        frame,
        [
            ("Phase", False, lambda r: str(r.phase)),
            ("Length (tokens)", True, lambda r: wording.count(r.length)),
            _ARM,
            ("Batches swept", False, lambda r: text(r.batches)),
            ("Saves step time at batch", True, lambda r: batches(r, "saves")),
            ("Loses at batch", True, lambda r: batches(r, "loses")),
            ("Unclear at batch", True, lambda r: batches(r, "unclear")),
            ("Break-even", False, lambda r: text(r.break_even)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def tails(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`tails`, one line a cell and arm; a percentile with few samples beyond it carries `SMALL`.

    Args:
        names: `wording.arm_names`.
    """
    percentiles = sorted(frame["percentile"].unique())
    lines = []
    for (_, arm), group in frame.rename(columns={"pass": "from_pass"}).groupby(["cell", "arm"], sort=False):
        of = {row.percentile: row for row in group.itertuples()}
        first = of[percentiles[0]]
        lines.append(
            (
                wording.row_label(first),
                names[str(arm)],
                str(first.metric),
                str(first.from_pass),
                *(f"{wording.number(of[p].value_ms)}{SMALL if of[p].marked else ''}" for p in percentiles),
                wording.count(first.n),
                *(wording.count(of[p].beyond) for p in percentiles),
            )
        )
    titles = [*(f"P{p} (ms)" for p in percentiles), "Samples", *(f"Beyond P{p} (samples)" for p in percentiles)]
    columns = ("Cell", "Arm", "Time of", "Pass", *titles)
    return Table(columns, lines, frozenset(range(4, len(columns))))


def segments(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`segments`: a line an arm, cell and segment; marked where the recorder disturbed the cell.

    Args:
        names: `wording.arm_names`.
    """
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Segment", False, lambda r: text(r.segment)),
            ("Time (ms per instrumented step)", True, lambda r: wording.number(r.ms_per_step)),
            ("Share (% of the mean step)", True, lambda r: wording.percent(r.share)),
            ("Mean step (ms)", True, lambda r: wording.number(r.wall_ms)),
            ("Steps", True, lambda r: wording.count(r.steps)),
            ("Bare ÷ instrumented step", True, lambda r: wording.number(r.factor)),
        ],
        list(frame["marked"].astype(bool)),
    )


def kernels(frame: pd.DataFrame) -> Table:
    """`top`: a line a kernel."""
    return table(
        frame,
        [
            ("Kernel or operator", False, lambda r: text(r.name)),
            ("Category", False, lambda r: text(r.category)),
            ("Segment", False, lambda r: text(r.segment)),
            ("Calls a step", True, lambda r: wording.number(r.calls_per_step)),
            ("Time (ms per traced step)", True, lambda r: wording.number(r.ms_per_step)),
            ("Share (% of kernel time)", True, lambda r: wording.percent(r.share)),
        ],
    )


def skip_shares(frame: pd.DataFrame) -> Table:
    """`skip_by_layer` of one arm, cell and choice: a line a decision site, a column a domain."""
    domains = [ALL_DOMAINS, *(d for d in dict.fromkeys(frame["domain"]) if d != ALL_DOMAINS)]
    lines = []
    for (layer, site), group in frame.groupby(["layer", "site"], sort=False):
        shares = dict(zip(group["domain"], group["row_share"], strict=True))
        everyone = group[group["domain"] == ALL_DOMAINS].iloc[0]
        lines.append(
            (
                str(layer),
                str(site),
                *(wording.percent(shares.get(domain)) for domain in domains),
                wording.count(everyone["decisions"]),
                wording.count(everyone["rows"]),
            )
        )
    titles = ["All (% of token rows)", *(f"{d} (%)" for d in domains[1:])]
    columns = ("Layer", "Site", *titles, "Decisions that took it", "Token rows that took it")
    return Table(columns, lines, frozenset({0, *range(2, len(columns))}))


def sharing(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`analysis.sharing.sharing`: a line a cell and arm.

    Args:
        names: `wording.arm_names`.
    """
    return table(
        frame,
        [
            _CELL,
            ("Arm", False, lambda r: names[r.arm]),
            ("Nobody runs (% of layers × steps)", True, lambda r: wording.percent(r.nobody)),
            ("Some rows run (%)", True, lambda r: wording.percent(r.some)),
            ("Every row runs (%)", True, lambda r: wording.percent(r.everybody)),
            ("Rows that ran (% of rows)", True, lambda r: wording.percent(r.rows_ran)),
            ("Weights read (% of bytes)", True, lambda r: wording.percent(r.weights_read)),
            ("Read for rows that skip (% of bytes)", True, lambda r: wording.percent(r.read_for_skippers)),
            ("Layers", True, lambda r: wording.count(r.layers)),
            ("Steps", True, lambda r: wording.count(r.steps)),
        ],
    )


def rule_summary(found: Overview) -> Table:
    """Rules the run enforced on itself, and in how many of the arms and cells each was checked and held."""
    lines: list[tuple[str, ...]] = []
    broken = set()
    for (rule, name), group in found.rules.groupby(["rule", "name"], sort=False):
        held = int(group["passed"].sum())
        if held < len(group):
            broken.add(len(lines))
        outcome = "held" if held == len(group) else "FAILED"
        lines.append((str(rule), str(name), outcome, f"{wording.count(held)} of {wording.count(len(group))}"))
    return Table(
        ("Rule", "What it demands", "Outcome", "Held in (checks)"), lines, frozenset({0, 3}), frozenset(broken)
    )


def _outcome(rule: Any) -> str:
    if not rule.passed:
        return "FAILED"
    return "printed" if rule.rule == RECORDER_COST else "held"


def rules(found: Overview) -> Table:
    """Every check of a rule, with its figures; failed ones are marked."""
    return table(
        found.rules,
        [
            ("Rule", True, lambda r: text(r.rule)),
            ("What it demands", False, lambda r: text(r.name)),
            _ARM,
            ("Cell", False, lambda r: text(r.cell)),
            (
                "Outcome",
                False,
                _outcome,
            ),
            ("Detail", False, lambda r: text(r.detail)),
        ],
        [not passed for passed in found.rules["passed"]],
    )


def cells(found: Overview) -> Table:
    """The sweep: what ran, how often, and what ended it."""
    return table(
        found.cells,
        [
            ("Cell", False, lambda r: text(r.cell)),
            ("Phase", False, lambda r: text(r.phase)),
            ("Batch (sequences)", True, lambda r: wording.count(r.batch)),
            ("Length (tokens)", True, lambda r: wording.count(r.length)),
            ("New tokens", True, lambda r: wording.count(r.new_tokens)),
            ("Warm-up (s)", True, lambda r: wording.number(r.warmup_s)),
            ("Repeats", True, lambda r: wording.count(r.repeats)),
            ("Stopped by", False, lambda r: text(r.stopped)),
            ("Complete", False, lambda r: "yes" if r.done else "no"),
            ("Inputs", False, lambda r: text(r.reference)),
        ],
        [not done for done in found.cells["done"]],
    )


def outputs(found: Overview) -> Table:
    """What arms said in each cell, by the first digits of its hash: a line a cell, a column an arm."""
    said = {(row.cell, row.arm): str(row.sha256)[: wording.DIGEST] for row in found.outputs.itertuples()}
    arms = list(dict.fromkeys(found.outputs["arm"]))
    lines = [
        (str(cell), *(said.get((cell, arm), wording.ABSENT) for arm in arms))
        for cell in dict.fromkeys(found.outputs["cell"])
    ]
    return Table(("Cell", *arms), lines)


def unsupported(found: Overview) -> Table:
    """What this machine could not measure, and why."""
    return table(
        found.unsupported,
        [
            ("Not measured", False, lambda r: text(r.metric)),
            ("Reason", False, lambda r: text(r.reason)),
        ],
    )


def facts(found: Overview) -> Table:
    """How the run was made."""
    return Table(("Fact", "Value"), [(name, value) for name, value in found.facts])


def glossary() -> Table:
    """`wording.GLOSSARY`."""
    return Table(("Term", "Definition", "Unit"), [tuple(entry) for entry in wording.GLOSSARY])
