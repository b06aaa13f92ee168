"""What a model on this machine is, and whether its memory suffices, told without loading it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.models.facts import read_facts
from mlx_server.engine.models.store import StoredModel, find_pulled
from mlx_server.errors import ServeError


@dataclass(frozen=True, slots=True)
class ModelFit:
    """`weights` is like `Q4` or `BF16`, empty if unknown; `context_length` 0 if the model does not say. `need_bytes` is
    what loading it takes with default settings, None if it cannot be loaded: `reason` says why then. `fits` is `yes`,
    `not now` (others have the memory), or `no`."""

    weights: str = ""
    context_length: int = 0
    need_bytes: int | None = None
    fits: str = "no"
    reason: str = ""


def fits_of(models: Sequence[StoredModel], config: Config) -> Iterator[ModelFit]:
    """One for each, in their order, beside the limits of `config.memory`. Reads files and this machine's memory."""
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
            reason = str(error) if isinstance(error, ServeError) else f"its files make no sense ({error!r})"
            yield ModelFit(fit.weights, fit.context_length, reason=reason)
            continue
        fits = "no" if need > budget.limit_bytes else "yes" if need <= budget.free_bytes else "not now"
        yield ModelFit(fit.weights, fit.context_length, need, fits)
