"""The `trace` command's work, TensorBoard included: really started, and asked over HTTP what it shows."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from profiler import viewer
from profiler.errors import InputError, StoreError
from profiler.records import Manifest
from profiler.viewer import open_trace, trace_files
from profiler.writer import RunWriter


def make_run(folder: Path, traces: list[str]) -> Path:
    run = folder / "run"
    RunWriter(run, Manifest(name="t", created_utc="now", pid=1, host="h")).finish("complete")
    operators = [("aten::linear", 1000.0, 50.0), ("aten::addmm", 1010.0, 30.0), ("aten::gelu", 1060.0, 9.0)]
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {"External id": i}}
        for i, (name, ts, dur) in enumerate(operators, 1)
    ]
    for name in traces:
        path = run / "traces" / f"{name}.pt.trace.json.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return run


def test_perfetto_gives_the_files_on_stdout_and_the_way_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, ["prefill-b1-l8.rank1", "decode-b1-c8-n2.rank0"])
    open_trace(run, "perfetto")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{run}/traces/decode-b1-c8-n2.rank0.pt.trace.json.gz",
        f"{run}/traces/prefill-b1-l8.rank1.pt.trace.json.gz",
    ]
    assert "ui.perfetto.dev" in err


@pytest.mark.parametrize("chosen", ["perfetto", "tensorboard"])
def test_a_run_without_traces_and_a_folder_that_is_no_run(tmp_path: Path, chosen: viewer.Viewer) -> None:
    run = make_run(tmp_path, [])
    with pytest.raises(InputError, match=r"run: the run traced no steps; add trace: \{steps: 1\}"):
        open_trace(run, chosen)
    with pytest.raises(StoreError, match="nowhere is not a run folder"):
        open_trace(tmp_path / "nowhere", chosen)


def test_a_trace_half_written_is_not_offered(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["whole.rank0"])
    (run / "traces" / ".half.rank0.tmp-1.gz").write_bytes(b"half")
    assert [path.name for path in trace_files(run)] == ["whole.rank0.pt.trace.json.gz"]


def test_tensorboard_without_its_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ["a.rank0"])
    find = importlib.util.find_spec

    def without_plugin(name: str) -> ModuleSpec | None:
        return None if name == "torch_tb_profiler" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_plugin)
    with pytest.raises(InputError, match="not installed: torch_tb_profiler"):
        open_trace(run, "tensorboard")


@pytest.fixture
def tensorboard(tmp_path: Path) -> Iterator[str]:
    """The address of a TensorBoard that `open_trace` became."""
    run = make_run(tmp_path, ["prefill-b1-l8.rank0", "prefill-b1-l8.rank1"])
    command = (
        "import pathlib, sys; from profiler import viewer; viewer.open_trace(pathlib.Path(sys.argv[1]), 'tensorboard')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command, str(run)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield wait_for(lambda: re.search(r"TensorBoard \S+ at (http://\S+)", "".join(said)), said)[1].rstrip("/")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
        reader.join(30)
        process.stdout.close()


def wait_for(found: Callable[[], Any], said: list[str]) -> Any:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        if result := found():
            return result
        time.sleep(0.2)
    raise AssertionError(f"TensorBoard did not get there; it said: {''.join(said)}")


def ask(address: str, path: str) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address}/data/plugin/pytorch_profiler/{path}", timeout=30) as answer:
        return json.loads(answer.read())


def test_tensorboard_lists_the_run_its_ranks_and_its_operators(tensorboard: str) -> None:
    assert wait_for(lambda: "traces" in ask(tensorboard, "runs")["runs"], [])
    views = ask(tensorboard, "views?run=traces")
    assert {"Overview", "Operator", "Trace"} <= set(views)
    assert ask(tensorboard, "workers?run=traces&view=Operator") == ["prefill-b1-l8.rank0", "prefill-b1-l8.rank1"]
    assert ask(tensorboard, "spans?run=traces&worker=prefill-b1-l8.rank1") == ["default"]
    table = ask(
        tensorboard,
        "operation/table?run=traces&worker=prefill-b1-l8.rank1&span=default&view=Operator&group_by=Operation",
    )
    assert {row["name"]: (row["calls"], row["host_self_duration"]) for row in table["data"]} == {
        "aten::linear": (1, 20),
        "aten::addmm": (1, 30),
        "aten::gelu": (1, 9),
    }
