"""Interleaved stepping of one cell: warm-up, randomised order, stopping rule, and what each pass records.

A *unit* is an arm in one pass: `bare` (nothing watches) or `instrumented` (the recorder is on). In every repeat each
unit does the same step on the same inputs, in an order drawn anew; a decode cell draws it anew for every token, each
unit going on with its own cache. So arms, and recorder on against off, are paired within milliseconds of each other
and drift of the machine falls on all of them.

Not here: the traced pass (`tracing`), what is recorded (`recorder`), tables (`stepdata`), intervals (`intervals`).
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from profiler import methods
from profiler.arms import Arm
from profiler.intervals import Interval, ratio_of_medians
from profiler.recorder import StepData
from profiler.records import CellRecord, RuleRecord
from profiler.stepdata import Place, decision_rows, digest, executed_as_decided, segment_rows
from profiler.store import Rows, RunWriter

Pass = Literal["bare", "instrumented"]

#: Repeats that also take instrumented steps; past it only bare steps sharpen the interval.
INSTRUMENTED_REPEATS = 8
#: Repeats needed before an interval may end the cell.
REPEATS_FOR_INTERVAL = 5
#: Step ids of one cell start at its index times this, so that a resumed run needs no counter.
STEPS_PER_CELL = 10_000_000


@dataclass(frozen=True)
class CellInputs:
    """Inputs of one cell, the same for every arm.

    Attributes:
        ids_BT: `[B, length]` prompt token ids.
        continuation_BN: `[B, new_tokens]` ids fed to the decode steps; None for prefill.
        requests: `[B]` ids.
    """

    cell: CellRecord
    ids_BT: Tensor
    continuation_BN: Tensor | None
    requests: list[str]

    @property
    def steps(self) -> int:
        """Timed steps in one repeat of one unit."""
        return 1 if self.continuation_BN is None else self.continuation_BN.shape[1]


@dataclass
class Unit:
    """One arm in one pass, with the cache it decodes into."""

    arm: Arm
    what: Pass
    cache: Any = None

    @property
    def handle(self) -> methods.Method:
        """The module tree this pass runs."""
        return self.arm.bare if self.what == "bare" else self.arm.recorded


@dataclass(frozen=True)
class Limits:
    """When a cell ends; see the spec's `measure` section."""

    warmup: int
    min_repeats: int
    max_repeats: int
    target_ci: float
    budget_s: float
    seed: int


