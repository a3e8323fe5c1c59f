"""Low-rank adapters on the attention projections of one model tree: peft's, put in place and taken out as files.

    W' = W + (alpha / rank)·B·A        A `[rank, in]`, B `[out, rank]`, on Q, K, V and O of every block

(Hu et al. 2021; LayerRoute §3.1.) `B` starts at zero, so a fresh adapter changes nothing. The adapters compute in
float32 at least, whatever the backbone's dtype (ours). The backbone's own tensors are neither copied nor changed.

The files are peft's (`adapter_config.json`, `adapter_model.safetensors`): `PeftModel.from_pretrained` loads them
elsewhere. Not here: which arm has adapters, and training them (methods, `train`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.errors import InputError
from profiler.execution.checkpoint_files import read_json, read_tensors
from profiler.execution.decoder import ADDED, ATTENTION_PARTS, BLOCK_PARTS, Decoder

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: peft's name for the adapter; with it the adapters' parameters count as added, not as the backbone's.
_ADAPTER = ADDED
#: What peft puts before a module's name in the files it writes.
_PREFIX = "base_model.model."


class LoraOptions(BaseModel):
    """Size of the adapters. `dropout` acts on their input, in training only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=8, ge=1, le=4096)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)


def add_adapters(dec: Decoder, options: LoraOptions) -> None:
    """Put adapters on `dec`'s attention projections, in place. The model keeps its class and its weights.

    `A` is drawn from a generator of its own (see `reset`), so the caller's random state is left as it was.
    """
    from peft import inject_adapter_in_model

    backbone = [(tensor, tensor.requires_grad) for tensor in dec.model.parameters()]
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(_peft_config(options), dec.model, adapter_name=_ADAPTER)
    for tensor, required in backbone:  # peft froze them, and other arms' trees hold the very same tensors
        tensor.requires_grad_(required)
    for projection in _projections(dec):
        wide = torch.promote_types(cast(nn.Linear, _base(projection)).weight.dtype, torch.float32)
        for half in _halves(projection):
            half.to(wide)
    dec.model.train(dec.model.training)  # new modules are made in training mode: their dropout would be on
    reset(dec, seed=0)


def remove_adapters(dec: Decoder) -> None:
    """Undo `add_adapters`."""
    for block in dec.blocks:
        attention = cast(nn.Module, block.self_attn)
        for part in ATTENTION_PARTS:
            setattr(attention, part, _base(getattr(attention, part)))
    del dec.model.peft_config


def reset(dec: Decoder, seed: int) -> None:
    """Start values: `A` uniform in ±1/√in (peft's), drawn on the host from `seed`; `B` zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for projection in _projections(dec):
            a, b = (half.weight for half in _halves(projection))
            if not a.is_meta:
                bound = a.shape[1] ** -0.5
                a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
            b.zero_()


def adapter_parameters(dec: Decoder) -> dict[str, nn.Parameter]:
    """The adapters' parameters by peft's names, layer by layer."""
    marks = (f".lora_A.{_ADAPTER}.", f".lora_B.{_ADAPTER}.")
    return {name: tensor for name, tensor in dec.model.named_parameters() if any(mark in name for mark in marks)}


def without_adapters(dec: Decoder) -> Decoder:
    """A view of `dec` whose blocks hold the backbone's modules only, for counting what the backbone costs."""
    return dataclasses.replace(dec, blocks=[_plain_block(block) for block in dec.blocks])


def adapter_shapes(block: nn.Module, rank: int, parts: Iterable[str] = ATTENTION_PARTS) -> list[tuple[int, int]]:
    """`(rank, in)` and `(out, rank)` of these projections of a block (with adapters or without)."""
    shapes = []
    for part in parts:
        linear = cast(nn.Linear, _base(cast(nn.Module, getattr(cast(nn.Module, block.self_attn), part))))
        shapes += [(rank, linear.in_features), (linear.out_features, rank)]
    return shapes


def merge_into(dec: Decoder, twin: Decoder) -> None:
    """Give `twin`, an unadapted tree over the same backbone, weights that include `dec`'s adapters.

    Tensors are replaced, never written into: `twin` shares the others with the backbone.
    """
    for mine, plain in zip(_projections(dec), _linears(twin), strict=True):
        delta = mine.get_delta_weight(_ADAPTER)
        merged = (plain.weight.to(delta.dtype) + delta).to(plain.weight.dtype)
        plain.weight = nn.Parameter(merged.detach(), requires_grad=False)


