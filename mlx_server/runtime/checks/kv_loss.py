"""What K/V in fewer bits cost a model, measured at load on its own K/V: how often its most likely next token is still
the same, and how far its distributions are from those with whole K/V."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import AUTO_KV, BLOCK_SIZE, FEWER_KV, FULL_KV
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.outputs import CopyPlace, ScheduledChunk
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.layers import attention_specs
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.layers.adapters import NONE
from mlx_server.runtime.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4 * BLOCK_SIZE
_TOLD_DIVERGENCE, _MOST_DIVERGENCE = 0.1, 0.5
"""Nats from which K/V in fewer bits are warned of, and refused. SmolLM2-135M has 0.06 with 4 bits; where answers were
no longer of use, it was 1."""


@dataclass(frozen=True, slots=True)
class KvLoss:
    """`agreement` is the share of positions whose most likely token is that with whole K/V; `divergence` the mean
    Kullback-Leibler divergence of the distributions, in nats."""

    agreement: float
    divergence: float

    @classmethod
    def of(cls, wanted: mx.array, got: mx.array) -> KvLoss:
        """Of logits `[positions, vocabulary]`."""
        whole, fewer = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (wanted, got))
        is_equal = mx.argmax(whole, axis=-1) == mx.argmax(fewer, axis=-1)
        terms = mx.where(mx.isinf(whole), 0.0, mx.exp(whole) * (whole - fewer))
        return cls(float(is_equal.astype(mx.float32).mean()), float(terms.sum(axis=-1).mean()))


def fixed_tokens(vocab_size: int) -> list[int]:
    """The same for each model of that vocabulary."""
    token_ids: list[int] = np.random.default_rng(0).integers(1, vocab_size, _NUM_TOKENS).tolist()
    return token_ids


def all_logits(
    runner: ModelRunner, token_ids: Sequence[int], on_stored: Callable[[list[CopyPlace]], None] = lambda blocks: None
) -> mx.array:
    """Logits after each token but the first block's, in float32, `[positions, vocabulary]`, of one request that comes
    in chunks of a block: what a chunk sees of those before it has been stored, and `on_stored` called with its
    blocks. The pools are released again. MLX thread."""
    windows, num_blocks = runner.cache.windows, -(-len(token_ids) // BLOCK_SIZE)
    runner.cache.allocate(len(windows) * num_blocks, num_slots=2)
    tables = BlockTables(windows)
    tables.add("text")
    parts = []
    try:
        for block, start in enumerate(range(0, len(token_ids), BLOCK_SIZE)):
            ids = tuple(token_ids[start : start + BLOCK_SIZE])
            block_ids = tuple((group * num_blocks + block,) for group in range(len(windows)))
            chunk = ScheduledChunk("text", start, len(ids), ids, block_ids, True, 0)
            logits = runner.forward(tables.plan([chunk]), mx.array(ids), range(len(ids)), np.full(len(ids), NONE))
            mx.eval(logits, *runner.cache.state())
            on_stored([CopyPlace(block_id, group) for group, (block_id,) in enumerate(block_ids)])
            parts.append(logits.astype(mx.float32))
    finally:
        runner.cache.release()
    return mx.concatenate(parts[1:])


def quantize_kv(runner: ModelRunner, vocab_size: int, kv_bits: str, backend: str) -> Generator[float, None, None]:
    """Stores K/V in fewer bits from now on, with `backend`, or `auto`, where that reads them: as `kv_bits` says, or for
    `auto` in the fewest that lose so little that nobody is warned; where none do, they stay whole. Logs what that
    costs, measured on fixed tokens. Raises `ModelLoadError` where what was asked for leaves too little of the model.
    MLX thread; yields where other models' steps may come in between."""
    measuring = _Measuring(runner, vocab_size, backend)
    yield 1.0
    if kv_bits == AUTO_KV:
        yield from _choose(measuring)
        return
    bits = KvBits.of(kv_bits)
    loss = measuring.store(bits)
    measured = _measured(bits, loss)
    better = ", ".join(reversed(FEWER_KV[: FEWER_KV.index(kv_bits)]))
    remedy = f"--kv-bits {better} or {FULL_KV}" if better else f"--kv-bits {FULL_KV}"
    if not loss.divergence <= _MOST_DIVERGENCE:
        raise ModelLoadError(
            f"Keys or values of this model lose too much: {measured}; up to {_MOST_DIVERGENCE} nats are served. "
            f"Start it with {remedy}."
        )
    measuring.log_memory(bits)
    if loss.divergence > _TOLD_DIVERGENCE:
        logger.warning("This model answers worse: %s. Better: %s.", measured, remedy)
    else:
        logger.info("On fixed tokens, %s.", measured)


class _Measuring:
    """What K/V in fewer bits change, beside whole ones, of which `whole_bytes` are a block's."""

    def __init__(self, runner: ModelRunner, vocab_size: int, backend: str) -> None:
        self._runner, self._backend = runner, backend
        self._token_ids = fixed_tokens(vocab_size)
        self._wanted = all_logits(runner, self._token_ids)
        self._whole_bytes, self._whole_backend = runner.cache.block_bytes, runner.cache.backend

    def store(self, bits: KvBits) -> KvLoss:
        """K/V are stored so from now on. Raises `ConfigError` where they cannot be."""
        cache = self._runner.cache
        cache.quantize(bits)
        cache.backend = choose_backend(self._backend, attention_specs(cache.layers))
        return KvLoss.of(self._wanted, all_logits(self._runner, self._token_ids))

    def store_whole(self) -> None:
        cache = self._runner.cache
        cache.quantize(None)
        cache.backend = self._whole_backend

    def is_slower(self) -> bool:
        """Whether another backend reads them than whole ones: where the best one cannot, a slower one does."""
        return self._runner.cache.backend.name != self._whole_backend.name

    def log_memory(self, bits: KvBits) -> None:
        cache = self._runner.cache
        share = 100 * cache.block_bytes / max(1, self._whole_bytes)
        logger.info(
            "K/V of %s take %.0f %% of the memory and are read by the %s backend.",
            bits.words,
            share,
            cache.backend.name,
        )


def _choose(measuring: _Measuring) -> Generator[float, None, None]:
    reason = "all fewer bits lose more"
    for bits in map(KvBits.of, reversed(FEWER_KV)):
        try:
            loss = measuring.store(bits)
        except ConfigError as error:
            reason = str(error)
            break
        if measuring.is_slower():
            reason = "in fewer bits no fast backend reads them here"
            break
        logger.info("On fixed tokens, %s.", _measured(bits, loss))
        if loss.divergence <= _TOLD_DIVERGENCE:
            measuring.log_memory(bits)
            return
        yield 1.0
    measuring.store_whole()
    logger.info("K/V stay whole: %s", reason)


def _measured(bits: KvBits, loss: KvLoss) -> str:
    return (
        f"with K/V of {bits.words} its distributions are {loss.divergence:.2g} nats from those with whole K/V, and "
        f"{loss.agreement:.0%} of the most likely tokens are the same"
    )
