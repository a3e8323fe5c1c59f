"""Prompts: the built-in ones, or any JSONL file; and how the rows of a cell are made from them.

A line of a JSONL file holds `prompt` and optionally `domain`, `id`, `reference` and `choices`, a list of answers of
which `reference` is one; other keys are ignored.
The built-in prompts (`prompts/*.jsonl`, a file a domain) were written for this project.

A row is made of one domain's prompts joined with a blank line and cut to an exact number of tokens, so a
request stays of one kind at any length. Choice and order come from SHA-256 of the seed, not from a random
generator, so they are the same on every machine and Python.

Not here: the tokenizer (handed in, without special tokens) and chat templates.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from workloads.documents import decode, read_bytes
from workloads.spec import BUILTIN, PromptsSpec, QualitySpec

MAX_BYTES = 64 * 1024 * 1024
#: Domain of a prompt that names none.
NO_DOMAIN = "default"
#: The built-in domains, in the order rows take them unless the spec says otherwise.
BUILTIN_DOMAINS = ("math", "code", "tool_call", "prose")

SEPARATOR = "\n\n"

#: Characters taken of a text for each token that is wanted of it, before it is seen whether they are enough.
CHARACTERS_A_TOKEN = 16
#: Tokens beyond those wanted that the start of a text must give, so that where it was cut changes none of them.
MARGIN = 64
#: Starts in a row that give tokens seen before, after which a domain counts as having no further distinct row.
STARTS_IN_VAIN = 256
#: Words of one prompt at which rows may begin; more than a batch has rows.
WORDS_TO_START_AT = 8192

#: A word, or one character of a script that writes none.
_WORD = re.compile(
    r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]+"
)

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One prompt. `reference` is the expected answer as text, where there is one; `choices` has it and wrong ones."""

    id: str
    domain: str
    text: str
    reference: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellPrompt:
    """One row of a cell: `ids` are the first `length` tokens of `text`, which ends with the word they end in.

    `repeated`: the domain had too little material, so a prompt of it comes more than once in this row.
    `same_as`: the request with the very same ids, where the domain has no further distinct row.
    """

    request: str
    domain: str
    ids: tuple[int, ...]
    text: str
    repeated: bool = False
    same_as: str | None = None


def load_prompts(spec: PromptsSpec | QualitySpec, base: Path | None = None) -> list[Prompt]:
    """The prompts a section of a spec asks for, domain by domain in the spec's order.

    Args:
        spec: `count` takes prompts in turn from each domain, by the seed.
        base: where a relative `source` starts (the working folder if None); `loading.load` has made it absolute.

    Raises:
        InputError: the file is missing, a folder, too large, not UTF-8 or empty; a line is not a JSON object
            with a non-empty text `prompt`; two ids are the same; a named domain has no prompt.
    """
    section = "quality" if isinstance(spec, QualitySpec) else "prompts"
    if spec.source == BUILTIN:
        folder = Path(str(importlib.resources.files("workloads") / "prompts"))
        paths = [folder / f"{name}.jsonl" for name in BUILTIN_DOMAINS]
    else:
        paths = [(base or Path()) / os.path.expanduser(spec.source)]
    return _select([prompt for path in paths for prompt in _read(path, section)], spec, section)


def _read(path: Path, section: str) -> list[Prompt]:
    label = f"{section}.source: {path}"
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(decode(read_bytes(path, label, MAX_BYTES), label).split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _prompt(line, number, f"{label}: line {number:,}")
        if prompt.id in prompts:
            raise InputError(
                f"{label}: line {number:,}: ids must be unique, and {prompt.id!r} is that of line {lines[prompt.id]:,}"
            )
        prompts[prompt.id], lines[prompt.id] = prompt, number
    if not prompts:
        raise InputError(f"{label}: must hold at least one prompt, and it is empty")
    return list(prompts.values())


def _prompt(line: str, number: int, label: str) -> Prompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{label}: not JSON: column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting without end
        raise InputError(f"{label}: not JSON we can hold: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{label}: must be a JSON object with the key 'prompt'")
    text = _text(data, "prompt", label)
    if text is None:
        raise InputError(
            f"{label}: the key 'prompt' must be given; the keys are {', '.join(map(repr, data)) or 'none'}"
        )
    identity = data.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        data["id"] = str(identity)
    reference = data.get("reference")
    if reference is not None and not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False)
    return Prompt(
        id=_text(data, "id", label) or f"line-{number}",
        domain=_text(data, "domain", label) or NO_DOMAIN,
        text=text,
        reference=reference,
        choices=_choices(data, reference, label),
    )


