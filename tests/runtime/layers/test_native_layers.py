"""The native library behind models: mlx-lm's logits, equal bits in any company, steps that are built without a stop."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import activations
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.layers import cpu as native_layers
from mlx_server.runtime.layers.cpu import bfloat16_weights, install_native
from mlx_server.runtime.models.random_models import build_random
from tests.conformance import Subject, answer, worst_error
from tests.engine_worlds import on_the_cpu, random_prompts

pytestmark = on_the_cpu


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_next", "mamba"])
def test_models_answer_what_mlx_lm_does(architecture: str) -> None:
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((40, 1, 9)), (3, 5, 2)
    wanted = subject.wanted(prompts, max_tokens)
    assert install_native(subject.model) > 0
    mx.eval(subject.model.parameters())
    with subject.make_llm(attention_backend="cpu", max_num_batched_tokens=32, max_num_seqs=2) as llm:
        assert llm.engine._parts.runner.launch_is_host_only, "steps are built ahead of those that run"
        assert worst_error(answer(llm, prompts, max_tokens), wanted) < 1e-4


def logprobs(subject: Subject, prompts: list[Any], threads: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv(native.THREADS_VARIABLE, threads)
    install_native(subject.model)
    mx.eval(subject.model.parameters())
    with subject.make_llm(
        attention_backend="cpu", num_kv_blocks=256, max_num_seqs=64, max_num_batched_tokens=4096
    ) as llm:
        completions = answer(llm, prompts, [6] * len(prompts)).completions
        return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize("bits", [None, 4])
def test_a_request_has_its_bits_alone_and_among_64_and_with_any_threads(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logprobs of whole requests: 64 at a time, 13 and 1."""
    prompts = random_prompts(tuple(3 + n % 30 for n in range(64)))
    answers = []
    for threads, groups in (("1", [prompts]), ("2", [prompts[:13], prompts[13:]]), ("3", [prompts[40:41]])):
        subject = Subject("llama")
        if bits is not None:
            nn.quantize(subject.model, group_size=32, bits=bits)
            mx.eval(subject.model.parameters())
        answers.append([one for group in groups for one in logprobs(subject, group, threads, monkeypatch)])
    together, in_groups, alone = answers
    assert in_groups == together
    assert alone == together[40:41]


def test_nothing_is_evaluated_while_a_step_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, calls = Subject("llama"), list[str]()
    install_native(subject.model)
    mx.eval(subject.model.parameters())
    with subject.make_llm(attention_backend="cpu") as llm:
        runner = llm.engine._parts.runner
        launch, evaluate = runner.launch, mx.eval

        def watched(step: Any) -> Any:
            monkeypatch.setattr(mx, "eval", lambda *arrays: (calls.append("eval"), evaluate(*arrays)))
            try:
                return launch(step)
            finally:
                monkeypatch.setattr(mx, "eval", evaluate)
                calls.append("step")

        monkeypatch.setattr(runner, "launch", watched)
        answer(llm, random_prompts((9, 40)), (5, 5))
    assert set(calls) == {"step"}
    assert len(calls) >= 5


def test_transposed_weights_are_put_in_one_piece() -> None:
    layer, x = nn.Linear(64, 96), mx.random.normal((3, 64), key=mx.random.key(0))
    layer.weight = mx.random.normal((64, 96), key=mx.random.key(1)).T
    mx.eval(layer.weight)
    wanted = layer(x)
    library, engine = native.library(), native.engine(1)
    assert library is not None
    assert library.linear(engine, x, layer.weight) is None
    assert install_native(layer) == 1
    mx.eval(layer.parameters())
    assert library.linear(engine, x, layer.weight) is not None
    assert mx.allclose(layer(x), wanted, rtol=1e-4, atol=1e-5)


def test_weights_stay_in_bfloat16_and_answer_as_if_they_were_widened() -> None:
    config = {**Subject("llama").config, "tie_word_embeddings": True}
    models = [build_random(config, 3), build_random(config, 3)]
    kept: list[Any] = []
    for model in models:
        model.set_dtype(mx.bfloat16)
        kept = bfloat16_weights(model)
        model.set_dtype(mx.float32)
        install_native(model, kept if model is models[0] else ())
        mx.eval(model.parameters())
    assert len(kept) > 8
    sizes = [sum(array.nbytes for _, array in tree_flatten(model.parameters())) for model in models]
    assert sizes[0] < 0.6 * sizes[1]
    install_seam()
    ids = mx.array([[1, 5, 9, 200]])
    logits = [model(ids) for model in models]
    assert logits[0].dtype == mx.float32
    assert np.array_equal(np.array(logits[0]), np.array(logits[1]))


class ReadsWeights(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(40, 32), nn.Linear(32, 32)
        self.normal, self.dora = LoRALinear.from_base(nn.Linear(32, 32)), DoRALinear.from_base(nn.Linear(32, 32))

    def __call__(self, ids: mx.array) -> mx.array:
        return self.inner(self.tokens(ids)) @ self.tokens.weight.T


def test_weights_that_others_read_are_widened() -> None:
    model = ReadsWeights()
    model.set_dtype(mx.bfloat16)
    assert [module for module, _ in bfloat16_weights(model)] == [model.inner]
    model.dora = nn.Linear(32, 32)
    model.set_dtype(mx.bfloat16)
    assert {id(module) for module, _ in bfloat16_weights(model)} == {
        id(module) for module in (model.inner, model.dora, model.normal.linear)
    }


def test_swiglu_asks_for_no_threads_when_a_model_is_gone_or_is_not_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_engines", WeakValueDictionary())  # other tests' may be there yet
    model = Subject("llama").model
    install_native(model)
    started = list[int]()
    monkeypatch.setattr(native, "engine", started.append)
    up = mx.ones((2, 32))
    assert native.swiglu(up, up) is not None
    assert native.swiglu(up.astype(mx.bfloat16), up.astype(mx.bfloat16)) is None
    del model
    gc.collect()
    assert native.swiglu(up, up) is None
    assert mx.allclose(activations.swiglu(up, up), nn.silu(up) * up)
    assert started == []


def test_without_the_library_a_model_stays_mlx_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layers, "native_library", lambda: None)
    model = Subject("llama").model
    kinds = [type(module) for module in model.modules()]
    assert install_native(model) == 0
    assert [type(module) for module in model.modules()] == kinds
    subject = Subject("llama")
    prompts, max_tokens = random_prompts((40, 1)), (3, 3)
    wanted = subject.wanted(prompts, max_tokens)
    monkeypatch.setattr(native, "library", lambda: None)
    with subject.make_llm(attention_backend="auto") as llm:
        assert llm.info.backend == "reference"
        assert worst_error(answer(llm, prompts, max_tokens), wanted) < 1e-4


class _Wrong:
    """The library, with one function that is off by a little."""

    def __init__(self, library: Any, name: str) -> None:
        self._library = library
        self._name = name

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        return function if name != self._name else lambda *args: function(*args) * 1.001


@pytest.mark.parametrize("name", ["linear", "rms_norm", "rope", "swiglu"])
def test_a_library_that_computes_something_else_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = native.library()
    assert library is not None
    assert native_layers.find_fault(library, native.engine(1)) is None
    monkeypatch.setattr(native, "library", lambda: _Wrong(library, name))
    assert native_layers.install_native(nn.Linear(64, 64)) == 0
    assert "is not what MLX computes" in caplog.text
