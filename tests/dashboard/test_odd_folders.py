"""Every page on folders that are not a whole run: empty, still written, with tables missing, of another format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.analysis.example_run import write_example_run
from tests.analysis.expert_run import write_expert_run
from tests.analysis.token_run import Token, arm, write_tokens
from tests.analysis.training_folder import write_training
from tests.dashboard.pages import DASHBOARD, open_page
from tests.dashboard.test_pages import column, said

OF_RUNS = [
    "app.py", "page_ladder.py", "page_routing.py", "page_balance.py", "page_held_out.py", "page_trajectories.py",
]  # fmt: skip
OF_OTHERS = ["page_training.py", "page_study.py"]
#: A run is its steps; all else may be missing, as in a session or a run that stopped early.
NEEDED = {"steps"}


def test_every_page_is_tried_here() -> None:
    assert {*OF_RUNS, *OF_OTHERS, "page_runs.py"} == {path.name for path in DASHBOARD.glob("page_*.py")} | {"app.py"}


@pytest.mark.parametrize("page", [*OF_RUNS, *OF_OTHERS])
def test_an_empty_folder_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    app = open_page(monkeypatch, tmp_path, page)
    assert "holds no" in said(app.info)
    assert not app.error


@pytest.mark.parametrize("page", OF_RUNS)
def test_a_folder_with_a_training_only_says_where_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    write_training(tmp_path / "only")
    assert "What is there is on Training." in said(open_page(monkeypatch, tmp_path, page).info)


@pytest.mark.parametrize("page", OF_RUNS)
def test_a_run_that_is_still_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    run = write_example_run(tmp_path / "going", state="running", stage="mid-cell")
    for table in ("steps", "gates", "quality"):  # a part is written aside and renamed when it is whole
        (run / table).mkdir(exist_ok=True)
        (run / table / ".part-x-r0-000099.parquet.tmp").write_bytes(b"PAR1 half")
    app = open_page(monkeypatch, tmp_path, page)
    assert "Still running" in said(app.error)
    assert "cannot be read" not in said(app.error)


@pytest.mark.parametrize("page", OF_RUNS)
def test_a_run_of_another_format_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    manifest = write_example_run(tmp_path / "later") / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    app = open_page(monkeypatch, tmp_path, page)
    assert "cannot be read as a run" in said(app.error)
    assert "99" in said(app.error)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with nothing but their steps, though the manifest says that there was more."""
    root = tmp_path_factory.mktemp("bare")
    write_example_run(root / "skips")
    write_expert_run(root / "experts")
    tokens = [Token(f"i{k}", t, (0.6, 0.4)) for k in range(2) for t in range(2)]
    write_tokens(root / "tokens", {"mine": tokens}, [arm("mine")])
    for run in root.iterdir():
        for table in run.iterdir():
            if table.is_dir() and table.name not in NEEDED:
                shutil.rmtree(table)
    return root


@pytest.mark.parametrize("page", OF_RUNS)
@pytest.mark.parametrize("folder", ["skips", "experts", "tokens"])
def test_tables_that_are_missing_are_said(monkeypatch: pytest.MonkeyPatch, bare: Path, folder: str, page: str) -> None:
    app = open_page(monkeypatch, bare, page, run=folder)
    assert "of 0" not in said(app.error)
    assert said(app.error) or said(app.warning)


def test_what_cannot_be_read_half_way_is_said_and_no_traceback() -> None:
    def script() -> None:
        import streamlit as st

        from dashboard.reading import told
        from profiler.errors import StoreError

        def page() -> None:
            st.title("Above")
            raise StoreError("RUN: table gates is gone")

        told(page)

    app = AppTest.from_function(script).run()
    assert not app.exception
    assert [title.value for title in app.title] == ["Above"]
    assert "table gates is gone" in said(app.error)


def test_the_runs_of_a_folder_stay_in_reach_beside_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_example_run(tmp_path / "there")
    write_example_run(tmp_path / "gone")
    app = open_page(monkeypatch, tmp_path, "app.py", run="gone")
    shutil.rmtree(tmp_path / "gone")
    app.run()
    assert not app.exception
    assert column(app, "path") == ["there"]
