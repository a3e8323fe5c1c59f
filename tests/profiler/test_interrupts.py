"""Signals that wait: nothing is lost, nothing comes twice, and what was there before is there again."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from profiler import run as running
from profiler import writer as writing
from profiler.interrupts import Held, terminated_as_interrupt
from profiler.records import Manifest
from profiler.store import Run
from profiler.writer import RunWriter

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Any:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@BOTH
def test_a_signal_waits_for_the_end_of_the_block(number: int) -> None:
    done = []

    def work() -> None:
        with terminated_as_interrupt(), Held():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["to its end"]


@BOTH
def test_a_signal_that_waits_is_raised_where_signals_act_again(number: int) -> None:
    seen = []

    def work() -> None:
        with terminated_as_interrupt(), Held() as held:
            signal.raise_signal(number)
            try:
                with held.lifted():
                    seen.append("never here")
            except KeyboardInterrupt:
                signal.raise_signal(number)  # waits again: the block that clears up is not left
                seen.append("cleared up")
                raise

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["cleared up"]


def test_a_handler_of_the_callers_own_stays_and_is_called_after_waiting() -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with terminated_as_interrupt(), Held():
            signal.raise_signal(signal.SIGTERM)
            assert called == []
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_held_and_nothing_fails() -> None:
    done = []

    def work() -> None:
        with terminated_as_interrupt(), Held() as held, held.lifted():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]


# -- the folder of a run, at every moment at which a file of it is written -------------------------------------------


def opened(folder: Path) -> Any:
    manifest = Manifest(name="t", created_utc="2026-01-01T00:00:00+00:00", pid=1, host="h")
    return running.opened(lambda: RunWriter(folder, manifest, "name: t\n"))


@BOTH
@pytest.mark.parametrize("moment", [0, 1, 2], ids=["manifest", "spec", "reserve"])
def test_a_signal_while_the_folder_is_made_leaves_it_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, moment: int
) -> None:
    whole, files = writing._write_whole, []

    def write(path: Path, content: Any) -> None:
        if len(files) == moment:
            signal.raise_signal(number)
        files.append(path.name)
        whole(path, content)

    monkeypatch.setattr(writing, "_write_whole", write)
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "r"):
        files.append("never here")
    assert "never here" not in files
    assert Run(tmp_path / "r").state == "interrupted"
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["manifest.json", "spec.yaml"]


@BOTH
def test_a_second_signal_does_not_stop_the_folder_from_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    finish = RunWriter.finish

    def impatient(self: RunWriter, *args: Any) -> None:
        signal.raise_signal(number)
        finish(self, *args)

    monkeypatch.setattr(RunWriter, "finish", impatient)
    with pytest.raises(KeyboardInterrupt) as caught, opened(tmp_path / "r"):
        signal.raise_signal(number)
    assert Run(tmp_path / "r").state == "interrupted"
    assert caught.value.__notes__ == [f"what was recorded is kept in {tmp_path / 'r'}"]
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "whole"):
        pass
    assert Run(tmp_path / "whole").state == "complete"  # it came when all was measured


def test_a_file_that_is_not_written_to_its_end_leaves_nothing_aside(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writing._write_whole(tmp_path / "x", write)
    assert list(tmp_path.iterdir()) == []


# -- the command -----------------------------------------------------------------------------------------------------


def test_any_command_that_is_terminated_says_so_and_ends_with_130() -> None:
    script = """
        import os, signal, sys, time
        from profiler import cli, methods

        def load():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

        methods.summaries = load
        sys.argv = ["gatewise", "methods"]
        cli.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
