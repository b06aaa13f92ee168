"""A request as every floor below HTTP sees it: token ids, images as arrays, parameters and progress, no text."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from mlx_server.sampling_params import SamplingParams

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image whose placeholders are the prompt's tokens [start, start + num_tokens): as many as its embeddings.

    `digest` (`DIGEST_BYTES` long) is of `inputs`, so that equal digests mean equal embeddings. `inputs` are the NumPy
    arrays that the model's vision encoder takes for this image alone, by their names in the model's own processor
    (`pixel_values`, `image_grid_thw`, ...). In an image that `is_bidirectional` each placeholder sees those behind it,
    too, in the layers of text: all that are not cached are computed in one step.
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
    """The digest of each image that has placeholders among tokens [start, end), and the place of `start` in it: below 0
    if it begins later."""
    return [(image.digest, start - image.start) for image in images if image.start < end and start < image.end]


class PoolingMethod(enum.StrEnum):
    """Which positions of a prompt of N tokens count how much, as sentence-transformers defines and names them."""

    LAST = "lasttoken"
    """The last one alone, which in a causal model has seen all others."""

    CLS = "cls_token"
    """The first one alone."""

    MEAN = "mean_tokens"
    """Each 1 / N."""

    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    """Each 1 / sqrt(N)."""

    WEIGHTED_MEAN = "weightedmean_tokens"
    """Position i, counted from 1, i / (1 + 2 + ... + N) (SGPT, Muennighoff 2022)."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """For a request that ends with its prompt. Its result is the pooled hidden state, taken behind the model's last
    norm and sent through the dense layers of the model's folder; or, if `logit_ids` are given, the logits of these
    tokens after the last position. `is_whole` asks for all of the prompt in one step: each position sees all others."""

    method: PoolingMethod = PoolingMethod.LAST
    logit_ids: tuple[int, ...] = ()
    is_whole: bool = False


Vector = bytes
"""Of float32 numbers, in the byte order of this machine."""


class Priority(enum.IntEnum):
    """Base priority of a tier. Smaller is sooner; one step equals `1 / aging_rate` seconds of waiting."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING by preemption. Owned by the scheduler."""

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
    """A grammar's cursor over one request's output. Used by the scheduler, on the event-loop thread."""

    def accept(self, token_id: int) -> bool:
        """Advances by an output token; False when the grammar forbids it."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that are the only continuation from here, already accepted by this call."""
        ...

    def bitmask(self) -> bytes | None:
        """Allowed next tokens, one bit a token id, little endian; None when all are allowed."""
        ...

    def fork(self) -> TokenConstraint | None:
        """Another cursor at the same place; None where there can be none."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output is complete and only an end of sequence may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why no output can be followed any further, if that is so: the grammar is too complex."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence to generate, and how far it has come.

    Token positions, as one range (P prompt, O output; `num_in_flight` tokens are sampled by submitted
    steps but not known on the host yet):

        |-------- prompt --------|---- output ----|- in flight -|
        0                        P                P+O           P+O+num_in_flight
        |--- computed: K/V is, or will be by a submitted step, in blocks ---|

    `num_computed_tokens` catches up with the number of tokens step by step; prefill, decode, prefix hits,
    chunks and resumption after preemption are all this one rule.
    Mutated by the scheduler only.

    `prompt_token_ids` are taken over, not copied. `max_total_tokens` bounds prompt and output together (context length
    and `max_tokens`, already combined). `extra_keys` separate the prefix cache (tenant, then salt), and so does
    `adapter`, the name of one of the model's, or `adapter_key` where its name does not say enough. `arrival_s` is on
    the scheduler's clock. `prediction_token_ids` are what the sender expects most of the output to be. With `pooling`
    there is no output: the request ends with its prompt, of which nothing stays in the prefix cache. `images` are in
    the order of their places in the prompt.
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
    constraint: TokenConstraint | None = None
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    images: tuple[PromptImage, ...] = ()
    end_token_ids: frozenset[int] = field(init=False)  # any of these ends the output
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    num_ever_computed: int = field(default=0, init=False)  # the most that `num_computed_tokens` has been
    is_promoted: bool = field(default=False, init=False)  # runs by its age, and does not give way to better tiers
    num_tokens_overtaken: int = field(default=0, init=False)  # work of its tier that started before it, though younger
    num_accepted_drafts: int = field(default=0, init=False)  # of its drafts, those that are in the output
    num_rejected_drafts: int = field(default=0, init=False)
    has_lost_seat: bool = field(default=False, init=False)  # the last one, to such work
    num_cached_tokens: int | None = field(default=None, init=False)
    num_loaded_tokens: int = field(default=0, init=False)  # of these, those that were loaded from disk for it
    num_rounded_tokens: int = field(default=0, init=False)  # the most that it began with in blocks of 8 bits from disk
    was_sought_on_disk: bool = field(default=False, init=False)  # since it began to wait
    num_blocks_lacked: int = field(default=0, init=False)  # where it was found there and no room was for it
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
        if self.sampling.stop_token_ids:  # else one object for all requests, which stays in the processor's cache
            self.end_token_ids = self.end_token_ids.union(self.sampling.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known ids at positions [start, stop)."""
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
    """Appends a sampled token to the output, and those that the request's grammar forces after it; why the
    request has ended now, if it has. ERROR means that the grammar forbids the token.

    Sets `stop_reason` when a stop id ends the request; every other change of state is the caller's.
    """
    request.num_in_flight -= 1
    request.output_token_ids.append(token_id)
    reason = _finish_reason(request, token_id)
    if request.constraint is None or reason is FinishReason.STOP:
        return reason
    if not request.constraint.accept(token_id):
        return FinishReason.ERROR
    if request.constraint.is_terminated():
        return FinishReason.STOP
    # A forced token has no logprobs, since no logits were computed: a request with logprobs has each one sampled.
    if reason is not None or request.sampling.logprobs is not None:
        return reason
    return _append_forced(request, request.constraint)


def _append_forced(request: Request, constraint: TokenConstraint) -> FinishReason | None:
    """Appends the tokens that are a grammar's only continuation: no model call decides them."""
    forced = constraint.forced_tokens()
    for index, token_id in enumerate(forced, start=1):
        request.output_token_ids.append(token_id)
        reason = _finish_reason(request, token_id)
        if reason is not None and index < len(forced):
            return reason  # cut, although the grammar has seen its end
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
