"""Rows of a cell: exact length, one domain each, deterministic, distinct while the material lasts."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.errors import InputError
from workloads.prompts import CellPrompt, Prompt, cell_token_ids, lead, load_prompts
from workloads.spec import PromptsSpec

VOCABULARY: dict[str, int] = {}


def words(text: str) -> list[int]:
    """A token a word and a token a run of white space, numbered as they are met."""
    return [VOCABULARY.setdefault(token, len(VOCABULARY)) for token in re.findall(r"\s+|\S+", text)]


def utf8(text: str) -> list[int]:
    return list(text.encode())


def prompts(**domains: list[str]) -> list[Prompt]:
    return [Prompt(f"{d}{i}", d, text) for d, texts in domains.items() for i, text in enumerate(texts)]


def one(found: list[Prompt], length: int, seed: int = 0) -> CellPrompt:
    return cell_token_ids(found, words, 1, length, seed)[0]


def test_one_prompt_is_cut_at_the_word_the_last_token_is_in() -> None:
    row = one(prompts(a=["the quick brown fox jumps"]), 4)  # the, space, quick, space
    assert row.text == "the quick brown"
    assert row.ids == tuple(words("the quick brown")[:4])
    assert (row.request, row.domain, row.repeated, row.same_as) == ("r0000", "a", False, None)


def test_prompts_of_one_domain_are_joined_with_a_blank_line() -> None:
    row = one(prompts(a=["one two", "three four", "five six"]), 11)
    parts = row.text.split("\n\n")
    assert sorted(parts) == ["five six", "one two", "three four"]
    assert row.ids == tuple(words(row.text))
    assert not row.repeated


def test_too_little_material_is_repeated_and_said_so() -> None:
    row = one(prompts(a=["one two", "three"]), 12)
    assert row.repeated
    first, second, *rest = row.text.split("\n\n")
    assert {first, second} == {"one two", "three"}
    assert rest[:2] == [first, second]
    assert row.ids == tuple(words(row.text)[:12])
    exactly_once = one(prompts(a=["one two", "three"]), 5)
    assert not exactly_once.repeated


def test_domains_take_turns_and_never_mix() -> None:
    found = prompts(a=["a a a", "a a"], b=["b b", "b b b b"], c=["c"])
    rows = cell_token_ids(found, words, 7, 9, 3)
    assert [row.domain for row in rows] == list("abcabca")
    assert [row.request for row in rows] == [f"r{i:04d}" for i in range(7)]
    assert all(set(row.text.split()) == {row.domain} for row in rows)


def test_rows_are_distinct_while_the_material_allows_and_equal_ones_are_named() -> None:
    found = prompts(a=["p q r", "s t"])
    rows = cell_token_ids(found, words, 8, 1, 0)  # a single word each: five distinct rows exist
    assert [row.same_as for row in rows[:5]] == [None] * 5
    assert {row.text for row in rows[:5]} == {"p", "q", "r", "s", "t"}
    assert {rows[0].text, rows[1].text} == {"p", "s"}  # every prompt's own beginning comes first
    assert [row.same_as for row in rows[5:]] == ["r0000", "r0001", "r0002"]
    assert [row.ids for row in rows[5:]] == [row.ids for row in rows[:3]]


def test_a_larger_batch_holds_the_rows_of_a_smaller_one() -> None:
    found = load_prompts(PromptsSpec())
    assert cell_token_ids(found, words, 16, 64, 5)[:6] == cell_token_ids(found, words, 6, 64, 5)


def test_the_seed_decides_and_nothing_else() -> None:
    found = load_prompts(PromptsSpec())
    rows = cell_token_ids(found, words, 8, 64, 0)
    assert cell_token_ids(found, words, 8, 64, 0) == rows
    assert cell_token_ids(found, words, 8, 64, 1) != rows
    within = [[p for p in found if p.domain == d] for d in ("math", "code", "tool_call", "prose")]
    reordered = [p for group in within for p in reversed(group)]  # the order inside a file plays no part
    assert cell_token_ids(reordered, words, 8, 64, 0) == rows


def test_the_choice_is_the_same_on_every_machine() -> None:
    # The order of SHA-256("0\na0"), ("0\na1"), ("0\na2"), worked out with sha256sum: 937e, 1e38, 5c9d
    found = prompts(a=["zero", "one", "two"])
    assert [row.text for row in cell_token_ids(found, words, 3, 1, 0)] == ["one", "two", "zero"]


def test_four_hundred_rows_of_the_built_in_prompts_are_distinct() -> None:
    rows = cell_token_ids(load_prompts(PromptsSpec()), words, 400, 32, 0)
    assert len({row.ids for row in rows}) == 400
    assert not any(row.repeated or row.same_as for row in rows)


def test_thousands_of_tokens_come_from_the_built_in_prompts_without_repeating() -> None:
    rows = cell_token_ids(load_prompts(PromptsSpec(domains=["tool_call", "prose"])), words, 2, 3000, 0)
    assert [len(row.ids) for row in rows] == [3000, 3000]
    assert not any(row.repeated for row in rows)


def test_a_script_without_spaces_is_cut_between_characters() -> None:
    found = prompts(a=["在一个有雾的早晨描写灯塔。" * 3])
    row = cell_token_ids(found, utf8, 1, 10, 0)[0]
    assert row.text == "在一个有"  # three bytes each: the tenth is in the fourth
    assert row.ids == tuple("在一个有".encode()[:10])


def test_prompts_that_give_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="domain 'a' give no tokens"):
        cell_token_ids(prompts(a=["x"]), lambda text: [], 1, 4, 0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.from_regex(r"[a-z]{1,9}( [a-z]{1,9}){0,30}", fullmatch=True), min_size=1, max_size=4),
    st.integers(1, 300),
)
def test_the_text_of_a_row_holds_no_word_too_many(texts: list[str], length: int) -> None:
    (row,) = cell_token_ids(prompts(a=texts), utf8, 1, length, 0)
    one_word_less = re.sub(r"\s*\S+\Z", "", row.text)
    assert len(one_word_less) < length <= len(row.text)


TEXTS = st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), TEXTS, min_size=1),
    st.integers(1, 9),
    st.integers(1, 80),
    st.integers(0, 3),
    st.sampled_from([words, lambda text: [ord(c) for c in text]]),
)
def test_any_row_is_the_first_tokens_of_its_text(
    domains: dict[str, list[str]],
    batch: int,
    length: int,
    seed: int,
    tokenize: Callable[[str], list[int]],
) -> None:
    rows = cell_token_ids(prompts(**domains), tokenize, batch, length, seed)
    assert [row.domain for row in rows] == [list(domains)[i % len(domains)] for i in range(batch)]
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    for row in rows:
        assert row.ids == tuple(tokenize(row.text)[:length])
        assert len(row.ids) == length
        assert row.same_as == seen.get((row.domain, row.ids))
        seen.setdefault((row.domain, row.ids), row.request)


# -- long texts --------------------------------------------------------------------------------------


class Counting:
    """A tokenizer of words that knows how much it was given."""

    def __init__(self) -> None:
        self.characters = self.calls = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        self.calls += 1
        return words(text)


def test_of_a_text_of_megabytes_only_the_beginning_is_tokenised() -> None:
    long = " ".join(f"word{i}" for i in range(400_000))  # 4 MB
    tokenize = Counting()
    rows = cell_token_ids(prompts(a=[long]), tokenize, 4, 31, 0)  # 16 words, 15 spaces
    assert [row.text.split() for row in rows] == [[f"word{i}" for i in range(start, start + 16)] for start in range(4)]
    assert tokenize.characters < 100_000
    short = " ".join(f"word{i}" for i in range(200))
    assert cell_token_ids(prompts(a=[short]), words, 4, 31, 0) == rows


def test_a_text_of_few_tokens_is_read_on_until_they_suffice() -> None:
    sparse = (" " * 5000).join("abcdefgh")
    assert lead(sparse, 3, words) == (sparse, words(sparse))  # eight tokens in all, fewer than a margin would like
    start, ids = lead("x " * 100_000, 10, words)
    assert len(start) == 16 * (10 + 64)
    assert len(ids) >= 10 + 64


def test_a_text_that_says_one_thing_over_and_over_ends_the_search_for_distinct_rows() -> None:
    tokenize = Counting()
    rows = cell_token_ids(prompts(a=["la " * 20_000]), tokenize, 3, 8, 0)
    assert [row.same_as for row in rows] == [None, "r0000", "r0000"]
    assert tokenize.calls < 5000
