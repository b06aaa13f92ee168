"""Every setting, declared once: its name, type, default, limits and help. Files, environment and flags follow from it.

Precedence: flags over environment (`MLX_SERVE_<SECTION>_<NAME>`) over the TOML file over the defaults. Unknown keys
and variables are errors that name the nearest known one. Nothing here changes after start.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from mlx_server.combinations import check_combinations
from mlx_server.environment import expanded, read_settings
from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig
from mlx_server.model_entries import Adapter, ModelEntry, check_adapter_names, parse_adapters, read_models
from mlx_server.setting import (
    STRICT,
    UNQUOTED,
    Limit,
    Name,
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
    refuse_misplaced,
    refuse_unknown_variables,
)
from mlx_server.tiers import DEFAULT_TIER, Tier, default_tiers, read_tiers

BLOCK_SIZE = 32
"""Tokens in a KV block; the attention kernels depend on it."""

FULL_KV: Final = "full"
FEWER_KV: Final = ("8", "k8v4", "4")
"""Formats of K and V in fewer bits, from the most to the fewest."""

AUTO_KV: Final = "auto"
WHOLE_WEIGHTS: Final = "none"

DEFAULT_MODEL = "smollm2"

_Adapters = Annotated[Text, BeforeValidator(joined), BeforeValidator(check_adapter_names), form(parse_adapters)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelConfig:
    """[model]: which model to serve, and how."""

    model: str = declare(DEFAULT_MODEL, "a folder in mlx-lm format, a hub id, a GGUF file, or `smollm2` (bundled)")
    served_model_name: Text = declare(None, "name that clients use; default: the model's own")
    adapter: _Adapters = declare(
        None,
        "adapters of mlx-lm or PEFT, served beside the model as `model:name`: NAME=FOLDER, or FOLDER, whose last part "
        "is then the name; a hub id may stand for the folder; several are joined by `:`",
    )
    draft_model: Text = declare(None, "a smaller model of the same vocabulary, or a drafter made for this model")
    mtp_from: Text = declare(
        None,
        "hub id of the model that this one was converted from; its multi-token-prediction heads are fetched from there "
        "if they are missing here, with `--speculate auto` and `mtp`",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = declare("auto", "compute type")
    quantize: Annotated[Literal["none", "4", "8", "mxfp4"], UNQUOTED] = declare(
        WHOLE_WEIGHTS,
        "quantize weights once and keep them in the cache folder: `4` or `8` bits (groups of 64), `mxfp4`",
    )
    max_model_len: int | None = declare(None, "context limit in tokens; default: the model's own, if it fits", ge=2)
    attention_backend: Literal["auto", "metal", "cuda", "cpu", "reference"] = declare("auto", "attention kernels")
    batch_invariant: bool = declare(
        False, "compute each request's tokens and log-probabilities to the same bits in any batch"
    )
    generation_config: Literal["auto", "none"] = declare(
        "auto",
        "sampling defaults: those of the model's generation_config.json (`auto`) or OpenAI's (`none`)",
    )
    trust_remote_code: bool = declare(False, "run Python files in a model's folder")
    pooling: Literal["auto", "off", "last", "mean", "cls", "rank"] = declare(
        "auto",
        "vectors and scores: `auto` as the model's folder says (sentence-transformers' files, or its name), `off`, "
        "vectors of the `last` token, the `mean` of all or the first (`cls`), or `rank`ing by yes and no",
    )
    device_share: float = declare(
        1.0, "share of the device's time, relative to other models, while several have work", ge=0.01
    )

    @property
    def name(self) -> str:
        """What clients call the model without an adapter; by default its own name."""
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
    num_kv_blocks: int | None = declare(
        None, "exact number of KV blocks, all at start, instead of kv_cache_memory", ge=8
    )
    kv_bits: Annotated[Literal["full", "8", "k8v4", "4", "auto"], UNQUOTED] = declare(
        FULL_KV,
        "bits of each number of K and V: as many as the model computes in (`full`), or fewer, which saves memory and "
        "slows attention; `k8v4`: 8 for K, 4 for V; `auto`: the fewest that lose little, measured at load",
    )
    prefix_caching: bool = declare(True, "reuse the blocks of shared prompt prefixes")
    isolation: Literal["none", "tier", "key"] = declare(
        "key",
        "who shares cached prefixes: the requests of one `key`, of one `tier`, or all (`none`); hit times reveal to "
        "them what the others asked",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MemoryConfig:
    """[memory]: what all models together may use; see docs/memory.md."""

    memory_limit: Limit = declare(
        "auto", "memory for weights, KV pools and activations: `auto`, a size like 12GiB, or a share like 70%"
    )
    memory_reserve: Share = declare("10%", "memory that loading and growing leave to the system and other programs")
    wire_memory: bool = declare(
        False,
        "on a Mac, keep weights and KV pools wired: the first step after idling is not slower, at the risk of kernel "
        "panics",
    )
    kv_disk: Annotated[Text, UNQUOTED, form(parse_disk_size, "auto")] = declare(
        None,
        "keep prefixes on disk, so that they outlive eviction, unloading and restarts: the most space to use, like "
        "50GB, or `auto`, a tenth of what is free; see docs/kv-disk.md",
    )
    kv_disk_dir: Text = declare(
        None,
        "folder of these prefixes, for one server at a time; default: kv-disk in the home folder (MLX_SERVE_HOME)",
    )
    kv_disk_writes_per_day: Annotated[str, UNQUOTED, form(parse_size)] = declare(
        "64GB", "the most that is written there in a day, to spare the SSD"
    )
    kv_disk_bits: Annotated[Literal["full", "8"], UNQUOTED] = declare(
        FULL_KV, "bits of each number of K and V there: as many as in the pool (`full`), or 8, to save space and writes"
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PoolConfig:
    """[pool]: which other models clients may ask for, and how long each stays loaded; see docs/models.md."""

    model_folders: Text = declare(
        None, "folders with models that clients may ask for by their folders' names; several are joined by `:`"
    )
    pulled_models: bool = declare(False, "let clients ask for every model that `mlx-serve models ls` lists")
    idle_ttl_s: float = declare(0.0, "unload a model that is not pinned after this time without use; 0: never", ge=0)
    when_full: Literal["wait", "fail"] = declare(
        "wait",
        "what requests do if the memory for their model is held by models in use: `wait`, or `fail` at once",
    )
    room_timeout_s: float = declare(120.0, "longest wait for memory that is held by models in use", ge=0)
    residency_s: float = declare(
        10.0,
        "how long a loaded model serves before its new requests wait for a model that needs its memory",
        ge=0,
    )
    retry_failed_s: float = declare(30.0, "pause before a model that could not be loaded is tried again", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SchedulerConfig:
    """[scheduler]: which requests run when; see docs/scheduling.md."""

    max_num_seqs: int = declare(64, "most requests that run at once", ge=1)
    max_num_batched_tokens: int = declare(2048, "token budget of one step", ge=32)
    aging_rate: float = declare(0.1, "priority levels gained per second of waiting", ge=0)
    async_scheduling: bool = declare(True, "prepare the next step while one runs")
    speculate: Literal["auto", "off", "ngram", "model", "mtp"] = declare(
        "auto",
        "draft tokens and check several in one step where that is measured to be faster; drafts are tokens that "
        "followed the same text before (`ngram`), or come from the draft model (`model`), from the model's own "
        "multi-token-prediction heads (`mtp`), or all that there are (`auto`); answers stay the same token for token",
    )
    max_draft_tokens: int = declare(8, "most drafts of one request in a step", ge=1, le=31)
    target_step_ms: float | None = declare(
        None,
        "target time of a step while requests decode; default: the time of 128 prompt tokens (32 on a GPU), within "
        "100 to 400 ms",
        ge=1,
    )
    max_step_ms: float = declare(
        1000.0,
        "target time of a step while no request decodes, or only requests of worse tiers than the prompt's",
        ge=1,
    )
    max_num_waiting: int = declare(1024, "most requests that may wait", ge=1)
    max_queued_tokens: int = declare(4_000_000, "most prompt tokens that may wait", ge=1)
    queue_timeout_s: float = declare(600.0, "longest wait for a first step; 0: no limit", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ServerConfig:
    """[server]: the HTTP side."""

    host: Name = declare("127.0.0.1", "address to listen on")
    port: int = declare(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    ollama_port: int | None = declare(
        None, "second port, for clients that look for Ollama, usually 11434; default: none", ge=1, le=65535
    )
    api_key: Text = declare(
        None,
        "one shared key for all clients; on a command line other users can see it, so prefer api_key_file",
        repr=False,
    )
    api_key_file: Text = declare(None, "file with the shared key in it")
    api_key_tier: str = declare(
        DEFAULT_TIER, "tier of callers with the shared key, and of all callers if no key is required"
    )
    admin_key: Text = declare(
        None,
        "key for the routes that change the server; without any key, local clients may use them",
        repr=False,
    )
    admin_key_file: Text = declare(None, "file with the admin key in it")
    key_file: Text = declare(
        None, "SQLite file of `mlx-serve keys`; default: keys.sqlite in the home folder (MLX_SERVE_HOME)"
    )
    allowed_hosts: Annotated[str, form(parse_hosts)] = declare(
        "0.0.0.0,host.docker.internal",
        "host names besides localhost by which clients may call a server that listens on its own machine only, joined "
        "by commas",
    )
    allowed_origins: Annotated[Text, form(parse_origins)] = declare(
        None,
        "web pages that may call the server from a browser, besides those of localhost: origins like "
        "https://chat.example, joined by commas, or `*`",
    )
    allowed_media_domains: Annotated[str, form(parse_hosts)] = declare(
        "", "hosts from which images are fetched, exact names joined by commas; default: none; see docs/images.md"
    )
    allowed_media_path: Text = declare(None, "folder from which `file:` URLs may load images; default: none")
    max_image_pixels: int = declare(1_500_000, "pixels of an image; larger images are scaled down", ge=1024)
    open_schemas: bool = declare(
        False,
        "let answers have members that their schema does not name, unless it says `additionalProperties: false`; a "
        "request may ask for this, too",
    )
    tls_cert: Text = declare(None, "PEM file with a certificate and its chain, to serve HTTPS")
    tls_key: Text = declare(None, "PEM file with the certificate's key, unencrypted")
    client_timeout_s: float = declare(
        30.0, "longest wait for a client to send the rest of a request or to take the next bytes; 0: no limit", ge=0
    )
    max_connections: int | None = declare(
        None, "most connections at a time; default: what the limit of open files allows", ge=1
    )
    sse_keep_alive_s: float = declare(15.0, "seconds between keep-alive comments on a silent stream; 0: off", ge=0)
    keep_awake: bool = declare(True, "keep a Mac with an open lid from sleeping while it computes or fetches")
    drain_timeout_s: float = declare(30.0, "longest wait for open streams at shutdown, in seconds", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = declare("info", "what is logged")
    log_format: Literal["text", "json"] = declare("text", "plain lines, or one JSON object a line")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ObservabilityConfig:
    """[observability]: traces, and metrics that are off by default."""

    tracing: Literal["off", "console", "otlp"] = declare(
        "off", "where spans go; otlp: to OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318"
    )
    trace_prompts: bool = declare(False, "put the text of prompts and answers into spans")
    kv_cache_metrics: bool = declare(False, "show at /metrics how long KV blocks keep their content")
    kv_cache_metrics_sample: float = declare(0.01, "share of the blocks that are sampled for this", ge=0, le=1)
    trace_every_steps: int = declare(100, "trace one step in this many with a span of its own; 0: none", ge=0)


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
        """The settings of the draft model, if one is to be loaded. Its pool may grow as far as necessary."""
        if self.model.draft_model is None or self.scheduler.speculate in ("off", "ngram", "mtp"):
            return None
        model = {"model": self.model.draft_model, "draft_model": None, "adapter": None, "max_model_len": None}
        return self._for_drafts({**model, "mtp_from": None, "quantize": WHOLE_WEIGHTS})

    @property
    def heads(self) -> Config | None:
        """The settings of the model's own heads, if these must or may draft."""
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
        """Whether drafts are looked up in earlier text and in predicted outputs."""
        return self.scheduler.speculate in ("auto", "ngram")

    @property
    def drafts(self) -> bool:
        """Whether anything may draft for the model."""
        return self.looks_up or self.draft_model is not None or self.heads is not None

    def for_model(self, entry: ModelEntry) -> Config:
        """The settings of one of several models."""
        own: dict[str, dict[str, Any]] = {"model": {}, "cache": {}}
        if "kv_cache_memory" in entry.overrides:  # the pool has one size, and the model's own wins
            own["cache"]["num_kv_blocks"] = None
        elif "num_kv_blocks" in entry.overrides:
            own["cache"]["kv_cache_memory"] = "auto"
        for setting in _model_settings():
            if setting.name in entry.overrides:
                own[setting.section][setting.name] = entry.overrides[setting.name]
        names = {"model": entry.model, "served_model_name": entry.id}
        own["model"] = {"adapter": None, "draft_model": None, "mtp_from": None, **own["model"], **names}
        return _replaced(self, own)


