"""Rank correlation with a control taken out: value, bootstrap interval, permutation test, correction for many tests.

    ρ(x, y | z) = (ρ_xy − ρ_xz·ρ_yz) / √((1 − ρ_xz²)(1 − ρ_yz²))          ρ: Spearman's, ties at their mean rank

which is the correlation of what is left of the ranks of x and y once a line in the ranks of z is taken out. Under the
null hypothesis that x tells nothing about y beyond z, the residuals of y can be shuffled (Freedman & Lane 1983).

Arrays only: what is correlated, and with what, is `tracking`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from profiler.intervals import CONFIDENCE

Floats = NDArray[np.float64]

PERMUTATIONS = 9999
RESAMPLES = 2000
#: Fewest samples a correlation is given for; with fewer, no shuffle could be rare enough to say anything.
MIN_SAMPLES = 8
#: An interval is given only where at least this share of the resamples had a correlation at all.
MIN_DEFINED = 0.5
#: Relative differences below this are rounding.
ROUNDING = 1e-9
#: Values held at once by shuffles and by resamples; the bound on memory.
VALUES_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Associations:
    """Of T targets with K trackers over n samples; each `[T, K]`, NaN where undefined (see `associations`)."""

    value: Floats
    low: Floats
    high: Floats
    p: Floats
    n: int


def associations(
    targets: ArrayLike, trackers: ArrayLike, control: ArrayLike | None = None, *, seed: int = 0
) -> Associations:
    """Spearman's correlation of each target with each tracker, with the control taken out of both.

    Args:
        targets: `[T, n]`, what is to be explained.
        trackers: `[K, n]`, what may explain it.
        control: `[n]`, held fixed; None, or a constant, correlates as it is.
        seed: of the shuffles and resamples, which all pairs share.

    Returns:
        `low` and `high`: percentile bootstrap over samples. `p`: two-sided, (1 + shuffles at least as far from 0)
        ÷ (1 + shuffles), so never 0. Undefined where a side is constant, is a function of the control's ranks, or
        n < `MIN_SAMPLES`; the interval also where too few resamples had a correlation.
    """
    y, x = np.atleast_2d(np.asarray(targets, np.float64)), np.atleast_2d(np.asarray(trackers, np.float64))
    z = None if control is None or np.ptp(control) == 0 else np.asarray(control, np.float64)
    n = y.shape[1]
    shape = (len(y), len(x))
    if n < MIN_SAMPLES:
        nothing = np.full(shape, np.nan)
        return Associations(nothing, nothing, nothing, nothing, n)
    generator = np.random.default_rng(seed)
    residuals_y, residuals_x = _residuals(_ranks(y), z), _residuals(_ranks(x), z)
    value = _correlations(residuals_y, residuals_x)
    p = _p_values(residuals_y, residuals_x, z, value, generator)
    ends = _intervals(y, x, z, generator)
    low, high = (np.where(np.isnan(value), np.nan, end) for end in ends)
    return Associations(value, low, high, p, n)


def _ranks(values: Floats) -> Floats:
    return np.asarray(rankdata(values, axis=-1), np.float64)


def _residuals(ranks: Floats, control: Floats | None) -> Floats:
    """Ranks `[V, n]` less their mean and a line in the control's ranks; exactly 0 where only rounding is left."""
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    left = centred
    if control is not None:
        z = _ranks(control) - (len(control) + 1) / 2
        left = centred - np.outer(centred @ z, z) / (z @ z)
    lengths = [np.linalg.norm(side, axis=1, keepdims=True) for side in (left, centred)]
    return np.where(lengths[0] <= ROUNDING * lengths[1], 0.0, left)


def _correlations(a: Floats, b: Floats) -> Floats:
    """Cosines of rows of `a` with rows of `b`; NaN where a row is 0."""
    lengths = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    found = np.divide(a @ b.T, lengths, out=np.full_like(lengths, np.nan), where=lengths > 0)
    return np.asarray(np.clip(found, -1.0, 1.0))


