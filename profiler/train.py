"""Training what a method adds to a frozen backbone: one recipe, start to end, resumable.

    python -m profiler train workloads/recipes/layerroute-smollm2.yaml --out DIR

The method owns the objective (`methods.Trainable`); the loop here owns text, AdamW, warm-up and schedule of the
learning rate, accumulation, clipping, held-out figures and states. The backbone computes in the recipe's dtype, what is
trained is float32.

`DIR` then holds `recipe.yaml` as resolved, `held_out.jsonl`, which `quality.source` takes, `log.jsonl`
(`training_log`), `state/` (`training_state`) and, at the end, `checkpoint/`, which an arm's `checkpoint` option takes.

The seed covers initialisation, dropout, order of the text and the choice of what is held out. Equal seed, machine
and threads give equal weights, bit for bit, also when the training was killed and resumed in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiler import machine, methods, models, training_data, training_log, training_state
from profiler.errors import InputError, RuleError
from profiler.execution.likelihood import predicted, token_nll
from profiler.methods import Trainable
from profiler.recorder import Recorder
from profiler.run import Progress, Quiet, default_folder
from profiler.training_data import Item, Split
from workloads import recipe as recipes
from workloads.recipe import Recipe, TrainingSpec

RECIPE_FILE, STATES, CHECKPOINT = "recipe.yaml", "state", "checkpoint"
#: The text that was held out, as a file of prompts.
HELD_OUT_FILE = "held_out.jsonl"
#: Updates between two lines of progress.
_SAY_EVERY = 10


@dataclass(frozen=True)
class Trained:
    """A finished training: its folder, and the lines of its log."""

    folder: Path
    log: list[dict[str, Any]]

    @property
    def checkpoint(self) -> Path:
        """The folder an arm's `checkpoint` option takes."""
        return self.folder / CHECKPOINT


def train(
    recipe: Recipe, out: Path | None = None, *, resume: bool = False, progress: Progress | None = None
) -> Trained:
    """Train a recipe into a folder.

    Args:
        recipe: as resolved.
        out: the folder, new or empty (or of an unfinished training of this very recipe, with `resume`); None makes
            one under `runs/`.
        resume: go on from the folder's last state; a training that never reached one starts over.
        progress: told what happens.

    Raises:
        InputError: before anything is trained, for what the user can put right.
        RuleError: loss or gradients are no longer finite; the last state is kept.
    """
    progress = progress or Quiet()
    if resume and out is None:
        raise InputError("--resume needs --out DIR, the folder of the unfinished training")
    folder = out or default_folder(recipe.name)
    config = methods.configure(recipe.method.name, recipe.method.options, where="method.")
    objective = methods.objective(recipe.method.name, recipe.objective.options, where="objective.")
    _check_folder(folder, resume)
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    progress.say(f"loading {recipe.model.source}")
    loaded = models.load(
        recipe.model.source, recipe.model.dtype, recipe.model.device, recipe.model.seed, report=progress.say
    )
    if loaded.tokenizer is None:
        raise InputError(f"model {recipe.model.source}: it has no tokenizer, so text cannot be made into ids")
    items = training_data.items(recipe.data, loaded.tokenizer, recipe.training.length)
    split = training_data.split(items, recipe.data.held_out, recipe.training.seed)
    handle = methods.load(recipe.method.name).wrap(loaded.model, config, Recorder())
    assert isinstance(handle, Trainable)
    handle.prepare(recipe.training.gradient_checkpointing)
    run = _Run(recipe, folder, handle, objective, split, progress)
    device = handle.model.device
    with closing(run), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        run.start(resume, _facts(recipe, handle, items))
        run.loop()
        run.finish()
    return Trained(folder, training_log.read(folder))


def held_out(handle: Trainable, objective: Any, groups: dict[str, list[Item]], batch: int) -> dict[str, dict[str, Any]]:
    """Figures on text that is not trained on, by domain.

    `tokens` predicted; `open`, nats a token with every gate open; `routed`, the same as the router decides, as in
    training (a method that decides for whole sequences sees the words being scored); `skip`, share of the deciders
    (sequences, or predicted tokens: `methods.Losses`) that skip each layer; `skip_rate`, its mean; `deciding`, layers
    that some of the domain's deciders run and others skip; and means of the method's own figures.
    """
    figures = {}
    device = handle.model.device
    with _evaluating(handle.model), torch.no_grad():
        for domain, members in groups.items():
            tokens = open_nll = 0.0
            routed = _Sums()
            for start in range(0, len(members), batch):
                ids_BT, mask_BT = training_data.pad(members[start : start + batch], device)
                tokens += predicted(mask_BT)
                routed.add(handle.losses(ids_BT, mask_BT, objective, tokens=1, sequences=1))
                handle.force("open")
                logits_BTV = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
                open_nll += float(token_nll(logits_BTV, ids_BT, mask_BT).sum())
                handle.force(None)
            skip = routed.skip()
            figures[domain] = {
                "sequences": len(members),
                "tokens": int(tokens),
                "open": open_nll / tokens,
                "routed": routed.nll / tokens,
                "skip": skip,
                "skip_rate": sum(skip) / len(skip),
                "deciding": sum(0 < share < 1 for share in skip),
                **routed.means(),
            }
    return figures


