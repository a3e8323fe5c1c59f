"""Intervals against a slow bootstrap of our own, at the edges, and in what they cost."""

from __future__ import annotations

import math
import random
import statistics
import tracemalloc

import numpy as np
import pytest

from profiler.intervals import median, ratio_of_medians


def slow_bootstrap(pairs: list[tuple[float, float]], draws: int = 4000) -> tuple[float, float]:
    """2.5 % and 97.5 % points of the ratio of medians over resampled pairs."""
    generator = random.Random(5)
    found = []
    for _ in range(draws):
        chosen = [generator.choice(pairs) for _ in pairs]
        found.append(statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen))
    found.sort()
    return found[round(0.025 * draws)], found[round(0.975 * draws)]


def test_ratio_is_that_of_the_medians_not_the_median_of_ratios() -> None:
    found = ratio_of_medians([1, 8, 3], [4, 2, 1])  # medians 3 and 2; ratios 0.25, 4, 3
    assert (found.value, found.n) == (1.5, 3)


def test_interval_agrees_with_a_slow_bootstrap_over_pairs() -> None:
    generator = np.random.default_rng(1)
    b = generator.lognormal(0.0, 0.2, 31)
    a = 0.8 * b * generator.lognormal(0.0, 0.05, 31)
    low, high = slow_bootstrap(list(zip(a.tolist(), b.tolist(), strict=True)))
    found = ratio_of_medians(a, b)
    assert found.low == pytest.approx(low, abs=0.012)
    assert found.high == pytest.approx(high, abs=0.012)
    assert found.low < found.value < found.high
    assert found.half_width == pytest.approx((found.high - found.low) / 2)


def test_noise_that_both_of_a_pair_share_does_not_widen_the_interval() -> None:
    generator = np.random.default_rng(2)
    drift = generator.lognormal(0.0, 0.5, 40)
    paired = ratio_of_medians(2 * drift, drift)
    shuffled = ratio_of_medians(2 * generator.permutation(drift), drift)
    assert paired.half_width == pytest.approx(0, abs=1e-12)
    assert shuffled.half_width > 0.2


def test_interval_of_a_median_agrees_with_the_order_statistics() -> None:
    """For n = 101 the exact 95 % interval of a median spans about the 41st to the 61st value."""
    found = median(np.arange(1, 102))
    assert (found.value, found.n) == (51, 101)
    assert found.low == pytest.approx(41, abs=1.5)
    assert found.high == pytest.approx(61, abs=1.5)


def test_same_samples_and_seed_give_the_same_interval_and_another_seed_nearly() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.normal(10, 1, 50), generator.normal(9, 1, 50)
    assert ratio_of_medians(a, b) == ratio_of_medians(a, b)
    other = ratio_of_medians(a, b, seed=9)
    assert other.low == pytest.approx(ratio_of_medians(a, b).low, abs=0.02)


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_samples_have_a_value_and_no_interval(n: int) -> None:
    for found in (ratio_of_medians([6.0] * n, [3.0] * n), median([2.0] * n)):
        assert (found.value, found.n) == (2.0, n)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert not found.half_width <= 1e9  # so that no stopping rule takes it for narrow


def test_samples_without_spread_have_an_interval_of_no_width() -> None:
    found = ratio_of_medians([4.0] * 5, [2.0] * 5)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_vectors_that_are_not_pairs_are_refused() -> None:
    for a, b in (([1.0, 2.0], [1.0]), ([], []), ([[1.0]], [[1.0]])):
        with pytest.raises(ValueError, match="two equal, non-empty vectors"):
            ratio_of_medians(a, b)
    with pytest.raises(ValueError, match="non-empty vector"):
        median([])


def test_a_long_cell_does_not_take_memory_by_the_gigabyte() -> None:
    times = np.random.default_rng(4).normal(100, 5, 10_000)
    tracemalloc.start()
    found = ratio_of_medians(times, times[::-1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6  # all 2,000 resamples at once would take 640 MB
    assert found.low < 1 < found.high
