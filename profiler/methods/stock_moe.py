"""A mixture-of-experts model of transformers as it is: every router decision and every expert's rows, recorded.

For Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3 and what has their form (`execution.stock_experts`). Nothing is
added and no weight is changed: a layer's router and experts run as transformers wrote them, in whichever experts
implementation the model has or the arm names, and their outputs are those of the bare model, bit for bit. So loads,
imbalance and routing of a stock checkpoint can be looked at, and its implementations timed as arms of one run.

Recorded per (token, layer): the experts chosen, ascending, and their weights as the router gives them; as the gate, by
how much the choice was made (`Scores.margin_N`), whose threshold is therefore 0; the entropy of the router's scores.
Decisions are read off what the router returned, and rows off what the experts were called with, so that rule 1 holds
the one against the other. transformers sends pads through the experts too.

`experts: all` runs every expert for every row; those a row did not choose have weight 0, so outputs stay what they are,
to rounding. It is the arm to hold a stock one against: what the same weights cost without a router. Its decisions are
the one choice `all`. Forced open, an arm does the same.

Numeric twin: the model as it is, which is this method without options. Segment `experts` holds what transformers does
inside its experts module: sorting rows, products, and adding results up.

Not here: forced routes, which would be another model; experts that are put in place of a dense half (`mohge`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from profiler.errors import InputError
from profiler.execution.expert_costs import SITE
from profiler.execution.instruments import decoder_spans, head_probe
from profiler.execution.stock_experts import (
    StockBlock,
    first_attention_product,
    scores,
    stock_choices,
    stock_decoder,
)
from profiler.methods import Method, MethodConfig
from profiler.recorder import Probe, SpanSite
from profiler.records import Choice, ParallelRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from profiler.recorder import Recorder

Implementation = Literal["eager", "grouped_mm", "batched_mm"]


class StockMoeConfig(MethodConfig):
    """Options of an arm.

    Attributes:
        experts: `chosen` runs those the router chose; `all` runs every one, with weight 0 where it was not chosen.
        implementation: transformers' way of running experts; None leaves it as the model was loaded.
    """

    experts: Literal["chosen", "all"] = "chosen"
    implementation: Implementation | None = None


class StockMoe(Method):
    """A mixture-of-experts model of transformers, recorded and otherwise left alone."""

    Config = StockMoeConfig
    scope = "token"
    sites = (SITE,)
    numeric_twin = "stock_moe"
    latent_attention = True
    takes_several = True
    own_experts = True
    signals: ClassVar[dict[str, str]] = {"entropy": "of the router's scores over experts, in nats"}

    def __init__(self, model: PreTrainedModel, config: StockMoeConfig, recorder: Recorder) -> None:
        self.model, self.config, self.recorder = model, config, recorder
        found = stock_decoder(model)
        #: `decoder`: its parts; `blocks`: layer → its experts.
        self.decoder, self.blocks = found.decoder, found.blocks
        chosen = config.implementation or model.config._experts_implementation
        if chosen == "grouped_mm" and model.dtype == torch.float64:
            raise InputError(
                "stock_moe: transformers runs these experts by grouped_mm, which does not know float64; "
                "give implementation: eager"
            )
        if config.implementation is not None:
            model.set_experts_implementation(config.implementation)
        self.force("open" if config.experts == "all" else None)

    def install(self) -> None:
        for layer, block in self.blocks.items():
            # Partials of bound methods: a deep copy of the tree is then wrapped by a deep copy of this handle.
            block.router.forward = partial(self._decide, layer, block.router.forward)
            block.experts.forward = partial(self._run, layer, block.experts.forward)

    @classmethod
    def choices(cls, model: PreTrainedModel, config: StockMoeConfig) -> list[Choice]:
        return stock_choices(stock_decoder(model))

    def force(self, how: Any | None) -> None:
        if how not in ("open", None):
            raise InputError(f"stock_moe records a model as it is; its experts cannot be forced to {how!r}")
        self._all = how == "open"

    @property
    def parallel(self) -> ParallelRecord:
        block = next(iter(self.blocks.values()))
        kept_of = int(getattr(block.router, "num_group", None) or 1)
        return ParallelRecord(
            ranks=1,
            placement="contiguous",
            widths_E=[block.width] * block.number,
            per_group=block.number // kept_of,
            hidden=self.decoder.hidden_size,
            itemsize=self.model.dtype.itemsize,
            times_note="transformers' experts gather, multiply and add back in one forward: the time is of all that",
        )

    @property
    def threshold(self) -> float:
        return 0.0

    @property
    def synthetic(self) -> str | None:
        return "forced: every expert runs" if self._all else None

    def probes(self) -> list[Probe]:
        found = [head_probe(self.decoder)]
        for layer, decoder_block in enumerate(self.decoder.blocks):
            found.append(Probe(layer, "attention", 0, first_attention_product(decoder_block)))
            block = self.blocks.get(layer)
            if block is None:
                found.append(Probe(layer, "ffn", 0, decoder_block.mlp.gate_proj))  # type: ignore[union-attr, arg-type]
                continue
            found.append(Probe(layer, "router", 0, block.router))
            if block.shared is not None:
                found.append(Probe(layer, "shared", 0, block.shared))
        return found

    def spans(self) -> list[SpanSite]:
        of_layers = {id(block.mlp) for block in self.blocks.values()}
        found = [site for site in decoder_spans(self.decoder) if id(site.module) not in of_layers]
        for layer, block in self.blocks.items():
            found += [
                SpanSite(block.mlp, "dispatch", layer),
                SpanSite(block.router, "router", layer),
                SpanSite(block.experts, SITE, layer, part=block.width),
            ]
            if block.shared is not None:
                found.append(SpanSite(block.shared, "shared", layer))
        return found

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"checkpoint {folder}: no such folder")

    # -- one layer --------------------------------------------------------------------------------

    def _decide(self, layer: int, router: Callable[..., Any], hidden: Tensor) -> Any:
        """In the place of a layer's router: what it returns, unchanged."""
        found = router(hidden)
        if self.recorder.recording:
            logit_NE, weight_NK, choice_NK = found
            with torch.no_grad():
                how = scores(self.blocks[layer].router, logit_NE, choice_NK)
                choice_NK, order_NK = choice_NK.sort(dim=-1)
                weight_NK = weight_NK.gather(1, order_NK)
                if self._all:
                    choice_NK = choice_NK.new_full((len(choice_NK), 1), self.blocks[layer].number)
                    weight_NK = weight_NK.sum(-1, keepdim=True)
                self.recorder.gate(layer, SITE, choice_NK, how.margin_N, weight_NK, entropy=how.entropy_N)
        return found

    def _run(
        self, layer: int, experts: Callable[..., Tensor], x_Nd: Tensor, choice_NK: Tensor, weight_NK: Tensor
    ) -> Tensor:
        """In the place of a layer's experts: `[N, d]` → `[N, d]`."""
        block = self.blocks[layer]
        if self._all:
            shape = len(choice_NK), block.number
            weight_NK = weight_NK.new_zeros(shape).scatter(1, choice_NK, weight_NK)
            choice_NK = torch.arange(block.number, device=choice_NK.device).expand(shape)
        if self.recorder.recording:
            self._count(layer, block, choice_NK)
        return experts(x_Nd, choice_NK, weight_NK)

    def _count(self, layer: int, block: StockBlock, choice_NK: Tensor) -> None:
        """Count the rows that enter each expert, pads apart; nothing waits for the numbers."""
        sequences = self.tracker.current
        assert sequences is not None
        real_NK = torch.ones_like(choice_NK)
        if sequences.real_BT is not None:
            real_NK = real_NK * sequences.real_BT.to(choice_NK.device).flatten()[:, None]
        if self._all:
            rows = real_NK[:, 0].sum()
            self.recorder.entered(layer, SITE, block.number, rows, len(real_NK) - rows)
            return
        none_E = choice_NK.new_zeros(block.number)
        rows_E, pads_E = (none_E.scatter_add(0, choice_NK.flatten(), w.flatten()) for w in (real_NK, 1 - real_NK))
        self.recorder.entered(layer, SITE, 0, rows_E, pads_E)
