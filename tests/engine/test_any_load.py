"""Random loads on random engines: whatever runs beside a request, and whatever is cached, cut, preempted, drafted or
aborted meanwhile, it has the answer that it has alone in a plain engine, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from mlx_server.batching.speculation import drafting
from mlx_server.config import CacheConfig, Config, MemoryConfig, ModelConfig, SchedulerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.library.completions import RequestBuilder, pool
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.outputs import CompletionDelta, SchedulerOutput
from mlx_server.request import FinishReason, Priority
from mlx_server.sampling_params import SamplingParams
from tests import block_drafters, eagles
from tests.adapter_files import write_adapter, write_model
from tests.api.worlds import until
from tests.drafted_answers import LIKELY
from tests.drafters import Adversary, always
from tests.engine_worlds import on_the_cpu, random_prompts
from tests.heads import head_folder
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE

BY_DEFAULT = {"llama": 1, "gemma3_text": 2, "qwen3_next": 3, "mtp deepseek_v3": 4, "block": 5, "windows": 6}
MORE = (*BY_DEFAULT, "qwen3_moe", "gpt_oss", "deepseek_v32", "lfm2", "rwkv7", "mtp qwen3_next", "eagle")
GRAMMARS = ({"regex": "(ab|cd)+[0-9]{2,6}"}, {"choice": ["alpha beta", "alpha gamma", "x"]}, {"json_object": True})
SEEDS = [*BY_DEFAULT.items(), *(pytest.param(name, n, marks=pytest.mark.full) for name in MORE for n in range(10, 30))]
PARTS = ("token_ids", "text", "logprobs", "prompt_logprobs")
Answer = list[CompletionDelta]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A prompt, and what its requests are made with."""

    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None
    priority: Priority

    def requests(self, engine: AsyncEngine) -> list[GenerationRequest]:
        made = RequestBuilder(engine).prompt(self.prompt, self.sampling, self.adapter).requests
        return [replace(one, priority=self.priority) for one in made]


async def vectors(engine: AsyncEngine, asks: Iterable[Ask]) -> list[float]:
    """Those of all prompts, one after the other; none of a model that gives none."""
    if engine.pooling is None or engine.pooling.embedder is None:
        return []
    embedder = engine.pooling.embedder
    results = await pool(engine, [ask.prompt for ask in asks], embedder.params, use_tqdm=False)
    return [number for result in results for number in embedder.vector(result, None)]


async def read(stream: RequestStream) -> Answer:
    return [delta async for delta in stream]


def check(answer: Answer, alone: Answer, tolerance: float) -> None:
    """An aborted request has the beginning of its answer."""
    ours, theirs = ({name: list(chain(*(getattr(d, name) for d in one))) for name in PARTS} for one in (answer, alone))
    if (reason := answer[-1].finish_reason) is not FinishReason.ABORT:
        assert [len(ours[name]) for name in PARTS] == [len(theirs[name]) for name in PARTS]
        assert (reason, answer[-1].stop_reason) == (alone[-1].finish_reason, alone[-1].stop_reason)
        assert ours["text"] == theirs["text"]
    assert ours["token_ids"] == theirs["token_ids"][: answer[-1].num_output_tokens]
    for name in ("logprobs", "prompt_logprobs"):
        wanted = [position.token.logprob for position in theirs[name][: len(ours[name])]]
        assert [position.token.logprob for position in ours[name]] == pytest.approx(wanted, rel=0.0, abs=tolerance)


def make_model(name: str, path: Path, rng: random.Random) -> ModelConfig:
    """A random model, perhaps with something that drafts for it; Llama's has adapters."""
    adapters, drafter = list[Path](), None
    if name.startswith("mtp "):
        folder = head_folder(path / "model", name.removeprefix("mtp "))
    elif name in ("eagle", "block"):
        made = eagles.folders(path, "sglang") if name == "eagle" else block_drafters.folders(path, "dflash2")
        folder, drafter = made[:2]
    elif name == "windows":
        window = rng.choice((1, 2, 17, 32, 33, 40, 90))
        folder = str(write_model("gemma3_text", path / "model", sliding_window=window))
    else:
        folder = str(write_model(name, path / "model"))
        adapters = [write_adapter(Path(folder), path / f"a{n}", rank=2 + n, seed=n) for n in (1, 2) if name == "llama"]
    is_invariant = not adapters and (drafter is not None or name in (*ARCHITECTURES, "windows"))
    adapter = ":".join(map(str, adapters)) or None
    return ModelConfig(
        model=folder,
        adapter=adapter,
        draft_model=drafter,
        max_model_len=256,
        batch_invariant=is_invariant,
        pooling="last" if name in ("llama", "windows") else "auto",
    )


def some_sampling(rng: random.Random) -> SamplingParams:
    """Each feature now and then."""
    max_tokens = rng.choice((1, 2, 8, 33, rng.randrange(1, 60)))
    rare: dict[str, Any] = {"top_k": rng.choice((1, 5, 40)), "top_p": rng.choice((0.1, 0.9)), "min_p": 0.05}
    rare |= {"repetition_penalty": rng.choice((0.8, 1.2)), "presence_penalty": 1.5, "frequency_penalty": -0.5}
    rare |= {"logprobs": rng.choice((0, 3)), "prompt_logprobs": rng.choice((0, 2)), "n": rng.choice((2, 3))}
    rare |= {"stop": rng.sample("etaoinsrh", 3), "stop_token_ids": rng.sample(range(VOCAB_SIZE), 3)}
    rare |= {"logit_bias": LIKELY, "ignore_eos": True, "speculate": False, "min_tokens": rng.randrange(max_tokens + 1)}
    chosen = {name: value for name, value in rare.items() if rng.random() < 0.25}
    if rng.random() < 0.15:
        chosen |= {"structured_outputs": rng.choice(GRAMMARS), "min_tokens": 0, "logit_bias": {}}
    temperature = rng.choice((0.0, 0.0, 0.7, 1.3))
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=rng.randrange(99), **chosen)


