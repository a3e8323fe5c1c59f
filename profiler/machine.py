"""What a run ran on (facts, versions, commit) and whether it had the machine to itself (contention).

Everything here lands in the manifest as plain JSON values, beside each other, so that a reader can judge a
time without asking whoever measured it. What cannot be read on this machine is None with a reason next to
it, never 0.

Not here: reading cores and their clocks (`cores`), samples over time (`telemetry`), and what is wrong with the
machine in words (`doctor`).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from profiler import cores

#: The distributions whose versions can change a figure or the way it is read.
DISTRIBUTIONS = (
    "gatewise",
    "accelerate",
    "duckdb",
    "gguf",
    "msgspec",
    "numpy",
    "nvidia-ml-py",
    "pandas",
    "peft",
    "plotly",
    "psutil",
    "pyarrow",
    "pydantic",
    "safetensors",
    "scipy",
    "streamlit",
    "tensorboard",
    "tokenizers",
    "torch",
    "torch-tb-profiler",
    "transformers",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

#: Others' share of our cores' time, in any one window, above which a run counts as contended.
OTHERS_LIMIT = 0.10
#: The hypervisor's share (steal) of our cores' time, in any one window.
STEAL_LIMIT = 0.05
#: Relative change of the twin's median between the first and the last third of the repeats.
DRIFT_LIMIT = 0.05
#: Shortest window a share is computed over. The kernel counts CPU time in hundredths of a second.
WINDOW_S = 1.0

#: Below this no share is given at all.
SHORTEST_S = 0.25


def facts(torch_threads: int | None = None) -> dict[str, Any]:
    """The machine as this process sees it: cores it may use, memory, system, Python, thread settings.

    Args:
        torch_threads: what `torch.get_num_threads()` says; passed in, so that torch is not loaded here.

    Returns:
        JSON values. `cores_usable` is the smaller of the affinity and the cgroup's CPU quota (a fraction of
        a core is possible); `process_started` is this process's start in seconds since 1970, by which
        `store` tells a reused process id from this one.
    """
    allowed = cores.allowed_cpus()
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores_logical": psutil.cpu_count(logical=True),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_affinity": len(allowed),
        "cores_affinity_physical": cores.physical_cores(allowed),
        "cores_quota": cores.cpu_quota(),
        "cores_usable": cores.usable_cores(),
        "cpu_governor": cores.governor(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_limit(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "torch_threads": torch_threads,
        "thread_variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "process_started": psutil.Process().create_time(),
    }


def versions(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Installed version of each distribution; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(path: Path) -> dict[str, Any]:
    """The commit of the working tree `path` is in, and how the tree differs from it.

    Returns:
        `{"commit": sha, "dirty": tracked files changed, "untracked": number of files git neither tracks nor
        ignores}`, or `{"commit": None, "reason": why}` where there is no git, no repository or no commit.
    """
    if not path.is_dir():
        return {"commit": None, "reason": f"there is no folder {path}"}
    try:
        _git(path, "rev-parse", "--git-dir")
        commit = _git(path, "rev-list", "--max-count=1", "HEAD", "--")
        changes = _git(path, "status", "--porcelain", "--untracked-files=all").splitlines()
    except FileNotFoundError:
        return {"commit": None, "reason": "git is not installed"}
    except subprocess.TimeoutExpired as error:
        return {"commit": None, "reason": f"git did not answer in {error.timeout:g} s"}
    except subprocess.CalledProcessError as error:
        if "rev-list" in error.cmd:
            return {"commit": None, "reason": "the repository has no commit yet"}
        lines = error.stderr.strip().splitlines() or [f"git ended with {error.returncode}"]
        return {"commit": None, "reason": lines[0].removeprefix("fatal: ")}
    untracked = sum(line.startswith("??") for line in changes)
    return {"commit": commit, "dirty": len(changes) > untracked, "untracked": untracked}


def _git(path: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=path,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


# -- processor and memory -----------------------------------------------------------------------------


def memory_limit() -> int | None:
    """Bytes the cgroup allows, or None where it sets no limit below the machine's memory."""
    found = [
        int(text) for text in cores.cgroup_limits("memory.max", "memory", "memory.limit_in_bytes") if text != "max"
    ]
    smallest = min(found, default=None)
    return smallest if smallest is not None and smallest < psutil.virtual_memory().total else None


def cpu_model() -> str | None:
    """The processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


# -- contention ---------------------------------------------------------------------------------------


def _tree_time(root: psutil.Process) -> float:
    """CPU seconds of a process and everything it started, children that ended and were waited for included."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            t = process.cpu_times()
        except psutil.Error:
            continue  # it ended while we looked
        total += t.user + t.system + t.children_user + t.children_system
    return total


