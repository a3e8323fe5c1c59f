"""One small run, every table of it counted again from another side; then runs that end in every other way."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from profiler import run as running
from profiler import verify
from profiler.errors import InputError, RuleError, StoreError
from profiler.records import FORMAT
from profiler.store import Run
from tests.profiler.gated_methods import ComputesAll, Fickle, MeanGate, OpenDiffers, named
from tests.profiler.tiny_runs import (
    ATTENTION_FLOPS,
    CONTEXT_FLOPS,
    FFN_FLOPS,
    HEAD,
    HEAD_FLOPS,
    KV_HEADS,
    LAYERS,
    contents,
    parquet_and_other_bytes,
    tiny_spec,
)
from workloads.spec import Spec

PREFILL, DECODE = "prefill-b2-l16", "decode-b3-c12-n2"
ARMS = ["dense", "again", "forced", "untrained"]
#: 0.3 × 6 = 1.8 layers, so two skip; routers start closed in the middle 9·6 // 24 = 2.
RUN_LAYERS = {"dense": 6, "again": 6, "forced": 4, "untrained": 4}


@pytest.fixture(scope="module")
def spec() -> Spec:
    return tiny_spec(trace={"steps": 2})


@pytest.fixture(scope="module")
def folder(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    found = running.run(spec, tmp_path_factory.mktemp("runs") / "whole")
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run(folder)


@pytest.fixture(scope="module")
def steps(run: Run) -> pd.DataFrame:
    return run.frame("steps")


# -- the manifest -------------------------------------------------------------------------------------


def test_the_manifest_is_complete(run: Run, spec: Spec) -> None:
    found = run.manifest
    assert (run.state, found.format, found.name, found.origin) == ("complete", FORMAT, "tiny-run", "run")
    assert (found.state_detail, found.pid, found.host) == (None, os.getpid(), os.uname().nodename)
    assert found.finished_utc is not None
    assert found.created_utc <= found.finished_utc
    assert found.spec_sha256 == spec.sha256()
    assert run.spec_yaml == spec.to_yaml()
    assert {"python", "torch", "transformers", "pyarrow"} <= found.versions.keys()
    assert "commit" in found.git
    assert {"cpu", "cores_usable", "memory_bytes", "process_started"} <= found.machine.keys()
    assert found.machine["torch_threads"] == 1
    assert found.model is not None
    assert (found.model.source, found.model.random_weights, found.model.parameters) == ("tiny", True, 312_320)
    assert [(arm.name, arm.twin, arm.synthetic is not None, arm.untrained) for arm in found.arms] == [
        ("dense", None, False, False),
        ("again", "dense", False, False),
        ("forced", "dense", True, False),
        ("untrained", "dense", False, True),
    ]
    assert [(c.name, c.done, c.repeats, c.stopped) for c in found.cells] == [
        (PREFILL, True, 4, "repeats"),
        (DECODE, True, 4, "repeats"),
    ]
    assert found.drops == {}
    assert found.contention["sentence"]
    assert "device_ns" in {u.metric for u in found.unsupported}
    assert all(u.reason for u in found.unsupported)


def test_every_rule_was_checked_for_every_arm_and_cell_and_holds(run: Run) -> None:
    rules = run.manifest.rules
    assert all(rule.passed for rule in rules)
    before = {(r.rule, r.name, r.arm) for r in rules if r.cell is None}
    names = [(6, "deterministic"), (6, "order"), (6, "company"), (6, "open equals twin")]
    assert before == {(n, name, arm) for n, name in [*names, (1, "rows executed = gates recorded")] for arm in ARMS}
    during = {(r.rule, r.arm, r.cell) for r in rules if r.cell is not None}
    assert during == {(n, arm, cell) for n in (1, 6, 14) for arm in ARMS for cell in (PREFILL, DECODE)}


def test_tables_hold_as_many_rows_as_the_manifest_counts(run: Run) -> None:
    assert run.manifest.counts == {name: len(run.frame(name)) for name in run.tables()}
    assert set(run.tables()) >= {"steps", "gates", "signals-layerroute", "rows", "segments", "kv", "kernels", "prompts"}


def test_nothing_unfinished_lies_in_the_folder(folder: Path) -> None:
    assert [path for path in folder.rglob("*") if ".tmp-" in path.name or path.name.startswith(".")] == []


# -- tables, counted from another side ----------------------------------------------------------------


def test_steps_are_as_many_as_the_spec_says_with_the_rows_and_context_of_their_cell(steps: pd.DataFrame) -> None:
    count = steps.groupby(["cell", "pass", "arm"]).size()
    for arm in ARMS:
        for cell, tokens in ((PREFILL, 1), (DECODE, 2)):
            assert count[cell, "warmup", arm] == 2 * tokens
            assert count[cell, "bare", arm] == count[cell, "instrumented", arm] == 4 * tokens
            assert count[cell, "traced", arm] == 2
    assert steps["step"].is_unique
    prefill, decode = steps[steps["cell"] == PREFILL], steps[steps["cell"] == DECODE]
    assert set(prefill["rows"]) == {2 * 16}
    assert set(prefill["context"]) == {2 * 16 * 17 // 2}
    assert set(decode["rows"]) == {3}
    assert (decode["context"] == 3 * (12 + decode["index"] + 1)).all()
    timed = steps[steps["pass"] != "traced"]
    assert (timed["wall_ns"] > 0).all()
    assert steps.loc[steps["pass"] == "traced", "wall_ns"].isna().all()
    assert steps["device_ns"].isna().all()
    assert dict(zip(steps["cell"], steps["phase"], strict=True)) == {PREFILL: "prefill", DECODE: "decode"}


def test_rows_that_ran_are_the_rows_the_gates_decided(run: Run, steps: pd.DataFrame) -> None:
    gates, rows = run.frame("gates"), run.frame("rows")
    gates["ran"] = [choices[0] == 1 for choices in gates["choices"]]
    decided = gates[gates["ran"]].groupby(["arm", "step", "layer"])["rows"].sum()
    ran = rows[(rows["site"] == "block") & (rows["choice"] == 1)].set_index(["arm", "step", "layer"])["rows"]
    pd.testing.assert_series_equal(decided.sort_index(), ran.sort_index(), check_dtype=False)
    assert (gates["ran"] == (gates["gate"] > 0.5)).groupby(gates["arm"]).all()["untrained"]
    # One decision a request, layer and recorded step: prefill 2 requests, decode 3 requests for two tokens.
    assert gates.groupby(["cell", "arm"]).size().to_dict() == {
        (cell, arm): n for cell, n in ((PREFILL, 2 * 6), (DECODE, 3 * 6 * 2)) for arm in ("forced", "untrained")
    }
    total = gates.groupby(["step", "layer"])["rows"].sum().reset_index().merge(steps[["step", "rows"]], on="step")
    assert (total["rows_x"] == total["rows_y"]).all()
    # A request's route is frozen at its prompt: the two tokens of a decode cell went the same way.
    decode = gates[gates["cell"] == DECODE].sort_values("step")
    routes = decode.groupby(["arm", "request", "layer"])["ran"].agg(["nunique", "size"])
    assert (routes["nunique"] == 1).all()
    assert (routes["size"] == 2).all()


def test_two_layers_of_six_are_skipped_by_each_request_of_both_routes(run: Run) -> None:
    gates = run.frame("gates")
    gates["skipped"] = [choices[0] == 0 for choices in gates["choices"]]
    assert set(gates.groupby(["arm", "step", "request"])["skipped"].sum()) == {2}
    untrained = gates[gates["arm"] == "untrained"].groupby("layer")["skipped"].unique().map(list).to_dict()
    assert untrained == {0: [False], 1: [False], 2: [True], 3: [True], 4: [False], 5: [False]}
    random = gates[gates["arm"] == "forced"].groupby("request")["layer"].unique()
    assert len(random) == 3  # r0000 to r0002; the first two are in both cells
    routes = gates[(gates["arm"] == "forced") & gates["skipped"]].groupby("request")["layer"].apply(frozenset)
    assert routes.nunique() > 1


def flops(run: Run, cell: str, arm: str) -> int:
    """Executed FLOPs of the recorded steps, from the rows that entered and the choices' costs in the manifest."""
    rows = run.frame("rows")
    rows = rows[(rows["cell"] == cell) & (rows["arm"] == arm)]
    costs = {(c.layer, c.site, c.index): c for c in run.manifest.arm(arm).choices}
    total = 0
    for row in rows.itertuples():
        cost = costs[row.layer, row.site, row.choice]
        total += row.rows * cost.flops_per_row + row.context * cost.flops_per_context
    return int(total)


