"""Training HeRo on the tiny preset: warm-up and schedule by hand, it learns, and it repeats bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from profiler import arms, checkpoints, methods, models, train, training_log
from profiler.execution.likelihood import predicted, token_nll
from profiler.methods.hero import Hero
from profiler.recorder import Recorder
from tests.profiler.trainings import StopAt, logged, same
from workloads import recipe as recipes
from workloads.recipe import Recipe, TrainingSpec

FLOAT32 = "training.stored_dtype=float32"


def tiny(*overrides: str) -> Recipe:
    return recipes.load("hero-tiny", ["training.threads=1", *overrides])


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "checkpoint" / "hero.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted training, stored in float32."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train.train(tiny(FLOAT32), folder).folder


# -- warm-up and schedule ----------------------------------------------------------------------------


def spec(**settings: Any) -> TrainingSpec:
    return TrainingSpec(**{"steps": 10, "learning_rate": 0.1, **settings})


def test_the_ramp_by_hand() -> None:
    """Of 100 updates 3 % are 3: a third, two thirds, and from the third update on the whole."""
    of_100 = spec(steps=100, warmup_share=0.03)
    assert [train.ramp(of_100, step) for step in (0, 1, 2, 3, 99)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    assert train.warm_up(spec(steps=7339, warmup_share=0.03)) == 221  # 220.17 rounded up
    assert train.ramp(spec(), 0) == 1.0  # no warm-up
    assert train.ramp(spec(steps=2, warmup_share=0.01), 0) == 1.0  # one update is the least there can be


def test_learning_rates_by_hand() -> None:
    warmed = [train.learning_rate(spec(warmup_share=0.2), step) for step in range(10)]
    # 0.05, 0.1, then (1 + cos(π·k/8))/2 of 0.1 for k = 0 … 7
    assert warmed[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert warmed[4] == pytest.approx(0.1 * (1 + 0.7071067811865476) / 2)
    assert warmed[6] == pytest.approx(0.05)
    assert warmed[9] == pytest.approx(0.1 * (1 - 0.9238795325112867) / 2)
    constant = [train.learning_rate(spec(warmup_share=0.2, schedule="constant"), step) for step in range(10)]
    assert constant == pytest.approx([0.05] + [0.1] * 9)
    assert train.learning_rate(spec(warmup_share=1.0), 9) == pytest.approx(0.1)


# -- a training --------------------------------------------------------------------------------------


def test_it_learns_and_says_what_it_did(whole: Path) -> None:
    steps = logged(whole, "step")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert sum(line["loss"] for line in steps[-3:]) < sum(line["loss"] for line in steps[:3]) - 0.6
    assert sum(line["lm"] for line in steps[-3:]) < sum(line["lm"] for line in steps[:3]) - 0.3
    for line in steps:
        assert len(line["skip"]) == 3
        # By Jensen: a mean square is at least the square of the mean.
        assert 0 < line["sum_g"] ** 2 <= line["gate"] * (1 + 1e-6)
    # A fresh router gives every token σ(2) in each of the three layers.
    assert steps[0]["sum_g"] == pytest.approx(3 * 0.8807970779778823, rel=1e-6)
    assert steps[0]["gate"] == pytest.approx((3 * 0.8807970779778823) ** 2, rel=1e-6)
    assert steps[0]["skip_rate"] == 0
    assert steps[-1]["skip_rate"] > 0.9
    assert any(0.05 < line["skip_rate"] < 0.95 for line in steps)


def test_alpha_rises_over_the_warm_up(whole: Path) -> None:
    """12 updates, a tenth of them warm up: 2, so α/2 and then α."""
    used = [(line["loss"] - line["lm"]) / line["gate"] for line in logged(whole, "step")]
    assert used[:8] == pytest.approx([0.015] + [0.03] * 7, rel=1e-3)
    assert [line["lr"] for line in logged(whole, "step")][:3] == pytest.approx([2.5e-3, 5e-3, 5e-3])


def test_figures_are_layerroute_s_with_this_method_s_own_beside_them(whole: Path) -> None:
    lines = logged(whole, "held_out")
    assert [(line["step"], line["stored"]) for line in lines] == [(0, None), (6, None), (12, "float32")]
    for line in lines:
        assert len(line["forget factor"]) == 3
        for figures in line["figures"].values():
            assert list(figures) == [
                "sequences", "tokens", "open", "routed", "skip", "skip_rate", "deciding", "sum_g"
            ]  # fmt: skip
    assert lines[0]["forget factor"] == pytest.approx([0.98] * 3)
    # η_1 decays an empty memory and nobody reads what the third layer would write: only weight decay moved those.
    trained = lines[-1]["forget factor"]
    assert abs(trained[1] - 0.98) > 1e-5
    assert max(abs(trained[0] - 0.98), abs(trained[2] - 0.98)) < 1e-4
    # Before training every FFN runs, scaled; with the gates forced open it is the untouched model throughout.
    assert lines[0]["figures"]["math"]["skip"] == [0, 0, 0]
    assert lines[0]["figures"]["math"]["open"] == lines[-1]["figures"]["math"]["open"]


def test_a_finished_checkpoint_is_an_arm_s(whole: Path) -> None:
    config = methods.configure("hero", {"checkpoint": str(whole / "checkpoint")})
    loaded = models.load("tiny")
    handle = methods.load("hero").wrap(loaded.model, config, Recorder())
    assert isinstance(handle, Hero)
    assert not handle.untrained
    recipe = tiny()
    assert loaded.tokenizer is not None
    items = train.training_data.items(recipe.data, loaded.tokenizer, recipe.training.length)
    members = train.training_data.split(items, recipe.data.held_out, 0).held_out["math"]
    ids_BT, mask_BT = train.training_data.pad(members, torch.device("cpu"))
    skipped: list[float] = []
    decide = handle._decide

    def watched(depth: int, scores: Any) -> Any:
        found = decide(depth, scores)
        skipped.append(float((~found[0]).view_as(mask_BT)[:, :-1][mask_BT[:, 1:]].double().mean()))
        return found

    handle._decide = watched  # type: ignore[method-assign]
    with torch.no_grad():
        logits_BTV = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    loss = float(token_nll(logits_BTV, ids_BT, mask_BT).sum()) / predicted(mask_BT)
    said = logged(whole, "held_out")[-1]["figures"]["math"]
    assert loss == pytest.approx(said["routed"], rel=1e-5)
    assert skipped == pytest.approx(said["skip"], abs=1e-5)


def test_equal_seeds_give_equal_weights_and_others_do_not(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # the caller's random state has no part in it
    train.train(tiny(FLOAT32), tmp_path / "again")
    assert same(tensors(whole), tensors(tmp_path / "again"))
    train.train(tiny(FLOAT32, "training.seed=1", "training.steps=1"), tmp_path / "other")
    assert not same(tensors(whole), tensors(tmp_path / "other"))


def test_gradient_checkpointing_trains_the_same_weights(whole: Path, tmp_path: Path) -> None:
    train.train(tiny(FLOAT32, "training.gradient_checkpointing=true"), tmp_path / "run")
    assert same(tensors(whole), tensors(tmp_path / "run"))


@pytest.mark.parametrize("share", [0.2, 0.55])
def test_an_interrupted_training_goes_on_to_the_same_weights(whole: Path, tmp_path: Path, share: float) -> None:
    """At step 4 no token had taken an adapter yet: nothing had reached their moments."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny(FLOAT32), folder, progress=StopAt(share))
    train.train(tiny(FLOAT32), folder, resume=True)
    assert same(tensors(whole), tensors(folder))
    for mine, theirs in zip(logged(folder, "step"), logged(whole, "step"), strict=True):
        assert mine["loss"] == theirs["loss"]


