"""Arms that tests run over, and what a request sees in a batch: for the contract and for each method's own tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from profiler import methods
from profiler.recorder import StepData
from tests.profiler.tiny import SHAPES, STOCK_SHAPES, disturb, exact_model, padded, wrapped

NEW_TOKENS = 3


@dataclass(frozen=True)
class Arm:
    """A method with options; `disturbed` has random values in all that the method adds."""

    method: str
    options: dict[str, Any]
    disturbed: bool = False

    def __str__(self) -> str:
        options = ",".join(str(value) for value in self.options.values()).replace(" ", "")
        return "-".join(part for part in (self.method, options, "disturbed" * self.disturbed) if part)

    def wrap(self, shape: str | None = None) -> tuple[methods.Method, list[StepData]]:
        handle, steps = wrapped(exact(shape or shapes_of(self.method)[0]), self.method, **self.options)
        if self.disturbed:
            disturb(handle)
        return handle, steps


def shapes_of(method: str) -> list[str]:
    """Shapes of the models that a method works on, the one to take where any will do first."""
    return list(STOCK_SHAPES if methods.load(method).own_experts else SHAPES)


def arms() -> list[Arm]:
    """Every method as it comes, with random values in what it adds, and under forced routes where it knows them."""
    found = []
    for name in methods.names():
        method = methods.load(name)
        found.append(Arm(name, {}))
        if method.scope != "none":
            found.append(Arm(name, {}, disturbed=True))
        if "gates" in method.Config.model_fields:
            forced = [("random", 0.5), ("middle", 0.3), ("shared", 1.0)]
            found += [Arm(name, {"gates": {"forced": {"ratio": r, "pattern": p, "seed": 4}}}) for p, r in forced]
        if method.own_experts:
            found.append(Arm(name, {"experts": "all"}))
    return found


#: Arms that decide anew in each step and put keys and values of skipped blocks into the cache.
PROJECTING = [
    Arm("layerroute", {"kv_policy": "project"}, disturbed=True),
    Arm("layerroute", {"kv_policy": "project", "gates": {"forced": {"ratio": 0.5, "pattern": "random", "seed": 4}}}),
]


@cache
def exact(shape: str = "llama") -> PreTrainedModel:
    """`exact_model(shape)`, made once; not to be changed."""
    return exact_model(shape)


@dataclass(frozen=True)
class Seen:
    """What one request saw: logits of its real rows, prompt then decode steps; its decisions by step.

    A decision is a choice, or a list of them where one takes several.
    """

    logits: Tensor
    decisions: list[dict[tuple[int, str], list[Any]]]


def decode(
    handle: methods.Method,
    steps: list[StepData],
    prompts: list[list[int]],
    side: str,
    names: list[str] | None = None,
    new: int = NEW_TOKENS,
) -> dict[str, Seen]:
    """Prefill and a few teacher-forced decode steps with a cache, by request. The last logits of an empty prompt's
    row mean nothing and are left out."""
    names = names or [f"request-{i}" for i in range(len(prompts))]
    steps.clear()
    inputs = padded(prompts, side)
    mask, lengths = inputs["attention_mask"], torch.tensor([len(prompt) for prompt in prompts])
    handle.tracker.name(names)
    try:
        with torch.no_grad():
            out = handle.model(**inputs, use_cache=True)
            logits = [[out.logits[i][mask[i].bool()] for i in range(len(prompts))]]
            for k in range(new):
                fed, position = torch.tensor([[continuation(name, k)] for name in names]), (lengths + k)[:, None]
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
                out = handle.model(
                    input_ids=fed, attention_mask=mask, position_ids=position, cache=out.cache, use_cache=True
                )
                logits.append(list(out.logits))
    finally:
        handle.tracker.name(None)
    return {
        name: Seen(torch.cat([step[i] for step in logits]), [_decisions(step, i) for step in steps])
        for i, name in enumerate(names)
    }


def continuation(name: str, index: int) -> int:
    """The token fed to a request at one decode step: the same in any company."""
    return (sum(name.encode()) * 7 + index * 13) % 96 + 1


def _decisions(step: StepData, row: int) -> dict[tuple[int, str], list[Any]]:
    """Row `row`'s decisions: one a sequence, or one a real token."""
    sequences = step.sequences
    found = {}
    for decision in step.decisions:
        if len(decision.choice) == len(sequences):
            own = decision.choice[row : row + 1]
        else:
            own = decision.choice[row * sequences.width : (row + 1) * sequences.width]
            real = sequences.real_BT
            own = own if real is None else own[real[row].numpy()]
        found[decision.layer, decision.site] = own.tolist()
    return found
