"""The parts of an engine with a loaded model, and how they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import LayerGroups
from mlx_server.batching.blocks.state_checkpoints import StateCheckpoints
from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import BLOCK_SIZE, Config, MemoryConfig, ModelConfig
from mlx_server.engine.distributed.ranks import ALONE, Ranks
from mlx_server.engine.draft_parts import (
    DraftParts,
    InPieces,
    load_draft_model,
    load_model_head,
    make_draft,
    make_speculation,
)
from mlx_server.engine.embeddings import InputReader, Pooling
from mlx_server.engine.fair_slots import in_daemon_thread
from mlx_server.engine.loading import (
    check_unchanged,
    draft_model_named,
    find_content,
    find_model,
)
from mlx_server.engine.memory.budget import MemoryBudget, MemoryShare
from mlx_server.engine.memory.guard import KvMemory, MemoryGuard, MemoryWatch
from mlx_server.engine.memory.need import MemoryNeed, estimate_need
from mlx_server.engine.pieces import free_failed, in_pieces, undo
from mlx_server.engine.prefixes.kv_events import KvEvents
from mlx_server.engine.prefixes.model_on_disk import ModelOnDisk, join_disk, open_configured
from mlx_server.engine.text.chat import TextTools
from mlx_server.engine.vision.seeing import SeeingModel, load_if_seeing
from mlx_server.errors import ConfigError
from mlx_server.kv_disk.disk import KvDisk
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.image_executor import ImageExecutor
from mlx_server.runtime.layers.sharding import Group
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import (
    LoadedModel,
    RunnerInfo,
    compute_something,
    is_gpu,
    load_in_pieces,
    make_runner,
    release,
    wait_for_device,
)
from mlx_server.runtime.pooling import read_pooling

logger = logging.getLogger(__name__)

_CHEAP_ROWS = {True: 32, False: 128}
"""By whether there is a GPU: the prompt tokens whose time is a step's default target. On a GPU, up to so many rows cost
little more than one, since the time goes into reading the weights. On a CPU, native products cost the same for each row
from 16 on, but steps have other costs: a target of 32 tokens made the p95 of gaps 9 to 15 % shorter, and prompts up to
5 % and whole loads up to 3 % slower."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts for a loaded model. `share` is what it has booked of the memory budget."""

    loaded: LoadedModel
    runner: ModelRunner
    info: RunnerInfo
    executor: MLXExecutor
    images: ImageExecutor | None
    scheduler: ContinuousBatchingScheduler
    text: TextTools | None
    guard: MemoryGuard
    watch: MemoryWatch
    max_model_len: int
    pooling: Pooling | None
    vision: SeeingModel | None
    share: MemoryShare
    disk: ModelOnDisk | None
    draft: DraftParts | None

    @property
    def guards(self) -> list[MemoryGuard]:
        """The memory guards of all pools."""
        return [self.guard] if self.draft is None else [self.guard, self.draft.guard]

    @property
    def kv_bytes(self) -> int:
        """The bytes of all pools now, including recurrent states."""
        own_bytes = self.scheduler.blocks.num_blocks * self.info.block_bytes + self.info.state_bytes
        return own_bytes if self.draft is None else own_bytes + self.draft.kv_bytes

    @property
    def is_on_disk(self) -> Callable[[bytes], bool] | None:
        """Says whether a block is on disk. None without a disk tier, or if a hit needs more than one record."""
        return self.disk.disk.is_stored if self.disk and self.scheduler.blocks.grows_block_by_block else None

    async def give_memory(self, num_bytes: int, timeout_s: float) -> int:
        """As `MemoryGuard.give_memory`, for all pools, the draft model's first."""
        given_bytes = 0
        for guard in reversed(self.guards):
            if given_bytes < num_bytes:
                given_bytes += await guard.give_memory(num_bytes - given_bytes, timeout_s)
        return given_bytes

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefixes cached in memory, but not on disk. Returns False, and does nothing, while requests hold
        blocks. (A request that holds no blocks of the model holds none of its draft model.)"""
        is_reset = self.scheduler.blocks.reset_prefix_cache()
        if is_reset and self.scheduler.disk is not None:
            self.scheduler.disk.saves.forget()
        return is_reset and (self.draft is None or self.draft.model.blocks.reset_prefix_cache())


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine shares with the other engines of the process.

    `is_shared` says whether other engines' requests run on the device; `on_progress` gets the fraction of the weights
    that has been read; `on_death` is called when the engine has died. `share` is the model's share of the common
    budget; without one, the engine may use all that its configuration allows. `watch` watches the memory for all
    engines; without one, the engine has its own. `ranks` are the machines on which the model runs.
    """

    thread: MLXThread
    is_shared: Callable[[], bool] = lambda: False
    on_progress: Callable[[float], None] = lambda share: None
    on_death: Callable[[], None] = lambda: None
    share: MemoryShare | None = None
    watch: MemoryWatch | None = None
    disk: KvDisk | None = None
    events: KvEvents | None = None
    ranks: Ranks = ALONE

    @classmethod
    def alone(cls, settings: MemoryConfig) -> Surroundings:
        """For an engine that shares nothing: a new MLX thread, and the disk tier if it is configured. The caller closes
        them."""
        return cls(MLXThread(wire_memory=settings.wire_memory), disk=open_configured(settings))

    def close(self) -> None:
        """Ends the MLX thread after its pending work, then the other ranks and the threads of disk and KV events."""
        self.thread.stop()
        self.ranks.close()
        if self.events is not None:
            self.events.close()
        if self.disk is not None:
            self.disk.close()


