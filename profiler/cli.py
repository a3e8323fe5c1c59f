"""The command line. Each command imports what it needs when it runs, so that `--help` is quick.

People read stderr (progress, tables); stdout is for data. Exit codes: 0 done, 1 our fault, 2 the user's input,
3 a gate failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from profiler.errors import GatewiseError, InputError, SpecError
from profiler.interrupts import terminated_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console

# Kineto prints two lines a trace from C++, at level 5 of its own scale; it reads this once, when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class _Commands(typer.core.TyperGroup):
    """Turns our errors into a sentence and its exit code. SIGTERM ends any command like Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with terminated_as_interrupt():
                return super().invoke(ctx)
        except GatewiseError as error:
            _say(f"error: {error}", error)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt as error:
            _say("interrupted", error)
            raise SystemExit(130) from None


def _say(what: str, error: BaseException) -> None:
    print(what, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)


app = typer.Typer(
    name="gatewise",
    cls=_Commands,
    help="Where the skipped compute went: run, record and explain routed language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="List model sources, or fetch one.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")

SpecArgument = Annotated[str | None, typer.Argument(metavar="[SPEC]", help="A spec file or a built-in spec's name.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the spec.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
ReportArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, a training or a study.")]


@contextmanager
def _naming(spec: str | None) -> Iterator[None]:
    """What is wrong with a spec is told with the file it is wrong in."""
    try:
        yield
    except SpecError as error:
        from workloads import loading

        raise InputError(f"{loading.label(spec)}: {error}") from error


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


@app.command()
def run(
    spec: SpecArgument = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder, new or empty.")] = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the folder and the ladder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what time, memory and disk it would take.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
) -> None:
    """Run a workload spec (default: the built-in quickstart) into a run folder, one with seeds into a study's."""
    from workloads import loading

    resolved = loading.load(spec, set_ or [])
    console = _console()
    if dry_run:
        from profiler import estimate

        with _naming(spec):
            found = estimate.estimate(resolved)
        _emit(found.as_json(), found.lines(), as_json, console)
        return
    from profiler import ranks
    from profiler import run as running
    from profiler.progress import Bar

    if resolved.seeds is not None:
        from profiler import study

        with _naming(spec), Bar(console) as bar:
            folder = study.run(resolved, out, resume=resume, progress=bar)
        _show_study(folder, as_json, console)
        return
    if not ranks.leading():  # the first of several processes speaks for all
        with _naming(spec):
            running.run(resolved, out, resume=resume)
        return
    with _naming(spec), Bar(console) as bar:
        folder = running.run(resolved, out, resume=resume, progress=bar)
    _show(folder, as_json, console)


def _show(folder: Path, as_json: bool, console: Console) -> None:
    from analysis import report, terminal
    from profiler.progress import Bar
    from profiler.store import Run

    opened = Run(folder)
    with Bar(console) as bar:
        bar.say("report")
        page = report.write(opened, "html", _beside(folder, ".html"), bar.part)
    for part in terminal.render(opened):
        console.print(part)
    console.print(f"run folder  {folder}")
    console.print(f"report      {page}")
    if as_json:
        import json

        print(json.dumps({"run": str(folder), "report": str(page), **json.loads(report.render_json(opened))}))


def _show_study(folder: Path, as_json: bool, console: Console) -> None:
    from analysis import document, study_report, study_terminal
    from analysis.study import compare
    from profiler.study_folder import Study

    opened = Study(folder)
    found = compare(opened)
    page = document.write(study_report.render(opened, "html", found), _beside(folder, ".html"))
    for part in study_terminal.render(opened, found):
        console.print(part)
    console.print(f"study folder  {folder}")
    console.print(f"report        {page}")
    if as_json:
        import json

        told = json.loads(study_report.render_json(opened, found))
        print(json.dumps({"study": str(folder), "report": str(page), **told}))


def _beside(folder: Path, suffix: str) -> Path:
    """A file beside a run folder, however the folder was named (`.` and `..` have no name of their own)."""
    named = folder.resolve() if folder.name in ("", "..") else folder
    return named.with_name(named.name + suffix)


def _emit(data: dict[str, Any], lines: list[str], as_json: bool, console: Console) -> None:
    if as_json:
        import json

        print(json.dumps(data))
        return
    for line in lines:
        console.print(line, highlight=False, markup=False)


@app.command()
def evaluate(
    source: Annotated[
        str | None, typer.Argument(metavar="[RUN|SPEC]", help="A run folder, a spec file or a built-in spec's name.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The new run's folder, new or empty.")] = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the folder and the report.")] = False,
) -> None:
    """Measure quality only, of the arms of a run or a spec, into a run folder of its own."""
    from profiler import evaluate as evaluating
    from profiler.progress import Bar

    console = _console()
    with _naming(source), Bar(console) as bar:
        folder = evaluating.evaluate(source, set_ or [], out, bar)
    _show(folder, as_json, console)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file or a built-in recipe's name.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where it goes, new or empty.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished training in --out.")] = False,
) -> None:
    """Train what a method adds to a frozen backbone."""
    from profiler import train as training
    from profiler.progress import Bar
    from workloads import recipe as recipes

    resolved = recipes.load(recipe, set_ or [])
    console = _console()
    with Bar(console) as bar:
        done = training.train(resolved, out, resume=resume, progress=bar)
    for line in training.summary(done):
        console.print(line, highlight=False, markup=False)


@app.command()
def plan(
    spec: SpecArgument = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a spec's arms could save at full size, without loading weights."""
    from profiler import plan as planning
    from workloads import loading

    resolved = loading.load(spec, set_ or [])
    with _naming(spec):
        found = planning.plan(resolved)
    _emit(planning.as_json(found), planning.lines(found), as_json, _console())


@app.command()
def validate(spec: SpecArgument = None, set_: SetOption = None) -> None:
    """Check a spec: shape, prompts, model source, options and checkpoint of every arm, the cells' lengths."""
    from profiler import preflight
    from workloads import loading

    resolved = loading.load(spec, set_ or [])
    with _naming(spec):
        preflight.check(resolved)
        if resolved.train is not None:
            from profiler import study

            study.recipe_of(resolved)
    cells = resolved.cell_list()
    seeds = f" × {len(resolved.seeds)} seeds" if resolved.seeds is not None else ""
    _console().print(f"{resolved.name}: valid; {len(resolved.arms)} arms × {len(cells)} cells{seeds}", highlight=False)


@app.command()
def report(
    run: ReportArgument,
    format: Annotated[str, typer.Option(help="html, md, csv or json.")] = "html",
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="Where to write; - is stdout.")] = None,
) -> None:
    """Write a report of a run, a training or a study: self-contained HTML, Markdown, CSV or JSON."""
    from analysis import document, study_report, training, training_report
    from analysis import report as reports
    from profiler.progress import Bar
    from profiler.store import MANIFEST, Run
    from profiler.study_folder import Study, is_study

    if is_study(run):
        text = study_report.render(Study(run), format)
    elif training.is_training(run) and not (run / MANIFEST).exists():
        text = training_report.render(run, format)
    else:
        with Bar(_console()) as bar:
            text = reports.render(Run(run), format, bar.part)
    if out is not None and str(out) == "-":
        sys.stdout.write(f"{text.removesuffix(chr(10))}\n")
        return
    suffix = {"html": ".html", "md": ".md", "csv": ".csv", "json": ".json"}.get(format, "")
    page = document.write(text, out or _beside(run, suffix))
    _console().print(f"{page}", highlight=False)


@app.command()
def methods(
    method: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One of them, with its options.")] = None,
) -> None:
    """List the methods, or say what one does and which options it has."""
    from profiler import methods as found

    if method is not None:
        print(found.description(method))
        return
    for name, summary in found.summaries().items():
        print(f"{name:14} {summary}")


@models_app.callback()
def models(context: typer.Context) -> None:
    """List model sources."""
    if context.invoked_subcommand is not None:
        return
    from profiler import models as sources

    for source in sources.sources():
        where = f"  [{source.cached}]" if source.cached else ""
        print(f"{source.name:20} {source.kind:16} {source.what}{where}")


@models_app.command()
def fetch(name: str) -> None:
    """Download a model, check it and keep it in the user cache."""
    from profiler import models as sources
    from profiler.progress import Bar

    console = _console()
    with Bar(console) as bar:
        folder = sources.fetch(name, bar.say, bar.part)
    console.print(f"{name}: {folder}", highlight=False)


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, name clashes, cache, what can be measured."""
    from profiler import doctor as checking
    from profiler.progress import Bar

    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    with Bar(_console()) as bar:
        checks = checking.checks(bar.say, bar.part)
    for check in checks:
        print(f"{marks[check.status]}  {check.name}: {check.detail}")
        if check.remedy and check.status != "ok":
            print(f"      {check.remedy}")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


@app.command()
def trace(
    run: RunArgument,
    viewer: Annotated[Literal["perfetto", "tensorboard"], typer.Option(help="What to open them in.")] = "perfetto",
) -> None:
    """Open the traces of a run in a viewer."""
    from profiler.viewer import open_trace

    open_trace(run, viewer)


@app.command()
def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="A run folder or a folder of them.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 8501,
) -> None:
    """Serve the interactive dashboard on this machine."""
    if not runs.is_dir():
        raise InputError(f"dashboard {runs}: no such folder; run something first, or name the folder of your runs")
    import dashboard as package

    page = Path(str(package.__file__)).with_name("app.py")
    command = [sys.executable, "-m", "streamlit", "run", str(page), "--server.port", str(port), "--", str(runs)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)  # this process becomes the server, so that no signal leaves one behind


def main() -> None:
    """Entry point of `gatewise` and `python -m profiler`."""
    app()
