"""A run in a terminal: the ladder first, then break-even, tails, rules and labels. For `rich`, 80 columns and up.

Drawing only. Every figure is `ladder`'s, `latency`'s, `quality`'s or `overview`'s; how one is said is `wording`'s.
Columns have fixed widths, so that the tables of all cells line up and a pipe of 80 columns shows them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from analysis.baselines import sentences
from analysis.ladder import ladder
from analysis.ladder_tables import break_even, ladder_wide
from analysis.latency import SAMPLES_BEYOND, cells, tails
from analysis.overview import Overview, overview
from analysis.quality import perplexity
from analysis.routing import ALL_DOMAINS
from analysis.wording import ABSENT, NBSP, absent, cell_label, how_many, number, percent, percent_interval
from profiler.records import RECORDER_COST, ArmRecord, CellRecord
from profiler.store import Run

ARM_WIDTH = 12
#: (heading, width) of the ladder's columns after the arm; with the gaps they fill 80 columns.
LADDER = (
    ("param.\nskip %", 6),
    ("FLOP\nskip %", 6),
    ("weight\nbyte %", 6),
    ("kernel\ntime %", 6),
    ("step time saved %\n[95 % interval]", 20),
    ("real-\nised", 6),
    ("step ms\narm/twin", 11),
)

EXPLAINED = (
    "% of the backbone's parameters, net of routers and adapters; % of the twin's\n"
    "executed FLOPs, weight bytes read, kernels of traced steps, time of bare steps."
)
#: How notes begin that the labels of the run, and the word beside an arm, say already.
SAID_BY_LABELS = ("synthetic route (", "untrained router", "random weights")


def render(run: Run) -> list[RenderableType]:
    """What `gatewise run` prints at its end: one renderable a section, for `Console.print`.

    Order: the run and its state, the ladder by cell, break-even, tails, held-out quality if it was measured, rules,
    labels. A section with nothing to show says so. Arms with synthetic or untrained routes carry that word wherever
    they stand.
    """
    frame = ladder(run)
    about = overview(run, frame)
    tags = {arm.name: _tag(arm) for arm in run.manifest.arms}
    wide = ladder_wide(frame)
    quality = _quality(run, tags)
    if wide[["step_ms", "parameter_skip"]].isna().all(axis=None):
        nothing = [] if quality else [Text("\nNothing was measured.")]
        return [_head(run, about), *nothing, *quality, *_rules(about), *_labels(about)]
    return [
        _head(run, about),
        *_ladder(wide, run, tags),
        *_break_even(break_even(run, frame), tags),
        *_tails(tails(run), tags),
        *quality,
        *_rules(about),
        *_labels(about),
    ]


def _tag(arm: ArmRecord) -> str:
    return "synthetic" if arm.synthetic else "untrained" if arm.untrained else ""


def _head(run: Run, about: Overview) -> Text:
    model = run.manifest.model
    text = Text()
    text.append(about.name, style="bold")
    if model is not None:
        random = ", random weights" if model.random_weights else ""
        text.append(f"  {model.source}{random}, {model.dtype}, {model.device_name}")
    text.append(f"\n{about.sentence}", style="" if about.state == "complete" else "bold red")
    return text


def _title(words: str, explained: str = "") -> Text:
    text = Text("\n")
    text.append(words, style="bold")
    if explained:
        text.append(f"\n{explained}", style="dim")
    return text


def _table(columns: Iterable[tuple[str, int | None]], *, header: bool = True, left: Sequence[int] = (0,)) -> Table:
    """A table without lines; columns named in `left` are text, the others figures."""
    table = Table(box=None, show_header=header, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for place, (name, width) in enumerate(columns):
        table.add_column(
            Text(name), width=width, justify="left" if place in left else "right", overflow="fold", vertical="top"
        )
    return table


def _cell_label(row: pd.Series[Any]) -> Text:
    label = cell_label(str(row["cell"]), str(row["phase"]), row["batch"], row["length"])
    return Text(_plain(label), style="bold cyan")


def _plain(said: str) -> str:
    """With ordinary spaces, which a pipe can be searched for."""
    return said.replace(NBSP, " ")


def _arm(name: Any, tags: dict[str, str]) -> Text:
    text = Text(str(name))
    if tags.get(str(name)):
        text.append(f"\n{tags[str(name)]}", style="yellow")
    return text


# -- ladder ---------------------------------------------------------------------------------------------------------


def _ladder(wide: pd.DataFrame, run: Run, tags: dict[str, str]) -> list[RenderableType]:
    pairs = wide.loc[wide["twin"].notna(), ["arm", "twin"]].drop_duplicates().itertuples()
    against = ", ".join(f"{pair.arm} against {pair.twin}" for pair in pairs)
    columns = [("arm", ARM_WIDTH), *LADDER]
    parts: list[RenderableType] = [_title(f"Ladder{': ' if against else ''}{against}", EXPLAINED), _table(columns)]
    records = {cell.name: cell for cell in cells(run)}
    for name, rows in wide.groupby("cell", sort=False):
        parts.append(_cell_line(rows.iloc[0], records[str(name)]))
        compared = set(rows["twin"].dropna())
        table, notes = _table(columns, header=False), dict[str, list[str]]()
        for _, row in rows.iterrows():
            if row["arm"] in compared and absent(row["twin"]):
                continue  # a twin's time stands beside the arms'
            if absent(row["step_ms"]) and absent(row["parameter_skip"]):
                notes.setdefault("not measured", []).append(row["arm"])
                continue
            table.add_row(_arm(row["arm"], tags), *(Text(value) for value in _figures(row)))
            note = "; ".join(part for part in row["note"].split("; ") if part and not part.startswith(SAID_BY_LABELS))
            if note:
                notes.setdefault(note, []).append(row["arm"])
        parts += [table] if table.row_count else []
        parts += [Text(f"{', '.join(arms)}: {note}", style="dim") for note, arms in notes.items()]
    return parts


def _cell_line(row: pd.Series[Any], record: CellRecord) -> Text:
    line = _cell_label(row)
    if record.stopped in ("interval", "repeats", "budget"):
        ended = f"  {how_many(record.repeats, 'repeat')}, stopped by {record.stopped}"
        if record.stopped == "budget" and record.warmup_s is not None:
            ended += f", of which warm-up took {number(record.warmup_s)} s"
        line.append(ended, style="not bold dim")
    return line


def _figures(row: pd.Series[Any]) -> list[str]:
    skips = ("parameter_skip", "flop_skip", "weight_byte_skip", "kernel_time_saved")
    saved = _bare(percent(row["step_time_saved"]))
    if not absent(row["step_time_saved_low"]):
        low, high = (_bare(percent(row[f"step_time_saved_{end}"])) for end in ("low", "high"))
        saved += f" [{low}, {high}]"
    times = number(row["step_ms"])
    if not absent(row["twin_step_ms"]):
        times += f"/{number(row['twin_step_ms'])}"
    realised = ABSENT if absent(row["realised_fraction"]) else number(row["realised_fraction"], 2)
    return [*(_bare(percent(row[name])) for name in skips), saved, realised, times]


def _bare(said: str) -> str:
    """A percentage without its sign, for a column headed by it."""
    return said.removesuffix("%").removesuffix(NBSP)


# -- the other sections ---------------------------------------------------------------------------------------------


def _break_even(found: pd.DataFrame, tags: dict[str, str]) -> list[RenderableType]:
    if found.empty:
        return []
    table = _table(
        [("arm", ARM_WIDTH), ("phase", 7), ("length", 7), ("batches", 9), ("breaks even", None)], left=(0, 1, 3, 4)
    )
    for row in found.itertuples():
        table.add_row(
            _arm(row.arm, tags), Text(str(row.phase)), Text(str(row.length)), Text(str(row.batches)),
            Text(str(row.break_even)),
        )  # fmt: skip
    return [_title("Break-even over batch", "Saves or loses where the whole interval lies on one side of 0."), table]


def _tails(found: pd.DataFrame, tags: dict[str, str]) -> list[RenderableType]:
    if found.empty:
        return []
    percentiles = sorted(found["percentile"].unique())
    columns = [("arm", ARM_WIDTH), ("metric", 23), ("steps", 6), *((f"P{p} ms", 11) for p in percentiles)]
    title = _title(
        "Tails of step time",
        f"Percentiles: {found['rule'].iloc[0]}. † fewer than {SAMPLES_BEYOND} samples lie beyond.",
    )
    parts: list[RenderableType] = [title, _table(columns, left=(0, 1))]
    for _, rows in found.groupby("cell", sort=False):
        parts.append(_cell_label(rows.iloc[0]))
        table = _table(columns, header=False, left=(0, 1))
        for arm, own in rows.groupby("arm", sort=False):
            # The mark has a place of its own, so that figures with and without it line up.
            values = [
                Text(number(value) + ("†" if marked else " "))
                for value, marked in zip(own["value_ms"], own["marked"], strict=True)
            ]
            metric = str(own["metric"].iloc[0])
            if own["pass"].iloc[0] != "bare":
                metric += f", {own['pass'].iloc[0]}"
            table.add_row(_arm(arm, tags), Text(metric), Text(str(own["n"].iloc[0])), *values)
        parts.append(table)
    return parts


def _quality(run: Run, tags: dict[str, str]) -> list[RenderableType]:
    """Perplexity over all held-out text, and what it says of routing; nothing where it was not measured."""
    found = perplexity(run)
    found = found[found["domain"] == ALL_DOMAINS]
    if found.empty:
        return []
    first = found.iloc[0]
    title = _title(
        "Held-out perplexity",
        f"Of {how_many(first['tokens'], 'token')} in {how_many(first['items'], 'item')}, with 95 % bootstrap intervals "
        "over items.",
    )
    table = _table(
        [("arm", ARM_WIDTH), ("mode", 16), ("perplexity", 11), ("÷ twin's [95 % interval]", 26), ("", 12)],
        left=(0, 1, 4),
    )
    for row in found.to_dict("records"):
        ratio = number(row["against_twin"], 4)
        if not absent(row["against_twin_low"]):
            ratio += f" [{number(row['against_twin_low'], 4)}, {number(row['against_twin_high'], 4)}]"
        verdict = "" if absent(row["verdict"]) else row["verdict"]
        cells = (row["mode"], number(row["perplexity"], 4), ratio, verdict)
        table.add_row(_arm(row["arm"], tags), *(Text(str(value)) for value in cells))
    return [title, table, *(Text(said, style="dim") for said in sentences(run))]


def _rules(about: Overview) -> list[RenderableType]:
    parts: list[RenderableType] = [_title("Rules the run enforced on itself")]
    if about.rules.empty:
        parts.append(Text("None was checked."))
    for rule, name in dict.fromkeys(zip(about.rules["rule"], about.rules["name"], strict=True)):
        if rule == RECORDER_COST:  # a figure to be printed, below; there is nothing in it to hold
            continue
        checks = about.rules[(about.rules["rule"] == rule) & (about.rules["name"] == name)]
        broken = checks[~checks["passed"].astype(bool)]
        held = f"rule {rule}, {name}: holds in {len(checks) - len(broken)} of {len(checks)}"
        parts.append(Text(held, style="" if broken.empty else "bold red"))
        parts += [Text(f"  {row.arm or ''} {row.cell or ''}: {row.detail}", style="red") for row in broken.itertuples()]
    cost = about.recorder_cost.dropna(subset=["cost"]).sort_values("cost", ascending=False)
    if not cost.empty:
        worst = cost.iloc[0]
        most = f"at most {percent(worst['cost'])} of a bare step, {worst['arm']} in {worst['cell']}"
        interval = "" if absent(worst["low"]) else f" [{percent_interval(worst['low'], worst['high'])}]"
        parts.append(Text(_plain(f"recorder's own cost: {most}{interval}")))
    return parts


def _labels(about: Overview) -> list[RenderableType]:
    missing = about.unsupported.groupby("reason", sort=False)["metric"].agg(", ".join)
    said = [*about.labels, *(f"unsupported here: {metrics} ({reason})" for reason, metrics in missing.items())]
    if not said:
        return []
    table = _table([("", 1), ("", None)], header=False, left=(0, 1))
    for words in said:
        table.add_row(Text("•"), Text(words))
    return [_title("To be read with it"), table]
