"""Partial rank correlation against hand-worked cases, scipy, and a slow permutation test; corrections by hand."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from analysis import partial_correlation
from analysis.partial_correlation import associations, benjamini_hochberg, holm


def slow_partial(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> float:
    """From the inverse of the matrix of Spearman's correlations: −P_xy ÷ √(P_xx·P_yy)."""
    precision = np.linalg.inv(stats.spearmanr(np.column_stack([x, y, z])).statistic)
    return float(-precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1]))


def test_a_case_worked_out_by_hand() -> None:
    # Ranks z = 1..8; x swaps neighbours in pairs, y swaps the first two only.
    # Σd²: x with z 8, y with z 2, x with y 6 → ρ = 1 − 6Σd² ÷ 504 = 19/21, 41/42, 13/14.
    z = np.arange(8.0)
    x = np.array([2, 1, 4, 3, 6, 5, 8, 7.0])
    y = np.array([2, 1, 3, 4, 5, 6, 7, 8.0])
    assert associations(y, x).value[0, 0] == pytest.approx(13 / 14)
    # (0.928571 − 0.904762·0.976190) ÷ √(0.181406·0.047052) = 0.045351 ÷ 0.092388
    assert associations(y, x, z).value[0, 0] == pytest.approx(0.4909, abs=1e-4)


def test_values_with_ties_equal_scipys() -> None:
    rng = np.random.default_rng(3)
    z = rng.integers(0, 6, 40).astype(float)
    targets = np.stack([(rng.random(40) < 0.3).astype(float), z + rng.normal(size=40)])
    trackers = np.stack([rng.integers(0, 4, 40) - z, rng.normal(size=40), (rng.random(40) < 0.5).astype(float)])
    plain, partial = associations(targets, trackers), associations(targets, trackers, z)
    for (t, y), (k, x) in itertools.product(enumerate(targets), enumerate(trackers)):
        assert plain.value[t, k] == pytest.approx(stats.spearmanr(x, y).statistic)
        assert partial.value[t, k] == pytest.approx(slow_partial(x, y, z))


def test_what_only_follows_the_control_is_not_related_once_it_is_held_fixed() -> None:
    rng = np.random.default_rng(0)
    length = rng.normal(size=300)
    skips, domain = length + rng.normal(size=300), length + rng.normal(size=300)
    plain, partial = associations(skips, domain), associations(skips, domain, length)
    assert plain.value[0, 0] > 0.4
    assert plain.p[0, 0] == 1 / 10_000
    assert abs(partial.value[0, 0]) < 0.12
    assert partial.p[0, 0] > 0.05
    assert partial.low[0, 0] < 0 < partial.high[0, 0]


def test_p_values_agree_with_every_permutation() -> None:
    x = np.array([3, 1, 4, 1.5, 5, 9, 2, 6.0])
    y = np.array([2, 7, 1, 8, 2.8, 1.8, 2.5, 0.0])
    z = np.array([1, 1, 2, 2, 3, 3, 4, 4.0])

    design = np.column_stack([np.ones(8), stats.rankdata(z)])
    residual_maker = np.eye(8) - design @ np.linalg.pinv(design)
    e_x, e_y = residual_maker @ stats.rankdata(x), residual_maker @ stats.rankdata(y)
    observed = abs(np.corrcoef(e_x, e_y)[0, 1])
    fitted = stats.rankdata(y) - e_y
    every_order = np.array(list(itertools.permutations(range(8))))
    again = (fitted + e_y[every_order]) @ residual_maker.T
    drawn = np.abs(again @ e_x) / np.linalg.norm(again, axis=1) / np.linalg.norm(e_x)
    exact = float(np.mean(drawn >= observed - 1e-9))
    assert 0.05 < exact < 0.95
    assert associations(y, x, z).p[0, 0] == pytest.approx(exact, abs=0.015)  # 3 standard errors at 9,999 draws
    centred = stats.rankdata(y)[every_order] - 4.5
    plain = np.abs(centred @ stats.rankdata(x))
    without = float(np.mean(plain >= plain[0] - 1e-9))  # the first order is the observed one
    assert associations(y, x).p[0, 0] == pytest.approx(without, abs=0.015)


def test_p_values_are_uniform_when_nothing_is_related(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_correlation, "PERMUTATIONS", 999)
    monkeypatch.setattr(partial_correlation, "RESAMPLES", 2)
    rng = np.random.default_rng(1)
    length = rng.normal(size=24)
    targets = (rng.random((20, 24)) < 0.4).astype(float)
    found = associations(targets, length + rng.normal(size=(30, 24)), length)
    assert 0.02 < (found.p < 0.05).mean() < 0.08
    assert 0.45 < np.nanmean(found.p) < 0.6  # ties count as at least as far, which only raises p


