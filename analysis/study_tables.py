"""Frames of a study as tables of text: figures with their spread, seed by seed, and what pairs of seeds share.

Order, selection and words only; no figure is computed here.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import wording
from analysis.diagnostic_tables import across, agreement, decimals
from analysis.spread import JACCARD, MILLISECONDS, NOT_STABLE, SHARE
from analysis.study import Compared
from analysis.tables import Table, table, text

#: Units as a reader meets them.
_UNITS = {SHARE: "%", MILLISECONDS: "ms", JACCARD: "0 to 1"}


def value(number: Any, unit: str) -> str:
    """A figure as its unit is read: a share in per cent, a time in ms, a ratio or an overlap as it is."""
    if unit == SHARE:
        return wording.percent(number)
    return wording.milliseconds(number) if unit == MILLISECONDS else decimals(number, 3)


def figure_name(row: Any) -> str:
    """What a line is about, with its denominator."""
    twin = row.twin
    return {
        "executed skip": "Executed skip (% of layers an input may skip)",
        "layers ever skipped": "Layers ever skipped: overlap (Jaccard)",
        "inputs decided alike": "Decided alike (% of inputs × layers)",
        "step time saved": f"Step time saved (% of {twin}'s median step)",
        "FLOPs skipped": f"FLOPs skipped (% of {twin}'s)",
        "step time": "Step time (ms): no seed touches this arm",
        "perplexity ÷ twin's": f"Perplexity ÷ that of {twin} (ratio)",
    }[row.figure]


def spread(found: Compared, arm: str) -> Table:
    """The lines of one arm: mean, spread between seeds, the seeds' own intervals, verdict. Unstable ones are marked."""
    lines = found.lines[found.lines["arm"] == arm]
    return table(
        lines,
        [
            ("Part", False, lambda r: text(r.part)),
            ("Figure", False, figure_name),
            ("Where", False, lambda r: text(r.where)),
            ("Mean over seeds", True, lambda r: value(r.mean, r.unit)),
            ("Standard deviation", True, lambda r: value(r.sd, r.unit)),
            ("Lowest", True, lambda r: value(r.lowest, r.unit)),
            ("Highest", True, lambda r: value(r.highest, r.unit)),
            ("One seed's 95 % interval (median width)", True, lambda r: value(r.own_width, r.unit)),
            ("Largest range called stable", True, lambda r: value(r.limit, r.unit)),
            ("Verdict", False, lambda r: text(r.verdict)),
            ("Seeds", True, lambda r: wording.count(r.seeds)),
            ("Note", False, lambda r: text(r.note)),
        ],
        [verdict == NOT_STABLE for verdict in lines["verdict"]],
    )


def by_seed(found: Compared, arm: str) -> Table:
    """The figures of one arm, a column a seed, each with its own interval."""
    values = found.values[found.values["arm"] == arm]
    lines = []
    for _, rows in values.groupby(["part", "figure", "where"], sort=False):
        of = {row.seed: row for row in rows.itertuples()}
        first = next(iter(of.values()))
        each = [_with_interval(of.get(seed)) for seed in found.seeds]
        lines.append((figure_name(first), text(first.where), *each))
    columns = ("Figure", "Where", *(f"Seed {seed} [95 % interval]" for seed in found.seeds))
    return Table(columns, lines, frozenset(range(2, len(columns))))


def _with_interval(row: Any) -> str:
    if row is None:
        return wording.ABSENT
    said = value(row.value, row.unit)
    if wording.absent(row.low) or wording.absent(row.high):
        return said
    return f"{said} [{value(row.low, row.unit)}, {value(row.high, row.unit)}]"


def patterns(found: Compared, arm: str) -> Table:
    """Which layers each seed skips, on held-out inputs."""
    return table(
        found.patterns[found.patterns["arm"] == arm],
        [
            ("Seed", True, lambda r: str(r.seed)),
            ("Layers ever skipped", False, lambda r: text(r.ever_skipped)),
            ("Layers most inputs skip", False, lambda r: text(r.most_skip)),
            ("Vary by input (layers)", True, lambda r: wording.count(r.varying)),
            ("Patterns (distinct)", True, lambda r: wording.count(r.patterns)),
            ("Executed (% of layers)", True, lambda r: wording.percent(r.executed_share)),
            ("Inputs", True, lambda r: wording.count(r.requests)),
        ],
    )


def pairs(found: Compared, arm: str) -> Table:
    """What two seeds share, pair by pair."""
    frame: pd.DataFrame = found.pairs[found.pairs["arm"] == arm]
    named = {side: [f"seed {seed}" for seed in frame[side]] for side in ("first", "second")}
    return agreement(frame.assign(**named))


def layers(found: Compared, arm: str) -> Table:
    """In how many seeds each layer is skipped."""
    return across(found.layers[found.layers["arm"] == arm])
