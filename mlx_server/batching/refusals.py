"""What the scheduler refuses: requests that exceed the queue's limits, and the errors of those that it ends later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.limits import QueueLimits, QueueLoad, SchedulerLimits
from mlx_server.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    ServeError,
)
from mlx_server.request import Request

_DISPLACED_RETRY_S = 5.0


def check_size(request: Request, blocks: PagedBlockManager, limits: SchedulerLimits) -> None:
    """Raises `ContextLengthError` for a request that cannot fit the pool even at its largest size, or that the queue
    could not take even if nothing waited."""
    if blocks.groups.num_needed(request.max_total_tokens) > blocks.max_blocks:
        raise ContextLengthError(
            f"The request may grow to {request.max_total_tokens} tokens, but the KV pool holds "
            f"{blocks.groups.max_tokens(blocks.max_blocks)}. "
            "Shorten the prompt, lower max_tokens, or raise --kv-cache-memory.",
        )
    for whose, queue in ((f" of tier {request.tier}", limits.tiers.get(request.tier)), ("", limits.queue)):
        if queue is not None and request.num_tokens > queue.max_queued_tokens:
            raise ContextLengthError(
                f"The prompt has {request.num_tokens} tokens, but all waiting prompts{whose} together may have "
                f"{queue.max_queued_tokens}. Shorten the prompt, or raise max_queued_tokens{whose}.",
                "input_tokens",
            )


def displacements(
    request: Request, waiting: Collection[Request], load: QueueLoad, of_tier: QueueLoad, limits: SchedulerLimits
) -> list[tuple[Request, ServeError]]:
    """Which of the `waiting` requests, in order of arrival, must go so that one more keeps all limits of the queue, and
    with which errors. `load` is that of the server, `of_tier` that of the request's tier. Raises as `displaced_by`
    does."""
    tier, limits_of_tier = request.tier, limits.tiers.get(request.tier)
    mates = [] if limits_of_tier is None else displaced_by(request, waiting, of_tier, limits_of_tier, tier)
    left = QueueLoad(load.num_waiting - len(mates), load.num_tokens - sum([other.num_tokens for other in mates]))
    rest = [other for other in waiting if other not in mates] if mates else waiting
    others = displaced_by(request, rest, left, limits.queue)
    errors = [(other, displacement(of_tier, other, request, tier)) for other in mates]
    return errors + [(other, displacement(load, other, request)) for other in others]


def displaced_by(
    request: Request, waiting: Collection[Request], load: QueueLoad, limits: QueueLimits, tier: str | None = None
) -> list[Request]:
    """Which of the `waiting` requests, in order of arrival, must go so that one more keeps the limits of a tier, or of
    the server without one. In the server's queue, those of worse tiers go first; then those of clients that have more
    waiting. Raises `QuotaExceededError` for a tier's limit, `QueueFullError` for the server's, if all of them would not
    be enough."""
    num_excess = load.num_waiting + 1 - limits.max_num_waiting
    num_excess_tokens = load.num_tokens + request.num_tokens - limits.max_queued_tokens
    size = _one if num_excess > 0 else _num_tokens
    if tier is None:
        worse = _of_worse_tiers(request, waiting)
        mates = (other for other in waiting if other.priority == request.priority)
    else:
        worse = iter(())
        mates = (other for other in waiting if other.tier == tier and other.priority >= request.priority)
    others = chain(worse, _of_fuller_clients(request, mates, size))
    displaced: list[Request] = []
    while num_excess > 0 or num_excess_tokens > 0:
        if (other := next(others, None)) is None:
            raise _full(request, load, limits, tier)
        displaced.append(other)
        num_excess, num_excess_tokens = num_excess - 1, num_excess_tokens - other.num_tokens
    return displaced


def _of_worse_tiers(request: Request, waiting: Iterable[Request]) -> Iterator[Request]:
    """The worst tier first, and of a tier the latest arrival first."""
    worse = [other for other in waiting if other.priority > request.priority]
    yield from sorted(worse, key=lambda other: (other.priority, other.arrival_s), reverse=True)


def _of_fuller_clients(request: Request, mates: Iterable[Request], size: Callable[[Request], int]) -> Iterator[Request]:
    """Of the `mates`, the latest of the client that has most, while that client keeps as much as the request's own
    client then has.

    Example: A has 9 requests waiting, B none. B's first four each take the place of one of A's, which then has 5. The
    fifth is refused, since it would leave A fewer than B.
    """
    by_client: defaultdict[str, list[Request]] = defaultdict(list)
    for other in mates:
        by_client[other.client].append(other)
    sizes = {client: sum(map(size, of_client)) for client, of_client in by_client.items()}
    own = sizes.pop(request.client, 0) + size(request)
    while sizes:
        client = max(sizes, key=sizes.__getitem__)
        last = by_client[client].pop()
        sizes[client] -= size(last)
        if sizes[client] < own:
            del sizes[client]
        else:
            yield last


def _one(request: Request) -> int:
    return 1


def _num_tokens(request: Request) -> int:
    return request.num_tokens


def _full(request: Request, load: QueueLoad, limits: QueueLimits, tier: str | None) -> ServeError:
    whose = f" of tier {tier}" if tier else ""
    if load.num_waiting >= limits.max_num_waiting:
        reason = "max_num_queued_reqs"
        message = f"Waiting requests{whose}: {load.num_waiting}; the limit is {limits.max_num_waiting}."
    else:
        reason = "max_num_queued_tokens"
        message = (
            f"Waiting prompt tokens{whose}: {load.num_tokens}; this request has {request.num_tokens}, and the limit is "
            f"{limits.max_queued_tokens}."
        )
    message += " Try again later."
    return QuotaExceededError(message) if tier else QueueFullError(message, reason)


def displacement(load: QueueLoad, displaced: Request, request: Request, tier: str | None = None) -> ServeError:
    """For a request that must leave the full queue of a tier, or of the server, for another one."""
    is_better = tier is None and request.priority < displaced.priority
    who = "a request of a better tier" if is_better else "one of a key that has fewer waiting"
    which = f"queue of tier {tier}" if tier else "queue"
    return QueueFullError(
        f"The {which} is full (waiting requests: {load.num_waiting}), and {who} has taken this one's place. "
        "Try again later.",
        "displaced",
        _DISPLACED_RETRY_S,
    )


def expiry(waited_s: float, timeout_s: float) -> ServeError:
    """For a request that has waited too long for its first step."""
    return QueueTimeoutError(
        f"The request waited {waited_s:g} s for its first step; the limit is {timeout_s:g} s "
        "(--queue-timeout-s). Try again when the server is less busy."
    )


def starvation(request: Request, most_tokens: int, waited_s: float) -> ServeError:
    """For a request that waited for memory although no other was running; the pool holds `most_tokens`."""
    return OverloadedError(
        f"There is no memory for the request's {request.num_tokens} tokens and the next: the KV pool holds "
        f"{most_tokens} and could not grow for {waited_s:g} s. Try again later, unload a model, or shorten the prompt."
    )


def unseen(error: str) -> ServeError:
    """For a request with an image that the vision encoder could not encode."""
    return ServeError(
        f"The model's vision encoder failed on an image of the request: {error}. The server and other requests go "
        "on. Send the image smaller or in another form, or without it; the server's log has the whole error."
    )


def grammar_error(request: Request, token_id: int) -> ServeError:
    """For a request whose grammar does not allow its next token. It is the request's own fault if the grammar is too
    complex, or if the request forbids all tokens that the grammar allows: a row without any allowed token gives token
    0."""
    sampling, num_tokens = request.sampling, len(request.output_token_ids) - 1
    given_up = None if request.constraint is None else request.constraint.error
    if given_up is not None:
        message = f"The grammar cannot be followed beyond {num_tokens} tokens of output: {given_up.message}."
        return InvalidRequestError(message, given_up.param)
    if sampling.allowed_token_ids is not None:
        return InvalidRequestError(
            f"The grammar allows none of allowed_token_ids after {num_tokens} tokens of output; add those that it "
            "needs, or leave the field out.",
            "allowed_token_ids",
        )
    if num_tokens < sampling.min_tokens:
        return InvalidRequestError(
            f"The grammar allows only stop tokens after {num_tokens} tokens of output; min_tokens is "
            f"{sampling.min_tokens}. Lower min_tokens, or leave it out.",
            "min_tokens",
        )
    return ServeError(f"Token {token_id} does not fit the request's grammar; the output would be invalid.")
