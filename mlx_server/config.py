"""Every setting, declared once: its name, type, default, limits and help. Files, environment and flags follow.

Precedence: flags over environment (`MLX_SERVE_<SECTION>_<NAME>`) over the TOML file over the defaults.
Unknown keys are errors that name the nearest known key. Nothing here is changed after start.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig
from mlx_server.model_entries import Adapter, ModelEntry, parse_adapters, read_models
from mlx_server.setting import (
    ENV_PREFIX,
    STRICT,
    UNQUOTED,
    Limit,
    Setting,
    Share,
    Size,
    Text,
    declare,
    form,
    joined,
    keys,
    nearest,
    parse_disk_size,
    parse_hosts,
    parse_origins,
    parse_size,
    read_table,
    read_text,
)
from mlx_server.tiers import DEFAULT_TIER, Tier, default_tiers, read_tiers

BLOCK_SIZE = 32
"""Tokens in a KV block; the attention kernels are written for it."""

FULL_KV: Final = "full"
FEWER_KV: Final = ("8", "k8v4", "4")
"""Forms of K and V in fewer bits, from the most to the fewest."""

AUTO_KV: Final = "auto"
WHOLE_WEIGHTS: Final = "none"

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelConfig:
    """[model]: which model to serve, and how."""

    model: str = declare(DEFAULT_MODEL, "a folder in mlx-lm format, a hub id, a GGUF file, or `smollm2` (bundled)")
    served_model_name: Text = declare(None, "name that clients use; default: the model's own")
    adapter: Annotated[Text, BeforeValidator(joined), form(parse_adapters)] = declare(
        None,
        "adapters that mlx-lm has trained, to be served beside the model as `model:name`: NAME=FOLDER, or FOLDER "
        "with that name; several are joined by `:`",
    )
    draft_model: Text = declare(None, "smaller model of the same vocabulary that drafts tokens: a folder or a hub id")
    mtp_from: Text = declare(
        None,
        "hub id of the model that this one was converted from: its multi-token-prediction heads are fetched from there "
        "if they are not here, with `--speculate auto` and `mtp`",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = declare("auto", "compute type")
    quantize: Annotated[Literal["none", "4", "8", "mxfp4"], UNQUOTED] = declare(
        WHOLE_WEIGHTS, "store whole weights in fewer bits, once, in the cache folder: `4`, `8` (groups of 64), `mxfp4`"
    )
    max_model_len: int | None = declare(None, "context limit in tokens; default: the model's own, if it fits", ge=2)
    attention_backend: Literal["auto", "metal", "cuda", "cpu", "reference"] = declare("auto", "attention kernels")
    batch_invariant: bool = declare(
        False, "compute each request's tokens and log-probabilities to the same bits whoever is served beside it"
    )
    generation_config: Literal["auto", "none"] = declare(
        "auto", "sampling defaults of requests: `auto` as in the model's generation_config.json, `none` as OpenAI's"
    )
    trust_remote_code: bool = declare(False, "run Python files that a model's folder brings along")
    pooling: Literal["auto", "off", "last", "mean", "cls", "rank"] = declare(
        "auto",
        "vectors and scores: `auto` as the model's folder says (by sentence-transformers' files, or its name), none, "
        "vectors of the last token, the mean of all or the first one, or ranking by yes and no",
    )
    device_share: float = declare(
        1.0, "share of the device's time, relative to other models', while several have work", ge=0.01
    )

    @property
    def name(self) -> str:
        """What clients call the model without an adapter: unless told otherwise its own name."""
        return self.served_model_name or Path(self.model.rstrip("/")).name.removesuffix(".gguf")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return parse_adapters(self.adapter or "")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CacheConfig:
    """[cache]: the paged KV pool."""

    kv_cache_memory: Size = declare(
        "auto", "the most that the KV pool may grow to: `auto`, bytes, or like 4GiB or 512MB"
    )
    num_kv_blocks: int | None = declare(None, "exact number of KV blocks, all at start; no kv_cache_memory", ge=8)
    kv_bits: Annotated[Literal["full", "8", "k8v4", "4", "auto"], UNQUOTED] = declare(
        FULL_KV,
        "bits a number of K and V: as many as the model computes in, or fewer for less memory and slower attention; "
        "`k8v4`: 8 of K and 4 of V; `auto`: the fewest that lose little, by a measurement at load",
    )
    prefix_caching: bool = declare(True, "reuse the blocks of shared prompt prefixes")
    isolation: Literal["none", "tier", "key"] = declare(
        "key",
        "whose prefixes are shared: those of one `key`, those of a `tier`, or everyone's (`none`); hit times tell "
        "what others asked",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MemoryConfig:
    """[memory]: what all models may hold together; see docs/memory.md."""

    memory_limit: Limit = declare(
        "auto", "memory for weights, KV pools and activations: `auto`, a size like 12GiB, or a share like 70%"
    )
    memory_reserve: Share = declare("10%", "memory that loading and growing leave to the system and other programs")
    wire_memory: bool = declare(
        False,
        "on a Mac, keep weights and KV pools wired: no slower first step after idling, and a risk of kernel panics",
    )
    kv_disk: Annotated[Text, UNQUOTED, form(parse_disk_size, "auto")] = declare(
        None,
        "keep prefixes on disk beyond memory, unloading and restarts, in so much: a size like 50GB, or `auto`, a tenth "
        "of what is free; see docs/kv-disk.md",
    )
    kv_disk_dir: Text = declare(
        None, "folder for these prefixes, of one server at a time; default: kv-disk in the home folder (MLX_SERVE_HOME)"
    )
    kv_disk_writes_per_day: Annotated[str, UNQUOTED, form(parse_size)] = declare(
        "64GB", "the most that is written there a day, for the SSD's sake"
    )
    kv_disk_bits: Annotated[Literal["full", "8"], UNQUOTED] = declare(
        FULL_KV, "bits a number of K and V there: as many as in the pool, or fewer for less room and fewer writes"
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PoolConfig:
    """[pool]: which models clients may name beside those declared, and how long each stays; see docs/models.md."""

    model_folders: Text = declare(
        None, "folders whose models clients may name, each by its own folder's name; several are joined by `:`"
    )
    pulled_models: bool = declare(False, "let clients name every model that `mlx-serve models ls` lists")
    idle_ttl_s: float = declare(
        0.0, "unload a model that is not pinned when nobody has used it for so long; 0 is never", ge=0
    )
    when_full: Literal["wait", "fail"] = declare(
        "wait",
        "requests for a model whose memory is held by models in use: let them `wait`, or let them `fail` at once",
    )
    room_timeout_s: float = declare(
        120.0, "longest wait of a request for a model whose memory is held by models in use", ge=0
    )
    residency_s: float = declare(
        10.0,
        "how long a loaded model is used before its new requests wait for those of a model that needs its memory",
        ge=0,
    )
    retry_failed_s: float = declare(30.0, "pause before a model that could not be loaded is tried again", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SchedulerConfig:
    """[scheduler]: who runs when."""

    max_num_seqs: int = declare(64, "most requests that run at once", ge=1)
    max_num_batched_tokens: int = declare(2048, "token budget of one step", ge=32)
    aging_rate: float = declare(0.1, "priority levels gained per second of waiting", ge=0)
    async_scheduling: bool = declare(True, "prepare the next step while one runs")
    speculate: Literal["auto", "off", "ngram", "model", "mtp"] = declare(
        "auto",
        "check several tokens in one step where that is measured to be faster: those that followed the same text "
        "before (`ngram`), those of the draft model (`model`) or of the model's own multi-token-prediction heads "
        "(`mtp`), or the first and what there is of the others (`auto`); answers stay the same token for token",
    )
    max_draft_tokens: int = declare(8, "most tokens that a request's step checks ahead", ge=1, le=31)
    target_step_ms: float | None = declare(
        None,
        "target time of a step while someone decodes; default: the time of 128 prompt tokens (32 on a GPU), "
        "within 100 to 400 ms",
        ge=1,
    )
    max_step_ms: float = declare(
        1000.0,
        "target time of a step while nobody decodes, or only tiers worse than the one whose prompt it computes",
        ge=1,
    )
    max_num_waiting: int = declare(1024, "most requests that may wait", ge=1)
    max_queued_tokens: int = declare(4_000_000, "most prompt tokens that may wait", ge=1)
    queue_timeout_s: float = declare(600.0, "longest wait for a first step; 0 is for ever", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ServerConfig:
    """[server]: the HTTP side."""

    host: str = declare("127.0.0.1", "address to listen on")
    port: int = declare(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    ollama_port: int | None = declare(
        None, "second port, for clients that look for Ollama, at 11434 in most cases; default: none", ge=1, le=65535
    )
    api_key: Text = declare(
        None,
        "one shared key for all clients; others can see it on a command line, so better use api_key_file",
        repr=False,
    )
    api_key_file: Text = declare(None, "file with the shared key in it")
    api_key_tier: str = declare(
        DEFAULT_TIER, "tier of whoever uses the shared key, and of all callers where no key is asked for"
    )
    admin_key: Text = declare(
        None, "key for the routes that change the server; without any key, local clients may use them", repr=False
    )
    admin_key_file: Text = declare(None, "file with the admin key in it")
    key_file: Text = declare(
        None, "SQLite file of `mlx-serve keys`; default: keys.sqlite in the home folder (MLX_SERVE_HOME)"
    )
    allowed_hosts: Annotated[str, form(parse_hosts)] = declare(
        "0.0.0.0,host.docker.internal",
        "names beside localhost by which clients may call a server that is open to its own machine, joined by commas",
    )
    allowed_origins: Annotated[Text, form(parse_origins)] = declare(
        None,
        "web pages that browsers let call the server beside those of localhost: origins like https://chat.example, "
        "joined by commas, or `*`",
    )
    allowed_media_domains: Annotated[str, form(parse_hosts)] = declare(
        "", "hosts that images are fetched from, exact names joined by commas; default: none; see docs/images.md"
    )
    allowed_media_path: Text = declare(None, "folder in which `file:` URLs may name images; default: none")
    max_image_pixels: int = declare(
        1_500_000, "pixels of an image; larger images are made smaller before the model sees them", ge=1024
    )
    open_schemas: bool = declare(
        False,
        "let answers have members that their schema does not name, unless it says `additionalProperties: false`; "
        "requests may say so themselves",
    )
    tls_cert: Text = declare(None, "PEM file with a certificate, and the chain behind it, to serve HTTPS")
    tls_key: Text = declare(None, "PEM file with the certificate's key, not encrypted")
    client_timeout_s: float = declare(
        30.0, "longest wait for a client to send the rest of a request or to take the next bytes; 0 is for ever", ge=0
    )
    max_connections: int | None = declare(
        None, "most connections at a time; default: what the limit of open files has room for", ge=1
    )
    sse_keep_alive_s: float = declare(15.0, "seconds between keep-alive comments on a silent stream; 0 is off", ge=0)
    drain_timeout_s: float = declare(30.0, "longest wait for open streams at shutdown, in seconds", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = declare("info", "what is logged")
    log_format: Literal["text", "json"] = declare("text", "lines for people, or one JSON object a line")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ObservabilityConfig:
    """[observability]: traces, and what metrics show beyond those that are always there."""

    tracing: Literal["off", "console", "otlp"] = declare(
        "off", "where spans go; otlp: to OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318"
    )
    trace_prompts: bool = declare(False, "put the text of prompts and answers into spans")
    kv_cache_metrics: bool = declare(False, "show at /metrics how long KV blocks keep what is in them")
    kv_cache_metrics_sample: float = declare(0.01, "share of the blocks that this is found out from", ge=0, le=1)
    trace_every_steps: int = declare(100, "of so many steps one gets a span of its own; 0 is none", ge=0)


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
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    tiers: Mapping[str, Tier] = dataclasses.field(default_factory=default_tiers)
    models: tuple[ModelEntry, ...] = ()

    @property
    def draft_model(self) -> Config | None:
        """The settings of the draft model, if there is one to be loaded: its pool grows as far as it has to."""
        if self.model.draft_model is None or self.scheduler.speculate in ("off", "ngram", "mtp"):
            return None
        model = {"model": self.model.draft_model, "draft_model": None, "adapter": None, "max_model_len": None}
        return self._for_drafts({**model, "mtp_from": None, "quantize": WHOLE_WEIGHTS})

    @property
    def heads(self) -> Config | None:
        """The settings of the model's own heads, if they are to draft, or may where there are some."""
        is_alone = self.fleet.tensor_parallel_size == 1
        may_draft = self.scheduler.speculate == "auto" and self.model.draft_model is None and is_alone
        return self._for_drafts({}) if may_draft or self.needs_heads else None

    @property
    def needs_heads(self) -> bool:
        """Whether a model without heads is refused."""
        return self.scheduler.speculate == "mtp"

    def _for_drafts(self, model: Mapping[str, Any]) -> Config:
        cache = {"kv_cache_memory": "auto", "num_kv_blocks": None, "kv_bits": FULL_KV}
        return _replaced(self, {"model": {**model, "batch_invariant": False}, "cache": cache})

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up, in predictions, too."""
        return self.scheduler.speculate in ("auto", "ngram")

    @property
    def drafts(self) -> bool:
        """Whether anything may draft for the model."""
        return self.looks_up or self.draft_model is not None or self.heads is not None

    def for_model(self, entry: ModelEntry) -> Config:
        """The settings of one of several models."""
        own: dict[str, dict[str, Any]] = {"model": {}, "cache": {}}
        for setting in _model_settings():
            if setting.name in entry.overrides:
                own[setting.section][setting.name] = entry.overrides[setting.name]
        names = {"model": entry.model, "served_model_name": entry.id}
        own["model"] = {"adapter": None, "draft_model": None, "mtp_from": None, **own["model"], **names}
        return _replaced(self, own)


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
    has_draft = config.model.draft_model or any("draft_model" in entry.overrides for entry in config.models)
    if config.scheduler.speculate == "model" and not has_draft:
        raise ConfigError("speculate is `model`, and no model has a draft_model: name one with --draft-model.")
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
    for name in ("model", "served_model_name", "adapter", "draft_model", "mtp_from"):
        if models and name in given:
            raise ConfigError(
                f"{name} is {given[name]}, and there are [[models]], too: give either one model or several. "
                f"The first of [[models]] is the default."
            )


def home() -> Path:
    """Where models and caches are kept: `MLX_SERVE_HOME`, or the user's cache folder."""
    configured = os.environ.get("MLX_SERVE_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "mlx-serve"
