"""Scoring without leaking: against a float64 decoder written by hand, and against what a leak would give."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import methods
from profiler.errors import InputError
from profiler.execution.kv import seal
from profiler.quality import Item, choose, likeliest, load_items, perplexity, score
from profiler.recorder import Recorder
from tests.profiler.slow_decoder import slow_forward
from tests.profiler.tiny import disturb, exact_model, prompts_of, wrapped
from workloads.spec import QualitySpec

MODEL = exact_model("llama")


def item(prefix: Sequence[int], continuation: Sequence[int]) -> Item:
    return Item("i", "math", tuple(prefix), tuple(continuation), "text")


def routers_of(handle: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(router.weight[0].detach(), router.bias[0].detach()) for router in handle.routers]


def slow_nll(it: Item, route: Sequence[bool]) -> float:
    """−Σ log softmax by hand, one token after the other, the whole text computed at once with a given route."""
    with torch.no_grad():
        logits = slow_forward(
            dict(MODEL.named_parameters()), MODEL.config, [*it.prefix, *it.continuation], route=route
        ).logits.tolist()
    total = 0.0
    for place, token in enumerate(it.continuation, start=len(it.prefix) - 1):
        highest = max(logits[place])
        total -= logits[place][token] - highest - math.log(sum(math.exp(v - highest) for v in logits[place]))
    return total


def asked(handle: Any, ids: Sequence[int]) -> list[bool]:
    """Which layers run, by a slow forward over `ids` with the routers pooling over all of them."""
    with torch.no_grad():
        return slow_forward(dict(MODEL.named_parameters()), MODEL.config, ids, routers=routers_of(handle)).ran


LENGTHS = [(5, 7), (1, 4), (6, 1), (1, 1)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("method", ["dense", "static_depth"])
def test_a_fixed_model_scores_the_same_however_gates_would_be_decided(method: str, lengths: tuple[int, int]) -> None:
    options = {} if method == "dense" else {"layers": [0, 4]}
    handle, _ = wrapped(MODEL, method, **options)
    it = item(*prompts_of(list(lengths)))
    expected = slow_nll(it, [method == "dense" or layer not in (0, 4) for layer in range(6)])
    for mode in ("prefix", "whole"):
        assert score(handle, it, mode).nll == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_a_routed_arm_is_gated_on_the_prefix_and_scored_with_these_gates(lengths: tuple[int, int], seed: int) -> None:
    handle, steps = wrapped(MODEL, "layerroute")
    disturb(handle, seed)
    it = item(*prompts_of(list(lengths), seed))
    route = asked(handle, it.prefix)
    assert score(handle, it, "prefix").nll == pytest.approx(slow_nll(it, route), rel=1e-9)
    assert [[bool(d.choice[0]) for d in step.decisions] for step in steps] == [route, route]
    whole = asked(handle, [*it.prefix, *it.continuation])
    assert score(handle, it, "whole").nll == pytest.approx(slow_nll(it, whole), rel=1e-9)


@pytest.mark.parametrize("lengths", [(5, 7), (1, 4), (6, 1)])
def test_every_token_is_scored_by_itself_and_a_hit_is_what_nothing_was_likelier_than(lengths: tuple[int, int]) -> None:
    handle, _ = wrapped(MODEL, "dense")
    it = item(*prompts_of(list(lengths)))
    with torch.no_grad():
        every = [*it.prefix, *it.continuation]
        logits = slow_forward(dict(MODEL.named_parameters()), MODEL.config, every, route=[True] * 6).logits
    likeliest = [max(range(len(row)), key=row.__getitem__) for row in logits[len(it.prefix) - 1 : -1].tolist()]
    # The model's own choice for the last token is a hit, and the next id after it is none.
    told = Item(it.id, it.domain, it.prefix, (*it.continuation[:-1], likeliest[-1]), it.text)
    missed = Item(it.id, it.domain, it.prefix, (*it.continuation[:-1], (likeliest[-1] + 1) % len(logits[0])), it.text)
    for mode in ("prefix", "whole"):
        found = score(handle, it, mode)
        assert found.hit_N.tolist() == [a == b for a, b in zip(likeliest, it.continuation, strict=True)]
        assert found.nll_N.sum() == found.nll == pytest.approx(slow_nll(it, [True] * 6), rel=1e-9)
        assert found.nll_N[:-1] == pytest.approx(score(handle, told, mode).nll_N[:-1], rel=1e-9)
        assert (score(handle, told, mode).hit_N[-1], score(handle, missed, mode).hit_N[-1]) == (True, False)


@pytest.mark.parametrize("variant", ["full", "foreign_history"])
def test_tokens_that_decide_for_themselves_are_scored_alike_either_way(variant: str) -> None:
    handle, steps = wrapped(MODEL, "hero", variant=variant)
    disturb(handle)
    it = item(*prompts_of([6, 5]))
    whole = score(handle, it, "whole")
    (step,) = steps
    decided = [decision.choice.tolist() for decision in step.decisions]
    assert 0 < sum(map(sum, decided)) < 11 * 3
    steps.clear()
    assert score(handle, it, "prefix").nll_N == pytest.approx(whole.nll_N, rel=1e-9)
    # foreign_history reads the token before, whose memory no cache holds: it gets the whole text at once.
    assert [len(s.decisions[0].choice) for s in steps] == ([6, 5] if variant == "full" else [11])
    each = zip(*(step.decisions for step in steps), strict=True)
    assert [[int(c) for part in parts for c in part.choice] for parts in each] == decided


def leaky_pair() -> tuple[Any, Item]:
    """A router in layer 2 that runs on text of token 3 and skips on text that is mostly token 8, and such an item."""
    handle, _ = wrapped(MODEL, "layerroute")
    it = item([3, 3], [8] * 9)
    with torch.no_grad():
        for router in handle.routers:
            router.weight.zero_()
            router.bias.fill_(1.0)
        reached = {}
        handle.decoder.blocks[2].register_forward_pre_hook(lambda block, args: reached.update(h=args[0].mean(1)[0]))
        handle.model(input_ids=torch.tensor([it.prefix]))
        prefix = reached["h"]
        handle.model(input_ids=torch.tensor([[*it.prefix, *it.continuation]]))
        whole = reached["h"]
        router = handle.routers[2]
        router.weight[0] = (prefix - whole).float()
        router.bias.fill_(float(-(prefix - whole) @ (prefix + whole) / 2))
    return handle, it


def test_a_leaking_implementation_would_give_another_number() -> None:
    handle, it = leaky_pair()
    assert asked(handle, it.prefix) == [True] * 6
    assert asked(handle, [*it.prefix, *it.continuation]) == [True, True, False, True, True, True]
    honest, leaking = slow_nll(it, [True] * 6), slow_nll(it, [True, True, False, True, True, True])
    assert abs(honest - leaking) > 0.1
    assert score(handle, it, "prefix").nll == pytest.approx(honest, rel=1e-9)
    assert score(handle, it, "whole").nll == pytest.approx(leaking, rel=1e-9)


def test_what_is_scored_does_not_reach_the_gates() -> None:
    handle, steps = wrapped(MODEL, "layerroute")
    disturb(handle)
    (prefix,) = prompts_of([4])
    decided = []
    for continuation in prompts_of([8] * 12, seed=5):
        steps.clear()
        score(handle, item(prefix, continuation), "prefix")
        decided.append([[int(d.choice[0]) for d in step.decisions] for step in steps])
    assert all(each == decided[0] for each in decided)


@pytest.mark.parametrize("lora", [True, False])
def test_adapters_take_part_and_open_gates_with_fresh_ones_are_the_backbone(lora: bool) -> None:
    handle, _ = wrapped(MODEL, "layerroute", gates="open", lora=lora)
    it = item(*prompts_of([5, 6]))
    assert score(handle, it, "prefix").nll == pytest.approx(slow_nll(it, [True] * 6), rel=1e-9)
    if lora:
        disturb(handle)
        assert score(handle, it, "prefix").nll != pytest.approx(slow_nll(it, [True] * 6), rel=1e-3)


def test_a_step_of_several_tokens_is_still_refused_where_nobody_said_the_prompt_is_whole() -> None:
    handle, _ = wrapped(MODEL, "layerroute")
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True)
        with pytest.raises(InputError, match="this step adds 2 tokens"):
            handle.model(input_ids=torch.tensor([[4, 5]]), cache=out.cache, use_cache=True)


def test_a_cache_that_is_emptied_waits_for_a_whole_prompt_again() -> None:
    handle, _ = wrapped(MODEL, "layerroute")
    with torch.no_grad():
        cache = handle.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).cache
        seal(cache)
        handle.model(input_ids=torch.tensor([[4, 5]]), cache=cache, use_cache=True)
        cache.reset()
        handle.model(input_ids=torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
        with pytest.raises(InputError, match="this step adds 2 tokens"):
            handle.model(input_ids=torch.tensor([[4, 5]]), cache=cache, use_cache=True)


def test_low_precision_is_summed_in_float64() -> None:
    handle = methods.load("dense").wrap(exact_model("llama").bfloat16(), methods.configure("dense", {}), Recorder())
    it = item(*prompts_of([5, 200]))
    with torch.no_grad():
        logits = handle.model(input_ids=torch.tensor([[*it.prefix, *it.continuation]])).logits[0, 4:-1].double()
    expected = -float(logits.log_softmax(-1)[range(200), list(it.continuation)].sum())
    assert score(handle, it, "whole").nll == pytest.approx(expected, rel=1e-6)


# -- items ------------------------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def items_of(tmp_path: Path, rows: Sequence[Any], positions: int | None = None, **changes: Any) -> list[Item]:
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_items(QualitySpec(source=str(path), **changes), letters, positions)


def said(items: Sequence[Item]) -> list[str]:
    return ["".join(map(chr, it.prefix)) + "|" + "".join(map(chr, it.continuation)) for it in items]


def test_the_continuation_is_the_reference_on_a_line_of_its_own_or_the_second_half(tmp_path: Path) -> None:
    rows = [
        {"prompt": "What is 2+2?", "reference": "4", "id": "a", "domain": "math"},
        {"prompt": "abcde", "domain": "prose"},
        {"prompt": "ab", "domain": "prose"},
    ]
    found = items_of(tmp_path, rows)
    assert said(found) == ["What is 2+2?|\n4", "ab|cde", "a|b"]
    assert [(it.id, it.domain) for it in found] == [("a", "math"), ("line-2", "prose"), ("line-3", "prose")]
    assert found[0].text == "What is 2+2?"


def test_a_long_item_is_cut_at_its_end_and_halved_where_its_reference_has_no_room(tmp_path: Path) -> None:
    rows = [{"prompt": "abcdef", "reference": "uvwxyz"}]
    assert said(items_of(tmp_path, rows, max_tokens=9)) == ["abcdef|\nuv"]
    assert said(items_of(tmp_path, rows, max_tokens=7)) == ["abcdef|\n"]
    assert said(items_of(tmp_path, rows, max_tokens=6)) == ["abc|def"]
    assert said(items_of(tmp_path, rows, max_tokens=3)) == ["a|bc"]


def test_items_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="item 'line-1' has 1 token with this model's tokenizer"):
        items_of(tmp_path, [{"prompt": "a"}])
    with pytest.raises(
        InputError, match=r"item 'long' has 40 tokens, and the model has positions for 32; .*max_tokens"
    ):
        items_of(tmp_path, [{"prompt": "ab"}, {"prompt": "a" * 40, "id": "long"}], positions=32)
    assert len(items_of(tmp_path, [{"prompt": "a" * 40}], positions=40)) == 1


def test_perplexity_of_a_uniform_guess_is_the_number_of_tokens_to_choose_from() -> None:
    assert perplexity(10 * math.log(50), 10) == pytest.approx(50)
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(1e6, 1) == math.inf


# -- choices ----------------------------------------------------------------------------------------------------------


def test_every_choice_is_scored_by_hand_and_the_likeliest_a_token_is_taken() -> None:
    handle, _ = wrapped(MODEL, "dense")
    (prefix,) = prompts_of([6])
    choices = tuple(tuple(ids) for ids in prompts_of([2, 9, 4, 1]))
    asked_for = Item("i", "math", tuple(prefix), choices[1], "text", True, choices, 1)
    scored = choose(handle, asked_for, "prefix")
    slow = [slow_nll(item(prefix, ids), [True] * 6) for ids in choices]
    assert [each.nll for each in scored] == pytest.approx(slow, rel=1e-9)
    a_token = [nll / len(ids) for nll, ids in zip(slow, choices, strict=True)]
    assert likeliest(scored) == a_token.index(min(a_token))
    assert slow.index(min(slow)) == 3 != likeliest(scored)  # the sum would have taken the shortest


def test_gates_of_every_choice_are_those_of_the_prompt() -> None:
    handle, _ = wrapped(MODEL, "layerroute")
    disturb(handle, seed=3)
    prefix, *choices = prompts_of([8, 3, 5])
    asked_for = Item("i", "math", tuple(prefix), tuple(choices[0]), "text", True, tuple(map(tuple, choices)), 0)
    route = asked(handle, prefix)
    assert not all(route)
    slow = [slow_nll(item(prefix, ids), route) for ids in choices]
    assert [each.nll for each in choose(handle, asked_for, "prefix")] == pytest.approx(slow, rel=1e-9)


def test_items_have_choices_where_they_are_asked_for_and_none_would_be_cut(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "reference": "4", "choices": ["22", "4"]},
        {"prompt": "What?", "reference": "so", "choices": ["so", "something else altogether"]},
        {"prompt": "abcd"},
    ]
    assert [it.choices for it in items_of(tmp_path, rows)] == [(), (), ()]
    first, second, third = items_of(tmp_path, rows, tasks=["perplexity", "multiple_choice"], max_tokens=20)
    assert [bytes(ids).decode() for ids in first.choices] == ["\n22", "\n4"]
    assert first.right == 1
    assert (second.choices, third.choices) == ((), ())
    with pytest.raises(InputError, match=r"multiple_choice needs prompts with 'choices', and none of the 1 items"):
        items_of(tmp_path, rows[2:], tasks=["multiple_choice"])
