"""Counted rungs of the ladder: parameters, FLOPs and weight bytes that were skipped (MEASURES, "The ladder").

From executed rows times the costs of the choices they took; nothing here was timed. Which arm stands against which,
and how the rungs are laid out, is `ladder`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from analysis.wording import how_many

NAN = float("nan")


@dataclass(frozen=True)
class Figure:
    """One value with what it was made of; a bare `Figure(why=[...])` is an undefined one."""

    value: float = NAN
    low: float = NAN
    high: float = NAN
    n: int = 0
    numerator: float = NAN
    denominator: float = NAN
    unit: str = ""
    meaning: str = ""
    why: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, object]:
        return {k: v for k, v in vars(self).items() if k != "why"}


def parameter_skip(lines: pd.DataFrame, choices: pd.DataFrame) -> dict[str, Figure]:
    """Four variants of the mean share of parameters that took no part in a token (MEASURES, "The ladder").

    The share of token rows that ran a choice: at a decision site, rows counted ÷ token rows of the recorded steps.
    A site with one choice always runs its backbone; what was added there (a router) takes part in all tokens of the
    steps in which it ran, however few pooled rows it saw.
    """
    rows_of_step = lines.groupby("step")["step_rows"].first()
    tokens = int(rows_of_step.sum())
    key = ["layer", "site", "choice"]
    ran = lines.groupby(key).agg(rows=("rows", "sum"), present=("step_rows", "sum")).reset_index()
    sites = choices.merge(ran, on=key, how="left").fillna({"rows": 0, "present": 0})
    decides = sites["options"] > 1
    share = (sites["rows"] / tokens).where(decides, sites["present"] / tokens)
    took_part = sites["backbone_parameters"] * share.where(decides, 1.0)
    # A site's choices are alternatives to one set of weights: it holds as many as its largest choice runs, so that
    # the sites add up to the model's parameters.
    backbone = float(sites.groupby(["layer", "site"])["backbone_parameters"].max().sum())
    skipped = backbone - float(took_part.sum())
    replacement, overhead = (sites[f"{kind}_parameters"] for kind in ("replacement", "overhead"))
    ran_replacement, ran_overhead = float((replacement * share).sum()), float((overhead * share).sum())
    added = float((replacement + overhead).sum())
    idle = added - ran_replacement - ran_overhead
    figures = {
        "gross": (skipped, backbone, "mean backbone parameters skipped a token ÷ backbone parameters"),
        "adapters_only": (
            skipped - ran_replacement,
            backbone,
            "mean backbone parameters skipped a token, less replacements that ran ÷ backbone parameters",
        ),
        "net": (
            skipped - ran_replacement - ran_overhead,
            backbone,
            "mean backbone parameters skipped a token, less replacements, routers and LoRA that ran "
            "÷ backbone parameters",
        ),
        "augmented": (
            skipped + idle,
            backbone + added,
            "mean parameters of backbone and additions idle a token ÷ backbone and added parameters",
        ),
    }
    return {
        variant: Figure(
            value=above / below if below else NAN,
            n=tokens,
            numerator=above,
            denominator=below,
            unit="parameters",
            meaning=meaning,
        )
        for variant, (above, below, meaning) in figures.items()
    }


@dataclass(frozen=True)
class Work:
    """Work of the steps that arm and twin have in common, or of the arm's against its own full execution.

    `steps`: one row a step, columns executed, padded, full_attention, nominal, bytes and `twin_` of the same (NaN
    where unknown). `against`: what the denominator is, in words.
    """

    steps: pd.DataFrame
    against: str
    why: list[str]


def _work_of_steps(lines: pd.DataFrame) -> pd.DataFrame:
    """FLOPs and weight bytes of each step; `fixed` and `fixed_bytes` are the part at sites with one choice."""
    entered = lines["rows"] * lines["flops_per_row"]
    executed = entered + lines["context"] * lines["flops_per_context"]
    fixed = lines["options"] == 1
    read = lines["weight_bytes"].where(lines["rows"] + lines["padded"] > 0, 0)
    frame = lines.assign(
        executed=executed,
        padded=entered + lines["padded"] * lines["flops_per_row"] + lines["context_full"] * lines["flops_per_context"],
        full_attention=entered + lines["context_full"] * lines["flops_per_context"],
        bytes=read,
        fixed=executed.where(fixed, 0),
        fixed_bytes=read.where(fixed, 0),
    )
    first = dict.fromkeys(("repeat", "index", "step_rows", "step_context"), "first")
    summed = dict.fromkeys(("executed", "padded", "full_attention", "bytes", "fixed", "fixed_bytes"), "sum")
    return frame.groupby("step", as_index=False).agg({**first, **summed})


def against_twin(
    lines: pd.DataFrame,
    twin_lines: pd.DataFrame | None,
    choices: pd.DataFrame,
    asked: pd.Series[float] | None,
    twin: str | None,
) -> Work:
    """Pair the arm's recorded steps with the twin's by (repeat, index), or with its own full execution.

    Args:
        lines, twin_lines: executed rows with their choices' costs; None where there is no twin or it recorded none.
        choices: the arm's.
        asked: FLOPs the gates asked for, by step; None where no gates were recorded.
        twin: the twin's name.
    """
    mine = _work_of_steps(lines)
    decides = choices[choices["options"] > 1]
    if decides.empty:
        mine["nominal"] = mine["executed"]
    elif asked is None:
        mine["nominal"] = NAN
    else:
        mine["nominal"] = mine["fixed"] + mine["step"].map(asked)
    if twin_lines is not None:
        theirs = _work_of_steps(twin_lines)
        both = mine.merge(
            theirs.add_prefix("twin_"), left_on=["repeat", "index"], right_on=["twin_repeat", "twin_index"]
        )
        if not both.empty:
            alone = len(mine) + len(theirs) - 2 * len(both)
            why = [f"{how_many(alone, 'recorded step')} without a partner left out"] if alone else []
            return Work(both, "the twin's", why)
    # No twin to compare with: what the arm would have run had every decision taken its fullest choice.
    fullest = decides.sort_values(["backbone_parameters", "flops_per_row"]).groupby(["layer", "site"]).tail(1)
    mine["twin_executed"] = (
        mine["fixed"]
        + mine["step_rows"] * fullest["flops_per_row"].sum()
        + mine["step_context"] * fullest["flops_per_context"].sum()
    )
    mine["twin_bytes"] = mine["fixed_bytes"] + fullest["weight_bytes"].sum()
    mine[["twin_padded", "twin_full_attention"]] = NAN
    missing = "no twin" if twin is None else f"twin {twin!r} recorded no step that pairs"
    return Work(mine, "its own full execution's", [missing, "skips are against the arm's own full execution"])


_FLOP_MEANING = {
    "executed": "FLOPs of rows that entered each product, causal attention",
    "padded": "FLOPs with pads and every key multiplied",
    "nominal": "FLOPs the recorded gates asked for",
    "full_attention": "FLOPs of real rows, full-T² attention",
}


def flop_skip(work: Work, variant: str) -> Figure:
    """1 − the arm's FLOPs ÷ the twin's, over the paired steps, under one of the conventions of `_FLOP_MEANING`."""
    own, twin = work.steps[variant], work.steps["twin_executed" if variant == "nominal" else f"twin_{variant}"]
    meaning = f"1 − {_FLOP_MEANING[variant]} ÷ {work.against}"
    if bool(own.isna().any()):
        return Figure(unit="FLOPs", meaning=meaning, why=["gates were not recorded for every step"])
    if bool(twin.isna().any()):
        return Figure(unit="FLOPs", meaning=meaning, why=["needs a twin: what the skipped rows' pads are is unknown"])
    return _skip(own, twin, "FLOPs", meaning, work.why)


def weight_byte_skip(work: Work) -> Figure:
    """1 − mean weight bytes a step reads ÷ the twin's. One row is enough for a step to read a weight."""
    meaning = f"1 − mean bytes of weights a step reads (if any row of the batch uses them) ÷ {work.against}"
    return _skip(work.steps["bytes"], work.steps["twin_bytes"], "bytes", meaning, work.why, mean=True)


def _skip(
    own: pd.Series[float], twin: pd.Series[float], unit: str, meaning: str, why: list[str], *, mean: bool = False
) -> Figure:
    above, below = (float(s.mean() if mean else s.sum()) for s in (own, twin))
    value = 1 - above / below if below else NAN
    return Figure(value, n=len(own), numerator=above, denominator=below, unit=unit, meaning=meaning, why=why)
