"""Running one block for some sequences of a batch, with the key/value cache kept right.

This is the one place that sub-indexes hidden rows, masks, rotary tables, caches and the engine's index lists.

Under the `request` policy a skipped layer holds no keys or values for that request: the gates were frozen when
the prompt came, so no later step of the request asks for them. A `SubsetLayer` therefore stores the batch rows
that run and remembers which they are; it counts the tokens *seen*, not stored, because transformers asks
layer 0 for the cache's length and layer 0 may hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from profiler.errors import InputError
from profiler.execution.sequences import Sequences


class SubsetLayer(DynamicLayer):
    """A cache layer that stores only the batch rows that run it.

    `ran_B` is fixed by the first step (`settle`): `[B]` bools on the host. Keys and values are
    `[rows that run, KV heads, tokens seen, head dim]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.ran_B: tuple[bool, ...] | None = None
        self.gate_B: Tensor | None = None

    def settle(self, ran_B: Sequence[bool], gate_B: Tensor) -> None:
        """Freeze which rows run, and the gate value each was decided by (`[B]`)."""
        self.ran_B = tuple(ran_B)
        self.gate_B = gate_B

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step; called once a forward, whether or not any row ran."""
        self.seen += tokens

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions and masks are made from."""
        return self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; like the base class, positive values are refused."""
        super().crop(tokens_to_remove)
        self.seen -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, decisions included."""
        super().reset()
        self.seen, self.ran_B, self.gate_B = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become copies of rows `beam_idx` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.ran_B is not None:
            self.batch_select_indices(torch.arange(len(self.ran_B)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep batch rows `indices`, in that order, duplicates allowed."""
        if self.ran_B is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        wanted = [int(i) for i in indices.tolist()]
        place = {row: k for k, row in enumerate(i for i, ran in enumerate(self.ran_B) if ran)}
        if self.is_initialized and self.keys is not None:
            kept = torch.tensor([place[i] for i in wanted if i in place], dtype=torch.long, device=self.keys.device)
            self.keys, self.values = self.keys[kept], self.values[kept]
        self.ran_B = tuple(self.ran_B[i] for i in wanted)
        if self.gate_B is not None:
            self.gate_B = self.gate_B[indices.to(self.gate_B.device)]


def adopt(cache: Any, layers: int) -> None:
    """Make a fresh `DynamicCache` skip-aware, in place; a cache already adopted is left as it is.

    Raises:
        InputError: a cache this policy cannot keep right (static, sliding, quantised, offloaded, or one that
            another model has already filled). Going on silently would read stale or foreign keys.
    """
    if all(isinstance(layer, SubsetLayer) for layer in cache.layers) and cache.layers:
        return
    name = type(cache).__name__
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        raise InputError(f"skipping blocks needs a DynamicCache (or the continuous-batching engine's); got {name}")
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if odd:
        raise InputError(f"skipping blocks needs plain DynamicLayer cache layers; this {name} has {', '.join(sorted(odd))}")
    if any(layer.get_seq_length() for layer in cache.layers):
        raise InputError(f"this {name} was filled before the gated model saw it; start the request with an empty cache")
    cache.layers[:] = [SubsetLayer() for _ in range(layers)]


def kv_bytes(cache: Cache, rows_S: Sequence[int]) -> tuple[int, int]:
    """Bytes a padded batch's cache holds: (allocated, live).

    Allocated counts the tensors as stored, pads included. Live counts what the requests need: for every layer a
    row runs, keys and values of its real tokens so far (`rows_S`).
    """
    allocated = live = 0
    for layer in cache.layers:
        if not getattr(layer, "is_initialized", False) or layer.keys is None or layer.keys.numel() == 0:
            continue
        allocated += layer.keys.nbytes + layer.values.nbytes
        a_token = 2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.element_size()
        ran = layer.ran_B if isinstance(layer, SubsetLayer) and layer.ran_B is not None else [True] * len(rows_S)
        live += a_token * sum(rows for rows, run in zip(rows_S, ran, strict=True) if run)
    return allocated, live


Block = Callable[..., Tensor]


def run_subset(block: Block, hidden: Tensor, kwargs: dict[str, Any], sequences: Sequences, chosen: list[int]) -> Tensor:
    """Run `block` for the `chosen` sequences only; the rows of the others come back as they went in.

    Args:
        block: a decoder layer's forward.
        hidden: `[B, T, d]` padded, `[1, T, d]` packed.
        kwargs: what the decoder passes its layers (mask, positions, rotary tables, cache, engine indices).
        chosen: indices of the sequences that run; neither empty nor all.
    """
    if sequences.bounds is not None:
        rows, sub = _packed_subset(kwargs, sequences, chosen, hidden.device)
        return hidden.index_copy(1, rows, block(hidden.index_select(1, rows), **sub))
    rows = torch.tensor(chosen, device=hidden.device)
    sub = _padded_subset(kwargs, rows, len(sequences))
    return hidden.index_copy(0, rows, block(hidden.index_select(0, rows), **sub))


def _padded_subset(kwargs: dict[str, Any], rows: Tensor, batch: int) -> dict[str, Any]:
    def pick(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(pick(item) for item in value)
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch and batch > 1:
            return value.index_select(0, rows)
        return value

    known = {name: pick(kwargs[name]) for name in ("attention_mask", "position_ids", "position_embeddings") if name in kwargs}
    return {**kwargs, **known}


def _packed_subset(
    kwargs: dict[str, Any], sequences: Sequences, chosen: list[int], device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    bounds_q = sequences.bounds
    assert bounds_q is not None
    rows = _ranges(bounds_q, chosen, device)
    (kind, bounds_tensor) = next(iter(kwargs["cu_seq_lens_k"].items()))
    bounds_k = [int(n) for n in bounds_tensor.tolist()]
    keys = _ranges(bounds_k, chosen, device)
    sub = dict(kwargs)
    sub["position_embeddings"] = tuple(t.index_select(1, rows) for t in kwargs["position_embeddings"])
    if kwargs.get("position_ids") is not None:
        sub["position_ids"] = kwargs["position_ids"].index_select(-1, rows)
    mask = kwargs.get("attention_mask")
    if mask is not None:
        sub["attention_mask"] = mask.index_select(-2, rows).index_select(-1, keys)
    sub["write_index"] = [index.index_select(0, rows) for index in kwargs["write_index"]]
    sub["read_index"] = [index.index_select(0, keys) if index.numel() else index for index in kwargs["read_index"]]
    sub["cu_seq_lens_q"] = _bounds(bounds_q, chosen, kwargs["cu_seq_lens_q"])
    sub["cu_seq_lens_k"] = {kind: _bounds(bounds_k, chosen, bounds_tensor)}
    sub["max_length_q"] = max(sequences.rows_S[i] for i in chosen)
    sub["max_length_k"] = {kind: max(bounds_k[i + 1] - bounds_k[i] for i in chosen)}
    return rows, sub


def _ranges(bounds: list[int], chosen: list[int], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(bounds[i], bounds[i + 1], device=device) for i in chosen])


def _bounds(bounds: list[int], chosen: list[int], like: Tensor) -> Tensor:
    lengths = torch.tensor([0, *(bounds[i + 1] - bounds[i] for i in chosen)])
    return lengths.cumsum(0).to(device=like.device, dtype=like.dtype)
