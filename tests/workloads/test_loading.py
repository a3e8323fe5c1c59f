"""From file and `--set` to a spec, and every sentence a wrong one gets."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiler.errors import InputError
from workloads.loading import builtin_specs, load

GOOD: dict[str, Any] = {
    "name": "mine",
    "model": {"source": "tiny"},
    "arms": [
        {"name": "dense", "method": "dense"},
        {"name": "routed", "method": "layerroute", "gates": {"forced": {"ratio": 0.3}}},
    ],
    "cells": {"prefill": {"batch": [1, 8], "length": [128]}},
}


BUILTIN = [
    "aa",
    "batch-sweep",
    "hero-controls",
    "layerroute-baselines",
    "layerroute-seeds",
    "layerroute-seeds-tiny",
    "mohge-ep4",
    "mohge-relatives",
    "prefill-512",
    "quickstart",
    "stock-moe",
    "tiny",
]


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def written(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(source, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_built_in_specs_load_and_say_where_their_schema_is() -> None:
    assert sorted(builtin_specs()) == BUILTIN
    for name, path in builtin_specs().items():
        assert load(name).name == name == path.stem
        assert path.read_text().startswith("# yaml-language-server: $schema=../spec.schema.json\n")
        assert (path.parent / "../spec.schema.json").resolve().is_file()


def test_quickstart_is_the_default() -> None:
    spec = load()
    assert spec == load("quickstart")
    assert (spec.model.source, spec.model.dtype) == ("smollm2-135m", "float32")
    assert [(arm.name, arm.method, arm.twin) for arm in spec.arms] == [
        ("dense", "dense", None),
        ("trained", "layerroute", "dense"),
        ("forced-30", "layerroute", "dense"),
    ]
    assert spec.arms[2].options["gates"] == {"forced": {"ratio": 0.3, "seed": 0, "pattern": "shared"}}
    assert [cell.name for cell in spec.cell_list()] == [
        "prefill-b1-l128",
        "prefill-b4-l128",
        "decode-b1-c128-n8",
        "decode-b4-c128-n8",
    ]
    assert (spec.measure.warmup, spec.measure.max_repeats) == (1, 12)
    assert (spec.measure.target_ci, spec.measure.budget_s) == (0.02, 25.0)
    assert spec.trace is not None
    assert spec.trace.steps == 1


def test_the_a_a_run_compares_dense_with_dense() -> None:
    first, second = load("aa").arms
    assert (first.method, second.method, second.twin) == ("dense", "dense", first.name)


def test_the_same_spec_from_yaml_from_json_and_from_a_path_object(tmp_path: Path) -> None:
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(GOOD))
    assert load(written(tmp_path, GOOD)) == load(as_json) == load(str(as_json))


def test_the_resolved_spec_loads_again_to_the_same_hash(tmp_path: Path) -> None:
    spec = load(written(tmp_path, changed(prompts={"source": "p.jsonl"})), ["measure.seed=7"])
    (tmp_path / "run").mkdir()
    copy = tmp_path / "run" / "spec.yaml"
    copy.write_text(spec.to_yaml())
    assert load(copy).sha256() == spec.sha256()


def test_a_prompt_path_starts_at_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "specs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    source = written(folder, changed(prompts={"source": "../data/p.jsonl"}))
    monkeypatch.chdir(elsewhere)
    assert load(os.path.relpath(source)).prompts.source == str(tmp_path / "data" / "p.jsonl")
    assert load(source, ["prompts.source=q.jsonl"]).prompts.source == str(elsewhere / "q.jsonl")
    assert load("tiny", ["prompts={source: q.jsonl}"]).prompts.source == str(elsewhere / "q.jsonl")
    assert load(source, ["prompts.source=/abs/p.jsonl"]).prompts.source == "/abs/p.jsonl"
    assert load("tiny").prompts.source == "builtin"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("tiny", ["prompts.source=~/p.jsonl"]).prompts.source == str(tmp_path / "p.jsonl")


def test_a_quality_path_starts_where_a_prompt_path_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "specs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    source = written(folder, changed(prompts={"source": "p.jsonl"}, quality={"source": "held-out.jsonl"}))
    monkeypatch.chdir(elsewhere)

    def paths(*overrides: str) -> tuple[str, str]:
        found = load(source, overrides)
        assert found.quality is not None
        return found.prompts.source, found.quality.source

    assert paths() == (str(folder / "p.jsonl"), str(folder / "held-out.jsonl"))
    assert paths("quality.source=q.jsonl") == (str(folder / "p.jsonl"), str(elsewhere / "q.jsonl"))
    assert paths("prompts.source=q.jsonl") == (str(elsewhere / "q.jsonl"), str(folder / "held-out.jsonl"))
    assert paths("quality.source=builtin") == (str(folder / "p.jsonl"), "builtin")


def test_overrides_change_one_place_each_in_order(tmp_path: Path) -> None:
    spec = load(
        written(tmp_path, GOOD),
        [
            "arms.1.gates.forced.ratio=0.5",
            "arms.1.checkpoint.path=x=y",
            "cells.prefill.batch.1=4",
            "cells.decode={batch: [2], context: [16], new_tokens: 3}",
            "cells.decode.new_tokens=5",
            "trace.steps=2",
            "measure.target_ci=1e-2",
            "privacy.keep_text=false",
            "model.device=cpu",
        ],
    )
    assert spec.arms[1].options == {"gates": {"forced": {"ratio": 0.5}}, "checkpoint": {"path": "x=y"}}
    assert [cell.name for cell in spec.cell_list()] == ["prefill-b1-l128", "prefill-b4-l128", "decode-b2-c16-n5"]
    assert spec.trace is not None
    assert (spec.trace.steps, spec.measure.target_ci, spec.privacy.keep_text) == (2, 0.01, False)
    assert load(written(tmp_path, changed(trace={"steps": 3})), ["trace="]).trace is None


def test_an_override_of_an_anchored_value_leaves_its_other_uses_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\nmodel: {source: tiny}\ncells: {prefill: {batch: [1], length: [8]}}\narms:\n"
        "- {name: d, method: dense}\n- &r {name: r, method: m, gates: {ratio: 0.1}}\n- {<<: *r, name: s}\n"
    )
    spec = load(path, ["arms.1.gates.ratio=0.9"])
    assert [arm.options for arm in spec.arms[1:]] == [{"gates": {"ratio": 0.9}}, {"gates": {"ratio": 0.1}}]


def cells(batch: Any, length: Any) -> dict[str, Any]:
    return changed(cells={"prefill": {"batch": batch, "length": length}})


def decode(batch: Any, context: Any, new_tokens: Any) -> dict[str, Any]:
    return changed(cells={"decode": {"batch": batch, "context": context, "new_tokens": new_tokens}})


def arms(*given: dict[str, Any]) -> dict[str, Any]:
    return changed(arms=list(given))


TWO_DENSE = [{"name": "a", "method": "dense"}, {"name": "b", "method": "dense"}]

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (changed(modle={}), ["modle: unknown key; the nearest known is 'model'"]),
    (
        changed(zzz=1),
        [
            "zzz: unknown key; known here: name, model, arms, prompts, cells, measure, trace, quality, train, seeds, "
            "parallel, privacy"
        ],
    ),
    (changed(serve={}), ["serve: is not part of this version"]),
    (changed(model={"source": "tiny", "dtyp": 1}), ["model.dtyp: unknown key; the nearest known is 'dtype'"]),
    (
        changed(model={"source": "tiny", "dtype": "float31"}),
        ["model.dtype", "float32, bfloat16, float16, float64", "'float31' was given"],
    ),
    (changed(quality={"modes": ["leak"]}), ["quality.modes.0: must be one of prefix, whole", "'leak' was given"]),
    (changed(quality={"max_tokens": 1}), ["quality.max_tokens: must be at least 2, and 1 was given"]),
    (changed(quality={"count": 100_001}), ["quality.count: must be at most 100,000, and 100,001 was given"]),
    (changed(quality={"tasks": []}), ["quality.tasks: must hold at least 1"]),
    (changed(model={"source": ""}), ["model.source", "at least 1 characters", "'' was given"]),
    (changed(model={"source": "t", "device": "gpu"}), ["model.device", "one of auto, cpu, cuda", "'gpu'"]),
    (changed(model={"source": "t", "seed": -1}), ["model.seed", "at least 0", "-1 was given"]),
    (changed(model={"source": "t", "seed": 2**32}), ["model.seed", "at most 4,294,967,295", "4,294,967,296 was given"]),
    (changed(model="tiny"), ["model: must be a mapping with keys such as source", "'tiny' was given"]),
    (changed(model=None), ["model: must be a mapping", "null was given"]),
    ({k: v for k, v in GOOD.items() if k != "name"}, ["name: must be given"]),
    (changed(name="a/b"), ["name: must be letters, digits", "'a/b' was given"]),
    (changed(name=".hidden"), ["name: must be letters, digits", "beginning with a letter or digit"]),
    (changed(name="n" * 65), ["name: must be at most 64 characters"]),
    (changed(name=1.5), ["name: must be text (quote it", "1.5 was given"]),
    (changed(arms=[]), ["arms: must hold at least 1 (it holds 0)"]),
    (changed(arms={"name": "a"}), ["arms: must be a list", "a mapping was given"]),
    (changed(arms=["dense"]), ["arms.0: must be a mapping with keys such as name, method, twin", "'dense' was given"]),
    (changed(arms=[{"name": "a", "methd": "dense"}]), ["arms.0.method: must be given; did you mean it by 'methd'?"]),
    (changed(arms=[{"name": "a", "method": {"dense": 1}}]), ["arms.0.method: must be text", "a mapping was given"]),
    (changed(arms=[{"name": "a", "method": "../x"}]), ["arms.0.method: must be a method's name", "'../x' was given"]),
    (changed(arms=[{"name": "a b", "method": "dense"}]), ["arms.0.name: must be letters, digits", "'a b' was given"]),
    (changed(arms=[{"name": "a", "method": "dense", "options": {}}]), ["arms.0: 'options' is not a key"]),
    (changed(arms=[TWO_DENSE[0], TWO_DENSE[0]]), ["arms: arm names must differ", "a, a"]),
    (changed(arms=[TWO_DENSE[0], {"name": "A", "method": "dense"}]), ["arms: arm names must differ", "a, A"]),
    (
        changed(arms=[{"name": "r", "method": "layerroute"}]),
        ["arms: arm 'r' needs a baseline", "no arm has method: dense"],
    ),
    (
        changed(arms=[TWO_DENSE[0], {**TWO_DENSE[1], "twin": "b"}]),
        ["the twin of arm 'b' must be another arm, not itself"],
    ),
    (
        changed(arms=[TWO_DENSE[0], {**TWO_DENSE[1], "twin": "z"}]),
        ["twin of arm 'b'", "'z' is none", "the arms are a, b"],
    ),
    (
        changed(arms=[{"name": "dense", "method": "dense"}, {"name": "b", "method": "m", "twin": "dens"}]),
        ["did you mean 'dense'?"],
    ),
    (
        changed(arms=[{"name": f"a{i}", "method": "dense"} for i in range(33)]),
        ["arms: must hold at most 32 (it holds 33)"],
    ),
    (changed(cells={}), ["cells: at least one of prefill and decode must be given"]),
    (changed(cells={"prefill": None}), ["cells: at least one of prefill and decode"]),
    (changed(cells={"prefil": {}}), ["cells.prefil: unknown key; the nearest known is 'prefill'"]),
    (changed(cells={"prefill": {"batch": [1]}}), ["cells.prefill.length: must be given"]),
    (cells([], [8]), ["cells.prefill.batch: must hold at least 1"]),
    (cells(8, [8]), ["cells.prefill.batch: must be a list, such as [1, 8]", "8 was given"]),
    (cells([-1], [8]), ["cells.prefill.batch.0: must be at least 1, and -1 was given"]),
    (cells([1, 4097], [8]), ["cells.prefill.batch.1: must be at most 4,096, and 4,097 was given"]),
    (cells([True], [8]), ["cells.prefill.batch.0: must be a whole number, and true was given"]),
    (cells(["8"], [8]), ["must be a whole number, and '8' was given"]),
    (cells([1.5], [8]), ["must be a whole number, and 1.5 was given"]),
    (cells([8, 8], [8]), ["cells.prefill.batch: each entry may be listed once", "and 8 is listed 2 times"]),
    (cells([1], [10_000_000]), ["cells.prefill.length.0: must be at most 131,072, and 10,000,000 was given"]),
    (
        cells([128], [78_125]),
        ["cells.prefill: batch × length must be at most 1,048,576 tokens a cell", "and 128 × 78,125 is 10,000,000"],
    ),
    (
        decode([4096], [300], 8),
        ["cells.decode: batch × (context + new_tokens) must be at most 1,048,576", "4,096 × (300 + 8) is 1,261,568"],
    ),
    (decode([1], [8], 4097), ["cells.decode.new_tokens: must be at most 4,096"]),
    (cells(list(range(1, 21)), list(range(1, 21))), ["cells: a spec may have at most 256 cells, and these are 400"]),
    (changed(prompts={"domain": ["math"]}), ["prompts.domain: unknown key; the nearest known is 'domains'"]),
    (changed(prompts={"domains": []}), ["prompts.domains: must hold at least 1"]),
    (
        changed(prompts={"domains": ["a", "a"]}),
        ["prompts.domains: each entry may be listed once, and 'a' is listed 2 times"],
    ),
    (changed(prompts={"count": 0}), ["prompts.count: must be at least 1, and 0 was given"]),
    (
        changed(measure={"min_repeats": 9, "max_repeats": 4}),
        ["measure: min_repeats (9) must be at most max_repeats (4)"],
    ),
    (changed(measure={"max_repeats": 10_001}), ["measure.max_repeats: must be at most 10,000, and 10,001 was given"]),
    (changed(measure={"budget_s": 0}), ["measure.budget_s: must be more than 0"]),
    (changed(measure={"budget_s": 86_401}), ["measure.budget_s: must be at most 86,400"]),
    (changed(measure={"target_ci": "wide"}), ["measure.target_ci: must be a number, and 'wide' was given"]),
    (changed(measure={"threads": 0}), ["measure.threads: must be at least 1"]),
    (changed(trace={"steps": 0}), ["trace.steps: must be at least 1"]),
    (changed(trace={"keep": "yes"}), ["trace.keep: must be true or false, and 'yes' was given"]),
    (changed(privacy={"keep_txt": True}), ["privacy.keep_txt: unknown key; the nearest known is 'keep_text'"]),
]


@pytest.mark.parametrize(("data", "essentials"), REFUSED, ids=[str(essentials[0])[:60] for _, essentials in REFUSED])
def test_a_wrong_spec_is_refused_with_file_key_rule_and_value(
    tmp_path: Path, data: dict[str, Any], essentials: list[str]
) -> None:
    source = written(tmp_path, data)
    message = refusal(source)
    assert message.startswith(f"{source}: ")
    for essential in essentials:
        assert essential in message
    assert "--set" not in message
    assert "\n" not in message


def test_several_problems_are_told_together_up_to_ten(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, changed(modle=1, measure={"seed": -1, "warmup": "x"})))
    first, *others = message.split("\n")
    assert first.endswith("mine.yaml: 3 problems")
    assert sorted(line.split(":")[0].strip() for line in others) == ["measure.seed", "measure.warmup", "modle"]
    many = refusal(written(tmp_path, changed(**{f"k{i}": 1 for i in range(13)}))).split("\n")
    assert many[0].endswith("13 problems")
    assert len(many) == 12
    assert many[-1].strip() == "and 3 more"


def test_long_values_are_shortened(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, changed(model={"source": "x" * 5000})))
    assert "must be at most 4,096 characters" in message
    assert len(message) < 300 + len(str(tmp_path))
    assert "a number of more than 30 digits was given" in refusal("tiny", f"measure.seed={'9' * 40}")


@pytest.mark.parametrize(
    ("override", "essentials"),
    [
        ("measure", ["--set measure: must be KEY=VALUE"]),
        ("=3", ["must be KEY=VALUE"]),
        ("a..b=3", ["must be KEY=VALUE"]),
        ("mesure.seed=1", ["--set mesure.seed=1: mesure: unknown key; the nearest known is 'measure'"]),
        ("measure.budget=1", ["measure.budget: unknown key; the nearest known is 'budget_s'"]),
        ("cells.prefill.lenght=[1]", ["cells.prefill.lenght: unknown key; the nearest known is 'length'"]),
        ("serve.rate=1", ["serve: is not part of this version"]),
        ("arms.5.method=dense", ["arms is a list, and '5' is none of its indices (0 to 1)"]),
        ("arms.-1.method=dense", ["'-1' is none of its indices"]),
        ("arms.routed.gates=open", ["'routed' is none of its indices"]),
        ("model.source.x=1", ["model.source holds a single value ('tiny'), so nothing can be set under it"]),
        ("model.dtype.x=1", ["model.dtype is a single value"]),
        ("cells.decode.batch.0=1", ["the list cells.decode.batch is not there; set it whole"]),
        ("measure.seed=[1", ["--set measure.seed=[1: not YAML"]),
        ("arms.1.a=*b", ["not YAML", "undefined alias"]),
    ],
)
def test_an_override_to_nowhere_is_refused(tmp_path: Path, override: str, essentials: list[str]) -> None:
    message = refusal(written(tmp_path, GOOD), override)
    assert message.startswith("--set ")
    for essential in essentials:
        assert essential in message


@pytest.mark.parametrize(
    ("override", "essential"),
    [
        ("measure.seed=-1", "measure.seed: must be at least 0, and -1 was given (with --set measure.seed=-1)"),
        ("cells.prefill.length.0=0", "cells.prefill.length.0: must be at least 1, and 0 was given (with --set"),
        ("cells.prefill.length=[0]", "cells.prefill.length.0: must be at least 1, and 0 was given (with --set"),
        ("arms.1.twin=dens", "did you mean 'dense'? (with --set arms.1.twin=dens)"),
        ("cells.prefill=", "at least one of prefill and decode must be given (with --set cells.prefill=)"),
        ("cells.decode.new_tokens=4", "cells.decode.batch: must be given (with --set cells.decode.new_tokens=4)"),
    ],
)
def test_a_value_that_came_from_an_override_says_so(tmp_path: Path, override: str, essential: str) -> None:
    assert essential in refusal(written(tmp_path, GOOD), override)


def test_an_override_is_not_blamed_for_the_file(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, changed(model={"source": "t", "seed": -1})), "measure.seed=4")
    assert "model.seed: must be at least 0" in message
    assert "--set" not in message


def test_a_spec_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("quikstart")
    assert f"neither a file nor a built-in spec ({', '.join(BUILTIN)})" in message
    assert "nearest built-in is 'quickstart'" in message
    assert refusal("nosuch.yaml") == "nosuch.yaml: there is no such file"
    assert "it is a folder" in refusal(tmp_path)


def test_a_file_of_a_built_in_name_needs_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text(json.dumps(GOOD))
    assert load("tiny").name == "tiny"
    assert load("./tiny").name == load(Path("tiny")).name == "mine"


def test_a_document_that_is_no_mapping(tmp_path: Path) -> None:
    assert refusal(written(tmp_path, [1])).endswith(
        "must be a mapping of keys such as name, model and arms, and it is a list"
    )
    assert refusal(written(tmp_path, "words")).endswith("and it is 'words'")
    (tmp_path / "mine.yaml").write_text("# only a remark\n")
    assert refusal(tmp_path / "mine.yaml").endswith("and it is null")
