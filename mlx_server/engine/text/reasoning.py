"""The reasoning that a model writes between two markers before its answer: how to find and limit it.

A model's dialect is how it marks whatever is not part of its answer: reasoning and tool calls.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import FORMATS, JSON_TAGS, ToolParser
from mlx_server.errors import InvalidRequestError, ModelLoadError
from mlx_server.request import TokenConstraint
from mlx_server.runtime.models.tool_parsers import find_tool_parser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts that a model puts around its reasoning.

    `answer_start` must stand between the reasoning and an answer. `dropped` are texts of the format that are removed
    from the content, wherever they are.
    """

    start: str
    end: str
    answer_start: str = ""
    dropped: tuple[str, ...] = ()

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Whether the prompt has opened the reasoning, so that the output begins inside it.

        Chat templates open it at the very end of the prompt, or before `continued`: the text of a message that the
        client began and the model continues. That text may also open or end it.
        """
        begun = prompt.rstrip().removesuffix(continued.strip()).rstrip()
        is_open = begun.endswith(self.start.rstrip()) or continued.lstrip().startswith(self.start)
        return is_open and self.end not in continued

    def span(self, is_open: bool) -> ReasoningSpan:
        """Where the reasoning of an output is; `is_open`: the prompt has opened it."""
        if self is HARMONY:  # messages of several kinds may precede the answer; text without a header is one
            return ReasoningSpan("" if is_open else "<|", self.answer_start)
        return ReasoningSpan("" if is_open else self.start, self.end)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """An output's reasoning begins with `start` and ends with `end`."""

    start: str
    end: str


_MAX_SPACES = 16
"""So many may precede the reasoning. An output of nothing but line breaks must not be held back for ever."""


class ReasoningFollower:
    """Finds out which part of an output that comes in pieces is its reasoning, the line breaks behind it included."""

    __slots__ = ("_is_after", "_is_over", "_recent", "_span", "_start")

    def __init__(self, span: ReasoningSpan) -> None:
        self._span = span
        self._start = span.start  # empty once it has come
        self._recent = ""  # text in which a marker may have begun
        self._is_after = self._is_over = False

    def split(self, text: str) -> tuple[str, str]:
        """Takes new text: what is reasoning, and what follows that. Holds back what may be the first marker."""
        if self._is_over:
            return "", text
        if self._is_after:
            rest = text.lstrip("\n")
            self._is_over = bool(rest)
            return text[: len(text) - len(rest)], rest
        self._recent += text
        if self._start:
            begun = self._recent.lstrip()
            is_far = len(self._recent) - len(begun) > _MAX_SPACES
            if is_far or not begun.startswith(self._start):
                self._is_over = is_far or not self._start.startswith(begun)
                return "", self.flush() if self._is_over else ""
            self._start, text = "", self._recent
        before, end, rest = self._recent.partition(self._span.end)
        if not end:
            self._recent = before[1 - len(self._span.end) :]
            return text, ""
        self._is_after = True
        _, rest = self.split(rest)
        return text[: len(text) - len(rest)], rest

    def flush(self) -> str:
        """Returns the text that was held back. Call it at the end of the output."""
        held = self._recent if self._start else ""
        self._recent = self._recent[len(held) :]
        return held


