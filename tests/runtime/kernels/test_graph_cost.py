"""What building a decode step's graph costs the host beside mlx-lm's own, in calls: the same in every run.

Times would say little here, and nothing of a Mac; what a layer calls is the same there.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import Chunk, step_of
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache
from replay.record import UntestedMetal

from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.forward import ModelForward
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.layers.adapters import AdapterRows

counts_calls = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on, tracing functions are not told all instructions"
)
CALLS = {dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap}
BATCH = 8
CONTEXT = 1000


class CallCounter:
    """Counts calls of anything, MLX's functions too, and what Python enters without one: properties, hashes. Not what
    this file does."""

    def __init__(self) -> None:
        self.count = 0
        self._codes: dict[CodeType, bytes] = {}

    def of(self, work: Callable[[], object]) -> int:
        before = sys.gettrace()
        self.count = 0
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(before)
        return self.count

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            caller = frame.f_back
            self.count += caller is not None and caller.f_code.co_filename != __file__ and not self._calls(caller)
        elif event == "opcode":
            self.count += self._calls(frame)
        return self._trace

    def _calls(self, frame: FrameType) -> bool:
        """Whether the frame's instruction is a call; the entries of its cache, which follow it, are zeros."""
        code = self._codes.setdefault(frame.f_code, frame.f_code.co_code)
        at = frame.f_lasti
        while at > 0 and code[at] == 0:
            at -= 2
        return code[at] in CALLS


def stand_in_kernel(**definition: Any) -> Callable[..., list[mx.array]]:
    """Zeros for all outputs."""

    def call(*, output_shapes: list[Any], output_dtypes: list[Any], **launch: Any) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]

    return call


def model_of(num_layers: int) -> llama.Model:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return llama.Model(
        llama.ModelArgs("llama", **sizes, num_hidden_layers=num_layers, rms_norm_eps=1e-5, vocab_size=64)
    )


def calls_of_a_step(num_layers: int, *, alike: bool) -> int:
    """Decodes that share all blocks but their last, or none."""
    model = model_of(num_layers)
    cache = PagedKVCache(discover_layers(model), UntestedMetal(stand_in_kernel, num_cores=16))
    num_blocks = -(-CONTEXT // 32)
    cache.allocate(BATCH * num_blocks, num_slots=BATCH)
    forward = ModelForward(model, cache, AdapterRows())
    tables = np.arange(BATCH * num_blocks).reshape(BATCH, num_blocks)
    if alike:
        tables[:, :-1] = tables[0, :-1]
    step = step_of([Chunk(tuple(table), CONTEXT - 1) for table in tables.tolist()], BATCH)
    ids = mx.zeros((BATCH,), mx.int32)
    forward([step], ids, list(range(BATCH)))  # makes the kernels
    return CallCounter().of(lambda: forward([step], ids, list(range(BATCH))))


def calls_of_mlx_lm(num_layers: int) -> int:
    """A sequence longer, in its cache's room: the common case of its decode step."""
    model = model_of(num_layers)
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 4), mx.int32), cache=cache)
    token = mx.zeros((1, 1), mx.int32)
    return CallCounter().of(lambda: model(token, cache=cache))


@counts_calls
def test_the_counter_counts_calls_of_all_kinds() -> None:
    assert CallCounter().of(lambda: mx.ones((3,))) == 0  # from here
    namespace: dict[str, Any] = {"mx": mx}
    exec(
        "class A:\n @property\n def b(self): return mx.abs(mx.zeros((1,)))\ndef f(a): return (a.b, len([]))", namespace
    )
    assert CallCounter().of(lambda: namespace["f"](namespace["A"]())) == 4  # b, abs, zeros, len


@counts_calls
@pytest.mark.parametrize("alike", [False, True])
def test_a_layer_costs_hardly_more_calls_than_mlx_lms_own(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    """Of a step with decodes in several work items: a write, a decode and a merge a layer, in place of one update and
    one attention."""
    install_seam()
    monkeypatch.setattr(gpu_backend, "write_failure", lambda kernels, spec: None)
    few, many = (calls_of_a_step(num_layers, alike=alike) for num_layers in (2, 6))
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention._mlx_server_original)
    few_there, many_there = (calls_of_mlx_lm(num_layers) for num_layers in (2, 6))
    layer, layer_there = (many - few) / 4, (many_there - few_there) / 4
    assert layer <= 1.15 * layer_there
