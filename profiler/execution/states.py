"""What is made of parameters and kept, and made anew when one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Made(Generic[T]):
    """One thing made of parameters, without gradients. Copies and files begin with nothing: theirs are others.

    Not every write is counted by torch. Those through `.data`, by a collective, or to a parameter made under
    `torch.inference_mode` are not seen; nor are those of a fused optimiser, but a forward with gradients comes before
    them, and whoever keeps such a thing says `forget` there.
    """

    def __init__(self) -> None:
        # What the parameters were like; their storage, held so that no other comes to lie where it lay; the thing.
        self._kept: tuple[list[tuple[int, int]], list[Tensor], T] | None = None

    def __reduce__(self) -> tuple[type[Made[T]], tuple[()]]:
        return type(self), ()

    def of(self, parameters: Iterable[Tensor], make: Callable[[], T]) -> T:
        """What `make` makes of the parameters; made anew once one was written in place or given other storage."""
        given = list(parameters)
        now = [_state(parameter) for parameter in given]
        if self._kept is None or self._kept[0] != now:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # what is made under inference mode no other mode can use
                self._kept = now, [parameter.detach() for parameter in given], make()
        return self._kept[2]

    def forget(self) -> None:
        """Make it anew the next time."""
        self._kept = None


def _state(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
