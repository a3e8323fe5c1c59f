"""`train` and `seeds` in a spec: what they may be, how they are written, and where their paths start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiler.errors import InputError
from workloads.keys import shape_at
from workloads.loading import load
from workloads.spec import Spec, run_name

STUDY: dict[str, Any] = {
    "name": "mine",
    "model": {"source": "tiny"},
    "train": {"recipe": "layerroute-tiny"},
    "seeds": [0, 1, 2],
    "arms": [
        {"name": "dense", "method": "dense"},
        {"name": "routed", "method": "layerroute", "checkpoint": "trained"},
    ],
    "cells": {"prefill": {"batch": [1], "length": [8]}},
}


def written(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in {**STUDY, **changes}.items() if v is not ...}))
    return str(path)


def test_a_study(tmp_path: Path) -> None:
    spec = load(written(tmp_path))
    assert spec.seeds == [0, 1, 2]
    assert spec.train is not None
    assert (spec.train.recipe, spec.train.set) == ("layerroute-tiny", {})
    assert spec.trained_arms() == ["routed"]
    (tmp_path / "again.yaml").write_text(spec.to_yaml())
    assert load(tmp_path / "again.yaml") == spec
    assert load(tmp_path / "again.yaml").sha256() == spec.sha256()


def test_an_ordinary_spec_has_the_hash_it_always_had() -> None:
    spec = load("tiny")
    assert (spec.train, spec.seeds) == (None, None)
    meant = spec.model_dump(mode="json")
    assert set(STUDY) <= set(meant)
    assert load("tiny", ["measure.seed=1"]).sha256() != spec.sha256()
    study = load("layerroute-seeds-tiny")
    assert study.sha256() != load("layerroute-seeds-tiny", ["seeds=[0, 1]"]).sha256()
    assert study.sha256() != load("layerroute-seeds-tiny", ["train.set.training.steps=31"]).sha256()


DENSE = {"name": "dense", "method": "dense"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train": ...},
            "train: must be given, since arm 'routed' asks for checkpoint: trained; for a folder of that ",
        ),
        ({"train": None}, "train: must be given, since arm 'routed' asks for checkpoint: trained"),
        ({"seeds": ...}, "seeds: must be given beside train, such as seeds: [0, 1, 2]"),
        ({"seeds": []}, "seeds: must hold at least 1"),
        ({"seeds": [1, 1]}, "seeds: each entry may be listed once, and 1 is listed 2 times"),
        ({"seeds": [-1]}, "seeds.0: must be at least 0, and -1 was given"),
        ({"seeds": 3}, "seeds: must be a list"),
        ({"seeds": list(range(65))}, "seeds: must hold at most 64 (it holds 65)"),
        ({"name": "n" * 60}, "seeds: name runs of their own, and '" + "n" * 60 + "-seed-0' has 67 characters where 64"),
        ({"train": {}}, "train.recipe: must be given"),
        ({"train": {"recpie": "x"}}, "train.recpie: unknown key; the nearest known is 'recipe'"),
        ({"train": {"recipe": "layerroute-tiny", "set": [1]}}, "train.set"),
        (
            {"train": {"recipe": "layerroute-tiny", "set": {"training": {"seed": 3}}}},
            "train.set: training.seed is what seeds sets",
        ),
        ({"arms": [DENSE]}, "train: makes a checkpoint, and no arm asks for it; give an arm checkpoint: trained"),
        ({"arms": [DENSE], "train": ...}, "seeds: repeat a training, and the spec has no train section; add one, such"),
    ],
)
def test_what_does_not_make_a_study(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        load(written(tmp_path, **changes))
    assert sentence in str(caught.value)


def test_changes_of_the_recipe_have_one_form(tmp_path: Path) -> None:
    dotted = {"recipe": "layerroute-tiny", "set": {"training.steps": 3, "method.lora.rank": 2}}
    nested = {"recipe": "layerroute-tiny", "set": {"training": {"steps": 3}, "method": {"lora": {"rank": 2}}}}
    first, second = (load(written(tmp_path, train=train)) for train in (dotted, nested))
    assert first == second
    assert first.train is not None
    assert first.train.set == {"training.steps": 3, "method.lora.rank": 2}
    third = load(written(tmp_path), ["train.set.training.steps=3", "train.set.method.lora.rank=2"])
    assert third.sha256() == first.sha256()
    assert load(written(tmp_path, train=dotted), ["train.set.training.steps=9"]).train == third.train.model_copy(  # type: ignore[union-attr]
        update={"set": {"training.steps": 9, "method.lora.rank": 2}}
    )
    assert shape_at(("train", "set"), Spec) is Any


def test_paths_start_at_the_spec_or_where_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "specs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (folder / "bare").write_text("")
    train = {"recipe": "../r.yaml", "set": {"data.files": ["a.jsonl", "/b.jsonl"], "training.steps": 2}}
    found = load(written(folder, train=train)).train
    assert found is not None
    assert found.recipe == str(tmp_path / "r.yaml")
    assert found.set == {"data.files": [str(folder / "a.jsonl"), "/b.jsonl"], "training.steps": 2}
    typed = load(written(folder, train=train), ["train.recipe=r.yaml", "train.set.data.files=[c.jsonl]"]).train
    assert typed is not None
    assert typed.recipe == str(elsewhere / "r.yaml")
    # The dotted key of the file comes first, so what was typed later stands.
    assert typed.set["data.files"] == [str(elsewhere / "c.jsonl")]

    def recipe(name: str) -> str:
        train = load(written(folder, train={"recipe": name})).train
        assert train is not None
        return train.recipe

    assert recipe("bare") == str(folder / "bare")
    assert recipe("./bare") == str(folder / "bare")
    assert recipe("layerroute-tiny") == "layerroute-tiny"
    assert recipe("layerroute-tyni") == "layerroute-tyni"  # for the recipe's loader to refuse, with the nearest name


def test_the_built_in_studies() -> None:
    tiny, small = load("layerroute-seeds-tiny"), load("layerroute-seeds")
    assert tiny.seeds == list(range(10))
    assert small.seeds == [0, 1, 2]
    for spec in (tiny, small):
        assert spec.trained_arms() == ["lora", "routed"]
        assert spec.quality is not None
        # Both arms run in the one spec, so that routed is never held against a backbone that differs in two ways.
        assert [arm.options.get("gates") for arm in spec.arms] == [None, "open", None]
    assert json.loads(json.dumps(tiny.train.set)) == {  # type: ignore[union-attr]
        "training.steps": 30, "training.learning_rate": 1e-2, "training.threads": 1
    }  # fmt: skip


def test_names_of_runs() -> None:
    assert run_name("mine", 7) == "mine-seed-7"
