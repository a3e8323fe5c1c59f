"""The fused operator against experts one row at a time in float64, at every shape that takes another way through it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from profiler import compiled
from profiler.execution import fused_experts
from profiler.execution.experts import Dispatch, Experts, Strategy, dispatch

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.012}

here = pytest.mark.skipif(
    fused_experts.why_not(torch.empty(0)) is not None, reason=str(fused_experts.why_not(torch.empty(0)))
)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def values(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Such that results are of the order of 1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).div(shape[-1] ** 0.5).to(dtype)


def slow(x_Nd: Tensor, row_P: Tensor, counts: list[int], width: int, block_SWd: Tensor) -> Tensor:
    """Pair by pair in float64."""
    expert_P = [expert for expert, count in enumerate(counts) for _ in range(count)]
    found = torch.zeros(len(expert_P), x_Nd.shape[1], dtype=torch.float64)
    for pair, expert in enumerate(expert_P):
        x, (gate, up, down) = x_Nd[int(row_P[pair])].double(), block_SWd[expert].double().split(width)
        pre = gate @ x
        found[pair] = down.T @ (pre / (1 + (-pre).exp()) * (up @ x))
    return found


def apart(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).abs().max() / wanted.abs().max())


@here
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("hidden", "width", "counts"),
    [
        (64, 32, [3, 0, 2]),  # panels exactly full; an expert without a row
        (16, 8, [1]),  # less than a panel, one row
        (65, 33, [2, 1, 1, 1, 1, 1, 1]),  # one column over, odd, more experts than any number of threads here
        (63, 97, [4, 1]),
        (80, 48, [5, 2]),  # last panels of half the columns, full
        (50, 100, [3]),  # of some columns, not full
        (1, 1, [2]),
        (130, 40, [65, 70]),  # more rows than a product takes
        (8, 16, [0, 600, 0]),  # more rows than a thread takes at a time
        (2500, 3, [2]),  # deeper than a product takes at a time
        (3, 2500, [2]),
    ],
)
def test_results_are_the_loops(dtype: torch.dtype, hidden: int, width: int, counts: list[int], threads: int) -> None:
    rows = 7
    x_Nd = values(rows, hidden, seed=0, dtype=dtype) * hidden**0.5
    block_SWd = values(len(counts), 3 * width, hidden, seed=1, dtype=dtype)
    row_P = torch.randint(rows, (sum(counts),), generator=torch.Generator().manual_seed(2))
    y_Pd = torch.full((sum(counts), hidden), float("nan"), dtype=dtype)
    fused_experts.run(x_Nd, row_P, counts, width, fused_experts.panels(block_SWd, width), y_Pd)
    assert apart(y_Pd, slow(x_Nd, row_P, counts, width, block_SWd)) < BOUNDS[dtype]


@here
@pytest.mark.parametrize("dtype", BOUNDS)
def test_rows_beside_one_another_do_not_mix(dtype: torch.dtype, threads: int) -> None:
    """Not-a-number and infinity stay in their rows, and a row's result is the same to the last bit in any company."""
    width, hidden = 48, 80
    panels = fused_experts.panels(values(2, 3 * width, hidden, seed=1, dtype=dtype), width)
    x_Nd = values(40, hidden, seed=0, dtype=dtype)
    x_Nd[3], x_Nd[30] = float("nan"), float("inf")
    row_P, counts = torch.arange(40), [25, 15]
    y_Pd = torch.empty_like(x_Nd)
    fused_experts.run(x_Nd, row_P, counts, width, panels, y_Pd)
    finite = y_Pd.isfinite().all(1)
    assert (~finite).nonzero().flatten().tolist() == [3, 30]
    for row in (0, 2, 4, 24, 25, 39):
        alone = torch.empty(1, hidden, dtype=dtype)
        fused_experts.run(x_Nd, torch.tensor([row]), [int(row < 25), int(row >= 25)], width, panels, alone)
        assert torch.equal(alone[0], y_Pd[row])


@here
@pytest.mark.parametrize("dtype", BOUNDS)
def test_large_gates_saturate_as_silu_does(dtype: torch.dtype) -> None:
    """SiLU(±1000)·1: 1000 and 0, not not-a-number."""
    block = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]], dtype=dtype)
    x_Nd = torch.tensor([[1000.0, 1.0], [-1000.0, 1.0], [0.0, 1.0]], dtype=dtype)
    y_Nd = torch.empty_like(x_Nd)
    fused_experts.run(x_Nd, torch.arange(3), [3], 1, fused_experts.panels(block, 1), y_Nd)
    assert y_Nd[:, 0].tolist() == [1000.0, 0.0, 0.0]


