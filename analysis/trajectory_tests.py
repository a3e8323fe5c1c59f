"""What trajectories go with: position, frequency, domain, and whether the model was right; tested, shown or not.

Two kinds of comparison, and each line says which it is:

    within inputs    of each input, Spearman's ρ over its tokens, or the mean where the next token was right less the
                     mean where it was wrong; then the mean over inputs that have one. Text, domain and length of an
                     input are the same on both sides of it, and cannot be what is found. p by flipping signs of inputs.
    between inputs   the mean over inputs whose whole answer was right less that of the others, p by shuffling the
                     inputs; or Spearman's ρ over inputs with length held fixed (`partial_correlation`).

Intervals are bootstraps over inputs. p are corrected for how many tests were made: by Holm over the means over depth,
by Benjamini and Hochberg over single layers. What shows nothing stands beside what does, what could not be tested says
why. Position and frequency of a token are not independent of each other, nor of how easy the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from analysis.partial_correlation import PERMUTATIONS, ROUNDING, associations
from analysis.resampling import MIN_INPUTS, counts, interval
from analysis.token_paths import TokenPaths
from analysis.tracking import BENJAMINI_HOCHBERG, HOLM, corrected
from analysis.trajectories import FREQUENCY, NEXT, POSITION, SHARE, answered, targets
from analysis.wording import how_many
from profiler.intervals import Interval

Floats = NDArray[np.float64]

TEST_COLUMNS = (
    "arm", "cell", "target", "layer", "against", "statistic", "inputs", "tokens", "value", "low", "high", "p",
    "p_corrected", "correction", "verdict", "note",
)  # fmt: skip
ANSWER = "whole answer"
WITHIN_RHO, WITHIN_GAP = "mean ρ within inputs", "right − wrong, mean within inputs"
BETWEEN_GAP, BETWEEN_RHO = "right − wrong, between inputs", "ρ between inputs, length held fixed"
#: Fewest tokens of an input that have a rank correlation.
MIN_TOKENS = 8


@dataclass(frozen=True)
class _Found:
    """One test, or why there is none."""

    value: Interval | None
    p: float
    tokens: int
    note: str = ""


def trajectory_tests(paths: TokenPaths, *, seed: int = 0) -> pd.DataFrame:
    """Everything tested about the tokens of one arm and cell.

    Returns:
        Columns `TEST_COLUMNS`. First `trajectories.targets` (means over depth) against everything; then, layer by
        layer, whether the next token was right. `value` of a difference is in units of the target.
    """
    lines = [{"layer": pd.NA, **line} for line in corrected(list(_over_depth(paths, seed)), HOLM)]
    lines += corrected(list(_by_layer(paths, seed)), BENJAMINI_HOCHBERG)
    base = {"arm": paths.arm, "cell": paths.cell}
    return pd.DataFrame([base | line for line in lines], columns=list(TEST_COLUMNS)).astype({"layer": "Int64"})


def _over_depth(paths: TokenPaths, seed: int) -> Iterator[dict[str, Any]]:
    if not len(paths):
        return
    scored = answered(paths)
    for target, values in targets(paths).items():
        known = ~np.isnan(values)
        for against, of_token in ((POSITION, paths.position.astype(np.float64)), (FREQUENCY, paths.occurrences)):
            chosen = known & ~np.isnan(of_token)
            yield _line(target, against, WITHIN_RHO, _within_rho(paths, values, of_token, chosen, seed))
        yield _line(target, NEXT, WITHIN_GAP, _within_gap(paths, values, known & scored, seed))
        yield _line(target, ANSWER, BETWEEN_GAP, _between_gap(paths, values, known & scored, seed))
        for domain in _domains(paths):
            yield _line(target, f"domain {domain}", BETWEEN_RHO, _between_rho(paths, values, known, domain, seed))


def _by_layer(paths: TokenPaths, seed: int) -> Iterator[dict[str, Any]]:
    if not len(paths):
        return
    scored = answered(paths)
    for target, values in {SHARE: paths.ran, **paths.signals}.items():
        for place, layer in enumerate(paths.layers):
            column = values[:, place]
            found = _within_gap(paths, column, scored & ~np.isnan(column), seed)
            yield _line(target, NEXT, WITHIN_GAP, found) | {"layer": layer}


def _domains(paths: TokenPaths) -> list[str]:
    found = [d for d in dict.fromkeys(paths.domains) if d is not None]
    if None in paths.domains or len(found) < 2:
        return []
    return found[:1] if len(found) == 2 else found  # of two domains, either says what the other does


def _line(target: str, against: str, statistic: str, found: _Found) -> dict[str, Any]:
    line: dict[str, Any] = {"target": target, "against": against, "statistic": statistic, "tokens": found.tokens}
    line |= {"p": found.p, "note": found.note}
    if found.value is not None:
        line |= {"inputs": found.value.n, "value": found.value.value, "low": found.value.low, "high": found.value.high}
    return line


# -- within inputs ----------------------------------------------------------------------------------------------------


def _within_rho(paths: TokenPaths, values: Floats, of_token: Floats, chosen: NDArray[np.bool_], seed: int) -> _Found:
    """Spearman's ρ of `values` and `of_token` in each input, where both vary over at least `MIN_TOKENS` tokens."""
    return _mean_of_inputs(paths, chosen, lambda rows: _spearman(values[rows], of_token[rows]), seed)


