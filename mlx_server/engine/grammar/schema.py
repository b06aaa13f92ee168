"""Clients' schemas: limits on length and depth, validation, workarounds for llguidance, and what clients mean: an
object has the listed members only, and a tagged union has its tag.

Compiling a grammar takes time and stack in proportion to its length, at best.

JSON Schema lets an object have any members besides the listed ones, unless the schema forbids it. A small model that
may invent members keeps inventing them, so here a schema that says nothing about other members is closed:

    {"properties": {"a": {}}}                              gets "additionalProperties": false
    {"properties": {"a": {}}, "patternProperties": ...}    stays as it is

If several schemas describe one object together, they are closed only once, in the schema that combines them. Each of
them alone must allow the members of the others:

    {"allOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]}
    gets "properties": {"a": true, "b": true}, "additionalProperties": false    and both branches stay open
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from math import inf
from typing import Any

from mlx_server.errors import InvalidRequestError

MAX_SOURCE_CHARS = 128 * 1024
"""For any constraint. A grammar may nest as deep as it is long, and compiling it recurses."""

MAX_GRAMMAR_CHARS = 32 * 1024
"""For Lark and GBNF, whose terminals are regexes, too."""

MAX_REGEX_CHARS = 8 * 1024
"""For a regex, or all patterns of a schema: 8 Ki characters of `a?` take 30 MiB, 32 Ki take half a gigabyte."""

_PATTERNS = frozenset(("pattern", "regex", "whitespace_pattern", "item_separator", "key_separator"))


def check_length(text: str, limit: int, where: str) -> None:
    """Raises `InvalidRequestError` if the text is longer than the limit."""
    if len(text) > limit:
        raise InvalidRequestError(f"{where} has {len(text)} characters; the most is {limit}.", where)


def check_patterns(value: Any, where: str) -> None:
    """Raises `InvalidRequestError` if all patterns of a schema or structural tag together are too long."""
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


MAX_DEPTH = 64
"""Of nested schemas; llguidance accepts little more."""

_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SCHEMAS = frozenset(("items", "additionalProperties", "not"))


def checked_schema(schema: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Returns a copy without keywords that are null, which some clients send instead of leaving them out. Raises
    `InvalidRequestError` with the path of the first part that is not a schema, or is nested too deeply."""
    if isinstance(schema, bool):
        return schema
    _expect(isinstance(schema, Mapping), where, "a JSON schema: an object, or a boolean")
    if depth == 0:
        raise InvalidRequestError(f"{where} is nested {MAX_DEPTH} schemas deep, which is the most; flatten it.", where)
    return {
        key: _checked(key, value, f"{where}.{key}", depth - 1)
        for key, value in schema.items()
        if value is not None or key == "const"
    }


def _checked(key: str, value: Any, where: str, depth: int) -> Any:
    """Checks the value of one keyword."""
    if key in _NAMED:
        _expect(isinstance(value, Mapping), where, "an object of schemas")
        return {name: checked_schema(inner, f"{where}.{name}", depth) for name, inner in value.items()}
    if key in _LISTS or (key == "items" and isinstance(value, list)):
        _expect(isinstance(value, list), where, "a list of schemas")
        return [checked_schema(inner, f"{where}[{index}]", depth) for index, inner in enumerate(value)]
    if key in _SCHEMAS:
        return checked_schema(value, where, depth)
    if key == "required":
        _expect(_is_texts(value), where, "a list of strings")
    if key == "type":
        _expect(isinstance(value, str) or _is_texts(value), where, "a string, or a list of strings")
    if key == "$ref":
        _expect(isinstance(value, str), where, "a string")
    if key == "enum":
        _expect(isinstance(value, list), where, "a list")
    return value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _expect(is_so: bool, where: str, wanted: str) -> None:
    if not is_so:
        raise InvalidRequestError(f"{where} must be {wanted}.", where)


