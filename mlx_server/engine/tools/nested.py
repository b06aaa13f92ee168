"""Lists and objects in tags (MiniMax M3): `<at><x>1</x></at>` is the argument `at`, `{"x": 1}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlx_server.engine.tools.formats import ITEM, Parameter
from mlx_server.engine.tools.values import ALL_KINDS, Arguments, TypeResolver, ValueTypes, inner_schema, read_value

_MAX_DEPTH = 128
MAX_TAG_CHARS = 258
"""Of a tag's slash and name, with the bracket before them."""


@cache
def tag_of(namespace: str) -> re.Pattern[str]:
    """Matches any tag: a slash before its end, and its name."""
    return re.compile(rf"{re.escape(namespace)}<(/?)([^<>\n]{{1,{MAX_TAG_CHARS - 2}}})>")


def read_tags(text: str, parameter: Parameter, schema: Any, resolver: TypeResolver) -> Any:
    """The value between an argument's tags, by its schema (None: it has none). Raises `RecursionError` and `ValueError`
    for what is nested too deeply."""
    return _Tree(tag_of(parameter.namespace).split(text), parameter.untyped, resolver).value(schema, 0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a schema says of a value, of an object's members, of those that it does not name, and of items."""

    types: ValueTypes
    members: dict[str, Any]
    others: Any
    items: Any


class _Tree:
    """`pieces` are the text before the first tag, then of each tag its slash, its name, and the text after it."""

    def __init__(self, pieces: list[str], untyped: frozenset[str], resolver: TypeResolver) -> None:
        self._pieces = pieces
        self._untyped = untyped
        self._resolver = resolver
        self._at = 0  # a text
        self._known: dict[int, _Kind] = {}  # by the schema's identity

    def value(self, schema: Any, depth: int) -> Any:
        """Reads up to the end of the tag before `_at`, which is then the text before that end."""
        kind = self._kind(schema)
        if not self._begins():
            return _leaf(self._pieces[self._at], kind.types)
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels deep")
        kinds, first = kind.types.kinds, self._pieces[self._at + 2]
        is_list = first == ITEM and "array" in kinds and not ("object" in kinds and ITEM in kind.members)
        found = []
        while self._begins():
            name = self._pieces[self._at + 2]
            self._at += 3
            inner = kind.items if is_list else kind.members.get(name, kind.others)
            found.append((name, self.value(inner, depth + 1)))
            self._at = min(self._at + 3, len(self._pieces) - 1)
        return [value for _, value in found] if is_list else dict(found)

    def _begins(self) -> bool:
        return self._pieces[self._at + 1 : self._at + 2] == [""]

    def _kind(self, schema: Any) -> _Kind:
        if id(schema) not in self._known:
            root = self._resolver.root
            types = self._resolver.readable(schema)
            if types.kinds == ALL_KINDS:
                types = ValueTypes(self._untyped)
            inner = (inner_schema(schema, root, keyword) for keyword in ("additionalProperties", "items"))
            members = {} if schema is None else Arguments(root, schema).schemas
            self._known[id(schema)] = _Kind(types, members, *inner)
        return self._known[id(schema)]


def _leaf(text: str, types: ValueTypes) -> Any:
    """A value without tags; lists and objects without content have none."""
    if not text.strip() and "string" not in types.kinds:
        return [] if "array" in types.kinds else {} if "object" in types.kinds else read_value(text, types)
    return read_value(text, types)
