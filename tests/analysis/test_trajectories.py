"""Trajectories of tokens, on runs whose every figure was worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import trajectories
from analysis.token_paths import TokenPaths, cells_with_paths, token_arms, token_paths
from analysis.trajectories import breakdown, costs, forgetting, groups, profile, token_mean
from profiler.records import ArmRecord
from profiler.store import Run
from tests.analysis.token_run import Token, arm, write_tokens

#: Request a: gates of layer 1 are 0.2, 0.6, 0.9 and of layer 2 0.7, 0.4, 0.8. Request b: 0.1 and 0.5.
TOKENS = [
    Token("a", 0, (0.2, 0.7), (0.1, 0.2), occurrences=5),
    Token("a", 1, (0.6, 0.4), (0.3, 0.4), hit=True, occurrences=1),
    Token("a", 2, (0.9, 0.8), (0.5, None), hit=False, occurrences=70),
    Token("b", 0, (0.1, 0.5), (0.7, 0.8), hit=True, reference=False, occurrences=2),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    domains = {"a": "math", "b": "prose"}
    return write_tokens(tmp_path_factory.mktemp("tokens") / "run", {"mine": TOKENS}, [arm("mine")], domains)


@pytest.fixture(scope="module")
def paths(run: Run) -> TokenPaths:
    return token_paths(run, "mine")


def test_paths_are_what_was_recorded(paths: TokenPaths) -> None:
    assert (paths.layers, paths.requests, paths.domains) == ([1, 2], ["a", "b"], ["math", "prose"])
    assert (paths.owner.tolist(), paths.position.tolist(), paths.incomplete) == ([0, 0, 0, 1], [0, 1, 2, 0], 0)
    assert paths.signals["gate"] == pytest.approx(np.array([[0.2, 0.7], [0.6, 0.4], [0.9, 0.8], [0.1, 0.5]]))
    assert paths.signals["p"][:2] == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert np.isnan(paths.signals["p"][2, 1])
    assert paths.ran.tolist() == [[0, 1], [1, 0], [1, 1], [0, 1]]
    assert paths.share.tolist() == [0.5, 0.5, 1, 0.5]
    assert paths.occurrences.tolist() == [5, 1, 70, 2]
    assert paths.hit[1:].tolist() == [1, 0, 1]
    assert np.isnan(paths.hit[0])
    assert paths.reference.tolist() == [False, True, True, False]
    # 370 always; an FFN and an adapter 67, two FFNs 120; 6 a position attended.
    assert paths.flops.tolist() == [370 + 67 + 6, 370 + 67 + 12, 370 + 120 + 18, 370 + 67 + 6]
    assert paths.full_flops.tolist() == [486, 492, 498, 486]
    assert paths.means["p"].tolist() == pytest.approx([0.15, 0.35, 0.5, 0.75])  # of what is known


def test_quartiles_are_values_that_were_recorded(paths: TokenPaths) -> None:
    frame = profile(paths)
    of = {(row.signal, row.layer): row for row in frame.itertuples()}
    # 0.1 0.2 0.6 0.9: a quarter is at or below 0.1, half at or below 0.2, three quarters at or below 0.6.
    row = of["gate", 1]
    assert (row.lower, row.median, row.upper) == pytest.approx((0.1, 0.2, 0.6))
    assert (row.depth, row.tokens, row.inputs) == (1, 4, 2)
    assert math.isnan(row.low)  # two inputs are too few to be resampled
    assert (of["p", 2].tokens, of["p", 2].median) == (3, pytest.approx(0.4))
    by_domain = profile(paths, "domain")
    assert by_domain.loc[by_domain["signal"] == "gate", ["group", "median"]].values.tolist() == [
        ["math", pytest.approx(0.6)],
        ["math", pytest.approx(0.7)],
        ["prose", pytest.approx(0.1)],
        ["prose", pytest.approx(0.5)],
    ]


def test_groups_hold_the_tokens_they_name(paths: TokenPaths) -> None:
    def members(by: str) -> dict[str, list[int]]:
        return {group.name: np.flatnonzero(group.chosen).tolist() for group in groups(paths, by)}

    assert members("position") == {"0": [0, 3], "1 to 15": [1, 2]}
    assert members("token frequency") == {"1": [1], "2 to 3": [3], "4 to 15": [0], "64 or more": [2]}
    # b's scored token is no answer that was asked for, so it is neither right nor wrong.
    assert members("next token") == {"right": [1], "wrong": [2]}


def test_without_references_every_scored_token_counts(tmp_path: Path) -> None:
    tokens = [
        Token("a", 0, (0.2, 0.7), hit=True, reference=False),
        Token("a", 1, (0.2, 0.7), hit=False, reference=False),
    ]
    found = token_paths(write_tokens(tmp_path / "run", {"mine": tokens}, [arm("mine")]), "mine")
    assert [group.name for group in groups(found, "next token")] == ["right", "wrong"]


def test_means_by_group(paths: TokenPaths) -> None:
    frame = breakdown(paths).set_index(["by", "group", "target"])
    # Means over depth of the gate: 0.45, 0.5, 0.85, 0.3.
    assert frame.loc[("all", "all", "gate"), "mean"] == pytest.approx(0.525)
    assert frame.loc[("domain", "math", "gate"), "mean"] == pytest.approx(0.6)
    assert frame.loc[("position", "1 to 15", "share that ran"), "mean"] == 0.75
    assert frame.loc[("next token", "wrong", "gate"), "mean"] == pytest.approx(0.85)
    assert frame.loc[("all", "all", "p"), ["tokens", "inputs"]].tolist() == [4, 2]


def test_costs_are_means_over_inputs_and_sums_over_tokens(paths: TokenPaths) -> None:
    frame = costs(paths).set_index("domain")
    assert frame.index.tolist() == ["all", "math", "prose"]
    everyone = frame.loc["all"]
    assert everyone["ran_share"] == pytest.approx((2 / 3 + 0.5) / 2)  # a: (0.5 + 0.5 + 1) ÷ 3; b: 0.5
    assert (everyone["lowest"], everyone["highest"]) == (0.5, pytest.approx(2 / 3))
    assert everyone["flops_per_token"] == (443 + 449 + 508 + 443) / 4
    assert everyone["flop_share"] == pytest.approx((443 + 449 + 508 + 443) / (486 + 492 + 498 + 486))
    assert frame.loc["prose", ["inputs", "tokens"]].tolist() == [1, 1]


def test_half_lives(run: Run, tmp_path: Path) -> None:
    frame = forgetting(run, "mine")
    assert frame["half_life_layers"].tolist() == [1.0, math.inf]  # ρ = 0.5 halves in one layer, ρ = 1 never
    assert frame["depth"].tolist() == [1, 2]
    assert trajectories._half_life(0.98) == pytest.approx(34.3, abs=0.05)
    assert trajectories._half_life(0.0) == 0
    old = write_tokens(tmp_path / "old", {"mine": TOKENS}, [arm("mine", constants={})])
    assert forgetting(old, "mine").empty


def rewrite(table: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change the rows of a table's one part."""
    (part,) = table.glob("*.parquet")
    before = pq.read_table(part)
    pq.write_table(pa.Table.from_pandas(change(before.to_pandas()), before.schema, preserve_index=False), part)


