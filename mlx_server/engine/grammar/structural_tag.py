"""Structural tags: free text in which certain tags, once begun, must have content that fits their schemas.

Clients use two forms. The older one lists `structures` and `triggers`; the one of XGrammar and vLLM has a `format`,
which nests. The older form is read as the newer one's `triggered_tags`. `LarkWriter` and the functions after it write
grammars in llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_server.engine.grammar.schema import check_references, keep_bounds
from mlx_server.engine.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"
"""Matches any text, but no added token."""

_USUAL_WHITESPACE = r" |\n{1,2}[ \t]{0,40}"
"""What printed JSON needs. JSON allows unlimited white space, but small models would then never stop writing it."""


class LarkWriter:
    """Collects the rules of one grammar. `added_tokens` are the ids of the tokenizer's added tokens."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._added_tokens = added_tokens
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def rule(self, name: str, expression: str) -> str:
        """Adds a rule, unless there is an equal one, and returns its name: `name` with a number that makes it unique.
        `name` may end in an attribute, like `text[lazy]`."""
        if (name, expression) not in self._names:
            stem, bracket, attribute = name.partition("[")
            self._names[name, expression] = unique = self.declare(stem)
            self._rules[unique] = f"{unique}{bracket}{attribute}: {expression}"
        return self._names[name, expression]

    def declare(self, name: str) -> str:
        """Returns the unique name of a rule that `define` adds later, so that the rule can refer to itself."""
        unique = f"{name}_{len(self._rules)}"
        self._rules[unique] = ""
        return unique

    def define(self, name: str, expression: str) -> None:
        self._rules[name] = f"{name}: {expression}"

    def text(self, start: str) -> str:
        """Returns the grammar that starts with the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules.values()])

    def literal(self, text: str) -> str:
        """Matches exactly `text`. Added tokens in it are matched as single tokens: models were not trained on their
        spelling in other tokens, and llguidance does not find them in quoted text."""
        pieces: list[str] = []
        end = 0
        for match in self._added.finditer(text):
            pieces += _quoted(text[end : match.start()])
            pieces.append(f"<[{self._added_tokens[match.group()]}]>")
            end = match.end()
        return " ".join(pieces + _quoted(text[end:])) or '""'

    def one_of(self, texts: Iterable[str]) -> str:
        """Matches exactly one of `texts`. There may be thousands, but llguidance allows only 2000 alternatives in a
        rule, so all texts without added tokens become one terminal."""
        plain: list[str] = []
        others: list[str] = []
        for text in texts:
            (others if not text or self._added.search(text) else plain).append(text)
        expressions = [self.literal(text) for text in others]
        if plain:
            expressions.append(self.rule("TEXT", " | ".join(map(json.dumps, plain))))
        return alternatives(expressions)

    def first_token(self, text: str) -> str:
        """The added token with which `text` begins; empty if there is none."""
        found = self._added.match(text)
        return "" if found is None else found[0]

    def text_until(self, end: str, text: str = ANY_TEXT) -> str:
        """Matches `text` up to the first `end`, and that `end`."""
        if self.first_token(end):
            return f"{self.rule('TEXT', text)} {self.literal(end)}"
        return self.rule("text[lazy]", f"{text} {self.literal(end)}")


def _quoted(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def terminal(regex: str) -> str:
    """Writes a regex as Lark needs it: between slashes, on one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\.|/|\n", lambda found: written.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"


def alternatives(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def json_options(whitespace_pattern: str | None) -> dict[str, Any]:
    """llguidance's options for white space in JSON: None means usual printing, an empty pattern none at all."""
    if whitespace_pattern == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": _USUAL_WHITESPACE if whitespace_pattern is None else whitespace_pattern}


def json_expression(schema: Any, options: Mapping[str, Any]) -> str:
    """Matches JSON that fits the schema, with llguidance's `options`."""
    schema = {**keep_bounds(schema), "x-guidance": options} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(schema)}"


