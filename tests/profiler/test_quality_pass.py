"""The quality pass inside a run: its tables, its rules, resuming, privacy; and `evaluate`, which is that pass alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from profiler import quality_pass
from profiler import run as running
from profiler.cli import app
from profiler.errors import InputError, RuleError
from profiler.evaluate import evaluate
from profiler.quality import Item, Mode, Scored
from profiler.store import Run
from workloads.loading import load

ITEMS = [
    {"id": "m0", "domain": "math", "prompt": "2 + 2 =", "reference": "4"},
    {"id": "m1", "domain": "math", "prompt": "What is 17 times 3?", "reference": "51, since 17 * 3 = 51"},
    {"id": "p0", "domain": "prose", "prompt": "A lighthouse on a foggy morning."},
]
#: Bytes of "\n4", of "\n51, since 17 * 3 = 51", and of the second half of 32.
TOKENS = [2, 22, 16]
PREFIX_TOKENS = [7, 19, 16]
ARMS = ["dense", "open", "routed", "cut"]


def spec(folder: Path, **changes: Any) -> Any:
    path = folder / "spec.json"
    items = folder / "items.jsonl"
    items.write_text("\n".join(json.dumps(row) for row in ITEMS))
    data = {
        "name": "q",
        "model": {"source": "tiny", "device": "cpu"},
        "arms": [
            {"name": "dense", "method": "dense"},
            {"name": "open", "method": "layerroute", "gates": "open"},
            {"name": "routed", "method": "layerroute"},
            {"name": "cut", "method": "static_depth", "layers": [1, 2]},
        ],
        "cells": {"prefill": {"batch": [1], "length": [8]}},
        "measure": {"warmup": 0, "max_repeats": 1, "threads": 1},
        "quality": {"source": "items.jsonl"},
        **changes,
    }
    path.write_text(json.dumps(data))
    return load(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a cell and both modes of the quality pass."""
    folder = tmp_path_factory.mktemp("quality")
    made = spec(folder, quality={"source": "items.jsonl", "modes": ["prefix", "whole"]})
    return Run(running.run(made, folder / "run"))


def scores(run: Run, arm: str, mode: str = "gated on prefix") -> pd.DataFrame:
    frame = run.frame("scores")
    return frame[(frame["arm"] == arm) & (frame["mode"] == mode)].reset_index(drop=True)


def test_every_arm_scores_the_same_tokens(whole: Run) -> None:
    assert whole.state == "complete"
    quality = whole.manifest.quality
    assert quality is not None
    assert (quality.items, quality.tokens, quality.done) == (3, sum(TOKENS), True)
    assert quality.modes == ["gated on prefix", "whole sequence (leaks)"]
    for arm in ARMS:
        for mode in quality.modes:
            found = scores(whole, arm, mode)
            assert found["item"].tolist() == ["m0", "m1", "p0"]
            assert found["domain"].tolist() == ["math", "math", "prose"]
            assert found["tokens"].tolist() == TOKENS
            assert found["prefix_tokens"].tolist() == PREFIX_TOKENS
            assert set(found["task"]) == {"perplexity"}


def test_every_scored_token_stands_at_the_row_that_predicts_it(whole: Run) -> None:
    frame = whole.frame("token_scores")
    found = frame[(frame["arm"] == "routed") & (frame["cell"] == "quality")]
    # "2 + 2 =" is at 0 to 6, and its last row predicts the line break, which predicts the "4".
    assert found.loc[found["request"] == "m0", "position"].tolist() == [6, 7]
    assert found.loc[found["request"] == "p0", "position"].tolist() == list(range(15, 31))
    assert found.groupby("request", sort=False)["reference"].first().to_dict() == {"m0": True, "m1": True, "p0": False}
    sums = found.astype({"nll": float}).groupby("request", sort=False)["nll"].sum().tolist()
    assert sums == pytest.approx(scores(whole, "routed")["nll"].tolist(), rel=1e-6)
    # The likeliest token has more than the mean chance of the 259, and one at better than even odds is the likeliest.
    assert (found.loc[found["hit"], "nll"] < math.log(259)).all()
    assert found.loc[found["nll"] < math.log(2), "hit"].all()


def test_tokens_are_counted_over_all_inputs(whole: Run) -> None:
    frame = whole.frame("tokens")
    found = frame[(frame["cell"] == "quality") & (frame["request"] == "m0")]
    text = b"2 + 2 =\n4"
    assert found["position"].tolist() == list(range(9))
    everything = b"".join(
        (item["prompt"] + ("\n" + item["reference"] if "reference" in item else "")).encode() for item in ITEMS
    )
    assert found["occurrences"].tolist() == [everything.count(bytes([letter])) for letter in text]
    assert len(frame) == 2 * len(everything)


