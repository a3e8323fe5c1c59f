"""Running experts: MoHGE's four strategies against transformers' experts at equal FLOPs, and against a floor.

Half of the 3B size in every direction (METHODS, section 3): d 512, 64 experts of widths 192 to 640, 6 a token, in
bfloat16 unless told otherwise. Each row takes three experts of narrow groups and three of their mirrored groups, so
that it costs the same as with six of the mean width, which is what transformers' experts have (those of Qwen3-MoE,
given the same choices). On both sides everything between a row's choices and its result is in the time: sorting,
products, adding up.

The floor is the longer of two things that no way of running them can avoid: one dense product of as many FLOPs, and
reading the weights of the experts that were chosen once. Everything is timed in every repeat, in random order, and each
call takes the weights of the next of three layers, so that they come from memory as in a model. A figure is the median
over repeats of the ratio of two times of the same repeat, in which drift of the machine's pace cancels; its 95 %
interval is a bootstrap over repeats. As many threads as torch takes by itself. Claims, at every number of tokens unless
said:

1. `packed` is faster than `sequential`;
2. `packed` is not slower than the best of transformers' implementations at equal FLOPs; beside it, nor is it with
   transformers' widths, which makes the very same products: what the first has more is the price of several widths;
3. `packed` takes at most 1.25 × the floor at 2,048 tokens.

At fewer tokens `packed` ÷ floor is printed with what it is made of, aiming at 2: `sort`, `products` (gathering rows
included) and `combine` are its parts by themselves, `dense` and `read` the two sides of the floor, `one width` is
`packed` with transformers' widths. How `packed` multiplies on this machine is printed first. transformers' `batched_mm`
copies an expert's weights for each of its rows: it is run for a few tokens only, since beyond it is by far the slowest,
and handing back so much memory slows down what is timed next.
Usage:

    python benchmarks/experts.py [--repeats N] [--tokens 2048 256 16] [--hidden 512] [--per-group 8] [--dtype bfloat16]

Exit code 1 if a claim does not hold. Run it on an otherwise idle machine. Weights and choices are random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from claims import Claim, exit_code, keep_memory, parser
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from profiler.execution.expert_shapes import GROUPS, SIZES, widths_of_experts
from profiler.execution.experts import Experts, Strategy, dispatch
from profiler.intervals import Interval, median

STRATEGIES: tuple[Strategy, ...] = ("sequential", "per_width", "padded", "packed")
FLOOR_LIMIT, AIM = 1.25, 2.0
#: What "not slower" leaves to noise.
NOISE = 1.02
LAYERS = 3
#: Pairs (row, expert) up to which `batched_mm` is run.
BATCHED_PAIRS = 24
#: Experts a row takes from narrow groups, and as many from their mirrored ones.
HALF = 3
#: Repeats that are not counted.
WARMUP = 2
THEIRS = ("eager", "grouped_mm", "batched_mm")

Times = dict[str, NDArray[np.float64]]
#: What is claimed, and the interval of its figure.
Judged = tuple[Claim, Interval]


@dataclass(frozen=True)
class Layer:
    """The weights of one layer both ways, equal in number: of several widths, of one, and as transformers has them."""

    hidden: int
    several: Experts
    one: Experts
    theirs: nn.Module

    @classmethod
    def of(cls, hidden: int, per_group: int, dtype: torch.dtype, seed: int = 0) -> Layer:
        """The 3B size's widths, as many times narrower as `hidden` is below the 3B's 1,024."""
        widths = [width * hidden // 1024 for width in SIZES["3B"].widths]
        mean = sum(widths) // GROUPS
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=mean, num_experts=GROUPS * per_group)
        each = widths_of_experts(widths, GROUPS, per_group)
        parts: list[nn.Module] = [Experts(hidden, each), Experts(hidden, [mean] * len(each)), Qwen3MoeExperts(config)]
        generator = torch.Generator().manual_seed(seed)
        for part in parts:
            part.to(dtype)
            for tensor in part.parameters():
                tensor.data.normal_(0.0, 0.02, generator=generator)
        return cls(hidden, cast(Experts, parts[0]), cast(Experts, parts[1]), parts[2])


def choices(tokens: int, per_group: int) -> Tensor:
    """`[tokens, 6]`, ascending: three experts of the lower half of the groups, and the same of the mirrored groups."""
    generator = torch.Generator().manual_seed(1)
    low = torch.rand(tokens, GROUPS // 2 * per_group, generator=generator).argsort(-1)[:, :HALF]
    group, place = low // per_group, low % per_group
    high = (GROUPS - 1 - group) * per_group + place
    return torch.cat([low, high], dim=1).sort(-1).values


def work(layer: Layer, tokens: int, per_group: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    several, dtype, d = layer.several, layer.several.weights.dtype, layer.hidden
    choice_NK = choices(tokens, per_group)
    x_Nd = torch.randn(tokens, d).to(dtype)
    weight_NK = torch.rand(choice_NK.shape).softmax(-1)
    experts = len(several.widths)

    def strategy(of: Experts, name: Strategy) -> Tensor:
        return of.run(name, x_Nd, dispatch(choice_NK, weight_NK, experts))

    def theirs(implementation: str) -> Tensor:
        cast(Any, layer.theirs).config._experts_implementation = implementation
        found: Tensor = layer.theirs(x_Nd, choice_NK, weight_NK.to(dtype))
        return found

    found: dict[str, Callable[[], Any]] = {name: partial(strategy, several, name) for name in STRATEGIES}
    found["one width"] = partial(strategy, layer.one, "packed")
    implementations = ["eager", "grouped_mm"] + ["batched_mm"] * (choice_NK.numel() <= BATCHED_PAIRS)
    found |= {name: partial(theirs, name) for name in implementations}

    to = dispatch(choice_NK, weight_NK, experts)
    y_Pd = several.fused(x_Nd, to)
    found["sort"] = lambda: dispatch(choice_NK, weight_NK, experts).counts
    found["products"] = lambda: several.fused(x_Nd, to)
    found["combine"] = lambda: to.combine(y_Pd)

    mean = layer.one.widths[0]
    dense, rows = torch.randn(3 * mean, d).to(dtype), torch.randn(choice_NK.numel(), d).to(dtype)
    found["dense"] = lambda: F.linear(rows, dense)
    touched = sum(3 * width * d for width, count in zip(several.widths, to.counts, strict=True) if count)
    # As float32, whose sums are vectorised: it is the reading that is timed.
    read = several.weights.detach().flatten()[:touched].view(torch.float32)
    found["read"] = lambda: read.sum()
    return found


def check(layer: Layer, tokens: int, per_group: int) -> float:
    """Largest difference among the strategies, and among transformers' ways and `one width`, to the largest value."""
    choice_NK, worst = choices(tokens, per_group), 0.0
    x_Nd = torch.randn(tokens, layer.hidden).to(layer.several.weights.dtype)
    weight_NK = torch.full(choice_NK.shape, 1 / choice_NK.shape[1])
    same = Experts(layer.hidden, layer.one.widths).to(x_Nd.dtype)
    gate_up_EWd, down_EdW = cast(Tensor, layer.theirs.gate_up_proj), cast(Tensor, layer.theirs.down_proj)
    same.weights.data.copy_(torch.cat([gate_up_EWd, down_EdW.transpose(1, 2)], dim=1).flatten(0, 1))
    to = dispatch(choice_NK, weight_NK, len(same.widths))
    cast(Any, layer.theirs).config._experts_implementation = "grouped_mm"
    pairs = [(layer.several.run(name, x_Nd, to), layer.several.run("packed", x_Nd, to)) for name in STRATEGIES[:3]]
    pairs.append((same.run("packed", x_Nd, to), layer.theirs(x_Nd, choice_NK, weight_NK.to(x_Nd.dtype))))
    for a, b in pairs:
        worst = max(worst, float((a.float() - b.float()).abs().max() / b.float().abs().max()))
    return worst


