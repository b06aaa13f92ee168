"""Converts a GGUF file to a folder in mlx-lm's format.

`weights.py` has the layout of the tensors, `architectures.py` their names and the configuration, `tokenizer.py` the
tokenizer. The file is mapped into memory, and the weights are written in several files, so that memory is needed for
one of them at a time.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGUFReader, GGUFValueType
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.blueprint import build_blank
from mlx_server.runtime.models.gguf import WeightFormat
from mlx_server.runtime.models.gguf.architectures import (
    ROPE_TENSORS,
    Architecture,
    Facts,
    common_config,
    find_architecture,
)
from mlx_server.runtime.models.gguf.tokenizer import check_vocabulary, special_ids, write_tokenizer
from mlx_server.runtime.models.gguf.weights import GROUP_SIZE, bits_of, convert_tensor, expand_tensor
from mlx_server.runtime.models.made_folders import write_json, write_weights
from mlx_server.runtime.models.progress import Report


@dataclass(frozen=True, slots=True)
class Conversion:
    """A file that was read: its tensors by name, and mlx-lm's names for them (`targets`)."""

    tensors: Mapping[str, Any]
    architecture: Architecture
    facts: Facts
    targets: Mapping[str, str]
    weight_format: WeightFormat

    @classmethod
    def of(cls, sources: Sequence[Path], weight_format: WeightFormat) -> Conversion:
        """Reads the metadata of a model's files. Raises `ModelLoadError`."""
        files = [_read(path) for path in sources]
        metadata, found = files[0][0], [tensor for _, tensors in files for tensor in tensors]
        architecture = find_architecture(str(metadata.get("general.architecture")))
        shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in found}
        factors = {tensor.name: np.array(tensor.data) for tensor in found if tensor.name in ROPE_TENSORS}
        tensors = {tensor.name: tensor for tensor in found if tensor.name not in ROPE_TENSORS}
        targets = {name: architecture.target(name) for name in tensors}
        return cls(tensors, architecture, Facts(metadata, shapes, factors), targets, weight_format)

    @property
    def _is_packed(self) -> bool:
        return self.weight_format is WeightFormat.PACKED

    def write(self, folder: Path, report: Report) -> None:
        """As `convert_gguf`."""
        config = self._config()
        self._check_shapes(config)
        write_tokenizer(self.facts.metadata, config["max_position_embeddings"], folder)
        sizes = {name: int(tensor.n_bytes) for name, tensor in self.tensors.items()}

        def read(name: str) -> dict[str, mx.array]:
            weights = self._named(self.tensors[name])
            report(sizes[name])
            return weights

        write_weights(folder, sizes, read)
        write_json(folder / "config.json", config)

    def _config(self) -> dict[str, Any]:
        common = common_config(self.facts)
        check_vocabulary(self.facts.metadata, common["vocab_size"])
        config = {
            "model_type": self.architecture.model_type,
            **common,
            **self.architecture.configure(self.facts),
            **special_ids(self.facts.metadata),
            "torch_dtype": str(self.architecture.dtype).rpartition(".")[2] if self._is_packed else "float32",
        }
        return {**config, **self._quantization()} if self._is_packed else config

    def _check_shapes(self, config: Mapping[str, Any]) -> None:
        """Raises `ModelLoadError` unless mlx-lm's model of this configuration has exactly the file's tensors."""
        num_layers = len({name.split(".")[1] for name in self.tensors if name.startswith("blk.")})
        if num_layers != config["num_hidden_layers"]:  # before a billion are built
            raise ModelLoadError(
                f"It has {num_layers} layers, and {self.facts.architecture}.block_count is "
                f"{config['num_hidden_layers']}."
            )
        wanted = {name: array.shape for name, array in tree_flatten(build_blank(config, mx.float16).parameters())}
        for name, target in self.targets.items():
            if (shape := self.facts.shapes[name]) != wanted.pop(target, None):
                raise ModelLoadError(f"Its tensor {name} of the shape {shape} contradicts its metadata.")
        missing = [name for name in wanted if not (config["tie_word_embeddings"] and name.startswith("lm_head"))]
        if missing:
            raise ModelLoadError(f"It has no tensor for mlx-lm's {missing[0]}.")

    def _quantization(self) -> dict[str, Any]:
        """mlx-lm's description: the bits of most modules, and other modules by name; empty if none is quantized."""
        matrices = ((name, tensor) for name, tensor in self.tensors.items() if len(tensor.shape) > 1)
        bits_by_name = {self.targets[name]: bits_of(tensor.tensor_type) for name, tensor in matrices}
        counts = Counter(bits for bits in bits_by_name.values() if bits is not None)
        if not counts:
            return {}
        [(usual, _)] = counts.most_common(1)
        quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual}
        for name, bits in bits_by_name.items():
            if bits not in (None, usual):
                quantization[name.removesuffix(".weight")] = {"group_size": GROUP_SIZE, "bits": bits}
        return {"quantization": quantization}

    def _named(self, tensor: Any) -> dict[str, mx.array]:
        """A tensor in mlx-lm's form, under mlx-lm's names."""
        architecture, part = self.architecture, tensor.name.split(".")[-2]
        module, _, kind = self.targets[tensor.name].rpartition(".")
        if architecture.norm_offset and part.endswith("norm"):
            whole = expand_tensor(tensor.name, tensor) - architecture.norm_offset
            parts = {"weight": whole.astype(architecture.dtype) if self._is_packed else whole}
        elif self._is_packed:
            parts = convert_tensor(tensor.name, tensor, architecture.dtype)
        else:
            parts = {"weight": expand_tensor(tensor.name, tensor)}
        if architecture.has_rotary_order and part in ("attn_q", "attn_k"):
            num_heads = self.facts.num_heads if part == "attn_q" else self.facts.num_kv_heads
            parts = {name: _undo_rotary_order(rows, num_heads) for name, rows in parts.items()}
        if kind == "bias":
            parts = {"bias": parts["weight"]}
        mx.eval(parts)
        return {f"{module}.{name}": array for name, array in parts.items()}


