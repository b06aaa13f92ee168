"""Arguments between tags: which types their values may have by the function's schema, and what a text means.

Such formats write texts without quotes, so `12` is a number or a text as the schema says.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any

from mlx_server.engine.grammar.schema import referenced

TEXT = frozenset(("string",))
STRUCTURES = frozenset(("string", "null", "array", "object"))
ALL_KINDS = STRUCTURES | {"boolean", "integer", "number"}
_MAX_DEPTH = 128


@dataclass(frozen=True, slots=True)
class ValueTypes:
    """What a schema lets a value be: JSON's types (with `number`, `integer` as well), and the only strings; None allows
    any."""

    kinds: frozenset[str]
    texts: tuple[str, ...] | None = None


_ANYTHING = ValueTypes(ALL_KINDS)
_NOTHING = ValueTypes(frozenset(), ())

_NAMES = {
    "number": frozenset(("number", "integer")),
    "float": frozenset(("number", "integer")),
    "int": frozenset(("integer",)),
    "str": TEXT,
    "text": TEXT,
    "bool": frozenset(("boolean",)),
    "list": frozenset(("array",)),
    "dict": frozenset(("object",)),
} | {kind: frozenset((kind,)) for kind in ALL_KINDS - {"number"}}
"""Types by their names in schemas; clients also send those of Python, and capitals."""


class Arguments:
    """The arguments that a function's schema lists itself, through `$ref` and `allOf`, and in branches of `anyOf` and
    `oneOf`. Those of several branches may be given together; `required` are those that all of them require. One that is
    listed several times may be any of these, but what the schema around them says of it comes first. Branches that are
    no objects do not count.

    Raises `RecursionError`.
    """

    def __init__(self, root: Any, schema: Any = None) -> None:
        """`schema` is a part of `root` that lists them; None: all of it."""
        self._root = root
        self._listed: dict[str, dict[int, Any]] = {}  # by the argument's name and the schema's identity
        self._known: dict[str, set[str]] = {}  # what the targets of references require
        self._types = TypeResolver(root)
        self.required = self._add(root if schema is None else schema)

    @property
    def schemas(self) -> dict[str, Any]:
        return {key: _any_of(list(found.values())) for key, found in self._listed.items()}

    def _add(self, schema: Any, told: frozenset[str] = frozenset()) -> set[str]:
        """Adds what the schema lists, and returns the names of the arguments that it requires. `told`: of which
        arguments the schemas around it say something."""
        if not isinstance(schema, Mapping):
            return set()
        listed = schema.get("properties")
        properties = listed if isinstance(listed, Mapping) else {}
        for key, value in properties.items():
            if key not in told:
                self._listed.setdefault(key, {})[id(value)] = value
        add = partial(self._add, told=told.union(key for key, value in properties.items() if _is_telling(value)))
        required = {name for name in _items(schema, "required") if isinstance(name, str)}
        required |= set[str]().union(*map(add, _items(schema, "allOf")))
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = set()  # within itself: a circle adds nothing
                self._known[reference] = add(referenced(self._root, reference))
            required |= self._known[reference]
        for key in ("anyOf", "oneOf"):
            branches = [add(branch) for branch in _items(schema, key) if "object" in self._types.types(branch).kinds]
            required |= set.intersection(*branches) if branches else set()
        return required


def keywords(schema: Any, root: Any) -> set[str]:
    """All that the schema says of a value itself, with the schemas that it refers to in `root`."""
    return set[str]().union(*_parts_of(schema, root))


def inner_schema(schema: Any, root: Any, keyword: str) -> Any:
    """What the schema says under `items` or `additionalProperties` of all that has no name; None if that is nothing."""
    found = [part[keyword] for part in _parts_of(schema, root) if isinstance(part.get(keyword), Mapping)]
    return _any_of(found) if found else None


def _parts_of(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """The schema, and those that it combines or refers to in `root`."""
    seen, parts = set[str](), [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for key in ("allOf", "anyOf", "oneOf"):
            parts += _items(part, key)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts.append(referenced(root, reference))


def _any_of(schemas: list[Any]) -> Any:
    telling = [schema for schema in schemas if _is_telling(schema)]
    return {"anyOf": telling} if len(telling) > 1 else (telling or schemas)[0]


def _is_telling(schema: Any) -> bool:
    """Whether it says more than that there is an argument."""
    return schema is not True and schema != {}


def _items(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


class ParameterTypes:
    """The types of the arguments in calls of `tools`, whose parameters may be anything. Finds each once: schemas may be
    large, and outputs long."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Any] = {}
        for tool in tools:
            self._schemas.setdefault(tool["function"]["name"], tool["function"].get("parameters"))
        self._functions: dict[str, tuple[Mapping[str, Any], TypeResolver]] = {}
        self._known: dict[tuple[str, str], ValueTypes] = {}

    def of(self, function: str, key: str) -> ValueTypes:
        """Anything for an argument that is not declared."""
        if (function, key) not in self._known:
            try:
                schema, resolver = self.schema_of(function, key)
                types = resolver.readable(schema)
            except RecursionError:
                types = _ANYTHING
            self._known[function, key] = types
        return self._known[function, key]

    def schema_of(self, function: str, key: str) -> tuple[Any, TypeResolver]:
        """An argument's schema (None if it is not declared), and what finds its types. Raises `RecursionError`."""
        schemas, resolver = self._function(function)
        return schemas.get(key), resolver

    def keys(self, function: str) -> Container[str]:
        """The names of the function's arguments; none if the schema is nested too deeply."""
        try:
            return self._function(function)[0]
        except RecursionError:
            return ()

    def _function(self, name: str) -> tuple[Mapping[str, Any], TypeResolver]:
        if name not in self._functions:
            root = self._schemas.get(name)
            self._functions[name] = Arguments(root).schemas, TypeResolver(root)
        return self._functions[name]