def test_the_interval_covers_what_the_population_has() -> None:
    # Normal variables: Spearman's ρ = 6/π·asin(r/2). x = z + e, y = z + f + e/2, z held fixed → cor(e, f + e/2).
    partial_r = 0.5 / (1.25**0.5)
    population = 6 / np.pi * np.arcsin(partial_r / 2)
    covered = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        z, e, f = rng.normal(size=(3, 80)) * [[0.1], [1], [1]]  # z nearly absent, so ranks of sums stay near normal's
        found = associations(z + f + e / 2, z + e, z, seed=seed)
        covered += bool(found.low[0, 0] <= population <= found.high[0, 0])
    assert 50 <= covered <= 60


def test_what_is_undefined_is_nan_and_never_0() -> None:
    n = 12
    z = np.arange(n, dtype=float)
    targets = np.stack([np.ones(n), z**3, np.tile([0.0, 1.0], n // 2)])
    trackers = np.stack([np.tile([0.0, 1.0, 2.0], n // 3), np.zeros(n)])
    found = associations(targets, trackers, z)
    undefined = [[True, True], [True, True], [False, True]]  # constant; a function of the control; constant tracker
    for part in (found.value, found.low, found.high, found.p):
        assert np.isnan(part).tolist() == undefined
    few = associations(np.arange(7.0), np.arange(7.0))
    assert np.isnan([few.value, few.low, few.high, few.p]).all()
    assert few.n == 7
    assert associations(np.arange(8.0), np.arange(8.0)).value[0, 0] == 1.0


def test_a_constant_control_is_none() -> None:
    x, y = np.random.default_rng(5).normal(size=(2, 20))
    a, b = associations(y, x), associations(y, x, np.ones(20))
    assert (a.value, a.low, a.high, a.p) == (b.value, b.low, b.high, b.p)


def test_a_rare_decision_gets_a_value_and_no_interval() -> None:
    # One of 60 differs: a resample misses it with probability (59/60)^60 = 0.36, two of three have an interval …
    one = np.zeros(60)
    one[7] = 1
    x = np.random.default_rng(0).normal(size=60)
    assert np.isfinite(associations(one, x).low[0, 0])
    # … and a resample of 8 misses one or the other of two rare ones more often than not: 2·(7/8)^8 − (6/8)^8 = 0.59.
    assert np.isnan(associations(np.eye(8)[0], np.eye(8)[1], np.eye(8)[2]).low[0, 0])


def test_the_same_seed_gives_the_same_figures_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = np.random.default_rng(2).normal(size=(3, 30))
    whole = associations(y, x, z, seed=4)
    assert associations(y, x, z, seed=4) == whole
    assert associations(y, x, z, seed=5).low[0, 0] != whole.low[0, 0]
    monkeypatch.setattr(partial_correlation, "VALUES_AT_ONCE", 3000)
    parts = associations(y, x, z, seed=4)
    assert parts.value == whole.value
    assert parts.p[0, 0] == pytest.approx(whole.p[0, 0], abs=0.02)
    assert parts.low[0, 0] == pytest.approx(whole.low[0, 0], abs=0.05)


def test_thirty_layers_and_eight_trackers_over_two_hundred_inputs_take_seconds() -> None:
    rng = np.random.default_rng(0)
    began = time.monotonic()
    found = associations(rng.random((31, 200)) < 0.3, rng.normal(size=(8, 200)), rng.normal(size=200))
    assert found.value.shape == (31, 8)
    assert time.monotonic() - began < 20


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 → ×4, ×3, ×2, ×1 = 0.02, 0.03, 0.06, 0.04 → never falling: 0.02, 0.03, 0.06, 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]).tolist() == [1.0, 1.0]
    with_nan = holm([np.nan, 0.01, 0.04])
    assert np.isnan(with_nan[0])
    assert with_nan[1:].tolist() == pytest.approx([0.02, 0.04])
    assert holm([]).size == 0


def test_benjamini_hochberg_by_hand_and_by_scipy() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 → ×4/1, ×4/2, ×4/3, ×4/4 = 0.02, 0.02, 0.04, 0.04.
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.02, 0.04, 0.04, 0.02])
    p = np.random.default_rng(0).random(50) ** 2
    assert benjamini_hochberg(p) == pytest.approx(stats.false_discovery_control(p))
    with_nan = benjamini_hochberg([0.04, np.nan, 0.01])
    assert np.isnan(with_nan[1])
    assert with_nan[[0, 2]].tolist() == pytest.approx([0.04, 0.02])
