"""The page of studies, driven as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.seeds_study import write_study
from tests.dashboard.pages import open_page
from tests.dashboard.test_pages import figures, pickers, said

PAGE = "page_study.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies, one of them not finished, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("studies")
    write_study(folder / "whole", domain="<b>code</b>")
    write_study(folder / "half", done=1, failed="the loss is nan")
    (folder / "broken").mkdir()
    (folder / "broken" / "study.json").write_text("{")
    return folder


def test_a_whole_study(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    app = open_page(monkeypatch, root, PAGE, study="whole")
    assert set(pickers(app)) == {"Study", "Arm"}
    assert sorted(pickers(app)["Study"].options) == ["broken", "half", "whole"]
    assert pickers(app)["Arm"].value == "routed"
    assert figures(app) == 4  # the heat map; skip, step time saved, perplexity
    text = said(app.markdown)
    assert "3 of 3 seeds trained and measured" in text
    assert "step time saved is not stable in 1 of 1 cells" in text
    assert "0.85 × the median width" in said(app.caption)
    assert not app.error
    assert {str(title.value) for title in app.subheader} == {
        "What is stable over seeds", "Seed by seed", "Layers that each seed skips", "Pairs of seeds"
    }  # fmt: skip


def test_an_arm_that_no_seed_touches(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    app = open_page(monkeypatch, root, PAGE, study="whole", arm="dense")
    assert figures(app) == 1
    assert len(app.subheader) == 2


def test_an_unfinished_study(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    app = open_page(monkeypatch, root, PAGE, study="half")
    assert "seed 2 failed: the loss is nan" in said(app.warning).lower()
    assert "1 of 3 seeds trained and measured" in said(app.markdown)


def test_one_that_cannot_be_read_and_none_at_all(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    app = open_page(monkeypatch, root, PAGE, study="broken")
    assert "is not a JSON object" in said(app.error)
    assert "holds no study of seeds" in said(open_page(monkeypatch, tmp_path, PAGE).info)
