"""The recorder on a stand-in whose every number is known, and on real decoders: what is seen, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from profiler import arms, methods, recorder, segment_clocks
from profiler.execution.sequences import RowView, SequenceTracker
from profiler.recorder import Probe, Recorder, SpanSite, StepData
from tests.profiler.tiny import padded, prompts_of, random_model


class Stand(nn.Module):
    """Embeds, then does what the test says; a `Recordable` by itself."""

    def __init__(self, work: Callable[[Stand, Tensor], None]) -> None:
        super().__init__()
        self.base = nn.Embedding(50, 4)
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.work = work
        self.recorder = Recorder()
        self.steps: list[StepData] = []
        self.tracker = SequenceTracker(_Named(self))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.named(input_ids=input_ids, attention_mask=attention_mask)
        hidden: Tensor = self.base(input_ids)
        self.work(self, hidden)
        return hidden

    @property
    def root(self) -> nn.Module:
        return self

    def probes(self) -> list[Probe]:
        return [Probe(0, "ffn", 1, self.first), Probe(-1, "head", 0, self.head, whole=True)]

    def spans(self) -> list[SpanSite]:
        return [SpanSite(self.first, "ffn", 0)]

    def kv_bytes(self, output: Any) -> tuple[int, int] | None:
        return (2 * output.numel(), output.numel())


class _Named(nn.Module):
    """The tracker reads its inputs by keyword off a base model's forward."""

    def __init__(self, owner: Stand) -> None:
        super().__init__()
        object.__setattr__(owner, "named", self)

    def forward(self, **kwargs: Any) -> None:
        return None


def stand(work: Callable[[Stand, Tensor], None], mode: recorder.Mode = "record") -> Stand:
    made = Stand(work)
    made.recorder.attach(made)
    made.recorder.mode, made.recorder.sink = mode, made.steps.append
    return made


IDS = torch.arange(6).reshape(2, 3)


# -- decisions ----------------------------------------------------------------------------------------


def test_decisions_arrive_as_they_were_given() -> None:
    def work(model: Stand, hidden: Tensor) -> None:
        gate = model.recorder.gate
        gate(3, "block", torch.tensor([1, 0]), torch.tensor([0.75, 0.25]), logit=torch.tensor([1.5, -1.5]))
        gate(3, "block", torch.tensor([[0], [999]]), torch.tensor([[0.5], [0.125]], dtype=torch.float64))
        gate(4, "experts", torch.arange(9), torch.zeros(9), a=torch.arange(9.0), b=-torch.arange(9.0))

    model = stand(work)
    model(IDS)
    first, second, third = model.steps[0].decisions
    assert (first.layer, first.site, first.choice.tolist(), first.gate.tolist()) == (3, "block", [1, 0], [0.75, 0.25])
    assert {name: values.tolist() for name, values in first.signals.items()} == {"logit": [1.5, -1.5]}
    assert (second.choice.tolist(), second.gate.tolist(), second.signals) == ([0, 999], [0.5, 0.125], {})
    assert third.choice.tolist() == list(range(9))
    assert {n: v.tolist() for n, v in third.signals.items()} == {"a": [*range(9)], "b": [-i for i in range(9)]}
    assert [d.choice.dtype for d in (first, second, third)] == ["int16"] * 3
    assert model.steps[0].dropped == 0


def test_decisions_the_host_holds_come_in_their_place_and_take_no_room_in_the_buffer() -> None:
    held = np.array([1, 0], np.int16), np.array([0.75, 0.25], np.float32)

    def work(model: Stand, hidden: Tensor) -> None:
        model.recorder.gate(0, "block", *held, logit=np.array([1.5, -1.5], np.float32))
        model.recorder.gate(1, "ffn", torch.tensor([1, 1]), torch.tensor([0.5, 0.625]), logit=torch.tensor([2.0, 4.0]))
        model.recorder.gate(2, "block", *held)

    model = stand(work)
    model(IDS)
    assert [
        (d.layer, d.site, d.choice.tolist(), d.gate.tolist(), {n: v.tolist() for n, v in d.signals.items()})
        for d in model.steps[0].decisions
    ] == [
        (0, "block", [1, 0], [0.75, 0.25], {"logit": [1.5, -1.5]}),
        (1, "ffn", [1, 1], [0.5, 0.625], {"logit": [2.0, 4.0]}),
        (2, "block", [1, 0], [0.75, 0.25], {}),
    ]
    assert model.recorder._buffer.numbers.shape == (3, 2)


