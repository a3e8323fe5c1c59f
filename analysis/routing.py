"""What a router decided: one row a decision, shares per layer, and the grid of one arm in one cell.

Read from `gates` and `prompts` of the cells alone; nothing is known of any method. Whether the decisions were carried
out (rule 1) is checked when a run is made, and what they saved is in `ladder`. The methods' own signals, and what
decisions about held-out inputs show, are not here (`diagnostics`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.experts import SITE as EXPERTS
from analysis.latency import cells
from profiler.errors import InputError
from profiler.records import QUALITY_CELLS, Manifest
from profiler.store import Run

DECISION_COLUMNS = ("request", "domain", "position", "layer", "site", "choice", "gate", "rows", "steps")
SKIP_COLUMNS = (
    "arm", "cell", "phase", "layer", "site", "domain", "choice", "decisions", "decision_share", "rows", "row_share",
)  # fmt: skip
#: `domain` of the rows of `skip_by_layer` that are over all requests.
ALL_DOMAINS = "all"
#: `Heatmap.choice` where nothing was decided.
NO_DECISION = -1


def decisions(run: Run, arm: str, cell: str) -> pd.DataFrame:
    """Every decision of one arm in one cell.

    Returns:
        One row per decision, columns `DECISION_COLUMNS`, in order of first step, prompt, position, layer and site.
        `position` is −1 where the decision is about a whole sequence. Such a decision is recorded in each step it
        governs and is one row here: `steps` counts those steps and `rows` the token rows it governed in them.
        `choice` is the name in the manifest; several chosen at once are joined by `+`. `gate` and `domain` may be
        missing. Empty where nothing was decided.

    Raises:
        InputError: the run has no such arm or no such cell.
    """
    _check(run, arm, cell)
    found: pd.DataFrame = _once(run, arm, cell).df()
    found["choice"] = _names(run.manifest, found)
    found = _with_domains(run, found).sort_values(["first_step", "place", "request", "position", "layer", "site"])
    return found[list(DECISION_COLUMNS)].reset_index(drop=True)


def _check(run: Run, arm: str, cell: str) -> None:
    for kind, asked, names in (
        ("arm", arm, [a.name for a in run.manifest.arms]),
        ("cell", cell, [c.name for c in cells(run)]),
    ):
        if asked not in names:
            raise InputError(f"run {run.manifest.name!r} has no {kind} {asked!r}; it has {', '.join(names) or 'none'}")


def _once(run: Run, arm: str | None = None, cell: str | None = None) -> duckdb.DuckDBPyRelation:
    """Decisions of the cells, each once: a sequence's is recorded in every step it governs."""
    held_out = [duckdb.ConstantExpression(name) for name in QUALITY_CELLS.values()]
    gates = run.table("gates").filter(duckdb.ColumnExpression("cell").isnotin(*held_out))
    for column, value in (("arm", arm), ("cell", cell)):
        if value is not None:
            gates = gates.filter(duckdb.ColumnExpression(column) == duckdb.ConstantExpression(value))
    return gates.aggregate(
        "arm, cell, phase, request, position, layer, site, choices, gate, "
        "min(step) as first_step, count(distinct step) as steps, sum(rows)::bigint as rows"
    )


def _names(manifest: Manifest, found: pd.DataFrame) -> list[str]:
    """What was chosen in each row of `found` (columns arm, layer, site, choices), by its name in the manifest."""
    names = {(arm.name, c.layer, c.site, c.index): c.name for arm in manifest.arms for c in arm.choices}
    rows = zip(found["arm"], found["layer"], found["site"], found["choices"], strict=True)
    return ["+".join(names[(arm, layer, site, int(i))] for i in chosen) for arm, layer, site, chosen in rows]


def _with_domains(run: Run, found: pd.DataFrame) -> pd.DataFrame:
    """`found` with the domain of each request, and `place`, the request's place in the cell's prompts."""
    prompts = run.frame("prompts")[["cell", "request", "domain"]].drop_duplicates(["cell", "request"])
    return found.merge(prompts.assign(place=range(len(prompts))), on=["cell", "request"], how="left")


