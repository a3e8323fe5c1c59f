"""Whether routing beats doing nothing clever: arms that skip, side by side at the rates they really skipped.

A router is worth its trouble only if, at the same number of layers skipped, it leaves a better model than a fixed cut
or a random choice. Rates are the executed ones on the held-out inputs, never the ones asked for; pairs of arms that
differ by more than `LIKE_RATES` layers are compared and marked, because the arm that skips less should win in any case.

Time is not compared here: the ladder has it, and it follows from the same skips.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from itertools import permutations
from typing import Any

import pandas as pd

from analysis import quality
from analysis.diagnostics import eligibility
from analysis.skips import HELD_OUT
from analysis.wording import how_many
from profiler.records import ArmRecord
from profiler.store import Run

PAIR_COLUMNS = (
    "arm", "layers_skipped", "patterns", "other", "other_layers_skipped", "other_patterns", "gap_layers", "like_rates",
    "items", "perplexity_ratio", "low", "high", "verdict", "note",
)  # fmt: skip
MATCH_COLUMNS = ("arm", "layers", "layers_skipped", "count", "ratio")
#: Mean layers skipped by which two arms may differ and still be compared at "the same" rate.
LIKE_RATES = 1.0
NOT_MEASURED = "not measured"


def pairs(run: Run) -> pd.DataFrame:
    """Every arm that can skip against every other one, on the held-out items.

    Returns:
        Columns `PAIR_COLUMNS`, two rows a pair (each arm in turn comes first). `layers_skipped`: mean per input;
        `patterns`: distinct sets of layers skipped, 1 for a fixed cut. `perplexity_ratio` below 1 says that `arm` is
        better than `other`; `verdict` whether its interval lies on one side of 1. `like_rates`: the rates differ by at
        most `LIKE_RATES` layers; where not, `note` says by how much. Empty where no held-out decisions were recorded.
    """
    skipped = {line["arm"]: line for line in eligibility(run, HELD_OUT).to_dict("records") if line["requests"]}
    arms = [arm for arm in run.manifest.arms if arm.name in skipped]
    lines = []
    for arm, other in permutations(arms, 2):
        mine, theirs = skipped[arm.name], skipped[other.name]
        gap = mine["layers_skipped"] - theirs["layers_skipped"]
        line = {
            "arm": arm.name, "layers_skipped": mine["layers_skipped"], "patterns": mine["patterns"],
            "other": other.name, "other_layers_skipped": theirs["layers_skipped"], "other_patterns": theirs["patterns"],
            "gap_layers": gap, "like_rates": abs(gap) <= LIKE_RATES, "verdict": NOT_MEASURED,
        }  # fmt: skip
        ratio = quality.perplexity_ratio(run, arm.name, other.name)
        if ratio is not None:
            line |= {"items": ratio.n, "perplexity_ratio": ratio.value, "low": ratio.low, "high": ratio.high}
            line["verdict"] = quality.verdict(ratio)
        lines.append(line | {"note": "; ".join(_notes(arm, other, gap))})
    return pd.DataFrame(lines, columns=list(PAIR_COLUMNS)).astype({"items": "Int64"})


def _notes(arm: ArmRecord, other: ArmRecord, gap: float) -> list[str]:
    found = []
    if abs(gap) > LIKE_RATES:
        found.append(f"not at the same rate: {arm.name} skips {abs(gap):.1f} layers {'more' if gap > 0 else 'fewer'}")
    for record in (arm, other):
        if record.synthetic:
            found.append(f"{record.name}: synthetic route")
        elif record.untrained:
            found.append(f"{record.name}: untrained router")
    return found


def matches(run: Run) -> pd.DataFrame:
    """What a baseline has to skip to stand beside each router of the run at the router's executed rate.

    Returns:
        Columns `MATCH_COLUMNS`, a row a router with held-out decisions. A baseline skips whole layers: `count` is the
        router's mean rounded (half a layer up), of `layers` in all, and `ratio` = count ÷ layers to four digits, which
        is what a fixed cut's count and a forced route's ratio are to be set to.
    """
    routers = _routers(run)
    found = eligibility(run, HELD_OUT)
    lines = []
    for line in found[(found["requests"] > 0) & found["arm"].isin(routers)].to_dict("records"):
        count = math.floor(line["layers_skipped"] + 0.5)
        ratio = round(count / line["layers"], 4)
        lines.append({**{key: line[key] for key in MATCH_COLUMNS[:3]}, "count": count, "ratio": ratio})
    return pd.DataFrame(lines, columns=list(MATCH_COLUMNS))


def _routers(run: Run) -> set[str]:
    """Arms whose decisions are made by a router of their own."""
    return {arm.name for arm in run.manifest.arms if arm.signals and not arm.synthetic}


def sentences(run: Run) -> list[str]:
    """The pairs in words, each once; where a baseline is not at its router's rate, what would bring it there.

    A router stands first before an arm that has none, and the arm with more patterns before one with fewer.
    """
    lines = [{str(key): value for key, value in line.items()} for line in pairs(run).to_dict("records")]
    routers = _routers(run)
    advice = {str(line["arm"]): _advice(line) for line in matches(run).to_dict("records")}

    def rank(name: str, patterns: int) -> tuple[bool, int]:
        return name in routers, patterns

    said = []
    for line in lines:
        mine, theirs = rank(line["arm"], line["patterns"]), rank(line["other"], line["other_patterns"])
        if mine > theirs or (mine == theirs and line["arm"] < line["other"]):
            said.append(_sentence(line))
            baseline = line["other"] not in routers and line["other_layers_skipped"]
            if not line["like_rates"] and line["arm"] in routers and baseline:
                said[-1] += f" {advice[line['arm']]}"
    return said


def _advice(match: Mapping[Hashable, Any]) -> str:
    arm, count, layers = match["arm"], match["count"], match["layers"]
    if not count:
        return f"{arm} skips less than half a layer, which nothing that skips whole layers can match."
    return f"A count of {count}, or a ratio of {match['ratio']:g}, skips as many as {arm}: {count} of {layers}."


def _sentence(line: dict[str, Any]) -> str:
    arm, other, ratio = line["arm"], line["other"], line["perplexity_ratio"]
    rates = f"{line['layers_skipped']:.1f} against {line['other_layers_skipped']:.1f} layers skipped"
    if line["verdict"] == NOT_MEASURED:
        return f"{arm} against {other}: {rates}, quality not measured."
    spread = "" if math.isnan(line["low"]) else f" [{line['low']:.3f}, {line['high']:.3f}]"
    doubt = "" if line["like_rates"] else " The rates differ by more than one layer, so this is no fair comparison."
    for name, skipped in ((arm, line["layers_skipped"]), (other, line["other_layers_skipped"])):
        if not line["like_rates"] and not skipped:
            doubt = f" {name} skips nothing here, so this is what skipping does to quality."
    verdict = _IN_WORDS[line["verdict"]]
    items = how_many(line["items"], "item")
    return f"{arm} is {verdict} {other}: perplexity × {ratio:.3f}{spread} over {items}, {rates}.{doubt}"


_IN_WORDS = {
    quality.BETTER: "better than",
    quality.WORSE: "worse than",
    quality.ALIKE: "not shown to differ from",
    quality.UNDECIDED: "on too few items to tell from",
}
