"""Products of rows and weights by oneDNN, where torch itself would call another library: float32 on a CPU.

Equal to `torch.nn.functional.linear` to rounding. Which library is faster is a matter of processor and row count (seen,
an FFN of SmolLM2 on an AMD EPYC: 1.35 against 0.63 ms at 2 rows, 8.1 against 6.9 at 256, 30 against 27 at 1,024). In
bfloat16 and float16 torch calls oneDNN anyway.

oneDNN compiles a product for each number of rows it meets (seen: 0.7 ms), and keeps about a thousand. Where a router
decides how many rows there are, nearly every layer of every step brings a number not met before; `filled` rounds them
up, so that there are few.

`laid` is a weight in the layout oneDNN multiplies in. A product of few rows then takes half as long or less, because
plain weights are laid out anew in every product (seen, `[1664, 512]` and 2 rows: 161 against 88 µs in bfloat16, 527
against 168 in float32; at 200 rows 930 against 820, and 2.6 against 1.6 ms). It is another copy.

For inference. Not here: when it is worth it (`row_trials`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Beyond `FEW` rows, numbers of rows are rounded up to multiples of this.
MULTIPLE, FEW = 8, 8
#: From so many rows on a small product makes up for what it costs to call oneDNN (seen: 60 µs).
MANY = 256


def offered(like: Tensor) -> bool:
    """Whether `linear` is another product than torch's for tensors like this one."""
    return (
        like.device.type == "cpu"
        and like.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def compiled(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's own product is compiled for each number of rows."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and torch.backends.mkldnn.is_available()


def filled(rows: int) -> int:
    """The number of rows to multiply where so many are wanted."""
    return rows if rows <= FEW else -(-rows // MULTIPLE) * MULTIPLE


def linear(x_nd: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, by oneDNN where that is `offered`."""
    return multiply(x_nd, weight, bias) if offered(x_nd) else F.linear(x_nd, weight, bias)


def laid_out(like: Tensor) -> bool:
    """Whether tensors like this one can be multiplied with weights in oneDNN's layout."""
    if like.dtype == torch.bfloat16:
        return compiled(like.dtype, like.device) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return offered(like)


def laid(weight: Tensor) -> Tensor:
    """A weight `[out, in]` in oneDNN's layout, as `multiply` takes it."""
    y: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return y


def multiply(x_nd: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b by oneDNN, of a weight in its layout or in torch's."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x_nd, weight, bias, "none", [], "")
    return y


class Product:
    """x·Wᵀ + b of a weight that is nobody else's: for many rows in oneDNN's layout where there is one, else torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` `[out, in]`."""
        self._weight, self._bias = weight.contiguous(), bias
        self._laid = laid(self._weight) if laid_out(weight) else None

    def __call__(self, x_nd: Tensor) -> Tensor:
        """`[n, in]` → `[n, out]`."""
        if self._laid is None or len(x_nd) < MANY:
            return F.linear(x_nd, self._weight, self._bias)
        return multiply(x_nd, self._laid, self._bias)


def swiglu(mlp: Any, x_nd: Tensor) -> Tensor:
    """A decoder's feed-forward half, `[n, d]` → `[n, d]`; what lies between the products is overwritten."""
    gate = mlp.act_fn(linear(x_nd, mlp.gate_proj.weight, mlp.gate_proj.bias))
    gate.mul_(linear(x_nd, mlp.up_proj.weight, mlp.up_proj.bias))
    return linear(gate, mlp.down_proj.weight, mlp.down_proj.bias)


def other_swiglu(mlp: Any) -> Callable[[Tensor], Tensor] | None:
    """`swiglu` of this half; None where it is torch's own product, or would leave out what is around a plain one."""
    parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return partial(swiglu, mlp) if all(type(part) is nn.Linear and offered(part.weight) for part in parts) else None
