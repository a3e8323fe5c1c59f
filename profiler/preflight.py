"""What of a spec can be checked without weights, so that `validate`, a dry run, `plan` and `run` refuse in one voice.

Errors are `SpecError`s: whoever knows which file the spec came from names it. Not here: the shape of a spec, which it
had to have to be one (`workloads.spec`); what only shows with tokenizer and weights at hand (`run.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from profiler import checkpoints, methods, models
from profiler.errors import InputError, SpecError
from workloads.prompts import load_prompts
from workloads.spec import ArmSpec, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def about_the_spec() -> Iterator[None]:
    """What is wrong in this block is wrong with the spec."""
    try:
        yield
    except SpecError:
        raise
    except InputError as error:
        raise SpecError(str(error)) from error


def check(spec: Spec) -> PreTrainedModel:
    """Everything but weights and tokenizer; a hub id is asked for its config.

    Returns:
        The model on the meta device.

    Raises:
        SpecError: model source, arms, checkpoints, ranks, prompts or cells break a rule.
    """
    with about_the_spec():
        models.check(spec.model.source)
        check_arms(spec)
        load_prompts(spec.prompts)
        if spec.quality is not None:
            load_prompts(spec.quality)
        config = models.config(spec.model.source)
        check_positions(spec, config)
        skeleton = models.skeleton(config, spec.model.dtype)
        ranks = 1 if spec.parallel is None else spec.parallel.experts
        for arm in spec.arms:
            with about_the_arm(arm.name):
                options = checkpoints.resolve(arm.method, options_of(spec, arm), skeleton)
                configured = methods.configure(arm.method, options, where=f"arms.{arm.name}.")
                method = methods.load(arm.method)
                method.check(skeleton, configured, ranks)
                method.choices(skeleton, configured)
    return skeleton


@contextmanager
def about_the_arm(name: str) -> Iterator[None]:
    """Errors of this block name the arm, where they do not yet."""
    try:
        yield
    except InputError as error:
        if str(error).startswith("arms."):
            raise
        raise InputError(f"arms.{name}: {error}") from error


def options_of(spec: Spec, arm: ArmSpec) -> dict[str, Any]:
    """An arm's options; one that takes a checkpoint still to be trained starts as training does."""
    return {**arm.options, "checkpoint": None} if arm.name in spec.trained_arms() else arm.options


def check_arms(spec: Spec) -> None:
    """Methods and their options, and that following twins comes to an end.

    Raises:
        SpecError: the method is not known, an option is wrong, or arms are each other's twins.
    """
    with about_the_spec():
        for arm in spec.arms:
            methods.configure(arm.method, arm.options, where=f"arms.{arm.name}.")
        twins = {arm.name: arm.twin for arm in spec.arms}
        for arm in spec.arms:
            path, at = [arm.name], arm.twin
            while at is not None and at not in path:
                path.append(at)
                at = twins[at]
            if at == arm.name:
                raise InputError(
                    f"arms.{arm.name}.twin: twins must lead to an arm that has none, and these go round: "
                    f"{' → '.join([*path, at])}"
                )


def check_positions(spec: Spec, config: Any) -> None:
    """Refuse a cell that is longer than the model.

    Args:
        config: the model's; one that does not say how many positions it has takes any length.

    Raises:
        SpecError: a cell reaches past them.
    """
    limit = getattr(config, "max_position_embeddings", None)
    for cell in spec.cell_list():
        reach = cell.length + cell.new_tokens
        if limit is not None and reach > limit:
            raise SpecError(
                f"cells: {cell.name} reaches position {reach:,}, and {spec.model.source} has positions for {limit:,} "
                "tokens"
            )
