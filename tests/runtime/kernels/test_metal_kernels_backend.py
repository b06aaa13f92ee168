"""`MetalBackend` as a whole: equal to the reference, ordered by tokens, never copying a pool, falling back aloud."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.errors import EmulatorError
from emulator.kernel import Emulator, text_name
from emulator.worlds import Chunk, gpu, kernel_maker, make_backend, step_of, step_rows, toolchain

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.kernels.gpu import plan as gpu_plan
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.pool import GpuPool, buffer_address
from mlx_server.runtime.kernels.gpu.variants import DTYPES, HEAD_DIMS, DecodeShape, KernelVariant
from mlx_server.runtime.kernels.trials import exhaust
from tests.attention_worlds import ALL_BITS, EIGHT
from tests.device_memory import active_bytes

SPEC = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
NUM_BLOCKS = 12
NUM_HEADS = 6
KNOWN_DIMS = "32, 64, 80, 96, 112, 128, 160, 192, 256, 512"

STEPS = (
    (0, [Chunk((3, 7), 0, 40), Chunk((1,), 0, 5)]),
    (2, [Chunk((3, 7), 40), Chunk((1,), 5), Chunk((9, 0, 5), 0, 70)]),
    (2, [Chunk((1,), 6), Chunk((9, 0, 5), 70), Chunk((4,), 0, 1), Chunk((3, 7), 41, 9)]),
    (3, [Chunk((9, 0, 5), 71), Chunk((1,), 7), Chunk((3, 7), 50)]),
)
"""(decodes, chunks) of four steps: prompts of several blocks, mixed steps, a chunk of one token, decodes alone."""


def attend_all(backend: Any, spec: LayerSpec = SPEC, num_heads: int = NUM_HEADS, **options: Any) -> list[np.ndarray]:
    pool = backend.make_pool(spec, NUM_BLOCKS)
    outs = []
    for seed, (num_decodes, chunks) in enumerate(STEPS):
        step = step_of(chunks, num_decodes)
        queries, keys, values = step_rows(seed, spec, num_heads, step.num_tokens)
        out = backend.attend(pool, queries, keys, values, backend.plan(step), scale=0.2, **options)
        mx.eval(out, *backend.state(pool))
        outs.append(np.array(out.astype(mx.float32)))
    return outs


def check_equal(outs: list[np.ndarray], wanted: list[np.ndarray], atol: float = 1e-5) -> None:
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(out, want, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("bits", "window"),
    [*itertools.product([None], [None, 1, 20, 45]), *itertools.product(ALL_BITS, [None, 20])],
    ids=str,
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_equals_the_reference_over_mixed_steps(window: int | None, has_sinks: bool, bits: KvBits | None) -> None:
    spec = dataclasses.replace(SPEC, bits=bits)
    sinks = mx.array(np.linspace(-1, 2, NUM_HEADS), mx.float32) if has_sinks else None
    wanted = attend_all(ReferenceBackend(), spec, window=window, sinks=sinks)
    check_equal(attend_all(make_backend(), spec, window=window, sinks=sinks), wanted)


def test_split_sequences_equal_the_reference() -> None:
    variant = KernelVariant(3, 2, 16, 1, partition_tokens=32)
    backend = make_backend(choose_variant=lambda shape: variant)
    check_equal(attend_all(backend), attend_all(ReferenceBackend()))


def test_scores_are_the_same_in_prompts_and_decodes() -> None:
    """The last token of a prompt chunk, and the same token decoded, see the same thing."""
    backend = make_backend()
    rows = step_rows(0, SPEC, NUM_HEADS, 40)
    outs = []
    for length in (40, 39):
        pool = backend.make_pool(SPEC, NUM_BLOCKS)
        plan = backend.plan(step_of([Chunk((3, 7), 0, length)], 0))
        out = backend.attend(pool, *(row[:length] for row in rows), plan, scale=0.2)
        if length == 39:
            plan = backend.plan(step_of([Chunk((3, 7), 39)], 1))
            out = backend.attend(pool, *(row[39:] for row in rows), plan, scale=0.2)
        outs.append(np.array(out[-1]))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


def test_a_layer_can_share_the_pool_of_another() -> None:
    backend = make_backend()
    pool = backend.make_pool(SPEC, NUM_BLOCKS)
    step = step_of([Chunk((3, 7), 0, 40)], 0)
    queries, keys, values = step_rows(0, SPEC, NUM_HEADS, 40)
    plan = backend.plan(step)
    first = backend.attend(pool, queries, keys, values, plan, scale=0.2)
    again = backend.attend(pool, queries, None, None, plan, scale=0.2)
    assert mx.array_equal(first, again).item()


def test_rows_need_not_be_contiguous() -> None:
    def as_models_pass_them(rows: mx.array) -> mx.array:
        """Heads and length swapped, out of a wider projection."""
        wide = mx.concatenate([rows.swapaxes(1, 2), rows.swapaxes(1, 2)], axis=-1)
        return wide[..., : rows.shape[-1]].swapaxes(1, 2)

    backend, reference = make_backend(), ReferenceBackend()
    outs = []
    for which in (backend, reference):
        pool = which.make_pool(SPEC, NUM_BLOCKS)
        for num_decodes, chunks in ((0, [Chunk((2, 4), 0, 50)]), (1, [Chunk((2, 4), 50)])):
            step = step_of(chunks, num_decodes)
            rows = [as_models_pass_them(row) for row in step_rows(num_decodes, SPEC, NUM_HEADS, step.num_tokens)]
            out = which.attend(pool, *rows, which.plan(step), scale=0.2)
        outs.append(np.array(out))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


# ---- order


class Recorder:
    """Makes kernels that keep what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, mx.array], list[mx.array]]] = []

    def __call__(self, **definition: Any) -> Any:
        kernel = kernel_maker()(**definition)

        def call(**launch: Any) -> list[mx.array]:
            outputs = kernel(**launch)
            inputs = dict(zip(definition["input_names"], launch["inputs"]))
            self.calls.append((text_name(definition["name"]), inputs, outputs))
            return outputs

        return call


