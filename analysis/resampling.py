"""Bootstrap over inputs (requests, held-out items): which ones each resample holds, and the interval that comes of it.

Inputs are resampled whole, all their layers and tokens with them, because these are not independent of each other.
Intervals of step times are `profiler.intervals`'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.intervals import CONFIDENCE, RESAMPLES, Interval

Floats = NDArray[np.float64]

#: Fewest inputs an interval is given for: resamples of fewer repeat a handful of values, and cover far too little.
MIN_INPUTS = 8


def counts(n: int, seed: int = 0) -> Floats:
    """`[RESAMPLES, n]`: how often each of `n` inputs is in each resample; every row adds up to n."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return np.asarray(drawn, np.float64)


def interval(value: float, drawn: ArrayLike, n: int) -> Interval:
    """Percentile interval of a statistic from its values in the resamples; NaN below `MIN_INPUTS` inputs."""
    if n < MIN_INPUTS:
        return Interval(value, float("nan"), float("nan"), n)
    low, high = np.quantile(np.asarray(drawn, np.float64), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high), n)


def means(values: NDArray[Any], seed: int = 0) -> list[Interval]:
    """Mean over inputs of each column of `[n, C]`, with its interval; all columns share the resamples."""
    n = len(values)
    drawn = counts(n, seed) @ np.asarray(values, np.float64) / n
    return [interval(float(values[:, c].mean()), drawn[:, c], n) for c in range(values.shape[1])]
