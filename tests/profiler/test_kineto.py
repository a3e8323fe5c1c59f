"""Trace ingest: traces made by hand with answers worked out by hand, and real ones against slow counting."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import kineto
from profiler.errors import InputError
from profiler.kineto import kernel_rows, read_trace
from profiler.records import TABLES, Manifest
from profiler.store import Run
from profiler.writer import RunWriter

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "kineto"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared traces are not here")

# Counted in the files with json and a Counter, once: (stream, category) → rows, for the default choice of rows.
REAL_ROWS = {
    "hta_alexnet": {
        (7, "kernel"): 73,
        (7, "memcpy"): 16,
        (7, "memset"): 2,
        (20, "kernel"): 6,
        (20, "memset"): 1,
    },
    "hta_cpu_only_rank34": {(1074, "cpu_op"): 4},
    "hta_mi250_rocm": {(0, "kernel"): 14, (0, "memcpy"): 2},
    "hta_ns_resolution_rank0": {(7, "kernel"): 4350, (7, "memcpy"): 1600, (7, "memset"): 145},
    "hta_sampled_rank0": {
        (7, "kernel"): 1036,
        (7, "memcpy"): 8,
        (7, "memset"): 8,
        (23, "kernel"): 108,
        (23, "memcpy"): 16,
        (23, "memset"): 2,
        (25, "memcpy"): 16,
        (84, "collective"): 8,
        (203, "collective"): 2,
    },
}


def event(cat: str, name: str, ts: float, dur: float | None, tid: int = 1, **args: Any) -> dict[str, Any]:
    made = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "args": args}
    return made if dur is None else {**made, "dur": dur}


def op(name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, start, end - start, tid, **args)


def note(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return event("user_annotation", name, start, end - start, tid)


def write(folder: Path, events: list[dict[str, Any]], **top: Any) -> Path:
    path = folder / "made.json"
    path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": events}))
    return path


def rows_of(folder: Path, events: list[dict[str, Any]], **top: Any) -> list[dict[str, Any]]:
    columns = kernel_rows(read_trace(write(folder, events, **top)))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def figures(rows: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


# -- CPU ----------------------------------------------------------------------------------------------


def test_a_product_that_calls_a_helper_keeps_its_own_time_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            op("aten::linear", 0, 100),
            op("aten::addmm", 10, 90),
            op("aten::resolve_conj", 20, 30),
            op("aten::gelu", 100, 140),
        ],
    )
    assert figures(rows, "name", "category", "dur_ns") == [
        ("aten::linear", "cpu_self", 20_000),  # 0-10 and 90-100
        ("aten::addmm", "cpu_self", 70_000),  # 10-20 and 30-90
        ("aten::resolve_conj", "cpu_op", 10_000),
        ("aten::gelu", "cpu_op", 40_000),
    ]


def test_a_wrapper_that_adds_no_time_is_no_row_and_the_later_of_two_equal_intervals_is_inside(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [op("aten::to", 5, 9), op("aten::_to_copy", 5, 9)])
    assert figures(rows, "name", "category", "dur_ns") == [("aten::_to_copy", "cpu_op", 4_000)]


def test_operators_of_no_length_hold_nothing_and_belong_to_what_is_around(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [op("a", 0, 10), op("inside", 4, 4), op("at_the_end", 10, 10), op("b", 11, 12)])
    assert figures(rows, "name", "category", "dur_ns") == [
        ("a", "cpu_self", 10_000),
        ("inside", "cpu_op", 0),
        ("at_the_end", "cpu_op", 0),
        ("b", "cpu_op", 1_000),
    ]
    rows = rows_of(tmp_path, [op("outer", 20, 20), op("inner", 20, 20)])
    assert figures(rows, "name", "category", "dur_ns") == [("outer", "cpu_op", 0), ("inner", "cpu_op", 0)]


def test_operators_that_overlap_without_nesting_share_the_time_out(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [op("a", 0, 10), op("b", 5, 15), op("c", 12, 13)])
    assert figures(rows, "name", "category", "dur_ns") == [
        ("a", "cpu_self", 5_000),
        ("b", "cpu_self", 9_000),
        ("c", "cpu_op", 1_000),
    ]


def test_segments_are_the_innermost_range_on_the_same_thread_and_steps_reach_other_threads(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            note("gatewise.step/7/routed/half", 0, 100),
            note("gatewise/ffn/3", 10, 60),
            note("gatewise/replacement/3", 20, 40),
            note("gatewise/head/-1", 70, 80),
            note("gatewise/nonsense", 85, 95),
            note("ProfilerStep#1", 0, 200),
            op("before", 2, 4),
            op("ffn", 12, 14),
            op("adapter", 22, 24),
            op("ffn again", 45, 50),
            op("head", 70, 72),
            op("unnamed", 86, 88),
            op("worker", 30, 35, tid=9),
            op("after", 150, 160),
        ],
    )
    assert figures(rows, "name", "step", "arm", "segment", "layer", "stream") == [
        ("before", 7, "routed/half", "", -1, 1),
        ("ffn", 7, "routed/half", "ffn", 3, 1),
        ("adapter", 7, "routed/half", "replacement", 3, 1),
        ("worker", 7, "routed/half", "", -1, 9),
        ("ffn again", 7, "routed/half", "ffn", 3, 1),
        ("head", 7, "routed/half", "head", -1, 1),
        ("unnamed", 7, "routed/half", "", -1, 1),
        ("after", None, None, "", -1, 1),
    ]


def test_ranges_that_overlap_without_nesting_and_ranges_of_no_length(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            note("gatewise/attention/0", 0, 20),
            note("gatewise/kv/0", 10, 30),
            note("gatewise/norm/0", 26, 26),
            note("gatewise/attention/1", 30, 40),
            op("one", 5, 6),
            op("two", 15, 16),
            op("three", 25, 26),
            op("four", 26, 27),
            op("five", 30, 31),
        ],
    )
    assert figures(rows, "name", "segment", "layer") == [
        ("one", "attention", 0),
        ("two", "kv", 0),  # the range that began last
        ("three", "kv", 0),
        ("four", "kv", 0),
        ("five", "attention", 1),  # kv ended where this one begins
    ]


def test_a_range_recorded_as_an_operator_is_still_a_range(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [event("cpu_op", "gatewise/ffn/2", 0, 10), op("aten::mm", 1, 9)])
    assert figures(rows, "name", "category", "segment", "layer") == [("aten::mm", "cpu_op", "ffn", 2)]


def test_a_collective_on_the_cpu_and_stated_flops(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [op("c10d::allreduce_", 0, 5), op("aten::mm", 6, 8, flops="0x10"), op("x", 9, 10)])
    assert figures(rows, "category", "flops", "bytes") == [
        ("collective", None, None),
        ("cpu_op", 16, None),
        ("cpu_op", None, None),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 20)), max_size=12),
)
def test_every_nanosecond_goes_to_one_operator_of_its_thread(intervals: list[tuple[int, int, int]]) -> None:
    operators = [
        kineto.Event(name=str(i), category="cpu_op", thread=kineto.Thread(1, thread), start_ns=start, dur_ns=length)
        for i, (thread, start, length) in enumerate(intervals)
    ]
    # By painting: later beginnings over earlier ones, and of one beginning the shorter over the longer.
    canvas: dict[tuple[int, int], int] = {}
    for i, (thread, start, length) in sorted(enumerate(intervals), key=lambda item: (item[1][1], -item[1][2])):
        for moment in range(start, start + length):
            canvas[thread, moment] = i
    rows = kernel_rows(kineto.Trace(Path("t"), operators=operators))
    own = {name: dur for name, dur in zip(rows["name"], rows["dur_ns"], strict=True) if dur}
    assert own == {str(i): count for i, count in Counter(canvas.values()).items()}


# -- device -------------------------------------------------------------------------------------------


def kernel(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return event(cat, name, ts, dur, tid=stream, device=0, stream=stream, **args)


def launch(correlation: int, ts: float, tid: int = 1, cat: str = "cuda_runtime", **args: Any) -> dict[str, Any]:
    return event(cat, "cudaLaunchKernel", ts, 1, tid, correlation=correlation, **args)


def test_device_work_belongs_to_the_segment_that_launched_it_not_to_the_one_open_when_it_ran(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            note("gatewise.step/1/dense", 0, 50),
            note("gatewise.step/2/routed", 60, 90),
            note("gatewise/attention/0", 0, 10),
            note("gatewise/ffn/0", 10, 20),
            event("gpu_user_annotation", "gatewise/ffn/0", 12, 30, tid=7),
            op("aten::mm", 2, 6),
            launch(11, 3),
            launch(12, 12, cat="cuda_driver"),
            launch(13, 15, tid=2),
            launch(14, 61),
            kernel("gemm", 12, 10, correlation=11),
            kernel("gelu", 22, 5, correlation=12),
            kernel("backward", 27, 5, correlation=13),
            kernel("Memcpy DtoH", 55, 6, stream=20, cat="gpu_memcpy", correlation=14, bytes=4096),
            kernel("Memset", 100, 1, cat="gpu_memset", correlation=999, bytes=8),
            kernel("ncclDevKernel_AllReduce", 101, 1, correlation=0),
            kernel("custom", 102, 1, **{"Collective name": "_allgather_base"}),
        ],
    )
    assert figures(rows, "name", "category", "stream", "step", "segment", "bytes") == [
        ("gemm", "kernel", 7, 1, "attention", None),
        ("gelu", "kernel", 7, 1, "ffn", None),
        ("backward", "kernel", 7, 1, "", None),
        ("Memcpy DtoH", "memcpy", 20, 2, "", 4096),
        ("Memset", "memset", 7, None, "", 8),
        ("ncclDevKernel_AllReduce", "collective", 7, None, "", None),
        ("custom", "collective", 7, None, "", None),
    ]


def test_without_a_launch_the_external_id_names_the_operator_unless_that_began_later(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            note("gatewise/ffn/5", 0, 10),
            note("gatewise/head/-1", 10, 20),
            op("aten::mm", 1, 4, **{"External id": 3}),
            op("aten::add", 12, 14, **{"External id": 4}),
            kernel("gemm", 5, 2, **{"External id": 3, "correlation": 3}),
            kernel("older traces repeat the correlation", 8, 1, **{"External id": 4, "correlation": 4}),
        ],
    )
    assert figures(rows, "segment", "layer") == [("ffn", 5), ("", -1)]


def test_rocm_states_the_bytes_of_a_copy_at_the_call(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [
            launch(5, 0, size="2560", stream="0x0"),
            launch(6, 1, size="64"),
            kernel("CopyHostToDevice", 2, 1, stream=0, cat="gpu_memcpy", correlation=5),
            kernel("Cijk_gemm", 4, 1, stream=0, correlation=6),
        ],
    )
    assert figures(rows, "name", "stream", "bytes") == [("CopyHostToDevice", 0, 2560), ("Cijk_gemm", 0, None)]


def test_with_device_work_the_operators_are_rows_on_demand_only(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, [op("aten::mm", 0, 5), launch(1, 1), kernel("gemm", 3, 9, correlation=1)]))
    assert kernel_rows(trace)["name"] == ["gemm"]
    assert kernel_rows(trace, on="cpu")["name"] == ["aten::mm"]


# -- time ---------------------------------------------------------------------------------------------


def test_times_keep_their_nanoseconds_on_a_big_base_whatever_the_display_unit(tmp_path: Path) -> None:
    text = """{"displayTimeUnit": "UNIT", BASE "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1712195495519761.132, "dur": 24.687},
        {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": 1712195495519785.819, "dur": 3}]}"""
    path = tmp_path / "t.json"
    starts = {}
    for unit in ("ms", "ns"):
        for base in ("", '"baseTimeNanoseconds": 1700000000000000000,'):
            path.write_text(text.replace("UNIT", unit).replace("BASE", base))
            rows = kernel_rows(read_trace(path))
            assert rows["dur_ns"] == [24_687, 3_000]
            assert rows["category"] == ["cpu_op", "cpu_op"]  # the first ends on the nanosecond the second begins
            starts[unit, bool(base)] = rows["start_ns"]
    assert starts["ms", False] == starts["ns", False] == [1_712_195_495_519_761_132, 1_712_195_495_519_785_819]
    assert starts["ms", True] == starts["ns", True] == [3_412_195_495_519_761_132, 3_412_195_495_519_785_819]


# -- broken files -------------------------------------------------------------------------------------


def test_events_without_a_needed_field_or_of_a_wrong_type_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [
        event("cpu_op", "no end", 1, None),
        {"ph": "X", "cat": "cpu_op", "name": "no start", "dur": 3},
        {"ph": "X", "cat": "kernel", "ts": 1, "dur": 3},
        event("cpu_op", "backwards", 1, -5),
        event("cpu_op", "beyond int64", 1e20, 1),
        {**op("args is a list", 1, 2), "args": []},
        {**op("text for a time", 1, 2), "ts": "soon"},
    ]
    other = [
        {"ph": "M", "name": "process_name"},
        {"ph": "s", "id": 4, "cat": "ac2g"},
        event("python_function", "f", 0, 1),
        event("cuda_sync", "Stream Sync", 0, 1),
    ]
    trace = read_trace(write(tmp_path, [*bad, *other, op("good", 1, 2, surprise={"deep": [1]})]))
    assert kernel_rows(trace)["name"] == ["good"]
    assert (trace.left_out, trace.events, trace.cut_off) == (7, 12, False)
    assert trace.notes == [
        f"{tmp_path}/made.json: 7 of 12 events lack a field or have one of the wrong type; they were left out"
    ]


def test_a_file_cut_off_anywhere_gives_the_whole_events_before_the_cut_or_says_it_has_none(tmp_path: Path) -> None:
    whole = json.dumps(
        {
            "baseTimeNanoseconds": 5000,
            "deviceProperties": [{"id": 0}],
            "traceEvents": [op(f"op {{{i}}}", 10 * i, 10 * i + 1, shape=[[1, 2], "]}"]) for i in range(4)],
            "displayTimeUnit": "ms",
        },
        indent=1,
    )
    close = "\n  }"  # of an event; deeper braces stand further in
    ends = [whole.index(close, whole.index(f"op {{{i}}}")) + len(close) for i in range(4)]
    path = tmp_path / "cut.json"
    seen = set()
    for cut in range(len(whole)):
        path.write_text(whole[:cut])
        kept = sum(end <= cut for end in ends)
        if kept == 0:
            with pytest.raises(InputError, match=r"cut\.json: not a Chrome trace, or cut off before its first event"):
                read_trace(path)
            continue
        trace = read_trace(path)
        assert (trace.events, trace.cut_off, trace.has_base) == (kept, True, True)
        assert kernel_rows(trace)["start_ns"] == [5_000 + 10_000 * i for i in range(kept)]
        assert trace.notes == [f"{path}: the trace is cut off; the {kept} whole events before the cut were read"]
        seen.add(kept)
    assert seen == {1, 2, 3, 4}


def test_a_gzip_stream_cut_off_gives_what_it_held(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    events = [op(f"op{rng.integers(1 << 60)}", 10 * i, 10 * i + 1) for i in range(3000)]
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    trace = read_trace(path)
    assert 1000 < trace.events < 2000
    assert kernel_rows(trace)["name"] == [e["name"] for e in events[: trace.events]]
    assert "the trace is cut off" in trace.notes[0]
    assert "no base time was found before the cut" in trace.notes[1]
    path.write_bytes(packed)
    assert (read_trace(path).events, read_trace(path).notes) == (3000, [])


@pytest.mark.parametrize("value", [b"nan", b"-inf", b"Infinity", b"N/A", b"[1, NaN, inf]"])
@pytest.mark.parametrize("name", [b"plain", b"tab\there", b"not utf-8 \xff", "größer".encode()])
def test_what_profilers_write_that_is_not_json_costs_nothing(tmp_path: Path, name: bytes, value: bytes) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1, "ts": 1, "dur": 2,'
        b' "args": {"memory bandwidth (GB/s)": %s, "said": "N/A"}}]}' % (name, value)
    )
    trace = read_trace(path)
    assert trace.notes == []
    assert kernel_rows(trace)["name"] == [name.decode(errors="replace").replace("\t", " ")]


def test_the_bare_list_form_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("  " + json.dumps([op("a", 1, 2), op("b", 3, 4)]))
    assert kernel_rows(read_trace(path))["name"] == ["a", "b"]
    path.write_text("[" + json.dumps(op("a", 1, 2)) + ",\n")  # what a recorder that was killed leaves
    assert kernel_rows(read_trace(path))["name"] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Chrome trace"),
        (b"{}", "missing required field `traceEvents`"),
        (b'{"traceEvents": 3}', "Expected `array`, got `int`"),
        (b"step,time\n1,2\n", "not a Chrome trace"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b"\x1f\x8b\x08", "broken gzip, and nothing of it can be read"),
        (b"\x1f\x8bnot gzip at all", "broken gzip, and nothing of it can be read"),
    ],
)
def test_what_is_not_a_trace_is_refused_in_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.json.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_one_that_unpacks_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"none\.json: the trace cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    path = tmp_path / "big.json.gz"
    path.write_bytes(gzip.compress(b" " * 5_000_000))
    monkeypatch.setattr(kineto, "MAX_TRACE_BYTES", 4_000_000)
    with pytest.raises(InputError, match="at most 4000000 bytes"):
        read_trace(path)


