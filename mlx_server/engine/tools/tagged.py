"""Reads calls whose arguments are between tags, while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any

from mlx_server.engine.tools.formats import Parameter, ToolFormat
from mlx_server.engine.tools.nested import MAX_TAG_CHARS, read_tags, tag_of
from mlx_server.engine.tools.values import ALL_KINDS, TEXT, ParameterTypes, ValueTypes, read_value


class TaggedCallReader:
    r"""Converts the arguments of the first call of a region to JSON text: for `<function=f>\n<parameter=path>\n/etc/a`
    it is `{"path": "/etc/a`.

    Arguments that can only be texts come while they are written, others when they are complete. Each piece is read only
    once, so the cost of long arguments is proportional to their length. `end_marker` ends the region, if it may follow.
    """

    def __init__(self, form: ToolFormat, parameter: Parameter, types: ParameterTypes, end_marker: str = "") -> None:
        # A name without an end of its own ends where the first argument begins.
        ahead = re.escape(parameter.before.partition("{")[0]) if form.before.strip().endswith("}") else ""
        self._head = re.compile(rf"{_pattern(form.before)}\s*(?={ahead})")
        not_after = f"(?!{_pattern(form.after)})" if form.after else ""
        self._opening = re.compile(not_after + _pattern(parameter.before))
        self._after = re.compile(_pattern(form.after))
        self._after_tag = form.after.strip()
        self._parameter = parameter
        self._has_line_breaks = parameter.before.endswith("\n")
        self._end_marker = end_marker
        self._all_types = types
        self._at = 0
        self._searched = 0  # what ends the argument does not begin before this position
        self._depth = 0  # how many tags are open there inside the argument
        self._key: str | None = None  # of the argument that begins at `_at`; None between arguments
        self._types = ValueTypes(ALL_KINDS)  # of this argument's value
        self._shown: int | None = None  # the end of the part of its text that is written; None before the beginning
        self._written: set[str] = set()
        self.name: str | None = None

    def end_in(self, body: str) -> int | None:
        """Where the call ends in the region's text, if what must follow its arguments follows those that were read."""
        after = None if self.name is None or self._key is not None else self._after.match(body, self._at)
        return None if after is None else after.end()

    def follow(self, body: str, *, is_complete: bool = False) -> str:
        """Takes the region's text so far, or all that comes of it, and returns the JSON text that was not returned
        before."""
        return "".join(self._pieces(body, is_complete=is_complete))

    def finish(self, arguments: Mapping[str, Any]) -> str:
        """Returns the remaining JSON text at the end of the region. `arguments` are those that are known of the
        call."""
        pieces = [] if self._shown is None else ['"']
        pieces += [self._argument(key, value) for key, value in arguments.items() if key not in self._written]
        return "".join([*pieces, "}" if self._written else "{}"])

    def _pieces(self, body: str, *, is_complete: bool) -> Iterator[str]:
        if self.name is None:
            head = self._head.match(body, 0, _MAX_HEAD_CHARS)
            if head is None:
                return
            self.name, self._at = head["name"], head.end()
        while True:
            if self._key is None:
                spaces = _WHITE.match(body, self._at)
                assert spaces is not None
                self._at = spaces.end()  # so that they are searched once
                opening = self._opening.match(body, self._at)
                if opening is None:
                    return
                self._key, self._at = opening["key"], opening.end()
                self._types = self._types_of(self.name, self._key, opening.groupdict().get("is_text"))
            end, after = self._find_end(self._key, body, is_complete=is_complete)
            if self._types.kinds == TEXT and not self._parameter.has_cdata:
                yield from self._text(self._key, body, end)
            if end < 0:
                return
            yield self._close(self._key, body, end)
            self._key, self._shown, self._at = None, None, after

    def _find_end(self, key: str, body: str, *, is_complete: bool) -> tuple[int, int]:
        """Where the argument ends, and what follows begins; negative if it has not ended."""
        self._searched = max(self._at, self._searched)
        if self._parameter.namespace and self._types.kinds != TEXT:
            return self._find_outer_end(self._parameter.namespace, body)
        ends = _ends(self._parameter, self._closing(key, body), self._after_tag, self._end_marker)
        for found in ends.find(body, self._searched, is_complete=is_complete):
            if found["key"] is None or self._is_missing(found["key"]):
                return found.span()
        self._searched = ends.certain(body, self._searched, is_complete=is_complete)
        return -1, -1

    def _is_missing(self, key: str) -> bool:
        """Whether the function has this argument, and the call has it not yet."""
        return key not in (self._key, *self._written) and key in self._all_types.keys(self.name or "")

    def _find_outer_end(self, namespace: str, body: str) -> tuple[int, int]:
        """The same for an argument with tags inside."""
        for tag in tag_of(namespace).finditer(body, self._searched):
            self._searched = tag.end()
            if tag[1] and self._depth == 0:
                return tag.start(), tag.end()
            self._depth += -1 if tag[1] else 1
        self._searched = max(self._searched, len(body) - len(namespace) - MAX_TAG_CHARS)
        return -1, -1

    def _types_of(self, name: str, key: str, is_text: str | None) -> ValueTypes:
        if is_text is not None:
            return ValueTypes(TEXT if is_text == "true" else ALL_KINDS - TEXT)
        types = self._all_types.of(name, key)
        return ValueTypes(self._parameter.untyped) if types.kinds == ALL_KINDS else types

    def _closing(self, key: str, body: str) -> str:
        closing = self._parameter.end(key).strip()
        is_section = self._parameter.has_cdata and _CDATA.match(body, self._at) is not None
        return f"]]>{closing}" if is_section else closing

    def _text(self, key: str, body: str, end: int) -> Iterator[str]:
        """Writes the certain part of a text. It ends at `end`; if that is negative, the end is unknown: what ends it
        may have begun."""
        stop = self._searched if end < 0 else end
        if self._shown is None:
            if stop == self._at and end < 0:
                return  # a line break may follow, which is not of the text
            yield self._key_text(key) + '"'
            self._shown = self._at + (self._has_line_breaks and body.startswith("\n", self._at, stop))
        if self._has_line_breaks:
            stop -= body.endswith("\n", self._shown, stop)
        if stop > self._shown:
            yield json.dumps(body[self._shown : stop], ensure_ascii=False)[1:-1]
            self._shown = stop

    def _close(self, key: str, body: str, end: int) -> str:
        """Ends the argument whose text ends at `end`."""
        if self._shown is not None:
            return '"'
        text = body[self._at : end]
        if self._parameter.namespace and self.name is not None:
            with suppress(RecursionError, ValueError):  # else it is a text
                return self._argument(key, read_tags(text, self._parameter, *self._all_types.schema_of(self.name, key)))
        if self._has_line_breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        section = _CDATA.match(text) if self._parameter.has_cdata else None
        if section is not None:
            text = text[section.end() :]
        return self._argument(key, read_value(text, self._types))

    def _argument(self, key: str, value: Any) -> str:
        return self._key_text(key) + json.dumps(value, ensure_ascii=False)

    def _key_text(self, key: str) -> str:
        separator = ", " if self._written else "{"
        self._written.add(key)
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: "


