"""The page of balance, and of routing where experts are chosen, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.example_run import write_example_run
from tests.analysis.expert_run import DECODE, PREFILL, write_expert_run
from tests.dashboard.pages import open_page
from tests.dashboard.test_pages import ROUTING, column, figures, pickers, said

BALANCE = "page_balance.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_expert_run(root / "ranks")
    write_expert_run(root / "alone", ranks=1)
    write_expert_run(root / "no-loads", ranks=0)
    write_example_run(root / "no-experts")
    return root


def test_several_ranks(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, BALANCE, run="ranks", cell=PREFILL)
    assert "on 4 ranks on 2 nodes, placed contiguous" in said(app.markdown)
    # Imbalance, what ranks computed, their time, bytes, loads of experts, windows.
    assert figures(app) == 6
    assert column(app, "FLOPs (% of ranks')") == ["18.8\u00a0%", "6.2\u00a0%", "18.8\u00a0%", "56.2\u00a0%"]
    assert column(app, "Measured P50 (ms)") == ["0.114", "—", "—"]
    assert column(app, "Over")[:3] == ["local copy", "same node", "other node"]


def test_another_cell_and_its_windows(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, BALANCE, run="ranks", cell=PREFILL)
    pickers(app)["Cell"].select(DECODE).run()
    assert not app.exception
    assert column(app, "P95 (max ÷ mean)") == ["4.00†", "2.00†", "2.00†"]
    assert "across inputs" in pickers(app)["Windows of"].value


def test_one_process(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = open_page(monkeypatch, runs, BALANCE, run="alone", cell=PREFILL)
    assert "judged as if its tokens had met 4 ranks" in said(app.markdown)
    assert figures(app) == 3  # imbalance, loads of experts, windows
    assert "Bytes from rank to rank" not in said(app.subheader)


@pytest.mark.parametrize("folder", ["no-loads", "no-experts"])
def test_a_run_without_loads_says_what_the_page_needs(monkeypatch: pytest.MonkeyPatch, runs: Path, folder: str) -> None:
    app = open_page(monkeypatch, runs, BALANCE, run=folder)
    assert "This page needs an arm that routes tokens to experts" in said(app.info)
    assert figures(app) == 0


class TestRouting:
    def test_experts_are_chosen_and_nothing_is_skipped(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="ranks", cell=DECODE)
        assert said(app.subheader) == "Choice of experts"
        assert figures(app) == 2
        assert column(app, "Group")[:2] == ["0", "1"]
        assert column(app, "Share (% of the layer's pairs)")[2:] == [
            "75.0\u00a0%", "25.0\u00a0%", "25.0\u00a0%", "75.0\u00a0%",
        ]  # fmt: skip

    def test_one_domain(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="ranks", cell=DECODE)
        pickers(app)["Domain"].select("math").run()
        assert not app.exception
        # Of math's request, layers together: 0, 4, 0, 1 in layer 1, then 6, 7, 0, 4.
        assert column(app, "Token-expert pairs")[:2] == ["4", "4"]

    def test_a_run_that_skips_is_shown_as_before(self, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        app = open_page(monkeypatch, runs, ROUTING, run="no-experts")
        assert "Choice of experts" not in said(app.subheader)
        assert "Each decision" in said(app.subheader)
