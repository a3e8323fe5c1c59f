"""Held-out quality and diagnostics where they are read: report, Markdown, JSON and terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from analysis import report, terminal
from analysis.held_out import held_out
from profiler.store import Run
from tests.analysis.decisions_run import Arm, Input, write_decisions
from tests.analysis.example_run import write_example_run

N = 24
NASTY = "</script><img src=x onerror=alert(1)> | <b>"


def write(folder: Path, domain: str = "math") -> Run:
    """24 inputs; `routed` skips layer 1 of long ones, `cut` layer 2 of all; skipping costs 0.2 and 0.4 nats a token."""
    rng = np.random.default_rng(0)
    inputs = [
        Input(
            f"i{k}", domain if k % 2 else "prose", 20 + k, float(rng.normal(500, 40)),
            {"dense": 10.0 + k % 5, "routed": 12.0 + k % 5, "cut": 14.0 + k % 5},
        )
        for k in range(N)
    ]  # fmt: skip
    routes = ["111" if k < N // 2 else "101" for k in range(N)]
    logits = [[1.0, 0.5 if k < N // 2 else -0.5, 1.0] for k in range(N)]
    arms = [
        Arm("routed", routes, starts=[1.0, -1.0, 1.0], logits=logits),
        Arm("cut", ["110"] * N, method="static_depth"),
    ]
    return write_decisions(folder, inputs, arms)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("held-out") / "run")


def test_everything_is_gathered_arm_below_arm(run: Run) -> None:
    found = held_out(run)
    assert found.measured
    assert found.arms == ["routed", "cut"]
    assert found.flips["arm"].tolist() == ["routed"] * 3 + ["cut"] * 3
    assert set(found.rates["phase"]) == {"prefill"}
    assert found.drift["arm"].tolist() == ["routed"] * 3
    assert set(found.tracks["arm"]) == {"routed", "cut"}
    assert found.sentences == [  # exp(−0.2) = 0.8187
        "routed is better than cut: perplexity × 0.819 [0.819, 0.819] over 24 items, 0.5 against 1.0 layers skipped."
    ]


def test_a_run_without_a_quality_pass_has_nothing_and_the_report_says_how_to_get_it(example: Run) -> None:
    found = held_out(example)
    assert (found.measured, found.arms, found.sentences) == (False, [], [])
    assert "Not measured: the spec has no quality section." in report.render_html(example)
    assert "Held-out" not in report.render_markdown(example)


def test_the_report_shows_negative_results_beside_positive_ones(run: Run) -> None:
    html = report.render_html(run)
    assert html.count('<div class="plot"') == 2 + 1 + 1  # layers of two arms, logits of one, relations of one
    lines = report.render_markdown(run).splitlines()
    start = lines.index("## What decisions follow: routed")
    tested = [line.split(" | ") for line in lines[start + 4 :] if line.startswith("|")][:9]
    share = [line for line in tested if "share of layers skipped" in line[0]]
    assert [(line[1], line[8]) for line in share] == [
        ("length", "related"),
        ("perplexity", "no relation shown"),
        ("mean token rank", "no relation shown"),
        ("domain prose", "no relation shown"),
    ]
    assert share[0][2] == "nothing"
    assert {line[2] for line in share[1:]} == {"length"}
    assert {line[7] for line in share} == {"Holm"}
    assert any("layer 1 skipped" in line[0] and line[7] == "Benjamini–Hochberg" for line in tested)


def test_tables_of_the_report_have_the_figures(run: Run) -> None:
    lines = report.render_markdown(run).splitlines()

    def row(title: str, first: str) -> list[str]:
        start = lines.index(f"## {title}")
        found = next(line for line in lines[start:] if line.startswith(f"| {first} |"))
        return [part.strip() for part in found.strip("|").split("|")]

    dense = math.exp(sum(10 + k % 5 for k in range(N)) / (10 * N))
    assert row("Held-out perplexity", "dense")[3] == f"{dense:.3f}"
    assert row("Held-out perplexity", "routed")[5:8] == ["1.221", "1.221 to 1.221", "worse"]
    assert row("Eligible against executed", "routed")[1:8] == ["24", "3", "1", "1", "0", "1", "2"]
    assert row("Eligible against executed", "routed")[8:10] == ["33.3 %", "16.7 %"]
    assert row("Held-out decisions by layer: routed", "1")[2] == "50.0 %"
    assert row("Decision logits, start and now: routed", "1")[1:4] == ["−1.00", "0.00", "1.00"]


def test_the_json_report_has_every_frame(run: Run) -> None:
    found = json.loads(report.render_json(run))["held_out"]
    assert set(found) == {
        "sentences", "matched", "perplexity", "accuracy", "retain", "pairs", "eligibility", "rates", "flips", "tracks",
        "confounds", "drift",
    }  # fmt: skip
    assert [line["flip_rate"] for line in found["flips"]] == [0, 0.5, 0, 0, 0, 0]
    assert any(line["verdict"] == "undefined" and line["rho"] is None for line in found["tracks"])


def test_names_of_domains_and_arms_are_data(tmp_path: Path) -> None:
    html = report.render_html(write(tmp_path / "run", domain=NASTY))
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html


@pytest.mark.parametrize("timed", [False, True])
def test_the_terminal_says_what_routing_is_worth(tmp_path: Path, run: Run, timed: bool) -> None:
    shown = run if not timed else Run(write_example_run(tmp_path / "timed"))
    console = Console(width=80, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    for part in terminal.render(shown):
        console.print(part)
    text = console.export_text()
    console.file.close()
    assert max(len(line) for line in text.splitlines()) <= 80
    if timed:
        assert "Held-out" not in text
        return
    assert "Of 240 tokens in 24 items" in text
    routed = next(line for line in text.splitlines() if line.startswith("routed"))
    value = math.exp((24 * 12 + 46) / 240)  # k mod 5 adds up to 46 over 24 items
    assert routed.split()[-5:] == [f"{value:.3f}", "1.221", "[1.221,", "1.221]", "worse"]
    assert "routed is better than cut: perplexity × 0.819" in text
    assert "Nothing was measured." not in text
