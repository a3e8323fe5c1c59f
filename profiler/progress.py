"""The progress bar of a run, on stderr: what is being done, how far, how long still."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """A `run.Progress` drawn by rich. In a pipe, where a bar would be noise, only the stages are printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, what: str) -> None:
        """What is being done now."""
        if self._console.is_terminal:
            self._progress.update(self._task, description=what)
        else:
            self._console.print(what, highlight=False, markup=False)

    def at(self, share: float) -> None:
        """Share of the whole run that is done."""
        self._progress.update(self._task, completed=share)
