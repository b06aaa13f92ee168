"""The engine for scripts: prompts in, completions out, no server and no event loop to manage."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from mlx_server.config import FULL_KV, WHOLE_WEIGHTS, Config, load_config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.library.completions import (
    Asked,
    Asker,
    Chat,
    Completion,
    CompletionOutput,
    Embedding,
    Prompt,
    complete,
    embed,
    for_each,
    score,
)
from mlx_server.engine.parts import GivenModels, Surroundings
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.errors import ConfigError, InvalidRequestError
from mlx_server.outputs import CompletionDelta, EngineStats
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo
from mlx_server.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput"]

_T = TypeVar("_T")

_AN_HOUR_MS = 3.6e6
"""Nobody watches the tokens come, so that steps are as long as their token budget lets them be."""


class LLM:
    """A model with the server's scheduler and runner, used from synchronous code: scripts, and notebooks too, since its
    event loop has a thread of its own. Several threads may use one. `AsyncLLM` is the same for code that awaits.

    Close it, or use it as a context manager, to give its memory back.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        *,
        draft_model: str | LoadedModel | None = None,
        mtp_from: str | None = None,
        adapters: Mapping[str, str] | Sequence[str] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        kv_cache_memory: str = "auto",
        num_kv_blocks: int | None = None,
        kv_bits: str = FULL_KV,
        attention_backend: str = "auto",
        dtype: str = "auto",
        quantize: str = WHOLE_WEIGHTS,
        batch_invariant: bool = False,
        async_scheduling: bool = True,
        speculate: str = "auto",
        max_draft_tokens: int = 8,
        prefix_caching: bool = True,
        max_model_len: int | None = None,
        pooling: str = "auto",
    ) -> None:
        """Loads the model; raises what loading raises. `draft_model` is a smaller one of the same vocabulary, loaded
        already only if the model is; `mtp_from` is where heads are fetched from, with `speculate="mtp"`. `adapters` are
        folders by name, or folders named like their adapters; `max_chunk_tokens` bounds one prompt's share of a step;
        `pooling` is the setting of that name."""
        self._engine, self._thread = _make_engine(
            model,
            max_chunk_tokens,
            draft_model=draft_model,
            mtp_from=mtp_from,
            adapters=adapters,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            kv_bits=kv_bits,
            attention_backend=attention_backend,
            dtype=dtype,
            quantize=quantize,
            batch_invariant=batch_invariant,
            async_scheduling=async_scheduling,
            speculate=speculate,
            max_draft_tokens=max_draft_tokens,
            prefix_caching=prefix_caching,
            max_model_len=max_model_len,
            pooling=pooling,
            target_step_ms=_AN_HOUR_MS,
            max_step_ms=_AN_HOUR_MS,
        )
        self._asker = Asker(self._engine)
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, _drop, self._loop, self._engine, self._thread)
        try:
            self._loop.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Completes every prompt, all in one continuous batch; results in the same order. A single prompt, text or
        token ids, gives a list of one.

        `sampling_params` is for all prompts, or one for each; None is what the model's folder asks for. So is
        `adapters`, the name of one; None is the model without any. Raises `InvalidRequestError` before anything runs if
        a prompt cannot be served, `ModelNotFoundError` for an adapter that is not there, and `EngineDeadError` if the
        model fails.
        """
        return self._complete(self._asker.prompts(prompts, sampling_params, adapters), use_tqdm)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapters: str | Sequence[str | None] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answers one chat, or each of several, as `generate` does. Prompts are written by the model's chat template,
        or by `chat_template`; `tools` are shown to the model, and its calls are in the text. `add_generation_prompt`
        opens the assistant's turn (None: unless a message is continued)."""
        chats = [messages] if isinstance(next(iter(messages), None), Mapping) else list(messages)
        sampling = for_each(sampling_params, len(chats), "chats", "sampling_params", SamplingParams)
        named = for_each(adapters, len(chats), "chats", "adapters", str)
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs or {},
        )
        asked = [self._asker.chat(*one, tools, options) for one in zip(chats, sampling, named)]  # type: ignore[arg-type]
        return self._complete(asked, use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """Every prompt's vector (text or token ids), all in one continuous batch; results in the same order.

        `prompt_name` is one of the model's, to go before texts; `dimensions` cuts the vectors (Matryoshka), and
        `truncate_prompt_tokens` long prompts (-1: to what the model takes). Raises `InvalidRequestError` before
        anything runs if the model gives no vectors or a prompt cannot be served.
        """
        work = embed(
            self._engine,
            prompts,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )
        return self._loop.run(work)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:
        """How well each of `text_2` fits `text_1`, one text for all or one for each: 0 to 1 of a reranker, the cosine
        of both vectors of an embedder. Raises as `embed`."""
        work = score(self._engine, text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)
        return self._loop.run(work)

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

    def close(self) -> None:
        """Unloads the model. Calling it again does nothing; an `LLM` that is dropped is closed, too."""
        if self._finalizer.detach() is not None:
            _close(self._loop, self._engine, self._thread)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self, asked: Sequence[Asked], use_tqdm: bool) -> list[Completion]:
        return self._loop.run(complete(self._engine, asked, use_tqdm))


