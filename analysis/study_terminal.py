"""A study in a terminal: what is stable over seeds and what is not. For `rich`, 80 columns and up.

Drawing only; the figures are `study`'s, how one is said is `study_tables`'.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from analysis.spread import NOT_STABLE
from analysis.study import Compared
from analysis.study_tables import value
from analysis.wording import ABSENT, how_many, sentence
from profiler.study_folder import Study


def render(study: Study, found: Compared) -> list[RenderableType]:
    """One renderable a section, for `Console.print`: name and state, the lines by arm, how they are judged, labels."""
    head = Text(study.record.name, style="bold")
    done = f"{len(found.seeds)} of {how_many(len(study.record.seeds), 'seed')} trained and measured"
    head.append(f"\n{done}", style="")
    parts: list[RenderableType] = [head]
    for arm in found.arms:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for title, width in (("figure", 20), ("where", 15), ("mean", 9), ("lowest to highest", 20), ("verdict", None)):
            table.add_column(title, width=width, overflow="fold", justify="left" if title != "mean" else "right")
        for row in found.lines[found.lines["arm"] == arm].itertuples():
            unit = str(row.unit)
            table.add_row(
                Text(str(row.figure)),
                Text(str(row.where)),
                Text(value(row.mean, unit)),
                Text(f"{value(row.lowest, unit)} to {value(row.highest, unit)}"),
                Text(str(row.verdict) or ABSENT, style="bold" if row.verdict == NOT_STABLE else ""),
            )
        marked = "" if arm in found.trained else "  (no seed touches this arm)"
        parts += [Text(f"\n{arm}{marked}", style="bold"), table]
    parts.append(Text("\n" + "\n".join(found.rules), style="dim"))
    if found.labels:
        parts.append(Text("\n" + "\n".join(f"- {sentence(label)}" for label in found.labels)))
    return parts
