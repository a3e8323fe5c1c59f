"""A small hand-made run folder: four layers, three arms, three cells, every table. No torch, no timing.

Everything is fixed, so that tests can work its figures out by hand. The constants below are the worked
numbers' source; what a reader of the folder should find is stated in the tests, not here.

Legend: hidden 64, GQA with half the key/value heads, FFN 192, vocabulary 1000, float32, head tied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from profiler.records import (
    ArmRecord,
    CellRecord,
    Choice,
    Manifest,
    ModelRecord,
    RuleRecord,
    Unsupported,
    signals_schema,
    signals_table,
)
from profiler.writer import RunWriter

HIDDEN, VOCABULARY, LAYERS, LENGTH, NEW_TOKENS = 64, 1000, 4, 32, 4
ATTENTION_PARAMETERS = 64 * 64 * 2 + 64 * 32 * 2 + 64  # q, o; k, v; norm = 12,352
FFN_PARAMETERS = 3 * 64 * 192 + 64  # = 36,928
BLOCK_PARAMETERS = ATTENTION_PARAMETERS + FFN_PARAMETERS  # = 49,280
ATTENTION_FLOPS, FFN_FLOPS, CONTEXT_FLOPS = 2 * 12_288, 2 * 36_864, 4 * 64
BACKBONE_PARAMETERS = VOCABULARY * HIDDEN + HIDDEN + LAYERS * BLOCK_PARAMETERS  # = 261,184
ROUTER_PARAMETERS, ROUTER_FLOPS = HIDDEN + 1, 2 * HIDDEN

#: request → (domain, text, which of the four layers the routed arm runs).
REQUESTS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "r0": ("math", "What is 17 * 24? Work it out step by step & show < each > line.", (1, 0, 1, 1)),
    "r1": ("code", "Write a function that reverses a linked list.", (1, 1, 0, 1)),
    "r2": ("tool_call", '{"tool": "weather", "city": "Zürich"}', (1, 0, 0, 1)),
    "r3": ("prose", "It was late in the evening when the train at last arrived.", (1, 1, 1, 1)),
}
#: The forced arm skips these layers for every request, at a rate of 0.5.
FORCED = (1, 0, 1, 0)

#: (arm, cell) → wall time of a bare step in ns, before the repeat's wobble.
WALL_NS = {
    ("dense", "prefill-b1-l32"): 2_000_000,
    ("routed", "prefill-b1-l32"): 2_200_000,
    ("forced", "prefill-b1-l32"): 1_300_000,
    ("dense", "prefill-b4-l32"): 6_000_000,
    ("routed", "prefill-b4-l32"): 5_100_000,
    ("forced", "prefill-b4-l32"): 3_600_000,
    ("dense", "decode-b4-c32-n4"): 1_000_000,
    ("routed", "decode-b4-c32-n4"): 1_050_000,
    ("forced", "decode-b4-c32-n4"): 640_000,
}
#: Per mille, one a repeat; each arm starts at another place. Symmetric, so that the median of 7 repeats has 0.
WOBBLE = (0, 4, -4, 8, -8, 12, -12)
ARM_SHIFT = {"dense": 0, "routed": 1, "forced": 2}
#: A session's cells take the times of these.
TIMED_LIKE = {"session-prefill": "prefill-b4-l32", "session-decode": "decode-b4-c32-n4"}
#: Bare = 1; what the other passes cost more. Warm-up is far off, so that counting it would show.
PASS_FACTOR = {"warmup": 10.0, "bare": 1.0, "instrumented": 1.02, "traced": 1.5}
#: Share of an instrumented step's wall time in each segment; the remaining 6 % is nobody's.
SEGMENT_SHARE = {"embedding": 0.02, "norm": 0.01, "head": 0.11, "attention": 0.32, "ffn": 0.48}

Stage = Literal["all", "start", "mid-cell"]


def write_example_run(
    folder: Path,
    *,
    state: str = "complete",
    random_weights: bool = False,
    arms: Sequence[str] = ("dense", "routed", "forced"),
    twin: str | None = "dense",
    stage: Stage = "all",
    traced: bool = True,
    nan_gates: bool = False,
    keeps_text: bool = True,
    origin: Literal["run", "session"] = "run",
    contention: bool = False,
    name: str = "example",
) -> Path:
    """Write a run into `folder` (new or empty) and return it.

    Args:
        state: `complete`, `interrupted`, `failed`, `running` (this process writes it) or `killed`.
        random_weights: what the manifest says of the model.
        arms: which of dense, routed (layerroute, untrained) and forced (synthetic) are there.
        twin: the twin the routed arms name; it need not exist.
        stage: `all`; `start`: nothing measured yet; `mid-cell`: the last cell is not done, and there the
            last arm lacks the last two repeats.
        traced: whether there is a traced pass with kernels.
        nan_gates: gates of decisions are NaN (a method that has no gate value).
        keeps_text: False writes prompts without text.
        origin: `session`: instrumented steps only, cells session-prefill and session-decode.
        contention: the manifest says another process was on our cores.
    """
    cells = _cells(origin)
    for cell in {"all": [], "start": cells, "mid-cell": cells[-1:]}[stage]:
        cell.repeats, cell.stopped = 0, None
    manifest = _manifest(name, state, random_weights, arms, twin, cells, keeps_text, origin, contention)
    for cell in cells if origin == "run" and stage != "start" else []:
        # The dense arm says one thing, and those that skip another that they agree on.
        cell.outputs = {arm: ("0123456789abcdef" if arm == "dense" else "fedcba9876543210") * 4 for arm in arms}
    writer = RunWriter(folder, manifest, None if origin == "session" else SPEC_YAML)
    if stage != "start":
        steps = _counter()
        for cell in cells:
            cut = stage == "mid-cell" and cell is cells[-1]
            _write_cell(writer, cell, steps, traced=traced, nan_gates=nan_gates, cut=cut)
            if cut:
                break
            writer.close_cell(cell)
        _write_telemetry(writer, cells[0].name)
    detail = {"failed": "RuleError: rows executed (96) differ from gates recorded (128)", "interrupted": "Ctrl-C"}
    writer.finish("running" if state == "killed" else state, detail.get(state), finished_utc=_finished(state))
    return folder


SPEC_YAML = """\
name: example
model: {source: tiny, dtype: float32}
arms:
- {name: dense, method: dense}
- {name: routed, method: layerroute, kv_policy: request}
- {name: forced, method: layerroute, gates: {forced: {ratio: 0.5, seed: 0, pattern: shared}}}
prompts: {source: builtin, domains: [math, code, tool_call, prose], count: 4}
cells:
  prefill: {batch: [1, 4], length: [32]}
  decode: {batch: [4], context: [32], new_tokens: 4}