@dataclass(frozen=True, slots=True)
class GivenModels:
    """Models that are loaded already. A draft model is only given together with its model."""

    model: LoadedModel | None = None
    draft_model: LoadedModel | None = None


async def load_parts(
    config: Config, around: Surroundings, *, given: GivenModels, max_chunk_tokens: int | None = None
) -> EngineParts:
    """Loads the model of `config` and its draft model, unless they are `given`. Event-loop thread, without blocking it;
    other models' steps continue meanwhile. Raises `ServeError`, after it has freed everything."""
    max_seqs, max_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if max_tokens < max_seqs:  # checked before loading
        raise ConfigError(f"--max-num-batched-tokens is {max_tokens}; it must be at least --max-num-seqs, {max_seqs}.")
    share = around.share or await _own_share(config, given)
    try:
        async with contextlib.AsyncExitStack() as made:
            parts = await _load_parts(config, around, share, given, max_chunk_tokens, made)
            made.pop_all()
        return parts
    except BaseException as error:
        if around.share is None:
            share.release()
        around.ranks.unload()
        await free_failed(around.thread, error)
        raise


async def unload_parts(parts: EngineParts, around: Surroundings, *, has_failed: bool) -> None:
    """Frees everything loaded. The last references are dropped on the MLX thread, which then clears MLX's cache. The
    caller has dropped its references. If a step `has_failed`, the thread first waits for the device, since MLX may
    report an error of the device late; also if the model encodes images, since a piece of one may still run."""
    parts.executor.close()
    must_wait = has_failed or parts.images is not None
    if parts.images is not None:
        parts.images.close()
    around.ranks.unload()
    if parts.share is not around.share:
        parts.share.release()
    last: list[object] = [parts.loaded, parts.runner, parts.draft]
    closing: list[Callable[[], object]] = [lambda: release(last), parts.runner.close]
    closing += [] if parts.draft is None else [parts.draft.runner.close_draft]
    closing += [wait_for_device] if must_wait else []
    del parts
    while closing and around.thread.is_alive:
        try:
            await asyncio.wrap_future(around.thread.call(closing.pop()))
        except Exception:  # the rest must be freed nevertheless
            logger.exception("An error while a model was unloaded")


async def find_device_fault(thread: MLXThread) -> str | None:
    """Why the device cannot even add two numbers; None if it can."""
    try:
        await asyncio.wrap_future(thread.call(compute_something))
    except Exception as error:
        return str(error) or type(error).__name__
    return None


