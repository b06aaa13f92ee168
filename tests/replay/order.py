"""Checks that all uses of a pool are ordered although MLX does not know of them, since kernels write to pools through
their inputs; and that no pool is read in a step before MLX itself updates a part of it, which would copy the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from replay.encoder import Buffer, Dispatch
from replay.graph import Graph, Op
from replay.metal import Replay, tapes_of

_WRITERS = ("kernel kv_write", "kernel state_write", "kernel row_write")


@dataclass(frozen=True, slots=True)
class Unordered:
    """Two operations, at least one of which writes, that may use a pool at the same time or in the wrong order."""

    first: str
    second: str


def unordered(replay: Replay) -> list[Unordered]:
    """All pairs of uses of a pool, at least one of them a write, without a barrier between them or a fence (also
    through other command encoders). No use is assumed to end by itself."""
    before = _encoders_before(replay.encoder.waits)
    return [
        Unordered(first.op, second.op)
        for uses in _pool_uses(replay).values()
        for first, second in _pairs(uses)
        if not _is_ordered(first, second, before)
    ]


def copied_updates(graph: Graph) -> list[Op]:
    """Updates of parts of arrays of more than a MiB that another operation of the step uses, too: its command buffer
    holds them, so MLX updates a copy."""
    return [
        op
        for ops in tapes_of(graph)
        for op in ops
        if op.name in ("Scatter", "ScatterAxis", "SliceUpdate", "DynamicSliceUpdate")
        and graph.specs[op.inputs[0]].num_bytes > 2**20
        and any(op.inputs[0] in other.inputs for other in ops if other is not op)
    ]


def num_pool_uses(replay: Replay) -> int:
    return sum(len(uses) for uses in _pool_uses(replay).values())


def _pool_uses(replay: Replay) -> dict[Buffer, list[Dispatch]]:
    uses: dict[Buffer, list[Dispatch]] = defaultdict(list)
    for dispatch in replay.encoder.dispatches:
        for buffer in replay.pool_buffers.intersection(dispatch.inputs):
            uses[buffer].append(dispatch)
    return {buffer: found for buffer, found in uses.items() if any(map(_writes, found))}


def _writes(dispatch: Dispatch) -> bool:
    return dispatch.op.startswith(_WRITERS)


def _pairs(uses: list[Dispatch]) -> Iterator[tuple[Dispatch, Dispatch]]:
    for index, second in enumerate(uses):
        for first in uses[:index]:
            if _writes(first) or _writes(second):
                yield first, second


def _is_ordered(first: Dispatch, second: Dispatch, before: list[int]) -> bool:
    if first.encoder == second.encoder:
        return first.epoch < second.epoch
    return bool(before[second.encoder] >> first.encoder & 1)


def _encoders_before(waits: list[set[int]]) -> list[int]:
    """For each encoder, the encoders that have ended when it starts, as bits; fences are followed transitively."""
    before: list[int] = []
    for mine in waits:
        bits = 0
        for other in mine:
            bits |= before[other] | 1 << other
        before.append(bits)
    return before
