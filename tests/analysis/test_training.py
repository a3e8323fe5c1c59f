"""A training's log by hand: its curves, its report, and what a run and a page show of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import report, training_charts, training_report
from analysis.training import STEP_COLUMNS, all_under, in_windows, is_training, training, trainings
from profiler.errors import InputError
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.test_report import Page
from tests.analysis.training_folder import LINES, RECIPE, START, evaluation, update, write_training


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_training(tmp_path / "by-hand")


def test_every_line_is_read(folder: Path) -> None:
    found = training(folder)
    assert (found.name, found.finished) == ("by-hand", False)
    assert found.sentence == "Not finished, 3 of 6 updates, taken up again once."
    assert list(found.steps.columns) == list(STEP_COLUMNS)
    assert found.steps["step"].tolist() == [1, 2, 3]
    assert found.steps["lm_nats_per_token"].tolist() == [1.5, 0.5, -0.5]
    assert found.steps["gradient_norm"].tolist() == [10.0, 20.0, 30.0]
    # The second update's line says nothing of its layers.
    assert found.skip_steps == [1, 3]
    assert found.skip_LK.tolist() == [[0.0, 0.25], [1.0, 0.75]]
    assert found.held_out[["step", "domain", "routed_nats_per_token"]].to_numpy().tolist() == [
        [0, "math", 4.0], [0, "tool_call", 5.0], [3, "math", 2.0], [3, "tool_call", 3.0],
    ]  # fmt: skip
    assert found.held_out["stored"].fillna("training").tolist() == ["training", "training", "float16", "float16"]
    assert {domain: skips.tolist() for domain, skips in found.held_out_skips.items()} == {
        "math": [0.0, 0.5], "tool_call": [0.0, 0.5],
    }  # fmt: skip
    assert dict(found.facts)["items cut to the length"] == "12.5%"
    assert dict(found.facts)["seconds of training"] == "6"


def test_a_finished_one_says_so(tmp_path: Path) -> None:
    lines = [START, *(update(step, None) for step in range(1, 7)), {"kind": "end", "seconds": 12.0}]
    assert training(write_training(tmp_path, lines)).sentence == "Finished, 6 of 6 updates."


@pytest.mark.parametrize("recipe", [None, ": no yaml", "name: x"])
def test_without_a_recipe_nothing_is_said_of_what_was_planned(tmp_path: Path, recipe: str | None) -> None:
    found = training(write_training(tmp_path, recipe=recipe))
    assert found.sentence == "Not finished, 3 updates, taken up again once."
    assert found.recipe == recipe


def test_a_last_line_cut_off_by_a_kill_is_left_out(folder: Path) -> None:
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"kind": "step", "st')
    assert len(training(folder).steps) == 3


@pytest.mark.parametrize(
    "line",
    [
        [1],
        {"kind": "step", "step": 4},
        update(4, [0.5]),
        update(4, ["x", "y"]),  # type: ignore[list-item]
        {"kind": "held_out", "step": 3, "stored": None, "figures": [1]},
    ],
)
def test_a_line_of_another_kind_names_the_file(folder: Path, line: Any) -> None:
    write_training(folder, [*LINES, line] if isinstance(line, dict) else [line, *LINES])
    if isinstance(line, list):  # not a line of ours, and not one that anything is read from
        assert len(training(folder).steps) == 3
        return
    with pytest.raises(InputError, match=r"training log .*by-hand/log.jsonl: a line is not as a training writes it"):
        training(folder)


def test_no_log_is_no_training(tmp_path: Path) -> None:
    assert not is_training(tmp_path)
    with pytest.raises(InputError, match="log.jsonl: cannot be read"):
        training(tmp_path)


def test_windows_are_means_of_equally_many_steps() -> None:
    values = np.array([[0.0, 1.0, 2.0, 3.0, 10.0], [1.0, 1.0, 1.0, 1.0, 0.0]])
    labels, grid = in_windows([1, 2, 3, 4, 5], values, at_most=3)
    assert labels == ["1 to 2", "3 to 4", "5"]
    assert grid.tolist() == [[0.5, 2.5, 10.0], [1.0, 1.0, 0.0]]
    assert in_windows([4, 8], values[:, :2], at_most=3)[0] == ["4", "8"]


# -- figures and reports --------------------------------------------------------------------------------------------


def test_the_grid_has_a_column_a_logged_update(folder: Path) -> None:
    (grid,) = training_charts.skips(training(folder)).data
    assert [list(row) for row in grid.z] == [[0.0, 25.0], [100.0, 75.0]]
    assert list(grid.customdata[0]) == ["1", "3"]


@pytest.mark.parametrize(("norms", "axis"), [((1.0, 10.0), "log"), ((1.0, 9.0), None), ((0.0, 10.0), None)])
def test_gradient_norms_that_span_a_decade_are_on_a_logarithmic_axis(
    tmp_path: Path, norms: tuple[float, float], axis: str | None
) -> None:
    lines = [START, *(update(k, None, grad_norm=norm) for k, norm in enumerate(norms, start=1))]
    assert training_charts.curves(training(write_training(tmp_path, lines))).layout.yaxis3.type == axis


def test_the_page_shows_curves_figures_and_recipe_and_needs_nothing_else(folder: Path) -> None:
    page = Page(training_report.render(folder, "html"))
    assert len([a for _, a in page.tags if "data-figure" in a]) == 4
    assert len(page.programs) == 2
    rows = page.table("Domain", "Routed (nats a token)")
    assert [row["Routed (nats a token)"] for row in rows] == ["4.000", "5.000", "2.000", "3.000"]
    assert rows[-1]["Numbers of"] == "checkpoint, float16"
    assert "Not finished, 3 of 6 updates" in page.text
    assert "steps: 6" in page.text


@pytest.mark.parametrize("lines", [[], [START], [START, evaluation(0, None, math=4.0)], [update(1, None)]])
def test_a_log_that_has_barely_begun_is_shown_in_every_format(tmp_path: Path, lines: list[Any]) -> None:
    folder = write_training(tmp_path / "begun", lines)
    shown = {kind: training_report.render(folder, kind) for kind in training_report.FORMATS}
    page = Page(shown["html"])
    held_out = 2 if any(line["kind"] == "held_out" for line in lines) else 0
    assert len([a for _, a in page.tags if "data-figure" in a]) == held_out + any(
        line["kind"] == "step" for line in lines
    )
    assert json.loads(shown["json"])["finished"] is False


def test_text_of_a_recipe_is_data(tmp_path: Path) -> None:
    nasty = "</script><img src=x onerror=alert(1)>```"
    start = START | {"recipe": nasty, "device": nasty}
    lines = [start, evaluation(0, None, **{nasty: 1.0}), update(1, [0.5])]
    folder = write_training(tmp_path / "t", lines, f"# {nasty}\nname: x\n")
    page = Page(training_report.render(folder, "html"))
    assert "img" not in {tag for tag, _ in page.tags}
    assert "<" not in "".join(text for a, text in page.scripts if a.get("type") == "application/json")
    drawn = json.dumps(page.data)
    assert "<img" not in drawn
    text = training_report.render(folder, "md")
    assert [line for line in text.splitlines() if "<img" in line] == [f"    # {nasty}"]  # inside of the code


def test_csv_and_json_hold_the_numbers(folder: Path) -> None:
    frame = pd.read_csv(io.StringIO(training_report.render(folder, "csv")))
    assert list(frame.columns) == [*STEP_COLUMNS, "skip_0", "skip_1"]
    assert frame["skip_1"].fillna(-1).tolist() == [1.0, -1.0, 0.75]
    whole = json.loads(training_report.render(folder, "json"))
    assert whole["skip"] == [[0.0, 0.25], [1.0, 0.75]]
    assert whole["skip_steps"] == [1, 3]
    assert whole["recipe"] == RECIPE
    assert whole["held_out"][0]["stored"] is None


def test_an_unknown_format_names_the_known(folder: Path) -> None:
    with pytest.raises(InputError, match="--format pdf: there is no such format; choose one of html, md, csv, json"):
        training_report.render(folder, "pdf")


# -- of the arms of a run -------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = write_example_run(tmp_path / "run")
    write_training(path / "training" / "routed")
    return Run(path)


def test_a_run_shows_the_training_of_its_arms(run: Run) -> None:
    assert list(trainings(run)) == ["routed"]
    page = Page(report.render_html(run))
    assert "routed (untrained router): by-hand" in page.text
    assert page.table("Domain", "Routed (nats a token)")[0]["Routed (nats a token)"] == "4.000"
    assert "## Training of routed" in report.render_markdown(run)
    assert json.loads(report.render_json(run))["trainings"]["routed"]["name"] == "by-hand"


def test_a_run_without_one_has_no_such_section(example: Run) -> None:
    assert trainings(example) == {}
    assert "#training" not in {a.get("href") for _, a in Page(report.render_html(example)).tags}


def test_folders_are_found_at_and_below_a_root(run: Run, tmp_path: Path) -> None:
    write_training(tmp_path / "alone")
    of_run = run.path / "training" / "routed"
    assert all_under(tmp_path) == [tmp_path / "alone", of_run]
    assert all_under(run.path) == [of_run]
    assert all_under(of_run) == [of_run]
