"""The page of trajectories: gates and signals of single tokens through depth, and what they go with."""

from __future__ import annotations

import streamlit as st

from analysis import trajectory_charts, trajectory_report, wording
from analysis.token_paths import cells_with_paths, token_arms
from analysis.trajectories import DOMAIN, EVERY, NEXT
from dashboard.reading import Reading, banners, draw, listed, pick, pick_run, show, told, trajectory


def page() -> None:
    """Draw the page."""
    st.title("Trajectories")
    reading = pick_run(listed())
    banners(reading.overview())
    cells = {arm: cells_with_paths(reading.run, arm) for arm in token_arms(reading.run)}
    arms = [arm for arm, of_arm in cells.items() if of_arm]
    if not arms:
        st.info(
            "No arm of this run decides for each token by itself whether a part runs, so no token has a path of "
            "its own through depth. Which experts tokens take is on the page of routing."
        )
        st.stop()
    at_arm, at_cell = st.columns(2)
    with at_arm:
        arm = pick("Arm", arms, "arm", reading.names.__getitem__)
    with at_cell:
        cell = pick("Cell", cells[arm], "cell")
    found = trajectory(reading, arm, cell)
    if not found.tokens:
        st.info("Of no token every layer is recorded here.")
        st.stop()
    tokens, inputs = wording.how_many(found.tokens, "token"), wording.how_many(found.inputs, "input")
    st.caption(f"{tokens} of {inputs}. Intervals are 95 % bootstraps over inputs.")
    if found.note:
        st.info(wording.markdown(wording.sentence(found.note)))
    _paths(reading, found)
    _cost_and_tests(found)


def _paths(reading: Reading, found: trajectory_report.Trajectory) -> None:
    for by, title in (
        (EVERY, "Through depth"),
        (NEXT, "Where the next token was right, and where it was wrong"),
        (DOMAIN, "By domain"),
    ):
        rows = found.profile[found.profile["by"] == by]
        if rows.empty:
            continue
        st.subheader(title)
        figure = trajectory_charts.profile if by == EVERY else trajectory_charts.by_group
        draw(figure(rows, found.arm, reading.look), f"profile-{by}")
        if by == EVERY:
            said = [f"**{wording.markdown(name)}**: {wording.markdown(what)}" for name, what in found.meanings.items()]
            st.caption("; ".join(["**gate**: what the decision is made from", *said]))
    if not found.forgetting.empty:
        st.subheader("What the memory keeps")
        draw(trajectory_charts.forgetting(found.forgetting, found.arm, reading.look), "forgetting")
        if found.memory:
            st.caption(found.memory)


def _cost_and_tests(found: trajectory_report.Trajectory) -> None:
    of = trajectory_report.tables(found)
    st.subheader("What a token cost")
    show(of["cost_table"], "Nothing was decided.")
    st.subheader("What trajectories go with")
    st.caption(
        "“Within inputs” compares the tokens of one input with each other, so that text, domain and length are the "
        "same on both sides; “between inputs” compares inputs. Relations that were not shown are listed too. That "
        "tokens differ where the model is right does not say that routing made it so."
    )
    show(of["test_table"], "Nothing could be tested.")
    with st.expander("Means by domain, position, frequency of the token, and next token"):
        show(of["breakdown_table"], "Nothing was decided.")
    with st.expander("Medians and quartiles by layer"):
        show(of["profile_table"], "Nothing was decided.")
    if of["forget_table"].rows:
        with st.expander("Forget factors"):
            show(of["forget_table"], "None.")


if __name__ == "__main__":
    told(page)
