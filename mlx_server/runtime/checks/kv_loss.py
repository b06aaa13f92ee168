"""What quantised K/V cost a model, measured at load on its own K/V: how often the most likely next token stays the
same, and how far the distributions are from those with unquantised K/V."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import AUTO_KV, BLOCK_SIZE, FEWER_KV, FULL_KV
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.runtime.attention.backends import choose_in_pieces
from mlx_server.runtime.cache.layers import attention_specs
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.checks.probe import TrialRequests
from mlx_server.runtime.layers.adapters import NONE
from mlx_server.runtime.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4 * BLOCK_SIZE
_WARNED_DIVERGENCE, _MAX_DIVERGENCE = 0.1, 0.5
"""Nats above which quantised K/V cause a warning, or are refused. SmolLM2-135M has 0.06 with 4 bits; with useless
answers it was 1."""

_UNMEASURED = "its layers choose the tokens that they attend to, in contexts longer than the text that is measured"


@dataclass(frozen=True, slots=True)
class KvLoss:
    """`agreement` is the share of positions with the same most likely token; `divergence` the mean Kullback-Leibler
    divergence of the distributions from those with unquantised K/V, in nats."""

    agreement: float
    divergence: float

    @classmethod
    def of(cls, expected: mx.array, got: mx.array) -> KvLoss:
        """Compares logits `[positions, vocabulary]`."""
        whole, fewer = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (expected, got))
        is_equal = mx.argmax(whole, axis=-1) == mx.argmax(fewer, axis=-1)
        terms = mx.where(mx.isinf(whole), 0.0, mx.exp(whole) * (whole - fewer))
        return cls(float(is_equal.astype(mx.float32).mean()), float(terms.sum(axis=-1).mean()))


def fixed_tokens(vocab_size: int) -> list[int]:
    """Token ids that depend on the size of the vocabulary only."""
    token_ids: list[int] = np.random.default_rng(0).integers(1, vocab_size, _NUM_TOKENS).tolist()
    return token_ids


def all_logits(runner: ModelRunner, token_ids: Sequence[int]) -> Generator[float, None, mx.array]:
    """Logits after each token except those of the first block, in float32, `[positions, vocabulary]`. One request is
    computed in chunks of a block, so each chunk attends to stored K/V of the chunks before it. Releases the pools. MLX
    thread; yields after each chunk."""
    trial = TrialRequests(runner, {"text": token_ids})
    parts = []
    try:
        for start in range(0, len(token_ids), BLOCK_SIZE):
            chunk = trial.chunk("text", start, min(start + BLOCK_SIZE, len(token_ids)))
            logits = trial.run([chunk], range(chunk.num_tokens), np.full(chunk.num_tokens, NONE))
            parts.append(logits.astype(mx.float32))
            yield 1.0
    finally:
        runner.cache.release()
    return mx.concatenate(parts[1:])


def quantize_kv(runner: ModelRunner, vocab_size: int, kv_bits: str, backend: str) -> Generator[float, None, None]:
    """Stores quantised K/V from now on, in `kv_bits`, read by `backend` (or `auto`). `kv_bits` `auto` chooses the
    fewest bits that lose too little for a warning, and leaves K/V unquantised if there are none, or if that cannot be
    measured. Logs the loss on fixed tokens. Raises `ModelLoadError` if the loss with explicit bits is too large. MLX
    thread; yields where other models' steps may run in between."""
    if kv_bits == AUTO_KV and runner.cache.index_keys:
        logger.info("K/V stay unquantised: %s.", _UNMEASURED)
        return
    measuring = _Measuring(runner, backend)
    yield from measuring.measure_whole(fixed_tokens(vocab_size))
    if kv_bits == AUTO_KV:
        yield from measuring.choose()
        return
    bits = KvBits.of(kv_bits)
    loss = yield from measuring.store(bits)
    measured = _measured(bits, loss)
    better = ", ".join(reversed(FEWER_KV[: FEWER_KV.index(kv_bits)]))
    remedy = f"--kv-bits {better} or {FULL_KV}" if better else f"--kv-bits {FULL_KV}"
    if not loss.divergence <= _MAX_DIVERGENCE:
        raise ModelLoadError(
            f"Quantised K/V lose too much with this model: {measured}; the limit is {_MAX_DIVERGENCE} nats. "
            f"Start it with {remedy}."
        )
    measuring.log_memory(bits)
    if loss.divergence > _WARNED_DIVERGENCE:
        logger.warning("This model's answers get worse: %s. Better: %s.", measured, remedy)
    else:
        logger.info("On fixed tokens, %s.", measured)
    if runner.cache.index_keys:
        logger.warning("The loss in long contexts is not measured: %s.", _UNMEASURED)


class _Measuring:
    """Switches a runner between quantised and unquantised K/V, and compares them."""

    def __init__(self, runner: ModelRunner, backend: str) -> None:
        self._runner, self._backend = runner, backend
        self._whole_bytes, self._whole_backend = runner.cache.block_bytes, runner.cache.backend

    def measure_whole(self, token_ids: Sequence[int]) -> Generator[float, None, None]:
        """Call it first: computes with unquantised K/V what others are compared with."""
        self._token_ids = token_ids
        self._expected = yield from all_logits(self._runner, token_ids)

    def store(self, bits: KvBits) -> Generator[float, None, KvLoss]:
        """Stores K/V in `bits` from now on. Raises `ConfigError` if that is impossible."""
        cache = self._runner.cache
        cache.quantize(bits)
        cache.backend = yield from choose_in_pieces(self._backend, attention_specs(cache.layers))
        return KvLoss.of(self._expected, (yield from all_logits(self._runner, self._token_ids)))

    def choose(self) -> Generator[float, None, None]:
        """Stores K/V in the fewest bits that lose too little for a warning, or unquantised."""
        cache, reason = self._runner.cache, "quantised K/V lose too much"
        for bits in map(KvBits.of, reversed(FEWER_KV)):
            try:
                loss = yield from self.store(bits)
            except ConfigError as error:
                reason = str(error)
                break
            if cache.backend.name != self._whole_backend.name:
                reason = "no fast backend reads quantised K/V here"
                break
            logger.info("On fixed tokens, %s.", _measured(bits, loss))
            if loss.divergence <= _WARNED_DIVERGENCE:
                self.log_memory(bits)
                return
        cache.quantize(None)
        cache.backend = self._whole_backend
        logger.info("K/V stay unquantised: %s", reason)

    def log_memory(self, bits: KvBits) -> None:
        cache = self._runner.cache
        share = 100 * cache.block_bytes / max(1, self._whole_bytes)
        logger.info(
            "K/V in %s take %.0f %% of the memory and are read by the %s backend.",
            bits.words,
            share,
            cache.backend.name,
        )


def _measured(bits: KvBits, loss: KvLoss) -> str:
    return (
        f"with K/V in {bits.words} the distributions are {loss.divergence:.2g} nats from those with unquantised K/V, "
        f"and {loss.agreement:.0%} of the most likely tokens are the same"
    )
