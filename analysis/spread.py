"""Spread between seeds beside the intervals of single runs: one line a figure, and whether it is stable.

A figure is called stable where training again moves it no further than measuring again would (`SPREAD_RULE`). Nothing
is concluded from fewer than `SEEDS_TO_JUDGE` seeds.

Not here: where figures come from (`study`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from scipy import stats

from analysis.wording import how_many, percent_interval
from profiler.intervals import CONFIDENCE

PATTERN, SPEED, QUALITY = "pattern", "speed", "quality"
SKIPPED, LAYERS, ALIKE = "executed skip", "layers ever skipped", "inputs decided alike"
SAVED, FLOPS, TIME = "step time saved", "FLOPs skipped", "step time"
RATIO = "perplexity ÷ twin's"
SHARE, MILLISECONDS, FACTOR, JACCARD = "share", "ms", "ratio", "Jaccard"

#: `where` of lines of pairs.
PAIRS = "pairs of seeds"

STABLE, NOT_STABLE, TOO_WIDE = "stable", "not stable", "too wide to tell"
BEYOND_CHANCE, PARTLY, BY_CHANCE = "beyond chance", "beyond chance in part", "no more than chance"
#: Fewest seeds from which something is concluded.
SEEDS_TO_JUDGE = 3
#: Width of an interval, in shares, ratios or parts of a mean time, past which "stable" would say nothing.
WIDEST = 0.2

LINE_COLUMNS = (
    "arm", "twin", "part", "figure", "where", "unit", "seeds", "mean", "sd", "lowest", "highest", "own_width", "limit",
    "verdict", "note",
)  # fmt: skip

SPREAD_RULE = (
    "Stable: highest − lowest over seeds is at most {factor} × the median width of the seeds' own 95 % intervals. Of "
    "studies of {seeds} seeds that differ by what their intervals cover alone, 95 in 100 stay within that. Where that "
    "width is above {widest} points (for times, {widest} % of the mean), nothing is called stable: it is too wide to "
    "tell. Figures that are counted have no interval and get no verdict."
)
LAYERS_RULE = "Layers ever skipped are stable where every pair of seeds skips the very same layers (Jaccard 1)."
ALIKE_RULE = (
    "Two seeds decide inputs alike beyond chance where the interval lies above what two routers with these rates per "
    "layer would agree by without regard to the input; in part, where not every pair does. Where all pairs decide "
    "everything alike, that is stable."
)


def rules(seeds: int) -> list[str]:
    """How verdicts on so many seeds come about."""
    if seeds < SEEDS_TO_JUDGE:
        return [f"With {seeds} {'seed' if seeds == 1 else 'seeds'} nothing is judged; {SEEDS_TO_JUDGE} are needed."]
    factor = f"{spread_factor(seeds):.2f}"
    return [SPREAD_RULE.format(factor=factor, seeds=seeds, widest=f"{WIDEST:.0%}"[:-1]), LAYERS_RULE, ALIKE_RULE]


@functools.cache
def spread_factor(seeds: int) -> float:
    """Largest range of `seeds` equal normal values that is within 95 %, in widths of one value's 95 % interval."""
    width = 2 * float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    return float(stats.studentized_range.ppf(CONFIDENCE, seeds, math.inf)) / width


