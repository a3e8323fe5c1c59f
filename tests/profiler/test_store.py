"""Reading a run folder: whole tables, also beside its writer, rows that are missing, and folders that are not ours."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiler.errors import StoreError
from profiler.records import FORMAT, TABLES, RankRecord
from profiler.store import MANIFEST, Run, find_runs
from profiler.writer import RunWriter
from tests.profiler.hand_made_runs import cell, manifest, steps, told, unfinished

# -- tables -------------------------------------------------------------------------------------------


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


def test_a_folder_whose_name_reads_as_a_pattern_is_still_found(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]*?"
    writer = RunWriter(folder, manifest())
    writer.append("steps", steps(range(3)), cell="c")
    writer.finish("complete")
    assert Run(folder).frame("steps")["step"].tolist() == [0, 1, 2]


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


# -- rows that are missing, or there twice ------------------------------------------------------------


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


def test_a_damaged_part_is_named(writer: RunWriter) -> None:
    writer.append("steps", steps(range(3)), cell="c1")
    writer.finish("complete")
    part = next((writer.folder / "steps").iterdir())
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(StoreError, match=rf"steps cannot be read: .*{part.name}"):
        Run(writer.folder).table("steps")


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


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "none") == []
    for age, name in enumerate(["new", "older", "oldest"]):
        RunWriter(tmp_path / name, manifest()).finish("complete")
        stamp = 1_700_000_000 - 1000 * age
        os.utime(tmp_path / name / MANIFEST, (stamp, stamp))
    (tmp_path / "not-a-run").mkdir()
    assert [p.name for p in find_runs(tmp_path)] == ["new", "older", "oldest"]
    assert find_runs(tmp_path / "older") == [tmp_path / "older"]
