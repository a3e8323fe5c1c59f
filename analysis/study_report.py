"""The report of a study: self-contained HTML, Markdown, CSV or JSON, from its folder alone.

Draws what `study.compare` returns and computes nothing. Each seed's own run has a report like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
import pandas as pd

from analysis import charts, document, study_charts, study_tables, wording
from analysis.spread import SKIPPED
from analysis.study import Compared, compare
from profiler.errors import InputError, StoreError
from profiler.study_folder import Study


@dataclass(frozen=True)
class _Contents:
    """Everything a report shows, read once. `look` and `names` are those of the first run, since arms are the same."""

    study: Study
    found: Compared
    look: charts.Look
    names: dict[str, str]

    @classmethod
    def of(cls, study: Study, found: Compared) -> _Contents:
        first = next(iter(study.runs().values()), None)
        manifest = first.manifest if first is not None else None
        look = charts.Look.of(manifest) if manifest is not None else charts.Look({}, {})
        names = wording.arm_names(manifest) if manifest is not None else {}
        return cls(study, found, look, names)

    @property
    def sentence(self) -> str:
        record = self.study.record
        what = f"recipe {record.recipe.rsplit('/', 1)[-1]}" + f", trained arms {', '.join(record.trained_arms)}"
        return f"{len(self.found.seeds)} of {wording.how_many(len(record.seeds), 'seed')} trained and measured; {what}."


def render_html(study: Study, found: Compared) -> str:
    """One HTML document that needs nothing else: no network, no other file."""
    contents, plot = _Contents.of(study, found), document.Figures()
    return document.page(
        "study_report.html.j2",
        plot,
        name=study.record.name,
        created=study.record.created_utc,
        sentence=contents.sentence,
        finished=len(found.seeds) == len(study.record.seeds),
        labels=[wording.sentence(label) for label in found.labels],
        sentences=found.sentences,
        rules=found.rules,
        arms=[section(found, arm, contents.look, contents.names, plot) for arm in found.arms],
        folders=[(seed, f"seed-{seed}/run") for seed in found.seeds],
    )


def section(
    found: Compared, arm: str, look: charts.Look, names: dict[str, str], plot: Callable[[Any], Any]
) -> dict[str, Any]:
    """What is shown of one arm; figures go through `plot`."""
    rates = found.rates[found.rates["arm"] == arm]
    return {
        "name": names[arm],
        "trained": arm in found.trained,
        "heat": plot(study_charts.heat(rates, arm, look)) if not rates.empty else None,
        "strips": [plot(figure) for figure in strips(found, arm, look)],
        "spread": study_tables.spread(found, arm),
        "by_seed": study_tables.by_seed(found, arm),
        "patterns": study_tables.patterns(found, arm),
        "pairs": study_tables.pairs(found, arm),
        "layers": study_tables.layers(found, arm),
    }


def strips(found: Compared, arm: str, look: charts.Look) -> list[Any]:
    """A strip for each figure of an arm that has values of single seeds with intervals."""
    own = found.values[found.values["arm"] == arm]
    skips = arm in set(found.patterns["arm"])
    figures = []
    for name, values in own.groupby("figure", sort=False):
        if values["low"].isna().all() or (name == SKIPPED and not skips):
            continue  # the table says it in a number
        lines = found.lines[(found.lines["arm"] == arm) & (found.lines["figure"] == name)]
        title = study_tables.figure_name(next(lines.itertuples()))
        figures.append(study_charts.strip(values, lines, arm, title, look))
    return figures


def render_markdown(study: Study, found: Compared) -> str:
    """The tables as Markdown, without charts."""
    contents = _Contents.of(study, found)
    lines = [f"# {wording.markdown(study.record.name)}", "", wording.markdown(contents.sentence), ""]
    lines += [f"> **Note:** {wording.markdown(wording.sentence(label))}\n" for label in found.labels]
    lines += [f"- {wording.markdown(sentence)}" for sentence in found.sentences]
    lines += ["", *(f"{wording.markdown(rule)}\n" for rule in found.rules)]
    for arm in found.arms:
        name = contents.names[arm]
        for title, table in (
            (f"{name}: what is stable over seeds", study_tables.spread(found, arm)),
            (f"{name}: seed by seed", study_tables.by_seed(found, arm)),
            (f"{name}: layers each seed skips", study_tables.patterns(found, arm)),
            (f"{name}: pairs of seeds", study_tables.pairs(found, arm)),
            (f"{name}: layers over seeds", study_tables.layers(found, arm)),
        ):
            if table.rows:
                lines += ["", f"## {wording.markdown(title)}", "", *document.markdown_table(table)]
    return "\n".join(lines) + "\n"


def render_csv(study: Study, found: Compared) -> str:
    """A row a figure and seed, and what is over all seeds beside it. Shares are of 1, `unit` says so."""
    key = ["arm", "part", "figure", "where"]
    over = found.lines[[*key, "seeds", "mean", "sd", "lowest", "highest", "own_width", "limit", "verdict"]]
    text: str = found.values.merge(over, on=key, how="left").to_csv(index=False, lineterminator="\n")
    return text


def render_json(study: Study, found: Compared) -> str:
    """One JSON object: name, seeds, trained arms, sentences, rules, labels, and every frame of `study.Compared`."""
    whole = {"name": study.record.name, "recipe": study.record.recipe, "asked_seeds": _seeds(study)}
    whole |= {
        name: document.records(value) if isinstance(value, pd.DataFrame) else value
        for name, value in asdict(found).items()
    }
    return json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _seeds(study: Study) -> list[dict[str, Any]]:
    return [record.model_dump(mode="json") for record in study.record.seeds]


FORMATS: dict[str, Callable[[Study, Compared], str]] = {
    "html": render_html,
    "md": render_markdown,
    "csv": render_csv,
    "json": render_json,
}


def render(study: Study, format: str, found: Compared | None = None) -> str:
    """The report in one of `FORMATS`; `found` is `compare(study)` where the caller has it already.

    Raises:
        InputError: there is no such format.
        StoreError: a run of the study cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: there is no such format; choose one of {', '.join(FORMATS)}")
    try:
        return FORMATS[format](study, compare(study) if found is None else found)
    except duckdb.Error as error:
        raise StoreError(f"{study.path}: a table of one of its runs cannot be read: {error}") from error