class _Ends:
    """What ends an argument: its `closing` tag, if another argument, the end of the call (`after`) or that of the
    region follows; else the tag is data. Models forget the tag, so the end of call and region, and a line that opens
    another argument, may end it, too."""

    def __init__(self, parameter: Parameter, closing: str, after: str, end_marker: str) -> None:
        begin = parameter.before.partition("{")[0]
        self._tags = [tag for tag in (closing, after) if tag]
        self._markers = [*self._tags, begin]
        self._end_marker = end_marker
        has_line_breaks = parameter.before.endswith("\n")
        self._num_breaks = int(not has_line_breaks)  # before a tag that ends an argument without its own
        line = r"(?<=\n)" if has_line_breaks else r"\n"
        before = _pattern(parameter.before).removeprefix(_SPACES).replace(_SPACES, _GAP)
        opening = _NOTHING if parameter.has_cdata else f"{line}(?={before})"
        self._begun_opening = re.compile(rf"{line}{re.escape(begin)}[^<>\n]{{0,300}}(?:{_begun_rest(parameter)})\Z")
        close, over = re.escape(closing), "|".join(map(_beginning, (begin, after, end_marker)))
        usual = rf"{close}(?={_GAP}(?:{'|'.join(re.escape(tag) for tag in (begin, after) if tag)}))|{opening}"
        last = rf"{close}(?={_GAP}(?:{over})\Z)"
        if after:
            last += rf"|\n{{0,{self._num_breaks}}}(?={re.escape(after)}{_GAP}(?:{over})\Z)"
        self._usual, self._last = re.compile(usual), re.compile(f"{usual}|{last}")

    def find(self, body: str, start: int, *, is_complete: bool) -> Iterator[re.Match[str]]:
        """The ends from `start` on; `key` is that of an argument that is opened there. A span is what is between the
        text and what follows."""
        return (self._last if is_complete else self._usual).finditer(body, start)

    def certain(self, body: str, start: int, *, is_complete: bool) -> int:
        """Before which position, at least `start`, no end can begin that is not complete yet. What the region's end has
        cut off is no text, either."""
        opening = None if is_complete else self._begun_opening.search(body, start)
        cut = len(body)
        if opening is not None:
            cut = opening.start()
        elif not is_complete:  # the beginning of a marker may be before that of the region's end
            cut -= _overlap(body, self._end_marker) if self._end_marker else 0
            cut -= max(_overlap(body, marker, cut) for marker in self._markers)
        first = max(start, cut - _MAX_GAP - max(map(len, self._tags)))
        before = body[first:cut].rstrip()
        begun = max(_overlap(before, tag) for tag in self._tags)
        cut = first + len(before) - begun if begun else cut
        return max(start, cut - (self._num_breaks and body.endswith("\n", start, cut)))


