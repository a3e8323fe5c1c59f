"""The page of the ladder: what was skipped and what time was saved, rung by rung for one cell, then for all."""

from __future__ import annotations

from itertools import cycle

import streamlit as st

from analysis import charts, latency, tables, wording
from dashboard.reading import Reading, banners, draw, listed, pick, pick_run, show, told, top_kernels

KERNELS_SHOWN = 15
#: Characters of an arm's name that a legend in half a page has room for.
NAME_IN_HALF = 50


def page() -> None:
    """Draw the page."""
    st.title("Ladder")
    reading = pick_run(listed())
    banners(reading.overview())
    results = reading.results
    if results.wide.empty:
        st.info("This run has no cells.")
        st.stop()
    labels = {str(row.cell): wording.row_label(row) for row in results.wide.itertuples()}
    at_cell, at_arm = st.columns(2)
    with at_cell:
        cell = pick("Cell", list(labels), "cell", labels.__getitem__)
    compared = results.ladder[(results.ladder["cell"] == cell) & (results.ladder["rung"] == "step_time_saved")]
    arm = None
    if not compared.empty:
        with at_arm:
            arm = pick("Arm", list(compared["arm"].unique()), "arm", reading.names.__getitem__)
    _rungs(reading, cell, arm)
    _all_cells(reading)
    _segments(reading, cell)
    st.subheader("Tails of step time")
    st.caption(
        f"Percentiles of step wall time by the rule {latency.RULE}. {tables.SMALL}: fewer than "
        f"{latency.SAMPLES_BEYOND} samples beyond it, too few to trust."
    )
    show(tables.tails(results.tails[results.tails["cell"] == cell], reading.names), "No step was measured here.")


def _rungs(reading: Reading, cell: str, arm: str | None) -> None:
    if arm is None:
        st.info("No arm of this run skips anything or has a twin, so there is no ladder; step times are below.")
        shown = reading.results.ladder[reading.results.ladder["cell"] == cell]
        show(tables.ladder_detail(shown), "No step was measured here.")
        return
    in_cell = reading.results.ladder[reading.results.ladder["cell"] == cell]
    rows = in_cell[in_cell["arm"] == arm]
    headline = tables.headline_rows(rows)
    if headline.loc[headline["rung"].isin(wording.RUNG_NAMES), "value"].notna().any():
        span = charts.ladder_span(tables.headline_rows(in_cell))
        twin = reading.run.manifest.arm(arm).twin
        draw(charts.ladder(headline, arm, reading.look, twin, span), "ladder")
        st.caption("Each rung has its own 100 %. A pale bar marks what was lost since the rung above.")
    else:
        st.info("No rung of this arm was measured in this cell.")
    every = st.toggle("All variants of each rung, with the other arms", key="all-variants")
    show(tables.ladder_detail(in_cell if every else headline), "Nothing was recorded.")


def _all_cells(reading: Reading) -> None:
    wide, unmeasured = tables.split_measured(reading.results.wide)
    st.subheader("All cells")
    if wide[["parameter_skip", "flop_skip", "step_time_saved"]].notna().any(axis=None):
        draw(charts.skip_against_saving(wide, reading.look), "all-cells")
    show(tables.ladder_summary(wide), "No step was measured.")
    if unmeasured:
        st.caption(f"Nothing was measured in {wording.markdown(', '.join(unmeasured))}.")
    st.subheader("Batch break-even")
    timed = wide[wide["step_time_saved"].notna()]
    swept = list(timed.groupby(["phase", "length"], sort=False))
    beside = 2 if all(len(reading.names[arm]) <= NAME_IN_HALF for arm in timed["arm"].unique()) else 1
    for place, ((phase, length), rows) in zip(cycle(st.columns(beside)), swept, strict=False):
        with place:
            draw(charts.break_even(rows, reading.look), f"break-even-{phase}-{length}")
    show(tables.break_even(reading.results.break_even), "No arm was timed against a twin.", prose=True)


def _segments(reading: Reading, cell: str) -> None:
    found = reading.results.segments[reading.results.segments["cell"] == cell]
    st.subheader("Where the time goes")
    if found.empty:
        st.caption("No instrumented step was recorded here.")
        return
    st.caption(
        "Mean self time of each part of an instrumented step in the cell picked above; grey is in the step and in no "
        "part."
    )
    disturbed = sorted(found.loc[found["marked"].astype(bool), "arm"].unique())
    if disturbed:
        st.warning(
            f"The recorder disturbed {wording.markdown(', '.join(disturbed))} here: bare ÷ instrumented is outside "
            "0.9 to 1.1."
        )
    draw(charts.segments(found, reading.look), "segments")
    show(tables.segments(found, reading.names), "No instrumented step was recorded here.")
    with st.expander("Kernels with the most time, from traced steps"):
        for arm in found["arm"].unique():
            st.markdown(f"**{wording.markdown(reading.names[str(arm)])}**")
            show(tables.kernels(top_kernels(reading, str(arm), cell, KERNELS_SHOWN)), "No step was traced.")


if __name__ == "__main__":
    told(page)
