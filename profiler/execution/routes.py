"""Forced routes: which layers run, for a request or for each of its tokens, decided by a rate and a seed.

A forced route is synthetic and is labelled so wherever it is shown. It stands for a router of a given rate
when the question is what skipping could save, not what a trained router would choose.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from profiler.execution.hashing import uniform
from profiler.execution.sequences import Sequences

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

    def open_layers(self, layers: int, request: str) -> tuple[bool, ...]:
        """`[layers]`, True where the layer runs. The same request always gets the same answer, whatever its company."""
        return _draw(self, layers, request if self.pattern == "random" else "")


class ForcedTokens(ForcedGates):
    """A synthetic route of single tokens.

    Attributes:
        ratio: share of the (token, routable layer) pairs that skip.
        pattern: `random`, each pair is drawn by itself with that chance, from seed, request, position and layer;
            `shared` and `middle`, all tokens skip the same layers, as in `ForcedGates`.
    """

    pattern: Pattern = "random"

    def label(self) -> str:
        """How reports name it."""
        what = "(token, layer) pairs" if self.pattern == "random" else "layers"
        return f"forced: {self.ratio:.0%} of {what} skip, pattern {self.pattern}, seed {self.seed}"

    def open_rows(self, layers: int, sequences: Sequences, device: torch.device) -> Tensor:
        """`[layers, N]` on `device`, True where the token row takes the layer, rows as they lie in the hidden states.

        The same token of the same request always gets the same answer, whatever its company. Nothing at pads.
        """
        if self.pattern != "random":
            open_L = torch.tensor(self.open_layers(layers, ""), device=device)
            return open_L[:, None].expand(layers, len(sequences.row_positions(device)))
        keys_S = torch.tensor([_request_key(self.seed, name) for name in sequences.requests], device=device)
        keys_N = keys_S[sequences.row_owners(device)]
        depths_L1 = torch.arange(layers, device=device)[:, None]
        return uniform(keys_N, sequences.row_positions(device), depths_L1) >= self.ratio


class ForcedExperts(ForcedGates):
    """A synthetic route to experts: each token takes as many as it leaves over, all with the same weight.

    Attributes:
        ratio: share of a layer's routed experts that a token leaves out; rounded to whole experts.
        pattern: `random`, each token draws its own in each layer, from seed, request, position and layer; `shared`, one
            draw for all tokens and layers; `middle`, all leave out the contiguous run around the middle.
    """

    pattern: Pattern = "random"

    def label(self) -> str:
        """How reports name it."""
        return f"forced: {self.ratio:.0%} of experts left out, pattern {self.pattern}, seed {self.seed}"

    def experts_of_rows(self, layer: int, experts: int, sequences: Sequences, device: torch.device) -> Tensor:
        """`[N, K]` experts of each token row, ascending, rows as they lie in the hidden states; anything at pads.

        The same token of the same request always gets the same answer, whatever its company.
        """
        positions_N = sequences.row_positions(device)
        open_E = torch.tensor(self.open_layers(experts, ""), device=device)
        if self.pattern != "random":
            return open_E.nonzero()[:, 0].expand(len(positions_N), -1)
        keys_S = torch.tensor([_request_key(self.seed, name) for name in sequences.requests], device=device)
        keys_N1 = keys_S[sequences.row_owners(device)][:, None]
        drawn_NE = uniform(keys_N1, positions_N[:, None], layer, torch.arange(experts, device=device))
        return drawn_NE.argsort(dim=1, stable=True)[:, : int(open_E.sum())].sort(dim=1).values


def _request_key(seed: int, request: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


@lru_cache(maxsize=4096)  # asked once a layer; drawn again, and the same, if it was dropped
def _draw(gates: ForcedGates, layers: int, key: str) -> tuple[bool, ...]:
    # Half a layer rounds up: "30 % of 5" must not depend on the banker's rule.
    skipped = min(layers, math.floor(gates.ratio * layers + 0.5))
    if gates.pattern == "middle":
        start = (layers - skipped) // 2
        order = [*range(start, layers), *range(start)]
    else:
        # Layers in the order of their hashes: a draw that no version of a random generator changes.
        order = sorted(range(layers), key=lambda i: hashlib.blake2b(f"{gates.seed}/{i}/{key}".encode()).digest())
    closed = set(order[:skipped])
    return tuple(layer not in closed for layer in range(layers))