def skip_by_layer(run: Run) -> pd.DataFrame:
    """How often each choice was made, by arm, cell, layer and site, over all requests and per domain.

    Returns:
        Columns `SKIP_COLUMNS`. `decisions` counts decisions (a sequence's once, however many steps it governed) and
        `rows` the token rows they governed; the shares are of all decisions and rows at that site, so they add up to
        1 over the choices of a site. Every choice in the manifest has a row, never made or not. `domain` is `all`,
        or one domain where prompts have any. Where a decision takes experts there are no rows: `expert_shares`.
    """
    manifest = run.manifest
    found: pd.DataFrame = (
        _once(run)
        .filter(duckdb.ColumnExpression("site") != duckdb.ConstantExpression(EXPERTS))
        .aggregate("arm, cell, phase, request, layer, site, choices, count(*) as decisions, sum(rows)::bigint as rows")
        .df()
    )
    found["choice"] = _names(manifest, found)
    found = _with_domains(run, found)
    both = pd.concat([found.assign(domain=ALL_DOMAINS), found[found["domain"].notna()]], ignore_index=True)
    site = ["cell", "arm", "phase", "layer", "site", "domain"]
    counted = both.groupby([*site, "choice"], as_index=False)[["decisions", "rows"]].sum()
    made: dict[tuple[Any, ...], dict[str, tuple[int, int]]] = {}
    for line in counted.itertuples(index=False, name=None):
        made.setdefault(line[:-3], {})[line[-3]] = line[-2:]

    cell_order, arm_order = [cell.name for cell in cells(run)], [arm.name for arm in manifest.arms]
    offered = {arm: _offered(manifest, arm) for arm in arm_order}

    def place(group: tuple[Any, ...]) -> tuple[Any, ...]:
        cell, arm, *where, domain = group
        return cell_order.index(cell), arm_order.index(arm), *where, domain != ALL_DOMAINS, domain

    groups = sorted(made, key=place)
    lines = []
    for group in groups:
        names = dict.fromkeys([*offered[group[1]][group[3:5]], *made[group]])
        counts = [(name, *made[group].get(name, (0, 0))) for name in names]
        all_decisions, all_rows = sum(n for _, n, _ in counts), sum(rows for *_, rows in counts)
        lines += [
            {
                **dict(zip(site, group, strict=True)),
                "choice": name,
                "decisions": count,
                "decision_share": count / all_decisions,
                "rows": rows,
                "row_share": rows / all_rows if all_rows else float("nan"),
            }
            for name, count, rows in counts
        ]
    return pd.DataFrame(lines, columns=list(SKIP_COLUMNS))


def _offered(manifest: Manifest, arm: str) -> dict[tuple[int, str], list[str]]:
    """(layer, site) → names of its choices in the manifest's order."""
    found: dict[tuple[int, str], list[str]] = {}
    for choice in sorted(manifest.arm(arm).choices, key=lambda c: c.index):
        found.setdefault((choice.layer, choice.site), []).append(choice.name)
    return found


@dataclass(frozen=True)
class Heatmap:
    """Decisions of one arm in one cell as a grid: R rows (requests, or positions of one request) × C columns.

    Attributes:
        scope: `sequence` (a row is a request), `token` (a row is a position of `request`) or `none` (no decisions).
        request: the request shown, token scope only; `requests`: every request that has decisions, to choose from.
        row_labels, row_domains: R each; the domain is None where it is not known.
        column_labels: C; the layer, and the site where a layer has several.
        choice_names: names that `choice` indexes, in the manifest's order.
        choice: `[R, C]`, `NO_DECISION` where there is none.
        gate: `[R, C]`, NaN where a decision has no gate value.
        texts: R, the prompts, sequence scope only; None where text was withheld.
        prompt: the request's text, token scope only; None where text was withheld.
        note: what the reader must know: no decisions, text withheld, or a request that decided more than once.
    """

    arm: str
    cell: str
    scope: str
    request: str | None
    requests: list[str]
    row_labels: list[str]
    row_domains: list[str | None]
    column_labels: list[str]
    choice_names: list[str]
    choice: NDArray[np.int16]
    gate: NDArray[np.float64]
    texts: list[str] | None
    prompt: str | None
    note: str


