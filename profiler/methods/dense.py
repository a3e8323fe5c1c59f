"""Dense: every parameter runs for every token; the baseline every other arm is held against.

Also the template of a method: what is here is the least a method has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.costs import dense_choices
from profiler.errors import InputError
from profiler.execution.instruments import block_probes, decoder_spans, head_probe
from profiler.methods import Method, MethodConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from profiler.recorder import Probe, SpanSite
    from profiler.records import Choice


class DenseConfig(MethodConfig):
    """The dense model has no options."""


class Dense(Method):
    """The unrouted decoder."""

    Config = DenseConfig
    scope = "none"
    sites = ()
    latent_attention = True

    @classmethod
    def choices(cls, model: PreTrainedModel, config: DenseConfig) -> list[Choice]:
        return dense_choices(model)

    def force(self, how: Any | None) -> None:
        if how not in (None, "open"):
            raise InputError("the dense method decides nothing, so only an open route can be forced on it")

    def probes(self) -> list[Probe]:
        return [
            head_probe(self.decoder),
            *block_probes(self.decoder, attention=("attention", 0), ffn=("ffn", 0)),
        ]

    def spans(self) -> list[SpanSite]:
        return decoder_spans(self.decoder)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"checkpoint {folder}: no such folder")
