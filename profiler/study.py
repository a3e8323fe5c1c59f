"""A study: one recipe trained with several seeds, and every arm measured with each checkpoint. Resumable.

    python -m profiler run layerroute-seeds --out DIR

Seed N sets `training.seed` of the recipe: initialisation, dropout, order of the text, and which of it is held out.
All else stays, or the spread between seeds would mix causes: `model.seed`, `prompts.seed` and `quality.seed` are the
spec's in every run, so that each seed is measured on the same backbone and the same inputs. `measure.seed` is raised by
N: it decides the order of arms within a repeat, and one lucky order in every run would look like agreement.

Since every seed holds out other text, no text of the recipe may be scored: a study whose quality items are also in it
is refused. Seeds are trained and measured one after another, so that what is done can be read while the rest runs.

Not here: training (`train`), a run (`run`), the folder's files (`study_folder`), comparing seeds (`analysis.study`).
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from profiler import methods, study_folder, train
from profiler import run as running
from profiler.errors import InputError, RuleError
from profiler.interrupts import terminated_as_interrupt
from profiler.preflight import about_the_spec, options_of
from profiler.presets import PRESETS
from profiler.run import Progress, Quiet, default_folder, now_utc, stage_of
from profiler.store import MANIFEST, Run
from profiler.study_folder import SeedRecord, Study, StudyRecord
from workloads import recipe as recipes
from workloads.generated import generate
from workloads.prompts import Prompt, load_prompts
from workloads.recipe import Recipe
from workloads.spec import TRAINED, PromptsSpec, Spec, run_name

#: Seeds wrap around here (`spec.Seed`).
SEEDS = 2**32


@about_the_spec()
def recipe_of(spec: Spec) -> Recipe:
    """The recipe that a study trains, checked against the spec; its seed is as the recipe has it.

    Raises:
        SpecError: the recipe is wrong, is for another model or method than the arms, or trains on what is scored.
    """
    assert spec.train is not None
    changes = [f"{key}={json.dumps(value)}" for key, value in spec.train.set.items()]
    try:
        recipe = recipes.load(spec.train.recipe, changes)
    except InputError as error:
        # The reader wrote them under `train.set`; that they are handed on as overrides is our affair.
        raise InputError(f"train: {str(error).replace('--set ', 'set ')}") from error
    ours, theirs = spec.model, recipe.model
    if theirs.source != ours.source:
        raise InputError(
            f"train: recipe {recipe.name!r} trains on {theirs.source}, and the arms run on {ours.source}; set "
            f"model.source under train.set, or change model.source"
        )
    if theirs.source in PRESETS and theirs.seed != ours.seed:
        raise InputError(
            f"train: recipe {recipe.name!r} has model.seed {theirs.seed} and the spec {ours.seed}; the weights of "
            f"{ours.source} are random, so these are two backbones"
        )
    for arm in spec.arms:
        if arm.name in spec.trained_arms() and arm.method != recipe.method.name:
            raise InputError(
                f"arms.{arm.name}.checkpoint: {TRAINED} is of method {recipe.method.name!r} (recipe {recipe.name!r}), "
                f"and the arm's method is {arm.method!r}"
            )
    methods.configure(recipe.method.name, recipe.method.options, where="train: method.")
    methods.objective(recipe.method.name, recipe.objective.options, where="train: objective.")
    _refuse_scored_training_text(spec, recipe)
    return recipe


def _refuse_scored_training_text(spec: Spec, recipe: Recipe) -> None:
    if spec.quality is None:
        return
    trained_on: list[Prompt] = []
    made = recipe.data.generated
    if made is not None:
        trained_on += [prompt for kind, count in made.counts.items() for prompt in generate(kind, count, made.seed)]
    for file in recipe.data.files:
        trained_on += load_prompts(PromptsSpec(source=file))
    texts = {_squeezed(prompt.text) for prompt in trained_on}
    scored = [prompt.id for prompt in load_prompts(spec.quality) if _squeezed(prompt.text) in texts]
    if scored:
        raise InputError(
            f"quality.source: item {scored[0]!r} is also text of recipe {recipe.name!r} ({len(scored)} items are); "
            "each seed holds out other text, so items that are scored must not be in the recipe at all"
        )


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def run_spec(spec: Spec, seed: int, checkpoint: Path) -> Spec:
    """The spec of one seed's run, which is an ordinary one."""
    arms = [
        arm.model_copy(update={"checkpoint": str(checkpoint)}) if arm.name in spec.trained_arms() else arm
        for arm in spec.arms
    ]
    measure = spec.measure.model_copy(update={"seed": (spec.measure.seed + seed) % SEEDS})
    changes = {"name": run_name(spec.name, seed), "arms": arms, "measure": measure, "train": None, "seeds": None}
    return spec.model_copy(update=changes)


