"""The runner's parts: the seam into mlx-lm, the head's rows, the MLX thread, the choice of a backend, memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.errors import ConfigError, EngineDeadError, InsufficientMemoryError, ModelLoadError
from mlx_server.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.runtime import memory
from mlx_server.runtime.attention import backends
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.attention.seam import check_seam, install_seam
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.forward import RowSelector
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models import loader
from mlx_server.runtime.models.loader import LoadedModel, load, make_runner, release
from tests.conformance import Subject
from tests.device_memory import active_bytes, held_bytes
from tests.engine_worlds import answers, built, make_folder, make_llm, random_prompts

SPEC = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)


# --- the seam ---------------------------------------------------------------------------------------------------


def test_mlx_lm_still_has_the_seam_that_paging_hangs_on():
    """If this fails, mlx-lm has changed its attention: adapt `runtime/attention/seam.py` before raising its bound."""
    check_seam()


def test_a_changed_seam_is_named(monkeypatch):
    monkeypatch.setattr(base, "scaled_dot_product_attention", lambda queries, cache: None)
    with pytest.raises(ModelLoadError, match=r"\('queries', 'cache'\).*Install mlx-lm 0.32"):
        install_seam()


def test_plain_caches_still_get_plain_attention():
    install_seam()
    install_seam()
    q, k, v = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    got = base.scaled_dot_product_attention(q, k, v, cache=None, scale=0.5, mask="causal")
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
    assert mx.array_equal(got, wanted)


# --- what is computed -------------------------------------------------------------------------------------------


def test_the_head_computes_only_rows_that_are_sampled(monkeypatch):
    model = built("llama").model
    shapes: list[tuple[int, ...]] = []
    plain = type(model.lm_head).__call__

    def counting(self: nn.Linear, x: mx.array) -> mx.array:
        if self is model.lm_head:
            shapes.append(x.shape[:2])
        return plain(self, x)

    with make_llm("llama", max_chunk_tokens=32) as llm:
        monkeypatch.setattr(type(model.lm_head), "__call__", counting)
        answers(llm, random_prompts((100, 10)), (3, 3))
    num_rows = [rows for rows, _ in shapes]
    # The short prompt samples in steps 0 to 2, the long one in 3 to 5; the steps have 114 rows in all.
    assert num_rows == [1] * 6


def test_a_closed_engine_leaves_the_model_as_it_was():
    model = built("llama").model
    before = model.model
    with make_llm("llama") as llm:
        assert model.model is not before
        assert llm.info.num_blocks > 0
    assert model.model is before
    assert "model" not in vars(model)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "lfm2"])
def test_a_models_first_steps_are_measured_at_load_and_leave_nothing_behind(architecture, monkeypatch):
    """A prompt and one token, twice each. What follows has the tokens that it has without them."""
    lengths = (40, 100)
    launched: list[tuple[int, ...]] = []
    launch = ModelRunner.launch

    def counted(self, step):
        launched.append(tuple(chunk.num_tokens for chunk in step.chunks))
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "launch", counted)
    subject = Subject(architecture)
    with subject.make_llm() as llm:
        assert launched == [(126,), (126,), (1,), (1,), ()]
        assert llm.info.first_steps.num_prompt_tokens == 126
        assert min(llm.info.first_steps.prompt_s, llm.info.first_steps.decode_s) > 0.0
        measured = answers(llm, random_prompts(lengths), (3, 3))
    monkeypatch.setattr(loader, "measure_first_steps", lambda *_: iter(()))
    with subject.make_llm() as llm:
        assert llm.info.first_steps is None
        assert answers(llm, random_prompts(lengths), (3, 3)) == measured


class _Diary:
    """A cache of a kind that mlx-lm does not have."""


class _Keeper(nn.Module):
    """A model whose layers keep such a cache."""

    model_type = "keeper"

    def make_cache(self) -> list[Any]:
        return [_Diary()]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return mx.zeros((*ids.shape, 320))


class _Forgetful(nn.Module):
    """A model that mixes tokens behind its cache's back: in a ragged batch it computes something else."""

    model_type = "forgetful"

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("llama").model

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.inner)

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        logits = self.inner(ids, cache=cache)
        return logits + mx.cumsum(logits, axis=1) * 0.1


