"""Agreement of patterns over runs, counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from analysis.agreement import ACROSS_COLUMNS, AGREEMENT_COLUMNS, across, agreement
from profiler.errors import InputError
from tests.analysis.decisions_run import Arm, Input, write_decisions

INPUTS = [Input(f"i{k}") for k in range(10)]
#: Layers skipped by most: 1 and 2; ever: 1, 2, 3.
FIRST = ["1001"] * 6 + ["1110"] * 4
#: By most: 2; ever: 0 and 2.
SECOND = ["1101"] * 8 + ["0111"] * 2


def test_two_runs_by_hand(tmp_path: Path) -> None:
    a = write_decisions(tmp_path / "a", INPUTS, [Arm("routed", FIRST)])
    b = write_decisions(tmp_path / "b", INPUTS, [Arm("routed", SECOND)])
    (line,) = agreement([(a, "routed"), (b, "routed")]).to_dict("records")
    assert list(line) == list(AGREEMENT_COLUMNS)
    assert (line["first"], line["second"], line["cell"]) == ("a: routed", "b: routed", "quality")
    assert line["jaccard_ever"] == 1 / 4  # {1, 2, 3} and {0, 2}
    assert line["jaccard_majority"] == 1 / 2  # {1, 2} and {2}
    # Inputs 0–5: 1001 and 1101 agree in 3 of 4. 6, 7: 1110 and 1101 in 2. 8, 9: 1110 and 0111 in 2.
    assert line["agreement"] == pytest.approx((6 * 3 + 2 * 2 + 2 * 2) / 40)
    assert line["requests"] == 10
    # Rates 0, .6, .6, .4 and .2, 0, .8, 0: .8 + .4 + (.48 + .08) + .6, a quarter of it.
    assert line["by_chance"] == pytest.approx(2.36 / 4)
    each = np.array([0.75] * 6 + [0.5] * 4)
    slow = stats.bootstrap((each,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(0))
    assert [line["low"], line["high"]] == pytest.approx([*slow.confidence_interval], abs=0.026)
    assert line["note"] == ""


def test_only_the_same_text_is_compared(tmp_path: Path) -> None:
    a = write_decisions(tmp_path / "a", INPUTS, [Arm("routed", FIRST)])
    moved = [Input("i0", tokens=11), Input("i1", rank=7.0), *INPUTS[2:9], Input("new")]
    b = write_decisions(tmp_path / "b", moved, [Arm("routed", FIRST)])
    (line,) = agreement([(a, "routed"), (b, "routed")]).to_dict("records")
    assert (line["requests"], line["agreement"]) == (7, 1.0)
    assert line["note"] == "2 inputs of the same name and another text left out"
    c = write_decisions(tmp_path / "c", [Input(f"j{k}") for k in range(10)], [Arm("routed", FIRST)])
    (line,) = agreement([(a, "routed"), (c, "routed")]).to_dict("records")
    assert (line["requests"], line["note"], line["jaccard_ever"]) == (0, "no input in common", 1.0)
    assert np.isnan(line["agreement"])


def test_arms_that_never_skip_have_no_overlap_to_speak_of(tmp_path: Path) -> None:
    run = write_decisions(tmp_path / "a", INPUTS, [Arm("x", ["1111"] * 10), Arm("y", ["1111"] * 10), Arm("z", FIRST)])
    frame = agreement([(run, "x"), (run, "y"), (run, "z")])
    assert frame["first"].str[-1].tolist() == ["x", "x", "y"]
    assert frame["second"].str[-1].tolist() == ["y", "z", "z"]
    assert np.isnan(frame.loc[0, "jaccard_ever"])
    assert frame.loc[1, "jaccard_ever"] == 0
    assert frame["agreement"].tolist() == pytest.approx([1.0, 1 - 16 / 40, 1 - 16 / 40])
    assert frame["by_chance"].tolist() == pytest.approx([1.0, 1 - 16 / 40, 1 - 16 / 40])


def test_models_of_another_depth_are_not_compared(tmp_path: Path) -> None:
    a = write_decisions(tmp_path / "a", INPUTS, [Arm("routed", FIRST)])
    b = write_decisions(tmp_path / "b", INPUTS, [Arm("routed", ["10"] * 10)])
    with pytest.raises(InputError, match="a: routed decides about 4 layers and b: routed about 2"):
        agreement([(a, "routed"), (b, "routed")])


def test_layer_by_layer_over_three_seeds(tmp_path: Path) -> None:
    third = ["1011"] * 3 + ["1111"] * 7
    runs = [
        (write_decisions(tmp_path / str(k), INPUTS, [Arm("routed", routes)]), "routed")
        for k, routes in enumerate((FIRST, SECOND, third))
    ]
    frame = across([*runs, (write_decisions(tmp_path / "none", INPUTS, [Arm("routed")]), "routed")])
    assert list(frame.columns) == list(ACROSS_COLUMNS)
    assert frame["layer"].tolist() == [0, 1, 2, 3]
    assert frame["runs"].tolist() == [3, 3, 3, 3]
    assert frame["ever_skipped_in"].tolist() == [1, 2, 2, 1]
    assert frame["majority_skips_in"].tolist() == [0, 1, 2, 0]
    assert frame["mean_rate"].tolist() == pytest.approx([0.2 / 3, 0.9 / 3, 1.4 / 3, 0.4 / 3])
    assert frame["lowest_rate"].tolist() == pytest.approx([0, 0, 0, 0])
    assert frame["highest_rate"].tolist() == pytest.approx([0.2, 0.6, 0.8, 0.4])
