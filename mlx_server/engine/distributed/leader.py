"""Rank 0 of a model on several machines: gathers the others, sends them each step, and ends when one is lost.

If a rank is lost, a sum over ranks never returns on its neighbours, so the MLX thread may be stuck. Then the event loop
answers all open requests with an error, as whenever an engine dies, and the process ends, which the other ranks see. It
is killed if that takes more than `_GRACE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TypeVar

from mlx_server.config import Config
from mlx_server.engine.distributed.rank_link import (
    TOKEN_BYTES,
    Done,
    Failed,
    Heartbeat,
    Hello,
    Link,
    Memory,
    Message,
    RankLostError,
    Stop,
    Unload,
    leader_host,
    shared_settings,
)
from mlx_server.engine.distributed.ranks import Load, MakeRunner, Ranks, described_runner, described_weights
from mlx_server.errors import ConfigError, EngineDeadError, ModelLoadError
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.executor import MLXThread, StepRunner
from mlx_server.runtime.layers.sharding import Group, from_first, join_group
from mlx_server.runtime.memory import MemoryReading, read_memory
from mlx_server.runtime.model_runner import LaunchedStep
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_S = 60.0
_GRACE_S = 4.0
_AGREE_S = 10.0
"""How long this rank may go on after another has failed: it may wait for the other's sums, or fail in the same way."""

_END_S = 5.0


