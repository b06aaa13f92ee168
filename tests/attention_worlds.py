"""Attention of a mixed step over requests with a past, for any backend, and the answer in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import AttentionBackend, LayerSpec, StepPlan
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, KvBits, side_bits

Floats = npt.NDArray[Any]
EIGHT, EIGHT_FOUR, FOUR = KvBits(8, 8), KvBits(8, 4), KvBits(4, 4)
ALL_BITS = EIGHT, EIGHT_FOUR, FOUR


@dataclass(frozen=True)
class Layer:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False
    bits: KvBits | None = None

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.num_kv_heads, self.key_dim, self.value_dim, mx.float32, self.bits)

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of a request that one step computes; those at [image[0], image[1]) attend to each other
    in both directions."""

    start: int
    end: int
    image: tuple[int, int] = (0, 0)


class World:
    """Requests whose `span` is computed in one step, after all tokens before it in another."""

    def __init__(self, layer: Layer, spans: Sequence[Span], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.layer = layer
        self.spans = sorted(spans, key=lambda span: span.end - span.start != 1)
        self.tables = shuffled_tables([span.end for span in self.spans], rng)
        self.num_blocks = int(self.tables.max()) + 2
        heads = (
            (layer.num_heads, layer.key_dim),
            (layer.num_kv_heads, layer.key_dim),
            (layer.num_kv_heads, layer.value_dim),
        )
        self.rows = [
            [rng.standard_normal((span.end, num, 1, dim), dtype=np.float32) for num, dim in heads]
            for span in self.spans
        ]
        self.sinks = rng.standard_normal(layer.num_heads, dtype=np.float32) if layer.has_sinks else None

    def past(self) -> StepPlan | None:
        members = [r for r, span in enumerate(self.spans) if span.start > 0]
        return make_step([Span(0, self.spans[r].start) for r in members], self.tables[members]) if members else None

    def step(self) -> StepPlan:
        step = make_step(self.spans, self.tables)
        firsts = [int(first) - span.start for first, span in zip(step.query_starts, self.spans)]
        rows = [[first + end for end in span.image] for first, span in zip(firsts, self.spans) if any(span.image)]
        return step.with_spans(np.array(rows, np.int32)) if rows else step

    def attend(self, backend: AttentionBackend, pool: Any) -> Floats:
        """Runs both steps; the output of the second."""
        past = self.past()
        if past is not None:
            self.attend_step(backend, pool, past, [slice(0, span.start) for span in self.spans])
        return self.attend_step(backend, pool, self.step(), [slice(span.start, span.end) for span in self.spans])

    def attend_step(self, backend: AttentionBackend, pool: Any, step: StepPlan, slices: Sequence[slice]) -> Floats:
        queries, keys, values = self.inputs(slices)
        out = backend.attend(
            pool,
            queries,
            keys,
            values,
            backend.plan(step),
            scale=self.layer.scale,
            window=self.layer.window,
            sinks=None if self.sinks is None else mx.array(self.sinks),
        )
        mx.eval(out, *backend.state(pool))
        return np.array(out)

    def inputs(self, slices: Sequence[slice]) -> list[mx.array]:
        return [
            mx.array(np.concatenate([rows[kind][part] for rows, part in zip(self.rows, slices, strict=True)]))
            for kind in range(3)
        ]

    def expected(self) -> Floats:
        """The output of the second step in float64, with K/V rounded to the layer's bits."""
        outs = []
        for (queries, keys, values), span in zip(self.rows, self.spans, strict=True):
            key_bits, value_bits = side_bits(self.layer.bits)
            stored = queries, as_stored(keys, key_bits), as_stored(values, value_bits)
            rows = [x[:, :, 0].astype(np.float64) for x in stored]
            outs.append(attention_in_float64(*rows, span, self.layer, self.sinks))
        return np.concatenate(outs)[:, :, None]


def as_stored(rows: Floats, bits: int | None) -> Floats:
    """Float32 rows after `mx.quantize` and back."""
    if bits is None:
        return rows
    quantised = mx.quantize(mx.array(rows), group_size=KV_GROUP_SIZE, bits=bits)
    return np.array(mx.dequantize(*quantised, group_size=KV_GROUP_SIZE, bits=bits))


def shuffled_tables(lengths: Sequence[int], rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Block tables with shuffled ids, two of them unused, and rows that are wider than necessary."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = iter(rng.permutation(sum(counts) + 2).tolist())
    tables = np.zeros((len(counts), max(counts) + 1), dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [next(ids) for _ in range(count)]
    return tables


def make_step(spans: Sequence[Span], tables: npt.NDArray[np.int32]) -> StepPlan:
    lengths = [span.end - span.start for span in spans]
    positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans])
    owners = np.repeat(np.arange(len(spans)), lengths)
    return StepPlan(
        num_decodes=len(list(takewhile(lambda length: length == 1, lengths))),
        positions=positions,
        slot_mapping=tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([span.end for span in spans], dtype=np.int32),
        block_tables=tables,
    )


def attention_in_float64(
    queries: Floats, keys: Floats, values: Floats, span: Span, layer: Layer, sinks: Floats | None
) -> Floats:
    positions, key_positions = np.arange(span.start, span.end)[:, None], np.arange(span.end)
    first, last = span.image
    is_within = [(places >= first) & (places < last) for places in (positions, key_positions)]
    seen = (key_positions <= positions) | (is_within[0] & is_within[1])
    if layer.window is not None:
        seen &= key_positions > positions - layer.window
    group = layer.num_heads // layer.num_kv_heads
    out = np.empty((span.end - span.start, layer.num_heads, layer.value_dim))
    for head in range(layer.num_heads):
        scores = queries[span.start :, head] @ keys[:, head // group].T * layer.scale
        weights = np.exp(np.where(seen, scores, -np.inf))
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(np.float64(sinks[head]))
        out[:, head] = weights @ values[:, head // group] / total
    return out
