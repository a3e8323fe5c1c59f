"""HeRo's parts on the clock: FFN or adapter in SmolLM2-135M's shape, three quarters of the rows on the adapter.

Claims, of times a layer (passes through all routable layers, so that weights come from memory as they do in a model;
every kind of pass in every repeat, in random order; the median of the ratios within a repeat, through which drift
cancels):

1. at 1,024 rows FFN and adapter, as the strategy `auto` runs them, take at most 1.15 × (executed share × dense FFN +
   adapter at its rows);
2. in float32 so does all of `auto`, with what dispatch takes: finding out whose rows they are, taking them out,
   scaling, putting them back. In bfloat16 that is printed and not claimed: products take half as long, dispatch does
   not, and a quarter of the rows still reads all of the FFN's weights;
3. router and memory take at most 15 % of the dense FFN, in float32 at 1,024 rows;
4. `auto` never takes longer than the dense FFN and the router together.

Claim 4 is loose where the router is slow; so `auto ÷ dense` stands in the table. At 8 rows it cannot be below 1 where
memory is what limits both: two rows read the FFN's weights as eight do, and the adapter's come on top.

Usage:

    python benchmarks/hero.py [--repeats N] [--dtypes float32 bfloat16] [--rows 1 8 64 1024]

Exit code 1 if a claim does not hold. Run it on an otherwise idle machine. Weights are random; times do not depend on
them. `other` is the dense FFN by the other library (`execution.products`), which `auto` may take for the rows that are
left: what it shows beside `dense` is no skip's doing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from claims import Claim, exit_code, keep_memory, parser
from torch import Tensor

from profiler import arms, methods, models
from profiler.execution import depth_memory
from profiler.execution.folded_router import FoldedMath
from profiler.execution.history_router import MEMORY
from profiler.execution.products import swiglu
from profiler.execution.routes import ForcedTokens
from profiler.execution.rows import Branch, Fork
from profiler.execution.sequences import Sequences
from profiler.methods.hero import Hero

Times = npt.NDArray[np.float64]

ADAPTER_SHARE = 0.75
BRANCHES_LIMIT, ROUTER_LIMIT = 1.15, 0.15
STRATEGIES = ("gather", "overlay", "grouped", "masked")
#: FFN and adapter within `auto`, in a pass of `auto` like any other.
BRANCHES = "branches of auto"
#: Measured together, before the rest: what others leave in caches and in the heap costs small products a tenth.
CLAIMED = ("dense", "adapter", "auto", BRANCHES, "router, dual")


def wrapped(backbone: Any, **options: Any) -> Hero:
    return cast(Hero, arms.tree(backbone, "hero", methods.configure("hero", options)))


class Clock:
    """Adds up the time that what it wraps takes, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self._device = 0.0, device

    def around(self, run: Callable[..., Tensor] | None) -> Any:
        """`run`, timed; None as it is."""

        def timed(*args: Tensor) -> Tensor:
            began = self._now()
            y = cast(Callable[..., Tensor], run)(*args)
            self.seconds += self._now() - began
            return y

        return run and timed

    def branch(self, branch: Branch) -> Branch:
        """The branch, timed whichever way it is run."""
        ways = ("run", "run_first", "run_other", "run_scaled")
        return replace(branch, **{way: self.around(getattr(branch, way)) for way in ways})

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def passes(backbone: Any, rows: int) -> tuple[dict[str, Callable[[], float | None]], float]:
    """What is timed, by name, each over all routable layers; and the share of rows that took the FFN.

    Each takes as long as its call takes, or where it says so itself, as many seconds as it returns.
    """
    handle = wrapped(backbone, strategy="auto")
    layers, d = len(handle.routable), handle.decoder.hidden_size
    weight = next(backbone.parameters())
    batch = Sequences(False, rows, [rows], [0], ["benchmark"])
    ffn_LN = ForcedTokens(ratio=ADAPTER_SHARE).open_rows(layers, batch, weight.device)
    residual_LNd = torch.randn(layers, rows, d, device=weight.device).to(weight.dtype)
    scale_N = torch.full((rows,), 0.7, device=weight.device)
    blocks = [handle.decoder.blocks[layer] for layer in handle.routable]
    adapter_rows = [x[~ffn] for x, ffn in zip(residual_LNd, ffn_LN, strict=True)]

    def dense() -> None:
        for block, x_Nd in zip(blocks, residual_LNd, strict=True):
            block.mlp.down_proj(block.mlp.act_fn(block.mlp.gate_proj(x_Nd)) * block.mlp.up_proj(x_Nd))

    def adapter() -> None:
        for fork, x_nd in zip(handle.forks, adapter_rows, strict=True):
            if len(x_nd):
                fork.zero.run(x_nd)

    def routed(by: Hero, forks: Sequence[Fork]) -> None:
        for fork, x_Nd, ffn_N in zip(forks, residual_LNd, ffn_LN, strict=True):
            by.run_rows(fork, x_Nd, ffn_N, None, scale_N)

    def other() -> None:
        for block, x_Nd in zip(blocks, residual_LNd, strict=True):
            swiglu(block.mlp, x_Nd)

    clock = Clock(weight.device)
    timed = [replace(fork, zero=clock.branch(fork.zero), one=clock.branch(fork.one)) for fork in handle.forks]

    def branches() -> float:
        clock.seconds = 0.0
        routed(handle, timed)
        return clock.seconds

    found: dict[str, Callable[[], float | None]] = {"dense": dense, "other": other, "adapter": adapter}
    found |= {"auto": partial(routed, handle, handle.forks), BRANCHES: branches}
    for strategy in STRATEGIES:
        by = wrapped(backbone, strategy=strategy)
        found[strategy] = partial(routed, by, by.forks)
    for form in ("dual", "matrix"):
        router = wrapped(backbone, memory=form)
        found[f"router, {form}"] = partial(_route, router, FoldedMath(router.router), residual_LNd)
    return found, float(ffn_LN.float().mean())


