"""Arms at the rates they executed: rates counted by hand, matches said, quality compared item by item."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analysis.matched import compared, executed_skip, matched
from analysis.quality import ALIKE, UNDECIDED, WORSE
from profiler.store import Run
from tests.analysis.token_run import Token, arm, calibrated, write_tokens

ITEMS = 10


def tokens(skipping: int, hits: int = 0) -> list[Token]:
    """Ten inputs of ten tokens; of their 200 decisions the first so many skip, and so many tokens are right."""
    found = []
    for n in range(100):
        gates = tuple(0.2 if 2 * n + k < skipping else 0.8 for k in (0, 1))
        found.append(Token(f"i{n // 10}", n % 10, (gates[0], gates[1]), hit=n < hits))
    return found


def run_of(folder: Path, rates: dict[str, int], nll: dict[str, float], **more: dict[str, Any]) -> Run:
    return write_tokens(
        folder / "run",
        {name: tokens(skipping, 25) for name, skipping in rates.items()},
        [arm(name, **more.get(name, {})) for name in rates],
        scores={name: {f"i{k}": value * (1 + k / 100) for k in range(ITEMS)} for name, value in nll.items()},
    )


def test_rates_are_rows_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"full": 120}, {})
    assert executed_skip(run, "full") == (pytest.approx(0.6), 200)
    rate, pairs = executed_skip(run, "dense")
    assert (math.isnan(rate), pairs) == (True, 0)


def test_each_arm_stands_against_the_first_that_skips(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"full": 120, "near": 121, "far": 130},
        {"dense": 20.0, "full": 21.0, "near": 23.0, "far": 21.0},
        full={"calibration": calibrated(0.6, 0.599), "options": {"threshold": 0.52}},
        near={"caveat": "trained as variant full, run as no_path", "options": {"variant": "no_path"}},
        far={"synthetic": "forced", "options": {"gates": 1}},
    )
    frame = matched(run).set_index("arm")
    assert frame["executed_skip"].tolist() == pytest.approx([0.6, 0.605, 0.65])
    assert frame["against"].tolist() == ["full", "full", "full"]
    assert frame["gap"].tolist() == pytest.approx([0, 0.005, 0.05])
    assert frame["like_rates"].tolist() == [True, True, False]
    assert frame.loc["full", ["threshold", "wanted", "calibrated"]].tolist() == [0.52, 0.6, 0.599]
    # Mean of 1 + k ÷ 100 over ten items is 1.045, and each has ten tokens.
    assert frame.loc["near", "ratio"] == pytest.approx(math.exp((23 - 21) * 1.045 / 10))
    assert frame.loc["full", "to_dense"] == pytest.approx(math.exp(1 * 1.045 / 10))
    assert frame.loc["near", "right"] == 0.25
    # Ten items all worse: two of 2^10 flips are as far, twice corrected for two arms; an equal one shows nothing.
    assert frame.loc["near", "p"] == pytest.approx(2 / 2**10, abs=1e-3)
    assert frame.loc["near", "p_corrected"] == pytest.approx(2 * frame.loc["near", "p"])
    assert frame["verdict"].tolist() == ["the reference", WORSE, ALIKE]
    assert frame.loc["far", "note"] == "not at the same rate: skips 5.0 points more; synthetic route"
    assert frame.loc["near", "note"] == "trained as variant full, run as no_path"
    about = compared(run)
    assert [said.replace("\u00a0", " ") for said in about.sentences] == [
        "far skipped 65.0 % of pairs of token and routed layer and full 60.0 %: more than 1 point apart, so this is no "
        "fair comparison.",
        "Thresholds were found on the held-out inputs themselves, so that rates match there, from decisions alone.",
    ]


def test_arms_that_match_are_said_to(tmp_path: Path) -> None:
    about = compared(run_of(tmp_path, {"full": 120, "near": 119}, {}, near={"options": {"variant": "no_path"}}))
    assert [said.replace("\u00a0", " ") for said in about.sentences] == [
        "Every arm skipped within 1 point of the one it stands against, and can be read against it; all skipped 59.5 "
        "to 60.0 % of pairs of token and routed layer."
    ]
    assert about.table["verdict"].tolist() == ["the reference", "not measured"]
    assert about.table["perplexity"].isna().all()


def test_an_arm_at_several_rates_is_one_series_and_others_stand_against_the_nearest(tmp_path: Path) -> None:
    def options(variant: str, threshold: float) -> dict[str, Any]:
        return {"options": {"variant": variant, "threshold": threshold, "gates": "router"}}

    run = run_of(
        tmp_path,
        {"low": 60, "high": 140, "other": 130, "lower": 64},
        {"low": 21.0, "high": 25.0, "other": 25.0, "lower": 21.0},
        low=options("full", 0.4),
        high=options("full", 0.6),
        other=options("no_path", 0.6),
        lower=options("no_path", 0.4),
    )
    frame = matched(run).set_index("arm")
    assert frame["series"].tolist() == ["low", "low", "other", "other"]
    assert frame["against"].tolist() == ["low", "high", "high", "low"]
    assert frame["gap"].tolist() == pytest.approx([0, 0, -0.05, 0.02])
    assert frame["verdict"].tolist()[:2] == ["the reference"] * 2
    assert frame["to_dense"].isna().all()  # dense was not scored


def test_few_items_are_no_verdict(tmp_path: Path) -> None:
    found = tokens(120)[:30]
    scores = {name: {f"i{k}": 20.0 for k in range(3)} for name in ("full", "other")}
    arms = [arm("full"), arm("other", options={"variant": "no_path"})]
    run = write_tokens(tmp_path / "run", {"full": found, "other": found}, arms, scores=scores)
    assert matched(run)["verdict"].tolist() == ["the reference", UNDECIDED]


def test_a_run_without_held_out_decisions_has_nothing_to_match(tmp_path: Path) -> None:
    run = write_tokens(tmp_path / "run", {"full": tokens(120)}, [arm("full")], cell="cell")
    assert matched(run).empty
    assert not compared(run).worth_showing
