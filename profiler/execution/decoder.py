"""Where the parts of a Hugging Face decoder are, by the names Llama- and Qwen2-style models share.

Any architecture with these names, and nothing beside them that holds parameters, works as it is. Others are refused
with what is missing or unknown: a block with a further norm, experts or a sliding window would be counted wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from profiler.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
#: Multi-head latent attention with plain queries (DeepSeek-V2): a token's keys and values come from one cached latent.
LATENT_PARTS = ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
FFN_PARTS = ("gate_proj", "up_proj", "down_proj")

#: Name under which a method hangs its own modules into a tree; what is below it is no part of the backbone.
ADDED = "gatewise_added"


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


def is_latent(attention: nn.Module) -> bool:
    """Whether a block's attention is multi-head latent attention of the known form."""
    return all(getattr(attention, part, None) is not None for part in LATENT_PARTS)


def frame(model: PreTrainedModel) -> tuple[Any, nn.Linear]:
    """The base model, with its embedding, layers and last norm, and the head: what every decoder has around its blocks.

    Raises:
        InputError: one of them is missing or of another kind; the message names it.
    """
    name, base = type(model).__name__, model.base_model
    for part in ("embed_tokens", "layers", "norm"):
        if not hasattr(base, part):
            raise InputError(f"{name}: supported decoders have `{part}`, and {type(base).__name__} has none")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError(f"{name}: supported decoders end in a linear language-model head, found {type(head).__name__}")
    return base, head


def decoder(model: PreTrainedModel, *, latent: bool = False) -> Decoder:
    """Find the parts of `model`.

    Args:
        model: any decoder.
        latent: accept multi-head latent attention; for a caller that does not look into attention.

    Raises:
        InputError: the model is not a decoder of the supported shape; the message names what is missing or unknown.
    """
    name = type(model).__name__
    base, head = frame(model)
    blocks = list(cast("nn.ModuleList", base.layers))
    for index, block in enumerate(blocks):
        missing = [part for part in BLOCK_PARTS if not hasattr(block, part)]
        if not missing:
            attention = cast(nn.Module, block.self_attn)
            if not (latent and is_latent(attention)):
                missing = [f"self_attn.{part}" for part in ATTENTION_PARTS if not hasattr(attention, part)]
            missing += [f"mlp.{part}" for part in FFN_PARTS if not hasattr(block.mlp, part)]
        if missing:
            raise InputError(f"{name}: decoder layer {index} has no {', '.join(missing)}; this shape is not supported")
    embedding, norm = cast(nn.Module, base.embed_tokens), cast(nn.Module, base.norm)
    found = Decoder(model, base, embedding, blocks, norm, head)
    _refuse_unknown(found)
    return found


def _parts(dec: Decoder) -> Iterator[nn.Module]:
    yield from (dec.embedding, dec.norm, dec.head)
    for block in dec.blocks:
        mlp = cast(nn.Module, block.mlp)
        yield from (cast(nn.Module, getattr(block, part)) for part in BLOCK_PARTS if part != "mlp")
        yield from (cast(nn.Module, getattr(mlp, part)) for part in FFN_PARTS)


def _refuse_unknown(dec: Decoder) -> None:
    name, config = type(dec.model).__name__, dec.model.config
    known = {id(tensor) for part in _parts(dec) for tensor in part.parameters()}
    for path, tensor in dec.model.named_parameters():
        if id(tensor) not in known and f".{ADDED}." not in path:
            raise InputError(f"{name}: {path} belongs to no known part of a decoder; this shape is not supported")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None) is not None):
        window = getattr(config, "sliding_window", None)
        raise InputError(f"{name}: only full attention is supported; this model attends a window of {window} tokens")
