"""Running one of two branches for each token row, so that a row costs what it was decided to cost.

Strategies, equal to rounding:

- `gather`: the rows of each branch are taken out, run, and put back. On a GPU the host waits once a layer, to learn how
  many rows there are.
- `overlay`: branch `zero` runs every row, and rows of `one` are taken out, run, and laid over. For a cheap `zero` at
  few rows this is less work than taking its rows out too; those it need not have run are counted as pads.
- `grouped`: rows are sorted by branch, and `torch.nn.functional.grouped_mm` reads from the device where a branch's rows
  end. Nothing waits; what lies between the products is done for all rows. For inference only.
- `masked`: both branches run every row, and the result that was not chosen is thrown away. It saves nothing: it is the
  reference the others are tested against, and what a skip rate alone would hide. Rule 1 fails it unless its arm is
  labelled (`ArmRecord.discards`).

Where all rows take the same branch it runs them as they are, whatever the strategy (`grouped` cannot know).
Rows are counted where they enter: by probes on the branches' first products, and where no module is called (`grouped`,
and `Branch.run_other`), by the very number of rows the products are given. Pads are run by no branch, unless there is
nothing to tell apart. Hooks of a caller on the branches' modules fire where the modules are called, and see of a branch
that scales inside (`Branch.run_scaled`) what is scaled.

Not here: what decides, which strategy is the faster one (`row_trials`), and whole sequences (`blocks`).

Legend: N rows as they lie in the hidden states, pads included; d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from profiler.execution.sequences import RowView

if TYPE_CHECKING:
    from profiler.recorder import Recorder

Strategy = Literal["masked", "gather", "overlay", "grouped"]


@dataclass(frozen=True, eq=False)
class Branch:
    """One way a row can go.

    Attributes:
        choice: its index at the site.
        segment: what its time is called.
        run: `[n, d]` → `[n, d]`.
        run_first: `[N, d]` and how many of the first rows are its own, `[1]` int32 on the device → `[N, d]`, right in
            those rows, anything in the others.
        run_other: as `run`, to rounding, by other products (`products`); None where there are none.
        run_scaled: `run` times the rows' factors `[n]`, for inference, where that is less work inside; else None.
    """

    choice: int
    segment: str
    run: Callable[[Tensor], Tensor]
    run_first: Callable[[Tensor, Tensor], Tensor]
    run_other: Callable[[Tensor], Tensor] | None = None
    run_scaled: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Way:
    """How a branch is run when so many rows are its own.

    Attributes:
        rows: with how many: its own, or more, if there are more. What the others give is thrown away; they are pads.
        other: whether by `Branch.run_other`.
    """

    rows: int
    other: bool = False


#: For each branch, zero and one: how it is run with so many rows of its own.
Ways = tuple[Callable[[int], Way], Callable[[int], Way]]
AS_IT_IS: Ways = (Way, Way)


@dataclass(frozen=True, eq=False)
class Fork:
    """The two branches of one layer's site: choice 1 for the rows that are told so, choice 0 for the others."""

    layer: int
    site: str
    zero: Branch
    one: Branch
    recorder: Recorder

    def all(self, branch: Branch, x_Nd: Tensor, scale_N: Tensor | None = None) -> Tensor:
        """Every row through one branch, pads too, times its factor; as wide as it came, under autocast too."""
        by = None if torch.is_grad_enabled() else branch.run_scaled
        with self.recorder.span(branch.segment, self.layer):
            if by is not None and scale_N is not None:
                return by(x_Nd, scale_N).to(x_Nd.dtype)
            y_Nd = branch.run(x_Nd)
        return scaled(y_Nd, scale_N).to(x_Nd.dtype)

    def run(
        self,
        strategy: Strategy,
        x_Nd: Tensor,
        one_N: Tensor,
        real_N: Tensor | None = None,
        scale_N: Tensor | None = None,
        ways: Ways = AS_IT_IS,
    ) -> Tensor:
        """Each row through its branch, times its scale.

        Args:
            strategy: see the module.
            x_Nd: rows.
            one_N: True where a row takes branch `one`.
            real_N: False at pads; None where there are none.
            scale_N: factor of each row's result, in float32 at least; None is 1.
            ways: for `gather` and `overlay`: how each branch is run with so many rows.

        Returns:
            `[N, d]` in the dtype of `x_Nd`; at pads anything finite.
        """
        if strategy == "masked":
            return self._masked(x_Nd, one_N, scale_N)
        if strategy == "grouped":
            return self._grouped(x_Nd, one_N, real_N, scale_N)
        return self._picked(x_Nd, one_N, real_N, scale_N, ways, strategy == "overlay")

    def _masked(self, x_Nd: Tensor, one_N: Tensor, scale_N: Tensor | None) -> Tensor:
        return scaled(torch.where(one_N[:, None], self.all(self.one, x_Nd), self.all(self.zero, x_Nd)), scale_N)

    def _picked(
        self,
        x_Nd: Tensor,
        one_N: Tensor,
        real_N: Tensor | None,
        scale_N: Tensor | None,
        ways: Ways,
        overlay: bool,
    ) -> Tensor:
        rows_R, zeros = _ordered(one_N, real_N)
        ones = len(rows_R) - zeros
        for branch, others in ((self.one, zeros), (self.zero, ones)):
            if others == 0:
                return self.all(branch, x_Nd, scale_N)
        # Where a branch is run with more rows than its own, they are its neighbours' in this order. Each result is
        # scaled while it is at hand: at many rows a pass over memory is what dispatch costs.
        way = ways[1](ones)
        y_one_nd = self._by(self.one, way.other, x_Nd, rows_R[-way.rows :], scale_N, ones)[-ones:]
        if overlay:
            with self._only(zeros, len(x_Nd) - zeros):
                y_Nd = self.all(self.zero, x_Nd, scale_N)
            return y_Nd.index_copy(0, rows_R[zeros:], y_one_nd)  # a copy: a hook on the branch may have kept this one
        y_Nd = torch.empty_like(x_Nd) if real_N is None else torch.zeros_like(x_Nd)
        y_Nd.index_copy_(0, rows_R[zeros:], y_one_nd)
        way = ways[0](zeros)
        y_zero_nd = self._by(self.zero, way.other, x_Nd, rows_R[: way.rows], scale_N, zeros)[:zeros]
        return y_Nd.index_copy_(0, rows_R[:zeros], y_zero_nd)

    def _by(
        self, branch: Branch, other: bool, x_Nd: Tensor, rows_n: Tensor, scale_N: Tensor | None, own: int
    ) -> Tensor:
        """One branch for these rows, of which so many are its own, times their factors, `[n, d]`."""
        pads = len(rows_n) - own
        x_nd, scale_n = x_Nd.index_select(0, rows_n), None if scale_N is None else scale_N.index_select(0, rows_n)
        run = branch.run_other if other else None
        if run is None:
            with self._only(own, pads):
                return self.all(branch, x_nd, scale_n)
        if self.recorder.recording:
            entered = torch.tensor([own, pads], device=x_Nd.device)
            self.recorder.entered(self.layer, self.site, branch.choice, entered[0], entered[1])
        with self.recorder.span(branch.segment, self.layer):
            y_nd = run(x_nd)
        return scaled(y_nd, scale_n)

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
        return scaled(torch.empty_like(x_Nd).index_copy_(0, rows, y_sorted_Nd), scale_N)

    def _first(self, branch: Branch, x_Nd: Tensor, count_1: Tensor) -> Tensor:
        self.recorder.entered(self.layer, self.site, branch.choice, count_1)
        with self.recorder.span(branch.segment, self.layer):
            return branch.run_first(x_Nd, count_1)


