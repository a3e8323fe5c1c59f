"""Which experts an arm can choose in which layer, by name, group and width: from the manifest alone.

A decision at the site `experts` takes several choices, none of which leaves anything out, so it is no skip.

Not here: how often experts were chosen (`expert_shares`), and on which ranks they are (`balance_reading`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from profiler.records import ArmRecord, Choice

#: The site at which a decision takes experts.
SITE = "experts"
#: Names of experts that are in groups: `g1e3` is the one numbered 3 of group 1.
_GROUPED = re.compile(r"g(\d+)e\d+")


@dataclass(frozen=True)
class Expert:
    """One routed expert of a layer. `index`: its number among the choices; `width` is None where it cannot be told."""

    index: int
    name: str
    group: int
    width: int | None


def experts_of(arm: ArmRecord, hidden: int | None) -> dict[int, list[Expert]]:
    """Layer → its routed experts, in the order of their numbers; empty where the arm has none.

    A backbone's FFN that experts stand in for is listed among the choices and is none of them.

    Args:
        arm: as the manifest has it.
        hidden: d of the model, with which 3·d·width parameters say how wide a SwiGLU expert is.
    """
    layers: dict[int, list[Choice]] = {}
    for choice in arm.choices:
        if choice.site == SITE:
            layers.setdefault(choice.layer, []).append(choice)
    found = {}
    for layer, choices in sorted(layers.items()):
        instead = [choice for choice in choices if choice.replacement_parameters]
        routed = sorted(instead or choices, key=lambda choice: choice.index)
        # Past the experts there may be a choice that stands for all of them at once.
        if arm.parallel is not None and arm.parallel.widths_E:
            routed = routed[: len(arm.parallel.widths_E)]
        found[layer] = [Expert(c.index, c.name, _group(c.name), _width(c, hidden)) for c in routed]
    return found


def _group(name: str) -> int:
    named = _GROUPED.fullmatch(name)
    return int(named.group(1)) if named else 0


def _width(choice: Choice, hidden: int | None) -> int | None:
    parameters = choice.replacement_parameters or choice.backbone_parameters
    if not hidden or not parameters or parameters % (3 * hidden):
        return None
    return parameters // (3 * hidden)
