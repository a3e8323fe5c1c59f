"""Clocks that say which segment of a step the time went to: host time on a CPU, events of the stream on a GPU.

Not here: who opens and closes segments (`recorder`).
"""

from __future__ import annotations

import time

import torch

#: Segment, layer, and of which part of it (a width) where that is told apart, else None.
Segment = tuple[str, int, int | None]


#: Segment of what recording a decision takes. It is in no method's time, and in the end in none at all.
OWN = ""


class CpuClock:
    """Attributes wall time to the innermost open segment; parents get what their children leave.

    Inside the step only the time and which segment opened (None: the last one closed) are noted; adding up waits.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[int, Segment | None]] = []

    def start(self) -> None:
        self._marks = []

    def moment(self) -> int:
        return time.perf_counter_ns()

    def ns_of(self, moment: int, began_ns: int) -> int:
        return moment

    def push(self, segment: Segment) -> None:
        self._marks.append((time.perf_counter_ns(), segment))

    def pop(self) -> None:
        self._marks.append((time.perf_counter_ns(), None))

    def finish(self) -> tuple[dict[Segment, int], int | None]:
        spent: dict[Segment, int] = {}
        stack: list[Segment] = []
        last = 0
        for now, opened in self._marks:
            if stack:
                spent[stack[-1]] = spent.get(stack[-1], 0) + now - last
            if opened is None:
                stack.pop()
            else:
                stack.append(opened)
            last = now
        return spent, None


class CudaClock:
    """The same from CUDA events on the current stream; read only after the step has been synchronised."""

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, Segment | None]] = []
        self._stack: list[Segment] = []

    def start(self) -> None:
        self._marks, self._stack = [], []
        self._mark(None)

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns_of(self, moment: torch.cuda.Event, began_ns: int) -> int:
        return began_ns + round(float(self._marks[0][0].elapsed_time(moment)) * 1e6)

    def _mark(self, owner: Segment | None) -> None:
        self._marks.append((self.moment(), owner))

    def push(self, segment: Segment) -> None:
        self._stack.append(segment)
        self._mark(self._stack[-1])

    def pop(self) -> None:
        self._stack.pop()
        self._mark(self._stack[-1] if self._stack else None)

    def finish(self) -> tuple[dict[Segment, int], int | None]:
        self._mark(None)
        last = self._marks[-1][0]
        last.synchronize()
        spent: dict[Segment, int] = {}
        for (event, owner), (following, _) in zip(self._marks, self._marks[1:], strict=False):
            if owner is not None:
                spent[owner] = spent.get(owner, 0) + round(event.elapsed_time(following) * 1e6)
        return spent, round(self._marks[0][0].elapsed_time(last) * 1e6)
