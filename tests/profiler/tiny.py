"""Tiny decoders for tests of methods: every branch of the supported shape, exact in float64, gone in milliseconds.

transformers computes norms in float32 whatever the model's dtype, so a float64 model still differs between batches in
the eighth digit. `exact_model` puts torch's own RMSNorm in their place; with sdpa attention every product is then
float64 and batches agree to about 1e-15.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from profiler import methods
from profiler.execution.decoder import ADDED
from profiler.recorder import Recorder, StepData

VOCABULARY = 97

#: Grouped-query attention everywhere; a tied and an untied head, with and without biases.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
}

_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2}
#: Mixture-of-experts models of transformers whose routers see what the model's dtype holds, so that float64 is exact.
STOCK_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "model_type": "qwen2_moe", "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1], "tie_word_embeddings": True, **_ROUTED,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "moe_intermediate_size": 24, "mlp_only_layers": [0], "head_dim": 8,
        "norm_topk_prob": True, **_ROUTED,
    },
    "olmoe": {"model_type": "olmoe", **_ROUTED},
}  # fmt: skip


def config_of(shape: str, **settings: Any) -> Any:
    """The config of one of `SHAPES` or `STOCK_SHAPES`: 6 layers, width 32, 4 heads on 2 key/value heads."""
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{**SHAPES, **STOCK_SHAPES}[shape],
        **settings,
    }
    return AutoConfig.for_model(given.pop("model_type"), **given)


def random_model(shape: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """A model with random weights and biases, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config_of(shape, **settings),
            dtype=dtype,
            attn_implementation="sdpa",
            # What transformers takes otherwise, grouped products, does not know float64.
            **({"experts_implementation": "eager"} if shape in STOCK_SHAPES else {}),
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def exact_model(shape: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """`random_model` in float64 with norms that are float64 too."""
    model = random_model(shape, seed=seed, **settings)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def wrapped(model: PreTrainedModel, method: str, **options: Any) -> tuple[methods.Method, list[StepData]]:
    """A wrapped copy of `model` whose steps are recorded into the list."""
    handle = methods.load(method).wrap(copy.deepcopy(model), methods.configure(method, options), Recorder())
    handle.recorder.attach(handle)
    steps: list[StepData] = []
    handle.recorder.mode, handle.recorder.sink = "record", steps.append
    return handle, steps


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded(prompts: list[list[int]], side: str, width: int | None = None) -> dict[str, Tensor]:
    """A batch's `input_ids`, `attention_mask` and `position_ids`; an empty prompt is a row of pads."""
    width = width or max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def pruned(model: PreTrainedModel, route: Sequence[bool]) -> PreTrainedModel:
    """A dense copy of `model` without the blocks that `route` skips: what a route shared by all rows must equal."""
    shorter = copy.deepcopy(model)
    kept = [block for block, runs in zip(shorter.model.layers, route, strict=True) if runs]
    for place, block in enumerate(kept):
        block.self_attn.layer_idx = place
    shorter.model.layers = nn.ModuleList(kept)
    shorter.config.num_hidden_layers = len(kept)
    shorter.config.layer_types = ["full_attention"] * len(kept)
    return shorter


def disturb(handle: methods.Method, seed: int = 0) -> None:
    """Random values in everything the method adds, so that decisions depend on the input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in handle.model.named_parameters():
            if f".{ADDED}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
