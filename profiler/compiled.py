"""Operators of torch whose C++ source lies beside the Python that calls them: compiled here, once, at first use.

The source is compiled against the torch that is installed, by $CXX or the machine's own compiler, and kept in the
user's cache under what it was made of: source, torch, C library and flags. Once there, no compiler is needed. A machine
without one is no error: `Uncompiled` says why, and whoever asks has another way.

torch is imported where something is loaded: the doctor asks for the compiler where torch may be broken.

Not here: what an operator computes and when it is wanted (`execution.fused_experts`), and locks and renames
(`user_cache`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from profiler import user_cache
from profiler.errors import InputError

#: What every source is compiled with. torch's headers need C++20; its OpenMP threads are used, so none is linked.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp")
LIBRARIES = ("-lc10", "-ltorch_cpu")
#: Room and time that compiling takes, amply.
NEEDS_BYTES, TIMEOUT_S = 64 * 2**20, 600


class Uncompiled(Exception):
    """Why an operator cannot be had, as the end of a sentence."""


def compiler() -> list[str]:
    """The command that compiles C++: $CXX, else g++ or c++.

    Raises:
        Uncompiled: there is none.
    """
    named = os.environ.get("CXX", "")
    try:
        wanted = shlex.split(named)
    except ValueError as error:
        raise Uncompiled(f"$CXX ({named}) is no command: {error}") from error
    found = next((path for path in map(shutil.which, wanted[:1] or ["g++", "c++"]) if path), None)
    if found is None:
        raise Uncompiled(f"$CXX ({named}) is not there" if wanted else "there is no C++ compiler (g++ or c++)")
    return [found, *wanted[1:]]


def load(source: Path, flags: Sequence[str] = ()) -> None:
    """Register the operators of `source` with torch, compiling it first where this machine has not yet.

    Args:
        source: a C++ file that registers operators (`TORCH_LIBRARY`) and uses nothing but torch and C++ itself.
        flags: for the compiler, beside `FLAGS`.

    Raises:
        Uncompiled: no compiler, or it refuses the source, or torch refuses what it made.
    """
    import torch

    text, platform_ = source.read_text(encoding="utf-8"), [platform.machine(), *platform.libc_ver()]
    parts = "\0".join([text, str(torch.__version__), *platform_, *FLAGS, *flags])
    identity = hashlib.sha256(parts.encode()).hexdigest()
    name, file = f"{source.stem}-{identity[:16]}", f"{source.stem}.so"

    def build(folder: Path) -> None:
        home, library = Path(torch.__file__).parent, folder / file
        paths = [f"-I{home / below}" for below in ("include", "include/torch/csrc/api/include")]
        into = ["-o", str(library), f"-L{home / 'lib'}", *LIBRARIES]
        _compile([*compiler(), *FLAGS, *flags, *paths, "-shared", str(source), *into])
        if not library.is_file():
            raise Uncompiled(f"{compiler()[0]} made nothing of it")

    try:
        folder = user_cache.build(name, identity, build, NEEDS_BYTES, kind="operators")
        torch.ops.load_library(folder / file)
    except (InputError, OSError) as error:
        raise Uncompiled(f"{error} {error.__cause__ or ''}".strip()) from error


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Uncompiled(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "")
        raise Uncompiled(f"{command[0]} refused it: {said.strip() or f'exit code {done.returncode}'}")
