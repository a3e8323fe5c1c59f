"""What a training's log tells: curves by step, skips by layer, held-out figures by domain, and how it was made.

A training folder holds `log.jsonl` (its format: `profiler.training_log`) and `recipe.yaml`; so does a checkpoint that
ships, and what a run keeps of an arm's checkpoint (`RUN/training/ARM`). No method is known by name here: a log of any
method with the same lines is read alike.

Held-out figures of a training are its own: gates see what they see in training, which for a method that decides on
whole sequences includes the words being scored. What a run scores on held-out text is in `quality`.

Legend: L routed layers, K updates of which the log has skips by layer (one that ships has them of every tenth).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from analysis.wording import how_many
from profiler import training_log
from profiler.errors import InputError
from profiler.store import Run

RECIPE = "recipe.yaml"
#: Folder of a run in which it keeps the logs of its arms' checkpoints, one folder an arm.
IN_RUN = "training"
#: Key of a log's line → column. `loss` is what was minimised; `regulariser` comes before its weight.
_STEP_KEYS = {
    "step": "step", "loss": "loss", "lm": "lm_nats_per_token", "gate": "regulariser", "skip_rate": "skip_rate",
    "grad_norm": "gradient_norm", "lr": "learning_rate", "tokens": "tokens", "tokens_per_s": "tokens_per_s",
    "seconds": "seconds",
}  # fmt: skip
STEP_COLUMNS = tuple(_STEP_KEYS.values())
HELD_OUT_COLUMNS = (
    "step", "stored", "domain", "sequences", "tokens", "open_nats_per_token", "routed_nats_per_token", "skip_rate",
    "deciding",
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """One training, finished or not.

    Attributes:
        name: of its recipe.
        sentence: how it stands; `finished` whether it came to its end.
        facts: (name, value) pairs.
        recipe: the recipe as resolved, YAML; None where the folder has none.
        steps: a row an update, columns `STEP_COLUMNS`; shares of 1, nats, seconds of training so far.
        skip_steps: the K updates of which `skip_LK` tells.
        skip_LK: `[L, K]`, share of the update's deciders (sequences or tokens) that skipped each routed layer.
        held_out: a row an evaluation and domain, columns `HELD_OUT_COLUMNS`. `open`: every gate open; `routed`: as the
            router decides; `deciding`: layers that some of the domain skip and others run; `stored`: the type that the
            finished checkpoint keeps its numbers in, None for the values in training.
        held_out_skips: domain → `[L]`, share that skips each routed layer, at the last evaluation.
    """

    name: str
    sentence: str
    finished: bool
    facts: list[tuple[str, str]]
    recipe: str | None
    steps: pd.DataFrame
    skip_steps: list[int]
    skip_LK: NDArray[np.float64]
    held_out: pd.DataFrame
    held_out_skips: dict[str, NDArray[np.float64]]

    @property
    def skipped(self) -> bool:
        """Whether anything was skipped at all: never where experts stand in for a layer, whatever they take."""
        return bool((self.steps["skip_rate"] > 0).any() or (self.held_out["skip_rate"] > 0).any())


def is_training(folder: Path) -> bool:
    """Whether the folder holds a training's log."""
    return (folder / training_log.NAME).is_file()


def trainings(run: Run) -> dict[str, Training]:
    """Arm → the training of its checkpoint, for the arms whose checkpoint came with a log; in the manifest's order."""
    folders = {arm.name: run.path / IN_RUN / arm.name for arm in run.manifest.arms}
    return {arm: training(folder) for arm, folder in folders.items() if is_training(folder)}


def all_under(root: Path) -> list[Path]:
    """Folders with a log: trainings at or directly below `root`, then what runs there keep of their arms."""
    places = (root, *sorted(root.glob("*")), *sorted(root.glob(f"{IN_RUN}/*")), *sorted(root.glob(f"*/{IN_RUN}/*")))
    return [folder for folder in places if is_training(folder)]


