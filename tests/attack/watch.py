"""Three streams that must not stall: `python -m tests.attack.watch PORT`. For each line on standard input it answers
with a line: the worst gap between two events of one stream since the last such line, in seconds.

A process of its own, so that what an attack costs its sender does not count.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

NUM_STREAMS = 3
_BODY = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Gap:
    """The worst so far, and the one that is open."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._worst_s = 0.0
        self.num_events = 0

    def tick(self) -> None:
        self._worst_s = self.worst()
        self._last_s = time.monotonic()
        self.num_events += 1

    def pause(self) -> None:
        """The stream has ended; the next one's first event is no gap."""
        self._worst_s, self._last_s = self.worst(), None

    def worst(self) -> float:
        return self._worst_s if self._last_s is None else max(self._worst_s, time.monotonic() - self._last_s)

    def take(self) -> float:
        worst, self._worst_s = self.worst(), 0.0
        return worst


async def stream(port: int, gap: Gap) -> None:
    body = json.dumps(_BODY).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b"200" not in status:
            raise RuntimeError(f"a stream was refused: {status!r}")
        async for line in reader:
            if line.startswith(b"data: {"):
                gap.tick()
        gap.pause()
        writer.close()


async def main() -> None:
    gaps = [Gap() for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(stream(int(sys.argv[1]), gap)) for gap in gaps]
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        for task in streams:
            if task.done():
                task.result()
        num_events = sum(gap.num_events for gap in gaps)
        print(json.dumps({"worst_gap_s": max(gap.take() for gap in gaps), "num_events": num_events}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
