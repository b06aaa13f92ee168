"""One request on its way in, checked against what the model can take, and its output on the way out: ids become text,
text stops where it must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.engine.grammar.constraints import GuardedConstraint
from mlx_server.engine.text.detokenizer import IncrementalDetokenizer, StringScanner
from mlx_server.engine.text.tokenizer import Tokenizer
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
    """What to generate, with one of the model's adapters or with none. `tier` None is that of the priority: high,
    normal or low. `extra_keys` separate the prefix cache (salt, tenant). It is answer `sample_index` of the
    `num_samples` that the client wants to the prompt. `kept_token_ids` are special tokens that stay in the text
    although special tokens are skipped. `continues_text` says that the output goes on in the middle of the prompt's
    text, so that its leading space counts. `prediction_token_ids` are what the output is expected to be, mostly. With
    `pooling` nothing is generated: the only delta has the result."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    tier: str | None = None
    extra_keys: tuple[str, ...] = ()
    adapter: str | None = None
    num_samples: int = 1
    sample_index: int = 0
    constraint: TokenConstraint | None = None
    kept_token_ids: frozenset[int] = frozenset()
    continues_text: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    images: tuple[PromptImage, ...] = ()


class OutputText:
    """Turns one request's output tokens into text that may be shown."""

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
        self._num_tokens = 0

    def append_run(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[tuple[str, ...], str | None]:
        """As `append` of one token after the other, until a stop string ended it: the text of each."""
        pieces: list[str] = []
        matched = None
        for count, token_id in enumerate(token_ids, start=1):
            text, matched = self.append((token_id,), finish_reason if count == len(token_ids) else None)
            pieces.append(text)
            if matched is not None:
                break
        return tuple(pieces), matched

    def append(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, str | None]:
        """New text, and the stop string that ended it, if one did."""
        shown = token_ids[:-1] if finish_reason is FinishReason.STOP and self._is_hidden(token_ids[-1]) else token_ids
        if self._stops is None:
            text = self._detokenizer.append(shown)
            return text if finish_reason is None else text + self._detokenizer.finish(), None
        # Stop strings count only after `min_tokens`, so text before that is not searched.
        num_exempt = min(max(self._sampling.min_tokens - self._num_tokens, 0), len(shown))
        self._num_tokens += len(token_ids)
        text = self._detokenizer.append(shown[:num_exempt])
        scan = self._stops.scan(self._detokenizer.append(shown[num_exempt:]))
        text += scan.text
        if finish_reason is not None and scan.matched is None:
            scan = self._stops.scan(self._detokenizer.finish())
            text += scan.text + self._stops.flush()
        if scan.matched is not None and self._sampling.include_stop_str_in_output:
            text += scan.matched
        return text, scan.matched

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token that ended the output is not part of its text."""
        if self._sampling.include_stop_str_in_output:
            return False
        is_eos = token_id in self._eos_token_ids and not self._sampling.ignore_eos
        return is_eos or token_id in self._sampling.stop_token_ids


class RequestStream:
    """One request's `CompletionDelta`s, to be taken or iterated over; the one with `finish_reason` is the last.

    Event-loop thread only. The iteration raises the `ServeError` that ended the request, if one did. A stream that is
    no longer wanted must be aborted: leaving the iteration does not do it. Once `is_complete`, nothing more
    will be put on it, and `summary` is there. `on_news` is called when there is something to take, and at the end; who
    reads several streams gives them one callback, and a step's news of all of them are one call.
    """

    def __init__(
        self, request: Request, text: OutputText | None, end: Callable[[str, FinishReason, int], None]
    ) -> None:
        """`text` None gives deltas without text. `end` ends the request in the scheduler, of whose output the last so
        many tokens are void."""
        self.request = request
        self._text = text
        self._end = end
        self._deltas: list[CompletionDelta] = []
        self._latest = CompletionDelta("", ())
        self._error: ServeError | None = None
        self.is_complete = False
        self._news = asyncio.Event()
        self.on_news: Callable[[], None] = self._news.set
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
            self._news.clear()
            await self._news.wait()
        return self._deltas.pop(0)

    @property
    def has_output(self) -> bool:
        """Whether a delta can be read without waiting."""
        return bool(self._deltas)

    def take(self) -> list[CompletionDelta]:
        """All that can be read without waiting."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def is_over(self) -> bool:
        """Whether the end has been read. Raises the `ServeError` of a request that ended with one."""
        if self._deltas or not self.is_complete:
            return False
        if self._error is not None:
            raise self._error
        return True

    def abort(self, error: ServeError | None = None) -> None:
        """Ends the request, with an error if one is given; its blocks are back within one step. Does nothing if it has
        ended."""
        if self.is_complete:
            return
        self._end(self.request_id, FinishReason.ABORT if error is None else FinishReason.ERROR, 0)
        if error is None:
            nothing: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": (), "prompt_logprobs": (), "pieces": ()}
            self._deltas.append(replace(self._latest, finish_reason=FinishReason.ABORT, **nothing))
            self.is_complete = True
            self.on_news()
        else:
            self.fail(error)

    def put(self, output: RequestOutput, now: float) -> None:
        """Takes a step's news of the request, at `now` on the scheduler's clock. Who puts them calls `on_news`."""
        if output.error is not None and len(output.new_token_ids) > 1:  # the last one is the fault
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
            # Of several tokens of one step, those behind the match have never been put out.
            num_cut = min(len(output.new_token_ids) - num_tokens, request.num_accepted_drafts)
            request.num_accepted_drafts -= num_cut
            request.num_rejected_drafts += num_cut
            num_void = request.num_output_tokens - num_before - num_tokens
            del request.output_token_ids[num_before + num_tokens :]
            self._end(self.request_id, FinishReason.STOP, num_void)
            finish_reason, stop_reason = FinishReason.STOP, matched
        timings = None
        if finish_reason is not None:
            timings = RequestTimings(request.arrival_s, request.first_scheduled_s, request.first_token_s, now)
        delta = CompletionDelta(  # by place, since names take half a microsecond
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
        """Ends the stream with an error; deltas that are there can still be read."""
        self._error = error
        self.is_complete = True
        self.on_news()


def _before_fault(output: RequestOutput) -> RequestOutput:
    """The news as if the last token had not been drawn yet: a stop string may end the request before it."""
    return replace(
        output,
        new_token_ids=output.new_token_ids[:-1],
        finish_reason=None,
        stop_reason=None,
        error=None,
        logprobs=output.logprobs[: len(output.new_token_ids) - 1],
    )


def make_request(
    generation: GenerationRequest,
    *,
    arrival_s: float,
    model_name: str,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    no_vision: str = "",
    count_placeholders: CountPlaceholders = lambda token_ids, inputs: None,
    largest_chunk: int = 2048,
) -> Request:
    """The scheduler's request. `max_model_len` bounds prompt and output together, in tokens; `vocab_size` every token
    id; `no_vision` says why the model takes no images, if it does not; `count_placeholders` how many an image with
    these tokens and arrays has, None if there is none with them; `largest_chunk` how many tokens of a prompt a step
    computes at most. Raises `InvalidRequestError` or `ContextLengthError` with value, limit and remedy. More
    `max_tokens` than the context has left, however many, are cut to that: agents ask for what hosted models allow."""
    prompt, sampling = generation.prompt_token_ids, generation.sampling
    limit, num_prompt = max_model_len, len(prompt)
    if sampling.n > 1 or sampling.structured_outputs is not None:
        param = "n" if sampling.n > 1 else "structured_outputs"
        raise InvalidRequestError(f"{param} is not a request's own to an engine: use LLM or AsyncLLM.", param)
    if num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", "prompt")
    if num_prompt >= limit + (generation.pooling is not None):
        raise _too_long(generation, model_name, limit)
    max_tokens = limit if sampling.max_tokens is None else sampling.max_tokens
    allowed = sampling.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed)} ids; the vocabulary has {vocab_size}.", "allowed_token_ids"
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", allowed, vocab_size)
    if generation.images:
        _check_images(generation, model_name, no_vision, largest_chunk)
        _check_arrays(generation, count_placeholders)
    most_tokens = num_prompt if generation.pooling is not None else min(num_prompt + max_tokens, limit)
    return Request(
        generation.request_id,
        list(prompt),
        sampling,
        arrival_s=arrival_s,
        max_total_tokens=most_tokens,
        priority=generation.priority,
        eos_token_ids=eos_token_ids,
        extra_keys=generation.extra_keys,
        adapter=generation.adapter,
        tier=generation.tier or generation.priority.name.lower(),
        constraint=_guarded(generation, eos_token_ids),
        prediction_token_ids=_usable(generation.prediction_token_ids[: most_tokens - num_prompt], vocab_size),
        pooling=generation.pooling,
        images=generation.images,
    )


