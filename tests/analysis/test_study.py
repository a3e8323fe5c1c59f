"""A study of three seeds, every figure worked out by hand (see `seeds_study`), and what the reports make of it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from analysis import document, study_report, study_terminal
from analysis.spread import ALIKE, LAYERS, NOT_STABLE, PARTLY, RATIO, SAVED, SKIPPED, STABLE, TIME, TOO_WIDE
from analysis.study import Compared, compare
from profiler.errors import InputError, StoreError
from profiler.store import Run
from profiler.study_folder import STUDY, Study, find_studies, run_folder
from tests.analysis.seeds_study import CELL, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return write_study(tmp_path_factory.mktemp("study") / "by-hand")


@pytest.fixture(scope="module")
def found(study: Study) -> Compared:
    return compare(study)


def line(found: Compared, figure: str, where: str, arm: str = "routed") -> dict[str, Any]:
    lines = found.lines
    (row,) = lines[(lines["arm"] == arm) & (lines["figure"] == figure) & (lines["where"] == where)].to_dict("records")
    return {str(key): value for key, value in row.items()}


def seed_values(found: Compared, figure: str, where: str, arm: str = "routed") -> list[float]:
    rows = found.values
    kept = rows[(rows["arm"] == arm) & (rows["figure"] == figure) & (rows["where"] == where)]
    assert kept["seed"].tolist() == [0, 1, 2]
    return kept["value"].tolist()


def test_the_pattern(found: Compared) -> None:
    # Two of four layers in half of the inputs, twice; then one of four in all.
    assert seed_values(found, SKIPPED, "all") == pytest.approx([0.25, 0.25, 0.25])
    # No spread, and seeds 0 and 1 give half of their inputs 0.5 and half 0: an interval of 2 × 1.96 × 0.25 / √16.
    everywhere = line(found, SKIPPED, "all")
    assert everywhere["own_width"] == pytest.approx(2 * 1.96 * 0.25 / 4, abs=0.03)
    assert everywhere["verdict"] == TOO_WIDE
    assert seed_values(found, SKIPPED, "math") == pytest.approx([0.5, 0.5, 0.25])
    assert seed_values(found, SKIPPED, "code") == pytest.approx([0, 0, 0.25])
    math_line = line(found, SKIPPED, "math")
    assert (math_line["own_width"], math_line["verdict"]) == (0, NOT_STABLE)
    assert math_line["mean"] == pytest.approx(1.25 / 3)
    assert math_line["sd"] == pytest.approx(math.sqrt((2 * (0.25 / 3) ** 2 + (0.5 / 3) ** 2) / 2))
    assert found.patterns["ever_skipped"].tolist() == ["1, 2", "1, 2", "1"]
    assert found.patterns["most_skip"].tolist() == ["none", "none", "1"]  # just half is not most
    assert found.patterns["patterns"].tolist() == [2, 2, 1]
    assert found.patterns["varying"].tolist() == [2, 2, 0]
    rates = found.rates.pivot(index="seed", columns="layer", values="skip_rate")
    assert rates.to_numpy().tolist() == [[0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0, 1, 0, 0]]
    assert found.layers.set_index("layer")["ever_skipped_in"].tolist() == [0, 3, 2, 0]


def test_pairs_of_seeds(found: Compared) -> None:
    assert found.pairs[["first", "second"]].to_numpy().tolist() == [[0, 1], [0, 2], [1, 2]]
    assert found.pairs["jaccard_ever"].tolist() == [1, 0.5, 0.5]
    # Seeds 0 and 2: 1001 and 1011 agree in 3 of 4, as 1111 and 1011 do; by chance layers 1 and 2 in a half each.
    assert found.pairs["agreement"].tolist() == pytest.approx([1, 0.75, 0.75])
    assert found.pairs["by_chance"].tolist() == pytest.approx([0.75, 0.75, 0.75])
    overlap, alike = line(found, LAYERS, "pairs of seeds"), line(found, ALIKE, "pairs of seeds")
    assert overlap["mean"] == pytest.approx(2 / 3)
    assert overlap["verdict"] == NOT_STABLE
    assert alike["mean"] == pytest.approx(2.5 / 3)
    assert alike["verdict"] == PARTLY
    assert alike["note"].replace("\u00a0", " ") == "3 pairs; by chance 75.0 to 75.0 %; beyond it in 1 of 3 pairs"


def test_speed_and_the_control_that_no_seed_touches(found: Compared) -> None:
    assert seed_values(found, SAVED, CELL.name) == pytest.approx([0.2, 0.2, 0.4])
    saved = line(found, SAVED, CELL.name)
    assert (saved["seeds"], saved["twin"], saved["own_width"], saved["verdict"]) == (3, "dense", 0, NOT_STABLE)
    assert seed_values(found, TIME, CELL.name, "dense") == pytest.approx([1, 1, 1])
    assert line(found, TIME, CELL.name, "dense")["verdict"] == STABLE


def test_quality(found: Compared) -> None:
    for where in ("all", "math", "code"):
        assert seed_values(found, RATIO, where) == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(0.3)])
        assert line(found, RATIO, where)["verdict"] == NOT_STABLE


def test_sentences(found: Compared) -> None:
    routed, control = (said.replace("\u00a0", " ") for said in found.sentences)
    assert found.arms == ["routed", "dense"]
    assert control == "dense: step time, which no seed touches, is stable in 1 of 1 cells."
    assert "skips 25.0 % of layers (25.0 to 25.0 %), too wide to tell" in routed
    assert "the layers two seeds ever skip overlap by 0.67 (Jaccard, mean), not stable" in routed
    assert "two seeds decide 83.3 % of inputs × layers alike, beyond chance in part" in routed
    assert "step time saved is not stable in 1 of 1 cells" in routed
    assert "perplexity against the twin's is not stable in 3 of 3 domains" in routed


def test_the_order_of_lines(found: Compared) -> None:
    figures = list(dict.fromkeys(zip(found.lines["arm"], found.lines["figure"], strict=True)))
    assert figures == [
        ("dense", TIME),
        *(("routed", figure) for figure in (SKIPPED, LAYERS, ALIKE, SAVED, RATIO)),
    ]


def test_an_unfinished_study_shows_what_is_done_and_judges_nothing(tmp_path: Path) -> None:
    study = write_study(tmp_path / "half", done=2, failed="the loss is nan")
    found = compare(study)
    assert found.seeds == [0, 1]
    assert (found.lines["verdict"] == "").all()
    assert found.labels[:2] == ["2 of 3 seeds done; go on with --resume", "seed 2 failed: the loss is nan"]
    assert "the loss is nan" in study_report.render(study, "html")


def test_one_seed_and_none(tmp_path: Path) -> None:
    single = write_study(tmp_path / "single", [2])
    found = compare(single)
    assert found.pairs.empty
    assert found.rates["skip_rate"].tolist() == [0, 1, 0, 0]
    assert found.rules == ["With 1 seed nothing is judged; 3 are needed."]
    none = write_study(tmp_path / "none", done=0)
    assert compare(none).lines.empty
    for study in (single, none):
        for format in study_report.FORMATS:
            assert study_report.render(study, format)
    assert "No seed is done yet" in study_report.render(none, "html")


def test_other_conditions_are_said(tmp_path: Path) -> None:
    study = write_study(tmp_path / "moved")
    file = run_folder(study.path, 1) / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["machine"] = {"cpu": "another", "cores_usable": 2, "torch_threads": 1}
    file.write_text(json.dumps(manifest))
    labels = compare(study).labels
    assert (
        "not every seed was measured under the same conditions: cpu (seed 0: None, seed 1: another, seed 2: None)"
        in labels
    )


def test_the_reports_say_the_same(study: Study, found: Compared) -> None:
    whole = json.loads(study_report.render(study, "json"))
    assert (whole["name"], whole["seeds"], whole["trained"]) == ("by-hand", [0, 1, 2], ["routed"])
    assert len(whole["lines"]) == len(found.lines)
    assert whole["pairs"][1]["agreement"] == pytest.approx(0.75)
    rows = list(csv.DictReader(io.StringIO(study_report.render(study, "csv"))))
    assert len(rows) == len(found.values)
    saved = [row for row in rows if row["figure"] == SAVED]
    assert [(row["seed"], float(row["value"])) for row in saved] == [
        ("0", pytest.approx(0.2)), ("1", pytest.approx(0.2)), ("2", pytest.approx(0.4))
    ]  # fmt: skip
    assert {(row["verdict"], row["seeds"]) for row in saved} == {(NOT_STABLE, "3")}
    markdown = study_report.render(study, "md")
    assert "| pattern | Layers ever skipped: overlap (Jaccard) | pairs of seeds | 0.667 |" in markdown
    markdown = markdown.replace("\u00a0", " ")
    assert "| Step time saved (% of dense's median step) | prefill-b1-l4 | 20.0 % \\[20.0 %, 20.0 %\\] |" in markdown
    with pytest.raises(InputError, match="choose one of html, md, csv, json"):
        study_report.render(study, "pdf")


def test_the_page(study: Study, tmp_path: Path) -> None:
    html = study_report.render(study, "html")
    figures = html.count('class="plot"')
    # routed: the heat map, and strips of skip, step time and perplexity; dense: its step time.
    assert figures == 5 == html.count('type="application/json" id="figure-')
    assert html.index("<h2>routed</h2>") < html.index("<h2>dense</h2>")
    assert "<li>seed 2: <code>seed-2/run</code></li>" in html
    nasty = "<script>alert(1)</script>"
    other = study_report.render(write_study(tmp_path / "nasty", domain=nasty), "html")
    assert nasty not in other
    assert "&lt;script&gt;alert(1)" in other
    out = document.write(html, tmp_path / "page.html")
    assert out.read_text(encoding="utf-8") == html


def test_the_terminal(study: Study, found: Compared) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    for part in study_terminal.render(study, found):
        console.print(part)
    said = " ".join(console.export_text().split())
    assert "by-hand 3 of 3 seeds trained and measured" in said
    assert "dense (no seed touches this arm)" in said
    assert "layers ever skipped pairs of seeds 0.667 0.500 to 1.000 not stable" in said


def test_finding_studies_and_what_is_none(tmp_path: Path) -> None:
    one = write_study(tmp_path / "one", done=0).path
    (tmp_path / "other").mkdir()
    assert find_studies(tmp_path) == [one] == find_studies(one)
    with pytest.raises(StoreError, match=r"is not a study's folder: study.json: No such file"):
        Study(tmp_path / "other")
    (one / STUDY).write_text('{"format": 2}')
    with pytest.raises(StoreError, match="has format 2; this version reads up to 1"):
        Study(one)
    (one / STUDY).write_text('{"format": 1}')
    with pytest.raises(StoreError, match="does not fit format 1"):
        Study(one)
    (one / STUDY).write_text("[")
    with pytest.raises(StoreError, match="is not a JSON object"):
        Study(one)


def test_runs_of_a_study_open_like_any_other(study: Study) -> None:
    assert {seed: run.path for seed, run in study.runs().items()} == {
        seed: study.path / f"seed-{seed}" / "run" for seed in (0, 1, 2)
    }
    assert Run(run_folder(study.path, 2)).state == "complete"


def test_a_busy_machine_is_said_once(tmp_path: Path) -> None:
    study = write_study(tmp_path / "busy")
    for seed in (0, 2):
        file = run_folder(study.path, seed) / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["contention"] = {"contended": True, "sentence": f"Contended: {seed} % too much."}
        file.write_text(json.dumps(manifest))
    assert compare(study).labels == ["seed 0, 2: contention detected; by what, the report of each run says"]
