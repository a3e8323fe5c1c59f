"""HeRo's objective: loss and every gradient against the formulas, written out token by token in float64.

The reference differentiates the loop of `hero_reference` with decisions taken as they fall: one sequence at a time,
without pads, batches or transformers. What it takes for the loss is written here from METHODS §1 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from profiler import methods
from profiler.errors import InputError
from profiler.execution.depth_walk import Walk, predicting, squared_usage
from profiler.execution.history_router import VARIANTS
from profiler.methods import Losses
from profiler.methods.hero import Hero, HeroObjective
from profiler.recorder import Recorder
from tests.profiler.methods.hero_models import scores_of, stir
from tests.profiler.methods.hero_reference import Mistake, hero_forward
from tests.profiler.tiny import exact_model, padded, prompts_of, random_model, wrapped

LENGTHS = [7, 3, 5]
PROMPTS = prompts_of(LENGTHS, seed=4)
PREDICTED = sum(LENGTHS) - len(LENGTHS)
ALPHA = 0.05


def learner(shape: str = "llama", checkpointing: bool = False, **options: Any) -> Hero:
    """Random router and adapters of float64, ready to be trained, gradients on for what is trained only."""
    handle, _ = wrapped(exact_model(shape), "hero", **{"layers": [1, 2, 3, 5], **options})
    assert isinstance(handle, Hero)
    handle.recorder.mode = "off"
    stir(handle)
    for parameter in handle.model.parameters():
        parameter.requires_grad_(False)
    handle.prepare(checkpointing)
    for parameter in handle.trainables().values():
        parameter.requires_grad_(True)
    handle.model.train()
    return handle


def batch(prompts: Sequence[list[int]] = PROMPTS, width: int | None = None) -> tuple[Tensor, Tensor]:
    given = padded(list(prompts), "right", width)
    return given["input_ids"], given["attention_mask"].bool()


def losses(handle: Hero, prompts: Sequence[list[int]] = PROMPTS, alpha: float = ALPHA, **options: Any) -> Losses:
    ids_BT, mask_BT = batch(prompts)
    objective = HeroObjective(alpha=alpha)
    return handle.losses(ids_BT, mask_BT, objective, **{"tokens": PREDICTED, "sequences": len(PROMPTS), **options})


def gradients(handle: Hero, *found: Tensor) -> dict[str, Tensor]:
    """Of the sum of what was found, each trainable's; 0 where nothing reaches it."""
    for parameter in handle.trainables().values():
        parameter.grad = None
    torch.stack(found).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in handle.trainables().items()}


Penalty = Callable[[list[list[Tensor]]], Tensor]


