"""The wheel holds what a user needs and runs away from the checkout; what we say of ourselves agrees."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("analysis", "dashboard", "profiler", "workloads")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources():
    """Every file of the four packages, as paths inside the wheel."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built offline from a copy, so that the checkout keeps no build folders."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = "pip wheel --no-build-isolation --no-deps --no-index --disable-pip-version-check --wheel-dir"
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), str(out), "."], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def outside(unpacked, cwd, *command):
    """Run Python where neither the checkout nor an editable install of it comes first."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_the_packages_whole_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(names) == sorted(sources())


@pytest.mark.parametrize(
    "pattern",
    [
        r"workloads/specs/.*\.yaml",
        r"workloads/prompts/.*\.jsonl",
        r"workloads/.*schema.*\.json",
        r"profiler/py\.typed",
        r"analysis/py\.typed",
        r"profiler/methods/dense\.py",
    ],
)
def test_the_wheel_holds(wheel, pattern):
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if re.fullmatch(pattern, name)]


def test_the_wheel_says_what_it_is(unpacked):
    (info,) = unpacked.glob("*.dist-info")
    found = importlib.metadata.Distribution.at(info)
    assert (found.metadata["Name"], found.version) == ("gatewise", PROJECT["version"])
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in next(info.rglob("LICENSE")).read_text()
    assert {point.name: point.value for point in found.entry_points} == {"gatewise": "profiler.cli:main"}


def test_it_runs_outside_the_checkout(unpacked, tmp_path):
    where = outside(unpacked, tmp_path, "-c", "import profiler; print(profiler.__file__)")
    assert where.stdout.strip() == str(unpacked / "profiler" / "__init__.py")
    told = outside(unpacked, tmp_path, "-m", "profiler", "--help")
    assert told.returncode == 0, told.stderr
    for command in ("run", "report", "validate", "models", "doctor", "dashboard"):
        assert re.search(rf"\b{command}\b", told.stdout)


def test_analysis_needs_no_torch(unpacked, tmp_path):
    script = """
import importlib, pkgutil, sys
import analysis
for module in pkgutil.walk_packages(analysis.__path__, "analysis."):
    importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("analysis.")]))
print([name for name in ("torch", "transformers", "safetensors") if name in sys.modules])
"""
    done = outside(unpacked, tmp_path, "-W", "error", "-c", script)
    assert done.returncode == 0, done.stderr
    count, loaded = done.stdout.splitlines()
    assert int(count) > 3
    assert loaded == "[]"


# -- what we say of ourselves -------------------------------------------------------------------------


def test_changelog_and_project_agree_on_the_version():
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == PROJECT["version"]


def locked(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_lock_is_exact_portable_and_whole():
    run, test = locked("requirements.lock"), locked("requirements-test.lock")
    assert not set(run) & set(test)
    assert not [version for version in [*run.values(), *test.values()] if not re.fullmatch(r"[0-9][0-9a-z.]*", version)]
    named = {_normal(name) for name in [*run, *test]}
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    assert not {_normal(re.split(r"[^\w.-]", line)[0]) for line in wanted} - named


def test_everything_imported_is_declared():
    trees = [ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    modules = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - set(PACKAGES)
    owners = importlib.metadata.packages_distributions()
    declared = {_normal(re.split(r"[^\w.-]", line)[0]) for line in PROJECT["dependencies"]}
    assert {"torch", "numpy"} <= modules
    assert {module for module in modules if not declared & {_normal(owner) for owner in owners[module]}} == set()


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


# -- import contracts ---------------------------------------------------------------------------------


def broken_contracts(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ci"), "COLUMNS": "200"}
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    outcome = dict(re.findall(r"^(.+) (KEPT|BROKEN)$", done.stdout, re.MULTILINE))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert set(outcome) == {contract["name"] for contract in declared}, done.stdout + done.stderr
    assert (done.returncode == 0) == ("BROKEN" not in outcome.values())
    return [name for name, result in outcome.items() if result == "BROKEN"]


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        (None, "", None),
        ("profiler/methods/added.py", "import profiler.store", "a method sees the recorder"),
        ("profiler/methods/added.py", "from profiler.recorder import Recorder", None),
        ("analysis/added.py", "import profiler.recorder", "analysis sees a run through the store"),
        ("analysis/added.py", "import torch", "a run is read without torch"),
        ("dashboard/added.py", "from profiler import run", "dashboard draws what analysis returns"),
        ("workloads/added.py", "import profiler.records", "workloads stands below"),
        ("profiler/added.py", "import analysis.ladder", "profiler knows no reader"),
        ("profiler/added.py", "import profiler.cli", "nobody imports the command line"),
    ],
)
def test_a_contract_is_broken_by_what_it_forbids_and_only_by_that(tmp_path, module, line, contract):
    """On bare packages of our names, so that this tests the contracts and not the code."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    bare = {"cli", "__main__", "store", "records", "errors", "intervals", "recorder", "run"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name for each in contracts for name in each.get("source_modules", ())}
    bare |= {name.partition(".")[2] for name in named if re.fullmatch(r"profiler\.(?!methods|execution)\w+", name)}
    names = [*(f"profiler/{name}.py" for name in sorted(bare)), "analysis/ladder.py"]
    packages = [*PACKAGES, "profiler/methods", "profiler/execution"]
    for name in [*names, *(f"{package}/__init__.py" for package in packages)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if module is not None:
        (tmp_path / module).write_text(line + "\n")
    broken = broken_contracts(tmp_path)
    assert len(broken) == (contract is not None)
    assert contract is None or broken[0].startswith(contract)
