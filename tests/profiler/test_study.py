"""A study end to end on the tiny preset: what seeds share, what a kill costs, what is refused before training."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from analysis.study import compare
from profiler import study, study_folder, train
from profiler.cli import app
from profiler.errors import InputError, RuleError
from profiler.run import Quiet
from profiler.store import Run
from profiler.study_folder import SPEC, STUDY, Study, run_folder, training_folder
from tests.profiler.tiny_runs import contents
from tests.profiler.trainings import StopAt, same
from workloads import loading, recipe
from workloads.spec import Spec

SPEC_DATA: dict[str, Any] = {
    "name": "two",
    "model": {"source": "tiny", "device": "cpu"},
    "train": {
        "recipe": "layerroute-tiny",
        "set": {
            "data.generated": {"math": 12, "tool_call": 12}, "data.held_out": 2, "training.steps": 2,
            "training.batch": 2, "training.accumulation": 1, "training.checkpoint_every": 1, "training.threads": 1,
            "training.stored_dtype": "float32",
        },
    },
    "seeds": [0, 5],
    "arms": [
        {"name": "dense", "method": "dense"},
        {"name": "routed", "method": "layerroute", "checkpoint": "trained"},
    ],
    "cells": {"prefill": {"batch": [2], "length": [8]}},
    "measure": {"warmup": 0, "max_repeats": 3, "seed": 7, "threads": 1},
    "quality": {"domains": ["math"], "count": 8, "max_tokens": 24},
}  # fmt: skip


def spec(**changes: Any) -> Spec:
    return Spec.model_validate(SPEC_DATA | changes)


class Told(Quiet):
    """Keeps the stages it was told, each with the shares of it, and the shares of the whole."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, list[float]]] = []
        self.shares: list[float] = []

    def say(self, what: str) -> None:
        self.stages.append((what, []))

    def part(self, share: float) -> None:
        self.stages[-1][1].append(share)

    def at(self, share: float) -> None:
        self.shares.append(share)


