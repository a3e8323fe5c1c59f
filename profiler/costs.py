"""What each part of a decoder costs: parameters, FLOPs and bytes, read off a model tree.

Works on real weights and on the meta device alike. Conventions:

- A multiply-add is two FLOPs; products only (norms, activations, softmax and rotary tables are not counted),
  which is what `torch.utils.flop_counter` counts.
- A linear map `[in, out]` costs `2·in·out` FLOPs a row.
- Attention products (scores and values) cost `4·heads·head_dim` FLOPs for each (row, attended position) pair;
  grouped-query attention shrinks K and V projections and the cache, not these products. Multi-head latent attention
  costs `2·heads·(key dim + value dim)` a pair and caches the latent; a row pays once for making its keys and values
  from it. What is not counted: transformers makes them anew for every cached position in each decode step.
- `weight_bytes` are all weights of the choice's modules, norms and biases included, read once by a step in which
  any row takes it. An embedding look-up reads `d·itemsize` bytes a token and is not counted; a tied head is (the
  product reads it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from torch import nn

from profiler.execution.decoder import ADDED, Decoder, decoder, is_latent
from profiler.records import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parameters(modules: Iterable[nn.Module]) -> int:
    """Number of parameters of the modules, each tensor counted once."""
    return sum(tensor.numel() for tensor in nn.ModuleList(modules).parameters())


def backbone_parameters(model: nn.Module) -> int:
    """Number of parameters of a model without what a method hung into it; a tied tensor counts once."""
    return sum(tensor.numel() for name, tensor in model.named_parameters() if f".{ADDED}." not in name)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def _flops_per_row(module: nn.Module) -> int:
    return sum(2 * m.in_features * m.out_features for m in _linears(module))


def _bytes(modules: Iterable[nn.Module]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in nn.ModuleList(modules).parameters())


def attention_choice(dec: Decoder, layer: int, *, site: str = "attention", index: int = 0, name: str = "run") -> Choice:
    """The attention half of a block, its input norm included."""
    block = dec.blocks[layer]
    attention = cast(nn.Module, block.self_attn)
    config = dec.model.config
    heads = int(config.num_attention_heads)
    query = cast(nn.Linear, attention.q_proj)
    key_dim = query.out_features // heads
    if is_latent(attention):
        value_dim = cast(nn.Linear, attention.o_proj).in_features // heads
        cached = cast(nn.Linear, attention.kv_a_proj_with_mqa).out_features
    else:
        value_dim = key_dim
        cached = sum(cast(nn.Linear, part).out_features for part in (attention.k_proj, attention.v_proj))
    parts = [attention, cast(nn.Module, block.input_layernorm)]
    return Choice(
        layer=layer,
        site=site,
        index=index,
        name=name,
        segments=["attention"],
        backbone_parameters=parameters(parts),
        flops_per_row=_flops_per_row(attention),
        flops_per_context=2 * heads * (key_dim + value_dim),
        weight_bytes=_bytes(parts),
        kv_bytes_per_row=cached * query.weight.element_size(),
    )


def ffn_choice(dec: Decoder, layer: int, *, site: str = "ffn", index: int = 0, name: str = "run") -> Choice:
    """The feed-forward half of a block, its norm included."""
    block = dec.blocks[layer]
    parts = [cast(nn.Module, block.mlp), cast(nn.Module, block.post_attention_layernorm)]
    return Choice(
        layer=layer,
        site=site,
        index=index,
        name=name,
        segments=["ffn"],
        backbone_parameters=parameters(parts),
        flops_per_row=_flops_per_row(parts[0]),
        weight_bytes=_bytes(parts),
    )


def block_choice(dec: Decoder, layer: int, *, index: int, name: str = "run") -> Choice:
    """A whole block, as one alternative at site `block`."""
    attention, ffn = attention_choice(dec, layer), ffn_choice(dec, layer)
    return Choice(
        layer=layer,
        site="block",
        index=index,
        name=name,
        segments=[*attention.segments, *ffn.segments],
        backbone_parameters=attention.backbone_parameters + ffn.backbone_parameters,
        flops_per_row=attention.flops_per_row + ffn.flops_per_row,
        flops_per_context=attention.flops_per_context,
        weight_bytes=attention.weight_bytes + ffn.weight_bytes,
        kv_bytes_per_row=attention.kv_bytes_per_row,
    )


def key_value_choice(dec: Decoder, layer: int) -> Choice:
    """Keys and values of a block's input, its norm included, as a site of their own: where rows that skip the block
    are projected too, all rows are."""
    block = dec.blocks[layer]
    attention = cast(nn.Module, block.self_attn)
    products = [cast(nn.Module, attention.k_proj), cast(nn.Module, attention.v_proj)]
    parts = [*products, cast(nn.Module, block.input_layernorm)]
    return Choice(
        layer=layer,
        site="kv",
        index=0,
        name="run",
        segments=["attention", "kv"],
        backbone_parameters=parameters(parts),
        flops_per_row=sum(map(_flops_per_row, products)),
        weight_bytes=_bytes(parts),
        kv_bytes_per_row=attention_choice(dec, layer).kv_bytes_per_row,
    )


def without(whole: Choice, part: Choice) -> Choice:
    """`whole` less what `part`, a site of its own, costs."""
    shared = ("backbone_parameters", "flops_per_row", "weight_bytes", "kv_bytes_per_row")
    return whole.model_copy(update={name: getattr(whole, name) - getattr(part, name) for name in shared})


def shared_choices(dec: Decoder) -> list[Choice]:
    """What every token passes whatever a router says: embedding, final norm, head (layer -1).

    A tied head has no parameters of its own but its product, and the reading of its weights, are real.
    """
    tied = dec.head.weight is cast(nn.Embedding, dec.embedding).weight
    own = 0 if tied else parameters([dec.head])
    return [
        Choice(
            layer=-1, site="embedding", index=0, name="run", segments=["embedding"],
            backbone_parameters=parameters([dec.embedding]),
        ),
        Choice(
            layer=-1, site="norm", index=0, name="run", segments=["norm"],
            backbone_parameters=parameters([dec.norm]), weight_bytes=_bytes([dec.norm]),
        ),
        Choice(
            layer=-1, site="head", index=0, name="run", segments=["head"], backbone_parameters=own,
            flops_per_row=_flops_per_row(dec.head), weight_bytes=_bytes([dec.head]),
        ),
    ]  # fmt: skip


def dense_choices(model: PreTrainedModel) -> list[Choice]:
    """Every site of an unrouted decoder, one choice each; their parameters add up to the model's."""
    dec = decoder(model, latent=True)
    layers = range(len(dec.blocks))
    per_layer = [choice for i in layers for choice in (attention_choice(dec, i), ffn_choice(dec, i))]
    return [*shared_choices(dec), *per_layer]


def flops(choices: Iterable[Choice], rows: int, context: int, *, head_rows: int | None = None) -> int:
    """FLOPs of passing `rows` rows, attending `context` positions in all, through all of `choices`.

    `head_rows` are the rows whose logits are computed (default: all).
    """
    total = 0
    for choice in choices:
        entering = rows if head_rows is None or choice.site != "head" else head_rows
        total += entering * choice.flops_per_row + context * choice.flops_per_context
    return total
