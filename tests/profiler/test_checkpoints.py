"""`checkpoint: builtin`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler import checkpoints, models
from profiler.errors import InputError


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints that ship, of which one is for the tiny preset's shape."""
    for name, layers in (("layerroute-small", 6), ("layerroute-large", 12)):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        facts = {"method": "layerroute", "architecture": "LlamaForCausalLM", "layers": layers, "hidden_size": 64}
        (folder / "config.json").write_text(json.dumps({**facts, "base": name.partition("-")[2]}))
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    return tmp_path / "checkpoints"


def test_builtin_is_the_checkpoint_of_the_method_for_the_model_s_shape(shipped: Path) -> None:
    options = {"checkpoint": "builtin", "kv_policy": "request"}
    found = checkpoints.resolve("layerroute", options, models.load("tiny").model)
    assert found == {"checkpoint": str(shipped / "layerroute-small"), "kv_policy": "request"}


def test_an_arm_gets_the_checkpoint_of_its_variant_or_else_the_full_one(shipped: Path) -> None:
    shape = {"method": "hero", "architecture": "LlamaForCausalLM", "layers": 6, "hidden_size": 64, "base": "small"}
    for variant in ("wide_local", "full"):
        folder = shipped / f"a-{variant}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**shape, "options": {"variant": variant}}))
    model = models.load("tiny").model
    for variant, name in (("wide_local", "wide_local"), ("no_path", "full"), ("full", "full"), (None, "full")):
        options = {"checkpoint": "builtin", "variant": variant}
        assert checkpoints.resolve("hero", options, model)["checkpoint"] == str(shipped / f"a-{name}")


@pytest.mark.parametrize("options", [{}, {"checkpoint": None}, {"checkpoint": "runs/mine/checkpoint"}])
def test_anything_else_passes_through(shipped: Path, options: dict[str, str | None]) -> None:
    assert checkpoints.resolve("layerroute", options, models.load("tiny").model) == options


def test_a_model_none_ships_for_is_named_beside_those_there_are(shipped: Path) -> None:
    model = models.skeleton(models.config("qwen2.5-0.5b"))
    message = (
        r"none ships for method 'layerroute' on this model \(Qwen2ForCausalLM, 24 layers of width 896\); those that "
        r"ship: layerroute-large \(layerroute; LlamaForCausalLM, 12 layers of width 64\); layerroute-small \("
    )
    with pytest.raises(InputError, match=message):
        checkpoints.resolve("layerroute", {"checkpoint": "builtin"}, model)
    with pytest.raises(InputError, match="none ships for method 'hero'"):
        checkpoints.resolve("hero", {"checkpoint": "builtin"}, models.load("tiny").model)


def test_those_that_ship_are_listed_once_each_by_a_name_that_tells_them_apart() -> None:
    with pytest.raises(InputError, match="none ships for method 'layerroute'") as refused:
        checkpoints.resolve("layerroute", {"checkpoint": "builtin"}, models.skeleton(models.config("tiny")))
    listed = str(refused.value).partition("those that ship: ")[2].split("); ")
    assert [entry.partition(" (")[0] for entry in listed] == [Path(f).name for f in checkpoints.builtin_checkpoints()]
    assert len({entry.partition(" (")[2] for entry in listed}) == len(listed)  # also by what they are
    assert "variant wide_local" in str(refused.value)
    assert "runs/" not in str(refused.value)
