"""Interleaved stepping of one cell: warm-up, randomised order, stopping rule, and what each pass records.

A *unit* is an arm in one pass: `bare` (nothing watches) or `instrumented` (the recorder is on). In every repeat each
unit does the same step on the same inputs, in an order drawn anew; a decode cell draws it anew for every token, each
unit going on with its own cache. So arms, and recorder on against off, are paired within milliseconds of each other
and drift of the machine falls on all of them.

A repeat's steps are checked and handed to the writer only when the repeat is over, and the writer has taken them
before the next begins: nothing but the steps runs while steps are timed.

Ranks of one run go through the same steps together: each starts when all are there, the order is drawn from one seed,
a step took as long as its slowest rank, and rank 0 says when the cell ends.

Not here: the traced pass (`traced`), what is recorded (`recorder`), tables (`stepdata`), intervals (`intervals`).
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from profiler import methods
from profiler.arms import Arm
from profiler.execution.sequences import RowView
from profiler.intervals import Interval, ratio_of_medians
from profiler.ranks import Ranks
from profiler.recorder import StepData
from profiler.records import RECORDER_COST, CellRecord, RuleRecord
from profiler.stepdata import (
    Place,
    decision_rows,
    digest,
    divided,
    divided_as_decided,
    executed_as_decided,
    segment_rows,
    tally,
)
from profiler.writer import Rows, RunWriter

Pass = Literal["bare", "instrumented"]

#: Repeats that also take instrumented steps; past it only bare steps sharpen the interval.
INSTRUMENTED_REPEATS = 8
#: Repeats needed before an interval may end the cell.
REPEATS_FOR_INTERVAL = 5
#: How much more repeats there must be before the interval is looked at again; a bootstrap takes its own time.
LOOK_AGAIN = 1.1
#: Share of the budget after which warm-up ends, whatever the spec asks for.
WARMUP_SHARE = 0.5
#: Step ids of one cell start at its index times this, so that a resumed run needs no counter. More than the largest
#: spec can take: 10,000 repeats of 32 arms in two passes and 4,096 decode steps each.
STEPS_PER_CELL = 10_000_000_000


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

    @cached_property
    def whole_BN(self) -> Tensor:
        """`[B, length + new_tokens]`: prompt and continuation, for arms that keep no cache."""
        return self.ids_BT if self.continuation_BN is None else torch.cat([self.ids_BT, self.continuation_BN], dim=1)

    def of(self, rows: slice) -> CellInputs:
        """These rows of the batch."""
        continuation_BN = None if self.continuation_BN is None else self.continuation_BN[rows]
        return CellInputs(self.cell, self.ids_BT[rows], continuation_BN, self.requests[rows])


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


@dataclass(frozen=True)
class Outcome:
    """What a measured cell leaves beside its tables.

    `twin_medians_ns`: the median bare step of each repeat, in order, of each arm that has no twin itself.
    """

    rules: list[RuleRecord]
    twin_medians_ns: dict[str, list[float]]


@dataclass(frozen=True)
class _Step:
    """One timed step. `data` is what the recorder saw of it; None in a bare step."""

    arm: Arm
    what: Pass
    repeat: int
    index: int
    order: int
    number: int
    view: RowView
    wall_ns: int
    data: StepData | None


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection by itself; one that is asked for leaves out what was there before, and so is quick."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def synchronise(device: torch.device) -> None:
    """Wait for the device; CPU needs no waiting."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prefill(handle: methods.Method, inputs: CellInputs) -> Any:
    """One prompt step; logits of the last position only, as a server computes them."""
    return handle.model(input_ids=inputs.ids_BT, use_cache=handle.keeps_cache, logits_to_keep=1)


