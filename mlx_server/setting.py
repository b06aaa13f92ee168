"""One setting: how it is declared as a field of a section, and how its values are checked, wherever they come from."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.errors import ConfigError

ENV_PREFIX = "MLX_SERVE_"


def declare(default: Any, help: str, **extra: Any) -> Any:
    """A field of a section. `extra`: `choices`, `minimum`, `maximum`, `secret`, `form`, `joined`."""
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of `Config`, as the command line and the documentation see it."""

    section: str
    name: str
    type: type
    is_optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    maximum: float | None
    is_secret: bool
    form: Callable[[str, str], object] | None
    """Raises `ConfigError` for a text that is wrong, given that and what to call it."""
    is_joined: bool
    """A text of several, joined by `:`: files may have a list of them, or a table, and its flag may be repeated."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}_{self.name}".upper()

    def parse(self, value: Any, source: str) -> Any:
        """Checks, and converts from text where the source is text; raises `ConfigError` with `source`."""
        if value is None and self.is_optional:
            return None
        parsed = self._convert(joined(value) if self.is_joined else value, source)
        if self.choices is not None and parsed not in self.choices:
            raise ConfigError(f"{source}: {self.name} is {value!r}; it must be one of {', '.join(self.choices)}.")
        if isinstance(parsed, int | float) and not isinstance(parsed, bool):
            if self.minimum is not None and not parsed >= self.minimum:
                raise ConfigError(f"{source}: {self.name} is {value}; the least is {self.minimum:g}.")
            if self.maximum is not None and not parsed <= self.maximum:
                raise ConfigError(f"{source}: {self.name} is {value}; the most is {self.maximum:g}.")
        if self.form is not None and parsed is not None:
            self.form(parsed, f"{source}: {self.name}")
        return parsed

    def _convert(self, value: Any, source: str) -> Any:
        wanted = self.type
        if wanted is bool:
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.lower() in _BOOLEANS:
                return _BOOLEANS[value.lower()]
        elif wanted is str and isinstance(value, str):
            return value or (None if self.is_optional else "")
        elif wanted is str and type(value) is int and (self.form is not None or self.choices is not None):
            return str(value)
        elif wanted in (int, float) and not isinstance(value, bool):
            if isinstance(value, wanted) or (wanted is float and isinstance(value, int)):
                return wanted(value)
            if isinstance(value, str):
                try:
                    return wanted(value)
                except ValueError:
                    pass
        raise ConfigError(f"{source}: {self.name} is {value!r}; it must be a {_TYPE_NAMES[wanted]}.")


def joined(value: Any) -> Any:
    """A list of texts as one, and a table as one of `name=text`; anything else as it is."""
    parts = [f"{name}={part}" for name, part in value.items()] if isinstance(value, Mapping) else value
    is_list = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    return os.pathsep.join(parts) if is_list else value


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_TYPE_NAMES = {bool: "boolean", str: "string", int: "whole number", float: "number"}


def declared(section: str, section_type: Any) -> tuple[Setting, ...]:
    """The settings among the fields of a section's dataclass, in their order."""
    hints = typing.get_type_hints(section_type)
    found: list[Setting] = []
    for leaf in dataclasses.fields(section_type):
        extra = leaf.metadata
        if "help" not in extra:
            continue
        kinds = typing.get_args(hints[leaf.name]) if isinstance(hints[leaf.name], types.UnionType) else ()
        found.append(
            Setting(
                section=section,
                name=leaf.name,
                type=kinds[0] if kinds else hints[leaf.name],
                is_optional=bool(kinds),
                default=leaf.default,
                help=extra["help"],
                choices=extra.get("choices"),
                minimum=extra.get("minimum"),
                maximum=extra.get("maximum"),
                is_secret=extra.get("secret", False),
                form=extra.get("form"),
                is_joined=extra.get("joined", False),
            )
        )
    return tuple(found)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped name: `; did you mean ...?`, or what there is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}."
