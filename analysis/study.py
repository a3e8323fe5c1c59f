"""What seeds agree on: pattern, speed and quality of a study's runs, side by side, with their spread.

A figure of one trained router is one draw. Here each figure stands beside those of the other seeds, and the spread
between seeds beside the interval that a single run gives (`spread`).

All seeds see the same inputs, so intervals over inputs (pattern, quality) say how far other inputs would move a figure.
Step times come from runs made one after another: their spread holds whatever changed on the machine in between, and how
much that was is told by arms that no seed touches (the baseline's own step time).

Not here: what one run's figures are (`skips`, `ladder`, `quality`), and training curves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from analysis import quality
from analysis.agreement import AGREEMENT_COLUMNS, across, agreement
from analysis.ladder import HEADLINE, ladder
from analysis.overview import labels as labels_of_run
from analysis.resampling import means
from analysis.routing import ALL_DOMAINS
from analysis.skips import Skips, deciding_arms, skips
from analysis.spread import (
    ALIKE,
    FACTOR,
    FLOPS,
    LAYERS,
    MILLISECONDS,
    PATTERN,
    QUALITY,
    RATIO,
    SAVED,
    SHARE,
    SKIPPED,
    SPEED,
    TIME,
    lines,
    rules,
)  # fmt: skip
from analysis.wording import absent, how_many, percent, percent_interval
from profiler.intervals import Interval
from profiler.store import Run
from profiler.study_folder import Study

VALUE_COLUMNS = (
    "arm", "twin", "part", "figure", "where", "unit", "seed", "value", "low", "high", "n", "note",
)  # fmt: skip
#: How the label of a run begins on a busy machine.
CONTENTION = "contention detected"

PATTERN_COLUMNS = (
    "arm", "seed", "requests", "layers", "ever_skipped", "most_skip", "varying", "patterns", "executed_share",
)  # fmt: skip
RATE_COLUMNS = ("arm", "seed", "layer", "site", "skip_rate", "low", "high")


@dataclass(frozen=True)
class Compared:
    """A study, compared over its seeds. Frames have the columns named here and keep the order of arms and seeds.

    Attributes:
        seeds: those that are done, and so compared.
        values: `VALUE_COLUMNS`, a row a figure and seed. Shares of 1, ms, or ratios, as `unit` says.
        lines: `spread.lines`, a row a figure with its spread and verdict.
        patterns: `PATTERN_COLUMNS`, a row an arm and seed; layers as text.
        pairs: `agreement.AGREEMENT_COLUMNS` and `arm`; `first` and `second` are seeds.
        layers: `agreement.ACROSS_COLUMNS` and `arm`.
        rates: `RATE_COLUMNS`: share of held-out inputs that skip each layer.
        rules: how verdicts come about, in sentences.
        arms: those that have figures; those that skip first, then others that are trained, then those no seed touches.
        sentences: what is stable and what is not, arm by arm.
        labels: what must be known before reading on.
    """

    seeds: list[int]
    trained: list[str]
    arms: list[str]
    values: pd.DataFrame
    lines: pd.DataFrame
    patterns: pd.DataFrame
    pairs: pd.DataFrame
    layers: pd.DataFrame
    rates: pd.DataFrame
    rules: list[str]
    sentences: list[str]
    labels: list[str]


def compare(study: Study) -> Compared:
    """Read every finished run of a study and compare them.

    Raises:
        StoreError: a run cannot be read.
        InputError: runs do not decide about the same layers, so they are not of one study.
    """
    runs = study.runs()
    arms = [arm.name for arm in next(iter(runs.values())).manifest.arms] if runs else []
    values = _values(runs, arms)
    patterns, rates, pairs, layers = _patterns(runs)
    summed = lines(values, pairs, arms)
    trained, skipping = study.record.trained_arms, set(patterns["arm"])
    shown = sorted(dict.fromkeys(summed["arm"]), key=lambda arm: (arm not in trained, arm not in skipping))
    return Compared(
        seeds=list(runs),
        trained=trained,
        arms=shown,
        values=values,
        lines=summed,
        patterns=patterns,
        pairs=pairs,
        layers=layers,
        rates=rates,
        rules=rules(len(runs)),
        sentences=[_sentence(arm, summed[summed["arm"] == arm]) for arm in shown],
        labels=list(_labels(study, runs)),
    )


# -- figures of single seeds ----------------------------------------------------------------------------------------


def _values(runs: dict[int, Run], arms: Sequence[str]) -> pd.DataFrame:
    found = []
    for seed, run in runs.items():
        twins = {arm.name: arm.twin for arm in run.manifest.arms}
        for line in (*_pattern(run), *_speed(run), *_quality(run)):
            found.append({"seed": seed, "twin": twins[line["arm"]], "note": ""} | line)
    frame = pd.DataFrame(found, columns=list(VALUE_COLUMNS))
    if frame.empty:
        return frame
    # Arms in their order, parts and figures of an arm together, seeds within a figure.
    place = {key: k for k, key in enumerate([PATTERN, SPEED, QUALITY, SKIPPED, SAVED, FLOPS, TIME, RATIO])}
    first_seen = frame.groupby(["arm", "part", "figure", "where"], sort=False).ngroup()
    keys = pd.DataFrame(
        {
            "arm": frame["arm"].map({arm: k for k, arm in enumerate(arms)}),
            "part": frame["part"].map(place),
            "figure": frame["figure"].map(place),
            "where": first_seen,
            "seed": frame["seed"].map({seed: k for k, seed in enumerate(runs)}),
        }
    )
    order = keys.sort_values(list(keys.columns), kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _line(arm: str, part: str, figure: str, where: str, unit: str, found: Interval, note: str = "") -> dict[str, Any]:
    return {
        "arm": arm, "part": part, "figure": figure, "where": where, "unit": unit, "value": found.value,
        "low": found.low, "high": found.high, "n": found.n, "note": note,
    }  # fmt: skip


def _pattern(run: Run) -> Iterator[dict[str, Any]]:
    """Share of routable layers that a held-out input skips, over all and by domain."""
    for arm in deciding_arms(run):
        found = skips(run, arm)
        for domain in _domains(found):
            chosen = found.share[[domain in (ALL_DOMAINS, d) for d in found.domains]]
            (mean,) = means(chosen.mean(axis=1)[:, None])
            yield _line(arm, PATTERN, SKIPPED, domain, SHARE, mean)


def _domains(found: Skips) -> list[str]:
    if not found.requests:
        return []
    return [ALL_DOMAINS, *dict.fromkeys(domain for domain in found.domains if domain is not None)]


def _speed(run: Run) -> Iterator[dict[str, Any]]:
    """Step time saved and FLOPs skipped of every arm that has a twin, step time of those that have none."""
    frame = ladder(run)
    headline = frame[(frame["variant"] == frame["rung"].map(HEADLINE)) & frame["value"].notna()]
    for row in headline.to_dict("records"):
        compared = not absent(row["twin"])
        figure = {"step_time_saved": SAVED, "flop_skip": FLOPS} if compared else {"step_time": TIME}
        if row["rung"] in figure:
            found = Interval(row["value"], row["low"], row["high"], row["n"])
            unit = SHARE if compared else MILLISECONDS
            yield _line(row["arm"], SPEED, figure[row["rung"]], row["cell"], unit, found)


def _quality(run: Run) -> Iterator[dict[str, Any]]:
    """Perplexity as a ratio to the twin's, gated on a prefix."""
    frame = quality.perplexity(run)
    chosen = frame[(frame["mode"] == quality.GATED) & frame["against_twin"].notna()]
    for row in chosen.to_dict("records"):
        found = Interval(row["against_twin"], row["against_twin_low"], row["against_twin_high"], row["items"])
        yield _line(row["arm"], QUALITY, RATIO, row["domain"], FACTOR, found)


