"""transformers' own mixture-of-experts decoders: where router and experts are, and what each of their choices costs.

Known is the form that Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-V3 share in transformers: a layer's `mlp` has a
router `gate`, all routed experts as two 3-D tensors in `experts`, and maybe shared experts that are always on. Layers
with a dense feed-forward half may stand between. Attention is the plain kind, or multi-head latent attention with
plain or low-rank queries. Other forms are refused by the name of what is missing or unknown.

Costs: as `costs` has them. Of a layer with experts LN_ffn is counted with attention, since it runs always. At site
`experts` each expert is a choice, and so is `all`, every expert for every row: what the layer would cost if nothing
were left out, and what an arm that runs everything takes. So the parameters of a layer's sites add up to the model's.

Not here: recording (`methods.stock_moe`), and experts that a method puts in (`expert_costs`).

Legend: N token rows, K experts a row, E experts, G groups, d hidden size, W an expert's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from profiler.costs import attention_choice, dense_choices, ffn_choice, parameters, shared_choices
from profiler.errors import InputError
from profiler.execution.decoder import ATTENTION_PARTS, BLOCK_PARTS, FFN_PARTS, LATENT_PARTS, Decoder, frame
from profiler.execution.expert_costs import SITE
from profiler.records import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name of the choice that runs every expert.
ALL = "all"
#: Latent attention with low-rank queries (DeepSeek-V3).
LOW_RANK_PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", *LATENT_PARTS[1:])
SHARED_NAMES = ("shared_expert", "shared_experts")


@dataclass(frozen=True)
class StockBlock:
    """The feed-forward half of one layer with experts. `shared` and its `shared_gate` are None where there are none."""

    mlp: nn.Module
    router: nn.Module
    experts: nn.Module
    shared: nn.Module | None
    shared_gate: nn.Linear | None

    @property
    def number(self) -> int:
        """E."""
        return len(cast(Tensor, self.experts.gate_up_proj))

    @property
    def width(self) -> int:
        """W."""
        return cast(Tensor, self.experts.down_proj).shape[-1]


@dataclass(frozen=True)
class StockDecoder:
    """A decoder and, by layer, its blocks with experts; layers that are not in `blocks` have a dense half."""

    decoder: Decoder
    blocks: dict[int, StockBlock]


def has_experts(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` has a router and experts of its own."""
    layers = getattr(model.base_model, "layers", None) or []
    return any(_is_block(getattr(layer, "mlp", None)) for layer in layers)


def stock_decoder(model: PreTrainedModel) -> StockDecoder:
    """Find the parts of a mixture-of-experts model.

    Raises:
        InputError: it is a dense model, or of a form that is not known; the message names what is missing or unknown.
    """
    name = type(model).__name__
    base, head = frame(model)
    layers = list(cast("nn.ModuleList", base.layers))
    found: dict[int, StockBlock] = {}
    for index, layer in enumerate(layers):
        missing = _missing(layer)
        if missing:
            raise InputError(f"{name}: decoder layer {index} has no {', '.join(missing)}; this shape is not supported")
        if _is_block(layer.mlp):
            found[index] = _block(name, index, cast(nn.Module, layer.mlp))
    if not found:
        raise InputError(
            f"{name} is a dense model: no layer has a router with experts of its own, so there is nothing for "
            "stock_moe to record; method dense measures it as it is, and mohge puts experts in"
        )
    dec = Decoder(model, base, cast(nn.Module, base.embed_tokens), layers, cast(nn.Module, base.norm), head)
    _refuse_unknown(StockDecoder(dec, found))
    return StockDecoder(dec, found)


def _is_block(mlp: Any) -> bool:
    return isinstance(getattr(mlp, "gate", None), nn.Module) and isinstance(getattr(mlp, "experts", None), nn.Module)


def _missing(layer: nn.Module) -> list[str]:
    missing = [part for part in BLOCK_PARTS if not hasattr(layer, part)]
    if missing:
        return missing
    kinds = (ATTENTION_PARTS, LATENT_PARTS, LOW_RANK_PARTS)
    lacking = [[part for part in kind if getattr(layer.self_attn, part, None) is None] for kind in kinds]
    missing = [f"self_attn.{part}" for part in min(lacking, key=len)]
    if not _is_block(layer.mlp):
        missing += [f"mlp.{part}" for part in FFN_PARTS if not hasattr(layer.mlp, part)]
    return missing


