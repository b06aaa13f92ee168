"""GGUF files as models: kept or requantised, converted once, resumed, and served as mlx-lm serves the same weights."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from mlx_server import LLM
from mlx_server.engine.models.facts import read_facts
from mlx_server.errors import DownloadError, InsufficientStorageError, ModelLoadError
from mlx_server.runtime.models import made_folders, resolve
from mlx_server.runtime.models.gguf import conversion
from mlx_server.runtime.models.gguf.tokenizer import build_tokenizer, special_ids
from mlx_server.runtime.models.progress import progress_of
from mlx_server.runtime.models.resolve import find_folder, resolve_model
from tests.engine_worlds import answers
from tests.gguf_files import MERGES, SPECIALS, vocabulary, write_gguf
from tests.homes import with_kernels
from tests.runtime.models.gguf.test_gguf_convert import unpacked_weights
from tests.tiny_models import reference_generate

EXACT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
CODES_KEPT = (Kind.Q4_K, Kind.Q5_K)
REQUANTISED = {Kind.Q2_K: 0.1, Kind.Q3_K: 0.1, Kind.Q6_K: 0.01, Kind.IQ4_XS: 0.01}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = with_kernels(tmp_path / "home")
    monkeypatch.setenv("MLX_SERVE_HOME", str(home))
    return home


@pytest.fixture
def short_files() -> Iterator[None]:
    """No file may be longer than the smallest weights are, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_free", [0, 2**40])
def test_weights_that_cannot_be_written_are_no_fault_of_the_file(
    num_free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(made_folders, "check_space", lambda *_: None)  # the disk fills up after that
    monkeypatch.setattr(made_folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=num_free))
    request.getfixturevalue("short_files")
    kind, reason = (DownloadError, "Unable to write") if num_free else (InsufficientStorageError, "No space left")
    with pytest.raises(kind, match=rf"Cannot keep .*tiny\.gguf in .*{reason}.* Make room .*MLX_SERVE_HOME"):
        resolve_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("kind", [*EXACT, *CODES_KEPT, *REQUANTISED], ids=lambda kind: kind.name)
def test_weights_are_worth_what_the_file_says(kind: Kind, tmp_path: Path) -> None:
    worth = write_gguf(tmp_path / "tiny.gguf", kind=kind, hidden=256)
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    weights = unpacked_weights(folder)
    assert weights.keys() == worth.keys()
    for name, expected in worth.items():
        error = np.linalg.norm(weights[name] - expected) / np.linalg.norm(expected)
        is_exact = kind in EXACT or "proj" not in name
        assert error <= (0.0 if is_exact else 3e-4 if kind in CODES_KEPT else REQUANTISED[kind]), name
    wanted_bits = {Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q5_K: 5, Kind.Q8_0: 8, Kind.Q6_K: 8, Kind.IQ4_XS: 8}.get(kind, 4)
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert quantization.get("model.layers.1.mlp.down_proj", quantization)["bits"] == wanted_bits


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_greedy_answers_are_mlx_lms_from_the_same_weights(kind: Kind, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind=kind, hidden=256)
    prompts = [np.random.default_rng(n).integers(3, len(vocabulary()), n).tolist() for n in (5, 40, 70)]
    with LLM(str(tmp_path / "tiny.gguf"), num_kv_blocks=32, max_model_len=256, speculate="off") as llm:
        served = answers(llm, prompts, [12] * 3)
    model, _ = mlx_lm.load(str(resolve_model(str(tmp_path / "tiny.gguf"))))
    model.set_dtype(mx.float32)
    assert served == [reference_generate(model, prompt, 12).token_ids for prompt in prompts]


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_model_is_described_as_most_of_it_is_stored(kind: Kind, tmp_path: Path) -> None:
    """Whole weights can be quantised."""
    name, is_quantised = str(tmp_path / "tiny.gguf"), kind is Kind.Q8_0
    write_gguf(tmp_path / "tiny.gguf", kind=kind, embeddings=Kind.Q4_0 if is_quantised else kind)
    folder = resolve_model(name)
    facts = read_facts(name)
    assert facts is not None
    assert facts.quantization == ("Q8" if is_quantised else "F16")
    assert facts.config.get("quantization", {}).get("bits") == (8 if is_quantised else None)
    mlx_lm.load(str(folder))
    if not is_quantised:
        fewer = find_folder(name, quantize="4")
        assert fewer is not None
        assert json.loads((fewer / "config.json").read_text())["quantization"]["bits"] == 4


