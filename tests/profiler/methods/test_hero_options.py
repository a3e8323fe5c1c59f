"""HeRo's options and checkpoints: what is refused, what a fresh arm is, what is saved and opened again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from profiler import methods
from profiler.arms import describe
from profiler.errors import InputError, RuleError
from profiler.methods.hero import Hero
from tests.profiler.methods.hero_models import routed, scores_of
from tests.profiler.tiny import exact_model, prompts_of, wrapped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.3}, "arms.mine.budget: budget is 0.25 or 0.40; for another choice of layers give"),
        ({"layers": [1, 1]}, "arms.mine.layers: each layer may be listed once"),
        ({"layers": []}, "arms.mine.layers: List should have at least 1 item"),
        ({"threshold": 1.0}, "arms.mine.threshold: Input should be less than 1"),
        ({"adapter_width": 0}, "arms.mine.adapter_width: Input should be greater than or equal to 1"),
        ({"budget": 0.25, "layers": [1]}, "arms.mine: give `budget` or `layers`, not both"),
        ({"variant": "half"}, "arms.mine.variant: Input should be 'full'"),
        ({"thresold": 0.4}, "arms.mine.thresold: method 'hero' has no such option; did you mean 'threshold'?"),
        ({"gates": {"forced": {"ratio": 2}}}, "arms.mine.gates.forced.ratio: Input should be less than or equal to 1"),
        (
            {"variant": "shuffled_history", "memory": "matrix"},
            "arms.mine: variant shuffled_history needs memory dual",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        methods.configure("hero", options, where="arms.mine.")
    assert str(caught.value).startswith(message)


def test_defaults_are_decided_and_described() -> None:
    handle, _ = routed(disturbed=False)
    assert (handle.options.layers, handle.options.adapter_width) == ([3, 4, 5], 7)  # 32·896/4096
    assert (handle.options.threshold, handle.options.variant, handle.options.memory) == (0.5, "full", "dual")
    assert handle.untrained
    described = describe(handle, "arm", "hero", None).options
    assert (described["layers"], described["budget"], described["memory"]) == ([3, 4, 5], None, "dual")
    assert methods.configure("hero", described) == handle.config
    bigger, _ = routed(disturbed=False, budget=0.4)
    assert bigger.options.layers == [2, 3, 4, 5]
    with pytest.raises(InputError, match="layers: 6 is none of this model's, which are 0 to 5"):
        routed(layers=[6])


def test_a_fresh_router_runs_every_ffn_and_a_fresh_adapter_adds_nothing() -> None:
    handle, steps = routed(disturbed=False)
    ids = torch.tensor(prompts_of([5]))
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(input_ids=ids)
    assert all(bool((scores.g == torch.sigmoid(torch.tensor(2.0).double())).all()) for scores in seen)
    assert all(bool((d.choice == 1).all()) for d in steps[0].decisions)
    assert max(abs(rho - 0.98) for rho in handle.rho()) < 1e-6
    assert not any(adapter.W2.weight.any() for adapter in handle.adapters)
    again, _ = routed(disturbed=False)
    other, _ = routed(disturbed=False, seed=1)
    assert torch.equal(handle.router.W_hd.weight, again.router.W_hd.weight)
    assert not torch.equal(handle.router.W_hd.weight, other.router.W_hd.weight)


def test_wrapping_leaves_the_caller_s_random_state() -> None:
    model = exact_model("llama")
    torch.manual_seed(4)
    before = torch.get_rng_state()
    wrapped(model, "hero")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_says_what_an_arm_leaves_open(tmp_path: Path, dtype: torch.dtype) -> None:
    handle, _ = routed(layers=[0, 4], adapter_width=5, threshold=0.6, variant="no_position")
    handle.save(tmp_path / "made", dtype=dtype, base="tiny")
    other, _ = routed(disturbed=False, checkpoint=str(tmp_path / "made"))
    assert other.options == handle.options
    assert not other.untrained
    assert other.caveat is None
    for (name, mine), theirs in zip(handle.trainables().items(), other.trainables().values(), strict=True):
        assert torch.equal(mine.to(dtype), theirs.to(dtype)), name
    facts = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (facts["method"], facts["layers"], facts["base"]) == ("hero", 6, "tiny")
    assert facts["rho"] == [round(1 / (1 + math.exp(-eta)), 6) for eta in handle.router.eta.tolist()]
    part, _ = routed(disturbed=False, checkpoint=str(tmp_path / "made"), variant="no_memory_read", threshold=0.3)
    assert part.caveat == "trained as variant no_position, run as no_memory_read"


def test_a_checkpoint_that_does_not_fit_is_refused_with_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    handle, _ = routed(layers=[0, 4], adapter_width=5)
    handle.save(folder, base="tiny")
    for options, message in [
        ({"layers": [0, 5]}, r"it was made with layers \[0, 4\], the arm asks for \[0, 5\]"),
        ({"budget": 0.25}, r"it was made with layers \[0, 4\], the arm asks for \[3, 4, 5\]"),
        ({"adapter_width": 6}, "it was made with adapter_width 5, the arm asks for 6"),
        ({"variant": "wide_local"}, "it was trained as variant full, whose parameters are not those of wide_local"),
    ]:
        with pytest.raises(InputError, match=message):
            routed(checkpoint=str(folder), **options)
    with pytest.raises(InputError, match="it was made for a LlamaForCausalLM, this model is a Qwen2ForCausalLM"):
        routed("qwen2", checkpoint=str(folder))
    with pytest.raises(InputError, match="it was trained on tiny; this model has its shape and other weights"):
        routed(model=exact_model("llama", seed=1), checkpoint=str(folder))
    plain, _ = routed()
    with pytest.raises(InputError, match=r"it was made with layers \[0, 4\], the arm asks for \[3, 4, 5\]"):
        plain.restore(folder)
    config = folder / "config.json"
    whole = config.read_text()
    for key, value, message in [
        ("format", 2, "its format is 2, this version reads 1"),
        ("options", {"layers": [0, 4]}, "config.json: options.adapter_width: Field required"),
        ("base_sample", [1.0], "must hold a base_sample of 48 numbers, and it holds 1"),
    ]:
        config.write_text(json.dumps({**json.loads(whole), key: value}))
        with pytest.raises(InputError, match=message):
            routed(checkpoint=str(folder))
    config.write_text(json.dumps({**json.loads(whole), "method": "mohge", "options": None}))
    with pytest.raises(InputError, match="it was made by method mohge, and the arm's is hero"):
        routed(checkpoint=str(folder))
    config.write_text(whole)
    (folder / "hero.safetensors").unlink()
    with pytest.raises(InputError, match=r"hero.safetensors cannot be read"):
        routed(checkpoint=str(folder))


def test_a_refused_arm_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    model = exact_model("llama")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match="there is no such folder"):
        Hero.wrap(model, methods.configure("hero", {"checkpoint": str(tmp_path / "none")}), cast(Any, None))
    assert [name for name, _ in model.named_modules()] == names
    assert not any(block.post_attention_layernorm._forward_pre_hooks for block in model.model.layers)


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    handle, _ = routed()
    with torch.no_grad():
        handle.router.W_q.weight[0, 0] = 1e6
    with pytest.raises(RuleError, match="router.W_q.weight holds values that torch.float16 cannot hold"):
        handle.save(tmp_path / "made", dtype=torch.float16)
    assert not (tmp_path / "made").exists()
