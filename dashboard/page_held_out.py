"""The page of held-out text: what skipping costs in quality, what decisions follow, how alike several runs decide."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st

from analysis import answers, diagnostic_charts, diagnostic_tables, trajectory_charts, trajectory_tables, wording
from analysis.held_out import HeldOut
from analysis.tracking import SHARE
from dashboard.reading import Reading, agreement, banners, draw, held_out, listed, pick, pick_run, show, told


def page() -> None:
    """Draw the page."""
    st.title("Held-out text")
    runs = listed()
    reading = pick_run(runs)
    banners(reading.overview())
    about = held_out(reading)
    if not about.measured:
        st.info("Quality was not measured in this run. `gatewise evaluate RUN` measures it into a run of its own.")
        st.stop()
    _quality(reading, about)
    if about.arms:
        arm = pick("Arm", about.arms, "arm", reading.names.__getitem__)
        _decisions(reading, about, arm)
        _agreement(reading, runs, arm)


def _quality(reading: Reading, about: HeldOut) -> None:
    st.subheader("Perplexity")
    st.caption(
        "Every arm scores the same continuations. Gates are decided on the prompt alone and frozen before anything is "
        "scored. Intervals are 95 % bootstraps over items."
    )
    show(diagnostic_tables.perplexity(about.perplexity, reading.names), "Nothing was scored.")
    if not about.accuracy.empty:
        st.subheader("Multiple choice")
        st.caption("Right: of an item's choices the reference has the largest mean log-likelihood a token.")
        show(diagnostic_tables.accuracy(about.accuracy, reading.names), "")
    if not about.retain.empty:
        st.subheader("Retain")
        st.caption(answers.RETAIN_RULE)
        show(diagnostic_tables.retain(about.retain, reading.names), "")
    if about.matched.worth_showing:
        st.subheader("At the rates executed: every arm that skips against the first")
        for sentence in about.matched.sentences:
            st.markdown(wording.markdown(sentence))
        scored = about.matched.table[about.matched.table["perplexity"].notna()]
        if not scored.empty:
            draw(trajectory_charts.matched(scored, reading.look), "matched")
        show(trajectory_tables.matched(about.matched.table, reading.names), "Nothing was decided.")
    st.subheader("Does routing beat doing nothing clever?")
    for sentence in about.sentences:
        st.markdown(f"- {wording.markdown(sentence)}")
    show(diagnostic_tables.pairs(about.pairs, reading.names), "Fewer than two arms skip anything in this run.")
    st.subheader("Layers that could be skipped, and skips that were executed")
    show(diagnostic_tables.eligibility(about.eligibility, reading.names), "No arm decided anything.")


def _decisions(reading: Reading, about: HeldOut, arm: str) -> None:
    def of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["arm"] == arm]

    rates, flips, drift, tracks = (of(f) for f in (about.rates, about.flips, about.drift, about.tracks))
    st.subheader("Decisions by layer")
    by_token = reading.run.manifest.arm(arm).by_token
    draw(diagnostic_charts.layers(rates, flips, arm, reading.look, by_token=by_token), "layers")
    show(diagnostic_tables.layers(rates, flips, by_token=by_token), "Nothing was decided.")
    if not drift.empty:
        st.subheader("Logits at the start and now")
        draw(diagnostic_charts.drift(drift, arm, reading.look), "drift")
        show(diagnostic_tables.drift(drift), "Nothing was recorded.")
    st.subheader("What decisions follow")
    st.caption(
        "Spearman's partial correlation over held-out inputs with the prompt's length held fixed, tested by shuffling. "
        "Perplexity is that of the continuation under the arm's twin. Relations that were not shown are listed too."
    )
    tested = tracks[(tracks["target"] == SHARE) & tracks["rho"].notna()]
    if not tested.empty:
        draw(diagnostic_charts.forest(tested, arm, reading.look), "forest")
    show(diagnostic_tables.tracks(tracks), "Nothing could be tested.")
    with st.expander("What goes with length anyway"):
        show(diagnostic_tables.confounds(of(about.confounds)), "Nothing is known of the inputs.")


def _agreement(reading: Reading, runs: pd.DataFrame, arm: str) -> None:
    st.subheader("Agreement with other runs")
    st.caption(
        f"Runs of another seed, whose arm is called {wording.markdown(arm)} too. Only inputs that both saw count."
    )
    readable = runs[runs["error"].isna()]
    others = [str(path) for path in readable["path"] if Path(str(path)).name != reading.run.path.name]
    picked = st.multiselect("Other runs", others, format_func=lambda path: Path(path).name, key="agreement-with")
    if not picked:
        return
    pairs, layers, refused = agreement(reading, picked, arm)
    for why in refused:
        st.warning(wording.markdown(why))
    show(diagnostic_tables.agreement(pairs), "No other run has such an arm.")
    show(diagnostic_tables.across(layers), "No other run has such an arm.")


if __name__ == "__main__":
    told(page)
