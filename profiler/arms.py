"""Arms side by side on one copy of the backbone's weights.

Each arm gets module trees of its own over the same tensors: wrapping, adapters or attention switches in one never
touch another, and interleaving costs no memory. An arm has two trees over the same tensors, those its method adds
included: `bare`, which nothing watches, and `recorded`, which carries the recorder's hooks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiler import checkpoints, methods
from profiler.recorder import Recorder
from profiler.records import ArmRecord, CalibrationRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sibling(model: PreTrainedModel) -> PreTrainedModel:
    """A new module tree over the very same parameters and buffers (tied weights stay tied)."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@dataclass(frozen=True)
class Arm:
    """One arm of a run: its two trees and what the manifest says of it."""

    record: ArmRecord
    bare: methods.Method
    recorded: methods.Method

    @property
    def name(self) -> str:
        """The arm's name in the spec."""
        return self.record.name


def tree(backbone: PreTrainedModel, method: str, config: Any) -> methods.Method:
    """One wrapped sibling of `backbone`, with a recorder of its own that is not attached yet."""
    return methods.load(method).wrap(sibling(backbone), config, Recorder())


def build(
    backbone: PreTrainedModel,
    name: str,
    method: str,
    options: dict[str, Any],
    twin: str | None,
    calibration: CalibrationRecord | None = None,
) -> Arm:
    """Make an arm; `calibration` says where its threshold comes from.

    Raises:
        InputError: the method is unknown, an option is wrong, or a checkpoint does not fit the backbone.
    """
    options = checkpoints.resolve(method, options, backbone)
    config = methods.configure(method, options, where=f"arms.{name}.")
    bare = tree(backbone, method, config)
    recorded = methods.handle_of(sibling(bare.model))
    assert recorded is not None
    recorded.recorder.attach(recorded)
    return Arm(describe(recorded, name, method, twin, calibration), bare, recorded)


def describe(
    handle: methods.Method, name: str, method: str, twin: str | None, calibration: CalibrationRecord | None = None
) -> ArmRecord:
    """What the manifest says of a wrapped model."""
    return ArmRecord(
        name=name,
        method=method,
        twin=twin,
        scope=handle.scope,
        options=handle.config.model_dump(mode="json"),
        kv_policy=handle.kv_policy,
        synthetic=handle.synthetic,
        untrained=handle.untrained,
        discards=handle.discards,
        caveat=handle.caveat,
        signals=dict(handle.signals),
        signal_starts=handle.signal_starts,
        constants=handle.constants,
        calibration=calibration,
        parallel=handle.parallel,
        memory=handle.memory(handle.model, handle.config),
        choices=handle.choices(handle.model, handle.config),
    )