def _route(handle: Hero, math: FoldedMath, residual_LNd: Tensor) -> None:
    past = None
    for depth, residual_Nd in enumerate(residual_LNd, start=1):
        _, past = handle.router.step(math, depth, residual_Nd.float(), past)


def measure(work: dict[str, Callable[[], float | None]], repeats: int, device: torch.device) -> dict[str, Times]:
    """Seconds of each pass, by repeat."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    order = random.Random(0)
    with torch.no_grad():
        for repeat in range(repeats + 1):
            for name in order.sample(list(work), len(work)):
                began = time.perf_counter()
                said = work[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if repeat:  # the first one warms up
                    taken[name].append(time.perf_counter() - began if said is None else said)
    return {name: np.array(times) for name, times in taken.items()}


def main() -> int:
    options = parser(__doc__, 15)
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 1024])
    given = options.parse_args()
    keep_memory()
    found = []
    for dtype in given.dtypes:
        loaded = models.load("smollm2-135m-random", dtype)
        device = loaded.model.device
        print(
            f"{dtype}, {loaded.model.config._name_or_path or 'SmolLM2-135M shape'}, {torch.get_num_threads()} threads"
        )
        names = ["dense", "other", "adapter", *STRATEGIES, "auto", BRANCHES, "router, dual", "router, matrix"]
        print(f"{'rows':>6} {'executed':>9} " + " ".join(f"{name:>16}" for name in names) + "   (µs a layer)")
        for rows in given.rows:
            work, share = passes(loaded.model, rows)
            took = measure({name: work[name] for name in CLAIMED}, given.repeats, device)
            took |= measure({name: each for name, each in work.items() if name not in CLAIMED}, given.repeats, device)
            dense = took["dense"]
            cells = (
                f"{np.median(took[name]) / 15e-6:>10.0f} {np.median(took[name]) / np.median(dense):>5.0%}"
                for name in names
            )
            print(f"{rows:>6} {share:>9.1%} " + " ".join(cells))
            ratios = {"auto ÷ (dense + router)": (took["auto"] / (dense + took["router, dual"]), 1.0)}
            if rows == 1024:
                ideal = share * dense + took["adapter"]
                ratios[f"{BRANCHES} ÷ (executed share × dense + adapter)"] = took[BRANCHES] / ideal, BRANCHES_LIMIT
                whole = took["auto"] / ideal
                if dtype == "float32":
                    ratios["auto ÷ (executed share × dense + adapter)"] = whole, BRANCHES_LIMIT
                    ratios["router ÷ dense"] = took["router, dual"] / dense, ROUTER_LIMIT
                else:
                    print(f"       auto ÷ (executed share × dense + adapter) {np.median(whole):.3f}, not claimed")
            claims = [
                Claim(what, float(np.median(ratio)), limit, n=given.repeats) for what, (ratio, limit) in ratios.items()
            ]
            print(*(f"       {claim}" for claim in claims), sep="\n")
            found += claims
    for form in ("dual", "matrix"):
        held = 4 * depth_memory.numbers(cast(depth_memory.Form, form), MEMORY, 15)
        print(f"memory, {form}: at most {held:,} bytes a token during one forward")
    return exit_code(found)


if __name__ == "__main__":
    raise SystemExit(main())
