"""transformers' continuous-batching engine around a tiny model, run to the end of a few requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

#: What gates need of the engine: one step at a time, no keys shared between requests.
WORKING = {"use_cuda_graph": False, "allow_block_sharing": False}


def engine(model: PreTrainedModel, answers: int = 1, **settings: Any) -> Any:
    """An engine that has not started; `answers` are sampled for each request, one is chosen greedily."""
    return model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=answers > 1, eos_token_id=-1, pad_token_id=0, num_return_sequences=answers
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64, **WORKING, **settings}
        ),
    )


def serve(
    model: PreTrainedModel, requests: Mapping[str, tuple[Sequence[int], int]], answers: int = 1, **settings: Any
) -> dict[str, Any]:
    """What the engine says to each request (id → prompt, new tokens), all handed in before its first step.

    Where it dies of an error, answers it had not begun are missing.
    """
    manager = engine(model, answers, **settings)
    for name, (prompt, new) in requests.items():
        manager.add_request(list(prompt), request_id=name, max_new_tokens=new)
    manager.start()
    found: dict[str, Any] = {}
    try:
        while len(found) < len(requests) * answers:
            result = manager.get_result(timeout=20)
            if result is None:
                assert manager.background_thread_status.fatal_error, "the engine said nothing for 20 seconds"
                break
            found[result.request_id] = result
    finally:
        manager.stop(block=True)
    return found
