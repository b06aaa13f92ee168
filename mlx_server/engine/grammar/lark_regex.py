r"""Converts Lark grammars without recursion to a regex.

Clients' free-form tools come with such grammars, but the tools' input is a JSON string, and llguidance can constrain
that by a regex only. If no rule refers to itself, even indirectly, replacing each name by its definition gives a regex:

    start: line+
    line: ("+" | "-") /(.*)/ LF        becomes        (?:(?:(?:\+|-)(?:(.*))(?:\n))+)
    %import common.LF
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlx_server.engine.grammar.schema import MAX_REGEX_CHARS

_TOKEN = re.compile(
    r"""(?P<space>[ \t\n]+|//[^\n]*)
      | (?P<text>"(?:\\.|[^"\\\n])*")(?P<text_flag>i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/)(?P<regex_flags>[imsx]*)
      | (?P<alias>->[ ]*\w+)
      | (?P<count>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?|\{\d+(?:,\d*)?\})
      | (?P<name>\w+)
      | (?P<mark>[()\[\]|*+?])""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[?!]*(\w+)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_IMPORT = re.compile(r"^%import[ \t]+common[. \t]+\(?([\w, \t]+)\)?(?:[ \t]*->[ \t]*(\w+))?[ \t]*$", re.MULTILINE)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
}


def lark_regex(grammar: str) -> str:
    """The regex that matches what the rule `start` matches. Raises `ValueError` with the reason if there is none."""
    return _Writer(grammar).rule("start")


class _Writer:
    def __init__(self, grammar: str) -> None:
        self._known = dict(_imports(grammar))
        if directive := re.search(r"^%\w+", _IMPORT.sub("", grammar), re.MULTILINE):
            raise ValueError(f"it has {directive[0]}; only %import of names in common is supported")
        self._bodies = dict(rule_bodies(_IMPORT.sub("", grammar)))
        self._open: list[str] = []

    def rule(self, name: str) -> str:
        if name in self._open:
            raise ValueError(f"the rule {name} is recursive")
        if name not in self._known:
            if name not in self._bodies:
                raise ValueError(f"there is no rule {name}")
            self._open.append(name)
            self._known[name] = _Expression(self, self._bodies[name]).read()
            self._open.pop()
        return self._known[name]


def rule_bodies(grammar: str) -> Iterator[tuple[str, str]]:
    """The name and the body of each rule and terminal of a grammar without directives."""
    heads = list(_RULE.finditer(grammar))
    ends = [head.start() for head in heads[1:]] + [len(grammar)]
    return ((head[1], grammar[head.end() : end]) for head, end in zip(heads, ends, strict=True))


def _check_length(written: str) -> None:
    if len(written) > MAX_REGEX_CHARS:
        raise ValueError(f"written as a regex it has more than {MAX_REGEX_CHARS} characters")


def _imports(grammar: str) -> Iterator[tuple[str, str]]:
    for found in _IMPORT.finditer(grammar):
        for name in re.findall(r"\w+", found[1]):
            if name not in _COMMON:
                raise ValueError(f"common.{name} is not supported")
            yield found[2] or name, f"(?:{_COMMON[name]})"


class _Expression:
    """Reads one rule's body, from left to right."""

    def __init__(self, writer: _Writer, body: str) -> None:
        self._writer = writer
        self._tokens = list(tokens_of(body))
        self._at = 0

    def read(self) -> str:
        written = self._alternatives()
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at][1]!r} is unexpected")
        return written

    def _next(self, *marks: str) -> str | None:
        """The next token if it is one of these."""
        if self._at < len(self._tokens) and self._tokens[self._at][1] in marks:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _alternatives(self) -> str:
        self._next("|")  # some put one before the first alternative, too
        choices = [self._sequence()]
        while self._next("|"):
            choices.append(self._sequence())
        return f"(?:{'|'.join(choices)})"

    def _sequence(self) -> str:
        written = ""
        while self._at < len(self._tokens) and self._tokens[self._at][1] not in ("|", ")", "]"):
            written += self._repeated()
            _check_length(written)  # early, since nested rules multiply the length
        return written

    def _repeated(self) -> str:
        kind, token = self._tokens[self._at]
        self._at += 1
        written = self._atom(kind, token)
        while self._at < len(self._tokens):
            kind, token = self._tokens[self._at]
            if kind == "count":
                token = f"{{{token.strip('~{} ').replace('..', ',').replace(' ', '')}}}"
            elif token not in ("*", "+", "?"):
                break
            self._at += 1
            written = f"(?:{written}{token})"
        return written

    def _atom(self, kind: str, token: str) -> str:
        if token in ("(", "["):
            written = self._alternatives()
            if self._next(")" if token == "(" else "]") is None:
                raise ValueError(f"a {token} is not closed")
            return written if token == "(" else f"(?:{written}?)"
        if kind == "name":
            return self._writer.rule(token)
        if kind in ("text", "regex"):
            return token
        raise ValueError(f"{token!r} is not allowed there")


def tokens_of(body: str) -> Iterator[tuple[str, str]]:
    """Yields the kind and text of each token, without spaces, comments and aliases. Texts become regexes. Raises
    `ValueError`."""
    at = 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            raise ValueError(f"{body[at : at + 20]!r} cannot be parsed")
        at = found.end()
        if found["text"] is not None:
            flag = "(?i:" if found["text_flag"] else "(?:"
            yield "text", f"{flag}{re.escape(_unescaped(found['text'][1:-1]))})"
        elif found["regex"] is not None:
            flags = found["regex_flags"]
            yield "regex", f"(?{flags}:{_SLASH.sub(_without_slash, found['regex'][1:-1])})"
        elif found["space"] is None and found["alias"] is None:
            yield str(found.lastgroup), found[0]


_SLASH = re.compile(r"\\.")


def _without_slash(escape: re.Match[str]) -> str:
    return "/" if escape[0] == r"\/" else escape[0]


def _unescaped(text: str) -> str:
    """The text of a Lark string, which has Python's escapes."""
    return re.sub(
        r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)",
        lambda escape: chr(int(escape[1][1:], 16)) if len(escape[1]) > 1 else _ESCAPES.get(escape[1], escape[1]),
        text,
    )


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
