"""What every method must keep, over all of `names()`: a new file is tested before it has tests of its own.

In float64 with float64 norms, where what must be equal is equal to rounding. Batches are the cases that break
routing: ragged prompts padded on either side, one-token prompts, a row of pads, rows that skip beside rows that run,
all rows skipping.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from profiler import methods
from profiler.arms import describe, sibling
from profiler.recorder import Recorder, StepData
from profiler.records import ArmRecord, Choice
from profiler.stepdata import executed_as_decided
from tests.profiler.routed_arms import NEW_TOKENS, PROJECTING, Arm, arms, decode, exact, shapes_of
from tests.profiler.tiny import padded, prompts_of, wrapped

TOLERANCE = 1e-12

#: Prompt lengths (0: a row of pads) and the padded side.
BATCHES = {
    "alone": ([7], "left"),
    "same length": ([5, 5, 5], "left"),
    "mixed, left": ([9, 4, 1, 6], "left"),
    "mixed, right": ([9, 4, 1, 6], "right"),
    "one token": ([1, 1, 1], "left"),
    "a row of pads, left": ([5, 0, 3], "left"),
    "a row of pads, right": ([5, 0, 3], "right"),
}


@pytest.mark.parametrize("name", methods.names())
def test_every_option_is_described_with_its_default(name: str) -> None:
    text = methods.description(name)
    assert text.startswith(methods.summaries()[name])
    options = methods.load(name).Config.model_fields
    for option in options:
        assert text.count(option) >= 2, f"{option} has no word said of it"
        assert f"\n    {option}: " in text
    assert ("It has no options." in text) == (not options)


def test_a_choice_among_few_is_listed() -> None:
    assert 'strategy: "packed"   one of sequential, per_width, padded, packed' in methods.description("mohge")


@pytest.fixture(params=[*arms(), *PROJECTING], ids=str)
def arm(request: pytest.FixtureRequest) -> Arm:
    return request.param


#: Every method on every shape of model it works on.
METHODS_ON_SHAPES = [(method, shape) for method in methods.names() for shape in shapes_of(method)]


@pytest.fixture(
    params=[(a, shape) for a in [*arms(), *PROJECTING] for shape in shapes_of(a.method)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def arm_and_shape(request: pytest.FixtureRequest) -> tuple[Arm, str]:
    return request.param


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest) -> tuple[list[list[int]], str]:
    lengths, side = BATCHES[request.param]
    return prompts_of(lengths), side


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max())


# -- numbers -----------------------------------------------------------------------------------------


def twin_of(handle: methods.Method, shape: str | None = None) -> tuple[methods.Method, list[StepData], bool]:
    """The numeric twin, its steps, and whether it is the bare model, so that what is equal is so to the last digit.

    Where a decision takes several choices, open has products of other numbers of rows than the twin's.
    """
    twin, steps = Arm(handle.numeric_twin, {}).wrap(shape)
    before = dict(twin.model.named_parameters())
    handle.adapt_twin(twin.model)
    after = dict(twin.model.named_parameters())
    unchanged = before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    return twin, steps, unchanged and not handle.takes_several


def same(a: Tensor, b: Tensor, exactly: bool) -> bool:
    return torch.equal(a, b) if exactly else close(a, b)


@pytest.mark.parametrize(("method", "shape"), METHODS_ON_SHAPES)
def test_forced_open_equals_the_numeric_twin(method: str, shape: str, batch: tuple[list[list[int]], str]) -> None:
    opened, mine = Arm(method, {}, disturbed=True).wrap(shape)
    opened.force("open")
    twin, theirs, bare = twin_of(opened, shape)
    seen, wanted = decode(opened, mine, *batch), decode(twin, theirs, *batch)
    for name in wanted:
        assert same(seen[name].logits, wanted[name].logits, bare)


def test_evaluation_is_deterministic(arm: Arm, batch: tuple[list[list[int]], str]) -> None:
    handle, steps = arm.wrap()
    first, again = decode(handle, steps, *batch), decode(handle, steps, *batch)
    for name in first:
        assert torch.equal(first[name].logits, again[name].logits)
        assert first[name].decisions == again[name].decisions


def test_company_and_order_change_nothing(arm: Arm, batch: tuple[list[list[int]], str]) -> None:
    handle, steps = arm.wrap()
    prompts, side = batch
    names = [f"request-{i}" for i in range(len(prompts))]
    together = decode(handle, steps, prompts, side)
    turned = decode(handle, steps, prompts[::-1], side, names[::-1])
    other_side = decode(handle, steps, prompts, "right" if side == "left" else "left")
    for prompt, name in zip(prompts, names, strict=True):
        if not prompt:
            continue  # its first token attends to nothing, and what attention makes of that is not defined
        alone = decode(handle, steps, [prompt], side, [name])
        for seen in (alone, turned, other_side):
            assert seen[name].decisions == together[name].decisions
            assert close(seen[name].logits, together[name].logits)


def test_the_batch_is_as_finite_as_it_would_be_without_its_row_of_pads(arm: Arm) -> None:
    handle, steps = arm.wrap()
    seen = decode(handle, steps, prompts_of([5, 0, 3]), "left")
    assert all(torch.isfinite(one.logits).all() for one in seen.values())


# -- rule 1 ------------------------------------------------------------------------------------------


def recorded(handle: methods.Method, method: str) -> ArmRecord:
    return describe(handle, "arm", method, None)


def test_rows_executed_equal_decisions_recorded(arm: Arm, batch: tuple[list[list[int]], str]) -> None:
    handle, steps = arm.wrap()
    prompts, side = batch
    decode(handle, steps, prompts, side)
    with torch.no_grad():
        handle.model(**padded(prompts, side), use_cache=False)
    record = recorded(handle, arm.method)
    assert len(steps) == 1 + NEW_TOKENS + 1
    for step in steps:
        assert executed_as_decided(step, record) == []
    assert [step.sequences.view.rows for step in steps[:2]] == [sum(map(len, prompts)), len(prompts)]


def test_every_decision_site_has_a_decision_for_every_sequence_or_row(arm: Arm) -> None:
    handle, steps = arm.wrap()
    decode(handle, steps, prompts_of([9, 4, 1, 6]), "left")
    record = recorded(handle, arm.method)
    sites = {(c.layer, c.site) for c in record.choices if c.index > 0}
    for step in steps:
        assert {(d.layer, d.site) for d in step.decisions} == sites
        assert len(step.decisions) == len(sites)
        sizes = {len(step.sequences), len(step.sequences) * step.sequences.width}
        assert {len(d.choice) for d in step.decisions} <= sizes
        assert all(set(d.signals) == set(record.signals) for d in step.decisions)


# -- costs -------------------------------------------------------------------------------------------


def test_costs_are_what_a_forward_was_counted_to_do(arm_and_shape: tuple[Arm, str]) -> None:
    arm, shape = arm_and_shape
    handle, steps = arm.wrap(shape)
    handle.model.set_attn_implementation("eager")  # the counter sees nothing of CPU sdpa
    costs = {(c.layer, c.site, c.index): c for c in recorded(handle, arm.method).choices}
    ids = torch.tensor(prompts_of([7, 7, 7]))
    with torch.no_grad():
        counters = [FlopCounterMode(display=False) for _ in range(2)]
        with counters[0]:
            out = handle.model(input_ids=ids, use_cache=True)
        with counters[1]:
            handle.model(input_ids=ids[:, :1], cache=out.cache, use_cache=True)
    for counter, step in zip(counters, steps, strict=True):
        expected = sum(
            count.rows * costs[key].flops_per_row + count.context_full * costs[key].flops_per_context
            for key, count in step.counts.items()
        )
        assert counter.get_total_flops() == expected > 0


@pytest.mark.parametrize(("method", "shape"), METHODS_ON_SHAPES)
def test_parameters_over_sites_add_up_to_theexact(method: str, shape: str) -> None:
    model = exact(shape)
    choices = methods.load(method).choices(model, methods.configure(method, {}))
    assert sum(largest_backbone(choices).values()) == sum(p.numel() for p in set(model.parameters()))
    handle, _ = wrapped(model, method)
    assert handle.choices(handle.model, handle.config) == choices  # wrapping adds nothing to the backbone


def largest_backbone(choices: list[Choice]) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = defaultdict(int)
    for choice in choices:
        place = (choice.layer, choice.site)
        found[place] = max(found[place], choice.backbone_parameters)
    return found


@pytest.mark.parametrize("method", methods.names())
def test_choices_are_numbered_from_zero_and_what_costs_something_is_counted(method: str) -> None:
    handle, steps = Arm(method, {}).wrap()
    choices = handle.choices(handle.model, handle.config)
    by_place: dict[tuple[int, str], list[int]] = defaultdict(list)
    for choice in choices:
        by_place[choice.layer, choice.site].append(choice.index)
    assert all(indices == list(range(len(indices))) for indices in by_place.values())
    probed = {(probe.layer, probe.site, probe.choice) for probe in handle.probes()}
    costly = {(c.layer, c.site, c.index) for c in choices if c.flops_per_row or c.flops_per_context}
    # A choice without a module of its own is counted where its rows are known, in a step that takes it.
    counted = set()
    for how in (None, "open"):
        handle.force(how)
        decode(handle, steps, prompts_of([200, 200]), "left")
        counted |= set(steps[0].counts)
    assert probed <= costly
    assert costly - probed <= counted <= costly
    decided = {site for (_, site), indices in by_place.items() if len(indices) > 1}
    assert decided == set(handle.sites)


# -- one tree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods.names())
def test_what_is_saved_comes_back(method: str, tmp_path: Path) -> None:
    handle, steps = Arm(method, {}, disturbed=True).wrap()
    handle.save(tmp_path / "checkpoint")
    other, others = Arm(method, {}).wrap()
    other.restore(tmp_path / "checkpoint")
    batch = prompts_of([9, 4, 1, 6]), "left"
    before, after = decode(handle, steps, *batch), decode(other, others, *batch)
    for name in before:
        assert torch.equal(before[name].logits, after[name].logits)
        assert before[name].decisions == after[name].decisions
    assert not other.untrained


def test_trees_over_one_backbone_do_not_touch_each_other(arm: Arm) -> None:
    backbone = copy.deepcopy(exact(shapes_of(arm.method)[0]))
    ids = torch.tensor(prompts_of([6]))
    with torch.no_grad():
        before = backbone(input_ids=ids).logits
        config = methods.configure(arm.method, arm.options)
        handles = [methods.load(arm.method).wrap(sibling(backbone), config, Recorder()) for _ in range(2)]
        first = handles[0].model(input_ids=ids).logits
        handles[1].force("open")
        twin, _, bare = twin_of(handles[1])
        assert torch.equal(handles[0].model(input_ids=ids).logits, first)
        assert same(handles[1].model(input_ids=ids).logits, twin.model(input_ids=ids).logits, bare)
        assert torch.equal(backbone(input_ids=ids).logits, before)
    weights = list(backbone.model.layers[0].mlp.parameters())
    for handle in handles:
        theirs = handle.model.model.layers[0].mlp.parameters()
        assert all(one is other for one, other in zip(theirs, weights, strict=True))


def test_a_deep_copy_routes_on_its_own(arm: Arm) -> None:
    handle, _ = arm.wrap()
    handle.recorder.detach()
    copied = copy.deepcopy(handle.model)
    other = methods.handle_of(copied)
    assert other is not None
    assert other is not handle
    other.force("open")
    ids = torch.tensor(prompts_of([6]))
    with torch.no_grad():
        twin, _, bare = twin_of(other)
        first = handle.model(input_ids=ids).logits
        assert same(copied(input_ids=ids).logits, twin.model(input_ids=ids).logits, bare)
        assert torch.equal(handle.model(input_ids=ids).logits, first)


def test_hidden_states_come_out_as_from_the_bareexact(arm: Arm) -> None:
    handle, _ = arm.wrap()
    with torch.no_grad():
        out = handle.model(input_ids=torch.tensor(prompts_of([6])), output_hidden_states=True)
    assert len(out.hidden_states) == 7


@pytest.mark.parametrize("method", methods.names())
def test_a_tree_is_wrapped_once(method: str) -> None:
    handle, _ = Arm(method, {}).wrap()
    hooks = len(handle.decoder.base._forward_pre_hooks)
    with pytest.raises(methods.InputError, match=f"wrapped already, by {type(handle).__name__}"):
        methods.load(method).wrap(handle.model, methods.configure(method, {}), Recorder())
    assert len(handle.decoder.base._forward_pre_hooks) == hooks
    assert methods.handle_of(handle.model) is handle


def test_gradients_of_the_caller_do_not_reach_the_record(arm: Arm) -> None:
    handle, steps = arm.wrap()
    out = handle.model(input_ids=torch.tensor(prompts_of([6, 6])), use_cache=True)
    handle.model(input_ids=torch.tensor([[3], [4]]), cache=out.cache)
    assert len(steps) == 2


# -- generating --------------------------------------------------------------------------------------


def test_generate_equals_stepping_by_hand(arm: Arm) -> None:
    handle, _ = arm.wrap()
    prompts = prompts_of([9, 4, 1, 6])
    inputs = padded(prompts, "left")
    with torch.no_grad():
        whole = handle.model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, do_sample=False
        )[:, 9:]
        out = handle.model(**inputs, use_cache=True)
        mask, position, tokens = inputs["attention_mask"], inputs["position_ids"][:, -1:], []
        for _ in range(6):
            tokens.append(out.logits[:, -1:].argmax(-1))
            mask, position = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), position + 1
            out = handle.model(
                input_ids=tokens[-1], attention_mask=mask, position_ids=position, cache=out.cache, use_cache=True
            )
    assert torch.equal(whole, torch.cat(tokens, dim=1))
