"""What the decisions themselves show: how often layers are left out, for which inputs, and how stable that is.

A router that skips the same layers whatever it is given is a fixed cut with extra steps. These tables say how far it
is one, from recorded gates alone (`skips` says what counts as a skip). Intervals are bootstrapped over inputs, and one
of no width says that no input differed, which is worth as much as `requests` is large.

What decisions follow (length, domain, ...) is in `tracking`, how stable they are over seeds in `agreement`, which rows
ran and what that saved in `ladder`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.resampling import counts, interval, means
from analysis.routing import ALL_DOMAINS
from analysis.skips import HELD_OUT, Skips, deciding_arms, rows_of, skips
from analysis.wording import how_many
from profiler.records import QUALITY_CELLS, signals_table
from profiler.store import Run

RATE_COLUMNS = (
    "arm", "cell", "phase", "domain", "layer", "site", "requests", "skip_rate", "low", "high",
)  # fmt: skip
ELIGIBILITY_COLUMNS = (
    "arm", "cell", "requests", "layers", "starts_skipping", "ever_skipped", "always_skipped", "varying", "patterns",
    "eligible_share", "executed_share", "low", "high", "layers_skipped", "note",
)  # fmt: skip
FLIP_COLUMNS = (
    "arm", "cell", "layer", "site", "requests", "majority", "differ", "flip_rate", "low", "high",
)  # fmt: skip
DRIFT_COLUMNS = (
    "arm", "cell", "signal", "layer", "requests", "start", "mean", "standard_deviation", "lowest", "highest", "drift",
    "low", "high", "crossed",
)  # fmt: skip


def skip_rates(run: Run) -> pd.DataFrame:
    """Share of inputs (of token rows, where tokens decide) that skip each layer, by arm, cell, phase and domain.

    Returns:
        Columns `RATE_COLUMNS`, cells of the quality pass included. `domain` is `all` or one domain; `low` and `high`
        bootstrap over the inputs of that domain.
    """
    where = run.table("gates").project("arm, cell, phase").distinct().fetchall()
    cells = [*(cell.name for cell in run.manifest.cells), *QUALITY_CELLS.values()]
    arms = deciding_arms(run)

    def place(group: tuple[str, str, str]) -> tuple[Any, ...]:
        arm, cell, phase = group
        return (cells.index(cell) if cell in cells else -1), cell, arms.index(arm), phase != "prefill", phase

    lines = []
    for arm, cell, phase in sorted((group for group in where if group[0] in arms), key=place):
        found = skips(run, arm, cell, phase)
        for domain in [ALL_DOMAINS, *dict.fromkeys(d for d in found.domains if d is not None)]:
            chosen = found.share[[domain in (ALL_DOMAINS, d) for d in found.domains]]
            base = {"arm": arm, "cell": cell, "phase": phase, "domain": domain, "requests": len(chosen)}
            for (layer, site), rate in zip(found.columns, means(chosen) if len(chosen) else [], strict=False):
                line = {"layer": layer, "site": site, "skip_rate": rate.value, "low": rate.low, "high": rate.high}
                lines.append(base | line)
    return pd.DataFrame(lines, columns=list(RATE_COLUMNS))


def eligibility(run: Run, cell: str = HELD_OUT) -> pd.DataFrame:
    """Layers that are ever skipped against skips that are executed: the first is often quoted as if it were the second.

    Returns:
        One row an arm that can skip, columns `ELIGIBILITY_COLUMNS`. `layers` counts routable ones. `starts_skipping`:
        layers whose decision logit starts at or below 0 (<NA> if the manifest has no start). `ever_skipped`,
        `always_skipped`, `varying`: layers that some, all, some but not all inputs skip. `patterns`: distinct sets of
        skipped layers among the inputs. `eligible_share` = ever_skipped ÷ layers. `executed_share`: mean share of
        layers an input skips, `low` and `high` over inputs, and `layers_skipped` the same in layers.
    """
    lines = []
    for arm in deciding_arms(run):
        found = skips(run, arm, cell)
        n, layers = len(found.requests), len(found.columns)
        starts = run.manifest.arm(arm).signal_starts
        line: dict[str, Any] = {"arm": arm, "cell": cell, "requests": n, "layers": layers, "note": _incomplete(found)}
        line["starts_skipping"] = min((sum(s <= 0 for s in values) for values in starts.values()), default=pd.NA)
        if n:
            skipped = found.skipped
            (mean,) = means(found.share.mean(axis=1)[:, None])
            line |= {
                "ever_skipped": int(skipped.any(axis=0).sum()),
                "always_skipped": int(skipped.all(axis=0).sum()),
                "varying": int((skipped.any(axis=0) & ~skipped.all(axis=0)).sum()),
                "patterns": len(np.unique(skipped, axis=0)),
                "eligible_share": float(skipped.any(axis=0).mean()),
                "executed_share": mean.value,
                "low": mean.low,
                "high": mean.high,
                "layers_skipped": mean.value * layers,
            }
        lines.append(line)
    frame = pd.DataFrame(lines, columns=list(ELIGIBILITY_COLUMNS))
    counted = ["starts_skipping", "ever_skipped", "always_skipped", "varying", "patterns"]
    return frame.astype(dict.fromkeys(counted, "Int64"))


def _incomplete(found: Skips) -> str:
    if not found.requests and not found.incomplete:
        return "no decisions were recorded here"
    return (
        f"{how_many(found.incomplete, 'input')} left out, of which not every layer is recorded"
        if found.incomplete
        else ""
    )


def flip_rates(run: Run, arm: str, cell: str = HELD_OUT) -> pd.DataFrame:
    """Share of inputs whose decision differs from what most inputs get, layer by layer: is the router trivial there?

    Returns:
        Columns `FLIP_COLUMNS`. `majority` is `skip` or `run` (`run` at a tie), `differ` counts the inputs that decide
        otherwise. In every resample the majority is taken anew, so a rate is never above 0.5.
    """
    found = skips(run, arm, cell)
    n = len(found.requests)
    if not n:
        return pd.DataFrame(columns=list(FLIP_COLUMNS))
    drawn = counts(n) @ found.skipped.astype(np.float64) / n
    lines = []
    for (layer, site), skipped, rates in zip(found.columns, found.skipped.T, drawn.T, strict=True):
        share = float(skipped.mean())
        rate = interval(min(share, 1 - share), np.minimum(rates, 1 - rates), n)
        lines.append(
            {
                "arm": arm, "cell": cell, "layer": layer, "site": site, "requests": n,
                "majority": "skip" if share > 0.5 else "run",
                "differ": int(min(skipped.sum(), n - skipped.sum())),
                "flip_rate": rate.value, "low": rate.low, "high": rate.high,
            }
        )  # fmt: skip
    return pd.DataFrame(lines, columns=list(FLIP_COLUMNS))


def drift(run: Run, arm: str, cell: str = HELD_OUT) -> pd.DataFrame:
    """Decision logits at the start of training beside those recorded, layer by layer.

    Which layers can skip at all is easily fixed by the start alone, so the end means little without it.

    Returns:
        Columns `DRIFT_COLUMNS`, for every signal whose start the manifest has. `mean`, `standard_deviation` (n − 1),
        `lowest` and `highest` are over inputs; `drift` = mean − start, interval over inputs. `crossed`: share of inputs
        on whose side of 0 the start was not. Empty where nothing was recorded.
    """
    record = run.manifest.arm(arm)
    name = signals_table(record.method)
    if not record.signal_starts or name not in run.tables():
        return pd.DataFrame(columns=list(DRIFT_COLUMNS))
    signals = rows_of(run.table(name), arm=arm, cell=cell).df()
    lines = []
    for signal, starts in record.signal_starts.items():
        by_input = signals.groupby(["layer", "request"])[signal].mean()
        for layer, values in by_input.groupby("layer"):
            recorded, start = values.to_numpy(np.float64), starts[int(str(layer))]
            (moved,) = means((recorded - start)[:, None])
            lines.append(
                {
                    "arm": arm, "cell": cell, "signal": signal, "layer": layer, "requests": len(recorded),
                    "start": start, "mean": float(recorded.mean()),
                    "standard_deviation": float(recorded.std(ddof=1)) if len(recorded) > 1 else float("nan"),
                    "lowest": float(recorded.min()), "highest": float(recorded.max()),
                    "drift": moved.value, "low": moved.low, "high": moved.high,
                    "crossed": float(((recorded > 0) != (start > 0)).mean()),
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(DRIFT_COLUMNS))