def some_asks(rng: random.Random, adapters: Sequence[str | None]) -> list[Ask]:
    """Prompts of which some begin alike, and some are equal."""
    heads, some = random_prompts((0, 32, 64, 90), rng.randrange(99)), rng.choice
    own = random_prompts(rng.choices((1, 31, 32, 33, 45, 60), k=rng.randrange(5, 11)), rng.randrange(99))
    prompts = [some(heads) + some(own) for _ in own]
    return [Ask(p, some_sampling(rng), some(adapters), some(list(Priority))) for p in prompts]


def some_settings(rng: random.Random, model: ModelConfig, kind: str, disk: Path) -> Config:
    """`kind` is what may draft besides lookups."""
    scheduler = SchedulerConfig(
        speculate=rng.choice((kind, kind, "auto", "off")),
        max_num_seqs=rng.choice((1, 2, 4, 12)),
        max_num_batched_tokens=rng.choice((32, 48, 100, 256)),
        async_scheduling=rng.random() < 0.75,
        max_draft_tokens=rng.choice((1, 4, 8)),
    )
    cache = CacheConfig(num_kv_blocks=rng.choice((8, 9, 12, 30)), prefix_caching=rng.random() < 0.85)
    memory = MemoryConfig(kv_disk="64MB", kv_disk_dir=str(disk)) if rng.random() < 0.3 else MemoryConfig()
    return Config(model=model, cache=cache, scheduler=scheduler, memory=memory)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answers_alone(model: ModelConfig, asks: Sequence[Ask]) -> tuple[dict[Ask, list[Answer]], list[float]]:
    """And the prompts' vectors."""
    model, cache = replace(model, draft_model=None), CacheConfig(num_kv_blocks=64, prefix_caching=False)
    async with serving(Config(model=model, cache=cache, scheduler=SchedulerConfig(speculate="off"))) as engine:
        alone = {ask: [replace(one, sample_index=0) for one in ask.requests(engine)] for ask in asks}
        answers = {ask: [await read(engine.submit(one)) for one in alone[ask]] for ask in asks}
        return answers, [number for ask in asks for number in await vectors(engine, [ask])]


async def check_load(
    engine: AsyncEngine,
    rng: random.Random,
    wanted: dict[Ask, list[Answer]],
    wanted_vectors: list[float],
    tolerance: float,
) -> None:
    """All asks, some of them twice, and their prompts' vectors, while the pool is cut, requests are preempted or
    aborted, and prefixes forgotten."""
    scheduler, before, streams = engine.scheduler, engine.stats(), list[RequestStream]()
    reading: list[tuple[asyncio.Task[Answer], Answer]] = []
    schedule = scheduler.schedule

    def disturbed(now: float) -> SchedulerOutput | None:
        if rng.random() < 0.1:
            rare = rng.choice((rng.choice(streams).abort, engine.reset_prefix_cache))
            rng.choice((rare, scheduler.preempt_lowest, scheduler.preempt_lowest, lambda: scheduler.shrink(5)))()
        step = schedule(now)
        scheduler.check_integrity()
        return step

    scheduler.schedule = disturbed  # type: ignore[method-assign]
    embedding = asyncio.create_task(vectors(engine, wanted))
    for ask in rng.sample([*wanted, *wanted], len(wanted) * 3 // 2):
        opened = engine.submit_all(ask.requests(engine))
        streams += opened
        reading += [(asyncio.create_task(read(one)), alone) for one, alone in zip(opened, wanted[ask])]
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01)))
    for task, alone in reading:
        check(await task, alone, tolerance)
    assert await embedding == pytest.approx(wanted_vectors, rel=0.0, abs=tolerance)
    await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
    scheduler.check_integrity()
    stats, requests = engine.stats(), [stream.request for stream in streams]
    assert (engine.num_streams, stats.num_running, stats.num_waiting) == (0, 0, 0)
    num_tokens = sum(task.result()[-1].num_output_tokens for task, _ in reading)
    num_drafts = sum(request.num_accepted_drafts + request.num_rejected_drafts for request in requests)
    assert stats.num_generated_tokens - before.num_generated_tokens == num_tokens
    assert stats.num_draft_tokens - before.num_draft_tokens == num_drafts


@on_the_cpu
@pytest.mark.flaky(reruns=0)  # a second try would hide a fault
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("name", "seed"), SEEDS)
async def test_all_answers_are_those_alone(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model = make_model(name, tmp_path, rng)
    kind = "mtp" if name.startswith("mtp ") else "ngram" if model.draft_model is None else "model"
    wanted, wanted_vectors = await answers_alone(
        model, some_asks(rng, [None, *(adapter.name for adapter in model.adapters)])
    )
    monkeypatch.setattr(drafting, "choose_depths", always)
    if rng.random() < 0.7:
        monkeypatch.setattr("mlx_server.engine.draft_parts.NgramDrafter", Adversary)
        monkeypatch.setattr(Adversary, "answers", defaultdict(list))
        for ask, answers in wanted.items():
            Adversary.answers[tuple(ask.prompt)] += [[*chain(*(delta.token_ids for delta in one))] for one in answers]
    config = some_settings(rng, model, kind, tmp_path / "disk")
    for _ in range(2):  # with kv_disk, the second engine finds what the first one has kept
        async with serving(config) as engine:
            for _ in range(2):
                await check_load(engine, rng, wanted, wanted_vectors, 0.0 if model.batch_invariant else 1e-3)
