"""A GGUF file as a folder in mlx-lm's format, written a file of weights after the other.

`weights.py` has the layout of the tensors, `architectures.py` their names and the configuration, `tokenizer.py` the
tokenizer. What is read of the file is mapped, and written in shards. A shard appears by one rename: a conversion that
was cut off goes on with the next one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from gguf import GGUFReader

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.conversions import save_shard, write_index, write_json
from mlx_server.runtime.models.folder import is_whole_file, read_headers
from mlx_server.runtime.models.gguf import WeightFormat
from mlx_server.runtime.models.gguf.architectures import (
    ROPE_TENSORS,
    Architecture,
    Facts,
    common_config,
    find_architecture,
)
from mlx_server.runtime.models.gguf.tokenizer import check_vocabulary, special_ids, write_tokenizer
from mlx_server.runtime.models.gguf.weights import GROUP_SIZE, Loss, bits_of, convert_tensor, expand_tensor
from mlx_server.runtime.models.progress import Report

logger = logging.getLogger(__name__)

_SHARD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class _Shard:
    """Tensors that become one file of weights."""

    file_name: str
    tensors: Sequence[Any]

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.n_bytes) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be done with the tensors of a file: `targets` are mlx-lm's names for them."""

    metadata: Mapping[str, Any]
    tensors: Sequence[Any]
    architecture: Architecture
    facts: Facts
    targets: Mapping[str, str]
    weight_format: WeightFormat

    @classmethod
    def of(cls, sources: Sequence[Path], weight_format: WeightFormat) -> Conversion:
        """Reads the metadata of a model's files. Raises `ModelLoadError`."""
        readers = [_open(path) for path in sources]
        metadata = {name: field.contents() for name, field in readers[0].fields.items()}
        found = [tensor for reader in readers for tensor in reader.tensors]
        architecture = find_architecture(str(metadata.get("general.architecture")), str(sources[0]))
        check_vocabulary(metadata, sources[0])
        shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in found}
        factors = {tensor.name: np.array(tensor.data) for tensor in found if tensor.name in ROPE_TENSORS}
        tensors = [tensor for tensor in found if tensor.name not in ROPE_TENSORS]
        targets = {tensor.name: architecture.target(tensor.name) for tensor in tensors}
        facts = Facts(metadata, shapes, factors)
        return cls(metadata, tensors, architecture, facts, targets, weight_format)

    @property
    def _is_packed(self) -> bool:
        return self.weight_format is WeightFormat.PACKED

    def write(self, folder: Path, report: Report) -> None:
        """As `convert_gguf`."""
        config = self._config()
        write_tokenizer(self.metadata, config["max_position_embeddings"], folder)
        loss, index = Loss(), {}
        for shard in _shards(self.tensors):
            path = folder / shard.file_name
            was_kept = is_whole_file(path)
            if not was_kept:
                self._write_shard(shard, path)
            loss.join(_kept_loss(path))
            index.update(dict.fromkeys(read_headers(path), shard.file_name))
            report(shard.num_bytes, was_kept=was_kept)
        if len(set(index.values())) > 1:
            write_index(folder, index)
        if self._is_packed:
            _tell(loss)
        write_json(folder / "config.json", config)

    def _config(self) -> dict[str, Any]:
        config = {
            "model_type": self.architecture.model_type,
            **common_config(self.facts),
            **self.architecture.configure(self.facts),
            **special_ids(self.metadata),
            "torch_dtype": str(self.architecture.dtype).rpartition(".")[2] if self._is_packed else "float32",
        }
        return {**config, "quantization": self._quantization()} if self._is_packed else config

    def _quantization(self) -> dict[str, Any]:
        """mlx-lm's description: 4 bits, and by name the modules that differ."""
        quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
        for tensor in self.tensors:
            bits = bits_of(tensor.tensor_type) if len(tensor.shape) > 1 else None
            if bits is not None and bits != 4:
                module = self.targets[tensor.name].removesuffix(".weight")
                quantization[module] = {"group_size": GROUP_SIZE, "bits": bits}
        return quantization

    def _write_shard(self, shard: _Shard, path: Path) -> None:
        """The loss is written into it, for whoever goes on."""
        loss, weights = Loss(), {}
        for tensor in shard.tensors:
            weights.update(self._named(tensor, loss))
        save_shard(path, weights, {"loss": json.dumps(loss.by_kind)})

    def _named(self, tensor: Any, loss: Loss) -> dict[str, mx.array]:
        """A tensor as mlx-lm has it, under mlx-lm's names."""
        architecture, part = self.architecture, tensor.name.split(".")[-2]
        module, _, kind = self.targets[tensor.name].rpartition(".")
        if architecture.norm_offset and part.endswith("norm"):
            whole = expand_tensor(tensor.name, tensor) - architecture.norm_offset
            parts = {"weight": whole.astype(architecture.dtype) if self._is_packed else whole}
        elif self._is_packed:
            parts = convert_tensor(tensor.name, tensor, architecture.dtype, loss)
        else:
            parts = {"weight": expand_tensor(tensor.name, tensor)}
        if architecture.has_rotary_order and part in ("attn_q", "attn_k"):
            num_heads = self.facts.num_heads if part == "attn_q" else self.facts.num_kv_heads
            parts = {name: _undo_rotary_order(rows, num_heads) for name, rows in parts.items()}
        if kind == "bias":
            parts = {"bias": parts["weight"]}
        mx.eval(parts)
        return {f"{module}.{name}": array for name, array in parts.items()}


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except Exception as error:  # its reader checks little
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error


def _shards(tensors: Sequence[Any]) -> Iterator[_Shard]:
    """In the file's order. One file has the name that mlx-lm gives a single one."""
    parts: list[list[Any]] = [[]]
    held = 0
    for tensor in tensors:
        if held and held + int(tensor.n_bytes) > _SHARD_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(tensor)
        held += int(tensor.n_bytes)
    for rank, part in enumerate(parts, 1):
        name = f"model-{rank:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        yield _Shard(name, part)


def _undo_rotary_order(rows: mx.array, num_heads: int) -> mx.array:
    """GGUF interleaves the two halves of each head, `[heads, dim / 2, 2]`; mlx-lm has `[heads, 2, dim / 2]`."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return split.swapaxes(1, 2).reshape(rows.shape)


def _kept_loss(path: Path) -> Loss:
    _, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True))
    return Loss({kind: tuple(sums) for kind, sums in json.loads(metadata["loss"]).items()})


def _tell(loss: Loss) -> None:
    """Which types were kept, and how far the others are from the file's numbers."""
    for kind, error in loss.relative().items():
        if error == 0.0:
            logger.info("%s is kept as it is.", kind)
        else:
            logger.info(
                "%s: converted weights differ by %.2g %% of the file's (root of mean squares).", kind, 100 * error
            )
