"""Experts on 1, 2, 3 and 4 ranks against one process: results, gradients, what is recorded. One spawned session."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from torch import multiprocessing

from profiler.execution.expert_parallel import Attention, ExpertParallel, Membership, by_shape, shape_of
from profiler.execution.experts import Strategy
from profiler.execution.placement import Placement
from tests.profiler.execution import rank_checks
from tests.profiler.execution.rank_checks import HIDDEN, OPTIONS, PER_GROUP, TOKENS, WIDTHS, placements
from tests.profiler.rank_processes import forking, free_ports

RANKS = 4
MODES = get_args(Attention)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    forking()
    multiprocessing.start_processes(
        rank_checks.main, (RANKS, free_ports(RANKS), str(folder)), nprocs=RANKS, start_method="forkserver"
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("size", range(1, RANKS + 1))
def test_results_and_gradients_are_those_of_one_process(found: list[dict[str, Any]], size: int, attention: str) -> None:
    names = [placement.name for placement in placements(size)] + list(get_args(Strategy)) + ["1 rows", "2 rows"]
    for name in names:
        for rank in range(size):
            assert found[rank][f"{size} {attention} {name}"] <= 1e-12, (name, rank)


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("size", range(1, RANKS + 1))
def test_a_model_of_several_ranks_says_what_one_process_says(
    found: list[dict[str, Any]], size: int, attention: str
) -> None:
    ranks = [found[rank][f"{size} {attention} model"] for rank in range(size)]
    assert max(each["apart"] for each in ranks) <= 1e-12
    held = sorted(expert for each in ranks for expert in each["held"])
    assert held == list(range(len(WIDTHS)))  # each expert on one rank


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("size", range(1, RANKS + 1))
def test_what_ranks_record_adds_up_to_one_process(found: list[dict[str, Any]], size: int, attention: str) -> None:
    ranks = [found[rank][f"{size} {attention} model"] for rank in range(size)]
    entered = sorted(line for each in ranks for line in each["recorded"]["entered"])
    alone = ranks[0]["alone"]["entered"]
    assert entered == alone
    assert ranks[0]["alone"]["sent"] == ranks[0]["alone"]["collectives"] == []
    for layer in (1, 2):
        tokens = {expert: rows for where, expert, rows in alone if where == layer}
        sent = [line for each in ranks for line in each["recorded"]["sent"] if line[:2] == [layer, "dispatch"]]
        back = [line for each in ranks for line in each["recorded"]["sent"] if line[:2] == [layer, "combine"]]
        assert {line[3] for line in sent + back} == {32 * 8}  # d elements of float64, whatever the expert's width
        # To each rank as many as its experts took, and as many back from it to where they came from.
        arrived = [sum(line[2][rank] for line in sent) for rank in range(size)]
        assert arrived == [sum(tokens.get(e, 0) for e in each["held"]) for each in ranks]
        assert [[line[2][rank] for line in back] for rank in range(size)] == [line[2] for line in sent]


@pytest.mark.parametrize("attention", MODES)
def test_collectives_and_widths_are_timed(found: list[dict[str, Any]], attention: str) -> None:
    operations = ["counts", "dispatch", "combine"] + ["gather"] * (attention == "replicated")
    for rank in range(RANKS):
        recorded = found[rank][f"{RANKS} {attention} model"]["recorded"]
        assert recorded["collectives"] == [[layer, each, True] for layer in (1, 2) for each in operations]
        assert set(recorded["segments"]) >= {"exchange", "experts", "dispatch", "router"}
        widths = {(layer, WIDTHS[expert]) for layer, expert, _ in recorded["entered"]}
        assert widths == {tuple(each) for each in recorded["widths"]}


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("size", range(1, RANKS + 1))
def test_traced_collectives_have_the_recorded_sizes(found: list[dict[str, Any]], size: int, attention: str) -> None:
    for rank in range(size):
        seen = found[rank][f"{size} {attention} model"]
        rows = [sum(tokens) for _, _, tokens, _ in seen["recorded"]["sent"]]
        assert seen["traced rows"] == rows  # dispatch and combine of each layer, local copies included
        assert sum(rows) > 0


def test_ranks_hold_their_own_experts_only(found: list[dict[str, Any]]) -> None:
    one = found[0]["1 replicated model"]["parameters"]
    experts = 2 * 3 * 32 * sum(WIDTHS)
    four = [found[rank]["4 replicated model"]["parameters"] for rank in range(RANKS)]
    assert sum(four) == experts + 4 * (one - experts)
    assert all(count < one - experts // 2 for count in four)


# -- in this process ---------------------------------------------------------------------------------


def test_a_placement_by_shape_takes_groups_or_experts_of_their_own_width() -> None:
    assert shape_of([4, 4, 8, 8], 2) == ([4, 8], 2)
    assert shape_of([4, 6, 8, 10], 4) == ([4, 6, 8, 10], 1)  # one group of four widths
    assert by_shape("all_size", [4, 4, 8, 8], 2, 2).where == ((0,), (1,), (0,), (1,))
    assert by_shape("all_size", [4, 6, 8, 10], 4, 2).where == ((0,), (1,), (1,), (0,))


def test_a_layer_may_have_a_placement_of_its_own() -> None:
    own = Placement("mine", 2, (4, 8), ((1,), (0,)))
    member = Membership(0, 2, {3: own})
    assert member.place(3, (4, 8), 1) is own


def test_rows_of_a_copied_expert_go_where_the_placement_says() -> None:
    placement = Placement("copied", 3, (4, 8, 12), ((0, 1, 2), (1,), (0, 2)))
    experts = [0, 2, 0, 1, 0, 2, 2, 0, 0]
    for source in range(3):
        parallel = ExpertParallel(placement, source, "data_parallel", torch.device("cpu"))
        slots = parallel._slots(torch.tensor([experts]).T).flatten().tolist()
        # Rank by rank, in each by expert: 0 has experts 0 and 2, 1 has 0 and 1, 2 has 0 and 2.
        where = [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2)]
        assert [where[slot][1] for slot in slots] == experts
        assert [where[slot][0] for slot in slots] == placement.destinations(experts, source).tolist()


def test_the_checks_cover_what_they_claim() -> None:
    assert len(WIDTHS) == OPTIONS["groups"] * OPTIONS["experts_per_group"] == len(TOKENS)
    assert WIDTHS[::PER_GROUP] == tuple(OPTIONS["widths"])
    assert HIDDEN % 4 == 0
    names = {placement.name for placement in placements(3)}
    assert names > {"contiguous", "all_size", "interleaved", "balanced", "exact", "replicated"}
