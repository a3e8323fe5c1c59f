"""From a spec's prompts to tensors: the same for every arm, what the dense model would say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import arms, methods, models
from profiler.errors import InputError
from profiler.inputs import Inputs
from profiler.models import LoadedModel
from profiler.records import CellRecord
from workloads.spec import Spec


def spec(prompts: dict[str, Any] | None = None, keep_text: bool = True, **cells: Any) -> Spec:
    return Spec.model_validate(
        {
            "name": "t",
            "model": {"source": "tiny"},
            "arms": [{"name": "dense", "method": "dense"}],
            "prompts": prompts or {},
            "cells": cells or {"prefill": {"batch": [3], "length": [7]}},
            "privacy": {"keep_text": keep_text},
        }
    )


def file(folder: Path, *prompts: dict[str, Any]) -> dict[str, Any]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return {"source": str(path)}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return models.load("tiny", device="cpu")


@pytest.fixture(scope="module")
def dense(loaded: LoadedModel) -> methods.Method:
    return arms.tree(loaded.model, "dense", methods.configure("dense", {}))


def bound(given: Spec, loaded: LoadedModel) -> Inputs:
    made = Inputs(given)
    made.tokenise(loaded)
    return made


PREFILL = CellRecord(name="prefill-b3-l7", phase="prefill", batch=3, length=7)
DECODE = CellRecord(name="decode-b2-c5-n4", phase="decode", batch=2, length=5, new_tokens=4)


def test_a_prefill_cell_is_exactly_its_length_of_its_prompts(
    tmp_path: Path, loaded: LoadedModel, dense: methods.Method
) -> None:
    given = spec(file(tmp_path, {"prompt": "abcdefghij", "domain": "x"}, {"prompt": "0123456789", "domain": "y"}))
    made = bound(given, loaded)
    inputs = made.of(PREFILL, dense)
    assert inputs.ids_BT.tolist()[:2] == [list(b"abcdefg"), list(b"0123456")]  # a token is a byte
    assert inputs.ids_BT.shape == (3, 7)
    assert inputs.requests == ["r0000", "r0001", "r0002"]
    assert (inputs.steps, inputs.continuation_BN, PREFILL.reference) == (1, None, None)


def test_a_decode_cell_is_fed_what_the_dense_model_says_greedily(loaded: LoadedModel, dense: methods.Method) -> None:
    made = bound(spec(decode={"batch": [2], "context": [5], "new_tokens": 4}), loaded)
    inputs = made.of(DECODE, dense)
    assert inputs.continuation_BN is not None
    assert (inputs.steps, inputs.continuation_BN.shape) == (4, (2, 4))
    # Without a cache, one token after the other, each from the whole text so far.
    so_far = inputs.ids_BT
    for token in range(4):
        with torch.no_grad():
            expected = loaded.model(input_ids=so_far, use_cache=False).logits[:, -1].argmax(-1)
        assert torch.equal(inputs.continuation_BN[:, token], expected)
        so_far = torch.cat([so_far, expected[:, None]], dim=1)
    assert DECODE.reference == "teacher-forced on the dense model's greedy continuation"


def test_making_a_cell_again_gives_the_same(loaded: LoadedModel, dense: methods.Method) -> None:
    given = spec(decode={"batch": [2], "context": [5], "new_tokens": 4})
    one, other = bound(given, loaded).of(DECODE, dense), bound(given, loaded).of(DECODE, dense)
    assert torch.equal(one.ids_BT, other.ids_BT)
    assert one.continuation_BN is not None
    assert other.continuation_BN is not None
    assert torch.equal(one.continuation_BN, other.continuation_BN)


def test_prompt_rows_hold_text_unless_the_spec_keeps_none(tmp_path: Path, loaded: LoadedModel) -> None:
    prompts = file(tmp_path, {"prompt": "a secret sentence", "domain": "x"})
    (kept,) = bound(spec(prompts), loaded).prompt_rows(PREFILL)
    assert (kept.table, kept.cell) == ("prompts", "prefill-b3-l7")
    assert kept.columns["text"][0] == "a secret"  # whole words that give seven tokens
    assert kept.columns["tokens"] == [7, 7, 7]
    assert kept.columns["domain"] == ["x"] * 3
    (bare,) = bound(spec(prompts, keep_text=False), loaded).prompt_rows(PREFILL)
    assert bare.columns["text"] == [None] * 3
    assert "secret" not in repr(bare)


def test_samples_take_domains_in_turn_and_leave_out_what_gives_no_tokens(tmp_path: Path, loaded: LoadedModel) -> None:
    lines = [{"prompt": f"{domain}{i}", "domain": domain} for domain in "ab" for i in range(3)]
    made = bound(spec(file(tmp_path, *lines)), loaded)
    assert [bytes(ids).decode() for ids in made.samples()] == ["a0", "b0", "a1", "b1"]
    alone = bound(spec(file(tmp_path, {"prompt": "only"})), loaded)
    assert [bytes(ids).decode() for ids in alone.samples()] == ["only"]


def test_a_cell_past_the_models_positions_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(
        InputError, match=r"decode-b1-c2047-n2 reaches position 2,049, and tiny has positions for 2,048"
    ):
        bound(spec(decode={"batch": [1], "context": [2047], "new_tokens": 2}), loaded)
    bound(spec(decode={"batch": [1], "context": [2046], "new_tokens": 2}), loaded)


def test_a_model_without_a_tokenizer_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match="model tiny: it has no tokenizer"):
        Inputs(spec()).tokenise(LoadedModel(loaded.model, None, loaded.record))


def test_prompts_that_give_no_tokens_are_refused_before_anything_is_written(
    tmp_path: Path, loaded: LoadedModel
) -> None:
    def silent(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": []}

    with pytest.raises(InputError, match="the prompts of domain 'x' give no tokens"):
        bound(
            spec(file(tmp_path, {"prompt": "abc", "domain": "x"})),
            LoadedModel(loaded.model, silent, loaded.record),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must hold at least one prompt, and it is empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"prompt": ""}', "'prompt' must not be empty"),
        (b'{"text": "x"}', "the key 'prompt' must be given"),
    ],
)
def test_a_broken_prompts_file_is_refused_without_a_model(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        Inputs(spec({"source": str(tmp_path / "p.jsonl")}))
    with pytest.raises(InputError, match=r"no\.jsonl"):
        Inputs(spec({"source": str(tmp_path / "no.jsonl")}))
