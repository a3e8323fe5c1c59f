"""Rows by hand: the smallest run folder a test needs, table by table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.records import ArmRecord, CellRecord, Manifest
from profiler.store import Run
from profiler.writer import RunWriter

CELL = CellRecord(name="cell", phase="prefill", batch=1, length=4, done=True)


def write_run(
    folder: Path,
    arms: Sequence[ArmRecord],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    cells: Sequence[CellRecord] = (CELL,),
    spec_yaml: str | None = None,
    **manifest: Any,
) -> Run:
    """A run with these rows; a row without `cell` belongs to the first cell. Opened."""
    record = Manifest(
        name="tiny",
        created_utc="2026-01-02T03:04:05Z",
        pid=os.getpid(),
        host=os.uname().nodename,
        arms=list(arms),
        cells=[cell.model_copy() for cell in cells],
        **manifest,
    )
    writer = RunWriter(folder, record, spec_yaml)
    for table, rows in tables.items():
        for row in rows:
            columns = {name: [value] for name, value in row.items() if name != "cell"}
            writer.append(table, columns, cell=row.get("cell", cells[0].name if cells else "cell"))
            writer.drain()
    writer.finish("complete")
    return Run(folder)


def step(arm: str, number: int, pass_: str = "bare", *, repeat: int = 0, index: int = 0, **more: Any) -> dict[str, Any]:
    """A row of `steps`: 4 token rows that attend 1 + 2 + 3 + 4 positions, 1 ms."""
    row = {"arm": arm, "pass": pass_, "repeat": repeat, "order": 0, "step": number, "index": index, "phase": "prefill"}
    return {**row, "rows": 4, "context": 10, "wall_ns": 1_000_000, **more}
