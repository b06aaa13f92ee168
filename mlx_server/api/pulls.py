"""Models fetched because an admin asks for them, in any protocol."""

from __future__ import annotations

import asyncio

from mlx_server.api.context import ServerContext
from mlx_server.engine.models.facts import folder_of
from mlx_server.engine.models.store import Fetch, can_be_fetched
from mlx_server.errors import ModelNotFoundError, PermissionDeniedError


async def begin_pull(context: ServerContext, name: str) -> Fetch | None:
    """The fetch of a model by its served name or its hub id, begun if nobody has; None if it is here. Raises
    `ModelNotFoundError` for what cannot be fetched, `PermissionDeniedError` for what this server would not serve."""
    offer = context.pool.look_up(name)
    model = name if offer is None else offer.spec.root
    if offer is not None and await asyncio.to_thread(folder_of, model) is not None:
        return None
    if not can_be_fetched(model):
        raise ModelNotFoundError(name, "Models are pulled by their hub id, like mlx-community/Qwen3-0.6B-4bit.")
    if offer is None and not context.config.pool.pulled_models:
        raise PermissionDeniedError(
            f"This server serves only the models of its configuration, and {name} is none of them. Start it with "
            "--pulled-models to let clients pull and use others."
        )
    return context.fetches.join(model)
