"""What the tests of HeRo share: tiny models wrapped and stirred, and their comparison with `hero_reference`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from profiler.execution.history_router import Scores
from profiler.methods.hero import Hero
from tests.profiler.methods.hero_reference import Reference, Row, hero_forward
from tests.profiler.tiny import exact_model, prompts_of, wrapped

SIGNALS = ("p", "m", "a", "b", "d", "gamma", "nu")
SCORES = ("g", *SIGNALS)


def routed(shape: str = "llama", model: Any = None, disturbed: bool = True, **options: Any) -> tuple[Hero, list[Any]]:
    """A wrapped tiny model, its router and adapters random, so that about half of the tokens take the FFN."""
    handle, steps = wrapped(exact_model(shape) if model is None else model, "hero", **options)
    if disturbed:
        stir(cast(Hero, handle))
        steps.clear()
    return cast(Hero, handle), steps


def stir(handle: Hero, seed: int = 0) -> None:
    """Random values in all that is added, then a last bias that brings the median gate to one half."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in handle.trainables().values():
            scale = 1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
        with scores_of(handle) as seen:
            handle.model(input_ids=torch.tensor(prompts_of([32], seed=99)))
        logits = torch.stack([scores.a.nan_to_num() + scores.b for scores in seen])
        cast(Any, handle.router.f_psi[2]).bias.sub_(logits.median())


@contextmanager
def scores_of(handle: Hero) -> Iterator[list[Scores]]:
    """The scores each routable layer's gate gives, in the router's own precision, in the order they are made."""
    seen: list[Scores] = []
    hooks = [gate.register_forward_hook(lambda _, __, scores: seen.append(scores)) for gate in handle._gates]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def reference(handle: Hero, ids: Sequence[int], **options: Any) -> Reference:
    """What the reference says of one sequence, with the weights the handle has."""
    weights = {name: tensor.detach().double() for name, tensor in handle.model.named_parameters()}
    added = {name: tensor.detach().double() for name, tensor in handle.trainables().items()}
    given = {
        "variant": handle.options.variant,
        "threshold": handle.options.threshold,
        "shuffle_seed": handle.config.seed,
        **options,
    }
    return hero_forward(weights, handle.model.config, added, ids, handle.routable, **given)


def columns(rows: list[list[Row]], name: str) -> Tensor:
    return torch.tensor([[getattr(row, name) for row in layer] for layer in rows], dtype=torch.float64)


def apart(mine: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value; NaN only where NaN is wanted."""
    assert mine.shape == wanted.shape
    assert torch.equal(mine.isnan(), wanted.isnan())
    mine, wanted = mine.detach().nan_to_num().double(), wanted.nan_to_num().double()
    return float((mine - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def assert_equal(handle: Hero, prompt: list[int], found: Reference, bound: float = 1e-9) -> None:
    """One sequence through the model against the reference: logits, choices and every signal."""
    with scores_of(handle) as seen:
        logits = handle.model(input_ids=torch.tensor([prompt])).logits[0]
    assert apart(logits, found.logits) < bound
    for name in SCORES:
        mine = torch.stack([getattr(scores, name) for scores in seen])
        assert apart(mine, columns(found.rows, name)) < bound, name
    choices = torch.stack([scores.g >= handle.threshold for scores in seen])
    assert torch.equal(choices, columns(found.rows, "ffn").bool())
