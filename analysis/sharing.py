"""What the rows of a step share: why a batch reads more weights than its rows run.

A layer that one row of a step runs is read for all of them, so a batch whose rows decide differently saves the work of
those that skip and not the reading. Counted from the rows that entered each product; the rungs of the whole model are
`ladder`'s, and what was decided (not carried out) is `routing`'s.

Legend: a *place* is one (layer, site) at which leaving the backbone out is a choice, in one recorded step.
"""

from __future__ import annotations

import pandas as pd

from analysis.latency import cells, step_samples
from analysis.skips import skipping_choices
from profiler.store import Run

SHARING_COLUMNS = (
    "cell", "phase", "batch", "length", "arm", "layers", "steps", "nobody", "some", "everybody", "rows_ran",
    "weights_read", "read_for_skippers",
)  # fmt: skip


def sharing(run: Run) -> pd.DataFrame:
    """By cell and arm that can skip: how many rows of a step ran a layer together, and what was read for them.

    Returns:
        Columns `SHARING_COLUMNS`; shares of 1, over all places of the recorded steps. `nobody`, `some`, `everybody`:
        places that no row, some rows, all rows of the step ran; they add up to 1. `rows_ran`: Σ rows that ran ÷ Σ rows
        of the steps. `weights_read`: bytes of weights read ÷ bytes if every place were run. `read_for_skippers` =
        weights_read − rows_ran: the saving that rows made and the step did not. `layers`: places a step has; `steps`:
        those recorded. Cells in which nothing was recorded of an arm have no row.
    """
    samples = step_samples(run)[["arm", "cell", "step", "rows"]].rename(columns={"rows": "step_rows"})
    counted: pd.DataFrame = (
        run.table("rows")
        .aggregate(
            "arm, cell, step, layer, site, choice, sum(rows)::bigint as rows, sum(padded)::bigint as padded"
        )
        .df()
    )  # fmt: skip
    counted = counted.merge(samples, on=["arm", "cell", "step"])
    lines = []
    for cell in cells(run):
        for arm in run.manifest.arms:
            skipping = skipping_choices(arm)
            costs = pd.DataFrame(
                [
                    {"layer": c.layer, "site": c.site, "choice": c.index, "weight_bytes": c.weight_bytes}
                    for c in arm.choices
                    if skipping.get((c.layer, c.site, c.index)) is False
                ],
                columns=["layer", "site", "choice", "weight_bytes"],
            )
            mine = counted[(counted["arm"] == arm.name) & (counted["cell"] == cell.name)]
            if costs.empty or mine.empty:
                continue
            steps = mine.groupby("step")["step_rows"].first()
            ran = mine.merge(costs, on=["layer", "site", "choice"])
            ran = ran[ran["rows"] + ran["padded"] > 0]
            here = ran.groupby(["step", "layer", "site"]).agg(rows=("rows", "sum"), of=("step_rows", "first"))
            layers = len(costs[["layer", "site"]].drop_duplicates())
            places = layers * len(steps)
            everybody = int((here["rows"] >= here["of"]).sum())
            rows_ran = float(here["rows"].sum() / (layers * steps.sum()))
            weights_read = float(ran["weight_bytes"].sum() / (costs["weight_bytes"].sum() * len(steps)))
            lines.append(
                {
                    "cell": cell.name, "phase": cell.phase, "batch": cell.batch, "length": cell.length,
                    "arm": arm.name, "layers": layers, "steps": len(steps), "nobody": 1 - len(here) / places,
                    "some": (len(here) - everybody) / places, "everybody": everybody / places, "rows_ran": rows_ran,
                    "weights_read": weights_read, "read_for_skippers": weights_read - rows_ran,
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(SHARING_COLUMNS))
