"""The memory a token carries through depth: what the layers before wrote, read by a query (HeRo, formulas 11 and 12).

    c_j = φ(q_j)ᵀ S_{j−1} / (φ(q_j)ᵀ ζ_{j−1} + ε)                    φ(x) = ELU(x) + 1
    S_j = ρ_j S_{j−1} + φ(k_j) v_jᵀ     ζ_j = ρ_j ζ_{j−1} + φ(k_j)    S_0 = 0, ζ_0 = 0, so c_1 = 0

Two forms, equal by algebra. `matrix` keeps S and ζ, m·(m + 1) numbers a token. `dual` keeps the φ(k_i) and v_i of the
layers before and attends to them, each weighed by how far it has decayed:

    c_j = Σ_{i<j} w_{j,i} (φ(q_j)·φ(k_i)) v_i / (Σ_{i<j} w_{j,i} (φ(q_j)·φ(k_i)) + ε)     w_{j,i} = Π_{i<k<j} ρ_k

2·m numbers a token and layer, so it is the cheaper one while depth is small. Tokens never meet: the first dimension of
every tensor here is the token row.

A state is a plain tensor `[N, ...]`, or None before anything was written; what `write` returns takes its place. Depths
j count routable layers from 1, and the last one writes nothing, since nobody would read it.
Not here: where q, k, v and ρ come from (`history_router`), and when a state begins and ends (the method).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from profiler.execution.room import Room

Form = Literal["matrix", "dual"]

#: Added to every denominator of the method (ours).
EPSILON = 1e-6


def phi(x: Tensor) -> Tensor:
    """φ(x) = ELU(x) + 1, positive."""
    return F.elu(x) + 1


class MatrixMemory:
    """S with ζ as one more column, `[N, m, m + 1]`: reading a row of ones beside the values gives the denominator."""

    def __init__(self, rho_L: Tensor) -> None:
        """`rho_L`: the forget factor ρ_j of each routable layer."""
        self._rho_L = rho_L

    def read(self, state: Tensor | None, query_Nm: Tensor, depth: int) -> Tensor:
        """c_j `[N, m]` at depth j, of φ(q_j) `[N, m]`."""
        if state is None:
            return torch.zeros_like(query_Nm)
        both = torch.bmm(query_Nm[:, None, :], state)[:, 0]
        return both[:, :-1] / (both[:, -1:] + EPSILON)

    def write(self, state: Tensor | None, key_Nm: Tensor, value_Nm: Tensor, depth: int) -> Tensor:
        """The state after depth j, of φ(k_j) and v_j, both `[N, m]`."""
        outer = key_Nm[:, :, None] * F.pad(value_Nm, (0, 1), value=1.0)[:, None, :]
        return outer if state is None else self._rho_L[depth - 1] * state + outer


class DualMemory:
    """φ(k) and v side by side for each layer before, `[N, j − 1, 2m]`.

    Without gradients there is room for all layers at once, which the next forward's memory is written over.
    """

    def __init__(self, rho_L: Tensor) -> None:
        """`rho_L`: the forget factor ρ_j of each routable layer."""
        one = rho_L.new_ones(1)
        self._room = Room()
        #: Entry j: w_{j,i} for i < j, `[j − 1]`. ρ_1 is in none, since it decays an empty memory.
        self._weights = [
            torch.cat([one, rho_L[1 : depth - 1].flip(0)]).cumprod(0).flip(0) for depth in range(2, len(rho_L) + 1)
        ]

    def read(self, state: Tensor | None, query_Nm: Tensor, depth: int, order_NJ: Tensor | None = None) -> Tensor:
        """c_j `[N, m]` at depth j, of φ(q_j) `[N, m]`.

        `order_NJ`, for the control that shuffles history: entry i is weighed as if it stood at place `order[i]`
        (0-based, of j − 1).
        """
        if state is None:
            return torch.zeros_like(query_Nm)
        weights, width = self._weights[depth - 2], query_Nm.shape[1]
        state = state[:, : depth - 1]
        # As a row times a matrix: on a CPU, a matrix times a column takes six times as long.
        share_NJ = torch.bmm(query_Nm[:, None, :], state[:, :, :width].transpose(1, 2))[:, 0]
        share_NJ = share_NJ * (weights if order_NJ is None else weights[order_NJ])
        total_Nm = torch.bmm(share_NJ[:, None, :], state[:, :, width:])[:, 0]
        return total_Nm / (share_NJ.sum(1, keepdim=True) + EPSILON)

    def write(self, state: Tensor | None, key_Nm: Tensor, value_Nm: Tensor, depth: int) -> Tensor:
        """The state after depth j, of φ(k_j) and v_j, both `[N, m]`."""
        if torch.is_grad_enabled():
            entry = torch.cat([key_Nm, value_Nm], dim=1)[:, None]
            return entry if state is None else torch.cat([state, entry], dim=1)
        rows, width = key_Nm.shape
        if state is None:
            state = self._room.like(key_Nm, (rows, len(self._weights), 2 * width))
        torch.cat([key_Nm, value_Nm], dim=1, out=state[:, depth - 1])
        return state


def memory_of(form: Form, rho_L: Tensor) -> MatrixMemory | DualMemory:
    """The memory in one form, with these forget factors."""
    return MatrixMemory(rho_L) if form == "matrix" else DualMemory(rho_L)


def numbers(form: Form, width: int, layers: int) -> int:
    """Numbers one token holds at most, in a memory of `width` m over so many routable layers.

    What the last layer would write is read by nobody, and is not kept.
    """
    return width * (width + 1) if form == "matrix" else 2 * width * (layers - 1)


def flops_per_row(form: Form, width: int, depth: int) -> int:
    """FLOPs of the products of one read at depth j. Decaying and writing are no products, and are not counted."""
    if depth == 1:
        return 0
    return 2 * width * (width + 1) if form == "matrix" else 4 * width * (depth - 1)


def cheaper(width: int, layers: int) -> Form:
    """The form that moves fewer numbers for one token through all layers.

    A layer of `matrix` reads its state twice and writes it once, to read and to decay it; a layer of `dual` reads what
    is there and writes its own entry.
    """
    matrix = 3 * width * (width + 1) * (layers - 1)
    dual = sum(2 * width * depth for depth in range(1, layers))
    return "dual" if dual <= matrix else "matrix"
