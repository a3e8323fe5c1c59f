"""LayerRoute with LoRA: what the arms of a checkpoint are, what they cost, and which checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from profiler import methods, models
from profiler.arms import describe, sibling
from profiler.costs import backbone_parameters, flops
from profiler.errors import InputError, RuleError
from profiler.methods.layerroute import LayerRoute
from profiler.records import Choice
from tests.profiler.slow_decoder import slow_forward
from tests.profiler.tiny import disturb, exact_model, padded, prompts_of, random_model, wrapped

PROMPTS = prompts_of([9, 4, 6])
LORA = {"rank": 2, "alpha": 6.0}


def logits(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**padded(prompts, "left"), use_cache=False).logits
    return found


def arm(**options: Any) -> LayerRoute:
    handle, _ = wrapped(exact_model("llama"), "layerroute", **options)
    assert isinstance(handle, LayerRoute)
    return handle


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Random routers and adapters, stored in float32, of the exact llama model."""
    trained = arm(lora=LORA)
    disturb(trained)
    with torch.no_grad():
        for router in trained.routers:
            router.weight *= 3
    trained.save(tmp_path / "trained", base="exact")
    return tmp_path / "trained"


def merged_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The backbone's weights with alpha / rank · B·A added, from the files alone."""
    stored = load_file(checkpoint / "adapter_model.safetensors")
    weights = dict(exact_model("llama").state_dict())
    for name in [name for name in stored if ".lora_A." in name]:
        a, b = stored[name].double(), stored[name.replace(".lora_A.", ".lora_B.")].double()
        place = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[place] = weights[place] + 6.0 / 2 * b @ a
    return weights


def saved_routers(checkpoint: Path) -> list[tuple[Tensor, Tensor]]:
    stored = load_file(checkpoint / "routers.safetensors")
    return [(stored[f"{i}.weight"][0], stored[f"{i}.bias"][0]) for i in range(6)]


def test_routed_and_adapted_equals_the_slow_reference(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint))
    routes = set()
    for prompt in PROMPTS:
        slow = slow_forward(merged_weights(checkpoint), handle.model.config, prompt, routers=saved_routers(checkpoint))
        assert (logits(handle.model, [prompt])[0] - slow.logits).abs().max() < 1e-5
        routes.add(tuple(slow.ran))
    assert len(routes) > 1  # the prompts are routed differently, so more than one route was compared


def test_open_gates_with_a_checkpoint_are_the_dense_model_with_lora(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint), gates="open")
    for prompt in PROMPTS:
        slow = slow_forward(merged_weights(checkpoint), handle.model.config, prompt, route=[True] * 6)
        assert (logits(handle.model, [prompt])[0] - slow.logits).abs().max() < 1e-5


def test_without_its_lora_a_checkpoint_is_its_routers_on_the_bare_backbone(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint), lora=False)
    weights = dict(exact_model("llama").state_dict())
    for prompt in PROMPTS:
        slow = slow_forward(weights, handle.model.config, prompt, routers=saved_routers(checkpoint))
        assert (logits(handle.model, [prompt])[0] - slow.logits).abs().max() < 1e-9
    assert handle.caveat == "routers trained with LoRA, run without it"
    assert arm(checkpoint=str(checkpoint)).caveat is None
    assert arm().caveat is None


def test_the_twin_of_an_adapted_arm_is_the_dense_model_with_its_adapters_merged(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint))
    handle.force("open")
    backbone = exact_model("llama")
    before = logits(backbone)
    twin = sibling(backbone)
    handle.adapt_twin(twin)
    assert (logits(twin) - logits(handle.model)).abs().max() < 1e-9
    assert (logits(twin) - before).abs().max() > 0.1
    assert torch.equal(logits(backbone), before)


def test_the_twin_of_an_arm_without_lora_is_the_dense_model() -> None:
    handle, twin = arm(), exact_model("llama")
    handle.adapt_twin(twin)
    assert torch.equal(logits(twin), logits(exact_model("llama")))


