"""What commands that ask a server have in common: how they reach it, and how they read its streams."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""This machine, as URLs name it."""

NO_PROXY: Mapping[str, None] = MappingProxyType({f"all://{host}": None for host in LOCAL_HOSTS})
"""The `mounts` of every httpx client here: servers on this machine are asked without a proxy. httpx takes the proxy of
the environment for all hosts, and on a Mac that of the system without its exceptions."""


class EventSplitter:
    r"""Finds the events in the bytes of a stream. Only `\n` ends a line: httpx's `iter_lines` also splits JSON at the
    characters that Unicode calls ends of lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in this chunk, without `[DONE]`."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
        return [data for data in found if data != b"[DONE]"]