async def _load_parts(
    config: Config,
    around: Surroundings,
    share: MemoryShare,
    given: GivenModels,
    max_chunk_tokens: int | None,
    made: contextlib.AsyncExitStack,
) -> EngineParts:
    """`made` closes, if the load fails, the runners that were made."""
    settings, ranks = config.model, around.ranks
    run = partial(in_pieces, around.thread, around.on_progress)
    loaded = await ranks.load(share.limit_bytes, _load_model(settings, given.model, run, ranks.group))
    limit = settings.max_model_len or loaded.max_model_len
    if limit > loaded.max_model_len:
        raise ConfigError(f"--max-model-len is {limit}; the model's limit is {loaded.max_model_len} tokens.")
    text = None
    if loaded.folder is not None:
        text = await asyncio.to_thread(TextTools.load, loaded.folder, loaded.vocab_size, settings)
    draft_config, loaded_draft = config.draft_model, None
    if draft_config is not None:
        tokenizer = None if text is None else text.tokenizer
        with draft_model_named():
            loaded_draft = given.draft_model or await load_draft_model(draft_config, loaded, tokenizer, run)
    elif (draft_config := config.heads) is not None:
        loaded_draft = await load_model_head(config, loaded, share, run)
    room = PoolRoom(config.scheduler.max_num_seqs * limit, share.kv_limit_bytes, share.kv_room_bytes)
    runner, info = await ranks.make_runner(room, run(make_runner(loaded, config, room)))
    made.push_async_callback(undo, around.thread, runner.close)
    weight_bytes = loaded.weight_bytes  # once: it adds up all arrays of the model
    kv_bytes = info.num_blocks * info.block_bytes + info.state_bytes
    limits, draft, why_not = _limits(config, info, max_chunk_tokens), None, None
    if loaded_draft is not None and info.is_recurrent and info.num_spares == 0:
        why_not = "No memory is left for the recurrent states after drafts."
    elif draft_config is not None and loaded_draft is not None:
        most_tokens = min(config.scheduler.max_num_seqs * limit, info.max_blocks * BLOCK_SIZE)
        try:
            draft = await make_draft(
                draft_config, loaded_draft, loaded, runner, info, share, most_tokens, limits.largest_chunk, run
            )
            made.push_async_callback(undo, around.thread, draft.runner.close_draft)
            weight_bytes, kv_bytes = weight_bytes + draft.loaded.weight_bytes, kv_bytes + draft.kv_bytes
        except Exception as error:
            if config.draft_model is not None or config.needs_heads:
                raise
            why_not = str(error)
    if loaded_draft is not None and why_not is not None:
        logger.warning("%s does not draft. %s", loaded_draft.name, why_not)
        dropped: list[object] = [loaded_draft]
        loaded_draft = None
        await asyncio.wrap_future(around.thread.call(partial(release, dropped)))
    share.settle(replace(share.need, weights_bytes=weight_bytes, kv_bytes=kv_bytes))
    kv_memory = KvMemory(share, info.block_bytes, time.monotonic)
    disk = None if around.disk is None else await join_disk(around.disk, config, loaded, runner, info, around.thread)
    vision = None
    if text is not None:
        seeing = partial(load_if_seeing, loaded.folder, loaded.config, text.tokenizer, info.no_vision)
        vision = await asyncio.to_thread(seeing)
    scheduler = _make_scheduler(config, info, kv_memory, limits, around.is_shared, draft, disk)
    max_model_len = _within_pool(limit, scheduler.blocks.groups.max_tokens(info.max_blocks))
    leading = ranks.leading(runner if draft is None else draft.runner)
    executor = MLXExecutor(around.thread, leading, settings.device_share)
    return EngineParts(
        loaded=loaded,
        text=text,
        runner=runner,
        info=info,
        scheduler=scheduler,
        executor=executor,
        images=None if runner.images is None else ImageExecutor(around.thread, runner.images, executor),
        guard=MemoryGuard(scheduler, kv_memory),
        watch=around.watch or MemoryWatch(share.read),
        max_model_len=max_model_len,
        pooling=_pooling(loaded, settings.name, text, runner, max_model_len, scheduler.limits.largest_chunk),
        share=share,
        vision=vision,
        disk=disk,
        draft=draft,
    )


