"""What a small language model is trained from scratch on: text, a vocabulary of its own, and a folder to start from.

    python -m profiler.small_lm runs/small-lm
    python -m profiler train mohge-small --out runs/mohge-small

`DIR` then holds `python.jsonl`, functions and classes of this interpreter's standard library, read here and now and
never stored in the project; `model/`, a decoder of 4 layers of width 128 with random weights, and beside it a
byte-level BPE vocabulary learnt from that text and from generated problems and calls; and `facts.json`, what it was
made of. Everything follows from the interpreter's version and the seed.

Not here: training (`train`), and which method makes what of the decoder: its dense halves are as narrow as can be,
since experts are to stand in for them.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import InputError
from workloads.generated import KINDS, generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT, MODEL, FACTS = "python.jsonl", "model", "facts.json"
VOCABULARY, SEED = 2048, 0
#: Pieces of the library that are kept, and the characters one must have to teach anything, and may have.
PIECES, SHORTEST, LONGEST = 4000, 120, 1200
#: Generated items of each kind that the vocabulary is learnt from.
GENERATED = 2000
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
#: Packages of the library that are tests, data or somebody else's.
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}


def library() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def pieces_under(root: Path) -> Iterator[tuple[str, str]]:
    """(place, source) of top-level functions and classes under `root`, cut to `LONGEST` characters.

    File by file, those first whose places hash lowest, so that the first few are a mixture.
    """
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for place in sorted(files, key=lambda place: hashlib.sha256(place.encode()).digest()):
        path = files[place]
        if _LEFT_OUT.intersection(Path(place).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            found = ast.parse(source).body
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in found:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_source_segment(source, node) or ""
                if len(text) >= SHORTEST:
                    yield f"{place}:{node.lineno}", text[:LONGEST]


def pieces(count: int, root: Path) -> list[tuple[str, str]]:
    """The first `count` pieces under `root`.

    Raises:
        InputError: there is nothing to read, or there are fewer.
    """
    found = list(itertools.islice(pieces_under(root), count))
    if len(found) < count:
        raise InputError(f"{root}: {count:,} functions and classes are needed, and {len(found):,} were found")
    return found


def vocabulary(texts: list[str], size: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """A byte-level BPE vocabulary of `size` learnt from `texts`: every text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def make(folder: Path) -> None:
    """Write everything into `folder`.

    Raises:
        InputError: the folder is not empty, or there is no library to read.
    """
    import torch
    from transformers import AutoConfig

    from profiler.presets import random_model

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: the folder is not empty")
    texts = pieces(PIECES, library())
    made = [f"{p.text}\n{p.reference}" for kind in KINDS for p in generate(kind, GENERATED, SEED)]
    tokenizer = vocabulary([text for _, text in texts] + made)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = random_model(config, dtype=torch.float32, device=torch.device("cpu"), seed=SEED, attention="sdpa")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    lines = [json.dumps({"id": place, "domain": "python", "prompt": text}) for place, text in texts]
    (folder / TEXT).write_text("\n".join([*lines, ""]), encoding="utf-8")
    (folder / FACTS).write_text(json.dumps(_facts(texts), indent=1) + "\n", encoding="utf-8")


def _facts(texts: list[tuple[str, str]]) -> dict[str, Any]:
    digest = hashlib.sha256("\0".join(text for _, text in texts).encode()).hexdigest()
    return {
        "python": sys.version.split()[0],
        "pieces": len(texts),
        "characters": sum(len(text) for _, text in texts),
        "sha256": digest,
        "vocabulary": VOCABULARY,
        "seed": SEED,
    }


def main(arguments: list[str]) -> int:
    """`python -m profiler.small_lm DIR`."""
    if len(arguments) != 1:
        print("usage: python -m profiler.small_lm DIR", file=sys.stderr)
        return 2
    try:
        make(Path(arguments[0]))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {arguments[0]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
