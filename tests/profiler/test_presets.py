import pytest
import torch

from profiler import models, packaged_model, presets
from profiler.packaged_model import PACKAGED
from profiler.presets import PRESETS


# Published counts, except tiny's, worked out by hand: embedding 259·64, six layers of attention 2·64·64 + 2·64·32,
# FFN 3·64·192 and two norms of 64, and the last norm's 64.
@pytest.mark.parametrize(
    ("name", "parameters", "tied"),
    [
        ("tiny", 312_320, True),
        ("smollm2-135m-random", 134_515_008, True),
        ("qwen2.5-0.5b", 494_032_768, True),
        ("llama-3.1-8b", 8_030_261_248, False),
        ("llama-2-7b", 6_738_415_616, False),
        ("llama-2-13b", 13_015_864_320, False),
        # Fifteen layers of attention 7,930,368, FFN 3·1024·6144 and two norms; embedding and head 1024·102,400 each.
        ("mohge-a3b", 611_817_984, False),
        # Embedding and head 259·64 each, the last norm's 64; four layers of q and o 64·64, k and v 64·32, two norms of
        # 64, a router 8·64, and 8 experts 3·64·96.
        ("mixtral-tiny", 674_752, False),
        # The same with experts 3·64·64, attention biases 64 + 2·32, a shared expert 3·64·64 and its gate 64.
        ("qwen2-moe-tiny", 528_064, False),
        # With experts 3·64·64 and two norms of 16 for queries and keys.
        ("qwen3-moe-tiny", 478_272, False),
        # With experts 3·64·96 and norms of 64 and 32.
        ("olmoe-tiny", 675_136, False),
        # Queries 64·32 + 32 + 32·96, keys and values 64·40 + 32 + 32·128, output 64·64; layer 0 dense, 3·64·96, the
        # other three with 8 experts and a shared one of 3·64·64.
        ("deepseek-v3-tiny", 449_216, False),
    ],
)
def test_parameters_on_the_meta_device(name, parameters, tied):
    model = models.skeleton(models.config(name))
    assert models.parameter_count(model) == parameters == PRESETS[name].parameters
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_every_preset_is_counted_above():
    (counted,) = [m.args[1] for m in test_parameters_on_the_meta_device.pytestmark]
    assert [row[0] for row in counted] == list(PRESETS)


@pytest.mark.parametrize(
    ("name", "head_dim", "q_rows", "k_rows", "theta"),
    [
        ("qwen2.5-0.5b", 64, 896, 128, 1_000_000.0),
        ("llama-3.1-8b", 128, 4096, 1024, 500_000.0),
        ("llama-2-13b", 128, 5120, 5120, 10_000.0),
        ("smollm2-135m-random", 64, 576, 192, 100_000.0),
    ],
)
def test_heads_and_rotary_base(name, head_dim, q_rows, k_rows, theta):
    config = models.config(name)
    attention = models.skeleton(config).model.layers[0].self_attn
    assert attention.head_dim == head_dim
    assert attention.q_proj.out_features == q_rows
    assert attention.k_proj.out_features == k_rows
    assert config.rope_parameters["rope_theta"] == theta


def test_only_qwen2_has_biases():
    biased = {
        n: any(k.endswith("bias") for k, _ in models.skeleton(models.config(n)).named_parameters()) for n in PRESETS
    }
    assert [name for name, has in biased.items() if has] == ["qwen2.5-0.5b", "qwen2-moe-tiny"]


def tensors(seed, dtype="float32"):
    return models.load("tiny", seed=seed, device="cpu", dtype=dtype).model.state_dict()


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = tensors(3), tensors(3), tensors(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    key = "model.layers.2.mlp.up_proj.weight"
    assert not torch.equal(first[key], other[key])


def test_weights_are_drawn_once_norms_are_one_and_the_head_is_tied():
    model = models.load("tiny", device="cpu").model
    assert model.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rotary_table_is_the_formula():
    """Built without storage first, so the table must have been computed afterwards."""
    rotary = models.load("tiny", device="cpu").model.model.rotary_emb
    assert torch.allclose(rotary.inv_freq, torch.tensor([10_000.0 ** (-2 * i / 16) for i in range(8)]))


def test_same_logits_as_transformers_own_constructor():
    """The model made without storage computes what one made the plain way computes with the same weights."""
    from transformers import LlamaForCausalLM

    made = models.load("tiny", device="cpu").model
    plain = LlamaForCausalLM(made.config).eval()
    plain.load_state_dict(made.state_dict())
    ids = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, plain(ids).logits)


def test_the_callers_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models.load("tiny", seed=9, device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_tiny_generates_within_its_tokenizer():
    loaded = models.load("tiny", device="cpu")
    ids = loaded.tokenizer("hello", return_tensors="pt")
    out = loaded.model.generate(**ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert out.shape == (1, 13)
    assert loaded.tokenizer.decode(out[0][:5]) == "hello"


def test_shape_of_a_packaged_model_is_that_of_the_model():
    """`config` answers from the preset until the model is fetched, so the two must not differ."""
    package = PACKAGED["smollm2-135m"]
    if packaged_model.cached(package) is None:
        pytest.skip("smollm2-135m is not in the cache")
    real, preset = models.config("smollm2-135m"), presets.preset_config(PRESETS[package.shape])
    for key in PRESETS[package.shape].settings:
        if key != "rms_norm_eps":
            assert getattr(real, key) == getattr(preset, key), key
    assert real.rms_norm_eps == pytest.approx(preset.rms_norm_eps, rel=1e-6)
