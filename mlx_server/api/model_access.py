"""Which models a tier may use, by whatever names they are known."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_server.errors import ModelNotFoundError, PermissionDeniedError
from mlx_server.pool.catalog import Offer, model_not_found
from mlx_server.pool.model_pool import ModelPool
from mlx_server.tiers import Tier


def may_use(pool: ModelPool, tier: Tier, model: str | None) -> bool:
    """Whether the tier's list has this model, by this or another of its names; a model with an adapter is another one
    than without. Raises `ModelNotFoundError`."""
    if tier.models is None:
        return True
    return pool.offer(model).name in {offer.name for offer in _offers(pool, tier.models)}


def _offers(pool: ModelPool, names: Iterable[str]) -> list[Offer]:
    """What those of the names stand for that are served."""
    return [offer for offer in map(pool.look_up, names) if offer is not None]


def check_model_access(pool: ModelPool, tier: Tier, model: str | None) -> None:
    """Raises `PermissionDeniedError` for a model that the tier may not use, and `ModelNotFoundError`, which tells of no
    model or adapter that the tier may not use."""
    try:
        is_allowed = may_use(pool, tier, model)
    except ModelNotFoundError as error:
        if tier.models is None:
            raise
        raise model_not_found(error.model, [offer.name for offer in _offers(pool, tier.models)]) from None
    if not is_allowed:
        raise PermissionDeniedError(
            f"Keys of the tier {tier.name} may not use the model `{pool.offer(model).name}`; they may use "
            f"{', '.join(tier.models or ())}."
        )
