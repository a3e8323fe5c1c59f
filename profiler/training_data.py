"""From a recipe's text to batches of token ids, in an order that follows from the seed and the step alone.

Nothing is carried from step to step, so that a resumed training sees what an uninterrupted one would have seen.
Not here: what the text says (`workloads.generated`, JSONL files), and what is done with it (`train`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profiler.errors import InputError
from workloads.alternatives import with_choices
from workloads.generated import generate
from workloads.prompts import Prompt, load_prompts
from workloads.recipe import DataSpec
from workloads.spec import PromptsSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Between an item's prompt and its reference.
JOINT = "\n"


@dataclass(frozen=True)
class Item:
    """One sequence: prompt, reference and the end-of-text token, cut to the recipe's length. `cut`: tokens lost."""

    id: str
    domain: str
    ids: tuple[int, ...]
    cut: int


@dataclass(frozen=True)
class Split:
    """What is trained on, and what is not; `held_out` is grouped by domain."""

    training: list[Item]
    held_out: dict[str, list[Item]]


def derived(seed: int, *purpose: object) -> int:
    """A seed of its own for one purpose (initialisation, dropout of a step, ...): 63 bits of SHA-256."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def items(spec: DataSpec, tokenizer: PreTrainedTokenizerBase, length: int) -> list[Item]:
    """Every item of a recipe as ids.

    Raises:
        InputError: a file cannot be read, or an item has fewer than two tokens, so that nothing is predicted.
    """
    found = []
    for prompt in prompts(spec):
        text = prompt.text if prompt.reference is None else prompt.text + JOINT + prompt.reference
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) < 2:
            raise InputError(f"data: item {prompt.id!r} has {len(ids)} token; at least 2 are needed to predict one")
        found.append(Item(prompt.id, prompt.domain, tuple(ids[:length]), max(0, len(ids) - length)))
    return found


def prompts(spec: DataSpec) -> list[Prompt]:
    """Every item of a recipe as text, in the order of `items`.

    Raises:
        InputError: a file cannot be read.
    """
    made = spec.generated
    counts = made.counts.items() if made is not None else ()
    found = [p for kind, count in counts if count for p in generate(kind, count, made.seed if made else 0)]
    for file in spec.files:
        found += load_prompts(PromptsSpec(source=file))
    return found


def split(found: Sequence[Item], held_out: int, seed: int) -> Split:
    """Hold out `held_out` items of each domain; which ones follows from `seed`.

    Raises:
        InputError: a domain would have nothing left to train on.
    """
    domains: dict[str, list[Item]] = {}
    for item in found:
        domains.setdefault(item.domain, []).append(item)
    training, kept = [], {}
    for domain, members in sorted(domains.items()):
        if len(members) <= held_out:
            raise InputError(
                f"data.held_out ({held_out:,}) must leave text to train on, and domain {domain!r} has "
                f"{len(members):,} items"
            )
        order = _shuffled(len(members), derived(seed, "held out", domain))
        kept[domain] = [members[i] for i in order[:held_out]]
        training += [members[i] for i in sorted(order[held_out:])]
    return Split(training, kept)


def held_out_lines(spec: DataSpec, held_out: Mapping[str, Sequence[Item]]) -> str:
    """The held-out items as JSONL that `quality.source` takes, generated ones with choices; a line an item."""
    kept = {item.id for group in held_out.values() for item in group}
    lines = []
    for prompt in with_choices([prompt for prompt in prompts(spec) if prompt.id in kept]):
        line: dict[str, Any] = {"id": prompt.id, "domain": prompt.domain, "prompt": prompt.text}
        if prompt.reference is not None:
            line["reference"] = prompt.reference
        if prompt.choices:
            line["choices"] = list(prompt.choices)
        lines.append(json.dumps(line, ensure_ascii=False))
    return "\n".join([*lines, ""])


def chosen(count: int, size: int, step: int, seed: int) -> list[int]:
    """Indices of the `size` items, out of `count`, that update `step` (0-based) trains on.

    Every item comes once before any comes again; each round has an order of its own.
    """
    rounds: dict[int, list[int]] = {}
    found = []
    for position in range(step * size, (step + 1) * size):
        round_, place = divmod(position, count)
        if round_ not in rounds:
            rounds[round_] = _shuffled(count, derived(seed, "order", round_))
        found.append(rounds[round_][place])
    return found


def pad(batch: Sequence[Item], device: torch.device) -> tuple[Tensor, Tensor]:
    """`[B, T]` ids, zeros on the right, and `[B, T]` bools, True at real tokens; T is the longest of the batch."""
    width = max(len(item.ids) for item in batch)
    ids_BT = torch.tensor([[*item.ids, *[0] * (width - len(item.ids))] for item in batch], device=device)
    lengths_B = torch.tensor([len(item.ids) for item in batch], device=device)
    return ids_BT, torch.arange(width, device=device)[None] < lengths_B[:, None]


def _shuffled(count: int, seed: int) -> list[int]:
    # `random()` is the one method whose values Python promises to keep for a seed.
    draw = random.Random(seed)
    keys = [draw.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
