"""What each layer of a model keeps between steps, found by tracing tokens through mlx-lm's own caches; and the sizes of
the pools for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.config import BLOCK_SIZE, CacheConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.kv_cache import (
    LayerCache,
    ListLayerCache,
    PagedKVCache,
    PagedLayerCache,
    StateLayerCache,
    leaves,
)
from mlx_server.runtime.cache.sparse_caches import (
    IndexedLayerCache,
    PooledLayerCache,
    UnkeptLayerCache,
    WindowLayerCache,
)
from mlx_server.runtime.memory import first_kv_blocks, kept_slots, max_kv_blocks, state_slots

_NUM_TRACED = 9
"""Tokens at a time: more than the reach of any convolution or n-gram in mlx-lm's recurrent layers."""

_CACHE_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
"""The modules of cache classes that are known here by name."""

_INDEXED = "K/V and index keys"
"""The kind of caches, of models' own classes, that hold both."""

_NO_METAL = "No Metal back-end"
"""Part of MLX's error for a Metal kernel without Metal."""


def discover_layers(model: Any) -> list[LayerCache]:
    """Our caches for `model` instead of mlx-lm's. Uses shapes only, so nothing is computed. Raises `ModelLoadError` for
    a kind of cache that cannot be paged, and for a model that fails in mlx-lm itself."""
    try:
        plain = make_prompt_cache(model)
    except Exception as error:  # models' own code
        raise model_failure(model, error) from error
    for index, cache in enumerate(plain):
        _refuse_unpageable(index, cache)
    _trace(model, plain)
    shapes = [_state_shapes(cache) for cache in plain]
    _trace(model, plain)
    for index, cache in enumerate(plain):
        if _state_shapes(cache) != shapes[index]:
            raise ModelLoadError(
                f"Layer {index} keeps a recurrent state that grows after {_NUM_TRACED} tokens; slots have a fixed size."
            )
    parts = [part for cache in plain if _kind(cache) == "CacheList" for part in cache.caches]
    if parts:
        windows = [part.ratio for part in parts if _kind(part) == "PoolingCache"]
        _trace(model, plain, max([_NUM_TRACED, *windows]))
        _trace(model, plain, 1)  # some write a cache only with many tokens
    has_rows_of_windows = any(_kind(part) == "PoolingCache" for part in parts)
    return [_layer_cache(index, cache, keeps_windows=has_rows_of_windows) for index, cache in enumerate(plain)]


def model_failure(model: Any, error: Exception) -> ModelLoadError:
    """The error for a model that fails with mlx-lm's own caches."""
    kind = getattr(model, "model_type", type(model).__name__)
    if _NO_METAL in str(error):
        return ModelLoadError(
            f"Models of type {kind} run on Macs only: mlx-lm computes them with Metal kernels, and this machine has no "
            "Metal GPU."
        )
    return ModelLoadError(f"Models of type {kind} do not run in mlx-lm itself: {type(error).__name__}: {error}")


def _trace(model: Any, cache: list[Any], num_tokens: int = _NUM_TRACED) -> None:
    try:
        model(mx.array([[0] * num_tokens]), cache=cache)
    except Exception as error:  # mlx-lm raises errors of any kind
        raise model_failure(model, error) from error


def _state_shapes(cache: Any) -> list[tuple[int, ...]]:
    if _kind(cache) == "CacheList":
        return [shape for part in cache.caches for shape in _state_shapes(part)]
    return [array.shape for array in cache.cache if array is not None] if _kind(cache) == "ArraysCache" else []


def _kind(cache: Any) -> str:
    """The name of its class; empty if the class is not mlx-lm's or mlx-vlm's. A model's own KVCache is a KVCache if it
    has the same attributes and masks: then it differs in how its memory grows. A window or an indexer needs more."""
    kind, base = type(cache), type(cache).__base__
    if kind.__module__ in _CACHE_MODULES:
        return kind.__name__
    if any(hasattr(kind, name) for name in ("update_indexer", "update_index_and_fetch")):
        return _INDEXED
    is_same = (
        base is not None
        and base.__name__ == "KVCache"
        and base.__module__ in _CACHE_MODULES
        and "make_mask" not in vars(kind)
        and all(hasattr(base, name) for name in vars(kind))
        and vars(cache).keys() == vars(base()).keys()
    )
    return "KVCache" if is_same else ""


def attention_specs(caches: list[LayerCache]) -> list[LayerSpec]:
    """The specs of layers with attention; others store keys only."""
    specs = [cache.spec for cache in leaves(caches) if isinstance(cache, PagedLayerCache)]
    return [spec for spec in specs if spec.value_dim]


