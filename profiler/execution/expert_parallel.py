"""Experts on several ranks: rows go to the rank that has their expert, and results come back (all-to-all).

Of each layer a rank holds some of the experts, of any number and widths, as a `placement.Placement` says. Three
collectives a layer: how many rows each copy of an expert gets ("counts"), the rows ("dispatch"), the results
("combine"); weights are applied where the rows came from, so that nothing but rows crosses. Routing is computed where
the tokens are. What a rank computes for itself takes the same way, and is not sent.

Two ways for the rows of a batch to lie (`attention`):

- `data_parallel`: each rank has rows of its own and sends them all.
- `replicated`: every rank has every row. Each sends a share, an N/R of them, and a fourth collective ("gather") gives
  the results to all.

Rows and results pass through autograd, so that training runs through the collectives as inference does. A gradient
counts a replicated row once; what is replicated under data parallelism is for the trainer to sum over ranks.

Which processes take part is `joined`'s, for as long as its block is open: models that are wrapped in it hold their
share of the experts only. Collectives run on torch.distributed's default group, gloo on CPU and NCCL on CUDA.

Not here: making placements (`placement`), starting the group and missing ranks (`profiler.ranks`), and overlap: no
collective runs beside a product.

Legend: as `experts`; R ranks, C copies of experts in the order of their ranks, E' experts held here, P pairs (row,
expert) of this rank's rows, Q pairs received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from profiler.execution.experts import Dispatch, Experts, Strategy, dispatch
from profiler.execution.placement import BY_SHAPE, Placement

if TYPE_CHECKING:
    from profiler.recorder import Recorder

Attention = Literal["replicated", "data_parallel"]


class CollectiveError(RuntimeError):
    """A collective did not come to its end: a rank is missing, or took longer than the group's timeout."""


@dataclass(frozen=True)
class Membership:
    """What a process is among those that share the experts.

    Attributes:
        rank, ranks: this process's number, and how many there are.
        placement: a name of `placement.BY_SHAPE`, or a placement for each layer.
        attention: how the rows of a batch lie; see the module.
    """

    rank: int
    ranks: int
    placement: str | Mapping[int, Placement] = "all_size"
    attention: Attention = "replicated"

    def place(self, layer: int, width_E: Sequence[int], per_group: int) -> Placement:
        """The placement of one layer's experts.

        Raises:
            InputError: there are fewer experts than ranks.
        """
        if not isinstance(self.placement, str):
            return self.placement[layer]
        return by_shape(self.placement, width_E, per_group, self.ranks)


def by_shape(name: str, width_E: Sequence[int], per_group: int, ranks: int) -> Placement:
    """A placement that follows from the shape, whether groups are of one width or each expert has its own.

    Raises:
        InputError: there are fewer experts than ranks.
    """
    return BY_SHAPE[name](*shape_of(width_E, per_group), ranks)


def shape_of(width_E: Sequence[int], per_group: int) -> tuple[list[int], int]:
    """Widths of groups and experts in each, as placements take them: experts of unlike widths are a group each."""
    groups = [width_E[start : start + per_group] for start in range(0, len(width_E), per_group)]
    if all(len(set(group)) == 1 for group in groups):
        return [group[0] for group in groups], per_group
    return list(width_E), 1


_membership: Membership | None = None


def membership() -> Membership | None:
    """What this process is among the ranks, or None where it has all experts itself."""
    return _membership


@contextmanager
def joined(found: Membership) -> Iterator[None]:
    """While open, methods that are wrapped share their experts with the other ranks of torch.distributed's group."""
    global _membership
    before, _membership = _membership, found
    try:
        yield
    finally:
        _membership = before


