"""What two of HeRo's controls take from elsewhere: another place in a token's depth, or another token.

`shuffled_history` (ours): the depth positions of a token's path features and of its memory's entries are permuted,
drawn anew for each position in the sequence, so that no order is there to be learned, and the same in any company. The
memory alone would hardly tell: at ρ ≈ 0.98 the weights of its entries are alike.

`foreign_history` (ours): the memory read is that of the token before in the same sequence; the first token reads none.
A later token would tell the future, and in a decode step there is no other token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from profiler.errors import InputError
from profiler.execution.hashing import uniform
from profiler.execution.sequences import Sequences

FOREIGN, SHUFFLED = "foreign_history", "shuffled_history"


@dataclass(frozen=True)
class Around:
    """What these controls need to know of the rows of a step.

    Attributes:
        position_N: a token's position in its sequence.
        donor_N: row of the token before it in its sequence, anything where there is none.
        donated_N: whether there is one.
    """

    position_N: Tensor
    donor_N: Tensor
    donated_N: Tensor


def around(variant: str, sequences: Sequences, device: torch.device) -> Around | None:
    """What a variant needs of a step; None for the others.

    Raises:
        InputError: `foreign_history` in a step whose tokens have a past. The token before the first of them was in
            another step, and its memory ended with it.
    """
    if variant not in (FOREIGN, SHUFFLED):
        return None
    if variant == FOREIGN and any(sequences.past_S):
        later = next(name for name, past in zip(sequences.requests, sequences.past_S, strict=True) if past)
        raise InputError(
            "variant foreign_history reads the memory of the token before, and a decode step (here: request "
            f"{later!r}) does not hold it; run this control on whole sequences, without a cache"
        )
    position_N = sequences.row_positions(device)
    rows_N = torch.arange(len(position_N), device=device)
    if sequences.real_BT is not None:
        rows_N = torch.where(sequences.real_BT.flatten().to(device), rows_N, 0)
    before_N = torch.cat([rows_N.new_zeros(1), rows_N.cummax(0).values[:-1]])
    return Around(position_N, before_N, position_N > 0)


def shuffled_place(seed: int, position_N: Tensor, depth: int) -> Tensor:
    """Which of the depths 1..j a token is told about at depth j, `[N]`."""
    return (uniform(seed, position_N, depth, 0) * depth).long() + 1


def shuffled_order(seed: int, position_N: Tensor, depth: int) -> Tensor:
    """A permutation of the j − 1 entries of a token's memory, `[N, j − 1]`, 0-based.

    Entry i is weighed as if it stood at the place given.
    """
    draws = [uniform(seed, position_N, depth, entry) for entry in range(1, depth)]
    return torch.stack(draws, dim=1).argsort(dim=1)
