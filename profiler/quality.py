"""Held-out quality: how likely every arm finds the same continuations, without its gates having seen them.

An item is a prompt and a continuation: the prompt's reference where it has one, else the second half of the prompt
itself. A gate that pools over a whole text has seen the words being scored, so in mode `prefix` the prompt goes into a
cache alone, gates are decided there and frozen, and the continuation is then scored in one forward. Mode `whole` gates
on all of it at once, as training does; it leaks and is there to show by how much. A router that decides token by token,
from no token to come, decides alike in both.

    perplexity = exp(Σ −log p(token | all before it) ÷ number of tokens)         over continuation tokens, in nats

Items go through one at a time, so no company and no padding can matter. Prompt and continuation are tokenised apart:
the boundary between them is then exact, whatever a tokenizer would merge across it.

Where a prompt has choices, each is scored like a continuation, from gates that saw the prompt alone, and the arm takes
the one with the largest mean log p a token; lengths differ, and a sum would favour the short.

Not here: going through all items and arms of a run (`quality_pass`), intervals and comparisons (`analysis.quality`),
free-running generation and its accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from profiler import methods
from profiler.errors import InputError
from profiler.execution.kv import seal
from profiler.execution.likelihood import token_nll
from profiler.training_data import JOINT
from workloads.prompts import Prompt, lead, load_prompts
from workloads.spec import QualitySpec

Mode = Literal["prefix", "whole"]

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Item:
    """One item. `prefix` is what gates may see, `continuation` what is scored; both hold at least one token.

    `referenced`: the continuation is the prompt's reference, not its own second half. `choices`: token ids of the
    answers to choose from, none cut, `right` the reference's place among them; empty where the prompt has none.
    """

    id: str
    domain: str
    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    text: str
    referenced: bool = False
    choices: tuple[tuple[int, ...], ...] = ()
    right: int = 0


@dataclass(frozen=True)
class Scored:
    """An item's continuation, token by token: −log p in nats (float64), and whether no token was likelier."""

    nll_N: NDArray[np.float64]
    hit_N: NDArray[np.bool_]

    @property
    def nll(self) -> float:
        """Σ −log p."""
        return float(self.nll_N.sum())


def load_items(spec: QualitySpec, encode: Encode, positions: int | None) -> list[Item]:
    """The items a spec asks for, cut to its `max_tokens`.

    An item whose prompt alone fills `max_tokens` is cut and halved, as one that has no reference.

    Args:
        encode: text to token ids, without special tokens.
        positions: tokens the model has positions for; None where it does not say.

    Raises:
        InputError: the file or domains are wrong, an item has fewer than two tokens, or one is longer than the model.
    """
    asked = "multiple_choice" in spec.tasks
    items = [_item(prompt, encode, spec.max_tokens, asked) for prompt in load_prompts(spec)]
    if asked and not any(item.choices for item in items):
        raise InputError(
            f"quality.tasks: multiple_choice needs prompts with 'choices', and none of the {len(items)} items of "
            f"{spec.source} that fit whole into max_tokens ({spec.max_tokens}) has any"
        )
    longest = max(items, key=lambda item: len(item.prefix) + len(item.continuation))
    reach = len(longest.prefix) + len(longest.continuation)
    if positions is not None and reach > positions:
        raise InputError(
            f"quality.max_tokens: item {longest.id!r} has {reach:,} tokens, and the model has positions for "
            f"{positions:,}; cut items to that with quality.max_tokens"
        )
    return items


def _item(prompt: Prompt, encode: Encode, most: int, choices: bool) -> Item:
    ids = lead(prompt.text, most, encode)[1]
    after = lead(JOINT + prompt.reference, most, encode)[1] if prompt.reference is not None else []
    if ids and after and len(ids) < most:
        item = Item(prompt.id, prompt.domain, tuple(ids), tuple(after[: most - len(ids)]), prompt.text, True)
        return _with_choices(item, prompt, encode, most) if choices and prompt.choices else item
    ids = ids[:most]
    if len(ids) < 2:
        raise InputError(
            f"quality.source: item {prompt.id!r} has {len(ids)} token with this model's tokenizer; without a reference "
            "at least 2 are needed, one to go on from and one to score"
        )
    half = len(ids) // 2
    return Item(prompt.id, prompt.domain, tuple(ids[:half]), tuple(ids[half:]), prompt.text)


def _with_choices(item: Item, prompt: Prompt, encode: Encode, most: int) -> Item:
    """The item with its choices; without them where one would have to be cut, or two are the same tokens."""
    choices = tuple(tuple(lead(JOINT + text, most, encode)[1]) for text in prompt.choices)
    if len(item.prefix) + max(map(len, choices)) > most or len(set(choices)) < len(choices):
        return item
    return replace(item, choices=choices, right=prompt.choices.index(prompt.reference or ""))


def choose(handle: methods.Method, item: Item, mode: Mode) -> list[Scored]:
    """Every choice of an item, scored as `score` does a continuation."""
    return [score(handle, replace(item, continuation=choice), mode) for choice in item.choices]


def likeliest(scored: Sequence[Scored]) -> int:
    """The choice with the least −log p a token; of equal ones the first."""
    return int(np.argmin([each.nll / len(each.nll_N) for each in scored]))


def score(handle: methods.Method, item: Item, mode: Mode) -> Scored:
    """Score the continuation's tokens, each given all tokens before it.

    In mode `prefix` the gates are those of the prompt alone. Where tokens decide for themselves and the arm keeps no
    cache to hold a prompt, one forward over all of it decides the same.
    """
    device = handle.model.device
    prefix, continuation = (torch.tensor([ids], device=device) for ids in (item.prefix, item.continuation))
    scored = torch.cat([prefix[:, -1:], continuation], dim=1)
    with torch.no_grad():
        if mode == "whole" or (handle.scope == "token" and not handle.keeps_cache):
            every = torch.cat([prefix, continuation], dim=1)
            logits = handle.model(input_ids=every, use_cache=False).logits[:, len(item.prefix) - 1 :]
        else:
            # The last token's logits predict nothing that is scored, but its row lets gates govern the whole item.
            first = handle.model(input_ids=prefix, use_cache=True, logits_to_keep=1)
            seal(first.cache)
            rest = handle.model(input_ids=continuation, cache=first.cache, use_cache=True)
            logits = torch.cat([first.logits, rest.logits], dim=1)
        nll = token_nll(logits, scored, torch.ones_like(scored))[0].double()
        hit = logits[0, :-1].argmax(-1) == scored[0, 1:]
    return Scored(nll.cpu().numpy(), hit.cpu().numpy())


def perplexity(nll: float, tokens: int) -> float:
    """exp(Σ nll ÷ tokens); infinite where that overflows."""
    try:
        return math.exp(nll / tokens)
    except OverflowError:
        return math.inf
