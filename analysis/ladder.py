"""The ladder: from parameters skipped to time saved, each rung on its own (MEASURES, "The ladder").

Rungs are never merged into one "speed-up". Costs come from the manifest's choices, counts from `rows`, requests of
the router from `gates`, times from `steps` and `kernels`; no method is known by name here. What the time that was
not saved went into (the bridge) is not here, nor is latency under load.

Legend: a *choice* is one alternative at one site of one layer; a *decision site* has several; a *line* is a row of
the `rows` table, a product that ran in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import yaml

from analysis import integrity, kernels, wording
from analysis.counted import NAN, Figure, against_twin, flop_skip, parameter_skip, weight_byte_skip
from analysis.latency import cells, compare, step_samples, walls
from profiler.errors import StoreError
from profiler.intervals import SAMPLES_TO_JUDGE, Interval, median
from profiler.records import ArmRecord, CellRecord, Manifest
from profiler.store import SPEC, Run

#: Rungs in the order they are read, each with its variants. `step_time` is in ms and there for every arm.
VARIANTS: dict[str, tuple[str, ...]] = {
    "parameter_skip": ("gross", "adapters_only", "net", "augmented"),
    "flop_skip": ("executed", "padded", "nominal", "full_attention"),
    "weight_byte_skip": ("executed",),
    "kernel_time_saved": ("traced",),
    "step_time_saved": ("bare",),
    "request_time_saved": ("served",),
    "realised_fraction": ("executed",),
    "step_time": ("bare", "instrumented"),
    "recorder_cost": ("instrumented",),
}
RUNGS = tuple(VARIANTS)
#: rung → the variant a table shows when it has room for one.
HEADLINE = {
    "parameter_skip": "net",
    "flop_skip": "executed",
    "weight_byte_skip": "executed",
    "kernel_time_saved": "traced",
    "step_time_saved": "bare",
    "request_time_saved": "served",
    "realised_fraction": "executed",
    "step_time": "bare",
    "recorder_cost": "instrumented",
}
COLUMNS = (
    "cell", "phase", "batch", "length", "arm", "twin", "rung", "variant", "value", "low", "high", "n", "repeats",
    "numerator", "denominator", "unit", "meaning", "note",
)  # fmt: skip
#: A slow moment outlasts a decode repeat, so pairs of one or two repeats are fewer samples than they look.
REPEATS_TO_JUDGE = 3
#: How the note of a rung begins whose figure its trace cannot give (MEASURES rule 13).
UNSUPPORTED = "kernel time unsupported: "
_COSTS = [
    "backbone_parameters", "replacement_parameters", "overhead_parameters", "flops_per_row", "flops_per_context",
    "weight_bytes",
]  # fmt: skip


def ladder(run: Run) -> pd.DataFrame:
    """Every rung of every arm in every cell.

    Returns:
        One row per (cell, arm, rung, variant), columns `COLUMNS`. `value`, `low` and `high` are shares of 1
        (`step_time`: ms), NaN where undefined, and then `note` says why. `low` and `high` are the 95 % bootstrap
        interval where something was sampled; counts of rows are exact and have none. `numerator` and `denominator`
        are in `unit`, and `meaning` says how the value comes of them. `n`: token rows, steps or pairs behind it;
        `repeats`: how often the cell was timed, 0 where it was not closed.
        An arm that has no twin and decides nothing (dense) has rungs `step_time` and `recorder_cost` only.

    Raises:
        StoreError: tables and manifest do not belong together (`integrity`), or one of them cannot be read.
    """
    integrity.check(run)
    tables = _Tables.read(run)
    lines = []
    for cell in cells(run):
        for arm in run.manifest.arms:
            base = {key: getattr(cell, key) for key in ("phase", "batch", "length", "repeats")} | {"cell": cell.name}
            twin = _twin(run.manifest, arm)
            warnings = warnings_of_arm(run, arm) + warnings_of_cell(run, cell)
            for rung, variant, figure in _rungs(tables, cell, arm, twin):
                lines.append(
                    {
                        **base,
                        "arm": arm.name,
                        "twin": twin,
                        "rung": rung,
                        "variant": variant,
                        **figure.columns(),
                        "note": "; ".join([*figure.why, *warnings]),
                    }
                )
    return pd.DataFrame(lines, columns=list(COLUMNS))


def refused(note: str) -> str:
    """Why the machine could not give a rung's figure, out of its note; empty where it could."""
    why = [part.removeprefix(UNSUPPORTED) for part in note.split("; ") if part.startswith(UNSUPPORTED)]
    return why[0] if why else ""


