"""LayerRoute: a whole block runs or is skipped, decided per sequence from the mean of its input.

Before block `i`, with `h̄_i` the mean over the sequence's real tokens of the block's input:

    s_i = w_i·h̄_i + b_i        g_i = 1[σ(s_i) > 0.5]        h_{i+1} = Block_i(h_i) if g_i else h_i

(LayerRoute §3.1.) Each sequence decides for itself, also inside a batch; a skipped block is not computed.
Routers compute in float32 whatever the backbone's dtype (ours).

KV policy (ours; the source leaves it open), `kv_policy` of an arm:

- `request`: gates are decided once on the whole prompt and frozen for the request's decode; a skipped layer holds no
  keys or values for it.
- `project`: gates are decided anew each step, on the mean over all tokens so far; a skipped block still puts keys and
  values of its input (norm, projections, rotary) into the cache. All rows pay for that, so it is a site of its own,
  `kv`, and `block` costs the rest.
- `recompute`: there is no cache; every step is given the whole sequence and decides anew on all of it, as the
  released code does. The model's config says `use_cache: false`, which `generate()` follows.

Without a cache every forward decides anew on all it is given, under any policy.

LoRA (§3.1) on Q, K, V and O of every block is active when the block runs, and on K and V where `project` works them
out for a skipped one; `lora` says whether an arm has it.

Training (§3.2, §3.3): every block is computed, the gate passes straight through,

    ĝ_i = 1[σ(s_i) > 0.5] − sg(σ(s_i)) + σ(s_i)        h_{i+1} = h_i + ĝ_i·(Block_i(h_i) − h_i)
    L = L_LM + λ·mean_i σ(s_i)                          mean over layers and sequences

with the paper's whole-sequence pooling, so a gate sees the words being scored: a training loss is not a held-out
perplexity, which gates on a prefix. The loop around it is `profiler.train`.

Under a serving engine `recompute` is refused, since it keeps no cache. `project` goes by the mean of a request's tokens
so far; a request that the engine evicts and prefills again decides on all its tokens at once there, which may be
otherwise than step by step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Discriminator, Field, Tag
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.costs import block_choice, key_value_choice, shared_choices, without
from profiler.errors import InputError, RuleError
from profiler.execution import lora
from profiler.execution.backbone_facts import (
    CONFIG_FILE,
    backbone_facts,
    base_sample,
    checkpoint_facts,
    refuse_other_weights,
)
from profiler.execution.blocks import cache_layer, refuse_other_attention, run_gated, run_projecting
from profiler.execution.checkpoint_files import read_json, read_tensors
from profiler.execution.decoder import ADDED, ATTENTION_PARTS, decoder
from profiler.execution.gates import Gate, Gates, Held, RequestGates
from profiler.execution.instruments import block_probes, decoder_spans, head_probe
from profiler.execution.kv import ProjectedLayer, SubsetLayer
from profiler.execution.likelihood import token_nll
from profiler.execution.lora import LoraOptions
from profiler.execution.routes import ForcedGates
from profiler.execution.sequences import Sequences
from profiler.methods import Losses, MethodConfig, Trainable
from profiler.recorder import Probe, SpanSite
from profiler.records import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from profiler.recorder import Recorder

METHOD = "layerroute"
SKIP, RUN = 0, 1
KV_PARTS = ("k_proj", "v_proj")
ROUTERS_FILE = "routers.safetensors"
#: Format of a checkpoint folder. 1: config.json, routers.safetensors and, with LoRA, peft's two files.
FORMAT = 1


class ForcedOption(MethodConfig):
    """`gates: {forced: {...}}`."""

    forced: ForcedGates


def _lora_form(value: Any) -> str:
    return "switch" if isinstance(value, bool) else "options"


LoraOption = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[LoraOptions, Tag("options")], Discriminator(_lora_form)
]


class LayerRouteConfig(MethodConfig):
    """Options of an arm.

    Attributes:
        checkpoint: folder written by `save`, or None for routers as training starts them. (`builtin` is resolved
            before it gets here, by `profiler.checkpoints`.)
        lora: adapters on or off; None has them where the checkpoint has them. True takes the checkpoint's size, or
            the default without one. False with a checkpoint that has them runs its routers on a backbone they
            were not trained on (`caveat` says so).
        kv_policy: how the cache treats skipped blocks, and so when gates are decided; see the module docstring.
        gates: `router` decides; `open` runs every block; `{forced: {ratio, seed, pattern}}` is a synthetic route.
            The router is evaluated under every setting, so that its time is always in.
    """

    checkpoint: str | None = None
    lora: LoraOption | None = None
    kv_policy: Literal["request", "project", "recompute"] = "request"
    gates: Literal["router", "open"] | ForcedOption = "router"


class LayerRouteObjective(MethodConfig):
    """What training minimises; `gate_weight` is λ of §3.3."""

    gate_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)


def start_bias(layers: int) -> list[float]:
    """`b_i` at the start of training: −1 for the middle layers, +1 for the rest (LayerRoute §3.4; METHODS §2).

    The middle is 0-based `L//3 … L//3 + ⌊9L/24⌋ − 1`: layers 8–16 of 24.
    """
    first, count = layers // 3, 9 * layers // 24
    return [-1.0 if first <= i < first + count else 1.0 for i in range(layers)]


def decide(logit: Tensor) -> tuple[Tensor, Tensor]:
    """Gate value σ(s) and choice (RUN where σ(s) > 0.5, i.e. s > 0; a tie skips), of `[S]` logits."""
    return torch.sigmoid(logit), (logit > 0).to(torch.int16)


def straight_through(logit: Tensor) -> Tensor:
    """ĝ of §3.2: the hard choice in the forward pass, σ's gradient in the backward one. `[S]` → `[S]`."""
    sigma, choice = decide(logit)
    return choice.to(sigma.dtype) + (sigma - sigma.detach())  # in this order the forward value is exactly 0 or 1


