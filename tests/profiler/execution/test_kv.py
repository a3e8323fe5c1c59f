"""The cache layer that holds some rows only, and taking rows out of a batch. With a routed model around it:
`methods/test_layerroute.py`, `methods/test_packed.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from profiler.errors import InputError
from profiler.execution.gates import Gate, Gates
from profiler.execution.kv import SubsetLayer, adopt, gather, kv_bytes, scatter
from profiler.execution.sequences import Sequences
from tests.profiler.tiny import config_of


def gates_of(*runs: bool) -> Gates:
    return Gates(tuple(Gate(run, 0.5, 0.0) for run in runs))


def states(rows: list[int], tokens: int, first: int = 0) -> Tensor:
    """`[rows, 2 heads, tokens, 3]`; every number says which row and position it is of: 100·row + position."""
    numbers = torch.tensor([[100.0 * row + first + t for t in range(tokens)] for row in rows])
    return numbers[:, None, :, None].expand(-1, 2, -1, 3).clone()


def filled(*runs: bool, prompt: int = 4, new: int = 2) -> SubsetLayer:
    """A layer after a prompt and some tokens."""
    layer, rows = SubsetLayer(), [i for i, run in enumerate(runs) if run]
    layer.settle(gates_of(*runs), prompt)
    for first, tokens in ((0, prompt), *((prompt + k, 1) for k in range(new))):
        if rows:
            layer.update(states(rows, tokens, first), -states(rows, tokens, first))
        layer.advance(tokens)
    return layer


def held(layer: SubsetLayer) -> list[list[float]]:
    """Row by row, what `states` wrote."""
    if layer.keys is None:
        return []
    assert torch.equal(layer.values, -layer.keys)
    assert layer.keys.shape[1:2] + layer.keys.shape[3:] == (2, 3)
    return layer.keys[:, 0, :, 0].tolist()


def test_rows_that_run_are_stored_and_all_tokens_are_counted() -> None:
    layer = filled(True, False, True)
    assert held(layer) == [[0, 1, 2, 3, 4, 5], [200, 201, 202, 203, 204, 205]]
    assert layer.get_seq_length() == 6
    assert layer.get_mask_sizes(1) == (7, 0)


def test_a_layer_nobody_runs_holds_nothing_and_counts() -> None:
    layer = filled(False, False)
    assert held(layer) == []
    assert layer.keys is None
    assert layer.get_seq_length() == 6
    assert layer.get_mask_sizes(1) == (7, 0)


@pytest.mark.parametrize("runs", [(True, False, True), (False, False, False)])
def test_cropping_takes_tokens_off_the_end(runs: tuple[bool, ...]) -> None:
    layer = filled(*runs)
    layer.crop(0)
    assert layer.get_seq_length() == 6
    layer.crop(-2)
    assert layer.get_seq_length() == 4
    assert held(layer) == [[100.0 * i + t for t in range(4)] for i, run in enumerate(runs) if run]
    with pytest.raises(ValueError, match="positive value"):
        layer.crop(3)
    assert layer.get_seq_length() == 4


def test_cropping_into_the_prompt_is_refused_and_cropping_everything_starts_again() -> None:
    layer = filled(True, False)
    with pytest.raises(InputError, match="to 3 tokens cuts into the prompt of 4"):
        layer.crop(-3)
    assert layer.get_seq_length() == 6
    layer.crop(-6)
    assert (layer.get_seq_length(), layer.gates, layer.keys) == (0, None, None)
    layer = filled(True, False)
    layer.crop(-50)
    assert (layer.get_seq_length(), layer.gates) == (0, None)


def test_reset_forgets_decisions_too() -> None:
    layer = filled(True, False)
    layer.reset()
    assert (layer.get_seq_length(), layer.gates, layer.keys) == (0, None, None)


@pytest.mark.parametrize(
    ("indices", "rows"),
    [
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([1, 1]), [1, 1]),
        (torch.tensor([0, 0, 2, 1, 2]), [0, 0, 2, 1, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
        (torch.tensor([False, True, False]), [1]),
    ],
)
def test_selecting_rows_takes_their_decisions_along(indices: Tensor, rows: list[int]) -> None:
    runs = (True, False, True)
    layer = filled(*runs)
    layer.batch_select_indices(indices)
    assert [gate.run for gate in layer.gates.of_S] == [runs[i] for i in rows]
    assert held(layer) == [[100.0 * i + t for t in range(6)] for i in rows if runs[i]]
    assert layer.get_seq_length() == 6
    reordered = filled(*runs)
    if indices.dtype != torch.bool:
        reordered.reorder_cache(indices)
        assert held(reordered) == held(layer)
        assert reordered.gates == layer.gates


def test_repeating_rows() -> None:
    layer = filled(True, False, True)
    layer.batch_repeat_interleave(2)
    assert [gate.run for gate in layer.gates.of_S] == [True, True, False, False, True, True]
    assert [row[0] for row in held(layer)] == [0, 0, 200, 200]


def test_a_fresh_layer_has_no_rows_to_select() -> None:
    layer = SubsetLayer()
    layer.batch_select_indices(torch.tensor([0]))
    layer.batch_repeat_interleave(3)
    assert (layer.get_seq_length(), layer.gates) == (0, None)


@pytest.mark.parametrize("rows", [[0], [0, 1, 2]])
def test_another_number_of_rows_is_another_model_s(rows: list[int]) -> None:
    layer = filled(True, False, True)
    with pytest.raises(InputError, match="belongs to a model that skips blocks"):
        layer.update(states(rows, 1), states(rows, 1))
    undecided = SubsetLayer()
    with pytest.raises(InputError, match="belongs to a model that skips blocks"):
        undecided.update(states(rows, 1), states(rows, 1))


def test_a_step_that_was_not_counted_is_another_model_s() -> None:
    layer = filled(True, True)
    layer.update(states([0, 1], 1, 6), -states([0, 1], 1, 6))
    with pytest.raises(InputError, match="another model cannot go on with it"):
        layer.update(states([0, 1], 1, 7), -states([0, 1], 1, 7))


# -- whole caches ------------------------------------------------------------------------------------


def test_a_fresh_cache_is_adopted_with_a_layer_for_every_block() -> None:
    for cache in (DynamicCache(), DynamicCache(config=config_of("llama"))):
        adopt(cache, 6)
        assert [type(layer) for layer in cache.layers] == [SubsetLayer] * 6
        assert cache.get_seq_length() == 0
        cache.layers[0].advance(5)
        assert cache.get_seq_length() == 5


def test_bytes_by_hand() -> None:
    # 6 tokens of keys and values, 2 heads of 3 float32 numbers: 48 bytes a token.
    cache = SimpleNamespace(layers=[filled(True, False, True), filled(False, False, False), filled(True, True, True)])
    assert kv_bytes(cache, [6, 5, 1]) == (5 * 6 * 48, (6 + 1 + 6 + 5 + 1) * 48)
    assert kv_bytes(DynamicCache(), [3]) == (0, 0)


def test_bytes_of_a_cache_of_fixed_size_are_live_as_far_as_it_is_filled() -> None:
    cache = StaticCache(config=config_of("llama"), max_cache_len=16)
    cache.update(torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 8), 0)
    a_token = 2 * 2 * 8 * 4
    assert kv_bytes(cache, [5, 3]) == (2 * 16 * a_token, 8 * a_token)


# -- taking rows out ---------------------------------------------------------------------------------


def test_padded_rows_go_in_and_come_back() -> None:
    hidden = torch.arange(24.0).reshape(4, 3, 2)
    shared, own = torch.randn(1, 3, 8), torch.randn(4, 3, 8)
    mask, cache = torch.randn(4, 1, 3, 3), object()
    given = {
        "attention_mask": mask,
        "position_ids": torch.arange(3)[None],
        "position_embeddings": (shared, own),
        "cache": cache,
        "use_cache": True,
    }
    sequences = Sequences(False, 3, [3] * 4, [0] * 4, list("abcd"))
    part = gather(hidden, given, sequences, [1, 3])
    assert torch.equal(part.hidden, hidden[[1, 3]])
    assert torch.equal(part.kwargs["attention_mask"], mask[[1, 3]])
    assert part.kwargs["position_ids"] is given["position_ids"]
    assert part.kwargs["position_embeddings"][0] is shared
    assert torch.equal(part.kwargs["position_embeddings"][1], own[[1, 3]])
    assert part.kwargs["cache"] is cache
    back = scatter(hidden, part, -part.hidden)
    assert torch.equal(back[[1, 3]], -hidden[[1, 3]])
    assert torch.equal(back[[0, 2]], hidden[[0, 2]])
    assert float(hidden.min()) == 0.0  # what went in is left as it was


def test_no_mask_stays_no_mask() -> None:
    sequences = Sequences(False, 1, [1, 1], [2, 2], ["a", "b"])
    given = {"attention_mask": None, "position_embeddings": (torch.ones(1, 1, 2), torch.ones(1, 1, 2))}
    part = gather(torch.ones(2, 1, 4), given, sequences, [0])
    assert part.kwargs["attention_mask"] is None


def test_a_mask_that_is_no_tensor_is_refused() -> None:
    sequences = Sequences(False, 1, [1, 1], [2, 2], ["a", "b"])
    with pytest.raises(InputError, match="rows cannot be taken out of a BlockMask attention mask; use eager, sdpa or"):
        gather(torch.ones(2, 1, 4), {"attention_mask": type("BlockMask", (), {})()}, sequences, [0])


def packed_arguments(past: list[int]) -> tuple[Sequences, dict[str, Any]]:
    """Three sequences of 2, 1 and 3 rows; keys of each are its past and its rows, numbered by owner and place."""
    rows = [2, 1, 3]
    bounds, bounds_k = [0, 2, 3, 6], [0]
    for r, p in zip(rows, past, strict=True):
        bounds_k.append(bounds_k[-1] + r + p)
    read = [100 * i + k for i in range(3) for k in range(rows[i] + past[i])]
    given = {
        "attention_mask": torch.arange(6.0 * len(read)).reshape(1, 1, 6, len(read)),
        "position_ids": torch.tensor([[past[i] + t for i in range(3) for t in range(rows[i])]]),
        "position_embeddings": (torch.arange(6.0)[None, :, None], torch.arange(6.0, 12.0)[None, :, None]),
        "write_index": [torch.tensor([100 * i + past[i] + t for i in range(3) for t in range(rows[i])])],
        "read_index": [torch.tensor(read if any(past) else [], dtype=torch.long)],
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32),
        "cu_seq_lens_k": {"full_attention": torch.tensor(bounds_k, dtype=torch.int32)},
        "max_length_q": 3,
        "max_length_k": {"full_attention": max(r + p for r, p in zip(rows, past, strict=True))},
        "cache": "paged",
    }
    return Sequences(True, 6, rows, past, list("abc"), bounds=bounds), given


def test_packed_rows_go_in_with_their_lists_and_come_back() -> None:
    sequences, given = packed_arguments([4, 1, 0])
    hidden = torch.arange(12.0).reshape(1, 6, 2)
    part = gather(hidden, given, sequences, [0, 2])
    rows, keys = [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert torch.equal(part.hidden, hidden[:, rows])
    assert part.kwargs["position_ids"].tolist() == [[4, 5, 0, 1, 2]]
    assert part.kwargs["position_embeddings"][1].flatten().tolist() == [6, 7, 9, 10, 11]
    assert torch.equal(part.kwargs["attention_mask"], given["attention_mask"][:, :, rows][..., keys])
    assert part.kwargs["write_index"][0].tolist() == [4, 5, 200, 201, 202]
    assert part.kwargs["read_index"][0].tolist() == [0, 1, 2, 3, 4, 5, 200, 201, 202]
    assert part.kwargs["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert part.kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert part.kwargs["cu_seq_lens_k"]["full_attention"].tolist() == [0, 6, 9]
    assert part.kwargs["cu_seq_lens_k"]["full_attention"].dtype == torch.int32
    assert part.kwargs["max_length_q"] == 3
    assert part.kwargs["max_length_k"] == {"full_attention": 6}
    assert part.kwargs["cache"] == "paged"
    back = scatter(hidden, part, -part.hidden)
    assert torch.equal(back[0, 2], hidden[0, 2])
    assert torch.equal(back[:, rows], -hidden[:, rows])
    (one,) = (gather(hidden, given, sequences, [1]).kwargs for _ in range(1))
    assert (one["max_length_q"], one["max_length_k"]) == (1, {"full_attention": 2})


def test_packed_prompts_read_nothing_back() -> None:
    sequences, given = packed_arguments([0, 0, 0])
    part = gather(torch.ones(1, 6, 2), {**given, "attention_mask": None}, sequences, [1, 2])
    assert part.kwargs["read_index"][0].numel() == 0
    assert part.kwargs["attention_mask"] is None
    assert part.kwargs["cu_seq_lens_k"]["full_attention"].tolist() == [0, 1, 4]