def test_arms_that_must_agree_do_and_those_that_skip_differ(whole: Run) -> None:
    dense = scores(whole, "dense")["nll"]
    assert scores(whole, "open")["nll"].tolist() == pytest.approx(dense.tolist(), rel=1e-5)
    assert scores(whole, "dense", "whole sequence (leaks)")["nll"].tolist() == pytest.approx(dense.tolist(), rel=1e-5)
    # Routers as training starts them skip the middle blocks of tiny's six, 2 and 3; `cut` skips 1 and 2.
    assert scores(whole, "routed")["nll"].tolist() != pytest.approx(dense.tolist(), rel=1e-4)
    assert scores(whole, "cut")["nll"].tolist() != pytest.approx(scores(whole, "routed")["nll"].tolist(), rel=1e-4)


def test_the_table_of_figures_is_the_scores_summed(whole: Run) -> None:
    table = whole.frame("quality").set_index(["arm", "mode", "domain"])
    assert len(table) == 4 * 2 * 3
    assert set(table["metric"]) == {"perplexity"}
    nll = scores(whole, "cut")["nll"].tolist()
    for domain, chosen in (("all", [0, 1, 2]), ("math", [0, 1]), ("prose", [2])):
        row = table.loc[("cut", "gated on prefix", domain)]
        tokens = sum(TOKENS[i] for i in chosen)
        assert row["denominator"] == tokens
        assert row["value"] == pytest.approx(math.exp(sum(nll[i] for i in chosen) / tokens))


def test_decisions_about_every_item_are_recorded_for_prompt_and_continuation(whole: Run) -> None:
    gates = whole.frame("gates")
    found = gates[(gates["cell"] == "quality") & (gates["arm"] == "routed")]
    assert len(found) == 3 * 2 * 6
    ran = {(r.request, r.phase, r.layer): int(r.choices[0]) for r in found.itertuples()}
    assert ran == {
        (item, phase, layer): int(layer not in (2, 3))
        for item in ("m0", "m1", "p0")
        for phase in ("prefill", "mixed")
        for layer in range(6)
    }
    rows = found[found["layer"] == 0].pivot(index="request", columns="phase", values="rows")
    assert rows.loc["m1"].to_dict() == {"prefill": 19, "mixed": 22}
    assert set(gates.loc[gates["cell"] == "quality-whole", "phase"]) == {"prefill"}
    signals = whole.frame("signals-layerroute")
    logits = signals[(signals["cell"] == "quality") & (signals["arm"] == "routed")]
    assert set(zip(logits["layer"], logits["logit"], strict=True)) == {
        (i, -1.0 if i in (2, 3) else 1.0) for i in range(6)
    }
    assert whole.manifest.arm("routed").signal_starts == {"logit": [1.0, 1.0, -1.0, -1.0, 1.0, 1.0]}
    assert whole.manifest.arm("cut").signal_starts == {}


