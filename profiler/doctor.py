"""What would keep a run on this machine from working, or its times from meaning what they say.

`checks()` looks and returns; it changes nothing and prints nothing (the command line renders). `fail` is
something a run cannot do without, `warn` something that a run would be without or would suffer from.

Not here: what happens during a run (`machine.Contention` and the rules of `run`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from profiler import compiled, cores, machine
from profiler.errors import InputError
from profiler.telemetry import Gpus
from profiler.user_cache import cache_dir

Status = Literal["ok", "warn", "fail"]

PACKAGES = ("profiler", "workloads", "analysis", "dashboard")
TESTED_PYTHONS = ((3, 11),)
#: Import names that do not follow from the distribution's name.
MODULES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml", "torch-tb-profiler": "torch_tb_profiler"}
#: SmolLM2-135M in the cache with the room to build it, and a few runs.
FREE_BYTES = 3 * 2**30
#: How long to look at what else the cores are doing.
LOOK_S = 0.5
#: Share of the time of all checks that importing the dependencies takes.
IMPORTS_SHARE = 0.85


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, and what to do about it where that is not `ok`."""

    name: str
    status: Status
    detail: str
    remedy: str | None = None


def checks(
    report: Callable[[str], None] = lambda what: None, share: Callable[[float], None] = lambda part: None
) -> list[Check]:
    """Every check, in the order to read them. Takes some seconds: the dependencies are really imported.

    Args:
        report: told what is being looked at.
        share: told the share of the checks that is done.
    """
    report("looking at this machine")
    found = [python(), packages(), *dependencies(share=lambda part: share(IMPORTS_SHARE * part))]
    gpus = Gpus()
    try:
        found += [nvml(gpus), torch_build(gpus)]
    finally:
        gpus.close()
    return [*found, tensorboard(), pip(), compiler(), cache(), processor(), threads(), governor(), neighbours()]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python itself. An earlier one than 3.11 cannot load this file."""
    detail = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version[:2] in TESTED_PYTHONS:
        return Check("python", "ok", detail)
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED_PYTHONS)
    return Check("python", "warn", f"{detail}; the tests run on {tested}", "if something fails, try one of those first")


def packages(names: Iterable[str] = PACKAGES) -> Check:
    """Whether our four packages are ours: others on the package index have the same names."""
    home = Path(__file__).resolve().parents[1]
    wrong = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            wrong.append(f"{name} is not found")
        elif spec.origin is None or Path(spec.origin).resolve().parent.parent != home:
            wrong.append(f"{name} comes from {spec.origin or 'a folder without __init__.py'}")
    owners = importlib.metadata.packages_distributions()
    for name in names:
        others = sorted({owner for owner in owners.get(name, []) if owner != "gatewise"})
        if others:
            wrong.append(f"the installed distribution {', '.join(others)} also has a package {name}")
    if wrong:
        return Check(
            "packages",
            "fail",
            "; ".join(wrong),
            "uninstall the other distribution, or use a virtual environment of its own for gatewise",
        )
    return Check("packages", "ok", f"{', '.join(names)} come from {home}")


def declared() -> list[Requirement]:
    """What gatewise depends on: from the installed distribution, else from the checkout's pyproject.toml."""
    try:
        lines = importlib.metadata.requires("gatewise") or []
    except importlib.metadata.PackageNotFoundError:
        path = Path(__file__).resolve().parents[1] / "pyproject.toml"
        lines = tomllib.loads(path.read_text())["project"]["dependencies"] if path.exists() else []
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def dependencies(
    requirements: Iterable[Requirement] | None = None, share: Callable[[float], None] = lambda part: None
) -> list[Check]:
    """One check a dependency: installed, within its bounds, and imports."""
    wanted = declared() if requirements is None else list(requirements)
    if not wanted:
        return [Check("dependencies", "warn", "bounds unknown: gatewise is neither installed nor a checkout")]
    found = []
    for requirement in sorted(wanted, key=lambda r: r.name.lower()):
        found.append(_dependency(requirement))
        share(len(found) / len(wanted))
    return found


def _dependency(requirement: Requirement) -> Check:
    name = requirement.name
    remedy = f"pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "fail", f"not installed; {requirement.specifier} is needed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "fail", f"{version}; {requirement.specifier} is needed", remedy)
    module = MODULES.get(name.lower(), name.lower().replace("-", "_"))
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything while it is imported
        return Check(
            name,
            "fail",
            f"{version}, but `import {module}` raises {type(error).__name__}: {error}",
            f"pip install --force-reinstall --no-deps {name}=={version}",
        )
    return Check(name, "ok", f"{version} ({requirement.specifier})")


def nvml(gpus: Gpus) -> Check:
    """Whether power, clock, memory, utilisation and temperature of GPUs can be read."""
    missing = "; ".join(sorted({f"{u.metric}: {u.reason}" for u in gpus.unsupported}))
    if not gpus.names:
        reason = gpus.unsupported[0].reason
        return Check("NVML", "warn", f"no GPU telemetry: {reason}", "nothing, unless this machine has an NVIDIA GPU")
    detail = ", ".join(f"{device} {name}" for device, name in gpus.names.items())
    if missing:
        return Check("NVML", "warn", f"{detail}; not readable: {missing}", "these will be `unsupported` in runs")
    return Check("NVML", "ok", detail)


