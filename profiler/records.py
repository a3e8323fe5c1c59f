"""What a run folder holds: table schemas, the manifest, and the format number with its history.

No torch here: a laptop reads what a GPU node wrote. Nothing is computed here either.

Units: nanoseconds (int64) and bytes (int64) inside; exported columns carry their unit in the name.

FORMAT history
  1  first format: manifest.json, spec.yaml, and one folder of Parquet parts per table.
"""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

FORMAT = 1

#: The rule whose outcome is a figure to be printed, not a condition: what recording costs.
RECORDER_COST = 14

State = Literal["running", "complete", "interrupted", "failed"]
Phase = Literal["prefill", "decode", "mixed"]
Pass = Literal["warmup", "bare", "instrumented", "traced", "quality", "serving"]

#: Cells of the quality pass, by mode. The manifest lists them in `quality`, not in `cells`: nothing is timed in them.
QUALITY_CELLS = {"prefix": "quality", "whole": "quality-whole"}
#: What parts with placements are named after, in place of a cell: written at the end, from the loads of all cells.
PLACEMENTS = "placements"
#: What the gates had seen when a continuation was scored, by mode, as tables and reports name it.
QUALITY_MODES = {"prefix": "gated on prefix", "whole": "whole sequence (leaks)"}

#: Name in `ArmRecord.constants` of the share of a memory that is left after a layer.
FORGET_FACTOR = "forget factor"

_KEY = [
    ("arm", pa.string()),
    ("step", pa.int64()),
    ("rank", pa.int32()),
]

