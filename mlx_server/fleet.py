"""[fleet]: what a server tells routers, what servers share, and which machines share one model."""

from __future__ import annotations

import contextlib
from typing import Annotated
from urllib.parse import urlsplit

from pydantic.dataclasses import dataclass

from mlx_server.setting import STRICT, Text, declare, form


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of a ZeroMQ endpoint like `tcp://127.0.0.1:5557`; `*` stands for all addresses of this machine,
    port 0 for a free port. Raises `ValueError`."""
    try:
        parts = urlsplit(text)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not (parts.path or parts.query):
            return parts.hostname, parts.port
    except ValueError:  # a bad port
        pass
    raise ValueError("write tcp://HOST:PORT, like tcp://127.0.0.1:5557")


def parse_store(text: str) -> str:
    """The URL of a Redis or Valkey server without user and password, so that it may be shown. Raises `ValueError`."""
    with contextlib.suppress(ValueError):  # a bad port, or of brackets that do not close
        parts = urlsplit(text)
        if parts.scheme in ("redis", "rediss") and parts.hostname:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            port = "" if parts.port is None else f":{parts.port}"
            return f"{parts.scheme}://{host}{port}{parts.path}"
        if parts.scheme == "unix" and parts.path:
            return f"unix://{parts.path}"
    raise ValueError("write redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH")


def parse_topic(text: str) -> str:
    """The topic of a model called `m`. Raises `ValueError`."""
    try:
        return text.format(host="h", port=1, model="m")
    except (LookupError, AttributeError, ValueError) as error:
        raise ValueError("it may name {host}, {port} and {model}, and nothing else in braces") from error


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class FleetConfig:
    """[fleet]: several servers behind a router, or several machines for one model; see docs/scale-out.md."""

    kv_events: Annotated[Text, form(parse_endpoint)] = declare(
        None,
        "tell routers which prefixes are cached, as vLLM does, at a ZeroMQ endpoint like tcp://127.0.0.1:5557: the "
        "server binds an address of this machine (`*`: all) and connects to any other; subscribers can read prompts",
    )
    kv_events_replay: Annotated[Text, form(parse_endpoint)] = declare(
        None, "endpoint at which routers may ask for the last 10,000 batches of such events again"
    )
    kv_events_topic: Annotated[str, form(parse_topic)] = declare(
        "kv@{host}:{port}@{model}",
        "topic of a model's events; it may contain {host} and {port}, and must contain {model} if there are several "
        "models; empty for a vllm-router that is given its sources",
    )
    shared_store: Annotated[Text, form(parse_store)] = declare(
        None,
        "Redis or Valkey server like redis://HOST:6379/0 in which all servers of a fleet count the usage of keys and "
        "keep responses; without it, each server does so by itself",
        repr=False,
    )
    discovery_key: Text = declare(
        None, "key with which routers may list models and read health and metrics, and do nothing else", repr=False
    )
    discovery_key_file: Text = declare(None, "file with the discovery key in it")
    tensor_parallel_size: int = declare(
        1, "machines that share one model, each started by `mlx.launch`; experimental", ge=1
    )
    tensor_parallel_host: Text = declare(
        None, "address at which the others reach the first machine; default: the one from `mlx.launch`"
    )
