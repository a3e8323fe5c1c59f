"""Figures: they hold the analysis' numbers, name their units, keep the arms' colours, and treat text as data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from analysis import charts, kernels, routing_charts, tables, wording
from analysis.ladder import ladder
from analysis.ladder_tables import ladder_wide
from analysis.routing import Heatmap, heatmap, skip_by_layer
from profiler.store import Run
from tests.analysis.example_run import write_example_run


def look(run: Run) -> charts.Look:
    return charts.Look.of(run.manifest)


def rungs(run: Run, cell: str, arm: str) -> go.Figure:
    frame = tables.headline_rows(ladder(run))
    return charts.ladder(frame[(frame["cell"] == cell) & (frame["arm"] == arm)], arm, look(run), "dense")


def skips(run: Run, cell: str, arm: str) -> go.Figure:
    frame = skip_by_layer(run)
    chosen = frame[(frame["cell"] == cell) & (frame["arm"] == arm) & (frame["choice"] == "skip")]
    return routing_charts.skip_share(chosen, arm, look(run))


def prefill(run: Run) -> pd.DataFrame:
    """Rows of the wide ladder that were timed in prefill, the largest batch first."""
    wide = ladder_wide(ladder(run))
    return wide[wide["step_time_saved"].notna() & (wide["phase"] == "prefill")].iloc[::-1]


def every_figure(run: Run) -> dict[str, go.Figure]:
    wide = ladder_wide(ladder(run))
    segments = kernels.segments(run)
    return {
        "ladder": rungs(run, "prefill-b4-l32", "routed"),
        "skip_against_saving": charts.skip_against_saving(wide, look(run)),
        "break_even": charts.break_even(prefill(run), look(run)),
        "segments": charts.segments(segments[segments["cell"] == "prefill-b4-l32"], look(run)),
        "telemetry": charts.telemetry(run.frame("telemetry")),
        "skip_share": skips(run, "prefill-b4-l32", "routed"),
        "decisions": routing_charts.decisions(heatmap(run, "routed", "prefill-b4-l32"), look(run)),
    }


@pytest.fixture(scope="module")
def figures(example: Run) -> dict[str, go.Figure]:
    return every_figure(example)


def test_arms_have_colours_of_their_own_and_the_baseline_is_grey(example: Run) -> None:
    colours = look(example).colours
    assert colours["dense"] == charts.BASELINE
    assert len(set(colours.values())) == 3
    assert not set(charts.SEGMENT_COLOURS.values()) & set(charts.ARM_COLOURS)


#: How colours are seen (linear RGB): by most, and without red, green or blue cones (Machado et al. 2009, severity 1).
EYES = [
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
]


def seen(colour: str) -> np.ndarray:
    """`[4, 3]`: CIE Lab of a colour as each of `EYES` sees it."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = np.clip(np.stack([eye @ linear for eye in EYES]), 0, 1) @ to_xyz.T / [0.9505, 1.0, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("name", ["experts", "shared", "exchange"])
def test_segments_of_experts_are_told_apart_by_every_eye(name: str) -> None:
    mine = seen(charts.SEGMENT_COLOURS[name])
    others = {charts.OTHER_SEGMENT, *charts.ARM_COLOURS, *charts.SEGMENT_COLOURS.values()} - {
        charts.SEGMENT_COLOURS[name]
    }
    assert len(others) == len(charts.ARM_COLOURS) + len(charts.SEGMENT_COLOURS)
    assert min(np.linalg.norm(mine - seen(other), axis=1).min() for other in others) > 14


def test_arms_keep_their_colour_from_figure_to_figure(example: Run, figures: dict[str, go.Figure]) -> None:
    routed = look(example).colours["routed"]
    assert figures["ladder"].data[-2].marker.color == routed
    assert figures["skip_share"].data[0].marker.color == routed
    assert next(t for t in figures["break_even"].data if t.name.startswith("routed")).line.color == routed
    assert figures["decisions"].data[0].colorscale[0][1] == routed


