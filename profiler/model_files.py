"""Opening a folder of model files: safetensors, or one GGUF file dequantised to floats. Never a pickle.

`*.bin`, `*.pt` and `*.pth` weights are Python pickles, which run code when they are read, so a folder that has
only those is refused, and `trust_remote_code` is always off. Weights that the checkpoint lacks are an error
too: transformers would fill them at random and go on.

Not here: where a folder comes from (`packaged_model`, `hub`), quantised arithmetic, and which device the model
ends up on (`models`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler import gguf_progress
from profiler.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Weights in these formats are pickles.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
#: Bytes of each tensor that go into `fingerprint`, from its start and from its end.
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Opened:
    """A model in eval mode on the CPU, and its tokenizer where the files hold one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars, log lines and warnings off the terminal for the block."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def weights_file(path: Path) -> Path | None:
    """The GGUF file that `path` means, or None where it is a folder of safetensors.

    Args:
        path: a GGUF file, or a folder with `config.json` and safetensors or with exactly one GGUF file.

    Raises:
        InputError: there is nothing of the kind, only pickles, or more than one GGUF file.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise InputError(f"model source {path}: a file must be .gguf; for safetensors give the folder it is in")
    held = sorted(p.name for p in path.iterdir() if p.is_file())
    if any(name.endswith(".safetensors") for name in held):
        if "config.json" not in held:
            raise InputError(f"model source {path}: it has safetensors but no config.json to say what they are")
        return None
    ggufs = [name for name in held if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return path / ggufs[0]
    if ggufs:
        raise InputError(
            f"model source {path}: it holds {len(ggufs)} GGUF files ({', '.join(ggufs)}); name one of them"
        )
    if pickles := [name for name in held if name.endswith(PICKLES)]:
        raise InputError(
            f"model source {path}: its weights are pickles ({', '.join(pickles)}), which run code when read; "
            "only safetensors and GGUF are read. Save the model again with save_pretrained."
        )
    raise InputError(f"model source {path}: no *.safetensors or *.gguf in it (it holds {', '.join(held) or 'nothing'})")


def read_config(path: Path) -> PreTrainedConfig:
    """The config of the model at `path` (a folder, or a GGUF file), without its weights.

    Reading it out of a GGUF file takes seconds: its tokenizer is parsed on the way.

    Raises:
        InputError: it is not a causal language model's that transformers knows, or it is quantised.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **where
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model source {path}: {_sentence(error)}") from error
    # A vision or audio model's config has the sizes in a text part inside it.
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "num_hidden_layers"):
        raise InputError(
            f"model source {path}: {config.model_type} is not a plain causal language model to transformers"
        )
    if (quantised := getattr(config, "quantization_config", None)) and not where:
        method = dict(quantised).get("quant_method", "an unnamed method")
        raise InputError(f"model source {path}: its weights are quantised ({method}); only float weights are profiled")
    return config


def open_folder(path: Path, dtype: str, attention: str = "sdpa") -> Opened:
    """Open safetensors from a folder; they are mapped, not read, so this takes well under a second.

    Args:
        path: a folder that `weights_file` says None of.
        dtype: torch's name of the dtype the weights get.
        attention: transformers' attention implementation.

    Raises:
        InputError: a file is damaged, a weight is missing or has another shape than the config says.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            result: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"model source {path}: its weights cannot be opened: {_sentence(error)}") from error
    model, info = result
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"model source {path}: the checkpoint lacks {len(missing)} weights that its config asks for "
            f"({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''})"
        )
    return Opened(
        model.eval(), _tokenizer(path, {}) if any((path / name).exists() for name in TOKENIZER_FILES) else None
    )


def open_gguf(
    path: Path, dtype: str, attention: str = "sdpa", share: Callable[[float], None] = lambda _: None
) -> Opened:
    """Dequantise a GGUF file to floats; the result is an ordinary model that can be saved.

    transformers leaves a mark of the quantisation on what it reads from GGUF and then refuses to save it, so
    the tensors are handed to a fresh model of the same config. Takes about 20 s for 135 M parameters; `share` is told
    how far that is.

    Raises:
        InputError: the file is damaged or of an architecture that transformers cannot read from GGUF.
    """
    with gguf_progress.telling(path, share):
        return _dequantised(path, dtype, attention)


def _dequantised(path: Path, dtype: str, attention: str) -> Opened:
    import torch
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": path.name}
    try:
        with quiet():
            read = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False, **where
            )
    except (OSError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise InputError(f"model source {path}: it cannot be read as GGUF: {_sentence(error)}") from error
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet(), torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    fresh.load_state_dict(read.state_dict(), assign=True)
    fresh.tie_weights()
    for name, buffer in read.named_buffers():  # rotary tables: not in the state dict, and computed by now
        owner, _, leaf = name.rpartition(".")
        setattr(fresh.get_submodule(owner), leaf, buffer)
    fresh.generation_config = read.generation_config
    return Opened(fresh.eval(), _tokenizer(path.parent, where))


def _tokenizer(folder: Path, where: dict[str, str]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **where
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"model source {folder}: its tokenizer cannot be read: {_sentence(error)}") from error
    return tokenizer


def fingerprint(path: Path) -> str:
    """A sha256 that tells one set of weights from another, in milliseconds.

    A GGUF file is hashed whole. Of safetensors, each file's header (names, dtypes, shapes) goes in, and the
    first and last 4 KiB of every tensor: training changes a tensor all over, so that shows it, while a change
    of single numbers in the middle of a tensor would not show.
    """
    digest = hashlib.sha256()
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for part in sorted(path.glob("*.safetensors")):
        with open(part, "rb", buffering=0) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            digest.update(header)
            for name, tensor in json.loads(header).items():
                if name == "__metadata__":
                    continue
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                for at in (start, max(start, end - SAMPLE_BYTES)):
                    file.seek(at)
                    digest.update(file.read(min(SAMPLE_BYTES, end - at)))
    return digest.hexdigest()


def _sentence(error: BaseException) -> str:
    """The first line of a library's message; the rest is advice about its own options."""
    if isinstance(error, KeyError):
        return f"it lacks the key {error}"
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
