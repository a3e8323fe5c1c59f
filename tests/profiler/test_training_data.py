"""Which text a step sees, and that it follows from seed and step alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from profiler import training_data
from profiler.byte_tokenizer import EOS_ID, byte_tokenizer
from profiler.errors import InputError
from profiler.training_data import Item
from workloads.recipe import DataSpec, GeneratedSpec


def made(count: int, domain: str = "math") -> list[Item]:
    return [Item(f"{domain}-{i}", domain, (i, i + 1), 0) for i in range(count)]


def jsonl(folder: Path, *rows: dict[str, str]) -> str:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_item_is_prompt_reference_and_end_of_text_cut_to_length(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": "ab", "reference": "c", "domain": "math"}, {"prompt": "abcdef"})
    found = training_data.items(DataSpec(files=[file]), byte_tokenizer(), length=5)
    # One id a byte: "ab\nc" and the end; "abcdef" and the end, of which two tokens are lost.
    assert [byte_tokenizer().decode(item.ids[:4]) for item in found] == ["ab\nc", "abcd"]
    assert found[0].ids[-1] == EOS_ID
    assert [(len(item.ids), item.cut, item.domain) for item in found] == [(5, 0, "math"), (5, 2, "default")]


def test_generated_text_and_files_are_joined(tmp_path: Path) -> None:
    spec = DataSpec(generated=GeneratedSpec(math=3, tool_call=2), files=[jsonl(tmp_path, {"prompt": "x"})])
    found = training_data.items(spec, byte_tokenizer(), length=64)
    assert Counter(item.domain for item in found) == {"math": 3, "tool_call": 2, "default": 1}


def test_held_out_items_are_of_each_domain_and_never_trained_on() -> None:
    split = training_data.split(made(20) + made(10, "tool_call"), held_out=4, seed=0)
    assert {domain: len(items) for domain, items in split.held_out.items()} == {"math": 4, "tool_call": 4}
    assert len(split.training) == 22
    kept = {item.id for items in split.held_out.values() for item in items}
    assert kept.isdisjoint(item.id for item in split.training)


def test_what_is_held_out_follows_from_the_seed() -> None:
    first, again, other = (
        {item.id for item in training_data.split(made(50), held_out=10, seed=seed).held_out["math"]}
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_domain_with_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(InputError, match=r"data.held_out \(4\) must leave text .* domain 'math' has 4 items"):
        training_data.split(made(4), held_out=4, seed=0)


def test_every_item_comes_once_a_round_in_another_order() -> None:
    seen = [i for step in range(10) for i in training_data.chosen(count=10, size=4, step=step, seed=3)]
    rounds = [seen[k : k + 10] for k in range(0, 40, 10)]
    assert [sorted(round_) for round_ in rounds] == [list(range(10))] * 4
    assert len({tuple(round_) for round_ in rounds}) == 4


def test_a_step_s_items_do_not_depend_on_the_steps_before() -> None:
    assert training_data.chosen(100, 8, step=7, seed=1) == training_data.chosen(100, 8, step=7, seed=1)
    assert training_data.chosen(100, 8, step=7, seed=1) != training_data.chosen(100, 8, step=7, seed=2)
    # More items a step than there are: some come twice.
    assert Counter(training_data.chosen(2, 4, step=0, seed=0)) == {0: 2, 1: 2}


def test_batches_are_padded_on_the_right() -> None:
    ids_BT, mask_BT = training_data.pad(
        [Item("a", "math", (5, 6, 7), 0), Item("b", "math", (8,), 0)], torch.device("cpu")
    )
    assert ids_BT.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask_BT.tolist() == [[True, True, True], [True, False, False]]


def test_seeds_of_different_purposes_differ_and_are_fixed() -> None:
    found = [training_data.derived(seed, *purpose) for seed in (0, 1) for purpose in (("a",), ("b",), ("a", 1))]
    assert len(set(found)) == 6
    assert all(0 <= seed < 2**63 for seed in found)
    # `printf 0/a | sha256sum` begins with these eight bytes.
    assert training_data.derived(0, "a") == 0xD3216B8DC7C46489 >> 1
