"""Reports: they need nothing but themselves, show the analysis' numbers, and treat every text as data."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import report
from analysis.ladder import ladder
from analysis.ladder_tables import ladder_wide
from analysis.latency import tails
from analysis.wording import headlines
from profiler.errors import InputError, StoreError
from profiler.store import Run
from tests.analysis import example_run
from tests.analysis.example_run import write_example_run

VOID = {"meta", "img", "link", "br", "input", "hr", "source", "embed", "base"}


class Page(HTMLParser):
    """What a browser would find: tags with attributes, scripts, styles, tables, and the text people read."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._within: list[str] = []
        self.feed(html)
        self.close()
        assert not self._within, f"left open: {self._within}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._within.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._within[-1] if self._within else ""
        if inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif inside == "style":
            self.styles.append(data)
        else:
            self.text += data.replace("\u00a0", " ")
            if {"td", "th"} & set(self._within):
                self.tables[-1][-1][-1] += data.replace("\u00a0", " ")

    def table(self, *titles: str) -> list[dict[str, str]]:
        """Rows of the first table that has these columns."""
        for rows in self.tables:
            if set(titles) <= set(rows[0]):
                return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        raise AssertionError(f"no table with {titles}")

    @property
    def data(self) -> list[Any]:
        """The JSON of figures and settings."""
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("type") == "application/json"]

    @property
    def programs(self) -> list[str]:
        return [text for attrs, text in self.scripts if "type" not in attrs]


@pytest.fixture(scope="module")
def page(example: Run) -> Page:
    return Page(report.render_html(example))


