"""The run folder: the one writer and the one reader.

Every table is a folder of Parquet parts. A part is written beside its place and renamed into it, so
whatever the moment of a kill, each part that has its final name is whole. Parts belong to a cell;
the manifest lists a cell as done only after its parts are on disk, which is what `resume` builds on.

Not here: what the rows mean (`records`), and any arithmetic on them (`analysis`).
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from profiler.errors import InputError, StoreError
from profiler.records import FORMAT, TABLES, CellRecord, Manifest

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

MANIFEST = "manifest.json"
SPEC = "spec.yaml"
SESSION_CELL = "session"

#: Rows of one table held in memory before they become a part; the bound on the writer's memory.
ROWS_PER_PART = 200_000
#: Batches waiting for the writer thread. Past it a batch is dropped and counted, never waited for.
QUEUE_BATCHES = 512


@dataclass(frozen=True)
class Rows:
    """Rows of one table and cell: column name → values of equal lengths (list, NumPy or Arrow), or a scalar.

    `schema` is needed only for a table that `records.TABLES` does not name.
    """

    table: str
    cell: str
    columns: Mapping[str, Any]
    schema: pa.Schema | None = None


Work = Callable[[], Iterable[Rows]]


def _write_aside(path: Path, data: bytes) -> None:
    """Write `data` so that `path` is the old file or the new one, whole, at any moment."""
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _explain(error: OSError, folder: Path) -> StoreError:
    return StoreError(
        f"cannot write the run folder {folder}: {error.strerror or error}. "
        "What was complete before is kept and readable; free the cause and use --resume."
    )


class RunWriter:
    """Writes one run folder. Rows go through a bounded queue to a thread; the manifest is written by the caller.

    Use as a context manager: an exception leaves the manifest `failed` (or `interrupted` on Ctrl-C) with
    every recorded row flushed.

    Args:
        folder: new, empty, or with `resume` an unfinished run of the same spec.
        manifest: its first state; the writer keeps and rewrites it.
        spec_yaml: the spec as resolved, or None for a session.
        rank: this process's rank; parts carry it, and only rank 0 writes the manifest.
        resume: continue an unfinished run; parts of cells that were not done are discarded.

    Raises:
        InputError: the folder holds something else, a finished run, or a run of another spec.
        StoreError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        spec_yaml: str | None = None,
        *,
        rank: int = 0,
        resume: bool = False,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.manifest = manifest
        self._buffers: dict[tuple[str, str], list[pa.RecordBatch]] = defaultdict(list)
        self._held: dict[tuple[str, str], int] = defaultdict(int)
        self._queue: queue.Queue[Work | threading.Event | None] = queue.Queue(QUEUE_BATCHES)
        self._error: Exception | None = None
        self._part = 0
        self._open(resume, spec_yaml)
        self._thread = threading.Thread(target=self._work, name="gatewise-writer", daemon=True)
        self._thread.start()

    def _open(self, resume: bool, spec_yaml: str | None) -> None:
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder}: it is a file; a run needs a folder of its own")
        held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
        if held and not resume:
            kind = "a run" if MANIFEST in held else f"{len(held)} other files"
            raise InputError(
                f"--out {folder}: the folder must be new or empty, and it holds {kind}. "
                "Choose another folder, or --resume to go on with an unfinished run."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if held:
                self._take_over()
            if spec_yaml is not None:
                _write_aside(folder / SPEC, spec_yaml.encode())
            self.save_manifest()
        except OSError as error:
            raise _explain(error, folder) from error

    def _take_over(self) -> None:
        """Continue an unfinished run: keep done cells and their parts, drop the rest."""
        before = Run(self.folder)
        if before.manifest.spec_sha256 != self.manifest.spec_sha256:
            raise InputError(
                f"--resume {self.folder}: its spec (sha256 {str(before.manifest.spec_sha256)[:12]}) is not the one "
                f"given (sha256 {str(self.manifest.spec_sha256)[:12]}); a run has one spec"
            )
        if before.state == "complete":
            raise InputError(f"--resume {self.folder}: the run is complete; a run is never changed after it is closed")
        if before.state == "running":
            raise InputError(
                f"--resume {self.folder}: process {before.manifest.pid} is still writing it; stop that one first"
            )
        done = {cell.name for cell in before.manifest.cells if cell.done}
        for part in sorted(self.folder.glob("*/*.parquet")) + sorted(self.folder.glob("*/.*.tmp-*")):
            if part.name.startswith(".") or _cell_of_part(part) not in {_slug(name) for name in done}:
                part.unlink()
        self._part = 1 + max((_number_of_part(p) for p in self.folder.glob("*/*.parquet")), default=-1)
        kept = {cell.name: cell for cell in before.manifest.cells if cell.done}
        self.manifest.cells = [kept.get(cell.name, cell) for cell in self.manifest.cells]
        self.manifest.rules = [rule for rule in before.manifest.rules if rule.cell in kept]
        self.manifest.counts = dict(before.manifest.counts)
        self.manifest.drops = dict(before.manifest.drops)
        self.manifest.created_utc = before.manifest.created_utc

    # -- rows -----------------------------------------------------------------------------------

    def append(
        self, table: str, columns: Mapping[str, Sequence[Any] | Any], *, cell: str, schema: pa.Schema | None = None
    ) -> bool:
        """Hand rows of `table` to the writer thread. Never waits.

        Args:
            table: a name in `records.TABLES`, or any name with its `schema`.
            columns: column name → values (list, NumPy array or Arrow array), equal lengths; a scalar fills its column.
            cell: the cell the rows belong to; written into the `cell` column where the table has one.

        Returns:
            False if the queue was full and the rows were dropped (and counted in `manifest.drops`).

        Raises:
            StoreError: the writer thread met an error (disk full, folder gone).
        """
        rows = Rows(table, cell, columns, schema)
        return self.submit(lambda: [rows], dropped_as=table)

    def submit(self, work: Work, *, dropped_as: str) -> bool:
        """Hand over work that makes rows; it runs on the writer thread, in order. Never waits.

        Args:
            work: called once, returns the rows to write.
            dropped_as: what one dropped call is counted as in `manifest.drops`.

        Returns:
            False if the queue was full and the work was dropped and counted.

        Raises:
            StoreError: the writer thread met an error (disk full, folder gone).
        """
        self._raise_error()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.manifest.drops[dropped_as] = self.manifest.drops.get(dropped_as, 0) + 1
            return False
        return True

    def drain(self) -> None:
        """Wait until the thread has taken every row handed over so far (they may still be in memory)."""
        done = threading.Event()
        while self._thread.is_alive():
            try:
                self._queue.put(done, timeout=0.1)
                break
            except queue.Full:
                continue
        while not done.wait(0.1) and self._thread.is_alive():
            pass
        self._raise_error()

    def flush(self) -> None:
        """Put every row handed over so far on disk, as closed parts."""
        self.drain()
        for key in list(self._buffers):
            try:
                self._write_part(*key)
            except OSError as error:
                self._error = error
                break
        self._raise_error()

    def close_cell(self, cell: CellRecord) -> None:
        """Flush, then mark the cell done in the manifest."""
        self.flush()
        cell.done = True
        self.save_manifest()

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):
            raise _explain(self._error, self.folder) from self._error
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._error is not None:
                continue
            try:
                for rows in item():
                    self._hold(rows)
            except Exception as error:  # kept, and raised on the caller's next call
                self._error = error

    def _hold(self, rows: Rows) -> None:
        schema = rows.schema if rows.schema is not None else TABLES[rows.table]
        batch = _batch(schema, rows.columns, rows.cell, self.rank)
        key = (rows.table, rows.cell)
        self._buffers[key].append(batch)
        self._held[key] += batch.num_rows
        self.manifest.counts[rows.table] = self.manifest.counts.get(rows.table, 0) + batch.num_rows
        if self._held[key] >= ROWS_PER_PART:
            self._write_part(*key)

    def _write_part(self, table: str, cell: str) -> None:
        batches = self._buffers[(table, cell)]
        if not batches:
            return
        folder = self.folder / table
        folder.mkdir(exist_ok=True)
        name = f"part-{_slug(cell)}-r{self.rank}-{self._part:06d}.parquet"
        self._part += 1
        aside = folder / f".{name}.tmp-{os.getpid()}"
        try:
            pq.write_table(pa.Table.from_batches(batches), aside, compression="zstd")
            os.replace(aside, folder / name)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._buffers[(table, cell)] = []
        self._held[(table, cell)] = 0

    # -- manifest -------------------------------------------------------------------------------

    def save_manifest(self) -> None:
        """Write the manifest (rank 0 only), atomically."""
        if self.rank == 0:
            _write_aside(self.folder / MANIFEST, self.manifest.model_dump_json(indent=1).encode())

    def finish(self, state: str, detail: str | None = None, finished_utc: str | None = None) -> None:
        """Flush and close. The manifest says how the run ended even when the last rows could not be written."""
        problem: StoreError | None = None
        try:
            self.flush()
        except StoreError as error:
            problem = error
        self._queue.put(None)
        self._thread.join()
        self.manifest.state = cast(Any, "failed" if problem else state)
        self.manifest.state_detail = str(problem) if problem else detail
        self.manifest.finished_utc = finished_utc
        try:
            self.save_manifest()
        except OSError as error:
            problem = problem or _explain(error, self.folder)
        if problem is not None:
            raise problem


