"""The CUDA twin: the Metal bodies behind a prelude. They are compiled here; where MLX computes
on a CUDA GPU, the tests of the Metal kernels (test_metal_kernels*) run them.

The compiler is NVRTC where its packages are installed (nvidia-cuda-nvrtc, nvidia-cuda-runtime, nvidia-cuda-crt:
65 MB, which is why no dependency group names them), else nvcc, else the compile tests are skipped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernel import text_name
from emulator.worlds import Chunk, gpu, kernel_maker, make_backend, step_of, step_rows, toolchain

from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import RowsInPlace, Slots
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.kernels.gpu.backend import PRELUDE, CudaBackend, GpuBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.kernels import KERNEL_TEXTS, KV_WRITE, read_text
from mlx_server.runtime.kernels.gpu.rows import ROW_TEXTS, RowKernels
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, default_variant
from tests.attention_worlds import EIGHT, EIGHT_FOUR, FOUR

CUDA_TYPES = {
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
ARCHITECTURE = "compute_80"

# Stands for the headers that MLX includes before ours.
PROLOGUE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif
struct Shape { int32_t sizes[10]; __device__ int32_t operator[](int i) const { return sizes[i]; } };
"""


class RecordedKernels:
    """Stands in for `mx.fast.cuda_kernel`: keeps the source that MLX would compile for each launch."""

    def __init__(self) -> None:
        self.header = ""
        self.functions: dict[str, str] = {}
        self.launched: set[str] = set()

    def __call__(self, **definition: Any) -> Any:
        assert self.header in ("", definition["header"])
        self.header = definition["header"]

        def call(**launch: Any) -> list[mx.array]:
            name = "_".join([definition["name"], *(str(value).rpartition(".")[2] for _, value in launch["template"])])
            self.functions[name] = cuda_function(name, definition, launch)
            self.launched.add(text_name(definition["name"]))
            return [mx.zeros(*kind) for kind in zip(launch["output_shapes"], launch["output_dtypes"])]

        return call

    def source(self) -> str:
        functions = "\n".join(self.functions.values())
        return f"{PROLOGUE}\n{self.header}\nnamespace mlx::core::cu {{\n{functions}\n}}\n"


def cuda_function(name: str, definition: dict[str, Any], launch: dict[str, Any]) -> str:
    """The function that MLX writes around a body: every input const, shapes by value, template arguments inside."""
    parameters = []
    for argument, array in zip(definition["input_names"], launch["inputs"], strict=True):
        parameters.append(f"const {CUDA_TYPES[array.dtype]}* {argument}")
        if f"{argument}_shape" in definition["source"]:
            parameters.append(f"const __grid_constant__ Shape {argument}_shape")
    outputs = zip(definition["output_names"], launch["output_dtypes"], strict=True)
    parameters += [f"{CUDA_TYPES[dtype]}* {argument}" for argument, dtype in outputs]
    constants = []
    for constant, value in launch["template"]:
        if isinstance(value, bool):
            constants.append(f"constexpr bool {constant} = {str(value).lower()};")
        elif isinstance(value, int):
            constants.append(f"constexpr int {constant} = {value};")
        else:
            constants.append(f"using {constant} = {CUDA_TYPES[value]};")
    lines = "\n".join(constants)
    return f"__global__ void {name}({', '.join(parameters)}) {{\n{lines}\n{definition['source']}\n}}\n"


def recorded(spec: LayerSpec, num_heads: int, partition_tokens: int | None, has_sinks: bool) -> RecordedKernels:
    """What a mixed step of one layer launches."""

    def variant(shape: DecodeShape) -> KernelVariant:
        default = default_variant(shape)
        sizes = (default.heads_per_simdgroup, default.simdgroups, default.lanes_per_row, default.rows_ahead)
        return KernelVariant(*sizes, partition_tokens)

    kernels = RecordedKernels()
    backend = CudaBackend(kernels, choose_variant=variant)
    with patch.object(gpu_backend, "write_failure", return_value=None):
        pool = backend.make_pool(spec, 4)
    step = step_of([Chunk((0, 1), 40), Chunk((2,), 0, 5), Chunk((3,), 0, 20)], 1)
    rows = step_rows(0, spec, num_heads, step.num_tokens)
    sinks = mx.zeros((num_heads,), spec.dtype) if has_sinks else None
    backend.attend(pool, *rows, backend.plan(step), scale=0.1, sinks=sinks)
    return kernels


def nvrtc_folder() -> Path | None:
    """`nvidia/cu13` of the installed packages, if all that NVRTC needs is there."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        root = Path(folder) / "cu13"
        if list(root.glob("lib/libnvrtc.so*")) and (root / "include/cuda_fp16.h").exists():
            return root
    return None


def compile_by_nvrtc(source: str, root: Path) -> str | None:
    """The compiler's errors, or None."""
    nvrtc = ctypes.CDLL(str(next(root.glob("lib/libnvrtc.so*"))))
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    options = [f"--gpu-architecture={ARCHITECTURE}", f"--include-path={root / 'include'}", "--std=c++17"]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    )
    if status == 0:
        return None
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode()


