"""Memory that is written over from one forward to the next, because on a CPU fresh memory is not free.

Large tensors are given to the process page by page, each page being emptied first: for a subtraction of hidden states
that takes longer than to subtract. Not here: who may still be reading what is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Room:
    """One tensor's room, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def like(self, other: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of `shape`, of `other`'s dtype and device, that holds anything. The one given before is given up.

        On a GPU a fresh one: its allocator keeps memory itself.
        """
        size = prod(shape)
        if other.device.type != "cpu":
            return other.new_empty(tuple(shape))
        if self._held is None or self._held.numel() < size or self._held.dtype != other.dtype:
            with torch.inference_mode(False):  # else no other mode could write into it
                self._held = torch.empty(size, dtype=other.dtype)
        return self._held[:size].view(*shape)
