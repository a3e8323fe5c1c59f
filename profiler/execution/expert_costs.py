"""What a layer costs whose feed-forward half is a block of experts: attention, router, shared and routed experts.

The backbone's own FFN is the last choice at the experts' site. Nothing takes it; with it the parameters of a layer's
sites add up to the backbone's, and rule 1 shows that it did not run. The experts count as its replacement. LN_ffn runs
always, so it is counted with attention. Not here: bytes moved between ranks.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from profiler.costs import attention_choice, ffn_choice, parameters
from profiler.execution.decoder import Decoder
from profiler.execution.expert_shapes import Design
from profiler.records import Choice

#: Name of the decision site, and of the segment of the experts' products.
SITE = "experts"


def expert_choices(dec: Decoder, layer: int, design: Design, *, padded: bool = False) -> list[Choice]:
    """The choices of one layer. Experts are in the backbone's dtype, the router in float32 at least.

    Args:
        dec: the decoder.
        layer: which.
        design: its block.
        padded: whether every expert is computed, and read, as wide as the widest.
    """
    block, d, rule = dec.blocks[layer], dec.hidden_size, design.rule
    mlp, norm = cast(nn.Module, block.mlp), cast(nn.Module, block.post_attention_layernorm)
    attention, ffn = attention_choice(dec, layer), ffn_choice(dec, layer)
    moved, dtype = parameters([norm]), next(mlp.parameters()).dtype
    moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in norm.parameters())
    router, shared, widest = d * rule.rows, 3 * d * design.shared_width, max(design.widths)
    found = [
        attention.model_copy(
            update={
                "backbone_parameters": attention.backbone_parameters + moved,
                "weight_bytes": attention.weight_bytes + moved_bytes,
            }
        ),
        Choice(
            layer=layer, site="router", index=0, name="run", segments=["router"], overhead_parameters=router,
            flops_per_row=2 * router, weight_bytes=router * torch.promote_types(dtype, torch.float32).itemsize,
        ),
    ]  # fmt: skip
    if shared:
        found.append(
            Choice(
                layer=layer, site="shared", index=0, name="run", segments=["shared"], replacement_parameters=shared,
                flops_per_row=2 * shared, weight_bytes=shared * dtype.itemsize,
            )
        )  # fmt: skip
    for expert, width in enumerate(design.widths):
        computed = 3 * d * (widest if padded else width)
        found.append(
            Choice(
                layer=layer, site=SITE, index=expert, name=design.name(expert), segments=[SITE],
                replacement_parameters=3 * d * width, flops_per_row=2 * computed,
                weight_bytes=computed * dtype.itemsize,
            )
        )  # fmt: skip
    unused = {
        "site": SITE,
        "index": len(design.widths),
        "name": "ffn",
        "backbone_parameters": ffn.backbone_parameters - moved,
        "weight_bytes": ffn.weight_bytes - moved_bytes,
    }
    return [*found, ffn.model_copy(update=unused)]