# -- the table ----------------------------------------------------------------------------------------


def test_rows_go_into_the_kernels_table_and_come_back(tmp_path: Path) -> None:
    columns = kernel_rows(
        read_trace(
            write(tmp_path, [note("gatewise.step/4/dense", 0, 9), note("gatewise/ffn/1", 0, 9), op("aten::mm", 1, 4)])
        )
    )
    assert set(columns) | {"rank", "cell"} == set(TABLES["kernels"].names)
    writer = RunWriter(tmp_path / "run", Manifest(name="t", created_utc="now", pid=1, host="h"))
    writer.append("kernels", columns, cell="prefill-b1-l8")
    writer.finish("complete")
    (row,) = Run(tmp_path / "run").table("kernels").fetchall()
    assert dict(zip(TABLES["kernels"].names, row, strict=True)) == {
        "arm": "dense",
        "step": 4,
        "rank": 0,
        "cell": "prefill-b1-l8",
        "stream": 1,
        "name": "aten::mm",
        "category": "cpu_op",
        "segment": "ffn",
        "layer": 1,
        "start_ns": 1000,
        "dur_ns": 3000,
        "bytes": None,
        "flops": None,
    }


def test_a_trace_is_read_without_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, profiler.kineto; sys.exit('torch' in sys.modules)"],
        check=True,
        cwd=Path(__file__).parents[2],
    )


