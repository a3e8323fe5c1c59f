"""One run, start to end: model, arms, inputs, rules, cells, traces, manifest.

The order is fixed: everything a user can get wrong is checked before the folder is made; the rules that must hold
before timing are checked before the first timed step; a cell is marked done only when its rows are on disk.

Under torchrun every rank goes through all of it (`ranks`); rank 0 chooses the folder and keeps the manifest.
"""

from __future__ import annotations

import datetime as dt
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from profiler import calibration, machine, methods, models, placing, preflight, training_copy, verify
from profiler import ranks as processes
from profiler.arms import Arm, build, tree
from profiler.errors import InputError, RuleError, SpecError
from profiler.inputs import Inputs
from profiler.interrupts import Held, terminated_as_interrupt
from profiler.measure import CellRun, Limits, Outcome
from profiler.preflight import about_the_arm, about_the_spec
from profiler.quality import Item, load_items
from profiler.quality_pass import QualityRun
from profiler.ranks import Ranks
from profiler.records import CellRecord, Manifest, RuleRecord, Unsupported
from profiler.telemetry import PERIOD_S, Telemetry
from profiler.traced import trace_cell
from profiler.writer import RunWriter, check_folder
from workloads.spec import AS_IT_IS, Spec

#: Between samples that are not kept: those of ranks other than the first.
IDLE_S = 3600.0


class Progress(Protocol):
    """Where a run says how far it is; the command line draws it, tests ignore it."""

    def say(self, what: str) -> None:
        """What is being done now."""

    def at(self, share: float) -> None:
        """Share of the whole run that is done, between 0 and 1."""


@runtime_checkable
class Staged(Protocol):
    """A `Progress` that also shows how far the stage it was told last is."""

    def part(self, share: float) -> None:
        """Share of that stage that is done, between 0 and 1."""


def stage_of(progress: Progress) -> Callable[[float], None]:
    """What to tell the share of a stage to; of no effect where `progress` shows none."""
    return progress.part if isinstance(progress, Staged) else lambda share: None


class Quiet:
    """A `Progress` that says nothing."""

    def say(self, what: str) -> None:
        """Nothing."""

    def at(self, share: float) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Prepared:
    """A spec with its model, arms and inputs in memory; nothing written yet."""

    spec: Spec
    loaded: models.LoadedModel
    arms: list[Arm]
    inputs: Inputs
    items: list[Item]


def prepare(spec: Spec, progress: Progress) -> Prepared:
    """Load and check everything a spec names.

    Raises:
        SpecError: model source, method, option, checkpoint or prompts are wrong, or a cell is longer than the model.
        InputError: the model cannot be had or opened.
    """
    preflight.check(spec)
    with about_the_spec():
        inputs = Inputs(spec)
    threads = spec.measure.threads
    if threads is not None:
        torch.set_num_threads(threads)
    progress.say(f"loading {spec.model.source}")
    model = spec.model
    loaded = models.load(
        model.source, model.dtype, model.device, model.seed, report=progress.say, share=stage_of(progress)
    )
    with about_the_spec():
        inputs.tokenise(loaded)
        positions = getattr(loaded.model.config, "max_position_embeddings", None)
        items = load_items(spec.quality, inputs.encode, positions) if spec.quality is not None else []
        prompts = calibration.calibration_prompts(
            inputs.prompts, items, lambda text: inputs.opening(text, calibration.TOKENS)
        )
        arms = []
        progress.say("building arms")  # the first time on a machine some compile an operator
        for arm in spec.arms:
            with about_the_arm(arm.name):
                options, record = calibration.met(
                    loaded.model, arm.name, arm.method, arm.options, prompts, progress.say, stage_of(progress)
                )
                arms.append(build(loaded.model, arm.name, arm.method, options, arm.twin, record))
        _refuse_unfreezable(spec, arms)
    return Prepared(spec, loaded, arms, inputs, items)


def _refuse_unfreezable(spec: Spec, arms: list[Arm]) -> None:
    """Refuse to score on a prefix an arm that has nowhere to keep the gates of that prefix, and needs to."""
    without = [arm.name for arm in arms if not arm.bare.keeps_cache and arm.bare.scope != "token"]
    if spec.quality is not None and "prefix" in spec.quality.modes and without:
        raise InputError(
            f"quality.modes: prefix freezes the gates of a prompt in its cache, and arm {without[0]!r} keeps none; ask "
            "for [whole], or leave the arm out"
        )