@here
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("width", [1, 5, 16, 40])
def test_infinity_is_what_it_is_elsewhere_however_panels_are_filled_up(dtype: torch.dtype, width: int) -> None:
    """All weights 1: SiLU(∞)·∞ summed is ∞, and 0·∞ of columns that only fill up would make it not-a-number."""
    x_Nd = torch.tensor([[float("inf"), 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=dtype)
    y_Nd = torch.empty_like(x_Nd)
    panels = fused_experts.panels(torch.ones(1, 3 * width, 3, dtype=dtype), width)
    fused_experts.run(x_Nd, torch.arange(2), [2], width, panels, y_Nd)
    assert y_Nd[0].tolist() == [float("inf")] * 3
    assert y_Nd[1].isfinite().all()


@here
def test_weights_take_as_much_room_as_they_did_where_panels_are_full() -> None:
    assert fused_experts.panels(torch.ones(2, 3 * 48, 80), 48).shape == (2, 3 * 48 * 80)


@here
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it prepares forward AD
def test_a_tangent_is_refused_and_not_lost() -> None:
    panels = fused_experts.panels(torch.ones(1, 12, 8), 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(1, 8), torch.ones(1, 8))
        with pytest.raises(NotImplementedError, match="forward AD with gatewise::fused_experts"):
            fused_experts.run(dual, torch.tensor([0]), [1], 4, panels, torch.empty(1, 8))


@here
def test_nothing_to_do_is_done() -> None:
    panels = fused_experts.panels(values(2, 12, 8, seed=0, dtype=torch.float32), 4)
    nobody = torch.empty(0, 8)
    fused_experts.run(torch.ones(3, 8), torch.empty(0, dtype=torch.int64), [0, 0], 4, panels, nobody)
    fused_experts.run(nobody, torch.empty(0, dtype=torch.int64), [0, 0], 4, panels, nobody)


@here
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row_P": torch.tensor([0, 3])}, "no such row"),
        ({"row_P": torch.tensor([0, -1])}, "no such row"),
        ({"row_P": torch.tensor([0, 1], dtype=torch.int32)}, "rows must be int64"),
        ({"counts": [1, 2]}, "sizes (must )?fit together"),
        ({"counts": [3, -1]}, "counts must be at least 0"),
        ({"counts": [2]}, "as many counts as experts"),
        ({"width": 40}, "weights of an expert must be"),
        ({"width": 0}, "width must be 1 to 16777216, is 0"),
        ({"width": 2**60, "weights": torch.empty(2, 0)}, "width must be 1 to 16777216"),  # sizes that wrap to 0
        ({"counts": [2**63 - 1, 2**63 - 1], "row_P": torch.tensor([0, 2])}, "counts must be at least 0"),
        ({"x_Nd": torch.ones(3, 0), "y_Pd": torch.empty(2, 0)}, "rows of x must have 1 to"),
        ({"y_Pd": torch.empty(2, 7)}, "sizes (must )?fit together"),
        ({"y_Pd": torch.empty(2, 8, dtype=torch.bfloat16)}, "dtypes must be the same"),
        ({"y_Pd": torch.empty(8, 2).t()}, "not contiguous"),
        ({"x_Nd": torch.ones(3, 8, dtype=torch.float64)}, "dtype must be float32 or bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changed: dict[str, object], message: str) -> None:
    given = {
        "x_Nd": torch.ones(3, 8), "row_P": torch.tensor([0, 2]), "counts": [1, 1], "width": 4,
        "weights": fused_experts.panels(torch.ones(2, 12, 8), 4), "y_Pd": torch.empty(2, 8),
    }  # fmt: skip
    fused_experts.run(**given)
    with pytest.raises(RuntimeError, match=message):
        fused_experts.run(**{**given, **changed})


def case(dtype: torch.dtype) -> tuple[Experts, Tensor, Tensor, Tensor]:
    experts = Experts(24, [8, 8, 40, 72]).to(dtype)
    experts.weights.data.copy_(values(*experts.weights.shape, seed=0, dtype=dtype))
    generator = torch.Generator().manual_seed(3)
    choice = torch.stack([torch.randperm(4, generator=generator)[:2].sort().values for _ in range(9)])
    return experts, values(9, 24, seed=1, dtype=dtype) * 5, choice, torch.rand(9, 2, generator=generator)


@here
def test_packed_takes_it_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x, choice, weight = case(torch.float32)
    seen: list[int] = []
    inner = fused_experts.run
    monkeypatch.setattr(fused_experts, "run", lambda *given: (seen.append(given[3]), inner(*given))[1])
    to = dispatch(choice, weight, 4)
    with_gradient = experts.run("packed", x, to)
    assert seen == []
    with torch.no_grad():
        y = experts.run("packed", x, to)
    assert seen == [8, 40, 72]  # once a width
    assert apart(y, with_gradient.detach().double()) < 2e-6
    assert experts.how().startswith("one fused operator")


@here
def test_panels_follow_the_weights_and_are_no_copy_s() -> None:
    experts, x, choice, weight = case(torch.bfloat16)
    to = dispatch(choice, weight, 4)
    with torch.no_grad():
        before = experts.run("packed", x, to)
        other = copy.deepcopy(experts)
        other.weights.zero_()
        assert torch.equal(experts.run("packed", x, to), before)
        assert not other.run("packed", x, to).any()
        experts.weights.zero_()
        assert not experts.run("packed", x, to).any()


class Through(nn.Module):
    """Experts under a strategy, as a module to be called with other weights."""

    def __init__(self, experts: Experts, strategy: Strategy, to: Dispatch) -> None:
        super().__init__()
        self.experts, self._strategy, self._to = experts, strategy, to

    def forward(self, x: Tensor) -> Tensor:
        return self.experts.run(self._strategy, x, self._to)


def weighted(widths: tuple[int, ...], weights: Tensor, x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """Each row's weighted sum over the experts it chose, in float64."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for row, chosen in enumerate(choice.tolist()):
        for place, expert in enumerate(chosen):
            start, width = 3 * sum(widths[:expert]), widths[expert]
            block = weights[start : start + 3 * width][None]
            y = slow(x[row : row + 1], torch.tensor([0]), [1], width, block)[0]
            found[row] += weight[row, place].double() * y
    return found


@here
@pytest.mark.parametrize("strategy", ["packed", "padded"])
def test_weights_that_come_to_lie_where_others_lay_are_not_taken_for_them(strategy: Strategy) -> None:
    experts, x, choice, weight = case(torch.float32)
    base, through = experts.weights.detach().clone(), Through(experts, strategy, dispatch(choice, weight, 4))
    with torch.no_grad():
        for nth in range(20):
            other = base * (0.5 + nth / 10)  # freed in every round, so that the next one's memory may be the same
            y = functional_call(through, {"experts.weights": other}, x)
            assert apart(y, weighted(experts.widths, other, x, choice, weight)) < 2e-6
            del other


@here
def test_an_optimiser_whose_writes_torch_does_not_count_is_followed() -> None:
    experts, x, choice, weight = case(torch.float32)
    to = dispatch(choice, weight, 4)
    optimiser = torch.optim.SGD(experts.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        before = experts.run("packed", x, to)
    version = experts.weights._version
    experts.run("packed", x, to).square().sum().backward()
    optimiser.step()
    assert experts.weights._version == version  # or this shows nothing
    with torch.no_grad():
        y = experts.run("packed", x, to)
    assert not torch.allclose(y, before)
    assert apart(y, weighted(experts.widths, experts.weights.detach(), x, choice, weight)) < 2e-6


@here
def test_a_file_of_experts_holds_their_weights_once() -> None:
    experts, x, choice, weight = case(torch.float32)
    before, after = io.BytesIO(), io.BytesIO()
    torch.save(experts, before)
    with torch.no_grad():
        experts.run("packed", x, dispatch(choice, weight, 4))
    torch.save(experts, after)
    assert after.tell() == before.tell()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_it_packed_has_another_way_and_says_why(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_experts, "_why_not", lambda device, dtype: "there is no C++ compiler")
    experts, x, choice, weight = case(dtype)
    to = dispatch(choice, weight, 4)
    with torch.no_grad():
        y = experts.run("packed", x, to)
        wanted = experts.double().run("sequential", x.double(), to)
    assert apart(y, wanted) < {**BOUNDS, torch.float64: 1e-12}[dtype] * 2
    assert experts.how().endswith("; the fused operator cannot be had: there is no C++ compiler")


@here
def test_what_a_caller_has_switched_on_does_not_spoil_the_trial() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        assert fused_experts._trouble.__wrapped__() is None


def test_an_operator_that_cannot_be_had_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise compiled.Uncompiled("there is no C++ compiler")

    monkeypatch.setattr(compiled, "load", refuse)
    assert fused_experts._trouble.__wrapped__() == "there is no C++ compiler"


@here
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda *given: given[-1].zero_(), "its results in torch.float32 are 1.0e+00 from plain products'"),
        (lambda *given: given[-1].fill_(float("nan")), "its results in torch.float32 are nan from plain products'"),
        (lambda *given: torch.ones(2) @ torch.ones(3), "it fails in torch.float32: inconsistent tensor size"),
    ],
)
def test_an_operator_that_is_wrong_is_not_used(
    does: Callable[..., Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_experts, "run", does)
    found = fused_experts._trouble.__wrapped__()
    assert found is not None
    assert found.startswith(said)


def test_other_devices_and_dtypes_are_refused_by_name() -> None:
    assert fused_experts.why_not(torch.empty(1, device="meta")) == "it is for CPUs, and the model is on meta"
    said = fused_experts.why_not(torch.empty(1, dtype=torch.float16))
    assert said == "it is for float32 and bfloat16, and the model is in torch.float16"
