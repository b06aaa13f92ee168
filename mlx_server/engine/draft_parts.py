"""Draft models, drafters that were made for a model, and its own multi-token-prediction heads: whether they can draft
for a model, how they are loaded, and what memory they use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import LayerGroups
from mlx_server.batching.speculation.draft_heads import AssistantDrafts, BlockDrafts, HeadDrafts
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.batching.speculation.lookup import NgramDrafter
from mlx_server.config import BLOCK_SIZE, WHOLE_WEIGHTS, Config
from mlx_server.engine.loading import find_model
from mlx_server.engine.memory.budget import MemoryShare
from mlx_server.engine.memory.guard import KvMemory, MemoryGuard
from mlx_server.engine.memory.need import estimate_heads
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import HELD_BY_ASSISTANTS, HELD_FEATURES, HELD_STATES, num_with_features
from mlx_server.runtime.attention.regroup import Scope
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.drafts.assistant import AssistantModel, read_assistant, reads
from mlx_server.runtime.drafts.block_drafter import BlockModel, read_block_drafter
from mlx_server.runtime.drafts.drafter import load_drafter
from mlx_server.runtime.drafts.eagle import EagleModel, read_eagle
from mlx_server.runtime.drafts.heads import DrafterModel, HeadModel, NoHeadsError, find_heads, layers_of, load_head
from mlx_server.runtime.drafts.hidden_states import HiddenStates
from mlx_server.runtime.drafts.layer_taps import FeatureStates
from mlx_server.runtime.drafts.runner import AssistantFeed, BlockFeed, DraftingRunner, HeadFeed
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.folder import is_assistant, is_block_drafter, only_drafts, read_model_json
from mlx_server.runtime.models.loader import LoadedModel, Pieces, RunnerInfo, load_in_pieces, make_runner
from mlx_server.runtime.models.resolve import find_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")
InPieces = Callable[[Pieces[Any]], Awaitable[Any]]
"""Does work on the MLX thread, with other models' steps in between, and returns its result."""


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The parts of a loaded draft model. `runner` also runs the target model's steps. `state_bytes` is the size of the
    hidden states that are kept for a head."""

    loaded: LoadedModel
    runner: DraftingRunner
    model: DraftModel
    guard: MemoryGuard
    block_bytes: int
    state_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.model.blocks.num_blocks * self.block_bytes + self.state_bytes


class _SpareKvMemory(KvMemory):
    """Grows a pool only while there is plenty of memory, since the model's own pool comes first."""

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        return super().take(least, most, is_needed=False)


async def load_draft_model(config: Config, target: LoadedModel, tokenizer: Tokenizer | None, run: InPieces) -> Any:
    """Loads the draft model of `config` for `target` with its `tokenizer`. Raises `ModelLoadError` before it reads
    weights if their vocabularies differ."""
    settings = config.model
    folder = await asyncio.to_thread(find_model, settings)
    described = {} if folder is None else await asyncio.to_thread(read_model_json, folder / "config.json")
    if folder is not None and only_drafts(described):
        read = read_block_drafter
        if not is_block_drafter(described):
            read = read_assistant if is_assistant(described) else read_eagle
        return await run(load_drafter(read, settings.model, folder, target, settings.dtype))
    if folder is not None and tokenizer is not None:
        own = await asyncio.to_thread(Tokenizer.from_folder, folder, trust_remote_code=settings.trust_remote_code)
        difference = await asyncio.to_thread(vocabulary_difference, tokenizer, own)
        if difference is not None:
            raise _refused(settings.model, target, f"their vocabularies differ: {difference}")
    elif folder is not None or tokenizer is not None:
        without = target.name if tokenizer is None else settings.model
        raise _refused(settings.model, target, f"{without} has no tokenizer, so the vocabularies cannot be compared")
    return await run(load_in_pieces(replace(settings, batch_invariant=False, pooling="auto"), folder, sees=False))


