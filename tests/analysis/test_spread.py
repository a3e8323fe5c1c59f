"""Verdicts on the spread between seeds, against tables of the studentised range and by simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import spread
from analysis.spread import BEYOND_CHANCE, BY_CHANCE, NOT_STABLE, PARTLY, STABLE, TOO_WIDE


def values(given: list[tuple[float, float, float]], unit: str = spread.SHARE) -> pd.DataFrame:
    """A figure of an arm, one (value, low, high) a seed."""
    base = {"arm": "a", "twin": "dense", "part": spread.SPEED, "figure": spread.SAVED, "where": "cell", "unit": unit}
    return pd.DataFrame(
        [base | {"seed": k, "value": v, "low": low, "high": high} for k, (v, low, high) in enumerate(given)]
    )


def one(frame: pd.DataFrame, pairs: pd.DataFrame | None = None) -> dict[str, Any]:
    none = pd.DataFrame(columns=["arm"])
    (line,) = spread.lines(frame, none if pairs is None else pairs, ["a"]).to_dict("records")
    return {str(key): value for key, value in line.items()}


def around(centres: list[float], half: float, unit: str = spread.SHARE) -> dict[str, Any]:
    return one(values([(c, c - half, c + half) for c in centres], unit))


@pytest.mark.parametrize(("seeds", "quantile"), [(3, 3.314), (4, 3.633), (5, 3.858), (10, 4.474)])
def test_the_factor_is_the_studentised_range_in_widths_of_an_interval(seeds: int, quantile: float) -> None:
    """Quantiles: Pearson and Hartley's table, upper 5 % points, infinite degrees of freedom."""
    assert spread.spread_factor(seeds) == pytest.approx(quantile / (2 * 1.96), abs=3e-4)


@pytest.mark.parametrize("seeds", [3, 10])
def test_seeds_that_differ_by_measuring_alone_are_called_stable_95_times_in_100(seeds: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, seeds))
    within = np.ptp(drawn, axis=1) <= spread.spread_factor(seeds) * 2 * 1.96
    assert within.mean() == pytest.approx(0.95, abs=0.005)


def test_a_line_by_hand() -> None:
    line = one(values([(0.10, 0.08, 0.12), (0.13, 0.10, 0.16), (0.16, 0.155, 0.165)]))
    assert list(line) == list(spread.LINE_COLUMNS)
    assert (line["seeds"], line["twin"], line["note"]) == (3, "dense", "")
    assert line["mean"] == pytest.approx(0.13)
    assert line["sd"] == pytest.approx(0.03)  # √((0.03² + 0 + 0.03²) / 2)
    assert (line["lowest"], line["highest"]) == (0.10, 0.16)
    assert line["own_width"] == pytest.approx(0.04)  # of 0.04, 0.06, 0.01
    assert line["limit"] == pytest.approx(0.04 * 3.314 / 3.92, rel=1e-3)
    assert line["verdict"] == NOT_STABLE  # 0.06 > 0.0338


@pytest.mark.parametrize(
    ("centres", "half", "unit", "verdict"),
    [
        ([0.10, 0.12, 0.13], 0.02, spread.SHARE, STABLE),  # range 0.03, limit 0.0338
        ([0.10, 0.12, 0.14], 0.02, spread.SHARE, NOT_STABLE),
        ([0.10, 0.12, 0.14], 0.11, spread.SHARE, TOO_WIDE),  # width 0.22
        ([0.10, 0.12, 0.54], 0.11, spread.SHARE, NOT_STABLE),  # however wide: it is past the limit
        ([10.0, 10.5, 11.0], 0.9, spread.MILLISECONDS, STABLE),  # width 1.8 of 10.5
        ([10.0, 10.5, 11.0], 1.1, spread.MILLISECONDS, TOO_WIDE),  # width 2.2, a fifth is 2.1
        ([1.20, 1.21, 1.22], 0.02, spread.FACTOR, STABLE),
        ([0.25, 0.25, 0.25], 0.0, spread.SHARE, STABLE),
        ([0.1 + 0.2, 0.3, 0.3], 0.0, spread.SHARE, STABLE),  # 0.1 + 0.2 is not 0.3, and rounding is no spread
        ([0.25, 0.25, 0.26], 0.0, spread.SHARE, NOT_STABLE),
    ],
)
def test_verdicts(centres: list[float], half: float, unit: str, verdict: str) -> None:
    assert around(centres, half, unit)["verdict"] == verdict


