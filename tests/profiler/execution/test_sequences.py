"""What a forward holds, read off its inputs: against counting by hand."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from profiler.errors import InputError
from profiler.execution.sequences import RowView, Sequences, SequenceTracker


class Base(nn.Module):
    """A base model that only has inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


def read(*args: Any, names: list[str] | None = None, **kwargs: Any) -> Sequences:
    base = Base()
    tracker = SequenceTracker(base)
    tracker.name(names)
    base(*args, **kwargs)
    assert tracker.current is not None
    return tracker.current


class Engine(SimpleNamespace):
    """Stands for the serving engine's cache; a plain namespace cannot be referred to weakly."""


def cache_of(length: int) -> Any:
    return SimpleNamespace(get_seq_length=lambda: length)


IDS = torch.zeros(2, 3, dtype=torch.long)


# -- padded ------------------------------------------------------------------------------------------


def test_a_batch_without_a_mask_is_all_real() -> None:
    seen = read(input_ids=IDS, cache=cache_of(5))
    assert (seen.rows_S, seen.past_S, seen.requests) == ([3, 3], [5, 5], ["row-0", "row-1"])
    assert seen.real_BT is None
    assert not seen.packed


def test_pads_are_told_on_either_side_and_in_the_past() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]])
    seen = read(input_ids=IDS, attention_mask=mask, cache=cache_of(3), names=["a", "b"])
    assert (seen.rows_S, seen.past_S, seen.requests) == ([2, 1], [2, 3], ["a", "b"])
    assert seen.real_BT is not None
    assert seen.real_BT.tolist() == [[False, True, True], [True, False, False]]
    assert seen.positions(0) == range(2, 4)
    assert seen.positions(1) == range(3, 4)


def test_a_mask_of_ones_is_no_mask() -> None:
    assert read(input_ids=IDS, attention_mask=torch.ones(2, 3)).real_BT is None


@pytest.mark.parametrize(
    "given", [{"inputs_embeds": torch.zeros(2, 3, 8)}, {"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 8)}]
)
def test_embeddings_count_as_tokens_do(given: dict[str, Any]) -> None:
    assert read(**given).rows_S == [3, 3]


def test_positional_inputs_are_read() -> None:
    assert read(IDS, torch.tensor([[0, 1, 1], [1, 1, 1]])).rows_S == [2, 3]


@pytest.mark.parametrize(
    ("past", "mask", "phase"),
    [
        (0, None, "prefill"),
        (0, [[1, 0, 0], [1, 1, 1]], "prefill"),
        (2, None, "mixed"),
        (2, [[1, 1, 1, 0, 0], [0, 1, 1, 0, 0]], "decode"),
        (2, [[0, 0, 1, 0, 0], [0, 1, 1, 0, 0]], "mixed"),
    ],
)
def test_phase(past: int, mask: Any, phase: str) -> None:
    given = None if mask is None else torch.tensor(mask)
    assert read(input_ids=IDS, attention_mask=given, cache=cache_of(past)).phase == phase


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without input_ids or inputs_embeds"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 3, 3)}, r"must be 2-D .*; got \(2, 1, 3, 3\)"),
        ({"input_ids": IDS, "attention_mask": {"full_attention": None}}, "must be 2-D .*; got dict"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 4)},
            r"shape \(2, 4\), .* 2 rows, .* 0 positions .* adds 3",
        ),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 3)}, r"shape \(3, 3\), but the batch has 2 rows"),
        ({"input_ids": IDS, "names": ["only"]}, "1 request ids were given for a batch of 2 rows"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(**given)


# -- counting ----------------------------------------------------------------------------------------


def by_hand(rows: list[int], past: list[int], width: int, chosen: list[int]) -> RowView:
    """Row by row: a real row attends its sequence's past and its own rows so far."""
    attended = [(past[i] + t + 1, past[i] + rows[i]) for i in chosen for t in range(rows[i])]
    pads = sum(width - rows[i] for i in chosen)
    return RowView(len(attended), pads, sum(a for a, _ in attended), sum(b for _, b in attended))


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [2], [3, 0], []])
def test_views_count_what_counting_by_hand_counts(chosen: list[int]) -> None:
    rows, past = [5, 1, 0, 4], [0, 7, 3, 2]
    seen = Sequences(False, 5, rows, past, list("abcd"))
    assert seen.view_of(chosen) == by_hand(rows, past, 5, chosen)
    assert seen.view == by_hand(rows, past, 5, [0, 1, 2, 3])
    packed = Sequences(True, 10, rows, past, list("abcd"), bounds=[0, 5, 6, 6, 10])
    assert packed.view.pads == 0
    assert packed.view.context == seen.view.context


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["even", "padded", "packed"])
def test_means_leave_pads_out(layout: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    if layout == "even":
        seen = Sequences(False, 4, [4, 4], [0, 0], ["a", "b"])
        pieces = [hidden[0], hidden[1]]
    elif layout == "padded":
        real = torch.tensor([[False, True, False, True], [False] * 4])
        seen = Sequences(False, 4, [2, 0], [0, 0], ["a", "b"], real_BT=real)
        pieces = [hidden[0][[1, 3]], hidden[1][:0]]
    else:
        hidden = hidden.reshape(1, 8, 6)
        seen = Sequences(True, 8, [5, 0, 3], [0, 0, 2], list("abc"), bounds=[0, 5, 5, 8])
        pieces = [hidden[0, :5], hidden[0, :0], hidden[0, 5:]]
    wanted = [piece.double().sum(0) / max(1, len(piece)) for piece in pieces]
    found = seen.mean_over_real(hidden)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(found.double(), torch.stack(wanted), rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-6)
    if layout == "packed":
        some = seen.mean_over_real(hidden, [2, 0])
        assert torch.equal(some, found[[2, 0]])


# -- packed ------------------------------------------------------------------------------------------


def engine_inputs(**changed: Any) -> dict[str, Any]:
    """Pages of 4 rows; `new` prefills 5 rows into pages 7 and 2, `old` adds row 6 to pages 3 and 9, `one` row 0 to 1.

    A page of every layer lies between two pages of one layer, so rows of page p start at 8·p.
    """
    allocator = SimpleNamespace(
        index=0,
        block_physical_stride=8,
        block_table={"old": [3, 9], "new": [7, 2], "idle": [5], "empty": [], "one": [1]},
    )
    return {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15, 21, 31]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 6, 0]]),
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 7], dtype=torch.int32),
        "cu_seq_lens_k": {"full_attention": torch.tensor([0, 5, 12, 13], dtype=torch.int32)},
        "write_index": [torch.tensor([56, 57, 58, 59, 16, 74, 8])],
        "logits_indices": torch.tensor([4, 5, 6]),
        "cache": Engine(cache_allocators={"full_attention": allocator}, max_batch_tokens=32),
        "block_table": None,
        **changed,
    }


