"""One cell measured: order, pairing, teacher forcing, stopping, and the rules that broken methods break."""

from __future__ import annotations

import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from profiler import arms, measure, recorder
from profiler.arms import Arm
from profiler.measure import CellInputs, CellRun, Limits, Outcome
from profiler.records import CellRecord, Manifest, RuleRecord
from profiler.store import Run
from profiler.writer import RunWriter
from tests.profiler.gated_methods import ComputesAll, CountsTwice, Fickle, MeanGate, NotANumber, named
from tests.profiler.tiny import VOCABULARY, random_model

LAYERS = 3


@pytest.fixture(scope="module")
def backbone() -> Any:
    return random_model("llama", dtype=torch.float32, num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes a quarter of a second with torch loaded, and these tests measure hundreds of cells."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    made = RunWriter(tmp_path / "run", Manifest(name="t", created_utc="x", pid=1, host="h"))
    yield made
    if made._thread.is_alive():
        made.finish("complete")


def pair(backbone: Any, method: str = "layerroute", **options: Any) -> list[Arm]:
    return [
        arms.build(backbone, "dense", "dense", {}, None),
        arms.build(backbone, "mine", method, options, "dense"),
    ]


def inputs(batch: int = 2, length: int = 6, new_tokens: int = 0) -> CellInputs:
    generator = torch.Generator().manual_seed(batch + length)
    phase = "decode" if new_tokens else "prefill"
    cell = CellRecord(name=f"{phase}-cell", phase=phase, batch=batch, length=length, new_tokens=new_tokens)
    return CellInputs(
        cell=cell,
        ids_BT=torch.randint(1, VOCABULARY, (batch, length), generator=generator),
        continuation_BN=torch.randint(1, VOCABULARY, (batch, new_tokens), generator=generator) if new_tokens else None,
        requests=[f"r{i:04d}" for i in range(batch)],
    )


def limits(**more: Any) -> Limits:
    given = {"warmup": 1, "min_repeats": 1, "max_repeats": 3, "target_ci": 1e-9, "budget_s": 600.0, "seed": 0}
    return Limits(**{**given, **more})


def measured(
    given: CellInputs, chosen: list[Arm], writer: RunWriter, *, index: int = 0, **more: Any
) -> tuple[Outcome, Run]:
    outcome = CellRun(given, chosen, limits(**more), writer, index).run()
    writer.flush()
    writer.save_manifest()
    return outcome, Run(writer.folder)


def rule(outcome: Outcome, number: int, arm: str = "mine") -> RuleRecord:
    (found,) = [record for record in outcome.rules if (record.rule, record.arm) == (number, arm)]
    return found


# -- what is stepped ----------------------------------------------------------------------------------


def test_every_unit_steps_once_a_repeat_in_an_order_drawn_anew_for_each_token(backbone: Any, writer: RunWriter) -> None:
    given = inputs(new_tokens=3)
    _, run = measured(given, pair(backbone), writer, max_repeats=9)
    steps = run.frame("steps")
    timed = steps[steps["pass"] != "warmup"]
    assert len(steps[steps["pass"] == "warmup"]) == 4 * 3
    assert set(timed["repeat"]) == set(range(9))
    for (repeat, _), group in timed.groupby(["repeat", "index"]):
        units = 4 if repeat < 8 else 2  # past eight repeats only bare steps go on
        assert sorted(group["order"]) == list(range(units))
        assert len(set(zip(group["arm"], group["pass"], strict=True))) == units
    assert steps["step"].is_unique
    assert steps["step"].tolist() == sorted(steps["step"])
    orders = {tuple(group.sort_values("order")["arm"]) for _, group in timed.groupby(["repeat", "index"])}
    assert len(orders) > 3


def places(run: Run) -> pd.DataFrame:
    steps = run.frame("steps")
    return steps[steps["pass"] != "warmup"].assign(unit=lambda f: f["arm"] + " " + f["pass"])


def test_order_is_seeded_and_balanced(backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [arms.build(backbone, name, "dense", {}, None) for name in ("one", "other")]
    monkeypatch.setattr(measure, "INSTRUMENTED_REPEATS", 10**6)
    step_once(chosen)
    monkeypatch.setattr(measure, "prefill", lambda handle, given: SAID)

    def order(name: str, seed: int, index: int = 0) -> list[str]:
        writer = RunWriter(tmp_path / name, Manifest(name="t", created_utc="x", pid=1, host="h"))
        _, run = measured(inputs(), chosen, writer, index=index, seed=seed, max_repeats=160)
        writer.finish("complete")
        return list(places(run).sort_values(["repeat", "order"])["unit"])

    one = order("one", 1)
    assert order("same", 1) == one
    assert order("seed", 2) != one
    assert order("cell", 1, index=1) != one
    # 160 draws, four places: a unit is expected 40 times in each, with a standard deviation of 5.5.
    counts = Counter((place % 4, unit) for place, unit in enumerate(one))
    assert len(counts) == 16
    assert 20 < min(counts.values()) <= max(counts.values()) < 60


def step_once(chosen: list[Arm]) -> None:
    """So that every tree knows the rows of its last step, which faked steps then have too."""
    for arm in chosen:
        for handle in (arm.bare, arm.recorded):
            measure.prefill(handle, inputs())


def test_prefill_arms_get_the_same_ids_and_answer_for_the_last_token_only(backbone: Any, writer: RunWriter) -> None:
    given, chosen = inputs(batch=3, length=5), pair(backbone)
    seen = watch(chosen)
    measured(given, chosen, writer)
    assert len(seen) == 4 * 4  # a warm-up and three repeats of four units
    assert all(torch.equal(call["ids"], given.ids_BT) for call in seen)
    assert all(call["logits"].shape == (3, 1, VOCABULARY) for call in seen)
    assert not any(call["logits"].requires_grad for call in seen)


def watch(chosen: list[Arm]) -> list[dict[str, Any]]:
    """Every forward of the arms from now on: who, which ids, how long the cache was before, logits."""
    seen: list[dict[str, Any]] = []

    def before(who: str) -> Callable[..., None]:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            cache = kwargs.get("cache")
            past = cache.get_seq_length() if cache is not None else 0
            seen.append({"who": who, "ids": kwargs["input_ids"].clone(), "past": past})

        return note

    def after(module: Any, args: Any, output: Any) -> None:
        seen[-1]["logits"] = output.logits.clone()

    for arm in chosen:
        for what, handle in (("bare", arm.bare), ("instrumented", arm.recorded)):
            handle.model.register_forward_pre_hook(before(f"{arm.name} {what}"), with_kwargs=True)
            handle.model.register_forward_hook(after)
    return seen


def test_decode_is_teacher_forced_from_the_same_context_in_every_repeat(backbone: Any, writer: RunWriter) -> None:
    given, chosen = inputs(batch=2, length=5, new_tokens=3), pair(backbone, "layerroute", gates=forced("random"))
    seen = watch(chosen)
    _, run = measured(given, chosen, writer, max_repeats=3)
    filling, steps = seen[:4], seen[4:]
    assert [call["past"] for call in filling] == [0] * 4
    assert {call["who"] for call in filling} == {"dense bare", "dense instrumented", "mine bare", "mine instrumented"}
    assert all(torch.equal(call["ids"], given.ids_BT) for call in filling)
    for place, call in enumerate(steps):
        index = place // 4 % 3
        assert call["past"] == 5 + index
        assert torch.equal(call["ids"], given.continuation_BN[:, index : index + 1])
    # Not only the lengths: what is in the caches is the same again, so every repeat answers the same, digit by digit.
    for who in {call["who"] for call in steps}:
        mine = [call["logits"] for call in steps if call["who"] == who]
        for first, later in itertools.product(range(3), range(1, 4)):
            assert torch.equal(mine[first], mine[3 * later + first])
    frame = run.frame("steps")
    for index, group in frame.groupby("index"):
        assert set(group["rows"]) == {2}
        assert set(group["context"]) == {2 * (5 + index + 1)}


def test_an_arm_without_a_cache_is_given_the_whole_sequence_each_step(backbone: Any, writer: RunWriter) -> None:
    given = inputs(batch=2, length=5, new_tokens=3)
    chosen = pair(backbone, "layerroute", gates=forced("random"), kv_policy="recompute")
    fed: list[Any] = []
    chosen[1].bare.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append((kwargs["input_ids"], kwargs.get("cache"))), with_kwargs=True
    )
    outcome, run = measured(given, chosen, writer, max_repeats=2)
    assert given.continuation_BN is not None
    whole = torch.cat([given.ids_BT, given.continuation_BN], dim=1)
    assert len(fed) == 1 + 3 * 3  # the filling of caches; a warm-up and two repeats of three tokens
    assert all(cache is None for _, cache in fed)
    for place, (ids, _) in enumerate(fed[1:]):
        assert torch.equal(ids, whole[:, : 6 + place % 3])
    assert all(found.passed for found in outcome.rules)
    steps = run.frame("steps")
    mine = steps[steps["arm"] == "mine"]
    for index, group in mine.groupby("index"):
        assert set(group["rows"]) == {2 * (6 + index)}
        assert set(group["context"]) == {(6 + index) * (7 + index)}  # two sequences of n(n + 1)/2
    gates = run.frame("gates")
    assert set(gates["phase"]) == {"decode"}
    assert gates.groupby("step")["rows"].max().tolist() == [6, 7, 8]
    kv = run.frame("kv")
    assert set(kv.loc[kv["arm"] == "mine", "allocated_bytes"]) == {0}
    # 2 sequences, 3 layers, K and V of 16 float32 numbers a token
    assert kv.loc[kv["arm"] == "dense", "live_bytes"].tolist() == [2 * n * 3 * 2 * 16 * 4 for n in (6, 7, 8)]


def forced(pattern: str) -> dict[str, Any]:
    return {"forced": {"ratio": 0.5, "pattern": pattern, "seed": 3}}


# -- what is recorded ---------------------------------------------------------------------------------


def test_decisions_and_rows_are_written_once_and_segments_for_every_instrumented_step(
    backbone: Any, writer: RunWriter
) -> None:
    given = inputs(batch=2, length=4, new_tokens=2)
    _, run = measured(given, pair(backbone), writer, max_repeats=4)
    steps = run.frame("steps")
    watched = steps[steps["pass"] == "instrumented"]
    first = watched[watched["repeat"] == 0]
    gates = run.frame("gates")
    assert set(gates["step"]) == set(first.loc[first["arm"] == "mine", "step"])
    assert len(gates) == 2 * LAYERS * 2  # steps × layers × sequences
    assert set(gates["rows"]) == {1}
    assert set(gates["position"]) == {-1}
    assert set(run.frame("rows")["step"]) == set(first["step"])
    assert set(run.frame("kv")["step"]) == set(first["step"])
    assert set(run.frame("segments")["step"]) == set(watched["step"])
    signals = run.frame("signals-layerroute")
    assert signals.groupby("layer")["logit"].unique().map(list).to_dict() == {0: [1.0], 1: [-1.0], 2: [1.0]}


def test_rows_hand_counted_for_one_skipping_request(backbone: Any, writer: RunWriter) -> None:
    """Three layers, one of three skipped by all: the two that run take every row, the third takes none."""
    given = inputs(batch=2, length=4)
    _, run = measured(given, pair(backbone, "static_depth", layers=[1]), writer)
    rows = run.frame("rows")
    mine = rows[(rows["arm"] == "mine") & (rows["site"] == "block")].sort_values("layer")
    assert mine[["layer", "choice", "rows", "padded"]].values.tolist() == [[0, 1, 8, 0], [2, 1, 8, 0]]
    assert set(mine["context"]) == {2 * (1 + 2 + 3 + 4)}
    assert set(mine["context_full"]) == {2 * 4 * 4}
    head = rows[rows["site"] == "head"]
    assert set(head["rows"]) == {2}


def test_nothing_but_steps_happens_while_steps_are_timed(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    chosen = pair(backbone)
    submit, drain, real = writer.submit, writer.drain, measure.prefill

    def submitting(*args: Any, **kwargs: Any) -> bool:
        events.append("submit")
        return submit(*args, **kwargs)

    def draining() -> None:
        drain()
        assert writer._queue.empty()
        events.append("drain")

    def stepping(handle: Any, given: CellInputs) -> Any:
        events.append("step" if not gc.isenabled() else "step with garbage collection")
        return real(handle, given)

    monkeypatch.setattr(writer, "submit", submitting)
    monkeypatch.setattr(writer, "drain", draining)
    monkeypatch.setattr(measure, "prefill", stepping)
    CellRun(inputs(), chosen, limits(max_repeats=2), writer, 0).run()
    assert events == ["drain", "step", "step", "step", "step", "submit"] * 3


# -- when it stops ------------------------------------------------------------------------------------


#: What a step that is not run says.
SAID = SimpleNamespace(logits=torch.zeros(1, 1, 2))


class Clock:
    """Time that only steps move: `step(arm name, instrumented, number of the step)` gives seconds."""

    def __init__(self, step: Callable[[str, bool, int], float]) -> None:
        self.now, self.count, self.step = 0.0, 0, step

    def monotonic(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    def prefill(self, handle: Any, given: CellInputs) -> Any:
        self.now += self.step(handle.arm_name, handle.recorder.mode != "off", self.count)
        self.count += 1
        return SAID


def faked(
    backbone: Any,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[str, bool, int], float],
    chosen: list[Arm] | None = None,
) -> list[Arm]:
    chosen = chosen or pair(backbone)
    step_once(chosen)
    for arm in chosen:
        arm.bare.arm_name = arm.recorded.arm_name = arm.name  # type: ignore[attr-defined]
    clock = Clock(step)
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "prefill", clock.prefill)
    return chosen


def steady(arm: str, instrumented: bool, count: int) -> float:
    return {"dense": 0.25, "mine": 0.2}[arm] * (1.1 if instrumented else 1.0)


def noisy(arm: str, instrumented: bool, count: int) -> float:
    return 0.25 * (1 + (count * 37 % 11) / 10)


@pytest.mark.parametrize(
    ("step", "settings", "stopped", "repeats"),
    [
        (steady, {"target_ci": 0.01, "max_repeats": 50}, "interval", 5),  # five at the least
        (steady, {"target_ci": 0.01, "max_repeats": 50, "min_repeats": 7}, "interval", 7),
        (steady, {"target_ci": 0.01, "max_repeats": 4}, "repeats", 4),
        (noisy, {"target_ci": 0.01, "max_repeats": 12}, "repeats", 12),
        # A repeat of all four units takes 2 × 0.25 + 0.2 × … = 0.945 s; warm-up and three repeats take 3.78, a fourth
        # would end at 4.725.
        (steady, {"target_ci": 1e-12, "max_repeats": 50, "budget_s": 4.7, "min_repeats": 40}, "budget", 3),
        (steady, {"target_ci": 1e-12, "max_repeats": 50, "budget_s": 4.8, "min_repeats": 40}, "budget", 4),
        (steady, {"max_repeats": 50, "budget_s": 0.1}, "budget", 1),  # one repeat in any case
    ],
)
def test_the_stopping_rule(
    backbone: Any,
    writer: RunWriter,
    monkeypatch: pytest.MonkeyPatch,
    step: Any,
    settings: dict[str, Any],
    stopped: str,
    repeats: int,
) -> None:
    chosen, given = faked(backbone, monkeypatch, step), inputs()
    outcome, run = measured(given, chosen, writer, **settings)
    assert (given.cell.stopped, given.cell.repeats) == (stopped, repeats)
    steps = run.frame("steps")
    assert steps[steps["pass"] == "bare"].groupby("arm").size().to_dict() == {"dense": repeats, "mine": repeats}
    assert not given.cell.done  # that is the store's to say, once all is on disk
    assert len(outcome.twin_medians_ns["dense"]) == repeats


def test_without_a_twin_there_is_no_interval_to_end_a_cell(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [arms.build(backbone, "dense", "dense", {}, None)]
    chosen, given = faked(backbone, monkeypatch, steady, alone), inputs()
    measured(given, chosen, writer, target_ci=1.0, max_repeats=20)
    assert (given.cell.stopped, given.cell.repeats) == ("repeats", 20)


def test_all_arms_must_be_narrow_before_the_interval_ends_a_cell(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = [*pair(backbone), arms.build(backbone, "wild", "layerroute", {}, "dense")]

    def step(arm: str, instrumented: bool, count: int) -> float:
        return noisy(arm, instrumented, count) if arm == "wild" else steady(arm, instrumented, count)

    given = inputs()
    measured(given, faked(backbone, monkeypatch, step, three), writer, target_ci=0.05, max_repeats=15)
    assert (given.cell.stopped, given.cell.repeats) == ("repeats", 15)


def test_warm_up_takes_half_the_budget_at_most(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs()
    settings = {"warmup": 1000, "budget_s": 9.6, "min_repeats": 40, "max_repeats": 50}
    _, run = measured(given, faked(backbone, monkeypatch, steady), writer, **settings)
    steps = run.frame("steps")
    # Ten repeats of 0.945 s fit: six warm up (the sixth begins before half is spent), four are timed.
    assert steps[steps["pass"] == "warmup"]["repeat"].nunique() == 6
    assert (given.cell.stopped, given.cell.repeats) == ("budget", 4)
    assert given.cell.warmup_s == pytest.approx(6 * 0.945)


def test_progress_is_told_between_repeats_and_reaches_the_whole(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    chosen = faked(backbone, monkeypatch, steady)
    CellRun(inputs(), chosen, limits(warmup=2, max_repeats=4), writer, 0, told.append).run()
    assert told == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_recorders_cost_is_that_of_its_pairs(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, _ = measured(inputs(), faked(backbone, monkeypatch, steady), writer, min_repeats=6, max_repeats=6)
    found = rule(outcome, 14)
    assert found.passed
    assert found.figures == pytest.approx({"cost": 0.1, "low": 0.1, "high": 0.1, "n": 6})
    assert found.detail == "recorder on ÷ off − 1 = +10.0% [+10.0%, +10.0%], n = 6"
    assert outcome.twin_medians_ns == {"dense": [250_000_000.0] * 6}


def test_a_cost_from_too_few_pairs_has_no_interval_and_says_so(backbone: Any, writer: RunWriter) -> None:
    outcome, run = measured(inputs(), pair(backbone), writer, max_repeats=2)
    writer.manifest.rules = outcome.rules
    writer.save_manifest()
    (read,) = [r for r in Run(run.path).manifest.rules if (r.rule, r.arm) == (14, "mine")]
    assert (read.figures["low"], read.figures["high"], read.figures["n"]) == (None, None, 2)
    assert "too few pairs for an interval" in read.detail


# -- rules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [0, 2])
def test_a_right_method_keeps_the_rules(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch, new_tokens: int
) -> None:
    chosen = pair(backbone, named(MeanGate, monkeypatch))
    outcome, _ = measured(inputs(batch=4, new_tokens=new_tokens), chosen, writer)
    assert [record.passed for record in outcome.rules] == [True] * 6
    steps = 3 * max(new_tokens, 1)
    assert rule(outcome, 1).figures == {"steps": steps, "differences": 0, "dropped": 0, "repeats_lost": 0}
    assert rule(outcome, 6).figures == {"steps": steps, "changed": 0}
    assert {record.cell for record in outcome.rules} == {f"{'decode' if new_tokens else 'prefill'}-cell"}


@pytest.mark.parametrize("new_tokens", [0, 2])
@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (ComputesAll, r"layer \d block run: \d+ rows entered, decisions say \d+"),
        (CountsTwice, r"layer 0 block: the decisions govern \d+ rows, the step has \d+"),
        (NotANumber, "layer 1 block: the gate of request 'r0000' is not finite"),
    ],
)
def test_rows_that_were_not_decided_fail_rule_1(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch, method: Any, sentence: str, new_tokens: int
) -> None:
    chosen = pair(backbone, named(method, monkeypatch))
    outcome, _ = measured(inputs(batch=4, new_tokens=new_tokens), chosen, writer)
    found = rule(outcome, 1)
    assert not found.passed
    assert re.search(sentence, found.detail)
    assert found.figures["differences"] >= 3
    assert rule(outcome, 1, "dense").passed


def test_a_method_that_changes_its_mind_between_repeats_fails_rule_6(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, _ = measured(inputs(), pair(backbone, named(Fickle, monkeypatch)), writer, max_repeats=4)
    assert not rule(outcome, 6).passed
    assert rule(outcome, 6).figures["changed"] >= 1
    assert rule(outcome, 6).detail.endswith("of 4 instrumented steps decided differently from the recorded ones")
    assert rule(outcome, 1).passed  # it did run what it decided, each time


def test_a_recorder_that_drops_decisions_proves_nothing(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_NUMBERS", 8)  # choice, gate and logit of two sequences, in one layer
    outcome, _ = measured(inputs(), pair(backbone), writer)
    found = rule(outcome, 1)
    assert not found.passed
    assert found.figures["dropped"] == 3 * 2 * 2  # repeats × sequences × the two layers past the first
    assert "not proven: 12 decisions and 0 repeats were dropped" in found.detail


def test_a_writer_that_drops_a_repeat_proves_nothing(
    backbone: Any, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = writer.submit, itertools.count()

    def sometimes(work: Any, *, dropped_as: str) -> bool:
        return False if next(calls) == 2 else submit(work, dropped_as=dropped_as)

    monkeypatch.setattr(writer, "submit", sometimes)
    outcome, _ = measured(inputs(), pair(backbone), writer)
    assert not rule(outcome, 1).passed
    assert "0 decisions and 1 repeats were dropped" in rule(outcome, 1).detail


# -- what it leaves behind ----------------------------------------------------------------------------


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_is_as_it_was(backbone: Any, writer: RunWriter, was_on: bool, fails: bool) -> None:
    def between(share: float) -> None:
        if fails:
            raise KeyboardInterrupt

    try:
        (gc.enable if was_on else gc.disable)()
        run = CellRun(inputs(), pair(backbone), limits(), writer, 0, between)
        if fails:
            with pytest.raises(KeyboardInterrupt):
                run.run()
        else:
            run.run()
        assert gc.isenabled() is was_on
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_after_an_error_inside_a_step_the_arms_are_off_and_unnamed(backbone: Any, writer: RunWriter) -> None:
    chosen = pair(backbone)

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    handle = chosen[1].recorded.model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        CellRun(inputs(), chosen, limits(), writer, 0).run()
    handle.remove()
    for arm in chosen:
        assert arm.recorded.recorder.mode == "off"
        assert arm.recorded.recorder.sink is None
    outcome, _ = measured(inputs(), chosen, writer, index=1)
    assert all(record.passed for record in outcome.rules)
    measure.prefill(chosen[1].recorded, inputs())
    assert chosen[1].recorded.tracker.current is not None
    assert chosen[1].recorded.tracker.current.requests == ["row-0", "row-1"]


def test_step_numbers_of_cells_never_meet(backbone: Any, writer: RunWriter) -> None:
    chosen = pair(backbone)
    for index in (0, 1, 255):
        _, run = measured(inputs(), chosen, writer, index=index)
    steps = run.frame("steps")["step"]
    assert steps.is_unique
    # The largest spec: 10,000 repeats and 1,000 warm-ups of 32 arms in two passes, 4,096 tokens each.
    largest = 11_000 * 32 * 2 * 4096
    assert largest < measure.STEPS_PER_CELL / 2
    assert 256 * measure.STEPS_PER_CELL < 2**53  # exact also where numbers are doubles
