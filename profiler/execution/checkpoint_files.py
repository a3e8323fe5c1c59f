"""Reading what a method saved: JSON facts and named tensors, every way it can be wrong told in one sentence.

Only JSON and safetensors are read, never pickles. Not here: what the facts and tensors mean (methods, `lora`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from profiler.errors import InputError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in `folder/name`.

    Raises:
        InputError: missing, unreadable, not JSON, or not an object.
    """
    try:
        facts = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        missing = f"there is no {name} in it" if folder.is_dir() else "there is no such folder"
        raise InputError(f"checkpoint {folder}: {missing}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"checkpoint {folder}: {name} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"checkpoint {folder}: {name} must hold a JSON object, and it holds a {type(facts).__name__}")
    return facts


def read_tensors(
    folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]], *, part: bool = False
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must be exactly those of `shapes`, with finite values.

    `part`: the file may hold others too.

    Raises:
        InputError: unreadable, a name missing or too many, another shape, a value that is not finite.
    """
    try:
        found: dict[str, Tensor] = load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"checkpoint {folder}: {name} cannot be read: {error}") from error
    missing, extra = sorted(set(shapes) - set(found)), sorted(set(found) - set(shapes)) if not part else []
    if missing or extra:
        raise InputError(
            f"checkpoint {folder}: {name} has {len(found)} tensors and this model needs {len(shapes)}: "
            f"missing tensors {missing[:3]}, unexpected tensors {extra[:3]}"
        )
    for key, shape in shapes.items():
        if tuple(found[key].shape) != shape:
            raise InputError(
                f"checkpoint {folder}: {key} has shape {list(found[key].shape)}, this model needs {list(shape)}"
            )
        if not found[key].is_floating_point() or not bool(torch.isfinite(found[key]).all()):
            raise InputError(f"checkpoint {folder}: {key} holds values that are not finite")
    return found