def test_names_say_what_is_synthetic_and_untrained(example: Run) -> None:
    assert look(example).names == {
        "dense": "dense",
        "routed": "routed (untrained router)",
        "forced": "forced (synthetic route)",
    }


def test_random_weights_are_named_wherever_a_result_is(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "run", random_weights=True))
    assert look(run).names["routed"] == "routed (untrained router, random weights)"
    for name, figure in every_figure(run).items():
        assert name == "telemetry" or "random weights" in figure.to_json(engine="json").replace(",<br>", " "), name


def test_trained_weights_are_not_called_random(figures: dict[str, go.Figure]) -> None:
    assert not [name for name, figure in figures.items() if "random weights" in figure.to_json(engine="json")]


def test_axes_name_their_units(figures: dict[str, go.Figure]) -> None:
    assert "%" in figures["skip_against_saving"].layout.xaxis.title.text
    assert figures["break_even"].layout.yaxis.title.text.endswith("(% of the twin's median step)")
    assert figures["break_even"].layout.xaxis.title.text == "batch (sequences), prefill, 32 tokens"
    assert figures["segments"].layout.xaxis.title.text == "ms per instrumented step"
    assert figures["ladder"].layout.xaxis.ticksuffix == " %"
    assert "% of token rows" in figures["skip_share"].layout.title.text


class TestLadder:
    def test_bars_are_the_rungs_in_per_cent(self, example: Run) -> None:
        # Routed, batch 4: kernels and steps take 5.1 of 6.0 ms; the request rung is not measured.
        bars = next(trace for trace in rungs(example, "prefill-b4-l32", "routed").data if len(trace.y) == 6)
        assert bars.x[0] == pytest.approx(100 * 49_020 / 261_184)
        assert bars.x[3] == pytest.approx(15.0)
        assert bars.x[4] == pytest.approx(15.0)
        assert bars.x[5] is None

    def test_whiskers_are_the_interval_and_only_where_something_was_sampled(self, example: Run) -> None:
        frame = ladder(example)
        row = frame[
            (frame["cell"] == "prefill-b4-l32") & (frame["arm"] == "routed") & (frame["rung"] == "step_time_saved")
        ].iloc[0]
        whiskers = rungs(example, "prefill-b4-l32", "routed").data[-1]
        assert len(whiskers.x) == 1
        assert whiskers.x[0] + whiskers.error_x.array[0] == pytest.approx(100 * row["high"])
        assert whiskers.x[0] - whiskers.error_x.arrayminus[0] == pytest.approx(100 * row["low"])

    def test_what_was_not_measured_says_so(self, example: Run) -> None:
        texts = [note.text for note in rungs(example, "prefill-b4-l32", "routed").layout.annotations]
        assert texts.count("not measured") == 1
        assert "15.0\u00a0%" in texts

    def test_pale_bars_reach_back_to_the_rung_above(self, example: Run) -> None:
        # Forced, batch 1: kernels save 35 % after 37.6 % of bytes; a rung that is not lower has no pale bar.
        figure = rungs(example, "prefill-b1-l32", "forced")
        bars = next(trace for trace in figure.data if len(trace.y) == 6)
        pale = [t for t in figure.data if t.type == "bar" and t.marker.color == charts.GHOST]
        kernel = next(t for t in pale if "Kernel" in t.y[0])
        assert kernel.base[0] == pytest.approx(35.0)
        assert kernel.base[0] + kernel.x[0] == pytest.approx(bars.x[2])
        assert not any("FLOPs" in t.y[0] for t in pale)

    def test_a_negative_rung_pales_from_zero(self, example: Run) -> None:
        # Routed, batch 1: kernels take 10 % longer after 18.8 % of bytes were skipped.
        pale = [t for t in rungs(example, "prefill-b1-l32", "routed").data if t.type == "bar" and "Kernel" in t.y[0]]
        assert pale[0].base[0] == 0.0

    def test_cells_share_a_span_that_holds_all_their_rungs(self, example: Run) -> None:
        frame = tables.headline_rows(ladder(example))
        low, high = charts.ladder_span(frame[frame["cell"] == "prefill-b1-l32"])
        assert low < -11.0
        assert high > 50.0


