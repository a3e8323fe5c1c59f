"""Thresholds that give the rate asked for, against decisions counted one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profiler import arms, calibration, methods, models
from profiler.calibration import CalibrationPrompts, calibration_prompts, met
from profiler.errors import InputError
from profiler.quality import Item
from profiler.records import FORGET_FACTOR
from tests.profiler.hero_checkpoints import write_hero
from tests.profiler.tiny import prompts_of
from workloads.prompts import Prompt

MODEL = models.load("tiny").model
PROMPTS = CalibrationPrompts(prompts_of([30, 40, 17, 50, 60]), 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hero(tmp_path_factory.mktemp("hero") / "checkpoint", MODEL))


def adapters(options: dict[str, Any]) -> list[bool]:
    """Of every token and routed layer, whether the adapter was taken."""
    arm = arms.build(MODEL, "mine", "hero", options, "dense")
    steps: list[Any] = []
    arm.recorded.recorder.mode, arm.recorded.recorder.sink = "record", steps.append
    with torch.no_grad():
        for ids in PROMPTS.ids:
            arm.recorded.model(input_ids=torch.tensor([ids]), use_cache=False)
    return [bool(choice == 0) for step in steps for decision in step.decisions for choice in decision.choice]


@pytest.mark.parametrize("variant", ["full", "no_history", "no_path", "foreign_history"])
@pytest.mark.parametrize("rate", [0.25, 0.7])
def test_the_threshold_gives_the_rate(checkpoint: str, variant: str, rate: float) -> None:
    options = {"checkpoint": checkpoint, "variant": variant, "adapter_rate": rate}
    found, record = met(MODEL, "mine", "hero", options, PROMPTS)
    assert record is not None
    assert "adapter_rate" not in found
    assert found["threshold"] == record.threshold
    taken = adapters(found)
    assert len(taken) == record.decisions == 197 * 3
    assert sum(taken) / len(taken) == pytest.approx(record.achieved, abs=1e-12)
    assert abs(record.achieved - rate) < 0.01
    assert (record.option, record.wanted, record.prompts, record.tokens) == ("adapter_rate", rate, 5, 197)


def test_the_quantile_of_one_pass_alone_would_miss(checkpoint: str) -> None:
    """What earlier layers skip changes the gates of later ones, which is why the rate is counted anew."""
    _, gates, _ = calibration._decided(MODEL, "hero", {"checkpoint": checkpoint}, PROMPTS.ids, lambda share: None)
    guess = calibration._between(gates, 0.7)
    missed = adapters({"checkpoint": checkpoint, "threshold": guess})
    _, record = met(MODEL, "mine", "hero", {"checkpoint": checkpoint, "adapter_rate": 0.7}, PROMPTS)
    assert record is not None
    assert abs(sum(missed) / len(missed) - 0.7) > abs(record.achieved - 0.7)
    assert record.rounds > 1


def test_how_far_the_search_is_at_least_is_told_on_the_way(checkpoint: str) -> None:
    told: list[float] = []
    options = {"checkpoint": checkpoint, "adapter_rate": 0.7}
    _, record = met(MODEL, "mine", "hero", options, PROMPTS, share=told.append)
    assert record is not None
    assert told == sorted(told)
    assert len(told) == record.rounds * record.prompts  # one word a prompt and round
    assert 0 == told[0] < told[-1] < 1


def test_a_guess_lies_between_two_gates() -> None:
    gates = np.array([0.4, 0.1, 0.3, 0.2])
    assert calibration._between(gates, 0.5) == pytest.approx(0.25)
    assert calibration._between(gates, 0.001) == pytest.approx(0.15)
    assert calibration._between(gates, 0.999) == pytest.approx(0.35)


def test_an_arm_that_asks_for_no_rate_is_left_as_it_is() -> None:
    for method, options in (("dense", {}), ("layerroute", {"lora": True}), ("hero", {"adapter_rate": None})):
        assert met(MODEL, "mine", method, options, PROMPTS) == (options, None)


def test_gates_that_are_all_alike_have_no_such_threshold() -> None:
    with pytest.raises(
        InputError, match=r"arms\.mine\.adapter_rate: no threshold was found at which 60\.0% of .* all alike"
    ):
        met(MODEL, "mine", "hero", {"adapter_rate": 0.6}, PROMPTS)


@pytest.mark.parametrize("beside", [{"threshold": 0.5}, {"gates": "open"}, {"gates": {"forced": {"ratio": 0.5}}}])
def test_a_rate_stands_alone(beside: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match="adapter_rate finds the router's threshold; give no `threshold` and no `gates`"
    ):
        methods.configure("hero", {"adapter_rate": 0.6, **beside})


def test_where_there_are_no_prompts_a_rate_is_refused() -> None:
    with pytest.raises(InputError, match="adapter_rate is met on the prompts of a spec; here there are none"):
        arms.tree(MODEL, "hero", methods.configure("hero", {"adapter_rate": 0.6}))


def test_inputs_are_the_held_out_items_or_else_prompts_of_each_domain_in_turn() -> None:
    prompts = [
        Prompt("m0", "math", "ab", "c"),
        Prompt("m1", "math", "de"),
        Prompt("p0", "prose", "f" * 300),
        Prompt("x", "math", ""),
    ]

    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    found = calibration_prompts(prompts, [], letters)
    assert ["".join(map(chr, ids)) for ids in found.ids] == ["ab\nc", "f" * 128, "de"]
    assert found.held_out == 0
    items = [Item("m0", "math", (1, 2), (3,), "ab"), Item("z", "math", (4,), (5, 6), "zz")]
    assert calibration_prompts(prompts, items, letters) == CalibrationPrompts([[1, 2, 3], [4, 5, 6]], 2)


def test_the_record_of_an_arm_has_where_its_threshold_comes_from_and_what_was_learned(checkpoint: str) -> None:
    options, record = met(MODEL, "mine", "hero", {"checkpoint": checkpoint, "adapter_rate": 0.5}, PROMPTS)
    arm = arms.build(MODEL, "mine", "hero", options, "dense", record).record
    assert arm.calibration == record
    assert arm.options["threshold"] == options["threshold"]
    assert arm.options["adapter_rate"] is None
    # η runs from 0 to 4 over the last three of six layers.
    assert arm.constants[FORGET_FACTOR] == pytest.approx({3: 0.5, 4: 1 / (1 + np.exp(-2)), 5: 1 / (1 + np.exp(-4))})
    assert arms.build(MODEL, "mine", "hero", {"variant": "no_history"}, "dense").record.constants == {}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"memory": "dual"}, ("dual", 4 * (64 + 64) * 2)),  # φ(k) and v of two layers; the third writes for nobody
        ({"memory": "matrix"}, ("matrix", 4 * (64 * 64 + 64))),  # S and ζ
        ({"variant": "no_memory_read"}, None),
        ({"variant": "no_history"}, None),
    ],
)
def test_the_record_of_an_arm_has_what_its_memory_holds(
    options: dict[str, Any], wanted: tuple[str, int] | None
) -> None:
    found = arms.build(MODEL, "mine", "hero", options, "dense").record.memory
    assert (found and (found.form, found.bytes_per_row)) == wanted


def test_a_local_head_alone_is_run_from_the_full_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    full = arms.tree(MODEL, "hero", methods.configure("hero", {"checkpoint": checkpoint}))
    local = arms.tree(MODEL, "hero", methods.configure("hero", {"checkpoint": checkpoint, "variant": "no_history"}))
    mine = local.trainables()
    assert 0 < len(mine) < len(full.trainables())
    assert all(torch.equal(parameter, full.trainables()[name]) for name, parameter in mine.items())
    assert local.caveat == "trained as variant full, run as no_history"
    wide = write_hero(tmp_path / "wide", MODEL, "wide_local")
    with pytest.raises(InputError, match="trained as variant wide_local, whose parameters are not those of no_history"):
        methods.load("hero").wrap(
            arms.sibling(MODEL),
            methods.configure("hero", {"checkpoint": str(wide), "variant": "no_history"}),
            full.recorder,
        )
