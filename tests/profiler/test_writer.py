"""Writing a run folder: rows that become whole parts whatever happens, and clear refusals."""

from __future__ import annotations

import errno
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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiler import writer as writing
from profiler.errors import InputError, StoreError
from profiler.records import CellRecord, signals_schema
from profiler.store import MANIFEST, Run
from profiler.writer import RESERVE, RunWriter, check_folder
from tests.profiler.hand_made_runs import files, manifest, steps

ROOT = Path(__file__).parents[2]


# -- appending ----------------------------------------------------------------------------------------


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
