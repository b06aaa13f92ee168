"""Settings that depend on each other: those that contradict each other are refused, and those that change nothing are
named in the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_server.errors import ConfigError
from mlx_server.setting import keys, nearest

if TYPE_CHECKING:
    from mlx_server.config import Config


def check_combinations(config: Config) -> None:
    """Raises `ConfigError` for settings that contradict each other."""
    has_draft = config.model.draft_model or any("draft_model" in entry.overrides for entry in config.models)
    if config.scheduler.speculate == "model" and not has_draft:
        raise ConfigError("speculate is `model`, but no model has a draft_model; give one with --draft-model.")
    if config.server.port and config.server.ollama_port == config.server.port:
        raise ConfigError(f"--ollama-port is {config.server.port}, and so is --port: choose another one for either.")
    if config.server.api_key_tier not in config.tiers:
        name = config.server.api_key_tier
        raise ConfigError(f"api_key_tier is {name}, which is not declared{nearest(name, config.tiers)}")
    for own, where in _models(config):
        memory, num_blocks = own.cache.kv_cache_memory, own.cache.num_kv_blocks
        if num_blocks is not None and memory != "auto":
            raise ConfigError(
                f"{where}kv_cache_memory is {memory}, and num_kv_blocks is {num_blocks}, which is the size of the same "
                "KV pool: give one of them."
            )


def without_effect(config: Config) -> Iterator[str]:
    """A sentence for each setting that was given and changes nothing because of another one."""
    pool, observability = config.pool, config.observability
    may_unload = bool(config.models or pool.model_folders or pool.pulled_models)
    dependent = (
        (config.memory, ("kv_disk_dir", "kv_disk_bits", "kv_disk_writes_per_day"), "kv_disk", config.memory.kv_disk),
        (pool, ("idle_ttl_s",), "[[models]], model_folders or pulled_models: a single model stays loaded", may_unload),
        (observability, ("trace_prompts", "trace_every_steps"), "tracing", observability.tracing != "off"),
        (observability, ("kv_cache_metrics_sample",), "kv_cache_metrics", observability.kv_cache_metrics),
        (config.fleet, ("kv_events_topic",), "kv_events", config.fleet.kv_events),
        (config.fleet, ("tensor_parallel_host",), "tensor_parallel_size", config.fleet.tensor_parallel_size > 1),
    )
    for section, names, needed, is_used in dependent:
        for name in () if is_used else names:
            value = getattr(section, name)
            if value != keys(section)[name].default:
                yield f"{name} is {value}, which has no effect without {needed}."
    yield from _without_drafts(config)
    for tier in config.tiers.values():
        for path, floor in tier.floors.items():
            if floor < tier.priority:
                yield (
                    f"[tiers.{tier.name}]: the floor of {path} is {floor.name.lower()}, which has no effect: floors "
                    f"only lower the tier's priority, {tier.priority.name.lower()}."
                )


def _without_drafts(config: Config) -> Iterator[str]:
    speculate = config.scheduler.speculate
    for own, where in _models(config):
        draft_model, mtp_from = own.model.draft_model, own.model.mtp_from
        if draft_model is not None and own.draft_model is None:
            yield f"{where}draft_model is {draft_model}, which has no effect with speculate = {speculate}."
        if mtp_from is not None and speculate not in ("auto", "mtp"):
            yield f"{where}mtp_from is {mtp_from}, which has no effect with speculate = {speculate}."
        elif mtp_from is not None and speculate == "auto" and draft_model is not None:
            yield f"{where}mtp_from is {mtp_from}, which has no effect beside a draft_model, unless speculate is mtp."


def _models(config: Config) -> Iterator[tuple[Config, str]]:
    """The settings of each model, and what messages about them begin with."""
    if not config.models:
        yield config, ""
    for entry in config.models:
        yield config.for_model(entry), f"[[models]] {entry.id}: "
