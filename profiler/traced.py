"""The traced pass of one cell: its own steps, under torch.profiler, after all timing is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profiler.arms import Arm
from profiler.measure import STEPS_PER_CELL, CellInputs, decode, prefill
from profiler.store import RunWriter
from profiler.tracing import Tracer
from workloads.spec import TraceSpec

#: Traced steps are numbered from here within their cell, far past the timed ones.
FIRST_STEP = STEPS_PER_CELL // 2


def trace_cell(inputs: CellInputs, arms: Sequence[Arm], spec: TraceSpec, writer: RunWriter, index: int) -> None:
    """Trace `spec.steps` steps of every arm; rows go to `kernels` and `steps`, one trace file an (cell, arm).

    Decode cells trace their first steps, at most as many as they have.
    """
    steps = spec.steps if inputs.continuation_BN is None else min(spec.steps, inputs.steps)
    step = index * STEPS_PER_CELL + FIRST_STEP
    cell = inputs.cell
    for arm in arms:
        handle = arm.recorded
        handle.tracker.name(inputs.requests)
        first = step
        try:
            with torch.no_grad():
                cache = None if inputs.continuation_BN is None else prefill(handle, inputs).cache
                with Tracer(writer.folder, f"{cell.name}.{arm.name}", writer.rank) as tracer:
                    handle.recorder.mode = "trace"
                    for i in range(steps):
                        handle.recorder.label = f"gatewise.step/{step}/{arm.name}"
                        step += 1
                        if cache is None:
                            prefill(handle, inputs)
                        else:
                            decode(handle, inputs, cache, i)
        finally:
            handle.recorder.mode, handle.recorder.label = "off", ""
            handle.tracker.name(None)
        view = handle.tracker.current.view if handle.tracker.current is not None else None
        numbers = list(range(first, step))
        writer.append(
            "steps",
            {
                "arm": [arm.name] * len(numbers),
                "pass": "traced",
                "repeat": 0,
                "order": 0,
                "step": numbers,
                "index": list(range(len(numbers))),
                "phase": cell.phase,
                "rows": view.rows if view is not None else 0,
            },
            cell=cell.name,
        )
        writer.append("kernels", {"arm": arm.name, **tracer.rows()}, cell=cell.name)
        if not spec.keep:
            tracer.path.unlink()
