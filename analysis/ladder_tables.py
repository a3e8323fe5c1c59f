"""The ladder as tables: one row an arm and cell, and the batches over which an arm breaks even.

Picks and words what `ladder.ladder` returns; computes no rung.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from analysis.counted import NAN
from analysis.ladder import HEADLINE, RUNGS, VARIANTS, judged, ladder, warnings_of_arm, warnings_of_cell
from analysis.latency import cells
from analysis.wording import listed
from profiler.store import Run

WIDE_COLUMNS = (
    "cell", "phase", "batch", "length", "arm", "twin", "parameter_skip", "flop_skip", "weight_byte_skip",
    "kernel_time_saved", "step_time_saved", "step_time_saved_low", "step_time_saved_high", "request_time_saved",
    "realised_fraction", "recorder_cost", "step_ms", "twin_step_ms", "n", "judged", "note",
)  # fmt: skip
BREAK_EVEN_COLUMNS = (
    "phase", "length", "arm", "twin", "batches", "saves_from", "saves_to", "loses_from", "loses_to", "unclear_from",
    "unclear_to", "break_even", "note",
)  # fmt: skip
_BATCH_BOUNDS = [f"{state}_{end}" for state in ("saves", "loses", "unclear") for end in ("from", "to")]


def ladder_wide(frame: pd.DataFrame) -> pd.DataFrame:
    """`ladder(run)` as one row per (cell, arm), columns `WIDE_COLUMNS`, in the ladder's order.

    Headline variants only; shares of 1, times in ms. `step_ms` is the median bare step, or the instrumented one
    where there are no bare steps (a session), which `note` then says. `n` is the pairs behind `step_time_saved`, and
    `judged` whether they are enough to conclude anything (`ladder.judged`).
    `note` joins the notes of the headline rungs, each said once; request time and recorder cost are left out.
    """
    lines = []
    for (cell, arm), group in frame.groupby(["cell", "arm"], sort=False):
        headline = group[group["variant"] == group["rung"].map(HEADLINE)].set_index("rung")
        first = group.iloc[0]
        line: dict[str, object] = {name: first[name] for name in ("phase", "batch", "length", "twin")}
        line |= {"cell": cell, "arm": arm, "judged": "step_time_saved" in headline[judged(headline)].index}
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
        `_from` and `_to` are the smallest and the largest such batch, <NA> if there is none. `break_even` says it in
        words, and which batches are not judged (`ladder.judged`).
    """
    frame = ladder(run) if frame is None else frame
    records = {cell.name: cell for cell in cells(run)}
    saved = frame[(frame["rung"] == "step_time_saved") & frame["twin"].notna()]
    lines = []
    for (phase, length, arm), group in saved.groupby(["phase", "length", "arm"], sort=False):
        group = group.sort_values("batch", kind="stable")
        enough = group[judged(group)]
        states = [
            (int(batch), "saves" if low > 0 else "loses" if high < 0 else "unclear")
            for batch, low, high in zip(enough["batch"], enough["low"], enough["high"], strict=True)
        ]
        line: dict[str, object] = {"phase": phase, "length": length, "arm": arm, "twin": group["twin"].iloc[0]}
        line["batches"] = ", ".join(str(batch) for batch in group["batch"])
        for state in ("saves", "loses", "unclear"):
            batches = [batch for batch, found in states if found == state]
            line[f"{state}_from"] = min(batches) if batches else pd.NA
            line[f"{state}_to"] = max(batches) if batches else pd.NA
        line["break_even"] = _break_even_in_words(states, [str(batch) for batch in group["batch"][~judged(group)]])
        notes = [f"{name}: {text}" for name in group["cell"] for text in warnings_of_cell(run, records[str(name)])]
        line["note"] = "; ".join([*notes, *warnings_of_arm(run, run.manifest.arm(str(arm)))])
        lines.append(line)
    found = pd.DataFrame(lines, columns=list(BREAK_EVEN_COLUMNS))
    return found.astype(dict.fromkeys(_BATCH_BOUNDS, "Int64"))


def _break_even_in_words(states: list[tuple[int, str]], unjudged: list[str]) -> str:
    """Args: states: (batch, saves | loses | unclear) of the batches that can be judged; the others are `unjudged`."""
    if not states:
        return f"not judged: too few repeats at {_batches(unjudged)}"
    said = _crossings(states, "judged" if unjudged else "swept")
    return f"{said}; too few repeats to judge {_batches(unjudged)}" if unjudged else said


def _crossings(states: list[tuple[int, str]], among: str) -> str:
    definite = [(batch, state) for batch, state in states if state != "unclear"]
    crossings = [
        f"between batch {a} ({before}) and {b} ({after})"
        for (a, before), (b, after) in pairwise(definite)
        if before != after
    ]
    if crossings:
        return ", ".join(crossings)
    unclear = [str(batch) for batch, found in states if found == "unclear"]
    if not definite:
        return f"not decided: the interval holds 0 at {_batches(unclear)}"
    state = definite[0][1]
    if unclear:
        return f"none seen: {state} where it is clear, unclear at {_batches(unclear)}"
    return f"none seen: {state} at {'the one batch' if len(states) == 1 else 'every batch'} {among}"


def _batches(names: list[str]) -> str:
    return f"{'batch' if len(names) == 1 else 'batches'} {listed(names)}"
