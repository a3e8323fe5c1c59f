"""The built-in spec of HeRo's controls, on the tiny model: one run, one table, matched in what was executed."""

from __future__ import annotations

import pytest

from analysis import report
from analysis.matched import compared
from analysis.trajectory_report import trajectories
from profiler import models
from profiler import run as running
from profiler.evaluate import evaluate
from profiler.store import Run
from tests.profiler.hero_checkpoints import write_hero
from workloads.loading import load

CONTROLS = [
    "no_position", "no_path", "no_history", "no_memory_read", "recent_only", "shuffled_history", "foreign_history",
    "wide_local", "random",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("controls")
    model = models.load("tiny").model
    full, wide = (write_hero(folder / variant, model, variant) for variant in ("full", "wide_local"))
    tiny = [
        "model={source: tiny, device: cpu}",
        "cells={prefill: {batch: [1], length: [8]}}",
        "measure={warmup: 0, max_repeats: 1, threads: 1}",
        "quality.count=8",
        "quality.max_tokens=64",
        *(f"arms.{k}.checkpoint={wide if k == 9 else full}" for k in range(1, 11)),
    ]
    return Run(running.run(load("hero-controls", tiny), folder / "run"))


def test_every_control_is_there_and_all_rules_hold(run: Run) -> None:
    assert [arm.name for arm in run.manifest.arms] == ["dense", "full", *CONTROLS]
    assert all(rule.passed for rule in run.manifest.rules)
    # A control on the full checkpoint says so; what was trained as what it is does not.
    caveats = {arm.name: arm.caveat for arm in run.manifest.arms}
    assert caveats["no_path"] == "trained as variant full, run as no_path"
    assert caveats["wide_local"] is caveats["full"] is caveats["random"] is None
    assert run.manifest.arm("random").synthetic is not None


def test_arms_match_in_what_they_executed(run: Run) -> None:
    about = compared(run)
    table = about.table.set_index("arm")
    assert list(table.index) == ["full", *CONTROLS]
    calibrated = table.drop(index="random")
    assert calibrated["wanted"].tolist() == [0.3] * 9
    # What was calibrated is what was executed: the same inputs, with the same decisions.
    assert calibrated["executed_skip"].tolist() == pytest.approx(calibrated["calibrated"].tolist(), abs=2e-3)
    assert calibrated["like_rates"].all()
    assert table.loc["random", "executed_skip"] == pytest.approx(0.3, abs=0.05)  # 1,536 draws
    assert table["series"].nunique() == 10
    assert table["items"].tolist() == [8] * 10


def test_tokens_of_every_control_can_be_followed(run: Run) -> None:
    found = {each.arm: each for each in trajectories(run)}
    assert list(found) == ["full", *CONTROLS]
    full = found["full"]
    assert full.tokens == sum(run.frame("prompts").query("cell == 'quality'")["tokens"]) + int(
        run.frame("scores").query("arm == 'full'")["tokens"].sum()
    )
    assert set(full.profile["signal"]) == {"gate", "p", "m", "a", "b", "d", "gamma", "nu"}
    assert set(found["wide_local"].profile["signal"]) == {"gate", "b"}  # it has no history to tell of
    assert full.forgetting["layer"].tolist() == [3, 4, 5]
    assert found["recent_only"].forgetting["half_life_layers"].tolist() == [0, 0, 0]
    # 1 − executed share of the rows table = mean over tokens of what did not run.
    ran = full.breakdown.query("by == 'all' and target == 'share that ran'")["mean"].item()
    assert 1 - ran == pytest.approx(compared(run).table.set_index("arm").loc["full", "executed_skip"])


def test_the_report_has_one_table_of_all_arms(run: Run) -> None:
    html = report.render_html(run)
    assert html.count("At the rates executed: every arm that skips against the first") == 1
    assert "Thresholds were found on the held-out inputs themselves" in html
    assert html.count("Its tokens through depth") == len(CONTROLS)  # and the first arm's, which stand open


def test_quality_measured_afterwards_is_of_the_same_arms(run: Run) -> None:
    again = Run(evaluate(str(run.path), ["quality.count=4"], None))
    for arm in ("full", "foreign_history", "wide_local"):
        assert again.manifest.arm(arm).options["threshold"] == run.manifest.arm(arm).options["threshold"]
        assert again.manifest.arm(arm).calibration is None


def test_as_it_ships_every_arm_asks_for_one_rate() -> None:
    spec = load("hero-controls")
    rates = [arm.options.get("adapter_rate") or arm.options["gates"]["forced"]["ratio"] for arm in spec.arms[1:]]
    assert rates == [0.3] * 10
    assert [arm.options.get("variant") for arm in spec.arms[2:10]] == CONTROLS[:-1]