@pytest.mark.parametrize("arm", ARMS)
def test_executed_flops_are_those_worked_out_by_hand(run: Run, arm: str) -> None:
    layers = RUN_LAYERS[arm]
    a_row = layers * (ATTENTION_FLOPS + FFN_FLOPS)
    routers = 0 if arm in ("dense", "again") else LAYERS * 2 * 64  # one row a request, layer and forward
    # Prefill: 2 requests of 16 tokens; the logits of the last token only.
    context = 2 * sum(range(1, 17))
    expected = 32 * a_row + layers * context * CONTEXT_FLOPS + 2 * HEAD_FLOPS + 2 * routers
    assert flops(run, PREFILL, arm) == expected
    # Decode: 3 requests, two tokens, after 12 in the cache; no router decides again (METHODS: frozen).
    context = 3 * (13 + 14)
    assert flops(run, DECODE, arm) == 6 * a_row + layers * context * CONTEXT_FLOPS + 6 * HEAD_FLOPS


def test_choices_add_up_to_the_model(run: Run) -> None:
    for arm in run.manifest.arms:
        most: dict[tuple[int, str], int] = {}
        for choice in arm.choices:
            place = (choice.layer, choice.site)
            most[place] = max(most.get(place, 0), choice.backbone_parameters)
        assert sum(most.values()) == 312_320


