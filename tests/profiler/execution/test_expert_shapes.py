"""Published sizes, and widths made for a backbone's own FFN."""

from __future__ import annotations

import pytest

from profiler.execution.expert_shapes import GROUPS, KEEP_EXPERTS, SIZES, check_widths, ramp, widths_of_experts


@pytest.mark.parametrize(
    ("size", "pair", "least", "even", "most", "standard"),
    [
        ("1B", 1152, 1664, 3456, 5248, 4992),
        ("3B", 1664, 2304, 4992, 7680, 6144),
        ("14B", 2176, 3840, 6528, 9216, 7680),
        ("A3B", 1664, 2304, 4992, 7680, 6144),
    ],
)
def test_active_widths_of_the_published_sizes(
    size: str, pair: int, least: int, even: int, most: int, standard: int
) -> None:
    """METHODS: of six experts a token, the narrowest, the mean, and the widest; and the standard MoE's."""
    of = SIZES[size]
    widths = sorted(widths_of_experts(of.widths, GROUPS, of.per_group))
    assert {a + b for a, b in zip(of.widths, reversed(of.widths), strict=True)} == {pair}
    assert (sum(widths[:KEEP_EXPERTS]), sum(widths[-KEEP_EXPERTS:])) == (least, most)
    assert KEEP_EXPERTS * sum(widths) == even * len(widths)
    assert KEEP_EXPERTS * of.standard == standard
    # The extremes are in reach of K_g groups.
    assert of.keep_groups * of.per_group >= KEEP_EXPERTS


def test_widths_are_one_for_all_one_a_group_or_one_an_expert() -> None:
    assert widths_of_experts([5], 2, 3) == (5,) * 6
    assert widths_of_experts([5, 7], 2, 3) == (5, 5, 5, 7, 7, 7)
    assert widths_of_experts([1, 2, 3], 1, 3) == (1, 2, 3)
    assert widths_of_experts([4, 6], 2, 1) == (4, 6)


@pytest.mark.parametrize("widths", [[4, 6, 8], [4, 5, 7, 8], [4, 8], [6]])
def test_symmetric_widths_are_accepted(widths: list[int]) -> None:
    check_widths(widths, len(widths), 2, symmetric=True)


def test_widths_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="4 \\+ 9 = 13 while 6 \\+ 8 = 14"):
        check_widths([4, 6, 8, 9], 4, 2, symmetric=True)
    with pytest.raises(ValueError, match="4 \\+ 8 = 12 while 7 \\+ 7 = 14"):  # the middle one of an odd number
        check_widths([4, 7, 8], 3, 2, symmetric=True)
    check_widths([4, 6, 8, 9], 4, 2, symmetric=False)
    with pytest.raises(ValueError, match="one for all, or one a group \\(4\\); 8 are given"):
        check_widths([4] * 8, 4, 2, symmetric=False)
    with pytest.raises(ValueError, match="one a group \\(1\\), or one an expert \\(6\\); 3 are given"):
        check_widths([4] * 3, 1, 6, symmetric=False)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("mean", [1, 6, 63, 64, 192, 1000])
def test_a_ramp_is_symmetric_and_from_half_to_one_and_a_half(groups: int, mean: int) -> None:
    widths = ramp(mean, groups)
    middle = mean if mean < 64 else mean // 8 * 8
    assert len(widths) == groups
    assert widths == sorted(widths)
    assert {a + b for a, b in zip(widths, reversed(widths), strict=True)} == {2 * middle}
    assert all(width >= 1 for width in widths)
    if groups > 1:
        assert abs(widths[0] - mean / 2) <= (1 if mean < 64 else 16)
    if mean >= 64:
        assert not any(width % 8 for width in widths)


def test_a_ramp_by_hand() -> None:
    assert ramp(6, 8) == [3, 4, 5, 6, 6, 7, 8, 9]
    assert ramp(192, 4) == [96, 160, 224, 288]
    assert ramp(64, 3) == [32, 64, 96]
