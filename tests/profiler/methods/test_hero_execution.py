"""HeRo as it is executed: what is recorded of a step, strategies, forced routes and packed batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler import verify
from profiler.arms import build, describe
from profiler.errors import InputError
from profiler.execution.history_router import LOCAL
from profiler.execution.routes import ForcedTokens
from profiler.methods.hero import Hero
from profiler.stepdata import executed_as_decided
from tests.profiler.engine import serve
from tests.profiler.methods.hero_models import SIGNALS, apart, reference, routed, scores_of
from tests.profiler.routed_arms import Arm, decode
from tests.profiler.tiny import padded, prompts_of, random_model

# -- recorded ----------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_was_scored() -> None:
    handle, steps = routed(layers=[1, 3])
    prompts = prompts_of([5, 2])
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(**padded(prompts, "left"))
    assert [(d.layer, d.site) for d in steps[0].decisions] == [(1, "ffn"), (3, "ffn")]
    for decision, scores in zip(steps[0].decisions, seen, strict=True):
        assert list(decision.signals) == list(SIGNALS)
        assert torch.equal(torch.from_numpy(decision.gate), scores.g.float())
        for name in SIGNALS:
            assert torch.equal(torch.from_numpy(decision.signals[name]), getattr(scores, name).float())
        assert decision.choice[5:8].tolist() == [0, 0, 0]  # the second prompt's pads, dropped when written
    described = describe(handle, "arm", "hero", "dense")
    assert (described.scope, described.kv_policy, list(described.signals)) == ("token", None, list(SIGNALS))


@pytest.mark.parametrize("variant", sorted(LOCAL))
def test_a_local_head_leaves_history_empty_rather_than_zero(variant: Any) -> None:
    handle, steps = routed(variant=variant)
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([3])))
    signals = steps[0].decisions[0].signals
    assert all(bool(torch.from_numpy(signals[name]).isnan().all()) for name in SIGNALS if name != "b")
    assert not torch.from_numpy(signals["b"]).isnan().any()
    assert executed_as_decided(steps[0], describe(handle, "arm", "hero", None)) == []


def test_the_route_is_of_single_tokens() -> None:
    handle, steps = routed(layers=[1, 2, 3, 4, 5])
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([12])))
    assert any(0 < d.choice.sum() < 12 for d in steps[0].decisions)
    counted = {key: count for key, count in steps[0].counts.items() if key[1] == "ffn"}
    for decision in steps[0].decisions:
        ones = int(decision.choice.sum())
        rows = {choice: counted.get((decision.layer, "ffn", choice)) for choice in (0, 1)}
        assert {c: 0 if n is None else n.rows for c, n in rows.items()} == {0: 12 - ones, 1: ones}
        assert all(n is None or n.padded == 0 for n in rows.values())


# -- strategies --------------------------------------------------------------------------------------


def strategies() -> dict[str, tuple[Hero, list[Any]]]:
    model = random_model("llama", dtype=torch.float32)
    return {
        strategy: routed(model=model, strategy=strategy, layers=[1, 2, 3, 4, 5])
        for strategy in ("masked", "gather", "grouped", "auto")
    }


@pytest.mark.parametrize("lengths", [[9, 4, 1, 6], [5, 5], [1], [7, 0]])
@pytest.mark.parametrize("side", ["left", "right"])
def test_strategies_agree_and_rule_1_holds_them_to_what_they_say(lengths: list[int], side: str) -> None:
    prompts = prompts_of(lengths)
    wanted: dict[str, Tensor] = {}
    for strategy, (handle, steps) in strategies().items():
        seen = decode(handle, steps, prompts, side)
        record = describe(handle, "arm", "hero", "dense")
        for step in steps:
            assert executed_as_decided(step, record) == [], strategy
        for name, one in seen.items():
            if strategy == "masked":
                wanted[name] = one.logits
            assert apart(one.logits, wanted[name]) < 1e-5, strategy


def test_masked_fails_rule_1_without_its_label_and_counts_what_it_computes() -> None:
    handle, steps = routed(strategy="masked", layers=[2, 3])
    with torch.no_grad():
        handle.model(**padded(prompts_of([5, 2]), "left"))
    record = describe(handle, "arm", "hero", "dense")
    assert record.discards
    for layer, choice in itertools.product((2, 3), (0, 1)):
        count = steps[0].counts[layer, "ffn", choice]
        assert (count.rows, count.padded) == (7, 3)
    unlabelled = record.model_copy(update={"discards": False})
    assert any("7 rows entered, decisions say" in problem for problem in executed_as_decided(steps[0], unlabelled))


@pytest.mark.parametrize("route", ["open", "closed"])
def test_masked_computes_everything_even_where_all_rows_go_one_way(route: str) -> None:
    handle, steps = routed(strategy="masked", layers=[2, 3])
    handle.force(route)
    other, _ = routed(layers=[2, 3])
    other.force(route)
    ids = torch.tensor(prompts_of([5]))
    with torch.no_grad():
        assert torch.equal(handle.model(input_ids=ids).logits, other.model(input_ids=ids).logits)
    assert executed_as_decided(steps[0], describe(handle, "arm", "hero", "dense")) == []


def test_an_arm_labelled_masked_that_does_skip_fails_rule_1() -> None:
    handle, steps = routed(layers=[2, 3])
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([9])))
    labelled = describe(handle, "arm", "hero", "dense").model_copy(update={"discards": True})
    assert any("all 9 must in an arm that discards" in problem for problem in executed_as_decided(steps[0], labelled))


def test_grouped_is_refused_where_it_cannot_multiply() -> None:
    with pytest.raises(
        InputError, match="grouped works in float32, bfloat16 and float16, and the model is in torch.float64"
    ):
        routed(strategy="grouped")
    model = random_model("llama", dtype=torch.bfloat16, intermediate_size=44)
    with pytest.raises(InputError, match=r"the model's feed-forward width \(44\) × 2 bytes is none"):
        routed(model=model, strategy="grouped")


def test_a_grouped_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is asked for its value between the first routable layer and the last."""
    handle, _ = routed(model=random_model("llama", dtype=torch.float32), strategy="grouped")
    handle.recorder.detach()
    asked: list[str] = []
    ids = torch.tensor(prompts_of([6, 6]))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *a, plain=plain, name=name: (asked.append(name), plain(*a))[1])
    with torch.no_grad():
        handle.model(input_ids=ids)
    assert asked == []


