"""Frames of held-out quality and of what decisions show, as tables of text; nothing is computed here.

Every column says its unit and denominator. A relation that was not shown has its line like one that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import wording
from analysis.quality import GATED
from analysis.routing import ALL_DOMAINS
from analysis.tables import Table, table, text
from analysis.tracking import SHARE


def perplexity(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`quality.perplexity`: a line an arm, domain and mode; what leaks is marked.

    Args:
        names: `wording.arm_names`.
    """
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Domain", False, lambda r: text(r.domain)),
            ("Mode", False, lambda r: text(r.mode)),
            ("Perplexity", True, lambda r: wording.number(r.perplexity, 4)),
            ("95 % interval", True, lambda r: _interval(r.low, r.high, 4)),
            ("Against the twin (ratio)", True, lambda r: wording.number(r.against_twin, 4)),
            ("95 % interval of the ratio", True, lambda r: _interval(r.against_twin_low, r.against_twin_high, 4)),
            ("Than the twin", False, lambda r: text(r.verdict)),
            ("Items", True, lambda r: wording.count(r.items)),
            ("Tokens scored", True, lambda r: wording.count(r.tokens)),
        ],
        [mode != GATED for mode in frame["mode"]],
    )


def accuracy(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`answers.accuracy`: a line an arm, domain and mode; what leaks is marked."""
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Domain", False, lambda r: text(r.domain)),
            ("Mode", False, lambda r: text(r.mode)),
            ("Right (% of items)", True, lambda r: wording.percent(r.accuracy)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.low, r.high)),
            ("By chance (%)", True, lambda r: wording.percent(r.chance)),
            ("Over the twin (% of items)", True, lambda r: wording.percent(r.over_twin)),
            ("95 % interval of that", True, lambda r: wording.percent_interval(r.over_twin_low, r.over_twin_high)),
            ("Items", True, lambda r: wording.count(r.items)),
        ],
        [mode != GATED for mode in frame["mode"]],
    )


def retain(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`answers.retain`: a line an arm and score."""
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Retains of", False, lambda r: names[r.of]),
            ("Score", False, lambda r: text(r.score)),
            ("Retain (%)", True, lambda r: wording.percent(r.retain)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.low, r.high)),
            ("Domains", True, lambda r: wording.count(r.tasks)),
            ("Without", False, lambda r: text(r.left_out)),
        ],
    )


