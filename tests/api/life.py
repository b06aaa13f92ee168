"""A server process for tests: `python -m tests.api.life SCENARIO PORT DRAIN_TIMEOUT_S LOG_FORMAT`, with an engine that
has no model but the scenario's trouble."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from mlx_server.api import awake
from mlx_server.api.http.listener import listen
from mlx_server.api.server import serve
from mlx_server.config import Config, PoolConfig, ServerConfig
from mlx_server.engine.engine import EngineState
from mlx_server.engine.models import store
from mlx_server.errors import EngineDeadError, ModelLoadError, QueueFullError
from mlx_server.pool.model_pool import ModelPool
from tests.api.fakes import FakeEngine, fake_pool


class ScriptedEngine(FakeEngine):
    """Starts as the scenario says. Every stream holds after two tokens, until SIGUSR1; a prompt of `die` ends the
    engine."""

    scenario = "ready"

    async def start(self) -> None:
        if self.scenario == "broken":
            self.state, self.error = EngineState.DEAD, "no weights"
            raise ModelLoadError("The model has no weights; pull it again.")
        if self.scenario == "loading":
            await asyncio.Event().wait()
        self.pause_after = 2
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.resume)
        await super().start()

    def submit(self, request):
        if self.scenario == "full":
            raise QueueFullError("The queue is full.", "queue_full")
        if self.tokenizer.decode(request.prompt_token_ids) == "die":
            asyncio.get_running_loop().call_later(0.05, self.die, EngineDeadError("The engine has died: no luck."))
        return super().submit(request)


def main() -> int:
    scenario, port, drain_timeout_s, log_format = sys.argv[1:]
    os.environ["MLX_SERVE_HOME"] = os.devnull  # no keys of whoever runs the tests
    server = ServerConfig(port=int(port), drain_timeout_s=float(drain_timeout_s), log_format=log_format)
    config = Config(server=server, pool=PoolConfig(pulled_models=True))
    store.resolve_model = lambda name: threading.Event().wait()  # a pull never ends

    def make_pool(config: Config) -> ModelPool:
        engine = ScriptedEngine(state=EngineState.LOADING)
        engine.scenario = scenario
        return fake_pool(engine)

    if program := os.environ.get("STAND_IN_FOR_CAFFEINATE"):
        awake.is_mac = lambda: True
        awake._PROGRAM, awake._LOOK_S, awake._LINGER_S = program, 0.01, 0.05

    with listen(config.server) as listener:
        return serve(config, [listener], make_pool)


if __name__ == "__main__":
    raise SystemExit(main())