# -- forced routes -----------------------------------------------------------------------------------


def test_a_forced_share_of_pairs_takes_the_adapter() -> None:
    handle, steps = routed(gates={"forced": {"ratio": 0.75, "seed": 1}}, layers=[1, 2, 3, 4, 5])
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([200] * 4)))
    share = 1 - sum(int(d.choice.sum()) for d in steps[0].decisions) / (4 * 200 * 5)
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 4000)
    patterns = {tuple(d.choice[i] for d in steps[0].decisions) for i in range(800)}
    assert len(patterns) == 32  # every combination of five layers: tokens and layers are drawn by themselves
    assert handle.synthetic == "forced: 75% of (token, layer) pairs skip, pattern random, seed 1"


@pytest.mark.parametrize("pattern", ["random", "shared", "middle"])
def test_a_forced_route_is_the_reference_with_scale_1(pattern: str) -> None:
    handle, steps = routed(gates={"forced": {"ratio": 0.5, "pattern": pattern}}, layers=[0, 1, 3, 4])
    (prompt,) = prompts_of([7])
    with torch.no_grad():
        logits = handle.model(input_ids=torch.tensor([prompt])).logits[0]
    route = [d.choice.astype(bool).tolist() for d in steps[0].decisions]
    found = reference(handle, prompt, forced=route)
    assert apart(logits, found.logits) < 1e-9
    for decision, layer in zip(steps[0].decisions, found.rows, strict=True):
        assert apart(torch.from_numpy(decision.gate), torch.tensor([row.g for row in layer])) < 1e-6


def test_a_forced_token_is_told_the_same_in_any_company() -> None:
    route = ForcedTokens(ratio=0.5, seed=9)
    handle, steps = routed()
    handle.force(route)
    prompts = prompts_of([9, 4, 1, 6])
    names = [f"request-{i}" for i in range(4)]
    whole = decode(handle, steps, prompts, "left")
    for i, name in enumerate(names):
        assert decode(handle, steps, [prompts[i]], "left", [name])[name].decisions == whole[name].decisions
    other = decode(handle, steps, [prompts[0]], "left", ["another request"])["another request"]
    assert other.decisions != whole["request-0"].decisions
    handle.force(ForcedTokens(ratio=0.5, seed=10))
    assert decode(handle, steps, prompts, "left")["request-0"].decisions != whole["request-0"].decisions


