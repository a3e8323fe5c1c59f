"""Resuming a run folder: what is kept and what is dropped, and when it is refused and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from profiler.records import PLACEMENTS, ModelRecord, RankRecord
from profiler.store import Run
from profiler.writer import RunWriter
from tests.profiler.hand_made_runs import cell, files, manifest, steps, told, unfinished

MODEL = ModelRecord(
    source="tiny", architecture="Llama", parameters=1, layers=1, hidden=1, dtype="float32", device="cpu",
    device_name="cpu", random_weights=True,
)  # fmt: skip


def ranks(*hosts: str) -> list[RankRecord]:
    return [RankRecord(rank=rank, pid=rank, host=host, threads=1) for rank, host in enumerate(hosts)]


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


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_interrupted_and_failed_runs_can_be_gone_on_with(writer: RunWriter, state: Any) -> None:
    writer.finish(state, "why")
    again = RunWriter(writer.folder, manifest(cells=[cell("c1"), cell("c2")]), "name: t\n", resume=True)
    assert Run(writer.folder).state == "running"
    again.finish("complete")
    assert (Run(writer.folder).state, Run(writer.folder).manifest.state_detail) == ("complete", None)


# -- refused ------------------------------------------------------------------------------------------


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


def test_resuming_a_complete_run_is_refused(writer: RunWriter) -> None:
    writer.finish("complete")
    before = files(writer.folder)
    with pytest.raises(InputError) as refused:
        RunWriter(writer.folder, manifest(), resume=True)
    assert str(refused.value) == (
        f"--resume {writer.folder}: the run is complete, and a run is never changed after it is closed; read it with "
        f"`python -m profiler report {writer.folder}`, or start another under a new --out"
    )
    assert files(writer.folder) == before


def test_resuming_a_running_run_is_refused(writer: RunWriter) -> None:
    with pytest.raises(InputError, match=rf"process {os.getpid()} on .* is still writing it"):
        RunWriter(writer.folder, manifest(), resume=True)


def test_resuming_where_nothing_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume .*new: there is no such folder.* leave out --resume to start one"):
        RunWriter(tmp_path / "new", manifest(), "name: t\n", resume=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="--resume .*empty: it is empty"):
        RunWriter(tmp_path / "empty", manifest(), "name: t\n", resume=True)
