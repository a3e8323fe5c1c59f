"""The page of routing: each decision beside its prompt, skips by layer and domain, what the rows of a step share."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from analysis import routing_charts, tables, wording
from analysis.routing import Heatmap
from dashboard.reading import Reading, banners, draw, heatmap, listed, pick, pick_run, show


def page() -> None:
    """Draw the page."""
    st.title("Routing")
    reading = pick_run(listed())
    banners(reading.overview())
    skips = reading.results.skips
    if skips.empty:
        st.info("No arm of this run decided anything: nothing routes in it, or it stopped before the first decision.")
        st.stop()
    at_cell, at_arm, at_request = st.columns(3)
    labels = {str(row.cell): wording.row_label(row) for row in reading.results.wide.itertuples()}
    with at_cell:
        cell = pick("Cell", list(skips["cell"].unique()), "cell", labels.__getitem__)
    in_cell = skips[skips["cell"] == cell]
    with at_arm:
        arm = pick("Arm", list(in_cell["arm"].unique()), "arm", reading.names.__getitem__)
    grid = heatmap(reading, arm, cell)
    with at_request:
        request = pick("Request", grid.requests, "request")
    if grid.scope == "token" and request != grid.request:
        grid = heatmap(reading, arm, cell, request)
    _decisions(reading, grid, request)
    _shares(reading, in_cell[in_cell["arm"] == arm], arm)
    st.subheader("What the batch shares")
    st.caption(wording.SHARING)
    show(
        tables.sharing(reading.results.sharing, reading.names),
        "Nothing was recorded of an arm that can skip.",
        prose=True,
    )


def _decisions(reading: Reading, grid: Heatmap, request: str) -> None:
    st.subheader("Each decision")
    rows = "one row a token position of the request picked" if grid.scope == "token" else "one row a request"
    st.caption(f"One column a layer, {rows}. Hover for the gate value and the prompt.")
    if grid.note:
        st.info(wording.markdown(wording.sentence(grid.note)))
    colours = st.segmented_control("Colour by", ["choice taken", "gate value (0 to 1)"], default="choice taken")
    draw(routing_charts.decisions(grid, reading.look, by_gate=colours == "gate value (0 to 1)"), "decisions")
    text = grid.prompt
    if grid.scope == "sequence" and grid.texts is not None:
        text = dict(zip(grid.row_labels, grid.texts, strict=True))[request]
    st.markdown(f"**Prompt of {wording.markdown(request)}**")
    if text is None:
        st.caption("The text of this prompt was not kept.")
    else:
        st.code(text, language=None, wrap_lines=True)


def _shares(reading: Reading, skips: pd.DataFrame, arm: str) -> None:
    st.subheader("Share by layer and domain")
    choices = list(skips["choice"].unique())
    choice = pick("Choice", choices, "choice") if len(choices) > 2 else choices[0]
    shares = skips[skips["choice"] == choice]
    draw(routing_charts.skip_share(shares, arm, reading.look), "shares")
    show(tables.skip_shares(shares), "Nothing was decided.")


if __name__ == "__main__":
    page()
