"""What an arm of a spec can save at full size, without weights: arithmetic on its choices' costs alone.

The model is only a skeleton, so this works for sizes that no machine at hand could load. Given is a share: of the pairs
(token, decision site) for a method that decides by token, or (sequence, decision site), how many take the cheapest
choice. What a trained router's share is, and what time it saves, only a run can say.

Not here: time, memory and disk of a run (`estimate`), and skips that were measured (`analysis.ladder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from profiler.records import Choice, MemoryRecord

if TYPE_CHECKING:
    from workloads.spec import Cell, Spec

SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ParameterSkip:
    """Parameters that take no part in a token ÷ total (MEASURES, "The ladder"), in the four variants.

    Attributes:
        gross: replacements are not counted.
        adapters_only: replacements that run count as taking part.
        net: routers, memory and LoRA too.
        augmented: what is idle of the added parts counts as skipped; ÷ backbone and added. The others ÷ backbone.
    """

    gross: float
    adapters_only: float
    net: float
    augmented: float


def _weighed(choices: Iterable[Choice], share: float) -> list[tuple[Choice, float]]:
    """Each choice that is taken, and how often: always, or `share` the cheapest of a site and the rest the fullest."""
    sites: dict[tuple[int, str], list[Choice]] = {}
    for choice in choices:
        sites.setdefault((choice.layer, choice.site), []).append(choice)
    found = []
    for options in sites.values():
        ordered = sorted(options, key=lambda c: (c.backbone_parameters, c.flops_per_row))
        found += [(ordered[0], share), (ordered[-1], 1 - share)] if len(ordered) > 1 else [(ordered[0], 1.0)]
    return found


def parameter_skip(choices: Iterable[Choice], share: float) -> ParameterSkip:
    """The skip when `share` (0 to 1) of all decisions take the cheapest choice of their site, the rest the fullest."""
    weighed = _weighed(choices, share)
    largest: dict[tuple[int, str], int] = {}
    for choice, _ in weighed:
        place = (choice.layer, choice.site)
        largest[place] = max(largest.get(place, 0), choice.backbone_parameters)
    backbone = sum(largest.values())
    skipped = backbone - sum(often * choice.backbone_parameters for choice, often in weighed)
    replacements = sum(often * choice.replacement_parameters for choice, often in weighed)
    overhead = sum(often * choice.overhead_parameters for choice, often in weighed)
    added = sum(choice.replacement_parameters + choice.overhead_parameters for choice, _ in weighed)
    return ParameterSkip(
        gross=skipped / backbone,
        adapters_only=(skipped - replacements) / backbone,
        net=(skipped - replacements - overhead) / backbone,
        augmented=(skipped + added - replacements - overhead) / (backbone + added),
    )


def share_of(choices: Sequence[Choice], gross: float) -> float:
    """The share of decisions that takes the cheapest choice when `gross` of the parameters are skipped.

    Above 1 where no share skips so much.
    """
    return gross / parameter_skip(choices, 1.0).gross


def flops(choices: Iterable[Choice], share: float, *, rows: int, context: int, sequences: int, pooled: bool) -> float:
    """FLOPs of one step in which each decision takes the cheapest choice with chance `share`.

    Args:
        choices: of the arm.
        share: see above.
        rows: token rows.
        context: Σ over them of the positions they attend.
        sequences: rows whose logits are computed, one each.
        pooled: routers see one row a sequence instead of every row.
    """
    total = 0.0
    for choice, often in _weighed(choices, share):
        entering = sequences if choice.site == "head" or (pooled and choice.site == "router") else rows
        total += often * (entering * choice.flops_per_row + context * choice.flops_per_context)
    return total


@dataclass(frozen=True)
class ArmPlan:
    """One arm at full size. Shares and skips are parts of 1; `flop_skip` is by cell, for each of `SHARES`.

    A method whose decisions take several choices each has no share of decisions that skip, and so neither figure.
    """

    arm: str
    method: str
    backbone_parameters: int
    replacement_parameters: int
    overhead_parameters: int
    parameter_skip: dict[float, ParameterSkip]
    flop_skip: dict[str, dict[float, float]]
    memory: MemoryRecord | None = None


def plan(spec: Spec) -> list[ArmPlan]:
    """Every arm of a spec. FLOP skips are against the dense model.

    Raises:
        SpecError: as `preflight.check`.
    """
    from profiler import checkpoints, methods, preflight
    from profiler.execution.stock_experts import model_choices

    skeleton = preflight.check(spec)
    dense = model_choices(skeleton)
    found = []
    for arm in spec.arms:
        options = checkpoints.resolve(arm.method, preflight.options_of(spec, arm), skeleton)
        method = methods.load(arm.method)
        config = methods.configure(arm.method, options, where=f"arms.{arm.name}.")
        choices, cached = method.choices(skeleton, config), method.caches(config)
        decides = any(choice.index for choice in choices) and not method.takes_several
        shares = SHARES if decides else ()
        pooled = method.scope == "sequence"
        found.append(
            ArmPlan(
                arm=arm.name,
                method=arm.method,
                backbone_parameters=sum(choice.backbone_parameters for choice in dense),
                replacement_parameters=sum(choice.replacement_parameters for choice in choices),
                overhead_parameters=sum(choice.overhead_parameters for choice in choices),
                parameter_skip={share: parameter_skip(choices, share) for share in shares},
                flop_skip={
                    cell.name: {
                        share: 1 - _of_cell(choices, share, cell, pooled, cached) / _of_cell(dense, 0.0, cell, False)
                        for share in shares
                    }
                    for cell in spec.cell_list()
                },
                memory=method.memory(skeleton, config),
            )
        )
    return found


def _of_cell(choices: Sequence[Choice], share: float, cell: Cell, pooled: bool, cached: bool = True) -> float:
    """FLOPs of one step of a cell; of a decode cell, the mean over its steps, logits of one row a sequence."""
    batch, length = cell.batch, cell.length
    if cell.phase == "prefill":
        rows, context = batch * length, batch * length * (length + 1) // 2
    elif not cached:  # each step is given all that is before it too
        given = range(length + 1, length + cell.new_tokens + 1)
        rows = batch * sum(given) // cell.new_tokens
        context = batch * sum(n * (n + 1) // 2 for n in given) // cell.new_tokens
    else:
        rows, context = batch, batch * (2 * length + cell.new_tokens + 1) // 2
    return flops(choices, share, rows=rows, context=context, sequences=batch, pooled=pooled)


def as_json(plans: list[ArmPlan]) -> dict[str, Any]:
    """Plain values."""
    return {"arms": [{**asdict(one), "memory": one.memory and one.memory.model_dump()} for one in plans]}


def lines(plans: list[ArmPlan]) -> list[str]:
    """For people."""
    found = []
    for one in plans:
        found.append(
            f"{one.arm} ({one.method}): backbone {one.backbone_parameters:,} parameters, replacements "
            f"{one.replacement_parameters:,}, router and other additions {one.overhead_parameters:,}"
        )
        if one.memory:
            form, held = one.memory.form, one.memory.bytes_per_row
            found.append(f"  memory during a forward, {form} form: at most {held:,} bytes a token row")
        for share, skip in one.parameter_skip.items():
            found.append(
                f"  {share:4.0%} of decisions skip: parameters gross {skip.gross:.2%}, adapters counted "
                f"{skip.adapters_only:.2%}, net {skip.net:.2%}, of all with additions {skip.augmented:.2%}"
            )
        for cell, skips in one.flop_skip.items():
            if skips:
                each = ", ".join(f"{value:.2%} at {share:.0%}" for share, value in skips.items())
                found.append(f"  FLOPs saved in {cell}: {each}")
    return found
