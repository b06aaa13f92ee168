"""MLX's Metal backend on a recorded graph: the order of operations, and the lifetimes of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replay.encoder import Array, Buffer, Counts, Encoder, Limits
from replay.graph import Graph, Op, Submission, Wait
from replay.primitives import PoolCopy, Primitives, dense

_MAX_WIDTH = 20


@dataclass(slots=True)
class Replay:
    """Steps as Metal would run them. `steps` has the counts of each."""

    steps: list[Counts]
    encoder: Encoder
    pool_buffers: frozenset[Buffer]
    pool_copies: list[PoolCopy] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.steps)


def replay(graph: Graph, limits: Limits | None = None) -> Replay:
    """Runs all steps of a graph, each submitted before the host waits for the results of the one before."""
    metal = _Metal(graph, Encoder(limits or Limits()))
    pools = frozenset(metal.arrays[name].buffer for name in graph.pools)
    steps: list[Counts] = []
    tapes = tapes_of(graph)
    for event in graph.events:
        if isinstance(event, Wait):
            metal.encoder.wait_for_steps(len(steps))
            continue
        metal.encoder.wait_for_steps(len(steps) - 1)
        later = frozenset(name for ops in tapes[len(steps) + 1 :] for op in ops for name in op.inputs)
        steps.append(metal.run(event, tapes[len(steps)], later - graph.pools))
    return Replay(steps, metal.encoder, pools, metal.pool_copies)


def tapes_of(graph: Graph) -> list[list[Op]]:
    """The operations of each step, in the order of encoding."""
    made: set[str] = set()
    tapes = []
    for event in graph.events:
        if isinstance(event, Submission):
            tapes.append(tape(graph, event.roots, made.__contains__))
            made.update(name for op in tapes[-1] for name in op.outputs)
    return tapes


def tape(graph: Graph, roots: Sequence[str], is_done: Callable[[str], bool]) -> list[Op]:
    """transforms.cpp: eval_impl. The operations that `roots` need and that have not run."""
    producers = {name: op for op in graph.ops for name in op.outputs}

    def missing(names: Sequence[str]) -> list[Op]:
        return [producers[name] for name in names if name in producers and not is_done(name)]

    degrees: Counter[int] = Counter()
    todo: list[Sequence[str]] = [roots]
    while todo:
        for op in missing(todo.pop()):
            degrees[id(op)] += 1
            if degrees[id(op)] == 1:
                todo.append(op.inputs)
    found: list[Op] = []
    queue: list[list[Op]] = [missing(roots)]
    postponed: list[tuple[list[Op], int]] = []
    front = 0
    while front < len(queue) or postponed:
        if front < len(queue):
            inputs, place = queue[front], 0
            front += 1
        else:
            inputs, place = postponed.pop()
        for index in range(place, len(inputs)):
            if len(queue) - front >= _MAX_WIDTH:
                postponed.append((inputs, index))
                break
            op = inputs[index]
            degrees[id(op)] -= 1
            if not degrees[id(op)]:
                queue.append(missing(op.inputs))
                found.append(op)
    return found[::-1]


class _Metal:
    """Arrays and their memory during the run of a graph."""

    def __init__(self, graph: Graph, encoder: Encoder) -> None:
        self.graph = graph
        self.encoder = encoder
        self.arrays: dict[str, Array] = {}
        self._uses: Counter[str] = Counter()
        self.pool_copies: list[PoolCopy] = []
        buffers: dict[int, Buffer] = {}
        for name, address in graph.constants.items():
            spec = graph.specs[name]
            buffer = buffers.setdefault(address, Buffer(0))
            buffer.num_bytes = max(buffer.num_bytes, spec.num_bytes)
            buffer.num_arrays += 1
            self.arrays[name] = dense(name, spec, buffer)
        encoder.live_bytes = 0

    def run(self, step: Submission, ops: Sequence[Op], later: frozenset[str]) -> Counts:
        """`later` are the arrays that later steps use."""
        counts = self.encoder.counts = Counts(peak_bytes=self.encoder.live_bytes)
        self._count_uses(ops, step.held | set(step.roots) | later)
        for op in ops:
            self._run(op)
        self.encoder.finish_step()
        counts.num_ops = len(ops)
        return counts

    def _count_uses(self, ops: Sequence[Op], held: frozenset[str]) -> None:
        """Sets the references by this step's operations and by Python. Constants that are not pools are assumed to be
        kept forever."""
        uses = Counter(name for op in ops for name in op.inputs)
        uses.update(held | (self.graph.constants.keys() - self.graph.pools))
        self._uses = uses
        for name in list(self.arrays):
            self.arrays[name].num_uses = uses[name]
            if not uses[name]:
                self._drop(name)

    def _run(self, op: Op) -> None:
        inputs = [self.arrays[name] for name in op.inputs]
        outputs = list(Primitives(self.graph, self.encoder, self.pool_copies, op, inputs).run())
        mine = {array.buffer for array in outputs[:1]}
        self.encoder.hold({array.buffer for array in (*inputs, *outputs[1:])} - mine)
        for array in outputs:
            array.num_uses = self._uses[array.name]
            self.arrays[array.name] = array
        self.encoder.finish_op()
        for array in inputs:
            array.num_uses -= 1
        for name in {*op.inputs, *op.outputs}:
            if not self.arrays[name].num_uses:
                self._drop(name)

    def _drop(self, name: str) -> None:
        array = self.arrays.pop(name)
        array.buffer.num_arrays -= 1
        self.encoder.free_unused(array.buffer)
