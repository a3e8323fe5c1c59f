"""The two-level router against loops over single tokens in Python floats, and against METHODS' exact figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler.execution.expert_shapes import SIZES
from profiler.execution.heterogeneous_router import HeterogeneousRouter, Routing, Rule, balance, route

WIDTHS_3B = SIZES["3B"].widths


# -- the reference: one token at a time --------------------------------------------------------------


def best(scores: dict[int, float], keep: int) -> list[int]:
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:keep])


def slow(z: list[float] | None, logits: list[float], rule: Rule) -> tuple[list[int], dict[int, float]]:
    """(kept groups, expert → weight) of one token; METHODS §3, steps 1 to 5."""
    n = rule.per_group
    gs = {g: 1.0 if z is None else 1 / (1 + math.exp(-z[g])) for g in range(rule.groups)}
    kept = best(gs, rule.keep_groups)
    if rule.scoring == "official":
        gs = {g: gs[g] / sum(gs[k] for k in kept) for g in kept}
    candidates = {}
    for g in kept:
        highest = max(logits[g * n : g * n + n])
        exps = [math.exp(logits[g * n + i] - highest) for i in range(n)]
        for i in range(n):
            candidates[g * n + i] = exps[i] / sum(exps) * gs[g]
    if rule.top_p is not None:
        total = sum(candidates.values())
        candidates = {e: p / total for e, p in candidates.items()}
        chosen: list[int] = []
        for e in sorted(candidates, key=lambda e: (-candidates[e], e)):
            if chosen and sum(candidates[c] for c in chosen) >= rule.top_p:
                break
            chosen.append(e)
    else:
        assert rule.keep_experts is not None
        chosen = best(candidates, rule.keep_experts)
    if rule.scoring == "official":
        norm = sum(candidates.values())
        raw = {e: math.exp(candidates[e] / norm) for e in chosen}
    else:
        raw = {e: candidates[e] for e in chosen}
    below = sum(raw.values()) if rule.renormalise else 1.0
    return kept, {e: raw[e] / below for e in sorted(chosen)}


def logits(rule: Rule, rows: int, seed: int, *, ties: bool = False) -> tuple[Tensor | None, Tensor]:
    """Normal logits in float64; or of a few values whose probabilities are equal to the last digit, or far apart."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, rule.groups, generator=generator, dtype=torch.float64) * 2
    own = torch.randn(rows, rule.experts, generator=generator, dtype=torch.float64) * 2
    if ties:
        z, own = z.sign() * 0.7, torch.where(own > 0, 0.0, -1000.0).double()
    return (z if rule.groups > 1 else None), own


RULES = {
    "size": Rule(8, 4, 3, 6),
    "all groups": Rule(4, 3, 4, 5),
    "one expert": Rule(6, 2, 3, 1),
    "all of the kept": Rule(4, 3, 2, 6),
    "odd groups": Rule(5, 3, 2, 4),
    "odd, one group kept": Rule(7, 4, 1, 3),
    "one expert a group": Rule(9, 1, 4, 2),
    "one group": Rule(1, 8, 1, 2),
    "one group, as they are": Rule(1, 8, 1, 2, renormalise=False),
    "top-p": Rule(1, 8, 1, None, top_p=0.7),
    "top-p of groups": Rule(4, 3, 2, None, top_p=0.5, renormalise=False),
    "top-p takes all": Rule(1, 5, 1, None, top_p=1.0),
}
CASES = [
    pytest.param(replace(rule, scoring=scoring), id=f"{name}-{scoring}")
    for name, rule in RULES.items()
    for scoring in ("paper", "official")
    if scoring == "paper" or (rule.top_p is None and rule.renormalise)
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("rule", CASES)
def test_choices_and_weights_are_the_loops(rule: Rule, ties: bool) -> None:
    z, own = logits(rule, 60, seed=1, ties=ties)
    found = route(z, own, rule)
    for t in range(60):
        kept, weights = slow(None if z is None else z[t].tolist(), own[t].tolist(), rule)
        chosen = [e for e in found.choice_NK[t].tolist() if e >= 0]
        assert found.kept_Nk[t].tolist() == kept
        assert chosen == list(weights)
        assert found.weight_NK[t, : len(chosen)].tolist() == pytest.approx(list(weights.values()), abs=1e-12)
        assert not found.weight_NK[t, len(chosen) :].any()


def test_one_token() -> None:
    rule = Rule(2, 2, 1, 2)
    found = route(torch.tensor([[0.5, 0.4]]), torch.tensor([[1.0, 2.0, 9.0, 9.0]]), rule)
    assert (found.choice_NK.tolist(), found.kept_Nk.tolist()) == ([[0, 1]], [[0]])


def test_both_scorings_choose_the_same_experts() -> None:
    for rule in (Rule(8, 8, 3, 6), Rule(5, 3, 2, 4)):
        z, own = logits(rule, 500, seed=7)
        paper, official = (route(z, own, replace(rule, scoring=scoring)) for scoring in ("paper", "official"))
        assert torch.equal(paper.choice_NK, official.choice_NK)
        assert float((paper.weight_NK - official.weight_NK).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("keep_groups", "scoring", "ratio"),
    [(3, "official", 1.106), (3, "paper", 2.81), (4, "official", 1.079), (4, "paper", 2.48)],
)
def test_how_flat_the_weights_are(keep_groups: int, scoring: Any, ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z, own = torch.randn(100_000, 8, generator=generator), torch.randn(100_000, 64, generator=generator)
    weight_NK = route(z, own, Rule(8, 8, keep_groups, 6, scoring=scoring)).weight_NK
    mean = float((weight_NK.amax(1) / weight_NK.amin(1)).mean())
    assert mean == pytest.approx(ratio, rel=0.01)


def test_top_p_takes_as_many_as_it_needs() -> None:
    own = torch.tensor([[0.6, 0.25, 0.1, 0.05], [0.25, 0.25, 0.25, 0.25], [0.02, 0.02, 0.95, 0.01]]).log()
    found = route(None, own, Rule(1, 4, 1, None, top_p=0.8))
    assert found.choice_NK.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3], [2, -1, -1, -1]]
    assert found.weight_NK[0].tolist() == pytest.approx([0.6 / 0.85, 0.25 / 0.85, 0, 0])


