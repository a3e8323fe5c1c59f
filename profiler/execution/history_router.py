"""The router of HeRo: how one token's gate at one routable layer comes of its content, its path and its memory.

In the order of METHODS §1, for the j-th of L_R routable layers and each token by itself (`HistoryRouter.step`):

    δ_j = h̄_j − h̄_{j−1}      δ_1 = 0, h̄_{j−1} at the previous ROUTABLE layer
    d_j = ‖δ_j‖               γ_j = ⟨δ_j, δ_{j−1}⟩ / (‖δ_j‖‖δ_{j−1}‖ + ε)      γ_1 = γ_2 = 0
    x_path = [ j/L_R, (L_R − j)/L_R, d_j, γ_j, p_{j−1}, m_{j−1} ]              p_0 = m_0 = 1
    z_h = W_hu·SiLU(W_hd·RMSNorm(h̄_j))    z_a = FFN_path(x_path)    s = [z_h ; z_a]
    q, k, v = W_q s, W_k s, W_v s          c_j = read of the memory, which holds the layers before j
    ν_j = 1 − cos(W_n s, W_c c_j)          ν_1 = 0
    a_j = f_θ([s ; c_j ; ν_j])    p_j = σ(a_j / T_hist)    m_j = m_{j−1}·p_j
    b_j = f_ψ(h̄_j)               g_j = σ(a_j + b_j)       after it, the memory is written

(ours) content 48, path 16, comparison 64; SiLU in heads and path encoder, biases there and nowhere else; ε in every
denominator but RMSNorm's, which has it inside the root, as RMSNorm has; the last layers of both heads start at zero,
so that a fresh router gives every token g = σ(LOCAL_START): h̄ is not normalised before f_ψ and reaches norms of
thousands, so a random head would decide before training does.

`Variant` lists the ablations; each is described where it departs from the above, or in `history_controls`. `PlainMath`
computes the lines above as they stand; `folded_router` computes the same in fewer products. Not here: the branch that
is taken, and when a forward begins (the method).

Legend: N token rows, d hidden size, m = 64 the memory's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.execution import depth_memory
from profiler.execution.depth_memory import EPSILON, DualMemory, Form, MatrixMemory, memory_of, phi
from profiler.execution.history_controls import Around, shuffled_order, shuffled_place

CONTENT, PATH = 48, 16
STATE = CONTENT + PATH
#: Width of q, k, v and c; width of the space ν compares in; hidden width of both heads.
MEMORY, COMPARED, HEAD = 64, 64, 256
PATH_FEATURES = 6
HISTORY_TEMPERATURE = 0.9
RHO_START = 0.98
#: Bias of f_ψ at the start of training (ours): g = 0.88, so that training begins with the FFN in every layer.
LOCAL_START = 2.0

Variant = Literal[
    "full", "no_position", "no_path", "no_history", "no_memory_read",
    "wide_local", "shuffled_history", "foreign_history", "recent_only",
]  # fmt: skip
VARIANTS: tuple[Variant, ...] = get_args(Variant)
#: Variants whose gate is the local head's alone: g = σ(b). `wide_local`'s has as many parameters as the full router.
LOCAL: frozenset[Variant] = frozenset({"no_history", "wide_local"})

#: What is recorded of each decision beside its gate, in the letters of METHODS §1.
SIGNALS = {
    "p": "p_j = σ(a_j / T_hist), the history score",
    "m": "m_j = m_{j−1}·p_j, the cumulative history score; not a count of FFNs run",
    "a": "a_j, the history head's logit",
    "b": "b_j, the local head's logit",
    "d": "d_j = ‖h̄_j − h̄_{j−1}‖, the residual change since the previous routable layer",
    "gamma": "γ_j, cosine between this residual change and the one before",
    "nu": "ν_j = 1 − cos(W_n s, W_c c_j), how far the state is from its history",
}


@dataclass(frozen=True)
class Scores:
    """What came out at one layer, `[N]` each. NaN where a variant does not compute it."""

    g: Tensor
    p: Tensor
    m: Tensor
    a: Tensor
    b: Tensor
    d: Tensor
    gamma: Tensor
    nu: Tensor

    def signals(self) -> dict[str, Tensor]:
        """The recorded columns, keyed as `SIGNALS`."""
        return {name: getattr(self, name) for name in SIGNALS}


@dataclass(frozen=True)
class Past:
    """What the tokens bring from routable layer j − 1.

    `h_bar` and `delta` are `[N, d]` (no `delta` of the first layer: δ_1 = 0), `d`, `p`, `m` `[N]`; `memory` is a state
    of `depth_memory`. `trail` has `[N, 4]` for each layer before (d_i, γ_i, p_{i−1}, m_{i−1}), and is kept by the
    variant that shuffles it. A past is good for one step: what a next layer computes may be written over it.
    """

    h_bar: Tensor
    delta: Tensor | None
    d: Tensor
    p: Tensor
    m: Tensor
    memory: Tensor | None
    trail: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """One layer's reading of its tokens: φ(q), φ(k), v `[N, m]`, b `[N]`, and what the history head goes on with."""

    query: Tensor
    key: Tensor
    value: Tensor
    b: Tensor
    rest: tuple[Tensor, ...]


