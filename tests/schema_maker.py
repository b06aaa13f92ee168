"""Makes JSON schemas of many kinds, reproducibly, and small enough that a small model can fill them in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.structured_schemas import UNSUPPORTED_SCHEMAS, obj

Schema = dict[str, Any]
Maker = Callable[[random.Random], Schema]

NAMES = ("name", "age", "city", "kind", "ok", "price", "tags", "note", "x y", "größe", "a.b", "id")
WORDS = ("red", "green", "dark blue", "naïve", "日本", 'quo"te', "a\\b", "yes", "no", "🙂")
PATTERNS = (
    "^[A-Z]{2}-[0-9]{4}$",
    "^(yes|no|may(be)?)$",
    "^#[0-9a-f]{6}$",
    "^[a-z]{2,8}@[a-z]{2,8}[.]com$",
    "^v[0-9]{1,2}([.][0-9]{1,2}){2}$",
    "^[A-Z][a-z]{1,7}( [A-Z][a-z]{1,7})?$",
    "^\\+[0-9]{2} [0-9]{4,8}$",
    "^(0|[1-9][0-9]?)%$",
)
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "duration", "hostname")


class Made(NamedTuple):
    """A schema. `reason` is a word of the error if it must be refused, else None."""

    name: str
    schema: Schema
    reason: str | None


def string(rng: random.Random) -> Schema:
    least = rng.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(1, 8)}


def pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def formatted(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def integer(rng: random.Random) -> Schema:
    low = rng.randint(-200, 200)
    high = low + rng.randint(0, 2000)
    lower = rng.choice(({"minimum": low}, {"exclusiveMinimum": low - 1}))
    upper = rng.choice(({"maximum": high}, {"exclusiveMaximum": high + 1}))
    return {"type": "integer", **lower, **upper}


def multiple(rng: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": rng.choice((2, 5, 10, 25)), "minimum": 0, "maximum": 1000}


def number(rng: random.Random) -> Schema:
    low = rng.choice((-1.5, 0, 0.25, 10))
    ends = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    return {"type": "number", ends[0]: low, ends[1]: low + rng.choice((0.5, 3, 99.5))}


def boolean(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def enumeration(rng: random.Random) -> Schema:
    values: list[Any] = [*rng.sample(WORDS, rng.randint(1, 4)), *rng.sample((1, 2.5, True, None, [1], {"a": "b"}), 2)]
    return {"enum": values}


def constant(rng: random.Random) -> Schema:
    return {"const": rng.choice((rng.choice(WORDS), 7, -0.5, False, None, [1, "a"], {"a": {"b": []}}))}


def several_types(rng: random.Random) -> Schema:
    return {"type": rng.sample(("boolean", "null", "integer"), 2), "minimum": 0, "maximum": 99}


LEAVES: tuple[Maker, ...] = (
    *(string, pattern, formatted, integer, multiple, number, boolean, enumeration, constant, several_types),
)


def leaf(rng: random.Random) -> Schema:
    return rng.choice(LEAVES)(rng)


def flat(rng: random.Random) -> Schema:
    return obj({name: leaf(rng) for name in rng.sample(NAMES, rng.randint(1, 3))})


def optional(rng: random.Random) -> Schema:
    names = rng.sample(NAMES, 3)
    return obj({name: leaf(rng) for name in names}, required=names[: rng.randint(0, 2)])


def nested(rng: random.Random) -> Schema:
    schema = leaf(rng)
    for name in rng.sample(NAMES, rng.randint(2, 4)):
        schema = obj({name: schema})
    return schema


def array(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    items = rng.choice((leaf, leaf, flat))(rng)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def tuple_(rng: random.Random) -> Schema:
    parts = [leaf(rng) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def any_of(rng: random.Random) -> Schema:
    return {"anyOf": [leaf(rng), flat(rng), rng.choice((array, leaf))(rng)]}


def one_of(rng: random.Random) -> Schema:
    kinds = rng.sample(("cat", "dog", "bird"), rng.randint(2, 3))
    return {"oneOf": [obj({"kind": {"const": kind}, rng.choice(NAMES[:3]): leaf(rng)}) for kind in kinds]}


def all_of(rng: random.Random) -> Schema:
    low = rng.randint(-5, 5)
    bounds = [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(1, 50)}]
    return rng.choice(({"allOf": bounds}, obj({rng.choice(NAMES): {"allOf": bounds}})))


def nullable(rng: random.Random) -> Schema:
    return obj(
        {"value": {"anyOf": [leaf(rng), {"type": "null"}]}, "unit": {"type": ["string", "null"], "maxLength": 4}}
    )


def references(rng: random.Random) -> Schema:
    where = rng.choice(("$defs", "definitions"))
    part = {"$ref": f"#/{where}/part"}
    whole = rng.choice((obj({"first": part, "second": part}), {"type": "array", "items": part, "maxItems": 2}, part))
    return {where: {"part": rng.choice((flat, leaf))(rng)}, **whole}


def recursive(rng: random.Random) -> Schema:
    again = {"$ref": "#/$defs/node"}
    end = rng.choice(({"anyOf": [{"type": "null"}, again]}, {"type": "array", "items": again, "maxItems": 1}))
    return {"$defs": {"node": obj({"v": rng.choice((boolean, integer))(rng), "next": end})}, **again}


def mapping(rng: random.Random) -> Schema:
    values = rng.choice((boolean, integer, constant))(rng)
    most = {"type": "object", "maxProperties": rng.randint(1, 2)}
    if rng.random() < 0.5:
        return {**most, "additionalProperties": values}
    return {**most, "patternProperties": {"^n_[a-z]{1,3}$": values}, "additionalProperties": False}


def annotated(rng: random.Random) -> Schema:
    """As pydantic writes schemas: titles, descriptions, defaults, references to enums."""
    color = {"title": "Color", "type": "string", "enum": ["red", "blue"], "description": "A colour."}
    wheels = {**integer(rng), "title": "Wheels", "default": 4, "examples": [4]}
    return {
        "$schema": rng.choice(
            ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#")
        ),
        "$defs": {"Color": color},
        "title": "Car",
        **obj({"color": {"$ref": "#/$defs/Color"}, "wheels": wheels}, required=["color"]),
    }


def extraction(rng: random.Random) -> Schema:
    person = obj({"name": string(rng), "role": {"enum": ["host", "guest"]}})
    people = {"type": "array", "items": person, "minItems": 1, "maxItems": 2}
    return obj({"people": people, "count": integer(rng)})


KINDS: tuple[Maker, ...] = (
    *LEAVES,
    *(flat, flat, flat, optional, optional, nested, array, array, tuple_, any_of, one_of, all_of, nullable),
    *(references, references, recursive, mapping, annotated, extraction),
)


def make_schemas(num: int = 300) -> list[Made]:
    """Schemas of each kind in turn; every tenth must be refused."""
    return list(itertools.islice(_made(), num))


def _made() -> Iterator[Made]:
    refused, kinds = itertools.cycle(UNSUPPORTED_SCHEMAS.items()), itertools.cycle(KINDS)
    for index in itertools.count():
        if index % 10 == 9:
            name, (schema, reason) = next(refused)
            yield Made(f"{index} {name}", schema, reason)
        else:
            maker = next(kinds)
            yield Made(f"{index} {maker.__name__.strip('_')}", maker(random.Random(index)), None)