def test_a_token_of_which_a_layer_is_missing_is_left_out(tmp_path: Path) -> None:
    run = write_tokens(tmp_path / "run", {"mine": TOKENS[:3]}, [arm("mine", signals={})])
    rewrite(tmp_path / "run" / "gates", lambda whole: whole[~((whole["position"] == 1) & (whole["layer"] == 2))])
    found = token_paths(Run(tmp_path / "run"), "mine")
    assert (found.position.tolist(), found.incomplete) == ([0, 2], 1)
    assert list(found.signals) == ["gate"]
    assert len(token_paths(run, "dense")) == 0


def test_a_decision_recorded_twice_counts_once(tmp_path: Path) -> None:
    write_tokens(tmp_path / "run", {"mine": TOKENS[:3]}, [arm("mine")])

    def again(whole: pd.DataFrame) -> pd.DataFrame:
        value = "gate" if "gate" in whole else "p"
        return pd.concat([whole.assign(**{"step": whole["step"] + 1, value: 0.99}), whole])

    rewrite(tmp_path / "run" / "gates", again)
    rewrite(tmp_path / "run" / "signals-hero", again)
    found = token_paths(Run(tmp_path / "run"), "mine")
    assert found.signals["gate"] == pytest.approx(np.array([[0.2, 0.7], [0.6, 0.4], [0.9, 0.8]]))
    assert found.signals["p"][:2] == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.4]]))


def test_only_arms_that_decide_for_tokens_have_paths(run: Run, tmp_path: Path) -> None:
    assert token_arms(run) == ["mine"]
    assert cells_with_paths(run, "mine") == ["quality"]
    assert cells_with_paths(run, "dense") == []
    other = write_tokens(tmp_path / "run", {"mine": TOKENS}, [arm("mine")], cell="cell")
    assert cells_with_paths(other, "mine") == ["cell"]
    sequence = ArmRecord(**{**arm("mine").model_dump(), "scope": "sequence"})
    assert token_arms(write_tokens(tmp_path / "seq", {"mine": TOKENS}, [sequence])) == []


def test_intervals_resample_inputs_with_all_their_tokens() -> None:
    # Nine inputs of one value each, however many tokens they have: the mean over tokens of two kinds of inputs.
    owner = np.repeat(np.arange(9), [1, 100] * 4 + [1])
    values = np.where(np.isin(owner, [1, 3, 5, 7]), 1.0, 0.0)
    found = token_mean(values, owner)
    assert found.value == pytest.approx(400 / 405)
    assert found.n == 9
    # A resample without any long input has mean 0, which happens with probability (5 ÷ 9)^9 = 0.5 %; with one of them
    # among eight short ones it is 100 ÷ 108. So the lower end is near the latter, not near 1.
    assert 0.9 < found.low < 0.97
    assert found.high > 0.99


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_interval_of_a_median_is_as_wide_as_inputs_differ(spread: float) -> None:
    generator = np.random.default_rng(1)
    owner = np.repeat(np.arange(40), 50)
    values = spread * np.repeat(generator.normal(size=40), 50) + 0.01 * generator.normal(size=2000)
    found = trajectories._median(values, owner.astype(np.intp))
    assert found.low <= found.value <= found.high
    # The standard error of a median of 40 normal values is about 1.25 ÷ √40 = 0.2.
    width = found.high - found.low
    assert width < 0.005 if spread == 0 else 0.3 < width < 1.5
