"""The page of held-out text, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.example_run import write_example_run
from tests.analysis.token_run import Token, arm, write_tokens
from tests.dashboard.pages import open_page, table

PAGE = "page_held_out.py"
INPUTS = [
    Input(f"i{k}", "math" if k % 2 else "prose", 20 + k, nll={"dense": 10 + k % 3, "routed": 11 + k % 3})
    for k in range(12)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one study, a run of another depth, and one that measured no quality."""
    root = tmp_path_factory.mktemp("runs")
    for seed, routes in enumerate((["101"] * 6 + ["111"] * 6, ["101"] * 9 + ["110"] * 3)):
        arm = Arm("routed", routes, starts=[1.0, -1.0, 1.0], logits=[[1.0, -0.1, 0.2]] * 12)
        write_decisions(root / f"seed-{seed}", INPUTS, [arm])
    write_decisions(root / "deeper", INPUTS, [Arm("routed", ["1011"] * 12)])
    write_example_run(root / "timed")
    return root


def test_quality_and_decisions_of_an_arm(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="seed-0")
    assert table(app, "Perplexity")["Against the twin (ratio)"].tolist()[1] == "1.105"  # exp(1 ÷ 10)
    assert table(app, "Ever skipped")["Ever skipped"].tolist() == ["1"]
    assert table(app, "Majority")["Differ from it (% of inputs)"].tolist() == [
        "0.0\u00a0%",
        "50.0\u00a0%",
        "0.0\u00a0%",
    ]
    assert table(app, "Start (logit)")["Start (logit)"].tolist() == ["1.00", "−1.00", "1.00"]
    assert set(table(app, "Held fixed")["Held fixed"]) == {"nothing", "length"}
    assert len(app.get("plotly_chart")) == 3


def test_multiple_choice_and_retain_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten items: dense is right in 7 (3 of 4, 4 of 6), routed in 4 (2 of 4, 2 of 6)."""
    right = {"dense": [1, 1, 0, 1, 1, 1, 1, 0, 0, 1], "routed": [1, 0, 0, 1, 1, 0, 1, 0, 0, 0]}
    domains = ["math"] * 4 + ["code"] * 6
    inputs = [
        Input(f"i{k}", domain, nll={"dense": 10.0, "routed": 12.0 if domain == "math" else 15.0})
        for k, domain in enumerate(domains)
    ]
    choices = [  # nats a token: the reference, choice 0, has 1.5 and is beaten by choice 1 where it has 1, not where 2
        {
            "arm": arm, "item": f"i{k}", "domain": domains[k], "mode": "gated on prefix", "choice": choice,
            "right": choice == 0, "nll": 40 * (1.5 if choice == 0 else 2.0 if hit or choice > 1 else 1.0), "tokens": 40,
        }
        for arm, hits in right.items()
        for k, hit in enumerate(hits)
        for choice in range(2 if domains[k] == "math" else 4)
    ]  # fmt: skip
    write_decisions(tmp_path / "run", inputs, [Arm("routed", ["10"] * 10)], more={"choice_scores": choices})
    app = open_page(monkeypatch, tmp_path, PAGE)
    assert {"Multiple choice", "Retain"} <= {str(title.value) for title in app.subheader}
    found = table(app, "Right (% of items)")
    assert found["Arm"].tolist() == ["dense", "routed"] * 3
    assert found["Domain"].tolist() == ["all", "all", "math", "math", "code", "code"]
    assert [cell.replace("\u00a0", " ") for cell in found["Right (% of items)"]] == [
        "70.0 %", "40.0 %", "75.0 %", "50.0 %", "66.7 %", "33.3 %",
    ]  # fmt: skip
    # 4 of 2 choices and 6 of 4: (4 ÷ 2 + 6 ÷ 4) ÷ 10.
    assert found["By chance (%)"].str.replace("\u00a0", " ").tolist()[::2] == ["35.0 %", "50.0 %", "25.0 %"]
    assert found["Over the twin (% of items)"].str.replace("\u00a0", " ").tolist()[:2] == ["—", "−30.0 %"]
    assert found["Items"].tolist()[::2] == ["10", "4", "6"]
    retained = table(app, "Retains of")
    assert retained["Retains of"].tolist() == ["dense", "dense"]
    assert retained["Score"].tolist() == ["accuracy", "likelihood a token (1 ÷ perplexity)"]
    # (2 ÷ 3 + 2 ÷ 4) ÷ 2, and (exp(−0.2) + exp(−0.5)) ÷ 2: domains count alike.
    assert retained["Retain (%)"].str.replace("\u00a0", " ").tolist() == ["58.3 %", "71.3 %"]
    assert retained["Domains"].tolist() == ["2", "2"]


def test_a_rate_of_tokens_is_not_called_one_of_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two inputs of four tokens, of which three and one take the adapter in layer 1: the mean of 75 and 25 %."""
    tokens = [Token(f"i{k}", t, (0.1 if t < (3, 1)[k] else 0.9, 0.9)) for k in range(2) for t in range(4)]
    write_tokens(tmp_path / "run", {"mine": tokens}, [arm("mine")], scores={"mine": {"i0": 5.0, "i1": 5.0}})
    app = open_page(monkeypatch, tmp_path, PAGE)
    rates = table(app, "Most tokens of most inputs")
    assert rates["Skipped by (% of an input's tokens, mean over inputs)"].tolist() == ["50.0\u00a0%", "0.0\u00a0%"]


def test_agreement_with_another_seed(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="seed-0")
    assert sorted(app.multiselect[0].options) == ["deeper", "seed-1", "timed"]
    app.multiselect[0].select(str(runs / "seed-1")).run()
    assert not app.exception
    found = table(app, "First").iloc[0]
    assert found["Jaccard, layers ever skipped"] == "0.50"  # {1} and {1, 2}
    # Six inputs alike in 3 layers, three (111 against 101) in 2, three (111 against 110) in 2: 30 of 36.
    assert found["Decided alike (% of inputs × layers)"] == "83.3\u00a0%"
    assert table(app, "Ever skipped in (runs)")["Ever skipped in (runs)"].tolist() == ["0", "2", "1"]


def test_runs_that_cannot_be_compared_are_named(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="seed-0")
    app.multiselect[0].select(str(runs / "deeper")).run()
    assert not app.exception
    assert "decides about 3 layers" in app.warning[-1].value


def test_a_run_without_quality_says_how_to_measure_it(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, PAGE, run="timed")
    assert "gatewise evaluate" in app.info[0].value
    assert not app.dataframe
