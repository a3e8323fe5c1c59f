"""Where a step's time goes: kernels of traced steps, segments of instrumented steps.

Kernels are CUDA kernels, or leaf operators on a CPU; their times are busy time. Segments are self times, so that
their sum and `unattributed` make the step. The two come from different passes and are never mixed. What the
difference between two arms is made of (the bridge) is not here.
"""

from __future__ import annotations

import pandas as pd

from analysis.latency import cells, compare, step_samples, walls
from profiler.store import Run

BY_SEGMENT_COLUMNS = ("arm", "cell", "segment", "ms_per_step", "share", "steps")
TOP_COLUMNS = ("name", "category", "segment", "calls_per_step", "ms_per_step", "share")
SEGMENT_COLUMNS = ("arm", "cell", "phase", "segment", "ms_per_step", "share", "steps", "wall_ms", "factor", "marked")
#: Name of the kernels that ran while no segment was open.
NO_SEGMENT = "(no segment)"
UNATTRIBUTED = "unattributed"
#: A bare ÷ instrumented factor outside of these marks the cell (MEASURES, "The bridge").
FACTOR_LOW, FACTOR_HIGH = 0.9, 1.1
#: Kernel time of a traced step ÷ the median bare step, outside of which the trace is not of a step like the timed ones.
#: A step cannot be busy for longer than it lasts, but a profiler lengthens small operators: of 191 traces on CPUs that
#: nothing else used, 189 had 0.41 to 1.42. The lower limit is for CPUs, where a step is operators; a device may idle.
TRACED_LOW, TRACED_HIGH = 0.4, 1.5


def traced_steps(samples: pd.DataFrame) -> dict[tuple[str, str], int]:
    """(arm, cell) → number of traced steps. `samples` is `latency.step_samples(run)`."""
    traced = samples[samples["pass"] == "traced"]
    counts = traced.groupby(["arm", "cell"], as_index=False).agg(steps=("step", "nunique"))
    return {(arm, cell): int(count) for arm, cell, count in counts.itertuples(index=False)}


