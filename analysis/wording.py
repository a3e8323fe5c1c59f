"""How results are said: number formats, names of rungs with their denominators, headline sentences, the glossary.

One place, so that the report, the pages and the charts call a thing by the same name and print it alike. Nothing
is computed here; a sentence quotes `analysis.ladder` and picks, at most, which of its rows to quote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.kernels import TRACED_HIGH, TRACED_LOW
from profiler.records import Manifest

NBSP = "\u00a0"
MINUS = "\u2212"
#: Shown where a value is undefined or was not measured. Never 0.
ABSENT = "—"

#: The rungs a reader climbs, in order, and what each one's 100 % is.
RUNG_NAMES = {
    "parameter_skip": "Parameters skipped",
    "flop_skip": "FLOPs skipped",
    "weight_byte_skip": "Weight bytes not read",
    "kernel_time_saved": "Kernel time saved",
    "step_time_saved": "Step time saved",
    "request_time_saved": "Request time saved",
}
RUNG_DENOMINATORS = {
    "parameter_skip": "% of backbone parameters, net",
    "flop_skip": "% of the twin's FLOPs",
    "weight_byte_skip": "% of the twin's weight bytes a step",
    "kernel_time_saved": "% of the twin's kernel time",
    "step_time_saved": "% of the twin's median step",
    "request_time_saved": "% of the twin's request time",
}
#: What a rung's `n` counts, one of them.
RUNG_SAMPLES = {
    "parameter_skip": "token row",
    "flop_skip": "step",
    "weight_byte_skip": "step",
    "kernel_time_saved": "traced step",
    "step_time_saved": "pair",
    "request_time_saved": "request",
    "realised_fraction": "pair",
    "step_time": "step",
    "recorder_cost": "pair",
}
OTHER_NAMES = {
    "realised_fraction": "Realised fraction",
    "step_time": "Step time",
    "recorder_cost": "Recorder cost",
}


def absent(value: Any) -> bool:
    """Whether a frame's cell holds no value (None, NaN or <NA>)."""
    return bool(pd.isna(value))


def percent(share: Any) -> str:
    """A share of 1 as percent with one decimal and a real minus sign; `ABSENT` if there is none."""
    return ABSENT if absent(share) else _signed(f"{100 * float(share):,.1f}") + f"{NBSP}%"


def percent_interval(low: Any, high: Any) -> str:
    """An interval of shares of 1 as `a to b %`."""
    if absent(low) or absent(high):
        return ABSENT
    return f"{_signed(f'{100 * float(low):,.1f}')} to {percent(high)}"


