"""Everything said of the balance of one arm's experts, computed once, and its part of the report.

Selection, order and sentences only: the figures are `balance_ranks`' and `balance_judged`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from analysis import (
    balance,
    balance_charts,
    balance_judged,
    balance_ranks,
    balance_tables,
    document,
    wording,
)
from analysis.balance import ALL_LAYERS, BARRIER_ROOFLINE, IMBALANCE_RULE
from analysis.balance_judged import AS_RUN
from analysis.balance_reading import Layout, layouts
from analysis.charts import Look
from analysis.latency import SAMPLES_BEYOND
from analysis.tables import SMALL, Table
from profiler.records import QUALITY_CELLS
from profiler.store import Run

WAIT_RULE = (
    "A collective ends for nobody before it has ended for the slowest rank, so the shortest time any rank spent in it "
    "is the transfer, and what a rank spent beyond that is wait. Means a step; percentiles are of a rank's wait in one "
    "step."
)
LOCAL_RULE = (
    "Payload of both all-to-alls, all layers of a step together. In brackets, and apart from all sums of what was "
    "sent: tokens whose expert is on their own rank, which are copied and not sent. Bold: to a rank on another node."
)
WINDOW_RULE = (
    "Windows of recorded tokens, every layer by itself. Along an input: tokens that follow each other, as a piece of a "
    "prompt has them. Across inputs: tokens at one position of different inputs, as a decode step of that many "
    "sequences has them. A load that is even in the mean need not be even in any one step."
)


@dataclass(frozen=True)
class Balance:
    """Frames of the functions of `balance_ranks` and `balance_judged` that they are named after, of one arm."""

    arm: str
    layout: Layout
    sentence: str
    headlines: list[str]
    speeds: str
    ranks: pd.DataFrame
    times: pd.DataFrame
    links: pd.DataFrame
    traffic: pd.DataFrame
    widths: pd.DataFrame
    expert_loads: pd.DataFrame
    imbalances: pd.DataFrame
    compared: pd.DataFrame
    held: pd.DataFrame
    window_tails: pd.DataFrame

    @property
    def cells(self) -> list[str]:
        """Cells whose loads were recorded, in the run's order."""
        return list(dict.fromkeys(self.ranks["cell"]))

    def frames(self) -> dict[str, pd.DataFrame]:
        """Every frame by its name, as the JSON report has them."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, pd.DataFrame)}


def balances(run: Run) -> list[Balance]:
    """One an arm of which loads were recorded."""
    return [_balance(run, layout) for layout in layouts(run)]


def _balance(run: Run, layout: Layout) -> Balance:
    exchanged = balance_ranks.exchanges(run, layout)
    reached = balance_judged.reached(run, layout, exchanged)
    moved = balance_ranks.traffic(run, layout)
    imbalances = balance_judged.imbalances(run, layout)
    return Balance(
        arm=layout.arm,
        layout=layout,
        sentence=_sentence(layout),
        headlines=_headlines(layout, imbalances),
        speeds=f"{reached.sentence} Added is the rest of the step, as it was instrumented."
        if reached is not None
        else "The time of experts was not recorded, so none is predicted.",
        ranks=balance_ranks.ranks(run, layout),
        times=balance_ranks.times(run, layout, exchanged),
        links=balance_ranks.links(moved),
        traffic=moved,
        widths=balance_ranks.widths(run, layout),
        expert_loads=balance_ranks.expert_loads(run, layout),
        imbalances=imbalances,
        compared=balance_judged.compared(run, layout, exchanged, reached),
        held=balance_judged.held(layout),
        window_tails=balance_judged.window_tails(run, layout),
    )


def _sentence(layout: Layout) -> str:
    """What was there: experts, ranks, nodes, placement."""
    widths = sorted(set(layout.experts.widths))
    wide = f"width {widths[0]}" if len(widths) == 1 else f"widths {', '.join(str(width) for width in widths)}"
    experts, layers = (
        wording.how_many(len(of), noun) for of, noun in ((layout.experts.widths, "expert"), (layout.layers, "layer"))
    )
    what = f"{experts} of {wide} in each of {layers}"
    if layout.ran_on > 1:
        nodes = len(set(layout.nodes))
        on = f"on {wording.how_many(nodes, 'node')}, " if nodes else ""
        return (
            f"{what}, on {layout.ran_on} ranks {on}placed {layout.in_force}; attention "
            f"{layout.attention.replace('_', ' ')}."
        )
    if layout.placements.empty:
        return f"{what}, in a single process, and no placement on ranks was recorded to compare."
    return (
        f"{what}, in a single process: placements are judged as if its tokens had met {layout.experts.ranks} ranks, "
        "predicted from the recorded loads and not measured (parallel.experts in the spec sets how many)."
    )


def _headlines(layout: Layout, found: pd.DataFrame) -> list[str]:
    """One sentence a cell: how uneven it was as it ran, and which placement would have been the least uneven."""
    rows = found[(found["layer"] == ALL_LAYERS) & found["value"].notna()]
    sentences = []
    for _, of_cell in rows.groupby("cell", sort=False):
        label = balance_tables.cell_label(next(of_cell.itertuples()))
        by_name = of_cell.set_index(["placement", "percentile"])
        value = by_name["value"]
        few = SMALL if by_name["marked"].xs(95, level="percentile").any() else ""
        names = [name for name in dict.fromkeys(of_cell["placement"]) if name != AS_RUN]
        said = []
        if (AS_RUN, 50) in value.index:
            said.append(
                f"in {label}, the busiest rank computed {wording.number(value[AS_RUN, 50])} × the mean in the median "
                f"step and layer, {wording.number(value[AS_RUN, 95])} × at P95{few}"
            )
        if names:
            best = min(names, key=lambda name: value[name, 95])
            alike = [name for name in names if wording.number(value[name, 95]) == wording.number(value[best, 95])]
            fitted, fitted_here = layout.fitted_on.get(best), bool(of_cell["fitted_here"].any())
            where = (
                "of the placements compared"
                if said
                else f"in {label}, of the placements compared on {layout.experts.ranks} ranks, predicted,"
            )
            said.append(
                f"{where} {wording.listed(alike)} {'has' if len(alike) == 1 else 'have'} the lowest P95{few}, "
                f"{wording.number(value[best, 95])} ×"
                + (f" (fitted on {fitted}{', these included' if fitted_here else ''})" if fitted else "")
            )
        if said:
            sentences.append(wording.sentence("; ".join(said)))
    return sentences


def section(found: Balance, names: Mapping[str, str], look: Look, plot: document.Figures) -> dict[str, Any]:
    """What `balance.html.j2` shows."""
    return {
        "name": names[found.arm],
        "sentence": found.sentence,
        "headlines": found.headlines,
        "cells": [each for each in (_cell(found, cell, look, plot) for cell in found.cells) if each["figures"]],
        "windows": [{"label": label, "figure": plot(figure)} for label, figure in window_figures(found, look).items()],
        "said": captions(found),
        **tables(found),
    }


def _cell(found: Balance, cell: str, look: Look, plot: document.Figures) -> dict[str, Any]:
    drawn = cell_figures(found, cell, look)
    first = found.ranks[found.ranks["cell"] == cell].iloc[0]
    return {"name": cell, "label": balance_tables.cell_label(first), "figures": [plot(each) for each in drawn.values()]}


def cell_figures(found: Balance, cell: str, look: Look) -> dict[str, Any]:
    """Name → figure, of what there is to draw of the ranks in one cell; nothing where one process held all."""
    ranks, times, moved, widths, imbalances = (
        frame[frame["cell"] == cell]
        for frame in (found.ranks, found.times, found.traffic, found.widths, found.imbalances)
    )
    drawn = {}
    if not imbalances.empty:
        drawn["imbalance"] = balance_charts.imbalances(imbalances, found.layout.in_force, look, found.arm)
    if found.layout.ran_on > 1:
        drawn["ranks"] = balance_charts.rank_loads(ranks, found.arm, look)
        if not widths.empty or not times.empty:
            drawn["times"] = balance_charts.rank_times(ranks, widths, times, found.arm, look)
    if not moved.empty:
        drawn["traffic"] = balance_charts.traffic(moved, found.arm, look)
    return drawn


def window_figures(found: Balance, look: Look, cell: str | None = None) -> dict[str, Any]:
    """Label → figure of the tails over few tokens, one a cell and order of tokens.

    Args:
        cell: only this one, and held-out inputs, which belong to none.
    """
    tails = found.window_tails
    if cell is not None:
        tails = tails[tails["cell"].isin([cell, *QUALITY_CELLS.values()])]
    drawn = {}
    for (_, order), rows in tails.groupby(["cell", "order"], sort=False):
        first = next(rows.itertuples())
        label = f"{balance_tables.cell_label(first)}: {wording.how_many(first.tokens, 'token')} {order}"
        drawn[label] = balance_charts.windows(rows, found.layout.in_force, look, found.arm)
    return drawn


def captions(found: Balance) -> dict[str, str]:
    """What must stand beside the tables: rules, how times were predicted, and what could not be measured."""
    note, products = found.layout.times_note, found.layout.products
    widths = [f"Unsupported: the products of each width by themselves. {wording.sentence(note)}"] if note else []
    widths += [wording.sentence(f"Products: {products}")] if products else []
    return {
        "imbalance": f"{IMBALANCE_RULE} {SMALL}: fewer than {SAMPLES_BEYOND} values beyond the percentile.",
        "predicted": f"{BARRIER_ROOFLINE} {found.speeds}",
        "wait": WAIT_RULE,
        "bytes": LOCAL_RULE,
        "windows": WINDOW_RULE,
        "widths": " ".join(widths),
    }


def tables(found: Balance) -> dict[str, Table]:
    """Tables by name, each of a frame of `found`."""
    return {
        "compared_table": balance_tables.compared(found.compared),
        "ranks_table": balance_tables.ranks(found.ranks),
        "times_table": balance_tables.times(found.times),
        "links_table": balance_tables.links(found.links),
        "traffic_table": balance_tables.traffic(found.traffic),
        "widths_table": balance_tables.widths(found.widths),
        "layers_table": balance_tables.layers(found.expert_loads),
        "imbalance_table": balance_tables.imbalances(found.imbalances),
        "held_table": balance_tables.held(found.held),
        "windows_table": balance_tables.windows(found.window_tails),
    }


def markdown_parts(found: Balance, names: Mapping[str, str]) -> list[tuple[str, Table, str]]:
    """Title, table and text below of each part of the Markdown report; parts without rows are left out."""
    of, said, name = tables(found), captions(found), names[found.arm]
    about = " ".join([found.sentence, *found.headlines])
    parts = [
        ("Ranks", of["ranks_table"], about),
        ("Placements compared", of["compared_table"], f"{said['imbalance']} {said['predicted']}"),
        ("Transfer and wait", of["times_table"], said["wait"]),
        ("Bytes by link", of["links_table"], said["bytes"]),
        ("Bytes by source and destination", of["traffic_table"], ""),
        ("Expert time by width", of["widths_table"], said["widths"]),
        ("Expert weights on each rank", of["held_table"], ""),
        ("Experts by layer", of["layers_table"], ""),
        ("Imbalance by layer", of["imbalance_table"], ""),
        ("Imbalance over few tokens", of["windows_table"], said["windows"]),
    ]
    return [(f"Balance of {name}: {title.lower()}", table, below) for title, table, below in parts if table.rows]


def as_json(found: Balance) -> dict[str, Any]:
    """The part of the JSON report of one arm."""
    return {
        "arm": found.arm,
        "sentence": found.sentence,
        "headlines": found.headlines,
        "ranks_ran": found.layout.ran_on,
        "placement_in_force": found.layout.in_force,
        "fitted_on": found.layout.fitted_on,
        "notes": found.layout.notes,
        "predicted_by": captions(found)["predicted"],
        "windows": list(balance.WINDOWS),
        "frames": {name: document.records(frame) for name, frame in found.frames().items()},
    }
