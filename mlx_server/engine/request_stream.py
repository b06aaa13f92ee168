"""One request on its way in, checked against what the model can take, and its output on the way out: ids become text,
text stops where it must."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mlx_server.engine.grammar.constraints import GuardedConstraint
from mlx_server.engine.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ContextLengthError, InvalidRequestError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.outputs import CompletionDelta, RequestOutput, RequestTimings
from mlx_server.request import FinishReason, Priority, Request, TokenConstraint
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate, with one of the model's adapters or with none. `tier` None is that of the priority: high,
    normal or low. `extra_keys` separate the prefix cache (salt, tenant). It is answer `sample_index` of the
    `num_samples` that the client wants to the prompt. `kept_token_ids` are special tokens that stay in the text
    although special tokens are skipped. `continues_text` says that the output goes on in the middle of the prompt's
    text, so that its leading space counts."""

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
        self._matcher = StopStringMatcher(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, str | None]:
        """New text, and the stop string that ended it, if one did."""
        shown = token_ids[:-1] if finish_reason is FinishReason.STOP and self._is_hidden(token_ids[-1]) else token_ids
        if self._matcher is None:
            text = self._detokenizer.append(shown)
            return text if finish_reason is None else text + self._detokenizer.finish(), None
        # Stop strings count only after `min_tokens`, so text before that never reaches the matcher.
        num_exempt = min(max(self._sampling.min_tokens - self._num_tokens, 0), len(shown))
        self._num_tokens += len(token_ids)
        text = self._detokenizer.append(shown[:num_exempt])
        result = self._matcher.append(self._detokenizer.append(shown[num_exempt:]))
        text += result.text
        if finish_reason is None or result.matched is not None:
            return text, result.matched
        last = self._matcher.append(self._detokenizer.finish())
        return text + last.text + ("" if last.matched else self._matcher.flush()), last.matched

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token that ended the output is not part of its text."""
        if self._sampling.include_stop_str_in_output:
            return False
        is_eos = token_id in self._eos_token_ids and not self._sampling.ignore_eos
        return is_eos or token_id in self._sampling.stop_token_ids


class RequestStream:
    """Async iterator over one request's `CompletionDelta`s; the one with `finish_reason` is the last.

    Event-loop thread only. Raises the `ServeError` that ended the request, if one did. A stream that is no
    longer wanted must be aborted or closed: leaving the iteration does not do it. Once `is_complete`, nothing more
    will be put on it, and `summary` is there.
    """

    def __init__(self, request: Request, text: OutputText | None, end: Callable[[str, FinishReason], bool]) -> None:
        """`text` None gives deltas without text. `end` ends the request in the scheduler."""
        self.request = request
        self._text = text
        self._end = end
        self._deltas: deque[CompletionDelta] = deque()
        self._error: ServeError | None = None
        self.is_complete = False
        self._news = asyncio.Event()
        self.summary: RequestSummary | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    @property
    def has_output(self) -> bool:
        """Whether a delta can be read without waiting."""
        return bool(self._deltas)

    async def wait_for_output(self) -> None:
        """Waits for the first delta, which stays to be iterated over. Raises the `ServeError` of a request that ended
        without one."""
        while not self._deltas and not self.is_complete:
            self._news.clear()
            await self._news.wait()
        if not self._deltas and self._error is not None:
            raise self._error

    def abort(self, error: ServeError | None = None) -> None:
        """Ends the request, with an error if one is given; its blocks are back within one step. Does nothing if it has
        ended."""
        if self.is_complete:
            return
        self._end(self.request_id, FinishReason.ABORT if error is None else FinishReason.ERROR)
        if error is None:
            self._append(CompletionDelta("", (), FinishReason.ABORT))
        else:
            self.fail(error)

    async def aclose(self) -> None:
        """Aborts the request if it is unfinished."""
        self.abort()

    def put(self, output: RequestOutput, now: float) -> None:
        """Takes a step's news of the request, at `now` on the scheduler's clock."""
        if self.is_complete:
            return
        if output.error is not None:
            self.fail(output.error)
            return
        request = self.request
        if request.first_token_s is None:
            request.first_token_s = now
        finish_reason, stop_reason, text = output.finish_reason, output.stop_reason, ""
        if self._text is not None:
            text, matched = self._text.append(output.new_token_ids, finish_reason)
            if matched is not None:
                self._end(self.request_id, FinishReason.STOP)
                finish_reason, stop_reason = FinishReason.STOP, matched
        timings = None
        if finish_reason is not None:
            timings = RequestTimings(request.arrival_s, request.first_scheduled_s, request.first_token_s, now)
        self._append(
            CompletionDelta(
                text,
                output.new_token_ids,
                finish_reason,
                stop_reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_output_tokens=len(request.output_token_ids),
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
                timings=timings,
            )
        )

    def fail(self, error: ServeError) -> None:
        """Ends the stream with an error; deltas that are there can still be read."""
        self._error = error
        self.is_complete = True
        self._news.set()

    def _append(self, delta: CompletionDelta) -> None:
        self._deltas.append(delta)
        self.is_complete = delta.finish_reason is not None
        self._news.set()


def make_request(
    generation: GenerationRequest,
    *,
    arrival_s: float,
    model_name: str,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> Request:
    """The scheduler's request. `max_model_len` bounds prompt and output together, in tokens; `vocab_size` every token
    id. Raises `InvalidRequestError` or `ContextLengthError` with value, limit and remedy. More `max_tokens` than the
    context has left, however many, are cut to that: agents ask for what hosted models allow."""
    prompt, sampling = generation.prompt_token_ids, generation.sampling
    limit, num_prompt = max_model_len, len(prompt)
    if num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", "prompt")
    if num_prompt >= limit:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens; the context of {model_name} is {limit} tokens, and at least "
            "one must be left for the answer. Shorten the prompt.",
            "input_tokens",
        )
    max_tokens = limit if sampling.max_tokens is None else sampling.max_tokens
    allowed = sampling.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed)} ids; the vocabulary has {vocab_size}.", "allowed_token_ids"
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", allowed, vocab_size)
    return Request(
        generation.request_id,
        list(prompt),
        sampling,
        arrival_s=arrival_s,
        max_total_tokens=min(num_prompt + max_tokens, limit),
        priority=generation.priority,
        eos_token_ids=eos_token_ids,
        extra_keys=generation.extra_keys,
        adapter=generation.adapter,
        tier=generation.tier or generation.priority.name.lower(),
        constraint=_guarded(generation, eos_token_ids),
    )


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
