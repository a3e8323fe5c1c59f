"""Which rank holds which routed expert of a layer (METHODS section 3, "Placement"), and what each rank then carries.

Pure functions on counts and widths; no torch. The first three placements follow from the shape of the model, the last
three from tokens that were measured. One placement is one layer's: a cap on memory holds in every layer by itself.

Not here: moving tokens (`expert_parallel`), choosing between placements, and judging them on recorded steps, which
`analysis.balance` does from the copies a run recorded.

Shapes: G groups of N experts make E = G·N experts, expert e = g·N + i being the i-th of group g; R ranks; C copies of
experts, more than E where experts are replicated. A width is one of `[E]`, a load is tokens × width: times 6·d it is
FLOPs, and a width times 3·d is parameters, so that neither d nor the dtype changes what is best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import InputError
from profiler.execution.placement_program import solve

Ints = NDArray[np.int64]

#: How far above an even share of the weights a rank may go, where placement follows measured loads.
SLACK = 0.1
#: Seconds HiGHS may take for one layer.
TIME_LIMIT_S = 10.0
#: Copies `replicated` may add in one layer.
EXTRA_COPIES = 4


class Copies(NamedTuple):
    """Every copy of every expert, `[C]` each. Of an expert's tokens a copy takes number `turn`, `turn + every`, …"""

    expert: Ints
    rank: Ints
    turn: Ints
    every: Ints


@dataclass(frozen=True)
class Placement:
    """The ranks that hold each expert of one layer.

    `where[e]`: ranks of expert e, ascending; more than one where it is replicated. `note`: what must be said beside
    the name wherever this is shown. `gap`, of `exact` alone: the part of the largest load by which the best placement
    within the cap could still be below it.
    """

    name: str
    ranks: int
    widths: tuple[int, ...]
    where: tuple[tuple[int, ...], ...]
    note: str | None = None
    gap: float | None = None

    @property
    def copies(self) -> Copies:
        """Copies in order of expert, then rank. Experts start at different ones, or all odd tokens meet on rank 0."""
        rows = [
            (expert, rank, (j - expert) % len(ranks), len(ranks))
            for expert, ranks in enumerate(self.where)
            for j, rank in enumerate(ranks)
        ]
        return Copies(*np.array(rows, np.int64).T)

    def loads(self, tokens: ArrayLike) -> Ints:
        """Tokens × width of each rank.

        Args:
            tokens: `[..., E]` tokens of each expert, whole numbers. Copies divide those of one vector between them.

        Returns:
            `[..., R]`.
        """
        expert, rank, turn, every = self.copies
        taken = (np.asarray(tokens, np.int64)[..., expert] - turn + every - 1) // every
        loads: Ints = (taken * np.array(self.widths)[expert]) @ (rank[:, None] == np.arange(self.ranks)).astype(
            np.int64
        )
        return loads

    def width_sums(self) -> Ints:
        """`[R]` widths of the experts a rank holds, added up."""
        expert, rank, _, _ = self.copies
        return np.bincount(rank, np.array(self.widths)[expert], self.ranks).astype(np.int64)

    def weight_bytes(self, hidden: int, itemsize: int) -> Ints:
        """`[R]` bytes of routed experts a rank holds in this layer: three matrices of `hidden` × width each."""
        size: Ints = 3 * hidden * itemsize * self.width_sums()
        return size

    def destinations(self, experts: ArrayLike, source: int = 0) -> Ints:
        """The rank each row goes to.

        Args:
            experts: `[A]` expert of each row a source sends, in the order of its tokens.
            source: rank that sends them. Each counts its own rows of an expert, starting at another copy, so that
                nothing need be exchanged first; where experts have one copy each it changes nothing.

        Returns:
            `[A]` ranks. Of source 0, as many to each as `loads` says.
        """
        rows = np.asarray(experts, np.int64)
        order = np.argsort(rows, kind="stable")
        nth = np.empty_like(rows)
        nth[order] = np.arange(rows.size) - np.searchsorted(rows[order], rows[order])
        count = np.array([len(ranks) for ranks in self.where], np.int64)
        ranks_EJ = np.zeros((len(self.where), count.max()), np.int64)
        for expert, ranks in enumerate(self.where):
            ranks_EJ[expert, : len(ranks)] = ranks
        destination: Ints = ranks_EJ[rows, (nth + source + rows) % count[rows]]
        return destination