def test_cache_bytes_are_those_of_the_layers_that_ran(run: Run, steps: pd.DataFrame) -> None:
    kv = run.frame("kv").merge(steps[["step", "index"]], on="step")
    a_token = 2 * KV_HEADS * HEAD * 4
    for row in kv.itertuples():
        tokens = 2 * 16 if row.cell == PREFILL else 3 * (12 + row.index + 1)
        assert row.live_bytes == row.allocated_bytes == tokens * a_token * RUN_LAYERS[row.arm]


def test_segments_are_self_time_within_their_step(run: Run, steps: pd.DataFrame) -> None:
    segments = run.frame("segments")
    watched = steps[steps["pass"] == "instrumented"].set_index("step")["wall_ns"]
    spent = segments.groupby("step")["ns"].sum()
    assert set(spent.index) == set(watched.index)
    assert (spent <= watched.reindex(spent.index)).all()
    assert (segments["ns"] >= 0).all()
    names = segments.groupby("arm")["segment"].agg(set).to_dict()
    dense = {"embedding", "attention", "ffn", "norm", "head"}
    assert names == {
        "dense": dense,
        "again": dense,
        "forced": dense | {"router", "dispatch"},
        "untrained": dense | {"router"},
    }
    ran = segments[(segments["segment"] == "ffn")].groupby("arm")["layer"].nunique()
    assert (ran["dense"], ran["untrained"]) == (6, 4)


def test_kernels_belong_to_traced_steps_and_layers(run: Run, steps: pd.DataFrame) -> None:
    kernels = run.frame("kernels")
    traced = steps[steps["pass"] == "traced"]
    assert set(kernels["step"]) == set(traced["step"])
    assert (kernels["dur_ns"] >= 0).all()
    named_arm = kernels.merge(traced[["step", "arm", "cell"]], on="step")
    assert (named_arm["arm_x"] == named_arm["arm_y"]).all()
    assert (named_arm["cell_x"] == named_arm["cell_y"]).all()
    products = kernels[(kernels["segment"] == "ffn") & kernels["name"].isin(["aten::mm", "aten::addmm"])]
    per_step = products.groupby(["arm", "cell", "step"]).size()
    for (arm, cell, _), count in per_step.items():
        if arm != "forced" or cell != DECODE:  # there a request may run a layer its neighbours skip
            runs_alone = arm != "forced"
            assert count == 3 * RUN_LAYERS[arm] if runs_alone else count >= 3 * RUN_LAYERS[arm]
    assert len(list((run.path / "traces").glob("*.pt.trace.json.gz"))) == 2 * len(ARMS)