class _Spoiled(_Forgetful):
    """One whose logits are no numbers for two of the probe's prompts, unless mlx-lm's own caches keep them."""

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        logits = self.inner(ids, cache=cache)
        return logits if type(cache[0]) is KVCache or ids.size not in (5, 14) else logits * float("nan")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_Keeper, "Layer 0 keeps its state in a _Diary"),
        (_Forgetful, "type forgetful cannot be served.*differ"),
        (_Spoiled, "type forgetful cannot be served.*whole model: its logits differ by nan"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name(model, words):
    loaded = LoadedModel("x", model(), {"vocab_size": 320, "max_position_embeddings": 64}, None)
    with pytest.raises(ModelLoadError, match=words):
        exhaust(
            make_runner(
                loaded,
                Config(
                    model=ModelConfig(attention_backend="reference"),
                    cache=CacheConfig(num_kv_blocks=8),
                    scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
                ),
                PoolRoom(256, 2**30, 2**30),
            )
        )


def test_an_unreadable_folder_is_named(tmp_path):
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="Cannot load the model in"):
        load(str(folder))


def test_a_folder_is_loaded_in_float32_on_the_cpu(tmp_path):
    loaded = load(str(make_folder(tmp_path / "m")))
    assert {array.dtype for _, array in nn.utils.tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert (loaded.vocab_size, loaded.max_model_len) == (320, 4096)


# --- block tables and plans -------------------------------------------------------------------------------------


def test_a_plan_says_where_every_token_stands():
    tables = BlockTables()
    for name in "abc":
        tables.add(name)
    tables.plan([ScheduledChunk("a", 0, 33, (0,) * 33, ((5, 9),), True, 0)])
    tables.plan([ScheduledChunk("b", 0, 31, (0,) * 31, ((2,),), True, 0)])
    (plan,) = tables.plan(
        [
            ScheduledChunk("a", 33, 1, None, (), True, 1),
            ScheduledChunk("b", 31, 3, (0,) * 3, ((7,),), True, 0),
            ScheduledChunk("c", 0, 2, (0,) * 2, ((0,),), False, 0),
        ]
    )
    assert plan.num_decodes == 1
    assert plan.positions.tolist() == [33, 31, 32, 33, 0, 1]
    assert plan.slot_mapping.tolist() == [9 * 32 + 1, 2 * 32 + 31, 7 * 32, 7 * 32 + 1, 0, 1]
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lens.tolist() == [34, 34, 2]
    assert plan.block_tables.tolist() == [[5, 9], [2, 7], [0, 0]]


def test_tables_grow_and_rows_are_used_again():
    tables = BlockTables()
    for number in range(20):
        tables.add(f"r{number}")
    tables.plan([ScheduledChunk("r19", 0, 1280, (0,) * 1280, (tuple(range(40)),), True, 0)])
    slot = tables.state_slot("r19")
    tables.drop("r19")
    tables.drop("unknown")
    tables.add("new")
    (plan,) = tables.plan([ScheduledChunk("new", 0, 1, (0,), ((3,),), True, 0)])
    assert (tables.state_slot("new"), plan.block_tables.tolist()) == (slot, [[3]])


# --- the MLX thread ---------------------------------------------------------------------------------------------


class _FakeRunner:
    """Records what happens to it, in order."""

    launch_is_host_only = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: dict[str, set[str]] = {"launch": set(), "wait": set(), "fetch": set()}

    def launch(self, step: SchedulerOutput) -> int:
        self.events.append(f"launch {step.step_id}")
        self.threads["launch"].add(threading.current_thread().name)
        if step.step_id == 99:
            raise RuntimeError("no memory")
        return step.step_id

    def wait(self, launched: int) -> None:
        self.threads["wait"].add(threading.current_thread().name)

    def fetch(self, launched: int) -> ModelRunnerOutput:
        self.events.append(f"fetch {launched}")
        self.threads["fetch"].add(threading.current_thread().name)
        return ModelRunnerOutput(launched, {})


@pytest.fixture
def thread():
    made = MLXThread()
    yield made
    made.stop()
    assert not made.is_alive


async def test_results_come_without_a_next_step(thread):
    """Another thread waits for the device; all else is the MLX thread's."""
    runner = _FakeRunner()
    executor = MLXExecutor(thread, runner)
    for step in range(3):
        assert (await executor.submit(SchedulerOutput(step, ()))).num_model_calls == 1
    assert runner.threads == {"launch": {"mlx"}, "wait": {"mlx-device"}, "fetch": {"mlx"}}


async def test_a_failed_step_fails_what_is_in_flight_and_all_that_follows(thread, caplog):
    class Held(_FakeRunner):
        def wait(self, launched: int) -> None:
            assert has_failed.wait(60)

        def launch(self, step: SchedulerOutput) -> int:
            try:
                return super().launch(step)
            except RuntimeError:
                has_failed.set()
                raise

    has_failed = threading.Event()
    executor = MLXExecutor(thread, Held())
    futures = [executor.submit(SchedulerOutput(step, ())) for step in (0, 99)]
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert [str(result) for result in results] == ["no memory"] * 2
    with pytest.raises(RuntimeError, match="no memory"):
        await executor.submit(SchedulerOutput(2, ()))
    assert "A step failed: no memory" in caplog.text


async def test_a_thread_that_is_stopped_answers_every_step():
    """Two are on the device and two behind them; what comes later is refused at once."""
    thread, gate = MLXThread(), threading.Event()

    class Held(_FakeRunner):
        def wait(self, launched: int) -> None:
            assert gate.wait(10)

    runner = Held()
    executor = MLXExecutor(thread, runner)
    steps = [executor.submit(SchedulerOutput(step, ())) for step in range(4)]
    stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
    async with asyncio.timeout(10):
        while thread.call(lambda: 7).exception() is None:  # noqa: ASYNC110 - what is waited for is no event of ours
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError):
            await executor.submit(SchedulerOutput(4, ()))
        gate.set()
        assert [(await step).step_id for step in steps] == [0, 1, 2, 3]
        await stopping