def _slug(cell: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in cell)


def _cell_of_part(part: Path) -> str:
    return part.name.removeprefix("part-").rsplit("-r", 1)[0]


def _number_of_part(part: Path) -> int:
    return int(part.stem.rsplit("-", 1)[1])


def _batch(schema: pa.Schema, columns: Mapping[str, Any], cell: str, rank: int) -> pa.RecordBatch:
    """One Arrow batch of `schema`; absent columns are null, scalars are repeated."""
    sizes = {len(v) for v in columns.values() if hasattr(v, "__len__") and not isinstance(v, str)}
    if len(sizes) > 1:
        raise ValueError(f"columns of different lengths: {sorted(sizes)}")
    rows = sizes.pop() if sizes else 1
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise ValueError(f"no such column: {sorted(unknown)}")
    filled = {"cell": cell, "rank": rank, **columns}
    arrays = []
    for field in schema:
        value = filled.get(field.name)
        if isinstance(value, pa.Array):
            arrays.append(value.cast(field.type))
        elif value is None or isinstance(value, str) or not hasattr(value, "__len__"):
            arrays.append(pa.repeat(pa.scalar(value, field.type), rows))
        else:
            arrays.append(pa.array(value, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


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
            raw = (self.path / MANIFEST).read_text()
        except OSError as error:
            raise StoreError(f"{self.path} is not a run folder: {MANIFEST} {error.strerror or error}") from error
        try:
            found = json.loads(raw)
            number = found.get("format")
        except (ValueError, AttributeError) as error:
            raise StoreError(f"{self.path}/{MANIFEST} is not readable JSON: {error}") from error
        if not isinstance(number, int) or number > FORMAT:
            raise StoreError(f"{self.path} has format {number}; this version reads up to {FORMAT}. Update gatewise.")
        try:
            self.manifest = Manifest.model_validate(found)
        except ValueError as error:
            raise StoreError(f"{self.path}/{MANIFEST} does not fit format {number}: {error}") from error
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
        return path.read_text() if path.exists() else None

    def tables(self) -> list[str]:
        """Names of the tables that have at least one part."""
        return sorted({part.parent.name for part in self.path.glob("*/part-*.parquet")})

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """A table as a DuckDB relation; empty, with its columns, if nothing was recorded."""
        import duckdb

        if self._connection is None:
            self._connection = duckdb.connect()
        if name in self.tables():
            pattern = str(self.path / name / "part-*.parquet")
            return self._connection.read_parquet(pattern, union_by_name=True)
        if name not in TABLES:
            raise StoreError(f"{self.path} has no table {name!r}; it has {', '.join(self.tables()) or 'none'}")
        return self._connection.from_arrow(TABLES[name].empty_table())

    def frame(self, name: str) -> pd.DataFrame:
        """A table as a pandas frame."""
        return self.table(name).df()

    def bytes_on_disk(self) -> int:
        """Size of the folder in bytes."""
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())


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
