"""Which state a parameter is in, so that what was made of it is made anew when it changes."""

from __future__ import annotations

from torch import Tensor


def state(parameter: Tensor) -> tuple[int, int]:
    """Differs once a parameter was written in place or given other storage.

    Of a parameter made under `torch.inference_mode` torch does not count writes: those in place are not seen.
    """
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
