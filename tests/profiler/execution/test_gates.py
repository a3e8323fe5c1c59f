"""Decisions on the host, and what is held for an engine's requests."""

from __future__ import annotations

from array import array

import pytest

from profiler.errors import InputError
from profiler.execution import gates as module
from profiler.execution.gates import Gate, Gates, RequestGates
from profiler.execution.sequences import Sequences


class Cache:
    """An engine's cache; only its identity matters here."""


def step(*sequences: tuple[str, list[int], int], ends: list[bool] | None = None) -> Sequences:
    """A packed step of (request, tokens, past)."""
    bounds = [0]
    for _, tokens, _ in sequences:
        bounds.append(bounds[-1] + len(tokens))
    return Sequences(
        packed=True,
        width=bounds[-1],
        rows_S=[len(tokens) for _, tokens, _ in sequences],
        past_S=[past for _, _, past in sequences],
        requests=[name for name, _, _ in sequences],
        bounds=bounds,
        ids_T=array("q", [token for _, tokens, _ in sequences for token in tokens]),
        ends_S=ends or [True] * len(sequences),
    )


GATES = Gates((Gate(True, 0.75, 1.5), Gate(False, 0.25, -1.5), Gate(True, 0.5, 0.25)))


def test_gates_say_who_runs() -> None:
    assert GATES.chosen == [0, 2]
    assert GATES.select([1, 1, 2]).of_S == (GATES.of_S[1], GATES.of_S[1], GATES.of_S[2])
    assert GATES.select([1, 1, 2]).chosen == [2]
    choice, value, logit = GATES.columns
    assert (choice.tolist(), value.tolist(), logit.tolist()) == ([1, 0, 1], [0.75, 0.25, 0.5], [1.5, -1.5, 0.25])
    assert (choice.dtype, value.dtype, logit.dtype) == ("int16", "float32", "float32")
    assert GATES.columns is GATES.columns


def test_a_request_is_held_from_its_prompt_on() -> None:
    kept, cache = RequestGates(), Cache()
    (first,) = kept.admit(step(("a", [1, 2, 3], 0)), cache)
    first.gates.append(GATES.of_S[0])
    again, other = kept.admit(step(("a", [4], 3), ("b", [1, 2], 0)), cache)
    assert again is first
    assert other is not first
    assert first.tokens == array("q", [1, 2, 3, 4])
    assert len(kept) == 2


def test_a_request_filled_again_keeps_its_gates_and_another_text_does_not() -> None:
    kept, cache = RequestGates(), Cache()
    (first,) = kept.admit(step(("a", [1, 2, 3], 0)), cache)
    kept.admit(step(("a", [4], 3)), cache)
    (again,) = kept.admit(step(("a", [1, 2, 3, 4, 5], 0)), cache)
    assert again is first
    assert first.tokens == array("q", [1, 2, 3, 4, 5])
    for other in ([1, 2, 3, 4], [1, 2, 9, 4, 5, 6], [7]):
        (new,) = kept.admit(step(("a", other, 0)), cache)
        assert new is not first
        assert new.tokens == array("q", other)
        assert new.gates == []


def test_a_token_the_engine_takes_back_is_fed_again() -> None:
    kept, cache = RequestGates(), Cache()
    (first,) = kept.admit(step(("a", [1, 2, 3], 0)), cache)
    kept.admit(step(("a", [4], 3)), cache)
    (again,) = kept.admit(step(("a", [4], 3)), cache)
    assert again is first
    assert first.tokens == array("q", [1, 2, 3, 4])


def test_another_cache_knows_nobody() -> None:
    kept, cache = RequestGates(), Cache()
    (first,) = kept.admit(step(("a", [1, 2, 3], 0)), cache)
    (second,) = kept.admit(step(("a", [1, 2, 3], 0)), Cache())
    assert second is not first
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("coming", "ends", "message"),
    [
        (
            ("b", [1, 2], 0),
            [False],
            "request 'b' came with 2 of its prompt's tokens and 0 in the cache: .* max_batch_tok",
        ),
        (("a", [4, 5], 3), [True], "request 'a' came with 2 of its prompt's tokens and 3 in the cache"),
        (("b", [4], 3), [True], "request 'b' has 3 tokens in the cache that no gates are known for"),
        (("b", [4, 5], 4), [True], "request 'b' has 4 tokens in the cache .* allow_block_sharing to False"),
        (("a", [4], 8), [True], "request 'a' has 8 tokens in the cache that no gates are known for"),
    ],
)
def test_prompts_in_pieces_and_keys_of_others_are_refused(
    coming: tuple[str, list[int], int], ends: list[bool], message: str
) -> None:
    kept, cache = RequestGates(), Cache()
    kept.admit(step(("a", [1, 2, 3], 0)), cache)
    with pytest.raises(InputError, match=message):
        kept.admit(step(coming, ends=ends), cache)


def test_the_one_unseen_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS_KEPT", 2)
    kept, cache = RequestGates(), Cache()
    for name in "abc":
        kept.admit(step((name, [1], 0)), cache)
        kept.admit(step(("a", [1], 1 if name == "a" else 2)), cache) if name != "c" else None
    assert len(kept) == 2
    kept.admit(step(("a", [1], 2), ("c", [1], 1)), cache)
    with pytest.raises(InputError, match="'b' has 1 tokens"):
        kept.admit(step(("b", [1], 1)), cache)


def test_a_batch_larger_than_what_is_kept_is_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS_KEPT", 2)
    kept, cache = RequestGates(), Cache()
    kept.admit(step(*((name, [1], 0) for name in "abcd")), cache)
    kept.admit(step(*((name, [2], 1) for name in "abcd")), cache)
    assert len(kept) == 4


def test_released_requests_are_gone() -> None:
    kept, cache = RequestGates(), Cache()
    kept.admit(step(("a", [1], 0), ("b", [1], 0)), cache)
    kept.release("a")
    kept.release("a")
    assert len(kept) == 1
    kept.clear()
    assert len(kept) == 0
