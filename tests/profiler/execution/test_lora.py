"""Adapters in place: what they change, what they leave alone, and that peft reads what is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from profiler.arms import sibling
from profiler.errors import InputError
from profiler.execution import lora
from profiler.execution.decoder import ATTENTION_PARTS, Decoder, decoder
from profiler.execution.lora import LoraOptions
from tests.profiler.tiny import exact_model, padded, prompts_of, random_model

OPTIONS = LoraOptions(rank=3, alpha=7.0, dropout=0.5)
PROMPTS = prompts_of([7, 4, 5])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**padded(PROMPTS, "right"), use_cache=False).logits
    return found


def adapted(shape: str = "llama", *, random: bool = True) -> Decoder:
    """An adapted exact model, B random rather than zero."""
    dec = decoder(exact_model(shape))
    lora.add_adapters(dec, OPTIONS)
    if random:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in lora.adapter_parameters(dec).items():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return dec


def by_hand(dec: Decoder) -> nn.Module:
    """A dense model with W + alpha / rank · B·A in place of W, made without the product's code."""
    model = exact_model("llama")
    found = lora.adapter_parameters(dec)
    for layer, block in enumerate(model.model.layers):
        for part in ATTENTION_PARTS:
            a, b = (
                next(t for n, t in found.items() if f"layers.{layer}.self_attn.{part}.lora_{half}." in n)
                for half in "AB"
            )
            weight = getattr(block.self_attn, part).weight
            weight.data = weight.data + 7.0 / 3 * torch.einsum("or,ri->oi", b, a).detach()
    return model


@pytest.mark.parametrize("shape", ["llama", "llama-tied", "qwen2"])
def test_fresh_adapters_change_nothing(shape: str) -> None:
    assert torch.equal(logits(adapted(shape, random=False).model), logits(exact_model(shape)))


def test_adapters_add_their_product_to_the_weights() -> None:
    dec = adapted()
    found, wanted = logits(dec.model), logits(by_hand(dec))
    assert (found - wanted).abs().max() < 1e-10
    assert (wanted - logits(exact_model("llama"))).abs().max() > 0.1


def test_the_backbone_s_tensors_are_shared_and_left_as_they_were() -> None:
    backbone = random_model("llama", dtype=torch.float32)
    before, required = copy.deepcopy(backbone.state_dict()), [p.requires_grad for p in backbone.parameters()]
    tree = sibling(backbone)
    lora.add_adapters(decoder(tree), OPTIONS)
    assert type(tree) is type(backbone)
    assert tree.model.layers[2].self_attn.k_proj.base_layer.weight is backbone.model.layers[2].self_attn.k_proj.weight
    assert type(backbone.model.layers[2].self_attn.k_proj) is nn.Linear
    assert [p.requires_grad for p in backbone.parameters()] == required
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_dropout_acts_in_training_only() -> None:
    dec = adapted()
    assert not dec.model.training
    assert torch.equal(logits(dec.model), logits(dec.model))
    dec.model.train()
    assert not torch.equal(logits(dec.model), logits(dec.model))


