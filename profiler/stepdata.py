"""A recorded step as rows of tables, and the proof that the rows executed are the rows decided.

Pure functions of a `StepData`; they run outside every timed region.

Several ranks: what they do alike (under replicated attention all but the experts) is rank 0's to write, so that rows
added up over ranks count it once; of the experts each rank writes what ran on it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from profiler.errors import RuleError
from profiler.execution.expert_costs import SITE
from profiler.recorder import Decision, StepData
from profiler.records import ArmRecord, signals_schema, signals_table
from profiler.writer import Rows


@dataclass(frozen=True)
class Place:
    """Where a step stands in the run, and on which rank it was seen. `alike`: every rank was given the same rows."""

    cell: str
    step: int
    rank: int = 0
    alike: bool = True

    @property
    def leads(self) -> bool:
        """Whether this rank writes what all of them do alike."""
        return self.rank == 0 or not self.alike


def divided(arm: ArmRecord) -> bool:
    """Whether ranks have different experts, so that what entered one is known of all ranks together only."""
    return arm.parallel is not None and arm.parallel.ranks > 1


def decision_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """Rows of `gates`, of the method's signals table, of `rows`, `kv`, `loads` and `dispatch`."""
    found = _gate_rows(data, arm, place) if place.leads else []
    counted = {key: count for key, count in data.counts.items() if place.leads or (divided(arm) and key[1] == SITE)}
    if counted:
        keys, counts = zip(*counted.items(), strict=True)
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
    if data.kv is not None and place.leads:
        allocated, live = data.kv
        columns = {"arm": arm.name, "step": place.step, "allocated_bytes": [allocated], "live_bytes": [live]}
        found.append(Rows("kv", place.cell, columns))
    return [*found, *_load_rows(data, arm, place), *_traffic_rows(data, arm, place)]


def _load_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """Tokens and weighted FLOPs of the experts that ran here."""
    if arm.parallel is None or not (place.leads or divided(arm)):
        return []
    width_E, hidden, per_group = arm.parallel.widths_E, arm.parallel.hidden, arm.parallel.per_group
    held = [
        (layer, expert, count.rows)
        for (layer, site, expert), count in sorted(data.counts.items())
        if site == SITE and expert < len(width_E) and count.rows
    ]
    if not held:
        return []
    columns = {
        "arm": arm.name,
        "step": place.step,
        "layer": [layer for layer, _, _ in held],
        "group": [expert // per_group for _, expert, _ in held],
        "expert": [expert for _, expert, _ in held],
        "tokens": [tokens for _, _, tokens in held],
        "flops": [6 * hidden * width_E[expert] * tokens for _, expert, tokens in held],
    }
    return [Rows("loads", place.cell, columns)]


def _traffic_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """What this rank sent, to each rank."""
    each = [(sent, rank, tokens) for sent in data.traffic for rank, tokens in enumerate(sent.tokens_R)]
    if not each:
        return []
    columns = {
        "arm": arm.name,
        "step": place.step,
        "layer": [sent.layer for sent, _, _ in each],
        "direction": [sent.direction for sent, _, _ in each],
        "source": place.rank,
        "destination": [rank for _, rank, _ in each],
        "tokens": [tokens for _, _, tokens in each],
        "bytes": [tokens * sent.row_bytes for sent, _, tokens in each],
    }
    return [Rows("dispatch", place.cell, columns)]


def _gate_rows(data: StepData, arm: ArmRecord, place: Place) -> list[Rows]:
    """Rows of `gates` and of the method's signals table."""
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
    """Rows of `segments`, `expert_times` and `collectives`: where this rank's time went."""
    found = []
    base = {"arm": arm.name, "step": place.step}
    if data.segment_ns:
        columns = {
            "segment": [segment for segment, _ in data.segment_ns],
            "layer": [layer for _, layer in data.segment_ns],
            "ns": list(data.segment_ns.values()),
        }
        found.append(Rows("segments", place.cell, {**base, **columns}))
    if data.width_ns:
        columns = {
            "layer": [layer for layer, _ in data.width_ns],
            "width": [width for _, width in data.width_ns],
            "ns": list(data.width_ns.values()),
        }
        found.append(Rows("expert_times", place.cell, {**base, **columns}))
    if data.exchanges:
        layer, operation, start_ns, dur_ns = (list(column) for column in zip(*data.exchanges, strict=True))
        columns = {"layer": layer, "operation": operation, "start_ns": start_ns, "dur_ns": dur_ns}
        found.append(Rows("collectives", place.cell, {**base, **columns}))
    return found


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


@dataclass(frozen=True)
class Tally:
    """Rows of one step that experts were chosen for, and that entered them, on one rank: (layer, expert) → rows."""

    decided: dict[tuple[int, int], int]
    entered: dict[tuple[int, int], int]


def tally(data: StepData, arm: ArmRecord) -> Tally:
    """One rank's part of rule 1 for experts that are on several."""
    known = {(c.layer, c.site, c.index) for c in arm.choices}
    expected, _ = _decided(data, arm, known, set())
    return Tally(
        {(layer, choice): rows for (layer, site, choice), rows in expected.items() if site == SITE},
        {(layer, choice): count.rows for (layer, site, choice), count in data.counts.items() if site == SITE},
    )


def divided_as_decided(tallies: Sequence[Tally], arm: ArmRecord) -> list[str]:
    """Rule 1 where ranks have different experts: rows that entered each, added up over ranks, against the decisions.

    Args:
        tallies: of one step, every rank's.
        arm: says whether every rank decided for the same rows, or each for its own.
    """
    assert arm.parallel is not None
    decided: Counter[tuple[int, int]] = Counter()
    for each in tallies[:1] if arm.parallel.attention == "replicated" else tallies:
        decided.update(each.decided)
    entered: Counter[tuple[int, int]] = Counter()
    for each in tallies:
        entered.update(each.entered)
    return [
        f"layer {layer} {SITE} {expert}: {entered[layer, expert]} rows entered on {len(tallies)} ranks, "
        f"decisions say {decided[layer, expert]}"
        for layer, expert in sorted({*decided, *entered})
        if entered[layer, expert] != decided[layer, expert]
    ]


def executed_as_decided(data: StepData, arm: ArmRecord) -> list[str]:
    """Rule 1: rows counted where they entered a branch against what the decisions say; the differences, in words.

    Checked for every choice that has a product, pads left out on both sides. Where something is decided, the
    decisions must govern each real row once, name choices the manifest has, and come from finite gates; where
    nothing is, every real row must have run. So it must in every choice of an arm labelled as discarding what was
    not chosen; without that label the same rows are a difference. Experts that several ranks share are left to
    `divided_as_decided`.
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
        if choice.site == SITE and divided(arm):
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
