"""MoHGE beyond the contract: published counts, relatives, recorded decisions, routes, latent attention, checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from profiler import methods, models
from profiler.arms import describe, sibling
from profiler.costs import dense_choices
from profiler.errors import InputError, RuleError
from profiler.execution.heterogeneous_router import balance
from profiler.methods.mohge import Mohge, MohgeConfig
from profiler.plan import ArmPlan, plan
from profiler.recorder import Recorder, StepData
from profiler.records import Choice
from profiler.stepdata import executed_as_decided
from profiler.verify import verify
from tests.profiler.routed_arms import Arm, decode, exact
from tests.profiler.tiny import VOCABULARY, disturb, padded, prompts_of, random_model, wrapped
from workloads.spec import Spec

V = 102_400

#: The block's relatives at toy size, by options alone.
RELATIVES: dict[str, dict[str, Any]] = {
    "mohge": {"groups": 4, "experts_per_group": 3, "widths": [4, 8, 12, 16], "keep_groups": 2, "keep_experts": 4},
    "official": {"groups": 4, "experts_per_group": 3, "widths": [4, 8, 12, 16], "scoring": "official"},
    "odd groups": {"groups": 5, "experts_per_group": 2, "widths": [4, 6, 8, 10, 12], "symmetric": True},
    "every group": {"groups": 3, "experts_per_group": 2, "keep_groups": 3, "keep_experts": 6, "widths": [4, 8, 12]},
    "standard top-k": {"groups": 1, "experts_per_group": 8, "widths": [12], "keep_experts": 2, "shared": 0},
    "deepseekmoe": {"groups": 1, "experts_per_group": 12, "widths": [4], "keep_experts": 4, "renormalise": False},
    "top-p": {"groups": 1, "experts_per_group": 8, "widths": [12], "top_p": 0.6},
    "modse": {"groups": 1, "experts_per_group": 4, "widths": [4, 8, 12, 16], "symmetric": True, "keep_experts": 2},
    "hmoe": {"groups": 1, "experts_per_group": 5, "widths": [4, 5, 9, 13, 17], "top_p": 0.5},
}
STRATEGIES = ("sequential", "per_width", "padded", "packed")


@pytest.fixture(params=RELATIVES)
def relative(request: pytest.FixtureRequest) -> Arm:
    return Arm("mohge", RELATIVES[request.param], disturbed=True)


def of_layer(choices: list[Choice], layer: int, site: str) -> list[Choice]:
    return [c for c in choices if (c.layer, c.site) == (layer, site)]


# -- the released model, without weights -------------------------------------------------------------


def released(**options: Any) -> list[Choice]:
    model = models.skeleton(models.config("mohge-a3b"), "bfloat16")
    return Mohge.choices(model, methods.configure("mohge", {"size": "A3B", **options}))


def total(choices: list[Choice]) -> int:
    """Parameters of the model with experts: what an arm has, less the FFN that nothing takes."""
    kept = [c for c in choices if (c.site, c.name) != ("experts", "ffn")]
    return sum(c.backbone_parameters + c.replacement_parameters + c.overhead_parameters for c in kept)


def test_the_released_model_has_the_published_parameters() -> None:
    choices = released()
    experts = of_layer(choices, 7, "experts")
    (attention,), (router,), (shared,) = (of_layer(choices, 7, site) for site in ("attention", "router", "shared"))
    assert attention.backbone_parameters == 7_930_368 + 2 * 1024  # with both norms
    assert sum(c.replacement_parameters for c in experts) == 163_577_856
    assert shared.replacement_parameters == 6_291_456
    assert router.overhead_parameters == 65_536 + 8_192
    assert total(choices) == 2_517_064_192 + 2048 * V
    assert [c.name for c in experts[:3]] == ["g0e0", "g0e1", "g0e2"]
    assert [c.name for c in experts[-2:]] == ["g7e7", "ffn"]
    assert of_layer(choices, 0, "ffn")[0].backbone_parameters == 3 * 1024 * 6144 + 1024


def test_the_released_model_builds_on_the_meta_device() -> None:
    model = models.skeleton(models.config("mohge-a3b"), "bfloat16")
    handle = Mohge.wrap(model, MohgeConfig(size="A3B"), Recorder())
    weights = handle.weights()
    assert {tensor.device.type for tensor in weights.values()} == {"meta"}
    assert {layer.partition(".")[0] for layer in weights} == {str(layer) for layer in range(1, 15)}
    assert sum(tensor.numel() for tensor in weights.values()) == 14 * (163_577_856 + 6_291_456 + 65_536 + 8_192)
    assert handle.choices(handle.model, handle.config) == released()


def test_its_standard_twin_has_the_published_parameters() -> None:
    choices = released(form="standard")
    experts = [c for c in of_layer(choices, 7, "experts") if c.name != "ffn"]
    assert len(experts) == 64
    assert sum(c.replacement_parameters for c in experts) == 201_326_592
    assert of_layer(choices, 7, "router")[0].overhead_parameters == 65_536
    assert total(choices) == 3_045_431_808 + 2048 * V


def test_an_expert_costs_its_width_and_the_worked_example_adds_up() -> None:
    named = {c.name: c for c in of_layer(released(), 3, "experts")}
    assert named["g2e5"].replacement_parameters == 3 * 1024 * 640
    assert named["g2e5"].flops_per_row == 6 * 1024 * 640
    assert named["g2e5"].weight_bytes == 2 * 3 * 1024 * 640
    chosen = ["g1e0", "g1e4", "g1e7", "g4e1", "g4e2", "g7e3"]
    assert sum(named[name].flops_per_row for name in chosen) == 6 * 1024 * (3 * 512 + 2 * 896 + 1 * 1280)
    assert sum(named[name].flops_per_row for name in chosen) == 6 * 1024 * 4608


def test_padded_experts_cost_the_widest_and_have_their_own_parameters() -> None:
    padded_choices = {c.name: c for c in of_layer(released(strategy="padded"), 3, "experts")}
    assert padded_choices["g0e0"].flops_per_row == 6 * 1024 * 1280
    assert padded_choices["g0e0"].weight_bytes == 2 * 3 * 1024 * 1280
    assert padded_choices["g0e0"].replacement_parameters == 3 * 1024 * 384


def test_plan_gives_no_share_of_skips_where_a_decision_takes_several() -> None:
    (dense, arm) = plan(
        Spec.model_validate(
            {
                "name": "a3b",
                "model": {"source": "mohge-a3b"},
                "arms": [{"name": "dense", "method": "dense"}, {"name": "moe", "method": "mohge", "size": "A3B"}],
                "cells": {"prefill": {"batch": [1], "length": [64]}},
            }
        )
    )
    assert isinstance(arm, ArmPlan)
    assert arm.parameter_skip == dense.parameter_skip == {}
    assert arm.replacement_parameters == 14 * (163_577_856 + 6_291_456)


# -- latent attention --------------------------------------------------------------------------------


def latent_model() -> PreTrainedModel:
    """A tiny DeepSeek-V2 whose layers are all dense, in float64 with float64 norms."""
    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=99, max_position_embeddings=64, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                setattr(parent, name, norm)
    return model


def test_latent_attention_is_carried_and_costs_what_is_counted() -> None:
    handle, steps = wrapped(latent_model(), "mohge", **RELATIVES["mohge"])
    disturb(handle)
    handle.model.set_attn_implementation("eager")
    ids = torch.tensor(prompts_of([7, 7]))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = handle.model(input_ids=ids, use_cache=True)
    record = describe(handle, "arm", "mohge", None)
    costs = {(c.layer, c.site, c.index): c for c in record.choices}
    expected = sum(
        count.rows * costs[key].flops_per_row + count.context_full * costs[key].flops_per_context
        for key, count in steps[0].counts.items()
    )
    assert counter.get_total_flops() == expected > 0
    assert executed_as_decided(steps[0], record) == []
    per_row = sum(c.kv_bytes_per_row for c in record.choices)
    assert steps[0].kv == (14 * per_row, 14 * per_row)
    with torch.no_grad():
        handle.model(input_ids=ids[:, :1], cache=out.cache)
    assert executed_as_decided(steps[1], record) == []
    choices = dense_choices(latent_model())
    assert sum(c.backbone_parameters for c in choices) == sum(p.numel() for p in latent_model().parameters())


def test_forced_open_under_latent_attention_is_the_twin() -> None:
    opened, mine = wrapped(latent_model(), "mohge")
    disturb(opened)
    opened.force("open")
    twin, theirs = wrapped(latent_model(), "dense")
    opened.adapt_twin(twin.model)
    batch = prompts_of([9, 4, 1]), "left"
    seen, wanted = decode(opened, mine, *batch), decode(twin, theirs, *batch)
    assert all(close(seen[name].logits, wanted[name].logits) for name in wanted)


@pytest.mark.parametrize("method", ["hero", "layerroute"])
def test_methods_that_look_into_attention_refuse_the_latent_kind(method: str) -> None:
    with pytest.raises(InputError, match="has no self_attn.k_proj, self_attn.v_proj"):
        wrapped(latent_model(), method)


# -- relatives ---------------------------------------------------------------------------------------


def close(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= bound * float(b.abs().max())


BATCH = prompts_of([9, 4, 1, 6]), "left"


def test_relatives_are_recorded_as_they_run(relative: Arm) -> None:
    handle, steps = relative.wrap()
    decode(handle, steps, *BATCH)
    record = describe(handle, "arm", "mohge", None)
    rule = handle.design.rule
    for step in steps:
        assert executed_as_decided(step, record) == []
        for decision in step.decisions:
            assert decision.weights is not None
            taken = decision.choice >= 0
            if rule.top_p is None:
                assert taken.all()
                assert decision.choice.shape[1] == rule.keep_experts
            assert (decision.choice[:, 0] >= 0).all()
            kept = [{e // rule.per_group for e in row if e >= 0} for row in decision.choice.tolist()]
            assert max(map(len, kept)) <= rule.keep_groups
            sums = decision.weights.sum(1)
            assert (sums < 1.0001).all()
            if rule.renormalise:
                assert (abs(sums - 1) < 1e-5).all()
            assert ((decision.gate >= 0) & (decision.gate <= 1)).all()
    if rule.top_p is not None:
        lengths = {int(n) for d in steps[0].decisions for n in (d.choice >= 0).sum(1)}
        assert len(lengths) > 1


def test_relatives_forced_open_are_their_twin(relative: Arm) -> None:
    opened, mine = relative.wrap()
    opened.force("open")
    twin, theirs = Arm("dense", {}).wrap()
    opened.adapt_twin(twin.model)
    widths = twin.model.model.layers[2].mlp.gate_proj.weight.shape[0]
    assert widths == sum(opened.design.widths) + opened.design.shared_width
    seen, wanted = decode(opened, mine, *BATCH), decode(twin, theirs, *BATCH)
    assert all(close(seen[name].logits, wanted[name].logits) for name in wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_time_of_each_width_is_recorded_or_said_to_be_of_all(strategy: str) -> None:
    handle, steps = Arm("mohge", {**RELATIVES["mohge"], "strategy": strategy}, disturbed=True).wrap()
    decode(handle, steps, *BATCH)
    parallel = describe(handle, "arm", "mohge", None).parallel
    assert parallel is not None
    widths = {width for step in steps for _, width in step.width_ns}
    assert all(ns > 0 for step in steps for ns in step.width_ns.values())
    if strategy == "padded":
        assert widths == {16}
        assert "every expert runs at the largest width, 16" in (parallel.times_note or "")
        return
    assert widths == {4, 8, 12, 16}
    assert parallel.times_note is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_agree_and_count_alike(relative: Arm, strategy: str) -> None:
    first, steps = relative.wrap()
    other, others = Arm("mohge", {**relative.options, "strategy": strategy}, disturbed=True).wrap()
    mine, theirs = decode(first, steps, *BATCH), decode(other, others, *BATCH)
    for name in mine:
        assert theirs[name].decisions == mine[name].decisions
        assert close(theirs[name].logits, mine[name].logits, 1e-11)
    record = describe(other, "arm", "mohge", None)
    assert all(executed_as_decided(step, record) == [] for step in others)
    costs = {(c.layer, c.site, c.index): c for c in record.choices}
    other.model.set_attn_implementation("eager")
    others.clear()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        other.model(input_ids=torch.tensor(prompts_of([7, 7])), use_cache=False)
    assert counter.get_total_flops() == sum(
        count.rows * costs[key].flops_per_row + count.context_full * costs[key].flops_per_context
        for key, count in others[0].counts.items()
    )


def test_a_token_gets_what_the_block_s_formula_says() -> None:
    """One layer's output for one row, from its tensors: shared plus weighted experts, in loops."""
    handle, _ = Arm("mohge", RELATIVES["mohge"], disturbed=True).wrap()
    block, u = handle.blocks[2], torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inner: list[tuple[Tensor, Tensor]] = []
    mlp = handle.decoder.blocks[2].mlp
    with torch.no_grad():
        handle.model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]))  # so that the handle knows the step's rows
        inner.append((u[0], mlp(u)[0]))
        routing = block.router(u[0])
        for t in range(5):
            x = u[0, t]
            wide = block.shared.width
            gate, up, down = block.shared.weights.split(wide)
            wanted = down.T @ (nn.functional.silu(gate @ x) * (up @ x))
            for e, w in zip(routing.choice_NK[t].tolist(), routing.weight_NK[t].tolist(), strict=True):
                gate, up, down = block.experts.of(e)
                wanted = wanted + w * (down.T @ (nn.functional.silu(gate @ x) * (up @ x)))
            assert close(inner[0][1][t], wanted)


