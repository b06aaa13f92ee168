"""The life of a server process: its port, its one line, its signals and its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from tests.api.sse import bodies

pytestmark = pytest.mark.slow

READY = re.compile(
    r"mlx-serve is ready: (http://127\.0\.0\.1:\d+)/v1  live page: \1/  "
    r"model fake: context of 512 tokens, KV pool of 3200 tokens"
)


class Server:
    """A running process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = ""

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        match = READY.fullmatch(line.strip())
        assert match is not None, line
        self.url = match.group(1)

    async def ended(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def server(
    scenario: str = "ready",
    port: int = 0,
    drain_timeout_s: float = 5,
    log_format: str = "text",
    before: Callable[[], object] | None = None,
) -> AsyncIterator[Server]:
    arguments = ["-m", "tests.api.life", scenario, str(port), str(drain_timeout_s), log_format]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=PIPE, stderr=PIPE, preexec_fn=before
    )
    try:
        yield Server(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def complete(http: httpx.AsyncClient, prompt: str = "Hi", **body: object) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": prompt, **body})


async def until(http: httpx.AsyncClient, path: str, answer: dict[str, object]) -> None:
    """Asks until the answer is as expected."""
    async with asyncio.timeout(10):
        while (response := await http.get(path)).content == b"" or response.json() != answer:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def in_progress(http: httpx.AsyncClient, num: int) -> None:
    await until(http, "/load", {"server_load": num})


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT, signal.SIGHUP])
async def test_a_signal_lets_streams_finish_and_exits_0(number: int):
    """A terminal that is closed sends its own twice: the shell, and then the system."""
    async with server() as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            streams = [asyncio.create_task(complete(http, stream=True)) for _ in range(3)]
            await in_progress(http, 3)
            running.signal(number)
            await until(http, "/health", {"status": "draining"})
            if number == signal.SIGHUP:
                running.signal(number)
            assert (await complete(http)).status_code == 503
            running.signal(signal.SIGUSR1)  # lets them go on
            for response in await asyncio.gather(*streams):
                text = "".join(body["choices"][0]["text"] for body in bodies(response.text))
                assert text == "Hello world"
        code, errors = await running.ended()
    assert code == 0
    assert errors.count(f"Shutting down: {signal.Signals(number).name}\n") == errors.count("Shutting down") == 1


@pytest.mark.parametrize("has_stream", [True, False])
async def test_pulls_are_told_at_once_that_the_server_stops(has_stream: bool):
    """Streams of a model are waited for, and pulls are not: they continue where they were."""
    async with server() as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            streams = [asyncio.create_task(complete(http, stream=True))] * has_stream
            await in_progress(http, len(streams))
            model = {"model": "owner/new"}
            pulls = [
                asyncio.create_task(http.post("/admin/models/pull", json=model)),
                asyncio.create_task(http.post("/api/pull", json={**model, "stream": False})),
            ]
            async with http.stream("POST", "/api/pull", json=model) as response:
                lines = response.aiter_lines()
                assert json.loads(await anext(lines)) == {"status": "pulling manifest"}
                running.signal(signal.SIGTERM)
                *_, last = [json.loads(line) async for line in lines]
            openai, ollama = await asyncio.gather(*pulls)
            reason = "The server is shutting down; pull the model again when it is back, to fetch the rest."
            assert (openai.status_code, openai.json()["error"]["message"]) == (503, reason)
            assert (ollama.status_code, ollama.json(), last) == (503, {"error": reason}, {"error": reason})
            assert openai.headers["retry-after"] == ollama.headers["retry-after"] == "5"
            for stream in streams:
                assert (await http.post("/admin/models/pull", json=model)).status_code == 503, "nor is one begun"
                assert not stream.done()
                running.signal(signal.SIGUSR1)
                assert "[DONE]" in (await stream).text
        code, errors = await running.ended()
    assert code == 0
    assert "Traceback" not in errors


