"""What is refused before any weights are looked for: checkpoints and numbers of ranks that do not fit the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler import models, preflight
from profiler.errors import SpecError
from profiler.execution.backbone_facts import backbone_facts
from profiler.execution.decoder import decoder
from profiler.methods.mohge import MohgeConfig, designed
from tests.profiler import rank_runs
from tests.profiler.tiny_runs import tiny_spec
from workloads.spec import Spec

METHODS = ("hero", "layerroute", "mohge")


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(models, "load", loaded)


def with_checkpoint(folder: Path, method: str, **options: Any) -> Spec:
    arms = [{"name": "dense", "method": "dense"}, {"name": "routed", "method": method, "checkpoint": str(folder)}]
    return tiny_spec(arms=[arms[0], {**arms[1], **options}])


def write_facts(folder: Path, of: str, **changed: Any) -> Path:
    """A checkpoint for the tiny preset without its tensors; a fact that is given as None is left out."""
    dec = decoder(models.skeleton(models.config("tiny")))
    facts = {
        "format": 1, **backbone_facts(dec, of), "lora": False, "design": designed(MohgeConfig(), dec).facts(),
        "options": {"layers": [3, 4, 5], "adapter_width": 14, "threshold": 0.5, "variant": "full"},
    }  # fmt: skip
    folder.mkdir()
    kept = {key: value for key, value in (facts | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_that_says_it_fits_passes(method: str, tmp_path: Path) -> None:
    assert preflight.check(with_checkpoint(write_facts(tmp_path / "made", method), method)).device.type == "meta"


@pytest.mark.parametrize("options", [{}, {"lora": False}])
def test_a_checkpoint_that_is_not_there_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    for method in METHODS:
        spec = with_checkpoint(tmp_path / "gone", method, **(options if method == "layerroute" else {}))
        with pytest.raises(SpecError, match=r"^arms.routed: checkpoint .*gone: there is no such folder$"):
            preflight.check(spec)
    (tmp_path / "gone").mkdir()
    with pytest.raises(SpecError, match=r"^arms.routed: checkpoint .*gone: there is no config.json in it$"):
        preflight.check(with_checkpoint(tmp_path / "gone", "mohge"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"method": "static_depth"}, "it was made by method static_depth, and the arm's is {method}"),
        ({"architecture": "Qwen2ForCausalLM"}, "it was made for a Qwen2ForCausalLM, this model is a LlamaForCausalLM"),
        ({"layers": 30}, "it was made for 30 layers, this model has 6"),
        ({"layers": 1}, "it was made for 1 layer, this model has 6"),
        ({"hidden_size": 32}, "it was made for a hidden size of 32, this model has 64"),
        ({"attention_heads": 9}, "it was made for 9 attention heads, this model has 4"),
        ({"key_value_heads": 1}, "it was made for 1 key-value head, this model has 2"),
        ({"layers": None}, "config.json must hold layers, and it does not"),
        ({"format": 7}, "its format is 7, this version reads 1"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_of_something_else_is_refused_with_both_sides(
    method: str, changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = write_facts(tmp_path / "made", method, **changed)
    with pytest.raises(SpecError) as refused:
        preflight.check(with_checkpoint(folder, method))
    assert str(refused.value) == f"arms.routed: checkpoint {folder}: {told.format(method=method)}"


def test_the_checkpoint_of_another_method_as_it_is_saved_is_refused_by_its_method(tmp_path: Path) -> None:
    for place, (method, other) in enumerate([("hero", "mohge"), ("mohge", "layerroute"), ("layerroute", "hero")]):
        folder = write_facts(tmp_path / str(place), other, lora=None, design=None, options=None)
        with pytest.raises(SpecError, match=f"it was made by method {other}, and the arm's is {method}"):
            preflight.check(with_checkpoint(folder, method))


def test_a_checkpoint_of_other_experts_is_refused_with_both_sides(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "made", "mohge")
    with pytest.raises(SpecError, match="it was made with groups 8, the arm asks for 4$"):
        preflight.check(with_checkpoint(folder, "mohge", groups=4))
    with pytest.raises(SpecError, match="it was made with renormalise true, the arm asks for false$"):
        preflight.check(with_checkpoint(folder, "mohge", renormalise=False))


@pytest.mark.parametrize("placement", ["contiguous", "all_size", "interleaved"])
def test_more_ranks_than_a_layer_has_experts_are_refused(placement: str) -> None:
    experts = 4 * 3
    preflight.check(rank_runs.spec(parallel={"experts": experts, "placement": placement}))
    with pytest.raises(SpecError) as refused:
        preflight.check(rank_runs.spec(parallel={"experts": experts + 1, "placement": placement}))
    assert str(refused.value) == (
        "arms.mohge: parallel.experts (13) must be at most the experts of a layer (12), for every rank has one at least"
    )
