"""HeRo written out token by token and layer by layer in float64, from METHODS §1 alone.

It shares no code with the product but the hash that says how `shuffled_history` shuffles. Weights are read by name.
Scalars are torch's, so that gradients can be had of what the formulas say; nothing else is done for their sake.
Attention, norms and products are those of `slow_decoder`, one sequence at a time, no cache, no mask, no batch.

`mistake` makes one of the errors that readers of the method make; a test that cannot tell it from the truth is no test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from profiler.execution.history_controls import shuffled_order, shuffled_place
from tests.profiler.slow_decoder import _attention, _linear, _norm

EPSILON = 1e-6
T_HIST = 0.9

Mistake = Literal[
    "scores are gates", "m of gates", "delta of the actual layer", "nu_1 is 1", "write before read", "no scale",
    "scales swapped", "gate above threshold", "progress of the actual layer", "gamma unnormalised",
    "memory crosses tokens", "no forgetting", "local head missing",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One token at one routable layer."""

    ffn: bool
    g: float
    p: float
    m: float
    a: float
    b: float
    d: float
    gamma: float
    nu: float


@dataclass(frozen=True)
class Reference:
    """Logits `[T, vocabulary]`; `rows[j][t]` for the j-th routable layer (0-based) and token t, and g there, which can
    be differentiated."""

    logits: Tensor
    rows: list[list[Row]]
    gates: list[list[Tensor]]


@dataclass
class _Token:
    """What a token carries through depth: h̄ of the layer before; δ, h̄, p, m, x_path and (φ(k), v) of each routable
    layer before; the memory."""

    before: Tensor | None = None
    h_bars: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    cumulative: list[Tensor] = field(default_factory=list)
    path: list[Tensor] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    S: Tensor = field(default_factory=lambda: torch.zeros(64, 64, dtype=torch.float64))
    zeta: Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.float64))


def hero_forward(
    weights: Mapping[str, Tensor],
    config: Any,
    added: Mapping[str, Tensor],
    ids: Sequence[int],
    layers: Sequence[int],
    *,
    variant: str = "full",
    threshold: float = 0.5,
    shuffle_seed: int = 0,
    pinned: Sequence[Sequence[bool]] | None = None,
    forced: Sequence[Sequence[bool]] | None = None,
    mistake: Mistake | None = None,
) -> Reference:
    """All of one sequence.

    Args:
        weights: the backbone's, by their Hugging Face names.
        config: the backbone's.
        added: what the method adds: `router.NAME` and `adapters.LAYER.W1.weight`, `...W2.weight`.
        ids: tokens.
        layers: the routable layers, ascending.
        variant: as the product names them.
        threshold: τ.
        shuffle_seed: of `shuffled_history`.
        pinned: `[j][t]`, True where the FFN runs whatever the gate says; the gate still scales.
        forced: the same, with scale 1.
        mistake: one to make.
    """
    hidden = [weights["model.embed_tokens.weight"][token] for token in ids]
    tokens = [_Token() for _ in ids]
    rows: list[list[Row]] = []
    gates: list[list[Tensor]] = []
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}."
        normed = torch.stack([_norm(weights[name + "input_layernorm.weight"], config, h) for h in hidden])
        mixed = _attention(weights, config, name + "self_attn.", normed)
        h_bars = [h + x for h, x in zip(hidden, mixed, strict=True)]
        if layer in layers:
            rows.append([])
            gates.append([])
        memories = [(token.S.clone(), token.zeta.clone()) for token in tokens]
        for t, (token, h_bar) in enumerate(zip(tokens, h_bars, strict=True)):
            u = _norm(weights[name + "post_attention_layernorm.weight"], config, h_bar)
            if layer not in layers:
                hidden[t] = h_bar + _ffn(weights, name, u)
            else:
                j = list(layers).index(layer) + 1
                foreign = memories[t - 1] if t else None
                if mistake == "memory crosses tokens" and t:
                    token.S, token.zeta = tokens[t - 1].S, tokens[t - 1].zeta
                g, row = _route(
                    added, token, h_bar, j, layer, len(layers), config, variant, foreign, t, shuffle_seed, mistake
                )
                ffn = row.g > threshold if mistake == "gate above threshold" else row.g >= threshold
                if pinned is not None:
                    ffn = pinned[j - 1][t]
                scale = g if ffn else 1 - g
                if forced is not None:
                    ffn, scale = forced[j - 1][t], torch.ones_like(g)
                if mistake == "no scale":
                    scale = torch.ones_like(g)
                if mistake == "scales swapped":
                    scale = 1 - scale
                branch = _ffn(weights, name, u) if ffn else _adapter(added, layer, u)
                hidden[t] = h_bar + scale * branch
                gates[-1].append(g)
                rows[-1].append(Row(ffn, row.g, row.p, row.m, row.a, row.b, row.d, row.gamma, row.nu))
            token.before = h_bar
    final = torch.stack([_norm(weights["model.norm.weight"], config, h) for h in hidden])
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return Reference(final @ head.T, rows, gates)


def _ffn(weights: Mapping[str, Tensor], name: str, u: Tensor) -> Tensor:
    gate, up = _linear(weights, name + "mlp.gate_proj", u), _linear(weights, name + "mlp.up_proj", u)
    return _linear(weights, name + "mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)


def _adapter(added: Mapping[str, Tensor], layer: int, u: Tensor) -> Tensor:
    return added[f"adapters.{layer}.W2.weight"] @ _silu(added[f"adapters.{layer}.W1.weight"] @ u)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x)) if x > 0 else torch.exp(x) / (1 + torch.exp(x))