def test_each_step_has_its_own_decisions_though_buffers_are_reused() -> None:
    calls = iter(range(10))

    def work(model: Stand, hidden: Tensor) -> None:
        number = next(calls)
        for layer in range(1 + number % 3):
            model.recorder.gate(layer, "block", torch.full((2,), number), torch.full((2,), number / 16))

    model = stand(work)
    for _ in range(6):
        model(IDS)
    for number, step in enumerate(model.steps):
        assert [d.layer for d in step.decisions] == list(range(1 + number % 3))
        assert all(d.choice.tolist() == [number] * 2 for d in step.decisions)
        assert all(d.gate.tolist() == [number / 16] * 2 for d in step.decisions)


def test_a_step_without_decisions_is_a_step() -> None:
    model = stand(lambda model, hidden: None)
    model(IDS)
    assert model.steps[0].decisions == []
    assert (model.steps[0].phase, model.steps[0].sequences.rows_S) == ("prefill", [3, 3])
    assert model.steps[0].kv == (48, 24)


def test_gates_with_a_gradient_are_recorded_and_keep_it() -> None:
    weight = torch.ones(2, requires_grad=True)

    def work(model: Stand, hidden: Tensor) -> None:
        model.recorder.gate(0, "block", torch.ones(2), torch.sigmoid(weight), logit=weight * 2)

    model = stand(work)
    model(IDS).sum().backward()
    assert model.steps[0].decisions[0].signals["logit"].tolist() == [2.0, 2.0]
    assert not model.recorder._buffer.numbers.requires_grad


def test_a_gate_that_is_no_number_arrives_as_one_that_is_none() -> None:
    model = stand(lambda m, _: m.recorder.gate(0, "block", torch.tensor([1, 1]), torch.tensor([float("nan"), 1.0])))
    model(IDS)
    assert str(model.steps[0].decisions[0].gate.tolist()) == "[nan, 1.0]"


def test_buffers_are_bounded_and_what_does_not_fit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_NUMBERS", 30)  # ten decisions of choice, gate and one signal

    def work(model: Stand, hidden: Tensor) -> None:
        for layer in range(5):
            size = 4 if layer < 2 else 1
            model.recorder.gate(layer, "s", torch.full((size,), layer), torch.zeros(size), x=torch.zeros(size))
        model.recorder.gate(9, "s", torch.ones(1000), torch.ones(1000), x=torch.ones(1000))

    model = stand(work)
    for _ in range(3):
        model(IDS)
    for step in model.steps:
        assert [(d.layer, d.choice.tolist()) for d in step.decisions] == [
            (0, [0] * 4),
            (1, [1] * 4),
            (2, [2]),
            (3, [3]),
        ]
        assert step.dropped == 1 + 1000
    assert model.recorder._buffer.numbers.numel() <= 30


def test_one_wide_decision_does_not_make_the_narrow_ones_wide() -> None:
    """A long prompt's token decisions beside a sequence's: room is for what is recorded, not for layers × widest."""

    def work(model: Stand, hidden: Tensor) -> None:
        model.recorder.gate(0, "ffn", torch.ones(100_000), torch.ones(100_000))
        for layer in range(1, 200):
            model.recorder.gate(layer, "block", torch.ones(2), torch.ones(2))

    model = stand(work)
    model(IDS)
    assert len(model.steps[0].decisions) == 200
    assert model.recorder._buffer.numbers.numel() < 1_000_000


# -- rows ---------------------------------------------------------------------------------------------


def test_rows_are_counted_where_they_enter_and_pads_are_apart() -> None:
    def work(model: Stand, hidden: Tensor) -> None:
        model.first(hidden)
        model.head(hidden[:, -1:])
        with model.recorder.executing(RowView(rows=1, pads=2, context=1, context_full=1)):
            model.first(hidden[1:])

    model = stand(work)
    # Rows of 3 and 1 tokens, padded left: causal contexts 1 + 2 + 3 and 1; full ones 3 × 3 and 1 × 1.
    model(IDS, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1]]))
    counts = model.steps[0].counts
    ffn, head = counts[0, "ffn", 1], counts[-1, "head", 0]
    assert (ffn.rows, ffn.padded, ffn.context, ffn.context_full) == (4 + 1, 2 + 2, 7 + 1, 10 + 1)
    assert (head.rows, head.padded) == (2, 0)