def training(folder: Path) -> Training:
    """Read a training folder.

    Raises:
        InputError: there is no log, or a line of it is not what `profiler.training_log` describes.
    """
    lines = training_log.read(folder)
    path = folder / training_log.NAME
    try:
        recipe = (folder / RECIPE).read_text(encoding="utf-8")
    except OSError:
        recipe = None
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault(str(line.get("kind")) if isinstance(line, dict) else "None", []).append(line)
    try:
        steps = [{column: line[key] for key, column in _STEP_KEYS.items()} for line in by_kind.get("step", [])]
        skips = {int(line["step"]): line["skip"] for line in by_kind.get("step", []) if "skip" in line}
        skip_KL = np.array(list(skips.values()), dtype=np.float64).reshape(len(skips), -1 if skips else 0)
        evaluated = by_kind.get("held_out", [])
        held_out = [row for line in evaluated for row in _evaluation(line)]
        last = {
            domain: np.array(figures["skip"], dtype=np.float64)
            for domain, figures in (evaluated[-1]["figures"] if evaluated else {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"training log {path}: a line is not as a training writes it: {error!r}") from error
    start = by_kind.get("start", [{}])[0]
    finished = "end" in by_kind
    return Training(
        name=str(start.get("recipe", folder.name)),
        sentence=_sentence(steps, _planned(recipe), finished, len(by_kind.get("resumed", []))),
        finished=finished,
        facts=_facts(start, steps),
        recipe=recipe,
        steps=pd.DataFrame(steps, columns=list(STEP_COLUMNS)),
        skip_steps=list(skips),
        skip_LK=skip_KL.T,
        held_out=pd.DataFrame(held_out, columns=list(HELD_OUT_COLUMNS)),
        held_out_skips=last,
    )


def _evaluation(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "step": line["step"],
            "stored": line["stored"],
            "domain": domain,
            "sequences": figures["sequences"],
            "tokens": figures["tokens"],
            "open_nats_per_token": figures["open"],
            "routed_nats_per_token": figures["routed"],
            "skip_rate": figures["skip_rate"],
            "deciding": figures["deciding"],
        }
        for domain, figures in line["figures"].items()
    ]


def _planned(recipe: str | None) -> int | None:
    """Updates that the recipe asks for."""
    try:
        found = yaml.safe_load(recipe or "")
    except yaml.YAMLError:
        return None
    steps = found.get("training", {}).get("steps") if isinstance(found, dict) else None
    return steps if isinstance(steps, int) else None


def _sentence(steps: Sequence[Mapping[str, Any]], planned: int | None, finished: bool, resumed: int) -> str:
    done = f"{len(steps):,} of {how_many(planned, 'update')}" if planned is not None else how_many(len(steps), "update")
    again = f", taken up again {resumed} times" if resumed > 1 else ", taken up again once" if resumed else ""
    return f"{'Finished' if finished else 'Not finished'}, {done}{again}."


def _facts(start: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    facts = []
    for key, name, say in (
        ("recipe_sha256", "recipe sha256", str),
        ("trainable_parameters", "trainable parameters", "{:,}".format),
        ("items", "items of text", "{:,}".format),
        ("items_cut", "items cut to the length", "{:.1%}".format),
        ("device", "device", str),
        ("threads", "threads", str),
    ):
        if key in start:
            facts.append((name, say(start[key])))
    facts += [(f"{name} version", str(version)) for name, version in dict(start.get("versions", {})).items()]
    if steps:
        facts.append(("seconds of training", f"{steps[-1]['seconds']:,.0f}"))
    return facts


def in_windows(steps: Sequence[int], values_LK: NDArray[np.float64], at_most: int) -> tuple[list[str], NDArray[Any]]:
    """`[L, K]` values of these steps as means over at most `at_most` windows of equally many (the last may have fewer).

    Returns:
        A label a window (`7`, or `7 to 9`), and `[L, windows]` means.
    """
    size = max(1, -(-len(steps) // at_most))
    starts = range(0, len(steps), size)
    parts = [slice(start, min(start + size, len(steps))) for start in starts]
    labels = [
        str(steps[part.start]) if part.stop - part.start == 1 else f"{steps[part.start]} to {steps[part.stop - 1]}"
        for part in parts
    ]
    return labels, np.stack([values_LK[:, part].mean(axis=1) for part in parts], axis=1)
