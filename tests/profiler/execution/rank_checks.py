"""What the ranks of `test_expert_parallel` do: every check of one number of ranks, in processes of its own.

Each compares its share with all experts in one process, and writes the largest differences it saw. `main` is spawned.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from profiler.execution.expert_parallel import Attention, ExpertParallel, Membership, by_shape, joined
from profiler.execution.experts import Experts, Strategy, dispatch
from profiler.execution.placement import BY_LOAD, BY_SHAPE, Placement
from profiler.methods.mohge import Mohge
from profiler.recorder import Recorder, StepData
from tests.profiler.tiny import exact_model, padded, prompts_of, wrapped

#: Four groups of three, an odd number of rows, rows that choose less than K, and a pad.
WIDTHS = (4,) * 3 + (8,) * 3 + (12,) * 3 + (16,) * 3
PER_GROUP, HIDDEN, ROWS, CHOICES = 3, 8, 13, 3
TOKENS = [5, 0, 9, 2, 2, 7, 1, 1, 12, 3, 0, 4]
OPTIONS = {"groups": 4, "experts_per_group": 3, "widths": [4, 8, 12, 16], "keep_groups": 2, "keep_experts": 4}


@cache
def placements(ranks: int) -> list[Placement]:
    """Every kind, of experts without tokens and of copies too."""
    by_load = [make(TOKENS, WIDTHS[::PER_GROUP], PER_GROUP, ranks) for make in BY_LOAD.values()]
    copied = tuple((0,) if e else tuple(range(ranks)) for e in range(len(WIDTHS)))
    return [
        *(by_shape(name, WIDTHS, PER_GROUP, ranks) for name in BY_SHAPE),
        *by_load,
        Placement("all on one, the first everywhere", ranks, WIDTHS, copied),
    ]


def _rows(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, choices, weights, which are real, and what the loss weighs results by."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=random, dtype=torch.float64)
    choice = torch.rand(rows, len(WIDTHS), generator=random).topk(CHOICES).indices.sort(1).values
    weight = torch.rand(rows, CHOICES, generator=random)
    real = torch.rand(rows, generator=random) > 0.1
    if rows > 4:
        choice[3, 1:] = -1
    return x, choice, weight, real, torch.randn(rows, HIDDEN, generator=random, dtype=torch.float64)


def block(rank: int, ranks: int, placement: Placement, attention: Attention, strategy: Strategy, rows: int) -> float:
    """Largest difference from one process: results, and gradients of rows, weights and this rank's experts."""
    x, choice, weight, real, loss = _rows(rows)
    everything = Experts(HIDDEN, WIDTHS).double()
    with torch.no_grad():
        everything.weights.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = everything.run("sequential", whole[0], dispatch(choice, whole[1], len(WIDTHS), real, full=False))
    (wanted * loss).sum().backward()

    parallel = ExpertParallel(placement, rank, attention, torch.device("cpu"))
    experts = Experts(HIDDEN, parallel.widths).double()
    with torch.no_grad():
        experts.weights.copy_(parallel.part(everything.weights))
    mine = slice(0, rows) if parallel.split else slice(*parallel.own(rows)[rank : rank + 2])
    given = x[mine].clone().requires_grad_(), weight[mine].clone().requires_grad_()
    found = parallel.run(
        experts, strategy, given[0], choice[mine], given[1], Recorder(), 0, "experts", real_N=real[mine], full=False
    )
    (found * loss[mine]).sum().backward()
    copies = torch.tensor([float(len(placement.where[expert])) for expert in parallel.held], dtype=torch.float64)
    grads = [(given[0].grad, whole[0].grad[mine]), (given[1].grad, whole[1].grad[mine])]
    if bool((copies == 1).all()):
        grads.append((experts.weights.grad, parallel.part(everything.weights.grad)))
    else:  # the copies of an expert have its gradient between them
        grads.append((_summed(experts.weights.grad, parallel), parallel.part(everything.weights.grad)))
    assert torch.equal(parallel.whole(experts.weights), everything.weights)
    return max(_apart(found, wanted[mine]), *(_apart(a, b) for a, b in grads))


