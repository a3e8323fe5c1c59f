"""HeRo checkpoints whose gates differ from token to token, as training would make them, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from profiler import methods
from profiler.arms import tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_hero(folder: Path, model: PreTrainedModel, variant: str = "full") -> Path:
    """A checkpoint for `model`: heads and adapters random, forget factors spread from 0.5 to 0.98."""
    handle = tree(model, "hero", methods.configure("hero", {"variant": variant}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in handle.trainables().items():
            if name.endswith(("f_theta.2.weight", "f_psi.2.weight")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif name.endswith("f_psi.2.bias"):
                parameter.zero_()
            elif name.endswith(".eta"):
                parameter.copy_(torch.linspace(0, 4, parameter.numel()))
            elif name.endswith("W2.weight"):
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    handle.save(folder)
    return folder
