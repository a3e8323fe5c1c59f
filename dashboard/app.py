"""The dashboard: `streamlit run dashboard/app.py -- RUNS`, where RUNS is a run folder or a folder of them.

Eight pages, each with an address of its own that carries what is picked (`/ladder?run=…&cell=…`), so that a view can
be linked to. What the pages show comes from `analysis`; nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

PAGES = {
    "page_runs.py": ("Runs", "runs"),
    "page_ladder.py": ("Ladder", "ladder"),
    "page_routing.py": ("Routing", "routing"),
    "page_balance.py": ("Balance", "balance"),
    "page_held_out.py": ("Held-out text", "held-out"),
    "page_trajectories.py": ("Trajectories", "trajectories"),
    "page_training.py": ("Training", "training"),
    "page_study.py": ("Studies", "studies"),
}


def main() -> None:
    """Set up the window and hand over to the page asked for."""
    st.set_page_config(page_title="Gatewise", layout="wide")
    here = Path(__file__).parent
    pages = [st.Page(here / file, title=title, url_path=address) for file, (title, address) in PAGES.items()]
    # The page at the root has no address besides, so that the first stands there once more, and once in the menu.
    first, (title, address) = next(iter(PAGES.items()))
    pages[0] = st.Page(here / first, title=title, default=True)
    pages.append(st.Page(here / first, title=title, url_path=address, visibility="hidden"))
    st.navigation(pages).run()


if __name__ == "__main__":
    main()
