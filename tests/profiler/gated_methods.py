"""A small method that skips blocks by the mean of their input, and its broken relatives, each breaking one rule.

They stand for methods that users write: `named` makes one loadable by a dotted name, as a spec names it.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from profiler.costs import block_choice, shared_choices
from profiler.execution.blocks import cache_layer, run_gated
from profiler.execution.decoder import decoder
from profiler.execution.gates import Gate, Gates
from profiler.execution.instruments import block_probes, decoder_spans, head_probe
from profiler.execution.sequences import Sequences
from profiler.methods import Method, MethodConfig
from profiler.recorder import Probe, SpanSite
from profiler.records import Choice


def named(cls: type[Method], monkeypatch: pytest.MonkeyPatch) -> str:
    """A dotted name under which `methods.load` finds `cls` until the test ends."""
    module = ModuleType(f"broken_methods.{cls.__name__}")
    monkeypatch.setattr(cls, "__module__", module.__name__)
    setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


class NoOptions(MethodConfig):
    pass


class MeanGate(Method):
    """Right: each sequence runs block `i` where a fixed projection of its mean input is above 0."""

    Config = NoOptions
    scope = "sequence"
    sites = ("block",)
    signals: ClassVar[dict[str, str]] = {"logit": "before the sigmoid"}

    def install(self) -> None:
        self.calls = itertools.count()
        self.route: bool | None = None
        generator = torch.Generator().manual_seed(3)
        self.direction = torch.randn(self.decoder.hidden_size, generator=generator)
        for layer, block in enumerate(self.decoder.blocks):
            block.forward = partial(self.forward, layer, block.forward)

    def logits(self, layer: int, mean_Sd: Tensor) -> Tensor:
        return mean_Sd.float() @ self.direction

    def run_block(self, block: Any, hidden: Tensor, kwargs: Any, sequences: Sequences, gates: Gates, i: int) -> Tensor:
        return run_gated(block, hidden, kwargs, sequences, gates, self.recorder, i)

    def forward(self, layer: int, block: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        sequences = self.tracker.current
        assert sequences is not None
        cache = kwargs.get("cache")
        kept = cache_layer(cache, layer, len(self.decoder.blocks)) if cache is not None else None
        if kept is not None and kept.gates is not None:
            gates = kept.gates
        else:
            logits = self.logits(layer, sequences.mean_over_real(hidden_states)).tolist()
            gates = Gates(
                tuple(
                    Gate(s > 0 if self.route is None else self.route, 1 / (1 + math.exp(-s)) if s == s else s, s)
                    for s in logits
                )
            )
            if kept is not None:
                kept.settle(gates, sequences.width)
        if self.recorder.recording:
            choice, value, logit = gates.columns
            self.recorder.gate(layer, "block", choice, value, logit=logit)
        hidden = self.run_block(block, hidden_states, kwargs, sequences, gates, layer)
        if kept is not None:
            kept.advance(sequences.width)
        return hidden

    @classmethod
    def choices(cls, model: Any, config: Any) -> list[Choice]:
        dec = decoder(model)
        found = shared_choices(dec)
        for layer in range(len(dec.blocks)):
            found.append(Choice(layer=layer, site="block", index=0, name="skip", segments=["attention", "ffn"]))
            found.append(block_choice(dec, layer, index=1))
        return found

    def force(self, how: Any) -> None:
        self.route = {None: None, "open": True, "closed": False}[how]

    def probes(self) -> list[Probe]:
        return [head_probe(self.decoder), *block_probes(self.decoder, attention=("block", 1))]

    def spans(self) -> list[SpanSite]:
        return decoder_spans(self.decoder)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, folder: Path) -> None:
        pass


class BatchMean(MeanGate):
    """Wrong: the mean over the batch decides for everybody in it (METHODS §2, the released implementation)."""

    def logits(self, layer: int, mean_Sd: Tensor) -> Tensor:
        return super().logits(layer, mean_Sd).mean().expand(len(mean_Sd))


class Fickle(MeanGate):
    """Wrong: decides anew and otherwise each time it is asked."""

    def logits(self, layer: int, mean_Sd: Tensor) -> Tensor:
        return torch.where(torch.arange(len(mean_Sd)) % 2 == next(self.calls) % 5 % 2, 1.0, -1.0)


class ComputesAll(MeanGate):
    """Wrong: computes every row and throws the skipped ones away, so that nothing is saved."""

    def run_block(self, block: Any, hidden: Tensor, kwargs: Any, sequences: Sequences, gates: Gates, i: int) -> Tensor:
        if not gates.chosen:
            return hidden
        everybody = Gates(tuple(Gate(True, 1.0, 1.0) for _ in gates.of_S))
        layer = kwargs["cache"].layers[i] if kwargs.get("cache") is not None else None
        if layer is not None:
            layer.gates = everybody
        out = block(hidden, **kwargs)
        if layer is not None:
            layer.gates = gates
        runs = torch.tensor([gate.run for gate in gates.of_S])
        return torch.where(runs[:, None, None], out, hidden)


class OpenDiffers(MeanGate):
    """Wrong: forced open it is not the dense model."""

    def run_block(self, block: Any, hidden: Tensor, kwargs: Any, sequences: Sequences, gates: Gates, i: int) -> Tensor:
        return 1.01 * super().run_block(block, hidden, kwargs, sequences, gates, i)


class NotANumber(MeanGate):
    """Wrong: its gate is no number in layer 1, and it goes on."""

    def logits(self, layer: int, mean_Sd: Tensor) -> Tensor:
        found = super().logits(layer, mean_Sd)
        return found * float("nan") if layer == 1 else found


class CountsTwice(MeanGate):
    """Wrong: records each decision of layer 0 twice."""

    def run_block(self, block: Any, hidden: Tensor, kwargs: Any, sequences: Sequences, gates: Gates, i: int) -> Tensor:
        if i == 0 and self.recorder.recording:
            choice, value, logit = gates.columns
            self.recorder.gate(i, "block", choice, value, logit=logit)
        return super().run_block(block, hidden, kwargs, sequences, gates, i)
