import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from profiler import doctor
from profiler.records import Unsupported


def gpus(names=None, unsupported=()):
    return types.SimpleNamespace(names=names or {}, unsupported=list(unsupported))


def only(found):
    (check,) = found
    return check


def test_here_and_now_every_check_answers():
    found = doctor.checks()
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    assert {"python", "packages", "torch", "NVML", "torch device", "TensorBoard plugin", "cache"} <= set(names)
    assert [check for check in found if check.status == "fail"] == []
    assert all(check.remedy for check in found if check.status == "warn")
    assert all(check.remedy is None for check in found if check.status == "ok")


def test_a_later_python_is_a_warning():
    assert doctor.python((3, 11, 2)).status == "ok"
    later = doctor.python((3, 15, 0))
    assert later.status == "warn"
    assert "3.15.0" in later.detail
    assert "3.11" in later.detail


# -- packages of the same name ------------------------------------------------------------------------


def test_a_package_of_the_same_name_found_first(tmp_path, monkeypatch):
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "analysis", raising=False)
    check = doctor.packages(["profiler", "analysis"])
    assert check.status == "fail"
    assert f"analysis comes from {tmp_path}/analysis/__init__.py" in check.detail
    assert "profiler comes" not in check.detail


def test_a_distribution_with_the_same_package_installed(tmp_path, monkeypatch):
    info = tmp_path / "dashboard-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dashboard\nVersion: 9\n")
    (info / "RECORD").write_text("dashboard/__init__.py,,\n")
    # Behind ours on the path, so that the import itself is still right.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    check = doctor.packages()
    assert check.status == "fail"
    assert "the installed distribution dashboard also has a package dashboard" in check.detail


def test_a_missing_package():
    check = doctor.packages(["profiler", "no_such_package_of_ours"])
    assert (check.status, check.detail) == ("fail", "no_such_package_of_ours is not found")


# -- dependencies -------------------------------------------------------------------------------------


def test_within_bounds_and_importable():
    check = only(doctor.dependencies([Requirement("numpy>=1.0")]))
    assert check == doctor.Check("numpy", "ok", f"{importlib.metadata.version('numpy')} (>=1.0)")


def test_out_of_bounds():
    check = only(doctor.dependencies([Requirement("numpy>=999")]))
    assert check.status == "fail"
    assert check.detail == f"{importlib.metadata.version('numpy')}; >=999 is needed"
    assert check.remedy == "pip install 'numpy>=999'"


def test_not_installed():
    check = only(doctor.dependencies([Requirement("no-such-distribution-here>=2")]))
    assert (check.status, check.detail) == ("fail", "not installed; >=2 is needed")


def test_installed_but_broken(tmp_path, monkeypatch):
    info = tmp_path / "broken_thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-thing\nVersion: 1.0\n")
    (tmp_path / "broken_thing.py").write_text("raise OSError('libmissing.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = only(doctor.dependencies([Requirement("broken-thing>=1")]))
    assert check.status == "fail"
    assert "`import broken_thing` raises OSError: libmissing.so" in check.detail


def test_the_checkout_names_its_dependencies_even_when_not_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    bounds = {requirement.name: str(requirement.specifier) for requirement in doctor.declared()}
    assert bounds["torch"] == ">=2.8"
    assert "pytest" not in bounds


def test_extras_are_not_dependencies(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.8", 'pytest>=8; extra == "test"'])
    assert [requirement.name for requirement in doctor.declared()] == ["torch"]


# -- devices ------------------------------------------------------------------------------------------


def test_nvml_absent_is_a_warning_with_the_reason():
    check = doctor.nvml(gpus(unsupported=[Unsupported(metric="nvml power", reason="Driver Not Loaded")]))
    assert (check.status, check.detail) == ("warn", "no GPU telemetry: Driver Not Loaded")


def test_nvml_in_part():
    found = gpus({"nvml:0": "Fake GPU (GPU-0)"}, [Unsupported(metric="nvml:0 power", reason="Not Supported")])
    check = doctor.nvml(found)
    assert check.status == "warn"
    assert "nvml:0 power: Not Supported" in check.detail
    assert doctor.nvml(gpus({"nvml:0": "Fake GPU (GPU-0)"})).status == "ok"


def fake_torch(cuda, available):
    return types.SimpleNamespace(
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=lambda: available, device_count=lambda: 2, get_device_name=lambda index: f"GPU {index}"
        ),
    )


@pytest.mark.parametrize(
    ("cuda", "available", "names", "status", "says"),
    [
        ("13.0", True, {"nvml:0": "x"}, "ok", "built with CUDA 13.0; 2 × GPU 0"),
        (None, False, {}, "ok", "built with no CUDA; runs use the CPU"),
        (None, False, {"nvml:0": "x"}, "warn", "though the driver sees 1 GPU"),
        ("13.0", False, {"nvml:0": "x"}, "warn", "though the driver sees 1 GPU"),
    ],
)
def test_torch_device(monkeypatch, cuda, available, names, status, says):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda, available))
    check = doctor.torch_build(gpus(names))
    assert check.status == status
    assert says in check.detail