@pytest.mark.parametrize(
    ("backbone", "adapters"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_adapters_compute_in_float32_at_least(backbone: torch.dtype, adapters: torch.dtype) -> None:
    dec = decoder(random_model("llama", dtype=backbone))
    lora.add_adapters(dec, OPTIONS)
    assert {p.dtype for p in lora.adapter_parameters(dec).values()} == {adapters}
    assert logits(dec.model).dtype == backbone


def test_start_values_follow_from_the_seed_and_leave_the_caller_s_random_state_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    dec = adapted()
    assert torch.equal(torch.rand(1), wanted)

    def start(seed: int) -> dict[str, Tensor]:
        lora.reset(dec, seed)
        return {name: p.detach().clone() for name, p in lora.adapter_parameters(dec).items()}

    first, again, other = start(1), start(1), start(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, value in first.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            # Uniform in ±1/√32: the largest of 96 is all but at the bound, and none is past it.
            assert 0.9 * 32**-0.5 < value.abs().max() <= 32**-0.5


def test_removing_adapters_leaves_the_model_as_it_was() -> None:
    model = exact_model("llama")
    before, names = logits(model), [name for name, _ in model.named_modules()]
    dec = decoder(model)
    lora.add_adapters(dec, OPTIONS)
    lora.remove_adapters(dec)
    assert torch.equal(logits(model), before)
    assert [name for name, _ in model.named_modules()] == names
    assert not hasattr(model, "peft_config")


def test_merging_gives_a_twin_its_own_tensors() -> None:
    dec = adapted()
    backbone = exact_model("llama")
    twin = sibling(backbone)
    before = logits(backbone)
    lora.merge_into(dec, decoder(twin))
    assert (logits(twin) - logits(dec.model)).abs().max() < 1e-10
    assert torch.equal(logits(backbone), before)
    assert twin.model.layers[0].mlp.up_proj.weight is backbone.model.layers[0].mlp.up_proj.weight


def test_the_view_without_adapters_lists_the_backbone_s_modules() -> None:
    plain, dec = decoder(exact_model("llama-tied")), adapted("llama-tied")
    view = lora.without_adapters(dec)
    for mine, theirs in zip(view.blocks, plain.blocks, strict=True):
        assert {n: tuple(p.shape) for n, p in mine.named_parameters()} == {
            n: tuple(p.shape) for n, p in theirs.named_parameters()
        }
    # 4 heads of 8 on 2 key/value heads at width 32: q and o are 32 → 32, k and v 32 → 16.
    assert lora.adapter_shapes(view.blocks[0], 3) == [
        (3, 32), (32, 3), (3, 32), (16, 3), (3, 32), (16, 3), (3, 32), (32, 3)
    ]  # fmt: skip
    assert lora.adapter_shapes(dec.blocks[0], 3) == lora.adapter_shapes(plain.blocks[0], 3)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Decoder, Path]:
    dec = adapted()
    lora.save(dec, OPTIONS, tmp_path, torch.float32, "some/model")
    return dec, tmp_path


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_peft_loads_what_is_saved_elsewhere(saved: tuple[Decoder, Path]) -> None:
    dec, folder = saved
    elsewhere = PeftModel.from_pretrained(exact_model("llama"), str(folder)).double()
    assert (logits(elsewhere) - logits(dec.model)).abs().max() < 1e-5  # stored in float32
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 7.0, "some/model")


def test_what_is_saved_comes_back(saved: tuple[Decoder, Path]) -> None:
    dec, folder = saved
    assert lora.read_options(folder, "some/model") == OPTIONS
    other = adapted(random=False)
    lora.restore(other, folder)
    for name, value in lora.adapter_parameters(other).items():
        assert torch.equal(value, lora.adapter_parameters(dec)[name].float().double())


def test_float16_halves_the_file_and_comes_back_rounded(tmp_path: Path) -> None:
    dec = adapted()
    lora.save(dec, OPTIONS, tmp_path, torch.float16, None)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    other = adapted(random=False)
    lora.restore(other, tmp_path)
    for name, value in lora.adapter_parameters(other).items():
        assert torch.equal(value, lora.adapter_parameters(dec)[name].half().double())


def _tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST), r"has 47 tensors and this model needs 48: missing tensors \['" + FIRST),
        (lambda t: t.update(x=torch.ones(1)), r"has 49 tensors and this model needs 48: .*unexpected tensors \['x'\]"),
        (lambda t: t.update({FIRST: torch.ones(3, 64)}), r"has shape \[3, 64\], this model needs \[3, 32\]"),
        (lambda t: t[FIRST].__setitem__((0, 0), float("inf")), "holds values that are not finite"),
    ],
)
def test_a_broken_adapter_is_refused_and_changes_nothing(
    saved: tuple[Decoder, Path], change: Any, message: str
) -> None:
    dec, folder = saved
    before = logits(dec.model)
    _tensors(folder, change)
    with pytest.raises(InputError, match=message):
        lora.restore(dec, folder)
    assert torch.equal(logits(dec.model), before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "its adapter's peft_type is 'IA3'; only 'LORA' is supported"),
        ({"use_dora": True}, "its adapter's use_dora is True; only False is supported"),
        ({"target_modules": ["q_proj"]}, r"its adapter is for \['q_proj'\], this method's for q_proj, k_proj"),
        ({"r": 0}, "rank"),
        (
            {"base_model_name_or_path": "another/model"},
            "its adapters are for the model 'another/model', its routers for 'some/model'",
        ),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    saved: tuple[Decoder, Path], changed: dict[str, Any], message: str
) -> None:
    _, folder = saved
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(InputError, match=message):
        lora.read_options(folder, "some/model")


def test_a_sample_tells_backbones_apart() -> None:
    mine = lora.sample(decoder(exact_model("llama")))
    assert mine.shape == (48,)
    assert torch.equal(mine, lora.sample(adapted()))
    other = lora.sample(decoder(exact_model("llama", seed=1)))
    assert (mine - other).norm() / mine.norm() > 1
