"""Which experts a token takes, decided in two levels: groups of experts of one width first, then experts inside them.

MoHGE's router (METHODS §3; `001`, "两级路由"), per token row x, with group embeddings e_g and one logit an expert:

    GS_g = σ(x·e_g)                      keep the K_g best groups
    ES'_{g,i} = softmax over i of the group's N expert logits
    ES''_{g,i} = ES'_{g,i}·GS_g          choose the K_e best of all K_g·N, no quota a group
    weights                              the chosen ES'' divided by their sum

`official` reproduces the released code where it differs: GS is divided by its sum over the kept groups, candidates are
renormalised, and the weights are a softmax of the chosen probabilities. It chooses the same experts.

Relatives are settings of the same rule. One group needs no group embeddings: then ES'' is a softmax over all experts,
and `keep_experts` makes it a standard top-K router. `top_p` instead of `keep_experts` takes the fewest best experts
whose probabilities add up to it; `renormalise=False` leaves the chosen probabilities as they are (DeepSeekMoE).

(ours) Equal scores: the lower number wins. Chosen groups and experts are listed in ascending order. Losses leave their
weight α to the caller; where there is one group, experts stand in for groups in L_G, which then is a price on their
width (HMoE's parameter penalty). Top-P's own entropy penalty is not here, and neither is running experts (`experts`).

Legend: N token rows, G groups, n experts a group, E = G·n, k groups kept, K experts chosen, C = k·n candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Scoring = Literal["paper", "official"]
Family = Literal["paper", "official"]

#: Δ of the released code's group price.
WIDTH_STEP = 1024


@dataclass(frozen=True)
class Rule:
    """How experts are chosen. `keep_experts` or `top_p` is given, not both."""

    groups: int
    per_group: int
    keep_groups: int
    keep_experts: int | None
    top_p: float | None = None
    scoring: Scoring = "paper"
    renormalise: bool = True

    @property
    def experts(self) -> int:
        """E."""
        return self.groups * self.per_group

    @property
    def rows(self) -> int:
        """Rows of the router's one product: expert logits, and group logits where there are groups to choose from."""
        return self.experts + (self.groups if self.groups > 1 else 0)


@dataclass(frozen=True)
class Routing:
    """What was decided for N token rows.

    Attributes:
        choice_NK: chosen experts, ascending; -1, at the end, where a row has fewer than K.
        weight_NK: their weights; 0 where there is none.
        kept_Nk: kept groups, ascending.
        group_margin_N, expert_margin_N: how far the nearest other decision was, in the scores compared at each level;
            1 where nothing was left out.
        group_logit_NG: x·e_g; None with one group.
        within_NGn: softmax inside each group, kept or not.
    """

    choice_NK: Tensor
    weight_NK: Tensor
    kept_Nk: Tensor
    group_margin_N: Tensor
    expert_margin_N: Tensor
    group_logit_NG: Tensor | None
    within_NGn: Tensor

    @property
    def margin_N(self) -> Tensor:
        """The smaller margin: below the rounding of the scores, a row's choice is an accident."""
        return torch.minimum(self.group_margin_N, self.expert_margin_N)


class _Best(NamedTuple):
    place_NK: Tensor
    margin_N: Tensor


def _best(score_NX: Tensor, keep: int) -> _Best:
    """The `keep` best of each row, in ascending order, and how far the next one is behind."""
    ordered = score_NX.sort(dim=-1, descending=True, stable=True)
    if keep < score_NX.shape[-1]:
        margin_N = ordered.values[:, keep - 1] - ordered.values[:, keep]
    else:
        margin_N = score_NX.new_ones(len(score_NX))
    return _Best(ordered.indices[:, :keep].sort(dim=-1).values, margin_N)