# -- margins -----------------------------------------------------------------------------------------


def test_margins_are_the_distance_to_the_next_choice() -> None:
    half = math.log(3)  # σ(log 3) = 3/4, σ(0) = 1/2, σ(−log 3) = 1/4
    found = route(torch.tensor([[half, 0.0, -half]]), torch.zeros(1, 6), Rule(3, 2, 2, 2))
    assert found.group_margin_N.tolist() == pytest.approx([0.25])  # 1/2 stays, 1/4 does not
    # Candidates 3/8 3/8 1/4 1/4: the two best are taken.
    assert found.expert_margin_N.tolist() == pytest.approx([0.125])
    assert found.margin_N.tolist() == pytest.approx([0.125])


def test_margins_are_one_where_nothing_was_left_out_and_zero_at_a_tie() -> None:
    everything = route(torch.randn(4, 3), torch.randn(4, 6), Rule(3, 2, 3, 6))
    assert everything.margin_N.tolist() == [1.0] * 4
    tied = route(torch.zeros(1, 3), torch.zeros(1, 6), Rule(3, 2, 2, 2))
    assert (tied.group_margin_N.tolist(), tied.expert_margin_N.tolist()) == ([0.0], [0.0])
    assert tied.choice_NK.tolist() == [[0, 1]]


def test_margin_of_top_p_is_to_the_sum_or_to_the_next() -> None:
    own = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, margin in ((0.52, 0.02), (0.79, 0.01), (0.65, 0.15), (1.0, 0.05)):
        found = route(None, own, Rule(1, 4, 1, None, top_p=top_p))
        assert found.expert_margin_N.tolist() == pytest.approx([margin], abs=1e-6), top_p


# -- the module --------------------------------------------------------------------------------------


def test_logits_are_products_with_groups_first_and_one_group_has_none() -> None:
    rule = Rule(3, 2, 2, 2)
    router = HeterogeneousRouter(4, rule).double()
    with torch.no_grad():
        router.weight.normal_()
        x = torch.randn(5, 4, dtype=torch.float64)
        found = router(x)
    assert torch.allclose(found.group_logit_NG, x @ router.weight[:3].T, rtol=0, atol=1e-14)
    inside = (x @ router.weight[3:].T).view(5, 3, 2).softmax(-1)
    assert torch.allclose(found.within_NGn, inside, rtol=0, atol=1e-14)
    assert HeterogeneousRouter(4, Rule(1, 6, 1, 2)).weight.shape == (6, 4)


def test_extreme_logits_stay_finite() -> None:
    z, own = torch.full((1, 4), -200.0), torch.full((1, 8), 300.0)
    for scoring in ("paper", "official"):
        found = route(z, own, Rule(4, 2, 2, 3, scoring=scoring))  # type: ignore[arg-type]
        assert torch.isfinite(found.weight_NK).all()


# -- losses ------------------------------------------------------------------------------------------


def uniform_routing() -> tuple[Routing, Rule]:
    """8 groups of 8: each group kept by 12 of 32 rows, each expert chosen 3 times, all probabilities the same."""
    rule = Rule(8, 8, 3, 6)
    kept, chosen = [], []
    for g, pair in itertools.product(range(8), range(4)):
        groups = sorted((g + i) % 8 for i in range(3))
        kept.append(groups)
        chosen.append([group * 8 + 2 * pair + i for group in groups for i in range(2)])
    even = torch.zeros(32, 8, dtype=torch.float64)
    own = torch.zeros(32, 64, dtype=torch.float64)
    plain = route(even, own, rule)
    weight = torch.full((32, 6), 1 / 6, dtype=torch.float64)
    return replace(plain, choice_NK=torch.tensor(chosen), kept_Nk=torch.tensor(kept), weight_NK=weight), rule


