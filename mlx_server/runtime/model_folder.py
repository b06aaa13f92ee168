"""What a folder must hold to be a model in mlx-lm format, judged without loading it."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.tensor_headers import whole_bytes

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "vocab.txt")
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def missing_parts(folder: Path) -> list[str]:
    """What stands between `folder` and being loaded, in words for the user; empty when it is complete."""
    return [*_config_faults(folder), *_weight_faults(folder), *_tokenizer_faults(folder)]


def _config_faults(folder: Path) -> list[str]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ["config.json"]
    except (OSError, ValueError) as error:
        return [f"a readable config.json ({error})"]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return ["model_type in config.json"]
    return []


def _weight_faults(folder: Path) -> list[str]:
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not present:
        others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
        hint = f" (it has {others[0]}; `mlx_lm.convert` turns such weights into this format)" if others else ""
        return [f"weights, model*.safetensors{hint}"]
    lacking = [f"the weights {name}" for name in _indexed_files(folder) if name not in present]
    return lacking + [fault for name in sorted(present) if (fault := _file_fault(folder / name)) is not None]


def _file_fault(path: Path) -> str | None:
    """What is wrong with a file of weights, as far as its header and its length tell: a copy or a download that was cut
    short."""
    try:
        wanted, there = whole_bytes(path), path.stat().st_size
    except (ModelLoadError, OSError):
        return f"readable weights in {path.name}, which is broken (fetch it again)"
    if there >= wanted:
        return None
    return f"the rest of {path.name}, of which {there:,} of {wanted:,} bytes are there (fetch it again)"


def _indexed_files(folder: Path) -> list[str]:
    """The shards that the index names; none when the weights are in one file."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["named by model.safetensors.index.json, which is unreadable"]


def _tokenizer_faults(folder: Path) -> list[str]:
    if any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return []
    return ["a tokenizer (tokenizer.json or tokenizer.model)"]
