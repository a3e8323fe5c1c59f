"""The ladder: from parameters skipped to time saved, each rung on its own (MEASURES, "The ladder").

Rungs are never merged into one "speed-up". Costs come from the manifest's choices, counts from `rows`, requests of
the router from `gates`, times from `steps` and `kernels`; no method is known by name here. What the time that was
not saved went into (the bridge) is not here, nor is latency under load.

Legend: a *choice* is one alternative at one site of one layer; a *decision site* has several; a *line* is a row of
the `rows` table, a product that ran in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pandas as pd
import yaml

from analysis import kernels
from analysis.latency import cells, compare, step_samples, walls
from profiler.intervals import Interval, median
from profiler.records import ArmRecord, CellRecord, Manifest
from profiler.store import Run

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
    "cell", "phase", "batch", "length", "arm", "twin", "rung", "variant", "value", "low", "high", "n", "numerator",
    "denominator", "unit", "meaning", "note",
)  # fmt: skip
WIDE_COLUMNS = (
    "cell", "phase", "batch", "length", "arm", "twin", "parameter_skip", "flop_skip", "weight_byte_skip",
    "kernel_time_saved", "step_time_saved", "step_time_saved_low", "step_time_saved_high", "request_time_saved",
    "realised_fraction", "recorder_cost", "step_ms", "twin_step_ms", "n", "note",
)  # fmt: skip
BREAK_EVEN_COLUMNS = (
    "phase", "length", "arm", "twin", "batches", "saves_from", "saves_to", "loses_from", "loses_to", "unclear_from",
    "unclear_to", "break_even", "note",
)  # fmt: skip
_BATCH_BOUNDS = [f"{state}_{end}" for state in ("saves", "loses", "unclear") for end in ("from", "to")]
_COSTS = [
    "backbone_parameters", "replacement_parameters", "overhead_parameters", "flops_per_row", "flops_per_context",
    "weight_bytes",
]  # fmt: skip
NAN = float("nan")


def ladder(run: Run) -> pd.DataFrame:
    """Every rung of every arm in every cell.

    Returns:
        One row per (cell, arm, rung, variant), columns `COLUMNS`. `value`, `low` and `high` are shares of 1
        (`step_time`: ms), NaN where undefined, and then `note` says why. `low` and `high` are the 95 % bootstrap
        interval where something was sampled; counts of rows are exact and have none. `numerator` and `denominator`
        are in `unit`, and `meaning` says how the value comes of them. `n`: token rows, steps or pairs behind it.
        An arm that has no twin and decides nothing (dense) has rungs `step_time` and `recorder_cost` only.
    """
    tables = _Tables.read(run)
    lines = []
    for cell in cells(run):
        for arm in run.manifest.arms:
            base = {"cell": cell.name, "phase": cell.phase, "batch": cell.batch, "length": cell.length}
            twin = _twin(run.manifest, arm)
            warnings = _of_arm(run, arm) + _of_cell(run, cell)
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


@dataclass(frozen=True)
class _Figure:
    """One value with what it was made of; a bare `_Figure(why=[...])` is an undefined one."""

    value: float = NAN
    low: float = NAN
    high: float = NAN
    n: int = 0
    numerator: float = NAN
    denominator: float = NAN
    unit: str = ""
    meaning: str = ""
    why: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, object]:
        return {k: v for k, v in vars(self).items() if k != "why"}


@dataclass(frozen=True)
class _Tables:
    """What the rungs read, per (cell, arm) where it is a frame of lines or of steps."""

    samples: pd.DataFrame
    lines: dict[tuple[str, str], pd.DataFrame]
    asked: dict[tuple[str, str], pd.Series[float]]
    choices: pd.DataFrame
    busy_ms: dict[tuple[str, str], float]
    traced: dict[tuple[str, str], int]
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
            origin=run.manifest.origin,
            target=_target(run),
        )


def _target(run: Run) -> float | None:
    """Half width of the ratio's interval that the spec asked for; None where there is no spec."""
    spec = yaml.safe_load(run.spec_yaml or "")
    found = spec.get("measure", {}).get("target_ci") if isinstance(spec, dict) else None
    return None if found is None else float(found)


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


