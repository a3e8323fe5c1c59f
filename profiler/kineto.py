"""Chrome-trace JSON, as torch.profiler (Kineto) writes it, into rows of the `kernels` table. No torch.

Reads traces of CUDA, ROCm and CPU, gzipped or not, with unknown fields, missing fields, values that are not
JSON (`nan`, `inf`, a bare `N/A`), or cut off in the middle.

Time. `ts` and `dur` are microseconds with up to three decimals whatever `displayTimeUnit` says (that field
is a wish about display). They are read as decimals, never as floats: 1712195495519761.132 does not fit a
float64. `start_ns` is nanoseconds since the Unix epoch: `ts`, plus `baseTimeNanoseconds` where the trace
has one (a trace without one holds epoch times already; `Trace.notes` tells when that cannot be known).

What a row is. On a trace with device events, every kernel, copy and fill on the device; else the operators on
the CPU. Never both, and each moment of a thread goes to the innermost operator alone, so that summing `dur_ns`
counts no work twice: a leaf (`cpu_op`) has its whole duration; an operator around others (`cpu_self`) has its own
time, what is left without theirs. The second kind cannot be left out: `aten::mm` runs its product itself yet calls
`aten::resolve_conj`, and in a Llama-like prefill the leaves alone held 15 % of the step's time, in a decode step 4 %.

Which step and segment a row belongs to follows the recorder's ranges on the thread that ran the operator or
launched the kernel: `gatewise.step/{step}/{arm}` and `gatewise/{segment}/{layer}`.

Not here: making traces (`tracing`), idle time and sums per segment (`analysis`), begin/end (`B`/`E`) event
pairs and Perfetto's binary format, FLOPs where the trace does not state them, and which device a stream is
on (one process is taken to drive one device).
"""

from __future__ import annotations

import decimal
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from profiler.errors import InputError

#: A trace is held in memory while it is read; one that unpacks to more is refused.
MAX_TRACE_BYTES = 1 << 30

_READ_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_STEP = re.compile(r"gatewise\.step/(\d{1,18})/(.*)", re.DOTALL)
_SEGMENT = re.compile(r"gatewise/(.+)/(-?\d{1,9})", re.DOTALL)
_SEPARATOR = re.compile(r"\s*,?\s*")
_EVENTS_START = re.compile(r'\s*\[|.*?"traceEvents"\s*:\s*\[', re.DOTALL)
_NOT_JSON = re.compile(rb"(?<=[:,\[])(\s*)(?:N/A|[-+]?(?:inf(?:inity)?|nan))(?=\s*[,}\]])", re.IGNORECASE)
_CONTROLS_TO_SPACES = bytes(max(code, 32) for code in range(256))

#: The trace's categories in lower case (early torch wrote `Kernel`, `Memcpy`, `Operator`) → ours.
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset"}
_OPERATOR = {"cpu_op", "operator"}
_ANNOTATION = "user_annotation"
_LAUNCH = ("runtime", "driver")
_COLLECTIVE = ("nccl", "rccl", "msccl", "c10d::", "record_param_comms")


class _Args(msgspec.Struct, gc=False):
    """Of an event's arguments, those that are read. Kineto writes some of them now as numbers, now as text."""

    external: int | str | None = msgspec.field(default=None, name="External id")
    correlation: int | str | None = None
    stream: int | str | None = None
    bytes: int | float | str | None = None
    size: int | float | str | None = None
    flops: int | float | str | None = None
    collective: str | None = msgspec.field(default=None, name="Collective name")


class _Raw(msgspec.Struct):
    """An event as it stands in the file."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: decimal.Decimal | None = None
    dur: decimal.Decimal | None = None
    args: _Args = msgspec.field(default_factory=_Args)


class _File(msgspec.Struct):
    """The top of the file. Events stay undecoded, so that a bad one costs itself and not the file."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base: int | float | None = msgspec.field(default=None, name="baseTimeNanoseconds")


class Thread(NamedTuple):
    """A thread of a process, as the trace names them."""

    pid: int | str
    tid: int | str


class Event(msgspec.Struct, frozen=True, gc=False):
    """A kernel, copy, fill, operator or launch. None stands for what the trace does not say.

    `stream` is the thread's number for what ran on the CPU. `category` is the table's, or `launch`.
    """

    name: str
    category: str
    thread: Thread
    start_ns: int
    dur_ns: int
    stream: int | None = None
    external: int | None = None
    correlation: int | None = None
    bytes: int | None = None
    flops: int | None = None

    @property
    def end_ns(self) -> int:
        """First nanosecond after the event."""
        return self.start_ns + self.dur_ns


