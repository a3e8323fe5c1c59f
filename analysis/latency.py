"""Step times: the cells and samples every time rung is made of, how two arms are paired, and the tail table.

Step wall time only. Latency of requests under load (TTFT, TPOT, goodput) needs a serve section and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from profiler.intervals import Interval, ratio_of_medians
from profiler.records import CellRecord
from profiler.store import Run

PERCENTILES = (50, 95, 99)
RULE = "NumPy linear"
#: A percentile with fewer samples beyond it than this is marked (MEASURES, "Load and latency").
SAMPLES_BEYOND = 10
TAIL_COLUMNS = (
    "cell", "phase", "batch", "length", "arm", "metric", "pass", "percentile", "value_ms", "n", "beyond", "marked",
    "rule",
)  # fmt: skip
#: Name of the quality pass in `steps`.
QUALITY = "quality"
METRIC = {"prefill": "prefill step", "decode": "decode step (per token)", "mixed": "mixed step"}


def cells(run: Run) -> list[CellRecord]:
    """The cells of the manifest, then those that only have steps so far: a session's, until it is closed."""
    known = run.manifest.cells
    names = {cell.name for cell in known}
    timed = run.table("steps").filter(f"pass <> '{QUALITY}'")
    seen = timed.project("cell, phase").distinct().order("cell").fetchall()
    return [*known, *(CellRecord(name=c, phase=phase, batch=0, length=0) for c, phase in seen if c not in names)]


def step_samples(run: Run) -> pd.DataFrame:
    """Every step that counts, ranks joined: warm-up is left out, and so is the quality pass, which times nothing.

    Returns:
        One row per (arm, cell, pass, repeat, index, step); `rows` and `context` are sums over ranks, `wall_ns`
        is the slowest rank's (MEASURES rule 12).
    """
    steps = run.frame("steps")
    steps = steps[~steps["pass"].isin(["warmup", QUALITY])]
    key = ["arm", "cell", "pass", "repeat", "index", "step"]
    joined = steps.groupby(key, as_index=False).agg({"rows": "sum", "context": "sum", "wall_ns": "max"})
    return joined.sort_values(key, ignore_index=True)


def walls(samples: pd.DataFrame, cell: str, arm: str, pass_: str) -> NDArray[np.float64]:
    """Wall times in ms of one arm's steps in one pass of one cell, `[n]`."""
    chosen = samples[(samples["cell"] == cell) & (samples["arm"] == arm) & (samples["pass"] == pass_)]
    return chosen["wall_ns"].to_numpy(dtype=np.float64) / 1e6


@dataclass(frozen=True)
class Comparison:
    """Two (arm, pass) of one cell, step by step. Medians in ms are of the pairs; `alone`: steps without a partner."""

    ratio: Interval
    first_ms: float
    second_ms: float
    alone: int


def compare(samples: pd.DataFrame, cell: str, first: tuple[str, str], second: tuple[str, str]) -> Comparison | None:
    """Ratio of the medians, first ÷ second, of steps paired on (repeat, index); None where there is no pair.

    Args:
        samples: `step_samples(run)`.
        first, second: (arm, pass). A run killed mid-repeat leaves steps of one side alone.
    """
    sides = []
    for arm, pass_ in (first, second):
        chosen = samples[(samples["cell"] == cell) & (samples["arm"] == arm) & (samples["pass"] == pass_)]
        sides.append(chosen[["repeat", "index", "wall_ns"]])
    both = sides[0].merge(sides[1], on=["repeat", "index"], suffixes=("_first", "_second"))
    if both.empty:
        return None
    a, b = (both[f"wall_ns_{side}"].to_numpy(dtype=np.float64) / 1e6 for side in ("first", "second"))
    alone = len(sides[0]) + len(sides[1]) - 2 * len(both)
    return Comparison(ratio_of_medians(a, b), float(np.median(a)), float(np.median(b)), alone)


def samples_beyond(n: int, percentile: int) -> int:
    """How many of `n` sorted samples lie past the place of the percentile, (n − 1)·p/100 in the `linear` rule."""
    return n - 1 - (n - 1) * percentile // 100


def tails(run: Run) -> pd.DataFrame:
    """P50, P95 and P99 of step wall time per cell and arm, columns `TAIL_COLUMNS`.

    Bare steps; a session has none, and there its instrumented steps stand, as the column `pass` says. A decode
    step makes one token per request, so its time is the time per token. `marked`: fewer than `SAMPLES_BEYOND`
    samples lie beyond the percentile. Cells and arms without steps have no rows.
    """
    samples = step_samples(run)
    lines = [
        line for cell in run.manifest.cells for arm in run.manifest.arms for line in _tail(samples, cell, arm.name)
    ]
    return pd.DataFrame(lines, columns=list(TAIL_COLUMNS))


def _tail(samples: pd.DataFrame, cell: CellRecord, arm: str) -> list[dict[str, object]]:
    for pass_ in ("bare", "instrumented"):
        times = walls(samples, cell.name, arm, pass_)
        if times.size:
            break
    else:
        return []
    n = int(times.size)
    base = {"cell": cell.name, "phase": cell.phase, "batch": cell.batch, "length": cell.length, "arm": arm}
    lines = []
    for percentile in PERCENTILES:
        beyond = samples_beyond(n, percentile)
        lines.append(
            {
                **base,
                "metric": METRIC[cell.phase],
                "pass": pass_,
                "percentile": percentile,
                "value_ms": float(np.percentile(times, percentile, method="linear")),
                "n": n,
                "beyond": beyond,
                "marked": beyond < SAMPLES_BEYOND,
                "rule": RULE,
            }
        )
    return lines