def test_an_arm_says_which_lora_it_has(checkpoint: Path) -> None:
    of_checkpoint = {"rank": 2, "alpha": 6.0, "dropout": 0.0}
    assert describe(arm(checkpoint=str(checkpoint)), "a", "layerroute", None).options["lora"] == of_checkpoint
    assert describe(arm(lora=True), "a", "layerroute", None).options["lora"] == {
        "rank": 8, "alpha": 16.0, "dropout": 0.0
    }  # fmt: skip
    assert describe(arm(), "a", "layerroute", None).options["lora"] is False
    # What an arm says of itself makes the same arm again.
    again = methods.configure("layerroute", describe(arm(lora=LORA), "a", "layerroute", None).options)
    assert (again.lora.rank, again.lora.alpha) == (2, 6.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"rank": 4}}, "its LoRA has rank 2 and alpha 6, the arm asks for rank 4 and alpha 16"),
        ({"lora": {"rank": 2, "alpha": 5}}, "its LoRA has rank 2 and alpha 6, the arm asks for rank 2 and alpha 5"),
    ],
)
def test_another_size_of_lora_than_the_checkpoint_s_names_both(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        arm(checkpoint=str(checkpoint), **options)


def test_lora_asked_of_a_checkpoint_without_it_is_refused(tmp_path: Path) -> None:
    arm().save(tmp_path)
    with pytest.raises(InputError, match="it was trained without LoRA, and the arm asks for it"):
        arm(checkpoint=str(tmp_path), lora=True)
    assert arm(checkpoint=str(tmp_path)).lora is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"rank": 0}}, "rank: Input should be greater than or equal to 1"),
        ({"lora": {"rnak": 2}}, "rnak"),
        ({"lora": {"dropout": 1.0}}, "dropout: Input should be less than 1"),
        ({"lora": {"alpha": float("nan")}}, "alpha: Input should be"),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        methods.configure("layerroute", options)


# -- costs ----------------------------------------------------------------------------------------


def total(choices: list[Choice], site: str, column: str) -> int:
    return sum(getattr(choice, column) for choice in choices if choice.site == site)


def test_parameters_on_qwen_are_the_paper_s() -> None:
    """METHODS §2: 21,528 router and 1,081,344 LoRA parameters beside a backbone of 494,032,768."""
    model = models.skeleton(models.config("qwen2.5-0.5b"))
    choices = LayerRoute.choices(model, methods.configure("layerroute", {"lora": True}))
    assert total(choices, "router", "overhead_parameters") == 21_528
    assert total(choices, "block", "overhead_parameters") == 1_081_344
    assert sum(choice.backbone_parameters for choice in choices) == 494_032_768


def test_lora_is_charged_to_the_run_choice(checkpoint: Path) -> None:
    config = methods.configure("layerroute", {"checkpoint": str(checkpoint)})
    plain = LayerRoute.choices(exact_model("llama"), methods.configure("layerroute", {}))
    adapted = LayerRoute.choices(exact_model("llama"), config)
    # q and o are 32 → 32, k and v 32 → 16: 2·(32 + 32 + 32 + 32) + 2·(32 + 16 + 32 + 16) at rank 2.
    for before, after in zip(plain, adapted, strict=True):
        extra = 2 * 128 + 2 * 96 if before.name == "run" and before.site == "block" else 0
        assert after.overhead_parameters - before.overhead_parameters == extra
        assert after.flops_per_row - before.flops_per_row == 2 * extra
        assert after.weight_bytes - before.weight_bytes == 8 * extra  # float64 beside a float64 backbone
        assert after.backbone_parameters == before.backbone_parameters
        assert after.kv_bytes_per_row == before.kv_bytes_per_row


def test_costs_are_the_same_read_off_a_wrapped_tree(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint))
    assert handle.choices(handle.model, handle.config) == handle.choices(exact_model("llama"), handle.config)
    in_tree = sum(parameter.numel() for name, parameter in handle.trainables().items() if "lora" in name)
    assert in_tree == total(handle.choices(handle.model, handle.config), "block", "overhead_parameters")
    assert backbone_parameters(handle.model) == backbone_parameters(exact_model("llama"))


def test_adapters_beside_a_bfloat16_backbone_are_read_in_float32() -> None:
    config = methods.configure("layerroute", {"lora": LORA})
    plain = methods.configure("layerroute", {})
    model = random_model("llama", dtype=torch.bfloat16)
    extra = total(LayerRoute.choices(model, config), "block", "weight_bytes") - total(
        LayerRoute.choices(model, plain), "block", "weight_bytes"
    )
    assert extra == 6 * 4 * 448


