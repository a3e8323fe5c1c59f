"""What the processes of `test_parallel_run` do: whole runs of three ranks, and runs that one of them does not survive.

Four processes. The first three run a spec to its end, under replicated and under data-parallel attention. Then the
third stops itself in the middle of a run, and the fourth, which takes its place in the last one, is killed in it.
`go_on` is what three new ones do with that run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from profiler.errors import GatewiseError
from profiler.run import Quiet, run
from workloads.spec import Spec

RANKS = 3
TIMEOUT_S = 4.0
EXPERTS = {
    "groups": 4, "experts_per_group": 3, "widths": [8, 16, 24, 32], "keep_groups": 2, "keep_experts": 4, "shared": 1,
    "first_dense": 4,
}  # fmt: skip


def spec(attention: str = "replicated", **more: Any) -> Spec:
    """MoHGE on the last two layers of the tiny preset."""
    given: dict[str, Any] = {
        "name": f"ranks-{attention}",
        "model": {"source": "tiny", "device": "cpu"},
        "arms": [{"name": "dense", "method": "dense"}, {"name": "mohge", "method": "mohge", **EXPERTS}],
        "cells": {
            "prefill": {"batch": [5], "length": [8]},
            "decode": {"batch": [3], "context": [8], "new_tokens": 2},
        },
        "measure": {"warmup": 1, "max_repeats": 2, "min_repeats": 2, "budget_s": 60, "threads": 1},
        "parallel": {"experts": RANKS, "attention": attention, "timeout_s": TIMEOUT_S},
    }
    return Spec.model_validate(given | more)


class Ends(Quiet):
    """Sends this process a signal when the decode cell begins; the prefill cell is done by then."""

    def __init__(self, number: int) -> None:
        self._number = number

    def say(self, what: str) -> None:
        if what.startswith("decode"):
            os.kill(os.getpid(), self._number)


def join(
    rank: int, port: int, folder: Path, given: Spec, ends: int | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """One run as torchrun would have started it; what was raised, and how many seconds it took."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    began = time.monotonic()
    try:
        run(given, folder, progress=None if ends is None else Ends(ends), resume=resume)
        said = None
    except (GatewiseError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - began}


def main(process: int, ports: list[int], folder: str) -> None:
    """The part of one process."""
    torch.set_num_threads(1)
    found, into = {}, Path(folder)
    if process < RANKS:
        traced = {"trace": {"steps": 1}}
        found["replicated"] = join(process, ports[0], into / "replicated", spec(**traced))
        found["data_parallel"] = join(process, ports[1], into / "data_parallel", spec("data_parallel"))
        ends = signal.SIGSTOP if process == 2 else None
        found["stopped"] = join(process, ports[2], into / "stopped", spec(), ends)
        (into / f"ready-{process}").touch()
    if process != 2:
        killed = process == 3
        while not all((into / f"ready-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.1)
        found["killed"] = join(min(process, 2), ports[3], into / "killed", spec(), signal.SIGKILL if killed else None)
    (into / f"{process}.json").write_text(json.dumps(found))


def go_on(rank: int, ports: list[int], folder: str) -> None:
    """Resume `folder`/killed to its end; once more, which is refused; and with another spec, which is too."""
    torch.set_num_threads(1)
    into = Path(folder)
    unlike = spec(name="another")
    found = {
        "another": join(rank, ports[0], into / "killed", unlike, resume=True),
        "resumed": join(rank, ports[1], into / "killed", spec(), resume=True),
        "again": join(rank, ports[2], into / "killed", spec(), resume=True),
    }
    (into / f"resumed-{rank}.json").write_text(json.dumps(found))
