"""Choices that must never change: they decide which text a recipe trains on."""

from __future__ import annotations

from collections import Counter

from workloads.draw import Draw


def test_the_stream_is_fixed_by_its_name() -> None:
    draw = Draw("a")
    # `printf a/0 | sha256sum` and a/1: the first eight bytes, reduced.
    assert [draw.below(1000), draw.below(1000)] == [0xD7E98967056F4828 % 1000, 0x773232ABE9343F0E % 1000]
    assert [Draw("a").below(10**9) for _ in range(2)] == [Draw("a").below(10**9)] * 2
    assert Draw("a").below(10**9) != Draw("b").below(10**9)


def test_choices_cover_their_range_evenly() -> None:
    draw = Draw("even")
    counts = Counter(draw.between(3, 7) for _ in range(5000))
    assert set(counts) == {3, 4, 5, 6, 7}
    assert all(850 < count < 1150 for count in counts.values())  # five standard deviations around 1,000
    assert {draw.pick("xyz") for _ in range(50)} == {"x", "y", "z"}
    assert 310 < sum(draw.chance(20) for _ in range(2000)) < 490  # five standard deviations around 400


def test_shuffling_keeps_every_item() -> None:
    draw = Draw("cards")
    orders = {tuple(draw.shuffled((1, 2, 3))) for _ in range(200)}
    assert len(orders) == 6
    assert all(sorted(order) == [1, 2, 3] for order in orders)
