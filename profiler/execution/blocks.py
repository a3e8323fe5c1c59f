"""A decoder block under a gate: the layer of the cache it keeps, running it for the sequences that take it, and
working out keys and values of those that do not.

Not here: what decides (methods), and how rows are taken out of a batch (`kv`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from profiler.errors import InputError
from profiler.execution.decoder import Decoder
from profiler.execution.gates import Gates
from profiler.execution.kv import ProjectedLayer, SubsetLayer, adopt, gather, scatter, write_paged
from profiler.execution.sequences import Sequences

if TYPE_CHECKING:
    from profiler.recorder import Recorder

Kind = TypeVar("Kind", SubsetLayer, ProjectedLayer)


def cache_layer(cache: Any, layer: int, layers: int, kind: type[Kind] = SubsetLayer) -> Kind:  # type: ignore[assignment]
    """The layer of a padded batch's cache that block `layer` of `layers` keeps; a fresh cache is adopted first.

    Raises:
        InputError: the cache is of a kind that cannot leave rows out, or was filled by another model.
    """
    held = cache.layers
    if layer >= len(held) or type(held[layer]) is not kind or len(held) != layers:
        adopt(cache, layers, kind)
    return cast(Kind, cache.layers[layer])


def run_gated(
    block: Callable[..., Tensor],
    hidden: Tensor,
    kwargs: dict[str, Any],
    sequences: Sequences,
    gates: Gates,
    recorder: Recorder,
    layer: int,
) -> Tensor:
    """Run `block` for the sequences whose gate says so; the rows of the others come back as they went in.

    Args:
        block: a decoder layer's own forward.
        hidden: `[B, T, d]` padded, `[1, T, d]` packed.
        kwargs: what the decoder passes its layers.
    """
    if len(gates.chosen) == len(gates):
        return block(hidden, **kwargs)
    if not gates.chosen:
        return hidden
    with recorder.span("dispatch", layer):
        part = gather(hidden, kwargs, sequences, gates.chosen)
    with recorder.executing(sequences.view_of(gates.chosen)) if recorder.recording else nullcontext():
        output = block(part.hidden, **part.kwargs)
    with recorder.span("dispatch", layer):
        return scatter(hidden, part, output)


def run_projecting(
    block: nn.Module,
    run_block: Callable[..., Tensor],
    hidden: Tensor,
    kwargs: dict[str, Any],
    sequences: Sequences,
    gates: Gates,
    recorder: Recorder,
    layer: int,
    kept: ProjectedLayer | None,
) -> Tensor:
    """`run_gated`, after working out keys and values of the sequences that skip: for `kept`, or where sequences are
    packed for the serving engine's cache.

    Without a cache they are worked out all the same, so that a step costs what the policy costs.

    Args:
        block: the decoder layer; `run_block` is its own forward.
        hidden: `[B, T, d]` padded, `[1, T, d]` packed.
    """
    skipped = [i for i, gate in enumerate(gates.of_S) if not gate.run]
    if skipped:
        with recorder.span("kv", layer):
            rows, given = hidden, {"position_embeddings": kwargs["position_embeddings"]}
            if sequences.packed:
                given = {name: value for name, value in kwargs.items() if name != "attention_mask"}
            if gates.chosen:
                part = gather(hidden, given, sequences, skipped)
                rows, given = part.hidden, part.kwargs
            with recorder.executing(sequences.view_of(skipped)) if recorder.recording else nullcontext():
                keys, values = keys_and_values(block, rows, given["position_embeddings"])
            if sequences.packed:
                write_paged(given["cache"], keys, values, layer, given)
            elif kept is not None:
                kept.project(keys, values)
    return run_gated(run_block, hidden, kwargs, sequences, gates, recorder, layer)


def keys_and_values(block: nn.Module, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What `block` would put into its cache for `hidden` (`[B, T, d]`): `[B, KV heads, T, head dim]` each.

    Args:
        tables: rotary cosines and sines, `[B or 1, T, head dim]`.
    """
    attention = cast(Any, block.self_attn)
    norm = cast(nn.Module, block.input_layernorm)
    # Past the recorder: its clock would book this as a norm the block ran.
    normed = type(norm).forward(norm, hidden)
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    keys, values = (part(normed).view(shape).transpose(1, 2) for part in (attention.k_proj, attention.v_proj))
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    return rotate(keys[:, :0], keys, *tables)[1], values


def refuse_other_attention(dec: Decoder) -> None:
    """Hold `keys_and_values` against what a block's own attention caches, for two tokens.

    Raises:
        InputError: they differ: this architecture does more to its keys or values than project and rotate them.
    """
    block, base, cache = dec.blocks[0], cast(Any, dec.base), DynamicCache()
    weight, norm = dec.head.weight, cast(nn.Module, block.input_layernorm)
    with torch.no_grad():
        numbers = torch.linspace(-1, 1, 2 * dec.hidden_size, device=weight.device)
        hidden = numbers.view(1, 2, -1).to(weight.dtype)
        tables = base.rotary_emb(hidden, torch.tensor([[0, 1]], device=weight.device))
        attention = cast(Any, block.self_attn)
        attention(hidden_states=norm(hidden), position_embeddings=tables, attention_mask=None, cache=cache)
        stored = cast(DynamicLayer, cache.layers[0])
        try:
            pairs = zip((stored.keys, stored.values), keys_and_values(block, hidden, tables), strict=True)
            alike = all(torch.allclose(cast(Tensor, own), mine, rtol=1e-2, atol=1e-3) for own, mine in pairs)
        except (AttributeError, RuntimeError):
            alike = False
    if not alike:
        raise InputError(
            f"kv_policy project: {type(attention).__name__} does more to its keys or values than project and rotate "
            "them, so those of a skipped block cannot be worked out; use kv_policy request"
        )
