"""The user's cache of folders that were built here, models and compiled operators: whole or absent, come what may.

An entry is built in a sibling folder with a temporary name. `complete.json`, with every file's size and
sha256, is written into it last, and one rename puts the folder in its place. A download that is torn, a
process that is killed or a disk that fills up therefore leaves a temporary folder, never half an entry, and
the next build removes it. A lock held by the kernel (so it cannot outlive its process) lets one process build
while others wait and then use what it built.

Opening checks the marker and the sizes, which costs well under a millisecond; `fault(..., full=True)` also
reads every byte.

Not here: what an entry holds and how it is made (`packaged_model`, `compiled`), nor the Hugging Face hub's own cache,
which transformers keeps.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from profiler.errors import InputError

MARKER = "complete.json"
#: Told what is being done, and how much of that is done, between 0 and 1.
Report = Callable[[str], None]
Share = Callable[[float], None]
Kind = Literal["models", "operators"]


def cache_dir() -> Path:
    """Where what was built is kept: GATEWISE_CACHE, else `gatewise` in XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        InputError: none of the three names a place (no home directory).
    """
    if own := os.environ.get("GATEWISE_CACHE"):
        try:
            return Path(own).expanduser().absolute()
        except RuntimeError as error:
            raise InputError(f"GATEWISE_CACHE ({own}) is in the home directory of nobody") from error
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification says to ignore a relative one
        return xdg / "gatewise"
    try:
        return Path.home() / ".cache" / "gatewise"
    except RuntimeError as error:
        raise InputError("no home directory to keep models in; set GATEWISE_CACHE to a folder") from error


def entry(name: str, kind: Kind = "models") -> Path:
    """The folder of the entry called `name`, present or not."""
    return cache_dir() / kind / name


def marker(folder: Path) -> dict[str, Any] | None:
    """What `complete.json` says (`identity`, `files`), or None where it is absent or unreadable."""
    try:
        content = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("files"), dict) else None


def fault(folder: Path, identity: str, *, full: bool = False) -> str | None:
    """Why the entry cannot be used, as the end of a sentence, or None where it can.

    Args:
        folder: the entry's folder.
        identity: what the entry must have been built from; another one is a fault.
        full: also compare every file's sha256 (about a second for 0.5 GB) rather than sizes only.
    """
    if not folder.is_dir():
        return "it is not in the cache"
    content = marker(folder)
    if content is None:
        return f"{MARKER} is missing or unreadable"
    if content.get("identity") != identity:
        return "it was built from another source or by another version"
    for name, expected in content["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
        if full and (digest := sha256(path)) != expected["sha256"]:
            return f"{name} has sha256 {digest}, not {expected['sha256']}"
    return None


def sha256(path: Path) -> str:
    """The file's sha256 in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build(
    name: str, identity: str, builder: Callable[[Path], None], needs_bytes: int, report: Report = lambda _: None,
    kind: Kind = "models",
) -> Path:  # fmt: skip
    """Make the entry `name` with `builder` and return its folder; a whole one that is there already is kept.

    Args:
        name: file name of the entry.
        identity: what it is built from; stored, and compared when it is opened.
        builder: fills the empty folder it is given. Whatever it raises leaves the cache as it was.
        needs_bytes: the most the build takes on disk, checked against the free space first.
        report: gets one sentence at each stage.
        kind: what it is.

    Raises:
        InputError: the cache cannot be written, or the disk is or becomes full.
    """
    final = entry(name, kind)
    try:
        if fault(final, identity, full=True) is None:  # looked at first: a cache may be there to read from only
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{name}.lock", name, report):
            if fault(final, identity, full=True) is None:
                return final
            for left in final.parent.glob(f".{name}.part-*"):
                shutil.rmtree(left, ignore_errors=True)
            _require_space(final.parent, name, needs_bytes)
            part = final.parent / f".{name}.part-{os.getpid()}-{secrets.token_hex(4)}"
            part.mkdir()
            try:
                builder(part)
                _seal(part, identity)
                _put(part, final)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(
                f"{name}: the disk of {final.parent} became full while it was made (about {_mib(needs_bytes)} "
                "needed in all). Nothing was left behind; free space or set GATEWISE_CACHE to a folder on another disk."
            ) from error
        raise InputError(
            f"{name}: cannot write the cache {final.parent}: {error.strerror or error}. "
            "Set GATEWISE_CACHE to a folder you may write to."
        ) from error
    return final


@contextmanager
def _locked(path: Path, name: str, report: Report) -> Iterator[None]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is making {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _require_space(folder: Path, name: str, needs_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needs_bytes:
        raise InputError(
            f"{name}: making it needs {_mib(needs_bytes)} of disk and {folder} has {_mib(free)} free. "
            "Free space or set GATEWISE_CACHE to a folder on another disk."
        )


def _seal(folder: Path, identity: str) -> None:
    """Write the marker over the finished files, after they are on disk."""
    mode = folder.stat().st_mode & 0o666  # the folder was made under the user's umask; safetensors writes 0600
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        path.chmod(mode)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        _sync(path)
    path = folder / MARKER
    path.write_text(json.dumps({"identity": identity, "files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _put(part: Path, final: Path) -> None:
    """Rename the sealed folder into place, moving a faulty one out of the way first."""
    if final.exists():
        os.replace(final, part.with_name(f"{part.name}-old"))
    os.replace(part, final)
    shutil.rmtree(part.with_name(f"{part.name}-old"), ignore_errors=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