def _refuse_unpageable(index: int, cache: Any) -> None:
    kind = _kind(cache)
    if kind == "CacheList":
        for part in cache.caches:
            _refuse_unpageable(index, part)
    elif kind not in ("ArraysCache", "ChunkedKVCache", "KVCache", "PoolingCache", "RotatingKVCache", _INDEXED):
        raise ModelLoadError(
            f"Layer {index} keeps its state in a {type(cache).__name__}, which is not supported. Supported are "
            "mlx-lm's caches for attention (full, sliding window, chunked) and recurrent states."
        )
    elif kind == "RotatingKVCache" and cache.keep:
        raise ModelLoadError(
            f"Layer {index} keeps its first {cache.keep} tokens outside its sliding window, which is not supported."
        )


def _layer_cache(index: int, cache: Any, *, keeps_windows: bool = False) -> LayerCache:
    """`keeps_windows`: those of attention are recurrent states, beside rows of blocks that are much smaller."""
    kind = _kind(cache)
    make = partial(_layer_cache, index, keeps_windows=keeps_windows)
    if kind == "CacheList":
        length = max((part.offset for part in cache.caches if _kind(part) == "KVCache"), default=0)
        is_kept = [_kind(part) != "KVCache" or part.offset == length for part in cache.caches]
        parts = zip(cache.caches, is_kept)
        return ListLayerCache([make(part) if kept else UnkeptLayerCache() for part, kept in parts])
    if kind == "ArraysCache":
        return StateLayerCache(cache.cache)
    if kind == "PoolingCache":
        tokens = (cache.buf_kv, cache.buf_gate)
        return PooledLayerCache.of(cache.ratio, tokens, cache.pooled, overlaps=hasattr(cache, "before"))
    if keeps_windows and kind == "RotatingKVCache" and cache.keys is not None:
        return WindowLayerCache(cache.max_size, cache.keys, cache.values)
    if kind == _INDEXED:
        keys = cache.index_keys
        heads = keys.shape[1] if keys.ndim == 4 else 1
        spec = LayerSpec(heads, keys.shape[-1], 0, keys.dtype)
        return IndexedLayerCache([_paged(index, getattr(cache, "kv_cache", cache)), PagedLayerCache(None, spec)])
    return _paged(index, cache)


def _paged(index: int, cache: Any) -> PagedLayerCache:
    kind = _kind(cache)
    if cache.keys is None:
        raise ModelLoadError(f"Layer {index} has a cache but stores nothing in it, which is not supported.")
    _, num_kv_heads, _, key_dim = cache.keys.shape
    dtype = mx.float32 if cache.keys.dtype == mx.bool_ else cache.keys.dtype  # a mark of each token, as a number
    spec = LayerSpec(num_kv_heads, key_dim, cache.values.shape[-1], dtype)
    window = cache.max_size if kind == "RotatingKVCache" else None
    return PagedLayerCache(window, spec, is_chunked=kind == "ChunkedKVCache")


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The most tokens of all running requests, the memory that a model's pools may take in all, and the memory that is
    free now, shares of which are for recurrent states, whose number is fixed."""

    max_num_tokens: int
    kv_limit_bytes: int
    state_limit_bytes: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Slots for the recurrent states of `max_num_seqs` requests, `num_spares` of which may draft at a time, and of
    `num_checkpoints` prefixes, with `state_bytes` in all; and `num_blocks` blocks, which may grow to `max_blocks`."""

    max_num_seqs: int
    num_spares: int
    num_checkpoints: int
    state_bytes: int
    num_blocks: int
    max_blocks: int
    block_bytes: int

    @property
    def all_slots(self) -> int:
        """Slots for states of running requests, including those behind drafts."""
        return self.max_num_seqs + self.num_spares

    @property
    def first_bytes(self) -> int:
        """What is allocated before the first request."""
        return self.num_blocks * self.block_bytes + self.state_bytes


def plan_pools(
    cache: PagedKVCache, settings: CacheConfig, room: PoolRoom, *, max_num_seqs: int, drafts: bool
) -> PoolPlan:
    """The pools of `cache` for at most `max_num_seqs` requests at a time. No states are kept for prefixes unless
    prefixes are cached. Raises `InsufficientMemoryError` or `ConfigError` if the pool asked for is impossible."""
    slot_bytes = cache.slot_bytes
    num_slots = state_slots(slot_bytes, max_num_seqs, room.state_limit_bytes)
    num_spares, num_checkpoints = kept_slots(
        slot_bytes, num_slots, room.state_limit_bytes, drafts=drafts, prefixes=settings.prefix_caching
    )
    state_bytes = (num_slots + num_spares + num_checkpoints) * slot_bytes
    block_bytes = max(1, cache.block_bytes)  # some models keep nothing in blocks
    num_groups = len(cache.windows)
    max_blocks = num_groups * max_kv_blocks(
        settings.kv_cache_memory,
        settings.num_kv_blocks,
        num_groups * block_bytes,
        -(-room.max_num_tokens // BLOCK_SIZE),
        room.kv_limit_bytes - state_bytes,
    )
    num_blocks = num_groups * (settings.num_kv_blocks or first_kv_blocks(max_blocks // num_groups))
    return PoolPlan(num_slots, num_spares, num_checkpoints, state_bytes, num_blocks, max_blocks, block_bytes)
