"""Measures what a streamed token costs the event loop, in a real server process whose device computes nothing.

Everything else is as in service: HTTP over loopback to a client in another process, the scheduler, the detokenizer and
the JSON of chat chunks. The cost is the CPU time of the loop's thread, scheduling included, divided by the tokens sent.
For comparison, the CPU time of sending as many bytes to as many sockets is measured; no server can cost less.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import multiprocessing
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenizers import decoders

from mlx_server.api.http.listener import listen
from mlx_server.api.server import serve
from mlx_server.bench.random_folder import save_folder, word_tokenizer
from mlx_server.bench.tables import render_items
from mlx_server.config import BLOCK_SIZE, Config, ServerConfig, load_config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.observed import ObservedExecutor
from mlx_server.engine.parts import Surroundings
from mlx_server.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from mlx_server.pool.catalog import Catalog
from mlx_server.pool.model_pool import ModelPool
from mlx_server.runtime.models.random_models import build_random

_NUM_WARM_UP_STEPS = 20
_NUM_SPARE_TOKENS = 600
"""Tokens that each request may generate beyond the measured ones: while others start, and in the warm-up steps."""

_FIRST_STEPS_S = 0.02
"""The time of a step until all streams have started; long enough that none ends before that."""

_PIECE = b"x" * 230
"""As long as the SSE event of one token."""

_TIMEOUT_S = 120.0
_VOCAB_SIZE = 2048
_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": _VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class StreamCost:
    """The cost of a token when each step of `step_ms` has a token for each of `num_streams` streams: `token_us` is CPU
    time of the loop's thread, `send_us` that of a thread that only calls `socket.send`."""

    num_streams: int
    step_ms: float
    token_us: float
    send_us: float
    tokens_per_s: float


def measure_streams(num_streams: int, step_ms: float, num_steps: int) -> StreamCost:
    """Starts a server, reads `num_streams` chats from it, and ends it after `num_steps` steps with all of them."""
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder) / "fake")
        plan = _Plan(str(Path(folder) / "fake"), num_streams, step_ms / 1000.0, num_steps)
        loop_s, wall_s = _run(_serve, plan)
        send_s, _ = _run(_send, plan)
    token_us, send_us = (1e6 * spent_s / plan.num_tokens for spent_s in (loop_s, send_s))
    return StreamCost(num_streams, step_ms, token_us, send_us, plan.num_tokens / wall_s)


