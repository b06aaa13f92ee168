"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_server.engine.json_bounds import keep_bounds

ANY_TEXT = r"/(.|\n)*/"
"""Matches all text, but no added token that looks like a marker."""


_USUAL_WHITESPACE = r" |\n{1,2}[ \t]{0,40}"
"""What printing JSON needs. Unbounded white space, which JSON allows, is a trap that small models never leave."""


class LarkWriter:
    """Collects the rules of one grammar. `added_tokens` are the vocabulary entries that are tokens of their own."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._added_tokens = added_tokens
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: dict[str, str] = {}

    def rule(self, name: str, expression: str) -> str:
        """Adds a rule; returns its name, which may be numbered to be unique. `name` may end in an attribute,
        like `text[lazy]`."""
        stem, bracket, attribute = name.partition("[")
        unique = self.declare(stem)
        self._rules[unique] = f"{unique}{bracket}{attribute}: {expression}"
        return unique

    def declare(self, name: str) -> str:
        """The unique name of a rule that `define` will add: it may name itself then."""
        unique = f"{name}_{len(self._rules)}"
        self._rules[unique] = ""
        return unique

    def define(self, name: str, expression: str) -> None:
        self._rules[name] = f"{name}: {expression}"

    def text(self, start: str) -> str:
        """The grammar, beginning at the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules.values()])

    def literal(self, text: str) -> str:
        """Exactly `text`. Added tokens in it are matched as the tokens that they are: a model was not trained on
        their spelling in other tokens, and llguidance does not find them in quoted text."""
        pieces: list[str] = []
        end = 0
        for match in self._added.finditer(text):
            pieces += _quoted(text[end : match.start()])
            pieces.append(f"<[{self._added_tokens[match.group()]}]>")
            end = match.end()
        return " ".join(pieces + _quoted(text[end:])) or '""'

    def one_of(self, texts: Iterable[str]) -> str:
        """Exactly one of `texts`, of which there may be thousands: those without added tokens are one terminal, since
        llguidance follows only 2000 alternatives of a rule."""
        plain: list[str] = []
        others: list[str] = []
        for text in texts:
            (others if not text or self._added.search(text) else plain).append(text)
        expressions = [self.literal(text) for text in others]
        if plain:
            expressions.append(self.rule("TEXT", " | ".join(map(json.dumps, plain))))
        return alternatives(expressions)

    def begins_with_added_token(self, text: str) -> bool:
        return self._added.match(text) is not None

    def text_until(self, end: str, text: str = ANY_TEXT) -> str:
        """What matches `text`, up to where `end` first stands, and `end`."""
        if self.begins_with_added_token(end):
            return f"{self.rule('TEXT', text)} {self.literal(end)}"
        return self.rule("text[lazy]", f"{text} {self.literal(end)}")


def _quoted(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def alternatives(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def json_options(whitespace_pattern: str | None) -> dict[str, Any]:
    """llguidance's options for what may stand between the tokens of JSON: None is usual printing, empty nothing."""
    if whitespace_pattern == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": _USUAL_WHITESPACE if whitespace_pattern is None else whitespace_pattern}


def json_expression(schema: Any, options: Mapping[str, Any]) -> str:
    """An expression for JSON that fits the schema, with llguidance's `options`."""
    schema = {**keep_bounds(schema), "x-guidance": options} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(schema)}"
