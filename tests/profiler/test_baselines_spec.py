"""The built-in baselines spec, on the tiny model: a router, a fixed cut and a random choice at one executed rate."""

from __future__ import annotations

from pathlib import Path

from analysis import baselines
from analysis.ladder import ladder
from profiler import run as running
from profiler.store import Run
from workloads.loading import load

#: Tiny has 6 blocks, of which untrained routers skip 2.
TINY = [
    "model={source: tiny, device: cpu}",
    "arms.2.layers.count=2",
    "arms.3.gates.forced.ratio=0.34",
    "cells={prefill: {batch: [2], length: [16]}}",
    "measure={warmup: 0, max_repeats: 1, threads: 1}",
    "quality.count=12",
]


def test_arms_skip_alike_and_are_compared(tmp_path: Path) -> None:
    run = Run(running.run(load("layerroute-baselines", TINY), tmp_path / "run"))
    assert all(rule.passed for rule in run.manifest.rules)
    frame = baselines.pairs(run)
    assert len(frame) == 6
    assert frame["layers_skipped"].tolist() == [2.0] * 6
    assert frame["like_rates"].all()
    assert frame["items"].tolist() == [12] * 6
    patterns = frame.set_index("arm")["patterns"].to_dict()
    assert patterns["cut"] == patterns["routed"] == 1
    assert patterns["random"] > 1
    assert [sentence.split(" ", 1)[0] for sentence in baselines.sentences(run)] == ["routed", "routed", "random"]

    # The ladder, which knows no method either, charges a fixed cut as it charges a router's skips.
    rungs = ladder(run)
    skip = rungs[(rungs["rung"] == "parameter_skip") & (rungs["variant"] == "gross")].set_index("arm")["value"]
    blocks = sum(c.backbone_parameters for c in run.manifest.arm("cut").choices if c.layer == 0)
    assert run.manifest.model is not None
    share = 2 * blocks / run.manifest.model.parameters
    assert skip.to_dict() == dict.fromkeys(("routed", "cut", "random"), share)
    flops = rungs[(rungs["rung"] == "flop_skip") & (rungs["variant"] == "executed")].set_index("arm")["value"]
    assert flops["cut"] > flops["routed"] == flops["random"] > 0  # a cut pays no router


def test_as_it_ships_all_arms_are_meant_to_skip_eleven_of_thirty_blocks() -> None:
    spec = load("layerroute-baselines")
    assert spec.arms[2].options["layers"]["count"] == 11
    assert round(spec.arms[3].options["gates"]["forced"]["ratio"] * 30) == 11
    assert spec.quality is not None
    assert spec.quality.modes == ["prefix"]
