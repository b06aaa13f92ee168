"""A client for commands that talk to a running server, and the tables that commands print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import httpx

from mlx_server.config import ServerConfig
from mlx_server.errors import ServeError

URL_VARIABLE = "MLX_SERVE_URL"
KEY_VARIABLE = "MLX_SERVE_API_KEY"
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class RemoteError(ServeError):
    """The server cannot be reached, or has refused a request."""


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--url`. The key comes only from the environment, since every user of a machine can read command lines."""
    defaults = ServerConfig()
    url = os.environ.get(URL_VARIABLE, f"http://{defaults.host}:{defaults.port}")
    parser.add_argument(
        "--url", default=url, help=f"the server; default: {url}, or {URL_VARIABLE}. {KEY_VARIABLE} is its key"
    )


class RemoteServer:
    """A server, at an address with or without `http://`. Every method raises `RemoteError`."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, transport=transport)

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer; None for an empty one."""
        try:
            response = self._client.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        self._check(response)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            kind = response.headers.get("content-type", "something else")
            message = f"{self.url} answers with {kind} instead of JSON; is it an mlx-serve server?"
            raise RemoteError(message) from error

    def model_cards(self) -> list[dict[str, Any]]:
        """The models that the server lists, the default one first; at least one."""
        cards: list[dict[str, Any]] = self.request("GET", "/v1/models")["data"]
        if not cards:
            raise RemoteError(f"{self.url} has no model that this key may use.")
        return cards

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, until `[DONE]`."""
        try:
            with self._client.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise RemoteError(_message(event) or "The server ended the answer with an error.")
                    yield event
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> RemoteError:
        if isinstance(error, httpx.ConnectError):
            return RemoteError(f"No server answers at {self.url}; start one with `mlx-serve serve`, or give its --url.")
        return RemoteError(f"{self.url} did not answer: {(str(error) or type(error).__name__).removesuffix('.')}.")

    def _check(self, response: httpx.Response) -> None:
        if not response.is_error:
            return
        message = f"{self.url} answered {response.status_code}"
        with contextlib.suppress(ValueError):
            message = _message(response.json()) or message
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += f" Put the key into {KEY_VARIABLE}."
        raise RemoteError(message)


def _message(body: Any) -> str | None:
    """The message of an error in OpenAI's or Anthropic's format."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Aligned columns; the columns in `right`, like numbers, are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def size(num_bytes: float) -> str:
    """`1.24 GB`, as disks and downloads are sold."""
    return f"{num_bytes / 1e9:.2f} GB"


def ago(seconds: float) -> str:
    """`5 min ago`."""
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    return f"{seconds // 3600:.0f} h ago" if seconds < 86400 else f"{seconds // 86400:.0f} d ago"
