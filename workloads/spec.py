"""The shape of a workload spec: which model, which arms, which prompts, which cells, measured how.

Every key is described here, bounded here, and refused here when it is unknown; only an arm's keys beyond
`name`, `method` and `twin` pass through, as `options`, to be checked by that method's own `Config`.
`spec.schema.json` (see `workloads.schema`) is made from these models.

Not here: reading files, `--set` and error text (`loading`, `overrides`, `explain`), what a prompt is
(`prompts`), and whether a model or a method exists (`profiler`). Keys that later versions bring
(`LATER_KEYS`) are refused by name.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from workloads.documents import dump_yaml

#: Sections of later versions.
LATER_KEYS = ("serve",)

#: The method every spec with a routed arm needs as its baseline.
DENSE = "dense"
#: Methods that run a model as it is: `dense`, and `stock_moe` where the model has experts of its own.
AS_IT_IS = (DENSE, "stock_moe")
#: `prompts.source` of the prompts that ship with the package.
BUILTIN = "builtin"
#: An arm's `checkpoint` that stands for what the spec's own `train` section makes, seed by seed.
TRAINED = "trained"

MAX_TOKENS_PER_CELL = 1_048_576
MAX_CELLS = 256
MAX_NAME = 64

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
METHOD_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"


T = TypeVar("T", int, str)


def _broken(sentence: str) -> PydanticCustomError:
    """A broken rule that spans several values; the sentence reaches the user as it stands."""
    return PydanticCustomError("rule", "{sentence}", {"sentence": sentence})


def _distinct(values: list[T]) -> list[T]:
    twice = [value for value, times in Counter(values).items() if times > 1]
    if twice:
        raise _broken(f"each entry may be listed once, and {twice[0]!r} is listed {values.count(twice[0])} times")
    return values


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Batches = Annotated[
    list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=MAX_CELLS), AfterValidator(_distinct)
]
Lengths = Annotated[
    list[Annotated[int, Field(ge=1, le=131_072)]], Field(min_length=1, max_length=MAX_CELLS), AfterValidator(_distinct)
]
Domains = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=64)]],
    Field(min_length=1, max_length=64),
    AfterValidator(_distinct),
]


class _Section(BaseModel):
    """Strict: `true` is not 1 and `"8"` is not 8. Frozen: what was hashed is what runs."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Cell:
    """One point of the sweep. `length` is the prompt (prefill) or the context (decode), in tokens per request."""

    phase: Literal["prefill", "decode"]
    batch: int
    length: int
    new_tokens: int = 0

    @property
    def name(self) -> str:
        """`prefill-b8-l512` or `decode-b8-c256-n32`."""
        if self.phase == "prefill":
            return f"prefill-b{self.batch}-l{self.length}"
        return f"decode-b{self.batch}-c{self.length}-n{self.new_tokens}"


class ModelSpec(_Section):
    """The model under every arm."""

    source: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A known model (smollm2-135m), a preset with random weights (tiny), a local folder or a hub id."
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        default="float32", description="Type of weights and activations."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where it runs; auto takes CUDA where there is a device."
    )
    seed: Seed = Field(default=0, description="Seed of the weights where they are random.")


class ArmSpec(BaseModel):
    """One arm: a method with its options. Keys beyond these three are the method's own options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Name = Field(description="Unique name; letters, digits, '.', '_' and '-', since files are named after it.")
    method: Annotated[str, Field(pattern=METHOD_PATTERN, max_length=256)] = Field(
        description="A method's name (dense, layerroute), or a dotted name to load from outside the tree."
    )
    twin: str | None = Field(
        default=None, description="The arm it is compared with; the first dense or stock_moe arm unless it is that."
    )

    @property
    def options(self) -> dict[str, Any]:
        """Every other key of the arm, for that method's `Config`."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _options_are_flat(self) -> ArmSpec:
        if "options" in (self.__pydantic_extra__ or {}):
            raise _broken("'options' is not a key; a method's options stand beside name and method")
        return self


class PromptsSpec(_Section):
    """Where the prompts come from."""

    source: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        default=BUILTIN,
        description="builtin, or the path of a JSONL file with 'prompt' and optional 'domain', 'id', 'reference'; "
        "a relative path starts at the spec's folder.",
    )
    domains: Domains | None = Field(
        default=None, description="Domains to use, in this order over the rows of a batch; null takes all."
    )
    count: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="At most this many prompts, evenly over the domains; null takes all."
    )
    seed: Seed = Field(default=0, description="Seed of which prompts are taken and how they are joined.")