def test_nothing_is_said_of_two_seeds_nor_of_what_has_no_interval() -> None:
    two = around([0.1, 0.9], 0.01)
    assert (two["verdict"], two["note"], two["seeds"]) == ("", "2 seeds: too few to judge", 2)
    assert two["sd"] == pytest.approx(0.8 / 2**0.5)
    nan = float("nan")
    counted = one(values([(0.1, nan, nan)] * 3))
    assert (counted["verdict"], counted["note"]) == ("", "counted: no interval")
    partly = one(values([(0.1, 0.0, 0.2), (0.1, nan, nan), (0.1, 0.0, 0.2)]))
    assert (partly["verdict"], partly["note"]) == ("", "not every seed has an interval")
    assert spread.rules(2) == ["With 2 seeds nothing is judged; 3 are needed."]
    assert "at most 0.85 × the median width" in spread.rules(3)[0]


def pairs_of(given: list[tuple[float, float, float, float]]) -> pd.DataFrame:
    """Three pairs: Jaccard, agreement, its lower end, agreement by chance."""
    names = [(0, 1), (0, 2), (1, 2)]
    columns = ["jaccard_ever", "agreement", "low", "by_chance", "first", "second"]
    return pd.DataFrame([(*line, *pair) for line, pair in zip(given, names, strict=True)], columns=columns).assign(
        arm="a"
    )


@pytest.mark.parametrize(
    ("given", "layers", "alike"),
    [
        ([(1, 1, 1, 1)] * 3, STABLE, STABLE),
        ([(1, 0.9, 0.85, 0.8)] * 3, STABLE, BEYOND_CHANCE),
        ([(0.5, 0.9, 0.85, 0.8), (1, 0.9, 0.79, 0.8), (1, 0.9, 0.85, 0.8)], NOT_STABLE, PARTLY),
        ([(1, 0.8, 0.7, 0.8)] * 3, STABLE, BY_CHANCE),
        ([(0.5, 0.9, float("nan"), 0.8)] * 3, NOT_STABLE, ""),  # too few inputs for an interval
    ],
)
def test_pairs_of_seeds(given: list[tuple[float, float, float, float]], layers: str, alike: str) -> None:
    shown = values([(0.2, 0.1, 0.3)] * 3).assign(part=spread.PATTERN, figure=spread.SKIPPED)
    first, *lines = spread.lines(shown, pairs_of(given), ["a"]).to_dict("records")
    assert first["figure"] == spread.SKIPPED
    assert [(line["figure"], line["verdict"]) for line in lines] == [(spread.LAYERS, layers), (spread.ALIKE, alike)]
    assert [line["seeds"] for line in lines] == [3, 3]
    assert lines[0]["mean"] == pytest.approx(sum(line[0] for line in given) / 3)
    assert (lines[1]["lowest"], lines[1]["highest"]) == (min(g[1] for g in given), max(g[1] for g in given))


def test_seeds_that_skip_nothing_have_no_overlap_to_speak_of() -> None:
    nan = float("nan")
    shown = values([(0.0, 0.0, 0.0)] * 3).assign(part=spread.PATTERN, figure=spread.SKIPPED)
    lines = spread.lines(shown, pairs_of([(nan, 1, 1, 1), (0, 0.9, 0.8, 0.9), (0, 0.9, 0.8, 0.9)]), ["a"])
    layers = lines[lines["figure"] == spread.LAYERS].iloc[0]
    assert (layers["mean"], layers["note"]) == (0, "3 pairs; 1 pair skips nothing at all")
