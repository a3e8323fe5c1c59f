"""What each rank did, by hand from the run of experts: FLOPs, bytes by link, transfer, wait, time by width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import balance_ranks, balance_tables
from analysis.balance_reading import Layout, layouts, of_steps
from profiler.records import ArmRecord, CellRecord, ParallelRecord
from profiler.store import Run
from tests.analysis import expert_run
from tests.analysis.expert_run import DECODE, PREFILL, write_expert_run
from tests.analysis.tiny_run import step, write_run


def layout(run: Run) -> Layout:
    (found,) = layouts(run)
    return found


def of(frame: pd.DataFrame, cell: str) -> pd.DataFrame:
    return frame[frame["cell"] == cell]


def test_what_is_known_of_experts_and_ranks(experts: Run) -> None:
    found = layout(experts)
    assert (found.arm, found.ran_on, found.in_force) == ("mohge", 4, "contiguous")
    assert found.experts.ranks == 4
    assert found.nodes == (0, 0, 1, 1)
    assert found.layers == (1, 2)
    assert list(dict.fromkeys(found.placements["placement"])) == ["contiguous", "all_size", "replicated"]


def test_a_run_that_recorded_no_loads_has_no_layout(example: Run, tmp_path: Path) -> None:
    assert layouts(example) == []
    assert layouts(Run(write_expert_run(tmp_path / "run", ranks=0))) == []


def test_ranks_are_given_one_by_one(experts: Run) -> None:
    found = of(balance_ranks.ranks(experts, layout(experts)), PREFILL)
    # Layer 1: 4 tokens an expert: 8·96 on ranks 0 and 1, 8·288 on 2 and 3. Layer 2: 16·96 on 0, 16·288 on 3.
    assert found["flops"].tolist() == [2304, 768, 2304, 6912]
    assert found["pairs"].tolist() == [24, 8, 8, 24]
    assert found["flop_share"].tolist() == [0.1875, 0.0625, 0.1875, 0.5625]
    assert found["to_mean"].tolist() == [0.75, 0.25, 0.75, 2.25]
    # Two experts a rank and layer, 192 or 576 bytes each.
    assert found["weight_bytes"].tolist() == [768, 768, 2304, 2304]
    assert found["copies"].tolist() == [4] * 4
    assert found["node"].tolist() == [0, 0, 1, 1]
    assert set(found["steps"]) == {1}


def test_one_process_holds_all(alone: Run) -> None:
    found = of(balance_ranks.ranks(alone, layout(alone)), PREFILL)
    assert found[["rank", "pairs", "flops", "copies", "weight_bytes"]].to_numpy().tolist() == [[0, 64, 12288, 16, 6144]]


def test_what_a_rank_holds_is_absent_where_no_placement_was_recorded(tmp_path: Path, alone: Run) -> None:
    run = by_hand(tmp_path)
    assert balance_ranks.ranks(run, layout(run))[["copies", "weight_bytes"]].isna().all(axis=None)
    # A process by itself holds all of its experts without one.
    bare = replace(layout(alone), placements=layout(alone).placements.iloc[:0])
    assert balance_ranks.ranks(alone, bare)["weight_bytes"].tolist() == [6144, 6144]


def test_loads_of_experts(experts: Run) -> None:
    found = of(balance_ranks.expert_loads(experts, layout(experts)), PREFILL)
    second = found[found["layer"] == 2]
    assert second["pairs"].tolist() == [16, 0, 0, 0, 0, 0, 0, 16]
    assert second["flop_share"].tolist() == [0.25, 0, 0, 0, 0, 0, 0, 0.75]
    assert second["to_even"].tolist() == [4, 0, 0, 0, 0, 0, 0, 4]
    assert second["group"].tolist() == [0] * 4 + [1] * 4


class TestTraffic:
    def test_bytes_from_each_rank_to_each(self, experts: Run) -> None:
        found = of(balance_ranks.traffic(experts, layout(experts)), PREFILL)
        sent = found[found["direction"] == "dispatch"]
        # Layer 1: tokens 0 to 3 (and 8 to 11) take experts 0, 1·2, 2·2, 3·2, 4: ranks 0, 0·2 → 3, 4, 1, 0 pairs;
        # tokens 4 to 7 (12 to 15) take 4, 5·2, 6·2, 7·2, 0: 1, 0, 3, 4. Layer 2 adds 4 to ranks 0 and 3 each.
        matrix = [[7, 4, 1, 4], [5, 0, 3, 8], [7, 4, 1, 4], [5, 0, 3, 8]]
        assert sent["tokens"].to_numpy().reshape(4, 4).tolist() == matrix
        assert sent["bytes"].tolist() == [32 * tokens for line in matrix for tokens in line]
        back = found[found["direction"] == "combine"]
        assert back["tokens"].to_numpy().reshape(4, 4).T.tolist() == matrix

    def test_local_copies_nodes_and_other_nodes_are_apart(self, experts: Run) -> None:
        found = of(balance_ranks.links(balance_ranks.traffic(experts, layout(experts))), PREFILL)
        by_link = found[found["direction"] == "dispatch"].set_index("link")
        assert by_link["tokens"].to_dict() == {"local copy": 16, "same node": 16, "other node": 32}
        assert by_link["bytes_per_step"].to_dict() == {"local copy": 512, "same node": 512, "other node": 1024}
        assert by_link["share"].tolist() == [0.25, 0.25, 0.5]

    def test_bytes_a_step_of_several_steps(self, experts: Run) -> None:
        found = of(balance_ranks.links(balance_ranks.traffic(experts, layout(experts))), DECODE)
        # 4 tokens × 2 experts × 2 layers × 32 bytes in each of 2 steps.
        assert found.groupby("direction")["bytes_per_step"].sum().to_dict() == {"dispatch": 512, "combine": 512}

    def test_without_names_of_nodes_no_link_is_said_to_be_near(self, tmp_path: Path) -> None:
        run = Run(write_expert_run(tmp_path / "run", nodes=()))
        found = balance_ranks.traffic(run, layout(run))
        assert set(found["link"]) == {"local copy", "node not recorded"}

    def test_one_process_sends_nothing(self, alone: Run) -> None:
        assert balance_ranks.traffic(alone, layout(alone)).empty
        assert balance_ranks.exchanges(alone, layout(alone)).empty


class TestTimes:
    def test_the_shortest_is_transfer_and_the_rest_of_each_is_wait(self, experts: Run) -> None:
        found = balance_ranks.exchanges(experts, layout(experts))
        own = found[(found["step"] == 0) & (found["layer"] == 1) & (found["operation"] == "dispatch")]
        # The busiest rank moves 8 tokens of 32 bytes one way: 1,000 + 2·256.
        assert own["transfer_ns"].tolist() == [1512] * 4
        assert own["wait_ns"].tolist() == [300, 200, 100, 0]

    def test_totals_of_a_rank(self, experts: Run) -> None:
        exchanged = balance_ranks.exchanges(experts, layout(experts))
        found = of(balance_ranks.times(experts, layout(experts), exchanged), PREFILL)
        every = found[found["operation"] == "all"]
        # Two layers of counts (500), dispatch and combine (1,512 and 1,768); waits of 300 + 600 in each on rank 0.
        assert every["transfer_ms"].tolist() == pytest.approx([7560e-6] * 4)
        assert every["wait_ms"].tolist() == pytest.approx([1800e-6, 1200e-6, 600e-6, 0])
        assert every["wait_p99_ms"].tolist() == pytest.approx([1800e-6, 1200e-6, 600e-6, 0])
        # Rank 0: 100,000 + experts 1,152 + collectives 7,560 + 1,800.
        assert every["step_ms"].iloc[0] == pytest.approx(0.110512)
        assert every["wait_share"].iloc[0] == pytest.approx(1800 / 110512)
        assert set(every["steps"]) == {2}
        combine = found[found["operation"] == "combine"]
        assert combine["wait_ms"].tolist() == pytest.approx([1200e-6, 800e-6, 400e-6, 0])

    def test_a_collective_that_some_rank_did_not_record_says_nothing(self, tmp_path: Path) -> None:
        run = by_hand(tmp_path, collectives=[spent(0, 0, 700), spent(0, 1, 900), spent(1, 0, 10)])
        found = balance_ranks.exchanges(run, layout(run))
        assert found["step"].tolist() == [0, 0]
        assert found[["transfer_ns", "wait_ns"]].to_numpy().tolist() == [[700, 0], [700, 200]]

    def test_time_by_width(self, experts: Run) -> None:
        found = of(balance_ranks.widths(experts, layout(experts)), PREFILL).set_index("rank")
        assert found["width"].tolist() == [2, 2, 6, 6]
        assert found["ms_per_step"].tolist() == pytest.approx([1152e-6, 384e-6, 1152e-6, 3456e-6])
        assert found["pairs_per_step"].tolist() == [24, 8, 8, 24]
        assert found["gflops_per_s"].tolist() == pytest.approx([2.0] * 4)

    def test_a_width_that_some_steps_did_without_is_spread_over_all(self, alone: Run) -> None:
        found = of(balance_ranks.widths(alone, layout(alone)), DECODE).set_index("width")
        # Layers 1 and 2: 4 + 0 narrow ones of 16 pairs in the first step, 8 + 4 in the second.
        assert found["pairs_per_step"].tolist() == [8, 8]
        # 2 FLOPs a ns: 16 tokens of 96, and of 288, over 2 steps.
        assert found["ms_per_step"].tolist() == pytest.approx([16 * 96 / 2 / 2 / 1e6, 16 * 288 / 2 / 2 / 1e6])
        assert found["share"].tolist() == pytest.approx([0.25, 0.75])
        assert not found["all_widths"].any()

    def test_where_all_run_at_the_largest_width_their_time_is_of_all(self, tmp_path: Path) -> None:
        place = {"arm": "mohge", "step": 0, "rank": 0, "layer": 1}
        run = by_hand(
            tmp_path, loads=[load(0, 0, 0, 5), load(0, 0, 7, 3)], expert_times=[{**place, "width": 6, "ns": 768}]
        )
        about = replace(layout(run), times_note="strategy padded: every expert runs at the largest width, 6")
        (line,) = balance_ranks.widths(run, about).itertuples()
        # Tokens of both widths, whose FLOPs are those they need: 96 each in this run.
        assert (line.width, line.all_widths, line.pairs_per_step, line.gflops_per_s) == (6, True, 8, 1.0)
        assert balance_tables.widths(balance_ranks.widths(run, about)).rows[0][2] == "all, at 6"


def spent(number: int, rank: int, ns: int) -> dict[str, Any]:
    return {
        "arm": "mohge", "step": number, "rank": rank, "layer": 1, "operation": "dispatch", "start_ns": 0, "dur_ns": ns
    }  # fmt: skip


def load(number: int, rank: int, expert: int, tokens: int) -> dict[str, Any]:
    place = {"arm": "mohge", "step": number, "rank": rank, "layer": 1, "group": 0, "expert": expert}
    return {**place, "tokens": tokens, "flops": 96 * tokens}


def by_hand(folder: Path, **tables: list[dict[str, Any]]) -> Run:
    """A run of two ranks; step 0 and 1 are instrumented, 2 is warm-up, and 3 has no row of its own."""
    record: ArmRecord = expert_run.arm(2)
    assert isinstance(record.parallel, ParallelRecord)
    steps = [
        step("mohge", number, "warmup" if number == 2 else "instrumented", rank=rank)
        for number in range(3)
        for rank in range(2)
    ]
    loads = tables.pop("loads", [load(0, 0, 0, 1)])
    cell = CellRecord(name="cell", phase="prefill", batch=1, length=4, done=True)
    return write_run(folder / "run", [record], {"steps": steps, "loads": loads, **tables}, cells=[cell])


def test_warm_up_and_steps_without_a_row_do_not_count(tmp_path: Path) -> None:
    run = by_hand(tmp_path, loads=[load(0, 0, 0, 5), load(2, 0, 0, 70), load(3, 1, 2, 70), load(1, 1, 2, 6)])
    assert of_steps(run, "loads", "mohge")["tokens"].tolist() == [5, 6]
    assert balance_ranks.ranks(run, layout(run))["pairs"].tolist() == [5, 6]