def test_losses_at_uniform_load() -> None:
    routing, rule = uniform_routing()
    widths = [w for w in WIDTHS_3B for _ in range(8)]
    paper, official = (balance(family, routing, rule, widths) for family in ("paper", "official"))
    assert float(paper.group) == pytest.approx(0.65, abs=1e-12)
    assert float(official.group) == pytest.approx(1.4375, abs=1e-12)
    assert float(paper.expert) == pytest.approx(8 / 8, abs=1e-12)  # G/N
    assert float(official.expert) == pytest.approx(3 / 8, abs=1e-12)  # K_g/G


def slow_balance(
    family: str, z: list[list[float]], own: list[list[float]], rule: Rule, widths: list[int]
) -> list[float]:
    """L_G and L_E in loops over tokens, from METHODS §3; `widths` has one a group."""
    n, tokens = rule.per_group, len(z)
    decided = [slow(a, b, rule) for a, b in zip(z, own, strict=True)]
    n_g = [sum(g in kept for kept, _ in decided) for g in range(rule.groups)]
    n_e = [sum(e in weights for _, weights in decided) for e in range(rule.experts)]
    if family == "paper":
        gs = [[1 / (1 + math.exp(-v)) for v in row] for row in z]
        p = [sum(row[g] / sum(row) for row in gs) / tokens for g in range(rule.groups)]
        group = rule.groups * sum(
            widths[g] / max(widths) * n_g[g] / (tokens * rule.keep_groups) * p[g] for g in range(rule.groups)
        )
        expert = 0.0
        for g in range(rule.groups):
            inside = [n_e[g * n + i] for i in range(n)]
            for i in range(n):
                soft = [
                    math.exp(row[g * n + i]) / sum(math.exp(row[g * n + j]) for j in range(n))
                    for row, (kept, _) in zip(own, decided, strict=True)
                    if g in kept
                ]
                if sum(inside):
                    expert += inside[i] / sum(inside) * sum(soft) / len(soft)
        return [group, expert]
    soft_g = [sum(math.exp(row[g]) / sum(map(math.exp, row)) for row in z) for g in range(rule.groups)]
    price = [(w - min(widths) + 1024) / 1024 for w in widths]
    group = (
        rule.groups / (tokens**2 * rule.keep_groups) * sum(price[g] * soft_g[g] * n_g[g] for g in range(rule.groups))
    )
    assert rule.keep_experts is not None
    given = [sum(weights.get(e, 0.0) for _, weights in decided) for e in range(rule.experts)]
    scale = rule.experts * rule.keep_groups / rule.groups / (tokens**2 * rule.keep_experts)
    return [group, scale * sum(a * b for a, b in zip(given, n_e, strict=True))]


@pytest.mark.parametrize("family", ["paper", "official"])
@pytest.mark.parametrize("shift", [0.0, 60.0], ids=["all groups used", "a group receives nothing"])
def test_losses_are_the_loops(family: Any, shift: float) -> None:
    rule = Rule(5, 3, 2, 4, scoring=family)
    z, own = logits(rule, 40, seed=3)
    assert z is not None
    z[:, 1] -= shift
    widths = [64, 100, 128, 156, 192]
    routing = route(z, own, rule)
    assert bool((routing.kept_Nk == 1).any()) == (shift == 0)
    wanted = slow_balance(family, z.tolist(), own.tolist(), rule, widths)
    found = balance(family, routing, rule, [w for w in widths for _ in range(3)])
    assert [float(value) for value in found] == pytest.approx(wanted, rel=1e-12)
    # Rows that count for nothing are as if they were not there.
    real = torch.arange(40) % 3 > 0
    part = balance(family, routing, rule, [w for w in widths for _ in range(3)], real)
    some = slow_balance(family, z[real].tolist(), own[real].tolist(), rule, widths)
    assert [float(value) for value in part] == pytest.approx(some, rel=1e-12)


def test_with_one_group_experts_are_priced_by_width() -> None:
    """HMoE's parameter penalty: E·Σ (W_e/W_max)·f_e·p_e, by hand for two rows that take one expert each of three."""
    own = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    rule = Rule(1, 3, 1, 1)
    found = balance("paper", route(None, own, rule), rule, [10, 20, 40])
    assert float(found.group) == pytest.approx(3 * (10 / 40 * 0.5 * 0.3 + 1.0 * 0.5 * 0.45))
    assert float(found.expert) == pytest.approx(0.5 * 0.3 + 0.5 * 0.45)


def test_losses_reach_the_router() -> None:
    rule = Rule(4, 2, 2, 3)
    router = HeterogeneousRouter(6, rule).double()
    with torch.no_grad():
        router.weight.normal_()
    for family in ("paper", "official"):
        router.weight.grad = None
        found = balance(family, router(torch.randn(9, 6, dtype=torch.float64)), rule, [8, 8, 16, 16, 24, 24, 32, 32])
        (found.group + found.expert).backward()
        assert router.weight.grad is not None
        assert float(router.weight.grad[:4].abs().sum()) > 0
        assert float(router.weight.grad[4:].abs().sum()) > 0
