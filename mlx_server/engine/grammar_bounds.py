"""How long what describes an output may be. Compiling it takes time and stack in proportion to its length, at best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_server.errors import InvalidRequestError

MAX_SOURCE_CHARS = 128 * 1024
"""Of any constraint. Grammars nest as deep as they are long, and compiling them recurses."""

MAX_GRAMMAR_CHARS = 32 * 1024
"""Of Lark and GBNF, whose terminals are regexes, too."""

MAX_REGEX_CHARS = 8 * 1024
"""Of a regex, or of all patterns in a schema: 8 Ki of `a?` take 30 MiB, 32 Ki half a gigabyte, and so on."""

_PATTERNS = frozenset(("pattern", "regex", "whitespace_pattern", "item_separator", "key_separator"))


def check_length(text: str, limit: int, where: str) -> None:
    """Raises `InvalidRequestError` for a text that is longer than the limit."""
    if len(text) > limit:
        raise InvalidRequestError(f"{where} has {len(text)} characters; the most is {limit}.", where)


def check_patterns(value: Any, where: str) -> None:
    """The same for all the patterns together in a schema or structural tag, whatever else is wrong with it."""
    num_chars = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            num_chars += sum(len(text) for key, text in item.items() if key in _PATTERNS and isinstance(text, str))
            named = item.get("patternProperties")
            num_chars += sum(map(len, named)) if isinstance(named, Mapping) else 0
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    if num_chars > MAX_REGEX_CHARS:
        raise InvalidRequestError(
            f"The patterns in {where} have {num_chars} characters; the most is {MAX_REGEX_CHARS}.", where
        )
