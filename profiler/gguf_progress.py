"""How far the opening of a GGUF file is, though transformers says nothing of most of it.

Its tokenizer's vocabulary is read in Python, three times over: for the config, for the tensors' names, for the
tokenizer. Then tensors are dequantised one by one. The share told is of the seconds each of these took for a model of
49,152 tokens and 272 tensors, tensors scaled by the file's size; so it is rough, and moves where they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Seconds after which each reading ends, and the tensors begin; without the tensors' own.
READ_AT_S = (2.8, 9.5, 18.5)
TENSORS_AT_S = 15.8
WHOLE_S = 19.3
#: Seconds for the tensors of a file of 10⁹ bytes.
TENSORS_S = 10.0


@contextmanager
def telling(path: Path, share: Callable[[float], None]) -> Iterator[None]:
    """`share` is told the share of the opening of `path` that is done in this block.

    The one bar that transformers draws past its own switch for bars, over the tensors, is not drawn in it.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    tensors_s = TENSORS_S * (path.stat().st_size / 1e9 if path.exists() else 0.0)
    module: Any = modeling_gguf_pytorch_utils
    reader: Any = gguf.GGUFReader
    bar, read = module.tqdm, reader.__init__
    done: list[float] = []

    def tell(seconds: float, tensors: float) -> None:
        share(min(1.0, (seconds + tensors * tensors_s) / (WHOLE_S + tensors_s)))

    def reading(self: Any, *args: Any, **kwargs: Any) -> None:
        read(self, *args, **kwargs)
        done.append(READ_AT_S[min(len(done), len(READ_AT_S) - 1)])
        tell(done[-1], 1.0 if done[-1] > TENSORS_AT_S else 0.0)

    def dequantising(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors, start=1):
            yield tensor
            tell(TENSORS_AT_S, number / len(tensors))

    module.tqdm, reader.__init__ = dequantising, reading
    try:
        yield
    finally:
        module.tqdm, reader.__init__ = bar, read