def torch_build(gpus: Gpus) -> Check:
    """Which device runs will use."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # said in full by the dependency's own check
        return Check("torch device", "fail", f"torch does not import ({type(error).__name__})", "see torch above")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("torch device", "ok", f"built with {built}; {len(names)} × {names[0]}")
    detail = f"built with {built}; runs use the CPU"
    if gpus.names:
        remedy = "install a torch build for this driver's CUDA version"
        return Check("torch device", "warn", f"{detail}, though the driver sees {len(gpus.names)} GPU", remedy)
    return Check("torch device", "ok", detail)


def tensorboard() -> Check:
    """Whether TensorBoard would offer the page that opens a run's traces."""
    plugins = {point.name for point in importlib.metadata.entry_points(group="tensorboard_plugins")}
    if "torch_profiler" in plugins:
        return Check("TensorBoard plugin", "ok", "torch_profiler is registered")
    return Check(
        "TensorBoard plugin",
        "warn",
        f"torch_profiler is not among the registered plugins ({', '.join(sorted(plugins)) or 'none'})",
        "pip install torch-tb-profiler tensorboard",
    )


def pip() -> Check:
    """Packaged models are downloaded by pip."""
    if importlib.util.find_spec("pip") is not None:
        return Check("pip", "ok", importlib.metadata.version("pip"))
    return Check("pip", "warn", "not in this environment: `models fetch` cannot download", "python -m ensurepip")


def compiler() -> Check:
    """Operators of our own are compiled at first use."""
    try:
        return Check("C++ compiler", "ok", " ".join(compiled.compiler()))
    except compiled.Uncompiled as error:
        detail = f"{error}: on a CPU, experts of strategy packed are then multiplied one by one, which takes longer"
        return Check("C++ compiler", "warn", detail, "install g++, or name another compiler in CXX")


def cache() -> Check:
    """Whether models can be kept, and how much room there is."""
    try:
        folder = cache_dir()
    except InputError as error:
        return Check("cache", "fail", str(error), "set GATEWISE_CACHE to a folder")
    probe = folder
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    try:
        with tempfile.TemporaryFile(dir=probe):
            free = shutil.disk_usage(probe).free
    except OSError as error:
        detail = f"{folder} cannot be written: {error.strerror or error}"
        return Check("cache", "fail", detail, "set GATEWISE_CACHE to a folder you may write to")
    detail = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < FREE_BYTES:
        need = f"{FREE_BYTES / 2**30:g} GiB are enough for the packaged model and a few runs"
        return Check("cache", "warn", f"{detail}; {need}", "free space, or set GATEWISE_CACHE to another disk")
    return Check("cache", "ok", detail)


def processor() -> Check:
    """How much of the machine this process may use."""
    facts = machine.facts()
    usable, logical = facts["cores_usable"], facts["cores_logical"]
    quota = "no cgroup quota" if facts["cores_quota"] is None else f"cgroup quota of {facts['cores_quota']:g} cores"
    physical = facts["cores_affinity_physical"]
    detail = (
        f"{facts['cpu'] or 'unknown processor'}: {usable:g} of {logical} logical cores usable "
        f"(affinity {facts['cores_affinity']}, on {'an unknown number of' if physical is None else physical} "
        f"physical; {quota})"
    )
    if facts["cores_quota"] is not None and facts["cores_quota"] < facts["cores_affinity"]:
        remedy = f"pin the process to {max(1, int(usable))} cores (taskset): a quota stops all threads part of the time"
        return Check("cores", "warn", detail, remedy)
    return Check("cores", "ok", detail)


def threads() -> Check:
    """Whether the compute threads fit the cores."""
    usable = cores.usable_cores()
    given = {name: os.environ[name] for name in machine.THREAD_VARIABLES if name in os.environ}
    torch: Any = sys.modules.get("torch")
    found = {**given, **({"torch": str(torch.get_num_threads())} if torch is not None else {})}
    detail = ", ".join(f"{name} {value}" for name, value in found.items()) or "no thread variable is set"
    detail += f"; {usable:g} usable cores"
    over = [name for name, value in found.items() if value.isdecimal() and int(value) > usable]
    if over:
        return Check("threads", "warn", f"{detail}: more threads than cores", f"export OMP_NUM_THREADS={int(usable)}")
    return Check("threads", "ok", detail)


def governor() -> Check:
    """Whether the clock is left alone while a run is on."""
    found = cores.governor()
    if found is None:
        return Check(
            "clock governor",
            "warn",
            "cannot be read here (usual in a virtual machine or container)",
            "nothing to do: every run prints the drift between its first and last repeats",
        )
    if found == "performance":
        return Check("clock governor", "ok", found)
    return Check(
        "clock governor", "warn", f"{found}: the clock follows the load", "cpupower frequency-set -g performance"
    )


def neighbours() -> Check:
    """What else uses our cores right now."""
    with machine.Contention(window_s=LOOK_S) as seen:
        time.sleep(LOOK_S)
    found = seen.verdict()
    share = found["others_share_max"]
    detail = f"{share:.0%} of our cores' time (limit {machine.OTHERS_LIMIT:.0%}), load average {os.getloadavg()[0]:.2f}"
    if share > machine.OTHERS_LIMIT:
        return Check("other processes", "warn", detail, "stop what else is running before you measure")
    return Check("other processes", "ok", detail)
