"""Trajectories and matched arms where they are read: report, Markdown and JSON."""

from __future__ import annotations

import json
import math

import pytest

from analysis import report
from analysis.charts import Look
from analysis.matched import matched
from analysis.trajectory_charts import by_group, profile
from analysis.trajectory_charts import matched as matched_figure
from analysis.trajectory_report import trajectories
from profiler.store import Run
from tests.analysis.token_run import Token, arm, calibrated, write_tokens

NASTY = "</script><img src=x onerror=alert(1)> | <b>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Nine inputs of eight tokens; `other` skips everything in layer 1 and little in layer 2."""
    keys = [(f"i{k}", t) for k in range(9) for t in range(8)]
    tokens = {
        "mine": [Token(r, t, (0.6 + 0.01 * t, 0.4), (0.9, 0.8), hit=t % 2 == 0, occurrences=t + 1) for r, t in keys],
        "other": [Token(r, t, (0.1, 0.6 if t else 0.2), hit=t % 2 == 0, occurrences=t + 1) for r, t in keys],
    }
    arms = [
        arm("mine", calibration=calibrated(0.5, 0.5)),
        arm("other", options={"variant": "x"}, constants={}, memory=None),
    ]
    scores = {
        name: {f"i{k}": nll for k in range(9)} for name, nll in (("dense", 20.0), ("mine", 21.0), ("other", 22.0))
    }
    domains = {f"i{k}": NASTY if k % 2 else "prose" for k in range(9)}
    return write_tokens(tmp_path_factory.mktemp("report") / "run", tokens, arms, domains, scores)


def test_the_report_shows_every_arm_s_tokens(run: Run) -> None:
    html = report.render_html(run)
    assert html.count("72 tokens of 9 inputs in <code>quality</code>") == 2
    assert "p_j, the history score" in html
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    assert 'href="#trajectories"' in html
    assert html.count("Memory, dual form: at most 7,168 bytes a token row while one forward lasts.") == 1


def test_markdown_has_the_figures(run: Run) -> None:
    lines = report.render_markdown(run).splitlines()

    def row(title: str, first: str) -> list[str]:
        start = lines.index(f"## {title}")
        found = next(line for line in lines[start:] if line.startswith(f"| {first} |"))
        return [part.strip() for part in found.strip("|").split("|")]

    # `other` skips layer 1 of all, and layer 2 of one token in eight: 9 of 16 pairs.
    assert row("At the rates executed", "other")[1:2] == ["56.2 %"]
    assert row("At the rates executed", "other")[2:4] == ["mine", "6.25"]
    assert row("At the rates executed", "other")[6] == r"1.105 \[1.105 to 1.105\]"  # exp(1 ÷ 10)
    assert row("At the rates executed", "mine")[11:13] == ["50.0 %", "50.0 %"]
    assert row("Cost of a token: mine", "all")[1] == "50.0 %"
    assert row("Forget factors: mine", "1")[2:] == ["0.5000", "1.0"]
    assert sum("at most 7,168 bytes a token row" in line for line in lines) == 1
    assert row("Trajectories by layer: mine", "2")[2].startswith("0.400")
    assert row("Trajectories by group of tokens: mine", "position")[1] == "0"
    related = [line for line in lines if "gate, mean over depth | position" in line]
    assert len(related) == 2
    assert "| related |" in related[0]


def test_json_has_every_frame(run: Run) -> None:
    found = json.loads(report.render_json(run))
    assert [line["arm"] for line in found["held_out"]["matched"]] == ["mine", "other"]
    mine, other = found["trajectories"]
    assert (mine["arm"], mine["tokens"], mine["inputs"], mine["note"]) == ("mine", 72, 9, "")
    assert mine["forgetting"][1]["half_life_layers"] is None  # without end
    assert other["forgetting"] == []
    undefined = [line for line in mine["tests"] if line["verdict"] == "undefined"]
    assert undefined
    assert all(line["value"] is None and line["note"] for line in undefined)


def test_a_run_without_token_decisions_has_no_such_section(example: Run) -> None:
    assert trajectories(example) == []
    assert 'id="trajectories"' not in report.render_html(example)


def test_figures_draw_what_the_frames_hold(run: Run) -> None:
    look = Look.of(run.manifest)
    found = trajectories(run)[0].profile
    figure = profile(found[found["by"] == "all"], "mine", look)
    lines = [trace for trace in figure.data if trace.name == "median, 95 % interval"]
    assert [list(trace.y) for trace in lines] == [pytest.approx([0.63, 0.4]), pytest.approx([0.9, 0.8])]
    groups = by_group(found[found["by"] == "next token"], "mine", look)
    assert [trace.name for trace in groups.data] == ["right", "wrong"] * 2
    curve = matched_figure(matched(run), look)
    assert [list(trace.x) for trace in curve.data] == [[1.0], [pytest.approx(math.exp(0.1))], [50.0], [56.25]]
