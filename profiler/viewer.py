"""The `trace` command's work: show the traces of a run in TensorBoard, or say how to open them in Perfetto.

Nothing is uploaded and nothing is fetched: TensorBoard listens on this machine, and Perfetto's page reads the
file in the browser. Not here: making traces (`tracing`), numbers from them (`analysis`). No torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

from profiler.errors import InputError
from profiler.store import Run

Viewer = Literal["perfetto", "tensorboard"]


def trace_files(run: Path) -> list[Path]:
    """The traces of a run, by name.

    Raises:
        StoreError: `run` is not a run folder.
        InputError: the run traced no steps.
    """
    Run(run)
    files = sorted((run / "traces").glob("*.pt.trace.json.gz"))
    if not files:
        raise InputError(f"{run}: the run traced no steps; add trace: {{steps: 1}} to its spec and run it again")
    return files


def open_trace(run: Path, viewer: Viewer) -> None:
    """Show the traces of a run.

    `perfetto` prints each file's absolute path on stdout, a line each, and on stderr how to open one.
    `tensorboard` replaces this process by TensorBoard over the run's traces, and so does not come back.

    Raises:
        StoreError: `run` is not a run folder.
        InputError: the run traced no steps, or TensorBoard or its plugin is not installed.
    """
    files = trace_files(run)
    if viewer == "tensorboard":
        _become_tensorboard(files[0].parent)
    for file in files:
        print(file.absolute())
    print(
        "Open https://ui.perfetto.dev, choose “Open trace file” and pick one of these; it stays on this machine.",
        file=sys.stderr,
    )


def _become_tensorboard(folder: Path) -> None:
    missing = [name for name in ("tensorboard", "torch_tb_profiler") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"--viewer tensorboard needs the packages tensorboard and torch-tb-profiler; not installed: "
            f"{', '.join(missing)}. Install them, or use --viewer perfetto"
        )
    print("TensorBoard is starting: open the address it prints, then the tab PYTORCH_PROFILER.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder.absolute())])
