"""Where a decoder's rows are counted and its segments timed: the places every method on it shares."""

from __future__ import annotations

from typing import cast

from torch import nn

from profiler.execution.decoder import Decoder
from profiler.recorder import Probe, SpanSite


def head_probe(dec: Decoder) -> Probe:
    """Counts the rows whose logits are computed."""
    return Probe(-1, "head", 0, dec.head, whole=True)


def first_products(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The first product of a block's attention and of its feed-forward half."""
    attention, mlp = cast(nn.Module, block.self_attn), cast(nn.Module, block.mlp)
    return cast(nn.Module, attention.q_proj), cast(nn.Module, mlp.gate_proj)


def block_probes(
    dec: Decoder, *, attention: tuple[str, int] | None = None, ffn: tuple[str, int] | None = None
) -> list[Probe]:
    """Probes on every layer's attention and feed-forward, as (site, choice); a half given as None is left out."""
    found = []
    for layer, block in enumerate(dec.blocks):
        for target, module in zip((attention, ffn), first_products(block), strict=True):
            if target is not None:
                found.append(Probe(layer, target[0], target[1], module))
    return found


def decoder_spans(dec: Decoder) -> list[SpanSite]:
    """Segments of a decoder: embedding, attention, ffn, norm, head; a layer's own norms in traces only."""
    found = [SpanSite(dec.embedding, "embedding", -1), SpanSite(dec.norm, "norm", -1), SpanSite(dec.head, "head", -1)]
    for layer, block in enumerate(dec.blocks):
        found += [
            SpanSite(cast(nn.Module, block.input_layernorm), "norm", layer, traced_only=True),
            SpanSite(cast(nn.Module, block.self_attn), "attention", layer),
            SpanSite(cast(nn.Module, block.post_attention_layernorm), "norm", layer, traced_only=True),
            SpanSite(cast(nn.Module, block.mlp), "ffn", layer),
        ]
    return found
