"""Attention on NVIDIA GPUs: `GpuBackend` with the same kernel bodies through `mx.fast.cuda_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_server.runtime.kernels.gpu_backend import GpuBackend
from mlx_server.runtime.kernels.gpu_kernels import MakeKernel, read_text
from mlx_server.runtime.kernels.gpu_variant import DecodeShape, KernelVariant, default_variant

PRELUDE = "cuda_prelude.h"
_DEFAULT_CORES = 128


class CudaBackend(GpuBackend):
    """The `cuda` backend. Raises `RuntimeError` where MLX has no CUDA back-end."""

    name = "cuda"

    def __init__(
        self,
        make_kernel: MakeKernel | None = None,
        *,
        num_cores: int = _DEFAULT_CORES,
        choose_variant: Callable[[DecodeShape], KernelVariant] = default_variant,
    ) -> None:
        if make_kernel is None:
            if not mx.cuda.is_available():
                raise RuntimeError("No CUDA back-end: this MLX was built without, or there is no such GPU.")
            make_kernel = cast(MakeKernel, mx.fast.cuda_kernel)
        super().__init__(make_kernel, header=read_text(PRELUDE), num_cores=num_cores, choose_variant=choose_variant)
