"""Which sequences one forward pass holds: how many real rows each has, where they lie, how far back they look.

Two layouts reach a decoder. *Padded*: hidden `[B, T, d]`, one sequence a batch row, pads named by the 2-D
attention mask. *Packed*: hidden `[1, T, d]` of the continuous-batching engine, sequences end to end, bounds in
`cu_seq_lens_q`. Methods and counters ask this file and never look at masks themselves.

Not here: what is done with the rows (`kv`, methods).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from profiler.errors import InputError


@dataclass(frozen=True)
class RowView:
    """Some rows in flight: real ones, pads computed with them, and the positions they attend.

    `context` is the sum over real rows of the positions attended under the causal mask (itself included);
    `context_full` is the same if every key of the sequence were multiplied.
    """

    rows: int
    pads: int
    context: int
    context_full: int


@dataclass(frozen=True)
class Sequences:
    """The S sequences of one forward. Lists have S entries and live on the host.

    Attributes:
        packed: layout, see the module docstring.
        width: T, query rows per batch row (padded) or in all (packed).
        rows_S: real query rows of each sequence in this step.
        past_S: real tokens each had in the cache before.
        requests: the id of each sequence's request.
        real_BT: `[B, T]` bool, False at pads; None where nothing is padded (and when packed).
        bounds: packed only, `[S + 1]` offsets of the sequences in the row.
    """

    packed: bool
    width: int
    rows_S: list[int]
    past_S: list[int]
    requests: list[str]
    real_BT: Tensor | None = None
    bounds: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows_S)

    @property
    def phase(self) -> str:
        """`prefill` if no sequence has a past, `decode` if each adds one row to a past, else `mixed`."""
        if not any(self.past_S):
            return "prefill"
        if all(past and rows == 1 for past, rows in zip(self.past_S, self.rows_S, strict=True)):
            return "decode"
        return "mixed"

    @cached_property
    def view(self) -> RowView:
        """All sequences."""
        return self.view_of(range(len(self)))

    def view_of(self, chosen: Sequence[int]) -> RowView:
        """The rows of the chosen sequences, pads of their batch rows included."""
        rows = [self.rows_S[i] for i in chosen]
        past = [self.past_S[i] for i in chosen]
        pads = 0 if self.packed else len(rows) * self.width - sum(rows)
        context = sum(r * p + r * (r + 1) // 2 for r, p in zip(rows, past, strict=True))
        context_full = sum(r * (p + r) for r, p in zip(rows, past, strict=True))
        return RowView(sum(rows), pads, context, context_full)

    def mean_over_real(self, hidden: Tensor) -> Tensor:
        """Mean of `hidden` (`[B, T, d]` or `[1, T, d]`) over each sequence's real rows, in float32: `[S, d]`.

        A sequence without a real row has mean 0.
        """
        if self.bounds is not None:
            lengths = torch.tensor(self.rows_S, device=hidden.device)
            owner = torch.repeat_interleave(torch.arange(len(self), device=hidden.device), lengths)
            total = hidden.new_zeros((len(self), hidden.shape[-1]), dtype=torch.promote_types(hidden.dtype, torch.float32))
            total.index_add_(0, owner, hidden[0].to(total.dtype))
            return total / lengths.clamp(min=1).to(total.dtype)[:, None]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.real_BT is None:
            return hidden.mean(dim=1, dtype=wide)
        weight = self.real_BT.to(wide)
        total = torch.einsum("btd,bt->bd", hidden.to(wide), weight)
        return total / weight.sum(dim=1, keepdim=True).clamp(min=1)

    def positions(self, index: int) -> range:
        """Positions (0-based, pads not counted) of sequence `index`'s rows in this step."""
        past = self.past_S[index]
        return range(past, past + self.rows_S[index])


class SequenceTracker:
    """Reads every forward's `Sequences` off the decoder's own inputs, by a pre-hook on the base model.

    `current` is valid from the start of a forward until the next one.
    """

    def __init__(self, base: nn.Module) -> None:
        self.current: Sequences | None = None
        self._requests: list[str] | None = None
        self._hook = base.register_forward_pre_hook(self._read, with_kwargs=True)

    def name(self, requests: Sequence[str] | None) -> None:
        """Name the batch rows of the coming padded forwards; None goes back to `row-0`, `row-1`, ..."""
        self._requests = None if requests is None else list(requests)

    def _read(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("cu_seq_lens_q") is not None:
            self.current = _packed(kwargs)
            return
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is None and args:
            inputs = args[0]
        if inputs is None:
            raise InputError("the model was called without input_ids or inputs_embeds")
        batch, width = int(inputs.shape[0]), int(inputs.shape[1])
        if self._requests is not None and len(self._requests) != batch:
            raise InputError(f"{len(self._requests)} request ids were given for a batch of {batch} rows")
        requests = self._requests if self._requests is not None else [f"row-{i}" for i in range(batch)]
        cache = kwargs.get("cache")
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.current = _padded(batch, width, past, mask, requests)


def _padded(batch: int, width: int, past: int, mask: Any, requests: list[str]) -> Sequences:
    if mask is None:
        return Sequences(False, width, [width] * batch, [past] * batch, requests)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attention_mask must be 2-D [batch, past + tokens] so that pads can be told apart; got {shape}")
    if mask.shape[1] != past + width:
        raise InputError(
            f"attention_mask covers {mask.shape[1]} positions; the cache holds {past} and the step adds {width}"
        )
    counts = torch.stack([mask[:, past:].ne(0).sum(1), mask[:, :past].ne(0).sum(1)]).tolist()
    rows, before = [int(n) for n in counts[0]], [int(n) for n in counts[1]]
    real = None if sum(rows) == batch * width else mask[:, past:].ne(0)
    return Sequences(False, width, rows, before, requests, real_BT=real)


def _packed(kwargs: dict[str, Any]) -> Sequences:
    bounds = [int(n) for n in kwargs["cu_seq_lens_q"].tolist()]
    lengths_k = kwargs["cu_seq_lens_k"]
    if isinstance(lengths_k, dict):
        if len(lengths_k) != 1:
            raise InputError(f"a packed batch with {len(lengths_k)} kinds of attention layers is not supported")
        lengths_k = next(iter(lengths_k.values()))
    bounds_k = [int(n) for n in lengths_k.tolist()]
    rows = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    keys = [b - a for a, b in zip(bounds_k, bounds_k[1:], strict=False)]
    past = [k - r for k, r in zip(keys, rows, strict=True)]
    return Sequences(True, bounds[-1], rows, past, _owners(kwargs, bounds), bounds=bounds)


def _owners(kwargs: dict[str, Any], bounds: list[int]) -> list[str]:
    """Request ids of a packed batch, read from the paged cache: who owns the block each sequence writes to."""
    cache, write_index = kwargs.get("cache"), kwargs.get("write_index")
    if cache is None or not hasattr(cache, "cache_allocators") or write_index is None:
        return [f"sequence-{i}" for i in range(len(bounds) - 1)]
    if kwargs.get("block_table") is not None:
        raise InputError("the engine's block-table decode path hides the requests; set its use of block tables off")
    allocator = next(iter(cache.cache_allocators.values()))
    owner = {block: request for request, blocks in allocator.block_table.items() for block in blocks}
    first = write_index[allocator.index][torch.tensor(bounds[:-1])].tolist()
    return [owner.get(slot // allocator.block_physical_stride, f"sequence-{i}") for i, slot in enumerate(first)]