def judged(frame: pd.DataFrame) -> pd.Series[bool]:
    """Of rows of `ladder`, whether anything may be concluded from their intervals: what break-even and notes go by.

    True with `SAMPLES_TO_JUDGE` pairs of `REPEATS_TO_JUDGE` repeats; where the cell was not closed its repeats are
    unknown, and pairs decide.
    """
    few = frame["repeats"].between(1, REPEATS_TO_JUDGE - 1)
    return frame["low"].notna() & (frame["n"] >= SAMPLES_TO_JUDGE) & ~few


@dataclass(frozen=True)
class _Tables:
    """What the rungs read, per (cell, arm) where it is a frame of lines or of steps."""

    samples: pd.DataFrame
    lines: dict[tuple[str, str], pd.DataFrame]
    asked: dict[tuple[str, str], pd.Series[float]]
    choices: pd.DataFrame
    busy_ms: dict[tuple[str, str], float]
    traced: dict[tuple[str, str], int]
    on_cpu: bool
    origin: str
    target: float | None

    @classmethod
    def read(cls, run: Run) -> _Tables:
        samples = step_samples(run)
        choices = _choices(run.manifest)
        steps = samples[["arm", "cell", "step", "repeat", "index", "rows", "context"]]
        steps = steps.rename(columns={"rows": "step_rows", "context": "step_context"})
        counted = run.table("rows").aggregate(
            "arm, cell, step, layer, site, choice, sum(rows)::bigint as rows, sum(padded)::bigint as padded, "
            "sum(context)::bigint as context, sum(context_full)::bigint as context_full"
        )
        key = ["arm", "layer", "site", "choice"]
        lines = counted.df().merge(choices, on=key).merge(steps, on=["arm", "cell", "step"])
        # A gate says how many rows it governs, not what they attend: at position p that is p + 1 tokens; for a whole
        # sequence it is taken as the step's mean per row, exact where the sequences of a step are equally long.
        governed = run.table("gates").project("arm, cell, step, layer, site, unnest(choices) as choice, rows, position")
        gates = governed.aggregate(
            "arm, cell, step, layer, site, choice, sum(rows)::bigint as rows, "
            "sum(case when position < 0 then rows else 0 end)::bigint as sequence_rows, "
            "sum(case when position < 0 then 0 else rows * (position + 1) end)::bigint as context"
        )
        asked = gates.df().merge(choices, on=key).merge(steps, on=["arm", "cell", "step"])
        context = asked["context"] + asked["sequence_rows"] * asked["step_context"] / asked["step_rows"]
        asked["flops"] = asked["rows"] * asked["flops_per_row"] + context * asked["flops_per_context"]
        return cls(
            samples=samples,
            lines={(str(c), str(a)): frame for (c, a), frame in lines.groupby(["cell", "arm"])},
            asked={
                (str(c), str(a)): frame.groupby("step")["flops"].sum()
                for (c, a), frame in asked.groupby(["cell", "arm"])
            },
            choices=choices,
            busy_ms=kernels.busy_ms(run, samples),
            traced=kernels.traced_steps(samples),
            on_cpu=run.manifest.model is not None and run.manifest.model.device.startswith("cpu"),
            origin=run.manifest.origin,
            target=_target(run),
        )


def _target(run: Run) -> float | None:
    """Half width of the ratio's interval that the spec asked for; None where there is no spec."""
    text = run.spec_yaml
    if text is None:
        return None
    try:
        return float(yaml.safe_load(text)["measure"]["target_ci"])
    except (yaml.YAMLError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{run.path / SPEC}: no measure.target_ci can be read from it; it is not as it was written"
        ) from error


def _choices(manifest: Manifest) -> pd.DataFrame:
    """Costs of every choice of every arm; `options` is how many choices its site has."""
    found = [
        {"arm": arm.name, "layer": c.layer, "site": c.site, "choice": c.index, **{k: getattr(c, k) for k in _COSTS}}
        for arm in manifest.arms
        for c in arm.choices
    ]
    frame = pd.DataFrame(found, columns=["arm", "layer", "site", "choice", *_COSTS])
    frame["options"] = frame.groupby(["arm", "layer", "site"])["choice"].transform("size")
    return frame


def _twin(manifest: Manifest, arm: ArmRecord) -> str | None:
    return None if arm.twin == arm.name else arm.twin


