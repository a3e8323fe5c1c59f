"""The built-in spec of MoHGE's relatives: equal active parameters, one run, one set of tables."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from profiler import methods, models
from profiler import run as running
from profiler.store import Run
from workloads.loading import load

RELATIVES = ["top-k", "deepseekmoe", "top-p", "modse", "hmoe", "mohge"]
#: What a token takes of routed experts on average with even loads, where their number is fixed, and of shared ones.
TAKEN = {"top-k": 4, "deepseekmoe": 6, "modse": 4, "hmoe": 4, "mohge": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("relatives")
    began = time.monotonic()
    found = Run(running.run(load("mohge-relatives", ["measure.max_repeats=5"]), folder / "run"))
    assert time.monotonic() - began < 60
    return found


def test_a_token_takes_as_many_parameters_in_every_relative() -> None:
    skeleton = models.skeleton(models.config("tiny"))
    for arm in load("mohge-relatives").arms:
        if arm.name not in TAKEN:
            continue
        choices = methods.load("mohge").choices(skeleton, methods.configure("mohge", arm.options))
        routed = [c for c in choices if (c.layer, c.site) == (3, "experts") and c.name != "ffn"]
        shared = [c for c in choices if (c.layer, c.site) == (3, "shared")]
        held = sum(c.replacement_parameters for c in routed)
        assert held == 3 * 64 * 16 * 48
        active = held * TAKEN[arm.name] / len(routed) + sum(c.replacement_parameters for c in shared)
        assert active == 3 * 64 * 192, arm.name


def test_all_of_them_run_and_keep_the_rules(run: Run) -> None:
    assert [arm.name for arm in run.manifest.arms] == ["dense", *RELATIVES]
    assert [arm.twin for arm in run.manifest.arms] == [None, "dense", *["top-k"] * 5]
    assert all(rule.passed for rule in run.manifest.rules)
    gates = run.frame("gates")
    taken = gates.assign(taken=gates["choices"].map(len)).groupby("arm")["taken"]
    assert {arm: set(of_arm) for arm, of_arm in taken if arm != "top-p"} == {arm: {k} for arm, k in TAKEN.items()}
    # Sixteen near equal chances: a quarter of the probability is four of them, or three where those are the likelier.
    assert set(taken.get_group("top-p")) <= {3, 4, 5}
    assert taken.get_group("top-p").mean() == pytest.approx(4, abs=0.3)


def test_loads_of_every_relative_are_in_one_table(run: Run) -> None:
    loads = run.frame("loads")
    assert set(loads["arm"]) == set(RELATIVES)
    rows = run.frame("rows")
    rows = rows[(rows["site"] == "experts") & (rows["rows"] > 0)]
    assert loads.groupby("arm")["tokens"].sum().to_dict() == rows.groupby("arm")["rows"].sum().to_dict()
    # 6·d·W a token: of top-K all alike.
    assert set(loads[loads["arm"] == "top-k"].eval("flops / tokens")) == {6 * 64 * 48}
