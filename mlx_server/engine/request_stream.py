"""One request: how it is checked against the model's limits, and the stream of its output, in which token ids become
text and stop strings end the text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.engine.grammar.constraints import GuardedConstraint
from mlx_server.engine.text.detokenizer import IncrementalDetokenizer, StringScanner
from mlx_server.engine.text.reasoning import ReasoningFollower, ReasoningSpan
from mlx_server.engine.text.tokenizer import Tokenizer, check_ids
from mlx_server.errors import ContextLengthError, InvalidRequestError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.outputs import CompletionDelta, RequestOutput, RequestTimings
from mlx_server.request import (
    DIGEST_BYTES,
    FinishReason,
    PoolingParams,
    Priority,
    PromptImage,
    Request,
    TokenConstraint,
)
from mlx_server.sampling_params import SamplingParams

CountPlaceholders = Callable[[Sequence[int], Mapping[str, Any]], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to generate, with one of the model's adapters or without: the one of that name now, or that of
    `adapter_key`, which the caller holds (`AsyncEngine.hold_adapter`). Without `tier`, the tier is that of the
    priority (high, normal or low). The clients of a tier share it equally; `client` is whose request this is.
    `extra_keys` (salt, tenant) separate prefixes in the prefix cache.

    The client wants `num_samples` answers to the prompt, and this request is number `sample_index`. `kept_token_ids`
    are special tokens that stay in the text even if special tokens are skipped. With `continues_text` the output
    continues the prompt's text, so its leading space is kept. Stop strings do not count in the output's `reasoning`.
    `prediction_token_ids` are the client's guess at the
    output. With `pooling` nothing is generated, and the only delta has the result.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    tier: str | None = None
    client: str = ""
    extra_keys: tuple[str, ...] = ()
    adapter: str | None = None
    adapter_key: str | None = None
    num_samples: int = 1
    sample_index: int = 0
    constraint: TokenConstraint | None = None
    kept_token_ids: frozenset[int] = frozenset()
    continues_text: bool = False
    reasoning: ReasoningSpan | None = None
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    images: tuple[PromptImage, ...] = ()


class OutputText:
    """Turns one request's output tokens into text for the client."""

    def __init__(self, generation: GenerationRequest, tokenizer: Tokenizer) -> None:
        sampling = generation.sampling
        self._sampling = sampling
        self._eos_token_ids = tokenizer.eos_token_ids
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            sampling.skip_special_tokens,
            kept_token_ids=generation.kept_token_ids,
            continues_text=generation.continues_text,
        )
        self._stops = StringScanner(sampling.stop) if sampling.stop else None
        self._reasoning = None if generation.reasoning is None else ReasoningFollower(generation.reasoning)
        self._num_tokens = 0

    def append_run(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[tuple[str, ...], str | None]:
        """Appends the tokens one by one until a stop string matches. Returns the text of each appended token, and the
        stop string."""
        pieces: list[str] = []
        matched = None
        for count, token_id in enumerate(token_ids, start=1):
            text, matched = self.append((token_id,), finish_reason if count == len(token_ids) else None)
            pieces.append(text)
            if matched is not None:
                break
        return tuple(pieces), matched

    def append(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, str | None]:
        """Returns the new text, and the stop string that ended it, or None."""
        shown = token_ids[:-1] if finish_reason is FinishReason.STOP and self._is_hidden(token_ids[-1]) else token_ids
        if self._stops is None:
            text = self._detokenizer.append(shown)
            return text if finish_reason is None else text + self._detokenizer.finish(), None
        # Stop strings count only after `min_tokens`, so text before that is not searched.
        num_exempt = max(self._sampling.min_tokens - self._num_tokens, 0)
        self._num_tokens += len(token_ids)
        text, searched = self._detokenizer.append(shown[:num_exempt]), self._detokenizer.append(shown[num_exempt:])
        if self._reasoning is not None:
            text = "".join(self._reasoning.split(text))
            reasoning, searched = self._reasoning.split(searched)
            text += reasoning
            searched += "" if finish_reason is None else self._reasoning.flush()
        scan = self._stops.scan(searched)
        text += scan.text
        if finish_reason is not None and scan.matched is None:
            scan = self._stops.scan(self._detokenizer.finish())
            text += scan.text + self._stops.flush()
        if scan.matched is not None and self._sampling.include_stop_str_in_output:
            text += scan.matched
        return text, scan.matched

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token that ended the output is left out of the text."""
        if self._sampling.include_stop_str_in_output:
            return False
        is_eos = token_id in self._eos_token_ids and not self._sampling.ignore_eos
        return is_eos or token_id in self._sampling.stop_token_ids


class RequestStream:
    """The `CompletionDelta`s of one request, read with `take` or by iteration; the last one has a `finish_reason`.

    Event-loop thread only. Iteration raises the `ServeError` that ended the request, if one did. Leaving the iteration
    does not end the request: abort a stream that is no longer wanted. Once `is_complete` is set, no more deltas are
    added, and `summary` is available (None if metrics failed).

    `on_output` is called when there are deltas to read, and at the end. A reader of several streams gives them the same
    callback, which is then called once for all their outputs of a step.
    """

    def __init__(
        self, request: Request, text: OutputText | None, end: Callable[[str, FinishReason, int], None]
    ) -> None:
        """With `text` None, deltas have no text. `end(request_id, reason, num_void)` ends the request in the scheduler;
        the last `num_void` tokens of its output do not count."""
        self.request = request
        self._text = text
        self._end = end
        self._deltas: list[CompletionDelta] = []
        self._latest = CompletionDelta("", ())
        self._error: ServeError | None = None
        self.is_complete = False
        self._output_ready = asyncio.Event()
        self.on_output: Callable[[], None] = self._output_ready.set
        self.summary: RequestSummary | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._deltas:
            if self.is_over():
                raise StopAsyncIteration
            self._output_ready.clear()
            await self._output_ready.wait()
        return self._deltas.pop(0)

    @property
    def has_output(self) -> bool:
        """Whether a delta can be read without waiting."""
        return bool(self._deltas)

    def take(self) -> list[CompletionDelta]:
        """Returns all deltas that can be read without waiting."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def is_over(self) -> bool:
        """Whether all deltas have been read and the request has ended. Raises the `ServeError` of a request that ended
        with one."""
        if self._deltas or not self.is_complete:
            return False
        if self._error is not None:
            raise self._error
        return True

    def abort(self, error: ServeError | None = None) -> None:
        """Ends the request, with an error if one is given; its blocks are freed within one step. Does nothing if the
        request has ended."""
        if self.is_complete:
            return
        self._end(self.request_id, FinishReason.ABORT if error is None else FinishReason.ERROR, 0)
        if error is None:
            nothing: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": (), "prompt_logprobs": (), "pieces": ()}
            self._deltas.append(replace(self._latest, finish_reason=FinishReason.ABORT, **nothing))
            self.is_complete = True
            self.on_output()
        else:
            self.fail(error)

    def put(self, output: RequestOutput, now: float) -> None:
        """Adds a step's output of the request, at time `now` of the scheduler's clock. The caller calls `on_output`
        afterwards."""
        if output.error is not None and len(output.new_token_ids) > 1:  # the error belongs to the last one
            self.put(_before_fault(output), now)
        if self.is_complete:
            return
        if output.error is not None:
            self.fail(output.error)
            return
        request, num_before = self.request, self._latest.num_output_tokens
        if request.first_token_s is None and output.pooled is None:
            request.first_token_s = now
        token_ids, finish_reason, stop_reason = output.new_token_ids, output.finish_reason, output.stop_reason
        num_tokens, text, matched = len(token_ids), "", None
        pieces: tuple[str, ...] = ()
        if self._text is not None:
            if num_tokens == 1:
                text, matched = self._text.append(token_ids, finish_reason)
            else:
                pieces, matched = self._text.append_run(token_ids, finish_reason)
                text, num_tokens = "".join(pieces), len(pieces)
        if matched is not None:
            token_ids = token_ids[:num_tokens]
            # Tokens of this step after the match were never sent to the client. A step's drafts come first.
            num_cut = max(request.num_accepted_drafts - self._latest.num_accepted_drafts - num_tokens, 0)
            request.num_accepted_drafts -= num_cut
            request.num_rejected_drafts += num_cut
            num_void = request.num_output_tokens - num_before - num_tokens
            del request.output_token_ids[num_before + num_tokens :]
            self._end(self.request_id, FinishReason.STOP, num_void)
            finish_reason, stop_reason = FinishReason.STOP, matched
        timings = None
        if finish_reason is not None:
            timings = RequestTimings(request.arrival_s, request.first_scheduled_s, request.first_token_s, now)
        delta = CompletionDelta(  # positional arguments: keywords take half a microsecond more
            text,
            token_ids,
            finish_reason,
            stop_reason,
            len(request.prompt_token_ids),
            output.num_cached_tokens,
            num_before + num_tokens,
            request.num_accepted_drafts,
            request.num_rejected_drafts,
            output.logprobs[:num_tokens],
            output.prompt_logprobs,
            timings,
            output.pooled,
            pieces,
            request.num_rounded_tokens,
        )
        self._deltas.append(delta)
        self._latest = delta
        self.is_complete = finish_reason is not None

    def fail(self, error: ServeError) -> None:
        """Ends the stream with an error. Deltas that are already there can still be read."""
        self._error = error
        self.is_complete = True
        self.on_output()


def _before_fault(output: RequestOutput) -> RequestOutput:
    """The output without its last token and its error: a stop string may end the request before the error."""
    return replace(
        output,
        new_token_ids=output.new_token_ids[:-1],
        finish_reason=None,
        stop_reason=None,
        error=None,
        logprobs=output.logprobs[: len(output.new_token_ids) - 1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a loaded model takes.

    `max_model_len` bounds prompt and output together, in tokens; token ids must be less than `vocab_size`. `no_vision`
    says why the model takes no images ("" if it does). `count_placeholders` returns how many placeholders an image with
    these tokens and arrays has, or None if they do not fit the model. `largest_chunk` is the most prompt tokens that a
    step computes.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    no_vision: str
    count_placeholders: CountPlaceholders
    largest_chunk: int


def make_request(
    generation: GenerationRequest, limits: ModelLimits, arrival_s: float, sample: Request | None = None
) -> Request:
    """Makes the scheduler's request. With `sample`, the request of another answer to the same prompt, the prompt is
    neither copied nor checked again. `max_tokens` is reduced to what the context has left, since agents ask for what
    hosted models allow.

    Raises `InvalidRequestError` or `ContextLengthError`; the message has the value and the limit, and says what to do.
    """
    constraint = _guarded(generation, limits.eos_token_ids)
    if sample is not None:
        return replace(sample, request_id=generation.request_id, sampling=generation.sampling, constraint=constraint)
    prompt, sampling = generation.prompt_token_ids, generation.sampling
    limit, num_prompt, vocab_size = limits.max_model_len, len(prompt), limits.vocab_size
    if sampling.n > 1 or sampling.structured_outputs is not None:
        param = "n" if sampling.n > 1 else "structured_outputs"
        raise InvalidRequestError(f"{param} is not a request's own to an engine: use LLM or AsyncLLM.", param)
    if num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", "prompt")
    if num_prompt >= limit + (generation.pooling is not None):
        raise _too_long(generation, limit)
    max_tokens = limit if sampling.max_tokens is None else sampling.max_tokens
    allowed = sampling.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed)} ids; the vocabulary has {vocab_size}.", "allowed_token_ids"
        )
    check_ids("prompt", prompt, vocab_size)
    check_ids("logit_bias", sampling.logit_bias, vocab_size)
    check_ids("allowed_token_ids", allowed, vocab_size)
    if generation.images:
        _check_images(generation, limits)
        _check_arrays(generation, limits.count_placeholders)
    most_tokens = num_prompt if generation.pooling is not None else min(num_prompt + max_tokens, limit)
    return Request(
        generation.request_id,
        list(prompt),
        sampling,
        arrival_s=arrival_s,
        max_total_tokens=most_tokens,
        priority=generation.priority,
        eos_token_ids=limits.eos_token_ids,
        extra_keys=generation.extra_keys,
        adapter=generation.adapter,
        client=generation.client,
        tier=generation.tier or generation.priority.name.lower(),
        constraint=constraint,
        prediction_token_ids=_usable(generation.prediction_token_ids[: most_tokens - num_prompt], vocab_size),
        pooling=generation.pooling,
        images=generation.images,
    )


