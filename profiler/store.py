"""Reading a run folder: the manifest, and every table as a DuckDB relation or a pandas frame.

Every table is a folder of Parquet parts; a part that has its final name is whole (`writer` sees to it), so a killed or
running run opens with what was closed.

Not here: writing (`writer`), what the rows mean (`records`), and any arithmetic on them (`analysis`).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import StoreError
from profiler.records import FORMAT, TABLES, Manifest

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

MANIFEST = "manifest.json"
SPEC = "spec.yaml"


class Run:
    """A run folder, opened for reading. Works on a killed or running run: what was closed is there.

    Args:
        path: the folder.

    Raises:
        StoreError: no manifest there, or one of a later format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            raw = (self.path / MANIFEST).read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path} is not a run folder: {MANIFEST}: {error.strerror or error}") from error
        try:
            found = json.loads(raw)
            number = found.get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.path / MANIFEST} is not a JSON object: {error}") from error
        if type(number) is not int or number < 1:
            raise StoreError(f"{self.path / MANIFEST} must name its format, a number from 1, and it says {number!r}")
        if number > FORMAT:
            raise StoreError(f"{self.path} has format {number}; this version reads up to {FORMAT}. Update gatewise.")
        try:
            self.manifest = Manifest.model_validate(found)
        except ValueError as error:
            raise StoreError(f"{self.path / MANIFEST} does not fit format {number}: {error}") from error
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    def state(self) -> str:
        """`complete`, `interrupted`, `failed`, `running`, or `killed` (says running, its process is gone)."""
        manifest = self.manifest
        if manifest.state != "running":
            return manifest.state
        if manifest.host != os.uname().nodename:
            return "running"
        return "running" if _alive(manifest.pid, manifest.machine.get("process_started")) else "killed"

    @property
    def spec_yaml(self) -> str | None:
        """The spec as resolved, or None for a session or an import."""
        path = self.path / SPEC
        return path.read_text(encoding="utf-8") if path.exists() else None

    def tables(self) -> list[str]:
        """Names of the tables that have at least one part."""
        return sorted({part.parent.name for part in self.path.glob("*/part-*.parquet")})

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """A table as a DuckDB relation; empty, with its columns, if nothing was recorded.

        Raises:
            StoreError: there is no such table, or a part of it is damaged.
        """
        import duckdb

        if self._connection is None:
            self._connection = duckdb.connect()
        if name in self.tables():
            parts = f"{glob.escape(str(self.path / name))}/part-*.parquet"
            try:
                return self._connection.read_parquet(parts, union_by_name=True)
            except duckdb.Error as error:
                raise StoreError(f"{self.path / name} cannot be read: {error}") from error
        if name not in TABLES:
            raise StoreError(f"{self.path} has no table {name!r}; it has {', '.join(self.tables()) or 'none'}")
        return self._connection.from_arrow(TABLES[name].empty_table())

    def frame(self, name: str) -> pd.DataFrame:
        """A table as a pandas frame."""
        found: pd.DataFrame = self.table(name).df()
        return found

    def bytes_on_disk(self) -> int:
        """Size of the folder in bytes; what is just being written aside is left out."""
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file() and ".tmp-" not in p.name)


def _alive(pid: int, started: float | None) -> bool:
    """Whether the process that wrote the manifest still runs (a reused pid does not count)."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) < 2.0
    except psutil.Error:
        return False


def find_runs(root: Path) -> list[Path]:
    """Run folders at or directly under `root`, newest first by the manifest's time of change."""
    if (root / MANIFEST).exists():
        return [root]
    if not root.is_dir():
        return []
    found = [p.parent for p in root.glob(f"*/{MANIFEST}")]
    return sorted(found, key=lambda p: (p / MANIFEST).stat().st_mtime, reverse=True)


def free_bytes(path: Path) -> int:
    """Free disk space where `path` is or would be."""
    probe = path.absolute()
    while not probe.exists():
        probe = probe.parent
    return shutil.disk_usage(probe).free
