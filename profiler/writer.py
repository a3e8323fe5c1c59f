"""Writing a run folder: rows through a bounded queue to one thread, parts and manifest whole at any moment.

A part is written beside its place and renamed into it, so whatever the moment of a kill, each part that has its final
name is whole. Parts belong to a cell, or to the run (telemetry); the manifest lists a cell as done only after its parts
are on disk, which is what `resume` builds on.

Not here: reading (`store`), what the rows mean (`records`).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from profiler.errors import InputError, StoreError
from profiler.records import PLACEMENTS, QUALITY_CELLS, TABLES, CellRecord, Manifest, QualityRecord, State
from profiler.store import MANIFEST, SPEC, Run, cell_of_part, slug

#: Room for one more manifest, given back at the end, so that even on a full disk it can be said how a run ended.
RESERVE = ".reserve"

#: Rows of one table held in memory before they become a part; the bound on the writer's memory.
ROWS_PER_PART = 200_000
#: Seconds after which held rows become parts however few they are; what a kill can cost a user's own loop.
SECONDS_PER_PART = 20.0
#: Batches waiting for the writer thread. Past it a batch is dropped and counted, never waited for.
QUEUE_BATCHES = 512

#: What a resumed run must share with the one it goes on with, beside its spec: facts, and versions.
SAME_MACHINE = ("cpu", "cores_usable", "torch_threads")
SAME_VERSIONS = ("gatewise", "torch", "transformers")


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


@dataclass
class _Held:
    """Rows of one table and cell that are no part yet."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0


@dataclass(frozen=True)
class _Barrier:
    """Set by the writer thread once all that was handed over before is taken, and on disk if `flush`."""

    flush: bool
    reached: threading.Event


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that `path` is the old one or the new one, whole, at any moment."""
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def check_folder(folder: Path, *, resume: bool = False, spec_sha256: str | None = None, processes: int = 1) -> None:
    """Refuse a folder that a run cannot be written into. Nothing is written.

    Args:
        folder: new or empty; with `resume` an unfinished run of this spec.
        processes: how many write it together, one a rank.

    Raises:
        InputError: it is a file, holds something else, or with `resume` nothing, a closed run, a running one, another
            spec's, or one of another number of processes.
        StoreError: it cannot be looked into, or with `resume` is not a run, or lacks rows it should have.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder}: it is a file; a run needs a folder of its own")
        held = _held(folder)
    except OSError as error:
        raise StoreError(f"--out {folder}: cannot be used: {error.strerror or error}") from error
    if resume and not held:
        what = "it is empty" if folder.exists() else "there is no such folder"
        raise InputError(f"--resume {folder}: {what}, so no run to go on with; leave out --resume to start one")
    if resume:
        _check_unfinished(Run(folder), spec_sha256, processes)
    elif held:
        one = "one other file" if len(held) == 1 else f"{len(held)} other files"
        raise InputError(
            f"--out {folder}: the folder must be new or empty, and it holds {'a run' if MANIFEST in held else one}. "
            "Choose another folder, or --resume to go on with an unfinished run."
        )


