"""The bar: stages only where nobody watches it, and one line that goes away where somebody does."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from profiler.progress import Bar


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
        bar.at(0.25)
        bar._progress.refresh()
        shown = out.getvalue()
    assert "loading runs/[1]" in shown
    assert "25%" in shown
    assert "left" in shown
    assert "\x1b[2K" in out.getvalue().removeprefix(shown)  # erased
