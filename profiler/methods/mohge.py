"""MoHGE: in place of a decoder's feed-forward half, experts of different widths, chosen per token in two levels.

From layer `first_dense` on, per token row u = LN_ffn(h̄) (METHODS §3; `001`):

    h_out = h̄ + Shared(u) + Σ_{e chosen} w_e·Expert_e(u)

G groups of N experts, all of group g SwiGLU of width W_g; shared experts are always on. How experts are chosen and
weighted is `execution.heterogeneous_router`; how only the chosen ones are run, `execution.experts`. Attention always
runs, whatever kind it is, multi-head latent attention included. A token's choice depends on its own row only.

Sizes: `size` takes METHODS' table (1B, 3B, 14B, and A3B, the released model: 3B with K_g 4 and its own loss weights),
`form: standard` the standard MoE of that size, which is the cost twin. Relatives are options:

    standard top-K   groups 1, experts_per_group E, widths [W], keep_experts K
    DeepSeekMoE      the same with narrow widths, shared > 0 and renormalise false
    Top-P            groups 1 and top_p instead of keep_experts
    MoDSE            groups 1, widths an entry an expert, paired; symmetric true has the pairs checked
    HMoE             groups 1, widths an entry an expert; keep_experts or top_p; L_G is then its price on width

The pretrained FFN is left out of a layer that has experts, and the experts start from fresh weights, so an arm without
a checkpoint is labelled untrained: it answers what such a block costs, not what it says. In costs that FFN is the
last choice at site `experts`, which nothing takes, so that parameters add up to the backbone's and rule 1 shows that
it did not run; the experts count as its replacement.

Two twins. Numeric: forced open, every expert runs with weight 1, which is one SwiGLU as wide as all of them, shared
ones included; `adapt_twin` puts it into the dense model. Cost: a `form: standard` arm named in the spec.

Recorded per (token, layer): the experts, ascending, and their weights; as the gate, by how much the choice was made
(`Routing.margin_N`), whose threshold is therefore 0.

(ours) Without `size` and `widths` a block has K_e + N_s experts' worth of the backbone's own FFN: W̄ = FFN width ÷
(K_e + N_s), widths evenly from W̄/2 to 3W̄/2, multiples of 8 where W̄ is 64 at least. A shared expert has the width of the
size's standard MoE, or without a size W̄. The router computes in float32 at least, experts in the backbone's dtype;
all weights start normal with the model's `initializer_range`. LN_ffn is counted with attention.

Where a process is one of several ranks (`expert_parallel.joined`), a tree holds its share of the routed experts and
everything else whole; outputs are those of one process. What reads or writes all experts (`save`, `adapt_twin`) must
then be called on every rank.

Training is `execution.mohge_training`; `balancing` gives it the auxiliary losses. With `backbone: trained` the model
itself is trained too, and a checkpoint has it beside it, in `backbone/`, as a Hugging Face folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.costs import attention_choice, ffn_choice, shared_choices
from profiler.errors import InputError, RuleError
from profiler.execution.backbone_facts import (
    CONFIG_FILE,
    backbone_facts,
    base_sample,
    checkpoint_facts,
    refuse_other_weights,
)
from profiler.execution.checkpoint_files import read_tensors
from profiler.execution.decoder import ADDED, Decoder, decoder
from profiler.execution.expert_costs import SITE, expert_choices
from profiler.execution.expert_parallel import ExpertParallel, membership
from profiler.execution.expert_shapes import (
    GROUPS,
    KEEP_EXPERTS,
    SHARED,
    SIZES,
    Design,
    check_widths,
    ramp,
    widths_of_experts,
)
from profiler.execution.experts import Experts, Strategy, SwiGLU, dispatch
from profiler.execution.heterogeneous_router import (
    Balance,
    Family,
    HeterogeneousRouter,
    Routing,
    Rule,
    Scoring,
    balance,
)
from profiler.execution.instruments import decoder_spans, first_products, head_probe
from profiler.execution.mohge_training import MohgeTraining, save_backbone
from profiler.execution.routes import ForcedExperts
from profiler.execution.sequences import Sequences
from profiler.methods import MethodConfig, OptionError
from profiler.recorder import Probe, SpanSite
from profiler.records import Choice, ParallelRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from profiler.recorder import Recorder

METHOD = "mohge"
WEIGHTS_FILE, BACKBONE = "mohge.safetensors", "backbone"
#: Format of a checkpoint folder. 1: config.json and mohge.safetensors.
FORMAT = 1


#: What stands where no size is named.
PER_GROUP, KEEP_GROUPS = 4, 3

Widths = Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=1, max_length=8192)]
Count = Annotated[int, Field(ge=1, le=8192)]


class ForcedOption(MethodConfig):
    """`gates: {forced: {...}}`."""

    forced: ForcedExperts


class MohgeConfig(MethodConfig):
    """Options of an arm. Where one is None the size says, or without one the default in brackets.

    Attributes:
        checkpoint: folder written by `save`; None for fresh weights. Its shape must be the one asked for.
        size: a row of METHODS' table, or A3B.
        form: `heterogeneous`, or the size's `standard` MoE, one group of experts of one width.
        groups, experts_per_group: G and N [8, 4].
        widths: W_g, one a group; or one for all; with one group, one an expert [from the backbone's FFN].
        symmetric: claims W_i + W_{n+1−i} the same for every i, which is then checked.
        keep_groups, keep_experts: K_g and K_e [3, 6].
        top_p: instead of K_e, what the chosen experts' probabilities add up to at least.
        shared, shared_width: N_s and the width of each [2; module docstring].
        scoring: `paper`, or `official` as released.
        renormalise: whether the chosen weights are made to add up to 1.
        first_dense: leading layers that keep their FFN.
        strategy: how experts are run (`execution.experts`).
        losses, alpha_group, alpha_expert: family and weights of the auxiliary losses [1e-4, 2.5e-3].
        backbone: whether training changes the model itself too; an arm that only runs does not mind.
        gates: `router` decides; `open` runs every expert with weight 1; `{forced: {ratio, seed, pattern}}` is a
            synthetic route. The router is evaluated under every setting, so that its time is always in.
        seed: of the fresh weights.
    """

    checkpoint: str | None = None
    size: Literal["1B", "3B", "14B", "A3B"] | None = None
    form: Literal["heterogeneous", "standard"] = "heterogeneous"
    groups: Count | None = None
    experts_per_group: Count | None = None
    widths: Widths | None = None
    symmetric: bool = False
    keep_groups: Count | None = None
    keep_experts: Count | None = None
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    shared: int | None = Field(default=None, ge=0, le=1024)
    shared_width: int | None = Field(default=None, ge=1, le=2**20)
    scoring: Scoring = "paper"
    renormalise: bool = True
    first_dense: int = Field(default=1, ge=0, le=4096)
    strategy: Strategy = "packed"
    losses: Family = "paper"
    alpha_group: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    alpha_expert: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    backbone: Literal["kept", "trained"] = "kept"
    gates: Literal["router", "open"] | ForcedOption = "router"
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _fits_together(self) -> MohgeConfig:
        if self.form == "standard":
            if self.size is None:
                raise OptionError("form", "form standard is the standard MoE of a size: give `size`")
            given = [key for key in ("groups", "experts_per_group", "widths", "keep_groups") if getattr(self, key)]
            if given:
                raise OptionError(
                    "form", f"form standard has one group of the size's experts; leave out {', '.join(given)}"
                )
        if self.top_p is not None and self.keep_experts is not None:
            raise OptionError("keep_experts", "give `keep_experts` or `top_p`, not both")
        if self.scoring == "official" and (self.top_p is not None or not self.renormalise):
            raise OptionError(
                "scoring",
                "scoring official takes a softmax of a fixed number of chosen probabilities; "
                "top_p and renormalise false need scoring paper",
            )
        shape = _Shape.of(self)
        keep = self.keep_experts or KEEP_EXPERTS
        if shape.keep_groups > shape.groups:
            raise OptionError(
                "keep_groups", f"keep_groups ({shape.keep_groups}) must be at most groups ({shape.groups})"
            )
        candidates = shape.keep_groups * shape.per_group
        if self.top_p is None and keep > candidates:
            raise OptionError(
                "keep_experts",
                f"keep_experts ({keep}) must be at most the experts of the kept groups "
                f"({shape.keep_groups} x {shape.per_group} = {candidates})",
            )
        if shape.widths is not None:
            try:
                check_widths(shape.widths, shape.groups, shape.per_group, symmetric=self.symmetric)
            except ValueError as error:
                raise OptionError("widths", str(error)) from error
        return self


@dataclass(frozen=True)
class _Shape:
    """Groups and widths as options and size give them; `widths` None is for the backbone to say."""

    groups: int
    per_group: int
    keep_groups: int
    widths: list[int] | None
    standard: int | None

    @classmethod
    def of(cls, config: MohgeConfig) -> _Shape:
        size = None if config.size is None else SIZES[config.size]
        if config.form == "standard":
            assert size is not None
            return cls(1, GROUPS * size.per_group, 1, [size.standard], size.standard)
        groups = config.groups or GROUPS
        per_group = config.experts_per_group or (size.per_group if size else PER_GROUP)
        keep = config.keep_groups or min(groups, size.keep_groups if size else KEEP_GROUPS)
        widths = config.widths or (list(size.widths) if size else None)
        return cls(groups, per_group, keep, widths, size.standard if size else None)


def designed(config: MohgeConfig, dec: Decoder) -> Design:
    """The block of an arm on a backbone.

    Raises:
        InputError: the backbone has no layer left for experts, or its FFN is too narrow to be divided.
    """
    depth = len(dec.blocks)
    if config.first_dense >= depth:
        raise InputError(
            f"mohge: first_dense ({config.first_dense}) must be below the model's number of layers ({depth})"
        )
    shape = _Shape.of(config)
    shared = SHARED if config.shared is None else config.shared
    keep = None if config.top_p is not None else config.keep_experts or KEEP_EXPERTS
    ffn = cast(nn.Linear, first_products(dec.blocks[config.first_dense])[1]).out_features
    mean = ffn // ((keep or KEEP_EXPERTS) + shared)
    if mean < 1 and (shape.widths is None or (shared and not config.shared_width and shape.standard is None)):
        raise InputError(
            f"mohge: the model's FFN width ({ffn}) is too small to be divided; give widths and shared_width"
        )
    widths = shape.widths or ramp(mean, shape.groups)
    rule = Rule(
        shape.groups, shape.per_group, shape.keep_groups, keep, config.top_p, config.scoring, config.renormalise
    )  # fmt: skip
    shared_width = shared * (config.shared_width or shape.standard or mean)
    each = widths_of_experts(widths, shape.groups, shape.per_group)
    return Design(rule, each, shared_width, config.first_dense)


def facts_of(folder: Path, dec: Decoder, design: Design) -> dict[str, Any]:
    """What a checkpoint says of itself, if it is one of this method, for a model of this shape and of this design.

    Raises:
        InputError: it is not; both sides are named.
    """
    facts = checkpoint_facts(folder, dec, METHOD, FORMAT)
    listed = facts.get("design")
    theirs = listed if isinstance(listed, dict) else {}
    for key, value in design.facts().items():
        if theirs.get(key) != value:
            made, asked = json.dumps(theirs.get(key)), json.dumps(value)
            raise InputError(f"checkpoint {folder}: it was made with {key} {made}, the arm asks for {asked}")
    return facts


class _Block(nn.Module):
    """What one layer gets: all routed experts, or those of `parallel`'s rank."""

    def __init__(self, hidden: int, design: Design, parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.router = HeterogeneousRouter(hidden, design.rule)
        self.experts = Experts(hidden, design.widths if parallel is None else parallel.widths)
        self.parallel = parallel
        self.shared = SwiGLU(hidden, design.shared_width) if design.shared_width else None


class Mohge(MohgeTraining):
    """Heterogeneous grouped experts in place of the FFN of any supported decoder."""

    Config = MohgeConfig
    Route = ForcedExperts  # open: every expert with weight 1; closed: none
    scope = "token"
    sites = (SITE,)
    latent_attention = True
    takes_several = True
    signals: ClassVar[dict[str, str]] = {
        "group_margin": "score of the last group kept less that of the next; 1 where all are kept",
        "expert_margin": "the same of the experts chosen among the kept groups' own",
    }

    def __init__(self, model: PreTrainedModel, config: MohgeConfig, recorder: Recorder) -> None:
        super().__init__(model, config, recorder)
        self.design = designed(config, self.decoder)
        weight = cast(nn.Linear, first_products(self.decoder.blocks[0])[1]).weight
        self._device, d = weight.device, self.decoder.hidden_size
        #: This process among the ranks; None where it has every expert.
        self.member = membership()
        layers = range(config.first_dense, len(self.decoder.blocks))
        parallel = [self._parallel(layer) for layer in layers]
        with torch.device("meta"):  # values come from `start`; torch's own would move the caller's random state
            blocks = [_Block(d, self.design, each) for each in parallel]
        for block in blocks:
            block.to(weight.dtype)
            block.router.to(torch.promote_types(weight.dtype, torch.float32))
            block.to_empty(device=self._device)
        #: Layer → its experts.
        self.blocks: dict[int, _Block] = dict(enumerate(blocks, start=config.first_dense))
        self.start(config.seed)
        self._balances: list[Balance] | None = None
        if config.checkpoint is not None:
            self.restore(Path(config.checkpoint))
        gates = config.gates
        self.force(gates.forced if isinstance(gates, ForcedOption) else "open" if gates == "open" else None)

    def _parallel(self, layer: int) -> ExpertParallel | None:
        if self.member is None:
            return None
        placement = self.member.place(layer, self.design.widths, self.design.rule.per_group)
        return ExpertParallel(placement, self.member.rank, self.member.attention, self._device)

    def install(self) -> None:
        for layer, block in self.blocks.items():
            decoder_block = self.decoder.blocks[layer]
            decoder_block.add_module(ADDED, block)
            # Partials of bound methods: a deep copy of the tree is then wrapped by a deep copy of this handle.
            cast(nn.Module, decoder_block.mlp).forward = partial(self._forward, layer)

    def start(self, seed: int) -> None:
        """Draw every weight anew from `seed`, on the device itself; on the meta device there is nothing to draw."""
        if self._device.type == "meta":
            return
        generator = torch.Generator(self._device).manual_seed(seed)
        std = float(getattr(self.model.config, "initializer_range", 0.02))
        with torch.no_grad():
            for name, tensor in self.weights().items():
                parallel = self._split(name)
                if parallel is None:
                    tensor.normal_(0.0, std, generator=generator)
                else:  # the same numbers on every rank, of which each keeps its own
                    whole = tensor.new_empty(self._whole_shape(name, tensor))
                    tensor.copy_(parallel.part(whole.normal_(0.0, std, generator=generator)))

    def weights(self) -> dict[str, nn.Parameter]:
        """Everything the method adds, by a name that is the same in every tree of it; of the experts, this rank's."""
        return {
            f"{layer}.{name}": parameter
            for layer, block in self.blocks.items()
            for name, parameter in block.named_parameters()
        }

    def _split(self, name: str) -> ExpertParallel | None:
        """How the weights of that name lie on ranks; None for those that every rank has whole."""
        layer, _, rest = name.partition(".")
        return self.blocks[int(layer)].parallel if rest == "experts.weights" else None

    def _whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        whole = self._split(name) is not None
        return (3 * sum(self.design.widths), tensor.shape[1]) if whole else tuple(tensor.shape)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Weights of that name with the experts of every rank."""
        parallel = self._split(name)
        return tensor.detach() if parallel is None else parallel.whole(tensor)

    # -- the method's face ------------------------------------------------------------------------

    @classmethod
    def check(cls, model: PreTrainedModel, config: MohgeConfig, ranks: int = 1) -> None:
        dec = decoder(model, latent=True)
        design = designed(config, dec)
        if ranks > len(design.widths):
            raise InputError(
                f"parallel.experts ({ranks}) must be at most the experts of a layer ({len(design.widths)}), for every "
                "rank has one at least"
            )
        if config.checkpoint is not None:
            facts_of(Path(config.checkpoint), dec, design)

    @classmethod
    def choices(cls, model: PreTrainedModel, config: MohgeConfig) -> list[Choice]:
        dec = decoder(model, latent=True)
        design = designed(config, dec)
        found = shared_choices(dec)
        for layer in range(len(dec.blocks)):
            if layer < design.first_dense:
                found += [attention_choice(dec, layer), ffn_choice(dec, layer)]
            else:
                found += expert_choices(dec, layer, design, padded=config.strategy == "padded")
        return found

    @classmethod
    def copied_parameters(cls, model: PreTrainedModel, config: MohgeConfig, device: str) -> int:
        dec = decoder(model, latent=True)
        design = designed(config, dec)
        wide = {
            "packed": sum(design.widths) if device == "cpu" else 0,
            "padded": max(design.widths) * len(design.widths),
        }.get(config.strategy, 0)
        return 3 * dec.hidden_size * wide * (len(dec.blocks) - design.first_dense)

    @property
    def parallel(self) -> ParallelRecord:
        weight = cast(nn.Linear, first_products(self.decoder.blocks[0])[1]).weight
        member = self.member
        return ParallelRecord(
            ranks=1 if member is None else member.ranks,
            placement=self._placement_name,
            attention="replicated" if member is None else member.attention,
            widths_E=list(self.design.widths),
            per_group=self.design.rule.per_group,
            hidden=self.decoder.hidden_size,
            itemsize=weight.element_size(),
            times_note=self._times_note,
            products=self._experts.how() if self.config.strategy == "packed" else None,
        )

    @property
    def _experts(self) -> Experts:
        """Those of the first layer that has some."""
        return next(iter(self.blocks.values())).experts

    @property
    def _times_note(self) -> str | None:
        """Why no width has a time of its own; None where each has."""
        widths = self.design.widths
        if self.config.strategy != "padded" or len(set(widths)) == 1:
            return None
        return f"strategy padded: every expert runs at the largest width, {max(widths)}: the time is of all of them"

    @property
    def _placement_name(self) -> str:
        """Of the placement in force; where there is one rank all are the same."""
        first = next(iter(self.blocks.values())).parallel
        return "contiguous" if first is None else first.placement.name

    @property
    def threshold(self) -> float:
        return 0.0

    @property
    def caveat(self) -> str | None:
        return None if self._trained else "experts have fresh weights"

    def probes(self) -> list[Probe]:
        found = [head_probe(self.decoder)]
        for layer, decoder_block in enumerate(self.decoder.blocks):
            attention, ffn = first_products(decoder_block)
            found.append(Probe(layer, "attention", 0, attention))
            if layer not in self.blocks:
                found.append(Probe(layer, "ffn", 0, ffn))
                continue
            block = self.blocks[layer]
            found.append(Probe(layer, "router", 0, block.router))
            if block.shared is not None:
                found.append(Probe(layer, "shared", 0, block.shared))
            held = range(len(self.design.widths)) if block.parallel is None else block.parallel.held
            entries = zip(held, block.experts.entries, strict=True)
            found += [Probe(layer, SITE, e, entry, whole=True) for e, entry in entries]
            found.append(Probe(layer, SITE, len(self.design.widths), ffn))
        return found

    def spans(self) -> list[SpanSite]:
        found = decoder_spans(self.decoder)
        for layer, block in self.blocks.items():
            found.append(SpanSite(block.router, "router", layer))
            if block.shared is not None:
                found.append(SpanSite(block.shared, "shared", layer))
        return found

    def adapt_twin(self, twin: PreTrainedModel) -> None:
        blocks = decoder(twin, latent=True).blocks
        for layer, block in self.blocks.items():
            whole = self._whole(f"{layer}.experts.weights", block.experts.weights)
            each = whole.split([3 * width for width in self.design.widths])
            pieces = [expert.split(width) for expert, width in zip(each, self.design.widths, strict=True)]
            if block.shared is not None:
                pieces.append(block.shared.weights.split(block.shared.width))
            gate, up, down = (torch.cat(parts).detach() for parts in zip(*pieces, strict=True))
            mlp = cast(Any, blocks[layer].mlp)
            for part, weight in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, down.T.contiguous())):
                part.weight, part.bias = nn.Parameter(weight, requires_grad=False), None
                part.out_features, part.in_features = weight.shape
            mlp.act_fn = nn.SiLU()

    # -- auxiliary losses -------------------------------------------------------------------------

    @contextmanager
    def balancing(self) -> Iterator[list[Balance]]:
        """While open, a forward appends L_G and L_E of each of its layers, differentiable, pads left out.

        Their weights are in: α_G·L_G and α_E·L_E.
        """
        found: list[Balance] = []
        self._balances = found
        try:
            yield found
        finally:
            self._balances = None

    def _balance(self, routing: Routing, real_N: Tensor | None) -> Balance:
        size = None if self.config.size is None else SIZES[self.config.size]
        alphas = [
            given if given is not None else standard
            for given, standard in (
                (self.config.alpha_group, size.alpha_group if size else 1e-4),
                (self.config.alpha_expert, size.alpha_expert if size else 2.5e-3),
            )
        ]
        found = balance(self.config.losses, routing, self.design.rule, self.design.widths, real_N)
        return Balance(alphas[0] * found.group, alphas[1] * found.expert)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, folder: Path, dtype: torch.dtype | None = None, base: str | None = None) -> None:
        """Write routers and experts, and with `backbone: trained` the model itself.

        Args:
            folder: new, or to be written over.
            dtype: what the numbers are stored as; None: as they are. A trained backbone is rounded in place.
            base: the name of the backbone.

        Raises:
            RuleError: a value is not finite.
        """
        stored = {
            name: self._whole(name, tensor).to("cpu", dtype or tensor.dtype).clone()
            for name, tensor in self.weights().items()
        }
        for name, tensor in stored.items():
            if not bool(torch.isfinite(tensor).all()):
                raise RuleError(f"{name} holds values that are not finite; nothing was saved")
        folder.mkdir(parents=True, exist_ok=True)
        if self.config.backbone == "trained":
            save_backbone(self.decoder, folder / BACKBONE, dtype or torch.float32, base)
        facts = {
            "format": FORMAT, **backbone_facts(self.decoder, METHOD), "design": self.design.facts(),
            "base": base, "base_sample": base_sample(self.decoder),
        }  # fmt: skip
        (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        save_file(stored, folder / WEIGHTS_FILE)

    def restore(self, folder: Path) -> None:
        refuse_other_weights(folder, facts_of(folder, self.decoder, self.design), self.decoder)
        mine = self.weights()
        shapes = {name: self._whole_shape(name, tensor) for name, tensor in mine.items()}
        found = read_tensors(folder, WEIGHTS_FILE, shapes)
        with torch.no_grad():
            for name, parameter in mine.items():
                parallel = self._split(name)
                parameter.copy_(found[name] if parallel is None else parallel.part(found[name]))
        self._trained = True

    # -- one layer --------------------------------------------------------------------------------

    def _forward(self, layer: int, u: Tensor) -> Tensor:
        """In the place of a layer's FFN: `[B, T, d]` → `[B, T, d]`; pads pass shared experts only."""
        block, recorder = self.blocks[layer], self.recorder
        sequences = cast(Sequences, self.tracker.current)
        with recorder.span("dispatch", layer):
            # In training experts are float32 over a backbone that may not be.
            u_Nd = u.flatten(0, 1).to(block.experts.weights.dtype)
            real_N = None if sequences.real_BT is None else sequences.real_BT.flatten()
            routing = cast(Routing, block.router(u_Nd))
            with recorder.span("router", layer):
                choice_NK, weight_NK, full = self._decide(layer, routing, sequences)
                if self._balances is not None:
                    self._balances.append(self._balance(routing, real_N))
                if recorder.recording:
                    recorder.gate(
                        layer, SITE, choice_NK, routing.margin_N, weight_NK,
                        group_margin=routing.group_margin_N, expert_margin=routing.expert_margin_N,
                    )  # fmt: skip
            y_shared_Nd = None if block.shared is None else block.shared(u_Nd)
            weight = None if self._route == "open" else weight_NK
            if block.parallel is not None:
                y_Nd = block.parallel.run(
                    block.experts, self.config.strategy, u_Nd, choice_NK, weight, recorder, layer, SITE,
                    real_N=real_N, full=full,
                )  # fmt: skip
            else:
                to = dispatch(choice_NK, weight, len(self.design.widths), real_N, full=full)
                if self.config.strategy != "sequential":  # which calls the entries, where rows are counted
                    recorder.entered(layer, SITE, 0, to.count_E)
                y_Nd = block.experts.run(self.config.strategy, u_Nd, to, partial(recorder.span, SITE, layer))
            return (y_Nd if y_shared_Nd is None else y_Nd + y_shared_Nd).view_as(u).to(u.dtype)

    def _decide(self, layer: int, routing: Routing, sequences: Sequences) -> tuple[Tensor, Tensor, bool]:
        """Experts of each row and their weights, `[N, K]`, and whether each row has K of them."""
        if self._route is None:
            return routing.choice_NK, routing.weight_NK, self.design.rule.top_p is None
        rows, experts = len(routing.choice_NK), len(self.design.widths)
        if self._route == "open":
            choice_NK = torch.arange(experts, device=self._device).expand(rows, -1)
            return choice_NK, routing.weight_NK.new_ones(rows, experts), True
        if isinstance(self._route, ForcedExperts):
            choice_NK = self._route.experts_of_rows(layer, experts, sequences, self._device)
            if choice_NK.shape[1]:
                return choice_NK, routing.weight_NK.new_full(choice_NK.shape, 1 / choice_NK.shape[1]), True
        none_N1 = torch.full((rows, 1), -1, device=self._device)
        return none_N1, routing.weight_NK.new_zeros(rows, 1), False
