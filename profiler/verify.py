"""Rules 1 and 6, before anything is timed: open equals the twin, repeats agree, company and order change nothing.

Runs on a few real prompts of different lengths, cut short, in the run's own dtype: as one ragged batch through a
cached prompt step and one decode step, so that pads, positions and the cache are in it. Outputs are compared relative
to the largest logit. Decisions must be equal; where both gates lie so close to their threshold that the dtype's
rounding explains a flip, the flip and the rest of that request, which follows from it, are left out and counted.

Not here: equality to the last digit, which the tests show in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profiler import methods
from profiler.arms import tree
from profiler.ranks import Ranks
from profiler.recorder import StepData
from profiler.records import ArmRecord, RuleRecord
from profiler.stepdata import divided, divided_as_decided, executed_as_decided, tally

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest difference of logits, relative to the largest logit, and of a gate, that a dtype's rounding explains.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
#: Lengths the prompts are cut to; different, so that batches are ragged.
LENGTHS = (24, 17, 9, 3)


@dataclass(frozen=True)
class _Decided:
    """What one request was given at one place of one step: a sequence's one decision, or one a token.

    A choice is an index, or a list of them where a decision takes several.
    """

    place: str
    choices: list[Any]
    gates: list[float]


@dataclass
class _Seen:
    """What one request saw: logits `[tokens + 1, vocabulary]`, and its decisions in the order they were made."""

    logits: Tensor
    decided: list[_Decided] = field(default_factory=list)


@dataclass
class _Compared:
    """How two passes over the same requests differ. `difference` is of logits, relative to the largest."""

    difference: float = 0.0
    decisions: int = 0
    flips: int = 0
    near: int = 0


class _Subject:
    """One wrapped tree of an arm, and what rule 1 found wrong in all that ran through it."""

    def __init__(self, backbone: PreTrainedModel, arm: ArmRecord, ranks: Ranks) -> None:
        self.arm, self.ranks = arm, ranks
        self.handle = tree(backbone, arm.method, methods.configure(arm.method, arm.options))
        self.handle.recorder.attach(self.handle)
        self.steps = 0
        self.problems: list[str] = []

    def see(self, prompts: dict[str, Tensor]) -> dict[str, _Seen]:
        """Run the prompts as one left-padded batch: the prompt step, then a decode step that feeds each first token.

        Args:
            prompts: request → `[tokens]` ids; the batch has their order.
        """
        steps: list[StepData] = []
        recorder, tracker = self.handle.recorder, self.handle.tracker
        tracker.name(list(prompts))
        recorder.mode, recorder.sink = "record", steps.append
        try:
            logits = _forward(self.handle, list(prompts.values()))
        finally:
            recorder.mode, recorder.sink = "off", None
            tracker.name(None)
        for data in steps:
            self.steps += 1
            self.problems += executed_as_decided(data, self.arm)
        if divided(self.arm):
            for of_step in zip(*self.ranks.gather([tally(data, self.arm) for data in steps]), strict=True):
                self.problems += divided_as_decided(of_step, self.arm)
        return {
            request: _Seen(logits[row, -len(ids) - 1 :], _of_row(steps, row, len(prompts), len(ids)))
            for row, (request, ids) in enumerate(prompts.items())
        }


def _forward(handle: methods.Method, prompts: Sequence[Tensor]) -> Tensor:
    """Logits `[B, longest + 1, vocabulary]` of a left-padded batch and of one decode step after it."""
    width = max(len(ids) for ids in prompts)
    ids_BT = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in prompts])
    real_BT = torch.stack([torch.nn.functional.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in prompts])
    first_B1 = torch.stack([ids[:1] for ids in prompts])
    every_BT, all_real_BT = torch.cat([ids_BT, first_B1], dim=1), torch.cat([real_BT, torch.ones_like(first_B1)], dim=1)
    positions_BT = (all_real_BT.cumsum(1) - 1).clamp(min=0)
    cached = handle.keeps_cache
    fed = slice(width, None) if cached else slice(None)  # without a cache a step is given the whole sequences
    with torch.no_grad():
        prompt = handle.model(
            input_ids=ids_BT, attention_mask=real_BT, position_ids=positions_BT[:, :width], use_cache=cached
        )
        decode = handle.model(
            input_ids=every_BT[:, fed],
            attention_mask=all_real_BT,
            position_ids=positions_BT[:, fed],
            cache=prompt.cache,
            use_cache=cached,
        )
    return torch.cat([prompt.logits, decode.logits[:, -1:]], dim=1)


def _real(logits: Tensor, prompts: Sequence[Tensor]) -> Tensor:
    """`[rows, vocabulary]` of the rows that are no pads."""
    return torch.cat([logits[row, -len(ids) - 1 :] for row, ids in enumerate(prompts)])


def _of_row(steps: Sequence[StepData], row: int, batch: int, tokens: int) -> list[_Decided]:
    """The decisions of one batch row. Those of tokens lie row by row, `[B · T]`, pads first in each."""
    found = []
    for number, data in enumerate(steps):
        for decision in data.decisions:
            each = len(decision.choice) // batch
            own = slice((row + 1) * each - min(each, tokens), (row + 1) * each)
            place = f"step {number} layer {decision.layer} {decision.site}"
            found.append(_Decided(place, decision.choice[own].tolist(), decision.gate[own].tolist()))
    return found


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference relative to the largest absolute value of `b`; not a number reads as infinite."""
    a, b = a.double(), b.double()
    relative = (a - b).abs().max() / b.abs().max().clamp(min=1e-12)
    return float(torch.nan_to_num(relative, nan=float("inf")))


