"""A run whose arms decided about single tokens what a test says: gates, signals, scores and costs by hand.

Three blocks, of which 1 and 2 are routed. FLOPs a row: attention 100 and 2 an attended position, FFN 60, adapter 7,
router 5, head 1,000. A token's blocks without anything left out or added: 3·100 + 3·60 = 480, and 6 an attended
position; what always runs: 3·100 + 60 + 2·5 = 370, and the same 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.records import (
    FORGET_FACTOR,
    ArmRecord,
    CalibrationRecord,
    CellRecord,
    Choice,
    Manifest,
    QualityRecord,
    signals_schema,
    signals_table,
)
from profiler.store import Run
from profiler.writer import RunWriter
from tests.analysis.tiny_run import CELL

GATED = "gated on prefix"
LAYERS = (1, 2)


@dataclass(frozen=True)
class Token:
    """One token: its gate and signal `p` in layers 1 and 2; it takes the FFN from 0.5 on.

    `hit`: whether the token after it was the likeliest, None where that is not scored. `reference`: whether that one is
    of a reference. `nll` of it. `occurrences` in all inputs. `more`: further signals, the same names in all tokens.
    """

    request: str
    position: int
    gate: tuple[float, float]
    p: tuple[float | None, float | None] = (0.5, 0.5)
    hit: bool | None = None
    reference: bool = True
    nll: float = 1.0
    occurrences: int | None = 1
    more: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def choices() -> list[Choice]:
    """See the module's docstring."""
    found = [Choice(layer=-1, site="head", index=0, name="run", backbone_parameters=20, flops_per_row=1000)]
    for layer in range(3):
        found.append(
            Choice(
                layer=layer, site="attention", index=0, name="run", backbone_parameters=10, flops_per_row=100,
                flops_per_context=2,
            )
        )  # fmt: skip
        if layer in LAYERS:
            found += [
                Choice(layer=layer, site="router", index=0, name="run", overhead_parameters=3, flops_per_row=5),
                Choice(layer=layer, site="ffn", index=0, name="adapter", replacement_parameters=4, flops_per_row=7),
            ]
        found.append(
            Choice(
                layer=layer, site="ffn", index=1 if layer in LAYERS else 0, name="run", backbone_parameters=50,
                flops_per_row=60,
            )
        )  # fmt: skip
    return found


def arm(name: str, **more: Any) -> ArmRecord:
    """An arm that decides for tokens."""
    given: dict[str, Any] = {
        "name": name, "method": "hero", "twin": "dense", "scope": "token", "choices": choices(),
        "signals": {"p": "p_j, the history score"}, "constants": {FORGET_FACTOR: {1: 0.5, 2: 1.0}},
        "memory": {"form": "dual", "bytes_per_row": 7168},
    }  # fmt: skip
    return ArmRecord(**{**given, **more})


def calibrated(wanted: float, achieved: float, held_out: int = 4) -> CalibrationRecord:
    """Where an arm's threshold comes from."""
    return CalibrationRecord(
        option="adapter_rate", wanted=wanted, achieved=achieved, threshold=0.5, decisions=100, prompts=4, tokens=50,
        rounds=2, held_out=held_out,
    )  # fmt: skip


DENSE = ArmRecord(
    name="dense", method="dense", choices=[Choice(layer=0, site="ffn", index=0, name="run", backbone_parameters=50)]
)


def write_tokens(
    folder: Path,
    tokens: Mapping[str, Sequence[Token]],
    arms: Sequence[ArmRecord],
    domains: Mapping[str, str] | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    cell: str = "quality",
) -> Run:
    """A complete run; every token of every arm is decided about in one step a request.

    Args:
        tokens: arm → its tokens.
        domains: request → domain.
        scores: arm → item → Σ −log p over 10 tokens.
    """
    requests = list(dict.fromkeys(token.request for each in tokens.values() for token in each))
    manifest = Manifest(
        name=folder.name,
        created_utc="2026-01-02T03:04:05Z",
        pid=1,
        host="nowhere",
        arms=[DENSE, *arms],
        cells=[CELL.model_copy() if cell == "quality" else CellRecord(**{**CELL.model_dump(), "name": cell})],
        quality=QualityRecord(items=len(requests), tokens=10, modes=[GATED], done=True),
    )
    writer = RunWriter(folder, manifest)
    of = [(domains or {}).get(request) for request in requests]
    prompts = {"request": requests, "domain": of, "tokens": 3, "mean_token_rank": 1.0}
    writer.append("prompts", prompts, cell=cell)
    seen = {(t.request, t.position): t for each in tokens.values() for t in each}
    for token in seen.values():
        known = {"request": [token.request], "position": token.position, "occurrences": token.occurrences}
        writer.append("tokens", {**known, "token": 7}, cell=cell)
        writer.drain()
    step = 0
    for name, each in tokens.items():
        for request in requests:
            own = [token for token in each if token.request == request]
            for token in own:
                _decide(writer, cell, name, step, token)
            columns = {"arm": [name], "pass": "quality", "repeat": 0, "order": 0, "step": step, "index": 0}
            writer.append(
                "steps", {**columns, "phase": "prefill", "rows": len(own), "context": 1, "wall_ns": 1}, cell=cell
            )
            for place, layer in enumerate(LAYERS):
                ran = sum(token.gate[place] >= 0.5 for token in own)
                counted = {"arm": name, "step": step, "layer": layer, "site": "ffn", "choice": [0, 1]}
                none = {"padded": 0, "context": 0, "context_full": 0}
                writer.append("rows", {**counted, **none, "rows": [len(own) - ran, ran]}, cell=cell)
            writer.drain()
            step += 1
    for name, of_item in (scores or {}).items():
        items = list(of_item)
        scored = {
            "arm": name, "task": "perplexity", "item": items, "domain": [(domains or {}).get(i) for i in items],
            "mode": GATED, "nll": list(of_item.values()), "tokens": 10, "prefix_tokens": 3,
        }  # fmt: skip
        writer.append("scores", scored, cell=cell)
    writer.finish("complete")
    return Run(folder)


def _decide(writer: RunWriter, cell: str, name: str, step: int, token: Token) -> None:
    key = {"arm": name, "step": step, "request": token.request, "position": token.position, "site": "ffn"}
    gates = {
        **key, "phase": "prefill", "layer": list(LAYERS), "rows": 1, "gate": list(token.gate),
        "choices": [[int(gate >= 0.5)] for gate in token.gate],
    }  # fmt: skip
    writer.append("gates", gates, cell=cell)
    signals = {**key, "layer": list(LAYERS), "p": list(token.p), **{k: list(v) for k, v in token.more.items()}}
    writer.append(signals_table("hero"), signals, cell=cell, schema=signals_schema(["p", *token.more]))
    if token.hit is not None:
        columns = {"arm": name, "request": token.request, "position": token.position, "nll": [token.nll]}
        writer.append("token_scores", {**columns, "hit": token.hit, "reference": token.reference}, cell=cell)
    writer.drain()
