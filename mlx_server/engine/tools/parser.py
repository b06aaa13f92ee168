"""Finds tool calls in a model's output while it streams.

Calls are in regions between two markers. Arguments are streamed if they are JSON, or if each of them is between tags;
otherwise mlx-lm's parser reads a region when it is complete.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_server.engine.text.detokenizer import StringScanner
from mlx_server.engine.tools.formats import FORMATS, JSON_TAGS, Notation, Tool, ToolFormat, ToolParser
from mlx_server.engine.tools.tagged import TaggedCallReader
from mlx_server.engine.tools.untagged import JsonObjectCursor, UntaggedCalls
from mlx_server.engine.tools.values import ParameterTypes, json_text


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. Only the first has `id` and `name`; `arguments_fragment` is a part of the arguments' JSON
    text."""

    index: int
    id: str | None
    name: str | None
    arguments_fragment: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A piece of output, read: content and calls in the order in which they were written."""

    parts: tuple[str | ToolCallDelta, ...] = ()

    @property
    def content(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> tuple[ToolCallDelta, ...]:
        return calls_of(self.parts)


def calls_of(parts: Iterable[str | ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """The calls among these parts of an output."""
    return tuple([part for part in parts if not isinstance(part, str)])


class _Call(NamedTuple):
    id: str | None
    name: str
    arguments: str


SPELLED = "\ud800"
"""Keeps letters in content from being a marker, and is dropped. No output has half of a surrogate pair."""

_MAX_HEAD_CHARS = 1024
"""If this much text has no head, no head follows: the region is read when it is complete."""


class ToolCallExtractor:
    """Splits one choice's streamed text into content and tool calls; a marker may come in several pieces.

    Arguments are streamed if the format is JSON or has tags around each, otherwise they come whole when their region
    ends. A region that is not a call becomes content again, markers included; arguments that break off after they were
    streamed stay as they are. White space around calls is dropped. If the format is JSON between tags, an answer that
    begins with a call of an offered tool may lack the tags; in a format with a `bare` beginning, any call of one may
    lack the first marker.
    """

    def __init__(
        self,
        parser: ToolParser,
        tools: Sequence[Tool],
        new_id: Callable[[], str] | None = None,
        used_ids: Iterable[str] = (),
    ) -> None:
        """A call keeps the id that the model has given it, unless that is one of `used_ids`."""
        self._parser = parser
        self._tools = tools
        self._new_id = new_id or _random_id
        self._format = FORMATS.get(parser.name) or ToolFormat(before="")
        notation = self._format.notation
        self._has_own_quotes = notation is not None and not notation.is_escaped
        self._names = [tool["function"]["name"] for tool in tools]
        self._untagged = UntaggedCalls(self._names if parser.name == JSON_TAGS.name else (), parser.start, parser.end)
        self._types = ParameterTypes(tools)
        self._parameters: TaggedCallReader | None = None
        bare = [self._format.bare.format(name=name) for name in self._names] if self._format.bare else []
        self._outside = StringScanner([parser.start, *bare, *filter(None, [parser.end])])
        self._start = parser.start  # of the current region; empty if it is bare
        self._read = self._read_content
        self._body = ""
        self._json = JsonObjectCursor()
        self._num_calls = 0
        self._ids = set(used_ids)
        self._num_streamed = 0
        self._num_quotes = 0  # in the first `_counted` characters of the body
        self._counted = 0
        self.cut_call: int | None = None
        """At the end: the index of the call whose arguments the output has not finished, if there is one."""
        self._blank: str | None = ""  # white space that is content only if text follows; None inside content
        self._parts: list[str | ToolCallDelta] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun, so that the finish reason is `tool_calls`."""
        return self._num_calls > 0

    def append(self, text: str) -> ToolOutput:
        """Takes new text. Holds back what may be the beginning of a marker or a call."""
        self._take_in(self._untagged.feed(text))
        return self._take()

    def _take_in(self, text: str) -> None:
        while text:
            text = self._read(text)

    def finish(self, *, is_cut: bool = False) -> ToolOutput:
        """Ends the output; returns what was held back. If something else than the model has ended it (`is_cut`), what
        may be the beginning of a call or the end of one is dropped."""
        held = self._untagged.finish()
        self._take_in("" if is_cut and '"name"' in held else held)
        while self._read == self._read_body:
            is_forgiven = not self._parser.end or self._format.fails_when_cut or self._is_finished()
            is_within = self._num_streamed > 0 and bool(self._parser.end)
            is_dropped = is_cut and (is_within or self._may_begin_call(self._body))
            self._read = self._read_content
            self._take_in(self._close_region(self._body, "", may_call=is_forgiven, is_dropped=is_dropped))
        if self._read == self._read_arguments:
            self.cut_call = self._num_calls - 1
        self._show(self._outside.finish() if is_cut else self._outside.flush())
        if self._blank and not self.has_calls:
            self._parts.append(self._blank)
        return self._take()

    def calls_in(self, thoughts: str) -> tuple[ToolCallDelta, ...]:
        """Ends an output that is nothing but reasoning; returns the calls in that, from the first marker on."""
        _, start, rest = thoughts.partition(self._parser.start)
        return (*self.append(start + rest).calls, *self.finish().calls)

    def _take(self) -> ToolOutput:
        output = ToolOutput(tuple(self._parts))
        self._parts.clear()
        return output

    # Each reader takes its part of the text and returns the rest, which goes to the reader that is then current.

    def _read_content(self, text: str) -> str:
        scan = self._outside.scan(text)
        self._show(scan.text)
        marker = scan.matched
        if marker == self._parser.end:
            if not (self.has_calls and self._blank is not None):  # some models end a call twice
                self._show(marker)
        elif marker is not None:
            self._start, self._body = (marker, "") if marker == self._parser.start else ("", marker)
            self._num_streamed = self._num_quotes = self._counted = 0
            self._parameters = self._new_reader()
            self._read = self._read_body
        return scan.rest

    def _read_body(self, text: str) -> str:
        searched = max(0, len(self._body) - len(self._parser.end))
        self._body += text
        end = self._find_end(searched)
        rest = None if searched > _MAX_HEAD_CHARS else self._read_head(len(self._body) if end < 0 else end)
        if rest is not None:
            return rest
        if self._parameters is not None:
            body = self._body if end < 0 else self._body[:end]
            rest = self._read_parameters(self._parameters, body, is_complete=end >= 0)
            if rest is not None:
                return rest
        if end < 0:
            return ""
        self._read = self._read_content
        after = end + len(self._parser.end)
        return self._close_region(self._body[:end], self._body[end:after]) + self._body[after:]

    def _find_end(self, searched: int) -> int:
        """Where the end marker is, but not within a quoted text; negative if it is not there."""
        if not self._parser.end:
            return -1
        end = self._body.find(self._parser.end, searched)
        while end >= 0 and self._is_quoted(end):
            end = self._body.find(self._parser.end, end + 1)
        return end

    def _is_quoted(self, end: int) -> bool:
        """Whether the body before `end`, which only grows, ends inside a text, in a format with quotes of its own."""
        notation = self._format.notation
        if notation is None or not self._has_own_quotes:
            return False
        self._num_quotes += self._body.count(notation.quote, self._counted, end)
        self._counted = end
        return self._num_quotes % 2 == 1

    def _is_finished(self) -> bool:
        """Whether only the end marker is missing, in a format with quotes of its own."""
        is_ended = self._has_own_quotes and self._body.rstrip().endswith(self._format.after)
        return is_ended and not self._is_quoted(len(self._body))

    def _read_arguments(self, text: str) -> str:
        fragment, rest = self._json.feed(text)
        if fragment:
            self._parts.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        if rest is None:
            return ""
        self._read = self._read_body
        return rest

    def _read_head(self, end: int) -> str | None:
        """Begins a streamed call if the body has its head before `end`, and returns the text after that: the beginning
        of the arguments."""
        head = None if self._format.head is None else self._format.head.match(self._body, 0, min(end, _MAX_HEAD_CHARS))
        name = None if head is None else _name_in(head)
        if head is None or name is None:
            return None
        self._begin(_Call(head.groupdict().get("id"), name, ""))
        self._num_streamed += 1
        self._json = JsonObjectCursor()
        self._read = self._read_arguments
        rest, self._body = self._body[head.end() :], ""
        return rest

    def _new_reader(self) -> TaggedCallReader | None:
        parameter = self._format.read_parameter
        return None if parameter is None else TaggedCallReader(self._format, parameter, self._types, self._parser.end)

    def _read_parameters(self, reader: TaggedCallReader, body: str, *, is_complete: bool) -> str | None:
        """Streams the call in `body`, the region so far. Returns the text after the call once it is complete; and after
        the last one, the text that cannot be of the region."""
        was_begun = reader.name is not None
        fragment = reader.follow(body, is_complete=is_complete)
        if not was_begun and reader.name is not None:
            self._begin(_Call(None, reader.name, ""))
        after = reader.end_in(body) if self._format.after else None
        fragment += "" if after is None else reader.finish({})
        if fragment:
            self._parts.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        if after is not None:
            self._num_streamed += 1
            self._parameters = self._new_reader()
        elif self._num_streamed and reader.name is None and not self._may_go_on(self._body.lstrip()):
            self._read, after = self._read_content, 0
        else:
            return None
        rest, self._body = self._body[after:], ""
        return rest

    def _may_go_on(self, text: str) -> bool:
        """Whether another call or the end of the region may begin so."""
        markers = (_NAME_FIELD.split(self._format.before)[0].strip(), self._parser.end)
        return any(text.startswith(marker) or marker.startswith(text) for marker in markers)

    def _may_begin_call(self, body: str) -> bool:
        """Whether a region that begins so may become a call of one of the tools, by its letters."""
        letters, form = _letters(body), self._format
        own = _NAME_FIELD.split(form.before + (form.number or ""))[0].format()
        befores = (own, self._parser.start + own, '"name"', "")
        heads = [_letters(before + name) for name in self._names for before in befores]
        return any(head.startswith(letters) or letters.startswith(head) for head in heads)

    def _close_region(self, body: str, end: str, *, may_call: bool = True, is_dropped: bool = False) -> str:
        """Reads what follows the last streamed call in the region, or all of the region. If that is no call, it becomes
        content, unless it `is_dropped`; but from another first marker on it is returned, to be read again."""
        if self._parameters is not None and self._parameters.name is not None:
            self._close_parameters(self._parameters, body, may_call=may_call, is_complete=bool(end))
            return ""
        search = body.find if self._num_streamed else body.rfind  # what models say of their calls may have markers
        again = search(self._parser.start) if self._parser.end else -1
        first, rest = (body, "") if again < 0 else (body[:again], body[again:] + end)
        if self._num_streamed and self._format.tail.fullmatch(first):
            return rest
        calls = self._parse(body) if may_call else []
        if not calls and end and self._has_own_quotes:
            calls = self._parse_incomplete(body)
        before = self._parse(first) if calls and rest else []
        if before and calls[: len(before)] == before:  # only their last marker is missing
            calls = before
        elif calls and not (rest and self._is_said_before(calls, body[again + len(self._parser.start) :])):
            rest = ""
        elif is_dropped:
            return ""
        else:
            self._show(("" if self._num_streamed else self._start) + first + ("" if rest else end))
            return rest
        for call in calls:
            self._begin(call)
        return rest

    def _is_said_before(self, calls: list[_Call], last: str) -> bool:
        """Whether `calls` of a region are all in its `last` part, so that what precedes that is no call: parsers search
        for calls, or take any word for a name."""
        return any(call.name not in self._names for call in calls) or calls == self._parse(last)

    def _close_parameters(self, reader: TaggedCallReader, body: str, *, may_call: bool, is_complete: bool) -> None:
        """Ends the streamed call; mlx-lm's parser reads what is not written as the format says. A call that was cut off
        stays as it is."""
        fragment = reader.follow(body, is_complete=True)
        end = reader.end_in(body)
        calls = self._parse(body) if may_call and end != len(body) else []
        if calls or is_complete or (self._format.after and end is not None):
            fragment += reader.finish(json.loads(calls[0].arguments) if calls else {})
        else:
            self.cut_call = self._num_calls - 1
        if fragment:
            self._parts.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        for call in calls[1:]:
            self._begin(call)

    def _parse(self, body: str) -> list[_Call]:
        """The calls that mlx-lm's parser reads, which knows more spellings than ours, but guesses values."""
        notation = self._format.notation
        if notation is not None and "None" not in notation.nulls:
            body = _with_json_words(body, notation)
        calls = _calls_in(body, self._parser, self._tools)
        if calls or self._parser.name == JSON_TAGS.name:
            return calls
        # Models that were trained on JSON before their own format fall back to it.
        calls = _calls_in(body, JSON_TAGS, self._tools)
        return calls if all(call.name in self._names for call in calls) else []

    def _parse_incomplete(self, body: str) -> list[_Call]:
        """The same for a call of a tool whose last brace or first word (`call:`) the model has forgotten."""
        begin = self._format.before.partition("{")[0]
        found = (self._parse(text) for text in (body + self._format.after, begin + body.lstrip(": \n")))
        return next(([call for call in calls if call.name in self._names] for calls in found if calls), [])

    def _begin(self, call: _Call) -> None:
        call_id = call.id if call.id and call.id not in self._ids else self._new_id()  # models repeat ids
        self._ids.add(call_id)
        self._parts.append(ToolCallDelta(self._num_calls, call_id, call.name, call.arguments))
        self._num_calls += 1
        self._blank = ""

    def _show(self, text: str) -> None:
        text = text.replace(SPELLED, "")
        if self._blank is not None:
            if not text.strip():
                self._blank += text
                return
            text, self._blank = self._blank + text, None
        if text:
            self._parts.append(text)


