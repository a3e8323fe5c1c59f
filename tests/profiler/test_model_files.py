import hashlib
import json
import pickle
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from profiler import model_files, models, packaged_model
from profiler.errors import InputError
from profiler.packaged_model import PackagedModel


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny", device="cpu", seed=1)


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with model_files.quiet():
        tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


IDS = torch.arange(30).reshape(2, 15)


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


def test_a_saved_folder_opens_as_it_was(tiny, saved):
    loaded = models.load(str(saved), device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert not loaded.model.training
    assert loaded.tokenizer("abc").input_ids == [97, 98, 99]
    record = loaded.record
    assert (record.source, record.architecture, record.parameters) == (str(saved), "LlamaForCausalLM", 312_320)
    assert (record.layers, record.hidden, record.dtype, record.device) == (6, 64, "float32", "cpu")
    assert record.random_weights is False
    assert record.weights_sha256 == model_files.fingerprint(saved)
    assert record.model_dump()["weights_digest"] == "sampled"


def test_dtype_and_attention_are_those_asked_for(saved):
    loaded = models.load(str(saved), dtype="bfloat16", attention="eager", device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.record.dtype == "bfloat16"


def test_shards_open_too(tiny, tmp_path):
    with model_files.quiet():
        tiny.model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = models.load(str(tmp_path), device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert loaded.tokenizer is None


def test_opening_prints_nothing(saved, capfd):
    models.load(str(saved), device="cpu")
    models.load("tiny", device="cpu")
    assert capfd.readouterr() == ("", "")


def test_terminal_settings_of_transformers_come_back():
    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        with model_files.quiet():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_folder_of_pickles_is_refused_unread(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(InputError, match=rf"weights are pickles \({name}\), which run code.*save_pretrained"):
        models.load(str(folder), device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_beside_safetensors_is_not_read(folder, tiny, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    assert torch.equal(logits(models.load(str(folder), device="cpu").model), logits(tiny.model))
    assert not (tmp_path / "ran").exists()


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "safetensors but no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
        (lambda f: edit_config(f, model_type="nope"), "model type `nope`"),
        (lambda f: edit_config(f, model_type="t5"), "t5 is not a plain causal language model"),
        (lambda f: edit_config(f, quantization_config={"quant_method": "gptq", "bits": 4}), r"quantised \(gptq\)"),
        (lambda f: edit_config(f, intermediate_size=200), "weights cannot be opened"),
        (truncate, "weights cannot be opened"),
        (drop_a_tensor, r"lacks 1 weights .*\(model.layers.3.mlp.up_proj.weight\)"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors or \*.gguf in it \(it holds .*config.json"),
        (lambda f: [p.unlink() for p in f.iterdir()], "it holds nothing"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_a_sentence(folder, damage, said):
    damage(folder)
    with pytest.raises(InputError, match=said) as caught:
        models.load(str(folder), device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_in_a_repository_is_not_run(folder, tmp_path):
    (folder / "modeling_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    auto = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.C"}
    edit_config(folder, auto_map=auto, model_type="mystery")
    with pytest.raises(InputError, match="contains custom code"):
        models.load(str(folder), device="cpu")
    edit_config(folder, model_type="llama")
    assert models.load(str(folder), device="cpu").record.architecture == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_fingerprint_is_of_the_weights(folder, saved):
    before = model_files.fingerprint(folder)
    assert before == model_files.fingerprint(saved)
    (folder / "tokenizer.json").unlink()
    assert model_files.fingerprint(folder) == before
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.5.mlp.down_proj.weight"] += 1e-6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_files.fingerprint(folder) != before


def write_gguf(path, model, tokenizer):
    """The model as llama.cpp's converter lays it out: own tensor names, and query and key rows interleaved."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    tokens[258] = "zq"  # the format has no empty list of merges, so one is made
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["z q"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

    def interleaved(weight, heads):
        rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return rows.swapaxes(1, 2).reshape(weight.shape)

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"].numpy()
            if ours == "attn_q":
                weight = interleaved(weight, config.num_attention_heads)
            if ours == "attn_k":
                weight = interleaved(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(weight))
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny.model, tiny.tokenizer)
    return path


@pytest.mark.parametrize("as_file", [True, False])
def test_gguf_opens_by_file_or_folder(gguf_file, tiny, as_file, capfd):
    loaded = models.load(str(gguf_file if as_file else gguf_file.parent), device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model), rtol=1e-5, atol=1e-5)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.record.parameters == 312_320
    assert loaded.record.weights_sha256 == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert loaded.tokenizer("abc é").input_ids == list("abc é".encode())
    assert loaded.tokenizer("zq").input_ids == [258]
    assert {t.device.type for t in [*loaded.model.parameters(), *loaded.model.buffers()]} == {"cpu"}
    assert capfd.readouterr() == ("", "")


def test_several_ggufs_need_a_choice(gguf_file, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, tmp_path / name)
    with pytest.raises(InputError, match=r"2 GGUF files \(a.gguf, b.gguf\); name one"):
        models.load(str(tmp_path), device="cpu")


def test_a_damaged_gguf_is_a_sentence(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(InputError, match="a.gguf"):
        models.load(str(tmp_path), device="cpu")


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(InputError, match="a file must be .gguf"):
        models.load(str(tmp_path / "a.bin"), device="cpu")


def converted(gguf_file, parameters) -> PackagedModel:
    return PackagedModel("fake", "fake", "1", "", gguf_file.name, "", "test", parameters, 0, 0, "a fake", "tiny")


def test_conversion_of_a_packaged_model_gives_an_ordinary_folder(gguf_file, tiny, tmp_path):
    packaged_model.convert(converted(gguf_file, 312_320), gguf_file, tmp_path)
    loaded = models.load(str(tmp_path), device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model), rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer.decode(loaded.tokenizer("round trip").input_ids) == "round trip"
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_conversion_counts_the_parameters(gguf_file, tmp_path):
    with pytest.raises(InputError, match="holds 312,320 parameters, not 7"):
        packaged_model.convert(converted(gguf_file, 7), gguf_file, tmp_path)


def test_how_far_a_gguf_is_opened_is_told_from_its_first_reading_on(gguf_file, capfd):
    import gguf as library
    from transformers import modeling_gguf_pytorch_utils as reader

    before = library.GGUFReader.__init__, reader.tqdm
    shares: list[float] = []
    model_files.open_gguf(gguf_file, "float32", share=shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2  # the config
    assert 0.9 < shares[-1] <= 1  # the tokenizer, after all tensors
    assert len(shares) > 10
    assert (library.GGUFReader.__init__, reader.tqdm) == before
    assert capfd.readouterr().err == ""
