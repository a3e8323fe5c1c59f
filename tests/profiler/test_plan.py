"""Full-size arithmetic: the figures METHODS §1 checks by, on skeletons without weights; small cases by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from profiler import methods, models
from profiler.costs import dense_choices
from profiler.execution.history_router import HistoryRouter, Variant, parameter_count
from profiler.plan import as_json, flops, lines, parameter_skip, plan, share_of
from profiler.records import Choice
from workloads.loading import load


@cache
def skeleton(name: str) -> PreTrainedModel:
    return models.skeleton(models.config(name), "bfloat16")


def hero(model: str, **options: Any) -> list[Choice]:
    return methods.load("hero").choices(skeleton(model), methods.configure("hero", options))


def total(choices: list[Choice], kind: str) -> int:
    return sum(getattr(choice, kind) for choice in choices)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320)],
)
def test_totals(model: str, parameters: int) -> None:
    assert total(dense_choices(skeleton(model)), "backbone_parameters") == parameters
    assert total(hero(model), "backbone_parameters") == parameters


def test_one_layer_of_llama_3_1_8b() -> None:
    choices = {(c.layer, c.site, c.index): c for c in hero("llama-3.1-8b")}
    assert (15, "ffn", 1) not in choices
    ffn, adapter = choices[16, "ffn", 1], choices[16, "ffn", 0]
    assert (ffn.backbone_parameters, ffn.flops_per_row, ffn.weight_bytes) == (176_160_768, 352_321_536, 352_321_536)
    assert (adapter.replacement_parameters, adapter.backbone_parameters) == (7_340_032, 0)
    assert (adapter.flops_per_row, adapter.weight_bytes) == (14_680_064, 14_680_064)
    assert (ffn.name, adapter.name, adapter.segments) == ("ffn", "adapter", ["replacement"])


#: model, budget → routable layers, and the largest possible skip: gross, adapters counted.
LARGEST = {
    ("llama-3.1-8b", 0.25): (16, 0.3510, 0.3364),
    ("llama-3.1-8b", 0.40): (24, 0.5265, 0.5046),
    ("llama-2-7b", 0.25): (16, 0.3212, None),
    ("llama-2-13b", 0.25): (20, 0.3263, None),
}


@pytest.mark.parametrize(("model", "budget"), LARGEST)
def test_the_largest_possible_skip(model: str, budget: float) -> None:
    layers, gross, adapters_only = LARGEST[model, budget]
    choices = hero(model, budget=budget)
    assert sum(c.site == "ffn" and c.index == 1 for c in choices) == layers
    found = parameter_skip(choices, 1.0)
    assert round(found.gross, 4) == gross
    if adapters_only is not None:
        assert round(found.adapters_only, 4) == adapters_only
    assert found.net < found.adapters_only < found.gross


def test_budget_40_routes_layers_9_to_32_counted_from_1() -> None:
    choices = hero("llama-3.1-8b", budget=0.40)
    assert sorted({c.layer + 1 for c in choices if c.site == "router"}) == list(range(9, 33))


@pytest.mark.parametrize(
    ("model", "budget", "reported", "share"),
    [
        ("llama-3.1-8b", 0.25, 0.2687, 0.7655),
        ("llama-2-7b", 0.25, 0.2787, 0.8677),
        ("llama-2-13b", 0.25, 0.2838, 0.8698),
        ("llama-3.1-8b", 0.40, 0.3882, 0.7373),
    ],
)
def test_the_share_of_adapters_a_reported_skip_means(model: str, budget: float, reported: float, share: float) -> None:
    choices = hero(model, budget=budget)
    assert round(share_of(choices, reported), 4) == share
    assert parameter_skip(choices, share_of(choices, reported)).gross == pytest.approx(reported)


def test_router_and_memory_of_llama_3_1_8b() -> None:
    assert total(hero("llama-3.1-8b"), "overhead_parameters") == 1_306_514
    assert parameter_count(4096, 16, "full") == 1_306_514
    # In float32 whatever the backbone's dtype.
    assert sum(c.weight_bytes for c in hero("llama-3.1-8b") if c.site == "router") == 4 * 1_306_514
    found = parameter_skip(hero("llama-3.1-8b"), 1.0)
    adapters, router = 16 * 7_340_032, 1_306_514
    assert found.net == pytest.approx((16 * 176_160_768 - adapters - router) / 8_030_261_248, rel=1e-12)
    assert found.augmented == pytest.approx(16 * 176_160_768 / (8_030_261_248 + adapters + router), rel=1e-12)


@pytest.mark.parametrize("hidden", [576, 896, 4096])
@pytest.mark.parametrize("layers", [1, 15, 24])
def test_counted_parameters_are_the_module_s_and_the_wide_head_has_as_many(hidden: int, layers: int) -> None:
    variants: tuple[Variant, ...] = ("full", "wide_local", "no_history")
    with torch.device("meta"):
        routers = [HistoryRouter(hidden, layers, variant, "dual") for variant in variants]
    full, wide, plain = (sum(p.numel() for p in router.parameters()) for router in routers)
    assert [full, wide, plain] == [parameter_count(hidden, layers, variant) for variant in variants]
    assert plain == hidden * 256 + 513
    assert abs(wide / full - 1) < 0.01


def test_what_a_variant_leaves_out_is_not_charged() -> None:
    full = parameter_count(4096, 16, "full")
    left_out = {
        "no_position": 0, "shuffled_history": 0, "foreign_history": 0,
        "recent_only": 16,  # η
        "no_path": 6 * 16 + 16 + 16 * 16 + 16,
        "no_memory_read": 3 * 64 * 64 + 2 * 64 * 64 + 16,  # q, k, v; W_n, W_c; η
    }  # fmt: skip
    for variant, missing in left_out.items():
        assert parameter_count(4096, 16, variant) == full - missing, variant  # type: ignore[arg-type]


def toy() -> list[Choice]:
    """A backbone of 100 parameters: 20 that always run, two sites of 40 that may be replaced by 10, a router of 3."""
    return [
        Choice(layer=-1, site="head", index=0, name="run", backbone_parameters=20, flops_per_row=4),
        *(
            choice
            for layer in (0, 1)
            for choice in (
                Choice(layer=layer, site="router", index=0, name="run", overhead_parameters=3, flops_per_row=6),
                Choice(layer=layer, site="ffn", index=0, name="adapter", replacement_parameters=10, flops_per_row=20),
                Choice(
                    layer=layer, site="ffn", index=1, name="ffn", backbone_parameters=40, flops_per_row=80,
                    flops_per_context=2, overhead_parameters=5,
                ),
            )
        ),
    ]  # fmt: skip


def test_variants_by_hand() -> None:
    found = parameter_skip(toy(), 0.25)
    assert found.gross == pytest.approx(0.25 * 80 / 100)
    assert found.adapters_only == pytest.approx((20 - 0.25 * 20) / 100)
    assert found.net == pytest.approx((20 - 5 - (2 * 3 + 0.75 * 2 * 5)) / 100)
    assert found.augmented == pytest.approx((20 + 0.75 * 20 + 0.25 * 10) / (100 + 20 + 6 + 10))
    assert share_of(toy(), 0.4) == pytest.approx(0.5)


def test_flops_by_hand() -> None:
    step = {"rows": 6, "context": 21, "sequences": 2}
    expected = 2 * 4 + 2 * (6 * 6 + 0.5 * 6 * 20 + 0.5 * (6 * 80 + 21 * 2))
    assert flops(toy(), 0.5, **step, pooled=False) == pytest.approx(expected)
    assert flops(toy(), 0.5, **step, pooled=True) == pytest.approx(expected - 2 * 6 * 4)


def test_a_spec_is_planned_without_weights(tmp_path: Any) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(
        "name: big\nmodel: {source: llama-3.1-8b, dtype: bfloat16}\n"
        "arms:\n  - {name: dense, method: dense}\n  - {name: hero, method: hero, budget: 0.4}\n"
        "  - {name: blocks, method: layerroute}\n"
        "cells:\n  prefill: {batch: [1], length: [512]}\n  decode: {batch: [8], context: [256], new_tokens: 32}\n",
        encoding="utf-8",
    )
    dense, routed, blocks = plan(load(str(path), []))
    assert dense.parameter_skip == {}
    assert round(routed.parameter_skip[1.0].gross, 4) == 0.5265
    assert list(routed.parameter_skip) == [0.25, 0.5, 0.75, 1.0]
    assert set(routed.flop_skip) == {"prefill-b1-l512", "decode-b8-c256-n32"}
    saved = routed.flop_skip["decode-b8-c256-n32"]
    # Decode of 8 rows: FFN − adapter in 24 layers, less the router, over all products and a mean context of 272.5.
    router = sum(c.flops_per_row for c in hero("llama-3.1-8b", budget=0.4) if c.site == "router")
    products = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    wanted = (24 * (352_321_536 - 14_680_064) - router) / (products + 32 * 4 * 4096 * 272.5)
    assert saved[1.0] == pytest.approx(wanted, rel=1e-9)
    assert saved[1.0] > saved[0.5] > saved[0.25]
    assert blocks.parameter_skip[1.0].gross > 0.8
    assert as_json([routed])["arms"][0]["parameter_skip"][1.0]["gross"] == routed.parameter_skip[1.0].gross
    text = lines([dense, routed, blocks])
    assert "hero (hero): backbone 8,030,261,248 parameters, replacements 176,160,768" in text[1]
    assert any("100% of decisions skip: parameters gross 52.65%, adapters counted 50.46%" in line for line in text)
    # 64 numbers of φ(k) and 64 of v for each of 24 layers but the last, in float32 over the bfloat16 backbone.
    assert 4 * (64 + 64) * 23 == 11_776
    assert "  memory during a forward, dual form: at most 11,776 bytes a token row" in text
    assert (dense.memory, blocks.memory) == (None, None)
    assert as_json([routed])["arms"][0]["memory"] == {"form": "dual", "bytes_per_row": 11_776}