@pytest.mark.parametrize(("bits", "write"), [(None, "kv_write"), (EIGHT, "kv_write_quantized")], ids=str)
def test_every_use_of_a_pool_takes_the_token_of_the_one_before(bits: KvBits | None, write: str) -> None:
    """Across steps too: so a write into a recycled block waits for the last reader of its former content."""
    recorder = Recorder()
    backend = MetalBackend(recorder, num_cores=4)
    spec = dataclasses.replace(SPEC, bits=bits)
    pool = backend.make_pool(spec, NUM_BLOCKS)
    recorder.calls.clear()
    token = pool.memory.token
    for num_decodes, chunks in STEPS:
        step = step_of(chunks, num_decodes)
        rows = step_rows(0, spec, NUM_HEADS, step.num_tokens)
        backend.attend(pool, *rows, backend.plan(step), scale=0.2)
    for _, inputs, outputs in recorder.calls:
        assert inputs["token"] is token
        token = outputs[-1]
    assert pool.memory.token is token
    assert [name for name, _, _ in recorder.calls] == [
        *(write, "paged_shared", "kv_gather"),
        *(write, "paged_decode", "kv_gather"),
        *(write, "paged_decode", "paged_shared"),
        *(write, "paged_decode"),
    ]


def test_long_contexts_are_gathered_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the token of the one before, and all give what they give together."""
    monkeypatch.setattr(gpu_plan, "FEW_ROWS", 0)
    together = attend_all(make_backend())
    monkeypatch.setattr(gpu_plan, "GATHER_TOKENS", 64)
    recorder = Recorder()
    check_equal(attend_all(MetalBackend(recorder, num_cores=4)), together, atol=0)
    gathers = [(inputs["token"], outputs[-1]) for name, inputs, outputs in recorder.calls if name == "kv_gather"]
    steps_with_two = [(first, second) for first, second in itertools.pairwise(gathers) if second[0] is first[1]]
    assert len(steps_with_two) == 2


def test_state_holds_every_write() -> None:
    backend = make_backend()
    pool = backend.make_pool(SPEC, NUM_BLOCKS)
    backend.attend(pool, *step_rows(0, SPEC, NUM_HEADS, 5), backend.plan(step_of([Chunk((1,), 0, 5)], 0)), scale=1.0)
    assert backend.state(pool) == [pool.keys, pool.values, pool.memory.token]


# ---- pools are never copied, nor counted


def handles_of(recorder: Recorder) -> list[tuple[int, int]]:
    """Blocks of K that each kernel call got of the pool, and where they lie."""
    pools = [inputs["key_pool"] for _, inputs, _ in recorder.calls if "key_pool" in inputs]
    return [(pool.shape[0], buffer_address(pool)) for pool in pools]


@pytest.mark.parametrize("bits", [None, EIGHT], ids=str)
def test_kernels_get_one_block_of_a_pool_and_reach_all_of_it(bits: KvBits | None) -> None:
    """MLX counts an input's elements toward the end of a command buffer. A pool's own layers, those of another shape,
    and what was moved: all in the same memory."""
    recorder = Recorder()
    backend = MetalBackend(recorder, num_cores=4)
    spec = dataclasses.replace(SPEC, bits=bits)
    pool = backend.make_pool(spec.times(2), NUM_BLOCKS // 2)
    views = [backend.view_pool(pool, spec, 2)]
    for change in (None, PoolChange(NUM_BLOCKS)):
        if change is not None:
            backend.change_pool(pool, change)
            views = [backend.view_pool(pool, spec, 2)]
        recorder.calls.clear()
        for num_decodes, chunks in STEPS:
            step = step_of(chunks, num_decodes)
            rows = step_rows(0, spec, NUM_HEADS, step.num_tokens)
            backend.attend(views[0], *rows, backend.plan(step), scale=0.2)
        assert set(handles_of(recorder)) == {(1, buffer_address(pool.keys))}
        recorder.calls.clear()
        plan = backend.plan(step_of([Chunk((5,), 3)], 1))
        backend.attend(pool, *step_rows(0, pool.spec, 2 * NUM_HEADS, 1), plan, scale=0.2)
        assert set(handles_of(recorder)) == {(1, buffer_address(pool.keys))}


def test_where_mlx_writes_kernels_get_the_arrays_that_it_made() -> None:
    pool = GpuPool.make(SPEC, NUM_BLOCKS)
    pool.scatter()
    assert pool.memory.handles == (pool.keys, pool.values)
    pool.change(PoolChange(4))
    assert pool.memory.is_scattered
    assert pool.memory.handles == (pool.keys, pool.values)


@pytest.mark.slow
def test_pools_stay_where_they_are_over_a_thousand_steps_one_ahead() -> None:
    """Two requests take turns in the same blocks; each step's input depends on the one before, as in decoding."""
    backend = make_backend()
    spec = LayerSpec(num_kv_heads=1, key_dim=64, value_dim=64, dtype=mx.float16)
    pool = backend.make_pool(spec, 4 if gpu() is None else 4096)  # the emulator copies pools to its own pages
    pool.check_moves()
    rows = step_rows(0, spec, 1, 1)
    pool_bytes = pool.keys.nbytes + pool.values.nbytes
    carried = mx.zeros((1, 1, 1, 64), mx.float16)
    for step in range(1000):
        plan = backend.plan(step_of([Chunk((step // 40 % 4,), step % 20)], 1))
        carried = backend.attend(pool, rows[0] + carried * 0, *rows[1:], plan, scale=0.125)
        mx.async_eval(carried, *backend.state(pool))
        if step == 100:
            mx.eval(carried)
            mx.reset_peak_memory()
            before = active_bytes()
    mx.eval(carried)
    assert pool.check_moves() == 0
    assert mx.get_peak_memory() - before < pool_bytes / 2


def test_a_pool_that_was_copied_is_counted() -> None:
    backend = make_backend()
    pool = backend.make_pool(SPEC, NUM_BLOCKS)
    assert pool.check_moves() == 0
    still_in_use = pool.keys
    pool.memory.keys = still_in_use + 1
    assert pool.check_moves() == 1
    assert pool.check_moves() == 1


def test_results_of_pipelined_steps_equal_synchronous_ones() -> None:
    """Blocks are recycled at once: request B writes where request A's rows are still being read."""

    def run(is_pipelined: bool) -> list[np.ndarray]:
        backend = make_backend()
        pool = backend.make_pool(SPEC, 2)
        outs = []
        for step in range(40):
            length = 20 + step % 12
            prompt = backend.plan(step_of([Chunk((1,), 0, length)], 0))
            decode = backend.plan(step_of([Chunk((1,), length)], 1))
            for seed, plan in ((2 * step, prompt), (2 * step + 1, decode)):
                rows = step_rows(seed, SPEC, NUM_HEADS, plan.step.num_tokens)
                outs.append(backend.attend(pool, *rows, plan, scale=0.2))
                mx.async_eval(outs[-1], *backend.state(pool))
                if not is_pipelined:
                    mx.synchronize()
        return [np.array(out) for out in outs]

    check_equal(run(is_pipelined=True), run(is_pipelined=False), atol=0)


# ---- warming up, and falling back


@pytest.mark.slow
@pytest.mark.parametrize("dim", (64,) if gpu() is None else HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_self_test_passes(dtype: mx.Dtype, dim: int) -> None:
    backend = make_backend()
    spec = LayerSpec(num_kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype)
    exhaust(backend.warm_up(spec, NUM_HEADS, sinks=mx.zeros((NUM_HEADS,), dtype)))
    exhaust(backend.warm_up(spec, NUM_HEADS))
    assert backend.supports(spec, NUM_HEADS) is None
    assert not backend.needs_synchronous_steps


def test_other_steps_may_run_between_the_tests_of_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[str] = []
    names = ["write_failure", "decode_failure", "shared_failure"]
    for name in names:
        monkeypatch.setattr(gpu_backend, name, lambda *_, name=name: tested.append(name))
    assert [len(tested) for _ in make_backend().warm_up(SPEC, NUM_HEADS)] == [1, 2]
    assert tested == names


@pytest.mark.parametrize("bits", [None, *ALL_BITS], ids=str)
def test_nothing_is_compiled_after_warm_up(bits: KvBits | None) -> None:
    """Batch size, context length, splitting: none of them makes another kernel."""
    emulator = Emulator(toolchain())
    backend = MetalBackend(emulator.metal_kernel, num_cores=40)
    spec = dataclasses.replace(SPEC, dtype=mx.float16, bits=bits)
    exhaust(backend.warm_up(spec, NUM_HEADS))
    warm = set(emulator.sources)
    attend_all(backend, spec)
    pool = backend.make_pool(spec, 64)
    for batch, context in ((1, 1), (1, 2000), (2, 40), (7, 3), (9, 33), (64, 100), (8, 300)):
        tables = tuple(range(-(-context // 32)))
        step = step_of([Chunk(tables, context - 1)] * batch, batch)
        queries = step_rows(0, spec, NUM_HEADS, batch)[0]
        backend.attend(pool, queries, None, None, backend.plan(step), scale=0.2)
    assert emulator.sources == warm
    assert len(warm) == 7  # writer, gather, reduce; decodes alone and shared, of whole and of split sequences


@pytest.mark.parametrize(
    ("spec", "num_heads", "reason"),
    [
        (LayerSpec(2, 72, 72, mx.float32), 4, f"key head_dim 72 is none of {KNOWN_DIMS}"),
        (LayerSpec(2, 64, 40, mx.float32), 4, f"value head_dim 40 is none of {KNOWN_DIMS}"),
        (LayerSpec(2, 224, 32, mx.float32, EIGHT), 6, f"key head_dim 224 is none of {KNOWN_DIMS}"),
    ],
)
def test_other_head_dims_gather_and_say_so_once(
    spec: LayerSpec, num_heads: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend()
    with caplog.at_level(logging.WARNING):
        outs = attend_all(backend, spec, num_heads, window=45)
    check_equal(outs, attend_all(ReferenceBackend(), spec, num_heads, window=45))
    assert backend.supports(spec, num_heads) == reason
    assert caplog.messages == [f"metal decodes gather K/V instead of reading it in place: {reason}"]


def faulty(mutations: dict[str, tuple[tuple[str, str], ...]]) -> MetalBackend:
    return MetalBackend(Emulator(toolchain(), mutations=mutations).metal_kernel, num_cores=4)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "reason"),
    [
        ("kv_write", "if (first < KEY_DIM)", "if (first < 0)", "keys of write 0 of 8 were not read back"),
        ("kv_write", "slot % BLOCK", "0", "keys of write 0 of 8 were not read back"),
        ("kv_write", "if (first < VALUE_DIM)", "if (first < 32)", "values of write 0 of 8 were not read back"),
        (
            "kv_gather",
            "(whole + (run * BLOCK + at)",
            "(whole + (run * BLOCK)",
            "keys of write 0 of 8 were not read back",
        ),
        (
            "kv_gather",
            "thread_position_in_grid.y)",
            "thread_position_in_grid.y) / 2",
            "keys of write 0 of 8 were not read back",
        ),
    ],
)
def test_writes_that_fail_are_replaced_by_scatters(
    kernel: str, old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = faulty({kernel: ((old, new),)})
    with caplog.at_level(logging.WARNING):
        outs = attend_all(backend)
    check_equal(outs, attend_all(ReferenceBackend()))
    assert backend.needs_synchronous_steps
    assert caplog.messages == [f"metal cannot write K/V in place, so steps are not submitted ahead: {reason}"]
    assert not make_backend().needs_synchronous_steps


def test_rows_that_no_kernel_writes_are_scattered(caplog: pytest.LogCaptureFixture) -> None:
    backend = make_backend()
    spec = LayerSpec(num_kv_heads=2, key_dim=33, value_dim=32, dtype=mx.float32)
    with caplog.at_level(logging.WARNING):
        outs = attend_all(backend, spec)
    check_equal(outs, attend_all(ReferenceBackend(), spec))
    assert backend.needs_synchronous_steps
    assert "rows of 33 and 32 elements cannot be moved in fours" in caplog.messages[0]


def test_scatters_do_not_copy_a_pool_when_steps_wait() -> None:
    """Build a step, wait for the one before, submit: the pools stay where they are."""
    backend = faulty({"kv_write": (("if (first < KEY_DIM)", "if (first < 0)"),)})
    spec = LayerSpec(num_kv_heads=2, key_dim=72, value_dim=72, dtype=mx.float32)  # no emulated kernel, which waits
    pool = backend.make_pool(spec, NUM_BLOCKS)
    pool.check_moves()
    running: list[mx.array] = []
    for seed, (num_decodes, chunks) in enumerate(STEPS * 5):
        step = step_of(chunks, num_decodes)
        rows = step_rows(seed, spec, NUM_HEADS, step.num_tokens)
        out = backend.attend(pool, *rows, backend.plan(step), scale=0.2)
        mx.eval(running)
        mx.async_eval(out, *backend.state(pool))
        running = [out]
    assert pool.check_moves() == 0


def test_a_decode_kernel_that_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    backend = faulty({"paged_decode": (("end - block * BLOCK", "end - block * BLOCK - 1"),)})
    with caplog.at_level(logging.WARNING):
        exhaust(backend.warm_up(SPEC, NUM_HEADS))
        outs = attend_all(backend)
    check_equal(outs, attend_all(ReferenceBackend()))
    reason = backend.supports(SPEC, NUM_HEADS)
    assert reason is not None
    assert reason.startswith("attention over a context of 1 is off by")
    assert caplog.messages == [f"metal decodes gather K/V instead of reading it in place: {reason}"]


def test_a_pipeline_that_allows_fewer_threads_gets_fewer() -> None:
    def limited(**definition: Any) -> Any:
        kernel = kernel_maker()(**definition)

        def call(**launch: Any) -> list[mx.array]:
            if text_name(definition["name"]) == "paged_decode" and launch["threadgroup"][0] > 64:
                raise ValueError("Thread group size (128) is greater than the maximum allowed")
            return kernel(**launch)

        return call

    backend = MetalBackend(limited, num_cores=4)
    exhaust(backend.warm_up(SPEC, NUM_HEADS))
    variant = backend.variant(DecodeShape.of(SPEC, NUM_HEADS))
    assert variant is not None
    assert variant.threads(DecodeShape.of(SPEC, NUM_HEADS)) == 64
    check_equal(attend_all(backend), attend_all(ReferenceBackend()))


def test_the_emulator_refuses_rows_that_are_not_contiguous() -> None:
    kernel = Emulator(toolchain()).metal_kernel(
        name="copy",
        input_names=["x"],
        output_names=["y"],
        source="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        ensure_row_contiguous=False,
    )
    launch = {
        "output_shapes": [(16,)],
        "output_dtypes": [mx.float32],
        "grid": (16, 1, 1),
        "threadgroup": (16, 1, 1),
        "template": [("T", mx.float32)],
    }
    rows = mx.arange(16, dtype=mx.float32).reshape(4, 4)
    assert mx.array_equal(kernel(inputs=[rows], **launch)[0], mx.arange(16)).item()
    with pytest.raises(EmulatorError, match="x is not row contiguous"):
        kernel(inputs=[rows.T], **launch)