def _phi(x: Tensor) -> Tensor:
    return torch.stack([1 + v if v > 0 else torch.exp(v) for v in x])


def _head(added: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    hidden = _silu(added[f"{name}.0.weight"] @ x + added[f"{name}.0.bias"])
    return added[f"{name}.2.weight"][0] @ hidden + added[f"{name}.2.bias"][0]


def _route(
    added: Mapping[str, Tensor], token: _Token, h_bar: Tensor, j: int, layer: int, L_R: int, config: Any, variant: str,
    foreign: tuple[Tensor, Tensor] | None, position: int, shuffle_seed: int, mistake: Mistake | None,
) -> tuple[Tensor, Row]:  # fmt: skip
    """Build state → read memory → gate → write memory (the branch is the caller's): g, and all there is to record."""
    none = float("nan")
    b = _head(added, "router.f_psi", h_bar)
    if variant in ("no_history", "wide_local"):
        g = _sigmoid(b)
        return g, Row(True, g.item(), none, none, none, b.item(), none, none, none)

    # δ_j, d_j, γ_j
    zero, one = torch.zeros_like(h_bar), torch.ones((), dtype=torch.float64)
    previous = token.before if mistake == "delta of the actual layer" and layer else (token.h_bars or [None])[-1]
    delta = zero if previous is None else h_bar - previous
    d = delta.norm()
    gamma = 0 * one
    if j > 2:
        dot, norms = delta @ token.deltas[-1], d * token.deltas[-1].norm()
        gamma = dot if mistake == "gamma unnormalised" else dot / (norms + EPSILON)
    token.h_bars.append(h_bar)
    token.deltas.append(delta)

    # x_path
    p_before, m_before = (token.scores[-1], token.cumulative[-1]) if j > 1 else (one, one)
    path_m = p_before if variant == "recent_only" else m_before
    place, depth = (layer + 1, config.num_hidden_layers) if mistake == "progress of the actual layer" else (j, L_R)
    token.path.append(torch.stack([place / depth * one, (depth - place) / depth * one, d, gamma, p_before, path_m]))
    x_path = token.path[-1]
    where = torch.tensor([position])
    if variant == "shuffled_history":
        x_path = token.path[int(shuffled_place(shuffle_seed, where, j)) - 1]
    if variant == "no_position":
        x_path = torch.cat([torch.zeros(4, dtype=torch.float64), x_path[4:]])

    # z_h, z_a, s
    rms = torch.sqrt((h_bar * h_bar).mean() + EPSILON)
    z_h = added["router.W_hu.weight"] @ _silu(added["router.W_hd.weight"] @ (h_bar / rms * added["router.norm"]))
    hidden = _silu(added["router.path.0.weight"] @ x_path + added["router.path.0.bias"])
    z_a = added["router.path.2.weight"] @ hidden + added["router.path.2.bias"]
    if variant == "no_path":
        z_a = torch.zeros_like(z_a)
    s = torch.cat([z_h, z_a])
    q, k, v = (added[f"router.W_{name}.weight"] @ s for name in "qkv")

    # read
    rhos = [_sigmoid(eta) for eta in added["router.eta"]]
    if variant == "recent_only":
        rhos = [0 * one] * len(rhos)
    if mistake == "no forgetting":
        rhos = [one] * len(rhos)
    if mistake == "write before read":
        token.S, token.zeta = rhos[j - 1] * token.S + torch.outer(_phi(k), v), rhos[j - 1] * token.zeta + _phi(k)
    S, zeta = token.S, token.zeta
    if variant == "foreign_history":
        S, zeta = foreign if foreign is not None else (torch.zeros_like(S), torch.zeros_like(zeta))
    if variant == "shuffled_history" and j > 1:
        order = shuffled_order(shuffle_seed, where, j)[0].tolist()
        S, zeta = torch.zeros_like(S), torch.zeros_like(zeta)
        for (key, value), stands_at in zip(token.written, order, strict=True):
            weight = math.prod(rhos[stands_at + 1 : j - 1], start=one)
            S, zeta = S + weight * torch.outer(key, value), zeta + weight * key
    c = (_phi(q) @ S) / (_phi(q) @ zeta + EPSILON)
    if variant == "no_memory_read":
        c = torch.zeros_like(c)

    # gate
    n, compared = added["router.W_n.weight"] @ s, added["router.W_c.weight"] @ c
    nu = 1 - (n @ compared) / (n.norm() * compared.norm() + EPSILON)
    if j == 1 and mistake != "nu_1 is 1":
        nu = 0 * one
    a = _head(added, "router.f_theta", torch.cat([s, c, nu[None]]))
    g = _sigmoid(a if mistake == "local head missing" else a + b)
    p = g if mistake == "scores are gates" else _sigmoid(a / T_HIST)
    m = m_before * (g if mistake == "m of gates" else p)
    token.scores.append(p)
    token.cumulative.append(m)

    # write
    token.written.append((_phi(k), v))
    if mistake != "write before read":
        token.S, token.zeta = rhos[j - 1] * token.S + torch.outer(_phi(k), v), rhos[j - 1] * token.zeta + _phi(k)
    return g, Row(True, *(value.item() for value in (g, p, m, a, b, d, gamma, nu)))
