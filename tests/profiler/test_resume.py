"""The command killed and interrupted from outside, and gone on with: as a user, a scheduler and the kernel do it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import run as running
from profiler.errors import InputError
from profiler.store import Run
from tests.profiler.tiny_runs import contents, tiny_spec
from workloads.spec import Spec

ROOT = Path(__file__).parents[2]
CELLS = [f"prefill-b{batch}-l8" for batch in range(1, 6)]


@pytest.fixture(scope="module")
def spec() -> Spec:
    """Five cells of half a second each, and a route that each request draws for itself."""
    return tiny_spec(
        arms=[
            {"name": "dense", "method": "dense"},
            {"name": "forced", "method": "layerroute", "gates": {"forced": {"ratio": 0.5, "pattern": "random"}}},
        ],
        cells={"prefill": {"batch": [1, 2, 3, 4, 5], "length": [8]}},
        measure={"warmup": 1, "max_repeats": 5000, "target_ci": 1e-6, "budget_s": 0.5, "threads": 1},
    )


@pytest.fixture
def process(spec: Spec, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, writing into `run`, once its first cell is done."""
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    command = [sys.executable, "-m", "profiler", "run", "spec.yaml", "--out", "run", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as found:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "run" / "manifest.json").exists() or not any(
                cell.done for cell in Run(tmp_path / "run").manifest.cells
            ):
                assert time.monotonic() < deadline
                assert found.poll() is None, found.communicate()
                time.sleep(0.02)
            yield found
        finally:
            found.kill()


def decisions(run: Run) -> list[tuple[Any, ...]]:
    gates = run.frame("gates").drop(columns="weights")
    gates["choices"] = [tuple(choices) for choices in gates["choices"]]
    columns = ["cell", "arm", "phase", "request", "position", "layer", "site", "choices", "gate", "rows"]
    return sorted(gates[columns].itertuples(index=False, name=None))


def test_a_killed_run_opens_reports_and_goes_on_to_decide_as_an_uninterrupted_one(
    spec: Spec, tmp_path: Path, process: subprocess.Popen[str]
) -> None:
    assert Run(tmp_path / "run").state == "running"
    with pytest.raises(InputError, match=rf"process {process.pid} on .* is still writing it"):
        running.run(spec, tmp_path / "run", resume=True)
    time.sleep(random.Random(0).uniform(0, 0.5))
    process.kill()
    process.communicate()

    run = Run(tmp_path / "run")
    assert run.state == "killed"
    done = [cell.name for cell in run.manifest.cells if cell.done]
    assert 1 <= len(done) < len(CELLS)
    assert set(done) <= set(run.frame("steps")["cell"])
    report = subprocess.run(
        [sys.executable, "-m", "profiler", "report", "run", "--format", "md", "--out", "-"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    assert "killed" in report.stdout.lower()
    assert all(name in report.stdout for name in done)

    of_done = {n: d for n, d in contents(tmp_path / "run").items() if any(f"part-{c}-r0" in n for c in done)}
    threads = torch.get_num_threads()
    running.run(spec, tmp_path / "run", resume=True)
    whole = Run(running.run(spec, tmp_path / "whole"))
    torch.set_num_threads(threads)
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in of_done} == of_done
    resumed = Run(tmp_path / "run")
    assert (resumed.state, [c.done for c in resumed.manifest.cells]) == ("complete", [True] * 5)
    assert len(resumed.manifest.resumed_utc) == 1
    assert decisions(resumed) == decisions(whole)
    assert resumed.frame("steps")["step"].is_unique
    assert resumed.manifest.counts == {name: len(resumed.frame(name)) for name in resumed.tables()}
    assert not [name for name in after if ".tmp-" in name]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_the_command_with_130_and_the_folder_interrupted(
    tmp_path: Path, process: subprocess.Popen[str], number: int
) -> None:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "interrupted\nwhat was recorded is kept in run" in err
    assert "Traceback" not in err
    run = Run(tmp_path / "run")
    assert run.state == "interrupted"
    done = [cell.name for cell in run.manifest.cells if cell.done]
    assert done
    assert set(done) <= set(run.frame("steps")["cell"])
