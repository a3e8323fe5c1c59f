"""The processes of one run under torchrun: starting the group, agreeing on things, and noticing who is missing.

Rank 0 decides and the others follow: `decide` and `agree` end with the same value, or the same error, on every rank. A
collective that does not come to its end within `timeout_s` ends the run on every rank, with an error that says which
rank is missing and why: its process is gone, stopped, or does not answer a roll call. What each rank knows of its own
end it leaves in torchrun's store, so that the rank that failed is told from those that failed for it.

A process that torchrun did not start is alone: everything here then returns at once what it was given.

Not here: rows between ranks inside a model (`execution.expert_parallel`), and files (`writer`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from profiler.errors import GatewiseError, InputError, RankError
from profiler.execution.expert_parallel import Attention, CollectiveError, Membership, collective, joined
from profiler.records import RankRecord
from workloads.spec import ParallelSpec

T = TypeVar("T")

#: What a rank leaves in the store when a user ended it, and with it all others.
INTERRUPTED = "interrupted"
#: Seconds that living ranks are waited for once a collective has failed.
ROLL_CALL_S = 5.0


class _Peer(NamedTuple):
    """A process of the group, as it was when the group was made."""

    pid: int
    started: float
    host: str


@dataclass
class Ranks:
    """This process among the ranks of a run. `Ranks()` is a run of one process.

    Attributes:
        rank, size: its number, and how many there are.
        attention: whether every rank is given the whole batch, or rows of its own.
        timeout_s: seconds after which a rank that is waited for counts as missing.
        records: every rank, as the manifest has it.
    """

    rank: int = 0
    size: int = 1
    attention: Attention = "replicated"
    timeout_s: float = 60.0
    records: list[RankRecord] = field(default_factory=list)
    _peers: list[_Peer] = field(default_factory=list)
    _store: Any = None

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def alike(self) -> bool:
        """Whether every rank is given the same rows."""
        return self.attention == "replicated"

    @property
    def counts(self) -> bool:
        """Whether this rank's rows are told in the tables: what all of them do alike is rank 0's to tell."""
        return self.leads or not self.alike

    def share(self, rows: int) -> slice:
        """This rank's rows of a batch."""
        if self.alone or self.alike:
            return slice(0, rows)
        return slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    @property
    def on_this_host(self) -> int:
        """Ranks that compute on this machine."""
        return sum(record.host == os.uname().nodename for record in self.records) or 1

    @property
    def launcher(self) -> psutil.Process | None:
        """The process that started the ranks of this machine; None for one process."""
        return None if self.alone else psutil.Process().parent()

    def describe(self) -> None:
        """Fill `records`; threads are those set by now.

        Raises:
            CollectiveError: a rank is missing.
        """
        me = RankRecord(rank=self.rank, pid=os.getpid(), host=os.uname().nodename, threads=torch.get_num_threads())
        self.records = self.gather(me)

    # -- agreeing ---------------------------------------------------------------------------------

    def gather(self, mine: T) -> list[T]:
        """Every rank's value, in order, on every rank.

        Raises:
            CollectiveError: a rank is missing.
        """
        if self.alone:
            return [mine]
        found: list[Any] = [None] * self.size
        with collective():
            dist.all_gather_object(found, mine)
        return found

    def agree(self, mine: T) -> T:
        """Rank 0's value, on every rank.

        Raises:
            CollectiveError: a rank is missing.
        """
        if self.alone:
            return mine
        found: list[Any] = [mine]
        with collective():
            dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[no-any-return]

    def decide(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, the only one that calls it; an error of ours is raised on every rank.

        Raises:
            GatewiseError: as `make`.
            CollectiveError: a rank is missing.
        """
        if self.alone:
            return make()
        made: tuple[Any, GatewiseError | None] = None, None
        if self.leads:
            try:
                made = make(), None
            except GatewiseError as error:
                made = None, error
        value, problem = self.agree(made)
        if problem is not None:
            raise problem
        return value  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Go on when every rank is here.

        Raises:
            CollectiveError: a rank is missing.
        """
        if not self.alone:
            with collective():
                dist.barrier()

    # -- who is missing ---------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of a block that come from a missing rank are told as that, and this rank's own left for the others.

        Raises:
            RankError: a collective ended in an error, or this process was told to end while another rank was gone.
        """
        if self.alone:
            yield
            return
        try:
            yield
        except (CollectiveError, KeyboardInterrupt) as error:
            told = isinstance(error, KeyboardInterrupt) or INTERRUPTED in map(self._noted, range(self.size))
            missing = self._missing(roll_call=not told)
            if told and not missing:
                self._leave(INTERRUPTED)
                raise KeyboardInterrupt from error
            said = "; ".join(missing) or f"a collective failed: {str(error).splitlines()[0]}"
            self._leave("")
            raise RankError(f"rank {self.rank} of {self.size} cannot go on: {said}") from error
        except BaseException as error:
            self._leave(f"{type(error).__name__}: {error}")
            raise

    def _leave(self, note: str) -> None:
        """Say how this rank ended; empty where it ended for another's sake."""
        if self._keeps_store is None:
            with suppress(RuntimeError):
                self._store.set(f"gatewise/left/{self.rank}", note)

    def _noted(self, rank: int) -> str | None:
        if self._keeps_store is None:
            with suppress(RuntimeError):
                if self._store.check([f"gatewise/left/{rank}"]):
                    return str(self._store.get(f"gatewise/left/{rank}").decode())
        return None

    @property
    def _keeps_store(self) -> str | None:
        """What became of the process that keeps the store, which must not be asked then: it would never answer.

        torchrun's own process keeps it, and rank 0 where something else started the ranks.
        """
        if self.leads or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None
        return self._gone(0)

    def _gone(self, rank: int) -> str | None:
        """What keeps a rank's process from computing, as far as it can be seen from here."""
        peer = self._peers[rank]
        return _gone(peer) if peer.host == os.uname().nodename else None

    def _missing(self, *, roll_call: bool) -> list[str]:
        """The ranks that this one cannot go on without, each with what became of it."""
        others = [rank for rank in (*range(1, self.size), 0) if rank != self.rank]
        found: list[str] = []
        for rank in others:
            if rank == 0 and found and self._keeps_store is not None:
                continue  # gone, its last word with it; as likely as not for the sake of the one that was found
            note = self._noted(rank)
            gone = self._gone(rank) if note is None else None
            if gone or note not in (None, "", INTERRUPTED):
                found.append(f"{self._named(rank)} {gone or f'failed: {note}'}")
        if found or not roll_call:
            return found
        with suppress(RuntimeError):
            self._store.set(f"gatewise/here/{self.rank}", "")
            until = time.monotonic() + min(ROLL_CALL_S, self.timeout_s)
            while time.monotonic() < until and not all(map(self._here, others)):
                time.sleep(0.1)
        return [
            f"{self._named(rank)} does not answer; it was waited for {self.timeout_s:g} s"
            for rank in others
            if not self._here(rank)
        ]

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self._peers[rank].pid} on {self._peers[rank].host})"

    def _here(self, rank: int) -> bool:
        with suppress(RuntimeError):
            return bool(self._store.check([f"gatewise/here/{rank}"])) or self._noted(rank) is not None
        return False


