"""The example run, written once for all analysis tests."""

from __future__ import annotations

import pytest

from profiler.store import Run
from tests.analysis.example_run import write_example_run


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The complete example run, opened."""
    return Run(write_example_run(tmp_path_factory.mktemp("example") / "run"))
