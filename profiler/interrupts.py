"""SIGINT and SIGTERM at a moment when they can be dealt with.

A signal raises between any two lines: also between making a folder and being ready to close it. `Held` lets signals
wait over such places. Only the main thread is ever interrupted, and only there can handlers be set; in any other thread
what is here does nothing.

Not here: what an interruption leaves behind (`run.opened`), and the exit code (`cli`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C. A handler of the caller's own stays in place."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Held:
    """While it is open signals wait; they do what they would have done at its end, or where `lifted` begins."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._waiting: list[int] = []

    def __enter__(self) -> Self:
        self._hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self._deliver()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Signals act at once in this block; one that waits is raised here."""
        self._restore()
        try:
            self._deliver()
            yield
        finally:
            self._hold()

    def _hold(self) -> None:
        if not _in_main_thread():
            return
        try:
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # a handler that Python did not set could not be put back
                    self._before[number] = signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _deliver(self) -> None:
        """Several that wait are one."""
        if self._waiting:
            number, self._waiting = self._waiting[0], []
            signal.raise_signal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
