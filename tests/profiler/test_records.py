"""Schemas and the manifest: what every table must have, and what a later version may add."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from profiler.records import (
    FORMAT,
    TABLES,
    ArmRecord,
    CellRecord,
    Choice,
    Manifest,
    RuleRecord,
    signals_schema,
    signals_table,
)


def manifest() -> Manifest:
    return Manifest(
        name="n",
        created_utc="2026-01-01T00:00:00+00:00",
        pid=1,
        host="h",
        arms=[ArmRecord(name="a", method="dense"), ArmRecord(name="b", method="layerroute", twin="a")],
        cells=[CellRecord(name="c", phase="prefill", batch=1, length=8)],
        rules=[RuleRecord(rule=1, name="r", passed=True, detail="", figures={"x": math.nan, "y": math.inf, "z": 1.5})],
    )


def test_tables_of_a_step_share_the_key_that_joins_them() -> None:
    for name in ("gates", "rows", "segments", "kv", "kernels"):
        schema = TABLES[name]
        assert [(f.name, f.type) for f in schema][:3] == [
            ("arm", pa.string()),
            ("step", pa.int64()),
            ("rank", pa.int32()),
        ]
        assert "cell" in schema.names
    signals = signals_schema(["logit"])
    assert set(signals.names) - {"logit"} <= set(TABLES["gates"].names)
    assert signals.field("logit").type == pa.float32()
    assert signals_table("layerroute") == "signals-layerroute"


def test_times_are_whole_nanoseconds_and_sizes_whole_bytes() -> None:
    for schema in TABLES.values():
        for field in schema:
            if field.name == "ns" or field.name.endswith(("_ns", "bytes")):
                assert field.type == pa.int64(), field.name


def test_a_manifest_reads_back_as_it_was_and_keeps_what_a_later_version_added() -> None:
    text = manifest().model_dump_json().replace('"name":"n"', '"name":"n","mood":"fine"', 1)
    read = Manifest.model_validate_json(text)
    assert read.format == FORMAT
    assert read.model_dump(mode="json")["mood"] == "fine"
    assert read.arm("b").twin == "a"
    assert read.cell("c").length == 8
    with pytest.raises(KeyError):
        read.arm("nobody")


def test_a_figure_that_is_not_finite_is_null_in_the_file() -> None:
    read = Manifest.model_validate_json(manifest().model_dump_json())
    assert read.rules[0].figures == {"x": None, "y": None, "z": 1.5}


def test_a_choice_costs_nothing_unless_it_says_so() -> None:
    skip = Choice(layer=0, site="block", index=0, name="skip").model_dump()
    assert {name: value for name, value in skip.items() if isinstance(value, int) and value} == {}


def test_reading_needs_no_torch() -> None:
    script = "import profiler.records, profiler.store, profiler.intervals, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "False"