def test_prompts_are_of_their_cells_length_in_turn_of_the_domains(run: Run) -> None:
    prompts = run.frame("prompts").set_index(["cell", "request"]).sort_index()
    assert prompts["tokens"].groupby("cell").agg(set).to_dict() == {PREFILL: {16}, DECODE: {12}}
    assert list(prompts.loc[DECODE, "domain"]) == ["math", "code", "tool_call"]
    assert prompts["text"].str.len().gt(0).all()


def test_telemetry_has_units_and_the_process(run: Run) -> None:
    telemetry = run.frame("telemetry")
    assert {("cpu", "% of one core"), ("rss", "bytes")} <= {*zip(telemetry["metric"], telemetry["unit"], strict=True)}
    assert telemetry.loc[telemetry["metric"] == "rss", "value"].between(5e7, 1e11).all()


def test_an_arm_beside_itself_does_the_same_work(run: Run, steps: pd.DataFrame) -> None:
    rows = run.frame("rows").merge(steps[["step", "index"]], on="step")
    key = ["cell", "index", "layer", "site", "choice", "rows", "padded", "context", "context_full"]
    one, other = (rows.loc[rows["arm"] == arm, key].sort_values(key).to_numpy() for arm in ("dense", "again"))
    assert np.array_equal(one, other)


# -- how it is asked for ------------------------------------------------------------------------------


def one_cell(**more: Any) -> Spec:
    """The least that is a run: dense beside an untrained router, one prefill cell."""
    arms = [{"name": "dense", "method": "dense"}, {"name": "mine", "method": "layerroute"}]
    measure = {"warmup": 0, "max_repeats": 2, "min_repeats": 2, "budget_s": 60, "threads": 1}
    return tiny_spec(**{"arms": arms, "cells": {"prefill": {"batch": [2], "length": [8]}}, "measure": measure, **more})


def test_a_run_without_out_has_a_folder_of_its_own_name_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = running.default_folder("x")
    assert first.parent == Path("runs")
    assert first.name.startswith("x-2")
    first.mkdir(parents=True)
    taken = {first}
    for _ in range(3):  # in the same second or not, never one that is taken
        following = running.default_folder("x")
        assert following not in taken
        following.mkdir()
        taken.add(following)


def test_a_taken_folder_is_refused_before_a_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.models, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    before = contents(folder)
    with pytest.raises(InputError, match="must be new or empty, and it holds a run"):
        running.run(one_cell(), folder)
    with pytest.raises(InputError, match="--resume needs --out"):
        running.run(one_cell(), None, resume=True)
    assert contents(folder) == before


def test_resuming_a_complete_run_or_with_another_spec_changes_nothing(folder: Path, spec: Spec) -> None:
    before = contents(folder)
    with pytest.raises(InputError, match="the run is complete"):
        running.run(spec, folder, resume=True)
    with pytest.raises(InputError, match="a run has one spec"):
        running.run(one_cell(), folder, resume=True)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"source": "tinny"}}, "Nearest name: tiny"),
        (
            {"arms": [{"name": "dense", "method": "dense"}, {"name": "x", "method": "lairroute"}]},
            "method 'lairroute' is not known",
        ),
        (
            {"arms": [{"name": "dense", "method": "dense"}, {"name": "x", "method": "layerroute", "gatez": "open"}]},
            r"arms\.x\.gatez: .*did you mean 'gates'",
        ),
        ({"cells": {"prefill": {"batch": [1], "length": [4096]}}}, "reaches position 4,096"),
        ({"prompts": {"source": "/nowhere/p.jsonl"}}, "/nowhere/p.jsonl"),
    ],
)
def test_what_the_user_can_put_right_is_said_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        running.run(one_cell(**change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_text_no_prompt_is_anywhere_in_the_folder(tmp_path: Path, run: Run) -> None:
    kept = run.frame("prompts")["text"].iloc[0]
    assert kept.encode() in parquet_and_other_bytes(run.path)  # so that the search is known to find it
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "xylophone quartz xylophone quartz"}) + "\n")
    asked = one_cell(prompts={"source": str(tmp_path / "p.jsonl")}, privacy={"keep_text": False}, trace={"steps": 1})
    folder = running.run(asked, tmp_path / "run")
    assert b"xylophon" not in parquet_and_other_bytes(folder)
    assert Run(folder).manifest.keeps_text is False


