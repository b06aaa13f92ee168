"""Splits a model's streamed output into reasoning and content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_server.engine.text.detokenizer import StringScanner, without_cut_marker
from mlx_server.engine.text.reasoning import HARMONY, Dialect, ReasoningMarkers
from mlx_server.engine.tools.formats import FORMATS, Tool, ToolParser
from mlx_server.engine.tools.parser import SPELLED
from mlx_server.engine.tools.untagged import JsonObjectCursor


@dataclass(frozen=True, slots=True)
class ReasoningSplit:
    """A piece of output. The reasoning comes before the content."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits streamed output into reasoning and content; a marker may come in several pieces.

    The reasoning begins in the prompt (`is_open`) or at the beginning of the output. Some models repeat the marker that
    the template has already written, so it is dropped in both cases, and so is an end marker before an answer without
    reasoning. After the first content, markers are ordinary text, since an answer may be about them. Line breaks right
    after a marker are dropped.
    """

    def __init__(self, markers: ReasoningMarkers, is_open: bool = False) -> None:
        self._markers = (markers.start, markers.end)
        self._end = StringScanner([markers.end])
        self._dropped = StringScanner(markers.dropped)
        self._beginning: str | None = ""  # None once it is known whether a marker stands there
        self._is_reasoning = is_open
        self._trims_lines = is_open

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._is_reasoning

    def append(self, text: str) -> ReasoningSplit:
        """Takes new text. Holds back what may be the beginning of a marker."""
        if self._beginning is not None:
            self._beginning += text
            if self._may_become_marker():
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
        """Ends the output; returns the text that was held back."""
        text, self._beginning = without_cut_marker(self._beginning or ""), None
        if self._is_reasoning:
            return ReasoningSplit(reasoning=self._trim(text + self._end.finish()))
        return ReasoningSplit(content=self._content(text) + self._trim(self._dropped.finish()))

    def _may_become_marker(self) -> bool:
        shown = (self._beginning or "").lstrip()
        return any(len(shown) < len(marker) and marker.startswith(shown) for marker in self._markers)

    def _read_beginning(self) -> str:
        """Removes the marker from the beginning of the output, if one is there, and returns the rest."""
        text, self._beginning = self._beginning or "", None
        marker = next(filter(text.lstrip().startswith, self._markers), None)
        if marker is None:
            return text
        self._is_reasoning = marker == self._markers[0]
        self._trims_lines = True
        return text.lstrip().removeprefix(marker)

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


_MAX_HEADER_CHARS = 256
_HEADER = re.compile(r"\s*+(?:t|to|to=[^\s<]*+\s*+\w*+\s*+)?(?:<\|(?:start|channel|constrain)\|>.*)?", re.DOTALL)
"""What a header may begin with. The prompt has written the first one's role, so its recipient may come first."""

_TOKEN = re.compile(f"({'|'.join(map(re.escape, HARMONY.dropped))})")
_CUT_TOKEN = re.compile(rf"(?:{'|'.join(re.escape(token[:-2]) for token in HARMONY.dropped)})\|?$")
"""What is left of a token at the end of a piece whose last letters are held back, since a stop string may begin there.
Tokens that are spelled in letters come as `<|`, `end`, `|>`."""

