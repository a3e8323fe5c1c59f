"""LayerRoute's KV policies `project` and `recompute`, against a decoder written out by hand that has no cache.

`request` is in `test_layerroute.py`. The contract (`test_contract.py`) runs over `project` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from profiler import methods
from profiler.arms import build, describe
from profiler.errors import InputError
from profiler.execution.blocks import run_gated
from profiler.execution.decoder import decoder
from profiler.execution.kv import ProjectedLayer, seal
from profiler.execution.routes import ForcedGates
from profiler.methods.layerroute import LayerRoute
from profiler.recorder import StepData
from profiler.session import record
from profiler.stepdata import executed_as_decided
from profiler.store import Run
from profiler.verify import verify
from tests.profiler.engine import serve
from tests.profiler.routed_arms import continuation, decode
from tests.profiler.slow_decoder import slow_forward, slow_running
from tests.profiler.tiny import SHAPES, disturb, exact_model, padded, prompts_of, pruned, random_model, wrapped

LAYERS, NEW = 6, 10
RAGGED = [9, 4, 1, 6]
#: Shape, prompt lengths, padded side.
CASES = [
    *((shape, RAGGED, side) for shape in SHAPES for side in ("left", "right")),
    ("llama", [3], "left"),
    ("qwen2", [1, 1], "left"),
]
POLICIES = ("request", "project", "recompute")


def routed(policy: str, shape: str = "llama", **options: Any) -> tuple[LayerRoute, list[StepData]]:
    """Routers that depend on the input, over `exact_model(shape)`."""
    handle, steps = wrapped(exact_model(shape), "layerroute", kv_policy=policy, **options)
    assert isinstance(handle, LayerRoute)
    disturb(handle)
    return handle, steps


def routers_of(handle: LayerRoute) -> list[tuple[Tensor, Tensor]]:
    return [(router.weight[0].detach(), router.bias[0].detach()) for router in handle.routers]


def backbone(handle: LayerRoute, shape: str) -> Any:
    """The dense model whose blocks the arm runs: the backbone, adapters merged in where it has them."""
    model = exact_model(shape)
    handle.adapt_twin(model)
    return model


def fed(name: str, prompt: list[int], new: int) -> list[int]:
    return [*prompt, *(continuation(name, k) for k in range(new))]


def recompute(
    handle: LayerRoute, steps: list[StepData], prompts: list[list[int]], side: str, new: int = NEW
) -> dict[str, list[Tensor]]:
    """`decode` for a policy without a cache: all of each sequence in every step; by request, each step's logits."""
    steps.clear()
    found: dict[str, list[Tensor]] = {f"request-{i}": [] for i in range(len(prompts))}
    handle.tracker.name(list(found))
    for k in range(new + 1):
        inputs = padded([fed(name, prompt, k) for name, prompt in zip(found, prompts, strict=True)], side)
        with torch.no_grad():
            out = handle.model(**inputs, use_cache=False)
        for row, logits in enumerate(found.values()):
            logits.append(out.logits[row][inputs["attention_mask"][row].bool()])
    handle.tracker.name(None)
    return found


def prove(handle: methods.Method, steps: list[StepData]) -> None:
    """Rule 1 in every step."""
    arm = describe(handle, "mine", "layerroute", None)
    assert steps
    for step in steps:
        assert executed_as_decided(step, arm) == []


