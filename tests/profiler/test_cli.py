"""The command as it is typed: exit codes and sentences, what goes to stdout and what does not, how quick it is."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from profiler import cli
from profiler import run as running
from profiler.errors import GateFailed, InputError, RuleError, StoreError
from profiler.records import Manifest
from profiler.store import Run
from profiler.writer import RunWriter
from tests.analysis.training_folder import write_training
from tests.profiler.tiny_runs import contents, parquet_and_other_bytes, tiny_spec

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def refused(*arguments: str) -> str:
    """What a wrong input says; it must be one sentence on stderr, nothing on stdout, and exit code 2."""
    found = call(*arguments)
    assert (found.exit_code, found.stdout) == (2, ""), found.output
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    return found.stderr.removeprefix("error: ").strip()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test types in a folder of its own, and leaves nothing in it that it did not ask for."""
    monkeypatch.chdir(tmp_path)


# -- what a user can get wrong ------------------------------------------------------------------------

SPEC = """\
name: mine
model: {source: tiny, device: cpu}
arms:
  - {name: dense, method: dense}
  - {name: routed, method: layerroute}
cells:
  prefill: {batch: [1], length: [8]}
measure: {warmup: 0, max_repeats: 2, threads: 1}
"""


def spec_with(old: str = "", new: str = "") -> str:
    assert old in SPEC
    Path("s.yaml").write_text(SPEC.replace(old, new))
    return "s.yaml"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("batch:", "bacth:", "cells.prefill.bacth: unknown key; the nearest known is 'batch'"),
        ("[1]", "[-1]", "s.yaml: cells.prefill.batch.0: must be at least 1, and -1 was given"),
        ("length: [8]", "length: [10000000]", "s.yaml: cells.prefill.length.0: must be at most 131,072"),
        (
            "batch: [1], length: [8]",
            "batch: [80], length: [125000]",
            "must be at most 1,048,576 tokens a cell, and 80 × 125,000 is 10,000,000",
        ),
        (
            "source: tiny",
            "source: tinny",
            "s.yaml: model source 'tinny' is neither a known name, nor a folder, nor a hub id",
        ),
        (
            "method: layerroute",
            "method: layerout",
            "s.yaml: arms.routed.method: method 'layerout' is not known; methods here: dense",
        ),
        (
            "method: layerroute",
            "method: layerroute, kv_polcy: request",
            "s.yaml: arms.routed.kv_polcy: method 'layerroute' has no such option; did you mean 'kv_policy'?",
        ),
        (
            "method: layerroute",
            "method: layerroute, gates: {forced: {ratioo: 0.3}}",
            "s.yaml: arms.routed.gates.forced.ratioo: method 'layerroute' has no such option; did you mean 'ratio'?",
        ),
        (
            "method: layerroute",
            'method: layerroute, gates: {forced: {ratio: "0.3"}}',
            "s.yaml: arms.routed.gates.forced.ratio: Input should be a valid number (given: '0.3')",
        ),
        (
            "method: layerroute",
            "method: static_depth, layers: [7]",
            "s.yaml: arms.routed: static_depth: layers: 7 is none of this model's, which are 0 to 5",
        ),
        (
            "method: layerroute",
            "method: layerroute, checkpoint: gone",
            "s.yaml: arms.routed: checkpoint gone: there is no such folder",
        ),
        (
            "name: routed, method: layerroute}",
            "name: a, method: layerroute, twin: b}\n  - {name: b, method: layerroute, twin: a}",
            "s.yaml: arms.a.twin: twins must lead to an arm that has none, and these go round: a → b → a",
        ),
        (
            "length: [8]",
            "length: [4096]",
            "s.yaml: cells: prefill-b1-l4096 reaches position 4,096, and tiny has positions for 2,048 tokens",
        ),
        (
            "cells:",
            "prompts: {domains: [poetry]}\ncells:",
            "s.yaml: prompts.domains: builtin has no prompt of domain 'poetry'",
        ),
        ("cells:", "prompts: {source: pipe}\ncells:", "it is a pipe, a device or a socket, which may never end"),
        ("source: tiny", "source: ./pipe", "model source ./pipe: it is neither a file nor a folder"),
        (
            "cells:",
            "prompts: {source: empty.jsonl}\ncells:",
            "empty.jsonl: must hold at least one prompt, and it is empty",
        ),
        ("cells:", "prompts: {source: latin.jsonl}\ncells:", "latin.jsonl"),
        ("cells:", "prompts: {source: gone.jsonl}\ncells:", "gone.jsonl"),
    ],
)
@pytest.mark.parametrize(
    "command", [["run", "--out", "r"], ["run", "--dry-run"], ["validate"], ["plan"]], ids=lambda c: c[-1]
)
def test_a_wrong_spec_ends_with_2_and_a_sentence_that_helps(
    command: list[str], old: str, new: str, sentence: str
) -> None:
    Path("empty.jsonl").write_text("")
    Path("latin.jsonl").write_bytes('{"prompt": "Grüße"}'.encode("latin-1"))
    os.mkfifo("pipe")
    before = sorted(p.name for p in Path().iterdir())
    said = refused(command[0], spec_with(old, new), *command[1:])
    assert sentence in said
    assert sorted(p.name for p in Path().iterdir()) == sorted([*before, "s.yaml"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "gone.yaml"], "gone.yaml"),
        (["run", "."], "folder"),
        (["run", "quickstrat"], "the nearest built-in is 'quickstart'"),
        (["run", "tiny", "--resume"], "--resume needs --out DIR"),
        (["run", "tiny", "--resume", "--out", "gone"], "--resume gone: there is no such folder"),
        (["run", "tiny", "--resume", "--out", "nothing"], "--resume nothing: it is empty"),
        (["run", "pipe"], "pipe: it is a pipe, a device or a socket"),
        (["run", "tiny", "--set", "measure.warmpu=1"], "the nearest known is 'warmup'"),
        (["run", "tiny", "--out", "file"], "--out file: it is a file"),
        (
            ["run", "tiny", "--out", "other"],
            "--out other: the folder must be new or empty, and it holds one other file",
        ),
        (["run", "tiny", "--out", "other", "--resume"], "other is not a run folder"),
        (["report", "gone"], "gone is not a run folder: manifest.json: No such file or directory"),
        (["report", "other"], "other is not a run folder"),
        (
            ["report", "run", "--format", "pdf"],
            "--format pdf: there is no such format; choose one of html, md, csv, json",
        ),
        (["dashboard", "gone"], "dashboard gone: no such folder"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_a_sentence_that_helps(arguments: list[str], sentence: str) -> None:
    Path("file").write_text("x")
    Path("other").mkdir()
    Path("other/thesis.tex").write_text("x")
    Path("nothing").mkdir()
    os.mkfifo("pipe")
    manifest = Manifest(name="t", created_utc="2026-01-01T00:00:00+00:00", pid=1, host="h")
    RunWriter(Path("run"), manifest).finish("complete")
    before = contents(Path())
    assert sentence in refused(*arguments)
    assert contents(Path()) == before


def test_a_viewer_that_is_none_ends_with_2() -> None:
    found = call("trace", "r", "--viewer", "paper")
    assert found.exit_code == 2
    assert "'paper' is not one of 'perfetto', 'tensorboard'" in found.stderr.replace("\n", " ")


def test_an_option_that_is_none_ends_with_2() -> None:
    found = call("run", "--outt", "x")
    assert found.exit_code == 2
    assert "--out" in found.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            InputError("experts (10) must be a multiple of ranks (4)"),
            2,
            "error: experts (10) must be a multiple of ranks (4)\n",
        ),
        (StoreError("cannot write"), 2, "error: cannot write\n"),
        (RuleError("rule 1 does not hold"), 1, "error: rule 1 does not hold\n"),
        (GateFailed("tpot_p99 +7%"), 3, "error: tpot_p99 +7%\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_every_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        error.add_note("what was recorded is kept in r")
        raise error

    monkeypatch.setattr(running, "run", fail)
    found = call("run", "tiny")
    assert (found.exit_code, found.stdout, found.stderr) == (code, "", said + "what was recorded is kept in r\n")


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running, "run", fail)
    found = call("run", "tiny")
    assert found.exit_code == 1
    assert isinstance(found.exception, ZeroDivisionError)


