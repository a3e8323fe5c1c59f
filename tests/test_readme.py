"""The README says what is: its Python runs, its commands exist, its tree is the tree.

`python tests/test_readme.py` writes the tree into the README anew.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDERS = {
    "profiler": "runs models and writes run folders",
    "profiler/execution": "how rows are skipped, and what every method on a decoder shares",
    "profiler/methods": "what a router may leave out; one file a method",
    "workloads": "specs, prompts and recipes; no torch",
    "analysis": "from a run folder to tables, charts and reports; no torch",
    "dashboard": "the Streamlit app, one file a page",
    "benchmarks": "speed, one file a claim",
}
WIDTH = 34


def tree() -> str:
    """Every module with the first line of its docstring, folder by folder."""
    lines = []
    for folder, what in FOLDERS.items():
        lines.append(f"{folder + '/':{WIDTH}}{what}")
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name.startswith("__"):
                continue
            first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            lines.append(f"{'  ' + path.name:{WIDTH}}{first.rstrip('.')}")
    return "\n".join(lines)


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    found: list[str] = []
    inside: str | None = None
    for line in README.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.startswith("```"):
            if inside == language:
                found[-1] += line
        elif inside is None:
            inside = line[3:].strip()
            found += [""] * (inside == language)
        else:
            inside = None
    return found


def shown_tree() -> str:
    return next(block for block in blocks("") if block.startswith("profiler/ ")).rstrip("\n")


def test_it_opens_with_the_two_commands() -> None:
    assert README.read_text(encoding="utf-8").startswith("# Gatewise\n\n```\nmake run\nmake test\n```\n")


def test_the_tree_is_the_tree() -> None:
    assert shown_tree() == tree()


def test_every_module_says_what_it_is_for() -> None:
    for line in tree().splitlines():
        assert len(line) > WIDTH, f"{line}: no docstring"


def test_the_python_runs(tmp_path: Path) -> None:
    """All blocks, one after the other in one process, as a reader would."""
    script = tmp_path / "reader.py"
    script.write_text("\n".join(blocks("python")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("complete ")
    assert (tmp_path / "runs/mine/gates").is_dir()


def test_the_specs_are_valid(tmp_path: Path) -> None:
    from profiler import preflight
    from workloads.loading import load

    found = []
    for number, text in enumerate(blocks("yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        spec = load(path)
        preflight.check(spec)
        found.append([arm.name for arm in spec.arms])
    assert found == [["dense", "routed", "forced"], ["dense", "standard", "mohge"]]


def test_the_commands_exist() -> None:
    import typer.main

    from profiler.cli import app

    known = set(typer.main.get_command(app).commands)
    text = "\n".join(blocks(""))
    named = set(re.findall(r"python -m profiler (\w+)", text)) | {"methods", "doctor"}
    assert named == known


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_two_commands_are_targets() -> None:
    for target in ("run", "test"):
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, timeout=30).returncode == 0


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(shown_tree(), tree()), encoding="utf-8")
