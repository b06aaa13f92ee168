"""The options of `LLM` and `AsyncLLM`, and the configuration of an engine made of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from mlx_server.config import Config, load_config
from mlx_server.engine.parts import GivenModels
from mlx_server.errors import ConfigError
from mlx_server.runtime.models.loader import LoadedModel

Folder: TypeAlias = str | os.PathLike[str]
Model: TypeAlias = Folder | LoadedModel
"""A name, a folder or a file as the server's `--model` takes it, or a model that is loaded already."""


class EngineOptions(TypedDict, total=False):
    """What `LLM` and `AsyncLLM` take besides the model: settings of the server, with their defaults, and `adapters` and
    `max_chunk_tokens`.

    `draft_model` is a smaller model of the same vocabulary; it must be loaded if and only if the model is. `mtp_from`
    says where the heads for `speculate="mtp"` are fetched from. `adapters` are folders by name, or folders that have
    their adapters' names. `max_chunk_tokens` bounds one prompt's share of a step.
    """

    draft_model: Model | None
    mtp_from: str | None
    adapters: Mapping[str, Folder] | Sequence[Folder]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int | None
    kv_cache_memory: str
    num_kv_blocks: int | None
    kv_bits: str
    attention_backend: str
    dtype: str
    quantize: str
    batch_invariant: bool
    async_scheduling: bool
    speculate: str
    max_draft_tokens: int
    prefix_caching: bool
    max_model_len: int | None
    pooling: str
    target_step_ms: float | None
    max_step_ms: float


def read_options(model: Model, options: Mapping[str, Any]) -> tuple[Config, GivenModels]:
    """The configuration, and the models that are loaded already. Raises `TypeError` for an unknown option, and
    `ConfigError`."""
    unknown = options.keys() - EngineOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(("model", *EngineOptions.__annotations__))
        raise TypeError(f"{sorted(unknown)[0]} is no option of LLM or AsyncLLM, which take {known}")
    draft_model = options.get("draft_model")
    loaded, loaded_draft = _if_loaded(model), _if_loaded(draft_model)
    if options.get("adapters") and loaded is not None:
        raise ConfigError("A loaded model has its adapters already; give them to the function that loads it.")
    if draft_model is not None and (loaded_draft is None) != (loaded is None):
        raise ConfigError("Give the draft model as you give the model: both by name, or both loaded.")
    flags = {
        **{name: value for name, value in options.items() if name not in ("adapters", "max_chunk_tokens")},
        "model": _name_of(model, "model"),
        "draft_model": None if draft_model is None else _name_of(draft_model, "draft_model"),
        "adapter": _adapters(options.get("adapters")) or None,
        "max_num_waiting": 1_000_000,
        "max_queued_tokens": 1_000_000_000,
        "queue_timeout_s": 0.0,
    }
    return load_config(environ={}, flags=flags), GivenModels(loaded, loaded_draft)


def _if_loaded(model: Any) -> LoadedModel | None:
    return model if isinstance(model, LoadedModel) else None


def _name_of(model: Any, option: str) -> str:
    if isinstance(model, LoadedModel):
        return model.name
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"{option} must be a name, a folder or a loaded model, got {type(model).__name__}.")
    return os.fspath(model)


def _adapters(given: Any) -> list[str]:
    """The adapters as the server's setting has them: NAME=FOLDER or FOLDER each."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [f"{_adapter(name)}={_adapter(folder)}" for name, folder in given.items()]
    if not isinstance(given, list | tuple | str | os.PathLike):
        raise _not_adapters(given)
    return [_adapter(folder) for folder in (given if isinstance(given, list | tuple) else [given])]


def _adapter(part: Any) -> str:
    if not isinstance(part, str | os.PathLike):
        raise _not_adapters(part)
    text: str = os.fspath(part)
    if os.pathsep in text:
        raise ConfigError(
            f"adapters: {text} has a `{os.pathsep}`, which separates adapters in the setting. Give a name and a folder "
            "without it, such as a link to the folder."
        )
    return text


def _not_adapters(given: Any) -> ConfigError:
    return ConfigError(f"adapters must be folders by name, or a list of folders, got {type(given).__name__}.")
