"""Reading a run folder: the manifest, and every table as a DuckDB relation or a pandas frame.

Every table is a folder of Parquet parts; a part that has its final name is whole (`writer` sees to it), so a killed or
running run opens with what was closed.

A folder that was changed by hand is told apart from one that is only unfinished: every part and file that cannot be
read ends in a `StoreError` that names it, and `Run.mismatches` compares the rows that are there with the manifest's
counts of them.

Not here: writing (`writer`), what the rows mean (`records`), and any arithmetic on them (`analysis`).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from profiler.errors import StoreError
from profiler.records import FORMAT, QUALITY_CELLS, TABLES, Manifest

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

MANIFEST = "manifest.json"
SPEC = "spec.yaml"
#: What a manifest's values that are wrong are told by, in the words of a sentence; pydantic's kinds of error.
_RULES = {
    "missing": "is missing",
    "literal_error": "must be {expected}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}


@dataclass(frozen=True)
class Mismatch:
    """Rows of a table, in all or of one cell, that are on disk and those that the manifest says were written."""

    table: str
    cell: str | None
    written: int
    on_disk: int

    def __str__(self) -> str:
        of = f" of cell {self.cell}" if self.cell is not None else ""
        return f"table {self.table}{of} has {self.on_disk:,} of {self.written:,} rows"


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
            raw = _read_ordinary(self.path / MANIFEST)
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
            raise StoreError(f"{self.path / MANIFEST} does not fit format {number}: {_said(error)}") from error
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
        """The spec as resolved, or None for a session or an import.

        Raises:
            StoreError: the file is there and cannot be read, or is no text.
        """
        path = self.path / SPEC
        try:
            return _read_ordinary(path).decode("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise StoreError(
                f"{path} must be UTF-8 text, and byte 0x{error.object[error.start]:02x} at offset {error.start:,} is "
                "not; it is not as it was written"
            ) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error

    def tables(self) -> list[str]:
        """Names of the tables that have at least one part."""
        return sorted({part.parent.name for part in self.path.glob("*/part-*.parquet")})

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """A table as a DuckDB relation; empty, with its columns, if nothing was recorded.

        Raises:
            StoreError: there is no such table, or a part of it is damaged or has other columns than the format.
        """
        import duckdb

        if self._connection is None:
            self._connection = duckdb.connect()
        if name in self.tables():
            parts = f"{glob.escape(str(self.path / name))}/part-*.parquet"
            try:
                found = self._connection.read_parquet(parts, union_by_name=True)
            except duckdb.Error as error:
                raise StoreError(f"{self.path / name} cannot be read: {error}") from error
            if name in TABLES:
                empty = self._connection.from_arrow(TABLES[name].empty_table())
                self._check_columns(name, dict(zip(found.columns, found.types, strict=True)), empty)
            return found
        if name not in TABLES:
            raise StoreError(f"{self.path} has no table {name!r}; it has {', '.join(self.tables()) or 'none'}")
        return self._connection.from_arrow(TABLES[name].empty_table())

    def _check_columns(self, name: str, found: dict[str, object], expected: duckdb.DuckDBPyRelation) -> None:
        for column, kind in zip(expected.columns, expected.types, strict=True):
            if column not in found:
                raise StoreError(f"{self.path / name}: it has no column {column!r}, which format {FORMAT} has")
            if found[column] != kind:
                raise StoreError(f"{self.path / name}: column {column!r} holds {found[column]}, and must hold {kind}")

    def frame(self, name: str) -> pd.DataFrame:
        """A table as a pandas frame.

        Raises:
            StoreError: as `table`.
        """
        import duckdb

        try:
            found: pd.DataFrame = self.table(name).df()
        except duckdb.Error as error:  # a part is looked into when its rows are asked for
            raise StoreError(f"{self.path / name} cannot be read: {error}") from error
        return found

    @cached_property
    def mismatches(self) -> list[Mismatch]:
        """Where rows are missing, or there twice, by the manifest's counts; empty in a folder nobody changed.

        A done cell has all its rows whatever became of the run, and a run that was closed has all rows of each table.
        Rows that only a run that was not closed lacks are no mismatch: what a kill can take is not counted on.

        Raises:
            StoreError: a part is damaged.
        """
        manifest = self.manifest
        on_disk: dict[str, Counter[str]] = {}
        for part in self.path.glob("*/part-*.parquet"):
            on_disk.setdefault(part.parent.name, Counter())[cell_of_part(part)] += _rows_of(part)
        found = []

        def compare(written: dict[str, int], cell: str, names: Iterable[str]) -> None:
            for table, rows in sorted(written.items()):
                there = sum(on_disk.get(table, Counter[str]())[slug(name)] for name in names)
                if there != rows:
                    found.append(Mismatch(table, cell, rows, there))

        for cell in manifest.cells:
            if cell.done:
                compare(cell.counts, cell.name, [cell.name])
        if manifest.quality is not None and manifest.quality.done:
            compare(manifest.quality.counts, "quality", QUALITY_CELLS.values())
        # Ranks that are interrupted cannot tell rank 0 what they wrote last.
        if manifest.state == "complete" or (manifest.state == "interrupted" and len(manifest.ranks) < 2):
            told = {mismatch.table for mismatch in found}
            for table in sorted({*on_disk, *manifest.counts} - told):
                there, written = on_disk.get(table, Counter[str]()).total(), manifest.counts.get(table, 0)
                if there != written:
                    found.append(Mismatch(table, None, written, there))
        return found

    def bytes_on_disk(self) -> int:
        """Size of the folder in bytes; what is just being written aside is left out."""
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file() and ".tmp-" not in p.name)


def slug(cell: str) -> str:
    """A cell's name as parts are named after it."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in cell)


def cell_of_part(part: Path) -> str:
    """The `slug` of the cell that a part belongs to; parts of the whole run have a name that no cell has."""
    return part.name.removeprefix("part-").rsplit("-r", 1)[0]


def _rows_of(part: Path) -> int:
    """Rows of a part, by its footer alone."""
    try:
        return int(pq.read_metadata(part).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{part} cannot be read: {str(error).splitlines()[0]}") from error


def _read_ordinary(path: Path) -> bytes:
    """The bytes of a file; a pipe or a device, whose end may never come, is an OSError like any other."""
    if path.exists() and not path.is_file():
        raise OSError("it is no ordinary file")
    return path.read_bytes()


def _said(error: ValueError) -> str:
    """The first thing that a manifest's model finds wrong, and how much else."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False)
    first = problems[0]
    key = ".".join(str(step) for step in first["loc"])
    rule = _RULES.get(first["type"], "does not hold what it must").format_map(first.get("ctx", {}))
    given = "" if first["type"] == "missing" else f", and it is {str(first['input'])[:80]!r}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{key} {rule}{given}{more}"


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