def save(dec: Decoder, options: LoraOptions, folder: Path, dtype: torch.dtype, base: str | None) -> None:
    """Write the adapters as peft does. `base` is the name of the model they belong to, for whoever loads them."""
    config = _peft_config(options)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    facts = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    facts["target_modules"] = sorted(facts["target_modules"])  # a set, so its order would change from run to run
    (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    found = {_file_name(name): tensor for name, tensor in adapter_parameters(dec).items()}
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in found.items()}
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_options(folder: Path, base: str | None) -> LoraOptions:
    """Size of the adapters saved in `folder`, which must be for the model named `base`, as the routers are.

    Raises:
        InputError: unreadable, for another base, or adapters of another kind than this module makes.
    """
    facts = read_json(folder, CONFIG_FILE)
    theirs = facts.get("base_model_name_or_path")
    if theirs != base:
        raise InputError(f"checkpoint {folder}: its adapters are for the model {theirs!r}, its routers for {base!r}")
    wanted = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
    for key, value in wanted.items():
        if facts.get(key, value) != value:
            raise InputError(f"checkpoint {folder}: its adapter's {key} is {facts[key]!r}; only {value!r} is supported")
    targets = facts.get("target_modules")
    if not isinstance(targets, list) or sorted(targets) != sorted(ATTENTION_PARTS):
        raise InputError(
            f"checkpoint {folder}: its adapter is for {targets!r}, this method's for {', '.join(ATTENTION_PARTS)}"
        )
    sizes = {"rank": facts.get("r"), "alpha": facts.get("lora_alpha"), "dropout": facts.get("lora_dropout", 0.0)}
    try:
        return LoraOptions.model_validate(sizes)
    except ValueError as error:
        raise InputError(f"checkpoint {folder}: {CONFIG_FILE}: {error}") from error


def restore(dec: Decoder, folder: Path) -> None:
    """Load what `save` wrote into `dec`, which has adapters already.

    Raises:
        InputError: unreadable, names or shapes of another base, or values that are not finite.
    """
    parameters = {_file_name(name): tensor for name, tensor in adapter_parameters(dec).items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = read_tensors(folder, WEIGHTS_FILE, shapes)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found[name])


def _peft_config(options: LoraOptions) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type] # peft says int and only divides by it
        lora_dropout=options.dropout,
        target_modules=list(ATTENTION_PARTS),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_ADAPTER}.", ".")


def _attention_parts(dec: Decoder) -> Iterator[nn.Module]:
    for block in dec.blocks:
        for part in ATTENTION_PARTS:
            yield cast(nn.Module, getattr(cast(nn.Module, block.self_attn), part))


def _projections(dec: Decoder) -> list[LoraLinear]:
    return [cast("LoraLinear", part) for part in _attention_parts(dec)]


def _halves(projection: LoraLinear) -> tuple[nn.Linear, nn.Linear]:
    """A and B."""
    return cast(nn.Linear, projection.lora_A[_ADAPTER]), cast(nn.Linear, projection.lora_B[_ADAPTER])


def _linears(dec: Decoder) -> list[nn.Linear]:
    return [cast(nn.Linear, part) for part in _attention_parts(dec)]


def _base(module: nn.Module) -> nn.Module:
    return cast(nn.Module, getattr(module, "base_layer", module))


def _plain_block(block: nn.Module) -> nn.Module:
    """A stand-in for a block that lists the backbone's modules; it is not run."""
    plain = nn.Module()
    for part in BLOCK_PARTS:
        plain.add_module(part, cast(nn.Module, getattr(block, part)))
    attention = cast(nn.Module, block.self_attn)
    stand_in = nn.Module()
    for name, child in attention.named_children():
        stand_in.add_module(name, _base(child))
    for name, tensor in attention.named_parameters(recurse=False):
        stand_in.register_parameter(name, tensor)
    plain.add_module("self_attn", stand_in)
    return plain


def sample(dec: Decoder, layers: int = 3, values: int = 16) -> Tensor:
    """A few weights that tell one backbone from another of the same shape: `[layers·values]`, float32, on the host.

    The first values of Q's weight in evenly spread layers, first and last included.
    """
    last = len(dec.blocks) - 1
    chosen = sorted({round(i * last / max(layers - 1, 1)) for i in range(layers)})
    rows = []
    for layer in chosen:
        query = _base(cast(nn.Module, cast(nn.Module, dec.blocks[layer].self_attn).q_proj))
        rows.append(cast(Tensor, query.weight).detach().flatten()[:values].float().cpu())
    return torch.cat(rows)
