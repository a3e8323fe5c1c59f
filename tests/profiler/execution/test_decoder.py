"""Which decoders are understood, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from profiler.errors import InputError
from profiler.execution.decoder import ADDED, decoder
from tests.profiler.tiny import SHAPES, config_of

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def meta_model(model_type: str, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_found_by_their_names(shape: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    found = decoder(model)
    assert found.embedding is model.get_input_embeddings()
    assert found.head is model.get_output_embeddings()
    assert found.norm is model.model.norm
    assert found.base is model.model
    assert found.blocks == list(model.model.layers)
    assert found.hidden_size == 32


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "smollm3"])
def test_relatives_of_llama_are_understood(model_type: str) -> None:
    settings = dict(SMALL) | ({"sliding_window": None} if model_type == "mistral" else {})
    assert len(decoder(meta_model(model_type, **settings)).blocks) == 3


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt2", "GPT2LMHeadModel: supported decoders have `embed_tokens`, and GPT2Model has none"),
        (
            "phi3",
            "Phi3ForCausalLM: decoder layer 0 has no self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, mlp.gate",
        ),
        ("olmo2", "Olmo2ForCausalLM: decoder layer 0 has no input_layernorm; this shape is not supported"),
        ("gemma2", "Gemma2ForCausalLM: model.layers.0.*norm.weight belongs to no known part of a decoder"),
        ("mixtral", "MixtralForCausalLM: decoder layer 0 has no mlp.gate_proj, mlp.up_proj, mlp.down_proj"),
    ],
)
def test_other_architectures_are_refused_by_name(model_type: str, message: str) -> None:
    given = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64} if model_type == "gpt2" else SMALL
    with pytest.raises(InputError, match=message):
        decoder(meta_model(model_type, **given))


def test_a_window_is_refused_since_its_attention_would_be_counted_too_large() -> None:
    with pytest.raises(InputError, match="MistralForCausalLM: only full attention .* a window of 16 tokens"):
        decoder(meta_model("mistral", **SMALL, sliding_window=16))
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(InputError, match="Qwen2ForCausalLM: only full attention .* a window of 8 tokens"):
        decoder(meta_model("qwen2", **SMALL, **windowed))


def test_a_model_without_a_head_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(config_of("llama"))
    with pytest.raises(InputError, match="LlamaModel: supported decoders end in a linear language-model head"):
        decoder(model)


def test_what_a_method_added_is_no_unknown_part() -> None:
    model = meta_model("llama", **SMALL)
    model.model.layers[1].add_module(ADDED, nn.Linear(4, 4))
    assert len(decoder(model).blocks) == 3
    model.model.layers[2].add_module("extra", nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"model.layers.2.extra.weight belongs to no known part"):
        decoder(model)
