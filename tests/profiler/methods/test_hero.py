"""HeRo against a reference written token by token, the mistakes readers of the method make, strategies, checkpoints."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from profiler import methods, verify
from profiler.arms import build, describe
from profiler.errors import InputError, RuleError
from profiler.execution.history_router import LOCAL, VARIANTS, Scores
from profiler.execution.routes import ForcedTokens
from profiler.methods.hero import Hero
from profiler.stepdata import executed_as_decided
from tests.profiler.engine import serve
from tests.profiler.methods.hero_reference import Mistake, Reference, Row, hero_forward
from tests.profiler.routed_arms import Arm, decode
from tests.profiler.tiny import exact_model, padded, prompts_of, random_model, wrapped

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


# -- the model against the reference -----------------------------------------------------------------

LAYERS = {"last half": None, "all": list(range(6)), "one": [3], "the first": [0], "scattered": [0, 2, 5], "two": [1, 4]}


@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
@pytest.mark.parametrize("memory", ["matrix", "dual"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_reference(variant: str, memory: str, gradients: bool) -> None:
    if (variant, memory) == ("shuffled_history", "matrix"):
        return  # refused: see below
    handle, _ = routed(variant=variant, memory=memory, layers=[0, 1, 2, 4, 5], seed=3)
    (prompt,) = prompts_of([7], seed=1)
    found = reference(handle, prompt)
    with torch.set_grad_enabled(gradients):
        assert_equal(handle, prompt, found)
    taken = columns(found.rows, "ffn")
    assert 0 < taken.mean() < 1, "all tokens went one way; the test shows little"


@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
@pytest.mark.parametrize("shape", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("layers", LAYERS)
def test_any_choice_of_layers_is_the_reference(layers: str, shape: str, gradients: bool) -> None:
    handle, _ = routed(shape, layers=LAYERS[layers])
    assert handle.routable == (LAYERS[layers] or [3, 4, 5])
    (prompt,) = prompts_of([6], seed=2)
    with torch.set_grad_enabled(gradients):
        assert_equal(handle, prompt, reference(handle, prompt))


@pytest.mark.parametrize("threshold", [0.2, 0.45, 0.8])
def test_another_threshold_is_the_reference(threshold: float) -> None:
    handle, _ = routed(threshold=threshold, layers=[1, 2, 3, 4, 5])
    (prompt,) = prompts_of([8])
    with torch.no_grad():
        assert_equal(handle, prompt, reference(handle, prompt))


@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
def test_a_residual_of_zeros_is_the_reference_and_finite(gradients: bool) -> None:
    """One token whose embedding is 0, in a model without biases: h̄ = 0 and δ = 0 in every layer."""
    model = exact_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0
    handle, _ = routed(model=model, layers=[0, 1, 2, 3])
    found = reference(handle, [5])
    assert all(math.isfinite(getattr(row, name)) for layer in found.rows for row in layer for name in SCORES)
    assert [layer[0].d for layer in found.rows] == [0.0] * 4
    with torch.set_grad_enabled(gradients):
        assert_equal(handle, [5], found)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", ["full", "no_history", "shuffled_history", "foreign_history"])
def test_each_sequence_of_a_ragged_batch_is_the_reference(variant: str, side: str) -> None:
    handle, _ = routed(variant=variant, layers=[1, 2, 3, 5])
    prompts = prompts_of([9, 4, 1, 6])
    batch = padded(prompts, side)
    with torch.no_grad(), scores_of(handle) as seen:
        logits = handle.model(**batch).logits
    real = batch["attention_mask"].bool()
    for i, prompt in enumerate(prompts):
        found = reference(handle, prompt)
        assert apart(logits[i][real[i]], found.logits) < 1e-9
        for name in SCORES:
            mine = torch.stack([getattr(scores, name).view(real.shape)[i][real[i]] for scores in seen])
            assert apart(mine, columns(found.rows, name)) < 1e-9, name


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "foreign_history"])
def test_the_memory_is_empty_at_every_forward(variant: str) -> None:
    """A token decoded with a cache has the very scores it has in the whole sequence: nothing of the steps before it is
    in its memory, and nothing of its own forward is missing."""
    handle, _ = routed(variant=variant, layers=[0, 2, 3, 4])
    (ids,) = prompts_of([9])
    found = reference(handle, ids)
    with torch.no_grad(), scores_of(handle) as seen:
        out = handle.model(input_ids=torch.tensor([ids[:5]]), use_cache=True)
        logits = [out.logits[0]]
        for token in ids[5:]:
            out = handle.model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
            logits.append(out.logits[0])
    assert apart(torch.cat(logits), found.logits) < 1e-9
    for name in SCORES:
        steps = [seen[k : k + 4] for k in range(0, len(seen), 4)]
        mine = torch.cat([torch.stack([getattr(scores, name) for scores in step]) for step in steps], dim=1)
        assert apart(mine, columns(found.rows, name)) < 1e-9, name


def test_first_and_second_layers() -> None:
    handle, _ = routed(layers=[1, 3, 4])
    with torch.no_grad(), scores_of(handle) as (seen):
        handle.model(input_ids=torch.tensor(prompts_of([6])))
    first, second, third = seen
    assert not first.d.any()
    assert not first.gamma.any()
    assert not first.nu.any()
    assert bool((second.d > 0).all())
    assert not second.gamma.any()
    assert bool((second.nu > 0).all())
    assert bool((third.gamma != 0).all())
    assert torch.equal(first.m, first.p)
    assert torch.allclose(third.m, first.p * second.p * third.p, rtol=1e-14)
    for scores in seen:
        assert torch.allclose(scores.p, torch.sigmoid(scores.a / 0.9), rtol=1e-14)
        assert torch.allclose(scores.g, torch.sigmoid(scores.a + scores.b), rtol=1e-14)


def test_the_residual_change_is_since_the_previous_routable_layer() -> None:
    """Worked out from hidden states: with layers 1 and 4 routable, d_2 = ‖h̄_4 − h̄_1‖, attention's part included."""
    handle, _ = routed(layers=[1, 4])
    h_bars: dict[int, Tensor] = {}
    for layer, block in enumerate(handle.decoder.blocks):
        norm = cast(Any, block).post_attention_layernorm
        norm.register_forward_pre_hook(lambda _, args, layer=layer: h_bars.__setitem__(layer, args[0][0]))
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(input_ids=torch.tensor(prompts_of([5])))
    assert torch.allclose(seen[1].d, (h_bars[4] - h_bars[1]).norm(dim=1), rtol=1e-12)
    assert not torch.allclose(seen[1].d, (h_bars[4] - h_bars[3]).norm(dim=1), rtol=1e-2)


