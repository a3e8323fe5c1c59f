"""The log of a training, `log.jsonl`: one JSON object a line.

| kind | what |
|---|---|
| start | recipe and its hash, versions, device, threads, trainable parameters, items, share of them that was cut |
| step | step (1-based), loss, lm (nats a token), gate (the regulariser before its weight: LayerRoute's mean σ, HeRo's |
|      | mean (Σ g)²), skip (share skipping each layer: of LayerRoute's sequences, of HeRo's predicted tokens), |
|      | skip_rate, the method's own means (HeRo: sum_g, mean Σ g), grad_norm (before clipping), lr, tokens, |
|      | tokens_per_s, seconds |
| held_out | step, stored (the dtype, once the finished checkpoint is evaluated), figures (see `train.held_out`), and |
|      | the method's constants, a list over its layers (HeRo: forget factor, ρ) |
| resumed | step the training was taken up from |
| end | seconds of training in all |

A resumed training drops the lines past the state it is taken up from, so that every step is there once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from profiler.errors import InputError

NAME = "log.jsonl"


class Log:
    """The log in `folder`, which is made if need be. Lines are flushed as they are written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = open(folder / NAME, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def clear(self) -> None:
        """Forget every line."""
        self._replace([])

    def cut_back(self, step: int) -> float:
        """Forget what came after the state of `step`, and return the seconds of training up to there."""
        kept = [
            line
            for line in read(self._folder)
            if line["kind"] != "end" and line.get("step", 0) <= step and line.get("stored") is None
        ]
        self._replace(kept)
        return max((float(line.get("seconds", 0.0)) for line in kept), default=0.0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        part, path = self._folder / f".{NAME}", self._folder / NAME
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self._file.close()
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115


def read(folder: Path) -> list[dict[str, Any]]:
    """Every line of a folder's log; a last line cut off by a kill is left out.

    Raises:
        InputError: there is no log, or a line before the last is not JSON.
    """
    path = folder / NAME
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"training log {path}: cannot be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise InputError(f"training log {path}: line {number}: not JSON: {error}") from error
    return found