TOLD = Told()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted study."""
    threads = torch.get_num_threads()
    folder = study.run(spec(), tmp_path_factory.mktemp("whole") / "study", progress=TOLD)
    assert torch.get_num_threads() == threads
    return folder


def test_progress_tells_the_seed_the_share_of_its_stage_and_that_of_the_whole(whole: Path) -> None:
    assert TOLD.shares == sorted(TOLD.shares)
    assert TOLD.shares[-1] == 1.0
    for seed in (0, 5):
        of_seed = [shares for what, shares in TOLD.stages if what.startswith(f"seed {seed}: ")]
        assert max(max(shares, default=0.0) for shares in of_seed) == 1.0


def weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    checkpoint = training_folder(folder, seed) / train.CHECKPOINT
    return load_file(checkpoint / "routers.safetensors") | load_file(checkpoint / "adapter_model.safetensors")


def decisions(run: Run) -> list[tuple[Any, ...]]:
    columns = "cell, arm, phase, request, layer, site, choices::varchar, gate, rows"
    return sorted(run.table("gates").project(columns).fetchall())


# -- what a study is ------------------------------------------------------------------------------------------------


def test_each_seed_is_trained_and_measured_into_folders_of_its_own(whole: Path) -> None:
    found = Study(whole)
    assert found.done == [0, 5]
    assert [(r.seed, r.trained, r.measured, r.failed) for r in found.record.seeds] == [
        (0, True, True, None), (5, True, True, None)
    ]  # fmt: skip
    assert found.record.finished_utc is not None
    assert found.record.trained_arms == ["routed"]
    assert loading.load(whole / SPEC).sha256() == found.record.spec_sha256 == spec().sha256()
    for seed in (0, 5):
        of_seed = recipe.load(training_folder(whole, seed) / train.RECIPE_FILE)
        assert (of_seed.training.seed, of_seed.training.steps) == (seed, 2)
        assert Run(run_folder(whole, seed)).state == "complete"
    assert not same(weights(whole, 0), weights(whole, 5))


def test_a_seed_s_run_is_one_like_any_other(whole: Path) -> None:
    for seed, run in Study(whole).runs().items():
        of_seed = loading.load(run.path / "spec.yaml")
        assert (of_seed.name, of_seed.train, of_seed.seeds) == (f"two-seed-{seed}", None, None)
        assert of_seed.sha256() == run.manifest.spec_sha256
        checkpoint = str(training_folder(whole, seed) / train.CHECKPOINT)
        assert of_seed.arms[1].options["checkpoint"] == checkpoint == run.manifest.arm("routed").options["checkpoint"]
        assert not run.manifest.arm("routed").untrained
        # The order of arms is each seed's own; text and backbone are the study's.
        assert of_seed.measure.seed == 7 + seed
        assert (of_seed.model.seed, of_seed.prompts.seed) == (0, 0)


def test_every_seed_is_measured_on_the_same_inputs(whole: Path) -> None:
    """The same prompts and items, to the token, and the same score where nothing was trained."""
    first, second = Study(whole).runs().values()
    columns = "cell, request, domain, tokens, mean_token_rank, text"
    prompts = [sorted(run.table("prompts").project(columns).fetchall()) for run in (first, second)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 2 + 8
    scores = [
        dict(run.table("scores").filter("arm = 'dense'").project("item, nll").fetchall()) for run in (first, second)
    ]
    assert scores[0] == scores[1]
    routed = [
        dict(run.table("scores").filter("arm = 'routed'").project("item, nll").fetchall()) for run in (first, second)
    ]
    assert routed[0] != routed[1]


def test_what_seeds_share_can_be_compared(whole: Path) -> None:
    found = compare(Study(whole))
    assert found.seeds == [0, 5]
    assert set(found.lines["part"]) == {"pattern", "speed", "quality"}
    assert (found.lines["verdict"] == "").all()
    assert found.pairs[["first", "second"]].to_numpy().tolist() == [[0, 5]]
    assert found.pairs["requests"].tolist() == [8]


# -- interrupted, killed, failed ------------------------------------------------------------------------------------


# A seed is a half, its training a quarter: in training, in measuring, and in both again for the second seed.
@pytest.mark.parametrize(
    "share", [0.1, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.6, marks=pytest.mark.slow), 0.76]
)
def test_an_interrupted_study_goes_on_to_the_same(whole: Path, tmp_path: Path, share: float) -> None:
    folder = tmp_path / "study"
    with pytest.raises(KeyboardInterrupt) as caught:
        study.run(spec(), folder, progress=StopAt(share))
    assert f"the study goes on with --out {folder} --resume" in caught.value.__notes__
    done = Study(folder).done
    assert done == ([0] if share > 0.5 else [])
    before = contents(folder / "seed-0") if done else {}
    study.run(spec(), folder, resume=True)
    assert Study(folder).done == [0, 5]
    if done:
        assert contents(folder / "seed-0") == before
    for seed in (0, 5):
        assert same(weights(folder, seed), weights(whole, seed))
        assert decisions(Run(run_folder(folder, seed))) == decisions(Run(run_folder(whole, seed)))


@pytest.fixture
def copy(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study to be damaged. It stands where it was written, since its runs name their checkpoints by that path."""
    aside = tmp_path / "aside"
    shutil.copytree(whole, aside)
    yield whole
    shutil.rmtree(whole)
    shutil.move(aside, whole)


def forget(folder: Path, seed: int, **changes: Any) -> None:
    """Put `study.json` back to before a seed was done."""
    file = folder / STUDY
    record = json.loads(file.read_text())
    (of_seed,) = (r for r in record["seeds"] if r["seed"] == seed)
    of_seed |= changes
    file.write_text(json.dumps(record))


def test_killed_between_the_end_of_a_run_and_the_note_of_it(copy: Path) -> None:
    before = contents(copy / "seed-5")
    forget(copy, 5, measured=False)
    study.run(spec(), copy, resume=True)
    assert Study(copy).done == [0, 5]
    assert contents(copy / "seed-5") == before


