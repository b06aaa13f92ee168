"""Reasoning that a model writes between two markers before its answer: found and split off.

How one model marks what is not its answer: reasoning and tool calls.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mlx_server.engine.text.detokenizer import StringScanner
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import FORMATS, JSON_TAGS, ToolParser
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.tool_parsers import find_tool_parser


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts that a model puts around its reasoning.

    `answer_start` is what it must write before an answer behind it. `dropped` are texts that belong to the format
    wherever they stand outside of the reasoning, and are not content.
    """

    start: str
    end: str
    answer_start: str = ""
    dropped: tuple[str, ...] = ()

    def is_open_after(self, prompt: str, *, continues_message: bool = False) -> bool:
        """Whether the output begins inside the reasoning, because the prompt has opened it.

        Chat templates do so at the very end of the prompt. With `continues_message` (the client's own beginning
        of an answer), the reasoning may have been opened anywhere in it.
        """
        if continues_message:
            return prompt.rfind(self.start) > prompt.rfind(self.end)
        return prompt.rstrip().endswith(self.start.rstrip())


_XTML = ReasoningMarkers(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    answer_start="<|open|>response<|sep|>",
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
_HARMONY = ReasoningMarkers(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    answer_start="<|channel|>final<|message|>",
    dropped=("<|channel|>final", "<|channel|>commentary", "<|constrain|>", "<|message|>", "<|end|><|start|>assistant"),
)
_THINK = ReasoningMarkers("<think>", "</think>")
_KNOWN: tuple[tuple[ReasoningMarkers, tuple[str, ...]], ...] = (
    # The markers, and the vocabulary entries that show that a model was trained with them, if not the markers.
    (_THINK, ()),
    (ReasoningMarkers("<longcat_think>", "</longcat_think>"), ()),
    (ReasoningMarkers("<|think:start|>", "<|think:end|>"), ()),
    (ReasoningMarkers("<seed:think>", "</seed:think>"), ()),
    (ReasoningMarkers("[THINK]", "[/THINK]"), ()),
    (ReasoningMarkers("<|channel>thought", "<channel|>"), ("<|channel>", "<channel|>")),
    (_XTML, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    (_HARMONY, ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")),
)


def find_reasoning_markers(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of this model, told by its vocabulary or by its chat template; None if it has none."""
    for markers, entries in _KNOWN:
        if all(tokenizer.token_to_id(entry) is not None for entry in entries or (markers.start, markers.end)):
            return markers
    template = tokenizer.hf.chat_template
    return _THINK if isinstance(template, str) and _THINK.start in template and _THINK.end in template else None


@dataclass(frozen=True, slots=True)
class ReasoningSplit:
    """What a piece of output turned out to be. The reasoning stands before the content."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits streamed output into reasoning and content, wherever the markers are cut.

    Reasoning opens in the prompt (`is_open`) or as the first thing of the output; some models repeat the marker
    that the template has written already, so it is dropped in both cases. Once there is content, markers are
    ordinary text: an answer may talk about them. Line breaks right behind a marker belong to neither part.
    """

    def __init__(self, markers: ReasoningMarkers, is_open: bool = False) -> None:
        self._start = markers.start
        self._end = StringScanner([markers.end])
        self._dropped = StringScanner(markers.dropped)
        self._beginning: str | None = ""  # None once it is known whether the start marker stands there
        self._is_reasoning = is_open
        self._trims_lines = is_open

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._is_reasoning

    def append(self, text: str) -> ReasoningSplit:
        """Takes new text; what may be the beginning of a marker is held back."""
        if self._beginning is not None:
            self._beginning += text
            if self._may_become_start():
                return ReasoningSplit()
            text = self._read_beginning()
        if not self._is_reasoning:
            return ReasoningSplit(content=self._content(text))
        scan = self._end.scan(text)
        reasoning = self._trim(scan.text)
        if scan.matched is None:
            return ReasoningSplit(reasoning)
        self._is_reasoning = False
        self._trims_lines = True
        return ReasoningSplit(reasoning, self._content(scan.rest))

    def finish(self) -> ReasoningSplit:
        """What was held back, at the end of the output."""
        text, self._beginning = self._beginning or "", None
        if self._is_reasoning:
            return ReasoningSplit(reasoning=self._trim(text + self._end.flush()))
        return ReasoningSplit(content=self._content(text) + self._trim(self._dropped.flush()))

    def _may_become_start(self) -> bool:
        shown = (self._beginning or "").lstrip()
        return len(shown) < len(self._start) and self._start.startswith(shown)

    def _read_beginning(self) -> str:
        """Takes the start marker off the output's beginning if it stands there; returns the text that follows."""
        text = self._beginning or ""
        self._beginning = None
        if not text.lstrip().startswith(self._start):
            return text
        self._is_reasoning = True
        self._trims_lines = True
        return text.lstrip().removeprefix(self._start)

    def _content(self, text: str) -> str:
        pieces = []
        while text:
            scan = self._dropped.scan(text)
            pieces.append(self._trim(scan.text))
            text = scan.rest
        return "".join(pieces)

    def _trim(self, text: str) -> str:
        if self._trims_lines:
            text = text.lstrip("\n")
            self._trims_lines = not text
        return text


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dialect:
    """`reasoning` is None for models that do not reason. `tool_parser` reads JSON between tags where the model was
    trained on no format, as its prompt then asks for."""

    reasoning: ReasoningMarkers | None
    tool_parser: ToolParser

    def kept_token_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that stand in the markers: the text must show them to what splits it."""
        markers: list[str] = []
        if with_tools:
            form = FORMATS.get(self.tool_parser.name)
            markers += [self.tool_parser.start, self.tool_parser.end, *(form.special if form is not None else ())]
        if self.reasoning is not None:
            markers += [self.reasoning.start, self.reasoning.end]
        return frozenset(
            token_id
            for token, token_id in tokenizer.added_tokens.items()
            if token_id in tokenizer.special_token_ids and any(token in marker for marker in markers)
        )


def find_dialect(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a tokenizer's model. A folder that asks for a tool parser that is not there is warned of, and read
    as one that asks for none: all but its own format of calls works."""
    found = None
    try:
        found = find_tool_parser(tokenizer.hf)
    except ModelLoadError as error:
        logger.warning("Tool calls are read as JSON between tags. %s", error.message)
    return Dialect(find_reasoning_markers(tokenizer), found or JSON_TAGS)
