"""Conversion of GGUF files: every weight and token as the file defines it, in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from mlx_server import config
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.gguf import WeightFormat, conversion, convert_gguf, native_weight_format
from tests.gguf_files import NUM_HEADS, NUM_KV_HEADS, SPECIALS, vocabulary, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


def convert(source: Path, folder: Path, weight_format: WeightFormat) -> Path:
    folder.mkdir(exist_ok=True)
    convert_gguf(source, folder, weight_format)
    return folder


def unpacked_weights(folder: Path) -> dict[str, np.ndarray]:
    """The folder's weights in float32, as any reader of the format understands them."""
    weights: dict[str, Any] = mx.load(str(folder / "model.safetensors"))
    quantization = json.loads((folder / "config.json").read_text()).get("quantization", {})
    values = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if weight.dtype == mx.uint32:
            scales, biases = (weights[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = quantization.get(module, quantization)["bits"]
            weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
        values[name] = np.array(weight.astype(mx.float32))
    return values


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_every_weight_keeps_the_value_that_the_file_gives_it(tiny, tmp_path, weight_format):
    source, worth = tiny
    weights = unpacked_weights(convert(source, tmp_path / "model", weight_format))
    assert weights.keys() == worth.keys()
    for name, expected in worth.items():
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


def test_packed_weights_stay_packed(tiny, tmp_path):
    folder = convert(tiny[0], tmp_path / "model", WeightFormat.PACKED)
    weights = mx.load(str(folder / "model.safetensors"))
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    assert {str(w.dtype) for w in weights.values()} == {"mlx.core.uint32", "mlx.core.float16"}
    assert json.loads((folder / "config.json").read_text())["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }


def test_the_configuration_is_the_files_own(tiny, tmp_path):
    converted = json.loads((convert(tiny[0], tmp_path / "model", WeightFormat.FLOAT32) / "config.json").read_text())
    assert converted["model_type"] == "llama"
    assert (converted["num_attention_heads"], converted["num_key_value_heads"]) == (NUM_HEADS, NUM_KV_HEADS)
    assert (converted["rms_norm_eps"], converted["rope_theta"]) == (1e-5, 10000.0)
    assert converted["max_position_embeddings"] == 256
    assert converted["eos_token_id"] == [2, 0]
    assert converted["tie_word_embeddings"] is True


def test_the_tokenizer_merges_within_words_but_never_digits(tiny, tmp_path):
    _, tokenizer = mlx_lm.load(str(convert(tiny[0], tmp_path / "model", WeightFormat.FLOAT32)), lazy=True)
    ids = {token: token_id for token_id, token in enumerate(vocabulary())}
    assert tokenizer.encode("hello w12") == [ids["hello"], ids["Ġw"], ids["1"], ids["2"]]
    assert tokenizer.eos_token_ids == {2, 0}
    assert tokenizer.encode("<|im_end|>") == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "falcon"}, "'falcon'; supported are llama, qwen2.*mlx-community"),
        ({"architecture": "clip"}, r"the image part of a model \(mmproj\)"),
        ({"pre": "of another kind"}, "split by of another kind"),
        ({"extra": "blk.0.attn_q_norm.weight"}, "blk.0.attn_q_norm"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, options, words):
    write_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ModelLoadError, match=words):
        convert(tmp_path / "odd.gguf", tmp_path / "model", WeightFormat.PACKED)


def test_what_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("not at all")
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path / "model", WeightFormat.PACKED)


