"""Routes forced on single tokens, the hash they are drawn by, and where each row of a step stands in its sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profiler.execution.hashing import uniform
from profiler.execution.routes import ForcedTokens
from profiler.execution.sequences import Sequences

CPU = torch.device("cpu")


def batch(rows: list[int], past: list[int], width: int, side: str, names: list[str]) -> Sequences:
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, n in enumerate(rows):
        real[i, width - n if side == "left" else 0 :][:n] = True
    return Sequences(False, width, rows, past, names, real_BT=None if bool(real.all()) else real)


def packed(rows: list[int], past: list[int], names: list[str]) -> Sequences:
    bounds = [sum(rows[:i]) for i in range(len(rows) + 1)]
    return Sequences(True, bounds[-1], rows, past, names, bounds=bounds)


def by_token(route: ForcedTokens, layers: int, sequences: Sequences) -> dict[tuple[str, int], list[bool]]:
    """(request, position) → the layers it takes."""
    open_LN = route.open_rows(layers, sequences, CPU)
    real = [True] * open_LN.shape[1] if sequences.real_BT is None else sequences.real_BT.flatten().tolist()
    keys = [(name, p) for i, name in enumerate(sequences.requests) for p in sequences.positions(i)]
    return dict(zip(keys, open_LN.T[torch.tensor(real)].tolist(), strict=True))


@pytest.mark.parametrize("pattern", ["random", "shared", "middle"])
def test_a_token_is_told_the_same_in_any_layout_and_company(pattern: str) -> None:
    route = ForcedTokens(ratio=0.4, seed=3, pattern=pattern)  # type: ignore[arg-type]
    whole = by_token(route, 7, batch([5, 2, 3], [0, 0, 0], 5, "left", ["a", "b", "c"]))
    assert len(whole) == 10
    assert whole == by_token(route, 7, batch([5, 2, 3], [0, 0, 0], 5, "right", ["a", "b", "c"]))
    assert whole == by_token(route, 7, packed([5, 2, 3], [0, 0, 0], ["a", "b", "c"]))
    turned = by_token(route, 7, batch([3, 5, 2], [0, 0, 0], 6, "left", ["c", "a", "b"]))
    assert whole == {key: turned[key] for key in whole}
    steps = by_token(route, 7, batch([2], [0], 2, "left", ["a"])) | by_token(route, 7, packed([3], [2], ["a"]))
    assert steps == {key: value for key, value in whole.items() if key[0] == "a"}


def test_seed_request_position_and_layer_all_matter() -> None:
    route = ForcedTokens(ratio=0.5, seed=3)
    one = by_token(route, 64, batch([2], [0], 2, "left", ["a"]))
    assert one["a", 0] != one["a", 1]
    assert one["a", 0] != by_token(route, 64, batch([2], [0], 2, "left", ["b"]))["b", 0]
    assert one["a", 0] != by_token(ForcedTokens(ratio=0.5, seed=4), 64, batch([2], [0], 2, "left", ["a"]))["a", 0]
    assert len(set(one["a", 0])) == 2


@pytest.mark.parametrize(
    ("ratio", "lowest", "highest"), [(0.0, 0, 0), (1.0, 1, 1), (0.75, 0.73, 0.77), (0.1, 0.08, 0.12)]
)
def test_the_share_that_skips_is_the_ratio(ratio: float, lowest: float, highest: float) -> None:
    sequences = batch([500, 500], [0, 0], 500, "left", ["a", "b"])
    share = float((~ForcedTokens(ratio=ratio).open_rows(10, sequences, CPU)).float().mean())
    assert lowest <= share <= highest  # 10,000 pairs: the deviation is at most 0.005


def test_shared_and_middle_tell_all_tokens_the_same_layers() -> None:
    sequences = batch([3, 3], [0, 0], 3, "left", ["a", "b"])
    for pattern in ("shared", "middle"):
        open_LN = ForcedTokens(ratio=0.3, pattern=pattern).open_rows(10, sequences, CPU)  # type: ignore[arg-type]
        assert open_LN.shape == (10, 6)
        assert bool((open_LN == open_LN[:, :1]).all())
        assert int((~open_LN[:, 0]).sum()) == 3
    assert ForcedTokens(ratio=0.5, pattern="middle").open_rows(4, sequences, CPU)[:, 0].tolist() == [
        True,
        False,
        False,
        True,
    ]


def test_labels() -> None:
    assert ForcedTokens(ratio=0.75).label() == "forced: 75% of (token, layer) pairs skip, pattern random, seed 0"
    assert ForcedTokens(ratio=0.5, pattern="shared").label() == "forced: 50% of layers skip, pattern shared, seed 0"


# -- the hash ----------------------------------------------------------------------------------------


def splitmix(keys: list[int]) -> float:
    """The same number with Python's own whole numbers."""
    mask, state = 2**64 - 1, 0
    for key in keys:
        x = ((state ^ (key & mask)) + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        state = x ^ (x >> 31)
    return (state >> 11) / 2**53


@pytest.mark.parametrize("keys", [[0], [1, 2, 3], [-5, 2**40, 7], [2**32 - 1, 0, 0]])
def test_the_hash_is_splitmix64(keys: list[int]) -> None:
    assert float(uniform(*map(torch.tensor, keys))) == splitmix(keys)
    assert float(uniform(*keys[:-1], torch.tensor(keys[-1]))) == splitmix(keys)


def test_the_hash_is_uniform_and_its_keys_do_not_mix() -> None:
    found = uniform(1, torch.arange(300)[:, None], torch.arange(300))
    assert found.shape == (300, 300)
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    counts = torch.histc(found, bins=20, min=0, max=1)
    chi = float(((counts - 4500) ** 2 / 4500).sum())
    assert chi < 43.8  # 99.9 % point of χ² with 19 degrees of freedom
    assert abs(correlation(found[:, :-1], found[:, 1:])) < 0.02
    assert abs(correlation(found, found.T)) < 0.02


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


# -- rows --------------------------------------------------------------------------------------------


def test_owner_and_position_of_every_row() -> None:
    left = batch([2, 3], [4, 0], 3, "left", ["a", "b"])
    assert left.row_owners(CPU).tolist() == [0, 0, 0, 1, 1, 1]
    assert left.row_positions(CPU).tolist()[1:] == [4, 5, 0, 1, 2]  # the pad's own is anything
    right = batch([2, 3], [4, 0], 3, "right", ["a", "b"])
    assert right.row_positions(CPU)[[0, 1, 3, 4, 5]].tolist() == [4, 5, 0, 1, 2]
    assert batch([2, 2], [7, 1], 2, "left", ["a", "b"]).row_positions(CPU).tolist() == [7, 8, 1, 2]
    row = packed([1, 3, 2], [5, 0, 2], ["a", "b", "c"])
    assert row.row_owners(CPU).tolist() == [0, 1, 1, 1, 2, 2]
    assert row.row_positions(CPU).tolist() == [5, 0, 1, 2, 2, 3]