# -- routes ------------------------------------------------------------------------------------------


def test_a_forced_route_takes_the_share_that_is_left_and_weighs_it_evenly() -> None:
    handle, steps = Arm("mohge", {"gates": {"forced": {"ratio": 0.8125, "seed": 1}}}).wrap()
    decode(handle, steps, *BATCH)
    for decision in steps[0].decisions:
        assert decision.choice.shape[1] == 6  # of 32, 26 are left out
        assert set(decision.weights.ravel().tolist()) == {float(torch.tensor(1 / 6).float())}
    real = steps[0].sequences.real_BT.flatten().numpy()
    drawn = {tuple(row) for d in steps[0].decisions for row in d.choice[real].tolist()}
    assert len(drawn) == 5 * int(real.sum())  # each token its own, in each layer
    assert handle.synthetic == "forced: 81% of experts left out, pattern random, seed 1"


def test_closed_leaves_the_shared_experts() -> None:
    closed, steps = Arm("mohge", RELATIVES["mohge"], disturbed=True).wrap()
    closed.force("closed")
    decode(closed, steps, *BATCH)
    record = describe(closed, "arm", "mohge", None)
    assert executed_as_decided(steps[0], record) == []
    assert not any(site == "experts" for _, site, _ in steps[0].counts)
    assert steps[0].counts[2, "shared", 0].rows == 20
    with pytest.raises(InputError, match="cannot force"):
        closed.force("half")


