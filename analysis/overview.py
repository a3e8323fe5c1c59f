"""What a run is: how it ended, what must be said beside every result of it, how it was made. And the list of runs.

Nothing measured is computed here; the recorder's cost is quoted from the ladder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import integrity
from analysis.kernels import TRACED_HIGH, TRACED_LOW
from analysis.ladder import ladder, refused
from analysis.latency import cells
from analysis.wording import how_many
from profiler.errors import StoreError
from profiler.records import CellRecord, Manifest
from profiler.store import MANIFEST, SPEC, Run, find_runs

CATALOGUE_COLUMNS = (
    "path", "name", "state", "created_utc", "model", "arms", "cells_done", "cells_total", "megabytes", "labels",
    "error",
)  # fmt: skip
#: Tables whose missing rows are named; the others are counted.
SHOWN = 4
RULE_COLUMNS = ("rule", "name", "arm", "cell", "passed", "detail")
CELL_COLUMNS = ("cell", "phase", "batch", "length", "new_tokens", "warmup_s", "repeats", "stopped", "done", "reference")
UNSUPPORTED_COLUMNS = ("metric", "reason")
#: What an arm said in a cell, one row each.
OUTPUT_COLUMNS = ("cell", "arm", "sha256")
#: Cost of the recorder as a share of a bare step, one row per (arm, cell).
RECORDER_COLUMNS = ("arm", "cell", "cost", "low", "high", "n", "note")
#: What a folder that is no readable run has for a state in the catalogue.
BROKEN = "unreadable"
#: State of a run that lacks rows it once had.
DAMAGED = "damaged"


@dataclass(frozen=True)
class Overview:
    """A run at a glance: what it is, what a reader must know first, and how it was made.

    Attributes:
        state: as `Run.state`, or `damaged`; `sentence` says it with what it means for the reader.
        labels: sentences to show beside every result (random weights, synthetic routes, contention, ...).
        facts: (name, value) pairs: model, machine, versions, commit.
        rules, cells, outputs, unsupported, recorder_cost: columns `RULE_COLUMNS`, `CELL_COLUMNS`, `OUTPUT_COLUMNS`,
            `UNSUPPORTED_COLUMNS`, `RECORDER_COLUMNS`; `cost`, `low` and `high` are shares of 1. `unsupported` has what
            the run could not measure, and the rungs that the ladder refused.
    """

    name: str
    state: str
    sentence: str
    labels: list[str]
    facts: list[tuple[str, str]]
    rules: pd.DataFrame
    cells: pd.DataFrame
    outputs: pd.DataFrame
    unsupported: pd.DataFrame
    recorder_cost: pd.DataFrame


def overview(run: Run, frame: pd.DataFrame | None = None) -> Overview:
    """Everything about `run` that is not a result.

    Args:
        frame: `ladder(run)` if the caller has it already.
    """
    manifest, found = run.manifest, cells(run)
    rungs = ladder(run) if frame is None else frame
    cost = rungs[rungs["rung"] == "recorder_cost"].rename(columns={"value": "cost"})
    cell_frame = _records(found, ["name", *CELL_COLUMNS[1:]]).rename(columns={"name": "cell"})
    return Overview(
        name=manifest.name,
        state=_state(run),
        sentence=_sentence(run, found),
        labels=labels(run),
        facts=_facts(run),
        rules=_records(manifest.rules, RULE_COLUMNS),
        cells=cell_frame,
        outputs=pd.DataFrame(
            [(cell.name, arm, said) for cell in found for arm, said in cell.outputs.items()],
            columns=list(OUTPUT_COLUMNS),
        ),
        unsupported=pd.concat([_records(manifest.unsupported, UNSUPPORTED_COLUMNS), _refused(rungs)]),
        recorder_cost=cost[list(RECORDER_COLUMNS)].reset_index(drop=True),
    )


def _records(records: list[Any], columns: list[str] | tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame([{c: getattr(record, c) for c in columns} for record in records], columns=list(columns))


def _refused(rungs: pd.DataFrame) -> pd.DataFrame:
    """Kernel times that the ladder would not give, as rows of `unsupported`; its notes have the figures."""
    without = rungs[rungs["note"].map(refused) != ""]
    limits = f"less than {TRACED_LOW} (CPU) or more than {TRACED_HIGH} × a median bare step"
    reason = f"a traced step's kernels took {limits}, as the rung's note says"
    lines = [(f"kernel time saved by {row.arm} in {row.cell}", reason) for row in without.itertuples()]
    return pd.DataFrame(lines, columns=list(UNSUPPORTED_COLUMNS))


def _state(run: Run) -> str:
    return DAMAGED if integrity.missing(run) else run.state


def _sentence(run: Run, found: list[CellRecord]) -> str:
    """How the run stands, with the cells that can be trusted to be whole."""
    manifest = run.manifest
    gone = integrity.missing(run)
    if gone:
        more = f" (and {how_many(len(gone) - SHOWN, 'more table')})" if len(gone) > SHOWN else ""
        return f"Data are missing that were written: {'; '.join(gone[:SHOWN])}{more}. What is left is shown."
    done = f"{sum(cell.done for cell in found)} of {how_many(len(found), 'cell')} done"
    detail = f": {manifest.state_detail}" if manifest.state_detail else ""
    kept = f"{done}; what is on disk is shown"
    return {
        "complete": f"Complete, {done}.",
        "running": f"Still running as process {manifest.pid} on {manifest.host}; {kept}.",
        "killed": f"Killed: process {manifest.pid} is gone and did not close the run; {kept}.",
        "interrupted": f"Interrupted{detail}; {kept}.",
        "failed": f"Failed{detail}; {kept}.",
    }[run.state]


def labels(run: Run) -> list[str]:
    """What must stand beside every result of `run`, most serious first."""
    manifest = run.manifest
    found = []
    broken = [rule for rule in manifest.rules if not rule.passed]
    for rule in broken:
        where = " ".join(part for part in (rule.arm, rule.cell) if part)
        found.append(f"rule {rule.rule} ({rule.name}) does not hold{' for ' + where if where else ''}: {rule.detail}")
    if manifest.model is not None and manifest.model.random_weights:
        found.append(f"random weights: model {manifest.model.source} has learned nothing, and its routes show nothing")
    for arm in manifest.arms:
        if arm.synthetic:
            found.append(f"synthetic route in arm {arm.name} ({arm.synthetic}): no router decided")
        if arm.untrained:
            found.append(f"untrained router in arm {arm.name}: its decisions are those of its starting values")
        if arm.discards:
            found.append(f"masked execution in arm {arm.name}: every choice computes all rows, so nothing is saved")
        if arm.caveat:
            found.append(f"{arm.caveat} (arm {arm.name})")
    if manifest.contention.get("contended"):
        found.append(f"contention detected. {manifest.contention.get('sentence', '')}".rstrip())
    if manifest.drops:
        lost = ", ".join(f"{table} {count}" for table, count in manifest.drops.items())
        found.append(f"dropped because the writer fell behind: {lost}")
    if manifest.evaluates is not None:
        found.append(
            f"quality only, of the arms of run {manifest.evaluates}, measured afterwards: nothing is timed here"
        )
    if manifest.origin == "session":
        found.append("a session: the user's own loop, no twin, and every step time includes the recorder")
    if not manifest.keeps_text:
        found.append("text withheld: the spec keeps no prompt or output text")
    return found


def _facts(run: Run) -> list[tuple[str, str]]:
    manifest = run.manifest
    facts = [
        ("folder", run.path.name),
        ("origin", manifest.origin),
        ("created", manifest.created_utc),
        ("finished", manifest.finished_utc or "not closed"),
        *_model_facts(manifest),
        ("arms", ", ".join(f"{arm.name} ({arm.method})" for arm in manifest.arms)),
        *((f"KV policy of {arm.name}", arm.kv_policy) for arm in manifest.arms if arm.kv_policy),
        ("spec sha256", manifest.spec_sha256 or "no spec"),
        ("contention", str(manifest.contention.get("sentence", "not judged: the run was not closed"))),
        ("host", manifest.host),
    ]
    machine = {name: value for name, value in manifest.machine.items() if name != "process_started"}
    facts += [(name.replace("_", " ").removesuffix(" bytes"), _said(name, value)) for name, value in machine.items()]
    commit = manifest.git.get("commit")
    if commit:
        facts.append(("commit", f"{commit}{' with uncommitted changes' if manifest.git.get('dirty') else ''}"))
    facts += [(f"{name} version", version) for name, version in manifest.versions.items()]
    facts.append(("size on disk", f"{run.bytes_on_disk() / 1e6:.1f} MB"))
    return facts


def _model_facts(manifest: Manifest) -> list[tuple[str, str]]:
    model = manifest.model
    if model is None:
        return [("model", "not recorded")]
    weights = (
        "random" if model.random_weights else f"sha256 {model.weights_sha256}" if model.weights_sha256 else "given"
    )
    return [
        ("model", f"{model.source} ({model.architecture})"),
        ("parameters", f"{model.parameters:,}"),
        ("layers × hidden", f"{model.layers} × {model.hidden}"),
        ("dtype", model.dtype),
        ("device", f"{model.device} ({model.device_name})"),
        ("weights", weights),
    ]


def _said(name: str, value: Any) -> str:
    """One fact of the machine: None was not found out, bytes are given in GiB."""
    if value is None:
        return "unknown or none"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none set"
    return str(value)


def catalogue(root: Path) -> pd.DataFrame:
    """Every run at or directly below `root`, newest first, columns `CATALOGUE_COLUMNS`; empty where there is none.

    A folder that cannot be read as a run, though it holds a manifest, a spec or tables, is listed last with state
    `unreadable` and the reason in `error`. `cells_done`, `cells_total` and `megabytes` (10^6 bytes) are <NA> there.
    """
    lines = []
    for path in find_runs(root):
        try:
            lines.append(_listed(Run(path)))
        except StoreError as error:
            lines.append(_unreadable(path, str(error)))
    folders = sorted(path for path in root.glob("*") if path.is_dir()) if not (root / MANIFEST).exists() else []
    lines += [
        _unreadable(path, f"it has parts of a run and no {MANIFEST}")
        for path in folders
        if not (path / MANIFEST).exists() and ((path / SPEC).exists() or any(path.glob("*/part-*.parquet")))
    ]
    lines.sort(key=lambda line: line["state"] == BROKEN)
    found = pd.DataFrame(lines, columns=list(CATALOGUE_COLUMNS))
    return found.astype({"cells_done": "Int64", "cells_total": "Int64", "megabytes": "Float64"})


def _listed(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "path": str(run.path),
        "name": manifest.name,
        "state": _state(run),
        "created_utc": manifest.created_utc,
        "model": manifest.model.source if manifest.model is not None else None,
        "arms": ", ".join(arm.name for arm in manifest.arms),
        "cells_done": sum(cell.done for cell in manifest.cells),
        "cells_total": len(manifest.cells),
        "megabytes": run.bytes_on_disk() / 1e6,
        "labels": "; ".join(labels(run)),
        "error": None,
    }


def _unreadable(path: Path, error: str) -> dict[str, Any]:
    return {"path": str(path), "name": path.name, "state": BROKEN, "error": error}