async def load_model_head(config: Config, target: LoadedModel, share: MemoryShare, run: InPieces) -> Any:
    """Loads the multi-token-prediction head of `target`, from its folder or fetched. Raises `ModelLoadError` or
    `DownloadError` if the configuration requires a head. Otherwise returns None if there is none; and also, with a line
    in the log, if it cannot be loaded or would take more than half of the room that `share` has for K/V."""
    settings, folder = config.model, target.folder
    if settings.quantize != WHOLE_WEIGHTS:  # the quantized folder lacks heads that are among the model's weights
        folder = await asyncio.to_thread(find_folder, settings.model, settings.dtype)
    try:
        files = await asyncio.to_thread(find_heads, folder, target.name, settings.mtp_from)
    except ModelLoadError as error:
        if config.needs_heads or settings.mtp_from is not None:
            raise
        if not isinstance(error, NoHeadsError):
            _log_left_out(target, str(error))
        return None
    if config.needs_heads:
        return await run(load_head(files, target, settings.dtype))
    without = share.need
    try:
        need = await asyncio.to_thread(estimate_heads, config, files, folder)
        if 2 * need.total_bytes <= share.kv_room_bytes and share.join(need):  # the other half is for the model's K/V
            return await run(load_head(files, target, settings.dtype))
        reason = "There is no room for them besides its K/V."
    except Exception as error:  # invalid files, MLX, or the model's code
        share.need, reason = without, str(error)  # keep only the text: the error's frames hold what was loaded
    _log_left_out(target, reason)
    return None