def drift(times: Sequence[float]) -> float | None:
    """Relative change of the median between the first and the last third of `times` (one a repeat, in order).

    0.05 is 5 % slower at the end. None for fewer than 9 repeats: a third would hold under three.
    """
    if len(times) < 9:
        return None
    third = len(times) // 3
    return statistics.median(times[-third:]) / statistics.median(times[:third]) - 1


class Contention:
    """Watches, between enter and exit, what else used the cores this process may use.

    Call `mark()` between repeats, outside any timed step: a mark at least `window_s` after the last closes a
    window; an earlier one reads a clock and does nothing. A share is CPU time ÷ (wall time × CPUs of our
    affinity); ours is that of the process tree below `root`.

    Args:
        root: the process whose tree is ours; this process by default. Ranks of one run pass their launcher,
            or each sees the others as contention.
        window_s: the shortest window.
    """

    def __init__(self, root: psutil.Process | None = None, *, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.cpus = cores.allowed_cpus()
        self.others: list[float] = []
        self.steal: list[float] = []
        self._seconds: list[float] = []
        self._root = root or psutil.Process()

    def __enter__(self) -> Self:
        self._last = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self.window_s / 2 if self.others else SHORTEST_S)

    def mark(self) -> None:
        """Close the window that began at the last mark, if it is long enough."""
        self._close(self.window_s)

    def _now(self) -> tuple[float, cores.CpuTime, float]:
        return time.monotonic(), cores.cpu_time(self.cpus), _tree_time(self._root)

    def _close(self, shortest_s: float) -> None:
        if time.monotonic() - self._last[0] < shortest_s:
            return
        (began, cpus_before, ours_before), (ended, cpus, ours) = self._last, self._now()
        self._last = (ended, cpus, ours)
        capacity = (ended - began) * len(self.cpus)
        # A child that ends unwaited takes its time with it, so our own difference can fall below 0. The bounds
        # are for the counters' steps of 0.01 s, which can put a share a little outside 0 to 1.
        others = (cpus.busy - cpus_before.busy) - max(0.0, ours - ours_before)
        self.others.append(min(1.0, max(0.0, others / capacity)))
        self.steal.append(max(0.0, cpus.steal - cpus_before.steal) / capacity)
        self._seconds.append(ended - began)

    def verdict(self, *, twin_times: Sequence[float] = (), ranks: int = 1, threads_per_rank: int = 1) -> dict[str, Any]:
        """What was seen, and whether it is too much, as JSON values for the manifest.

        Args:
            twin_times: the twin's bare step times in the order they were measured, one a repeat.
            ranks, threads_per_rank: processes computing at once on these cores, and the threads of each.

        Returns:
            `contended`, a `sentence` with every figure and its limit, and the figures themselves. Load
            averages are given but never judged: they count this run too.
        """
        changed, usable = drift(twin_times), cores.usable_cores()
        others, steal = max(self.others, default=None), max(self.steal, default=None)
        threads = ranks * threads_per_rank
        findings = [
            (
                others is not None and others > OTHERS_LIMIT,
                "other processes' share of our cores unknown, the run was too short to tell"
                if others is None
                else f"other processes used {others:.1%} of our cores' time in the busiest of {len(self.others)} "
                f"windows (limit {OTHERS_LIMIT:.0%})",
            ),
            (
                steal is not None and steal > STEAL_LIMIT,
                "steal unknown" if steal is None else f"the hypervisor took {steal:.1%} (limit {STEAL_LIMIT:.0%})",
            ),
            (
                changed is not None and abs(changed) > DRIFT_LIMIT,
                f"drift unknown (repeats: {len(twin_times)}, of the 9 it takes)"
                if changed is None
                else f"the twin's median changed by {changed:+.1%} from the first to the last third of "
                f"{len(twin_times)} repeats (limit ±{DRIFT_LIMIT:.0%})",
            ),
            (
                ranks > usable or threads > usable,
                f"ranks × threads = {ranks} × {threads_per_rank} = {threads} on {usable:g} usable cores",
            ),
        ]
        over = [text for bad, text in findings if bad]
        within = [text for bad, text in findings if not bad]
        seconds = sum(self._seconds)
        return {
            "contended": bool(over),
            "sentence": ("Contended: " + "; ".join(over) + ". " if over else "No contention seen. ")
            + ("Within limits: " + "; ".join(within) + "." if within else ""),
            "others_share": sum(o * s for o, s in zip(self.others, self._seconds, strict=True)) / seconds
            if seconds
            else None,
            "others_share_max": others,
            "steal_share_max": steal,
            "windows": len(self.others),
            "window_s": self.window_s,
            "cores": usable,
            "load_average": list(os.getloadavg()),
            "drift": changed,
            "ranks": ranks,
            "threads_per_rank": threads_per_rank,
            "limits": {"others_share_max": OTHERS_LIMIT, "steal_share_max": STEAL_LIMIT, "drift": DRIFT_LIMIT},
        }
