"""What a layer costs whose feed-forward half may be replaced by an adapter: attention, router, adapter, FFN.

LN_ffn serves both branches, so it is counted with attention, which always runs. Not here: what a router costs.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from profiler.costs import attention_choice, ffn_choice, parameters
from profiler.execution.decoder import Decoder
from profiler.records import Choice

ADAPTER, FFN = 0, 1


def forked_choices(
    dec: Decoder, layer: int, *, adapter_width: int, router_parameters: int, router_flops: int
) -> list[Choice]:
    """The choices of one layer. Adapters are in the backbone's dtype, routers in float32 at least.

    Args:
        dec: the decoder.
        layer: which.
        adapter_width: d_r; the adapter has no biases.
        router_parameters: charged to this layer.
        router_flops: of one row.
    """
    block = dec.blocks[layer]
    mlp, norm = cast(nn.Module, block.mlp), cast(nn.Module, block.post_attention_layernorm)
    attention, ffn = attention_choice(dec, layer), ffn_choice(dec, layer, index=FFN, name="ffn")
    moved, dtype = parameters([norm]), next(mlp.parameters()).dtype
    moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in norm.parameters())
    replacement = 2 * dec.hidden_size * adapter_width
    return [
        attention.model_copy(
            update={
                "backbone_parameters": attention.backbone_parameters + moved,
                "weight_bytes": attention.weight_bytes + moved_bytes,
            }
        ),
        Choice(
            layer=layer, site="router", index=0, name="run", segments=["router"],
            overhead_parameters=router_parameters, flops_per_row=router_flops,
            weight_bytes=router_parameters * torch.promote_types(dtype, torch.float32).itemsize,
        ),
        Choice(
            layer=layer, site="ffn", index=ADAPTER, name="adapter", segments=["replacement"],
            replacement_parameters=replacement, flops_per_row=2 * replacement,
            weight_bytes=replacement * dtype.itemsize,
        ),
        ffn.model_copy(
            update={
                "backbone_parameters": ffn.backbone_parameters - moved,
                "weight_bytes": ffn.weight_bytes - moved_bytes,
            }
        ),
    ]  # fmt: skip
