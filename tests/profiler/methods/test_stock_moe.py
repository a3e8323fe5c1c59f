"""Stock mixture-of-experts models beyond the contract: unchanged outputs, what is recorded, costs, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from profiler import methods, models
from profiler.arms import describe, sibling
from profiler.errors import InputError
from profiler.execution.stock_experts import has_experts, scores
from profiler.recorder import Decision, Recorder, StepData
from profiler.records import Choice
from profiler.session import record, wrap
from profiler.stepdata import executed_as_decided
from profiler.store import Run
from profiler.verify import verify
from tests.profiler.tiny import STOCK_SHAPES, VOCABULARY, exact_model, padded, prompts_of, random_model, wrapped

PRESETS = ("mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny", "olmoe-tiny", "deepseek-v3-tiny")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def deepseek(**settings: Any) -> PreTrainedModel:
    """DeepSeek-V3 at toy size: 3 layers, the first dense, 8 experts in 4 groups of which 2 are kept."""
    given = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, **settings,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("deepseek_v3", **given), dtype=torch.float64, experts_implementation="eager"
        )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model.eval()


def model_of(shape: str) -> PreTrainedModel:
    return deepseek() if shape == "deepseek-v3" else random_model(shape)


@pytest.fixture(params=[*STOCK_SHAPES, "deepseek-v3"])
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


def of_site(choices: list[Choice], layer: int, site: str) -> list[Choice]:
    return [c for c in choices if (c.layer, c.site) == (layer, site)]


# -- unchanged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_outputs_are_those_of_the_bare_model_bit_for_bit(preset: str, implementation: str) -> None:
    bare = models.load(preset, "bfloat16", device="cpu").model
    bare.set_experts_implementation(implementation)
    handle, steps = wrapped(bare, "stock_moe", implementation=implementation)
    batch = padded(prompts_of([9, 4, 1, 6]), "left")
    with torch.no_grad():
        wanted = bare(**batch, use_cache=True)
        for mode in ("off", "record"):
            handle.recorder.mode = mode
            seen = handle.model(**batch, use_cache=True)
            assert torch.equal(seen.logits, wanted.logits)
    assert len(steps) == 1
    assert executed_as_decided(steps[0], describe(handle, "stock", "stock_moe", None)) == []
    assert {name: id(tensor) for name, tensor in handle.model.named_parameters()}.keys() == dict(
        bare.named_parameters()
    ).keys()


def test_an_arm_has_the_implementation_it_names_and_leaves_the_others_theirs() -> None:
    backbone = models.load("olmoe-tiny", device="cpu").model
    before = backbone.config._experts_implementation
    handle = methods.load("stock_moe").wrap(
        sibling(backbone), methods.configure("stock_moe", {"implementation": "eager"}), Recorder()
    )
    assert handle.model.config._experts_implementation == "eager"
    assert handle.model.model.layers[0].mlp.experts.config._experts_implementation == "eager"
    assert backbone.config._experts_implementation == before == "grouped_mm"


# -- what is recorded --------------------------------------------------------------------------------


def slow_decisions(model: PreTrainedModel, ids: Tensor) -> dict[int, list[tuple[list[int], list[float]]]]:
    """Layer → each row's experts and weights, worked out a row at a time from what a layer's `mlp` was given."""
    given: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args, i=i: given.__setitem__(i, args[0].flatten(0, 1)))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    config = model.config
    found = {}
    for layer, rows in given.items():
        router = model.model.layers[layer].mlp.gate
        found[layer] = [_slow_row(config, router, row) for row in rows]
    return found


def _slow_row(config: Any, router: Any, row: Tensor) -> tuple[list[int], list[float]]:
    keep = config.num_experts_per_tok
    if config.model_type != "deepseek_v3":
        logits = (router.weight @ row).tolist()
        top = max(logits)
        odds = [np.exp(x - top) for x in logits]
        chances = [x / sum(odds) for x in odds]
        chosen = sorted(sorted(range(len(chances)), key=lambda e: -chances[e])[:keep])
        total = 1.0
        if config.model_type == "mixtral" or config.norm_topk_prob:
            total = sum(chances[e] for e in chosen)
        return chosen, [chances[e] / total for e in chosen]
    odds = [1 / (1 + np.exp(-x)) for x in (router.weight.double() @ row).tolist()]
    compared = [s + float(b) for s, b in zip(odds, router.e_score_correction_bias, strict=True)]
    each = len(compared) // config.n_group
    groups = [compared[g * each : (g + 1) * each] for g in range(config.n_group)]
    kept = sorted(range(config.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))[: config.topk_group]
    candidates = [g * each + i for g in kept for i in range(each)]
    chosen = sorted(sorted(candidates, key=lambda e: -compared[e])[:keep])
    total = sum(odds[e] for e in chosen)
    return chosen, [config.routed_scaling_factor * odds[e] / total for e in chosen]


def test_recorded_decisions_are_the_routers_own(shape: str) -> None:
    model = model_of(shape)
    handle, steps = wrapped(model, "stock_moe")
    ids = torch.tensor(prompts_of([7, 7]))
    with torch.no_grad():
        handle.model(input_ids=ids)
    wanted = slow_decisions(model, ids)
    assert [d.layer for d in steps[0].decisions] == sorted(wanted)
    for decision in steps[0].decisions:
        for row, (chosen, weights) in enumerate(wanted[decision.layer]):
            assert decision.choice[row].tolist() == chosen
            assert decision.weights[row] == pytest.approx(weights, rel=1e-5)


def test_rows_of_experts_are_counted_without_pads_and_by_expert(shape: str) -> None:
    handle, steps = wrapped(model_of(shape), "stock_moe")
    with torch.no_grad():
        handle.model(**padded(prompts_of([9, 4, 0, 6]), "left"))
    (step,) = steps
    real = step.sequences.real_BT.flatten().numpy()
    assert real.sum() == 19
    for decision in step.decisions:
        taken = np.bincount(decision.choice[real].flatten(), minlength=8)
        counted = [
            step.counts[decision.layer, "experts", e].rows if (decision.layer, "experts", e) in step.counts else 0
            for e in range(8)
        ]
        assert counted == taken.tolist()
        assert sum(counted) == 19 * handle.model.config.num_experts_per_tok


def test_a_layer_that_records_other_experts_than_it_ran_breaks_rule_1() -> None:
    handle, steps = wrapped(random_model("mixtral"), "stock_moe")
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([5])))
    arm = describe(handle, "stock", "stock_moe", None)
    assert executed_as_decided(steps[0], arm) == []
    first = steps[0].decisions[0]
    moved = Decision(first.layer, first.site, (first.choice + 1) % 6, first.gate, first.signals, first.weights)
    steps[0].decisions[0] = moved
    assert any("layer 0 experts" in problem for problem in executed_as_decided(steps[0], arm))


class _Router:
    """Enough of DeepSeek-V3's router: 4 groups of 2 experts, 2 groups kept."""

    num_group, topk_group = 4, 2
    e_score_correction_bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5])


