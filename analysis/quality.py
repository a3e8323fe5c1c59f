"""Held-out perplexity with intervals, and arms against each other on the same tokens.

    perplexity = exp(Σ nll ÷ Σ tokens)          ratio = exp((Σ nll_a − Σ nll_b) ÷ Σ tokens)

Sums are over items, and items are what is resampled: tokens of one item are not independent. Arms score the very same
tokens, so a comparison is paired by item and far narrower than either arm's own interval.

How items are scored, and that gates do not see them, is `profiler.quality`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.resampling import counts, interval
from analysis.routing import ALL_DOMAINS
from profiler.intervals import Interval
from profiler.records import QUALITY_MODES
from profiler.store import Run

PERPLEXITY_COLUMNS = (
    "arm", "twin", "domain", "mode", "items", "tokens", "perplexity", "low", "high", "against_twin",
    "against_twin_low", "against_twin_high", "verdict",
)  # fmt: skip
#: The mode that does not leak.
GATED = QUALITY_MODES["prefix"]
#: Two arms that compute the same in another order differ by less than this; it is no difference of quality.
ROUNDING = 1e-4
BETTER, WORSE, ALIKE, UNDECIDED = "better", "worse", "no difference shown", "too few items"


def perplexity(run: Run) -> pd.DataFrame:
    """Perplexity of every arm by mode and domain, and as a ratio to its twin's.

    Returns:
        Columns `PERPLEXITY_COLUMNS`, in the order of modes, domains (`all` first) and arms. `against_twin` above 1 is
        worse than the twin; NaN where an arm has none. `verdict` says whether its interval lies on one side of 1.
        Intervals are NaN below `resampling.MIN_INPUTS` items. Empty where quality was not measured.
    """
    scores = run.frame("scores")
    lines = []
    for mode in scores["mode"].unique():
        of_mode = scores[scores["mode"] == mode]
        for domain in [ALL_DOMAINS, *of_mode["domain"].dropna().unique()]:
            chosen = of_mode if domain == ALL_DOMAINS else of_mode[of_mode["domain"] == domain]
            for arm in run.manifest.arms:
                own = _items(chosen, arm.name)
                if own.empty:
                    continue
                value = _perplexity(own)
                line: dict[str, Any] = {
                    "arm": arm.name, "twin": arm.twin, "domain": domain, "mode": mode, "items": len(own),
                    "tokens": int(own["tokens"].sum()), "perplexity": value.value, "low": value.low, "high": value.high,
                }  # fmt: skip
                if arm.twin is not None and (ratio := _ratio(own, _items(chosen, arm.twin))) is not None:
                    line |= {
                        "against_twin": ratio.value, "against_twin_low": ratio.low, "against_twin_high": ratio.high,
                        "verdict": verdict(ratio),
                    }  # fmt: skip
                lines.append(line)
    return pd.DataFrame(lines, columns=list(PERPLEXITY_COLUMNS))


def item_nll(run: Run, arm: str, mode: str = GATED) -> pd.Series[float]:
    """−log p a token, in nats, of each held-out item under one arm, by item; empty where it was not scored."""
    scores = run.frame("scores")
    own = _items(scores[scores["mode"] == mode], arm)
    found: pd.Series[float] = own["nll"] / own["tokens"]
    return found


def perplexity_ratio(run: Run, arm: str, other: str, mode: str = GATED) -> Interval | None:
    """Perplexity of `arm` ÷ that of `other` over the items both scored, paired; None where they share none."""
    scores = run.frame("scores")
    of_mode = scores[scores["mode"] == mode]
    return _ratio(_items(of_mode, arm), _items(of_mode, other))


def verdict(ratio: Interval) -> str:
    """What an interval of a perplexity ratio says of the first arm."""
    if np.isnan(ratio.low):
        return UNDECIDED
    return BETTER if ratio.high < 1 - ROUNDING else WORSE if ratio.low > 1 + ROUNDING else ALIKE


def _items(scores: pd.DataFrame, arm: str) -> pd.DataFrame:
    return scores[scores["arm"] == arm].set_index("item")[["nll", "tokens"]]


def _perplexity(items: pd.DataFrame) -> Interval:
    nll, tokens = (items[name].to_numpy(np.float64) for name in ("nll", "tokens"))
    weights = counts(len(items))
    return interval(_exp(nll.sum() / tokens.sum()), _exp((weights @ nll) / (weights @ tokens)), len(items))


def _ratio(items: pd.DataFrame, others: pd.DataFrame) -> Interval | None:
    both = items.merge(others, on="item", suffixes=("", "_other"))
    if both.empty:
        return None
    gap = (both["nll"] - both["nll_other"]).to_numpy(np.float64)
    tokens = both["tokens"].to_numpy(np.float64)
    weights = counts(len(both))
    return interval(_exp(gap.sum() / tokens.sum()), _exp((weights @ gap) / (weights @ tokens)), len(both))


def _exp(value: Any) -> Any:
    """exp, infinite where it overflows."""
    with np.errstate(over="ignore"):
        return np.exp(value)
