"""Decodes token ids to text as they are generated, and finds strings in streamed text.

Incomplete characters are held back until they are complete. Results do not depend on how the ids or the text are cut
into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlx_server.engine.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3
"""A UTF-8 character has at most four bytes, and some decoders show each byte of an incomplete character as one
U+FFFD."""

_NONE: frozenset[int] = frozenset()
_NUM_CONTEXT = 4
_MAX_WINDOW = 16


class IncrementalDetokenizer:
    """Decodes one request's output piece by piece. The pieces together equal `Tokenizer.decode`.

    A piece ends at a complete character. The first bytes of an incomplete character are held back, and become U+FFFD
    once they cannot be completed. Takes amortised constant time a token.

    `kept_token_ids` are special tokens that stay in the text even if special tokens are skipped (markers of tool calls
    or reasoning, which a parser removes later). With `continues_text` the output continues a text, so its leading space
    is kept even where decoding the output alone would strip it.
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
        if kept_token_ids:  # else all requests share one set, which stays in the CPU cache
            self._skipped = self._skipped.difference(kept_token_ids)
        self._bytes = tokenizer.exact_bytes
        self._window = _Window(tokenizer)
        self._rest = b""  # bytes of an incomplete character
        self._strips_space = self._bytes is not None and self._bytes.strips_leading_space and not continues_text

    def append(self, token_ids: Sequence[int], *, is_final: bool = False) -> str:
        """Appends token ids, and returns the text that is complete now."""
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
        """Returns the rest of the text after the last id. Incomplete characters become U+FFFD."""
        return self.append((), is_final=True) if self._bytes is not None else self._window.finish()


class _Window:
    """For decoders that do more than join bytes: decodes a short window of recent tokens again for each token.

    The new text is that after the first `_num_shown` characters of the window. Up to three replacement characters at
    its end are held back, since later tokens may turn them into one character.
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
    """`text` cannot be part of a later match. `rest` is the unread text after the match."""

    text: str
    matched: str | None = None
    rest: str = ""


class StringScanner:
    """Finds the first of several strings in streamed text, and holds back text that may be the start of a match.

    The match that ends first wins; of matches with the same end, the longest. So the result does not depend on how the
    text is cut into pieces: with the targets `bc` and `abcd`, `xabcd` always matches `bc`, whether it comes whole or
    letter by letter.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(targets)
        self._first_characters = {target[0] for target in targets}
        self._max_held = max(map(len, targets), default=1) - 1
        self._held = ""

    def scan(self, text: str) -> Scan:
        """Reads `text` up to the first match. To continue after the match, call `scan` with its `rest`."""
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
        """Returns the text that was held back. Call it at the end of the stream, or to stop scanning."""
        held, self._held = self._held, ""
        return held

    def finish(self) -> str:
        """`flush` at the end of an output, without the beginning of a target of several tokens that was cut off."""
        return without_cut_marker(self.flush())

    def _first_beginning(self, text: str) -> int:
        """The lowest index from which the rest of `text` is the beginning of a target; else the length of `text`."""
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(target.startswith(end) for target in self._targets):
                    return start
        return len(text)


def without_cut_marker(held: str) -> str:
    """`held`, the beginning of a marker at the end of an output; nothing if it has a whole token (`<|open|>think`),
    which cannot be text."""
    return "" if ">" in held else held
