"""Running one of two branches a row: every strategy against a loop, which rows enter, and which strategy is chosen."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.errors import InputError
from profiler.execution import row_trials
from profiler.execution.adapter import Adapter
from profiler.execution.grouped import linear_first, refuse_grouped, swiglu_first
from profiler.execution.products import compiled, filled, linear, offered, swiglu
from profiler.execution.row_trials import Trial, Tried, trial
from profiler.execution.rows import Branch, Fork, Way
from profiler.execution.sequences import Sequences
from profiler.recorder import Probe, Recorder, StepData

D, INNER = 16, 24


class Mlp(nn.Module):
    """A SwiGLU by the names decoders use."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, INNER), nn.Linear(D, INNER), nn.Linear(INNER, D)
        self.act_fn = nn.SiLU()
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def fork(dtype: torch.dtype = torch.float32, width: int = 5) -> tuple[Fork, Mlp, Adapter]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mlp, adapter = Mlp().to(dtype), Adapter(D, width).to(dtype)
    return (
        Fork(
            0,
            "ffn",
            Branch(0, "replacement", adapter, adapter.first, run_scaled=adapter),
            Branch(1, "ffn", mlp.forward, partial(swiglu_first, mlp), partial(swiglu, mlp)),
            Recorder(),
        ),
        mlp,
        adapter,
    )


def by_loop(
    mlp: Mlp, adapter: Adapter, x: Tensor, one: Tensor, real: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row by row; and which rows are real."""
    rows = [(mlp(x[[n]]) if one[n] else adapter(x[[n]]))[0] for n in range(len(x))]
    y = torch.stack(rows) if scale is None else torch.stack(rows) * scale[:, None]
    return y, torch.ones(len(x), dtype=torch.bool) if real is None else real


CASES = {
    "mixed": ([1, 0, 0, 1, 1, 0, 0], None),
    "all one": ([1, 1, 1], None),
    "all zero": ([0, 0, 0, 0], None),
    "one row": ([1], None),
    "another row": ([0], None),
    "pads first": ([1, 1, 0, 1, 0], [0, 0, 1, 1, 1]),
    "pads between": ([1, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1]),
    "pads only beside one": ([0, 1, 1], [0, 1, 1]),
    "pads only beside zero": ([1, 0, 0], [0, 1, 1]),
    "nothing but pads": ([1, 0], [0, 0]),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("strategy", ["masked", "gather", "overlay", "grouped"])
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_is_the_loop(case: str, strategy: Any, scaled: bool) -> None:
    both, mlp, adapter = fork()
    flags, pads = CASES[case]
    one, real = torch.tensor(flags, dtype=torch.bool), None if pads is None else torch.tensor(pads, dtype=torch.bool)
    x = torch.randn(len(one), D, generator=torch.Generator().manual_seed(1))
    scale = torch.linspace(0.1, 0.9, len(one)) if scaled else None
    with torch.no_grad():
        found = both.run(strategy, x, one, real, scale)
        wanted, kept = by_loop(mlp, adapter, x, one, real, scale)
    assert torch.allclose(found[kept], wanted[kept], atol=1e-5)
    assert bool(torch.isfinite(found).all())
    assert found.dtype == x.dtype


@pytest.mark.parametrize("strategy", ["masked", "gather", "overlay"])
def test_gradients_are_the_loop_s(strategy: Any) -> None:
    both, mlp, adapter = fork(torch.float64)
    one = torch.tensor([True, False, False, True, True])
    found = []
    for run in (
        lambda x, s: both.run(strategy, x, one, None, s),
        lambda x, s: by_loop(mlp, adapter, x, one, None, s)[0],
    ):
        x = torch.randn(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        scale = torch.linspace(0.1, 0.9, 5, dtype=torch.float64, requires_grad=True)
        weights = [mlp.gate_proj.weight, mlp.down_proj.weight, adapter.W1.weight, adapter.W2.weight]
        found.append(torch.autograd.grad(run(x, scale).square().sum(), [x, scale, *weights]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gather_runs_each_row_once_masked_all_twice_and_overlay_the_cheap_branch_for_all() -> None:
    both, mlp, adapter = fork()
    entered: list[int] = []
    adapter.W1.register_forward_pre_hook(lambda _, args: entered.append(len(args[0])))
    one, real = torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 1, 1, 1]).bool()
    x = torch.randn(6, D)
    with torch.no_grad():
        both.run("gather", x, one, real, None)
        assert (mlp.rows, entered) == ([2], [3])
        both.run("masked", x, one, real, None)
        assert (mlp.rows, entered) == ([2, 6], [3, 6])
        both.run("gather", x, torch.ones(6).bool(), None, None)
        assert (mlp.rows, entered) == ([2, 6, 6], [3, 6])
        both.run("overlay", x, one, real, None)
        assert (mlp.rows, entered) == ([2, 6, 6, 2], [3, 6, 6])


def test_grouped_multiplies_only_the_rows_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past the offset are poisoned on the way in; whatever they would give must not reach the result."""
    both, mlp, adapter = fork()
    plain, seen = F.grouped_mm, []

    def poisoned(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        seen.append(int(offs))
        y = plain(x, weight, offs=offs)
        y[int(offs) :] = float("nan")
        return y

    monkeypatch.setattr(F, "grouped_mm", poisoned)
    one, real = torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 1, 1, 1]).bool()
    x = torch.randn(6, D)
    with torch.no_grad():
        found = both.run("grouped", x, one, real, None)
        wanted, kept = by_loop(mlp, adapter, x, one, real, None)
    assert seen == [2, 2, 2, 3, 3]  # gate, up and down of two rows; both products of the adapter of three
    assert torch.allclose(found[kept], wanted[kept], atol=1e-5)
    assert not found[0].any()


