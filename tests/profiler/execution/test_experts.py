"""Every strategy of running experts against loops over rows, forwards and backwards, and the layout of the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from profiler.execution.experts import Dispatch, Experts, SwiGLU, dispatch

STRATEGIES = ("sequential", "per_width", "padded", "packed")
#: One expert of its own width, neighbours of one width, all the same, all different, not aligned to 16 bytes.
WIDTHS = {
    "groups": [8, 8, 16, 16, 16, 24],
    "standard": [12, 12, 12, 12],
    "all different": [4, 8, 12, 20, 28],
    "odd": [3, 3, 5, 7, 7],
    "alone": [10],
}
D = 16


def made(widths: Sequence[int], dtype: torch.dtype = torch.float64) -> Experts:
    experts = Experts(D, widths).to(dtype)
    with torch.no_grad():
        experts.weights.copy_(torch.randn(experts.weights.shape, generator=torch.Generator().manual_seed(0)) / 4)
    return experts


def inputs(experts: int, rows: int = 11, keep: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, choices `[N, K]` ascending, weights."""
    generator = torch.Generator().manual_seed(seed)
    keep = min(keep, experts)
    choice = torch.stack([torch.randperm(experts, generator=generator)[:keep].sort().values for _ in range(rows)])
    return (
        torch.randn(rows, D, generator=generator, dtype=torch.float64),
        choice,
        torch.rand(rows, keep, generator=generator, dtype=torch.float64),
    )


def slow(experts: Experts, x: Tensor, choice: Tensor, weight: Tensor | None, real: Tensor | None = None) -> Tensor:
    """Row by row, expert by expert, from the layout the module's docstring gives: W rows of gate, up, downᵀ each."""
    found = torch.zeros_like(x)
    for t in range(len(x)):
        for k, e in enumerate(choice[t].tolist()):
            if e < 0 or (real is not None and not real[t]):
                continue
            before, w = 3 * sum(experts.widths[:e]), experts.widths[e]
            gate, up, down = (experts.weights[before + i * w : before + (i + 1) * w] for i in range(3))
            pre = gate @ x[t]
            found[t] += (1.0 if weight is None else weight[t, k]) * (down.T @ (pre / (1 + (-pre).exp()) * (up @ x[t])))
    return found