def _gone(peer: _Peer) -> str | None:
    """What keeps a process of this machine from computing; None where nothing is seen to."""
    try:
        process = psutil.Process(peer.pid)
        status = process.status()
        if abs(process.create_time() - peer.started) > 2.0 or status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "is gone: its process ended"
    except psutil.Error:
        return "is gone: its process ended"
    return "is stopped (SIGSTOP)" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else None


def launched() -> int | None:
    """How many processes torchrun, or what sets the same variables, started for one job; None where it did not."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size is not None and "RANK" in os.environ else None


def leading() -> bool:
    """Whether this process is the only one, or rank 0: the one that says how a command went."""
    return launched() is None or os.environ["RANK"] == "0"


@contextmanager
def started(parallel: ParallelSpec | None, device: str) -> Iterator[Ranks]:
    """The ranks of a run, for as long as the block is open; methods wrapped in it share their experts.

    Args:
        parallel: the spec's section.
        device: the spec's; CUDA takes NCCL and a device for each rank of a machine.

    Raises:
        InputError: there are not as many processes as `parallel.experts`, or several and no such section.
        RankError: a rank is missing, while the group is made or later.
    """
    size = launched()
    if size is None or (size == 1 and parallel is None):
        yield Ranks()
        return
    if parallel is None:
        raise InputError(
            f"{size} processes were started, and the spec has no parallel section; add parallel: {{experts: {size}}}, "
            "or start one"
        )
    if size != parallel.experts:
        raise InputError(
            f"parallel.experts ({parallel.experts}) must be the number of processes started ({size}): "
            f"start torchrun --nproc-per-node {parallel.experts}, or say --set parallel.experts={size}"
        )
    ranks = Ranks(int(os.environ["RANK"]), size, parallel.attention, parallel.timeout_s)
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _start(ranks, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    except RuntimeError as error:
        raise RankError(
            f"rank {ranks.rank} of {size} found no group within {ranks.timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    try:
        with joined(Membership(ranks.rank, size, parallel.placement, parallel.attention)):
            yield ranks
    finally:
        dist.destroy_process_group()


def _start(ranks: Ranks, backend: str) -> None:
    timeout = timedelta(seconds=ranks.timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    ranks._store = store
    process = psutil.Process()
    me = _Peer(process.pid, process.create_time(), os.uname().nodename)
    ranks._peers = ranks.gather(me)
