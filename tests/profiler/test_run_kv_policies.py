"""One spec whose arms differ in their KV policy only, from start to end, by a baseline they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.ladder import ladder
from profiler import run as running
from profiler.errors import InputError
from profiler.plan import plan
from profiler.store import Run
from tests.profiler.tiny_runs import (
    ATTENTION_FLOPS,
    CONTEXT_FLOPS,
    FFN_FLOPS,
    HEAD,
    HEAD_FLOPS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    tiny_spec,
)

POLICIES = ("request", "project", "recompute")
#: A third of six layers, the same for all requests: 2 of 6 skip.
GATES = {"forced": {"ratio": 0.3, "pattern": "shared", "seed": 1}}
BATCH, CONTEXT, NEW = 3, 12, 2
A_TOKEN = LAYERS * 2 * KV_HEADS * HEAD * 4


def spec(**more: Any) -> Any:
    arms = [{"name": policy, "method": "layerroute", "kv_policy": policy, "gates": GATES} for policy in POLICIES]
    return tiny_spec(arms=[{"name": "dense", "method": "dense"}, *arms], **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "policies"
    running.run(spec(trace={"steps": 1}, quality={"modes": ["whole"], "count": 4, "max_tokens": 24}), out)
    return Run(out)


def of(frame: pd.DataFrame, arm: str, phase: str) -> pd.DataFrame:
    return frame[(frame["arm"] == arm) & frame["cell"].str.startswith(phase)]


def test_every_rule_holds_and_policies_are_named(run: Run) -> None:
    assert run.state == "complete"
    assert [rule.detail for rule in run.manifest.rules if not rule.passed] == []
    assert [arm.kv_policy for arm in run.manifest.arms] == [None, *POLICIES]


def test_kv_bytes_by_hand(run: Run) -> None:
    kv = run.frame("kv")
    skipped = _skipped(run)
    assert 0 < skipped < LAYERS
    shares = {"dense": LAYERS, "request": LAYERS - skipped, "project": LAYERS, "recompute": 0}
    for arm, layers in shares.items():
        a_token = A_TOKEN // LAYERS * layers
        held = of(kv, arm, "decode").sort_values("step")
        assert held["live_bytes"].tolist() == [BATCH * n * a_token for n in (CONTEXT + 1, CONTEXT + 2)]
        assert held["allocated_bytes"].tolist() == held["live_bytes"].tolist()


def _skipped(run: Run) -> int:
    gates = of(run.frame("gates"), "request", "decode")
    return int(gates.loc[gates["choices"].map(lambda chosen: chosen[0] == 0), "layer"].nunique())


def test_flops_of_a_decode_step_by_hand(run: Run) -> None:
    """Of the first step: a skipped block of `project` pays K and V of each row, `recompute` pays for every token."""
    skipped = _skipped(run)
    block, kv = ATTENTION_FLOPS + FFN_FLOPS, 2 * 2 * WIDTH * KV_HEADS * HEAD
    context, whole = BATCH * (CONTEXT + 1), BATCH * (CONTEXT + 1) * (CONTEXT + 2) // 2
    wanted = {
        "request": (LAYERS - skipped) * (BATCH * block + context * CONTEXT_FLOPS),
        "project": (LAYERS - skipped) * (BATCH * block + context * CONTEXT_FLOPS) + skipped * BATCH * kv,
        "recompute": (LAYERS - skipped) * (context * block + whole * CONTEXT_FLOPS),
    }
    rows = run.frame("rows")
    for arm in run.manifest.arms[1:]:
        costs = {(c.layer, c.site, c.index): c for c in arm.choices}
        lines = of(rows, arm.name, "decode")
        first = lines[(lines["step"] == lines["step"].min()) & (lines["layer"] >= 0) & (lines["site"] != "router")]
        done = 0
        for line in first.itertuples():
            cost = costs[line.layer, line.site, line.choice]
            done += line.rows * cost.flops_per_row + line.context * cost.flops_per_context
        assert done == wanted[arm.name]


def test_only_project_has_kv_segments_and_only_where_a_block_is_skipped(run: Run) -> None:
    segments = run.frame("segments")
    found = segments[segments["segment"] == "kv"]
    assert set(found["arm"]) == {"project"}
    assert found["layer"].nunique() == _skipped(run)
    assert set(run.frame("gates")["phase"]) == {"prefill", "decode"}


def test_the_ladder_charges_the_projection(run: Run) -> None:
    found = ladder(run)
    values = found[found["cell"].str.startswith("decode")].set_index(["arm", "rung", "variant"])["value"]
    for rung, variant in (("parameter_skip", "gross"), ("flop_skip", "executed"), ("weight_byte_skip", "executed")):
        assert 0 < values["project", rung, variant] < values["request", rung, variant]
    assert values["project", "flop_skip", "nominal"] == pytest.approx(values["project", "flop_skip", "executed"])
    assert values["recompute", "flop_skip", "executed"] < 0  # thirteen tokens where dense computes one


def test_a_prefix_cannot_be_scored_without_a_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prefix freezes the gates .* and arm 'recompute' keeps none"):
        running.run(spec(quality={"modes": ["prefix"], "count": 4, "max_tokens": 24}), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_plan_counts_what_is_computed_again() -> None:
    """At half the blocks skipped: the mean decode step of `recompute` is given 13 or 14 tokens of each request."""
    arms = plan(spec())
    (cell,) = [name for name in arms[1].flop_skip if name.startswith("decode")]
    rows, context = BATCH * 27 // 2, BATCH * (13 * 14 // 2 + 14 * 15 // 2) // 2
    fixed = BATCH * (HEAD_FLOPS + LAYERS * 2 * WIDTH)  # the head and, once a sequence, the routers
    block = ATTENTION_FLOPS + FFN_FLOPS
    cached = BATCH * 27 // 2
    dense = BATCH * HEAD_FLOPS + LAYERS * (BATCH * block + cached * CONTEXT_FLOPS)
    wanted = {
        "request": fixed + LAYERS / 2 * (BATCH * block + cached * CONTEXT_FLOPS),
        "recompute": fixed + LAYERS / 2 * (rows * block + context * CONTEXT_FLOPS),
    }
    for arm in arms:
        if arm.arm in wanted:
            assert arm.flop_skip[cell][0.5] == pytest.approx(1 - wanted[arm.arm] / dense)
