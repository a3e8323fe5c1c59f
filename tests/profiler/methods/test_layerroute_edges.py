"""LayerRoute where little is left: nothing runs, one token, more tokens than the model has positions, gates of NaN.

Under each KV policy, in ragged batches, against a decoder written out by hand. What a router usually does is in
`test_layerroute.py` and `test_layerroute_kv_policies.py`, the same under a serving engine in `test_packed.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler import run as running
from profiler.arms import describe
from profiler.errors import InputError
from profiler.methods.layerroute import LayerRoute
from profiler.recorder import StepData
from profiler.stepdata import executed_as_decided
from tests.profiler.routed_arms import continuation, decode
from tests.profiler.slow_decoder import slow_forward, slow_generate, slow_running
from tests.profiler.tiny import disturb, exact_model, padded, prompts_of, random_model, wrapped
from tests.profiler.tiny_runs import tiny_spec

LAYERS, NEW = 6, 4
POLICIES = ("request", "project", "recompute")
CACHED = POLICIES[:2]


def routed(policy: str, **settings: Any) -> tuple[LayerRoute, list[StepData]]:
    """Routers that depend on the input."""
    handle, steps = wrapped(exact_model("llama", **settings), "layerroute", kv_policy=policy)
    assert isinstance(handle, LayerRoute)
    disturb(handle)
    return handle, steps


def routers_of(handle: LayerRoute) -> list[tuple[Tensor, Tensor]]:
    return [(router.weight[0].detach(), router.bias[0].detach()) for router in handle.routers]


def fed(name: str, prompt: list[int], new: int = NEW) -> list[int]:
    return [*prompt, *(continuation(name, k) for k in range(new))]


def prove(handle: LayerRoute, steps: list[StepData]) -> None:
    """Rule 1 in every step."""
    arm = describe(handle, "mine", "layerroute", None)
    assert steps
    for step in steps:
        assert executed_as_decided(step, arm) == []


def whole(handle: LayerRoute, prompts: list[list[int]], names: list[str], new: int) -> list[Tensor]:
    """Logits of all of each sequence after `new` tokens more, in one forward without a cache."""
    inputs = padded([fed(name, prompt, new) for name, prompt in zip(names, prompts, strict=True)], "left")
    handle.tracker.name(names)
    with torch.no_grad():
        out = handle.model(**inputs, use_cache=False)
    handle.tracker.name(None)
    return [logits[mask.bool()] for logits, mask in zip(out.logits, inputs["attention_mask"], strict=True)]


# -- nothing runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("policy", CACHED)
def test_a_ragged_batch_decodes_with_everything_skipped(policy: str, side: str) -> None:
    handle, steps = routed(policy)
    handle.force("closed")
    prompts, model, lengths = prompts_of([7, 1, 4]), exact_model("llama"), [7, 1, 4]
    seen = decode(handle, steps, prompts, side, new=NEW)
    prove(handle, steps)
    for prompt, (name, one) in zip(prompts, seen.items(), strict=True):
        slow = slow_forward(model.state_dict(), model.config, fed(name, prompt), route=[False] * LAYERS)
        assert float((one.logits - slow.logits).abs().max()) < 1e-10
        assert one.decisions == [{(i, "block"): [0] for i in range(LAYERS)}] * (1 + NEW)
    a_token = 2 * 2 * 8 * 8  # keys and values, 2 heads of 8 numbers of 8 bytes
    for new, step in enumerate(steps):
        held = LAYERS * a_token if policy == "project" else 0
        assert step.kv == (held * 3 * (7 + new), held * (sum(lengths) + 3 * new))
        assert not any(key[1:] == ("block", 1) for key in step.counts)


@pytest.mark.parametrize("policy", CACHED)
def test_a_row_that_runs_nothing_beside_rows_that_run_everything(policy: str) -> None:
    handle, steps = routed(policy)
    prompts, model = prompts_of([5, 8, 1, 6]), exact_model("llama")
    runs = {"request-0": True, "request-1": False, "request-2": False, "request-3": True}
    handle._runs = lambda layer, requests, logits: [runs[name] for name in requests]  # type: ignore[method-assign]
    seen = decode(handle, steps, prompts, "left", new=NEW)
    prove(handle, steps)
    for prompt, (name, one) in zip(prompts, seen.items(), strict=True):
        slow = slow_forward(model.state_dict(), model.config, fed(name, prompt), route=[runs[name]] * LAYERS)
        assert float((one.logits - slow.logits).abs().max()) < 1e-10
    for step in steps[1:]:
        assert {step.counts[layer, "block", 1].rows for layer in range(LAYERS)} == {2}


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_with_everything_skipped(policy: str) -> None:
    handle, steps = routed(policy)
    handle.force("closed")
    prompts, model = prompts_of([6, 1, 3]), exact_model("llama")
    inputs = {k: v for k, v in padded(prompts, "left").items() if k != "position_ids"}
    found = handle.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, 6:]
    prove(handle, steps)
    for row, prompt in zip(found, prompts, strict=True):
        wanted = slow_generate(model.state_dict(), model.config, prompt, NEW, route=[False] * LAYERS)
        assert row.tolist() == wanted


# -- one token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", CACHED)
def test_prompts_of_one_token(policy: str, batch: int) -> None:
    handle, steps = routed(policy)
    prompts, model = prompts_of([1] * batch, seed=2), exact_model("llama")
    seen = decode(handle, steps, prompts, "left", new=NEW)
    prove(handle, steps)
    routes = set()
    for prompt, (name, one) in zip(prompts, seen.items(), strict=True):
        ids = fed(name, prompt)
        given = {"routers": routers_of(handle)}
        if policy == "request":
            slow = slow_forward(model.state_dict(), model.config, ids, pooled=1, **given)
            ran = [slow.ran] * (1 + NEW)
        else:
            running_slow = slow_running(model.state_dict(), model.config, ids, 1, **given)
            slow, ran = running_slow, running_slow.ran  # type: ignore[assignment]
        assert float((one.logits - slow.logits).abs().max()) < 1e-9
        assert one.decisions == [{(i, "block"): [int(r)] for i, r in enumerate(of_step)} for of_step in ran]
        routes.add(tuple(ran[0]))
    assert batch == 1 or len(routes) > 1, "all rows were decided alike; the test shows little"


# -- more tokens than positions ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_longer_than_the_model_s_positions(policy: str) -> None:
    """Rotary positions go on past the number in the config, as they do in the bare backbone."""
    handle, steps = routed(policy, max_position_embeddings=8)
    prompts, model = prompts_of([12, 5, 9]), exact_model("llama", max_position_embeddings=8)
    names = [f"request-{i}" for i in range(3)]
    if policy == "recompute":
        found = dict(zip(names, whole(handle, prompts, names, NEW), strict=True))
    else:
        found = {name: one.logits for name, one in decode(handle, steps, prompts, "left", names, NEW).items()}
    prove(handle, steps)
    for name, prompt in zip(names, prompts, strict=True):
        ids, routers = fed(name, prompt), routers_of(handle)
        if policy == "project":
            wanted = slow_running(model.state_dict(), model.config, ids, len(prompt), routers=routers).logits
        else:
            pooled = len(prompt) if policy == "request" else None
            wanted = slow_forward(model.state_dict(), model.config, ids, routers=routers, pooled=pooled).logits
        assert float((found[name] - wanted).abs().max()) < 1e-9


def test_a_model_that_attends_a_window_is_refused_and_not_run_wrong() -> None:
    sliding = random_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=3)
    with pytest.raises(InputError, match=r"only full attention is supported; .* a window of 4 tokens"):
        wrapped(sliding, "layerroute")


# -- gates of NaN ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", ["router", "open"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gate_that_is_not_a_number_names_layer_and_request(policy: str, gates: str) -> None:
    handle, _ = wrapped(exact_model("llama"), "layerroute", kv_policy=policy, gates=gates)
    assert isinstance(handle, LayerRoute)
    with torch.no_grad():
        handle.routers[2].bias.fill_(float("nan"))
    handle.tracker.name(["first", "second"])
    with pytest.raises(InputError, match="layer 2: the router's logit is nan for request 'first'; it must be finite"):
        handle.model(**padded(prompts_of([3, 5]), "left"), use_cache=policy != "recompute")


def test_hidden_states_that_are_not_a_number_are_told_at_the_first_gate() -> None:
    handle, _ = routed("request")
    with torch.no_grad():
        handle.model.get_input_embeddings().weight[7].fill_(float("nan"))
    handle.tracker.name(["fine", "spoilt"])
    with pytest.raises(InputError, match="layer 0: the router's logit is nan for request 'spoilt'"):
        handle.model(input_ids=torch.tensor([[5, 6], [5, 7]]))


# -- checkpoints of another model, named in a spec ---------------------------------------------------


def checkpoint_of(folder: Path, **settings: Any) -> Path:
    handle, _ = wrapped(exact_model("llama", **settings), "layerroute", lora={"rank": 2})
    handle.save(folder, base="another model")
    return folder


def run_with(checkpoint: Path, out: Path) -> None:
    arms = [
        {"name": "dense", "method": "dense"},
        {"name": "routed", "method": "layerroute", "checkpoint": str(checkpoint)},
    ]
    running.run(tiny_spec(arms=arms), out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 4, "hidden_size": 64}, "it was made for 4 layers, this model has 6"),
        ({}, "it was made for a hidden size of 32, this model has 64"),
        ({"hidden_size": 64}, "it was trained on another model; this model has its shape and other weights"),
    ],
)
def test_a_run_refuses_the_checkpoint_of_another_model_before_it_writes(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", **settings)
    with pytest.raises(InputError, match=message):
        run_with(checkpoint, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["method", "layers", "hidden_size", "attention_heads", "base_sample", "format"])
def test_a_key_missing_from_a_checkpoint_s_facts_is_named(tmp_path: Path, key: str) -> None:
    folder = checkpoint_of(tmp_path / "checkpoint")
    facts = json.loads((folder / "config.json").read_text())
    del facts[key]
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=f"checkpoint .*{key}"):
        wrapped(exact_model("llama"), "layerroute", checkpoint=str(folder))
