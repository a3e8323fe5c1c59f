"""Rule 6, before anything is timed: open equals the twin, repeats agree, company and order change nothing.

Runs on a handful of real prompts of different lengths, cut short, in the run's own dtype. Outputs are compared
relative to the largest logit; decisions must be equal, except for gates so close to their threshold that rounding
can flip them, and those are counted and printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profiler import methods
from profiler.arms import tree
from profiler.recorder import StepData
from profiler.records import ArmRecord, RuleRecord

#: Largest difference of logits, relative to the largest logit, that a dtype's rounding explains.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
#: Lengths the prompts are cut to; different, so that batches are ragged.
LENGTHS = (48, 33, 17, 5)
RULE = 6


@dataclass(frozen=True)
class _Seen:
    """Logits `[T, vocabulary]` and decisions (layer, site) → (choice, gate) of one request in one forward."""

    logits: Tensor
    choices: dict[tuple[int, str], list[int]]
    gates: dict[tuple[int, str], list[float]]


def _forward(handle: methods.Method, prompts: Sequence[Tensor], names: Sequence[str]) -> dict[str, _Seen]:
    """One uncached forward of a left-padded batch; what each request saw."""
    found: list[StepData] = []
    recorder = handle.recorder
    width = max(len(ids) for ids in prompts)
    ids_BT = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in prompts])
    mask_BT = torch.stack([torch.nn.functional.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in prompts])
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    handle.tracker.name(names)
    recorder.mode, recorder.sink = "record", found.append
    ragged = bool((mask_BT == 0).any())
    try:
        with torch.no_grad():
            out = handle.model(
                input_ids=ids_BT,
                attention_mask=mask_BT if ragged else None,
                position_ids=positions_BT if ragged else None,
                use_cache=False,
            )
    finally:
        recorder.mode, recorder.sink = "off", None
        handle.tracker.name(None)
    data = found[0]
    seen = {}
    for i, (name, ids) in enumerate(zip(names, prompts, strict=True)):
        # Token decisions lie row by row, [B·T], pads included; sequence decisions are one a batch row.
        choices, gates = {}, {}
        for decision in data.decisions:
            each = decision.choice.size // len(prompts)
            own = slice((i + 1) * each - min(each, len(ids)), (i + 1) * each)
            choices[decision.layer, decision.site] = decision.choice[own].tolist()
            gates[decision.layer, decision.site] = decision.gate[own].tolist()
        seen[name] = _Seen(out.logits[i, width - len(ids) :].float(), choices, gates)
    return seen


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference relative to the largest absolute value of `b`; NaN-safe (NaN reads as infinite)."""
    scale = b.abs().max().clamp(min=1e-12)
    return float(torch.nan_to_num((a - b).abs().max() / scale, nan=float("inf"), posinf=float("inf")))


def _compare(a: dict[str, _Seen], b: dict[str, _Seen]) -> tuple[float, int, int]:
    """(largest difference of logits, decisions that differ, gates within rounding of their threshold)."""
    worst, differing, near = 0.0, 0, 0
    for name, one in a.items():
        other = b[name]
        worst = max(worst, _difference(one.logits, other.logits))
        for place, choices in one.choices.items():
            moved = [abs(x - y) for x, y in zip(one.gates[place], other.gates[place], strict=True)]
            close = [
                abs(gate - 0.5) <= max(4 * max(moved, default=0.0), 1e-7) for gate in one.gates[place]
            ]  # a flip within four times what rounding was seen to move a gate is rounding
            near += sum(close)
            pairs = zip(choices, other.choices[place], close, strict=True)
            differing += sum(x != y and not c for x, y, c in pairs)
    return worst, differing, near


def verify(backbone: torch.nn.Module, arm: ArmRecord, token_ids: Sequence[list[int]]) -> list[RuleRecord]:
    """Check one arm on up to four prompts.

    Args:
        backbone: the unwrapped model, never changed.
        arm: the arm as described in the manifest.
        token_ids: prompts, as ids.

    Returns:
        One record a check; `passed` is False where the rule does not hold.
    """
    device = next(backbone.parameters()).device
    dtype = next(backbone.parameters()).dtype
    lengths = [min(n, len(ids)) for n, ids in zip(LENGTHS, token_ids, strict=False)]
    prompts = [torch.tensor(ids[:n], device=device) for ids, n in zip(token_ids, lengths, strict=False)]
    names = [f"verify-{i}" for i in range(len(prompts))]
    config = methods.configure(arm.method, arm.options)
    handle = tree(backbone, arm.method, config)  # type: ignore[arg-type]
    handle.recorder.attach(handle)
    bound = TOLERANCE[dtype]
    records = []

    first = _forward(handle, prompts, names)
    again = _forward(handle, prompts, names)
    worst, differing, near = _compare(first, again)
    records.append(
        _record(
            arm, "deterministic", worst == 0.0 and differing == 0 or worst <= bound and device.type != "cpu",
            f"the same batch twice: logits differ by {worst:.1e} of the largest, {differing} decisions differ",
            worst, differing, near,
        )
    )  # fmt: skip
    turned = _forward(handle, prompts[::-1], names[::-1])
    worst, differing, near = _compare(first, turned)
    records.append(_company(arm, "order", "the batch reversed", worst, differing, near, bound))
    alone: dict[str, _Seen] = {}
    for ids, name in zip(prompts, names, strict=True):
        alone |= _forward(handle, [ids], [name])
    worst, differing, near = _compare(first, alone)
    records.append(_company(arm, "company", "each request alone", worst, differing, near, bound))

    opened = tree(backbone, arm.method, config)  # type: ignore[arg-type]
    opened.recorder.attach(opened)
    opened.force("open")
    twin_name = opened.numeric_twin
    twin = tree(backbone, twin_name, methods.configure(twin_name, {}))  # type: ignore[arg-type]
    twin.recorder.attach(twin)
    mine, theirs = _forward(opened, prompts, names), _forward(twin, prompts, names)
    worst = max(_difference(mine[name].logits, theirs[name].logits) for name in names)
    records.append(
        _record(
            arm, "open equals twin", worst <= bound,
            f"forced open against {twin_name}: logits differ by {worst:.1e} of the largest (allowed {bound:.0e})",
            worst, 0, 0,
        )
    )  # fmt: skip
    return records


def _company(
    arm: ArmRecord, name: str, what: str, worst: float, differing: int, near: int, bound: float
) -> RuleRecord:
    detail = (
        f"{what}: logits differ by {worst:.1e} of the largest (allowed {bound:.0e}), {differing} decisions differ, "
        f"{near} gates within rounding of their threshold"
    )
    return _record(arm, name, worst <= bound and differing == 0, detail, worst, differing, near)


def _record(
    arm: ArmRecord, name: str, passed: bool, detail: str, worst: float, differing: int, near: int
) -> RuleRecord:
    figures = {"logit_difference": worst, "decisions_differing": float(differing), "gates_near_threshold": float(near)}
    return RuleRecord(rule=RULE, name=name, arm=arm.name, passed=passed, detail=detail, figures=figures)


