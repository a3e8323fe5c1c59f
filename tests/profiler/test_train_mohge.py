"""Training MoHGE whole: both losses by hand, what is trained, figures, and a checkpoint that is a model by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import methods, models, train, training_log
from profiler.arms import tree
from profiler.errors import InputError
from profiler.execution.likelihood import predicted, token_nll
from profiler.execution.mohge_training import predicting
from profiler.methods.mohge import Mohge
from profiler.recorder import Recorder
from profiler.training_data import items, split
from workloads import recipe as recipes
from workloads.recipe import Recipe

FLOAT32 = "training.stored_dtype=float32"


def tiny(*overrides: str) -> Recipe:
    return recipes.load("mohge-tiny", ["training.threads=1", *overrides])


def handle_of(dtype: str = "float32", **changes: Any) -> Mohge:
    model = models.load("tiny", dtype, "cpu").model
    config = methods.configure("mohge", {**tiny().method.options, **changes})
    found = methods.load("mohge").wrap(model, config, Recorder())
    assert isinstance(found, Mohge)
    found.prepare(False)
    return found


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of 6 and 4 tokens: 5 + 3 are predicted."""
    ids_BT = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
    return ids_BT, torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train.train(tiny(FLOAT32), tmp_path_factory.mktemp("mohge") / "run").folder


# -- one update --------------------------------------------------------------------------------------


def test_losses_and_figures_where_the_router_has_no_preference() -> None:
    """Logits of 0: of 4 groups the first 2 are kept and of their 4 experts the first 3, widths 8 8 16, in 5 layers.

    L_G = Σ (W_g/32)·f_g with f = ½ for groups 0 and 1: 0.375. L_E: half of each expert's softmax, shares ½ + ½ in
    group 0 and 1 + 0 in group 1: 1. Each with α 0.1, in each layer.
    """
    handle = handle_of()
    with torch.no_grad():
        for block in handle.blocks.values():
            block.router.weight.zero_()
    ids_BT, mask_BT = batch()
    found = handle.losses(ids_BT, mask_BT, None, tokens=8, sequences=2)
    with torch.no_grad():
        logits = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    nll = float(token_nll(logits, ids_BT, mask_BT).sum())
    assert found.deciders == predicted(mask_BT) == 8
    assert float(found.nll) == pytest.approx(nll)
    assert float(found.total.detach()) == pytest.approx(nll / 8 + 5 * (0.1 * 0.375 + 0.1 * 1.0))
    assert float(found.penalty) == pytest.approx(8 * 5 * 0.1375)
    assert found.ran_L.tolist() == [8] * 5
    means = {name: float(value) / 8 for name, value in found.sums.items()}
    assert means == pytest.approx(
        {
            "width": 32,
            "group_0": 2 / 3,
            "group_1": 1 / 3,
            "group_2": 0,
            "group_3": 0,
            "busiest": 8 / 3,
            "loss_group": 5 * 0.0375,
            "loss_expert": 5 * 0.1,
        }
    )


def test_micro_batches_add_up_to_the_batch_without_auxiliary_losses() -> None:
    handle = handle_of(alpha_group=0, alpha_expert=0)
    ids_BT, mask_BT = batch()
    whole = handle.losses(ids_BT, mask_BT, None, tokens=8, sequences=2)
    parts = [handle.losses(ids_BT[i : i + 1], mask_BT[i : i + 1], None, tokens=8, sequences=2) for i in range(2)]
    assert sum(float(part.total.detach()) for part in parts) == pytest.approx(float(whole.total.detach()), rel=1e-5)
    assert sum(part.deciders for part in parts) == whole.deciders
    assert sum(float(part.sums["width"]) for part in parts) == pytest.approx(float(whole.sums["width"]))


def test_rows_that_predict_are_those_that_are_counted() -> None:
    _, mask_BT = batch()
    assert predicting(mask_BT).view(2, 6).tolist() == [[True] * 5 + [False], [True] * 3 + [False] * 3]
    assert int(predicting(mask_BT).sum()) == predicted(mask_BT)


def test_what_is_trained_is_all_that_has_a_part() -> None:
    handle = handle_of()
    names = handle.trainables()
    mlp = [name for name in names if ".mlp." in name]
    assert mlp == [f"backbone.model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    # The tiny model less five dense halves, and five layers of 2 experts of each width, and a router of 4 + 8 rows.
    backbone = 312_320 - 5 * 3 * 64 * 192
    assert sum(p.numel() for p in names.values()) == backbone + 5 * (3 * 64 * 2 * (8 + 16 + 24 + 32) + 64 * 12)
    assert all(name.split(".")[0] != "backbone" for name in handle_of(backbone="kept").trainables())


def test_every_part_that_took_part_has_a_gradient() -> None:
    handle = handle_of()
    ids_BT = torch.arange(200).view(2, 100)
    handle.losses(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), None, tokens=198, sequences=2).total.backward()
    parts = handle.trainables()
    without = [name for name, parameter in parts.items() if parameter.grad is None or not parameter.grad.any()]
    assert without == []


