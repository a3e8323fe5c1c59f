"""What a run keeps of how the checkpoints of its arms were trained: their logs and recipes, in `RUN/training/ARM`.

A run is read without anything but its folder, and a checkpoint may be gone by then. Copied where they lie beside the
checkpoint, as in one that ships, or beside the folder `checkpoint` of a training. Not here: reading them
(`analysis.training`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from profiler import training_log
from profiler.errors import StoreError
from profiler.records import ArmRecord

FOLDER = "training"
RECIPE, CHECKPOINT = "recipe.yaml", "checkpoint"


def keep(run: Path, arms: Iterable[ArmRecord]) -> None:
    """Copy log and recipe of every arm's checkpoint into the run folder; an arm whose checkpoint has none keeps none.

    Raises:
        StoreError: a file cannot be copied.
    """
    for arm in arms:
        checkpoint = arm.options.get("checkpoint")
        source = trained_in(Path(checkpoint)) if isinstance(checkpoint, str) else None
        if source is None:
            continue
        into = run / FOLDER / arm.name
        try:
            into.mkdir(parents=True, exist_ok=True)
            for name in (training_log.NAME, RECIPE):
                shutil.copyfile(source / name, into / name)
        except OSError as error:
            raise StoreError(f"{into}: the training log cannot be kept: {error.strerror or error}") from error


def trained_in(checkpoint: Path) -> Path | None:
    """The folder with log and recipe of the training that made a checkpoint; None where there is none to be found."""
    beside = [checkpoint, checkpoint.resolve().parent] if checkpoint.resolve().name == CHECKPOINT else [checkpoint]
    for folder in beside:
        if all((folder / name).is_file() for name in (training_log.NAME, RECIPE)):
            return folder
    return None