_ends = lru_cache(maxsize=64)(_Ends)

_NOTHING = r"(?!)(?P<key>)"
_SPACES = r"\s*"
_WHITE = re.compile(_SPACES)
_MAX_HEAD_CHARS = 1024  # if this much text has no head, no head follows
_MAX_GAP = 256  # between tags: a model that writes spaces without end must not have them searched for each token
_GAP = rf"\s{{0,{_MAX_GAP}}}"
_CDATA = re.compile(r"\s*<!\[CDATA\[")


_FIELDS = {"name": r'[^\s<>"]+', "key": r'[^\s<>"](?:[^<>"\n]{0,255}[^\s<>"])?', "is_text": "true|false"}


def _pattern(template: str) -> str:
    r"""A regex for `template`, with any white space for its line breaks, and a group for each field:
    `<f={name}>\n` becomes `\s*<f=(?P<name>[^\s<>"]+)>`."""
    lines = [re.escape(line) for line in template.split("\n") if line]
    pattern = r"\s*" + r"\s*".join(lines)
    return re.sub(r"\\{(\w+)\\}", lambda field: f"(?P<{field[1]}>{_FIELDS[field[1]]})", pattern)


def _beginning(text: str) -> str:
    """A regex for any beginning of `text`, but not for all of it."""
    return reduce(lambda rest, letter: rf"(?:{re.escape(letter)}{rest})?", reversed(text[:-1]), "")


def _begun_rest(parameter: Parameter) -> str:
    """A regex for any beginning of what follows the key in `before`."""
    before, begun = "", []
    for line in filter(None, parameter.before.partition("{key}")[2].split("\n")):
        begun.append(before + _beginning(line))
        before += re.escape(line) + _GAP
    return "|".join(begun)


def _overlap(text: str, marker: str, end: int | None = None) -> int:
    """How many characters at the end of `text`, or before `end`, are the beginning of `marker`, or all of it."""
    end = len(text) if end is None else end
    start = text.find(marker[0], max(0, end - len(marker)), end)
    while start >= 0 and not marker.startswith(text[start:end]):
        start = text.find(marker[0], start + 1, end)
    return end - start if start >= 0 else 0
