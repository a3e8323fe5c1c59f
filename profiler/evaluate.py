"""Quality only: the spec of a finished run, or any spec, without its cells, into a run folder of its own.

A run is never changed, so what is measured afterwards is a new run that names the old one (`Manifest.evaluates`); it is
refused where the model is no longer the one the old run had. Rule 6 is checked as in every run.

Not here: how quality is measured (`quality`, `quality_pass`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiler import run as running
from profiler.errors import InputError
from profiler.records import ModelRecord
from profiler.store import MANIFEST, SPEC, Run
from profiler.writer import check_folder
from workloads import loading
from workloads.spec import QualitySpec, Spec


def evaluate(
    source: str | None, overrides: Sequence[str], out: Path | None, progress: running.Progress | None = None
) -> Path:
    """Measure the quality of every arm of a run or spec.

    Args:
        source: a run folder, a spec file or a built-in spec's name; None is the built-in quickstart. Without a section
            `quality` the section's defaults are taken.
        overrides: `quality.count=100` and the like.
        out: a new or empty folder; None makes one beside the run, or under `runs/`.
        progress: told what happens.

    Returns:
        The folder of the new run.

    Raises:
        InputError: as `run.run`; and for a run that has no spec, or whose model has changed since.
        RuleError: a rule does not hold; the folder says which, state `failed`.
    """
    progress = progress or running.Quiet()
    of = Run(source) if source is not None and (Path(source) / MANIFEST).exists() else None
    if of is not None and of.spec_yaml is None:
        raise InputError(
            f"evaluate {source}: it was recorded from a loop of its own and has no {SPEC} to take up again"
        )
    spec = loading.load(of.path / SPEC if of is not None else source, overrides)
    if of is not None:
        spec = _as_calibrated(spec, of)
    if spec.train is not None:
        raise InputError(
            f"evaluate {source}: its checkpoints are trained first; run the study, which scores every seed, and "
            "evaluate a seed's own run (seed-N/run in the study's folder) to score it on something else"
        )
    if spec.quality is None:
        spec = spec.model_copy(update={"quality": QualitySpec()})
    if of is not None:
        folder = out or running.default_folder(f"{of.path.name}-quality", of.path.parent)
    else:
        folder = out or running.default_folder(f"{spec.name}-quality")
    check_folder(folder)
    prepared = running.prepare(spec, progress)
    if of is not None:
        _refuse_another_model(of, prepared.loaded.record)
    evaluates = f"{of.manifest.name}, {of.manifest.created_utc}" if of is not None else None
    return running.carry_out(prepared, folder, [], progress, evaluates=evaluates)


def _as_calibrated(spec: Spec, of: Run) -> Spec:
    """The spec with the thresholds that the run found, so that the same arms are measured and not others of that rate.

    An arm whose rate the overrides changed is calibrated anew.
    """
    found = {arm.name: arm.calibration for arm in of.manifest.arms if arm.calibration is not None}
    arms = []
    for arm in spec.arms:
        then, options = found.get(arm.name), arm.options
        if then is not None and options.get(then.option) == then.wanted:
            options = {**options, then.option: None, "threshold": then.threshold}
        arms.append({"name": arm.name, "method": arm.method, "twin": arm.twin, **options})
    return Spec.model_validate({**spec.model_dump(), "arms": arms})


def _refuse_another_model(of: Run, now: ModelRecord) -> None:
    then = of.manifest.model
    assert then is not None  # what has a spec has a model
    for fact in ("source", "architecture", "parameters", "dtype", "weights_sha256"):
        before, after = getattr(then, fact), getattr(now, fact)
        if before != after:
            raise InputError(
                f"evaluate {of.path}: the model's {fact} was {before!r} in that run and is {after!r} now; their "
                "figures could not stand side by side"
            )