TABLES: dict[str, pa.Schema] = {
    # One row a forward step. `step` is unique in the run. `order` is the place within the repeat.
    # `rows`: real token rows entering the model; `context`: sum over them of the positions each may attend.
    # `device_ns` is null where there is no device clock.
    "steps": pa.schema(
        [
            ("arm", pa.string()),
            ("cell", pa.string()),
            ("pass", pa.string()),
            ("repeat", pa.int32()),
            ("order", pa.int32()),
            ("step", pa.int64()),
            ("index", pa.int32()),
            ("phase", pa.string()),
            ("rows", pa.int64()),
            ("context", pa.int64()),
            ("wall_ns", pa.int64()),
            ("device_ns", pa.int64()),
            ("rank", pa.int32()),
        ]
    ),
    # One row a decision. `choices` are indices into the manifest's choices of (arm, layer, site).
    # `position` is -1 where the decision is about a whole sequence; `rows` is how many token rows of
    # this step it governs.
    "gates": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("phase", pa.string()),
            ("request", pa.string()),
            ("position", pa.int32()),
            ("layer", pa.int32()),
            ("site", pa.string()),
            ("choices", pa.list_(pa.int16())),
            ("weights", pa.list_(pa.float32())),
            ("gate", pa.float32()),
            ("rows", pa.int64()),
        ]
    ),
    # Token rows that entered the first product of a choice, counted there. `rows` leaves pads out,
    # `padded` counts the pads that were computed too. `context`: sum over real rows of the positions
    # attended under the causal mask; `context_full`: the same if every key were multiplied.
    "rows": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("layer", pa.int32()),
            ("site", pa.string()),
            ("choice", pa.int16()),
            ("rows", pa.int64()),
            ("padded", pa.int64()),
            ("context", pa.int64()),
            ("context_full", pa.int64()),
        ]
    ),
    # Wall (CPU) or stream (CUDA) time of one named segment of one layer in an instrumented step.
    # Self time: a nested segment's time is not in its parent's.
    "segments": pa.schema(
        [*_KEY, ("cell", pa.string()), ("layer", pa.int32()), ("segment", pa.string()), ("ns", pa.int64())]
    ),
    # Key/value cache held at the end of a step, summed over layers. `live` is what requests need,
    # `allocated` what the storage takes.
    "kv": pa.schema([*_KEY, ("cell", pa.string()), ("allocated_bytes", pa.int64()), ("live_bytes", pa.int64())]),
    # A kernel (CUDA), or an operator's own time (CPU), of a traced step: the time of operators inside it is theirs,
    # so the sum counts each moment of a thread once. Category `cpu_op` is a leaf, `cpu_self` one with others inside.
    "kernels": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("stream", pa.int64()),
            ("name", pa.string()),
            ("category", pa.string()),
            ("segment", pa.string()),
            ("layer", pa.int32()),
            ("start_ns", pa.int64()),
            ("dur_ns", pa.int64()),
            ("bytes", pa.int64()),
            ("flops", pa.int64()),
        ]
    ),
    # Tokens and payload bytes of one all-to-all of an instrumented step, once a (arm, cell, step of a repeat) as gates
    # are. `direction` "dispatch": tokens go from `source` to the rank that has their expert; "combine": results go
    # back, and `source` is the rank that computed them. A rank writes the rows of which it is the source, those of no
    # token too. `bytes` is tokens · d · itemsize; where `source` is `destination` they are what a local copy would be,
    # and are not sent.
    "dispatch": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("layer", pa.int32()),
            ("direction", pa.string()),
            ("source", pa.int32()),
            ("destination", pa.int32()),
            ("tokens", pa.int64()),
            ("bytes", pa.int64()),
        ]
    ),
    # When a rank was in a collective of an instrumented step, and for how long; every such step. `operation`:
    # "counts", "dispatch", "combine", and under replicated attention "gather", which gives every rank every row's
    # result. `start_ns` is of the rank's own monotonic clock. The same time is segment `exchange`.
    "collectives": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("layer", pa.int32()),
            ("operation", pa.string()),
            ("start_ns", pa.int64()),
            ("dur_ns", pa.int64()),
        ]
    ),
    # Tokens that entered an expert on the rank that computed them, once a (arm, cell, step of a repeat) as gates are.
    # `flops` are weighted: 6 · d · width · tokens. Experts without a token have no row.
    "loads": pa.schema(
        [
            *_KEY,
            ("cell", pa.string()),
            ("layer", pa.int32()),
            ("group", pa.int32()),
            ("expert", pa.int32()),
            ("tokens", pa.int64()),
            ("flops", pa.int64()),
        ]
    ),
    # Time of the products of one width's experts in an instrumented step, every such step; part of segment `experts`.
    # Where experts do not run width by width, it is all of theirs, under the width they run at: see `times_note`.
    "expert_times": pa.schema(
        [*_KEY, ("cell", pa.string()), ("layer", pa.int32()), ("width", pa.int32()), ("ns", pa.int64())]
    ),
    # Which rank has which copy of which expert: of the tokens an expert gets, a copy computes number `turn`,
    # `turn + every`, ... Written once an arm: the placement in force, which the manifest names, and others to compare.
    # Of one process none is in force, and all are to compare, on `compared_on` ranks.
    "placements": pa.schema(
        [
            ("arm", pa.string()),
            ("placement", pa.string()),
            ("layer", pa.int32()),
            ("expert", pa.int32()),
            ("rank", pa.int32()),
            ("turn", pa.int32()),
            ("every", pa.int32()),
        ]
    ),
    "telemetry": pa.schema(
        [
            ("time_ns", pa.int64()),
            ("device", pa.string()),
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("unit", pa.string()),
        ]
    ),
    # The prompts of a run: `text` is null where the spec's privacy section says so. `mean_token_rank`: mean of the
    # prompt's token ids. A trained BPE vocabulary is numbered in the order its merges were learnt, the most frequent
    # first, so an id ranks its token by frequency; an id of the byte tokenizer ranks nothing.
    "prompts": pa.schema(
        [
            ("cell", pa.string()),
            ("request", pa.string()),
            ("domain", pa.string()),
            ("tokens", pa.int32()),
            ("mean_token_rank", pa.float64()),
            ("text", pa.string()),
        ]
    ),
    # One row a held-out item and arm: Σ −log p of its `tokens` continuation tokens, in nats. `prefix_tokens` come
    # before them and are not scored. `mode` is one of `QUALITY_MODES`.
    "scores": pa.schema(
        [
            ("arm", pa.string()),
            ("task", pa.string()),
            ("item", pa.string()),
            ("domain", pa.string()),
            ("mode", pa.string()),
            ("nll", pa.float64()),
            ("tokens", pa.int32()),
            ("prefix_tokens", pa.int32()),
        ]
    ),
    # The tokens of the held-out inputs, once for all arms. `occurrences`: how often the token is in all of them.
    # Both null where the spec keeps no text, since either would tell it.
    "tokens": pa.schema(
        [
            ("cell", pa.string()),
            ("request", pa.string()),
            ("position", pa.int32()),
            ("token", pa.int32()),
            ("occurrences", pa.int32()),
        ]
    ),
    # One row a scored token and arm, at the `position` of the row that predicts it, whose gates its prediction owes
    # itself to: the token is at `position` + 1. `nll` in nats; `hit`: no other token was likelier; `reference`: it
    # belongs to an answer the prompt's author gave, not to the prompt's own second half.
    "token_scores": pa.schema(
        [
            ("arm", pa.string()),
            ("cell", pa.string()),
            ("request", pa.string()),
            ("position", pa.int32()),
            ("nll", pa.float32()),
            ("hit", pa.bool_()),
            ("reference", pa.bool_()),
        ]
    ),
    # One row an item's choice: Σ −log p of its tokens after the prompt, in nats. `right`: it is the reference.
    "choice_scores": pa.schema(
        [
            ("arm", pa.string()),
            ("item", pa.string()),
            ("domain", pa.string()),
            ("mode", pa.string()),
            ("choice", pa.int16()),
            ("right", pa.bool_()),
            ("nll", pa.float64()),
            ("tokens", pa.int64()),
        ]
    ),
    # `scores` and `choice_scores` summed, by domain and over all (`domain` "all"). Perplexity is exp(Σ nll ÷ Σ tokens),
    # `denominator` Σ tokens; accuracy is the share of items whose reference is the likeliest choice a token,
    # `denominator` the items.
    "quality": pa.schema(
        [
            ("arm", pa.string()),
            ("task", pa.string()),
            ("domain", pa.string()),
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("denominator", pa.int64()),
            ("mode", pa.string()),
        ]
    ),
}

