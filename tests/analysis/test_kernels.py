"""Kernels per traced step and segments per instrumented step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.kernels import (
    BY_SEGMENT_COLUMNS,
    NO_SEGMENT,
    SEGMENT_COLUMNS,
    TOP_COLUMNS,
    UNATTRIBUTED,
    busy_ms,
    by_segment,
    segments,
    top,
)
from analysis.latency import step_samples
from profiler.records import ArmRecord
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.tiny_run import step, write_run

ARMS = [ArmRecord(name="a", method="dense")]


def kernel(number: int, ms: float, **more: Any) -> dict[str, Any]:
    row = {"arm": "a", "step": number, "stream": 0, "name": "mm", "category": "gemm", "segment": "ffn", "layer": 0}
    return {**row, "start_ns": 0, "dur_ns": round(ms * 1e6), **more}


def segment(number: int, name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"arm": "a", "step": number, "layer": 0, "segment": name, "ns": round(ms * 1e6), **more}


def test_kernel_time_by_segment(example: Run) -> None:
    found = by_segment(example)
    assert list(found.columns) == list(BY_SEGMENT_COLUMNS)
    own = found[(found["arm"] == "dense") & (found["cell"] == "prefill-b4-l32")]
    # A traced step takes 9 ms: 0.5 of it in FFN products, 0.2 in attention, 0.1 outside; 7.2 ms busy.
    assert own["segment"].tolist() == ["ffn", "attention", NO_SEGMENT]
    assert own["ms_per_step"].tolist() == pytest.approx([4.5, 1.8, 0.9])
    assert own["share"].tolist() == pytest.approx([0.625, 0.25, 0.125])
    assert set(own["steps"]) == {2}
    # Cells and arms stand as in the manifest, not by name.
    assert found["cell"].drop_duplicates().tolist() == ["prefill-b1-l32", "prefill-b4-l32", "decode-b4-c32-n4"]
    assert found["arm"].drop_duplicates().tolist() == ["dense", "routed", "forced"]


def test_top_kernels(example: Run) -> None:
    found = top(example, "dense", "prefill-b4-l32", n=2)
    assert list(found.columns) == list(TOP_COLUMNS)
    assert found["name"].tolist() == ["aten::mm", "aten::scaled_dot_product_attention"]
    assert found["calls_per_step"].tolist() == [2, 1]
    assert found["ms_per_step"].tolist() == pytest.approx([4.5, 1.8])
    assert found["share"].tolist() == pytest.approx([0.625, 0.25])  # of all kernels, the third too


def test_kernels_without_a_traced_step_count_for_nothing(tmp_path: Path) -> None:
    rows = {"steps": [step("a", 0, "traced")], "kernels": [kernel(0, 2.0), kernel(7, 50.0)]}
    run = write_run(tmp_path / "run", ARMS, rows)
    assert by_segment(run)["ms_per_step"].tolist() == [2.0]
    assert top(run, "a", "cell")["ms_per_step"].tolist() == [2.0]


def test_busy_time_is_the_busiest_ranks(tmp_path: Path) -> None:
    traced = [step("a", 0, "traced", rank=rank) for rank in (0, 1)]
    rows = {"steps": traced, "kernels": [kernel(0, 2.0), kernel(0, 1.0), kernel(0, 4.0, rank=1)]}
    run = write_run(tmp_path / "run", ARMS, rows)
    assert busy_ms(run, step_samples(run)) == {("a", "cell"): 4.0}


def test_no_trace_no_rows(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "run", traced=False))
    assert by_segment(run).empty
    assert top(run, "dense", "prefill-b4-l32").empty
    assert list(top(run, "dense", "prefill-b4-l32").columns) == list(TOP_COLUMNS)


def test_segments_and_what_none_of_them_covers(example: Run) -> None:
    found = segments(example)
    assert list(found.columns) == list(SEGMENT_COLUMNS)
    own = found[(found["arm"] == "routed") & (found["cell"] == "prefill-b4-l32")]
    # An instrumented step takes 1.02 × 5.1 = 5.202 ms in the mean; 96 % of it is in segments.
    ms = dict(zip(own["segment"], own["ms_per_step"], strict=True))
    assert ms["ffn"] == pytest.approx(0.48 * 5.202, rel=1e-6)
    assert ms["router"] == pytest.approx(0.02 * 5.202, rel=1e-6)
    assert ms[UNATTRIBUTED] == pytest.approx(0.04 * 5.202, rel=1e-5)
    assert sum(ms.values()) == pytest.approx(5.202)
    assert own["segment"].tolist()[:2] == ["ffn", "attention"]
    assert own["segment"].tolist()[-1] == UNATTRIBUTED
    assert own["factor"].tolist() == pytest.approx([1 / 1.02] * len(own))
    assert not own["marked"].any()


@pytest.mark.parametrize(("instrumented_ms", "marked"), [(1.05, False), (1.2, True), (0.8, True)])
def test_a_factor_far_from_one_marks_the_cell(tmp_path: Path, instrumented_ms: float, marked: bool) -> None:
    steps = [step("a", 0), step("a", 1, "instrumented", wall_ns=round(instrumented_ms * 1e6))]
    found = segments(write_run(tmp_path / "run", ARMS, {"steps": steps, "segments": [segment(1, "ffn", 0.5)]}))
    assert found["factor"].tolist() == pytest.approx([1 / instrumented_ms] * 2)
    assert found["marked"].tolist() == [marked, marked]


def test_segments_of_two_ranks_leave_the_wait_of_the_faster_unattributed(tmp_path: Path) -> None:
    steps = [
        step("a", 0, "instrumented", rank=0, wall_ns=2_000_000),
        step("a", 0, "instrumented", rank=1, wall_ns=4_000_000),
    ]
    spent = [segment(0, "ffn", 1.0), segment(0, "ffn", 3.0, rank=1)]
    found = segments(write_run(tmp_path / "run", ARMS, {"steps": steps, "segments": spent})).set_index("segment")
    assert found["ms_per_step"].to_dict() == {"ffn": 2.0, UNATTRIBUTED: 2.0}


def test_a_session_has_segments_without_a_factor(tmp_path: Path) -> None:
    found = segments(Run(write_example_run(tmp_path / "run", origin="session", arms=("routed",))))
    assert set(found["cell"]) == {"session-prefill", "session-decode"}
    assert pd.isna(found["factor"]).all()
    assert not found["marked"].any()


def test_an_empty_run_has_no_segments(tmp_path: Path) -> None:
    assert segments(Run(write_example_run(tmp_path / "run", stage="start", state="killed"))).empty