def _held(folder: Path) -> list[str]:
    """Names of what is in the folder, leftovers of a writer killed before it had written anything apart."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    return [name for name in names if not name.startswith((f".{MANIFEST}.tmp-", f".{SPEC}.tmp-"))]


class RunWriter:
    """Writes one run folder. Rows go through a bounded queue to a thread; the manifest is written by the caller.

    Whoever makes one calls `finish`, whatever happens (`run.opened` does).

    Args:
        folder: new or empty, or with `resume` an unfinished run of the same spec.
        manifest: its first state; the writer keeps and rewrites it.
        spec_yaml: the spec as resolved, or None for a session.
        rank: this process's rank; parts carry it. Rank 0 makes the folder and alone writes the manifest; the others
            come after it.
        resume: continue an unfinished run; parts of cells that were not done are discarded.

    Raises:
        InputError: the folder holds something else, a finished run, or a run of another spec or machine.
        StoreError: the folder cannot be made or written, or what `resume` finds there cannot be read.
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
        # Both are the writer thread's own once it runs.
        self._buffers: dict[tuple[str, str], _Held] = defaultdict(_Held)
        self._part = 0
        self._flushed = time.monotonic()
        self._on_disk: defaultdict[str, Counter[str]] = defaultdict(Counter)  # cell → table → rows
        self._queue: queue.Queue[Work | _Barrier | None] = queue.Queue(QUEUE_BATCHES)
        self._error: Exception | None = None
        self._tallies = threading.Lock()
        self._open(resume, spec_yaml)
        self._thread = threading.Thread(target=self._work, name="gatewise-writer", daemon=True)
        self._thread.start()

    def _open(self, resume: bool, spec_yaml: str | None) -> None:
        folder = self.folder
        if self.rank != 0:
            parts = folder.glob(f"*/part-*-r{self.rank}-*.parquet")
            self._part = max((1 + _number(part) for part in parts), default=0)
            return
        processes = max(1, len(self.manifest.ranks))
        check_folder(folder, resume=resume, spec_sha256=self.manifest.spec_sha256, processes=processes)
        ours = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            dropped = self._take_over() if resume else []
            self._save_manifest()
            for part in dropped:
                part.unlink()
            if spec_yaml is not None:
                _write_whole(folder / SPEC, lambda file: file.write(spec_yaml.encode()))
            room = os.urandom(2 * (folder / MANIFEST).stat().st_size)  # zeros may take no room at all
            _write_whole(folder / RESERVE, lambda file: file.write(room))
        except OSError as error:
            if not resume:
                self._undo(ours)
            raise StoreError(f"cannot make the run folder {folder}: {error.strerror or error}") from error

    def _undo(self, ours: bool) -> None:
        """Leave nothing of a folder that could not be begun."""
        with suppress(OSError):
            for name in (RESERVE, SPEC, MANIFEST):
                (self.folder / name).unlink(missing_ok=True)
            if ours:
                self.folder.rmdir()

    def _take_over(self) -> list[Path]:
        """Continue an unfinished run: keep done cells, their parts and the run's own.

        Returns:
            The parts to be dropped, once the manifest no longer counts them: a kill in between then loses nothing.
        """
        before = Run(self.folder)
        _check_conditions(before, self.manifest)
        kept = {cell.name: cell for cell in before.manifest.cells if cell.done}
        quality = before.manifest.quality if before.manifest.quality and before.manifest.quality.done else None
        whole = {*kept, *(QUALITY_CELLS.values() if quality else ())}
        known = {*(cell.name for cell in before.manifest.cells), *QUALITY_CELLS.values()}
        undone = {slug(name) for name in (*known, PLACEMENTS)} - {slug(name) for name in whole}
        for leftover in [*self.folder.glob(".*.tmp-*"), *self.folder.glob("*/.*.tmp-*")]:
            leftover.unlink()
        counts: Counter[str] = Counter()
        dropped = []
        for part in sorted(self.folder.glob("*/part-*.parquet")):
            # Past dropped ones too: the name of a part never stands for two contents.
            self._part = max(self._part, 1 + _number(part))
            if cell_of_part(part) in undone:
                dropped.append(part)
            else:
                counts[part.parent.name] += pq.read_metadata(part).num_rows
        manifest = self.manifest
        manifest.cells = [kept.get(cell.name, cell) for cell in manifest.cells]
        manifest.quality = quality
        manifest.rules = [rule for rule in before.manifest.rules if rule.cell in whole]
        manifest.counts = dict(counts)
        manifest.drops = dict(before.manifest.drops)
        manifest.contention = dict(before.manifest.contention)
        manifest.resumed_utc = [*before.manifest.resumed_utc, manifest.created_utc]
        manifest.created_utc = before.manifest.created_utc
        return dropped

    # -- rows -----------------------------------------------------------------------------------

    def append(
        self, table: str, columns: Mapping[str, Sequence[Any] | Any], *, cell: str, schema: pa.Schema | None = None
    ) -> bool:
        """Hand rows of `table` to the writer thread. Never waits.

        Args:
            table: a name in `records.TABLES`, or any name with its `schema`.
            columns: column name → values (list, NumPy array or Arrow array), equal lengths; a scalar fills its column.
            cell: the cell the rows belong to, written into the `cell` column where the table has one; for rows of
                the whole run any name that no cell has.

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
            with self._tallies:
                self.manifest.drops[dropped_as] = self.manifest.drops.get(dropped_as, 0) + 1
            return False
        return True

    def drain(self) -> None:
        """Wait until the thread has taken every row handed over so far (they may still be in memory)."""
        self._wait(flush=False)

    def flush(self) -> None:
        """Put every row handed over so far on disk, as closed parts."""
        self._wait(flush=True)

    def _wait(self, *, flush: bool) -> None:
        barrier = _Barrier(flush, threading.Event())
        while self._thread.is_alive():
            try:
                self._queue.put(barrier, timeout=0.1)
                break
            except queue.Full:
                continue
        while not barrier.reached.wait(0.1) and self._thread.is_alive():
            pass
        self._raise_error()

    def written(self, cell: CellRecord | QualityRecord) -> Counter[str]:
        """Flush, and say how many rows of each table this rank has on disk for the cell, or for the quality pass.

        Raises:
            StoreError: they could not be written.
        """
        self.flush()
        names = [cell.name] if isinstance(cell, CellRecord) else QUALITY_CELLS.values()
        return sum((self._on_disk[name] for name in names), Counter[str]())

    def close_cell(self, cell: CellRecord | QualityRecord, elsewhere: Iterable[Counter[str]] = ()) -> None:
        """Flush, then mark the cell, or the quality pass, done in the manifest.

        Args:
            cell: which.
            elsewhere: what other ranks have `written` of it.

        Raises:
            StoreError: it could not be written; the cell is not done.
        """
        cell.counts = dict(sum(elsewhere, self.written(cell)))
        cell.done = True
        try:
            self.save_manifest()
        except StoreError:
            cell.done, cell.counts = False, {}
            raise

    def tallies(self) -> tuple[dict[str, int], dict[str, int]]:
        """Flush, and say how many rows of each table were written, and how many were dropped.

        Raises:
            StoreError: they could not be written.
        """
        self.flush()
        return dict(self.manifest.counts), dict(self.manifest.drops)

    def add(self, counts: Mapping[str, int], drops: Mapping[str, int]) -> None:
        """Put another rank's `tallies` into the manifest."""
        for mine, theirs in ((self.manifest.counts, counts), (self.manifest.drops, drops)):
            for name, number in theirs.items():
                mine[name] = mine.get(name, 0) + number

    def _explain(self, error: OSError) -> StoreError:
        advice = " Put the cause right and go on with --resume." if self.manifest.origin == "run" else ""
        return StoreError(
            f"cannot write the run folder {self.folder}: {error.strerror or error}. "
            f"What was complete before is kept and readable.{advice}"
        )

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):
            raise self._explain(self._error) from self._error
        if self._error is not None:
            raise self._error

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                # After an error the queue is emptied, so that nobody waits for it, and nothing is written.
                if self._error is None:
                    self._do(item)
            except Exception as error:  # kept, and raised on the caller's next call
                self._error = error
            if isinstance(item, _Barrier):
                item.reached.set()

    def _do(self, item: Work | _Barrier) -> None:
        if not isinstance(item, _Barrier):
            for rows in item():
                self._hold(rows)
        late = time.monotonic() - self._flushed > SECONDS_PER_PART
        if late or (isinstance(item, _Barrier) and item.flush):
            for key in self._buffers:
                self._write_part(*key)
            self._flushed = time.monotonic()

    def _hold(self, rows: Rows) -> None:
        schema = rows.schema if rows.schema is not None else TABLES[rows.table]
        batch = _batch(schema, rows.columns, rows.cell, self.rank)
        held = self._buffers[rows.table, rows.cell]
        held.batches.append(batch)
        held.rows += batch.num_rows
        with self._tallies:
            self.manifest.counts[rows.table] = self.manifest.counts.get(rows.table, 0) + batch.num_rows
        if held.rows >= ROWS_PER_PART:
            self._write_part(rows.table, rows.cell)

    def _write_part(self, table: str, cell: str) -> None:
        held = self._buffers[table, cell]
        if not held.batches:
            return
        folder = self.folder / table
        folder.mkdir(exist_ok=True)
        name = f"part-{slug(cell)}-r{self.rank}-{self._part:06d}.parquet"
        self._part += 1
        whole = pa.Table.from_batches(held.batches)
        _write_whole(folder / name, lambda file: pq.write_table(whole, file, compression="zstd"))
        self._on_disk[cell][table] += held.rows
        self._buffers[table, cell] = _Held()

    # -- manifest -------------------------------------------------------------------------------

    def save_manifest(self) -> None:
        """Write the manifest (rank 0 only), atomically.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            self._save_manifest()
        except OSError as error:
            raise self._explain(error) from error

    def _save_manifest(self) -> None:
        if self.rank != 0:
            return
        with self._tallies:
            text = self.manifest.model_dump_json(indent=1)
        _write_whole(self.folder / MANIFEST, lambda file: file.write(text.encode()))

    def finish(self, state: State, detail: str | None = None, finished_utc: str | None = None) -> None:
        """Flush and close. The manifest says how the run ended even when the last rows could not be written.

        Raises:
            StoreError: the last rows or the manifest could not be written.
        """
        problem: Exception | None = None
        try:
            self.flush()
        except Exception as error:
            problem = error
        self._queue.put(None)
        self._thread.join()
        self.manifest.state = "failed" if problem else state
        self.manifest.state_detail = str(problem) if problem else detail
        self.manifest.finished_utc = finished_utc
        try:
            if self.rank == 0:
                (self.folder / RESERVE).unlink(missing_ok=True)
            self._save_manifest()
        except OSError as error:
            problem = problem or self._explain(error)
        if problem is not None:
            raise problem


def _number(part: Path) -> int:
    """A part's place among those of its writer."""
    return int(part.stem.rpartition("-")[2])