SIGNAL_KEY: list[tuple[str, pa.DataType]] = [
    *_KEY,
    ("cell", pa.string()),
    ("request", pa.string()),
    ("position", pa.int32()),
    ("layer", pa.int32()),
    ("site", pa.string()),
]


def signals_table(method: str) -> str:
    """Name of the table of a method's own columns."""
    return f"signals-{method}"


def signals_schema(columns: list[str]) -> pa.Schema:
    """Schema of a method's signals: the gates' key and one float32 column a signal."""
    return pa.schema([*SIGNAL_KEY, *((name, pa.float32()) for name in columns)])


class Record(BaseModel):
    """Base of what the manifest holds: a later format may add fields, and a reader keeps them."""

    model_config = ConfigDict(extra="allow")


class Choice(Record):
    """One alternative at one site of one layer, and what it costs when it runs.

    `layer` is -1 for what belongs to no layer. `backbone_parameters` are the pretrained model's;
    `replacement_parameters` stand in for them (an adapter); `overhead_parameters` come on top (LoRA,
    router, memory). FLOPs count a multiply-add as two. `flops_per_row` is per token row;
    `flops_per_context` per (row, attended position) pair, nonzero for attention only.
    `weight_bytes` are read by a step if any row takes this choice. `kv_bytes_per_row` is what the
    choice leaves in the cache for one token.
    """

    layer: int
    site: str
    index: int
    name: str
    segments: list[str] = Field(default_factory=list)
    backbone_parameters: int = 0
    replacement_parameters: int = 0
    overhead_parameters: int = 0
    flops_per_row: int = 0
    flops_per_context: int = 0
    weight_bytes: int = 0
    kv_bytes_per_row: int = 0


