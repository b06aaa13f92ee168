"""Resolves a model's name, as the user gives it, to its folder: fetched, converted and quantised if necessary."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from mlx_server.config import WHOLE_WEIGHTS
from mlx_server.environment import check_mounted, exists
from mlx_server.errors import DownloadError, ModelLoadError, UnknownModelError
from mlx_server.model_entries import Adapter, hub_id
from mlx_server.runtime.layers.adapter_files import ADAPTER_FILES
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.blueprint import load_folder
from mlx_server.runtime.models.bundled import SMOLLM2, pull_bundled
from mlx_server.runtime.models.folder import HUB_FILES
from mlx_server.runtime.models.gguf import WeightFormat, split_names
from mlx_server.runtime.models.hub_fetch import cache_error, fetch_snapshot
from mlx_server.runtime.models.made_folders import gguf_folder
from mlx_server.runtime.models.places import checked, find_place
from mlx_server.runtime.models.quantize import quantized_folder

_DISK_FAULTS = (errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)


def resolve_model(name: str, dtype: str = "auto") -> Path:
    """The folder of a model. `name` is `smollm2` (pulled if necessary), an existing folder, the id or page address of a
    model on the Hugging Face hub, or a GGUF file, here or on the hub, which is converted once. The bundled model is
    expanded if the CPU must compute in float32, by `dtype`.

    Checks that the folder is complete without loading it. Raises `UnknownModelError` if `name` is none of these,
    `ModelLoadError` if something is missing, `DownloadError` if fetching fails.
    """
    try:
        return _resolved(name, dtype)
    except OSError as error:
        raise ModelLoadError(f"The model {name} cannot be used: {error}.") from error


def _resolved(name: str, dtype: str) -> Path:
    if name == SMOLLM2.name:
        is_expanded = dtype == "float32" and mx.default_device() == mx.cpu
        return pull_bundled(weight_format=WeightFormat.FLOAT32 if is_expanded else None)
    place = find_place(name)
    if place.path is not None:
        return place.path if place.path.is_dir() else checked(gguf_folder(name, place.path))
    if place.file is not None:
        return checked(gguf_folder(name, _hub_file(name, place.repo, place.file)))
    return checked(_hub_snapshot(name, place.repo))


def find_folder(
    name: str, dtype: str = "auto", quantize: str = WHOLE_WEIGHTS, *, trust_remote_code: bool = False
) -> Path | None:
    """The folder of the model with that name, fetched, converted and quantised if necessary; None for random weights.
    May take long. Quantising runs the model's own code only if that is trusted. Any thread. Raises `ModelLoadError` or
    `DownloadError`."""
    if random_models.is_random(name):
        if quantize != WHOLE_WEIGHTS:
            raise ModelLoadError(f"{name} has no folder that --quantize could read: leave it out.")
        return None
    folder = resolve_model(name, dtype)
    if quantize != WHOLE_WEIGHTS:
        folder = quantized_folder(name, folder, quantize, lambda path: load_folder(path, trust_remote_code))
    return folder


def find_adapter(adapter: Adapter) -> Adapter:
    """The adapter with the place of its files, which are fetched if they are on the hub only. May take long. Any
    thread. Raises `UnknownModelError` if there is none, `ModelLoadError` or `DownloadError`."""
    try:
        return _found_adapter(adapter)
    except OSError as error:
        raise ModelLoadError(f"The adapter {adapter.folder} cannot be used: {error}.") from error


def _found_adapter(adapter: Adapter) -> Adapter:
    name = hub_id(adapter.folder)
    if exists(adapter.path):
        return adapter
    if name is None:
        raise UnknownModelError(
            f"There is no folder {adapter.folder}: an adapter is a folder, or an id of the hub (owner/name)."
        )
    try:
        return adapter._replace(fetched=_hub_snapshot(adapter.folder, name, ADAPTER_FILES))
    except (ModelLoadError, DownloadError) as error:
        raise type(error)(f"The adapter {adapter.name}: {error.message}") from error


def _hub_file(name: str, repo: str, file: str) -> Path:
    """A GGUF file of the hub, with all parts of a split model."""
    parts = [str(Path(file).with_name(part)) for part in split_names(Path(file).name)]
    path = _hub_snapshot(name, repo, parts) / file
    if not path.is_file():
        raise UnknownModelError(f"{repo} has no file {file}; see https://huggingface.co/{repo}/tree/main.")
    return path


def _hub_snapshot(model: str, name: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    """The snapshot of the hub's model `name`; `model` is the user's name for it."""
    check_mounted(Path(constants.HF_HUB_CACHE))
    try:
        return fetch_snapshot(model, name, patterns)
    except DownloadError:
        raise
    except GatedRepoError as error:
        raise UnknownModelError(
            f"{name} requires an agreement: accept it at https://huggingface.co/{name}, then set HF_TOKEN "
            "or run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownModelError(
            f"The hub has no model {name}, or it is private. Check the spelling; for a private one set HF_TOKEN."
        ) from error
    except Exception as error:  # the hub's client passes on errors of its HTTP library
        if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
            raise cache_error(model, error) from error
        raise DownloadError(
            f"Cannot fetch {name} from the hub, and it is neither in the hub's cache nor a folder "
            f"({_first_line(error)}). Check the connection and HF_HUB_OFFLINE, or give a folder."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
