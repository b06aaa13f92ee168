"""The source text that MLX would pass to the Metal compiler."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def capture_source(kernel: Callable[..., Any], inputs: list[mx.array], **call: Any) -> str:
    """The source for one call of a `metal_kernel` object.

    MLX can record such a call without Metal while it exports a function, and prints the source in verbose mode. It
    prints from C++, so the standard output of the process is captured.
    """

    def call_kernel(*arrays: mx.array) -> Any:
        return kernel(inputs=list(arrays), verbose=True, **call)

    with tempfile.TemporaryFile() as printed, tempfile.NamedTemporaryFile(suffix=".mlxfn") as exported:
        sys.stdout.flush()
        terminal = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(exported.name, call_kernel, *inputs)
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(terminal, 1)
            os.close(terminal)
        printed.seek(0)
        text = printed.read().decode()
    found = re.search(r"```\n(.*)\n```", text, re.DOTALL)
    assert found is not None, f"MLX printed no source: {text!r}"
    return found.group(1)