def test_margin_and_entropy_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    plain = scores(object(), logits, torch.tensor([[0, 1]]))
    assert plain.margin_N.item() == pytest.approx(0.3 - 0.2)
    assert plain.entropy_N.item() == pytest.approx(-(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)))
    every = scores(object(), logits, torch.tensor([[0, 1, 2]]))
    assert every.margin_N.item() == 1
    # Sigmoids .6 .5 | .3 .2 | .7 .1 | .2 .1, and .5 more for the last: groups 1.1, .5, .8, .8. The first is kept, and
    # one of two that differ by nothing; of the experts of groups 0 and 2 the best two are .7 and .6.
    odds = torch.tensor([[0.6, 0.5, 0.3, 0.2, 0.7, 0.1, 0.2, 0.1]])
    equal = scores(_Router(), odds.logit(), torch.tensor([[0, 4]]))
    assert equal.margin_N.item() == pytest.approx(0, abs=1e-6)
    # With .4 for the one before last, group 3 has 1.0 and is kept instead of group 2, by 0.2; of experts .6 .5 .4 .6
    # the two of .6 are chosen, ahead of .5 by 0.1.
    odds[0, 6] = 0.4
    apart = scores(_Router(), odds.logit(), torch.tensor([[0, 7]]))
    assert apart.margin_N.item() == pytest.approx(0.1)
    share = odds[0] / odds.sum()
    assert apart.entropy_N.item() == pytest.approx(float(-(share * share.log()).sum()))


