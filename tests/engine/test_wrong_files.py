"""Folders of models and of adapters with one wrong value in a file: they are served, or refused with the reason."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.errors import ModelLoadError, ServeError
from mlx_server.runtime.models.folder import read_headers
from tests import block_drafters, eagles
from tests.adapter_files import save_as_peft, write_adapter, write_model

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
MISSING = object()
HUGE = (2**31, 2**63, 10**400, 1e308, float("inf"), float("nan"))
VALUES = (MISSING, None, True, 0, -1, 1, 1.5, "", "x", "3", [], [1], ["x"], [None], {}, {"a": 1}, DEEP, *HUGE)
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "eos_token_id": [1, 2], "bos_token_id": 1}
INDEX = "model.safetensors.index.json"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX)
BASES = {"adapter": "model", "peft": "model", "block/drafter": "block/model", "eagle/drafter": "eagle/model"}
"""The models of adapters and of drafters."""
CASES = [
    *(("model", file) for file in FILES),
    *((folder, "config.json") for folder in ("quantized", "block/drafter", "eagle/drafter")),
    *((folder, "adapter_config.json") for folder in ("adapter", "peft")),
]
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("right")
    write_model("llama", path / "quantized", bits=4)
    write_adapter(write_model("llama", path / "model"), path / "adapter")
    save_as_peft(path / "adapter", path / "peft", alpha_pattern={"q_proj": 24}, use_rslora=True)
    block_drafters.folders(path / "block", "dflash2")
    eagles.folders(path / "eagle", "sglang")
    (path / "model" / "generation_config.json").write_text(json.dumps(SAMPLING))
    names = dict.fromkeys(read_headers(path / "model" / "model.safetensors"), "model.safetensors")
    (path / "model" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in a document; of long lists and of vocabularies to the first ones."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys[:40]:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return document


def serve(folders: Path, folder: str, file: str, text: str, path: Path) -> None:
    """Answers one prompt with `text` in a file."""
    wrong = path / "wrong"
    shutil.copytree(folders / folder, wrong, dirs_exist_ok=True)
    (wrong / file).write_text(text)
    base = BASES.get(folder)
    model, is_adapter = wrong if base is None else folders / base, base == "model"
    more: dict[str, Any] = (
        {} if base is None else {"adapters": [str(wrong)]} if is_adapter else {"draft_model": str(wrong)}
    )
    with LLM(str(model), num_kv_blocks=8, max_model_len=128, **more) as llm:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate("hello", sampling, adapters="wrong" if is_adapter else None, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("folder", "file"), CASES)
def test_whatever_a_value_is(folder: str, file: str, seed: int, folders: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    right = json.loads((folders / folder / file).read_text())
    every = list(places(right))
    for _ in range(20):
        with contextlib.suppress(ServeError):
            serve(folders, folder, file, json.dumps(changed(right, rng.choice(every), rng.choice(VALUES))), tmp_path)


LAYER = ("quantization", "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("folder", "file", "place", "value", "words"),
    [
        ("model", "config.json", ("num_hidden_layers",), 2**31, "at most 10,000 instead of 2147483648"),
        ("model", "config.json", ("rms_norm_eps",), float("nan"), "of 64 bits instead of nan as rms_norm_eps"),
        ("model", "config.json", ("vocab_size",), 10**400, "a finite number of 64 bits instead of 1000"),
        ("model", "config.json", ("rope_theta",), -1, "logits are NaN"),
        ("quantized", "config.json", ("intermediate_size",), 1, "is for rows longer than 1.*Correct its config.json"),
        ("quantized", "config.json", LAYER, {"group_size": 0, "bits": 4}, "a positive number instead of 0"),
        ("eagle/drafter", "config.json", ("hidden_size",), [1], r"a number instead of \[1\] as hidden_size"),
        ("adapter", "adapter_config.json", ("lora_parameters", "scale"), None, "or is damaged .*Take one"),
        ("adapter", "adapter_config.json", ("lora_parameters", "scale"), float("nan"), "its scale is nan"),
    ],
)
def test_what_would_end_the_process_or_never_end_is_refused(
    folder: str, file: str, place: tuple[Any, ...], value: Any, words: str, folders: Path, tmp_path: Path
) -> None:
    right = json.loads((folders / folder / file).read_text())
    with pytest.raises(ModelLoadError, match=words):
        serve(folders, folder, file, json.dumps(changed(right, place, value)), tmp_path)


@pytest.mark.parametrize("text", ["", "nope", "[]", "null", "{}", "[" * 100_000])
@pytest.mark.parametrize(("folder", "file"), CASES)
def test_whatever_a_file_is(folder: str, file: str, text: str, folders: Path, tmp_path: Path) -> None:
    with contextlib.suppress(ServeError):
        serve(folders, folder, file, text, tmp_path)
