"""Recurrent states, and K/V that are read by group: nothing copies them, and every use waits for those before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import make_backend
from replay.record import UntestedMetal

from mlx_server.outputs import BlockIds, ScheduledChunk
from mlx_server.runtime.attention import backends
from mlx_server.runtime.attention.regroup import Level, Scope
from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.kv_cache import PagedKVCache, StateLayerCache
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.cache.row_pool import MakeRows, PlainRows, RowsInPlace, Slots
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.kernels.gpu import rows as gpu_rows
from mlx_server.runtime.kernels.gpu.pool import buffer_address
from mlx_server.runtime.kernels.gpu.rows import RowKernels
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.model_runner import ModelRunner
from tests.architectures import VOCAB_SIZE
from tests.conformance import Subject, answer, worst_error
from tests.device_memory import active_bytes
from tests.engine_worlds import random_prompts

MODELS = {
    "qwen3_next": Scope.RECURRENT_MIXERS,
    "mamba": Scope.RECURRENT_MIXERS,
    "lfm2": Scope.RECURRENT_MIXERS,
    "rwkv7": Scope.RECURRENT_MIXERS,
    "deepseek_v3": Scope.MIXERS,
}
"""Models, and what of them runs group by group; the last one's K/V are read so."""

NUM_BLOCKS = 8

# ---- what MLX is asked to do in steps


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step's graph: names of the arrays that it reads and makes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def rows(self) -> str | None:
        """The array of rows that it is a kernel on, by its name."""
        for text in gpu_rows.ROW_TEXTS:
            if self.name.startswith(f"custom_kernel_{text.name}_"):
                return self.inputs[text.inputs.index("pool")]
        return None

    @property
    def is_write(self) -> bool:
        return self.name.startswith("custom_kernel_row_write_")


@dataclass(frozen=True, slots=True)
class Steps:
    """What some steps consist of, and whether each is submitted before the one before has finished."""

    operations: list[Operation]
    are_submitted_ahead: bool


def record(architecture: str, monkeypatch: pytest.MonkeyPatch, also: Sequence[mx.array] = ()) -> Steps:
    """Four steps on a Mac, in order, of which nothing is computed: two prompts, whose first state is kept; two
    decodes; the same beside a prompt that goes on from what was kept; a prompt that takes over a slot. `also` is asked
    for, too, at the end."""
    install_seam()
    monkeypatch.setattr(gpu_backend, "write_failure", lambda *_: None)
    monkeypatch.setattr(mx, "contiguous", lambda array: array)  # cannot be exported, and copies nothing here
    model = Subject(architecture).model
    cache = PagedKVCache(discover_layers(model), UntestedMetal(num_cores=16))
    runner = ModelRunner(model, cache, VOCAB_SIZE, AdapterRows())
    runner.forward.use(Level(MODELS[architecture]), selects_rows=True)
    cache.allocate(NUM_BLOCKS * len(cache.windows), num_slots=3, num_checkpoints=2)
    tables = BlockTables(cache.windows)
    for name in "abc":
        tables.add(name)

    def blocks(*ids: int) -> BlockIds:
        return tuple(tuple(group * NUM_BLOCKS + block for block in ids) for group in range(len(cache.windows)))

    def chunk(name: str, start: int, length: int, block_ids: BlockIds = ()) -> ScheduledChunk:
        return ScheduledChunk(name, start, length, (1,) * length, block_ids, True, 0)

    def steps(ids: mx.array) -> list[mx.array]:
        def step(*chunks: ScheduledChunk) -> mx.array:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            return runner.forward(tables.plan(chunks), ids[:num_tokens], [num_tokens - 1])

        outs = [step(chunk("a", 0, 4, blocks(0)), chunk("b", 0, 3, blocks(1)))]
        cache.keep_states([(0, 1)])
        outs.append(step(chunk("a", 4, 1), chunk("b", 3, 1)))
        cache.resume_states([(1, 2)])
        outs.append(step(chunk("a", 5, 1), chunk("b", 4, 1), chunk("c", 4, 2, blocks(0, 2))))
        tables.drop("b")
        tables.add("d")
        outs.append(step(chunk("a", 6, 1), chunk("d", 0, 5, blocks(1))))
        return [*outs, *cache.state(), *also]

    recorded: list[dict[str, Any]] = []
    mx.export_function(recorded.append, steps, mx.zeros((7,), mx.int32))  # type: ignore[arg-type]
    are_submitted_ahead = runner.launch_is_host_only
    runner.close()
    operations = [
        Operation(
            entry["arguments"][0] if entry["name"] == "CustomKernel" else entry["name"],
            tuple(array[0] for array in entry["inputs"]),
            tuple(array[0] for array in entry["outputs"]),
        )
        for entry in recorded
        if entry["type"] == "primitive"
    ]
    return Steps(operations, are_submitted_ahead)


