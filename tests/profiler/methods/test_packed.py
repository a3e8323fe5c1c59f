"""Every method under transformers' continuous-batching engine: packed rows, a paged cache, a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from profiler import methods
from profiler.arms import describe
from profiler.execution import gates
from profiler.execution.routes import ForcedGates
from profiler.recorder import StepData
from profiler.stepdata import executed_as_decided
from tests.profiler.engine import engine, serve
from tests.profiler.routed_arms import PROJECTING, Arm, arms
from tests.profiler.slow_decoder import slow_forward, slow_generate
from tests.profiler.tiny import exact_model, padded, prompts_of, pruned

#: Ragged prompts that end at different times, so that later prompts are packed with requests that decode.
REQUESTS = {
    f"q{i}": (prompt, new)
    for i, (prompt, new) in enumerate(zip(prompts_of([5, 11, 1, 9, 6]), [6, 2, 9, 4, 7], strict=True))
}
AT_ONCE = {"max_requests_per_batch": 3}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL"):
        yield


def alone(handle: methods.Method, name: str, prompt: list[int], new: int) -> list[int]:
    """The same request by `generate`, in a batch of one."""
    handle.tracker.name([name])
    ids = torch.tensor([prompt])
    found = handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    handle.tracker.name(None)
    return found[0, len(prompt) :].tolist()


def errors(found: dict) -> set[str]:
    return {str(result.error) for result in found.values()}


@pytest.mark.parametrize("arm", [*arms(), *PROJECTING], ids=str)
def test_packed_requests_get_the_tokens_they_get_alone(arm: Arm) -> None:
    handle, steps = arm.wrap()
    found = serve(handle.model, REQUESTS, **AT_ONCE)
    packed = list(steps)
    assert errors(found) == {"None"}
    for name, (prompt, new) in REQUESTS.items():
        assert found[name].generated_tokens == alone(handle, name, prompt, new)
    assert {"prefill", "mixed", "decode"} == {step.phase for step in packed}
    record = describe(handle, "arm", arm.method, None)
    for step in packed:
        assert executed_as_decided(step, record) == []
    entered: dict[str, int] = dict.fromkeys(REQUESTS, 0)
    for step in packed:
        for request, rows in zip(step.sequences.requests, step.sequences.rows_S, strict=True):
            entered[request] += rows
    # The last token is said and never fed back.
    assert entered == {name: len(prompt) + new - 1 for name, (prompt, new) in REQUESTS.items()}


def test_bytes_of_the_paged_cache_are_its_pages_and_what_the_requests_need_of_them() -> None:
    """Two requests of 5 and 9 tokens and pages of 4: two pages for the first, three for the second, of every layer."""
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    config = handle.model.config
    a_token = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 8  # float64
    (short, long) = prompts_of([5, 9])
    serve(handle.model, {"short": (short, 2), "long": (long, 2)})
    first, second = steps[:2]
    assert first.sequences.rows_S == [5, 9]
    runs = [[], []]
    for decision in first.decisions:
        for i, choice in enumerate(decision.choice):
            runs[i] += [decision.layer] * int(choice)
    assert len(runs[0]) < config.num_hidden_layers  # so that live and allocated differ by more than ends of pages
    assert first.kv == (
        (2 + 3) * 4 * a_token * config.num_hidden_layers,
        (5 * len(runs[0]) + 9 * len(runs[1])) * a_token,
    )
    assert second.kv is not None
    assert second.kv[1] == (6 * len(runs[0]) + 10 * len(runs[1])) * a_token


@pytest.mark.parametrize("shape", ["llama-tied", "qwen2-untied"])
def test_packed_routing_equals_the_slow_reference(shape: str) -> None:
    arm = Arm("layerroute", {}, disturbed=True)
    handle, steps = arm.wrap(shape)
    model = exact_model(shape)
    routers = [(router.weight[0], router.bias[0]) for router in handle.routers]
    found = serve(handle.model, REQUESTS, **AT_ONCE)
    ran = {}
    for name, (prompt, new) in REQUESTS.items():
        with torch.no_grad():
            assert found[name].generated_tokens == slow_generate(
                model.state_dict(), model.config, prompt, new, routers=routers
            )
            ran[name] = slow_forward(model.state_dict(), model.config, prompt, routers=routers).ran
    assert len(set(map(tuple, ran.values()))) > 1
    for step in steps:
        for decision in step.decisions:
            for request, choice in zip(step.sequences.requests, decision.choice.tolist(), strict=True):
                assert bool(choice) == ran[request][decision.layer]


def test_block_0_skipped_by_some_and_by_all() -> None:
    for pattern, ratio in (("random", 0.5), ("shared", 1.0)):
        handle, steps = Arm("layerroute", {}).wrap()
        handle.force(ForcedGates(ratio=ratio, pattern=pattern, seed=4))
        found = serve(handle.model, REQUESTS, **AT_ONCE)
        first = [step.decisions[0].choice for step in steps]
        assert any(not choice.all() for choice in first)
        assert ratio < 1 or not any(choice.any() for choice in first)
        for name, (prompt, new) in REQUESTS.items():
            route = ForcedGates(ratio=ratio, pattern=pattern, seed=4).open_layers(6, name)
            ids = torch.tensor([prompt])
            shorter = pruned(exact_model("llama"), route)
            out = shorter.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
            assert found[name].generated_tokens == out[0, len(prompt) :].tolist()


def test_a_request_evicted_and_filled_again_keeps_its_gates() -> None:
    """Too few pages for all: the engine drops a request's keys and prefills prompt and answer again, in one go."""
    requests = {f"q{i}": (prompt, 12) for i, prompt in enumerate(prompts_of([8, 7, 6]))}
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    found = serve(handle.model, requests, num_blocks=11)
    assert errors(found) == {"None"}
    again = [
        (request, rows)
        for step in steps
        for request, rows, past in zip(
            step.sequences.requests, step.sequences.rows_S, step.sequences.past_S, strict=True
        )
        if not past and rows > len(requests[request][0])
    ]
    assert again, "no request was evicted; the test shows nothing"
    decisions: dict[tuple[str, int], set[int]] = {}
    for step in steps:
        for decision in step.decisions:
            for request, choice in zip(step.sequences.requests, decision.choice.tolist(), strict=True):
                decisions.setdefault((request, decision.layer), set()).add(choice)
    assert all(len(choices) == 1 for choices in decisions.values())
    for name, (prompt, new) in requests.items():
        assert found[name].generated_tokens == alone(handle, name, prompt, new)


