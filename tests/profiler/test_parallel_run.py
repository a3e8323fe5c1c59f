"""Runs of three real processes: the tables add up, the outputs are one process's, and a lost rank is named in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.balance_report import balances
from analysis.latency import step_samples
from profiler.errors import InputError
from profiler.run import run, said_by_ranks
from profiler.store import Run
from profiler.tracing import SUFFIX
from tests.profiler import rank_runs
from tests.profiler.rank_processes import forking, free_ports
from tests.profiler.rank_runs import RANKS, TIMEOUT_S, spec

#: Hidden size and item size of the tiny preset, and widths of the experts of `spec`.
D, ITEM, WIDTHS = 64, 4, [8] * 3 + [16] * 3 + [24] * 3 + [32] * 3
MODES = ("replicated", "data_parallel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the four processes have done their part."""
    into, ports = tmp_path_factory.mktemp("ranks"), free_ports(4)
    context = forking()
    processes = [context.Process(target=rank_runs.main, args=(number, ports, str(into))) for number in range(4)]
    for process in processes:
        process.start()
    for process in (processes[0], processes[1], processes[3]):
        process.join(240)
    stopped = processes[2]
    assert stopped.is_alive()
    os.kill(stopped.pid or 0, signal.SIGKILL)
    stopped.join(10)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    return into


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same spec in this process."""
    return Run(run(spec(), tmp_path_factory.mktemp("alone") / "run"))


def _said(folder: Path, process: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{process}.json").read_text())
    return found


def _decisions(run: Run) -> list[tuple[Any, ...]]:
    gates = run.frame("gates")
    first = gates.groupby(["cell", "arm"])["step"].rank("dense").astype(int)
    rows = zip(gates["cell"], first, gates["layer"], gates["request"], gates["position"], gates["choices"], strict=True)
    return sorted((cell, step, layer, request, at, tuple(sorted(c))) for cell, step, layer, request, at, c in rows)


def _totals(run: Run, table: str, columns: list[str], values: list[str]) -> pd.DataFrame:
    """Sums over ranks; steps counted from the first of each (cell, arm)."""
    frame = run.frame(table)
    frame["nth"] = frame.groupby(["cell", "arm"])["step"].rank("dense")
    return frame.groupby(["cell", "arm", "nth", *columns], as_index=False)[values].sum()


@pytest.mark.parametrize("attention", MODES)
def test_it_is_complete_and_says_what_one_process_says(folder: Path, alone: Run, attention: str) -> None:
    found = Run(folder / attention)
    assert found.state == "complete"
    assert found.mismatches == []
    assert all(rule.passed for rule in found.manifest.rules)
    assert [record.rank for record in found.manifest.ranks] == [0, 1, 2]
    assert [record.threads for record in found.manifest.ranks] == [1, 1, 1]
    assert found.manifest.contention["ranks"] == 3
    for mine, theirs in zip(found.manifest.cells, alone.manifest.cells, strict=True):
        assert mine.outputs == theirs.outputs != {}
        assert mine.stopped == "repeats"
    assert _decisions(found) == _decisions(alone)


@pytest.mark.parametrize("attention", MODES)
def test_rows_and_loads_added_up_over_ranks_are_those_of_one_process(folder: Path, alone: Run, attention: str) -> None:
    found = Run(folder / attention)
    values = ["rows", "padded", "context"]
    for table, columns, of in (
        ("rows", ["layer", "site", "choice"], values),
        ("loads", ["layer", "group", "expert"], ["tokens", "flops"]),
    ):
        pd.testing.assert_frame_equal(_totals(found, table, columns, of), _totals(alone, table, columns, of))
    samples, wanted = step_samples(found), step_samples(alone)
    assert set(samples["rows"]) == set(wanted["rows"]) == {5 * 8, 3}
    timed = samples[samples["pass"] != "traced"]
    assert len(timed) == len(wanted)  # a step is one, whatever the number of ranks
    steps = found.frame("steps")
    slowest = steps[steps["pass"] == "bare"].groupby("step")["wall_ns"].max()
    assert timed[timed["pass"] == "bare"].set_index("step")["wall_ns"].to_dict() == slowest.to_dict()
    loads = found.frame("loads")
    assert (loads["group"] == loads["expert"] // 3).all()
    assert (
        loads["flops"] == [6 * D * WIDTHS[e] * n for e, n in zip(loads["expert"], loads["tokens"], strict=True)]
    ).all()
    # all_size: the i-th of every group on rank i.
    assert (loads["rank"] == loads["expert"] % 3).all()


@pytest.mark.parametrize("attention", MODES)
def test_dispatch_says_who_sent_how_much_to_whom(folder: Path, attention: str) -> None:
    found = Run(folder / attention)
    sent, loads = found.frame("dispatch"), found.frame("loads")
    assert (sent["rank"] == sent["source"]).all()
    assert (sent["bytes"] == sent["tokens"] * D * ITEM).all()
    assert set(zip(sent["source"], sent["destination"], strict=True)) == {(a, b) for a in range(3) for b in range(3)}
    key = ["arm", "step", "layer"]
    out = sent[sent["direction"] == "dispatch"]
    arrived = out.groupby([*key, "destination"])["tokens"].sum()
    computed = loads.groupby([*key, "rank"])["tokens"].sum()
    computed.index.names = arrived.index.names
    pd.testing.assert_series_equal(arrived[arrived > 0], computed)
    back = sent[sent["direction"] == "combine"].rename(columns={"source": "destination", "destination": "source"})
    both = out.merge(back, on=[*key, "source", "destination"], suffixes=("", "_back"))
    assert len(both) == len(out) == len(back)
    assert (both["tokens"] == both["tokens_back"]).all()


@pytest.mark.parametrize("attention", MODES)
def test_how_experts_were_multiplied_is_said_for_every_rank(folder: Path, alone: Run, attention: str) -> None:
    def products(run: Run) -> dict[str, str | None]:
        return {arm.name: arm.parallel.products for arm in run.manifest.arms if arm.parallel is not None}

    assert products(Run(folder / attention)) == products(alone)
    assert all(products(alone).values())
    assert said_by_ranks([None, None]) is None
    assert said_by_ranks(["by a", "by b", "by a"]) == "ranks 0, 2: by a; rank 1: by b"


@pytest.mark.parametrize("attention", MODES)
def test_collectives_of_every_rank_are_timed(folder: Path, attention: str) -> None:
    found = Run(folder / attention)
    seen, steps = found.frame("collectives"), found.frame("steps")
    instrumented = steps[(steps["pass"] == "instrumented") & (steps["arm"] == "mohge")]
    operations = {"counts", "dispatch", "combine"} | ({"gather"} if attention == "replicated" else set())
    assert set(seen["operation"]) == operations
    assert len(seen) == len(instrumented) * 2 * len(operations)
    assert (seen["dur_ns"] > 0).all()
    within = seen.groupby(["step", "rank"])["dur_ns"].sum().reset_index()
    within = within.merge(instrumented, on=["step", "rank"])
    assert (within["dur_ns"] < within["wall_ns"]).all()
    exchange = found.frame("segments").query("segment == 'exchange'").groupby(["step", "rank"])["ns"].sum()
    spent = seen.groupby(["step", "rank"])["dur_ns"].sum()
    assert ((exchange - spent).abs() < 0.2 * spent).all()
    times = found.frame("expert_times")
    assert set(times["width"]) <= {8, 16, 24, 32}
    assert set(times["rank"]) == {0, 1, 2}


def test_placements_in_force_and_to_compare_are_written_once(folder: Path) -> None:
    found = Run(folder / "replicated")
    placed, about = found.frame("placements"), found.manifest.arm("mohge").parallel
    assert about is not None
    assert (about.ranks, about.placement, about.attention) == (3, "all_size", "replicated")
    assert (about.hidden, about.itemsize, about.widths_E, len(about.nodes)) == (D, ITEM, WIDTHS, 3)
    assert set(placed["placement"]) == {"contiguous", "all_size", "interleaved", "balanced", "exact", "replicated"}
    in_force = placed[placed["placement"] == "all_size"]
    assert (in_force["rank"] == in_force["expert"] % 3).all()
    assert sorted(zip(in_force["layer"], in_force["expert"], strict=True)) == [
        (layer, expert) for layer in (4, 5) for expert in range(12)
    ]
    assert about.fitted_on["balanced"] == "the first 2 of 3 recorded steps"
    loads = found.frame("loads")
    assert sorted(set(loads["step"]))[:2] == about.fitted_steps
    assert found.manifest.arm("dense").parallel is None


def test_every_rank_leaves_a_trace(folder: Path) -> None:
    files = sorted(path.name for path in (folder / "replicated" / "traces").iterdir())
    assert len(files) == 2 * 2 * RANKS
    assert sum(name.endswith(f".rank2{SUFFIX}") for name in files) == 4
    kernels = Run(folder / "replicated").frame("kernels")
    assert set(kernels["rank"]) == {0, 1, 2}


# -- lost ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why", "longest"), [("stopped", "is stopped (SIGSTOP)", 2 * TIMEOUT_S), ("killed", "is gone", TIMEOUT_S)]
)
def test_the_others_name_a_lost_rank_and_keep_what_was_recorded(
    folder: Path, how: str, why: str, longest: float
) -> None:
    told = [_said(folder, process)[how] for process in (0, 1)]
    for rank, each in enumerate(told):
        assert each["said"].startswith(f"RankError: rank {rank} of 3 cannot go on: rank 2 (process ")
        assert why in each["said"]
        assert "rank 0 (" not in each["said"].partition("cannot go on")[2]
    assert max(each["seconds"] for each in told) < 60 + longest
    found = Run(folder / how)
    assert found.state == "failed"
    assert "rank 2 (process " in (found.manifest.state_detail or "")
    prefill, decode = found.manifest.cells
    assert prefill.done
    assert not decode.done
    assert found.mismatches == []
    steps = found.frame("steps")
    assert set(steps[steps["cell"] == prefill.name]["rank"]) == {0, 1, 2}


# -- going on ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the killed run left, gone on with by three new processes."""
    into, ports, context = tmp_path_factory.mktemp("resumed"), free_ports(3), forking()
    shutil.copytree(folder / "killed", into / "killed")
    processes = [context.Process(target=rank_runs.go_on, args=(rank, ports, str(into))) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * RANKS
    return into


def test_a_run_of_several_ranks_is_gone_on_with(folder: Path, resumed: Path, alone: Run) -> None:
    before, after = Run(folder / "killed"), Run(resumed / "killed")
    assert after.state == "complete"
    assert after.mismatches == []
    assert len(after.manifest.resumed_utc) == 1
    done = before.manifest.cells[0].name
    parts = list(before.path.glob(f"*/part-{done}-r*.parquet"))
    assert {path.name.rpartition("-r")[2][0] for path in parts} == {"0", "1", "2"}
    for path in parts:
        assert (after.path / path.relative_to(before.path)).read_bytes() == path.read_bytes()
    for mine, theirs in zip(after.manifest.cells, alone.manifest.cells, strict=True):
        assert mine.done
        assert mine.outputs == theirs.outputs
    assert _decisions(after) == _decisions(alone)
    steps = after.frame("steps")
    assert not steps.duplicated(["step", "rank"]).any()
    assert (steps.groupby("step")["rank"].nunique() == RANKS).all()


def test_its_placements_are_fitted_to_the_cells_of_before_too(folder: Path, resumed: Path) -> None:
    whole, after = Run(folder / "replicated"), Run(resumed / "killed")
    mine, theirs = after.manifest.arm("mohge").parallel, whole.manifest.arm("mohge").parallel
    assert mine is not None
    assert theirs is not None
    assert (mine.fitted_on, mine.fitted_steps[:1]) == (theirs.fitted_on, theirs.fitted_steps[:1])
    for name in ("balanced", "replicated"):
        placed = [frame[frame["placement"] == name] for frame in (after.frame("placements"), whole.frame("placements"))]
        assert placed[0].to_numpy().tolist() == placed[1].to_numpy().tolist()


@pytest.mark.parametrize(("how", "why"), [("again", "the run is complete"), ("another", "a run has one spec")])
def test_every_rank_refuses_a_run_that_cannot_be_gone_on_with(resumed: Path, how: str, why: str) -> None:
    for rank in range(RANKS):
        said = json.loads((resumed / f"resumed-{rank}.json").read_text())
        assert said[how]["said"].startswith("InputError: --resume ")
        assert why in said[how]["said"]
        assert said["resumed"]["said"] is None


def test_one_process_does_not_go_on_with_a_run_of_three(folder: Path) -> None:
    kept = sorted(path.name for path in (folder / "killed").rglob("*"))
    with pytest.raises(InputError, match="begun by 3 processes, .* by 1; .* torchrun --nproc-per-node 3"):
        run(spec(), folder / "killed", resume=True)
    assert sorted(path.name for path in (folder / "killed").rglob("*")) == kept


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("started", "given", "problem"),
    [
        (
            2,
            spec(),
            r"parallel.experts \(3\) must be the number of processes started \(2\): start torchrun --nproc-per-node 3, "
            "or say --set parallel.experts=2$",
        ),
    ],
)
def test_as_many_processes_as_the_spec_says(
    started: int, given: Any, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(InputError, match=problem):
        run(given, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_with_a_row_for_each_rank_is_needed() -> None:
    with pytest.raises(ValueError, match="cell decode-b2-c8-n2 has a batch of 2 for 3 ranks"):
        spec("data_parallel", cells={"decode": {"batch": [2], "context": [8], "new_tokens": 2}})


def test_one_process_has_no_ranks_and_still_its_loads(alone: Run) -> None:
    about = alone.manifest.arm("mohge").parallel
    assert about is not None
    assert about.ranks == 1
    assert alone.manifest.ranks == []
    for table in ("dispatch", "collectives"):
        assert len(alone.frame(table)) == 0
    loads = alone.frame("loads")
    prefill = loads[loads["cell"] == "prefill-b5-l8"]
    assert prefill.groupby("layer")["tokens"].sum().tolist() == [5 * 8 * 4, 5 * 8 * 4]  # four experts a token


def test_one_process_is_placed_as_its_spec_would_have_been(folder: Path, alone: Run) -> None:
    about = alone.manifest.arm("mohge").parallel
    assert about is not None
    assert about.compared_on == 3
    placed, on_ranks = alone.frame("placements"), Run(folder / "replicated").frame("placements")
    proven = sorted({*placed["placement"]} - {"exact"})  # a search by the clock
    assert proven == ["all_size", "balanced", "contiguous", "interleaved", "replicated"]
    for name in proven:
        mine, theirs = (f[f["placement"] == name].reset_index(drop=True) for f in (placed, on_ranks))
        pd.testing.assert_frame_equal(mine, theirs)


def test_one_process_is_reported_as_predicted(alone: Run) -> None:
    (found,) = balances(alone)
    assert "as if its tokens had met 3 ranks, predicted from the recorded loads and not measured" in found.sentence
    compared = found.compared.groupby("placement")
    assert set(compared.groups) == {"contiguous", "all_size", "interleaved", "balanced", "exact", "replicated"}
    columns = ["imbalance_p50", "imbalance_p95", "imbalance_p99", "largest_weight_bytes", "predicted_p50_ms"]
    assert (found.compared[columns] > 0).all(axis=None)
    assert found.compared["measured_p50_ms"].isna().all()
    # All sizes on every rank, on each of two layers: 8 + 16 + 24 + 32 wide, three matrices.
    held = found.held[found.held["placement"] == "all_size"]
    assert held["weight_bytes"].tolist() == [2 * 3 * D * 80 * ITEM] * 3