def _patterns(runs: dict[int, Run]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Of every arm that skips something: patterns of each seed, rates by layer, pairs of seeds, layers over seeds."""
    patterns, rates, pairs, layers = [], [], [], []
    arms = deciding_arms(next(iter(runs.values()))) if runs else []
    for arm in arms:
        found = {seed: skips(run, arm) for seed, run in runs.items()}
        if not any(of_seed.skipped.any() for of_seed in found.values()):
            continue
        for seed, of_seed in found.items():
            if of_seed.requests:
                patterns.append({"arm": arm, "seed": seed, **_described(of_seed)})
                shares = means(of_seed.share)
                rates += [
                    {"arm": arm, "seed": seed, "layer": layer, "site": site, "skip_rate": rate.value, "low": rate.low,
                     "high": rate.high}
                    for (layer, site), rate in zip(of_seed.columns, shares, strict=True)
                ]  # fmt: skip
        sides = [(run, arm) for run in runs.values()]
        both = agreement(sides)
        # A run of a study is called `run` whatever its seed; pairs come in this order.
        if len(runs) > 1:
            both[["first", "second"]] = list(combinations(runs, 2))
        pairs.append(both.assign(arm=arm))
        layers.append(across(sides).assign(arm=arm))

    def joined(frames: list[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
        kept = [frame for frame in frames if not frame.empty]
        return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame(columns=list(columns))

    return (
        pd.DataFrame(patterns, columns=list(PATTERN_COLUMNS)),
        pd.DataFrame(rates, columns=list(RATE_COLUMNS)),
        joined(pairs, (*AGREEMENT_COLUMNS, "arm")),
        joined(layers, (*across([]).columns, "arm")),
    )


def _described(found: Skips) -> dict[str, Any]:
    skipped = found.skipped
    several = len({site for _, site in found.columns}) > 1

    def named(chosen: Any) -> str:
        kept = [f"{layer} {site}" if several else str(layer) for layer, site in np.array(found.columns)[chosen]]
        return ", ".join(kept) or "none"

    return {
        "requests": len(found.requests),
        "layers": len(found.columns),
        "ever_skipped": named(skipped.any(axis=0)),
        "most_skip": named(skipped.mean(axis=0) > 0.5),
        "varying": int((skipped.any(axis=0) & ~skipped.all(axis=0)).sum()),
        "patterns": len(np.unique(skipped, axis=0)),
        "executed_share": float(found.share.mean()),
    }


# -- in words -------------------------------------------------------------------------------------------------------


def _sentence(arm: str, own: pd.DataFrame) -> str:
    """An arm in words: its lines that say most, each with its verdict."""
    clauses = []
    of = {str(figure): rows.to_dict("records") for figure, rows in own.groupby("figure", sort=False)}
    for row in of.get(SKIPPED, [])[:1]:
        span = f"{percent(row['mean'])} of layers ({percent_interval(row['lowest'], row['highest'])}), {_so(row)}"
        clauses.append(f"skips {span}" if row["highest"] > 0 else "skips nothing in any seed")
    for row in of.get(LAYERS, []):
        clauses.append(f"the layers two seeds ever skip overlap by {row['mean']:.2f} (Jaccard, mean), {_so(row)}")
    for row in of.get(ALIKE, []):
        clauses.append(f"two seeds decide {percent(row['mean'])} of inputs × layers alike, {_so(row)}")
    for figure, words, places in (
        (TIME, "step time, which no seed touches,", "cells"),
        (SAVED, "step time saved", "cells"),
        (RATIO, "perplexity against the twin's", "domains, all together counted as one"),
    ):
        if verdicts := Counter(_so(row) for row in of.get(figure, [])):
            counted = ", ".join(f"{verdict} in {count}" for verdict, count in verdicts.items())
            clauses.append(f"{words} is {counted} of {sum(verdicts.values())} {places}")
    return f"{arm}: {'; '.join(clauses)}."


def _so(row: dict[Hashable, Any]) -> str:
    return str(row["verdict"]) or "not judged"


def _labels(study: Study, runs: dict[int, Run]) -> Iterator[str]:
    record = study.record
    if len(runs) < len(record.seeds):
        yield f"{len(runs)} of {how_many(len(record.seeds), 'seed')} done; go on with --resume"
    yield from (f"seed {of_seed.seed} failed: {of_seed.failed}" for of_seed in record.seeds if of_seed.failed)
    for what, of_seed in _conditions(runs).items():
        if len(set(of_seed.values())) > 1:
            each = ", ".join(f"seed {seed}: {value}" for seed, value in of_seed.items())
            yield f"not every seed was measured under the same conditions: {what} ({each})"
    said: dict[str, list[int]] = {}
    for seed, run in runs.items():
        for label in labels_of_run(run):
            busy = label.startswith(CONTENTION)
            said.setdefault(f"{CONTENTION}; by what, the report of each run says" if busy else label, []).append(seed)
    for label, seeds in said.items():
        where = "" if len(seeds) == len(runs) else f"seed {', '.join(map(str, seeds))}: "
        yield where + label


def _conditions(runs: dict[int, Run]) -> dict[str, dict[int, Any]]:
    """What must be the same in every run for times to stand side by side."""
    found: dict[str, dict[int, Any]] = {}
    for seed, run in runs.items():
        manifest = run.manifest
        facts = {key: manifest.machine.get(key) for key in ("cpu", "cores_usable", "torch_threads")}
        facts |= {f"{key} version": manifest.versions.get(key) for key in ("gatewise", "torch", "transformers")}
        if manifest.model is not None:
            facts |= {"device": manifest.model.device_name, "weights": manifest.model.weights_sha256}
        for what, value in facts.items():
            found.setdefault(what, {})[seed] = value
    return found
