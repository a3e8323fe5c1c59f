"""Running SwiGLU experts of different widths on the rows that chose them.

    expert(x) = W_down·(SiLU(W_gate·x) ⊙ W_up·x)          width W: 3·d·W parameters, 6·d·W FLOPs a row

All weights of a layer's experts are one matrix `[3·ΣW, d]`: of each expert W rows of W_gate, W of W_up, W of W_downᵀ.
So an expert is one contiguous piece, equal neighbours are one 3-D view, and gate and up are one product.

Strategies, equal to rounding:

- `sequential`: expert after expert, its rows taken out and added back one by one.
- `per_width`: rows sorted by expert, then gate, up and down as one grouped product each for every run of experts of
  one width; results are added back to their rows.
- `padded`: every expert as wide as the widest, filled up with zeros, so that all are one grouped product. It pays
  for the widest expert on every row, and for another copy of the weights. Kept to show that cost.
- `packed`: rows sorted once; gate and up fused; no padding; results are not added into place one after the other but
  gathered and summed a row at a time.

A grouped product is `torch.nn.functional.grouped_mm` where it knows the dtype and rows are aligned, and products
expert by expert otherwise. On a CPU that is a product an expert too. There `packed`, where no gradient is wanted, has
better: one operator for all experts of a width (`fused_experts`), or where that cannot be had expert by expert in the
layout oneDNN multiplies in (`products.laid`). Both keep another copy of the weights.
On a GPU the host waits once a layer, to learn how many rows each expert has.

Not here: what decides (`heterogeneous_router`), and experts on other ranks (`expert_parallel`).

Legend: N token rows, K choices a row, P pairs (row, expert), E experts, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.execution import fused_experts
from profiler.execution.grouped import ALIGNMENT, DTYPES
from profiler.execution.products import laid, laid_out, multiply
from profiler.execution.states import Made

Strategy = Literal["sequential", "per_width", "padded", "packed"]
#: Of a width, what the products of its experts run in.
Products = Callable[[int], AbstractContextManager[Any]]


def _untimed(width: int) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class Dispatch:
    """Pairs (row, expert), sorted by expert, rows ascending in each; and the way back.

    Attributes:
        rows: N.
        row_P: each sorted pair's row.
        count_E: pairs of each expert, on the device.
        place_P: where pair p is among the sorted ones, pairs row by row.
        weight_P: weights, pairs row by row; None is 1.
        pairs_N: pairs of each row; None where all have as many.
    """

    rows: int
    row_P: Tensor
    count_E: Tensor
    place_P: Tensor
    weight_P: Tensor | None
    pairs_N: Tensor | None

    @cached_property
    def counts(self) -> list[int]:
        """`count_E` on the host."""
        return cast(list[int], self.count_E.tolist())

    @property
    def sorted_weight_P(self) -> Tensor | None:
        """Weights of the sorted pairs."""
        if self.weight_P is None:
            return None
        return torch.empty_like(self.weight_P).index_copy(0, self.place_P, self.weight_P)

    def combine(self, y_Pd: Tensor) -> Tensor:
        """Weighted sums of the sorted pairs' results over each row's pairs: `[N, d]`; 0 for a row without any."""
        if len(y_Pd) == 0:
            return y_Pd.new_zeros(self.rows, y_Pd.shape[1])
        weight_P = None if self.weight_P is None else self.weight_P.to(y_Pd.dtype)
        if self.pairs_N is None:
            shape = (self.rows, -1)
            weight = None if weight_P is None else weight_P.view(shape)
            return F.embedding_bag(self.place_P.view(shape), y_Pd, per_sample_weights=weight, mode="sum")
        starts_N = self.pairs_N.cumsum(0) - self.pairs_N
        return F.embedding_bag(self.place_P, y_Pd, starts_N, per_sample_weights=weight_P, mode="sum")


def dispatch(
    choice_NK: Tensor, weight_NK: Tensor | None, experts: int, real_N: Tensor | None = None, *, full: bool = True
) -> Dispatch:
    """Sort choices by expert.

    Args:
        choice_NK: experts of each row; -1 where it has fewer than K.
        weight_NK: their weights; None is 1.
        experts: E.
        real_N: False at rows that go to no expert; None where there are none.
        full: whether each row has K choices.
    """
    rows, width = choice_NK.shape
    expert_P = choice_NK.flatten()
    weight_P = None if weight_NK is None else weight_NK.flatten()
    pairs_N = chosen = None
    if real_N is not None or not full:
        taken_NK = choice_NK >= 0
        if real_N is not None:
            taken_NK = taken_NK & real_N[:, None]
        pairs_N, chosen = taken_NK.sum(1), taken_NK.flatten().nonzero()[:, 0]
        expert_P = expert_P[chosen]
        weight_P = None if weight_P is None else weight_P[chosen]
    order = _sorted(expert_P, experts)
    place_P = torch.empty_like(order)
    place_P[order] = torch.arange(len(order), device=order.device)
    row_P = (order if chosen is None else chosen[order]) // max(width, 1)
    return Dispatch(rows, row_P, torch.bincount(expert_P, minlength=experts), place_P, weight_P, pairs_N)


def _sorted(expert_P: Tensor, experts: int) -> Tensor:
    """The order that sorts pairs by expert, and keeps it otherwise. On a CPU by NumPy's radix sort of small numbers."""
    if expert_P.device.type != "cpu" or experts > np.iinfo(np.int16).max:
        return torch.argsort(expert_P, stable=True)
    return torch.from_numpy(np.argsort(expert_P.numpy().astype(np.int16), kind="stable"))