def the_penalty(gates: list[list[Tensor]]) -> Tensor:
    """Formula 18 for one sequence, its mean left out: Σ_{t<T} (Σ_j g_jt)²."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(gates[0]) - 1):
        used = torch.zeros((), dtype=torch.float64)
        for layer in gates:
            used = used + layer[t]
        total = total + used * used
    return total


def slow(
    handle: Hero,
    penalty: Penalty = the_penalty,
    alpha: float = ALPHA,
    pinned: list[list[list[bool]]] | None = None,
    mistake: Mistake | None = None,
) -> tuple[float, dict[str, Tensor], list[list[list[bool]]]]:
    """(loss, gradients by the product's names, choices by sequence and layer and token)."""
    leaves = {name: p.detach().double().clone().requires_grad_(True) for name, p in handle.trainables().items()}
    weights = {name: p.detach().double() for name, p in handle.model.named_parameters()}
    nll = regulariser = torch.zeros((), dtype=torch.float64)
    choices = []
    for i, ids in enumerate(PROMPTS):
        found = hero_forward(
            weights, handle.model.config, leaves, ids, handle.routable, variant=handle.options.variant,
            threshold=handle.threshold, shuffle_seed=handle.config.seed,
            pinned=None if pinned is None else pinned[i], mistake=mistake,
        )  # fmt: skip
        for t in range(len(ids) - 1):
            row = found.logits[t]
            nll = nll + torch.log(torch.exp(row - row.max()).sum()) + row.max() - row[ids[t + 1]]
        regulariser = regulariser + penalty(found.gates)
        choices.append([[row.ffn for row in layer] for layer in found.rows])
    loss = (nll + alpha * regulariser) / PREDICTED
    loss.backward()
    return (
        loss.item(),
        {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()},
        choices,
    )


def apart(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each gradient, relative to its largest value.

    Where a memory holds one entry, its weight is x / (x + ε): what is learned through x is a difference of nearly equal
    numbers, too small to be compared with itself.
    """
    assert mine.keys() == wanted.keys()
    smallest = 1e-6 * max(float(gradient.abs().max()) for gradient in wanted.values())
    return {
        name: float((mine[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=smallest))
        for name in wanted
    }


# -- against the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["dual", "matrix"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient_are_the_formulas(variant: str, memory: str) -> None:
    if (variant, memory) == ("shuffled_history", "matrix"):
        return  # refused
    handle = learner(variant=variant, memory=memory, seed=3)
    found = losses(handle)
    mine = gradients(handle, found.total)
    loss, wanted, choices = slow(handle)
    assert float(found.total.detach()) == pytest.approx(loss, rel=1e-10)
    assert max(apart(mine, wanted).values()) < 1e-8
    taken = [choice for sequence in choices for layer in sequence for choice in layer]
    assert 0.1 < sum(taken) / len(taken) < 0.9, "nearly all tokens went one way; the test shows little"


@pytest.mark.parametrize("layers", [[0], [2, 3], list(range(6))], ids=str)
@pytest.mark.parametrize("shape", ["llama-tied", "qwen2"])
def test_any_choice_of_layers_has_the_formulas_gradients(shape: str, layers: list[int]) -> None:
    handle = learner(shape, layers=layers, strategy="masked")
    found = losses(handle)
    mine = gradients(handle, found.total)
    loss, wanted, _ = slow(handle)
    assert float(found.total.detach()) == pytest.approx(loss, rel=1e-10)
    assert max(apart(mine, wanted).values()) < 1e-8


def test_the_parts_add_up_and_are_counted_by_hand() -> None:
    handle = learner()
    found = losses(handle, ramp=0.25)
    _, _, choices = slow(handle)
    assert float(found.total.detach()) == pytest.approx(float(found.nll + 0.25 * ALPHA * found.penalty) / PREDICTED)
    assert found.deciders == PREDICTED
    # The last token of a sequence predicts nothing and is in no figure.
    by_hand = [sum(choice for sequence in choices for choice in sequence[j][:-1]) for j in range(4)]
    assert found.ran_L.tolist() == by_hand


# -- the mistakes of readers -------------------------------------------------------------------------


def inside(gates: list[list[Tensor]]) -> Tensor:
    """The square inside the sum: Σ_t Σ_j g²."""
    return torch.stack([g * g for layer in gates for g in layer[:-1]]).sum()


def rooted(gates: list[list[Tensor]]) -> Tensor:
    """Layer by layer inside a root: Σ_t (√(Σ_j g²))·L, a norm over depth in place of a sum."""
    per_token = torch.stack([torch.stack(layer[:-1]) for layer in gates])
    return (per_token.square().sum(0).sqrt() * len(gates)).sum()


def not_squared(gates: list[list[Tensor]]) -> Tensor:
    return torch.stack([g for layer in gates for g in layer[:-1]]).sum()


def last_token_too(gates: list[list[Tensor]]) -> Tensor:
    return the_penalty([[*layer, layer[-1]] for layer in gates])


def mean_over_depth(gates: list[list[Tensor]]) -> Tensor:
    return the_penalty(gates) / len(gates) ** 2


@pytest.mark.parametrize("mistake", [inside, rooted, not_squared, last_token_too, mean_over_depth])
def test_another_penalty_has_other_gradients(mistake: Penalty) -> None:
    handle = learner()
    mine = gradients(handle, losses(handle).total)
    _, theirs, _ = slow(handle, penalty=mistake)
    off = apart(mine, theirs)
    assert min(off["router.f_psi.2.bias"], off["router.f_theta.2.weight"], off["router.eta"]) > 1e-3


def test_the_sum_over_depth_comes_before_the_square() -> None:
    """Three layers at 0.5, 0.25 and 1: (1.75)² = 3.0625, while the squares add up to 1.3125."""
    g_LN = torch.tensor([[0.5, 0.0], [0.25, 1.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    valid_N = torch.tensor([True, False])
    total = squared_usage(g_LN, valid_N)
    assert total.item() == 3.0625
    total.backward()
    # d(Σg)²/dg_j = 2·Σg, the same for every layer of a token; nothing at a row that is not averaged.
    assert g_LN.grad is not None
    assert g_LN.grad.tolist() == [[3.5, 0.0]] * 3


def test_a_fresh_router_s_penalty_by_hand() -> None:
    """σ(2) = 0.8807970779778823 in each of four layers: (3.5231883)² = 12.412856."""
    handle = learner()
    handle.start(0)
    found = losses(handle)
    assert float(found.penalty) / PREDICTED == pytest.approx(12.412856, rel=1e-6)
    assert float(found.sums["sum_g"]) / PREDICTED == pytest.approx(3.5231883, rel=1e-6)
    assert found.ran_L.tolist() == [PREDICTED] * 4


def test_valid_rows_are_real_ones_with_a_real_one_after_them() -> None:
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert predicting(mask_BT).view(3, 4).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]


# -- what gradients reach, and what not --------------------------------------------------------------


def test_gradients_reach_router_memory_both_heads_and_adapters_and_nothing_else() -> None:
    handle = learner()
    found = gradients(handle, losses(handle).total)
    # η_1 decays an empty memory, and nobody reads what the last layer would write.
    assert found["router.eta"][1:-1].all()
    assert found["router.eta"][[0, -1]].tolist() == [0.0, 0.0]
    assert [name for name, gradient in found.items() if not bool(gradient.any())] == []
    frozen = [p for p in handle.model.parameters() if not p.requires_grad]
    assert len(frozen) == 6 * 9 + 3
    assert all(p.grad is None for p in frozen)


def test_the_language_model_loss_alone_teaches_the_router_through_the_scale() -> None:
    handle = learner()
    mine = gradients(handle, losses(handle, alpha=0.0).total)
    _, wanted, choices = slow(handle, alpha=0.0)
    assert bool(mine["router.f_psi.2.bias"].any())
    assert max(apart(mine, wanted).values()) < 1e-8
    # With every scale 1 and the same choices there is nothing to learn a gate from.
    _, without, again = slow(handle, alpha=0.0, mistake="no scale")
    assert not any(bool(without[name].any()) for name in without if name.startswith("router"))
    assert choices[0][0] == again[0][0]  # the first layer's choices, which no scale has touched


def test_the_threshold_is_not_differentiated() -> None:
    """Pinned choices have the gradients that compared ones have, so the comparison adds none."""
    handle = learner()
    mine = gradients(handle, losses(handle).total)
    _, wanted, choices = slow(handle)
    _, pinned, again = slow(handle, pinned=choices)
    assert again == choices
    assert all(torch.equal(pinned[name], wanted[name]) for name in wanted)
    # τ moves as far as the nearest gate above it: no choice changes, and no gradient does.
    with torch.no_grad(), scores_of(handle) as seen:
        for prompt in PROMPTS:
            handle.model(input_ids=torch.tensor([prompt]))
    above = min(float(scores.g[scores.g >= 0.5].min()) for scores in seen if bool((scores.g >= 0.5).any()))
    handle.options = replace(handle.options, threshold=above - 1e-9)
    assert above > 0.5
    moved = gradients(handle, losses(handle).total)
    assert all(torch.equal(mine[name], moved[name]) for name in mine)


def test_only_the_decided_branch_is_computed() -> None:
    handle = learner()
    rows = {"adapter": 0, "ffn": 0}
    block = handle.decoder.blocks[2]

    def count(name: str) -> Any:
        return lambda module, args: rows.__setitem__(name, rows[name] + args[0].shape[0])

    handle.adapters[1].W1.register_forward_pre_hook(count("adapter"))
    cast(Any, block.mlp).gate_proj.register_forward_pre_hook(count("ffn"))
    losses(handle)
    _, _, choices = slow(handle)
    ffn = sum(choice for sequence in choices for choice in sequence[1])
    assert rows == {"adapter": sum(LENGTHS) - ffn, "ffn": ffn}


def test_an_adapter_that_no_token_takes_gets_no_gradient() -> None:
    handle = learner()
    with torch.no_grad():
        cast(Any, handle.router.f_psi[2]).bias.fill_(1e3)
    losses(handle).total.backward()
    assert all(p.grad is None for name, p in handle.trainables().items() if name.startswith("adapters"))


# -- batches -----------------------------------------------------------------------------------------


def test_padding_and_company_count_for_nothing() -> None:
    handle = learner()
    whole = gradients(handle, losses(handle).total)
    one_by_one = gradients(handle, *(losses(handle, [prompt]).total for prompt in PROMPTS))
    assert max(apart(one_by_one, whole).values()) < 1e-9
    ids_BT, mask_BT = batch(width=13)
    ids_BT[~mask_BT] = 42
    found = handle.losses(ids_BT, mask_BT, HeroObjective(alpha=ALPHA), tokens=PREDICTED, sequences=3)
    assert max(apart(gradients(handle, found.total), whole).values()) < 1e-9
    assert found.deciders == PREDICTED


@pytest.mark.parametrize("variant", ["full", "shuffled_history", "no_history"])
@pytest.mark.parametrize("memory", ["dual", "matrix"])
def test_blocks_computed_again_have_the_same_gradients(variant: str, memory: str) -> None:
    if (variant, memory) == ("shuffled_history", "matrix"):
        return
    plain, again = (learner(checkpointing=on, variant=variant, memory=memory) for on in (False, True))
    calls = []
    mlp = cast(Any, again.decoder.blocks[3]).self_attn
    mlp.register_forward_hook(lambda *_: calls.append(1))
    wanted = gradients(plain, losses(plain).total)
    found = losses(again).total
    assert len(calls) == 1
    mine = gradients(again, found)
    assert len(calls) == 2
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_blocks_computed_again_belong_to_their_own_forward() -> None:
    """Two forwards, and one without gradients, before either goes back: each finds its own past, pads and choices."""
    plain, again = learner(), learner(checkpointing=True)
    wanted = gradients(plain, *(losses(plain, part).total for part in (PROMPTS[:2], PROMPTS[2:])))
    first, second = (losses(again, part).total for part in (PROMPTS[:2], PROMPTS[2:]))
    with torch.no_grad():
        again.model(input_ids=torch.tensor([[1, 2, 3]]))
    again.options = replace(again.options, threshold=0.99)  # a choice is not made twice
    mine = gradients(again, first, second)
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_a_block_computed_again_with_another_s_past_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the walk being kept, the first forward's blocks would read what the second one left."""
    parts = [PROMPTS[1], PROMPTS[1][::-1]]  # of equal length, so that shapes tell nothing
    plain, again = learner(), learner(checkpointing=True)
    wanted = gradients(plain, *(losses(plain, [part]).total for part in parts))
    walks: list[Walk] = []
    begin = Hero._begin

    def remembered(*args: Any) -> Walk:
        walks.append(begin(*args))
        return walks[-1]

    monkeypatch.setattr(Hero, "_begin", remembered)
    found = [losses(again, [part]).total for part in parts]
    walks[0].past = walks[1].past
    mine = gradients(again, *found)
    assert max(apart(mine, wanted).values()) > 1e-3


# -- precision ---------------------------------------------------------------------------------------


def test_what_is_trained_is_float32_over_a_bfloat16_backbone_and_computes_as_an_arm_does() -> None:
    trained, arm = (
        cast(Hero, wrapped(random_model("llama", dtype=torch.bfloat16), "hero", layers=[1, 2, 3])[0]) for _ in range(2)
    )
    stir(arm)
    trained.prepare(gradient_checkpointing=False)
    assert {p.dtype for p in trained.trainables().values()} == {torch.float32}
    assert {p.dtype for name, p in arm.trainables().items() if name.startswith("adapters")} == {torch.bfloat16}
    with torch.no_grad():
        for name, parameter in trained.trainables().items():
            parameter.copy_(arm.trainables()[name])
            parameter *= 1 + 2**-12  # between two numbers of bfloat16: rounded away as it computes
            if name.startswith("router"):
                parameter.copy_(arm.trainables()[name])
        ids = torch.tensor(PROMPTS[:1])
        assert torch.equal(trained.model(input_ids=ids).logits, arm.model(input_ids=ids).logits)
    losses(trained).total.backward()
    grad = trained.adapters[0].W1.weight.grad
    assert grad is not None
    assert grad.dtype == torch.float32


def test_what_cannot_be_trained_is_refused() -> None:
    handle = learner()
    handle.force("open")
    with pytest.raises(InputError, match="training needs gates: router"):
        losses(handle)
    grouped = methods.load("hero").wrap(
        random_model("llama", dtype=torch.float32), methods.configure("hero", {"strategy": "grouped"}), Recorder()
    )
    with pytest.raises(InputError, match="training needs strategy auto, gather, overlay or masked"):
        cast(Hero, grouped).prepare(gradient_checkpointing=False)
    with pytest.raises(InputError, match="objective.alpha: .*greater than or equal to 0"):
        methods.objective("hero", {"alpha": -1}, where="objective.")
