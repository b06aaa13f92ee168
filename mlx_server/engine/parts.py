"""What an engine is made of once its model is loaded, and what the model and its adapters are called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TypeVar

from mlx_server.batching.block_manager import PagedBlockManager
from mlx_server.batching.layer_groups import LayerGroups
from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.state_checkpoints import StateCheckpoints
from mlx_server.config import Config, MemoryConfig, ModelConfig
from mlx_server.engine.memory_budget import MemoryBudget, MemoryNeed, MemoryShare, estimate_need
from mlx_server.engine.memory_guard import KvMemory, MemoryGuard, MemoryWatch
from mlx_server.engine.text.chat import TextTools
from mlx_server.errors import ConfigError, EngineDeadError, ModelNotFoundError
from mlx_server.runtime.adapters import merged_adapter
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import (
    LoadedModel,
    Pieces,
    RunnerInfo,
    find_folder,
    is_gpu,
    load_in_pieces,
    make_runner,
    release,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHEAP_ROWS = {True: 32, False: 128}
"""By whether there is a GPU: rows from which on a product's time grows with their number. Below, a GPU waits for the
weights, and OpenBLAS for their packing."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Of a model that is loaded. `own_share` is what is booked for it in a budget of its own, if it has one."""

    loaded: LoadedModel
    runner: ModelRunner
    info: RunnerInfo
    executor: MLXExecutor
    scheduler: ContinuousBatchingScheduler
    text: TextTools | None
    guard: MemoryGuard
    watch: MemoryWatch
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    own_share: MemoryShare | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine shares with the other engines of the process.

    `is_shared` says whether requests of others run on the device; `on_progress` gets the part of the weights that has
    been read. `share` is what is booked for the model in the common budget; without one, the engine has all that its
    configuration allows. `watch` watches the memory for all engines; without one, the engine has its own.
    """

    thread: MLXThread
    is_shared: Callable[[], bool] = lambda: False
    on_progress: Callable[[float], None] = lambda share: None
    share: MemoryShare | None = None
    watch: MemoryWatch | None = None

    @classmethod
    def alone(cls, settings: MemoryConfig) -> Surroundings:
        """Of an engine that shares nothing: with a new MLX thread, which the caller stops."""
        return cls(MLXThread(wire_memory=settings.wire_memory))


async def load_parts(
    config: Config, around: Surroundings, *, loaded: LoadedModel | None = None, max_chunk_tokens: int | None = None
) -> EngineParts:
    """Loads the model of `config`, or takes `loaded`. On the event loop's thread, which it does not block; other
    models' steps go on meanwhile. Raises `ServeError`, and holds nothing then."""
    max_seqs, max_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if max_tokens < max_seqs:  # or it would only be found after loading
        raise ConfigError(f"--max-num-batched-tokens is {max_tokens}; it must be at least --max-num-seqs, {max_seqs}.")
    share = around.share or await _own_share(config, loaded)
    try:
        return await _load_parts(config, around, share, loaded, max_chunk_tokens)
    except BaseException as error:
        if around.share is None:
            share.release()
        trace = error.__traceback__
        inner = None if trace is None else trace.tb_next  # not this frame, nor those that await it
        with contextlib.suppress(EngineDeadError):
            await asyncio.wrap_future(around.thread.call(partial(_free_failed_load, error, inner)))
        raise


async def unload_parts(parts: EngineParts, thread: MLXThread) -> None:
    """Lets go of everything loaded, the last references on the MLX thread, which then clears MLX's cache. The
    caller has dropped its own."""
    parts.executor.close()
    if parts.own_share is not None:
        parts.own_share.release()
    last: list[object] = [parts.loaded, parts.runner]
    runner = parts.runner
    del parts
    if thread.is_alive:
        await asyncio.wrap_future(thread.call(runner.close))
        del runner
        await asyncio.wrap_future(thread.call(lambda: release(last)))


