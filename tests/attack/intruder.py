"""One hostile client in a process of its own: `python -m tests.attack.intruder ATTACK HOST PORT KEY NUM`.

It writes a line once the attack is on, and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

TEXT = ("All work and no play makes Jack a dull boy. " * 800)[: 32 * 1024]


def request(path: str, key: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> bytes:
    """Sends a request and takes the whole answer; its first line."""
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    if length is not None:
        await reader.readexactly(int(length.partition(b":")[2]))
    else:
        while (await reader.readuntil(b"\r\n")) != b"0\r\n":
            pass
        await reader.readexactly(2)
    return head.partition(b"\r\n")[0]


class Intruder:
    def __init__(self, host: str, port: int, key: str, num: int) -> None:
        self.host, self.port, self.key, self.num = host, port, key, num
        self.num_answers = 0

    async def tokenize(self) -> None:
        """`num` loops of 32 KB each."""
        await self._loops(request("/tokenize", self.key, {"prompt": TEXT}), self.num)

    async def hold(self) -> None:
        """`num` streams open, each begun again when it ends or is refused."""
        body = {"prompt": "Once upon a time", "max_tokens": 512, "ignore_eos": True, "stream": True}
        await self._loops(request("/v1/completions", self.key, body), self.num // 2, pause_s=0.5)

    async def crowd(self) -> None:
        """`num` clients with honest requests, one after the other."""
        body = {"prompt": TEXT[:256], "max_tokens": 32, "ignore_eos": True, "stream": True}
        await self._loops(request("/v1/completions", self.key, body), self.num)

    async def connect(self) -> None:
        """`num` connections that say nothing, each opened again when it is closed."""

        async def idle() -> None:
            while True:
                try:
                    reader, writer = await asyncio.open_connection(self.host, self.port)
                    self.num_answers += 1
                    await reader.read()
                    writer.close()
                except OSError:
                    pass
                await asyncio.sleep(1)

        await self._run([idle() for _ in range(self.num)], self.num // 2)

    async def _loops(self, sent: bytes, num_first: int, pause_s: float = 0.0) -> None:
        async def loop() -> None:
            while True:
                try:
                    reader, writer = await asyncio.open_connection(self.host, self.port)
                    while True:
                        line = await exchange(reader, writer, sent)
                        self.num_answers += 1
                        if not line.endswith(b"200 OK"):
                            await asyncio.sleep(pause_s)
                except (OSError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.1)

        await self._run([loop() for _ in range(self.num)], num_first)

    async def _run(self, works: list[Any], num_first: int) -> None:
        tasks = [asyncio.create_task(work) for work in works]
        for _ in range(200):
            if self.num_answers >= num_first:
                break
            await asyncio.sleep(0.05)
        print("on", flush=True)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack, host, port, key, num = sys.argv[1:]
    asyncio.run(getattr(Intruder(host, int(port), key, int(num)), attack)())