@pytest.fixture(scope="module")
def nasty() -> str:
    return "</script><script>alert(1)</script><img src=x onerror=alert(1)> | `code` \u2028 %{y} & <b>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, nasty: str) -> Run:
    """A run in which all that a user may write is an attack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(example_run.REQUESTS, "r0", (nasty, nasty, (1, 0, 1, 1)))
        patch.setitem(example_run.REQUESTS, "r1", ("code", "word " * 2000, (1, 1, 0, 1)))
        return Run(write_example_run(tmp_path_factory.mktemp("hostile") / "run", name=nasty))


@pytest.fixture(scope="module")
def hostile_page(hostile: Run) -> Page:
    return Page(report.render_html(hostile))


class TestSelfContained:
    def test_nothing_is_fetched(self, page: Page) -> None:
        for tag, attrs in page.tags:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base", "audio", "video"), tag
            assert "src" not in attrs, (tag, attrs)
            assert attrs.get("href", "#").startswith("#"), (tag, attrs)
            assert attrs.get("http-equiv", "").lower() != "refresh"
        assert not any("url(" in style or "@import" in style for style in page.styles)

    def test_plotly_is_inside_once(self, page: Page) -> None:
        library, draw = page.programs
        assert len(library) > 1_000_000
        assert "Plotly.newPlot" in draw

    def test_the_policy_admits_its_own_scripts_and_no_other(self, page: Page) -> None:
        policy = next(str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
        rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";") if rule.strip()}
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in page.programs
        ]
        assert rules["default-src"] == ["'none'"]
        assert rules["script-src"] == hashes
        assert "connect-src" not in rules

    def test_every_place_has_its_figure(self, page: Page) -> None:
        places = [a["data-figure"] for _, a in page.tags if "data-figure" in a]
        figures = [a.get("id") for a, _ in page.scripts if str(a.get("id")).startswith("figure-")]
        # Summary, six ladders, three segments, two break-evens, six shares, six grids, telemetry.
        assert len(places) == 1 + 6 + 3 + 2 + 6 + 6 + 1
        assert sorted(map(str, places)) == sorted(map(str, figures))

    def test_sections_named_in_the_list_exist(self, page: Page) -> None:
        names = {a["id"] for _, a in page.tags if "id" in a}
        links = [str(a["href"])[1:] for tag, a in page.tags if tag == "a"]
        assert links
        assert set(links) <= names


class TestNumbers:
    def test_the_summary_shows_the_example(self, page: Page) -> None:
        rows = page.table("Step time saved (% of twin)", "Pairs")
        row = next(r for r in rows if r["Cell"] == "prefill, batch 4, 32 tokens" and r["Arm"] == "routed")
        # 49,020 of 261,184 parameters, 5.1 ms against 6.0 ms, kernels likewise.
        assert row["Parameters skipped, net (% of backbone)"] == "18.8 %"
        assert row["Step time saved (% of twin)"] == "15.0 %"
        assert row["Kernel time saved (% of twin)"] == "15.0 %"
        assert (row["Median step (ms)"], row["Twin's (ms)"], row["Pairs"]) == ("5.10", "6.00", "7")

    def test_every_row_of_the_summary_is_the_frames(self, example: Run, page: Page) -> None:
        rows = page.table("Step time saved (% of twin)", "Pairs")
        wide = ladder_wide(ladder(example))
        assert [r["Arm"] for r in rows] == list(wide["arm"])
        for row, value in zip(rows, wide["flop_skip"], strict=True):
            shown = row["FLOPs skipped (% of twin)"]
            assert shown == "—" if pd.isna(value) else float(shown[:-2].replace("−", "-")) == round(100 * value, 1)

    def test_numerators_and_denominators_are_shown(self, page: Page) -> None:
        rows = page.table("Numerator", "Denominator")
        net = next(r for r in rows if (r["Arm"], r["Variant"]) == ("routed", "net"))
        assert (net["Numerator"], net["Denominator"]) == ("49.02 k parameters", "261.2 k parameters")

    def test_the_headline_names_each_phase_and_merges_nothing(self, page: Page) -> None:
        assert (
            "In prefill, routed (untrained router) skipped 18.8 % of the parameters (net) and a step took between "
            "10.0 % more time than dense (batch 1, 32 tokens; saved "
        ) in page.text
        assert "and 15.0 % less time (batch 4, 32 tokens; saved " in page.text
        assert "in decode, routed skipped 18.9 % of the parameters (net) and a step took 5.0 % more time" in page.text
        assert "speed-up" not in page.text.lower()
        assert "speedup" not in page.text.lower()

    def test_the_headline_says_added_where_more_was_added_than_skipped(self, example: Run) -> None:
        wide = ladder_wide(ladder(example)).assign(parameter_skip=-0.0123, step_time_saved=-12.371)
        text = " ".join(headlines(wide, dict.fromkeys(wide["arm"], "routed"))).replace("\u00a0", " ")
        assert "added 1.2 % of the parameters (net)" in text
        assert "1,237.1 % more time" in text

    def test_tails_are_the_frames_and_small_samples_are_marked(self, example: Run, page: Page) -> None:
        rows = page.table("P50 (ms)", "P95 (ms)", "P99 (ms)")
        found = tails(example)
        p99 = found[(found["percentile"] == 99) & (found["cell"] == "prefill-b4-l32") & (found["arm"] == "dense")]
        row = next(r for r in rows if r["Cell"] == "prefill, batch 4, 32 tokens" and r["Arm"] == "dense")
        assert row["P99 (ms)"] == f"{p99['value_ms'].iloc[0]:.2f}†"
        decode = next(r for r in rows if r["Cell"].startswith("decode") and r["Arm"] == "dense")
        # 28 samples leave 14 beyond the median and 2 beyond P95.
        assert decode["P50 (ms)"] == "1.00"
        assert decode["P95 (ms)"].endswith("†")
        assert "NumPy linear" in page.text

    def test_reasons_and_rules_are_shown(self, page: Page) -> None:
        rules = page.table("What it demands", "Held in (checks)")
        assert {r["Outcome"] for r in rules} == {"held"}
        assert rules[0]["Held in (checks)"].split(" of ")[0] == rules[0]["Held in (checks)"].split(" of ")[1]
        assert page.table("Not measured", "Reason")[0]["Reason"] == "no NVIDIA driver on this machine"
        assert any(r["Term"] == "Realised fraction" for r in page.table("Term", "Definition"))


class TestText:
    def test_prompts_and_names_are_inert_in_html(self, hostile_page: Page, nasty: str) -> None:
        page = hostile_page
        assert not [tag for tag, _ in page.tags if tag == "img"]
        assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
        assert len(page.programs) == 2
        assert "alert(1)" not in "".join(page.programs)
        prompts = page.table("Request", "Domain", "Prompt")
        assert prompts[0]["Prompt"] == nasty

    def test_they_are_inert_in_figures(self, hostile_page: Page) -> None:
        page = hostile_page
        raw = "".join(text for attrs, text in page.scripts if attrs.get("type") == "application/json")
        assert "<" not in raw
        # Plotly reads a little HTML in labels: what it is given must be escaped as well.
        drawn = json.dumps(page.data)
        assert "<img" not in drawn
        assert "<script" not in drawn
        assert "&lt;img" in drawn

    def test_markdown_keeps_its_tables_and_lets_no_tag_through(self, hostile: Run) -> None:
        text = report.render_markdown(hostile)
        assert "<img" not in text
        assert "<script" not in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        pipes = [line.replace("\\|", "").count("|") for line in rows]
        for before, after, line in zip(pipes, pipes[1:], rows[1:], strict=False):
            if not line.startswith("| ---"):
                continue
            assert before == after

    def test_long_prompts_are_cut(self, hostile_page: Page) -> None:
        prompts = [
            row[2] for rows in hostile_page.tables if rows[0] == ["Request", "Domain", "Prompt"] for row in rows[1:]
        ]
        long = [text for text in prompts if text.startswith("word")]
        assert {len(text) for text in long} == {report.PROMPT_CHARACTERS + 1}

    def test_withheld_text_is_nowhere(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", keeps_text=False))
        shown = {name: report.render(run, name) for name in report.FORMATS}
        assert not [name for name, text in shown.items() if "linked list" in text]
        assert "Text withheld" in shown["html"]


def test_how_much_of_a_page_is_made_is_told_on_the_way(tmp_path: Path) -> None:
    told: list[float] = []
    run = Run(write_example_run(tmp_path / "run"))
    assert report.write(run, "html", tmp_path / "page.html", told.append).exists()
    assert told == sorted(told)
    assert len(set(told)) > 10
    assert told[-1] == pytest.approx(1.0)


class TestUnfinished:
    def test_a_killed_run_says_so_and_shows_what_it_has(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", state="killed", stage="mid-cell", random_weights=True))
        page = Page(report.render_html(run))
        assert "Killed" in page.text
        assert "2 of 3 cells done" in page.text
        assert "Random weights" in page.text
        rows = page.table("Step time saved (% of twin)", "Pairs")
        assert "incomplete cell (run killed)" in rows[-1]["Note"]

    def test_a_run_killed_before_its_first_step(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", state="killed", stage="start"))
        page = Page(report.render_html(run))
        assert "No step was measured." in page.text
        assert "Nothing was measured in prefill-b1-l32, prefill-b4-l32, decode-b4-c32-n4." in page.text
        assert "No arm decided anything here." in page.text
        assert "Nothing was recorded." in report.render_markdown(run)

    def test_a_dense_run_claims_nothing(self, tmp_path: Path) -> None:
        page = Page(report.render_html(Run(write_example_run(tmp_path / "run", arms=["dense"]))))
        assert "No arm was compared with another here" in page.text
        assert "No arm was timed against a twin." in page.text

    def test_a_session_says_that_time_was_not_compared(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", origin="session", arms=["routed"]))
        page = Page(report.render_html(run))
        assert "what time that saved was not measured (there is no twin to compare with)" in page.text

    def test_a_failed_rule_and_contention_stand_out(self, tmp_path: Path) -> None:
        folder = write_example_run(tmp_path / "run", contention=True)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["rules"][1] |= {"passed": False, "detail": "96 rows executed, 128 recorded"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        html = report.render_html(Run(folder))
        page = Page(html)
        assert "96 rows executed, 128 recorded" in page.text
        assert "ontention" in page.text
        assert [r["Outcome"] for r in page.table("What it demands", "Held in (checks)")].count("FAILED") == 1
        assert [r["Outcome"] for r in page.table("What it demands", "Detail")].count("FAILED") == 1
        assert html.count('<tr class="marked">') == 2


class TestOtherFormats:
    def test_json_is_one_object_without_nan(self, example: Run) -> None:
        def refuse(name: str) -> None:
            raise AssertionError(f"{name} in JSON")

        whole = json.loads(report.render_json(example), parse_constant=refuse)
        assert {"overview", "ladder", "tails", "rules", "break_even"} <= set(whole)
        assert not {"run", "report"} & set(whole)
        frame = ladder(example)
        assert len(whole["ladder"]) == len(frame)
        for row, expected in zip(whole["ladder"], frame.to_dict("records"), strict=True):
            for name in ("value", "low", "high", "numerator", "denominator"):
                assert row[name] == (None if pd.isna(expected[name]) else expected[name])
            assert row["value_unit"] == ("ms" if row["rung"] == "step_time" else "share of 1")
        request = next(r for r in whole["ladder"] if r["rung"] == "request_time_saved")
        assert request["value"] is None
        assert request["note"].startswith("not measured")

    def test_csv_is_the_ladder(self, example: Run) -> None:
        read = pd.read_csv(io.StringIO(report.render_csv(example)))
        frame = ladder(example)
        assert list(read.columns) == [*list(frame.columns)[:11], "value_unit", *list(frame.columns)[11:]]
        pd.testing.assert_series_equal(read["value"], frame["value"], check_dtype=False)
        assert list(read["rung"]) == list(frame["rung"])

    def test_what_arms_said_is_shown_by_cell(self, example: Run) -> None:
        rows = Page(report.render_html(example)).table("Cell", "dense", "routed", "forced")
        assert [row["Cell"] for row in rows] == ["prefill-b1-l32", "prefill-b4-l32", "decode-b4-c32-n4"]
        assert {(row["dense"], row["routed"], row["forced"]) for row in rows} == {
            ("0123456789ab", "fedcba987654", "fedcba987654")
        }
        text = report.render_markdown(example)
        assert "| prefill-b1-l32 | 0123456789ab | fedcba987654 | fedcba987654 |" in text
        assert "The first 12 hex digits of the SHA-256 of the likeliest next tokens" in text
        told = json.loads(report.render_json(example))["overview"]["outputs"]
        assert told[0] == {"cell": "prefill-b1-l32", "arm": "dense", "sha256": "0123456789abcdef" * 4}

    def test_a_run_whose_outputs_are_unknown_shows_no_empty_table(self, tmp_path: Path) -> None:
        run = Run(write_example_run(tmp_path / "run", origin="session", arms=("routed",)))
        assert "Same tokens?" not in report.render_markdown(run)
        assert "Same tokens?" not in report.render_html(run)

    def test_a_timestamp_does_not_break(self, example: Run) -> None:
        html = report.render_html(example)
        assert "<time>2026-01-02T03:04:05Z</time>" in html
        assert "time { white-space: nowrap; }" in html

    def test_markdown_shows_the_same_figures(self, example: Run) -> None:
        text = report.render_markdown(example).replace("\u00a0", " ")
        row = next(x for x in text.splitlines() if x.startswith("| prefill, batch 4, 32 tokens | routed |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == "18.8 %"
        assert cells[6] == "15.0 %"


class TestWrite:
    def test_writes_the_file_and_returns_it(self, example: Run, tmp_path: Path) -> None:
        out = report.write(example, "csv", tmp_path / "deep" / "ladder.csv")
        assert out.read_text(encoding="utf-8") == report.render_csv(example)
        assert [p.name for p in out.parent.iterdir()] == ["ladder.csv"]

    def test_refuses_an_unknown_format_and_names_the_known(self, example: Run, tmp_path: Path) -> None:
        with pytest.raises(
            InputError, match="--format pdf: there is no such format; choose one of html, md, csv, json"
        ):
            report.write(example, "pdf", tmp_path / "x.pdf")

    def test_refuses_a_folder(self, example: Run, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="it is a folder"):
            report.write(example, "csv", tmp_path)

    def test_what_cannot_be_written_is_said_and_the_old_file_kept(self, example: Run, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("kept")
        with pytest.raises(StoreError, match="cannot write the report"):
            report.write(example, "csv", tmp_path / "file" / "ladder.csv")
        assert (tmp_path / "file").read_text() == "kept"

    @pytest.mark.parametrize("keep_footer", [False, True])
    def test_a_torn_table_is_named(self, tmp_path: Path, keep_footer: bool) -> None:
        folder = write_example_run(tmp_path / "run")
        for part in (folder / "steps").glob("*.parquet"):
            whole = part.read_bytes()
            half = len(whole) // 2
            part.write_bytes(whole[:4] + b"\xff" * half + whole[4 + half :] if keep_footer else b"PAR1 torn")
        with pytest.raises(StoreError, match="cannot be read"):
            report.render(Run(folder), "csv")


def test_reports_load_neither_torch_nor_transformers(example: Run) -> None:
    program = (
        "import sys\n"
        "from analysis import report\n"
        "from profiler.store import Run\n"
        "run = Run(sys.argv[1])\n"
        "report.render_html(run)\n"
        "print([m for m in ('torch', 'transformers', 'streamlit') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(example.path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