def contiguous(widths: Sequence[int], per_group: int, ranks: int) -> Placement:
    """Experts in their own order, as many on each rank: the narrow ones end up together, and so do the wide ones.

    Args:
        widths: `[G]` width of each group's experts.
        per_group: N.
        ranks: R. Where it does not divide E, the first ranks hold one more.

    Raises:
        InputError: no width, a width or count below 1, or more ranks than experts.
    """
    width_E = _widths(widths, per_group, ranks)
    return _consecutive("contiguous", width_E, range(len(width_E)), ranks)


def interleaved(widths: Sequence[int], per_group: int, ranks: int) -> Placement:
    """The released code's map (UnicomAI/MoHGE at 7ded030), then as many consecutive ids on each rank.

    Expert (g, i) becomes id i·G + 2g where g < G/2, and i·G + 2(G − 1 − g) + 1 otherwise: a narrow group next to the
    wide one that its width makes a pair with. Where R divides N this is `all_size`.

    Args, Raises: as `contiguous`.
    """
    width_E, groups = _widths(widths, per_group, ranks), len(widths)
    ids = [
        i * groups + (2 * g if 2 * g < groups else 2 * (groups - 1 - g) + 1)
        for g in range(groups)
        for i in range(per_group)
    ]
    return _consecutive("interleaved", width_E, np.argsort(ids).tolist(), ranks)


