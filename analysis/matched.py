"""Arms side by side at the rate they really executed: is the router better than itself with a part taken away?

A control is worth nothing unless it skips as much as what it is a control for. So every arm that skips stands against
the *reference*, the first of them in the spec, by the share of (token, routed layer) pairs that skipped: rows counted
where they entered the backbone's parts, over the held-out inputs. Arms more than `LIKE_POINTS` apart are compared and
marked, because the one that skips less should win in any case. Of a reference that was run at several rates, the one
nearest in rate counts.

    executed skip = 1 − Σ rows that entered a routed part ÷ (Σ token rows × routed parts)

p are two-sided, by flipping the signs of the items' differences, and corrected by Holm for the number of arms.

Pairs of all arms, counted in layers an input, are `baselines`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis import quality
from analysis.partial_correlation import PERMUTATIONS, ROUNDING, holm
from analysis.resampling import counts, interval
from analysis.routing import ALL_DOMAINS
from analysis.skips import HELD_OUT, deciding_arms, rows_of, skipping_choices
from analysis.tracking import ALPHA
from analysis.wording import percent, percent_interval
from profiler.intervals import Interval
from profiler.records import ArmRecord
from profiler.store import Run

MATCHED_COLUMNS = (
    "arm", "series", "method", "threshold", "wanted", "calibrated", "pairs", "executed_skip", "against", "gap",
    "like_rates", "items", "tokens", "perplexity", "low", "high", "to_dense", "to_dense_low", "to_dense_high", "right",
    "right_low", "right_high", "ratio", "ratio_low", "ratio_high", "p", "p_corrected", "verdict", "note",
)  # fmt: skip
#: Executed skip by which two arms may differ and still be compared at "the same" rate, as a share of 1.
LIKE_POINTS = 0.01
REFERENCE, NOT_MEASURED = "the reference", "not measured"
#: What an arm may be given besides its rate and still be of the same series.
RATES = ("threshold", "adapter_rate", "ratio", "rate", "count")


def executed_skip(run: Run, arm: str, cell: str = HELD_OUT) -> tuple[float, int]:
    """Share of (token row, routed part) pairs whose part did not run, and the number of pairs; NaN where none is."""
    record = run.manifest.arm(arm)
    idle = skipping_choices(record)
    sites = {(layer, site) for layer, site, _ in idle}
    steps = rows_of(run.table("steps"), arm=arm, cell=cell).aggregate("sum(rows)::bigint").fetchall()
    pairs = int(steps[0][0] or 0) * len(sites)
    counted = rows_of(run.table("rows"), arm=arm, cell=cell).aggregate("layer, site, choice, sum(rows)::bigint as rows")
    ran = sum(
        rows
        for layer, site, choice, rows in counted.fetchall()
        if (layer, site) in sites and not idle[layer, site, choice]
    )
    return (1 - ran / pairs if pairs else float("nan")), pairs


def matched(run: Run) -> pd.DataFrame:
    """Every arm that skips, in the spec's order, against the reference on the same held-out items.

    Returns:
        Columns `MATCHED_COLUMNS`. `series` says which arms are one thing at several rates. `calibrated`: what the
        threshold gave on the calibration prompts, where `wanted` asked for it. `gap` = executed skip less that of
        `against`. `to_dense`: perplexity ÷ that of the first arm that skips nothing. `right`: share of scored tokens
        than which no other was likelier. `ratio`: perplexity ÷ that of `against`, above 1 worse. Empty where no
        held-out decisions were recorded.
    """
    arms = [run.manifest.arm(name) for name in deciding_arms(run)]
    rates = {arm.name: executed_skip(run, arm.name) for arm in arms}
    arms = [arm for arm in arms if rates[arm.name][1]]
    if not arms:
        return pd.DataFrame(columns=list(MATCHED_COLUMNS))
    series = _series(arms)
    own = [arm.name for arm in arms if series[arm.name] == series[arms[0].name]]
    dense = next((arm.name for arm in run.manifest.arms if arm.name not in deciding_arms(run)), None)
    whole, lines = quality.perplexity(run), []
    for arm in arms:
        skip, pairs = rates[arm.name]
        against = arm.name if arm.name in own else min(own, key=lambda name: abs(rates[name][0] - skip))
        gap = skip - rates[against][0]
        line: dict[str, Any] = {
            "arm": arm.name, "series": series[arm.name], "method": arm.method,
            "threshold": None if arm.synthetic else arm.options.get("threshold"),
            "pairs": pairs, "executed_skip": skip, "against": against,
            "gap": gap, "like_rates": abs(gap) <= LIKE_POINTS,
            "verdict": REFERENCE if arm.name in own else NOT_MEASURED,
        }  # fmt: skip
        if arm.calibration is not None:
            line |= {"wanted": arm.calibration.wanted, "calibrated": arm.calibration.achieved}
        lines.append(
            line | _quality(run, whole, arm.name, dense) | _against(run, arm, against) | {"note": _note(arm, gap)}
        )
    return _judged(pd.DataFrame(lines, columns=list(MATCHED_COLUMNS)))


def _series(arms: list[ArmRecord]) -> dict[str, str]:
    """Arm → the name of the first arm that differs from it in its rate only."""
    firsts: dict[str, str] = {}
    return {arm.name: firsts.setdefault(repr((arm.method, _without_rates(arm.options))), arm.name) for arm in arms}


def _without_rates(options: Any) -> Any:
    if isinstance(options, dict):
        return {key: _without_rates(value) for key, value in sorted(options.items()) if key not in RATES}
    return options


def _quality(run: Run, whole: pd.DataFrame, arm: str, dense: str | None) -> dict[str, Any]:
    own = whole[(whole["arm"] == arm) & (whole["domain"] == ALL_DOMAINS) & (whole["mode"] == quality.GATED)]
    if own.empty:
        return {}
    (row,) = own.to_dict("records")
    found = {key: row[key] for key in ("items", "tokens", "perplexity", "low", "high")}
    ratio = quality.perplexity_ratio(run, arm, dense) if dense is not None else None
    if ratio is not None:
        found |= {"to_dense": ratio.value, "to_dense_low": ratio.low, "to_dense_high": ratio.high}
    right = _right(run, arm)
    return found | ({"right": right.value, "right_low": right.low, "right_high": right.high} if right else {})


def _right(run: Run, arm: str) -> Interval | None:
    scores = rows_of(run.table("token_scores"), arm=arm, cell=HELD_OUT).df()
    if scores.empty:
        return None
    hits = scores.groupby("request")["hit"].agg(["sum", "count"]).to_numpy(np.float64)
    weights = counts(len(hits))
    drawn = (weights @ hits[:, 0]) / (weights @ hits[:, 1])
    return interval(float(hits[:, 0].sum() / hits[:, 1].sum()), drawn, len(hits))


def _against(run: Run, arm: ArmRecord, against: str) -> dict[str, Any]:
    ratio = quality.perplexity_ratio(run, arm.name, against) if arm.name != against else None
    if ratio is None:
        return {}
    found = {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return found if np.isnan(ratio.low) else found | {"p": _p(run, arm.name, against)}


def _p(run: Run, arm: str, other: str) -> float:
    scores = run.frame("scores")
    of_mode = scores[scores["mode"] == quality.GATED]
    mine, theirs = (of_mode[of_mode["arm"] == name].set_index("item")["nll"] for name in (arm, other))
    gaps = (mine - theirs).dropna().to_numpy(np.float64)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(PERMUTATIONS, len(gaps)))
    beyond = np.abs(signs @ gaps) >= abs(gaps.sum()) * (1 - ROUNDING)
    return float((1 + beyond.sum()) / (1 + PERMUTATIONS))


def _note(arm: ArmRecord, gap: float) -> str:
    found = []
    if abs(gap) > LIKE_POINTS:
        found.append(f"not at the same rate: skips {100 * abs(gap):.1f} points {'more' if gap > 0 else 'less'}")
    if arm.synthetic:
        found.append("synthetic route")
    elif arm.untrained:
        found.append("untrained router")
    if arm.caveat:
        found.append(arm.caveat)
    return "; ".join(found)


def _judged(frame: pd.DataFrame) -> pd.DataFrame:
    compared = frame["ratio"].notna()
    frame["p_corrected"] = holm(frame["p"].astype("float64"))
    for k, row in frame[compared].iterrows():
        frame.loc[k, "verdict"] = _verdict(row)
    return frame.astype({"items": "Int64", "tokens": "Int64"})


def _verdict(row: pd.Series[Any]) -> str:
    if np.isnan(row["p_corrected"]):
        return quality.UNDECIDED
    if row["p_corrected"] >= ALPHA or abs(row["ratio"] - 1) <= quality.ROUNDING:
        return quality.ALIKE
    return quality.WORSE if row["ratio"] > 1 else quality.BETTER


@dataclass(frozen=True)
class Matched:
    """`matched`, and what must be said before it is read."""

    table: pd.DataFrame
    sentences: list[str]

    @property
    def worth_showing(self) -> bool:
        """Whether there is more than one arm to compare."""
        return len(self.table) > 1


def compared(run: Run) -> Matched:
    """`matched`, with one sentence on how well it matches and one an arm that does not."""
    table = matched(run)
    if len(table) < 2:
        return Matched(table, [])
    low, high = table["executed_skip"].min(), table["executed_skip"].max()
    apart = table[~table["like_rates"].astype(bool)]
    if apart.empty:
        said = [
            f"Every arm skipped within {100 * LIKE_POINTS:.0f} point of the one it stands against, and can be read "
            f"against it; all skipped {percent_interval(low, high)} of pairs of token and routed layer."
        ]
    else:
        said = [
            f"{row['arm']} skipped {percent(row['executed_skip'])} of pairs of token and routed layer and "
            f"{row['against']} {percent(row['executed_skip'] - row['gap'])}: more than {100 * LIKE_POINTS:.0f} point "
            "apart, so this is no fair comparison."
            for row in apart.to_dict("records")
        ]
    if any(arm.calibration is not None and arm.calibration.held_out for arm in run.manifest.arms):
        said.append(
            "Thresholds were found on the held-out inputs themselves, so that rates match there, from decisions alone."
        )
    return Matched(table, said)
