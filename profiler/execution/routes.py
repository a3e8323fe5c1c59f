"""Forced routes: which layers run, decided by a rate and a seed instead of a router.

A forced route is synthetic and is labelled so wherever it is shown. It stands for a router of a given rate
when the question is what skipping could save, not what a trained router would choose.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

Pattern = Literal["random", "shared", "middle"]


class ForcedGates(BaseModel):
    """A synthetic route.

    Attributes:
        ratio: share of the routable layers that skip, for every request; rounded to whole layers.
        seed: of the draw.
        pattern: `random`, each request draws its own layers; `shared`, one draw for all requests;
            `middle`, the contiguous run of layers around the middle, for all requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(ge=0.0, le=1.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**32)
    pattern: Pattern = "shared"

    def label(self) -> str:
        """How reports name it."""
        return f"forced: {self.ratio:.0%} of layers skip, pattern {self.pattern}, seed {self.seed}"


class Route:
    """The layers each request runs under one `ForcedGates`, of `layers` routable layers."""

    def __init__(self, gates: ForcedGates, layers: int) -> None:
        self.gates = gates
        self.layers = layers
        # Half a layer rounds up: "30 % of 5" must not depend on the banker's rule.
        self.skipped = min(layers, math.floor(gates.ratio * layers + 0.5))
        self._known: dict[str, tuple[bool, ...]] = {}

    def open_layers(self, request: str) -> tuple[bool, ...]:
        """`[layers]`, True where the layer runs. The same request always gets the same answer, whatever its company."""
        key = request if self.gates.pattern == "random" else ""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._draw(key)
        return found

    def _draw(self, key: str) -> tuple[bool, ...]:
        skip = np.zeros(self.layers, dtype=bool)
        if self.gates.pattern == "middle":
            start = (self.layers - self.skipped) // 2
            skip[start : start + self.skipped] = True
        else:
            digest = hashlib.blake2b(f"{self.gates.seed}/{key}".encode(), digest_size=8).digest()
            generator = np.random.default_rng(int.from_bytes(digest))
            skip[generator.permutation(self.layers)[: self.skipped]] = True
        return tuple(bool(run) for run in ~skip)

    def forget(self, request: str) -> None:
        """Drop what is held for a finished request."""
        self._known.pop(request, None)