class PrefillSpec(_Section):
    """Prefill cells: every batch with every length."""

    batch: Batches = Field(description="Requests in a batch.")
    length: Lengths = Field(description="Prompt tokens per request.")

    @model_validator(mode="after")
    def _bounded(self) -> PrefillSpec:
        batch, length = max(self.batch), max(self.length)
        if batch * length > MAX_TOKENS_PER_CELL:
            raise _broken(
                f"batch × length must be at most {MAX_TOKENS_PER_CELL:,} tokens a cell, "
                f"and {batch:,} × {length:,} is {batch * length:,}"
            )
        return self


class DecodeSpec(_Section):
    """Decode cells: every batch with every context, each for `new_tokens` steps."""

    batch: Batches = Field(description="Requests in a batch.")
    context: Lengths = Field(description="Tokens already in the cache, per request, before the first timed step.")
    new_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(description="Decode steps timed, one token each.")

    @model_validator(mode="after")
    def _bounded(self) -> DecodeSpec:
        batch, context = max(self.batch), max(self.context)
        tokens = batch * (context + self.new_tokens)
        if tokens > MAX_TOKENS_PER_CELL:
            raise _broken(
                f"batch × (context + new_tokens) must be at most {MAX_TOKENS_PER_CELL:,} tokens a cell, "
                f"and {batch:,} × ({context:,} + {self.new_tokens:,}) is {tokens:,}"
            )
        return self


class CellsSpec(_Section):
    """The sweep. At least one cell."""

    prefill: PrefillSpec | None = Field(default=None, description="Prefill cells, or none.")
    decode: DecodeSpec | None = Field(default=None, description="Decode cells, or none.")

    @model_validator(mode="after")
    def _some_and_not_too_many(self) -> CellsSpec:
        count = len(self.cell_list())
        if count == 0:
            raise _broken("at least one of prefill and decode must be given")
        if count > MAX_CELLS:
            raise _broken(f"a spec may have at most {MAX_CELLS} cells, and these are {count:,}")
        return self

    def cell_list(self) -> list[Cell]:
        """Prefill cells, then decode cells; of each length every batch in turn."""
        cells = []
        if self.prefill:
            cells += [Cell("prefill", b, length) for length in self.prefill.length for b in self.prefill.batch]
        if self.decode:
            new = self.decode.new_tokens
            cells += [Cell("decode", b, context, new) for context in self.decode.context for b in self.decode.batch]
        return cells


class MeasureSpec(_Section):
    """How long and how precisely each cell is measured."""

    warmup: Annotated[int, Field(ge=0, le=1000)] = Field(default=3, description="Untimed repeats before the first.")
    max_repeats: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=40, description="Repeats after which a cell ends in any case."
    )
    min_repeats: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default_factory=lambda data: min(3, data.get("max_repeats", 3)),
        description="Repeats before the interval may end a cell; 3, or max_repeats where that is less.",
    )
    target_ci: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=0.02, description="Half-width of the interval of the time ratio at which a cell ends."
    )
    budget_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        default=120.0, description="Seconds for each cell."
    )
    seed: Seed = Field(default=0, description="Seed of the order of arms within a repeat, and of the bootstrap.")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="CPU threads of one operator; null leaves torch's own choice."
    )

    @model_validator(mode="after")
    def _ordered(self) -> MeasureSpec:
        if self.min_repeats > self.max_repeats:
            raise _broken(f"min_repeats ({self.min_repeats:,}) must be at most max_repeats ({self.max_repeats:,})")
        return self


class TraceSpec(_Section):
    """A pass of its own under torch.profiler, after timing."""

    steps: Annotated[int, Field(ge=1, le=100)] = Field(default=1, description="Steps traced, per cell and arm.")
    keep: bool = Field(default=True, description="Keep the trace files; false leaves only the kernels table.")


