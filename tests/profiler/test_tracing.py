"""A real module traced on the CPU: rows, torch's own accounting of the same trace, and TensorBoard's loader."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from profiler.errors import InputError, StoreError
from profiler.kineto import Event, read_trace
from profiler.tracing import Tracer

STEPS = {5: "dense", 6: "routed"}
LAYERS = 2


class Block(torch.nn.Module):
    """Attention-like and FFN-like work inside the recorder's ranges."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        with record_function(f"gatewise/attention/{self.layer}"):
            x_BTD = torch.bmm(torch.bmm(x_BTD, x_BTD.mT).softmax(-1), x_BTD)
        with record_function(f"gatewise/ffn/{self.layer}"):
            hidden = self.up(x_BTD)
            with record_function(f"gatewise/norm/{self.layer}"):
                hidden = torch.nn.functional.layer_norm(hidden, (256,))
            return self.down(hidden)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Tracer:
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block(layer) for layer in range(LAYERS)))
    x_BTD = torch.randn(2, 64, 64)
    with torch.inference_mode():
        blocks(x_BTD)
        with Tracer(tmp_path_factory.mktemp("run"), "prefill b2/l64", rank=3) as tracer:
            x_BTD.neg()
            for step, arm in STEPS.items():
                with record_function(f"gatewise.step/{step}/{arm}"):
                    y_BTD = blocks(x_BTD)
                    with record_function("gatewise/head/-1"):
                        y_BTD.argmax(-1)
                    y_BTD.exp()
    return tracer


def table(tracer: Tracer) -> list[dict[str, Any]]:
    columns = tracer.rows()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_the_file_is_whole_and_named_as_the_plugin_looks_for_it(traced: Tracer) -> None:
    assert [path.name for path in traced.path.parent.iterdir()] == ["prefill_b2_l64.rank3.pt.trace.json.gz"]
    assert traced.path.parent.name == "traces"
    top = json.loads(gzip.decompress(traced.path.read_bytes()))
    assert top["distributedInfo"] == {"rank": 3}
    assert top["record_shapes"] == 1
    shapes = [e["args"]["Input Dims"] for e in top["traceEvents"] if e["name"] == "aten::addmm"]
    assert shapes == [[[256], [128, 64], [64, 256], [], []], [[64], [128, 256], [256, 64], [], []]] * 4
    assert read_trace(traced.path).notes == []


def test_rows_carry_step_arm_segment_and_layer(traced: Tracer) -> None:
    rows = table(traced)
    calls = Counter((r["step"], r["arm"], r["segment"], r["layer"], r["name"]) for r in rows)
    for step, arm in STEPS.items():
        for layer in range(LAYERS):
            assert calls[step, arm, "attention", layer, "aten::bmm"] == 2
            assert calls[step, arm, "attention", layer, "aten::_softmax"] == 1
            assert calls[step, arm, "ffn", layer, "aten::addmm"] == 2
            assert calls[step, arm, "norm", layer, "aten::native_layer_norm"] == 1
        assert calls[step, arm, "head", -1, "aten::argmax"] == 1
        assert calls[step, arm, "", -1, "aten::exp"] == 1
    assert calls[None, None, "", -1, "aten::neg"] == 1
    assert {r["stream"] for r in rows} == {threading.get_native_id()}
    assert not any("gatewise" in r["name"] for r in rows)


def test_a_product_is_counted_once_with_its_own_time(traced: Tracer) -> None:
    """aten::linear holds aten::addmm, which does the product itself and yet holds small operators."""
    operators = read_trace(traced.path).operators
    rows = {(r["name"], r["start_ns"]): r["dur_ns"] for r in table(traced)}
    products = [o for o in operators if o.name == "aten::addmm"]
    assert len(products) == 2 * LAYERS * len(STEPS)
    for product in products:
        inside = [o for o in operators if product.start_ns <= o.start_ns and o.end_ns <= product.end_ns]
        outermost = [o for o in inside if o is not product and not any(encloses(p, o, product) for p in inside)]
        others_ns = sum(o.dur_ns for o in outermost)
        assert rows[product.name, product.start_ns] == product.dur_ns - others_ns > 0


