"""Publishes which prefixes are cached, for routers, in vLLM's format: ZeroMQ and MessagePack.

    topic | sequence number, 8 bytes, big endian | [time, [event, ...], 0]

The topic names the server and the model; each topic has its own sequence numbers. Events are the maps `BlockStored`,
`BlockRemoved` and `AllBlocksCleared`. A block's hash is the low 64 bits of its digest. Blocks in memory have the medium
`GPU`, those on disk `DISK`. Modelled on vLLM's `kv_events.py`: https://docs.vllm.ai.

A scheduler only appends changes to a queue (`ModelEvents.add`, on the event loop's thread). One thread reads the
queues, mirrors each cache (`PrefixMirror`) and owns both sockets. It looks for changes every 10 ms. It is woken only if
there were none for a second: waking it during a step would let it take the interpreter lock from that step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.prefix_cache import CacheCleared, PrefixChange
from mlx_server.config import BLOCK_SIZE, Config
from mlx_server.engine.prefixes.mirror import Announcement, MirroredBlock, PrefixMirror
from mlx_server.environment import install_command
from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig, parse_endpoint

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

MEMORY, DISK = "GPU", "DISK"
RING_BATCHES = 10_000
MAX_QUEUED = 100_000
"""The most changes that wait for the thread. If there are more, subscribers must forget everything."""

HIGH_WATER_MARK = 100_000
"""The most messages that wait for one subscriber. It loses later ones, and notices that by the sequence numbers."""

_RING_BYTES = 32 * 2**20
_MAX_BLOCKS_AN_EVENT = 256
_MAX_BLOCKS_A_BATCH = 2048
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_PAUSE_MS = 10
_IDLE_S = 1.0
_REMEDY = f"Install it: {install_command('fleet')}."


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """How to publish the cache of a model that was just loaded. `lora_name` returns clients' name of the model with an
    adapter, `shown_keys` the published ones of the extra keys that separate prefixes."""

    mirror: PrefixMirror
    lora_name: Callable[[str], str]
    shown_keys: Callable[[tuple[str, ...]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _DiskChange:
    digest: bytes
    is_there: bool


@dataclass(slots=True)
class _Ring:
    """The last batches of a topic, with their sequence numbers."""

    batches: deque[tuple[int, bytes]] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, sequence: int, payload: bytes) -> None:
        self.batches.append((sequence, payload))
        self.num_bytes += len(payload)
        while len(self.batches) > RING_BATCHES or self.num_bytes > _RING_BYTES:
            self.num_bytes -= len(self.batches.popleft()[1])


class ModelEvents:
    """One model's queue of changes, and the batches made of them. `open` and `add` are called on the event loop's
    thread (for changes on disk, on the disk's thread), all else on the publisher's thread."""

    def __init__(self, topic: str, wake: Callable[[], None]) -> None:
        self.topic = topic
        self.num_lost = 0
        self.ring = _Ring()
        self.num_sent = 0
        self._wake = wake
        self._queue: deque[PrefixChange | CacheEvents | _DiskChange] = deque()
        self._opened: CacheEvents | None = None
        self._cache: CacheEvents | None = None
        self._is_closed = False

    def open(self, cache: CacheEvents) -> None:
        """Begins with a new, empty cache: later changes are changes of it."""
        self._opened = cache
        self.add(cache)

    def close(self) -> None:
        """Drops all changes from now on, since nobody reads the queue any more."""
        self._is_closed = True
        self._queue.clear()

    def add(self, change: PrefixChange | CacheEvents | _DiskChange) -> None:
        """Adds a change to publish. Never waits."""
        if self._is_closed:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.num_lost += len(self._queue)
            self._queue.clear()
            self._queue += [] if self._opened is None else [self._opened, CacheCleared()]
            logger.warning("KV events of %s were lost: %d so far", self.topic, self.num_lost)
        self._queue.append(change)
        self._wake()

    def batches(self, now: float, encode: Callable[[object], bytes]) -> Iterator[tuple[int, bytes]]:
        """Yields the sequence number and payload of each new batch."""
        with contextlib.suppress(IndexError):  # `add` may empty the queue meanwhile
            while True:
                self._follow(self._queue.popleft())
        if self._cache is None:
            return
        for events in _in_batches(_events(self._cache, self._cache.mirror.take(now))):
            sequence, self.num_sent = self.num_sent, self.num_sent + 1
            payload = encode([time.time(), events, 0])
            self.ring.add(sequence, payload)
            yield sequence, payload

    def _follow(self, change: PrefixChange | CacheEvents | _DiskChange) -> None:
        if isinstance(change, CacheEvents):
            self._cache = change
        elif self._cache is None:
            return
        elif isinstance(change, _DiskChange):
            self._cache.mirror.change_disk(change.digest, change.is_there)
        else:
            self._cache.mirror.apply(change)


def _events(cache: CacheEvents, announcement: Announcement) -> Iterator[dict[str, Any]]:
    if announcement.is_cleared:
        yield {"type": "AllBlocksCleared"}
    for hashes, medium in ((announcement.removed, MEMORY), (announcement.removed_from_disk, DISK)):
        for first in range(0, len(hashes), _MAX_BLOCKS_A_BATCH):
            some = hashes[first : first + _MAX_BLOCKS_A_BATCH]
            yield {"type": "BlockRemoved", "block_hashes": [*map(event_hash, some)], "medium": medium}
    for chain in announcement.stored:
        for first in range(0, len(chain), _MAX_BLOCKS_AN_EVENT):
            yield _stored(cache, chain[first : first + _MAX_BLOCKS_AN_EVENT], MEMORY)
    for block in announcement.on_disk:
        yield _stored(cache, [block], DISK)


def _stored(cache: CacheEvents, chain: Sequence[MirroredBlock], medium: str) -> dict[str, Any]:
    head = chain[0]
    keys = [list(block.image_keys) for block in chain]
    keys[0] = [*cache.shown_keys(head.extra_keys), *keys[0]]
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [event_hash(block.block_hash) for block in chain],
        "parent_block_hash": None if head.parent is None else event_hash(head.parent.block_hash),
        "token_ids": [token_id for block in chain for token_id in block.token_ids],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": medium,
        "lora_name": None if head.adapter is None else cache.lora_name(head.adapter),
    }
    if any(keys):
        event["extra_keys"] = [own or None for own in keys]
    return event


class KvEvents:
    """A process's publisher: its sockets, its thread, and a `ModelEvents` for each model that was loaded."""

    def __init__(self, settings: FleetConfig) -> None:
        """Opens the sockets. Raises `ConfigError` for an endpoint that cannot be used, and for missing libraries."""
        assert settings.kv_events is not None, "events are published at an endpoint"
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(f"--kv-events needs the package {error.name}. {_REMEDY}") from error
        self._encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._endpoint = _open(self._publisher, "kv_events", settings.kv_events, may_connect=True)
            self._replay_endpoint: str | None = None
            if settings.kv_events_replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, 2 * (RING_BATCHES + 1))
                self._replay_endpoint = _open(
                    self._replay, "kv_events_replay", settings.kv_events_replay, may_connect=False
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._channels: dict[str, ModelEvents] = {}
        self._sleeps = self._is_closing = False
        self._waker, self._alarm = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def open(self, topic: str, cache: CacheEvents) -> ModelEvents:
        """The events of a model that was just loaded, with an empty cache. Sequence numbers continue after a reload."""
        channel = self._channels.get(topic)
        if channel is None:
            channel = ModelEvents(topic, self._wake)
            self._channels = {**self._channels, topic: channel}  # the thread reads it
        channel.open(cache)
        return channel

    def on_disk_change(self, digest: bytes, is_there: bool) -> None:
        """Publishes that a record of some model was written to the disk, or removed. Any thread."""
        for channel in self._channels.values():
            channel.add(_DiskChange(digest, is_there))

    def sources(self) -> dict[str, dict[str, Any]]:
        """The answer of `/kv_event_sources`: one entry for each topic, in the order of the models' first loads."""
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self._endpoint,
                "replay_endpoint": self._replay_endpoint,
                "buffer_steps": RING_BATCHES,
                "hwm": HIGH_WATER_MARK,
                "max_queue_size": MAX_QUEUED,
                "topic": topic,
            }
            for rank, topic in enumerate(self._channels)
        }

    @property
    def num_sent(self) -> dict[str, int]:
        """The number of batches published, by topic."""
        return {topic: channel.num_sent for topic, channel in self._channels.items()}

    @property
    def num_lost(self) -> dict[str, int]:
        """The number of changes that were not published, by topic."""
        return {topic: channel.num_lost for topic, channel in self._channels.items()}

    def close(self) -> None:
        """Publishes what is queued, and ends the thread."""
        self._is_closing = True
        self._alert()
        self._thread.join(5.0)
        self._waker.close()

    def _wake(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._alert()

    def _alert(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._waker.send(b"\0")

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            logger.exception("Publishing KV events has failed; there are none until a restart")
        finally:
            for channel in self._channels.values():
                channel.close()
            self._alarm.close()
            self._context.destroy(linger=_LINGER_MS)

    def _work(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._alarm, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_last, busy_s = False, time.monotonic()
        while not is_last:
            self._sleeps = time.monotonic() - busy_s > _IDLE_S  # set before the queues are read, or a change is missed
            is_last = self._is_closing
            if self._publish():
                busy_s = time.monotonic()
            ready = dict(poller.poll(None if self._sleeps else _PAUSE_MS))
            if self._alarm.fileno() in ready:
                self._alarm.recv(64)
                busy_s = time.monotonic()
            if self._replay is not None and self._replay in ready:
                self._publish()  # so that the replay includes all changes before the request
                self._answer(self._replay, self._replay.recv_multipart())

    def _publish(self) -> bool:
        """Publishes the changes; returns whether there were any."""
        has_sent = False
        for channel in self._channels.values():
            for sequence, payload in channel.batches(time.monotonic(), self._encode):
                self._publisher.send_multipart([channel.topic.encode(), sequence.to_bytes(8, "big"), payload])
                has_sent = True
        return has_sent

    def _answer(self, replay: zmq.Socket[bytes], request: list[bytes]) -> None:
        """Sends the batches from a sequence number on, of the requested topic or else the first model's. An invalid
        request gets only the end mark."""
        client, start, *topics = [request[0], *(request[2:] or [b""])]
        channels = self._channels
        topic = topics[0].decode(errors="replace") if topics else next(iter(channels), "")
        channel = channels.get(topic)
        if channel is not None and len(start) == 8:
            first = int.from_bytes(start, "big")
            for sequence, payload in channel.ring.batches:
                if sequence >= first:
                    replay.send_multipart([client, b"", topic.encode(), sequence.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", b"", _END_OF_REPLAY, b""])


def open_events(config: Config) -> KvEvents | None:
    """Opens the configured publisher; None if there is none. Raises `ConfigError`."""
    settings = config.fleet
    if settings.kv_events is None:
        if settings.kv_events_replay is not None:
            raise ConfigError("kv_events_replay is set, but kv_events is not: there is nothing to replay.")
        return None
    has_several = len(config.models) > 1 or config.pool.pulled_models or config.pool.model_folders
    if has_several and "{model}" not in settings.kv_events_topic:
        raise ConfigError(
            f"kv_events_topic is {settings.kv_events_topic!r}, but there are several models: put {{model}} into it, so "
            "that each model has its own topic."
        )
    return KvEvents(settings)


def follow(
    events: KvEvents,
    config: Config,
    name_with: Callable[[str | None], str],
    blocks: PagedBlockManager,
    is_on_disk: Callable[[bytes], bool] | None,
) -> ModelEvents:
    """Publishes all changes of a model's prefix cache from now on; it must be empty. `name_with` returns clients' name
    of the model with an adapter or without; `is_on_disk` says whether the disk tier has a block, if there is one."""
    mirror = PrefixMirror(blocks.groups.windows, has_states=blocks.checkpoints is not None, is_on_disk=is_on_disk)
    named = {"host": config.server.host, "port": config.server.port, "model": name_with(None)}
    topic = config.fleet.kv_events_topic.format(**named)
    # The first key is the prefix's owner. Routers do not know owners, and would find no prefix if it was published.
    first = 0 if config.cache.isolation == "none" else 1
    channel = events.open(topic, CacheEvents(mirror, name_with, lambda keys: keys[first:]))
    blocks.watch_prefixes(channel.add)
    return channel


def event_hash(digest: bytes) -> int:
    """A block's hash in events: the low 64 bits of its digest, unsigned; never 0, which some read as no parent."""
    return int.from_bytes(digest[-8:], "big") or 1


def _in_batches(events: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields lists of events with at most about 2,048 blocks, since subscribers limit the size of a message."""
    batch: list[dict[str, Any]] = []
    num_blocks = 0
    for event in events:
        num_blocks += len(event.get("block_hashes", ()))
        if batch and num_blocks > _MAX_BLOCKS_A_BATCH:
            yield batch
            batch, num_blocks = [], len(event.get("block_hashes", ()))
        batch.append(event)
    if batch:
        yield batch


def _open(opened: zmq.Socket[bytes], name: str, endpoint: str, *, may_connect: bool) -> str:
    """Binds a socket, or connects it if the address is another machine's. Returns the endpoint with its port."""
    import zmq

    host, port = parse_endpoint(endpoint)
    try:
        address = _address(opened, host)
        opened.bind(f"tcp://{address}:{port or '*'}")
    except OSError as error:  # zmq.ZMQError is not an OSError
        raise ConfigError(f"{name}: {host} is no known host: {error}.") from error
    except zmq.ZMQError as error:
        if may_connect and port and error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            opened.connect(f"tcp://{address}:{port}")
            return endpoint
        raise ConfigError(f"{name}: cannot listen at {endpoint}: {error}.") from error
    bound = opened.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://[{host}]:{bound}" if ":" in host else f"tcp://{host}:{bound}"


def _address(opened: zmq.Socket[bytes], host: str) -> str:
    """The host's address for ZeroMQ. Raises `OSError` for an unknown host."""
    import zmq

    if host == "*":
        return host
    family, _, _, _, sockaddr = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    if family != socket.AF_INET6:
        return str(sockaddr[0])
    opened.setsockopt(zmq.IPV6, 1)
    return f"[{sockaddr[0]}]"
