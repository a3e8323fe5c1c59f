"""A threshold such that a wanted share of decisions skips: what makes arms comparable at one executed rate.

Gates of later layers depend on what earlier ones skipped, so the quantile of the gates seen under one threshold is not
yet the threshold that gives its share. It is the next guess, and the share is counted anew, until it is met:

    τ ← the value between the two gates that a share `wanted` of all gates lies below;     stop at |share − wanted| ≤ ε

Where a guess leaves the interval in which the answer must lie, its middle is taken.

(ours) The inputs are those that quality is measured on, where it is: a rate found on other text is not the rate there
(seen to be off by ten points and more, and by more for one variant than for another), and arms that differ in rate
cannot be compared. Only decisions are looked at, never a likelihood; the record says how many inputs are held out.

Not here: what an arm's rate turned out to be, which is what arms are compared by (`analysis.matched`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from profiler import checkpoints, methods
from profiler.arms import tree
from profiler.errors import InputError
from profiler.quality import Encode, Item
from profiler.recorder import StepData
from profiler.records import CalibrationRecord, Choice
from profiler.training_data import JOINT
from workloads.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Prompts looked at, at most, and tokens of each, where there are no items.
PROMPTS, TOKENS = 32, 128
#: How near the share must come, and how often it is counted before the nearest is taken.
TOLERANCE, ROUNDS = 0.002, 16
#: A share further off than this is no share that was asked for.
TOO_FAR = 0.05


@dataclass(frozen=True)
class CalibrationPrompts:
    """Texts as token ids; `held_out` of them are items of the quality pass."""

    ids: list[list[int]]
    held_out: int


def calibration_prompts(prompts: Sequence[Prompt], items: Sequence[Item], encode: Encode) -> CalibrationPrompts:
    """The items, each with its continuation; where there are none, prompts with their references, of each domain in
    turn."""
    if items:
        return CalibrationPrompts([[*item.prefix, *item.continuation] for item in items], len(items))
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    in_turn = [prompt for each in zip_longest(*domains.values()) for prompt in each if prompt is not None]
    found = [
        (encode(prompt.text) + (encode(JOINT + prompt.reference) if prompt.reference is not None else []))[:TOKENS]
        for prompt in in_turn
    ]
    ids = [each for each in found if each][:PROMPTS]
    return CalibrationPrompts(ids, 0)


def met(
    backbone: PreTrainedModel,
    name: str,
    method: str,
    options: dict[str, Any],
    prompts: CalibrationPrompts,
    report: Callable[[str], None] = lambda what: None,
    share: Callable[[float], None] = lambda done: None,
) -> tuple[dict[str, Any], CalibrationRecord | None]:
    """An arm's options with the rate it asks for, if it does, replaced by the threshold that gives it.

    Args:
        backbone: the unwrapped model, never changed.
        name, method, options: of the arm.
        prompts: not looked at where no rate is asked for.
        report: told what is being done.
        share: told how much of it is done, at least.

    Raises:
        InputError: as `arms.build`; or no threshold comes near the rate.
    """
    option = methods.load(method).rate_option
    if option is None or options.get(option) is None:
        return options, None
    resolved = checkpoints.resolve(method, options, backbone)
    wanted = float(getattr(methods.configure(method, resolved, where=f"arms.{name}."), option))
    resolved = {key: value for key, value in resolved.items() if key != option}
    report(f"calibrating {name}: {option} {wanted:g}")
    record = _search(backbone, method, resolved, option, wanted, prompts, share)
    if abs(record.achieved - wanted) > TOO_FAR:
        raise InputError(
            f"arms.{name}.{option}: no threshold was found at which {wanted:.1%} of decisions skip; the nearest, "
            f"{record.threshold:.4g}, gives {record.achieved:.1%} of {record.decisions:,}. A router whose gates are "
            "all alike, as before training, has no such threshold"
        )
    return {**resolved, "threshold": record.threshold}, record


def _search(
    backbone: PreTrainedModel,
    method: str,
    options: dict[str, Any],
    option: str,
    wanted: float,
    prompts: CalibrationPrompts,
    share: Callable[[float], None],
) -> CalibrationRecord:
    low, high = 0.0, 1.0
    tried: list[tuple[float, float, float]] = []
    threshold: float | None = None
    decisions = 0
    while len(tried) < ROUNDS:
        tried_with = options if threshold is None else {**options, "threshold": threshold}
        used, gates, skipped = _decided(backbone, method, tried_with, prompts.ids, _of_round(share, len(tried)))
        decisions = len(gates)
        tried.append((abs(skipped - wanted), used, skipped))
        if abs(skipped - wanted) <= TOLERANCE:
            break
        low, high = (low, min(high, used)) if skipped > wanted else (max(low, used), high)
        threshold = _between(gates, wanted)
        if not low < threshold < high:
            threshold = (low + high) / 2
        if not low < threshold < high:  # no number is left between them
            break
    _, used, skipped = min(tried)
    return CalibrationRecord(
        option=option,
        wanted=wanted,
        achieved=skipped,
        threshold=used,
        decisions=decisions,
        prompts=len(prompts.ids),
        tokens=sum(map(len, prompts.ids)),
        rounds=len(tried),
        held_out=prompts.held_out,
    )


def _of_round(share: Callable[[float], None], before: int) -> Callable[[float], None]:
    """What a round tells its own share to."""
    return lambda part: share((before + part) / ROUNDS)


def _between(gates: NDArray[np.float64], share: float) -> float:
    """The middle between the two neighbouring gates that a share lies below."""
    ordered = np.sort(gates)
    place = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    return float(ordered[place - 1] + ordered[place]) / 2


def _decided(
    backbone: PreTrainedModel,
    method: str,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    share: Callable[[float], None],
) -> tuple[float, NDArray[np.float64], float]:
    """The threshold an arm decides by, its gates on the prompts, and the share of decisions that skip."""
    handle = tree(backbone, method, methods.configure(method, options))
    handle.recorder.attach(handle)
    steps: list[StepData] = []
    handle.recorder.mode, handle.recorder.sink = "record", steps.append
    with torch.no_grad():
        for number, ids in enumerate(prompts):
            share(number / len(prompts))
            handle.model(input_ids=torch.tensor([ids], device=backbone.device), use_cache=False, logits_to_keep=1)
    idle = _skipping(handle.choices(handle.model, handle.config))
    made = [decision for data in steps for decision in data.decisions]
    gates = np.concatenate([decision.gate for decision in made]).astype(np.float64)
    skipped = sum(int(np.isin(d.choice, idle.get((d.layer, d.site), [])).sum()) for d in made)
    return handle.threshold, gates, skipped / len(gates)


def _skipping(choices: Iterable[Choice]) -> dict[tuple[int, str], list[int]]:
    """The choices of each site that run nothing of the backbone."""
    found: dict[tuple[int, str], list[int]] = {}
    for choice in choices:
        found.setdefault((choice.layer, choice.site), []).extend([choice.index] * (not choice.backbone_parameters))
    return found
