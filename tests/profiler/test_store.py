"""The run folder: whole parts whatever happens, clear refusals, resuming, and reading beside a writer."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiler import writer as writing
from profiler.errors import InputError, StoreError
from profiler.records import (
    FORMAT,
    PLACEMENTS,
    TABLES,
    CellRecord,
    Manifest,
    ModelRecord,
    RankRecord,
    RuleRecord,
    signals_schema,
)
from profiler.store import MANIFEST, Run, find_runs
from profiler.writer import RESERVE, RunWriter, check_folder

ROOT = Path(__file__).parents[2]


MODEL = ModelRecord(
    source="tiny", architecture="Llama", parameters=1, layers=1, hidden=1, dtype="float32", device="cpu",
    device_name="cpu", random_weights=True,
)  # fmt: skip


def cell(name: str) -> CellRecord:
    return CellRecord(name=name, phase="prefill", batch=1, length=4)


def manifest(**more: Any) -> Manifest:
    given = {"name": "t", "created_utc": "2026-01-01T00:00:00+00:00", "pid": os.getpid(), "host": os.uname().nodename}
    return Manifest(**{**given, "spec_sha256": "s", **more})


def ranks(*hosts: str) -> list[RankRecord]:
    return [RankRecord(rank=rank, pid=rank, host=host, threads=1) for rank, host in enumerate(hosts)]


def steps(numbers: range | list[int], arm: str = "a") -> dict[str, Any]:
    return {"arm": arm, "step": list(numbers), "pass": "bare", "wall_ns": [10 * n for n in numbers]}


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    made = RunWriter(tmp_path / "run", manifest(cells=[cell("c1"), cell("c2")]), "name: t\n")
    yield made
    if made._thread.is_alive():
        made.finish("complete")


def unfinished(folder: Path, pid: int = 2**22 + 1) -> None:
    """A run whose process is gone: cell c1 done, c2 begun, telemetry of the whole run."""
    made = RunWriter(folder, manifest(cells=[cell("c1"), cell("c2")]), "name: t\n")
    made.append("steps", steps(range(3)), cell="c1")
    made.append("telemetry", {"time_ns": [1, 2], "metric": "rss"}, cell="telemetry")
    made.manifest.rules = [
        RuleRecord(rule=6, name="open", passed=True, detail=""),
        RuleRecord(rule=1, name="rows", cell="c1", passed=True, detail=""),
    ]
    made.close_cell(made.manifest.cells[0])
    made.append("steps", steps(range(100, 107)), cell="c2")
    made.manifest.rules.append(RuleRecord(rule=1, name="rows", cell="c2", passed=True, detail=""))
    made.manifest.drops = {"gates": 2}
    made.finish("interrupted", "stopped")
    made.manifest.state, made.manifest.pid = "running", pid
    made.save_manifest()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- writing and reading ------------------------------------------------------------------------------


def test_what_was_appended_is_read_back_with_scalars_filled_and_absent_columns_null(writer: RunWriter) -> None:
    writer.append("steps", {**steps([7, 8, 9]), "repeat": np.arange(3), "context": pa.array([1, 2, 3])}, cell="c1")
    writer.append("gates", {"arm": ["a"], "step": 7, "choices": [[0, 2]], "weights": [[0.25, 0.75]]}, cell="c1")
    writer.finish("complete", None, "later")
    run = Run(writer.folder)
    frame = run.frame("steps")
    assert frame["step"].tolist() == [7, 8, 9]
    assert frame["wall_ns"].tolist() == [70, 80, 90]
    assert frame["repeat"].tolist() == [0, 1, 2]
    assert frame["context"].tolist() == [1, 2, 3]
    assert set(frame["arm"]) == {"a"}
    assert set(frame["cell"]) == {"c1"}
    assert set(frame["rank"]) == {0}
    assert frame["device_ns"].isna().all()
    assert [frame.dtypes["wall_ns"], frame.dtypes["repeat"]] == [np.int64, np.int32]
    assert run.table("gates").select("choices, weights").fetchall() == [([0, 2], [0.25, 0.75])]
    assert run.tables() == ["gates", "steps"]
    assert run.manifest.counts == {"steps": 3, "gates": 1}
    assert (run.state, run.manifest.finished_utc, run.spec_yaml) == ("complete", "later", "name: t\n")
    assert run.bytes_on_disk() == sum(len(data) for data in files(writer.folder).values())


def test_any_parquet_reader_reads_a_table_as_a_whole(writer: RunWriter) -> None:
    writer.append("steps", steps(range(5)), cell="c1")
    writer.close_cell(writer.manifest.cells[0])
    writer.append("steps", steps(range(5, 8)), cell="c2")
    writer.finish("complete")
    assert len(list((writer.folder / "steps").iterdir())) == 2
    assert sorted(pq.read_table(writer.folder / "steps")["step"].to_pylist()) == list(range(8))


def test_a_table_nothing_was_recorded_in_is_empty_with_its_columns_and_an_unknown_one_is_refused(
    writer: RunWriter,
) -> None:
    writer.append("steps", steps(range(2)), cell="c1")
    writer.finish("complete")
    run = Run(writer.folder)
    for name, schema in TABLES.items():
        assert run.table(name).columns == schema.names
    assert len(run.frame("gates")) == 0
    with pytest.raises(StoreError, match=r"no table 'gatez'; it has steps"):
        run.table("gatez")


def test_a_methods_own_table_needs_its_schema_and_keeps_its_columns(writer: RunWriter) -> None:
    schema = signals_schema(["logit", "heat"])
    writer.append("signals-x", {"arm": ["a", "a"], "layer": [0, 1], "logit": [0.5, -0.5]}, cell="c1", schema=schema)
    writer.finish("complete")
    frame = Run(writer.folder).frame("signals-x")
    assert frame["logit"].tolist() == [0.5, -0.5]
    assert frame["heat"].isna().all()


def test_rows_of_unequal_lengths_or_unknown_columns_are_our_fault_and_end_the_run_as_failed(writer: RunWriter) -> None:
    writer.append("steps", {"arm": ["a", "b"], "step": [1]}, cell="c1")
    with pytest.raises(ValueError, match=r"different lengths: \[1, 2\]"):
        writer.flush()
    with pytest.raises(ValueError, match="different lengths"):
        writer.finish("complete")
    assert (Run(writer.folder).state, Run(writer.folder).manifest.state_detail) == (
        "failed",
        "columns of different lengths: [1, 2]",
    )


def test_a_column_no_table_has_is_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "r", manifest())
    writer.append("steps", {"arm": ["a"], "colour": ["red"]}, cell="c")
    with pytest.raises(ValueError, match="no such column: .*colour"):
        writer.finish("complete")


def test_many_rows_become_parts_before_the_cell_ends(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS_PER_PART", 10)
    for first in range(0, 36, 4):
        writer.append("steps", steps(range(first, first + 4)), cell="c1")
    writer.drain()
    on_disk = [pq.read_metadata(part).num_rows for part in sorted((writer.folder / "steps").glob("*.parquet"))]
    assert on_disk == [12, 12, 12]
    assert sorted(Run(writer.folder).frame("steps")["step"]) == list(range(36))


def test_rows_held_for_long_become_parts_though_nobody_flushes(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append("steps", steps(range(4)), cell="c1")
    writer.drain()
    assert Run(writer.folder).tables() == []
    monkeypatch.setattr(writing, "SECONDS_PER_PART", 0.0)
    writer.append("kv", {"arm": ["a"], "allocated_bytes": 1}, cell="c1")
    writer.drain()
    assert Run(writer.folder).tables() == ["kv", "steps"]


def test_a_folder_whose_name_reads_as_a_pattern_is_still_found(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]*?"
    writer = RunWriter(folder, manifest())
    writer.append("steps", steps(range(3)), cell="c")
    writer.finish("complete")
    assert Run(folder).frame("steps")["step"].tolist() == [0, 1, 2]


def test_rows_from_two_threads_all_arrive_while_parts_are_being_written(writer: RunWriter) -> None:
    """Telemetry hands over rows from its own thread at any moment, also while a cell is being closed."""
    stop = threading.Event()
    handed = 0

    def sample() -> None:
        nonlocal handed
        while not stop.is_set():
            handed += writer.append("telemetry", {"time_ns": [handed], "metric": "m"}, cell="telemetry")

    thread = threading.Thread(target=sample)
    thread.start()
    for number in range(8):
        writer.append("steps", steps([number]), cell="c1")
        writer.flush()
        writer.save_manifest()
    stop.set()
    thread.join()
    writer.finish("complete")
    run = Run(writer.folder)
    assert sorted(run.frame("telemetry")["time_ns"]) == list(range(handed))
    assert run.manifest.counts["telemetry"] == handed


# -- the queue ----------------------------------------------------------------------------------------


def test_a_full_queue_drops_and_counts_and_never_waits(writer: RunWriter) -> None:
    gate = threading.Event()

    def hold_up() -> list[writing.Rows]:
        gate.wait(30)
        return []

    writer.submit(hold_up, dropped_as="x")
    while writer._queue.qsize():
        time.sleep(0.001)
    began = time.monotonic()
    results = [writer.append("steps", steps([n]), cell="c1") for n in range(writing.QUEUE_BATCHES + 25)]
    took = time.monotonic() - began
    gate.set()
    assert results == [True] * writing.QUEUE_BATCHES + [False] * 25
    assert took < 1.0
    writer.finish("complete")
    run = Run(writer.folder)
    assert run.manifest.drops == {"steps": 25}
    assert run.frame("steps")["step"].tolist() == list(range(writing.QUEUE_BATCHES))


# -- folders a run cannot be written into -------------------------------------------------------------


def test_a_second_run_into_the_same_folder_is_refused_and_changes_nothing(writer: RunWriter) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    writer.finish("complete")
    before = files(writer.folder)
    with pytest.raises(InputError, match="must be new or empty, and it holds a run"):
        RunWriter(writer.folder, manifest())
    assert files(writer.folder) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="it is a file"):
            RunWriter(tmp_path / "run", manifest(), resume=resume)
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="it holds one other file"):
        RunWriter(tmp_path, manifest())
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(InputError, match="it holds 2 other files"):
        check_folder(tmp_path)
    with pytest.raises(StoreError, match="not a run folder"):
        RunWriter(tmp_path, manifest(), resume=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "thesis.tex"]


def test_missing_parents_are_made_and_a_file_among_them_is_a_sentence(tmp_path: Path) -> None:
    RunWriter(tmp_path / "a" / "b" / "run", manifest()).finish("complete")
    assert Run(tmp_path / "a" / "b" / "run").state == "complete"
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot make the run folder .*file/run: Not a directory"):
        RunWriter(tmp_path / "file" / "run", manifest())


def test_a_name_the_file_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"):
        RunWriter(tmp_path / ("x" * 300), manifest())


def test_a_folder_we_may_not_write_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="cannot make the run folder .*Permission denied"):
        RunWriter(tmp_path / "run", manifest())


def test_what_a_writer_killed_at_its_first_file_left_does_not_block_the_folder(tmp_path: Path) -> None:
    (tmp_path / f".{MANIFEST}.tmp-123").write_text("{")
    RunWriter(tmp_path, manifest()).finish("complete")
    assert Run(tmp_path).state == "complete"


# -- a disk that is full, a folder that goes ----------------------------------------------------------


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_a_part_is_written_keeps_what_was_complete(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    writer.close_cell(writer.manifest.cells[0])
    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full_disk)
        writer.append("steps", steps(range(3, 6)), cell="c2")
        with pytest.raises(StoreError, match=r"No space left on device.*kept and readable.*--resume"):
            writer.close_cell(writer.manifest.cells[1])
        with pytest.raises(StoreError, match="No space left"):  # and again, at any later call
            writer.append("steps", steps([9]), cell="c2")
        with pytest.raises(StoreError, match="No space left"):
            writer.finish("complete")
    run = Run(writer.folder)
    assert run.state == "failed"
    assert "No space left on device" in str(run.manifest.state_detail)
    assert [c.done for c in run.manifest.cells] == [True, False]
    assert run.frame("steps")["step"].tolist() == [0, 1, 2]
    assert [p.name for p in writer.folder.rglob("*.tmp-*")] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_part_that_the_kernel_refuses_to_write_is_the_same_error(writer: RunWriter) -> None:
    (writer.folder / "steps").mkdir()
    (writer.folder / "steps" / f".part-c1-r0-000000.parquet.tmp-{os.getpid()}").symlink_to("/dev/full")
    writer.append("steps", steps(range(3)), cell="c1")
    with pytest.raises(StoreError, match="No space left on device"):
        writer.flush()
    with pytest.raises(StoreError, match="No space left on device"):
        writer.finish("interrupted")
    assert (Run(writer.folder).state, Run(writer.folder).tables()) == ("failed", [])


def test_room_for_the_last_manifest_is_kept_until_the_end(writer: RunWriter) -> None:
    reserve, size = writer.folder / writing.RESERVE, (writer.folder / MANIFEST).stat().st_size
    assert reserve.stat().st_size >= 2 * size
    writer.finish("failed", "x" * 100)
    assert not reserve.exists()
    assert (writer.folder / MANIFEST).stat().st_size < 2 * size


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_manifest_that_cannot_be_rewritten_leaves_the_old_one_and_the_cell_undone(writer: RunWriter) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    (writer.folder / f".{MANIFEST}.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left on device"):
        writer.close_cell(writer.manifest.cells[0])
    assert [c.done for c in Run(writer.folder).manifest.cells] == [False, False]
    writer.finish("failed", "disk full")  # the failed write removed the link: there is room again
    assert Run(writer.folder).frame("steps")["step"].tolist() == [0, 1, 2]


def test_a_file_size_limit_of_the_system_fails_the_run_and_not_the_folder(tmp_path: Path) -> None:
    script = f"""
        import resource, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from profiler.records import CellRecord, Manifest
        from profiler.writer import RunWriter
        cells = [CellRecord(name=n, phase="prefill", batch=1, length=1) for n in ("c1", "c2")]
        m = Manifest(name="t", created_utc="x", pid=1, host="h", cells=cells)
        w = RunWriter(Path({str(tmp_path / "run")!r}), m)
        w.append("steps", {{"arm": "a", "step": list(range(9))}}, cell="c1")
        w.close_cell(m.cells[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
        import numpy
        w.append("steps", {{"arm": "a", "step": numpy.random.default_rng(0).integers(0, 2**62, 50_000)}}, cell="c2")
        try:
            w.close_cell(m.cells[1])
        except Exception as error:
            print(type(error).__name__, error)
        try:
            w.finish("complete")
        except Exception as error:
            print(type(error).__name__)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("StoreError cannot write the run folder")
    assert "File too large" in first
    assert second == "StoreError"
    run = Run(tmp_path / "run")
    assert (run.state, [c.done for c in run.manifest.cells]) == ("failed", [True, False])
    assert run.frame("steps")["step"].tolist() == list(range(9))


def test_a_folder_removed_under_the_writer_is_a_sentence(writer: RunWriter) -> None:
    shutil.rmtree(writer.folder)
    writer.append("steps", steps(range(3)), cell="c1")
    with pytest.raises(StoreError, match="cannot write the run folder .*No such file or directory"):
        writer.finish("complete")


def test_advice_to_resume_is_for_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "s", manifest(origin="session"))
    monkeypatch.setattr(pq, "write_table", full_disk)
    writer.append("steps", steps(range(3)), cell="c")
    with pytest.raises(StoreError) as caught:
        writer.finish("complete")
    assert "kept and readable" in str(caught.value)
    assert "--resume" not in str(caught.value)


# -- kill -9 ------------------------------------------------------------------------------------------

WRITING = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, psutil
from pathlib import Path
from profiler import writer as writing
from profiler.records import CellRecord, Manifest
writing.ROWS_PER_PART = 50
cells = [CellRecord(name=f"c{{i}}", phase="prefill", batch=1, length=1) for i in range(2000)]
m = Manifest(name="t", created_utc="x", pid=os.getpid(), host=os.uname().nodename, cells=cells,
             machine={{"process_started": psutil.Process().create_time()}})
w = writing.RunWriter(Path(sys.argv[1]), m, "name: t\\n")
print("writing", flush=True)
for i, cell in enumerate(cells):
    for k in range(4):
        w.append("steps", {{"arm": "a", "step": [1000 * i + 20 * k + j for j in range(20)]}}, cell=cell.name)
        w.append("kv", {{"arm": "a", "step": [1000 * i + k]}}, cell=cell.name)
    w.close_cell(cell)
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_killed_at_any_moment_leaves_a_run_that_opens_with_every_closed_cell(
    tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    if seed == 0:
        assert Run(folder).state == "running"
    time.sleep(random.Random(seed).uniform(0.0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run = Run(folder)
    assert run.state == "killed"
    found = run.frame("steps")
    done = [c.name for c in run.manifest.cells if c.done]
    for name in done:
        number = int(name[1:])
        assert sorted(found[found["cell"] == name]["step"]) == [1000 * number + j for j in range(80)]
    for part in folder.glob("*/part-*.parquet"):
        assert pq.read_table(part).num_rows > 0
    # And it can be gone on with: done cells stay, byte for byte, and everything else goes.
    kept = {name: data for name, data in files(folder).items() if name.split("part-")[-1].split("-r0-")[0] in done}
    mine = run.manifest.model_copy(deep=True, update={"pid": os.getpid()})
    writer = RunWriter(folder, mine, "name: t\n", resume=True)
    writer.finish("complete")
    after = files(folder)
    assert {name for name in after if name.endswith(".parquet")} == set(kept)
    assert {name: after[name] for name in kept} == kept
    assert not [name for name in after if ".tmp-" in name]


# -- resuming -----------------------------------------------------------------------------------------


def test_resuming_keeps_done_cells_byte_for_byte_and_drops_the_begun_one(tmp_path: Path) -> None:
    unfinished(tmp_path / "run")
    before = {n: d for n, d in files(tmp_path / "run").items() if n.endswith(".parquet")}
    assert Run(tmp_path / "run").state == "killed"
    fresh = manifest(cells=[cell("c1"), cell("c2")], created_utc="2026-02-02T00:00:00+00:00")
    writer = RunWriter(tmp_path / "run", fresh, "name: t\n", resume=True)
    assert [(c.name, c.done) for c in writer.manifest.cells] == [("c1", True), ("c2", False)]
    assert writer.manifest.counts == {"steps": 3, "telemetry": 2}
    assert writer.manifest.drops == {"gates": 2}
    assert [(r.rule, r.cell) for r in writer.manifest.rules] == [(1, "c1")]
    assert writer.manifest.created_utc == "2026-01-01T00:00:00+00:00"
    assert writer.manifest.resumed_utc == ["2026-02-02T00:00:00+00:00"]
    writer.append("steps", steps(range(200, 205)), cell="c2")
    writer.close_cell(writer.manifest.cells[1])
    writer.finish("complete")
    run = Run(tmp_path / "run")
    assert sorted(run.frame("steps")["step"]) == [0, 1, 2, 200, 201, 202, 203, 204]
    assert len(run.frame("telemetry")) == 2
    assert run.manifest.counts == {"steps": 8, "telemetry": 2}
    after = files(tmp_path / "run")
    kept = [name for name in before if "c2" not in name]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert not [name for name in before if "c2" in name and name in after]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spec_sha256": "another"}, "its spec .* is not the one given .* a run has one spec"),
        ({"versions": {"torch": "9.9"}}, "version of torch was None, and now it is 9.9"),
        ({"machine": {"cpu": "Z80"}}, "machine.cpu was None, and now it is Z80"),
        ({"model": MODEL}, "its model's source was None, and now it is tiny; cells measured under both"),
        ({"ranks": ranks("a", "b")}, "begun by 1 processes, .* by 2; .* so start one, without torchrun"),
    ],
)
def test_resuming_under_other_conditions_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    unfinished(tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match=sentence):
        RunWriter(tmp_path / "run", manifest(cells=[cell("c1"), cell("c2")], **change), resume=True)
    assert files(tmp_path / "run") == before


def test_resuming_with_ranks_on_other_nodes_is_refused_and_on_other_hosts_not(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", manifest(ranks=ranks(*"aabb")), "name: t\n").finish("failed", "why")
    with pytest.raises(InputError, match=r"placing of ranks on nodes was \[0, 0, 1, 1\], and now it is \[0, 1, 0, 1\]"):
        RunWriter(tmp_path / "run", manifest(ranks=ranks(*"abab")), "name: t\n", resume=True)
    RunWriter(tmp_path / "run", manifest(ranks=ranks(*"ccdd")), "name: t\n", resume=True).finish("complete")


def test_placements_are_written_anew_by_a_resumed_run(writer: RunWriter) -> None:
    columns = {"arm": "a", "placement": "all_size", "layer": 0, "expert": [0, 1], "rank": [0, 1], "turn": 0, "every": 1}
    writer.append("placements", columns, cell=PLACEMENTS)
    writer.append("telemetry", {"time_ns": [1], "metric": "m"}, cell="telemetry")
    writer.finish("failed", "killed before it could be closed")
    again = RunWriter(writer.folder, manifest(cells=[cell("c1"), cell("c2")]), "name: t\n", resume=True)
    assert again.manifest.counts == {"telemetry": 1}
    again.append("placements", columns, cell=PLACEMENTS)
    again.finish("complete")
    assert Run(writer.folder).frame("placements")["expert"].tolist() == [0, 1]
    assert Run(writer.folder).mismatches == []


def test_resuming_a_complete_run_is_refused(writer: RunWriter) -> None:
    writer.finish("complete")
    before = files(writer.folder)
    with pytest.raises(InputError, match="the run is complete; a run is never changed after it is closed"):
        RunWriter(writer.folder, manifest(), resume=True)
    assert files(writer.folder) == before


def test_resuming_a_running_run_is_refused(writer: RunWriter) -> None:
    with pytest.raises(InputError, match=rf"process {os.getpid()} on .* is still writing it"):
        RunWriter(writer.folder, manifest(), resume=True)


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_interrupted_and_failed_runs_can_be_gone_on_with(writer: RunWriter, state: Any) -> None:
    writer.finish(state, "why")
    again = RunWriter(writer.folder, manifest(cells=[cell("c1"), cell("c2")]), "name: t\n", resume=True)
    assert Run(writer.folder).state == "running"
    again.finish("complete")
    assert (Run(writer.folder).state, Run(writer.folder).manifest.state_detail) == ("complete", None)


def test_resuming_where_nothing_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume .*new: there is no such folder.* leave out --resume to start one"):
        RunWriter(tmp_path / "new", manifest(), "name: t\n", resume=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="--resume .*empty: it is empty"):
        RunWriter(tmp_path / "empty", manifest(), "name: t\n", resume=True)


# -- rows that are missing, or there twice ------------------------------------------------------------


def told(run: Run) -> list[str]:
    return [str(mismatch) for mismatch in run.mismatches]


def test_a_folder_nobody_changed_has_no_mismatch_whatever_became_of_the_run(tmp_path: Path) -> None:
    unfinished(tmp_path / "killed")
    (tmp_path / "killed" / "steps" / "part-c2-r0-000777.parquet").write_bytes(
        next((tmp_path / "killed" / "steps").glob("part-c2-*")).read_bytes()
    )  # what a kill leaves past the manifest's last word
    assert told(Run(tmp_path / "killed")) == []
    RunWriter(tmp_path / "new", manifest(cells=[cell("c")])).finish("complete")
    assert told(Run(tmp_path / "new")) == []


def test_parts_of_a_done_cell_that_are_gone_or_there_twice_are_told_with_their_rows(tmp_path: Path) -> None:
    unfinished(tmp_path / "r")
    (part,) = (tmp_path / "r" / "steps").glob("part-c1-*")
    copy = part.with_name("part-c1-r0-000900.parquet")
    shutil.copy(part, copy)
    assert told(Run(tmp_path / "r")) == ["table steps of cell c1 has 6 of 3 rows"]
    part.unlink()
    copy.unlink()
    assert told(Run(tmp_path / "r")) == ["table steps of cell c1 has 0 of 3 rows"]
    with pytest.raises(StoreError, match=r"--resume .* not as it was written: table steps of cell c1 has 0 of 3 rows"):
        RunWriter(tmp_path / "r", manifest(cells=[cell("c1"), cell("c2")]), resume=True)


def test_a_closed_run_has_all_rows_of_every_table(writer: RunWriter) -> None:
    writer.append("telemetry", {"time_ns": [1, 2], "metric": "rss"}, cell="telemetry")
    writer.append("steps", steps(range(5)), cell="c1")
    writer.finish("interrupted")
    shutil.rmtree(writer.folder / "telemetry")
    (part,) = (writer.folder / "steps").glob("*.parquet")
    shutil.copy(part, part.with_name("part-copied by hand.parquet"))
    assert told(Run(writer.folder)) == ["table steps has 10 of 5 rows", "table telemetry has 0 of 2 rows"]


def test_a_part_without_a_footer_is_named(writer: RunWriter) -> None:
    writer.append("steps", steps(range(5)), cell="c1")
    writer.finish("complete")
    (part,) = (writer.folder / "steps").glob("*.parquet")
    part.write_bytes(b"")
    with pytest.raises(StoreError, match=rf"{part.name} cannot be read"):
        Run(writer.folder).mismatches  # noqa: B018


def test_resuming_drops_parts_only_when_the_manifest_no_longer_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(tmp_path / "r")

    def killed(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            RunWriter(tmp_path / "r", manifest(cells=[cell("c1"), cell("c2")], pid=2**22 + 1), resume=True)
    assert told(Run(tmp_path / "r")) == []
    made = RunWriter(tmp_path / "r", manifest(cells=[cell("c1"), cell("c2")]), resume=True)
    made.finish("complete")
    assert Run(tmp_path / "r").frame("steps")["step"].tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_begun_is_not_left_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = writing._write_whole

    def full(path: Path, write: Any) -> None:
        if path.name == writing.RESERVE:
            full_disk()
        whole(path, write)

    monkeypatch.setattr(writing, "_write_whole", full)
    with pytest.raises(StoreError, match="cannot make the run folder .*No space left"):
        RunWriter(tmp_path / "r", manifest(), "name: t\n")
    assert not (tmp_path / "r").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreError):
        RunWriter(tmp_path / "mine", manifest(), "name: t\n")
    assert list((tmp_path / "mine").iterdir()) == []


# -- a folder changed by hand -------------------------------------------------------------------------


def test_a_spec_that_is_no_text_or_no_file_is_a_sentence(writer: RunWriter) -> None:
    writer.finish("complete")
    path = writer.folder / "spec.yaml"
    path.write_bytes(b"name: \xe9")
    with pytest.raises(StoreError, match=r"spec\.yaml must be UTF-8 text, and byte 0xe9 at offset 6 is not"):
        Run(writer.folder).spec_yaml  # noqa: B018
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match=r"spec\.yaml cannot be read: it is no ordinary file"):
        Run(writer.folder).spec_yaml  # noqa: B018
    (writer.folder / MANIFEST).unlink()
    os.mkfifo(writer.folder / MANIFEST)
    with pytest.raises(StoreError, match=r"manifest\.json: it is no ordinary file"):
        Run(writer.folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"state": "finished"}, "state must be 'running', 'complete', 'interrupted' or 'failed', and it is 'finished'"),
        ({"pid": "x"}, "pid must be a whole number, and it is 'x'"),
        ({"cells": 3}, "cells must be a list, and it is '3'"),
        ({"arms": [{}]}, r"arms\.0\.name is missing \(and 1 more\)"),
    ],
)
def test_a_manifest_with_a_wrong_value_says_which_in_our_words(
    writer: RunWriter, change: dict[str, Any], sentence: str
) -> None:
    writer.finish("complete")
    path = writer.folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=f"does not fit format {FORMAT}: {sentence}$") as caught:
        Run(writer.folder)
    assert "pydantic" not in str(caught.value)


