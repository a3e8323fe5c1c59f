"""HeRo's router in fewer products, for inference: equal to `history_router.PlainMath` to rounding.

Maps with a common input are stacked, and a linear map right after another is multiplied into it:

    [W_hd·diag(norm) ; W_ψ1] h̄               RMSNorm's 1/rms is one factor a row, applied after the product
    [W_q ; W_k ; W_v ; W_n] s                 with W_hu and the path encoder's second layer multiplied in
    W_θ1 [s ; c ; ν]                          the same; at the first layer, where c = 0 and ν = 0, of s alone

and what progress adds to the path encoder is a bias of the layer. Eager kernels cost a few microseconds each whatever
they do, so at few rows the number of them is the router's time; at many rows it is the passes over memory, so what is
multiplied next is written where the product reads it.

What is as large as the hidden states, and the memory, is kept and written over by the next forward (on a CPU, where
asking for fresh memory costs as much as the arithmetic; a GPU's allocator keeps it itself).

The folded weights are copies: whoever keeps one of these makes it anew when a parameter changes (`states`). No
gradients pass.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.execution.depth_memory import EPSILON, memory_of
from profiler.execution.history_router import (
    COMPARED,
    CONTENT,
    LOCAL,
    MEMORY,
    STATE,
    Encoded,
    HistoryRouter,
    Past,
    path_mask,
)
from profiler.execution.products import Product
from profiler.execution.room import Room


class FoldedMath:
    """Implements `history_router.Math` for one state of the router's parameters."""

    def __init__(self, router: HistoryRouter) -> None:
        self._variant = router.variant
        #: δ of odd and of even layers.
        self._delta = Room(), Room()
        with torch.no_grad():
            self._fold(router)

    def _fold(self, r: HistoryRouter) -> None:
        psi, psi_last = cast(nn.Linear, r.f_psi[0]), cast(nn.Linear, r.f_psi[2])
        self._psi_last = psi_last.weight, psi_last.bias
        if self._variant in LOCAL:
            self._input = Product(psi.weight, psi.bias)
            return
        self._width = r.norm.numel()
        self._epsilon = r.norm.new_tensor(EPSILON)
        self._input = Product(
            torch.cat([r.W_hd.weight * r.norm, psi.weight]), torch.cat([psi.bias.new_zeros(CONTENT), psi.bias])
        )

        path, path_last = cast(nn.Linear, r.path[0]), cast(nn.Linear, r.path[2])
        theta, theta_last = cast(nn.Linear, r.f_theta[0]), cast(nn.Linear, r.f_theta[2])
        weights = path.weight * path_mask(self._variant, path.weight)
        depths_L = torch.arange(1, r.layers + 1, device=weights.device, dtype=weights.dtype)
        progress_L2 = torch.stack([depths_L, r.layers - depths_L], dim=1) / r.layers
        self._path = weights[:, 2:].contiguous()
        self._path_bias_L = _product(progress_L2, weights[:, :2].T) + path.bias

        #: What a row has told of itself: both codes, whose second layers are multiplied in; then c and ν.
        self._coded = CONTENT if self._variant == "no_path" else STATE
        self._told = Room()

        def folded(of_state: Tensor) -> tuple[Tensor, Tensor]:
            """A map of s as one of the codes, and its bias."""
            content, coded = of_state[:, :CONTENT], of_state[:, CONTENT:]
            weight = _product(content, r.W_hu.weight)
            if self._variant == "no_path":
                return weight, weight.new_zeros(len(weight))
            weight = torch.cat([weight, _product(coded, path_last.weight)], dim=1)
            return weight, _product(coded, path_last.bias[:, None])[:, 0]

        head, bias = folded(theta.weight[:, :STATE])
        self._head, self._head_bias = torch.cat([head, theta.weight[:, STATE:]], dim=1), bias + theta.bias
        self._surprised_bias = self._head_bias + theta.weight[:, -1]
        if self._variant != "no_memory_read":
            self._state = folded(torch.cat([r.W_q.weight, r.W_k.weight, r.W_v.weight, r.W_n.weight]))
            self._context = r.W_c.weight
        self._theta_last = theta_last.weight, theta_last.bias
        self.memory = memory_of(r.form, r.rho_L())

    def residual_change(self, h_Nd: Tensor, past: Past, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Math`. The products of δ_j and δ_{j−1} are written over δ_{j−1}, whose room is δ_{j+1}'s."""
        delta = torch.sub(h_Nd, past.h_bar, out=self._delta[depth % 2].like(h_Nd, h_Nd.shape))
        d = torch.linalg.vector_norm(delta, dim=1)
        if past.delta is None:
            return d, torch.zeros_like(d), delta
        alike = torch.mul(delta, past.delta, out=past.delta).sum(dim=1)
        return d, alike.div_(torch.addcmul(self._epsilon, d, past.d)), delta

    def encode(self, h_Nd: Tensor, place: int | Tensor, path_N4: Tensor, depth: int) -> Encoded:
        """See `Math`."""
        entered = self._input(h_Nd)
        b = F.linear(F.silu(entered[:, CONTENT:]), *self._psi_last)[:, 0]
        length = torch.linalg.vector_norm(h_Nd, dim=1, keepdim=True)
        per_rms = torch.addcmul(self._epsilon, length, length, value=1 / self._width).rsqrt_()
        told = self._told.like(entered, (len(h_Nd), self._head.shape[1]))
        code = told[:, : self._coded]
        torch.mul(entered[:, :CONTENT], per_rms, out=told[:, :CONTENT])
        if self._variant != "no_path":
            torch.addmm(self._path_bias_L[place - 1], path_N4, self._path.T, out=told[:, CONTENT:STATE])
        F.silu(code, inplace=True)
        if self._variant == "no_memory_read":
            return Encoded(code, code, code, b, (told,))
        state = F.linear(code, *self._state)
        query_key = state[:, : 2 * MEMORY]
        # φ as e^min(x, 0) + max(x, 0): what ELU does with e^x − 1 takes longer.
        below = torch.clamp_max(query_key, 0).exp_()
        query_key.clamp_min_(0).add_(below)
        query, key, value, compared = state.split([MEMORY, MEMORY, MEMORY, COMPARED], dim=1)
        return Encoded(query, key, value, b, (told, compared))

    def judge(self, encoded: Encoded, c_Nm: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """See `Math`."""
        told, known, bias = encoded.rest[0], self._coded, self._head_bias
        if depth == 1:
            nu = torch.zeros_like(encoded.b)
        elif self._variant == "no_memory_read":  # c ≡ 0
            nu, bias = torch.ones_like(encoded.b), self._surprised_bias
        else:
            compared, seen = encoded.rest[1], F.linear(c_Nm, self._context)
            lengths = torch.linalg.vector_norm(compared, dim=1), torch.linalg.vector_norm(seen, dim=1)
            nu = 1 - torch.linalg.vecdot(compared, seen).div_(torch.addcmul(self._epsilon, *lengths))
            told[:, known:-1].copy_(c_Nm)
            told[:, -1].copy_(nu)
            known = told.shape[1]
        head = F.linear(told[:, :known], self._head[:, :known], bias)
        return F.linear(F.silu(head, inplace=True), *self._theta_last)[:, 0], nu

    def local(self, h_Nd: Tensor) -> Tensor:
        """See `Math`."""
        return F.linear(F.silu(self._input(h_Nd)), *self._psi_last)[:, 0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of small matrices, made once for many steps; a sum, so that no FLOP counter takes it for a step's work."""
    return (a[:, :, None] * b[None]).sum(1)