# -- every expert ------------------------------------------------------------------------------------


def test_all_experts_give_the_same_outputs_and_cost_the_choice_all() -> None:
    handle, _ = wrapped(exact_model("qwen2-moe"), "stock_moe")
    everything, all_steps = wrapped(exact_model("qwen2-moe"), "stock_moe", experts="all")
    for each in (handle, everything):
        each.model.set_attn_implementation("eager")
    ids = torch.tensor(prompts_of([7, 7]))
    flops = []
    with torch.no_grad():
        logits = []
        for each in (handle, everything):
            with FlopCounterMode(display=False) as counter:
                logits.append(each.model(input_ids=ids).logits)
            flops.append(counter.get_total_flops())
    assert (logits[0] - logits[1]).abs().max() <= 1e-12 * logits[0].abs().max()
    # 14 rows, 5 layers with experts, 4 experts more a row, 6·32·24 each.
    assert flops[1] - flops[0] == 14 * 5 * 4 * 6 * 32 * 24
    assert everything.synthetic == "forced: every expert runs"
    assert handle.synthetic is None
    assert {tuple(row) for d in all_steps[0].decisions for row in d.choice.tolist()} == {(6,)}
    assert all_steps[0].counts[2, "experts", 6].rows == 14
    assert (2, "experts", 0) not in all_steps[0].counts
    assert executed_as_decided(all_steps[0], describe(everything, "all", "stock_moe", None)) == []


# -- costs -------------------------------------------------------------------------------------------


def test_costs_of_deepseek_v3_are_what_a_prompt_was_counted_to_do() -> None:
    model = deepseek()
    handle, steps = wrapped(model, "stock_moe")
    handle.model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        handle.model(input_ids=torch.tensor(prompts_of([7, 7])), use_cache=True)
    choices = handle.choices(handle.model, handle.config)
    costs = {(c.layer, c.site, c.index): c for c in choices}
    expected = sum(
        count.rows * costs[key].flops_per_row + count.context_full * costs[key].flops_per_context
        for key, count in steps[0].counts.items()
    )
    assert counter.get_total_flops() == expected > 0
    per_row = sum(c.kv_bytes_per_row for c in choices)
    assert steps[0].kv == (14 * per_row, 14 * per_row)
    assert per_row == 3 * (12 + 4) * 8
    largest: dict[tuple[int, str], int] = {}
    for c in choices:
        largest[c.layer, c.site] = max(largest.get((c.layer, c.site), 0), c.backbone_parameters)
    assert sum(largest.values()) == sum(p.numel() for p in model.parameters())


def test_costs_of_one_layer_by_hand() -> None:
    choices = methods.load("stock_moe").choices(
        models.skeleton(models.config("qwen2-moe-tiny"), "bfloat16"), methods.configure("stock_moe", {})
    )
    experts = of_site(choices, 2, "experts")
    assert [c.name for c in experts] == [*(f"e{i}" for i in range(8)), "all"]
    assert {(c.backbone_parameters, c.flops_per_row, c.weight_bytes) for c in experts[:8]} == {
        (3 * 64 * 64, 6 * 64 * 64, 2 * 3 * 64 * 64)
    }
    assert experts[8].flops_per_row == 8 * 6 * 64 * 64
    (router,), (shared,) = of_site(choices, 2, "router"), of_site(choices, 2, "shared")
    assert (router.backbone_parameters, router.flops_per_row, router.weight_bytes) == (512, 1024, 1024)
    assert (shared.backbone_parameters, shared.flops_per_row) == (3 * 64 * 64 + 64, 2 * (3 * 64 * 64 + 64))


