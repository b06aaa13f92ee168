"""A grammar whose failure is its own request's: it is consulted amid the steps of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import TypeVar

from mlx_server.request import TokenConstraint

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedConstraint:
    """`request.TokenConstraint` that raises nothing. Once `inner` has failed it accepts no token, and allows one only
    that is none of `end_ids`: the request ends with an error at its next token, and not as if it was finished."""

    def __init__(self, inner: TokenConstraint, request_id: str, end_ids: Collection[int]) -> None:
        self._inner = inner
        self._request_id = request_id
        self._end_ids = end_ids
        self._has_failed = False

    def accept(self, token_id: int) -> bool:
        return self._ask(lambda: self._inner.accept(token_id), bool)

    def forced_tokens(self) -> Sequence[int]:
        return self._ask(self._inner.forced_tokens, tuple)

    def bitmask(self) -> bytes | None:
        return self._ask(self._inner.bitmask, self._last_mask)

    def is_terminated(self) -> bool:
        return self._ask(self._inner.is_terminated, bool)

    @property
    def error(self) -> str | None:
        return self._ask(lambda: self._inner.error, lambda: None)

    def _ask(self, question: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self._has_failed:
            return otherwise()
        try:
            return question()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a native library's panic is no Exception
            self._has_failed = True
            logger.exception("The grammar of %s has failed", self._request_id)
            return otherwise()

    def _last_mask(self) -> bytes:
        token_id = next(token_id for token_id in count() if token_id not in self._end_ids)
        return bytes(token_id // 8) + bytes((1 << token_id % 8,))
