"""A whole server for tests: `python -m tests.api.life_real CONFIG`. After SIGUSR1 its device computes nothing. At
the end it says how many objects were frozen, and how many bytes of arrays are left."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_server.api.http.listener import listen
from mlx_server.api.server import serve
from mlx_server.config import load_config
from mlx_server.engine import parts
from mlx_server.pool.model_pool import build_pool
from mlx_server.runtime.model_runner import ModelRunner


def main() -> int:
    plain = ModelRunner.launch
    is_broken = False

    def launch(self: ModelRunner, step: Any) -> Any:
        if is_broken:
            raise RuntimeError("the device is gone")
        return plain(self, step)

    def break_down(*_: Any) -> None:
        nonlocal is_broken
        is_broken = True

    def compute_something() -> None:
        if is_broken:
            raise RuntimeError("the device is gone")

    ModelRunner.launch = launch  # type: ignore[method-assign]
    parts.compute_something = compute_something
    signal.signal(signal.SIGUSR1, break_down)
    config = load_config(Path(sys.argv[1]), environ={})
    with listen(config.server) as listener:
        status = serve(config, [listener], build_pool)
    print(f"frozen: {gc.get_freeze_count()}, left: {mx.get_active_memory()}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