@pytest.mark.parametrize("strategy", ["packed", "per_width", "padded", "sequential"])
def test_experts_are_trained_in_float32_over_a_bfloat16_model_that_is_kept(strategy: str) -> None:
    handle = handle_of("bfloat16", backbone="kept", strategy=strategy)
    ids_BT, mask_BT = batch()
    found = handle.losses(ids_BT, mask_BT, None, tokens=8, sequences=2)
    found.total.backward()
    assert {parameter.dtype for parameter in handle.trainables().values()} == {torch.float32}
    assert handle.model.get_input_embeddings().weight.dtype == torch.bfloat16
    wanted = handle_of(backbone="kept", strategy=strategy).losses(ids_BT, mask_BT, None, tokens=8, sequences=2)
    assert float(found.nll) == pytest.approx(float(wanted.nll), rel=0.02)
    with torch.no_grad():
        assert handle.model(input_ids=ids_BT, attention_mask=mask_BT).logits.dtype == torch.bfloat16


def test_several_ranks_and_checkpointing_are_refused() -> None:
    with pytest.raises(InputError, match="gradient_checkpointing: Mohge does not offer it"):
        handle_of().prepare(True)
    handle = handle_of()
    handle.member = object()
    with pytest.raises(InputError, match="this one is one of several ranks"):
        handle.prepare(False)


def test_words_are_of_loss_and_shares_and_of_no_gate() -> None:
    figures = {
        "routed": 2.3456, "open": 9.9, "skip_rate": 0.0, "deciding": 0, "width": 150.6, "busiest": 1.239,
        "group_0": 0.4, "group_1": 0.35, "group_10": 0.05, "group_2": 0.2, "loss_group": 0.1,
    }  # fmt: skip
    assert Mohge.held_out_words(figures) == (
        "loss 2.346; a token takes a routed width of 151 a layer, groups in order 40% / 35% / 20% / 5%, busiest expert "
        "1.24 × mean"
    )
    assert Mohge.before_words(figures) == "before training 2.346"
    assert Mohge.step_words(figures) == "routed width 151  busiest 1.24 × mean"


# -- a whole training --------------------------------------------------------------------------------


def test_it_learns_and_says_where_tokens_went(trained: Path) -> None:
    log = training_log.read(trained)
    steps = [line for line in log if line["kind"] == "step"]
    assert steps[-1]["lm"] < steps[0]["lm"] - 0.3
    for line in steps:
        assert sum(line[f"group_{g}"] for g in range(4)) == pytest.approx(1, abs=1e-4)
        assert 8 <= line["width"] / 3 <= 32
        assert line["skip_rate"] == 0
    before, *_, after = [line["figures"] for line in log if line["kind"] == "held_out"]
    assert set(after) == {"math", "tool_call"}
    assert all(after[domain]["routed"] < before[domain]["routed"] - 0.3 for domain in after)
    assert all("group_3" in after[domain] for domain in after)


def test_the_summary_speaks_of_it_too(trained: Path) -> None:
    title, *domains, _, _ = train.summary(train.Trained(trained, training_log.read(trained)))
    assert title == "held-out loss, nats a token"
    assert [line.split(":")[0].strip() for line in domains] == ["math", "tool_call"]
    for line in domains:
        assert "before training 5." in line
        assert "a token takes a routed width of" in line
        assert "gate" not in line
        assert "backbone" not in line


def test_equal_seeds_give_equal_weights(trained: Path, tmp_path: Path) -> None:
    again = train.train(tiny(FLOAT32), tmp_path / "run").folder
    for name in ("mohge.safetensors", "backbone/model.safetensors"):
        assert (again / "checkpoint" / name).read_bytes() == (trained / "checkpoint" / name).read_bytes()


def test_the_checkpoint_is_a_model_and_its_experts(trained: Path) -> None:
    """The folder beside the experts opens as a model; an arm on it is what was trained, as far as the held-out loss."""
    folder = trained / "checkpoint"
    recipe = recipes.load(trained / "recipe.yaml")
    loaded = models.load(str(folder / "backbone"), device="cpu")
    options = {**recipe.method.options, "checkpoint": str(folder)}
    arm = tree(loaded.model, "mohge", methods.configure("mohge", options))
    assert not arm.untrained
    assert arm.caveat is None
    tokenizer = models.load("tiny", device="cpu").tokenizer
    held = split(items(recipe.data, tokenizer, 96), 8, 0).held_out
    figures = train.held_out(arm, None, held, 4)
    (stored,) = [line for line in training_log.read(trained) if line.get("stored") == "float32"]
    for domain in held:
        assert figures[domain]["routed"] == pytest.approx(stored["figures"][domain]["routed"], rel=1e-5)
    with pytest.raises(InputError, match="it was trained on tiny; this model has its shape and other weights"):
        tree(models.load("tiny", device="cpu", seed=5).model, "mohge", methods.configure("mohge", options))