def write_facts(path: Path, arrays: dict[str, list[Any]], order: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    writer = GGUFWriter(str(path), "llama", endianess=order)
    writer.add_uint32("first", 7)
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_is_what_the_package_reads(tmp_path: Path) -> None:
    arrays: dict[str, list[Any]] = {"words": ["a", "", "Ġé"], "ids": [3, -1], "scores": [0.5, 1.5], "n": [[1, 2], [3]]}
    arrays["flags"] = [True, False]
    path = write_facts(tmp_path / "facts.gguf", arrays)
    fields = conversion._Reader(path).fields
    read = {name: field.contents() for name, field in fields.items()}
    assert read == {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    assert {name: read[name] for name in arrays} == arrays | {"n": [1, 2, 3]}
    assert read["first"] == 7
    assert len(fields["ids"].parts) == 3 + 1, "all numbers are read at once"


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    """The package swaps the bytes of numbers, but not of the scales of quantised blocks."""
    path = write_facts(tmp_path / "facts.gguf", {"ids": [3, -1]}, GGUFEndian.BIG)
    with pytest.raises(ModelLoadError, match="only little-endian files are read; `gguf-convert-endian FILE little`"):
        convert(path, tmp_path / "model", WeightFormat.PACKED)


@pytest.mark.parametrize("count", [4, 1 << 60])
@pytest.mark.parametrize("values", [[1, 2, 3], [True] * 3, ["a", "b", "c"], [[1], [2], [3]]], ids=str)
def test_an_array_that_ends_after_the_file_is_refused(values: list[Any], count: int, tmp_path: Path) -> None:
    path = write_facts(tmp_path / "facts.gguf", {"last": values})
    content = bytearray(path.read_bytes())
    place = content.index(b"last") + 4 + 4 + 4
    assert content[place : place + 8] == (3).to_bytes(8, "little")
    path.write_bytes(content[:place] + count.to_bytes(8, "little") + content[place + 8 :])
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        convert(path, tmp_path / "model", WeightFormat.PACKED)


def test_texts_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = write_facts(tmp_path / "facts.gguf", {"last": ["ab", "é"]})
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xfe")
    with pytest.raises(ModelLoadError, match="not a readable GGUF file: 'utf-8' codec can't decode"):
        convert(path, tmp_path / "model", WeightFormat.PACKED)


def test_a_string_of_an_array_ends_within_the_file(tmp_path: Path) -> None:
    path = write_facts(tmp_path / "facts.gguf", {"last": ["a", "b", "long"]})
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ModelLoadError, match="an array of 3 elements ends 2 bytes after the file"):
        convert(path, tmp_path / "model", WeightFormat.PACKED)


@pytest.mark.parametrize("within", ["tokens", "token_type"])
def test_a_file_that_ends_within_an_array_is_refused(within: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: content.index(b"tokenizer.ggml." + within.encode()) + 150])
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path / "model", WeightFormat.PACKED)


@pytest.fixture(scope="module")
def bundled_gguf(bundled_model: Path) -> Path:
    return config.home() / "downloads" / SMOLLM2.file_name


@pytest.mark.slow
def test_the_bundled_model_loses_nothing_in_either_format(bundled_model, bundled_gguf, tmp_path):
    packed = unpacked_weights(convert(bundled_gguf, tmp_path / "packed", WeightFormat.PACKED))
    native = unpacked_weights(bundled_model)
    tensors = GGUFReader(bundled_gguf).tensors
    assert len(tensors) == len(packed) == len(native)
    for tensor in tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        num_heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if num_heads is not None:
            expected = in_halves(expected, num_heads)
        np.testing.assert_array_equal(packed[mlx_name(tensor.name)], expected, err_msg=tensor.name)
        np.testing.assert_array_equal(native[mlx_name(tensor.name)], expected, err_msg=tensor.name)


def in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head of 64 in order, which the file stores as 0, 32, 1, 33, ..."""
    stored = rows.reshape(num_heads, 64, -1)
    ordered = np.empty_like(stored)
    ordered[:, [half * 32 + i for i in range(32) for half in (0, 1)]] = stored
    return ordered.reshape(rows.shape)


def mlx_name(gguf_name: str) -> str:
    """The name that mlx-lm's own Llama loader expects, written out once more."""
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    *block, part, kind = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}." if block else "model."
    family, _, role = part.partition("_")
    module = names.get(part) or f"{'self_attn' if family == 'attn' else 'mlp'}.{role}_proj"
    return f"{prefix}{module}.{kind}"


@pytest.mark.slow
def test_the_bundled_model_knows_the_capital_of_france(bundled_model):
    model, tokenizer = mlx_lm.load(str(bundled_model))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."
    continued = mlx_lm.generate(model, tokenizer, tokenizer.encode("The capital of France is"), max_tokens=4)
    assert "Paris" in continued


@pytest.mark.slow
def test_the_bundled_tokenizer_is_the_models_own(bundled_model):
    _, tokenizer = mlx_lm.load(str(bundled_model), lazy=True)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    for text in (
        "  def f(x):\n\treturn x**2  # ok\n",
        "naïve café, 東京 🙂 Ünïcödé",
        "in 1984, it's 3.14159",
        " \n\n  ",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(SPECIALS) <= set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())


@pytest.mark.parametrize(
    ("device", "has_metal", "has_library", "wanted"),
    [
        (mx.cpu, True, False, WeightFormat.FLOAT32),
        (mx.cpu, False, True, WeightFormat.PACKED),
        (mx.gpu, True, False, WeightFormat.PACKED),
        (mx.gpu, False, False, WeightFormat.FLOAT32),
    ],
)
def test_weights_suit_the_device_in_use(
    device: mx.DeviceType, has_metal: bool, has_library: bool, wanted: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without the native library wants them expanded, a Mac's, too."""
    monkeypatch.setattr(native, "library", lambda: object() if has_library else None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    assert native_weight_format() is wanted
