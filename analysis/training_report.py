"""The report of a training: self-contained HTML, Markdown, CSV or JSON, from its folder alone.

`section` is the same part inside of a run's report, for an arm whose checkpoint came with its log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import document, training_charts, training_tables, wording
from analysis.training import Training, training
from profiler.errors import InputError

#: A page with more updates than this leaves their table to the CSV.
STEPS_SHOWN = 1000


def section(found: Training, plot: document.Figures) -> dict[str, Any]:
    """What `training.html.j2` shows; figures of what the log does not hold yet are None."""
    stepped, evaluated = not found.steps.empty, not found.held_out.empty
    return {
        "name": found.name,
        "sentence": found.sentence,
        "finished": found.finished,
        "curves": plot(training_charts.curves(found)) if stepped else None,
        "skips": plot(training_charts.skips(found)) if found.skipped and found.skip_steps else None,
        "held_out": plot(training_charts.held_out(found)) if evaluated else None,
        "layers": plot(training_charts.held_out_layers(found)) if found.skipped and evaluated else None,
        "unskipped": "" if found.skipped or not stepped else training_charts.UNSKIPPED,
        "held_out_table": training_tables.held_out(found),
        "steps": training_tables.steps(found) if len(found.steps) <= STEPS_SHOWN else None,
        "facts": training_tables.facts(found),
        "recipe": found.recipe,
    }


def render_html(found: Training) -> str:
    """One HTML document that needs nothing else: no network, no other file."""
    figures = document.Figures()
    return document.page("training_report.html.j2", figures, part=section(found, figures))


def render_markdown(found: Training) -> str:
    """The tables as Markdown, with the recipe; no curves."""
    lines = [f"# {wording.markdown(found.name)}", "", wording.markdown(found.sentence)]
    for title, table in (
        ("Held-out figures", training_tables.held_out(found)),
        ("Updates", training_tables.steps(found)),
        ("How it was made", training_tables.facts(found)),
    ):
        lines += ["", f"## {title}", "", *document.markdown_table(table)]
    if found.recipe is not None:
        # Indented, not fenced: nothing in a recipe can end the block.
        lines += ["", "## Recipe", "", *(f"    {line}" for line in found.recipe.splitlines())]
    return "\n".join(lines) + "\n"


def render_csv(found: Training) -> str:
    """A line an update, with the share that skipped each routed layer where the log has it."""
    names = [f"skip_{layer}" for layer in range(len(found.skip_LK))]
    skips = pd.DataFrame(found.skip_LK.T, columns=names, index=found.skip_steps).reindex(found.steps["step"])
    text: str = pd.concat([found.steps, skips.reset_index(drop=True)], axis=1).to_csv(index=False, lineterminator="\n")
    return text


def render_json(found: Training) -> str:
    """One JSON object: name, finished, facts, recipe (as text), steps, skip_steps, skip (layer by step), held_out."""
    whole = {
        "name": found.name,
        "finished": found.finished,
        "sentence": found.sentence,
        "facts": dict(found.facts),
        "recipe": found.recipe,
        "steps": document.records(found.steps),
        "skip_steps": found.skip_steps,
        "skip": found.skip_LK.tolist(),
        "held_out": document.records(found.held_out),
    }
    return json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


FORMATS: dict[str, Callable[[Training], str]] = {
    "html": render_html,
    "md": render_markdown,
    "csv": render_csv,
    "json": render_json,
}


def render(folder: Path, format: str) -> str:
    """The report of a training folder in one of `FORMATS`.

    Raises:
        InputError: there is no such format, or the log cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: there is no such format; choose one of {', '.join(FORMATS)}")
    return FORMATS[format](training(folder))
