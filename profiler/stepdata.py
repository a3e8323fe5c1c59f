"""A recorded step as rows of tables, and the proof that the rows executed are the rows decided.

Pure functions of a `StepData`; they run outside every timed region.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from profiler.errors import RuleError
from profiler.recorder import Decision, StepData
from profiler.records import ArmRecord, signals_schema, signals_table
from profiler.writer import Rows


@dataclass(frozen=True)
class Place:
    """Where a step stands in the run."""

    cell: str
    step: int


def decision_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """Rows of `gates`, of the method's signals table, of `rows` and of `kv`."""
    found: list[Rows] = []
    for decision in data.decisions:
        key = _decision_key(data, decision, arm, place)
        keep = key.pop("keep")
        choices, weights = _listed(decision, keep)
        found.append(
            Rows(
                "gates",
                place.cell,
                {
                    **key,
                    "phase": data.phase,
                    "choices": choices,
                    "weights": weights,
                    "gate": decision.gate[keep],
                },
            )
        )
        if decision.signals:
            key.pop("rows")
            # A method has all of its columns; where it did not compute one (a variant without that part), it is null.
            columns = {name: pa.array(values[keep], from_pandas=True) for name, values in decision.signals.items()}
            schema = signals_schema(list(arm.signals))
            found.append(Rows(signals_table(arm.method), place.cell, {**key, **columns}, schema))
    if data.counts:
        keys, counts = zip(*data.counts.items(), strict=True)
        found.append(
            Rows(
                "rows",
                place.cell,
                {
                    "arm": arm.name,
                    "step": place.step,
                    "layer": [key[0] for key in keys],
                    "site": [key[1] for key in keys],
                    "choice": [key[2] for key in keys],
                    "rows": [count.rows for count in counts],
                    "padded": [count.padded for count in counts],
                    "context": [count.context for count in counts],
                    "context_full": [count.context_full for count in counts],
                },
            )
        )
    if data.kv is not None:
        allocated, live = data.kv
        columns = {"arm": arm.name, "step": place.step, "allocated_bytes": [allocated], "live_bytes": [live]}
        found.append(Rows("kv", place.cell, columns))
    return found


def _listed(decision: Decision, keep: NDArray[np.bool_]) -> tuple[pa.ListArray, pa.ListArray]:
    """Choices and weights of the decisions kept, a list of each for every decision."""
    choice = decision.choice[keep]
    if decision.weights is None:
        each = pa.array(np.arange(len(choice) + 1, dtype=np.int32))
        lists = pa.array(choice), pa.array(np.ones(len(choice), dtype=np.float32))
    else:
        taken = choice >= 0
        each = pa.array(np.concatenate([[0], taken.sum(1).cumsum()]).astype(np.int32))
        lists = pa.array(choice[taken]), pa.array(decision.weights[keep][taken])
    return tuple(pa.ListArray.from_arrays(each, values) for values in lists)


def segment_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """Rows of `segments`."""
    if not data.segment_ns:
        return []
    return [
        Rows(
            "segments",
            place.cell,
            {
                "arm": arm.name,
                "step": place.step,
                "segment": [segment for segment, _ in data.segment_ns],
                "layer": [layer for _, layer in data.segment_ns],
                "ns": list(data.segment_ns.values()),
            },
        )
    ]


def _decision_key(data: StepData, decision: Decision, arm: ArmRecord, place: Place) -> dict[str, Any]:
    """The key columns of one `gate` call, and `keep`, the entries that are not pads.

    Raises:
        RuleError: another number of decisions than the step has sequences or token rows.
    """
    sequences = data.sequences
    if arm.scope == "sequence":
        requests: list[str] = list(sequences.requests)
        positions: NDArray[np.int32] = np.full(len(requests), -1, dtype=np.int32)
        rows: NDArray[np.int64] = np.asarray(sequences.rows_S, dtype=np.int64)
        keep: NDArray[np.bool_] = np.ones(len(requests), dtype=bool)
    else:
        requests = [name for i, name in enumerate(sequences.requests) for _ in range(sequences.rows_S[i])]
        positions = np.concatenate([np.asarray(sequences.positions(i), dtype=np.int32) for i in range(len(sequences))])
        rows = np.ones(len(requests), dtype=np.int64)
        real = sequences.real_BT
        keep = np.ones(len(requests), dtype=bool) if real is None else real.cpu().numpy().reshape(-1)
    if keep.size != len(decision.choice):
        raise RuleError(
            f"rule 1: layer {decision.layer} {decision.site}: {len(decision.choice)} decisions were recorded and the "
            f"step has {keep.size} {'sequences' if arm.scope == 'sequence' else 'token rows, pads included'}"
        )
    return {
        "arm": arm.name,
        "step": place.step,
        "request": requests,
        "position": positions,
        "layer": decision.layer,
        "site": decision.site,
        "rows": rows,
        "keep": keep,
    }


