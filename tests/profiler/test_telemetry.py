import sys
import threading
import time
import types

import pyarrow as pa
import pytest

from profiler import telemetry
from profiler.records import TABLES
from profiler.telemetry import Gpus, Telemetry


class NVMLError(Exception):
    pass


def fake_nvml(gpus=1, init_error=None):
    """A pynvml that reads fixed values; `module.fail[function] = message` makes one function raise."""
    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = 1, 0
    module.fail = {}
    module.open = 0

    def function(name, value):
        def call(*arguments):
            if name in module.fail:
                raise NVMLError(module.fail[name])
            return value(*arguments) if callable(value) else value

        setattr(module, name, call)

    def init():
        if init_error is not None:
            raise NVMLError(init_error)
        module.open += 1

    def shutdown():
        module.open -= 1

    module.nvmlInit = init
    function("nvmlShutdown", shutdown)
    function("nvmlDeviceGetCount", gpus)
    function("nvmlDeviceGetHandleByIndex", lambda index: index)
    function("nvmlDeviceGetName", "Fake GPU")
    function("nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    function("nvmlDeviceGetPowerUsage", lambda handle: 123_456 + 1000 * handle)
    function("nvmlDeviceGetClockInfo", lambda handle, clock: {1: 1980}[clock])
    function("nvmlDeviceGetMemoryInfo", types.SimpleNamespace(used=7 * 2**30, total=80 * 2**30))
    function("nvmlDeviceGetUtilizationRates", types.SimpleNamespace(gpu=37, memory=11))
    function("nvmlDeviceGetTemperature", lambda handle, sensor: {0: 41}[sensor])
    return module


@pytest.fixture
def nvml(monkeypatch):
    module = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(init_error="NVML Shared Library Not Found"))


def values(columns, device, metric):
    rows = zip(columns["device"], columns["metric"], columns["value"], strict=True)
    return [value for d, m, value in rows if (d, m) == (device, metric)]


def collect(seconds=0.35, **options):
    """Columns of a short recording, joined, and the recorder."""
    parts = []
    with Telemetry(parts.append, period_s=0.1, **options) as recorder:
        spin(seconds)
    joined = {name: [value for part in parts for value in part[name]] for name in telemetry.COLUMNS}
    return joined, recorder


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


# -- GPUs ---------------------------------------------------------------------------------------------


def test_every_metric_in_its_unit(nvml):
    gpus = Gpus()
    assert gpus.read() == [
        ("nvml:0", "power", 123.456, "W"),
        ("nvml:0", "sm_clock", 1980.0, "MHz"),
        ("nvml:0", "memory_used", 7516192768.0, "bytes"),
        ("nvml:0", "utilisation", 37.0, "% of time with a kernel running"),
        ("nvml:0", "temperature", 41.0, "°C"),
    ]
    assert gpus.names == {"nvml:0": "Fake GPU (GPU-0)"}
    assert gpus.unsupported == []
    gpus.close()
    assert nvml.open == 0


def test_chosen_gpus_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=4))
    gpus = Gpus([2])
    assert {(device, value) for device, metric, value, _ in gpus.read() if metric == "power"} == {("nvml:2", 125.456)}