def test_choices_are_scored_unrecorded_and_counted_by_domain(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "domain": "math", "prompt": "2 + 2?", "reference": "4", "choices": ["4", "5", "17"]},
        {"id": "b", "domain": "math", "prompt": "3 + 3?", "reference": "6", "choices": ["1", "6"]},
        {"id": "c", "domain": "code", "prompt": "print", "reference": "(1)", "choices": ["(1)", "[2]"]},
        {"id": "d", "domain": "code", "prompt": "no choice here"},
    ]
    made = spec(tmp_path, quality={"source": "items.jsonl", "tasks": ["perplexity", "multiple_choice"]})
    (tmp_path / "items.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run = Run(running.run(made, tmp_path / "run"))
    assert len(run.frame("steps").query("cell == 'quality'")) == 2 * 4 * len(ARMS)  # those of the references alone
    scored = run.frame("choice_scores")
    assert scored.groupby("arm").size().to_dict() == dict.fromkeys(ARMS, 3 + 2 + 2)
    references = scored[scored["right"]].set_index(["arm", "item"])["nll"]
    of_pass = run.frame("scores").set_index(["arm", "item"])["nll"].drop("d", level="item")
    pd.testing.assert_series_equal(references.sort_index(), of_pass.sort_index(), rtol=1e-5)
    figures = run.frame("quality").query("task == 'multiple_choice'").set_index(["arm", "domain"])
    assert figures.loc["dense", "denominator"].to_dict() == {"all": 3, "math": 2, "code": 1}
    for arm in ARMS:
        hits = {}
        for name, of_item in scored[scored["arm"] == arm].groupby("item"):
            best = (of_item["nll"] / of_item["tokens"]).idxmin()
            hits[name] = bool(of_item.loc[best, "right"])
        assert figures.loc[(arm, "all"), "value"] == pytest.approx(sum(hits.values()) / 3)
        assert figures.loc[(arm, "code"), "value"] == hits["c"]


def test_steps_are_unique_and_their_gates_belong_to_them(whole: Run) -> None:
    steps = whole.frame("steps")
    assert steps["step"].is_unique
    held_out = steps[steps["pass"] == "quality"]
    assert held_out.groupby("cell").size().to_dict() == {"quality": 4 * 3 * 2, "quality-whole": 4 * 3}
    gates = whole.frame("gates")
    gates = gates[gates["cell"].str.startswith("quality")]
    assert set(gates["step"]) <= set(held_out["step"])
    both = gates.merge(held_out[["step", "arm"]], on="step")
    assert (both["arm_x"] == both["arm_y"]).all()


def test_prompts_of_the_pass_say_what_gates_saw(whole: Run) -> None:
    prompts = whole.frame("prompts").set_index(["cell", "request"])
    assert prompts.loc["quality", "tokens"].to_dict() == dict(zip(["m0", "m1", "p0"], PREFIX_TOKENS, strict=True))
    # The byte tokenizer's ids are bytes.
    assert prompts.loc[("quality", "m0"), "mean_token_rank"] == pytest.approx(sum(b"2 + 2 =") / 7)
    assert prompts.loc[("quality", "p0"), "mean_token_rank"] == pytest.approx(sum(b"A lighthouse on ") / 16)
    assert prompts.loc[("quality", "p0"), "text"] == "A lighthouse on a foggy morning."
    cell = prompts.loc["prefill-b1-l8"].iloc[0]
    assert cell["mean_token_rank"] == pytest.approx(sum(cell["text"].encode()[:8]) / 8)


def test_the_pass_checks_its_own_rules(whole: Run) -> None:
    rules = [r for r in whole.manifest.rules if r.cell in ("quality", "quality-whole")]
    assert all(rule.rule == 1 and rule.passed for rule in rules)
    counted = {(r.name, r.cell): sum(s.name == r.name and s.cell == r.cell for s in rules) for r in rules}
    assert counted == {
        ("rows executed = gates recorded", "quality"): 4,
        ("gates frozen before what is scored", "quality"): 3,  # dense decides nothing
        ("rows executed = gates recorded", "quality-whole"): 4,
    }


def test_gates_that_see_what_is_scored_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(handle: Any, item: Item, mode: Mode) -> Scored:
        """Prompt and whole text, each deciding for itself."""
        with torch.no_grad():
            for ids in (item.prefix, (*item.prefix, *item.continuation)):
                handle.model(input_ids=torch.tensor([ids]), use_cache=False)
                for router in getattr(handle, "routers", []):
                    router.bias.neg_()  # stands for a text that tells routers something else
        return scored(item, 1.0)

    monkeypatch.setattr(quality_pass, "score", leaking)
    with pytest.raises(RuleError, match="gates frozen before what is scored"):
        running.run(spec(tmp_path, arms=_routed_only()), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.state == "failed"
    assert run.manifest.quality is not None
    assert not run.manifest.quality.done


def scored(item: Item, nll: float) -> Scored:
    """Every token of an item found as likely as that."""
    tokens = len(item.continuation)
    return Scored(np.full(tokens, nll), np.zeros(tokens, dtype=bool))


def _routed_only() -> list[dict[str, Any]]:
    return [{"name": "dense", "method": "dense"}, {"name": "routed", "method": "layerroute"}]


def test_logits_that_are_not_finite_are_no_perplexity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_pass, "score", lambda handle, item, mode: scored(item, math.nan))
    with pytest.raises(InputError, match="arm 'dense' gives item 'm0' a log-likelihood of nan"):
        running.run(spec(tmp_path, arms=_routed_only()), tmp_path / "run")


def test_an_interrupted_pass_is_begun_anew_and_a_finished_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spec(tmp_path, arms=_routed_only())
    real, calls = quality_pass.score, []

    def interrupted(handle: Any, item: Item, mode: Mode) -> Scored:
        calls.append(item.id)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(handle, item, mode)

    monkeypatch.setattr(quality_pass, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.run(made, tmp_path / "run")
    before = Run(tmp_path / "run")
    assert (before.state, len(before.frame("scores"))) == ("interrupted", 3)
    assert before.manifest.cells[0].done
    running.run(made, tmp_path / "run", resume=True)
    after = Run(tmp_path / "run")
    assert after.state == "complete"
    assert len(calls) == 5 + 6
    scored = after.frame("scores").groupby("arm")["item"].apply(list).to_dict()
    assert scored == {"dense": ["m0", "m1", "p0"], "routed": ["m0", "m1", "p0"]}
    assert after.frame("steps")["step"].is_unique
    assert after.manifest.counts["scores"] == 6
    assert len(after.frame("gates").query("cell == 'quality'")) == 3 * 2 * 6


def test_no_text_is_written_where_the_spec_keeps_none(tmp_path: Path) -> None:
    made = spec(tmp_path, arms=_routed_only()[:1], privacy={"keep_text": False})
    prompts = Run(running.run(made, tmp_path / "run")).frame("prompts")
    assert prompts["text"].isna().all()
    tokens = Run(tmp_path / "run").frame("tokens")
    assert len(tokens) == sum(TOKENS) + sum(PREFIX_TOKENS)
    assert tokens[["token", "occurrences"]].isna().all(axis=None)
    assert prompts["mean_token_rank"].notna().all()


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluating_a_run_writes_a_new_one_beside_it_and_leaves_it_alone(whole: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")}
    folder = evaluate(str(whole.path), ["quality.domains=[math]", "quality.modes=[prefix]"], None)
    assert {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")} == before
    assert folder.parent == whole.path.parent
    assert folder.name.startswith("run-quality-")
    found = Run(folder)
    assert (found.state, found.manifest.cells) == ("complete", [])
    assert found.manifest.evaluates == f"q, {whole.manifest.created_utc}"
    written = {
        "gates",
        "kv",
        "prompts",
        "quality",
        "rows",
        "scores",
        "signals-layerroute",
        "steps",
        "token_scores",
        "tokens",
    }
    assert set(found.tables()) - {"telemetry"} == written
    for arm in ARMS:
        assert scores(found, arm)["nll"].tolist() == scores(whole, arm)["nll"].tolist()[:2]
    assert any(rule.rule == 6 for rule in found.manifest.rules)


def test_evaluating_a_spec_takes_the_sections_defaults_where_it_has_none(tmp_path: Path) -> None:
    spec(tmp_path, quality=None, arms=_routed_only()[:1])
    folder = evaluate(str(tmp_path / "spec.json"), [], tmp_path / "out")
    found = Run(folder)
    assert (folder, found.manifest.evaluates) == (tmp_path / "out", None)
    assert found.manifest.quality is not None
    assert found.manifest.quality.items == 32
    assert "count: 32" in (found.spec_yaml or "")


def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(whole: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="evaluate layerroute-seeds-tiny: its checkpoints are trained first"):
        evaluate("layerroute-seeds-tiny", [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="the model's dtype was 'float32' in that run and is 'float64' now"):
        evaluate(str(whole.path), ["model.dtype=float64"], tmp_path / "out")
    with pytest.raises(InputError, match="holds a run"):
        evaluate(str(whole.path), [], whole.path)
    (whole.path / "spec.yaml").rename(tmp_path / "spec.yaml")
    try:
        with pytest.raises(InputError, match=r"has no spec.yaml to take up again"):
            evaluate(str(whole.path), [], tmp_path / "out")
    finally:
        (tmp_path / "spec.yaml").rename(whole.path / "spec.yaml")
    assert not (tmp_path / "out").exists()


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_json_object_with_the_figures(tmp_path: Path) -> None:
    spec(tmp_path, arms=_routed_only())
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["run"] == str(tmp_path / "out")
    (dense,) = [line for line in printed["held_out"]["perplexity"] if (line["arm"], line["domain"]) == ("dense", "all")]
    assert dense["tokens"] == sum(TOKENS)
    nll = scores(Run(tmp_path / "out"), "dense")["nll"].sum()
    assert dense["perplexity"] == pytest.approx(math.exp(nll / sum(TOKENS)))
    assert "Held-out perplexity" in done.stderr


def test_validate_looks_for_the_held_out_text_too(tmp_path: Path) -> None:
    spec(tmp_path)
    (tmp_path / "items.jsonl").unlink()
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "spec.json")])
    assert done.exit_code == 2
    assert "quality.source: " in done.stderr
