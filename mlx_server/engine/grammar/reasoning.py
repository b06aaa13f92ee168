"""Constraints on an output that may begin with reasoning: what comes before the answer is free, but bounded."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from mlx_server.engine.text.reasoning import ReasoningMarkers
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.request import TokenConstraint


class _Phase(enum.Enum):
    """BEGINNING -> REASONING -> AFTER -> ANSWER, or from BEGINNING to ANSWER at once."""

    BEGINNING = "beginning"
    REASONING = "reasoning"
    AFTER = "after"
    ANSWER = "answer"


class ReasoningConstraint:
    """Lets reasoning through as it is, and holds the answer behind it to `answer` (`request.TokenConstraint`).

    The reasoning ends with its end marker, or when it has `max_tokens` tokens: the marker is then forced. Behind it
    the line breaks that models are used to write there are allowed once. Without `is_open`, an output that does
    not begin with the start marker is all answer. `answer` None leaves the answer free; `is_answer_opened` says that
    it begins with its own marker, which is then not forced.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: ReasoningMarkers,
        vocab_size: int,
        *,
        is_open: bool,
        answer: TokenConstraint | None = None,
        is_answer_opened: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        """`vocab_size` is that of `answer`'s masks."""
        self._token_bytes = tokenizer.token_bytes
        self._num_mask_bytes = (vocab_size + 31) // 32 * 4
        self._answer = answer
        self._max_tokens = max_tokens
        self._start_ids = tokenizer.encode(markers.start, add_special_tokens=False)
        self._end_ids = tokenizer.encode(markers.end, add_special_tokens=False)
        self._has_answer_start = bool(markers.answer_start)
        answer_start = "" if is_answer_opened or answer is None else markers.answer_start
        self._answer_start_ids = tokenizer.encode(answer_start, add_special_tokens=False)
        self._break_ids = _line_breaks(tokenizer)
        self._end = markers.end.encode()
        self._last_bytes = b""  # of the reasoning, in which the end marker may have begun
        self._phase = _Phase.REASONING if is_open else _Phase.BEGINNING
        self._num_reasoning = 0
        self._pending: list[int] = []  # while a marker is being written out, the only tokens that may follow
        if answer is not None and not is_open and self._has_answer_start:
            # An answer needs its own marker, so that it cannot be told from reasoning by the first token.
            self._phase, self._pending = _Phase.REASONING, list(self._start_ids)
        self._spend_budget()

    @property
    def is_reasoning(self) -> bool:
        """Whether the output so far ends inside the reasoning."""
        return self._phase is _Phase.REASONING

    def accept(self, token_id: int) -> bool:
        """Advances by one token; False, and nothing done, when it is not allowed."""
        if self._pending and token_id != self._pending[0]:
            return False
        is_marker = bool(self._pending)
        self._pending = self._pending[1:]
        match self._phase:
            case _Phase.BEGINNING if token_id == self._start_ids[0]:
                self._phase, self._pending = _Phase.REASONING, self._start_ids[1:]
            case _Phase.REASONING:
                self._reason(token_id, is_marker)
            case _Phase.AFTER if token_id in self._break_ids:
                self._phase = _Phase.ANSWER
            case _ if not is_marker:
                if self._answer is not None and not self._answer.accept(token_id):
                    return False
                self._phase = _Phase.ANSWER
        self._spend_budget()
        return True

    def forced_tokens(self) -> list[int]:
        """Tokens that are the only continuation, already accepted."""
        forced: list[int] = []
        while self._pending:
            token_id = self._pending[0]
            self.accept(token_id)
            forced.append(token_id)
        if self._phase is _Phase.ANSWER and self._answer is not None:
            forced += self._answer.forced_tokens()
        return forced

    def bitmask(self) -> bytes | None:
        """The allowed next tokens; None for all of them."""
        if self._pending:
            return _with_tokens(bytes(self._num_mask_bytes), self._pending[:1])
        if self._phase is _Phase.REASONING or self._answer is None:
            return None
        mask = self._answer.bitmask()
        if mask is None or self._phase is _Phase.ANSWER:
            return mask
        return _with_tokens(mask, self._start_ids[:1] if self._phase is _Phase.BEGINNING else self._break_ids)

    def is_terminated(self) -> bool:
        """Whether the answer is complete."""
        return self._phase is _Phase.ANSWER and self._answer is not None and self._answer.is_terminated()

    @property
    def error(self) -> str | None:
        """Why the answer's grammar was given up, if it was."""
        return None if self._answer is None else self._answer.error

    def _reason(self, token_id: int, is_marker: bool) -> None:
        self._num_reasoning += not is_marker
        # By bytes rather than ids: text can be cut into tokens in more ways than one.
        written = self._last_bytes + self._token_bytes(token_id)
        self._last_bytes = written[-len(self._end) :]
        if self._end in written:
            self._pending = list(self._answer_start_ids)
            self._phase = _Phase.ANSWER if self._has_answer_start else _Phase.AFTER

    def _spend_budget(self) -> None:
        is_spent = self._max_tokens is not None and self._num_reasoning >= self._max_tokens
        if is_spent and self._phase is _Phase.REASONING and not self._pending:
            self._pending = list(self._end_ids)


def _line_breaks(tokenizer: Tokenizer) -> frozenset[int]:
    """Single tokens for one or two line breaks."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")]
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)


def _with_tokens(mask: bytes, token_ids: Iterable[int]) -> bytes:
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)