def _check_unfinished(before: Run, spec_sha256: str | None, processes: int) -> None:
    """Refuse to go on with another spec's run, a closed one, one still being written, or one of other ranks."""
    old, where = before.manifest, f"--resume {before.path}"
    if old.spec_sha256 != spec_sha256:
        raise InputError(
            f"{where}: its spec (sha256 {str(old.spec_sha256)[:12]}) is not the one given "
            f"(sha256 {str(spec_sha256)[:12]}); a run has one spec"
        )
    if before.state == "complete":
        raise InputError(
            f"{where}: the run is complete, and a run is never changed after it is closed; read it with `python -m "
            f"profiler report {before.path}`, or start another under a new --out"
        )
    if before.state == "running":
        raise InputError(f"{where}: process {old.pid} on {old.host} is still writing it; stop that one first")
    ran = max(1, len(old.ranks))
    if ran != processes:
        how = f"start torchrun --nproc-per-node {ran}" if ran > 1 else "start one, without torchrun"
        raise InputError(
            f"{where}: the run was begun by {ran} processes, and is gone on with by {processes}; what a rank computes "
            f"depends on how many there are, so {how}, or start a new run"
        )
    if before.mismatches:
        raise StoreError(
            f"{where}: the folder is not as it was written: {before.mismatches[0]}. Cells marked done would be taken "
            "as they are; start a new run"
        )


