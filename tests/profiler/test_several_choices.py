"""Decisions that take several choices each: recorded, made into rows of `gates`, and held to rule 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from profiler.errors import RuleError
from profiler.execution.sequences import Sequences, SequenceTracker
from profiler.recorder import Count, Decision, Probe, Recorder, SpanSite, StepData
from profiler.records import TABLES, ArmRecord, Choice
from profiler.stepdata import Place, decision_rows, executed_as_decided

#: `a` has two real rows, `b` one after a pad.
REAL = torch.tensor([[True, True], [False, True]])
SEQUENCES = Sequences(False, 2, [2, 1], [3, 0], ["a", "b"], real_BT=REAL)
ARM = ArmRecord(
    name="arm",
    method="m",
    scope="token",
    signals={"s": "a signal"},
    choices=[Choice(layer=1, site="experts", index=i, name=f"e{i}", flops_per_row=8) for i in range(4)],
)


class Stand(nn.Module):
    """A model whose forward is what the test says."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.base = nn.Embedding(9, 2)
        self.tracker = SequenceTracker(self.base)
        self.tracker.detach()
        self.tracker.current = SEQUENCES
        self.work = work

    def forward(self, ids: Tensor) -> Tensor:
        self.work()
        return self.base(ids)

    @property
    def root(self) -> nn.Module:
        return self

    def probes(self) -> list[Probe]:
        return []

    def spans(self) -> list[SpanSite]:
        return []

    def kv_bytes(self, output: Any) -> None:
        return None


def recorded(work: Any) -> StepData:
    recorder, steps = Recorder(), []
    model = Stand(lambda: work(recorder))
    recorder.attach(model)
    recorder.mode, recorder.sink = "record", steps.append
    model(torch.tensor([[1, 2], [3, 4]]))
    return steps[0]


CHOICE = [[0, 2], [1, -1], [3, 3], [1, 2]]  # the third row is the pad
WEIGHT = [[0.75, 0.25], [1.0, 0.0], [9.0, 9.0], [0.5, 0.5]]


def several(recorder: Recorder) -> None:
    recorder.gate(
        1, "experts", torch.tensor(CHOICE), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor(WEIGHT),
        s=torch.tensor([5.0, 6.0, 7.0, 8.0]),
    )  # fmt: skip


def test_one_and_several_choices_share_a_step() -> None:
    def work(recorder: Recorder) -> None:
        recorder.gate(0, "ffn", torch.tensor([1, 0, 1, 1]), torch.tensor([0.9, 0.1, 0.8, 0.7]), t=torch.arange(4.0))
        several(recorder)
        recorder.gate(2, "ffn", torch.tensor([0, 0, 0, 1]), torch.tensor([0.2, 0.3, 0.4, 0.5]))
        held = np.array(CHOICE, dtype=np.int16), np.zeros(4, np.float32), np.array(WEIGHT, np.float32)
        recorder.gate(3, "experts", *held)

    first, second, third, fourth = recorded(work).decisions
    assert (first.choice.tolist(), first.weights) == ([1, 0, 1, 1], None)
    assert first.signals["t"].tolist() == [0, 1, 2, 3]
    assert second.choice.tolist() == fourth.choice.tolist() == CHOICE
    assert second.weights is not None
    assert fourth.weights is not None
    assert second.weights.tolist() == fourth.weights.tolist() == WEIGHT
    assert second.gate.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert second.signals["s"].tolist() == [5, 6, 7, 8]
    assert (third.choice.tolist(), third.signals) == ([0, 0, 0, 1], {})
    assert second.choice.dtype == np.int16


def test_counts_of_many_choices_come_in_one_tensor_and_none_leaves_no_trace() -> None:
    def work(recorder: Recorder) -> None:
        recorder.entered(1, "experts", 0, torch.tensor([3, 0, 2]))
        recorder.entered(0, "ffn", 1, torch.tensor(0))
        recorder.entered(1, "experts", 2, torch.tensor([4]))

    counts = {key: count.rows for key, count in recorded(work).counts.items()}
    assert counts == {(1, "experts", 0): 3, (1, "experts", 2): 6, (0, "ffn", 1): 0}


def test_a_row_of_gates_lists_what_was_chosen_and_its_weights_pads_apart() -> None:
    data = recorded(several)
    gates, signals = decision_rows(data, ARM, Place("c", 7))[:2]
    found = pa.table({name: gates.columns[name] for name in ("position", "choices", "weights", "gate")}).to_pylist()
    assert [(row["position"], row["choices"], row["weights"]) for row in found] == [
        (3, [0, 2], [0.75, 0.25]),
        (4, [1], [1.0]),
        (0, [1, 2], [0.5, 0.5]),
    ]
    assert gates.columns["choices"].type.value_type == TABLES["gates"].field("choices").type.value_type
    assert gates.columns["weights"].type.value_type == TABLES["gates"].field("weights").type.value_type
    assert signals.columns["s"].to_pylist() == [5, 6, 8]


def stepped(counts: dict[int, int], choice: list[list[int]] = CHOICE) -> StepData:
    decision = Decision(
        1, "experts", np.array(choice, np.int16), np.ones(len(choice), np.float32), {},
        np.array(WEIGHT[: len(choice)], np.float32),
    )  # fmt: skip
    return StepData(
        sequences=SEQUENCES, phase="mixed", wall_ns=1, decisions=[decision], segment_ns={}, device_ns=None, kv=None,
        counts={(1, "experts", e): Count(rows=rows) for e, rows in counts.items()},
    )  # fmt: skip


def test_rule_1_counts_each_choice_of_a_decision() -> None:
    assert executed_as_decided(stepped({0: 1, 1: 2, 2: 2}), ARM) == []
    assert executed_as_decided(stepped({0: 1, 1: 2, 2: 1, 3: 1}), ARM) == [
        "layer 1 experts e2: 1 rows entered, decisions say 2",
        "layer 1 experts e3: 1 rows entered, decisions say 0",
    ]
    unknown = [[0, 2], [1, 7], [3, 3], [1, 2]]
    assert executed_as_decided(stepped({0: 1, 1: 2, 2: 2}, unknown), ARM) == [
        "layer 1 experts: the manifest has no choice 7"
    ]
    with pytest.raises(RuleError, match="3 decisions were recorded and the step has 4"):
        executed_as_decided(stepped({}, CHOICE[:3]), ARM)
