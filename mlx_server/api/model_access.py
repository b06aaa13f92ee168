"""Which models a tier may use, by whatever names they are known."""

from __future__ import annotations

from mlx_server.errors import ModelNotFoundError, PermissionDeniedError
from mlx_server.pool.model_pool import ModelPool
from mlx_server.tiers import Tier


def may_use(pool: ModelPool, tier: Tier, model: str | None) -> bool:
    """Whether the tier's list has this model, by this or another of its names; a model with an adapter is another one
    than without. Raises `ModelNotFoundError`."""
    if tier.models is None:
        return True
    served_name = pool.offer(model).name
    return any(served_name == _served_name(pool, name) for name in tier.models)


def check_model_access(pool: ModelPool, tier: Tier, model: str | None) -> None:
    """Raises `PermissionDeniedError` for a model that the tier may not use, and `ModelNotFoundError`, which tells
    nobody of adapters who may not use all models."""
    try:
        is_allowed = may_use(pool, tier, model)
    except ModelNotFoundError as error:
        raise (error if tier.models is None else ModelNotFoundError(error.model)) from None
    if not is_allowed:
        raise PermissionDeniedError(
            f"Keys of the tier {tier.name} may not use the model `{pool.offer(model).name}`; they may use "
            f"{', '.join(tier.models or ())}."
        )


def _served_name(pool: ModelPool, name: str) -> str | None:
    try:
        return pool.offer(name).name
    except ModelNotFoundError:
        return None
