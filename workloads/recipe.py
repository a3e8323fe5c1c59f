"""The shape of a training recipe: which model, which method and objective, which text, how long; and reading one.

A recipe is checked as a spec is: every key described and bounded here, unknown ones refused with the nearest known
one named. A method's own options, beside `method.name`, and those of its objective are checked by the method.

Not here: training (`profiler.train`) and generated text (`generated`).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.resources
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from profiler.errors import InputError
from workloads import overrides as set_option
from workloads.documents import dump_yaml, read_document
from workloads.explain import explain, show
from workloads.spec import METHOD_PATTERN, ModelSpec, Name, Seed

MAX_TOKENS_PER_STEP = 4_194_304
#: Keys of `training` that the first recipes had not. At their default they are no part of a recipe's hash, so that a
#: training begun before goes on under the hash it has.
LATER = ("warmup_share", "schedule", "gradient_checkpointing")


def _broken(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{sentence}", {"sentence": sentence})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MethodSpec(BaseModel):
    """The method that is trained. Keys beyond `name` are its own options, as an arm of a spec has them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=METHOD_PATTERN, max_length=256)] = Field(
        description="A method's name (layerroute), or a dotted name to load from outside the tree."
    )

    @property
    def options(self) -> dict[str, Any]:
        """Every other key."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _starts_fresh(self) -> MethodSpec:
        if "checkpoint" in self.options:
            raise _broken("a recipe starts from the method's own start values, so it takes no checkpoint")
        return self


class ObjectiveSpec(BaseModel):
    """What is minimised; the keys are the method's."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        """Every key."""
        return dict(self.__pydantic_extra__ or {})


class GeneratedSpec(_Section):
    """Text made by `workloads.generated`: distinct items of each kind. A kind is its items' domain."""

    math: Annotated[int, Field(ge=0, le=1_000_000)] = Field(default=0, description="Word problems with solutions.")
    tool_call: Annotated[int, Field(ge=0, le=1_000_000)] = Field(default=0, description="Function-call exchanges.")
    seed: Seed = Field(default=0, description="Seed of the text itself; the training seed does not change the text.")

    @property
    def counts(self) -> dict[str, int]:
        """Kind → number of items."""
        return {"math": self.math, "tool_call": self.tool_call}


class DataSpec(_Section):
    """The text. An item is a prompt and, where it has one, its reference; the loss is over both."""

    generated: GeneratedSpec | None = Field(default=None, description="Generated text, or none.")
    files: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=64)] = Field(
        default=[],
        description="JSONL files with 'prompt' and optional 'reference', 'domain', 'id'; relative to the recipe.",
    )
    held_out: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=48, description="Items of each domain that are never trained on; the training seed chooses them."
    )

    @model_validator(mode="after")
    def _some_text(self) -> DataSpec:
        if not self.files and not any(self.generated.counts.values() if self.generated else ()):
            raise _broken("there must be text to train on: a count under generated, or files")
        return self


