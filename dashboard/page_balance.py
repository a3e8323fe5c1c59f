"""The page of balance: what each rank computed, sent and waited for, and how even other placements would have been."""

from __future__ import annotations

import streamlit as st

from analysis import balance_report, balance_tables, expert_charts, wording
from analysis.balance_report import Balance
from analysis.balance_tables import of_one_cell
from dashboard.reading import Reading, balances, banners, draw, listed, pick, pick_run, show, told


def page() -> None:
    """Draw the page."""
    st.title("Balance")
    reading = pick_run(listed())
    banners(reading.overview())
    found = {each.arm: each for each in balances(reading)}
    if not found:
        st.info(
            "No loads of experts were recorded in this run. This page needs an arm that routes tokens to experts, as "
            "method mohge does, in one process or, spread over ranks, under torchrun."
        )
        st.stop()
    at_arm, at_cell = st.columns(2)
    with at_arm:
        arm = pick("Arm", list(found), "arm", reading.names.__getitem__)
    about = found[arm]
    labels = {str(row.cell): balance_tables.cell_label(row) for row in about.ranks.itertuples()}
    if not labels:
        st.info("Of no step that counts the loads were recorded: the run stopped before.")
        st.stop()
    with at_cell:
        cell = pick("Cell", list(labels), "cell", labels.__getitem__)
    st.markdown(wording.markdown(about.sentence))
    for sentence in about.headlines:
        st.markdown(f"- {wording.markdown(sentence)}")
    _cell(reading, about, cell)
    _placements(about, cell)
    _windows(reading, about, cell)


def _cell(reading: Reading, about: Balance, cell: str) -> None:
    said = balance_report.captions(about)
    drawn = balance_report.cell_figures(about, cell, reading.look)
    ranks, times, links, traffic, widths, loads = (
        frame[frame["cell"] == cell]
        for frame in (about.ranks, about.times, about.links, about.traffic, about.widths, about.expert_loads)
    )
    if "imbalance" in drawn:
        st.subheader("Imbalance")
        st.caption(wording.markdown(said["imbalance"]))
        draw(drawn["imbalance"], "imbalance")
    st.subheader("What each rank did" if about.layout.ran_on > 1 else "What the process computed")
    beside = [name for name in ("ranks", "times") if name in drawn]
    if beside:
        for place, name in zip(st.columns(len(beside)), beside, strict=True):
            with place:
                draw(drawn[name], name)
    show(of_one_cell(balance_tables.ranks(ranks)), "No loads were recorded here.")
    if not times.empty:
        with st.expander("Transfer and wait of each rank"):
            st.caption(wording.markdown(said["wait"]))
            show(of_one_cell(balance_tables.times(times)), "No collective was recorded here.")
    if not widths.empty:
        with st.expander("Expert time by width"):
            st.caption(wording.markdown(said["widths"]))
            show(of_one_cell(balance_tables.widths(widths)), "None was recorded here.")
    if "traffic" in drawn:
        st.subheader("Bytes from rank to rank")
        st.caption(wording.markdown(said["bytes"]))
        draw(drawn["traffic"], "traffic")
        show(of_one_cell(balance_tables.links(links)), "Nothing was sent.")
        with st.expander("By source and destination"):
            show(of_one_cell(balance_tables.traffic(traffic)), "Nothing was sent.")
    st.subheader("Load of each expert")
    draw(expert_charts.expert_heat(loads, about.arm, reading.look), "expert-loads")
    show(of_one_cell(balance_tables.layers(loads)), "No expert got a token.")


def _placements(about: Balance, cell: str) -> None:
    compared, imbalances = (frame[frame["cell"] == cell] for frame in (about.compared, about.imbalances))
    if compared.empty:
        return
    said = balance_report.captions(about)
    st.subheader("Placements, judged on the same recorded steps")
    show(of_one_cell(balance_tables.compared(compared)), "No placement was recorded.")
    st.caption(wording.markdown(said["predicted"]))
    with st.expander("Expert weights on each rank"):
        show(balance_tables.held(about.held), "No placement was recorded.")
    with st.expander("Imbalance by layer"):
        show(of_one_cell(balance_tables.imbalances(imbalances)), "Nothing to judge.")


def _windows(reading: Reading, about: Balance, cell: str) -> None:
    drawn = balance_report.window_figures(about, reading.look, cell)
    if not drawn:
        return
    st.subheader("Short windows: even in the mean, and in single steps")
    st.caption(wording.markdown(balance_report.captions(about)["windows"]))
    draw(drawn[pick("Windows of", list(drawn), "windows")], "windows")
    with st.expander("Percentiles over windows"):
        show(balance_tables.windows(about.window_tails), "No choices were recorded.")


if __name__ == "__main__":
    told(page)
