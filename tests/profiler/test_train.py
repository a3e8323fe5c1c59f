"""Training on the tiny preset: it learns, it repeats bit for bit, and a kill costs nothing but time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from profiler import methods, models, train
from profiler.errors import InputError, RuleError
from profiler.execution.likelihood import predicted, token_nll
from profiler.recorder import Recorder
from tests.profiler.trainings import StopAt, logged, same
from workloads import recipe as recipes
from workloads.prompts import load_prompts
from workloads.recipe import Recipe
from workloads.spec import QualitySpec

REPOSITORY = Path(__file__).parents[2]


def tiny(*overrides: str) -> Recipe:
    return recipes.load("layerroute-tiny", ["training.threads=1", *overrides])


def tensors(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / "checkpoint" / "routers.safetensors")
    return found | load_file(folder / "checkpoint" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted training, stored in float32."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train.train(tiny("training.stored_dtype=float32"), folder).folder


def test_it_learns_and_says_what_it_did(whole: Path) -> None:
    steps = logged(whole, "step")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert sum(line["lm"] for line in steps[-3:]) < sum(line["lm"] for line in steps[:3]) - 0.1
    for line in steps:
        # λ is 1 in the recipe, so the loss is the sum of its two parts.
        assert line["loss"] == pytest.approx(line["lm"] + line["gate"], rel=1e-6)
        assert len(line["skip"]) == 6
        assert line["skip_rate"] == pytest.approx(sum(line["skip"]) / 6)
        assert line["tokens_per_s"] > 0
    assert [line["lr"] for line in steps] == pytest.approx(
        [2e-3 * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)]
    )
    seconds = [line["seconds"] for line in steps]
    assert seconds == sorted(seconds)
    assert [(line["step"], line["stored"]) for line in logged(whole, "held_out")] == [
        (0, None), (6, None), (12, "float32")
    ]  # fmt: skip
    (start,) = logged(whole, "start")
    assert start["trainable_parameters"] == 6 * (64 + 1) + 6 * 2 * (4 * 64 + 64 + 32 + 64 + 32)
    assert start["items"] == 120
    assert recipes.load(whole / "recipe.yaml") == tiny("training.stored_dtype=float32")


def test_the_held_out_text_is_a_file_that_quality_takes(whole: Path) -> None:
    recipe = tiny()
    tokenizer = models.load("tiny").tokenizer
    assert tokenizer is not None
    items = train.training_data.items(recipe.data, tokenizer, recipe.training.length)
    split = train.training_data.split(items, recipe.data.held_out, recipe.training.seed)
    kept = load_prompts(QualitySpec(source=str(whole / train.HELD_OUT_FILE), count=1000))
    assert sorted(p.id for p in kept) == sorted(item.id for group in split.held_out.values() for item in group)
    assert {len(p.choices) for p in kept} == {4}
    assert not {item.id for item in split.training} & {p.id for p in kept}


def test_held_out_figures_are_those_of_the_untouched_model_at_first(whole: Path) -> None:
    """At step 0 B is zero, so with every gate open the arm is the backbone; computed here one item at a time."""
    recipe = tiny()
    loaded = models.load("tiny")
    items = train.training_data.items(recipe.data, loaded.tokenizer, recipe.training.length)  # type: ignore[arg-type]
    split = train.training_data.split(items, recipe.data.held_out, recipe.training.seed)
    (first, *_) = logged(whole, "held_out")
    for domain, members in split.held_out.items():
        nll = tokens = 0.0
        for item in members:
            ids = torch.tensor([item.ids])
            with torch.no_grad():
                log_p = torch.log_softmax(loaded.model(ids).logits[0].double(), -1)
            nll -= sum(float(log_p[t, item.ids[t + 1]]) for t in range(len(item.ids) - 1))
            tokens += len(item.ids) - 1
        assert first["figures"][domain]["tokens"] == tokens
        assert first["figures"][domain]["open"] == pytest.approx(nll / tokens, rel=1e-5)
        # Untrained routers skip the two middle layers of six for any input.
        assert first["figures"][domain]["skip"] == [0, 0, 1, 1, 0, 0]
        assert first["figures"][domain]["deciding"] == 0


def test_a_finished_checkpoint_is_an_arm_s(whole: Path) -> None:
    config = methods.configure("layerroute", {"checkpoint": str(whole / "checkpoint")})
    loaded = models.load("tiny")
    handle = methods.load("layerroute").wrap(loaded.model, config, Recorder())
    assert not handle.untrained
    assert (handle.config.lora.rank, handle.config.lora.alpha, handle.config.lora.dropout) == (2, 4.0, 0.1)
    # Its own forward gives the routed loss the log ends with.
    recipe = tiny()
    items = train.training_data.items(recipe.data, loaded.tokenizer, recipe.training.length)  # type: ignore[arg-type]
    members = train.training_data.split(items, recipe.data.held_out, 0).held_out["math"]
    ids_BT, mask_BT = train.training_data.pad(members, torch.device("cpu"))
    with torch.no_grad():
        logits_BTV = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    loss = float(token_nll(logits_BTV, ids_BT, mask_BT).sum()) / predicted(mask_BT)
    assert loss == pytest.approx(logged(whole, "held_out")[-1]["figures"]["math"]["routed"], rel=1e-5)


def test_equal_seeds_give_equal_weights_and_others_do_not(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # the caller's random state has no part in it
    torch.rand(7)
    train.train(tiny("training.stored_dtype=float32"), tmp_path / "again")
    assert same(tensors(whole), tensors(tmp_path / "again"))
    train.train(tiny("training.stored_dtype=float32", "training.seed=1"), tmp_path / "other")
    assert not same(tensors(whole), tensors(tmp_path / "other"))


def test_the_caller_s_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    train.train(tiny("training.steps=1"), tmp_path / "run")
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("share", [0.2, 0.55, 0.99])
def test_an_interrupted_training_goes_on_to_the_same_weights(whole: Path, tmp_path: Path, share: float) -> None:
    recipe, folder = tiny("training.stored_dtype=float32"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.train(recipe, folder, progress=StopAt(share))
    assert not (folder / "checkpoint").exists()
    train.train(recipe, folder, resume=True)
    assert same(tensors(whole), tensors(folder))
    assert [line["step"] for line in logged(folder, "step")] == list(range(1, 13))
    assert [line["step"] for line in logged(folder, "held_out")] == [0, 6, 12]
    for mine, theirs in zip(logged(folder, "step"), logged(whole, "step"), strict=True):
        assert mine["loss"] == theirs["loss"]


def test_resuming_a_finished_training_changes_nothing(whole: Path, tmp_path: Path) -> None:
    recipe = tiny("training.stored_dtype=float32")
    train.train(recipe, tmp_path / "run")
    train.train(recipe, tmp_path / "run", resume=True)
    assert same(tensors(whole), tensors(tmp_path / "run"))
    assert [line["step"] for line in logged(tmp_path / "run", "held_out")] == [0, 6, 12]
    assert len(logged(tmp_path / "run", "end")) == 1


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_weights(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "profiler", "train", "layerroute-tiny", "--out", str(folder)]
    command += ["--set", "training.threads=1", "--set", "training.stored_dtype=float32"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "state").is_dir() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (folder / "state").is_dir()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(tensors(whole), tensors(folder))


def test_another_recipe_does_not_go_on_with_a_state(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny(), folder, progress=StopAt(0.5))
    with pytest.raises(InputError, match="it is of another recipe"):
        train.train(tiny("objective.gate_weight=2.0"), folder, resume=True)


def test_gates_close_under_a_heavy_weight_and_open_under_none(tmp_path: Path) -> None:
    heavy = tiny("objective.gate_weight=50.0", "training.steps=25", "training.learning_rate=0.05")
    light = tiny("objective.gate_weight=0.0", "training.steps=25", "training.learning_rate=0.05")
    gates = [
        logged(train.train(recipe, tmp_path / name).folder, "step")[-1]["gate"]
        for name, recipe in (("heavy", heavy), ("light", light))
    ]
    assert gates[0] < 0.35 < gates[1]


def test_a_loss_that_is_no_longer_finite_ends_the_training_and_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layerroute = methods.load("layerroute")
    real = layerroute.losses  # type: ignore[attr-defined]
    calls = {"count": 0}

    def losses(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        calls["count"] += 1
        # 4 held-out batches, then 2 micro-batches a step: the tenth step.
        return found if calls["count"] < 4 + 2 * 9 + 4 else dataclasses.replace(found, total=found.total * float("nan"))

    monkeypatch.setattr(layerroute, "losses", losses)
    with pytest.raises(RuleError, match="the loss is nan .* the state after step 8 is kept"):
        train.train(tiny(), tmp_path / "run")
    assert (tmp_path / "run" / "state" / "step-00000008").is_dir()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=dense"], "method 'dense' has nothing to train|no such option"),
        (["method.lora.rank=0"], "method.lora.*rank: Input should be greater than or equal to 1"),
        (["method.gates=open"], "training needs gates: router"),
        (["training.gradient_checkpointing=true"], "training.gradient_checkpointing: LayerRoute does not offer it"),
        (["objective.weight=1"], "objective.weight: method 'layerroute' has no such option"),
        (["data.held_out=60"], "data.held_out .60. must leave text to train on"),
    ],
)
def test_what_the_user_can_put_right_is_said_before_training(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train.train(tiny(*overrides), tmp_path / "run")


def test_folders(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").write_text("")
    with pytest.raises(InputError, match="the folder is not empty; take another, or add --resume"):
        train.train(tiny(), taken)
    with pytest.raises(InputError, match=r"there is no recipe.yaml in it, so it is not a training's folder"):
        train.train(tiny(), taken, resume=True)
    with pytest.raises(InputError, match="it is a file"):
        train.train(tiny(), taken / "something")
    with pytest.raises(InputError, match="there is no such folder"):
        train.train(tiny(), tmp_path / "absent", resume=True)
    with pytest.raises(InputError, match="--resume needs --out"):
        train.train(tiny(), None, resume=True)


def test_the_command_trains_and_reports(tmp_path: Path) -> None:
    from profiler.cli import app

    arguments = ["train", "layerroute-tiny", "--out", str(tmp_path / "run"), "--set", "training.steps=2"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    said = " ".join(done.stderr.split())
    assert "step 2/2 loss" in said
    assert "math: untouched backbone" in said
    assert json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())["base"] == "tiny"
