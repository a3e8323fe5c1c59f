"""Rows of experts that ranks share, by hand: what a rank writes, rule 1 over all of them, and placements to compare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np

from profiler.placing import placement_rows, recorded
from profiler.recorder import Count, Decision, Exchange, StepData, Traffic
from profiler.records import ArmRecord, Choice, Manifest, ParallelRecord
from profiler.stepdata import (
    Place,
    Tally,
    decision_rows,
    divided_as_decided,
    executed_as_decided,
    segment_rows,
    tally,
)
from profiler.store import Run
from profiler.writer import RunWriter

#: Two groups of two experts, 4 and 6 wide, in layer 1 of a model 10 wide.
WIDTHS = [4, 4, 6, 6]


def arm(ranks: int, attention: Literal["replicated", "data_parallel"] = "replicated") -> ArmRecord:
    sites = [Choice(layer=1, site="experts", index=e, name=f"e{e}", flops_per_row=60 * w) for e, w in enumerate(WIDTHS)]
    attends = Choice(layer=1, site="attention", index=0, name="run", flops_per_row=1)
    parallel = ParallelRecord(
        ranks=ranks, placement="contiguous", attention=attention, widths_E=WIDTHS, per_group=2, hidden=10, itemsize=4
    )
    return ArmRecord(name="a", method="m", scope="token", parallel=parallel, choices=[attends, *sites])


def step(entered: dict[int, int], chosen: list[list[int]], **more: Any) -> StepData:
    """Three rows, two experts each, of which these entered here."""
    rows = len(chosen)
    view = SimpleNamespace(rows=rows, pads=0, context=rows, context_full=rows)
    sequences = SimpleNamespace(
        requests=["r"], rows_S=[rows], positions=lambda i: range(rows), real_BT=None, view=view, __len__=None
    )

    class Sequences(SimpleNamespace):
        def __len__(self) -> int:
            return 1

    choice = np.array(chosen, np.int16)
    decision = Decision(1, "experts", choice, np.ones(rows, np.float32), {}, np.ones(choice.shape, np.float32))
    counts = {(1, "experts", e): Count(n) for e, n in entered.items()} | {(1, "attention", 0): Count(rows)}
    return StepData(
        cast(Any, Sequences(**vars(sequences))),
        "prefill",
        1,
        [decision],
        counts,
        {("experts", 1): 7},
        None,
        None,
        **more,
    )


CHOSEN = [[0, 2], [0, 3], [2, 3]]


def table(rows: list[Any], name: str) -> dict[str, Any]:
    (found,) = [dict(each.columns) for each in rows if each.table == name]
    return found


def test_a_process_alone_writes_the_loads_of_all_experts() -> None:
    loads = table(decision_rows(step({0: 2, 2: 2, 3: 2}, CHOSEN), arm(1), Place("c", 5)), "loads")
    assert loads == {
        "arm": "a", "step": 5, "layer": [1, 1, 1], "group": [0, 1, 1], "expert": [0, 2, 3], "tokens": [2, 2, 2],
        "flops": [6 * 10 * 4 * 2, 6 * 10 * 6 * 2, 6 * 10 * 6 * 2],
    }  # fmt: skip


def test_of_what_ranks_do_alike_the_first_one_tells() -> None:
    data = step({2: 2, 3: 2}, CHOSEN, traffic=[Traffic(1, "dispatch", [1, 3], 40)])
    first = decision_rows(data, arm(2), Place("c", 5, 0, alike=True))
    second = decision_rows(data, arm(2), Place("c", 5, 1, alike=True))
    apart = decision_rows(data, arm(2, "data_parallel"), Place("c", 5, 1, alike=False))
    assert [rows.table for rows in first] == ["gates", "rows", "loads", "dispatch"]
    assert [rows.table for rows in second] == ["rows", "loads", "dispatch"]
    assert table(first, "rows")["site"] == ["experts", "experts", "attention"]
    assert table(second, "rows")["site"] == ["experts", "experts"]
    assert table(apart, "rows")["site"] == ["experts", "experts", "attention"]
    assert "gates" in [rows.table for rows in apart]
    sent = table(second, "dispatch")
    assert (sent["source"], sent["destination"], sent["tokens"], sent["bytes"]) == (1, [0, 1], [1, 3], [40, 120])


def test_an_arm_without_experts_is_told_once() -> None:
    plain = arm(1).model_copy(update={"parallel": None})
    assert decision_rows(step({0: 2}, CHOSEN), plain, Place("c", 5, 1, alike=True)) == []


def test_where_the_time_went_is_every_ranks_own() -> None:
    data = step({}, CHOSEN, exchanges=[Exchange(1, "counts", 100, 9)], width_ns={(1, 6): 4})
    rows = segment_rows(data, arm(2), Place("c", 5, 1))
    assert [each.table for each in rows] == ["segments", "expert_times", "collectives"]
    assert table(rows, "expert_times") == {"arm": "a", "step": 5, "layer": [1], "width": [6], "ns": [4]}
    assert table(rows, "collectives") == {
        "arm": "a", "step": 5, "layer": [1], "operation": ["counts"], "start_ns": [100], "dur_ns": [9],
    }  # fmt: skip


# -- rule 1 ------------------------------------------------------------------------------------------


def test_experts_are_held_to_the_decisions_over_all_ranks() -> None:
    both = arm(2)
    here, there = step({0: 2}, CHOSEN), step({2: 2, 3: 2}, CHOSEN)
    assert executed_as_decided(here, both) == []  # one rank alone cannot tell
    tallies = [tally(here, both), tally(there, both)]
    assert tallies[0] == Tally({(1, 0): 2, (1, 2): 2, (1, 3): 2}, {(1, 0): 2})
    assert divided_as_decided(tallies, both) == []
    short = [tally(here, both), tally(step({1: 1, 2: 2, 3: 1}, CHOSEN), both)]
    assert divided_as_decided(short, both) == [
        "layer 1 experts 1: 1 rows entered on 2 ranks, decisions say 0",
        "layer 1 experts 3: 1 rows entered on 2 ranks, decisions say 2",
    ]


def test_where_each_rank_has_rows_of_its_own_all_their_decisions_count() -> None:
    own = arm(2, "data_parallel")
    tallies = [tally(step({0: 3}, [[0, 2]]), own), tally(step({2: 2, 3: 1}, [[0, 2], [0, 3]]), own)]
    assert divided_as_decided(tallies, own) == []
    # Had each rank decided for the same rows, they would have been counted twice.
    assert divided_as_decided(tallies, arm(2)) != []


def test_one_process_is_held_to_every_expert() -> None:
    assert executed_as_decided(step({0: 2, 2: 2, 3: 1}, CHOSEN), arm(1)) == [
        "layer 1 experts e3: 1 rows entered, decisions say 2"
    ]


# -- placements --------------------------------------------------------------------------------------


def test_placements_are_fitted_to_the_first_half_of_the_steps() -> None:
    # In the first two steps expert 0 has all tokens, later expert 1.
    loads = [(10, {(1, 0): 6, (1, 1): 1}), (20, {(1, 0): 6, (1, 2): 2}), (30, {(1, 1): 50})]
    both = arm(2)
    found = {rows.columns["placement"]: dict(rows.columns) for rows in placement_rows(both, loads)}
    assert set(found) == {"contiguous", "all_size", "interleaved", "balanced", "exact", "replicated"}
    assert found["contiguous"]["rank"] == [0, 0, 1, 1]
    assert found["all_size"]["rank"] == [0, 1, 0, 1]
    balanced = found["balanced"]
    assert (balanced["layer"], balanced["expert"], balanced["turn"], balanced["every"]) == (
        1, [0, 1, 2, 3], [0] * 4, [1] * 4,
    )  # fmt: skip
    # 12 tokens × 4 on one rank; 1 × 4 and 2 × 6 on the other.
    assert balanced["rank"][0] != balanced["rank"][1]
    assert both.parallel is not None
    assert both.parallel.fitted_steps == [10, 20]
    assert both.parallel.fitted_on["exact"] == "the first 2 of 3 recorded steps"


def test_without_recorded_steps_nothing_is_fitted_and_no_room_is_said() -> None:
    both = arm(2)
    assert {rows.columns["placement"] for rows in placement_rows(both, [])} == {"contiguous", "all_size", "interleaved"}
    assert both.parallel is not None
    assert both.parallel.fitted_on == {}
    uneven = arm(2)
    assert uneven.parallel is not None
    uneven.parallel.widths_E = [4, 4, 6, 60]  # one expert is heavier than a rank may be
    uneven.parallel.per_group = 4
    names = {rows.columns["placement"] for rows in placement_rows(uneven, [(1, {(1, 0): 3})])}
    assert names == {"contiguous", "all_size", "interleaved"}
    assert "Raise the slack" in uneven.parallel.notes["balanced"]


def test_one_process_is_placed_on_four_ranks_or_as_many_as_it_is_told() -> None:
    alone = arm(1)
    assert alone.parallel is not None
    for told, ranks in (({}, 4), ({"ranks": 2}, 2), ({"ranks": 9}, 4)):  # there are four experts
        rows = placement_rows(alone, [(1, {(1, 0): 3, (1, 3): 2})], **told)
        placed = {each.columns["placement"]: each.columns["rank"] for each in rows}
        assert {"contiguous", "all_size", "interleaved"} <= set(placed)
        assert alone.parallel.compared_on == ranks
        assert placed["contiguous"] == [e * ranks // 4 for e in range(4)]
        assert all(set(where) <= set(range(ranks)) for where in placed.values())
    assert alone.parallel.ranks == 1


def test_a_single_expert_has_nowhere_else_to_be() -> None:
    alone = arm(1)
    assert alone.parallel is not None
    alone.parallel.widths_E, alone.parallel.per_group = [4], 1
    assert placement_rows(alone, []) == []
    assert alone.parallel.compared_on is None


def test_loads_are_those_of_all_ranks_in_cells_that_are_timed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", Manifest(name="t", created_utc="", pid=1, host="h"))
    for cell, number, rank, expert, tokens in (
        ("c", 7, 0, 1, 3), ("c", 7, 1, 1, 2), ("c", 7, 1, 0, 4), ("c", 5, 0, 2, 1), ("quality", 9, 0, 3, 8),
    ):  # fmt: skip
        columns = {"arm": "a", "step": [number], "rank": rank, "layer": 1, "expert": expert, "tokens": tokens}
        writer.append("loads", columns, cell=cell)
    writer.finish("complete")
    assert recorded(Run(tmp_path / "run")) == {"a": [(5, {(1, 2): 1}), (7, {(1, 0): 4, (1, 1): 5})]}
