"""GGUF files that contradict themselves: whatever one field says, the file is served or refused by its name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue

from mlx_server.config import ModelConfig
from mlx_server.engine.text.chat import TextTools
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf
from mlx_server.runtime.models.loader import load
from tests.gguf_files import vocabulary, write_gguf

pytestmark = pytest.mark.slow

Change = Callable[[GGUFWriter], None]
KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.INT64,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}
ANY = (None, True, 0, 1, -1, 2**31, 2**62, 1.5, 0.0, -1.0, math.nan, math.inf, "", "of no kind", [1], ["a"], [[1]])
KEYS = (
    *("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    *(f"llama.{name}" for name in ("context_length", "embedding_length", "block_count", "feed_forward_length")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "layer_norm_rms_epsilon")),
    *(f"llama.rope.{name}" for name in ("freq_base", "dimension_count", "scaling.type")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.chat_template"),
)
LISTS: dict[str, list[Any]] = {
    "tokenizer.ggml.tokens": vocabulary(),
    "tokenizer.ggml.merges": ["h e", "l l"],
    "tokenizer.ggml.token_type": [1] * len(vocabulary()),
    "tokenizer.ggml.scores": [0.0] * len(vocabulary()),
}
TENSORS = ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight")


def check(path: Path) -> bool:
    """Whether the file is served; otherwise the error says why, by its name, and what to do."""
    folder = path.with_suffix("")
    folder.mkdir()
    if fault := fault_of(lambda: convert_gguf(path, folder, WeightFormat.PACKED)):
        assert fault.startswith(f"{path}: ")
        assert "Fetch the file again" in fault
        return False

    def use() -> None:
        model = load(str(folder))
        TextTools.load(folder, model.vocab_size, ModelConfig(model=str(folder))).tokenizer.encode("hello 12")

    fault = fault_of(use)
    assert not fault or str(folder) in fault
    return not fault


def fault_of(work: Callable[[], None]) -> str:
    try:
        work()
    except ModelLoadError as error:
        return error.message
    return ""


def written(path: Path, change: Change) -> Path:
    write_gguf(path, change=change)
    return path


def setting(key: str, value: Any) -> Change:
    """None removes the key."""

    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.kv_data[0][key] = GGUFValue(value, KINDS[type(value)])

    return change


def shaped(name: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    def change(writer: GGUFWriter) -> None:
        tensor = writer.tensors[0][name]
        tensor.shape = shape(tuple(tensor.shape))

    return change


def of_kind(name: str, kind: int) -> Change:
    def change(writer: GGUFWriter) -> None:
        writer.tensors[0][name].dtype = kind  # type: ignore[assignment]

    return change


def renamed(name: str, to: str | None) -> Change:
    """None removes the tensor."""

    def change(writer: GGUFWriter) -> None:
        tensors = writer.tensors[0]
        names = {old: to if old == name else old for old in tensors}
        writer.tensors[0] = {new: tensors[old] for old, new in names.items() if new is not None}

    return change


@pytest.mark.parametrize("key", KEYS)
def test_whatever_a_value_is(key: str, tmp_path: Path) -> None:
    for number, value in enumerate(ANY):
        check(written(tmp_path / f"{number}.gguf", setting(key, value)))


@pytest.mark.parametrize("key", LISTS)
def test_whatever_a_list_holds(key: str, tmp_path: Path) -> None:
    whole, size = LISTS[key], len(LISTS[key])
    lists = (whole[:-1], whole[:1], [*whole, whole[0]], whole[::-1])
    filled = [[value] * size for value in (7, -1, "x", "x y z", "a b", 1.5, math.nan, [1])]
    others = (None, 7, "x", [f"a{number}" for number in range(size)])
    for number, value in enumerate((*lists, *filled, *others)):
        check(written(tmp_path / f"{number}.gguf", setting(key, value)))


SHAPES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "transposed": lambda shape: shape[::-1],
    "fewer rows": lambda shape: (shape[0] // 2, *shape[1:]),
    "more rows": lambda shape: (shape[0] * 2, *shape[1:]),
    "no rows": lambda shape: (0, *shape[1:]),
    "beyond the file": lambda shape: (2**40, *shape[1:]),
    "beyond 64 bits": lambda shape: (2**63, *shape[1:]),
    "flat": lambda shape: (math.prod(shape),),
    "narrow": lambda shape: (*shape[:-1], shape[-1] // 2),
    "deep": lambda shape: (1, *shape),
}


@pytest.mark.parametrize("name", TENSORS)
def test_whatever_a_tensor_is(name: str, tmp_path: Path) -> None:
    changes = [shaped(name, shape) for shape in SHAPES.values()]
    changes += [of_kind(name, kind) for kind in (*GGMLQuantizationType, 99)]
    changes += [renamed(name, to) for to in (None, "output.weight", "blk.7.ffn_up.weight", "blk.x.ffn_up.weight", "x")]
    for number, change in enumerate(changes):
        check(written(tmp_path / f"{number}.gguf", change))


@pytest.mark.parametrize("name", TENSORS)
def test_wherever_a_tensor_begins(name: str, tmp_path: Path) -> None:
    for number, offset in enumerate((1, 32, 2**20, 2**40, 2**63, 2**64 - 32)):
        path = written(tmp_path / f"{number}.gguf", lambda writer: None)
        content = bytearray(path.read_bytes())
        place = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        place += 4 + 8 * int.from_bytes(content[place : place + 4], "little") + 4
        struct.pack_into("<Q", content, place, offset)
        path.write_bytes(content)
        assert not check(path)


def test_the_file_itself_is_served(tmp_path: Path) -> None:
    assert check(written(tmp_path / "tiny.gguf", lambda writer: None))