def _of_arm(run: Run, arm: ArmRecord) -> list[str]:
    """What stands beside every figure of this arm."""
    found = []
    if arm.synthetic:
        found.append(f"synthetic route ({arm.synthetic})")
    if arm.untrained:
        found.append("untrained router")
    if run.manifest.model is not None and run.manifest.model.random_weights:
        found.append("random weights")
    return found


def _of_cell(run: Run, cell: CellRecord) -> list[str]:
    """What stands beside every figure of this cell."""
    if cell.done:
        return []
    return ["cell still running" if run.state == "running" else f"incomplete cell (run {run.state})"]


def _rungs(tables: _Tables, cell: CellRecord, arm: ArmRecord, twin: str | None) -> Iterator[tuple[str, str, _Figure]]:
    choices = tables.choices[tables.choices["arm"] == arm.name]
    if twin is not None or bool((choices["options"] > 1).any()):
        yield from _skips_and_savings(tables, cell, arm, twin, choices)
    yield from _step_times(tables, cell.name, arm.name)
    yield "recorder_cost", "instrumented", _recorder_cost(tables, cell.name, arm.name)


def _skips_and_savings(
    tables: _Tables, cell: CellRecord, arm: ArmRecord, twin: str | None, choices: pd.DataFrame
) -> Iterator[tuple[str, str, _Figure]]:
    lines = tables.lines.get((cell.name, arm.name))
    if lines is None:
        nothing = _Figure(why=["no executed rows recorded"])
        yield from (("parameter_skip", variant, nothing) for variant in VARIANTS["parameter_skip"])
        yield from (("flop_skip", variant, nothing) for variant in VARIANTS["flop_skip"])
        yield "weight_byte_skip", "executed", nothing
        executed = nothing
    else:
        for variant, figure in _parameter_skip(lines, choices).items():
            yield "parameter_skip", variant, figure
        other = tables.lines.get((cell.name, twin)) if twin is not None else None
        work = _against_twin(lines, other, choices, tables.asked.get((cell.name, arm.name)), twin)
        figures = {variant: _flop_skip(work, variant) for variant in VARIANTS["flop_skip"]}
        yield from (("flop_skip", variant, figure) for variant, figure in figures.items())
        executed = figures["executed"]
        yield "weight_byte_skip", "executed", _weight_byte_skip(work)
    yield "kernel_time_saved", "traced", _kernel_time_saved(tables, cell.name, arm.name, twin)
    saved = _step_time_saved(tables, cell, arm.name, twin)
    yield "step_time_saved", "bare", saved
    reason = "a session has no arrival times" if tables.origin == "session" else "the spec has no serve section"
    yield "request_time_saved", "served", _Figure(why=[f"not measured: {reason}"])
    yield "realised_fraction", "executed", _realised_fraction(saved, executed)


# -- counted rungs --------------------------------------------------------------------------------------------------


