"""A page of the dashboard, run as a script of its own in Streamlit's test harness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

DASHBOARD = Path(__file__).parents[2] / "dashboard"


def open_page(monkeypatch: pytest.MonkeyPatch, root: Path, page: str, **picked: str) -> AppTest:
    """The page with `picked` in its address, run once without an exception.

    Pages are scripts of their own and are run without the app around them; that of runs is the app's first.
    """
    monkeypatch.setattr(sys, "argv", [page, str(root)])
    app = AppTest.from_file(str(DASHBOARD / page), default_timeout=60)
    for name, value in picked.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, [error.value for error in app.exception]
    return app


def table(app: AppTest, title: str) -> Any:
    """The frame that has a column of that title."""
    return next(element.value for element in app.dataframe if title in element.value.columns)