class _Sums:
    """Losses of several batches, added up on the host."""

    def __init__(self) -> None:
        self.total = self.nll = self.penalty = 0.0
        self.deciders = 0
        self._ran: list[int] = []
        self._more: dict[str, float] = {}

    def add(self, found: methods.Losses) -> None:
        """One batch more."""
        self.total += float(found.total.detach())
        self.nll += float(found.nll)
        self.penalty += float(found.penalty)
        self.deciders += found.deciders
        ran = found.ran_L.tolist()
        self._ran = [a + b for a, b in zip(self._ran or [0] * len(ran), ran, strict=True)]
        for name, value in found.sums.items():
            self._more[name] = self._more.get(name, 0.0) + float(value)

    def skip(self) -> list[float]:
        """Share of deciders that skipped each layer."""
        return [round(1 - ran / self.deciders, 6) for ran in self._ran]

    def means(self) -> dict[str, float]:
        """The method's own figures, each for one decider."""
        return {name: value / self.deciders for name, value in self._more.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off while the block runs."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def warm_up(spec: TrainingSpec) -> int:
    """Updates of the warm-up."""
    return math.ceil(spec.warmup_share * spec.steps - 1e-9)  # 3 % of 100 is 3.0000000000000004 or less


def ramp(spec: TrainingSpec, step: int) -> float:
    """How far the warm-up has come at update `step` (0-based): 1/W at the first of W updates, 1 from the last on."""
    return min(1.0, (step + 1) / max(1, warm_up(spec)))


def learning_rate(spec: TrainingSpec, step: int) -> float:
    """Of update `step` (0-based): the ramp, then `lr·(1 + cos(π·x)) / 2`, x the share of what follows, or `lr`."""
    warming = warm_up(spec)
    if step < warming:
        return spec.learning_rate * ramp(spec, step)
    if spec.schedule == "constant":
        return spec.learning_rate
    return spec.learning_rate * (1 + math.cos(math.pi * (step - warming) / (spec.steps - warming))) / 2


class _Run:
    """One training in progress."""

    def __init__(
        self, recipe: Recipe, folder: Path, handle: Trainable, objective: Any, split: Split, progress: Progress
    ) -> None:
        self._recipe, self._spec, self._folder = recipe, recipe.training, folder
        self._handle, self._objective, self._split, self._progress = handle, objective, split, progress
        self._parameters = handle.trainables()
        for parameter in handle.model.parameters():
            parameter.requires_grad_(False)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=self._spec.learning_rate,
            betas=(self._spec.betas[0], self._spec.betas[1]),
            weight_decay=self._spec.weight_decay,
        )
        self._step = 0
        self._seconds = 0.0
        self._kept_at = 0
        self._log = training_log.Log(folder)

    def start(self, resume: bool, facts: dict[str, Any]) -> None:
        """Start values, or the last state."""
        self._handle.start(training_data.derived(self._spec.seed, "initialisation"))
        state = training_state.latest(self._folder / STATES)
        if resume and state is not None:
            self._step = self._kept_at = training_state.restore(
                state, self._recipe.sha256(), self._parameters, self._adamw
            )
            self._seconds = self._log.cut_back(self._step)
            self._log.write("resumed", step=self._step)
            return
        (self._folder / RECIPE_FILE).write_text(self._recipe.to_yaml(), encoding="utf-8")
        kept = training_data.held_out_lines(self._recipe.data, self._split.held_out)
        (self._folder / HELD_OUT_FILE).write_text(kept, encoding="utf-8")
        self._log.clear()
        self._log.write("start", **facts)
        self._evaluate()

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def loop(self) -> None:
        """Every update that is left."""
        spec, began = self._spec, time.perf_counter() - self._seconds
        first, since = self._step, time.perf_counter()
        self._handle.model.train()
        while self._step < spec.steps:
            line = self._update()
            self._seconds = time.perf_counter() - began
            done = self._step - first
            left = (time.perf_counter() - since) / done * (spec.steps - self._step)
            self._log.write("step", **line, seconds=round(self._seconds, 3))
            self._progress.at(self._step / spec.steps)
            if self._step % _SAY_EVERY == 0 or self._step == spec.steps:
                self._progress.say(
                    f"step {self._step}/{spec.steps}  loss {line['loss']:.3f}  lm {line['lm']:.3f}  "
                    f"{self._handle.step_words(line)}  {line['tokens_per_s']:.0f} tokens/s  {_duration(left)} left"
                )
            if self._step % spec.evaluate_every == 0 and self._step < spec.steps:
                self._evaluate()
            # After the figures: a training taken up from here must have them in its log.
            if self._step % spec.checkpoint_every == 0 or self._step == spec.steps:
                self._keep()

    def finish(self) -> None:
        """The checkpoint, and the figures of what it holds: numbers rounded to the stored dtype included."""
        stored = self._spec.stored_dtype
        checkpoint = self._folder / CHECKPOINT
        self._handle.save(checkpoint, getattr(torch, stored), self._recipe.model.source)
        self._handle.restore(checkpoint)
        self._evaluate(stored)
        self._log.write("end", seconds=round(self._seconds, 3))
        self._progress.at(1.0)

    def _update(self) -> dict[str, Any]:
        spec, device = self._spec, self._handle.model.device
        started = time.perf_counter()
        size = spec.batch * spec.accumulation
        indices = training_data.chosen(len(self._split.training), size, self._step, spec.seed)
        micro = [
            training_data.pad([self._split.training[i] for i in indices[k : k + spec.batch]], device)
            for k in range(0, size, spec.batch)
        ]
        tokens = sum(predicted(mask_BT) for _, mask_BT in micro)
        rate = learning_rate(spec, self._step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        # The step's own seed, so that dropout needs no state to be resumed.
        torch.manual_seed(training_data.derived(spec.seed, "dropout", self._step))
        sums = _Sums()
        for ids_BT, mask_BT in micro:
            found = self._handle.losses(
                ids_BT, mask_BT, self._objective, tokens=tokens, sequences=size, ramp=ramp(spec, self._step)
            )
            found.total.backward()
            sums.add(found)
        for parameter in self._parameters.values():
            if parameter.grad is None:  # nothing reached it (an adapter no token took): its gradient is 0, and known
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), spec.clip))
        if not (math.isfinite(sums.total) and math.isfinite(norm)):
            raise RuleError(
                f"training step {self._step + 1}: the loss is {sums.total} and the gradients' norm {norm}; the state "
                f"after step {self._kept_at} is kept. A lower training.learning_rate or dtype float32 may help"
            )
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._step += 1
        skip = sums.skip()
        real = sum(int(mask_BT.sum()) for _, mask_BT in micro)
        return {
            "step": self._step,
            "loss": sums.total,
            "lm": sums.nll / tokens,
            "gate": sums.penalty / sums.deciders,
            "skip": skip,
            "skip_rate": sum(skip) / len(skip),
            **sums.means(),
            "grad_norm": norm,
            "lr": rate,
            "tokens": real,
            "tokens_per_s": round(real / (time.perf_counter() - started), 2),
        }

    def _keep(self) -> None:
        states = self._folder / STATES
        training_state.save(states, self._step, self._recipe.sha256(), self._parameters, self._adamw)
        self._kept_at = self._step

    def _evaluate(self, stored: str | None = None) -> None:
        self._progress.say(f"step {self._step}: held-out figures")
        figures = held_out(self._handle, self._objective, self._split.held_out, self._spec.batch)
        learned = self._handle.constants
        constants = {name: [round(value, 6) for value in of_layers.values()] for name, of_layers in learned.items()}
        self._log.write("held_out", step=self._step, stored=stored, figures=figures, **constants)
        for domain, found in figures.items():
            self._progress.say(f"  {domain}: {self._handle.held_out_words(found)}")