def test_a_table_with_another_column_or_kind_of_column_is_refused(writer: RunWriter) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    writer.finish("complete")
    (part,) = (writer.folder / "steps").glob("*.parquet")
    table = pq.read_table(part)
    pq.write_table(table.drop_columns(["wall_ns"]), part)
    with pytest.raises(StoreError, match=f"steps: it has no column 'wall_ns', which format {FORMAT} has"):
        Run(writer.folder).frame("steps")
    place = table.schema.get_field_index("wall_ns")
    pq.write_table(table.set_column(place, "wall_ns", pa.array(["1", "2", "3"])), part)
    with pytest.raises(StoreError, match="steps: column 'wall_ns' holds VARCHAR, and must hold BIGINT"):
        Run(writer.folder).frame("steps")


# -- states and manifests that are not ours -----------------------------------------------------------


def test_a_reused_process_id_is_not_the_writer(writer: RunWriter) -> None:
    assert Run(writer.folder).state == "running"
    writer.manifest.machine = {"process_started": 1.0}
    writer.save_manifest()
    assert Run(writer.folder).state == "killed"


def test_whether_a_process_of_another_host_lives_cannot_be_told(writer: RunWriter) -> None:
    writer.manifest.host, writer.manifest.pid = "elsewhere", 2**22 + 1
    writer.save_manifest()
    assert Run(writer.folder).state == "running"


