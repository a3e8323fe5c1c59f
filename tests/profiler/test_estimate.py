"""What a dry run says, against sizes worked out by hand; how near it comes to a real run is in `test_cli`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler import estimate
from profiler.errors import InputError
from profiler.measure import INSTRUMENTED_REPEATS
from tests.profiler.tiny_runs import tiny_spec


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 1 GFLOP/s and 1 GB/s, whose layers take no time beside their products."""
    monkeypatch.setattr(estimate, "_speeds", lambda dtype, device: (1e9, 1e9))
    monkeypatch.setattr(estimate, "LAYER_S", 0.0)
    monkeypatch.setattr(estimate, "START_S", 0.0)
    monkeypatch.setattr(estimate._Steps, "rules_s", lambda self: 0.0)


def spec(**more: Any) -> Any:
    measure = {"warmup": 2, "max_repeats": 10, "budget_s": 1000, "threads": 1}
    arms = [{"name": "dense", "method": "dense"}, {"name": "mine", "method": "layerroute"}]
    return tiny_spec(**{"measure": measure, "arms": arms, "cells": {"prefill": {"batch": [4], "length": [32]}}, **more})


def test_time_of_a_prefill_cell_is_its_products_times_its_steps() -> None:
    # 128 rows through 6 × (24,576 + 73,728), 4 × 528 positions × 256 × 6, 4 rows of logits at 33,152.
    step = (128 * 6 * 98_304 + 4 * 528 * 256 * 6 + 4 * 33_152) / 1e9
    steps = 2 * (12 + 2 + INSTRUMENTED_REPEATS)  # arms × (bare and instrumented repeats, warm-ups in both)
    assert estimate.estimate(spec()).guess_s == pytest.approx(steps * step)
    traced = estimate.estimate(spec(trace={"steps": 3}))
    assert traced.guess_s == pytest.approx(steps * step + 2 * step)  # a prefill cell has one step to trace


def test_a_decode_step_takes_as_long_as_its_weights_take_to_read() -> None:
    weights = 312_320 * 4  # the tied head is read, the look-up is not
    cells = {"decode": {"batch": [1], "context": [8], "new_tokens": 4}}
    found = estimate.estimate(spec(cells=cells, model={"source": "tiny", "dtype": "float32", "device": "cpu"}))
    prompt = weights / 1e9  # eight rows are 4.8 MFLOP, less than 1.25 MB take to read
    steps = 2 * 4 * (12 + 2 + INSTRUMENTED_REPEATS) + 4
    decode = max(weights, 6 * 98_304 + 11 * 256 * 6 + 33_152) / 1e9
    assert found.guess_s == pytest.approx(steps * decode + 5 * max(prompt, (48 * 98_304 + 36 * 256 * 6 + 33_152) / 1e9))


def test_no_cell_is_guessed_to_take_more_than_its_budget() -> None:
    small = {"warmup": 2, "max_repeats": 10_000, "budget_s": 0.5}
    found = estimate.estimate(spec(measure=small, cells={"prefill": {"batch": [1, 2, 4], "length": [512]}}))
    assert (found.bound_s, found.cells, found.arms) == (1.5, 3, 2)
    assert found.guess_s == pytest.approx(1.5)


def test_memory_is_weights_once_and_a_cache_for_every_unit_of_a_decode_cell() -> None:
    base = estimate.estimate(spec(cells={"prefill": {"batch": [1], "length": [1]}})).memory_bytes
    decode = estimate.estimate(spec(cells={"decode": {"batch": [8], "context": [1000], "new_tokens": 24}})).memory_bytes
    caches = 4 * 8 * 1024 * 6 * 2 * 32 * 4  # units × requests × tokens × layers × K and V × KV width × bytes
    activations = 8 * 1000 * 192 * 4 * 4
    assert decode - base == pytest.approx(caches + activations, rel=0.01)
    half = estimate.estimate(
        spec(cells={"prefill": {"batch": [1], "length": [1]}}, model={"source": "tiny", "dtype": "bfloat16"})
    )
    routers = 6 * (64 + 1)  # once in the run, and three times while they are checked
    assert base - half.memory_bytes == pytest.approx((312_320 + 4 * routers) * 2, rel=0.01)
    large = estimate.estimate(spec(model={"source": "llama-3.1-8b", "dtype": "bfloat16"}))
    assert large.memory_bytes == pytest.approx(8_030_261_248 * 2, rel=0.1)


