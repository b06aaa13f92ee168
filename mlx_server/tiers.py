"""Tiers: what the callers of a server may do, how much, and with which priority. Declared as `[tiers.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass

from mlx_server.errors import ConfigError
from mlx_server.request import Priority
from mlx_server.setting import STRICT, Name, read_table

DEFAULT_TIER = "default"
"""The tier that every server has, with normal priority and no limits unless it is declared."""

_GeneratingPath = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/infill",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
]
OTHER_PATHS: Mapping[str, str] = MappingProxyType(
    {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank", "/score": "/v1/score"}
)
"""Other names of some paths."""

GENERATING_PATHS: tuple[str, ...] = (*get_args(_GeneratingPath), *OTHER_PATHS)
"""Paths that make the model compute. Each may have a floor, which then holds for its other names, too."""


def _priority(value: object) -> Priority:
    names = {level.name.lower(): level for level in Priority}
    if isinstance(value, Priority):
        return value
    if isinstance(value, str) and value in names:
        return names[value]
    raise ValueError(f"it must be one of {', '.join(names)}")


_Level = Annotated[Priority, PlainValidator(_priority)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Tier:
    """One tier. None means no limit.

    The limits hold for each key by itself: requests that run or wait at a time, requests and tokens (of prompts and
    outputs) in any 60 seconds, tokens of a prompt and its output together, and output tokens, where answers are cut.
    The last two bound the requests of all keys together that may wait, and the tokens of their prompts. Keys of an
    `admin` tier may change the server. `models` are names as clients write them, or served names. `floors` are the best
    priorities of requests on some paths: `{"/v1/completions": LOW}` gives all of its requests low priority.
    """

    name: str = DEFAULT_TIER
    priority: _Level = Priority.NORMAL
    max_concurrent_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=2)
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_num_waiting: int | None = Field(default=None, ge=1)
    max_queued_tokens: int | None = Field(default=None, ge=1)
    admin: bool = False
    models: tuple[Name, ...] | None = Field(default=None, min_length=1, strict=False)
    floors: Mapping[_GeneratingPath, _Level] = Field(default_factory=dict)

    def priority_at(self, path: str) -> Priority:
        floors = cast(Mapping[str, Priority], self.floors)
        return max(self.priority, floors.get(OTHER_PATHS.get(path, path), self.priority))


def default_tiers() -> dict[str, Tier]:
    """The tiers of a server that declares none."""
    return {DEFAULT_TIER: Tier()}


def read_tiers(tables: Any, source: str) -> dict[str, Tier]:
    """Tiers by name, always including the default one. Raises `ConfigError` with `source`."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{source}: tiers must be sections, like [tiers.{DEFAULT_TIER}].")
    declared = {name: read_table(Tier, table, f"{source}: [tiers.{name}]", name=name) for name, table in tables.items()}
    return default_tiers() | declared