async def test_wrong_heads_of_whoever_sends_them_fill_no_log():
    upgrade = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with server() as running:
        await running.ready()
        for head in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", upgrade):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            writer.write(head)
            assert (await reader.readline()).startswith(b"HTTP/1.1 ")
            writer.close()
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
    assert code == 0
    assert "WARNING uvicorn" not in errors


async def test_nohup_keeps_it_alive():
    async with server(before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as running:
        await running.ready()
        running.signal(signal.SIGHUP)
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            running.signal(signal.SIGUSR1)
            assert (await complete(http)).status_code == 200
        running.signal(signal.SIGTERM)
        assert (await running.ended())[0] == 0


async def test_quit_writes_all_stacks_and_the_streams_go_on():
    async with server() as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            stream = asyncio.create_task(complete(http, stream=True))
            await in_progress(http, 1)
            running.signal(signal.SIGQUIT)
            assert (await http.get("/health")).status_code == 200
            running.signal(signal.SIGUSR1)
            assert "[DONE]" in (await stream).text
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
    assert code == 0
    assert "(most recent call first)" in errors
    assert "in run_forever" in errors


async def test_streams_that_take_too_long_get_an_error_event():
    async with server(drain_timeout_s=0.1) as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            stream = asyncio.create_task(complete(http, stream=True))
            whole = asyncio.create_task(complete(http))
            await in_progress(http, 2)
            running.signal(signal.SIGTERM)
            events = bodies((await stream).text)
            assert events[-1]["error"]["code"] == 503
            assert (await whole).status_code == 503
        code, errors = await running.ended()
        assert code == 0
        assert "Unloading fake while 2 requests use it: their time is over" in errors


async def test_a_server_without_time_to_drain_and_without_requests_cuts_none_off():
    async with server(drain_timeout_s=0) as running:
        await running.ready()
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
    assert code == 0
    assert "their time is over" not in errors


async def test_bodies_that_never_arrive_are_not_waited_for_at_the_end():
    async with server() as running:
        await running.ready()
        port = int(running.url.rpartition(":")[2])
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
        for writer in writers:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            assert (await http.get("/health")).status_code == 200  # the others were read before
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
        for writer in writers:
            writer.close()
    assert code == 0
    assert "Traceback" not in errors
    assert "Cancel" not in errors


async def test_a_second_signal_exits_at_once():
    async with server(drain_timeout_s=60) as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            stream = asyncio.create_task(complete(http, stream=True))
            await in_progress(http, 1)
            running.signal(signal.SIGTERM)
            await until(http, "/health", {"status": "draining"})
            running.signal(signal.SIGTERM)
            assert (await running.ended())[0] == 128 + signal.SIGTERM
            with pytest.raises(httpx.HTTPError):
                await stream


async def test_a_dead_engine_fails_its_streams_and_the_process():
    async with server() as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            stream = asyncio.create_task(complete(http, stream=True))
            await in_progress(http, 1)
            last = await complete(http, "die")
            assert last.status_code == 503
            events = bodies((await stream).text)
            assert events[-1]["error"]["message"] == "The engine has died: no luck."
        code, errors = await running.ended()
        assert code == 1
        assert "The engine of fake has died" in errors


async def test_a_model_that_cannot_be_loaded_ends_the_process():
    async with server("broken") as running:
        code, errors = await running.ended()
    assert code == 1
    assert errors.count("The model has no weights; pull it again.") == 1
    assert "Traceback" not in errors


async def test_while_the_model_loads_health_says_so_and_a_signal_ends_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with (
        server("loading", port) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        response = None
        while response is None:
            with contextlib.suppress(httpx.ConnectError):
                response = await http.get("/health")
            await asyncio.sleep(0.01)
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        waiting = asyncio.create_task(complete(http))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
        assert code == 0
        assert errors.count("Shutting down: SIGTERM\n") == 1
        with pytest.raises(httpx.HTTPError):
            await waiting
