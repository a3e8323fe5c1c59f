"""torch.profiler around a few steps: from start to a whole trace file in the run folder.

The trace is what TensorBoard's torch-tb-profiler plugin, Perfetto and HTA open. The ranges in it
(`gatewise.step/{step}/{arm}`, `gatewise/{segment}/{layer}`) are the recorder's, not made here.

Not here: what the trace's events mean (`kineto`), which steps are traced (`run`), opening a viewer (`viewer`).
Python stacks and memory are not recorded: both slow the steps down by a multiple.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from profiler.errors import InputError, StoreError
from profiler.kineto import kernel_rows, read_trace

#: Folder of the traces inside a run folder.
FOLDER = "traces"
#: What TensorBoard's plugin takes for a trace: everything before is the worker's name.
SUFFIX = ".pt.trace.json.gz"


class Tracer:
    """Traces what runs inside the `with` block on this process, CPU and (where there is one) CUDA.

    On leaving, `FOLDER/NAME.rankR.pt.trace.json.gz` is written aside and renamed, so a file of that name is whole. A
    block that raises leaves none. Operators carry their input shapes.

        with Tracer(run_folder, "prefill-b8-l512", rank=0) as tracer:
            ...steps, each inside its `gatewise.step/...` range...
        writer.append("kernels", tracer.rows(), cell="prefill-b8-l512")

    Args:
        folder: the run folder.
        name: what is traced, a cell mostly; characters a file name cannot bear become `_`.
        rank: this process's rank.

    Raises:
        InputError: on entering, if this process is being profiled already (torch allows one profiler).
        StoreError: the trace cannot be written.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0) -> None:
        worker = re.sub(r"[^\w.-]", "_", name)
        self.path = folder / FOLDER / f"{worker}.rank{rank}{SUFFIX}"
        self._rank = rank
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, with_flops=True)

    def __enter__(self) -> Tracer:
        if torch.autograd.profiler._is_profiler_enabled:
            raise InputError(
                "trace: this process is being profiled by another torch.profiler, and torch allows one at a time; "
                "stop that one, or leave `trace` out of the spec"
            )
        self._profile.start()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            # torch writes it for initialised groups only, and HTA opens no trace that does not tell its rank.
            self._profile.add_metadata_json("distributedInfo", json.dumps({"rank": self._rank}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.stop()
        if error is None:
            self._write()

    def _write(self) -> None:
        aside = self.path.with_name(f".{self.path.name.removesuffix(SUFFIX)}.tmp-{os.getpid()}.gz")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(aside))
            os.replace(aside, self.path)
        except OSError as problem:
            with contextlib.suppress(OSError):  # there may be no folder to remove it from
                aside.unlink()
            raise StoreError(f"cannot write the trace {self.path}: {problem.strerror or problem}") from problem

    def rows(self) -> dict[str, list[Any]]:
        """Rows of the `kernels` table, read back from the trace written; see `kineto.kernel_rows`."""
        return kernel_rows(read_trace(self.path))
