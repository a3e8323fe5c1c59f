"""HeRo's router in fewer products, for inference: equal to `history_router.PlainMath` to rounding.

Maps with a common input are stacked, and a linear map right after another is multiplied into it:

    [W_hd·diag(norm) ; W_ψ1] h̄               RMSNorm's 1/rms is one factor a row, applied after the product
    [W_q ; W_k ; W_v ; W_n ; W_θ1|s] s        with W_hu and the path encoder's second layer multiplied in
    [W_c ; W_θ1|c] c                          not at the first layer, where c = 0

and what progress adds to the path encoder is a bias of the layer. Eager kernels cost a few microseconds each whatever
they do, so at few rows the number of them is the router's time.

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
    HEAD,
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

#: Rows of hidden states that stay in a core's cache.
_BLOCK = 256


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

        blind = self._variant == "no_memory_read"
        projections = [] if blind else [r.W_q.weight, r.W_k.weight, r.W_v.weight, r.W_n.weight]
        of_state = torch.cat([*projections, theta.weight[:, :STATE]])
        content, coded = of_state[:, :CONTENT], of_state[:, CONTENT:]
        folded, bias = [_product(content, r.W_hu.weight)], F.pad(theta.bias, (len(of_state) - HEAD, 0))
        if self._variant != "no_path":
            folded.append(_product(coded, path_last.weight))
            bias = bias + _product(coded, path_last.bias[:, None])[:, 0]
        self._state, self._state_bias = torch.cat(folded, dim=1), bias
        self._context = torch.cat([r.W_c.weight, theta.weight[:, STATE : STATE + MEMORY]])
        self._surprise = theta.weight[:, -1].contiguous()
        self._theta_last = theta_last.weight, theta_last.bias
        self.memory = memory_of(r.form, r.rho_L())

    def residual_change(self, h_Nd: Tensor, past: Past, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Math`. The products of δ_j and δ_{j−1} are written over δ_{j−1}, whose room is δ_{j+1}'s."""
        rows = len(h_Nd)
        delta, d = self._delta[depth % 2].like(h_Nd, h_Nd.shape), h_Nd.new_empty(rows)
        alike = torch.zeros_like(d) if past.delta is None else torch.empty_like(d)
        # On a CPU block by block, so that what was just written is still in the cache.
        block = rows if h_Nd.is_cuda else _BLOCK
        for start in range(0, rows, block):
            here = slice(start, start + block)
            change = torch.sub(h_Nd[here], past.h_bar[here], out=delta[here])
            torch.linalg.vector_norm(change, dim=1, out=d[here])
            if past.delta is not None:
                before = past.delta[here]
                torch.sum(torch.mul(change, before, out=before), dim=1, out=alike[here])
        return d, alike.div_(torch.addcmul(self._epsilon, d, past.d)), delta

    def encode(self, h_Nd: Tensor, place: int | Tensor, path_N4: Tensor, depth: int) -> Encoded:
        """See `Math`."""
        entered = self._input(h_Nd)
        b = F.linear(F.silu(entered[:, CONTENT:]), *self._psi_last)[:, 0]
        length = torch.linalg.vector_norm(h_Nd, dim=1, keepdim=True)
        per_rms = torch.addcmul(self._epsilon, length, length, value=1 / self._width).rsqrt_()
        code = F.silu(entered[:, :CONTENT] * per_rms, inplace=True)
        if self._variant != "no_path":
            bias = self._path_bias_L[place - 1]
            code = torch.cat([code, F.silu(torch.addmm(bias, path_N4, self._path.T), inplace=True)], dim=1)
        state = F.linear(code, self._state, self._state_bias)
        if self._variant == "no_memory_read":
            return Encoded(state, state, state, b, (state,))
        F.elu(state[:, : 2 * MEMORY], inplace=True).add_(1)  # φ of q and k
        query, key, value, compared, head = state.split([MEMORY, MEMORY, MEMORY, COMPARED, HEAD], dim=1)
        return Encoded(query, key, value, b, (head, compared))

    def judge(self, encoded: Encoded, c_Nm: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """See `Math`."""
        head = encoded.rest[0]
        if depth == 1:
            nu = torch.zeros_like(encoded.b)
        elif self._variant == "no_memory_read":
            nu = torch.ones_like(encoded.b)
            head = head + self._surprise
        else:
            compared = encoded.rest[1]
            context = F.linear(c_Nm, self._context)
            seen = context[:, :COMPARED]
            lengths = torch.linalg.vector_norm(compared, dim=1), torch.linalg.vector_norm(seen, dim=1)
            nu = 1 - torch.linalg.vecdot(compared, seen).div_(torch.addcmul(self._epsilon, *lengths))
            head = torch.addcmul(context[:, COMPARED:], nu[:, None], self._surprise).add_(head)
        return F.linear(F.silu(head), *self._theta_last)[:, 0], nu

    def local(self, h_Nd: Tensor) -> Tensor:
        """See `Math`."""
        return F.linear(F.silu(self._input(h_Nd)), *self._psi_last)[:, 0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of small matrices, made once for many steps; a sum, so that no FLOP counter takes it for a step's work."""
    return (a[:, :, None] * b[None]).sum(1)