def run(spec: Spec, out: Path | None = None, *, resume: bool = False, progress: Progress | None = None) -> Path:
    """Train and measure every seed of a study.

    A seed that breaks a rule is recorded as failed, and the others go on.

    Args:
        spec: as resolved, with `train` and `seeds`.
        out: the study's folder, new or empty (or begun with this very spec, with `resume`); None makes one under
            `runs/`.
        resume: go on: seeds that are done stay as they are, what was interrupted goes on from its last state.
        progress: told what happens.

    Returns:
        The folder.

    Raises:
        InputError: before anything is written, for what the user can put right.
        RuleError: at the end, if a seed failed.
    """
    progress = progress or Quiet()
    if resume and out is None:
        raise InputError("--resume needs --out DIR, the folder of the unfinished study")
    folder = out or default_folder(spec.name)
    recipe = recipe_of(spec)
    record = _record(folder, spec, recipe, resume)
    left = [seed for seed in record.seeds if not seed.measured]
    if left:
        _rehearse(spec, progress)
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder), _telling(folder), terminated_as_interrupt():
            _go_through(spec, recipe, folder, record, progress)
    failed = [seed for seed in record.seeds if seed.failed]
    if failed:
        raise RuleError(
            f"{len(failed)} of {len(record.seeds)} seeds failed; seed {failed[0].seed}: {failed[0].failed}. The others "
            f"are kept in {folder}"
        )
    return folder


def _record(folder: Path, spec: Spec, recipe: Recipe, resume: bool) -> StudyRecord:
    """What `study.json` says, or will say; nothing is written."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: it is a file; a study needs a folder of its own")
    if resume and not folder.exists():
        raise InputError(f"--resume {folder}: there is no such folder")
    if not study_folder.held(folder):
        assert spec.train is not None and spec.seeds is not None
        return StudyRecord(
            name=spec.name,
            created_utc=now_utc(),
            spec_sha256=spec.sha256(),
            recipe=spec.train.recipe,
            recipe_sha256=recipe.sha256(),
            trained_arms=spec.trained_arms(),
            seeds=[SeedRecord(seed=seed) for seed in spec.seeds],
        )
    if not resume:
        what = "a study" if study_folder.is_study(folder) else "other files"
        raise InputError(
            f"--out {folder}: the folder must be new or empty, and it holds {what}. Choose another folder, or --resume "
            "to go on with an unfinished study."
        )
    found = Study(folder).record
    for what, then, now in (
        ("spec", found.spec_sha256, spec.sha256()),
        ("recipe", found.recipe_sha256, recipe.sha256()),
    ):
        if then != now:
            raise InputError(
                f"--resume {folder}: its {what} (sha256 {then[:12]}) is not the one given (sha256 {now[:12]}); seeds "
                "under two of them cannot be compared"
            )
    return found


def _rehearse(spec: Spec, progress: Progress) -> None:
    """Load and check all that a run needs but the checkpoint, with routers as training starts them.

    A cell that is too long or a prompt that is missing is then said before hours of training, not after.
    """
    arms = [arm.model_copy(update=options_of(spec, arm)) for arm in spec.arms]
    with _threads_kept():
        running.prepare(spec.model_copy(update={"arms": arms}), progress)
    gc.collect()


def _go_through(spec: Spec, recipe: Recipe, folder: Path, record: StudyRecord, progress: Progress) -> None:
    def save() -> None:
        study_folder.save(folder, record, spec.to_yaml())

    save()
    parts = len(record.seeds)
    for place, of_seed in enumerate(record.seeds):
        if of_seed.measured:
            continue
        seed, of_seed.failed = of_seed.seed, None
        training = study_folder.training_folder(folder, seed)
        part = _Part(progress, f"seed {seed}", place / parts, 0.5 / parts)
        try:
            if not of_seed.trained:
                _train(_seeded(recipe, seed), training, part)
                of_seed.trained = True
                save()
            checkpoint = Path(os.path.abspath(training / train.CHECKPOINT))
            part = _Part(progress, f"seed {seed}", (place + 0.5) / parts, 0.5 / parts)
            _measure(run_spec(spec, seed, checkpoint), study_folder.run_folder(folder, seed), part)
            of_seed.measured = True
        except RuleError as error:
            of_seed.failed = str(error)
            part.say(f"failed: {error}")
        save()
    if all(of_seed.measured for of_seed in record.seeds):
        record.finished_utc = now_utc()
        save()
    progress.at(1.0)


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"seed": seed})})


def _train(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Train one seed, from its last state where it has one."""
    begun = (folder / train.RECIPE_FILE).exists()
    if folder.exists() and not begun:  # killed before there was anything to keep
        shutil.rmtree(folder)
    with _threads_kept():
        train.train(recipe, folder, resume=begun, progress=progress)
    gc.collect()


def _measure(spec: Spec, folder: Path, progress: Progress) -> None:
    """Run one seed's spec, from its last whole cell where it has one."""
    begun = (folder / MANIFEST).exists()
    if begun:
        before = Run(folder)
        if before.state == "complete" and before.manifest.spec_sha256 == spec.sha256():
            return  # killed between the end of the run and the study's note of it
    with _threads_kept():
        running.run(spec, folder, resume=begun, progress=progress)
    gc.collect()


@contextmanager
def _threads_kept() -> Iterator[None]:
    """A recipe or spec that sets the number of threads sets it for itself, not for what comes after."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second process in one folder; the system lets go of it when this one ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {folder}: another process is writing this study; stop that one first") from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Say of an interruption how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"the study goes on with --out {folder} --resume")
        raise


class _Part:
    """A share of the whole study's progress."""

    def __init__(self, whole: Progress, name: str, start: float, width: float) -> None:
        self._whole, self._name, self._start, self._width = whole, name, start, width

    def say(self, what: str) -> None:
        self._whole.say(f"{self._name}: {what}")

    def part(self, share: float) -> None:
        stage_of(self._whole)(share)

    def at(self, share: float) -> None:
        self._whole.at(self._start + share * self._width)
