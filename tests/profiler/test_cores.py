import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiler import cores, machine


def test_affinity_narrows_the_usable_cores():
    first = min(os.sched_getaffinity(0))
    script = (
        f"import os; os.sched_setaffinity(0, {{{first}}});"
        "from profiler import machine; f = machine.facts();"
        "print(f['cores_affinity'], f['cores_affinity_physical'], f['cores_usable'] <= 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    count, physical, narrowed = done.stdout.split()
    assert (count, narrowed) == ("1", "True")
    assert physical in ("1", "None")  # None where the kernel does not tell the topology


def cgroup_tree(tmp_path, monkeypatch, lines, files):
    proc = tmp_path / "cgroup"
    proc.write_text("\n".join(lines) + "\n")
    mount = tmp_path / "sys"
    mount.mkdir()
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text + "\n")
    monkeypatch.setattr(cores, "PROC_CGROUP", proc)
    monkeypatch.setattr(cores, "SYS_CGROUP", mount)


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        pytest.param(["0::/a/b"], {"a/b/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param(["0::/a/b"], {"a/b/cpu.max": "max 100000"}, None, id="v2-unlimited"),
        pytest.param(
            ["0::/a/b"],
            {"a/b/cpu.max": "300000 100000", "a/cpu.max": "50000 100000"},
            0.5,
            id="v2-the-parent-is-tighter",
        ),
        pytest.param(["0::/host/path"], {"cpu.max": "200000 100000"}, 2.0, id="v2-container-sees-its-group-as-root"),
        pytest.param(
            ["4:memory:/m", "3:cpu,cpuacct:/a"],
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            2.5,
            id="v1",
        ),
        pytest.param(
            ["3:cpu:/"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, id="v1-unlimited"
        ),
        pytest.param(["0::/"], {}, None, id="no-files"),
    ],
)
def test_cpu_quota(tmp_path, monkeypatch, lines, files, quota):
    cgroup_tree(tmp_path, monkeypatch, lines, files)
    assert cores.cpu_quota() == quota


def test_a_quota_below_the_affinity_is_what_is_usable(tmp_path, monkeypatch):
    cgroup_tree(tmp_path, monkeypatch, ["0::/a"], {"a/cpu.max": "50000 100000"})
    assert cores.usable_cores() == 0.5


def test_a_quota_above_the_affinity_changes_nothing(tmp_path, monkeypatch):
    cgroup_tree(tmp_path, monkeypatch, ["0::/a"], {"a/cpu.max": "100000000 100000"})
    assert cores.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        (["0::/a"], {"a/memory.max": str(64 * 2**20)}, 64 * 2**20),
        (["0::/a"], {"a/memory.max": "max"}, None),
        (["7:memory:/"], {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_memory_limit(tmp_path, monkeypatch, lines, files, limit):
    cgroup_tree(tmp_path, monkeypatch, lines, files)
    assert machine.memory_limit() == limit


def test_no_proc_means_no_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "PROC_CGROUP", tmp_path / "absent")
    assert cores.cpu_quota() is None


@pytest.mark.parametrize(("text", "expected"), [("powersave\n", "powersave"), (None, None)])
def test_governor(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(cores, "SYS_CPU", tmp_path)
    if text is not None:
        path = tmp_path / f"cpu{min(os.sched_getaffinity(0))}" / "cpufreq" / "scaling_governor"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert cores.governor() == expected


def test_physical_cores_count_siblings_once(tmp_path, monkeypatch):
    for cpu, package, core in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 0)]:
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(cores, "SYS_CPU", tmp_path)
    assert cores.physical_cores([0, 1, 2, 3]) == 3
    assert cores.physical_cores([0, 1]) == 1
    assert cores.physical_cores([0, 9]) is None


def test_cpu_time_reads_the_named_cpus_and_counts_guests_once(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    # name user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text(
        "cpu  600 0 0 0 0 0 0 0 0 0\n"
        "cpu0 100 10 20 500 50 3 4 7 90 5\n"
        "cpu1 1 1 1 1 1 1 1 1 1 1\n"
        "cpu10 900 0 0 0 0 0 0 0 0 0\n"
        "intr 5 5\n"
    )
    monkeypatch.setattr(cores, "PROC_STAT", stat)
    tick = os.sysconf("SC_CLK_TCK")
    found = cores.cpu_time([0, 1])
    assert found.busy * tick == pytest.approx(137 + 5)
    assert found.idle * tick == pytest.approx(550 + 2)
    assert found.steal * tick == pytest.approx(7 + 1)
    assert cores.cpu_time().busy * tick == pytest.approx(600)
