"""The objects that all routes share: the pool, the configuration, and the services above them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import psutil
from fastapi import Depends, Request

from mlx_server.api.answers.chat_plan import ChatPlanner
from mlx_server.api.answers.generation_service import GenerationService
from mlx_server.api.auth.keys import KeyRing
from mlx_server.api.auth.quotas import Quotas
from mlx_server.api.http.paced import Paced
from mlx_server.api.http.text_turns import TextWorkers
from mlx_server.api.openai.responses.background import BackgroundRuns
from mlx_server.api.openai.responses.store import RecordStore
from mlx_server.api.shared_store import SharedStore
from mlx_server.config import Config
from mlx_server.engine.models.store import Fetches
from mlx_server.observability.server_metrics import HttpMetrics, SleepMetrics
from mlx_server.pool.model_pool import ModelPool


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One for each app; routes get it as `Context`."""

    pool: ModelPool
    config: Config
    keys: KeyRing
    quotas: Quotas
    generations: GenerationService
    text_workers: TextWorkers
    chats: ChatPlanner
    shared_store: SharedStore | None = None
    fetches: Fetches = field(default_factory=Fetches)
    http_metrics: HttpMetrics = field(default_factory=HttpMetrics)
    process: psutil.Process = field(default_factory=psutil.Process)
    sleep_metrics: SleepMetrics = field(default_factory=SleepMetrics)
    scrapes: Paced = field(default_factory=Paced)
    records: RecordStore = field(default_factory=RecordStore)
    background: BackgroundRuns = field(default_factory=BackgroundRuns)


async def _context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(_context_of)]