# -- runs that end otherwise --------------------------------------------------------------------------


def broken(folder: Path, spec: Spec, error: type[BaseException], sentence: str) -> Run:
    with pytest.raises(error, match=sentence):
        running.run(spec, folder)
    return Run(folder)


def with_method(name: str) -> dict[str, Any]:
    return {"arms": [{"name": "dense", "method": "dense"}, {"name": "mine", "method": name}]}


def test_a_method_that_is_not_its_twin_when_open_fails_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = one_cell(**with_method(named(OpenDiffers, monkeypatch)))
    run = broken(
        tmp_path / "run", spec, RuleError, r"rule 6 \(open equals twin\) does not hold for mine: .*allowed 1e-03"
    )
    assert run.state == "failed"
    assert "RuleError: rule 6 (open equals twin) does not hold for mine" in str(run.manifest.state_detail)
    assert "steps" not in run.tables()
    assert [rule.name for rule in run.manifest.rules if not rule.passed] == ["open equals twin"]


class EveryOther(ComputesAll):
    """Computes all, and says that every other request was skipped."""

    def logits(self, layer: int, mean_Sd: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(mean_Sd)) % 2 == 0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (EveryOther, r"rule 1 .* for mine prefill-b4-l8: layer 0 block run: 32 rows entered, decisions say 16"),
        (Fickle, r"rule 6 \(repeats decide alike\) does not hold for mine prefill-b4-l8: \d of 2 instrumented steps"),
    ],
)
def test_a_rule_that_breaks_while_measuring_fails_the_run_and_keeps_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, sentence: str
) -> None:
    monkeypatch.setattr(verify, "verify", lambda *a: [])
    cells = {"prefill": {"batch": [4], "length": [8, 9]}}
    spec = one_cell(**with_method(named(method, monkeypatch)), cells=cells)
    run = broken(tmp_path / "run", spec, RuleError, sentence)
    assert (run.state, [cell.done for cell in run.manifest.cells]) == ("failed", [False, False])
    assert set(run.frame("steps")["cell"]) == {"prefill-b4-l8"}
    assert [rule.passed for rule in run.manifest.rules].count(False) == 1


def test_a_users_own_right_method_runs_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = named(MeanGate, monkeypatch)
    run = Run(running.run(one_cell(**with_method(name)), tmp_path / "run"))
    assert run.state == "complete"
    assert run.manifest.arm("mine").method == name
    assert set(run.frame(f"signals-{name}")["layer"]) == set(range(6))


class At(running.Quiet):
    """Does something once the run has come so far."""

    def __init__(self, share: float, act: Any) -> None:
        self.share, self.act = share, act

    def at(self, share: float) -> None:
        if share >= self.share and self.act is not None:
            act, self.act = self.act, None
            act()


TWO_CELLS = {"prefill": {"batch": [1, 2], "length": [8]}}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_folder_as_interrupted_and_keeps_what_was_done(tmp_path: Path, number: int) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        running.run(one_cell(cells=TWO_CELLS), tmp_path / "r", progress=At(0.75, lambda: os.kill(os.getpid(), number)))
    assert signal.getsignal(signal.SIGTERM) is handler
    run = Run(tmp_path / "r")
    assert run.state == "interrupted"
    assert str(run.manifest.state_detail).startswith("stopped by the user")
    assert [cell.done for cell in run.manifest.cells] == [True, False]
    assert run.manifest.finished_utc is not None
    assert run.manifest.contention["sentence"]
    assert run.manifest.unsupported
    steps = run.frame("steps")
    assert {cell: len(f) for cell, f in steps.groupby("cell")} == {"prefill-b1-l8": 8, "prefill-b2-l8": 4}
    assert "signals-layerroute" in run.tables()


