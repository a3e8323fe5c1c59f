"""States a training can be taken up from: one folder a step, written aside and renamed, so that each is whole.

`step-00000020/` holds `state.json` (format, step, hash of the recipe) and `state.safetensors` (every trainable and
AdamW's two moments, exactly as they were). Order of the text and dropout follow from seed and step, so they need no
state. Only JSON and safetensors are read, never pickles.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.errors import InputError
from profiler.execution.checkpoint_files import read_json, read_tensors

FORMAT = 1
_FACTS, _TENSORS = "state.json", "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path, step: int, recipe_sha256: str, parameters: dict[str, nn.Parameter], adamw: torch.optim.AdamW
) -> None:
    """Write the state after `step` updates under `folder`, then drop the earlier ones."""
    final, part = folder / f"step-{step:08d}", folder / f".part-{step:08d}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {f"value.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        tensors |= {f"{moment}.{name}": adamw.state[parameter][moment] for moment in _MOMENTS}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part / _TENSORS)
    facts = {"format": FORMAT, "step": step, "recipe_sha256": recipe_sha256}
    (part / _FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    for written in (*part.iterdir(), part):
        _flush(written)
    if final.exists():  # the run before was killed after this very step
        shutil.rmtree(final)
    os.rename(part, final)
    _flush(folder)
    for other in _states(folder):
        if other != final:
            shutil.rmtree(other)


def latest(folder: Path) -> Path | None:
    """The last whole state under `folder`, or None."""
    return max(_states(folder), default=None)


def restore(state: Path, recipe_sha256: str, parameters: dict[str, nn.Parameter], adamw: torch.optim.AdamW) -> int:
    """Put a state back, in place.

    Returns:
        The number of updates it was taken after.

    Raises:
        InputError: unreadable, of another format, or of another recipe.
    """
    facts = read_json(state, _FACTS)
    if facts.get("format") != FORMAT or not isinstance(facts.get("step"), int):
        raise InputError(f"training state {state}: its format is {facts.get('format')!r}, this version reads {FORMAT}")
    if facts.get("recipe_sha256") != recipe_sha256:
        raise InputError(
            f"training state {state}: it is of another recipe (hash {str(facts.get('recipe_sha256'))[:12]}, this one "
            f"has {recipe_sha256[:12]}); resume with the recipe it began with, or take another --out"
        )
    step = int(facts["step"])
    kinds = ("value", *_MOMENTS)
    shapes = {f"{kind}.{name}": tuple(p.shape) for kind in kinds for name, p in parameters.items()}
    found = read_tensors(state, _TENSORS, shapes)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found[f"value.{name}"])
            moments: dict[str, Tensor] = {m: found[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS}
            adamw.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
