"""Recipes: defaults are the paper's, and every mistake is told with its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.errors import InputError
from workloads import recipe as recipes
from workloads.documents import parse_yaml
from workloads.recipe import Recipe

MINIMAL = """
name: mine
model: {source: tiny}
method: {name: layerroute, lora: true}
objective: {}
data: {generated: {math: 100}}
training: {steps: 10}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_are_the_paper_s(minimal: Path) -> None:
    """METHODS §2: AdamW 2e-4, weight decay 0.01, batch 4 × accumulation 4, clip 1.0."""
    training = recipes.load(minimal).training
    assert (training.learning_rate, training.betas, training.weight_decay) == (2e-4, [0.9, 0.999], 0.01)
    assert (training.batch, training.accumulation, training.clip) == (4, 4, 1.0)


@pytest.mark.parametrize("name", recipes.builtin_recipes())
def test_built_in_recipes_load_and_read_back(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name)
    assert recipe.name == name
    written = tmp_path / "again.yaml"
    written.write_text(recipe.to_yaml())
    again = recipes.load(written)
    assert again == recipe
    assert again.sha256() == recipe.sha256()


def test_the_hash_is_of_what_is_meant_not_of_how_it_is_written(minimal: Path) -> None:
    spelt_out = minimal.with_name("long.json")
    spelt_out.write_text(json.dumps({**parse_yaml(MINIMAL, ""), "training": {"steps": 10, "batch": 4, "seed": 0}}))
    assert recipes.load(spelt_out).sha256() == recipes.load(minimal).sha256()
    assert recipes.load(minimal, ["training.seed=1"]).sha256() != recipes.load(minimal).sha256()


def test_keys_that_came_later_leave_the_hash_of_a_recipe_without_them_as_it_was(minimal: Path) -> None:
    """The hash a training was begun under, from before there were schedules and gradient checkpointing."""
    trained_under = "9d2c0bf0a75f3f3e155a524925278206b845da1ddcd1b750e4cce8a77193512f"
    assert recipes.load("layerroute-smollm2").sha256() == trained_under
    spelt_out = ["training.warmup_share=0.0", "training.schedule=cosine", "training.gradient_checkpointing=false"]
    assert recipes.load("layerroute-smollm2", spelt_out).sha256() == trained_under
    changed = ["training.warmup_share=0.03", "training.schedule=constant", "training.gradient_checkpointing=true"]
    hashes = {recipes.load("layerroute-smollm2", [one]).sha256() for one in changed}
    assert len(hashes | {trained_under}) == 4


def test_set_changes_keys_the_method_s_and_the_objective_s_own_included(minimal: Path) -> None:
    recipe = recipes.load(minimal, ["objective.gate_weight=0.3", "method.lora={rank: 4}", "training.seed=7"])
    assert recipe.objective.options == {"gate_weight": 0.3}
    assert recipe.method.options == {"lora": {"rank": 4}}
    assert recipe.training.seed == 7


def test_relative_files_start_at_the_recipe_and_typed_ones_at_the_working_folder(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minimal.write_text(MINIMAL.replace("{generated: {math: 100}}", "{files: [text/a.jsonl]}"))
    assert recipes.load(minimal).data.files == [str(tmp_path / "text" / "a.jsonl")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert recipes.load(minimal, ["data.files=[b.jsonl]"]).data.files == [str(elsewhere / "b.jsonl")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=3", "training.step: unknown key; the nearest known is 'steps'"),
        ("trainin.steps=3", "trainin: unknown key; the nearest known is 'training'"),
        ("serve={}", "serve: unknown key; known here: name, model, method"),
        ("training.steps=0", "training.steps: must be at least 1, and 0 was given .with --set training.steps=0"),
        ("training.learning_rate=2", "training.learning_rate: must be at most 1, and 2 was given"),
        ("training.betas=[0.9]", r"training.betas: must hold at least 2 \(it holds 1\)"),
        ("training.stored_dtype=float61", r"training.stored_dtype: must be one of .*\(nearest: float16\)"),
        ("training.length=1", "training.length: must be at least 2"),
        ("training.warmup_share=1.5", "training.warmup_share: must be at most 1"),
        ("training.schedule=linear", "training.schedule: must be one of .*"),
        ("training.batch=4000", r"batch × accumulation × length must be at most 4,194,304 tokens .* is "),
        ("data.generated={}", "there must be text to train on"),
        ("data.generated.maths=3", "data.generated.maths: unknown key; the nearest known is 'math'"),
        ("model.dtype=float16", "dtype float16 overflows in training without loss scaling"),
        ("method.checkpoint=runs/x", "so it takes no checkpoint"),
        ("method.name=layer route", "method.name: must be a method's name"),
    ],
)
def test_mistakes_name_their_key(minimal: Path, override: str, message: str) -> None:
    overrides = [override, "training.length=2048"] if override.startswith("training.batch") else [override]
    with pytest.raises(InputError, match=message):
        recipes.load(minimal, overrides)


def test_a_missing_key_is_named(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace("training:", "trainings:"))
    with pytest.raises(InputError, match="training: must be given.*did you mean it by 'trainings'"):
        recipes.load(minimal)


def test_recipes_are_found_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="neither a file nor a built-in recipe .*nearest built-in is 'layerroute-tiny'"
    ):
        recipes.load("layerroute-tyni")
    with pytest.raises(InputError, match="there is no such file"):
        recipes.load(tmp_path / "absent.yaml")
    listed = tmp_path / "list.yaml"
    listed.write_text("[1]")
    with pytest.raises(InputError, match="must be a mapping of keys such as name, model and method"):
        recipes.load(listed)


@pytest.mark.parametrize("name", ["layerroute-smollm2", "hero-smollm2"])
def test_the_shipped_recipes_use_generated_text_only(name: str) -> None:
    """Anybody can train them again: no file beside the package is needed."""
    recipe: Recipe = recipes.load(name)
    assert recipe.data.files == []
    assert recipe.data.generated is not None
    assert all(recipe.data.generated.counts.values())
