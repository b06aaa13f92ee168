"""The engine's promises: every request gets an end, every block comes back, whatever clients do."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server.bench.random_folder import word_tokenizer
from mlx_server.config import CacheConfig, Config, ModelConfig, ObservabilityConfig, SchedulerConfig
from mlx_server.engine import observed
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.grammar.spec import parse_structured
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    ServeError,
    UnsupportedError,
)
from mlx_server.observability.engine_metrics import EngineMetrics
from mlx_server.observability.tracing import EngineTracer, Tracing
from mlx_server.outputs import CompletionDelta
from mlx_server.request import FinishReason, Priority
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.model_runner import LaunchedStep, ModelRunner
from mlx_server.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from mlx_server.tiers import Tier
from tests.engine_worlds import answers, greedy, make_folder, make_llm, plain_greedy, random_prompts
from tests.tiny_models import VOCAB_SIZE, save_model_folder, tiny_model

MAX_MODEL_LEN = 256


@asynccontextmanager
async def engine_of(
    folder: Path,
    *tiers: Tier,
    metrics: EngineMetrics | None = None,
    tracing: Tracing | None = None,
    adapter: str | None = None,
    observability: ObservabilityConfig | None = None,
    **scheduler: Any,
) -> AsyncIterator[AsyncEngine]:
    config = Config(
        model=ModelConfig(model=str(folder), served_model_name="tiny", max_model_len=MAX_MODEL_LEN, adapter=adapter),
        cache=CacheConfig(num_kv_blocks=32),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **scheduler}),
        tiers={tier.name: tier for tier in tiers},
        observability=observability or ObservabilityConfig(),
    )
    thread = MLXThread()
    engine = AsyncEngine(config, Surroundings(thread), metrics=metrics, tracing=tracing)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()
        thread.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


def ask(
    request_id: str, prompt: list[int] | None = None, sampling: SamplingParams | None = None, **more: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt or [1, 2, 3], sampling=sampling or greedy(8), **more
    )


async def read(stream: RequestStream) -> list[CompletionDelta]:
    return [delta async for delta in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is no event of ours
            await asyncio.sleep(0.001)


def is_empty(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


async def test_a_stream_carries_tokens_text_counts_and_one_end(folder):
    async with engine_of(folder) as engine:
        prompt = engine.tokenizer.encode("Hello")
        deltas = await read(engine.submit(ask("a", prompt, greedy(5))))
        text = engine.tokenizer.decode([token_id for delta in deltas for token_id in delta.token_ids])
    assert [len(delta.token_ids) for delta in deltas] == [1] * 5
    assert [delta.num_output_tokens for delta in deltas] == [1, 2, 3, 4, 5]
    assert {delta.num_prompt_tokens for delta in deltas} == {5}
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.LENGTH]
    timings = deltas[-1].timings
    assert timings.arrival_s <= timings.first_scheduled_s <= timings.first_token_s <= timings.finished_s
    assert "".join(delta.text for delta in deltas) == text


async def test_readers_are_notified_once_a_step(folder):
    num_calls = 0

    def on_output() -> None:
        nonlocal num_calls
        num_calls += 1

    async with engine_of(folder) as engine:
        streams = [engine.submit(ask(name, sampling=greedy(20))) for name in "abc"]
        for stream in streams:
            stream.on_output = on_output
        await until(lambda: not engine.num_streams)
        num_tokens = sum(delta.num_output_tokens for stream in streams for delta in stream.take()[-1:])
        assert num_tokens == 60
        assert 0 < num_calls <= engine.scheduler.counters.num_steps


def ids_of(deltas: list[CompletionDelta]) -> list[int]:
    """All tokens, however many came at a time."""
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_output_does_not_depend_on_who_else_is_in_the_batch(folder):
    sampling = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
    async with engine_of(folder) as engine:
        alone = await read(engine.submit(ask("alone", sampling=sampling)))
        others = [
            ask(f"s{i}", prompt, SamplingParams(max_tokens=15, temperature=0.5 + i / 10, top_k=i, ignore_eos=True))
            for i, prompt in enumerate(random_prompts(range(5, 20)))
        ]
        streams = [engine.submit(request) for request in [*others, ask("again", sampling=sampling)]]
        together = (await asyncio.gather(*map(read, streams)))[-1]
    assert ids_of(together) == ids_of(alone)


async def test_a_stop_string_across_tokens_ends_the_request_and_is_not_shown(folder):
    async with engine_of(folder) as engine:
        free = await read(engine.submit(ask("free", sampling=greedy(12))))
        text = "".join(delta.text for delta in free)
        stop = text[3:6]
        end = text.index(stop)
        for include in (False, True):
            sampling = greedy(12, stop=(stop,), include_stop_str_in_output=include)
            deltas = await read(engine.submit(ask(f"stopped {include}", sampling=sampling)))
            assert "".join(delta.text for delta in deltas) == text[: end + len(stop) * include]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
        await until(lambda: is_empty(engine))


async def test_a_stop_token_ends_the_request_and_its_text_is_hidden(folder):
    async with engine_of(folder) as engine:
        free = await read(engine.submit(ask("free", sampling=greedy(6))))
        token_id = free[2].token_ids[0]
        first = next(i for i, delta in enumerate(free) if delta.token_ids[0] == token_id)
        deltas = await read(engine.submit(ask("stopped", sampling=greedy(6, stop_token_ids=(token_id,)))))
    assert len(deltas) == first + 1
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, token_id)
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in free[:first])


async def test_min_tokens_holds_off_eos_and_stop_strings(folder):
    async with engine_of(folder) as engine:
        eos = next(iter(engine.tokenizer.eos_token_ids))
        wants_eos = {"max_tokens": 6, "temperature": 0.0, "logit_bias": {eos: 100.0}}
        at_once = await read(engine.submit(ask("a", sampling=SamplingParams(**wants_eos))))
        later = await read(engine.submit(ask("b", sampling=SamplingParams(min_tokens=3, **wants_eos))))
    assert [delta.num_output_tokens for delta in at_once] == [1]
    assert at_once[-1].finish_reason is FinishReason.STOP
    assert later[-1].num_output_tokens == 4


async def test_aborting_gives_back_blocks_wherever_the_request_stands(folder):
    async with engine_of(folder, max_num_seqs=2, max_num_batched_tokens=32) as engine:
        long_prompt = random_prompts((200,))[0]
        streams = [engine.submit(ask(f"r{i}", long_prompt[i:], greedy(50))) for i in range(5)]
        await until(lambda: engine.stats().num_running == 2)
        assert engine.stats().num_waiting == 3
        for stream in reversed(streams):  # the waiting ones first, then those in their prompts
            stream.abort()
            stream.abort()
            assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
        await until(lambda: is_empty(engine))
        decoding = engine.submit(ask("d", sampling=greedy(200)))
        await anext(decoding)
        decoding.abort()
        await until(lambda: is_empty(engine))
        engine.scheduler.check_integrity()


async def test_a_thousand_requests_with_random_aborts_leak_nothing(folder):
    rng = random.Random(0)
    async with engine_of(folder, max_num_seqs=8, max_num_batched_tokens=256, max_num_waiting=2000) as engine:

        async def one(number: int) -> FinishReason | None:
            prompt = random_prompts((rng.randrange(1, 60),), seed=number % 50)[0]
            stream = engine.submit(
                ask(f"r{number}", prompt, greedy(rng.randrange(1, 12)), priority=rng.choice(list(Priority)))
            )
            patience = rng.randrange(0, 12)
            seen = 0
            async for delta in stream:
                seen += len(delta.token_ids)
                if delta.finish_reason is not None:
                    return delta.finish_reason
                if seen >= patience and rng.random() < 0.3:
                    stream.abort()
            return None

        reasons = await asyncio.gather(*(one(number) for number in range(1000)))
        await until(lambda: is_empty(engine))
        engine.scheduler.check_integrity()
        assert engine.stats().num_model_calls == engine.stats().num_steps
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.ABORT}


async def test_sixteen_cold_requests_compute_their_shared_prefix_once(folder):
    head = random_prompts((160,))[0]
    prompts = [head + tail for tail in random_prompts([20] * 16, seed=3)]
    async with engine_of(folder, max_num_seqs=16) as engine:
        streams = [engine.submit(ask(f"r{i}", prompt, greedy(2))) for i, prompt in enumerate(prompts)]
        done = await asyncio.gather(*map(read, streams))
        stats = engine.stats()
    assert stats.num_prompt_tokens_computed == 160 + 16 * 20
    assert [deltas[-1].num_cached_tokens for deltas in done] == [0] + [160] * 15
    assert stats.num_prefix_hit_tokens == 15 * 160
    assert stats.num_prefix_query_tokens == 16 * 180


async def test_block_y_after_b_is_not_block_y_after_a(folder):
    a, b, y = (random_prompts((32,), seed=seed)[0] for seed in range(3))
    async with engine_of(folder) as engine:
        cold = ids_of(await read(engine.submit(ask("cold", [*b, *y, 1]))))
        assert engine.reset_prefix_cache()
        await read(engine.submit(ask("ay", [*a, *y, 1])))
        warm = await read(engine.submit(ask("by", [*b, *y, 1])))
    assert warm[0].num_cached_tokens == 0
    assert ids_of(warm) == cold


async def test_salted_prefixes_are_not_shared(folder):
    prompt = random_prompts((70,))[0]
    async with engine_of(folder) as engine:
        await read(engine.submit(ask("a", prompt, extra_keys=("salt",))))
        other = await read(engine.submit(ask("b", prompt)))
        same = await read(engine.submit(ask("c", prompt, extra_keys=("salt",))))
    assert (other[0].num_cached_tokens, same[0].num_cached_tokens) == (0, 64)


async def test_logprobs_of_output_and_prompt(folder):
    prompt = random_prompts((40,))[0]
    async with engine_of(folder, max_num_batched_tokens=32, max_num_seqs=2) as engine:
        await read(engine.submit(ask("warms the cache", prompt)))
        deltas = await read(engine.submit(ask("a", prompt, greedy(3, logprobs=2, prompt_logprobs=1))))
    assert len(deltas[0].prompt_logprobs) == 39
    assert [position.token.token_id for position in deltas[0].prompt_logprobs] == prompt[1:]
    assert all(len(position.top) == 1 for position in deltas[0].prompt_logprobs)
    for delta in deltas:
        (position,) = delta.logprobs
        assert position.token.token_id == position.top[0].token_id == delta.token_ids[0]
        assert (position.token.rank, len(position.top)) == (1, 2)
    assert deltas[0].num_cached_tokens == 0


async def test_output_ends_where_the_context_does(folder):
    async with engine_of(folder) as engine:
        prompt = random_prompts((MAX_MODEL_LEN - 3,))[0]
        for max_tokens in (None, 100, MAX_MODEL_LEN + 1, 2**70):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            deltas = await read(engine.submit(ask(f"{max_tokens}", prompt, sampling)))
            assert (deltas[-1].num_output_tokens, deltas[-1].finish_reason) == (3, FinishReason.LENGTH)


async def test_a_better_tier_finds_a_place_in_a_full_queue(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=2) as engine:
        running = engine.submit(ask("running", sampling=greedy(250)))
        await anext(running)
        stays, goes = (engine.submit(ask(name, priority=Priority.LOW)) for name in ("stays", "goes"))
        better = engine.submit(ask("better", priority=Priority.HIGH))
        with pytest.raises(QueueFullError, match="a request of a better tier has taken this one's place"):
            await read(goes)
        with pytest.raises(QueueFullError, match="Waiting requests: 2"):
            engine.submit(ask("late", priority=Priority.LOW))
        assert engine.metrics.rejected == {("low", "displaced"): 1, ("low", "max_num_queued_reqs"): 1}
        running.abort()
        for stream in (better, stays):
            assert (await read(stream))[-1].finish_reason is not None
        await until(lambda: is_empty(engine))


async def test_a_full_queue_and_a_long_wait_are_refused(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=2, queue_timeout_s=0.05) as engine:
        running = engine.submit(ask("running", sampling=greedy(250)))
        assert (await anext(running)).num_output_tokens == 1
        waiting = [engine.submit(ask(f"w{i}")) for i in range(2)]
        with pytest.raises(QueueFullError, match="Waiting requests: 2; the limit is 2"):
            engine.submit(ask("too many"))
        with pytest.raises(QueueTimeoutError, match=r"the limit is 0\.05 s"):
            await anext(waiting[0])
        with pytest.raises(QueueTimeoutError, match=r"the limit is 0\.05 s"):
            await read(waiting[1])
        with pytest.raises(ContextLengthError):
            engine.submit(ask("too long", [1] * MAX_MODEL_LEN, tier="gold"))
        assert engine.metrics.rejected == {
            ("normal", "max_num_queued_reqs"): 1,
            ("normal", "queue_timeout"): 2,
            ("gold", "context_length"): 1,
        }
        running.abort()
        await until(lambda: is_empty(engine))


async def test_stopping_fails_open_streams_and_refuses_new_ones(folder):
    """Who stops it meanwhile waits until it is unloaded."""
    async with engine_of(folder) as engine:
        streams = [engine.submit(ask(name, sampling=greedy(250))) for name in "ab"]
        await anext(streams[0])
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="is stopping"):
            engine.submit(ask("c"))
        others = [asyncio.create_task(engine.stop()) for _ in range(2)]
        await asyncio.sleep(0)
        others[0].cancel()
        await asyncio.gather(stopping, others[1])
        assert engine.state is EngineState.STOPPED
        errors = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert all(isinstance(error, OverloadedError) and "shut down" in str(error) for error in errors)
        assert errors[0] is not errors[1]


async def test_who_stops_again_ends_what_the_first_began(folder):
    async with engine_of(folder) as engine:
        stream = engine.submit(ask("a", sampling=greedy(250)))
        await anext(stream)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await engine.stop()
        assert not engine.state.is_loaded
        with pytest.raises(OverloadedError, match="shut down"):
            await read(stream)


async def test_a_failed_step_fails_every_request_and_kills_the_engine(folder, monkeypatch):
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    async with engine_of(folder, max_num_seqs=2) as engine:
        streams = [engine.submit(ask(f"r{i}", sampling=greedy(100))) for i in range(4)]
        await anext(streams[0])

        def explode(self: ModelRunner, step: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(ModelRunner, "launch", explode)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="out of memory"):
                await read(stream)
        assert (engine.state, engine.error) == (EngineState.DEAD, "RuntimeError: out of memory")
        with pytest.raises(EngineDeadError):
            engine.submit(ask("late"))
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert reports == [], "what reports steps knows that this one has no result"


async def test_a_request_id_in_use_is_refused(folder):
    async with engine_of(folder) as engine:
        stream = engine.submit(ask("a", sampling=greedy(200)))
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.submit(ask("a"))
        stream.abort()
        await read(engine.submit(ask("a", sampling=greedy(1))))


async def test_settings_that_contradict_each_other_are_refused(folder):
    with pytest.raises(ConfigError, match="at least --max-num-seqs"):
        async with engine_of(folder, max_num_seqs=65):
            raise AssertionError("never started")


async def test_an_engine_stops_the_thread_that_is_its_own(folder):
    settings = ModelConfig(model=str(folder), max_model_len=MAX_MODEL_LEN)
    before = set(threading.enumerate())
    engine = AsyncEngine(Config(model=settings, cache=CacheConfig(num_kv_blocks=16)))
    assert set(threading.enumerate()) <= before
    await engine.start()
    started = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("mlx")}
    assert {thread.name for thread in started} == {"mlx", "mlx-device"}
    await engine.stop()
    await engine.stop()
    assert not started & set(threading.enumerate())


class _Forces:
    """A grammar that lets the first token be anything, then forces two given ones, and so on."""

    def __init__(self, forced: list[int]) -> None:
        self._forced = forced

    def accept(self, token_id: int) -> bool:
        return True

    def forced_tokens(self) -> list[int]:
        return self._forced

    def fork(self) -> None:
        return None

    def bitmask(self) -> bytes | None:
        return None

    def is_terminated(self) -> bool:
        return False

    error: str | None = None


async def test_forced_tokens_cost_no_model_call_and_count_for_penalties(folder):
    """Of four allowed tokens, the repetition penalty rules out those already seen, forced ones included."""
    sampling = SamplingParams(
        max_tokens=4,
        temperature=0.0,
        allowed_token_ids=(5, 6, 7, 8),
        logit_bias={5: 100.0, 6: 75.0, 7: 50.0, 8: 25.0},
        repetition_penalty=1000.0,
        ignore_eos=True,
    )
    async with engine_of(folder) as engine:
        free = [delta.token_ids[0] for delta in await read(engine.submit(ask("free", sampling=sampling)))]
        assert free == [5, 6, 7, 8]
        calls = engine.stats().num_model_calls
        forced = await read(engine.submit(ask("forced", sampling=sampling, constraint=_Forces([6, 7]))))
        num_calls = engine.stats().num_model_calls - calls
    assert [delta.token_ids for delta in forced] == [(5, 6, 7), (8,)]
    assert num_calls == 2


class _Panic(BaseException):
    """What a native library raises when it has broken down."""


class _Breaks(_Forces):
    """A grammar that breaks down when it is asked one of its questions for the third time."""

    def __init__(self, question: str) -> None:
        super().__init__([])
        self._question, self._num_asked = question, 0

    def _asked(self, question: str) -> None:
        self._num_asked += question == self._question
        if self._num_asked == 3:
            raise _Panic("assertion failed")

    def accept(self, token_id: int) -> bool:
        self._asked("accept")
        return True

    def forced_tokens(self) -> list[int]:
        self._asked("forced_tokens")
        return []

    def bitmask(self) -> bytes | None:
        self._asked("bitmask")
        return None

    def is_terminated(self) -> bool:
        self._asked("is_terminated")
        return False


async def test_a_grammar_that_is_too_complex_is_the_request_s_own_fault(folder):
    """Which shows only when its output is followed beyond what is forced at first: here three items more than
    llguidance can hold."""
    async with engine_of(folder) as engine:
        spec = parse_structured({"guided_grammar": "start: /./ (" + " | ".join(f'"a{n}"' for n in range(2003)) + ")"})
        assert spec is not None
        constraint = engine.grammars.compile(spec).start()
        stream = engine.submit(ask("a", sampling=greedy(20), constraint=constraint))
        with pytest.raises(
            InvalidRequestError, match="cannot be followed beyond 0 tokens of output: Parser Error"
        ) as ended:
            await read(stream)
        assert ended.value.param == "guided_grammar"
        assert "\n" not in ended.value.message, "nothing of the parser's state, such as the output"


@pytest.mark.parametrize("question", ["accept", "forced_tokens", "bitmask", "is_terminated"])
async def test_a_grammar_that_breaks_down_ends_only_its_own_request(folder, question, caplog):
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(0,), seed=1)
    async with engine_of(folder) as engine:
        good = engine.submit(ask("good", sampling=greedy(20)))
        bad = engine.submit(ask("bad", sampling=sampling, constraint=_Breaks(question)))
        with pytest.raises(ServeError, match="does not fit the request's grammar"):
            await read(bad)
        assert (await read(good))[-1].num_output_tokens == 20
        assert engine.state is EngineState.READY
        assert engine.metrics.finished == {FinishReason.ERROR: 1, FinishReason.LENGTH: 1}
    assert "The grammar of bad has failed" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, _Panic])
async def test_a_scheduler_that_breaks_leaves_no_stream_hanging(folder, kind, monkeypatch):
    async with engine_of(folder) as engine:
        stream = engine.submit(ask("a", sampling=greedy(200)))
        await anext(stream)

        def explode(now: float) -> None:
            raise kind("broken")

        monkeypatch.setattr(engine.scheduler, "schedule", explode)
        with pytest.raises(EngineDeadError, match="broken"):
            await read(stream)
        assert engine.state is EngineState.DEAD


class BrokenTracer(EngineTracer):
    """Fails at every call."""

    def on_submitted(self, *args: Any) -> None:
        raise ValueError("no span")

    on_step = on_step_done = on_finished = on_submitted


class BrokenTracing(Tracing):
    def tracer(self, *about: Any) -> EngineTracer:
        return BrokenTracer()


async def test_figures_and_traces_that_fail_end_nobody_s_request(folder, monkeypatch, caplog):
    def explode(*args: Any) -> None:
        raise ValueError("no such tier")

    monkeypatch.setattr(observed, "_logged_s", {})
    for name in ("on_submitted", "on_rejected", "on_step_done", "on_tokens", "on_finished"):
        monkeypatch.setattr(EngineMetrics, name, explode)
    async with engine_of(folder, max_num_seqs=1, queue_timeout_s=0.05, tracing=BrokenTracing()) as engine:
        streams = [engine.submit(ask(name, sampling=greedy(250))) for name in ("first", "late")]
        with pytest.raises(QueueTimeoutError):
            await read(streams[1])
        assert (await read(streams[0]))[-1].num_output_tokens == 250
        await until(lambda: is_empty(engine))
        assert engine.state is EngineState.READY
        assert engine.num_streams == 0
    listeners = {explode.__qualname__, BrokenTracer.on_submitted.__qualname__}
    complaints = [record.getMessage().partition(" failed")[0] for record in caplog.records if record.exc_info]
    assert sorted(complaints) == sorted(listeners), "each is logged once, not with every step"


async def test_a_stopped_engine_holds_nothing(folder):
    async with engine_of(folder) as engine:
        await read(engine.submit(ask("a")))
        await engine.stop()
        assert (engine.stats().num_blocks, engine.stats().weight_bytes) == (0, 0)
        with pytest.raises(OverloadedError, match="not loaded"):
            _ = engine.scheduler


async def test_a_tokenizer_that_grammars_cannot_use_is_served_without_them(tmp_path, caplog):
    model, config = tiny_model("llama")
    folder = save_model_folder(model, dict(config), tmp_path / "words", word_tokenizer(VOCAB_SIZE))
    async with engine_of(folder) as engine:
        deltas = await read(engine.submit(ask("a", sampling=greedy(3))))
        with pytest.raises(UnsupportedError):
            engine.grammars.compile(parse_structured({"regex": "a"}))
    assert "Structured output does not work" in caplog.text
    assert len("".join(delta.text for delta in deltas).split()) == 3


async def test_a_tier_at_its_own_queue_limit_is_refused_and_others_are_not(folder):
    async with engine_of(folder, Tier(name="free", max_num_waiting=1), max_num_seqs=1) as engine:
        running = engine.submit(ask("running", sampling=greedy(250)))
        await anext(running)
        engine.submit(ask("w", tier="free"))
        with pytest.raises(QuotaExceededError, match=r"Waiting requests of tier free: 1; the limit is 1"):
            engine.submit(ask("x", tier="free"))
        engine.submit(ask("y"))
        assert engine.metrics.rejected == {("free", "tier_limit"): 1}


EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1e-6, 1e-5, 1.0, 100.0),
    "top_p": (1e-300, 0.5, 1 - 2**-53, 1.0),
    "top_k": (-1, 0, 1, 7, VOCAB_SIZE, MAX_TOP_K),
    "min_p": (0.0, 1e-300, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 1.0, MAX_REPETITION_PENALTY),
    "presence_penalty": (-2.0, 0.0, 2.0),
    "frequency_penalty": (-2.0, 0.0, 2.0),
    "logit_bias": ({}, dict.fromkeys(range(VOCAB_SIZE), -100.0), {0: 100.0, VOCAB_SIZE - 1: -100.0}),
    "allowed_token_ids": (None, (0,), (VOCAB_SIZE - 1,) * VOCAB_SIZE),
    "seed": (None, -(2**63), 0, 2**63 - 1),
    "min_tokens": (0, 3),
    "stop_token_ids": ((), (0, 2**70, -5)),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 20),
    "ignore_eos": (False, True),
}


async def test_no_parameters_break_the_engine(folder):
    """A step that fails takes all requests and the process with it."""
    rng = random.Random(5)
    async with engine_of(folder) as engine:
        for number in range(60):
            chosen = {name: rng.choice(values) for name, values in EXTREMES.items()}
            deltas = await read(engine.submit(ask(f"r{number}", [1, 2, 3], SamplingParams(max_tokens=3, **chosen))))
            ids = [token_id for delta in deltas for token_id in delta.token_ids]
            assert all(0 <= token_id < VOCAB_SIZE for token_id in ids), chosen
            assert chosen["allowed_token_ids"] is None or set(ids) <= set(chosen["allowed_token_ids"]), chosen
        assert engine.state is EngineState.READY


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_thread_of_its_own_waits_for_steps(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX computes by itself: who waits finds the step finished and its tokens right."""
    waiters: set[str] = set()
    wait = ModelRunner.wait

    def watched(self: ModelRunner, launched: LaunchedStep) -> None:
        wait(self, launched)
        waiters.add(threading.current_thread().name)

    monkeypatch.setattr(ModelRunner, "wait", watched)
    prompts = random_prompts([9, 40])
    expected = plain_greedy("llama", prompts, [8, 8])
    with make_llm("llama", attention_backend=backend) as llm:
        assert answers(llm, prompts, [8, 8]) == expected
    assert waiters == {"mlx-device"}