def _name_in(head: re.Match[str]) -> str | None:
    """The function's name; None if it is invalid JSON."""
    if "name" in head.groupdict():
        return head["name"]
    try:
        name = str(json.loads(head["json_name"]))
        name.encode()
    except ValueError:
        return None
    return name


_NAME_FIELD = re.compile(r"\{(?:json_)?name\}")


def _letters(text: str) -> str:
    return re.sub(r"[\W\d]", "", text)


_PYTHON_WORD = re.compile(r"(?<=[:,\[ ])(None|True|False)(?=\s*[,\]}])")
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_BARE_KEY = re.compile(r"""(?<=[{,])\s*([^\s:,{}\[\]"][^:,{}\[\]"]*):""")


def _with_json_words(body: str, notation: Notation) -> str:
    """Replaces Python's words outside texts: templates show earlier calls' nulls so, and models copy them. Puts bare
    keys in quotes: mlx-lm's parser does so only with those of letters and digits."""
    parts = body.split(notation.quote)
    parts[::2] = [_PYTHON_WORD.sub(lambda word: _JSON_WORDS[word[0]], part) for part in parts[::2]]
    if notation.member == "{key}:":
        parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    return notation.quote.join(parts)


def _calls_in(body: str, parser: ToolParser, tools: Sequence[Tool]) -> list[_Call]:
    with suppress(Exception):  # whatever a parser raises, the text is not a call
        parsed = parser.parse(body, tools)
        return [_as_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    return []


def _as_call(parsed: Any) -> _Call:
    """Raises some exception if `parsed` is not a call. The arguments may be an object, its JSON text, or missing."""
    name, call_id = parsed["name"], parsed.get("id")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    json_text(name)
    return _Call(call_id if isinstance(call_id, str) else None, name, json_text(arguments))


def _random_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
