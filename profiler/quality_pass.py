"""The quality pass of a run: every arm scores every item, its decisions recorded and checked like those of any step.

Tables written, under the cells `records.QUALITY_CELLS` names: `scores`, `token_scores`, `choice_scores` and `quality`,
and `steps`, `gates`, signals, `rows`, `prompts` and `tokens` of the scoring steps, which hold decisions about many more
inputs than a timed cell does. Their wall times are recorded and mean nothing: arms are not interleaved here, and every
step is instrumented.

Not here: what an item is and how it is scored (`quality`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.arms import Arm
from profiler.errors import InputError
from profiler.inputs import mean_token_rank
from profiler.measure import STEPS_PER_CELL
from profiler.quality import Item, Mode, Scored, choose, likeliest, perplexity, score
from profiler.recorder import StepData
from profiler.records import QUALITY_CELLS, QUALITY_MODES, ArmRecord, QualityRecord, RuleRecord
from profiler.stepdata import Place, decision_rows, digest, executed_as_decided
from profiler.writer import RunWriter

TASK, METRIC = "perplexity", "perplexity"
#: Whether the reference is the likeliest of an item's choices.
CHOICE, ACCURACY = "multiple_choice", "accuracy"
#: `domain` of the rows of table `quality` that are over all items.
ALL_DOMAINS = "all"


@dataclass
class _Checked:
    """What was seen of one arm's steps in one mode."""

    steps: int = 0
    thawed: int = 0
    problems: list[str] = field(default_factory=list)
    dropped: int = 0


