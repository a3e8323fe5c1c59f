"""Which layers each input skipped, as a matrix: what the diagnostics are made of.

Read from recorded gates with no knowledge of the method. A decision *skips* where nothing it chose holds parameters of
the backbone, and a (layer, site) is a column if some choice there does and another does not. The unit is the input (a
request): a token-level method has the share of the input's rows that skipped. Experts that stand in for a layer's FFN
take every token and leave nothing out, so their site is none (`expert_shares` has their decisions).

Legend: R inputs, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.experts import SITE as EXPERTS
from profiler.errors import InputError
from profiler.records import QUALITY_CELLS, ArmRecord
from profiler.store import Run

#: The cell of held-out inputs, whose gates saw the prompt only.
HELD_OUT = QUALITY_CELLS["prefix"]


@dataclass(frozen=True)
class Skips:
    """Decisions of one arm about R inputs.

    Attributes:
        columns: the C (layer, site) at which something can be skipped.
        share: `[R, C]`, share of the input's token rows that skipped; 0 or 1 where a whole sequence decides.
        domains, tokens, mean_token_rank: of the inputs, None or NaN where the run does not say.
        incomplete: inputs left out because some column has no decision (a killed run).
    """

    arm: str
    cell: str
    requests: list[str]
    columns: list[tuple[int, str]]
    share: NDArray[np.float64]
    domains: list[str | None]
    tokens: NDArray[np.float64]
    mean_token_rank: NDArray[np.float64]
    incomplete: int

    @property
    def skipped(self) -> NDArray[np.bool_]:
        """`[R, C]`: whether most of the input's token rows skipped."""
        return np.asarray(self.share > 0.5)


def skips(run: Run, arm: str, cell: str = HELD_OUT, phase: str | None = None) -> Skips:
    """Decisions of one arm in one cell, in the order of its prompts; without inputs where none was recorded.

    Raises:
        InputError: the run has no such arm.
    """
    names = [record.name for record in run.manifest.arms]
    if arm not in names:
        raise InputError(f"run {run.manifest.name!r} has no arm {arm!r}; it has {', '.join(names) or 'none'}")
    skipping = skipping_choices(run.manifest.arm(arm))
    columns = sorted({(layer, site) for layer, site, _ in skipping})
    gates = rows_of(run.table("gates"), arm=arm, cell=cell, phase=phase)
    found = gates.aggregate("request, layer, site, choices, sum(rows)::bigint as rows").fetchall()
    prompts = rows_of(run.table("prompts"), cell=cell).df().drop_duplicates("request").set_index("request")
    decided = {request for request, *_ in found}
    order = [*(name for name in prompts.index if name in decided), *sorted(decided - set(prompts.index))]
    row_of, column_of = ({key: place for place, key in enumerate(keys)} for keys in (order, columns))
    rows, skipped = np.zeros((2, len(order), len(columns)))
    for request, layer, site, chosen, count in found:
        if (layer, site) in column_of:
            at = row_of[request], column_of[layer, site]
            rows[at] += count
            skipped[at] += count * all(skipping[layer, site, index] for index in chosen)
    whole = np.asarray((rows > 0).all(axis=1) & bool(columns))
    share = skipped[whole] / rows[whole]
    requests = [str(name) for name, kept in zip(order, whole, strict=True) if kept]
    about = prompts.reindex(index=requests, columns=["domain", "tokens", "mean_token_rank"])
    return Skips(
        arm=arm,
        cell=cell,
        requests=requests,
        columns=columns,
        share=share,
        domains=[None if pd.isna(domain) else str(domain) for domain in about["domain"]],
        tokens=about["tokens"].to_numpy(np.float64, na_value=np.nan),
        mean_token_rank=about["mean_token_rank"].to_numpy(np.float64, na_value=np.nan),
        incomplete=int((~whole).sum()) if columns else 0,
    )


def skipping_choices(arm: ArmRecord) -> dict[tuple[int, str, int], bool]:
    """(layer, site, choice) → whether it leaves the backbone's part out, for sites at which that is a choice."""
    costs: dict[tuple[int, str], dict[int, int]] = {}
    for choice in arm.choices:
        if choice.site != EXPERTS:
            costs.setdefault((choice.layer, choice.site), {})[choice.index] = choice.backbone_parameters
    return {
        (*place, index): not parameters
        for place, of_choice in costs.items()
        if any(of_choice.values()) and not all(of_choice.values())
        for index, parameters in of_choice.items()
    }


def rows_of(table: duckdb.DuckDBPyRelation, **wanted: str | None) -> duckdb.DuckDBPyRelation:
    """Rows of a table with these values in these columns; a column whose value is None is not asked about."""
    for column, value in wanted.items():
        if value is not None:
            table = table.filter(duckdb.ColumnExpression(column) == duckdb.ConstantExpression(value))
    return table


def deciding_arms(run: Run) -> list[str]:
    """Arms that can skip something."""
    return [arm.name for arm in run.manifest.arms if skipping_choices(arm)]
