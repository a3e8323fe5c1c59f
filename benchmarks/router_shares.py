"""Where the tokens of trained MoHGE models go: by domain and token frequency, and how evenly experts and ranks load.

For the trainings of `mohge-small` with no auxiliary loss, with L_E alone, and with both (its recipe says how), each on
the text that it held out, whose items are the same for one seed. Claims:

1. with L_G a token takes less width of routed experts than without it, in every domain: traffic is on narrow groups;
2. with L_E four ranks are more even than without any loss: the median over (batch, layer) of max ÷ mean of weighted
   FLOPs, every rank holding as many experts of neighbouring groups (`contiguous`) or some of every size (`all_size`).

What L_E looks at, experts inside their group, is printed beside it: max ÷ mean of a group's tokens, groups weighted by
theirs.

Usage, with the folders that were trained:

    python benchmarks/router_shares.py --none runs/mohge-none --expert runs/mohge-expert --both runs/mohge-both

Exit code 1 if a claim does not hold; without folders there is nothing to judge.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from claims import Claim, exit_code
from numpy.typing import NDArray

from profiler import methods, models, training_data
from profiler.arms import tree
from profiler.execution.mohge_training import routings
from profiler.execution.placement import BY_SHAPE
from profiler.methods.mohge import BACKBONE, Mohge
from profiler.train import CHECKPOINT, RECIPE_FILE
from workloads import recipe as recipes

TRAININGS = ("none", "expert", "both")
RANKS, BATCH = 4, 16
#: Token ids by their frequency in the training text: the most frequent so many, the next, and all others.
FREQUENCY = (("32 most frequent", 32), ("next 224", 256), ("all others", 1 << 31))


@dataclass(frozen=True)
class Seen:
    """One training's decisions on held-out text; a row a (token, layer).

    `group_R`: mean share of the row's choices in each group, `[rows, G]`; `width_R`: width taken; `domain_R`, and
    `rank_R` of the token by frequency; `imbalance`: placement → max ÷ mean of weighted FLOPs of each (batch, layer);
    `inside`: of each, max ÷ mean of tokens inside a group, groups weighted by their tokens.
    """

    widths: list[int]
    group_R: NDArray[np.float64]
    width_R: NDArray[np.float64]
    domain_R: NDArray[np.str_]
    rank_R: NDArray[np.int64]
    imbalance: dict[str, NDArray[np.float64]]
    inside: NDArray[np.float64]


def see(folder: Path) -> Seen:
    """Run the held-out items of a training through what it trained."""
    recipe = recipes.load(folder / RECIPE_FILE)
    loaded = models.load(str(folder / CHECKPOINT / BACKBONE), device="cpu")
    options = {**recipe.method.options, "checkpoint": str(folder / CHECKPOINT)}
    handle = cast(Mohge, tree(loaded.model, "mohge", methods.configure("mohge", options)))
    assert loaded.tokenizer is not None
    items = training_data.items(recipe.data, loaded.tokenizer, recipe.training.length)
    split = training_data.split(items, recipe.data.held_out, recipe.training.seed)
    counted = Counter(token for item in split.training for token in item.ids)
    rank_of = {token: place for place, (token, _) in enumerate(counted.most_common())}
    rule, widths = handle.design.rule, np.array(handle.design.widths)
    each = [int(width) for width in widths[:: rule.per_group]]
    placed = {name: BY_SHAPE[name](each, rule.per_group, RANKS) for name in ("contiguous", "all_size")}
    rank_E = {name: np.array([ranks[0] for ranks in place.where]) for name, place in placed.items()}
    groups, taken, domains, ranks, inside = [], [], [], [], []
    uneven: dict[str, list[float]] = {name: [] for name in placed}
    for domain, members in split.held_out.items():
        for start in range(0, len(members), BATCH):
            ids_BT, mask_BT = training_data.pad(members[start : start + BATCH], handle.model.device)
            with torch.no_grad(), routings([block.router for block in handle.blocks.values()]) as found:
                handle.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
            real_N = mask_BT.flatten()
            of_tokens = [rank_of.get(token, len(rank_of)) for token in ids_BT.flatten()[real_N].tolist()]
            for routing in found:
                choice_nK = routing.choice_NK[real_N].numpy()
                shares = np.zeros((len(choice_nK), rule.groups))
                np.add.at(shares, (np.arange(len(choice_nK))[:, None], choice_nK // rule.per_group), 1)
                groups.append(shares / choice_nK.shape[1])
                taken.append(widths[choice_nK].sum(1))
                domains += [domain] * len(choice_nK)
                ranks += of_tokens
                count_E = np.bincount(choice_nK.flatten(), minlength=len(widths))
                work_E = count_E * widths
                # Of a group, max ÷ mean times its tokens is max times its number of experts.
                inside.append(count_E.reshape(rule.groups, -1).max(1).sum() * rule.per_group / count_E.sum())
                for name, of_expert in rank_E.items():
                    work = np.bincount(of_expert, weights=work_E, minlength=RANKS)
                    uneven[name].append(float(work.max() / work.mean()))
    return Seen(
        each, np.concatenate(groups), np.concatenate(taken), np.array(domains), np.array(ranks),
        {name: np.array(ratios) for name, ratios in uneven.items()}, np.array(inside),
    )  # fmt: skip


def show(name: str, seen: Seen) -> None:
    """A line a domain and a line a band of frequency, and how even ranks are."""
    print(f"\n{name}: share of choices in each group, %, by width; mean width a token takes in a layer")
    print(f"  {'':18}" + "".join(f"{width:>7}" for width in seen.widths) + f"{'width':>9}{'rows':>9}")
    bounds = [0, *(last for _, last in FREQUENCY)]
    bands = [
        (label, (seen.rank_R >= first) & (seen.rank_R < last))
        for (label, last), first in zip(FREQUENCY, bounds, strict=False)
    ]
    domains = [(str(domain), seen.domain_R == domain) for domain in np.unique(seen.domain_R)]
    for label, rows in [("all", seen.rank_R >= 0), *domains, *bands]:
        parts = "".join(f"{share:>7.1%}" for share in seen.group_R[rows].mean(0))
        print(f"  {label:18}{parts}{seen.width_R[rows].mean():>9.0f}{rows.sum():>9,}")
    for placement, ratios in seen.imbalance.items():
        middle, high = np.percentile(ratios, [50, 95])
        print(f"  max ÷ mean over {RANKS} ranks, {placement}: median {middle:.2f}, P95 {high:.2f}")
    middle, high = np.percentile(seen.inside, [50, 95])
    print(f"  max ÷ mean inside a group: median {middle:.2f}, P95 {high:.2f}")


def claims(found: dict[str, Seen]) -> list[Claim]:
    """What is claimed, where the trainings that it takes are there."""
    made = []
    if {"none", "both"} <= found.keys():
        for domain in np.unique(found["both"].domain_R):
            width = {name: seen.width_R[seen.domain_R == domain].mean() for name, seen in found.items()}
            made.append(Claim(f"width with L_G ÷ without any loss, {domain}", width["both"] / width["none"], 1.0))
    if {"none", "expert"} <= found.keys():
        for placement in found["none"].imbalance:
            ratio = {name: float(np.median(seen.imbalance[placement])) for name, seen in found.items()}
            what = f"imbalance with L_E ÷ without any loss, {placement}"
            made.append(Claim(what, ratio["expert"] / ratio["none"], 1.0))
    return made


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in TRAININGS:
        options.add_argument(f"--{name}", type=Path, help=f"folder of the training with {name} of the losses")
    given = {name: folder for name, folder in vars(options.parse_args()).items() if folder is not None}
    if not given:
        print("no folder of a training was given, so there is nothing to judge")
        return 0
    found = {name: see(folder) for name, folder in given.items()}
    for name, seen in found.items():
        show(name, seen)
    made = claims(found)
    print()
    print(*made, sep="\n")
    return exit_code(made)


if __name__ == "__main__":
    raise SystemExit(main())