def summary(trained: Trained) -> list[str]:
    """What a training came to, in words: held-out loss before and after, a line a domain; and where things are."""
    evaluated = [line["figures"] for line in trained.log if line["kind"] == "held_out"]
    before, after = evaluated[0], evaluated[-1]
    method = methods.load(recipes.load(trained.folder / RECIPE_FILE).method.name)
    assert issubclass(method, Trainable)
    seen = " (the gates see the whole text, as in training)" if method.scope == "sequence" else ""
    lines = [f"held-out loss, nats a token{seen}"]
    for name, found in after.items():
        lines.append(f"  {name}: {method.before_words(before[name])}; {method.held_out_words(found)}")
    return [*lines, f"checkpoint  {trained.checkpoint}", f"log         {trained.folder / training_log.NAME}"]


def _check_folder(folder: Path, resume: bool) -> None:
    if not folder.exists():
        if resume:
            raise InputError(f"--resume {folder}: there is no such folder")
        return
    if not folder.is_dir():
        raise InputError(f"--out {folder}: it is a file; a folder is needed")
    names = {path.name for path in folder.iterdir()}
    if names and not resume:
        raise InputError(f"--out {folder}: the folder is not empty; take another, or add --resume to go on with it")
    if names and RECIPE_FILE not in names:
        raise InputError(f"--resume {folder}: there is no {RECIPE_FILE} in it, so it is not a training's folder")


def _facts(recipe: Recipe, handle: Trainable, items: Sequence[Item]) -> dict[str, Any]:
    device = handle.model.device
    return {
        "recipe": recipe.name,
        "recipe_sha256": recipe.sha256(),
        "versions": machine.versions(("torch", "transformers", "peft")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu_model(),
        "threads": torch.get_num_threads(),
        "trainable_parameters": sum(parameter.numel() for parameter in handle.trainables().values()),
        "items": len(items),
        "items_cut": sum(item.cut > 0 for item in items) / len(items),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
