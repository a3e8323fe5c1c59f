"""The recorder around a user's own loop: the same run folder without a spec.

    from profiler.session import record, wrap

    wrap(model, "layerroute", gates={"forced": {"ratio": 0.3}})     # or leave the model dense
    with record(model, out="runs/mine", arm="mine") as session:
        for batch in batches:
            with session.step(phase="prefill", requests=batch.ids):
                model(batch.input_ids)

Every forward of the model inside `record` is one step, those of `generate()` too; `step` only labels them. The
loop is the user's, so there is no twin and no pairing here: a session has decisions, rows and times, and no
comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from profiler import methods
from profiler.arms import describe
from profiler.costs import parameters
from profiler.errors import InputError, RuleError
from profiler.recorder import Recorder, StepData
from profiler.records import CellRecord, ModelRecord, Phase, RuleRecord
from profiler.run import closing, new_manifest
from profiler.stepdata import Place, decision_rows, executed_as_decided, segment_rows
from profiler.store import Rows, RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def wrap(model: PreTrainedModel, method: str, **options: Any) -> methods.Method:
    """Make `model` route by `method`, in place. The handle is also found as `model.gatewise`.

    Raises:
        InputError: unknown method, wrong option, or the model is wrapped already.
    """
    return methods.load(method).wrap(model, methods.configure(method, options), Recorder())


class Session:
    """An open recording; made by `record`."""

    def __init__(self, handle: methods.Method, writer: RunWriter, arm: str) -> None:
        self._handle, self._writer = handle, writer
        self._arm = next(record for record in writer.manifest.arms if record.name == arm)
        self._steps = 0
        self._problems: list[str] = []
        self._dropped = 0

    @contextmanager
    def step(self, phase: Phase | None = None, requests: Sequence[Any] | None = None) -> Iterator[None]:
        """Label the forwards inside.

        Args:
            phase: `prefill`, `decode` or `mixed`; None lets the cache tell.
            requests: one id a batch row; None names them `row-0`, `row-1`, ...

        Raises:
            InputError: an unknown phase, or (when the model runs) another number of ids than rows.
        """
        if phase is not None and phase not in get_args(Phase):
            raise InputError(f"step(phase={phase!r}): a phase is one of {', '.join(get_args(Phase))}")
        recorder, tracker = self._handle.recorder, self._handle.tracker
        recorder.phase = phase
        tracker.name(None if requests is None else [str(request) for request in requests])
        try:
            yield
        finally:
            recorder.phase = None
            tracker.name(None)

    def accept(self, data: StepData) -> None:
        """The recorder's sink: number the step here, make rows on the writer's thread."""
        step, self._steps = self._steps, self._steps + 1
        self._dropped += data.dropped
        self._writer.submit(lambda: self._rows(data, step), dropped_as="steps")

    def _rows(self, data: StepData, step: int) -> Iterable[Rows]:
        place = Place(f"session-{data.phase}", step)
        self._problems += executed_as_decided(data, self._arm)
        view = data.sequences.view
        yield Rows(
            "steps",
            place.cell,
            {
                "arm": [self._arm.name],
                "pass": "instrumented",
                "repeat": 0,
                "order": 0,
                "step": step,
                "index": step,
                "phase": data.phase,
                "rows": view.rows,
                "context": view.context,
                "wall_ns": data.wall_ns,
                "device_ns": data.device_ns,
            },
        )
        yield from segment_rows(data, self._arm, place)
        yield from decision_rows(data, self._arm, place)

    def close(self) -> None:
        """Flush, and put rule 1's outcome and the cells seen into the manifest.

        Raises:
            RuleError: rows executed and gates recorded differ.
        """
        manifest, writer = self._writer.manifest, self._writer
        writer.flush()
        for phase in get_args(Phase):
            if any(writer.folder.glob(f"steps/part-session-{phase}-*.parquet")):
                cell = CellRecord(name=f"session-{phase}", phase=phase, batch=0, length=0, done=True, stopped="session")
                manifest.cells.append(cell)
        if self._dropped:
            manifest.drops["gates"] = manifest.drops.get("gates", 0) + self._dropped
        problems = self._problems
        manifest.rules.append(
            RuleRecord(
                rule=1,
                name="rows executed = gates recorded",
                arm=self._arm.name,
                passed=not problems,
                detail=problems[0] if problems else f"equal in {self._steps} steps",
                figures={"steps": float(self._steps), "differences": float(len(problems))},
            )
        )
        if problems:
            raise RuleError(f"rule 1 (rows executed = gates recorded) does not hold: {problems[0]}")


@contextmanager
def record(model: PreTrainedModel, out: str | Path, arm: str = "mine") -> Iterator[Session]:
    """Record every forward of `model` into the run folder `out` while the block runs.

    Args:
        model: wrapped by any method (`wrap`), or unwrapped, which records it as dense.
        out: the run folder, new or empty.
        arm: what the arm is called in the folder.

    Raises:
        InputError: the folder is taken, the architecture is not supported, or the model is being recorded already.
        RuleError: at the end, if rows executed and gates recorded differ.
    """
    handle = methods.handle_of(model)
    if handle is None:
        handle = wrap(model, "dense")
    recorder = handle.recorder
    if recorder.mode != "off":
        raise InputError("this model is being recorded already; end that session first")
    method = type(handle).__module__.rpartition(".")[2]
    manifest = new_manifest(
        Path(out).name, origin="session", model=_describe_model(model), arms=[describe(handle, arm, method, None)]
    )
    writer = RunWriter(Path(out), manifest)
    recorder.attach(handle)
    with closing(writer):
        session = Session(handle, writer, arm)
        recorder.sink, recorder.mode = session.accept, "record"
        try:
            yield session
        finally:
            recorder.detach()
            recorder.sink = None
        session.close()


def _describe_model(model: PreTrainedModel) -> ModelRecord:
    config = model.config
    device = model.device
    return ModelRecord(
        source=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        architecture=type(model).__name__,
        parameters=parameters([model]),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.type,
        device_name=str(device),
        random_weights=False,
    )
