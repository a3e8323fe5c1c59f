"""Running one block for some sequences of a batch, with the key/value cache kept right.

This is the one place that sub-indexes hidden rows, masks, rotary tables, caches and the engine's index lists.

Under the `request` policy a skipped layer holds no keys or values for that request: the gates were frozen when
the prompt came, so no later step of the request asks for them. A `SubsetLayer` therefore stores the batch rows
that run, with the decisions of all; it counts the tokens *seen*, not stored, because transformers asks layer 0
for the cache's length and layer 0 may hold nothing.

Under `project` gates are decided anew each step, so a step that runs a block needs every position: a `ProjectedLayer`
stores all batch rows, and keeps the running mean its decisions are made on.

Not here: caches of fixed size (static, sliding, quantised, offloaded), which are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from profiler.errors import InputError
from profiler.execution.gates import Gates
from profiler.execution.sequences import Sequences


class SubsetLayer(DynamicLayer):
    """A cache layer that stores only the batch rows that run it.

    `gates` is fixed by the first step (`settle`), one decision a batch row; `sealed` says that it saw the whole prompt
    (`seal`). Keys and values are `[rows that run, KV heads, tokens seen, head dim]`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gates: Gates | None = None
        self.sealed = False
        self._seen = 0
        self._prompt = 0

    def settle(self, gates: Gates, tokens: int) -> None:
        """Freeze who runs, decided on a prompt of `tokens` (pads included)."""
        self.gates, self._prompt = gates, tokens

    def open_to(self, rows: int, tokens: int) -> bool:
        """Whether a step of `tokens` for a batch of `rows` simply runs: decided before, by all of them, to run."""
        gates = self.gates
        return gates is not None and len(gates.chosen) == rows == len(gates) and (tokens == 1 or self.sealed)

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step; called once a forward, whether or not any row ran."""
        self._seen += tokens

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions and masks are made from."""
        return self._seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of the rows that run.

        Raises:
            InputError: another model than the one that decided fills this cache.
        """
        if self.gates is None or key_states.shape[0] != len(self.gates.chosen) or self._stored() != self._seen:
            raise InputError("this cache belongs to a model that skips blocks; another model cannot go on with it")
        return super().update(key_states, value_states, *args, **kwargs)

    def _stored(self) -> int:
        return self.keys.shape[-2] if self.is_initialized and self.keys is not None else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; forgetting all of them forgets the decisions too.

        Raises:
            ValueError: a positive number, as in the base class.
            InputError: some of the prompt would stay, and the decisions were made on all of it.
        """
        left = max(0, self._seen - abs(tokens_to_remove))
        if tokens_to_remove < 0 and 0 < left < self._prompt:
            raise InputError(
                f"cropping to {left} tokens cuts into the prompt of {self._prompt} that this cache's gates were "
                "decided on; crop to the prompt, or crop everything and start again"
            )
        super().crop(tokens_to_remove)
        self._seen = left
        if left == 0:
            self.reset()

    def reset(self) -> None:
        """Forget everything, decisions included."""
        super().reset()
        self.gates, self.sealed, self._seen, self._prompt = None, False, 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become copies of rows `beam_idx` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.gates is not None:
            self.batch_select_indices(torch.arange(len(self.gates)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep batch rows `indices` (or those of a bool mask), in that order, duplicates allowed."""
        if self.gates is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        wanted = [int(i) for i in indices.tolist()]
        if self.is_initialized and self.keys is not None and self.values is not None:
            place = {row: k for k, row in enumerate(self.gates.chosen)}
            kept = torch.tensor([place[i] for i in wanted if i in place], dtype=torch.long, device=self.keys.device)
            self.keys, self.values = self.keys[kept], self.values[kept]
        self.gates = self.gates.select(wanted)


@dataclass(frozen=True)
class Settled:
    """What decisions of policy `project` stand on.

    Attributes:
        tokens: tokens seen, pads included.
        mean_Bd: mean of the block's input over each row's real tokens so far.
        gates: the decisions, one a batch row.
    """

    tokens: int
    mean_Bd: Tensor
    gates: Gates

    def select(self, indices: Tensor) -> Settled:
        """The same of batch rows `indices`."""
        return Settled(self.tokens, self.mean_Bd[indices.to(self.mean_Bd.device)], self.gates.select(indices.tolist()))


class ProjectedLayer(DynamicLayer):
    """A cache layer that stores every batch row, also of rows that skip the block.

    In each step `settle` says who runs, `project` brings keys and values of the rows that do not, and `update` (the
    block's own attention calls it) those of the rows that do. Of the means only the prompt's and the last are kept, so
    the cache can be cropped to its prompt or to nothing.

    Attributes:
        now: what the last step was decided on; None before the first.
        sealed: see `seal`; later steps go on with the gates of `now`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: Settled | None = None
        self.sealed = False
        self._prompt: Settled | None = None
        self._due: list[int] | None = None
        self._projected: tuple[Tensor, Tensor] | None = None

    def running_mean(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Mean of the block's input over all real tokens, those of the coming step (`hidden`) included: `[B, d]`."""
        mean_Bd = sequences.mean_over_real(hidden).detach()
        if self.now is None:
            return mean_Bd
        share = [rows / max(1, past + rows) for past, rows in zip(sequences.past_S, sequences.rows_S, strict=True)]
        share_B = torch.tensor(share, dtype=mean_Bd.dtype, device=mean_Bd.device)
        return self.now.mean_Bd + (mean_Bd - self.now.mean_Bd) * share_B[:, None]

    def settle(self, mean_Bd: Tensor, gates: Gates, tokens: int) -> None:
        """Say who runs in a step of `tokens` (pads included)."""
        self.now = Settled(self.get_seq_length() + tokens, mean_Bd, gates)
        self._prompt = self._prompt or self.now
        self._due, self._projected = gates.chosen, None

    def project(self, keys: Tensor, values: Tensor) -> None:
        """Take keys and values of the rows that skip this step, in the order of the batch."""
        if self._due:
            self._projected = keys, values
        else:
            self._due = None
            super().update(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a step's keys and values; returns all there are of the rows that run.

        Raises:
            InputError: another model than the one that decided fills this cache.
        """
        due, self._due = self._due, None
        if due is None or key_states.shape[0] != len(due):
            raise InputError("this cache belongs to a model that skips blocks; another model cannot go on with it")
        if self._projected is None:
            return super().update(key_states, value_states)
        (keys, values), self._projected = self._projected, None
        assert self.now is not None
        order = due + [i for i, gate in enumerate(self.now.gates.of_S) if not gate.run]
        places = torch.tensor(order, device=key_states.device).argsort()
        ran = torch.tensor(due, device=key_states.device)
        every = (torch.cat(pair)[places] for pair in ((key_states, keys), (value_states, values)))
        stored = super().update(*every)
        return stored[0][ran], stored[1][ran]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens: back to the prompt, or all of them.

        Raises:
            ValueError: a positive number, as in the base class.
            InputError: another number of tokens would stay, whose mean is not known any more.
        """
        seen = self.get_seq_length()
        left = max(0, seen - abs(tokens_to_remove))
        if tokens_to_remove < 0 and self._prompt is not None and left not in (0, self._prompt.tokens, seen):
            raise InputError(
                f"cropping to {left} tokens: gates of kv_policy project stand on a running mean, which is kept for the "
                f"prompt of {self._prompt.tokens} tokens and for all {seen}; crop to the prompt, or crop everything"
            )
        super().crop(tokens_to_remove)
        if left == 0:
            self.reset()
        elif left < seen:
            self.now = self._prompt

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = self.sealed = False
        self.now = self._prompt = self._due = self._projected = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become copies of rows `beam_idx` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.now is not None:
            self.batch_select_indices(torch.arange(len(self.now.gates)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep batch rows `indices` (or those of a bool mask), in that order, duplicates allowed."""
        if self.now is None or self._prompt is None or self.keys is None or self.values is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        rows = indices.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.now, self._prompt = self.now.select(indices), self._prompt.select(indices)


def adopt(cache: Any, layers: int, kind: type[SubsetLayer] | type[ProjectedLayer] = SubsetLayer) -> None:
    """Make a fresh `DynamicCache` skip-aware, in place, for a model of so many layers.

    Raises:
        InputError: a cache this policy cannot keep right (static, sliding, quantised, offloaded, or one that
            another model has already filled). Going on silently would read stale or foreign keys.
    """
    name = type(cache).__name__
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        given = f"an offloading {name}" if getattr(cache, "offloading", False) else name
        raise InputError(f"skipping blocks needs a DynamicCache (or the continuous-batching engine's); got {given}")
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if odd:
        raise InputError(f"skipping blocks needs plain DynamicLayer cache layers; this {name} has {', '.join(odd)}")
    if any(cast(DynamicLayer, layer).get_seq_length() for layer in cache.layers):
        raise InputError(f"this {name} was filled before the gated model saw it; start the request with an empty cache")
    cache.layers[:] = [kind() for _ in range(layers)]


def seal(cache: Any) -> None:
    """Say that the prompts in `cache` are whole: further steps of any width go on with their frozen gates.

    Without it a step of several tokens on top of a prompt is taken for a split prompt, and refused. A cache of a model
    that skips nothing needs no such word and is left as it is.
    """
    for layer in cache.layers:
        if isinstance(layer, SubsetLayer | ProjectedLayer):
            layer.sealed = True


def kv_bytes(cache: Cache, tokens_B: Sequence[int]) -> tuple[int, int]:
    """Bytes a padded batch's cache holds: (allocated, live).

    Allocated counts the tensors as stored, pads included. Live counts what the requests need: for every layer a
    row runs (every layer under `project`), keys and values of its real tokens so far (`tokens_B`), as far
    as the layer keeps them.
    """
    allocated = live = 0
    lengths: dict[int, list[int]] = {}  # by tokens stored, which hardly differs between layers
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        stored = keys.nbytes + values.nbytes
        if not stored:
            continue
        held, _, tokens, _ = keys.shape
        allocated += stored
        if tokens not in lengths:
            lengths[tokens] = [min(length, tokens) for length in tokens_B]
        gates = layer.gates if isinstance(layer, SubsetLayer) else None
        kept = lengths[tokens] if gates is None else [lengths[tokens][i] for i in gates.chosen]
        live += stored // (held * tokens) * sum(kept)
    return allocated, live


def write_paged(cache: Any, keys: Tensor, values: Tensor, layer: int, kwargs: dict[str, Any]) -> None:
    """Put keys and values (`[1, KV heads, t, head dim]`) into the serving engine's cache, and read nothing back.

    Args:
        kwargs: what the decoder passes its layers, for these rows only (`gather`).
    """
    cache.update(keys, values, layer, {**kwargs, "read_index": [index[:0] for index in kwargs["read_index"]]})


def paged_bytes(cache: Any, tokens_S: Sequence[int], runs: Sequence[Collection[int]]) -> tuple[int, int]:
    """Bytes of the serving engine's paged cache: (allocated, live).

    Allocated counts the pages that are handed out, to whichever requests. Live counts what the S requests of this step
    need: keys and values of their tokens so far, in the layers that each of them runs. The engine hands out pages of
    all layers alike, so what a skipping method leaves unused is between the two, beside the last page's rest.

    Args:
        cache: transformers' `PagedAttentionCache`.
        tokens_S: tokens each request has by the end of the step.
        runs: the layers each request keeps keys and values for.
    """
    allocators = cache.layer_to_allocator
    a_token = {i: each.bytes_per_page // each.tokens_per_page for i, each in allocators.items()}
    allocated = cache.num_sectors * cache.bytes_per_sector - cache.compute_free_capacity(relative=False)
    live = sum(tokens * sum(a_token[layer] for layer in layers) for tokens, layers in zip(tokens_S, runs, strict=True))
    return int(allocated), live


@dataclass(frozen=True)
class Part:
    """The sequences of a batch that run a block: their hidden rows and the block's arguments for them.

    Attributes:
        hidden: `[b, T, d]` padded, `[1, t, d]` packed.
        kwargs: what the decoder passes its layers, for these rows only.
        rows: where they lie along `axis` of the whole batch's hidden states.
    """

    hidden: Tensor
    kwargs: dict[str, Any]
    rows: Tensor
    axis: int


def gather(hidden: Tensor, kwargs: dict[str, Any], sequences: Sequences, chosen: list[int]) -> Part:
    """Take the `chosen` sequences out of a batch.

    Args:
        hidden: `[B, T, d]` padded, `[1, T, d]` packed.
        kwargs: what the decoder passes its layers (mask, positions, rotary tables, cache, engine indices).
        chosen: indices of the sequences that run; neither empty nor all.

    Raises:
        InputError: a mask whose rows cannot be told (flex attention's).
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(
            f"rows cannot be taken out of a {type(mask).__name__} attention mask; use eager, sdpa or flash attention"
        )
    if sequences.packed:
        rows, sub = _packed_part(kwargs, sequences, chosen, hidden.device)
        return Part(hidden.index_select(1, rows), sub, rows, 1)
    rows = torch.tensor(chosen, device=hidden.device)
    return Part(hidden.index_select(0, rows), _padded_part(kwargs, rows, len(sequences)), rows, 0)


def scatter(hidden: Tensor, part: Part, output: Tensor) -> Tensor:
    """The whole batch again: rows of `part` replaced by the block's `output`, the others as they went in."""
    return hidden.index_copy(part.axis, part.rows, output)


def _padded_part(kwargs: dict[str, Any], rows: Tensor, batch: int) -> dict[str, Any]:
    def pick(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(pick(item) for item in value)
        if isinstance(value, Tensor) and value.shape[0] == batch:  # the rest has one row, for all
            return value.index_select(0, rows)
        return value

    known = [name for name in ("attention_mask", "position_ids", "position_embeddings") if name in kwargs]
    return {**kwargs, **{name: pick(kwargs[name]) for name in known}}


def _packed_part(
    kwargs: dict[str, Any], sequences: Sequences, chosen: list[int], device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    bounds_q = sequences.bounds
    assert bounds_q is not None
    rows = _ranges(bounds_q, chosen, device)
    ((kind, bounds_tensor),) = kwargs["cu_seq_lens_k"].items()
    bounds_k = [int(n) for n in bounds_tensor.tolist()]
    keys = _ranges(bounds_k, chosen, device)
    sub = dict(kwargs)
    sub["position_embeddings"] = tuple(table.index_select(1, rows) for table in kwargs["position_embeddings"])
    sub["position_ids"] = kwargs["position_ids"].index_select(1, rows)
    if kwargs.get("attention_mask") is not None:
        sub["attention_mask"] = kwargs["attention_mask"].index_select(-2, rows).index_select(-1, keys)
    sub["write_index"] = [index.index_select(0, rows) for index in kwargs["write_index"]]
    # Empty where nothing of the batch is in the cache yet: the engine then reads no keys back.
    sub["read_index"] = [index.index_select(0, keys) if index.numel() else index for index in kwargs["read_index"]]
    sub["cu_seq_lens_q"] = _bounds(bounds_q, chosen, kwargs["cu_seq_lens_q"])
    sub["cu_seq_lens_k"] = {kind: _bounds(bounds_k, chosen, bounds_tensor)}
    sub["max_length_q"] = max(sequences.rows_S[i] for i in chosen)
    sub["max_length_k"] = {kind: max(bounds_k[i + 1] - bounds_k[i] for i in chosen)}
    return rows, sub


def _ranges(bounds: list[int], chosen: list[int], device: torch.device) -> Tensor:
    return torch.tensor([row for i in chosen for row in range(bounds[i], bounds[i + 1])], device=device)


def _bounds(bounds: list[int], chosen: list[int], like: Tensor) -> Tensor:
    lengths = torch.tensor([0, *(bounds[i + 1] - bounds[i] for i in chosen)])
    return lengths.cumsum(0).to(device=like.device, dtype=like.dtype)
