"""LayerRoute's objective: loss and every gradient against the paper's formulas, written out again in float64.

The reference takes one sequence at a time, without pads, batches or transformers; its adapters are merged into the
weights it differentiates through. Routers are made float64 here, so that both sides agree to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from profiler import methods
from profiler.errors import InputError
from profiler.execution.decoder import ATTENTION_PARTS
from profiler.methods.layerroute import LayerRoute, LayerRouteObjective, straight_through
from tests.profiler.slow_decoder import _block, _norm
from tests.profiler.tiny import disturb, exact_model, padded, prompts_of, wrapped

LENGTHS = [9, 4, 6]
PROMPTS = prompts_of(LENGTHS)
PREDICTED = sum(LENGTHS) - len(LENGTHS)
GATE_WEIGHT = 0.7
ALPHA, RANK = 6.0, 2


def learner(shape: str = "llama", **lora: Any) -> LayerRoute:
    """Random routers and adapters of float64, gradients on for what is trained only."""
    options = {"rank": RANK, "alpha": ALPHA, **lora}
    handle, _ = wrapped(exact_model(shape), "layerroute", lora=options)
    handle.recorder.mode = "off"
    assert isinstance(handle, LayerRoute)
    disturb(handle)
    for parameter in handle.model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in handle.trainables().items():
            if "lora" in name:
                parameter *= 0.3
        for i, router in enumerate(handle.routers):
            router.double()
            router.weight *= 0.2
            # Some layers run everything, some skip everything, the others part the batch.
            router.bias.fill_({0: 3.0, 3: -3.0}.get(i, 0.0))
    for parameter in handle.trainables().values():
        parameter.requires_grad_(True)
    return handle


def batch() -> tuple[Tensor, Tensor]:
    given = padded(PROMPTS, "right")
    return given["input_ids"], given["attention_mask"].bool()


def slow_loss(handle: LayerRoute, gate_weight: float) -> tuple[Tensor, dict[str, Tensor], list[list[bool]]]:
    """(loss, leaves by the product's names, which layers ran for each sequence), by the formulas of §3.1–3.3."""
    leaves = {name: p.detach().clone().requires_grad_(True) for name, p in handle.trainables().items()}
    config, weights = handle.model.config, {}
    for name, tensor in handle.model.named_parameters():
        if "lora_" not in name and "gatewise" not in name:
            weights[name.replace(".base_layer", "")] = tensor.detach()
    for layer in range(6):
        for part in ATTENTION_PARTS:
            place = f"model.layers.{layer}.self_attn.{part}"
            a, b = (next(v for n, v in leaves.items() if f"{place}.lora_{half}." in n) for half in "AB")
            weights[f"{place}.weight"] = weights[f"{place}.weight"] + ALPHA / RANK * b @ a
    nll, penalty, routes = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), []
    for ids in PROMPTS:
        hidden = weights["model.embed_tokens.weight"][torch.tensor(ids)]
        ran, sigmas = [], []
        for layer in range(6):
            pooled = hidden.sum(0) / len(ids)
            logit = (leaves[f"{layer}.weight"][0] * pooled).sum() + leaves[f"{layer}.bias"][0]
            sigma = 1 / (1 + torch.exp(-logit))
            hard = float(sigma > 0.5)
            gate = hard - sigma.detach() + sigma
            hidden = hidden + gate * (_block(weights, config, f"model.layers.{layer}.", hidden) - hidden)
            ran.append(bool(hard))
            sigmas.append(sigma)
        head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        scores = _norm(weights["model.norm.weight"], config, hidden) @ head.T
        for t in range(len(ids) - 1):
            nll = nll + torch.logsumexp(scores[t], 0) - scores[t, ids[t + 1]]
        penalty = penalty + sum(sigmas) / 6
        routes.append(ran)
    return nll / PREDICTED + gate_weight * penalty / len(PROMPTS), leaves, routes


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
def test_loss_and_gradients_are_those_of_the_formulas(shape: str) -> None:
    handle = learner(shape)
    objective = LayerRouteObjective(gate_weight=GATE_WEIGHT)
    found = handle.losses(*batch(), objective, tokens=PREDICTED, sequences=3)
    found.total.backward()
    wanted, leaves, routes = slow_loss(handle, GATE_WEIGHT)
    wanted.backward()
    assert len({tuple(route) for route in routes}) > 1  # the batch parts, so gates of both kinds are differentiated
    assert found.ran_L.tolist() == [sum(route[layer] for route in routes) for layer in range(6)]
    assert abs(float(found.total.detach() - wanted.detach())) < 1e-9
    for name, parameter in handle.trainables().items():
        assert parameter.grad is not None
        theirs = leaves[name].grad
        assert theirs is not None
        assert (parameter.grad - theirs).abs().max() <= 1e-8 * max(1.0, float(theirs.abs().max())), name
        # A router learns whatever it decides; adapters learn from the sequences that run their block.
        layer = int(name.removeprefix("model.layers.").partition(".")[0])
        assert bool(theirs.any()) == ("lora" not in name or any(route[layer] for route in routes)), name


