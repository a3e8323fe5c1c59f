"""The page of routing: decisions beside prompts, skips and experts by layer and domain, what rows of a step share."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from analysis import balance_tables, expert_charts, expert_shares, routing_charts, tables, wording
from analysis.routing import Heatmap
from dashboard.reading import Reading, banners, draw, heatmap, listed, pick, pick_run, show, told


def page() -> None:
    """Draw the page."""
    st.title("Routing")
    reading = pick_run(listed())
    banners(reading.overview())
    skips, chosen = reading.results.skips, reading.results.expert_shares
    if skips.empty and chosen.empty:
        st.info("No arm of this run decided anything: nothing routes in it, or it stopped before the first decision.")
        st.stop()
    at_cell, at_arm, at_request = st.columns(3)
    labels = {str(row.cell): wording.row_label(row) for row in reading.results.wide.itertuples()}
    decided = {*skips["cell"], *chosen["cell"]}
    with at_cell:
        cell = pick("Cell", [name for name in labels if name in decided], "cell", labels.__getitem__)
    skips, chosen = skips[skips["cell"] == cell], chosen[chosen["cell"] == cell]
    arms = {*skips["arm"], *chosen["arm"]}
    with at_arm:
        arm = pick("Arm", [name for name in reading.names if name in arms], "arm", reading.names.__getitem__)
    if arm in set(skips["arm"]):
        grid = heatmap(reading, arm, cell)
        with at_request:
            request = pick("Request", grid.requests, "request")
        if grid.scope == "token" and request != grid.request:
            grid = heatmap(reading, arm, cell, request)
        _decisions(reading, grid, request)
        _shares(reading, skips[skips["arm"] == arm], arm)
    if arm in set(chosen["arm"]):
        _experts(reading, chosen[chosen["arm"] == arm], arm)
    if not reading.results.sharing.empty:
        st.subheader("What the batch shares")
        st.caption(wording.SHARING)
        show(
            tables.sharing(reading.results.sharing, reading.names),
            "Nothing was recorded of an arm that can skip.",
            prose=True,
        )


def _experts(reading: Reading, chosen: pd.DataFrame, arm: str) -> None:
    st.subheader("Choice of experts")
    st.caption(
        "A token takes several experts, so shares are of token-expert pairs. What each rank carried for it is on the "
        "page of balance."
    )
    domains = list(dict.fromkeys(chosen["domain"]))
    domain = pick("Domain", domains, "domain") if len(domains) > 1 else domains[0]
    draw(expert_charts.expert_heat(chosen[chosen["domain"] == domain], arm, reading.look), "experts")
    groups = expert_shares.group_shares(chosen)
    if groups["group"].nunique() > 1:
        draw(expert_charts.group_bars(groups, arm, reading.look), "groups")
    with st.expander("Shares by layer and group"):
        show(balance_tables.group_shares(groups[groups["domain"] == domain]), "Nothing was decided.")


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
    told(page)