def warnings_of_arm(run: Run, arm: ArmRecord) -> list[str]:
    """What stands beside every figure of this arm."""
    found = []
    if arm.synthetic:
        found.append(f"synthetic route ({arm.synthetic})")
    if arm.untrained:
        found.append("untrained router")
    if arm.discards:
        found.append("masked execution")
    if arm.caveat:
        found.append(arm.caveat)
    if run.manifest.model is not None and run.manifest.model.random_weights:
        found.append("random weights")
    return found


def warnings_of_cell(run: Run, cell: CellRecord) -> list[str]:
    """What stands beside every figure of this cell."""
    if cell.done:
        return []
    return ["cell still running" if run.state == "running" else f"incomplete cell (run {run.state})"]


def _rungs(tables: _Tables, cell: CellRecord, arm: ArmRecord, twin: str | None) -> Iterator[tuple[str, str, Figure]]:
    choices = tables.choices[tables.choices["arm"] == arm.name]
    if twin is not None or bool((choices["options"] > 1).any()):
        yield from _skips_and_savings(tables, cell, arm, twin, choices)
    yield from _step_times(tables, cell.name, arm.name)
    yield "recorder_cost", "instrumented", _recorder_cost(tables, cell, arm.name)


def _skips_and_savings(
    tables: _Tables, cell: CellRecord, arm: ArmRecord, twin: str | None, choices: pd.DataFrame
) -> Iterator[tuple[str, str, Figure]]:
    lines = tables.lines.get((cell.name, arm.name))
    if lines is None:
        nothing = Figure(why=["no executed rows recorded"])
        yield from (("parameter_skip", variant, nothing) for variant in VARIANTS["parameter_skip"])
        yield from (("flop_skip", variant, nothing) for variant in VARIANTS["flop_skip"])
        yield "weight_byte_skip", "executed", nothing
        executed = nothing
    else:
        for variant, figure in parameter_skip(lines, choices).items():
            yield "parameter_skip", variant, figure
        other = tables.lines.get((cell.name, twin)) if twin is not None else None
        work = against_twin(lines, other, choices, tables.asked.get((cell.name, arm.name)), twin)
        figures = {variant: flop_skip(work, variant) for variant in VARIANTS["flop_skip"]}
        yield from (("flop_skip", variant, figure) for variant, figure in figures.items())
        executed = figures["executed"]
        yield "weight_byte_skip", "executed", weight_byte_skip(work)
    yield "kernel_time_saved", "traced", _kernel_time_saved(tables, cell.name, arm.name, twin)
    saved = _step_time_saved(tables, cell, arm.name, twin)
    yield "step_time_saved", "bare", saved
    reason = "a session has no arrival times" if tables.origin == "session" else "the spec has no serve section"
    yield "request_time_saved", "served", Figure(why=[f"not measured: {reason}"])
    yield "realised_fraction", "executed", _realised_fraction(saved, executed)


def _kernel_time_saved(tables: _Tables, cell: str, arm: str, twin: str | None) -> Figure:
    meaning = "1 − kernel time of a traced step ÷ the twin's"
    if twin is None:
        return Figure(unit="ms", meaning=meaning, why=["no twin"])
    own, other = (tables.busy_ms.get((name, cell)) for name in (arm, twin))
    if own is None or other is None or other == 0:
        missing = [name for name, found in ((arm, own), (twin, other)) if not found]
        return Figure(unit="ms", meaning=meaning, why=[f"no traced kernels of {' and '.join(missing)}"])
    n = min(tables.traced[(arm, cell)], tables.traced[(twin, cell)])
    meaning += f", arms traced one after another, {n} each, so without an interval"
    why = _unlike_bare(tables, cell, (arm, twin))
    value = NAN if why else 1 - own / other
    return Figure(value, n=n, numerator=own, denominator=other, unit="ms", meaning=meaning, why=why)


def _unlike_bare(tables: _Tables, cell: str, arms: tuple[str, str]) -> list[str]:
    """Why traces cannot be compared: the arms whose traced steps were not like their bare ones."""
    ratios = {}
    for arm in arms:
        bare = walls(tables.samples, cell, arm, "bare")
        ratios[arm] = tables.busy_ms[arm, cell] / float(np.median(bare)) if bare.size else NAN
    said = [f"{n:,.2f} × ({arm})" for arm, n in ratios.items() if not kernels.like_bare(n, on_cpu=tables.on_cpu)]
    limits = f"outside {kernels.TRACED_LOW} to" if tables.on_cpu else "above"
    took = f"a traced step's kernels took {wording.listed(said)} a median bare step, {limits} {kernels.TRACED_HIGH}"
    return [UNSUPPORTED + took] if said else []


