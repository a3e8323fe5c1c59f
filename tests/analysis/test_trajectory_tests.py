"""What trajectories go with: found where it is put in, and not where it is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.token_paths import token_paths
from analysis.trajectory_tests import TEST_COLUMNS, _sign_flip, trajectory_tests
from tests.analysis.token_run import Token, arm, write_tokens

INPUTS, LENGTH = 12, 12


def outcome(folder: Path, gate: Callable[[int, int, bool, np.random.Generator], float]) -> pd.DataFrame:
    """Tests on 12 inputs of 12 tokens, every other next one right; `gate` is that of layer 1."""
    random = np.random.default_rng(3)
    tokens = [
        Token(
            f"i{k}", t, (gate(k, t, (t + k) % 2 == 0, random), float(random.uniform(0.2, 0.4))), hit=(t + k) % 2 == 0,
            occurrences=int(random.integers(1, 50)),
        )
        for k, t in product(range(INPUTS), range(LENGTH))
    ]  # fmt: skip
    domains = {f"i{k}": "math" if k % 3 else "prose" for k in range(INPUTS)}
    run = write_tokens(folder / "run", {"mine": tokens}, [arm("mine")], domains)
    return trajectory_tests(token_paths(run, "mine"))


def row(frame: pd.DataFrame, target: str, against: str, layer: int | None = None) -> pd.Series:
    chosen = (frame["target"] == target) & (frame["against"] == against)
    place = frame["layer"].isna() if layer is None else frame["layer"].eq(layer).fillna(False)
    (found,) = frame[chosen & place].to_dict("records")
    return pd.Series(found)


def test_a_gate_that_is_higher_where_the_model_is_right(tmp_path: Path) -> None:
    frame = outcome(tmp_path, lambda k, t, right, random: 0.1 * right + 0.3 + 0.001 * random.normal())
    assert tuple(frame.columns) == TEST_COLUMNS
    found = row(frame, "gate", "next token", layer=1)
    assert found["value"] == pytest.approx(0.1, abs=0.002)
    assert found["low"] < 0.1 < found["high"]
    assert (found["inputs"], found["tokens"], found["verdict"]) == (12, 144, "related")
    # All 12 inputs agree in sign: of 2^12 flips two are as far, and among so many shuffles they come up so often.
    assert found["p"] == pytest.approx(2 / 2**12, abs=5e-4)
    assert found["correction"] == "Benjamini–Hochberg"
    over_depth = row(frame, "gate", "next token")
    assert (over_depth["verdict"], over_depth["correction"]) == ("related", "Holm")
    assert row(frame, "gate", "next token", layer=2)["verdict"] == "no relation shown"
    assert row(frame, "gate", "position")["verdict"] == "no relation shown"


def test_a_gate_that_rises_with_position(tmp_path: Path) -> None:
    frame = outcome(tmp_path, lambda k, t, right, random: 0.02 * t + 0.1)
    found = row(frame, "gate", "position")
    assert found["value"] > 0.7
    assert found["verdict"] == "related"
    assert found["statistic"] == "mean ρ within inputs"
    assert row(frame, "gate", "token frequency")["verdict"] == "no relation shown"


def test_a_difference_between_inputs_is_none_within_them(tmp_path: Path) -> None:
    frame = outcome(tmp_path, lambda k, t, right, random: 0.2 + 0.02 * (k % 3 == 0) + 0.0001 * random.normal())
    assert row(frame, "gate", "next token")["verdict"] == "no relation shown"
    prose = row(frame, "gate", "domain prose")
    assert prose["statistic"] == "ρ between inputs, length held fixed"
    assert prose["value"] > 0
    with pytest.raises(ValueError, match="not enough values"):
        row(frame, "gate", "domain math")  # of two domains, either says what the other does


def test_what_cannot_be_tested_says_why(tmp_path: Path) -> None:
    frame = outcome(tmp_path, lambda k, t, right, random: 0.3)
    whole = row(frame, "gate", "whole answer")
    assert whole["verdict"] == "undefined"
    assert whole["note"] == "0 of 12 answers are right as a whole"
    few = write_tokens(tmp_path / "few", {"mine": [Token("a", 0, (0.1, 0.2), hit=True)]}, [arm("mine")])
    note = row(trajectory_tests(token_paths(few, "mine")), "gate", "next token")["note"]
    assert note == "0 inputs can be compared within, and 8 are needed"
    assert trajectory_tests(token_paths(few, "dense")).empty


def test_whole_answers_are_compared_between_inputs(tmp_path: Path) -> None:
    tokens = [
        Token(f"i{k}", t, (0.6 if k < 6 else 0.4, 0.3), hit=k < 6 or t > 0)
        for k in range(16)
        for t in range(2 if k < 6 else 4)
    ]
    run = write_tokens(tmp_path / "run", {"mine": tokens}, [arm("mine")])
    found = row(trajectory_tests(token_paths(run, "mine")), "gate", "whole answer")
    assert found["value"] == pytest.approx(0.1)  # (0.6 + 0.3) ÷ 2 − (0.4 + 0.3) ÷ 2
    assert found["note"].startswith("6 of 16 answers are right as a whole; they have 2.0 tokens on average, the others")
    assert found["p"] < 0.01  # 1 of 8,008 ways to choose six


def test_flipping_signs_counts_what_is_as_far() -> None:
    each = np.array([1.0, 2.0, 3.0])
    # Of eight flips only the two that agree reach 6.
    assert _sign_flip(each, seed=0) == pytest.approx(2 / 8, abs=0.02)
    assert _sign_flip(np.zeros(9), seed=0) == 1