@pytest.mark.parametrize("mistake", [m for m in get_args(Mistake) if m != "gate above threshold"])
def test_the_comparison_with_the_reference_would_show_a_mistake(mistake: Any) -> None:
    """Logits move by a thousand times what the tests above allow, with choices pinned so that it is not a flip."""
    handle, _ = routed(layers=[1, 2, 3, 5])
    (prompt,) = prompts_of([7], seed=1)
    right = reference(handle, prompt)
    pinned = columns(right.rows, "ffn").bool().tolist()
    wrong = reference(handle, prompt, pinned=pinned, mistake=mistake)
    assert apart(wrong.logits, right.logits) > 1e-6
    assert apart(right.logits, reference(handle, prompt, pinned=pinned).logits) == 0


def test_at_the_threshold_the_ffn_runs() -> None:
    """Both heads say 0, so g is σ(0) = 0.5 exactly; the output's scale is then 0.5 either way, and the branch tells."""
    handle, steps = routed(layers=[2, 3])
    with torch.no_grad():
        for head in (handle.router.f_psi, handle.router.f_theta):
            head[2].weight.zero_()
            head[2].bias.zero_()
    (prompt,) = prompts_of([4])
    right, wrong = reference(handle, prompt), reference(handle, prompt, mistake="gate above threshold")
    with torch.no_grad():
        assert_equal(handle, prompt, right)
    assert apart(right.logits, wrong.logits) > 1e-3
    assert all(bool((d.choice == 1).all()) and bool((d.gate == 0.5).all()) for d in steps[0].decisions)