def decisions(run: Run) -> list[tuple[Any, ...]]:
    gates = run.frame("gates").sort_values(["cell", "arm", "step", "layer", "request"])
    gates["choices"] = [tuple(choices) for choices in gates["choices"]]
    columns = ["cell", "arm", "step", "phase", "request", "position", "layer", "site", "choices", "gate", "rows"]
    return list(gates[columns].itertuples(index=False, name=None))


def test_a_resumed_run_keeps_its_done_cells_and_decides_as_an_uninterrupted_one(tmp_path: Path) -> None:
    spec = one_cell(cells=TWO_CELLS)
    with pytest.raises(KeyboardInterrupt):
        running.run(spec, tmp_path / "r", progress=At(0.75, lambda: os.kill(os.getpid(), signal.SIGINT)))
    before = {name: data for name, data in contents(tmp_path / "r").items() if "prefill-b1-l8" in name}
    assert len(before) == 7  # a part of every table but telemetry and kernels
    running.run(spec, tmp_path / "r", resume=True)
    run = Run(tmp_path / "r")
    assert run.state == "complete"
    assert len(run.manifest.resumed_utc) == 1
    assert {name: contents(tmp_path / "r")[name] for name in before} == before
    assert run.manifest.counts == {name: len(run.frame(name)) for name in run.tables()}
    assert "Before it was resumed" in run.manifest.contention["sentence"]
    whole = Run(running.run(spec, tmp_path / "whole"))
    assert decisions(run) == decisions(whole)
    steps, theirs = run.frame("steps"), whole.frame("steps")
    assert sorted(steps["step"]) == sorted(theirs["step"])
    checked, theirs_too = ({(r.rule, r.name, r.arm, r.cell) for r in each.manifest.rules} for each in (run, whole))
    assert checked == theirs_too


def test_a_disk_that_fills_up_fails_the_run_with_the_reason_and_keeps_done_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill() -> None:
        monkeypatch.setattr(pq, "write_table", full)

    with pytest.raises(StoreError, match="No space left on device"):
        running.run(one_cell(cells=TWO_CELLS), tmp_path / "r", progress=At(0.75, fill))
    run = Run(tmp_path / "r")
    assert (run.state, [cell.done for cell in run.manifest.cells]) == ("failed", [True, False])
    assert "No space left on device" in str(run.manifest.state_detail)
    assert set(run.frame("steps")["cell"]) == {"prefill-b1-l8"}
    monkeypatch.undo()
    running.run(one_cell(cells=TWO_CELLS), tmp_path / "r", resume=True)
    assert Run(tmp_path / "r").state == "complete"


def test_an_error_of_ours_is_in_the_manifest_and_goes_on(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        running.run(one_cell(), tmp_path / "r", progress=At(0.5, fail))
    assert (Run(tmp_path / "r").state, Run(tmp_path / "r").manifest.state_detail) == (
        "failed",
        "ZeroDivisionError: ours",
    )


def test_progress_goes_from_stage_to_stage_and_never_back(tmp_path: Path) -> None:
    said: list[str] = []
    shares: list[float] = []

    class Told:
        def say(self, what: str) -> None:
            said.append(what)

        def at(self, share: float) -> None:
            shares.append(share)

    running.run(one_cell(cells=TWO_CELLS, trace={"steps": 1}), tmp_path / "r", progress=Told())
    assert said[0] == "loading tiny"
    assert [s for s in said if s.startswith("prefill")] == [
        "prefill-b1-l8",
        "prefill-b1-l8: tracing",
        "prefill-b2-l8",
        "prefill-b2-l8: tracing",
    ]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_traces_are_removed_where_only_the_table_is_wanted(tmp_path: Path) -> None:
    run = Run(running.run(one_cell(trace={"steps": 1, "keep": False}), tmp_path / "r"))
    assert len(run.frame("kernels")) > 0
    assert list(run.path.rglob("*.gz")) == []
