"""From a spec's prompts to the token tensors of its cells.

Every arm gets the very same ids. Decode cells are teacher-forced on the dense model's greedy continuation, so that
arms whose outputs differ still do the same number of steps on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import torch

from profiler import methods
from profiler.errors import InputError
from profiler.measure import CellInputs, prefill
from profiler.preflight import check_positions
from profiler.records import CellRecord
from profiler.writer import Rows
from workloads.prompts import CellPrompt, Prompt, cell_token_ids, lead, load_prompts
from workloads.spec import Spec

if TYPE_CHECKING:
    from profiler.models import LoadedModel

#: Prompts the rules are checked on before timing.
SAMPLES = 4
#: Tokens wanted of each; more than the checks use.
SAMPLE_TOKENS = 256


def mean_token_rank(ids: Sequence[int]) -> float:
    """Mean of token ids: how rare a prompt's tokens are, as far as the vocabulary is numbered by frequency."""
    return sum(ids) / len(ids)


class Inputs:
    """The prompts of one spec.

    Raises:
        InputError: the prompts file is missing, empty, not UTF-8, or has none in the named domains.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.prompts = load_prompts(spec.prompts)
        self._made: tuple[str, list[CellPrompt]] = ("", [])

    def tokenise(self, loaded: LoadedModel) -> None:
        """Bind the model's tokenizer, and check that its positions reach the longest cell.

        Raises:
            InputError: the model has no tokenizer, prompts give no tokens, or a cell is longer than its positions.
        """
        if loaded.tokenizer is None:
            raise InputError(
                f"model {self._spec.model.source}: it has no tokenizer, so prompts cannot be made into ids"
            )
        self._tokenizer = loaded.tokenizer
        self._device = loaded.model.device
        check_positions(self._spec, loaded.model.config)
        first = self._spec.cell_list()[0]
        cell_token_ids(self.prompts, self.encode, first.batch, first.length, self._spec.prompts.seed)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def opening(self, text: str, tokens: int) -> list[int]:
        """The first ids of a text, at least `tokens` if it has as many; a long text is not read to its end."""
        return lead(text, tokens, self.encode)[1]

    def samples(self) -> list[list[int]]:
        """A few prompts as ids, of every domain in turn, for the checks before timing; at least one."""
        domains: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            domains.setdefault(prompt.domain, []).append(prompt)
        in_turn = [prompt for each in zip_longest(*domains.values()) for prompt in each if prompt is not None]
        return list(islice(filter(None, (self.opening(prompt.text, SAMPLE_TOKENS) for prompt in in_turn)), SAMPLES))

    def _rows(self, cell: CellRecord) -> list[CellPrompt]:
        if self._made[0] != cell.name:
            seed = self._spec.prompts.seed
            self._made = (cell.name, cell_token_ids(self.prompts, self.encode, cell.batch, cell.length, seed))
        return self._made[1]

    def prompt_rows(self, cell: CellRecord) -> list[Rows]:
        """Rows of table `prompts`; without text where the spec keeps none."""
        rows = self._rows(cell)
        keep = self._spec.privacy.keep_text
        return [
            Rows(
                "prompts",
                cell.name,
                {
                    "request": [row.request for row in rows],
                    "domain": [row.domain for row in rows],
                    "tokens": [len(row.ids) for row in rows],
                    "mean_token_rank": [mean_token_rank(row.ids) for row in rows],
                    "text": [row.text if keep else None for row in rows],
                },
            )
        ]

    def of(
        self, cell: CellRecord, dense: methods.Method, at: Callable[[float], None] = lambda share: None
    ) -> CellInputs:
        """Tensors of one cell; a decode cell's continuation comes from `dense`, greedily, and `at` is told how far."""
        rows = self._rows(cell)
        ids_BT = torch.tensor([row.ids for row in rows], device=self._device)
        given = CellInputs(cell, ids_BT, None, [row.request for row in rows])
        if cell.phase == "prefill":
            return given
        cell.reference = "teacher-forced on the dense model's greedy continuation"
        return CellInputs(cell, ids_BT, _greedy(dense, given, cell.new_tokens, at), given.requests)


def _greedy(dense: methods.Method, given: CellInputs, new_tokens: int, at: Callable[[float], None]) -> torch.Tensor:
    """`[B, new_tokens]`: what the dense model says after each prompt, most likely token first to last."""
    found = []
    with torch.no_grad():
        out = prefill(dense, given)
        for _ in range(new_tokens):
            token_B1 = out.logits[:, -1:].argmax(-1)
            found.append(token_B1)
            at(len(found) / new_tokens)
            if len(found) < new_tokens:
                out = dense.model(input_ids=token_B1, cache=out.cache, use_cache=True, logits_to_keep=1)
    return torch.cat(found, dim=1)
