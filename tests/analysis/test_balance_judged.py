"""Placements judged on what a run recorded, by hand: imbalance, tails over few tokens, speeds, predicted steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import balance_judged, balance_ranks
from analysis.balance import ALL_LAYERS
from analysis.balance_judged import AS_RUN
from analysis.balance_reading import BATCH, INPUT, Layout, layouts, routes
from profiler.store import Run
from tests.analysis.expert_run import ALL_SIZE, CONTIGUOUS, DECODE, LAYERS, PREFILL, WIDTHS, chosen, tokens_of
from tests.analysis.test_balance_ranks import by_hand, load


def layout(run: Run) -> Layout:
    (found,) = layouts(run)
    return found


def compared(run: Run) -> pd.DataFrame:
    about = layout(run)
    exchanged = balance_ranks.exchanges(run, about)
    return balance_judged.compared(run, about, exchanged, balance_judged.reached(run, about, exchanged))


def percentiles(frame: pd.DataFrame, cell: str, placement: str, layer: int = ALL_LAYERS) -> list[float]:
    rows = frame[(frame["cell"] == cell) & (frame["placement"] == placement) & (frame["layer"] == layer)]
    return [float(value) for value in rows["value"]]


class TestImbalance:
    def test_of_each_step_and_layer_as_it_ran(self, experts: Run) -> None:
        found = balance_judged.imbalances(experts, layout(experts))
        # Prefill, layer 1: 768, 768, 2304, 2304 → 1.5; layer 2: 1536, 0, 0, 4608 → 3.
        assert percentiles(found, PREFILL, AS_RUN, 1) == [1.5, 1.5, 1.5]
        assert percentiles(found, PREFILL, AS_RUN, 2) == [3.0, 3.0, 3.0]
        assert percentiles(found, PREFILL, AS_RUN) == pytest.approx([2.25, 2.925, 2.985])
        # Decode: an even step and one with every pair on one rank, in each layer: 1.5 and 4, not the 2.25 of their sum.
        assert percentiles(found, DECODE, AS_RUN) == [2.75, 4.0, 4.0]

    def test_placements_on_the_same_steps(self, experts: Run) -> None:
        found = balance_judged.imbalances(experts, layout(experts))
        assert percentiles(found, PREFILL, "contiguous") == percentiles(found, PREFILL, AS_RUN)
        assert percentiles(found, PREFILL, "all_size", 1) == [1.0, 1.0, 1.0]
        assert percentiles(found, PREFILL, "all_size", 2) == [3.0, 3.0, 3.0]
        # Of 4 and 16 tokens of the last expert ranks 1 and 3 take half each: 2112 and 2304 against a mean of 1536.
        assert percentiles(found, PREFILL, "replicated", 1) == [1.375] * 3
        assert percentiles(found, PREFILL, "replicated", 2) == [1.5] * 3
        assert percentiles(found, DECODE, "all_size") == [1.5, 2.0, 2.0]

    def test_what_was_fitted_to_the_only_step_of_a_cell_is_said(self, experts: Run) -> None:
        found = balance_judged.imbalances(experts, layout(experts))
        assert found.groupby("cell")["fitted_here"].unique().map(list).to_dict() == {PREFILL: [True], DECODE: [False]}

    def test_steps_that_a_placement_was_fitted_to_are_left_out_where_there_are_others(self, experts: Run) -> None:
        about = replace(layout(experts), fitted_steps=frozenset({0, 100}))
        found = balance_judged.imbalances(experts, about)
        assert set(found.loc[found["cell"] == DECODE, "steps"]) == {1}
        # Step 101 alone: 4 in layer 1, 1.5 in layer 2.
        assert percentiles(found, DECODE, "contiguous", 1) == [4.0] * 3
        assert percentiles(found, DECODE, "contiguous", 2) == [1.5] * 3

    def test_one_process_is_judged_as_if_placed(self, alone: Run, experts: Run) -> None:
        found = balance_judged.imbalances(alone, layout(alone))
        on_ranks = balance_judged.imbalances(experts, layout(experts))
        assert AS_RUN not in set(found["placement"])
        for name in ("contiguous", "all_size", "replicated"):
            assert percentiles(found, DECODE, name) == percentiles(on_ranks, DECODE, name)

    def test_one_rank_to_be_on_is_not_judged(self, alone: Run) -> None:
        about = layout(alone)
        one = replace(about, experts=replace(about.experts, ranks=1), placements=about.placements.assign(rank=0))
        assert balance_judged.imbalances(alone, one).empty
        assert balance_judged.window_tails(alone, one).empty
        assert balance_judged.compared(alone, one, balance_ranks.exchanges(alone, one), None).empty


class TestPrediction:
    def test_speeds_are_those_the_run_reached(self, experts: Run) -> None:
        about = layout(experts)
        found = balance_judged.reached(experts, about, balance_ranks.exchanges(experts, about))
        assert found is not None
        # 2 FLOPs a ns. Weights: the decode steps touch 3072 + 384 + 1152 + 3072 bytes in 768 + 384 + 1152 + 768 ns.
        assert found.speeds.flops_per_s == pytest.approx(2e9)
        assert found.speeds.weight_bytes_per_s == pytest.approx(2.5e9)
        # 1,000 ns and 2 a byte of the busiest rank.
        assert found.speeds.collective_ns == pytest.approx(1000)
        assert found.speeds.link_bytes_per_s == pytest.approx(0.5e9)
        assert "2.00 GFLOP/s" in found.sentence

    def test_a_step_by_hand(self, experts: Run) -> None:
        found = compared(experts)
        row = found[(found["cell"] == PREFILL) & (found["placement"] == "contiguous")].iloc[0]
        # Experts: slowest rank of layer 1 2304 ÷ 2 ns, of layer 2 4608 ÷ 2. Both all-to-alls: 8·¾·32 and 16·¾·32
        # bytes: 2·(1,000 + 2·192) + 2·(1,000 + 2·384). The rest of the slowest rank, 3: 103,000 and counts, 2·500.
        assert row["predicted_p50_ms"] == pytest.approx((1152 + 2304 + 2768 + 3536 + 104_000) / 1e6)
        # As it was: 103,000, experts 3,456, counts 1,000, dispatch and combine 2·(1,512 + 1,768).
        assert row["measured_p50_ms"] == pytest.approx((103_000 + 3_456 + 1_000 + 6_560) / 1e6)
        assert bool(row["in_force"])

    def test_only_what_was_in_force_was_measured(self, experts: Run) -> None:
        found = compared(experts)
        assert found.loc[found["in_force"], "placement"].tolist() == ["contiguous"] * 2
        assert found.loc[~found["in_force"], "measured_p50_ms"].isna().all()

    def test_what_a_placement_was_fitted_on_stands_beside_it(self, experts: Run) -> None:
        found = compared(experts).set_index(["cell", "placement"])
        assert found.loc[(PREFILL, "replicated"), "fitted_on"] == f"the step of {PREFILL}"
        assert bool(found.loc[(PREFILL, "replicated"), "fitted_here"])
        assert not found.loc[(DECODE, "replicated"), "fitted_here"]
        assert not found.loc[(PREFILL, "all_size"), "fitted_here"]
        assert found.loc[(PREFILL, "replicated"), "note"] == "1 copy added"

    def test_few_values_are_marked(self, experts: Run) -> None:
        found = compared(experts)
        assert found["values"].tolist() == [2] * 3 + [4] * 3
        assert found[["marked_p50", "marked_p95", "marked_p99"]].all(axis=None)

    def test_one_process_moves_nothing(self, alone: Run) -> None:
        about = layout(alone)
        found = balance_judged.reached(alone, about, balance_ranks.exchanges(alone, about))
        assert found is not None
        assert "nothing was moved in a single process" in found.sentence
        row = compared(alone).query("placement == 'contiguous'").iloc[0]
        # Experts as above, and the step without its experts.
        assert row["predicted_p50_ms"] == pytest.approx((1152 + 2304 + 100_000) / 1e6)
        assert np.isnan(row["measured_p50_ms"])

    def test_without_times_of_experts_nothing_is_predicted(self, tmp_path: Path) -> None:
        run = by_hand(tmp_path, loads=[load(0, 0, 0, 5)])
        about = layout(run)
        assert balance_judged.reached(run, about, balance_ranks.exchanges(run, about)) is None

    def test_weights_of_each_rank(self, experts: Run) -> None:
        found = balance_judged.held(layout(experts)).set_index(["placement", "rank"])["weight_bytes"]
        assert found["contiguous"].tolist() == [768, 768, 2304, 2304]
        assert found["all_size"].tolist() == [1536] * 4
        assert found["replicated"].tolist() == [1536, 1536 + 2 * 576, 1536, 1536]


class TestWindows:
    def test_tokens_in_both_orders(self, experts: Run) -> None:
        found, fitted_here = routes(experts, layout(experts), PREFILL)
        tokens = tokens_of(PREFILL, 0)
        assert found[INPUT].tolist() == [[list(chosen(PREFILL, t, layer)) for layer in LAYERS] for t in tokens]
        across = sorted(tokens, key=lambda token: (token.position, token.request))
        assert found[BATCH].tolist() == [[list(chosen(PREFILL, t, layer)) for layer in LAYERS] for t in across]
        assert fitted_here

    def test_decoding_has_no_tokens_along_an_input(self, experts: Run) -> None:
        found, fitted_here = routes(experts, layout(experts), DECODE)
        assert list(found) == [BATCH]
        assert found[BATCH].shape == (8, 2, 2)
        assert not fitted_here

    def test_single_tokens_and_windows_of_eight(self, experts: Run) -> None:
        found = balance_judged.window_tails(experts, layout(experts))
        rows = found[(found["cell"] == PREFILL) & (found["order"] == INPUT) & (found["placement"] == "contiguous")]
        assert set(rows["window"]) == {1, 8}  # 16 tokens are no window of 64
        # One token, layer 1: both experts on one rank 8 times (4), on two alike 4 times (2), narrow and wide 4 times
        # (3); layer 2 always narrow and wide. Eight tokens: 1.5 twice in layer 1, 3 twice in layer 2.
        assert rows[rows["window"] == 1]["value"].tolist() == [3.0, 4.0, 4.0]
        assert rows[rows["window"] == 8]["value"].tolist() == pytest.approx([2.25, 3.0, 3.0])
        assert set(rows["tokens"]) == {16}

    def test_against_a_slow_count(self, experts: Run) -> None:
        found = balance_judged.window_tails(experts, layout(experts), sizes=(2,))
        rows = found[(found["cell"] == DECODE) & (found["placement"] == "all_size")]
        tokens = [token for index in range(2) for token in tokens_of(DECODE, index)]
        values = []
        for first in range(0, len(tokens), 2):
            for layer in LAYERS:
                work = [0, 0, 0, 0]
                for token in tokens[first : first + 2]:
                    for expert in chosen(DECODE, token, layer):
                        work[ALL_SIZE[expert]] += WIDTHS[expert]
                values.append(max(work) / (sum(work) / 4))
        assert rows["value"].tolist() == pytest.approx(np.percentile(values, [50, 95, 99]).tolist())
        assert CONTIGUOUS != ALL_SIZE
