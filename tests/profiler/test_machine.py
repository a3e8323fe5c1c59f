import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from profiler import cores, machine

# -- facts --------------------------------------------------------------------------------------------


def test_facts_are_json_and_agree_with_the_kernel():
    found = json.loads(json.dumps(machine.facts(torch_threads=3)))
    assert found["torch_threads"] == 3
    assert found["cores_affinity"] == len(os.sched_getaffinity(0))
    assert 0 < found["cores_usable"] <= found["cores_affinity"] <= found["cores_logical"]
    mem_total_kb = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    assert found["memory_bytes"] == mem_total_kb * 1024
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_process_started_is_what_the_store_compares_with():
    assert machine.facts()["process_started"] == pytest.approx(psutil.Process(os.getpid()).create_time(), abs=0.01)


def test_versions_leave_out_what_is_not_installed():
    found = machine.versions(["numpy", "no-such-distribution-here"])
    assert set(found) == {"python", "numpy"}
    assert found["numpy"] == importlib.metadata.version("numpy")


# -- git ----------------------------------------------------------------------------------------------


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.git_state(tmp_path)["commit"] is None
    assert "not a git repository" in machine.git_state(tmp_path)["reason"]
    git(tmp_path, "init", "-q")
    assert machine.git_state(tmp_path) == {"commit": None, "reason": "the repository has no commit yet"}
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert machine.git_state(tmp_path) == {"commit": head, "dirty": False, "untracked": 0}
    (tmp_path / "new.py").write_text("3\n")
    assert machine.git_state(tmp_path) == {"commit": head, "dirty": False, "untracked": 1}
    (tmp_path / "a.py").write_text("2\n")
    assert machine.git_state(tmp_path) == {"commit": head, "dirty": True, "untracked": 1}


def test_git_state_without_git_or_folder(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    assert machine.git_state(gone) == {"commit": None, "reason": f"there is no folder {gone}"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.git_state(tmp_path) == {"commit": None, "reason": "git is not installed"}


# -- contention ---------------------------------------------------------------------------------------


def test_drift_compares_the_medians_of_the_outer_thirds():
    # thirds of 10 are 3 long: medians 10 and 12, the middle four do not count
    assert machine.drift([10, 9, 11, 99, 1, 50, 7, 13, 12, 11]) == pytest.approx(0.2)
    assert machine.drift([8] * 6 + [4] * 3) == pytest.approx(-0.5)


def test_drift_needs_nine_repeats():
    assert machine.drift([1.0] * 8) is None
    assert machine.drift([1.0] * 9) == 0.0


class Clock:
    """Stands in for the kernel's counters: a list of (seconds, busy, steal, ours), one a look."""

    def __init__(self, monkeypatch, looks, cpus=2):
        self.looks = iter(looks)
        self.now = (0.0, 0.0, 0.0, 0.0)
        monkeypatch.setattr(cores, "allowed_cpus", lambda: list(range(cpus)))
        monkeypatch.setattr(cores, "cpu_quota", lambda: None)
        monkeypatch.setattr(cores, "cpu_time", lambda cpus: cores.CpuTime(self.now[1], 0.0, self.now[2]))
        monkeypatch.setattr(machine, "_tree_time", lambda root: self.now[3])
        monkeypatch.setattr(machine.time, "monotonic", lambda: self.now[0])

    def tick(self):
        self.now = next(self.looks)


def test_shares_by_hand(monkeypatch):
    # Two cores. Window 1: 2 s, 3 s busy, 2.6 s ours: others 0.4 of 4 core-seconds = 0.1.
    # Window 2: 1 s, 1.9 s busy, 1.0 s ours: 0.9 of 2 = 0.45; steal 0.2 of 2 = 0.1.
    clock = Clock(monkeypatch, [(2.0, 3.0, 0.0, 2.6), (2.5, 3.0, 0.0, 2.6), (3.0, 4.9, 0.2, 3.6), (3.1, 9.0, 9.0, 3.6)])
    with machine.Contention() as seen:
        clock.tick()
        seen.mark()
        clock.tick()
        seen.mark()  # half a second later: too early, the window goes on
        clock.tick()
        seen.mark()
        clock.tick()  # the rest, 0.1 s, is too short to say anything
    assert seen.others == pytest.approx([0.1, 0.45])
    assert seen.steal == pytest.approx([0.0, 0.1])
    found = seen.verdict()
    assert found["contended"] is True
    assert found["others_share_max"] == pytest.approx(0.45)
    assert found["others_share"] == pytest.approx((0.1 * 2 + 0.45 * 1) / 3)
    assert found["windows"] == 2
    assert "45.0% of our cores' time in the busiest of 2 windows (limit 10%)" in found["sentence"]
    assert "hypervisor took 10.0% (limit 5%)" in found["sentence"]
    json.dumps(found)


def test_others_are_never_below_zero(monkeypatch):
    clock = Clock(monkeypatch, [(1.0, 1.0, 0.0, 1.5)])
    with machine.Contention() as seen:
        clock.tick()
    assert seen.others == [0.0]


def quiet(monkeypatch, cpus=2):
    clock = Clock(monkeypatch, [(1.0, 1.0, 0.0, 1.0)], cpus)
    with machine.Contention() as seen:
        clock.tick()
    return seen


def test_a_quiet_run_is_not_contended_and_says_the_numbers(monkeypatch):
    found = quiet(monkeypatch).verdict(twin_times=[1.0] * 9, ranks=1, threads_per_rank=2)
    assert found["contended"] is False
    assert found["sentence"] == (
        "No contention seen. Within limits: other processes used 0.0% of our cores' time in the busiest of 1 windows "
        "(limit 10%); the hypervisor took 0.0% (limit 5%); the twin's median changed by +0.0% from the first to the "
        "last third of 9 repeats (limit ±5%); ranks × threads = 1 × 2 = 2 on 2 usable cores."
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"twin_times": [1.0] * 6 + [1.051] * 3}, True),
        ({"twin_times": [1.0] * 6 + [0.949] * 3}, True),
        ({"twin_times": [1.0] * 6 + [1.049] * 3}, False),
        ({"twin_times": [1.0] * 4 + [9.0] * 4}, False),  # too few to judge
        ({"ranks": 2}, False),
        ({"ranks": 3}, True),
        ({"ranks": 2, "threads_per_rank": 2}, True),
    ],
)
def test_what_counts_as_contention(monkeypatch, arguments, expected):
    assert quiet(monkeypatch).verdict(**arguments)["contended"] is expected


def test_a_run_too_short_to_tell_says_so(monkeypatch):
    clock = Clock(monkeypatch, [(0.1, 0.2, 0.0, 0.0)])
    with machine.Contention() as seen:
        clock.tick()
    found = seen.verdict()
    assert found["others_share_max"] is None
    assert found["others_share"] is None
    assert "unknown" in found["sentence"]


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def test_a_real_neighbour_is_seen_and_our_own_children_are_not():
    me = psutil.Process()
    worker = multiprocessing.get_context("spawn").Process(target=spin, args=(20,))
    worker.start()
    try:
        while psutil.Process(worker.pid).cpu_times().user < 0.3:
            time.sleep(0.02)
        outside = psutil.Process(worker.pid)  # a tree that holds the worker alone: we are its neighbour
        with machine.Contention(me, window_s=0.5) as ours, machine.Contention(outside, window_s=0.5) as theirs:
            spin(0.8)
    finally:
        worker.kill()
        worker.join()
    # We spun for the whole window, so the worker's own watch sees at least that as another process,
    # while ours counts both as ours: the difference is the time that we two used.
    assert theirs.others[0] - ours.others[0] > 0.1