class TrainingSpec(_Section):
    """How long, in which steps. A step is one update of `batch × accumulation` sequences."""

    steps: Annotated[int, Field(ge=1, le=10_000_000)] = Field(description="Updates.")
    batch: Annotated[int, Field(ge=1, le=4096)] = Field(default=4, description="Sequences of one forward.")
    accumulation: Annotated[int, Field(ge=1, le=4096)] = Field(default=4, description="Forwards of one update.")
    length: Annotated[int, Field(ge=2, le=131_072)] = Field(
        default=128, description="Tokens a sequence is cut to; shorter ones are padded."
    )
    learning_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=2e-4, description="The largest, after the warm-up."
    )
    warmup_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0, description="Share of the updates, the first ones, over which the rate rises linearly."
    )
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="After the warm-up: a cosine takes the rate to 0, or it stays."
    )
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]], Field(min_length=2, max_length=2)
    ] = Field(default=[0.9, 0.999], description="AdamW's.")
    weight_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(default=0.01, description="AdamW's.")
    clip: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = Field(
        default=1.0, description="Largest norm of all gradients together."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Keep each block's input only and compute it again: less memory, a third more time."
    )
    seed: Seed = Field(default=0, description="Of initialisation, dropout, order of the text, and what is held out.")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="CPU threads of one operator; null leaves torch's own choice."
    )
    evaluate_every: Annotated[int, Field(ge=1)] = Field(default=50, description="Updates between held-out figures.")
    checkpoint_every: Annotated[int, Field(ge=1)] = Field(default=20, description="Updates between resumable states.")
    stored_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float16", description="Type of the numbers in the finished checkpoint."
    )

    @model_validator(mode="after")
    def _fits(self) -> TrainingSpec:
        tokens = self.batch * self.accumulation * self.length
        if tokens > MAX_TOKENS_PER_STEP:
            raise _broken(
                f"batch × accumulation × length must be at most {MAX_TOKENS_PER_STEP:,} tokens a step, "
                f"and {self.batch:,} × {self.accumulation:,} × {self.length:,} is {tokens:,}"
            )
        return self


class Recipe(_Section):
    """A training recipe."""

    name: Name = Field(description="Name of the recipe; letters, digits, '.', '_' and '-'.")
    model: ModelSpec = Field(description="The backbone, which stays as it is.")
    method: MethodSpec = Field(description="What is trained beside it.")
    objective: ObjectiveSpec = Field(default_factory=ObjectiveSpec, description="What is minimised.")
    data: DataSpec = Field(description="The text.")
    training: TrainingSpec = Field(description="Steps, schedule, seed.")

    @field_validator("model")
    @classmethod
    def _trainable_type(cls, model: ModelSpec) -> ModelSpec:
        if model.dtype == "float16":
            raise _broken("dtype float16 overflows in training without loss scaling; take bfloat16 or float32")
        return model

    def to_yaml(self) -> str:
        """The recipe as resolved, defaults written out; reads back to an equal recipe."""
        return dump_yaml(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """Hash of the recipe as resolved: canonical JSON, keys sorted, those of `LATER` only where they are not their
        default."""
        meant = self.model_dump(mode="json")
        for key in LATER:
            if meant["training"][key] == TrainingSpec.model_fields[key].default:
                del meant["training"][key]
        canonical = json.dumps(meant, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def builtin_recipes() -> dict[str, Path]:
    """The recipes that ship with the package, by name, sorted."""
    folder = Path(str(importlib.resources.files("workloads") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe as resolved: overrides applied, relative `data.files` made absolute.

    Args:
        source: the path of a YAML or `.json` file, or the name of a built-in recipe.
        overrides: `a.b.c=value`, applied in order. Relative files among them start at the working folder, those
            in the recipe at the recipe's folder.

    Raises:
        InputError: with the file, the key, the rule and the value given.
    """
    path, label = _find(source)
    data = read_document(path, label)
    if not isinstance(data, dict):
        raise InputError(f"{label}: must be a mapping of keys such as name, model and method, and it is {show(data)}")
    marks = set_option.apply(data, overrides, Recipe)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, label, marks, Recipe) from error
    typed = any(mark[: len(place)] == place for mark in marks for place in (("data", "files"),)) or ("data",) in marks
    folder = Path.cwd() if typed else path.parent
    files = [os.path.abspath(folder / os.path.expanduser(file)) for file in recipe.data.files]
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"files": files})})


def _find(source: str | os.PathLike[str]) -> tuple[Path, str]:
    known = builtin_recipes()
    if isinstance(source, str) and source in known:
        return known[source], f"built-in recipe {source}"
    path = Path(source)
    if not path.exists() and len(path.parts) <= 1 and not path.suffix:
        near = difflib.get_close_matches(str(source), known, n=1)
        hint = f"; the nearest built-in is {near[0]!r}" if near else ""
        raise InputError(f"{source}: neither a file nor a built-in recipe ({', '.join(known)}){hint}")
    return path, str(source)
