"""Facts about a model on this machine, and whether it fits, read from its folder without loading it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.config import DEFAULT_MODEL, Config, ModelConfig
from mlx_server.engine.embeddings import capabilities
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.models.store import StoredModel, find_pulled
from mlx_server.environment import expanded
from mlx_server.errors import ModelLoadError, ServeError
from mlx_server.runtime.models.blueprint import why_no_vision
from mlx_server.runtime.models.folder import CONTEXT_KEYS, TensorHeader, read_headers
from mlx_server.runtime.models.made_folders import find_converted
from mlx_server.runtime.models.progress import progress_of
from mlx_server.runtime.pooling import read_pooling

_DTYPES = ("BF16", "F16", "F32")
_MAX_LICENSE_BYTES = 64 * 1024
_NO_CONTEXT = 2**31
"""A context length of so many tokens or more means no limit."""
_REASONING_WORDS = ("enable_thinking", "reasoning_content", "<think>", "reasoning_effort")
"""Words in the templates of models that reason."""

_PACKED = "U32"
"""Words of quantized weights, 32 bits each."""

_Tensors = Mapping[str, TensorHeader]
"""Of one file."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`folder` is the model's folder. `config` is config.json, with the text part's values on top if there is one.
    `digest` (SHA-256, hexadecimal) changes with the folder's content, `modified_s` is the time of the last change.
    `quantization` is like `Q4` or `BF16`, empty if unknown. `license` is empty if no file has it."""

    folder: Path
    num_bytes: int
    modified_s: float
    digest: str
    config: Mapping[str, Any]
    num_parameters: int
    quantization: str
    chat_template: str
    license: str
    may_see: bool
    """Whether images are supported for such models, and the packages for them are installed."""

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def context_length(self) -> int:
        """The model's context length in tokens; 0 if its config does not say."""
        lengths = (self.config.get(key) for key in CONTEXT_KEYS)
        return next((length for length in lengths if type(length) is int and 0 < length < _NO_CONTEXT), 0)

    def capabilities(self, name: str, pooling: str, sees: bool | None = None) -> list[str]:
        """The capabilities of the model `name` with the setting `pooling`, in Ollama's words; none if loading would
        fail with it. `sees` says whether it reads images; None if that is not known before it is loaded. Every chat
        model has tools: if its template has no place for them, they are explained in words."""
        try:
            spec = read_pooling(self.folder, name, self.config, pooling)
            kinds = capabilities(spec, sees=self.may_see if sees is None else sees)
        except ModelLoadError:
            return []
        if "completion" not in kinds or not self.chat_template:
            return kinds
        thinks = any(word in self.chat_template for word in _REASONING_WORDS)
        return [*kinds, "tools", *(["thinking"] if thinks else [])]


def folder_of(model: str) -> Path | None:
    """The folder of a model that is configured as a folder, a GGUF file, a hub id or the bundled model; None if it is
    not on this machine."""
    path = expanded(model)
    if path.suffix == ".gguf" and path.is_file():
        return find_converted(path)
    return path if model != DEFAULT_MODEL and path.is_dir() else find_pulled(model)


def read_facts(model: str) -> ModelFacts | None:
    """The facts of a configured model; None if it is not on this machine, or not a model. Cached until its files
    change. Reads files: not for the event loop."""
    folder = folder_of(model)
    if folder is None:
        return None
    try:
        files = sorted((path.name, path.stat().st_size, path.stat().st_mtime) for path in folder.iterdir())
        return _read(folder, tuple(files))
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return None  # files with unexpected content


def read_preparation(model: str) -> dict[str, Any] | None:
    """The progress of a model's folder that is being fetched or converted, by its configured name; None if there is
    none. Any thread."""
    progress = progress_of(model)
    return None if progress is None else progress.reading()