def compile_by_nvcc(source: str, nvcc: str, folder: Path) -> str | None:
    text = folder / "kernels.cu"
    text.write_text(source)
    command = [nvcc, "--ptx", f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", str(text), "-o", str(folder / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    return None if result.returncode == 0 else result.stderr


def compile_cuda(source: str, folder: Path) -> str | None:
    root = nvrtc_folder()
    if root is not None:
        return compile_by_nvrtc(source, root)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no CUDA compiler: install nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-crt, or nvcc")
    return compile_by_nvcc(source, nvcc, folder)


@pytest.mark.parametrize(
    ("spec", "num_heads", "partition_tokens", "has_sinks"),
    [
        (LayerSpec(8, 128, 128, mx.float16), 32, None, False),
        (LayerSpec(8, 64, 64, mx.bfloat16), 64, 32, True),
        (LayerSpec(2, 80, 96, mx.float32), 2, 32, True),
        (LayerSpec(8, 128, 128, mx.float16, EIGHT), 32, None, False),
        (LayerSpec(2, 512, 512, mx.bfloat16), 16, 32, False),
        (LayerSpec(2, 112, 160, mx.float16), 8, 32, False),
        (LayerSpec(2, 32, 32, mx.bfloat16), 8, None, True),
        (LayerSpec(2, 64, 96, mx.bfloat16, FOUR), 6, 32, True),
    ],
    ids=str,
)
def test_every_kernel_compiles(
    spec: LayerSpec, num_heads: int, partition_tokens: int | None, has_sinks: bool, tmp_path: Path
) -> None:
    kernels = recorded(spec, num_heads, partition_tokens, has_sinks)
    others = {"paged_reduce"} if partition_tokens is None else set()
    others |= {"kv_write_quantized" if spec.bits is None else "kv_write"}
    assert kernels.launched == {text.name for text in KERNEL_TEXTS} - others
    assert compile_cuda(kernels.source(), tmp_path) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
def test_kernels_that_move_rows_compile(dtype: mx.Dtype, tmp_path: Path) -> None:
    kernels = RecordedKernels()
    rows = RowsInPlace(RowKernels(kernels, read_text(PRELUDE)), mx.zeros((4, 3, 7), dtype))
    slots = Slots(np.array([2, 1], np.int32))
    rows.write(slots, rows.read(slots))
    assert kernels.launched == {text.name for text in ROW_TEXTS}
    assert compile_cuda(kernels.source(), tmp_path) is None


def test_a_body_that_is_no_cuda_does_not_compile(tmp_path: Path) -> None:
    kernels = recorded(LayerSpec(2, 64, 64, mx.float32), 2, None, False)
    assert "simd_ballot" in (
        compile_cuda(kernels.source().replace("simd_sum(score)", "simd_ballot(score)"), tmp_path) or ""
    )


@pytest.mark.parametrize(("name", "kind"), [("cuda", CudaBackend), ("metal", MetalBackend)])
def test_the_kernels_tests_run_on_the_gpu_that_is_there(
    name: str, kind: type[GpuBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = RecordedKernels()
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: name == "cuda")
    monkeypatch.setattr(mx.fast, f"{name}_kernel", kernels)
    assert gpu() == name
    backend = make_backend()
    assert type(backend) is kind
    monkeypatch.setattr(gpu_backend, "write_failure", lambda made, spec: str(made.make(KV_WRITE, {})))
    backend.make_pool(LayerSpec(2, 64, 64, mx.float32), 1)
    assert kernels.header == (read_text(PRELUDE) if name == "cuda" else "")
    kernel_maker()(name="alone", header="", input_names=[], output_names=[], source="")
    with pytest.raises(pytest.skip.Exception, match="needs Linux and MLX on the CPU"):
        toolchain.__wrapped__()


def test_each_launch_of_other_types_or_sizes_has_a_name_of_its_own() -> None:
    """CUDA kernels are cached by name and template arguments, not by their inputs' types."""
    sources: dict[str, str] = {}
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        for has_sinks, bits in ((False, None), (True, None), (False, EIGHT), (False, EIGHT_FOUR), (False, FOUR)):
            for name, text in recorded(LayerSpec(2, 64, 128, dtype, bits), 6, 32, has_sinks).functions.items():
                assert sources.setdefault(name, text) == text


@pytest.mark.skipif(gpu() is not None, reason="says what a machine without a GPU answers")
def test_without_cuda_the_backend_says_so() -> None:
    with pytest.raises(RuntimeError, match="No CUDA back-end"):
        CudaBackend()
