"""Which device a model goes on, what that device is called, and whether the weights fit.

Not here: what else the machine is (`machine`), and spreading one model over several devices.
"""

from __future__ import annotations

import platform
import re
from typing import TYPE_CHECKING

from profiler import machine
from profiler.errors import InputError

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def pick(device: str) -> torch.device:
    """The device meant by `auto` (CUDA if there is any, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises:
        InputError: it is none of these, or torch sees no such device.
    """
    import torch

    if not _DEVICE.fullmatch(device):
        raise InputError(f"model device {device!r} must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    number = device.partition(":")[2]
    index = int(number) if number else torch.cuda.current_device() if count else 0
    if index >= count:
        raise InputError(f"model device {device}: torch sees {count} CUDA devices on this machine")
    return torch.device("cuda", index)


def name(place: torch.device) -> str:
    """The product name of a GPU or of the processor."""
    import torch

    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return machine.cpu_model() or platform.machine()


def require_memory(what: str, parameters: int, dtype: torch.dtype, place: torch.device) -> None:
    """Refuse weights larger than what is free, before they are allocated and the kernel ends the process.

    Free is psutil's `available`, and no more than the cgroup's limit; on a GPU, what the driver says. Only the
    weights are counted: activations and the cache come on top.

    Raises:
        InputError: they do not fit; both sizes are in the message.
    """
    import psutil
    import torch

    needs = parameters * dtype.itemsize
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0]
    else:
        free = min(psutil.virtual_memory().available, machine.memory_limit() or 2**63)
    if needs > free:
        half = parameters * 2
        advice = "take a smaller model or more memory"
        if half <= free:
            advice = f"dtype bfloat16 takes {half / 2**30:.1f} GiB"
        raise InputError(
            f"{what}: its {parameters:,} weights need {needs / 2**30:.1f} GiB and {free / 2**30:.1f} GiB "
            f"is available on {place}; {advice}"
        )
