"""The page of trainings: curves by update, skips by layer, held-out figures; of training folders and of runs' arms."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from analysis import training, training_charts, training_tables, wording
from analysis.training import Training
from dashboard.reading import draw, pick, root, show, told
from profiler.errors import InputError


def page() -> None:
    """Draw the page."""
    st.title("Training")
    folders = {_name(folder): folder for folder in training.all_under(root())}
    if not folders:
        st.info(
            f"{wording.markdown(str(root()))} holds no training, and no run with an arm whose checkpoint came with its "
            "log. `gatewise train RECIPE` makes one."
        )
        st.stop()
    with st.sidebar:
        chosen = pick("Training", list(folders), "training")
    try:
        found = training.training(folders[chosen])
    except InputError as error:
        st.error(f"**{wording.markdown(chosen)}** cannot be read. {wording.markdown(str(error))}")
        st.stop()
    _show(found)


def _name(folder: Path) -> str:
    """The folder below `root()`, as its reader knows it: `RUN, arm ARM` for what a run keeps."""
    if folder.parent.name == training.IN_RUN:
        return f"{folder.parents[1].name}, arm {folder.name}"
    return folder.name


def _show(found: Training) -> None:
    st.header(wording.markdown(found.name), divider="gray")
    (st.markdown if found.finished else st.warning)(wording.markdown(found.sentence))
    if found.steps.empty:
        st.caption("No update was made yet.")
    else:
        draw(training_charts.curves(found), "curves")
    if found.skipped and found.skip_steps:
        draw(training_charts.skips(found), "skips")
    if not found.skipped and not found.steps.empty:
        st.caption(training_charts.UNSKIPPED)
    st.subheader("Held-out figures")
    st.caption(
        "The training's own: gates decide as in training, which for a method that decides on whole sequences means "
        "that they see the words being scored."
    )
    if not found.held_out.empty:
        draw(training_charts.held_out(found), "held-out")
        if found.skipped:
            draw(training_charts.held_out_layers(found), "held-out-layers")
    show(training_tables.held_out(found), "Nothing was evaluated yet.")
    with st.expander("Every update"):
        show(training_tables.steps(found), "No update was made yet.")
    if found.recipe is not None:
        with st.expander("The recipe, as resolved"):
            st.code(found.recipe, language="yaml")
    st.subheader("How it was made")
    show(training_tables.facts(found), "Nothing is known.", prose=True)


if __name__ == "__main__":
    told(page)