def test_killed_before_a_training_wrote_its_recipe(copy: Path, whole: Path) -> None:
    wanted = weights(copy, 5)
    shutil.rmtree(copy / "seed-5")
    training_folder(copy, 5).mkdir(parents=True)
    (training_folder(copy, 5) / "log.jsonl").write_text("")
    forget(copy, 5, trained=False, measured=False)
    study.run(spec(), copy, resume=True)
    assert same(weights(copy, 5), wanted)


def test_killed_before_the_study_wrote_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / SPEC).write_text("name: two\n")
    (folder / f".{STUDY}.tmp-1").write_text("{")
    monkeypatch.setattr(study, "_go_through", lambda *given: None)
    assert study.run(spec(), folder, resume=True) == folder


def test_a_finished_study_is_left_alone(whole: Path) -> None:
    before = contents(whole)
    assert study.run(spec(), whole, resume=True) == whole
    assert contents(whole) == before


def test_a_seed_that_breaks_a_rule_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.train

    def diverges(given: recipe.Recipe, *more: Any, **named: Any) -> Any:
        if given.training.seed == 0:
            raise RuleError("training step 1: the loss is nan")
        return real(given, *more, **named)

    folder = tmp_path / "study"
    monkeypatch.setattr(train, "train", diverges)
    with pytest.raises(
        RuleError, match="1 of 2 seeds failed; seed 0: training step 1: the loss is nan. The others are"
    ):
        study.run(spec(), folder)
    assert Study(folder).done == [5]
    assert Study(folder).record.seeds[0].failed == "training step 1: the loss is nan"
    assert "seed 0 failed: training step 1: the loss is nan" in compare(Study(folder)).labels
    monkeypatch.undo()
    study.run(spec(), folder, resume=True)
    assert Study(folder).done == [0, 5]
    assert Study(folder).record.seeds[0].failed is None


# -- what is refused, before anything is trained ----------------------------------------------------------------------


def changed_set(**changes: Any) -> dict[str, Any]:
    return {
        **SPEC_DATA["train"],
        "set": {**SPEC_DATA["train"]["set"], **{k.replace("__", "."): v for k, v in changes.items()}},
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": changed_set(training__stesp=1)}, "train: set training.stesp=1: training.stesp: unknown key"),
        ({"train": {"recipe": "layerroute-tyni"}}, "train: layerroute-tyni: neither a file nor a built-in recipe"),
        (
            {"train": changed_set(objective__weight=1)},
            "train: objective.weight: method 'layerroute' has no such option",
        ),
        ({"train": changed_set(method__gates="opne")}, "train: method.gates"),
        (
            {"model": {"source": "smollm2-135m-random", "device": "cpu"}},
            "trains on tiny, and the arms run on smollm2-135m-random; set model.source under train.set",
        ),
        ({"model": {"source": "tiny", "seed": 3}}, "has model.seed 0 and the spec 3; the weights of tiny are random"),
        (
            {"arms": [SPEC_DATA["arms"][0], {"name": "cut", "method": "static_depth", "checkpoint": "trained"}]},
            "arms.cut.checkpoint: trained is of method 'layerroute' (recipe 'layerroute-tiny')",
        ),
        ({"cells": {"prefill": {"batch": [1], "length": [4000]}}}, "reaches position 4,000, and tiny has positions"),
        ({"prompts": {"source": "gone.jsonl"}}, "gone.jsonl"),
        ({"quality": {"max_tokens": 8192, "source": "long.jsonl"}}, "the model has positions for 2,048"),
    ],
)
def test_what_cannot_work_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text(json.dumps({"prompt": "word " * 2000}) + "\n")
    with pytest.raises(InputError) as caught:
        study.run(spec(**changes), tmp_path / "study")
    assert sentence in str(caught.value)
    assert not (tmp_path / "study").exists()


