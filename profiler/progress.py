"""Progress on stderr: what is being done, how far that is, how far all of it is, and how long both will still take.

Not here: what there is to do (`run.Progress` is what it tells).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


@dataclass
class _Pace:
    """When something will be done, going on as it has since its share was first told."""

    began: tuple[float, float] | None = None
    due: float | None = None

    def at(self, share: float) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began = (share, now)
            return
        done, since = self.began
        if share > done and now > since:
            self.due = now + (1 - share) * (now - since) / (share - done)


class _TimeLeft(ProgressColumn):
    """Minutes and seconds to go, counted down between two tellings; of a stage that tells no share, nothing."""

    def render(self, task: Task) -> Text:
        due = task.fields["pace"].due
        if due is None:
            return Text("")
        minutes, seconds = divmod(max(0, round(due - time.monotonic())), 60)
        return Text(f"{minutes}:{seconds:02} left", style="progress.remaining")


class Bar:
    """A `run.Progress` drawn by rich: a line for the stage, one for all of it where its share is told.

    In a pipe, where a bar would be noise, only the stages are printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._of_stage, self._of_all = _Pace(), _Pace()
        self._stage = self._progress.add_task("starting", total=None, pace=self._of_stage)
        self._all = self._progress.add_task("in all", total=1.0, visible=False, pace=self._of_all)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, what: str) -> None:
        """What is being done now."""
        if not self._console.is_terminal:
            self._console.print(what, highlight=False, markup=False)
            return
        self._of_stage = _Pace()
        self._of_stage.at(0.0)
        self._progress.reset(self._stage, total=None, completed=0, description=what, pace=self._of_stage)

    def part(self, share: float) -> None:
        """Share of the stage that is done."""
        self._of_stage.at(share)
        self._progress.update(self._stage, total=1.0, completed=share)

    def at(self, share: float) -> None:
        """Share of everything that is done."""
        self._of_all.at(share)
        self._progress.update(self._all, completed=share, visible=True)
