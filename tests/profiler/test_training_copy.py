"""What a run keeps of its checkpoints' trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.training import trainings
from profiler import run as running
from profiler import train, training_copy, training_log
from profiler.errors import StoreError
from profiler.records import ArmRecord
from profiler.store import Run
from tests.profiler.tiny_runs import tiny_spec
from workloads import recipe as recipes


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text(f"{name} of {path.name}")
    return path


def arm(checkpoint: Path | None, name: str = "a") -> ArmRecord:
    return ArmRecord(name=name, method="any", options={"checkpoint": None if checkpoint is None else str(checkpoint)})


def test_a_log_lies_beside_what_ships_or_beside_the_checkpoint_of_a_training(tmp_path: Path) -> None:
    ships = folder_with(tmp_path / "ships", "log.jsonl", "recipe.yaml", "config.json")
    trained = folder_with(tmp_path / "trained", "log.jsonl", "recipe.yaml")
    made = folder_with(trained / "checkpoint", "config.json")
    assert training_copy.trained_in(ships) == ships
    assert training_copy.trained_in(made) == trained
    # A folder of another name beside a log may be anything.
    assert training_copy.trained_in(folder_with(trained / "copy", "config.json")) is None
    assert training_copy.trained_in(folder_with(tmp_path / "half" / "checkpoint", "log.jsonl")) is None


def test_arms_without_a_log_keep_none(tmp_path: Path) -> None:
    bare = folder_with(tmp_path / "bare", "config.json")
    training_copy.keep(tmp_path / "run", [arm(None), arm(bare, "b"), ArmRecord(name="c", method="any")])
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    ships = folder_with(tmp_path / "ships", "log.jsonl", "recipe.yaml")
    with pytest.raises(StoreError, match="the training log cannot be kept"):
        training_copy.keep(tmp_path / "run", [arm(ships)])


def test_a_run_shows_how_its_arm_was_trained_though_the_training_is_gone(tmp_path: Path) -> None:
    recipe = recipes.load("layerroute-tiny", ["training.steps=2", "data.held_out=2", "training.threads=1"])
    trained = train.train(recipe, tmp_path / "trained")
    arms = [
        {"name": "dense", "method": "dense"},
        {"name": "routed", "method": "layerroute", "checkpoint": str(trained.checkpoint)},
    ]
    folder = running.run(tiny_spec(arms=arms), tmp_path / "run")
    log = training_log.read(trained.folder)
    trained.folder.rename(tmp_path / "elsewhere")
    found = trainings(Run(folder))["routed"]
    assert found.recipe == recipe.to_yaml()
    assert found.finished
    assert found.steps["loss"].tolist() == [line["loss"] for line in log if line["kind"] == "step"]
    assert sorted(p.name for p in (folder / "training").iterdir()) == ["routed"]
