"""Which web pages a browser lets call the server: those of the configured origins, and no others."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from mlx_server.config import ServerConfig
from mlx_server.setting_forms import parse_origins


def allow_origins(app: FastAPI, server: ServerConfig) -> None:
    """Answers browsers' preflights and names the origin in answers, refusals included, as far as `server` allows it.

    Pages may read every header. They need the same keys as any client, and are never taken for a local admin."""
    if server.allowed_origins is None:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=parse_origins(server.allowed_origins, "allowed_origins"),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
    )
