"""Files of models that anybody may have written: whatever they hold, listing models and sizing them fails in words."""

from __future__ import annotations

import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import MemoryNeed, estimate_need
from mlx_server.engine.models import facts as facts_module
from mlx_server.engine.models.facts import ModelFacts, ModelFit, fits_of, read_facts, read_preparation
from mlx_server.engine.models.store import StoredModel
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.folder import read_headers
from mlx_server.runtime.models.progress import shown
from mlx_server.runtime.models.resolve import resolve_model
from tests.embedders import save_embedder
from tests.gguf_files import write_gguf

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DEEP = "[" * 100_000


def folder_of(path: Path, config: str, header: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    return path


@pytest.mark.parametrize("config", ["[]", "null", "3", DEEP, "{", '{"text_config": [1]}', '{"quantization": [1]}'])
def test_a_config_that_is_none_is_no_model_or_says_nothing(config: str, tmp_path: Path) -> None:
    facts = read_facts(str(folder_of(tmp_path / "m", config, {"x": TENSOR})))
    assert facts is None or (facts.family, facts.context_length, facts.quantization) == ("", 0, "F32")


@pytest.mark.parametrize("inner", ["abc", [1], -1, True])
def test_a_text_part_that_is_none_is_named(inner: object, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", json.dumps({**LLAMA, "text_config": inner}), {"x": TENSOR})
    with pytest.raises(ModelLoadError, match=r"lacks an object as text_config in config\.json"):
        estimate_need(Config(model=ModelConfig(model=str(folder))))


@pytest.mark.parametrize("length", ["8192", -5, 0, True, 2**31, 10**30, [1]])
def test_a_context_that_is_no_length_is_none(length: object, tmp_path: Path) -> None:
    config = json.dumps({**LLAMA, "max_position_embeddings": length})
    facts = read_facts(str(folder_of(tmp_path / "m", config, {"x": TENSOR})))
    assert facts is not None
    assert facts.context_length == 0


@pytest.mark.parametrize(
    "header",
    [
        *(b"", DEEP.encode(), [1], {"x": "y"}, {"x": {"dtype": "F32"}}),
        *({"x": {**TENSOR, **wrong}} for wrong in ({"shape": [-1]}, {"shape": ["a"]}, {"shape": 3}, {"dtype": 5})),
        *({"x": {**TENSOR, "data_offsets": wrong}} for wrong in ("ab", [0], [0, None], [0, 1.5], [-4, 0])),
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_that_describes_no_tensors_is_a_broken_file(header: object, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", json.dumps(LLAMA), header)
    with pytest.raises(ModelLoadError, match="is not a safetensors file, or is broken"):
        read_headers(folder / "model.safetensors")
    facts = read_facts(str(folder))
    assert facts is not None
    assert facts.num_parameters == 0
    with pytest.raises(ModelLoadError):
        estimate_need(Config(model=ModelConfig(model=str(folder))))


def facts_of(path: Path, config: dict[str, Any], header: dict[str, Any] | None = None) -> ModelFacts:
    facts = read_facts(str(folder_of(path, json.dumps({**LLAMA, **config}), header or {"x": TENSOR})))
    assert facts is not None
    return facts


PACKED = {"dtype": "U32", "shape": [8, 4], "data_offsets": [0, 4]}
SCALES = {"dtype": "BF16", "shape": [8, 1], "data_offsets": [0, 4]}
HALF = {"dtype": "BF16", "shape": [8, 3], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("config", "header", "num_parameters", "quantization"),
    [
        ({}, {"a.weight": HALF, "b.weight": HALF, "c.weight": TENSOR}, 49, "BF16"),
        ({}, {"a.weight": {**HALF, "dtype": "I8"}}, 24, ""),
        ({"quantization": {"bits": 4}}, {"a.weight": PACKED, "a.scales": SCALES, "a.biases": SCALES}, 256, "Q4"),
        ({"quantization_config": {"bits": 8}}, {"a.weight": PACKED, "a.scales": SCALES, "b.bias": HALF}, 152, "Q8"),
        ({"quantization": {"bits": 4, "a": {"bits": 8}}}, {"a.weight": PACKED, "b.weight": PACKED}, 128 + 256, "Q4"),
        ({"quantization": {"bits": 4, "a": {"bits": 33}}}, {"a.weight": PACKED}, 256, "Q4"),
        ({"quantization": {"bits": 32}}, {"a.weight": PACKED}, 32, "Q32"),
        ({"quantization": {"bits": 0}}, {"a.weight": PACKED, "a.indices": PACKED}, 64, ""),
        ({}, {"a.scales": SCALES}, 8, "BF16"),
    ],
)
def test_weights_are_counted_as_numbers_not_as_words(
    tmp_path: Path, config: dict[str, Any], header: dict[str, Any], num_parameters: int, quantization: str
) -> None:
    facts = facts_of(tmp_path / "m", config, header)
    assert (facts.num_parameters, facts.quantization) == (num_parameters, quantization)


def test_a_folder_s_size_time_and_digest_are_those_of_its_files(tmp_path: Path) -> None:
    before = facts_of(tmp_path / "m", {})
    folder = tmp_path / "m"
    assert read_facts(str(folder)) is before, "nothing is read again"
    assert before.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    (folder / "more.txt").write_bytes(bytes(10))
    os.utime(folder / "more.txt", (0, 2**31))
    after = read_facts(str(folder))
    assert after is not None
    assert (after.num_bytes - before.num_bytes, after.modified_s) == (10, 2**31)
    assert len({before.digest, after.digest}) == 2
    assert len(after.digest) == 64


def test_the_text_part_s_values_count(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 4096}
    for name in ("text_config", "llm_config"):
        assert facts_of(tmp_path / name, {"max_position_embeddings": 8, name: inner}).context_length == 4096
    assert facts_of(tmp_path / "n", {"max_position_embeddings": 2**31 - 1}).context_length == 2**31 - 1


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": '{"chat_template": "one"}'}, "one"),
        ({"tokenizer_config.json": '{"chat_template": "one"}', "chat_template.jinja": "two"}, "two"),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "a"}, '
                '{"name": "brief", "template": "c"}, {"name": "default", "template": "b"}]}'
            },
            "b",
        ),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "a"}]}'}, ""),
        ({"tokenizer_config.json": "[]"}, ""),
        ({"tokenizer_config.json": "{"}, ""),
        ({"tokenizer_config.json": "{}"}, ""),
    ],
)
def test_the_chat_template_is_the_default_one(tmp_path: Path, files: dict[str, str], template: str) -> None:
    folder = folder_of(tmp_path / "m", json.dumps(LLAMA), {"x": TENSOR})
    for name, text in files.items():
        (folder / name).write_text(text)
    facts = read_facts(str(folder))
    assert facts is not None
    assert facts.chat_template == template


