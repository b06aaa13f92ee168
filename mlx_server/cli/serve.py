"""Serves a model over HTTP. Without options: the bundled model, on http://127.0.0.1:8000.

examples:
  mlx-serve serve
  mlx-serve serve mlx-community/Qwen3-0.6B-4bit --port 9000
  mlx-serve serve --config my.toml --kv-cache-memory 4GiB --no-prefix-caching
"""

from __future__ import annotations

import argparse
import sys

from mlx_server.api.listener import listen
from mlx_server.cli.config import add_serve_arguments, config_from
from mlx_server.observability.logs import forgive_lost_streams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    for name in ("api_key", "admin_key"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            print(
                f"mlx-serve: warning: everyone on this machine can read {flag} in the list of processes; use "
                f"{flag}-file or MLX_SERVE_SERVER_{name.upper()} instead.",
                file=sys.stderr,
            )
    forgive_lost_streams()
    with listen(config.server) as listener:
        from mlx_server.api.server import serve  # takes seconds: whoever connects meanwhile waits

        return serve(config, listener)
