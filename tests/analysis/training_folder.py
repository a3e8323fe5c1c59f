"""A training's folder by hand: three updates of six, two layers, two domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECIPE = "name: by-hand\ntraining:\n  steps: 6\n"
START = {
    "kind": "start", "recipe": "by-hand", "recipe_sha256": "ab12", "versions": {"torch": "2.9"}, "device": "a CPU",
    "threads": 2, "trainable_parameters": 1234, "items": 40, "items_cut": 0.125,
}  # fmt: skip


def update(step: int, skip: list[float] | None, **more: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "step", "step": step, "loss": 3.0 - step, "lm": 2.5 - step, "gate": 0.5}
    line |= {} if skip is None else {"skip": skip}
    line |= {"skip_rate": 0.25, "grad_norm": 10.0 * step, "lr": 1e-3, "tokens": 100, "tokens_per_s": 50.0}
    return {**line, "seconds": 2.0 * step, **more}


def evaluation(step: int, stored: str | None, **routed: float) -> dict[str, Any]:
    figures = {
        domain: {
            "sequences": 4, "tokens": 90, "open": 1.5, "routed": nats, "skip": [0.0, 0.5], "skip_rate": 0.25,
            "deciding": 1,
        }
        for domain, nats in routed.items()
    }  # fmt: skip
    return {"kind": "held_out", "step": step, "stored": stored, "figures": figures}


LINES = [
    START,
    evaluation(0, None, math=4.0, tool_call=5.0),
    update(1, [0.0, 1.0]),
    update(2, None),
    {"kind": "resumed", "step": 2},
    update(3, [0.25, 0.75]),
    evaluation(3, "float16", math=2.0, tool_call=3.0),
]


def write_training(folder: Path, lines: list[Any] = LINES, recipe: str | None = RECIPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe)
    return folder