def _log_left_out(target: LoadedModel, reason: str) -> None:
    logger.warning("The multi-token-prediction heads of %s do not draft. %s", target.name, reason)


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Says how the vocabularies differ; None if they are equal. Added tokens, such as most special ones, may differ:
    they do within model families, and at worst a draft is wrong."""
    added = {*target.added_tokens.values(), *draft.added_tokens.values()}
    tokens, others = (
        {token_id: token for token, token_id in tokenizer.hf.get_vocab().items() if token_id not in added}
        for tokenizer in (target, draft)
    )
    if tokens == others:
        return None
    wrong = sorted(
        token_id for token_id in tokens.keys() | others.keys() if tokens.get(token_id) != others.get(token_id)
    )
    ours, theirs = (repr(found.get(wrong[0])) if wrong[0] in found else "nothing" for found in (tokens, others))
    return f"token {wrong[0]} is {ours} in the model's and {theirs} in the draft model's; {len(wrong)} ids differ"


def _refused(name: str, target: LoadedModel, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} cannot draft for {target.name}: {reason}. Take a smaller model of the same family, or none."
    )


async def make_draft(
    config: Config,
    loaded: LoadedModel,
    target: LoadedModel,
    target_runner: ModelRunner,
    target_info: RunnerInfo,
    share: MemoryShare,
    max_num_tokens: int,
    largest_chunk: int,
    run: InPieces,
) -> DraftParts:
    """Makes the runner and the scheduler's side of a `loaded` draft model. Its pool holds up to `max_num_tokens`, and
    it computes up to `largest_chunk` tokens of a prompt at a time. Raises as `make_runner` does, and `ModelLoadError`
    for a draft model with recurrent state."""
    head = loaded.model if isinstance(loaded.model, DrafterModel) else None
    if loaded.folder is None and loaded.vocab_size != target.vocab_size:
        sizes = f"it has {loaded.vocab_size} token ids, but the model has {target.vocab_size}"
        raise _refused(loaded.name, target, sizes)
    room = PoolRoom(max_num_tokens, share.kv_limit_bytes, share.kv_room_bytes)
    runner, info = await run(make_runner(loaded, config, room))
    try:
        if (fault := _fault(info, target_runner, head)) is not None:
            raise _refused(loaded.name, target, fault)
        memory = _SpareKvMemory(share, info.block_bytes, time.monotonic)
        blocks = PagedBlockManager(
            info.num_blocks,
            LayerGroups(info.windows, largest_chunk + 2 * BLOCK_SIZE),
            max_blocks=info.max_blocks,
            supply=memory,
            model_key=loaded.name,
            enable_prefix_caching=config.cache.prefix_caching,
        )
        kind: Callable[..., DraftModel] = DraftModel if head is None else HeadDrafts
        if isinstance(head, AssistantModel):
            kind = AssistantDrafts
        if isinstance(head, BlockModel):
            shape = head.model.shape
            most = num_with_features(target_info.max_num_seqs)
            kind = partial(BlockDrafts, block_size=shape.block_size, mask_token_id=shape.mask_token_id, max_held=most)
        model = kind(
            blocks,
            vocab_size=min(loaded.vocab_size, target.vocab_size),
            max_tokens=loaded.max_model_len,
            doubling_tokens=info.context_doubling_tokens,
        )
        if (first := info.first_steps) is not None:
            model.learn(first.num_prompt_tokens, first.prompt_s, first.decode_s)
        join = partial(_join, head, target_runner, runner, target_info.max_num_seqs)
        joined, state_bytes = await run(_at_once(join))
    except BaseException:
        await run(_at_once(runner.close))
        raise
    return DraftParts(
        loaded=loaded,
        runner=joined,
        model=model,
        guard=MemoryGuard(model, memory),
        block_bytes=info.block_bytes,
        state_bytes=state_bytes,
    )


def make_speculation(config: Config, info: RunnerInfo, draft: DraftParts | None) -> Speculation | None:
    """How to draft for a model: by lookups, its draft model, or both; None if not at all."""
    settings, num_spares = config.scheduler, info.num_spares if info.is_recurrent else None
    if draft is None and (num_spares == 0 or not config.looks_up):
        return None
    drafter, model = NgramDrafter() if config.looks_up else None, None if draft is None else draft.model
    return Speculation(drafter, settings.max_draft_tokens, num_spares, model)


def _fault(info: RunnerInfo, target: ModelRunner, head: DrafterModel | None) -> str | None:
    """Why a model that can run cannot draft; None if it can."""
    if info.is_recurrent:
        return "it has recurrent state, which cannot be reset to the last correct draft"
    if isinstance(head, BlockModel):
        return None if info.level == Scope.NOTHING else "its attention cannot see both ways in a paged batch"
    if isinstance(head, AssistantModel) and target.forward.level.scope is not Scope.NOTHING:
        return "it reads K/V in place, and the model's code does not run in a paged batch"
    is_head = head is not None
    if is_head and info.level.startswith(Scope.MODEL):
        return "mlx-lm's code for it does not run in a paged batch"
    if isinstance(head, HeadModel) and not target.forward.can_select_rows:
        return (
            "a head reads the hidden states before the output matrix, which mlx-lm's code for the model does not give"
        )
    return None


def _join(
    head: DrafterModel | None, target: ModelRunner, draft: ModelRunner, num_requests: int
) -> tuple[DraftingRunner, int]:
    """The runner of both, and the bytes of the hidden states that it keeps."""
    feed = None if head is None else _feed(head, target, num_requests)
    return DraftingRunner(target, draft, feed), 0 if feed is None else feed.states.num_bytes


def _feed(head: DrafterModel, target: ModelRunner, num_requests: int) -> HeadFeed:
    body, make_rows = head.model, target.cache.backend.make_rows
    if isinstance(head, AssistantModel):
        for layer, num_query_heads in reads(target.cache, body):
            exhaust(layer.backend.warm_up(layer.spec, num_query_heads))
        size, dtype = body.post_projection.weight.shape[0], body.norm.weight.dtype
        states = HiddenStates(make_rows, num_requests, size, dtype, HELD_BY_ASSISTANTS)
        return AssistantFeed(body, states, target)
    layers = layers_of(target.forward.model)
    if isinstance(head, EagleModel):
        tapped = [layers[index] for index in head.model.shape.tapped(len(layers))]
        (size,), dtype = body.norm.weight.shape, body.norm.weight.dtype
        features = FeatureStates(tapped, body.features, make_rows, num_requests, size, dtype, HELD_STATES)
        return HeadFeed(body.link, features)
    (size,), dtype = body.hidden_norm.weight.shape, body.hidden_norm.weight.dtype
    if isinstance(head, HeadModel):
        return HeadFeed(body.link, HiddenStates(make_rows, num_requests, size, dtype))
    tapped = [layers[layer_id] for layer_id in head.model.shape.target_layer_ids]
    num_kept = num_with_features(num_requests)
    states = FeatureStates(tapped, body.features, make_rows, num_kept, size, dtype, HELD_FEATURES)
    return BlockFeed(body, states)


def _at_once(work: Callable[[], T]) -> Pieces[T]:
    yield 0.0
    return work()
