"""How often each expert was chosen, and each group of them: by arm, cell, layer and domain, from recorded decisions.

A token takes several experts, so shares are of all (token, expert) pairs of a layer and add up to 1 over its experts.
Held-out inputs are left out, as in `routing`.

Not here: decisions that leave something out (`routing`, `skips`), and what a rank carries for it (`balance_ranks`).
"""

from __future__ import annotations

from typing import Any

import duckdb
import pandas as pd

from analysis.experts import SITE, Expert, experts_of
from analysis.latency import cells
from analysis.routing import ALL_DOMAINS
from profiler.records import QUALITY_CELLS
from profiler.store import Run

SHARE_COLUMNS = (
    "arm", "cell", "phase", "layer", "domain", "expert", "name", "group", "width", "pairs", "share", "weight_share",
    "to_even",
)  # fmt: skip
GROUP_COLUMNS = (
    "arm", "cell", "phase", "layer", "domain", "group", "experts", "width", "pairs", "share", "even", "to_even",
)  # fmt: skip
#: `layer` of the rows of `group_shares` that are over all layers.
ALL_LAYERS = -1


def expert_shares(run: Run) -> pd.DataFrame:
    """How often each expert was chosen, over all requests and per domain.

    Returns:
        Columns `SHARE_COLUMNS`, in the order of cells, arms, layers and experts; one row an expert the manifest lists,
        chosen or not, of an arm, cell and layer where one of them was (none is where all run together, as one
        choice). `pairs`: (token, expert) pairs. `share`: of all pairs of the layer; `weight_share`: of all the
        weights given in it; `to_even`: `share` × experts of the layer, 1 where all are chosen alike. `domain` is
        `all`, or one domain where prompts have any. Empty where no arm chooses experts.
    """
    manifest = run.manifest
    hidden = manifest.model.hidden if manifest.model is not None else None
    offered = {arm.name: experts_of(arm, hidden) for arm in manifest.arms}
    counted = _counted(run)
    made: dict[tuple[Any, ...], dict[int, tuple[int, float]]] = {}
    for *place, expert, pairs, weight in counted.itertuples(index=False, name=None):
        made.setdefault(tuple(place), {})[expert] = (pairs, weight)
    cell_order, arm_order = [cell.name for cell in cells(run)], [arm.name for arm in manifest.arms]

    def order(group: tuple[Any, ...]) -> tuple[Any, ...]:
        cell, arm, phase, layer, domain = group
        return cell_order.index(cell), arm_order.index(arm), phase, layer, domain != ALL_DOMAINS, domain

    lines = []
    for group in sorted(made, key=order):
        cell, arm, phase, layer, domain = group
        experts: list[Expert] = offered[arm].get(layer, [])
        if not any(each.index in made[group] for each in experts):
            continue
        pairs, weight = (sum(column) for column in zip(*made[group].values(), strict=True))
        for each in experts:
            own = made[group].get(each.index, (0, 0.0))
            share = own[0] / pairs
            lines.append(
                {
                    "arm": arm, "cell": cell, "phase": phase, "layer": layer, "domain": domain, "expert": each.index,
                    "name": each.name, "group": each.group, "width": each.width, "pairs": own[0], "share": share,
                    "weight_share": own[1] / weight if weight else float("nan"), "to_even": share * len(experts),
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(SHARE_COLUMNS)).astype({"width": "Int64"})


def _counted(run: Run) -> pd.DataFrame:
    """Columns cell, arm, phase, layer, domain, expert, pairs, weight; of every domain, and of all together."""
    held_out = [duckdb.ConstantExpression(name) for name in QUALITY_CELLS.values()]
    gates = run.table("gates").filter(duckdb.ColumnExpression("site") == duckdb.ConstantExpression(SITE))
    taken: pd.DataFrame = (
        gates.filter(duckdb.ColumnExpression("cell").isnotin(*held_out))
        .project("cell, arm, phase, request, layer, rows, unnest(choices) as expert, unnest(weights) as weight")
        .aggregate(
            "cell, arm, phase, request, layer, expert, sum(rows)::bigint as pairs, sum(weight * rows)::double as weight"
        )
        .df()
    )
    prompts = run.frame("prompts")[["cell", "request", "domain"]].drop_duplicates(["cell", "request"])
    taken = taken.merge(prompts, on=["cell", "request"], how="left")
    both = pd.concat([taken.assign(domain=ALL_DOMAINS), taken[taken["domain"].notna()]], ignore_index=True)
    key = ["cell", "arm", "phase", "layer", "domain", "expert"]
    return both.groupby(key, as_index=False)[["pairs", "weight"]].sum()


def group_shares(shares: pd.DataFrame) -> pd.DataFrame:
    """`expert_shares` added up over the experts of each group: of all layers together (`ALL_LAYERS`), then of each.

    Returns:
        Columns `GROUP_COLUMNS`. `experts`: how many a layer's group has; `width`: theirs, <NA> where they differ;
        `even`: the part of the layer's experts that they are, which an even share is; `to_even`: `share` ÷ it.
    """
    if shares.empty:
        return pd.DataFrame(columns=list(GROUP_COLUMNS))
    place = ["arm", "cell", "phase", "domain"]
    both = pd.concat([shares.assign(layer=ALL_LAYERS), shares], ignore_index=True)
    grouped = both.groupby([*place, "layer", "group"], sort=False, as_index=False).agg(
        experts=("expert", "nunique"), least=("width", "min"), width=("width", "max"), pairs=("pairs", "sum")
    )
    of_layer = [*place, "layer"]
    grouped["share"] = grouped["pairs"] / grouped.groupby(of_layer)["pairs"].transform("sum")
    grouped["even"] = grouped["experts"] / grouped.groupby(of_layer)["experts"].transform("sum")
    grouped["to_even"] = grouped["share"] / grouped["even"]
    grouped["width"] = grouped["width"].where(grouped["least"] == grouped["width"])
    return grouped[list(GROUP_COLUMNS)]