_SECTIONS: Mapping[str, Any] = {
    section.name: section.default_factory
    for section in dataclasses.fields(Config)
    if section.name not in ("tiers", "models")  # there may be any number of these, so they are not settings
}


def settings() -> tuple[Setting, ...]:
    """Every setting in declaration order."""
    return tuple(
        Setting(section, name, field)
        for section, declared in _SECTIONS.items()
        for name, field in keys(declared).items()
    )


def _model_settings() -> tuple[Setting, ...]:
    """The settings that each of several models may have of its own. Isolation is one promise to all callers."""
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
    refuse_unknown_variables(environ, [setting.env for setting in settings()])
    for setting in settings():
        given = {setting.env: environ.get(setting.env), setting.flag: joined(flags.get(setting.name))}
        for source, value in given.items():
            if value is not None:
                parsed = read_text(_SECTIONS[setting.section], setting.name, str(value), source)
                _check_one_way({setting.name: parsed}, config.models)
                config = _replaced(config, {setting.section: {setting.name: parsed}})
    check_combinations(config)
    return config


def _replaced(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """A copy of `config` with other values of some settings, by section and name."""
    sections: dict[str, Any] = {
        section: dataclasses.replace(getattr(config, section), **values) for section, values in changes.items()
    }
    return dataclasses.replace(config, **sections)


def _file_config(path: Path) -> Config:
    try:
        document = tomllib.loads(read_settings(path))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply.") from error
    except ValueError as error:  # TOML's, UTF-8's, or an integer's that is too long
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    overridable = {setting.name: _SECTIONS[setting.section] for setting in _model_settings()}
    found: dict[str, Any] = {
        "tiers": read_tiers(document.pop("tiers", {}), str(path)),
        "models": read_models(document.pop("models", []), overridable, str(path)),
    }
    homes = {setting.name: setting.section for setting in settings()}
    for section, values in document.items():
        refuse_misplaced(section, values, homes, str(path))
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{nearest(section, (*_SECTIONS, *found))}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a section, like [{section}].")
        found[section] = read_table(_SECTIONS[section], values, f"{path}: [{section}]")
    _check_one_way(document.get("model", {}), found["models"])
    return Config(**found)


def _check_one_way(given: Mapping[str, Any], models: tuple[ModelEntry, ...]) -> None:
    """A server has either one model or those of [[models]]."""
    for name in ("model", "served_model_name", "adapter", "draft_model", "mtp_from"):
        if models and name in given:
            raise ConfigError(
                f"{name} is {given[name]}, and there are [[models]], too: give either one model or several. "
                f"The first of [[models]] is the default."
            )


def home() -> Path:
    """The folder of models and caches: `MLX_SERVE_HOME`, or a folder in the user's cache folder."""
    return expanded(os.environ.get("MLX_SERVE_HOME") or "~/.cache/mlx-serve")
