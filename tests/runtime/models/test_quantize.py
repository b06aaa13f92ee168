"""Whole weights quantised at load: once, as mlx-lm would, and refused where there is nothing to quantise."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from mlx_server import LLM
from mlx_server.config import load_config
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import InsufficientStorageError, ModelLoadError
from mlx_server.runtime.models import made_folders
from mlx_server.runtime.models.blueprint import load_folder, why_no_vision
from mlx_server.runtime.models.resolve import find_folder
from tests.engine_worlds import answers, make_folder, random_prompts
from tests.homes import with_kernels
from tests.runtime.models.test_image_models import load_and_probe
from tests.runtime.models.test_vision_models import make_vision_folder
from tests.tiny_models import byte_tokenizer, reference_generate, save_model_folder
from tests.vision_worlds import tiny_vlm

SIZES = {"4": (64, 4), "8": (64, 8), "mxfp4": (32, 4)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVE_HOME", str(with_kernels(tmp_path / "home")))
    return make_folder(tmp_path / "tiny")


def found(folder: Path, form: str) -> Path:
    path = find_folder(str(folder), quantize=form)
    assert path is not None
    return path


@pytest.mark.parametrize("form", SIZES)
def test_weights_and_answers_are_those_of_mlx_lm(form: str, folder: Path) -> None:
    made = found(folder, form)
    wanted, _ = mlx_lm.load(str(folder))
    group_size, bits = SIZES[form]
    nn.quantize(wanted, group_size, bits, mode="mxfp4" if form == "mxfp4" else "affine")
    got, _ = mlx_lm.load(str(made))
    weights = dict(tree_flatten(wanted.parameters()))
    assert {name for name, _ in tree_flatten(got.parameters())} == weights.keys()
    assert all(mx.array_equal(array, weights[name]).item() for name, array in tree_flatten(got.parameters()))
    assert any(array.dtype in (mx.uint32, mx.uint8) for array in weights.values())
    prompts = random_prompts((5, 40))
    with LLM(str(folder), quantize=form, num_kv_blocks=32, max_model_len=256, speculate="off") as llm:
        assert answers(llm, prompts, [8, 8]) == [reference_generate(got, prompt, 8).token_ids for prompt in prompts]


def test_it_is_done_once_and_again_for_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = found(folder, "4")
    assert json.loads((made / "config.json").read_text())["quantization"]["bits"] == 4
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert found(folder, "4") == made
    assert times == {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert found(folder, "8") != made
    next(folder.glob("model*.safetensors")).touch()
    assert found(folder, "4") != made


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "1_Pooling/config.json"])
def test_files_beside_the_weights_are_as_new_as_the_models(name: str, folder: Path) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / name).write_text("{}")
    assert (found(folder, "4") / name).read_text() == "{}"
    (folder / name).write_text('{"a": 1}')
    assert (found(folder, "4") / name).read_text() == '{"a": 1}'


def test_weights_are_written_in_several_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(tree_flatten(mlx_lm.load(str(found(folder, "4")))[0].parameters()))
    monkeypatch.setattr(made_folders, "_SHARD_BYTES", 20_000)
    made = found(folder, "8")
    assert len(list(made.glob("model-*.safetensors"))) > 2
    assert dict(tree_flatten(mlx_lm.load(str(made))[0].parameters())).keys() == whole.keys()


def test_memory_is_reckoned_of_what_is_stored(folder: Path) -> None:
    needs = {}
    for form in ("none", "8", "4"):
        made = find_folder(str(folder), quantize=form)
        assert made is not None
        config = load_config(flags={"model": str(folder), "quantize": form}, environ={})
        needs[form] = estimate_need(config).weights_bytes
        assert needs[form] == sum(path.stat().st_size - 8 - header_bytes(path) for path in made.glob("*.safetensors"))
    assert needs["4"] < needs["8"] < needs["none"]


def header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def test_what_is_quantised_already_is_refused(folder: Path) -> None:
    made = found(folder, "4")
    with pytest.raises(ModelLoadError, match=r"is already quantised \(4 bits\), and --quantize needs float weights"):
        find_folder(str(made), quantize="8")
    with pytest.raises(ModelLoadError, match="random:mini has no folder"):
        find_folder("random:mini", quantize="8")


def test_only_what_belongs_to_the_model_is_copied_and_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the same weights in other formats, nor a repository, nor a link to nothing."""
    kept = ["mtp.safetensors", "chat_template.jinja", "code.py", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    left = [
        "pytorch_model.bin",
        "tiny.gguf",
        "other.safetensors",
        "original/a.pth",
        ".git/lfs/b",
        "checkpoint-5/c.json",
        "._config.json",
    ]
    for name in (*kept, *left):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    (folder / "mtp.safetensors").write_bytes(bytes(5_000_000))
    (folder / "gone.json").symlink_to(folder / "nowhere")
    usage = type("Usage", (), {"free": 4_000_000})
    with monkeypatch.context() as full:
        full.setattr(made_folders.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(InsufficientStorageError, match=r"quantizing .* needs up to 0\.01 GB"):
            found(folder, "4")
    made = found(folder, "4")
    assert all((made / name).is_file() for name in kept)
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert not names & {*left, "gone.json"}
    assert {name for name in names if name.endswith(".safetensors")} == {
        "model.safetensors",
        "mtp.safetensors",
        "2_Dense/model.safetensors",
    }


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", "mistral3"])
def test_a_vision_encoder_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    loaded = tiny_vlm(model_type).loaded
    source = save_model_folder(loaded.model, loaded.config, tmp_path / "seeing", byte_tokenizer())
    made = found(source, "8")
    before, after = (dict(tree_flatten(load_folder(path, False)[0].parameters())) for path in (source, made))
    encoder = {name for name in before if not name.startswith("language_model.")}
    assert encoder
    for name in encoder:
        assert mx.array_equal(before[name], after[name]), name
    assert "language_model.model.layers.0.mlp.up_proj.scales" in after
    _, info = load_and_probe(made)
    assert info.no_vision == "", "it is served, and was compared with its own class"


def test_an_encoder_that_cannot_be_loaded_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    source = make_vision_folder(tmp_path / "seeing", "qwen2_vl")
    assert why_no_vision(source) == ""
    assert why_no_vision(found(source, "8")) == "its files have no weights of a vision encoder"


def test_code_of_the_model_is_run_if_it_is_trusted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "own.py").write_text("from mlx_lm.models.llama import *\n")
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        found(folder, "4")
    made = find_folder(str(folder), quantize="4", trust_remote_code=True)
    assert made is not None
    assert (made / "own.py").is_file()