class QualityRun:
    """Scores every item with every arm and writes the tables named above.

    Args:
        items: from `load_items`.
        arms: all arms of the run.
        modes: of the spec.
        writer: where rows go.
        index: number of cells of the spec, from which step ids are made.
        keep_text: whether the prompts' text may be written.
        at: called with the share done, between 0 and 1.
    """

    def __init__(
        self,
        items: Sequence[Item],
        arms: Sequence[Arm],
        modes: Sequence[Mode],
        writer: RunWriter,
        index: int,
        keep_text: bool,
        at: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.items, self.arms, self.modes, self.writer = items, arms, modes, writer
        self.keep_text, self.at = keep_text, at
        self._index = index
        self._done = 0

    def run(self) -> list[RuleRecord]:
        """Score, and return the rules that were checked on the way. The caller closes the pass."""
        scored = sum(len(item.continuation) for item in self.items)
        names = [QUALITY_MODES[mode] for mode in self.modes]
        self.writer.manifest.quality = QualityRecord(items=len(self.items), tokens=scored, modes=names)
        rules: list[RuleRecord] = []
        for place, mode in enumerate(self.modes):
            self._write_prompts(QUALITY_CELLS[mode])
            first_step = (self._index + place) * STEPS_PER_CELL
            for number, arm in enumerate(self.arms):
                rules += self._arm(arm, mode, first_step + number * 2 * len(self.items))
        return rules

    def _write_prompts(self, cell: str) -> None:
        columns = {
            "request": [item.id for item in self.items],
            "domain": [item.domain for item in self.items],
            "tokens": [len(item.prefix) for item in self.items],
            "mean_token_rank": [mean_token_rank(item.prefix) for item in self.items],
            "text": [item.text if self.keep_text else None for item in self.items],
        }
        self.writer.append("prompts", columns, cell=cell)
        texts = [(*item.prefix, *item.continuation) for item in self.items]
        seen = Counter(token for text in texts for token in text)
        for item, text in zip(self.items, texts, strict=True):
            columns = {
                "request": item.id,
                "position": list(range(len(text))),
                "token": list(text) if self.keep_text else None,
                "occurrences": [seen[token] for token in text] if self.keep_text else None,
            }
            self.writer.append("tokens", columns, cell=cell)
            self.writer.drain()

    def _arm(self, arm: Arm, mode: Mode, step: int) -> list[RuleRecord]:
        cell, handle = QUALITY_CELLS[mode], arm.recorded
        checked = _Checked()
        found: list[StepData] = []
        scored: list[Scored] = []
        handle.recorder.mode, handle.recorder.sink = "record", found.append
        try:
            for item in self.items:
                found.clear()
                handle.tracker.name([item.id])
                scored.append(_finite(score(handle, item, mode), arm.name, item))
                handle.release(item.id)
                self._take(found, arm.record, cell, mode, step, checked)
                step += len(found)
                self._tell()
        finally:
            handle.recorder.mode, handle.recorder.sink = "off", None
            handle.tracker.name(None)
        self._write_scores(arm.name, mode, scored)
        self._choose(arm, mode)
        return list(_rules(arm.record, cell, mode, checked))

    def _tell(self) -> None:
        self._done += 1
        units = len(self.items) + sum(bool(item.choices) for item in self.items)
        self.at(self._done / (units * len(self.arms) * len(self.modes)))

    def _choose(self, arm: Arm, mode: Mode) -> None:
        """Score the choices of the items that have some, unrecorded: what the gates saw of the prompt is the same."""
        chosen, handle = [item for item in self.items if item.choices], arm.bare
        right: list[bool] = []
        try:
            for item in chosen:
                handle.tracker.name([item.id])
                scored = [_finite(each, arm.name, item) for each in choose(handle, item, mode)]
                handle.release(item.id)
                right.append(likeliest(scored) == item.right)
                columns: dict[str, Any] = {
                    "arm": arm.name, "item": item.id, "domain": item.domain, "mode": QUALITY_MODES[mode],
                    "choice": list(range(len(scored))), "nll": [each.nll for each in scored],
                    "tokens": [len(each.nll_N) for each in scored],
                    "right": [place == item.right for place in range(len(scored))],
                }  # fmt: skip
                self.writer.append("choice_scores", columns, cell=QUALITY_CELLS[mode])
                self.writer.drain()
                self._tell()
        finally:
            handle.tracker.name(None)
        for domain in (ALL_DOMAINS, *dict.fromkeys(item.domain for item in chosen)) if chosen else ():
            among = [hit for hit, item in zip(right, chosen, strict=True) if domain in (ALL_DOMAINS, item.domain)]
            columns = {
                "arm": [arm.name], "task": CHOICE, "domain": domain, "metric": ACCURACY,
                "value": sum(among) / len(among), "denominator": len(among), "mode": QUALITY_MODES[mode],
            }  # fmt: skip
            self.writer.append("quality", columns, cell=QUALITY_CELLS[mode])

    def _take(
        self, found: Sequence[StepData], arm: ArmRecord, cell: str, mode: Mode, step: int, checked: _Checked
    ) -> None:
        for place, data in enumerate(found):
            checked.steps += 1
            checked.dropped += data.dropped
            checked.problems += executed_as_decided(data, arm)
            # What follows a prompt at once is `mixed`, also where it is one token.
            data.phase = "mixed" if place else "prefill"
            view = data.sequences.view
            columns: dict[str, Any] = {
                "arm": [arm.name], "pass": "quality", "repeat": 0, "order": place, "step": step + place, "index": place,
                "phase": data.phase, "rows": view.rows, "context": view.context, "wall_ns": data.wall_ns,
                "device_ns": data.device_ns,
            }  # fmt: skip
            self.writer.append("steps", columns, cell=cell)
            rows = decision_rows(data, arm, Place(cell, step + place))
            self.writer.submit(lambda rows=rows: rows, dropped_as="gates")  # type: ignore[misc]
        if mode == "prefix" and arm.scope == "sequence" and len({digest(data) for data in found}) > 1:
            checked.thawed += 1
        self.writer.drain()

    def _write_scores(self, arm: str, mode: Mode, scored: Sequence[Scored]) -> None:
        items, nll = self.items, [each.nll for each in scored]
        columns: dict[str, Any] = {
            "arm": arm,
            "task": TASK,
            "item": [item.id for item in items],
            "domain": [item.domain for item in items],
            "mode": QUALITY_MODES[mode],
            "nll": nll,
            "tokens": [len(item.continuation) for item in items],
            "prefix_tokens": [len(item.prefix) for item in items],
        }
        self.writer.append("scores", columns, cell=QUALITY_CELLS[mode])
        for item, each in zip(items, scored, strict=True):
            columns = {
                "arm": arm,
                "request": item.id,
                "position": len(item.prefix) - 1 + np.arange(len(item.continuation)),
                "nll": each.nll_N,
                "hit": each.hit_N,
                "reference": item.referenced,
            }
            self.writer.append("token_scores", columns, cell=QUALITY_CELLS[mode])
            self.writer.drain()
        for domain in (ALL_DOMAINS, *dict.fromkeys(item.domain for item in items)):
            chosen = [i for i, item in enumerate(items) if domain in (ALL_DOMAINS, item.domain)]
            tokens = sum(len(items[i].continuation) for i in chosen)
            columns = {
                "arm": [arm], "task": TASK, "domain": domain, "metric": METRIC,
                "value": perplexity(sum(nll[i] for i in chosen), tokens), "denominator": tokens,
                "mode": QUALITY_MODES[mode],
            }  # fmt: skip
            self.writer.append("quality", columns, cell=QUALITY_CELLS[mode])


def _finite(scored: Scored, arm: str, item: Item) -> Scored:
    if not math.isfinite(scored.nll):
        raise InputError(
            f"quality: arm {arm!r} gives item {item.id!r} a log-likelihood of {-scored.nll}; its logits are not "
            "finite, so nothing can be said of its quality (in float16, try bfloat16 or float32)"
        )
    return scored


def _rules(arm: ArmRecord, cell: str, mode: Mode, checked: _Checked) -> Iterator[RuleRecord]:
    problems = checked.problems
    yield RuleRecord(
        rule=1,
        name="rows executed = gates recorded",
        arm=arm.name,
        cell=cell,
        passed=not problems and checked.dropped == 0,
        detail=problems[0] if problems else f"equal in {checked.steps} scoring steps, {checked.dropped} dropped",
        figures={
            "steps": float(checked.steps), "differences": float(len(problems)), "dropped": float(checked.dropped),
        },
    )  # fmt: skip
    if mode == "prefix" and arm.scope == "sequence":
        yield RuleRecord(
            rule=1,
            name="gates frozen before what is scored",
            arm=arm.name,
            cell=cell,
            passed=checked.thawed == 0,
            detail=f"{checked.thawed} items decided anew while their continuation was scored",
            figures={"items": float(checked.steps // 2), "changed": float(checked.thawed)},
        )