def default_folder(name: str, root: Path = Path("runs")) -> Path:
    """`runs/<name>-<UTC time>`, numbered where a run of the same second has taken that."""
    first = root / f"{name}-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if not folder.exists())


def now_utc() -> str:
    """The time as the manifest writes it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def new_manifest(name: str, **more: Any) -> Manifest:
    """A manifest with this process, machine and versions filled in."""
    return Manifest(
        name=name,
        created_utc=now_utc(),
        pid=os.getpid(),
        host=os.uname().nodename,
        versions=machine.versions(),
        git=machine.git_state(Path(__file__).parent),
        machine=machine.facts(torch_threads=torch.get_num_threads()),
        **more,
    )


def run(spec: Spec, out: Path | None, *, resume: bool = False, progress: Progress | None = None) -> Path:
    """Run a spec into a folder.

    Args:
        spec: as resolved.
        out: the run folder, new or empty (or unfinished with `resume`); None makes one under `runs/`.
        resume: go on with an unfinished run.
        progress: told what happens.

    Returns:
        The folder.

    Raises:
        InputError: before anything is written, for what the user can put right.
        RuleError: a rule of honest measurement failed; the folder says which, state `failed`.
        KeyboardInterrupt: after the folder has been closed as `interrupted`.
    """
    progress = progress or Quiet()
    if resume and out is None:
        raise InputError("--resume needs --out DIR, the folder of the unfinished run")

    def choose() -> Path:
        folder = out or default_folder(spec.name)
        check_folder(folder, resume=resume, spec_sha256=spec.sha256(), processes=ranks.size)
        return folder

    with processes.started(spec.parallel, spec.model.device) as ranks:
        with ranks.guarded():
            folder = ranks.decide(choose)
            prepared = prepare(spec, progress)
            if not ranks.alone and not any(arm.record.parallel for arm in prepared.arms):
                raise SpecError("parallel: ranks share the experts of an arm, and no arm has any; leave it out")
        cells = [
            CellRecord(name=c.name, phase=c.phase, batch=c.batch, length=c.length, new_tokens=c.new_tokens)
            for c in spec.cell_list()
        ]
        return carry_out(prepared, folder, cells, progress, resume=resume, ranks=ranks)


def carry_out(
    prepared: Prepared,
    folder: Path,
    cells: list[CellRecord],
    progress: Progress,
    *,
    resume: bool = False,
    evaluates: str | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Run what was prepared, with these of its cells, into `folder`, and return it; errors as `run`'s.

    `evaluates`: the run whose spec this is, where only its quality is measured. `ranks`: those that run it together.
    """
    spec, ranks = prepared.spec, ranks or Ranks()
    manifest = new_manifest(
        spec.name,
        spec_sha256=spec.sha256(),
        model=prepared.loaded.record,
        arms=[arm.record for arm in prepared.arms],
        cells=cells,
        keeps_text=spec.privacy.keep_text,
        evaluates=evaluates,
    )
    if not ranks.alone:
        with ranks.guarded():
            ranks.describe()
        manifest.ranks = ranks.records
    parallel = [arm.record.parallel for arm in prepared.arms if arm.record.parallel is not None]
    with ranks.guarded():
        products_R = ranks.gather([record.products for record in parallel])
    for place, record in enumerate(parallel):
        record.nodes = [each.host for each in ranks.records] or [manifest.host]
        record.products = said_by_ranks([products[place] for products in products_R])
    with (
        opened(lambda: _writer(folder, manifest, spec.to_yaml(), resume, ranks)) as writer,
        ranks.guarded(),
    ):
        if ranks.leads:
            training_copy.keep(folder, manifest.arms)
        _run(prepared, writer, progress, ranks)
    return writer.folder


def said_by_ranks(said_R: list[str | None]) -> str | None:
    """What every rank says of itself as one: each thing said once, with who says it where they differ."""
    if len(set(said_R)) == 1:
        return said_R[0]
    who: dict[str, list[int]] = {}
    for rank, said in enumerate(said_R):
        who.setdefault(said or "not said", []).append(rank)
    return "; ".join(
        f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}: {said}" for said, which in who.items()
    )