def measure(layers: list[dict[str, Callable[[], Any]]], repeats: int) -> Times:
    """Seconds of each, repeat by repeat, every call on the next layer; the first repeats, which warm up, left out.

    Args:
        layers: what is timed, by name, of each layer.
        repeats: how many count.
    """
    taken: dict[str, list[float]] = {name: [] for name in layers[0]}
    order, nth = random.Random(0), 0
    for _ in range(repeats + WARMUP):
        for name in order.sample(list(taken), len(taken)):
            call, nth = layers[nth % len(layers)][name], nth + 1
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    return {name: np.array(times[WARMUP:]) for name, times in taken.items()}


def floor_of(took: Times) -> NDArray[np.float64]:
    """Of each repeat, as long as the side that is the longer by its median."""
    return max(took["dense"], took["read"], key=lambda times: float(np.median(times)))


def judged(took: Times, tokens: int) -> list[Judged]:
    """What is claimed at so many tokens."""
    best = min((name for name in THEIRS if name in took), key=lambda name: float(np.median(took[name])))
    against = [("sequential", took["sequential"], 1.0), (f"transformers' {best}", took[best], NOISE)]
    if tokens >= 2048:
        against.append(("floor", floor_of(took), FLOOR_LIMIT))
    found = []
    for ours, (name, times, limit) in [*(("packed", each) for each in against), ("one width", against[1])]:
        ratio = median(took[ours] / times)
        found.append((Claim(f"{ours} ÷ {name}, {tokens:,} tokens", ratio.value, limit, n=ratio.n), ratio))
    return found