@functools.lru_cache(maxsize=256)
def _read(folder: Path, files: tuple[tuple[str, int, float], ...]) -> ModelFacts:
    """`files` are the folder's names, sizes and times: the cache key that shows changes."""
    text = (folder / "config.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    inner = whole.get("text_config") or whole.get("llm_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    sizes = [(name, size) for name, size, _ in files]
    headers = list(_headers(folder))
    return ModelFacts(
        folder=folder,
        num_bytes=sum(size for _, size in sizes),
        modified_s=max(time_s for *_, time_s in files),
        digest=hashlib.sha256(repr((sizes, text)).encode()).hexdigest(),
        config=config,
        num_parameters=_num_parameters(headers, config),
        quantization=_quantization(headers, config),
        chat_template=_chat_template(folder),
        license=_license(folder),
        may_see=_may_see(folder),
    )


def _may_see(folder: Path) -> bool:
    try:
        return not why_no_vision(folder)
    except ModelLoadError:
        return False


def _headers(folder: Path) -> Iterator[_Tensors]:
    for path in sorted(folder.glob("model*.safetensors")):
        with contextlib.suppress(ModelLoadError):
            yield read_headers(path)


def _num_parameters(headers: Sequence[_Tensors], config: Mapping[str, Any]) -> int:
    """A 32-bit word holds 32 / bits weights, with the bits of its layer or of the model. Scales and biases of quantized
    weights do not count."""
    total = 0
    for tensors in headers:
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            is_packed = tensors.get(f"{stem}.weight", {}).get("dtype") == _PACKED
            if is_packed and kind in ("scales", "biases"):
                continue
            num_words = math.prod(tensor["shape"])
            bits = _bits(config, stem) or _bits(config) or 32
            total += num_words * 32 // bits if is_packed and kind == "weight" else num_words
    return total


def _bits(config: Mapping[str, Any], layer: str | None = None) -> int | None:
    """The bits of all quantized layers, or those of one layer if it differs."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if layer is not None and isinstance(quantization, Mapping):
        quantization = quantization.get(layer)
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    return bits if isinstance(bits, int) and 0 < bits <= 32 else None


def _quantization(headers: Sequence[_Tensors], config: Mapping[str, Any]) -> str:
    bits = _bits(config)
    if bits is not None:
        return f"Q{bits}"
    kinds = Counter(tensor.get("dtype", "") for tensors in headers for tensor in tensors.values())
    return next((kind for kind, _ in kinds.most_common(1) if kind in _DTYPES), "")


def _chat_template(folder: Path) -> str:
    """The chat template, or the default one of several; empty if there is none."""
    with contextlib.suppress(OSError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else ""


def _license(folder: Path) -> str:
    for path in sorted(folder.glob("LICENSE*")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            return file.read(_MAX_LICENSE_BYTES).decode("utf-8", errors="replace")
    return ""


@dataclass(frozen=True, slots=True)
class ModelFit:
    """`weights` is like `Q4` or `BF16`, empty if unknown; `context_length` is 0 if unknown. `need_bytes` is the need
    with default settings; None if the model cannot be loaded, with the `reason`. `fits` is `yes`, `not now` (other
    programs use the memory), or `no`."""

    weights: str = ""
    context_length: int = 0
    need_bytes: int | None = None
    fits: str = "no"
    reason: str = ""


def fits_of(models: Sequence[StoredModel], config: Config) -> Iterator[ModelFit]:
    """Yields whether each model fits within the limits of `config.memory`. Reads files and this machine's memory."""
    budget = MemoryBudget.of(config.memory)
    for model in models:
        folder = find_pulled(model.name) if model.place == "hub" else model.folder
        facts = None if folder is None else read_facts(str(folder))
        if facts is None:
            yield ModelFit(reason="it is incomplete: `mlx-serve pull` fetches the rest")
            continue
        fit = ModelFit(facts.quantization, facts.context_length)
        try:
            need = estimate_need(Config(model=ModelConfig(model=str(folder)))).total_bytes
        except Exception as error:  # a folder may hold anything
            reason = str(error) if isinstance(error, ServeError) else f"its files are invalid ({error!r})"
            yield ModelFit(fit.weights, fit.context_length, reason=reason)
            continue
        fits = "no" if need > budget.limit_bytes else "yes" if need <= budget.free_bytes else "not now"
        yield ModelFit(fit.weights, fit.context_length, need, fits)