def number(value: Any, digits: int = 3) -> str:
    """A quantity with `digits` significant digits and thousands separators, never in exponent form below 10^15."""
    if absent(value):
        return ABSENT
    value = float(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return _signed(f"{value:,.{decimals}f}")


def milliseconds(value: Any) -> str:
    """A time in ms with its unit, three significant digits."""
    return ABSENT if absent(value) else f"{number(value)}{NBSP}ms"


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    return ABSENT if absent(value) else _signed(f"{int(value):,}")


def how_many(n: Any, noun: str, plural: str = "") -> str:
    """How many of something: `1 pair`, `2,048 pairs`. `plural`: where it is more than an s at the end."""
    return f"{count(n)} {noun if n == 1 else plural or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a`, `a and b`, `a, b and c`; empty for none."""
    *before, last = names or [""]
    return f"{', '.join(before)} and {last}" if before else last


def quantity(value: Any, unit: str) -> str:
    """A numerator or denominator with its unit; large counts get an SI prefix (4.09 G FLOPs), times stay in ms."""
    if absent(value):
        return ABSENT
    if unit in ("ms", "share"):
        return f"{number(value)}{NBSP}{unit}" if unit == "ms" else number(value)
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(float(value)) >= scale:
            return f"{number(float(value) / scale, 4)}{NBSP}{prefix}{NBSP}{unit}"
    return f"{number(value, 4)}{NBSP}{unit}"


def size(value: Any) -> str:
    """A number of bytes with its decimal unit: `1.54 MB`."""
    if absent(value):
        return ABSENT
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(float(value)) >= scale:
            return f"{number(float(value) / scale)}{NBSP}{unit}"
    return f"{number(value)}{NBSP}B"


def _signed(text: str) -> str:
    if text.startswith("-") and not text.strip("-0.,"):
        text = text[1:]
    return text.replace("-", MINUS)


def cell_label(name: str, phase: str, batch: Any, length: Any) -> str:
    """A cell in words: `prefill, batch 8, 512 tokens`. The bare name for a session, whose batches are its own."""
    if name.startswith("session"):
        return name
    context = f"{NBSP}of{NBSP}context" if phase == "decode" else ""
    return f"{phase}, batch{NBSP}{batch}, {how_many(length, 'token').replace(' ', NBSP)}{context}"


def row_label(row: Any) -> str:
    """`cell_label` of a frame's row (attributes cell, phase, batch, length)."""
    return cell_label(str(row.cell), str(row.phase), row.batch, row.length)


def markdown(text: str) -> str:
    """`text` on one line, with everything escaped that Markdown (ours and the pages') or HTML would read in it."""
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    escaped = "".join(f"\\{c}" if c in "\\`*_[]#|~$" else entities.get(c, c) for c in text)
    return " ".join(escaped.split())


def sentence(text: str) -> str:
    """`text` with a capital and one full stop."""
    return text[:1].upper() + text[1:].rstrip(". ") + "."


def arm_names(manifest: Manifest) -> dict[str, str]:
    """Arm → its name with what must stand wherever a result of it is: `forced (synthetic route)`."""
    random_weights = manifest.model is not None and manifest.model.random_weights
    found = {}
    for arm in manifest.arms:
        marks = [
            *["synthetic route"] * bool(arm.synthetic),
            *["untrained router"] * arm.untrained,
            *["masked execution"] * arm.discards,
            *([arm.caveat] if arm.caveat else []),
            *["random weights"] * random_weights,
        ]
        found[arm.name] = arm.name + (f" ({', '.join(marks)})" if marks else "")
    return found


# -- headlines ----------------------------------------------------------------------------------------------------


def headlines(wide: pd.DataFrame, names: Mapping[str, str]) -> list[str]:
    """One sentence per routed arm: what it skipped and what time that saved, phase by phase, never merged.

    Args:
        wide: `analysis.ladder.ladder_wide`.
        names: `arm_names`, used where the sentence first speaks of it.
    """
    routed = wide[wide["parameter_skip"].notna() | wide["step_time_saved"].notna()]
    sentences = []
    for arm, of_arm in routed.groupby("arm", sort=False):
        phases = list(of_arm.groupby("phase", sort=False))
        said = [names[str(arm)], *[str(arm)] * (len(phases) - 1)]
        clauses = [_clause(name, str(phase), group) for name, (phase, group) in zip(said, phases, strict=True)]
        sentences.append(sentence("; ".join(clauses)))
    return sentences


def _clause(arm: str, phase: str, cells: pd.DataFrame) -> str:
    twin = cells["twin"].iloc[0]
    skipped = f"in {phase}, {arm} {_skipped(cells['parameter_skip'])} of the parameters (net)"
    timed = cells[cells["step_time_saved"].notna()].sort_values("step_time_saved")
    if timed.empty:
        return f"{skipped}, and what time that saved was not measured ({_why_not_timed(twin)})"
    worst, best = timed.iloc[0], timed.iloc[-1]
    if len(timed) == 1:
        return f"{skipped} and a step took {_time(best)} than {twin} ({_where(best)})"
    return (
        f"{skipped} and a step took between {_time(worst)} than {twin} ({_where(worst)}) "
        f"and {_time(best)} ({_where(best)})"
    )


def _skipped(shares: pd.Series[float]) -> str:
    """Who adds more than it skips has skipped nothing."""
    return f"added {_span(-shares)}" if shares.max() < 0 else f"skipped {_span(shares)}"


def _span(shares: pd.Series[float]) -> str:
    low, high = percent(shares.min()), percent(shares.max())
    if low == ABSENT:
        return "an unrecorded share"
    return low if low == high else f"{low} to {high}"


def _time(row: pd.Series[Any]) -> str:
    saved = float(row["step_time_saved"])
    return f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} time"