def _fewest(probability_NC: Tensor, top_p: float) -> _Best:
    """The fewest best of each row that add up to `top_p` at least, ascending, -1 after the last."""
    ordered = probability_NC.sort(dim=-1, descending=True, stable=True)
    upto = ordered.values.cumsum(-1)
    before = upto - ordered.values
    taken = before < top_p
    taken[:, 0] = True
    last_N1 = taken.sum(-1, keepdim=True) - 1
    # One less: what is before the last reaches p. One more: the last does not, or the next is not behind it. A row that
    # takes all cannot take more.
    following = F.pad(ordered.values, (0, 1)).gather(1, last_N1 + 1)
    more = torch.minimum(upto.gather(1, last_N1) - top_p, ordered.values.gather(1, last_N1) - following).clamp(min=0)
    more = torch.where(last_N1 + 1 < taken.shape[1], more, 1.0)
    margin_N = torch.minimum(top_p - before.gather(1, last_N1), more)[:, 0]
    end = probability_NC.shape[1]
    index = torch.where(taken, ordered.indices, end).sort(dim=-1).values
    return _Best(torch.where(index == end, -1, index), margin_N)


def route(group_logit_NG: Tensor | None, expert_logit_NE: Tensor, rule: Rule) -> Routing:
    """Choose experts from logits.

    Args:
        group_logit_NG: None where the rule has one group.
        expert_logit_NE: expert e = g·n + i is the i-th of group g.
    """
    rows, tiny = len(expert_logit_NE), torch.finfo(expert_logit_NE.dtype).tiny
    within_NGn = expert_logit_NE.view(rows, rule.groups, rule.per_group).softmax(-1)
    if group_logit_NG is None:
        score_Nk = expert_logit_NE.new_ones(rows, 1)
        kept_Nk, group_margin_N = score_Nk.long() * 0, score_Nk[:, 0]
    else:
        score_NG = group_logit_NG.sigmoid()
        kept_Nk, group_margin_N = _best(score_NG, rule.keep_groups)
        score_Nk = score_NG.gather(1, kept_Nk)
    if rule.scoring == "official":
        score_Nk = score_Nk / score_Nk.sum(-1, keepdim=True).clamp(min=tiny)
    of_kept = kept_Nk[:, :, None].expand(-1, -1, rule.per_group)
    candidate_NC = (within_NGn.gather(1, of_kept) * score_Nk[:, :, None]).flatten(1)
    if rule.scoring == "official" or rule.top_p is not None:
        candidate_NC = candidate_NC / candidate_NC.sum(-1, keepdim=True).clamp(min=tiny)

    if rule.top_p is None:
        assert rule.keep_experts is not None
        place_NK, expert_margin_N = _best(candidate_NC, rule.keep_experts)
        chosen_NK = candidate_NC.gather(1, place_NK)
    else:
        place_NK, expert_margin_N = _fewest(candidate_NC, rule.top_p)
        chosen_NK = candidate_NC.gather(1, place_NK.clamp(min=0)).masked_fill(place_NK < 0, 0.0)
    if rule.scoring == "official":
        weight_NK = chosen_NK.softmax(-1)
    elif rule.renormalise:
        weight_NK = chosen_NK / chosen_NK.sum(-1, keepdim=True).clamp(min=tiny)
    else:
        weight_NK = chosen_NK
    group_NK = kept_Nk.gather(1, place_NK.clamp(min=0) // rule.per_group)
    choice_NK = group_NK * rule.per_group + place_NK % rule.per_group
    if rule.top_p is not None:
        choice_NK = torch.where(place_NK < 0, -1, choice_NK)
    return Routing(choice_NK, weight_NK, kept_Nk, group_margin_N, expert_margin_N, group_logit_NG, within_NGn)


class HeterogeneousRouter(nn.Module):
    """Group embeddings and expert embeddings as one matrix, so that a row's logits are one product."""

    def __init__(self, hidden: int, rule: Rule) -> None:
        """`hidden` d."""
        super().__init__()
        self.rule = rule
        #: e_g of each group first (none where there is one), then a row an expert.
        self.weight = nn.Parameter(torch.empty(rule.rows, hidden))

    def forward(self, x_Nd: Tensor) -> Routing:
        """Decide for `[N, d]` rows, in the router's own dtype."""
        logit = F.linear(x_Nd.to(self.weight.dtype), self.weight)
        groups = self.rule.rows - self.rule.experts
        return route(logit[:, :groups] if groups else None, logit[:, groups:], self.rule)


class Balance(NamedTuple):
    """L_G and L_E of one layer, without their α; scalars."""

    group: Tensor
    expert: Tensor


def balance(
    family: Family, routing: Routing, rule: Rule, widths_E: Sequence[int], real_N: Tensor | None = None
) -> Balance:
    """Both auxiliary losses of the rows in `routing` (METHODS §3; `001`, "组级损失", and the released code).

    `paper`:    L_G = G·Σ_g (W_g/W_max)·f̃_g·p̃_g           f̃_g share of kept-group slots that were g, p̃_g mean GS_g/Σ GS
                L_E = Σ_{g,i} f̃_{g,i}·p̃_{g,i}              both inside the group: shares of the group's own slots, and
                                                            the mean of ES' over the rows that kept it (ours)
    `official`: L_G = G/(T²·K_g)·Σ_g s_g·(Σ_t softmax(z)_{t,g})·n_g    s_g = (W_g − W_min + Δ)/Δ, z = x·e_g
                L_E = (E·K_g/G)/(T²·K_e)·Σ_e (Σ_t w_{t,e})·n_e         w: the weights given (ours)

    Args:
        widths_E: the experts' widths.
        real_N: False at rows that count for nothing.
    """
    if real_N is not None:
        routing = _only(routing, real_N)
    rows, device = len(routing.choice_NK), routing.choice_NK.device
    width_E = torch.tensor(widths_E, device=device, dtype=routing.within_NGn.dtype)
    taken_NE = _marked(routing.choice_NK, rule.experts).to(width_E.dtype)
    kept_NG = _marked(routing.kept_Nk, rule.groups).to(width_E.dtype)
    if routing.group_logit_NG is None:  # experts stand in for groups
        width_X, taken_X, score_NX = width_E, taken_NE.sum(0), routing.within_NGn[:, 0]
        soft_NX = score_NX
    else:
        width_X, taken_X = width_E.view(rule.groups, -1)[:, 0], kept_NG.sum(0)
        score_NX, soft_NX = routing.group_logit_NG.sigmoid(), routing.group_logit_NG.softmax(-1)
    slots = taken_X.sum().clamp(min=1)
    count_E = taken_NE.sum(0)
    chosen = count_E.sum().clamp(min=1)
    if family == "paper":
        tiny = torch.finfo(score_NX.dtype).tiny
        p_X = (score_NX / score_NX.sum(-1, keepdim=True).clamp(min=tiny)).mean(0)
        group = len(width_X) * (width_X / width_X.max() * taken_X / slots * p_X).sum()
        count_Gn = count_E.view(rule.groups, rule.per_group)
        f_Gn = count_Gn / count_Gn.sum(-1, keepdim=True).clamp(min=1)
        p_Gn = (routing.within_NGn * kept_NG[:, :, None]).sum(0) / kept_NG.sum(0).clamp(min=1)[:, None]
        return Balance(group, (f_Gn * p_Gn).sum())
    price_X = (width_X - width_X.min() + WIDTH_STEP) / WIDTH_STEP
    # T·K_g and T·K_e are the numbers of slots, which also holds where rows choose different numbers.
    group = len(width_X) / (rows * slots) * (price_X * soft_NX.sum(0) * taken_X).sum()
    weight_E = routing.weight_NK.new_zeros(rule.experts).index_add(
        0, routing.choice_NK.clamp(min=0).flatten(), routing.weight_NK.flatten()
    )
    shown = rule.experts * rule.keep_groups / rule.groups
    return Balance(group, shown / (rows * chosen) * (weight_E * count_E).sum())


def _marked(index_NK: Tensor, size: int) -> Tensor:
    """`[N, size]` True where a row names the place; -1 names none."""
    marks = index_NK.new_zeros(len(index_NK), size + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(index_NK < 0, size, index_NK), True)[:, :size]


def _only(routing: Routing, real_N: Tensor) -> Routing:
    """The rows that are real."""
    given = {name: value for name, value in vars(routing).items() if value is not None}
    return replace(routing, **{name: value[real_N] for name, value in given.items()})