def differs(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


# -- project: against the slow reference -------------------------------------------------------------


@pytest.mark.parametrize(("shape", "lengths", "side"), CASES)
def test_project_equals_the_uncached_reference(shape: str, lengths: list[int], side: str) -> None:
    handle, steps = routed("project", shape)
    _equals_reference(handle, steps, shape, prompts_of(lengths), side)


@pytest.mark.parametrize("side", ["left", "right"])
def test_project_with_adapters_equals_the_reference_with_merged_weights(side: str) -> None:
    handle, steps = routed("project", "qwen2", lora={"rank": 2, "alpha": 3.0})
    with torch.no_grad():  # smaller, so that logits stay of a size that float64 tells apart
        for name, parameter in handle.trainables().items():
            if "lora" in name:
                parameter.mul_(0.2)
    _equals_reference(handle, steps, "qwen2", prompts_of(RAGGED), side)


def _equals_reference(
    handle: LayerRoute, steps: list[StepData], shape: str, prompts: list[list[int]], side: str
) -> None:
    model = backbone(handle, shape)
    seen = decode(handle, steps, prompts, side, new=NEW)
    prove(handle, steps)
    changes = 0
    for row, (prompt, (name, one)) in enumerate(zip(prompts, seen.items(), strict=True)):
        with torch.no_grad():
            slow = slow_running(
                model.state_dict(), model.config, fed(name, prompt, NEW), len(prompt), routers=routers_of(handle)
            )
        assert differs(one.logits, slow.logits) < 1e-9
        assert one.decisions == [{(i, "block"): [int(r)] for i, r in enumerate(ran)} for ran in slow.ran]
        for step, wanted in zip(steps, slow.router_logits, strict=True):
            assert [d.signals["logit"][row] for d in step.decisions] == pytest.approx(wanted, abs=1e-3)
        changes += sum(a != b for a, b in zip(slow.ran, slow.ran[1:], strict=False))
    assert changes, "no decision changed while decoding; the test shows little"


def test_a_block_that_was_skipped_finds_every_position_when_it_runs() -> None:
    """All gates shut on the prompt, block 0 alone in the next step, then all open, then every other one."""
    handle, steps = routed("project")
    route = [
        [False] * LAYERS,
        [True, *[False] * 5],
        [True] * LAYERS,
        [False, True] * 3,
        [False] * LAYERS,
        [True] * LAYERS,
    ] * 2
    prompts, model = prompts_of([5, 1, 3]), exact_model("llama")

    def runs(layer: int, requests: list[str], logits: list[float]) -> list[bool]:
        return [route[len(steps)][layer]] * len(requests)

    handle._runs = runs  # type: ignore[method-assign]
    seen = decode(handle, steps, prompts, "left", new=len(route) - 1)
    prove(handle, steps)
    for prompt, (name, one) in zip(prompts, seen.items(), strict=True):
        with torch.no_grad():
            slow = slow_running(
                model.state_dict(), model.config, fed(name, prompt, len(route) - 1), len(prompt), route=route
            )
        assert differs(one.logits, slow.logits) < 1e-9


@pytest.mark.parametrize("closed", [[0], [0, 1, 2, 3, 4, 5], [0, 2, 4], [5]])
def test_positions_go_on_and_every_layer_is_whole(closed: list[int]) -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute", kv_policy="project")
    with torch.no_grad():
        for layer, router in enumerate(handle.routers):
            router.bias.fill_(-1.0 if layer in closed else 1.0)
    seen = []
    handle.decoder.base.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    prompt = prompts_of([7])[0]
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([prompt]), use_cache=True)
        for token in range(NEW):
            out = handle.model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
        wanted = pruned(exact_model("llama"), [i not in closed for i in range(LAYERS)])(
            input_ids=torch.tensor([[*prompt, *range(NEW)]])
        ).logits[:, -1]
    assert seen == [[list(range(7))], *([[7 + k]] for k in range(NEW))]
    assert out.cache.get_seq_length() == 7 + NEW
    assert [type(layer) for layer in out.cache.layers] == [ProjectedLayer] * LAYERS
    assert [layer.keys.shape for layer in out.cache.layers] == [(1, 2, 7 + NEW, 8)] * LAYERS
    assert differs(out.logits[:, -1], wanted) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_of_a_skipped_block_is_what_the_block_would_have_put_there(shape: str) -> None:
    prompts = prompts_of([5, 5])
    caches = []
    for method, options in (("dense", {}), ("layerroute", {"kv_policy": "project"})):
        handle, _ = wrapped(exact_model(shape), method, **options)
        if method == "layerroute":
            with torch.no_grad():
                handle.routers[0].bias.fill_(-1.0)  # what block 0 is given is the same in both
        with torch.no_grad():
            caches.append(handle.model(input_ids=torch.tensor(prompts), use_cache=True).cache.layers[0])
    assert differs(caches[0].keys, caches[1].keys) < 1e-12
    assert differs(caches[0].values, caches[1].values) < 1e-12


# -- project: costs ----------------------------------------------------------------------------------