def copied_sources(operations: list[Operation]) -> list[str]:
    """Arrays that MLX must copy to write into them, since something else reads them."""
    readers = defaultdict(set)
    for number, operation in enumerate(operations):
        for name in operation.inputs:
            readers[name].add(number)
    updates = ("Scatter", "ScatterAxis", "SliceUpdate", "DynamicSliceUpdate")
    return [op.inputs[0] for op in operations if op.name in updates and len(readers[op.inputs[0]]) > 1]


def unordered_uses(operations: list[Operation]) -> list[tuple[Operation, Operation]]:
    """Pairs of uses of one array of rows, one of them a write, of which neither reads what comes of the other. A GPU
    may run these at once."""
    before: dict[str, int] = {}  # of each array, a bit for every operation that it comes of
    uses = defaultdict(list)
    pairs = []
    for number, operation in enumerate(operations):
        known = 0
        for name in operation.inputs:
            known |= before.get(name, 0)
        for name in operation.outputs:
            before[name] = known | 1 << number
        if operation.rows is not None:
            for earlier, other in uses[operation.rows]:
                if (operation.is_write or other.is_write) and not known >> earlier & 1:
                    pairs.append((other, operation))
            uses[operation.rows].append((number, operation))
    return pairs


@pytest.mark.parametrize("architecture", MODELS)
def test_steps_on_a_gpu_copy_no_rows_and_leave_no_use_of_them_unordered(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_backend, "row_failure", lambda *_: None)
    steps = record(architecture, monkeypatch)
    uses = [operation for operation in steps.operations if operation.rows is not None]
    pools = {operation.rows for operation in uses}
    assert len(pools) >= 2
    assert sum(operation.is_write for operation in uses) >= 4 * len(pools)
    read = {name for operation in steps.operations for name in operation.inputs}
    assert [op for op in uses if not op.is_write and op.outputs[0] not in read] == [], "rows that nobody needs"
    assert copied_sources(steps.operations) == []
    assert unordered_uses(steps.operations) == []
    assert steps.are_submitted_ahead


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_token_that_is_not_taken_is_found(kind: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, tokens = {name: getattr(RowKernels, name) for name in ("read", "write")}, list[mx.array]()

    def launching(name: str) -> Callable[..., Any]:
        def launch(kernels: RowKernels, *arguments: Any) -> Any:
            token = mx.zeros((1,), mx.int32) if name == kind else arguments[-1]
            made = launches[name](kernels, *arguments[:-1], token)
            tokens.append(made[1] if name == "read" else made)  # for nobody may ask for it now
            return made

        return launch

    monkeypatch.setattr(gpu_backend, "row_failure", lambda *_: None)
    for name in launches:
        monkeypatch.setattr(RowKernels, name, launching(name))
    assert unordered_uses(record(architecture, monkeypatch, tokens).operations)


@pytest.mark.parametrize("architecture", MODELS)
def test_scatters_that_copy_are_found_and_steps_wait_for_them(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_backend, "row_failure", lambda *_: "cannot")
    monkeypatch.setattr(mx, "eval", lambda *_: None)  # what is recorded cannot be computed between reads and writes
    steps = record(architecture, monkeypatch)
    assert copied_sources(steps.operations)
    assert not steps.are_submitted_ahead


# ---- the same answers


def metal_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Metal backend, on the emulated GPU where there is none, in the place of the reference."""
    monkeypatch.setitem(backends._FACTORIES, "reference", make_backend)


@pytest.mark.parametrize(
    "architecture", ["qwen3_next", "lfm2", pytest.param("rwkv7", marks=pytest.mark.slow), "deepseek_v3"]
)
def test_a_gpu_answers_what_mlx_lm_does(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, one step ahead; then a prefix that is cached, and whose state is resumed."""
    metal_on_this_machine(monkeypatch)
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((40, 1, 9)), (3, 5, 2)
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm(attention_backend="reference", max_num_batched_tokens=32, max_num_seqs=2) as llm:
        assert llm.info.backend == "metal"
        assert not llm.engine._parts.runner.cache.needs_synchronous_steps
        assert worst_error(answer(llm, prompts, max_tokens), wanted) < 1e-4
        again = answer(llm, prompts[:1], max_tokens[:1])
    assert again.completions[0].num_cached_tokens == 32
    assert worst_error(again, wanted[:1]) < 1e-4


# ---- a CPU whose queue is behind


def stored(states: StateLayerCache) -> list[mx.array]:
    """The states themselves, without the tokens of their last use."""
    return [array for array in states.state() if array.size > 1]


@pytest.mark.parametrize("make_rows", [CpuBackend(threads=1).make_rows, PlainRows.zeros], ids=["host", "plain"])
def test_states_on_a_cpu_stay_where_they_are_while_work_is_queued(make_rows: MakeRows) -> None:
    """States that are read, computed with for long, and written in one step: what MLX's scatter copies a pool for."""
    layers = [StateLayerCache([mx.zeros((1, 8, 128, 128))]) for _ in range(2)]
    for layer in layers:
        layer.allocate(make_rows, 64)
    pools = [array for layer in layers for array in stored(layer)]
    addresses = [buffer_address(pool) for pool in pools]
    pool_bytes, row_bytes = pools[0].nbytes, pools[0].nbytes // 64
    slots = Slots(np.array([5, 3, 60]))
    del pools
    mx.reset_peak_memory()
    before = active_bytes()
    states, running = mx.ones((3, 8, 128, 128)), list[mx.array]()
    for _ in range(6):
        for layer in layers:
            entry = layer.entries[0]
            assert entry is not None
            states = mx.sin(entry.read(slots)) * 0.5 + mx.matmul(states, states) * 1e-3
            layer.write(0, slots, states)
        mx.eval(running)  # steps are synchronous, but nothing within one is
        running = [states, *(array for layer in layers for array in layer.state())]
        mx.async_eval(*running)
    mx.eval(running)
    del running
    assert mx.get_peak_memory() - before <= 2 * 3 * 4 * row_bytes < pool_bytes
    assert [buffer_address(array) for layer in layers for array in stored(layer)] == addresses
    last = [array for layer in layers for array in stored(layer)]
    assert mx.array_equal(last[1][60], states[2])
    assert not last[0][4].any()


@pytest.mark.parametrize("architecture", ["qwen3_next", "mamba"])
def test_an_engine_on_a_cpu_never_moves_its_states(architecture: str) -> None:
    subject = Subject(architecture)
    with subject.make_llm(attention_backend="cpu", num_kv_blocks=32) as llm:
        cache = llm.engine._parts.runner.cache
        arrays = [array for states in cache.recurrent for array in stored(states)]
        addresses = [buffer_address(array) for array in arrays]
        answer(llm, random_prompts((40, 1, 9)), (9, 5, 2))
        assert arrays
        assert [buffer_address(array) for array in arrays] == addresses
        assert not cache.needs_synchronous_steps


def test_writes_and_reads_that_wait_keep_their_order() -> None:
    """Nothing is evaluated until the end, and each reading is of the writes before it."""
    rows = CpuBackend(threads=1).make_rows((6, 1000), mx.float32)
    assert isinstance(rows, RowsInPlace)
    (array, _), readings = rows.arrays(), []
    for value in range(1, 40):
        rows.write(Slots(np.array([value % 5, 5])), mx.full((2, 1000), value))
        readings.append(rows.read(Slots(np.array([5, value % 5]))))
    assert not np.array(array, copy=False).any(), "nobody has asked for it"
    mx.eval(readings)
    assert [reading[:, 7].tolist() for reading in readings] == [[value, value] for value in range(1, 40)]


def test_rows_of_bfloat16_are_written_in_place() -> None:
    rows = CpuBackend(threads=1).make_rows((4, 3), mx.bfloat16)
    written = mx.array([[1.5, -2, 1e30], [0.1, 0, 7]]).astype(mx.bfloat16)
    rows.write(Slots(np.array([2, 0])), written)
    seen = rows.read(Slots(np.array([[0], [2]])))
    assert seen.dtype == mx.bfloat16
    assert mx.array_equal(seen[:, 0], written[::-1])
    assert mx.array_equal(rows.view((2, 6)).read(Slots(np.array([1])))[0, :3], written[0])
