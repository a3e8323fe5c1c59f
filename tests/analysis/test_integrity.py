"""Run folders changed by hand: refused in a sentence, or told beside what is left; no traceback, and never silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import integrity, report, terminal
from analysis.ladder import ladder
from analysis.overview import catalogue, overview
from profiler.errors import StoreError
from profiler.store import Run
from tests.analysis.example_run import write_example_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integrity") / "run"
    write_example_run(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change(folder: Path, how: Callable[[Any], object]) -> None:
    """Change the manifest."""
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    how(found)
    path.write_text(json.dumps(found))


def rewrite(folder: Path, table: str, column: str, value: Any) -> None:
    """Put one value into every row of a column."""
    for part in (folder / table).glob("*.parquet"):
        rows = pq.read_table(part)
        place = rows.schema.get_field_index(column)
        kind = rows.schema.field(column).type
        pq.write_table(rows.set_column(place, column, pa.array([value] * len(rows), kind)), part)


def test_a_run_nobody_changed_is_whole(whole: Path) -> None:
    integrity.check(Run(whole))
    assert integrity.missing(Run(whole)) == []
    assert overview(Run(whole)).state == "complete"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: change(f, lambda m: m["arms"].clear()), r"rows of arm 'dense', and the manifest's arms are none"),
        (
            lambda f: change(f, lambda m: m["arms"].pop()),
            r"rows of arm 'forced', and the manifest's arms are dense, rou",
        ),
        (
            lambda f: change(f, lambda m: [arm["choices"].clear() for arm in m["arms"]]),
            r"no such choice of arm 'dense'",
        ),
        (lambda f: change(f, lambda m: m["arms"].append(m["arms"][0])), "the manifest has arm 'dense' more than once"),
        (lambda f: change(f, lambda m: m["cells"].append(m["cells"][0])), "the manifest has cell '.*' more than once"),
        (
            lambda f: rewrite(f, "steps", "wall_ns", 0),
            r"table steps has \d+ steps of 0 ns or less, which no step takes",
        ),
        (lambda f: rewrite(f, "rows", "rows", None), "table rows has [0-9,]+ rows without a value in column 'rows'"),
        (
            lambda f: rewrite(f, "gates", "cell", "q"),
            "table gates has rows of cell 'q', and the manifest's cells are dec",
        ),
        (lambda f: rewrite(f, "steps", "phase", "dream"), "table steps has a phase 'dream'"),
        (lambda f: rewrite(f, "steps", "step", 7), "table steps has 1 row more than once, by step, rank"),
        (lambda f: rewrite(f, "gates", "arm", None), "table gates has [0-9,]+ rows without a value in column 'arm'"),
        (lambda f: (f / "spec.yaml").write_text("{[:"), r"spec\.yaml: no measure.target_ci can be read from it"),
        (
            lambda f: (f / "spec.yaml").write_text("measure: [1]"),
            r"spec\.yaml: no measure.target_ci can be read from it",
        ),
        (lambda f: (f / "spec.yaml").write_bytes(b"\xff"), r"spec\.yaml must be UTF-8 text"),
    ],
)
def test_a_folder_that_would_give_wrong_figures_is_refused(
    folder: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(folder)
    with pytest.raises(StoreError, match=sentence):
        ladder(Run(folder))
    with pytest.raises(StoreError, match=sentence):
        report.render(Run(folder), "json")


@pytest.mark.parametrize("table", ["steps", "gates", "rows", "kernels", "prompts"])
def test_a_part_that_is_there_twice_is_refused(folder: Path, table: str) -> None:
    part = sorted((folder / table).glob("*.parquet"))[0]
    shutil.copy(part, part.with_name(f"{part.stem} (copy).parquet"))
    with pytest.raises(StoreError, match=rf"table {table}.* that were written: parts of it are there more than once"):
        ladder(Run(folder))


def test_steps_that_are_there_twice_are_seen_in_a_run_that_was_not_closed_too(folder: Path) -> None:
    change(folder, lambda m: (m.update(state="running", host="elsewhere"), [c.update(done=False) for c in m["cells"]]))
    part = sorted((folder / "steps").glob("*.parquet"))[0]
    rows = pq.read_metadata(part).num_rows
    shutil.copy(part, part.with_name(f"{part.stem} (copy).parquet"))
    with pytest.raises(StoreError, match=f"table steps has {rows:,} rows more than once"):
        ladder(Run(folder))


@pytest.mark.parametrize("table", ["steps", "gates", "rows", "segments", "kernels", "prompts", "telemetry"])
def test_rows_that_are_gone_are_told_where_complete_was_told(folder: Path, table: str) -> None:
    rows, of = len(Run(folder).frame(table)), "" if table == "telemetry" else " of 3 cells"
    shutil.rmtree(folder / table)
    about = overview(Run(folder))
    assert about.state == "damaged"
    assert about.sentence == (
        f"Data are missing that were written: table {table}{of} has 0 of {rows:,} rows. What is left is shown."
    )
    assert report.render(Run(folder), "md").splitlines()[2].startswith("Data are missing that were written: table ")
    assert any("Data are missing" in str(part) for part in terminal.render(Run(folder)))
    line = catalogue(folder.parent).iloc[0]
    assert (line["state"], line["error"]) == ("damaged", None)


def test_many_tables_that_are_gone_are_counted(folder: Path) -> None:
    tables = Run(folder).tables()
    for table in tables:
        shutil.rmtree(folder / table)
    sentence = overview(Run(folder)).sentence
    assert sentence.count("table ") == 4
    assert f"(and {len(tables) - 4} more tables)" in sentence


def test_a_damaged_part_is_unreadable_in_the_catalogue_and_hides_no_other_run(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "other")
    sorted((folder / "steps").glob("*.parquet"))[0].write_bytes(b"PAR1")
    found = catalogue(folder.parent)
    assert dict(zip(found["path"].map(lambda path: Path(path).name), found["state"], strict=True)) == {
        "other": "complete",
        "run": "unreadable",
    }
