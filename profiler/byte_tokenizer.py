"""A tokenizer of single bytes, made on the spot: what presets with random weights use.

Token ids 0-255 are the bytes of the text in UTF-8, so every text round-trips; three special tokens follow. It
lets everything run without a download. Ids past `SIZE` that a preset with a larger vocabulary may produce decode
to nothing.

Not here: any trained vocabulary. A prompt has three to five times the tokens it would have under one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
#: Number of token ids.
SIZE = 259

#: One line of "role: content" a message; a model with random weights has no format of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A fresh tokenizer; encoding adds no special token by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet writes printable Latin-1 bytes as themselves and the others as characters from 256
    # on, in the order of the bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(char) for char in alphabet if ord(char) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = dict(zip(alphabet, printable + others, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