class AsyncLLM:
    """`LLM` for code that awaits, in whose event loop it runs: `async with AsyncLLM("owner/name") as llm`.

    Answers come token by token, and steps are short enough to watch them.
    """

    def __init__(self, model: str | LoadedModel = "smollm2", **options: Any) -> None:
        """`options` are those of `LLM`. Nothing is loaded before `start`."""
        given = inspect.signature(LLM).bind(model, **options)
        given.apply_defaults()
        options = dict(given.arguments)
        self._engine, self._thread = _make_engine(options.pop("model"), options.pop("max_chunk_tokens"), **options)
        self._asker = Asker(self._engine)

    async def start(self) -> None:
        """Loads the model; raises what loading raises."""
        await self._engine.start()

    async def stop(self) -> None:
        """Ends what is open, and unloads the model."""
        await self._engine.stop()
        self._thread.stop()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[CompletionDelta, None]:
        """What comes of one prompt, as it comes; closing the generator ends the request. Its first answer
        raises as `LLM.generate` does."""
        return self._answer(partial(self._asker.prompt, prompt, sampling_params, adapter))

    def chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        options: ChatOptions | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The answer to one chat, as `generate` gives it."""
        return self._answer(
            partial(self._asker.chat, messages, sampling_params, adapter, tools, options or ChatOptions())
        )

    async def complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """As `LLM.generate`, without a bar of progress."""
        return await complete(self._engine, self._asker.prompts(prompts, sampling_params, adapters), use_tqdm=False)

    async def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Embedding]:
        """As `LLM.embed`, without a bar of progress."""
        return await embed(
            self._engine,
            prompts,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=False,
        )

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[float]:
        """As `LLM.score`, without a bar of progress."""
        return await score(self._engine, text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=False)

    @property
    def engine(self) -> AsyncEngine:
        """The engine itself, for introspection."""
        return self._engine

    async def _answer(self, ask: Callable[[], Asked]) -> AsyncGenerator[CompletionDelta, None]:
        asked = await asyncio.to_thread(ask)  # a long text or an image takes up to a second
        if len(asked.requests) > 1:
            raise InvalidRequestError("One answer can be watched; use complete for several, or n=1.", "n")
        stream = self._engine.submit(asked.requests[0])
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()


def _make_engine(model: str | LoadedModel, max_chunk_tokens: int | None, **flags: Any) -> tuple[AsyncEngine, MLXThread]:
    """The engine and its thread, which has not been started if this raises."""
    draft_model = flags["draft_model"]
    config = _config(model, flags)
    given = GivenModels(
        None if isinstance(model, str) else model, draft_model if isinstance(draft_model, LoadedModel) else None
    )
    thread = MLXThread()
    try:
        return AsyncEngine(config, Surroundings(thread), given=given, max_chunk_tokens=max_chunk_tokens), thread
    except BaseException:
        thread.stop()
        raise


def _config(model: str | LoadedModel, flags: dict[str, Any]) -> Config:
    adapters, draft_model = flags.pop("adapters"), flags.pop("draft_model")
    if adapters and not isinstance(model, str):
        raise ConfigError("A model that is loaded already has its adapters; give them to what loads it.")
    if draft_model is not None and isinstance(draft_model, str) != isinstance(model, str):
        raise ConfigError("Give the draft model as the model is given: both by name, or both loaded.")
    wanted = {
        **flags,
        "model": model if isinstance(model, str) else model.name,
        "draft_model": draft_model.name if isinstance(draft_model, LoadedModel) else draft_model,
        "adapter": adapters or None,
        "max_num_waiting": 1_000_000,
        "max_queued_tokens": 1_000_000_000,
        "queue_timeout_s": 0.0,
    }
    return load_config(environ={}, flags=wanted)


class _LoopThread:
    """An event loop on a thread of its own, that does not keep a process from ending."""

    def __init__(self) -> None:
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="llm-loop", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._is_ready.set()
        await self._end.wait()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result, waited for on another thread; an interrupt of that cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def _close(loop: _LoopThread, engine: AsyncEngine, thread: MLXThread) -> None:
    loop.run(engine.stop())
    loop.stop()
    thread.stop()


def _drop(loop: _LoopThread, engine: AsyncEngine, thread: MLXThread) -> None:
    """Closes what the garbage collector has found, maybe on a thread that closing waits for; or at the process' end,
    when no thread can be started."""
    if threading.current_thread() is threading.main_thread():
        _close(loop, engine, thread)
    else:
        threading.Thread(target=_close, args=(loop, engine, thread), name="llm-close").start()