class Range(NamedTuple):
    """A recorder's annotation: `name` and `number` are the arm and the step, or the segment and the layer."""

    name: str
    number: int
    thread: Thread
    start_ns: int
    end_ns: int


@dataclass
class Trace:
    """What one trace file holds of the events that rows are made of.

    Attributes:
        operators: CPU operators, leaves and those around them, in the file's order.
        device: kernels, copies and fills, in the file's order.
        launches: runtime or driver calls by correlation id.
        steps, segments: the recorder's ranges.
        events: number of events in the file, of every kind.
        left_out: how many of them lacked a field or had one of the wrong type.
        cut_off: the file ends or breaks in the middle, and only the events before are here.
        has_base: the trace states its base time.
    """

    path: Path
    operators: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    launches: dict[int, Event] = field(default_factory=dict)
    steps: list[Range] = field(default_factory=list)
    segments: list[Range] = field(default_factory=list)
    events: int = 0
    left_out: int = 0
    cut_off: bool = False
    has_base: bool = False

    @property
    def notes(self) -> list[str]:
        """What a reader of the rows must be told, a sentence each; empty for a whole trace."""
        found = []
        if self.cut_off:
            found.append(f"{self.path}: the trace is cut off; the {self.events} whole events before the cut were read")
        if self.cut_off and not self.has_base:
            found.append(f"{self.path}: no base time was found before the cut; start_ns may not count from the epoch")
        if self.left_out:
            found.append(
                f"{self.path}: {self.left_out} of {self.events} events lack a field or have one of the wrong type; "
                "they were left out"
            )
        return found


def read_trace(path: Path) -> Trace:
    """Read one trace, gzipped or plain, whole or cut off (`Trace.cut_off`).

    Raises:
        InputError: no such file, not a Chrome trace, no whole event in it, or larger than `MAX_TRACE_BYTES`.
    """
    raw, whole = _content(path)
    top, intact = _parse(path, raw)
    return _collect(Trace(path, cut_off=not (whole and intact)), top)


def kernel_rows(trace: Trace, on: Literal["device", "cpu"] | None = None) -> dict[str, list[Any]]:
    """Rows of the `kernels` table by start time: its columns but `rank` and `cell`, which the writer fills.

    `category` is `kernel`, `memcpy`, `memset` or `collective` on the device, `cpu_op`, `cpu_self` or `collective`
    on the CPU. The `dur_ns` of a `cpu_self` row lies in pieces between its start and its end, the rest there being
    other rows'. `arm` and `step` are null outside every recorded step. `segment` is "" and `layer` -1 where no range
    was open on the launching thread (autograd's, say), or the launch is not in the trace. `bytes` is what a copy or
    fill moved and `flops` what the trace states of an event; null where it says nothing. `stream` is the thread's
    number on the CPU.

    Args:
        on: which rows; by default the device's if it did anything in this trace, else the CPU's.
    """
    if on is None:
        on = "device" if trace.device else "cpu"
    events = sorted(trace.device if on == "device" else _own_times(trace.operators), key=lambda event: event.start_ns)
    origins = _launch_points(trace, events) if on == "device" else [(event.thread, event.start_ns) for event in events]
    on_thread = _enclosing(trace.steps, origins)
    at_time = _innermost(trace.steps, [time for _, time in origins])
    steps = [own or other for own, other in zip(on_thread, at_time, strict=True)]
    segments = _enclosing(trace.segments, origins)
    return {
        "arm": [step.name if step else None for step in steps],
        "step": [step.number if step else None for step in steps],
        "stream": [event.stream for event in events],
        "name": [event.name for event in events],
        "category": [event.category for event in events],
        "segment": [segment.name if segment else "" for segment in segments],
        "layer": [segment.number if segment else -1 for segment in segments],
        "start_ns": [event.start_ns for event in events],
        "dur_ns": [event.dur_ns for event in events],
        "bytes": [_moved(trace, event) for event in events],
        "flops": [event.flops for event in events],
    }


# -- the file -----------------------------------------------------------------------------------------