def test_kv_costs_by_hand() -> None:
    """Width 32, 2 key/value heads of 8: K and V take 32·16 each; the norm before them has 32."""
    dense = {(c.layer, c.site): c for c in methods.load("dense").choices(exact_model("llama"), None)}
    plain = methods.configure("layerroute", {"kv_policy": "project"})
    adapted = methods.configure("layerroute", {"kv_policy": "project", "lora": {"rank": 2}})
    for config, adapters in ((plain, (0, 0)), (adapted, (2 * (32 + 32) + 2 * (32 + 32), 2 * (32 + 16) * 2))):
        choices = LayerRoute.choices(exact_model("llama"), config)
        for layer in range(LAYERS):
            (kv,) = [c for c in choices if (c.layer, c.site) == (layer, "kv")]
            skip, run = [c for c in choices if (c.layer, c.site) == (layer, "block")]
            of_block, of_kv = adapters
            assert kv.backbone_parameters == 2 * 32 * 16 + 32
            assert kv.flops_per_row == 2 * (2 * 32 * 16) + 2 * of_kv
            assert kv.weight_bytes == 8 * (2 * 32 * 16 + 32) + 8 * of_kv  # adapters compute in float64 with it
            assert (kv.kv_bytes_per_row, kv.overhead_parameters) == (2 * 16 * 8, of_kv)
            whole = [dense[layer, "attention"], dense[layer, "ffn"]]
            assert run.backbone_parameters == sum(c.backbone_parameters for c in whole) - kv.backbone_parameters
            assert run.flops_per_row == sum(c.flops_per_row for c in whole) - 2 * (2 * 32 * 16) + 2 * of_block
            assert run.flops_per_context == whole[0].flops_per_context
            assert (run.kv_bytes_per_row, run.overhead_parameters) == (0, of_block)
            assert (skip.flops_per_row, skip.weight_bytes, skip.kv_bytes_per_row) == (0, 0, 0)


def test_rows_and_segments_by_hand() -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", kv_policy="project")
    handle.force(ForcedGates(ratio=0.5, pattern="random"))
    lengths, names = [9, 4, 1, 6], [f"request-{i}" for i in range(4)]
    decode(handle, steps, prompts_of(lengths), "left", names)
    prove(handle, steps)
    routes = [ForcedGates(ratio=0.5, pattern="random").open_layers(LAYERS, name) for name in names]
    skipping = {layer for layer in range(LAYERS) if not all(route[layer] for route in routes)}
    assert len(skipping) > 0
    for step in steps:
        assert {layer for segment, layer in step.segment_ns if segment == "kv"} == skipping
        ran = {layer for segment, layer in step.segment_ns if segment == "ffn"}
        assert ran == {layer for layer in range(LAYERS) if any(route[layer] for route in routes)}
    for layer in range(LAYERS):
        kv, later = (steps[i].counts[layer, "kv", 0] for i in (0, 2))
        assert (kv.rows, kv.padded) == (sum(lengths), 4 * 9 - sum(lengths))
        assert (later.rows, later.padded) == (4, 0)
        runs = [n for n, route in zip(lengths, routes, strict=True) if route[layer]]
        block = steps[0].counts.get((layer, "block", 1))
        assert (block.rows if block else 0) == sum(runs)


def test_leaving_the_projection_out_fails_rule_1(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", kv_policy="project")
    monkeypatch.setattr(
        "profiler.methods.layerroute.run_projecting", lambda block, run, *rest: run_gated(run, *rest[:-1])
    )
    handle.force("closed")
    with torch.no_grad():
        handle.model(input_ids=torch.tensor(prompts_of([5])), use_cache=False)
    problems = executed_as_decided(steps[0], describe(handle, "mine", "layerroute", None))
    assert problems == [f"layer {i} kv run: 0 rows entered, decisions say 5" for i in range(LAYERS)]


def test_without_a_cache_a_step_costs_what_the_policy_costs() -> None:
    handle, steps = routed("project")
    model, (prompt,) = exact_model("llama"), prompts_of([8])
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([prompt]), use_cache=False)
        slow = slow_forward(model.state_dict(), model.config, prompt, routers=routers_of(handle))
    assert differs(out.logits[0], slow.logits) < 1e-10
    assert not all(slow.ran)
    prove(handle, steps)


# -- project: the cache ------------------------------------------------------------------------------


def test_open_equals_dense_to_the_last_digit() -> None:
    handle, mine = routed("project")
    handle.force("open")
    twin, theirs = wrapped(exact_model("llama"), "dense")
    seen, wanted = (decode(h, s, prompts_of([9, 4, 1]), "left") for h, s in ((handle, mine), (twin, theirs)))
    assert all(torch.equal(seen[name].logits, wanted[name].logits) for name in wanted)


