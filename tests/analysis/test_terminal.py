"""What a person reads at the end of a run, in a pipe of 80 columns."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from analysis.terminal import render
from profiler.records import ArmRecord, CellRecord, RuleRecord
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.tiny_run import step, write_run


def printed(run: Run, width: int = 80) -> str:
    pipe = io.StringIO()
    console = Console(file=pipe, width=width)
    for part in render(run):
        console.print(part)
    return pipe.getvalue()


def line_after(text: str, start: str, then: str) -> str:
    """The first line beginning with `then` after the one beginning with `start`."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(start))
    return next(line for line in lines[at:] if line.startswith(then))


def test_what_too_few_repeats_cannot_show_is_said_at_the_break_even_and_on_the_row(tmp_path: Path) -> None:
    arms = [ArmRecord(name="a", method="any", twin="b"), ArmRecord(name="b", method="dense")]
    cells = [
        CellRecord(
            name=f"d{batch}",
            phase="decode",
            batch=batch,
            length=4,
            done=True,
            repeats=repeats,
            stopped="budget",
            warmup_s=warmup_s,
        )
        for batch, repeats, warmup_s in ((1, 3, None), (4, 1, 39.51))
    ]
    # Batch 1: from half to one and a half of the twin's 2 ms. Batch 4: always half of it, once.
    walls = {"d1": (1, 3, 1, 3, 1, 3), "d4": (1, 1, 1, 1, 1, 1)}
    steps = [
        step(arm, 100 * c + 2 * i + k, repeat=i, cell=cell, wall_ns=ms * 1_000_000)
        for c, (cell, own) in enumerate(walls.items())
        for i, taken in enumerate(own)
        for k, (arm, ms) in enumerate((("a", taken), ("b", 2)))
    ]
    text = printed(write_run(tmp_path / "run", arms, {"steps": steps}, cells=cells), width=120)
    said = "not decided: the interval holds 0 at batch 1; too few repeats to judge batch 4"
    assert said in " ".join(line_after(text, "Break-even", "a ").split())
    said = "decode, batch 4, 4 tokens of context  1 repeat, stopped by budget, of which warm-up took 39.5 s"
    assert said in text
    assert "decode, batch 1, 4 tokens of context  3 repeats, stopped by budget\n" in text
    rungs = text[text.index("decode, batch 4") : text.index("Break-even")]
    assert "1 repeat: too few to judge, which takes 3" in " ".join(rungs.split())


def test_the_ladder_row_by_row(example: Run) -> None:
    text = printed(example)
    # Net parameters 49,020 ÷ 261,184; FLOPs 1 − 39,884,800 ÷ 53,006,336; bytes −1,040 ÷ 1,044,480 (test_ladder).
    row = line_after(text, "prefill, batch 4, 32 tokens", "routed").split()
    assert row == ["routed", "18.8", "24.8", "−0.1", "15.0", "15.0", "[13.6,", "16.3]", "0.61", "5.10/6.00"]
    assert line_after(text, "prefill, batch 1, 32 tokens", "routed").split()[4:6] == ["−10.0", "−10.0"]
    assert "prefill, batch 4, 32 tokens  7 repeats, stopped by budget" in text
    assert "Ladder: routed against dense, forced against dense" in text
    rungs = text[text.index("Ladder") : text.index("Break-even")].splitlines()
    assert not any(line.startswith("dense") for line in rungs)  # its times stand in the arms' rows


def test_sections_in_order(example: Run) -> None:
    text = printed(example)
    titles = ["Ladder", "Break-even over batch", "Tails of step time", "Rules the run enforced", "To be read with it"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def test_arms_carry_what_they_are_in_every_table(example: Run) -> None:
    lines = printed(example).splitlines()
    for tag, arm in (("synthetic", "forced"), ("untrained", "routed")):
        under = [following for line, following in pairwise(lines) if line.startswith(f"{arm}  ")]
        # Three cells in the ladder, two lines of break-even, three cells of tails.
        assert [line.strip() for line in under] == [tag] * 8


def test_tails_break_even_rules_and_labels(example: Run) -> None:
    text = printed(example)
    assert line_after(text, "Break-even", "routed").split("1, 4")[1].strip() == "between batch 1 (loses) and 4 (saves)"
    tail = line_after(text[text.index("Tails") :], "decode", "routed").split()
    assert tail == ["routed", "decode", "step", "(per", "token)", "28", "1.05", "1.06†", "1.06†"]
    assert "Percentiles: NumPy linear. † fewer than 10 samples lie beyond." in text
    assert "rule 1, rows executed = gates recorded: holds in 3 of 3" in text
    assert "unsupported here: device_ns (the CPU has no device clock)" in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": "start", "state": "killed"},
        {"stage": "mid-cell", "state": "killed", "contention": True},
        {"origin": "session", "arms": ("routed",)},
        {"arms": ("dense",), "random_weights": True},
        {"twin": "absent", "traced": False, "nan_gates": True, "state": "failed"},
    ],
)
def test_every_kind_of_run_fits_80_columns(tmp_path: Path, options: dict[str, Any]) -> None:
    text = printed(Run(write_example_run(tmp_path / "run", **options)))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "nan" not in text.lower().replace("dynamic", "")
    assert "<NA>" not in text


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    text = printed(Run(write_example_run(tmp_path / "run", stage="start", state="killed")))
    assert "Killed: process 4194305 is gone" in text
    assert "Nothing was measured." in text
    assert "Break-even" not in text


def test_notes_are_said_once_for_the_arms_they_concern(tmp_path: Path) -> None:
    text = printed(Run(write_example_run(tmp_path / "run", twin="absent")), width=400)
    cell = text[text.index("prefill, batch 4") : text.index("decode, batch 4")]
    assert cell.count("no bare steps of absent") == 1
    assert "routed, forced: twin 'absent' recorded no step that pairs" in cell
    assert line_after(cell, "prefill", "dense").split() == ["dense", "—", "—", "—", "—", "—", "—", "6.00"]


def test_random_weights_and_broken_rules_stand_out(tmp_path: Path) -> None:
    assert (
        "tiny, random weights" in printed(Run(write_example_run(tmp_path / "run", random_weights=True))).splitlines()[0]
    )
    rules = [
        RuleRecord(rule=1, name="rows = gates", arm="a", cell="cell", passed=passed, detail="96 against 128")
        for passed in (True, False)
    ]
    run = write_run(tmp_path / "broken", [ArmRecord(name="a", method="dense")], {"steps": [step("a", 0)]}, rules=rules)
    text = printed(run)
    assert "rule 1, rows = gates: holds in 1 of 2\n  a cell: 96 against 128" in text


def test_names_are_never_taken_for_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [ArmRecord(name="[red]a[/]", method="dense")], {"steps": [step("[red]a[/]", 0)]})
    assert "[red]a[/]" in printed(run)