def test_more_weight_on_the_penalty_skips_more(tmp_path: Path) -> None:
    """Same text, same start: what differs is α alone."""
    used = [
        logged(train.train(tiny(f"objective.alpha={alpha}", "training.steps=5"), tmp_path / alpha).folder, "step")[-1]
        for alpha in ("0.0", "10.0")
    ]
    assert used[1]["sum_g"] < used[0]["sum_g"] - 0.1


def test_bfloat16_trains_float32_numbers(tmp_path: Path) -> None:
    """AdamW's first steps move every value that is reached by lr, here less than bfloat16 can add to a weight."""
    recipe = tiny(FLOAT32, "model.dtype=bfloat16", "training.steps=2", "training.learning_rate=1e-5")
    folder = train.train(recipe, tmp_path / "run").folder
    handle = methods.load("hero").wrap(models.load("tiny").model, methods.configure("hero", {}), Recorder())
    assert isinstance(handle, Hero)
    handle.start(train.training_data.derived(0, "initialisation"))
    moved = (tensors(folder)["router.W_hd.weight"] - handle.router.W_hd.weight.detach()).abs()
    assert float((moved > 0).double().mean()) > 0.9
    assert float(moved.max()) < 3e-5


def test_the_summary_is_in_the_method_s_words(whole: Path) -> None:
    said = train.summary(train.Trained(whole, training_log.read(whole)))
    assert said[0] == "held-out loss, nats a token"  # a token's gate sees nothing of what is scored
    assert "of (token, layer) pairs took the adapter" in said[1]
    assert math.isfinite(json.loads((whole / "log.jsonl").read_text().splitlines()[-1])["seconds"])


def test_a_recipe_s_method_options_reach_the_checkpoint(tmp_path: Path) -> None:
    recipe = tiny("method.layers=[1, 4]", "method.variant=no_path", "method.adapter_width=5", "training.steps=1")
    folder = train.train(recipe, tmp_path / "run").folder
    facts = json.loads((folder / "checkpoint" / "config.json").read_text())
    assert facts["options"] == {"layers": [1, 4], "adapter_width": 5, "threshold": 0.5, "variant": "no_path"}
    assert facts["base"] == "tiny"
    model = arms.sibling(models.load("tiny").model)
    options = checkpoints.resolve("hero", {"checkpoint": str(folder / "checkpoint")}, model)
    handle = methods.load("hero").wrap(model, methods.configure("hero", options), Recorder())
    assert isinstance(handle, Hero)
    assert handle.routable == [1, 4]
