"""HeRo against a reference written token by token, the mistakes readers of it make, precisions and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from profiler.execution.history_router import VARIANTS
from profiler.methods.hero import Hero
from tests.profiler.methods.hero_models import SCORES, apart, assert_equal, columns, reference, routed, scores_of
from tests.profiler.methods.hero_reference import Mistake
from tests.profiler.tiny import exact_model, padded, prompts_of, random_model

# -- the model against the reference -----------------------------------------------------------------

LAYERS = {"last half": None, "all": list(range(6)), "one": [3], "the first": [0], "scattered": [0, 2, 5], "two": [1, 4]}


@pytest.mark.parametrize("gradients", [False, True], ids=["folded", "plain"])
@pytest.mark.parametrize("memory", ["matrix", "dual"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_reference(variant: str, memory: str, gradients: bool) -> None:
    if (variant, memory) == ("shuffled_history", "matrix"):
        return  # refused: see `test_hero_options`
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