def test_scales_multiply_in_float32_and_round_once() -> None:
    both, mlp, _ = fork(torch.bfloat16)
    x, one = torch.randn(3, D).bfloat16(), torch.ones(3).bool()
    scale = torch.tensor([0.1001, 0.5003, 0.9007])
    with torch.no_grad():
        found = both.run("gather", x, one, None, scale)
        exact = (mlp(x).float() * scale[:, None]).bfloat16()
        rounded_first = mlp(x) * scale.bfloat16()[:, None]
    assert torch.equal(found, exact)
    assert not torch.equal(found, rounded_first)


@pytest.mark.parametrize(("dtype", "width"), list(itertools.product([torch.float32, torch.bfloat16], [1, 4, 7, 8, 13])))
def test_an_adapter_of_any_width_multiplies_grouped(dtype: torch.dtype, width: int) -> None:
    _, _, adapter = fork(dtype, width)
    x = torch.randn(6, D).to(dtype)
    with torch.no_grad():
        found = adapter.first(x, torch.tensor([4], dtype=torch.int32))[:4]
        assert torch.allclose(found, adapter(x)[:4], atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
        adapter.W1.weight.mul_(2)
        found = adapter.first(x, torch.tensor([4], dtype=torch.int32))[:4]
        assert torch.allclose(found, adapter(x)[:4], atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
    down, up = adapter._aligned_weights()
    assert down.shape[0] * dtype.itemsize % 16 == up.shape[1] * dtype.itemsize % 16 == 0


def test_a_fresh_adapter_adds_nothing_and_is_drawn_from_its_generator() -> None:
    adapters = [Adapter(D, 4) for _ in range(2)]
    for adapter in adapters:
        adapter.start(torch.Generator().manual_seed(7))
    assert torch.equal(adapters[0].W1.weight, adapters[1].W1.weight)
    assert float(adapters[0].W1.weight.detach().abs().max()) <= D**-0.5
    assert not adapters[0](torch.randn(3, D)).any()


def test_linear_first_with_a_bias() -> None:
    linear, x = nn.Linear(D, 8), torch.randn(5, D)
    with torch.no_grad():
        found = linear_first(x, linear.weight, linear.bias, torch.tensor([3], dtype=torch.int32))
        assert torch.allclose(found[:3], linear(x)[:3], atol=1e-6)


def test_what_grouped_cannot_multiply_is_refused_with_the_numbers() -> None:
    refuse_grouped(64, 128, torch.bfloat16)
    with pytest.raises(InputError, match="and the model is in torch.float64"):
        refuse_grouped(64, 128, torch.float64)
    with pytest.raises(InputError, match=r"multiple of 16 bytes: the model's hidden size \(30\) × 4 bytes is none"):
        refuse_grouped(30, 128, torch.float32)


# -- which one is faster -----------------------------------------------------------------------------


def test_the_winner_for_a_row_count_is_that_of_the_next_bound_tried() -> None:
    found = Trial((4, 32, 256), ("gather", "grouped", "gather"), ((1, 2), (2, 1), (1, 2)), Tried())
    assert [found.winner(rows) for rows in (1, 4, 5, 32, 33, 256, 10_000)] == [
        "gather", "gather", "grouped", "grouped", "gather", "gather", "gather",
    ]  # fmt: skip


def test_the_way_for_a_row_count_is_its_own_or_that_of_the_next_bound_tried() -> None:
    found = Tried((Way(0), Way(4), Way(2, True)), ((20, True), (48, False)))
    wanted = {
        1: Way(4),
        2: Way(2, True),
        3: Way(3, True),
        17: Way(24, True),
        20: Way(24, True),
        21: Way(21),
        99: Way(99),
    }
    assert {own: found.one(own) for own in wanted} == wanted
    assert [found.zero(own) for own in (3, 17)] == [Way(3), Way(17)]


def test_what_is_compiled_for_each_number_of_rows_is_given_few_numbers() -> None:
    assert [filled(rows) for rows in (0, 1, 8, 9, 16, 17, 250)] == [0, 1, 8, 16, 16, 24, 256]
    found = Tried((), ((48, False),), compiled=True)
    assert (found.one(9), found.zero(33)) == (Way(16), Way(40))
    assert compiled(torch.bfloat16, CPU) == torch.backends.mkldnn.is_available()
    assert not compiled(torch.float32, CPU)


CPU = torch.device("cpu")
ALIKE = [(1.0, 1.0)] * 8


def timed(monkeypatch: pytest.MonkeyPatch, seconds: list[tuple[float, ...]]) -> None:
    taken = iter(seconds)
    monkeypatch.setattr(row_trials, "_TRIALS", {})
    monkeypatch.setattr(row_trials, "_seconds", lambda runs, device: next(taken))


def test_the_faster_one_wins_and_is_tried_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _, _ = fork()
    steps = [(0.001, 0.002, 0.003), (0.002, 0.002, 0.001), (0.001, 0.00096, 0.00097), (0.003, 0.001, 0.002)]
    timed(monkeypatch, [*ALIKE, *steps])
    found = trial([both], (D, INNER, 5), torch.float32, CPU)
    assert (found.bounds, found.winners) == ((4, 32, 256, 1024), ("gather", "grouped", "gather", "overlay"))
    assert trial([both], (D, INNER, 5), torch.float32, CPU) is found
    timed(monkeypatch, [*ALIKE, (0.3, 0.2, 0.1)])  # too slow for more rows to tell anything
    slow = trial([both], (D, INNER, 5), torch.float32, CPU)
    assert (slow.bounds, slow.winners) == ((4,), ("grouped",))


def test_few_rows_are_filled_up_to_where_a_product_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _, _ = fork()
    rows = [0.92, 1.40, 1.60, 1.15, 1.33, 1.34, 1.50, 1.36]
    timed(monkeypatch, [*((each, 2.0) for each in rows), (1.0, 1.0, 1.0)])
    found = trial([both], (D, INNER, 5), torch.float32, CPU)
    assert [way.rows for way in found.branches.few] == [0, 1, 4, 4, 4, 5, 6, 8, 8]
    assert not any(way.other for way in found.branches.few)


def test_other_products_are_taken_where_they_are_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _, _ = fork()
    few = [(9e-4, 8.8e-4), (1.5e-3, 8e-4), (1.6e-3, 1.2e-3), *[(1e-3, 1.1e-3)] * 5]
    more = [(2e-3, 1.5e-3), (3e-3, 3e-3), (1.3e-2, 1e-2)]  # the last is where patience ends
    timed(monkeypatch, [*few, *more, (1.0, 1.0, 1.0)])
    found = trial([both], (D, INNER, 5), torch.float32, CPU)
    # One row: two by the other are faster. Two: by the other. Three: four are faster than three either way.
    assert found.branches.few[1:5] == (Way(2, True), Way(2, True), Way(4), Way(4))
    assert found.branches.more == ((16, True), (48, False), (128, True))


@pytest.mark.parametrize(("widths", "dtype"), [((D, 7), torch.float32), ((18, INNER), torch.float32)])
def test_what_grouped_cannot_multiply_is_not_tried_grouped(
    widths: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, _, _ = fork()
    asked: list[int] = []
    monkeypatch.setattr(row_trials, "_TRIALS", {})

    def counted(runs: list[list[Any]], device: torch.device) -> tuple[float, ...]:
        asked.append(len(runs))
        return (1.0,) * len(runs)

    monkeypatch.setattr(row_trials, "_seconds", counted)
    assert trial([both], (*widths, 5), dtype, CPU).winners == ("gather",)
    assert asked[-1] == 2  # gather and overlay


@pytest.mark.parametrize("strategy", ["gather", "overlay"])
@pytest.mark.parametrize("times", [1.0, 0.25, None])
def test_what_a_caller_kept_of_a_branch_stays(strategy: Any, times: float | None) -> None:
    both, mlp, adapter = fork()
    kept: list[Tensor] = []
    then: list[Tensor] = []

    def keep(module: nn.Module, args: Any, y: Tensor) -> None:
        kept.append(y)
        then.append(y.clone())

    for last in (mlp.down_proj, adapter.W2):
        last.register_forward_hook(keep)
    one = torch.tensor([0, 1, 0, 1, 0, 0]).bool()
    x, scale = torch.randn(6, D), None if times is None else torch.full((6,), times)
    with torch.no_grad():
        both.run(strategy, x, one, None, scale)
        both.run(strategy, x, torch.ones(6).bool(), None, scale)
        both.run(strategy, x, torch.zeros(6).bool(), None, scale)
    assert len(kept) == 4
    assert all(map(torch.equal, kept, then))


def test_weights_made_under_inference_mode_run_and_what_was_made_of_others_there_passes_gradients() -> None:
    with torch.inference_mode():
        _, _, born = fork(width=5)
        inside = born.first(torch.randn(6, D), torch.tensor([4], dtype=torch.int32))
    assert inside.shape == (6, D)
    _, _, adapter = fork(width=5)
    x = torch.randn(6, D, requires_grad=True)
    with torch.inference_mode():
        adapter.first(x, torch.tensor([4], dtype=torch.int32))
    y = adapter.first(x, torch.tensor([6], dtype=torch.int32))
    assert torch.autograd.grad(y.square().sum(), x)[0].shape == x.shape


def test_rows_of_a_grouped_product_are_counted_from_the_number_it_is_given() -> None:
    both, mlp, adapter = fork()
    one = torch.tensor([0, 1, 0, 1, 0, 0]).bool()
    handle = Recorded(mlp, adapter)
    with torch.no_grad():
        counts = handle.count(
            both, lambda: both.run("grouped", torch.randn(6, D), one, torch.tensor([0] + [1] * 5).bool())
        )
    assert {key: (count.rows, count.padded) for key, count in counts.items()} == {
        (0, "ffn", 1): (2, 0),
        (0, "ffn", 0): (3, 0),
    }


@pytest.mark.parametrize("other", [False, True])
def test_rows_that_fill_up_are_thrown_away_and_counted_as_pads(other: bool) -> None:
    both, mlp, adapter = fork()
    handle = Recorded(mlp, adapter)
    one = torch.tensor([0, 1, 0, 1, 0, 0]).bool()
    x = torch.randn(6, D)

    def ways(own: int) -> Way:
        return Way(4, other) if own == 2 else Way(own)

    with torch.no_grad():
        found = both.run("gather", x, one, ways=(Way, ways))
        wanted, _ = by_loop(mlp, adapter, x, one, None, None)
        assert torch.allclose(found, wanted, atol=1e-5)
        mlp.rows.clear()
        both.run("gather", x, one, ways=(Way, ways))
        both.run("gather", x, ~one, ways=(Way, ways))
        assert mlp.rows == ([4] if other else [4, 4])  # two filled up to four; and four, which are not
        counts = handle.count(both, lambda: both.run("gather", x, one, ways=(Way, ways)))
    assert (counts[0, "ffn", 1].rows, counts[0, "ffn", 1].padded) == (2, 2)
    assert (counts[0, "ffn", 0].rows, counts[0, "ffn", 0].padded) == (4, 0)


def test_rows_that_are_laid_over_count_as_pads() -> None:
    both, mlp, adapter = fork()
    handle = Recorded(mlp, adapter)
    one, real = torch.tensor([0, 1, 0, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 1, 1, 1]).bool()
    with torch.no_grad():
        counts = handle.count(both, lambda: both.run("overlay", torch.randn(6, D), one, real))
    assert (counts[0, "ffn", 1].rows, counts[0, "ffn", 1].padded) == (2, 0)
    assert (counts[0, "ffn", 0].rows, counts[0, "ffn", 0].padded) == (3, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_are_torch_s_own(dtype: torch.dtype, bias: bool) -> None:
    mlp = Mlp().to(dtype)
    if not bias:
        mlp.gate_proj.bias = mlp.up_proj.bias = mlp.down_proj.bias = None
    x = torch.randn(5, D, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    with torch.no_grad():
        assert torch.allclose(swiglu(mlp, x), mlp(x), rtol=tolerance, atol=tolerance)
        assert torch.allclose(
            linear(x, mlp.gate_proj.weight), x @ mlp.gate_proj.weight.T, rtol=tolerance, atol=tolerance
        )
    assert offered(x) == (dtype == torch.float32 and torch.backends.mkldnn.is_available())


class Recorded(nn.Module):
    """A step for the recorder: six rows, of which the branches' first products are counted."""

    def __init__(self, mlp: Mlp, adapter: Adapter) -> None:
        super().__init__()
        self.mlp, self.adapter = mlp, adapter
        self.tracker = Any
        self.work: Any = None

    root = property(lambda self: self)

    def probes(self) -> list[Probe]:
        return [Probe(0, "ffn", 1, self.mlp.gate_proj), Probe(0, "ffn", 0, self.adapter.W1)]

    def spans(self) -> list[Any]:
        return []

    def kv_bytes(self, output: Any) -> None:
        return None

    def forward(self) -> Tensor:
        return self.work()

    def count(self, both: Fork, work: Any) -> dict[tuple[int, str, int], Any]:
        steps: list[StepData] = []
        self.work = work
        self.tracker = SimpleNamespace(current=Sequences(False, 6, [6], [0], ["row-0"]))
        both.recorder.attach(self)
        both.recorder.mode, both.recorder.sink = "record", steps.append
        self()
        return steps[0].counts


def test_a_trial_really_times_all() -> None:
    both, _, _ = fork()
    found = trial([both], (D, INNER, 5, 99), torch.float32, CPU)
    assert found.bounds == (4, 32, 256, 1024)[: len(found.bounds)]
    assert all(0 < seconds < 1 for each in found.seconds for seconds in each)
    assert all(n <= way.rows <= 8 for n, way in enumerate(found.branches.few))
    assert [bound for bound, _ in found.branches.more] == [16, 48, 128, 384, 1024][: len(found.branches.more)]
