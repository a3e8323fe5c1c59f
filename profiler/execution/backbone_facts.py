"""Which backbone a checkpoint belongs to: the facts it must share with a model, and a sample of the weights themselves.

The facts are in a checkpoint's `config.json` and need no weights; the sample does. Not here: what else a checkpoint
holds (methods), and reading its files (`checkpoint_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from profiler.errors import InputError
from profiler.execution.checkpoint_files import read_json
from profiler.execution.decoder import Decoder
from profiler.execution.lora import sample

CONFIG_FILE = "config.json"
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


def checkpoint_facts(folder: Path, dec: Decoder, method: str, version: int) -> dict[str, Any]:
    """What a checkpoint says of itself, if it is one of `method`, of that format, and for a model of this shape.

    Args:
        folder: the checkpoint.
        dec: the model; it may be on the meta device.
        method: the arm's.
        version: the format that is read.

    Raises:
        InputError: `config.json` cannot be read, or says something else; both sides are named.
    """
    facts = read_json(folder, CONFIG_FILE)
    for key, mine in backbone_facts(dec, method).items():
        theirs = facts.get(key)
        if theirs is None:
            raise InputError(f"checkpoint {folder}: {CONFIG_FILE} must hold {key}, and it does not")
        if theirs != mine:
            told = _UNLIKE[key].format(theirs=theirs, mine=mine, s="" if theirs == 1 else "s")
            raise InputError(f"checkpoint {folder}: {told}")
    if facts.get("format") != version:
        raise InputError(f"checkpoint {folder}: its format is {facts.get('format')!r}, this version reads {version}")
    return facts


#: How a fact of `backbone_facts` that is not the model's is told.
_UNLIKE = {
    "method": "it was made by method {theirs}, and the arm's is {mine}",
    "architecture": "it was made for a {theirs}, this model is a {mine}",
    "layers": "it was made for {theirs} layer{s}, this model has {mine}",
    "hidden_size": "it was made for a hidden size of {theirs}, this model has {mine}",
    "attention_heads": "it was made for {theirs} attention head{s}, this model has {mine}",
    "key_value_heads": "it was made for {theirs} key-value head{s}, this model has {mine}",
}


def refuse_other_weights(folder: Path, facts: Mapping[str, Any], dec: Decoder) -> None:
    """Check that a checkpoint's sample of its backbone's weights is this model's.

    Raises:
        InputError: it is not, or there is none.
    """
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
