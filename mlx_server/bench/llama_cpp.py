"""llama.cpp as a peer: its server, built for this machine's CPU, and GGUF files of the weights that others serve.

`llama-server` of the path is used; otherwise it is built once from the sources that PyPI's `llama-cpp-python` brings,
since wheels leave out what this CPU can do beyond the least. Its settings are its defaults, with K/V in 16 bits, but
for the number of requests at a time and their context.

A GGUF file has the very weights of a folder. The bundled model's is the file that the folder was converted from, whose
blocks are expanded for a float32 folder. For a random folder, its words become a unigram vocabulary: each word is one
token with the same id, so both servers read and write the same tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_server import config
from mlx_server.bench.servers import Unavailable, run_to_end
from mlx_server.bench.tables import tell
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.gguf import WeightFormat

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAME = "llama.cpp"
_SOURCES = "llama-cpp-python"
_BUILD_OPTIONS = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF")
_LEFT_OUT = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
_SLOTS, _SLOT_TOKENS = 16, 4864
"""Requests at a time, and the context of each: that of the intruder, with its answer."""


def find_server(folder: Path) -> Path:
    """`llama-server` of the path, or the one in `folder`, which is built the first time; that takes minutes. Raises
    `Unavailable`."""
    if found := shutil.which("llama-server"):
        return Path(found)
    stamp, source, build = folder / "installed", folder / "source", folder / "build"
    if not stamp.exists():
        if shutil.which("cmake") is None:
            raise Unavailable("there is no llama-server on the path, and no cmake to build it with")
        tell(f"building llama.cpp in {folder}, which takes minutes ...")
        shutil.rmtree(folder, ignore_errors=True)
        _fetch_sources(folder, source)
        options = [f"-D{option}" for option in (*_BUILD_OPTIONS, *(f"{name}=OFF" for name in _LEFT_OUT))]
        run_to_end(["cmake", "-S", str(source), "-B", str(build), *options])
        run_to_end(
            ["cmake", "--build", str(build), "--target", "llama-server", f"--parallel={os.cpu_count()}"], timeout_s=None
        )
        stamp.touch()
    return build / "bin" / "llama-server"


def _fetch_sources(folder: Path, target: Path) -> None:
    """pip's download also makes the package's metadata, which needs no compiler."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run_to_end([*pip, "--no-binary", _SOURCES, "--dest", str(folder), _SOURCES], timeout_s=None)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    (vendored,) = folder.glob("*/vendor/llama.cpp")
    vendored.rename(target)


def command(server: Path, model: Path, folder: Path) -> str:
    """What starts it with the weights of the model's folder, as `bench compare` takes it. Raises `Unavailable`."""
    run_to_end([str(server), "--version"])
    words = [server, "--model", gguf_of(model, folder), "--parallel", _SLOTS, "--ctx-size", _SLOTS * _SLOT_TOKENS]
    return f"{shlex.join(map(str, words))} --threads {{threads}} --host 127.0.0.1 --port {{port}}"


def gguf_of(model: Path, folder: Path) -> Path:
    """A file with the weights of the model's folder, made under `folder` if there is none. Raises `Unavailable` for a
    model that is neither the bundled one nor random."""
    if importlib.util.find_spec("gguf") is None:
        raise Unavailable("GGUF files need the package gguf; install it with: pip install 'mlx-server[bench]'")
    source = config.home() / "downloads" / SMOLLM2.file_name
    origin = model / "origin.json"
    is_bundled = origin.exists() and json.loads(origin.read_text())["sha256"] == SMOLLM2.sha256
    if is_bundled and model.name.endswith(WeightFormat.PACKED):
        return source
    weights = model / "model.safetensors"
    state = f"{model.resolve()} {weights.stat().st_mtime_ns if weights.exists() else 0}"
    target = folder / f"{model.name}-{hashlib.sha256(state.encode()).hexdigest()[:12]}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        writer = _expanded(source, partial) if is_bundled else _converted(model, partial)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(target)
    return target


def _expanded(source: Path, target: Path) -> GGUFWriter:
    """The same file with every block as float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    left_out = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for name, value in reader.fields.items():
        if name not in left_out and not name.startswith("GGUF."):
            items = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    return writer


def _converted(model: Path, target: Path) -> GGUFWriter:
    """Of a folder that `random_folder` has made: a Qwen3 in float32."""
    import gguf

    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    words = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    is_known = shape["model_type"] == "qwen3" and "quantization" not in shape and words["type"] == "WordLevel"
    if not is_known:
        raise Unavailable(f"{model} is neither the bundled model nor a random one in float32; --server takes any other")
    writer = gguf.GGUFWriter(target, shape["model_type"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    _add_words(writer, words, shape, (model / "chat_template.jinja").read_text(encoding="utf-8"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape["num_hidden_layers"])
    weights: Any = mx.load(str(model / "model.safetensors"))
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(name, (".weight",)), np.array(weight))
    return writer


def _add_words(writer: GGUFWriter, words: dict[str, Any], shape: dict[str, Any], template: str) -> None:
    import gguf

    tokens = sorted(words["vocab"], key=words["vocab"].__getitem__)
    unknown, end = words["vocab"][words["unk_token"]], shape["eos_token_id"]
    kinds = {unknown: gguf.TokenType.UNKNOWN, end: gguf.TokenType.CONTROL}
    writer.add_tokenizer_model("t5")  # a unigram model, which takes a whole word where there is one
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kinds.get(number, gguf.TokenType.NORMAL) for number in range(len(tokens))])
    writer.add_unk_token_id(unknown)
    writer.add_eos_token_id(end)
    writer.add_add_space_prefix(True)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(template)
