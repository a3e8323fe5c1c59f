"""Forced routes: the rate is kept, the draw is the request's own, and nothing else matters."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from profiler.execution.routes import ForcedGates


@given(
    layers=st.integers(1, 80),
    percent=st.integers(0, 100),
    seed=st.integers(0, 2**32 - 1),
    pattern=st.sampled_from(["random", "shared", "middle"]),
    request=st.text(max_size=20),
)
def test_as_many_layers_skip_as_the_ratio_says(
    layers: int, percent: int, seed: int, pattern: str, request: str
) -> None:
    route = ForcedGates(ratio=percent / 100, seed=seed, pattern=pattern).open_layers(layers, request)
    assert len(route) == layers
    exact = Fraction(percent * layers, 100)
    skipped = route.count(False)
    assert abs(skipped - exact) <= Fraction(1, 2)
    assert percent < 100 or skipped == layers
    assert percent > 0 or skipped == 0


@pytest.mark.parametrize(
    ("ratio", "layers", "skipped"), [(0.3, 5, 2), (0.5, 3, 2), (0.5, 5, 3), (0.1, 6, 1), (0.3, 30, 9)]
)
def test_half_a_layer_rounds_up(ratio: float, layers: int, skipped: int) -> None:
    assert ForcedGates(ratio=ratio).open_layers(layers, "").count(False) == skipped


@pytest.mark.parametrize(
    ("layers", "ratio", "closed"),
    [(30, 0.3, range(10, 19)), (6, 1 / 3, range(2, 4)), (5, 0.4, range(1, 3)), (4, 1.0, range(4))],
)
def test_middle_is_contiguous_around_the_middle(layers: int, ratio: float, closed: range) -> None:
    route = ForcedGates(ratio=ratio, pattern="middle", seed=7).open_layers(layers, "any")
    assert [i for i, runs in enumerate(route) if not runs] == list(closed)


def test_shared_is_one_draw_and_random_one_a_request() -> None:
    names = [f"request-{i}" for i in range(50)]
    shared, random = ForcedGates(ratio=0.5), ForcedGates(ratio=0.5, pattern="random")
    assert len({shared.open_layers(12, name) for name in names}) == 1
    assert len({random.open_layers(12, name) for name in names}) > 40
    assert [random.open_layers(12, name) for name in names] == [random.open_layers(12, name) for name in names]


def test_the_seed_changes_the_draw() -> None:
    assert len({ForcedGates(ratio=0.5, seed=seed).open_layers(16, "") for seed in range(20)}) > 15


def test_every_layer_is_as_likely() -> None:
    gates = ForcedGates(ratio=0.25, pattern="random")
    skipped = Counter(i for n in range(2000) for i, runs in enumerate(gates.open_layers(8, str(n))) if not runs)
    # 2,000 draws of 2 of 8: 500 each, standard deviation 19.
    assert all(abs(skipped[i] - 500) < 100 for i in range(8))


def test_a_draw_is_the_same_on_every_machine() -> None:
    route = ForcedGates(ratio=0.3, seed=1, pattern="random").open_layers(10, "request-0")
    assert [i for i, runs in enumerate(route) if not runs] == [1, 2, 5]


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "most"])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ValidationError):
        ForcedGates(ratio=ratio)


def test_the_label_says_all() -> None:
    label = ForcedGates(ratio=0.25, seed=9, pattern="random").label()
    assert label == "forced: 25% of layers skip, pattern random, seed 9"
