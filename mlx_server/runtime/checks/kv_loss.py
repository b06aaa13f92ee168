"""What K/V in fewer bits cost a model, measured at load on its own K/V: how often its most likely next token is still
the same, and how far its distributions are from those with whole K/V."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import CopyPlace, ScheduledChunk
from mlx_server.runtime.adapters import NONE
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.cache.layers import attention_specs
from mlx_server.runtime.model_runner import BlockTables, ModelRunner

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4 * BLOCK_SIZE
_SAFER_BITS = 8
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


def quantize_kv(runner: ModelRunner, vocab_size: int, bits: int, backend: str) -> None:
    """Stores K/V in fewer bits from now on, with `backend`, or `auto`, where that reads them. Logs what that costs,
    measured on fixed tokens; raises `ModelLoadError` where it leaves too little of the model. MLX thread."""
    cache, token_ids = runner.cache, fixed_tokens(vocab_size)
    whole_bytes, wanted = cache.block_bytes, all_logits(runner, token_ids)
    cache.quantize(bits)
    cache.backend = choose_backend(backend, attention_specs(cache.layers))
    loss = KvLoss.of(wanted, all_logits(runner, token_ids))
    measured = (
        f"with K/V of {bits} bits its distributions are {loss.divergence:.2g} nats from those with whole K/V, and "
        f"{loss.agreement:.0%} of the most likely tokens are the same"
    )
    remedy = "--kv-bits full" if bits == _SAFER_BITS else f"--kv-bits {_SAFER_BITS} or full"
    if not loss.divergence <= _MOST_DIVERGENCE:
        raise ModelLoadError(
            f"Keys or values of this model lose too much: {measured}; up to {_MOST_DIVERGENCE} nats are served. "
            f"Start it with {remedy}."
        )
    logger.info(
        "K/V of %d bits take %.0f %% of the memory and are read by the %s backend.",
        bits,
        100 * cache.block_bytes / max(1, whole_bytes),
        cache.backend.name,
    )
    if loss.divergence > _TOLD_DIVERGENCE:
        logger.warning("This model answers worse: %s. Better: %s.", measured, remedy)
    else:
        logger.info("On fixed tokens, %s.", measured)
