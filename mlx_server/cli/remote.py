"""A client for commands that talk to a running server, and the tables that commands print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import httpx

from mlx_server.bench.arguments import server_url
from mlx_server.clients import NO_PROXY, EventSplitter
from mlx_server.config import ServerConfig
from mlx_server.errors import ServeError
from mlx_server.setting import odd_character

URL_VARIABLE = "MLX_SERVE_URL"
KEY_VARIABLE = "MLX_SERVE_API_KEY"
_CERT_VARIABLE = "SSL_CERT_FILE"
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class RemoteError(ServeError):
    """A server cannot be asked, has refused a request, or is not an mlx-serve server."""


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--url`. The key comes only from the environment, since every user of a machine can read command lines."""
    defaults = ServerConfig()
    url = os.environ.get(URL_VARIABLE) or f"http://{defaults.host}:{defaults.port}"
    parser.add_argument(
        "--url", default=url, help=f"the server; default: {url}, or {URL_VARIABLE}. {KEY_VARIABLE} is its key"
    )


class RemoteServer:
    """A server, at an address with or without `http://`. Every method raises `RemoteError`, and the constructor if the
    address is none, or a variable of the environment cannot be used. `key` is empty without one.

    `read` returns what a command needs of the JSON of an answer or event. It raises what Python does if that is not
    there, which means that this is no mlx-serve server.
    """

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        try:
            self.url = server_url(url if "://" in url else f"http://{url}")
        except argparse.ArgumentTypeError as error:
            raise RemoteError(f"{error}.") from error
        self.key = key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise RemoteError(f"{KEY_VARIABLE} is not a key: it has characters other than printable ASCII.")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, transport=transport, mounts=NO_PROXY)
        except OSError as error:
            file = os.environ.get(_CERT_VARIABLE)
            raise RemoteError(f"{_CERT_VARIABLE}: {file} cannot be used: {error.strerror}.") from error
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise RemoteError(f"The proxy that the environment names cannot be used: {error}") from error

    def close(self) -> None:
        self._client.close()

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, read: Callable[[Any], Any] = dict
    ) -> Any:
        """What `read` finds in an answer; by default, the whole object."""
        with self._answer(method, path, body) as response:
            return self._found(response, response.read(), read)

    def text(self, path: str, body: dict[str, Any]) -> str:
        """The answer to a POST, as text."""
        with self._answer("POST", path, body, "text/plain") as response:
            response.read()
            return response.text

    def model_cards(self) -> dict[str, dict[str, Any]]:
        """The models that the server lists, by id, the default one first; at least one."""
        cards: dict[str, dict[str, Any]] = self.request("GET", "/v1/models", read=_cards)
        if not cards:
            raise RemoteError(f"{self.url} has no model that this key may use.")
        return cards

    def stream(self, path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Iterator[Any]:
        """What `read` finds in each event of a streamed answer, until `[DONE]`."""
        events = EventSplitter()
        with self._answer("POST", path, body, "text/event-stream") as response:
            for chunk in response.iter_bytes():
                for data in events.feed(chunk):
                    yield self._found(response, data, read)

    def _found(self, response: httpx.Response, text: bytes, read: Callable[[Any], Any]) -> Any:
        try:
            answer = json.loads(text)
            if "error" in answer:
                raise RemoteError(_message(answer) or "The server ended the answer with an error.")
            return read(answer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._other_format(response) from error

    def _other_format(self, response: httpx.Response) -> RemoteError:
        kind = response.headers.get("content-type", "something")
        return RemoteError(
            f"{self.url} answers with {kind} that is not in mlx-serve's format; is it an mlx-serve server?"
        )

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: dict[str, Any] | None, kind: str = "") -> Iterator[httpx.Response]:
        """An answer of this content type that is no error; its body is not read yet."""
        try:
            request = self._client.build_request(method, self.url + path, json=body)
        except (ValueError, httpx.InvalidURL) as error:  # NaN, or text from bytes that are not UTF-8
            reason = "it has text that is not UTF-8" if isinstance(error, UnicodeError) else error
            raise RemoteError(f"The request to {self.url} cannot be sent: {reason}.") from error
        try:
            response = self._client.send(request, stream=True)
            with contextlib.closing(response):
                if not response.is_success:
                    response.read()
                    raise RemoteError(self._refusal(response))
                if not response.headers.get("content-type", "").startswith(kind):
                    raise self._other_format(response)
                yield response
        except httpx.HTTPError as error:
            raise RemoteError(self._unreachable(error)) from error

    def _unreachable(self, error: Exception) -> str:
        reason = (str(error) or type(error).__name__).removesuffix(".")
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            remedy = f"{_CERT_VARIABLE}=cert.pem trusts one of your own"
            return f"The certificate of {self.url} is not trusted: {reason}; {remedy}."
        if isinstance(error, httpx.ConnectError) and "SSL" not in reason:
            return f"No server answers at {self.url}; start one with `mlx-serve serve`, or give its --url."
        return f"{self.url} did not answer: {reason}."

    def _refusal(self, response: httpx.Response) -> str:
        message = f"{self.url} answered {response.status_code}"
        with contextlib.suppress(ValueError):
            message = _message(response.json()) or message
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += f" Put the key into {KEY_VARIABLE}."
        return message


def _cards(answer: Any) -> dict[str, dict[str, Any]]:
    """The models of `GET /v1/models` by id."""
    return {str(card["id"]): card for card in answer["data"]}


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


def one_line(text: str) -> str:
    """The type of an argument that a terminal shows in one line as it is."""
    if odd_character(text) is not None:
        raise argparse.ArgumentTypeError("it must be UTF-8 text in one line, without control characters")
    return text


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