def test_the_prompt_is_what_was_decided_on_not_the_id() -> None:
    """A second engine numbers its requests from the start again, and a caller of the same one may use an id twice."""
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    prompts = prompts_of([9, 9, 9], seed=5)
    for prompt in prompts[:2]:
        found = serve(handle.model, {"again": (prompt, 5)})
        assert found["again"].generated_tokens == alone(handle, "again", prompt, 5)
    manager = engine(handle.model)
    manager.start()
    answers = []
    for prompt in prompts:
        manager.add_request(prompt, request_id="again", max_new_tokens=5)
        answers.append(manager.get_result(timeout=20).generated_tokens)
    manager.stop(block=True)
    assert answers == [alone(handle, "again", prompt, 5) for prompt in prompts]
    decided = {tuple(tuple(d.choice) for d in step.decisions) for step in steps}
    assert len(decided) > 1, "all prompts decided alike; the test shows nothing"


def test_a_route_forced_between_two_requests_is_the_second_one_s() -> None:
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    manager = engine(handle.model)
    manager.start()
    for route in (None, "closed", None):
        handle.force(route)
        manager.add_request([5, 6, 7], request_id="again", max_new_tokens=1)
        assert manager.get_result(timeout=20).error is None
    manager.stop(block=True)
    decided = [[int(d.choice[0]) for d in step.decisions] for step in steps]
    assert decided[0] == decided[2] != decided[1] == [0] * 6


def test_what_is_held_for_finished_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "REQUESTS_KEPT", 4)
    handle, _ = Arm("layerroute", {}).wrap()
    requests = {f"q{i}": ([i + 1, i + 2], 3) for i in range(12)}
    found = serve(handle.model, requests, max_requests_per_batch=2)
    assert errors(found) == {"None"}
    assert len(handle._requests) == 4
    handle.release("q11")
    handle.release("never seen")
    assert len(handle._requests) == 3


def test_a_prompt_the_engine_splits_is_refused_at_its_first_piece() -> None:
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    found = serve(handle.model, {"long": (prompts_of([20])[0], 3)}, max_batch_tokens=16)
    assert "request 'long' came with 16 of its prompt's tokens" in found["long"].error
    assert "max_batch_tokens" in found["long"].error
    assert found["long"].generated_tokens == []
    assert steps == []


def test_a_prompt_split_for_want_of_room_beside_others_is_refused() -> None:
    handle, _ = Arm("layerroute", {}, disturbed=True).wrap()
    requests = {"a": (prompts_of([10])[0], 3), "b": (prompts_of([10])[0], 3)}
    (message,) = errors(serve(handle.model, requests, max_batch_tokens=16))
    assert "request 'b' came with 6 of its prompt's tokens" in message


def test_a_budget_of_one_row_is_refused() -> None:
    handle, _ = Arm("layerroute", {}, disturbed=True).wrap()
    (message,) = errors(serve(handle.model, {"a": ([5, 6, 7], 2)}, max_batch_tokens=1))
    assert "split its prompt" in message


def test_keys_shared_between_requests_are_refused() -> None:
    handle, _ = Arm("layerroute", {}, disturbed=True).wrap()
    prompt = prompts_of([12])[0]
    requests = {"a": ([*prompt, 1], 4), "b": ([*prompt, 2], 4)}
    found = serve(handle.model, requests, allow_block_sharing=True, max_requests_per_batch=1)
    assert found["a"].error is None
    assert "'b' has 12 tokens in the cache that no gates are known for" in found["b"].error
    assert "allow_block_sharing" in found["b"].error


@pytest.mark.parametrize("length", [2, 7])
def test_answers_forked_from_one_prompt_are_refused(length: int) -> None:
    handle, _ = Arm("layerroute", {}, disturbed=True).wrap()
    found = serve(handle.model, {"a": (prompts_of([length])[0], 4)}, answers=2)
    assert "a" in found
    assert all("num_return_sequences to 1" in message for message in errors(found))


def test_a_broken_router_fails_its_requests_by_name() -> None:
    handle, _ = Arm("layerroute", {}).wrap()
    with torch.no_grad():
        handle.routers[3].weight.fill_(float("nan"))
    (message,) = errors(serve(handle.model, {"a": ([5, 6, 7], 2)}))
    assert message == "layer 3: the router's logit is nan for request 'a'; it must be finite"


def test_padded_forwards_work_again_after_serving() -> None:
    handle, steps = Arm("layerroute", {}, disturbed=True).wrap()
    inputs = padded(prompts_of([5, 3]), "left")
    with torch.no_grad():
        before = handle.model(**inputs).logits
        serve(handle.model, REQUESTS)
        assert torch.equal(handle.model(**inputs).logits, before)
    assert isinstance(steps[-1], StepData)
    assert not steps[-1].sequences.packed
