"""Products over the first rows of a matrix, how many being known on the device only: `grouped_mm` with one group.

Nothing waits for the number. Rows past it hold anything, not-a-number included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from profiler.errors import InputError

#: grouped_mm wants rows of matrices to start at multiples of so many bytes.
ALIGNMENT = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_first(x: Tensor, weight: Tensor, bias: Tensor | None, count_1: Tensor) -> Tensor:
    """x·Wᵀ + b for the first `count` rows; the others hold anything. `weight` is `[out, in]`."""
    y = F.grouped_mm(x, weight.T[None], offs=count_1)
    return y if bias is None else y + bias


def swiglu_first(mlp: Any, x: Tensor, count_1: Tensor) -> Tensor:
    """A decoder's feed-forward half for the first `count` rows."""
    gate = linear_first(x, mlp.gate_proj.weight, mlp.gate_proj.bias, count_1)
    up = linear_first(x, mlp.up_proj.weight, mlp.up_proj.bias, count_1)
    return linear_first(mlp.act_fn(gate) * up, mlp.down_proj.weight, mlp.down_proj.bias, count_1)


def aligned(widths: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows of all these widths are as `grouped_mm` wants them."""
    return dtype in DTYPES and all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)


def refuse_grouped(hidden: int, inner: int, dtype: torch.dtype) -> None:
    """Check that `grouped` can multiply a feed-forward half of these widths.

    Raises:
        InputError: a dtype it does not know, or rows that are not aligned.
    """
    if dtype not in DTYPES:
        raise InputError(f"strategy grouped works in float32, bfloat16 and float16, and the model is in {dtype}")
    for name, width in (("hidden size", hidden), ("feed-forward width", inner)):
        if width * dtype.itemsize % ALIGNMENT:
            raise InputError(
                f"strategy grouped needs rows of a multiple of {ALIGNMENT} bytes: the model's {name} ({width}) "
                f"× {dtype.itemsize} bytes is none"
            )
