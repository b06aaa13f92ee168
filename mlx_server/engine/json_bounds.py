"""Bounds of numbers in JSON schemas, changed where llguidance does not keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STEP = 1e-6
"""How far a bound is moved: the numbers between are lost to the model, which hardly writes any of them."""

_LARGEST = 2.0**32
"""Beyond it, a step may be too small to change a number."""

_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords that hold values, in which nothing is a bound."""


def keep_bounds(schema: Any) -> Any:
    """The schema, with each exclusive bound moved inwards that llguidance takes for an inclusive one.

    It does so for a whole number when the other bound is less than 1 away: `{"exclusiveMinimum": 1, "maximum": 1.5}`
    would allow 1.
    """
    if isinstance(schema, list):
        return [keep_bounds(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value if key in _VALUES else keep_bounds(value) for key, value in schema.items()}
    low, high = _number(kept, "exclusiveMinimum"), _number(kept, "exclusiveMaximum")
    lower = _largest(low, _number(kept, "minimum"))
    upper = _smallest(high, _number(kept, "maximum"))
    if lower is None or upper is None or upper - lower >= 1:
        return kept
    if low is not None and low == lower and float(low).is_integer():
        del kept["exclusiveMinimum"]
        kept["minimum"] = low + _STEP
    if high is not None and high == upper and float(high).is_integer():
        del kept["exclusiveMaximum"]
        kept["maximum"] = high - _STEP
    return kept


def _number(schema: Mapping[str, Any], key: str) -> float | None:
    value = schema.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if abs(value) < _LARGEST else None


def _largest(*bounds: float | None) -> float | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def _smallest(*bounds: float | None) -> float | None:
    return min((bound for bound in bounds if bound is not None), default=None)