def _run(target: Callable[[_Plan, Connection], None], plan: _Plan) -> tuple[float, float]:
    """Runs `target` as a server process and reads its streams. Returns its thread's CPU seconds and the wall time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=target, args=(plan, theirs))
    server.start()
    try:
        return _read_streams(plan, ours)
    finally:
        server.kill()
        server.join()


def render_streams(costs: Sequence[StreamCost]) -> str:
    """A Markdown table with a row for each measurement."""
    return render_items(
        costs,
        {
            "streams": lambda cost: str(cost.num_streams),
            "step ms": lambda cost: f"{cost.step_ms:g}",
            "loop us a token": lambda cost: f"{cost.token_us:.1f}",
            "of it send us": lambda cost: f"{cost.send_us:.1f}",
            "tokens/s": lambda cost: f"{cost.tokens_per_s:,.0f}",
        },
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    folder: str
    num_streams: int
    step_s: float
    num_steps: int

    @property
    def max_tokens(self) -> int:
        return self.num_steps + _NUM_SPARE_TOKENS

    @property
    def num_tokens(self) -> int:
        """The number of measured tokens."""
        return self.num_steps * self.num_streams

    @property
    def request(self) -> bytes:
        chat = {
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
        body = json.dumps(chat).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def _save_model(folder: Path) -> None:
    """Saves a tiny random model; its tokenizer has the kind of decoder that most models have."""
    tokenizer = word_tokenizer(_VOCAB_SIZE)
    spaces = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    save_folder(build_random(_MODEL, 0), _MODEL, folder, tokenizer)


def _read_streams(plan: _Plan, server: Connection) -> tuple[float, float]:
    """Starts all streams and discards their bytes until the server sends its measurement, which is returned: the CPU
    seconds of its thread and the wall time. Raises `TimeoutError`, or `ConnectionError` if a stream ends."""
    if not server.poll(_TIMEOUT_S):
        raise TimeoutError("the server has not started")
    address = ("127.0.0.1", server.recv())
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as clients:
        for _ in range(plan.num_streams):
            client = clients.enter_context(socket.create_connection(address))
            client.sendall(plan.request)
            selector.register(client, selectors.EVENT_READ, client)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not server.poll():
            for key, _ in selector.select(0.1):
                if not key.data.recv(65536):
                    raise ConnectionError("the server has closed a stream")
                deadline_s = time.monotonic() + _TIMEOUT_S
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no token has come for {_TIMEOUT_S:g} s")
    measured: tuple[float, float] = server.recv()
    return measured


def _serve(plan: _Plan, client: Connection) -> None:
    num_blocks = plan.num_streams * (2 + (plan.max_tokens + 100) // BLOCK_SIZE)
    flags = {
        "model": plan.folder,
        "max_num_seqs": plan.num_streams,
        "num_kv_blocks": num_blocks,
        "max_model_len": plan.max_tokens + 100,
        "log_level": "warning",
    }
    listener = listen(ServerConfig(port=0))
    client.send(listener.getsockname()[1])
    device = _Device(plan, client)

    def make_pool(config: Config) -> ModelPool:
        budget, around = MemoryBudget.of(config.memory), Surroundings.alone(config.memory)
        return ModelPool(Catalog(config), budget, config.pool, around, new_engine=partial(_Engine, device))

    with contextlib.redirect_stdout(io.StringIO()):
        serve(load_config(environ={}, flags=flags), [listener], make_pool)


class _Engine(AsyncEngine):
    """An engine that loads its model but runs steps on a `_Device`."""

    def __init__(self, device: _Device, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._device = device

    async def _run(self) -> None:
        executor = ObservedExecutor(self._device, None, self.metrics, self._tracer)
        await self.scheduler.run(executor, self._clock, self._deliver)


class _Device:
    """An executor whose steps only sleep, on a thread of their own. Sends the client the CPU time of the loop's thread
    and the wall time of the measured steps, once."""

    def __init__(self, plan: _Plan, client: Connection) -> None:
        self._plan = plan
        self._client = client
        self._thread = ThreadPoolExecutor(1)
        self._num_full_steps = 0
        self._began = (0.0, 0.0)

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        step_s = _FIRST_STEPS_S
        if sum(chunk.is_sampling for chunk in output.chunks) == self._plan.num_streams:
            step_s = self._plan.step_s
            self._observe()
        return asyncio.get_running_loop().run_in_executor(self._thread, self._compute, output, step_s)

    def _compute(self, output: SchedulerOutput, step_s: float) -> ModelRunnerOutput:
        time.sleep(step_s)
        word = 2 + output.step_id % (_VOCAB_SIZE - 2)
        sampled = {chunk.request_id: SampledToken(word) for chunk in output.chunks if chunk.is_sampling}
        return ModelRunnerOutput(output.step_id, sampled, step_time_s=step_s)

    def _observe(self) -> None:
        self._num_full_steps += 1
        now = time.thread_time(), time.perf_counter()
        if self._num_full_steps == _NUM_WARM_UP_STEPS:
            self._began = now
        if self._num_full_steps == _NUM_WARM_UP_STEPS + self._plan.num_steps:
            loop_s, wall_s = now[0] - self._began[0], now[1] - self._began[1]
            self._client.send((loop_s, wall_s))


def _send(plan: _Plan, client: Connection) -> None:
    """A server that only sends: in each step, the bytes of one token to each connection."""
    listener = listen(ServerConfig(port=0))
    listener.setblocking(True)
    client.send(listener.getsockname()[1])
    streams = [listener.accept()[0] for _ in range(plan.num_streams)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    spent_s, began_s = 0.0, time.perf_counter()
    for step in range(_NUM_WARM_UP_STEPS + plan.num_steps):
        time.sleep(plan.step_s)
        step_began_s = time.thread_time()
        for stream in streams:
            stream.send(_PIECE)
        if step >= _NUM_WARM_UP_STEPS:
            spent_s += time.thread_time() - step_began_s
    client.send((spent_s, time.perf_counter() - began_s))
    client.poll(_TIMEOUT_S)  # keeps the connections open: the client must close them first