def _choices(data: dict[str, Any], reference: str | None, label: str) -> tuple[str, ...]:
    given = data.get("choices")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(choice, str) and choice.strip() for choice in given):
        raise InputError(f"{label}: 'choices' must be a list of texts that are not empty")
    if len(given) < 2 or len(set(given)) < len(given):
        raise InputError(
            f"{label}: 'choices' must be two texts or more, no two of them alike; there are {len(given)}, "
            f"{len(set(given))} of them different"
        )
    if reference not in given:
        raise InputError(f"{label}: 'reference' must be one of 'choices', letter by letter, and it is none of them")
    return tuple(given)


def _text(data: dict[str, Any], key: str, label: str) -> str | None:
    """The text under `key`; None if the key is absent or null."""
    value = data.get(key)
    if value is None and (key != "prompt" or key not in data):
        return None
    if not isinstance(value, str):
        raise InputError(f"{label}: {key!r} must be text, and it is {type(value).__name__}")
    if not value.strip():
        raise InputError(f"{label}: {key!r} must not be empty")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"{label}: {key!r} holds half of a surrogate pair, which no tokenizer takes")
    return value


def _select(prompts: list[Prompt], spec: PromptsSpec | QualitySpec, section: str) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    domains = spec.domains or list(groups)
    absent = [domain for domain in domains if domain not in groups]
    if absent:
        raise InputError(
            f"{section}.domains: {spec.source} has no prompt of domain {', '.join(map(repr, absent))}; "
            f"it has {', '.join(map(repr, groups))}"
        )
    if spec.count is None:
        return [prompt for domain in domains for prompt in groups[domain]]
    if spec.count < len(domains):
        raise InputError(f"{section}.count ({spec.count}) must be at least the number of domains ({len(domains)})")
    ranked = {domain: _shuffled(groups[domain], spec.seed) for domain in domains}
    in_turn = [
        ranked[domain][place]
        for place in range(max(map(len, ranked.values())))
        for domain in domains
        if place < len(ranked[domain])
    ]
    chosen = {prompt.id for prompt in in_turn[: spec.count]}
    return [prompt for domain in domains for prompt in groups[domain] if prompt.id in chosen]


def _shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}\n{prompt.id}".encode()).digest())


def lead(text: str, tokens: int, tokenize: Tokenize) -> tuple[str, list[int]]:
    """A start of `text` that gives `tokens` tokens and some more, or all of it; and its tokens.

    A text of many megabytes takes a tokenizer minutes, and a cell only needs its beginning.
    """
    size = CHARACTERS_A_TOKEN * (tokens + MARGIN)
    while size < len(text):
        ids = tokenize(text[:size])
        if len(ids) >= tokens + MARGIN:
            return text[:size], ids
        size *= 2
    return text, tokenize(text)


