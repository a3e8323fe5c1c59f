"""Skips, rates, eligibility, flips and drift against routes small enough to count by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.diagnostics import (
    DRIFT_COLUMNS,
    ELIGIBILITY_COLUMNS,
    FLIP_COLUMNS,
    RATE_COLUMNS,
    drift,
    eligibility,
    flip_rates,
    skip_rates,
)
from analysis.skips import deciding_arms, skips
from profiler.errors import InputError
from profiler.records import ArmRecord, CellRecord, Choice
from profiler.store import Run
from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.tiny_run import write_run

#: Ten inputs, six of them math. Layer 0 always runs, 1 always skips, 2 skips for three, 3 for seven, 4 for five.
ROUTES = ["10111", "10111", "10101", "10100", "10100", "10100", "10101", "10010", "10000", "10001"]
INPUTS = [Input(f"i{k}", "math" if k < 6 else "code", tokens=10 + k) for k in range(10)]
STARTS = [1.0, -1.0, -1.0, 1.0, 1.0]


def run_of(tmp_path: Path, **more: Any) -> Run:
    return write_decisions(tmp_path / "run", INPUTS, [Arm("routed", ROUTES, starts=STARTS)], **more)


def test_skips_are_a_matrix_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    found = skips(run_of(tmp_path), "routed")
    assert found.requests == [f"i{k}" for k in range(10)]
    assert found.columns == [(layer, "block") for layer in range(5)]
    assert found.skipped.tolist() == [[c == "0" for c in route] for route in ROUTES]
    assert found.share.tolist() == found.skipped.astype(float).tolist()
    assert found.domains == ["math"] * 6 + ["code"] * 4
    assert found.tokens.tolist() == list(range(10, 20))
    assert found.mean_token_rank.tolist() == [100.0] * 10
    assert found.incomplete == 0


def test_an_arm_that_decides_nothing_has_no_columns_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert deciding_arms(run) == ["routed"]
    found = skips(run, "dense")
    assert (found.columns, found.requests, found.share.shape) == ([], [], (0, 0))
    with pytest.raises(InputError, match="has no arm 'rooted'; it has dense, routed"):
        skips(run, "rooted")


def test_a_token_level_method_skips_by_share_of_rows(tmp_path: Path) -> None:
    # Site ffn: choice 0 an adapter, 1 the backbone's. Site other: two alternatives, both of the backbone: no skip.
    choices = [
        Choice(layer=3, site="ffn", index=0, name="adapter", replacement_parameters=5),
        Choice(layer=3, site="ffn", index=1, name="ffn", backbone_parameters=50),
        Choice(layer=3, site="other", index=0, name="a", backbone_parameters=1),
        Choice(layer=3, site="other", index=1, name="b", backbone_parameters=2),
    ]
    arm = ArmRecord(name="hero", method="hero", scope="token", choices=choices)

    def row(request: str, position: int, site: str, choice: int) -> dict[str, object]:
        return {
            "arm": "hero", "step": 0, "phase": "prefill", "request": request, "position": position, "layer": 3,
            "site": site, "choices": [choice], "weights": [1.0], "gate": 0.1, "rows": 1, "cell": "quality",
        }  # fmt: skip

    gates = [row("a", p, "ffn", int(p > 2)) for p in range(4)] + [row("b", p, "ffn", int(p > 0)) for p in range(5)]
    gates += [row("a", 0, "other", 0)]
    found = skips(write_run(tmp_path / "run", [arm], {"gates": gates}), "hero")
    assert found.columns == [(3, "ffn")]
    assert found.share.tolist() == [[0.75], [0.2]]
    assert found.skipped.tolist() == [[True], [False]]
    assert np.isnan(found.tokens).all()
    assert found.domains == [None, None]


def test_an_input_without_all_its_decisions_is_left_out_and_counted(tmp_path: Path) -> None:
    extra = {
        "arm": "routed", "step": 99, "phase": "prefill", "request": "cut", "position": -1, "layer": 0, "site": "block",
        "choices": [1], "gate": 1.0, "rows": 5,
    }  # fmt: skip
    run = run_of(tmp_path, more={"gates": [extra]})
    found = skips(run, "routed")
    assert (len(found.requests), found.incomplete) == (10, 1)
    (note,) = eligibility(run)["note"]
    assert note == "1 input left out, of which not every layer is recorded"


def test_skip_rates_by_domain_and_phase(tmp_path: Path) -> None:
    frame = skip_rates(run_of(tmp_path))
    assert list(frame.columns) == list(RATE_COLUMNS)
    assert frame["phase"].drop_duplicates().tolist() == ["prefill", "mixed"]
    table = frame[frame["phase"] == "prefill"].pivot(index="layer", columns="domain", values="skip_rate")
    assert table["all"].tolist() == pytest.approx([0, 1, 0.3, 0.7, 0.5])
    assert table["math"].tolist() == pytest.approx([0, 1, 0, 4 / 6, 3 / 6])
    assert table["code"].tolist() == pytest.approx([0, 1, 3 / 4, 3 / 4, 2 / 4])
    assert frame.groupby("domain")["requests"].first().to_dict() == {"all": 10, "math": 6, "code": 4}
    one = frame[(frame["phase"] == "mixed") & (frame["domain"] == "all") & (frame["layer"] == 3)].iloc[0]
    sample = np.array([r[3] == "0" for r in ROUTES], float)
    slow = stats.bootstrap((sample,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(1))
    assert [one["low"], one["high"]] == pytest.approx([*slow.confidence_interval], abs=0.1)  # steps of 0.1
    few = frame[frame["domain"] == "code"]
    assert few[["low", "high"]].isna().all(axis=None)


def test_rates_of_every_cell_the_timed_ones_first(tmp_path: Path) -> None:
    timed = {
        "arm": "routed", "step": 500, "phase": "decode", "request": "r0", "position": -1, "site": "block",
        "gate": 0.1, "rows": 1, "cell": "cell",
    }  # fmt: skip
    gates = [timed | {"layer": layer, "choices": [layer % 2]} for layer in range(5)]
    frame = skip_rates(
        run_of(tmp_path, cells=[CellRecord(name="cell", phase="decode", batch=1, length=4)], more={"gates": gates})
    )
    assert frame["cell"].drop_duplicates().tolist() == ["cell", "quality"]
    assert frame.loc[frame["cell"] == "cell", "skip_rate"].tolist() == [1, 0, 1, 0, 1]


def test_eligible_is_not_executed(tmp_path: Path) -> None:
    (line,) = eligibility(run_of(tmp_path)).to_dict("records")
    assert list(line) == list(ELIGIBILITY_COLUMNS)
    assert (line["arm"], line["requests"], line["layers"]) == ("routed", 10, 5)
    assert (line["starts_skipping"], line["ever_skipped"], line["always_skipped"], line["varying"]) == (2, 4, 1, 3)
    assert line["patterns"] == len(set(ROUTES)) == 6
    assert line["eligible_share"] == pytest.approx(4 / 5)
    # 10 + 3 + 7 + 5 of 50.
    assert (line["executed_share"], line["layers_skipped"]) == (pytest.approx(0.5), pytest.approx(2.5))
    shares = np.array([route.count("0") / 5 for route in ROUTES])
    slow = stats.bootstrap((shares,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(0))
    assert [line["low"], line["high"]] == pytest.approx([*slow.confidence_interval], abs=0.02)


def test_eligibility_without_a_start_or_without_decisions_says_so(tmp_path: Path) -> None:
    run = write_decisions(tmp_path / "run", INPUTS, [Arm("cut", ["01111"] * 10), Arm("silent")])
    cut, silent = eligibility(run).to_dict("records")
    assert pd.isna(cut["starts_skipping"])
    assert (cut["patterns"], cut["varying"]) == (1, 0)
    assert [cut["executed_share"], cut["low"], cut["high"]] == pytest.approx([0.2, 0.2, 0.2])
    assert (silent["requests"], silent["note"]) == (0, "no decisions were recorded here")
    assert math.isnan(silent["executed_share"])


def test_flip_rates_are_the_share_that_leaves_the_majority(tmp_path: Path) -> None:
    frame = flip_rates(run_of(tmp_path), "routed")
    assert list(frame.columns) == list(FLIP_COLUMNS)
    assert frame["majority"].tolist() == ["run", "skip", "run", "skip", "run"]
    assert frame["differ"].tolist() == [0, 0, 3, 3, 5]
    assert frame["flip_rate"].tolist() == pytest.approx([0, 0, 0.3, 0.3, 0.5])
    assert frame.loc[frame["flip_rate"] == 0, ["low", "high"]].eq(0).all(axis=None)
    assert (frame["high"] <= 0.5).all()
    sample = np.array([1.0] * 3 + [0.0] * 7)
    slow = stats.bootstrap(
        (sample,), lambda x, axis: np.minimum(x.mean(axis), 1 - x.mean(axis)), method="percentile", n_resamples=9999,
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert frame.loc[2, ["low", "high"]].tolist() == pytest.approx([*slow], abs=0.1)
    assert flip_rates(run_of(tmp_path / "other"), "routed", "nowhere").empty


def test_logits_are_shown_beside_their_start(tmp_path: Path) -> None:
    inputs = [Input(f"i{k}") for k in range(8)]
    logits = [[0.5, -1.0 + k / 2] for k in range(8)]  # layer 1: −1, −0.5, 0, 0.5, …, 2.5
    arm = Arm("routed", ["11"] * 8, starts=[1.0, -1.0], logits=logits)
    frame = drift(write_decisions(tmp_path / "run", inputs, [arm]), "routed")
    assert list(frame.columns) == list(DRIFT_COLUMNS)
    first, second = frame.to_dict("records")
    assert (first["start"], first["mean"], first["drift"], first["low"], first["high"]) == (1.0, 0.5, -0.5, -0.5, -0.5)
    assert (first["standard_deviation"], first["crossed"], first["requests"]) == (0.0, 0.0, 8)
    assert (second["start"], second["mean"], second["drift"]) == (-1.0, 0.75, 1.75)
    assert (second["lowest"], second["highest"]) == (-1.0, 2.5)
    # Deviations ±0.25, ±0.75, ±1.25, ±1.75: squares add up to 10.5, over n − 1 = 7.
    assert second["standard_deviation"] == pytest.approx(math.sqrt(1.5))
    assert second["crossed"] == 5 / 8  # 0.5, 1, …, 2.5; a logit of 0 skips, as the start does
    slow = stats.bootstrap(
        (np.array([row[1] + 1 for row in logits]),), np.mean, method="percentile", n_resamples=9999,
        rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert [second["low"], second["high"]] == pytest.approx([*slow], abs=0.1)


def test_no_drift_without_a_start_or_signals(tmp_path: Path) -> None:
    run = write_decisions(tmp_path / "run", INPUTS, [Arm("a", ROUTES), Arm("b", ROUTES, starts=STARTS)])
    for arm in ("a", "b", "dense"):
        assert drift(run, arm).empty
        assert list(drift(run, arm).columns) == list(DRIFT_COLUMNS)