def close(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= bound * max(float(b.abs().max()), 1e-300)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("rows", [1, 11])
def test_strategies_are_the_loops(strategy: str, widths: list[int], rows: int) -> None:
    experts = made(widths)
    x, choice, weight = inputs(len(widths), rows)
    with torch.no_grad():
        for given in (weight, None):
            y = experts.run(strategy, x, dispatch(choice, given, len(widths)))
            assert close(y, slow(experts, x, choice, given))


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_without_a_gradient_is_packed_with_one(widths: list[int], dtype: torch.dtype) -> None:
    """Every choice, some experts without a row, and nobody: on a CPU expert by expert in another library's layout."""
    experts = made(widths, dtype)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    x, choice, weight = inputs(len(widths), 11)
    for chosen in (choice, choice[:, :1] * 0, choice.masked_fill(torch.arange(11)[:, None] != 4, -1)):
        to = dispatch(chosen, weight[:, : chosen.shape[1]], len(widths), full=False)
        with torch.no_grad():
            alone = experts.run("packed", x.to(dtype), to)
        assert close(alone, experts.run("packed", x.to(dtype), to).detach(), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_weights_in_another_layout_follows_them_and_is_no_copy_s(dtype: torch.dtype) -> None:
    experts = made(WIDTHS["groups"], dtype)
    x, choice, weight = inputs(6)
    to = dispatch(choice, weight, 6)
    with torch.no_grad():
        before = experts.run("packed", x.to(dtype), to)
        other = copy.deepcopy(experts)
        other.weights.mul_(2)
        assert torch.equal(experts.run("packed", x.to(dtype), to), before)
        assert close(other.run("packed", x.to(dtype), to).double(), slow(other.double(), x, choice, weight), 0.03)
        other = copy.deepcopy(experts)
        other.weights.mul_(2)
        experts.weights.mul_(2)
        assert torch.equal(experts.run("packed", x.to(dtype), to), other.run("packed", x.to(dtype), to))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_without_experts_and_pads_get_nothing(strategy: str) -> None:
    experts = made(WIDTHS["groups"])
    x, choice, weight = inputs(6)
    choice = choice.masked_fill(torch.arange(3) >= torch.tensor([1, 2, 3, 0] * 3)[:11, None], -1)
    x[5] = float("nan")  # a pad may hold anything
    real = torch.arange(11) != 5
    with torch.no_grad():
        for mask in (real, None):
            rows = x if mask is not None else x.nan_to_num()
            y = experts.run(strategy, rows, dispatch(choice, weight, 6, mask, full=False))
            assert close(y, slow(experts, rows.nan_to_num(), choice, weight, mask))
            assert not y[3].any()
        nobody = dispatch(torch.full((11, 1), -1), weight[:, :1], 6, full=False)
        assert not experts.run(strategy, x.nan_to_num(), nobody).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_to_one_expert(strategy: str) -> None:
    experts = made(WIDTHS["groups"])
    x, _, _ = inputs(6)
    for e in range(6):
        choice = torch.full((11, 1), e)
        with torch.no_grad():
            assert close(experts.run(strategy, x, dispatch(choice, None, 6)), slow(experts, x, choice, None))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_the_loops(strategy: str) -> None:
    experts = made(WIDTHS["groups"])
    x, choice, weight = inputs(6)
    x.requires_grad_()
    weight.requires_grad_()
    of = (x, weight, experts.weights)
    target = torch.randn(11, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((slow(experts, x, choice, weight) * target).sum(), of)
    y = experts.run(strategy, x, dispatch(choice, weight, 6))
    found = torch.autograd.grad((y * target).sum(), of)
    assert all(close(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("widths", [WIDTHS["groups"], WIDTHS["odd"]], ids=["aligned", "odd"])
def test_lower_precision_is_near(strategy: str, dtype: torch.dtype, bound: float, widths: list[int]) -> None:
    experts = made(widths, dtype)
    x, choice, weight = inputs(len(widths))
    with torch.no_grad():
        y = experts.run(strategy, x.to(dtype), dispatch(choice, weight.float(), len(widths)))
        assert y.dtype == dtype
        assert close(y.double(), slow(copy.deepcopy(experts).double(), x.to(dtype).double(), choice, weight), bound)


def test_equal_widths_are_one_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dtype grouped_mm knows, a run of equal widths takes two calls packed and three with gate and up apart."""
    experts = made(WIDTHS["standard"], torch.float32)
    x, choice, weight = inputs(4)
    calls: list[int] = []
    own = torch.nn.functional.grouped_mm

    def counted(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(b.shape[2])
        return own(a, b, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    to = dispatch(choice, weight.float(), 4)
    grouped = experts.run("packed", x.float(), to)
    assert calls == [24, D]
    calls.clear()
    experts.run("per_width", x.float(), to)
    assert calls == [12, 12, D]
    calls.clear()
    made(WIDTHS["standard"]).run("packed", x, dispatch(choice, weight, 4))
    assert calls == []  # float64
    assert torch.equal(experts.run("packed", x.float(), to), grouped)  # a gradient is wanted
    calls.clear()
    with torch.no_grad():
        assert close(experts.run("packed", x.float(), to), grouped.detach(), 1e-6)
    assert calls == []


def test_pairs_are_sorted_by_expert_with_rows_ascending_and_counted() -> None:
    to: Dispatch = dispatch(
        torch.tensor([[1, 3], [0, 1], [1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), 5
    )
    assert to.row_P.tolist() == [1, 0, 1, 2, 0, 2]
    assert to.counts == [1, 3, 0, 2, 0]
    assert to.sorted_weight_P is not None
    assert to.sorted_weight_P.tolist() == [3.0, 1.0, 4.0, 5.0, 2.0, 6.0]


def test_an_expert_is_one_contiguous_piece_of_the_weights() -> None:
    experts = made([3, 5])
    gate, up, down = experts.of(1)
    assert torch.equal(torch.cat([gate, up, down]), experts.weights[9:24])
    assert gate.data_ptr() == experts.weights[9].data_ptr()
    assert sum(p.numel() for p in experts.parameters()) == 3 * D * 8


def test_padded_weights_follow_the_weights_and_copies_are_their_own() -> None:
    experts = made(WIDTHS["all different"])
    x, choice, weight = inputs(5)
    to = dispatch(choice, weight, 5)
    with torch.no_grad():
        for strategy in STRATEGIES:
            experts.run(strategy, x, to)
        copied = copy.deepcopy(experts)
        copied.weights.mul_(2)
        for strategy in STRATEGIES:
            assert close(copied.run(strategy, x, to), slow(copied, x, choice, weight))
            assert close(experts.run(strategy, x, to), slow(experts, x, choice, weight))


def test_rows_enter_through_an_expert_s_own_module_when_run_one_by_one() -> None:
    experts = made(WIDTHS["groups"])
    x, choice, weight = inputs(6)
    entered = [0] * 6
    for e, entry in enumerate(experts.entries):
        entry.register_forward_pre_hook(lambda _, args, e=e: entered.__setitem__(e, len(args[0])))
    to = dispatch(choice, weight, 6)
    with torch.no_grad():
        experts.run("sequential", x, to)
    assert entered == to.counts


def test_shared_experts_side_by_side_are_their_sum() -> None:
    """N_s experts that are always on are one SwiGLU as wide as all of them."""
    shared, experts = SwiGLU(D, 12).double(), made([4, 8])
    parts = [experts.of(e) for e in range(2)]
    with torch.no_grad():
        shared.weights.copy_(torch.cat([torch.cat(same) for same in zip(*parts, strict=True)]))
        x, _, _ = inputs(2)
        both = torch.tensor([[0, 1]]).expand(11, -1)
        assert close(shared(x), slow(experts, x, both, None))
