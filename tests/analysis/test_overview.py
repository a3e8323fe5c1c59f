"""What is said about a run, and the list of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.ladder import warnings_of_arm
from analysis.overview import (
    BROKEN,
    CATALOGUE_COLUMNS,
    CELL_COLUMNS,
    RECORDER_COLUMNS,
    RULE_COLUMNS,
    catalogue,
    labels,
    overview,
)
from analysis.wording import arm_names
from profiler.records import ArmRecord, RuleRecord
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.tiny_run import write_run


def test_overview_of_a_complete_run(example: Run) -> None:
    about = overview(example)
    assert (about.name, about.state, about.sentence) == ("example", "complete", "Complete, 3 of 3 cells done.")
    assert about.labels == [
        "untrained router in arm routed: its decisions are those of its starting values",
        "synthetic route in arm forced (forced: 50% of layers skip, pattern shared, seed 0): no router decided",
    ]
    facts = dict(about.facts)
    assert facts["parameters"] == "261,184"
    assert facts["memory"] == "8.0 GiB"
    assert facts["cores quota"] == "unknown or none"
    assert facts["thread variables"] == "OMP_NUM_THREADS=4"
    assert facts["torch version"] == "2.13.0"
    assert facts["contention"].startswith("No contention seen.")
    assert facts["KV policy of routed"] == "request"
    assert list(about.rules.columns) == list(RULE_COLUMNS)
    assert about.rules["passed"].tolist() == [True] * 6
    assert list(about.cells.columns) == list(CELL_COLUMNS)
    assert about.cells["stopped"].tolist() == ["interval", "budget", "repeats"]
    assert about.unsupported["metric"].tolist() == ["gpu telemetry", "device_ns"]
    assert list(about.recorder_cost.columns) == list(RECORDER_COLUMNS)
    assert about.recorder_cost["cost"].tolist() == pytest.approx([0.02] * 9)


@pytest.mark.parametrize(
    ("state", "stage", "sentence"),
    [
        ("killed", "start", "Killed: process 4194305 is gone and did not close the run; 0 of 3 cells done"),
        ("interrupted", "mid-cell", "Interrupted: Ctrl-C; 2 of 3 cells done"),
        ("failed", "all", "Failed: RuleError: rows executed (96) differ from gates recorded (128); 3 of 3 cells done"),
        ("running", "mid-cell", "Still running as process"),
    ],
)
def test_the_sentence_says_how_the_run_ended(tmp_path: Path, state: str, stage: str, sentence: str) -> None:
    about = overview(Run(write_example_run(tmp_path / "run", state=state, stage=stage)))  # type: ignore[arg-type]
    assert about.state == state
    assert about.sentence.startswith(sentence)
    assert about.sentence.endswith("; what is on disk is shown.")


def test_labels_of_everything_that_can_be_wrong(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "run", random_weights=True, keeps_text=False, contention=True))
    found = labels(run)
    assert found[0] == "random weights: model tiny has learned nothing, and its routes show nothing"
    assert any(label.startswith("contention detected. Contended: other processes used 38.0%") for label in found)
    assert found[-1] == "text withheld: the spec keeps no prompt or output text"


def test_an_arm_that_computes_everything_is_labelled_wherever_it_stands(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [ArmRecord(name="toy", method="any", discards=True)], {})
    assert labels(run) == ["masked execution in arm toy: every choice computes all rows, so nothing is saved"]
    assert arm_names(run.manifest) == {"toy": "toy (masked execution)"}
    assert warnings_of_arm(run, run.manifest.arms[0]) == ["masked execution"]


def test_broken_rules_drops_and_sessions_are_labels(tmp_path: Path) -> None:
    rule = RuleRecord(rule=1, name="rows executed = gates recorded", arm="a", passed=False, detail="96 against 128")
    arms = [ArmRecord(name="a", method="dense")]
    run = write_run(tmp_path / "run", arms, {}, rules=[rule], drops={"gates": 3, "segments": 1}, origin="session")
    assert labels(run) == [
        "rule 1 (rows executed = gates recorded) does not hold for a: 96 against 128",
        "dropped because the writer fell behind: gates 3, segments 1",
        "a session: the user's own loop, no twin, and every step time includes the recorder",
    ]
    assert dict(overview(run).facts)["model"] == "not recorded"


def test_catalogue_lists_good_and_broken_folders(tmp_path: Path) -> None:
    write_example_run(tmp_path / "good", name="mine")
    write_example_run(tmp_path / "killed", stage="mid-cell", state="killed", arms=("dense",))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "manifest.json").write_text("{")
    (tmp_path / "headless" / "steps").mkdir(parents=True)
    (tmp_path / "headless" / "steps" / "part-x-r0-000000.parquet").write_bytes(b"")
    (tmp_path / "notes").mkdir()
    found = catalogue(tmp_path)
    assert list(found.columns) == list(CATALOGUE_COLUMNS)
    listed = found.set_index(found["path"].map(lambda path: Path(path).name))
    assert set(listed.index) == {"good", "killed", "torn", "headless"}
    good = listed.loc["good"]
    assert (good["name"], good["state"], good["model"], good["arms"]) == (
        "mine",
        "complete",
        "tiny",
        "dense, routed, forced",
    )
    assert (good["cells_done"], good["cells_total"]) == (3, 3)
    assert good["megabytes"] == sum(p.stat().st_size for p in (tmp_path / "good").rglob("*") if p.is_file()) / 1e6
    assert (listed.loc["killed", "state"], listed.loc["killed", "cells_done"]) == ("killed", 2)
    assert found["state"].tolist()[2:] == [BROKEN, BROKEN]
    assert "manifest.json" in listed.loc["torn", "error"]
    assert listed.loc["headless", "error"] == "it has parts of a run and no manifest.json"


def test_catalogue_of_one_run_and_of_nothing(tmp_path: Path) -> None:
    assert catalogue(tmp_path).empty
    assert list(catalogue(tmp_path / "nowhere").columns) == list(CATALOGUE_COLUMNS)
    folder = write_example_run(tmp_path / "run", stage="start")
    assert catalogue(folder)["path"].tolist() == [str(folder)]
