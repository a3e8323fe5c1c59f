"""SwiGLU experts of one width as one operator: rows gathered, gate and up, SiLU, down. On a CPU, without gradients.

What it saves against two products and two elementwise operators an expert is measured by `benchmarks/experts.py`: what
lies between the products stays in the cache, each thread has experts of its own, and there is no call from Python for
every expert. Products are oneDNN's, sums in float32; results equal other ways' to rounding, and are the nearer ones in
bfloat16, since nothing is rounded between gate, up and down but the hidden layer itself.

The operator (`fused_experts.cpp`) is compiled at first use and tried on a small case; where it cannot be had, `why_not`
says why. It takes weights as panels, another copy of them. Columns are filled up to 16, which a product of a processor
with AVX-512 takes at a time whoever calls it: no padding that costs count, but seen in the time of small odd widths.

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
#: As in the source: columns of a panel, and what numbers of columns are filled up to.
PANEL, LANES = 64, 16
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
        return "torch does not use AVX-512 here"
    return _trouble()


@cache
def _trouble() -> str | None:
    """Why the operator cannot be used in this process, whatever for."""
    try:
        compiled.load(SOURCE, FLAGS)
    except compiled.Uncompiled as error:
        return str(error)
    # Nothing that the caller has switched on may have a part in it: the answer is kept.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        return next(filter(None, (_tried(dtype, bound) for dtype, bound in TOLERANCE.items())), None)


def _tried(dtype: torch.dtype, bound: float) -> str | None:
    generator, width = torch.Generator().manual_seed(0), 40
    block = torch.randn(1, 3 * width, 72, generator=generator).to(dtype) / 8
    x_Nd = torch.randn(3, 72, generator=generator).to(dtype)
    y_Nd = torch.empty_like(x_Nd)
    try:
        run(x_Nd, torch.arange(3), [3], width, panels(block, width), y_Nd)
    except RuntimeError as error:
        return f"it fails in {dtype}: {str(error).splitlines()[0]}"
    gate, up, down = block[0].float().split(width)
    wanted = (F.silu(x_Nd.float() @ gate.T) * (x_Nd.float() @ up.T)) @ down
    apart = float((y_Nd.float() - wanted).abs().max() / wanted.abs().max())
    return None if apart <= bound else f"its results in {dtype} are {apart:.1e} from plain products'"


def panels(block_SWd: Tensor, width: int) -> Tensor:
    """Weights as the operator takes them.

    Args:
        block_SWd: `[S, 3·width, d]`: of each expert W_gate, W_up and W_downᵀ.
        width: W.

    Returns:
        `[S, numbers of one expert]`: as many as its weights, where W and d are multiples of `LANES`.
    """
    gate, up, down = block_SWd.split(width, dim=1)
    halves = [_filled(part, 1, LANES).split(PANEL // 2, dim=1) for part in (gate, up)]
    first = torch.cat([part for pair in zip(*halves, strict=True) for part in pair], dim=1)
    return torch.cat([*_columns(first.transpose(1, 2)), *_columns(_filled(down, 2, LANES))], dim=1)


def _columns(weights_SIO: Tensor) -> list[Tensor]:
    """Matrices as panels of their columns, those of `PANEL` and what is left, flat."""
    together = 2 if weights_SIO.dtype == torch.bfloat16 else 1
    filled = _filled(weights_SIO, 1, together)
    size, rows, columns = filled.shape
    whole = columns // PANEL * PANEL
    found = []
    for part, wide in ((filled[..., :whole], PANEL), (filled[..., whole:], columns - whole)):
        if wide:
            apart = part.reshape(size, rows // together, together, -1, wide)
            found.append(apart.permute(0, 3, 1, 4, 2).flatten(1))
    return found


def _filled(weights: Tensor, dim: int, multiple: int) -> Tensor:
    """Filled up with zeros to a multiple."""
    lacking = -weights.shape[dim] % multiple
    return F.pad(weights, [0, 0] * (weights.dim() - 1 - dim) + [0, lacking])


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
