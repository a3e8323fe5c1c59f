"""All that a method sees of the measuring side: `gate`, `executing`, `span`.

One recorder serves one model tree. Detached, every call returns at once. Attached, a forward of the model is
one *step*: decisions go into preallocated buffers on the model's device, rows are counted where they enter a branch's
first product, and segments are timed around their modules; at the end of the forward one copy brings
the buffers to the host and a `StepData` goes to the sink. Nothing here waits for the device inside a step.

Not here: turning steps into table rows (`stepdata`), files (`store`), when to measure (`measure`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from profiler.execution.sequences import RowView, Sequences, SequenceTracker
from profiler.segment_clocks import OWN, CpuClock, CudaClock, Segment

Mode = Literal["off", "record", "trace"]

#: Bound on one step's buffer, and on what it keeps of decisions the host holds, in numbers (decisions × what is kept of
#: each); decisions past it are dropped and counted.
MAX_NUMBERS = 16_000_000

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Probe:
    """The first product of a choice: rows are counted where they enter `module`.

    `whole` marks products that attend nothing and may see other rows than the batch's (the head, a router).
    """

    layer: int
    site: str
    choice: int
    module: nn.Module
    whole: bool = False


@dataclass(frozen=True)
class SpanSite:
    """A module whose forward is one segment of one layer.

    `traced_only` marks segments that are named ranges of a trace but too small and too many to be timed in every
    recorded step: what timing them costs is of the order of what it would show. `part`: as of `Recorder.span`.
    """

    module: nn.Module
    segment: str
    layer: int
    traced_only: bool = False
    part: int | None = None


class Recordable(Protocol):
    """What the recorder needs of a wrapped model; methods provide it."""

    tracker: SequenceTracker

    @property
    def root(self) -> nn.Module: ...
    def probes(self) -> list[Probe]: ...
    def spans(self) -> list[SpanSite]: ...
    def kv_bytes(self, output: Any) -> tuple[int, int] | None: ...


class Decision(NamedTuple):
    """The decisions of one `gate` call: N of them, at one site of one layer. Arrays are `[N]`.

    Where a decision takes several choices at once, `choice` and `weights` are `[N, K]`; a choice of -1 is none.
    """

    layer: int
    site: str
    choice: NDArray[np.int16]
    gate: NDArray[np.float32]
    signals: dict[str, NDArray[np.float32]]
    weights: NDArray[np.float32] | None = None


@dataclass
class Count:
    """Rows that entered one choice's first product in one step; units as in `records.TABLES["rows"]`."""

    rows: int = 0
    padded: int = 0
    context: int = 0
    context_full: int = 0


class Traffic(NamedTuple):
    """Token rows this rank sent in one all-to-all: `tokens_R` to each rank, itself included, `row_bytes` each.

    `direction`: "dispatch", or "combine" for results on their way back.
    """

    layer: int
    direction: str
    tokens_R: list[int]
    row_bytes: int


class Exchange(NamedTuple):
    """This rank's time in one collective; `start_ns` is of its own monotonic clock."""

    layer: int
    operation: str
    start_ns: int
    dur_ns: int


@dataclass
class StepData:
    """Everything recorded in one step, on the host.

    `width_ns`: (layer, width of experts) → time of their products, which is part of `segment_ns`.
    """

    sequences: Sequences
    phase: str
    wall_ns: int
    decisions: list[Decision]
    counts: dict[tuple[int, str, int], Count]
    segment_ns: dict[tuple[str, int], int]
    device_ns: int | None
    kv: tuple[int, int] | None
    dropped: int = 0
    traffic: list[Traffic] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    width_ns: dict[tuple[int, int], int] = field(default_factory=dict)


