"""The example runs, written once for all analysis tests."""

from __future__ import annotations

import pytest

from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.expert_run import write_expert_run


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The complete example run, opened."""
    return Run(write_example_run(tmp_path_factory.mktemp("example") / "run"))


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of experts on four ranks, opened."""
    return Run(write_expert_run(tmp_path_factory.mktemp("experts") / "run"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same experts in one process, with placements for four ranks; opened."""
    return Run(write_expert_run(tmp_path_factory.mktemp("alone") / "run", ranks=1))