def _parameter_skip(lines: pd.DataFrame, choices: pd.DataFrame) -> dict[str, _Figure]:
    """Four variants of the mean share of parameters that took no part in a token (MEASURES, "The ladder").

    The share of token rows that ran a choice: at a decision site, rows counted ÷ token rows of the recorded steps.
    A site with one choice always runs its backbone; what was added there (a router) takes part in all tokens of the
    steps in which it ran, however few pooled rows it saw.
    """
    rows_of_step = lines.groupby("step")["step_rows"].first()
    tokens = int(rows_of_step.sum())
    key = ["layer", "site", "choice"]
    ran = lines.groupby(key).agg(rows=("rows", "sum"), present=("step_rows", "sum")).reset_index()
    sites = choices.merge(ran, on=key, how="left").fillna({"rows": 0, "present": 0})
    decides = sites["options"] > 1
    share = (sites["rows"] / tokens).where(decides, sites["present"] / tokens)
    took_part = sites["backbone_parameters"] * share.where(decides, 1.0)
    # A site's choices are alternatives to one set of weights: it holds as many as its largest choice runs, so that
    # the sites add up to the model's parameters.
    backbone = float(sites.groupby(["layer", "site"])["backbone_parameters"].max().sum())
    skipped = backbone - float(took_part.sum())
    replacement, overhead = (sites[f"{kind}_parameters"] for kind in ("replacement", "overhead"))
    ran_replacement, ran_overhead = float((replacement * share).sum()), float((overhead * share).sum())
    added = float((replacement + overhead).sum())
    idle = added - ran_replacement - ran_overhead
    figures = {
        "gross": (skipped, backbone, "mean backbone parameters skipped a token ÷ backbone parameters"),
        "adapters_only": (
            skipped - ran_replacement,
            backbone,
            "mean backbone parameters skipped a token, less replacements that ran ÷ backbone parameters",
        ),
        "net": (
            skipped - ran_replacement - ran_overhead,
            backbone,
            "mean backbone parameters skipped a token, less replacements, routers and LoRA that ran "
            "÷ backbone parameters",
        ),
        "augmented": (
            skipped + idle,
            backbone + added,
            "mean parameters of backbone and additions idle a token ÷ backbone and added parameters",
        ),
    }
    return {
        variant: _Figure(
            value=above / below if below else NAN,
            n=tokens,
            numerator=above,
            denominator=below,
            unit="parameters",
            meaning=meaning,
        )
        for variant, (above, below, meaning) in figures.items()
    }


@dataclass(frozen=True)
class _Work:
    """Work of the steps that arm and twin have in common, or of the arm's against its own full execution.

    `steps`: one row a step, columns executed, padded, full_attention, nominal, bytes and `twin_` of the same (NaN
    where unknown). `against`: what the denominator is, in words.
    """

    steps: pd.DataFrame
    against: str
    why: list[str]


def _work_of_steps(lines: pd.DataFrame) -> pd.DataFrame:
    """FLOPs and weight bytes of each step; `fixed` and `fixed_bytes` are the part at sites with one choice."""
    entered = lines["rows"] * lines["flops_per_row"]
    executed = entered + lines["context"] * lines["flops_per_context"]
    fixed = lines["options"] == 1
    read = lines["weight_bytes"].where(lines["rows"] + lines["padded"] > 0, 0)
    frame = lines.assign(
        executed=executed,
        padded=entered + lines["padded"] * lines["flops_per_row"] + lines["context_full"] * lines["flops_per_context"],
        full_attention=entered + lines["context_full"] * lines["flops_per_context"],
        bytes=read,
        fixed=executed.where(fixed, 0),
        fixed_bytes=read.where(fixed, 0),
    )
    first = dict.fromkeys(("repeat", "index", "step_rows", "step_context"), "first")
    summed = dict.fromkeys(("executed", "padded", "full_attention", "bytes", "fixed", "fixed_bytes"), "sum")
    return frame.groupby("step", as_index=False).agg({**first, **summed})


def _against_twin(
    lines: pd.DataFrame,
    twin_lines: pd.DataFrame | None,
    choices: pd.DataFrame,
    asked: pd.Series[float] | None,
    twin: str | None,
) -> _Work:
    mine = _work_of_steps(lines)
    decides = choices[choices["options"] > 1]
    if decides.empty:
        mine["nominal"] = mine["executed"]
    elif asked is None:
        mine["nominal"] = NAN
    else:
        mine["nominal"] = mine["fixed"] + mine["step"].map(asked)
    if twin_lines is not None:
        theirs = _work_of_steps(twin_lines)
        both = mine.merge(
            theirs.add_prefix("twin_"), left_on=["repeat", "index"], right_on=["twin_repeat", "twin_index"]
        )
        if not both.empty:
            alone = len(mine) + len(theirs) - 2 * len(both)
            why = [f"{alone} recorded steps without a partner left out"] if alone else []
            return _Work(both, "the twin's", why)
    # No twin to compare with: what the arm would have run had every decision taken its fullest choice.
    fullest = decides.sort_values(["backbone_parameters", "flops_per_row"]).groupby(["layer", "site"]).tail(1)
    mine["twin_executed"] = (
        mine["fixed"]
        + mine["step_rows"] * fullest["flops_per_row"].sum()
        + mine["step_context"] * fullest["flops_per_context"].sum()
    )
    mine["twin_bytes"] = mine["fixed_bytes"] + fullest["weight_bytes"].sum()
    mine[["twin_padded", "twin_full_attention"]] = NAN
    missing = "no twin" if twin is None else f"twin {twin!r} recorded no step that pairs"
    return _Work(mine, "its own full execution's", [missing, "skips are against the arm's own full execution"])


