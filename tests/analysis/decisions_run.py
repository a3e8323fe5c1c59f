"""A run whose quality pass decided what a test says: inputs, routes, logits and scores by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.records import ArmRecord, CellRecord, Choice, Manifest, QualityRecord, signals_schema, signals_table
from profiler.store import Run
from profiler.writer import RunWriter
from tests.analysis.tiny_run import CELL

GATED = "gated on prefix"


@dataclass(frozen=True)
class Input:
    """One held-out input: its place in the corpus, what gates saw of it, and what each arm scores on 10 tokens."""

    name: str
    domain: str | None = "math"
    tokens: int = 10
    rank: float = 100.0
    nll: Mapping[str, float] = field(default_factory=dict)
    scored: int = 10


@dataclass(frozen=True)
class Arm:
    """An arm that skips blocks. `routes`: one text an input, '1' where the block runs and '0' where it skips."""

    name: str
    routes: Sequence[str] = ()
    twin: str | None = "dense"
    starts: Sequence[float] = ()
    logits: Sequence[Sequence[float]] = ()
    synthetic: str | None = None
    untrained: bool = False
    method: str = "layerroute"

    def record(self, layers: int) -> ArmRecord:
        """What the manifest says of it."""
        choices = [
            Choice(layer=i, site="block", index=k, name=name, backbone_parameters=100 * k)
            for i in range(layers)
            for k, name in enumerate(("skip", "run"))
        ]
        return ArmRecord(
            name=self.name,
            method=self.method,
            twin=self.twin,
            scope="sequence",
            choices=choices,
            synthetic=self.synthetic,
            untrained=self.untrained,
            signals={"logit": "s"} if self.starts else {},
            signal_starts={"logit": list(self.starts)} if self.starts else {},
        )


DENSE = ArmRecord(
    name="dense", method="dense", choices=[Choice(layer=0, site="ffn", index=0, name="run", backbone_parameters=7)]
)


def write_decisions(
    folder: Path,
    inputs: Sequence[Input],
    arms: Sequence[Arm],
    *,
    cell: str = "quality",
    cells: Sequence[CellRecord] = (CELL,),
    more: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Run:
    """A complete run with these decisions, in two steps an input: prompt, then continuation with the same gates."""
    layers = max((len(route) for arm in arms for route in arm.routes), default=1)
    manifest = Manifest(
        name=folder.name,
        created_utc="2026-01-02T03:04:05Z",
        pid=1,
        host="nowhere",
        arms=[DENSE, *(arm.record(layers) for arm in arms)],
        cells=[record.model_copy() for record in cells],
        quality=QualityRecord(items=len(inputs), tokens=sum(i.scored for i in inputs), modes=[GATED], done=True),
    )
    writer = RunWriter(folder, manifest)
    columns = {
        "request": [i.name for i in inputs],
        "domain": [i.domain for i in inputs],
        "tokens": [i.tokens for i in inputs],
        "mean_token_rank": [i.rank for i in inputs],
    }
    writer.append("prompts", columns, cell=cell)
    step = 0
    for arm in arms:
        schema = signals_schema(["logit"])
        for given, route in zip(inputs, arm.routes, strict=bool(arm.routes)):
            for phase, rows in (("prefill", given.tokens), ("mixed", given.scored)):
                key = {"arm": arm.name, "step": step, "request": given.name, "position": -1, "site": "block"}
                step += 1
                gates = {
                    **key, "phase": phase, "layer": list(range(layers)), "rows": rows,
                    "choices": [[int(c)] for c in route], "gate": [float(c) for c in route],
                }  # fmt: skip
                writer.append("gates", gates, cell=cell)
                if arm.logits:
                    place = [i.name for i in inputs].index(given.name)
                    logits = {**key, "layer": list(range(layers)), "logit": list(arm.logits[place])}
                    writer.append(signals_table(arm.method), logits, cell=cell, schema=schema)
                writer.drain()
    for name in dict.fromkeys(name for i in inputs for name in i.nll):
        scored = [i for i in inputs if name in i.nll]
        scores = {
            "arm": name, "task": "perplexity", "item": [i.name for i in scored], "domain": [i.domain for i in scored],
            "mode": GATED, "nll": [i.nll[name] for i in scored], "tokens": [i.scored for i in scored],
            "prefix_tokens": [i.tokens for i in scored],
        }  # fmt: skip
        writer.append("scores", scores, cell=cell)
    for table, lines in (more or {}).items():
        for line in lines:
            writer.append(table, {k: [v] for k, v in line.items() if k != "cell"}, cell=line.get("cell", cell))
            writer.drain()
    writer.finish("complete")
    return Run(folder)
