"""Every setting, declared once: its name, type, default and help. Files, environment and flags derive from here.

Precedence: flags over environment (`MLX_SERVE_<SECTION>_<NAME>`) over the TOML file over the defaults.
Unknown keys are errors that name the nearest known key. Nothing here is changed after start.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_server.adapter_entries import Adapter, parse_adapters
from mlx_server.errors import ConfigError
from mlx_server.model_entries import ModelEntry, parse_models
from mlx_server.setting import ENV_PREFIX, Setting, declared, nearest
from mlx_server.setting import declare as _setting
from mlx_server.setting_forms import check_reserve, check_share, check_size, parse_hosts, parse_origins
from mlx_server.tiers import DEFAULT_TIER, Tier, default_tiers, parse_tiers

BLOCK_SIZE = 32
"""Tokens in a KV block; the attention kernels are written for it."""

FULL_KV = "full"

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """[model]: which model to serve, and how."""

    model: str = _setting(DEFAULT_MODEL, "model to serve: a folder in mlx-lm format, a hub id, or `smollm2` (bundled)")
    served_model_name: str | None = _setting(None, "name that clients use; default: the model's own")
    adapter: str | None = _setting(
        None,
        "adapters that mlx-lm has trained, to be served beside the model as `model:name`: NAME=FOLDER, or FOLDER with "
        "that name; several are joined by `:`",
        form=parse_adapters,
        joined=True,
    )
    dtype: str = _setting("auto", "compute type", choices=("auto", "float32", "float16", "bfloat16"))
    max_model_len: int | None = _setting(
        None, "context limit in tokens; default: the model's own, if it fits", minimum=2
    )
    attention_backend: str = _setting(
        "auto", "attention kernels", choices=("auto", "metal", "cuda", "cpu", "reference")
    )
    generation_config: str = _setting(
        "auto",
        "sampling defaults of requests: `auto` as in the model's generation_config.json, `none` as OpenAI's",
        choices=("auto", "none"),
    )
    trust_remote_code: bool = _setting(False, "run Python files that a model's folder brings along")
    device_share: float = _setting(
        1.0, "share of the device's time, relative to other models', while several have work", minimum=0.01
    )

    @property
    def name(self) -> str:
        """What clients call the model without an adapter: unless told otherwise its own name."""
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return parse_adapters(self.adapter or "", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """[cache]: the paged KV pool."""

    kv_cache_memory: str = _setting(
        "auto", "the most that the KV pool may grow to: `auto`, bytes, or like 4GiB or 512MB", form=check_size
    )
    num_kv_blocks: int | None = _setting(
        None, "exact number of KV blocks, all at start, instead of kv_cache_memory", minimum=8
    )
    kv_bits: str = _setting(
        FULL_KV,
        "bits a number of K and V: as many as the model computes in, or fewer for less memory and slower attention",
        choices=(FULL_KV, "8", "4"),
    )
    prefix_caching: bool = _setting(True, "reuse the blocks of shared prompt prefixes")
    isolation: str = _setting(
        "key",
        "whose prefixes are shared: those of one `key`, those of a `tier`, or everyone's (`none`); hit times tell "
        "what others asked",
        choices=("none", "tier", "key"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """[memory]: what all models may hold together; see docs/memory.md."""

    memory_limit: str = _setting(
        "auto",
        "memory for weights, KV pools and activations: `auto`, a size like 12GiB, or a share like 70%",
        form=check_share,
    )
    memory_reserve: str = _setting(
        "10%", "memory that loading and growing leave to the system and other programs", form=check_reserve
    )
    wire_memory: bool = _setting(
        False,
        "on a Mac, keep weights and KV pools wired: no slower first step after idling, and a risk of kernel panics",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """[pool]: which models clients may name beside those declared, and how long each stays; see docs/models.md."""

    model_folders: str | None = _setting(
        None, "folders whose models clients may name, each by its own folder's name; several are joined by `:`"
    )
    pulled_models: bool = _setting(False, "let clients name every model that `mlx-serve models ls` lists")
    idle_ttl_s: float = _setting(
        0.0, "unload a model that is not pinned when nobody has used it for so long; 0 is never", minimum=0.0
    )
    when_full: str = _setting(
        "wait",
        "requests for a model whose memory is held by models in use: let them `wait`, or let them `fail` at once",
        choices=("wait", "fail"),
    )
    room_timeout_s: float = _setting(120.0, "longest such wait", minimum=0.0)
    residency_s: float = _setting(
        10.0,
        "how long a loaded model is used before its new requests wait for those of a model that needs its memory",
        minimum=0.0,
    )
    retry_failed_s: float = _setting(30.0, "pause before a model that could not be loaded is tried again", minimum=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """[scheduler]: who runs when."""

    max_num_seqs: int = _setting(64, "most requests that run at once", minimum=1)
    max_num_batched_tokens: int = _setting(2048, "token budget of one step", minimum=32)
    aging_rate: float = _setting(0.1, "priority levels gained per second of waiting", minimum=0.0)
    async_scheduling: bool = _setting(True, "prepare the next step while one runs")
    target_step_ms: float | None = _setting(
        None, "aim of a step's duration while someone decodes; default 200 on a CPU, 100 on a GPU", minimum=1.0
    )
    max_step_ms: float = _setting(
        1000.0, "the same while nobody decodes, or only tiers worse than the one whose prompt it computes", minimum=1.0
    )
    max_num_waiting: int = _setting(1024, "most requests that may wait", minimum=1)
    max_queued_tokens: int = _setting(4_000_000, "most prompt tokens that may wait", minimum=1)
    queue_timeout_s: float = _setting(600.0, "longest wait for a first step; 0 is for ever", minimum=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """[server]: the HTTP side."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    api_key: str | None = _setting(
        None, "one shared key for all clients; on a command line others can see it, so better use the next", secret=True
    )
    api_key_file: str | None = _setting(None, "file with the shared key in it")
    api_key_tier: str = _setting(
        DEFAULT_TIER, "tier of whoever uses the shared key, and of all callers where no key is asked for"
    )
    admin_key: str | None = _setting(
        None, "key for the routes that change the server; without any key, local clients may use them", secret=True
    )
    admin_key_file: str | None = _setting(None, "file with the admin key in it")
    key_file: str | None = _setting(
        None, "SQLite file of `mlx-serve keys`; default: keys.sqlite in the home folder (MLX_SERVE_HOME)"
    )
    allowed_hosts: str = _setting(
        "0.0.0.0,host.docker.internal",
        "names beside localhost by which clients may call a server that is open to its own machine, joined by commas",
        form=parse_hosts,
    )
    allowed_origins: str | None = _setting(
        None,
        "web pages that browsers let call the server: origins like http://localhost:3000, joined by commas, or `*`",
        form=parse_origins,
    )
    tls_cert: str | None = _setting(None, "PEM file with a certificate, and the chain behind it, to serve HTTPS")
    tls_key: str | None = _setting(None, "PEM file with the certificate's key, not encrypted")
    client_timeout_s: float = _setting(
        30.0,
        "longest wait for a client to send the rest of a request or to take the next bytes; 0 is for ever",
        minimum=0.0,
    )
    max_connections: int | None = _setting(
        None, "most connections at a time; default: what the limit of open files has room for", minimum=1
    )
    sse_keep_alive_s: float = _setting(
        15.0, "seconds between keep-alive comments on a silent stream; 0 is off", minimum=0.0
    )
    drain_timeout_s: float = _setting(30.0, "longest wait for open streams at shutdown, in seconds", minimum=0.0)
    log_level: str = _setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting("text", "lines for people, or one JSON object a line", choices=("text", "json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """[observability]: traces, and what metrics show beyond those that are always there."""

    tracing: str = _setting(
        "off",
        "where spans go; otlp: to OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318",
        choices=("off", "console", "otlp"),
    )
    trace_prompts: bool = _setting(False, "put the text of prompts and answers into spans")
    kv_cache_metrics: bool = _setting(False, "show at /metrics how long KV blocks keep what is in them")
    kv_cache_metrics_sample: float = _setting(
        0.01, "share of the blocks that this is found out from", minimum=0.0, maximum=1.0
    )
    trace_every_steps: int = _setting(100, "of so many steps one gets a span of its own; 0 is none", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections together. Frozen and complete: every field has its final value."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    tiers: Mapping[str, Tier] = field(default_factory=default_tiers)
    models: tuple[ModelEntry, ...] = ()

    def for_model(self, entry: ModelEntry) -> Config:
        """The settings of one of several models."""
        identity = {"model": entry.model, "served_model_name": entry.id, "adapter": None}
        own: dict[str, dict[str, Any]] = {"model": identity, "cache": {}}
        for setting in _model_settings():
            if setting.name in entry.overrides:
                own[setting.section][setting.name] = entry.overrides[setting.name]
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, **own["model"]),
            cache=dataclasses.replace(self.cache, **own["cache"]),
        )


_MANIFOLD = ("tiers", "models")
"""Of these there may be any number, so they are no settings."""

_SECTIONS: Mapping[str, Any] = {
    section.name: section.default_factory for section in dataclasses.fields(Config) if section.name not in _MANIFOLD
}


def settings() -> tuple[Setting, ...]:
    """Every setting in declaration order."""
    return tuple(setting for name, section in _SECTIONS.items() for setting in declared(name, section))


def _model_settings() -> tuple[Setting, ...]:
    """What each of several models may have of its own. Whose prefixes are shared is one promise to all callers."""
    return tuple(s for s in settings() if s.section in ("model", "cache") and s.name != "isolation")


def load_config(
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merges file, environment and flags (by setting name). Raises `ConfigError`."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    tiers = default_tiers()
    models: tuple[ModelEntry, ...] = ()
    if path is not None:
        document = _read_file(path)
        tiers = parse_tiers(document.pop("tiers", {}), str(path))
        models = parse_models(document.pop("models", []), _model_settings(), str(path))
        _merge_file(document, path, merged)
    environ = os.environ if environ is None else environ
    _check_environment(environ, merged)
    for setting in settings():
        if setting.env in environ:
            merged[setting.section][setting.name] = setting.parse(environ[setting.env], setting.env)
        if flags is not None and flags.get(setting.name) is not None:
            merged[setting.section][setting.name] = setting.parse(flags[setting.name], setting.flag)
    config = Config(
        model=ModelConfig(**merged["model"]),
        cache=CacheConfig(**merged["cache"]),
        memory=MemoryConfig(**merged["memory"]),
        pool=PoolConfig(**merged["pool"]),
        scheduler=SchedulerConfig(**merged["scheduler"]),
        server=ServerConfig(**merged["server"]),
        observability=ObservabilityConfig(**merged["observability"]),
        tiers=tiers,
        models=models,
    )
    _check_one_way(merged["model"], models)
    _check_api_key_tier(config.server.api_key_tier, tiers)
    return config


def _check_environment(environ: Mapping[str, str], sections: Iterable[str]) -> None:
    """Refuses a variable that is named like a setting but is none."""
    known = [setting.env for setting in settings()]
    prefixes = tuple(f"{ENV_PREFIX}{section}_".upper() for section in sections)
    for name in environ:
        if name.startswith(prefixes) and name not in known:
            raise ConfigError(f"Unknown environment variable {name}{nearest(name, known)}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _merge_file(document: Mapping[str, Any], path: Path, merged: dict[str, dict[str, Any]]) -> None:
    known = {(setting.section, setting.name): setting for setting in settings()}
    for section, values in document.items():
        if section not in merged:
            raise ConfigError(f"{path}: unknown section [{section}]{nearest(section, (*merged, *_MANIFOLD))}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a section, like [{section}].")
        for name, value in values.items():
            setting = known.get((section, name))
            if setting is None:
                names = [n for s, n in known if s == section]
                raise ConfigError(f"{path}: unknown key {name} in [{section}]{nearest(name, names)}")
            merged[section][name] = setting.parse(value, str(path))


def _check_one_way(given: Mapping[str, Any], models: tuple[ModelEntry, ...]) -> None:
    """A server has one model, or those of [[models]]."""
    both = [name for name in ("model", "served_model_name", "adapter") if name in given]
    if models and both:
        raise ConfigError(
            f"{both[0]} is {given[both[0]]}, and there are [[models]], too: give either one model or several. "
            f"The first of [[models]] is the default."
        )


def _check_api_key_tier(name: str, tiers: Mapping[str, Tier]) -> None:
    if name not in tiers:
        raise ConfigError(f"api_key_tier is {name}, which is not declared{nearest(name, tiers)}")


def home() -> Path:
    """Where models and caches are kept: `MLX_SERVE_HOME`, or the user's cache folder."""
    configured = os.environ.get("MLX_SERVE_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "mlx-serve"