_FLOP_MEANING = {
    "executed": "FLOPs of rows that entered each product, causal attention",
    "padded": "FLOPs with pads and every key multiplied",
    "nominal": "FLOPs the recorded gates asked for",
    "full_attention": "FLOPs of real rows, full-T² attention",
}


def _flop_skip(work: _Work, variant: str) -> _Figure:
    own, twin = work.steps[variant], work.steps["twin_executed" if variant == "nominal" else f"twin_{variant}"]
    meaning = f"1 − {_FLOP_MEANING[variant]} ÷ {work.against}"
    if bool(own.isna().any()):
        return _Figure(unit="FLOPs", meaning=meaning, why=["gates were not recorded for every step"])
    if bool(twin.isna().any()):
        return _Figure(unit="FLOPs", meaning=meaning, why=["needs a twin: what the skipped rows' pads are is unknown"])
    return _skip(own, twin, "FLOPs", meaning, work.why)


def _weight_byte_skip(work: _Work) -> _Figure:
    meaning = f"1 − mean bytes of weights a step reads (if any row of the batch uses them) ÷ {work.against}"
    return _skip(work.steps["bytes"], work.steps["twin_bytes"], "bytes", meaning, work.why, mean=True)


def _skip(
    own: pd.Series[float], twin: pd.Series[float], unit: str, meaning: str, why: list[str], *, mean: bool = False
) -> _Figure:
    above, below = (float(s.mean() if mean else s.sum()) for s in (own, twin))
    value = 1 - above / below if below else NAN
    return _Figure(value, n=len(own), numerator=above, denominator=below, unit=unit, meaning=meaning, why=why)


# -- timed rungs ----------------------------------------------------------------------------------------------------


def _kernel_time_saved(tables: _Tables, cell: str, arm: str, twin: str | None) -> _Figure:
    meaning = "1 − kernel time of a traced step ÷ the twin's"
    if twin is None:
        return _Figure(unit="ms", meaning=meaning, why=["no twin"])
    own, other = (tables.busy_ms.get((name, cell)) for name in (arm, twin))
    if own is None or other is None or other == 0:
        missing = [name for name, found in ((arm, own), (twin, other)) if not found]
        return _Figure(unit="ms", meaning=meaning, why=[f"no traced kernels of {' and '.join(missing)}"])
    n = min(tables.traced[(arm, cell)], tables.traced[(twin, cell)])
    return _Figure(1 - own / other, n=n, numerator=own, denominator=other, unit="ms", meaning=meaning)


def _step_time_saved(tables: _Tables, cell: CellRecord, arm: str, twin: str | None) -> _Figure:
    meaning = "1 − median bare step ÷ the twin's, paired by repeat and step"
    if twin is None:
        return _Figure(unit="ms", meaning=meaning, why=["no twin"])
    found = compare(tables.samples, cell.name, (arm, "bare"), (twin, "bare"))
    if found is None:
        missing = [name for name in (arm, twin) if walls(tables.samples, cell.name, name, "bare").size == 0]
        why = [f"no bare steps of {' and '.join(missing)}" if missing else f"no bare step pairs with {twin}'s"]
        return _Figure(unit="ms", meaning=meaning, why=why)
    ratio = found.ratio
    saved = Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.n)
    why = _doubts(saved)
    if found.alone:
        why.append(f"{found.alone} steps without a partner left out")
    if tables.target is not None and saved.half_width > tables.target:
        stopped = f", stopped by {cell.stopped}" if cell.stopped else ""
        why.append(f"interval ±{saved.half_width:.1%} is wider than the target ±{tables.target:.1%}{stopped}")
    return _timed(saved, found.first_ms, found.second_ms, meaning, why)


