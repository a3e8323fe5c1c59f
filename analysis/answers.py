"""Multiple-choice accuracy on held-out items, and how much of another arm's quality an arm retains.

    accuracy = share of items whose reference has the least −log p a token of its choices
    retain   = mean over tasks of (the arm's score ÷ the other's score on that task)

A task is one domain; the score is accuracy, or the likelihood a token (1 ÷ perplexity), and the two are never mixed in
one mean. Every task counts alike, however many items it has. The denominator is always named: it is another arm of the
same run on the same items, never a published figure. Items are resampled, within their domain, and paired.

Not here: perplexity by itself (`quality`), and how choices are scored (`profiler.quality`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.quality import GATED
from analysis.resampling import counts, interval
from analysis.routing import ALL_DOMAINS
from profiler.store import Run

Floats = NDArray[np.float64]

ACCURACY_COLUMNS = (
    "arm", "twin", "domain", "mode", "items", "chance", "accuracy", "low", "high", "over_twin", "over_twin_low",
    "over_twin_high",
)  # fmt: skip
RETAIN_COLUMNS = ("arm", "of", "score", "mode", "tasks", "retain", "low", "high", "left_out")
#: Scores of a task, as tables name them.
ACCURACY, LIKELIHOOD = "accuracy", "likelihood a token (1 ÷ perplexity)"
RETAIN_RULE = (
    "Retain is the mean, over domains, of the arm's score ÷ the named arm's score on the same items of the same run; "
    "every domain counts alike. A domain in which the named arm scores 0 has no ratio and is left out by name."
)


def accuracy(run: Run) -> pd.DataFrame:
    """Accuracy of every arm by mode and domain, and its difference from the twin's.

    Returns:
        Columns `ACCURACY_COLUMNS`, domains with `all` first. `chance`: mean of 1 ÷ number of choices. `over_twin`: this
        arm's accuracy − its twin's, paired by item; NaN without a twin. Intervals are NaN below `resampling.MIN_INPUTS`
        items. Empty where nothing had choices.
    """
    answers = _answers(run)
    lines = []
    for mode in answers["mode"].unique():
        of_mode = answers[answers["mode"] == mode]
        for domain in [ALL_DOMAINS, *of_mode["domain"].unique()]:
            chosen = of_mode if domain == ALL_DOMAINS else of_mode[of_mode["domain"] == domain]
            for arm in run.manifest.arms:
                own = chosen[chosen["arm"] == arm.name]
                if own.empty:
                    continue
                hits = own["hit"].to_numpy(np.float64)
                value = interval(hits.mean(), counts(len(hits)) @ hits / len(hits), len(hits))
                line: dict[str, Any] = {
                    "arm": arm.name, "twin": arm.twin, "domain": domain, "mode": mode, "items": len(own),
                    "chance": float((1 / own["choices"]).mean()), "accuracy": value.value, "low": value.low,
                    "high": value.high,
                }  # fmt: skip
                other = chosen.loc[chosen["arm"] == arm.twin, ["item", "hit"]]
                both = own.merge(other, on="item", suffixes=("", "_twin"))
                if not both.empty:
                    gap = both["hit"].to_numpy(np.float64) - both["hit_twin"].to_numpy(np.float64)
                    over = interval(gap.mean(), counts(len(gap)) @ gap / len(gap), len(gap))
                    line |= {"over_twin": over.value, "over_twin_low": over.low, "over_twin_high": over.high}
                lines.append(line)
    return pd.DataFrame(lines, columns=list(ACCURACY_COLUMNS))


def retain(run: Run, mode: str = GATED) -> pd.DataFrame:
    """What each arm retains of its twin, a line a score; columns `RETAIN_COLUMNS`. `left_out` names domains."""
    answers, scores = _answers(run), run.frame("scores")
    answers, scores = answers[answers["mode"] == mode], scores[scores["mode"] == mode]
    lines = []
    for arm in run.manifest.arms:
        if arm.twin is None:
            continue
        for score, frame, ratio in ((ACCURACY, answers, _of_accuracy), (LIKELIHOOD, scores, _of_likelihood)):
            parts, left_out = [], []
            own, other = (frame[frame["arm"] == name] for name in (arm.name, arm.twin))
            both = own.merge(other, on=["item", "domain"], suffixes=("", "_twin"))
            for domain, of_domain in both.groupby("domain", sort=False):
                found = ratio(of_domain)
                if found is None:
                    left_out.append(str(domain))
                else:
                    parts.append(found)
            if not parts:
                continue
            resampled = np.mean([drawn for _, drawn, _ in parts], axis=0)
            resampled = resampled[np.isfinite(resampled)]  # without one right answer of the twin's there is no ratio
            fewest = min(items for _, _, items in parts)
            value = interval(float(np.mean([point for point, _, _ in parts])), resampled, fewest)
            lines.append(
                {
                    "arm": arm.name, "of": arm.twin, "score": score, "mode": mode, "tasks": len(parts),
                    "retain": value.value, "low": value.low, "high": value.high, "left_out": ", ".join(left_out),
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(RETAIN_COLUMNS))


def _answers(run: Run) -> pd.DataFrame:
    """One row an arm, mode and item with choices: whether the reference is the likeliest a token, and of how many."""
    scores = run.frame("choice_scores")
    if scores.empty:
        return pd.DataFrame(columns=["arm", "mode", "item", "domain", "hit", "choices"])
    scores = scores.assign(mean=scores["nll"] / scores["tokens"])
    scores = scores.sort_values(["arm", "mode", "item", "mean", "choice"], kind="stable")
    grouped = scores.groupby(["arm", "mode", "item"], sort=False)
    first = grouped.head(1).reset_index(drop=True)
    return first.rename(columns={"right": "hit"})[["arm", "mode", "item", "domain", "hit"]].assign(
        choices=grouped.size().to_numpy()
    )


def _of_accuracy(both: pd.DataFrame) -> tuple[float, Floats, int] | None:
    """(ratio, resampled ratios, items) of one domain; None where the twin is never right."""
    own, other = (both[name].to_numpy(np.float64) for name in ("hit", "hit_twin"))
    if not other.any():
        return None
    drawn = counts(len(both))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(own.sum() / other.sum()), (drawn @ own) / (drawn @ other), len(both)


def _of_likelihood(both: pd.DataFrame) -> tuple[float, Floats, int] | None:
    gap = (both["nll_twin"] - both["nll"]).to_numpy(np.float64)
    tokens = both["tokens"].to_numpy(np.float64)
    drawn = counts(len(both))
    return float(np.exp(gap.sum() / tokens.sum())), np.exp((drawn @ gap) / (drawn @ tokens)), len(both)