class _Buffer:
    """Preallocated device storage of one step's decisions: a column a decision, one `gate` call after the other.

    Row 0 is the choice (an index, exact in float32), row 1 the gate, then the signals. Where a decision takes K
    choices, they are the first K rows, then come the gate, their K weights, and the signals. One tensor, so that it
    comes to the host in one copy.
    """

    def __init__(self) -> None:
        self.numbers = torch.empty((0, 0), dtype=torch.float32)

    def reserve(self, rows: int, columns: int, filled: int, device: torch.device) -> bool:
        """Make room, keeping the first `filled` columns; grows, never shrinks. False if the bound forbids it."""
        have_rows, have = self.numbers.shape
        if rows <= have_rows and columns <= have:
            return True
        rows = max(rows, have_rows)
        if rows * columns > MAX_NUMBERS:
            return False
        room = max(columns, min(2 * have, MAX_NUMBERS // rows))
        # A tensor made in inference mode could not be written outside of it, and the buffer outlives the step.
        with torch.inference_mode(False):
            wide = torch.empty((rows, room), dtype=torch.float32, device=device)
        wide[:have_rows, :filled] = self.numbers[:, :filled]
        self.numbers = wide
        return True


@dataclass
class _Slot:
    layer: int
    site: str
    columns: slice
    signals: tuple[str, ...]
    #: K where a decision takes several choices, None where it takes one.
    several: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the buffer it fills."""
        return len(self.signals) + (2 if self.several is None else 2 * self.several + 1)

    def read(self, numbers: NDArray[np.float32]) -> Decision:
        """What the buffer holds in this slot."""
        own, k = numbers[: self.rows, self.columns], self.several
        signals = dict(zip(self.signals, own[self.rows - len(self.signals) :], strict=True))
        if k is None:
            return Decision(self.layer, self.site, own[0].astype(np.int16), own[1], signals)
        return Decision(self.layer, self.site, own[:k].T.astype(np.int16), own[k], signals, own[k + 1 : 2 * k + 1].T)


@dataclass
class Recorder:
    """See the module docstring. Create one per model tree, hand it to a method's `wrap`, then `attach` it.

    Attributes:
        mode: `off`; `record` (decisions, counts, segment clocks); `trace` (named profiler ranges and nothing else,
            so that what recording costs is not in the traced kernels).
        sink: called with each finished step, on the thread that ran the forward.
        label: text of the step's profiler range in mode `trace`.
    """

    mode: Mode = "off"
    sink: Callable[[StepData], None] | None = None
    label: str = ""
    phase: str | None = None
    _subject: Recordable | None = None
    _buffer: _Buffer = field(default_factory=_Buffer)
    _slots: list[_Slot | Decision] = field(default_factory=list)
    _filled: int = 0
    _held: int = 0
    _dropped: int = 0
    _counts: dict[tuple[int, str, int], Count] = field(default_factory=dict)
    _late: list[tuple[tuple[int, str, int], tuple[Tensor, ...]]] = field(default_factory=list)
    _traffic: list[Traffic] = field(default_factory=list)
    _exchanges: list[tuple[int, str, Any, Any]] = field(default_factory=list)
    _view: RowView | None = None
    _clock: CpuClock | CudaClock | None = None
    _began_ns: int = 0
    _open: bool = False
    _range: Any = None
    _handles: list[Any] = field(default_factory=list)
    _watched: list[tuple[nn.Module, Callable[..., Any] | None]] = field(default_factory=list)
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    # -- what methods call ------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded now; work that only serves a record can be left out otherwise."""
        return self._open and self._clock is not None

    def gate(
        self,
        layer: int,
        site: str,
        choice: Tensor | NDArray[np.int16],
        gate: Tensor | NDArray[np.float32],
        weights: Tensor | NDArray[np.float32] | None = None,
        **signals: Tensor | NDArray[np.float32],
    ) -> None:
        """Record N decisions: one per sequence of the batch, or one per token row.

        Tensors go into the step's buffer. NumPy arrays are decisions that the host holds already, as frozen ones are:
        they are kept as they are, which costs next to nothing, and must not change afterwards.

        Args:
            layer, site: where.
            choice: `[N]` integers, indices of the choices at this site; `[N, K]` where a decision takes several, each
                once, with -1 where it takes fewer than K.
            gate: `[N]` the gate's value the choice was made from.
            weights: `[N, K]` what each of several choices counts for; None where a decision takes one.
            signals: `[N]` each, the method's own columns.
        """
        if not self.recording:
            return
        with self.span(OWN, layer):
            if isinstance(choice, np.ndarray):
                self._hold(Decision(layer, site, choice, gate, signals, weights))  # type: ignore[arg-type]
            else:
                self._store(layer, site, choice, cast(Tensor, gate), weights, cast(dict[str, Tensor], signals))

    def _hold(self, decision: Decision) -> None:
        size = (2 + len(decision.signals)) * decision.choice.size
        if self._held + size > MAX_NUMBERS:
            self._dropped += len(decision.choice)
            return
        self._held += size
        self._slots.append(decision)

    def _store(
        self, layer: int, site: str, choice: Tensor, gate: Tensor, weights: Any, signals: dict[str, Tensor]
    ) -> None:
        several = None if weights is None else choice.shape[1]
        size = choice.numel() if several is None else len(choice)
        slot = _Slot(layer, site, slice(self._filled, self._filled + size), tuple(signals), several)
        columns = slot.columns
        if not self._buffer.reserve(slot.rows, columns.stop, self._filled, self._device):
            self._dropped += size
            return
        self._slots.append(slot)
        self._filled = columns.stop
        into = self._buffer.numbers[: slot.rows, columns]
        if weights is None:
            # Stacked first: one copy into the buffer instead of one a column. At few decisions calls are the cost.
            into.copy_(torch.stack([_column(value) for value in (choice, gate, *signals.values())]))
            return
        parts = [choice.T, gate[None], weights.T, *(value[None] for value in signals.values())]
        into.copy_(torch.cat([part.detach().to(torch.float32) for part in parts]))

    def entered(self, layer: int, site: str, choice: int, rows: Tensor, padded: Tensor | None = None) -> None:
        """Count rows of products that have their numbers from the device, read at the step's end.

        Args:
            choice: the choice whose product it is; the first of n.
            rows: an integer, or `[n]` of them for `choice`, `choice` + 1, …
            padded: pads computed with them, as many numbers; None where there are none.
        """
        if self.recording:
            self._late.append(((layer, site, choice), (rows,) if padded is None else (rows, padded)))

    @contextmanager
    def executing(self, view: RowView) -> Iterator[None]:
        """While open, the rows in flight are `view` instead of the whole batch; counters split pads off by it."""
        before, self._view = self._view, view
        try:
            yield
        finally:
            self._view = before

    def span(self, segment: str, layer: int, part: int | None = None) -> AbstractContextManager[Any]:
        """A context in which time belongs to `segment` of `layer`; `part`: the width of the experts that run."""
        if not self._open:
            return _NOTHING
        return _Span(self, (segment, layer, part))

    @contextmanager
    def exchange(self, layer: int, operation: str) -> Iterator[None]:
        """A context around one collective: its time, and segment `exchange` of `layer`."""
        if not self._open:
            yield
            return
        clock = self._clock
        began = clock.moment() if clock is not None else None
        self._push(("exchange", layer, None))
        try:
            yield
        finally:
            self._pop()
            if clock is not None:
                self._exchanges.append((layer, operation, began, clock.moment()))

    def sent(self, layer: int, direction: str, tokens_R: list[int], row_bytes: int) -> None:
        """Record an all-to-all this rank takes part in; see `Traffic`."""
        if self.recording:
            self._traffic.append(Traffic(layer, direction, tokens_R, row_bytes))

    # -- attaching --------------------------------------------------------------------------------

    def attach(self, subject: Recordable) -> None:
        """Watch a wrapped model. Nothing is recorded until `mode` leaves `off`.

        Parts are watched by a `forward` of their own rather than by module hooks, which cost several times as much a
        call: a step has hundreds. `partial` of bound methods, so that a deep copy of the tree watches itself.
        """
        if self._subject is not None:
            raise ValueError("a recorder serves one model tree; this one is attached already")
        self._subject = subject
        root = subject.root
        self._device = next(root.parameters()).device
        self._handles.append(root.register_forward_pre_hook(self._begin, prepend=True))
        for site in subject.spans():
            self._watch(site.module, partial(self._timed, (site.segment, site.layer, site.part), site.traced_only))
        for probe in subject.probes():
            self._watch(probe.module, partial(self._counted, (probe.layer, probe.site, probe.choice), probe.whole))
        self._handles.append(root.register_forward_hook(self._end, always_call=True))

    def detach(self) -> None:
        """Watch no longer; the model runs as if never recorded."""
        for handle in self._handles:
            handle.remove()
        for module, before in reversed(self._watched):
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._handles, self._watched, self._subject, self.mode, self._open = [], [], None, "off", False

    def _watch(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self._watched.append((module, module.__dict__.get("forward")))
        module.forward = partial(around, module.forward)

    def _timed(
        self, segment: Segment, traced_only: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._open or (traced_only and self._clock is not None):
            return forward(*args, **kwargs)
        self._push(segment)
        try:
            return forward(*args, **kwargs)
        finally:
            self._pop()

    def _counted(
        self, key: tuple[int, str, int], whole: bool, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.recording:
            found = self._counts.get(key)
            if found is None:
                found = self._counts[key] = Count()
            self._count(found, x.numel() // x.shape[-1], whole, every=key[0] < 0)
        return forward(x, *args, **kwargs)

    def _count(self, found: Count, entered: int, whole: bool, *, every: bool) -> None:
        view = self._view if self._view is not None else self._sequences().view
        if whole:
            # The head computes pads where it computes every row of a padded batch; a router never sees one.
            pads = view.pads if every and entered == view.rows + view.pads else 0
            found.rows += entered - pads
            found.padded += pads
            return
        found.rows += entered - view.pads
        found.padded += view.pads
        found.context += view.context
        found.context_full += view.context_full

    def _sequences(self) -> Sequences:
        assert self._subject is not None and self._subject.tracker.current is not None
        return self._subject.tracker.current

    # -- one step ---------------------------------------------------------------------------------

    def _push(self, segment: Segment) -> None:
        if self._clock is not None:
            self._clock.push(segment)
        else:
            entered = torch.profiler.record_function(f"gatewise/{segment[0]}/{segment[1]}")
            entered.__enter__()
            self._range.append(entered)

    def _pop(self) -> None:
        if self._clock is not None:
            self._clock.pop()
        else:
            self._range.pop().__exit__(None, None, None)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._open = False
        if self.mode == "off":
            return
        self._slots, self._filled, self._counts, self._view, self._dropped = [], 0, {}, None, 0
        self._held = 0
        self._late, self._range, self._traffic, self._exchanges = [], [], [], []
        if self.mode == "trace":
            self._clock = None
            step = torch.profiler.record_function(self.label or "gatewise.step/0/unnamed")
            step.__enter__()
            self._range.append(step)
        else:
            self._clock = CudaClock() if self._device.type == "cuda" else CpuClock()
            self._clock.start()
        self._began_ns = time.perf_counter_ns()
        self._open = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open:
            return
        self._open = False
        if self._clock is None:
            while self._range:
                self._pop()
            return
        if output is None:  # the forward raised: there is no step
            return
        decisions = self._decisions()
        self._count_late()
        spent, device_ns = self._clock.finish()
        wall_ns = time.perf_counter_ns() - self._began_ns
        if self.sink is None or self._subject is None:
            return
        sequences, clock = self._sequences(), cast(Any, self._clock)
        segment_ns: dict[tuple[str, int], int] = {}
        width_ns: dict[tuple[int, int], int] = {}
        for (segment, layer, part), ns in spent.items():
            if segment == OWN:
                continue
            segment_ns[segment, layer] = segment_ns.get((segment, layer), 0) + ns
            if part is not None:
                width_ns[layer, part] = ns
        exchanges = []
        for layer, operation, began, ended in self._exchanges:
            start_ns = clock.ns_of(began, self._began_ns)
            exchanges.append(Exchange(layer, operation, start_ns, clock.ns_of(ended, self._began_ns) - start_ns))
        self.sink(
            StepData(
                sequences=sequences,
                phase=self.phase or sequences.phase,
                wall_ns=wall_ns,
                decisions=decisions,
                counts=self._counts,
                segment_ns=segment_ns,
                device_ns=device_ns,
                kv=self._subject.kv_bytes(output),
                dropped=self._dropped,
                traffic=self._traffic,
                exchanges=exchanges,
                width_ns=width_ns,
            )
        )

    def _decisions(self) -> list[Decision]:
        """The step's decisions, in order, on the host: one copy of the buffer, none where nothing is in it."""
        if not self._filled:
            return [slot for slot in self._slots if isinstance(slot, Decision)]
        rows = max(slot.rows for slot in self._slots if isinstance(slot, _Slot))
        numbers = self._buffer.numbers[:rows, : self._filled].to("cpu", copy=True).numpy()
        return [slot if isinstance(slot, Decision) else slot.read(numbers) for slot in self._slots]

    def _count_late(self) -> None:
        if not self._late:
            return
        every = [part.detach().reshape(-1).long() for _, parts in self._late for part in parts]
        numbers = iter(torch.cat(every).tolist())
        for (layer, site, first), parts in self._late:
            size = parts[0].numel()
            entered, padded = (list(islice(numbers, size)) if part < len(parts) else [0] * size for part in range(2))
            for choice, rows, pads in zip(range(first, first + size), entered, padded, strict=True):
                if rows or pads or size == 1:  # of many choices most may have none
                    found = self._counts.setdefault((layer, site, choice), Count())
                    found.rows += rows
                    found.padded += pads


def _column(value: Tensor) -> Tensor:
    """`[N]` in float32."""
    if value.dtype is torch.float32 and value.dim() == 1 and not value.requires_grad:
        return value
    return value.detach().reshape(-1).to(torch.float32)


class _Span:
    """An open segment. Reusable objects are not needed: a step has a few hundred at most."""

    __slots__ = ("_recorder", "_segment")

    def __init__(self, recorder: Recorder, segment: Segment) -> None:
        self._recorder, self._segment = recorder, segment

    def __enter__(self) -> None:
        self._recorder._push(self._segment)

    def __exit__(self, *exc: object) -> None:
        self._recorder._pop()
