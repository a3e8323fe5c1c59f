"""Balance of experts over ranks, by hand: imbalance and its tails, weights, predicted time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.balance import (
    ALL_LAYERS,
    COMPARISON_COLUMNS,
    IMBALANCE_COLUMNS,
    PLACEMENT_COLUMNS,
    WEIGHT_COLUMNS,
    WINDOW_COLUMNS,
    Experts,
    Loads,
    Speeds,
    comparison,
    imbalance,
    imbalance_table,
    loads,
    predicted,
    rank_flops,
    recorded_flops,
    weight_table,
    window_counts,
    window_table,
)
from profiler.execution.placement import Placement, all_size, contiguous


def placed(name: str, ranks_E: Sequence[int], layers: Sequence[int] = (0,)) -> pd.DataFrame:
    """Rows of a placement with one copy of each expert, the same in every layer."""
    rows = [(name, layer, expert, rank, 0, 1) for layer in layers for expert, rank in enumerate(ranks_E)]
    return pd.DataFrame(rows, columns=list(PLACEMENT_COLUMNS))


def recorded(placement: Placement, layers: Sequence[int] = (0,)) -> pd.DataFrame:
    """Rows of a placement as the profiler writes them."""
    frames = [pd.DataFrame({"placement": placement.name, "layer": k, **placement.copies._asdict()}) for k in layers]
    return pd.concat(frames, ignore_index=True)[list(PLACEMENT_COLUMNS)]


def value(table: pd.DataFrame, **where: Any) -> float:
    for name, wanted in where.items():
        table = table[table[name] == wanted]
    assert len(table) == 1
    return float(table["value"].iloc[0])


def test_weighted_flops_of_a_rank() -> None:
    # Widths 2, 3, 5, d = 10; experts 0 and 2 on rank 1: 6·10·(4·2 + 1·5) = 780, and 6·10·7·3 = 1,260 on rank 0.
    experts = Experts(widths=(2, 3, 5), hidden=10, itemsize=2, ranks=3)
    load = Loads(np.array([[[4, 7, 1], [0, 0, 2]]]), (3, 5))
    flops = rank_flops(load, placed("x", [1, 0, 1], (3, 5)), experts)
    assert flops.tolist() == [[[1260, 780, 0], [0, 600, 0]]]
    assert flops.dtype == np.int64


def test_each_layer_has_a_placement_of_its_own() -> None:
    experts = Experts((1, 1), 1, 2, 2)
    both = pd.concat([placed("x", [0, 1], (1,)), placed("x", [1, 1], (2,))])
    assert rank_flops(Loads(np.array([[[3, 1], [3, 1]]]), (1, 2)), both, experts).tolist() == [[[18, 6], [0, 24]]]
    assert rank_flops(Loads(np.array([[[3, 1], [3, 1]]]), (2, 1)), both, experts).tolist() == [[[0, 24], [18, 6]]]


def test_a_constant_skew_does_not_read_even() -> None:
    # 3 : 1 in every step: 3 ÷ 2, at every percentile.
    table = imbalance_table({"x": np.tile([[3, 1]], (40, 1, 1))}, (0,))
    assert table[table["layer"] == ALL_LAYERS]["value"].tolist() == [1.5, 1.5, 1.5]


def test_a_skew_that_changes_sides_does_not_read_even() -> None:
    # Summed over steps both ranks have 4; in each step one has 3 of 4.
    flops = np.array([[[3, 1]], [[1, 3]]])
    assert imbalance(flops.sum(0)).tolist() == [1.0]
    assert value(imbalance_table({"x": flops}, (0,)), layer=ALL_LAYERS, percentile=50) == 1.5
    # The same between layers of one step.
    assert value(imbalance_table({"x": flops.reshape(1, 2, 2)}, (0, 1)), layer=ALL_LAYERS, percentile=50) == 1.5


def test_percentiles_by_layer_and_over_all() -> None:
    # Layer 7: 1.0, 1.2, 2.0; layer 9: idle, 2.0, 2.0.
    flops = np.array([[[5, 5], [0, 0]], [[6, 4], [1, 0]], [[0, 3], [8, 0]]])
    table = imbalance_table({"x": flops}, (7, 9))
    assert tuple(table.columns) == IMBALANCE_COLUMNS
    assert value(table, layer=7, percentile=50) == pytest.approx(1.2)
    assert value(table, layer=7, percentile=95) == pytest.approx(1.2 + 0.9 * 0.8)
    assert value(table, layer=9, percentile=99) == 2.0
    # 1.0, 1.2, 2.0, 2.0, 2.0 together.
    assert value(table, layer=ALL_LAYERS, percentile=50) == 2.0
    assert table.groupby("layer")["idle"].first().to_dict() == {ALL_LAYERS: 1, 7: 0, 9: 1}
    assert table.groupby("layer")["n"].first().to_dict() == {ALL_LAYERS: 5, 7: 3, 9: 2}
    assert table["marked"].all()


def test_ranks_without_work_are_in_the_mean() -> None:
    experts = Experts((4, 4), 1, 2, 4)
    assert imbalance(rank_flops(Loads(np.array([[[1, 1]]]), (0,)), placed("x", [0, 1]), experts)).tolist() == [[2.0]]
    assert math.isnan(imbalance(np.zeros((1, 1, 4)))[0, 0])


def test_enough_samples_beyond_are_not_marked() -> None:
    table = imbalance_table({"x": np.tile([[1, 1]], (1001, 1, 1))}, (0,))
    overall = table[table["layer"] == ALL_LAYERS].set_index("percentile")
    assert overall["beyond"].to_dict() == {50: 500, 95: 50, 99: 10}
    assert not overall["marked"].any()


def test_nothing_computed_has_no_percentile() -> None:
    table = imbalance_table({"x": np.zeros((2, 1, 2))}, (0,))
    assert table["value"].isna().all()
    assert table["n"].tolist() == [0] * 6
    assert table["idle"].tolist() == [2] * 6


@given(
    tokens=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5),
    where=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=3, max_size=3),
)
def test_copies_share_as_the_profiler_shared(tokens: list[list[int]], where: list[set[int]]) -> None:
    placement = Placement("x", 4, (2, 3, 5), tuple(tuple(sorted(ranks)) for ranks in where))
    flops = rank_flops(Loads(np.array(tokens)[:, None], (0,)), recorded(placement), Experts((2, 3, 5), 7, 2, 4))
    assert flops[:, 0].tolist() == (42 * placement.loads(tokens)).tolist()
    for step, row in enumerate(tokens):
        rows = [expert for expert, n in enumerate(row) for _ in range(n)]
        sent = [0] * 4
        for expert, rank in zip(rows, placement.destinations(rows), strict=True):
            sent[rank] += 42 * (2, 3, 5)[expert]
        assert flops[step, 0].tolist() == sent


def test_counts_from_recorded_rows() -> None:
    # Step 9 before step 12; expert 1 of layer 4 got tokens on two ranks.
    frame = pd.DataFrame(
        [(12, 4, 0, 1, 5), (9, 4, 0, 1, 2), (9, 4, 1, 1, 3), (9, 6, 1, 0, 1)],
        columns=["step", "layer", "rank", "expert", "tokens"],
    )
    load = loads(frame, 3)
    assert load.layers == (4, 6)
    assert load.tokens.tolist() == [[[0, 5, 0], [1, 0, 0]], [[0, 5, 0], [0, 0, 0]]]
    experts = Experts((10, 20, 30), 1, 2, 2)
    assert recorded_flops(frame, experts).tolist() == [[[240, 360], [0, 60]], [[600, 0], [0, 0]]]


def test_windows_are_counted_and_the_rest_left_out() -> None:
    routes = np.array([[0, 1], [1, -1], [2, 1], [0, 2], [0, 1]])
    assert window_counts(routes, 2, 3).tolist() == [[1, 2, 0], [1, 1, 2]]
    assert window_counts(routes, 1, 3).tolist()[1] == [0, 1, 0]
    assert window_counts(routes, 6, 3).shape == (0, 3)


def test_the_mean_is_even_while_single_tokens_are_not() -> None:
    # Tokens go to the experts in turn, one expert a rank: a window of 1 has one rank at work, one of 8 both alike.
    routes = (np.arange(64) % 2).reshape(64, 1, 1)
    table = window_table(routes, (3,), placed("x", [0, 1], (3,)), Experts((8, 8), 4, 2, 2))
    assert tuple(table.columns) == WINDOW_COLUMNS
    assert sorted(set(table["window"])) == [1, 8, 64]
    assert value(table, window=1, percentile=50) == 2.0
    assert value(table, window=8, percentile=99) == 1.0
    assert table.groupby("window")["n"].first().to_dict() == {1: 64, 8: 8, 64: 1}


def test_windows_of_several_layers_and_placements() -> None:
    # Layer 0 sends both tokens to expert 0, layer 1 one to each. Width 3 against 1.
    routes = np.array([[[0], [0]], [[0], [1]]])
    frame = pd.concat([placed("apart", [0, 1], (0, 1)), placed("together", [1, 1], (0, 1))])
    table = window_table(routes, (0, 1), frame, Experts((3, 1), 1, 2, 2), sizes=(2,))
    # Apart: 6 : 0 is 2.0, 3 : 1 is 1.5. Together all is on one rank.
    assert value(table, placement="apart", percentile=50) == pytest.approx(1.75)
    assert value(table, placement="together", percentile=50) == 2.0


def test_windows_of_a_copied_expert_alternate() -> None:
    # Two copies of one expert: a window of two tokens is even, a window of one never is.
    placement = Placement("x", 2, (4,), ((0, 1),))
    table = window_table(np.zeros((6, 1, 1), int), (0,), recorded(placement), Experts((4,), 1, 2, 2), sizes=(1, 2))
    assert value(table, window=1, percentile=50) == 2.0
    assert value(table, window=2, percentile=99) == 1.0


def test_weights_of_the_a3b_model() -> None:
    widths = (384, 512, 640, 768, 896, 1024, 1152, 1280)
    experts = Experts(tuple(w for w in widths for _ in range(8)), 1024, 2, 4)
    frame = pd.concat([recorded(place(widths, 8, 4), range(1, 15)) for place in (all_size, contiguous)])
    table = weight_table(frame, experts)
    assert tuple(table.columns) == WEIGHT_COLUMNS
    by_name = dict(list(table.groupby("placement")))
    # 14 layers of 163,577,856 parameters of 2 bytes.
    assert by_name["all_size"]["weight_bytes"].tolist() == [14 * 163_577_856 * 2 // 4] * 4
    assert by_name["contiguous"]["to_mean"].tolist() == pytest.approx(
        [7168 / 13312, 11264 / 13312, 15360 / 13312, 19456 / 13312]
    )
    assert by_name["contiguous"]["copies"].tolist() == [14 * 16] * 4


def test_a_rank_that_holds_nothing_is_listed() -> None:
    table = weight_table(placed("x", [1]), Experts((5,), 2, 4, 2))
    assert table["weight_bytes"].tolist() == [0, 120]
    assert table["to_mean"].tolist() == [0.0, 2.0]


def test_predicted_time_by_hand() -> None:
    # d = 10, 2 bytes: an expert of width 5 is 300 bytes and 300 FLOPs a token, one of width 20 four times that.
    experts = Experts((5, 20), 10, 2, 2)
    speeds = Speeds(flops_per_s=1e9, weight_bytes_per_s=0.5e9, link_bytes_per_s=1e8, collective_ns=1000, rest_ns=50_000)
    load = Loads(np.array([[[8, 1], [1, 0]]]), (0, 1))
    found = predicted(load, placed("x", [0, 1], (0, 1)), experts, speeds)
    # Layer 0: rank 0 computes 2,400 ns (reading takes 600), rank 1 reads 2,400 ns (computing takes 1,200).
    # Layer 1: rank 0 reads 600 ns; rank 1 reads nothing, since its expert got no token.
    assert found.experts_ns.tolist() == pytest.approx([3000])
    # Half of the busiest rank's tokens come from the other: 4 and ½, of 20 bytes at 10 ns each; twice, and 1,000 ns.
    assert found.transfer_ns.tolist() == pytest.approx([2 * (1000 + 800) + 2 * (1000 + 100)])
    assert found.step_ns.tolist() == pytest.approx([3000 + 5800 + 50_000])


def test_one_rank_sends_nothing() -> None:
    speeds = Speeds(1e9, 1e9, 1e9, 1000)
    found = predicted(Loads(np.array([[[1]]]), (0,)), placed("x", [0]), Experts((5,), 10, 2, 1), speeds)
    assert found.transfer_ns.tolist() == [0]


def test_placements_side_by_side() -> None:
    experts = Experts((4, 4, 4, 4), 1, 2, 2)
    load = Loads(np.array([[[5, 1, 1, 1]], [[5, 1, 1, 1]]]), (0,))
    frame = pd.concat([placed("pairs", [0, 0, 1, 1]), placed("hot alone", [0, 1, 1, 1])])
    # 10 ns a FLOP of 24 a token; weights, links and collectives cost nothing.
    table = comparison(load, frame, experts, Speeds(1e8, math.inf, math.inf, 0)).set_index("placement")
    assert tuple(table.reset_index().columns) == COMPARISON_COLUMNS
    assert table.loc["pairs"].tolist() == pytest.approx([1.5, 1.5, 1.5, 48, 1.0, 144e-5, 144e-5])
    assert table.loc["hot alone"].tolist() == pytest.approx([1.25, 1.25, 1.25, 72, 1.5, 120e-5, 120e-5])
    without = comparison(load, frame, experts)
    assert without[["predicted_p50_ms", "predicted_p95_ms"]].isna().all(axis=None)
    assert without["imbalance_p50"].tolist() == [1.5, 1.25]