async def _load_model(
    settings: ModelConfig, given: LoadedModel | None, run: InPieces, group: Group | None
) -> LoadedModel:
    """The model: loaded unless it is given, with its pooling method."""
    if given is None:
        folder = await asyncio.to_thread(find_model, settings)
        adapters = await asyncio.to_thread(lambda: list(map(find_content, settings.adapters)))
        loaded: LoadedModel = await run(load_in_pieces(settings, folder, adapters, group))
        await asyncio.to_thread(check_unchanged, adapters)
        return loaded
    if given.pooling is not None:
        return given
    return replace(given, pooling=read_pooling(given.folder, given.name, given.config, settings.pooling))


def _within_pool(limit: int, most_tokens: int) -> int:
    """The context length: `limit`, or less if the pool cannot hold that."""
    if most_tokens < limit:
        logger.warning(
            "The KV pool can hold %d tokens, so the context is limited to that instead of %d; "
            "raise --kv-cache-memory for more.",
            most_tokens,
            limit,
        )
    return min(limit, most_tokens)


def _pooling(
    loaded: LoadedModel,
    name: str,
    text: TextTools | None,
    runner: ModelRunner,
    max_model_len: int,
    max_chunk_tokens: int,
) -> Pooling | None:
    """The vectors and scores of a model that clients call `name`, if it has them. With bidirectional attention, an
    input must fit into one step."""
    spec = loaded.pooling
    if spec is None:
        return None
    limits = [max_model_len, spec.max_tokens, max_chunk_tokens if spec.is_bidirectional else None]
    tokenizer = None if text is None else text.tokenizer
    reader = InputReader(tokenizer, name, min(limit for limit in limits if limit), loaded.vocab_size)
    return Pooling.of(spec, reader, runner.num_pooled_dimensions or loaded.setting("hidden_size", "dim", "n_embd"))


async def _own_share(config: Config, given: GivenModels) -> MemoryShare:
    """A share of a budget of its own, with all that the configuration allows. Raises `InsufficientMemoryError` if the
    model does not fit."""
    if given.model is None:
        need = await in_daemon_thread(lambda: estimate_need(config))  # a download does not keep a script from ending
    else:
        need = MemoryNeed(sum(one.weight_bytes for one in (given.model, given.draft_model) if one is not None), 0, 0)
    return MemoryBudget.of(config.memory).take(config.model.model, need)


def _make_scheduler(
    config: Config,
    info: RunnerInfo,
    kv_memory: KvMemory,
    limits: SchedulerLimits,
    is_shared: Callable[[], bool],
    draft: DraftParts | None,
    disk: ModelOnDisk | None,
) -> ContinuousBatchingScheduler:
    has_prefix_caching = config.cache.prefix_caching and (not info.is_recurrent or info.num_checkpoints > 0)
    blocks = PagedBlockManager(
        info.num_blocks,
        LayerGroups(info.windows, limits.largest_chunk),
        max_blocks=info.max_blocks,
        supply=kv_memory,
        model_key=config.model.model if disk is None else disk.model_key,
        enable_prefix_caching=has_prefix_caching,
        checkpoints=StateCheckpoints(info.num_checkpoints) if info.is_recurrent and has_prefix_caching else None,
    )
    settings = config.scheduler
    scheduler = ContinuousBatchingScheduler(
        blocks,
        limits,
        is_async=settings.async_scheduling,
        is_device_shared=is_shared,
        speculation=make_speculation(config, info, draft),
        store=None if disk is None else disk.records,
    )
    if disk is not None:
        disk.on_change(scheduler.wake)
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
        # A recurrent model has no state at the place where two prompts part, so waiting for blocks does not help.
        deduplicate_prefixes=not info.is_recurrent,
        queue=QueueLimits(max_num_waiting=settings.max_num_waiting, max_queued_tokens=settings.max_queued_tokens),
        tiers=_tier_limits(config),
        queue_timeout_s=settings.queue_timeout_s or None,
    )


def _tier_limits(config: Config) -> dict[str, QueueLimits]:
    """The limits of tiers that have their own. If a tier sets only one of the two, the other is the server's."""
    return {
        tier.name: QueueLimits(
            max_num_waiting=tier.max_num_waiting or config.scheduler.max_num_waiting,
            max_queued_tokens=tier.max_queued_tokens or config.scheduler.max_queued_tokens,
        )
        for tier in config.tiers.values()
        if tier.max_num_waiting or tier.max_queued_tokens
    }