# -- losses ------------------------------------------------------------------------------------------


def test_balancing_collects_each_layer_s_losses_with_their_weights_pads_left_out() -> None:
    options = {**RELATIVES["mohge"], "alpha_group": 0.5, "alpha_expert": 0.25}
    handle, _ = Arm("mohge", options, disturbed=True).wrap()
    prompt = prompts_of([6])
    with handle.balancing() as together:
        handle.model(**padded([prompt[0], [4]], "left"))
    with handle.balancing() as alone:
        for row in (prompt, [[4]]):
            handle.model(input_ids=torch.tensor(row))
    assert len(together) == 5
    assert len(alone) == 10
    (together[-1].group + together[-1].expert).backward()
    assert handle.blocks[5].router.weight.grad is not None
    seen: list[Any] = []
    handle.blocks[1].router.register_forward_hook(lambda module, args, out: seen.append(out))
    with handle.balancing() as again, torch.no_grad():
        handle.model(input_ids=torch.tensor(prompt))
    plain = balance("paper", seen[0], handle.design.rule, handle.design.widths)
    assert float(again[0].group) == pytest.approx(0.5 * float(plain.group))
    assert float(again[0].expert) == pytest.approx(0.25 * float(plain.expert))
    # Layer 1 sees no other token's row but through attention, so 7 rows together are the 6 and the 1 apart.
    with torch.no_grad():
        handle.model(**padded([prompt[0], [4]], "left"))
        real = padded([prompt[0], [4]], "left")["attention_mask"].bool().flatten()
        pads_out = balance("paper", seen[-1], handle.design.rule, handle.design.widths, real)
    assert together[0].group.item() == pytest.approx(0.5 * float(pads_out.group))
    handle.model(input_ids=torch.tensor(prompt))
    assert len(again) == 5


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 4, "keep_groups": 5}, "keep_groups: keep_groups (5) must be at most groups (4)"),
        (
            {"groups": 4, "keep_groups": 1},
            "keep_experts: keep_experts (6) must be at most the experts of the kept groups (1 x 4 = 4)",
        ),
        ({"keep_experts": 2, "top_p": 0.5}, "keep_experts: give `keep_experts` or `top_p`, not both"),
        (
            {"scoring": "official", "renormalise": False},
            "scoring: scoring official takes a softmax of a fixed number of chosen probabilities; top_p and "
            "renormalise false need scoring paper",
        ),
        ({"form": "standard"}, "form: form standard is the standard MoE of a size: give `size`"),
        (
            {"form": "standard", "size": "3B", "groups": 4},
            "form: form standard has one group of the size's experts; leave out groups",
        ),
        ({"widths": [1, 2, 3]}, "widths: widths must be one for all, or one a group (8); 3 are given"),
        (
            {"groups": 2, "experts_per_group": 4, "widths": [3, 5, 5], "keep_groups": 2},
            "widths: widths must be one for all, or one a group (2); 3 are given",
        ),
        (
            {"widths": [1, 2, 3, 4, 5, 6, 7, 9], "symmetric": True},
            "widths: symmetric widths need the same sum of every pair, and 1 + 9 = 10 while 2 + 7 = 9",
        ),
        ({"gropus": 3}, "gropus: method 'mohge' has no such option; did you mean 'groups'?"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        methods.configure("mohge", options, where="arms.mine.")
    assert str(refused.value) == f"arms.mine.{message}"


def test_what_the_backbone_cannot_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"first_dense \(6\) must be below the model's number of layers \(6\)"):
        wrapped(exact(), "mohge", first_dense=6)
    with pytest.raises(InputError, match=r"FFN width \(48\) is too small"):
        wrapped(exact(), "mohge", shared=60)


