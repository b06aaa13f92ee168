"""Drafts by lookup: the tokens that followed the last tokens when these occurred before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from mlx_server.request import Request

_SHORTEST_MATCH = 3
_LONGEST_MATCH = 8
_ID_BITS = 21
"""Three ids below two million fit one 64-bit key."""

_KEY_MASK = (1 << 3 * _ID_BITS) - 1

_MAX_SHARED_TOKENS = 16_384
_MAX_SHARED_HISTORIES = 64
"""Bounds on the memory of earlier outputs: 12 bytes a token, so at most 13 MB a model."""

_BREAK = (1 << _ID_BITS) - 1
"""Separates two outputs in a shared history; no token has this id."""


class History:
    """A growing list of tokens that can be searched for what followed the end of this list or of another.

    The key at index i is made of the three tokens that end there. A search compares all keys at once, which takes 50
    microseconds for 100,000 tokens, and follows only those that are equal. So no index has to be built for a prompt
    that is never repeated.
    """

    def __init__(self, most: int | None = None) -> None:
        """With `most`, a list that grows beyond it is cut to its last `most // 2` tokens."""
        self._most = most
        self._clear()

    def _clear(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(256, np.int32)
        self._keys: npt.NDArray[np.int64] = np.empty(256, np.int64)
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        first, end = self.num_tokens, self.num_tokens + len(token_ids)
        if first == end:
            return
        if end > len(self._tokens):
            size = max(end, 2 * len(self._tokens))
            self._tokens, self._keys = np.resize(self._tokens, size), np.resize(self._keys, size)
        self._tokens[first:end] = token_ids
        if end - first == 1 and first >= _SHORTEST_MATCH:  # each decode step; else takes six times as long
            self._keys[first] = (int(self._keys[first - 1]) << _ID_BITS | token_ids[0]) & _KEY_MASK
        else:
            self._keys[first:end] = _BREAK  # the first two tokens have no key
            start = max(first, _SHORTEST_MATCH - 1)
            wide = self._tokens[start - 2 : end].astype(np.int64)
            self._keys[start:end] = (wide[:-2] << 2 * _ID_BITS) | (wide[1:-1] << _ID_BITS) | wide[2:]
        self.num_tokens = end
        if self._most is not None and end > self._most:
            kept = self._tokens[end - self._most // 2 : end].tolist()
            self._clear()
            self.extend(kept)

    def tail(self) -> list[int]:
        """The last tokens, for `find`."""
        tail: list[int] = self._tokens[max(0, self.num_tokens - _LONGEST_MATCH) : self.num_tokens].tolist()
        return tail

    def find(self, tail: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the latest of the longest matches of the end of `tail`, three to eight
        tokens.

        In `a b c d, x b c d, a b c`, the tail `a b c` matches the tokens before the first `d`, so `d, x b c ...` is
        found.
        """
        if len(tail) < _SHORTEST_MATCH:
            return []
        a, b, c = tail[-3:]
        # The last key has nothing after it.
        key = (a << 2 * _ID_BITS) | (b << _ID_BITS) | c
        (ends,) = (self._keys[: max(0, self.num_tokens - 1)] == key).nonzero()
        if not ends.size:
            return []
        for depth in range(_SHORTEST_MATCH + 1, min(_LONGEST_MATCH, len(tail)) + 1):
            longer = ends[ends >= depth - 1]
            longer = longer[self._tokens[longer - depth + 1] == tail[-depth]]
            if not longer.size:
                break
            ends = longer
        first = int(ends[-1]) + 1
        found: list[int] = self._tokens[first : min(first + most, self.num_tokens)].tolist()
        return found[: found.index(_BREAK)] if _BREAK in found else found


class NgramDrafter:
    """Drafts what followed the last tokens when they occurred before: in the output that the client predicts, in the
    request's own prompt and output, otherwise in recent outputs of its tenant.

    Prompt lookup decoding (Saxena 2023), with SuffixDecoding's memory over requests (Oliaro et al. 2024) reduced to a
    flat list. Requests share outputs only if they may share cached prefixes: with equal `extra_keys` and adapter.
    """

    def __init__(self) -> None:
        self._own: dict[str, History] = {}
        self._predicted: dict[str, History] = {}
        self._predictions: WeakValueDictionary[tuple[int, ...], History] = WeakValueDictionary()
        self._shared: OrderedDict[Hashable, History] = OrderedDict()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        own = self._own.get(request.request_id)
        if own is None:
            own = self._own[request.request_id] = History()
            if request.prediction_token_ids:
                self._predicted[request.request_id] = self._prediction(request)
        own.extend(request.token_ids(own.num_tokens, request.num_tokens))
        tail = own.tail()
        found = list[int]()
        if (prediction := self._predicted.get(request.request_id)) is not None:
            found = prediction.find(tail, most)
        found = found or own.find(tail, most)
        if not found and (shared := self._shared.get(_tenant(request))) is not None:
            found = shared.find(tail, most)
        return found

    def _prediction(self, request: Request) -> History:
        """The history of a predicted output, shared by all samples of a prompt. It begins with the prompt's end, so
        that the first output token can already be drafted."""
        token_ids = (*request.prompt_token_ids[-_LONGEST_MATCH:], *request.prediction_token_ids)
        found = self._predictions.get(token_ids)
        if found is None:
            found = self._predictions[token_ids] = History()
            found.extend(token_ids)
        return found

    def forget(self, request: Request) -> None:
        """The request has ended. The end of its output may help other requests of its tenant."""
        self._predicted.pop(request.request_id, None)
        if self._own.pop(request.request_id, None) is None or not request.output_token_ids:
            return
        tenant = _tenant(request)
        shared = self._shared.setdefault(tenant, History(_MAX_SHARED_TOKENS))
        shared.extend([*request.output_token_ids[-_MAX_SHARED_TOKENS // 2 :], _BREAK])
        self._shared.move_to_end(tenant)
        if len(self._shared) > _MAX_SHARED_HISTORIES:
            self._shared.popitem(last=False)


def _tenant(request: Request) -> Hashable:
    return request.extra_keys, request.adapter_key or request.adapter
