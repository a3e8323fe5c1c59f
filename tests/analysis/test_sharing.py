"""What the rows of a step share, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import report
from analysis.sharing import SHARING_COLUMNS, sharing
from profiler.records import ArmRecord, CellRecord, Choice
from profiler.store import Run
from tests.analysis.test_report import Page
from tests.analysis.tiny_run import step, write_run

#: Weight bytes of the three blocks.
BYTES = (10, 20, 30)
CELL = CellRecord(name="cell", phase="decode", batch=4, length=8, done=True)


def arm(*, adapters: bool = False, options: bool = True) -> ArmRecord:
    """Three blocks that may be skipped, beside a head that always runs; skipping may run an adapter instead."""
    choices = [Choice(layer=-1, site="head", index=0, name="run", backbone_parameters=9, weight_bytes=1000)]
    for layer, size in enumerate(BYTES):
        run = Choice(layer=layer, site="block", index=1, name="run", backbone_parameters=size, weight_bytes=size)
        skip = Choice(
            layer=layer, site="block", index=0, name="skip", replacement_parameters=2 * adapters,
            weight_bytes=2 * adapters,
        )  # fmt: skip
        choices += [skip, run] if options else [run]
    return ArmRecord(name="a", method="any", choices=choices)


def ran(number: int, layer: int, rows: int, *, choice: int = 1, padded: int = 0) -> dict[str, Any]:
    return {
        "arm": "a", "step": number, "layer": layer, "site": "block" if layer >= 0 else "head",
        "choice": choice if layer >= 0 else 0, "rows": rows, "padded": padded, "context": rows, "context_full": rows,
    }  # fmt: skip


def write(folder: Path, record: ArmRecord, rows: list[dict[str, Any]], steps: int = 1) -> Run:
    tables = {
        "steps": [step("a", n, "instrumented", index=n, phase="decode", rows=4) for n in range(steps)],
        "rows": [ran(n, -1, 4) for n in range(steps)] + rows,
    }
    return write_run(folder, [record], tables, cells=[CELL])


def test_a_layer_that_some_rows_run_is_read_for_all(tmp_path: Path) -> None:
    # Nobody runs the first block, two of four rows the second, all four the third.
    (line,) = sharing(write(tmp_path / "r", arm(), [ran(0, 1, 2), ran(0, 2, 4)])).to_dict("records")
    assert list(line) == list(SHARING_COLUMNS)
    assert (line["layers"], line["steps"]) == (3, 1)
    assert (line["nobody"], line["some"], line["everybody"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert line["rows_ran"] == pytest.approx((0 + 2 + 4) / 12)
    assert line["weights_read"] == pytest.approx((20 + 30) / 60)
    assert line["read_for_skippers"] == pytest.approx(50 / 60 - 1 / 2)


def test_steps_are_weighed_alike(tmp_path: Path) -> None:
    rows = [ran(0, layer, 4) for layer in range(3)] + [ran(1, 0, 1)]
    (line,) = sharing(write(tmp_path / "r", arm(), rows, steps=2)).to_dict("records")
    assert (line["nobody"], line["some"], line["everybody"]) == pytest.approx((2 / 6, 1 / 6, 3 / 6))
    assert line["rows_ran"] == pytest.approx((4 + 4 + 4 + 1) / 24)
    assert line["weights_read"] == pytest.approx((60 + 10) / 120)


def test_rows_that_take_an_adapter_skip(tmp_path: Path) -> None:
    rows = [ran(0, 0, 4, choice=0), ran(0, 1, 3, choice=0), ran(0, 1, 1), ran(0, 2, 4)]
    (line,) = sharing(write(tmp_path / "r", arm(adapters=True), rows)).to_dict("records")
    assert (line["nobody"], line["some"], line["everybody"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert line["rows_ran"] == pytest.approx(5 / 12)
    assert line["weights_read"] == pytest.approx(50 / 60)


def test_pads_read_what_they_enter(tmp_path: Path) -> None:
    (line,) = sharing(write(tmp_path / "r", arm(), [ran(0, 0, 0, padded=4)])).to_dict("records")
    assert (line["nobody"], line["some"]) == pytest.approx((2 / 3, 1 / 3))
    assert (line["rows_ran"], line["weights_read"]) == pytest.approx((0, 10 / 60))


def test_an_arm_that_cannot_skip_or_recorded_nothing_has_no_line(tmp_path: Path) -> None:
    rows = [ran(0, layer, 4) for layer in range(3)]
    assert sharing(write(tmp_path / "cannot", arm(options=False), rows)).empty
    nothing = sharing(write_run(tmp_path / "nothing", [arm()], {}, cells=[CELL]))
    assert nothing.empty
    assert list(nothing.columns) == list(SHARING_COLUMNS)


def test_the_example(example: Run) -> None:
    """Of four layers, r0 skips the second, r1 the third, r2 both and r3 none."""
    frame = sharing(example).set_index(["cell", "arm"])
    batch = frame.loc[("prefill-b4-l32", "routed")]
    assert (batch["nobody"], batch["some"], batch["everybody"]) == (0.0, 0.5, 0.5)
    assert batch["rows_ran"] == pytest.approx(12 / 16)
    assert batch["weights_read"] == 1.0
    alone = frame.loc[("prefill-b1-l32", "routed")]
    assert (alone["nobody"], alone["some"], alone["everybody"]) == (0.25, 0.0, 0.75)
    assert alone["weights_read"] == alone["rows_ran"] == 0.75
    forced = frame.loc[("prefill-b4-l32", "forced")]
    assert (forced["nobody"], forced["some"], forced["read_for_skippers"]) == (0.5, 0.0, 0.0)


def test_the_report_shows_it(example: Run) -> None:
    rows = Page(report.render_html(example)).table("Some rows run (%)", "Weights read (% of bytes)")
    row = next(r for r in rows if r["Cell"].startswith("prefill, batch 4") and r["Arm"].startswith("routed"))
    assert (row["Some rows run (%)"], row["Rows that ran (% of rows)"]) == ("50.0 %", "75.0 %")
    assert (row["Weights read (% of bytes)"], row["Read for rows that skip (% of bytes)"]) == ("100.0 %", "25.0 %")
    assert "## What the batch shares" in report.render_markdown(example)
