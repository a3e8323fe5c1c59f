"""How far skip patterns are the same in several runs: seeds of one study, or arms of one spec.

A router trained twice should leave out the same layers and treat the same input alike, if it found something in the
text. Agreement is set beside what rates alone would give, since two routers that skip little agree on most decisions.

Not here: what one run's decisions show (`diagnostics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.resampling import means
from analysis.skips import HELD_OUT, Skips, skips
from analysis.wording import how_many
from profiler.errors import InputError
from profiler.store import Run

AGREEMENT_COLUMNS = (
    "first", "second", "cell", "jaccard_ever", "jaccard_majority", "requests", "agreement", "low", "high", "by_chance",
    "note",
)  # fmt: skip
ACROSS_COLUMNS = (
    "layer", "site", "runs", "ever_skipped_in", "majority_skips_in", "mean_rate", "lowest_rate", "highest_rate",
)  # fmt: skip
#: An arm of a run: one seed of a study.
Side = tuple[Run, str]


def agreement(sides: Sequence[Side], cell: str = HELD_OUT) -> pd.DataFrame:
    """How far the patterns of several runs (seeds) or arms are the same, pair by pair.

    Returns:
        Columns `AGREEMENT_COLUMNS`. Jaccard (|both| ÷ |either|) of the sets of layers ever skipped and skipped by most
        inputs; NaN where neither side skips any. `agreement`: share of (input, layer) decided alike over the inputs
        both saw, interval over inputs; `by_chance`: what two routers with these rates per layer would agree by if
        they decided without regard to the input.

    Raises:
        InputError: the sides do not decide about the same layers.
    """
    found = [(_label(side), skips(*side, cell)) for side in sides]
    lines = []
    for (first, a), (second, b) in combinations(found, 2):
        if a.columns != b.columns:
            raise InputError(
                f"{first} decides about {how_many(len(a.columns), 'layer')} and {second} about {len(b.columns)}, or "
                "other ones: their patterns cannot be compared"
            )
        line: dict[str, Any] = {"first": first, "second": second, "cell": cell, "requests": 0, "note": ""}
        if a.requests and b.requests:
            line["jaccard_ever"] = _jaccard(*(np.asarray(side.skipped.any(axis=0)) for side in (a, b)))
            line["jaccard_majority"] = _jaccard(*(np.asarray(side.skipped.mean(axis=0) > 0.5) for side in (a, b)))
        mine, theirs, other = _shared(a, b)
        if len(mine):
            x, y = a.skipped[mine], b.skipped[theirs]
            (alike,) = means((x == y).mean(axis=1)[:, None])
            p, q = x.mean(axis=0), y.mean(axis=0)
            line |= {"requests": len(mine), "agreement": alike.value, "low": alike.low, "high": alike.high}
            line["by_chance"] = float((p * q + (1 - p) * (1 - q)).mean())
        notes = [] if len(mine) else ["no input in common"]
        if other:
            notes.append(f"{how_many(other, 'input')} of the same name and another text left out")
        lines.append(line | {"note": "; ".join(notes)})
    return pd.DataFrame(lines, columns=list(AGREEMENT_COLUMNS))


def _label(side: Side) -> str:
    run, arm = side
    return f"{run.path.name}: {arm}"


def _jaccard(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else float("nan")


def _shared(a: Skips, b: Skips) -> tuple[list[int], list[int], int]:
    """Places in `a` and in `b` of the inputs both saw, and how many of the same name had other tokens."""
    place = {name: k for k, name in enumerate(b.requests)}
    named = [(i, place[name]) for i, name in enumerate(a.requests) if name in place]

    def same(i: int, k: int) -> bool:
        pairs = ((a.tokens[i], b.tokens[k]), (a.mean_token_rank[i], b.mean_token_rank[k]))
        return all(x == y or (np.isnan(x) and np.isnan(y)) for x, y in pairs)

    kept = [(i, k) for i, k in named if same(i, k)]
    return [i for i, _ in kept], [k for _, k in kept], len(named) - len(kept)


def across(sides: Sequence[Side], cell: str = HELD_OUT) -> pd.DataFrame:
    """Layer by layer, in how many of several runs it is skipped, and how far its rate varies among them.

    Returns:
        Columns `ACROSS_COLUMNS`; rates are shares of inputs. Sides without decisions are left out.
    """
    found = [side for side in (skips(*side, cell) for side in sides) if side.requests]
    places = sorted({place for side in found for place in side.columns})
    lines = []
    for place in places:
        columns = [side.skipped[:, side.columns.index(place)] for side in found if place in side.columns]
        rates = [float(column.mean()) for column in columns]
        lines.append(
            {
                "layer": place[0],
                "site": place[1],
                "runs": len(columns),
                "ever_skipped_in": sum(bool(column.any()) for column in columns),
                "majority_skips_in": sum(rate > 0.5 for rate in rates),
                "mean_rate": float(np.mean(rates)),
                "lowest_rate": min(rates),
                "highest_rate": max(rates),
            }
        )
    return pd.DataFrame(lines, columns=list(ACROSS_COLUMNS))
