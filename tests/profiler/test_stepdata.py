"""Steps made by hand: the rows they become, and rule 1 on every way in which rows and decisions can differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from profiler.errors import RuleError
from profiler.execution.sequences import Sequences
from profiler.recorder import Count, Decision, StepData
from profiler.records import TABLES, ArmRecord, Choice
from profiler.stepdata import Place, decision_rows, digest, executed_as_decided, segment_rows
from profiler.writer import Rows, _batch

PLACE = Place("c", 42)
#: Two requests in a batch of width 3: `a` has 3 real rows after 5 in the cache, `b` one row after 2, two pads.
SEQUENCES = Sequences(
    packed=False,
    width=3,
    rows_S=[3, 1],
    past_S=[5, 2],
    requests=["a", "b"],
    real_BT=torch.tensor([[True, True, True], [False, False, True]]),
)


def arm(scope: Any, *sites: tuple[int, str, int]) -> ArmRecord:
    """An arm with sites (layer, name, number of choices); choice 0 of several costs nothing."""
    choices = [
        Choice(layer=layer, site=site, index=i, name=f"c{i}", flops_per_row=0 if n > 1 and i == 0 else 8)
        for layer, site, n in sites
        for i in range(n)
    ]
    return ArmRecord(name="mine", method="m", scope=scope, signals={"logit": "s"}, choices=choices)


def decision(layer: int, choice: list[int], site: str = "block", **signals: list[float]) -> Decision:
    columns = {name: np.array(values, dtype=np.float32) for name, values in signals.items()}
    gate = np.array([0.25 + 0.5 * c for c in choice], dtype=np.float32)
    return Decision(layer, site, np.array(choice, dtype=np.int16), gate, columns)


def step(decisions: list[Decision], counts: dict[tuple[int, str, int], int], **more: Any) -> StepData:
    given = {"sequences": SEQUENCES, "phase": "mixed", "wall_ns": 10, "segment_ns": {}, "device_ns": None, "kv": None}
    found = {key: Count(rows=rows) for key, rows in counts.items()}
    return StepData(**{**given, "decisions": decisions, "counts": found, **more})


def frame(rows: Rows) -> list[dict[str, Any]]:
    """As the store writes them."""
    return pa.table(_batch(rows.schema or TABLES[rows.table], rows.columns, rows.cell, 0)).to_pylist()


def tables(found: list[Rows]) -> dict[str, list[dict[str, Any]]]:
    assert len({rows.table for rows in found}) == len(found)
    return {rows.table: frame(rows) for rows in found}


# -- rows ---------------------------------------------------------------------------------------------


def test_a_sequence_decision_is_one_row_a_request_and_governs_its_rows() -> None:
    data = step([decision(4, [1, 0], logit=[0.5, -0.5])], {(4, "block", 1): 3}, kv=(1000, 600))
    found = tables(decision_rows(data, arm("sequence", (4, "block", 2)), PLACE))
    assert found["gates"] == [
        {
            "arm": "mine", "step": 42, "rank": 0, "cell": "c", "phase": "mixed", "request": request, "position": -1,
            "layer": 4, "site": "block", "choices": [choice], "weights": [1.0], "gate": gate, "rows": rows,
        }
        for request, choice, gate, rows in (("a", 1, 0.75, 3), ("b", 0, 0.25, 1))
    ]  # fmt: skip
    assert [(r["request"], r["layer"], r["logit"]) for r in found["signals-m"]] == [("a", 4, 0.5), ("b", 4, -0.5)]
    (row,) = found["rows"]
    assert (row["layer"], row["site"], row["choice"], row["rows"], row["padded"]) == (4, "block", 1, 3, 0)
    (kv,) = found["kv"]
    assert (kv["allocated_bytes"], kv["live_bytes"]) == (1000, 600)


def test_token_decisions_are_one_row_a_real_token_with_its_position() -> None:
    # Row by row, pads of `b` first: their decisions (9) are in no row.
    data = step([decision(2, [1, 0, 1, 9, 9, 1], "ffn", logit=[1, 2, 3, 99, 99, 6])], {})
    found = tables(decision_rows(data, arm("token", (2, "ffn", 2)), PLACE))
    key = [(r["request"], r["position"], r["choices"], r["rows"]) for r in found["gates"]]
    assert key == [("a", 5, [1], 1), ("a", 6, [0], 1), ("a", 7, [1], 1), ("b", 2, [1], 1)]
    assert [r["logit"] for r in found["signals-m"]] == [1, 2, 3, 6]
    assert "rows" not in found
    assert "kv" not in found


def test_segments_are_a_row_a_segment_and_layer() -> None:
    data = step([], {}, segment_ns={("attention", 0): 7, ("norm", -1): 2})
    (rows,) = segment_rows(data, arm("none"), PLACE)
    assert [(r["segment"], r["layer"], r["ns"], r["step"]) for r in frame(rows)] == [
        ("attention", 0, 7, 42),
        ("norm", -1, 2, 42),
    ]
    assert segment_rows(step([], {}), arm("none"), PLACE) == []


# -- rule 1 -------------------------------------------------------------------------------------------

SKIPS = arm("sequence", (0, "block", 2), (1, "block", 2))
DECIDED = [decision(0, [1, 0]), decision(1, [0, 0])]


def test_rows_that_equal_the_decisions_are_right() -> None:
    assert executed_as_decided(step(DECIDED, {(0, "block", 1): 3}), SKIPS) == []


def test_token_rows_that_equal_the_decisions_are_right_pads_apart() -> None:
    tokens = arm("token", (0, "ffn", 2))
    data = step([decision(0, [1, 0, 1, 1, 1, 1], "ffn")], {(0, "ffn", 1): 3})
    assert executed_as_decided(data, tokens) == []


@pytest.mark.parametrize(
    ("decisions", "counts", "problems"),
    [
        (DECIDED, {(0, "block", 1): 4}, ["layer 0 block c1: 4 rows entered, decisions say 3"]),
        (DECIDED, {}, ["layer 0 block c1: 0 rows entered, decisions say 3"]),
        (
            DECIDED,
            {(0, "block", 1): 3, (1, "block", 1): 4},
            ["layer 1 block c1: 4 rows entered, decisions say 0"],
        ),
        (DECIDED[:1], {(0, "block", 1): 3}, ["layer 1 block: the decisions govern 0 rows, the step has 4"]),
        (
            [*DECIDED, decision(1, [0, 0])],
            {(0, "block", 1): 3},
            ["layer 1 block: the decisions govern 8 rows, the step has 4"],
        ),
        (
            [decision(0, [1, 5]), DECIDED[1]],
            {(0, "block", 1): 3},
            ["layer 0 block: the manifest has no choice 5"],
        ),
        (
            [*DECIDED, decision(7, [1, 0], "attic")],
            {(0, "block", 1): 3},
            ["layer 7 attic: the manifest has no choice 0", "layer 7 attic: the manifest has no choice 1"],
        ),
        (
            [DECIDED[0]._replace(gate=np.array([0.5, np.nan], dtype=np.float32)), DECIDED[1]],
            {(0, "block", 1): 3},
            ["layer 0 block: the gate of request 'b' is not finite"],
        ),
    ],
)
def test_every_difference_is_a_sentence(
    decisions: list[Decision], counts: dict[tuple[int, str, int], int], problems: list[str]
) -> None:
    assert executed_as_decided(step(decisions, counts), SKIPS) == problems


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ("sequence", "layer 0 block: 3 decisions were recorded and the step has 2 sequences"),
        ("token", "layer 0 block: 3 decisions were recorded and the step has 6 token rows, pads included"),
    ],
)
def test_another_number_of_decisions_than_deciders_is_an_error(scope: Any, sentence: str) -> None:
    data, skips = step([decision(0, [1, 0, 1])], {}), arm(scope, (0, "block", 2))
    for check in (executed_as_decided, lambda d, a: decision_rows(d, a, PLACE)):
        with pytest.raises(RuleError, match=sentence):
            check(data, skips)


def test_where_nothing_is_decided_every_real_row_must_run() -> None:
    dense = arm("none", (0, "attention", 1), (0, "ffn", 1))
    assert executed_as_decided(step([], {(0, "attention", 0): 4, (0, "ffn", 0): 4}), dense) == []
    assert executed_as_decided(step([], {(0, "attention", 0): 4, (0, "ffn", 0): 3}), dense) == [
        "layer 0 ffn c0: 3 rows entered, decisions say 4"
    ]


def test_heads_and_routers_run_on_what_rows_they_need() -> None:
    part = arm("sequence", (-1, "head", 1), (0, "router", 1))
    assert executed_as_decided(step([], {(-1, "head", 0): 2, (0, "router", 0): 2}), part) == []


# -- fingerprints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda d: [decision(0, [1, 1]), d[1]],
        lambda d: [d[0], decision(1, [0, 1])],
        lambda d: [d[0], decision(2, [0, 0])],
        lambda d: [d[0], decision(1, [0, 0], "ffn")],
        lambda d: d[:1],
        lambda d: [d[0], d[1], decision(1, [])],
    ],
)
def test_a_fingerprint_tells_other_decisions_apart(change: Callable[[list[Decision]], list[Decision]]) -> None:
    assert digest(step(change(DECIDED), {})) != digest(step(DECIDED, {}))


def test_a_fingerprint_leaves_out_what_may_round() -> None:
    moved = [each._replace(gate=each.gate + np.float32(1e-6), signals={}) for each in DECIDED]
    assert digest(step(moved, {(0, "block", 1): 3})) == digest(step(DECIDED, {}))