class ExpertParallel:
    """The experts of one layer, as one rank takes part in running them.

    Attributes:
        held: experts of this rank, ascending; its `Experts` have these in this order.
    """

    def __init__(self, placement: Placement, rank: int, attention: Attention, device: torch.device) -> None:
        self.placement, self.rank, self.attention = placement, rank, attention
        self.ranks = placement.ranks
        expert_C, rank_C, _, _ = placement.copies
        order = np.lexsort((expert_C, rank_C))  # rank by rank, in each by expert: how rows are sent
        slot_C = np.empty_like(order)
        slot_C[order] = np.arange(len(order))
        copies = np.array([len(ranks) for ranks in placement.where])
        self.held = tuple(int(expert) for expert in expert_C[order][rank_C[order] == rank])
        self.widths = tuple(placement.widths[expert] for expert in self.held)
        self.copies_R = np.bincount(rank_C, minlength=self.ranks).tolist()
        self._single = bool((copies == 1).all())
        # Copies of one expert are neighbours in `slot_C`.
        on_device = partial(torch.tensor, device=device)
        self._slot_C, self._copies_E = on_device(slot_C), on_device(copies)
        self._first_E = self._copies_E.cumsum(0) - self._copies_E

    @property
    def split(self) -> bool:
        """Whether each rank sends a share of rows that all of them have."""
        return self.attention == "replicated"

    def own(self, rows: int) -> list[int]:
        """Where each rank's share of `rows` begins, and the end."""
        return [rows * rank // self.ranks for rank in range(self.ranks + 1)]

    def run(
        self, experts: Experts, strategy: Strategy, x_Nd: Tensor, choice_NK: Tensor, weight_NK: Tensor | None,
        recorder: Recorder, layer: int, site: str, *, real_N: Tensor | None = None, full: bool = True,
    ) -> Tensor:  # fmt: skip
        """Each row's weighted sum over the experts it chose, wherever they are. Every rank must call it.

        Args:
            experts: this rank's, `held`.
            strategy: how they are run.
            x_Nd: rows: this rank's own, or under replicated attention all, the same on every rank.
            choice_NK, weight_NK, real_N, full: as `experts.dispatch`.
            recorder: told rows that enter experts, tokens and bytes sent, and the time of collectives.
            layer, site: where.

        Returns:
            `[N, d]`.

        Raises:
            CollectiveError: another rank is missing.
        """
        if self.split:
            bounds = self.own(len(x_Nd))
            mine = slice(bounds[self.rank], bounds[self.rank + 1])
            everyone = _Rows(layer, recorder, bounds, self.rank)
            x_Nd = _through(_Own, x_Nd, everyone)
            weight_NK = None if weight_NK is None else _through(_Own, weight_NK, everyone)
            choice_NK, real_N = choice_NK[mine], None if real_N is None else real_N[mine]
        to = dispatch(self._slots(choice_NK), weight_NK, len(self._slot_C), real_N, full=full)
        sent_R, received_RE = self._exchange_counts(to, recorder, layer)
        received_R = [sum(counts) for counts in received_RE]
        row_bytes = x_Nd.shape[1] * x_Nd.element_size()
        recorder.sent(layer, "dispatch", sent_R, row_bytes)
        recorder.sent(layer, "combine", received_R, row_bytes)
        there = _Trip(layer, "dispatch", recorder, sent_R, received_R)
        back = _Trip(layer, "combine", recorder, received_R, sent_R)
        x_Qd = _through(_Exchange, x_Nd.index_select(0, to.row_P), there)
        y_Qd = self._compute(experts, strategy, x_Qd, received_RE, recorder, layer, site)
        y_Pd = _through(_Exchange, y_Qd, back)
        y_Nd = to.combine(y_Pd)
        if not len(y_Pd):
            # Zeros: the gradient must reach each collective here as it does on ranks with rows, which wait for it.
            y_Nd = y_Nd + y_Pd.sum() + (0 if to.weight_P is None else to.weight_P.sum().to(y_Nd.dtype))
        return _through(_Everyone, y_Nd, everyone) if self.split else y_Nd

    def _slots(self, choice_NK: Tensor) -> Tensor:
        """Copies that rows go to in place of experts, numbered rank by rank; -1 stays.

        Of an expert with several copies each source counts its own rows (`Placement.destinations`).
        """
        expert_NK = choice_NK.clamp(min=0)
        copy_NK = self._first_E[expert_NK]
        if not self._single:
            expert_P = choice_NK.flatten()
            order = torch.argsort(expert_P, stable=True)
            ranked = expert_P[order].contiguous()
            nth_P = torch.empty_like(order)
            nth_P[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(ranked, ranked)
            turn_NK = nth_P.view_as(choice_NK) + self.rank + expert_NK
            copy_NK = copy_NK + turn_NK % self._copies_E[expert_NK]
        return torch.where(choice_NK < 0, choice_NK, self._slot_C[copy_NK])

    def _exchange_counts(self, to: Dispatch, recorder: Recorder, layer: int) -> tuple[list[int], list[list[int]]]:
        """Rows sent to each rank, and of each rank those received for each expert held here, `[R][E']`."""
        mine = len(self.held)
        received = to.count_E.new_empty(self.ranks * mine)
        with recorder.exchange(layer, "counts"):
            _all_to_all(received, to.count_E, [mine] * self.ranks, self.copies_R)
        counts = torch.cat([to.count_E, received]).tolist()
        sent, found = iter(counts[: len(to.count_E)]), counts[len(to.count_E) :]
        sent_R = [sum(next(sent) for _ in range(copies)) for copies in self.copies_R]
        return sent_R, [found[source * mine : (source + 1) * mine] for source in range(self.ranks)]

    def _compute(
        self, experts: Experts, strategy: Strategy, x_Qd: Tensor, received_RE: list[list[int]], recorder: Recorder,
        layer: int, site: str,
    ) -> Tensor:  # fmt: skip
        """Received rows through this rank's experts, in the order they came."""
        count_RE = torch.tensor(received_RE, dtype=torch.int64, device=x_Qd.device).view(self.ranks, len(self.held))
        held = torch.arange(len(self.held), device=x_Qd.device)
        expert_Q = held.repeat(self.ranks).repeat_interleave(count_RE.flatten(), output_size=len(x_Qd))
        if strategy != "sequential" and recorder.recording:  # which calls the entries, where rows are counted
            entered_E = count_RE.new_zeros(len(self.placement.widths))
            entered_E[list(self.held)] = count_RE.sum(0)
            recorder.entered(layer, site, 0, entered_E)
        if not len(x_Qd):  # an expert without rows still has a gradient, as it has on ranks where it has rows
            return x_Qd + experts.weights[:0].sum()
        to = dispatch(expert_Q[:, None], None, len(self.held))
        return experts.run(strategy, x_Qd, to, partial(recorder.span, site, layer))

    # -- weights ----------------------------------------------------------------------------------

    def part(self, whole: Tensor) -> Tensor:
        """Of all experts' weights as `Experts` lays them out, `[3·ΣW, d]`, those held here."""
        pieces = whole.split([3 * width for width in self.placement.widths])
        return torch.cat([pieces[expert] for expert in self.held]) if self.held else whole[:0]

    def whole(self, part: Tensor) -> Tensor:
        """All experts' weights, from those of every rank. Every rank must call it.

        Raises:
            CollectiveError: another rank is missing.
        """
        held_R = [[e for e, ranks in enumerate(self.placement.where) if rank in ranks] for rank in range(self.ranks)]
        ends = np.cumsum([0, *(3 * sum(self.placement.widths[e] for e in held) for held in held_R)]).tolist()
        everything = _gathered(part.detach(), ends)
        pieces: dict[int, Tensor] = {}
        for rank, held in enumerate(held_R):
            of_rank = everything[ends[rank] : ends[rank + 1]].split([3 * self.placement.widths[e] for e in held])
            pieces.update(zip(held, of_rank, strict=True))
        return torch.cat([pieces[expert] for expert in range(len(pieces))])


# -- collectives -----------------------------------------------------------------------------------


@contextmanager
def collective() -> Iterator[None]:
    """Errors of torch.distributed in this block are `CollectiveError`s; it has no type of its own for gloo's."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def _all_to_all(out: Tensor, rows: Tensor, received_R: list[int], sent_R: list[int]) -> None:
    with collective():
        dist.all_to_all_single(out, rows, received_R, sent_R)


def _gathered(rows: Tensor, bounds: list[int]) -> Tensor:
    """Rows of every rank after the other; rank r has `bounds[r + 1] − bounds[r]`. Sent as many each, so padded."""
    sizes = [end - start for start, end in pairwise(bounds)]
    longest = max(sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in sizes]
    with collective():
        dist.all_gather(found, padded)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def _through(function: Any, rows: Tensor, how: _Trip | _Rows) -> Tensor:
    """`apply` of an autograd function, which has no types."""
    return cast(Tensor, function.apply(rows, how))


@dataclass(frozen=True)
class _Trip:
    """One all-to-all of rows. Gradients go the other way, unrecorded: a step that is recorded has none."""

    layer: int
    operation: str
    recorder: Recorder
    sent_R: list[int]
    received_R: list[int]


class _Exchange(torch.autograd.Function):
    """Rows sorted by destination → rows received, source after source."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        out = rows.new_empty(sum(trip.received_R), rows.shape[1])
        with trip.recorder.exchange(trip.layer, trip.operation):
            _all_to_all(out, rows.contiguous(), trip.received_R, trip.sent_R)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,), trip = grads, cast(_Trip, ctx.trip)
        out = grad.new_empty(sum(trip.sent_R), grad.shape[1])
        _all_to_all(out, grad.contiguous(), trip.sent_R, trip.received_R)
        return out, None


@dataclass(frozen=True)
class _Rows:
    """Rows that every rank has, and where each rank's share of them begins."""

    layer: int
    recorder: Recorder
    bounds: list[int]
    rank: int

    @property
    def mine(self) -> slice:
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])


class _Own(torch.autograd.Function):
    """All rows → this rank's share. Their gradient is put together from every rank's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, everyone: _Rows) -> Tensor:
        ctx.everyone = everyone
        return rows[everyone.mine].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _gathered(grads[0], cast(_Rows, ctx.everyone).bounds), None


class _Everyone(torch.autograd.Function):
    """Each rank's share → all rows. Every rank has the whole gradient, and takes its share."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, everyone: _Rows) -> Tensor:
        ctx.everyone = everyone
        with everyone.recorder.exchange(everyone.layer, "gather"):
            return _gathered(rows, everyone.bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0][cast(_Rows, ctx.everyone).mine].contiguous(), None
