"""One arm's tokens on their way through depth, as matrices: what the tables of trajectories are made of.

For every token of one cell and each routed layer: whether the backbone's part ran, the gate, and the method's recorded
signals; for every token what its blocks cost, and where a continuation was scored, how it fared. Read from recorded
rows with no knowledge of the method. Only arms that decide for each token have such paths.

What is made of them is in `trajectories` and `trajectory_tests`.

Legend: N tokens, J routed layers (depths), R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import duckdb
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.skips import HELD_OUT, rows_of, skipping_choices
from profiler.records import ArmRecord, signals_table
from profiler.store import Run

Floats = NDArray[np.float64]

#: The gate among the signals.
GATE = "gate"


@dataclass(frozen=True)
class TokenPaths:
    """Tokens of one arm in one cell, request by request and in order of position.

    Attributes:
        layers: the J routed layers, ascending.
        signals: name → `[N, J]`, `GATE` first; NaN where a method did not compute one. Only names with any value.
        ran: `[N, J]`, 1 where the backbone's part ran.
        requests, domains: the R requests and their domains, None where the run does not say.
        owner: `[N]`, index of the token's request.
        position: `[N]`, in its request.
        occurrences: `[N]`, how often the token is in all held-out inputs of the run; NaN where that is not recorded.
        flops: `[N]`, what its blocks cost, with routers and replacements; head and embedding left out.
        full_flops: `[N]`, what they would cost with every backbone part and nothing added.
        nll, hit: `[N]`, of the token that this one predicts, NaN where none was scored.
        reference: `[N]`, whether that token belongs to a reference.
        incomplete: tokens left out because some layer's decision is not recorded.
    """

    arm: str
    cell: str
    layers: list[int]
    signals: dict[str, Floats]
    ran: Floats
    requests: list[str]
    domains: list[str | None]
    owner: NDArray[np.intp]
    position: NDArray[np.int64]
    occurrences: Floats
    flops: Floats
    full_flops: Floats
    nll: Floats
    hit: Floats
    reference: NDArray[np.bool_]
    incomplete: int

    def __len__(self) -> int:
        return len(self.owner)

    @cached_property
    def share(self) -> Floats:
        """`[N]`: Σ_j [the backbone's part ran] ÷ J."""
        return np.asarray(self.ran.mean(axis=1))

    @cached_property
    def means(self) -> dict[str, Floats]:
        """Name → `[N]`: mean over depth of each signal that is known at some depth."""
        return {name: _known_mean(values) for name, values in self.signals.items()}


def _known_mean(values: Floats) -> Floats:
    known = ~np.isnan(values)
    sums, n = np.where(known, values, 0.0).sum(axis=1), known.sum(axis=1)
    return np.asarray(np.divide(sums, n, out=np.full(len(n), np.nan), where=n > 0))


def token_arms(run: Run) -> list[str]:
    """Arms that decide for each token whether the backbone's part runs."""
    return [arm.name for arm in run.manifest.arms if arm.by_token and skipping_choices(arm)]


def cells_with_paths(run: Run, arm: str) -> list[str]:
    """Cells in which an arm's decisions about tokens were recorded: the held-out one first, then in the run's order."""
    gates = rows_of(run.table("gates"), arm=arm).filter("position >= 0")
    found = {str(cell) for (cell,) in gates.project("cell").distinct().fetchall()}
    order = [HELD_OUT, *(cell.name for cell in run.manifest.cells)]
    return [*(cell for cell in order if cell in found), *sorted(found - set(order))]


def token_paths(run: Run, arm: str, cell: str = HELD_OUT) -> TokenPaths:
    """The tokens of one arm in one cell; without any where nothing was recorded.

    A decision that several steps record (a cell whose steps are given the whole sequence again) counts once, as the
    first of them has it.
    """
    record = run.manifest.arm(arm)
    layers = sorted({layer for layer, _, _ in skipping_choices(record)})
    decided = _decided(run, record, cell)
    sizes = decided.groupby(["request", "position"])["layer"].count()
    whole = sizes[sizes == len(layers)].index.to_frame(index=False)
    about = rows_of(run.table("prompts"), cell=cell).df().drop_duplicates("request").set_index("request")
    named = set(whole["request"])
    requests = [*(str(r) for r in about.index if r in named), *sorted(named - set(about.index))]
    place = {request: k for k, request in enumerate(requests)}
    tokens = whole.assign(owner=whole["request"].map(place)).sort_values(["owner", "position"], ignore_index=True)

    row_of = {key: k for k, key in enumerate(zip(tokens["request"], tokens["position"], strict=True))}
    rows = np.array([row_of.get(key, -1) for key in zip(decided["request"], decided["position"], strict=True)], np.intp)
    columns = np.searchsorted(layers, decided["layer"].to_numpy(np.int64))

    def matrix(name: str) -> Floats:
        found = np.full((len(tokens), len(layers)), np.nan)
        found[rows[rows >= 0], columns[rows >= 0]] = decided[name].to_numpy(np.float64)[rows >= 0]
        return found

    signals = {name: matrix(name) for name in (GATE, *record.signals)}
    position = tokens["position"].to_numpy(np.int64)
    context = position + 1.0
    always, full = _always(record)
    scores = _beside(tokens, rows_of(run.table("token_scores"), arm=arm, cell=cell), ["nll", "hit", "reference"])
    spread = _beside(tokens, rows_of(run.table("tokens"), cell=cell), ["occurrences"])
    domains = about["domain"].reindex(requests)
    return TokenPaths(
        arm=arm,
        cell=cell,
        layers=layers,
        signals={name: values for name, values in signals.items() if not np.isnan(values).all()},
        ran=matrix("ran"),
        requests=requests,
        domains=[None if pd.isna(domain) else str(domain) for domain in domains],
        owner=tokens["owner"].to_numpy(np.intp),
        position=position,
        occurrences=spread[:, 0],
        flops=matrix("flops").sum(axis=1) + always[0] + always[1] * context,
        full_flops=full[0] + full[1] * context,
        nll=scores[:, 0],
        hit=scores[:, 1],
        reference=scores[:, 2] == 1,
        incomplete=len(sizes) - len(tokens),
    )


def _decided(run: Run, record: ArmRecord, cell: str) -> pd.DataFrame:
    """One row a token and routed layer: request, position, layer, ran, flops, gate and the signals."""
    idle = skipping_choices(record)
    costs = {(c.layer, c.site, c.index): c for c in record.choices}
    gates = rows_of(run.table("gates"), arm=record.name, cell=cell).filter("position >= 0")
    found = gates.project("step, request, position, layer, site, choices[1] as choice, gate").df()
    key = ["request", "position", "layer", "site"]
    found = found.sort_values("step", kind="stable").drop_duplicates(key)
    sites = {(layer, site) for layer, site, _ in idle}
    routed = [place in sites for place in zip(found["layer"], found["site"], strict=True)]
    found = found.loc[np.array(routed, bool)]
    chosen = [costs[place] for place in zip(found["layer"], found["site"], found["choice"], strict=True)]
    found = found.assign(
        ran=[1.0 - idle[c.layer, c.site, c.index] for c in chosen],
        flops=[float(c.flops_per_row) for c in chosen]
        + (found["position"] + 1) * [float(c.flops_per_context) for c in chosen],
    )
    table = signals_table(record.method)
    if record.signals and table in run.tables():
        signals = rows_of(run.table(table), arm=record.name, cell=cell).df()[[*key, "step", *record.signals]]
        found = found.merge(signals, on=[*key, "step"], how="left")
    else:
        found = found.assign(**dict.fromkeys(record.signals, np.nan))
    kept: pd.DataFrame = found.drop(columns=["step", "site", "choice"]).drop_duplicates(
        ["request", "position", "layer"]
    )
    return kept


def _always(record: ArmRecord) -> tuple[tuple[int, int], tuple[int, int]]:
    """(FLOPs a row, FLOPs a row and attended position) of the blocks: of what always runs, of the whole backbone."""
    sites: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for choice in record.choices:
        if choice.layer >= 0:
            costs = choice.backbone_parameters, choice.flops_per_row, choice.flops_per_context
            sites.setdefault((choice.layer, choice.site), []).append(costs)
    single = [costs[0] for costs in sites.values() if len(costs) == 1]
    fullest = [max(costs) for costs in sites.values()]
    backbone = [costs for costs in fullest if costs[0]]
    return _summed(single), _summed(backbone)


def _summed(costs: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    return sum(row for _, row, _ in costs), sum(context for _, _, context in costs)


def _beside(tokens: pd.DataFrame, table: duckdb.DuckDBPyRelation, columns: list[str]) -> Floats:
    """`[N, columns]` of a table that has at most one row a token; NaN where it has none."""
    found = table.df()[["request", "position", *columns]].drop_duplicates(["request", "position"])
    numbers = found.astype(dict.fromkeys(columns, "float64"))
    merged = tokens[["request", "position"]].merge(numbers, on=["request", "position"], how="left")
    return np.asarray(merged[columns], np.float64)