def show(took: Times, tokens: int, layer: Layer) -> None:
    """Times, ratios to the floor, and what `packed` is made of."""
    floor = floor_of(took)
    side = "one dense product" if floor is took["dense"] else "reading the weights"
    flops = tokens * 2 * HALF * 6 * layer.hidden * layer.one.widths[0]
    middle = {name: float(np.median(times)) for name, times in took.items()}
    print(f"\n{tokens:,} tokens, {flops / 1e9:.2f} GFLOP, floor {np.median(floor) * 1e3:.3g} ms ({side})")
    for name in [*STRATEGIES, "one width", *THEIRS]:
        if name in took:
            print(f"  {name:<12} {middle[name] * 1e3:>9.3f} ms  {np.median(took[name] / floor):>6.2f} × floor")
    ratio = median(took["packed"] / floor)
    parts = ", ".join(f"{name} {middle[name] * 1e3:.3f}" for name in ("sort", "products", "combine"))
    print(f"  packed by parts, ms: {parts}; floor: dense {middle['dense'] * 1e3:.3f}, read {middle['read'] * 1e3:.3f}")
    aim = "" if tokens >= 2048 else f", aim {AIM:g}"
    print(f"  packed ÷ floor {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]{aim}")


def main() -> int:
    options = parser(__doc__, 25)
    options.add_argument("--tokens", nargs="+", type=int, default=[2048, 256, 16])
    options.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    options.add_argument("--per-group", type=int, default=8)
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    given = options.parse_args()
    keep_memory()
    found: list[Judged] = []
    with torch.no_grad():
        dtype = getattr(torch, given.dtype)
        layers = [Layer.of(given.hidden, given.per_group, dtype, seed) for seed in range(LAYERS)]
        layer = layers[0]
        held = layer.several.weights.numel() * dtype.itemsize / 1e6
        widths = layer.several.widths
        print(
            f"d {layer.hidden}, {len(widths)} experts of widths {min(widths)} to {max(widths)} (mean "
            f"{layer.one.widths[0]}), {given.dtype}, {held:.0f} MB a layer, {torch.get_num_threads()} threads"
        )
        print(f"packed: {layer.several.how()}")
        print(f"ways agree to {check(layer, 32, given.per_group):.1e} of the largest value")
        for tokens in given.tokens:
            took = measure([work(layer, tokens, given.per_group) for layer in layers], given.repeats)
            show(took, tokens, layer)
            found += judged(took, tokens)
    print()
    for claim, ratio in found:
        print(f"{claim}   95 % [{ratio.low:.3f}, {ratio.high:.3f}], {ratio.n} pairs")
    return exit_code([claim for claim, _ in found])


if __name__ == "__main__":
    raise SystemExit(main())
