"""The page of balance, and of routing where experts are chosen, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.example_run import write_example_run
from tests.analysis.expert_run import DECODE, PREFILL, write_expert_run
from tests.dashboard.pages import open_page, table
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


def test_placements_compared_by_hand(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """The prompts' two layers, in units of 384 weighted FLOPs (four tokens of a narrow expert), ranks' mean 4 in both.

    Layer 1 gives every expert as many tokens, so that a narrow one has 1 and a wide one 3; layer 2 gives all to experts
    0 (4) and 7 (12). Contiguous: 2, 2, 6, 6 and 4, 0, 0, 12, so 1.5 and 3. All_size: 1 + 3 on each rank, so 1, and 3
    again. Replicated halves expert 7 between ranks 1 and 3: 4, 5.5, 4, 2.5 and 4, 6, 0, 6, so 1.375 and 1.5. P50 is
    half way between two values, P95 at 19 parts of 20.
    """
    app = open_page(monkeypatch, runs, BALANCE, run="ranks", cell=PREFILL)
    compared = table(app, "Fullest rank's weights")
    assert compared["Placement"].tolist() == ["contiguous (in force)", "all_size", "replicated"]
    assert compared["P50 (max ÷ mean)"].tolist() == ["2.25†", "2.00†", "1.44†"]
    assert compared["P95 (max ÷ mean)"].tolist() == ["2.92†", "2.90†", "1.49†"]
    # Bytes of both layers: two wide experts of 576 each; one of each width, 192 and 576; the same and expert 7's copy.
    assert compared["Fullest rank's weights"].str.replace("\u00a0", " ").tolist() == ["2.30 kB", "1.54 kB", "2.69 kB"]
    assert compared["÷ mean of ranks"].tolist() == ["1.50", "1.00", "1.47"]
    assert "Placements, judged on the same recorded steps" in said(app.subheader)


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
