"""Who is said to be missing, and what a process alone does; whole groups are `test_parallel_run`'s."""

from __future__ import annotations

import os

import psutil
import pytest
from torch import distributed

from profiler.errors import InputError, RankError, RuleError
from profiler.execution.expert_parallel import CollectiveError, membership
from profiler.ranks import Ranks, _Peer, launched, leading, started
from workloads.spec import ParallelSpec

SAME = psutil.Process()
HERE = _Peer(SAME.pid, SAME.create_time(), os.uname().nodename)


def group(rank: int, peers: list[_Peer], store: distributed.Store) -> Ranks:
    """A rank of a group that has no processes behind it but those of `peers`."""
    return Ranks(rank, len(peers), "replicated", 0.3, [], peers, store)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> distributed.Store:
    """As torchrun keeps it, outside of every rank."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return distributed.HashStore()


def ended(ranks: Ranks, error: BaseException) -> str:
    with pytest.raises(RankError) as told, ranks.guarded():
        raise error
    return str(told.value)


def test_a_rank_that_does_not_answer_is_named(store: distributed.Store) -> None:
    peers = [HERE, _Peer(41, 0.0, "elsewhere"), _Peer(42, 0.0, "elsewhere")]
    store.set("gatewise/here/1", "")  # it waits for rank 2 as well
    said = ended(group(0, peers, store), CollectiveError("timed out"))
    assert said == "rank 0 of 3 cannot go on: rank 2 (process 42 on elsewhere) does not answer; it was waited for 0.3 s"
    assert store.check(["gatewise/here/0"])  # and so this rank has answered, should 1 ask


def test_a_rank_that_failed_is_told_from_those_that_failed_for_it(store: distributed.Store) -> None:
    peers = [_Peer(40, 0.0, "elsewhere"), HERE, _Peer(42, 0.0, "elsewhere")]
    with pytest.raises(RuleError), group(0, peers, store).guarded():
        raise RuleError("rule 1 does not hold")
    store.set("gatewise/left/2", "")  # it went because rank 0 did
    said = ended(group(1, peers, store), CollectiveError("connection closed"))
    assert said == (
        "rank 1 of 3 cannot go on: rank 0 (process 40 on elsewhere) failed: RuleError: rule 1 does not hold"
    )


def test_a_process_that_is_gone_is_seen_without_asking_it(store: distributed.Store) -> None:
    peers = [HERE, _Peer(HERE.pid, HERE.started - 3600, HERE.host)]  # the number was given to another since
    assert "rank 1" in ended(group(0, peers, store), KeyboardInterrupt())
    assert "is gone: its process ended" in ended(group(0, peers, store), CollectiveError("connection closed"))


def test_a_store_whose_keeper_is_gone_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute:
        def check(self, keys: list[str]) -> bool:
            raise AssertionError("asked")

        set = get = check

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    peers = [_Peer(HERE.pid, HERE.started - 3600, HERE.host), HERE]
    said = ended(Ranks(1, 2, "replicated", 0.3, [], peers, Mute()), CollectiveError("connection closed"))
    assert "rank 0 (process" in said


def test_an_interruption_with_everyone_there_stays_one(store: distributed.Store) -> None:
    with pytest.raises(KeyboardInterrupt), group(0, [HERE, HERE], store).guarded():
        raise KeyboardInterrupt
    assert store.get("gatewise/left/0") == b"interrupted"
    # The next one may meet a closed connection before its own signal.
    with pytest.raises(KeyboardInterrupt), group(1, [HERE, HERE], store).guarded():
        raise CollectiveError("connection closed")


def test_one_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() is None
    assert leading()
    with started(ParallelSpec(experts=4), "cpu") as ranks:
        assert (ranks.rank, ranks.size, ranks.alone, ranks.counts) == (0, 1, True, True)
        assert ranks.gather(3) == [3]
        assert ranks.agree("a") == ranks.decide(lambda: "a") == "a"
        assert ranks.share(5) == slice(0, 5)
        assert ranks.launcher is None
        assert membership() is None
        ranks.wait()


@pytest.mark.parametrize(("rank", "rows"), [(0, slice(0, 1)), (1, slice(1, 3)), (2, slice(3, 5))])
def test_rows_are_shared_out_and_each_rank_has_one_at_least(rank: int, rows: slice) -> None:
    assert Ranks(rank, 3, "data_parallel").share(5) == rows
    assert Ranks(rank, 3, "data_parallel").share(3) == slice(rank, rank + 1)
    assert Ranks(rank, 3, "replicated").share(5) == slice(0, 5)
    assert Ranks(rank, 3, "replicated").counts == (rank == 0)
    assert Ranks(rank, 3, "data_parallel").counts


def test_several_processes_need_the_spec_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert not leading()
    with (
        pytest.raises(InputError, match=r"2 processes were started, .* add parallel: \{experts: 2\}"),
        started(None, "cpu"),
    ):
        pass