async def _load_parts(
    config: Config,
    around: Surroundings,
    share: MemoryShare,
    loaded: LoadedModel | None,
    max_chunk_tokens: int | None,
) -> EngineParts:
    settings = config.model
    if loaded is None:
        folder = await asyncio.to_thread(find_folder, settings.model)
        pieces = load_in_pieces(
            settings.model,
            folder,
            settings.dtype,
            adapters=settings.adapters,
            trust_remote_code=settings.trust_remote_code,
        )
        loaded = await _in_pieces(around, pieces)
    limit = settings.max_model_len or loaded.max_model_len
    if limit > loaded.max_model_len:
        raise ConfigError(f"--max-model-len is {limit}; the model was made for {loaded.max_model_len} tokens.")
    text = None
    if loaded.folder is not None:
        text = await asyncio.to_thread(TextTools.load, loaded.folder, loaded.vocab_size, settings)
    runner, info = await _in_pieces(
        around,
        make_runner(
            loaded,
            backend=settings.attention_backend,
            pool=config.cache,
            max_num_tokens=config.scheduler.max_num_seqs * limit,
            kv_limit_bytes=share.kv_limit_bytes,
            state_limit_bytes=share.kv_room_bytes,
            max_num_seqs=config.scheduler.max_num_seqs,
        ),
    )
    weight_bytes = loaded.weight_bytes  # adds up all arrays of the model
    kv_bytes = info.num_blocks * info.block_bytes + info.state_bytes
    share.settle(replace(share.need, weights_bytes=weight_bytes, kv_bytes=kv_bytes))
    kv_memory = KvMemory(share, info.block_bytes, time.monotonic)
    scheduler = _make_scheduler(config, info, kv_memory, max_chunk_tokens, around.is_shared)
    most_tokens = scheduler.blocks.groups.max_tokens(info.max_blocks)
    if most_tokens < limit:
        logger.warning(
            "The KV pool can hold %d tokens, so the context is limited to that instead of %d; "
            "raise --kv-cache-memory for more.",
            most_tokens,
            limit,
        )
    return EngineParts(
        loaded=loaded,
        text=text,
        runner=runner,
        info=info,
        scheduler=scheduler,
        executor=MLXExecutor(around.thread, runner, settings.device_share),
        guard=MemoryGuard(scheduler, kv_memory),
        watch=around.watch or MemoryWatch(share.read),
        max_model_len=min(limit, most_tokens),
        vocab_size=loaded.vocab_size,
        weight_bytes=weight_bytes,
        own_share=None if around.share is share else share,
    )


async def _own_share(config: Config, loaded: LoadedModel | None) -> MemoryShare:
    """All of what the configuration allows. Raises `InsufficientMemoryError` if the model does not fit it."""
    need = await asyncio.to_thread(estimate_need, config) if loaded is None else MemoryNeed(loaded.weight_bytes, 0, 0)
    return MemoryBudget.of(config.memory).take(config.model.model, need)


async def _in_pieces(around: Surroundings, work: Pieces[T]) -> T:
    """Does `work` on the MLX thread, a call a piece, so that steps of other models come in between."""

    def advance() -> float | StopIteration:
        try:
            return next(work)
        except StopIteration as end:  # no future can carry it as an exception
            return end

    try:
        while not isinstance(news := await asyncio.wrap_future(around.thread.call(advance)), StopIteration):
            around.on_progress(news)
    except BaseException:
        around.thread.call(work.close)
        raise
    result: T = news.value
    return result


def _free_failed_load(error: BaseException, inner: TracebackType | None) -> None:
    """Frees what the load had got so far, which the frames of its tracebacks still hold. MLX thread."""
    traceback.clear_frames(inner)
    chain = error.__cause__ or error.__context__
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    release([])


