"""The traced pass of one cell: its own steps, under torch.profiler, after all timing is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, cast

import torch

from profiler.arms import Arm
from profiler.execution.sequences import Sequences
from profiler.measure import STEPS_PER_CELL, CellInputs, decode, prefill
from profiler.methods import Method
from profiler.ranks import Ranks
from profiler.tracing import Tracer
from profiler.writer import RunWriter
from workloads.spec import TraceSpec

#: Traced steps are numbered from here within their cell, far past the timed ones.
FIRST_STEP = STEPS_PER_CELL // 2


def trace_cell(
    inputs: CellInputs,
    arms: Sequence[Arm],
    spec: TraceSpec,
    writer: RunWriter,
    index: int,
    at: Callable[[float], None] = lambda share: None,
    ranks: Ranks | None = None,
) -> None:
    """Trace `spec.steps` steps of every arm; rows go to `kernels` and `steps`, one trace file an (cell, arm).

    Decode cells trace their first steps, at most as many as they have. The wall time of a traced step is null: the
    profiler's own cost is in it. `at` is told the share of the arms that is done. Every rank of `ranks` traces the same
    steps, into files of its own.
    """
    ranks = ranks or Ranks()
    steps = spec.steps if inputs.continuation_BN is None else min(spec.steps, inputs.steps)
    number = index * STEPS_PER_CELL + FIRST_STEP
    cell = inputs.cell
    for done, arm in enumerate(arms, start=1):
        views = []
        with _labelled(arm, inputs), torch.no_grad():
            handle = arm.recorded
            cache = None if inputs.continuation_BN is None else prefill(handle, inputs).cache
            ranks.wait()  # one may still be writing its last trace
            with Tracer(writer.folder, f"{cell.name}.{arm.name}", writer.rank) as tracer:
                # The first profiled step is slow whichever arm it falls on; outside a step's range it is not counted.
                _one(handle, inputs, cache, 0)
                if cache is not None:
                    cache.crop(-1)
                handle.recorder.mode = "trace"
                for i in range(steps):
                    handle.recorder.label = f"gatewise.step/{number + i}/{arm.name}"
                    _one(handle, inputs, cache, i)
                    views.append(cast(Sequences, handle.tracker.current).view)
        writer.append(
            "steps",
            {
                "arm": arm.name,
                "pass": "traced",
                "repeat": 0,
                "order": 0,
                "step": list(range(number, number + steps)),
                "index": list(range(steps)),
                "phase": cell.phase,
                "rows": [view.rows if ranks.counts else 0 for view in views],
                "context": [view.context if ranks.counts else 0 for view in views],
            },
            cell=cell.name,
        )
        writer.append("kernels", {"arm": arm.name, **_of_steps(tracer.rows())}, cell=cell.name)
        if not spec.keep:
            tracer.path.unlink()
        number += steps
        at(done / len(arms))


def _of_steps(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rows that belong to a step; the warm-up's do not."""
    return {name: list(compress(values, (step is not None for step in rows["step"]))) for name, values in rows.items()}


def _one(handle: Method, inputs: CellInputs, cache: Any, index: int) -> None:
    if inputs.continuation_BN is None:
        prefill(handle, inputs)
    else:
        decode(handle, inputs, cache, index)


@contextmanager
def _labelled(arm: Arm, inputs: CellInputs) -> Iterator[None]:
    handle = arm.recorded
    handle.tracker.name(inputs.requests)
    try:
        yield
    finally:
        handle.recorder.mode, handle.recorder.label = "off", ""
        handle.tracker.name(None)
        for request in inputs.requests:
            handle.release(request)
