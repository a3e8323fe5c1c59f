"""What the tests of the run folder share: manifests and rows made by hand, a run left unfinished, a folder's bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from profiler.records import CellRecord, Manifest, RuleRecord
from profiler.store import Run
from profiler.writer import RunWriter


def cell(name: str) -> CellRecord:
    return CellRecord(name=name, phase="prefill", batch=1, length=4)


def manifest(**more: Any) -> Manifest:
    given = {"name": "t", "created_utc": "2026-01-01T00:00:00+00:00", "pid": os.getpid(), "host": os.uname().nodename}
    return Manifest(**{**given, "spec_sha256": "s", **more})


def steps(numbers: range | list[int], arm: str = "a") -> dict[str, Any]:
    return {"arm": arm, "step": list(numbers), "pass": "bare", "wall_ns": [10 * n for n in numbers]}


def unfinished(folder: Path, pid: int = 2**22 + 1) -> None:
    """A run whose process is gone: cell c1 done, c2 begun, telemetry of the whole run."""
    made = RunWriter(folder, manifest(cells=[cell("c1"), cell("c2")]), "name: t\n")
    made.append("steps", steps(range(3)), cell="c1")
    made.append("telemetry", {"time_ns": [1, 2], "metric": "rss"}, cell="telemetry")
    made.manifest.rules = [
        RuleRecord(rule=6, name="open", passed=True, detail=""),
        RuleRecord(rule=1, name="rows", cell="c1", passed=True, detail=""),
    ]
    made.close_cell(made.manifest.cells[0])
    made.append("steps", steps(range(100, 107)), cell="c2")
    made.manifest.rules.append(RuleRecord(rule=1, name="rows", cell="c2", passed=True, detail=""))
    made.manifest.drops = {"gates": 2}
    made.finish("interrupted", "stopped")
    made.manifest.state, made.manifest.pid = "running", pid
    made.save_manifest()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def told(run: Run) -> list[str]:
    return [str(mismatch) for mismatch in run.mismatches]