def _summed(grad: Tensor, parallel: ExpertParallel) -> Tensor:
    """This rank's gradients with those of the same experts elsewhere added."""
    whole = torch.zeros(3 * sum(WIDTHS), HIDDEN, dtype=grad.dtype)
    starts = [3 * sum(WIDTHS[:e]) for e in range(len(WIDTHS))]
    pieces = grad.split([3 * width for width in parallel.widths])
    for expert, piece in zip(parallel.held, pieces, strict=True):
        whole[starts[expert] : starts[expert] + len(piece)] = piece
    dist.all_reduce(whole)
    return parallel.part(whole)


def _apart(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None and b is not None and a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def model(rank: int, ranks: int, attention: Attention, placement: str, strategy: Strategy) -> dict[str, Any]:
    """A padded batch and a decode step through MoHGE, against one process; and what was recorded of the batch."""
    backbone = exact_model("llama", num_hidden_layers=3)
    options = {**OPTIONS, "strategy": strategy}
    alone, alone_steps = wrapped(backbone, "mohge", **options)
    with joined(Membership(rank, ranks, placement, attention)):
        shared, steps = wrapped(backbone, "mohge", **options)
    prompts = prompts_of([5, 9, 3, 7])
    mine = slice(0, 4) if attention == "replicated" else slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
    apart = 0.0
    with torch.no_grad():
        batch = padded(prompts, "left")
        wanted = alone.model(**batch, use_cache=True)
        found = shared.model(**{name: each[mine] for name, each in batch.items()}, use_cache=True)
        real = batch["attention_mask"].bool()
        apart = max(apart, _apart(found.logits[real[mine]], wanted.logits[mine][real[mine]]))
        token, mask = torch.tensor([[7], [8], [9], [10]]), torch.cat([real.long(), torch.ones(4, 1).long()], 1)
        step = {"input_ids": token, "attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        wanted = alone.model(**step, cache=wanted.cache)
        found = shared.model(**{name: each[mine] for name, each in step.items()}, cache=found.cache)
        apart = max(apart, _apart(found.logits, wanted.logits[mine]))
    shared.recorder.mode = "off"
    with torch.no_grad(), profile(record_shapes=True) as traced:
        shared.model(**{name: each[mine] for name, each in padded(prompts, "left").items()})
    sizes = [event.input_shapes for event in traced.events() if event.name == "gloo:all_to_all"]
    assert isinstance(shared, Mohge)
    return {
        "apart": apart,
        "held": list(shared.blocks[1].parallel.held),
        "parameters": sum(tensor.numel() for tensor in shared.weights().values()),
        "recorded": _recorded(steps[0]),
        "alone": _recorded(alone_steps[0]),
        "traced rows": [shapes[0][0] for shapes in sizes if len(shapes[0]) == 2],
    }


def _recorded(step: StepData) -> dict[str, Any]:
    return {
        "sent": [[each.layer, each.direction, each.tokens_R, each.row_bytes] for each in step.traffic],
        "collectives": [[each.layer, each.operation, each.dur_ns > 0] for each in step.exchanges],
        "entered": [[key[0], key[2], count.rows] for key, count in sorted(step.counts.items()) if key[1] == "experts"],
        "widths": sorted([layer, width] for layer, width in step.width_ns),
        "segments": sorted({segment for segment, _ in step.segment_ns}),
    }


def main(rank: int, ranks: int, ports: list[int], folder: str) -> None:
    """Every check, with as many ranks as there are processes and with fewer; differences go to a file a rank."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in range(1, ranks + 1):
        if rank >= size:
            continue
        store = dist.TCPStore("127.0.0.1", ports[size - 1], size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        for attention in get_args(Attention):
            for placement in placements(size):
                name = f"{size} {attention} {placement.name}"
                found[name] = block(rank, size, placement, attention, "packed", ROWS)
            for strategy in get_args(Strategy):
                placed = by_shape("all_size", WIDTHS, PER_GROUP, size)
                found[f"{size} {attention} {strategy}"] = block(rank, size, placed, attention, strategy, ROWS)
            for rows in (1, 2):  # fewer than ranks
                found[f"{size} {attention} {rows} rows"] = block(rank, size, placed, attention, "packed", rows)
            strategy = "sequential" if size == 2 else "packed"
            found[f"{size} {attention} model"] = model(rank, size, attention, "all_size", strategy)
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
