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

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from profiler import checkpoints, methods, placing
from profiler.arms import describe
from profiler.costs import backbone_parameters
from profiler.errors import InputError, RuleError
from profiler.execution.stock_experts import has_experts
from profiler.recorder import Recorder, StepData
from profiler.records import CellRecord, ModelRecord, Phase, RuleRecord
from profiler.run import new_manifest, opened
from profiler.stepdata import Place, decision_rows, executed_as_decided, segment_rows
from profiler.writer import Rows, RunWriter, check_folder
from workloads.spec import NAME_PATTERN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: As a spec's arms.
MAX_NAME = 64
_TOGETHER = (
    "record: forwards of several threads ran at once; one model is recorded one forward at a time. Let one thread call "
    "it, or put a lock around the call"
)


def wrap(model: PreTrainedModel, method: str, **options: Any) -> methods.Method:
    """Make `model` route by `method`, in place. The handle is also found as `model.gatewise`.

    Raises:
        InputError: unknown method, wrong option, no model of transformers, or the model is wrapped already.
    """
    _require_transformers(model)
    config = methods.configure(method, checkpoints.resolve(method, options, model))
    return methods.load(method).wrap(model, config, Recorder())


def _require_transformers(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"{type(model).__name__} is no model of the transformers library; a causal language model of it is needed, "
            "such as profiler.models.load gives, and not what compiles or wraps one"
        )


class _OneAtATime:
    """Refuses a forward that begins while another thread's runs: what is recorded of the two would be mixed up."""

    def __init__(self) -> None:
        self.clashed = False
        self._running = threading.Lock()
        self._owner: int | None = None
        self._hooks: list[Any] = []

    def watch(self, handle: methods.Method) -> None:
        """From now on; to be called once the recorder is attached, since the first to be asked must be this."""
        root = handle.root
        self._hooks = [
            root.register_forward_pre_hook(self._enter, prepend=True),
            root.register_forward_hook(self._leave, always_call=True),
        ]

    def unwatch(self) -> None:
        """No longer."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: Any, args: Any) -> None:
        if not self._running.acquire(blocking=False):
            self.clashed = True
            raise InputError(_TOGETHER)
        self._owner = threading.get_ident()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if self._owner == threading.get_ident():
            self._owner = None
            self._running.release()


class Session:
    """An open recording; made by `record`."""

    def __init__(self, handle: methods.Method, writer: RunWriter) -> None:
        self._handle, self._writer = handle, writer
        (self._arm,) = writer.manifest.arms
        self._cells: dict[str, CellRecord] = {}
        self._steps = 0
        self._dropped = 0
        self._checked = 0
        self._problems: list[str] = []

    @contextmanager
    def step(self, phase: Phase | None = None, requests: Iterable[Any] | None = None) -> Iterator[None]:
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
        number, self._steps = self._steps, self._steps + 1
        self._dropped += data.dropped
        cell = self._cell(data.phase)
        self._writer.submit(lambda: self._rows(data, Place(cell.name, number)), dropped_as="steps")

    def _cell(self, phase: str) -> CellRecord:
        """The cell of a phase; in the manifest from its first step on, so that a killed session has it."""
        if phase not in self._cells:
            self._cells[phase] = CellRecord(
                name=f"session-{phase}", phase=cast(Phase, phase), batch=0, length=0, stopped="session"
            )
            self._writer.manifest.cells.append(self._cells[phase])
            self._writer.save_manifest()
        return self._cells[phase]

    def _rows(self, data: StepData, place: Place) -> Iterable[Rows]:
        self._problems += executed_as_decided(data, self._arm)
        self._checked += 1
        view = data.sequences.view
        yield Rows(
            "steps",
            place.cell,
            {
                "arm": [self._arm.name],
                "pass": "instrumented",
                "repeat": 0,
                "order": 0,
                "step": place.step,
                "index": place.step,
                "phase": data.phase,
                "rows": view.rows,
                "context": view.context,
                "wall_ns": data.wall_ns,
                "device_ns": data.device_ns,
            },
        )
        yield from segment_rows(data, self._arm, place)
        yield from decision_rows(data, self._arm, place)

    def conclude(self) -> RuleRecord:
        """Flush, and put the cells and rule 1's outcome, which is returned, into the manifest."""
        manifest, problems = self._writer.manifest, self._problems
        self._writer.flush()
        for cell in self._cells.values():
            cell.done = True
        if self._dropped:
            manifest.drops["gates"] = manifest.drops.get("gates", 0) + self._dropped
        rule = RuleRecord(
            rule=1,
            name="rows executed = gates recorded",
            arm=self._arm.name,
            passed=not problems,
            detail=problems[0] if problems else f"equal in {self._checked} steps",
            figures={"steps": float(self._checked), "differences": float(len(problems))},
        )
        manifest.rules.append(rule)
        return rule