def test_tensorboard_plugin_absent(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    check = doctor.tensorboard()
    assert check.status == "warn"
    assert "none" in check.detail


# -- the machine --------------------------------------------------------------------------------------


def test_cache_is_not_made_by_looking(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "deep" / "cache"))
    check = doctor.cache()
    assert check.detail.startswith(str(tmp_path / "deep" / "cache"))
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "file" / "cache"))
    check = doctor.cache()
    assert check.status == "fail"
    assert "Not a directory" in check.detail


@pytest.mark.parametrize(("free_gib", "status"), [(2.9, "warn"), (3.1, "ok")])
def test_cache_with_little_room(tmp_path, monkeypatch, free_gib, status):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    usage = types.SimpleNamespace(free=int(free_gib * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    check = doctor.cache()
    assert check.status == status
    assert f"{free_gib} GiB free" in check.detail


@pytest.mark.parametrize(("quota", "status"), [(None, "ok"), (1.5, "warn"), (8.0, "ok")])
def test_a_quota_below_the_affinity_is_a_warning(monkeypatch, quota, status):
    monkeypatch.setattr(doctor.cores, "allowed_cpus", lambda: [0, 1])
    monkeypatch.setattr(doctor.cores, "cpu_quota", lambda: quota)
    assert doctor.processor().status == status


@pytest.mark.parametrize(("value", "status"), [("2", "ok"), ("3", "warn"), ("2,1", "ok")])
def test_more_threads_than_cores(monkeypatch, value, status):
    monkeypatch.setattr(doctor.cores, "usable_cores", lambda: 2.0)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in doctor.machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check = doctor.threads()
    assert check.status == status
    assert check.detail.startswith(f"OMP_NUM_THREADS {value}; 2 usable cores")


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [("performance", "ok", "performance"), ("powersave", "warn", "powersave"), (None, "warn", "cannot be read")],
)
def test_governor(monkeypatch, found, status, says):
    monkeypatch.setattr(doctor.cores, "governor", lambda: found)
    check = doctor.governor()
    assert check.status == status
    assert says in check.detail


@pytest.mark.parametrize(("busy", "status"), [(0.05, "ok"), (0.5, "warn")])
def test_neighbours(monkeypatch, busy, status):
    looks = iter([0.0, busy * 2])  # two CPUs for one second
    monkeypatch.setattr(doctor.cores, "allowed_cpus", lambda: [0, 1])
    monkeypatch.setattr(doctor.cores, "cpu_time", lambda cpus: doctor.cores.CpuTime(next(looks), 0.0, 0.0))
    monkeypatch.setattr(doctor.machine, "_tree_time", lambda root: 0.0)
    seconds = iter([0.0, 1.0, 1.0])
    monkeypatch.setattr(doctor.machine.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(doctor.time, "sleep", lambda s: None)
    check = doctor.neighbours()
    assert check.status == status
    assert check.detail.startswith(f"{busy:.0%} of our cores' time (limit 10%)")


def test_paths_are_ours():
    assert doctor.packages().detail.endswith(str(Path(__file__).resolve().parents[2]))