def _writer(folder: Path, manifest: Manifest, spec_yaml: str, resume: bool, ranks: Ranks) -> RunWriter:
    """This rank's writer; rank 0 has made the folder, or taken it up again, before the others."""
    made: list[RunWriter] = []

    def first() -> list[CellRecord]:
        made.append(RunWriter(folder, manifest, spec_yaml, resume=resume))
        return manifest.cells

    try:
        with ranks.guarded():
            cells = ranks.decide(first)
            if ranks.leads:
                return made[0]
            manifest.cells = cells
            return RunWriter(folder, manifest, rank=ranks.rank, resume=resume)
    except BaseException as error:
        for writer in made:
            writer.finish("failed", f"{type(error).__name__}: {error}", now_utc())
        raise


@contextmanager
def opened(make: Callable[[], RunWriter]) -> Iterator[RunWriter]:
    """Make a writer, and close its folder with the state that fits how the block ended.

    An error leaves with a note of where the folder is. SIGTERM is met like Ctrl-C; a signal that comes while the folder
    is made or closed waits, so that no folder is left half made or open.
    """
    with terminated_as_interrupt(), Held() as held:
        writer = make()
        try:
            with held.lifted():
                yield writer
        except (KeyboardInterrupt, GeneratorExit) as error:
            error.add_note(f"what was recorded is kept in {writer.folder}")
            writer.finish("interrupted", "stopped by the user; every cell marked done is whole", now_utc())
            raise
        except BaseException as error:
            error.add_note(f"what was recorded is kept in {writer.folder}")
            writer.finish("failed", f"{type(error).__name__}: {error}", now_utc())
            raise
        writer.finish("complete", None, now_utc())


def _run(prepared: Prepared, writer: RunWriter, progress: Progress, ranks: Ranks) -> None:
    spec, arms, inputs, manifest = prepared.spec, prepared.arms, prepared.inputs, writer.manifest
    earlier = manifest.contention
    twin_medians: list[float] = []
    stage = stage_of(progress)
    with machine.Contention(ranks.launcher) as contention, _telemetry(writer) as telemetry:
        manifest.unsupported = [*telemetry.unsupported, *_unsupported(prepared)]
        for arm in arms:
            progress.say(f"checking {arm.name}: open equals twin, repeats, order, company")
            manifest.rules += _of_all(
                ranks, verify.verify(prepared.loaded.model, arm.record, inputs.samples(), stage, ranks)
            )
            gc.collect()  # a wrapped tree and its handle refer to each other: what was checked would stay in memory
        _enforce(manifest.rules)
        writer.save_manifest()
        plain = next(arm for arm in spec.arms if arm.method in AS_IT_IS)
        dense = tree(prepared.loaded.model, plain.method, methods.configure(plain.method, plain.options))
        parts = len(manifest.cells) + (1 if prepared.items else 0)
        for index, cell in enumerate(manifest.cells):
            if cell.done:
                continue
            start = index / parts

            def between(share: float, start: float = start) -> None:
                contention.mark()
                stage(share)
                progress.at(start + share / parts)

            if cell.new_tokens:
                progress.say(f"{cell.name}: the dense model's continuation")
            given = inputs.of(cell, dense, stage).of(ranks.share(cell.batch))
            progress.say(cell.name)
            if ranks.leads:
                for rows in inputs.prompt_rows(cell):
                    writer.append(rows.table, rows.columns, cell=rows.cell)
            limits = Limits(**spec.measure.model_dump(exclude={"threads"}))
            outcome = CellRun(given, arms, limits, writer, index, between, ranks).run()
            if spec.trace is not None:
                progress.say(f"{cell.name}: tracing")
                trace_cell(given, arms, spec.trace, writer, index, stage, ranks)
            manifest.rules += _of_all(ranks, outcome.rules)
            _enforce(manifest.rules)
            twin_medians = _longest(twin_medians, outcome)
            manifest.contention = _verdict(contention, twin_medians, earlier, ranks)
            others = ranks.gather(writer.written(cell))[1:]
            writer.close_cell(cell, others if ranks.leads else ())
            progress.at((index + 1) / parts)
        _measure_quality(prepared, writer, progress)
        contention.mark()
    manifest.unsupported = [*telemetry.unsupported, *_unsupported(prepared)]
    manifest.contention = _verdict(contention, twin_medians, earlier, ranks)
    if not ranks.alone:
        _merge(writer, ranks)
    if ranks.leads:
        placing.place(writer, manifest.arms, spec.parallel.experts if spec.parallel is not None else None)