@pytest.mark.parametrize("strategy", ["packed", "padded", "per_width"])
def test_memory_holds_what_an_arm_adds_with_its_copies_and_once_more_while_it_is_checked(strategy: str) -> None:
    def of(widths: list[int]) -> int:
        options = {"groups": 2, "experts_per_group": 3, "keep_groups": 2, "keep_experts": 2, "shared": 0, "seed": 0}
        arm = {"name": "m", "method": "mohge", "twin": "d", **options, "widths": widths, "strategy": strategy}
        arms = [{"name": "d", "method": "dense"}, arm]
        return estimate.estimate(spec(arms=arms, cells={"prefill": {"batch": [1], "length": [1]}})).memory_bytes

    # 5 layers of 3 experts of each of two widths, 3 x 64 numbers a neuron, float32.
    more = 5 * 3 * (1000 + 2000 - 500 - 1000) * 3 * 64 * 4
    # Once in the run, twice in two trees being checked, once in their twin; and copies in both trees of both.
    copied = {"packed": more, "padded": 5 * 6 * (2000 - 1000) * 3 * 64 * 4, "per_width": 0}[strategy]
    assert of([1000, 2000]) - of([500, 1000]) == pytest.approx(4 * more + 4 * copied, rel=1e-3)


def test_disk_grows_with_decisions_and_traces() -> None:
    small, large = (estimate.estimate(spec(cells={"prefill": {"batch": [b], "length": [8]}})) for b in (1, 100))
    assert large.disk_bytes - small.disk_bytes == 2 * 6 * 99 * estimate.BYTES_PER_DECISION
    assert estimate.estimate(spec(trace={"steps": 1})).disk_bytes - estimate.estimate(spec()).disk_bytes == 800_000


def test_lines_say_what_there_is_and_what_is_needed() -> None:
    lines = estimate.estimate(spec(measure={"budget_s": 90, "max_repeats": 3})).lines()
    assert lines[0] == "tiny-run: 2 arms × 1 cells"
    assert "the cells' budgets allow 1 min 30 s" in lines[1]
    assert lines[2].startswith("memory  60")
    assert "available" in lines[2]
    assert "free" in lines[3]
    assert lines[4] == "guessed from 1 GFLOP/s and 1.0 GB/s, measured now on this machine"


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    speed, stream = estimate._speeds(torch.float32, torch.device("cpu"))
    assert 1e8 < speed < 1e14
    assert 1e8 < stream < 1e13


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"source": "tinny"}}, "Nearest name: tiny"),
        ({"arms": [{"name": "dense", "method": "dense", "rate": 1}]}, r"arms\.dense\.rate"),
        ({"prompts": {"source": "/nowhere.jsonl"}}, "/nowhere.jsonl"),
        ({"quality": {"source": "/nowhere.jsonl"}}, "/nowhere.jsonl"),
    ],
)
def test_what_would_end_the_run_ends_the_estimate(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        estimate.estimate(spec(**change))


def test_a_study_is_its_run_and_its_training_once_a_seed() -> None:
    arms = [{"name": "dense", "method": "dense"}, {"name": "mine", "method": "layerroute"}]
    once = estimate.estimate(spec(arms=arms))
    arms[1]["checkpoint"] = "trained"
    found = estimate.estimate(spec(arms=arms, train={"recipe": "layerroute-tiny"}, seeds=[0, 1, 2]))
    # 4 × 96 tokens a forward, logits of all; 12 updates of 2 forwards with gradients, 2.5 each; and held-out figures
    # 3 times: 2 domains, 2 batches of 4, open and routed.
    forward = (384 * 6 * 98_304 + 4 * 4_656 * 256 * 6 + 384 * 33_152) / 1e9
    assert found.training_s == pytest.approx(3 * forward * (2.5 * 24 + 24))
    assert found.guess_s == pytest.approx(3 * once.guess_s + found.training_s)
    assert (found.seeds, found.bound_s) == (3, 3 * once.bound_s)
    # Routers of 65 on 6 layers, LoRA of rank 2 on q, k, v, o: 5,766 numbers, two states of 12 bytes and 4 in the end.
    assert found.disk_bytes == 3 * (once.disk_bytes + 5_766 * 28)
    assert found.lines()[0] == "tiny-run: 2 arms × 1 cells × 3 seeds, each trained first"
    assert "of it training" in found.lines()[1]
    assert "training" not in once.lines()[1]
    wrong = spec(arms=arms, train={"recipe": "layerroute-tiny", "set": {"training.steps": 0}}, seeds=[0])
    with pytest.raises(InputError, match=r"training.steps: must be at least 1, .* \(with set training.steps=0\)"):
        estimate.estimate(wrong)