def test_another_rank_writes_its_parts_and_no_manifest(tmp_path: Path) -> None:
    first = RunWriter(tmp_path / "run", manifest())
    first.append("steps", steps([1]), cell="c")
    before = (tmp_path / "run" / MANIFEST).read_bytes()
    first.flush()
    other = RunWriter(tmp_path / "run", manifest(), rank=3)
    other.append("steps", steps([2, 3]), cell="c")
    cell = CellRecord(name="c", phase="prefill", batch=1, length=1)
    assert other.written(cell) == {"steps": 2}
    tallies = other.tallies()
    other.finish("complete")
    assert sorted(p.name for p in (tmp_path / "run" / "steps").iterdir()) == [
        "part-c-r0-000000.parquet", "part-c-r3-000000.parquet",
    ]  # fmt: skip
    assert (tmp_path / "run" / RESERVE).exists()  # the first one's
    assert (tmp_path / "run" / MANIFEST).read_bytes() == before
    first.manifest.cells.append(cell)
    first.close_cell(cell, [Counter(steps=2)])
    assert cell.counts == {"steps": 3}
    first.add(*tallies)
    first.finish("complete")
    found = Run(tmp_path / "run")
    assert found.mismatches == []
    assert sorted(found.frame("steps")["rank"]) == [0, 3, 3]
    again = RunWriter(tmp_path / "run", manifest(), rank=3)
    assert again._part == 1  # a part's name never stands for two contents
    again.finish("complete")


