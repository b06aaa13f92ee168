"""Every setting, declared once: its name, type, default, limits and help. Files, environment and flags follow.

Precedence: flags over environment (`MLX_SERVE_<SECTION>_<NAME>`) over the TOML file over the defaults.
Unknown keys are errors that name the nearest known key. Nothing here is changed after start.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from mlx_server.errors import ConfigError
from mlx_server.model_entries import Adapter, ModelEntry, parse_adapters, read_models
from mlx_server.setting import (
    STRICT,
    UNQUOTED,
    Limit,
    Share,
    Size,
    Text,
    form,
    joined,
    keys,
    nearest,
    parse_hosts,
    parse_origins,
    read_table,
    read_text,
)
from mlx_server.tiers import DEFAULT_TIER, Tier, default_tiers, read_tiers

BLOCK_SIZE = 32
"""Tokens in a KV block; the attention kernels are written for it."""

FULL_KV: Final = "full"

DEFAULT_MODEL = "smollm2"

ENV_PREFIX = "MLX_SERVE_"


def _setting(default: Any, help: str, **limits: Any) -> Any:
    return Field(default=default, description=help, **limits)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelConfig:
    """[model]: which model to serve, and how."""

    model: str = _setting(DEFAULT_MODEL, "model to serve: a folder in mlx-lm format, a hub id, or `smollm2` (bundled)")
    served_model_name: Text = _setting(None, "name that clients use; default: the model's own")
    adapter: Annotated[Text, BeforeValidator(joined), form(parse_adapters)] = _setting(
        None,
        "adapters that mlx-lm has trained, to be served beside the model as `model:name`: NAME=FOLDER, or FOLDER "
        "with that name; several are joined by `:`",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = _setting("auto", "compute type")
    max_model_len: int | None = _setting(None, "context limit in tokens; default: the model's own, if it fits", ge=2)
    attention_backend: Literal["auto", "metal", "cuda", "cpu", "reference"] = _setting("auto", "attention kernels")
    generation_config: Literal["auto", "none"] = _setting(
        "auto", "sampling defaults of requests: `auto` as in the model's generation_config.json, `none` as OpenAI's"
    )
    trust_remote_code: bool = _setting(False, "run Python files that a model's folder brings along")
    device_share: float = _setting(
        1.0, "share of the device's time, relative to other models', while several have work", ge=0.01
    )

    @property
    def name(self) -> str:
        """What clients call the model without an adapter: unless told otherwise its own name."""
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return parse_adapters(self.adapter or "")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CacheConfig:
    """[cache]: the paged KV pool."""

    kv_cache_memory: Size = _setting(
        "auto", "the most that the KV pool may grow to: `auto`, bytes, or like 4GiB or 512MB"
    )
    num_kv_blocks: int | None = _setting(
        None, "exact number of KV blocks, all at start, instead of kv_cache_memory", ge=8
    )
    kv_bits: Annotated[Literal["full", "8", "4"], UNQUOTED] = _setting(
        FULL_KV,
        "bits a number of K and V: as many as the model computes in, or fewer for less memory and slower attention",
    )
    prefix_caching: bool = _setting(True, "reuse the blocks of shared prompt prefixes")
    isolation: Literal["none", "tier", "key"] = _setting(
        "key",
        "whose prefixes are shared: those of one `key`, those of a `tier`, or everyone's (`none`); hit times tell "
        "what others asked",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MemoryConfig:
    """[memory]: what all models may hold together; see docs/memory.md."""

    memory_limit: Limit = _setting(
        "auto", "memory for weights, KV pools and activations: `auto`, a size like 12GiB, or a share like 70%"
    )
    memory_reserve: Share = _setting("10%", "memory that loading and growing leave to the system and other programs")
    wire_memory: bool = _setting(
        False,
        "on a Mac, keep weights and KV pools wired: no slower first step after idling, and a risk of kernel panics",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PoolConfig:
    """[pool]: which models clients may name beside those declared, and how long each stays; see docs/models.md."""

    model_folders: Text = _setting(
        None, "folders whose models clients may name, each by its own folder's name; several are joined by `:`"
    )
    pulled_models: bool = _setting(False, "let clients name every model that `mlx-serve models ls` lists")
    idle_ttl_s: float = _setting(
        0.0, "unload a model that is not pinned when nobody has used it for so long; 0 is never", ge=0
    )
    when_full: Literal["wait", "fail"] = _setting(
        "wait",
        "requests for a model whose memory is held by models in use: let them `wait`, or let them `fail` at once",
    )
    room_timeout_s: float = _setting(
        120.0, "longest wait of a request for a model whose memory is held by models in use", ge=0
    )
    residency_s: float = _setting(
        10.0,
        "how long a loaded model is used before its new requests wait for those of a model that needs its memory",
        ge=0,
    )
    retry_failed_s: float = _setting(30.0, "pause before a model that could not be loaded is tried again", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SchedulerConfig:
    """[scheduler]: who runs when."""

    max_num_seqs: int = _setting(64, "most requests that run at once", ge=1)
    max_num_batched_tokens: int = _setting(2048, "token budget of one step", ge=32)
    aging_rate: float = _setting(0.1, "priority levels gained per second of waiting", ge=0)
    async_scheduling: bool = _setting(True, "prepare the next step while one runs")
    target_step_ms: float | None = _setting(
        None,
        "target time of a step while someone decodes; default: the time of 128 prompt tokens (32 on a GPU), "
        "within 100 to 400 ms",
        ge=1,
    )
    max_step_ms: float = _setting(
        1000.0,
        "target time of a step while nobody decodes, or only tiers worse than the one whose prompt it computes",
        ge=1,
    )
    max_num_waiting: int = _setting(1024, "most requests that may wait", ge=1)
    max_queued_tokens: int = _setting(4_000_000, "most prompt tokens that may wait", ge=1)
    queue_timeout_s: float = _setting(600.0, "longest wait for a first step; 0 is for ever", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ServerConfig:
    """[server]: the HTTP side."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: Text = _setting(
        None,
        "one shared key for all clients; others can see it on a command line, so better use api_key_file",
        repr=False,
    )
    api_key_file: Text = _setting(None, "file with the shared key in it")
    api_key_tier: str = _setting(
        DEFAULT_TIER, "tier of whoever uses the shared key, and of all callers where no key is asked for"
    )
    admin_key: Text = _setting(
        None, "key for the routes that change the server; without any key, local clients may use them", repr=False
    )
    admin_key_file: Text = _setting(None, "file with the admin key in it")
    key_file: Text = _setting(
        None, "SQLite file of `mlx-serve keys`; default: keys.sqlite in the home folder (MLX_SERVE_HOME)"
    )
    allowed_hosts: Annotated[str, form(parse_hosts)] = _setting(
        "0.0.0.0,host.docker.internal",
        "names beside localhost by which clients may call a server that is open to its own machine, joined by commas",
    )
    allowed_origins: Annotated[Text, form(parse_origins)] = _setting(
        None,
        "web pages that browsers let call the server: origins like http://localhost:3000, joined by commas, or `*`",
    )
    tls_cert: Text = _setting(None, "PEM file with a certificate, and the chain behind it, to serve HTTPS")
    tls_key: Text = _setting(None, "PEM file with the certificate's key, not encrypted")
    client_timeout_s: float = _setting(
        30.0, "longest wait for a client to send the rest of a request or to take the next bytes; 0 is for ever", ge=0
    )
    max_connections: int | None = _setting(
        None, "most connections at a time; default: what the limit of open files has room for", ge=1
    )
    sse_keep_alive_s: float = _setting(15.0, "seconds between keep-alive comments on a silent stream; 0 is off", ge=0)
    drain_timeout_s: float = _setting(30.0, "longest wait for open streams at shutdown, in seconds", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "what is logged")
    log_format: Literal["text", "json"] = _setting("text", "lines for people, or one JSON object a line")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ObservabilityConfig:
    """[observability]: traces, and what metrics show beyond those that are always there."""

    tracing: Literal["off", "console", "otlp"] = _setting(
        "off", "where spans go; otlp: to OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318"
    )
    trace_prompts: bool = _setting(False, "put the text of prompts and answers into spans")
    kv_cache_metrics: bool = _setting(False, "show at /metrics how long KV blocks keep what is in them")
    kv_cache_metrics_sample: float = _setting(0.01, "share of the blocks that this is found out from", ge=0, le=1)
    trace_every_steps: int = _setting(100, "of so many steps one gets a span of its own; 0 is none", ge=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections together. Frozen and complete: every field has its final value."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    observability: ObservabilityConfig = dataclasses.field(default_factory=ObservabilityConfig)
    tiers: Mapping[str, Tier] = dataclasses.field(default_factory=default_tiers)
    models: tuple[ModelEntry, ...] = ()

    def for_model(self, entry: ModelEntry) -> Config:
        """The settings of one of several models."""
        own: dict[str, dict[str, Any]] = {"model": {}, "cache": {}}
        for setting in _model_settings():
            if setting.name in entry.overrides:
                own[setting.section][setting.name] = entry.overrides[setting.name]
        own["model"] = {"adapter": None, **own["model"], "model": entry.model, "served_model_name": entry.id}
        return _replaced(self, own)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section, as the command line and the documentation see it."""

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
        """All values that it may have, where these are few."""
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def type(self) -> Any:
        """Of its values, if it has one: str, bool, int or float."""
        if self.choices:
            return str
        is_optional = isinstance(self.field.annotation, types.UnionType)
        return get_args(self.field.annotation)[0] if is_optional else self.field.annotation


_SECTIONS: Mapping[str, Any] = {
    section.name: section.default_factory
    for section in dataclasses.fields(Config)
    if section.name not in ("tiers", "models")  # of these there may be any number, so they are no settings
}


def settings() -> tuple[Setting, ...]:
    """Every setting in declaration order."""
    return tuple(
        Setting(section, name, field)
        for section, declared in _SECTIONS.items()
        for name, field in keys(declared).items()
    )


def _model_settings() -> tuple[Setting, ...]:
    """What each of several models may have of its own. Whose prefixes are shared is one promise to all callers."""
    not_own = ("model", "served_model_name", "isolation")
    return tuple(s for s in settings() if s.section in ("model", "cache") and s.name not in not_own)


def load_config(
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merges file, environment and flags (by setting name). Raises `ConfigError`."""
    config = Config() if path is None else _file_config(path)
    environ = os.environ if environ is None else environ
    flags = flags or {}
    _check_environment(environ)
    for setting in settings():
        given = {setting.env: environ.get(setting.env), setting.flag: joined(flags.get(setting.name))}
        for source, value in given.items():
            if value is not None:
                parsed = read_text(_SECTIONS[setting.section], setting.name, str(value), source)
                _check_one_way({setting.name: parsed}, config.models)
                config = _replaced(config, {setting.section: {setting.name: parsed}})
    if config.server.api_key_tier not in config.tiers:
        name = config.server.api_key_tier
        raise ConfigError(f"api_key_tier is {name}, which is not declared{nearest(name, config.tiers)}")
    return config


def _replaced(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """With other values of some settings, by section and name."""
    sections: dict[str, Any] = {
        section: dataclasses.replace(getattr(config, section), **values) for section, values in changes.items()
    }
    return dataclasses.replace(config, **sections)


def _check_environment(environ: Iterable[str]) -> None:
    """Refuses a variable that is named like a setting but is none."""
    known = [setting.env for setting in settings()]
    prefixes = tuple(f"{ENV_PREFIX}{section}_".upper() for section in _SECTIONS)
    for name in environ:
        if name.startswith(prefixes) and name not in known:
            raise ConfigError(f"Unknown environment variable {name}{nearest(name, known)}")


def _file_config(path: Path) -> Config:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    overridable = {setting.name: _SECTIONS[setting.section] for setting in _model_settings()}
    found: dict[str, Any] = {
        "tiers": read_tiers(document.pop("tiers", {}), str(path)),
        "models": read_models(document.pop("models", []), overridable, str(path)),
    }
    for section, values in document.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{nearest(section, (*_SECTIONS, *found))}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a section, like [{section}].")
        found[section] = read_table(_SECTIONS[section], values, f"{path}: [{section}]")
    _check_one_way(document.get("model", {}), found["models"])
    return Config(**found)


def _check_one_way(given: Mapping[str, Any], models: tuple[ModelEntry, ...]) -> None:
    """A server has one model, or those of [[models]]."""
    for name in ("model", "served_model_name", "adapter"):
        if models and name in given:
            raise ConfigError(
                f"{name} is {given[name]}, and there are [[models]], too: give either one model or several. "
                f"The first of [[models]] is the default."
            )


def home() -> Path:
    """Where models and caches are kept: `MLX_SERVE_HOME`, or the user's cache folder."""
    configured = os.environ.get("MLX_SERVE_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "mlx-serve"
