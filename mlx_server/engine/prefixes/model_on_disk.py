"""One model's prefixes on disk: what they depend on (the root of their digests), and what is saved at the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import xxhash

from mlx_server.batching.blocks.disk_saves import PIECE_BYTES
from mlx_server.batching.blocks.prefix_cache import root_hash
from mlx_server.batching.scheduler import ContinuousBatchingScheduler, StepExecutor
from mlx_server.config import BLOCK_SIZE, FULL_KV, Config, MemoryConfig
from mlx_server.environment import version
from mlx_server.kv_disk.disk import KvDisk, ModelRecords, open_disk
from mlx_server.kv_disk.files import Files, disk_folder
from mlx_server.kv_disk.slab import FORMAT_VERSION, Rounding, Space
from mlx_server.kv_disk.store import smallest_slab
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.layers.adapter_files import merged_adapter
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.folder import matching
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo
from mlx_server.runtime.vision import ReadsImages
from mlx_server.setting import parse_size

logger = logging.getLogger(__name__)

FLUSH_S = 10.0
"""How long unloading a model may take to save its prefixes."""

_FINGERPRINTS = "fingerprints.json"
"""The file with the digests of model files, so that they are read once."""

_MAX_REMEMBERED = 1000
_MAX_BYTES = 16 * 2**20
_WEIGHTS_AND_CODE = ("*.safetensors", "config.json", "adapter_config.json", "*.py")


def open_configured(settings: MemoryConfig) -> KvDisk | None:
    """Opens the configured tier; None if there is none, or if it cannot be used, which is logged."""
    if settings.kv_disk is None:
        return None
    return open_disk(disk_folder(settings), settings.kv_disk, parse_size(settings.kv_disk_writes_per_day))


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """`model_key` is the root of the model's digests: weights, code, versions and layout."""

    disk: KvDisk
    records: ModelRecords
    model_key: str

    def on_change(self, wake: Callable[[], None]) -> None:
        """Has `wake` called on this loop's thread after each read and write."""
        self.records.notify = partial(_call_in, asyncio.get_running_loop(), wake)


async def join_disk(
    disk: KvDisk, config: Config, loaded: LoadedModel, runner: ModelRunner, info: RunnerInfo, thread: MLXThread
) -> ModelOnDisk | None:
    """Makes a model's part of the tier; None, with a line in the log, if the model cannot have one."""
    contents = BlockContents(runner.cache)
    refusal = await asyncio.wrap_future(thread.call(contents.refusal))
    if loaded.folder is None:
        refusal = "it has no files that identify it"
    elif not config.cache.prefix_caching:
        refusal = "--no-prefix-caching"
    elif info.is_recurrent and not info.num_checkpoints:
        refusal = "no memory is left for the recurrent states of prefixes"
    elif not disk.is_on:
        refusal = f"the disk failed: {disk.error}"
    if refusal is not None or loaded.folder is None:
        logger.warning("Prefixes of %s are not kept on disk: %s.", config.model.name, refusal)
        return None
    try:
        weights = await asyncio.to_thread(_fingerprints, disk, loaded.folder, config)
    except OSError as error:
        logger.warning("Prefixes of %s are not kept on disk: its files cannot be read: %s.", config.model.name, error)
        return None
    rounding = _rounding(config, contents.dtype(), runner.cache.block_bytes)
    model_key = json.dumps(  # unambiguous: no other list gives this text
        [
            str(FORMAT_VERSION),
            str(BLOCK_SIZE),
            version(),
            *(f"{name} {metadata.version(name)}" for name in _libraries(loaded)),
            f"batch_invariant {config.model.batch_invariant}",
            *await asyncio.wrap_future(thread.call(contents.layout)),
            *(() if rounding is None else ("8 bits on disk",)),
            *weights,
        ]
    )
    block_bytes = runner.cache.block_bytes if rounding is None else rounding.packed_bytes
    space = Space(root_hash(model_key), config.model.name, block_bytes)
    states = replace(space, content_bytes=await asyncio.wrap_future(thread.call(contents.state_bytes)))
    smallest, limit = max(smallest_slab(space), smallest_slab(states)), disk.store.limit_bytes
    if smallest > limit:
        message = (
            "Prefixes of %s are not kept on disk: --kv-disk is %s bytes, and one of its blocks or states takes %s."
        )
        logger.warning(message, config.model.name, f"{limit:,}", f"{smallest:,}")
        return None
    return ModelOnDisk(disk, ModelRecords(disk, space, states, rounding), model_key)


