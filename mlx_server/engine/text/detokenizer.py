"""Token ids to text while they come, and strings found in that text, wherever its pieces are cut.

No half character is ever shown, and nothing is decoded twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlx_server.engine.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3
"""A UTF-8 character has at most four bytes, and some decoders show each unfinished byte as one U+FFFD."""

_NONE: frozenset[int] = frozenset()
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

    __slots__ = ("_bytes", "_rest", "_skipped", "_strips_space", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        kept_token_ids: Collection[int] = (),
        continues_text: bool = False,
    ) -> None:
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else _NONE
        if kept_token_ids:  # else one object for all requests, which stays in the processor's cache
            self._skipped = self._skipped.difference(kept_token_ids)
        self._bytes = tokenizer.exact_bytes
        self._window = _Window(tokenizer)
        self._rest = b""  # of a character that is not whole yet
        self._strips_space = self._bytes is not None and self._bytes.strips_leading_space and not continues_text

    def append(self, token_ids: Sequence[int], *, is_final: bool = False) -> str:
        """Takes the next ids and returns the text that has become whole."""
        if not self._skipped.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._skipped]
        if self._bytes is None:
            return self._window.append(token_ids)
        if len(token_ids) == 1:
            read = self._bytes[token_ids[0]]
        else:
            read = b"".join([self._bytes[token_id] for token_id in token_ids])
        if self._rest:
            read = self._rest + read
        text, num_read = codecs.utf_8_decode(read, "replace", is_final)
        self._rest = read[num_read:]
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The rest, once no ids follow: bytes still waiting come out as U+FFFD."""
        return self.append((), is_final=True) if self._bytes is not None else self._window.finish()


class _Window:
    """For decoders that are more than joined bytes: decodes a short window of recent tokens again at each step.

    What is new is the text of the window behind its first `_num_shown` characters. Replacement characters at its
    end may still become one character, so up to three of them wait.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        num_final = _num_final_characters(text)
        new = text[self._num_shown : num_final]
        self._num_shown = max(self._num_shown, num_final)
        if num_final == len(text) or len(self._ids) >= _MAX_WINDOW:
            self._move_on()
        return new

    def finish(self) -> str:
        return self._decode()[self._num_shown :]

    def _move_on(self) -> None:
        self._ids = self._ids[-_NUM_CONTEXT:]
        self._num_shown = _num_final_characters(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


def _num_final_characters(text: str) -> int:
    num_replaced = len(text) - len(text.rstrip("\ufffd"))
    return len(text) - min(num_replaced, _MAX_UNFINISHED_BYTES)


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` cannot be part of a later match. `rest` follows the match and has not been read yet."""

    text: str
    matched: str | None = None
    rest: str = ""


class StringScanner:
    """Finds the first of several strings in streamed text, and holds back what could still become one.

    The match that ends first wins; of those that end together, the longest. So the result does not depend on how
    the text was cut into pieces: of `bc` and `abcd`, `xabcd` has `bc`, whether it comes whole or letter by letter.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(targets)
        self._first_characters = {target[0] for target in targets}
        self._max_held = max(map(len, targets), default=1) - 1
        self._held = ""

    def scan(self, text: str) -> Scan:
        """Reads `text` up to the first match. Call again with `rest` to go on behind it."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Scan(text)
        text = self.flush() + text
        starts = [(text.find(target), target) for target in self._targets]
        ends = [(start + len(target), -len(target), target) for start, target in starts if start >= 0]
        if ends:
            end, _, matched = min(ends)
            return Scan(text[: end - len(matched)], matched, text[end:])
        split = self._first_beginning(text)
        self._held = text[split:]
        return Scan(text[:split])

    def flush(self) -> str:
        """What was held back, at the end of the stream or when the caller stops looking."""
        held, self._held = self._held, ""
        return held

    def _first_beginning(self, text: str) -> int:
        """Where the first beginning of a target stands that `text` ends in."""
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(target.startswith(end) for target in self._targets):
                    return start
        return len(text)
