"""Costs against figures worked out by hand, against published sizes, and against torch's own counter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from profiler import methods
from profiler.costs import (
    attention_choice,
    backbone_parameters,
    block_choice,
    dense_choices,
    ffn_choice,
    flops,
    parameters,
    shared_choices,
)
from profiler.execution.decoder import decoder
from profiler.presets import PRESETS, preset_config
from profiler.recorder import Recorder
from profiler.records import Choice
from tests.profiler.tiny import random_model

SMOLLM2 = "smollm2-135m-random"


@cache
def on_meta(preset: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(preset_config(PRESETS[preset]), dtype=dtype)
    return model


def of(choices: list[Choice], layer: int, site: str, index: int = 0) -> Choice:
    return {(c.layer, c.site, c.index): c for c in choices}[layer, site, index]


# -- SmolLM2-135M: 30 layers, d 576, FFN 1536, 9 heads on 3 KV heads of 64, vocabulary 49152, tied ---


def test_smollm2_by_hand() -> None:
    choices = dense_choices(on_meta(SMOLLM2))
    attention, ffn = of(choices, 7, "attention"), of(choices, 7, "ffn")
    projections = 576 * 576 + 2 * 576 * 192 + 576 * 576
    assert attention.backbone_parameters == projections + 576
    assert attention.flops_per_row == 2 * projections
    assert attention.flops_per_context == 4 * 9 * 64
    assert attention.kv_bytes_per_row == 2 * 3 * 64 * 4
    assert attention.weight_bytes == 4 * (projections + 576)
    assert ffn.backbone_parameters == 3 * 576 * 1536 + 576
    assert ffn.flops_per_row == 2 * 3 * 576 * 1536
    assert ffn.flops_per_context == ffn.kv_bytes_per_row == 0
    assert ffn.weight_bytes == 4 * (3 * 576 * 1536 + 576)
    embedding, norm, head = (of(choices, -1, site) for site in ("embedding", "norm", "head"))
    assert (embedding.backbone_parameters, embedding.flops_per_row, embedding.weight_bytes) == (49152 * 576, 0, 0)
    assert (norm.backbone_parameters, norm.weight_bytes) == (576, 4 * 576)
    assert head.backbone_parameters == 0  # tied: the embedding counts it
    assert (head.flops_per_row, head.weight_bytes) == (2 * 49152 * 576, 4 * 49152 * 576)


def test_smollm2_of_512_tokens_with_full_products() -> None:
    choices = dense_choices(on_meta(SMOLLM2))
    assert flops(choices, 512, 512 * 512) == 155_826_782_208
    products = [c.model_copy(update={"flops_per_row": 0}) for c in choices]
    assert flops(products, 512, 512 * 512) == 18_119_393_280


def test_the_head_computes_the_rows_it_is_asked_for() -> None:
    choices = dense_choices(on_meta(SMOLLM2))
    head = 2 * 49152 * 576
    assert flops(choices, 512, 512 * 512) - flops(choices, 512, 512 * 512, head_rows=1) == 511 * head
    causal = 512 * 513 // 2
    assert flops(choices, 512, 512 * 512) - flops(choices, 512, causal) == 30 * 4 * 576 * (512 * 512 - causal)


def test_torch_counts_the_same_on_a_real_forward_of_smollm2() -> None:
    config = preset_config(PRESETS[SMOLLM2])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 512, dtype=torch.long), use_cache=False)
    assert counter.get_total_flops() == 155_826_782_208
    products = counter.get_flop_counts()["Global"]
    assert products[torch.ops.aten.bmm] == 18_119_393_280


# -- published sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        (SMOLLM2, 134_515_008),
    ],
)
def test_models_have_their_published_number_of_parameters(preset: str, total: int) -> None:
    model = on_meta(preset)
    assert parameters([model]) == backbone_parameters(model) == total
    assert sum(c.backbone_parameters for c in dense_choices(model)) == total


def test_an_ffn_of_llama_3_1_8b() -> None:
    ffn = ffn_choice(decoder(on_meta("llama-3.1-8b")), 20)
    assert ffn.backbone_parameters == 176_160_768 + 4096  # its norm
    assert ffn.flops_per_row == 2 * 176_160_768


def test_routers_on_qwen2_5_0_5b() -> None:
    model = on_meta("qwen2.5-0.5b")
    choices = methods.load("layerroute").choices(model, methods.configure("layerroute", {}))
    assert sum(c.overhead_parameters for c in choices) == 21_528
    assert sum(c.overhead_parameters for c in choices if c.site == "router") == 24 * 897
    router = of(choices, 3, "router")
    assert (router.flops_per_row, router.weight_bytes) == (2 * 896, 4 * 897)
    run, skip = of(choices, 3, "block", 1), of(choices, 3, "block", 0)
    # Q and O of 896 × 896, K and V of 896 × 128, biases on Q, K and V; an FFN of 4864; two norms.
    linear = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    assert run.backbone_parameters == linear + (896 + 2 * 128) + 2 * 896
    assert run.flops_per_row == 2 * linear
    assert run.flops_per_context == 4 * 14 * 64
    assert run.kv_bytes_per_row == 2 * 2 * 64 * 4
    assert skip.model_dump(exclude={"layer", "site", "index", "name", "segments"}) == {
        "backbone_parameters": 0,
        "replacement_parameters": 0,
        "overhead_parameters": 0,
        "flops_per_row": 0,
        "flops_per_context": 0,
        "weight_bytes": 0,
        "kv_bytes_per_row": 0,
    }


# -- conventions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_bytes_follow_the_dtype(dtype: torch.dtype, size: int) -> None:
    dec = decoder(on_meta(SMOLLM2, dtype))
    block = block_choice(dec, 0, index=1)
    assert block.weight_bytes == size * block.backbone_parameters
    assert block.kv_bytes_per_row == size * 2 * 3 * 64


def test_a_block_is_its_halves() -> None:
    dec = decoder(random_model("qwen2"))
    attention, ffn, block = attention_choice(dec, 2), ffn_choice(dec, 2), block_choice(dec, 2, index=1)
    for field in ("backbone_parameters", "flops_per_row", "flops_per_context", "weight_bytes", "kv_bytes_per_row"):
        assert getattr(block, field) == getattr(attention, field) + getattr(ffn, field)
    assert block.segments == ["attention", "ffn"]
    assert (block.site, block.index, block.layer) == ("block", 1, 2)


@pytest.mark.parametrize(("shape", "own"), [("llama", 97 * 32), ("llama-tied", 0), ("qwen2", 0)])
def test_a_head_of_its_own_has_parameters(shape: str, own: int) -> None:
    head = of(shared_choices(decoder(random_model(shape))), -1, "head")
    assert head.backbone_parameters == own
    assert head.flops_per_row == 2 * 97 * 32
    assert head.weight_bytes == 8 * 97 * 32


def test_what_a_method_hangs_in_is_no_backbone() -> None:
    model: Any = random_model("llama")
    before = parameters([model])
    methods.load("layerroute").wrap(model, methods.configure("layerroute", {}), Recorder())
    assert backbone_parameters(model) == before
    assert parameters([model]) == before + 6 * 33


def test_a_module_given_twice_counts_once() -> None:
    model: Any = random_model("llama-tied")
    assert parameters([model, model.lm_head]) == parameters([model])
    assert parameters([model.model.embed_tokens, model.lm_head]) == 97 * 32
