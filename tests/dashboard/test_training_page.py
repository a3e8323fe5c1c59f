"""The page of trainings, driven as a reader would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import training_charts
from tests.analysis.example_run import write_example_run
from tests.analysis.training_folder import START, evaluation, update, write_training
from tests.dashboard.pages import open_page

PAGE = "page_training.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_training(tmp_path / "alone")
    write_training(write_example_run(tmp_path / "run") / "training" / "routed")
    return tmp_path


def test_trainings_and_those_of_arms_are_listed_and_drawn(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    app = open_page(monkeypatch, root, PAGE)
    assert app.selectbox[0].options == ["alone", "run, arm routed"]
    assert len(app.get("plotly_chart")) == 4
    assert "Not finished, 3 of 6 updates" in app.warning[0].value
    assert app.code[0].value.startswith("name: by-hand")
    app.selectbox[0].select("run, arm routed").run()
    assert not app.exception
    assert app.query_params["training"] == "run, arm routed"


def test_one_in_which_nothing_is_ever_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of experts, which stand in for a layer: no empty panels, and a sentence in their place."""
    evaluated = evaluation(1, None, math=4.0)
    evaluated["figures"]["math"] |= {"skip": [0.0, 0.0], "skip_rate": 0.0, "deciding": 0}
    write_training(tmp_path / "experts", [START, update(1, [0.0, 0.0], skip_rate=0.0), evaluated])
    app = open_page(monkeypatch, tmp_path, PAGE)
    curves, held_out = (json.loads(chart.proto.spec) for chart in app.get("plotly_chart"))
    assert [curves["layout"][f"yaxis{n}"]["title"]["text"] for n in ("", "2", "3")] == [
        "loss", "gradient norm", "regulariser",
    ]  # fmt: skip
    assert [trace["name"] for trace in held_out["data"]] == ["math, routed", "math, gates open"]
    assert training_charts.UNSKIPPED in [caption.value for caption in app.caption]


def test_one_that_has_just_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_training(tmp_path / "begun", [START])
    app = open_page(monkeypatch, tmp_path, PAGE)
    assert not app.get("plotly_chart")
    assert "No update was made yet." in [caption.value for caption in app.caption]


def test_a_broken_log_says_why_and_none_at_all_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "holds no training" in open_page(monkeypatch, tmp_path, PAGE).info[0].value
    write_training(tmp_path / "broken", [{"kind": "step"}])
    assert "a line is not as a training writes it" in open_page(monkeypatch, tmp_path, PAGE).error[0].value
