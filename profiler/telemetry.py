"""Samples of the machine while a run is on: CPU and memory always, NVIDIA GPUs through NVML where there are any.

One thread with its own period; it never holds a step up beyond the CPU time it takes itself, which it
measures (`cost_ns`). What cannot be read is listed as unsupported with the reason and has no rows: a metric
that fails once is not asked again, so a dying GPU ends its rows instead of writing zeros.

Not here: energy integrated over a step, other vendors' GPUs, and whether the numbers mean contention
(`machine.Contention`).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil

from profiler.cores import CpuTime, cpu_time
from profiler.records import Unsupported

PERIOD_S = 0.5
#: Samples kept before they are handed on; the bound on memory, and on what a kill loses.
SAMPLES_PER_EMIT = 20
#: How long to wait for the thread at the end. A driver call on a lost GPU can hang for good.
JOIN_S = 5.0

COLUMNS = ("time_ns", "device", "metric", "value", "unit")


@dataclass(frozen=True)
class GpuMetric:
    """One NVML reading: how it is called here, its unit, and how to get it from (pynvml, handle)."""

    name: str
    unit: str
    read: Callable[[Any, Any], float]


GPU_METRICS = (
    GpuMetric("power", "W", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    GpuMetric("sm_clock", "MHz", lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    GpuMetric("memory_used", "bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    GpuMetric(
        "utilisation",
        "% of time with a kernel running",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    ),
    GpuMetric("temperature", "°C", lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
)


class Gpus:
    """The NVIDIA GPUs of this machine, as far as NVML lets them be read. Made anywhere, GPU or not.

    Args:
        indices: NVML's numbers (which ignore CUDA_VISIBLE_DEVICES) of the GPUs to read; None for all.

    Attributes:
        names: `nvml:0` → product name and UUID, to be matched with torch's devices.
        unsupported: what cannot be read, and why; grows when a metric fails later.
    """

    def __init__(self, indices: Sequence[int] | None = None) -> None:
        self.names: dict[str, str] = {}
        self.unsupported: list[Unsupported] = []
        self._nvml: Any = None
        self._readable: dict[tuple[str, GpuMetric], Any] = {}
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            self._none("nvidia-ml-py is not installed")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._none(f"NVML did not start: {error}")
            return
        self._nvml = nvml
        try:
            for index in range(nvml.nvmlDeviceGetCount()) if indices is None else indices:
                self._open(index)
            self.read()  # so that what is not readable is known at once
        except nvml.NVMLError as error:
            self._none(f"NVML lists no GPUs: {error}")
        if not self.names and not self.unsupported:
            self._none("the NVIDIA driver sees no GPU")

    def _none(self, reason: str) -> None:
        self.unsupported += [Unsupported(metric=f"nvml {metric.name}", reason=reason) for metric in GPU_METRICS]

    def _open(self, index: int) -> None:
        device = f"nvml:{index}"
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self.names[device] = f"{self._nvml.nvmlDeviceGetName(handle)} ({self._nvml.nvmlDeviceGetUUID(handle)})"
        except self._nvml.NVMLError as error:
            self.unsupported.append(Unsupported(metric=device, reason=str(error)))
            return
        for metric in GPU_METRICS:
            self._readable[device, metric] = handle

    def read(self) -> list[tuple[str, str, float, str]]:
        """(device, metric, value, unit) of everything that can be read now."""
        found = []
        for (device, metric), handle in list(self._readable.items()):
            try:
                found.append((device, metric.name, float(metric.read(self._nvml, handle)), metric.unit))
            except self._nvml.NVMLError as error:
                del self._readable[device, metric]
                self.unsupported.append(Unsupported(metric=f"{device} {metric.name}", reason=str(error)))
        return found

    def close(self) -> None:
        """Let NVML go."""
        if self._nvml is not None:
            self._readable.clear()
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self.unsupported.append(Unsupported(metric="nvml shutdown", reason=str(error)))
            self._nvml = None


class Telemetry:
    """Samples between enter and exit; rows of the `telemetry` table go to `emit`.

    Args:
        emit: called with columns of equal length, from the sampling thread, and once at the end from the
            caller's. An error it raises ends the sampling and is raised again at exit.
        period_s: time between samples; at least 0.1, because the kernel counts CPU time in hundredths.
        gpus: as in `Gpus`.
        process: the device under which this process's rows go; ranks of one run give each its own.

    Attributes:
        samples, cost_ns: how many were taken and the CPU time they took.
        devices: `Gpus.names`.
    """

    def __init__(
        self,
        emit: Callable[[dict[str, list[Any]]], object],
        *,
        period_s: float = PERIOD_S,
        gpus: Sequence[int] | None = None,
        process: str = "process",
    ) -> None:
        self.samples = 0
        self.cost_ns = 0
        self.devices: dict[str, str] = {}
        self._emit = emit
        self._period_s = period_s
        self._indices = gpus
        self._process = process
        self._rows: list[tuple[int, str, str, float, str]] = []
        self._unsupported: list[Unsupported] = []
        self._error: Exception | None = None
        self._stop = threading.Event()

    @property
    def unsupported(self) -> list[Unsupported]:
        """What was not measured, and why; complete after exit."""
        return [*self._unsupported, *self._gpus.unsupported]

    def __enter__(self) -> Self:
        self._gpus = Gpus(self._indices)
        self.devices = self._gpus.names
        self._thread = threading.Thread(target=self._work, name="gatewise-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self._unsupported.append(
                Unsupported(metric="telemetry", reason=f"a reading still hung {JOIN_S:g} s after the end")
            )
            return
        self._gpus.close()
        if self._error is None:
            self._hand_on()
        elif kind is None:
            raise self._error

    def _work(self) -> None:
        own = psutil.Process()
        before = (time.perf_counter(), cpu_time(), _seconds(own))
        while not self._stop.wait(self._period_s):
            began = time.thread_time_ns()
            try:
                before = self._sample(own, before)
                if self.samples % SAMPLES_PER_EMIT == 0:
                    self._hand_on()
            except Exception as error:  # kept for the caller's thread, which raises it
                self._error = error
                return
            finally:
                self.cost_ns += time.thread_time_ns() - began

    def _sample(self, own: psutil.Process, before: tuple[float, CpuTime, float]) -> tuple[float, CpuTime, float]:
        now, stamp = (time.perf_counter(), cpu_time(), _seconds(own)), time.time_ns()
        wall, machine = now[0] - before[0], now[1].total - before[1].total
        rows = [(self._process, "cpu", 100 * (now[2] - before[2]) / wall, "% of one core")]
        if machine > 0:
            # The kernel's count of time spent waiting for disks can step back a little, hence the bounds.
            share = min(1.0, max(0.0, (now[1].busy - before[1].busy) / machine))
            rows.append(("machine", "cpu", 100 * share, "% of all cores"))
        rows.append((self._process, "rss", float(own.memory_info().rss), "bytes"))
        self._rows += [(stamp, *row) for row in [*rows, *self._gpus.read()]]
        self.samples += 1
        return now

    def _hand_on(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._emit(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)))


def _seconds(process: psutil.Process) -> float:
    """CPU seconds of all threads of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)
