"""Checks that a folder holds a complete model in mlx-lm format without loading it: by the names of its files, by the
headers of its safetensors files, and by the manifest of a folder that this server made."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.errors import ModelLoadError
from mlx_server.outputs import HELD_BY_ASSISTANTS, HELD_FEATURES, HELD_STATES, num_with_features

TensorHeader = dict[str, Any]
"""`dtype` in safetensors' names, `shape`, and `data_offsets` within the file's data."""

CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_seq_len",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
"""Names under which a `config.json` may give the context length; the first one present counts."""

HUB_FILES = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.py",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "tiktoken.model",
    "model*.safetensors",
    "mtp*.safetensors",
    "*_Dense/model.safetensors",
)
"""The files that are fetched from a model on the hub."""

_MAX_BYTES = 100 * 2**20
_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a safetensors file. `num_bytes` is the length of the complete file."""

    tensors: dict[str, TensorHeader]
    num_bytes: int


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The headers of all tensors, by name. Raises `ModelLoadError` if the file is missing, broken or not
    safetensors."""
    return _read(path).tensors


def _read(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_BYTES:
                raise ValueError("no header")
            tensors = dict(_parsed(file.read(length)))
        tensors.pop("__metadata__", None)
        if not all(map(_is_tensor, tensors.values())):
            raise ValueError("no tensors")
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file, or is broken; fetch it again.") from error
    return _Header(tensors, 8 + length + end)


def _is_tensor(found: Any) -> bool:
    """Whether an entry of a header describes a tensor. The file may come from anyone."""
    if not isinstance(found, dict) or not isinstance(found.get("dtype"), str):
        return False
    shape, span = found.get("shape"), found.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(span, list) or len(span) != 2:
        return False
    return all(type(number) is int and number >= 0 for number in (*shape, *span))


def _parsed(text: str | bytes) -> Any:
    """Raises `ValueError` for invalid JSON and for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_model_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file. Raises `ModelLoadError`."""
    if not path.is_file():
        return {}
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Pull the model again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object. Pull the model again.")
    if isinstance(content.get("llm_config"), dict):  # InternVL's name for it
        content.setdefault("text_config", content.pop("llm_config"))
    return content


def added_token_id(folder: Path, token: str) -> int | None:
    """The id of a token that a folder's tokenizer adds to its vocabulary; None if there is none, or if only another
    kind of file names it. Raises `ModelLoadError`."""
    added = read_model_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    ids = {entry.get("content"): token_id for token_id, entry in added.items()}
    for entry in read_model_json(folder / "tokenizer.json").get("added_tokens") or ():
        ids[entry.get("content")] = entry.get("id")
    return int(ids[token]) if token in ids else None


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "vocab.txt")
_OTHER_WEIGHTS = ("*.gguf", "*.safetensors", "*.bin", "*.pt", "*.pth")


def matching(folder: Path, pattern: str) -> list[Path]:
    """What matches in `folder`, sorted, without the companions (`._NAME`) that macOS writes beside files on disks which
    cannot keep its attributes, like exFAT's and SMB's."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("._"))


def missing_parts(folder: Path) -> list[str]:
    """What is missing before `folder` can be loaded, in words for the user; empty if it is complete."""
    faults = _config_faults(folder)
    needs_tokenizer = bool(faults) or not only_drafts(read_model_json(folder / "config.json"))
    return [*faults, *_weight_faults(folder), *(_tokenizer_faults(folder) if needs_tokenizer else ())]


SLIDING = "sliding_attention"
"""Among the `layer_types` of a config.json, a layer with a window."""


def is_block_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a block drafter (`drafts/block_drafter.py`)."""
    return isinstance(config.get("dflash_config"), dict) or _speculator(config) in ("dflash", "dflash2")


def _speculator(config: Mapping[str, Any]) -> object:
    return config.get("speculators_model_type")


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a Gemma 4 model's assistant (`drafts/assistant.py`)."""
    return config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")


