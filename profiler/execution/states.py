"""What is made of parameters and kept, and made anew when one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Made(Generic[T]):
    """One thing made of parameters, without gradients. A deep copy begins with nothing: its parameters are others."""

    def __init__(self) -> None:
        self._kept: tuple[list[tuple[int, int]], T] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Made[T]:
        return Made()

    def of(self, parameters: Iterable[Tensor], make: Callable[[], T]) -> T:
        """What `make` makes of the parameters; made anew once one was written in place or given other storage."""
        now = [_state(parameter) for parameter in parameters]
        if self._kept is None or self._kept[0] != now:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # what is made under inference mode no other mode can use
                self._kept = now, make()
        return self._kept[1]


def _state(parameter: Tensor) -> tuple[int, int]:
    """Of a parameter made under `torch.inference_mode` torch does not count writes: those in place are not seen."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
