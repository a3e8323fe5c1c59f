"""Running one of two branches for each token row, so that a row costs what it was decided to cost.

Strategies, equal to rounding:

- `gather`: the rows of each branch are taken out, run, and put back. On a GPU the host waits once a layer, to learn how
  many rows there are.
- `grouped`: rows are sorted by branch, and `torch.nn.functional.grouped_mm` reads from the device where a branch's rows
  end. Nothing waits; what lies between the products is done for all rows. For inference only.
- `masked`: both branches run every row, and the result that was not chosen is thrown away. It saves nothing: it is the
  reference the others are tested against, and what a skip rate alone would hide. Rule 1 fails it unless its arm is
  labelled (`ArmRecord.discards`).

Where all rows take the same branch it runs them as they are, whatever the strategy (`grouped` cannot know).
Rows are counted where they enter: by probes on the branches' first products, and in `grouped`, which calls no module,
by the very number its products are given. Pads are run by no branch, unless there is nothing to tell apart.

Not here: what decides, which strategy is the faster one (`row_trials`), and whole sequences (`blocks`).

Legend: N rows as they lie in the hidden states, pads included; d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from profiler.execution.sequences import RowView

if TYPE_CHECKING:
    from profiler.recorder import Recorder

Strategy = Literal["masked", "gather", "grouped"]


@dataclass(frozen=True, eq=False)
class Branch:
    """One way a row can go.

    Attributes:
        choice: its index at the site.
        segment: what its time is called.
        run: `[n, d]` → `[n, d]`.
        run_first: `[N, d]` and how many of the first rows are its own, `[1]` int32 on the device → `[N, d]`, right in
            those rows, anything in the others.
    """

    choice: int
    segment: str
    run: Callable[[Tensor], Tensor]
    run_first: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Fork:
    """The two branches of one layer's site: choice 1 for the rows that are told so, choice 0 for the others."""

    layer: int
    site: str
    zero: Branch
    one: Branch
    recorder: Recorder

    def all(self, branch: Branch, x_Nd: Tensor) -> Tensor:
        """Every row through one branch, pads too."""
        with self.recorder.span(branch.segment, self.layer):
            return branch.run(x_Nd)

    def run(
        self,
        strategy: Strategy,
        x_Nd: Tensor,
        one_N: Tensor,
        real_N: Tensor | None = None,
        scale_N: Tensor | None = None,
        fill: Sequence[int] = (),
    ) -> Tensor:
        """Each row through its branch, times its scale.

        Args:
            strategy: see the module.
            x_Nd: rows.
            one_N: True where a row takes branch `one`.
            real_N: False at pads; None where there are none.
            scale_N: factor of each row's result, in float32 at least; None is 1.
            fill: for `gather`: entry n is how many rows branch `one` is run with where n are its own (n itself past the
                end). The others are repeated and thrown away, and counted as pads.

        Returns:
            `[N, d]` in the dtype of `x_Nd`; at pads anything finite.
        """
        if strategy == "masked":
            return self._masked(x_Nd, one_N, scale_N)
        if strategy == "gather":
            return self._gather(x_Nd, one_N, real_N, scale_N, fill)
        return self._grouped(x_Nd, one_N, real_N, scale_N)

    def _masked(self, x_Nd: Tensor, one_N: Tensor, scale_N: Tensor | None) -> Tensor:
        return _scaled(torch.where(one_N[:, None], self.all(self.one, x_Nd), self.all(self.zero, x_Nd)), scale_N)

    def _gather(
        self, x_Nd: Tensor, one_N: Tensor, real_N: Tensor | None, scale_N: Tensor | None, fill: Sequence[int]
    ) -> Tensor:
        zero_N = ~one_N
        if real_N is not None:
            one_N, zero_N = one_N & real_N, zero_N & real_N
        if x_Nd.is_cuda:
            rows = torch.argsort(zero_N.to(torch.int8) + 2 * (~(one_N | zero_N)).to(torch.int8), stable=True)
            ones, zeros = torch.stack([one_N.sum(), zero_N.sum()]).tolist()
            rows_one, rows_zero = rows[:ones], rows[ones : ones + zeros]
        else:
            rows_one, rows_zero = one_N.nonzero()[:, 0], zero_N.nonzero()[:, 0]
        for branch, others in ((self.one, rows_zero), (self.zero, rows_one)):
            if len(others) == 0:
                return _scaled(self.all(branch, x_Nd), scale_N)
        y_Nd = torch.empty_like(x_Nd) if real_N is None else torch.zeros_like(x_Nd)
        for branch, rows in ((self.one, rows_one), (self.zero, rows_zero)):
            more = fill[len(rows)] - len(rows) if branch is self.one and len(rows) < len(fill) else 0
            taken = torch.cat([rows, rows[:1].expand(more)]) if more else rows
            with self._only(len(rows), more):
                y_nd = self.all(branch, x_Nd.index_select(0, taken))[: len(rows)]
            y_Nd.index_copy_(0, rows, _scaled(y_nd, None if scale_N is None else scale_N.index_select(0, rows)))
        return y_Nd

    def _only(self, rows: int, pads: int) -> Any:
        """A context in which so many rows are in flight. They attend to nothing here, so they have no context."""
        return self.recorder.executing(RowView(rows, pads, 0, 0)) if self.recorder.recording else nullcontext()

    def _grouped(self, x_Nd: Tensor, one_N: Tensor, real_N: Tensor | None, scale_N: Tensor | None) -> Tensor:
        zero_N = ~one_N
        if real_N is not None:
            one_N, zero_N = one_N & real_N, zero_N & real_N
        # Rows of `one` first, pads in the middle, rows of `zero` last: each end is one branch's.
        rows = torch.argsort(zero_N.to(torch.int8) - one_N.to(torch.int8), stable=True)
        ones, zeros = (mask.sum(dtype=torch.int32)[None] for mask in (one_N, zero_N))
        sorted_Nd = x_Nd.index_select(0, rows)
        place_N1 = torch.arange(len(x_Nd), device=x_Nd.device)[:, None]
        y_one_Nd = self._first(self.one, sorted_Nd, ones)
        y_zero_Nd = self._first(self.zero, sorted_Nd.flip(0), zeros).flip(0)
        y_sorted_Nd = torch.where(
            place_N1 < ones, y_one_Nd, torch.where(place_N1 >= len(x_Nd) - zeros, y_zero_Nd, torch.zeros_like(x_Nd))
        )
        return _scaled(torch.empty_like(x_Nd).index_copy_(0, rows, y_sorted_Nd), scale_N)

    def _first(self, branch: Branch, x_Nd: Tensor, count_1: Tensor) -> Tensor:
        self.recorder.entered(self.layer, self.site, branch.choice, count_1)
        with self.recorder.span(branch.segment, self.layer):
            return branch.run_first(x_Nd, count_1)


def _scaled(y: Tensor, scale: Tensor | None) -> Tensor:
    """Rows times their factors, multiplied in the wider of both dtypes and rounded once."""
    return y if scale is None else (y * scale[:, None]).to(y.dtype)