class QualitySpec(_Section):
    """Held-out quality: after the cells, every arm scores the same continuations."""

    tasks: Annotated[
        list[Literal["perplexity", "multiple_choice"]], Field(min_length=1, max_length=8), AfterValidator(_distinct)
    ] = Field(
        default=["perplexity"],
        description="perplexity: of each prompt's reference, or of its second half where it has none; always measured. "
        "multiple_choice: of the prompts that have 'choices', whether the reference is the likeliest a token.",
    )
    source: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        default=BUILTIN,
        description="builtin, or the path of a JSONL file as in prompts; a relative path starts at the spec's folder. "
        "It should hold nothing that a router was trained on.",
    )
    domains: Domains | None = Field(default=None, description="Domains to use; null takes all.")
    count: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=32, description="At most this many items, evenly over the domains."
    )
    max_tokens: Annotated[int, Field(ge=2, le=8192)] = Field(
        default=512, description="Tokens of an item, prompt and continuation; what is longer is cut at its end."
    )
    modes: Annotated[list[Literal["prefix", "whole"]], Field(min_length=1, max_length=2), AfterValidator(_distinct)] = (
        Field(
            default=["prefix"],
            description="prefix: gates are decided on the prompt alone and frozen while its continuation is scored. "
            "whole: gates see the words being scored, as in training; it leaks, and is for comparison only.",
        )
    )
    seed: Seed = Field(default=0, description="Seed of which items are taken.")


