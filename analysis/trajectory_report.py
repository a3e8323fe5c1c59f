"""Everything said of the tokens of one arm in one cell, computed once, and its part of the report.

Selection and order only: the figures are `trajectories`' and `trajectory_tests`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis import document, trajectory_charts, trajectory_tables
from analysis.charts import Look
from analysis.tables import Table
from analysis.token_paths import cells_with_paths, token_arms, token_paths
from analysis.trajectories import DOMAIN, EVERY, NEXT, breakdown, costs, forgetting, profile
from analysis.trajectory_tests import trajectory_tests
from analysis.wording import how_many
from profiler.store import Run


@dataclass(frozen=True)
class Trajectory:
    """Frames of the functions they are named after; `profile` by all three of its kinds, one below the other.

    `meanings`: what the method says of each of its signals. `memory`: what it keeps of a token through depth, a
    sentence, or nothing. `note` says what of the cell's tokens is not in them, or why there is something that they
    cannot say.
    """

    arm: str
    cell: str
    tokens: int
    inputs: int
    meanings: dict[str, str]
    profile: pd.DataFrame
    breakdown: pd.DataFrame
    costs: pd.DataFrame
    forgetting: pd.DataFrame
    tests: pd.DataFrame
    memory: str
    note: str


def trajectory(run: Run, arm: str, cell: str) -> Trajectory:
    """Read and compute all of it for one arm and cell."""
    paths = token_paths(run, arm, cell)
    notes = []
    if paths.incomplete:
        notes.append(f"{how_many(paths.incomplete, 'token')} left out, of which not every layer is recorded")
    if len(paths) and not paths.reference.any():
        scored = "none of these tokens predicts one of a reference"
        notes.append(f"{scored}; right and wrong are of all that were scored" if (paths.hit >= 0).any() else scored)
    if len(paths) and (paths.occurrences != paths.occurrences).all():
        notes.append("how often a token occurs is not recorded here")
    return Trajectory(
        arm=arm,
        cell=cell,
        tokens=len(paths),
        inputs=len(paths.requests),
        meanings={name: what for name, what in run.manifest.arm(arm).signals.items() if name in paths.signals},
        profile=pd.concat([profile(paths, by) for by in (EVERY, DOMAIN, NEXT)], ignore_index=True),
        breakdown=breakdown(paths),
        costs=costs(paths),
        forgetting=forgetting(run, arm),
        tests=trajectory_tests(paths),
        memory=memory(run, arm),
        note="; ".join(notes),
    )


def memory(run: Run, arm: str) -> str:
    """What an arm keeps of each token row during one forward."""
    kept = run.manifest.arm(arm).memory
    if kept is None:
        return ""
    return (
        f"Memory, {kept.form} form: at most {how_many(kept.bytes_per_row, 'byte')} a token row while one forward lasts."
    )


def trajectories(run: Run) -> list[Trajectory]:
    """One an arm that decides for tokens: of the held-out cell, or of the first cell that has decisions of it."""
    found = []
    for arm in token_arms(run):
        cells = cells_with_paths(run, arm)
        if cells:
            found.append(trajectory(run, arm, cells[0]))
    return [each for each in found if each.tokens]


def section(found: Trajectory, names: Mapping[str, str], look: Look, plot: document.Figures) -> dict[str, Any]:
    """What `trajectory.html.j2` shows."""
    whole, domains, answers = (found.profile[found.profile["by"] == by] for by in (EVERY, DOMAIN, NEXT))
    return {
        "name": names[found.arm],
        "cell": found.cell,
        "tokens": found.tokens,
        "inputs": found.inputs,
        "meanings": found.meanings,
        "note": found.note,
        "memory": found.memory,
        "profile": plot(trajectory_charts.profile(whole, found.arm, look)),
        "answers": plot(trajectory_charts.by_group(answers, found.arm, look)) if not answers.empty else None,
        "domains": plot(trajectory_charts.by_group(domains, found.arm, look)) if not domains.empty else None,
        "forgetting": plot(trajectory_charts.forgetting(found.forgetting, found.arm, look))
        if not found.forgetting.empty
        else None,
        **tables(found),
    }


def tables(found: Trajectory) -> dict[str, Table]:
    """Tables by name, each of a frame of `found`."""
    return {
        "cost_table": trajectory_tables.costs(found.costs),
        "test_table": trajectory_tables.tests(found.tests),
        "breakdown_table": trajectory_tables.breakdown(found.breakdown),
        "forget_table": trajectory_tables.forgetting(found.forgetting),
        "profile_table": trajectory_tables.profile(found.profile[found.profile["by"] == EVERY]),
    }


def markdown_parts(found: Trajectory, names: Mapping[str, str]) -> list[tuple[str, Table, str]]:
    """Title, table and text below of each part of the Markdown report."""
    of = tables(found)
    name = names[found.arm]
    return [
        (f"Cost of a token: {name}", of["cost_table"], found.note),
        (f"What trajectories go with: {name}", of["test_table"], ""),
        (f"Trajectories by group of tokens: {name}", of["breakdown_table"], ""),
        (f"Forget factors: {name}", of["forget_table"], found.memory),
        (f"Trajectories by layer: {name}", of["profile_table"], ""),
    ]


#: Frames of a `Trajectory` as the JSON report has them.
FRAMES = ("costs", "tests", "breakdown", "forgetting", "profile")