def _block(name: str, index: int, mlp: nn.Module) -> StockBlock:
    router, experts = cast(nn.Module, mlp.gate), cast(nn.Module, mlp.experts)
    tensors = {"gate_up_proj", "down_proj"}
    if {key for key, _ in experts.named_parameters()} != tensors or {key for key, _ in router.named_parameters()} != {
        "weight"
    }:
        raise InputError(
            f"{name}: decoder layer {index}: supported experts hold gate_up_proj and down_proj and nothing else, and "
            "their router one weight; this shape is not supported"
        )
    if getattr(experts, "is_transposed", False) or not getattr(experts, "has_gate", True):
        raise InputError(f"{name}: decoder layer {index}: supported experts are gated, with weights [E, out, in]")
    shared = next((found for key in SHARED_NAMES if (found := getattr(mlp, key, None)) is not None), None)
    return StockBlock(mlp, router, experts, shared, getattr(mlp, "shared_expert_gate", None))


def _refuse_unknown(found: StockDecoder) -> None:
    dec, model = found.decoder, found.decoder.model
    name, config = type(model).__name__, model.config
    parts = [dec.embedding, dec.norm, dec.head]
    for index, layer in enumerate(dec.blocks):
        parts += [cast(nn.Module, getattr(layer, part)) for part in BLOCK_PARTS if part != "mlp"]
        block = found.blocks.get(index)
        if block is None:
            parts += [cast(nn.Module, getattr(layer.mlp, part)) for part in FFN_PARTS]
        else:
            parts += [
                part for part in (block.router, block.experts, block.shared, block.shared_gate) if part is not None
            ]
    known = {id(tensor) for part in parts for tensor in part.parameters()}
    for path, tensor in model.named_parameters():
        if id(tensor) not in known:
            raise InputError(f"{name}: {path} belongs to no known part of a decoder; this shape is not supported")
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if kinds - {"full_attention"} or (not kinds and window is not None):
        raise InputError(f"{name}: only full attention is supported; this model attends a window of {window} tokens")


def first_attention_product(layer: nn.Module) -> nn.Module:
    """The first product of a layer's attention: of the queries, or of their low-rank form."""
    attention = cast(nn.Module, layer.self_attn)
    found = getattr(attention, "q_proj", None)
    return cast(nn.Module, attention.q_a_proj if found is None else found)


def stock_choices(found: StockDecoder) -> list[Choice]:
    """Every site of a mixture-of-experts decoder; those of experts have E + 1 choices."""
    dec = found.decoder
    choices = shared_choices(dec)
    for layer in range(len(dec.blocks)):
        attention, block = _attention(dec, layer), found.blocks.get(layer)
        if block is None:
            choices += [attention, ffn_choice(dec, layer)]
        else:
            choices += _of_block(dec, layer, attention, block)
    return choices


def model_choices(model: PreTrainedModel) -> list[Choice]:
    """What a model runs as it is, one choice a site: of experts as many as a token takes, and all their weights.

    Also of a dense model. For estimates of whole steps; the sites' parameters add up to the model's.
    """
    if not has_experts(model):
        return dense_choices(model)
    found = stock_decoder(model)
    choices = []
    for choice in stock_choices(found):
        if choice.site != SITE:
            choices.append(choice)
        elif choice.name == ALL:
            block = found.blocks[choice.layer]
            taken = choice.flops_per_row // block.number * int(cast(Any, block.router).top_k)
            choices.append(choice.model_copy(update={"index": 0, "flops_per_row": taken}))
    return choices


def _of_block(dec: Decoder, layer: int, attention: Choice, block: StockBlock) -> list[Choice]:
    norm = cast(nn.Module, dec.blocks[layer].post_attention_layernorm)
    moved = {"backbone_parameters": parameters([norm]), "weight_bytes": _bytes([norm])}
    router = parameters([block.router])
    found = [
        attention.model_copy(update={key: getattr(attention, key) + more for key, more in moved.items()}),
        Choice(
            layer=layer, site="router", index=0, name="run", segments=["router"], backbone_parameters=router,
            flops_per_row=2 * router, weight_bytes=_bytes([block.router]),
        ),
    ]  # fmt: skip
    shared = [part for part in (block.shared, block.shared_gate) if part is not None]
    if shared:
        found.append(
            Choice(
                layer=layer, site="shared", index=0, name="run", segments=["shared"],
                backbone_parameters=parameters(shared), flops_per_row=sum(map(_flops_per_row, shared)),
                weight_bytes=_bytes(shared),
            )
        )  # fmt: skip
    one, size = parameters([block.experts]) // block.number, _bytes([block.experts]) // block.number
    for index in range(block.number + 1):
        times = 1 if index < block.number else block.number
        found.append(
            Choice(
                layer=layer, site=SITE, index=index, name=f"e{index}" if index < block.number else ALL, segments=[SITE],
                backbone_parameters=times * one, flops_per_row=times * 2 * one, weight_bytes=times * size,
            )
        )  # fmt: skip
    return found


