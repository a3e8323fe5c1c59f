"""Perplexities, their ratios and the comparison with baselines, by hand and by scipy's bootstrap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from analysis import baselines
from analysis.quality import ALIKE, BETTER, PERPLEXITY_COLUMNS, UNDECIDED, WORSE, item_nll, perplexity, perplexity_ratio
from tests.analysis.decisions_run import Arm, Input, write_decisions

DENSE_NLL = [10, 12, 9, 30, 11, 28, 10, 26, 12, 14.0]
TOKENS = [10, 10, 10, 20, 10, 20, 10, 20, 10, 10]
#: The routed arm is a tenth of a nat a token worse, give or take.
ROUTED_NLL = [n + t * (0.1 + 0.01 * (k % 3 - 1)) for k, (n, t) in enumerate(zip(DENSE_NLL, TOKENS, strict=True))]
#: Two blocks of six for everything, and two that change with the input.
CUT, ROUTED = ["110011"] * 10, ["110011"] * 5 + ["100111"] * 5


def inputs(**more: list[float]) -> list[Input]:
    nll = {"dense": DENSE_NLL, "routed": ROUTED_NLL, **more}
    return [
        Input(
            f"i{k}", "math" if k < 4 else "code", scored=TOKENS[k], nll={arm: values[k] for arm, values in nll.items()}
        )
        for k in range(10)
    ]


def test_perplexity_by_hand(tmp_path: Path) -> None:
    frame = perplexity(write_decisions(tmp_path / "run", inputs(), [Arm("routed", ROUTED)]))
    assert list(frame.columns) == list(PERPLEXITY_COLUMNS)
    table = frame.set_index(["domain", "arm"])
    assert list(table.index) == [(d, a) for d in ("all", "math", "code") for a in ("dense", "routed")]
    assert table.loc[("all", "dense"), "perplexity"] == pytest.approx(math.exp(162 / 130))
    assert table.loc[("math", "dense"), "perplexity"] == pytest.approx(math.exp(61 / 50))
    assert table["tokens"].tolist() == [130, 130, 50, 50, 80, 80]
    assert table["items"].tolist() == [10, 10, 4, 4, 6, 6]
    gap = [r - d for r, d in zip(ROUTED_NLL, DENSE_NLL, strict=True)]
    assert table.loc[("all", "routed"), "against_twin"] == pytest.approx(math.exp(sum(gap) / 130))
    assert table.loc[("math", "routed"), "against_twin"] == pytest.approx(math.exp(sum(gap[:4]) / 50))
    assert np.isnan(table.loc[("all", "dense"), "against_twin"])
    assert table.loc[("all", "routed"), "verdict"] == WORSE
    assert table.loc[("math", "routed"), "verdict"] == UNDECIDED  # four items
    assert np.isnan(table.loc[("math", "routed"), "low"])
    assert set(frame["mode"]) == {"gated on prefix"}


def test_intervals_are_a_bootstrap_over_items_and_a_paired_one_is_far_narrower(tmp_path: Path) -> None:
    frame = perplexity(write_decisions(tmp_path / "run", inputs(), [Arm("routed", ROUTED)])).set_index(
        ["domain", "arm"]
    )
    row = frame.loc[("all", "routed")]
    nll, tokens, dense = (np.array(v, float) for v in (ROUTED_NLL, TOKENS, DENSE_NLL))

    def of(statistic: object, *data: np.ndarray) -> list[float]:
        found = stats.bootstrap(
            data, statistic, paired=True, method="percentile", n_resamples=9999, rng=np.random.default_rng(5)
        )
        return [*found.confidence_interval]

    alone = of(lambda n, t, axis: np.exp(n.sum(axis) / t.sum(axis)), nll, tokens)
    assert [row["low"], row["high"]] == pytest.approx(alone, rel=0.02)
    ratio = of(lambda n, d, t, axis: np.exp((n - d).sum(axis) / t.sum(axis)), nll, dense, tokens)
    assert [row["against_twin_low"], row["against_twin_high"]] == pytest.approx(ratio, rel=0.001)
    assert ratio[1] - ratio[0] < (alone[1] - alone[0]) / 50


def test_ratios_between_any_two_arms_over_shared_items(tmp_path: Path) -> None:
    given = inputs(cut=[n + 0.5 * t for n, t in zip(DENSE_NLL, TOKENS, strict=True)])
    given[0] = Input("i0", scored=10, nll={"dense": 10.0, "cut": 15.0})  # routed did not score it
    run = write_decisions(tmp_path / "run", given, [Arm("routed", ROUTED), Arm("cut", CUT)])
    same = perplexity_ratio(run, "cut", "dense")
    assert same is not None
    assert (same.value, same.low, same.high) == pytest.approx((math.exp(0.5),) * 3)
    shared = perplexity_ratio(run, "routed", "cut")
    assert shared is not None
    assert shared.n == 9
    assert perplexity_ratio(run, "routed", "nobody") is None
    assert item_nll(run, "dense").to_dict() == pytest.approx(
        {f"i{k}": n / t for k, (n, t) in enumerate(zip(DENSE_NLL, TOKENS, strict=True))}
    )


def test_rounding_is_no_difference_of_quality(tmp_path: Path) -> None:
    run = write_decisions(tmp_path / "run", inputs(open=[n - 1e-4 for n in DENSE_NLL]), [Arm("open", ["1"] * 10)])
    frame = perplexity(run).set_index(["domain", "arm"])
    assert frame.loc[("all", "open"), "against_twin_high"] < 1
    assert frame.loc[("all", "open"), "verdict"] == ALIKE


def test_what_was_not_measured_is_empty(tmp_path: Path) -> None:
    run = write_decisions(tmp_path / "run", [Input("i0")], [Arm("routed", ["11"])])
    assert perplexity(run).empty
    assert list(perplexity(run).columns) == list(PERPLEXITY_COLUMNS)
    assert item_nll(run, "dense").empty


# -- baselines --------------------------------------------------------------------------------------------------------


def test_arms_at_the_same_rate_are_compared_both_ways(tmp_path: Path) -> None:
    given = inputs(cut=[n + 0.3 * t for n, t in zip(DENSE_NLL, TOKENS, strict=True)])
    run = write_decisions(tmp_path / "run", given, [Arm("routed", ROUTED, untrained=True), Arm("cut", CUT)])
    frame = baselines.pairs(run)
    assert list(frame.columns) == list(baselines.PAIR_COLUMNS)
    first, second = frame.to_dict("records")
    assert (first["arm"], first["other"], second["arm"], second["other"]) == ("routed", "cut", "cut", "routed")
    assert (first["layers_skipped"], first["other_layers_skipped"]) == (2.0, 2.0)
    assert (first["patterns"], first["other_patterns"]) == (2, 1)
    assert (first["gap_layers"], first["like_rates"], first["verdict"], second["verdict"]) == (0.0, True, BETTER, WORSE)
    assert first["perplexity_ratio"] == pytest.approx(1 / second["perplexity_ratio"])
    assert first["note"] == "routed: untrained router"
    (said,) = baselines.sentences(run)
    ratio = math.exp(sum(r - d - 0.3 * t for r, d, t in zip(ROUTED_NLL, DENSE_NLL, TOKENS, strict=True)) / 130)
    assert said.startswith(f"routed is better than cut: perplexity × {ratio:.3f} [")
    assert said.endswith("] over 10 items, 2.0 against 2.0 layers skipped.")


def test_rates_more_than_a_layer_apart_are_marked(tmp_path: Path) -> None:
    deeper = ["000011"] * 10
    given = inputs(deep=[n + 2 * t for n, t in zip(DENSE_NLL, TOKENS, strict=True)])
    arms = [Arm("routed", ROUTED), Arm("deep", deeper, synthetic="forced: 67 % of layers skip")]
    run = write_decisions(tmp_path / "run", given, arms)
    first, second = baselines.pairs(run).to_dict("records")
    assert (first["gap_layers"], first["like_rates"], second["gap_layers"]) == (-2.0, False, 2.0)
    assert first["note"] == "not at the same rate: routed skips 2.0 layers fewer; deep: synthetic route"
    (said,) = baselines.sentences(run)
    assert said.endswith(
        "2.0 against 4.0 layers skipped. The rates differ by more than one layer, so this is no fair comparison."
    )
    just = [Arm("a", ["0111"] * 10), Arm("b", ["0011"] * 10)]
    assert baselines.pairs(write_decisions(tmp_path / "just", inputs(), just))["like_rates"].tolist() == [True, True]


@pytest.mark.parametrize(
    ("routes", "count", "ratio", "advice"),
    [
        # 2 of 6 layers each, and 1.7 of 6: both are matched by two whole layers.
        (["110011"] * 10, 2, 0.3333, "A count of 2, or a ratio of 0.3333, skips as many as routed: 2 of 6."),
        (["110011"] * 7 + ["110111"] * 3, 2, 0.3333, "A count of 2, or a ratio of 0.3333, skips as many as routed"),
        (
            ["110111"] * 4 + ["111111"] * 6,
            0,
            0.0,
            "routed skips less than half a layer, which nothing that skips whole",
        ),
    ],
)
def test_what_would_bring_a_baseline_to_the_router_s_rate_is_said(
    tmp_path: Path, routes: list[str], count: int, ratio: float, advice: str
) -> None:
    given = inputs(deep=[n + 2 * t for n, t in zip(DENSE_NLL, TOKENS, strict=True)])
    logits = [[0.0] * 6] * 10
    arms = [
        Arm("routed", routes, starts=[0.0] * 6, logits=logits),
        Arm("deep", ["000001"] * 10, synthetic="forced: 83 % of layers skip"),
    ]
    run = write_decisions(tmp_path / "run", given, arms)
    (match,) = baselines.matches(run).to_dict("records")
    assert (match["arm"], match["layers"], match["count"], match["ratio"]) == ("routed", 6, count, ratio)
    (said,) = baselines.sentences(run)
    assert f"so this is no fair comparison. {advice}" in said


def test_an_arm_that_skips_nothing_is_what_skipping_is_measured_by(tmp_path: Path) -> None:
    given = inputs(lora=[n - 0.1 * t for n, t in zip(DENSE_NLL, TOKENS, strict=True)])
    routed = Arm("routed", ROUTED, starts=[0.0] * 6, logits=[[0.0] * 6] * 10)
    lora = Arm("lora", ["111111"] * 10, synthetic="forced: every gate open")
    (said,) = baselines.sentences(write_decisions(tmp_path / "run", given, [routed, lora]))
    assert said.endswith(
        "2.0 against 0.0 layers skipped. lora skips nothing here, so this is what skipping does to quality."
    )


def test_pairs_without_scores_or_with_few_items_say_so(tmp_path: Path) -> None:
    arms = [Arm("a", ["01"] * 3), Arm("b", ["10"] * 3)]
    unscored = write_decisions(tmp_path / "unscored", [Input(f"i{k}") for k in range(3)], arms)
    assert baselines.pairs(unscored)["verdict"].tolist() == ["not measured"] * 2
    assert baselines.sentences(unscored) == ["a against b: 1.0 against 1.0 layers skipped, quality not measured."]
    few = write_decisions(tmp_path / "few", [Input(f"i{k}", nll={"a": 10, "b": 11}) for k in range(3)], arms)
    assert baselines.sentences(few) == [
        "a is on too few items to tell from b: perplexity × 0.905 over 3 items, 1.0 against 1.0 layers skipped."
    ]
    assert baselines.pairs(write_decisions(tmp_path / "none", [Input("i")], [Arm("a")])).empty
