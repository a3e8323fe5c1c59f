"""What every report is, whatever it tells of: an HTML page that needs nothing but itself, and a file written whole.

The page opens from a file without a network: Plotly is inside, once, and a content policy forbids every request and
every script but its own two. Text is data: Jinja escapes it in HTML, `charts.plain` in labels, and the JSON of figures
holds no `<`.

Not here: what a report says (`report`, `training_report`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from analysis import charts, wording
from analysis.tables import Table
from profiler.errors import InputError, StoreError

_TEMPLATES = Path(__file__).with_name("templates")
_Made = TypeVar("_Made")

#: Told the share of a report that is made, from 0 to 1.
Share = Callable[[float], None]


def untold(share: float) -> None:
    """A `Share` for those who need not know."""


class Steps:
    """Counts what has been made of `count` things, none of which takes long beside the others.

    Calling it with a thing gives the thing back and tells the share, of the part from `start` to `end`.
    """

    def __init__(self, share: Share, count: int, start: float = 0.0, end: float = 1.0) -> None:
        self._share, self._count, self._start, self._end = share, count, start, end
        self._made = 0

    def __call__(self, made: _Made) -> _Made:
        """Another one is made."""
        self._made += 1
        self._share(self._start + (self._end - self._start) * min(1.0, self._made / self._count))
        return made


class Figures:
    """The figures of one page: calling it keeps one, and returns the number by which the template places it."""

    def __init__(self) -> None:
        self.json: list[str] = []

    def __call__(self, figure: go.Figure) -> int:
        """Keep a figure."""
        self.json.append(figure.to_json(engine="json"))
        return len(self.json) - 1


def page(template: str, figures: Figures, **shown: Any) -> str:
    """A template that extends `page.html.j2`, filled in.

    Args:
        template: a file of `templates/`.
        figures: those that `shown` places.
        shown: what the template names.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["how_many"] = wording.how_many
    draw = (_TEMPLATES / "draw.js").read_text(encoding="utf-8")
    # A closing tag inside of a script would end it early; Plotly's own text has none, and this keeps it so.
    library = get_plotlyjs().replace("</script", "<\\/script")
    body = environment.get_template(template).render(
        **shown,
        figures=figures.json,
        config=json.dumps(charts.CONFIG),
        library=library,
        draw=draw,
        script_hashes=[_csp_hash(library), _csp_hash(draw)],
    )
    return body + "\n"


def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def markdown_table(table: Table) -> list[str]:
    """A table as lines of GitHub's Markdown."""
    if not table.rows:
        return ["Nothing was recorded."]
    rule = ["---:" if place in table.numeric else "---" for place in range(len(table.columns))]
    rows = [[wording.markdown(text) for text in row] for row in (table.columns, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame as JSON objects; what is undefined or not finite is null."""
    return [{str(k): _json_value(v) for k, v in row.items()} for row in frame.to_dict("records")]


def _json_value(value: Any) -> Any:
    if wording.absent(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(text: str, out: Path) -> Path:
    """Write a report to the file `out`, whole or not at all, and return its path.

    Raises:
        InputError: `out` is a folder.
        StoreError: the file cannot be written.
    """
    if out.is_dir():
        raise InputError(f"--out {out}: it is a folder; a report is one file")
    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, out)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write the report {out}: {error.strerror or error}") from error
    return out
