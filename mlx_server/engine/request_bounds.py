"""What a model can take: every request is held against it before it may wait."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mlx_server.engine.guarded_constraint import GuardedConstraint
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.errors import ContextLengthError, InvalidRequestError
from mlx_server.request import Request, TokenConstraint


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """`max_model_len` bounds prompt and output together, in tokens; `vocab_size` every token id."""

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


def make_request(generation: GenerationRequest, bounds: RequestBounds, *, arrival_s: float) -> Request:
    """The scheduler's request. Raises `InvalidRequestError` or `ContextLengthError` with value, limit and remedy. More
    `max_tokens` than the context has left, however many, are cut to that: agents ask for what hosted models allow."""
    prompt, sampling = generation.prompt_token_ids, generation.sampling
    limit, num_prompt = bounds.max_model_len, len(prompt)
    if num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", "prompt")
    if num_prompt >= limit:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens; the context of {bounds.model_name} is {limit} tokens, and at least "
            "one must be left for the answer. Shorten the prompt.",
            "input_tokens",
        )
    max_tokens = limit if sampling.max_tokens is None else sampling.max_tokens
    allowed = sampling.allowed_token_ids or ()
    if len(allowed) > bounds.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed)} ids; the vocabulary has {bounds.vocab_size}.", "allowed_token_ids"
        )
    _check_ids("prompt", prompt, bounds.vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, bounds.vocab_size)
    _check_ids("allowed_token_ids", allowed, bounds.vocab_size)
    return Request(
        generation.request_id,
        prompt,
        sampling,
        arrival_s=arrival_s,
        max_total_tokens=min(num_prompt + max_tokens, limit),
        priority=generation.priority,
        eos_token_ids=bounds.eos_token_ids,
        extra_keys=generation.extra_keys,
        adapter=generation.adapter,
        tier=generation.tier or generation.priority.name.lower(),
        constraint=_guarded(generation, bounds.eos_token_ids),
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
