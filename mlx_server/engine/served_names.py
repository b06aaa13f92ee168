"""What a model and its adapters are called by clients."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_server.config import ModelConfig
from mlx_server.errors import ModelNotFoundError
from mlx_server.runtime.adapters import merged_adapter
from mlx_server.runtime.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`base` is what the model is called without adapters. `merged` names the adapter that it has for all requests,
    if that cannot differ by request; else each may name one of `adapters`, or none."""

    base: str
    merged: str | None
    adapters: tuple[str, ...]

    @property
    def model(self) -> str:
        """What the model is called that answers requests which name no adapter."""
        return self.base if self.merged is None else f"{self.base}:{self.merged}"

    @property
    def all(self) -> tuple[str, ...]:
        """The model's, and with each of its adapters."""
        return self.model, *map(self.with_adapter, self.adapters)

    def check(self, adapter: str | None) -> None:
        """Raises `ModelNotFoundError` for an adapter that the model does not have."""
        if adapter is not None and adapter not in self.adapters:
            raise ModelNotFoundError(f"{self.base}:{adapter}", f"What there is of it: {', '.join(self.all)}.")

    def with_adapter(self, adapter: str | None) -> str:
        return self.model if adapter is None else f"{self.base}:{adapter}"


def served_names(settings: ModelConfig, loaded: LoadedModel | None = None) -> ServedNames:
    """Of the model that is `loaded` already, or of the one to be loaded: reads what an only adapter says of itself."""
    if loaded is not None:
        return ServedNames(settings.name, None, loaded.adapters.names)
    merged = merged_adapter(settings.adapters)
    adapters = () if merged is not None else tuple(adapter.name for adapter in settings.adapters)
    return ServedNames(settings.name, None if merged is None else merged.name, adapters)
