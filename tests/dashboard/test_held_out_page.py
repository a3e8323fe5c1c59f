"""The page of held-out text, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.example_run import write_example_run
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