@pytest.mark.parametrize(
    ("reason", "module"),
    [
        ("NVML did not start: NVML Shared Library Not Found", fake_nvml(init_error="NVML Shared Library Not Found")),
        ("NVML did not start: Driver Not Loaded", fake_nvml(init_error="Driver Not Loaded")),
        ("the NVIDIA driver sees no GPU", fake_nvml(gpus=0)),
        ("nvidia-ml-py is not installed", None),  # None in sys.modules makes the import fail
    ],
)
def test_no_gpu_is_unsupported_with_the_reason(monkeypatch, reason, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpus = Gpus()
    assert gpus.read() == []
    assert {u.metric for u in gpus.unsupported} == {
        "nvml power",
        "nvml sm_clock",
        "nvml memory_used",
        "nvml utilisation",
        "nvml temperature",
    }
    assert {u.reason for u in gpus.unsupported} == {reason}
    gpus.close()


def test_no_permission_to_one_gpu_leaves_the_others(monkeypatch):
    module = fake_nvml(gpus=2)

    def refuse_first(index):
        if index == 0:
            raise NVMLError("Insufficient Permissions")
        return index

    module.nvmlDeviceGetHandleByIndex = refuse_first
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpus = Gpus()
    assert {device for device, *_ in gpus.read()} == {"nvml:1"}
    assert [(u.metric, u.reason) for u in gpus.unsupported] == [("nvml:0", "Insufficient Permissions")]


def test_a_metric_that_is_not_supported_has_no_rows_at_all(nvml):
    nvml.fail["nvmlDeviceGetPowerUsage"] = "Not Supported"
    columns, recorder = collect()
    assert values(columns, "nvml:0", "power") == []
    assert set(values(columns, "nvml:0", "sm_clock")) == {1980.0}
    assert [(u.metric, u.reason) for u in recorder.unsupported] == [("nvml:0 power", "Not Supported")]


def test_a_gpu_that_dies_ends_its_rows_and_nothing_else(nvml):
    parts = []
    with Telemetry(parts.append, period_s=0.1) as recorder:
        while recorder.samples < 2:
            time.sleep(0.01)
        for name in dir(nvml):
            if name.startswith("nvmlDeviceGet"):
                nvml.fail[name] = "GPU is lost"
        nvml.fail["nvmlShutdown"] = "Uninitialized"
        at_death = recorder.samples
        while recorder.samples < at_death + 2:
            time.sleep(0.01)
    (columns,) = parts
    power = values(columns, "nvml:0", "power")
    assert set(power) == {123.456}
    assert at_death <= len(power) < recorder.samples
    assert len(values(columns, "process", "rss")) == recorder.samples
    reasons = {u.metric: u.reason for u in recorder.unsupported}
    assert reasons["nvml:0 power"] == reasons["nvml:0 temperature"] == "GPU is lost"
    assert reasons["nvml shutdown"] == "Uninitialized"


# -- CPU and memory, and the thread -------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu")
def test_cpu_and_memory_of_a_busy_process():
    held = bytearray(b"x") * (64 * 2**20)
    columns, recorder = collect(seconds=0.6, process="process:3")
    assert recorder.samples >= 2
    cpu = values(columns, "process:3", "cpu")
    assert len(cpu) == recorder.samples
    assert max(cpu) > 5  # one thread spins; other work on the machine may take most of the core
    assert min(values(columns, "process:3", "rss")) > len(held)
    assert all(0 <= share <= 100 for share in values(columns, "machine", "cpu"))
    units = dict(zip(columns["metric"], columns["unit"], strict=True))
    assert units["rss"] == "bytes"
    assert set(columns["unit"]) == {"% of one core", "% of all cores", "bytes"}
    assert abs(columns["time_ns"][-1] - time.time_ns()) < 60e9


@pytest.mark.usefixtures("no_gpu")
def test_rows_fit_the_table():
    columns, _ = collect()
    table = pa.table(columns, schema=TABLES["telemetry"])
    assert table.num_rows == len(columns["value"]) > 0


@pytest.mark.usefixtures("no_gpu")
def test_the_thread_is_gone_and_its_cost_known():
    _, recorder = collect()
    assert "gatewise-telemetry" not in {thread.name for thread in threading.enumerate()}
    assert 0 < recorder.cost_ns < 0.2e9


@pytest.mark.usefixtures("no_gpu")
def test_rows_held_are_bounded(monkeypatch):
    monkeypatch.setattr(telemetry, "SAMPLES_PER_EMIT", 2)
    parts = []
    with Telemetry(parts.append, period_s=0.1) as recorder:
        while recorder.samples < 5:
            time.sleep(0.01)
    samples = [len(values(part, "process", "rss")) for part in parts]
    assert sum(samples) == recorder.samples
    assert max(samples) == 2


@pytest.mark.usefixtures("no_gpu")
def test_leaving_early_writes_nothing():
    parts = []
    with Telemetry(parts.append, period_s=30) as recorder:
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert (parts, recorder.samples) == ([], 0)


@pytest.mark.usefixtures("no_gpu")
def test_an_error_of_emit_is_raised_at_exit(monkeypatch):
    monkeypatch.setattr(telemetry, "SAMPLES_PER_EMIT", 1)
    calls = []

    def emit(columns):
        calls.append(columns)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), Telemetry(emit, period_s=0.1):
        spin(0.5)
    assert len(calls) == 1


@pytest.mark.usefixtures("no_gpu")
def test_an_error_of_emit_does_not_hide_the_bodys_own(monkeypatch):
    monkeypatch.setattr(telemetry, "SAMPLES_PER_EMIT", 1)
    failed = threading.Event()

    def emit(columns):
        failed.set()
        raise OSError("disk full")

    def body():
        with Telemetry(emit, period_s=0.1):
            failed.wait(10)
            raise KeyError("the body's")

    with pytest.raises(KeyError, match="the body's"):
        body()


def test_a_reading_that_hangs_does_not_hold_the_exit_up(nvml, monkeypatch):
    monkeypatch.setattr(telemetry, "JOIN_S", 0.2)
    release, hanging = threading.Event(), threading.Event()

    def hang(handle):
        hanging.set()
        release.wait(10)
        return 0

    with Telemetry(lambda columns: None, period_s=0.1) as recorder:
        nvml.nvmlDeviceGetPowerUsage = hang
        assert hanging.wait(10)
    assert [u.metric for u in recorder.unsupported] == ["telemetry"]
    release.set()
    recorder._thread.join(10)
    assert not recorder._thread.is_alive()
