"""HeRo: in each routable layer a token takes the frozen FFN or a small adapter, decided with a memory of its own depth.

Attention always runs. For routable layer j = 1..L_R (actual layer l_j), per token, in this order: build state → read
memory → gate → execute one branch → write memory (METHODS §1; HeRo, formulas 1–16).

    h̄_j = h_in + Attn(LN_attn(h_in))        u_j = LN_ffn(h̄_j)
    h_out = h̄_j + g_j·FFN_j(u_j)            if g_j ≥ τ
            h̄_j + (1 − g_j)·Adapter_j(u_j)  otherwise

How g_j comes about is `execution.history_router`; how only the branch that was decided is computed, `execution.rows`.
The memory is each token's own and begins empty in every forward: nothing crosses tokens or decode steps, so there is
nothing to keep in a cache or for a request.

The block itself is not touched. Its FFN's forward is replaced by one that returns what h̄_j is to be changed by, and a
hook on LN_ffn takes h̄_j on the way in; so whatever the block does around them stays as it is.

Forced routes bypass the router's value, not only its threshold: FFN with scale 1, so that all-FFN is the dense model,
or adapter with scale 1. The router is evaluated under every setting, so that its time is always in.

(ours) Without `layers`, budget 0.25 routes the last ⌊L/2⌋ layers and 0.40 the last ⌊3L/4⌋ (9–32 of 32, counted from 1).
d_r is round(d·896/4096) unless given. Router and memory compute in float32 at least, adapters in the backbone's dtype;
the gate scales the branch's output in float32 before it is rounded to the backbone's dtype, in inference the adapter's
hidden layer, after which everything is linear. LN_ffn belongs to both
branches, so its parameters are counted with attention, which always runs. Parameters that all routable layers share
are charged once, at the first of them.

Training (METHODS §1; HeRo, formulas 17 and 18), with the backbone frozen:

    L = L_LM + α_t·mean over valid (b, t < T) of ( Σ_j g_{b,j,t} )²

Only the decided branch is computed, as in inference, and its output scale (g or 1 − g) is what the language-model loss
teaches the router through; the comparison with τ is not differentiated, and no gradient passes straight through it. So
an adapter learns from the tokens it is given, and from no others. Sums over depth come before the square
(`execution.depth_walk`). (ours) α_t rises linearly over the warm-up to α; a language-model loss and penalty that are
means over all predicted tokens of an update, not of each forward; adapters are trained in float32 and rounded to the
backbone's dtype as they compute, since in bfloat16 steps of 1e-4 are lost beside weights of 0.04. The loop around it is
`profiler.train`. A token's gates see its past only, so a routed loss on held-out text leaks nothing.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast

import torch
from pydantic import Field, ValidationError, field_validator, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.costs import attention_choice, ffn_choice, shared_choices
from profiler.errors import InputError, RuleError
from profiler.execution import depth_memory, history_router
from profiler.execution.adapter import Adapter
from profiler.execution.backbone_facts import (
    CONFIG_FILE,
    backbone_facts,
    base_sample,
    checkpoint_facts,
    refuse_other_weights,
)
from profiler.execution.checkpoint_files import read_json, read_tensors
from profiler.execution.decoder import ADDED, Decoder, decoder
from profiler.execution.depth_walk import Walk, checkpoint_blocks, lent, predicting, squared_usage
from profiler.execution.folded_router import FoldedMath
from profiler.execution.forked_costs import ADAPTER, FFN, forked_choices
from profiler.execution.grouped import DTYPES, refuse_grouped, swiglu_first
from profiler.execution.history_controls import FOREIGN, around
from profiler.execution.history_router import (
    LOCAL,
    MEMORY,
    SIGNALS,
    HistoryRouter,
    PlainMath,
    Scores,
    Variant,
)
from profiler.execution.instruments import decoder_spans, first_products, head_probe
from profiler.execution.likelihood import token_nll
from profiler.execution.products import other_swiglu
from profiler.execution.routes import ForcedTokens
from profiler.execution.row_trials import Trial, trial
from profiler.execution.rows import Branch, Fork, Strategy
from profiler.execution.sequences import Sequences
from profiler.execution.states import Made
from profiler.methods import Losses, MethodConfig, Trainable
from profiler.recorder import Probe, SpanSite
from profiler.records import FORGET_FACTOR, Choice, MemoryRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from profiler.recorder import Recorder

T = TypeVar("T")

METHOD = "hero"
WEIGHTS_FILE = "hero.safetensors"
#: Format of a checkpoint folder. 1: config.json and hero.safetensors.
FORMAT = 1
THRESHOLD = 0.5
#: Share of the layers, the last ones, that each budget routes.
BUDGETS = {0.25: (1, 2), 0.40: (3, 4)}


class ForcedOption(MethodConfig):
    """`gates: {forced: {...}}`."""

    forced: ForcedTokens


Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=4096)]


class HeroConfig(MethodConfig):
    """Options of an arm. Where one is None the checkpoint says, or without one the default in brackets.

    Attributes:
        checkpoint: folder written by `save`; None for parameters as training starts them.
        budget: 0.25 or 0.40 [0.25]: which layers are routable. Instead of it:
        layers: the routable layers, numbered from 0.
        adapter_width: d_r [round(d·896/4096)].
        threshold: τ [0.5]. Instead of it:
        adapter_rate: share of decisions that take the adapter, which a run finds τ for (`profiler.calibration`).
        variant: the full router [full] or an ablation or control (`execution.history_router`). `random` is no variant:
            force gates at the rate wanted.
        memory: form of the depth memory; `auto` takes the cheaper one.
        strategy: how rows are run (`execution.rows`); `auto` takes the fastest that skips. `masked` computes everything
            and saves nothing.
        gates: `router` decides; `open` runs every FFN; `{forced: {ratio, seed, pattern}}` is a synthetic route.
        seed: of what is random: start values, and the orders of `shuffled_history`.
    """

    checkpoint: str | None = None
    budget: float | None = None
    layers: Layers | None = None
    adapter_width: int | None = Field(default=None, ge=1, le=2**20)
    threshold: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False)
    adapter_rate: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False)
    variant: Variant | None = None
    memory: Literal["auto", "matrix", "dual"] = "auto"
    strategy: Literal["auto", "gather", "overlay", "grouped", "masked"] = "auto"
    gates: Literal["router", "open"] | ForcedOption = "router"
    seed: int = Field(default=0, ge=0, lt=2**32)

    @field_validator("budget")
    @classmethod
    def _known_budget(cls, budget: float | None) -> float | None:
        if budget is not None and budget not in BUDGETS:
            raise ValueError("budget is 0.25 or 0.40; for another choice of layers give `layers`")
        return budget

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and len(set(layers)) < len(layers):
            raise ValueError("each layer may be listed once")
        return None if layers is None else sorted(layers)

    @model_validator(mode="after")
    def _one_way_to_say_which(self) -> HeroConfig:
        if self.budget is not None and self.layers is not None:
            raise ValueError("give `budget` or `layers`, not both")
        if self.adapter_rate is not None and (self.threshold is not None or self.gates != "router"):
            raise ValueError("adapter_rate finds the router's threshold; give no `threshold` and no `gates` beside it")
        if self.variant == "shuffled_history" and self.memory == "matrix":
            raise ValueError("variant shuffled_history needs memory dual: the matrix form keeps no entries to shuffle")
        return self


class HeroObjective(MethodConfig):
    """What training minimises; `alpha` is α of formula 17."""

    alpha: float = Field(default=1e-3, ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Decided:
    """An arm's options with nothing left open."""

    layers: list[int]
    adapter_width: int
    threshold: float
    variant: Variant
    memory: depth_memory.Form


