"""A request as all floors below HTTP see it: token ids, images as arrays, parameters and progress, but no text."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import SamplingParams

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt. Its placeholders are the prompt's tokens [start, start + num_tokens), one for each
    embedding.

    `digest` (`DIGEST_BYTES` long) is a digest of `inputs`, so equal digests mean equal embeddings. `inputs` are the
    NumPy arrays that the model's vision encoder takes for this image alone, named as in the model's own processor
    (`pixel_values`, `image_grid_thw`, ...). If an image `is_bidirectional`, the text layers let each placeholder attend
    to the later ones, too, so all placeholders that are not cached are computed in one step.
    """

    start: int
    num_tokens: int
    digest: bytes
    inputs: Mapping[str, Any]
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def images_within(images: Iterable[PromptImage], start: int, end: int) -> list[tuple[bytes, int]]:
    """For each image with placeholders among tokens [start, end): its digest, and the position of `start` within the
    image (negative if the image begins after `start`)."""
    return [(image.digest, start - image.start) for image in images if image.start < end and start < image.end]


class PoolingMethod(enum.StrEnum):
    """How much each position of a prompt of N tokens counts. Names and definitions are those of
    sentence-transformers."""

    LAST = "lasttoken"
    """Only the last position counts. In a causal model it has attended to all others."""

    CLS = "cls_token"
    """Only the first position counts."""

    MEAN = "mean_tokens"
    """Each position counts 1 / N."""

    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    """Each position counts 1 / sqrt(N)."""

    WEIGHTED_MEAN = "weightedmean_tokens"
    """Position i, counted from 1, counts i / (1 + 2 + ... + N) (SGPT, Muennighoff 2022)."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a request that ends with its prompt. Its result is the pooled hidden state after the model's last
    norm and the dense layers in the model's folder; or, if `logit_ids` are given, the logits of these tokens after the
    last position. If `is_whole`, the whole prompt is computed in one step, because each position attends to all
    others."""

    method: PoolingMethod = PoolingMethod.LAST
    logit_ids: tuple[int, ...] = ()
    is_whole: bool = False


Vector = bytes
"""float32 numbers in the byte order of this machine."""