def test_full_size_models_are_known_without_weights() -> None:
    """Qwen3-30B-A3B: 30.5 G parameters, of which a token's 8 of 128 experts and all else are 3.3 G (its model card)."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=151_936,
    )  # fmt: skip
    choices = methods.load("stock_moe").choices(models.skeleton(config), methods.configure("stock_moe", {}))
    whole = sum(c.backbone_parameters for c in choices if c.site != "experts" or c.name == "all")
    active = sum(c.backbone_parameters for c in choices if c.site != "experts" or c.index < 8)
    assert whole / 1e9 == pytest.approx(30.5, abs=0.05)
    assert active / 1e9 == pytest.approx(3.3, abs=0.06)


# -- refusals ----------------------------------------------------------------------------------------


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(InputError, match="LlamaForCausalLM is a dense model: no layer has a router"):
        wrapped(random_model("llama"), "stock_moe")
    assert not has_experts(random_model("llama"))
    assert has_experts(random_model("olmoe"))


def test_grouped_products_in_float64_are_refused() -> None:
    model = models.load("mixtral-tiny", "float64", device="cpu").model
    with pytest.raises(InputError, match="does not know float64; give implementation: eager"):
        wrapped(model, "stock_moe")
    handle, _ = wrapped(model, "stock_moe", implementation="eager")
    with torch.no_grad():
        assert torch.isfinite(handle.model(input_ids=torch.tensor([[1, 2]])).logits).all()


def test_only_what_leaves_the_model_alone_can_be_forced() -> None:
    handle, _ = wrapped(random_model("mixtral"), "stock_moe")
    with pytest.raises(InputError, match="cannot be forced to 'closed'"):
        handle.force("closed")


def test_a_window_and_a_part_that_is_not_known_are_refused() -> None:
    with pytest.raises(InputError, match="attends a window of 16 tokens"):
        wrapped(random_model("mixtral", sliding_window=16), "stock_moe")
    model = random_model("mixtral")
    model.model.layers[1].extra = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="layers.1.extra.weight belongs to no known part"):
        wrapped(model, "stock_moe")
    bare = copy.deepcopy(random_model("olmoe"))
    bare.model.layers[0].mlp.experts.bias = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(InputError, match="supported experts hold gate_up_proj and down_proj and nothing else"):
        wrapped(bare, "stock_moe")


# -- in use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_rules_hold_in_the_dtype_of_a_run(preset: str) -> None:
    loaded = models.load(preset, device="cpu")
    handle, _ = wrapped(loaded.model, "stock_moe")
    rules = verify(loaded.model, describe(handle, "stock", "stock_moe", None), prompts_of([24, 17, 9, 3]))
    assert [rule.detail for rule in rules if not rule.passed] == []
    assert "forced open against stock_moe" in rules[3].detail


def test_a_session_records_loads_of_a_stock_model(tmp_path: Path) -> None:
    loaded = models.load("olmoe-tiny", device="cpu")
    wrap(loaded.model, "stock_moe")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with record(loaded.model, out=tmp_path / "run"), torch.no_grad():
        loaded.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    run = Run(tmp_path / "run")
    gates = run.frame("gates")
    assert len(gates) == 4 * (6 + 2)  # layers × rows of a prompt and two decode steps
    assert {len(chosen) for chosen in gates["choices"]} == {2}
    rows = run.frame("rows")
    of_experts = rows[rows["site"] == "experts"]
    assert of_experts["rows"].sum() == 2 * len(gates)
    assert run.manifest.rules[0].passed


def steps_of(steps: list[StepData]) -> list[str]:
    return [step.phase for step in steps]


def test_segments_of_a_layer_are_router_experts_and_shared() -> None:
    handle, steps = wrapped(random_model("qwen2-moe"), "stock_moe")
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([5])))
    assert steps_of(steps) == ["prefill"]
    of_layer = {name for name, layer in steps[0].segment_ns if layer == 3}
    assert {"attention", "dispatch", "router", "experts", "shared"} <= of_layer
    assert "ffn" not in of_layer
    assert ("ffn", 1) in steps[0].segment_ns
