"""`checkpoint: builtin`: the checkpoint that ships with the package for a method and a model.

Checkpoints are folders under `workloads/checkpoints`, told apart by the facts in their `config.json`; the method
itself checks that what it is given fits. An arm that asks for a variant gets the one trained as it, else the full
method's, whose parts it leaves out. Not here: writing one (`train`), and paths, which pass through.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The value of an arm's `checkpoint` option that is looked up here.
BUILTIN = "builtin"
#: The variant of a method that has all its parts, and of one that has no variants.
FULL = "full"
#: What of a model's shape a checkpoint's facts must equal.
_SHAPE = ("architecture", "layers", "hidden_size")


def builtin_checkpoints() -> dict[str, dict[str, Any]]:
    """Folder → facts of every checkpoint that ships, sorted by folder."""
    found = Path(str(importlib.resources.files("workloads") / "checkpoints")).glob("*/config.json")
    return {str(path.parent): json.loads(path.read_text(encoding="utf-8")) for path in sorted(found)}


def resolve(method: str, options: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """An arm's options with `checkpoint: builtin` replaced by the folder of the checkpoint for `model`.

    Raises:
        InputError: none ships for this method and a model of this shape.
    """
    if options.get("checkpoint") != BUILTIN:
        return options
    config = model.config
    shape = (type(model).__name__, int(config.num_hidden_layers), int(config.hidden_size))
    others: list[str] = []
    variants: dict[str, str] = {}
    for folder, facts in builtin_checkpoints().items():
        theirs = tuple(facts[key] for key in _SHAPE)
        variant = facts.get("options", {}).get("variant", FULL)
        if (facts["method"], theirs) == (method, shape):
            variants.setdefault(variant, folder)
        how = facts["method"] if variant == FULL else f"{facts['method']}, variant {variant}"
        others.append(f"{Path(folder).name} ({how}; {_words(theirs)})")
    if variants:
        found = variants.get(options.get("variant") or FULL) or variants.get(FULL) or next(iter(variants.values()))
        return {**options, "checkpoint": found}
    raise InputError(
        f"checkpoint: builtin: none ships for method {method!r} on this model ({_words(shape)}); "
        f"those that ship: {'; '.join(others) or 'none'}"
    )


def _words(shape: tuple[Any, ...]) -> str:
    return f"{shape[0]}, {shape[1]} layers of width {shape[2]}"
