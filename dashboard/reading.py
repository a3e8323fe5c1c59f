"""What every page does first: which run is meant, its analysis from the cache, and pickers that the address remembers.

Results are cached by the folder and the time its manifest was last written, so a run that goes on is read again when
it closes a cell. A run's state is never cached: a process can die without writing anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import duckdb
import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from analysis import agreement as agreements
from analysis import charts, expert_shares, kernels, ladder, ladder_tables, latency, routing, wording
from analysis.balance_report import Balance
from analysis.balance_report import balances as compute_balances
from analysis.held_out import HeldOut
from analysis.held_out import held_out as compute_held_out
from analysis.overview import Overview, catalogue, overview
from analysis.sharing import sharing
from analysis.tables import Table
from analysis.training import all_under
from analysis.trajectory_report import Trajectory
from analysis.trajectory_report import trajectory as compute_trajectory
from profiler.errors import InputError, StoreError
from profiler.store import MANIFEST, Run
from profiler.study_folder import find_studies

DEFAULT_ROOT = "runs"
#: Runs whose results are held at once.
RUNS_HELD = 8
#: Of the grid's font, digits and capitals included; and times the mean length from which the grid may cut a cell.
PIXELS_A_CHARACTER, STRAY = 7, 1.6


@dataclass(frozen=True)
class Results:
    """What `analysis` says of one run, apart from its state and its decisions."""

    ladder: pd.DataFrame
    wide: pd.DataFrame
    break_even: pd.DataFrame
    tails: pd.DataFrame
    segments: pd.DataFrame
    skips: pd.DataFrame
    sharing: pd.DataFrame
    expert_shares: pd.DataFrame


@dataclass(frozen=True)
class Reading:
    """One run, opened, with its cached results and the look of its arms."""

    run: Run
    results: Results
    look: charts.Look
    names: dict[str, str]

    def overview(self) -> Overview:
        """State, labels, rules and facts, as they are now."""
        return overview(self.run, self.results.ladder)


@st.cache_data(max_entries=RUNS_HELD, show_spinner="Reading the run")
def _results(path: str, written_ns: int) -> Results:
    """`written_ns` is here to be part of the cache's key."""
    run = Run(path)
    frame = ladder.ladder(run)
    return Results(
        ladder=frame,
        wide=ladder_tables.ladder_wide(frame),
        break_even=ladder_tables.break_even(run, frame),
        tails=latency.tails(run),
        segments=kernels.segments(run),
        skips=routing.skip_by_layer(run),
        sharing=sharing(run),
        expert_shares=expert_shares.expert_shares(run),
    )


@st.cache_data(max_entries=64, show_spinner="Reading the decisions")
def _heatmap(path: str, written_ns: int, arm: str, cell: str, request: str | None) -> routing.Heatmap:
    return routing.heatmap(Run(path), arm, cell, request)


@st.cache_data(max_entries=64, show_spinner=False)
def _top_kernels(path: str, written_ns: int, arm: str, cell: str, n: int) -> pd.DataFrame:
    return kernels.top(Run(path), arm, cell, n)


@st.cache_data(max_entries=RUNS_HELD, show_spinner="Reading held-out decisions")
def _held_out(path: str, written_ns: int) -> HeldOut:
    return compute_held_out(Run(path))


@st.cache_data(max_entries=RUNS_HELD, show_spinner="Weighing what each rank carried")
def _balances(path: str, written_ns: int) -> list[Balance]:
    return compute_balances(Run(path))


@st.cache_data(max_entries=32, show_spinner="Following the tokens through depth")
def _trajectory(path: str, written_ns: int, arm: str, cell: str) -> Trajectory:
    return compute_trajectory(Run(path), arm, cell)


def _written_ns(run: Run) -> int:
    return (run.path / MANIFEST).stat().st_mtime_ns


def heatmap(reading: Reading, arm: str, cell: str, request: str | None = None) -> routing.Heatmap:
    """`analysis.routing.heatmap`, cached."""
    return _heatmap(str(reading.run.path), _written_ns(reading.run), arm, cell, request)


def top_kernels(reading: Reading, arm: str, cell: str, n: int) -> pd.DataFrame:
    """`analysis.kernels.top`, cached."""
    return _top_kernels(str(reading.run.path), _written_ns(reading.run), arm, cell, n)


def held_out(reading: Reading) -> HeldOut:
    """`analysis.held_out.held_out`, cached."""
    return _held_out(str(reading.run.path), _written_ns(reading.run))


def balances(reading: Reading) -> list[Balance]:
    """`analysis.balance_report.balances`, cached."""
    return _balances(str(reading.run.path), _written_ns(reading.run))


def trajectory(reading: Reading, arm: str, cell: str) -> Trajectory:
    """`analysis.trajectory_report.trajectory`, cached."""
    return _trajectory(str(reading.run.path), _written_ns(reading.run), arm, cell)


