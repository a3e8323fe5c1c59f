"""A decoder written out by hand in float64, one sequence at a time, with no cache, no mask and no batch.

The reference routed and dense outputs are held against. It reads weights by their Hugging Face names and shares no
code with the product or with transformers. `route` says which layers run; None asks the routers, each with the mean of
its layer's input over the first `pooled` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slow:
    """Logits `[T, vocabulary]`, which layers ran, and each layer's router logit (empty without routers)."""

    logits: Tensor
    ran: list[bool]
    router_logits: list[float]


def slow_forward(
    weights: Mapping[str, Tensor],
    config: Any,
    ids: Sequence[int],
    *,
    route: Sequence[bool] | None = None,
    routers: Sequence[tuple[Tensor, Tensor]] = (),
    pooled: int | None = None,
) -> Slow:
    """All of one sequence. `routers` are `(w [d], b [])` a layer."""
    hidden = torch.stack([weights["model.embed_tokens.weight"][token] for token in ids])
    ran, asked = [], []
    for layer in range(config.num_hidden_layers):
        if routers:
            w, b = routers[layer]
            asked.append(float(w.double() @ hidden[:pooled].mean(0) + b.double()))
        ran.append(route[layer] if route is not None else asked[-1] > 0)
        if ran[-1]:
            hidden = _block(weights, config, f"model.layers.{layer}.", hidden)
    hidden = _norm(weights["model.norm.weight"], config, hidden)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return Slow(hidden @ head.T, ran, asked)


def slow_generate(
    weights: Mapping[str, Tensor],
    config: Any,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    route: Sequence[bool] | None = None,
    routers: Sequence[tuple[Tensor, Tensor]] = (),
) -> list[int]:
    """Greedy continuation with gates frozen at the prompt, the whole sequence computed again for every token."""
    if route is None:
        route = slow_forward(weights, config, prompt, routers=routers).ran
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(slow_forward(weights, config, ids, route=route).logits[-1].argmax()))
    return ids[len(prompt) :]


def _block(weights: Mapping[str, Tensor], config: Any, name: str, hidden: Tensor) -> Tensor:
    hidden = hidden + _attention(
        weights, config, name + "self_attn.", _norm(weights[name + "input_layernorm.weight"], config, hidden)
    )
    x = _norm(weights[name + "post_attention_layernorm.weight"], config, hidden)
    gate, up = _linear(weights, name + "mlp.gate_proj", x), _linear(weights, name + "mlp.up_proj", x)
    return hidden + _linear(weights, name + "mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)


def _attention(weights: Mapping[str, Tensor], config: Any, name: str, x: Tensor) -> Tensor:
    size = config.hidden_size // config.num_attention_heads
    queries, keys, values = (_linear(weights, f"{name}{part}_proj", x) for part in "qkv")
    shared = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for head in range(config.num_attention_heads):
        mine, theirs = slice(head * size, (head + 1) * size), slice(head // shared * size, (head // shared + 1) * size)
        queries_T = [_rotate(queries[t, mine], t, config) for t in range(len(x))]
        keys_T = [_rotate(keys[t, theirs], t, config) for t in range(len(x))]
        outputs = []
        for t, query in enumerate(queries_T):
            scores = torch.stack(keys_T[: t + 1]) @ query / size**0.5
            share = torch.exp(scores - scores.max())
            outputs.append(share / share.sum() @ values[: t + 1, theirs])
        heads.append(torch.stack(outputs))
    return _linear(weights, name + "o_proj", torch.cat(heads, dim=1))


def _rotate(x: Tensor, position: int, config: Any) -> Tensor:
    # transformers makes the angles in float32, and so does this: they are part of what the model is.
    half = len(x) // 2
    theta = config.rope_parameters["rope_theta"]
    frequency = 1.0 / theta ** (torch.arange(0, len(x), 2, dtype=torch.float32) / len(x))
    angle = position * frequency
    cos, sin = angle.cos().double(), angle.sin().double()
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def _norm(weight: Tensor, config: Any, x: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias


@dataclass(frozen=True)
class SlowSteps:
    """Logits `[T, vocabulary]`; by step, which layers ran and what their routers said."""

    logits: Tensor
    ran: list[list[bool]]
    router_logits: list[list[float]]


def slow_running(
    weights: Mapping[str, Tensor],
    config: Any,
    ids: Sequence[int],
    prompt: int,
    *,
    routers: Sequence[tuple[Tensor, Tensor]] = (),
    route: Sequence[Sequence[bool]] | None = None,
) -> SlowSteps:
    """A prompt of `prompt` tokens, then one step a token, gates anew each step on the mean over all tokens so far.

    Layer by layer over the whole sequence, with no cache: what a token's block would give is worked out for every
    token, on keys and values of everything before it, and taken where that token's step ran the layer. `route` says
    `[step][layer]` which do; None asks the routers.
    """
    hidden = torch.stack([weights["model.embed_tokens.weight"][token] for token in ids])
    steps = len(ids) - prompt + 1
    ran: list[list[bool]] = [[] for _ in range(steps)]
    asked: list[list[float]] = [[] for _ in range(steps)]
    for layer in range(config.num_hidden_layers):
        after = _block(weights, config, f"model.layers.{layer}.", hidden)
        for step in range(steps):
            if routers:
                w, b = routers[layer]
                asked[step].append(float(w.double() @ hidden[: prompt + step].mean(0) + b.double()))
            ran[step].append(route[step][layer] if route is not None else asked[step][-1] > 0)
        hidden = torch.stack([after[t] if ran[max(0, t - prompt + 1)][layer] else hidden[t] for t in range(len(ids))])
    hidden = _norm(weights["model.norm.weight"], config, hidden)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return SlowSteps(hidden @ head.T, ran, asked)