def _content(path: Path) -> tuple[bytes, bool]:
    """The file's text, and whether its compressed stream was whole."""
    parts: list[bytes] = []
    size = 0
    try:
        with open(path, "rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            reader = gzip.GzipFile(fileobj=file) if packed else file
            while part := reader.read1(_READ_BYTES):
                parts.append(part)
                size += len(part)
                if size > MAX_TRACE_BYTES:
                    raise InputError(
                        f"{path}: a trace may unpack to at most {MAX_TRACE_BYTES} bytes, and this one is larger; "
                        "trace fewer steps"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        if not parts:
            raise InputError(f"{path}: the trace is broken gzip, and nothing of it can be read: {error}") from error
        return b"".join(parts), False
    except OSError as error:
        raise InputError(f"{path}: the trace cannot be read: {error.strerror or error}") from error
    return b"".join(parts), True


def _parse(path: Path, raw: bytes) -> tuple[_File, bool]:
    """Decode the top of the file, mended where it must be, and say whether it was whole."""
    try:
        try:
            return _decode(raw), True
        except msgspec.DecodeError:
            raw = _mend(raw)
        try:
            return _decode(raw), True
        except msgspec.DecodeError:
            return _decode(_cut(raw)), False
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a Chrome trace, or cut off before its first event: {error}") from error


def _decode(raw: bytes) -> _File:
    if raw[:64].lstrip().startswith(b"["):  # the format's other form: the events alone
        return _File(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    return msgspec.json.decode(raw, type=_File)


def _mend(raw: bytes) -> bytes:
    """Make JSON of what profilers are known to write: control characters in names, names not UTF-8, nan, N/A."""
    text = raw.translate(_CONTROLS_TO_SPACES).decode("utf-8", errors="replace").encode()
    return _NOT_JSON.sub(rb"\1null", text)


def _cut(raw: bytes) -> bytes:
    """Close a broken file after its last whole event. Without one, what comes back does not decode."""
    text = raw.decode()
    found = _EVENTS_START.match(text)
    if found is None:
        return raw
    decoder = json.JSONDecoder()
    end = found.end()
    while separator := _SEPARATOR.match(text, end):
        try:
            _, end = decoder.raw_decode(text, separator.end())
        except ValueError:
            break
    if end == found.end():
        return raw
    return (text[:end] + ("]}" if "traceEvents" in found[0] else "]")).encode()


# -- the events ---------------------------------------------------------------------------------------


def _collect(trace: Trace, top: _File) -> Trace:
    """Fill `trace` from the file's events."""
    trace.events = len(top.events)
    trace.has_base = top.base is not None
    base_ns = int(top.base or 0)
    decoder = msgspec.json.Decoder(_Raw)
    names: dict[str, str] = {}
    for undecoded in top.events:
        try:
            raw = _decode_event(decoder, undecoded)
        except msgspec.DecodeError:
            trace.left_out += 1
            continue
        kind = raw.cat.lower()
        if raw.ph != "X" or not (kind in _DEVICE or kind in _OPERATOR or kind == _ANNOTATION or kind.endswith(_LAUNCH)):
            continue
        start_ns, dur_ns = _nanoseconds(raw.ts, base_ns), _nanoseconds(raw.dur, 0)
        if start_ns is None or dur_ns is None or dur_ns < 0 or not raw.name:
            trace.left_out += 1
            continue
        raw.name = names.setdefault(raw.name, raw.name)  # one copy of each: kernel names run to 2,000 characters
        if kind in _DEVICE:
            trace.device.append(_event(raw, _DEVICE[kind], start_ns, dur_ns))
        elif kind.endswith(_LAUNCH):
            launch = _event(raw, "launch", start_ns, dur_ns)
            if launch.correlation:
                trace.launches.setdefault(launch.correlation, launch)
        elif step := _STEP.fullmatch(raw.name):
            trace.steps.append(_range(raw, step[2], step[1], start_ns, dur_ns))
        elif segment := _SEGMENT.fullmatch(raw.name):
            trace.segments.append(_range(raw, segment[1], segment[2], start_ns, dur_ns))
        elif kind in _OPERATOR:
            trace.operators.append(_event(raw, "cpu_op", start_ns, dur_ns))
    return trace


def _decode_event(decoder: msgspec.json.Decoder[_Raw], undecoded: msgspec.Raw) -> _Raw:
    try:
        return decoder.decode(undecoded)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # a name that is not UTF-8 comes to light only here
        return decoder.decode(_mend(bytes(undecoded)))


def _event(raw: _Raw, category: str, start_ns: int, dur_ns: int) -> Event:
    args = raw.args
    if args.collective is not None or raw.name.lower().startswith(_COLLECTIVE):
        category = "collective"
    moved = args.bytes if args.bytes is not None else args.size
    return Event(
        name=raw.name,
        category=category,
        thread=Thread(raw.pid, raw.tid),
        start_ns=start_ns,
        dur_ns=dur_ns,
        stream=_whole(args.stream if args.stream is not None else raw.tid),
        external=_whole(args.external),
        correlation=_whole(args.correlation),
        bytes=_whole(moved),
        flops=_whole(args.flops),
    )


def _range(raw: _Raw, name: str, number: str, start_ns: int, dur_ns: int) -> Range:
    return Range(name, int(number), Thread(raw.pid, raw.tid), start_ns, start_ns + dur_ns)


def _nanoseconds(microseconds: decimal.Decimal | None, base_ns: int) -> int | None:
    """Microseconds on a base as nanoseconds; None where the trace has no number, or one beyond int64."""
    if microseconds is None or not microseconds.is_finite() or microseconds.adjusted() > 15:
        return None
    result = base_ns + int((microseconds * 1000).to_integral_value())
    return result if abs(result) < 1 << 63 else None


def _whole(value: float | str | None) -> int | None:
    """A count that may be written as a number or as text (`"2560"`, `"0x0"`)."""
    try:
        number = int(value, 0) if isinstance(value, str) else None if value is None else int(value)
    except ValueError:
        return None
    return number if number is not None and abs(number) < 1 << 63 else None


def _moved(trace: Trace, event: Event) -> int | None:
    """Bytes a copy or fill moved. ROCm writes them at the call (`size`), not at the copy."""
    if event.bytes is None and event.category in ("memcpy", "memset") and event.correlation in trace.launches:
        return trace.launches[event.correlation].bytes
    return event.bytes


# -- what lies in what --------------------------------------------------------------------------------


def _own_times(operators: Sequence[Event]) -> list[Event]:
    """Operators with the time each was the innermost of its thread; what held others becomes `cpu_self`.

    On one thread an operator that begins inside another was called by it (of two with one interval, the later in
    the file). Should it outlast its caller, the overlap is its own, so a thread's times never add up to more than
    the time it had an operator running.
    """
    threads: dict[Thread, list[Event]] = defaultdict(list)
    for operator in operators:
        threads[operator.thread].append(operator)
    result = []
    for row in threads.values():
        row.sort(key=lambda event: (event.start_ns, -event.end_ns))
        own_ns = [0] * len(row)
        holds = [False] * len(row)
        running: list[int] = []  # places in `row`, the innermost last
        now = 0
        for place, until in enumerate([*(event.start_ns for event in row), max(event.end_ns for event in row)]):
            while running:
                end = row[running[-1]].end_ns
                own_ns[running[-1]] += max(0, min(end, until) - now)
                now = max(now, min(end, until))
                if end > until:
                    break
                running.pop()
            now = until
            if place < len(row):
                if running:
                    holds[running[-1]] = True
                running.append(place)
        for event, held, own in zip(row, holds, own_ns, strict=True):
            if not held:
                result.append(event)
            elif own:
                category = "cpu_self" if event.category == "cpu_op" else event.category
                result.append(msgspec.structs.replace(event, category=category, dur_ns=own))
    return result


def _launch_points(trace: Trace, events: Sequence[Event]) -> list[tuple[Thread, int]]:
    """Thread and time of each device event's launch; its own place on the device where no launch is recorded.

    The correlation id names the launch. The external id names the operator around it, but only in newer traces (older
    ones repeat the correlation id there), so it is asked second, and an operator begun after the event is not it.
    """
    operators = {event.external: event for event in trace.operators if event.external is not None}
    points = []
    for event in events:
        origin = trace.launches.get(event.correlation) if event.correlation else None
        if origin is None:
            origin = operators.get(event.external) if event.external else None
            origin = origin if origin and origin.start_ns <= event.start_ns else event
        points.append((origin.thread, origin.start_ns))
    return points


def _enclosing(ranges: Sequence[Range], points: Sequence[tuple[Thread, int]]) -> list[Range | None]:
    """The innermost range around each (thread, time), among the ranges of that thread."""
    of_thread: dict[Thread, list[Range]] = defaultdict(list)
    at_thread: dict[Thread, list[int]] = defaultdict(list)
    for found in ranges:
        of_thread[found.thread].append(found)
    for place, (thread, _) in enumerate(points):
        at_thread[thread].append(place)
    result: list[Range | None] = [None] * len(points)
    for thread, places in at_thread.items():
        innermost = _innermost(of_thread[thread], [points[place][1] for place in places])
        for place, found_range in zip(places, innermost, strict=True):
            result[place] = found_range
    return result


def _innermost(ranges: Sequence[Range], times: Sequence[int]) -> list[Range | None]:
    """For each time, of the ranges with start ≤ time < end, the one that began last (then: the shortest, the later)."""
    waiting = sorted(ranges, key=lambda found: (found.start_ns, -found.end_ns))
    waiting.reverse()
    begun: list[Range] = []
    result: list[Range | None] = [None] * len(times)
    for place in sorted(range(len(times)), key=times.__getitem__):
        while waiting and waiting[-1].start_ns <= times[place]:
            begun.append(waiting.pop())
        while begun and begun[-1].end_ns <= times[place]:
            begun.pop()
        result[place] = begun[-1] if begun else None
    return result