_RECIPIENT = re.compile(r"to=(?P<scope>functions\.)?(?P<name>[^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonySplitter:
    """Splits the streamed output of gpt-oss: messages with a header each, of which the prompt has written a part.

        <|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}

    A message to a function, by its full name or that of one of `tools`, is a call, on any channel: it becomes content
    in the form that `parser` reads; the format's tokens are text in its JSON object, which may copy them. Other content
    has `SPELLED` wherever it could spell such a call.
    Other messages on the channel `analysis` are reasoning; the rest is content.
    Text must come a token a piece: a whole `<|end|>` in a piece is the token, and one of several pieces is text that
    spells it in letters.
    Messages of the same kind are joined by line breaks. Text without a header is content, and a header without a
    message is dropped. With `tools` None no message is a call.
    """

    def __init__(self, parser: ToolParser, tools: Sequence[Tool] | None, is_open: bool = False) -> None:
        self._call_start = parser.start + FORMATS["harmony"].before
        self._call_end = parser.end
        self._functions = None if tools is None else {tool["function"]["name"] for tool in tools}
        self._held = ""  # of a token
        self._header: str | None = None if is_open else ""  # None inside a message
        self._kind: Literal["reasoning", "content", "call"] = "reasoning"
        self._arguments: JsonObjectCursor | None = None  # until a call's object ends
        self._separator = ""
        self._written: set[str] = set()  # the kinds of which there was text
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._header is None and self._kind == "reasoning"

    def append(self, text: str) -> ReasoningSplit:
        """Takes new text. Holds back headers, and what may be the beginning of one."""
        text = self._held + text
        cut = _CUT_TOKEN.search(text)
        self._held = "" if cut is None else cut.group()
        for index, part in enumerate(_TOKEN.split(text.removesuffix(self._held))):
            (self._mark if index % 2 else self._read)(part)
        return self._take()

    def finish(self) -> ReasoningSplit:
        """Ends the output; returns the text that was held back."""
        self._read(self._held)
        if self._header is not None and "<|" not in self._header:
            self._begin("content", self._header)
        return self._take()

    def _take(self) -> ReasoningSplit:
        split = ReasoningSplit("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return split

    def _read(self, text: str) -> None:
        if self._header is None:
            if text and self._arguments is not None and self._arguments.feed(text)[1] is not None:
                self._arguments = None
            self._write(text)
            return
        self._header += text
        if len(self._header) > _MAX_HEADER_CHARS or _HEADER.fullmatch(self._header) is None:
            self._begin("content", self._header)

    def _mark(self, token: str) -> None:
        if self._arguments is not None and self._arguments.is_inside:
            self._read(token)
        elif token == "<|message|>":
            if self._header is not None:
                self._open(self._header)
        elif token in ("<|channel|>", "<|constrain|>") and self._header is not None:
            self._header += token
        elif token != "<|constrain|>":  # models also forget the token that ends a message
            if self._header is None and self._kind == "call":
                self._write(self._call_end)
                self._arguments = None
            self._header = token if token in ("<|start|>", "<|channel|>") else ""

    def _open(self, header: str) -> None:
        """Begins the message of a complete header."""
        to = _RECIPIENT.search(header)
        if self._functions is not None and to is not None and (to["scope"] or to["name"] in self._functions):
            self._begin("call", self._call_start.format(name=to["name"]))
            self._arguments = JsonObjectCursor()
        else:
            self._begin("reasoning" if _ANALYSIS.search(header) else "content", "")

    def _begin(self, kind: Literal["reasoning", "content", "call"], text: str) -> None:
        self._header, self._kind = None, kind
        self._separator = "\n" if kind in self._written else ""
        self._write(text)

    def _write(self, text: str) -> None:
        if text:
            if self._kind == "content" and self._functions is not None:
                text = text.replace("|", f"|{SPELLED}")
            pieces = self._reasoning if self._kind == "reasoning" else self._content
            pieces += (self._separator, text)
            self._separator = ""
            self._written.add(self._kind)


def new_splitter(
    dialect: Dialect, tools: Sequence[Tool] | None, is_open: bool = False
) -> ReasoningSplitter | HarmonySplitter | None:
    """Splits one output, in which the model may call `tools`; None if the model does not reason. `is_open` says whether
    the prompt has opened the reasoning."""
    if dialect.reasoning is not HARMONY:
        return None if dialect.reasoning is None else ReasoningSplitter(dialect.reasoning, is_open)
    has_calls = dialect.tool_parser.name == "harmony"
    return HarmonySplitter(dialect.tool_parser, tools if has_calls else None, is_open)