class SwiGLU(nn.Module):
    """A SwiGLU of one width: experts that are always on, side by side as one."""

    def __init__(self, hidden: int, width: int) -> None:
        """`hidden` d."""
        super().__init__()
        self.width = width
        self.weights = nn.Parameter(torch.empty(3 * width, hidden))

    def forward(self, x_Nd: Tensor) -> Tensor:
        """`[N, d]` → `[N, d]`."""
        return _swiglu(x_Nd, *self.weights.split([2 * self.width, self.width]))


class _Entry(nn.Module):
    """One expert as a module: where its rows enter, so that they can be counted there. It holds no weights."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, x_nd: Tensor) -> Tensor:
        """`[n, d]` → `[n, d]`."""
        return self._run(x_nd)


@dataclass(frozen=True)
class _Run:
    """Neighbouring experts of one width."""

    width: int
    first: int
    size: int


class Experts(nn.Module):
    """E experts of the given widths, their weights in one matrix."""

    def __init__(self, hidden: int, widths: Sequence[int]) -> None:
        """`hidden` d."""
        super().__init__()
        self.hidden, self.widths = hidden, tuple(widths)
        self.weights = nn.Parameter(torch.empty(3 * sum(widths), hidden))
        #: Where each expert's rows begin in `weights`.
        self.starts = [3 * before for before in accumulate(widths, initial=0)]
        # Partials of bound methods: a deep copy of the tree then has entries into its own weights.
        self.entries = nn.ModuleList(_Entry(partial(self._run_one, e)) for e in range(len(widths)))
        self._runs: list[_Run] = []
        for width, members in groupby(range(len(widths)), key=self.widths.__getitem__):
            each = list(members)
            self._runs.append(_Run(width, each[0], len(each)))
        self._padded: Made[Tensor] = Made()
        self._laid: Made[list[Tensor]] = Made()
        self._panels: Made[list[Tensor]] = Made()

    def of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """W_gate `[W, d]`, W_up `[W, d]` and W_downᵀ `[W, d]` of one expert, as views."""
        start, width = self.starts[expert], self.widths[expert]
        gate, up, down = self.weights[start : start + 3 * width].split(width)
        return gate, up, down

    def run(
        self,
        strategy: Strategy,
        x_Nd: Tensor,
        to: Dispatch,
        products: Products = _untimed,
    ) -> Tensor:
        """Each row's weighted sum over the experts it chose.

        Args:
            strategy: see the module.
            x_Nd: rows.
            to: who takes them.
            products: of a width, a context that the products of its experts run in, with what cannot be taken apart
                from them: activations, and in the fused operator gathering rows.

        Returns:
            `[N, d]` in the dtype of `x_Nd`; 0 for a row that chose none.
        """
        if torch.is_grad_enabled() and self.weights.requires_grad:
            for kept in (self._padded, self._laid, self._panels):
                kept.forget()
        if strategy == "sequential":
            return self._sequential(x_Nd, to, products)
        if strategy == "packed":
            return to.combine(self.fused(x_Nd, to, products))
        x_Pd = x_Nd.index_select(0, to.row_P)
        if strategy == "per_width":
            return _added(x_Nd, to.row_P, self.apart(x_Pd, to.counts, products), to.sorted_weight_P)
        with products(max(self.widths, default=0)):
            y_Pd = self._as_wide_as_the_widest(x_Pd, to.counts)
        return to.combine(y_Pd)

    # -- strategies -------------------------------------------------------------------------------

    def _sequential(self, x_Nd: Tensor, to: Dispatch, products: Products) -> Tensor:
        y_Nd = torch.zeros_like(x_Nd)
        end, weight_P = 0, to.sorted_weight_P
        for entry, width, count in zip(self.entries, self.widths, to.counts, strict=True):
            if not count:
                continue
            here = slice(end, end + count)
            end += count
            rows = to.row_P[here]
            x_nd = x_Nd.index_select(0, rows)
            with products(width):
                y_nd = entry(x_nd)
            y_Nd = y_Nd.index_add(0, rows, _scaled(y_nd, None if weight_P is None else weight_P[here]))
        return y_Nd

    def _run_one(self, expert: int, x_nd: Tensor) -> Tensor:
        gate, up, down = self.of(expert)
        hidden: Tensor = F.silu(F.linear(x_nd, gate)) * F.linear(x_nd, up)
        return hidden @ down

    def apart(self, x_Pd: Tensor, counts: Sequence[int], products: Products = _untimed) -> Tensor:
        """Sorted rows through their experts, gate and up apart: `[P, d]` → `[P, d]`."""
        found = []
        for run, blocks, x_nd, of_run in self._rows_of_runs(x_Pd, counts):
            gate, up, down = blocks.split(run.width, dim=1)
            with products(run.width):
                gated = F.silu(_grouped(x_nd, gate.transpose(1, 2), of_run))
                hidden = gated * _grouped(x_nd, up.transpose(1, 2), of_run)
                found.append(_grouped(hidden, down, of_run))
        return torch.cat(found) if found else x_Pd

    def fused(self, x_Nd: Tensor, to: Dispatch, products: Products = _untimed) -> Tensor:
        """Rows through their experts, gate and up as one product: results of the sorted pairs, `[P, d]`."""
        plain = not (torch.is_grad_enabled() and (x_Nd.requires_grad or self.weights.requires_grad))
        if plain and fused_experts.why_not(x_Nd) is None:
            return self._by_operator(x_Nd, to, products)
        x_Pd, counts = x_Nd.index_select(0, to.row_P), to.counts
        if plain and laid_out(x_Pd):
            return self._one_by_one(x_Pd, counts, products)
        found = []
        for run, blocks, x_nd, of_run in self._rows_of_runs(x_Pd, counts):
            with products(run.width):
                if sum(map(bool, of_run)) > 1:
                    gate_up, down = blocks.split([2 * run.width, run.width], dim=1)
                    hidden = _gated(_grouped(x_nd, gate_up.transpose(1, 2), of_run), in_place=plain)
                    found.append(_grouped(hidden, down, of_run))
                else:
                    (only,) = (i for i, count in enumerate(of_run) if count)
                    found.append(_swiglu(x_nd, *blocks[only].split([2 * run.width, run.width])))
        return torch.cat(found) if found else x_Pd

    def how(self) -> str:
        """How `packed` multiplies where no gradient is wanted, as a sentence without its end."""
        why = fused_experts.why_not(self.weights)
        if why is None:
            return "one fused operator for all experts of a width, compiled on this machine; it gathers their rows too"
        if laid_out(self.weights):
            return f"expert by expert, by oneDNN; the fused operator cannot be had: {why}"
        return f"one grouped product for all experts of a width; the fused operator cannot be had: {why}"

    def _by_operator(self, x_Nd: Tensor, to: Dispatch, products: Products) -> Tensor:
        """As `fused`, a width at a time."""
        y_Pd, end = x_Nd.new_empty(len(to.row_P), self.hidden), 0
        for run, panels in zip(self._runs, self._panels.of([self.weights], self._as_panels), strict=True):
            of_run = to.counts[run.first : run.first + run.size]
            start, end = end, end + sum(of_run)
            if end > start:
                with products(run.width):
                    fused_experts.run(x_Nd, to.row_P[start:end], of_run, run.width, panels, y_Pd[start:end])
        return y_Pd

    def _as_panels(self) -> list[Tensor]:
        """Of each run its weights as the operator takes them."""
        return [fused_experts.panels(piece, run.width) for run, piece in self._pieces(self.weights.detach())]

    def _one_by_one(self, x_Pd: Tensor, counts: Sequence[int], products: Products) -> Tensor:
        """As `fused`, expert by expert, with weights in oneDNN's layout."""
        weights = self._laid.of([self.weights], self._gate_up_and_down)
        y_Pd, end = torch.empty_like(x_Pd), 0
        for run in self._runs:
            of_run = counts[run.first : run.first + run.size]
            if not any(of_run):
                continue
            with products(run.width):
                for expert, count in enumerate(of_run, run.first):
                    if count:
                        here = slice(end, end + count)
                        gate, up = multiply(x_Pd[here], weights[2 * expert]).chunk(2, dim=1)
                        y_Pd[here] = multiply(F.silu(gate).mul_(up), weights[2 * expert + 1])
                        end += count
        return y_Pd

    def _gate_up_and_down(self) -> list[Tensor]:
        """Of each expert W_gate over W_up, `[2·W, d]`, and W_down, `[d, W]`, in oneDNN's layout."""
        found = []
        for start, width in zip(self.starts, self.widths, strict=False):
            block = self.weights[start : start + 3 * width]
            found += [laid(block[: 2 * width]), laid(block[2 * width :].t())]
        return found

    def _as_wide_as_the_widest(self, x_Pd: Tensor, counts: Sequence[int]) -> Tensor:
        if not len(x_Pd):
            return x_Pd
        widest = max(self.widths)
        gate_up, down = self._padded_weights().split([2 * widest, widest], dim=1)
        return _grouped(_gated(_grouped(x_Pd, gate_up.transpose(1, 2), counts)), down, counts)

    # -- weights ----------------------------------------------------------------------------------

    def _rows_of_runs(
        self, x_Pd: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[_Run, Tensor, Tensor, Sequence[int]]]:
        """Runs that have rows: a view of their weights, `[size, 3·W, d]`, their rows, and how many each member has."""
        end = 0
        for run, piece in self._pieces(self.weights):
            of_run = counts[run.first : run.first + run.size]
            start, end = end, end + sum(of_run)
            if end > start:
                yield run, piece, x_Pd[start:end], of_run

    def _pieces(self, weights: Tensor) -> Iterator[tuple[_Run, Tensor]]:
        """Runs and their weights, `[size, 3·W, d]` each."""
        # One split, whose gradient is put together once; each slice of its own would fill a whole matrix with zeros.
        pieces = weights.split([3 * run.width * run.size for run in self._runs])
        for run, piece in zip(self._runs, pieces, strict=True):
            yield run, piece.view(run.size, 3 * run.width, self.hidden)

    def _padded_weights(self) -> Tensor:
        """`[E, 3·W_max, d]`; made anew only where the weights have changed, or have a gradient."""
        return self._pad() if torch.is_grad_enabled() else self._padded.of([self.weights], self._pad)

    def _pad(self) -> Tensor:
        widest = max(self.widths)
        each = [
            torch.cat([F.pad(part, (0, 0, 0, widest - width)) for part in self.of(expert)])
            for expert, width in enumerate(self.widths)
        ]
        return torch.stack(each)


