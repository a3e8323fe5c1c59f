"""LayerRoute: a whole block runs or is skipped, decided per sequence from the mean of its input.

Before block `i`, with `h̄_i` the mean over the sequence's real tokens of the block's input:

    s_i = w_i·h̄_i + b_i        g_i = 1[σ(s_i) > 0.5]        h_{i+1} = Block_i(h_i) if g_i else h_i

(LayerRoute §3.1.) Each sequence decides for itself, also inside a batch; a skipped block is not computed.
Routers compute in float32 whatever the backbone's dtype (ours).

KV policy `request` (ours): gates are decided once on the whole prompt and frozen for the request's decode;
a skipped layer holds no keys or values for it. Without a cache every forward decides anew on all it is given.

Not here yet: training, LoRA, and the `project` and `recompute` policies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from profiler.costs import block_choice, shared_choices
from profiler.errors import InputError, RuleError
from profiler.execution.decoder import decoder
from profiler.execution.instruments import block_probes, decoder_spans, head_probe
from profiler.execution.kv import SubsetLayer, adopt, run_subset
from profiler.execution.routes import ForcedGates, Route
from profiler.execution.sequences import Sequences
from profiler.methods import Method, MethodConfig
from profiler.recorder import Probe, SpanSite
from profiler.records import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from profiler.recorder import Recorder

SKIP, RUN = 0, 1
CONFIG_FILE, ROUTERS_FILE = "config.json", "routers.safetensors"


class ForcedOption(MethodConfig):
    """`gates: {forced: {...}}`."""

    forced: ForcedGates


class LayerRouteConfig(MethodConfig):
    """Options of an arm.

    Attributes:
        checkpoint: folder written by `save`, or None for routers as training starts them.
        kv_policy: how the cache treats skipped blocks.
        gates: `router` decides; `open` runs every block; `{forced: {ratio, seed, pattern}}` is a synthetic route.
            The router is evaluated under every setting, so that its time is always in.
    """

    checkpoint: str | None = None
    kv_policy: Literal["request"] = "request"
    gates: Literal["router", "open"] | ForcedOption = "router"


def start_bias(layers: int) -> list[float]:
    """`b_i` at the start of training: −1 for the middle layers, +1 for the rest (LayerRoute §3.4; METHODS §2).

    The middle is 0-based `L//3 … L//3 + ⌊9L/24⌋ − 1`: layers 8–16 of 24.
    """
    first, count = layers // 3, 9 * layers // 24
    return [-1.0 if first <= i < first + count else 1.0 for i in range(layers)]


def decide(logit: Tensor) -> tuple[Tensor, Tensor]:
    """Gate value σ(s) and choice (RUN where σ(s) > 0.5, i.e. s > 0; a tie skips), of `[S]` logits."""
    return torch.sigmoid(logit), (logit > 0).to(torch.int16)


class LayerRoute(Method):
    """Per-sequence block skipping on a Llama- or Qwen2-style decoder."""

    Config = LayerRouteConfig
    scope = "sequence"
    sites = ("block",)
    signals = {"logit": "s_i, the router's output before σ"}

    def __init__(self, model: PreTrainedModel, config: LayerRouteConfig, recorder: Recorder) -> None:
        super().__init__(model, config, recorder)
        layers = len(self.decoder.blocks)
        self.routers = [self._new_router(bias) for bias in start_bias(layers)]
        self._route: Route | Literal["open", "closed"] | None = None
        self._frozen: dict[str, dict[int, tuple[bool, float, float]]] = {}
        for layer, (block, router) in enumerate(zip(self.decoder.blocks, self.routers, strict=True)):
            block.router = router
            self._gate_block(block, layer)
        if config.checkpoint is not None:
            self.restore(Path(config.checkpoint))
        gates = config.gates
        self.force(gates.forced if isinstance(gates, ForcedOption) else "open" if gates == "open" else None)

    def _new_router(self, bias: float) -> nn.Linear:
        # w = 0 (ours): pooled norms reach about 1,000, so a random w would decide before training does.
        device = next(self.model.parameters()).device
        router = nn.Linear(self.decoder.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(router.weight)
        nn.init.constant_(router.bias, bias)
        return router

    # -- the method's face ------------------------------------------------------------------------

    @classmethod
    def choices(cls, model: PreTrainedModel, config: LayerRouteConfig) -> list[Choice]:
        dec = decoder(model)
        found = shared_choices(dec)
        d = dec.hidden_size
        for layer in range(len(dec.blocks)):
            found += [
                Choice(
                    layer=layer, site="router", index=0, name="run", segments=["router"],
                    overhead_parameters=d + 1, flops_per_row=2 * d, weight_bytes=4 * (d + 1),
                ),
                Choice(layer=layer, site="block", index=SKIP, name="skip", segments=["attention", "ffn"]),
                block_choice(dec, layer, index=RUN),
            ]  # fmt: skip
        return found

    def force(self, how: Any | None) -> None:
        """Bypass the router's decision: `"open"`, `"closed"`, a `ForcedGates`, or None to let it decide."""
        if isinstance(how, ForcedGates):
            self._route = Route(how, len(self.routers))
        elif how in ("open", "closed", None):
            self._route = how
        else:
            raise InputError(f"cannot force gates to {how!r}")

    def release(self, request: str) -> None:
        self._frozen.pop(request, None)
        if isinstance(self._route, Route):
            self._route.forget(request)

    @property
    def synthetic(self) -> str | None:
        if isinstance(self._route, Route):
            return self._route.gates.label()
        return None if self._route is None else f"forced: every gate {self._route}"

    @property
    def untrained(self) -> bool:
        return self.config.checkpoint is None and self._route is None

    @property
    def kv_policy(self) -> str:
        return self.config.kv_policy

    def probes(self) -> list[Probe]:
        routers = [Probe(i, "router", 0, router, whole=True) for i, router in enumerate(self.routers)]
        return [head_probe(self.decoder), *routers, *block_probes(self.decoder, attention=("block", RUN))]

    def spans(self) -> list[SpanSite]:
        return decoder_spans(self.decoder)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"method": "layerroute", "layers": len(self.routers), "hidden_size": self.decoder.hidden_size}
        (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n")
        save_file(
            {
                f"{i}.{name}": tensor.detach().clone()
                for i, router in enumerate(self.routers)
                for name, tensor in router.named_parameters()
            },
            folder / ROUTERS_FILE,
        )

    def restore(self, folder: Path) -> None:
        try:
            facts = json.loads((folder / CONFIG_FILE).read_text())
            tensors = load_file(folder / ROUTERS_FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"checkpoint {folder}: cannot be read: {error}") from error
        mine = {"method": "layerroute", "layers": len(self.routers), "hidden_size": self.decoder.hidden_size}
        for key, value in mine.items():
            if facts.get(key) != value:
                raise InputError(f"checkpoint {folder}: its {key} is {facts.get(key)!r}, this model's is {value!r}")
        expected = {f"{i}.{name}" for i in range(len(self.routers)) for name in ("weight", "bias")}
        if set(tensors) != expected:
            missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
            raise InputError(f"checkpoint {folder}: missing tensors {missing[:3]}, unexpected tensors {extra[:3]}")
        for i, router in enumerate(self.routers):
            for name, parameter in router.named_parameters():
                found = tensors[f"{i}.{name}"]
                if found.shape != parameter.shape:
                    raise InputError(
                        f"checkpoint {folder}: {i}.{name} has shape {list(found.shape)}, "
                        f"this model needs {list(parameter.shape)}"
                    )
                if not bool(torch.isfinite(found).all()):
                    raise InputError(f"checkpoint {folder}: {i}.{name} holds values that are not finite")
                with torch.no_grad():
                    parameter.copy_(found)

    # -- one block --------------------------------------------------------------------------------

    def _gate_block(self, block: nn.Module, layer: int) -> None:
        run_block = block.forward

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return self._forward(layer, run_block, hidden_states, kwargs)

        block.forward = forward

    def _forward(self, layer: int, run_block: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        sequences = cast(Sequences, self.tracker.current)
        with self.recorder.span("router", layer):
            kept = self._cache_layer(kwargs.get("cache"), layer, sequences)
            open_S, values_S2 = self._gates(layer, hidden, sequences, kept)
            if kept is not None and kept.ran_B is None:
                kept.settle(open_S, values_S2)
            if self.recorder.recording:
                choice = torch.tensor(open_S, dtype=torch.int16)
                self.recorder.gate(layer, "block", choice, values_S2[:, 0], logit=values_S2[:, 1])
        chosen = [i for i, run in enumerate(open_S) if run]
        if len(chosen) == len(open_S):
            hidden = run_block(hidden, **kwargs)
        elif chosen:
            with self.recorder.span("dispatch", layer), self.recorder.executing(sequences.view_of(chosen)):
                hidden = run_subset(run_block, hidden, kwargs, sequences, chosen)
        if kept is not None:
            kept.advance(sequences.width)
        return hidden

    def _cache_layer(self, cache: Any, layer: int, sequences: Sequences) -> SubsetLayer | None:
        if cache is None or sequences.packed:
            return None
        if layer >= len(cache.layers) or type(cache.layers[layer]) is not SubsetLayer:
            adopt(cache, len(self.routers))
        return cast(SubsetLayer, cache.layers[layer])

    def _gates(
        self, layer: int, hidden: Tensor, sequences: Sequences, kept: SubsetLayer | None
    ) -> tuple[list[bool], Tensor]:
        """Who runs, and `[S, 2]` gate values and logits: frozen ones where the request has them, else decided now."""
        if kept is not None and kept.ran_B is not None:
            assert kept.gate_B is not None
            if len(kept.ran_B) != len(sequences):
                raise InputError(f"the cache holds {len(kept.ran_B)} sequences, this step has {len(sequences)}")
            return list(kept.ran_B), kept.gate_B
        if sequences.packed:
            return self._packed_gates(layer, hidden, sequences)
        return self._decide(layer, hidden, sequences)

    def _decide(self, layer: int, hidden: Tensor, sequences: Sequences) -> tuple[list[bool], Tensor]:
        router = self.routers[layer]
        logit = router(sequences.mean_over_real(hidden).to(router.weight.dtype))[:, 0]
        gate, choice = decide(logit)
        values = logit.tolist()
        if not all(math.isfinite(value) for value in values):
            broken = [sequences.requests[i] for i, value in enumerate(values) if not math.isfinite(value)]
            raise RuleError(f"layer {layer}: the router's logit is not finite for request {broken[0]!r}")
        values_S2 = torch.stack([gate, logit], dim=1)
        if self._route is None:
            return [bool(c) for c in choice.tolist()], values_S2
        if isinstance(self._route, Route):
            return [self._route.open_layers(request)[layer] for request in sequences.requests], values_S2
        return [self._route == "open"] * len(sequences), values_S2

    def _packed_gates(self, layer: int, hidden: Tensor, sequences: Sequences) -> tuple[list[bool], Tensor]:
        """Gates of a packed batch, kept by request id; they survive the engine's re-prefill of a request."""
        frozen = [self._frozen.get(request, {}).get(layer) for request in sequences.requests]
        for i, found in enumerate(frozen):
            if sequences.past_S[i] and (found is None or sequences.rows_S[i] > 1):
                raise InputError(
                    f"request {sequences.requests[i]!r} reached layer {layer} with {sequences.past_S[i]} tokens in the "
                    f"cache and {sequences.rows_S[i]} more to prefill: its prompt was split. Sequence gates need the "
                    "whole prompt; set the engine's token budget above the longest prompt"
                )
        if any(found is None for found in frozen):
            open_S, values_S2 = self._decide(layer, hidden, sequences)
            for i, (run, (gate, logit)) in enumerate(zip(open_S, values_S2.tolist(), strict=True)):
                if frozen[i] is None:
                    frozen[i] = self._frozen.setdefault(sequences.requests[i], {}).setdefault(layer, (run, gate, logit))
        complete = cast("list[tuple[bool, float, float]]", frozen)
        values_S2 = torch.tensor([(gate, logit) for _, gate, logit in complete], device=hidden.device)
        return [run for run, _, _ in complete], values_S2