def test_a_conversion_that_was_cut_off_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(made_folders, "_SHARD_BYTES", 10_000)
    name, read, readings = str(tmp_path / "tiny.gguf"), [], []
    convert = conversion.Conversion._named

    def convert_until(limit: int) -> None:
        def named(self: conversion.Conversion, tensor: Any) -> dict[str, mx.array]:
            if len(read) == limit:
                raise KeyboardInterrupt
            read.append(tensor.name)
            progress = progress_of(name)
            assert progress is not None
            readings.append(progress.reading())
            return convert(self, tensor)

        monkeypatch.setattr(conversion.Conversion, "_named", named)

    convert_until(8)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(name)
    assert not list((tmp_path / "home" / "models").glob("*"))
    assert not list((tmp_path / "home" / "conversions").glob("*.partial")), "nothing is left"
    assert progress_of(name) is None
    assert readings[7]["done_bytes"] > 0
    assert readings[7]["total_bytes"] == (tmp_path / "tiny.gguf").stat().st_size
    convert_until(1000)
    folder = resolve_model(name)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert sorted(read[8:]) == sorted(set(read)), "each tensor once"
    mlx_lm.load(str(folder))
    assert resolve_model(name) == folder  # once
    assert sorted(read[8:]) == sorted(set(read))
    (tmp_path / "tiny.gguf").touch()
    assert resolve_model(name) != folder


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(made_folders.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DownloadError, match=r"0.00 GB free, and converting .*tiny.gguf needs up to"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    tensor = next(t for t in GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.1.ffn_up.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = np.array(np.nan, np.float16).tobytes()
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"blk.1.ffn_up.weight holds numbers that are not finite \(NaN\)"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_a_missing_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    with pytest.raises(ModelLoadError, match=r"one of 2 files of a model, and tiny-00002-of-00002\.gguf is missing"):
        resolve_model(str(tmp_path / "tiny-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, r"tiny\.gguf: It has no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"tiny\.gguf: It has no tokenizer\.ggml\.merges"),
        ({"token_type": [1]}, r"tiny\.gguf: It has \d+ tokens, but 1 numbers in tokenizer\.ggml\.token_type"),
        (
            {"model": "llama", "unknown_token_id": 99999},
            r"tiny\.gguf: It has .* tokenizer\.ggml\.unknown_token_id is 99999",
        ),
    ],
)
def test_a_vocabulary_that_lacks_something_is_named(
    changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    read = conversion._Reader

    def read_changed(path: Path) -> GGUFReader:
        reader = read(path)
        for key, value in changes.items():
            field = SimpleNamespace(contents=lambda value=value: value)
            reader.fields[f"tokenizer.ggml.{key}"] = field
        return reader

    monkeypatch.setattr(conversion, "_Reader", read_changed)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    "name",
    [
        "owner/name/tiny.gguf",
        "https://huggingface.co/owner/name/blob/main/tiny.gguf",
        "https://huggingface.co/owner/name/resolve/main/tiny.gguf?download=true",
    ],
)
def test_a_file_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    asked = []

    def fetch(model: str, hub_id: str, patterns: list[str]) -> Path:
        asked.append((hub_id, patterns))
        return tmp_path

    monkeypatch.setattr(resolve, "fetch_snapshot", fetch)
    assert resolve_model(name).name.startswith("tiny-")
    assert asked == [("owner/name", ["tiny.gguf"])]
    with pytest.raises(ModelLoadError, match=r"owner/name has no file other\.gguf; see https://huggingface\.co/owner"):
        resolve_model("owner/name/other.gguf")


@pytest.mark.parametrize("types", [1, 3, 4, None])
def test_turns_begin_and_end_whatever_the_file_says_of_their_tokens(types: int | None) -> None:
    """As in llama.cpp: published files call them normal text."""
    tokens = vocabulary()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if types is not None:
        metadata["tokenizer.ggml.token_type"] = [types if token in SPECIALS else 1 for token in tokens]
    assert special_ids(metadata)["eos_token_id"] == [2, 0]
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("<|im_start|>hello<|im_end|><|endoftext|>").ids
    assert ids == [1, tokens.index("hello"), 2, 0]
    assert tokenizer.decode(ids) == "hello"


TEXTS = (
    "Every model that people download, right the first time.",
    "  two spaces before,   and three within\nand a line",
    "x = 3.14159; naïve café, 東京 🙂",
    "",
    " ",
)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary that sentencepiece has learnt from this repository's words."""
    prefix = tmp_path_factory.mktemp("spm") / "tiny"
    text = (Path(__file__).parents[4] / "docs" / "architecture.md").read_text(encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_prefix=str(prefix),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_pieces_with_scores_become_sentencepieces_own_tokens(
    pieces: sentencepiece.SentencePieceProcessor, adds_bos: bool
) -> None:
    ids = range(pieces.vocab_size())
    types = [2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in ids]
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": adds_bos,
        }
    )
    for text in TEXTS:
        wanted = pieces.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == wanted, text
        assert tokenizer.encode(text).ids == [1] * adds_bos + wanted
        assert tokenizer.decode(wanted) == text