def test_all_adapters_forced_is_the_reference_with_scale_1() -> None:
    handle, _ = routed(layers=[1, 2, 5])
    handle.force("closed")
    assert handle.synthetic == "forced: every gate closed"
    (prompt,) = prompts_of([5])
    with torch.no_grad():
        logits = handle.model(input_ids=torch.tensor([prompt])).logits[0]
    assert apart(logits, reference(handle, prompt, forced=[[False] * 5] * 3).logits) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_open_is_the_dense_model_to_the_bit(dtype: torch.dtype) -> None:
    model = random_model("llama", dtype=dtype)
    handle, _ = routed(model=model, gates="open")
    batch = padded(prompts_of([9, 4, 1, 6]), "left")
    with torch.no_grad():
        mine, dense = handle.model(**batch).logits, model(**batch).logits
    assert torch.equal(mine[batch["attention_mask"].bool()], dense[batch["attention_mask"].bool()])
    with pytest.raises(InputError, match="cannot force gates to 'half'"):
        handle.force("half")


# -- packed batches ----------------------------------------------------------------------------------

REQUESTS = {"a": (prompts_of([9])[0], 5), "b": (prompts_of([4], seed=1)[0], 7), "c": (prompts_of([1], seed=2)[0], 4)}


@pytest.mark.parametrize("options", [{}, {"gates": {"forced": {"ratio": 0.5}}}], ids=["router", "forced"])
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 6}], ids=["whole prompts", "split prompts"])
def test_packed_batches_decide_and_say_what_each_whole_sequence_does_alone(
    options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Tokens decide for themselves, so the engine may also split a prompt."""
    handle, steps = routed(layers=[1, 2, 3, 5], **options)
    found = serve(handle.model, REQUESTS, **settings)
    record = describe(handle, "arm", "hero", None)
    assert any(len(step.sequences) > 1 for step in steps)
    assert all(executed_as_decided(step, record) == [] for step in steps)
    together = decisions_by_token(steps)
    for name, (prompt, _) in REQUESTS.items():
        assert found[name].error is None
        whole = [*prompt, *found[name].generated_tokens]
        steps.clear()
        handle.tracker.name([name])
        with torch.no_grad():
            logits = handle.model(input_ids=torch.tensor([whole[:-1]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == found[name].generated_tokens
        alone = decisions_by_token(steps)
        assert len(alone) == 4 * (len(whole) - 1)
        assert alone == {key: together[key] for key in alone}


def decisions_by_token(steps: list[Any]) -> dict[tuple[str, int, int], int]:
    """(request, position, layer) → choice."""
    found = {}
    for step in steps:
        sequences = step.sequences
        keys = [(r, p) for i, r in enumerate(sequences.requests) for p in sequences.positions(i)]
        for decision in step.decisions:
            found |= {(*key, decision.layer): int(c) for key, c in zip(keys, decision.choice, strict=True)}
    return found


def test_foreign_history_is_refused_in_decode() -> None:
    handle, _ = routed(variant="foreign_history")
    found = serve(handle.model, {"a": (prompts_of([5])[0], 3)})
    assert "variant foreign_history" in found["a"].error
    out = handle.model(input_ids=torch.tensor(prompts_of([5])), use_cache=True)
    with pytest.raises(InputError, match=r"a decode step \(here: request 'row-0'\) does not hold it"):
        handle.model(input_ids=torch.tensor([[3]]), cache=out.cache, use_cache=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"strategy": "masked"}, {"gates": {"forced": {"ratio": 0.75}}}], ids=str)
def test_the_checks_before_a_run_pass(options: dict[str, Any], dtype: torch.dtype) -> None:
    backbone = random_model("llama", dtype=dtype)
    arm = build(backbone, "mine", "hero", options, "dense").record
    found = verify.verify(backbone, arm, prompts_of([60, 40, 20, 6]))
    assert [record.detail for record in found if not record.passed] == []


# -- the arms of the contract ------------------------------------------------------------------------


def test_the_arms_of_the_contract_do_decide_differently() -> None:
    """What makes the contract's tests over `names()` mean something for this method."""
    handle, steps = Arm("hero", {}, disturbed=True).wrap()
    decode(handle, steps, prompts_of([9, 4, 1, 6]), "left")
    shares = [float(d.choice.mean()) for d in steps[0].decisions]
    assert any(0.1 < share < 0.9 for share in shares)
