"""From a model's name to its folder, and what is said when there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from mlx_server.errors import DownloadError, ModelLoadError, UnknownModelError
from mlx_server.runtime.models import resolve
from mlx_server.runtime.models.blueprint import model_classes
from mlx_server.runtime.models.folder import damaged_files, missing_parts, write_manifest
from mlx_server.runtime.models.gguf import WeightFormat
from mlx_server.runtime.models.resolve import resolve_model
from tests.conformance import Subject


def write_folder(folder: Path) -> Path:
    """The least that looks like a model from outside."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_complete_folder_is_itself(tmp_path):
    folder = write_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "name of the model is empty"),
        ("x" * 300, "File name too long"),
        ("a\0b", "There is no model a\0b"),
        ("a\0b.gguf", "There is no file a\0b.gguf"),
    ],
)
def test_a_name_that_is_no_path_is_refused(name, words):
    with pytest.raises(ModelLoadError, match=words):
        resolve_model(name)


def write_weights(path: Path, num_bytes: int) -> None:
    """A file of 16 bytes of weights, or its beginning."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes((len(header).to_bytes(8, "little") + header + bytes(16))[:num_bytes])


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (80, "lacks the rest of model.safetensors, of which 80 of 86 bytes are there (fetch it again)"),
        (40, "lacks readable weights in model.safetensors, which is broken"),
        (0, "lacks readable weights in model.safetensors, which is broken"),
    ],
)
def test_weights_that_were_cut_short_are_named(tmp_path, num_bytes, words):
    folder = write_folder(tmp_path / "model")
    write_weights(folder / "model.safetensors", 1000)
    assert resolve_model(str(folder)) == folder
    write_weights(folder / "model.safetensors", num_bytes)
    with pytest.raises(ModelLoadError, match=re.escape(words)):
        resolve_model(str(folder))


def test_a_folder_under_the_home_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_folder(tmp_path / "model")
    assert resolve_model("~/model") == folder


def test_the_bundled_name_is_pulled(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "pull_bundled", lambda *_, **__: tmp_path)
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "smollm2")
    assert resolve_model("smollm2") == tmp_path


@pytest.mark.parametrize(("dtype", "expected"), [("auto", None), ("bfloat16", None), ("float32", WeightFormat.FLOAT32)])
def test_the_bundled_model_is_expanded_for_float32_alone(dtype, expected, tmp_path, monkeypatch):
    formats = []
    monkeypatch.setattr(resolve, "pull_bundled", lambda weight_format: formats.append(weight_format) or tmp_path)
    monkeypatch.setattr(resolve.mx, "default_device", lambda: resolve.mx.cpu)
    resolve_model("smollm2", dtype)
    assert formats == [expected]


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("config.json", "lacks config.json"),
        ("model.safetensors", "lacks weights, model*.safetensors"),
        ("tokenizer.json", "lacks a tokenizer (tokenizer.json or tokenizer.model)"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path, removed, words):
    folder = write_folder(tmp_path / "model")
    (folder / removed).unlink()
    with pytest.raises(ModelLoadError, match=re.escape(words)) as caught:
        resolve_model(str(folder))
    assert str(folder) in str(caught.value)


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    assert len(missing_parts(tmp_path)) == 3


def test_weights_of_another_format_come_with_the_remedy(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert missing_parts(folder) == [
        "weights, model*.safetensors (it has pytorch_model.bin, which is not read because reading it may run code; "
        "look for the same model in safetensors, or load it with transformers and call save_pretrained)"
    ]


def test_a_folder_of_gguf_files_names_one_to_serve(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "model.Q4_K_M.gguf")
    (folder / "._model.Q4_K_M.gguf").write_bytes(b"what macOS keeps beside a file on exFAT")
    assert missing_parts(folder) == [
        f"weights, model*.safetensors (it has GGUF files: serve one of them, {folder / 'model.Q4_K_M.gguf'})"
    ]


def test_a_companion_file_of_macos_may_vanish(tmp_path):
    folder = write_folder(tmp_path)
    companion = folder / "._config.json"
    companion.write_bytes(b"attributes")
    write_manifest(folder)
    companion.unlink()
    assert damaged_files(folder) == []


def test_a_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / shards[0])
    index = {"weight_map": dict(zip("abc", [*shards, shards[0]]))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_parts(folder) == [f"the weights {shards[1]}"]
    write_weights(folder / shards[1], 1000)
    assert missing_parts(folder) == []


@pytest.mark.parametrize("index", ["no json", "[]", "{}"])
def test_an_unreadable_index_is_a_fault(tmp_path, index):
    (write_folder(tmp_path) / "model.safetensors.index.json").write_text(index)
    assert missing_parts(tmp_path) == ["the weights named by model.safetensors.index.json, which is unreadable"]


@pytest.mark.parametrize(
    ("described", "fault"),
    [
        ({"architectures": 5}, "a list as architectures"),
        ({"text_config": "small"}, "an object as text_config"),
        ({"rope_parameters": "default"}, "an object as rope_parameters"),
        ({"architectures": ["Eagle3LlamaForCausalLM"], "eagle_config": [1]}, "an object as eagle_config"),
        ({"transformer_layer_config": 2}, "an object as transformer_layer_config"),
        ({"transformer_layer_config": {"rope_parameters": [1]}}, "an object as rope_parameters"),
        ({"hidden_size": "64"}, "a number instead of '64' as hidden_size"),
        ({"dflash_config": {"target_layer_ids": [1, "x"]}}, "a number instead of [1, 'x'] as target_layer_ids"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "a number instead of 'x' as rope_theta"),
    ],
)
def test_values_of_other_types_in_a_configuration_are_faults(tmp_path, described, fault):
    (write_folder(tmp_path) / "config.json").write_text(json.dumps({"model_type": "llama", **described}))
    assert missing_parts(tmp_path) == [f"{fault} in config.json"]


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"model_type": 3}'])
def test_an_unreadable_configuration_is_a_fault(tmp_path, text):
    (write_folder(tmp_path) / "config.json").write_text(text)
    assert len(missing_parts(tmp_path)) == 1
    assert "config.json" in missing_parts(tmp_path)[0]


@pytest.mark.parametrize("name", ["smolm2", "/no/such/folder", "./nowhere", "a/b/c", "", "../up/there"])
def test_a_name_that_is_nothing_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["models/foo/bar.gguf", "./bar.gguf", "bar.gguf", "../bar.gguf", "/no/bar.gguf", "~/bar.gguf"]
)
def test_a_file_that_is_not_here_is_not_asked_of_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelLoadError, match=f"There is no file {re.escape(name)}"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"ONNX")
    with pytest.raises(ModelLoadError, match="is a file; a model is a folder"):
        resolve_model(str(tmp_path / "model.onnx"))


def test_what_ollama_calls_a_model_gets_a_hint():
    with pytest.raises(ModelLoadError, match=r"Ollama's: look for the model at https://huggingface.co/mlx-community"):
        resolve_model("llama3.2:1b")


def test_a_name_with_a_tag_asks_for_the_file():
    with pytest.raises(ModelLoadError, match=r"Name the GGUF file, as owner/name/FILE\.gguf: https://hug.*/tree/main"):
        resolve_model("hf.co/owner/name:Q4_K_M")


@pytest.mark.parametrize(
    ("kind", "words"),
    [("bert", "an encoder"), ("whisper", "speech"), ("clip", "images")],
)
def test_what_is_no_language_model_is_named_for_what_it_is(kind, words):
    with pytest.raises(ModelLoadError, match=f"a model of type {kind}: .*{words}"):
        model_classes({"model_type": kind})


def test_heads_in_mlx_vlms_form_are_no_model():
    words = "kind qwen3_5_mtp are not supported: .*own heads as its makers publish them .*--mtp-from"
    with pytest.raises(ModelLoadError, match=words):
        model_classes({"model_type": "qwen3_5_mtp"})


def test_weights_that_are_no_numbers_are_named():
    subject = Subject("llama")
    norm = subject.model.layers[0].input_layernorm
    norm.weight, kept = mx.full(norm.weight.shape, mx.nan), norm.weight
    mx.eval(norm.weight)
    try:
        with pytest.raises(ModelLoadError, match=r"logits are NaN.*model\.layers\.0\.input_layernorm\.weight holds"):
            subject.make_llm()
    finally:
        norm.weight = kept


@pytest.mark.parametrize(
    "name",
    ["owner/name", "https://huggingface.co/owner/name", "https://hf.co/owner/name/", "hf.co/owner/name"],
)
def test_a_hub_model_that_is_cached_needs_no_network(tmp_path, monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--owner--name"
    revision = "0" * 40
    folder = write_folder(repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    assert resolve_model(name) == folder


def test_a_hub_model_that_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=r"Cannot fetch owner/name from the hub.*HF_HUB_OFFLINE"):
        resolve_model("owner/name")


@pytest.mark.parametrize(
    ("kind", "words"), [(GatedRepoError, "accept it at"), (RepositoryNotFoundError, "hub has no model owner/name")]
)
def test_the_hubs_refusals_come_with_a_remedy(monkeypatch, kind, words):
    def refuse(*_: object, **__: object) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UnknownModelError, match=f"{words}.*HF_TOKEN"):
        resolve_model("owner/name")


def test_a_hub_model_of_another_format_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"lacks weights.* and a tokenizer"):
        resolve_model("owner/name")
