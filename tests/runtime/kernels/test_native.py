"""The native library: each operation beside MLX's own, equal bits for a row whatever its company, and failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.build import ISA_VARIABLE, NativeBuildError, instruction_set
from tests.engine_worlds import on_the_cpu

pytestmark = on_the_cpu

STORAGES = ("float32", "bfloat16", "4 bits", "8 bits")


@pytest.fixture(scope="module")
def library() -> Any:
    found = native.library()
    assert found is not None, "a compiler, the headers of Python and nanobind are here"
    return found


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng([*shape, seed]).standard_normal(shape, dtype=np.float32))


def stored(weight: mx.array, storage: str, group: int = 64) -> tuple[list[Any], mx.array]:
    """What `linear` gets for a weight, evaluated, and the float32 weight that it stands for."""
    if storage == "float32":
        return [weight], weight
    if storage == "bfloat16":
        kept = weight.astype(mx.bfloat16)
        mx.eval(kept)
        return [kept], kept.astype(mx.float32)
    bits = int(storage[0])
    packed = mx.quantize(weight, group, bits)
    mx.eval(packed)
    return [*packed, bits], mx.dequantize(*packed, group, bits)


def worst(got: mx.array, wanted: mx.array) -> float:
    return float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())


@pytest.mark.parametrize("shape", [(1, 32), (77, 96), (130, 128), (515, 640), (3, 4096)])
@pytest.mark.parametrize("storage", STORAGES)
def test_products_are_mlx_s(library: Any, storage: str, shape: tuple[int, int]) -> None:
    given, weight = stored(normal(*shape), storage, 32)
    for rows in (1, 5, 19, 130):
        x = normal(rows, 1, shape[1])
        y = library.linear(native.engine(2), x, *given)
        assert y.shape == (rows, 1, shape[0])
        assert worst(y, x @ weight.T) < 3e-6


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("storage", STORAGES[2:])
def test_groups_of_codes(library: Any, storage: str, group: int) -> None:
    given, weight = stored(normal(96, 384), storage, group)
    x = normal(7, 384)
    assert worst(library.linear(native.engine(1), x, *given), x @ weight.T) < 3e-6


def test_strided_rows_are_read_in_their_order(library: Any) -> None:
    x, weight = normal(64, 6, 5).transpose(2, 1, 0), normal(40, 64)
    assert worst(library.linear(native.engine(1), x, weight), x @ weight.T) < 3e-6


@pytest.mark.parametrize("shape", [(257, 384), (66, 2176)], ids=["one chunk of the depth", "three chunks"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_has_its_bits_in_any_company_and_with_any_threads(
    library: Any, storage: str, shape: tuple[int, int]
) -> None:
    given, _ = stored(normal(*shape), storage)
    x = normal(200, shape[1])
    alone = np.array(mx.concatenate([library.linear(native.engine(1), x[row : row + 1], *given) for row in range(200)]))
    for threads in (1, 2, 3):
        for rows in [*range(1, 65), 127, 200]:
            first = (rows * 7) % (201 - rows)
            y = library.linear(native.engine(threads), x[first : first + rows], *given)
            assert np.array_equal(np.array(y), alone[first : first + rows]), (rows, threads)


def test_what_the_library_is_not_for_is_left_to_mlx(library: Any) -> None:
    engine, x, weight = native.engine(1), normal(2, 64), normal(8, 64)
    lazy = weight + 1
    for rows, matrix in (
        (x.astype(mx.float16), weight),
        (x, weight.astype(mx.float16)),
        (x[:, :40], mx.contiguous(weight[:, :40])),
        (x, normal(64, 8).T),
        (x, lazy),
        (x, normal(3, 8, 64)),
    ):
        if matrix is not lazy:
            mx.eval(matrix)
        assert library.linear(engine, rows, matrix) is None
    assert library.linear(engine, x, *stored(weight, "8 bits", 32)[0][:3], 6) is None
    assert library.rms_norm(engine, normal(2, 40), mx.ones(40), 1e-6) is None
    assert library.rms_norm(engine, x.astype(mx.bfloat16), mx.ones(64), 1e-6) is None
    assert library.swiglu(engine, x, x[:1]) is None


@pytest.mark.parametrize("size", [16, 64, 576])
def test_rms_norm(library: Any, size: int) -> None:
    x, weight = normal(4, 9, size), normal(size)
    got = library.rms_norm(native.engine(2), x.transpose(1, 0, 2), weight, 1e-5)
    assert worst(got, mx.fast.rms_norm(x.transpose(1, 0, 2), weight, 1e-5)) < 2e-6


def test_swiglu_is_right_from_end_to_end_of_the_numbers(library: Any) -> None:
    gate = mx.array([[-1e30, -100, -20, -1, -0.0, 0, 1e-20, 1, 20, 100, 1e30] * 9])
    up = normal(1, 99)
    got, wanted = library.swiglu(native.engine(1), gate, up), nn.silu(gate) * up
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("is_traditional", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_rope(library: Any, is_traditional: bool, length: int) -> None:
    x, offset = normal(7, length, 3, 64).transpose(0, 2, 1, 3), mx.array([0, 1, 5, 100, 700, 3, 77])
    rotation = library.Rotation([1e4 ** (-i / 48) for i in range(0, 48, 2)], is_traditional)
    wanted = mx.fast.rope(x, 48, traditional=is_traditional, base=1e4, scale=1.0, offset=offset)
    assert worst(library.rope(native.engine(1), x, offset, rotation), wanted) < 5e-5


NO_ROOM = """
import resource
import mlx.core as mx
from pathlib import Path
from mlx_server.runtime.kernels.cpu import native
mx.set_default_device(mx.cpu)
library, engine = native.library(), native.engine(1)
x, weight = mx.zeros((32, 640_000)).T, mx.ones((1, 32))
mx.eval(x, weight, library.linear(engine, x[:4], weight))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, limits[1]))
try:
    mx.eval(library.linear(engine, x, weight))