def test_the_first_license_is_shown_and_not_all_of_a_long_one(tmp_path: Path) -> None:
    assert facts_of(tmp_path / "none", {}).license == ""
    folder = tmp_path / "m"
    folder_of(folder, json.dumps(LLAMA), {"x": TENSOR})
    (folder / "LICENSE.b").write_text("second")
    (folder / "LICENSE").write_bytes(b"\xff" + b"a" * 100_000)
    facts = read_facts(str(folder))
    assert facts is not None
    assert facts.license == "\ufffd" + "a" * (64 * 1024 - 1)


def test_what_a_model_can_do_follows_from_its_template(tmp_path: Path) -> None:
    assert facts_of(tmp_path / "m", {}).capabilities("m", "auto") == ["completion"]
    for name, template, more in (("a", "plain", []), ("b", "<think>", ["thinking"])):
        folder = folder_of(tmp_path / name, json.dumps(LLAMA), {"x": TENSOR})
        (folder / "chat_template.jinja").write_text(template)
        facts = read_facts(str(folder))
        assert facts is not None
        assert facts.capabilities("m", "auto") == ["completion", "tools", *more]
        assert facts.capabilities("m", "auto", sees=True) == ["completion", "vision", "tools", *more]
        assert facts.capabilities("m", "last") == ["completion", "embedding", "rerank", "tools", *more]
    save_embedder(tmp_path / "e")
    (tmp_path / "e" / "chat_template.jinja").write_text("<think>")
    embedder = read_facts(str(tmp_path / "e"))
    assert embedder is not None
    assert embedder.capabilities("e", "auto") == ["embedding", "rerank"]


