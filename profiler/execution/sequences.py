"""Which sequences one forward pass holds: how many real rows each has, where they lie, how far back they look.

Two layouts reach a decoder. *Padded*: hidden `[B, T, d]`, one sequence a batch row, pads named by the 2-D
attention mask. *Packed*: hidden `[1, T, d]` of the continuous-batching engine, sequences end to end, bounds in
`cu_seq_lens_q`. Methods and counters ask this file and never look at masks themselves.

Not here: what is done with the rows (`kv`, methods).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from profiler.errors import InputError


@dataclass(frozen=True)
class RowView:
    """Some rows in flight: real ones, pads computed with them, and the positions they attend.

    `context` is the sum over real rows of the positions attended under the causal mask (itself included);
    `context_full` is the same if every key of the sequence were multiplied. Pads are in neither.
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
        ids_T: packed only, the token ids of the row.
        ends_S: packed only, False where the engine split a prompt and more of it is to come.
    """

    packed: bool
    width: int
    rows_S: list[int]
    past_S: list[int]
    requests: list[str]
    real_BT: Tensor | None = None
    bounds: list[int] | None = None
    ids_T: array[int] = field(default_factory=lambda: array("q"))
    ends_S: list[bool] = field(default_factory=list)

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

    def mean_over_real(self, hidden: Tensor, which: Sequence[int] | None = None) -> Tensor:
        """Mean of `hidden` (`[B, T, d]` or `[1, T, d]`) over a sequence's real rows, float32 or wider: `[S, d]`.

        A sequence without a real row has mean 0. `which` asks for some sequences of a packed row only.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.bounds is not None:
            # Slice by slice: scattered additions have no fixed order on a GPU, and most of a row may not be asked for.
            asked = range(len(self)) if which is None else which
            sums = [hidden[0, self.bounds[i] : self.bounds[i + 1]].sum(0, dtype=wide) for i in asked]
            lengths = torch.tensor([max(1, self.rows_S[i]) for i in asked], device=hidden.device)
            return torch.stack(sums) / lengths.to(wide)[:, None]
        if self.real_BT is None:
            return hidden.mean(dim=1, dtype=wide)
        real = self.real_BT.to(hidden.dtype)  # 0 and 1 are exact in every dtype
        total = (hidden * real[:, :, None]).sum(dim=1, dtype=wide)
        return total / self.real_BT.sum(dim=1, keepdim=True).clamp(min=1).to(wide)

    def positions(self, index: int) -> range:
        """Positions (0-based, pads not counted) of sequence `index`'s rows in this step."""
        past = self.past_S[index]
        return range(past, past + self.rows_S[index])

    def row_owners(self, device: torch.device) -> Tensor:
        """`[N]` index of the sequence each row belongs to, rows as they lie in the hidden states, pads included."""
        every = torch.arange(len(self), device=device)
        if self.packed:
            return every.repeat_interleave(torch.tensor(self.rows_S, device=device), output_size=self.width)
        return every.repeat_interleave(self.width)

    def row_positions(self, device: torch.device) -> Tensor:
        """`[N]` position of each row in its sequence, 0-based, pads not counted; anything at pads."""
        past_N = torch.tensor(self.past_S, device=device)[self.row_owners(device)]
        if self.bounds is not None:
            starts_N = torch.tensor(self.bounds[:-1], device=device)[self.row_owners(device)]
            return past_N + torch.arange(self.width, device=device) - starts_N
        if self.real_BT is not None:
            return past_N + (self.real_BT.to(device).long().cumsum(1) - 1).flatten()
        return past_N + torch.arange(self.width, device=device).repeat(len(self))

    def tokens(self, index: int) -> array[int]:
        """Packed only: the token ids of sequence `index` in this step."""
        assert self.bounds is not None
        return self.ids_T[self.bounds[index] : self.bounds[index + 1]]


