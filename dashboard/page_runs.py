"""The page of runs: every run of the folder, and for one of them how it ended, what it is and what it proved."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st

from analysis import charts, tables, wording
from dashboard.reading import banners, draw, listed, pick_run, show, told


def page() -> None:
    """Draw the page."""
    st.title("Runs")
    found = listed()
    _catalogue(found)
    reading = pick_run(found)
    about = reading.overview()
    st.header(wording.markdown(about.name), divider="gray")
    if about.state == "complete":
        st.markdown(wording.markdown(about.sentence))
    banners(about)
    for sentence in wording.headlines(reading.results.wide, reading.names):
        st.markdown(f"- {wording.markdown(sentence)}")
    with st.sidebar:
        for file, title in (
            ("page_ladder.py", "Its ladder"),
            ("page_routing.py", "Its routing"),
            ("page_balance.py", "Its balance"),
            ("page_held_out.py", "Its held-out text"),
            ("page_trajectories.py", "Its trajectories"),
        ):
            st.page_link(Path(__file__).parent / file, label=title, query_params={"run": reading.run.path.name})
    st.subheader("Cells")
    show(tables.cells(about), "No cells.", prose=True)
    st.subheader("Rules the run enforced")
    show(tables.rule_summary(about), "No rule was checked.", prose=True)
    checks = tables.rules(about)
    if checks.rows:
        with st.expander("Each check, by arm and cell", expanded=bool(checks.marked)):
            show(checks, "No rule was checked.", prose=True)
    st.subheader("Not measured on this machine")
    show(tables.unsupported(about), "Everything asked for could be measured.", prose=True)
    st.subheader("Telemetry")
    telemetry = reading.run.frame("telemetry")
    if telemetry.empty:
        st.caption("Nothing was sampled.")
    else:
        draw(charts.telemetry(telemetry), "telemetry")
    st.subheader("How it was made")
    if not about.outputs.empty:
        st.markdown("**Same tokens?**")
        st.caption(wording.OUTPUTS)
        show(tables.outputs(about), "Nothing was said.", prose=True)
    show(tables.facts(about), "Nothing is known.", prose=True)
    if reading.run.spec_yaml is not None:
        with st.expander("The spec as resolved"):
            st.code(reading.run.spec_yaml, language="yaml")


def _catalogue(found: pd.DataFrame) -> None:
    whole = found["error"].isna().all()
    st.dataframe(
        found.assign(
            path=[Path(path).name for path in found["path"]],
            created_utc=pd.to_datetime(found["created_utc"], utc=True, errors="coerce"),
        ),
        hide_index=True,
        column_order=[name for name in found.columns if not (name == "error" and whole)],
        column_config={
            "path": "Folder",
            "name": "Name",
            "state": "State",
            "created_utc": st.column_config.DatetimeColumn("Created (UTC)", format="YYYY-MM-DD HH:mm", timezone="UTC"),
            "model": "Model",
            "arms": "Arms",
            "cells_done": "Cells done",
            "cells_total": "Cells in all",
            "megabytes": st.column_config.NumberColumn("Size (MB)", format="%.1f"),
            "labels": "To know before reading",
            "error": "Why unreadable",
        },
    )


if __name__ == "__main__":
    told(page)
