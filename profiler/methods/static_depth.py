"""Static depth: the same whole blocks are left out of every request, as if they had been cut out of the model.

The baseline a router has to beat (METHODS §4): ShortGPT (Men et al. 2024) removes the blocks that change their input
least, and keeps no keys or values of them. Which ones to remove is given by the arm, not found here:

    layers: [10, 11, 12]                       these, numbered from 0
    layers: {count: 9, pattern: middle}        so many: around the middle, the last ones, or spread over the depth

Nothing is decided, so it could go without decisions. (ours) It records one all the same, `block`, for every sequence,
layer and step, with a gate of 1 or 0: so the removed blocks are counted, proven and charged by the very rules that hold
a router's skips, and reports need not know which method it was.

Not here: choosing blocks by their influence, and mending the model after the cut by training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from profiler.costs import block_choice, shared_choices
from profiler.errors import InputError
from profiler.execution.blocks import cache_layer, run_gated
from profiler.execution.decoder import decoder
from profiler.execution.gates import Gate, Gates
from profiler.execution.instruments import block_probes, decoder_spans, head_probe
from profiler.execution.sequences import Sequences
from profiler.methods import Method, MethodConfig
from profiler.records import Choice

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from profiler.recorder import Probe, Recorder, SpanSite

SKIP, RUN = 0, 1
#: There is no logit; its sign is all that a fixed decision has.
GATES = {False: Gate(False, 0.0, -math.inf), True: Gate(True, 1.0, math.inf)}

Pattern = Literal["middle", "last", "spread"]


class Removed(MethodConfig):
    """How many blocks are removed, and where.

    `middle`: the contiguous run around the middle (the one `gates: {forced: {pattern: middle}}` skips); `last`: those
    before the final norm; `spread`: the centres of `count` equal stretches of the depth.
    """

    count: int = Field(ge=1, le=4096)
    pattern: Pattern = "middle"


Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=4096)]


class StaticDepthConfig(MethodConfig):
    """Options of an arm. `layers`: the blocks that are removed, numbered from 0, or how many and where."""

    layers: Layers | Removed = Removed(count=1)

    @field_validator("layers")
    @classmethod
    def _each_once(cls, layers: Layers | Removed) -> Layers | Removed:
        if isinstance(layers, list) and len(set(layers)) < len(layers):
            raise ValueError("each layer may be listed once")
        return layers


def removed_layers(config: StaticDepthConfig, depth: int) -> frozenset[int]:
    """The blocks an arm removes from a model of `depth` blocks.

    Raises:
        InputError: the model has no such block, or not so many.
    """
    asked = config.layers
    if isinstance(asked, list):
        if max(asked) >= depth:
            raise InputError(f"static_depth: layers: {max(asked)} is none of this model's, which are 0 to {depth - 1}")
        return frozenset(asked)
    count = asked.count
    if count > depth:
        raise InputError(f"static_depth: layers.count ({count}) must be at most the model's number of blocks ({depth})")
    if asked.pattern == "spread":
        return frozenset((2 * i + 1) * depth // (2 * count) for i in range(count))
    first = depth - count if asked.pattern == "last" else (depth - count) // 2
    return frozenset(range(first, first + count))


class StaticDepth(Method):
    """Whole blocks removed for every request, on a Llama- or Qwen2-style decoder."""

    Config = StaticDepthConfig
    scope = "sequence"
    sites = ("block",)

    def __init__(self, model: PreTrainedModel, config: StaticDepthConfig, recorder: Recorder) -> None:
        super().__init__(model, config, recorder)
        self.removed = removed_layers(config, len(self.decoder.blocks))
        self._route: Literal["open", "closed"] | None = None

    def install(self) -> None:
        for layer, block in enumerate(self.decoder.blocks):
            # A partial of bound methods: a deep copy of the tree is then wrapped by a deep copy of this handle.
            block.forward = partial(self._forward, layer, block.forward)

    @classmethod
    def choices(cls, model: PreTrainedModel, config: StaticDepthConfig) -> list[Choice]:
        dec = decoder(model)
        removed_layers(config, len(dec.blocks))
        found = shared_choices(dec)
        for layer in range(len(dec.blocks)):
            found += [
                Choice(layer=layer, site="block", index=SKIP, name="skip", segments=["attention", "ffn"]),
                block_choice(dec, layer, index=RUN),
            ]
        return found

    def force(self, how: Any | None) -> None:
        """Run every block (`"open"`), none (`"closed"`), or those that are not removed (None).

        For requests to come: what a padded request runs is in its cache.
        """
        if how not in ("open", "closed", None):
            raise InputError(f"cannot force fixed blocks to {how!r}")
        self._route = how

    @property
    def synthetic(self) -> str | None:
        return None if self._route is None else f"forced: every block {self._route}"

    @property
    def kv_policy(self) -> str:
        return "removed with the block"

    def probes(self) -> list[Probe]:
        return [head_probe(self.decoder), *block_probes(self.decoder, attention=("block", RUN))]

    def layers_kept(self, sequences: Sequences) -> list[Collection[int]]:
        return [[layer for layer in range(len(self.decoder.blocks)) if self._runs(layer)]] * len(sequences)

    def spans(self) -> list[SpanSite]:
        return decoder_spans(self.decoder)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"checkpoint {folder}: no such folder")

    # -- one block --------------------------------------------------------------------------------

    def _forward(self, layer: int, run_block: Callable[..., Tensor], hidden_states: Tensor, **kwargs: Any) -> Tensor:
        sequences = cast(Sequences, self.tracker.current)
        gates = Gates((GATES[self._runs(layer)],) * len(sequences))
        cache, kept = kwargs.get("cache"), None
        if cache is not None and not sequences.packed:
            kept = cache_layer(cache, layer, len(self.decoder.blocks))
            if kept.gates is None:
                kept.settle(gates, sequences.width)
            elif len(kept.gates) != len(gates):
                raise InputError(f"the cache holds {len(kept.gates)} sequences, this step has {len(gates)}")
            else:
                gates = kept.gates
        if self.recorder.recording:
            self.recorder.gate(layer, "block", *gates.columns[:2])
        hidden = run_gated(run_block, hidden_states, kwargs, sequences, gates, self.recorder, layer)
        if kept is not None:
            kept.advance(sequences.width)
        return hidden

    def _runs(self, layer: int) -> bool:
        return layer not in self.removed if self._route is None else self._route == "open"
