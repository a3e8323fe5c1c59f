"""The bar: stages only where nobody watches it, and one line that goes away where somebody does."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from profiler.progress import Bar, _Pace


def test_in_a_pipe_only_the_stages_are_printed() -> None:
    out = StringIO()
    with Bar(Console(file=out, width=80)) as bar:
        bar.say("loading [tiny]")
        bar.at(0.5)
        bar.say("prefill-b1-l8")
        bar.at(1.0)
    assert out.getvalue() == "loading [tiny]\nprefill-b1-l8\n"


def test_on_a_terminal_the_stage_and_the_time_left_are_shown_and_cleared() -> None:
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with Bar(console) as bar:
        bar.say("loading runs/[1]")
        bar._progress.refresh()
        assert "left" not in out.getvalue()  # nothing is known of how long it takes
        bar.part(0.25)
        bar._progress.refresh()
        shown = out.getvalue()
    assert "loading runs/[1]" in shown
    assert "25%" in shown
    assert "0:00 left" in shown
    assert "in all" not in shown
    assert "\x1b[2K" in out.getvalue().removeprefix(shown)  # erased


def test_the_time_left_goes_on_as_it_has_since_the_share_was_first_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("profiler.progress.time.monotonic", lambda: now[0])
    pace = _Pace()
    pace.at(0.2)  # after a minute of loading, say: what came before does not count
    assert pace.due is None
    now[0] = 110.0
    pace.at(0.2)
    assert pace.due is None
    pace.at(0.4)  # a fifth in ten seconds leaves thirty for three fifths
    assert pace.due == pytest.approx(140.0)
    now[0] = 125.0
    pace.at(0.4)
    assert pace.due == pytest.approx(125.0 + 75.0)


def test_a_new_stage_starts_anew_and_all_of_it_goes_on() -> None:
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with Bar(console) as bar:
        bar.say("cell-1")
        bar.part(0.9)
        bar.at(0.45)
        bar.say("cell-2")
        before = len(out.getvalue())
        bar._progress.refresh()
        shown = out.getvalue()[before:]
        assert "cell-2" in shown
        assert "90%" not in shown
        assert "45%" in shown
        assert "in all" in shown