def _check_images(generation: GenerationRequest, model_name: str, no_vision: str, largest_chunk: int) -> None:
    """Images stand in the prompt one behind the other, and are for models that see and generate."""
    if no_vision:
        raise InvalidRequestError(f"{model_name} takes no images: {no_vision}. Send text alone.", "images")
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


def _too_long(generation: GenerationRequest, model_name: str, limit: int) -> ContextLengthError:
    num_of_images = sum(image.num_tokens for image in generation.images)
    share = f", {num_of_images} of them its images'" if num_of_images else ""
    remedy = "Send fewer or smaller images, or shorten the text." if num_of_images else "Shorten the prompt."
    return ContextLengthError(
        f"The prompt has {len(generation.prompt_token_ids)} tokens{share}; the context of {model_name} is {limit} "
        f"tokens, and at least one must be left for the answer. {remedy}",
        "input_tokens",
    )


def _usable(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Those before the first that the model does not know: what is a hint is not refused."""
    if not token_ids or max(token_ids) < vocab_size:
        return token_ids
    return token_ids[: next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)]


def _guarded(generation: GenerationRequest, eos_token_ids: frozenset[int]) -> TokenConstraint | None:
    if generation.constraint is None:
        return None
    end_ids = eos_token_ids.union(generation.sampling.stop_token_ids)
    return GuardedConstraint(generation.constraint, generation.request_id, end_ids)


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """On the event loop's thread and for each of many samples: two passes in C cost a tenth of one in Python."""
    for extreme in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= extreme < vocab_size:
            raise InvalidRequestError(f"{name} has the token id {extreme}; ids are 0 to {vocab_size - 1}.", name)