def encloses(outer: Event, inner: Event, but: Event) -> bool:
    return outer not in (inner, but) and outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns


def test_self_times_are_those_torch_works_out_from_its_own_events(traced: Tracer) -> None:
    expected = {
        average.key: (average.count, average.self_cpu_time_total)
        for average in traced._profile.key_averages()
        if average.key.startswith("aten::")
    }
    found: defaultdict[str, int] = defaultdict(int)
    for row in table(traced):
        found[row["name"]] += row["dur_ns"]
    for name, (count, self_us) in expected.items():
        assert found[name] / 1000 == pytest.approx(self_us, abs=0.002 * count + 1e-6), name
    assert set(found) <= set(expected)


def test_a_thread_s_operators_never_add_up_to_more_than_its_step(traced: Tracer) -> None:
    trace = read_trace(traced.path)
    assert [(s.number, s.name) for s in trace.steps] == list(STEPS.items())
    for step in trace.steps:
        rows = [r for r in table(traced) if r["step"] == step.number]
        busy = sum(r["dur_ns"] for r in rows)
        assert 0 < busy <= step.end_ns - step.start_ns
        assert all(step.start_ns <= r["start_ns"] < step.end_ns for r in rows)
        # The union, added up plainly: what some operator covered, whichever it was.
        covered, reached = 0, step.start_ns
        for o in sorted(trace.operators, key=lambda o: o.start_ns):
            if step.start_ns <= o.start_ns < step.end_ns:
                covered += max(0, o.end_ns - max(o.start_ns, reached))
                reached = max(reached, o.end_ns)
        assert busy == covered


def test_start_times_count_from_the_epoch(tmp_path: Path) -> None:
    before = time.time_ns()
    with Tracer(tmp_path, "t") as tracer:
        torch.ones(2).add(1)
    after = time.time_ns()
    starts = tracer.rows()["start_ns"]
    assert starts
    assert before - 1_000_000_000 < min(starts) <= max(starts) < after + 1_000_000_000  # torch reads another clock


PLUGIN = """
import json, sys, tempfile
from torch_tb_profiler.consts import WORKER_PATTERN
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
path = sys.argv[1]
worker, span = WORKER_PATTERN.match(path.rsplit("/", 1)[1]).groups()
data = RunProfileData.parse(worker, span, path, tempfile.gettempdir())
profile = RunGenerator(worker, span, data).generate_run_profile()
print(json.dumps({"worker": worker, "views": [view.display_name for view in profile.views],
                  "calls": {op.name: op.calls for op in data.op_list_groupby_name}}))
"""


def test_tensorboard_s_plugin_parses_it(traced: Tracer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN, str(traced.path)], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["worker"] == "prefill_b2_l64.rank3"
    assert {"Overview", "Operator", "Trace"} <= set(seen["views"])
    assert seen["calls"]["aten::addmm"] == 2 * LAYERS * len(STEPS)
    assert seen["calls"]["aten::argmax"] == len(STEPS)


def test_a_block_that_raises_leaves_no_trace_and_the_next_one_can_be_taken(tmp_path: Path) -> None:
    def fails() -> None:
        with Tracer(tmp_path, "t"):
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        fails()
    assert list(tmp_path.iterdir()) == []
    with Tracer(tmp_path, "t") as tracer:
        torch.ones(2)
    assert tracer.path.exists()


def test_a_trace_inside_another_profiler_is_refused_before_it_breaks_that_one(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as outer:
        with pytest.raises(InputError, match="by another torch"), Tracer(tmp_path, "t"):
            pass
        torch.ones(2).neg()
    assert any(event.name == "aten::neg" for event in outer.events())


def test_a_folder_that_cannot_be_written_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")

    def trace() -> None:
        with Tracer(tmp_path, "t"):
            torch.ones(2)

    with pytest.raises(StoreError, match=r"cannot write the trace .*t\.rank0\.pt\.trace\.json\.gz"):
        trace()
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]
