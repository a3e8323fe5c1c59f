"""Tail table and the samples under it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.latency import SAMPLES_BEYOND, TAIL_COLUMNS, cells, compare, samples_beyond, step_samples, tails
from profiler.records import ArmRecord, CellRecord
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.tiny_run import step, write_run

ARMS = [ArmRecord(name="a", method="dense"), ArmRecord(name="b", method="dense")]


def test_percentiles_by_hand(example: Run) -> None:
    found = tails(example)
    assert list(found.columns) == list(TAIL_COLUMNS)
    own = found[(found["cell"] == "prefill-b1-l32") & (found["arm"] == "dense")]
    # Sorted ms: 1.976 1.984 1.992 2.000 2.008 2.016 2.024. P95 is at place 5.7, P99 at 5.94; the warm-up's 20 ms
    # are not among them.
    assert own["percentile"].tolist() == [50, 95, 99]
    assert own["value_ms"].tolist() == pytest.approx([2.0, 2.016 + 0.7 * 0.008, 2.016 + 0.94 * 0.008])
    assert own["n"].tolist() == [7, 7, 7]
    assert own["beyond"].tolist() == [3, 1, 1]
    assert own["marked"].all()
    assert set(own["rule"]) == {"NumPy linear"}
    assert set(own["metric"]) == {"prefill step"}
    assert set(own["pass"]) == {"bare"}


def test_decode_is_per_token(example: Run) -> None:
    found = tails(example)
    own = found[(found["cell"] == "decode-b4-c32-n4") & (found["arm"] == "routed") & (found["percentile"] == 50)]
    assert own[["metric", "value_ms", "n", "marked"]].values.tolist() == [
        ["decode step (per token)", 1.05, 28, False]  # 14 of 28 lie beyond the median
    ]


def test_samples_beyond_counts_what_lies_past_the_percentile() -> None:
    for n in range(1, 400):
        values = np.arange(n, dtype=np.float64)
        for percentile in (50, 95, 99):
            value = np.percentile(values, percentile, method="linear")
            # A place that is a whole number is a sample itself; rounding must not push it past its percentile.
            assert samples_beyond(n, percentile) == int(np.sum(values > value + 1e-9)), (n, percentile)


def test_ten_samples_beyond_are_enough(tmp_path: Path) -> None:
    # 201 samples: the place of P95 is 190, and 10 lie past it; of P99 198, and 2 do.
    steps = [step("a", r, repeat=r, wall_ns=1_000_000 + r) for r in range(201)]
    found = tails(write_run(tmp_path / "run", ARMS[:1], {"steps": steps})).set_index("percentile")
    assert SAMPLES_BEYOND == 10
    assert found["beyond"].to_dict() == {50: 100, 95: 10, 99: 2}
    assert found["marked"].to_dict() == {50: False, 95: False, 99: True}


def test_a_session_has_instrumented_tails(tmp_path: Path) -> None:
    found = tails(Run(write_example_run(tmp_path / "run", origin="session", arms=("routed",))))
    assert set(found["pass"]) == {"instrumented"}
    assert found["n"].tolist() == [1, 1, 1, 4, 4, 4]


def test_an_empty_run_has_no_tails(tmp_path: Path) -> None:
    found = tails(Run(write_example_run(tmp_path / "run", stage="start", state="killed")))
    assert found.empty
    assert list(found.columns) == list(TAIL_COLUMNS)


def test_pairs_are_of_one_repeat_and_index(tmp_path: Path) -> None:
    walls = {("a", 0, 0): 1, ("a", 0, 1): 2, ("a", 1, 0): 3, ("b", 0, 1): 4, ("b", 1, 0): 6, ("b", 2, 0): 100}
    steps = [
        step(arm, number, repeat=repeat, index=index, wall_ns=ms * 1_000_000)
        for number, ((arm, repeat, index), ms) in enumerate(walls.items())
    ]
    samples = step_samples(write_run(tmp_path / "run", ARMS, {"steps": steps}))
    found = compare(samples, "cell", ("a", "bare"), ("b", "bare"))
    # Pairs (2, 4) and (3, 6); a's first and b's last stand alone.
    assert found is not None
    assert (found.first_ms, found.second_ms, found.ratio.value, found.ratio.n, found.alone) == (2.5, 5.0, 0.5, 2, 2)
    assert compare(samples, "cell", ("a", "bare"), ("b", "instrumented")) is None


def test_ranks_are_joined_by_the_slowest_and_warm_up_is_left_out(tmp_path: Path) -> None:
    steps = [
        step("a", 0, "warmup", wall_ns=9_000_000),
        step("a", 1, rank=0, wall_ns=2_000_000),
        step("a", 1, rank=1, wall_ns=3_000_000),
    ]
    samples = step_samples(write_run(tmp_path / "run", ARMS[:1], {"steps": steps}))
    assert samples[["wall_ns", "rows", "context"]].values.tolist() == [[3_000_000, 8, 20]]


def test_cells_without_a_record_are_found_in_the_steps(tmp_path: Path) -> None:
    steps = [step("a", 0, "instrumented", cell="session-prefill"), step("a", 1, "instrumented", cell="known")]
    known = CellRecord(name="known", phase="prefill", batch=2, length=4, done=True)
    found = cells(write_run(tmp_path / "run", ARMS[:1], {"steps": steps}, cells=[known]))
    assert [(c.name, c.phase, c.batch, c.done) for c in found] == [
        ("known", "prefill", 2, True),
        ("session-prefill", "prefill", 0, False),
    ]