def test_costs_are_what_a_forward_was_counted_to_do(checkpoint: Path) -> None:
    handle = arm(checkpoint=str(checkpoint), gates="open")
    handle.model.set_attn_implementation("eager")  # the counter sees nothing of CPU sdpa
    prompt = PROMPTS[0]
    with FlopCounterMode(display=False) as counter:
        logits(handle.model, [prompt])
    rows = len(prompt)
    routers = total(handle.choices(handle.model, handle.config), "router", "flops_per_row")
    others = [c for c in handle.choices(handle.model, handle.config) if c.site != "router" and c.name == "run"]
    # A router's row is a sequence. torch counts attention's products in full, not under the causal mask.
    assert counter.get_total_flops() == flops(others, rows, rows * rows) + routers


# -- checkpoints ----------------------------------------------------------------------------------


def test_a_float16_checkpoint_is_small_and_comes_back_rounded(checkpoint: Path, tmp_path: Path) -> None:
    handle = arm(checkpoint=str(checkpoint))
    handle.save(tmp_path / "half", torch.float16)
    again = arm(checkpoint=str(tmp_path / "half"))
    for name, value in again.trainables().items():
        assert value.dtype == (torch.float64 if "lora" in name else torch.float32)
        assert torch.equal(value, handle.trainables()[name].half().to(value.dtype))
    sizes = [(folder / "adapter_model.safetensors").stat().st_size for folder in (tmp_path / "half", checkpoint)]
    numbers = 6 * 448
    assert sizes[1] - sizes[0] == pytest.approx(2 * numbers, abs=200)  # two bytes a number less


@pytest.mark.parametrize(("name", "value"), [("router", 1e6), ("adapter", float("nan"))])
def test_numbers_that_cannot_be_stored_are_not(checkpoint: Path, tmp_path: Path, name: str, value: float) -> None:
    handle = arm(checkpoint=str(checkpoint))
    trainables = handle.trainables()
    key = next(k for k in trainables if ("lora" in k) == (name == "adapter"))
    with torch.no_grad():
        trainables[key].view(-1)[0] = value
    with pytest.raises(RuleError, match="holds values that torch.float16 cannot hold"):
        handle.save(tmp_path / "half", torch.float16)
    assert not (tmp_path / "half").exists()


def test_a_checkpoint_of_another_backbone_of_the_same_shape_names_it(checkpoint: Path) -> None:
    model = exact_model("llama", seed=1)
    with pytest.raises(InputError, match="it was trained on exact; this model has its shape and other weights"):
        wrapped(model, "layerroute", checkpoint=str(checkpoint))


def test_rounding_the_backbone_does_not_make_it_another(checkpoint: Path) -> None:
    model = exact_model("llama").bfloat16().double()
    handle, _ = wrapped(model, "layerroute", checkpoint=str(checkpoint))
    assert not handle.untrained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 8}, "it was made for 4 attention heads, this model has 8"),
        ({"num_key_value_heads": 4}, "it was made for 2 key-value heads, this model has 4"),
    ],
)
def test_a_checkpoint_of_other_heads_names_both(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrapped(exact_model("llama", **settings), "layerroute", checkpoint=str(checkpoint))


def test_a_checkpoint_of_another_architecture_names_both(checkpoint: Path) -> None:
    message = "it was made for a LlamaForCausalLM, this model is a Qwen2ForCausalLM"
    with pytest.raises(InputError, match=message):
        wrapped(exact_model("qwen2-untied"), "layerroute", checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 7}, "its format is 7, this version reads 1"),
        ({"base_sample": [0.5]}, "must hold a base_sample of 48 numbers"),
        ({"base_sample": "none"}, "must hold a base_sample of 48 numbers"),
        ({"lora": None}, "config.json must say whether .* lora: true or false, and says nothing"),
        ({"lora": "yes"}, "lora: true or false, and says 'yes'"),
        ({"base": "another/model"}, "its adapters are for the model .*, its routers for 'another/model'"),
    ],
)
def test_a_refused_checkpoint_leaves_the_model_as_it_was(
    checkpoint: Path, changed: dict[str, Any], message: str
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    model = exact_model("llama")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match=message):
        methods.load("layerroute").wrap(
            model, methods.configure("layerroute", {"checkpoint": str(checkpoint)}), arm().recorder
        )
    assert [name for name, _ in model.named_modules()] == names
    assert methods.handle_of(model) is None