_EAGLE = re.compile(r"eagle3(\w*ForCausalLM|DraftModel)?$", re.IGNORECASE)


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an EAGLE-3 drafter (`drafts/eagle.py`)."""
    kinds = [_speculator(config), *(config.get("architectures") or ())]
    return any(_EAGLE.search(str(kind)) for kind in kinds)


def only_drafts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model that only drafts for another one, with that one's tokenizer."""
    return is_block_drafter(config) or is_assistant(config) or is_eagle(config) or _foreign_kind(config) is not None


_FOREIGN = re.compile(r"\w+_(mtp|dflash|dspark|assistant)|dspark")
"""Types of mlx-vlm's drafters; those of other forms are recognized before."""


def _foreign_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of a drafter that cannot be used here; None for others."""
    if is_block_drafter(config) or is_assistant(config):
        return None
    if (kind := _speculator(config)) is not None:
        return None if kind == "eagle3" else str(kind)
    kind = str(config.get("model_type"))
    return kind if _FOREIGN.fullmatch(kind) and not is_eagle(config) else None


def refuse_foreign(config: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` for a config.json of a drafter that cannot be used here."""
    if (kind := _foreign_kind(config)) is not None:
        raise ModelLoadError(
            f"Drafters of the kind {kind} are not supported: take one of EAGLE-3, DFlash or Gemma 4's assistants, or "
            "the model's own heads as its makers publish them (--speculate mtp, --mtp-from)."
        )


def drafter_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the layers of a drafter, which vLLM's speculators have in an object of its own. Rope is in
    the older form of the two that transformers has had; if it differs by the types of the model's layers, speculators
    train with that of layers with a window."""
    layers = dict(config.get("transformer_layer_config") or config)
    if rope := layers.pop("rope_parameters", None):
        rope = rope.get(SLIDING) or rope
        layers |= {"rope_theta": rope.get("rope_theta", layers.get("rope_theta", 10_000.0)), "rope_scaling": rope}
    return layers


def eagle_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a Llama with the layers of an EAGLE-3 drafter."""
    return {**drafter_layers(config), "model_type": "llama", "architectures": None}


def block_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a Qwen3 with the layers of a block drafter, and with what a config.json says of it besides,
    in the form of its authors or of vLLM's speculators. Those name the layers that are read by their inputs."""
    given = {**config, **drafter_layers(config), **(config.get("dflash_config") or {})}
    if inputs := given.get("aux_hidden_state_layer_ids"):
        given["target_layer_ids"] = [int(layer_id) - 1 for layer_id in inputs]
    unread = dict.fromkeys(("architectures", "dflash_config", "transformer_layer_config", "rope_parameters"))
    return {**given, **unread, "model_type": "qwen3", "tie_word_embeddings": True}


def drafter_as_model(config: Mapping[str, Any], max_num_seqs: int) -> tuple[dict[str, Any], int]:
    """The configuration of a model with the layers of one that `only_drafts`, or for an assistant, which keeps no K/V,
    its own; and how many numbers the server keeps for it of at most `max_num_seqs` running requests. Raises
    `ModelLoadError` for a drafter of a kind that cannot be used here."""
    refuse_foreign(config)
    if is_assistant(config):
        return {**config}, max_num_seqs * HELD_BY_ASSISTANTS * int(config.get("backbone_hidden_size", 0))
    if is_block_drafter(config):
        layers, held = block_layers(config), num_with_features(max_num_seqs) * HELD_FEATURES
    else:
        layers, held = eagle_layers(config), max_num_seqs * HELD_STATES
    rope = layers.get("rope_scaling")
    share = {**layers, **(rope if isinstance(rope, dict) else {})}.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ModelLoadError(
            f"Drafters whose partial_rotary_factor is {share} are not supported: the factor must be 1; take another "
            "drafter of this model, or none."
        )
    layers |= {"speculators_model_type": None, "layer_types": None}
    return layers, held * int(layers.get("hidden_size", 0))


_TYPES = {
    "architectures": (list, "a list"),
    "text_config": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "eagle_config": (dict, "an object"),
    "transformer_layer_config": (dict, "an object"),
}
"""What values of a config.json must be if they are there."""

_NUMBERS = re.compile(r"num_\w+|\w+_(size|dim|eps|theta|factor|layer_ids)|sliding_window|mask_token_id")
"""Names of numbers and of lists of numbers."""


