"""What decisions follow: length, difficulty, rarity of tokens, domain, each with length held fixed.

Text of one domain is often of one length, so a router that only counts tokens looks as if it knew domains. Every
correlation here is Spearman's with the prompt's length taken out (`partial_correlation`), tested by shuffling and
corrected for how many tests were made; what shows no relation stands beside what does.

Held fixed is a line in the ranks of length. A router with a sharp threshold at the very length at which a domain begins
can leave a remainder, so a relation with a domain that nearly is a length (`confounds` shows it) is weak evidence.

What the inputs' figures are: `length`, the prompt's tokens as the gates saw them; `perplexity`, of the continuation
under the arm's twin, so that it is the text's difficulty and not the damage of skipping; `mean token rank`, the mean id
of the prompt's tokens (`records.TABLES["prompts"]` says what an id ranks); `domain`, one domain against the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import quality
from analysis.partial_correlation import MIN_SAMPLES, associations, benjamini_hochberg, holm
from analysis.skips import HELD_OUT, Skips, skips
from analysis.wording import how_many
from profiler.store import Run

TRACK_COLUMNS = (
    "arm", "cell", "target", "layer", "site", "tracker", "held_fixed", "n", "rho", "low", "high", "p", "p_corrected",
    "correction", "verdict", "note",
)  # fmt: skip
CONFOUND_COLUMNS = ("arm", "cell", "tracker", "n", "rho", "low", "high", "note")

LENGTH, PERPLEXITY, RANK = "length", "perplexity", "mean token rank"
#: Target over all layers, and of one layer.
SHARE, LAYER = "share of layers skipped", "layer skipped"
HOLM, BENJAMINI_HOCHBERG = "Holm", "Benjamini–Hochberg"
#: Corrected p below which a relation is called one.
ALPHA = 0.05
TRACKS, NONE_SHOWN, UNDEFINED = "related", "no relation shown", "undefined"


@dataclass(frozen=True)
class _Tracker:
    """One figure of every input, `[R]`, or why there is none."""

    name: str
    values: NDArray[np.float64] | None
    note: str = ""


def tracks(run: Run, arm: str, cell: str = HELD_OUT, *, seed: int = 0) -> pd.DataFrame:
    """What the decisions of one arm are related to, over the inputs of one cell.

    Returns:
        Columns `TRACK_COLUMNS`. First the share of layers an input skips against every tracker (p corrected by Holm
        over these), then the decision of every layer that is not the same for all inputs (corrected by Benjamini and
        Hochberg over all of these). `held_fixed` is `length`, or `nothing` for length itself. Interval by bootstrap
        over inputs, p by permutation. What could not be tested has NaN, verdict `undefined` and the reason in `note`.

    Raises:
        InputError: the run has no such arm.
    """
    found = skips(run, arm, cell)
    trackers = _trackers(run, arm, found)
    varying = [c for c in range(len(found.columns)) if found.skipped[:, c].any() and not found.skipped[:, c].all()]
    share = _family(found, trackers, [found.share.mean(axis=1)] if found.requests else [], seed)
    layers = _family(found, trackers, [found.skipped[:, c].astype(np.float64) for c in varying], seed)
    lines = [{"target": SHARE, "layer": pd.NA, "site": None, **line} for line in corrected(share, HOLM)]
    for line in corrected(layers, BENJAMINI_HOCHBERG):
        layer, site = found.columns[varying[line["place"]]]
        lines.append({"target": LAYER, "layer": layer, "site": site, **line})
    base = {"arm": arm, "cell": cell}
    return pd.DataFrame([base | line for line in lines], columns=list(TRACK_COLUMNS)).astype({"layer": "Int64"})


def confounds(run: Run, arm: str, cell: str = HELD_OUT, *, seed: int = 0) -> pd.DataFrame:
    """How far each tracker follows length itself: what would be mistaken for it were length not held fixed.

    Returns:
        Columns `CONFOUND_COLUMNS`; plain Spearman correlation with length, interval by bootstrap over inputs.
    """
    found = skips(run, arm, cell)
    length, *others = _trackers(run, arm, found)
    lines = []
    for tracker in others:
        line: dict[str, Any] = {"tracker": tracker.name, "n": len(found.requests), "note": tracker.note}
        if tracker.values is not None and length.values is not None:
            one = associations(length.values, tracker.values, seed=seed)
            line |= {"rho": one.value[0, 0], "low": one.low[0, 0], "high": one.high[0, 0]}
        lines.append({"arm": arm, "cell": cell} | line)
    return pd.DataFrame(lines, columns=list(CONFOUND_COLUMNS))


def _trackers(run: Run, arm: str, found: Skips) -> list[_Tracker]:
    record = run.manifest.arm(arm)
    nll = quality.item_nll(run, record.twin or arm) if found.cell == HELD_OUT else pd.Series(dtype=float)
    difficulty = np.asarray(nll.reindex(found.requests), np.float64)
    lacking = "the run has no score of these inputs"
    named = [
        _known(LENGTH, found.tokens, "the run does not say how long the inputs are"),
        _known(PERPLEXITY, difficulty, lacking),
        _known(RANK, found.mean_token_rank, "the run does not have the inputs' token ids"),
    ]
    domains = list(dict.fromkeys(found.domains))
    if None in domains or len(domains) < 2:
        return [*named, _Tracker("domain", None, "the inputs are not of several known domains")]
    # Of two domains, either says what the other does.
    shown = domains[:1] if len(domains) == 2 else domains
    return named + [_Tracker(f"domain {d}", np.array([float(e == d) for e in found.domains])) for d in shown]


def _known(name: str, values: NDArray[np.float64], otherwise: str) -> _Tracker:
    whole = len(values) > 0 and not np.isnan(values).any()
    return _Tracker(name, values if whole else None, "" if whole else otherwise)


def _family(
    found: Skips, trackers: list[_Tracker], targets: list[NDArray[np.float64]], seed: int
) -> list[dict[str, Any]]:
    """Every target against every tracker, uncorrected; `place` is the target's index."""
    n = len(found.requests)
    length = trackers[0].values
    known = [t for t in trackers[1:] if t.values is not None]
    lines = []
    stacked = np.stack(targets) if targets else np.empty((0, n))
    parts: dict[str, tuple[Any, int]] = {}
    if targets and length is not None:
        parts[LENGTH] = associations(stacked, length, seed=seed), 0
        if known:
            values = np.stack([t.values for t in known if t.values is not None])
            held = associations(stacked, values, length, seed=seed)
            parts |= {tracker.name: (held, k) for k, tracker in enumerate(known)}
    for place, target in enumerate(targets):
        for tracker in trackers:
            line = {"place": place, "tracker": tracker.name, "n": n, "note": tracker.note}
            line["held_fixed"] = "nothing" if tracker.name == LENGTH else LENGTH
            if tracker.name in parts:
                one, k = parts[tracker.name]
                line |= {"rho": one.value[place, k], "p": one.p[place, k]}
                line |= {"low": one.low[place, k], "high": one.high[place, k]}
                if np.isnan(one.value[place, k]):
                    line["note"] = _why_undefined(n, target, tracker)
            elif not tracker.note:
                line["note"] = trackers[0].note
            lines.append(line)
    return lines


def _why_undefined(n: int, target: NDArray[np.float64], tracker: _Tracker) -> str:
    if n < MIN_SAMPLES:
        return f"{how_many(n, 'input')}, and {MIN_SAMPLES} are needed"
    if np.ptp(target) == 0:
        return "every input skips alike"
    assert tracker.values is not None
    if np.ptp(tracker.values) == 0:
        return "the same for every input"
    return "nothing is left of it once length is held fixed"


def corrected(lines: list[dict[str, Any]], correction: str) -> list[dict[str, Any]]:
    """Lines with their `p` corrected for being so many, and the verdict that comes of it; without a `p`, undefined."""
    p = [line.get("p", np.nan) for line in lines]
    adjusted = holm(p) if correction == HOLM else benjamini_hochberg(p)
    return [
        line
        | {
            "p_corrected": value,
            "correction": correction,
            "verdict": UNDEFINED if np.isnan(value) else TRACKS if value < ALPHA else NONE_SHOWN,
        }
        for line, value in zip(lines, adjusted, strict=True)
    ]
