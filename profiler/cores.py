"""The cores this process may use, and the time spent on them: affinity, cgroup quota, topology, clock governor.

Linux only, read from /proc and /sys. What the kernel does not say is None.

Not here: what the figures mean for a run (`machine.Contention`, `doctor`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
PROC_STAT = Path("/proc/stat")
SYS_CGROUP = Path("/sys/fs/cgroup")
SYS_CPU = Path("/sys/devices/system/cpu")


def allowed_cpus() -> list[int]:
    """Numbers of the logical CPUs this process may be scheduled on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota() -> float | None:
    """Cores' worth of time the cgroup allows per period, or None where it sets no quota."""
    found = []
    for text in cgroup_limits("cpu.max", "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, period = text.split()
        if quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def usable_cores() -> float:
    """Cores' worth of time this process can get: its affinity, or the cgroup's quota where that is less."""
    affinity = float(len(allowed_cpus()))
    quota = cpu_quota()
    return affinity if quota is None else min(affinity, quota)


def cgroup_limits(unified: str, controller: str, *legacy: str) -> list[str]:
    """Contents of a limit in this process's cgroup and every group above it; version 2 and version 1.

    Args:
        unified: the file of version 2.
        controller, legacy: the controller and the files of version 1, read together and joined by spaces.
    """
    try:
        lines = PROC_CGROUP.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        names = (unified,) if controllers == "" else legacy
        if controllers and controller not in controllers.split(","):
            continue
        mount = SYS_CGROUP if controllers == "" else SYS_CGROUP / controllers
        # A container often sees its own group as the root, while /proc names it by its path outside.
        for level in [mount / group.lstrip("/"), *(mount / group.lstrip("/")).parents]:
            if level == mount or mount in level.parents:
                try:
                    found.append(" ".join((level / name).read_text().strip() for name in names))
                except OSError:
                    continue
    return found


def physical_cores(cpus: Sequence[int]) -> int | None:
    """Physical cores behind some logical CPUs, or None where the kernel does not say."""
    seen = set()
    for cpu in cpus:
        topology = SYS_CPU / f"cpu{cpu}" / "topology"
        try:
            seen.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return None
    return len(seen)


def governor() -> str | None:
    """The clock governor of our first core, or None where it cannot be read (most virtual machines)."""
    try:
        return (SYS_CPU / f"cpu{allowed_cpus()[0]}" / "cpufreq" / "scaling_governor").read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class CpuTime:
    """Seconds of CPU time since boot, summed over some logical CPUs."""

    busy: float
    idle: float
    steal: float

    @property
    def total(self) -> float:
        """All the time those CPUs had."""
        return self.busy + self.idle + self.steal


def cpu_time(cpus: Sequence[int] | None = None) -> CpuTime:
    """CPU time of the given logical CPUs (None: of all) so far. Waiting for a disk counts as idle.

    Read from the kernel's own table because it names the CPUs; psutil numbers those online from 0.
    """
    wanted = {"cpu"} if cpus is None else {f"cpu{cpu}" for cpu in cpus}
    busy = idle = steal = 0
    for line in PROC_STAT.read_text().splitlines():
        name, *counts = line.split()
        if name in wanted:
            # A guest's time is in `user` and `nice` already, so the two last columns are left out.
            user, nice, system, idling, waiting, interrupt, soft_interrupt, stolen = map(int, counts[:8])
            busy += user + nice + system + interrupt + soft_interrupt
            idle += idling + waiting
            steal += stolen
    tick = os.sysconf("SC_CLK_TCK")
    return CpuTime(busy / tick, idle / tick, steal / tick)