def _recorder_cost(tables: _Tables, cell: str, arm: str) -> _Figure:
    meaning = "median instrumented step ÷ median bare step of the same arm − 1"
    found = compare(tables.samples, cell, (arm, "instrumented"), (arm, "bare"))
    if found is None:
        return _Figure(unit="ms", meaning=meaning, why=["no pairs of instrumented and bare steps"])
    cost = Interval(found.ratio.value - 1, found.ratio.low - 1, found.ratio.high - 1, found.ratio.n)
    return _timed(cost, found.first_ms, found.second_ms, meaning, _doubts(cost))


def _step_times(tables: _Tables, cell: str, arm: str) -> Iterator[tuple[str, str, _Figure]]:
    for variant in VARIANTS["step_time"]:
        times = walls(tables.samples, cell, arm, variant)
        meaning = f"median wall time of {'an' if variant[0] in 'aeiou' else 'a'} {variant} step"
        if times.size == 0:
            yield "step_time", variant, _Figure(unit="ms", meaning=meaning, why=[f"no {variant} steps"])
            continue
        found = median(times)
        yield "step_time", variant, _timed(found, NAN, NAN, meaning, [])


def _timed(interval: Interval, above: float, below: float, meaning: str, why: list[str]) -> _Figure:
    return _Figure(interval.value, interval.low, interval.high, interval.n, above, below, "ms", meaning, why)


def _doubts(interval: Interval) -> list[str]:
    if interval.n < 3:
        return [f"{interval.n} pairs: too few for an interval"]
    return ["interval holds 0: no difference shown"] if interval.low <= 0 <= interval.high else []