@contextmanager
def record(model: PreTrainedModel, out: str | Path, arm: str = "mine") -> Iterator[Session]:
    """Record every forward of `model` into the run folder `out` while the block runs.

    Args:
        model: wrapped by any method (`wrap`), or unwrapped, which records it as it is (dense, or with experts of its
            own as stock_moe) and leaves it unwrapped.
        out: the run folder, new or empty.
        arm: what the arm is called in the folder; letters, digits, '.', '_' and '-'.

    Raises:
        InputError: the folder is taken, the name is none, the architecture is not supported, the model is being
            recorded already, or forwards of several threads ran at once.
        StoreError: the folder cannot be written; raised by the forward that meets it, or at the end.
        RuleError: at the end, if rows executed and gates recorded differ.
    """
    check_folder(Path(out))
    if not re.fullmatch(NAME_PATTERN, arm) or len(arm) > MAX_NAME:
        raise InputError(
            f"record(arm={arm!r}): an arm's name must be letters, digits, '.', '_' and '-', beginning with a letter or "
            f"digit, and at most {MAX_NAME} of them"
        )
    _require_transformers(model)
    with _handle(model) as handle:
        recorder = handle.recorder
        if recorder.mode != "off":
            raise InputError("this model is being recorded already; end that session first")
        method = type(handle).__module__.removeprefix(f"{methods.__name__}.")
        described = describe(handle, arm, method, None)
        manifest = new_manifest(Path(out).name, origin="session", model=_describe_model(model), arms=[described])
        with opened(lambda: RunWriter(Path(out), manifest)) as writer:
            session = Session(handle, writer)
            one = _OneAtATime()
            try:
                recorder.attach(handle)
                one.watch(handle)
                recorder.sink, recorder.mode = session.accept, "record"
                yield session
            finally:
                one.unwatch()
                recorder.detach()
                recorder.sink = None
                rule = session.conclude()
            placing.place(writer, [described])
            if one.clashed:
                raise InputError(_TOGETHER)
            if not rule.passed:
                raise RuleError(f"rule {rule.rule} ({rule.name}) does not hold: {rule.detail}")


@contextmanager
def _handle(model: PreTrainedModel) -> Iterator[methods.Method]:
    """The model's own handle, or for the time being one of the method that takes it as it is."""
    known = methods.handle_of(model)
    if known is not None:
        yield known
        return
    handle = wrap(model, "stock_moe" if has_experts(model) else "dense")
    try:
        yield handle
    finally:
        handle.tracker.detach()
        del model.gatewise


def _describe_model(model: PreTrainedModel) -> ModelRecord:
    known = getattr(model, "gatewise_record", None)
    if isinstance(known, ModelRecord):
        return known
    config = model.config
    device = model.device
    return ModelRecord(
        source=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        architecture=type(model).__name__,
        parameters=backbone_parameters(model),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        device_name=str(device),
        random_weights=False,
    )