def _check_images(generation: GenerationRequest, limits: ModelLimits) -> None:
    """Images must be in order in the prompt, without overlap, and the model must take images and generate text."""
    model_name, largest_chunk = limits.model_name, limits.largest_chunk
    if limits.no_vision:
        raise InvalidRequestError(f"{model_name} takes no images: {limits.no_vision}. Send text alone.", "images")
    if generation.pooling is not None:
        raise InvalidRequestError("Vectors and scores are made of text; send it without images.", "images")
    end = 0
    for number, image in enumerate(generation.images):
        if image.num_tokens < 1 or not end <= image.start or image.end > len(generation.prompt_token_ids):
            raise InvalidRequestError(
                f"Image {number} has tokens {image.start} to {image.end} of the prompt, which has "
                f"{len(generation.prompt_token_ids)}; they must be at least one, within it, and behind those of the "
                "image before.",
                "images",
            )
        end = image.end
        if len(image.digest) != DIGEST_BYTES:
            raise InvalidRequestError(
                f"The digest of image {number} has {len(image.digest)} bytes; it must have {DIGEST_BYTES}.", "images"
            )
        if image.is_bidirectional and image.num_tokens > largest_chunk:
            raise InvalidRequestError(
                f"Image {number} has {image.num_tokens} tokens, which {model_name} computes in one step; here a step "
                f"has at most {largest_chunk}. Start the server with --max-num-batched-tokens {image.num_tokens} or "
                "more, or send text alone.",
                "images",
            )