def test_summary_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "run", arms=["dense", "routed"]))
    figure = charts.skip_against_saving(ladder_wide(ladder(run)), look(run))
    assert "dense" not in {trace.name for trace in figure.data}
    saved = next(t for t in figure.data if t.mode == "markers" and t.marker.symbol == "circle" and t.y)
    assert sorted(saved.x) == pytest.approx([-10.0, -5.0, 15.0])


def test_break_even_orders_batches_by_size_and_sets_arms_apart(example: Run) -> None:
    figure = charts.break_even(prefill(example), look(example))
    routed, forced = (next(t for t in figure.data if t.name.startswith(arm)) for arm in ("routed", "forced"))
    assert list(figure.layout.xaxis.ticktext) == ["1", "4"]
    assert list(routed.y) == pytest.approx([-10.0, 15.0])
    assert [round(x) for x in routed.x] == [0, 1]
    assert not set(routed.x) & set(forced.x)


def test_stacked_segments_make_the_step(figures: dict[str, go.Figure]) -> None:
    # Routed, batch 4: bare 5.1 ms, instrumented 2 % more, on average over repeats that cancel out.
    figure = figures["segments"]
    total = sum(x for trace in figure.data for y, x in zip(trace.y, trace.x, strict=True) if y.startswith("routed"))
    assert total == pytest.approx(5.1 * 1.02, rel=1e-3)
    assert figure.data[-1].name == "unattributed"


def test_telemetry_counts_seconds_from_the_first_sample(figures: dict[str, go.Figure]) -> None:
    figure = figures["telemetry"]
    assert list(figure.data[0].x) == [0.0, 1.0]
    assert {note.text for note in figure.layout.annotations} >= {"cpu: utilisation (%)", "cpu: rss (bytes)"}


