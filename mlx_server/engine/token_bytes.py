"""The bytes behind each token, for tokenizers whose decoder only joins bytes (nearly all that generate text).

Two families exist. *Byte-level* BPE (GPT-2 and after) writes each byte as one printable character. *Byte-fallback*
vocabularies (SentencePiece) hold plain text with U+2581 for a space, and `<0xE4>` for a byte that no piece covers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


MAX_ID = 2**32 - 1
"""The largest that the tokenizers library reads; for anything beyond, it raises."""


class TokenBytes:
    """A lazily filled table from token id to bytes. Safe to use from any thread.

    `strips_leading_space`: the decoder takes one space off the beginning of a text.
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        strips_leading_space: bool,
    ) -> None:
        self.strips_leading_space = strips_leading_space
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id outside of the vocabulary (a padded row of the model's head)."""
        known = self._known.get(token_id)
        if known is None:
            token = self._id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
            known = b"" if token is None else self._to_bytes(token)
            if token is not None:
                self._known[token_id] = known
        return known


def token_bytes_of(backend: Any) -> TokenBytes | None:
    """The table of a `tokenizers.Tokenizer`; None when its decoder does more than join bytes."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return TokenBytes(backend.id_to_token, _byte_level_bytes, False)
        case ["Replace", "ByteFallback", "Fuse"] if _is_space_mark(steps[0]):
            return TokenBytes(backend.id_to_token, _byte_fallback_bytes, False)
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _is_space_mark(steps[0]) and _is_one_space(steps[3]):
            return TokenBytes(backend.id_to_token, _byte_fallback_bytes, True)
    return None


def _is_space_mark(replace: dict[str, Any]) -> bool:
    return bool(replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " ")


def _is_one_space(strip: dict[str, Any]) -> bool:
    return (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    piece = _BYTE_PIECE.fullmatch(token)
    if piece is not None:
        return bytes([int(piece.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode()
