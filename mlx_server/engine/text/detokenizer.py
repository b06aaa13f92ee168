"""Token ids to text while they come: no half character is ever shown, and nothing is decoded twice.

Finding strings in a stream whose pieces may be cut anywhere. Knows text only, neither tokens nor requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3
"""A UTF-8 character has at most four bytes, and some decoders show each unfinished byte as one U+FFFD."""

_NUM_CONTEXT = 4
_MAX_WINDOW = 16


class IncrementalDetokenizer:
    """The text of one request's output, piece by piece; the pieces together equal `Tokenizer.decode`.

    A piece ends at a whole character: the first bytes of a longer one wait for the rest, and come out as U+FFFD
    once they cannot be completed. Constant time a token, amortised.

    `kept_token_ids` are special tokens that stay visible although special tokens are skipped (markers of tool
    calls or reasoning, which a parser downstream takes out). `continues_text` says that the output goes on in the
    middle of a text, so that a leading space is part of it even where decoding alone would strip it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        kept_token_ids: Collection[int] = (),
        continues_text: bool = False,
    ) -> None:
        self._skipped = tokenizer.special_token_ids - frozenset(kept_token_ids) if skip_special_tokens else frozenset()
        self._stream = _ByteStream(tokenizer, continues_text) if tokenizer.has_exact_bytes else _WindowStream(tokenizer)

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that has become whole."""
        return "".join([self._stream.step(token_id) for token_id in token_ids if token_id not in self._skipped])

    def finish(self) -> str:
        """The rest, once no ids follow: bytes still waiting come out as U+FFFD."""
        return self._stream.finish()


class _ByteStream:
    """Joins the tokens' bytes and decodes them as they come."""

    def __init__(self, tokenizer: Tokenizer, continues_text: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space and not continues_text

    def step(self, token_id: int) -> str:
        return self._strip(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For decoders that are more than joined bytes: decodes a short window of recent tokens again at each step.

    What is new is the text of the window behind its first `_num_shown` characters. Replacement characters at its
    end may still become one character, so up to three of them wait.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        num_final = _num_final_characters(text)
        new = text[self._num_shown : num_final]
        self._num_shown = max(self._num_shown, num_final)
        if num_final == len(text) or len(self._ids) >= _MAX_WINDOW:
            self._move_on()
        return new

    def finish(self) -> str:
        rest = self._decode()[self._num_shown :]
        self._ids.clear()
        self._num_shown = 0
        return rest

    def _move_on(self) -> None:
        self._ids = self._ids[-_NUM_CONTEXT:]
        self._num_shown = _num_final_characters(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


def _num_final_characters(text: str) -> int:
    num_replaced = len(text) - len(text.rstrip("\ufffd"))
    return len(text) - min(num_replaced, _MAX_UNFINISHED_BYTES)


class PrefixCursor:
    """How much of the start of `target` stands at the end of what was read, in amortised constant time an item.

    The failure function of Knuth, Morris and Pratt (1977). Works on any sequence: characters of a string, bytes, or
    token ids.
    """

    __slots__ = ("_failure", "_target", "num_matched")

    def __init__(self, target: Sequence[Any]) -> None:
        assert len(target) > 0, "an empty target stands everywhere"
        self._target = target
        self._failure = _failure_function(target)
        self.num_matched = 0

    def step(self, item: Any) -> bool:
        """Reads one item; True when the whole target has just been read."""
        matched = self.num_matched
        if matched == len(self._target):
            matched = self._failure[matched - 1]
        while matched and self._target[matched] != item:
            matched = self._failure[matched - 1]
        if self._target[matched] == item:
            matched += 1
        self.num_matched = matched
        return matched == len(self._target)

    def reset(self) -> None:
        self.num_matched = 0


def _failure_function(target: Sequence[Any]) -> list[int]:
    """For each prefix of `target`, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(target)
    matched = 0
    for index in range(1, len(target)):
        while matched and target[matched] != target[index]:
            matched = failure[matched - 1]
        if target[matched] == target[index]:
            matched += 1
        failure[index] = matched
    return failure


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` cannot be part of a later match. `rest` follows the match and has not been read yet."""

    text: str
    matched: str | None = None
    rest: str = ""


class StringScanner:
    """Finds the first of several strings in streamed text, and holds back what could still become one.

    The match that ends first wins; of those that end together, the longest. So the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        # Longest first: the first cursor that completes at a character is then the winner of the tie.
        ordered = sorted(set(targets), key=len, reverse=True)
        self._cursors = [(target, PrefixCursor(target)) for target in ordered]
        self._first_characters = {target[0] for target in ordered}
        self._held = ""

    def scan(self, text: str) -> Scan:
        """Reads `text` up to the first match. Call again with `rest` to go on behind it."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Scan(text)
        start = len(self._held)
        buffer = self._held + text
        for index in range(start, len(buffer)):
            matched = self._step(buffer[index])
            if matched is not None:
                self._reset()
                end = index + 1
                return Scan(buffer[: end - len(matched)], matched, buffer[end:])
        num_held = max(cursor.num_matched for _, cursor in self._cursors)
        self._held = buffer[len(buffer) - num_held :]
        return Scan(buffer[: len(buffer) - num_held])

    def flush(self) -> str:
        """What was held back, at the end of the stream or when the caller stops looking."""
        held = self._held
        self._reset()
        return held

    def _step(self, character: str) -> str | None:
        winner = None
        for target, cursor in self._cursors:
            if cursor.step(character) and winner is None:
                winner = target
        return winner

    def _reset(self) -> None:
        self._held = ""
        for _, cursor in self._cursors:
            cursor.reset()


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` is safe to emit. `matched` is the stop string that ended the output; nothing may follow it."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Ends a request's text at the first stop string, wherever tokens cut it.

    The stop string that ends first in the text wins; of those that end at the same character, the longest. It is
    part of the text only with `include_in_output`.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._scanner = StringScanner(stop)
        self._include_in_output = include_in_output
        self._is_stopped = False

    def append(self, text: str) -> StopResult:
        """Takes new text of the output. Not to be called again after a match."""
        assert not self._is_stopped, "text after a stop string belongs to nobody"
        scan = self._scanner.scan(text)
        if scan.matched is None:
            return StopResult(scan.text)
        self._is_stopped = True
        return StopResult(scan.text + scan.matched if self._include_in_output else scan.text, scan.matched)

    def flush(self) -> str:
        """The held-back text, once the output has ended for another reason. Empty after a match."""
        return self._scanner.flush()