def _step_time_saved(tables: _Tables, cell: CellRecord, arm: str, twin: str | None) -> Figure:
    meaning = "1 − median bare step ÷ the twin's, paired by repeat and step"
    if twin is None:
        return Figure(unit="ms", meaning=meaning, why=["no twin"])
    found = compare(tables.samples, cell.name, (arm, "bare"), (twin, "bare"))
    if found is None:
        missing = [name for name in (arm, twin) if walls(tables.samples, cell.name, name, "bare").size == 0]
        why = [f"no bare steps of {' and '.join(missing)}" if missing else f"no bare step pairs with {twin}'s"]
        return Figure(unit="ms", meaning=meaning, why=why)
    ratio = found.ratio
    saved = Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.n)
    why = _doubts(saved, cell.repeats)
    if found.alone:
        why.append(f"{wording.how_many(found.alone, 'step')} without a partner left out")
    if tables.target is not None and saved.half_width > tables.target:
        width, target = wording.percent(saved.half_width), wording.percent(tables.target)
        stopped = f", stopped by {cell.stopped}" if cell.stopped else ""
        why.append(f"interval ±{width} is wider than the target ±{target}{stopped}")
    return _timed(saved, found.first_ms, found.second_ms, meaning, why)


def _recorder_cost(tables: _Tables, cell: CellRecord, arm: str) -> Figure:
    meaning = "median instrumented step ÷ median bare step of the same arm − 1"
    found = compare(tables.samples, cell.name, (arm, "instrumented"), (arm, "bare"))
    if found is None:
        return Figure(unit="ms", meaning=meaning, why=["no pairs of instrumented and bare steps"])
    cost = Interval(found.ratio.value - 1, found.ratio.low - 1, found.ratio.high - 1, found.ratio.n)
    return _timed(cost, found.first_ms, found.second_ms, meaning, _doubts(cost, cell.repeats))


def _step_times(tables: _Tables, cell: str, arm: str) -> Iterator[tuple[str, str, Figure]]:
    for variant in VARIANTS["step_time"]:
        times = walls(tables.samples, cell, arm, variant)
        meaning = f"median wall time of {'an' if variant[0] in 'aeiou' else 'a'} {variant} step"
        if times.size == 0:
            yield "step_time", variant, Figure(unit="ms", meaning=meaning, why=[f"no {variant} steps"])
            continue
        found = median(times)
        yield "step_time", variant, _timed(found, NAN, NAN, meaning, [])


def _timed(interval: Interval, above: float, below: float, meaning: str, why: list[str]) -> Figure:
    return Figure(interval.value, interval.low, interval.high, interval.n, above, below, "ms", meaning, why)


def _doubts(interval: Interval, repeats: int) -> list[str]:
    """What must be known before an interval is believed; by the same limits as `judged`."""
    pairs = wording.how_many(interval.n, "pair")
    if interval.n < 3:
        return [f"{pairs}: too few for an interval"]
    found = ["interval holds 0: no difference shown"] if interval.low <= 0 <= interval.high else []
    if interval.n < SAMPLES_TO_JUDGE:
        found.append(f"{pairs}: too few to judge, the interval is too narrow to be a 95 % one")
    if 0 < repeats < REPEATS_TO_JUDGE:
        found.append(f"{wording.how_many(repeats, 'repeat')}: too few to judge, which takes {REPEATS_TO_JUDGE}")
    return found


def _realised_fraction(saved: Figure, skip: Figure) -> Figure:
    """Step time saved ÷ FLOP skip; the interval is the time's, scaled (the skip is counted, not sampled)."""
    meaning = "step time saved ÷ FLOP skip"
    if not skip.value > 0:
        known = skip.value == skip.value
        why = f"FLOP skip is {wording.percent(skip.value)}, not above 0" if known else "no FLOP skip"
        return Figure(unit="share", meaning=meaning, why=[f"undefined: {why}"])
    if saved.value != saved.value:
        return Figure(unit="share", meaning=meaning, why=["undefined: no step time saved"])
    share = skip.value
    return Figure(
        saved.value / share,
        saved.low / share,
        saved.high / share,
        saved.n,
        saved.value,
        share,
        "share",
        meaning,
        saved.why,
    )