def test_a_size_brings_its_own_settings_and_options_win() -> None:
    model = models.skeleton(models.config("tiny"))
    a3b = Mohge(model, MohgeConfig(size="A3B"), Recorder()).design
    assert (a3b.rule.keep_groups, a3b.rule.keep_experts, a3b.shared_width) == (4, 6, 2048)
    other = Mohge(model, MohgeConfig(size="1B", keep_groups=2, shared=1, shared_width=24), Recorder()).design
    assert (other.rule.groups, other.rule.per_group, other.rule.keep_groups, other.shared_width) == (8, 4, 2, 24)
    assert other.widths[:5] == (256, 256, 256, 256, 320)
    standard = Mohge(model, MohgeConfig(size="3B", form="standard"), Recorder()).design
    assert (standard.rule.groups, len(standard.widths), set(standard.widths)) == (1, 64, {1024})


def test_without_widths_the_block_is_as_wide_as_the_ffn_it_stands_for() -> None:
    design = Mohge(models.skeleton(models.config("tiny")), MohgeConfig(), Recorder()).design  # FFN 192
    assert design.shared_width == 2 * 24
    assert sum(design.widths) / len(design.widths) * 6 + design.shared_width == 192


# -- weights -----------------------------------------------------------------------------------------


def test_fresh_weights_follow_the_seed_and_the_model_s_range() -> None:
    first, again, other = (wrapped(exact(), "mohge", seed=seed)[0] for seed in (3, 3, 4))
    name = "2.experts.weights"
    assert torch.equal(first.weights()[name], again.weights()[name])
    assert not torch.equal(first.weights()[name], other.weights()[name])
    assert first.weights()[name].std().item() == pytest.approx(0.2, rel=0.05)
    assert first.untrained
    assert first.caveat == "experts have fresh weights"


