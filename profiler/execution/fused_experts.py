"""SwiGLU experts of one width as one operator: rows gathered, gate and up, SiLU, down. On a CPU, without gradients.

What it saves against two products and two elementwise operators an expert is measured by `benchmarks/experts.py`: what
lies between the products stays in the cache, each thread has experts of its own, and there is no call from Python for
every expert. Products are oneDNN's, sums in float32; results equal other ways' to rounding, and are the nearer ones in
bfloat16, since nothing is rounded between gate, up and down but the hidden layer itself.

The operator (`fused_experts.cpp`) is compiled at first use and tried on a small case; where it cannot be had, `why_not`
says why. It takes weights as panels, another copy of them.

Legend: as `experts`; S experts, n rows of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from profiler import compiled

SOURCE = Path(__file__).with_suffix(".cpp")
#: Instructions that the source uses: those that torch itself then uses on this processor.
FLAGS = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c",
    "-DCPU_CAPABILITY_AVX512", "-DCPU_CAPABILITY=AVX512",
)  # fmt: skip
#: As in the source: columns of a panel, and those of them that are gate.
PANEL, HALF = 64, 32
#: Largest difference to plain products, ÷ the largest value, that the trial lets pass.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def why_not(like: Tensor) -> str | None:
    """Why rows like these cannot go through the operator, as the end of a sentence; None where they can.

    The first time in a process it is loaded and tried; the first time on a machine compiled, some ten seconds.
    """
    return _why_not(like.device.type, like.dtype)


@cache
def _why_not(device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return f"it is for CPUs, and the model is on {device}"
    if dtype not in TOLERANCE:
        return f"it is for float32 and bfloat16, and the model is in {dtype}"
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor lacks AVX-512"
    return _trouble()


@cache
def _trouble() -> str | None:
    """Why the operator cannot be used in this process, whatever for."""
    try:
        compiled.load(SOURCE, FLAGS)
    except compiled.Uncompiled as error:
        return str(error)
    for dtype, bound in TOLERANCE.items():
        with torch.inference_mode(False), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            block = torch.randn(1, 3 * 40, 72, generator=generator).to(dtype) / 8
            x_Nd = torch.randn(3, 72, generator=generator).to(dtype)
            y_Nd = torch.empty_like(x_Nd)
            try:
                run(x_Nd, torch.arange(3), [3], 40, panels(block, 40), y_Nd)
            except RuntimeError as error:
                return f"it fails in {dtype}: {str(error).splitlines()[0]}"
            gate, up, down = block[0].float().split(40)
            wanted = (F.silu(x_Nd.float() @ gate.T) * (x_Nd.float() @ up.T)) @ down
            apart = float((y_Nd.float() - wanted).abs().max() / wanted.abs().max())
            if not apart <= bound:
                return f"its results in {dtype} are {apart:.1e} from plain products'"
    return None


def panels(block_SWd: Tensor, width: int) -> Tensor:
    """Weights as the operator takes them.

    Args:
        block_SWd: `[S, 3·width, d]`: of each expert W_gate, W_up and W_downᵀ.
        width: W.

    Returns:
        `[S, numbers of one expert]`; widths are filled up with zeros to `HALF`, hidden sizes to `PANEL`.
    """
    size, _, hidden = block_SWd.shape
    together = 2 if block_SWd.dtype == torch.bfloat16 else 1
    depth, wide = _filled(hidden, together), _filled(width, HALF)
    gate, up, down = (F.pad(part, (0, 0, 0, wide - width)) for part in block_SWd.split(width, dim=1))
    halves = [F.pad(part, (0, depth - hidden)).view(size, wide // HALF, HALF, depth) for part in (gate, up)]
    first = torch.stack(halves, 2).view(size, wide // HALF, PANEL, depth // together, together).transpose(2, 3)
    columns = _filled(hidden, PANEL)
    last = F.pad(down, (0, columns - hidden)).view(size, wide // together, together, columns // PANEL, PANEL)
    return torch.cat([first.flatten(1), last.permute(0, 3, 1, 4, 2).flatten(1)], dim=1)


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def run(x_Nd: Tensor, row_P: Tensor, counts: Sequence[int], width: int, weights: Tensor, y_Pd: Tensor) -> None:
    """Rows through the experts that chose them, results written into `y_Pd`.

    Args:
        x_Nd: rows, float32 or bfloat16.
        row_P: row of each pair, sorted by expert.
        counts: pairs of each of the S experts.
        width: W of all of them.
        weights: their `panels`.
        y_Pd: where results go.

    Raises:
        RuntimeError: sizes or dtypes do not fit together, or there is no such row.
    """
    torch.ops.gatewise.fused_experts(x_Nd.contiguous(), row_P, counts, width, weights, y_Pd)