def heatmap(run: Run, arm: str, cell: str, request: str | None = None) -> Heatmap:
    """The grid of one arm in one cell; where a request decided more than once (a session), its first decision.

    Args:
        request: which one to show by token; the first if None. Sequence scope shows all and takes None only.

    Raises:
        InputError: the run has no such arm or cell, or the arm no decisions of such a request.
    """
    found = decisions(run, arm, cell)
    requests = list(dict.fromkeys(found["request"]))
    by_token = bool((found["position"] >= 0).any())
    if request is not None and request not in requests:
        raise InputError(f"arm {arm!r} decided nothing for request {request!r} in {cell}; it has {', '.join(requests)}")
    notes = [] if requests else ["no decisions were recorded here"]
    shown = request if request is not None else requests[0] if by_token else None
    if shown is not None:
        found = found[found["request"] == shown]
    row = "position" if by_token else "request"
    once = found.drop_duplicates([row, "layer", "site"])
    if len(once) < len(found):
        notes.append("requests decided more than once here; the first decision of each is shown")

    rows = sorted(once[row].unique()) if by_token else list(dict.fromkeys(once[row]))
    columns = sorted(set(zip(once["layer"], once["site"], strict=True)))
    row_of, column_of = ({key: place for place, key in enumerate(keys)} for keys in (rows, columns))
    names = _choice_names(run.manifest, arm, once)
    choice = np.full((len(rows), len(columns)), NO_DECISION, dtype=np.int16)
    gate = np.full(choice.shape, np.nan)
    for key, layer, site, chosen, value in zip(
        once[row], once["layer"], once["site"], once["choice"], once["gate"], strict=True
    ):
        at = row_of[key], column_of[(layer, site)]
        choice[at], gate[at] = names.index(chosen), value

    domains = dict(zip(found["request"], found["domain"], strict=True))
    texts = _texts(run, cell)
    owners = [str(shown) if by_token else str(key) for key in rows]
    if requests and not all(owner in texts for owner in owners):
        notes.append("the text of the prompts was not kept" if run.manifest.keeps_text else "text withheld by the spec")
    complete = bool(owners) and all(owner in texts for owner in owners)
    several_sites = len({site for _, site in columns}) > 1
    return Heatmap(
        arm=arm,
        cell=cell,
        scope="token" if by_token else "sequence" if requests else "none",
        request=shown,
        requests=requests,
        row_labels=[str(key) for key in rows],
        row_domains=[None if pd.isna(domains[owner]) else str(domains[owner]) for owner in owners],
        column_labels=[f"{layer} {site}" if several_sites else str(layer) for layer, site in columns],
        choice_names=names,
        choice=choice,
        gate=gate,
        texts=[texts[owner] for owner in owners] if complete and not by_token else None,
        prompt=texts.get(str(shown)) if by_token else None,
        note="; ".join(notes),
    )


def _choice_names(manifest: Manifest, arm: str, found: pd.DataFrame) -> list[str]:
    """Names of the choices at the sites that decided, in the manifest's order, then joined ones as they come."""
    offered = _offered(manifest, arm)
    sites = dict.fromkeys(zip(found["layer"], found["site"], strict=True))
    return list(dict.fromkeys([*(name for site in sites for name in offered[site]), *found["choice"]]))


def _texts(run: Run, cell: str) -> dict[str, str]:
    prompts = run.frame("prompts")
    kept = prompts[(prompts["cell"] == cell) & prompts["text"].notna()]
    return dict(zip(kept["request"], kept["text"], strict=True))