async def flush(model: ModelOnDisk, scheduler: ContinuousBatchingScheduler, executor: StepExecutor) -> None:
    """Saves the prefixes that are worth it, the least recently used first, for up to `FLUSH_S`. The scheduler has
    stopped, and no step is in flight."""
    tier, disk = scheduler.disk, model.disk
    assert tier is not None, "the scheduler of a model on disk has a tier"
    end_s = time.monotonic() + FLUSH_S
    tier.close()
    copies, change = tier.take_copies(), scheduler.blocks.take_change()
    if change is not None or copies is not None:  # together: saves for a cut use the block numbers before it
        result = await executor.submit(SchedulerOutput(-1, (), pool_change=change, copies=copies))
        if copies is not None:
            tier.saves.on_copied(result.saved_blocks)
    num_left = len(tier.saves)
    while tier.saves and disk.is_on and (left_s := end_s - time.monotonic()) > 0:
        tier.saves.request(PIECE_BYTES)
        copies = tier.take_copies()
        if copies is not None:
            result = await executor.submit(SchedulerOutput(-1, (), copies=copies))
            tier.saves.on_copied(result.saved_blocks)
        elif await asyncio.to_thread(disk.drain, left_s) and not tier.saves.is_due:
            break  # the day's limit on writes is reached
    await asyncio.to_thread(disk.drain, max(0.0, end_s - time.monotonic()))
    if tier.saves:
        logger.info("%d of %d blocks were not written to disk at the end", len(tier.saves), num_left)


def _rounding(config: Config, dtype: str | None, block_bytes: int) -> Rounding | None:
    """Rounding to 8 bits, if that is configured; None, with a line in the log, if the model does not support it."""
    if config.memory.kv_disk_bits == FULL_KV:
        return None
    if config.model.batch_invariant or dtype is None or not block_bytes:
        reason = "--batch-invariant" if config.model.batch_invariant else "its pool has no single 16-bit or 32-bit type"
        logger.warning("Prefixes of %s are not rounded on disk: %s.", config.model.name, reason)
        return None
    rounding = Rounding(dtype, block_bytes)
    logger.info(
        "Prefixes of %s take %.0f %% of the usual space on disk, in 8 bits. Answers after them may differ from answers "
        "after computed prefixes.",
        config.model.name,
        100 * rounding.packed_bytes / block_bytes,
    )
    return rounding


def _libraries(loaded: LoadedModel) -> tuple[str, ...]:
    """The libraries whose code computes the model's K/V."""
    return ("mlx", "mlx-lm", "mlx-vlm") if isinstance(loaded.model, ReadsImages) else ("mlx", "mlx-lm")


def _fingerprints(disk: KvDisk, folder: Path, config: Config) -> list[str]:
    """Of the model, and of the adapter in it."""
    merged = merged_adapter(config.model.adapters)
    return [fingerprint(part, disk.files) for part in (folder, *(() if merged is None else (merged.path,)))]


def fingerprint(folder: Path, files: Files | None = None, patterns: Sequence[str] = _WEIGHTS_AND_CODE) -> str:
    """A digest of the names and contents of a model's or adapter's files that match `patterns`, by default its weights,
    configuration and code; not of their place. Equal for equal files only.

    All files are read once, at an SSD's speed, or from the page cache if they fit in it beside the loaded model. The
    digest of a file is remembered in `files`, if given, by its path, size, time and inode. Any thread; raises
    `OSError`.
    """
    known = {} if files is None else _remembered(files)
    digest = xxhash.xxh3_128()
    seen: dict[str, str] = {}
    for path in sorted({path for pattern in patterns for path in matching(folder, pattern)}):
        stat = path.stat()
        key = json.dumps([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino])
        seen[key] = known.get(key) or _content_digest(path)
        digest.update(f"{path.name}\0{seen[key]}\0".encode())
    if files is not None and not seen.keys() <= known.keys():
        kept = list({**known, **seen}.items())[-_MAX_REMEMBERED:]
        with contextlib.suppress(OSError):  # on a full disk, all files are read again after the next start
            files.replace(_FINGERPRINTS, json.dumps(dict(kept)).encode())
    return digest.hexdigest()


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _remembered(files: Files) -> dict[str, str]:
    try:
        (text,) = files.read(_FINGERPRINTS, [0], _MAX_BYTES)
        known = json.loads(text)
        return {str(key): str(value) for key, value in known.items()}
    except (FileNotFoundError, ValueError, AttributeError, RecursionError):
        return {}


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)
