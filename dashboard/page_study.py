"""The page of studies: one recipe trained with several seeds, and what of pattern, speed and quality is stable."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from analysis import charts, study_charts, study_report, study_tables, wording
from analysis.study import Compared, compare
from dashboard.reading import draw, pick, root, show, told, unreadable
from profiler.errors import InputError, StoreError
from profiler.study_folder import STUDY, Study, find_studies


def page() -> None:
    """Draw the page."""
    st.title("Studies")
    studies = {path.resolve().name: path for path in find_studies(root())}
    if not studies:
        st.info(
            f"{wording.markdown(str(root()))} holds no study of seeds. A spec with `train` and `seeds` makes one: "
            "`gatewise run layerroute-seeds-tiny`."
        )
        st.stop()
    with st.sidebar:
        name = pick("Study", list(studies), "study")
    try:
        study = Study(studies[name])
        found = _compared(str(study.path), (study.path / STUDY).stat().st_mtime_ns)
        first = next(iter(study.runs().values()), None)
    except (StoreError, InputError, OSError) as error:
        unreadable(name, str(error))
    st.header(wording.markdown(study.record.name), divider="gray")
    seeds = wording.how_many(len(study.record.seeds), "seed")
    st.markdown(f"{len(found.seeds)} of {seeds} trained and measured.")
    if found.labels:
        st.warning("\n".join(f"- {wording.markdown(wording.sentence(label))}" for label in found.labels))
    for sentence in found.sentences:
        st.markdown(f"- {wording.markdown(sentence)}")
    for rule in found.rules:
        st.caption(wording.markdown(rule))
    if first is not None:
        names = wording.arm_names(first.manifest)
        _arm(found, pick("Arm", found.arms, "arm", names.__getitem__), charts.Look.of(first.manifest))
        st.caption(f"Each seed's run is a run folder: `gatewise dashboard {Path(name) / 'seed-N' / 'run'}` opens one.")


@st.cache_data(max_entries=8, show_spinner="Comparing the seeds")
def _compared(path: str, written_ns: int) -> Compared:
    """`written_ns` is here to be part of the cache's key."""
    return compare(Study(path))


def _arm(found: Compared, arm: str, look: charts.Look) -> None:
    rates = found.rates[found.rates["arm"] == arm]
    if not rates.empty:
        draw(study_charts.heat(rates, arm, look), "heat")
    for place, figure in enumerate(study_report.strips(found, arm, look)):
        draw(figure, f"strip-{place}")
    st.subheader("What is stable over seeds")
    show(study_tables.spread(found, arm), "Nothing was measured.")
    st.subheader("Seed by seed")
    show(study_tables.by_seed(found, arm), "Nothing was measured.")
    if not rates.empty:
        st.subheader("Layers that each seed skips")
        show(study_tables.patterns(found, arm), "Nothing was decided.")
        st.subheader("Pairs of seeds")
        show(study_tables.pairs(found, arm), "One seed has nobody to agree with.")


if __name__ == "__main__":
    told(page)
