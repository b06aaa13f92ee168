"""Transformer layers in one native call: the bits of their parts, and which layers keep their own code."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.layers import cpu
from mlx_server.runtime.layers.cpu import install_native
from tests.architectures import config_of
from tests.conformance import Subject, answer
from tests.engine_worlds import on_the_cpu, random_prompts

pytestmark = on_the_cpu

KNOWN = ("llama", "qwen2", "qwen3")


def installed(architecture: str, bits: int | None = None, **settings: int) -> Subject:
    install_seam()
    subject = Subject(architecture, {**config_of(architecture), **settings})
    if bits is not None:
        nn.quantize(subject.model, group_size=32, bits=bits)
    install_native(subject.model)
    mx.eval(subject.model.parameters())
    return subject


def fused(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, cpu._Block)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each layer that was computed by one call."""
    seen: list[int] = []
    run = CpuBackend.run_layer

    def watched(self: CpuBackend, pool: Any, parts: Any, x: mx.array, *others: Any) -> mx.array | None:
        y = run(self, pool, parts, x, *others)
        if y is not None:
            seen.append(x.shape[0])
        return y

    monkeypatch.setattr(CpuBackend, "run_layer", watched)
    return seen


@pytest.mark.parametrize(
    ("architecture", "bits", "threads"),
    [*((name, None, "1") for name in KNOWN), ("llama", 4, "1"), ("qwen3", 8, "2"), ("llama", None, "2")],
)
def test_a_layer_in_one_call_has_the_bits_of_its_parts(
    architecture: str, bits: int | None, threads: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.THREADS_VARIABLE, threads)
    prompts, max_tokens = random_prompts((40, 1, 9, 80)), (3, 5, 2, 4)
    answers = []
    for max_rows in (64, 0):
        monkeypatch.setattr(cpu, "MAX_ROWS", max_rows)
        subject = installed(architecture, bits)
        with subject.make_llm(attention_backend="cpu", max_num_batched_tokens=96) as llm:
            answers.append([(one.token_ids, one.logprobs) for one in answer(llm, prompts, max_tokens).completions])
        if max_rows:
            assert max(calls) <= 64
            assert len(calls) >= 5 * len(fused(subject.model)) > 0
        calls.clear()
    assert answers[0] == answers[1]
    assert not calls


@pytest.mark.parametrize("architecture", ["gemma3_text", "phi3", "mixtral"])
def test_layers_of_another_form_keep_their_code(architecture: str) -> None:
    assert fused(installed(architecture).model) == []


def test_the_known_form_is_its_code_and_what_its_names_stand_for() -> None:
    class Same(llama.MLP):  # type: ignore[misc]
        pass

    class Other(llama.MLP):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            y: mx.array = super().__call__(x) + x
            return y

    class Renamed(llama.MLP):  # type: ignore[misc]
        __call__ = FunctionType(llama.MLP.__call__.__code__, {"swiglu": nn.silu})

    made = [kind.__new__(kind) for kind in (Same, Other, Renamed)]
    assert [cpu._has_code_of(module, llama.MLP) for module in made] == [True, False, False]


def test_quantised_k_v_and_attention_by_group_take_a_layers_own_code(calls: list[int]) -> None:
    subject = installed("llama", head_dim=32)
    with subject.make_llm(attention_backend="cpu", kv_bits="8") as llm:
        loading = len(calls)
        answer(llm, random_prompts((9,)), (4,))
        assert len(calls) == loading
    block = fused(subject.model)[0]
    object.__setattr__(block, "self_attn", block.self_attn)  # as a stand-in does
    assert block._fused(mx.zeros((1, 1, 32)), None, None) is None


def test_a_layer_whose_weights_the_library_cannot_read_keeps_its_code(calls: list[int]) -> None:
    subject = installed("llama")
    for block in fused(subject.model):
        block.mlp.up_proj.weight = block.mlp.up_proj.weight.astype(mx.float16)
    mx.eval(subject.model.parameters())
    with subject.make_llm(attention_backend="cpu") as llm:
        answer(llm, random_prompts((9,)), (4,))
    assert calls == []
