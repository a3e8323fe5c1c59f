"""The page of trajectories, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.token_run import Token, arm, write_tokens
from tests.dashboard.pages import open_page, table

PAGE = "page_trajectories.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose arms decide for tokens, and one whose arm decides for sequences."""
    root = tmp_path_factory.mktemp("runs")
    tokens = [
        Token(f"i{k}", t, (0.6 + 0.001 * t, 0.4), hit=t % 2 == 0, occurrences=t + 1) for k in range(9) for t in range(9)
    ]
    domains = {f"i{k}": "math" if k % 2 else "prose" for k in range(9)}
    other = [Token(t.request, t.position, (0.1, 0.1)) for t in tokens]
    write_tokens(root / "tokens", {"mine": tokens, "other": other}, [arm("mine"), arm("other")], domains)
    write_decisions(root / "sequences", [Input("a")], [Arm("routed", ["101"])])
    return root


def test_the_tokens_of_an_arm(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="tokens")
    assert any("81 tokens of 9 inputs" in caption.value for caption in app.caption)
    assert any(", the history score" in caption.value for caption in app.caption)
    assert len(app.get("plotly_chart")) == 4  # all, right and wrong, domains, forget factors
    costs = table(app, "Lowest input")
    assert costs["Domain"].tolist() == ["all", "prose", "math"]
    assert costs["Lowest input"].tolist() == ["50.0\u00a0%"] * 3
    tests = table(app, "Verdict")
    position = tests[(tests["Of the trajectory"] == "gate, mean over depth") & (tests["Against"] == "position")]
    assert position[["Value", "Verdict"]].values.tolist() == [["1.000", "related"]]
    assert table(app, "Half-life (routed layers)").iloc[:, -1].tolist() == ["1.0", "none: nothing is forgotten"]


def test_another_arm_can_be_picked(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="tokens", arm="other")
    assert table(app, "Lowest input")["Highest input"].tolist() == ["0.0\u00a0%"] * 3


def test_a_run_that_decides_for_sequences_says_there_are_no_paths(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="sequences")
    assert "decides for each token by itself" in app.info[0].value
    assert not app.dataframe
