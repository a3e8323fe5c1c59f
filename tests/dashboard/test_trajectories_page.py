"""The page of trajectories, driven as a reader would."""

from __future__ import annotations

import json
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
    assert any("dual form: at most 7,168 bytes a token row" in caption.value for caption in app.caption)
    assert len(app.get("plotly_chart")) == 4  # all, right and wrong, domains, forget factors
    costs = table(app, "Lowest input")
    assert costs["Domain"].tolist() == ["all", "prose", "math"]
    assert costs["Lowest input"].tolist() == ["50.0\u00a0%"] * 3
    tests = table(app, "Verdict")
    position = tests[(tests["Of the trajectory"] == "gate, mean over depth") & (tests["Against"] == "position")]
    assert position[["Value", "Verdict"]].values.tolist() == [["1.000", "related"]]
    assert table(app, "Half-life (routed layers)").iloc[:, -1].tolist() == ["1.0", "none: nothing is forgotten"]


def test_a_hero_arm_through_depth_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gate, history score, cumulative score, residual change and cosine; cost, memory, right and wrong, groups."""
    tokens = [
        Token(
            f"i{k}", t, (0.7, 0.4) if t % 2 else (0.5, 0.3), p=(0.9, 0.8), hit=t % 2 == 1, occurrences=1 + 3 * (t > 3),
            more={"m": (0.9, 0.72), "d": (0.0, 0.25), "gamma": (0.0, -0.5)},
        )
        for k in range(9) for t in range(8)
    ]  # fmt: skip
    signals = {
        "p": "p_j, the history score", "m": "m_j, the cumulative history score", "d": "d_j, the residual change",
        "gamma": "γ_j, its cosine with the one before",
    }  # fmt: skip
    domains = {f"i{k}": "math" if k % 2 else "prose" for k in range(9)}
    write_tokens(tmp_path / "run", {"full": tokens}, [arm("full", signals=signals)], domains)
    app = open_page(monkeypatch, tmp_path, PAGE)
    titles = [str(title.value) for title in app.subheader]
    assert titles == [
        "Through depth", "Where the next token was right, and where it was wrong", "By domain", "What the memory keeps",
        "What a token cost", "What trajectories go with",
    ]  # fmt: skip
    said = next(caption.value for caption in app.caption if "what the decision is made from" in caption.value)
    assert all(wording in said for wording in ("the cumulative history score", "the residual change", "its cosine"))
    # One panel a signal: gate, p, m, d, gamma.
    for chart in app.get("plotly_chart")[:3]:
        panels = [note["text"] for note in json.loads(chart.proto.spec)["layout"]["annotations"]]
        assert panels == ["gate", "p", "m", "d", "gamma"]
    depth = table(app, "Depth")
    assert depth["m: quartiles"].tolist() == ["0.900 to 0.900", "0.720 to 0.720"]
    assert [text.split(" ")[0] for text in depth["gamma: median [95 % interval]"]] == ["0.000", "−0.500"]
    assert depth["gate: quartiles"].tolist() == ["0.500 to 0.700", "0.300 to 0.400"]
    # Layer 1 takes the FFN (60 FLOPs), layer 2 the adapter (7): 370 + 67 and 6 an attended position, 4.5 in the mean.
    cost = table(app, "Lowest input").iloc[0]
    assert cost["Blocks (FLOPs a token)"] == "464.0\u00a0FLOPs"
    assert cost["Whole blocks (FLOPs a token)"] == "507.0\u00a0FLOPs"
    assert cost["Executed (% of whole blocks' FLOPs)"] == "91.5\u00a0%"
    # ρ = 0.5 halves in one layer; ρ = 1 forgets nothing.
    assert table(app, "Forget factor ρ").values.tolist() == [
        ["1", "1", "0.5000", "1.0"],
        ["2", "2", "1.0000", "none: nothing is forgotten"],
    ]
    groups = table(app, "Tokens by").set_index(["Tokens by", "Group"])
    gate = groups["gate (mean over depth) [95 % interval]"].str.split(" ").str[0]
    assert gate["next token", "right"] == "0.550"
    assert gate["next token", "wrong"] == "0.400"
    assert gate["all", "all"] == gate["domain", "math"] == "0.475"
    assert groups["Tokens"]["position", "0"] == "9"
    assert groups["Tokens"]["position", "1 to 15"] == "63"
    assert groups["Tokens"]["token frequency", "1"] == "36"
    tests = table(app, "Verdict").set_index(["Of the trajectory", "Against"])
    right = tests.loc[("gate, mean over depth", "next token")]
    assert (right["Value"], right["Verdict"]) == ("0.150", "related")


def test_another_arm_can_be_picked(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="tokens", arm="other")
    assert table(app, "Lowest input")["Highest input"].tolist() == ["0.0\u00a0%"] * 3


def test_a_run_that_decides_for_sequences_says_there_are_no_paths(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="sequences")
    assert "decides for each token by itself" in app.info[0].value
    assert not app.dataframe