def adapters_of(config: LayerRouteConfig) -> LoraOptions | None:
    """The adapters an arm has: what its `lora` option says, held against what its checkpoint has.

    Raises:
        InputError: the checkpoint has none, or others than asked for.
    """
    if config.lora is False:
        return None
    saved: LoraOptions | None = None
    if config.checkpoint is not None:
        folder = Path(config.checkpoint)
        base = read_json(folder, CONFIG_FILE).get("base")
        saved = lora.read_options(folder, base) if _has_adapters(folder) else None
        if config.lora is not None and saved is None:
            raise InputError(f"checkpoint {folder}: it was trained without LoRA, and the arm asks for it")
    if isinstance(config.lora, LoraOptions):
        if saved is not None and (saved.rank, saved.alpha) != (config.lora.rank, config.lora.alpha):
            raise InputError(
                f"checkpoint {config.checkpoint}: its LoRA has rank {saved.rank} and alpha {saved.alpha:g}, the arm "
                f"asks for rank {config.lora.rank} and alpha {config.lora.alpha:g}"
            )
        return config.lora
    return saved or (LoraOptions() if config.lora else None)


def _has_adapters(folder: Path) -> bool:
    found = read_json(folder, CONFIG_FILE).get("lora")
    if not isinstance(found, bool):
        raise InputError(
            f"checkpoint {folder}: {CONFIG_FILE} must say whether the routers were trained with adapters, lora: true "
            f"or false, and {'says nothing' if found is None else f'says {found!r}'}"
        )
    return found


