"""KV events on the wire: a subscriber that rebuilds the set of cached blocks predicts what requests hit."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from mlx_server.api.app import create_app
from mlx_server.batching.blocks import prefix_cache
from mlx_server.batching.blocks.disk_tier import DiskTier
from mlx_server.config import BLOCK_SIZE, Config, load_config
from mlx_server.engine.prefixes import kv_events
from mlx_server.engine.prefixes.kv_events import CacheEvents, KvEvents, ModelEvents, event_hash
from mlx_server.engine.prefixes.mirror import PrefixMirror
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig, parse_endpoint
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.request import PromptImage
from tests.adapter_files import write_adapter
from tests.batching.worlds import make_request, make_world
from tests.engine_worlds import greedy, make_folder, random_prompts

END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """What a router knows of one topic: chains of token ids that are cached, by adapter, salt and medium."""

    def __init__(self, source: dict[str, Any]) -> None:
        self.source = source
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(source["topic"].encode())
        self.socket.connect(source["endpoint"])
        self.next_sequence = 0
        self.prefixes: dict[tuple[str, int], Any] = {}  # by medium and hash: what is known of the prefix up to there
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self.context.destroy(linger=0)

    def replay(self, start: int = 0, *topics: str) -> list[list[bytes]]:
        """The frames that are kept, as a DEALER gets them."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.source["replay_endpoint"])
        asking.send_multipart([b"", start.to_bytes(8, "big"), *(topic.encode() for topic in topics)])
        frames = []
        while asking.poll(5000):
            reply = asking.recv_multipart()
            if reply == [b"", b"", END, b""]:
                asking.close()
                return frames
            frames.append(reply)
        raise AssertionError("the replay does not end")

    def catch_up(self) -> None:
        for empty, topic, sequence, payload in self.replay(self.next_sequence):
            assert empty == b""
            self.take(topic, sequence, payload)

    def read(self, until: Callable[[], bool]) -> None:
        """Takes what comes and was not replayed, until a condition holds; fails after five seconds of silence."""
        while not until():
            assert self.socket.poll(5000), "no more events come"
            topic, sequence, payload = self.socket.recv_multipart()
            if int.from_bytes(sequence, "big") >= self.next_sequence:
                self.take(topic, sequence, payload)

    def take(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        assert topic.decode() == self.source["topic"]
        assert int.from_bytes(sequence, "big") == self.next_sequence
        self.next_sequence += 1
        time_s, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(time_s, float)
        assert rank == 0
        for event in events:
            self.apply(event)
        self.events += events

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.prefixes.clear()
        elif event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                del self.prefixes[event["medium"], block_hash]
        else:
            assert event["type"] == "BlockStored"
            assert event["block_size"] == BLOCK_SIZE
            assert event["lora_id"] is None
            hashes, parent = event["block_hashes"], event["parent_block_hash"]
            assert len(event["token_ids"]) == BLOCK_SIZE * len(hashes)
            keys = (event.get("extra_keys") or [None])[0]
            known = (event["lora_name"], *(keys or ())) if parent is None else self.known(parent)
            for index, block_hash in enumerate(hashes):
                assert 0 < block_hash < 2**64
                known = (known, *event["token_ids"][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                self.prefixes[event["medium"], block_hash] = known

    def known(self, parent: int) -> Any:
        return next(self.prefixes[medium, parent] for medium in ("GPU", "DISK") if (medium, parent) in self.prefixes)

    def predict_hits(self, prompt: Sequence[int], lora_name: str | None = None, salt: str | None = None) -> int:
        """How many tokens of a prompt are cached, according to the events."""
        known: Any = (lora_name, *(() if salt is None else (salt,)))
        cached = set(self.prefixes.values())
        for start in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
            known = (known, *prompt[start : start + BLOCK_SIZE])
            if known not in cached:
                return start
        return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@contextlib.asynccontextmanager
async def serving(folder: Path | Config, **settings: Any) -> AsyncIterator[ModelPool]:
    flags = {
        "model": None if isinstance(folder, Config) else str(folder),
        "kv_events": "tcp://127.0.0.1:0",
        "kv_events_replay": "tcp://127.0.0.1:0",
        "max_model_len": 1024,
        "num_kv_blocks": 40,
        "speculate": "off",
        **settings,
    }
    flags = {name: value for name, value in flags.items() if value is not None}
    pool = build_pool(folder if isinstance(folder, Config) else load_config(environ={}, flags=flags))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop(0.0)


def sources(pool: ModelPool) -> dict[str, dict[str, Any]]:
    assert pool.events is not None
    return pool.events.sources()


_ids = iter(range(10**9))


async def hit(
    pool: ModelPool,
    prompt: Sequence[int],
    *,
    model: int = 0,
    num_tokens: int = 1,
    adapter: str | None = None,
    **more: Any,
) -> int:
    """How many tokens of a prompt a request had from the cache."""
    generation = GenerationRequest(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=list(prompt),
        sampling=greedy(num_tokens),
        adapter=adapter,
        extra_keys=("key:anonymous", *more.get("salt", ())),
    )
    stream = pool.engines()[model].submit(generation)
    deltas = [delta async for delta in stream]
    return deltas[-1].num_cached_tokens or 0


def run(world: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(world(), 120))


def test_what_events_promise_is_what_requests_hit(tmp_path):
    """Conversations, evictions, a reset, and a subscriber that comes late."""
    folder = make_folder(tmp_path / "model")
    prompts = random_prompts([330, 300, 200, 400, 90, 33], seed=3)

    async def world() -> None:
        async with serving(folder) as pool:
            (source,) = sources(pool).values()
            early = Subscriber(source)
            early.catch_up()
            assert [event["type"] for event in early.events] == ["AllBlocksCleared"]
            num_evicted = num_hit = 0
            for prompt in [*prompts, *prompts[::-1], prompts[0] + prompts[4], *prompts[:2], prompts[0] + prompts[5]]:
                predicted = early.predict_hits(prompt)
                assert await hit(pool, prompt, num_tokens=40) == predicted
                num_hit += predicted > 0
                await asyncio.sleep(0.05)
                early.catch_up()
            num_evicted = sum(event["type"] == "BlockRemoved" for event in early.events)
            assert num_hit >= 3
            assert num_evicted >= 3
            late = Subscriber(source)
            late.catch_up()
            assert late.prefixes == early.prefixes
            assert late.next_sequence == early.next_sequence
            assert pool.engines()[0].reset_prefix_cache()
            await asyncio.sleep(0.05)
            late.catch_up()
            assert late.events[-1] == {"type": "AllBlocksCleared"}
            assert late.prefixes == {}
            assert await hit(pool, prompts[0]) == 0
            early.close()
            late.close()

    run(world)


@pytest.mark.parametrize("idle_s", [60.0, 0.05], ids=["while it looks often", "while it sleeps"])
def test_events_come_by_themselves_and_in_order(tmp_path, monkeypatch, idle_s: float):
    monkeypatch.setattr(kv_events, "_IDLE_S", idle_s)
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([200])

    async def world() -> None:
        async with serving(folder) as pool:
            (source,) = sources(pool).values()
            subscriber = Subscriber(source)
            subscriber.catch_up()
            await asyncio.sleep(0.2)  # ZeroMQ subscribes beside us
            await hit(pool, prompt)
            await asyncio.to_thread(subscriber.read, lambda: subscriber.predict_hits(prompt) == 192)
            subscriber.close()
        assert threading.active_count() < 50

    run(world)


def test_a_hash_is_the_low_half_of_the_digest_and_never_none():
    digest = hashlib.blake2b(b"x", digest_size=16).digest()
    assert event_hash(digest) == int.from_bytes(digest, "big") & (2**64 - 1)
    assert event_hash(bytes(16)) == 1


def test_blocks_of_different_images_differ():
    """Of two prompts with equal tokens, the blocks with placeholders have the image in their keys."""
    sent: list[dict[str, Any]] = []
    for seed in (1, 2):
        world = make_world(40)
        events = ModelEvents("topic", lambda: None)
        mirror = PrefixMirror((None,), has_states=False)
        events.open(CacheEvents(mirror, str, lambda keys: keys))
        world.scheduler.blocks.watch_prefixes(events.add)
        image = PromptImage(40, 50, bytes([seed]) * 32, {})
        world.add(make_request("a", list(range(1, 140)), 1, images=(image,)))
        world.finish()
        payloads = [msgspec.msgpack.decode(payload) for _, payload in events.batches(0.0, msgspec.msgpack.encode)]
        sent += [event for _, batch, _ in payloads for event in batch if event["type"] == "BlockStored"]
    first, second = sent
    assert first["token_ids"] == second["token_ids"]
    name = "01" * 32
    assert first["extra_keys"] == [None, [f"{name}:-8"], [f"{name}:24"], None]
    assert second["extra_keys"][1] != first["extra_keys"][1]


@pytest.mark.parametrize("has_disk", [False, True])
def test_salts_and_adapters_are_told_apart(tmp_path, has_disk: bool):
    folder = make_folder(tmp_path / "model")
    for name in ("a", "b"):
        write_adapter(folder, tmp_path / name, seed=ord(name))
    (prompt,) = random_prompts([100])

    async def world() -> None:
        disk = {"kv_disk": "1GB", "kv_disk_dir": str(tmp_path / "disk")} if has_disk else {}
        adapters = f"{tmp_path / 'a'}:{tmp_path / 'b'}"
        async with serving(folder, adapter=adapters, served_model_name="m", **disk) as pool:
            (source,) = sources(pool).values()
            assert source["topic"] == "kv@127.0.0.1:8000@m"
            subscriber = Subscriber(source)
            kinds: list[tuple[str | None, str | None]] = [
                (None, None),
                ("a", None),
                ("b", None),
                (None, "s"),
                ("a", "s"),
            ]
            for adapter, salt in kinds * 2:
                subscriber.catch_up()
                predicted = subscriber.predict_hits(prompt, None if adapter is None else f"m:{adapter}", salt)
                got = await hit(pool, prompt, adapter=adapter, salt=() if salt is None else (salt,))
                assert got == predicted
                await asyncio.sleep(0.05)
            assert got == 96
            subscriber.close()

    run(world)


@pytest.mark.parametrize("isolation", ["none", "tier", "key"])
def test_events_show_the_salt_of_a_prefix_and_not_its_owner(tmp_path, isolation: str):
    """The salt is at the first block only; without one, there are no keys."""
    folder = make_folder(tmp_path / "model")
    flags = {"isolation": isolation, "num_kv_blocks": 40, "max_model_len": 512, "speculate": "off"}
    endpoints = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    config = load_config(environ={}, flags={"model": str(folder), **flags, **endpoints})
    salted, plain = random_prompts([100, 100])

    async def world() -> None:
        async with serving(config) as pool:
            (source,) = sources(pool).values()
            subscriber = Subscriber(source)
            transport = httpx.ASGITransport(create_app(pool, config))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                for body in ({"prompt": salted, "cache_salt": "mine"}, {"prompt": plain}):
                    answer = await http.post("/v1/completions", json={"max_tokens": 1, **body})
                    assert answer.status_code == 200, answer.text
            subscriber.catch_up()
            subscriber.close()
            stored = [event for event in subscriber.events if event["type"] == "BlockStored"]
            keys = {tuple(event["token_ids"]): event.get("extra_keys") for event in stored}
            assert keys == {tuple(salted[:96]): [["mine"], None, None], tuple(plain[:96]): None}

    run(world)


def test_two_models_have_a_topic_and_numbers_each_and_a_load_begins_anew(tmp_path):
    models = "".join(f'[[models]]\nid = "{n}"\nmodel = "{make_folder(tmp_path / n)}"\n' for n in "ab")
    file = tmp_path / "config.toml"
    file.write_text(
        f"[cache]\nnum_kv_blocks = 40\n[model]\nmax_model_len = 512\n[scheduler]\nspeculate = 'off'\n{models}"
    )
    flags = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    (prompt,) = random_prompts([100])

    async def world() -> None:
        async with serving(load_config(file, environ={}, flags=flags)) as pool:
            for name in "ab":
                await pool.load(name)
            first, second = map(Subscriber, sources(pool).values())
            assert (first.source["topic"][-2:], second.source["topic"][-2:]) == ("@a", "@b")
            await hit(pool, prompt, model=1)
            await asyncio.sleep(0.05)
            first.catch_up()
            assert first.predict_hits(prompt) == 0
            frames = second.replay(0, second.source["topic"])
            for _, topic, sequence, payload in frames:
                second.take(topic, sequence, payload)
            assert second.predict_hits(prompt) == 96 == await hit(pool, prompt, model=1)
            await pool.unload("b", 0.0)
            await pool.load("b")
            await asyncio.sleep(0.05)
            for _, topic, sequence, payload in second.replay(second.next_sequence, second.source["topic"]):
                second.take(topic, sequence, payload)
            assert second.predict_hits(prompt) == 0 == await hit(pool, prompt, model=1)
            first.close()
            second.close()

    run(world)


def test_blocks_on_disk_have_their_medium(tmp_path, monkeypatch):
    monkeypatch.setattr(DiskTier, "_pays", lambda self, first, end: end > first)
    monkeypatch.setattr("mlx_server.batching.blocks.disk_saves.MIN_PROMPT_TOKENS", 32)
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier.IDLE_S", 0.0)
    folder = make_folder(tmp_path / "model")
    prompts = random_prompts([600, 600, 600], seed=5)
    disk = {"kv_disk": "64MB", "kv_disk_dir": str(tmp_path / "disk")}

    async def world() -> None:
        async with serving(folder, **disk) as pool:
            (source,) = sources(pool).values()
            subscriber = Subscriber(source)
            for prompt in prompts:
                await hit(pool, prompt)
                await asyncio.sleep(0.3)
            subscriber.catch_up()
            assert {medium for medium, _ in subscriber.prefixes} == {"GPU", "DISK"}
            first = [block_hash for medium, block_hash in subscriber.prefixes if medium == "DISK"]
            assert len(first) >= 18
            assert subscriber.predict_hits(prompts[0]) == 576 == await hit(pool, prompts[0])
            subscriber.close()
        async with serving(folder, **disk) as pool:  # what nobody has asked for since is not announced
            (source,) = sources(pool).values()
            subscriber = Subscriber(source)
            subscriber.catch_up()
            assert subscriber.prefixes == {}
            assert await hit(pool, prompts[2]) == 576
            await asyncio.sleep(0.1)
            subscriber.catch_up()
            assert sum(medium == "DISK" for medium, _ in subscriber.prefixes) == 18
            subscriber.close()

    run(world)


def test_the_ring_is_bounded_and_a_replay_begins_with_what_is_left(monkeypatch):
    monkeypatch.setattr(kv_events, "RING_BATCHES", 4)
    ring = kv_events._Ring()
    for sequence in range(10):
        ring.add(sequence, bytes(100))
    assert [sequence for sequence, _ in ring.batches] == [6, 7, 8, 9]
    assert ring.num_bytes == 400
    monkeypatch.setattr(kv_events, "_RING_BYTES", 250)
    ring.add(10, bytes(100))
    assert [sequence for sequence, _ in ring.batches] == [9, 10]


def publish(channel: ModelEvents, num_batches: int) -> int:
    """Publishes batches of one block each; returns how many batches there are now, or one less."""
    num_sent = channel.num_sent + num_batches
    for index in range(1, num_batches + 1):
        hashes = (index.to_bytes(16, "big"),)
        channel.add(prefix_cache.BlocksStored(0, None, hashes, [1] * BLOCK_SIZE, (0,), (), "a"))
    while channel.num_sent < num_sent:
        time.sleep(0.01)
    return num_sent


def slow_socket(context: zmq.Context, kind: int, endpoint: str) -> zmq.Socket:
    """Holds little that is not read."""
    opened = context.socket(kind)
    opened.setsockopt(zmq.RCVHWM, 1)
    opened.setsockopt(zmq.RCVBUF, 2**16)
    opened.connect(endpoint)
    return opened


def test_a_subscriber_that_does_not_read_loses_later_batches_and_notices(monkeypatch):
    """Few wait for it where the mark is low: not the 30 that ZeroMQ would keep by itself."""
    monkeypatch.setattr(kv_events, "HIGH_WATER_MARK", 4)
    monkeypatch.setattr(kv_events, "_MAX_BLOCKS_A_BATCH", 1)
    events = KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0"))
    channel = events.open("topic", CacheEvents(PrefixMirror((None,)), lambda name: name * 2**20, tuple))
    sequences: list[int] = []

    def read(first: int) -> None:
        """Until there is a batch with this number or a later one."""
        while not sequences or sequences[-1] < first:
            if subscriber.poll(20):
                sequences.append(int.from_bytes(subscriber.recv_multipart()[1], "big"))
            else:
                channel.add(prefix_cache.CacheCleared())

    with zmq.Context() as context, slow_socket(context, zmq.SUB, events.sources()["0"]["endpoint"]) as subscriber:
        subscriber.subscribe("topic")
        read(0)
        read(publish(channel, 30))
    events.close()
    assert sequences == sorted(set(sequences))
    assert len(sequences) < sequences[-1] - sequences[0]


def test_a_slow_reader_gets_a_replay_as_a_whole(monkeypatch):
    monkeypatch.setattr(kv_events, "_MAX_BLOCKS_A_BATCH", 1)
    events = KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0"))
    channel = events.open("topic", CacheEvents(PrefixMirror((None,)), lambda name: name * 2**13, tuple))
    publish(channel, 3000)
    with (
        zmq.Context() as context,
        slow_socket(context, zmq.DEALER, events.sources()["0"]["replay_endpoint"]) as asking,
    ):
        asking.send_multipart([b"", bytes(8)])
        assert asking.poll(5000)
        time.sleep(0.3)  # the server has sent all meanwhile
        sequences: list[bytes] = []
        while END not in sequences:
            assert asking.poll(5000), f"the replay breaks off after {len(sequences)} batches"
            sequences.append(asking.recv_multipart()[2])
    events.close()
    assert len(sequences) > 3000
    assert sequences[:-1] == [number.to_bytes(8, "big") for number in range(len(sequences) - 1)]


def test_messages_have_no_more_blocks_than_subscribers_take():
    channel, encode = ModelEvents("t", lambda: None), msgspec.msgpack.Encoder().encode
    channel.open(CacheEvents(PrefixMirror((None,)), lambda name: name, lambda keys: keys))
    hashes = tuple(number.to_bytes(16, "big") for number in range(1, 5001))

    def sent() -> tuple[list[list[int]], list[int]]:
        """How many blocks each event has, by message; and all blocks."""
        messages = [msgspec.msgpack.decode(payload)[1] for _, payload in channel.batches(0.0, encode)]
        events = [[event.get("block_hashes", []) for event in events] for events in messages]
        return [[*map(len, message)] for message in events], [*itertools.chain(*itertools.chain(*events))]

    channel.add(prefix_cache.BlocksStored(0, None, hashes, [1] * BLOCK_SIZE * 5000, (0,), (), None))
    assert sent() == ([[0, *[256] * 8], [256] * 8, [*[256] * 3, 136]], [*range(1, 5001)])
    for digest in hashes:
        channel.add(prefix_cache.BlockRemoved(digest, 0))
    sizes, removed = sent()
    assert (sizes, sorted(removed)) == ([[2048], [2048], [904]], [*range(1, 5001)])


def test_a_full_queue_tells_subscribers_to_forget(monkeypatch, caplog):
    """After a loss, everything is taken back, and is announced again as it comes."""
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 3)
    channel = kv_events.ModelEvents("t", lambda: None)
    mirror = kv_events.PrefixMirror((None,))
    channel.open(kv_events.CacheEvents(mirror, lambda name: name or "", lambda keys: keys))
    encode = msgspec.msgpack.Encoder().encode
    digests = [bytes([index]) * 16 for index in range(1, 9)]

    def stored(first: int) -> prefix_cache.BlocksStored:
        parent = digests[first - 1] if first else None
        return prefix_cache.BlocksStored(first, parent, (digests[first],), [first] * 32, (0,), (), None)

    def sent() -> list[str]:
        payloads = [msgspec.msgpack.decode(payload) for _, payload in channel.batches(0.0, encode)]
        return [event["type"] for _, events, _ in payloads for event in events]

    channel.add(stored(0))
    assert sent() == ["AllBlocksCleared", "BlockStored"]
    for first in (1, 2, 3, 4):
        channel.add(stored(first))
    assert channel.num_lost == 3
    assert "lost: 3" in caplog.text
    assert sent() == ["AllBlocksCleared"]  # 4 comes behind blocks that nobody knows
    channel.add(stored(0))
    assert sent() == ["BlockStored"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:0"}, "there is nothing to replay"),
        ({"kv_events": "tcp://no.such.host.invalid:5557"}, "no known host"),
        ({"kv_events": "tcp://127.0.0.1:0", "kv_events_topic": "mine", "model_folders": "x"}, "put {model} into it"),
    ],
)
def test_settings_that_cannot_be_are_reported(settings, message):
    with pytest.raises(ConfigError, match=message):
        kv_events.open_events(load_config(environ={}, flags=settings))


def test_events_without_their_libraries_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs the package zmq. .*pip install .\.\[fleet\]"):
        KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0"))


@pytest.mark.parametrize("frames", [[b""], [b"", b"x"], [b"x"], [b"", bytes(8), b"no such topic"], [b"", bytes(9)]])
def test_a_replay_that_nobody_can_answer_ends_at_once(frames):
    events = KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(events._replay_endpoint)
        for _ in range(2):  # and the thread lives on
            asking.send_multipart(frames)
            assert asking.poll(5000)
            assert asking.recv_multipart() == [b"", b"", END, b""]
    events.close()


def test_events_are_bound_to_the_host_alone():
    """Other addresses of this machine are free: a socket on all of them would be in the way."""
    events = KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0"))
    try:
        events.open("topic", CacheEvents(PrefixMirror([None]), str, tuple))
        (source,) = events.sources().values()
        port = parse_endpoint(source["endpoint"])[1]
        with socket.socket() as here, socket.socket() as elsewhere:
            with pytest.raises(OSError, match="in use"):
                here.bind(("127.0.0.1", port))
            try:
                elsewhere.bind(("127.0.0.2", 0))
            except OSError:
                pytest.skip("this machine has one loopback address")
        with socket.socket() as elsewhere:
            elsewhere.bind(("127.0.0.2", port))
    finally:
        events.close()


def test_a_port_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen at"):
            KvEvents(FleetConfig(kv_events=endpoint))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_routers_are_told_an_endpoint_that_they_can_reach(host):
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"{host} is no address of this machine")
    events = KvEvents(FleetConfig(kv_events=f"tcp://{host}:0", kv_events_replay=f"tcp://{host}:0"))
    try:
        events.open("topic", CacheEvents(PrefixMirror([None]), str, tuple))
        (source,) = events.sources().values()
        for name in ("endpoint", "replay_endpoint"):
            assert source[name].startswith(f"tcp://{host}:")
            assert parse_endpoint(source[name])[1] > 0
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.IPV6, 1)
            asking.connect(source["replay_endpoint"])
            asking.send_multipart([b"", b"x"])
            assert asking.poll(5000)
    finally:
        events.close()


@pytest.mark.parametrize(
    "text", ["127.0.0.1:5557", "tcp://:5557", "tcp://h", "ipc://x", "tcp://h:99999", "tcp://h:1/x"]
)
def test_endpoints_that_are_none(text):
    with pytest.raises(ConfigError, match=r"kv_events is .*write tcp://HOST:PORT"):
        load_config(environ={}, flags={"kv_events": text})