def cell_token_ids(
    prompts: Sequence[Prompt], tokenize: Tokenize, batch: int, length: int, seed: int
) -> list[CellPrompt]:
    """The rows of a cell: `batch` requests of exactly `length` tokens, the domains in turn.

    Row `r` depends on `r`, `length` and `seed` but not on `batch`, so a larger batch holds the smaller one's
    rows. Rows of a domain begin with each of its prompts in turn, then one word further into each, and so on;
    a start whose tokens an earlier row already has is passed over, until `STARTS_IN_VAIN` of them came in a row.

    Args:
        prompts: from `load_prompts`; the domains come in their order of appearance.
        tokenize: text to token ids, without special tokens.

    Raises:
        InputError: the prompts of a domain give no tokens.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    sources = [_Rows(domain, _shuffled(group, seed), tokenize, length) for domain, group in groups.items()]
    return [sources[row % len(sources)].take(f"r{row:04d}") for row in range(batch)]


class _Rows:
    """The rows of one domain, distinct as long as its material allows."""

    def __init__(self, domain: str, prompts: list[Prompt], tokenize: Tokenize, length: int) -> None:
        self.domain = domain
        self.texts = [prompt.text for prompt in prompts]
        self.tokenize = tokenize
        self.length = length
        self.counts = [len(lead(text, length, tokenize)[1]) for text in self.texts]
        if not sum(self.counts):
            raise InputError(f"the prompts of domain {domain!r} give no tokens with this model's tokenizer")
        self.words = [[m.start() for m in islice(_WORD.finditer(text), WORDS_TO_START_AT)] for text in self.texts]
        self.starts = self._starts()
        self.given: dict[tuple[int, ...], CellPrompt] = {}

    def take(self, request: str) -> CellPrompt:
        """The next row."""
        for prompt, skip in islice(self.starts, STARTS_IN_VAIN):
            row = self._row(request, prompt, skip)
            if row.ids not in self.given:
                self.given[row.ids] = row
                return row
        self.starts = iter(())
        # Nothing distinct is left: the rows so far come again, in their order.
        earlier = next(iter(self.given.values()))
        del self.given[earlier.ids]
        self.given[earlier.ids] = earlier
        return CellPrompt(request, self.domain, earlier.ids, earlier.text, earlier.repeated, earlier.request)

    def _starts(self) -> Iterator[tuple[int, int]]:
        """(prompt, characters to skip): the start of each prompt, then of each one's second word, ..."""
        for word in range(max(map(len, self.words))):
            for prompt, words in enumerate(self.words):
                if word < len(words):
                    yield prompt, words[word] if word else 0

    def _row(self, request: str, first: int, skip: int) -> CellPrompt:
        pieces: list[str] = []
        tokens = 0
        while True:
            prompt = (first + len(pieces)) % len(self.texts)
            pieces.append(self.texts[prompt] if pieces else self.texts[prompt][skip:])
            tokens += self.counts[prompt]
            if tokens >= self.length:
                # Counted apart the pieces add up only roughly: a skipped start, merges at the joints.
                joined, joined_ids = lead(SEPARATOR.join(pieces), self.length, self.tokenize)
                tokens = len(joined_ids)
                if tokens >= self.length:
                    break
        text, ids = self._cut(joined, joined_ids)
        whole = SEPARATOR.join(pieces[: len(self.texts)])
        return CellPrompt(request, self.domain, ids, text, repeated=len(text) > len(whole))

    def _cut(self, text: str, ids: list[int]) -> tuple[str, tuple[int, ...]]:
        """The fewest whole words of `text`, whose tokens are `ids`, that give `length` tokens, and those tokens.

        Looks first where the words would be if all gave equally many tokens, then in growing strides around
        it: a tokenizer is too slow to halve a long row seventeen times.
        """
        ends = [match.end() for match in _WORD.finditer(text)]
        ends[-1] = len(text)
        words_a_token = len(ends) / len(ids)
        too_few, enough = -1, len(ends) - 1
        at, stride = int(self.length * words_a_token), 1
        while enough - too_few > 1:
            if not too_few < at < enough:
                at = (too_few + enough) // 2
            found = self.tokenize(text[: ends[at]])
            away = max(stride, round(abs(len(found) - self.length) * words_a_token))
            if len(found) >= self.length:
                enough, ids, at = at, found, at - away
            else:
                too_few, at = at, at + away
            stride *= 2
        return text[: ends[enough]], tuple(ids[: self.length])