def _of_all(ranks: Ranks, mine: list[RuleRecord]) -> list[RuleRecord]:
    """Each rule as rank 0 found it, or as the first rank did for which it does not hold."""
    return [
        next((rule for rule in rules if not rule.passed), rules[0]) for rules in zip(*ranks.gather(mine), strict=True)
    ]


def _merge(writer: RunWriter, ranks: Ranks) -> None:
    """Every row of every rank is on disk then, and rank 0's manifest counts it."""
    others = ranks.gather(writer.tallies())[1:]
    for counts, drops in others if ranks.leads else ():
        writer.add(counts, drops)


def _measure_quality(prepared: Prepared, writer: RunWriter, progress: Progress) -> None:
    """The quality pass, after all timing; whole or not at all, since a resumed run begins it anew."""
    spec, items, manifest = prepared.spec.quality, prepared.items, writer.manifest
    if spec is None or (manifest.quality is not None and manifest.quality.done):
        return
    progress.say(f"quality: {len(items)} items")
    cells, before = len(prepared.spec.cell_list()), len(manifest.cells)
    stage = stage_of(progress)

    def at(share: float) -> None:
        stage(share)
        progress.at((before + share) / (before + 1))

    keep_text = prepared.spec.privacy.keep_text
    manifest.rules += QualityRun(items, prepared.arms, spec.modes, writer, cells, keep_text, at).run()
    _enforce(manifest.rules)
    assert manifest.quality is not None
    writer.close_cell(manifest.quality)


def _verdict(
    contention: machine.Contention, twin_medians: list[float], earlier: dict[str, Any], ranks: Ranks
) -> dict[str, Any]:
    """Contention so far, on rank 0's machine; what was seen before the run was resumed stays in it."""
    now = contention.verdict(
        twin_times=twin_medians, ranks=ranks.on_this_host, threads_per_rank=torch.get_num_threads()
    )
    if not earlier:
        return now
    return now | {
        "contended": now["contended"] or earlier["contended"],
        "sentence": f"Before it was resumed: {earlier['sentence']} After: {now['sentence']}",
        "earlier": earlier,
    }


def _longest(so_far: list[float], outcome: Outcome) -> list[float]:
    """Drift is judged on the cell with the most repeats: a third of few repeats says nothing."""
    return max([so_far, *outcome.twin_medians_ns.values()], key=len)


def _telemetry(writer: RunWriter) -> Telemetry:
    """Samples of the machine into the folder; of several ranks, rank 0's machine."""

    def emit(rows: dict[str, list[Any]]) -> None:
        if writer.rank == 0:
            writer.append("telemetry", rows, cell="telemetry")

    return Telemetry(emit, period_s=PERIOD_S if writer.rank == 0 else IDLE_S)


def _unsupported(prepared: Prepared) -> list[Unsupported]:
    found = [
        Unsupported(metric=f"expert time by width of arm {arm.name}", reason=arm.record.parallel.times_note)
        for arm in prepared.arms
        if arm.record.parallel is not None and arm.record.parallel.times_note is not None
    ]
    if prepared.loaded.model.device.type == "cuda":
        return found
    return [
        *found,
        Unsupported(metric="device_ns", reason="the model ran on the CPU, which has no device clock of its own"),
        Unsupported(
            metric="host synchronisations", reason="counted on CUDA only; on the CPU there is nothing to wait for"
        ),
    ]


def _enforce(rules: list[RuleRecord]) -> None:
    broken = [rule for rule in rules if not rule.passed]
    if broken:
        first = broken[0]
        where = " ".join(part for part in (first.arm, first.cell) if part)
        raise RuleError(f"rule {first.rule} ({first.name}) does not hold for {where}: {first.detail}")