# -- real traces --------------------------------------------------------------------------------------


def plain_text(name: str) -> bytes:
    return gzip.decompress((REAL / f"{name}.json.gz").read_bytes())


def plain_events(name: str) -> list[dict[str, Any]]:
    top = json.loads(plain_text(name), parse_float=Decimal)
    base = top.get("baseTimeNanoseconds", 0)
    events = [e for e in top["traceEvents"] if e["ph"] == "X"]
    for e in events:
        e["start"] = base + int(Decimal(e["ts"]) * 1000)
        e["end"] = e["start"] + int(Decimal(e["dur"]) * 1000)
    return events


@needs_real
@pytest.mark.parametrize("name", sorted(REAL_ROWS))
def test_real_traces_have_the_rows_counted_in_them_and_the_busy_time_added_up_plainly(name: str) -> None:
    trace = read_trace(REAL / f"{name}.json.gz")
    rows = kernel_rows(trace)
    assert trace.notes == []
    assert Counter(zip(rows["stream"], rows["category"], strict=True)) == REAL_ROWS[name]
    busy: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    for stream, dur in zip(rows["stream"], rows["dur_ns"], strict=True):
        busy[stream] += dur
    device = [e for e in plain_events(name) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    leaves = [e for e in plain_events(name) if e.get("cat") == "cpu_op"] if name == "hta_cpu_only_rank34" else []
    for e in device + leaves:
        expected[e["args"].get("stream", e["tid"])] += e["end"] - e["start"]
    assert busy == expected
    assert rows["start_ns"] == sorted(e["start"] for e in device + leaves)


@needs_real
@pytest.mark.parametrize("name", sorted(REAL_ROWS))
def test_real_operators_are_told_apart_as_slow_counting_tells_them(name: str) -> None:
    operators = [e for e in plain_events(name) if e.get("cat") == "cpu_op"]
    expected: Counter[tuple[int, str, str, int]] = Counter()
    for tid in sorted({e["tid"] for e in operators}):
        here = [e for e in operators if e["tid"] == tid]
        start = np.array([e["start"] for e in here])
        end = np.array([e["end"] for e in here])
        place = np.arange(len(here))
        # Own time by painting every stretch between two boundaries: inner operators are painted later.
        bounds = np.unique(np.concatenate([start, end]))
        owner = np.full(len(bounds), -1)
        for i in sorted(place, key=lambda i: (start[i], -end[i])):
            owner[np.searchsorted(bounds, start[i]) : np.searchsorted(bounds, end[i])] = i
        own = np.zeros(len(here), dtype=np.int64)
        np.add.at(own, owner[:-1][owner[:-1] >= 0], np.diff(bounds)[owner[:-1] >= 0])
        for i, e in enumerate(here):
            inside = (start >= start[i]) & (end <= end[i]) & (start < end[i])
            inside &= (start != start[i]) | (end != end[i]) | (place > i)
            collective = e["name"].startswith(("c10d::", "record_param_comms"))
            if not inside.any():
                expected[tid, e["name"], "collective" if collective else "cpu_op", int(end[i] - start[i])] += 1
            elif own[i]:
                expected[tid, e["name"], "collective" if collective else "cpu_self", int(own[i])] += 1
    rows = kernel_rows(read_trace(REAL / f"{name}.json.gz"), on="cpu")
    assert Counter(zip(*(rows[key] for key in ("stream", "name", "category", "dur_ns")), strict=True)) == expected


@needs_real
def test_kernels_of_a_real_training_step_go_to_the_thread_and_range_that_launched_them(tmp_path: Path) -> None:
    """The V100 trace has forward, backward and optimizer ranges on one thread; autograd launches from another."""
    name = "hta_ns_resolution_rank0"
    text = plain_text(name)
    for old, new in [(b'"ProfilerStep#%d"' % n, b'"gatewise.step/%d/dense"' % n) for n in range(101, 106)] + [
        (b'"## forward ##"', b'"gatewise/ffn/0"'),
        (b'"## backward ##"', b'"gatewise/router/1"'),
        (b'"## optimizer ##"', b'"gatewise/head/-1"'),
    ]:
        text = text.replace(old, new)
    path = tmp_path / "renamed.json"
    path.write_bytes(text)

    events = plain_events(name)
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    notes = [e for e in events if e.get("cat") == "user_annotation"]
    segments = {"## forward ##": "ffn", "## backward ##": "router", "## optimizer ##": "head"}
    expected: Counter[tuple[Any, ...]] = Counter()
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = calls[e["args"]["correlation"]]
            around = [n for n in notes if n["start"] <= call["start"] < n["end"]]
            steps = [int(n["name"][-3:]) for n in around if n["name"].startswith("ProfilerStep")]
            open_ = [segments[n["name"]] for n in around if n["name"] in segments and n["tid"] == call["tid"]]
            expected[e["name"], steps[0] if steps else None, open_[0] if open_ else ""] += e["end"] - e["start"]
    rows = kernel_rows(read_trace(path))
    found: Counter[tuple[Any, ...]] = Counter()
    for kernel_name, step, segment, dur in zip(
        *(rows[key] for key in ("name", "step", "segment", "dur_ns")), strict=True
    ):
        found[kernel_name, step, segment] += dur
    assert found == expected
    assert {segment for _, _, segment in found} == {"", "ffn", "router", "head"}


@needs_real
def test_a_trace_of_15_megabytes_is_rows_in_seconds() -> None:
    begun = time.perf_counter()
    rows = kernel_rows(read_trace(REAL / "hta_ns_resolution_rank0.json.gz"))
    assert len(rows["name"]) == 6095
    assert time.perf_counter() - begun < 5  # 0.3 s on an idle core
