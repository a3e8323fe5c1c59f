"""A hand-made run of a mixture of experts on four ranks (or in one process), small enough to work out by hand.

Two layers of 8 experts, 2 groups of 4, widths 2 and 6; hidden 8, float32. So an expert's token is 6·8·2 = 96 or
6·8·6 = 288 weighted FLOPs, its weights 3·8·4·2 = 192 or 576 bytes, and a token sent 8·4 = 32 bytes. Rank r has request
r. A token takes two experts, said by `chosen`. Nodes: ranks 0 and 1 on one, 2 and 3 on another.

Times, in ns: experts one for two FLOPs; an all-to-all 1,000 and 2 for each byte of the busiest rank, one way; waits
300, 200, 100 and 0 of ranks 0 to 3, twice that in combine. What a reader should find is stated in the tests.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from profiler.records import ArmRecord, CellRecord, Choice, Manifest, ModelRecord, ParallelRecord
from profiler.writer import RunWriter

HIDDEN, ITEMSIZE, RANKS = 8, 4, 4
WIDTHS = (2, 2, 2, 2, 6, 6, 6, 6)
LAYERS = (1, 2)
CONTIGUOUS = (0, 0, 1, 1, 2, 2, 3, 3)
ALL_SIZE = (0, 1, 2, 3, 0, 1, 2, 3)
PREFILL, DECODE = "prefill-b4-l4", "decode-b4-c4-n2"
DOMAINS = ("math", "code", "prose", None)
#: Times an instrumented step of a repeat takes, beside what experts and collectives take; rank r takes 1,000 r more.
REST_NS = 100_000


class Token(NamedTuple):
    """A token row of a step; `step` is its place in the repeat."""

    request: int
    position: int
    step: int


def chosen(cell: str, token: Token, layer: int) -> tuple[int, int]:
    """The two experts of a token."""
    apart = token.request, token.request + 4
    if cell == PREFILL:
        number = 4 * token.request + token.position
        return (number % 8, (number + 1) % 8) if layer == 1 else (0, 7)
    if token.step == 0:
        return apart if layer == 1 else (6, 7)
    return (0, 1) if layer == 1 else apart


def tokens_of(cell: str, index: int) -> list[Token]:
    """Token rows of one step."""
    if cell == PREFILL:
        return [Token(request, position, 0) for request in range(4) for position in range(4)]
    return [Token(request, 4 + index, index) for request in range(4)]


def arm(ranks: int = RANKS, nodes: tuple[str, ...] = ("a", "a", "b", "b")) -> ArmRecord:
    """The arm; without a record of ranks for 0 of them."""
    choices = [
        Choice(
            layer=layer, site="experts", index=expert, name=f"g{expert // 4}e{expert % 4}",
            replacement_parameters=3 * HIDDEN * width, flops_per_row=6 * HIDDEN * width,
            weight_bytes=3 * HIDDEN * width * ITEMSIZE,
        )
        for layer in LAYERS
        for expert, width in enumerate(WIDTHS)
    ]  # fmt: skip
    unused = [Choice(layer=layer, site="experts", index=8, name="ffn", backbone_parameters=480) for layer in LAYERS]
    parallel = ParallelRecord(
        ranks=ranks, placement="contiguous", attention="data_parallel", nodes=list(nodes[:ranks]),
        widths_E=list(WIDTHS), per_group=4, hidden=HIDDEN, itemsize=ITEMSIZE,
        fitted_on={"replicated": f"the step of {PREFILL}"}, fitted_steps=[0], notes={"replicated": "1 copy added"},
        compared_on=RANKS if ranks == 1 else None,
    )  # fmt: skip
    return ArmRecord(
        name="mohge", method="mohge", twin=None, scope="token", choices=choices + unused,
        parallel=parallel if ranks else None,
    )  # fmt: skip


def write_expert_run(folder: Path, *, ranks: int = RANKS, nodes: tuple[str, ...] = ("a", "a", "b", "b")) -> Path:
    """Write a run and return its folder: on four ranks, in one process (1), or one that recorded no loads (0)."""
    cells = [
        CellRecord(name=PREFILL, phase="prefill", batch=4, length=4, repeats=2, done=True),
        CellRecord(name=DECODE, phase="decode", batch=4, length=4, new_tokens=2, repeats=2, done=True),
    ]
    manifest = Manifest(
        name="experts", created_utc="2026-01-02T03:04:05Z", pid=os.getpid(), host=os.uname().nodename,
        model=ModelRecord(
            source="tiny", architecture="LlamaForCausalLM", parameters=10_000, layers=3, hidden=HIDDEN,
            dtype="float32", device="cpu", device_name="example", random_weights=False,
        ),
        arms=[ArmRecord(name="dense", method="dense"), arm(ranks, nodes)],
        cells=cells,
    )  # fmt: skip
    writer = RunWriter(folder, manifest)
    if ranks:
        _write_placements(writer)
    for base, cell in enumerate(cells):
        _write_prompts(writer, cell.name)
        for repeat, index in product(range(2), range(cell.new_tokens or 1)):
            number = 100 * base + 10 * repeat + index
            _write_step(writer, cell, number, repeat, index, max(ranks, 1), loads=ranks > 0)
        writer.drain()
    writer.finish("complete")
    return folder


def _write_placements(writer: RunWriter) -> None:
    copies = [(name, e, rank, 0, 1) for name, ranks in (("all_size", ALL_SIZE), ("contiguous", CONTIGUOUS))
              for e, rank in enumerate(ranks)]  # fmt: skip
    # As all_size, and the last expert on rank 1 too: of its tokens rank 1 computes the even ones, rank 3 the odd.
    copies += [("replicated", e, rank, 0, 1) for e, rank in enumerate(ALL_SIZE[:7])]
    copies += [("replicated", 7, 1, 0, 2), ("replicated", 7, 3, 1, 2)]
    for layer in LAYERS:
        names, experts, ranks, turns, every = (list(column) for column in zip(*copies, strict=True))
        columns = {"placement": names, "expert": experts, "rank": ranks, "turn": turns, "every": every}
        writer.append("placements", {"arm": "mohge", "layer": layer, **columns}, cell="run")


def _write_prompts(writer: RunWriter, cell: str) -> None:
    columns = {"request": [f"r{i}" for i in range(4)], "domain": list(DOMAINS), "tokens": 4, "text": None}
    writer.append("prompts", columns, cell=cell)


def _write_step(
    writer: RunWriter, cell: CellRecord, step: int, repeat: int, index: int, ranks: int, *, loads: bool
) -> None:
    tokens = tokens_of(cell.name, index)
    spent: Counter[int] = Counter()
    for layer in LAYERS:
        routed = [(token, expert) for token in tokens for expert in chosen(cell.name, token, layer)]
        where = {"arm": "mohge", "step": step, "layer": layer}
        for rank in range(ranks):
            here = Counter(expert for _, expert in routed if ranks == 1 or CONTIGUOUS[expert] == rank)
            flops = {expert: 6 * HIDDEN * WIDTHS[expert] * count for expert, count in here.items()}
            own = {**where, "rank": rank}
            if loads:
                if repeat == 0:
                    _write_loads(writer, cell.name, own, here, flops)
                by_width = Counter[int]()
                for expert, work in flops.items():
                    by_width[WIDTHS[expert]] += work // 2
                spent[rank] += sum(by_width.values())
                if by_width:
                    columns = {"width": list(by_width), "ns": list(by_width.values())}
                    writer.append("expert_times", {**own, **columns}, cell=cell.name)
        if ranks > 1:
            _write_exchange(writer, cell.name, where, routed, spent, counted=repeat == 0)
        if repeat == 0:
            _write_gates(writer, cell, where, tokens)
    for rank in range(ranks):
        rows = [token for token in tokens if ranks == 1 or token.request == rank]
        told: dict[str, Any] = {
            "pass": "instrumented", "repeat": repeat, "order": 0, "index": index, "phase": cell.phase,
            "rows": len(rows), "context": sum(token.position + 1 for token in rows),
            "wall_ns": REST_NS + 1_000 * rank + spent[rank],
        }  # fmt: skip
        writer.append("steps", {"arm": "mohge", "step": step, "rank": rank, **told}, cell=cell.name)
    writer.drain()


def _write_loads(writer: RunWriter, cell: str, own: dict[str, Any], here: Counter[int], flops: dict[int, int]) -> None:
    if here:
        columns = {
            "group": [expert // 4 for expert in here], "expert": list(here), "tokens": list(here.values()),
            "flops": list(flops.values()),
        }  # fmt: skip
        writer.append("loads", {**own, **columns}, cell=cell)


def _write_exchange(
    writer: RunWriter,
    cell: str,
    where: dict[str, Any],
    routed: list[tuple[Token, int]],
    spent: Counter[int],
    *,
    counted: bool,
) -> None:
    moved = Counter((token.request, CONTIGUOUS[expert]) for token, expert in routed)
    remote = {pair: 32 * count for pair, count in moved.items() if pair[0] != pair[1]}
    busiest = max(
        [sum(size for pair, size in remote.items() if pair[end] == rank) for end in (0, 1) for rank in range(RANKS)]
    )
    for operation, transfer, late in (
        ("counts", 500, 0),
        ("dispatch", 1_000 + 2 * busiest, 100),
        ("combine", 1_000 + 2 * busiest, 200),
    ):
        waits = [late * (RANKS - 1 - rank) for rank in range(RANKS)]
        for rank, wait in enumerate(waits):
            spent[rank] += transfer + wait
        columns = {"rank": list(range(RANKS)), "start_ns": 0, "dur_ns": [transfer + wait for wait in waits]}
        writer.append("collectives", {**where, "operation": operation, **columns}, cell=cell)
    if not counted:
        return
    for source, destination in product(range(RANKS), repeat=2):
        count = moved[source, destination]
        there = {"tokens": [count], "bytes": [32 * count]}
        for direction, pair in (("dispatch", (source, destination)), ("combine", (destination, source))):
            columns = {"direction": direction, "rank": pair[0], "source": pair[0], "destination": pair[1]}
            writer.append("dispatch", {**where, **columns, **there}, cell=cell)


def _write_gates(writer: RunWriter, cell: CellRecord, where: dict[str, Any], tokens: list[Token]) -> None:
    columns = {
        "rank": [token.request for token in tokens], "phase": cell.phase,
        "request": [f"r{token.request}" for token in tokens], "position": [token.position for token in tokens],
        "site": "experts", "choices": [list(chosen(cell.name, token, int(where["layer"]))) for token in tokens],
        "weights": [[0.75, 0.25]] * len(tokens), "gate": 0.5, "rows": 1,
    }  # fmt: skip
    writer.append("gates", {**where, **columns}, cell=cell.name)