class CalibrationRecord(Record):
    """A threshold that was chosen so that a wanted share of decisions skips.

    `option` is the arm's option that asked for the share `wanted`; `achieved` is the one the threshold gives on the
    calibration prompts, over `decisions`. `held_out`: how many of the `prompts` are held-out items.
    """

    option: str
    wanted: float
    achieved: float
    threshold: float
    decisions: int
    prompts: int
    tokens: int
    rounds: int
    held_out: int


class ParallelRecord(Record):
    """Experts of an arm and the ranks that have them; an arm with experts has one in a single process too.

    `ranks`: how many there are. `placement` is the one in force, by its name in table `placements`. `attention`:
    `replicated`, where every rank runs the whole batch, or `data_parallel`, where each runs its own rows of it.
    `nodes`: the host of each rank. `widths_E`: width of each routed expert of a layer, in groups of `per_group`.
    `itemsize`: bytes an element of activations and weights. `fitted_on`: what placements that follow measured loads
    were fitted to, by their name; judged on the same steps, `fitted_steps`, they look better than they are. `notes`:
    what must be said beside a placement wherever it is shown, by its name. `compared_on`: of one process, the ranks
    that its placements are for. `times_note`: why table `expert_times` has no time of each width. `products`: how
    experts were multiplied, where that depends on the machine.
    """

    ranks: int
    placement: str
    attention: Literal["replicated", "data_parallel"] = "replicated"
    nodes: list[str] = Field(default_factory=list)
    widths_E: list[int] = Field(default_factory=list)
    per_group: int = 1
    hidden: int = 0
    itemsize: int = 0
    fitted_on: dict[str, str] = Field(default_factory=dict)
    fitted_steps: list[int] = Field(default_factory=list)
    notes: dict[str, str] = Field(default_factory=dict)
    compared_on: int | None = None
    times_note: str | None = None
    products: str | None = None


class MemoryRecord(Record):
    """What a method keeps of each token row while one forward lasts, beside the cache: its form, and at most how much.

    `bytes_per_row` is reached at the last layer that reads it.
    """

    form: str
    bytes_per_row: int


class ArmRecord(Record):
    """An arm as it ran: which method, with which options, against which twin, and what its choices cost.

    A site with one choice always runs; a site with several is where the router decides.
    `synthetic` is set where gates were forced rather than decided by a router. `discards`: every choice computes all
    rows and what was not chosen is thrown away, so nothing is saved, and rule 1 holds the arm to that. `signal_starts`
    holds, for a signal that starts the same for every input, its value in each layer before any training. `constants`:
    what the method has learned that is one number a layer, name → layer → value. `memory`: None where a method keeps
    nothing, or the run is older than this record. `caveat` is what else a reader must know of the arm wherever it is
    shown.
    """

    name: str
    method: str
    twin: str | None = None
    scope: Literal["none", "token", "sequence"] = "none"
    options: dict[str, Any] = Field(default_factory=dict)
    kv_policy: str | None = None
    synthetic: str | None = None
    untrained: bool = False
    discards: bool = False
    caveat: str | None = None
    signals: dict[str, str] = Field(default_factory=dict)
    signal_starts: dict[str, list[float]] = Field(default_factory=dict)
    constants: dict[str, dict[int, float]] = Field(default_factory=dict)
    calibration: CalibrationRecord | None = None
    parallel: ParallelRecord | None = None
    memory: MemoryRecord | None = None
    choices: list[Choice] = Field(default_factory=list)

    @property
    def by_token(self) -> bool:
        """Whether each token is decided about, rather than whole sequences or nothing."""
        return self.scope == "token"