def test_the_router_is_float32_at_least_and_experts_are_in_the_backbone_s_dtype() -> None:
    handle, steps = wrapped(random_model("llama", dtype=torch.bfloat16), "mohge")
    assert {name.split(".")[1]: tensor.dtype for name, tensor in handle.weights().items()} == {
        "router": torch.float32, "experts": torch.bfloat16, "shared": torch.bfloat16,
    }  # fmt: skip
    decode(handle, steps, *BATCH)
    record = describe(handle, "arm", "mohge", None)
    assert executed_as_decided(steps[0], record) == []
    routers = [c for c in record.choices if c.site == "router"]
    assert routers[0].weight_bytes == 4 * routers[0].overhead_parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_s_own_checks_pass_in_float32(strategy: str) -> None:
    backbone = random_model("llama", dtype=torch.float32)
    options = {**RELATIVES["mohge"], "strategy": strategy, "seed": 2}
    arm = describe(Mohge.wrap(sibling(backbone), MohgeConfig(**options), Recorder()), "arm", "mohge", "dense")
    found = verify(backbone, arm, prompts_of([24, 17, 9, 3]))
    assert [(rule.name, rule.passed) for rule in found] == [(rule.name, True) for rule in found]
    assert len(found) == 5


def test_another_shape_s_checkpoint_is_refused_with_both_sides(tmp_path: Path) -> None:
    handle, _ = Arm("mohge", RELATIVES["mohge"], disturbed=True).wrap()
    handle.save(tmp_path)
    with pytest.raises(InputError, match="it was made with keep_experts 4, the arm asks for 3"):
        wrapped(exact(), "mohge", checkpoint=str(tmp_path), **{**RELATIVES["mohge"], "keep_experts": 3})
    back, _ = wrapped(exact(), "mohge", checkpoint=str(tmp_path), **RELATIVES["mohge"])
    assert not back.untrained
    assert back.caveat is None
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**facts, "format": 9}))
    with pytest.raises(InputError, match="its format is 9"):
        back.restore(tmp_path)


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    handle, _ = Arm("mohge", RELATIVES["mohge"]).wrap()
    with torch.no_grad():
        handle.weights()["3.experts.weights"][0, 0] = float("inf")
    with pytest.raises(RuleError, match="3.experts.weights holds values that are not finite"):
        handle.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_the_twin_s_tensors_are_replaced_and_the_backbone_stays() -> None:
    backbone = copy.deepcopy(exact())
    before = {name: tensor.clone() for name, tensor in backbone.named_parameters()}
    handle = Mohge.wrap(sibling(backbone), MohgeConfig(), Recorder())
    handle.adapt_twin(sibling(backbone))
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.named_parameters())


def test_steps_are_recorded_with_pads_running_no_expert() -> None:
    handle, steps = Arm("mohge", RELATIVES["mohge"], disturbed=True).wrap()
    with torch.no_grad():
        handle.model(**padded(prompts_of([9, 4]), "left"))
    (step,) = steps
    assert isinstance(step, StepData)
    assert sum(count.rows for key, count in step.counts.items() if key[:2] == (3, "experts")) == 4 * 13
    assert (step.counts[3, "shared", 0].rows, step.counts[3, "shared", 0].padded) == (13, 5)
    assert (step.counts[3, "router", 0].rows, step.counts[3, "router", 0].padded) == (13, 5)
    assert {segment for segment, layer in step.segment_ns if layer == 3} == {
        "attention", "ffn", "dispatch", "router", "experts", "shared",
    }  # fmt: skip
