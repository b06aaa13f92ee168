"""Who may change the server: whoever has the admin key or a key of a tier that says so; where no key of any kind is
asked for, whoever is at this machine."""

from __future__ import annotations

from fastapi import Depends
from starlette.requests import Request

from mlx_server.api.auth import caller_of, sent_key
from mlx_server.api.keys import ADMIN_REMEDY
from mlx_server.errors import AuthenticationError, PermissionDeniedError


async def require_admin(request: Request) -> None:
    """Raises for callers who are no admins: `AuthenticationError` if they sent no key, else `PermissionDeniedError`."""
    if caller_of(request).is_admin:
        return
    message = (
        "This route is for admins. Send the admin key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, or a key of "
        f"a tier with `admin = true`. Where there is neither, {ADMIN_REMEDY}; only a server that asks for no key at "
        "all lets clients on its own machine use it."
    )
    raise AuthenticationError(message) if sent_key(request.scope) is None else PermissionDeniedError(message)


RequireAdmin = Depends(require_admin)
"""For `APIRouter(dependencies=[RequireAdmin])`, or one route's."""