def _ordered(one_N: Tensor, real_N: Tensor | None) -> tuple[Tensor, int]:
    """The real rows, those of branch `zero` first and each branch's in their order; and how many are of `zero`."""
    if one_N.is_cuda:
        real_N = torch.ones_like(one_N) if real_N is None else real_N
        rows = torch.argsort(2 * (~real_N).to(torch.int8) + (real_N & one_N).to(torch.int8), stable=True)
        ones, zeros = torch.stack([(real_N & one_N).sum(), (real_N & ~one_N).sum()]).tolist()
        return rows[: zeros + ones], zeros
    one, real = one_N.numpy(), True if real_N is None else real_N.numpy()  # torch's `nonzero` takes longer
    zeros, ones = np.flatnonzero(~one & real), np.flatnonzero(one & real)
    return torch.from_numpy(np.concatenate([zeros, ones])), len(zeros)


def scaled(y: Tensor, scale: Tensor | None) -> Tensor:
    """Rows times their factors, multiplied in the wider dtype and rounded once. `y` may be a caller's: it is kept."""
    if scale is None:
        return y
    if y.dtype == scale.dtype or torch.is_grad_enabled():
        return (y * scale[:, None]).to(y.dtype)
    return y.to(scale.dtype).mul_(scale[:, None]).to(y.dtype)  # a product of unlike dtypes takes many times as long