def _check_conditions(before: Run, now: Manifest) -> None:
    """Refuse to mix cells of two models, machines or versions."""
    old, where = before.manifest, f"--resume {before.path}"
    facts = [(f"machine.{key}", old.machine.get(key), now.machine.get(key)) for key in SAME_MACHINE]
    facts += [("placing of ranks on nodes", _nodes(old), _nodes(now))]
    facts += [(f"version of {key}", old.versions.get(key), now.versions.get(key)) for key in SAME_VERSIONS]
    then_model, now_model = (each.model.model_dump() if each.model is not None else {} for each in (old, now))
    facts += [(f"model's {key}", then_model.get(key), now_model.get(key)) for key in then_model | now_model]
    for name, then, today in facts:
        if then != today:
            raise InputError(
                f"{where}: its {name} was {then}, and now it is {today}; cells measured under both cannot be "
                "compared, so start a new run"
            )


def _nodes(manifest: Manifest) -> list[int]:
    """The node of each rank, numbered in the order they come: names of hosts may change between two allocations."""
    number = {host: place for place, host in enumerate(dict.fromkeys(rank.host for rank in manifest.ranks))}
    return [number[rank.host] for rank in manifest.ranks]


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
    for column in schema:
        value = filled.get(column.name)
        if isinstance(value, pa.Array):
            arrays.append(value.cast(column.type))
        elif value is None or isinstance(value, str) or not hasattr(value, "__len__"):
            arrays.append(pa.repeat(pa.scalar(value, column.type), rows))
        else:
            arrays.append(pa.array(value, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
