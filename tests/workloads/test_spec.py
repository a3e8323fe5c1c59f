"""The shape of a spec: cells, twins, hash and round trip."""

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from workloads.documents import parse_yaml
from workloads.spec import Cell, Spec


def minimal(**changes: Any) -> dict[str, Any]:
    return {
        "name": "s",
        "model": {"source": "tiny"},
        "arms": [{"name": "dense", "method": "dense"}],
        "cells": {"prefill": {"batch": [1], "length": [8]}},
        **changes,
    }


def spec(**changes: Any) -> Spec:
    return Spec.model_validate(minimal(**changes))


def test_cells_are_prefill_then_decode_and_of_each_length_every_batch() -> None:
    cells = spec(
        cells={
            "prefill": {"batch": [1, 8], "length": [512, 128]},
            "decode": {"batch": [8], "context": [256], "new_tokens": 32},
        }
    ).cell_list()
    assert [cell.name for cell in cells] == [
        "prefill-b1-l512",
        "prefill-b8-l512",
        "prefill-b1-l128",
        "prefill-b8-l128",
        "decode-b8-c256-n32",
    ]
    assert cells[-1] == Cell(phase="decode", batch=8, length=256, new_tokens=32)
    assert cells[0].new_tokens == 0


def test_keys_of_an_arm_beyond_its_own_are_the_methods_options() -> None:
    arm = spec(
        arms=[{"name": "d", "method": "dense"}, {"name": "r", "method": "m", "gates": {"forced": {"ratio": 0.5}}}]
    )
    assert arm.arms[1].options == {"gates": {"forced": {"ratio": 0.5}}}
    assert arm.arms[0].options == {}


def test_the_default_twin_is_the_first_dense_arm() -> None:
    arms = [
        {"name": "r", "method": "layerroute"},
        {"name": "d1", "method": "dense"},
        {"name": "d2", "method": "dense"},
        {"name": "s", "method": "my.own.method"},
        {"name": "t", "method": "layerroute", "twin": "r"},
        {"name": "d3", "method": "dense", "twin": "d1"},
    ]
    assert [arm.twin for arm in spec(arms=arms).arms] == ["d1", None, None, "d1", "r", "d1"]


def test_defaults() -> None:
    made = spec()
    assert made.model.dtype == "float32"
    assert (made.prompts.source, made.prompts.domains, made.prompts.count) == ("builtin", None, None)
    assert (made.measure.min_repeats, made.measure.max_repeats, made.measure.threads) == (3, 40, None)
    assert made.trace is None
    assert made.quality is None
    assert made.privacy.keep_text


def test_the_default_of_min_repeats_never_contradicts_max_repeats() -> None:
    assert spec(measure={"max_repeats": 2}).measure.min_repeats == 2
    assert spec(measure={"max_repeats": 9}).measure.min_repeats == 3


def test_the_largest_cell_that_is_allowed() -> None:
    assert spec(cells={"prefill": {"batch": [8], "length": [131_072]}}).cell_list()[0].length == 131_072
    with pytest.raises(ValidationError, match="9 × 131,072 is 1,179,648"):
        spec(cells={"prefill": {"batch": [9], "length": [131_072]}})
    assert spec(cells={"decode": {"batch": [4096], "context": [255], "new_tokens": 1}})
    with pytest.raises(ValidationError, match=r"4,096 × \(255 \+ 2\) is 1,052,672"):
        spec(cells={"decode": {"batch": [4096], "context": [255], "new_tokens": 2}})


def test_the_number_of_cells_is_bounded() -> None:
    sixteen = list(range(1, 17))
    assert len(spec(cells={"prefill": {"batch": sixteen, "length": sixteen}}).cell_list()) == 256
    with pytest.raises(ValidationError, match="at most 256 cells, and these are 272"):
        spec(cells={"prefill": {"batch": sixteen, "length": [*sixteen, 17]}})


def test_a_spec_cannot_change_after_it_was_hashed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().measure.budget_s = 5.0  # type: ignore[misc]