def structural_tag_grammar(tag: Mapping[str, Any], tokenizer: Tokenizer, json_options: Mapping[str, Any]) -> str:
    """The Lark grammar of a structural tag. Raises `ValueError` that says what is wrong with the tag."""
    converter = _Converter(LarkWriter(tokenizer.added_tokens), json_options)
    if "format" in tag:
        return converter.writer.text(converter.expression(tag["format"]))
    structures = _need(tag, "structures", list)
    tags = [
        {
            "begin": _need(structure, "begin", str),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _need(structure, "end", str),
        }
        for structure in structures
    ]
    return converter.writer.text(
        converter.expression({"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags})
    )


class _Converter:
    """Writes the `format` items of one structural tag as expressions."""

    def __init__(self, writer: LarkWriter, json_options: Mapping[str, Any]) -> None:
        self.writer = writer
        self._json_options = json_options
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, item: Any) -> str:
        """The Lark expression of one `format`."""
        kind = _need(item, "type", str)
        if kind not in self._kinds:
            raise ValueError(f"format type {kind!r} is not one of {', '.join(self._kinds)}")
        return self._kinds[kind](item)

    def _const_string(self, item: Mapping[str, Any]) -> str:
        return self.writer.literal(_need(item, "value", str))

    def _json_schema(self, item: Mapping[str, Any]) -> str:
        schema = item.get("json_schema", {})
        check_references(schema)
        return json_expression(schema, self._json_options)

    def _regex(self, item: Mapping[str, Any]) -> str:
        return self.writer.rule("REGEX", terminal(_need(item, "pattern", str)))

    def _any_text(self, item: Mapping[str, Any]) -> str:
        return self.writer.rule("TEXT", ANY_TEXT)

    def _sequence(self, item: Mapping[str, Any]) -> str:
        return " ".join([f"({self.expression(element)})" for element in _need(item, "elements", list)])

    def _or(self, item: Mapping[str, Any]) -> str:
        return alternatives([self.expression(element) for element in _need(item, "elements", list)])

    def _tag(self, item: Mapping[str, Any]) -> str:
        begin, end = _need(item, "begin", str), _need(item, "end", str)
        return f"{self.writer.literal(begin)} {self._content(item, end)}"

    def _content(self, item: Mapping[str, Any], end: str) -> str:
        """Matches a tag's content and its end. Text ends at the first `end`."""
        content = _need(item, "content", dict)
        if content.get("type") == "any_text" and end:
            return self.writer.text_until(end)
        return f"{self.expression(content)} {self.writer.literal(end)}"

    def _triggered_tags(self, item: Mapping[str, Any]) -> str:
        text = self.writer.rule("TEXT", ANY_TEXT)
        triggered = []
        for trigger in _need(item, "triggers", list):
            if not isinstance(trigger, str) or not trigger:
                raise ValueError(f"a trigger must be a non-empty string, not {trigger!r}")
            tags = [tag for tag in _need(item, "tags", list) if _need(tag, "begin", str).startswith(trigger)]
            if not tags:
                raise ValueError(f"no tag begins with the trigger {trigger!r}")
            triggered.append(self._triggered(trigger, tags))
        tag = alternatives(triggered)
        if item.get("stop_after_first"):
            return tag if item.get("at_least_one") else f"({tag} | {text})"
        return f"{tag}{'+' if item.get('at_least_one') else '*'} {text}"

    def _triggered(self, trigger: str, tags: list[Any]) -> str:
        """Matches free text up to the trigger, and the rest of one of the tags that begin with it."""
        rests = alternatives(
            [
                f"{self.writer.literal(tag['begin'][len(trigger) :])} {self._content(tag, _need(tag, 'end', str))}"
                for tag in tags
            ]
        )
        return f"{self.writer.text_until(trigger)} {rests}"

    def _tags_with_separator(self, item: Mapping[str, Any]) -> str:
        tag = alternatives([self._tag(tag) for tag in _need(item, "tags", list)])
        if item.get("stop_after_first"):
            tags = tag
        else:
            tags = f"{tag} ({self.writer.literal(_need(item, 'separator', str))} {tag})*"
        return tags if item.get("at_least_one") else f"({tags})?"


def _need(item: Any, name: str, kind: type) -> Any:
    if not isinstance(item, Mapping) or not isinstance(item.get(name), kind):
        raise ValueError(f"a structural tag needs {name}, a {kind.__name__}")
    return item[name]