def test_a_packed_batch_is_read_off_the_engine_s_own_lists() -> None:
    seen = read(**engine_inputs())
    assert seen.packed
    assert (seen.width, seen.bounds) == (7, [0, 5, 6, 7])
    assert (seen.rows_S, seen.past_S) == ([5, 1, 1], [0, 6, 0])
    assert seen.requests == ["new", "old", "one"]
    assert [seen.tokens(i) for i in range(3)] == [array("q", [11, 12, 13, 14, 15]), array("q", [21]), array("q", [31])]
    assert seen.ends_S == [True, True, True]
    assert seen.phase == "mixed"


@pytest.mark.parametrize(
    ("wanted", "budget", "ends"),
    [
        ([4, 5, 6], 32, [True, True, True]),
        ([5, 6, 0], 32, [False, True, True]),  # `new` goes on in the next step
        ([4, 5, 0], 32, [True, True, False]),
        ([4, 0, 0], 32, [True, False, False]),
        ([4, 5, 6], 1, [False, False, False]),  # with one row a step every prompt of two tokens is split
    ],
)
def test_a_prompt_that_goes_on_is_told_by_the_logits_the_engine_wants(
    wanted: list[int], budget: int, ends: list[bool]
) -> None:
    given = engine_inputs(logits_indices=torch.tensor(wanted))
    given["cache"].max_batch_tokens = budget
    assert read(**given).ends_S == ends


def test_a_first_sequence_of_one_row_ends() -> None:
    given = engine_inputs(
        input_ids=torch.tensor([[31]]),
        cu_seq_lens_q=torch.tensor([0, 1]),
        cu_seq_lens_k={"full_attention": torch.tensor([0, 1])},
        write_index=[torch.tensor([8])],
        logits_indices=torch.tensor([0]),
    )
    assert read(**given).ends_S == [True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": None}, "understood from transformers' continuous-batching engine only"),
        ({"cu_seq_lens_k": torch.tensor([0, 5, 12, 13])}, "continuous-batching engine only"),
        (
            {"cu_seq_lens_k": {"full_attention": torch.tensor([0]), "sliding_attention": torch.tensor([0])}},
            "one kind of attention layers, this model has full_attention, sliding_attention",
        ),
        ({"block_table": torch.zeros(1)}, "set its max_blocks_per_request to 0"),
        ({"input_ids": torch.zeros(1, 16, dtype=torch.long)}, "padded 7 packed rows to 16, .* use_cuda_graph to False"),
    ],
)
def test_packed_rows_that_cannot_be_told_apart_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(**engine_inputs(**changed))
