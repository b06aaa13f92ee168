"""Finds a model and its adapters, as a configuration says, and names the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_server.config import ModelConfig
from mlx_server.engine.prefixes.model_on_disk import fingerprint
from mlx_server.errors import DownloadError, ModelLoadError, ModelNotFoundError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.layers.adapter_files import ADAPTER_FILES, check_files, merged_adapter
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.resolve import find_adapter, find_folder


def find_model(settings: ModelConfig) -> Path | None:
    """The folder of a model, which is fetched or converted first if necessary; None for random weights. Any thread."""
    return find_folder(settings.model, settings.dtype, settings.quantize, trust_remote_code=settings.trust_remote_code)


@contextmanager
def draft_model_named() -> Iterator[None]:
    """Names the setting in errors about a draft model, which would be taken for the model itself."""
    try:
        yield
    except (ModelLoadError, DownloadError) as error:
        raise type(error)(f"--draft-model: {error.message}") from error


def find_content(adapter: Adapter) -> Adapter:
    """An adapter whose files are here, fetched first if necessary, with a digest of them as its key: what is cached for
    its content is nobody else's, and a later adapter of its name has another key. Reads the files, so that loading them
    does not wait for the disk. Any thread. Raises `ModelLoadError` or `DownloadError`."""
    found = find_adapter(adapter)
    try:
        check_files(found)
        return found._replace(key=fingerprint(found.path, patterns=ADAPTER_FILES))
    except OSError as error:
        raise ModelLoadError(f"The adapter {adapter.folder} cannot be read: {error}.") from error


def check_unchanged(adapters: Iterable[Adapter]) -> None:
    """Raises `ModelLoadError` if the files of one are no longer those that `find_content` has read. Any thread."""
    for adapter in adapters:
        if find_content(adapter).key != adapter.key:
            raise ModelLoadError(
                f"The files of the adapter {adapter.folder} changed while they were read: load it again when they are "
                "written."
            )


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`base` is the model's name without adapters. `merged` is the adapter that all requests use, if there is one;
    otherwise each request may name one of `adapters`, or none."""

    base: str
    merged: str | None
    adapters: tuple[str, ...]

    @property
    def model(self) -> str:
        """The name of the model for requests without an adapter."""
        return self.base if self.merged is None else f"{self.base}:{self.merged}"

    def check(self, adapter: str | None) -> None:
        """Raises `ModelNotFoundError` for an unknown adapter."""
        if adapter is not None and adapter not in self.adapters:
            known = ", ".join(self.adapters) or self.merged or "none"
            raise ModelNotFoundError(f"{self.base}:{adapter}", f"The adapters of {self.base}: {known}.")

    def with_adapter(self, adapter: str | None) -> str:
        return self.model if adapter is None else f"{self.base}:{adapter}"


def served_names(settings: ModelConfig, loaded: LoadedModel | None = None) -> ServedNames:
    """The names of a `loaded` model, or of one to be loaded; then this reads the settings of a single adapter."""
    if loaded is not None:
        return ServedNames(settings.name, None, tuple(loaded.adapters.by_name))
    merged = merged_adapter(settings.adapters)
    adapters = () if merged is not None else tuple(adapter.name for adapter in settings.adapters)
    return ServedNames(settings.name, None if merged is None else merged.name, adapters)