def test_a_folder_a_converted_file_or_a_pulled_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "smollm2").mkdir()
    pulled = folder_of_pulled(tmp_path / "home" / "models" / "pulled")
    assert facts_module.folder_of("m") == Path("m")
    assert facts_module.folder_of("pulled") == pulled
    assert [facts_module.folder_of(name) for name in ("model.gguf", "nothing", "smollm2")] == [None] * 3
    assert read_facts("nothing") is None
    write_gguf(tmp_path / "converted.gguf")
    converted = resolve_model("converted.gguf")
    assert facts_module.folder_of("converted.gguf") == converted


def folder_of_pulled(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return folder_of(path, json.dumps(LLAMA), {"x": TENSOR})


def test_whether_a_model_sees_is_no_if_its_files_do_not_say(tmp_path: Path) -> None:
    """A broken file of a family that sees: loading would name it."""
    config = {"model_type": "qwen2_vl", "vision_config": {"depth": 1}}
    assert not facts_of(tmp_path / "text", config).may_see, "there are no weights of an encoder"
    facts = read_facts(str(folder_of(tmp_path / "broken", json.dumps({**LLAMA, **config}), b"")))
    assert facts is not None
    assert not facts.may_see
    seeing = facts_of(tmp_path / "sees", config, {"visual.x": TENSOR})
    assert seeing.may_see is (find_spec("mlx_vlm") is not None)


def test_each_model_is_told_whether_it_fits_whatever_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub, commit = tmp_path / "hub" / "models--owner--name", "0" * 40
    needs = {
        "small": 10,
        commit: 20,
        "large": 10**18,
        "refused": ModelLoadError("It is odd."),
        "broken": KeyError("vocab_size"),
    }

    def estimate(config: Config) -> MemoryNeed:
        need = needs[Path(config.model.model).name]
        if isinstance(need, Exception):
            raise need
        return MemoryNeed(need, 0, 0)

    monkeypatch.setattr(facts_module, "estimate_need", estimate)
    (tmp_path / "nothing").mkdir()
    models = [StoredModel("nothing", "home", tmp_path / "nothing", 1), StoredModel("gone", "hub", tmp_path, 1)]
    (hub / "refs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    (hub / "refs" / "main").write_text(commit)
    for name in needs:
        parent = hub / "snapshots" if name == commit else tmp_path
        folder = folder_of(parent / name, json.dumps({**LLAMA, "max_position_embeddings": 64}), {"x": TENSOR})
        is_hubs = name == commit
        models.append(StoredModel("owner/name", "hub", hub, 1) if is_hubs else StoredModel(name, "home", folder, 1))
    nothing, gone, small, fetched, large, refused, broken = fits_of(models, Config())
    assert nothing == gone == ModelFit(reason="it is incomplete: `mlx-serve pull` fetches the rest")
    assert (small, fetched) == (ModelFit("F32", 64, 10, "yes"), ModelFit("F32", 64, 20, "yes"))
    assert large == ModelFit("F32", 64, 10**18, "no")
    assert refused == ModelFit("F32", 64, None, "no", "It is odd.")
    assert broken == ModelFit("F32", 64, None, "no", "its files are invalid (KeyError('vocab_size'))")


def test_the_progress_of_a_model_that_is_being_prepared() -> None:
    with shown("owner/model", "fetching", 100) as report:
        report(20)
        reading = read_preparation("owner/model")
        assert reading is not None
        assert (reading["stage"], reading["done_bytes"], reading["total_bytes"]) == ("fetching", 20, 100)
        assert read_preparation("owner/other") is None
    assert read_preparation("owner/model") is None