def test_a_stopped_thread_takes_no_more_calls():
    thread = MLXThread()
    assert thread.call(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result()
    thread.stop()
    with pytest.raises(EngineDeadError):
        thread.call(lambda: 7).result()


# --- backends ---------------------------------------------------------------------------------------------------


class _Wrong(ReferenceBackend):
    """Attends, but not quite."""

    def attend(self, *args: Any, **kwargs: Any) -> mx.array:
        return super().attend(*args, **kwargs) * 1.001


class _Broken(ReferenceBackend):
    def make_pool(self, spec: LayerSpec, num_blocks: int) -> Any:
        raise RuntimeError("no such instruction")


def test_a_self_test_is_done_in_pieces():
    kinds = [SPEC, LayerSpec(num_kv_heads=1, key_dim=40, value_dim=24, dtype=mx.float32)]
    assert len(list(backends.choose_in_pieces("reference", kinds))) == 2 * len(kinds), "each has two steps"


def test_every_backend_reports_whether_it_works_here():
    reports = {report.name: report for report in backends.available_backends()}
    assert list(reports) == ["metal", "cuda", "cpu", "reference"]
    assert reports["reference"].is_available
    assert all(report.is_available == (report.reason is None) for report in reports.values())


@pytest.mark.parametrize(("kind", "words"), [(_Wrong, "self-test is off by"), (_Broken, "no such instruction")])
def test_a_backend_that_fails_its_self_test_is_passed_over(kind, words, monkeypatch, caplog):
    monkeypatch.setattr(backends, "_FACTORIES", {"fast": kind, "reference": ReferenceBackend})
    assert backends.choose_backend("auto", [SPEC]).name == "reference"
    assert words in caplog.text
    with pytest.raises(ConfigError, match=words):
        backends.choose_backend("fast", [SPEC])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_reference_passes_with_every_type(dtype):
    spec = LayerSpec(num_kv_heads=1, key_dim=40, value_dim=24, dtype=dtype)
    assert backends.choose_backend("reference", [spec]).name == "reference"


# --- memory -----------------------------------------------------------------------------------------------------


def test_a_pool_may_grow_to_what_was_asked_for_but_not_more_than_is_of_use():
    assert memory.max_kv_blocks("1MiB", None, 2**10, 10**6, 2**30) == 1024
    assert memory.max_kv_blocks("1MiB", None, 2**10, 100, 2**30) == 100
    assert memory.max_kv_blocks("1MiB", None, 2**10, 3, 2**30) == memory.MIN_BLOCKS  # one request of a short context
    assert memory.max_kv_blocks("auto", 17, 2**10, 100, 2**30) == 17
    share = 0.25 if mx.default_device() == mx.cpu else 0.9
    assert memory.max_kv_blocks("auto", None, 2**20, 10**9, 2**30) == int(share * 1024)


def test_a_pool_that_cannot_be_had_is_refused_with_the_numbers():
    with pytest.raises(InsufficientMemoryError, match=r"of 2048 MiB does not fit: 1024 MiB are free"):
        memory.max_kv_blocks("2GiB", None, 2**20, 10**9, 2**30)
    with pytest.raises(InsufficientMemoryError, match=r"only 128 tokens.*the minimum is 256"):
        memory.max_kv_blocks("4MiB", None, 2**20, 10**9, 2**30)


def test_unloading_gives_the_memory_back(tmp_path):
    folder = make_folder(tmp_path / "m")
    gc.collect()  # what tests before this one have left must not go meanwhile
    mx.clear_cache()
    before = held_bytes()
    loaded = load(str(folder))
    runner, info = exhaust(
        make_runner(
            loaded,
            Config(
                model=ModelConfig(attention_backend="reference"),
                cache=CacheConfig(kv_cache_memory="64MB"),
                scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
            ),
            PoolRoom(10**6, 2**30, 2**30),
        )
    )
    num_weight_bytes = sum(array.nbytes for _, array in nn.utils.tree_flatten(loaded.model.parameters()))
    assert active_bytes() - before >= info.num_blocks * info.block_bytes + num_weight_bytes
    assert np.isfinite(info.context_doubling_tokens)
    runner.close()
    last: list[object] = [loaded, runner]
    del loaded, runner
    release(last)
    assert held_bytes() - before < num_weight_bytes / 4


def test_a_model_is_collected_and_what_a_server_has_frozen_is_not_looked_at() -> None:
    class Model:
        def __init__(self) -> None:
            self.itself = self

    gone, frozen = weakref.ref(kept := Model()), gc.get_freeze_count()
    last: list[object] = [kept]
    del kept
    release(last)
    assert gone() is None
    assert gc.get_freeze_count() == frozen > 0


class _Wrapped(nn.Module):
    """A text model inside another, as vision-language models have it."""

    model_type = "wrapped"

    def __init__(self) -> None:
        super().__init__()
        self.language_model = built("llama").model

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.language_model)

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.language_model(ids, cache=cache)


