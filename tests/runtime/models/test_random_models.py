import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load as load_by_mlx_lm
from mlx_lm.utils import load_model
from tiny_models import (
    ARCHITECTURES,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    byte_tokenizer,
    reference_generate,
    save_model_folder,
    tiny_model,
)

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.loader import load
from mlx_server.runtime.models.random_models import build, build_random, config_of, is_random


def weights(model):
    return dict(tree_flatten(model.parameters()))


def num_parameters(model):
    return sum(array.size for array in weights(model).values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("random:mini", True), ("random:unheard", True), ("qwen3", False), ("./random:mini", False)],
)
def test_random_models_are_known_by_their_prefix(name, expected):
    assert is_random(name) is expected


def test_an_unknown_random_model_is_refused_with_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"random:big.*random:mini, random:qwen3-0\.6b"):
        build("random:big")


def test_mini_has_the_stated_shape():
    model, config = build("random:mini")
    assert config["max_position_embeddings"] == 32_768
    assert weights(model)["lm_head.weight"].shape == (16_384, 384)
    assert weights(model)["model.embed_tokens.weight"].shape == (16_384, 384)
    attention = model.layers[7].self_attn
    assert (attention.n_heads, attention.n_kv_heads) == (6, 2)
    assert attention.k_proj.weight.shape == (2 * 64, 384)
    assert model.layers[0].mlp.gate_proj.weight.shape == (1152, 384)
    assert len(model.layers) == 8
    assert {array.dtype for array in weights(model).values()} == {mx.float32}


def test_qwen3_has_the_size_of_the_real_one():
    config = config_of("random:qwen3-0.6b")
    per_layer = 1024 * 128 * (16 + 8 + 8) + 16 * 128 * 1024 + 3 * 1024 * 3072 + 2 * 128 + 2 * 1024
    expected = 151_936 * 1024 + 28 * per_layer + 1024
    assert expected == 596_049_920  # the published checkpoint
    one_layer = build_random({**config, "num_hidden_layers": 1, "vocab_size": 64}, seed=0)
    assert num_parameters(one_layer) == 64 * 1024 + per_layer + 1024
    assert config["num_hidden_layers"] == 28
    assert config["vocab_size"] == 151_936


def test_llama_3_has_the_size_of_the_real_one():
    config = config_of("random:llama-3-8b-4bit")
    per_layer = 4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    assert 2 * 128_256 * 4096 + 32 * per_layer + 4096 == 8_030_261_248  # the published checkpoint
    assert (config["num_hidden_layers"], config["vocab_size"]) == (32, 128_256)
    need = estimate_need(Config(model=ModelConfig(model="random:llama-3-8b-4bit", dtype="bfloat16")))
    assert need.weights_bytes == pytest.approx(8_030_261_248 * 4.5 / 8, rel=0.001)


def test_a_quantised_random_model_is_the_rounded_noise_in_its_type_and_takes_what_is_estimated(monkeypatch):
    name = "random:llama-3-8b-4bit"
    small = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    monkeypatch.setattr(random_models, "_SHAPES", {name: {**config_of(name), **small}})
    model, config = build(name)
    found = weights(model)
    assert {array.dtype for array in found.values()} == {mx.uint32, mx.bfloat16}
    projection = model.layers[1].mlp.up_proj
    assert projection.weight.shape == (512, 256 * 4 // 32)
    rows = mx.dequantize(projection.weight, projection.scales, projection.biases, group_size=64, bits=4)
    whole = build_random(config, seed=random_models._SEED).layers[1].mlp.up_proj.weight
    reach = 2 * 3**0.5 / 256**0.5
    assert float(mx.abs(rows - whole).max()) < 2.1 * reach / 15  # a step is 2 / 15
    assert len(set(reference_generate(model, list(range(50)), 30).token_ids)) > 10

    need = estimate_need(Config(model=ModelConfig(model=name)))
    assert need.weights_bytes == pytest.approx(load(name).weight_bytes, rel=0.01)


def test_the_same_seed_gives_the_same_weights_whatever_came_before():
    first = weights(tiny_model("gpt_oss", seed=3).model)
    mx.random.normal((7,))  # moves the global generator, which must not matter
    again = weights(tiny_model("gpt_oss", seed=3).model)
    other = weights(tiny_model("gpt_oss", seed=4).model)
    assert first.keys() == again.keys()
    for name, array in first.items():
        assert mx.array_equal(array, again[name]), name
        assert not mx.array_equal(array, other[name]), name


def test_mini_is_the_same_model_on_every_machine():
    """The noise is made of random bits by one scale and one shift, so these digits hold anywhere."""
    row = weights(build("random:mini")[0])["model.layers.3.self_attn.q_proj.weight"][5, :3]
    assert row.tolist() == pytest.approx([0.0648040771484375, -0.11295732855796814, -0.15064862370491028], rel=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_outputs_of_tiny_models_vary_and_have_no_ties(architecture):
    model, _ = tiny_model(architecture)
    prompt = [7 * i % VOCAB_SIZE for i in range(2 * SLIDING_WINDOW)]
    token_ids, logits = reference_generate(model, prompt, max_tokens=40)
    assert len(set(token_ids)) >= 15
    assert logits.shape == (40, VOCAB_SIZE)
    assert mx.argmax(logits, axis=-1).tolist() == token_ids
    best_two = mx.sort(logits, axis=-1)[:, -2:]
    assert (best_two[:, 1] - best_two[:, 0]).min().item() > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tiny_model_survives_its_folder(architecture, tmp_path):
    model, config = tiny_model(architecture)
    loaded, loaded_config = load_model(save_model_folder(model, config, tmp_path / architecture))
    prompt = list(range(50))
    assert loaded_config["model_type"] == architecture
    assert reference_generate(loaded, prompt, 8).token_ids == reference_generate(model, prompt, 8).token_ids


def test_the_byte_tokenizer_survives_its_folder_and_fits_the_vocabulary(tmp_path):
    model, config = tiny_model("llama")
    path = save_model_folder(model, config, tmp_path / "llama", byte_tokenizer())
    _, tokenizer = load_by_mlx_lm(str(path))
    ids = tokenizer.encode("héllo <|im_end|>")
    assert len(ids) == len("héllo ".encode()) + 1
    assert ids[-1] == config["eos_token_id"]
    assert set(tokenizer.eos_token_ids) == {config["eos_token_id"]}
    assert tokenizer.decode(ids) == "héllo <|im_end|>"
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
