"""What a spec would take: time, memory and disk, before running it.

Time is a bound and a guess. The bound is the spec's own budgets. The guess takes each step as the slower of its
products at this machine's measured matrix speed and its weights at this machine's measured memory speed; it leaves
out everything between products, so real steps take longer, more so the smaller they are.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from profiler import costs, models
from profiler.measure import INSTRUMENTED_REPEATS
from workloads.spec import Cell, Spec

#: Bytes one decision takes on disk, compressed, seen over recorded runs; a generous round figure.
BYTES_PER_DECISION = 16
#: Bytes one step leaves in `steps` and `segments`.
BYTES_PER_STEP = 2_000
#: Bytes of one traced step's file.
BYTES_PER_TRACED_STEP = 400_000


@dataclass(frozen=True)
class Estimate:
    """What a run would take. Times in seconds, sizes in bytes."""

    name: str
    cells: int
    arms: int
    guess_s: float
    bound_s: float
    memory_bytes: int
    disk_bytes: int
    flops_per_second: float
    bytes_per_second: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.name}: {self.arms} arms × {self.cells} cells",
            f"time    about {_duration(self.guess_s)}; at most {_duration(self.bound_s)} by the cells' budgets, "
            "plus one warm-up and one repeat of each",
            f"memory  {self.memory_bytes / 2**30:.2f} GiB (weights once, caches and the widest activations of every unit)",
            f"disk    {self.disk_bytes / 2**20:.1f} MiB",
            f"guessed from {self.flops_per_second / 1e9:.0f} GFLOP/s and {self.bytes_per_second / 1e9:.1f} GB/s, "
            "measured now on this machine",
        ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _speeds(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Measured matrix speed (FLOP/s) and streaming-read speed (bytes/s), the best of a few short tries."""
    size = 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    stream = torch.randn(16 * 2**20, device=device).to(dtype)

    def best(work: Any) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    return 2 * size**3 / best(lambda: a @ b), stream.nbytes / best(lambda: stream.sum())


def estimate(spec: Spec) -> Estimate:
    """Estimate a run of `spec` without loading weights.

    Raises:
        InputError: the model source is unknown.
    """
    dtype = getattr(torch, spec.model.dtype)
    skeleton = models.skeleton(models.config(spec.model.source), spec.model.dtype)
    choices = costs.dense_choices(skeleton)
    device = torch.device("cuda" if torch.cuda.is_available() and spec.model.device != "cpu" else "cpu")
    speed, stream = _speeds(dtype, device)
    weights = sum(choice.weight_bytes for choice in choices)
    kv_row = sum(choice.kv_bytes_per_row for choice in choices)
    width = max(skeleton.config.hidden_size, skeleton.config.intermediate_size)
    vocabulary = skeleton.config.vocab_size
    itemsize = dtype.itemsize
    layers, arms = skeleton.config.num_hidden_layers, len(spec.arms)
    guess = disk = 0.0
    memory = 0

    def step_seconds(rows: int, context: int, head_rows: int) -> float:
        return max(costs.flops(choices, rows, context, head_rows=head_rows) / speed, weights / stream)

    for cell in spec.cell_list():
        repeats = spec.measure.warmup + spec.measure.max_repeats
        watched = spec.measure.warmup + min(spec.measure.max_repeats, INSTRUMENTED_REPEATS)
        steps, a_step, setup = _cell_seconds(cell, step_seconds, arms)
        guess += setup + min(spec.measure.budget_s, arms * steps * a_step * (repeats + watched))
        held = cell.batch * (cell.length + cell.new_tokens) * kv_row
        wide = cell.batch * (cell.length if cell.phase == "prefill" else 1) * width * 4 * itemsize
        memory = max(memory, 2 * arms * held + wide + cell.batch * vocabulary * itemsize * 2)
        decisions = arms * steps * layers * cell.batch
        disk += decisions * BYTES_PER_DECISION + arms * steps * (repeats + watched) * BYTES_PER_STEP
        disk += arms * (min(spec.trace.steps, steps) if spec.trace else 0) * BYTES_PER_TRACED_STEP
    parameters = sum(choice.backbone_parameters for choice in choices)
    bound = len(spec.cell_list()) * spec.measure.budget_s
    return Estimate(
        name=spec.name,
        cells=len(spec.cell_list()),
        arms=arms,
        guess_s=guess,
        bound_s=bound,
        memory_bytes=memory + parameters * itemsize + 400 * 2**20,
        disk_bytes=round(disk),
        flops_per_second=speed,
        bytes_per_second=stream,
    )


def _cell_seconds(cell: Cell, step_seconds: Any, arms: int) -> tuple[int, float, float]:
    """(steps a repeat, seconds a step, seconds of filling caches once) of a cell's dense arm."""
    rows, context = cell.batch * cell.length, cell.batch * cell.length * (cell.length + 1) // 2
    prompt = step_seconds(rows, context, cell.batch)
    if cell.phase == "prefill":
        return 1, prompt, 0.0
    a_step = step_seconds(cell.batch, cell.batch * (cell.length + cell.new_tokens // 2), cell.batch)
    return cell.new_tokens, a_step, (2 * arms + 1) * prompt + cell.new_tokens * a_step