def test_rows_are_selected_inside_a_wrapped_language_model():
    model = _Wrapped()
    selector = RowSelector.install(model, AdapterRows())
    assert selector is not None
    selector.rows = [1]
    assert model(mx.array([[1], [2], [3]])).shape == (1, 1, 320)
    selector.remove()
    assert model(mx.array([[1], [2], [3]])).shape == (3, 1, 320)


def test_what_a_configuration_leaves_out_comes_from_the_model():
    model = built("llama").model
    loaded = LoadedModel("x", model, {"text_config": {"hidden_size": 7}}, None)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.setting("hidden_size")) == (320, 4096, 7)
    with pytest.raises(ModelLoadError, match="no vocab_size"):
        _ = LoadedModel("x", nn.Linear(2, 2), {}, None).vocab_size


def test_a_vocabulary_that_is_not_the_logits_width_is_refused():
    loaded = LoadedModel("x", built("llama").model, {"vocab_size": 319}, None)
    with pytest.raises(ModelLoadError, match="320 wide, and vocab_size is 319"):
        exhaust(
            make_runner(
                loaded,
                Config(
                    model=ModelConfig(attention_backend="reference"),
                    cache=CacheConfig(num_kv_blocks=8),
                    scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
                ),
                PoolRoom(256, 2**30, 2**30),
            )
        )


# --- warming up -------------------------------------------------------------------------------------------------


class _Warmed(ReferenceBackend):
    """Remembers for which kinds of layers it has attended, and whether it was warmed for each before."""

    def __init__(self) -> None:
        super().__init__()
        self.warm: set[tuple[int, bool]] = set()
        self.used: dict[tuple[int, bool], bool] = {}

    def warm_up(self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None) -> Generator[float]:
        yield 1.0
        self.warm.add((num_query_heads, sinks is not None))

    def attend(self, pool: Any, queries: mx.array, *args: Any, sinks: mx.array | None = None, **options: Any) -> Any:
        kind = queries.shape[1], sinks is not None
        self.used.setdefault(kind, kind in self.warm)
        return super().attend(pool, queries, *args, sinks=sinks, **options)


@pytest.mark.parametrize("kv_bits", ["full", "8"])
@pytest.mark.parametrize(("architecture", "has_sinks"), [("qwen3", False), ("gpt_oss", True)])
def test_a_backend_is_warmed_for_each_kind_of_layer_before_its_first_use(architecture, has_sinks, kv_bits, monkeypatch):
    made: list[_Warmed] = []
    monkeypatch.setattr(backends, "_FACTORIES", {"reference": lambda: made.append(_Warmed()) or made[-1]})
    with make_llm(architecture, attention_backend="reference", num_kv_blocks=8, kv_bits=kv_bits):
        for backend in made:
            assert backend.used == dict.fromkeys([(4, True), (4, has_sinks)], True)
