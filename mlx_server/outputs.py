"""The types that the floors exchange: a step to run, its result, what the owner of a request gets, and what an engine
counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, NamedTuple

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ServeError
from mlx_server.request import FinishReason, PoolingParams, PromptImage, Request, Vector
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token (natural logarithm) and its rank; the most likely token has rank 1."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: of the token that was chosen there, and of the most likely tokens (`top`).

    They are of the model's own distribution (log softmax of the raw logits), before temperature, penalties, bias and
    masks, as vLLM and OpenAI report them.
    """

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Sent to the runner once when a request is admitted, and again when it resumes after a preemption. `checkpoint` is
    the slot of the recurrent state at the end of its cached prefix. `adapter` is the key of one of the model's
    adapters, or None."""

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
            request.adapter_key or request.adapter,
            request.pooling,
            request.images,
        )


NULL_BLOCK_ID = 0
"""The entry of a block table where a request has no block, because no later token attends to it. Block 0 may belong to
another request, so what is read from it must not affect a result."""

BlockIds = tuple[tuple[int, ...], ...]
"""The block ids of each layer group; () if there are none in any group."""

HELD_STATES = 256
"""The number of hidden states that are kept of each request for a draft head: those of its last positions."""

HELD_FEATURES = 1024
"""The same for a block drafter, whose features are kept of at most a quarter of the requests that may run: so they take
as much memory as hidden states for a head."""


HELD_BY_ASSISTANTS = 32
"""The same for an assistant, which reads the state before the last known token: one of the last step's rows, of which
a request with drafts has at most so many."""


def num_with_features(max_num_seqs: int) -> int:
    """Of how many requests features are kept."""
    return max(1, max_num_seqs * HELD_STATES // HELD_FEATURES)


class ScheduledChunk(NamedTuple):
    """One request's part of a step: positions [start, start + num_tokens).

    `token_ids` are the ids at these positions; None means one id that the previous step sampled for this request and
    that is still on the device. `new_block_ids` are appended to the request's block tables before the step.
    `is_sampling` asks for a token after the last position. `num_output_tokens` counts the outputs before the sampled
    one, those in flight included (the sampler's position for seeds and `min_tokens`). `checkpoint` is the slot that
    keeps the recurrent state after the step, if it is to be kept.

    The last `num_drafts` ids are drafts, which may be wrong. A token is sampled after the last id before the drafts and
    after each draft. `allowed_bitmask` is for the first of these tokens, `draft_bitmasks` are for the others; () allows
    all tokens. `recent_token_ids` are set if the request has penalties, for which tokens are counted: its last known
    tokens, at least all that are new since its last chunk.

    In a chunk for the model's own head, position p is computed with the model's hidden state at the request's position
    `hidden_offset` + p. In one for a block drafter, this holds for all but the last `num_block` positions, which are a
    block: the last known token and masks. Then `num_drafts` is 2 less than `num_block`, or 0: a token is sampled after
    each mask.
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
    num_block: int = 0


class StepKind(enum.StrEnum):
    """What a step computes: outputs only, prompts only, or both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class BlockMove(NamedTuple):
    """Moves the content of a block to another block id."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class PoolChange:
    """A change of the pools before a step. First the moves are made; no block is the destination of one and the source
    of another. Then the pools are cut or grown to `num_blocks`. Block tables are updated for the moves. The memory of
    `num_blocks_cut` blocks is free once the change is made."""

    num_blocks: int
    moves: tuple[BlockMove, ...] = ()
    num_blocks_cut: int = 0


STATES = -1
"""Used in place of a layer group's number for recurrent states."""


class CopyPlace(NamedTuple):
    """A block of a layer group, by its id; or a kept recurrent state (group `STATES`), by the slot of its
    checkpoint."""

    number: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies between the pools and the host before a step. First the contents of `saved` are read; their block ids are
    those before the step's pool change. After that change, contents are written into `loaded`."""

    saved: tuple[CopyPlace, ...] = ()
    loaded: tuple[tuple[CopyPlace, memoryview], ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `chunks` has each scheduled request once, single-token chunks first. It is empty if the step only
    changes the pools or copies blocks.

    `dropped_request_ids` are the requests that finished, were aborted or were preempted since the last step: the runner
    drops their state before this step. `num_prompt_tokens` of the step's tokens count against the prompts' share:
    tokens of prompts, and tokens that are computed again after a preemption.

    If `draft_steps` is set, the step has nothing else. The draft model runs these steps one after the other, and the
    tokens that it samples for a request are the request's drafts.
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
    """One request's result of a step. `accepted` are the accepted drafts before the token: the model sampled the same
    tokens in their places."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    accepted: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one executed step.

    `prompt_logprobs` has an item for each request that asked for them and had prompt positions in the step: for each
    computed position, the log-probabilities of the token after it. `pooled` are the results of pooling requests whose
    prompts ended in the step.

    `step_time_s` is the time from the end of the step before, or from this step's start if that is later, to this
    step's end. `idle_time_s` is how long the device was idle before the step although a request was running.
    `launch_time_s` is how long the host took to launch the step, if it does that beside the device's work; else 0.
    `saved_blocks` are the contents that the step's copies asked for, and `copy_time_s` is how long the host took for
    these copies, without waiting for earlier steps.

    `drafts` are the results of `draft_steps`. If `draft_error` is set, there are none, and later draft steps will not
    give any either.
    """

    step_id: int
    sampled: dict[str, SampledToken]
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    step_time_s: float = 0.0
    idle_time_s: float = 0.0
    launch_time_s: float = 0.0
    copy_time_s: float = 0.0
    num_model_calls: int = 1
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draft_error: str | None = None
    pooled: dict[str, Vector] = field(default_factory=dict)
    saved_blocks: tuple[memoryview, ...] = ()


@dataclass(slots=True, eq=False)
class ImageJob:
    """An image for the vision encoder, and the request that needs it next. It `is_given_up` for another one."""

    request: Request
    image: PromptImage
    is_given_up: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its placeholders."""
        return tuple(self.request.prompt_token_ids[self.image.start : self.image.end])

    @property
    def is_wanted(self) -> bool:
        """Whether the encoder should go on. Any thread."""
        return self.request.finish_reason is None and not self.is_given_up


@dataclass(frozen=True, slots=True)
class ImageResult:
    """What became of an image: whether it `is_encoded`, else the `error` if it failed, and none if it was given up.
    The encoder `was_run` for it unless it was cached."""

    is_encoded: bool
    was_run: bool
    error: str | None = None


@dataclass(slots=True)  # neither frozen nor a tuple: one is made for each token, and those take twice as long
class RequestOutput:
    """The new tokens of one request after a step. `finish_reason` is set on the last output. `error` is set if it is
    ERROR."""

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
    """Seconds on one monotonic clock; None for a stage that was never reached."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None


@dataclass(slots=True)  # not frozen, as above
class CompletionDelta:
    """What the engine puts on a request's stream: text that is safe to show, and the new token ids.

    `text` may lag behind `token_ids` (incomplete characters and possible stop strings are held back) and never includes
    a stop string unless the request asked for it; `token_ids` end with the token that completes the stop string. If the
    delta has several tokens, `pieces` are the text that each of them added. The last delta has `finish_reason` and
    `timings`. Counts are totals so far.
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


@dataclass(slots=True)
class EngineCounters:
    """Totals of one engine since its start, which only grow. Each part of the engine counts what it does.

    - Prompts: `num_prompt_tokens_computed` counts prompt positions that ran through the model (again after a
      preemption, too), `num_prefix_hit_tokens` those that the prefix cache had at the first admission.
      `num_prompt_tokens_from_disk` of these were loaded from disk for their request. `num_tokens_recomputed` counts
      tokens of prompts and outputs that were computed again after a preemption. `num_images_encoded` counts how often
      the vision encoder ran for an image.
    - Drafts: `num_drafts` chunks carried `num_draft_tokens` in all. The model itself sampled `num_accepted_tokens` of
      them, `num_accepted_by_place[j]` at place j of their chunk. `num_draft_errors` counts the loads of the model whose
      draft model failed and was not used any more.
    - Memory pressure: `num_pressure_cuts` counts how often the model gave idle blocks back, `num_pressure_holds` how
      often it stopped admitting requests, and `num_pressure_preemptions` the requests that were preempted for memory.
    - Disk: `num_disk_loads` counts the loads of prefixes that loaded anything. They loaded `num_blocks_loaded` in
      `disk_load_time_s`; `num_blocks_not_loaded` had to be computed after all. `num_blocks_saved` were handed over to
      be written. `num_blocks_not_saved` were worth saving but lost, because more came than may wait or than the daily
      budget allows.
    """

    num_steps: int = 0
    num_model_calls: int = 0
    num_images_encoded: int = 0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_from_disk: int = 0
    num_generated_tokens: int = 0
    num_tokens_recomputed: int = 0
    preemptions_by_tier: dict[str, int] = field(default_factory=dict)
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: dict[int, int] = field(default_factory=dict)
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
    def num_preemptions(self) -> int:
        return sum(self.preemptions_by_tier.values())


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounters):
    """A reading of one engine, cheap enough for every scrape: its counters and its present state.

    - Requests: `num_deferred` of the waiting requests wait for a prefix that another request computes. `num_adapters`
      counts all adapters of the model; the other two name those of running and of waiting requests.
    - Memory: `weight_bytes` is the size of the model's weights, `kv_pool_bytes` that of its blocks. The pool can grow
      to `max_num_blocks`. A block holds 32 tokens of one of `num_layer_groups`, so the pool can hold `max_tokens`
      tokens in all layers. `num_state_checkpoints` counts the recurrent states that are kept for prefixes.
      `pressure_level` is the level of memory pressure at which the model acts now, as a percentage of full memory; 0 if
      it need not act.
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

    @property
    def kv_usage(self) -> float:
        """The share of the largest pool that requests hold, 0 to 1. Cached blocks that no request holds count as
        free."""
        most = max(self.num_blocks, self.max_num_blocks)
        return (self.num_blocks - self.num_free_blocks) / most if most else 0.0

    @property
    def num_tokens(self) -> int:
        """How many tokens, in all layers, the present blocks can hold."""
        return self.num_blocks * BLOCK_SIZE // self.num_layer_groups

    @property
    def max_tokens(self) -> int:
        """How many tokens, in all layers, the pool can hold at its largest size."""
        return self.max_num_blocks * BLOCK_SIZE // self.num_layer_groups

    def plus(self, *counted: EngineCounters) -> EngineStats:
        """This reading with the counters of `counted` added to its own."""
        names = [leaf.name for leaf in fields(EngineCounters)]
        sums = {name: reduce(_sum, [getattr(each, name) for each in (self, *counted)]) for name in names}
        return replace(self, **sums)


def _sum(one: Any, other: Any) -> Any:
    """The sum of two counters; by key, if they are counted by key. Keys with 0 stay, so that their series exist before
    the first event."""
    if not isinstance(one, Mapping):
        return one + other
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
