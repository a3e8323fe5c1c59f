"""The log: every step once, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler import training_log
from profiler.errors import InputError
from profiler.training_log import Log


def written(folder: Path) -> Log:
    log = Log(folder)
    log.write("start", recipe="x")
    log.write("held_out", step=0, stored=None, figures={})
    for step in (1, 2, 3):
        log.write("step", step=step, seconds=step * 1.5)
    log.write("held_out", step=3, stored="float16", figures={})
    log.write("end", seconds=4.5)
    return log


def places(folder: Path) -> list[tuple[str, int | None]]:
    return [(line["kind"], line.get("step")) for line in training_log.read(folder)]


def test_lines_past_a_state_are_dropped_and_the_clock_goes_back(tmp_path: Path) -> None:
    log = written(tmp_path / "run")
    assert log.cut_back(2) == 3.0
    log.write("resumed", step=2)
    log.close()
    assert places(tmp_path / "run") == [("start", None), ("held_out", 0), ("step", 1), ("step", 2), ("resumed", 2)]


def test_figures_of_a_finished_checkpoint_are_made_again(tmp_path: Path) -> None:
    log = written(tmp_path)
    log.cut_back(3)
    log.close()
    assert places(tmp_path) == [("start", None), ("held_out", 0), ("step", 1), ("step", 2), ("step", 3)]


def test_clearing_leaves_an_empty_log_that_goes_on(tmp_path: Path) -> None:
    log = written(tmp_path)
    log.clear()
    log.write("start", recipe="y")
    log.close()
    assert training_log.read(tmp_path) == [{"kind": "start", "recipe": "y"}]


def test_a_line_cut_off_by_a_kill_is_left_out_and_one_in_the_middle_is_not(tmp_path: Path) -> None:
    written(tmp_path).close()
    path = tmp_path / training_log.NAME
    whole = path.read_text()
    path.write_text(whole + '{"kind": "st')
    assert len(training_log.read(tmp_path)) == 7
    path.write_text('{"kind": "st\n' + whole)
    with pytest.raises(InputError, match="line 1: not JSON"):
        training_log.read(tmp_path)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training log .*log.jsonl: cannot be read"):
        training_log.read(tmp_path)
