"""Placement of experts: the figures of METHODS, hand-worked small cases, and a search through all placements."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from profiler.errors import InputError
from profiler.execution.placement import (
    BY_LOAD,
    BY_SHAPE,
    Placement,
    all_size,
    balanced,
    contiguous,
    exact,
    interleaved,
    replicated,
)
from profiler.execution.placement_program import Solution, solve

#: Groups of the 3B size, and their 8 experts each.
WIDTHS_3B = (384, 512, 640, 768, 896, 1024, 1152, 1280)

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=6).flatmap(
    lambda widths: st.integers(1, 6).flatmap(
        lambda per_group: st.tuples(
            st.just(widths), st.just(per_group), st.integers(1, min(len(widths) * per_group, 7))
        )
    )
)


def held(placement: Placement, rank: int) -> list[int]:
    return [expert for expert, ranks in enumerate(placement.where) if rank in ranks]


def carried(placement: Placement, tokens: list[int]) -> list[int]:
    """Loads of a placement without replicas, the slow way."""
    return [sum(tokens[e] * placement.widths[e] for e in held(placement, r)) for r in range(placement.ranks)]


def widest(placement: Placement) -> int:
    return max(sum(placement.widths[e] for e in held(placement, r)) for r in range(placement.ranks))


def smallest_largest(tokens: list[int], widths: list[int], ranks: int, slack: float) -> int | None:
    """Largest load of the best of all placements within the cap, by trying every one."""
    best = None
    for where in itertools.product(range(ranks), repeat=len(widths)):
        load, width = [0] * ranks, [0] * ranks
        for expert, rank in enumerate(where):
            load[rank] += tokens[expert] * widths[expert]
            width[rank] += widths[expert]
        if max(width) * ranks <= (1 + slack) * sum(widths) + 1e-6 and (best is None or max(load) < best):
            best = max(load)
    return best


def test_the_released_map_on_the_3b_widths() -> None:
    placement = interleaved(WIDTHS_3B, 8, 4)
    # Expert (7, 3) has id 25 and (2, 5) id 44, of 16 a rank.
    assert placement.where[7 * 8 + 3] == (1,)
    assert placement.where[2 * 8 + 5] == (2,)
    assert placement.width_sums().tolist() == [13312] * 4
    # One id a rank shows the ids themselves.
    ids = interleaved(WIDTHS_3B, 8, 64).where
    assert (ids[7 * 8 + 3], ids[2 * 8 + 5], ids[0], ids[7 * 8]) == ((25,), (44,), (0,), (1,))
    assert sorted(ids) == [(rank,) for rank in range(64)]


def test_contiguous_on_the_3b_widths() -> None:
    assert contiguous(WIDTHS_3B, 8, 4).width_sums().tolist() == [7168, 11264, 15360, 19456]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_size_gives_every_rank_as_many_of_each_group(ranks: int) -> None:
    placement = all_size(WIDTHS_3B, 8, ranks)
    for rank in range(ranks):
        assert Counter(e // 8 for e in held(placement, rank)) == dict.fromkeys(range(8), 8 // ranks)
    assert placement.note is None
    assert placement.where == interleaved(WIDTHS_3B, 8, ranks).where


def test_one_expert_a_rank_is_the_papers_figure() -> None:
    placement = all_size(WIDTHS_3B, 8, 8)
    assert held(placement, 5) == [g * 8 + 5 for g in range(8)]


def test_what_is_left_is_dealt_in_width_pairs() -> None:
    # 3 ranks, 4 experts a group: one of each group on every rank, then (0, 3) and (1, 2) of the fourth experts.
    placement = all_size((10, 20, 30, 40), 4, 3)
    assert [held(placement, rank) for rank in range(3)] == [[0, 3, 4, 8, 12, 15], [1, 5, 7, 9, 11, 13], [2, 6, 10, 14]]
    assert placement.width_sums().tolist() == [150, 150, 100]
    assert placement.note == (
        "uneven: 3 ranks do not divide 4 experts a group, so each holds 1 of every group; of the rest 4 experts were "
        "dealt in pairs of groups. Widths add up to 100 to 150 a rank"
    )


def test_the_middle_group_has_no_partner() -> None:
    # Pairs of 40 to ranks 0 and 1, then the two experts of width 20 to ranks 2 and 2: it has the least both times.
    placement = all_size((10, 20, 30), 2, 3)
    assert [held(placement, rank) for rank in range(3)] == [[0, 4], [1, 5], [2, 3]]
    assert placement.note is not None
    assert "2 experts of the middle group singly. Widths add up to 40 on every rank" in placement.note


def test_equal_experts_are_spread_one_by_one() -> None:
    assert all_size((64,), 8, 3).width_sums().tolist() == [192, 192, 128]


@given(shape=shapes)
def test_by_shape_every_expert_is_on_one_rank(shape: tuple[list[int], int, int]) -> None:
    widths, per_group, ranks = shape
    for name, place in BY_SHAPE.items():
        placement = place(widths, per_group, ranks)
        assert placement.name == name
        assert placement.widths == tuple(w for w in widths for _ in range(per_group))
        assert len(placement.where) == len(placement.widths)
        assert all(len(where) == 1 and 0 <= where[0] < ranks for where in placement.where)
        assert placement.width_sums().sum() == sum(widths) * per_group


@given(shape=shapes)
def test_all_size_keeps_pairs_of_one_number_together_and_whole_shares_apart(shape: tuple[list[int], int, int]) -> None:
    widths, per_group, ranks = shape
    placement = all_size(widths, per_group, ranks)
    groups, whole = len(widths), per_group // ranks
    for rank in range(ranks):
        count = Counter(e // per_group for e in held(placement, rank))
        assert min(count[g] for g in range(groups)) >= whole
    for g in range(groups // 2):
        for i in range(per_group):
            assert placement.where[g * per_group + i] == placement.where[(groups - 1 - g) * per_group + i]
    assert (placement.note is None) == (per_group % ranks == 0)


def test_longest_first_by_hand() -> None:
    # 7 | 6, then 5 to the second (11), 4 to the first (11), 3 to the first (14). The best is 7 + 6 against 5 + 4 + 3.
    tokens = [7, 6, 5, 4, 3]
    assert balanced(tokens, [1], 5, 2, slack=1).loads(tokens).tolist() == [14, 11]
    best = exact(tokens, [1], 5, 2, slack=1)
    assert sorted(best.loads(tokens).tolist()) == [12, 13]
    assert best.gap == 0


def test_load_is_tokens_times_width() -> None:
    # 2 × 30 against 5 × 10: the wide expert with fewer tokens comes first, and the two narrow ones go together.
    placement = balanced([5, 1, 2, 0], [10, 30], 2, 2, slack=1)
    assert placement.loads([5, 1, 2, 0]).tolist() == [60, 60]
    assert held(placement, 0) == [2]


def test_a_full_rank_gets_no_more() -> None:
    # Two experts a rank: after 9 | 1, 1 the fourth must join the first.
    placement = balanced([9, 1, 1, 1], [1], 4, 2, slack=0)
    assert placement.loads([9, 1, 1, 1]).tolist() == [10, 2]


def test_wide_experts_first_where_load_leaves_them_no_room() -> None:
    # By load the four narrow ones, two a rank, come first and the wide one (4 of at most 4) finds no rank empty.
    placement = balanced([9, 9, 9, 9, 0], [1, 1, 1, 1, 4], 1, 2, slack=0)
    assert placement.width_sums().tolist() == [4, 4]
    assert held(placement, 0) == [4]


def test_by_width_alone_where_nothing_else_leaves_room() -> None:
    # Loads 2, 6, 4, 4, 4, 0 on widths 2, 3, 2, 4, 4, 5; at most 10 a rank. Wide ones first, by load: 5 | 4, 4 to the
    # idle first (9), 3 and a 2 to the second (9), and the other 2 fits nowhere. By width: 5, 3, 2 | 4, 4, 2.
    placement = balanced([1, 2, 2, 1, 1, 0], [2, 3, 2, 4, 4, 5], 1, 2, slack=0)
    assert placement.width_sums().tolist() == [10, 10]
    assert held(placement, 0) == [1, 2, 5]


def test_a_hot_expert_on_two_ranks() -> None:
    tokens = [8, 2, 2]
    assert max(balanced(tokens, [1], 3, 2, slack=1).loads(tokens)) == 8
    placement = replicated(tokens, [1], 3, 2, slack=1, extra=1)
    assert placement.where[0] == (0, 1)
    assert placement.loads(tokens).tolist() == [6, 6]
    assert placement.note == "1 experts on several ranks, 1 copies added"


def test_copies_that_help_nobody_are_not_made() -> None:
    placement = replicated([4, 4], [1], 2, 2, slack=1)
    assert placement.where == ((0,), (1,))
    assert placement.note == "no copy helps"


def test_copies_take_turns() -> None:
    placement = Placement("by hand", 3, (1, 1), ((0, 2), (0, 1)))
    # Expert 0 starts on its first rank, expert 1 on its second; another source starts one later.
    assert placement.destinations([0, 1, 0, 1, 1, 0]).tolist() == [0, 1, 2, 0, 1, 0]
    assert placement.destinations([0, 1, 0], source=1).tolist() == [2, 0, 0]
    assert placement.loads([[3, 3], [1, 0], [0, 1]]).tolist() == [[3, 2, 1], [1, 0, 0], [0, 1, 0]]


@given(
    rows=st.lists(st.integers(0, 3), max_size=60),
    where=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=4, max_size=4),
)
def test_loads_count_the_rows_sent(rows: list[int], where: list[set[int]]) -> None:
    placement = Placement("drawn", 5, (1, 10, 100, 1000), tuple(tuple(sorted(ranks)) for ranks in where))
    sent = [0] * 5
    for expert, rank in zip(rows, placement.destinations(rows), strict=True):
        assert rank in where[expert]
        sent[rank] += placement.widths[expert]
    assert placement.loads([rows.count(e) for e in range(4)]).tolist() == sent


def test_weight_bytes_are_three_matrices_an_expert() -> None:
    # A3B: routed experts of a layer hold 163,577,856 parameters, in bfloat16 a quarter of twice that on each rank.
    assert all_size(WIDTHS_3B, 8, 4).weight_bytes(1024, 2).tolist() == [163_577_856 // 2] * 4
    assert Placement("by hand", 2, (5, 7), ((0, 1), (1,))).weight_bytes(2, 4).tolist() == [120, 288]


small = st.tuples(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=2, max_size=6),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
).filter(lambda case: len(case[0]) >= case[1])


@settings(max_examples=60, deadline=None)
@given(case=small)
def test_exact_is_the_best_of_all_placements(case: tuple[list[tuple[int, int]], int, float]) -> None:
    experts, ranks, slack = case
    tokens, widths = [n for n, _ in experts], [w for _, w in experts]
    best = smallest_largest(tokens, widths, ranks, slack)
    if best is None:
        with pytest.raises(InputError, match="there is no placement"):
            exact(tokens, widths, 1, ranks, slack=slack)
        with pytest.raises(InputError, match="finds no placement"):
            balanced(tokens, widths, 1, ranks, slack=slack)
        return
    placement = exact(tokens, widths, 1, ranks, slack=slack)
    assert all(len(where) == 1 for where in placement.where)
    assert max(carried(placement, tokens)) == best
    assert widest(placement) * ranks <= (1 + slack) * sum(widths) + 1e-6
    assert placement.gap == 0


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 500), min_size=12, max_size=12),
    half=st.integers(1, 8),
    ranks=st.integers(1, 4),
    slack=st.sampled_from([0.25, 0.5]),
)
def test_by_load_within_the_cap_and_in_order(tokens: list[int], half: int, ranks: int, slack: float) -> None:
    widths = (half, 8, 16 - half)
    found = {name: place(tokens, widths, 4, ranks, slack=slack) for name, place in BY_LOAD.items()}  # type: ignore[call-arg]
    largest = {name: max(placement.loads(tokens)) for name, placement in found.items()}
    assert largest["exact"] <= largest["balanced"]
    assert largest["replicated"] <= largest["balanced"]
    for name, placement in found.items():
        assert placement.name == name
        assert len(placement.where) == 12
        assert all(len(set(where)) == len(where) >= 1 for where in placement.where)
        assert all(0 <= rank < ranks for where in placement.where for rank in where)
        assert widest(placement) <= math.floor((1 + slack) * 4 * sum(widths) / ranks + 1e-6)
        if name != "replicated":
            assert all(len(where) == 1 for where in placement.where)
            assert placement.loads(tokens).tolist() == carried(placement, tokens)
        else:
            assert sum(map(len, placement.where)) <= 12 + 4


@pytest.mark.parametrize(("bound", "gap"), [(0.0, 1 / 14), (13.5, 0.5 / 14)])
def test_out_of_time_it_is_longest_first_and_says_how_far_from_the_best_it_may_be(
    monkeypatch: pytest.MonkeyPatch, bound: float, gap: float
) -> None:
    tokens = [7, 6, 5, 4, 3]
    monkeypatch.setattr("profiler.execution.placement.solve", lambda *_, **__: Solution(None, bound, False))
    placement = exact(tokens, [1], 5, 2, slack=1, time_limit_s=3)
    assert placement.where == balanced(tokens, [1], 5, 2, slack=1).where
    # 14 where no placement is below half of 25, which is 13 in whole numbers.
    assert placement.gap == pytest.approx(gap)
    assert placement.note == f"not proven best: HiGHS stopped after 3 s, {gap:.2%} above its bound"


def test_what_the_solver_has_when_its_time_is_up_is_taken_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, worse, better = [7, 6, 5, 4, 3], np.array([0, 0, 0, 0, 1]), np.array([0, 0, 1, 1, 1])
    monkeypatch.setattr("profiler.execution.placement.solve", lambda *_, **__: Solution(worse, 0.0, False))
    assert exact(tokens, [1], 5, 2, slack=1).loads(tokens).tolist() == [14, 11]
    monkeypatch.setattr("profiler.execution.placement.solve", lambda *_, **__: Solution(better, 0.0, False))
    placement = exact(tokens, [1], 5, 2, slack=1)
    # 13 is the least there is, whether HiGHS knows it or not.
    assert (placement.loads(tokens).tolist(), placement.gap, placement.note) == ([13, 12], 0, None)


def test_out_of_time_without_any_placement_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Widths add up to 10 on each rank only as 5 + 5 against 4 + 3 + 3, which longest first (5 | 5) does not find.
    assert sorted(exact([1, 1, 1, 1, 1], [5, 5, 4, 3, 3], 1, 2, slack=0).width_sums().tolist()) == [10, 10]
    monkeypatch.setattr("profiler.execution.placement.solve", lambda *_, **__: Solution(None, 0.0, False))
    with pytest.raises(InputError, match="none was found in 10 s"):
        exact([1, 1, 1, 1, 1], [5, 5, 4, 3, 3], 1, 2, slack=0)


def test_the_program_itself_keeps_what_it_is_told() -> None:
    loads, widths = np.array([9, 9, 1, 1]), np.array([1, 1, 1, 1])
    found = solve(loads, widths, 2, 2, at_most=None, time_limit_s=10)
    assert found.proven
    assert found.bound == pytest.approx(10)
    assert found.rank_E is not None
    assert np.bincount(found.rank_E, loads).tolist() == [10, 10]
    assert np.bincount(found.rank_E).tolist() == [2, 2]
    # No placement is at most 9; three experts of width 1 fit nowhere where a rank may hold 1.
    assert solve(loads, widths, 2, 2, at_most=9, time_limit_s=10) == Solution(None, 10.0, True)
    assert solve(loads, widths, 2, 1, at_most=None, time_limit_s=10).rank_E is None


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_solver_prints_is_not_seen_and_what_others_print_is(
    fails: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, milp = ctypes.CDLL(None), optimize.milp

    def chatty(*given: Any, **more: Any) -> Any:
        os.write(1, b"at once\n")
        c.puts(b"kept by C until it is flushed")
        if fails:
            raise MemoryError
        return milp(*given, **more)

    monkeypatch.setattr(optimize, "milp", chatty)
    c.puts(b"before")
    with pytest.raises(MemoryError) if fails else nullcontext():
        found = solve(np.array([9, 1]), np.array([1, 1]), 2, 1, at_most=None, time_limit_s=10)
        assert found.bound == pytest.approx(9)
    c.puts(b"after")
    c.fflush(None)
    os.write(1, b"last\n")
    assert capfd.readouterr().out == "before\nafter\nlast\n"


def test_the_solver_works_where_there_is_no_stdout() -> None:
    code = (
        "import os, numpy as np; os.close(1)\n"
        "from profiler.execution.placement_program import solve\n"
        "found = solve(np.array([9, 1]), np.array([1, 1]), 2, 1, at_most=None, time_limit_s=10)\n"
        "assert sorted(found.rank_E) == [0, 1]\n"
        "try: os.fstat(1)\n"
        "except OSError: os._exit(0)\n"
        "raise AssertionError('descriptor 1 is open')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def test_nothing_measured_is_nothing_to_balance() -> None:
    placement = exact([0] * 5, [5, 5, 4, 3, 3], 1, 2, slack=0)
    assert placement.width_sums().tolist() == [10, 10]
    assert placement.gap == 0


@pytest.mark.parametrize("name", [*BY_SHAPE, *BY_LOAD])
def test_more_ranks_than_experts_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"experts \(2 groups × 2\) must be no fewer than ranks \(5\)"):
        BY_SHAPE[name]([8, 16], 2, 5) if name in BY_SHAPE else BY_LOAD[name]([1] * 4, [8, 16], 2, 5)


@pytest.mark.parametrize(("widths", "per_group", "ranks"), [([], 1, 1), ([0, 8], 1, 1), ([8], 0, 1), ([8], 1, 0)])
def test_a_shape_has_no_zeros(widths: list[int], per_group: int, ranks: int) -> None:
    with pytest.raises(InputError, match="must each be 1 or more"):
        contiguous(widths, per_group, ranks)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, -1], [1.5, 2.0, 3.0, 4.0], [[1, 2, 3, 4]]])
def test_tokens_are_a_count_for_each_expert(tokens: list[float]) -> None:
    with pytest.raises(InputError, match="one whole number of 0 or more for each of 4 experts"):
        balanced(tokens, [8, 16], 2, 2)


@pytest.mark.parametrize("slack", [-0.1, float("nan"), float("inf")])
def test_slack_is_a_share(slack: float) -> None:
    with pytest.raises(InputError, match="slack"):
        exact(np.ones(4, np.int64), [8, 16], 2, 2, slack=slack)


def test_no_room_is_told_with_its_numbers() -> None:
    with pytest.raises(
        InputError, match=r"at most 9 \(mean 9, slack 0\); the widest of 2 experts is 16. Raise the slack"
    ):
        balanced([1, 1], [2, 16], 1, 2, slack=0)
