"""How likely a language model finds the tokens it was given. One definition for training and for held-out figures."""

from __future__ import annotations

import torch
from torch import Tensor

_IGNORED = -100


def token_nll(logits_BTV: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """−log p of each token given the ones before it, in nats: `[B, T − 1]`, entry t for token t + 1.

    Computed in float32 at least. 0 where there is nothing to predict: pads (`mask_BT` False) and what follows one.
    """
    real = mask_BT[:, 1:].bool() & mask_BT[:, :-1].bool()
    target = ids_BT[:, 1:].masked_fill(~real, _IGNORED)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    flat = logits_BTV[:, :-1].to(wide).flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(flat, target.flatten(), ignore_index=_IGNORED, reduction="none")
    return nll.view_as(target)


def predicted(mask_BT: Tensor) -> int:
    """Number of tokens `token_nll` predicts."""
    return int((mask_BT[:, 1:].bool() & mask_BT[:, :-1].bool()).sum())