_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords that hold values, not schemas."""


def changed_schema(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Returns a copy after `change` was applied to each schema, innermost first. Raises `RecursionError`."""
    if isinstance(schema, list):
        return [changed_schema(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema

    def inner(key: str, value: Any) -> Any:
        if key in _NAMED and isinstance(value, Mapping):
            return {name: changed_schema(below, change) for name, below in value.items()}
        return value if key in _VALUES else changed_schema(value, change)

    copy = {key: inner(key, value) for key, value in schema.items()}
    change(copy)
    return copy


_STEP = 1e-6
"""How far a bound is moved. The model cannot write the numbers in between, which it hardly ever would."""

_LARGEST = 2.0**32
"""Above this, a step may be too small to change a number."""


def keep_bounds(schema: Any) -> Any:
    """Moves those exclusive bounds inwards that llguidance treats as inclusive.

    It does so for a whole number if the other bound is less than 1 away: `{"exclusiveMinimum": 1, "maximum": 1.5}`
    would allow 1, so it becomes `{"minimum": 1.000001, "maximum": 1.5}`.
    """
    return changed_schema(schema, _move_bounds)


def _move_bounds(schema: dict[str, Any]) -> None:
    low, high = _number(schema, "exclusiveMinimum", -inf), _number(schema, "exclusiveMaximum", inf)
    lower, upper = max(low, _number(schema, "minimum", -inf)), min(high, _number(schema, "maximum", inf))
    if upper - lower >= 1:
        return
    if low == lower and float(low).is_integer():
        del schema["exclusiveMinimum"]
        schema["minimum"] = low + _STEP
    if high == upper and float(high).is_integer():
        del schema["exclusiveMaximum"]
        schema["maximum"] = high - _STEP


def _number(schema: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = schema.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return otherwise
    return value if abs(value) < _LARGEST else otherwise


_SAYS_ITSELF = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "const", "enum", "if", "dependentSchemas")
)
"""Keywords by which a schema itself says which members an object may have besides its `properties`."""

_BRANCHES = ("allOf", "anyOf", "oneOf")
_INNER = frozenset(("items", "prefixItems", "additionalProperties"))
"""Keywords that hold schemas. `not` is left out: closing the schema in it would allow more values."""


def adapted_schema(schema: Any, *, is_closed: bool) -> Any:
    """Returns a copy of a whole schema with its tags required, and closed if `is_closed`. Raises `RecursionError`."""
    return _with_tags(_Closing(schema).copy(schema, "#", "") if is_closed else schema)


def _with_tags(schema: Any) -> Any:
    """Returns a copy of a whole schema in which each branch of a `oneOf` with a `discriminator` requires the tag:
    without the tag the branch is unknown, and pydantic refuses the value. The `oneOf` becomes an `anyOf`, which
    llguidance always supports. Raises `RecursionError`."""

    tags: dict[str, str] = {}  # by the branch's path, since llguidance ignores keywords next to a circular $ref

    def find(inner: Any, path: str, key: str) -> Any:
        if isinstance(inner, Mapping):
            discriminator = inner.get("discriminator")
            tag = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
            for index, branch in enumerate(inner.get("oneOf", ()) if isinstance(tag, str) else ()):
                tags[_reference(branch) or f"{path}/oneOf/{index}"] = str(tag)
            _copied(inner, path, find)
        return inner

    def require(inner: Any, path: str, key: str) -> Any:
        if not isinstance(inner, Mapping):
            return inner
        copy = _copied(inner, path, require)
        if "oneOf" in copy and "anyOf" not in copy and copy.pop("discriminator", None) is not None:
            copy["anyOf"] = copy.pop("oneOf")  # the tags make the branches exclusive
        tag = tags.get(path)
        if tag is not None and tag in copy.get("properties", ()):
            copy["required"] = list(dict.fromkeys((*copy.get("required", ()), tag)))
        return copy

    return require(find(schema, "#", ""), "#", "")


def check_references(root: Any) -> None:
    """Raises `ValueError` if a reference leads only to itself, and `RecursionError`.

    No value fits `{"$ref": "#/$defs/a"}` if `a` is `{"$ref": "#/$defs/a"}`, or has it in an `allOf`, in all branches of
    an `anyOf` or `oneOf`, or in a member or item that each value of it must have. llguidance notices it only when an
    output has come there, or lets the output nest without end. Lists and trees that may end are fine.
    """
    found: dict[str, _Need] = {}
    references: list[str] = []
    waiting: dict[str, list[_Need]] = {}  # by a reference, what needs a value of it

    def refer(reference: str, need: _Need | None) -> None:
        if need is not None:
            need.num_missing += 1
            waiting.setdefault(reference, []).append(need)
        if reference not in found:
            found[reference] = _Need(None, reference)
            references.append(reference)

    changed_schema(root, lambda schema: None if (one := _reference(schema)) is None else refer(one, None))
    for reference in references:  # grows: they may be in values that something refers to
        _add_needs(referenced(root, reference), found[reference], refer)
    ended = [one for one in found.values() if not one.num_missing]
    ends: set[str] = set()  # references that a finite value fits
    while ended:
        one = ended.pop()
        if one.above is None:
            ends.add(one.reference)
        for other in waiting.pop(one.reference, ()) if one.above is None else (one.above,):
            other.num_missing -= 1
            if other.num_missing == 0:
                ended.append(other)
    chain: set[str] = set()
    loose = [reference for reference in found if reference not in ends][:1]
    for reference in loose:  # follows it until it comes back
        if reference in chain:
            raise ValueError(f"the reference {reference} leads only to itself, so no value can fit it")
        chain.add(reference)
        loose += list(_hindrances(referenced(root, reference), ends))[:1]


@dataclass(slots=True, eq=False)
class _Need:
    """How many parts of a schema lack a finite value. The schema is the target of `reference`, or else an `anyOf` or
    `oneOf`, of which one branch is enough, or a branch, within what is `above`."""

    above: _Need | None
    reference: str = ""
    num_missing: int = 0


def _add_needs(schema: Any, need: _Need, refer: Callable[[str, _Need], None]) -> None:
    """Adds what the schema needs, as long as no reference has a value; calls `refer` for each reference."""
    for part in _all_of(schema):
        _add_needs(part, need, refer)
    for key in ("anyOf", "oneOf"):
        either = _Need(need)
        branches = [_Need(either) for _ in _listed(schema, key)]
        for branch, own in zip(_listed(schema, key), branches, strict=True):
            _add_needs(branch, own, refer)
        if branches and all(own.num_missing for own in branches):
            either.num_missing = 1
            need.num_missing += 1
    if (reference := _reference(schema)) is not None:
        refer(reference, need)


def _hindrances(schema: Any, ends: Set[str]) -> dict[str, None]:
    """References of which one must end before a finite value can fit the schema; none if one can already."""
    for part in _all_of(schema):
        if hindrances := _hindrances(part, ends):
            return hindrances
    for key in ("anyOf", "oneOf"):
        branches = [_hindrances(branch, ends) for branch in _listed(schema, key)]
        if branches and all(branches):
            return {reference: None for branch in branches for reference in branch}
    reference = _reference(schema)
    return {} if reference is None or reference in ends else {reference: None}


def _all_of(schema: Any) -> Iterator[Any]:
    """The schemas that each value of `schema` must fit, in whole or with a part of it."""
    yield from _listed(schema, "allOf")
    if not isinstance(schema, Mapping):
        return
    properties, least = schema.get("properties"), schema.get("minItems")
    if schema.get("type") in ("object", ["object"]) and isinstance(properties, Mapping):
        required = {name for name in _listed(schema, "required") if isinstance(name, str)}
        yield from (value for name, value in properties.items() if name in required)
    if schema.get("type") in ("array", ["array"]) and isinstance(least, int | float):
        first = _listed(schema, "prefixItems")
        yield from (item for index, item in enumerate(first) if index < least)
        if least > len(first):
            yield schema.get("items")


def _listed(schema: Any, key: str) -> list[Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return reference if isinstance(reference, str) else None


class _Closing:
    """`_parts` are the references to schemas that describe an object only in part."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: set[str] = set()
        self._find_parts(root, "#", "")

    def copy(self, schema: Any, path: str, key: str) -> Any:
        """`key` is the keyword that holds the schema; `allOf` if the schema is a part."""
        if not isinstance(schema, Mapping):
            return schema
        is_part = key == "allOf" or path in self._parts
        meets = is_part or _meets(schema)

        def inner(below: Any, place: str, where: str) -> Any:
            is_branch = where in _BRANCHES
            return self.copy(below, place, ("allOf" if meets else "anyOf") if is_branch else where)

        copy = _copied(schema, path, inner)
        if not is_part and (meets or "properties" in schema or _reference(schema) in self._parts):
            self._close(schema, copy)
        return copy

    def _close(self, schema: Mapping[str, Any], copy: dict[str, Any]) -> None:
        rest = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
        match schema.get("unevaluatedProperties", False):
            case True:
                del copy["unevaluatedProperties"]
                copy.setdefault("additionalProperties", True)
            case False if (names := self._names(rest, set())) is not None and (names or "properties" in schema):
                copy.pop("unevaluatedProperties", None)
                listed = copy.get("properties", {})
                copy["properties"] = {**listed, **{name: True for name in names if name not in listed}}
                copy["additionalProperties"] = False

    def _names(self, schema: Any, seen: set[str]) -> dict[str, None] | None:
        """The names of all members that a schema lists; None if it allows others on purpose."""
        if not isinstance(schema, Mapping):
            return {}
        if not _SAYS_ITSELF.isdisjoint(schema):
            return None
        names = dict.fromkeys((*schema.get("properties", ()), *schema.get("required", ())))
        branches = [branch for key in _BRANCHES for branch in schema.get(key, ())]
        reference = _reference(schema)
        if reference is not None and reference not in seen:
            seen.add(reference)
            branches.append(referenced(self._root, reference))
        for branch in branches:
            inner = self._names(branch, seen)
            if inner is None:
                return None
            names |= inner
        return names

    def _find_parts(self, schema: Any, path: str, key: str) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        meets = key == "allOf" or _meets(schema)
        reference = _reference(schema)
        if meets and reference is not None and reference not in self._parts:
            self._parts.add(reference)
            self._find_parts(referenced(self._root, reference), reference, "allOf")
        return _copied(
            schema,
            path,
            lambda below, place, where: self._find_parts(
                below, place, ("allOf" if meets else "anyOf") if where in _BRANCHES else where
            ),
        )


def _meets(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas describe an object together. A single one in an `allOf` does not count: older versions of
    pydantic write references so."""
    own = not schema.keys().isdisjoint(("properties", "required"))
    others = sum(key in schema for key in ("anyOf", "oneOf", "$ref"))
    return "unevaluatedProperties" in schema or own + others + len(schema.get("allOf", ())) > 1


def _copied(schema: Mapping[str, Any], path: str, change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """Returns a copy in which each schema directly inside `schema` is replaced by `change(inner, path, key)`."""
    copy = dict(schema)
    for key, value in schema.items():
        below = f"{path}/{key}"
        if key in _NAMED and isinstance(value, Mapping):
            copy[key] = {name: change(inner, f"{below}/{_escaped(name)}", key) for name, inner in value.items()}
        elif key in _INNER or key in _BRANCHES:
            if isinstance(value, list):
                copy[key] = [change(inner, f"{below}/{index}", key) for index, inner in enumerate(value)]
            else:
                copy[key] = change(value, below, key)
    return copy


def _escaped(name: str) -> str:
    """Escapes a name for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def referenced(root: Any, reference: str) -> Any:
    """The target of a reference within the schema; for any other reference, a schema with unknown members."""
    if reference != "#" and not reference.startswith("#/"):
        return _UNKNOWN
    target = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and len(name) < 10 and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return _UNKNOWN
    return target


_UNKNOWN = {"additionalProperties": True}