def test_rows_that_interrupted_ranks_could_not_tell_of_are_no_mismatch(tmp_path: Path) -> None:
    for ranks, expected in ((1, 1), (2, 0)):
        several = manifest()
        several.ranks = [RankRecord(rank=rank, pid=1, host="h", threads=1) for rank in range(ranks)]
        first = RunWriter(tmp_path / f"{ranks}", several)
        other = RunWriter(tmp_path / f"{ranks}", manifest(), rank=1)
        other.append("steps", steps([2]), cell="c")
        other.finish("interrupted")
        first.finish("interrupted")
        assert len(Run(tmp_path / f"{ranks}").mismatches) == expected


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a JSON object"),
        (b"{", "is not a JSON object"),
        (b"\xff\xfe", "is not a JSON object"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        (b"{}", "must name its format, a number from 1, and it says None"),
        (b'{"format": true}', "it says True"),
        (b'{"format": "1"}', "it says '1'"),
        (b'{"format": 0}', "it says 0"),
        (b'{"format": 1}', "does not fit format 1"),
        (json.dumps({"format": FORMAT + 1}).encode(), f"has format {FORMAT + 1}; this version reads up to {FORMAT}"),
    ],
)
def test_a_manifest_that_is_none_is_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(StoreError, match=sentence):
        Run(tmp_path)