def test_a_threshold_just_met_and_just_missed() -> None:
    handle, _ = routed(layers=[2])
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(input_ids=torch.tensor([[7]]))
    gate = float(seen[0].g)
    for threshold, choice in ((gate, 1), (math.nextafter(gate, 1), 0), (math.nextafter(gate, 0), 1)):
        handle, steps = routed(layers=[2], threshold=threshold)
        with torch.no_grad():
            handle.model(input_ids=torch.tensor([[7]]))
        assert steps[0].decisions[0].choice.tolist() == [choice]


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_is_the_reference_to_three_digits_with_decisions_pinned(variant: str) -> None:
    model = random_model("llama", dtype=torch.float32)
    handle, _ = routed(model=model, variant=variant, layers=[1, 2, 3, 4, 5])
    (prompt,) = prompts_of([12], seed=5)
    with torch.no_grad(), scores_of(handle) as seen:
        logits = handle.model(input_ids=torch.tensor([prompt])).logits[0]
    chosen = torch.stack([scores.g >= 0.5 for scores in seen])
    found = reference(handle, prompt, pinned=chosen.tolist())
    assert apart(logits, found.logits) < 1e-3
    for name in SCORES:
        mine = torch.stack([getattr(scores, name) for scores in seen])
        assert apart(mine, columns(found.rows, name)) < 1e-3, name
    # A decision may differ only where its gate is at the threshold to rounding; there are few of those.
    near = (columns(found.rows, "g") - 0.5).abs() < 1e-4
    differing = chosen != (columns(found.rows, "g") >= 0.5)
    assert not bool((differing & ~near).any())
    assert int(near.sum()) <= 2


def test_router_and_memory_are_float32_over_a_bfloat16_backbone() -> None:
    handle, _ = routed(model=random_model("llama", dtype=torch.bfloat16), layers=[0, 2, 4])
    assert {tensor.dtype for tensor in handle.router.parameters()} == {torch.float32}
    assert {tensor.dtype for adapter in handle.adapters for tensor in adapter.parameters()} == {torch.bfloat16}
    h_bars: list[Tensor] = []
    cast(Any, handle.decoder.blocks[0]).post_attention_layernorm.register_forward_pre_hook(
        lambda _, args: h_bars.append(args[0])
    )
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(input_ids=torch.tensor(prompts_of([5])))
    assert {getattr(scores, name).dtype for scores in seen for name in SCORES} == {torch.float32}
    wide, _ = routed(layers=[0, 2, 4])
    with torch.no_grad():
        for mine, theirs in zip(wide.router.parameters(), handle.router.parameters(), strict=True):
            mine.copy_(theirs)
        alone = wide.router.step(_folded(wide), 1, h_bars[0][0].double(), None)[0]
    assert apart(seen[0].g, alone.g) < 1e-5


@pytest.mark.parametrize("strategy", ["gather", "overlay", "masked"])
@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_leaves_router_and_memory_in_float32(variant: str, gradients: bool, strategy: str) -> None:
    """What they say of the hidden states they are given is what they say of them without it."""
    handle, _ = routed(model=random_model("llama", dtype=torch.float32), variant=variant, strategy=strategy)
    given: list[Tensor] = []
    for gate in handle._gates:
        gate.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    ids = torch.tensor(prompts_of([9]))
    with torch.set_grad_enabled(gradients), scores_of(handle) as seen:
        with torch.autocast("cpu", torch.bfloat16):
            handle.model(input_ids=ids)
        under, hidden = list(seen), list(given)
        with around_given(handle, hidden):
            handle.model(input_ids=ids)
    for mine, alone in zip(under, seen[len(under) :], strict=True):
        assert mine.g.dtype == torch.float32
        assert all(torch.equal(getattr(mine, name).nan_to_num(), getattr(alone, name).nan_to_num()) for name in SCORES)