def _attention(dec: Decoder, layer: int) -> Choice:
    block, config = dec.blocks[layer], dec.model.config
    attention = cast(nn.Module, block.self_attn)
    if getattr(attention, "q_proj", None) is not None:
        return attention_choice(dec, layer)
    heads = int(config.num_attention_heads)
    keys, values = cast(nn.Linear, attention.q_b_proj).out_features, cast(nn.Linear, attention.o_proj).in_features
    parts, latent = [attention, cast(nn.Module, block.input_layernorm)], cast(nn.Linear, attention.kv_a_proj_with_mqa)
    assert keys % heads == values % heads == 0
    return Choice(
        layer=layer, site="attention", index=0, name="run", segments=["attention"],
        backbone_parameters=parameters(parts), flops_per_row=_flops_per_row(attention),
        flops_per_context=2 * (keys + values), weight_bytes=_bytes(parts),
        kv_bytes_per_row=latent.out_features * latent.weight.element_size(),
    )  # fmt: skip


def _flops_per_row(module: nn.Module) -> int:
    return sum(2 * part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))


def _bytes(modules: list[nn.Module]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in nn.ModuleList(modules).parameters())


@dataclass(frozen=True)
class Scores:
    """What a stock router compared.

    Attributes:
        margin_N: how far the nearest other decision was, in the scores compared: of experts, and where only some groups
            of them are kept, of groups; 1 where nothing was left out.
        entropy_N: of the experts' scores made to add up to 1, in nats; ln E where the router has no preference.
    """

    margin_N: Tensor
    entropy_N: Tensor


def scores(router: Any, logit_NE: Tensor, choice_NK: Tensor) -> Scores:
    """By how much a router of transformers chose.

    Experts are compared by the softmax of their logits; by DeepSeek-V3 by sigmoid and a learned bias, after groups were
    compared by the sum of their two best (its paper, section 2.1.2).

    Args:
        router: the `gate` of a layer.
        logit_NE: its logits.
        choice_NK: the experts it chose.
    """
    logit_NE = logit_NE.float()
    bias_E = getattr(router, "e_score_correction_bias", None)
    if bias_E is None:
        score_NE = compared_NE = logit_NE.softmax(-1)
        margin_N = score_NE.new_ones(len(score_NE))
    else:
        score_NE = logit_NE.sigmoid()
        compared_NE, margin_N = _in_kept_groups(router, score_NE + bias_E)
    chosen_NE = torch.zeros_like(compared_NE, dtype=torch.bool).scatter(1, choice_NK, True)
    worst_N = compared_NE.masked_fill(~chosen_NE, torch.inf).amin(-1)
    next_N = compared_NE.masked_fill(chosen_NE, -torch.inf).amax(-1)
    margin_N = torch.minimum(margin_N, worst_N - next_N)  # with no other expert the difference is infinite
    share_NE = score_NE / score_NE.sum(-1, keepdim=True)
    return Scores(margin_N, torch.special.entr(share_NE).sum(-1))


def _in_kept_groups(router: Any, compared_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with those of groups that were not kept at −∞, and the margin of the groups."""
    groups, keep = int(router.num_group), int(router.topk_group)
    if keep >= groups:
        return compared_NE, compared_NE.new_ones(len(compared_NE))
    of_groups_NGn = compared_NE.view(len(compared_NE), groups, -1)
    best_NG = of_groups_NGn.topk(2, dim=-1).values.sum(-1)
    ordered_NG = best_NG.sort(dim=-1, descending=True)
    margin_N = ordered_NG.values[:, keep - 1] - ordered_NG.values[:, keep]
    left_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(1, ordered_NG.indices[:, :keep], False)
    return of_groups_NGn.masked_fill(left_NG[:, :, None], -torch.inf).flatten(1), margin_N
