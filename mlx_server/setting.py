"""Settings: the types of values that pydantic does not have, and how values are checked.

Sections of settings are pydantic dataclasses in strict mode: `port = "8000"` in a file is not a number. The environment
and the command line have only texts, which are converted first.
"""

from __future__ import annotations

import os
import re
import types
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mlx_server.errors import ConfigError, did_you_mean

ANY_ORIGIN = "*"
ENV_PREFIX = "MLX_SERVE_"
_OTHER_VARIABLES = [
    f"{ENV_PREFIX}{name}" for name in ("HOME", "URL", "API_KEY", "KEY", "LAUNCH_KEY", "CPU_THREADS", "CPU_ISA")
]
"""Of commands and libraries, and `MLX_SERVE_KEY` of docs/clients.md."""

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""How pydantic checks sections, whether they come from code or from a file."""

_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_LEAST_PLAIN = 1_000_000
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+", re.IGNORECASE)
_BREAK = re.compile(r"(?:\A|(?<=,))\s*[\r\n]\s*|\s*[\r\n]\s*\Z")
"""Line breaks around a text or after a comma, which blocks of YAML, texts of several lines in TOML and files with
Windows' ends of lines leave there."""
_OUR_WORDS = {"Input": "it", "String": "it", "Tuple": "it", "tuple": "list", "dictionary": "table"}
"""Words for what pydantic's messages call by Python's names."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section, for the command line and the documentation."""

    section: str
    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}_{self.name}".upper()

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def is_secret(self) -> bool:
        return not self.field.repr

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values, if the setting has a fixed list."""
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def type(self) -> Any:
        """The type of its values other than None: str, bool, int or float."""
        if self.choices:
            return str
        is_optional = isinstance(self.field.annotation, types.UnionType)
        return get_args(self.field.annotation)[0] if is_optional else self.field.annotation


def declare(default: Any, help: str, **limits: Any) -> Any:
    return Field(default=default, description=help, **limits)


def parse_size(text: str) -> int:
    """Bytes of `512MB`, `4GiB`, `1.5g` or a plain number; one below a million, other than 0, lacks its unit. Raises
    `ValueError`."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError("write bytes, or a size like 512MB or 4GiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    if 0 < float(number) < _LEAST_PLAIN and number == text.strip():
        raise ValueError(f"without a unit that is {number} bytes; add one: kB, MB, GB, TB, KiB, MiB, GiB, TiB or B")
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def parse_disk_size(text: str) -> int:
    """`parse_size` for a size on disk: at least 1 MB. Raises `ValueError`."""
    size = parse_size(text)
    if size < _LEAST_PLAIN:
        raise ValueError(f"that is {size} bytes, too few for any prefix; write a size like 10GB")
    return size


def parse_share(text: str, whole_bytes: int = 0) -> int:
    """Bytes of a size, or of a share of `whole_bytes` like `70%`. Raises `ValueError`."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return parse_size(text)
    percent = float(match[1])
    if percent > 100:
        raise ValueError("the most is 100%")
    return int(whole_bytes * percent / 100)


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins of web pages from a list joined by commas, in lower case as browsers send them; `*` stands for all.
    Raises `ValueError`."""
    origins = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for origin in origins:
        # Browsers send `null` for pages from files.
        if origin not in (ANY_ORIGIN, "null") and _ORIGIN.fullmatch(origin) is None:
            raise ValueError(
                f"{origin} is not an origin; write only scheme, host and port, like http://localhost:3000, or "
                f"`{ANY_ORIGIN}` for all"
            )
    return origins


def parse_hosts(text: str) -> tuple[str, ...]:
    """Host names from a list joined by commas, in lower case. Raises `ValueError`."""
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise ValueError(f"{host} is not a host name; write only names, like my-mac.local, without ports")
    return hosts


def form(parse: Callable[[str], object], *words: str) -> AfterValidator:
    """Checks that `parse` accepts a text unless it is one of `words`; the text itself does not change."""

    def check(text: str | None) -> str | None:
        if text is not None and text not in words:
            parse(text)
        return text

    return AfterValidator(check)


