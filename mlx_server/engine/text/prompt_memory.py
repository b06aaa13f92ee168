"""Prompts that begin like earlier ones are not tokenized anew: each turn of a chat repeats all turns before it, and
routers ask several servers for the tokens of each request.

A text may be cut behind a special token, since tokenizers split at those first and encode what lies between by itself.
So the ids up to the last special token are remembered by what the text up to there is, and only the rest is encoded:

    turn 1   <|user|>Hi<|end|><|assistant|>                                remembered up to <|assistant|>
    turn 2   <|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>So?<|end|><|assistant|>
             |------------ found ----------|----------- encoded -------------|

The rest is encoded with the special token in front of it, whose id is dropped: some tokenizers treat a text's first
words differently.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from mlx_server.engine.text.tokenizer import LONE_SURROGATE, Tokenizer

MAX_IDS = 4_000_000
"""Remembered by a model, at 4 bytes each."""

_LEAST_CHARS = 500
"""Shorter texts are encoded as fast as they are looked up."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Behind a special token at [start, end); `digest` is that of the owner and all of the text before."""

    start: int
    end: int
    digest: bytes


class PromptMemory:
    """What one tokenizer's prompts have been encoded to. Any thread, several at once.

    What is remembered for one `owner` is not found for another: how fast a text is encoded would tell what others sent.
    """

    def __init__(self, tokenizer: Tokenizer, max_ids: int = MAX_IDS) -> None:
        self._tokenizer = tokenizer
        self._max_ids = max_ids
        self._boundaries, self._pattern = _boundaries(tokenizer)
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()  # the longest unused first
        self._num_ids = 0
        self._lock = threading.Lock()

    def encode(self, text: str, owner: str = "") -> list[int]:
        """The same as the tokenizer's `encode` without what it puts around a text."""
        if self._pattern is None or len(text) < _LEAST_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False)
        text = LONE_SURROGATE.sub("\ufffd", text)
        cuts = self._cuts(text, owner)
        cut, ids = self._find(cuts)
        if cuts and cut is not cuts[-1]:
            ids = ids + array("I", self._rest(text[: cuts[-1].end], cut))
            cut = cuts[-1]
            self._remember(cut.digest, ids)
        return [*ids, *self._rest(text, cut)]

    def _cuts(self, text: str, owner: str) -> list[_Cut]:
        assert self._pattern is not None
        digest = blake2b(owner.encode() + b"\0", digest_size=16)
        cuts, before = [], 0
        for match in self._pattern.finditer(text):
            if match[0] in self._boundaries:
                digest.update(text[before : match.end()].encode())
                before = match.end()
                cuts.append(_Cut(match.start(), before, digest.digest()))
        return cuts

    def _find(self, cuts: list[_Cut]) -> tuple[_Cut | None, array[int]]:
        """The last cut up to which the ids are known, and these."""
        with self._lock:
            for cut in reversed(cuts):
                found = self._known.get(cut.digest)
                if found is not None:
                    self._known.move_to_end(cut.digest)
                    return cut, found
        return None, array("I")

    def _remember(self, digest: bytes, ids: array[int]) -> None:
        with self._lock:
            known = self._known.pop(digest, None)
            self._known[digest] = ids
            self._num_ids += len(ids) - (0 if known is None else len(known))
            while self._num_ids > self._max_ids:
                self._num_ids -= len(self._known.popitem(last=False)[1])

    def _rest(self, text: str, cut: _Cut | None) -> list[int]:
        """The ids behind a cut."""
        ids = self._tokenizer.encode(text if cut is None else text[cut.start :], add_special_tokens=False)
        return ids if cut is None else ids[1:]


def _boundaries(tokenizer: Tokenizer) -> tuple[set[str], re.Pattern[str] | None]:
    """The tokens behind which a text may be cut, and what finds all that are matched in plain text as
    tokenizers do it: the leftmost, then the longest. None for tokenizers of which that is not known."""
    plain = {token.content: (token_id, token) for token_id, token in tokenizer.backend_added_tokens().items()}
    plain = {content: found for content, found in plain.items() if not found[1].normalized}
    fit = {
        content
        for content, (token_id, token) in plain.items()
        if token.special
        and not (token.lstrip or token.rstrip or token.single_word)
        and tokenizer.encode(content, add_special_tokens=False) == [token_id]
    }
    if not fit:
        return fit, None
    return fit, re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))))
