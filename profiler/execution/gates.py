"""Decisions about whole sequences, and where they are kept for requests that an engine packs.

Decisions live on the host: skipping needs them there, and a frozen one then costs a later step nothing. A padded
batch keeps its decisions in its cache (`kv.SubsetLayer`); a serving engine has one cache for all requests, so
there they are kept here, by request id (`RequestGates`).

Not here: how a decision is made (methods).
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from profiler.errors import InputError
from profiler.execution.sequences import Sequences

#: Requests `RequestGates` holds at most; see there.
REQUESTS_KEPT = 4096


class Gate(NamedTuple):
    """One decision: whether the layer runs, the gate's value σ(s), and the logit s it came from."""

    run: bool
    value: float
    logit: float


@dataclass(frozen=True)
class Gates:
    """One layer's decisions about the S sequences of a batch."""

    of_S: tuple[Gate, ...]

    def __len__(self) -> int:
        return len(self.of_S)

    @cached_property
    def chosen(self) -> list[int]:
        """Indices of the sequences that run, ascending."""
        return [i for i, gate in enumerate(self.of_S) if gate.run]

    def select(self, indices: Sequence[int]) -> Gates:
        """The decisions of sequences `indices`, in that order, duplicates allowed."""
        return Gates(tuple(self.of_S[i] for i in indices))

    @cached_property
    def columns(self) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.float32]]:
        """Choice (1 runs, 0 skips), gate value and logit, `[S]` each, as the recorder takes them. Made once."""
        run, value, logit = zip(*self.of_S, strict=True)
        return np.array(run, np.int16), np.array(value, np.float32), np.array(logit, np.float32)


@dataclass
class Held:
    """What is kept of one request: the tokens its cache holds, and for each layer so far its decision, where that is
    frozen, or the mean of the layer's input (`[d]`), where decisions follow it."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    gates: list[Gate] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)

    def mean(self, layer: int, now_d: Tensor, past: int, rows: int) -> Tensor:
        """The mean over all `past + rows` tokens, given that over the last `rows`; kept for the next step."""
        if past:
            now_d = self.means[layer] + (now_d - self.means[layer]) * (rows / (past + rows))
        self.means[layer : layer + 1] = [now_d]
        return now_d

    def continued_by(self, tokens: array[int]) -> bool:
        """Whether a prompt is this request's again: it begins with every token the request was given."""
        return tokens[: len(self.tokens)] == self.tokens


class RequestGates:
    """Gates of the requests of a continuous-batching engine, frozen from a request's prompt on.

    They survive the engine's re-prefill of a request it had to evict. An id that comes back with another text is
    a new request, and so is any id under another cache. transformers tells nobody that a request has finished, so
    what is not released is bounded: past `REQUESTS_KEPT` requests the one unseen for longest is forgotten.

    One thread runs forwards (the engine's); any thread may release. Single dictionary operations need no lock.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._cache: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, sequences: Sequences, cache: Any) -> list[Held]:
        """What is held for each sequence of a packed step, started anew for new prompts.

        Raises:
            InputError: the engine split a prompt, or a request has a past whose gates are not known.
        """
        if self._cache is None or self._cache() is not cache:
            self._held.clear()
            self._cache = weakref.ref(cache)
        held_S = [self._admit(sequences, i) for i in range(len(sequences))]
        while len(self._held) > max(REQUESTS_KEPT, len(sequences)):
            self._held.popitem(last=False)
        return held_S

    def _admit(self, sequences: Sequences, i: int) -> Held:
        request, past, tokens = sequences.requests[i], sequences.past_S[i], sequences.tokens(i)
        held = self._held.pop(request, None)  # and put back last, so that the first is the one unseen for longest
        if not sequences.ends_S[i] or (past and held is not None and len(tokens) > 1):
            raise InputError(
                f"request {request!r} came with {len(tokens)} of its prompt's tokens and {past} in the cache: the "
                "engine split its prompt. Sequence gates need the whole prompt: set the engine's max_batch_tokens "
                "above all prompts that may be waiting at once, and num_return_sequences to 1"
            )
        if past and (held is None or past > len(held.tokens)):
            raise InputError(
                f"request {request!r} has {past} tokens in the cache that no gates are known for. Keys shared between "
                "requests belong to other gates: set the engine's allow_block_sharing to False, num_return_sequences "
                "to 1, and release a request only when it has finished"
            )
        if held is None or (not past and not held.continued_by(tokens)):
            held = Held()
        del held.tokens[past:]
        held.tokens.extend(tokens)
        self._held[request] = held
        return held

    def release(self, request: str) -> None:
        """Forget a finished request; one that is not held is none of our business."""
        self._held.pop(request, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._held.clear()
