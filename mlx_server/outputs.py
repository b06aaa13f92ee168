"""What the floors hand each other: a step to run, its result, and what the request's owner sees of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ServeError
from mlx_server.request import FinishReason, PoolingParams, PromptImage, Request, Vector
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`logprob` is natural; `rank` 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the likeliest ones.

    They are of the model's own distribution (log softmax of the raw logits), before temperature, penalties,
    bias and masks, as vLLM and OpenAI report them.
    """

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Sent once when a request is admitted, and again when it resumes after preemption. `checkpoint` is where the
    recurrent state at the end of its cached prefix is kept. `adapter` is the name of one of the model's, or None."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    checkpoint: int | None = None
    adapter: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[PromptImage, ...] = ()

    @classmethod
    def of(cls, request: Request, checkpoint: int | None) -> NewRequestData:
        return cls(
            request.request_id,
            tuple(request.prompt_token_ids),
            tuple(request.output_token_ids),
            request.sampling,
            request.eos_token_ids,
            checkpoint,
            request.adapter,
            request.pooling,
            request.images,
        )


NULL_BLOCK_ID = 0
"""Stands in a block table where a request has no block, since nothing there is seen any more. Block 0 may be another's:
what is read there must not count."""

BlockIds = tuple[tuple[int, ...], ...]
"""Of each layer group; () if there are none at all."""


HELD_STATES = 256
"""Hidden states of a request that are kept for a head that drafts: those of its last positions."""


class ScheduledChunk(NamedTuple):
    """One request's share of a step: positions [start, start + num_tokens).

    `token_ids` are the ids of those positions; None means one id that the previous step sampled for this
    request and that is still on the device. `new_block_ids` are appended to the request's block tables
    before the step. `is_sampling` asks for a token after the last position. `num_output_tokens` counts the
    outputs before the sampled one, those in flight included (the sampler's position for seeds and
    `min_tokens`). `checkpoint` is where to keep the recurrent state that the step leaves.

    The last `num_drafts` ids are drafts, which may be wrong: then a token is sampled after the last id before them, and
    after each of them. `allowed_bitmask` is for the first of these tokens and `draft_bitmasks` for the others, as far
    as there are some. `recent_token_ids` are the last known tokens of a request that needs them counted, more than
    may be new since its last chunk.

    A chunk for the model's own head goes with hidden states of the model: the one at `start` with that of the request's
    position `hidden_offset` + `start`.
    """

    request_id: str
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    new_block_ids: BlockIds
    is_sampling: bool
    num_output_tokens: int
    allowed_bitmask: bytes | None = None
    checkpoint: int | None = None
    num_drafts: int = 0
    draft_bitmasks: tuple[bytes | None, ...] = ()
    recent_token_ids: tuple[int, ...] = ()
    hidden_offset: int = 0