def test_what_did_not_run_is_not_counted() -> None:
    model = stand(lambda model, hidden: None)
    model(IDS)
    assert model.steps[0].counts == {}


# -- time ---------------------------------------------------------------------------------------------


class Clock:
    """Nanoseconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000

    def perf_counter_ns(self) -> int:
        return self.now


def test_segments_are_self_time_to_the_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (recorder, segment_clocks):
        monkeypatch.setattr(module, "time", clock)

    def spend(ns: int) -> None:
        clock.now += ns

    def work(model: Stand, hidden: Tensor) -> None:
        spend(5)
        with model.recorder.span("attention", 0):
            spend(10)
            with model.recorder.span("kv", 0):
                spend(100)
                with model.recorder.span("norm", -1):
                    spend(3)
                spend(200)
            spend(20)
            with model.recorder.span("kv", 0):
                spend(40)
        spend(7)
        with model.recorder.span("attention", 1):
            spend(1)

    model = stand(work)
    model(IDS)
    assert model.steps[0].segment_ns == {
        ("attention", 0): 30,
        ("kv", 0): 340,
        ("norm", -1): 3,
        ("attention", 1): 1,
    }
    assert model.steps[0].wall_ns == 5 + 374 + 7
    assert model.steps[0].device_ns is None


def test_what_recording_a_decision_takes_is_in_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (recorder, segment_clocks):
        monkeypatch.setattr(module, "time", clock)

    def slowly(value: Tensor) -> Tensor:
        clock.now += 50
        return value.float()

    monkeypatch.setattr(recorder, "_column", slowly)

    def work(model: Stand, hidden: Tensor) -> None:
        with model.recorder.span("router", 2):
            clock.now += 10
            model.recorder.gate(2, "ffn", torch.tensor([1, 0]), torch.tensor([0.7, 0.2]), b=torch.tensor([3.0, 4.0]))
            clock.now += 4

    model = stand(work)
    model(IDS)
    (step,) = model.steps
    assert step.segment_ns == {("router", 2): 14}
    assert step.wall_ns == 14 + 3 * 50
    assert step.decisions[0].signals["b"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("method", ["dense", "layerroute"])
def test_segments_of_a_real_step_are_within_its_wall_time(method: str) -> None:
    handle = arms.tree(random_model("llama", dtype=torch.float32), method, methods.configure(method, {}))
    steps: list[StepData] = []
    handle.recorder.attach(handle)
    handle.recorder.mode, handle.recorder.sink = "record", steps.append
    for _ in range(3):
        handle.model(**padded(prompts_of([9, 4, 1]), "left"))
    for step in steps:
        assert all(ns >= 0 for ns in step.segment_ns.values())
        assert 0 < sum(step.segment_ns.values()) <= step.wall_ns
        segments = {segment for segment, _ in step.segment_ns}
        assert segments == {"embedding", "attention", "ffn", "norm", "head"} | ({"router"} & {*segments})
        assert ("router" in segments) == (method == "layerroute")
        assert {layer for segment, layer in step.segment_ns if segment == "norm"} == {-1}  # a layer's own: traces only
        ran = {layer for segment, layer in step.segment_ns if segment == "attention"}
        assert ran == ({*range(6)} if method == "dense" else {0, 1, 4, 5})  # 6 // 3 and the one after it start closed


# -- left alone ---------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_off_nothing_arrives_and_outputs_are_the_same_as_recorded() -> None:
    backbone = random_model("llama", dtype=torch.float32)
    batch = padded(prompts_of([9, 4, 1]), "left")
    plain = backbone(**batch).logits
    handle = arms.tree(backbone, "dense", methods.configure("dense", {}))
    bare_hooks = hooks(handle.model)
    steps: list[StepData] = []
    handle.recorder.attach(handle)
    handle.recorder.sink = steps.append
    assert torch.equal(handle.model(**batch).logits, plain)
    assert (steps, handle.recorder.recording) == ([], False)
    handle.recorder.mode = "record"
    assert torch.equal(handle.model(**batch).logits, plain)
    assert len(steps) == 1
    handle.recorder.detach()
    assert hooks(handle.model) == bare_hooks
    assert torch.equal(handle.model(**batch).logits, plain)
    assert len(steps) == 1
    handle.recorder.attach(handle)
    handle.recorder.mode, handle.recorder.sink = "record", steps.append
    handle.model(**batch)
    assert len(steps) == 2


def test_off_gates_and_spans_cost_nothing_and_keep_nothing() -> None:
    def work(model: Stand, hidden: Tensor) -> None:
        model.recorder.gate(0, "block", torch.ones(2), torch.ones(2))
        with model.recorder.span("router", 0):
            model.first(hidden)

    model = stand(work, mode="off")
    model(IDS)
    assert model.steps == []
    assert model.recorder._buffer.numbers.numel() == 0
    assert model.recorder.span("router", 0) is model.recorder.span("kv", 1)


def test_one_recorder_serves_one_tree() -> None:
    model = stand(lambda model, hidden: None)
    with pytest.raises(ValueError, match="attached already"):
        model.recorder.attach(model)


def test_recording_is_true_only_inside_a_recorded_step() -> None:
    seen = []
    model = stand(lambda model, hidden: seen.append(model.recorder.recording))
    for mode in ("off", "record", "trace", "off", "record"):
        model.recorder.mode = mode  # type: ignore[assignment]
        model(IDS)
        assert not model.recorder.recording
    assert seen == [False, True, False, False, True]


@pytest.mark.parametrize("mode", ["record", "trace"])
def test_an_error_inside_a_step_leaves_no_step_and_the_next_one_is_whole(mode: recorder.Mode) -> None:
    failing = [True]

    def work(model: Stand, hidden: Tensor) -> None:
        with model.recorder.span("attention", 0):
            model.recorder.gate(0, "block", torch.ones(2), torch.ones(2))
            model.first(hidden if not failing[0] else hidden[..., :1])  # the module's own segment stays open

    model = stand(work, mode)
    with pytest.raises(RuntimeError):
        model(IDS)
    assert not model.recorder.recording
    assert model.recorder._range == []
    assert model.steps == []
    failing[0] = False
    model.recorder.mode = "record"
    model(IDS)
    (step,) = model.steps
    assert [d.choice.tolist() for d in step.decisions] == [[1, 1]]
    assert step.counts[0, "ffn", 1].rows == 6
    assert set(step.segment_ns) == {("attention", 0), ("ffn", 0)}


def test_the_phase_is_what_the_caller_says_else_what_the_cache_tells() -> None:
    model = stand(lambda model, hidden: None)
    model.recorder.phase = "mixed"
    model(IDS)
    model.recorder.phase = None
    model(IDS)
    assert [step.phase for step in model.steps] == ["mixed", "prefill"]


# -- traced -------------------------------------------------------------------------------------------


def test_trace_mode_opens_named_ranges_and_records_nothing() -> None:
    handle = arms.tree(random_model("llama", dtype=torch.float32), "layerroute", methods.configure("layerroute", {}))
    steps: list[StepData] = []
    handle.recorder.attach(handle)
    handle.recorder.mode, handle.recorder.sink = "trace", steps.append
    handle.recorder.label = "gatewise.step/7/mine"
    batch = padded(prompts_of([4, 4]), "left")
    with torch.profiler.profile() as profile, torch.no_grad():
        handle.model(**batch)
    events = profile.events()
    assert events is not None
    names = [event.name for event in events]
    assert names.count("gatewise.step/7/mine") == 1
    assert {n for n in names if n.startswith("gatewise/")} == {
        *(f"gatewise/router/{i}" for i in range(6)),
        *(f"gatewise/{segment}/{i}" for segment in ("attention", "ffn", "norm") for i in (0, 1, 4, 5)),
        *(f"gatewise/{segment}/-1" for segment in ("embedding", "norm", "head")),
    }
    (step,) = [event for event in events if event.name == "gatewise.step/7/mine"]
    inside = [event for event in events if event.name.startswith("gatewise/")]
    assert all(step.time_range.start <= e.time_range.start <= e.time_range.end <= step.time_range.end for e in inside)
    assert steps == []
    assert handle.recorder._buffer.numbers.numel() == 0