def test_text_that_is_trained_on_is_not_scored(tmp_path: Path) -> None:
    """Each seed holds out other items, so an item of the recipe would be trained on with one seed or another."""
    lines = [{"prompt": f"Question {k}", "reference": "Answer"} for k in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "scored.jsonl").write_text(json.dumps({"prompt": " Question   5\n", "id": "x"}) + "\n")
    given = changed_set(data__files=[str(tmp_path / "text.jsonl")])
    with pytest.raises(InputError, match=r"item 'x' is also text of recipe 'layerroute-tiny' \(1 items are\)"):
        study.recipe_of(spec(train=given, quality={"source": str(tmp_path / "scored.jsonl")}))
    assert study.recipe_of(spec(train=given)).data.files == [str(tmp_path / "text.jsonl")]


def test_no_built_in_recipe_trains_on_the_built_in_prompts() -> None:
    """What makes builtin quality sound for the built-in studies, whatever a seed holds out."""
    for name in ("layerroute-seeds", "layerroute-seeds-tiny"):
        assert study.recipe_of(loading.load(name)).data.files == []


def test_folders(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(InputError, match="--resume needs --out DIR, the folder of the unfinished study"):
        study.run(spec(), None, resume=True)
    with pytest.raises(InputError, match="there is no such folder"):
        study.run(spec(), tmp_path / "absent", resume=True)
    with pytest.raises(InputError, match="and it holds a study. Choose another folder, or --resume"):
        study.run(spec(), whole)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="and it holds other files"):
        study.run(spec(), tmp_path / "taken")
    with pytest.raises(InputError, match="it is a file"):
        study.run(spec(), tmp_path / "taken" / "thesis.tex")
    with pytest.raises(InputError, match=r"its spec \(sha256 .*\) is not the one given"):
        study.run(spec(seeds=[0, 5, 6]), whole, resume=True)


def test_a_recipe_that_has_changed_since_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(recipe.builtin_recipes()["layerroute-tiny"].read_text())
    given = spec(train={**SPEC_DATA["train"], "recipe": str(file)})
    with pytest.raises(KeyboardInterrupt):
        study.run(given, tmp_path / "study", progress=StopAt(0.1))
    file.write_text(file.read_text().replace("gate_weight: 1.0", "gate_weight: 2.0"))
    with pytest.raises(InputError, match=r"its recipe \(sha256 .*\) is not the one given"):
        study.run(given, tmp_path / "study", resume=True)


def test_a_second_process_is_kept_out(copy: Path) -> None:
    forget(copy, 5, measured=False)
    handle = os.open(copy, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is writing this study"):
            study.run(spec(), copy, resume=True)
    finally:
        os.close(handle)


# -- as it is typed ---------------------------------------------------------------------------------------------------


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(SPEC_DATA))
    assert "two: valid; 2 arms × 1 cells × 2 seeds" in call("validate", "s.yaml").stderr
    wrong = call("validate", "s.yaml", "--set", "train.set.training.steps=0")
    assert wrong.exit_code == 2
    assert "train: built-in recipe layerroute-tiny: training.steps: must be at least 1" in wrong.stderr

    dry = call("run", "s.yaml", "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)["seeds"] == 2
    assert not Path("runs").exists()

    shutil.copytree(whole, "copied")
    done = call("run", "s.yaml", "--out", "copied", "--resume", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert (printed["study"], printed["report"], printed["seeds"]) == ("copied", "copied.html", [0, 5])
    assert {line["part"] for line in printed["lines"]} == {"pattern", "speed", "quality"}
    assert "2 of 2 seeds trained and measured" in done.stderr
    assert Path("copied.html").stat().st_size > 1_000_000

    for format in ("md", "csv", "json"):
        told = call("report", "copied", "--format", format, "--out", "-")
        assert told.exit_code == 0, told.output
        assert "routed" in told.stdout
    assert call("report", str(run_folder(Path("copied"), 5)), "--format", "md").exit_code == 0
    assert (Path("copied") / "seed-5" / "run.md").exists()
    assert call("report", "copied", "--format", "pdf").exit_code == 2


def test_the_measured_seed_wraps_around() -> None:
    given = spec(measure={"seed": 2**32 - 1})
    assert study.run_spec(given, 5, Path("c")).measure.seed == 4
    assert study_folder.run_folder(Path("a"), 5) == Path("a/seed-5/run")