class CellRecord(Record):
    """One cell of the sweep. `length` is the prompt length (prefill) or the context (decode), in tokens.

    `done` is set once every row of the cell is on disk. `stopped` says which rule ended it:
    `interval` (narrow enough), `repeats`, `budget` or `session` (a user's own loop).
    `warmup_s`: seconds of the budget that had gone when warm-up ended, with filling caches.
    `reference` says what a decode cell's inputs are. `counts`: rows of each table that were on disk when it was done.
    `outputs`: arm → SHA-256 of the likeliest next tokens of the whole batch after each step, by which runs of the same
    inputs can be seen to say the same.
    """

    name: str
    phase: Phase
    batch: int
    length: int
    new_tokens: int = 0
    repeats: int = 0
    done: bool = False
    stopped: str | None = None
    warmup_s: float | None = None
    reference: str | None = None
    counts: dict[str, int] = Field(default_factory=dict)
    outputs: dict[str, str] = Field(default_factory=dict)


class QualityRecord(Record):
    """The quality pass. `done` is set once its rows are on disk. `modes` are named as in table `scores`.

    `counts`: as a cell's.
    """

    items: int
    tokens: int
    modes: list[str]
    done: bool = False
    counts: dict[str, int] = Field(default_factory=dict)


class RuleRecord(Record):
    """The outcome of one of the rules a run enforces on itself. A figure that is not finite is written as null."""

    rule: int
    name: str
    arm: str | None = None
    cell: str | None = None
    passed: bool
    detail: str
    figures: dict[str, float | None] = Field(default_factory=dict)


class ModelRecord(Record):
    """The model under every arm. `random_weights` is shown wherever a result of it is."""

    source: str
    architecture: str
    parameters: int
    layers: int
    hidden: int
    dtype: str
    device: str
    device_name: str
    random_weights: bool
    weights_sha256: str | None = None


class RankRecord(Record):
    """One process of a run of several: where it ran, and the threads of one of its operators."""

    rank: int
    pid: int
    host: str
    threads: int


class Unsupported(Record):
    """What this machine cannot measure, and why. Never written as 0."""

    metric: str
    reason: str


class Manifest(Record):
    """`manifest.json`: everything about a run that is not a row of a table.

    `ranks`: the processes that ran it, where there were several; `pid` and `host` are rank 0's. Under replicated
    attention what all ranks do alike is in the tables once, as rank 0's: also `rows` and `context` of the other ranks'
    steps are 0. `evaluates` names the run whose spec this one took up again to measure quality.
    """

    format: int = FORMAT
    name: str
    state: State = "running"
    state_detail: str | None = None
    created_utc: str
    resumed_utc: list[str] = Field(default_factory=list)
    finished_utc: str | None = None
    pid: int
    host: str
    spec_sha256: str | None = None
    origin: Literal["run", "session", "import"] = "run"
    versions: dict[str, str] = Field(default_factory=dict)
    git: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    ranks: list[RankRecord] = Field(default_factory=list)
    model: ModelRecord | None = None
    arms: list[ArmRecord] = Field(default_factory=list)
    cells: list[CellRecord] = Field(default_factory=list)
    quality: QualityRecord | None = None
    evaluates: str | None = None
    rules: list[RuleRecord] = Field(default_factory=list)
    contention: dict[str, Any] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    drops: dict[str, int] = Field(default_factory=dict)
    unsupported: list[Unsupported] = Field(default_factory=list)
    units: dict[str, str] = Field(
        default_factory=lambda: {"*_ns": "nanoseconds", "*_bytes": "bytes", "flops": "multiply-add = 2"}
    )
    keeps_text: bool = True

    def arm(self, name: str) -> ArmRecord:
        """The arm called `name`; KeyError if there is none."""
        return {arm.name: arm for arm in self.arms}[name]

    def cell(self, name: str) -> CellRecord:
        """The cell called `name`; KeyError if there is none."""
        return {cell.name: cell for cell in self.cells}[name]
