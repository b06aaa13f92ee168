"""`truncation: "auto"`: the oldest items of a chat that is too long are left out.

The requests of a conversation repeat its items, and add some. So that they begin alike, and find their prefix cached,
they leave out the same items until the context is full again. Nothing is kept for that: of the places to cut that leave
from half to all of the room in use, the one is taken whose number is divisible by the highest power of two.

    places    5 6 7 8 9 10    6 7 8 9 10 11    7 8 9 10 11 12 13    9 10 11 12 13 14    11 12 13 14 15 16
    taken           8             8              8                          12                         16
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import neg
from typing import Generic, TypeVar

from mlx_server.api.answers.chat_plan import ChatCall, Read
from mlx_server.api.answers.images import RequestImages
from mlx_server.api.openai.exchange import Exchange
from mlx_server.api.openai.responses.items import cut_points, weight
from mlx_server.api.openai.responses.reading import Parsed, Reading
from mlx_server.api.openai.responses.request import ResponsesRequest
from mlx_server.engine.vision.parts import ImageParts, TooManyImagesError
from mlx_server.errors import ContextLengthError, InvalidRequestError

T = TypeVar("T")

_USUAL_TOKENS = 0.25
"""Of a character."""

_SLACK = 1.25
"""The factor by which guesses may be off. It grows with each guess, so that few prompts are made for nothing."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """The items, the numbers of oldest ones that can be left out, ascending, and the weights of what then stays."""

    parsed: Parsed
    cuts: Sequence[int]
    weights: Sequence[int]

    @classmethod
    def of(cls, parsed: Parsed) -> _Chat:
        cuts = (0, *cut_points(parsed.items))
        weights = [*accumulate(map(weight, reversed(parsed.items)), initial=0)][::-1]
        return cls(parsed, cuts, [weights[cut] for cut in cuts])

    def likely(self, weight: float, slack: float, low: int, high: int) -> tuple[int, int]:
        """The places between `low` and `high` that may leave from half of `weight` to all of it, at a guess that is off
        by a factor of `slack`."""
        first, last = (bisect_left(self.weights, -most, key=neg) for most in (weight * slack, weight / 2 / slack))
        first = min(max(low, first), high)
        return first, min(max(first, last), high)


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    """What was made of a chat, and its tokens. The `error` is that it is far too long, or why it cannot be used: an
    image in it cannot be read."""

    value: T | None
    num_tokens: int
    error: InvalidRequestError | None = None

    def take(self) -> T:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


async def within_context(
    exchange: Exchange,
    body: ResponsesRequest,
    reading: Reading,
    make: Callable[[Read, RequestImages], Awaitable[T]],
    num_tokens: Callable[[T], int],
) -> T:
    """What `make` makes of the chat. With `truncation: "auto"`, it is without its oldest items if it is too long for
    the context that the caller may use; then an eighth of the context is free for the answer, or `max_output_tokens` if
    they are less. Raises what `make` raises, and `ContextLengthError` if what must stay is too long."""
    if body.truncation != "auto":
        return await make(reading.call, RequestImages())
    images = RequestImages(may_cut=True)
    limit = min(exchange.engine.max_model_len, exchange.caller.tier.max_context_tokens or sys.maxsize)
    room = limit - min(body.output_limit or limit, max(1, limit // 8))
    chat: _Chat | None = None

    async def attempt(place: int) -> _Made[T]:
        def read(parts: ImageParts | None) -> ChatCall:
            nonlocal chat
            chat = chat or _Chat.of(reading.parse(parts))
            return reading.write(chat.parsed, parts, chat.cuts[place])

        images.error = None
        try:
            value = await make(read, images)
        except (ContextLengthError, TooManyImagesError) as error:
            return _Made(None, sys.maxsize, error)
        return _Made(value, num_tokens(value), images.error)

    made = await attempt(0)
    if made.value is not None and made.num_tokens < limit:
        return made.take()
    assert chat is not None
    low, high = 1, len(chat.cuts) - 1
    place, last, best = 0, high, None
    tokens_a_char, slack = _USUAL_TOKENS, _SLACK
    while low <= high:
        if made.value is not None:
            tokens_a_char = made.num_tokens / max(1, chat.weights[place])
        place = _steadiest(*chat.likely(room / tokens_a_char, slack, low, high))
        made = await attempt(place)
        slack *= _SLACK
        if made.value is None or made.num_tokens > (room if place < last else limit - 1):
            low = place + 1
        elif 2 * made.num_tokens < room:
            high, best = place - 1, made
        else:
            return made.take()
    if best is not None:
        return best.take()
    raise made.error if isinstance(made.error, TooManyImagesError) else _too_long(made.num_tokens, limit, exchange)


def _steadiest(low: int, high: int) -> int:
    """The number from `low` (at least 1) to `high` that is divisible by the highest power of two."""
    num_free_bits = ((low - 1) ^ high).bit_length() - 1
    return high >> num_free_bits << num_free_bits


def _too_long(num_tokens: int, limit: int, exchange: Exchange) -> ContextLengthError:
    tier = exchange.caller.tier
    return ContextLengthError.of_prompt(
        f"at least {limit}" if num_tokens == sys.maxsize else str(num_tokens),
        limit,
        "truncation has left out all that it may: the newest item, the user's message before it, instructions and "
        "tools stay. Shorten these.",
        whose=f" for a key of the tier {tier.name}" if limit == tier.max_context_tokens else "",
    )