def lines(values: pd.DataFrame, pairs: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """A row a figure, its spread over seeds and what that says; lines of pairs after the other ones of their pattern.

    Args:
        values: columns `study.VALUE_COLUMNS`, the rows of a figure together.
        pairs: `agreement.AGREEMENT_COLUMNS` and `arm`, `first` and `second` being seeds.
        arms: in the order wanted.

    Returns:
        Columns `LINE_COLUMNS`: mean, standard deviation (n − 1) and range over seeds, or over pairs of them (`LAYERS`,
        `ALIKE`). `own_width`: median width of the seeds' own intervals; `limit`: the largest range called stable.
        Without a verdict, `note` says why.
    """
    found = []
    for arm in arms:
        of_arm = values[values["arm"] == arm]
        for _, rows in of_arm.groupby(["part", "figure", "where"], sort=False):
            found.append(_summed(rows))
        of_pairs = pairs[pairs["arm"] == arm]
        if not of_pairs.empty:
            after = [k for k, line in enumerate(found) if line["arm"] == arm and line["part"] == PATTERN][-1] + 1
            twin = of_arm["twin"].iloc[0]
            found[after:after] = [_same_layers(arm, twin, of_pairs), _alike(arm, twin, of_pairs)]
    return pd.DataFrame(found, columns=list(LINE_COLUMNS)).astype({"seeds": "Int64"})


def _summed(rows: pd.DataFrame) -> dict[str, Any]:
    first = rows.iloc[0]
    line = {name: first[name] for name in ("arm", "twin", "part", "figure", "where", "unit")}
    line |= _moments(rows["value"], len(rows))
    widths = rows["high"] - rows["low"]
    if len(rows) < SEEDS_TO_JUDGE:
        return line | {"note": f"{how_many(len(rows), 'seed')}: too few to judge"}
    if widths.isna().any():
        counted = "counted: no interval" if widths.isna().all() else "not every seed has an interval"
        return line | {"own_width": widths.median(), "note": counted}
    width, mean = float(widths.median()), abs(float(rows["value"].mean()))
    limit = spread_factor(len(rows)) * width
    # Rounding of sums must not make equal values unequal where an interval has no width.
    within = float(rows["value"].max() - rows["value"].min()) <= limit + 1e-12 * mean
    wide = width > WIDEST * (mean if first["unit"] == MILLISECONDS else 1)
    verdict = NOT_STABLE if not within else TOO_WIDE if wide else STABLE
    return line | {"own_width": width, "limit": limit, "verdict": verdict}


def _moments(values: pd.Series[float], seeds: int) -> dict[str, Any]:
    return {
        "seeds": seeds, "mean": values.mean(), "sd": values.std(ddof=1), "lowest": values.min(),
        "highest": values.max(), "verdict": "", "note": "",
    }  # fmt: skip


def _seeds(pairs: pd.DataFrame) -> int:
    return len({*pairs["first"], *pairs["second"]})


def _same_layers(arm: str, twin: Any, pairs: pd.DataFrame) -> dict[str, Any]:
    seeds, overlap = _seeds(pairs), pairs["jaccard_ever"].dropna()
    line = {"arm": arm, "twin": twin, "part": PATTERN, "figure": LAYERS, "where": PAIRS, "unit": JACCARD}
    line |= _moments(overlap, seeds)
    notes = [how_many(len(pairs), "pair")]
    if len(overlap) < len(pairs):
        nothing = len(pairs) - len(overlap)
        notes.append(f"{how_many(nothing, 'pair')} {'skips' if nothing == 1 else 'skip'} nothing at all")
    if seeds < SEEDS_TO_JUDGE:
        notes.append(f"{how_many(seeds, 'seed')}: too few to judge")
    elif len(overlap):
        line["verdict"] = STABLE if overlap.min() == 1 else NOT_STABLE
    return line | {"note": "; ".join(notes)}


def _alike(arm: str, twin: Any, pairs: pd.DataFrame) -> dict[str, Any]:
    seeds, known = _seeds(pairs), pairs.dropna(subset=["agreement"])
    line = {"arm": arm, "twin": twin, "part": PATTERN, "figure": ALIKE, "where": PAIRS, "unit": SHARE}
    line |= _moments(known["agreement"], seeds)
    chance = known["by_chance"]
    notes = [how_many(len(known), "pair")]
    if len(known):
        notes.append(f"by chance {percent_interval(chance.min(), chance.max())}")
    if seeds < SEEDS_TO_JUDGE:
        notes.append(f"{how_many(seeds, 'seed')}: too few to judge")
    elif len(known) and (known["agreement"] == 1).all():
        line["verdict"] = STABLE
    elif len(known) and known["low"].notna().all():
        beyond = int((known["low"] > chance).sum())
        notes.append(f"beyond it in {beyond} of {how_many(len(known), 'pair')}")
        line["verdict"] = BEYOND_CHANCE if beyond == len(known) else PARTLY if beyond else BY_CHANCE
    return line | {"note": "; ".join(notes)}
