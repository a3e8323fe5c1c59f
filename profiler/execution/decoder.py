"""Where the parts of a Hugging Face decoder are, by the names Llama- and Qwen2-style models share.

Any architecture with these names works as it is; others are refused with the name that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn

from profiler.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Decoder:
    """The parts of one model tree. `blocks` are its decoder layers in order, `head` the language-model head."""

    model: PreTrainedModel
    base: nn.Module
    embedding: nn.Module
    blocks: list[nn.Module]
    norm: nn.Module
    head: nn.Linear

    @property
    def hidden_size(self) -> int:
        """d, the width of the residual stream."""
        return int(self.model.config.hidden_size)


def decoder(model: PreTrainedModel) -> Decoder:
    """Find the parts of `model`.

    Raises:
        InputError: the model is not a decoder of the supported shape; the message names what is missing.
    """
    name = type(model).__name__
    base = model.base_model
    for part in ("embed_tokens", "layers", "norm"):
        if not hasattr(base, part):
            raise InputError(f"{name}: supported decoders have `{part}`, and {type(base).__name__} has none")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError(f"{name}: supported decoders end in a linear language-model head, found {type(head).__name__}")
    blocks = list(cast("nn.ModuleList", base.layers))
    for index, block in enumerate(blocks):
        missing = [part for part in BLOCK_PARTS if not hasattr(block, part)]
        if not missing:
            missing = [f"self_attn.{part}" for part in ATTENTION_PARTS if not hasattr(block.self_attn, part)]
        if missing:
            raise InputError(f"{name}: decoder layer {index} has no {', '.join(missing)}; this shape is not supported")
    return Decoder(model, base, base.embed_tokens, blocks, base.norm, head)
