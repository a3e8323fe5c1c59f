"""Operators of torch whose C++ source lies beside the Python that calls them: compiled here, once, at first use.

The source is compiled against the torch that is installed, by $CXX or the machine's own compiler, and kept in the
user's cache under what it was made of: source, torch, compiler and flags. A machine without a compiler is no error:
`Uncompiled` says why, and whoever asks has another way.

torch is imported where something is loaded: the doctor asks for the compiler where torch may be broken.

Not here: what an operator computes and when it is wanted (`execution.fused_experts`), and locks and renames
(`user_cache`).
"""

from __future__ import annotations

import hashlib
import os
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


def compiler() -> list[str] | None:
    """The command that compiles C++: $CXX, else g++ or c++; None where there is none."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or ["g++", "c++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    return None if found is None else [found, *wanted[1:]]


def load(source: Path, flags: Sequence[str] = ()) -> None:
    """Register the operators of `source` with torch, compiling it first where this machine has not yet.

    Call it once a process: torch refuses an operator that it has.

    Args:
        source: a C++ file that registers operators (`TORCH_LIBRARY`) and uses nothing but torch and C++ itself.
        flags: for the compiler, beside `FLAGS`.

    Raises:
        Uncompiled: no compiler, or it refuses the source, or torch refuses what it made.
    """
    import torch

    command = compiler()
    if command is None:
        raise Uncompiled("there is no C++ compiler (g++, c++ or $CXX)")
    text = source.read_text(encoding="utf-8")
    parts = [text, str(torch.__version__), *command, _output([*command, "--version"]), *FLAGS, *flags]
    identity = hashlib.sha256("\0".join(parts).encode())
    name = f"{source.stem}-{identity.hexdigest()[:16]}"

    def build(folder: Path) -> None:
        home = Path(torch.__file__).parent
        paths = [f"-I{home / below}" for below in ("include", "include/torch/csrc/api/include")]
        library = ["-o", str(folder / f"{source.stem}.so"), f"-L{home / 'lib'}", *LIBRARIES]
        _output([*command, *FLAGS, *flags, *paths, "-shared", str(source), *library])

    try:
        folder = user_cache.build(name, identity.hexdigest(), build, NEEDS_BYTES, kind="operators")
        torch.ops.load_library(folder / f"{source.stem}.so")
    except (InputError, OSError) as error:
        raise Uncompiled(str(error)) from error


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        first = lines[0].strip() if lines else f"exit code {error.returncode}"
        raise Uncompiled(f"{command[0]} refused it: {first}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Uncompiled(f"{command[0]} did not run: {error}") from error
    return done.stdout
