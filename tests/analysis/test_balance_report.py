"""The section of balance in every report, its figures, and that a run without experts has none of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import balance_report, balance_tables, report
from analysis.balance_report import Balance, balances
from analysis.charts import Look
from profiler.store import Run
from tests.analysis.expert_run import DECODE, PREFILL, write_expert_run
from tests.analysis.test_report import Page


@pytest.fixture(scope="module")
def found(experts: Run) -> Balance:
    (only,) = balances(experts)
    return only


@pytest.fixture(scope="module")
def page(experts: Run) -> Page:
    return Page(report.render_html(experts))


def test_sentences_say_what_ran_and_what_would_have_been_better(found: Balance) -> None:
    assert found.sentence == (
        "8 experts of widths 2, 6 in each of 2 layers, on 4 ranks on 2 nodes, placed contiguous; "
        "attention data parallel."
    )
    prefill, decode = (sentence.replace("\u00a0", " ") for sentence in found.headlines)
    assert "the busiest rank computed 2.25 × the mean in the median step and layer, 2.92 × at P95†" in prefill
    assert f"replicated has the lowest P95†, 1.49 × (fitted on the step of {PREFILL}, these included)" in prefill
    assert decode.endswith("of the placements compared all_size and replicated have the lowest P95†, 2.00 ×.")


def test_one_process_says_that_it_is_judged_as_if(alone: Run) -> None:
    (only,) = balances(alone)
    assert "in a single process: placements are judged as if its tokens had met 4 ranks, predicted" in only.sentence
    assert only.headlines[1].replace("\u00a0", " ") == (
        "In decode, batch 4, 4 tokens of context, of the placements compared on 4 ranks, predicted, "
        "all_size and replicated have the lowest P95†, 2.00 ×."
    )
    assert not only.compared["in_force"].any()
    assert "the busiest rank computed" not in " ".join(only.headlines)


class TestHtml:
    def test_the_tables_hold_the_figures(self, page: Page) -> None:
        rows = page.table("Placement", "Predicted step P50 (ms)")
        first = rows[0]
        assert first["Placement"] == "contiguous (in force)"
        assert first["P50 (max ÷ mean)"] == "2.25†"
        assert first["Fullest rank's weights"] == "2.30 kB"
        assert first["Predicted step P50 (ms)"] == "0.114"
        ranks = page.table("Rank", "Weighted FLOPs (a step)")
        assert [row["FLOPs (% of ranks')"] for row in ranks[:4]] == ["18.8 %", "6.2 %", "18.8 %", "56.2 %"]
        links = page.table("Direction", "Over")
        assert (links[2]["Over"], links[2]["Bytes (a step)"]) == ("other node", "1.02 kB")

    def test_the_rules_behind_the_figures_stand_beside_them(self, page: Page) -> None:
        for words in (
            "for every step and layer by itself",
            "As fast as this run's experts were in their best cell: 2.00 GFLOP/s",
            "the shortest time any rank spent in it is the transfer",
            "which are copied and not sent",
        ):
            assert words in page.text

    def test_choosing_experts_is_no_skip(self, page: Page) -> None:
        assert "Choice of experts" in page.text
        assert "No arm decided anything here" not in page.text
        assert "What the batch shares" not in page.text

    def test_a_run_without_experts_has_no_section(self, example: Run) -> None:
        text = report.render_html(example)
        assert 'id="balance"' not in text
        assert "#balance" not in text
        assert "Choice of experts" not in text

    def test_one_process_has_the_section_without_empty_parts(self, alone: Run) -> None:
        text = Page(report.render_html(alone)).text
        assert "judged as if its tokens had met 4 ranks" in text
        assert "Transfer and wait of each rank" not in text
        assert "Bytes by link" not in text

    def test_choices_without_loads_are_shown_by_themselves(self, tmp_path: Path) -> None:
        text = report.render_html(Run(write_expert_run(tmp_path / "run", ranks=0)))
        assert 'id="balance"' not in text
        assert "Choice of experts" in text


def test_markdown_has_every_part(experts: Run) -> None:
    text = report.render_markdown(experts)
    for title in ("ranks", "placements compared", "transfer and wait", "bytes by link", "expert time by width"):
        assert f"## Balance of mohge: {title}\n" in text
    assert "## Choice of experts by group: mohge, prefill-b4-l4" in text


def test_json_has_every_frame(experts: Run, example: Run) -> None:
    (only,) = json.loads(report.render_json(experts))["balance"]
    assert (only["arm"], only["ranks_ran"], only["placement_in_force"]) == ("mohge", 4, "contiguous")
    flops = [row["flops"] for row in only["frames"]["ranks"] if row["cell"] == PREFILL]
    assert flops == [2304, 768, 2304, 6912]
    assert set(only["frames"]) == {
        "ranks", "times", "links", "traffic", "widths", "expert_loads", "imbalances", "compared", "held",
        "window_tails",
    }  # fmt: skip
    assert json.loads(report.render_json(example))["balance"] == []


class TestFigures:
    def test_one_of_each_kind_a_cell(self, found: Balance, experts: Run) -> None:
        drawn = balance_report.cell_figures(found, PREFILL, Look.of(experts.manifest))
        assert list(drawn) == ["imbalance", "ranks", "times", "traffic"]

    def test_bytes_leave_local_copies_without_colour(self, found: Balance, experts: Run) -> None:
        figure = balance_report.cell_figures(found, PREFILL, Look.of(experts.manifest))["traffic"]
        dispatch = [list(line) for line in figure.data[0].z]
        assert dispatch[1] == [160.0, None, 96.0, 256.0]
        texts = {note.text.replace("\u00a0", " ") for note in figure.layout.annotations}
        assert {"<i>(224 B)</i>", "<b>256 B</b>", "160 B"} <= texts

    def test_time_of_a_rank_is_stacked(self, found: Balance, experts: Run) -> None:
        figure = balance_report.cell_figures(found, PREFILL, Look.of(experts.manifest))["times"]
        spent = {bar.name: list(bar.y) for bar in figure.data}
        assert spent["experts"] == pytest.approx([1152e-6, 384e-6, 1152e-6, 3456e-6])
        assert spent["wait for other ranks"] == pytest.approx([1800e-6, 1200e-6, 600e-6, 0])

    def test_imbalance_names_the_placement_in_force(self, found: Balance, experts: Run) -> None:
        figure = balance_report.cell_figures(found, DECODE, Look.of(experts.manifest))["imbalance"]
        p95 = next(trace for trace in figure.data if trace.name == "P95")
        assert dict(zip(p95.y, p95.x, strict=True)) == {
            "as run": 4.0, "<b>contiguous</b>": 4.0, "all_size": 2.0, "replicated": 2.0,
        }  # fmt: skip

    def test_windows_have_a_line_a_placement_and_percentile(self, found: Balance, experts: Run) -> None:
        drawn = balance_report.window_figures(found, Look.of(experts.manifest))
        assert [label.replace("\u00a0", " ") for label in drawn] == [
            "prefill, batch 4, 4 tokens: 16 tokens along an input",
            "prefill, batch 4, 4 tokens: 16 tokens across inputs",
            "decode, batch 4, 4 tokens of context: 8 tokens across inputs",
        ]
        lines = [trace for trace in next(iter(drawn.values())).data if trace.mode == "lines+markers"]
        assert len(lines) == 3 * 3
        assert list(lines[0].y) == [3.0, 2.25]

    def test_a_single_process_has_only_what_is_judged(self, alone: Run) -> None:
        (only,) = balances(alone)
        assert list(balance_report.cell_figures(only, PREFILL, Look.of(alone.manifest))) == ["imbalance"]


def test_layers_name_their_busiest_and_quietest_expert(found: Balance) -> None:
    second = balance_tables.layers(found.expert_loads).rows[1]
    assert second[1:] == ("2", "32", "g0e0 (2)", "4.00", "g0e1 (2)", "0", "6")