class TestRouting:
    def test_shares_are_per_cent_of_token_rows(self, example: Run) -> None:
        figure = skips(example, "prefill-b4-l32", "routed")
        # Of r0…r3, layer 1 is skipped by r0 and r2, layer 2 by r1 and r2, the others by none.
        assert list(figure.data[0].y) == [0.0, 50.0, 50.0, 0.0]
        by_domain = dict(zip(figure.data[1].y, figure.data[1].z, strict=True))
        assert list(by_domain["tool_call"]) == [0.0, 100.0, 100.0, 0.0]
        assert list(by_domain["prose"]) == [0.0, 0.0, 0.0, 0.0]

    def test_without_domains_there_is_one_panel(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", origin="session", arms=["routed"]))
        assert [trace.type for trace in skips(run, "session-prefill", "routed").data] == ["bar"]

    def test_the_grid_is_the_decisions(self, example: Run) -> None:
        figure = routing_charts.decisions(heatmap(example, "routed", "prefill-b4-l32"), look(example))
        # 0 is skip, 1 is run.
        assert [list(line) for line in figure.data[0].z] == [[1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
        assert figure.data[0].customdata[0][1][2] == "skip, gate 0.269"

    def test_prompts_stand_beside_their_rows(self, example: Run) -> None:
        figure = routing_charts.decisions(heatmap(example, "routed", "prefill-b4-l32"), look(example))
        beside = {note.y: note.text for note in figure.layout.annotations}
        assert beside[2] == '{"tool": "weather", "city": "Zürich"}'

    def test_withheld_text_leaves_the_grid(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", keeps_text=False))
        figure = routing_charts.decisions(heatmap(run, "routed", "prefill-b4-l32"), look(run))
        assert not figure.layout.annotations
        assert figure.data[0].customdata[0][0][3] == ""

    def test_gates_that_do_not_exist_stay_empty(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", nan_gates=True))
        figure = routing_charts.decisions(heatmap(run, "routed", "prefill-b1-l32"), look(run), by_gate=True)
        assert list(figure.data[0].z[0]) == [None, None, None, None]
        assert "NaN" not in figure.to_json(engine="json")

    def test_tokens_by_position_with_a_hole(self, example: Run) -> None:
        import numpy as np

        choice = np.array([[0, 1], [1, -1], [2, 0]], dtype=np.int16)
        grid = Heatmap(
            arm="routed", cell="prefill-b1-l32", scope="token", request="r0", requests=["r0"],
            row_labels=["0", "1", "2"], row_domains=["math"] * 3, column_labels=["0", "1"],
            choice_names=["skip", "adapter", "ffn"], choice=choice, gate=np.full((3, 2), np.nan), texts=None,
            prompt="a b c", note="",
        )  # fmt: skip
        figure = routing_charts.decisions(grid, look(example))
        assert [list(line) for line in figure.data[0].z] == [[0, 1], [1, None], [2, 0]]
        assert figure.data[0].customdata[1][1][2] == "nothing decided"
        assert figure.layout.yaxis.title.text == "position"
        assert list(figure.data[0].colorbar.ticktext) == ["skip", "adapter", "ffn"]

    def test_long_grids_name_every_few_rows(self, example: Run) -> None:
        import numpy as np

        rows = 512
        grid = Heatmap(
            arm="routed", cell="prefill-b1-l32", scope="token", request="r0", requests=["r0"],
            row_labels=[str(i) for i in range(rows)], row_domains=[None] * rows, column_labels=["0"],
            choice_names=["skip", "run"], choice=np.zeros((rows, 1), dtype=np.int16), gate=np.zeros((rows, 1)),
            texts=None, prompt=None, note="",
        )  # fmt: skip
        figure = routing_charts.decisions(grid, look(example))
        assert len(figure.layout.yaxis.ticktext) <= routing_charts.ROWS_WITH_TEXT
        assert figure.layout.height <= routing_charts.GRID_PIXELS


def test_text_is_data_in_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.analysis import example_run

    nasty = "</script><img src=x onerror=alert(1)><a href='https://example.org'>x</a>"
    monkeypatch.setitem(example_run.REQUESTS, "r0", (nasty, nasty, (1, 0, 1, 1)))
    run = Run(write_example_run(tmp_path / "run"))
    # Read back, because Plotly's own JSON hides every `<` from HTML but not from its label renderer.
    drawn = {name: json.dumps(json.loads(figure.to_json(engine="json"))) for name, figure in every_figure(run).items()}
    assert not [name for name, text in drawn.items() if "<img" in text or "<a " in text]
    assert "&lt;/script&gt;" in drawn["decisions"]


def test_plain_keeps_text_as_it_stands() -> None:
    assert charts.plain('a <b> & "c"') == 'a &lt;b&gt; &amp; "c"'


def test_tint_mixes_with_white() -> None:
    assert charts.tint("#000000", 0.5) == "#808080"
    assert charts.tint("#0072b2", 1.0) == "#0072b2"
    assert charts.tint("#0072b2", 0.0) == "#ffffff"


def test_numbers_stand_before_their_nouns() -> None:
    assert [wording.how_many(n, "pair") for n in (0, 1, 2, 2048)] == ["0 pairs", "1 pair", "2 pairs", "2,048 pairs"]
    assert [wording.how_many(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
    listed = [wording.listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])]
    assert listed == ["", "a", "a and b", "a, b and c"]
    assert wording.cell_label("p", "prefill", 1, 1).replace("\u00a0", " ") == "prefill, batch 1, 1 token"


def test_numbers_print_without_surprises() -> None:
    assert wording.percent(0.1876) == "18.8\u00a0%"
    assert wording.percent(-0.1) == "−10.0\u00a0%"
    assert wording.percent(-0.0001) == "0.0\u00a0%"
    assert wording.percent(float("nan")) == "—"
    assert wording.percent_interval(-0.118, 0.083) == "−11.8 to 8.3\u00a0%"
    assert wording.number(0.000_123_456) == "0.000123"
    assert wording.number(12_345.6) == "12,346"
    assert wording.number(0) == "0"
    assert wording.quantity(4_089_446_400, "FLOPs") == "4.089\u00a0G\u00a0FLOPs"
    assert wording.quantity(5.1, "ms") == "5.10\u00a0ms"
    assert wording.count(1_234_567) == "1,234,567"
