"""The engine for scripts: prompts in, completions out, no server and no event loop to manage."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

from mlx_server.engine.embeddings import InputTruncation, embedder_of, pair_up, scorer_of
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.library.completions import (
    Completion,
    CompletionOutput,
    Embedding,
    PromptRequests,
    RequestBuilder,
    complete,
    pool,
)
from mlx_server.engine.library.inputs import Chat, Prompt, as_chats, as_prompts, bare_prompt, for_each
from mlx_server.engine.library.options import EngineOptions, Model, read_options
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import CompletionDelta, EngineStats
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import RunnerInfo
from mlx_server.sampling_params import SamplingParams, plain_ints

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput"]

_T = TypeVar("_T")

_AN_HOUR_MS = 3.6e6
"""`LLM` streams no tokens, so only the token budget bounds its steps."""


class LLM:
    """A model with the server's scheduler and runner, for synchronous code: scripts and notebooks. Its event loop has a
    thread of its own. Several threads may share one `LLM`. `AsyncLLM` is the same for async code.

    Close it, or use it as a context manager, to free its memory.
    """

    def __init__(self, model: Model = "smollm2", **options: Unpack[EngineOptions]) -> None:
        """Loads the model; raises what loading raises. The options are those of `EngineOptions`."""
        options.setdefault("target_step_ms", _AN_HOUR_MS)
        options.setdefault("max_step_ms", _AN_HOUR_MS)
        self._llm = AsyncLLM(model, **options)
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, _drop, self._loop, self._llm)
        try:
            self._loop.run(self._llm.start())
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
        """Completes all prompts in one continuous batch, and returns the results in the same order. A single prompt,
        text or token ids, gives a list of one.

        `sampling_params` is one for all prompts, or one for each; None means the defaults in the model's folder.
        `adapters` is the name of one adapter for all prompts, or one name for each; None means no adapter. Raises
        `InvalidRequestError` before anything runs if a prompt cannot be served, `ModelNotFoundError` for an unknown
        adapter, and `EngineDeadError` if the model fails.
        """
        return self._complete(self._open.builder.prompts(prompts, sampling_params, adapters), use_tqdm)

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
        """Answers one chat, or each of several, as `generate` does. The model's chat template, or `chat_template`,
        writes the prompts. The model sees `tools`, and its calls stay in the text. `add_generation_prompt` opens the
        assistant's turn (None: unless a message is continued)."""
        builder, chats = self._open.builder, as_chats(messages)
        sampling = for_each(sampling_params, len(chats), "chats", "sampling_params", SamplingParams)
        named = for_each(adapters, len(chats), "chats", "adapters", str)
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs or {},
        )
        prompts = [
            builder.chat(chat, params, adapter, tools, options)
            for chat, params, adapter in zip(chats, sampling, named, strict=True)
        ]
        return self._complete(prompts, use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """Returns every prompt's vector (text or token ids), computed in one continuous batch, in the same order.

        `prompt_name` is one of the model's own prompts, which then precedes each text. `dimensions` shortens the
        vectors (Matryoshka), and `truncate_prompt_tokens` shortens long prompts (-1: to the model's limit). Raises
        `InvalidRequestError` before anything runs if the model gives no vectors or a prompt cannot be served.
        """
        work = self._open.embed(
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
        """Returns how well each of `text_2` fits `text_1` (one text for all, or one for each): a number from 0 to 1 for
        a reranker, the cosine of both vectors for an embedding model. Raises as `embed` does."""
        work = self._open.score(text_1, text_2, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)
        return self._loop.run(work)

    def stats(self) -> EngineStats:
        """Totals since the model was loaded; also after `close`."""
        return self._llm.engine.stats()

    @property
    def info(self) -> RunnerInfo:
        """Pool size, attention backend and the like."""
        return self.engine.info

    @property
    def engine(self) -> AsyncEngine:
        """The engine itself, for introspection."""
        return self._open.engine

    def close(self) -> None:
        """Unloads the model. Idempotent. The garbage collector closes an `LLM`, too."""
        if self._finalizer.detach() is not None:
            _close(self._loop, self._llm)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open(self) -> AsyncLLM:
        if not self._finalizer.alive:
            raise _closed_error()
        return self._llm

    def _complete(self, prompts: Sequence[PromptRequests], use_tqdm: bool) -> list[Completion]:
        return self._loop.run(complete(self.engine, prompts, use_tqdm))


class AsyncLLM:
    """`LLM` for async code: `async with AsyncLLM("owner/name") as llm`. It runs in the caller's event loop.

    Answers can be streamed token by token, so steps are short, as on the server.
    """

    def __init__(self, model: Model = "smollm2", **options: Unpack[EngineOptions]) -> None:
        """The options are those of `EngineOptions`. Nothing is loaded before `start`."""
        config, given = read_options(model, options)
        self._thread, max_chunk_tokens = MLXThread(), options.get("max_chunk_tokens")
        self.engine = AsyncEngine(config, Surroundings(self._thread), given=given, max_chunk_tokens=max_chunk_tokens)
        self.builder = RequestBuilder(self.engine)
        weakref.finalize(self, _end, self._thread)

    async def start(self) -> None:
        """Loads the model, once; raises what loading raises."""
        if self.engine.state is not EngineState.LOADING:
            raise InvalidRequestError("This AsyncLLM was started before; make another one.")
        await self.engine.start()

    async def stop(self) -> None:
        """Aborts open requests, and unloads the model."""
        await self.engine.stop()
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

    @property
    def _started(self) -> AsyncEngine:
        if self.engine.state is EngineState.LOADING:
            raise InvalidRequestError("This AsyncLLM is not started; use `async with`, or await `start`.")
        if self.engine.state is EngineState.STOPPED:
            raise InvalidRequestError("This AsyncLLM is stopped; make another one.")
        return self.engine

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Streams the answer to one prompt. Closing the generator aborts the request. Its first item raises as
        `LLM.generate` does."""
        return self._answer(partial(self.builder.prompt, prompt, sampling_params, adapter))

    def chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        options: ChatOptions | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Streams the answer to one chat, as `generate` does."""
        return self._answer(
            partial(self.builder.chat, messages, sampling_params, adapter, tools, options or ChatOptions())
        )

    async def complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """As `LLM.generate`, without a progress bar."""
        engine = self._started
        made = await asyncio.to_thread(self.builder.prompts, prompts, sampling_params, adapters)
        return await complete(engine, made, use_tqdm=False)

    async def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[Embedding]:
        """As `LLM.embed`."""
        truncation = InputTruncation(truncate_prompt_tokens)
        embedder = embedder_of(self._started.pooling, self.engine.model_name)
        embedder.check_dimensions(dimensions)
        before = embedder.prompt(prompt_name)

        def read() -> list[Sequence[int]]:
            each = map(bare_prompt, as_prompts(prompts))
            items = [prompt if isinstance(prompt, str) else plain_ints(prompt, "prompts") for prompt in each]
            return [embedder.token_ids(item, before, truncation, f"prompts[{i}]") for i, item in enumerate(items)]

        inputs = await asyncio.to_thread(read)
        results = await pool(self.engine, inputs, embedder.params, use_tqdm)
        vectors = (embedder.vector(result, dimensions) for result in results)
        return [Embedding(tuple(ids), vector) for ids, vector in zip(inputs, vectors, strict=True)]

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[float]:
        """As `LLM.score`."""
        firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (text_1, text_2))
        scorer = scorer_of(self._started.pooling, self.engine.model_name)
        pairs, paths = pair_up(firsts, seconds)
        plan = await asyncio.to_thread(scorer.plan, pairs, paths, InputTruncation(truncate_prompt_tokens))
        return plan.scores(await pool(self.engine, plan.inputs, scorer.params, use_tqdm))

    async def _answer(self, build: Callable[[], PromptRequests]) -> AsyncGenerator[CompletionDelta, None]:
        engine = self._started
        prompt = await asyncio.to_thread(build)  # a long text or an image takes up to a second
        if len(prompt.requests) > 1:
            raise InvalidRequestError("Only one answer can be streamed; use complete for several, or n=1.", "n")
        stream = engine.submit(prompt.requests[0])
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()


class _LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._is_ready, self._lock, self._is_stopped = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="llm-loop", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._is_ready.set()
        await self._end.wait()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs `work` on the loop and waits for its result; an interrupt cancels it. Any other thread. Raises
        `InvalidRequestError` after `stop`, when the loop would never run it."""
        with self._lock:
            if self._is_stopped:
                work.close()
                raise _closed_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def _closed_error() -> InvalidRequestError:
    return InvalidRequestError("This LLM is closed; make another one.")


def _close(loop: _LoopThread, llm: AsyncLLM) -> None:
    loop.run(llm.stop())
    loop.stop()


def _end(thread: MLXThread) -> None:
    """Ends the thread of an `AsyncLLM` that was not stopped, before the process ends. At its end no thread can be
    started; before, the garbage collector calls this in the middle of anything, which must not wait."""
    if not thread.is_alive:
        return
    if threading.main_thread().is_alive():
        threading.Thread(target=thread.stop, name="llm-end").start()
    else:
        thread.stop()


def _drop(loop: _LoopThread, llm: AsyncLLM) -> None:
    """Closes an `LLM` that the garbage collector found, perhaps on a thread that closing waits for; or at the end of
    the process, when no thread can be started."""
    if threading.current_thread() is threading.main_thread():
        _close(loop, llm)
    else:
        threading.Thread(target=_close, args=(loop, llm), name="llm-close").start()
