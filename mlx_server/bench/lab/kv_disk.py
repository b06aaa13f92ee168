"""What prefixes on disk cost streams: beside saving, and beside a load.

Streams are an engine's in this process: a second without saving, two with blocks that are saved all the time, and one
without, again and again, since longer contexts take longer; then streams beside nothing and beside a prefix that is
loaded.

example:
  mlx-serve bench kv-disk --num-tokens 8000 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from mlx_server.bench.arguments import add_json_argument, from_1
from mlx_server.bench.instruments import describe_environment
from mlx_server.bench.tables import render_items, tell, write_json
from mlx_server.config import BLOCK_SIZE, DEFAULT_MODEL, load_config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.errors import ServeError
from mlx_server.kv_disk.disk import ModelRecords
from mlx_server.request import Request
from mlx_server.sampling_params import SamplingParams

_STREAM_TOKENS = 200
_TURNS_TOKENS = 1600
_TURN_S = 1.0
_PROMPT_TOKENS = 24
_MOST_WAIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench kv-disk`."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="whose streams; a folder, a hub id, a GGUF file, or the bundled one")
    add("--num-tokens", type=from_1, default=2048, metavar="N", help="of the prefix that is saved and loaded")
    add("--num-streams", type=from_1, default=4, metavar="N", help="that decode beside it")
    add("--rounds", type=from_1, default=3, metavar="N", help="of each kind, in turns")
    add("--kv-cache-memory", default="1GB", metavar="SIZE", help="of the engine's pool")
    add("--folder", type=Path, help="where files are made meanwhile; default: that of temporary files")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a table."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        phases = asyncio.run(_measure_streams(args, Path(folder)))
    print(render_phases(phases))
    document = {"benchmark": "kv-disk", "environment": describe_environment()}
    write_json(args.json, {**document, "streams": [phase.__dict__ for phase in phases]})
    return 0


@dataclass
class Phase:
    """Streams for a while: gaps between tokens in seconds, and what went to or came from the disk meanwhile."""

    kind: str
    target_s: float
    gaps_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    elapsed_s: float = 0.0
    ttft_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of one stream."""
        return 1.0 / statistics.fmean(self.gaps_s)


def render_phases(phases: Sequence[Phase]) -> str:
    """One row a phase, in their order."""
    return render_items(
        phases,
        {
            "beside the streams": lambda phase: phase.kind,
            "tokens/s of each": lambda phase: f"{phase.tokens_per_s:.1f}",
            "median gap": lambda phase: f"{1000 * statistics.median(phase.gaps_s):.1f} ms",
            "worst gap": lambda phase: f"{1000 * max(phase.gaps_s):.0f} ms",
            "of the target": lambda phase: f"{max(phase.gaps_s) / phase.target_s:.2f}",
            "MB/s": lambda phase: f"{phase.num_bytes / 1e6 / phase.elapsed_s:.0f}",
            "TTFT": lambda phase: "" if phase.ttft_s is None else f"{phase.ttft_s:.2f} s",
        },
    )


class _AlwaysNew:
    """A model's records, of which those in memory are never on disk yet: each is written again, as another."""

    _numbers = count()

    def __init__(self, records: ModelRecords) -> None:
        self._records = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    def has(self, digest: bytes) -> bool:
        return False

    def write(self, digest: bytes, *of_record: Any, is_state: bool) -> None:
        self._records.write(next(self._numbers).to_bytes(len(digest), "little"), *of_record, is_state=is_state)