def _realised_fraction(saved: _Figure, skip: _Figure) -> _Figure:
    """Step time saved ÷ FLOP skip; the interval is the time's, scaled (the skip is counted, not sampled)."""
    meaning = "step time saved ÷ FLOP skip"
    if not skip.value > 0:
        why = f"undefined: FLOP skip is {skip.value:.4f}, not above 0" if skip.value <= 0 else "undefined: no FLOP skip"
        return _Figure(unit="share", meaning=meaning, why=[why])
    if saved.value != saved.value:
        return _Figure(unit="share", meaning=meaning, why=["undefined: no step time saved"])
    share = skip.value
    return _Figure(
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


# -- shapes for tables ----------------------------------------------------------------------------------------------


def ladder_wide(frame: pd.DataFrame) -> pd.DataFrame:
    """`ladder(run)` as one row per (cell, arm), columns `WIDE_COLUMNS`, in the ladder's order.

    Headline variants only; shares of 1, times in ms. `step_ms` is the median bare step, or the instrumented one
    where there are no bare steps (a session), which `note` then says. `n` is the pairs behind `step_time_saved`.
    `note` joins the notes of the headline rungs, each said once; request time and recorder cost are left out.
    """
    lines = []
    for (cell, arm), group in frame.groupby(["cell", "arm"], sort=False):
        headline = group[group["variant"] == group["rung"].map(HEADLINE)].set_index("rung")
        first = group.iloc[0]
        line: dict[str, object] = {name: first[name] for name in ("phase", "batch", "length", "twin")}
        line |= {"cell": cell, "arm": arm}
        line |= {rung: headline["value"].get(rung, NAN) for rung in RUNGS if rung != "step_time"}
        if "step_time_saved" in headline.index:
            saved = headline.loc["step_time_saved"]
            line |= {"step_time_saved_low": saved["low"], "step_time_saved_high": saved["high"], "n": saved["n"]}
        line["step_ms"], pass_ = _shown_step_time(group)
        twin = frame[(frame["cell"] == cell) & (frame["arm"] == first["twin"])]
        line["twin_step_ms"] = _shown_step_time(twin)[0]
        noted = headline.drop(index=["request_time_saved", "realised_fraction", "recorder_cost"], errors="ignore")
        if line["step_time_saved"] == line["step_time_saved"]:
            noted = pd.concat([noted, headline.loc[["realised_fraction"]]])
        if pass_ == "instrumented":
            noted = noted.drop(index="step_time")
        notes = [part for note in noted["note"] for part in note.split("; ") if part]
        if pass_ == "instrumented":
            notes.append("step time is of instrumented steps")
        line["note"] = "; ".join(dict.fromkeys(notes))
        lines.append(line)
    return pd.DataFrame(lines, columns=list(WIDE_COLUMNS)).astype({"n": "Int64"})


def _shown_step_time(group: pd.DataFrame) -> tuple[float, str]:
    times = group[group["rung"] == "step_time"].set_index("variant")["value"].dropna()
    for variant in VARIANTS["step_time"]:
        if variant in times.index:
            return float(times[variant]), variant
    return NAN, ""


def break_even(run: Run, frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """Over which of the swept batches an arm saves step time, and between which it breaks even (MEASURES rule 4).

    Args:
        frame: `ladder(run)` if the caller has it already.

    Returns:
        One row per (phase, length, arm that has a twin), columns `BREAK_EVEN_COLUMNS`. A batch `saves` where the
        interval of step time saved lies above 0, `loses` where it lies below, and is `unclear` where it holds 0;
        `_from` and `_to` are the smallest and the largest such batch, <NA> if there is none. Batches without an
        interval are named in `note`. `break_even` says it in words.
    """
    frame = ladder(run) if frame is None else frame
    records = {cell.name: cell for cell in cells(run)}
    saved = frame[(frame["rung"] == "step_time_saved") & frame["twin"].notna()]
    lines = []
    for (phase, length, arm), group in saved.groupby(["phase", "length", "arm"], sort=False):
        group = group.sort_values("batch", kind="stable")
        judged = group[group["low"].notna()]
        states = [
            (int(batch), "saves" if low > 0 else "loses" if high < 0 else "unclear")
            for batch, low, high in zip(judged["batch"], judged["low"], judged["high"], strict=True)
        ]
        line: dict[str, object] = {"phase": phase, "length": length, "arm": arm, "twin": group["twin"].iloc[0]}
        line["batches"] = ", ".join(str(batch) for batch in group["batch"])
        for state in ("saves", "loses", "unclear"):
            batches = [batch for batch, found in states if found == state]
            line[f"{state}_from"] = min(batches) if batches else pd.NA
            line[f"{state}_to"] = max(batches) if batches else pd.NA
        line["break_even"] = _break_even_in_words(states)
        unjudged = [str(batch) for batch, low in zip(group["batch"], group["low"], strict=True) if low != low]
        notes = [f"no interval at batch {', '.join(unjudged)}"] if unjudged else []
        notes += [f"{name}: {text}" for name in group["cell"] for text in _of_cell(run, records[str(name)])]
        line["note"] = "; ".join([*notes, *_of_arm(run, run.manifest.arm(str(arm)))])
        lines.append(line)
    found = pd.DataFrame(lines, columns=list(BREAK_EVEN_COLUMNS))
    return found.astype(dict.fromkeys(_BATCH_BOUNDS, "Int64"))


def _break_even_in_words(states: list[tuple[int, str]]) -> str:
    definite = [(batch, state) for batch, state in states if state != "unclear"]
    crossings = [
        f"between batch {a} ({before}) and {b} ({after})"
        for (a, before), (b, after) in pairwise(definite)
        if before != after
    ]
    if crossings:
        return ", ".join(crossings)
    if not states:
        return "not judged: no interval"
    if not definite:
        return "not decided: every interval holds 0"
    state, unclear = definite[0][1], [str(batch) for batch, found in states if found == "unclear"]
    if unclear:
        return f"none seen: {state} where it is clear, unclear at batch {', '.join(unclear)}"
    return f"none seen: {state} at {'the one batch' if len(states) == 1 else 'every batch'} swept"