# -- a whole run, as a process ------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    folder: Path
    code: int
    out: str
    err: str
    peak_bytes: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`run --json` in a process of its own, so that what C++ prints is seen too."""
    folder = tmp_path_factory.mktemp("cli")
    spec = tiny_spec(
        cells={"prefill": {"batch": [2], "length": [16]}, "decode": {"batch": [2], "context": [8], "new_tokens": 2}},
        measure={"warmup": 1, "max_repeats": 3, "budget_s": 60, "threads": 1},
        trace={"steps": 1},
        privacy={"keep_text": False},
        prompts={"source": "p.jsonl"},
    )
    (folder / "p.jsonl").write_text('{"prompt": "xylophone quartz xylophone quartz"}\n')
    (folder / "spec.yaml").write_text(spec.to_yaml())
    command = [sys.executable, "-m", "profiler", "run", "spec.yaml", "--out", "r", "--json"]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    out_text, err_text = ((folder / name).read_text() for name in ("out", "err"))
    return Finished(folder, process.returncode, out_text, err_text, usage.ru_maxrss * 1024)


def test_stdout_is_one_json_object_that_names_folder_report_and_ladder(finished: Finished) -> None:
    assert finished.code == 0, finished.err
    assert finished.out.count("\n") == 1
    found = json.loads(finished.out)
    assert (found["run"], found["report"]) == ("r", "r.html")
    assert "ladder" in found
    assert {arm for arm in ("again", "forced", "untrained") if arm in finished.out} == {"again", "forced", "untrained"}


def test_people_read_stderr_and_the_library_below_is_silent(finished: Finished) -> None:
    assert "USDT" not in finished.err
    assert "Warning" not in finished.err
    assert "prefill-b2-l16" in finished.err
    assert finished.err.rstrip().endswith("r.html")


def test_no_text_of_a_prompt_is_in_the_folder_the_report_or_what_was_said(finished: Finished) -> None:
    assert b"xylophon" not in parquet_and_other_bytes(finished.folder / "r")
    assert "xylophon" not in (finished.folder / "r.html").read_text()
    assert "xylophon" not in finished.out + finished.err


def test_a_dry_run_comes_near_the_memory_of_the_run_and_writes_nothing(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    before = contents(Path())
    found = call("run", "spec.yaml", "--dry-run", "--json")
    assert found.exit_code == 0
    told = json.loads(found.stdout)
    assert told["cells"] == 2
    assert 0.5 < told["memory_bytes"] / finished.peak_bytes < 2
    assert told["disk_bytes"] > sum(p.stat().st_size for p in Path("r").rglob("*") if p.is_file()) / 3
    assert contents(Path()) == before
    people = call("run", "spec.yaml", "--dry-run")
    assert (people.exit_code, people.stdout) == (0, "")
    assert "memory" in people.stderr


def test_reports_of_every_format_leave_the_run_folder_as_it_was(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    before = contents(Path("r"))
    for kind in ("html", "md", "csv", "json"):
        to = tmp_path / f"x.{kind}"
        written = call("report", "r", "--format", kind, "--out", str(to))
        assert (written.exit_code, written.stdout) == (0, ""), written.stderr
        assert to.read_text()
        if kind != "html":
            printed = call("report", "r", "--format", kind, "--out", "-")
            assert (printed.exit_code, printed.stdout) == (0, to.read_text().removesuffix("\n") + "\n")
    assert contents(Path("r")) == before
    monkeypatch.chdir(finished.folder / "r")
    assert call("report", ".", "--format", "md").exit_code == 0
    assert (finished.folder / "r.md").exists()
    assert contents(Path()) == before


def test_a_training_s_folder_has_a_report_too() -> None:
    folder = write_training(Path("trained"))
    for kind in ("html", "md", "csv", "json"):
        assert call("report", "trained", "--format", kind).exit_code == 0
        assert "by-hand" in Path(f"trained.{kind}").read_text() or kind == "csv"
    printed = call("report", "trained", "--format", "csv", "--out", "-")
    assert printed.stdout.strip() == Path("trained.csv").read_text().strip()
    assert "--format pdf: there is no such format" in refused("report", "trained", "--format", "pdf")
    (folder / "log.jsonl").write_text("[\n{}\n")
    assert "training log trained/log.jsonl: line 1: not JSON" in refused("report", "trained")


def test_resuming_or_running_again_into_a_complete_run_is_refused(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    before = contents(Path("r"))
    assert "it holds a run" in refused("run", "spec.yaml", "--out", "r")
    assert "the run is complete" in refused("run", "spec.yaml", "--out", "r", "--resume")
    assert "a run has one spec" in refused("run", "tiny", "--out", "r", "--resume")
    assert contents(Path("r")) == before
    assert Run("r").state == "complete"


def test_a_valid_spec_is_told_so_on_stderr() -> None:
    found = call("validate", spec_with())
    assert (found.exit_code, found.stdout) == (0, "")
    assert "mine: valid; 2 arms × 1 cells" in found.stderr
    assert [p.name for p in Path().iterdir()] == ["s.yaml"]


# -- how quick it is ----------------------------------------------------------------------------------


def modules_after(*arguments: str, cwd: Path | None = None) -> tuple[set[str], float, str]:
    """Modules loaded when the command ends, the CPU seconds it took, and its stdout."""
    script = f"""
        import sys
        sys.argv = ["gatewise", *{list(arguments)!r}]
        from profiler.cli import main
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, stop.code
        print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return set(done.stderr.splitlines()[-1].split()), seconds, done.stdout


