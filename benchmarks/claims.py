"""What the benchmarks share: a spec run into a folder that is gone afterwards, and claims that hold or do not.

No claim of its own; `make bench` passes it over.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from profiler import run as running
from profiler.intervals import SAMPLES_TO_JUDGE
from profiler.store import Run
from workloads.loading import load

#: Options of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def parser(doc: str | None, repeats: int) -> argparse.ArgumentParser:
    """A parser with `--repeats`, described by the first line of a module's docstring."""
    found = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    found.add_argument("--repeats", type=int, default=repeats)
    return found


def keep_memory() -> None:
    """Have glibc keep what is freed, instead of giving it back to the system and asking for it again.

    A layer's intermediates at 1,024 rows are large enough to be given back each time, and what was given back comes
    page by page: seen, 62 or 73 ms for the same dense FFNs, depending on what else had been freed in the process
    before. Other allocators do not do this; without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, size in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**30), (_M_TOP_PAD, 2**28)):
        mallopt(option, size)


@contextmanager
def measured(overrides: Sequence[str], repeats: int) -> Iterator[Run]:
    """The quickstart spec, changed, run for so many repeats of each cell; says first whether anybody disturbed it.

    Neither interval nor budget ends a cell.
    """
    limits = [f"measure.max_repeats={repeats}", "measure.target_ci=0.0001", "measure.budget_s=7200"]
    spec = load("quickstart", ["trace=null", *overrides, *limits])
    with tempfile.TemporaryDirectory() as folder:
        run = Run(running.run(spec, Path(folder) / "run"))
        print(run.manifest.contention["sentence"])
        yield run


@dataclass(frozen=True)
class Claim:
    """A figure and the limit it claims to keep: from above, or where `at_least`, from below.

    `n`: pairs behind it, where it was sampled; with fewer than `SAMPLES_TO_JUDGE` nothing is shown.
    """

    what: str
    value: float
    limit: float
    at_least: bool = False
    n: int | None = None
    percent: bool = False

    @property
    def verdict(self) -> str:
        """`holds`, or why not."""
        if math.isnan(self.value) or (self.n is not None and self.n < SAMPLES_TO_JUDGE):
            return "NOT SHOWN, too few repeats"
        kept = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "holds" if kept else "DOES NOT HOLD"

    def __str__(self) -> str:
        value, limit = (f"{x:.2%}" if self.percent else f"{x:.3f}" for x in (self.value, self.limit))
        return f"{self.what} {value}, limit {limit}: {self.verdict}"


def exit_code(claims: Sequence[Claim]) -> int:
    """0 where every claim holds, 1 otherwise."""
    return 0 if all(claim.verdict == "holds" for claim in claims) else 1
