"""The built-in spec of a stock mixture-of-experts model: a run without a dense arm, its ladder, loads and pads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from analysis.balance_report import balances
from analysis.ladder import ladder
from analysis.report import render_markdown
from profiler import models, plan
from profiler import run as running
from profiler.estimate import estimate
from profiler.session import record
from profiler.store import Run
from tests.profiler.tiny import padded, prompts_of, random_model, wrapped
from workloads.loading import load

SMALL = ["cells={prefill: {batch: [4], length: [16]}}", "measure.max_repeats=5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(running.run(load("stock-moe", SMALL), tmp_path_factory.mktemp("stock") / "run"))


def test_it_runs_without_a_dense_arm_and_keeps_the_rules(run: Run) -> None:
    assert {arm.name: arm.twin for arm in run.manifest.arms} == {"all": None, "stock": "all", "eager": "stock"}
    assert all(rule.passed for rule in run.manifest.rules)


def test_the_ladder_says_what_the_router_leaves_out(run: Run) -> None:
    """A layer has 8 experts of 3·64·96 and a token takes 2: six are skipped, in each of 4 layers of 675,136 in all."""
    table = ladder(run).set_index(["arm", "rung", "variant"])["value"]
    assert table["stock", "parameter_skip", "net"] == pytest.approx(4 * 6 * 3 * 64 * 96 / 675_136)
    assert table["all", "parameter_skip", "net"] == pytest.approx(0)
    assert table["eager", "flop_skip", "executed"] == pytest.approx(0)
    assert 0 < table["stock", "flop_skip", "executed"] < 0.75


def test_loads_are_recorded(run: Run) -> None:
    loads = run.frame("loads")
    assert set(loads["arm"]) == {"stock", "eager"}
    per_step = loads.groupby(["arm", "step", "layer"])["tokens"].sum()
    assert set(per_step) == {2 * 4 * 16}


def test_placements_on_four_ranks_are_compared_on_its_loads(run: Run) -> None:
    found = {each.arm: each for each in balances(run)}
    assert set(found) == {"stock", "eager"}
    compared = found["stock"].compared
    assert found["stock"].layout.experts.ranks == 4
    assert set(compared["placement"]) == {"contiguous", "all_size", "interleaved", "balanced", "exact", "replicated"}
    assert (compared[["imbalance_p95", "largest_weight_bytes", "predicted_p50_ms"]] > 0).all(axis=None)
    # Two of eight experts on each rank, in four layers: 3·64·96 parameters, float32.
    assert set(compared.loc[compared["placement"] == "contiguous", "largest_weight_bytes"]) == {2 * 4 * 3 * 64 * 96 * 4}


def test_time_of_its_experts_is_told_with_what_it_is_of(run: Run) -> None:
    times = run.frame("expert_times")
    assert set(times["arm"]) == {"all", "stock", "eager"}
    assert set(times["width"]) == {96}
    segments = run.frame("segments").query("segment == 'experts'")
    both = times.merge(segments, on=["arm", "step", "layer"], suffixes=("", "_segment"))
    assert len(both) == len(times) == len(segments)
    assert (both["ns"] == both["ns_segment"]).all()
    assert {(u.metric, u.reason.split(":")[0]) for u in run.manifest.unsupported if "width" in u.metric} == {
        (f"expert time by width of arm {arm}", "transformers' experts gather, multiply and add back in one forward")
        for arm in ("all", "stock", "eager")
    }
    assert "Unsupported: the products of each width by themselves." in render_markdown(run)


def test_plan_and_estimate_take_it() -> None:
    plans = plan.plan(load("stock-moe", SMALL))
    assert {one.backbone_parameters for one in plans} == {675_136}
    assert estimate(load("stock-moe", SMALL)).guess_s > 0


def test_pads_that_experts_computed_are_counted_apart() -> None:
    handle, steps = wrapped(random_model("mixtral"), "stock_moe")
    with torch.no_grad():
        handle.model(**padded(prompts_of([9, 4, 1]), "left"))
    of_layer = [count for (layer, site, _), count in steps[0].counts.items() if (layer, site) == (2, "experts")]
    assert (sum(c.rows for c in of_layer), sum(c.padded for c in of_layer)) == (2 * 14, 2 * 13)


def test_a_session_takes_an_unwrapped_model(tmp_path: Path) -> None:
    loaded = models.load("mixtral-tiny", device="cpu")
    with record(loaded.model, out=tmp_path / "run"), torch.no_grad():
        loaded.model(input_ids=torch.tensor([[5, 6, 7]]))
    found = Run(tmp_path / "run")
    assert found.manifest.arms[0].method == "stock_moe"
    assert len(found.frame("gates")) == 4 * 3
    placed = found.frame("placements")
    assert found.manifest.arms[0].parallel is not None
    assert found.manifest.arms[0].parallel.compared_on == 4
    assert {"all_size", "balanced", "exact"} <= set(placed["placement"])
