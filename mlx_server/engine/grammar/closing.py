"""Schemas as they are meant: objects have the members that are listed, and a tagged union has its tag.

JSON Schema lets an object have any members beside those that its schema lists, unless it says that it may not. A small
model that may invent members goes on doing so, so a schema that is silent counts as closed here:

    {"properties": {"a": {}}}                    gets "additionalProperties": false
    {"properties": {"a": {}}, "patternProperties": ...}, or with any other word on the matter, stays as it is

What several schemas say of one object together is closed once, where they meet. Each of them alone must let the others'
members pass:

    {"allOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]}
    gets "properties": {"a": true, "b": true}, "additionalProperties": false    and both branches stay open
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SAYS_ITSELF = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "const", "enum", "if", "dependentSchemas")
)
"""Keywords of a schema that says which members there are beside its `properties`."""

_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_BRANCHES = ("allOf", "anyOf", "oneOf")
_INNER = frozenset(("items", "prefixItems", "additionalProperties"))
"""Where schemas stand within a schema. In `not`, the fewest are the most: what stands there is left alone."""


def adapted_schema(schema: Any, *, is_closed: bool) -> Any:
    """A copy of a whole schema with its tags required, and closed if asked for. Raises `RecursionError`."""
    return with_tags(closed_schema(schema) if is_closed else schema)


def closed_schema(schema: Any) -> Any:
    """A copy of a whole schema in which objects have no members that it does not name. `unevaluatedProperties`, where
    it says that, is replaced by it. Raises `RecursionError`."""
    return _Closing(schema).copy(schema, "#", "")


def with_tags(schema: Any) -> Any:
    """A copy of a whole schema in which each branch of a `oneOf` with a `discriminator` requires the tag: without it
    nobody can tell which branch is meant, and pydantic refuses it. The `oneOf` becomes an `anyOf`, which llguidance
    can always follow. Raises `RecursionError`."""

    tags: dict[str, str] = {}  # by the branch's path: llguidance reads nothing beside a circular reference

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
            copy["anyOf"] = copy.pop("oneOf")  # the same, where tags tell the branches apart
        if tags.get(path, "") in copy.get("properties", ()):
            copy["required"] = list(dict.fromkeys((*copy.get("required", ()), tags[path])))
        return copy

    return require(find(schema, "#", ""), "#", "")


def _reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return reference if isinstance(reference, str) else None


class _Closing:
    """`_parts` are the references to schemas that say a part of what holds for an object."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: set[str] = set()
        self._find_parts(root, "#", "")

    def copy(self, schema: Any, path: str, key: str) -> Any:
        """`key` says where the schema stands; `allOf` if it is a part."""
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
        """Of all members that a schema lists; None if it lets others pass on purpose."""
        if not isinstance(schema, Mapping):
            return {}
        if not _SAYS_ITSELF.isdisjoint(schema):
            return None
        names = dict.fromkeys((*schema.get("properties", ()), *schema.get("required", ())))
        branches = [branch for key in _BRANCHES for branch in schema.get(key, ())]
        reference = _reference(schema)
        if reference is not None and reference not in seen:
            seen.add(reference)
            branches.append(_target(self._root, reference))
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
            self._find_parts(_target(self._root, reference), reference, "allOf")
        return _copied(
            schema,
            path,
            lambda below, place, where: self._find_parts(
                below, place, ("allOf" if meets else "anyOf") if where in _BRANCHES else where
            ),
        )


def _meets(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas say together what holds for an object. One alone in an `allOf`, as older versions of
    pydantic write references, does not."""
    own = not schema.keys().isdisjoint(("properties", "required"))
    others = sum(key in schema for key in ("anyOf", "oneOf", "$ref"))
    return "unevaluatedProperties" in schema or own + others + len(schema.get("allOf", ())) > 1


def _copied(schema: Mapping[str, Any], path: str, change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """A copy with `change(inner, path, key)` in the place of each schema that stands in `schema`."""
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
    """As a JSON pointer has it (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _target(root: Any, reference: str) -> Any:
    """What a reference within the schema points at; a schema of unknown members for any other."""
    if not reference.startswith("#"):
        return _UNKNOWN
    target = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return _UNKNOWN
    return target


_UNKNOWN = {"additionalProperties": True}