class SequenceTracker:
    """Reads every forward's `Sequences` off the decoder's own inputs, by a pre-hook on the base model.

    `current` is valid from the start of a forward until the next one. A model runs one forward at a time (the
    serving engine's runs in a thread of its own; its `pause()` lends the model to others).
    """

    def __init__(self, base: nn.Module) -> None:
        self.current: Sequences | None = None
        self._paged: weakref.ref[Any] | None = None
        self._requests: list[str] | None = None
        self._hook = base.register_forward_pre_hook(self._read, with_kwargs=True)

    def detach(self) -> None:
        """Take the hook off; `current` stays what it was."""
        self._hook.remove()

    def name(self, requests: Sequence[str] | None) -> None:
        """Name the batch rows of the coming padded forwards; None goes back to `row-0`, `row-1`, ..."""
        self._requests = None if requests is None else list(requests)

    @property
    def paged(self) -> Any:
        """The serving engine's cache of the last packed step; None where there was none, or it is gone."""
        return self._paged() if self._paged is not None else None

    def _read(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("cu_seq_lens_q") is not None:
            self.current = _packed(kwargs)
            self._paged = weakref.ref(kwargs["cache"])
            return
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is None and args:
            inputs = args[0]
        if inputs is None:
            raise InputError("the model was called without input_ids or inputs_embeds")
        if inputs.dim() < 2:
            raise InputError(
                f"a batch is [rows, tokens], and the model was called with a shape of {tuple(inputs.shape)}"
            )
        batch, width = int(inputs.shape[0]), int(inputs.shape[1])
        if batch == 0 or width == 0:
            raise InputError(f"the batch is empty: {batch} rows of {width} tokens")
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
        made = (
            ". A mask of 4 dimensions is what transformers makes for a cache of fixed size (cache_implementation="
            "'static' and its like); leave that out, so that a DynamicCache is used"
            if isinstance(mask, Tensor) and mask.dim() == 4
            else ""
        )
        raise InputError(
            f"attention_mask must be 2-D [batch, past + tokens], so that pads can be told; got {shape}{made}"
        )
    if tuple(mask.shape) != (batch, past + width):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, but the batch has {batch} rows, the cache holds {past} "
            f"positions and the step adds {width}"
        )
    counts = torch.stack([mask[:, past:].ne(0).sum(1), mask[:, :past].ne(0).sum(1)]).tolist()
    rows, before = [int(n) for n in counts[0]], [int(n) for n in counts[1]]
    real = None if sum(rows) == batch * width else mask[:, past:].ne(0)
    return Sequences(False, width, rows, before, requests, real_BT=real)


def _packed(kwargs: dict[str, Any]) -> Sequences:
    cache: Any = kwargs.get("cache")
    kinds = kwargs.get("cu_seq_lens_k")
    if not hasattr(cache, "cache_allocators") or not isinstance(kinds, dict):
        raise InputError(
            "a row of packed sequences (cu_seq_lens_q) is understood from transformers' continuous-batching engine only"
        )
    if len(kinds) != 1:
        raise InputError(f"packed batches need one kind of attention layers, this model has {', '.join(kinds)}")
    if kwargs.get("block_table") is not None:
        raise InputError("the engine's block-table decode path hides its requests: set its max_blocks_per_request to 0")
    bounds = [int(n) for n in kwargs["cu_seq_lens_q"].tolist()]
    bounds_k = [int(n) for n in next(iter(kinds.values())).tolist()]
    ids_T = array("q", kwargs["input_ids"][0].tolist())
    if len(ids_T) != bounds[-1]:
        raise InputError(
            f"the engine padded {bounds[-1]} packed rows to {len(ids_T)}, as CUDA graphs and compilation need it; rows "
            "can be counted in neither: set its use_cuda_graph to False and its default_compile_level to 0"
        )
    rows = [b - a for a, b in pairwise(bounds)]
    past = [b - a - r for (a, b), r in zip(pairwise(bounds_k), rows, strict=True)]
    return Sequences(
        packed=True,
        width=bounds[-1],
        rows_S=rows,
        past_S=past,
        requests=_owners(cache, kwargs["write_index"], bounds),
        bounds=bounds,
        ids_T=ids_T,
        ends_S=_ends(kwargs["logits_indices"], bounds, cache.max_batch_tokens),
    )


def _owners(cache: Any, write_index: list[Tensor], bounds: list[int]) -> list[str]:
    """Request ids of a packed batch, read from the paged cache: who owns the block each sequence writes last.

    Blocks are allocated as they are needed, so that is the last block of its owner.
    """
    (allocator,) = cache.cache_allocators.values()
    owner = {blocks[-1]: request for request, blocks in allocator.block_table.items() if blocks}
    last = write_index[allocator.index][torch.tensor(bounds[1:]) - 1].tolist()
    return [owner[slot // allocator.block_physical_stride] for slot in last]


def _ends(logits_indices: Tensor, bounds: list[int], budget: int) -> list[bool]:
    """Whether each sequence's last row is one whose logits the engine asks for; it does not while a prompt goes on.

    The engine fills the list up with zeros. So a first sequence of one row cannot be told from filler, and counts
    as ended unless the engine's token budget is one row, where every prompt of two tokens is split.
    """
    wanted: list[int] = []
    for index in logits_indices.tolist():
        if wanted and index <= wanted[-1]:
            break
        wanted.append(index)
    if budget == 1:
        wanted = []
    return [bound - 1 in wanted for bound in bounds[1:]]
