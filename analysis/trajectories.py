"""Trajectories: how gates and signals of single tokens run through depth, what that cost, and for which tokens.

    profile     median and quartiles over tokens, layer by layer
    breakdown   means over tokens by domain, position, frequency of the token, and whether the next one was right
    costs       share of routed parts that ran and FLOPs a token, by domain
    forgetting  the learned forget factors ρ_j, and the layers after which half of a memory is left, ln 0.5 ÷ ln ρ_j

Every interval is a bootstrap over inputs, since the tokens of one are not independent. A quartile here is the least
value that a quarter of the tokens does not exceed, so it is always one that was recorded; interval ends of a median are
taken from a grid of `GRID` quantiles of the tokens.

Whether a difference between groups is more than chance is `trajectory_tests`'. Nothing here knows a method, but for the
name of the forget factor (`records.FORGET_FACTOR`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.resampling import MIN_INPUTS, counts, interval, means
from analysis.routing import ALL_DOMAINS
from analysis.token_paths import TokenPaths
from profiler.intervals import Interval
from profiler.records import FORGET_FACTOR
from profiler.store import Run

Floats = NDArray[np.float64]

PROFILE_COLUMNS = (
    "arm", "cell", "by", "group", "signal", "layer", "depth", "tokens", "inputs", "lower", "median", "upper", "low",
    "high",
)  # fmt: skip
BREAKDOWN_COLUMNS = ("arm", "cell", "by", "group", "target", "tokens", "inputs", "mean", "low", "high")
COST_COLUMNS = (
    "arm", "cell", "domain", "inputs", "tokens", "ran_share", "low", "high", "lowest", "highest", "flops_per_token",
    "full_flops_per_token", "flop_share", "flop_share_low", "flop_share_high",
)  # fmt: skip
FORGET_COLUMNS = ("arm", "layer", "depth", "forget_factor", "half_life_layers")

#: How tokens are grouped.
EVERY, DOMAIN, POSITION, FREQUENCY, NEXT = "all", "domain", "position", "token frequency", "next token"
RIGHT, WRONG = "right", "wrong"
#: Target that is no signal: the share of routed layers whose backbone part ran.
SHARE = "share that ran"
#: First values of the groups of positions, and of how often a token occurs.
POSITIONS = (0, 1, 16, 64, 256)
FREQUENCIES = (1, 2, 4, 16, 64)
#: Quantiles of the tokens among which the ends of a median's interval lie.
GRID = 256


@dataclass(frozen=True)
class Group:
    """Some tokens of `TokenPaths`: `chosen` is `[N]`."""

    by: str
    name: str
    chosen: NDArray[np.bool_]


def groups(paths: TokenPaths, by: str) -> list[Group]:
    """The groups of one kind that hold a token; none where the run does not say what would tell them apart.

    `next token`: whether the likeliest next token was the one of the reference, over tokens that predict one of it.
    Where no prompt of the cell has a reference, over all tokens whose next one was scored.
    """
    return [group for group in _all_groups(paths, by) if group.chosen.any()]


def _all_groups(paths: TokenPaths, by: str) -> Iterator[Group]:
    if by == EVERY:
        yield Group(by, EVERY, np.ones(len(paths), bool))
    elif by == DOMAIN:
        of_tokens = np.array([paths.domains[k] or "" for k in paths.owner], dtype=object)
        for domain in dict.fromkeys(d for d in paths.domains if d is not None):
            yield Group(by, domain, np.asarray(of_tokens == domain))
    elif by == POSITION:
        yield from _bins(by, paths.position.astype(np.float64), POSITIONS)
    elif by == FREQUENCY:
        yield from _bins(by, paths.occurrences, FREQUENCIES)
    else:
        scored = answered(paths)
        for name, value in ((RIGHT, 1.0), (WRONG, 0.0)):
            yield Group(by, name, scored & (paths.hit == value))


def answered(paths: TokenPaths) -> NDArray[np.bool_]:
    """`[N]`: tokens that predict one of a reference; where there is no reference, any that is scored."""
    scored = ~np.isnan(paths.hit)
    return np.asarray(scored & paths.reference) if paths.reference.any() else scored


def _bins(by: str, values: Floats, firsts: tuple[int, ...]) -> Iterator[Group]:
    for first, after in zip(firsts, (*firsts[1:], None), strict=True):
        if after is None:
            yield Group(by, f"{first} or more", np.asarray(values >= first))
        else:
            name = str(first) if after == first + 1 else f"{first} to {after - 1}"
            yield Group(by, name, np.asarray((values >= first) & (values < after)))


def profile(paths: TokenPaths, by: str = EVERY) -> pd.DataFrame:
    """Median and quartiles over tokens of the gate and of every signal, layer by layer.

    Returns:
        Columns `PROFILE_COLUMNS`. `depth` counts routed layers from 1. `low` and `high`: of the median. Signals that a
        method does not compute in a layer have no line there.
    """
    lines = []
    for group in groups(paths, by):
        chosen = group.chosen
        for signal, values in paths.signals.items():
            for depth, layer in enumerate(paths.layers, start=1):
                known = chosen & ~np.isnan(values[:, depth - 1])
                if not known.any():
                    continue
                found = values[known, depth - 1]
                middle = _median(found, paths.owner[known])
                lower, upper = np.quantile(found, [0.25, 0.75], method="inverted_cdf")
                lines.append(
                    {
                        "arm": paths.arm, "cell": paths.cell, "by": by, "group": group.name, "signal": signal,
                        "layer": layer, "depth": depth, "tokens": len(found), "inputs": middle.n,
                        "lower": float(lower), "median": middle.value, "upper": float(upper),
                        "low": middle.low, "high": middle.high,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=list(PROFILE_COLUMNS))


def _median(values: Floats, owner: NDArray[np.intp]) -> Interval:
    """The least value that half of the tokens do not exceed; interval over inputs."""
    _, place = np.unique(owner, return_inverse=True)
    n = int(place.max()) + 1
    value = float(np.quantile(values, 0.5, method="inverted_cdf"))
    if n < MIN_INPUTS:
        return interval(value, (), n)
    grid = np.unique(np.quantile(values, np.linspace(0, 1, GRID + 1), method="inverted_cdf"))
    cells = np.zeros((n, len(grid)))
    np.add.at(cells, (place, np.searchsorted(grid, values)), 1)
    below = counts(n) @ np.cumsum(cells, axis=1)
    drawn = grid[(below >= below[:, -1:] / 2).argmax(axis=1)]
    return interval(value, drawn, n)


def token_mean(values: Floats, owner: NDArray[np.intp]) -> Interval:
    """Σ values ÷ number of tokens; the interval over inputs, which bring all their tokens."""
    _, place = np.unique(owner, return_inverse=True)
    n = int(place.max()) + 1
    sums, tokens = np.bincount(place, values, n), np.bincount(place, minlength=n).astype(np.float64)
    weights = counts(n)
    return interval(float(sums.sum() / tokens.sum()), (weights @ sums) / (weights @ tokens), n)


def targets(paths: TokenPaths) -> dict[str, Floats]:
    """Name → `[N]`: the share that ran, and the mean over depth of the gate and of every signal."""
    return {SHARE: paths.share, **paths.means}


def breakdown(paths: TokenPaths) -> pd.DataFrame:
    """Means over tokens of `targets`, for all tokens and for each group of each kind.

    Returns:
        Columns `BREAKDOWN_COLUMNS`.
    """
    lines = []
    for by in (EVERY, DOMAIN, POSITION, FREQUENCY, NEXT):
        for group in groups(paths, by) if len(paths) else []:
            for target, values in targets(paths).items():
                known = group.chosen & ~np.isnan(values)
                if not known.any():
                    continue
                found = token_mean(values[known], paths.owner[known])
                lines.append(
                    {
                        "arm": paths.arm, "cell": paths.cell, "by": by, "group": group.name, "target": target,
                        "tokens": int(known.sum()), "inputs": found.n, "mean": found.value, "low": found.low,
                        "high": found.high,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=list(BREAKDOWN_COLUMNS))


def costs(paths: TokenPaths) -> pd.DataFrame:
    """What a sequence cost a token: share of routed parts that ran, and FLOPs of the blocks.

    Returns:
        Columns `COST_COLUMNS`, domain `all` first. `ran_share`: mean over inputs of Σ_j [it ran] ÷ J, itself a mean
        over the input's tokens; `lowest` and `highest` input beside it. `flops_per_token`: mean over all tokens of what
        their blocks executed, routers and replacements included, head left out; `flop_share` is Σ of these ÷ Σ of
        `full_flops_per_token`, the same blocks with every part of the backbone and nothing added.
    """
    lines = []
    for domain in [ALL_DOMAINS, *dict.fromkeys(d for d in paths.domains if d is not None)] if len(paths) else []:
        chosen = [k for k, d in enumerate(paths.domains) if domain in (ALL_DOMAINS, d)]
        shares, flops, full, tokens = (
            np.bincount(paths.owner, values, len(paths.requests))[chosen]
            for values in (paths.share, paths.flops, paths.full_flops, np.ones(len(paths)))
        )
        each = shares / tokens
        (ran,) = means(each[:, None])
        weights = counts(len(chosen))
        part = interval(float(flops.sum() / full.sum()), (weights @ flops) / (weights @ full), len(chosen))
        lines.append(
            {
                "arm": paths.arm, "cell": paths.cell, "domain": domain, "inputs": len(chosen),
                "tokens": int(tokens.sum()), "ran_share": ran.value, "low": ran.low, "high": ran.high,
                "lowest": float(each.min()), "highest": float(each.max()),
                "flops_per_token": float(flops.sum() / tokens.sum()),
                "full_flops_per_token": float(full.sum() / tokens.sum()),
                "flop_share": part.value, "flop_share_low": part.low, "flop_share_high": part.high,
            }
        )  # fmt: skip
    return pd.DataFrame(lines, columns=list(COST_COLUMNS))


def forgetting(run: Run, arm: str) -> pd.DataFrame:
    """The learned forget factors of one arm, layer by layer.

    Returns:
        Columns `FORGET_COLUMNS`; `half_life_layers` = ln 0.5 ÷ ln ρ: 0 at ρ = 0, infinite at ρ = 1. Empty where the
        arm has none, or the run is older than the record of them.
    """
    factors = run.manifest.arm(arm).constants.get(FORGET_FACTOR, {})
    lines: list[dict[str, Any]] = [
        {
            "arm": arm, "layer": layer, "depth": depth, "forget_factor": factor,
            "half_life_layers": _half_life(factor),
        }
        for depth, (layer, factor) in enumerate(sorted(factors.items()), start=1)
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=list(FORGET_COLUMNS))


def _half_life(factor: float) -> float:
    if factor <= 0:
        return 0.0
    return float("inf") if factor >= 1 else float(np.log(0.5) / np.log(factor))
