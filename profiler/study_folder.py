"""A study's folder: which seeds it has, what of each is done, and where its training and its run lie. No torch.

    STUDY/study.json          what this file describes, whole at any moment
    STUDY/study.yaml          the spec as resolved
    STUDY/seed-N/training/    a training's folder, with `checkpoint/` at its end
    STUDY/seed-N/run/         a run folder like any other, whose spec names that checkpoint

FORMAT history
  1  first format.

Not here: making one (`study`), and what its runs say together (`analysis.study`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from profiler.errors import StoreError
from profiler.records import Record
from profiler.store import Run

STUDY, SPEC = "study.json", "study.yaml"
FORMAT = 1


class SeedRecord(Record):
    """One seed. `failed` says what rule its training or its run broke; the other seeds go on without it."""

    seed: int
    trained: bool = False
    measured: bool = False
    failed: str | None = None


class StudyRecord(Record):
    """`study.json`. `recipe_sha256` is of the recipe as resolved, the seed as it stands there."""

    format: int = FORMAT
    name: str
    created_utc: str
    finished_utc: str | None = None
    spec_sha256: str
    recipe: str
    recipe_sha256: str
    trained_arms: list[str]
    seeds: list[SeedRecord] = Field(min_length=1)


class Study:
    """A study's folder, opened for reading; one that is not finished shows the seeds that are.

    Args:
        path: the folder.

    Raises:
        StoreError: there is no `study.json`, or it is damaged or of a later format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / STUDY
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path} is not a study's folder: {STUDY}: {error.strerror or error}") from error
        try:
            found = json.loads(raw)
            number = found.get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"{file} is not a JSON object: {error}") from error
        if type(number) is not int or not 1 <= number <= FORMAT:
            raise StoreError(f"{file} has format {number!r}; this version reads up to {FORMAT}")
        try:
            self.record = StudyRecord.model_validate(found)
        except ValueError as error:
            raise StoreError(f"{file} does not fit format {number}: {error}") from error

    @property
    def done(self) -> list[int]:
        """Seeds that are trained and measured, in the spec's order."""
        return [record.seed for record in self.record.seeds if record.measured]

    def runs(self) -> dict[int, Run]:
        """The runs of the seeds that are done, opened."""
        return {seed: Run(run_folder(self.path, seed)) for seed in self.done}


def training_folder(study: Path, seed: int) -> Path:
    """Where a seed is trained."""
    return study / f"seed-{seed}" / "training"


def run_folder(study: Path, seed: int) -> Path:
    """Where a seed is measured."""
    return study / f"seed-{seed}" / "run"


def is_study(path: Path) -> bool:
    """Whether a folder says that it is a study's."""
    return (path / STUDY).is_file()


def find_studies(root: Path) -> list[Path]:
    """Studies at or directly under `root`, newest first by the time they last changed."""
    if is_study(root):
        return [root]
    found = [path.parent for path in root.glob(f"*/{STUDY}")]
    return sorted(found, key=lambda path: (path / STUDY).stat().st_mtime, reverse=True)


def save(path: Path, record: StudyRecord, spec_yaml: str) -> None:
    """Write both files; each is the old one or the new one, whole, at any moment.

    Raises:
        StoreError: they cannot be written.
    """
    try:
        for name, text in ((SPEC, spec_yaml), (STUDY, record.model_dump_json(indent=1) + "\n")):
            aside = path / f".{name}.tmp-{os.getpid()}"
            with open(aside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path / name)
    except OSError as error:
        raise StoreError(f"cannot write the study's folder {path}: {error.strerror or error}") from error


def held(path: Path) -> Sequence[str]:
    """Names in a folder, those apart that a study killed before its first `study.json` may have left."""
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if STUDY in names:
        return names
    return [name for name in names if name != SPEC and not name.startswith((f".{STUDY}.tmp-", f".{SPEC}.tmp-"))]