class TypeResolver:
    """Finds what parts of the schema `root` allow. Follows each reference once."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._known: dict[str, ValueTypes] = {}

    def whole(self, schema: Any) -> ValueTypes:
        """The types that `schema` allows: anything if it does not say, or contradicts itself. Raises
        `RecursionError`."""
        types = self.types(schema)
        return types if types.kinds else _ANYTHING

    def readable(self, schema: Any) -> ValueTypes:
        """The same for values that are read: anything for no schema, and OpenAPI's `nullable` counts, too. Raises
        `RecursionError`."""
        types = _ANYTHING if schema is None else self.whole(schema)
        return ValueTypes(types.kinds | {"null"}, types.texts) if member(schema, "nullable") is True else types

    def types(self, schema: Any) -> ValueTypes:
        return reduce(_both, self._parts(schema), _ANYTHING)

    def _parts(self, schema: Any) -> Iterator[ValueTypes]:
        """What each keyword allows."""
        types, reference = member(schema, "type"), member(schema, "$ref")
        if isinstance(types, str):
            yield _named(types)
        elif isinstance(types, list):
            yield _either(map(_named, types))
        if isinstance(member(schema, "enum"), list):
            yield _either(map(_constant, schema["enum"]))
        if isinstance(schema, Mapping) and "const" in schema:
            yield _constant(schema["const"])
        if isinstance(reference, str):
            yield self._referenced(reference)
        for key in ("anyOf", "oneOf"):
            if isinstance(member(schema, key), list):
                yield _either(map(self.types, schema[key]))
        if isinstance(member(schema, "allOf"), list):
            yield from map(self.types, schema["allOf"])

    def _referenced(self, reference: str) -> ValueTypes:
        if reference not in self._known:
            self._known[reference] = _NOTHING  # within itself: a circle adds nothing
            self._known[reference] = self.types(referenced(self.root, reference))
        return self._known[reference]


def _either(choices: Iterable[ValueTypes]) -> ValueTypes:
    parts = list(choices)
    kinds = frozenset[str]().union(*(part.kinds for part in parts))
    if any(part.texts is None for part in parts):
        return ValueTypes(kinds)
    return ValueTypes(kinds, tuple(dict.fromkeys(text for part in parts for text in part.texts or ())))


def _both(one: ValueTypes, other: ValueTypes) -> ValueTypes:
    kinds, texts = one.kinds & other.kinds, other.texts if one.texts is None else one.texts
    if one.texts is not None and other.texts is not None:
        allowed = set(other.texts)
        texts = tuple(text for text in one.texts if text in allowed)
    return ValueTypes(kinds - TEXT if texts == () else kinds, texts)


def _named(name: Any) -> ValueTypes:
    kinds = _NAMES.get(name.lower(), ALL_KINDS) if isinstance(name, str) else ALL_KINDS
    return ValueTypes(kinds, None if "string" in kinds else ())


def _constant(value: Any) -> ValueTypes:
    kinds = {kind_of(value), "number"} if isinstance(value, float) else {kind_of(value)}
    return ValueTypes(frozenset(kinds), (value,) if isinstance(value, str) else ())


def kind_of(value: Any) -> str:
    """JSON's type of the value; `integer` for whole numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case dict():
            return "object"
    return "none of JSON's"


def read_value(text: str, types: ValueTypes) -> Any:
    """What `text` means: a value of one of the types, in JSON's notation, otherwise the text itself. Where not every
    text may be given, Python's notation counts, too, and words in any case; and where none may be, null."""
    if types.kinds != TEXT and text not in (types.texts or ()):
        for value in _values(text.strip(), is_strict="string" in types.kinds and types.texts is None):
            kind = kind_of(value)
            if (kind in types.kinds and kind != "string") or (kind == "null" and "string" not in types.kinds):
                return int(value) if kind == "integer" and "number" not in types.kinds else value
    return text


def _values(text: str, *, is_strict: bool) -> Iterator[Any]:
    yield _WORDS.get(text, text) if is_strict else _LOWER_WORDS.get(text.lower(), text)
    for read in _READERS[:1] if is_strict else _READERS:
        try:
            value = read(text)
            json_text(value)
        except Exception:  # whatever a reader raises, the text is no such value
            continue
        yield value


_WORDS = {"True": True, "False": False, "None": None, "null": None}
_LOWER_WORDS = {word.lower(): value for word, value in _WORDS.items()}
_READERS: tuple[Callable[[str], Any], ...] = (lambda text: json.loads(text, strict=False), ast.literal_eval)


def json_text(value: Any) -> str:
    """The value as JSON. Raises `ValueError` for what JSON can spell but not write again, or clients cannot send back:
    `1e999`, half of a surrogate pair, or more than `_MAX_DEPTH` levels."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    level, depth = [value], 0
    while level:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level, depth = list(chain.from_iterable(inner)), depth + 1
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels deep")
    return text


def read_arguments(written: str) -> Any:
    """A call's arguments. Those that are not JSON (the answer was cut off), or that JSON cannot write again, are under
    the key `invalid_json`: a client that sends its conversation back must be able to continue."""
    try:
        arguments = json.loads(written)
        json_text(arguments)
    except (ValueError, RecursionError):
        return {"invalid_json": written}
    return arguments


def member(value: Any, key: str) -> Any:
    """`value[key]` of a part of a client's schema, which may be anything; None if it has no such member."""
    return value.get(key) if isinstance(value, Mapping) else None
