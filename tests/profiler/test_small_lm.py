"""What a small language model is trained on: pieces of the library, a vocabulary, a folder that opens as a model."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from profiler import models, small_lm
from profiler.errors import InputError


def test_pieces_are_whole_functions_and_classes_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n\nX = 1\n\n\ndef long():\n" + "    '''why'''\n" * 12 + "    return 1\n")
    (tmp_path / "b.py").write_text("class C:\n" + "    x = 1\n" * 200)
    (tmp_path / "short.py").write_text("def f():\n    pass\n")
    (tmp_path / "broken.py").write_text("def (\n" * 40)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text((tmp_path / "a.py").read_text())
    found = dict(small_lm.pieces_under(tmp_path))
    assert sorted(found) == ["a.py:6", "b.py:1"]
    assert found["a.py:6"].startswith("def long():") and found["a.py:6"].endswith("return 1")
    assert len(found["b.py:1"]) == small_lm.LONGEST
    with pytest.raises(InputError, match="3 functions and classes are needed, and 2 were found"):
        small_lm.pieces(3, tmp_path)


def test_the_library_of_this_interpreter_is_read_in_an_order_that_repeats() -> None:
    found = small_lm.pieces(300, small_lm.library())
    assert found[:100] == small_lm.pieces(100, small_lm.library())
    whole = [text for _, text in found if len(text) < small_lm.LONGEST]
    assert len(whole) > 50
    assert all(isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.ClassDef) for text in whole)


def test_a_vocabulary_round_trips_and_is_shorter_than_bytes() -> None:
    texts = [text for _, text in small_lm.pieces(200, small_lm.library())]
    tokenizer = small_lm.vocabulary(texts, 600)
    assert len(tokenizer) == 600
    for text in ["def f(x):\n    return x + 1\n", "naïve → 漢字 \U0001f600", ""]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(texts[0])["input_ids"]) < 0.6 * len(texts[0].encode())
    assert small_lm.vocabulary(texts, 600).get_vocab() == tokenizer.get_vocab()


def test_the_folder_has_text_vocabulary_and_a_model_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_lm, "PIECES", 50)
    monkeypatch.setattr(small_lm, "GENERATED", 50)
    folder = tmp_path / "small"
    assert small_lm.main([str(folder)]) == 0
    lines = [json.loads(line) for line in (folder / small_lm.TEXT).read_text().splitlines()]
    assert len(lines) == 50
    assert {line["domain"] for line in lines} == {"python"}
    facts = json.loads((folder / small_lm.FACTS).read_text())
    assert (facts["pieces"], facts["characters"]) == (50, sum(len(line["prompt"]) for line in lines))
    loaded = models.load(str(folder / small_lm.MODEL), device="cpu")
    assert loaded.model.config.num_hidden_layers == 4
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer(lines[0]["prompt"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(loaded.model(input_ids=ids[:, :20]).logits).all()
    assert small_lm.main([str(folder)]) == 2
    assert "the folder is not empty" in capsys.readouterr().err
    assert small_lm.main([]) == 2
