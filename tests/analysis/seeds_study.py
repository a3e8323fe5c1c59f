"""A study of three seeds by hand: decisions, step times and scores such that every figure can be worked out.

Sixteen inputs, eight of each domain, four layers. Seeds 0 and 1 skip layers 1 and 2 of `math` and nothing of `code`;
seed 2 skips layer 1 of everything. A dense step takes 1 ms; the routed one saves a fifth of it, and two fifths with
seed 2. Ten tokens of an item cost dense 10 nats, routed 12, and 13 with seed 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiler.records import CellRecord
from profiler.study_folder import SeedRecord, Study, StudyRecord, run_folder, save
from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.tiny_run import step

CELL = CellRecord(name="prefill-b1-l4", phase="prefill", batch=1, length=4, repeats=6, done=True)
SEEDS = (0, 1, 2)
REPEATS = 6
ROUTES = {0: ("1001", "1111"), 1: ("1001", "1111"), 2: ("1011", "1011")}
SAVED = {0: 0.2, 1: 0.2, 2: 0.4}
NLL = {0: 12.0, 1: 12.0, 2: 13.0}


def write_study(
    folder: Path,
    seeds: Sequence[int] = SEEDS,
    *,
    done: int | None = None,
    domain: str = "code",
    failed: str | None = None,
) -> Study:
    """The study's folder with the runs of its first `done` seeds; the last seed as `failed` where that is given."""
    done = len(seeds) if done is None else done
    folder.mkdir(parents=True)
    records = [SeedRecord(seed=seed, trained=k < done, measured=k < done) for k, seed in enumerate(seeds)]
    records[-1].failed = failed
    record = StudyRecord(
        name="by-hand",
        created_utc="2026-01-02T03:04:05+00:00",
        spec_sha256="0" * 64,
        recipe="layerroute-tiny",
        recipe_sha256="1" * 64,
        trained_arms=["routed"],
        seeds=records,
    )
    save(folder, record, "name: by-hand\n")
    for seed in seeds[:done]:
        write_seed(run_folder(folder, seed), seed, domain)
    return Study(folder)


def write_seed(folder: Path, seed: int, domain: str = "code") -> None:
    """The run of one seed."""
    nll = {"dense": 10.0, "routed": NLL[seed]}
    inputs = [Input(f"m{k}", "math", nll=nll) for k in range(8)] + [Input(f"c{k}", domain, nll=nll) for k in range(8)]
    math, other = ROUTES[seed]
    steps = []
    for repeat in range(REPEATS):
        for arm, share in (("dense", 1.0), ("routed", 1 - SAVED[seed])):
            steps.append(step(arm, len(steps) + 1000, repeat=repeat, wall_ns=round(share * 1e6)) | {"cell": CELL.name})
    write_decisions(folder, inputs, [Arm("routed", [math] * 8 + [other] * 8)], cells=[CELL], more={"steps": steps})
