"""Whether a run folder's tables and its manifest belong together, before anything is computed from them.

A run that was killed is not whole and still true: what is there was written. A folder changed by hand may be neither.
Rows that are there twice, rows of an arm or a choice that the manifest does not name, and times that no step can take
are refused with what is wrong; rows that are missing are told beside the results (`missing`), since the rest is as it
was. Whether a part can be read at all, and has its columns, is the store's to say.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import duckdb

from analysis.wording import how_many
from profiler.errors import StoreError
from profiler.records import QUALITY_CELLS, Phase
from profiler.store import Mismatch, Run

#: What every row has, table by table; `arm` and `cell` are among the manifest's.
NEVER_NULL = {
    "steps": ("arm", "cell", "pass", "repeat", "index", "step", "phase", "rows", "context", "rank"),
    "gates": ("arm", "cell", "step", "phase", "request", "position", "layer", "site", "choices", "rows"),
    "rows": ("arm", "cell", "step", "layer", "site", "choice", "rows", "padded", "context", "context_full"),
    "segments": ("arm", "cell", "step", "layer", "segment", "ns", "rank"),
    "kernels": ("arm", "cell", "step", "name", "category", "dur_ns", "rank"),
    "scores": ("arm", "task", "item", "mode", "nll", "tokens"),
    "tokens": ("cell", "request", "position"),
    "token_scores": ("arm", "cell", "request", "position", "nll", "hit"),
}


def check(run: Run) -> None:
    """Refuse a folder whose figures would be wrong.

    Raises:
        StoreError: what is wrong, with the table and the numbers.
    """
    twice = [mismatch for mismatch in run.mismatches if mismatch.on_disk > mismatch.written]
    if twice:
        raise StoreError(f"{run.path}: {twice[0]} that were written: parts of it are there more than once; remove them")
    _check_names(run)
    _check_rows(run)
    _check_choices(run)
    _check_steps(run)
    _check_once(run, "steps", ["step", "rank"])
    _check_once(run, "scores", ["arm", "task", "item", "mode"])


def missing(run: Run) -> list[str]:
    """What should be there and is not, one part of a sentence for each table; empty for a folder nobody changed."""
    lacking: dict[str, list[Mismatch]] = {}
    for mismatch in run.mismatches:
        if mismatch.on_disk < mismatch.written:
            lacking.setdefault(mismatch.table, []).append(mismatch)
    found = []
    for table, parts in lacking.items():
        of = f" of {len(parts)} cells" if len(parts) > 1 else f" of cell {parts[0].cell}" if parts[0].cell else ""
        there, written = sum(part.on_disk for part in parts), sum(part.written for part in parts)
        found.append(f"table {table}{of} has {there:,} of {how_many(written, 'row')}")
    return found


def _check_names(run: Run) -> None:
    manifest = run.manifest
    choices = [f"layer {c.layer} {c.site} {c.index} of arm {arm.name}" for arm in manifest.arms for c in arm.choices]
    for kind, names in (
        ("arm", [arm.name for arm in manifest.arms]),
        ("cell", [cell.name for cell in manifest.cells]),
        ("choice", choices),
    ):
        twice = {name for name, times in Counter(names).items() if times > 1}
        if twice:
            raise StoreError(f"{run.path}: the manifest has {kind} {_first(twice)!r} more than once")


def _check_rows(run: Run) -> None:
    """Every row has what every row has, and is of an arm and a cell that there are."""
    arms = {arm.name for arm in run.manifest.arms}
    timed = _distinct(run, "steps", "cell")  # a session that was killed early has cells that only they name
    cells = {*(cell.name for cell in run.manifest.cells), *timed, *QUALITY_CELLS.values()}
    for table, columns in NEVER_NULL.items():
        nulls_of = ", ".join(f'count(*) - count("{column}")' for column in columns)
        (counted,) = _fetch(run, table, run.table(table).aggregate(nulls_of))
        for column, nulls in zip(columns, counted, strict=True):
            if nulls:
                raise StoreError(
                    f"{run.path}: table {table} has {how_many(nulls, 'row')} without a value in column {column!r}"
                )
        for kind, known in (("arm", arms), ("cell", cells)):
            if kind not in columns:
                continue
            found = _distinct(run, table, kind)
            if found - known:
                raise StoreError(
                    f"{run.path}: table {table} has rows of {kind} {_first(found - known)!r}, and the manifest's "
                    f"{kind}s are {', '.join(sorted(known)) or 'none'}"
                )


def _check_choices(run: Run) -> None:
    known = {(arm.name, c.layer, c.site, c.index) for arm in run.manifest.arms for c in arm.choices}
    for table, choice in (("rows", "choice"), ("gates", "unnest(choices)")):
        keys = run.table(table).project(f"arm, layer, site, {choice} as choice").distinct()
        unknown = set(_fetch(run, table, keys)) - known
        if unknown:
            arm, layer, site, index = _first(unknown)
            raise StoreError(
                f"{run.path}: table {table} has choice {index} of site {site!r} in layer {layer}, and the manifest has "
                f"no such choice of arm {arm!r}"
            )


def _check_steps(run: Run) -> None:
    phases = _distinct(run, "steps", "phase")
    if phases - set(get_args(Phase)):
        raise StoreError(
            f"{run.path}: table steps has a phase {_first(phases - set(get_args(Phase)))!r}; a phase is one of "
            f"{', '.join(get_args(Phase))}"
        )
    timeless = _count(run, "steps", run.table("steps").filter("wall_ns <= 0"))
    if timeless:
        raise StoreError(
            f"{run.path}: table steps has {how_many(timeless, 'step')} of 0 ns or less, which no step takes"
        )
    empty = _count(run, "scores", run.table("scores").filter("tokens <= 0"))
    if empty:
        raise StoreError(
            f"{run.path}: table scores has {how_many(empty, 'item')} of 0 scored tokens or less; each has one at least"
        )


def _check_once(run: Run, table: str, key: list[str]) -> None:
    rows = run.table(table).aggregate(f"{', '.join(key)}, count(*) as times")
    again = _count(run, table, rows.filter("times > 1"))
    if again:
        raise StoreError(
            f"{run.path}: table {table} has {how_many(again, 'row')} more than once, by {', '.join(key)}; remove the "
            "copies of its parts"
        )


def _distinct(run: Run, table: str, column: str) -> set[Any]:
    return {value for (value,) in _fetch(run, table, run.table(table).project(column).distinct())}


def _count(run: Run, table: str, rows: duckdb.DuckDBPyRelation) -> int:
    ((number,),) = _fetch(run, table, rows.aggregate("count(*)"))
    return int(number)


def _fetch(run: Run, table: str, relation: duckdb.DuckDBPyRelation) -> list[Any]:
    """The rows of a relation over `table`, which is looked into only now."""
    try:
        return relation.fetchall()
    except duckdb.Error as error:
        raise StoreError(f"{run.path / table} cannot be read: {error}") from error


def _first(found: Any) -> Any:
    """One of a set, the same each time."""
    return min(found, key=repr)
