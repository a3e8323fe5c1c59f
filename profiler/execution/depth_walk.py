"""One forward of HeRo on its way through depth, and what training needs of it: every gate, and blocks computed again.

A routable layer reads what the one before it left. With gradient checkpointing a block is computed a second time in the
backward pass, long after its forward went on, or even after another forward began; `again` then lays the walk that the
block belongs to under it, so that it finds the same past, the same pads and the same decisions, and takes nothing else
along. The decisions are those of the first time: a gate that lands on the other side of τ by rounding would otherwise
run other rows.

The penalty is the source's (formulas 17 and 18, METHODS §1):

    mean over valid (b, t < T) of ( Σ_j g_{b,j,t} )²        sum over depth first, then the square

so that a token's layers are coupled: each further FFN costs more, the more of them the token uses. Valid is a real
token with a real one after it, as in the language-model loss; pads and last tokens are in neither.

Not here: gates and memory (`history_router`), and the loss around the penalty (the method).

Legend: N token rows of a batch, pads included; L routable layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiler.execution.folded_router import FoldedMath
from profiler.execution.history_controls import Around
from profiler.execution.history_router import Past, PlainMath


@dataclass
class Walk:
    """What the routable layers of one forward share, and hand on.

    Attributes:
        math: the router's learned functions.
        real_N: False at pads; None where there are none.
        around: for the variants that look beyond the token.
        forced_LN: a synthetic route, True where the FFN runs.
        past: depth j → what layer j left for the next one.
        training: whether this is a forward of a training's objective, which keeps `gates`.
        gates: in training, depth j → g_j `[N]`, and True `[N]` where the FFN ran.
    """

    math: FoldedMath | PlainMath | None = None
    real_N: Tensor | None = None
    around: Around | None = None
    forced_LN: Tensor | None = None
    past: dict[int, Past | None] = field(default_factory=dict)
    training: bool = False
    gates: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def settle(self, depth: int, g_N: Tensor, threshold: float) -> Tensor:
        """Where the FFN runs at depth j in training, `[N]`; a block computed again is told what it was told before."""
        return self.gates.setdefault(depth, (g_N, g_N >= threshold))[1]

    def gates_LN(self) -> tuple[Tensor, Tensor]:
        """Every g, differentiable, and where the FFN ran, `[L, N]` each."""
        g, ffn = zip(*(self.gates[depth] for depth in sorted(self.gates)), strict=True)
        return torch.stack(g), torch.stack(ffn)


def squared_usage(g_LN: Tensor, valid_N: Tensor) -> Tensor:
    """Σ over valid rows of ( Σ_j g_j )², a scalar."""
    return g_LN.sum(0).masked_fill(~valid_N, 0.0).square().sum()


def predicting(mask_BT: Tensor) -> Tensor:
    """Rows whose next token is predicted, `[N]`: real ones with a real one after them."""
    real_BT = mask_BT.bool()
    return torch.nn.functional.pad(real_BT[:, 1:] & real_BT[:, :-1], (0, 1)).flatten()


def checkpoint_blocks(blocks: Sequence[nn.Module], again: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on keep of each block's forward its input only, and compute it again for its gradient.

    Args:
        blocks: decoder layers; their `forward` is replaced, and without gradients does what it did.
        again: called as a block is first computed; the context it is later computed again in.
    """
    for block in blocks:
        # On the instance, so that it works whatever transformers calls its own switch.
        block.forward = partial(_checkpointed, block.forward, again)


def _checkpointed(
    run: Callable[..., Any], again: Callable[[], AbstractContextManager[None]], hidden_states: Tensor, **kwargs: Any
) -> Tensor:
    if not torch.is_grad_enabled():
        return cast(Tensor, run(hidden_states, **kwargs))
    found = checkpoint(
        run, hidden_states, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs
    )  # fmt: skip
    return cast(Tensor, found)


@contextmanager
def lent(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` while the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
