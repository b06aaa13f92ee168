"""The messages between ranks, besides the model's own sums: frames over TCP, each with one byte for the kind of
message, and its fields in MessagePack.

First, both ends prove that they know a random secret, which rank 0 has sent to all ranks of the group
(`multiprocessing.connection` provides the proof and the frames; nothing is pickled). Later messages are neither
encrypted nor signed, and neither are the model's sums: the network must belong to the ranks alone.

When a process ends, its connection closes, which the other end sees immediately. If a machine or a cable fails, the
system's keep-alives show it within about 4 s, whatever Python does meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any, get_args

import msgspec

from mlx_server.config import Config
from mlx_server.engine.distributed.ranks import Load, MakeRunner
from mlx_server.errors import ConfigError
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.memory import MemoryReading

TOKEN_BYTES = 32
_MAX_FRAME_BYTES = 1 << 30
_SILENCE_S = 30
"""A rank that has sent nothing for so long is stuck, even in the middle of a message: each rank sends its memory
reading every second."""

_PROOF_S = 5
"""How long rank 0 waits for each step of a proof: a silent connection must not delay the others."""

_SOCKET_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 4000,
}
_DARWIN_CONNECTION_DROP_TIME, _DROP_S = 0x80, 4
"""macOS's `TCP_RXT_CONNDROPTIME`, which Python does not define: like Linux's `TCP_USER_TIMEOUT`, in seconds."""


class RankLostError(Exception):
    """The other end is gone; the message says why."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message: the settings and versions that must be equal on all ranks."""

    rank: int
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a `Load` or `MakeRunner`: the result's description, or the error."""

    number: int
    result: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's memory now, sent every second."""

    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Rank 0's answer to `Memory`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's last message: it has failed."""

    error: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Free the model after all steps."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End with this exit status."""

    status: int


Message = SchedulerOutput | Hello | Load | MakeRunner | Done | Memory | Heartbeat | Failed | Unload | Stop
_KINDS: tuple[type[Any], ...] = get_args(Message)
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


class Link:
    """One connection between two ranks. Any thread sends, one thread receives."""

    def __init__(self, connected: socket.socket, token: bytes, *, is_leader: bool) -> None:
        """Raises `RankLostError` if the other end does not know `token`."""
        connected.settimeout(None)
        _set_up(connected)
        _limit_silence(connected, _PROOF_S if is_leader else _SILENCE_S)
        watched = connected.dup()
        self._connection = Connection(connected.detach())
        self._sending = threading.Lock()
        try:
            proofs = (deliver_challenge, answer_challenge)
            for prove in proofs if is_leader else reversed(proofs):
                prove(self._connection, token)
            _limit_silence(watched, _SILENCE_S)
        except (AuthenticationError, EOFError, OSError) as error:
            self.close()
            reason = error or type(error).__name__
            raise RankLostError(f"the other end is not a rank of this group: {reason}") from error
        finally:
            watched.close()

    def send(self, message: Message) -> None:
        """Raises `RankLostError`."""
        frame = bytes((_KINDS.index(type(message)),)) + msgspec.msgpack.encode(message)
        try:
            with self._sending:
                self._connection.send_bytes(frame)
        except OSError as error:
            raise RankLostError(f"its connection has ended: {error}") from error

    def receive(self) -> Message:
        """Waits for the next message. Raises `RankLostError`."""
        try:
            frame = self._connection.recv_bytes(_MAX_FRAME_BYTES)
        except BlockingIOError:
            raise RankLostError(f"it has sent nothing for {_SILENCE_S} s") from None
        except (EOFError, ConnectionResetError):
            raise RankLostError("its process has ended") from None
        except OSError as error:
            raise RankLostError(f"its connection has ended: {error}") from error
        try:
            message: Message = _DECODERS[frame[0]].decode(memoryview(frame)[1:])
        except Exception as error:  # invalid messages raise anything
            raise RankLostError(f"it sent an invalid message; does it have another version? {error}") from error
        return message

    def close(self) -> None:
        self._connection.close()


def _set_up(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SOCKET_OPTIONS.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sys.platform == "darwin":
        connected.setsockopt(socket.IPPROTO_TCP, _DARWIN_CONNECTION_DROP_TIME, _DROP_S)


def _limit_silence(connected: socket.socket, seconds: int) -> None:
    """Has reads fail with `BlockingIOError` if nothing comes for so long. Python's own timeouts would make the
    descriptor non-blocking, which `Connection` does not support."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def leader_host(config: Config) -> str:
    """The address of rank 0: the configured one, or the one from `mlx.launch`. Raises `ConfigError`."""
    if config.fleet.tensor_parallel_host is not None:
        return config.fleet.tensor_parallel_host
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    try:
        ring = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text("utf-8"))
        return str(ring[0][0]).rpartition(":")[0]
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            "The address of rank 0 is unknown: neither MLX_HOSTFILE nor MLX_JACCL_COORDINATOR has it. Give it as "
            f"--tensor-parallel-host ({type(error).__name__}: {error})."
        ) from error


def shared_settings(config: Config) -> dict[str, str]:
    """The settings and versions that must be equal on all ranks, by name."""
    libraries = {name: version(name) for name in ("mlx-server", "mlx", "mlx-lm")}
    sections = {**asdict(config.model), **asdict(config.cache), **asdict(config.scheduler)}
    return {name: str(value) for name, value in {**libraries, **sections}.items()}
