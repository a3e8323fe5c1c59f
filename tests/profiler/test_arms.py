"""Arms over one copy of the weights: nothing is copied, nothing is shared that wrapping changes."""

from __future__ import annotations

import copy

import pytest
import torch

from profiler import arms, methods
from profiler.errors import InputError
from tests.profiler.tiny import padded, prompts_of, random_model


@pytest.mark.parametrize("shape", ["llama", "llama-tied", "qwen2"])
def test_a_sibling_has_the_very_same_tensors_and_its_own_modules(shape: str) -> None:
    model = random_model(shape)
    other = arms.sibling(model)
    mine, theirs = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(other.named_parameters(remove_duplicate=False)),
    )
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is mine[name] for name in mine)
    buffers, their_buffers = dict(model.named_buffers()), dict(other.named_buffers())
    assert all(their_buffers[name] is buffers[name] for name in buffers)
    assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()}
    assert other.config is not model.config
    tied = model.config.tie_word_embeddings
    assert (other.get_output_embeddings().weight is other.get_input_embeddings().weight) == tied
    assert not other.training


def test_wrapping_one_sibling_leaves_the_others_alone() -> None:
    model = random_model("llama")
    batch = padded(prompts_of([9, 4]), "left")
    before = model(**batch).logits
    keys = set(model.state_dict())
    arm = arms.build(model, "mine", "layerroute", {"gates": {"forced": {"ratio": 0.5}}, "lora": True}, "dense")
    routed = arm.bare.model(**batch).logits
    assert not torch.allclose(routed, before)
    assert torch.equal(model(**batch).logits, before)
    assert set(model.state_dict()) == keys
    dense = arms.build(model, "dense", "dense", {}, None)
    assert torch.equal(dense.bare.model(**batch).logits, before)
    assert torch.equal(dense.recorded.model(**batch).logits, before)


def test_both_trees_of_an_arm_answer_alike_and_only_one_is_watched() -> None:
    model = random_model("llama")
    arm = arms.build(model, "mine", "layerroute", {}, "dense")
    batch = padded(prompts_of([9, 4]), "left")
    assert torch.equal(arm.bare.model(**batch).logits, arm.recorded.model(**batch).logits)
    assert arm.bare.recorder is not arm.recorded.recorder
    assert arm.bare.recorder._handles == []
    assert arm.recorded.recorder._handles != []


@pytest.mark.parametrize("method", ["layerroute", "hero", "mohge", "static_depth", "dense"])
def test_what_a_method_adds_is_held_once_and_watched_in_one_tree_only(method: str) -> None:
    options = {"static_depth": {"layers": [1]}, "layerroute": {"lora": True}}.get(method, {})
    arm = arms.build(random_model("llama"), "mine", method, options, "dense")
    bare, recorded = (dict(handle.model.named_parameters()) for handle in (arm.bare, arm.recorded))
    assert bare.keys() == recorded.keys()
    assert all(recorded[name] is bare[name] for name in bare)
    handles = (arm.bare, arm.recorded)
    assert [handle.model.gatewise is handle for handle in handles] == [True, True]
    assert arm.bare.recorder is not arm.recorded.recorder
    steps: list[object] = []
    arm.recorded.recorder.mode, arm.recorded.recorder.sink = "record", steps.append
    batch = padded(prompts_of([9, 4]), "left")
    with torch.no_grad():
        y = arm.bare.model(**batch).logits
        assert steps == []
        assert torch.equal(arm.recorded.model(**batch).logits, y)
    assert len(steps) == 1


def test_the_record_says_what_the_arm_is() -> None:
    model = random_model("llama")
    record = arms.build(model, "mine", "layerroute", {"gates": {"forced": {"ratio": 0.5, "seed": 3}}}, "dense").record
    assert (record.name, record.method, record.twin, record.scope) == ("mine", "layerroute", "dense", "sequence")
    assert (record.kv_policy, record.untrained) == ("request", False)
    assert record.synthetic == "forced: 50% of layers skip, pattern shared, seed 3"
    assert list(record.signals) == ["logit"]
    # The options in the record build the same arm again.
    again = arms.build(model, "mine", record.method, copy.deepcopy(record.options), "dense").record
    assert again == record
    backbone = sum({(c.layer, c.site): c.backbone_parameters for c in record.choices}.values())
    assert backbone == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("layerrout", {}, "method 'layerrout' is not known; methods here: dense, .*layerroute"),
        ("no.such.module", {}, "method 'no.such.module' cannot be loaded: No module named"),
        ("layerroute", {"kv_polcy": "request"}, r"arms\.mine\.kv_polcy: .*did you mean 'kv_policy'\?"),
        (
            "layerroute",
            {"gates": {"forced": {"ratio": 2}}},
            r"arms\.mine\.gates\.forced\.ratio: .*less than or equal to 1",
        ),
        ("dense", {"ratio": 1}, r"arms\.mine\.ratio: .*it knows none"),
    ],
)
def test_a_wrong_arm_is_a_sentence(method: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        arms.build(random_model("llama"), "mine", method, options, "dense")
    assert "dense" in methods.names()
