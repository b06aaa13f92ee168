"""Kernel objects that run on the emulated GPU, and a replacement of `mx.fast.metal_kernel` that makes them."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from emulator.capture import capture_source
from emulator.errors import EmulatorError
from emulator.lint import lint
from emulator.machine import BuiltKernel
from emulator.toolchain import Toolchain
from emulator.translate import buffer_names, translate

MAX_THREADS = 256
WRITTEN_INPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**dict.fromkeys(("kv_write", "kv_write_quantized"), ("key_pool", "value_pool")), "row_write": ("pool",)}
)
POOLS = ("key_pool", "value_pool", "pool")
"""Inputs that may be the first part of a buffer. As on a GPU, a kernel can access the whole buffer and nothing beyond.
They must not be copied, since the kernel would then read or write the copy."""

_NUMPY_TYPES = {
    mx.float32: np.dtype(np.float32),
    mx.float16: np.dtype(np.float16),
    mx.bfloat16: np.dtype(np.uint16),
    mx.int32: np.dtype(np.int32),
    mx.uint32: np.dtype(np.uint32),
}


class Emulator:
    """Makes kernels, and holds the seed of their thread orders and their builds.

    Each launch takes the next seed. `mutations` maps a kernel's name to (old, new) replacements in its body or header,
    the faults that tests plant. `sources` collects all texts that a Mac would have to compile. If races are checked,
    `loaded` has the bytes that kernels have read, by (kernel, buffer).
    """

    def __init__(
        self,
        toolchain: Toolchain,
        *,
        seed: int = 0,
        check_races: bool = False,
        mutations: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({}),
    ) -> None:
        self.toolchain = toolchain
        self.seed = seed
        self.check_races = check_races
        self.mutations = mutations
        self.sources: set[str] = set()
        self.loaded: Counter[tuple[str, str]] = Counter()

    def metal_kernel(self, **definition: Any) -> EmulatedKernel:
        """Same arguments as `mx.fast.metal_kernel`."""
        text = text_name(definition["name"])
        for old, new in self.mutations.get(text, ()):
            part = next((part for part in ("source", "header") if old in definition[part]), None)
            assert part is not None, old
            definition[part] = definition[part].replace(old, new, 1)
        findings = lint(definition["source"], WRITTEN_INPUTS.get(text, ()))
        if findings:
            raise EmulatorError("lint", "; ".join(findings))
        return EmulatedKernel(self, **definition)


def text_name(kernel_name: str) -> str:
    """The name of a kernel's text, without the sizes that follow in the kernel's name."""
    return kernel_name.partition("__")[0]


class EmulatedKernel:
    """Is called like a `metal_kernel` object. Evaluates the inputs, runs the kernel, and returns evaluated arrays."""

    def __init__(
        self,
        emulator: Emulator,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> None:
        self._emulator = emulator
        self._name = text_name(name)
        self._input_names = input_names
        self._copied = [name for name in input_names if ensure_row_contiguous and name not in POOLS]
        self._written = WRITTEN_INPUTS.get(self._name, ())
        self._recorded = mx.fast.metal_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
        )
        self._built: dict[str, BuiltKernel] = {}
        self._sources: dict[tuple[Any, ...], str] = {}

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, Any]] | None = None,
    ) -> list[mx.array]:
        _check_grid(grid, threadgroup)
        mx.eval(inputs)
        views = {name: _view(array) for name, array in zip(self._input_names, inputs, strict=True)}
        views |= {name: np.ascontiguousarray(views[name]) for name in self._copied}
        for name, view in views.items():
            if not view.flags.c_contiguous:
                raise EmulatorError("launch", f"{self._name}: {name} is not row contiguous and is passed as it lies")
        views |= {name: _whole_buffer(views[name]) for name in POOLS if name in views and views[name].size}
        source = self._source(inputs, output_shapes, output_dtypes, grid, threadgroup, template or [])
        built = self._build(source)
        names = buffer_names(source)
        shapes = {f"{name}_shape": np.array(array.shape, np.int32) for name, array in zip(self._input_names, inputs)}
        given = {name: array.tobytes() for name, array in (views | shapes).items()}
        outputs = names[-len(output_shapes) :]
        types = dict(zip(outputs, (_NUMPY_TYPES[dtype] for dtype in output_dtypes)))
        for name, shape in zip(outputs, output_shapes):
            given[name] = b"\xff" * (math.prod(shape) * types[name].itemsize)  # NaN if it is not written
        emulator = self._emulator
        emulator.seed += 1
        results = built.launch([given[name] for name in names], grid, threadgroup, emulator.seed)
        emulator.loaded.update({(self._name, buffer): size for buffer, size in built.loaded.items()})
        self._keep_writes(names, given, views, results)
        after = dict(zip(names, results))
        return [
            _array(np.frombuffer(after[name], types[name]).reshape(shape), dtype)
            for name, shape, dtype in zip(outputs, output_shapes, output_dtypes)
        ]

    def _source(
        self,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, Any]],
    ) -> str:
        """The generated source, which depends on dtypes, ranks, and on which inputs are small."""
        kinds = [(array.dtype, array.ndim, array.size < 8) for array in inputs]
        key = (str(kinds), str(output_dtypes), str(template))
        if key not in self._sources:
            self._sources[key] = capture_source(
                self._recorded,
                [array if array.size < 8 else mx.zeros([8] + [1] * (array.ndim - 1), array.dtype) for array in inputs],
                output_shapes=output_shapes,
                output_dtypes=output_dtypes,
                grid=grid,
                threadgroup=threadgroup,
                template=template,
            )
            self._emulator.sources.add(self._sources[key])
        return self._sources[key]

    def _build(self, source: str) -> BuiltKernel:
        if source not in self._built:
            toolchain, check_races = self._emulator.toolchain, self._emulator.check_races
            library = toolchain.build_kernel(translate(source, self._name), self._name, check_races=check_races)
            self._built[source] = BuiltKernel(toolchain, library, buffer_names(source), check_races=check_races)
        return self._built[source]

    def _keep_writes(
        self, names: list[str], given: dict[str, bytes], views: dict[str, np.ndarray], results: list[bytes]
    ) -> None:
        """Copies writes to inputs into MLX's own memory, if the kernel may write them."""
        for name, after in zip(names, results):
            if name not in views or after == given[name]:
                continue
            if name not in self._written:
                raise EmulatorError("written input", f"{self._name} wrote into its input {name}")
            view = views[name]
            view[...] = np.frombuffer(after, view.dtype).reshape(view.shape)


def _check_grid(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> None:
    if math.prod(threadgroup) > MAX_THREADS:
        raise EmulatorError("launch", f"a threadgroup of {threadgroup} threads; the bound here is {MAX_THREADS}")
    if any(total % part for total, part in zip(grid, threadgroup)):
        raise EmulatorError("launch", f"grid {grid} is not a multiple of threadgroup {threadgroup}: CUDA rounds it up")


def _view(array: mx.array) -> np.ndarray:
    """The array's own memory, bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _whole_buffer(view: np.ndarray) -> np.ndarray:
    """All bytes of the memory that begins with the view. MLX's host allocator stores their number in front of them."""
    allocated = view.ctypes.data - ctypes.sizeof(ctypes.c_size_t)
    size = ctypes.c_size_t.from_address(allocated).value
    assert view.nbytes <= size < _usable_size(allocated), "an input that does not begin its buffer"
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(view.ctypes.data))


def _usable_size(address: int) -> int:
    """The size that the C library has allocated at this address."""
    return int(ctypes.CDLL(None).malloc_usable_size(ctypes.c_void_p(address)))


def _array(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(values)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
