"""Numbers drawn from whole-number keys alone: the same on every device, in any order and any company.

A generator's next number depends on what was drawn before it; a draw that must be a token's own, whatever batch the
token is in, is a hash of what the token is. The mixer is SplitMix64's (Steele, Lea, Flood 2014), on int64 that wraps.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; the operator's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(*keys: int | Tensor) -> Tensor:
    """A number in [0, 1) for each combination of `keys`, float64.

    Args:
        keys: whole numbers and int64 tensors that broadcast; at least one tensor. Their order matters.
    """
    device = next(key.device for key in keys if isinstance(key, Tensor))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        state = _mixed(state ^ key)
    return _shifted(state, 11).double() * 2.0**-53