class _Streams:
    """Streams of an engine with a prefix in memory and on disk."""

    def __init__(self, engine: AsyncEngine, prefix: Sequence[int], num_streams: int) -> None:
        self._engine = engine
        self._prefix = prefix
        self._num_streams = num_streams
        self._num_prompts = 0
        tier = engine.scheduler.disk
        if tier is None or not isinstance(tier.saves.store, ModelRecords):
            raise ServeError("Prefixes of this model are not kept on disk; the log says why.")
        self._tier, self._disk = tier, tier.saves.store.disk
        self._left = Request("left", list(prefix), SamplingParams(), arrival_s=0.0, max_total_tokens=len(prefix) + 1)
        self._left.num_computed_tokens = len(prefix)

    async def ask(self, prompt: Sequence[int], num_tokens: int) -> list[float]:
        """When it was asked, and when each token came."""
        self._num_prompts += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = GenerationRequest(
            request_id=f"bench {self._num_prompts}", prompt_token_ids=list(prompt), sampling=sampling
        )
        times = [time.perf_counter()]
        async for delta in self._engine.submit(request):
            times += [time.perf_counter()] * len(delta.token_ids)
        return times

    async def phases(self, kind: str) -> list[Phase]:
        """Streams beside nothing and beside one of `saving`, in turns of `_TURN_S`, and `loading`, one after the other;
        none of their prompts was there before."""
        if kind == "saving":
            return await self._phase(("nothing", kind))
        return [*await self._phase(("nothing",)), *await self._phase((kind,))]

    async def _phase(self, kinds: Sequence[str]) -> list[Phase]:
        if "loading" in kinds and not self._engine.reset_prefix_cache():
            raise ServeError("The prefix cache is in use.")
        before = [self._num_prompts * 97 + number for number in range(_PROMPT_TOKENS)]
        prompts = [[5 + (first + 7 * stream) % 290 for first in before] for stream in range(self._num_streams)]
        num_tokens = _TURNS_TOKENS if len(kinds) > 1 else _STREAM_TOKENS
        streams = [asyncio.create_task(self.ask(prompt, num_tokens)) for prompt in prompts]
        running = self._engine.scheduler
        await _until(lambda: running.num_running == self._num_streams or any(stream.done() for stream in streams))
        found = {kind: Phase(kind, self._tier.target_s()) for kind in kinds}
        turns: list[tuple[str, float, float]] = []
        while not any(stream.done() for stream in streams):
            kind = kinds[(len(turns) + 1) // 2 % len(kinds)]
            num_bytes, start_s = self._num_bytes(), time.perf_counter()
            await self._turn(found[kind], streams)
            turns.append((kind, start_s, time.perf_counter()))
            found[kind].elapsed_s += turns[-1][2] - start_s
            found[kind].num_bytes += self._num_bytes() - num_bytes
        gaps = [gap for times in await asyncio.gather(*streams) for gap in pairwise(times[10:])]
        whole = turns if len(kinds) == 1 else turns[: (len(turns) - 1) // 4 * 4]
        for kind, start_s, end_s in whole:
            found[kind].gaps_s += [after - before for before, after in gaps if start_s <= before and after <= end_s]
        if not all(phase.gaps_s for phase in found.values()):
            raise ServeError("The streams ended before all of it was measured; take a larger model.")
        return list(found.values())

    async def _turn(self, phase: Phase, streams: Sequence[asyncio.Task[list[float]]]) -> None:
        if phase.kind == "loading" and phase.ttft_s is None:
            asked_s, first_s = await self.ask([*self._prefix, 7, 8, 9], 1)
            phase.ttft_s = first_s - asked_s
            return
        end_s = time.perf_counter() + _TURN_S
        while time.perf_counter() < end_s and not any(stream.done() for stream in streams):
            if phase.kind == "saving":
                self._tier.saves.on_leave(self._left)
            await asyncio.wait(streams, timeout=_TURN_S / 10, return_when=asyncio.FIRST_COMPLETED)
        self._tier.saves.forget()
        await asyncio.to_thread(self._disk.drain, _TURN_S)

    def _num_bytes(self) -> int:
        counters = self._disk.counters
        return counters.num_bytes_read + counters.num_bytes_written

    async def keep(self) -> float:
        """Computes the prefix, and waits until it is on disk; the seconds to its first token."""
        asked_s, first_s = await self.ask(self._prefix, 1)
        self._engine.scheduler.blocks.find_prefix(self._left)  # its hashes
        await _until(lambda: len(self._disk.store) == len(self._prefix) // BLOCK_SIZE)
        return first_s - asked_s

    @contextmanager
    def saving_again(self) -> Iterator[None]:
        """What is saved meanwhile was never saved before."""
        saves = self._tier.saves
        records: Any = saves.store
        saves.store = _AlwaysNew(records)
        try:
            yield
        finally:
            saves.store = records


async def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _MOST_WAIT_S
    while not is_so():
        if time.monotonic() > end_s:
            raise ServeError(f"What was waited for has not come after {_MOST_WAIT_S:.0f} s.")
        await asyncio.sleep(0.01)


async def _measure_streams(args: argparse.Namespace, folder: Path) -> list[Phase]:
    settings = {
        "model": args.model,
        "kv_cache_memory": args.kv_cache_memory,
        "speculate": "off",
        "kv_disk": "4GB",
        "kv_disk_dir": str(folder),
        "kv_disk_writes_per_day": "100TB",
    }
    engine = AsyncEngine(load_config(environ={}, flags=settings))
    await engine.start()
    try:
        prefix = [3 + (17 * number + number // 700) % 290 for number in range(args.num_tokens)]
        streams = _Streams(engine, prefix, args.num_streams)
        tell(f"computing and saving {args.num_tokens:,} tokens")
        cold_s = await streams.keep()
        tell(f"its first token came after {cold_s:.1f} s")
        phases = []
        for _ in range(args.rounds):
            with streams.saving_again():
                phases += await streams.phases("saving")
        for _ in range(args.rounds):
            phases += await streams.phases("loading")
        return phases
    finally:
        await engine.stop()
