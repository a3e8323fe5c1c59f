"""The built-in baselines spec: a router, fixed cuts and a random choice at one executed rate; on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import baselines
from analysis.ladder import ladder
from profiler import checkpoints, models
from profiler import run as running
from profiler.evaluate import evaluate
from profiler.execution.routes import ForcedGates
from profiler.store import Run
from workloads.loading import load

#: Tiny has 6 blocks, of which untrained routers skip 2; no checkpoint ships for it.
TINY = [
    "model={source: tiny, device: cpu}",
    *(f"arms.{place}.checkpoint=null" for place in (1, 2, 4, 5)),
    "arms.3.layers.count=2",
    "arms.4.gates.forced.ratio=0.34",
    "arms.5.gates.forced.ratio=0.34",
    "cells={prefill: {batch: [2], length: [16]}}",
    "measure={warmup: 0, max_repeats: 1, threads: 1}",
    "quality.count=12",
]
SKIPPING = ("routed", "cut", "fixed", "random")


def test_arms_skip_alike_and_are_compared(tmp_path: Path) -> None:
    run = Run(running.run(load("layerroute-baselines", TINY), tmp_path / "run"))
    assert all(rule.passed for rule in run.manifest.rules)
    frame = baselines.pairs(run)
    frame = frame[frame["arm"].isin(SKIPPING) & frame["other"].isin(SKIPPING)]
    assert len(frame) == 12
    assert frame["layers_skipped"].tolist() == [2.0] * 12
    assert frame["like_rates"].all()
    assert frame["items"].tolist() == [12] * 12
    patterns = frame.set_index("arm")["patterns"].to_dict()
    assert patterns["cut"] == patterns["fixed"] == patterns["routed"] == 1
    assert patterns["random"] > 1
    (match,) = baselines.matches(run).to_dict("records")
    assert match == {"arm": "routed", "layers": 6, "layers_skipped": 2.0, "count": 2, "ratio": 0.3333}

    # The ladder, which knows no method either, charges a fixed cut as it charges a router's skips.
    rungs = ladder(run)
    skip = rungs[(rungs["rung"] == "parameter_skip") & (rungs["variant"] == "gross")].set_index("arm")["value"]
    blocks = sum(c.backbone_parameters for c in run.manifest.arm("cut").choices if c.layer == 0)
    assert run.manifest.model is not None
    share = 2 * blocks / run.manifest.model.parameters
    assert skip.to_dict() == {"lora": 0.0, **dict.fromkeys(SKIPPING, share)}
    flops = rungs[(rungs["rung"] == "flop_skip") & (rungs["variant"] == "executed")].set_index("arm")["value"]
    assert flops["cut"] > flops["routed"] == flops["fixed"] == flops["random"] > 0 > flops["lora"]  # routers cost a bit


def test_as_it_ships_the_baselines_skip_as_many_blocks_as_each_other() -> None:
    spec = load("layerroute-baselines")
    arms = {arm.name: arm.options for arm in spec.arms}
    assert [name for name, options in arms.items() if options.get("checkpoint") == "builtin"] == [
        "lora", "routed", "fixed", "random",
    ]  # fmt: skip
    count = arms["cut"]["layers"]["count"]
    for name in ("fixed", "random"):
        gates = ForcedGates(**arms[name]["gates"]["forced"])
        assert gates.open_layers(30, "any").count(False) == count
    assert arms["fixed"]["gates"]["forced"]["pattern"] == arms["cut"]["layers"]["pattern"] == "middle"
    assert spec.quality is not None
    assert spec.quality.modes == ["prefix"]


def cached(name: str) -> bool:
    return any(source.name == name and source.cached for source in models.sources())


@pytest.mark.slow
def test_as_it_ships_the_baselines_skip_what_the_trained_router_skips(tmp_path: Path) -> None:
    if not cached("smollm2-135m"):
        pytest.skip("smollm2-135m is not on this machine")
    if not checkpoints.builtin_checkpoints():
        pytest.skip("no checkpoint ships with this version")
    shipped = load("layerroute-baselines")
    only = [{"name": "dense", "method": "dense"}, {"name": "routed", **shipped.arms[2].options, "method": "layerroute"}]
    folder = evaluate("layerroute-baselines", [f"arms={json.dumps(only)}"], tmp_path / "run")
    (match,) = baselines.matches(Run(folder)).to_dict("records")
    assert match["count"] == shipped.arms[3].options["layers"]["count"]