measure: {warmup: 1, max_repeats: 7, target_ci: 0.02, budget_s: 120, seed: 0}
trace: {steps: 2}
"""


def _finished(state: str) -> str | None:
    return None if state in ("running", "killed") else "2026-01-02T03:09:05Z"


def _counter() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


# -- manifest -----------------------------------------------------------------------------------------------------


def _whole_model() -> list[Choice]:
    size, rate = 4, VOCABULARY * HIDDEN
    return [
        Choice(layer=-1, site="embedding", index=0, name="run", segments=["embedding"], backbone_parameters=rate),
        Choice(
            layer=-1,
            site="norm",
            index=0,
            name="run",
            segments=["norm"],
            backbone_parameters=HIDDEN,
            weight_bytes=HIDDEN * size,
        ),
        Choice(
            layer=-1,
            site="head",
            index=0,
            name="run",
            segments=["head"],
            flops_per_row=2 * rate,
            weight_bytes=rate * size,
        ),
    ]


def _dense_choices() -> list[Choice]:
    choices = _whole_model()
    for layer in range(LAYERS):
        choices += [
            Choice(
                layer=layer,
                site="attention",
                index=0,
                name="run",
                segments=["attention"],
                backbone_parameters=ATTENTION_PARAMETERS,
                flops_per_row=ATTENTION_FLOPS,
                flops_per_context=CONTEXT_FLOPS,
                weight_bytes=4 * ATTENTION_PARAMETERS,
                kv_bytes_per_row=256,
            ),
            Choice(
                layer=layer,
                site="ffn",
                index=0,
                name="run",
                segments=["ffn"],
                backbone_parameters=FFN_PARAMETERS,
                flops_per_row=FFN_FLOPS,
                weight_bytes=4 * FFN_PARAMETERS,
            ),
        ]
    return choices


def _routed_choices() -> list[Choice]:
    choices = _whole_model()
    for layer in range(LAYERS):
        choices += [
            Choice(
                layer=layer,
                site="router",
                index=0,
                name="run",
                segments=["router"],
                overhead_parameters=ROUTER_PARAMETERS,
                flops_per_row=ROUTER_FLOPS,
                weight_bytes=4 * ROUTER_PARAMETERS,
            ),
            Choice(layer=layer, site="block", index=0, name="skip", segments=["attention", "ffn"]),
            Choice(
                layer=layer,
                site="block",
                index=1,
                name="run",
                segments=["attention", "ffn"],
                backbone_parameters=BLOCK_PARAMETERS,
                flops_per_row=ATTENTION_FLOPS + FFN_FLOPS,
                flops_per_context=CONTEXT_FLOPS,
                weight_bytes=4 * BLOCK_PARAMETERS,
                kv_bytes_per_row=256,
            ),
        ]
    return choices


def _arm(name: str, twin: str | None) -> ArmRecord:
    if name == "dense":
        return ArmRecord(name="dense", method="dense", choices=_dense_choices())
    forced = name == "forced"
    return ArmRecord(
        name=name,
        method="layerroute",
        twin=twin,
        scope="sequence",
        kv_policy="request",
        synthetic="forced: 50% of layers skip, pattern shared, seed 0" if forced else None,
        untrained=not forced,
        signals={"logit": "s_i"},
        choices=_routed_choices(),
    )


def _cells(origin: str) -> list[CellRecord]:
    if origin == "session":
        return [
            CellRecord(name="session-prefill", phase="prefill", batch=4, length=LENGTH, stopped="session", repeats=1),
            CellRecord(name="session-decode", phase="decode", batch=4, length=LENGTH, stopped="session", repeats=1),
        ]
    repeats = len(WOBBLE)
    return [
        CellRecord(name="prefill-b1-l32", phase="prefill", batch=1, length=LENGTH, repeats=repeats, stopped="interval"),
        CellRecord(name="prefill-b4-l32", phase="prefill", batch=4, length=LENGTH, repeats=repeats, stopped="budget"),
        CellRecord(
            name="decode-b4-c32-n4",
            phase="decode",
            batch=4,
            length=LENGTH,
            new_tokens=NEW_TOKENS,
            repeats=repeats,
            stopped="repeats",
            reference="teacher-forced on the dense arm's greedy continuation",
        ),
    ]


def _manifest(
    name: str,
    state: str,
    random_weights: bool,
    arms: Sequence[str],
    twin: str | None,
    cells: list[CellRecord],
    keeps_text: bool,
    origin: Literal["run", "session"],
    contention: bool,
) -> Manifest:
    import psutil

    alive = state == "running"
    machine: dict[str, Any] = {
        "cpu": "example 4-core",
        "cores_usable": 4,
        "memory_bytes": 8 * 2**30,
        "cores_quota": None,
        "thread_variables": {"OMP_NUM_THREADS": "4"},
    }
    if alive:
        machine["process_started"] = psutil.Process().create_time()
    return Manifest(
        name=name,
        created_utc="2026-01-02T03:04:05Z",
        # Past the largest pid Linux hands out, so that it is surely gone.
        pid=os.getpid() if alive else 2**22 + 1,
        host=os.uname().nodename,
        spec_sha256=None if origin == "session" else "5e" * 32,
        origin=origin,
        versions={"gatewise": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.9"},
        git={"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        machine=machine,
        model=ModelRecord(
            source="tiny",
            architecture="LlamaForCausalLM",
            parameters=BACKBONE_PARAMETERS,
            layers=LAYERS,
            hidden=HIDDEN,
            dtype="float32",
            device="cpu",
            device_name="example 4-core",
            random_weights=random_weights,
            weights_sha256=None if random_weights else "ab" * 32,
        ),
        arms=[_arm(arm, None if origin == "session" else twin) for arm in arms],
        cells=cells,
        rules=[] if origin == "session" else _rules(arms),
        contention=_contention(contention),
        unsupported=[
            Unsupported(metric="gpu telemetry", reason="no NVIDIA driver on this machine"),
            Unsupported(metric="device_ns", reason="the CPU has no device clock"),
        ],
        keeps_text=keeps_text,
    )


def _contention(contended: bool) -> dict[str, Any]:
    seen = "other processes used {} of our cores' time in the busiest of 9 windows (limit 10%)"
    if contended:
        return {"contended": True, "sentence": f"Contended: {seen.format('38.0%')}.", "others_share_max": 0.38}
    within = f"No contention seen. Within limits: {seen.format('0.4%')}."
    return {"contended": False, "sentence": within, "others_share_max": 0.004}


def _rules(arms: Sequence[str]) -> list[RuleRecord]:
    rules = []
    for arm in arms:
        rules += [
            RuleRecord(
                rule=6,
                name="forced open equals its twin",
                arm=arm,
                passed=True,
                detail="open: logits differ by 1.9e-06 of the largest (allowed 1e-03), 0 decisions differ, "
                "2 gates within rounding of their threshold",
                figures={"logit_difference": 1.9e-6, "decisions_differing": 0.0, "gates_near_threshold": 2.0},
            ),
            RuleRecord(
                rule=1,
                name="rows executed = gates recorded",
                arm=arm,
                cell="prefill-b4-l32",
                passed=True,
                detail="equal in 7 instrumented steps, 0 dropped",
                figures={"steps": 7.0, "differences": 0.0, "dropped": 0.0},
            ),
        ]
    return rules


# -- rows of tables -------------------------------------------------------------------------------------------------


def _write_cell(
    writer: RunWriter, cell: CellRecord, numbers: Iterator[int], *, traced: bool, nan_gates: bool, cut: bool
) -> None:
    manifest = writer.manifest
    requests = list(REQUESTS)[: cell.batch]
    session = manifest.origin == "session"
    writer.append(
        "prompts",
        {
            "request": requests,
            "domain": [None if session else REQUESTS[r][0] for r in requests],
            "tokens": [LENGTH] * len(requests),
            "text": [REQUESTS[r][1] if manifest.keeps_text and not session else None for r in requests],
        },
        cell=cell.name,
    )
    names = [arm.name for arm in manifest.arms]
    plan: list[tuple[str, int]] = [("instrumented", 0)]
    if not session:
        plan = [("warmup", 0), *((p, r) for r in range(len(WOBBLE)) for p in ("bare", "instrumented"))]
        plan += [("traced", r) for r in range(2)] if traced else []
    for pass_, repeat in plan:
        for index in range(NEW_TOKENS if cell.phase == "decode" else 1):
            for order, arm in enumerate(names if repeat % 2 == 0 else names[::-1]):
                if cut and arm == names[-1] and repeat >= len(WOBBLE) - 2:
                    continue
                _write_step(writer, cell, arm, pass_, repeat, index, order, next(numbers), requests, nan_gates)
        writer.drain()  # the queue is bounded and drops; this loop makes rows faster than any model


def _write_step(
    writer: RunWriter,
    cell: CellRecord,
    arm: str,
    pass_: str,
    repeat: int,
    index: int,
    order: int,
    step: int,
    requests: list[str],
    nan_gates: bool,
) -> None:
    per_request, context_each, full_each = LENGTH, LENGTH * (LENGTH + 1) // 2, LENGTH * LENGTH
    if cell.phase == "decode":
        per_request, context_each, full_each = 1, LENGTH + index + 1, LENGTH + index + 1
    wobble = 0 if pass_ == "traced" else WOBBLE[(repeat + ARM_SHIFT[arm]) % len(WOBBLE)]
    bare = WALL_NS[(arm, TIMED_LIKE.get(cell.name, cell.name))]
    wall = round(bare * (1 + wobble / 1000) * PASS_FACTOR[pass_])
    key = {"arm": arm, "step": step}
    writer.append(
        "steps",
        {
            **key,
            "pass": pass_,
            "repeat": repeat,
            "order": order,
            "index": index,
            "phase": cell.phase,
            "rows": per_request * len(requests),
            "context": context_each * len(requests),
            "wall_ns": wall,
        },
        cell=cell.name,
    )
    if pass_ == "instrumented":
        _write_segments(writer, cell.name, key, wall, arm)
        if repeat == 0:
            _write_rows(writer, cell.name, key, requests, per_request, context_each, full_each)
            writer.append(
                "kv",
                {**key, "allocated_bytes": LAYERS * len(requests) * 64 * 256, "live_bytes": LAYERS * 8192},
                cell=cell.name,
            )
            if arm != "dense":
                _write_gates(writer, cell, key, requests, per_request, nan_gates)
    if pass_ == "traced":
        _write_kernels(writer, cell.name, key, wall)


def _runs(arm: str, request: str, layer: int) -> int:
    if arm == "dense":
        return 1
    return FORCED[layer] if arm == "forced" else REQUESTS[request][2][layer]


def _write_rows(
    writer: RunWriter,
    cell: str,
    key: dict[str, Any],
    requests: list[str],
    per_request: int,
    context_each: int,
    full_each: int,
) -> None:
    """A line for each product that ran: none for embedding and norm; the head sees the last row of each request;
    a router sees one pooled row a request, in prefill only.

    No pads: the prompts of a cell have one length.
    """
    all_rows, decode = len(requests) * per_request, per_request == 1
    lines: list[tuple[int, str, int, int]] = [(-1, "head", 0, len(requests))]
    attended: list[int] = [0]
    for layer in range(LAYERS):
        running = sum(_runs(key["arm"], r, layer) for r in requests)
        if key["arm"] == "dense":
            lines += [(layer, "attention", 0, all_rows), (layer, "ffn", 0, all_rows)]
            attended += [running, 0]
            continue
        if not decode:
            lines.append((layer, "router", 0, len(requests)))
            attended.append(0)
        if running:
            lines.append((layer, "block", 1, running * per_request))
            attended.append(running)
    writer.append(
        "rows",
        {
            **key,
            "layer": [line[0] for line in lines],
            "site": [line[1] for line in lines],
            "choice": [line[2] for line in lines],
            "rows": [line[3] for line in lines],
            "padded": 0,
            "context": [a * context_each for a in attended],
            "context_full": [a * full_each for a in attended],
        },
        cell=cell,
    )


def _write_gates(
    writer: RunWriter, cell: CellRecord, key: dict[str, Any], requests: list[str], rows: int, nan_gates: bool
) -> None:
    pairs = [(r, layer) for r in requests for layer in range(LAYERS)]
    chosen = [_runs(key["arm"], r, layer) for r, layer in pairs]
    # A forced route leaves the router's own value beside it: at the start of training, layer 1 of 4 leans to skip.
    forced = key["arm"] == "forced"
    logits = [
        (-1.0 if layer == 1 else 1.0) if forced else 2.0 * c - 1.0 for (_, layer), c in zip(pairs, chosen, strict=True)
    ]
    where = {
        "request": [r for r, _ in pairs],
        "position": -1,
        "layer": [layer for _, layer in pairs],
        "site": "block",
    }
    writer.append(
        "gates",
        {
            **key,
            **where,
            "phase": cell.phase,
            "choices": [[c] for c in chosen],
            "weights": [[1.0]] * len(pairs),
            "gate": [math.nan if nan_gates else 1 / (1 + math.exp(-s)) for s in logits],
            "rows": rows,
        },
        cell=cell.name,
    )
    writer.append(
        signals_table("layerroute"),
        {**key, **where, "logit": logits},
        cell=cell.name,
        schema=signals_schema(["logit"]),
    )


def _write_segments(writer: RunWriter, cell: str, key: dict[str, Any], wall: int, arm: str) -> None:
    lines = [(-1, s, SEGMENT_SHARE[s]) for s in ("embedding", "norm", "head")]
    for layer in range(LAYERS):
        lines += [(layer, s, SEGMENT_SHARE[s] / LAYERS) for s in ("attention", "ffn")]
        if arm != "dense":
            lines.append((layer, "router", 0.02 / LAYERS))
    writer.append(
        "segments",
        {
            **key,
            "layer": [line[0] for line in lines],
            "segment": [line[1] for line in lines],
            "ns": [round(wall * line[2]) for line in lines],
        },
        cell=cell,
    )


def _write_kernels(writer: RunWriter, cell: str, key: dict[str, Any], wall: int) -> None:
    """Busy time is 0.8 of a traced step: 0.5 in FFN products, 0.2 in attention, 0.1 outside every segment."""
    names = ["aten::mm", "aten::mm", "aten::scaled_dot_product_attention", "aten::add"]
    busy = [round(wall * share) for share in (0.25, 0.25, 0.2, 0.1)]
    writer.append(
        "kernels",
        {
            **key,
            "stream": 0,
            "name": names,
            "category": ["gemm", "gemm", "attention", "elementwise"],
            "segment": ["ffn", "ffn", "attention", ""],
            "layer": [0, 1, 0, -1],
            "start_ns": [sum(busy[:i]) for i in range(4)],
            "dur_ns": busy,
        },
        cell=cell,
    )


def _write_telemetry(writer: RunWriter, cell: str) -> None:
    start = 1_767_323_045_000_000_000
    writer.append(
        "telemetry",
        {
            "time_ns": [start, start, start + 10**9, start + 10**9],
            "device": "cpu",
            "metric": ["utilisation", "rss", "utilisation", "rss"],
            "value": [97.0, 4.1e8, 98.5, 4.2e8],
            "unit": ["%", "bytes", "%", "bytes"],
        },
        cell=cell,
    )