def test_parts_of_the_loss_add_up() -> None:
    handle = learner()
    found = handle.losses(*batch(), LayerRouteObjective(gate_weight=GATE_WEIGHT), tokens=PREDICTED, sequences=3)
    total = float(found.total.detach())
    assert total == pytest.approx(float(found.nll) / PREDICTED + GATE_WEIGHT * float(found.penalty) / 3, rel=1e-12)


def test_micro_batches_add_up_to_the_batch() -> None:
    handle, objective = learner(), LayerRouteObjective()
    whole = handle.losses(*batch(), objective, tokens=PREDICTED, sequences=3)
    parts = []
    for prompt in PROMPTS:
        ids_BT = torch.tensor([prompt])
        parts.append(handle.losses(ids_BT, torch.ones_like(ids_BT).bool(), objective, tokens=PREDICTED, sequences=3))
    assert float(sum(part.total.detach() for part in parts)) == pytest.approx(float(whole.total.detach()), rel=1e-12)
    assert sum(part.ran_L for part in parts).tolist() == whole.ran_L.tolist()


def test_what_pads_hold_changes_nothing() -> None:
    handle, objective = learner(), LayerRouteObjective()
    ids_BT, mask_BT = batch()
    first = handle.losses(ids_BT, mask_BT, objective, tokens=PREDICTED, sequences=3)
    other = handle.losses(ids_BT.masked_fill(~mask_BT, 50), mask_BT, objective, tokens=PREDICTED, sequences=3)
    assert float(first.total.detach()) == pytest.approx(float(other.total.detach()), rel=1e-12)


def test_the_backbone_gets_no_gradient() -> None:
    handle = learner()
    handle.losses(*batch(), LayerRouteObjective(), tokens=PREDICTED, sequences=3).total.backward()
    trained = {id(parameter) for parameter in handle.trainables().values()}
    others = [parameter for parameter in handle.model.parameters() if id(parameter) not in trained]
    assert len(others) == len(list(exact_model("llama").parameters()))
    assert all(parameter.grad is None for parameter in others)


def test_training_and_inference_give_the_same_outputs() -> None:
    """§3.2: whether a skipped block is computed and dropped, or not computed, makes no difference to the output."""
    handle = learner()
    ids_BT, mask_BT = batch()
    with torch.no_grad():
        routed = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        handle._logits = []
        trained = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        handle._logits = None
    assert (routed - trained)[mask_BT].abs().max() < 1e-9


def test_straight_through_is_hard_forwards_and_soft_backwards() -> None:
    logit = torch.tensor([-2.0, 0.0, 1e-6, 3.0], dtype=torch.float64, requires_grad=True)
    gate = straight_through(logit)
    assert gate.tolist() == [0.0, 0.0, 1.0, 1.0]
    (gradient,) = torch.autograd.grad(gate.sum(), logit)
    sigma = 1 / (1 + torch.exp(-logit.detach()))
    assert torch.allclose(gradient, sigma * (1 - sigma), rtol=1e-12)


def test_in_bfloat16_a_running_block_gives_back_its_own_output() -> None:
    handle, _ = wrapped(exact_model("llama").bfloat16(), "layerroute", lora={"rank": RANK})
    assert isinstance(handle, LayerRoute)
    handle.recorder.mode = "off"
    with torch.no_grad():
        for router in handle.routers:
            router.bias.fill_(1.0)
        found = handle.losses(*batch(), LayerRouteObjective(), tokens=1, sequences=1)
        ids_BT, mask_BT = batch()
        handle.force("open")
        logits_BTV = handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits.float()
    log_p = torch.log_softmax(logits_BTV, -1)
    wanted = -sum(
        float(log_p[row, t, prompt[t + 1]]) for row, prompt in enumerate(PROMPTS) for t in range(len(prompt) - 1)
    )
    assert float(found.nll) == pytest.approx(wanted, rel=1e-5)


def test_start_values() -> None:
    handle = learner()
    handle.start(seed=3)
    for i, router in enumerate(handle.routers):
        assert not router.weight.any()
        assert float(router.bias.detach()) == (-1.0 if i in (2, 3) else 1.0)  # 6 // 3 … 6 // 3 + ⌊54 / 24⌋ − 1
    first = {name: value.detach().clone() for name, value in handle.trainables().items()}
    handle.start(seed=4)
    moved = [name for name, value in handle.trainables().items() if not torch.equal(value, first[name])]
    assert moved == [name for name in first if ".lora_A." in name]


def test_a_forced_route_is_not_trained() -> None:
    handle = learner()
    handle.force("open")
    with pytest.raises(InputError, match="training needs gates: router"):
        handle.losses(*batch(), LayerRouteObjective(), tokens=PREDICTED, sequences=3)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dense", {}, "method 'dense' has nothing to train"),
        ("layerroute", {"gate_weight": -1}, "objective.gate_weight: .*greater than or equal to 0"),
        ("layerroute", {"gate_wieght": 1}, "did you mean 'gate_weight'"),
    ],
)
def test_wrong_objectives_are_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        methods.objective(method, options, where="objective.")