class StepKind(enum.StrEnum):
    """What a step computes: outputs only, prompts only, or both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class BlockMove(NamedTuple):
    """A block's content is to be found under another id from now on."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What happens to the pools before a step: first the moves, none of which ends where another begins, then
    the pools are cut or grown to `num_blocks`. Block tables follow the moves. The memory of `num_blocks_cut` is
    free when it is done."""

    num_blocks: int
    moves: tuple[BlockMove, ...] = ()
    num_blocks_cut: int = 0


STATES = -1
"""Stands where a layer group would, for recurrent states."""


class CopyPlace(NamedTuple):
    """A block, by its id, of a layer group; or a kept recurrent state (`STATES`), by its checkpoint's slot."""

    number: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """What is copied between the pools and the host before a step: first the contents of `saved`, blocks by their ids
    before the step's change of the pools, then, behind that change, contents into `loaded`."""

    saved: tuple[CopyPlace, ...] = ()
    loaded: tuple[tuple[CopyPlace, memoryview], ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `chunks` has every scheduled request once: single-token ones first, then longer ones. It has
    none if the step only changes the pools or copies blocks.

    `dropped_request_ids` are requests whose runner state must go before the step (finished, aborted or
    preempted since the last one). `num_prompt_tokens` of the step's tokens came out of the prompts' share: those
    of prompts, and what is computed again after a preemption.

    With `draft_steps` it has nothing else: the draft model runs these, one after the other, and what it samples of each
    request are the request's drafts.
    """

    step_id: int
    chunks: tuple[ScheduledChunk, ...]
    new_requests: tuple[NewRequestData, ...] = ()
    dropped_request_ids: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    pool_change: PoolChange | None = None
    copies: BlockCopies | None = None
    draft_steps: tuple[SchedulerOutput, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def kind(self) -> StepKind:
        if self.num_prompt_tokens == 0:
            return StepKind.DECODE
        return StepKind.PREFILL if self.num_prompt_tokens == self.num_tokens else StepKind.MIXED


class SampledToken(NamedTuple):
    """One request's result of a step. `accepted` are drafts that stand before it, each of them what the model has
    sampled in its place."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    accepted: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one executed step gave back. `prompt_logprobs` holds, for each request that asked and had prompt
    positions in the step, one entry a computed position (that of the token that follows it). `pooled` are the results
    of requests that only pool and whose prompts ended in the step.

    `step_time_s` runs from the end of the step before, or from this one's start if that is later, to its end.
    `idle_time_s` is how long the device had nothing to do before it although a request was running.
    `launch_time_s` is what the host needed to give it to the device, where that is beside the device's work.
    `saved_blocks` are the contents that the step's copies asked for.
    `drafts` are what came of `draft_steps`; with a `draft_error` nothing did, nor will of any later ones. The vision
    encoder ran for `num_images`, and failed for the requests in `image_errors`, whose rows mean nothing.
    """

    step_id: int
    sampled: dict[str, SampledToken]
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    step_time_s: float = 0.0
    idle_time_s: float = 0.0
    launch_time_s: float = 0.0
    num_model_calls: int = 1
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draft_error: str | None = None
    pooled: dict[str, Vector] = field(default_factory=dict)
    saved_blocks: tuple[memoryview, ...] = ()
    num_images: int = 0
    image_errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)  # not frozen and no tuple: there is one a token, and those take twice as long to make
class RequestOutput:
    """News of one request after a step, in token ids. `finish_reason` is set on the last one; `error` says
    what went wrong when that is ERROR."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ServeError | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    pooled: Vector | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds on one monotonic clock; a stage that was never reached is None."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None


@dataclass(slots=True)  # not frozen, as above
class CompletionDelta:
    """What the engine puts on a request's stream: text that is safe to show, and the ids behind it.

    `text` may lag behind `token_ids` (incomplete characters and possible stop strings are held back) and
    never includes a stop string unless asked; ids end with the one that completes it. `pieces` are what each of several
    tokens has added to it. The last delta has `finish_reason`, and `timings`. Counts are totals so far.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    timings: RequestTimings | None = None
    pooled: Vector | None = None
    pieces: tuple[str, ...] = ()
    num_rounded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of one engine, cheap enough for every scrape. What comes first says how it stands now; from
    `num_steps` on, counters that only grow.

    `num_deferred` of those that wait do so for a prefix that another request computes. The adapters are the model's in
    all, and by name those that some request runs or waits with. `weight_bytes` and
    `kv_pool_bytes` are what the model's weights and its blocks take; there may come to be `max_num_blocks`.
    A block holds 32 tokens of one of `num_layer_groups`, so that `max_tokens` may come to be there of all layers.
    `num_state_checkpoints` are recurrent states that are kept for prefixes.
    `pressure_level` is the percentage of full memory that the model answers now, 0 if there is no need:
    `num_pressure_cuts` times it gave idle blocks back, `num_pressure_holds` times it stopped admitting, and
    `num_pressure_preemptions` requests had to wait again for it. `num_prompt_tokens_computed` counts prompt
    positions really run through the model (recomputation after preemption included); `num_prompt_tokens_cached`
    those served by the prefix cache at first admission, of which `num_prompt_tokens_from_disk` were loaded from disk
    for that request; `num_tokens_recomputed` those of prompts and outputs that a preemption has made the model compute
    again. `num_images_encoded` times the vision encoder ran for an image. `num_drafts` times a request's step carried
    `num_draft_tokens` in all, of which the model drew `num_accepted_tokens` itself: `num_accepted_by_place[j]` at
    place j of their chunk. `num_draft_errors` is 1 for a load whose draft model has failed and is not used any more.
    `num_disk_loads` prefixes began to be loaded from disk: `num_blocks_loaded` blocks in `disk_load_time_s`, and
    `num_blocks_not_loaded` were computed after all; `num_blocks_saved` were given to be written, and
    `num_blocks_not_saved` that were worth it were lost, since more came than may wait or than the day's budget allows.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_adapters: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_state_checkpoints: int = 0
    max_num_blocks: int = 0
    num_layer_groups: int = 1
    weight_bytes: int = 0
    kv_pool_bytes: int = 0
    pressure_level: int = 0
    num_steps: int = 0
    num_model_calls: int = 0
    num_images_encoded: int = 0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_cached: int = 0
    num_prompt_tokens_from_disk: int = 0
    num_generated_tokens: int = 0
    num_tokens_recomputed: int = 0
    num_preemptions: int = 0
    preemptions_by_tier: Mapping[str, int] = field(default_factory=dict)
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: Mapping[int, int] = field(default_factory=dict)
    num_draft_errors: int = 0
    num_block_evictions: int = 0
    num_pool_growths: int = 0
    num_pool_cuts: int = 0
    num_blocks_moved: int = 0
    num_pressure_cuts: int = 0
    num_pressure_holds: int = 0
    num_pressure_preemptions: int = 0
    num_disk_loads: int = 0
    num_blocks_loaded: int = 0
    num_blocks_not_loaded: int = 0
    num_blocks_saved: int = 0
    num_blocks_not_saved: int = 0
    disk_load_time_s: float = 0.0
    busy_time_s: float = 0.0
    idle_time_s: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that may come to be that requests hold, 0 to 1; cached ones of nobody are free."""
        most = max(self.num_blocks, self.max_num_blocks)
        return (self.num_blocks - self.num_free_blocks) / most if most else 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all layers for which there are blocks."""
        return self.num_blocks * BLOCK_SIZE // self.num_layer_groups

    @property
    def max_tokens(self) -> int:
        """Tokens of all layers for which there may come to be blocks."""
        return self.max_num_blocks * BLOCK_SIZE // self.num_layer_groups

    def after(self, past: EngineStats) -> EngineStats:
        """This reading of a model that was loaded again, its counters continuing from the `past` loads'."""
        names = [leaf.name for leaf in fields(self)]
        counters: dict[str, object] = {}
        for name in names[names.index("num_steps") :]:
            now, before = getattr(self, name), getattr(past, name)
            counters[name] = _sums(now, before) if isinstance(now, Mapping) else now + before
        return replace(self, **counters)  # type: ignore[arg-type]


def _sums(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """By key. What stands at 0 stays: a series is there before it counts."""
    return {key: now.get(key, 0) + before.get(key, 0) for key in {**before, **now}}
