"""Shapes of known models with random weights: for costs, memory and time, where quality does not matter.

The times of a dense model do not depend on the values of its weights, so a preset answers how long and how
much without a download; whatever depends on values (a router's decisions, text, quality) it answers at random,
and results are labelled so. Sizes are those of the models' published configs. Every preset speaks
`byte_tokenizer`, and its special ids are that tokenizer's; the vocabulary keeps the published size, which the
head's cost depends on.

Not here: pretrained weights, and the choice of device (`models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiler.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, SIZE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Preset:
    """A model's shape. `parameters` counts a tied head once."""

    name: str
    model_type: str
    parameters: int
    what: str
    settings: Mapping[str, Any]


def _shape(
    *, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, context: int, tied: bool
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }


def _latent(*, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, Any]:
    """Multi-head latent attention with plain queries; every layer's feed-forward half is dense."""
    return {
        "q_lora_rank": None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 10_000,
    }


def _rotary(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _experts(model_type: str, name: str, parameters: int, what: str, **settings: Any) -> Preset:
    """A small mixture-of-experts model: 4 layers of width 64 with 8 experts, 2 a token."""
    shape = _shape(vocab=SIZE, hidden=64, ffn=96, layers=4, heads=4, kv_heads=2, context=2048, tied=False)
    given = shape | _rotary(10_000.0) | {"num_experts_per_tok": 2} | settings
    return Preset(name, model_type, parameters, f"{what}, small: 4 layers of width 64, 2 of 8 experts a token", given)


_LLAMA_3_1_ROTARY: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            "llama",
            312_320,
            "6 layers of width 64, grouped-query attention; runs anywhere in a second",
            _shape(vocab=SIZE, hidden=64, ffn=192, layers=6, heads=4, kv_heads=2, context=2048, tied=True)
            | _rotary(10_000.0),
        ),
        Preset(
            "smollm2-135m-random",
            "llama",
            134_515_008,
            "SmolLM2-135M's shape, without its download",
            _shape(vocab=49_152, hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, context=8192, tied=True)
            | _rotary(100_000.0)
            | {"rms_norm_eps": 1e-5},
        ),
        Preset(
            "qwen2.5-0.5b",
            "qwen2",
            494_032_768,
            "Qwen2.5-0.5B's shape",
            _shape(vocab=151_936, hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, context=32_768, tied=True)
            | _rotary(1_000_000.0),
        ),
        Preset(
            "llama-3.1-8b",
            "llama",
            8_030_261_248,
            "Llama-3.1-8B's shape",
            _shape(vocab=128_256, hidden=4096, ffn=14_336, layers=32, heads=32, kv_heads=8, context=131_072, tied=False)
            | _LLAMA_3_1_ROTARY
            | {"rms_norm_eps": 1e-5},
        ),
        Preset(
            "llama-2-7b",
            "llama",
            6_738_415_616,
            "Llama-2-7B's shape",
            _shape(vocab=32_000, hidden=4096, ffn=11_008, layers=32, heads=32, kv_heads=32, context=4096, tied=False)
            | _rotary(10_000.0)
            | {"rms_norm_eps": 1e-5},
        ),
        Preset(
            "llama-2-13b",
            "llama",
            13_015_864_320,
            "Llama-2-13B's shape",
            _shape(vocab=32_000, hidden=5120, ffn=13_824, layers=40, heads=40, kv_heads=40, context=4096, tied=False)
            | _rotary(10_000.0)
            | {"rms_norm_eps": 1e-5},
        ),
        Preset(
            "mohge-a3b",
            "deepseek_v2",
            611_817_984,
            "MoHGE A3B's attention and dense layer; method mohge with size A3B puts its experts in",
            _shape(vocab=102_400, hidden=1024, ffn=6144, layers=15, heads=16, kv_heads=16, context=4096, tied=False)
            | _latent(kv_rank=512, nope=128, rope=64, value=128)
            | _rotary(10_000.0),
        ),
        _experts("mixtral", "mixtral-tiny", 674_752, "Mixtral's form", num_local_experts=8),
        _experts(
            "qwen2_moe",
            "qwen2-moe-tiny",
            528_064,
            "Qwen2-MoE's form, a gated shared expert",
            num_experts=8,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            mlp_only_layers=[],
        ),
        _experts(
            "qwen3_moe",
            "qwen3-moe-tiny",
            478_272,
            "Qwen3-MoE's form, weights that add up to 1",
            num_experts=8,
            moe_intermediate_size=64,
            head_dim=16,
            norm_topk_prob=True,
            mlp_only_layers=[],
        ),
        _experts("olmoe", "olmoe-tiny", 675_136, "OLMoE's form", num_experts=8),
        _experts(
            "deepseek_v3",
            "deepseek-v3-tiny",
            449_216,
            "DeepSeek-V3's form, latent attention, 2 groups of experts, 1 shared, layer 0 dense",
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            moe_intermediate_size=64,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    )
}


def preset_config(preset: Preset) -> PreTrainedConfig:
    """transformers' config of the shape."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(
        preset.model_type, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, **preset.settings
    )
    return config


def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int, attention: str
) -> PreTrainedModel:
    """A model of `config` in eval mode whose weights are drawn from `seed`, on the device itself.

    Equal seeds give equal weights on the same kind of device with the same dtype; a CPU's and a GPU's generators
    differ. The caller's own random state is left as it was. About 0.2 G weights a second on a CPU core.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Built without storage first: the constructor would draw every weight once and transformers once more.
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gave a tied head storage of its own
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.init_weights()
    model.eval()
    return model
