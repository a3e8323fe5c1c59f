"""Where the tokens of trained MoHGE models go: by domain and token frequency, and how evenly experts and ranks load.

For the trainings of `mohge-small` with no auxiliary loss, with L_E alone, and with both (its recipe says how), each on
the text that it held out, whose items are the same for one seed. Claims:

1. with L_G a token takes less width of routed experts than without it, in every domain: traffic is on narrow groups;
2. with L_E ranks are more even than without any loss where each holds as many experts of every group (`all_size`, on
   ranks that divide the experts of a group): the median over (batch, layer) of max ÷ mean of weighted FLOPs.

Two ranks and four are printed, each with `all_size` and with neighbouring groups on a rank (`contiguous`), batch by
batch and with the whole held-out text as one batch. L_E compares experts of one group, so where ranks do not divide
those, or hold other groups, nothing is claimed of it. What it looks at is printed too: max ÷ mean of a group's tokens,
groups weighted by theirs.

Usage, with the folders that were trained:

    python benchmarks/router_shares.py --none runs/mohge-none --expert runs/mohge-expert --both runs/mohge-both

Exit code 1 if a claim does not hold; without folders there is nothing to judge.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace
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
RANKS, BATCH = (2, 4), 16
PLACEMENTS = ("contiguous", "all_size")
#: Token ids by their frequency in the training text: the most frequent so many, the next, and all others.
FREQUENCY = (("32 most frequent", 32), ("next 224", 256), ("all others", 1 << 31))


@dataclass(frozen=True)
class Seen:
    """One training's decisions on held-out text; a row a (token, layer).

    `group_R`: mean share of the row's choices in each group, `[rows, G]`; `width_R`: width taken; `domain_R`, and
    `rank_R` of the token by frequency; `tokens_BLE`: tokens of each expert by batch and layer, of which the rest is
    made: max ÷ mean of each (batch, layer).
    """

    widths: list[int]
    group_R: NDArray[np.float64]
    width_R: NDArray[np.float64]
    domain_R: NDArray[np.str_]
    rank_R: NDArray[np.int64]
    tokens_BLE: NDArray[np.int64]

    @property
    def whole(self) -> Seen:
        """The same with all of the text as one batch."""
        return replace(self, tokens_BLE=self.tokens_BLE.sum(0, keepdims=True))

    @property
    def per_group(self) -> int:
        """Experts of a group."""
        return int(self.tokens_BLE.shape[-1]) // len(self.widths)

    def inside(self) -> NDArray[np.float64]:
        """Tokens inside a group, groups weighted by theirs: `[batches, layers]`."""
        of_group = self.tokens_BLE.reshape(*self.tokens_BLE.shape[:2], len(self.widths), -1)
        # Of a group, max ÷ mean times its tokens is max times its number of experts.
        found: NDArray[np.float64] = of_group.max(-1).sum(-1) * self.per_group / self.tokens_BLE.sum(-1)
        return found

    def imbalance(self, placement: str, ranks: int) -> NDArray[np.float64]:
        """Weighted FLOPs of ranks: `[batches, layers]`."""
        loads = BY_SHAPE[placement](self.widths, self.per_group, ranks).loads(self.tokens_BLE)
        found: NDArray[np.float64] = loads.max(-1) / loads.mean(-1)
        return found


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
    groups, taken, domains, ranks, counted_BLE = [], [], [], [], []
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
            counted_BLE.append(
                [np.bincount(found_n.choice_NK[real_N].flatten(), minlength=len(widths)) for found_n in found]
            )
    return Seen(
        each, np.concatenate(groups), np.concatenate(taken), np.array(domains), np.array(ranks), np.array(counted_BLE)
    )


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
    print(f"  {'max ÷ mean':28}{'median':>8}{'P95':>8}{'whole text':>12}")
    for ranks in RANKS:
        for placement in PLACEMENTS:
            evenness(f"{ranks} ranks, {placement}", *(of.imbalance(placement, ranks) for of in (seen, seen.whole)))
    evenness("inside a group", seen.inside(), seen.whole.inside())


def evenness(label: str, of_batches: NDArray[np.float64], of_whole: NDArray[np.float64]) -> None:
    """A line: over batches and layers, and the mean over layers with the whole text as one batch."""
    middle, high = np.percentile(of_batches, [50, 95])
    print(f"  {label:28}{middle:>8.2f}{high:>8.2f}{of_whole.mean():>12.2f}")


def claims(found: dict[str, Seen]) -> list[Claim]:
    """What is claimed, where the trainings that it takes are there."""
    made = []
    if {"none", "both"} <= found.keys():
        for domain in np.unique(found["both"].domain_R):
            width = {name: seen.width_R[seen.domain_R == domain].mean() for name, seen in found.items()}
            made.append(Claim(f"width with L_G ÷ without any loss, {domain}", width["both"] / width["none"], 1.0))
    if {"none", "expert"} <= found.keys():
        for ranks in (ranks for ranks in RANKS if found["none"].per_group % ranks == 0):
            ratio = {name: float(np.median(seen.imbalance("all_size", ranks))) for name, seen in found.items()}
            what = f"imbalance with L_E ÷ without any loss, {ranks} ranks, all_size"
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
