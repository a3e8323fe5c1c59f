"""Accuracy and Retain from choice scores worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.answers import ACCURACY, ACCURACY_COLUMNS, LIKELIHOOD, RETAIN_COLUMNS, accuracy, retain
from profiler.records import TABLES
from profiler.store import Run
from tests.analysis.decisions_run import Arm, Input, write_decisions

#: Per arm, whether each of ten items is answered rightly: four of math (of 2 choices), six of code (of 4).
DENSE = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1]
ROUTED = [1, 0, 0, 1, 1, 0, 1, 0, 0, 0]


def written(folder: Path, hits: dict[str, list[int]]) -> Run:
    nll = {"dense": 10.0, "routed": 12.0}
    inputs = [
        Input(f"i{k}", "math" if k < 4 else "code", scored=10, nll=nll if k < 4 else {**nll, "routed": 15.0})
        for k in range(10)
    ]
    run = write_decisions(folder, inputs, [Arm("routed", ["110011"] * 10)])
    rows = []
    for arm, answers in hits.items():
        for k, hit in enumerate(answers):
            for choice in range(2 if k < 4 else 4):
                # The reference is choice 1. Its sum is always the largest, so only the mean a token can be what counts.
                right = choice == 1
                tokens = 40 if right else 4
                rows.append(
                    {
                        "arm": arm, "item": f"i{k}", "domain": "math" if k < 4 else "code", "mode": "gated on prefix",
                        "choice": choice, "right": right, "tokens": tokens,
                        "nll": tokens * ((0.5 if hit else 2.0) if right else 1.0 + choice / 10),
                    }
                )  # fmt: skip
    (folder / "choice_scores").mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=TABLES["choice_scores"])
    pq.write_table(table, folder / "choice_scores" / "part-quality-r0-000099.parquet")
    return Run(run.path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return written(tmp_path / "run", {"dense": DENSE, "routed": ROUTED})


def test_accuracy_by_hand(run: Run) -> None:
    frame = accuracy(run)
    assert list(frame.columns) == list(ACCURACY_COLUMNS)
    table = frame.set_index(["domain", "arm"])
    assert list(table.index) == [(d, a) for d in ("all", "math", "code") for a in ("dense", "routed")]
    assert table["accuracy"].tolist() == pytest.approx([7 / 10, 4 / 10, 3 / 4, 2 / 4, 4 / 6, 2 / 6])
    assert table["chance"].tolist() == pytest.approx([(4 / 2 + 6 / 4) / 10] * 2 + [1 / 2] * 2 + [1 / 4] * 2)
    assert table.loc[("all", "routed"), "over_twin"] == pytest.approx(-3 / 10)
    assert table.loc[("code", "routed"), "over_twin"] == pytest.approx(-2 / 6)
    assert np.isnan(table.loc[("all", "dense"), "over_twin"])
    assert table.loc[("all", "routed"), "over_twin_high"] <= 0  # an item is never better answered
    assert np.isnan(table.loc[("math", "routed"), "low"])  # four items
    assert table.loc[("all", "dense"), "low"] < 0.7 < table.loc[("all", "dense"), "high"]


def test_retain_is_the_mean_over_domains_of_ratios_to_a_named_arm(run: Run) -> None:
    frame = retain(run)
    assert list(frame.columns) == list(RETAIN_COLUMNS)
    table = frame.set_index("score")
    assert frame["of"].tolist() == ["dense", "dense"]
    assert table["tasks"].tolist() == [2, 2]
    assert table.loc[ACCURACY, "retain"] == pytest.approx(((2 / 4) / (3 / 4) + (2 / 6) / (4 / 6)) / 2)
    assert table.loc[LIKELIHOOD, "retain"] == pytest.approx((math.exp(-2 / 10) + math.exp(-5 / 10)) / 2)
    assert (frame["left_out"] == "").all()


def test_a_domain_in_which_the_other_arm_is_never_right_is_left_out_by_name(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"dense": [0] * 4 + DENSE[4:], "routed": ROUTED})
    row = retain(run).set_index("score").loc[ACCURACY]
    assert (row["tasks"], row["left_out"]) == (1, "math")
    assert row["retain"] == pytest.approx((2 / 6) / (4 / 6))


def test_a_run_without_choices_has_no_accuracy(tmp_path: Path) -> None:
    run = write_decisions(
        tmp_path / "run",
        [Input("i", "math", scored=10, nll={"dense": 1.0, "routed": 2.0})],
        [Arm("routed", ["110011"])],
    )
    assert accuracy(run).empty
    assert retain(run)["score"].tolist() == [LIKELIHOOD]
    assert pd.isna(retain(run)["low"]).all()