def _p_values(y: Floats, x: Floats, control: Floats | None, value: Floats, generator: np.random.Generator) -> Floats:
    n = y.shape[1]
    z = None if control is None else _ranks(control) - (n + 1) / 2
    lengths_x = np.linalg.norm(x, axis=1)
    beyond = np.zeros(value.shape)
    for count in _blocks(PERMUTATIONS, n):
        shuffles = generator.permuted(np.tile(np.arange(n), (count, 1)), axis=1)
        for row, residual in enumerate(y):
            shuffled = residual[shuffles]
            # The line in z is taken out again. x has none left, so only the length of the shuffled side changes.
            squares = np.full(count, residual @ residual)
            if z is not None:
                squares -= (shuffled @ z) ** 2 / (z @ z)
            lengths = np.outer(np.sqrt(np.maximum(squares, 0.0)), lengths_x)
            drawn = np.divide(shuffled @ x.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            # Equal correlations come out a rounding apart, and a tie counts as at least as far.
            beyond[row] += (np.abs(drawn) >= np.abs(value[row]) - ROUNDING).sum(axis=0)
    return np.where(np.isnan(value), np.nan, (1 + beyond) / (1 + PERMUTATIONS))


def _intervals(y: Floats, x: Floats, control: Floats | None, generator: np.random.Generator) -> tuple[Floats, Floats]:
    n = y.shape[1]
    drawn = np.concatenate(
        [
            _resampled(y, x, control, generator.integers(0, n, size=(count, n)))
            for count in _blocks(RESAMPLES, n * (len(y) + len(x) + 1))
        ],
        axis=2,
    )
    low, high = np.full(drawn.shape[:2], np.nan), np.full(drawn.shape[:2], np.nan)
    tail = (1 - CONFIDENCE) / 2
    for at in np.ndindex(low.shape):
        defined = drawn[at][~np.isnan(drawn[at])]
        if len(defined) >= MIN_DEFINED * RESAMPLES:
            low[at], high[at] = np.quantile(defined, [tail, 1 - tail])
    return low, high


def _resampled(y: Floats, x: Floats, control: Floats | None, samples: NDArray[np.int64]) -> Floats:
    """`[T, K, R]` correlations in the samples `[R, n]`, each ranked anew."""
    units_y, units_x = (np.stack([_units(v[samples]) for v in side]) for side in (y, x))
    found = np.einsum("trn,krn->tkr", units_y, units_x)
    if control is not None:
        unit_z = _units(control[samples])
        with_y, with_x = (np.einsum("vrn,rn->vr", side, unit_z) for side in (units_y, units_x))
        # A sample in which the control is constant leaves nothing to take out.
        with_y, with_x = (np.where(np.isnan(unit_z[:, 0]), 0.0, side) for side in (with_y, with_x))
        free = np.sqrt(np.maximum((1 - with_y[:, None] ** 2) * (1 - with_x[None] ** 2), 0.0))
        crossed = found - with_y[:, None] * with_x[None]
        found = np.divide(crossed, free, out=np.full_like(crossed, np.nan), where=free > ROUNDING)
    return np.asarray(np.clip(found, -1.0, 1.0))


def _units(values: Floats) -> Floats:
    """Ranks of each row of `[R, n]`, centred and of length 1; NaN where a row is constant."""
    ranks = _ranks(values)
    ranks -= ranks.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(ranks, axis=1, keepdims=True)
    return np.asarray(np.divide(ranks, lengths, out=np.full_like(ranks, np.nan), where=lengths > ROUNDING))


def _blocks(total: int, values_each: int) -> list[int]:
    """`total` split into counts of at most `VALUES_AT_ONCE` values each."""
    most = max(1, VALUES_AT_ONCE // values_each)
    return [min(most, total - start) for start in range(0, total, most)]


def holm(p: ArrayLike) -> Floats:
    """p-values corrected for their number by Holm (1979): the chance of one false finding among all stays below α.

    NaN (an undefined test) stays NaN and is not counted.
    """
    found, order = _sorted(p)
    m = len(order)
    corrected = np.full(found.shape, np.nan)
    running = 0.0
    for place, index in enumerate(order):
        running = max(running, min(1.0, float(found[index]) * (m - place)))
        corrected[index] = running
    return corrected


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """p-values corrected by Benjamini & Hochberg (1995): the expected share of false ones among findings stays below α.

    NaN (an undefined test) stays NaN and is not counted.
    """
    found, order = _sorted(p)
    m = len(order)
    corrected = np.full(found.shape, np.nan)
    running = 1.0
    for place in range(m - 1, -1, -1):
        running = min(running, float(found[order[place]]) * m / (place + 1))
        corrected[order[place]] = running
    return corrected


def _sorted(p: ArrayLike) -> tuple[Floats, list[int]]:
    found = np.asarray(p, np.float64).reshape(-1)
    return found, [int(i) for i in np.argsort(found, kind="stable") if not np.isnan(found[i])]
