"""Which models a tier may use."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_server.errors import ModelNotFoundError, PermissionDeniedError
from mlx_server.pool.catalog import model_not_found
from mlx_server.pool.model_pool import ModelPool
from mlx_server.tiers import Tier


def may_use(pool: ModelPool, tier: Tier, model: str | None) -> bool:
    """Whether the tier may use the model, by any of its names. A model with an adapter counts as a model of its own.
    Raises `ModelNotFoundError`."""
    return tier.models is None or pool.offer(model).name in _allowed_names(pool, tier.models)


def check_model_access(pool: ModelPool, tier: Tier, model: str | None) -> None:
    """Raises `PermissionDeniedError` for a model that the tier may not use, and `ModelNotFoundError`, whose suggestion
    is a model that the tier may use."""
    try:
        is_allowed = may_use(pool, tier, model)
    except ModelNotFoundError as error:
        if tier.models is None:
            raise
        raise model_not_found(error.model, _allowed_names(pool, tier.models)) from None
    if not is_allowed:
        raise PermissionDeniedError(
            f"Keys of the tier {tier.name} may not use the model `{pool.offer(model).name}`; they may use "
            f"{', '.join(tier.models or ())}."
        )


def _allowed_names(pool: ModelPool, names: Iterable[str]) -> list[str]:
    """The listed names of the models in a tier's list that are served."""
    return [offer.name for offer in map(pool.look_up, names) if offer is not None]
