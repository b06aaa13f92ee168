"""MLX's command encoder: the contents of command buffers, barriers and fences, and when the host waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replay.graph import Spec

MAX_ACTIVE_TASKS = 10


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory, which is live while arrays share it (`num_arrays`) or command buffers hold it (`num_holds`)."""

    num_bytes: int
    num_arrays: int = 0
    num_holds: int = 0
    is_live: bool = True

    @property
    def is_used(self) -> bool:
        return bool(self.num_arrays or self.num_holds)


@dataclass(eq=False, slots=True)
class Array:
    """An array with memory: `data_size` elements of `buffer`, viewed with `strides`. `is_row` means row contiguous,
    `is_whole` without gaps. `num_uses` counts references of operations and Python."""

    name: str
    spec: Spec
    buffer: Buffer
    strides: tuple[int, ...]
    data_size: int
    is_row: bool
    is_whole: bool
    num_uses: int = 0

    @property
    def is_donatable(self) -> bool:
        return self.num_uses == 1 and self.buffer.num_arrays == 1 and not self.buffer.num_holds


@dataclass(frozen=True, slots=True)
class Limits:
    """When command buffers end and the host waits, by default as on a Mac with 16 GiB. `num_elements` is what MLX calls
    MB: units of 2^20 elements of all buffers that a command buffer uses, whatever their type. `splits` is called after
    each operation, and ends a command buffer, too."""

    num_ops: int = 1000
    num_elements: int = 96
    memory_bytes: int | None = None
    splits: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A run of a kernel: its command encoder, the number of barriers before it there, and its buffers."""

    op: str
    encoder: int
    epoch: int
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]


@dataclass(slots=True)
class Counts:
    """The costs of a step. `peak_bytes` are temporaries, without what existed before the first step. `lead` is the
    share of its dispatches that may be left when the host has submitted all of it, the host's time for the next
    step."""

    num_ops: int = 0
    num_dispatches: int = 0
    num_barriers: int = 0
    num_command_buffers: int = 0
    num_stalls: int = 0
    peak_bytes: int = 0
    lead: float = 0.0


@dataclass(slots=True)
class _CommandBuffer:
    step: int
    is_task: bool
    num_ops: int
    held: set[Buffer] = field(default_factory=set)


class Encoder:
    """The encoder of a stream, and the memory that its command buffers hold. None of them ends before the host
    waits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counts = Counts()
        self.dispatches: list[Dispatch] = []
        self.waits: list[set[int]] = [set()]
        self.live_bytes = 0
        self._step = 0
        self._held: set[Buffer] = set()
        self._flying: deque[_CommandBuffer] = deque()
        self._writers: dict[Buffer, int] = {}
        self._num_ops = self._num_elements = self._epoch = 0
        self._inputs: set[Buffer] = set()
        self._outputs: set[Buffer] = set()
        self._previous_inputs: set[Buffer] = set()
        self._previous_outputs: set[Buffer] = set()

    # ---- memory

    def allocate(self, num_bytes: int) -> Buffer:
        self.live_bytes += num_bytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.live_bytes)
        return Buffer(num_bytes)

    def free_unused(self, buffer: Buffer) -> None:
        if buffer.is_live and not buffer.is_used:
            buffer.is_live = False
            self.live_bytes -= buffer.num_bytes

    def hold(self, buffers: set[Buffer]) -> None:
        """The current command buffer holds them until it ends."""
        for buffer in buffers - self._held:
            buffer.num_holds += 1
        self._held |= buffers

    # ---- dispatches

    def dispatch(
        self, op: str, inputs: Sequence[Array], outputs: Sequence[Array], *, is_concurrent: bool = False
    ) -> None:
        """device.cpp: set_input_array of all, register_output_array of outputs, maybeInsertBarrier."""
        written = {array.buffer for array in outputs}
        used = {array.buffer for array in inputs} | written
        for array in (*inputs, *outputs):
            if array.buffer not in self._inputs:
                self._inputs.add(array.buffer)
                self._num_elements += array.data_size
        self._outputs |= written
        needs_barrier = bool(used & self._previous_outputs)
        if not is_concurrent:
            needs_barrier = needs_barrier or bool(written & self._previous_inputs)
        if needs_barrier:
            self.counts.num_barriers += 1
            self._epoch += 1
            self._previous_inputs, self._previous_outputs = set(used), set()
        self._previous_inputs |= used
        if not is_concurrent:
            self._previous_outputs |= written
        self._num_ops += 1
        self.counts.num_dispatches += 1
        encoder = len(self.waits) - 1
        self.dispatches.append(
            Dispatch(op, encoder, self._epoch, tuple(array.buffer for array in inputs), tuple(written))
        )

    def end_concurrent(self, outputs: Sequence[Array]) -> None:
        """device.h: ~ConcurrentContext."""
        self._previous_outputs |= {array.buffer for array in outputs}

    # ---- command buffers

    def finish_op(self) -> None:
        """eval.cpp: eval ends the command buffer if it is full; transforms.cpp: eval_impl lets the host wait."""
        limits = self.limits
        is_full = self._num_ops > limits.num_ops or self._num_elements >> 20 > limits.num_elements
        if is_full or limits.splits():
            self._commit(is_task=True)
        if self._num_tasks > MAX_ACTIVE_TASKS or (self._is_too_much and self._num_tasks):
            self._commit(is_task=False)
            self.counts.num_stalls += 1
            self._wait_for_one()
            while self._is_too_much and self._num_tasks:  # for the last one, MLX checks repeatedly
                while not self._end_first().is_task:
                    pass

    def finish_step(self) -> None:
        """eval_impl: the stream is finalized."""
        self._commit(is_task=False)
        flying = sum(buffer.num_ops for buffer in self._flying if buffer.step == self._step)
        self.counts.lead = flying / max(1, self.counts.num_dispatches)
        self._step += 1

    def wait_for_steps(self, num_steps: int) -> None:
        """The host has received the results of the first `num_steps` steps."""
        while self._flying and self._flying[0].step < num_steps:
            self._end_first()

    @property
    def _is_too_much(self) -> bool:
        return self.limits.memory_bytes is not None and self.live_bytes > self.limits.memory_bytes

    @property
    def _num_tasks(self) -> int:
        return sum(buffer.is_task for buffer in self._flying)

    def _wait_for_one(self) -> None:
        """scheduler.h: wait_for_one."""
        if self._num_tasks > 1:
            while not self._end_first().is_task:
                pass

    def _end_first(self) -> _CommandBuffer:
        ended = self._flying.popleft()
        for buffer in ended.held:
            buffer.num_holds -= 1
            self.free_unused(buffer)
        return ended

    def _commit(self, *, is_task: bool) -> None:
        """device.cpp: end_encoding and commit."""
        encoder = len(self.waits) - 1
        self.waits[encoder] = {self._writers[buffer] for buffer in self._inputs if buffer in self._writers}
        self._writers.update(dict.fromkeys(self._outputs, encoder))
        self._flying.append(_CommandBuffer(self._step, is_task, self._num_ops, self._held))
        self.counts.num_command_buffers += bool(self._num_ops)
        self.waits.append(set())
        self._held, self._inputs, self._outputs = set(), set(), set()
        self._previous_inputs, self._previous_outputs = set(), set()
        self._num_ops = self._num_elements = self._epoch = 0