def _compare(a: dict[str, _Seen], b: dict[str, _Seen], bound: float, threshold: float) -> _Compared:
    found = _Compared()
    for request, one in a.items():
        other = b[request]
        found.near += sum(abs(gate - threshold) <= bound for d in one.decided for gate in d.gates)
        apart = _first_apart(one.decided, other.decided)
        if apart is None:
            found.difference = max(found.difference, _difference(one.logits, other.logits))
        elif all(abs(gate - threshold) <= bound for gate in apart):
            found.flips += 1
        else:
            found.decisions += 1
    return found


def _first_apart(one: Sequence[_Decided], other: Sequence[_Decided]) -> tuple[float, float] | None:
    """Both gates of the first decision that is not the same; what comes later follows from it."""
    for mine, theirs in zip(one, other, strict=True):
        for x, y, gate, its in zip(mine.choices, theirs.choices, mine.gates, theirs.gates, strict=True):
            if x != y:
                return gate, its
    return None


def verify(
    backbone: PreTrainedModel,
    arm: ArmRecord,
    token_ids: Sequence[list[int]],
    at: Callable[[float], None] = lambda share: None,
    ranks: Ranks | None = None,
) -> list[RuleRecord]:
    """Check one arm on up to four prompts; every rank on the same ones.

    Args:
        backbone: the unwrapped model, never changed.
        arm: the arm as described in the manifest.
        token_ids: prompts, as ids.
        at: told the share of the checks that is done.
        ranks: those that share the arm's experts; None for one process.

    Returns:
        One record a check; `passed` is False where the rule does not hold.
    """
    weights = next(backbone.parameters())
    bound = TOLERANCE[weights.dtype]
    prompts = {
        f"verify-{i}": torch.tensor(ids[:length], device=weights.device)
        for i, (ids, length) in enumerate(zip(token_ids, LENGTHS, strict=False))
    }
    ranks = ranks or Ranks()
    subject = _Subject(backbone, arm, ranks)
    threshold = subject.handle.threshold
    first = subject.see(prompts)
    at(1 / 6)

    again = _compare(first, subject.see(prompts), bound, threshold)
    at(2 / 6)
    exact = again.difference == 0 and again.flips == 0  # a GPU may add in another order each time
    alike = exact if weights.device.type == "cpu" else again.difference <= bound
    turned = _compare(first, subject.see(dict(reversed(prompts.items()))), bound, threshold)
    at(3 / 6)
    alone: dict[str, _Seen] = {}
    for request, ids in prompts.items():
        alone |= subject.see({request: ids})
    at(5 / 6)
    apart = _compare(first, alone, bound, threshold)
    return [
        _record(arm, "deterministic", "the same batch twice", again, alike and again.decisions == 0, bound),
        _record(arm, "order", "the batch reversed", turned, _holds(turned, bound), bound),
        _record(arm, "company", "each request alone", apart, _holds(apart, bound), bound),
        _open_equals_twin(backbone, arm, prompts, bound, ranks),
        RuleRecord(
            rule=1,
            name="rows executed = gates recorded",
            arm=arm.name,
            passed=not subject.problems,
            detail=subject.problems[0] if subject.problems else f"equal in {subject.steps} steps of ragged batches",
            figures={"steps": float(subject.steps), "differences": float(len(subject.problems))},
        ),
    ]


def _holds(found: _Compared, bound: float) -> bool:
    return found.difference <= bound and found.decisions == 0


def _open_equals_twin(
    backbone: PreTrainedModel, arm: ArmRecord, prompts: dict[str, Tensor], bound: float, ranks: Ranks
) -> RuleRecord:
    opened = _Subject(backbone, arm, ranks).handle
    opened.force("open")
    twin = tree(backbone, opened.numeric_twin, methods.configure(opened.numeric_twin, {}))
    opened.adapt_twin(twin.model)
    ids = list(prompts.values())
    worst = _difference(*(_real(_forward(handle, ids), ids) for handle in (opened, twin)))
    return RuleRecord(
        rule=6,
        name="open equals twin",
        arm=arm.name,
        passed=worst <= bound,
        detail=f"forced open against {opened.numeric_twin}: logits differ by {worst:.1e} of the largest "
        f"(allowed {bound:.0e})",
        figures={"logit_difference": worst},
    )


def _record(arm: ArmRecord, name: str, what: str, found: _Compared, passed: bool, bound: float) -> RuleRecord:
    return RuleRecord(
        rule=6,
        name=name,
        arm=arm.name,
        passed=passed,
        detail=f"{what}: logits differ by {found.difference:.1e} of the largest (allowed {bound:.0e}); requests "
        f"decided differently: {found.decisions}, by rounding of a gate: {found.flips}; gates within rounding of "
        f"their threshold: {found.near}",
        figures={
            "logit_difference": found.difference,
            "requests_differing": float(found.decisions),
            "flips_by_rounding": float(found.flips),
            "gates_near_threshold": float(found.near),
        },
    )
