"""Training a model with experts: the language-model loss and both auxiliary losses, over experts or the whole model.

    loss = mean of −log p over predicted tokens + Σ over layers of α_G·L_G + α_E·L_E     (METHODS section 3)

α and the family of the auxiliary losses are the arm's. They are of the rows of one forward; those of a step's forwards
are weighted by their predicted tokens. A pad has no part in them.

What is trained: routers, experts and shared experts, and where the arm says `backbone: trained`, the model itself too:
embedding, attention, norms, dense halves. Experts have no pretrained weights to go with, so a language model with them
is mostly trained whole. A dense half that experts stand in for is no part of it.

Figures are sums over predicted tokens, so that those of micro-batches and domains add up; each token counts with the
mean over its layers.

Not here: the losses themselves (`heterogeneous_router.balance`) and the loop (`profiler.train`).

Legend: N token rows, K experts a row, G groups, E experts, L layers with experts.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.errors import InputError
from profiler.execution.decoder import ADDED, Decoder
from profiler.execution.expert_shapes import Design
from profiler.execution.heterogeneous_router import Balance, Routing, Rule
from profiler.execution.likelihood import token_nll
from profiler.methods import Losses, MethodConfig, Trainable

WEIGHTS = "model.safetensors"


class MohgeObjective(MethodConfig):
    """Nothing beyond the arm's own options: the weights of the auxiliary losses are part of the block."""


class MohgeTraining(Trainable):
    """The training half of `methods.mohge`."""

    Objective = MohgeObjective

    #: What the other half has: layer → its experts, the block of an arm, and whether ranks share the experts.
    blocks: dict[int, Any]
    design: Design
    member: Any

    @classmethod
    def step_words(cls, line: Mapping[str, Any]) -> str:
        return f"routed width {line['width']:.0f}  busiest {line['busiest']:.2f} × mean"

    @classmethod
    def held_out_words(cls, found: Mapping[str, Any]) -> str:
        shares = [found[name] for name in sorted(found, key=_group) if _group(name) >= 0]
        return (
            f"loss {found['routed']:.3f}; a token takes a routed width of {found['width']:.0f} a layer, groups "
            f"in order {' / '.join(f'{share:.0%}' for share in shares)}, busiest expert {found['busiest']:.2f} × mean"
        )

    @classmethod
    def before_words(cls, found: Mapping[str, Any]) -> str:
        return f"before training {found['routed']:.3f}"

    @abstractmethod
    def balancing(self) -> AbstractContextManager[list[Balance]]:
        """While open, a forward appends α_G·L_G and α_E·L_E of each of its layers."""

    @abstractmethod
    def weights(self) -> dict[str, nn.Parameter]:
        """Routers, experts and shared experts by name."""

    def prepare(self, gradient_checkpointing: bool) -> None:
        super().prepare(gradient_checkpointing)
        if self.member is not None:
            raise InputError("training runs in one process, which has every expert; this one is one of several ranks")
        for parameter in self.trainables().values():
            parameter.data = parameter.data.float()

    def trainables(self) -> dict[str, nn.Parameter]:
        found = self.weights()
        if self.config.backbone == "trained":
            found |= {
                f"backbone.{name}": tensor for name, tensor in backbone_weights(self.decoder, self.blocks).items()
            }
        return found

    def losses(
        self, ids_BT: Tensor, mask_BT: Tensor, objective: Any, *, tokens: int, sequences: int, ramp: float = 1.0
    ) -> Losses:
        rows_N = predicting(mask_BT)
        deciders = int(rows_N.sum())
        routers = [block.router for block in self.blocks.values()]
        with self.balancing() as balances, routings(routers) as decided:
            logits_BTV = self.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        nll = token_nll(logits_BTV, ids_BT, mask_BT).sum()
        auxiliary = torch.stack([found.group + found.expert for found in balances]).sum()
        with torch.no_grad():
            sums = figures(decided, self.design.rule, self.design.widths, rows_N)
            sums["loss_group"] = torch.stack([found.group for found in balances]).sum() * deciders
            sums["loss_expert"] = torch.stack([found.expert for found in balances]).sum() * deciders
        return Losses(
            total=nll / tokens + auxiliary * deciders / tokens,
            nll=nll.detach(),
            penalty=auxiliary.detach() * deciders,
            ran_L=torch.full((len(self.blocks),), deciders, device=ids_BT.device),
            deciders=deciders,
            sums=sums,
        )


