"""What a spec would take: time, memory and disk, before running it.

Time is a bound and a guess. The bound is the spec's own budgets. The guess takes each step as the slower of its
products at this machine's measured matrix speed and its weights at this machine's measured memory speed, and a fixed
time a layer for everything between products; it is within a factor of two or three, no nearer.

A study is its run and its training, once for each seed. A training step is taken as `PASSES` forwards.

Not here: what the interval will let end early, and how much text a quality pass or a sequence trained on holds (their
limits are taken).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from profiler import costs, methods, models, preflight, study
from profiler.execution.stock_experts import model_choices
from profiler.measure import INSTRUMENTED_REPEATS
from profiler.records import Choice
from profiler.store import free_bytes
from profiler.verify import LENGTHS
from workloads.prompts import load_prompts
from workloads.recipe import TrainingSpec
from workloads.spec import Cell, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes one decision takes on disk, compressed, seen over recorded runs; a generous round figure.
BYTES_PER_DECISION = 16
#: Bytes one step leaves in `steps` and `segments`.
BYTES_PER_STEP = 2_000
#: Bytes of one traced step's file.
BYTES_PER_TRACED_STEP = 400_000
#: Resident bytes of a process that has loaded all it needs but weights.
BASE_BYTES = 600 * 2**20
#: Seconds a layer's norms, rotary tables, cache and Python take on a CPU core of today, whatever its size.
LAYER_S = 3e-4
#: Seconds to import, load and close, with the model at hand.
START_S = 8.0
#: A forward, and its gradient: the backbone is frozen, so gradients of activations alone, and a forward's worth of
#: products; half a forward more for what products are not.
PASSES = 2.5
#: Bytes a training leaves for each number it trains: two states of value and moments while one replaces the other, and
#: the checkpoint.
BYTES_PER_TRAINED = 28


@dataclass(frozen=True)
class Estimate:
    """What a run or a study would take, and what this machine has. Times in seconds, sizes in bytes.

    Of a study, `guess_s`, `bound_s` and `disk_bytes` are those of all seeds, and `guess_s` holds `training_s`.
    """

    name: str
    cells: int
    arms: int
    guess_s: float
    bound_s: float
    memory_bytes: int
    memory_available_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    flops_per_second: float
    bytes_per_second: float
    seeds: int = 1
    training_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        studied = f" × {self.seeds} seeds, each trained first" if self.training_s else ""
        training = f", {_duration(self.training_s)} of it training" if self.training_s else ""
        return [
            f"{self.name}: {self.arms} arms × {self.cells} cells{studied}",
            f"time    about {_duration(self.guess_s)}{training}; the cells' budgets allow {_duration(self.bound_s)}, "
            "and a repeat that was begun is finished",
            f"memory  {_size(self.memory_bytes)} of {_size(self.memory_available_bytes)} available: weights once, "
            "what arms add, every unit's cache, the widest activations",
            f"disk    {_size(self.disk_bytes)} of {_size(self.disk_free_bytes)} free",
            f"guessed from {self.flops_per_second / 1e9:.0f} GFLOP/s and {self.bytes_per_second / 1e9:.1f} GB/s, "
            "measured now on this machine",
        ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


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


class _Steps:
    """Time and memory of the dense model's steps."""

    def __init__(self, skeleton: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        self.choices: list[Choice] = model_choices(skeleton)
        self.device = device
        self.speed, self.stream = _speeds(dtype, device)
        self.itemsize = dtype.itemsize
        self.layers = int(skeleton.config.num_hidden_layers)
        self.vocabulary = int(skeleton.config.vocab_size)
        self.width = max(int(skeleton.config.hidden_size), int(skeleton.config.intermediate_size))
        self.weight_bytes = sum(choice.weight_bytes for choice in self.choices)
        self.kv_bytes_per_row = sum(choice.kv_bytes_per_row for choice in self.choices)

    def prompt_s(self, batch: int, length: int) -> float:
        """Seconds of a prompt step of `batch` requests."""
        return self._seconds(batch * length, batch * length * (length + 1) // 2, batch)

    def decode_s(self, batch: int, past: int) -> float:
        """Seconds of a decode step with `past` tokens in the cache."""
        return self._seconds(batch, batch * (past + 1), batch)

    def rules_s(self) -> float:
        """Seconds of what `verify` runs for one arm: five batches, each request alone, a decode step after each."""
        batches = 5 * self.prompt_s(len(LENGTHS), max(LENGTHS)) + sum(self.prompt_s(1, length) for length in LENGTHS)
        return batches + (5 + len(LENGTHS)) * self.decode_s(len(LENGTHS), max(LENGTHS))

    def _seconds(self, rows: int, context: int, head_rows: int) -> float:
        products = costs.flops(self.choices, rows, context, head_rows=head_rows) / self.speed
        return max(products, self.weight_bytes / self.stream) + self.layers * LAYER_S

    def training_s(self, spec: TrainingSpec, groups: int, held_out: int) -> float:
        """Seconds of a training that holds out `held_out` items of each of `groups` domains."""
        rows = spec.batch * spec.length
        forward = self._seconds(rows, rows * (spec.length + 1) // 2, rows)
        evaluations = 2 + (spec.steps - 1) // spec.evaluate_every
        evaluated = 2 * evaluations * groups * math.ceil(held_out / spec.batch)
        return forward * (PASSES * spec.steps * spec.accumulation + evaluated)

    def training_memory(self, spec: TrainingSpec) -> int:
        """Bytes a training holds beside weights: what each layer keeps for its gradient, and logits in float32."""
        rows = spec.batch * spec.length
        return rows * (self.layers * 8 * self.width * self.itemsize + 3 * self.vocabulary * 4)

    def memory(self, cell: Cell, units: int) -> int:
        """Bytes a cell holds beside weights: caches, activations of the widest layer, logits."""
        caches = cell.batch * (cell.length + cell.new_tokens) * self.kv_bytes_per_row
        activations = cell.batch * cell.length * self.width * 4 * self.itemsize  # decode cells have a prompt step too
        logits = cell.batch * self.vocabulary * self.itemsize * 2
        return caches * (units if cell.phase == "decode" else 1) + activations + logits


def estimate(spec: Spec) -> Estimate:
    """Estimate a run of `spec`, or a study of it, without loading weights.

    Raises:
        SpecError: as `preflight.check`, which sees nothing of the tensors in checkpoints.
        InputError: a recipe is wrong.
    """
    found = _of_run(spec)
    return found if spec.seeds is None else _of_study(spec, len(spec.seeds), found)


def _of_study(spec: Spec, seeds: int, run: Estimate) -> Estimate:
    recipe = study.recipe_of(spec)
    dtype = getattr(torch, recipe.model.dtype)
    skeleton = models.skeleton(models.config(recipe.model.source), recipe.model.dtype)
    steps = _Steps(skeleton, dtype, _device(recipe.model.device))
    config = methods.configure(recipe.method.name, recipe.method.options)
    choices = methods.load(recipe.method.name).choices(skeleton, config)
    trained = sum(choice.overhead_parameters + choice.replacement_parameters for choice in choices)
    data = recipe.data
    groups = sum(count > 0 for count in data.generated.counts.values()) if data.generated is not None else 0
    each = steps.training_s(recipe.training, groups + len(data.files), data.held_out)
    training_memory = BASE_BYTES + steps.weight_bytes + steps.training_memory(recipe.training)
    return replace(
        run,
        guess_s=seeds * (run.guess_s + each),
        bound_s=seeds * run.bound_s,
        memory_bytes=max(run.memory_bytes, training_memory),
        disk_bytes=seeds * (run.disk_bytes + trained * BYTES_PER_TRAINED),
        seeds=seeds,
        training_s=seeds * each,
    )


def _added(skeleton: PreTrainedModel, configured: Sequence[tuple[type[methods.Method], Any]], device: str) -> int:
    """Numbers that arms hold beside the model: what a method adds once, copies in another layout in both of its trees.

    While an arm is checked there are two trees more, and a twin that computes what all of it does.
    """
    held = checked = 0
    for method, config in configured:
        own = sum(c.overhead_parameters + c.replacement_parameters for c in method.choices(skeleton, config))
        copied = method.copied_parameters(skeleton, config, device)
        held += own + 2 * copied
        checked = max(checked, 3 * own + 2 * copied)
    return held + checked


def _device(asked: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and asked != "cpu" else "cpu")


def _of_run(spec: Spec) -> Estimate:
    skeleton = preflight.check(spec)
    configured = [
        (methods.load(arm.method), methods.configure(arm.method, preflight.options_of(spec, arm))) for arm in spec.arms
    ]
    uncached = sum(not method.caches(config) for method, config in configured)
    items = len(load_prompts(spec.quality)) * len(spec.quality.modes) if spec.quality is not None else 0
    dtype = getattr(torch, spec.model.dtype)
    steps, arms, cells = _Steps(skeleton, dtype, _device(spec.model.device)), len(spec.arms), spec.cell_list()

    guess = START_S + arms * steps.rules_s()
    disk = 0
    for cell in cells:
        repeats = spec.measure.warmup + spec.measure.max_repeats
        watched = spec.measure.warmup + min(spec.measure.max_repeats, INSTRUMENTED_REPEATS)
        prompt = steps.prompt_s(cell.batch, cell.length)
        if cell.phase == "prefill":
            count, each, setup = 1, arms * prompt, 0.0
        else:
            count, reached = cell.new_tokens, cell.length + cell.new_tokens // 2
            one = steps.decode_s(cell.batch, reached)
            each = (arms - uncached) * one + uncached * steps.prompt_s(cell.batch, reached)
            setup = (2 * arms + 1) * prompt + count * one
        traced = min(spec.trace.steps, count) if spec.trace is not None else 0
        guess += setup + min(spec.measure.budget_s, count * each * (repeats + watched)) + traced * each
        disk += arms * count * steps.layers * cell.batch * BYTES_PER_DECISION
        disk += arms * count * (repeats + watched) * BYTES_PER_STEP + arms * traced * BYTES_PER_TRACED_STEP
    if spec.quality is not None:
        guess += arms * items * steps.prompt_s(1, spec.quality.max_tokens)
        disk += arms * items * (steps.layers * BYTES_PER_DECISION + BYTES_PER_STEP)
    weights = costs.parameters([skeleton]) * dtype.itemsize
    added = _added(skeleton, configured, steps.device.type) * dtype.itemsize
    return Estimate(
        name=spec.name,
        cells=len(cells),
        arms=arms,
        guess_s=guess,
        bound_s=len(cells) * spec.measure.budget_s,
        memory_bytes=BASE_BYTES + weights + added + max(steps.memory(cell, 2 * arms) for cell in cells),
        memory_available_bytes=psutil.virtual_memory().available,
        disk_bytes=disk,
        disk_free_bytes=free_bytes(Path()),
        flops_per_second=steps.speed,
        bytes_per_second=steps.stream,
    )
