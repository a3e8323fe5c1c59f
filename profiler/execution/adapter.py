"""A bottleneck adapter that stands in for a feed-forward half (HeRo, formula 2).

Not here: which rows take it (`rows`), and how it is trained.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.execution.grouped import ALIGNMENT, linear_first
from profiler.execution.rows import scaled
from profiler.execution.states import Made


class _Projection(nn.Linear):
    """A product in the dtype of its input. In training the weights are wider than what they multiply."""

    def forward(self, u: Tensor) -> Tensor:
        return F.linear(u, self.weight.to(u.dtype))


class Adapter(nn.Module):
    """Adapter(u) = W2·SiLU(W1·u), d → d_r → d; no biases (ours)."""

    def __init__(self, hidden: int, width: int) -> None:
        """`hidden` d, `width` d_r."""
        super().__init__()
        self.W1 = _Projection(hidden, width, bias=False)
        self.W2 = _Projection(width, hidden, bias=False)
        self._aligned: Made[tuple[Tensor, Tensor]] = Made()

    def start(self, generator: torch.Generator) -> None:
        """W1 uniform in ±1/√d, W2 zero (ours): a fresh adapter adds nothing to the residual."""
        with torch.no_grad():
            drawn = torch.rand(self.W1.weight.shape, generator=generator) * 2 - 1
            self.W1.weight.copy_(drawn * self.W1.in_features**-0.5)
            self.W2.weight.zero_()

    def forward(self, u: Tensor, scale_n: Tensor | None = None) -> Tensor:
        """`[n, d]` → `[n, d]`, times a factor a row: multiplied in between, where a row is d_r numbers and not d."""
        if torch.is_grad_enabled():
            self._aligned.forget()
        return cast(Tensor, self.W2(scaled(F.silu(self.W1(u)), scale_n)))

    def first(self, u: Tensor, count_1: Tensor) -> Tensor:
        """The first `count` rows of `[N, d]`."""
        down, up = self._aligned_weights()
        return linear_first(F.silu(linear_first(u, down, None, count_1)), up, None, count_1)

    def _aligned_weights(self) -> tuple[Tensor, Tensor]:
        """W1 and W2 with d_r filled up to the alignment by zeros, which add SiLU(0)·0 = 0."""
        lacking = -self.W1.out_features % (ALIGNMENT // self.W1.weight.element_size())
        if not lacking:
            return self.W1.weight, self.W2.weight
        pair = self.W1.weight, self.W2.weight
        return self._aligned.of(pair, lambda: (F.pad(pair[0], (0, 0, 0, lacking)), F.pad(pair[1], (0, lacking))))
