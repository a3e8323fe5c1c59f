"""Each page, driven as a reader would: what it shows for a whole run, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.analysis import example_run
from tests.analysis.example_run import write_example_run
from tests.dashboard.pages import open_page

RUNS, LADDER, ROUTING = "app.py", "page_ladder.py", "page_routing.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with a run of every kind that a reader can meet."""
    root = tmp_path_factory.mktemp("runs")
    write_example_run(root / "whole")
    write_example_run(root / "killed", state="killed", stage="mid-cell", random_weights=True)
    write_example_run(root / "at-once", state="killed", stage="start")
    write_example_run(root / "dense-only", arms=["dense"])
    write_example_run(root / "withheld", keeps_text=False)
    write_example_run(root / "session", origin="session", arms=["routed"])
    write_example_run(root / "no-gates", nan_gates=True)
    (root / "broken").mkdir()
    (root / "broken" / "manifest.json").write_text("{not json")
    return root


def said(elements: Any) -> str:
    return "\n".join(str(element.value) for element in elements)


def pickers(app: AppTest) -> dict[str, Any]:
    return {box.label: box for box in app.selectbox}


def figures(app: AppTest) -> int:
    return len(app.get("plotly_chart"))


def column(app: AppTest, title: str) -> list[str]:
    """The cells under `title` of the first table or grid that has it."""
    for element in [*app.table, *app.dataframe]:
        if title in element.value.columns:
            return [str(value) for value in element.value[title]]
    raise AssertionError(f"no table has a column {title!r}")


def test_what_arms_said_is_shown_with_how_the_run_was_made(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, RUNS, run="whole")
    found = next(element.value for element in app.table if list(element.value) == ["Cell", "dense", "routed", "forced"])
    assert set(found["dense"]) == {"0123456789ab"}
    assert set(found["routed"]) == set(found["forced"]) == {"fedcba987654"}
    assert "The first 12 hex digits of the SHA-256 of the likeliest next tokens" in said(app.caption)
    assert "likeliest next tokens" not in said(open_page(monkeypatch, runs, RUNS, run="session").caption)


@pytest.mark.parametrize(
    ("folder", "page"),
    [
        ("killed", LADDER),
        ("killed", ROUTING),
        ("at-once", RUNS),
        ("at-once", LADDER),
        ("dense-only", RUNS),
        ("session", RUNS),
        ("session", LADDER),
        ("session", ROUTING),
    ],
)
def test_a_run_that_lacks_something_opens(monkeypatch: pytest.MonkeyPatch, runs: Path, folder: str, page: str) -> None:
    app = open_page(monkeypatch, runs, page, run=folder)
    assert pickers(app)["Run"].value == folder


@pytest.mark.parametrize("page", [RUNS, LADDER, ROUTING])
def test_a_folder_that_is_missing_or_empty_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no runs yet" in said(open_page(monkeypatch, tmp_path / "empty", page).info)
    assert "There is no folder" in said(open_page(monkeypatch, tmp_path / "nowhere", page).info)


@pytest.mark.parametrize("page", [RUNS, LADDER, ROUTING])
def test_a_broken_run_says_why_and_the_rest_stays_in_reach(
    monkeypatch: pytest.MonkeyPatch, runs: Path, page: str
) -> None:
    app = open_page(monkeypatch, runs, page, run="broken")
    assert "cannot be read as a run" in said(app.error)
    assert "whole" in said_options(app)


def said_options(app: AppTest) -> str:
    return " ".join(pickers(app)["Run"].options)


def test_a_run_with_a_torn_table_says_which(monkeypatch: pytest.MonkeyPatch, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "torn")
    for part in (tmp_path / "torn" / "steps").glob("*.parquet"):
        part.write_bytes(b"PAR1 torn")
    app = open_page(monkeypatch, tmp_path, LADDER, run="torn")
    assert "cannot be read as a run" in said(app.error)


def test_what_was_picked_is_kept_from_page_to_page(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, RUNS, run="killed")
    app.switch_page(LADDER).run()
    pickers(app)["Cell"].select("decode-b4-c32-n4").run()
    app.query_params.clear()
    app.switch_page(ROUTING).run()
    assert not app.exception
    assert (pickers(app)["Run"].value, pickers(app)["Cell"].value) == ("killed", "decode-b4-c32-n4")