def test_cropping_to_the_prompt_and_going_on_equals_never_having_gone_further() -> None:
    handle, steps = routed("project")
    prompts = prompts_of([6, 3])
    first = decode(handle, steps, prompts, "left", new=4)
    with torch.no_grad():
        inputs = padded(prompts, "left")
        out = handle.model(**inputs, use_cache=True)
        for token in (3, 4, 5):
            handle.model(
                input_ids=torch.full((2, 1), token),
                attention_mask=_longer(inputs["attention_mask"], token - 2),
                position_ids=torch.tensor([[6], [3]]) + token - 3,
                cache=out.cache,
                use_cache=True,
            )
        with pytest.raises(InputError, match=r"cropping to 8 tokens: .* the prompt of 6 tokens and for all 9"):
            out.cache.crop(-1)
        out.cache.crop(-3)
        assert out.cache.get_seq_length() == 6
        for k in range(4):
            last = handle.model(
                input_ids=torch.tensor([[continuation(f"request-{i}", k)] for i in range(2)]),
                attention_mask=_longer(inputs["attention_mask"], k + 1),
                position_ids=torch.tensor([[6], [3]]) + k,
                cache=out.cache,
                use_cache=True,
            )
    for row, one in enumerate(first.values()):
        assert torch.equal(last.logits[row, -1], one.logits[-1])


def _longer(mask: Tensor, more: int) -> Tensor:
    return torch.cat([mask, torch.ones(len(mask), more, dtype=mask.dtype)], dim=1)


def test_a_cache_cropped_to_nothing_takes_a_new_prompt() -> None:
    handle, _ = routed("project")
    first, second = prompts_of([6, 6], seed=3)
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([first]), use_cache=True)
        out.cache.crop(-6)
        reused = handle.model(input_ids=torch.tensor([second, first]), use_cache=True, cache=out.cache)
        fresh = handle.model(input_ids=torch.tensor([second, first]), use_cache=True)
    assert torch.equal(reused.logits, fresh.logits)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ],
)
def test_selecting_rows_equals_having_run_those_rows(change: Any, rows: list[int]) -> None:
    handle, _ = routed("project")
    ids = torch.tensor(prompts_of([6, 6, 6]))
    with torch.no_grad():
        changed = handle.model(input_ids=ids, use_cache=True).cache
        change(changed)
        asked = handle.model(input_ids=ids[rows], use_cache=True).cache
        pairs = []
        for token in (7, 8, 9):
            step = torch.full((len(rows), 1), token)
            pairs.append([handle.model(input_ids=step, cache=c, use_cache=True).logits for c in (changed, asked)])
    assert all(differs(mine, wanted) < 1e-12 for mine, wanted in pairs)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_equals_stepping_the_reference(beams: int) -> None:
    handle, steps = routed("project")
    model, prompts = exact_model("llama"), prompts_of([7, 4])
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    found = handle.model.generate(**inputs, max_new_tokens=NEW, num_beams=beams, do_sample=False)[:, 7:]
    prove(handle, steps)
    for row, prompt in enumerate(prompts):
        if beams > 1:  # each prompt's own search
            ids = torch.tensor([prompt])
            alone = handle.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, num_beams=beams, do_sample=False
            )
            assert found[row].tolist() == alone[0, len(prompt) :].tolist()
            continue
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                slow = slow_running(model.state_dict(), model.config, ids, len(prompt), routers=routers_of(handle))
            ids.append(int(slow.logits[-1].argmax()))
        assert found[row].tolist() == ids[len(prompt) :]


def test_a_sealed_cache_goes_on_with_the_prompts_gates() -> None:
    handle, steps = routed("project")
    model, (prompt, rest) = exact_model("llama"), prompts_of([6, 5])
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor([prompt]), use_cache=True)
        seal(out.cache)
        last = handle.model(input_ids=torch.tensor([rest]), cache=out.cache, use_cache=True)
        slow = slow_forward(
            model.state_dict(), model.config, prompt + rest, routers=routers_of(handle), pooled=len(prompt)
        )
    assert differs(last.logits[0], slow.logits[6:]) < 1e-10
    assert [int(d.choice[0]) for d in steps[1].decisions] == slow.ran
    prove(handle, steps)