def _check_arrays(generation: GenerationRequest, count_placeholders: CountPlaceholders) -> None:
    for number, image in enumerate(generation.images):
        count = count_placeholders(generation.prompt_token_ids[image.start : image.end], image.inputs)
        if count is None:
            raise InvalidRequestError(
                f"The placeholders or arrays of image {number} do not fit the model's vision encoder.", "images"
            )
        if count != image.num_tokens:
            raise InvalidRequestError(
                f"Image {number} has {image.num_tokens} placeholders, and its arrays make {count}.", "images"
            )


def _too_long(generation: GenerationRequest, limit: int) -> ContextLengthError:
    num_of_images = sum(image.num_tokens for image in generation.images)
    remedy = "Shorten the prompt."
    if num_of_images:
        remedy = f"Its images have {num_of_images} tokens; send fewer or smaller images, or shorten the text."
    is_answered = generation.pooling is None
    return ContextLengthError.of_prompt(str(len(generation.prompt_token_ids)), limit, remedy, is_answered=is_answered)


def _usable(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The ids before the first one that is outside the vocabulary. A prediction is only a hint, so it is not
    refused."""
    if not token_ids or max(token_ids) < vocab_size:
        return token_ids
    return token_ids[: next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)]


def _guarded(generation: GenerationRequest, eos_token_ids: frozenset[int]) -> TokenConstraint | None:
    if generation.constraint is None:
        return None
    end_ids = eos_token_ids.union(generation.sampling.stop_token_ids)
    return GuardedConstraint(generation.constraint, generation.request_id, end_ids)