def digest(data: StepData) -> bytes:
    """Fingerprint of a step's decisions: who chose what, where. Gate values are left out (they may round)."""
    state = hashlib.blake2b(digest_size=16)
    for decision in data.decisions:
        state.update(f"{decision.layer}/{decision.site}/".encode())
        state.update(np.ascontiguousarray(decision.choice).tobytes())
    return state.digest()


def executed_as_decided(data: StepData, arm: ArmRecord) -> list[str]:
    """Rule 1: rows counted where they entered a branch against what the decisions say; the differences, in words.

    Checked for every choice that has a product, pads left out on both sides. Where something is decided, the
    decisions must govern each real row once, name choices the manifest has, and come from finite gates; where
    nothing is, every real row must have run. So it must in every choice of an arm labelled as discarding what was
    not chosen; without that label the same rows are a difference.
    """
    known = {(c.layer, c.site, c.index) for c in arm.choices}
    decides = {(c.layer, c.site) for c in arm.choices if c.index > 0}
    expected, problems = _decided(data, arm, known, decides)
    every = data.sequences.view.rows
    for choice in arm.choices:
        place = (choice.layer, choice.site)
        # Of what belongs to no layer, and of routers, a step computes what it needs: one row a sequence, mostly.
        if choice.flops_per_row == 0 or choice.layer < 0 or choice.site == "router":
            continue
        counted = data.counts.get((*place, choice.index))
        executed = counted.rows if counted is not None else 0
        wanted = expected[(*place, choice.index)] if place in decides and not arm.discards else every
        if executed != wanted:
            problems.append(
                f"layer {choice.layer} {choice.site} {choice.name}: {executed} rows entered, "
                + (f"all {wanted} must in an arm that discards" if arm.discards else f"decisions say {wanted}")
            )
    return problems


def _decided(
    data: StepData, arm: ArmRecord, known: set[tuple[int, str, int]], decides: set[tuple[int, str]]
) -> tuple[dict[tuple[int, str, int], int], list[str]]:
    """Rows each choice was decided for, and what is wrong with the decisions themselves."""
    expected: dict[tuple[int, str, int], int] = defaultdict(int)
    governed: dict[tuple[int, str], int] = dict.fromkeys(sorted(decides), 0)
    problems = []
    for decision in data.decisions:
        key = _decision_key(data, decision, arm, Place("", 0))
        chosen, finite = decision.choice[key["keep"]], np.isfinite(decision.gate[key["keep"]])
        if not finite.all():
            broken = key["request"][int(np.argmin(finite))]
            problems.append(f"layer {decision.layer} {decision.site}: the gate of request {broken!r} is not finite")
        governs = key["rows"]
        if decision.weights is not None:  # several choices each, -1 being none
            taken = chosen >= 0
            chosen, governs = chosen[taken], np.broadcast_to(governs[:, None], taken.shape)[taken]
        for choice, rows in zip(chosen.tolist(), governs.tolist(), strict=True):
            expected[(decision.layer, decision.site, choice)] += rows
        governed[decision.layer, decision.site] = governed.get((decision.layer, decision.site), 0) + sum(key["rows"])
    problems += [f"layer {i} {site}: the manifest has no choice {c}" for i, site, c in sorted(expected.keys() - known)]
    every = data.sequences.view.rows
    problems += [
        f"layer {layer} {site}: the decisions govern {rows} rows, the step has {every}"
        for (layer, site), rows in governed.items()
        if rows != every
    ]
    return expected, problems