def decode(handle: methods.Method, inputs: CellInputs, cache: Any, index: int) -> Any:
    """One decode step: feeds token `index` of the continuation, to an arm without a cache all that is before it too."""
    assert inputs.continuation_BN is not None
    if not handle.keeps_cache:
        so_far = inputs.whole_BN[:, : inputs.ids_BT.shape[1] + index + 1]
        return handle.model(input_ids=so_far, use_cache=False, logits_to_keep=1)
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
        ranks: those that go through the cell together; None for one process.
    """

    def __init__(
        self,
        inputs: CellInputs,
        arms: Sequence[Arm],
        limits: Limits,
        writer: RunWriter,
        index: int,
        between: Callable[[float], None] = lambda share: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.inputs, self.arms, self.limits, self.writer = inputs, arms, limits, writer
        self.between, self.ranks = between, ranks or Ranks()
        self._order = np.random.default_rng([limits.seed, index])
        self._next_step = index * STEPS_PER_CELL
        self._device = inputs.ids_BT.device
        self._ns: dict[Pass, dict[str, dict[tuple[int, int], int]]] = {
            what: defaultdict(dict) for what in ("bare", "instrumented")
        }
        self._digests: dict[tuple[str, int], bytes] = {}
        self._watched: dict[str, int] = defaultdict(int)
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._changed: dict[str, int] = defaultdict(int)
        self._dropped: dict[str, int] = defaultdict(int)
        self._lost = 0
        self._said: dict[tuple[str, int], Tensor] = {}
        self._look_at = max(limits.min_repeats, REPEATS_FOR_INTERVAL)
        self._last: StepData | None = None

    # -- the cell ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Measure until the stopping rule says so. Fills `repeats` and `stopped` of the cell's record."""
        cell, limits = self.inputs.cell, self.limits
        units = [Unit(arm, what) for arm in self.arms for what in ("bare", "instrumented")]
        began = time.monotonic()
        with torch.no_grad(), self._labelled(), undisturbed():
            self._fill_caches(units)
            warmed = 0
            while (
                warmed < limits.warmup and self.ranks.agree(time.monotonic() - began) < WARMUP_SHARE * limits.budget_s
            ):
                self._record(self._repeat(units, warmed), warmup=True)
                self.between(0.0)
                warmed += 1
            cell.warmup_s = self.ranks.agree(time.monotonic() - began)
            while cell.stopped is None:
                watched = units if cell.repeats < INSTRUMENTED_REPEATS else [u for u in units if u.what == "bare"]
                self._record(self._repeat(watched, cell.repeats), warmup=False)
                cell.repeats += 1
                spent = time.monotonic() - began
                self.between(min(1.0, max(cell.repeats / limits.max_repeats, spent / limits.budget_s)))
                cell.stopped = self._stop(cell.repeats, warmed, self.ranks.agree(spent))
        cell.outputs = self._outputs()
        return Outcome(self._rules(), self._twin_medians())

    def _stop(self, repeats: int, warmed: int, spent: float) -> str | None:
        limits = self.limits
        if repeats >= limits.max_repeats:
            return "repeats"
        # A repeat that would not fit is not begun.
        if spent * (1 + 1 / (repeats + warmed)) > limits.budget_s:
            return "budget"
        if repeats >= self._look_at:
            self._look_at = math.ceil(LOOK_AGAIN * repeats)
            ratios = self._ratios()
            if ratios and all(ratio.half_width <= limits.target_ci for ratio in ratios):
                return "interval"
        return None

    @contextmanager
    def _labelled(self) -> Iterator[None]:
        handles = [handle for arm in self.arms for handle in (arm.bare, arm.recorded)]
        for handle in handles:
            handle.tracker.name(self.inputs.requests)
            handle.recorder.phase = self.inputs.cell.phase  # an arm without a cache decodes in what look like prompts
        try:
            yield
        finally:
            for handle in handles:
                handle.tracker.name(None)
                handle.recorder.mode, handle.recorder.sink, handle.recorder.phase = "off", None, None
                for request in self.inputs.requests:
                    handle.release(request)

    def _fill_caches(self, units: Sequence[Unit]) -> None:
        """Prefill each unit's own cache once; every repeat then decodes from the same context."""
        if self.inputs.continuation_BN is None:
            return
        for unit in units:
            unit.cache = prefill(unit.handle, self.inputs).cache  # None where the arm keeps none

    # -- one repeat -------------------------------------------------------------------------------

    def _repeat(self, units: Sequence[Unit], repeat: int) -> list[_Step]:
        """Every unit once through the cell's steps; caches are then as they were before."""
        self.writer.drain()
        gc.collect()
        steps = [
            self._step(units[k], repeat, index, order)
            for index in range(self.inputs.steps)
            for order, k in enumerate(self._order.permutation(len(units)))
        ]
        if self.inputs.continuation_BN is not None:
            for unit in units:
                if unit.cache is not None:
                    unit.cache.crop(-self.inputs.steps)
        return steps

    def _step(self, unit: Unit, repeat: int, index: int, order: int) -> _Step:
        handle, recorder = unit.handle, unit.handle.recorder
        self._last = None
        if unit.what == "instrumented":
            recorder.mode, recorder.sink = "record", self._keep
        self.ranks.wait()
        synchronise(self._device)
        began = time.perf_counter_ns()
        if self.inputs.continuation_BN is None:
            out = prefill(handle, self.inputs)
        else:
            out = decode(handle, self.inputs, unit.cache, index)
        synchronise(self._device)
        wall_ns = time.perf_counter_ns() - began
        recorder.mode, recorder.sink = "off", None
        if unit.what == "bare" and (unit.arm.name, index) not in self._said:
            self._said[unit.arm.name, index] = out.logits[:, -1].argmax(-1)
        sequences = handle.tracker.current
        assert sequences is not None
        number, self._next_step = self._next_step, self._next_step + 1
        return _Step(unit.arm, unit.what, repeat, index, order, number, sequences.view, wall_ns, self._last)

    def _keep(self, data: StepData) -> None:
        self._last = data

    def _record(self, steps: Sequence[_Step], *, warmup: bool) -> None:
        """Check a repeat's steps and hand their rows to the writer, all or none."""
        cell, counts = self.inputs.cell, self.ranks.counts
        found = [
            Rows(
                "steps",
                cell.name,
                {
                    "arm": [step.arm.name for step in steps],
                    "pass": ["warmup" if warmup else step.what for step in steps],
                    "repeat": [step.repeat for step in steps],
                    "order": [step.order for step in steps],
                    "step": [step.number for step in steps],
                    "index": [step.index for step in steps],
                    "phase": cell.phase,
                    "rows": [step.view.rows if counts else 0 for step in steps],
                    "context": [step.view.context if counts else 0 for step in steps],
                    "wall_ns": [step.wall_ns for step in steps],
                    "device_ns": [step.data.device_ns if step.data else None for step in steps],
                },
            )
        ]
        if not warmup:
            slowest = np.max(self.ranks.gather([step.wall_ns for step in steps]), axis=0).tolist()
            for step, wall_ns in zip(steps, slowest, strict=True):
                self._ns[step.what][step.arm.name][step.repeat, step.index] = wall_ns
            self._check_experts([step for step in steps if divided(step.arm.record)])
            found += [row for step in steps if step.data is not None for row in self._check(step, step.data)]
        if not self.writer.submit(lambda: found, dropped_as="repeats"):
            self._lost += 1

    def _check_experts(self, steps: Sequence[_Step]) -> None:
        """Rule 1 of experts that several ranks share, of a repeat's instrumented steps; rank 0 tells what is wrong."""
        seen = [(step, step.data) for step in steps if step.data is not None]
        if not seen:
            return
        ranks = self.ranks.gather([tally(data, step.arm.record) for step, data in seen])
        if not self.ranks.leads:
            return
        for (step, _), *tallies in zip(seen, *ranks, strict=True):
            self._problems[step.arm.name] += divided_as_decided(tallies, step.arm.record)

    def _check(self, step: _Step, data: StepData) -> list[Rows]:
        """Check one instrumented step; its decisions and rows are written once per cell, and compared from then on."""
        arm = step.arm
        place = Place(self.inputs.cell.name, step.number, self.ranks.rank, self.ranks.alike)
        self._watched[arm.name] += 1
        self._dropped[arm.name] += data.dropped
        self._problems[arm.name] += executed_as_decided(data, arm.record)
        found = segment_rows(data, arm.record, place)
        key, mine = (arm.name, step.index), digest(data)
        if key not in self._digests:
            self._digests[key] = mine
            found += decision_rows(data, arm.record, place)
        elif self._digests[key] != mine:
            self._changed[arm.name] += 1
        return found

    # -- what came out ----------------------------------------------------------------------------

    def _outputs(self) -> dict[str, str]:
        """Of each arm, the hash of the likeliest tokens after every step, `[steps, B]`."""
        mine = [self._said[arm.name, index].tolist() for arm in self.arms for index in range(self.inputs.steps)]
        whole = iter(self._of_the_batch(mine))
        return {
            arm.name: hashlib.sha256(repr([next(whole) for _ in range(self.inputs.steps)]).encode()).hexdigest()
            for arm in self.arms
        }

    def _of_the_batch(self, mine: list[list[int]]) -> list[list[int]]:
        """A token a batch row from those of this rank's rows."""
        if self.ranks.alike:
            return mine
        return [[token for part in parts for token in part] for parts in zip(*self.ranks.gather(mine), strict=True)]

    def _ratios(self) -> list[Interval]:
        """Arm ÷ twin of bare step times, paired by (repeat, index), for every arm that has a twin."""
        bare = self._ns["bare"]
        twins = [(arm.name, arm.record.twin) for arm in self.arms if arm.record.twin is not None]
        return [
            ratio_of_medians(list(bare[arm].values()), [bare[twin][key] for key in bare[arm]], seed=self.limits.seed)
            for arm, twin in twins
        ]

    def _twin_medians(self) -> dict[str, list[float]]:
        found = {}
        for arm in self.arms:
            if arm.record.twin is None:
                repeats: dict[int, list[int]] = defaultdict(list)
                for (repeat, _), ns in self._ns["bare"][arm.name].items():
                    repeats[repeat].append(ns)
                found[arm.name] = [float(np.median(times)) for _, times in sorted(repeats.items())]
        return found

    def _rules(self) -> list[RuleRecord]:
        """Every rank's outcomes as one: what differed or was dropped anywhere did."""
        mine = (self._problems, self._changed, self._dropped, self._lost)
        others = [each for rank, each in enumerate(self.ranks.gather(mine)) if rank != self.ranks.rank]
        for problems, changed, dropped, lost in others:
            self._lost += lost
            for arm in self.arms:
                self._problems[arm.name] += problems[arm.name]
                self._changed[arm.name] += changed[arm.name]
                self._dropped[arm.name] += dropped[arm.name]
        return [rule(arm) for arm in self.arms for rule in (self._rule_1, self._rule_6, self._rule_14)]

    def _rule_1(self, arm: Arm) -> RuleRecord:
        problems, watched = self._problems[arm.name], self._watched[arm.name]
        figures = {
            "steps": watched,
            "differences": len(problems),
            "dropped": self._dropped[arm.name],
            "repeats_lost": self._lost,
        }
        detail = problems[0] if problems else f"equal in {watched} instrumented steps"
        if self._dropped[arm.name] or self._lost:
            detail += f"; not proven: {self._dropped[arm.name]} decisions and {self._lost} repeats were dropped"
        return RuleRecord(
            rule=1,
            name="rows executed = gates recorded",
            arm=arm.name,
            cell=self.inputs.cell.name,
            passed=watched > 0 and not any(figures[key] for key in ("differences", "dropped", "repeats_lost")),
            detail=detail,
            figures={name: float(value) for name, value in figures.items()},
        )

    def _rule_6(self, arm: Arm) -> RuleRecord:
        changed, watched = self._changed[arm.name], self._watched[arm.name]
        return RuleRecord(
            rule=6,
            name="repeats decide alike",
            arm=arm.name,
            cell=self.inputs.cell.name,
            passed=changed == 0,
            detail=f"{changed} of {watched} instrumented steps decided differently from the recorded ones",
            figures={"steps": float(watched), "changed": float(changed)},
        )

    def _rule_14(self, arm: Arm) -> RuleRecord:
        """What recording cost, from on/off pairs of the same repeat and index."""
        watched, bare = self._ns["instrumented"][arm.name], self._ns["bare"][arm.name]
        ratio = ratio_of_medians(list(watched.values()), [bare[key] for key in watched], seed=self.limits.seed)
        cost, low, high = ratio.value - 1, ratio.low - 1, ratio.high - 1
        within = f"[{low:+.1%}, {high:+.1%}]" if math.isfinite(low) else "[too few pairs for an interval]"
        return RuleRecord(
            rule=RECORDER_COST,
            name="recorder's own cost",
            arm=arm.name,
            cell=self.inputs.cell.name,
            passed=True,
            detail=f"recorder on ÷ off − 1 = {cost:+.1%} {within}, n = {ratio.n}",
            figures={"cost": cost, "low": low, "high": high, "n": float(ratio.n)},
        )