def test_what_is_no_folder_or_has_no_manifest_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere is not a run folder: manifest\.json: No such file"):
        Run(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is not a run folder"):
        Run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is not a run folder"):
        Run(tmp_path / "file")


def test_fields_a_later_format_may_add_are_kept(writer: RunWriter) -> None:
    writer.finish("complete")
    path = writer.folder / MANIFEST
    found = json.loads(path.read_text())
    found["weather"] = {"rain": [1, 2]}
    found["cells"][0]["colour"] = "red"
    path.write_text(json.dumps(found))
    read = Run(writer.folder).manifest
    assert read.model_dump(mode="json") == found


def test_a_damaged_part_is_named(writer: RunWriter) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    writer.finish("complete")
    part = next((writer.folder / "steps").iterdir())
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(StoreError, match=rf"steps cannot be read: .*{part.name}"):
        Run(writer.folder).table("steps")


def test_a_reader_beside_the_writer_always_sees_whole_parts(writer: RunWriter) -> None:
    stop, seen, problems = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                run = Run(writer.folder)
                seen.append(len(run.frame("steps")))
                run.bytes_on_disk()
            except Exception as error:
                problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(40):
        writer.append("steps", steps(range(10 * number, 10 * number + 10)), cell="c1")
        writer.flush()
        writer.save_manifest()
    stop.set()
    thread.join()
    assert problems == []
    assert seen == sorted(seen)
    assert all(n % 10 == 0 for n in seen)


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "none") == []
    for age, name in enumerate(["new", "older", "oldest"]):
        RunWriter(tmp_path / name, manifest()).finish("complete")
        stamp = 1_700_000_000 - 1000 * age
        os.utime(tmp_path / name / MANIFEST, (stamp, stamp))
    (tmp_path / "not-a-run").mkdir()
    assert [p.name for p in find_runs(tmp_path)] == ["new", "older", "oldest"]
    assert find_runs(tmp_path / "older") == [tmp_path / "older"]
