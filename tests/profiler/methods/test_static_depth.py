"""Fixed blocks removed: which ones, equal to a model without them, counted like a router's skips, bad options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler import methods
from profiler.arms import describe
from profiler.errors import InputError
from profiler.methods.layerroute import LayerRoute
from profiler.methods.static_depth import removed_layers
from profiler.stepdata import executed_as_decided
from tests.profiler.slow_decoder import slow_forward, slow_generate
from tests.profiler.tiny import exact_model, padded, prompts_of, pruned, wrapped

LAYERS = 6


def configured(layers: Any) -> Any:
    return methods.configure("static_depth", {"layers": layers}, where="arms.cut.")


@pytest.mark.parametrize(
    ("layers", "depth", "removed"),
    [
        ([0, 3], 6, {0, 3}),
        ({"count": 2}, 6, {2, 3}),
        ({"count": 3, "pattern": "middle"}, 6, {1, 2, 3}),  # one more above than below
        ({"count": 2, "pattern": "last"}, 6, {4, 5}),
        ({"count": 2, "pattern": "spread"}, 6, {1, 4}),  # centres of 0–2 and 3–5
        ({"count": 3, "pattern": "spread"}, 30, {5, 15, 25}),
        ({"count": 4, "pattern": "spread"}, 30, {3, 11, 18, 26}),  # 3.75, 11.25, 18.75, 26.25
        ({"count": 6, "pattern": "spread"}, 6, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_which_blocks_are_removed(layers: Any, depth: int, removed: set[int]) -> None:
    assert removed_layers(configured(layers), depth) == removed


@pytest.mark.parametrize("count", range(1, 31))
def test_every_pattern_removes_as_many_blocks_as_asked(count: int) -> None:
    for pattern in ("middle", "last", "spread"):
        found = removed_layers(configured({"count": count, "pattern": pattern}), 30)
        assert len(found) == count
        assert found <= set(range(30))


def test_the_middle_is_the_middle_of_a_forced_route() -> None:
    model = exact_model("llama", num_hidden_layers=7)
    for count in range(1, 8):
        handle, steps = wrapped(model, "layerroute", gates={"forced": {"ratio": count / 7, "pattern": "middle"}})
        with torch.no_grad():
            handle.model(input_ids=torch.tensor(prompts_of([3])))
        skipped = {d.layer for d in steps[0].decisions if d.choice[0] == 0}
        assert skipped == removed_layers(configured({"count": count, "pattern": "middle"}), 7)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "arms.cut.layers: List should have at least 1 item"),
        ([-1], "arms.cut.layers: Input should be greater than or equal to 0 (given: -1)"),
        ([1, 1], "arms.cut.layers: each layer may be listed once"),
        ({"count": 0}, "arms.cut.layers.count: Input should be greater than or equal to 1"),
        ({"count": 1, "pattern": "first"}, "arms.cut.layers.pattern: Input should be 'middle', 'last' or 'spread'"),
        (
            {"count": 1, "patern": "last"},
            "arms.cut.layers.patern: method 'static_depth' has no such option; did you mean",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(layers: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        configured(layers)
    assert str(caught.value).startswith(message)


def test_blocks_the_model_does_not_have_are_refused_with_both_numbers() -> None:
    model = exact_model("llama")
    with pytest.raises(InputError, match="layers: 6 is none of this model's, which are 0 to 5"):
        wrapped(model, "static_depth", layers=[2, 6])
    with pytest.raises(InputError, match=r"layers.count \(7\) must be at most the model's number of blocks \(6\)"):
        wrapped(model, "static_depth", layers={"count": 7})


REMOVED = {"first": [0], "first and last": [0, 5], "middle": [2, 3], "all": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@pytest.mark.parametrize("case", REMOVED)
def test_it_is_the_model_without_these_blocks(case: str, shape: str) -> None:
    model = exact_model(shape)
    route = [layer not in REMOVED[case] for layer in range(LAYERS)]
    handle, _ = wrapped(model, "static_depth", layers=REMOVED[case])
    shorter = pruned(model, route)
    batch = padded(prompts_of([9, 4, 1, 6]), "left")
    with torch.no_grad():
        assert torch.equal(handle.model(**batch).logits, shorter(**batch).logits)
        mine, theirs = (
            m.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=6, do_sample=False
            )
            for m in (handle.model, shorter)
        )
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", REMOVED)
def test_it_is_what_a_decoder_written_by_hand_computes(case: str) -> None:
    model = exact_model("llama")
    route = [layer not in REMOVED[case] for layer in range(LAYERS)]
    handle, _ = wrapped(model, "static_depth", layers=REMOVED[case])
    (prompt,) = prompts_of([7], seed=3)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        logits = handle.model(input_ids=torch.tensor([prompt])).logits[0]
        generated = handle.model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, 7, dtype=torch.long), max_new_tokens=4,
            do_sample=False,
        )[0, 7:]  # fmt: skip
        slow = slow_forward(weights, model.config, prompt, route=route).logits
        assert generated.tolist() == slow_generate(weights, model.config, prompt, 4, route=route)
    assert float((logits - slow).abs().max()) < 1e-9 * float(slow.abs().max())


@pytest.mark.parametrize("case", REMOVED)
def test_removed_blocks_are_recorded_and_counted_in_every_step_and_keep_no_keys(case: str) -> None:
    model, removed = exact_model("llama"), REMOVED[case]
    handle, steps = wrapped(model, "static_depth", layers=removed)
    batch = padded(prompts_of([9, 4]), "left")
    with torch.no_grad():
        out = handle.model(**batch, use_cache=True)
        handle.model(
            input_ids=torch.tensor([[5], [6]]), cache=out.cache, use_cache=True,
            attention_mask=torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1),
            position_ids=torch.tensor([[9], [4]]),
        )  # fmt: skip
    record = describe(handle, "cut", "static_depth", "dense")
    assert (record.scope, record.kv_policy, record.synthetic) == ("sequence", "removed with the block", None)
    assert (record.untrained, record.signals) == (False, {})
    for step, rows in zip(steps, (13, 2), strict=True):
        assert executed_as_decided(step, record) == []
        assert {d.layer: d.gate.tolist() for d in step.decisions} == {
            layer: [0.0, 0.0] if layer in removed else [1.0, 1.0] for layer in range(LAYERS)
        }
        counted = {layer: count.rows for (layer, site, _), count in step.counts.items() if site == "block"}
        assert counted == {layer: rows for layer in range(LAYERS) if layer not in removed}
        # Two KV heads of eight float64 each for keys and for values: 256 bytes a token and layer that runs.
        assert step.kv is not None
        assert step.kv[1] == 256 * (LAYERS - len(removed)) * (13 if rows == 13 else 15)


def test_costs_are_a_routers_without_the_router() -> None:
    model = exact_model("llama")
    mine = methods.load("static_depth").choices(model, configured({"count": 2}))
    routed = LayerRoute.choices(model, methods.configure("layerroute", {}))
    assert mine == [choice for choice in routed if choice.site != "router"]


def test_what_was_forced_is_named_and_an_unknown_route_is_refused() -> None:
    handle, steps = wrapped(exact_model("llama"), "static_depth", layers=[1])
    handle.force("closed")
    assert handle.synthetic == "forced: every block closed"
    with torch.no_grad():
        handle.model(input_ids=torch.tensor([[1, 2]]))
    assert {int(d.choice[0]) for d in steps[0].decisions} == {0}
    handle.force(None)
    assert handle.synthetic is None
    with pytest.raises(InputError, match="cannot force fixed blocks to 'half'"):
        handle.force("half")


def test_a_request_goes_on_with_the_blocks_its_prompt_had() -> None:
    handle, steps = wrapped(exact_model("llama"), "static_depth", layers=[1])
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([[1, 2]]), use_cache=True)
        handle.force("open")
        handle.model(input_ids=torch.tensor([[3]]), cache=out.cache, use_cache=True)
        with pytest.raises(InputError, match="the cache holds 1 sequences, this step has 2"):
            handle.model(input_ids=torch.tensor([[3], [4]]), cache=out.cache, use_cache=True)
    assert [[int(d.choice[0]) for d in step.decisions] for step in steps[:2]] == [[1, 0, 1, 1, 1, 1]] * 2