def test_the_hash_is_of_the_canonical_json_of_the_resolved_spec() -> None:
    canonical = (
        '{"arms":[{"method":"dense","name":"dense","twin":null}],'
        '"cells":{"decode":null,"prefill":{"batch":[1],"length":[8]}},'
        '"measure":{"budget_s":120.0,"max_repeats":40,"min_repeats":3,"seed":0,"target_ci":0.02,"threads":null,'
        '"warmup":3},"model":{"device":"auto","dtype":"float32","seed":0,"source":"tiny"},"name":"s",'
        '"privacy":{"keep_text":true},"prompts":{"count":null,"domains":null,"seed":0,"source":"builtin"},'
        '"quality":null,"trace":null}'
    )
    assert spec().sha256() == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_hash_does_not_depend_on_how_a_spec_is_written() -> None:
    assert spec(measure={"budget_s": 120, "seed": 0}).sha256() == spec().sha256()
    assert spec(name="t").sha256() != spec().sha256()
    routed = [{"name": "dense", "method": "dense"}, {"name": "r", "method": "m", "a": 1, "b": 2}]
    other = [{"method": "dense", "name": "dense"}, {"b": 2, "twin": "dense", "a": 1, "method": "m", "name": "r"}]
    assert spec(arms=routed).sha256() == spec(arms=other).sha256()
    assert spec(arms=routed).sha256() != spec(arms=routed[::-1]).sha256()


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(TEXT.filter(lambda key: key not in ("name", "method", "twin", "options")), VALUES, max_size=3)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True)
PREFILL = st.fixed_dictionaries({"batch": SIZES, "length": SIZES})
DECODE = st.fixed_dictionaries({"batch": SIZES, "context": SIZES, "new_tokens": st.integers(1, 99)})


@st.composite
def arms(draw: st.DrawFn) -> list[dict[str, Any]]:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold))
    made: list[dict[str, Any]] = [{"name": names[0], "method": "dense"}]
    for name in names[1:]:
        method = draw(st.sampled_from(["dense", "layerroute", "my_package.own"]))
        twin = {"twin": draw(st.sampled_from([n for n in names if n != name]))} if draw(st.booleans()) else {}
        made.append({"name": name, "method": method, **twin, **draw(OPTIONS)})
    return draw(st.permutations(made))


SPECS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "model": st.fixed_dictionaries(
            {"source": TEXT.filter(bool)},
            optional={
                "dtype": st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
                "device": st.sampled_from(["auto", "cpu", "cuda"]),
                "seed": SEEDS,
            },
        ),
        "arms": arms(),
        "cells": st.builds(lambda p, d: {"prefill": p, "decode": d}, PREFILL, st.none() | DECODE)
        | st.builds(lambda d: {"decode": d}, DECODE),
    },
    optional={
        "prompts": st.fixed_dictionaries(
            {},
            optional={
                "source": TEXT.filter(bool),
                "domains": st.none() | st.lists(TEXT.filter(bool), min_size=1, max_size=4, unique=True),
                "count": st.none() | st.integers(1, 1000),
                "seed": SEEDS,
            },
        ),
        "measure": st.fixed_dictionaries(
            {},
            optional={
                "warmup": st.integers(0, 1000),
                "max_repeats": st.integers(1, 10_000),
                "target_ci": st.floats(1e-9, 1),
                "budget_s": st.floats(1e-3, 86_400) | st.integers(1, 86_400),
                "threads": st.none() | st.integers(1, 1024),
            },
        ),
        "quality": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "source": TEXT.filter(bool),
                "count": st.integers(1, 1000),
                "modes": st.permutations(["prefix", "whole"]),
            },
        ),
        "trace": st.none() | st.fixed_dictionaries({}, optional={"steps": st.integers(1, 100), "keep": st.booleans()}),
        "privacy": st.fixed_dictionaries({"keep_text": st.booleans()}),
    },
)


@settings(deadline=None, max_examples=60)
@given(SPECS)
def test_a_spec_written_as_yaml_reads_back_equal(data: dict[str, Any]) -> None:
    made = Spec.model_validate(data)
    again = Spec.model_validate(parse_yaml(made.to_yaml(), "f"))
    assert again == made
    assert again.sha256() == made.sha256()
    assert again.to_yaml() == made.to_yaml()
    assert again.cell_list() == made.cell_list()
    assert [arm.options for arm in again.arms] == [
        {k: v for k, v in arm.items() if k not in ("name", "method", "twin")} for arm in data["arms"]
    ]
