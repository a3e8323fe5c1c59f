"""The depth memory: both forms against sums written out, and equal to each other; sizes and costs by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from profiler.execution.depth_memory import (
    EPSILON,
    DualMemory,
    Form,
    MatrixMemory,
    cheaper,
    flops_per_row,
    memory_of,
    numbers,
    phi,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reads(memory: MatrixMemory | DualMemory, q_JNm: Tensor, k_JNm: Tensor, v_JNm: Tensor) -> Tensor:
    """c_1, c_2, …, with the read before the write at each depth: `[J, N, m]`."""
    state, found = None, []
    for j, (q, k, v) in enumerate(zip(q_JNm, k_JNm, v_JNm, strict=True), start=1):
        found.append(memory.read(state, phi(q), j))
        if j < len(q_JNm):
            state = memory.write(state, phi(k), v, j)
    return torch.stack(found)


def by_hand(rho: list[float], q_JNm: Tensor, k_JNm: Tensor, v_JNm: Tensor) -> Tensor:
    """Σ over earlier depths of decay · ⟨φ(q), φ(k)⟩ · v ÷ the same without v, number by number."""
    found = torch.zeros_like(q_JNm)
    for n in range(q_JNm.shape[1]):
        for j in range(len(rho)):
            above, below = torch.zeros(q_JNm.shape[2], dtype=torch.float64), EPSILON
            for i in range(j):
                share = 1.0
                for between in range(i + 1, j):
                    share *= rho[between]
                share *= sum(
                    (x + 1 if x > 0 else math.exp(x)) * (y + 1 if y > 0 else math.exp(y))
                    for x, y in zip(q_JNm[j, n].tolist(), k_JNm[i, n].tolist(), strict=True)
                )
                above, below = above + share * v_JNm[i, n], below + share
            found[j, n] = above / below
    return found


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("form", ["matrix", "dual"])
@pytest.mark.parametrize("rho", [[0.98] * 5, [0.1, 0.9, 0.5, 0.7, 0.3], [0.0] * 5, [1.0] * 5, [0.4]])
def test_each_form_is_the_sum_written_out(form: Form, rho: list[float], gradients: bool) -> None:
    q, k, v = (drawn(len(rho), 3, 4, seed=seed) for seed in range(3))
    with torch.set_grad_enabled(gradients):
        found = reads(memory_of(form, torch.tensor(rho, dtype=torch.float64)), q, k, v)
    assert torch.allclose(found, by_hand(rho, q, k, v), rtol=1e-12, atol=1e-14)
    assert not found[0].any()  # nothing was written yet


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**31))
def test_the_two_forms_are_equal(depths: int, rows: int, width: int, seed: int) -> None:
    rho = torch.sigmoid(drawn(depths, seed=seed))
    q, k, v = (3 * drawn(depths, rows, width, seed=seed + i) for i in (1, 2, 3))
    matrix, dual = (reads(memory_of(form, rho), q, k, v) for form in ("matrix", "dual"))
    assert torch.allclose(matrix, dual, rtol=1e-10, atol=1e-12)


def test_the_two_forms_have_equal_gradients() -> None:
    found = []
    forms: tuple[Form, ...] = ("matrix", "dual")
    for form in forms:
        leaves = [drawn(4, 2, 3, seed=seed).requires_grad_() for seed in range(3)]
        eta = drawn(4, seed=5).requires_grad_()
        reads(memory_of(form, torch.sigmoid(eta)), *leaves).square().sum().backward()
        found.append([leaf.grad for leaf in (*leaves, eta)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
        assert bool(mine.any())


def test_one_written_value_is_what_is_read_and_a_zero_query_reads_finite_numbers() -> None:
    """With one entry the weights cancel: c_2 = v_1, up to ε."""
    for form in ("matrix", "dual"):
        memory = memory_of(form, torch.tensor([0.5, 0.5], dtype=torch.float64))
        state = memory.write(None, phi(torch.zeros(1, 2, dtype=torch.float64)), torch.tensor([[3.0, -1.0]]).double(), 1)
        read = memory.read(state, phi(torch.zeros(1, 2, dtype=torch.float64)), 2)
        assert torch.allclose(read, torch.tensor([[3.0, -1.0]]).double() * 2 / (2 + 1e-6), rtol=1e-14)


def test_an_order_weighs_each_entry_as_if_it_stood_elsewhere() -> None:
    rho = [0.9, 0.2, 0.5]
    memory = DualMemory(torch.tensor(rho, dtype=torch.float64))
    q, k, v = (drawn(3, 2, 4, seed=seed) for seed in range(3))
    state = memory.write(memory.write(None, phi(k[0]), v[0], 1), phi(k[1]), v[1], 2)
    kept = memory.read(state, phi(q[2]), 3, torch.tensor([[0, 1], [0, 1]]))
    assert torch.equal(kept, memory.read(state, phi(q[2]), 3))
    turned = memory.read(state, phi(q[2]), 3, torch.tensor([[1, 0], [0, 1]]))
    # At depth 3 the first entry has decayed by ρ_2 = 0.2 and the second not at all; turned, the other way round.
    first, second = ((phi(q[2, 0]) @ phi(k[i, 0])) for i in (0, 1))
    wanted = (first * v[0, 0] + 0.2 * second * v[1, 0]) / (first + 0.2 * second + 1e-6)
    assert torch.allclose(turned[0], wanted, rtol=1e-12)
    assert torch.equal(turned[1], kept[1])


def test_no_row_sees_another() -> None:
    rho = torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64)
    q, k, v = (drawn(3, 4, 5, seed=seed) for seed in range(3))
    for form in ("matrix", "dual"):
        alone = torch.cat([reads(memory_of(form, rho), q[:, [i]], k[:, [i]], v[:, [i]]) for i in range(4)], dim=1)
        assert torch.allclose(alone, reads(memory_of(form, rho), q, k, v), rtol=1e-13)


def test_sizes_and_costs() -> None:
    assert numbers("matrix", 64, 16) == 4160  # METHODS §1: 64·64 + 64
    assert numbers("dual", 64, 16) == 15 * 128
    assert flops_per_row("matrix", 64, 1) == flops_per_row("dual", 64, 1) == 0
    assert flops_per_row("matrix", 64, 2) == flops_per_row("matrix", 64, 9) == 2 * 64 * 65
    assert flops_per_row("dual", 64, 9) == 2 * 64 * 8 + 2 * 8 * 64
    # Numbers moved by the layers that write: 3·m·(m + 1) each against 2m·j, alike at L_R = 3·(m + 1).
    assert [cheaper(64, layers) for layers in (1, 15, 16, 195, 196)] == ["dual"] * 4 + ["matrix"]


def test_phi_is_elu_plus_one() -> None:
    assert torch.allclose(phi(torch.tensor([-2.0, 0.0, 3.0])), torch.tensor([math.exp(-2), 1.0, 4.0]))