@pytest.mark.parametrize(
    ("arguments", "shows"), [(["--help"], "run"), (["run", "--help"], "--resume"), (["methods"], "dense")]
)
def test_help_and_methods_are_there_at_once(arguments: list[str], shows: str) -> None:
    found = [modules_after(*arguments) for _ in range(2)]
    modules, _, out = found[0]
    assert shows in out
    assert not modules & {"torch", "transformers", "pandas", "pyarrow", "duckdb", "plotly", "scipy"}
    # CPU time, since the machine that runs tests has other work: what stands between the key and the answer when idle.
    assert min(seconds for _, seconds, _ in found) < 0.7


def test_models_are_listed_without_torch() -> None:
    modules, _, out = modules_after("models")
    assert "smollm2-135m" in out
    assert not modules & {"torch", "transformers"}


def test_a_report_needs_no_torch(finished: Finished) -> None:
    modules, _, out = modules_after("report", "r", "--format", "md", "--out", "-", cwd=finished.folder)
    assert "prefill-b2-l16" in out
    assert not modules & {"torch", "transformers"}


def test_every_command_has_help() -> None:
    listed = call("--help")
    assert listed.exit_code == 0
    commands: list[str] = [str(c.name or c.callback.__name__) for c in cli.app.registered_commands if c.callback]
    assert {"run", "report", "validate", "methods", "doctor", "trace", "dashboard"} <= set(commands)
    for name in commands:
        assert name in listed.stdout
        assert call(name, "--help").exit_code == 0


def test_out_may_be_the_folder_one_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report goes beside the run folder, which has a name even when it is written as a dot."""
    Path("here").mkdir()
    monkeypatch.chdir("here")

    def run(spec: Any, out: Path, **more: Any) -> Path:
        RunWriter(out, Manifest(name="t", created_utc="2026-01-01T00:00:00+00:00", pid=1, host="h")).finish("complete")
        return out

    monkeypatch.setattr(running, "run", run)
    found = call("run", "tiny", "--out", ".")
    assert found.exit_code == 0, found.output
    assert [p.name for p in Path("..").iterdir() if p.is_file()] == ["here.html"]


def test_a_dashboard_that_is_terminated_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "profiler", "dashboard", "runs", "--port", str(port)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    group = [psutil.Process(process.pid)]

    def serves() -> bool:
        try:
            group[:] = [group[0], *group[0].children(recursive=True)]
            return any("streamlit" in each.cmdline() for each in group)
        except psutil.Error:
            return False

    deadline = time.monotonic() + 60
    while not serves() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert serves()
    process.terminate()
    process.wait(60)
    _, alive = psutil.wait_procs(group, timeout=30)
    for each in alive:
        each.kill()
    assert alive == []