def _make_scheduler(
    config: Config,
    info: RunnerInfo,
    kv_memory: KvMemory,
    max_chunk_tokens: int | None,
    is_shared: Callable[[], bool],
) -> ContinuousBatchingScheduler:
    has_prefix_caching = config.cache.prefix_caching and (not info.is_recurrent or info.num_checkpoints > 0)
    limits = _limits(config, info, max_chunk_tokens)
    blocks = PagedBlockManager(
        info.num_blocks,
        LayerGroups(info.windows, limits.largest_chunk),
        max_blocks=info.max_blocks,
        supply=kv_memory,
        model_key=config.model.model,
        enable_prefix_caching=has_prefix_caching,
        checkpoints=StateCheckpoints(info.num_checkpoints) if info.is_recurrent and has_prefix_caching else None,
    )
    scheduler = ContinuousBatchingScheduler(
        blocks, limits, is_async=config.scheduler.async_scheduling, is_device_shared=is_shared
    )
    if (first := info.first_steps) is not None:
        scheduler.learn(first.num_prompt_tokens, first.prompt_s, first.decode_s)
    return scheduler


def _limits(config: Config, info: RunnerInfo, max_chunk_tokens: int | None) -> SchedulerLimits:
    settings = config.scheduler
    target_ms = settings.target_step_ms
    return SchedulerLimits(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_chunk_tokens=max_chunk_tokens,
        aging_rate=settings.aging_rate,
        target_step_s=None if target_ms is None else target_ms / 1000.0,
        cheap_rows=_CHEAP_ROWS[is_gpu()],
        max_step_s=settings.max_step_ms / 1000.0,
        context_doubling_tokens=info.context_doubling_tokens,
        # Whoever waits for another's blocks finds no state at the place where the prompts part.
        deduplicate_prefixes=not info.is_recurrent,
        queue=QueueLimits(max_num_waiting=settings.max_num_waiting, max_queued_tokens=settings.max_queued_tokens),
        tiers=_tier_limits(config),
        queue_timeout_s=settings.queue_timeout_s or None,
    )


def _tier_limits(config: Config) -> dict[str, QueueLimits]:
    """Of the tiers that have bounds of their own; where one has only one of both, the other is the server's."""
    return {
        tier.name: QueueLimits(
            max_num_waiting=tier.max_num_waiting or config.scheduler.max_num_waiting,
            max_queued_tokens=tier.max_queued_tokens or config.scheduler.max_queued_tokens,
        )
        for tier in config.tiers.values()
        if tier.max_num_waiting or tier.max_queued_tokens
    }


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`base` is what the model is called without adapters. `merged` names the adapter that it has for all requests,
    if that cannot differ by request; else each may name one of `adapters`, or none."""

    base: str
    merged: str | None
    adapters: tuple[str, ...]

    @property
    def model(self) -> str:
        """What the model is called that answers requests which name no adapter."""
        return self.base if self.merged is None else f"{self.base}:{self.merged}"

    @property
    def all(self) -> tuple[str, ...]:
        """The model's, and with each of its adapters."""
        return self.model, *map(self.with_adapter, self.adapters)

    def check(self, adapter: str | None) -> None:
        """Raises `ModelNotFoundError` for an adapter that the model does not have."""
        if adapter is not None and adapter not in self.adapters:
            raise ModelNotFoundError(f"{self.base}:{adapter}", f"What there is of it: {', '.join(self.all)}.")

    def with_adapter(self, adapter: str | None) -> str:
        return self.model if adapter is None else f"{self.base}:{adapter}"


def served_names(settings: ModelConfig, loaded: LoadedModel | None = None) -> ServedNames:
    """Of the model that is `loaded` already, or of the one to be loaded: reads what an only adapter says of itself."""
    if loaded is not None:
        return ServedNames(settings.name, None, loaded.adapters.names)
    merged = merged_adapter(settings.adapters)
    adapters = () if merged is not None else tuple(adapter.name for adapter in settings.adapters)
    return ServedNames(settings.name, None if merged is None else merged.name, adapters)