def decided(config: HeroConfig, dec: Decoder) -> Decided:
    """Every option, as the arm has it, its checkpoint, or by default.

    Raises:
        InputError: the model has no such layer, or the checkpoint was made with something else than asked for.
    """
    depth, saved = len(dec.blocks), _saved_options(config)
    if config.layers is not None and config.layers[-1] >= depth:
        raise InputError(f"hero: layers: {config.layers[-1]} is none of this model's, which are 0 to {depth - 1}")
    asked = config.layers if config.budget is None else last_layers(config.budget, depth)
    variant: Variant = config.variant or (saved.variant if saved else "full")
    # The local head is in every checkpoint but that of wide_local, whose own is another.
    part = variant == "no_history" and saved is not None and saved.variant not in LOCAL
    if saved is not None and variant != saved.variant and {variant, saved.variant} & LOCAL and not part:
        raise InputError(
            f"checkpoint {config.checkpoint}: it was trained as variant {saved.variant}, whose parameters are not "
            f"those of {variant}, which the arm asks for"
        )
    # Threshold and variant may differ from the checkpoint's: one is calibrated, the others take parts away.
    threshold = config.threshold if config.threshold is not None else saved.threshold if saved else THRESHOLD
    layers = _agreed(config, "layers", asked, saved.layers if saved else None, last_layers(0.25, depth))
    memory = config.memory
    if memory == "auto":
        memory = "dual" if variant == "shuffled_history" else depth_memory.cheaper(MEMORY, len(layers))
    return Decided(
        layers=layers,
        adapter_width=_agreed(
            config, "adapter_width", config.adapter_width, saved.adapter_width if saved else None,
            max(1, round(dec.hidden_size * 896 / 4096)),
        ),
        threshold=threshold,
        variant=variant,
        memory=memory,
    )  # fmt: skip