def _group(name: str) -> int:
    """The group whose share the figure of that name is; −1 where it is no share."""
    head, _, number = name.partition("_")
    return int(number) if head == "group" and number.isdigit() else -1


def backbone_weights(dec: Decoder, without_ffn: Container[int]) -> dict[str, nn.Parameter]:
    """Parameters of the model itself that have a part in what it computes, each once, by their names in its tree.

    Args:
        dec: the decoder.
        without_ffn: layers whose dense half experts stand in for.
    """
    unused = {
        id(tensor)
        for layer, block in enumerate(dec.blocks)
        if layer in without_ffn
        for tensor in cast(nn.Module, block.mlp).parameters()
    }
    return {
        name: tensor
        for name, tensor in dec.model.named_parameters()
        if f".{ADDED}." not in name and id(tensor) not in unused
    }


@contextmanager
def routings(routers: Sequence[nn.Module]) -> Iterator[list[Routing]]:
    """While open, what each router decides is appended, in the order they run."""
    found: list[Routing] = []
    hooks = [router.register_forward_hook(lambda module, args, out: found.append(out)) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def figures(of_layers: Sequence[Routing], rule: Rule, widths_E: Sequence[int], counts_N: Tensor) -> dict[str, Tensor]:
    """Where tokens went, summed over those that count.

    Args:
        of_layers: L routings of the same N rows.
        rule: what they were decided by.
        widths_E: the experts' widths.
        counts_N: False at rows that count for nothing.

    Returns:
        `width`, the width a token takes of routed experts in a layer; `group_0` …, the share of a token's choices that
        is in each group; `busiest`, tokens times the load of a layer's busiest expert ÷ the mean load.
    """
    width_E = torch.tensor(widths_E, device=counts_N.device, dtype=torch.float32)
    width = width_E.new_zeros(())
    share_G, busiest = width_E.new_zeros(rule.groups), width_E.new_zeros(())
    for routing in of_layers:
        choice_nK = routing.choice_NK[counts_N]
        taken_nK = choice_nK >= 0
        chosen_nK = choice_nK.clamp(min=0)
        width += (width_E[chosen_nK] * taken_nK).sum()
        part_nK = taken_nK / taken_nK.sum(-1, keepdim=True)
        share_G.index_add_(0, (chosen_nK // rule.per_group).flatten(), part_nK.flatten())
        load_E = torch.zeros_like(width_E).index_add_(0, chosen_nK.flatten(), taken_nK.flatten().float())
        busiest += load_E.max() / load_E.mean() * len(choice_nK)
    layers = len(of_layers)
    of_groups = {f"group_{g}": share / layers for g, share in enumerate(share_G)}
    return {"width": width / layers, **of_groups, "busiest": busiest / layers}


def predicting(mask_BT: Tensor) -> Tensor:
    """`[B·T]`, True at rows from which a real token is predicted: as many as `likelihood.predicted` counts."""
    following_BT = torch.zeros_like(mask_BT, dtype=torch.bool)
    following_BT[:, :-1] = mask_BT[:, :-1].bool() & mask_BT[:, 1:].bool()
    return following_BT.flatten()


def save_backbone(dec: Decoder, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """Write the model itself as a Hugging Face folder, without what a method added.

    Args:
        dec: its decoder; tensors are rounded to `dtype` in place, so that the tree and the folder are one model.
        folder: new, or to be written over.
        dtype: what numbers are stored as.
        source: the folder the model came from, whose tokenizer goes along; None or another name where there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in dec.model.named_parameters():  # a tied head comes once, as the embedding
            if f".{ADDED}." not in name:
                stored[name] = tensor.detach().to("cpu", dtype).contiguous().clone()
                tensor.copy_(stored[name])
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = dec.model.config
    config.save_pretrained(folder)
    for path in sorted(Path(source).glob("tokenizer*")) if source is not None and Path(source).is_dir() else ():
        shutil.copyfile(path, folder / path.name)