class Math(Protocol):
    """The learned functions of the router; two implementations, equal to rounding."""

    memory: MatrixMemory | DualMemory

    def residual_change(self, h_Nd: Tensor, past: Past, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """d_j, γ_j `[N]` and δ_j `[N, d]`, after the first layer. γ_2 is 0 because δ_1 is."""

    def encode(self, h_Nd: Tensor, place: int | Tensor, path_N4: Tensor, depth: int) -> Encoded:
        """Encoders, projections and local head.

        Args:
            h_Nd: h̄_j.
            place: the depth the progress features tell, j; `[N]` where tokens are told different ones.
            path_N4: d_j, γ_j, p_{j−1}, m_{j−1}.
            depth: j.
        """

    def judge(self, encoded: Encoded, c_Nm: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """a_j and ν_j, `[N]` each."""

    def local(self, h_Nd: Tensor) -> Tensor:
        """b_j `[N]`, where it is all there is."""


def head_width(hidden: int, layers: int, variant: Variant) -> int:
    """Hidden width of the local head: 256, or what gives `wide_local` as many parameters as the full router has."""
    if variant != "wide_local":
        return HEAD
    return round((parameter_count(hidden, layers, "full") - 1) / (hidden + 2))


def parameter_count(hidden: int, layers: int, variant: Variant) -> int:
    """Parameters of router and memory that take part, those all layers share counted once.

    METHODS §1: 1,306,514 at hidden 4096 and 16 layers.
    """
    width = head_width(hidden, layers, variant)
    local = hidden * width + width + width + 1
    if variant in LOCAL:
        return local
    content = hidden + hidden * CONTENT + CONTENT * CONTENT
    path = 0 if variant == "no_path" else PATH_FEATURES * PATH + PATH + PATH * PATH + PATH
    history = (STATE + MEMORY + 1) * HEAD + HEAD + HEAD + 1
    if variant == "no_memory_read":
        return local + content + path + history
    forget = 0 if variant == "recent_only" else layers
    return local + content + path + history + 3 * STATE * MEMORY + STATE * COMPARED + MEMORY * COMPARED + forget


class HistoryRouter(nn.Module):
    """Parameters of router and memory, shared by all routable layers (η_j apart), and one step of it.

    Its parameters are named after METHODS §1. A variant that leaves a part out of the computation keeps its
    parameters, so that a checkpoint of the full router fits; those of `LOCAL` have the local head only.
    """

    def __init__(self, hidden: int, layers: int, variant: Variant, form: Form, shuffle_seed: int = 0) -> None:
        """Make the parameters, on torch's default device; `start` gives them values.

        Args:
            hidden: d.
            layers: L_R.
            variant: which ablation.
            form: of the memory.
            shuffle_seed: of `shuffled_history`'s orders.
        """
        super().__init__()
        self.layers, self.variant, self.form, self.shuffle_seed = layers, variant, form, shuffle_seed
        width = head_width(hidden, layers, variant)
        self.f_psi = nn.Sequential(nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, 1))
        if variant not in LOCAL:
            self.norm = nn.Parameter(torch.ones(hidden))
            self.W_hd = nn.Linear(hidden, CONTENT, bias=False)
            self.W_hu = nn.Linear(CONTENT, CONTENT, bias=False)
            self.path = nn.Sequential(nn.Linear(PATH_FEATURES, PATH), nn.SiLU(), nn.Linear(PATH, PATH))
            self.W_q, self.W_k, self.W_v = (nn.Linear(STATE, MEMORY, bias=False) for _ in range(3))
            self.W_n = nn.Linear(STATE, COMPARED, bias=False)
            self.W_c = nn.Linear(MEMORY, COMPARED, bias=False)
            self.f_theta = nn.Sequential(nn.Linear(STATE + MEMORY + 1, HEAD), nn.SiLU(), nn.Linear(HEAD, 1))
            self.eta = nn.Parameter(torch.empty(layers))

    def start(self, seed: int) -> None:
        """Set every parameter to what training starts from: weights uniform in ±1/√in, drawn on the host from `seed`;
        biases and last layers zero, but for f_ψ's last bias."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    bound = module.in_features**-0.5
                    module.weight.copy_((torch.rand(module.weight.shape, generator=generator) * 2 - 1) * bound)
                    if module.bias is not None:
                        module.bias.zero_()
            heads = [self.f_psi] if self.variant in LOCAL else [self.f_psi, self.f_theta]
            for head in heads:
                cast(nn.Linear, head[2]).weight.zero_()
            cast(nn.Linear, self.f_psi[2]).bias.fill_(LOCAL_START)
            if self.variant not in LOCAL:
                self.norm.fill_(1.0)
                self.eta.copy_(torch.full((self.layers,), RHO_START).logit())

    def rho_L(self) -> Tensor:
        """ρ_j = σ(η_j), `[L_R]`. `recent_only`: 0, so that the memory holds what the previous layer wrote, no more."""
        return torch.zeros_like(self.eta) if self.variant == "recent_only" else torch.sigmoid(self.eta)

    def step(
        self, math: Math, depth: int, h_Nd: Tensor, past: Past | None, around: Around | None = None
    ) -> tuple[Scores, Past | None]:
        """One routable layer: state, read, gate, write.

        Args:
            math: `PlainMath` or the folded one.
            depth: j, from 1.
            h_Nd: h̄_j, in the router's dtype.
            past: of layer j − 1; None at the first.
            around: for the variants that look beyond the token (`history_controls`).

        Returns:
            Scores, and the past of layer j + 1 (None after the last, and where no layer needs one). Without gradients
            they are inference tensors: at few rows what autograd asks of every kernel is a sixth of the router's time.
        """
        if torch.is_autocast_enabled(h_Nd.device.type):  # would multiply in half precision
            with torch.autocast(h_Nd.device.type, enabled=False):
                return self.step(math, depth, h_Nd, past, around)
        if torch.is_grad_enabled():
            return self._step(math, depth, h_Nd, past, around)
        with torch.inference_mode():
            return self._step(math, depth, h_Nd, past, around)

    def _step(
        self, math: Math, depth: int, h_Nd: Tensor, past: Past | None, around: Around | None
    ) -> tuple[Scores, Past | None]:
        if self.variant in LOCAL:
            b = math.local(h_Nd)
            nothing = torch.full_like(b, float("nan"))
            return Scores(
                g=torch.sigmoid(b), p=nothing, m=nothing, a=nothing, b=b, d=nothing, gamma=nothing, nu=nothing
            ), None

        # -- build state
        if past is None:
            gamma = d = torch.zeros_like(h_Nd[:, 0])
            delta = None
            p_before = m_before = torch.ones_like(d)
        else:
            d, gamma, delta = math.residual_change(h_Nd, past, depth)
            p_before, m_before = past.p, past.m
        # recent_only: the previous layer's score stands for the whole product, which remembers every layer before.
        path_N4 = torch.stack([d, gamma, p_before, p_before if self.variant == "recent_only" else m_before], dim=1)
        trail = () if past is None else past.trail
        place: int | Tensor = depth
        told_N4 = path_N4
        if self.variant == "shuffled_history":
            trail = (*trail, path_N4)
            place, told_N4 = self._shuffled_path(depth, trail, cast(Around, around))
        encoded = math.encode(h_Nd, place, told_N4, depth)

        # -- read memory, gate
        memory = None if past is None else past.memory
        c_Nm = self._read(math, memory, encoded, depth, around)
        a, nu = math.judge(encoded, c_Nm, depth)
        p = torch.sigmoid(a / HISTORY_TEMPERATURE)
        m = m_before * p
        scores = Scores(torch.sigmoid(a + encoded.b), p, m, a, encoded.b, d, gamma, nu)
        if depth == self.layers:
            return scores, None

        # -- write memory; what the branch does to the residual is seen by the next layer, as δ
        if self.variant != "no_memory_read":
            memory = math.memory.write(memory, encoded.key, encoded.value, depth)
        return scores, Past(h_Nd, delta, d, p, m, memory, trail)

    def _read(self, math: Math, memory: Tensor | None, encoded: Encoded, depth: int, around: Around | None) -> Tensor:
        """c_j `[N, m]`."""
        if memory is None:  # the first layer; no_memory_read: c ≡ 0
            return torch.zeros((len(encoded.b), MEMORY), dtype=encoded.b.dtype, device=encoded.b.device)
        if self.variant == "foreign_history":
            donor = cast(Around, around)
            c_Nm = math.memory.read(memory.index_select(0, donor.donor_N), encoded.query, depth)
            return torch.where(donor.donated_N[:, None], c_Nm, 0)  # a product would pass on what is not finite
        if self.variant == "shuffled_history":
            order_NJ = shuffled_order(self.shuffle_seed, cast(Around, around).position_N, depth)
            return cast(DualMemory, math.memory).read(memory, encoded.query, depth, order_NJ)
        return math.memory.read(memory, encoded.query, depth)

    def _shuffled_path(self, depth: int, trail: tuple[Tensor, ...], around: Around) -> tuple[Tensor, Tensor]:
        """The depth each token is told it is at, `[N]` in 1..j, and the path features of that depth, `[N, 4]`."""
        place_N = shuffled_place(self.shuffle_seed, around.position_N, depth)
        rows_N = torch.arange(len(place_N), device=place_N.device)
        return place_N, torch.stack(trail)[place_N - 1, rows_N]


class PlainMath:
    """The lines of METHODS §1 as they stand; what training differentiates."""

    def __init__(self, router: HistoryRouter) -> None:
        self._router = router
        if router.variant not in LOCAL:
            self.memory = memory_of(router.form, router.rho_L())

    def residual_change(self, h_Nd: Tensor, past: Past, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Math`."""
        delta = h_Nd - past.h_bar
        d = torch.linalg.vector_norm(delta, dim=1)
        if past.delta is None:
            return d, torch.zeros_like(d), delta
        return d, torch.linalg.vecdot(delta, past.delta) / (d * past.d + EPSILON), delta

    def encode(self, h_Nd: Tensor, place: int | Tensor, path_N4: Tensor, depth: int) -> Encoded:
        """See `Math`."""
        r = self._router
        normed = h_Nd * torch.rsqrt(h_Nd.square().mean(1, keepdim=True) + EPSILON) * r.norm
        z_h = r.W_hu(F.silu(r.W_hd(normed)))
        s = torch.cat([z_h, self._path_code(place, path_N4)], dim=1)
        return Encoded(phi(r.W_q(s)), phi(r.W_k(s)), r.W_v(s), r.f_psi(h_Nd)[:, 0], (s,))

    def _path_code(self, place: int | Tensor, path_N4: Tensor) -> Tensor:
        """z_a `[N, 16]`; `no_path`: 0."""
        r = self._router
        if r.variant == "no_path":
            return path_N4.new_zeros((len(path_N4), PATH))
        place_N = torch.as_tensor(place, device=path_N4.device).expand(len(path_N4))
        progress_N2 = torch.stack([place_N, r.layers - place_N], dim=1).to(path_N4.dtype) / r.layers
        x_path = torch.cat([progress_N2, path_N4], dim=1) * path_mask(r.variant, path_N4)
        return cast(Tensor, r.path(x_path))

    def judge(self, encoded: Encoded, c_Nm: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """See `Math`."""
        r, (s,) = self._router, encoded.rest
        n, c = r.W_n(s), r.W_c(c_Nm)
        cosine = (n * c).sum(1) / (n.norm(dim=1) * c.norm(dim=1) + EPSILON)
        nu = torch.zeros_like(cosine) if depth == 1 else 1 - cosine
        return r.f_theta(torch.cat([s, c_Nm, nu[:, None]], dim=1))[:, 0], nu

    def local(self, h_Nd: Tensor) -> Tensor:
        """See `Math`."""
        return cast(Tensor, self._router.f_psi(h_Nd))[:, 0]


def path_mask(variant: Variant, like: Tensor) -> Tensor:
    """`[6]`: 0 where a variant leaves a path feature out. `no_position`: progress, remainder, d and γ."""
    kept = [0, 0, 0, 0, 1, 1] if variant == "no_position" else [1] * PATH_FEATURES
    return like.new_tensor(kept)


def flops_per_row(hidden: int, layers: int, variant: Variant, form: Form, depth: int) -> int:
    """FLOPs of one row at depth j, as the folded form multiplies."""
    width = head_width(hidden, layers, variant)
    local = 2 * hidden * width + 2 * width
    if variant in LOCAL:
        return local
    content = 2 * hidden * CONTENT
    coded = CONTENT if variant == "no_path" else STATE
    path = 0 if variant == "no_path" else 2 * (PATH_FEATURES - 2) * PATH
    if variant == "no_memory_read":
        return local + content + path + 2 * coded * HEAD + 2 * HEAD
    first = 2 * coded * (3 * MEMORY + COMPARED + HEAD)
    second = 0 if depth == 1 else 2 * MEMORY * COMPARED + 2 * (MEMORY + 1) * HEAD
    read = depth_memory.flops_per_row(form, MEMORY, depth)
    return local + content + path + first + second + read + 2 * HEAD
