"""How evenly experts load the ranks that hold them: imbalance, its tails over few tokens, weights, predicted time.

Counts of tokens in, tables out (MEASURES, rule 12; METHODS section 3, "Cost" and "Placement"), for the placement a run
had and for others alike. One phase at a time: prefill and decode are never in one table. A placement fitted to the very
steps it is judged on looks better than it is; callers judge on others, or say so.

Not here: making placements (the profiler does, and records every copy of every expert), and time that was measured.

Shapes: S steps (or windows), L layers with experts, E experts of a layer, R ranks, C copies of experts, T tokens, K
experts a token takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.latency import PERCENTILES, RULE, SAMPLES_BEYOND, samples_beyond

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Tokens of the windows over which balance is looked at (issue "MoHGE", short-window tails).
WINDOWS = (1, 8, 64, 512)
#: `layer` of a line about the steps of all layers together.
ALL_LAYERS = -1

#: One row a copy of an expert in one layer of one placement. Of the tokens an expert gets in a step, numbered from 0,
#: the copy computes number `turn`, `turn + every`, ...; an expert with one copy has turn 0 and every 1.
PLACEMENT_COLUMNS = ("placement", "layer", "expert", "rank", "turn", "every")
TAIL_COLUMNS = ("percentile", "value", "n", "beyond", "marked", "rule", "idle")
IMBALANCE_COLUMNS = ("placement", "layer", *TAIL_COLUMNS)
WINDOW_COLUMNS = ("placement", "window", *TAIL_COLUMNS)
WEIGHT_COLUMNS = ("placement", "rank", "copies", "weight_bytes", "to_mean")
COMPARISON_COLUMNS = (
    "placement", "imbalance_p50", "imbalance_p95", "imbalance_p99", "largest_weight_bytes", "weights_to_mean",
    "predicted_p50_ms", "predicted_p95_ms",
)  # fmt: skip

IMBALANCE_RULE = (
    "Imbalance is the largest rank's weighted FLOPs ÷ the mean over all ranks, for every step and layer by itself; "
    "1.0 is even, and the number of ranks is the most there is. Percentiles are of those values. Where a layer's "
    "experts got no token there is no value; such cases are counted as idle."
)
#: The model behind predicted step times, as pages print it.
BARRIER_ROOFLINE = (
    "Predicted by a roofline with a barrier in every layer: a rank's experts take the longer of computing their "
    "weighted FLOPs and reading the weights of the experts that got a token; the layer waits for its slowest rank; "
    "dispatch and combine each take a fixed time and that of the busiest rank's copies over its link, tokens being "
    "spread evenly over the ranks they come from. Routed experts only, and what is said to be added."
)


@dataclass(frozen=True)
class Experts:
    """Routed experts of a model, the same in each layer that has any, and how many ranks they are spread over.

    `widths`: `[E]`. `ranks` counts those that hold no expert too: they are in the mean.
    """

    widths: tuple[int, ...]
    hidden: int
    itemsize: int
    ranks: int


@dataclass(frozen=True)
class Loads:
    """Tokens of each expert: `tokens` is `[S, L, E]`, over all ranks; `layers` numbers its second axis."""

    tokens: Ints
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Speeds:
    """What a rank's device and link do, for `predicted`: FLOPs, weight bytes and link bytes (one way) a second, and
    the ns an all-to-all takes however little it moves. `rest_ns`: the rest of a step, alike under every placement.
    """

    flops_per_s: float
    weight_bytes_per_s: float
    link_bytes_per_s: float
    collective_ns: float
    rest_ns: float = 0.0


class Prediction(NamedTuple):
    """`[S]` each, in ns: experts (slowest rank of each layer, added up), both all-to-alls, and the whole step."""

    experts_ns: Floats
    transfer_ns: Floats
    step_ns: Floats


def loads(frame: pd.DataFrame, experts: int) -> Loads:
    """Counts from recorded rows with columns step, layer, expert and tokens; rows of several ranks are added up.

    A step or layer without any row is not in the result; an expert without one got no token.
    """
    step_N, steps = pd.factorize(frame["step"], sort=True)
    layer_N, layers = pd.factorize(frame["layer"], sort=True)
    tokens = np.zeros((len(steps), len(layers), experts), np.int64)
    np.add.at(tokens, (step_N, layer_N, frame["expert"].to_numpy()), frame["tokens"].to_numpy())
    return Loads(tokens, tuple(int(layer) for layer in layers))


def window_counts(routes: NDArray[Any], size: int, experts: int) -> Ints:
    """Tokens of each expert in windows of `size` tokens that follow each other.

    Args:
        routes: `[T, K]` experts each token takes in one layer, −1 where it takes fewer. The order of tokens says what
            a window is: by request, a piece of a prompt; by position, then request, a decode step at that batch size.
        size: tokens a window. What is left over at the end is no window.
        experts: E.

    Returns:
        `[T // size, E]`.
    """
    windows = len(routes) // size
    taken = np.asarray(routes[: windows * size], np.int64).reshape(windows, size * routes.shape[1])
    number = (taken + np.arange(windows)[:, None] * experts)[taken >= 0]
    counts: Ints = np.bincount(number, minlength=windows * experts).astype(np.int64).reshape(windows, experts)
    return counts


def rank_flops(load: Loads, placed: pd.DataFrame, experts: Experts) -> Ints:
    """Weighted FLOPs of each rank, `[S, L, R]`: 6·d·Σ tokens × width of its experts (METHODS section 3, "Cost").

    Args:
        load: what was routed.
        placed: `PLACEMENT_COLUMNS` of one placement, with every layer of `load`.
        experts: their widths, and the number of ranks.
    """
    flops = np.empty((len(load.tokens), len(load.layers), experts.ranks), np.int64)
    for k, copies in enumerate(_layers(placed, load.layers)):
        flops[:, k] = copies.flops(load.tokens[:, k], experts)
    return flops


def recorded_flops(frame: pd.DataFrame, experts: Experts) -> Ints:
    """Weighted FLOPs of each rank as they ran, `[S, L, R]`: columns step, layer, rank, expert and tokens.

    Steps and layers in the order of `loads`.
    """
    step_N, steps = pd.factorize(frame["step"], sort=True)
    layer_N, layers = pd.factorize(frame["layer"], sort=True)
    work = frame["tokens"].to_numpy(np.int64) * np.array(experts.widths, np.int64)[frame["expert"].to_numpy()]
    flops = np.zeros((len(steps), len(layers), experts.ranks), np.int64)
    np.add.at(flops, (step_N, layer_N, frame["rank"].to_numpy()), 6 * experts.hidden * work)
    return flops


def imbalance(flops: NDArray[Any]) -> Floats:
    """Largest ÷ mean over the last axis, ranks; NaN where nothing was computed. `[S, L, R]` becomes `[S, L]`.

    Never of sums over steps: a rank that is late now and another one later are late twice (rule 12).
    """
    work = np.asarray(flops, np.float64)
    mean = work.mean(-1)
    ratio: Floats = np.divide(work.max(-1), mean, out=np.full(mean.shape, np.nan), where=mean > 0)
    return ratio


def imbalance_table(flops: Mapping[str, Ints], layers: Sequence[int]) -> pd.DataFrame:
    """P50, P95 and P99 of imbalance over steps: all layers together (`ALL_LAYERS`), then each layer.

    Args:
        flops: for each placement, weighted FLOPs `[S, L, R]` of one arm and phase.
        layers: numbers of the second axis.

    Returns:
        Columns `IMBALANCE_COLUMNS`. `value`: NaN where nothing was computed at all; `n`: values it is a percentile of;
        `marked`: fewer than `SAMPLES_BEYOND` of them lie beyond it; `idle`: steps and layers without a token.
    """
    lines: list[dict[str, object]] = []
    for name, work in flops.items():
        ratio = imbalance(work)
        columns = [(ALL_LAYERS, ratio), *((layer, ratio[:, k]) for k, layer in enumerate(layers))]
        lines += [{"placement": name, "layer": layer} | tail for layer, values in columns for tail in _tails(values)]
    return pd.DataFrame(lines, columns=list(IMBALANCE_COLUMNS))


def window_table(
    routes: NDArray[Any],
    layers: Sequence[int],
    placements: pd.DataFrame,
    experts: Experts,
    sizes: Sequence[int] = WINDOWS,
) -> pd.DataFrame:
    """P50, P95 and P99 of imbalance over windows of so many tokens: the mean can be even while single steps are not.

    Args:
        routes: `[T, L, K]` experts each token takes in each layer, ordered as `window_counts` says.
        layers: numbers of its second axis.
        placements: `PLACEMENT_COLUMNS`, with every layer for every placement.
        experts: their widths, and the number of ranks.
        sizes: tokens a window.

    Returns:
        Columns `WINDOW_COLUMNS`, by placement and size; the values are those of every window and layer. A size that
        more tokens are needed for than there are has no rows.
    """
    lines: list[dict[str, object]] = []
    for name, placed in placements.groupby("placement", sort=False):
        of_layers = list(_layers(placed, layers))
        for size in (size for size in sizes if size <= len(routes)):
            ratio = [
                imbalance(copies.flops(window_counts(routes[:, k], size, len(experts.widths)), experts))
                for k, copies in enumerate(of_layers)
            ]
            lines += [{"placement": name, "window": size} | tail for tail in _tails(np.array(ratio))]
    return pd.DataFrame(lines, columns=list(WINDOW_COLUMNS))


def weight_table(placements: pd.DataFrame, experts: Experts) -> pd.DataFrame:
    """Routed experts' weights on each rank, all layers of a placement together: 3·d·width parameters a copy.

    Returns:
        Columns `WEIGHT_COLUMNS`, ranks that hold nothing included; `to_mean` is against the placement's own mean.
    """
    frames = []
    for name, placed in placements.groupby("placement", sort=False):
        rank = placed["rank"].to_numpy()
        held = _expert_bytes(experts)[placed["expert"].to_numpy()]
        # Added as whole numbers: bincount's own weights are floats.
        total = np.zeros(experts.ranks, np.int64)
        np.add.at(total, rank, held)
        copies = np.bincount(rank, minlength=experts.ranks)
        columns = (name, np.arange(experts.ranks), copies, total, total / total.mean())
        frames.append(pd.DataFrame(dict(zip(WEIGHT_COLUMNS, columns, strict=True))))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(WEIGHT_COLUMNS))


def predicted(load: Loads, placed: pd.DataFrame, experts: Experts, speeds: Speeds) -> Prediction:
    """Time of each step by the model that `BARRIER_ROOFLINE` states: to rank placements by, not for measurement.

    Args:
        load: what was routed.
        placed: `PLACEMENT_COLUMNS` of one placement.
        experts: widths, hidden size, bytes an element, ranks.
        speeds: of every rank alike.
    """
    compute, transfer = np.zeros(len(load.tokens)), np.zeros(len(load.tokens))
    size, ranks = _expert_bytes(experts), experts.ranks
    remote = (ranks - 1) / ranks
    for k, copies in enumerate(_layers(placed, load.layers)):
        taken = copies.taken(load.tokens[:, k])
        read = copies.to_ranks((taken > 0) * size[copies.expert], ranks)
        flops = copies.flops(load.tokens[:, k], experts)
        compute += np.maximum(flops / speeds.flops_per_s, read / speeds.weight_bytes_per_s).max(-1) * 1e9
        if ranks > 1:
            busiest = copies.to_ranks(taken, ranks).max(-1) * remote * experts.hidden * experts.itemsize
            transfer += 2 * (speeds.collective_ns + busiest / speeds.link_bytes_per_s * 1e9)
    return Prediction(compute, transfer, compute + transfer + speeds.rest_ns)


def comparison(load: Loads, placements: pd.DataFrame, experts: Experts, speeds: Speeds | None = None) -> pd.DataFrame:
    """One row a placement, on the same steps: imbalance, the fullest rank's weights, predicted step time.

    Args:
        load: the steps of one arm and phase.
        placements: `PLACEMENT_COLUMNS`, with every layer of `load` for every placement.
        experts: their widths, hidden size, bytes an element, and the number of ranks.
        speeds: for predicted times.

    Returns:
        Columns `COMPARISON_COLUMNS`; the predicted ones are NaN without `speeds`.
    """
    grouped = placements.groupby("placement", sort=False)
    flops = {str(name): rank_flops(load, placed, experts) for name, placed in grouped}
    tails = imbalance_table(flops, load.layers)
    overall = tails[tails["layer"] == ALL_LAYERS].set_index(["placement", "percentile"])["value"]
    weights = weight_table(placements, experts).groupby("placement")[["weight_bytes", "to_mean"]].max()
    lines = []
    for name, placed in grouped:
        times = (float("nan"), float("nan"))
        if speeds is not None and len(load.tokens):
            step_ms = predicted(load, placed, experts, speeds).step_ns / 1e6
            times = (float(np.percentile(step_ms, 50)), float(np.percentile(step_ms, 95)))
        values = [overall[name, percentile] for percentile in PERCENTILES]
        lines.append((name, *values, *weights.loc[name], *times))
    frame = pd.DataFrame(lines, columns=list(COMPARISON_COLUMNS))
    return frame.astype({"largest_weight_bytes": np.int64})


class _Copies(NamedTuple):
    """Copies of one layer, `[C]` each, as `PLACEMENT_COLUMNS` has them."""

    expert: Ints
    rank: Ints
    turn: Ints
    every: Ints

    def taken(self, tokens: Ints) -> Ints:
        """`[S, E]` tokens of experts as `[S, C]` tokens of copies."""
        counts: Ints = (tokens[:, self.expert] - self.turn + self.every - 1) // self.every
        return counts

    def to_ranks(self, values: Ints, ranks: int) -> Ints:
        """`[S, C]` added up over the copies of each rank, `[S, R]`."""
        total: Ints = values @ (self.rank[:, None] == np.arange(ranks)).astype(np.int64)
        return total

    def flops(self, tokens: Ints, experts: Experts) -> Ints:
        """Weighted FLOPs of each rank, `[S, R]`, of `[S, E]` tokens."""
        width = np.array(experts.widths, np.int64)[self.expert]
        return 6 * experts.hidden * self.to_ranks(self.taken(tokens) * width, experts.ranks)


def _layers(placed: pd.DataFrame, layers: Sequence[int]) -> Iterator[_Copies]:
    by_layer = dict(list(placed.groupby("layer")))
    for layer in layers:
        rows = by_layer[layer]
        yield _Copies(*(rows[name].to_numpy(np.int64) for name in _Copies._fields))


def _expert_bytes(experts: Experts) -> Ints:
    return 3 * experts.hidden * experts.itemsize * np.array(experts.widths, np.int64)


def _tails(ratio: Floats) -> Iterator[dict[str, object]]:
    values = ratio[~np.isnan(ratio)]
    for percentile in PERCENTILES:
        beyond = samples_beyond(values.size, percentile) if values.size else 0
        yield {
            "percentile": percentile,
            "value": float(np.percentile(values, percentile, method="linear")) if values.size else float("nan"),
            "n": int(values.size),
            "beyond": beyond,
            "marked": beyond < SAMPLES_BEYOND,
            "rule": RULE,
            "idle": int(ratio.size - values.size),
        }