def test_what_project_refuses() -> None:
    handle, _ = routed("project")
    ids = torch.tensor(prompts_of([6, 6]))
    with torch.no_grad():
        out = handle.model(input_ids=ids[:, :3], use_cache=True)
        with pytest.raises(InputError, match="adds 3 tokens. Sequence gates need the whole prompt at once"):
            handle.model(input_ids=ids[:, 3:], cache=out.cache, use_cache=True)
        with pytest.raises(InputError, match="the cache holds 2 sequences, this step has 1"):
            handle.model(input_ids=ids[:1, :1], cache=out.cache, use_cache=True)
        with pytest.raises(InputError, match="belongs to a model that skips blocks"):
            exact_model("llama")(input_ids=ids[:, :1], cache=out.cache, use_cache=True)
        filled = DynamicCache()
        filled.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), 0)
        with pytest.raises(InputError, match="was filled before the gated model saw it"):
            handle.model(input_ids=ids[:1], cache=filled, use_cache=True)
        frozen, _ = routed("request")
        with pytest.raises(InputError, match="got DynamicCache|plain DynamicLayer"):
            frozen.model(input_ids=ids[:, :1], cache=out.cache, use_cache=True)


def test_an_attention_that_does_more_to_its_keys_is_refused() -> None:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config)
    for block in decoder(model).blocks:
        nn.init.constant_(block.self_attn.k_norm.weight, 3.0)
    wrapped(model, "layerroute")
    with pytest.raises(InputError, match="Qwen3Attention does more to its keys or values than project and rotate"):
        wrapped(model, "layerroute", kv_policy="project")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_project_in_other_dtypes(dtype: torch.dtype) -> None:
    handle, steps = wrapped(random_model("qwen2", dtype=dtype), "layerroute", kv_policy="project", lora=True)
    disturb(handle)
    seen = decode(handle, steps, prompts_of([5, 2]), "left")
    assert {one.logits.dtype for one in seen.values()} == {dtype}
    prove(handle, steps)


# -- recompute ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "lengths", "side"),
    [("llama", RAGGED, "left"), ("qwen2", RAGGED, "right"), ("llama", [3], "left"), ("qwen2-untied", [1, 1], "left")],
)
def test_recompute_equals_the_reference_in_every_step(shape: str, lengths: list[int], side: str) -> None:
    handle, steps = routed("recompute", shape)
    model, prompts = exact_model(shape), prompts_of(lengths)
    found = recompute(handle, steps, prompts, side)
    prove(handle, steps)
    routes = set()
    for row, (name, logits) in enumerate(found.items()):
        for k in range(NEW + 1):
            with torch.no_grad():
                slow = slow_forward(
                    model.state_dict(), model.config, fed(name, prompts[row], k), routers=routers_of(handle)
                )
            assert differs(logits[k], slow.logits) < 1e-9
            assert [bool(d.choice[row]) for d in steps[k].decisions] == slow.ran
            routes.add(tuple(slow.ran))
    assert len(routes) > 1


def test_generate_recomputes_by_itself() -> None:
    """As the released code does: greedy, batch 1, the whole sequence pooled and decided again for every token."""
    handle, steps = routed("recompute")
    model, (prompt,) = exact_model("llama"), prompts_of([5])
    ids = torch.tensor([prompt])
    found = handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    wanted = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            slow = slow_forward(model.state_dict(), model.config, wanted, routers=routers_of(handle))
        wanted.append(int(slow.logits[-1].argmax()))
    assert found[0].tolist() == wanted
    assert [step.sequences.view.rows for step in steps] == [5 + k for k in range(NEW)]
    prove(handle, steps)


def test_generate_recomputes_ragged_batches() -> None:
    handle, steps = routed("recompute")
    prompts = prompts_of([7, 1, 4])
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    together = handle.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, 7:]
    prove(handle, steps)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        alone = handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert together[row].tolist() == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("closed", [[0], [0, 1, 2, 3, 4, 5]])
def test_recompute_with_blocks_shut_equals_the_pruned_model(closed: list[int]) -> None:
    handle, steps = wrapped(exact_model("llama"), "layerroute", kv_policy="recompute")
    with torch.no_grad():
        for layer, router in enumerate(handle.routers):
            router.bias.fill_(-1.0 if layer in closed else 1.0)
    ids = torch.tensor(prompts_of([1]))
    found = handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    shorter = pruned(exact_model("llama"), [i not in closed for i in range(LAYERS)])
    wanted = shorter.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, wanted)
    prove(handle, steps)


def test_recompute_refuses_a_cache() -> None:
    handle, _ = routed("recompute")
    ids = torch.tensor(prompts_of([5]))
    with torch.no_grad():
        assert handle.model(input_ids=ids).cache is None
        with pytest.raises(InputError, match="recompute keeps no cache: call the model with use_cache=False"):
            handle.model(input_ids=ids, use_cache=True)
    assert exact_model("llama").config.use_cache, "the backbone's own config is as it was"