def joined(value: Any) -> Any:
    """A list of texts joined by `:`, a table as `name=text` parts joined likewise; other values as they are."""
    parts = [f"{name}={part}" for name, part in value.items()] if isinstance(value, Mapping) else value
    is_list = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    return os.pathsep.join(parts) if is_list else value


UNQUOTED = BeforeValidator(lambda value: str(value) if type(value) is int else value)
"""For texts that may be numbers: a file does not have to quote them."""

Text = Annotated[str | None, BeforeValidator(lambda text: None if text == "" else text)]
"""An empty text counts as None."""

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Size = Annotated[str, UNQUOTED, form(parse_size, "auto")]
Limit = Annotated[str, UNQUOTED, form(parse_share, "auto")]
Share = Annotated[str, UNQUOTED, form(parse_share)]


def read_table(declared: type[T], table: Mapping[str, Any], where: str, **more: Any) -> T:
    """The section with the values of a file, and those of `more`, which the file may not set. Raises `ConfigError`,
    whose message begins with `where`."""
    refuse_unknown(table, keys(declared).keys() - more.keys(), where)
    joined_lines = {name: _BREAK.sub("", value) if isinstance(value, str) else value for name, value in table.items()}
    _check_texts({**joined_lines, **more}, where)
    try:
        return declared(**joined_lines, **more)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first(error, keys(declared))}") from error


def read_text(declared: Any, name: str, text: str, where: str) -> Any:
    """The value of one setting from a text. Raises `ConfigError`, whose message begins with `where`."""
    text = _BREAK.sub("", text)
    _check_texts(text, where)
    try:
        return getattr(TypeAdapter(declared).validate_strings({name: text}), name)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first(error, keys(declared))}") from error


def odd_character(text: str) -> str | None:
    """The first control character of a text, or half of a surrogate pair, which stands for a byte that is not UTF-8."""
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Cs")), None)


def _check_texts(value: Any, where: str) -> None:
    """Raises `ConfigError` if a text has an `odd_character`, also in a list or a table: no path, name or key has one
    that the system, clients and logs can take. The message does not show the text, which may be a key."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_texts(name, where)
            _check_texts(part, f"{where}: {name}")
    elif isinstance(value, list):
        for part in value:
            _check_texts(part, where)
    elif isinstance(value, str) and (odd := odd_character(value)) is not None:
        raise ConfigError(f"{where} has the character {odd!r}; write UTF-8 in one line, without control characters.")


def keys(declared: Any) -> dict[str, FieldInfo]:
    """The fields of a section by name."""
    fields: dict[str, FieldInfo] = declared.__pydantic_fields__
    return fields


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises `ConfigError` for a key that is not in `known`; the message names the nearest known key."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name}{nearest(name, known)}")


def refuse_misplaced(section: str, values: object, homes: Mapping[str, str], where: str) -> None:
    """Raises `ConfigError` for a setting outside its section, which `homes` names: one of the `values` of another
    section, or `section` itself if it is a setting."""
    for name in values if isinstance(values, dict) else (section,):
        if homes.get(name, section) != section:
            raise ConfigError(f"{where}: {name} belongs to the section [{homes[name]}].")


def refuse_unknown_variables(environ: Iterable[str], settings: Iterable[str]) -> None:
    """Raises `ConfigError` for a variable with our prefix that nothing reads; the message names the nearest of
    `settings`, the variables of settings."""
    known = {*settings, *_OTHER_VARIABLES}
    # Kubernetes sets variables for each service, which begin with its name.
    services = tuple(name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST"))
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(services):
            raise ConfigError(f"Unknown environment variable {name}{nearest(name, settings)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped name: `; did you mean ...?`, or a list of all known names."""
    return did_you_mean(name, known) or f"; known are {', '.join(sorted(known))}."


def _first(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """`port is 70000; it should be less than or equal to 65535.` The value of a secret is left out."""
    fault = error.errors()[0]
    name, *inner = (str(part) for part in fault["loc"] if part != "[key]")
    reason = fault["msg"].removeprefix("Value error, ")
    reason = re.sub("|".join(_OUR_WORDS), lambda word: _OUR_WORDS[word[0]], reason)
    value = repr(fault["input"]) if name not in fields or fields[name].repr else "not valid"
    return f"{name}{''.join(f'[{part}]' for part in inner)} is {value}; {reason}."