class Priority(enum.IntEnum):
    """The base priority of a tier. A smaller value is more urgent; a difference of 1 equals `1 / aging_rate` seconds of
    waiting."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a preemption leads from RUNNING back to WAITING. Set by the scheduler only."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenConstraint(Protocol):
    """The state of a grammar after one request's output so far. Used by the scheduler, on the event-loop thread."""

    def accept(self, token_id: int) -> bool:
        """Advances by an output token. False if the grammar forbids it."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """The tokens that are the only possible continuation; this call has accepted them already."""
        ...

    def bitmask(self) -> bytes | None:
        """The allowed next tokens, one bit for each token id, little endian; None if all are allowed."""
        ...

    def fork(self) -> TokenConstraint | None:
        """An independent copy of this state; None if no copy can be made."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output is complete, so that only an end-of-sequence token may follow."""
        ...

    @property
    def error(self) -> InvalidRequestError | None:
        """Why the grammar cannot follow the output any further (it is too complex), with the request's field; None if
        it can."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence to generate, and its progress.

    Token positions, as one range (P prompt, O output; `num_in_flight` tokens are sampled by submitted steps but not
    known on the host yet):

        |-------- prompt --------|---- output ----|- in flight -|
        0                        P                P+O           P+O+num_in_flight
        |--- computed: K/V is, or will be by a submitted step, in blocks ---|

    `num_computed_tokens` catches up with the number of tokens step by step. This one rule covers prefill, decode,
    prefix hits, chunks and resuming after a preemption. Only the scheduler changes a request, but the engine cuts its
    output at a stop string.

    - `prompt_token_ids` are not copied; the caller must not change them. `max_total_tokens` bounds prompt and output
      together (the smaller of what the context length and `max_tokens` allow).
    - `extra_keys` separate the prefix cache (tenant, then salt). So does `adapter`, the name of one of the model's
      adapters, or `adapter_key` where that name does not identify the adapter well enough.
    - The clients of a tier share it equally, and `client` is whose request this is.
    - `arrival_s` is on the scheduler's clock. `prediction_token_ids` are what the client expects most of the output to
      be.
    - With `pooling` there is no output: the request ends with its prompt, of which nothing stays in the prefix cache.
      `images` are in the order of their places in the prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    _: KW_ONLY
    arrival_s: float
    max_total_tokens: int
    priority: Priority = Priority.NORMAL
    eos_token_ids: frozenset[int] = frozenset()
    extra_keys: tuple[str, ...] = ()
    adapter: str | None = None
    adapter_key: str | None = None
    tier: str = "default"
    client: str = ""
    constraint: TokenConstraint | None = None
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    images: tuple[PromptImage, ...] = ()
    end_token_ids: frozenset[int] = field(init=False)  # any of these ends the output
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    num_ever_computed: int = field(default=0, init=False)  # the maximum of `num_computed_tokens` so far
    is_promoted: bool = field(default=False, init=False)  # by its age: it is not preempted for better tiers
    urgent_key: float = field(default=0.0, init=False)  # its key, or that of an older one that it has gone before
    num_tokens_overtaken: int = field(default=0, init=False)  # of younger requests of its tier that started before it
    num_accepted_drafts: int = field(default=0, init=False)  # drafts that are in the output
    num_rejected_drafts: int = field(default=0, init=False)
    has_lost_seat: bool = field(default=False, init=False)  # a last free seat went to such a request
    num_cached_tokens: int | None = field(default=None, init=False)
    num_loaded_tokens: int = field(default=0, init=False)  # of these, loaded from disk for it
    num_rounded_tokens: int = field(default=0, init=False)  # the most it started with in 8-bit blocks from disk
    was_sought_on_disk: bool = field(default=False, init=False)  # since it last began to wait
    num_blocks_lacked: int = field(default=0, init=False)  # for a prefix found on disk, when there was no room for it
    num_preemptions: int = field(default=0, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    first_scheduled_s: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    last_token_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert len(self.prompt_token_ids) >= 1, "an empty prompt is refused before a Request is made"
        num_outputs = self.max_total_tokens - len(self.prompt_token_ids)
        assert num_outputs == 0 if self.pooling is not None else num_outputs > 0, "no room for an output token"
        self.end_token_ids = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        if self.sampling.stop_token_ids:  # else all requests share one set, which stays in the processor's cache
            self.end_token_ids = self.end_token_ids.union(self.sampling.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_counted_tokens(self) -> int:
        """Output tokens as `usage` and metrics count them."""
        return 0 if self.sampling.is_scoring else len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens known on the host: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The known ids at positions [start, stop)."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def append_token(request: Request, token_id: int) -> FinishReason | None:
    """Appends a sampled token to the output, and then the tokens that the request's grammar forces after it. Returns
    why the request has ended, or None. ERROR means that the grammar forbids the token.

    Also reduces `num_in_flight` by one, and sets `stop_reason` if a stop id ends the request. All other changes of
    state are left to the caller.
    """
    request.num_in_flight -= 1
    request.output_token_ids.append(token_id)
    reason = _finish_reason(request, token_id)
    if request.constraint is None:
        return reason
    if reason is FinishReason.STOP:
        return reason if token_id or _may_end(request, request.constraint) else FinishReason.ERROR
    if not request.constraint.accept(token_id):
        return FinishReason.ERROR
    if request.constraint.is_terminated():
        return FinishReason.STOP
    # No logits are computed for a forced token. So if logprobs are wanted, each token is sampled.
    if reason is not None or request.sampling.logprobs is not None:
        return reason
    return _append_forced(request, request.constraint)


def _may_end(request: Request, constraint: TokenConstraint) -> bool:
    """Whether token 0, which ends the request, was chosen: a row without any allowed token gives it, too."""
    sampling, mask = request.sampling, constraint.bitmask()
    is_early = len(request.output_token_ids) <= sampling.min_tokens
    is_allowed = sampling.allowed_token_ids is None or 0 in sampling.allowed_token_ids
    return not is_early and is_allowed and (mask is None or mask[0] & 1 == 1)


def _append_forced(request: Request, constraint: TokenConstraint) -> FinishReason | None:
    """Appends the tokens that the grammar forces: no model call decides them."""
    forced = constraint.forced_tokens()
    for index, token_id in enumerate(forced, start=1):
        request.output_token_ids.append(token_id)
        reason = _finish_reason(request, token_id)
        if reason is not None and index < len(forced):
            return reason  # the output is cut here, although the grammar has accepted all forced tokens
        if reason is not None:
            return FinishReason.STOP if constraint.is_terminated() else reason
    return FinishReason.STOP if constraint.is_terminated() else None


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    if token_id in request.end_token_ids:
        if token_id not in request.eos_token_ids or request.sampling.ignore_eos:
            request.stop_reason = token_id
        return FinishReason.STOP
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    return FinishReason.LENGTH if num_tokens >= request.max_total_tokens else None