def _where(row: pd.Series[Any]) -> str:
    """The cell of a quoted time, without the phase that the clause has named, and the interval of its saving."""
    low, high = row["step_time_saved_low"], row["step_time_saved_high"]
    where = row_label(row).removeprefix(f"{row['phase']}, ")
    if absent(low):
        return f"{where}; too few pairs for an interval"
    unclear = ", no clear difference" if low <= 0 <= high else ""
    return (
        f"{where}; saved {percent_interval(low, high)}{unclear}{'' if row['judged'] else ', too few repeats to judge'}"
    )


def _why_not_timed(twin: Any) -> str:
    return "there is no twin to compare with" if absent(twin) else f"no bare steps paired with {twin}"


#: What stands beside the table of `analysis.sharing`.
SHARING = (
    "A layer that one row of a step runs is read for all of them. So where the rows of a batch decide differently, "
    "more weights are read than rows run, and a step that waits for weights, as decoding does, saves less time than "
    "its rows skip."
)

#: Hex digits shown of a hash: enough that two that differ are seen to.
DIGEST = 12
#: What stands beside the table of an overview's outputs.
OUTPUTS = (
    f"The first {DIGEST} hex digits of the SHA-256 of the likeliest next tokens of the whole batch after each step: "
    "arms, or runs of the same inputs in one process or on several ranks, that agree here said the same."
)

# -- glossary -----------------------------------------------------------------------------------------------------

#: term, definition, unit.
GLOSSARY: tuple[tuple[str, str, str], ...] = (
    ("Arm", "A method with its options, run on the one model. Arms take turns in random order within a repeat.", ""),
    ("Twin", "The arm that another is compared with: dense, or one of equal cost.", ""),
    ("Cell", "One point of the sweep: phase, batch and length. All arms see the same inputs in it.", ""),
    ("Prefill", "The step that reads the whole prompt.", ""),
    ("Decode", "The steps that follow, each for one token of each sequence, on the dense arm's continuation.", ""),
    (
        "Parameters skipped",
        "Mean over tokens of the parameters that took no part ÷ backbone parameters. gross: replacements are not "
        "counted; adapters_only: adapters that ran count as taking part; net: router, memory and LoRA too; "
        "augmented: idle adapters count as skipped, ÷ backbone and added parameters.",
        "% of parameters",
    ),
    (
        "FLOPs skipped",
        "1 − executed FLOPs ÷ the twin's. executed: rows that really entered each product × its size, head included, "
        "causal attention. nominal: what the router asked for. padded: what the kernel did, pads and masked keys "
        "included. full_attention: real rows, every key. A multiply-add counts as two.",
        "% of FLOPs",
    ),
    (
        "Weight bytes not read",
        "1 − bytes of weights a step had to read ÷ the twin's. A step reads a weight if any row of its batch uses it, "
        "which is why a large batch saves little here.",
        "% of bytes",
    ),
    (
        "Kernel time saved",
        "1 − busy time of kernels (on a CPU: of leaf operators) in a traced step ÷ the twin's. Unsupported where that "
        f"time, of either arm, is more than {TRACED_HIGH} × the arm's median bare step or, on a CPU, less than "
        f"{TRACED_LOW} ×: then the traced step was not like the timed ones.",
        "% of ms",
    ),
    (
        "Step time saved",
        "1 − median wall time of a bare step (no recorder, no trace) ÷ the twin's, over pairs of the same inputs.",
        "% of ms",
    ),
    (
        "Request time saved",
        "The same for requests under load (TTFT, TPOT, end to end). Needs a serve section.",
        "% of ms",
    ),
    ("Realised fraction", "Step time saved ÷ FLOP skip. Undefined where no FLOPs were skipped.", "ratio"),
    (
        "Interval",
        "95 % bootstrap interval over pairs. Counted rungs (parameters, FLOPs, bytes) are exact and have none.",
        "as the value",
    ),
    (
        "Break-even",
        "The swept batches between which an arm goes from saving step time to losing it, judged by intervals.",
        "batch size",
    ),
    (
        "Segment",
        "A named part of a step. Self time, from instrumented steps; the rest, recording included, is unattributed.",
        "ms per step",
    ),
    ("P50, P95, P99", "Percentiles of step wall time on the raw samples. † marks fewer than 10 samples beyond.", "ms"),
    ("Recorder cost", "Median instrumented step ÷ median bare step of the same arm − 1.", "% of ms"),
    ("Synthetic route", "Gates that were forced at a given rate, not decided by a router.", ""),
)
