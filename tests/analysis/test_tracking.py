"""What decisions follow: a router that counts tokens, one that knows domains, and what cannot be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.tracking import CONFOUND_COLUMNS, TRACK_COLUMNS, confounds, tracks
from profiler.errors import InputError
from tests.analysis.decisions_run import Arm, Input, write_decisions

N = 60


def material(seed: int = 0) -> tuple[list[Input], np.ndarray, list[str]]:
    """Inputs whose domain follows their length: math is short, prose is long, code is in between."""
    rng = np.random.default_rng(seed)
    length = rng.permutation(np.arange(20, 20 + N))
    noisy = length + rng.normal(scale=12, size=N)
    domains = ["math" if v < 40 else "code" if v < 60 else "prose" for v in noisy]
    nll = rng.normal(loc=20, scale=4, size=N)
    inputs = [
        Input(f"i{k}", domains[k], int(length[k]), float(rng.normal(500, 50)), {"dense": float(nll[k])})
        for k in range(N)
    ]
    return inputs, length, domains


def routes(*skips: np.ndarray) -> list[str]:
    """One layer a given vector of bools (True skips), and two more that all inputs run and skip."""
    return ["".join("0" if skip[k] else "1" for skip in skips) + "10" for k in range(N)]


def run_of(tmp_path: Path, inputs: list[Input], skipping: list[str], **more: Any) -> Any:
    return write_decisions(tmp_path / "run", inputs, [Arm("routed", skipping)], **more)


def table(frame: pd.DataFrame, target: str) -> pd.DataFrame:
    return frame[frame["target"] == target].set_index("tracker")


def test_a_router_that_counts_tokens_is_not_taken_for_one_that_knows_domains(tmp_path: Path) -> None:
    inputs, length, domains = material()
    noise = np.random.default_rng(3).normal(scale=12, size=(2, N))
    run = run_of(tmp_path, inputs, routes(length + noise[0] > 45, length + noise[1] > 60))
    share = table(tracks(run, "routed"), "share of layers skipped")
    expected = ["length", "perplexity", "mean token rank", *(f"domain {d}" for d in dict.fromkeys(domains))]
    assert share.index.tolist() == expected
    assert share.loc["length", "verdict"] == "related"
    assert share.loc["length", "rho"] > 0.6
    assert (share.drop("length")["verdict"] == "no relation shown").all()
    assert share["held_fixed"].tolist() == ["nothing", *["length"] * 5]
    # Without length held fixed, it would have been a relation.
    prose = np.array([d == "prose" for d in domains], float)
    assert stats.spearmanr(length + noise[1] > 60, prose).pvalue < 0.001
    followed = confounds(run, "routed")
    assert list(followed.columns) == list(CONFOUND_COLUMNS)
    one = followed.set_index("tracker").loc["domain prose"]
    assert one["rho"] == pytest.approx(stats.spearmanr(length, prose).statistic)
    assert 0.3 < one["low"] < one["rho"] < one["high"]


def test_a_router_that_knows_a_domain_is_seen_with_length_held_fixed(tmp_path: Path) -> None:
    inputs, _, domains = material(1)
    prose = np.array([d == "prose" for d in domains])
    coin = np.random.default_rng(7).random(N) < 0.5
    frame = tracks(run_of(tmp_path, inputs, routes(prose, coin)), "routed")
    assert list(frame.columns) == list(TRACK_COLUMNS)
    layers = frame[frame["target"] == "layer skipped"]
    assert layers["layer"].drop_duplicates().tolist() == [0, 1]  # the others are the same for every input
    assert set(layers["correction"]) == {"Benjamini–Hochberg"}
    first = layers[layers["layer"] == 0].set_index("tracker")
    assert first.loc["domain prose", "rho"] == pytest.approx(1.0)
    assert first.loc["domain prose", "verdict"] == "related"
    assert first.loc["domain prose", ["low", "high"]].tolist() == pytest.approx([1.0, 1.0])
    assert first.loc["perplexity", "verdict"] == "no relation shown"
    assert (layers.loc[layers["layer"] == 1, "verdict"] == "no relation shown").all()
    share = table(frame, "share of layers skipped")
    assert set(share["correction"]) == {"Holm"}
    assert share.loc["domain prose", "verdict"] == "related"


def test_figures_equal_an_independent_computation(tmp_path: Path) -> None:
    inputs, length, _ = material(2)
    difficulty = np.array([i.nll["dense"] / 10 for i in inputs])
    rank = np.array([i.rank for i in inputs])
    skip = difficulty + 0.01 * length > np.median(difficulty + 0.01 * length)
    frame = tracks(run_of(tmp_path, inputs, routes(skip, rank > 500)), "routed")
    share = np.array([(int(a) + int(b) + 1) / 4 for a, b in zip(skip, rank > 500, strict=True)])
    for target, values in (("share of layers skipped", share), ("layer skipped", skip.astype(float))):
        rows = frame[(frame["target"] == target) & (frame["layer"].isna() | (frame["layer"] == 0))].set_index("tracker")
        for tracker, x in (("perplexity", difficulty), ("mean token rank", rank)):
            precision = np.linalg.inv(stats.spearmanr(np.column_stack([values, x, length])).statistic)
            expected = -precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1])
            assert rows.loc[tracker, "rho"] == pytest.approx(expected)
            # Student's t of a partial correlation, which the permutation test should come near.
            t = expected * np.sqrt((N - 3) / (1 - expected**2))
            assert rows.loc[tracker, "p"] == pytest.approx(2 * stats.t.sf(abs(t), N - 3), abs=0.02)
        assert rows.loc["length", "rho"] == pytest.approx(stats.spearmanr(values, length).statistic)
    assert frame["n"].eq(N).all()


def test_corrections_are_over_their_own_family(tmp_path: Path) -> None:
    inputs, _, _ = material(3)
    rng = np.random.default_rng(0)
    frame = tracks(run_of(tmp_path, inputs, routes(*(rng.random(N) < 0.4 for _ in range(4)))), "routed")
    layers = frame[frame["target"] == "layer skipped"]
    assert len(layers) == 4 * 6
    assert layers["p_corrected"].to_numpy() == pytest.approx(stats.false_discovery_control(layers["p"]))
    share = frame[frame["target"] != "layer skipped"].sort_values("p", kind="stable")
    by_hand = np.maximum.accumulate(np.minimum(1, share["p"].to_numpy() * np.arange(6, 0, -1)))
    assert share["p_corrected"].to_numpy() == pytest.approx(by_hand)
    assert (frame["verdict"] == "no relation shown").all()


def test_two_domains_are_one_comparison(tmp_path: Path) -> None:
    inputs, length, domains = material(4)
    two = [Input(i.name, "math" if i.domain == "math" else "other", i.tokens, i.rank, i.nll) for i in inputs]
    frame = tracks(run_of(tmp_path, two, routes(length > 50)), "routed")
    shown = [t for t in frame["tracker"].unique() if t.startswith("domain")]
    assert shown == ["domain " + ("math" if domains[0] == "math" else "other")]


def test_what_cannot_be_tested_is_listed_with_its_reason(tmp_path: Path) -> None:
    inputs, length, _ = material(5)
    fixed = tracks(run_of(tmp_path, inputs, ["1101"] * N), "routed")
    assert len(fixed) == 6  # no layer varies, so no layer is tested
    assert set(fixed["verdict"]) == {"undefined"}
    assert set(fixed["note"]) == {"every input skips alike"}
    assert fixed[["rho", "p", "p_corrected", "low"]].isna().all(axis=None)

    bare = [Input(i.name, None, 64, i.rank) for i in inputs]
    run = write_decisions(tmp_path / "bare", bare, [Arm("routed", routes(length > 50))])
    share = table(tracks(run, "routed"), "share of layers skipped")
    assert share["note"].to_dict() == {
        "length": "the same for every input",
        "perplexity": "the run has no score of these inputs",
        "mean token rank": "",
        "domain": "the inputs are not of several known domains",
    }
    assert share.loc["mean token rank", "verdict"] == "no relation shown"
    assert confounds(run, "routed").set_index("tracker").loc["domain", "note"].startswith("the inputs are not")

    few = write_decisions(tmp_path / "few", inputs[:5], [Arm("routed", routes(length > 50)[:5])])
    assert set(tracks(few, "routed")["verdict"]) == {"undefined"}
    assert "5 inputs, and 8 are needed" in set(tracks(few, "routed")["note"])

    nothing = write_decisions(tmp_path / "nothing", inputs, [Arm("routed")])
    assert tracks(nothing, "routed").empty
    with pytest.raises(InputError, match="has no arm 'who'"):
        tracks(nothing, "who")


def test_perplexity_is_the_twins_and_only_of_the_held_out_cell(tmp_path: Path) -> None:
    inputs, _, _ = material(6)
    own = [
        Input(i.name, i.domain, i.tokens, i.rank, {"dense": i.nll["dense"], "routed": float(k)})
        for k, i in enumerate(inputs)
    ]
    skip = np.array([i.nll["dense"] for i in inputs]) > 20
    share = table(tracks(run_of(tmp_path, own, routes(skip)), "routed"), "share of layers skipped")
    assert share.loc["perplexity", "rho"] > 0.8
    other = write_decisions(tmp_path / "cell", own, [Arm("routed", routes(skip))], cell="cell")
    share = table(tracks(other, "routed", "cell"), "share of layers skipped")
    assert share.loc["perplexity", "note"] == "the run has no score of these inputs"
    assert share.loc["mean token rank", "n"] == N


def test_the_same_seed_gives_the_same_table(tmp_path: Path) -> None:
    inputs, length, _ = material(7)
    run = run_of(tmp_path, inputs, routes(length > 45))
    pd.testing.assert_frame_equal(tracks(run, "routed", seed=3), tracks(run, "routed", seed=3))
    assert not tracks(run, "routed", seed=3).equals(tracks(run, "routed", seed=4))