class LayerRoute(Trainable):
    """Per-sequence block skipping on a Llama- or Qwen2-style decoder."""

    Config = LayerRouteConfig
    Objective = LayerRouteObjective
    skipped = "blocks skipped"
    Route = ForcedGates
    scope = "sequence"
    sites = ("block",)
    signals: ClassVar = {"logit": "s_i, the router's output before σ"}

    def __init__(self, model: PreTrainedModel, config: LayerRouteConfig, recorder: Recorder) -> None:
        super().__init__(model, config, recorder)
        layers = len(self.decoder.blocks)
        if config.kv_policy == "project":
            refuse_other_attention(self.decoder)
        self.lora = adapters_of(config)
        if self.lora is not None:
            lora.add_adapters(self.decoder, self.lora)
        self.config = config.model_copy(update={"lora": self.lora or False})
        #: s_i of the forward in training, `[S]` a layer; None outside training.
        self._logits: list[Tensor] | None = None
        self.routers = [self._new_router(bias) for bias in start_bias(layers)]
        self._requests = RequestGates()
        self._held_S: list[Held] = []
        if config.checkpoint is not None:
            try:
                self.restore(Path(config.checkpoint))
            except InputError:
                if self.lora is not None:
                    lora.remove_adapters(self.decoder)
                raise
        gates = config.gates
        self.force(gates.forced if isinstance(gates, ForcedOption) else "open" if gates == "open" else None)

    def install(self) -> None:
        if not self.keeps_cache:
            self.model.config.use_cache = False
            if self.model.generation_config is not None:
                self.model.generation_config.use_cache = False
        for layer, (block, router) in enumerate(zip(self.decoder.blocks, self.routers, strict=True)):
            block.add_module(ADDED, router)  # so that it moves with the model and is found among its parameters
            # A partial of bound methods: a deep copy of the tree is then wrapped by a deep copy of this handle.
            block.forward = partial(self._forward, layer, block.forward)

    def _new_router(self, bias: float) -> nn.Linear:
        # w = 0 (ours): pooled norms reach about 1,000, so a random w would decide before training does.
        device = next(self.model.parameters()).device
        size = self.decoder.hidden_size
        # skip_init: nn.Linear would draw from the caller's random state what is overwritten here.
        router = cast(nn.Linear, nn.utils.skip_init(nn.Linear, size, 1, device=device, dtype=torch.float32))
        nn.init.zeros_(router.weight)
        nn.init.constant_(router.bias, bias)
        return router

    # -- the method's face ------------------------------------------------------------------------

    @classmethod
    def check(cls, model: PreTrainedModel, config: LayerRouteConfig, ranks: int = 1) -> None:
        if config.checkpoint is not None:
            checkpoint_facts(Path(config.checkpoint), decoder(model), METHOD, FORMAT)

    @classmethod
    def choices(cls, model: PreTrainedModel, config: LayerRouteConfig) -> list[Choice]:
        dec = lora.without_adapters(decoder(model))
        adapters = adapters_of(config)
        found = shared_choices(dec)
        d = dec.hidden_size
        for layer in range(len(dec.blocks)):
            found += [
                Choice(
                    layer=layer, site="router", index=0, name="run", segments=["router"],
                    overhead_parameters=d + 1, flops_per_row=2 * d, weight_bytes=4 * (d + 1),
                ),
                Choice(layer=layer, site="block", index=SKIP, name="skip", segments=["attention", "ffn"]),
            ]  # fmt: skip
            block, run = dec.blocks[layer], block_choice(dec, layer, index=RUN)
            if config.kv_policy == "project":
                kv = key_value_choice(dec, layer)
                found.append(_with_adapters(without(run, kv), block, adapters, set(ATTENTION_PARTS) - {*KV_PARTS}))
                found.append(_with_adapters(kv, block, adapters, KV_PARTS))
            else:
                found.append(_with_adapters(run, block, adapters))
        return found

    def force(self, how: Any | None) -> None:
        """Bypass the router's decision: `"open"`, `"closed"`, a `ForcedGates`, or None to let it decide.

        For requests to come: a padded request's gates are in its cache, and a serving engine must be idle.
        """
        super().force(how)
        self._requests.clear()

    def release(self, request: str) -> None:
        self._requests.release(request)

    @property
    def signal_starts(self) -> dict[str, list[float]]:
        return {"logit": start_bias(len(self.routers))}  # with w = 0 the bias is the logit, whatever the input

    @property
    def kv_policy(self) -> str:
        return str(self.config.kv_policy)

    @classmethod
    def caches(cls, config: LayerRouteConfig) -> bool:
        return config.kv_policy != "recompute"

    def kv_bytes(self, output: Any) -> tuple[int, int] | None:
        return super().kv_bytes(output) if self.keeps_cache else (0, 0)

    def layers_kept(self, sequences: Sequences) -> list[Collection[int]]:
        if self.config.kv_policy == "project":
            return super().layers_kept(sequences)
        return [[layer for layer, gate in enumerate(held.gates) if gate.run] for held in self._held_S]

    def probes(self) -> list[Probe]:
        found = [Probe(i, "router", 0, router, whole=True) for i, router in enumerate(self.routers)]
        if self.config.kv_policy == "project":
            attention = [cast(nn.Module, block.self_attn) for block in self.decoder.blocks]
            found += [Probe(i, "kv", 0, cast(nn.Module, each.k_proj)) for i, each in enumerate(attention)]
        return [head_probe(self.decoder), *found, *block_probes(self.decoder, attention=("block", RUN))]

    def spans(self) -> list[SpanSite]:
        return decoder_spans(self.decoder)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, base: str | None = None) -> None:
        """Write routers and adapters.

        Args:
            folder: made if need be.
            dtype: what the numbers are stored as; `restore` computes in float32 in any case.
            base: name of the backbone, for readers of the files.

        Raises:
            RuleError: a value is not finite, or too large for `dtype`.
        """
        for name, tensor in self.trainables().items():
            if not bool(torch.isfinite(tensor.to(dtype)).all()):
                raise RuleError(f"{name} holds values that {dtype} cannot hold; nothing was saved")
        folder.mkdir(parents=True, exist_ok=True)
        routers = {
            f"{i}.{name}": tensor.detach().to("cpu", dtype).clone()
            for i, router in enumerate(self.routers)
            for name, tensor in router.named_parameters()
        }
        facts = {
            "format": FORMAT, **backbone_facts(self.decoder, METHOD), "base": base, "lora": self.lora is not None,
            "base_sample": base_sample(self.decoder),
        }  # fmt: skip
        (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        save_file(routers, folder / ROUTERS_FILE)
        if self.lora is not None:
            lora.save(self.decoder, self.lora, folder, dtype, base)

    def restore(self, folder: Path) -> None:
        facts = checkpoint_facts(folder, self.decoder, METHOD, FORMAT)
        refuse_other_weights(folder, facts, self.decoder)
        shapes = {f"{i}.{n}": tuple(p.shape) for i, r in enumerate(self.routers) for n, p in r.named_parameters()}
        tensors = read_tensors(folder, ROUTERS_FILE, shapes)
        if self.lora is not None:
            lora.restore(self.decoder, folder)
        with torch.no_grad():
            for i, router in enumerate(self.routers):
                for name, parameter in router.named_parameters():
                    parameter.copy_(tensors[f"{i}.{name}"])
        self._trained = True
        self._requests.clear()

    def adapt_twin(self, twin: PreTrainedModel) -> None:
        if self.lora is not None:
            lora.merge_into(self.decoder, decoder(twin))

    @property
    def caveat(self) -> str | None:
        if self.lora is not None or self.config.checkpoint is None:
            return None
        return "routers trained with LoRA, run without it" if _has_adapters(Path(self.config.checkpoint)) else None

    # -- training ---------------------------------------------------------------------------------

    def trainables(self) -> dict[str, nn.Parameter]:
        routers = {f"{i}.{n}": p for i, router in enumerate(self.routers) for n, p in router.named_parameters()}
        return routers | (lora.adapter_parameters(self.decoder) if self.lora is not None else {})

    def start(self, seed: int) -> None:
        for router, bias in zip(self.routers, start_bias(len(self.routers)), strict=True):
            nn.init.zeros_(router.weight)
            nn.init.constant_(router.bias, bias)
        if self.lora is not None:
            lora.reset(self.decoder, seed)

    def losses(
        self, ids_BT: Tensor, mask_BT: Tensor, objective: Any, *, tokens: int, sequences: int, ramp: float = 1.0
    ) -> Losses:
        if self._route is not None:
            raise InputError("training needs gates: router, since a forced route leaves its router nothing to learn")
        self._logits = []
        try:
            logits_BTV = self.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
            sigma_LS = torch.sigmoid(torch.stack(self._logits))
            ran_L = (torch.stack(self._logits) > 0).sum(1)
        finally:
            self._logits = None
        nll = token_nll(logits_BTV, ids_BT, mask_BT).sum()
        penalty = sigma_LS.mean(0).sum()
        total = nll / tokens + objective.gate_weight * penalty / sequences
        return Losses(total, nll.detach(), penalty.detach(), ran_L, deciders=len(ids_BT))

    def _soft_forward(self, layer: int, run_block: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """One block in training: computed for every sequence, its effect scaled by ĝ."""
        assert self._logits is not None
        router = self.routers[layer]
        pooled_Sd = cast(Sequences, self.tracker.current).mean_over_real(hidden)
        logit_S = router(pooled_Sd.to(router.weight.dtype))[:, 0]
        self._logits.append(logit_S)
        # Summed in float32 and rounded once: in bfloat16, h + (Block(h) − h) would not give Block(h) back.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        gate_S11 = straight_through(logit_S)[:, None, None].to(wide)
        before, after = hidden.to(wide), cast(Tensor, run_block(hidden, **kwargs)).to(wide)
        return (before + gate_S11 * (after - before)).to(hidden.dtype)

    # -- one block --------------------------------------------------------------------------------

    def _forward(self, layer: int, run_block: Callable[..., Tensor], hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self._logits is not None:
            return self._soft_forward(layer, run_block, hidden_states, kwargs)
        hidden, recorder = hidden_states, self.recorder
        sequences, cache = cast(Sequences, self.tracker.current), kwargs.get("cache")
        kept = self._open_before(layer, sequences, cache)
        if kept is not None:
            hidden = run_block(hidden, **kwargs)
            kept.advance(sequences.width)
            return hidden
        projected: ProjectedLayer | None = None
        with recorder.span("router", layer):
            if self.config.kv_policy != "request":
                self._refuse_what_the_policy_cannot(sequences, cache)
            if sequences.packed and self.config.kv_policy == "project":
                gates = self._packed_running_gates(layer, hidden, sequences, cache)
            elif sequences.packed:
                gates = self._packed_gates(layer, hidden, sequences, cache)
            elif cache is None:
                gates = self._decide(layer, hidden, sequences)
            elif self.config.kv_policy == "project":
                projected = cache_layer(cache, layer, len(self.routers), ProjectedLayer)
                gates = self._running_gates(layer, hidden, sequences, projected)
            else:
                kept = cache_layer(cache, layer, len(self.routers))
                gates = self._kept_gates(layer, hidden, sequences, kept)
            if recorder.recording:
                choice, value, logit = gates.columns
                recorder.gate(layer, "block", choice, value, logit=logit)
        if self.config.kv_policy == "project":
            block = self.decoder.blocks[layer]
            return run_projecting(block, run_block, hidden, kwargs, sequences, gates, recorder, layer, projected)
        hidden = run_gated(run_block, hidden, kwargs, sequences, gates, recorder, layer)
        if kept is not None:
            kept.advance(sequences.width)
        return hidden

    def _open_before(self, layer: int, sequences: Sequences, cache: Any) -> SubsetLayer | None:
        """What the cache keeps for a block that every row of a padded batch was decided to run, in an earlier step.

        Most blocks of most steps are such, and a block has no more than some hundred microseconds to be run in.
        """
        if self.recorder.recording or cache is None or sequences.packed:
            return None
        layers = cache.layers
        if len(layers) != len(self.routers) or type(layers[layer]) is not SubsetLayer:
            return None
        kept: SubsetLayer = layers[layer]
        return kept if kept.open_to(len(sequences.rows_S), sequences.width) else None

    def _kept_gates(self, layer: int, hidden: Tensor, sequences: Sequences, kept: SubsetLayer) -> Gates:
        """Gates of a padded batch: decided on the prompt, then those its cache holds."""
        gates = kept.gates
        if gates is None:
            gates = self._decide(layer, hidden, sequences)
            kept.settle(gates, sequences.width)
        else:
            _refuse_another_batch(gates, sequences, kept.sealed)
        return gates

    def _running_gates(self, layer: int, hidden: Tensor, sequences: Sequences, kept: ProjectedLayer) -> Gates:
        """Gates of a padded batch, on the mean over all tokens so far; a sealed cache goes on with those it holds."""
        now = kept.now
        if now is not None:
            _refuse_another_batch(now.gates, sequences, kept.sealed)
        if now is not None and kept.sealed:
            mean_Bd, gates = now.mean_Bd, now.gates
        else:
            mean_Bd = kept.running_mean(hidden, sequences)
            gates = self._ask(layer, mean_Bd, sequences.requests)
        kept.settle(mean_Bd, gates, sequences.width)
        return gates

    def _refuse_what_the_policy_cannot(self, sequences: Sequences, cache: Any) -> None:
        if self.keeps_cache:
            return
        if sequences.packed:
            raise InputError(
                "kv_policy recompute keeps no cache and is not offered under a serving engine; serve with kv_policy "
                "request or project"
            )
        if cache is not None:
            raise InputError(
                "kv_policy recompute keeps no cache: call the model with use_cache=False, and in every step with the "
                "whole sequence"
            )

    def _packed_gates(self, layer: int, hidden: Tensor, sequences: Sequences, cache: Any) -> Gates:
        """Gates of a packed batch: decided on a request's prompt, then those held for it."""
        if layer == 0:
            self._held_S = self._requests.admit(sequences, cache)
        held_S = self._held_S
        new = [i for i, held in enumerate(held_S) if len(held.gates) == layer]
        if new:
            for i, gate in zip(new, self._decide(layer, hidden, sequences, new).of_S, strict=True):
                held_S[i].gates.append(gate)
        return Gates(tuple(held.gates[layer] for held in held_S))

    def _packed_running_gates(self, layer: int, hidden: Tensor, sequences: Sequences, cache: Any) -> Gates:
        """Gates of a packed batch, each on the mean over all its request's tokens so far."""
        if layer == 0:
            self._held_S = self._requests.admit(sequences, cache)
        now_Sd = sequences.mean_over_real(hidden).detach()
        means = [
            held.mean(layer, now_d, past, rows)
            for held, now_d, past, rows in zip(self._held_S, now_Sd, sequences.past_S, sequences.rows_S, strict=True)
        ]
        return self._ask(layer, torch.stack(means), sequences.requests)

    def _decide(self, layer: int, hidden: Tensor, sequences: Sequences, which: Sequence[int] | None = None) -> Gates:
        """Gates of sequences `which` (default: all) from the mean of their input in this step."""
        which = range(len(sequences)) if which is None else which
        return self._ask(layer, sequences.mean_over_real(hidden, which), [sequences.requests[i] for i in which])

    def _ask(self, layer: int, mean_Sd: Tensor, requests: list[str]) -> Gates:
        """Gates of `requests` from the means of their input. The one wait for the device."""
        router = self.routers[layer]
        logit_S = router(mean_Sd.to(router.weight.dtype))[:, 0]
        values, logits = torch.stack([torch.sigmoid(logit_S), logit_S]).tolist()
        for request, logit in zip(requests, logits, strict=True):
            if not math.isfinite(logit):
                raise InputError(
                    f"layer {layer}: the router's logit is {logit} for request {request!r}; it must be finite"
                )
        return Gates(tuple(map(Gate, self._runs(layer, requests, logits), values, logits)))

    def _runs(self, layer: int, requests: list[str], logits: list[float]) -> list[bool]:
        if self._route is None:
            return [logit > 0 for logit in logits]
        if isinstance(self._route, ForcedGates):
            return [self._route.open_layers(len(self.routers), request)[layer] for request in requests]
        return [self._route == "open"] * len(requests)


def _refuse_another_batch(gates: Gates, sequences: Sequences, sealed: bool) -> None:
    """Refuse a step that does not go on with the sequences a cache holds `gates` for."""
    if len(gates) != len(sequences):
        raise InputError(f"the cache holds {len(gates)} sequences, this step has {len(sequences)}")
    if sequences.width > 1 and not sealed:
        raise InputError(
            f"the cache holds a prompt whose gates are decided, and this step adds {sequences.width} tokens. "
            "Sequence gates need the whole prompt at once: do not split it (prefill_chunk_size), and give a longer "
            "prompt an empty cache"
        )


def _with_adapters(
    run: Choice, block: nn.Module, adapters: LoraOptions | None, parts: Iterable[str] = ATTENTION_PARTS
) -> Choice:
    """The cost of running a block, or these projections of it, adapters charged to the method."""
    if adapters is None:
        return run
    count = sum(a * b for a, b in lora.adapter_shapes(block, adapters.rank, parts))
    wide = torch.promote_types(next(block.parameters()).dtype, torch.float32)
    return run.model_copy(
        update={
            "overhead_parameters": run.overhead_parameters + count,
            "flops_per_row": run.flops_per_row + 2 * count,
            "weight_bytes": run.weight_bytes + wide.itemsize * count,
        }
    )