def all_size(widths: Sequence[int], per_group: int, ranks: int) -> Placement:
    """Experts of every size on every rank: the i-th of each group on rank i, or N/R of each (paper, figure 2).

    Where R does not divide N, which the paper leaves open, every rank holds ⌊N/R⌋ of each group, and the rest are
    dealt one pair of groups g and G − 1 − g at a time, to the rank with the least width so far; of an odd G the middle
    group goes last, one expert at a time. The note says that this is uneven.

    Args, Raises: as `contiguous`.
    """
    width_E, groups = _widths(widths, per_group, ranks), len(widths)
    whole = per_group // ranks
    rank_GN = np.tile(np.arange(per_group) // max(whole, 1), (groups, 1))
    rest = range(whole * ranks, per_group)
    if not rest:
        return Placement("all_size", ranks, width_E, _single(rank_GN.ravel().tolist()))
    dealt = [((g, i), (groups - 1 - g, i)) for i in rest for g in range(groups // 2)]
    alone = [((groups // 2, i),) for i in rest if groups % 2]
    held = [(whole * sum(widths), rank) for rank in range(ranks)]
    for together in (*dealt, *alone):
        width, rank = held[0]
        for g, i in together:
            rank_GN[g, i] = rank
        heapq.heapreplace(held, (width + sum(widths[g] for g, _ in together), rank))
    least, most = min(held)[0], max(held)[0]
    singles = f" and {len(alone)} experts of the middle group singly" if alone else ""
    note = (
        f"uneven: {ranks} ranks do not divide {per_group} experts a group, so each holds {whole} of every group; of "
        f"the rest {2 * len(dealt)} experts were dealt in pairs of groups{singles}. Widths add up to "
        f"{f'{least} to {most} a rank' if least < most else f'{least} on every rank'}"
    )
    return Placement("all_size", ranks, width_E, _single(rank_GN.ravel().tolist()), note)


def balanced(
    tokens: ArrayLike, widths: Sequence[int], per_group: int, ranks: int, *, slack: float = SLACK
) -> Placement:
    """Longest processing time first: experts by falling load, each to the least loaded rank that has room for it.

    Where that leaves an expert without room, the wide ones are placed first, and last by width alone.

    Args:
        tokens: `[E]` tokens each expert was measured to get, whole numbers.
        widths, per_group, ranks: as `contiguous`.
        slack: a rank's weight bytes are at most (1 + slack) × their mean over ranks.

    Raises:
        InputError: as `contiguous`; tokens that are not one count an expert; a negative slack; or no room found.
    """
    width_E = _widths(widths, per_group, ranks)
    tokens_E = _tokens(tokens, width_E)
    cap = _cap(width_E, ranks, slack)
    found = _longest_first(tokens_E, width_E, [1] * len(width_E), ranks, cap)
    if found is None:
        raise InputError(_no_room(width_E, ranks, slack, "longest processing time first finds no placement"))
    return Placement("balanced", ranks, width_E, found)


def exact(
    tokens: ArrayLike,
    widths: Sequence[int],
    per_group: int,
    ranks: int,
    *,
    slack: float = SLACK,
    time_limit_s: float = TIME_LIMIT_S,
) -> Placement:
    """The smallest largest load there is within the cap: a mixed-integer program, solved by HiGHS.

    Minimise t with Σ_r x_er = 1, Σ_e load_e·x_er ≤ t, Σ_e W_e·x_er ≤ (1 + slack)·ΣW/R, x binary. SciPy's interface
    takes no first solution, so `balanced` under the same cap bounds t from above and is what is returned where nothing
    better is found in time: the result is never worse. A search that ends by the clock depends on the machine.

    Args, Raises: as `balanced`, but an InputError for want of room only where HiGHS finds no placement either.
    """
    width_E = _widths(widths, per_group, ranks)
    tokens_E = _tokens(tokens, width_E)
    cap = _cap(width_E, ranks, slack)
    load_E = tokens_E * np.array(width_E)
    # No placement is below an even share, nor below the heaviest expert.
    floor = max(-(-int(load_E.sum()) // ranks), int(load_E.max()))
    start = _longest_first(tokens_E, width_E, [1] * len(width_E), ranks, cap)
    best = Placement("exact", ranks, width_E, start) if start else None
    largest = _largest(best, tokens_E) if best else None
    if best and largest == floor:
        return replace(best, gap=0.0)
    found = solve(load_E, np.array(width_E), ranks, cap, at_most=largest, time_limit_s=time_limit_s)
    if found.rank_E is not None:
        solved = Placement("exact", ranks, width_E, _single(found.rank_E.tolist()))
        if largest is None or _largest(solved, tokens_E) < largest:
            best, largest = solved, _largest(solved, tokens_E)
    if best is None or largest is None:
        how = "there is no placement" if found.proven else f"none was found in {time_limit_s:g} s"
        raise InputError(_no_room(width_E, ranks, slack, how))
    if found.proven or largest == floor:
        return replace(best, gap=0.0)
    gap = 1 - max(found.bound, floor) / largest
    return replace(
        best, gap=gap, note=f"not proven best: HiGHS stopped after {time_limit_s:g} s, {gap:.2%} above its bound"
    )


def replicated(
    tokens: ArrayLike,
    widths: Sequence[int],
    per_group: int,
    ranks: int,
    *,
    slack: float = SLACK,
    extra: int = EXTRA_COPIES,
) -> Placement:
    """Hot experts on several ranks, a token going to one of them in turn: `balanced`, copies added one by one.

    A copy more goes to the expert whose copies carry most each; all are then placed anew, longest first, those of one
    expert on different ranks. Of 0 to `extra` copies the number with the smallest largest load is kept, the fewest of
    equals, so the result is never worse than `balanced`.

    Args:
        tokens, widths, per_group, ranks: as `balanced`.
        slack: as `balanced`; copies count, and the mean is that of one copy of each expert.
        extra: most copies to add.

    Raises:
        InputError: as `balanced`.
    """
    best = replace(balanced(tokens, widths, per_group, ranks, slack=slack), name="replicated")
    tokens_E, width_E = _tokens(tokens, best.widths), best.widths
    cap = _cap(width_E, ranks, slack)
    count = [1] * len(width_E)
    for _ in range(extra):
        can_grow = [e for e in range(len(count)) if count[e] < ranks]
        if not can_grow:
            break
        count[max(can_grow, key=lambda e: (tokens_E[e] * width_E[e] / count[e], -e))] += 1
        found = _longest_first(tokens_E, width_E, count, ranks, cap)
        if found is None:
            continue
        tried = replace(best, where=found)
        if _largest(tried, tokens_E) < _largest(best, tokens_E):
            best = tried
    several = sum(len(held) > 1 for held in best.where)
    added = sum(len(held) - 1 for held in best.where)
    return replace(best, note=f"{several} experts on several ranks, {added} copies added" if added else "no copy helps")


#: Placements that follow from the shape alone, and those that follow from measured tokens, by the names specs use.
BY_SHAPE: dict[str, Callable[[Sequence[int], int, int], Placement]] = {
    "contiguous": contiguous,
    "all_size": all_size,
    "interleaved": interleaved,
}
BY_LOAD: dict[str, Callable[[ArrayLike, Sequence[int], int, int], Placement]] = {
    "balanced": balanced,
    "exact": exact,
    "replicated": replicated,
}


def _widths(widths: Sequence[int], per_group: int, ranks: int) -> tuple[int, ...]:
    if not widths or min(widths) < 1 or per_group < 1 or ranks < 1:
        raise InputError(
            f"widths ({list(widths)}), experts a group ({per_group}) and ranks ({ranks}) must each be 1 or more"
        )
    if len(widths) * per_group < ranks:
        raise InputError(f"experts ({len(widths)} groups × {per_group}) must be no fewer than ranks ({ranks})")
    return tuple(int(width) for width in widths for _ in range(per_group))


def _tokens(tokens: ArrayLike, width_E: Sequence[int]) -> Ints:
    counts = np.asarray(tokens)
    if counts.shape != (len(width_E),) or not np.issubdtype(counts.dtype, np.integer) or counts.min() < 0:
        raise InputError(
            f"tokens must be one whole number of 0 or more for each of {len(width_E)} experts: got {counts.dtype} of "
            f"shape {counts.shape}, {counts.min() if counts.size else 'none'} at the least"
        )
    return counts.astype(np.int64)


def _cap(width_E: Sequence[int], ranks: int, slack: float) -> int:
    """Most width a rank may hold. Widths are whole numbers, so the bytes' cap is this one, rounded down."""
    if not 0 <= slack < math.inf:
        raise InputError(f"slack ({slack}) must be 0 or more: a rank cannot hold less than the mean everywhere")
    # 1e-9: (1 + 0.1)·mean is a hair below the whole number it should be, now and then.
    return math.floor((1 + slack) * sum(width_E) / ranks + 1e-9)


def _no_room(width_E: Sequence[int], ranks: int, slack: float, how: str) -> str:
    mean, cap = sum(width_E) / ranks, _cap(width_E, ranks, slack)
    return (
        f"{how} where the widths on each of {ranks} ranks add up to at most {cap} (mean {mean:g}, slack {slack:g}); "
        f"the widest of {len(width_E)} experts is {max(width_E)}. Raise the slack"
    )


def _single(ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in ranks)


def _consecutive(name: str, width_E: tuple[int, ...], order: Sequence[int], ranks: int) -> Placement:
    """Experts in `order`, cut into `ranks` runs; the first runs are one longer where it does not come out even."""
    rank_E = np.empty(len(width_E), np.int64)
    for rank, run in enumerate(np.array_split(np.asarray(order), ranks)):
        rank_E[run] = rank
    fewest, more = divmod(len(width_E), ranks)
    note = f"uneven: {ranks} ranks do not divide {len(width_E)} experts: {more} hold {fewest + 1}, the others {fewest}"
    return Placement(name, ranks, width_E, _single(rank_E.tolist()), note if more else None)


def _largest(placement: Placement, tokens_E: Ints) -> int:
    return int(placement.loads(tokens_E).max())


def _longest_first(
    tokens_E: Ints, width_E: Sequence[int], count_E: Sequence[int], ranks: int, cap: int
) -> tuple[tuple[int, ...], ...] | None:
    """Ranks of each of `count_E` copies, within `cap`; None where none of three orders leaves room for all."""
    each = [-(-int(n) // c) * w for n, w, c in zip(tokens_E, width_E, count_E, strict=True)]
    copies = [e for e, c in enumerate(count_E) for _ in range(c)]
    by_load = sorted(copies, key=lambda e: (-each[e], e))
    by_width = sorted(copies, key=lambda e: (-width_E[e], -each[e], e))
    for order, width_decides in ((by_load, False), (by_width, False), (by_width, True)):
        load, width = [0] * ranks, [0] * ranks
        where: list[list[int]] = [[] for _ in count_E]
        for e in order:
            room = [r for r in range(ranks) if width[r] + width_E[e] <= cap and r not in where[e]]
            if not room:
                break
            if width_decides:
                rank = min(room, key=lambda r: (width[r], load[r], r))
            else:
                rank = min(room, key=lambda r: (load[r], width[r], r))
            where[e].append(rank)
            load[rank] += each[e]
            width[rank] += width_E[e]
        else:
            return tuple(tuple(sorted(held)) for held in where)
    return None