class Leader(Ranks):
    """Used by the event loop's and the MLX thread. One thread for each other rank receives its messages."""

    def __init__(self, group: Group, links: dict[int, Link], thread: MLXThread) -> None:
        self.group = group
        self._links = links
        self._thread = thread
        self._readings: dict[int, MemoryReading] = {}
        self._answers: dict[tuple[int, int], Future[str]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._is_ending = False
        self._is_lost = False
        self._status = 0
        self._readers = [
            threading.Thread(target=self._read, args=(rank, link), name=f"rank {rank}", daemon=True)
            for rank, link in links.items()
        ]
        for reader in self._readers:
            reader.start()

    def read_memory(self) -> MemoryReading:
        return min((read_memory(), *self._readings.copy().values()), key=lambda reading: reading.room_below(1.0))

    async def load(self, limit_bytes: int, work: Awaitable[LoadedModel]) -> LoadedModel:
        message = partial(Load, limit_bytes=limit_bytes)
        return await self._together(message, work, described_weights, is_abortable=True)

    async def make_runner(self, room: PoolRoom, work: Awaitable[tuple[T, RunnerInfo]]) -> tuple[T, RunnerInfo]:
        message = partial(MakeRunner, room=room)
        return await self._together(message, work, lambda made: described_runner(made[1]), is_abortable=False)

    def leading(self, runner: StepRunner) -> StepRunner:
        return _LeadingRunner(runner, self)

    def unload(self) -> None:
        self.send(Unload())

    def close(self) -> None:
        with self._lock:
            self._is_ending = True  # first, so that a rank that has stopped does not count as lost
        self.send(Stop(self._status))
        for reader in self._readers:
            reader.join(_END_S)
        for link in self._links.values():
            link.close()

    def send(self, message: Message) -> None:
        """Sends a message to all other ranks, in the order of the calls. Any thread."""
        for rank, link in self._links.items():
            try:
                link.send(message)
            except RankLostError as error:
                self.lose(rank, str(error))

    def fail(self) -> None:
        """Notes that this rank has failed: the others end with the same status."""
        self._status = 1

    def lose(self, rank: int, reason: str) -> None:
        """Ends the model and the process, since rank `rank` is lost. Any thread."""
        with self._lock:
            if self._is_lost or self._is_ending:
                return
            self._is_lost, self._status = True, 1
        error = EngineDeadError(f"Rank {rank} of the model is lost: {reason}. Start all ranks again.")
        logger.critical("%s", error.message)
        limit = threading.Timer(_GRACE_S, os._exit, (1,))
        limit.daemon = True
        limit.start()
        for answer in list(self._answers.values()):
            with contextlib.suppress(InvalidStateError):  # it was set just now
                answer.set_exception(error)
        self._thread.give_up(error)

    async def _together(
        self,
        message: Callable[[int], Message],
        work: Awaitable[T],
        described: Callable[[T], str],
        *,
        is_abortable: bool,
    ) -> T:
        """Has all ranks do what `work` does on this one, and checks that the results are equal. Work that
        `is_abortable` has no sums over ranks; other work must run to its end on all ranks, even if it is cancelled."""
        self._number += 1
        number = self._number
        waiting = {rank: self._answers.setdefault((rank, number), Future()) for rank in self._links}
        self.send(message(number))
        own = asyncio.ensure_future(work)
        others = asyncio.gather(*(asyncio.wrap_future(answer) for answer in waiting.values()))
        try:
            await asyncio.wait((own, others), return_when=asyncio.FIRST_EXCEPTION)
            if not own.done():
                await asyncio.wait((own,), timeout=_AGREE_S)
            if not own.done():
                rank = next(rank for rank, answer in waiting.items() if answer.done() and answer.exception())
                self.lose(rank, str(waiting[rank].exception()))
            result = await own
            said = described(result)
            for rank, answer in zip(waiting, await others, strict=True):
                if answer != said:
                    raise ModelLoadError(f"Rank {rank} has {answer}, and rank 0 has {said}: are their files the same?")
            self._status = 0
            return result
        except asyncio.CancelledError:
            others.cancel()
            if is_abortable:
                own.cancel()
            await asyncio.wait((own,))
            raise
        except BaseException:
            self._status = 1
            others.cancel()
            raise
        finally:
            for rank in waiting:
                del self._answers[rank, number]

    def _read(self, rank: int, link: Link) -> None:
        """Receives another rank's messages until it ends. A thread of its own."""
        try:
            while True:
                message = link.receive()
                if isinstance(message, Memory):
                    self._readings[rank] = message.reading
                    link.send(Heartbeat())
                elif isinstance(message, Done):
                    self._settle(rank, message)
                elif isinstance(message, Failed):
                    raise RankLostError(message.error)
        except RankLostError as error:
            self.lose(rank, str(error))

    def _settle(self, rank: int, done: Done) -> None:
        answer = self._answers.get((rank, done.number))
        if answer is None:
            return  # nobody waits for it any more
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            if done.error is None:
                answer.set_result(done.result)
            else:
                answer.set_exception(ModelLoadError(f"Rank {rank}: {done.error}"))


class _LeadingRunner:
    """A runner that sends each step to the other ranks before it launches the step here. MLX thread."""

    def __init__(self, runner: StepRunner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    @property
    def launch_is_host_only(self) -> bool:
        return self._runner.launch_is_host_only

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        self._leader.send(step)
        try:
            return self._runner.launch(step)
        except BaseException:
            self._leader.fail()
            raise

    def wait(self, launched: LaunchedStep) -> None:
        self._runner.wait(launched)

    def fetch(self, launched: LaunchedStep) -> ModelRunnerOutput:
        try:
            return self._runner.fetch(launched)
        except BaseException:
            self._leader.fail()
            raise


def gather_ranks(config: Config, thread: MLXThread) -> Leader:
    """Waits for all ranks, then closes the port. Raises `ConfigError`."""
    size, host = config.fleet.tensor_parallel_size, leader_host(config)
    try:
        server = socket.create_server((host, 0), backlog=size)
    except OSError as error:
        raise ConfigError(f"Rank 0 cannot listen at {host}: {error}; see --tensor-parallel-host.") from error
    with server:
        logger.info("Waiting for the other %d ranks", size - 1)
        group = thread.call(partial(join_group, 0, size)).result()
        token = secrets.token_bytes(TOKEN_BYTES)
        invitation = token + server.getsockname()[1].to_bytes(2, "big")
        server.settimeout(_JOIN_S)
        links: dict[int, Link] = {}
        try:
            thread.call(partial(from_first, group, invitation)).result(_JOIN_S)
            while len(links) < size - 1:
                _accept_rank(server.accept()[0], token, links, shared_settings(config))
        except TimeoutError:
            raise ConfigError(f"{size - 1 - len(links)} of {size} ranks did not connect to {host}.") from None
    logger.info("All %d ranks are here", size)
    return Leader(group, links, thread)


def _accept_rank(connected: socket.socket, token: bytes, links: dict[int, Link], own: dict[str, str]) -> None:
    """Adds a connection to `links` if it is a rank. Raises `ConfigError` if its settings differ from our `own`."""
    try:
        link = Link(connected, token, is_leader=True)
        hello = link.receive()
    except RankLostError as error:
        logger.warning("A connection was refused: %s", error)
        return
    if not isinstance(hello, Hello):
        raise ConfigError(f"A rank has another version: its first message is {type(hello).__name__}.")
    links[hello.rank] = link
    for name, value in own.items():
        if hello.settings.get(name) != value:
            raise ConfigError(
                f"{name} is {hello.settings.get(name)} on rank {hello.rank}, but {value} on rank 0; it must be the "
                "same on all ranks."
            )