@dataclass
class Outcome:
    """What a measured cell leaves beside its tables."""

    rules: list[RuleRecord]
    twin_medians_ns: dict[str, list[float]] = field(default_factory=dict)
    recorder_pairs: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    ratios: dict[str, Interval] = field(default_factory=dict)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection while steps are timed."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def synchronise(device: torch.device) -> None:
    """Wait for the device; CPU needs no waiting."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prefill(handle: methods.Method, inputs: CellInputs) -> Any:
    """One prompt step; logits of the last position only, as a server computes them."""
    return handle.model(input_ids=inputs.ids_BT, use_cache=True, logits_to_keep=1)


def decode(handle: methods.Method, inputs: CellInputs, cache: Any, index: int) -> Any:
    """One decode step: feeds token `index` of the continuation."""
    assert inputs.continuation_BN is not None
    return handle.model(
        input_ids=inputs.continuation_BN[:, index : index + 1], cache=cache, use_cache=True, logits_to_keep=1
    )


class CellRun:
    """Measures one cell.

    Args:
        inputs: see `CellInputs`.
        arms: all arms; the first bare step of each repeat's order is drawn among them.
        limits: when to stop.
        writer: where rows go.
        index: the cell's place in the run, from which step ids are made.
        between: called between repeats, outside timed steps (contention marks, progress); its argument is the
            share of the cell done, between 0 and 1.
    """

    def __init__(
        self,
        inputs: CellInputs,
        arms: Sequence[Arm],
        limits: Limits,
        writer: RunWriter,
        index: int,
        between: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.inputs, self.arms, self.limits, self.writer = inputs, arms, limits, writer
        self.between = between
        self._order = np.random.default_rng([limits.seed, index])
        self._next_step = index * STEPS_PER_CELL
        self._device = inputs.ids_BT.device
        self._bare_ns: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self._watched_ns: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self._digests: dict[tuple[str, int], bytes] = {}
        self._counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._changed: dict[str, int] = defaultdict(int)
        self._last: StepData | None = None

    # -- the cell ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Measure until the stopping rule says so. Fills `repeats` and `stopped` of the cell's record."""
        cell, limits = self.inputs.cell, self.limits
        units = [Unit(arm, what) for arm in self.arms for what in ("bare", "instrumented")]
        began = time.monotonic()
        with torch.no_grad(), self._labelled():
            self._fill_caches(units)
            for repeat in range(limits.warmup):
                self._repeat(units, repeat, warmup=True)
                self.between(0.0)
            repeat = 0
            ratios: dict[str, Interval] = {}
            while True:
                watched = units if repeat < INSTRUMENTED_REPEATS else [u for u in units if u.what == "bare"]
                self._repeat(watched, repeat, warmup=False)
                repeat += 1
                spent = time.monotonic() - began
                ratios = self._ratios()
                self.between(min(1.0, max(repeat / limits.max_repeats, spent / limits.budget_s)))
                cell.stopped = self._stop(repeat, spent, ratios)
                if cell.stopped is not None:
                    break
        cell.repeats = repeat
        return Outcome(self._rules(), self._twin_medians(), self._recorder_pairs(), ratios)

    def _stop(self, repeat: int, spent: float, ratios: dict[str, Interval]) -> str | None:
        limits = self.limits
        if repeat >= limits.max_repeats:
            return "repeats"
        # A repeat that would not fit is not begun.
        if spent * (repeat + limits.warmup + 1) / (repeat + limits.warmup) > limits.budget_s:
            return "budget"
        enough = repeat >= max(limits.min_repeats, REPEATS_FOR_INTERVAL)
        if enough and ratios and all(r.half_width <= limits.target_ci for r in ratios.values()):
            return "interval"
        return None

    @contextmanager
    def _labelled(self) -> Iterator[None]:
        handles = [handle for arm in self.arms for handle in (arm.bare, arm.recorded)]
        for handle in handles:
            handle.tracker.name(self.inputs.requests)
        try:
            yield
        finally:
            for handle in handles:
                handle.tracker.name(None)
                handle.recorder.mode, handle.recorder.sink = "off", None
                for request in self.inputs.requests:
                    handle.release(request)

    def _fill_caches(self, units: Sequence[Unit]) -> None:
        """Prefill each unit's own cache once; every repeat then decodes from the same context."""
        if self.inputs.continuation_BN is None:
            return
        for unit in units:
            unit.cache = prefill(unit.handle, self.inputs).cache

    # -- one repeat -------------------------------------------------------------------------------

    def _repeat(self, units: Sequence[Unit], repeat: int, *, warmup: bool) -> None:
        self.writer.drain()
        with undisturbed():
            for index in range(self.inputs.steps):
                for order, k in enumerate(self._order.permutation(len(units))):
                    self._step(units[k], repeat, index, order, warmup=warmup)
        if self.inputs.continuation_BN is not None:
            for unit in units:
                unit.cache.crop(-self.inputs.steps)

    def _step(self, unit: Unit, repeat: int, index: int, order: int, *, warmup: bool) -> None:
        handle, recorder = unit.handle, unit.handle.recorder
        self._last = None
        if unit.what == "instrumented":
            recorder.mode, recorder.sink = "record", self._keep
        synchronise(self._device)
        began = time.perf_counter_ns()
        if self.inputs.continuation_BN is None:
            prefill(handle, self.inputs)
        else:
            decode(handle, self.inputs, unit.cache, index)
        synchronise(self._device)
        wall_ns = time.perf_counter_ns() - began
        recorder.mode, recorder.sink = "off", None
        sequences = handle.tracker.current
        assert sequences is not None
        step, self._next_step = self._next_step, self._next_step + 1
        cell = self.inputs.cell.name
        self.writer.append(
            "steps",
            {
                "arm": [unit.arm.name],
                "pass": "warmup" if warmup else unit.what,
                "repeat": repeat,
                "order": order,
                "step": step,
                "index": index,
                "phase": self.inputs.cell.phase,
                "rows": sequences.view.rows,
                "context": sequences.view.context,
                "wall_ns": wall_ns,
                "device_ns": self._last.device_ns if self._last is not None else None,
            },
            cell=cell,
        )
        if warmup:
            return
        if unit.what == "bare":
            self._bare_ns[unit.arm.name][repeat, index] = wall_ns
            return
        self._watched_ns[unit.arm.name][repeat, index] = wall_ns
        if self._last is not None:
            self._take(unit.arm, self._last, Place(cell, step), index)

    def _keep(self, data: StepData) -> None:
        self._last = data

    def _take(self, arm: Arm, data: StepData, place: Place, index: int) -> None:
        """Check and write one instrumented step; decisions and rows are written once per cell, then compared."""
        problems = executed_as_decided(data, arm.record)
        self._problems[arm.name] += problems
        counted = self._counted[arm.name]
        counted[0] += 1
        counted[1] += data.dropped
        found = segment_rows(data, arm.record, place)
        before = self._digests.setdefault((arm.name, index), mine := digest(data))
        if counted[0] <= self.inputs.steps:
            found += decision_rows(data, arm.record, place)
        elif before != mine:
            self._changed[arm.name] += 1
        self._write(found)

    def _write(self, found: list[Rows]) -> None:
        if found:
            self.writer.submit(lambda: found, dropped_as="gates")

    # -- what came out ----------------------------------------------------------------------------

    def _ratios(self) -> dict[str, Interval]:
        """Arm ÷ twin of bare step times, paired by (repeat, index), for every arm that has a twin."""
        found = {}
        for arm in self.arms:
            if arm.record.twin is None:
                continue
            mine, twin = self._bare_ns[arm.name], self._bare_ns[arm.record.twin]
            keys = sorted(mine.keys() & twin.keys())
            found[arm.name] = ratio_of_medians([mine[k] for k in keys], [twin[k] for k in keys])
        return found

    def _recorder_pairs(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """(recorder on, off) times of the same repeat and index, per (cell, arm)."""
        return {
            (self.inputs.cell.name, name): [(on, self._bare_ns[name][key]) for key, on in watched.items()]
            for name, watched in self._watched_ns.items()
        }

    def _twin_medians(self) -> dict[str, list[float]]:
        """Median bare step of each repeat, of each arm without a twin of its own, in order."""
        found = {}
        for arm in self.arms:
            if arm.record.twin is None:
                times = self._bare_ns[arm.name]
                repeats = sorted({repeat for repeat, _ in times})
                found[arm.name] = [float(np.median([t for (r, _), t in times.items() if r == k])) for k in repeats]
        return found

    def _rules(self) -> list[RuleRecord]:
        cell, found = self.inputs.cell.name, []
        for arm in self.arms:
            steps, dropped = self._counted[arm.name]
            problems = self._problems[arm.name]
            found.append(
                RuleRecord(
                    rule=1,
                    name="rows executed = gates recorded",
                    arm=arm.name,
                    cell=cell,
                    passed=not problems and steps > 0 and dropped == 0,
                    detail=problems[0] if problems else f"equal in {steps} instrumented steps, {dropped} dropped",
                    figures={"steps": float(steps), "differences": float(len(problems)), "dropped": float(dropped)},
                )
            )
            changed = self._changed[arm.name]
            found.append(
                RuleRecord(
                    rule=6,
                    name="repeats decide alike",
                    arm=arm.name,
                    cell=cell,
                    passed=changed == 0,
                    detail=f"{changed} of {steps} instrumented steps decided differently from the recorded ones",
                    figures={"steps": float(steps), "changed": float(changed)},
                )
            )
        return found