class _Reader(GGUFReader):  # type: ignore[misc]
    """The package's reader, which calls itself for each element of an array: half a second for a vocabulary. This one
    reads an array at once, as one part of numbers or a part for each string. An array ends within the file."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if self.byte_order != "I":  # the package does not swap the scales of blocks
            little = "`gguf-convert-endian FILE little` of the package gguf"
            raise ValueError(f"it is big-endian, and only little-endian files are read; {little} changes it")
        start = orig_offs + 12
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        raw_kind, count = struct.unpack("=IQ", self.data[orig_offs:start])
        kind = GGUFValueType(raw_kind)
        parts: list[Any] = []
        if kind is GGUFValueType.STRING:
            memory, end = memoryview(self.data), start
            for _ in range(count):
                (size,) = struct.unpack_from("=Q", memory, end)
                parts.append(memory[end + 8 : (end := end + 8 + size)])
        elif kind in self.gguf_scalar_to_np:
            parts = [self._get(start, self.gguf_scalar_to_np[kind], count)]
            end = start + count * parts[0].itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        if end > len(self.data):
            raise ValueError(f"an array of {count} elements ends {end - len(self.data)} bytes after the file")
        return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, kind]


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The metadata and the tensors of a file."""
    try:
        reader, end = _Reader(path), 0
        for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end:
                raise ValueError(f"{tensor.name} begins within another tensor")
            end = tensor.data_offset + int(tensor.n_bytes)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except Exception as error:  # the package's reader checks little
        raise ModelLoadError(f"{path.name} is not a readable GGUF file: {error}.") from error


def _undo_rotary_order(rows: mx.array, num_heads: int) -> mx.array:
    """GGUF interleaves the two halves of each head, `[heads, dim / 2, 2]`; mlx-lm expects `[heads, 2, dim / 2]`."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return split.swapaxes(1, 2).reshape(rows.shape)
