"""Processes for tests of ranks: forked from one that has imported what takes seconds, once for all such tests."""

from __future__ import annotations

import socket
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

PRELOADED = ["tests.profiler.execution.rank_checks", "tests.profiler.rank_runs"]


def forking() -> ForkServerContext:
    """The context whose processes start quickly."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
