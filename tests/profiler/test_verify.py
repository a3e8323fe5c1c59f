"""Checks before timing: right methods pass on ragged prompts, and each broken one is caught by the rule it breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler import arms, methods, verify
from profiler.methods import Method
from profiler.records import RuleRecord
from tests.profiler.gated_methods import (
    BatchMean,
    ComputesAll,
    CountsTwice,
    Fickle,
    MeanGate,
    NotANumber,
    OpenDiffers,
    named,
)
from tests.profiler.tiny import disturb, prompts_of, random_model

PROMPTS = prompts_of([60, 40, 20, 6])


def check(method: str, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, RuleRecord]:
    backbone = random_model("llama", dtype=dtype)
    arm = arms.build(backbone, "mine", method, options, "dense").record
    found = verify.verify(backbone, arm, PROMPTS)
    assert all(record.arm == "mine" and record.cell is None for record in found)
    return {record.name: record for record in found}


def broken(found: dict[str, RuleRecord]) -> set[str]:
    return {name for name, record in found.items() if not record.passed}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dense", {}),
        ("layerroute", {}),
        ("layerroute", {"gates": {"forced": {"ratio": 0.5, "pattern": "random"}}}),
        ("static_depth", {"layers": [0, 3]}),
    ],
)
def test_right_methods_pass_in_every_dtype(method: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    found = check(method, dtype, **options)
    assert broken(found) == set()
    assert [(r.rule, name) for name, r in found.items()] == [
        (6, "deterministic"),
        (6, "order"),
        (6, "company"),
        (6, "open equals twin"),
        (1, "rows executed = gates recorded"),
    ]
    assert found["deterministic"].figures["logit_difference"] == 0
    # A batch of four and its reverse, twice and reversed, and each of the four alone: a prompt and a decode step each.
    assert found["rows executed = gates recorded"].figures["steps"] == 2 * (3 + 4)


def test_a_method_whose_requests_decide_differently_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the tests of broken methods below mean something: here requests do differ, and nothing is wrong."""
    method = named(MeanGate, monkeypatch)
    assert broken(check(method)) == set()
    handle = arms.tree(random_model("llama", dtype=torch.float32), method, None)
    handle.recorder.attach(handle)
    steps: list[Any] = []
    handle.recorder.mode, handle.recorder.sink = "record", steps.append
    for prompt in PROMPTS:
        handle.model(input_ids=torch.tensor([prompt[:20]]))
    routes = {tuple(int(d.choice[0]) for d in step.decisions) for step in steps}
    assert len(routes) > 1


@pytest.mark.parametrize(
    ("method", "caught"),
    [
        (BatchMean, {"company"}),
        (Fickle, {"deterministic", "order", "company"}),
        (ComputesAll, {"rows executed = gates recorded"}),
        (OpenDiffers, {"open equals twin"}),
        (CountsTwice, {"rows executed = gates recorded"}),
    ],
)
def test_a_broken_method_is_caught_by_the_rule_it_breaks(
    monkeypatch: pytest.MonkeyPatch, method: type[Method], caught: set[str]
) -> None:
    assert broken(check(named(method, monkeypatch))) == caught


def test_a_batch_mean_is_a_difference_of_decisions_not_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the company moved the gate: a flip counts as rounding only where both gates are at the threshold."""
    found = check(named(BatchMean, monkeypatch))["company"]
    assert found.figures["requests_differing"] >= 1
    assert found.figures["flips_by_rounding"] == 0


def test_a_gate_that_is_no_number_is_reported_with_layer_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(named(NotANumber, monkeypatch))["rows executed = gates recorded"]
    assert not found.passed
    assert found.detail == "layer 1 block: the gate of request 'verify-0' is not finite"


class AtTheThreshold(MeanGate):
    """In company, layer 2's gate is a hair above its threshold; alone a hair below."""

    def logits(self, layer: int, mean_Sd: torch.Tensor) -> torch.Tensor:
        found = super().logits(layer, mean_Sd)
        return torch.full_like(found, 1e-5 if len(mean_Sd) > 1 else -1e-5) if layer == 2 else found


def test_flips_within_rounding_are_counted_and_what_follows_from_them_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = check(named(AtTheThreshold, monkeypatch))["company"]
    assert found.passed
    assert found.figures["flips_by_rounding"] == 4
    assert found.figures["logit_difference"] == 0  # no request is left whose outputs could be compared
    assert found.figures["gates_near_threshold"] == 2 * 4  # a prompt step and a decode step of each request
    assert "by rounding of a gate: 4" in found.detail


def test_nan_outputs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = random_model("llama", dtype=torch.float32)
    arm = arms.build(backbone, "mine", "dense", {}, None).record
    with torch.no_grad():
        backbone.lm_head.weight.fill_(float("nan"))
    found = {record.name: record for record in verify.verify(backbone, arm, PROMPTS)}
    assert broken(found) == {"deterministic", "order", "company", "open equals twin"}
    assert found["order"].figures["logit_difference"] == float("inf")


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1], [200]])
def test_few_and_short_prompts_are_enough(lengths: list[int]) -> None:
    backbone = random_model("qwen2", dtype=torch.float32)
    arm = arms.build(backbone, "mine", "layerroute", {}, "dense").record
    assert all(record.passed for record in verify.verify(backbone, arm, prompts_of(lengths)))


def test_the_backbone_is_left_as_it_was() -> None:
    backbone = random_model("llama", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    arm = arms.build(backbone, "mine", "layerroute", {"lora": True}, "dense").record
    verify.verify(backbone, arm, PROMPTS)
    assert before.keys() == backbone.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in backbone.modules())
    assert not hasattr(backbone, "gatewise")


def test_adapters_are_part_of_the_twin_when_open_is_compared(tmp_path: Any) -> None:
    """With LoRA whose B is not zero, open is the backbone with the adapters merged in, not the bare backbone."""
    backbone = random_model("llama", dtype=torch.float32)
    handle = arms.tree(backbone, "layerroute", methods.configure("layerroute", {"lora": True}))
    disturb(handle)
    with torch.no_grad():  # of a trained adapter's size: far larger ones make attention as good as chaotic
        for name, parameter in handle.model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.05)
    handle.save(tmp_path / "c")
    arm = arms.build(backbone, "mine", "layerroute", {"checkpoint": str(tmp_path / "c")}, "dense").record
    assert all(record.passed for record in verify.verify(backbone, arm, PROMPTS))
    bare = arms.tree(backbone, "dense", methods.configure("dense", {}))
    opened = arms.tree(backbone, "layerroute", methods.configure("layerroute", {"checkpoint": str(tmp_path / "c")}))
    opened.force("open")
    ids = torch.tensor([PROMPTS[0]])
    assert not torch.allclose(
        bare.model(ids).logits, opened.model(ids).logits, rtol=1e-2
    )  # there is something to adapt