def pairs(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`baselines.pairs`; pairs at unlike rates are marked."""
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Skips (mean layers an input)", True, lambda r: wording.number(r.layers_skipped)),
            ("Patterns (distinct)", True, lambda r: wording.count(r.patterns)),
            ("Against", False, lambda r: names[r.other]),
            ("That skips (mean layers)", True, lambda r: wording.number(r.other_layers_skipped)),
            ("Its patterns", True, lambda r: wording.count(r.other_patterns)),
            ("Perplexity (ratio)", True, lambda r: wording.number(r.perplexity_ratio, 4)),
            ("95 % interval", True, lambda r: _interval(r.low, r.high, 4)),
            ("Verdict", False, lambda r: text(r.verdict)),
            ("Items", True, lambda r: wording.count(r.items)),
            ("Note", False, lambda r: text(r.note)),
        ],
        [not like for like in frame["like_rates"]],
    )


def eligibility(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """`diagnostics.eligibility`: layers that could be skipped beside skips that were executed."""
    return table(
        frame,
        [
            ("Arm", False, lambda r: names[r.arm]),
            ("Inputs", True, lambda r: wording.count(r.requests)),
            ("Layers", True, lambda r: wording.count(r.layers)),
            ("Start below threshold", True, lambda r: wording.count(r.starts_skipping)),
            ("Ever skipped", True, lambda r: wording.count(r.ever_skipped)),
            ("Always skipped", True, lambda r: wording.count(r.always_skipped)),
            ("Vary by input", True, lambda r: wording.count(r.varying)),
            ("Patterns (distinct)", True, lambda r: wording.count(r.patterns)),
            ("Eligible (% of layers)", True, lambda r: wording.percent(r.eligible_share)),
            ("Executed (% of layers)", True, lambda r: wording.percent(r.executed_share)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.low, r.high)),
            ("Executed (mean layers an input)", True, lambda r: wording.number(r.layers_skipped)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def layers(rates: pd.DataFrame, flips: pd.DataFrame, *, by_token: bool = False) -> Table:
    """`skip_rates` and `flip_rates` of one arm: a line a layer, a column a domain.

    Args:
        by_token: tokens decide, so that a rate is the mean over inputs of the share of an input's tokens.
    """
    domains = [ALL_DOMAINS, *(d for d in dict.fromkeys(rates["domain"]) if d != ALL_DOMAINS)]
    value = {(r.layer, r.site, r.domain): r for r in rates.itertuples()}
    lines = [
        (
            str(row.layer),
            str(row.site),
            wording.percent(value[row.layer, row.site, ALL_DOMAINS].skip_rate),
            wording.percent_interval(*_ends(value[row.layer, row.site, ALL_DOMAINS])),
            *(wording.percent(value[row.layer, row.site, domain].skip_rate) for domain in domains[1:]),
            str(row.majority),
            wording.percent(row.flip_rate),
            wording.percent_interval(row.low, row.high),
            wording.count(row.differ),
        )
        for row in flips.itertuples()
    ]
    of = "an input's tokens, mean over inputs" if by_token else "inputs"
    titles = [f"Skipped by (% of {of})", "95 % interval", *(f"{domain} (%)" for domain in domains[1:])]
    columns = (
        "Layer", "Site", *titles, "Most tokens of most inputs" if by_token else "Majority",
        "Differ from it (% of inputs)", "95 % interval of those", "Differ (inputs)",
    )  # fmt: skip
    majority = len(columns) - 4
    return Table(columns, lines, frozenset({0, *range(2, len(columns))} - {majority}))


def _ends(row: Any) -> tuple[Any, Any]:
    return row.low, row.high


def tracks(frame: pd.DataFrame) -> Table:
    """`tracking.tracks` of one arm: a line a test, whatever came of it."""

    def target(row: Any) -> str:
        return text(row.target) if row.target == SHARE else f"layer {row.layer} skipped"

    return table(
        frame,
        [
            ("What the router does", False, target),
            ("Against", False, lambda r: text(r.tracker)),
            ("Held fixed", False, lambda r: text(r.held_fixed)),
            ("Spearman's ρ", True, lambda r: decimals(r.rho, 2)),
            ("95 % interval", True, lambda r: _decimal_interval(r.low, r.high)),
            ("p (permutation)", True, lambda r: decimals(r.p, 4)),
            ("p corrected", True, lambda r: decimals(r.p_corrected, 4)),
            ("Correction", False, lambda r: text(r.correction)),
            ("Verdict", False, lambda r: text(r.verdict)),
            ("Inputs", True, lambda r: wording.count(r.n)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def confounds(frame: pd.DataFrame) -> Table:
    """`tracking.confounds` of one arm."""
    return table(
        frame,
        [
            ("Figure of the input", False, lambda r: text(r.tracker)),
            ("Spearman's ρ with length", True, lambda r: decimals(r.rho, 2)),
            ("95 % interval", True, lambda r: _decimal_interval(r.low, r.high)),
            ("Inputs", True, lambda r: wording.count(r.n)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def drift(frame: pd.DataFrame) -> Table:
    """`diagnostics.drift` of one arm: a line a layer."""
    return table(
        frame,
        [
            ("Layer", True, lambda r: str(r.layer)),
            ("Start (logit)", True, lambda r: decimals(r.start, 2)),
            ("Recorded mean (logit)", True, lambda r: decimals(r.mean, 2)),
            ("Moved by", True, lambda r: decimals(r.drift, 2)),
            ("95 % interval", True, lambda r: _decimal_interval(r.low, r.high)),
            ("Standard deviation", True, lambda r: decimals(r.standard_deviation, 2)),
            ("Lowest", True, lambda r: decimals(r.lowest, 2)),
            ("Highest", True, lambda r: decimals(r.highest, 2)),
            ("Other side of 0 than at the start (% of inputs)", True, lambda r: wording.percent(r.crossed)),
            ("Inputs", True, lambda r: wording.count(r.requests)),
        ],
    )


def agreement(frame: pd.DataFrame) -> Table:
    """`agreement.agreement`: a line a pair of runs."""
    return table(
        frame,
        [
            ("First", False, lambda r: text(r.first)),
            ("Second", False, lambda r: text(r.second)),
            ("Jaccard, layers ever skipped", True, lambda r: decimals(r.jaccard_ever, 2)),
            ("Jaccard, layers most inputs skip", True, lambda r: decimals(r.jaccard_majority, 2)),
            ("Decided alike (% of inputs × layers)", True, lambda r: wording.percent(r.agreement)),
            ("95 % interval", True, lambda r: wording.percent_interval(r.low, r.high)),
            ("By chance at these rates (%)", True, lambda r: wording.percent(r.by_chance)),
            ("Inputs in common", True, lambda r: wording.count(r.requests)),
            ("Note", False, lambda r: text(r.note)),
        ],
    )


def across(frame: pd.DataFrame) -> Table:
    """`agreement.across`: a line a layer."""
    return table(
        frame,
        [
            ("Layer", True, lambda r: str(r.layer)),
            ("Site", False, lambda r: text(r.site)),
            ("Runs", True, lambda r: wording.count(r.runs)),
            ("Ever skipped in (runs)", True, lambda r: wording.count(r.ever_skipped_in)),
            ("Most inputs skip in (runs)", True, lambda r: wording.count(r.majority_skips_in)),
            ("Mean rate (% of inputs)", True, lambda r: wording.percent(r.mean_rate)),
            ("Lowest", True, lambda r: wording.percent(r.lowest_rate)),
            ("Highest", True, lambda r: wording.percent(r.highest_rate)),
        ],
    )


def decimals(value: Any, places: int) -> str:
    """A number with so many decimals and a real minus sign."""
    return wording.ABSENT if wording.absent(value) else f"{float(value):.{places}f}".replace("-", wording.MINUS)


def _interval(low: Any, high: Any, digits: int) -> str:
    if wording.absent(low) or wording.absent(high):
        return wording.ABSENT
    return f"{wording.number(low, digits)} to {wording.number(high, digits)}"


def _decimal_interval(low: Any, high: Any) -> str:
    return (
        wording.ABSENT if wording.absent(low) or wording.absent(high) else f"{decimals(low, 2)} to {decimals(high, 2)}"
    )
