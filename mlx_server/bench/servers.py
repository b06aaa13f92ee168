"""Servers to compare: URLs, or commands that are started and ended here, each in its own process group."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from mlx_server.clients import NO_PROXY
from mlx_server.errors import ServeError

_READY_PATHS = ("/health", "/v1/models")
_HOST = "127.0.0.1"
_POLL_S = 0.2
_GRACE_S = 15.0
_NUM_LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One side of a comparison: the `url` of a running server, or a `command`. Each session of a command has its own
    process, with `environ` as its environment (default: this process's). `{port}`, `{model}` and `{python}` in the
    command are replaced. A server is ready when `/health` or `/v1/models` answers 200."""

    name: str
    command: str | None = None
    url: str | None = None
    environ: Mapping[str, str] | None = None

    @contextmanager
    def session(self, *, model: str | None, log_path: Path, start_timeout_s: float) -> Iterator[str]:
        """Yields the base URL when the server is ready, and ends the server with the session. Raises `ServeError` with
        the end of the server's output if it does not become ready."""
        if self.command is None:
            assert self.url is not None
            self._await_ready(self.url, start_timeout_s, lambda: None)
            yield self.url
            return
        port = _free_port()
        words = {"{port}": str(port), "{model}": model or "", "{python}": sys.executable}
        url = f"http://{_HOST}:{port}"
        with log_path.open("ab") as log:
            process = self._start(words, log.fileno())
            try:
                self._await_ready(url, start_timeout_s, lambda: self._check_alive(process, log_path))
                yield url
            finally:
                end_group(process)

    def _start(self, words: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
        assert self.command is not None
        arguments = [_replace(argument, words) for argument in shlex.split(self.command)]
        try:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environ,
            )
        except OSError as error:
            raise ServeError(f"{self.name}: cannot run {arguments[0]}: {error.strerror}.") from error

    def _await_ready(self, url: str, timeout_s: float, check: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(base_url=url, timeout=5.0, mounts=NO_PROXY) as http:
            while True:
                check()
                if any(_answers(http, path) for path in _READY_PATHS):
                    return
                if time.monotonic() > deadline_s:
                    paths = " or ".join(_READY_PATHS)
                    raise ServeError(f"{self.name}: {url} did not answer 200 at {paths} within {timeout_s:g} s.")
                time.sleep(_POLL_S)

    def _check_alive(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        status = process.poll()
        if status is not None:
            lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LOG_LINES:]
            raise ServeError(f"{self.name} ended with status {status} before it was ready: " + " | ".join(lines))


def end_group(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """Ends the process group: SIGTERM first, then SIGKILL after `grace_s`."""
    try:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # PermissionError: on macOS, if only zombies are left in the group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _answers(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _replace(argument: str, words: Mapping[str, str]) -> str:
    """`str.format` would fail on other braces in a command."""
    for name, value in words.items():
        argument = argument.replace(name, value)
    return argument


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