class TestRuns:
    def test_lists_every_folder_with_its_state(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, RUNS)
        states = dict(zip(column(app, "path"), column(app, "state"), strict=True))
        assert states["whole"] == "complete"
        assert states["killed"] == "killed"
        assert states["broken"] == "unreadable"
        assert len(states) == 8

    def test_shows_rules_environment_and_headlines(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, RUNS, run="whole")
        assert set(column(app, "Outcome")) == {"held"}
        assert "float32" in column(app, "Value")
        assert "no NVIDIA driver on this machine" in column(app, "Reason")
        # 5.1 ms against 6.0 ms at batch 4, 2.2 ms against 2.0 ms at batch 1.
        assert "10.0 % more time than dense" in said(app.markdown).replace("\u00a0", " ")
        assert "15.0 % less time" in said(app.markdown).replace("\u00a0", " ")
        assert not app.error

    def test_a_killed_run_says_so_above_its_labels(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, RUNS, run="killed")
        assert "Killed" in said(app.error)
        assert "2 of 3 cells done" in said(app.error)
        labels = said(app.warning)
        for word in ("Random weights", "Untrained router", "Synthetic route"):
            assert word in labels

    def test_a_run_that_closes_a_cell_is_read_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        write_example_run(tmp_path / "run", stage="start", state="killed")
        app = open_page(monkeypatch, tmp_path, LADDER)
        assert "No rung of this arm was measured" in said(app.info)
        shutil.rmtree(tmp_path / "run")
        write_example_run(tmp_path / "run")
        later = (tmp_path / "run" / "manifest.json").stat().st_mtime + 5
        os.utime(tmp_path / "run" / "manifest.json", (later, later))
        app.run()
        assert not app.exception
        assert "No rung" not in said(app.info)


class TestLadder:
    def test_shows_the_cell_and_arm_of_the_address(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="whole", cell="prefill-b4-l32", arm="routed")
        assert pickers(app)["Cell"].value == "prefill-b4-l32"
        assert pickers(app)["Arm"].value == "routed"
        rungs = dict(zip(column(app, "Rung"), column(app, "Value"), strict=True))
        assert rungs["Step time saved"] == "15.0\u00a0%"
        assert rungs["Kernel time saved"] == "15.0\u00a0%"
        assert rungs["Request time saved"] == "—"
        assert rungs["Step time"] == "5.10\u00a0ms"
        # Ladder, all cells, break-even of two phases, segments.
        assert figures(app) == 5

    def test_picking_another_cell_changes_numbers_and_address(
        self, monkeypatch: pytest.MonkeyPatch, runs: Path
    ) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="whole", cell="prefill-b4-l32", arm="routed")
        pickers(app)["Cell"].select("decode-b4-c32-n4").run()
        assert not app.exception
        rungs = dict(zip(column(app, "Rung"), column(app, "Value"), strict=True))
        assert rungs["Step time saved"] == "−5.0\u00a0%"
        assert app.query_params["cell"] == "decode-b4-c32-n4"

    def test_an_address_of_another_run_falls_back(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="gone", cell="prefill-b9-l9", arm="nobody")
        assert pickers(app)["Run"].value in os.listdir(runs)

    def test_an_interval_among_dashes_is_shown_whole(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="whole", cell="prefill-b4-l32", arm="routed")
        grid = next(element for element in app.dataframe if "Rung" in element.value.columns)
        width = json.loads(grid.proto.columns)["95 % interval"]["width"]
        assert width >= 6.5 * max(map(len, grid.value["95 % interval"])) + 16  # pixels of a character, of the margins

    def test_all_variants_on_request(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="whole")
        assert "augmented" not in column(app, "Variant")
        app.toggle[0].set_value(True).run()
        assert {"gross", "adapters_only", "net", "augmented"} <= set(column(app, "Variant"))

    def test_a_dense_run_has_times_and_no_ladder(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="dense-only")
        assert "there is no ladder" in said(app.info)
        assert "Arm" not in pickers(app)
        assert "2.00\u00a0ms" in column(app, "Value")

    def test_small_samples_are_marked_in_the_tails(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, LADDER, run="whole", cell="decode-b4-c32-n4")
        assert column(app, "P50 (ms)") == ["1.00", "1.05", "0.640"]
        assert all(text.endswith("†") for text in column(app, "P99 (ms)"))


class TestRouting:
    def test_shows_the_prompt_of_the_request(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="whole", cell="prefill-b4-l32", arm="routed", request="r2")
        assert app.code[0].value == '{"tool": "weather", "city": "Zürich"}'
        assert figures(app) == 2
        # Layer 1 is skipped by r0 and r2 of four requests, layer 0 by none.
        assert column(app, "All (% of token rows)")[:2] == ["0.0\u00a0%", "50.0\u00a0%"]

    def test_colour_by_gate(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="no-gates")
        app.get("button_group")[0].set_value(["gate value (0 to 1)"]).run()
        assert not app.exception
        assert figures(app) == 2

    def test_withheld_text_is_said_and_not_there(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="withheld")
        assert not app.code
        assert "text withheld" in said(app.info).lower()
        assert "was not kept" in said(app.caption)

    @pytest.mark.parametrize("folder", ["dense-only", "at-once"])
    def test_nothing_decided_is_said(self, monkeypatch: pytest.MonkeyPatch, runs: Path, folder: str) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run=folder)
        assert "decided anything" in said(app.info)

    def test_a_prompt_is_data(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        nasty = "</script><img src=x onerror=alert(1)> **bold** $x$"
        monkeypatch.setitem(example_run.REQUESTS, "r0", ("<b>domain</b>", nasty, (1, 0, 1, 1)))
        write_example_run(tmp_path / "run")
        app = open_page(monkeypatch, tmp_path, ROUTING, cell="prefill-b1-l32", request="r0")
        assert app.code[0].value == nasty
        specs = [chart.proto.spec for chart in app.get("plotly_chart")]
        assert all("<img" not in spec and "<b>domain" not in spec for spec in specs)