_XTML = ReasoningMarkers(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    answer_start="<|open|>response<|sep|>",
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
HARMONY = ReasoningMarkers(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    answer_start="<|channel|>final<|message|>",
    dropped=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)
_COHERE = ReasoningMarkers(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_THINK = ReasoningMarkers("<think>", "</think>")
_KNOWN: tuple[tuple[ReasoningMarkers, tuple[str, ...]], ...] = (
    # The markers, and the vocabulary entries that identify such a model, if these are not the markers.
    (ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>"), ()),  # Apertus's, whose vocabulary has those below, too
    (_THINK, ()),
    (ReasoningMarkers("<think:opensource>", "</think:opensource>"), ()),  # Hy3's
    (ReasoningMarkers("<longcat_think>", "</longcat_think>"), ()),
    (ReasoningMarkers("<|think:start|>", "<|think:end|>"), ()),
    (ReasoningMarkers("<seed:think>", "</seed:think>"), ()),
    (ReasoningMarkers("<mm:think>", "</mm:think>"), ()),
    (ReasoningMarkers("[THINK]", "[/THINK]"), ()),
    (_COHERE, ()),
    (ReasoningMarkers("<|channel>thought", "<channel|>"), ("<|channel>", "<channel|>")),
    (_XTML, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    (HARMONY, ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")),
)


def find_reasoning_markers(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of this model, by its vocabulary or its chat template; None if it does not reason."""
    for markers, entries in _KNOWN:
        if all(tokenizer.token_to_id(entry) is not None for entry in entries or (markers.start, markers.end)):
            return markers
    template = tokenizer.hf.chat_template
    return _THINK if isinstance(template, str) and _THINK.start in template and _THINK.end in template else None


class _Phase(enum.Enum):
    """BEGINNING -> REASONING -> AFTER -> ANSWER, or BEGINNING -> ANSWER."""

    BEGINNING = "beginning"
    REASONING = "reasoning"
    AFTER = "after"
    ANSWER = "answer"


class ReasoningConstraint:
    """Leaves the reasoning free, and constrains only the answer after it by `answer` (a `request.TokenConstraint`). The
    output cannot end before the answer.

    The reasoning ends with its end marker, which is forced after `max_tokens` tokens. One line break or two may follow
    it, as models usually write. Without `is_open`, an output that does not begin with the start marker is only an
    answer. With `answer` None the answer is free. `is_answer_opened`: the grammar of `answer` has the marker before the
    answer, so it is not forced.
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
        # Tokens that would end the output in its reasoning; an end marker may have one itself.
        self._forbidden_ids = frozenset(() if answer is None else tokenizer.eos_token_ids).difference(self._end_ids)
        self._reasoning_mask = None if answer is None else self._all_but(self._forbidden_ids, vocab_size)
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
            # An answer begins with a marker, too, so the first token cannot tell it from reasoning.
            self._phase, self._pending = _Phase.REASONING, list(self._start_ids)
        self._spend_budget()

    @property
    def is_reasoning(self) -> bool:
        """Whether the output so far ends inside the reasoning."""
        return self._phase is _Phase.REASONING

    def accept(self, token_id: int) -> bool:
        """Advances by one token. Returns False, and changes nothing, if the token is not allowed."""
        if self._pending and token_id != self._pending[0]:
            return False
        if self.is_reasoning and not self._pending and token_id in self._forbidden_ids:
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

    def fork(self) -> ReasoningConstraint | None:
        other = copy(self)  # only the answer's cursor is ever changed in place
        if self._answer is not None:
            other._answer = self._answer.fork()
        return None if self._answer is not None and other._answer is None else other

    def forced_tokens(self) -> list[int]:
        """The tokens that are the only continuation. They are accepted already."""
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
            return self._reasoning_mask
        mask = self._answer.bitmask()
        if mask is None or self._phase is _Phase.ANSWER:
            return mask
        return _with_tokens(mask, self._start_ids[:1] if self._phase is _Phase.BEGINNING else self._break_ids)

    def is_terminated(self) -> bool:
        """Whether the answer is complete."""
        return self._phase is _Phase.ANSWER and self._answer is not None and self._answer.is_terminated()

    @property
    def error(self) -> InvalidRequestError | None:
        """Why the answer's grammar has failed, if it has."""
        return None if self._answer is None else self._answer.error

    def _all_but(self, token_ids: Iterable[int], vocab_size: int) -> bytes:
        bits = (1 << vocab_size) - 1
        for token_id in token_ids:
            bits &= ~(1 << token_id)
        return bits.to_bytes(self._num_mask_bytes, "little")

    def _reason(self, token_id: int, is_marker: bool) -> None:
        self._num_reasoning += not is_marker
        # Compare bytes, not ids: a text can be tokenized in more than one way.
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
    """The single tokens for one line break and for two."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")]
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)


def _with_tokens(mask: bytes, token_ids: Iterable[int]) -> bytes:
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)


@dataclass(frozen=True, slots=True)
class Dialect:
    """`reasoning` is None for models that do not reason. `tool_parser` reads JSON between tags for models without a
    format of their own, since their prompt asks for it."""

    reasoning: ReasoningMarkers | None
    tool_parser: ToolParser

    def kept_token_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> frozenset[int]:
        """The special tokens in the markers. They must stay in the text so that it can be split."""
        markers: list[str] = []
        if with_tools:
            form = FORMATS.get(self.tool_parser.name)
            markers += [self.tool_parser.start, self.tool_parser.end, *(form.special if form is not None else ())]
        if self.reasoning is not None:
            markers += [self.reasoning.start, self.reasoning.end, *self.reasoning.dropped]
        return frozenset(
            token_id
            for token, token_id in tokenizer.added_tokens.items()
            if token_id in tokenizer.special_token_ids and any(token in marker for marker in markers)
        )


def find_dialect(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a tokenizer's model. If its folder names an unknown tool parser, this logs a warning and uses the
    default one: everything but the model's own format of calls works."""
    found = None
    try:
        found = find_tool_parser(tokenizer.hf)
    except ModelLoadError as error:
        logger.warning("Tool calls are read as JSON between tags. %s", error.message)
    return Dialect(find_reasoning_markers(tokenizer), found or JSON_TAGS)
