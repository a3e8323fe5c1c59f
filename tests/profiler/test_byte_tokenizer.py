import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, SIZE, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize(
    "text", ["", "a", "The capital of France is", " two  spaces\n\ttab ", "żółć 日本 🙂", "\x00\x7f"]
)
def test_ids_are_the_bytes_and_decode_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80).filter(lambda text: "<|" not in text))
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_byte_has_its_own_id(tokenizer):
    assert len(tokenizer) == SIZE == 259
    assert sorted(tokenizer.get_vocab().values()) == list(range(259))


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, PAD_ID)
    assert tokenizer("a<|eos|>").input_ids == [97, 257]
    assert tokenizer.decode([97, 257, 258], skip_special_tokens=True) == "a"


def test_ids_past_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([72, 151_000, 105]) == "Hi"


def test_a_batch_is_padded(tokenizer):
    batch = tokenizer(["abc", "a"], padding=True)
    assert batch.input_ids == [[97, 98, 99], [97, 258, 258]]
    assert batch.attention_mask == [[1, 1, 1], [1, 0, 0]]


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "user: hi\nassistant: "
