"""Which backbone a checkpoint belongs to: the facts it must share with a model, and a sample of the weights themselves.

Not here: what else a checkpoint holds (methods), and reading its files (`checkpoint_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from profiler.errors import InputError
from profiler.execution.decoder import Decoder
from profiler.execution.lora import sample

#: Relative distance between two backbones' sampled weights above which they are not the same model. Rounding to
#: bfloat16 moves it by 0.002, four-bit quantisation by about 0.1; unrelated weights are 1.4 apart.
SAME_BACKBONE = 0.35


def backbone_facts(dec: Decoder, method: str) -> dict[str, Any]:
    """What a checkpoint of `method` and a model must agree on, word for word."""
    config = dec.model.config
    return {
        "method": method,
        "architecture": type(dec.model).__name__,
        "layers": len(dec.blocks),
        "hidden_size": dec.hidden_size,
        "attention_heads": int(config.num_attention_heads),
        "key_value_heads": int(config.num_key_value_heads),
    }


def base_sample(dec: Decoder) -> list[float]:
    """A few of the backbone's weights, for a checkpoint to be told by."""
    return [round(value, 6) for value in sample(dec).tolist()]


def refuse_another_backbone(folder: Path, facts: Mapping[str, Any], dec: Decoder, method: str) -> None:
    """Check that a checkpoint's facts are those of this model.

    Raises:
        InputError: they are not; both sides are named.
    """
    for key, value in backbone_facts(dec, method).items():
        if facts.get(key) != value:
            raise InputError(f"checkpoint {folder}: its {key} is {facts.get(key)!r}, this model's is {value!r}")
    listed, mine = facts.get("base_sample"), sample(dec)
    numbers = listed if isinstance(listed, list) and all(isinstance(n, int | float) for n in listed) else []
    if len(numbers) != len(mine):
        raise InputError(
            f"checkpoint {folder}: config.json must hold a base_sample of {len(mine)} numbers, and it holds "
            f"{len(numbers)}"
        )
    theirs = torch.tensor(numbers, dtype=torch.float32)
    distance = float((theirs - mine).norm() / theirs.norm().clamp(min=1e-12))
    if not distance <= SAME_BACKBONE:
        raise InputError(
            f"checkpoint {folder}: it was trained on {facts.get('base') or 'another backbone'}; this model has its "
            f"shape and other weights (sampled weights differ by {distance:.0%}, at most {SAME_BACKBONE:.0%})"
        )
