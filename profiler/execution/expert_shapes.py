"""Shapes of a layer of experts: how many, how wide, and the sizes that were published (METHODS §3).

Not here: what a layer of a shape costs (`expert_costs`), and which shape an arm asks for (methods).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from profiler.execution.heterogeneous_router import Rule


class Size(NamedTuple):
    """A published size; groups, K_e and shared experts are the same in all (`GROUPS` …).

    `standard` is the width of the standard MoE's experts, and of a shared one.
    """

    per_group: int
    keep_groups: int
    widths: tuple[int, ...]
    standard: int
    alpha_group: float
    alpha_expert: float


_3B = (384, 512, 640, 768, 896, 1024, 1152, 1280)
SIZES = {
    "1B": Size(4, 3, (256, 320, 384, 512, 640, 768, 832, 896), 832, 1e-4, 2.5e-3),
    "3B": Size(8, 3, _3B, 1024, 1e-4, 2.5e-3),
    "14B": Size(16, 3, (640, 768, 896, 1024, 1152, 1280, 1408, 1536), 1280, 1e-4, 2.5e-3),
    # As released: the 3B with other settings than the paper's.
    "A3B": Size(8, 4, _3B, 1024, 1e-5, 5e-3),
}
GROUPS, KEEP_EXPERTS, SHARED = 8, 6, 2


@dataclass(frozen=True)
class Design:
    """A layer's block with nothing left open.

    `widths` has an entry an expert, in the router's order; `shared_width` is of all shared experts together. Layers
    before `first_dense` have no experts.
    """

    rule: Rule
    widths: tuple[int, ...]
    shared_width: int
    first_dense: int

    def name(self, expert: int) -> str:
        """Of a routed expert, as tables have it."""
        return "g{}e{}".format(*divmod(expert, self.rule.per_group))

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        own = {"widths": list(self.widths), "shared_width": self.shared_width, "first_dense": self.first_dense}
        return {**asdict(self.rule), **own}


def widths_of_experts(widths: Sequence[int], groups: int, per_group: int) -> tuple[int, ...]:
    """One width an expert, from one for all, one a group, or one an expert."""
    if len(widths) == groups * per_group:
        return tuple(widths)
    of_groups = widths if len(widths) == groups else list(widths) * groups
    return tuple(width for width in of_groups for _ in range(per_group))


def check_widths(widths: Sequence[int], groups: int, per_group: int, *, symmetric: bool) -> None:
    """Check that widths fit the groups, and the claim that W_i + W_{n+1−i} is the same for every i.

    Raises:
        ValueError: they do not.
    """
    experts = groups * per_group
    if len(widths) not in {1, groups} | ({experts} if groups == 1 else set()):
        per_expert = f", or one an expert ({experts})" if groups == 1 else ""
        raise ValueError(f"widths must be one for all, or one a group ({groups}){per_expert}; {len(widths)} are given")
    sums = [a + b for a, b in zip(widths, reversed(widths), strict=True)]
    if symmetric and len(set(sums)) > 1:
        apart = next(i for i, total in enumerate(sums) if total != sums[0])
        raise ValueError(
            f"symmetric widths need the same sum of every pair, and {widths[0]} + {widths[-1]} = {sums[0]} while "
            f"{widths[apart]} + {widths[-1 - apart]} = {sums[apart]}"
        )


def ramp(mean: int, groups: int) -> list[int]:
    """Widths of `groups` groups, evenly from half the mean to one and a half times it; symmetric around it (ours).

    Multiples of 8 where the mean is 64 at least; `mean` is rounded down to one.
    """
    unit = 8 if mean >= 64 else 1
    middle = mean // unit * unit
    if groups == 1:
        return [middle]
    below = [round(mean / 2 * (groups - 1 - 2 * g) / (groups - 1) / unit) * unit for g in range(groups // 2)]
    centre = [middle] if groups % 2 else []
    return [*(middle - step for step in below), *centre, *(middle + step for step in reversed(below))]
