"""The ladder's figures, worked out by hand in the comments, and what it says where there is no figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import charts
from analysis.ladder import COLUMNS, HEADLINE, RUNGS, VARIANTS, ladder
from analysis.ladder_tables import BREAK_EVEN_COLUMNS, WIDE_COLUMNS, break_even, ladder_wide
from analysis.overview import overview
from analysis.wording import headlines
from profiler.intervals import ratio_of_medians
from profiler.records import ArmRecord, CellRecord, Choice, ModelRecord
from profiler.store import Run
from tests.analysis.example_run import write_example_run
from tests.analysis.tiny_run import step, write_run


@pytest.fixture(scope="module")
def frame(example: Run) -> pd.DataFrame:
    return ladder(example)


def figure(frame: pd.DataFrame, cell: str, arm: str, rung: str, variant: str | None = None) -> pd.Series[Any]:
    variant = variant or HEADLINE[rung]
    found = frame[
        (frame["cell"] == cell) & (frame["arm"] == arm) & (frame["rung"] == rung) & (frame["variant"] == variant)
    ]
    assert len(found) == 1
    return found.iloc[0]


# -- counted rungs --------------------------------------------------------------------------------------------------


def test_parameter_skip_of_a_prefill_cell(frame: pd.DataFrame) -> None:
    # Of 4 requests × 4 layers of 32 rows, r0 skips 1 block, r1 1, r2 2, r3 0: 4 of 16, so 1 block of 49,280
    # parameters a token. Backbone 64,000 + 64 + 4 × 49,280 = 261,184. Four routers of 65 run: 260.
    for variant, above, below in [
        ("gross", 49_280, 261_184),
        ("adapters_only", 49_280, 261_184),
        ("net", 49_020, 261_184),
        ("augmented", 49_280, 261_444),
    ]:
        row = figure(frame, "prefill-b4-l32", "routed", "parameter_skip", variant)
        assert (row["numerator"], row["denominator"]) == (above, below)
        assert row["value"] == pytest.approx(above / below)
        assert (row["n"], row["unit"]) == (128, "parameters")
        assert pd.isna(row["low"])  # counted, not sampled


def test_routers_that_do_not_run_in_decode_take_no_part(frame: pd.DataFrame) -> None:
    # Frozen gates: no line of a router in decode, so net equals gross, and the 260 idle parameters count as skipped.
    assert figure(frame, "decode-b4-c32-n4", "routed", "parameter_skip", "net")["numerator"] == 49_280
    assert figure(frame, "decode-b4-c32-n4", "routed", "parameter_skip", "augmented")["numerator"] == 49_540


def test_flop_skip_of_a_prefill_cell(frame: pd.DataFrame) -> None:
    # One request through one block: 32 rows × 98,304 + 528 attended × 256 = 3,280,896; with every key multiplied
    # 32 × 98,304 + 1,024 × 256 = 3,407,872. Head: 4 rows × 128,000 = 512,000. Routers: 4 layers × 4 rows × 128 = 2,048.
    causal, full = (12 * 3_280_896 + 514_048, 16 * 3_280_896 + 512_000), (12 * 3_407_872 + 514_048, 55_037_952)
    assert causal == (39_884_800, 53_006_336)
    for variant, (own, twin) in {
        "executed": causal,
        "nominal": causal,  # rule 1 holds
        "padded": full,  # no pads, so only the keys differ
        "full_attention": full,
    }.items():
        row = figure(frame, "prefill-b4-l32", "routed", "flop_skip", variant)
        assert (row["numerator"], row["denominator"]) == (own, twin)
        assert row["value"] == pytest.approx(1 - own / twin)


def test_flop_skip_of_a_decode_cell(frame: pd.DataFrame) -> None:
    # 4 steps of 4 rows; a row attends 33, 34, 35, 36 positions: 138 in all a request. 12 of 16 blocks run.
    # Block: 4 × 98,304 + 138 × 256 = 428,544. Head: 16 rows × 128,000 = 2,048,000. No routers.
    row = figure(frame, "decode-b4-c32-n4", "routed", "flop_skip")
    assert (row["numerator"], row["denominator"]) == (12 * 428_544 + 2_048_000, 16 * 428_544 + 2_048_000)
    assert row["n"] == 4


def test_a_weight_is_read_if_any_request_of_the_batch_uses_it(frame: pd.DataFrame) -> None:
    # Block 197,120 bytes, head 256,000, routers 4 × 260. Alone r0 skips layer 1; of four, every layer has a user.
    dense = 4 * 197_120 + 256_000
    for cell, own in {
        "prefill-b1-l32": 3 * 197_120 + 256_000 + 1_040,
        "prefill-b4-l32": 4 * 197_120 + 256_000 + 1_040,
        "decode-b4-c32-n4": 4 * 197_120 + 256_000,
    }.items():
        row = figure(frame, cell, "routed", "weight_byte_skip")
        assert (row["numerator"], row["denominator"]) == (own, dense)
        assert row["value"] == pytest.approx(1 - own / dense)


def adapter_arm(**more: Any) -> ArmRecord:
    """Attention with 60 parameters; an FFN of 100 with an adapter of 10 instead; a router of 5 on top."""
    choices = [
        Choice(layer=0, site="attention", index=0, name="run", backbone_parameters=60, flops_per_row=120,
               flops_per_context=8, weight_bytes=240),
        Choice(layer=0, site="router", index=0, name="run", overhead_parameters=5, flops_per_row=10, weight_bytes=20),
        Choice(layer=0, site="ffn", index=0, name="adapter", replacement_parameters=10, flops_per_row=20,
               weight_bytes=40),
        Choice(layer=0, site="ffn", index=1, name="ffn", backbone_parameters=100, flops_per_row=200, weight_bytes=400),
    ]  # fmt: skip
    return ArmRecord(name="hero", method="hero", scope="token", choices=choices, **more)


def line(arm: str, number: int, site: str, choice: int, rows: int, padded: int = 0, context: int = 0) -> dict[str, Any]:
    row = {"arm": arm, "step": number, "layer": 0, "site": site, "choice": choice, "rows": rows, "padded": padded}
    return {**row, "context": context, "context_full": 16 if context else 0}


def token_gate(number: int, position: int, choice: int) -> dict[str, Any]:
    row = {"arm": "hero", "step": number, "phase": "prefill", "request": "a", "position": position, "layer": 0}
    return {**row, "site": "ffn", "choices": [choice], "weights": [1.0], "gate": 0.5, "rows": 1}


ADAPTER_ROWS = [
    line("hero", 0, "attention", 0, 4, 1, context=10),
    line("hero", 0, "router", 0, 4, 1),
    line("hero", 0, "ffn", 0, 3),
    line("hero", 0, "ffn", 1, 1, 1),
]


def test_adapters_routers_and_pads(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        [adapter_arm()],
        {"steps": [step("hero", 0, "instrumented")], "rows": ADAPTER_ROWS},
    )
    found = ladder(run)
    # 3 of 4 tokens take the adapter: 75 of 160 backbone parameters skipped. Adapters that ran 7.5, router 5.
    # Augmented: idle adapter 2.5 of 10 → (75 + 2.5) ÷ (160 + 15).
    for variant, value in {
        "gross": 75 / 160,
        "adapters_only": 67.5 / 160,
        "net": 62.5 / 160,
        "augmented": 77.5 / 175,
    }.items():
        assert figure(found, "cell", "hero", "parameter_skip", variant)["value"] == pytest.approx(value)
    # No twin: FLOPs against the same step with the FFN for all 4 rows. Attention 4 × 120 + 10 × 8 = 560, router 40,
    # FFN site 3 × 20 + 200 = 260, full 800.
    executed = figure(found, "cell", "hero", "flop_skip")
    assert (executed["numerator"], executed["denominator"]) == (860, 1_400)
    assert "no twin; skips are against the arm's own full execution" in executed["note"]
    # Bytes: 240 + 20 + 40 + 400 read, 240 + 20 + 400 had it run in full.
    read = figure(found, "cell", "hero", "weight_byte_skip")
    assert (read["numerator"], read["denominator"]) == (700, 660)
    assert "gates were not recorded" in figure(found, "cell", "hero", "flop_skip", "nominal")["note"]
    assert pd.isna(figure(found, "cell", "hero", "flop_skip", "padded")["value"])


def test_padded_flops_against_a_twin(tmp_path: Path) -> None:
    dense = ArmRecord(
        name="dense",
        method="dense",
        choices=[c for c in adapter_arm().choices if c.site == "attention"]
        + [Choice(layer=0, site="ffn", index=0, name="run", backbone_parameters=100, flops_per_row=200)],
    )
    twin_rows = [line("dense", 1, "attention", 0, 4, 1, context=10), line("dense", 1, "ffn", 0, 4, 1)]
    steps = [step("hero", 0, "instrumented"), step("dense", 1, "instrumented")]
    run = write_run(
        tmp_path / "run",
        [dense, adapter_arm(twin="dense")],
        {"steps": steps, "rows": [*ADAPTER_ROWS, *twin_rows]},
    )
    # Padded: attention 5 × 120 + 16 × 8 = 728, router 50, adapter 60, FFN 2 × 200; twin 728 + 5 × 200.
    row = figure(ladder(run), "cell", "hero", "flop_skip", "padded")
    assert (row["numerator"], row["denominator"]) == (728 + 50 + 60 + 400, 1_728)


def test_nominal_is_what_gates_asked_for_even_if_other_rows_ran(tmp_path: Path) -> None:
    asked = [token_gate(0, position, choice) for position, choice in enumerate([0, 0, 1, 1])]
    run = write_run(
        tmp_path / "run",
        [adapter_arm()],
        {"steps": [step("hero", 0, "instrumented")], "rows": ADAPTER_ROWS, "gates": asked},
    )
    found = ladder(run)
    # Attention 560 and router 40 as they ran; asked: 2 adapters and 2 FFNs, 440. Executed: 260.
    assert figure(found, "cell", "hero", "flop_skip", "nominal")["numerator"] == 1_040
    assert figure(found, "cell", "hero", "flop_skip", "executed")["numerator"] == 860


def test_nominal_attention_of_token_gates_counts_the_positions_attended(tmp_path: Path) -> None:
    choices = [
        Choice(layer=0, site="attention", index=0, name="skip"),
        Choice(layer=0, site="attention", index=1, name="run", backbone_parameters=60, flops_per_context=8),
    ]
    arm = ArmRecord(name="hero", method="any", scope="token", choices=choices)
    gates = [{**token_gate(0, p, c), "site": "attention"} for p, c in enumerate([0, 1, 0, 1])]
    ran = [line("hero", 0, "attention", 1, 2, context=6)]
    steps = [step("hero", 0, "instrumented")]
    run = write_run(tmp_path / "run", [arm], {"steps": steps, "rows": ran, "gates": gates})
    # Positions 1 and 3 attend 2 + 4 = 6 tokens; had all run, 1 + 2 + 3 + 4 = 10.
    row = figure(ladder(run), "cell", "hero", "flop_skip", "nominal")
    assert (row["numerator"], row["denominator"]) == (48, 80)


def test_only_steps_that_both_arms_recorded_are_compared(tmp_path: Path) -> None:
    dense = ArmRecord(name="dense", method="dense", choices=[adapter_arm().choices[0]])
    arm = adapter_arm(twin="dense")
    steps = [
        step("hero", 0, "instrumented"),
        step("dense", 1, "instrumented"),
        step("dense", 2, "instrumented", index=1),
    ]
    rows = [*ADAPTER_ROWS, *(line("dense", n, "attention", 0, 4, context=10) for n in (1, 2))]
    row = figure(
        ladder(write_run(tmp_path / "run", [dense, arm], {"steps": steps, "rows": rows})), "cell", "hero", "flop_skip"
    )
    assert (row["numerator"], row["denominator"], row["n"]) == (860, 560, 1)
    assert "1 recorded step without a partner left out" in row["note"]


# -- timed rungs ----------------------------------------------------------------------------------------------------


def test_step_time_saved_and_its_interval(frame: pd.DataFrame) -> None:
    row = figure(frame, "prefill-b4-l32", "routed", "step_time_saved")
    # Medians 5.1 and 6.0 ms; the wobble of the routed arm starts one place later (see WOBBLE).
    wobble = [0, 4, -4, 8, -8, 12, -12]
    own = [5.1 * (1 + w / 1000) for w in [*wobble[1:], wobble[0]]]
    ratio = ratio_of_medians(own, [6.0 * (1 + w / 1000) for w in wobble])
    assert row["value"] == pytest.approx(0.15)
    assert (row["low"], row["high"]) == pytest.approx((1 - ratio.high, 1 - ratio.low))
    assert row["low"] < 0.15 < row["high"]
    assert (row["numerator"], row["denominator"], row["n"], row["unit"]) == (5.1, 6.0, 7, "ms")


def test_kernel_time_is_per_traced_step(frame: pd.DataFrame) -> None:
    # Traced steps take 1.5 × bare, 0.8 of it busy: 5.1 × 1.2 and 6.0 × 1.2.
    row = figure(frame, "prefill-b4-l32", "routed", "kernel_time_saved")
    assert (row["numerator"], row["denominator"]) == pytest.approx((6.12, 7.2))
    assert (row["value"], row["n"]) == (pytest.approx(0.15), 2)


def test_realised_fraction_scales_the_interval(frame: pd.DataFrame) -> None:
    skip = 1 - 39_884_800 / 53_006_336
    saved = figure(frame, "prefill-b4-l32", "routed", "step_time_saved")
    row = figure(frame, "prefill-b4-l32", "routed", "realised_fraction")
    assert row["value"] == pytest.approx(0.15 / skip)
    assert (row["low"], row["high"]) == pytest.approx((saved["low"] / skip, saved["high"] / skip))


def test_realised_fraction_is_undefined_where_no_flops_were_skipped(tmp_path: Path) -> None:
    dense = ArmRecord(name="dense", method="dense", choices=[adapter_arm().choices[0]])
    arm = adapter_arm(twin="dense")
    steps = [step("hero", 0, "instrumented"), step("dense", 1, "instrumented")]
    steps += [step(a, 2 + 2 * r + i, repeat=r) for r in range(3) for i, a in enumerate(["hero", "dense"])]
    rows = [*ADAPTER_ROWS, line("dense", 1, "attention", 0, 4, context=10)]
    found = ladder(write_run(tmp_path / "run", [dense, arm], {"steps": steps, "rows": rows}))
    row = figure(found, "cell", "hero", "realised_fraction")
    assert pd.isna(row["value"])
    assert "undefined: FLOP skip is −53.6\u00a0%, not above 0" in row["note"]  # 1 − 860 ÷ 560
    # Equal times: an A/A comparison shows no difference.
    saved = figure(found, "cell", "hero", "step_time_saved")
    assert (saved["value"], saved["low"], saved["high"]) == (0, 0, 0)
    assert "no difference shown" in saved["note"]


def test_recorder_cost_is_of_pairs_of_the_same_arm(frame: pd.DataFrame) -> None:
    row = figure(frame, "prefill-b1-l32", "routed", "recorder_cost")
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.02, 0.02, 0.02))
    assert (row["numerator"], row["denominator"]) == pytest.approx((2.244, 2.2))


def test_the_slowest_rank_makes_the_step(tmp_path: Path) -> None:
    arms = [ArmRecord(name=n, method="dense", twin="b" if n == "a" else None) for n in ("a", "b")]
    walls = {("a", 0): 3, ("a", 1): 5, ("b", 0): 10, ("b", 1): 4}
    steps = [
        step(arm, number, rank=rank, wall_ns=ms * 1_000_000)
        for (arm, rank), ms in walls.items()
        for number in [0 if arm == "a" else 1]
    ]
    row = figure(ladder(write_run(tmp_path / "run", arms, {"steps": steps})), "cell", "a", "step_time_saved")
    assert (row["numerator"], row["denominator"], row["value"]) == (5, 10, 0.5)
    assert "1 pair: too few for an interval" in row["note"]


def test_an_interval_wider_than_the_spec_asked_for_is_said(tmp_path: Path) -> None:
    arms = [ArmRecord(name="a", method="dense", twin="b"), ArmRecord(name="b", method="dense")]
    steps = [
        step(arm, 2 * r + i, repeat=r, wall_ns=ms * 1_000_000)
        for r, pair in enumerate([(8, 10), (12, 10), (10, 10), (9, 10)])
        for i, (arm, ms) in enumerate(zip("ab", pair, strict=True))
    ]
    spec = "measure: {target_ci: 0.02}\n"
    cells = [CellRecord(name="cell", phase="prefill", batch=1, length=4, done=True, stopped="budget")]
    found = ladder(write_run(tmp_path / "run", arms, {"steps": steps}, spec_yaml=spec, cells=cells))
    row = figure(found, "cell", "a", "step_time_saved")
    half = (row["high"] - row["low"]) / 2
    assert half > 0.02
    said = f"interval ±{100 * half:.1f} % is wider than the target ±2.0 %, stopped by budget"
    assert said in row["note"].replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("repeats", "pairs", "note", "enough"),
    [
        (1, 8, "1 repeat: too few to judge, which takes 3", False),
        (2, 8, "2 repeats: too few to judge, which takes 3", False),
        (4, 4, "4 pairs: too few to judge, the interval is too narrow to be a 95 % one", False),
        (1, 2, "2 pairs: too few for an interval", False),
        (3, 5, "", True),
        (0, 5, "", True),  # a cell that was not closed: its repeats are unknown
    ],
)
def test_a_time_of_too_few_repeats_says_so_on_its_row_and_by_the_rule_of_the_break_even(
    tmp_path: Path, repeats: int, pairs: int, note: str, enough: bool
) -> None:
    arms = [ArmRecord(name="a", method="any", twin="b"), ArmRecord(name="b", method="dense")]
    steps = [
        step(arm, 2 * i + k, index=i, wall_ns=ms * 1_000_000)
        for i in range(pairs)
        for k, (arm, ms) in enumerate((("a", 2), ("b", 4)))
    ]
    cells = [CellRecord(name="cell", phase="decode", batch=4, length=4, done=True, repeats=repeats)]
    run = write_run(tmp_path / "run", arms, {"steps": steps}, cells=cells)
    found = ladder(run)
    assert figure(found, "cell", "a", "step_time_saved")["note"] == note
    (wide,) = ladder_wide(found[found["arm"] == "a"]).to_dict("records")
    assert (wide["judged"], note in wide["note"]) == (enough, True)
    (even,) = break_even(run, found)["break_even"]
    assert even == ("none seen: saves at the one batch swept" if enough else "not judged: too few repeats at batch 4")
    (said,) = headlines(ladder_wide(found[found["arm"] == "a"]), {"a": "a"})
    doubt = "too few pairs for an interval" if pairs < 3 else "%, too few repeats to judge" if not enough else "%"
    assert said.endswith(f"{doubt}).")


MODEL = ModelRecord(
    source="tiny", architecture="L", parameters=1, layers=1, hidden=1, dtype="float32", device="cpu", device_name="cpu",
    random_weights=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "a_ms", "b_ms", "saved", "why"),
    [
        # Bare steps take 1 ms and 2 ms. Kernels of 0.4 to 1.5 of that are of steps like them.
        ("cpu", 0.9, 1.8, 0.5, ""),
        ("cpu", 1.49, 0.81, 1 - 1.49 / 0.81, ""),
        ("cpu", 0.9, 4.84, None, "2.42 × (b) a median bare step, outside 0.4 to 1.5"),
        ("cpu", 0.06, 5.0, None, "0.06 × (a) and 2.50 × (b) a median bare step, outside 0.4 to 1.5"),
        ("cpu", 1600.0, 1.8, None, "1,600.00 × (a) a median bare step, outside 0.4 to 1.5"),
        # A device may idle while the host launches.
        ("cuda:0", 0.06, 1.8, 1 - 0.06 / 1.8, ""),
        ("cuda:0", 0.06, 3.2, None, "1.60 × (b) a median bare step, above 1.5"),
    ],
)
def test_kernel_time_is_unsupported_where_the_trace_is_of_other_steps_than_the_timed(
    tmp_path: Path, device: str, a_ms: float, b_ms: float, saved: float | None, why: str
) -> None:
    arms = [ArmRecord(name="a", method="any", twin="b"), ArmRecord(name="b", method="dense")]
    bare = [step(arm, 2 * r + k, repeat=r, wall_ns=(1 + k) * 1_000_000) for r in range(5) for k, arm in enumerate("ab")]
    traced = [step("a", 20, "traced", wall_ns=None), step("b", 21, "traced", wall_ns=None)]
    kernels = [
        {"arm": arm, "step": number, "stream": 0, "name": "mm", "category": "gemm", "segment": "ffn", "layer": 0,
         "start_ns": 0, "dur_ns": round(ms * 1e6)}
        for arm, number, ms in (("a", 20, a_ms), ("b", 21, b_ms))
    ]  # fmt: skip
    run = write_run(
        tmp_path / "run", arms, {"steps": [*bare, *traced], "kernels": kernels},
        model=MODEL.model_copy(update={"device": device}),
    )  # fmt: skip
    found = ladder(run)
    row = figure(found, "cell", "a", "kernel_time_saved")
    assert (row["numerator"], row["denominator"], row["n"]) == (a_ms, b_ms, 1)  # what there is can be checked
    unsupported = overview(run, found).unsupported["metric"].tolist()
    if saved is not None:
        assert (row["value"], row["note"], unsupported) == (pytest.approx(saved), "", [])
    else:
        assert pd.isna(row["value"])
        assert row["note"] == f"kernel time unsupported: a traced step's kernels took {why}"
        assert unsupported == ["kernel time saved by a in cell"]
        # The chart draws nothing there, nor what was lost on the way to it, and says why.
        rows = found[(found["arm"] == "a") & (found["variant"] == found["rung"].map(HEADLINE))]
        chart = charts.ladder(rows, "a", charts.Look.of(run.manifest), "b")
        assert next(trace for trace in chart.data if len(trace.y) == 6).x[3] is None
        assert not [trace for trace in chart.data if len(trace.y) == 1 and trace.y[0].startswith("Kernel time")]
        said = next(note.text for note in chart.layout.annotations if note.y.startswith("Kernel time"))
        assert f"took {why}" in said.replace("<br>", " ")


# -- what is always there -------------------------------------------------------------------------------------------


def test_every_arm_has_every_rung_in_order_and_a_twin_only_its_times(frame: pd.DataFrame) -> None:
    assert list(frame.columns) == list(COLUMNS)
    for (_, arm), rows in frame.groupby(["cell", "arm"]):
        found = list(zip(rows["rung"], rows["variant"], strict=True))
        rungs = ("step_time", "recorder_cost") if arm == "dense" else RUNGS
        assert found == [(rung, variant) for rung in rungs for variant in VARIANTS[rung]]


def test_request_time_is_not_measured_without_a_serve_section(frame: pd.DataFrame) -> None:
    row = figure(frame, "prefill-b1-l32", "routed", "request_time_saved")
    assert pd.isna(row["value"])
    assert row["note"].startswith("not measured: the spec has no serve section")


def test_notes_name_synthetic_untrained_and_random(tmp_path: Path, frame: pd.DataFrame) -> None:
    forced, routed = (frame[frame["arm"] == arm]["note"] for arm in ("forced", "routed"))
    assert forced.str.contains("synthetic route (forced: 50%", regex=False).all()
    assert routed.str.contains("untrained router").all()
    random = ladder(Run(write_example_run(tmp_path / "run", random_weights=True)))
    assert random["note"].str.contains("random weights").all()


def test_every_missing_value_says_why(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"stage": "start", "state": "killed"},
        {"stage": "mid-cell", "state": "killed"},
        {"origin": "session", "arms": ("routed",)},
        {"origin": "session", "arms": ("dense",)},
        {"arms": ("dense",)},
        {"twin": "absent", "traced": False, "nan_gates": True},
        {"arms": ("forced",), "traced": False},
    ]
    for number, options in enumerate(variants):
        found = ladder(Run(write_example_run(tmp_path / str(number), **options)))
        assert len(found) > 0
        missing = found[found["value"].isna()]
        assert (missing["note"] != "").all(), options
        wide = ladder_wide(found)
        assert list(wide.columns) == list(WIDE_COLUMNS)
        assert len(wide) == len(found[["cell", "arm"]].drop_duplicates())


def test_a_run_killed_mid_cell_keeps_the_pairs_it_has(tmp_path: Path) -> None:
    found = ladder(Run(write_example_run(tmp_path / "run", stage="mid-cell", state="killed")))
    # The forced arm lacks 2 of 7 repeats of 4 steps: 20 pairs, 8 of the twin's steps are alone.
    row = figure(found, "decode-b4-c32-n4", "forced", "step_time_saved")
    assert row["n"] == 20
    assert "8 steps without a partner left out" in row["note"]
    assert "incomplete cell (run killed)" in row["note"]
    assert "incomplete" not in figure(found, "prefill-b1-l32", "routed", "step_time_saved")["note"]


def test_a_session_has_skips_against_its_own_full_execution_and_no_savings(tmp_path: Path) -> None:
    found = ladder(Run(write_example_run(tmp_path / "run", origin="session", arms=("routed",))))
    row = figure(found, "session-prefill", "routed", "flop_skip")
    # As in the run, but the routers and the head's 512,000 stand on both sides.
    assert (row["numerator"], row["denominator"]) == (39_884_800, 16 * 3_280_896 + 514_048)
    assert figure(found, "session-prefill", "routed", "step_time_saved")["note"].startswith("no twin")
    wide = ladder_wide(found).set_index("cell")
    assert wide.loc["session-prefill", "step_ms"] == pytest.approx(5.1 * 1.004 * 1.02)
    assert "step time is of instrumented steps" in wide.loc["session-prefill", "note"]


def test_a_session_that_was_killed_has_its_cells_from_the_steps(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        [adapter_arm()],
        {"steps": [step("hero", 0, "instrumented", cell="session-prefill")]},
        cells=[],
        origin="session",
    )
    assert set(ladder(run)["cell"]) == {"session-prefill"}


def test_wide_has_headlines_and_both_times(example: Run, frame: pd.DataFrame) -> None:
    wide = ladder_wide(frame).set_index(["cell", "arm"])
    row = wide.loc[("prefill-b4-l32", "routed")]
    assert row["parameter_skip"] == pytest.approx(49_020 / 261_184)
    assert row["flop_skip"] == pytest.approx(1 - 39_884_800 / 53_006_336)
    assert (row["step_ms"], row["twin_step_ms"], row["n"]) == (5.1, 6.0, 7)
    dense = wide.loc[("prefill-b4-l32", "dense")]
    assert dense["step_ms"] == 6.0
    assert dense[["parameter_skip", "step_time_saved", "twin_step_ms"]].isna().all()


# -- break-even -----------------------------------------------------------------------------------------------------


def swept(*intervals: tuple[int, float, float]) -> pd.DataFrame:
    base = {"cell": "cell", "phase": "prefill", "length": 4, "arm": "a", "twin": "b", "rung": "step_time_saved"}
    base |= {"repeats": 8, "n": 8}
    return pd.DataFrame([{**base, "batch": b, "low": low, "high": high} for b, low, high in intervals])


NAN = float("nan")


@pytest.mark.parametrize(
    ("intervals", "bounds", "words"),
    [
        ([(1, -0.2, -0.1), (8, 0.1, 0.2)], (8, 8, 1, 1, None, None), "between batch 1 (loses) and 8 (saves)"),
        (
            [(8, -0.2, -0.1), (1, 0.3, 0.4), (2, 0.1, 0.2), (4, -0.1, 0.1)],
            (1, 2, 8, 8, 4, 4),
            "between batch 2 (saves) and 8 (loses)",
        ),
        ([(1, 0.1, 0.2), (4, 0.1, 0.2)], (1, 4, None, None, None, None), "none seen: saves at every batch swept"),
        ([(4, -0.2, -0.1)], (None, None, 4, 4, None, None), "none seen: loses at the one batch swept"),
        (
            [(1, 0.1, 0.2), (4, -0.1, 0.2)],
            (1, 1, None, None, 4, 4),
            "none seen: saves where it is clear, unclear at batch 4",
        ),
        (
            [(1, -0.1, 0.2), (2, 0.0, 0.2)],
            (None, None, None, None, 1, 2),
            "not decided: the interval holds 0 at batches 1 and 2",
        ),
        ([(1, NAN, NAN)], (None,) * 6, "not judged: too few repeats at batch 1"),
        (
            [(1, -0.1, 0.2), (4, NAN, NAN)],
            (None, None, None, None, 1, 1),
            "not decided: the interval holds 0 at batch 1; too few repeats to judge batch 4",
        ),
        (
            [(1, -0.2, -0.1), (4, NAN, NAN), (8, NAN, NAN)],
            (None, None, 1, 1, None, None),
            "none seen: loses at the one batch judged; too few repeats to judge batches 4 and 8",
        ),
        (
            [(1, -0.2, -0.1), (2, -0.2, -0.1), (4, NAN, NAN)],
            (None, None, 1, 2, None, None),
            "none seen: loses at every batch judged; too few repeats to judge batch 4",
        ),
        (
            [(1, -0.2, -0.1), (4, NAN, NAN), (8, 0.1, 0.2)],
            (8, 8, 1, 1, None, None),
            "between batch 1 (loses) and 8 (saves); too few repeats to judge batch 4",
        ),
    ],
)
def test_break_even(
    tmp_path: Path, intervals: list[tuple[int, float, float]], bounds: tuple[int | None, ...], words: str
) -> None:
    run = write_run(tmp_path / "run", [ArmRecord(name="a", method="any", twin="b")], {})
    found = break_even(run, swept(*intervals))
    assert list(found.columns) == list(BREAK_EVEN_COLUMNS)
    row = found.iloc[0]
    names = ["saves_from", "saves_to", "loses_from", "loses_to", "unclear_from", "unclear_to"]
    assert tuple(None if pd.isna(row[name]) else row[name] for name in names) == bounds
    assert row["break_even"] == words
    assert row["batches"] == ", ".join(str(batch) for batch, *_ in sorted(intervals))
    assert row["note"] == ""


def test_break_even_of_the_example(example: Run) -> None:
    found = break_even(example).set_index(["phase", "arm"])
    assert found.loc[("prefill", "routed"), "break_even"] == "between batch 1 (loses) and 4 (saves)"
    assert found.loc[("prefill", "forced"), "break_even"] == "none seen: saves at every batch swept"
    assert found.loc[("decode", "routed"), "break_even"] == "none seen: loses at the one batch swept"
    assert "synthetic" in found.loc[("prefill", "forced"), "note"]
