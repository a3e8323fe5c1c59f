"""The writer that the tests of the run folder begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from profiler.writer import RunWriter
from tests.profiler.hand_made_runs import cell, manifest


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    made = RunWriter(tmp_path / "run", manifest(cells=[cell("c1"), cell("c2")]), "name: t\n")
    yield made
    if made._thread.is_alive():
        made.finish("complete")
