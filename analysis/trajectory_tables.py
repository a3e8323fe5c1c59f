"""Frames of trajectories and of matched arms as tables of text; nothing is computed here.

Every column says its unit and denominator. What was not shown has its line like what was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import wording
from analysis.diagnostic_tables import decimals
from analysis.tables import Table, table, text
from analysis.token_paths import GATE
from analysis.trajectories import SHARE


def costs(frame: pd.DataFrame) -> Table:
    """`trajectories.costs` of one arm: a line a domain."""
    return table(
        frame,
        [
            ("Domain", False, lambda r: text(r.domain)),
            ("Routed parts that ran (% of layers, mean over inputs)", True, lambda r: wording.percent(r.ran_share)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.low, r.high)),
            ("Lowest input", True, lambda r: wording.percent(r.lowest)),
            ("Highest input", True, lambda r: wording.percent(r.highest)),
            ("Blocks (FLOPs a token)", True, lambda r: wording.quantity(r.flops_per_token, "FLOPs")),
            ("Whole blocks (FLOPs a token)", True, lambda r: wording.quantity(r.full_flops_per_token, "FLOPs")),
            ("Executed (% of whole blocks' FLOPs)", True, lambda r: wording.percent(r.flop_share)),
            (
                "95 % interval of that",
                True,
                lambda r: wording.percent_interval(r.flop_share_low, r.flop_share_high),
            ),
            ("Inputs", True, lambda r: wording.count(r.inputs)),
            ("Tokens", True, lambda r: wording.count(r.tokens)),
        ],
    )


def tests(frame: pd.DataFrame) -> Table:
    """`trajectory_tests.trajectory_tests` of one arm: a line a test, whatever came of it."""

    def target(row: Any) -> str:
        return f"{row.target}, mean over depth" if wording.absent(row.layer) else f"{row.target}, layer {row.layer}"

    return table(
        frame,
        [
            ("Of the trajectory", False, target),
            ("Against", False, lambda r: text(r.against)),
            ("Statistic", False, lambda r: text(r.statistic)),
            ("Value", True, lambda r: decimals(r.value, 3)),
            ("95 % interval", True, lambda r: _interval(r.low, r.high, 3)),
            ("p", True, lambda r: decimals(r.p, 4)),
            ("p corrected", True, lambda r: decimals(r.p_corrected, 4)),
            ("Correction", False, lambda r: text(r.correction)),
            ("Verdict", False, lambda r: text(r.verdict)),
            ("Inputs", True, lambda r: wording.count(r.inputs)),
            ("Tokens", True, lambda r: wording.count(r.tokens)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def breakdown(frame: pd.DataFrame) -> Table:
    """`trajectories.breakdown` of one arm: a line a group of tokens, a column a target with its interval."""
    targets = list(dict.fromkeys(frame["target"]))
    lines = []
    for (by, group), rows in frame.groupby(["by", "group"], sort=False):
        of = {row.target: row for row in rows.itertuples()}
        first = of[targets[0]]
        lines.append(
            (
                str(by),
                str(group),
                wording.count(first.tokens),
                wording.count(first.inputs),
                *(_with_interval(target, of.get(target)) for target in targets),
            )
        )
    titles = [f"{_title(target)} [95 % interval]" for target in targets]
    columns = ("Tokens by", "Group", "Tokens", "Inputs", *titles)
    return Table(columns, lines, frozenset(range(2, len(columns))))


def _title(target: str) -> str:
    return "Routed parts that ran (%)" if target == SHARE else f"{target} (mean over depth)"


def _with_interval(target: str, row: Any) -> str:
    if row is None:
        return wording.ABSENT
    if target == SHARE:
        spread = wording.percent_interval(row.low, row.high)
        value = wording.percent(row.mean)
    else:
        spread, value = _interval(row.low, row.high, 3), decimals(row.mean, 3)
    return value if spread == wording.ABSENT else f"{value} [{spread}]"


def forgetting(frame: pd.DataFrame) -> Table:
    """`trajectories.forgetting` of one arm: a line a layer."""
    return table(
        frame,
        [
            ("Layer", True, lambda r: str(r.layer)),
            ("Depth (routed layers)", True, lambda r: wording.count(r.depth)),
            ("Forget factor ρ", True, lambda r: decimals(r.forget_factor, 4)),
            ("Half-life (routed layers)", True, half_life),
        ],
    )


def half_life(row: Any) -> str:
    """A half-life in layers; without end where nothing is forgotten."""
    return "none: nothing is forgotten" if row.half_life_layers == float("inf") else decimals(row.half_life_layers, 1)


def profile(frame: pd.DataFrame) -> Table:
    """`trajectories.profile` of one arm over all tokens: a line a layer, columns of each signal."""
    signals = [GATE, *(s for s in dict.fromkeys(frame["signal"]) if s != GATE)]
    lines = []
    for (layer, depth), rows in frame.groupby(["layer", "depth"], sort=False):
        of = {row.signal: row for row in rows.itertuples()}
        cells = []
        for signal in signals:
            row = of.get(signal)
            if row is None:
                cells += [wording.ABSENT, wording.ABSENT]
            else:
                spread = _interval(row.low, row.high, 3)
                middle = decimals(row.median, 3)
                cells += [
                    middle if spread == wording.ABSENT else f"{middle} [{spread}]",
                    _interval(row.lower, row.upper, 3),
                ]
        lines.append((str(layer), str(depth), *cells))
    titles = [title for s in signals for title in (f"{s}: median [95 % interval]", f"{s}: quartiles")]
    columns = ("Layer", "Depth", *titles)
    return Table(columns, lines, frozenset(range(len(columns))))


def matched(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`matched.matched`: a line an arm; those at another rate than what they stand against are marked.

    Args:
        names: `wording.arm_names`.
    """
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Skipped (% of token × routed layer)", True, lambda r: wording.percent(r.executed_skip)),
            ("Against", False, lambda r: text(r.against) if r.against != r.arm else wording.ABSENT),
            ("Apart (points)", True, lambda r: decimals(100 * r.gap, 2) if r.against != r.arm else wording.ABSENT),
            ("Perplexity", True, lambda r: wording.number(r.perplexity, 4)),
            ("÷ dense [95 % interval]", True, lambda r: _ratio(r.to_dense, r.to_dense_low, r.to_dense_high)),
            ("÷ against [95 % interval]", True, lambda r: _ratio(r.ratio, r.ratio_low, r.ratio_high)),
            ("p corrected (Holm)", True, lambda r: decimals(r.p_corrected, 4)),
            ("Than it", False, lambda r: text(r.verdict)),
            ("Next token right (% of scored)", True, lambda r: wording.percent(r.right)),
            ("95 % interval of right", True, lambda r: wording.percent_interval(r.right_low, r.right_high)),
            ("Asked for (%)", True, lambda r: wording.percent(r.wanted)),
            ("When calibrated (%)", True, lambda r: wording.percent(r.calibrated)),
            ("Threshold", True, lambda r: decimals(r.threshold, 4)),
            ("95 % interval of perplexity", True, lambda r: _significant(r.low, r.high)),
            ("Items", True, lambda r: wording.count(r.items)),
            ("Tokens scored", True, lambda r: wording.count(r.tokens)),
            ("Note", False, lambda r: text(r.note)),
        ],
        [not like for like in frame["like_rates"]],
    )


def _interval(low: Any, high: Any, places: int) -> str:
    if wording.absent(low) or wording.absent(high):
        return wording.ABSENT
    return f"{decimals(low, places)} to {decimals(high, places)}"


def _ratio(value: Any, low: Any, high: Any) -> str:
    spread = _significant(low, high)
    return wording.number(value, 4) + ("" if spread == wording.ABSENT else f" [{spread}]")


def _significant(low: Any, high: Any) -> str:
    if wording.absent(low) or wording.absent(high):
        return wording.ABSENT
    return f"{wording.number(low, 4)} to {wording.number(high, 4)}"