@contextmanager
def around_given(handle: Hero, hidden: Sequence[Tensor]) -> Iterator[None]:
    """Each gate is given these hidden states, whatever reaches it."""
    hooks = [
        gate.register_forward_pre_hook(lambda _, args, h=h: (h,))  # type: ignore[misc]
        for gate, h in zip(handle._gates, hidden, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
def test_what_is_not_finite_stays_in_its_sequence(gradients: bool) -> None:
    model = random_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("nan")
    handle, _ = routed(model=model, disturbed=False, variant="foreign_history", layers=[1, 2, 3])
    with torch.set_grad_enabled(gradients):
        poisoned, sound = handle.model(**padded([[7, 5], [11, 12]], "left")).logits
    assert not torch.isfinite(poisoned[1]).any()
    assert torch.isfinite(sound).all()


def _folded(handle: Hero) -> Any:
    from profiler.execution.folded_router import FoldedMath

    return FoldedMath(handle.router)


def test_folded_weights_follow_their_parameters() -> None:
    handle, _ = routed()
    ids = torch.tensor(prompts_of([5]))
    with torch.no_grad():
        before = handle.model(input_ids=ids).logits
        handle.router.W_hd.weight.mul_(2)
        after = handle.model(input_ids=ids).logits
    assert not torch.equal(before, after)
    assert apart(after, handle.model(input_ids=ids).logits.detach()) < 1e-12  # with gradients: not folded


def test_inference_mode_and_no_grad_may_alternate_with_training() -> None:
    handle, _ = routed(layers=[1, 2, 3])
    ids = torch.tensor(prompts_of([6]))
    with torch.inference_mode():
        first = handle.model(input_ids=ids).logits.clone()
    with torch.no_grad():
        assert torch.equal(first, handle.model(input_ids=ids).logits)
    handle.model(input_ids=ids).logits.sum().backward()
    with torch.inference_mode():
        assert torch.equal(first, handle.model(input_ids=ids).logits)


def test_gradients_reach_router_memory_both_heads_and_adapters() -> None:
    handle, _ = routed(layers=[1, 2, 3, 4])
    logits = handle.model(input_ids=torch.tensor(prompts_of([16, 16]))).logits
    torch.logsumexp(logits, -1).sum().backward()
    silent = [
        name for name, tensor in handle.trainables().items() if tensor.grad is None or not bool(tensor.grad.any())
    ]
    assert silent == []


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


# -- options and checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.3}, "arms.mine.budget: budget is 0.25 or 0.40; for another choice of layers give"),
        ({"layers": [1, 1]}, "arms.mine.layers: each layer may be listed once"),
        ({"layers": []}, "arms.mine.layers: List should have at least 1 item"),
        ({"threshold": 1.0}, "arms.mine.threshold: Input should be less than 1"),
        ({"adapter_width": 0}, "arms.mine.adapter_width: Input should be greater than or equal to 1"),
        ({"budget": 0.25, "layers": [1]}, "arms.mine: give `budget` or `layers`, not both"),
        ({"variant": "half"}, "arms.mine.variant: Input should be 'full'"),
        ({"thresold": 0.4}, "arms.mine.thresold: method 'hero' has no such option; did you mean 'threshold'?"),
        ({"gates": {"forced": {"ratio": 2}}}, "arms.mine.gates.forced.ratio: Input should be less than or equal to 1"),
        (
            {"variant": "shuffled_history", "memory": "matrix"},
            "arms.mine: variant shuffled_history needs memory dual",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        methods.configure("hero", options, where="arms.mine.")
    assert str(caught.value).startswith(message)


def test_defaults_are_decided_and_described() -> None:
    handle, _ = routed(disturbed=False)
    assert (handle.options.layers, handle.options.adapter_width) == ([3, 4, 5], 7)  # 32·896/4096
    assert (handle.options.threshold, handle.options.variant, handle.options.memory) == (0.5, "full", "dual")
    assert handle.untrained
    described = describe(handle, "arm", "hero", None).options
    assert (described["layers"], described["budget"], described["memory"]) == ([3, 4, 5], None, "dual")
    assert methods.configure("hero", described) == handle.config
    bigger, _ = routed(disturbed=False, budget=0.4)
    assert bigger.options.layers == [2, 3, 4, 5]
    with pytest.raises(InputError, match="layers: 6 is none of this model's, which are 0 to 5"):
        routed(layers=[6])


def test_a_fresh_router_runs_every_ffn_and_a_fresh_adapter_adds_nothing() -> None:
    handle, steps = routed(disturbed=False)
    ids = torch.tensor(prompts_of([5]))
    with torch.no_grad(), scores_of(handle) as seen:
        handle.model(input_ids=ids)
    assert all(bool((scores.g == torch.sigmoid(torch.tensor(2.0).double())).all()) for scores in seen)
    assert all(bool((d.choice == 1).all()) for d in steps[0].decisions)
    assert max(abs(rho - 0.98) for rho in handle.rho()) < 1e-6
    assert not any(adapter.W2.weight.any() for adapter in handle.adapters)
    again, _ = routed(disturbed=False)
    other, _ = routed(disturbed=False, seed=1)
    assert torch.equal(handle.router.W_hd.weight, again.router.W_hd.weight)
    assert not torch.equal(handle.router.W_hd.weight, other.router.W_hd.weight)


def test_wrapping_leaves_the_caller_s_random_state() -> None:
    model = exact_model("llama")
    torch.manual_seed(4)
    before = torch.get_rng_state()
    wrapped(model, "hero")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_says_what_an_arm_leaves_open(tmp_path: Path, dtype: torch.dtype) -> None:
    handle, _ = routed(layers=[0, 4], adapter_width=5, threshold=0.6, variant="no_position")
    handle.save(tmp_path / "made", dtype=dtype, base="tiny")
    other, _ = routed(disturbed=False, checkpoint=str(tmp_path / "made"))
    assert other.options == handle.options
    assert not other.untrained
    assert other.caveat is None
    for (name, mine), theirs in zip(handle.trainables().items(), other.trainables().values(), strict=True):
        assert torch.equal(mine.to(dtype), theirs.to(dtype)), name
    facts = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (facts["method"], facts["layers"], facts["base"]) == ("hero", 6, "tiny")
    assert facts["rho"] == [round(1 / (1 + math.exp(-eta)), 6) for eta in handle.router.eta.tolist()]
    part, _ = routed(disturbed=False, checkpoint=str(tmp_path / "made"), variant="no_memory_read", threshold=0.3)
    assert part.caveat == "trained as variant no_position, run as no_memory_read"


def test_a_checkpoint_that_does_not_fit_is_refused_with_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    handle, _ = routed(layers=[0, 4], adapter_width=5)
    handle.save(folder, base="tiny")
    for options, message in [
        ({"layers": [0, 5]}, r"its layers is \[0, 4\], the arm asks for \[0, 5\]"),
        ({"budget": 0.25}, r"its layers is \[0, 4\], the arm asks for \[3, 4, 5\]"),
        ({"adapter_width": 6}, "its adapter_width is 5, the arm asks for 6"),
        ({"variant": "wide_local"}, "it was trained as variant full, whose parameters are not those of wide_local"),
    ]:
        with pytest.raises(InputError, match=message):
            routed(checkpoint=str(folder), **options)
    with pytest.raises(InputError, match="its architecture is 'LlamaForCausalLM', this model's is 'Qwen2ForCausalLM'"):
        routed("qwen2", checkpoint=str(folder))
    with pytest.raises(InputError, match="it was trained on tiny; this model has its shape and other weights"):
        routed(model=exact_model("llama", seed=1), checkpoint=str(folder))
    plain, _ = routed()
    with pytest.raises(InputError, match=r"its layers is \[0, 4\], the arm asks for \[3, 4, 5\]"):
        plain.restore(folder)
    config = folder / "config.json"
    whole = config.read_text()
    for key, value, message in [
        ("format", 2, "its format is 2, this version reads 1"),
        ("options", {"layers": [0, 4]}, "config.json: options.adapter_width: Field required"),
        ("base_sample", [1.0], "must hold a base_sample of 48 numbers, and it holds 1"),
    ]:
        config.write_text(json.dumps({**json.loads(whole), key: value}))
        with pytest.raises(InputError, match=message):
            routed(checkpoint=str(folder))
    config.write_text(whole)
    (folder / "hero.safetensors").unlink()
    with pytest.raises(InputError, match=r"hero.safetensors cannot be read"):
        routed(checkpoint=str(folder))


def test_a_refused_arm_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    model = exact_model("llama")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match="there is no such folder"):
        Hero.wrap(model, methods.configure("hero", {"checkpoint": str(tmp_path / "none")}), cast(Any, None))
    assert [name for name, _ in model.named_modules()] == names
    assert not any(block.post_attention_layernorm._forward_pre_hooks for block in model.model.layers)


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    handle, _ = routed()
    with torch.no_grad():
        handle.router.W_q.weight[0, 0] = 1e6
    with pytest.raises(RuleError, match="router.W_q.weight holds values that torch.float16 cannot hold"):
        handle.save(tmp_path / "made", dtype=torch.float16)
    assert not (tmp_path / "made").exists()


def test_the_arms_of_the_contract_do_decide_differently() -> None:
    """What makes the contract's tests over `names()` mean something for this method."""
    handle, steps = Arm("hero", {}, disturbed=True).wrap()
    decode(handle, steps, prompts_of([9, 4, 1, 6]), "left")
    shares = [float(d.choice.mean()) for d in steps[0].decisions]
    assert any(0.1 < share < 0.9 for share in shares)