_BOUNDS: tuple[tuple[re.Pattern[str], Callable[[float], bool], str], ...] = (
    (_NUMBERS, lambda number: abs(number) < 2**63, "a finite number of 64 bits"),
    (re.compile("(num|n)_(hidden_)?layers?"), lambda number: number <= _MAX_LAYERS, f"at most {_MAX_LAYERS:,}"),
    (re.compile("group_size"), bool, "a positive number"),
)
"""What numbers must be that would otherwise be computed with for hours, or end the process."""


def _config_faults(folder: Path) -> list[str]:
    try:
        config = _parsed((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ["config.json"]
    except (OSError, ValueError) as error:
        return [f"a readable config.json ({error})"]
    if not isinstance(config, dict):
        return ["model_type in config.json"]
    tables = [config]
    for table in tables:
        tables += [value for value in table.values() if isinstance(value, dict)]
    faults = [
        f"{words} as {name} in config.json"
        for table in tables
        for name, (kind, words) in _TYPES.items()
        if not isinstance(table.get(name) or kind(), kind)
    ]
    faults += [
        f"a number instead of {value!r:.40} as {name} in config.json"
        for table in tables
        for name, value in table.items()
        if _NUMBERS.fullmatch(name)
        and (_has_text(value) or (name.endswith("hidden_size") and isinstance(value, list | dict)))
    ]
    faults += [
        f"{words} instead of {value!r:.40} as {name} in config.json"
        for table in tables
        for name, value in table.items()
        for pattern, is_right, words in _BOUNDS
        if pattern.fullmatch(name) and isinstance(value, int | float) and not is_right(value)
    ]
    if not faults and not (isinstance(config.get("model_type"), str) or only_drafts(config)):
        faults = ["model_type in config.json"]
    return faults


def _has_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(map(_has_text, value)))


def _weight_faults(folder: Path) -> list[str]:
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not present:
        return [f"weights, model*.safetensors{_hint(folder)}"]
    missing = [f"the weights {name}" for name in _indexed_files(folder) if not (folder / name).is_file()]
    return missing + [fault for name in sorted(present) if (fault := _file_fault(folder / name)) is not None]


def _file_fault(path: Path) -> str | None:
    """What is wrong with a file of weights, by its header and its length: a copy or a download may be cut short."""
    try:
        expected, found = _read(path).num_bytes, path.stat().st_size
    except (ModelLoadError, OSError):
        return f"readable weights in {path.name}, which is broken (fetch it again)"
    if found >= expected:
        return None
    return f"the rest of {path.name}, of which {found:,} of {expected:,} bytes are there (fetch it again)"


def _hint(folder: Path) -> str:
    """What the user can do with weights in another format."""
    others = [path for pattern in _OTHER_WEIGHTS for path in matching(folder, pattern)]
    if not others:
        return ""
    if others[0].suffix == ".gguf":
        return f" (it has GGUF files: serve one of them, {others[0]})"
    if others[0].suffix == ".safetensors":
        return f" (it has {others[0].name}; name the files model*.safetensors)"
    return (
        f" (it has {others[0].name}, which is not read because reading it may run code; look for the same model in "
        "safetensors, or load it with transformers and call save_pretrained)"
    )


def _indexed_files(folder: Path) -> list[str]:
    """The shards that the index names; empty if the weights are in one file."""
    try:
        index = _parsed((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["named by model.safetensors.index.json, which is unreadable"]


def _tokenizer_faults(folder: Path) -> list[str]:
    if any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return []
    return ["a tokenizer (tokenizer.json or tokenizer.model)"]


_MANIFEST = "files.json"


def write_manifest(folder: Path) -> None:
    """Records the length of each file directly in `folder`, and syncs all to the disk, so that a power failure cannot
    damage the folder later."""
    sizes = {path.name: path.stat().st_size for path in matching(folder, "*") if path.is_file()}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def damaged_files(folder: Path) -> list[str]:
    """The names of files whose length differs from the manifest; the manifest's own name if it cannot be read or a file
    is missing."""
    try:
        sizes = _parsed((folder / _MANIFEST).read_text(encoding="utf-8"))
        return [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, AttributeError):
        return [_MANIFEST]


def sha256_of(path: Path) -> str:
    """The digest of a whole file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
