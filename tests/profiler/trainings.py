"""Trainings as tests look at them: interrupted on the way, their log by kind, their weights bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiler import training_log
from profiler.run import Quiet


class StopAt(Quiet):
    """Interrupts a training or a study once a share of it is done, as Ctrl-C would."""

    def __init__(self, share: float) -> None:
        self.share = share

    def at(self, share: float) -> None:
        if share >= self.share:
            raise KeyboardInterrupt


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a training's log that are of one kind."""
    return [line for line in training_log.read(folder) if line["kind"] == kind]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