def _spearman(x: Floats, y: Floats) -> float:
    if len(x) < MIN_TOKENS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    a, b = (rankdata(side) - (len(side) + 1) / 2 for side in (x, y))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _within_gap(paths: TokenPaths, values: Floats, chosen: NDArray[np.bool_], seed: int) -> _Found:
    """Mean where the next token was right less the mean where it was wrong, of inputs that have both."""

    def gap(rows: NDArray[np.intp]) -> float:
        right = paths.hit[rows] == 1
        if right.all() or not right.any():
            return float("nan")
        return float(values[rows][right].mean() - values[rows][~right].mean())

    return _mean_of_inputs(paths, chosen, gap, seed)


def _mean_of_inputs(
    paths: TokenPaths, chosen: NDArray[np.bool_], of_input: Callable[[NDArray[np.intp]], float], seed: int
) -> _Found:
    rows_of = _rows_by_input(paths, chosen)
    each = np.array([of_input(rows) for rows in rows_of], np.float64)
    defined = ~np.isnan(each)
    tokens = sum(len(rows) for rows, kept in zip(rows_of, defined, strict=True) if kept)
    found, n = each[defined], int(defined.sum())
    if n < MIN_INPUTS:
        return _Found(
            None, float("nan"), tokens, f"{how_many(n, 'input')} can be compared within, and {MIN_INPUTS} are needed"
        )
    value = interval(float(found.mean()), counts(n, seed) @ found / n, n)
    return _Found(value, _sign_flip(found, seed), tokens)


def _rows_by_input(paths: TokenPaths, chosen: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    rows = np.flatnonzero(chosen)
    starts = np.flatnonzero(np.diff(paths.owner[rows])) + 1
    return np.split(rows, starts) if len(rows) else []


def _sign_flip(each: Floats, seed: int) -> float:
    """Two-sided p of a mean of 0: under it, an input's figure is as likely to have the other sign."""
    beyond = np.abs(_signs(len(each), seed) @ each) >= abs(each.sum()) * (1 - ROUNDING)
    return float((1 + beyond.sum()) / (1 + PERMUTATIONS))


@lru_cache(maxsize=8)  # every layer of every signal asks for the same
def _signs(n: int, seed: int) -> Floats:
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=(PERMUTATIONS, n))


# -- between inputs ---------------------------------------------------------------------------------------------------


def _between_gap(paths: TokenPaths, values: Floats, chosen: NDArray[np.bool_], seed: int) -> _Found:
    """Mean over inputs whose every scored token was right less that over the others."""
    rows_of = _rows_by_input(paths, chosen)
    tokens = sum(map(len, rows_of))
    each = np.array([values[rows].mean() for rows in rows_of])
    right = np.array([bool((paths.hit[rows] == 1).all()) for rows in rows_of], bool)
    n = len(rows_of)
    if n < MIN_INPUTS or right.all() or not right.any():
        return _Found(None, float("nan"), tokens, f"{int(right.sum())} of {n} answers are right as a whole")
    value = float(each[right].mean() - each[~right].mean())
    weights = counts(n, seed)
    with np.errstate(invalid="ignore"):
        drawn = [(weights @ (each * side)) / (weights @ side) for side in (right.astype(float), (~right).astype(float))]
    gaps = drawn[0] - drawn[1]
    found = interval(value, gaps[~np.isnan(gaps)], n)
    shuffled = np.random.default_rng(seed).permuted(np.tile(right, (PERMUTATIONS, 1)), axis=1)
    sums = shuffled @ each
    differences = sums / right.sum() - (each.sum() - sums) / (~right).sum()
    beyond = np.abs(differences) >= abs(value) * (1 - ROUNDING)
    lengths = [np.mean([len(rows) for rows, is_right in zip(rows_of, right, strict=True) if is_right == side])
               for side in (True, False)]  # fmt: skip
    note = (
        f"{int(right.sum())} of {n} answers are right as a whole; they have {lengths[0]:.1f} tokens on average, the "
        f"others {lengths[1]:.1f}"
    )
    return _Found(found, float((1 + beyond.sum()) / (1 + PERMUTATIONS)), tokens, note)


def _between_rho(paths: TokenPaths, values: Floats, known: NDArray[np.bool_], domain: str, seed: int) -> _Found:
    rows_of = _rows_by_input(paths, known)
    each = np.array([values[rows].mean() for rows in rows_of])
    owners = [int(paths.owner[rows[0]]) for rows in rows_of]
    belongs = np.array([float(paths.domains[k] == domain) for k in owners])
    lengths = np.array([float((paths.owner == k).sum()) for k in owners])
    one = associations(each, belongs, lengths, seed=seed)
    tokens = sum(map(len, rows_of))
    if np.isnan(one.value[0, 0]):
        return _Found(
            None, float("nan"), tokens, f"{how_many(len(each), 'input')}, or all alike once length is held fixed"
        )
    value = Interval(float(one.value[0, 0]), float(one.low[0, 0]), float(one.high[0, 0]), one.n)
    return _Found(value, float(one.p[0, 0]), tokens)
