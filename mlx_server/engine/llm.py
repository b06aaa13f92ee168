"""The engine for scripts: prompts in, completions out, no server and no event loop to care for."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from mlx_server.config import FULL_KV, load_config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import ConfigError, InvalidRequestError
from mlx_server.outputs import EngineStats, PositionLogprobs
from mlx_server.request import FinishReason, Priority
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo
from mlx_server.sampling_params import SamplingParams, plain_ints

Prompt = str | Sequence[int]

_AN_HOUR_MS = 3.6e6
"""Nobody watches the tokens come, so that steps are as long as their token budget lets them be."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer. `text` is empty for a model without a tokenizer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class LLM:
    """A model with the server's scheduler and runner, used from synchronous code.

    Not thread-safe, and not to be used where an event loop runs (use `AsyncEngine` there). Close it, or use
    it as a context manager, to give its memory back.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        *,
        adapters: Mapping[str, str] | Sequence[str] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        kv_cache_memory: str = "auto",
        num_kv_blocks: int | None = None,
        kv_bits: str = FULL_KV,
        attention_backend: str = "auto",
        dtype: str = "auto",
        async_scheduling: bool = True,
        prefix_caching: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        """Loads the model; raises what loading raises. `adapters` are folders by name, or folders that bear their
        adapters' names; `max_chunk_tokens` bounds one prompt's share of a step."""
        if adapters and not isinstance(model, str):
            raise ConfigError("A model that is loaded already has its adapters; give them to what loads it.")
        wanted = {
            "model": model if isinstance(model, str) else model.name,
            "adapter": adapters or None,
            "attention_backend": attention_backend,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "kv_cache_memory": kv_cache_memory,
            "num_kv_blocks": num_kv_blocks,
            "kv_bits": kv_bits,
            "prefix_caching": prefix_caching,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "async_scheduling": async_scheduling,
            "target_step_ms": _AN_HOUR_MS,
            "max_step_ms": _AN_HOUR_MS,
            "max_num_waiting": 1_000_000,
            "max_queued_tokens": 1_000_000_000,
            "queue_timeout_s": 0.0,
        }
        config = load_config(environ={}, flags=wanted)
        self._ids = itertools.count()
        self._thread = MLXThread()
        self._runner = asyncio.Runner()
        self._engine = AsyncEngine(
            config,
            Surroundings(self._thread),
            loaded=None if isinstance(model, str) else model,
            max_chunk_tokens=max_chunk_tokens,
        )
        self._finalizer = weakref.finalize(self, _close, self._runner, self._engine, self._thread)
        try:
            self._runner.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        priorities: Sequence[Priority] | None = None,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Completes every prompt (text or token ids), all in one continuous batch; results in the same order.

        `params` is for all prompts, or one for each; None is what the model's folder asks for. So is `adapters`, the
        name of one; None is the model without any. Raises `InvalidRequestError` before anything runs if a prompt cannot
        be served, `ModelNotFoundError` for an adapter that is not there, and `EngineDeadError` if the model fails.
        """
        params = self._engine.default_sampling if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"There are {len(prompts)} prompts and {len(each)} sampling params.", "params")
        named = [adapters] * len(prompts) if isinstance(adapters, str | None) else list(adapters)
        if len(named) != len(prompts):
            raise InvalidRequestError(f"There are {len(prompts)} prompts and {len(named)} adapters.", "adapters")
        requests = [
            GenerationRequest(
                request_id=f"llm-{next(self._ids)}",
                prompt_token_ids=self._token_ids(prompt),
                sampling=sampling,
                priority=Priority.NORMAL if priorities is None else priorities[index],
                adapter=named[index],
            )
            for index, (prompt, sampling) in enumerate(zip(prompts, each, strict=True))
        ]
        return self._runner.run(self._generate(requests, progress))

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        return self._engine.tokenizer.encode(prompt) if isinstance(prompt, str) else plain_ints(prompt, "prompt")

    def stats(self) -> EngineStats:
        """Totals since the model was loaded."""
        return self._engine.stats()

    @property
    def info(self) -> RunnerInfo:
        """Pool size, attention backend and the like."""
        return self._engine.info

    @property
    def engine(self) -> AsyncEngine:
        """The engine itself, for introspection."""
        return self._engine

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Unloads the model. Calling it again does nothing; an `LLM` that is dropped is closed, too."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _generate(self, requests: Sequence[GenerationRequest], progress: bool) -> list[Completion]:
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(self._engine.submit(request))
            with tqdm(total=len(requests), desc="Completions", disable=None if progress else True) as bar:
                return list(await asyncio.gather(*(_collect(stream, bar) for stream in streams)))
        finally:
            for stream in streams:
                stream.abort()


def _close(runner: asyncio.Runner, engine: AsyncEngine, thread: MLXThread) -> None:
    runner.run(engine.stop())
    runner.close()
    thread.stop()


async def _collect(stream: RequestStream, bar: tqdm[NoReturn]) -> Completion:
    deltas = [delta async for delta in stream]
    bar.update()
    last = deltas[-1]
    assert last.finish_reason is not None
    return Completion(
        prompt_token_ids=tuple(stream.request.prompt_token_ids),
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=last.num_cached_tokens,
        logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=tuple(itertools.chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
    )