def busy_ms(run: Run, samples: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(arm, cell) → ms of kernel time per traced step, of the busiest rank. Absent where nothing was traced."""
    found = _by_segment_and_rank(run, samples)
    ranks = found.groupby(["arm", "cell", "rank"], as_index=False)["ms_per_step"].sum()
    busiest = ranks.groupby(["arm", "cell"], as_index=False)["ms_per_step"].max()
    return {(arm, cell): ms for arm, cell, ms in busiest.itertuples(index=False)}


def like_bare(ratio: float, *, on_cpu: bool) -> bool:
    """Whether a trace is of a step like the timed ones.

    Args:
        ratio: kernel time of a traced step ÷ the median bare step; NaN without one, which says nothing against it.
        on_cpu: whether kernels are operators on a CPU.
    """
    return not (ratio > TRACED_HIGH or (on_cpu and ratio < TRACED_LOW))


def _by_segment_and_rank(run: Run, samples: pd.DataFrame) -> pd.DataFrame:
    """Kernel time: columns arm, cell, rank, segment, ms (in all), steps (traced), ms_per_step."""
    kernels = run.table("kernels").aggregate(
        f"arm, cell, rank, step, coalesce(nullif(segment, ''), '{NO_SEGMENT}') as segment, sum(dur_ns) / 1e6 as ms"
    )
    # A kernel of a step that is not in `steps` (killed between the two parts) has nothing to be divided by.
    frame = pd.DataFrame(kernels.df()).merge(samples.loc[samples["pass"] == "traced", ["arm", "cell", "step"]])
    totals = frame.groupby(["arm", "cell", "rank", "segment"], as_index=False).agg(ms=("ms", "sum"))
    counts = traced_steps(samples)
    totals["steps"] = [counts[key] for key in zip(totals["arm"], totals["cell"], strict=True)]
    totals["ms_per_step"] = totals["ms"] / totals["steps"]
    return totals


def by_segment(run: Run) -> pd.DataFrame:
    """Kernel time by segment, columns `BY_SEGMENT_COLUMNS`, cells and arms in the manifest's order, the largest first.

    `ms_per_step`: Σ duration ÷ traced steps, summed over ranks; `share`: of all kernel time of that arm and cell.
    """
    found = _by_segment_and_rank(run, step_samples(run))
    key = ["arm", "cell", "segment"]
    merged = found.groupby(key, as_index=False).agg({"ms_per_step": "sum", "steps": "max"})
    merged["share"] = merged["ms_per_step"] / merged.groupby(["arm", "cell"])["ms_per_step"].transform("sum")
    order = [(arm.name, cell.name) for cell in cells(run) for arm in run.manifest.arms]
    merged["place"] = [order.index(pair) for pair in zip(merged["arm"], merged["cell"], strict=True)]
    merged = merged.sort_values(["place", "ms_per_step"], ascending=[True, False], ignore_index=True)
    return merged[list(BY_SEGMENT_COLUMNS)]


def top(run: Run, arm: str, cell: str, n: int = 15) -> pd.DataFrame:
    """The `n` kernels of one arm and cell with the most time, columns `TOP_COLUMNS`; empty where none was traced.

    `share` is of all kernel time of the arm and cell, so the column of a cut table does not reach 1.
    """
    samples = step_samples(run)
    steps = traced_steps(samples).get((arm, cell), 0)
    frame = run.frame("kernels")
    frame = frame[(frame["arm"] == arm) & (frame["cell"] == cell)].merge(
        samples.loc[samples["pass"] == "traced", ["arm", "cell", "step"]]
    )
    if steps == 0 or frame.empty:
        return pd.DataFrame(columns=list(TOP_COLUMNS))
    frame["segment"] = frame["segment"].replace("", None).fillna(NO_SEGMENT)
    grouped = frame.groupby(["name", "category", "segment"], as_index=False, dropna=False).agg(
        calls=("dur_ns", "size"), ns=("dur_ns", "sum")
    )
    grouped["calls_per_step"] = grouped["calls"] / steps
    grouped["ms_per_step"] = grouped["ns"] / 1e6 / steps
    grouped["share"] = grouped["ns"] / grouped["ns"].sum()
    grouped = grouped.sort_values("ms_per_step", ascending=False, ignore_index=True)
    return grouped[list(TOP_COLUMNS)].head(n)


def segments(run: Run) -> pd.DataFrame:
    """Segment time per instrumented step, columns `SEGMENT_COLUMNS`; times as measured, not scaled.

    One row a segment and one `unattributed` (mean wall − Σ segments: time inside the step with no segment open)
    per (arm, cell). `share` is of `wall_ms`, the mean instrumented step. `factor` is the ratio of the medians of
    paired bare and instrumented steps, by which a segment's time is to be multiplied to speak of a bare step; NaN
    where there are no bare steps. `marked`: the factor is outside 0.9–1.1, so the recorder disturbed this cell.
    """
    samples = step_samples(run)
    recorded = samples[samples["pass"] == "instrumented"]
    found = run.frame("segments").merge(recorded[["arm", "cell", "step"]])
    lines = []
    for cell in cells(run):
        for arm in run.manifest.arms:
            own = found[(found["cell"] == cell.name) & (found["arm"] == arm.name)]
            if own.empty:
                continue
            wall = walls(samples, cell.name, arm.name, "instrumented")
            wall_ms, steps = float(wall.mean()), int(wall.size)
            against = compare(samples, cell.name, (arm.name, "bare"), (arm.name, "instrumented"))
            factor = against.ratio.value if against is not None else float("nan")
            # A wall is the slowest rank's and a segment the mean over ranks, so that waiting is unattributed.
            spent = own.groupby("segment")["ns"].sum() / 1e6 / steps / own["rank"].nunique()
            spent = spent.sort_values(ascending=False)
            spent[UNATTRIBUTED] = wall_ms - spent.sum()
            base = {"arm": arm.name, "cell": cell.name, "phase": cell.phase, "steps": steps, "wall_ms": wall_ms}
            base |= {"factor": factor, "marked": factor < FACTOR_LOW or factor > FACTOR_HIGH}
            lines += [
                {**base, "segment": segment, "ms_per_step": ms, "share": ms / wall_ms} for segment, ms in spent.items()
            ]
    return pd.DataFrame(lines, columns=list(SEGMENT_COLUMNS))