def agreement(reading: Reading, others: Sequence[str], arm: str) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """`analysis.agreement` of an arm with that of other runs: pairs, layers, and why some runs were left out."""
    sides, refused = [(reading.run, arm)], []
    for path in others:
        try:
            run = Run(path)
            agreements.agreement([(reading.run, arm), (run, arm)])
            sides.append((run, arm))
        except (StoreError, InputError) as error:
            refused.append(str(error))
    if len(sides) == 1:
        return pd.DataFrame(columns=list(agreements.AGREEMENT_COLUMNS)), agreements.across([]), refused
    return agreements.agreement(sides), agreements.across(sides), refused


# -- which run ------------------------------------------------------------------------------------------------------


def root() -> Path:
    """The folder named on the command line, or `runs` where we are."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ROOT)


def listed() -> pd.DataFrame:
    """The catalogue of `root()`; where it is empty, says why and ends the page."""
    folder = root()
    if not folder.is_dir():
        st.info(
            f"There is no folder {wording.markdown(str(folder))}. Name one that is there: `gatewise dashboard RUNS`."
        )
        st.stop()
    found = catalogue(folder)
    if found.empty:
        others = [page for page, there in (("Training", all_under(folder)), ("Studies", find_studies(folder))) if there]
        st.info(
            f"{wording.markdown(str(folder))} holds no runs yet. Make one with `gatewise run`, then reload this page; "
            "a run is a folder with a manifest." + (f" What is there is on {' and '.join(others)}." if others else "")
        )
        st.stop()
    return found


def pick_run(found: pd.DataFrame) -> Reading:
    """Let the reader pick a run in the side bar and open it; a run that cannot be read says why and ends the page."""
    rows = {Path(str(row.path)).name: row for row in found.itertuples()}
    with st.sidebar:
        folder = pick("Run", list(rows), "run", lambda name: f"{name} ({rows[name].state})")
    row = rows[folder]
    if not wording.absent(row.error):
        unreadable(folder, str(row.error))
    try:
        run = Run(str(row.path))
        results = _results(str(row.path), _written_ns(run))
    except (StoreError, OSError, duckdb.Error) as error:
        unreadable(folder, str(error))
    return Reading(run, results, charts.Look.of(run.manifest), wording.arm_names(run.manifest))


def told(page: Callable[[], None]) -> None:
    """Draw a page; what it finds that cannot be read, or is gone meanwhile, is said in its place."""
    try:
        page()
    except (StoreError, InputError, OSError, duckdb.Error) as error:
        st.error(f"What this page shows cannot be read. {wording.markdown(str(error))}")


def unreadable(folder: str, why: str) -> NoReturn:
    """Say that a run cannot be read, and end the page."""
    st.error(f"**{wording.markdown(folder)}** cannot be read as a run. {wording.markdown(why)}")
    st.stop()


# -- what pages are made of -----------------------------------------------------------------------------------------


def pick(label: str, options: Sequence[str], name: str, shown: Callable[[str], str] = str) -> str:
    """A select box that stands in the address as `name` and keeps its value from page to page.

    The address wins when a page opens; then what was picked last under that name; then the first option.
    """
    key, kept = f"pick-{name}", f"kept-{name}"
    wishes = [st.session_state.get(key), st.query_params.get(name), st.session_state.get(kept)]
    st.session_state[key] = next((wish for wish in wishes if wish in options), options[0])
    chosen = st.selectbox(label, options, key=key, format_func=shown)
    st.session_state[kept] = chosen
    if st.query_params.get(name) != chosen:
        st.query_params[name] = chosen
    return chosen


def banners(found: Overview) -> None:
    """What must stand above every result: a run that is not whole, and its labels."""
    if found.state != "complete":
        st.error(wording.markdown(found.sentence))
    if found.labels:
        st.warning("\n".join(f"- {wording.markdown(wording.sentence(label))}" for label in found.labels))


def draw(figure: go.Figure, key: str) -> None:
    """A figure in the look of `charts`, not in Streamlit's."""
    st.plotly_chart(figure, theme=None, config=charts.CONFIG, key=key)


def show(table: Table, empty: str, *, prose: bool = False) -> None:
    """A table of text, or `empty` where it has no rows.

    Args:
        prose: break sentences over lines and show every row, instead of a grid to scroll and sort.
    """
    if not table.rows:
        st.caption(empty)
        return
    frame = table.frame()
    if prose:
        # A static table reads its cells as Markdown, a grid does not.
        st.table(frame.rename(columns=wording.markdown).map(wording.markdown), hide_index=True, border="horizontal")
        return
    settings = {
        title: st.column_config.TextColumn(
            width="large" if place in table.long else _width(title, [row[place] for row in table.rows]),
            alignment="right" if place in table.numeric else None,
        )
        for place, title in enumerate(table.columns)
    }
    st.dataframe(frame, hide_index=True, column_config=settings)


def _width(title: str, cells: Sequence[str]) -> int | None:
    """Pixels for a column whose cells the grid itself would cut; None where it gives them room.

    The grid takes cells of twice the mean length for strays and gives them no room, so that among dashes the first
    digits of an interval would be lost.
    """
    longest, mean = max(map(len, cells)), sum(map(len, cells)) / len(cells)
    return PIXELS_A_CHARACTER * max(longest, len(title)) + 24 if longest > STRAY * mean else None