def _gated(gate_up_nW: Tensor, *, in_place: bool = False) -> Tensor:
    """`[n, 2·W]` → `[n, W]`; in place, the left half of what was given."""
    gate, up = gate_up_nW.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up) if in_place else F.silu(gate) * up


def _swiglu(x_nd: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return _gated(F.linear(x_nd, gate_up)) @ down


def _grouped(x_nd: Tensor, weight_eio: Tensor, counts: Sequence[int]) -> Tensor:
    """`counts[e]` rows after the other through matrix e: `[n, in]`, `[e, in, out]` → `[n, out]`."""
    aligned = all(size * x_nd.element_size() % ALIGNMENT == 0 for size in weight_eio.shape[1:])
    if aligned and x_nd.dtype in DTYPES:
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x_nd.device)
        return F.grouped_mm(x_nd, weight_eio, offs=ends)
    parts = x_nd.split(list(counts))
    return torch.cat([part @ weight for part, weight in zip(parts, weight_eio, strict=True) if len(part)])


def _scaled(y: Tensor, weight: Tensor | None) -> Tensor:
    """Rows times their weights, multiplied in the wider of both dtypes and rounded once."""
    return y if weight is None else (y * weight[:, None]).to(y.dtype)


def _added(x_Nd: Tensor, row_P: Tensor, y_Pd: Tensor, weight_P: Tensor | None) -> Tensor:
    """Sorted results added to their rows, `[N, d]`."""
    return torch.zeros_like(x_Nd).index_add(0, row_P, _scaled(y_Pd, weight_P))