class TrainSpec(_Section):
    """What is trained, once for each of `seeds`, before the arms with `checkpoint: trained` are measured."""

    recipe: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A recipe file or a built-in recipe's name; a relative path starts at the spec's folder."
    )
    set: dict[str, Any] = Field(
        default={},
        description="Keys of the recipe to change, such as {training.steps: 40}; a relative path in data.files starts "
        "at the spec's folder.",
    )

    @field_validator("set", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        """Nested sections as dotted keys, so that a spec has one form however it was written."""
        return dict(_leaves(given)) if isinstance(given, dict) else given

    @field_validator("set")
    @classmethod
    def _without_seed(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "training.seed" in given:
            raise _broken("training.seed is what seeds sets, so it cannot be set here too")
        return given


def _leaves(section: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


class ParallelSpec(_Section):
    """Routed experts spread over processes, under `torchrun --nproc-per-node EXPERTS -m profiler run SPEC`.

    One process that torchrun did not start has every expert itself, and says the same.
    """

    experts: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Processes that share the experts of each layer; torchrun must start as many."
    )
    placement: Literal["contiguous", "all_size", "interleaved"] = Field(
        default="all_size", description="Which rank has which expert; outputs do not depend on it."
    )
    attention: Literal["replicated", "data_parallel"] = Field(
        default="replicated",
        description="replicated: every rank runs the whole batch but for its experts. data_parallel: each rank runs "
        "rows of its own, and needs one at least.",
    )
    timeout_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = Field(
        default=60.0, description="Seconds a rank is waited for before the run ends."
    )


class PrivacySpec(_Section):
    """What of the prompts may be written."""

    keep_text: bool = Field(default=True, description="false: no prompt or output text is written anywhere.")


class Spec(_Section):
    """A workload spec."""

    name: Name = Field(description="Name of the run; letters, digits, '.', '_' and '-'.")
    model: ModelSpec = Field(description="The model under every arm.")
    arms: Annotated[list[ArmSpec], Field(min_length=1, max_length=32)] = Field(
        description="What is compared, interleaved in one run. A routed arm needs a dense one beside it."
    )
    prompts: PromptsSpec = Field(default_factory=PromptsSpec, description="Where the prompts come from.")
    cells: CellsSpec = Field(description="The sweep of phase, batch and length.")
    measure: MeasureSpec = Field(default_factory=MeasureSpec, description="How long and how precisely.")
    trace: TraceSpec | None = Field(default=None, description="Tracing, or null for none.")
    quality: QualitySpec | None = Field(default=None, description="Held-out quality, or null for none.")
    train: TrainSpec | None = Field(
        default=None, validate_default=True, description="Makes the spec a study: train and measure for each of seeds."
    )
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=64), AfterValidator(_distinct)] | None = Field(
        default=None,
        validate_default=True,
        description="Seeds of a study: each sets training.seed of the recipe. The text that is measured on stays.",
    )
    parallel: ParallelSpec | None = Field(
        default=None, validate_default=True, description="Experts on several processes, or null for one."
    )
    privacy: PrivacySpec = Field(default_factory=PrivacySpec, description="What of the prompts may be written.")

    @field_validator("arms")
    @classmethod
    def _arms_stand_together(cls, arms: list[ArmSpec]) -> list[ArmSpec]:
        """Unique names, and every twin resolved."""
        names = [arm.name for arm in arms]
        # Files are named after arms, and some file systems do not tell upper from lower case.
        twice = [name for name in names if [n.casefold() for n in names].count(name.casefold()) > 1]
        if twice:
            raise _broken(f"arm names must differ (also in more than case), and these do not: {', '.join(twice)}")
        baseline = next((arm.name for arm in arms if arm.method in AS_IT_IS), None)
        routed = [arm.name for arm in arms if arm.method not in AS_IT_IS]
        if routed and baseline is None:
            raise _broken(
                f"arm {routed[0]!r} needs a baseline, and no arm has method: {DENSE}; "
                f"add one, such as {{name: {DENSE}, method: {DENSE}}}"
            )
        return [_with_twin(arm, names, baseline) for arm in arms]

    @field_validator("train")
    @classmethod
    def _has_a_use(cls, train: TrainSpec | None, info: ValidationInfo) -> TrainSpec | None:
        takers = [arm.name for arm in info.data.get("arms", []) if arm.options.get("checkpoint") == TRAINED]
        if takers and train is None:
            raise _broken(
                f"must be given, since arm {takers[0]!r} asks for checkpoint: {TRAINED}; for a folder of that name "
                f"write ./{TRAINED}"
            )
        if train is not None and not takers and "arms" in info.data:
            raise _broken(f"makes a checkpoint, and no arm asks for it; give an arm checkpoint: {TRAINED}")
        return train

    @field_validator("parallel")
    @classmethod
    def _splits_what_there_is(cls, parallel: ParallelSpec | None, info: ValidationInfo) -> ParallelSpec | None:
        if parallel is None:
            return None
        for section in ("quality", "train"):
            if info.data.get(section) is not None:
                raise _broken(
                    f"does not go with {section}: what a model says does not depend on ranks, so give it in a spec of "
                    "its own"
                )
        cells = info.data["cells"].cell_list() if "cells" in info.data else []
        few = next((cell for cell in cells if cell.batch < parallel.experts), None)
        if parallel.attention == "data_parallel" and few is not None:
            raise _broken(
                f"attention data_parallel gives each rank a row at least, and cell {few.name} has a batch of "
                f"{few.batch} for {parallel.experts} ranks; raise the batch, or take attention: replicated"
            )
        return parallel

    @field_validator("seeds")
    @classmethod
    def _repeat_a_training(cls, seeds: list[int] | None, info: ValidationInfo) -> list[int] | None:
        if "train" not in info.data:
            return seeds
        if seeds is not None and info.data["train"] is None:
            raise _broken(
                "repeat a training, and the spec has no train section; add one, such as "
                "train: {recipe: layerroute-tiny}"
            )
        if seeds is None and info.data["train"] is not None:
            raise _broken("must be given beside train, such as seeds: [0, 1, 2]")
        name = info.data.get("name", "")
        longest = max((run_name(name, seed) for seed in seeds or []), key=len, default="")
        if len(longest) > MAX_NAME:
            raise _broken(
                f"name runs of their own, and {longest!r} has {len(longest)} characters where {MAX_NAME} are allowed; "
                "shorten the spec's name"
            )
        return seeds

    def trained_arms(self) -> list[str]:
        """Names of the arms that take the checkpoint of the spec's own training."""
        return [arm.name for arm in self.arms if arm.options.get("checkpoint") == TRAINED]

    def cell_list(self) -> list[Cell]:
        """The cells in the order they run."""
        return self.cells.cell_list()

    def to_yaml(self) -> str:
        """The spec as resolved, defaults written out; reads back to an equal spec."""
        return dump_yaml(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """Hash of the spec as resolved: canonical JSON, keys sorted, those of a study or of ranks only where it is one.

        Equal for two ways to write one spec.
        """
        studied = {"train", "seeds"} if self.train is None else set()
        if self.parallel is None:
            studied.add("parallel")
        meant = self.model_dump(mode="json", exclude=studied)
        canonical = json.dumps(meant, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def run_name(study: str, seed: int) -> str:
    """Name of the run of one seed of a study."""
    return f"{study}-seed-{seed}"


def _with_twin(arm: ArmSpec, names: Sequence[str], baseline: str | None) -> ArmSpec:
    if arm.twin is None:
        return arm if arm.method == DENSE or arm.name == baseline else arm.model_copy(update={"twin": baseline})
    if arm.twin == arm.name:
        raise _broken(f"the twin of arm {arm.name!r} must be another arm, not itself")
    if arm.twin not in names:
        near = difflib.get_close_matches(arm.twin, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the arms are {', '.join(names)}"
        raise _broken(f"the twin of arm {arm.name!r} must be another arm, and {arm.twin!r} is none; {hint}")
    return arm
