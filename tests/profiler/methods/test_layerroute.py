"""LayerRoute: what is decided, what runs, what the cache holds; against a decoder written out by hand."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedCache

from profiler import methods
from profiler.errors import InputError
from profiler.execution.kv import SubsetLayer
from profiler.execution.routes import ForcedGates
from profiler.methods.layerroute import LayerRoute, start_bias
from profiler.recorder import StepData
from tests.profiler.routed_arms import Arm, continuation, decode
from tests.profiler.slow_decoder import slow_forward
from tests.profiler.tiny import (
    SHAPES,
    config_of,
    disturb,
    exact_model,
    padded,
    prompts_of,
    pruned,
    random_model,
    wrapped,
)

LAYERS = 6
ROUTED = Arm("layerroute", {}, disturbed=True)
MIXED = [9, 4, 1, 6]


def routed(shape: str = "llama") -> tuple[LayerRoute, list[StepData]]:
    handle, steps = ROUTED.wrap(shape)
    assert isinstance(handle, LayerRoute)
    return handle, steps


def routers_of(handle: LayerRoute) -> list[tuple[Tensor, Tensor]]:
    return [(router.weight[0].detach(), router.bias[0].detach()) for router in handle.routers]


def run(handle: methods.Method, prompts: list[list[int]], **options: Any) -> Any:
    with torch.no_grad():
        return handle.model(**padded(prompts, "left"), **options)


def force_layers(handle: LayerRoute, runs: list[list[bool]]) -> None:
    """Routers that decide `runs[layer]` for all, whatever the input."""
    with torch.no_grad():
        for router, wanted in zip(handle.routers, runs, strict=True):
            router.weight.zero_()
            router.bias.fill_(1.0 if wanted else -1.0)


# -- against the slow reference ----------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_cached_decode_equal_the_slow_reference(shape: str, side: str) -> None:
    handle, steps = routed(shape)
    model, prompts, new = exact_model(shape), prompts_of(MIXED), 10
    seen = decode(handle, steps, prompts, side, new=new)
    routes = set()
    for prompt, (name, one) in zip(prompts, seen.items(), strict=True):
        with torch.no_grad():
            slow = slow_forward(
                model.state_dict(),
                model.config,
                prompt + [continuation(name, k) for k in range(new)],
                routers=routers_of(handle),
                pooled=len(prompt),
            )
        assert float((one.logits - slow.logits).abs().max()) < 1e-10
        assert one.decisions == [{(i, "block"): [int(runs)] for i, runs in enumerate(slow.ran)}] * (1 + new)
        routes.add(tuple(slow.ran))
    assert len(routes) > 2, "all rows were decided alike; the test shows little"


def test_recorded_gates_are_the_slow_reference_s_through_decode() -> None:
    handle, steps = routed()
    model, prompts = exact_model("llama"), prompts_of(MIXED)
    decode(handle, steps, prompts, "left")
    with torch.no_grad():
        wanted = [
            slow_forward(model.state_dict(), model.config, p, routers=routers_of(handle)).router_logits for p in prompts
        ]
    for step in steps:
        assert [d.layer for d in step.decisions] == list(range(LAYERS))
        for decision in step.decisions:
            for row, logits in enumerate(wanted):
                logit = logits[decision.layer]
                assert decision.signals["logit"][row] == pytest.approx(logit, abs=1e-4)  # routers are float32
                assert decision.gate[row] == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-4)
                assert decision.choice[row] == (logit > 0)


def test_without_a_cache_every_forward_decides_on_all_it_is_given() -> None:
    handle, steps = routed("qwen2")
    model, ids = exact_model("qwen2"), prompts_of([12])[0]
    routes = set()
    for length in (3, 7, 12):
        out = run(handle, [ids[:length]], use_cache=False)
        with torch.no_grad():
            slow = slow_forward(model.state_dict(), model.config, ids[:length], routers=routers_of(handle))
        assert float((out.logits[0] - slow.logits).abs().max()) < 1e-10
        assert [d.choice[0] for d in steps[-1].decisions] == slow.ran
        routes.add(tuple(slow.ran))
    assert len(routes) > 1


# -- decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "closed"),
    [(24, range(8, 17)), (30, range(10, 21)), (6, range(2, 4)), (1, []), (2, []), (3, range(1, 2))],
)
def test_start_bias_closes_the_middle(layers: int, closed: Any) -> None:
    assert [i for i, bias in enumerate(start_bias(layers)) if bias == -1.0] == list(closed)
    assert set(start_bias(layers)) <= {-1.0, 1.0}


def test_untrained_routers_skip_the_middle_for_any_input() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute")
    seen = decode(handle, steps, prompts_of(MIXED), "left")
    assert handle.untrained
    for one in seen.values():
        assert [one.decisions[0][i, "block"] for i in range(LAYERS)] == [[1], [1], [0], [0], [1], [1]]
    assert steps[0].decisions[0].gate[0] == pytest.approx(1 / (1 + math.exp(-1)))
    assert steps[0].decisions[2].gate[0] == pytest.approx(1 / (1 + math.exp(1)))


@pytest.mark.parametrize(("logit", "runs"), [(0.0, 0), (1e-6, 1), (-1e-6, 0)])
def test_a_gate_of_one_half_skips(logit: float, runs: int) -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute")
    with torch.no_grad():
        for router in handle.routers:
            router.bias.fill_(logit)
    run(handle, prompts_of([5]))
    assert {int(d.choice[0]) for d in steps[0].decisions} == {runs}


def test_pads_have_no_part_in_a_decision() -> None:
    handle, steps = routed()
    prompts = prompts_of([4])
    run(handle, prompts)
    inputs = padded(prompts, "left", width=12)
    for filler in (0, 50):
        inputs["input_ids"][0, :8] = filler
        with torch.no_grad():
            handle.model(**inputs)
    first, *others = steps
    for other in others:
        for a, b in zip(first.decisions, other.decisions, strict=True):
            assert b.signals["logit"] == pytest.approx(a.signals["logit"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routers_are_float32_whatever_the_backbone_is(dtype: torch.dtype) -> None:
    handle, steps = wrapped(random_model("llama", dtype=dtype), "layerroute")
    disturb(handle)
    with torch.no_grad():
        out = run(handle, prompts_of(MIXED), use_cache=True)
        handle.model(input_ids=torch.ones(4, 1, dtype=torch.long), cache=out.cache)
    assert out.logits.dtype == dtype
    assert {p.dtype for router in handle.routers for p in router.parameters()} == {torch.float32}
    assert len(steps) == 2


def test_frozen_gates_ask_no_router() -> None:
    handle, steps = routed()
    decode(handle, steps, prompts_of(MIXED), "left")
    asked = [{key: c.rows for key, c in step.counts.items() if key[1] == "router"} for step in steps]
    assert asked[0] == {(i, "router", 0): len(MIXED) for i in range(LAYERS)}
    assert asked[1:] == [{}] * 3


def test_rows_are_counted_by_the_decisions_worked_out_by_hand() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", gates={"forced": {"ratio": 0.5, "pattern": "random"}})
    names = [f"request-{i}" for i in range(4)]
    decode(handle, steps, prompts_of(MIXED), "left", names)
    routes = [ForcedGates(ratio=0.5, pattern="random").open_layers(LAYERS, name) for name in names]
    for layer in range(LAYERS):
        lengths = [n for n, route in zip(MIXED, routes, strict=True) if route[layer]]
        prefill, second = (steps[i].counts.get((layer, "block", 1)) for i in (0, 2))
        if not lengths:
            assert prefill is None
            assert second is None
            continue
        assert prefill is not None
        assert second is not None
        assert prefill.rows == sum(lengths)
        assert prefill.padded == 9 * len(lengths) - sum(lengths)
        assert prefill.context == sum(n * (n + 1) // 2 for n in lengths)
        assert prefill.context_full == sum(n * n for n in lengths)
        assert (second.rows, second.padded) == (len(lengths), 0)
        assert second.context == second.context_full == sum(n + 2 for n in lengths)


def test_segments_name_the_router_always_and_dispatch_only_where_rows_part() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute")
    handle.force(ForcedGates(ratio=0.5, pattern="random"))
    handle.tracker.name(["request-0", "request-1"])
    run(handle, prompts_of([5, 5]))
    parted = {d.layer for d in steps[0].decisions if len(set(d.choice)) == 2}
    assert 0 < len(parted) < LAYERS
    assert {layer for segment, layer in steps[0].segment_ns if segment == "dispatch"} == parted
    assert {layer for segment, layer in steps[0].segment_ns if segment == "router"} == set(range(LAYERS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_names_layer_and_request(value: float) -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute", gates="open")
    with torch.no_grad():
        handle.routers[4].weight.fill_(value)
    handle.tracker.name(["first", "second"])
    with pytest.raises(InputError, match=r"layer 4: the router's logit is -?(nan|inf) for request 'first'; it must be"):
        run(handle, prompts_of([3, 3]))


# -- forcing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pattern", ["random", "shared", "middle"])
def test_forced_routes_equal_the_model_without_those_blocks(pattern: Any, ratio: float) -> None:
    handle, _ = wrapped(exact_model("qwen2"), "layerroute")
    gates = ForcedGates(ratio=ratio, pattern=pattern, seed=2)
    handle.force(gates)
    prompts = prompts_of(MIXED)
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    tokens = handle.model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, 9:]
    for row, prompt in enumerate(prompts):
        shorter = pruned(exact_model("qwen2"), gates.open_layers(LAYERS, f"row-{row}"))
        ids = torch.tensor([prompt])
        alone = shorter.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert tokens[row].tolist() == alone[0, len(prompt) :].tolist()


def test_labels_say_what_was_forced() -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute", gates={"forced": {"ratio": 0.3}})
    assert handle.synthetic == "forced: 30% of layers skip, pattern shared, seed 0"
    assert not handle.untrained
    handle.force("open")
    assert handle.synthetic == "forced: every gate open"
    handle.force(None)
    assert handle.synthetic is None
    assert handle.untrained
    with pytest.raises(InputError, match="cannot force gates to 'ajar'"):
        handle.force("ajar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "open"}, "arms.a.gate: method 'layerroute' has no such option; did you mean 'gates'"),
        ({"gates": "ajar"}, r"arms.a.gates: Input should be 'router' or 'open', or: .* mapping \(given: 'ajar'\)"),
        ({"gates": {"forced": {"ratioo": 0.3}}}, "gates.forced.ratioo: .* did you mean 'ratio'"),
        ({"gates": {"forced": {"ratio": "0.3"}}}, r"gates.forced.ratio: .* valid number \(given: '0.3'\)"),
        ({"lora": {"rank": True}}, r"lora.rank: .* valid integer \(given: True\)"),
        ({"gates": {"forced": {"ratio": 2}}}, r"arms.a.gates.forced.ratio: .* less than or equal to 1 \(given: 2\)"),
        ({"gates": {"forced": {"ratio": 0.3, "patern": "random"}}}, "gates.forced.patern: .* did you mean 'pattern'"),
        ({"gates": {"forced": {}}}, "arms.a.gates.forced.ratio: Field required$"),
        ({"kv_policy": "hole"}, "arms.a.kv_policy: Input should be "),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        methods.configure("layerroute", options, where="arms.a.")


# -- the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [[0], [0, 1, 2, 3, 4, 5], [5], [0, 2, 4]])
def test_a_skipped_layer_holds_nothing_and_positions_go_on(closed: list[int]) -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute")
    force_layers(handle, [i not in closed for i in range(LAYERS)])
    seen = []
    handle.decoder.base.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    prompt = prompts_of([7])[0]
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([prompt]), use_cache=True)
        for token in (5, 6, 7):
            out = handle.model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
    assert seen == [[list(range(7))], [[7]], [[8]], [[9]]]
    assert out.cache.get_seq_length() == 10
    for layer, held in enumerate(out.cache.layers):
        assert (held.keys is None) == (layer in closed)
        if layer not in closed:
            assert held.keys.shape == held.values.shape == (1, 2, 10, 8)
    shorter = pruned(exact_model("llama"), [i not in closed for i in range(LAYERS)])
    with torch.no_grad():
        wanted = shorter(input_ids=torch.tensor([[*prompt, 5, 6, 7]])).logits[:, -1]
    assert float((out.logits[:, -1] - wanted).abs().max()) < 1e-12


def test_only_the_rows_that_run_are_held() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", gates={"forced": {"ratio": 0.5, "pattern": "random"}})
    out = run(handle, prompts_of([5, 5, 5]), use_cache=True)
    for decision, held in zip(steps[0].decisions, out.cache.layers, strict=True):
        runs = int(decision.choice.sum())
        assert (0 if held.keys is None else held.keys.shape[0]) == runs


@pytest.mark.parametrize("made", ["by the model", "without config", "with config"])
def test_caches_that_grow_are_taken(made: str) -> None:
    handle, _ = routed()
    cache = {
        "by the model": None,
        "without config": DynamicCache(),
        "with config": DynamicCache(config=handle.model.config),
    }[made]
    out = run(handle, prompts_of([5, 3]), use_cache=True, cache=cache)
    assert cache is None or out.cache is cache
    assert [type(layer) for layer in out.cache.layers] == [SubsetLayer] * LAYERS


def refused_caches() -> dict[str, tuple[Any, str]]:
    config = config_of("llama")
    sliding = config_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    offloading = DynamicCache()
    offloading.offloading = True  # its constructor wants a device with streams
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), 0)
    return {
        "static": (StaticCache(config=config, max_cache_len=32), "needs a DynamicCache .*; got StaticCache"),
        "quantised": (QuantizedCache("fp8", config), "needs a DynamicCache .*; got QuantizedCache"),
        "sliding": (DynamicCache(config=sliding), "plain DynamicLayer cache layers; .* DynamicSlidingWindowLayer"),
        "offloading": (offloading, "needs a DynamicCache .*; got an offloading DynamicCache"),
        "filled": (filled, "was filled before the gated model saw it; start the request with an empty cache"),
    }


@pytest.mark.parametrize("kind", refused_caches())
def test_caches_that_cannot_be_kept_right_are_refused(kind: str) -> None:
    handle, _ = routed()
    cache, message = refused_caches()[kind]
    with pytest.raises(InputError, match=message), torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([5])), cache=cache, use_cache=True)


def test_generate_refuses_a_static_cache() -> None:
    handle, _ = routed()
    with pytest.raises(InputError, match="got StaticCache|attention_mask must be 2-D"):
        handle.model.generate(torch.tensor(prompts_of([5])), max_new_tokens=2, cache_implementation="static")


def test_a_cache_of_another_depth_is_refused() -> None:
    deep, _ = routed()
    shallow, _ = wrapped(exact_model("llama", num_hidden_layers=4), "layerroute")
    out = run(deep, prompts_of([5]), use_cache=True)
    with pytest.raises(InputError, match="cache"):
        run(shallow, [[3]], cache=out.cache, use_cache=True)


def test_another_model_cannot_go_on_with_a_routed_cache() -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute")
    out = run(handle, prompts_of([5]), use_cache=True)
    with pytest.raises(InputError, match="belongs to a model that skips blocks"), torch.no_grad():
        exact_model("llama")(input_ids=torch.tensor([[3]]), cache=out.cache, use_cache=True)


def test_a_prompt_in_pieces_is_refused() -> None:
    handle, _ = routed()
    ids = torch.tensor(prompts_of([9]))
    with torch.no_grad():
        out = handle.model(input_ids=ids[:, :4], use_cache=True)
        with pytest.raises(InputError, match="adds 5 tokens. Sequence gates need the whole prompt at once"):
            handle.model(input_ids=ids[:, 4:], cache=out.cache, use_cache=True)
    with pytest.raises(InputError, match="prefill_chunk_size"):
        handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, prefill_chunk_size=4)


def test_another_number_of_rows_is_refused() -> None:
    handle, _ = routed()
    out = run(handle, prompts_of([5, 5]), use_cache=True)
    with pytest.raises(InputError, match="the cache holds 2 sequences, this step has 3"), torch.no_grad():
        handle.model(input_ids=torch.ones(3, 1, dtype=torch.long), cache=out.cache, use_cache=True)


def test_kv_bytes_by_hand() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", gates={"forced": {"ratio": 0.5, "pattern": "random"}})
    decode(handle, steps, prompts_of([9, 4, 1]), "left", new=2)
    a_token = 2 * 2 * 8 * 8  # keys and values, 2 heads of 8 numbers of 8 bytes
    runs = [[int(c) for c in d.choice] for d in steps[0].decisions]
    for new, step in enumerate(steps):
        rows = sum(map(sum, runs))
        live = sum(run * (n + new) for layer in runs for run, n in zip(layer, [9, 4, 1], strict=True))
        assert step.kv == (rows * (9 + new) * a_token, live * a_token)
    dense, dense_steps = wrapped(exact_model("llama"), "dense")
    decode(dense, dense_steps, prompts_of([9, 4, 1]), "left", new=1)
    assert [step.kv for step in dense_steps] == [
        (LAYERS * 27 * a_token, LAYERS * 14 * a_token),
        (LAYERS * 30 * a_token, LAYERS * 17 * a_token),
    ]


def test_cropping_and_going_on_equals_never_having_gone_further() -> None:
    handle, _ = routed()
    prompts = prompts_of([6, 6])
    with torch.no_grad():
        out = run(handle, prompts, use_cache=True)
        for token in (3, 4, 5):
            last = handle.model(input_ids=torch.full((2, 1), token), cache=out.cache, use_cache=True)
        out.cache.crop(-3)
        assert out.cache.get_seq_length() == 6
        for token in (3, 4, 5):
            again = handle.model(input_ids=torch.full((2, 1), token), cache=out.cache, use_cache=True)
    assert torch.equal(last.logits, again.logits)


def test_a_cache_cropped_to_nothing_takes_a_new_prompt() -> None:
    handle, steps = routed()
    first, second = prompts_of([6, 6], seed=3)
    out = run(handle, [first], use_cache=True)
    out.cache.crop(-6)
    reused = run(handle, [second], use_cache=True, cache=out.cache)
    fresh = run(handle, [second], use_cache=True)
    assert torch.equal(reused.logits, fresh.logits)
    decided = [[int(d.choice[0]) for d in step.decisions] for step in steps]
    assert decided[0] != decided[1] == decided[2]


def test_selecting_and_repeating_rows_equals_having_run_those_rows() -> None:
    handle, _ = routed()
    prompts = prompts_of([6, 6, 6])
    for change, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        token = torch.full((len(rows), 1), 7)
        changed = run(handle, prompts, use_cache=True).cache
        change(changed)
        asked = run(handle, [prompts[i] for i in rows], use_cache=True).cache
        with torch.no_grad():
            mine = handle.model(input_ids=token, cache=changed, use_cache=True).logits
            wanted = handle.model(input_ids=token, cache=asked, use_cache=True).logits
        assert float((mine - wanted).abs().max()) < 1e-12


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_equals_the_dense_model_s_and_a_pruned_model_s(beams: int) -> None:
    prompts = prompts_of([7, 4, 5])
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    how = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "num_return_sequences": 2}
    handle, _ = wrapped(exact_model("llama"), "layerroute")
    for gates in ("open", ForcedGates(ratio=0.5, seed=1), ForcedGates(ratio=0.3, pattern="middle")):
        handle.force(gates)
        route = [True] * LAYERS if gates == "open" else gates.open_layers(LAYERS, "")
        wanted = pruned(exact_model("llama"), route).generate(**inputs, **how)
        assert torch.equal(handle.model.generate(**inputs, **how), wanted)


def test_beams_of_differently_routed_prompts_equal_each_prompt_s_own_search() -> None:
    handle, steps = routed()
    prompts = prompts_of([7, 4, 5])
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    how = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    together = handle.model.generate(**inputs, **how)[:, 7:]
    routes = [[bool(d.choice[3 * row]) for d in steps[0].decisions] for row in range(3)]
    assert len(set(map(tuple, routes))) > 1
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        shorter = pruned(exact_model("llama"), routes[row])
        wanted = shorter.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :]
        assert together[row].tolist() == wanted.tolist()


# -- checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    handle, _ = routed()
    handle.save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load(folder: Path, shape: str = "llama", **settings: Any) -> methods.Method:
    return wrapped(exact_model(shape, **settings), "layerroute", checkpoint=str(folder))[0]


def test_an_arm_with_a_checkpoint_is_trained(saved: Path) -> None:
    handle = load(saved)
    assert not handle.untrained
    for mine, theirs in zip(routers_of(handle), routers_of(routed()[0]), strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 4}, "it was made for 6 layers, this model has 4"),
        ({"hidden_size": 64}, "it was made for a hidden size of 32, this model has 64"),
    ],
)
def test_a_checkpoint_of_another_size_names_both_sides(saved: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(saved, **settings)


def _rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "routers.safetensors")
    change(tensors)
    save_file(tensors, folder / "routers.safetensors")


def _facts(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


BROKEN = {
    "no folder": (shutil.rmtree, "checkpoint .*: there is no such folder"),
    "no routers": (lambda f: (f / "routers.safetensors").unlink(), "routers.safetensors cannot be read"),
    "torn routers": (lambda f: (f / "routers.safetensors").write_bytes(b"torn"), "routers.safetensors cannot be read"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[1]"), "must hold a JSON object"),
    "another method": (lambda f: _facts(f, method="hero"), "it was made by method hero, and the arm's is layerroute"),
    "a missing key": (lambda f: _rewrite(f, lambda t: t.pop("3.bias")), r"missing tensors \['3.bias'\]"),
    "a key too many": (lambda f: _rewrite(f, lambda t: t.update(x=torch.ones(1))), r"unexpected tensors \['x'\]"),
    "another shape": (
        lambda f: _rewrite(f, lambda t: t.update({"2.weight": torch.ones(1, 8)})),
        r"2.weight has shape \[1, 8\], this model needs \[1, 32\]",
    ),
    "NaN": (
        lambda f: _rewrite(f, lambda t: t["1.weight"].__setitem__((0, 5), float("nan"))),
        "1.weight holds values that are not finite",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(saved: Path, what: str) -> None:
    spoil, message = BROKEN[what]
    handle, _ = wrapped(exact_model("llama"), "layerroute")
    before = copy.deepcopy(routers_of(handle))
    spoil(saved)
    with pytest.raises(InputError, match=message):
        handle.restore(saved)
    assert handle.untrained
    assert all(
        torch.equal(a, b) for x, y in zip(before, routers_of(handle), strict=True) for a, b in zip(x, y, strict=True)
    )
    model = exact_model("llama")
    with pytest.raises(InputError, match=message):
        methods.load("layerroute").wrap(
            model, methods.configure("layerroute", {"checkpoint": str(saved)}), handle.recorder
        )
    assert methods.handle_of(model) is None
    assert not model.base_model._forward_pre_hooks
    assert [name for name, _ in model.named_parameters() if "gatewise" in name] == []