# -- all three ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_kv_bytes_by_hand(policy: str) -> None:
    handle, steps = wrapped(
        exact_model("llama"), "layerroute", kv_policy=policy, gates={"forced": {"ratio": 0.5, "pattern": "random"}}
    )
    lengths, a_token = [9, 4, 1], 2 * 2 * 8 * 8  # keys and values, 2 heads of 8 numbers of 8 bytes
    if policy == "recompute":
        recompute(handle, steps, prompts_of(lengths), "left", new=2)
        assert [step.kv for step in steps] == [(0, 0)] * 3
        return
    decode(handle, steps, prompts_of(lengths), "left", new=2)
    for new, step in enumerate(steps):
        runs = [[int(c) for c in d.choice] for d in steps[0].decisions]
        held = [[1] * 3] * LAYERS if policy == "project" else runs
        live = sum(row * (n + new) for layer in held for row, n in zip(layer, lengths, strict=True))
        assert step.kv == (sum(map(sum, held)) * (9 + new) * a_token, live * a_token)
    assert handle.kv_policy == policy


# -- under a serving engine ----------------------------------------------------------------------------


def test_project_under_a_serving_engine_equals_the_uncached_reference(caplog: pytest.LogCaptureFixture) -> None:
    """Six prompts, four at a time, so that prompts join requests that decode; decisions change on the way."""
    handle, steps = routed("project")
    model = backbone(handle, "llama")
    lengths = zip(prompts_of([9, 1, 4, 13, 2, 6]), [6, 2, 9, 4, 7, 5], strict=True)
    requests = {f"q{i}": each for i, each in enumerate(lengths)}
    steps.clear()
    with caplog.at_level("CRITICAL"):
        found = serve(handle.model, requests, max_requests_per_batch=4)
    prove(handle, steps)
    assert {"mixed", "decode"} <= {step.phase for step in steps}
    changes = 0
    for name, (prompt, new) in requests.items():
        assert found[name].error is None
        said = found[name].generated_tokens
        with torch.no_grad():
            slow = slow_running(
                model.state_dict(), model.config, [*prompt, *said], len(prompt), routers=routers_of(handle)
            )
        assert said == slow.logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        mine = [step for step in steps if name in step.sequences.requests]
        for step, wanted in zip(mine, slow.ran, strict=False):
            row = step.sequences.requests.index(name)
            assert [bool(d.choice[row]) for d in step.decisions] == list(wanted)
        assert len(mine) == new  # the last token is said and never fed back
        changes += sum(a != b for a, b in zip(slow.ran, slow.ran[1:], strict=False))
    assert changes, "no decision changed while decoding; the test shows little"
    every = range(model.config.num_hidden_layers)
    for step in steps:  # a skipped block's keys and values are in the cache too
        kept = [p + r for p, r in zip(step.sequences.past_S, step.sequences.rows_S, strict=True)]
        assert step.kv is not None
        assert step.kv[1] == sum(kept) * len(every) * key_value_bytes(model)


def key_value_bytes(model: Any) -> int:
    config = model.config
    return int(2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 8)


def test_a_serving_engine_is_refused_where_no_cache_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    handle, _ = routed("recompute")
    with caplog.at_level("CRITICAL"):
        found = serve(handle.model, {"a": (prompts_of([5])[0], 3)})
    said = "kv_policy recompute keeps no cache and is not offered under a serving engine"
    assert all(said in str(result.error) for result in found.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lora", [False, True])
def test_every_check_before_timing_holds(policy: str, lora: bool) -> None:
    model = random_model("llama", dtype=torch.float32)
    options = {"kv_policy": policy, "lora": lora, "gates": {"forced": {"ratio": 0.5, "pattern": "random"}}}
    arm = build(model, "mine", "layerroute", options, None)
    found = verify(model, arm.record, prompts_of([24, 17, 9, 3]))
    assert [(rule.name, rule.detail) for rule in found if not rule.passed] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_records_generate(policy: str, tmp_path: Any) -> None:
    handle, _ = routed(policy)
    handle.recorder.detach()
    ids = torch.tensor(prompts_of([5]))
    with record(handle.model, tmp_path / "run"):
        handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    run = Run(tmp_path / "run")
    assert run.manifest.arms[0].kv_policy == policy
    rows = run.frame("steps").sort_values("step")["rows"].tolist()
    assert rows == ([5, 6, 7, 8] if policy == "recompute" else [5, 1, 1, 1])
    assert (run.frame("kv")["live_bytes"].sum() == 0) == (policy == "recompute")