except RuntimeError as error:
    print("raised", error)
resource.setrlimit(resource.RLIMIT_AS, limits)
print(library.linear(engine, x[:4], weight).tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux's limit of memory")
def test_a_node_that_fails_ends_its_step_and_not_the_process(library: Any) -> None:
    """It needs 80 MB to put its strided rows in order, and the process may have 32 more."""
    run = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines() == ["raised std::bad_alloc", str([[0.0]] * 4)]


def test_nodes_keep_nothing_of_python_s(library: Any) -> None:
    """They end on another thread, which would need Python's lock for it."""
    engine, x = library.Engine(1), normal(2, 64)
    rotation = library.Rotation([1.0], False)
    counts = sys.getrefcount(engine), sys.getrefcount(rotation)
    nodes = [library.rms_norm(engine, x, mx.ones(64), 1e-6) for _ in range(200)]
    nodes += [library.rope(engine, x[None, None], mx.array(0), rotation) for _ in range(200)]
    assert (sys.getrefcount(engine), sys.getrefcount(rotation)) == counts
    del engine, rotation
    mx.eval(nodes)


EXITS = """
import mlx.core as mx
from mlx_server.runtime.kernels.cpu import native
mx.set_default_device(mx.cpu)
library, engine = native.library(), native.engine(2)
x, weight = mx.zeros((64, 1024)), mx.ones((1024, 1024))
mx.eval(x, weight)
for _ in range(400):
    x = library.linear(engine, x, weight)
    mx.async_eval(x)
print("ends", flush=True)
"""


def test_a_process_may_end_while_nodes_run(library: Any) -> None:
    run = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.returncode) == ("ends\n", 0), run.stderr


def test_instruction_sets_are_chosen_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    if instruction_set() is None:
        pytest.skip("no x86-64")
    monkeypatch.setenv(ISA_VARIABLE, "x86-64-v3")
    assert instruction_set() == "x86-64-v3"
    monkeypatch.setenv(ISA_VARIABLE, "neon")
    with pytest.raises(NativeBuildError, match="MLX_SERVE_CPU_ISA is 'neon'; it must be one of x86-64-v4, "):
        instruction_set()


def test_without_headers_there_is_no_library_and_a_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    monkeypatch.setattr(native.sysconfig, "get_path", lambda _: str(tmp_path))
    assert isinstance(native._found.__wrapped__(), NativeBuildError)
    (record,) = caplog.records
    assert "this Python has no headers" in record.getMessage()
