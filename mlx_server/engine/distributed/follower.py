"""A rank other than 0 of a model on several machines: it has no port and no scheduler, follows rank 0, and ends with
it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import NoReturn

from mlx_server.config import Config
from mlx_server.engine.distributed.rank_link import (
    TOKEN_BYTES,
    Done,
    Failed,
    Hello,
    Link,
    Memory,
    RankLostError,
    Stop,
    Unload,
    leader_host,
    shared_settings,
)
from mlx_server.engine.distributed.ranks import Load, MakeRunner, described_runner, described_weights, own_rank
from mlx_server.engine.loading import find_model
from mlx_server.errors import ServeError
from mlx_server.observability.logs import leave, set_up_logging
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.sharding import Group, from_first, join_group
from mlx_server.runtime.memory import bounded_memory, read_memory
from mlx_server.runtime.model_runner import LaunchedStep, ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, load_in_pieces, make_runner, release

logger = logging.getLogger(__name__)

_JOIN_S = 60.0
_MEMORY_S = 1.0


def follow(config: Config) -> int:
    """Follows rank 0 until that ends, and returns its exit status. Raises `ServeError` if rank 0 cannot be joined. The
    process's main thread."""
    set_up_logging(config.server.log_level, config.server.log_format)
    thread = MLXThread(wire_memory=config.memory.wire_memory)
    size = config.fleet.tensor_parallel_size
    host = leader_host(config)
    group = thread.call(partial(join_group, own_rank(size), size)).result()
    try:
        received = thread.call(partial(from_first, group, bytes(TOKEN_BYTES + 2))).result(_JOIN_S)
        token, port = received[:TOKEN_BYTES], int.from_bytes(received[TOKEN_BYTES:], "big")
        link = Link(socket.create_connection((host, port), _JOIN_S), token, is_leader=False)
        link.send(Hello(group.rank(), shared_settings(config)))
    except (OSError, RankLostError) as error:
        logger.error("Rank 0 cannot be joined: %s", error or type(error).__name__)
        leave(1)
    return _Follower(config, thread, group, link).run()


class _Follower:
    """Receives messages on the main thread, and acts on them in order on the MLX thread."""

    def __init__(self, config: Config, thread: MLXThread, group: Group, link: Link) -> None:
        self._config = config
        self._thread = thread
        self._group = group
        self._link = link
        self._bound = contextlib.ExitStack()
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._previous: LaunchedStep | None = None
        self._was_signalled = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._send_memory, name="memory", daemon=True).start()
        logger.info("Rank %d follows rank 0", self._group.rank())
        try:
            while not isinstance(message := self._link.receive(), Stop):
                if isinstance(message, SchedulerOutput):
                    self._thread.call(partial(self._step, message))
                elif isinstance(message, Load):
                    self._answer(message.number, self._thread.call(partial(self._load, message)))
                elif isinstance(message, MakeRunner):
                    self._answer(message.number, self._thread.call(partial(self._make_runner, message)))
                elif isinstance(message, Unload):
                    self._thread.call(self._unload)
        except RankLostError as error:
            logger.critical("Rank 0 is lost: %s", error)
            leave(1)  # the MLX thread may wait for rank 0 forever
        if message.status:
            leave(message.status)  # likewise
        self._thread.call(self._unload)
        self._thread.stop()
        self._link.close()
        return message.status

    def _load(self, load: Load) -> str:
        self._bound.enter_context(bounded_memory(load.limit_bytes))
        settings = self._config.model
        self._loaded = exhaust(load_in_pieces(settings, find_model(settings), (), self._group))
        return described_weights(self._loaded)

    def _make_runner(self, message: MakeRunner) -> str:
        assert self._loaded is not None, "weights are loaded first"
        self._runner, info = exhaust(make_runner(self._loaded, self._config, message.room))
        return described_runner(info)

    def _step(self, step: SchedulerOutput) -> None:
        """Launches a step after the one that runs, as rank 0 does."""
        try:
            assert self._runner is not None, "there are steps of a loaded model only"
            launched = self._runner.launch(step)
            if self._previous is not None:
                self._previous.wait()
            self._previous = launched
        except BaseException as error:
            self._fail(error)

    def _unload(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._loaded = self._runner = self._previous = None
        release([])
        self._bound.close()

    def _answer(self, number: int, work: Future[str]) -> None:
        def answer(done: Future[str]) -> None:
            error = done.exception()
            if error is None:
                self._link.send(Done(number, done.result()))
                return
            logger.error("%s", error, exc_info=None if isinstance(error, ServeError) else error)
            self._link.send(Done(number, "", str(error)))

        work.add_done_callback(answer)

    def _fail(self, error: BaseException) -> NoReturn:
        """Ends this rank after a failed step: the pools' content is unknown, and rank 0 waits for this rank's sums."""
        logger.critical("A step failed: %s", error, exc_info=error)
        with contextlib.suppress(RankLostError):
            self._link.send(Failed(f"a step failed: {type(error).__name__}: {error}"))
        leave(1)

    def _send_memory(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(RankLostError):  # the main thread sees it, too
            while not pause.wait(_MEMORY_S):
                self._link.send(Memory(read_memory()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Continues after the first signal, since rank 0 needs this rank to drain its streams."""
        if self._was_signalled:
            leave(128 + number)
        self._was_signalled = True
        logger.info("This rank ends when rank 0 does; send the signal again to end it now")