def last_layers(budget: float, depth: int) -> list[int]:
    """The routable layers of a budget, of `depth` layers numbered from 0."""
    above, below = BUDGETS[budget]
    return list(range(depth - max(1, depth * above // below), depth))


class _Saved(MethodConfig):
    """Options a checkpoint was trained with, as its config.json has them."""

    layers: Layers
    adapter_width: int = Field(ge=1, le=2**20)
    threshold: float = Field(gt=0, lt=1, allow_inf_nan=False)
    variant: Variant


def _saved_options(config: HeroConfig) -> _Saved | None:
    if config.checkpoint is None:
        return None
    folder = Path(config.checkpoint)
    try:
        return _Saved.model_validate(read_json(folder, CONFIG_FILE).get("options"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["options", *map(str, first["loc"])])
        raise InputError(f"checkpoint {folder}: {CONFIG_FILE}: {key}: {first['msg']}") from error


def _agreed(config: HeroConfig, key: str, asked: T | None, saved: T | None, default: T) -> T:
    if asked is not None and saved is not None and asked != saved:
        raise InputError(f"checkpoint {config.checkpoint}: it was made with {key} {saved}, the arm asks for {asked}")
    return asked if asked is not None else saved if saved is not None else default


class _Gate(nn.Module):
    """The shared router at one layer: a module of its own, so that its rows are counted and its time is told apart."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self._score = score

    def forward(self, h_bar: Tensor) -> Scores:
        """`[B, T, d]` or `[1, T, d]` → scores of its rows."""
        return cast(Scores, self._score(h_bar))


class _Added(nn.Module):
    """What one routable layer gets."""

    def __init__(self, adapter: Adapter, gate: _Gate) -> None:
        super().__init__()
        self.adapter, self.gate = adapter, gate


class Hero(Trainable):
    """Per-token FFN-or-adapter routing on a Llama- or Qwen2-style decoder."""

    Config = HeroConfig
    Objective = HeroObjective
    skipped = "(token, layer) pairs took the adapter"
    Route = ForcedTokens  # open: every FFN; closed: every adapter
    scope = "token"
    sites = ("ffn",)
    signals: ClassVar = SIGNALS
    rate_option = "adapter_rate"

    def __init__(self, model: PreTrainedModel, config: HeroConfig, recorder: Recorder) -> None:
        super().__init__(model, config, recorder)
        self.options = options = decided(config, self.decoder)
        self.config = config.model_copy(update={**vars(options), "budget": None})
        #: l_j of j = 1, 2, …
        self.routable = options.layers
        weight = cast(nn.Linear, first_products(self.decoder.blocks[0])[1]).weight
        self._dtype, self._device = weight.dtype, weight.device
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        inner, d = weight.shape
        #: Widths of the products of FFN and adapter.
        self._widths = (d, inner, options.adapter_width)
        if config.strategy == "grouped":
            refuse_grouped(d, inner, self._dtype)
        with torch.device("meta"):  # values come from `start`; torch's own would move the caller's random state
            router = HistoryRouter(d, len(self.routable), options.variant, options.memory, config.seed)
            adapters = [Adapter(d, options.adapter_width) for _ in self.routable]
        self.router = router.to(self._wide).to_empty(device=self._device)
        self.adapters = [adapter.to(self._dtype).to_empty(device=self._device) for adapter in adapters]
        self.start(config.seed)
        self._h_bar: Tensor | None = None
        self._folded: Made[FoldedMath] = Made()
        #: The forward under way.
        self._walk = Walk()
        self._trial: Trial | None = None
        if config.checkpoint is not None:
            self.restore(Path(config.checkpoint))
        gates = config.gates
        self.force(gates.forced if isinstance(gates, ForcedOption) else "open" if gates == "open" else None)

    def install(self) -> None:
        self.decoder.base.add_module(ADDED, self.router)  # so that it moves with the model and is found in it
        #: One a routable layer.
        self.forks: list[Fork] = []
        self._gates: list[_Gate] = []
        for depth, (layer, adapter) in enumerate(zip(self.routable, self.adapters, strict=True), start=1):
            block = self.decoder.blocks[layer]
            mlp, norm = cast(nn.Module, block.mlp), cast(nn.Module, block.post_attention_layernorm)
            # Partials of bound methods: a deep copy of the tree is then wrapped by a deep copy of this handle.
            gate = _Gate(partial(self._score, depth))
            fork = Fork(
                layer, "ffn",
                Branch(ADAPTER, "replacement", adapter, adapter.first, run_scaled=adapter),
                Branch(FFN, "ffn", mlp.forward, partial(swiglu_first, mlp), other_swiglu(mlp)),
                self.recorder,
            )  # fmt: skip
            self.forks.append(fork)
            self._gates.append(gate)
            block.add_module(ADDED, _Added(adapter, gate))
            norm.register_forward_pre_hook(self._take_h_bar)
            mlp.forward = partial(self._forward, depth, fork, gate)
        if self.config.strategy == "auto" and self._dtype in DTYPES:
            self._trial = trial(self.forks, self._widths, self._dtype, self._device)

    def start(self, seed: int) -> None:
        """Set everything added to the value training starts from; what is random is drawn from `seed`."""
        self.router.start(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for adapter in self.adapters:
            adapter.start(generator)

    # -- the method's face ------------------------------------------------------------------------

    @classmethod
    def check(cls, model: PreTrainedModel, config: HeroConfig, ranks: int = 1) -> None:
        if config.checkpoint is not None:
            checkpoint_facts(Path(config.checkpoint), decoder(model), METHOD, FORMAT)

    @classmethod
    def choices(cls, model: PreTrainedModel, config: HeroConfig) -> list[Choice]:
        dec = decoder(model)
        options = decided(config, dec)
        depths = {layer: depth for depth, layer in enumerate(options.layers, start=1)}
        found = shared_choices(dec)
        d, layers, variant = dec.hidden_size, len(options.layers), options.variant
        # Of the router's parameters only η_j is the layer's own; what all share is charged at the first.
        own = 0 if variant in LOCAL | {"no_memory_read", "recent_only"} else 1
        shared = history_router.parameter_count(d, layers, variant) - own * layers
        for layer in range(len(dec.blocks)):
            if layer not in depths:
                found += [attention_choice(dec, layer), ffn_choice(dec, layer)]
                continue
            depth = depths[layer]
            found += forked_choices(
                dec, layer, adapter_width=options.adapter_width, router_parameters=own + (shared if depth == 1 else 0),
                router_flops=history_router.flops_per_row(d, layers, variant, options.memory, depth),
            )  # fmt: skip
        return found

    @property
    def discards(self) -> bool:
        return bool(self.config.strategy == "masked")

    @property
    def threshold(self) -> float:
        return self.options.threshold

    @property
    def caveat(self) -> str | None:
        saved = _saved_options(self.config)
        if saved is None or saved.variant == self.options.variant:
            return None
        return f"trained as variant {saved.variant}, run as {self.options.variant}"

    def probes(self) -> list[Probe]:
        found = [head_probe(self.decoder)]
        for layer, block in enumerate(self.decoder.blocks):
            attention, ffn = first_products(block)
            found += [Probe(layer, "attention", 0, attention)]
            if layer not in self.routable:
                found.append(Probe(layer, "ffn", 0, ffn))
                continue
            place = self.routable.index(layer)
            found += [
                Probe(layer, "ffn", ADAPTER, self.adapters[place].W1),
                Probe(layer, "ffn", FFN, ffn),
                Probe(layer, "router", 0, self._gates[place]),
            ]
        return found

    def spans(self) -> list[SpanSite]:
        gates = zip(self.routable, self._gates, strict=True)
        return [*decoder_spans(self.decoder), *(SpanSite(gate, "router", layer) for layer, gate in gates)]

    @classmethod
    def caches(cls, config: HeroConfig) -> bool:
        return config.variant != FOREIGN  # which needs the token before, and so whole sequences

    @property
    def constants(self) -> dict[str, dict[int, float]]:
        return {FORGET_FACTOR: dict(zip(self.routable, rho, strict=True))} if (rho := self.rho()) else {}

    @classmethod
    def memory(cls, model: PreTrainedModel, config: HeroConfig) -> MemoryRecord | None:
        dec = decoder(model)
        options = decided(config, dec)
        if options.variant in LOCAL | {"no_memory_read"}:
            return None
        kept = depth_memory.numbers(options.memory, MEMORY, len(options.layers))
        wide = torch.promote_types(cast(nn.Linear, first_products(dec.blocks[0])[1]).weight.dtype, torch.float32)
        return MemoryRecord(form=options.memory, bytes_per_row=kept * wide.itemsize)

    def rho(self) -> list[float]:
        """The forget factor ρ_j of each routable layer; empty where the variant has none."""
        return [] if self.options.variant in LOCAL else self.router.rho_L().tolist()

    # -- training ---------------------------------------------------------------------------------

    def prepare(self, gradient_checkpointing: bool) -> None:
        if self.config.strategy == "grouped":
            raise InputError(
                "training needs strategy auto, gather, overlay or masked, since grouped passes no gradients"
            )
        for adapter in self.adapters:
            adapter.to(self._wide)
        self._trial = None  # whichever strategy is the faster one, two trainings must add up in the same order
        if gradient_checkpointing:
            # Nothing before the first routable layer has a gradient.
            checkpoint_blocks(self.decoder.blocks[self.routable[0] :], self._again)

    def losses(
        self, ids_BT: Tensor, mask_BT: Tensor, objective: Any, *, tokens: int, sequences: int, ramp: float = 1.0
    ) -> Losses:
        if self._route is not None:
            raise InputError("training needs gates: router, since a forced route leaves its router nothing to learn")
        # Begun ahead of the blocks: what all of them share must not be made inside one that is computed again.
        hook = self.decoder.base.register_forward_pre_hook(self._begin_training)
        try:
            logits_BTV = self.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
            g_LN, ffn_LN = self._walk.gates_LN()
        finally:
            hook.remove()
            self._walk = Walk()
        valid_N = predicting(mask_BT)
        nll = token_nll(logits_BTV, ids_BT, mask_BT).sum()
        penalty = squared_usage(g_LN, valid_N)
        total = nll / tokens + ramp * objective.alpha * penalty / tokens
        return Losses(
            total=total,
            nll=nll.detach(),
            penalty=penalty.detach(),
            ran_L=(ffn_LN & valid_N).sum(1),
            deciders=int(valid_N.sum()),
            sums={"sum_g": (g_LN.detach().sum(0) * valid_N).sum()},
        )

    def _begin_training(self, base: nn.Module, args: Any) -> None:
        self._walk = self._begin(cast(Sequences, self.tracker.current), self.model.device)
        self._walk.training = True

    def _again(self) -> AbstractContextManager[None]:
        """A context in which a block of the forward under way can be computed again."""
        return lent(self, "_walk", self._walk)

    # -- checkpoints ------------------------------------------------------------------------------

    def trainables(self) -> dict[str, nn.Parameter]:
        """What training changes, by a name that is the same in every tree of the method."""
        found = {f"router.{name}": parameter for name, parameter in self.router.named_parameters()}
        for layer, adapter in zip(self.routable, self.adapters, strict=True):
            found |= {f"adapters.{layer}.{name}": parameter for name, parameter in adapter.named_parameters()}
        return found

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, base: str | None = None) -> None:
        """Write router, memory and adapters.

        Args:
            folder: made if need be.
            dtype: what the numbers are stored as.
            base: name of the backbone, for readers of the files.

        Raises:
            RuleError: a value is not finite, or too large for `dtype`.
        """
        stored = {name: tensor.detach().to("cpu", dtype).clone() for name, tensor in self.trainables().items()}
        for name, tensor in stored.items():
            if not bool(torch.isfinite(tensor).all()):
                raise RuleError(f"{name} holds values that {dtype} cannot hold; nothing was saved")
        folder.mkdir(parents=True, exist_ok=True)
        options = {key: value for key, value in vars(self.options).items() if key in _Saved.model_fields}
        facts = {
            "format": FORMAT, **backbone_facts(self.decoder, METHOD), "base": base, "options": options,
            "rho": [round(value, 6) for value in self.rho()], "base_sample": base_sample(self.decoder),
        }  # fmt: skip
        (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        save_file(stored, folder / WEIGHTS_FILE)

    def restore(self, folder: Path) -> None:
        facts = checkpoint_facts(folder, self.decoder, METHOD, FORMAT)
        refuse_other_weights(folder, facts, self.decoder)
        decided(self.config.model_copy(update={"checkpoint": str(folder)}), self.decoder)  # refuses other options
        mine = self.trainables()
        shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        found = read_tensors(folder, WEIGHTS_FILE, shapes, part=self.options.variant == "no_history")
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(found[name])
        self._trained = True

    # -- one routable layer -----------------------------------------------------------------------

    def _take_h_bar(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._h_bar = args[0]

    def _forward(self, depth: int, fork: Fork, gate: _Gate, u: Tensor) -> Tensor:
        """In the place of FFN_j: what h̄_j is to be changed by, `[B, T, d]`, for u_j."""
        layer, recorder = fork.layer, self.recorder
        with recorder.span("dispatch", layer):
            h_bar, self._h_bar = cast(Tensor, self._h_bar), None
            if depth == 1 and not self._walk.training:
                self._walk = self._begin(cast(Sequences, self.tracker.current), u.device)
            walk = self._walk
            scores: Scores = gate(h_bar)
            with recorder.span("router", layer):
                ffn_N, scale_N = self._decide(depth, scores)
                if walk.real_N is not None:
                    ffn_N = ffn_N & walk.real_N  # a pad is told nothing
                if recorder.recording:
                    recorder.gate(layer, "ffn", ffn_N, scores.g, **scores.signals())
            u_Nd = u.flatten(0, 1)
            if self._route in ("open", "closed") and not self.discards:
                y_Nd = fork.all(fork.one if self._route == "open" else fork.zero, u_Nd)
            else:
                y_Nd = self.run_rows(fork, u_Nd, ffn_N, walk.real_N, scale_N)
            return y_Nd.view_as(u)

    def _begin(self, sequences: Sequences, device: torch.device) -> Walk:
        """The walk of a forward that is about to reach its first routable layer."""
        walk = Walk(
            real_N=None if sequences.real_BT is None else sequences.real_BT.flatten(),
            around=around(self.options.variant, sequences, device),
        )
        if isinstance(self._route, ForcedTokens):
            walk.forced_LN = self._route.open_rows(len(self.routable), sequences, device)
        if torch.is_grad_enabled():
            self._folded.forget()
            walk.math = PlainMath(self.router)
        else:
            walk.math = self._folded.of(self.router.parameters(), partial(FoldedMath, self.router))
        return walk

    def _score(self, depth: int, h_bar: Tensor) -> Scores:
        walk = self._walk
        assert walk.math is not None
        h_Nd = h_bar.flatten(0, 1).to(self._wide)
        past = walk.past.get(depth - 1)
        scores, walk.past[depth] = self.router.step(walk.math, depth, h_Nd, past, walk.around)
        if not torch.is_grad_enabled():  # else a layer computed again for its gradient asks for its past again
            walk.past.pop(depth - 1, None)
        return scores

    def _decide(self, depth: int, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Which rows take the FFN, and what each row's branch is scaled by; None is 1."""
        if self._route is None:
            walk = self._walk
            ffn_N = walk.settle(depth, scores.g, self.threshold) if walk.training else scores.g >= self.threshold
            return ffn_N, torch.where(ffn_N, scores.g, 1 - scores.g)
        if self._walk.forced_LN is not None:
            return self._walk.forced_LN[depth - 1], None
        return torch.full_like(scores.g, self._route == "open", dtype=torch.bool), None

    def run_rows(
        self, fork: Fork, u_Nd: Tensor, ffn_N: Tensor, real_N: Tensor | None, scale_N: Tensor | None
    ) -> Tensor:
        """`fork.run` by the arm's strategy."""
        if self.config.strategy != "auto":
            return fork.run(cast(Strategy, self.config.strategy), u_Nd, ffn_N, real_N, scale_N)
        if self._trial is None or torch.is_grad_enabled():
            return fork.run("gather", u_Nd, ffn_N, real_N, scale_N)
        return fork.run(self._trial.winner(len(u_Nd)), u_Nd, ffn_N, real_N, scale_N, self._trial.branches.ways)
