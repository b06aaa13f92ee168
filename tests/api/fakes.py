"""An engine without a model: streams that follow a script, with the real tokenizer, templates and grammars."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from mlx_server.config import Config
from mlx_server.engine.embeddings import Pooling
from mlx_server.engine.engine import EngineState
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.loading import ServedNames
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.request_stream import GenerationRequest, OutputText
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import ContextLengthError, EngineDeadError, OverloadedError, QueueFullError, ServeError
from mlx_server.model_entries import ModelEntry
from mlx_server.observability.engine_metrics import EngineMetrics, RequestSummary
from mlx_server.outputs import CompletionDelta, EngineStats, PositionLogprobs, RequestTimings, TokenLogprob
from mlx_server.pool.catalog import Catalog
from mlx_server.pool.model_pool import ModelPool
from mlx_server.request import FinishReason
from mlx_server.runtime.memory import MemoryReading
from mlx_server.sampling_params import SamplingParams
from tests.text_worlds import EOS, make_tokenizer

MAX_MODEL_LEN = 512
TOOL_MARKERS = ("<tool_call>", "</tool_call>")
REASONING_MARKERS = ("<think>", "</think>")
NUM_BLOCKS = 100

Script = Callable[[GenerationRequest], str | Sequence[int]]


@functools.cache
def shared_tokenizer() -> Tokenizer:
    return make_tokenizer(added=TOOL_MARKERS, special=REASONING_MARKERS)


@functools.cache
def shared_grammars() -> GrammarCompiler:
    return GrammarCompiler(shared_tokenizer())


def say(text: str) -> Script:
    """A script that answers every request with `text`."""
    return lambda request: text


@dataclass
class FakeEngine:
    """Answers with what `script` says, a token at a time, then the end of sequence.

    `gate` holds every stream back before its first token while it is clear; `fail_with` ends streams with an
    error after `fail_after` tokens; `refuse_with` is raised by `submit`. `pause_after` holds
    streams back once they have that many tokens, until `resume`. With `tokens_per_delta`, each step of an answer but
    the last gives so many.
    """

    script: Script = field(default_factory=lambda: say("Hello world"))
    model_name: str = "fake"
    model_root: str = "/models/fake"
    adapters: tuple[str, ...] = ()
    max_model_len: int = MAX_MODEL_LEN
    state: EngineState = EngineState.READY
    error: str | None = None
    num_cached_tokens: int = 0
    num_drafts: tuple[int, int] = (0, 0)  # that each answer says were accepted and rejected
    refuse_with: ServeError | None = None
    fail_with: ServeError | None = None
    fail_after: int = 1
    is_cache_busy: bool = False
    max_open: int = 1000
    pause_after: int | None = None
    tokens_per_delta: int = 1
    has_tokenizer: bool = True
    pooling: Pooling | None = None
    config: Config = field(default_factory=Config)
    vision: SeeingModel | None = None
    info: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(no_vision=""))

    def __post_init__(self) -> None:
        self.tokenizer = shared_tokenizer()
        self.chat = ChatFormatter(self.tokenizer)
        self.grammars = shared_grammars()
        self.default_sampling = SamplingParams()
        self.gate = asyncio.Event()
        self.gate.set()
        self.metrics = EngineMetrics(self.max_model_len)
        self.requests: list[GenerationRequest] = []
        self.open: dict[str, FakeStream] = {}
        self.aborted: list[str] = []
        self.num_resets = 0
        self.num_paused = 0
        self._resumed = asyncio.Event()
        self.on_death: Callable[[], None] = lambda: None
        self.end_thread: Callable[[], None] = lambda: None

    @property
    def names(self) -> ServedNames:
        return ServedNames(self.model_name, None, self.adapters)

    async def start(self) -> None:
        self.state = EngineState.READY

    async def stop(self) -> None:
        self.state = EngineState.STOPPED
        self._fail(OverloadedError("The server has shut down."))

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.refuse_with is not None:
            raise self.refuse_with
        if self.state is EngineState.DEAD:
            raise EngineDeadError("The engine has died.")
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError.of_prompt(str(len(request.prompt_token_ids)), self.max_model_len, "Shorten it.")
        if len(self.open) >= self.max_open:
            raise QueueFullError(f"{self.max_open} requests wait already.", "max_num_waiting", 7.0)
        assert request.request_id not in self.open, "request ids are unique"
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.open[request.request_id] = stream
        return stream

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[FakeStream]:
        """Without a queue, all enter at once or none does."""
        streams: list[FakeStream] = []
        try:
            for request in requests:
                streams.append(self.submit(request))
        except ServeError:
            for stream in streams:
                stream.abort()
            raise
        return streams

    @property
    def num_streams(self) -> int:
        return len(self.open)

    idle_kv_bytes = 0

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.open),
            num_blocks=NUM_BLOCKS,
            max_num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - len(self.open),
        )

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return not self.is_cache_busy

    def resume(self) -> None:
        self._resumed.set()

    async def pause(self) -> None:
        self.num_paused += 1
        await self._resumed.wait()

    def die(self, error: ServeError) -> None:
        """What the death of the MLX thread does: every stream fails, nothing is taken any more."""
        self.state = EngineState.DEAD
        self.error = error.message
        self._fail(error)
        self.end_thread()
        self.on_death()

    def _fail(self, error: ServeError) -> None:
        self.fail_with, self.fail_after = error, 0
        self.gate.set()
        self.resume()


class FakeFactory:
    """Gives out engines by their names, each as often as it is asked for; stands for the MLX thread, too."""

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self._engines = {engine.model_name: engine for engine in engines}
        self.is_alive = True

    def make(self, config: Config, around: Surroundings, *, metrics: object) -> FakeEngine:
        engine = self._engines[config.model.served_model_name or ""]
        engine.on_death, engine.end_thread = around.on_death, self.stop
        return engine

    def stop(self) -> None:
        self.is_alive = False


def fake_pool(*engines: FakeEngine, aliases: tuple[str, ...] = ()) -> ModelPool:
    """A pool of engines without models, loaded when it is started; the aliases are the first one's."""
    entries = [
        ModelEntry(
            id=engine.model_name,
            model=engine.model_root,
            pinned=True,
            overrides={"adapter": ":".join(f"{name}=/adapters/{name}" for name in engine.adapters)},
        )
        for engine in engines
    ]
    entries[0] = replace(entries[0], aliases=aliases)
    config = Config(models=tuple(entries))
    factory = FakeFactory(engines)
    return ModelPool(
        Catalog(config),
        MemoryBudget(2**40, read=lambda: MemoryReading(2**41, 2**41, 2**41, 0)),
        config.pool,
        Surroundings(factory),  # type: ignore[arg-type]
        new_engine=factory.make,  # type: ignore[arg-type]
        estimate=lambda config: MemoryNeed(1_000_000, 0, 0),
    )


class FakeStream:
    """One request's deltas, with the engine's promises about them."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._request = request
        self._aborting = asyncio.Event()
        self._progress = _Progress(request, engine.num_cached_tokens, engine.num_drafts)
        self._reason: FinishReason | None = None
        self._error: ServeError | None = None
        self.on_output: Callable[[], None] = lambda: None
        self.is_complete = False
        self._deltas: list[CompletionDelta] = []
        self._taken = asyncio.Event()
        self._end: ServeError | None = None
        self._filling = asyncio.ensure_future(self._fill())

    async def _fill(self) -> None:
        """One delta at a time: the next is made when it has been taken."""
        try:
            async for delta in self._generate():
                self._deltas.append(delta)
                self._taken.clear()
                self.on_output()
                await self._taken.wait()
        except ServeError as error:
            self._end = error
        finally:
            self.is_complete = True
            self.on_output()

    async def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        while not self.is_over():
            for delta in self.take():
                yield delta
            await asyncio.sleep(0)

    @property
    def has_output(self) -> bool:
        return bool(self._deltas)

    def take(self) -> list[CompletionDelta]:
        deltas, self._deltas = self._deltas, []
        self._taken.set()
        return deltas

    def is_over(self) -> bool:
        if self._end is not None and not self._deltas:
            raise self._end
        return self.is_complete and not self._deltas

    def abort(self, error: ServeError | None = None) -> None:
        if self._engine.open.pop(self.request_id, None) is not None:
            self._engine.aborted.append(self.request_id)
            self._reason = FinishReason.ABORT if error is None else FinishReason.ERROR
            self._error = error
            self._aborting.set()

    @property
    def summary(self) -> RequestSummary | None:
        """It has waited 10 ms and got a token each 5 ms."""
        if self.request_id in self._engine.open:
            return None
        request, num_tokens = self._request, self._progress.num_output_tokens
        return RequestSummary(
            self.request_id,
            request.tier or request.priority.name.lower(),
            self._reason or FinishReason.ERROR,
            len(request.prompt_token_ids),
            self._engine.num_cached_tokens,
            num_tokens,
            0,
            queue_s=0.01,
            ttft_s=0.015 if num_tokens else None,
            tpot_s=0.005 if num_tokens > 1 else None,
            e2e_s=0.01 + 0.005 * num_tokens,
        )

    async def _generate(self) -> AsyncIterator[CompletionDelta]:
        await self._first_of(self._engine.gate.wait(), self._aborting.wait())
        text = OutputText(self._request, self._engine.tokenizer)
        progress = self._progress
        held: list[tuple[int, str]] = []
        for token_id in self._tokens():
            await asyncio.sleep(0)
            if progress.num_output_tokens == self._engine.pause_after:
                await self._first_of(self._engine.pause(), self._aborting.wait())
            if self._error is not None:
                raise self._error
            if self._aborting.is_set():
                yield replace(
                    progress.latest,
                    text="",
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                    logprobs=(),
                    prompt_logprobs=(),
                )
                return
            if self._engine.fail_with is not None and progress.num_output_tokens >= self._engine.fail_after:
                self._engine.open.pop(self.request_id, None)
                raise self._engine.fail_with
            reason, stop_reason = self._finish_reason(token_id, progress.num_output_tokens + len(held) + 1)
            new_text, matched = text.append([token_id], reason)
            if matched is not None:
                reason, stop_reason = FinishReason.STOP, matched
            if reason is not None:
                self._engine.open.pop(self.request_id, None)
                self._reason = reason
            held.append((token_id, new_text))
            if len(held) == self._engine.tokens_per_delta or reason is not None:
                token_ids, pieces = zip(*held, strict=True)
                held.clear()
                yield progress.delta(pieces, token_ids, reason, stop_reason)
            if reason is not None:
                return

    async def _first_of(self, *waits: Any) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    def _tokens(self) -> list[int]:
        said = self._engine.script(self._request)
        tokenizer = self._engine.tokenizer
        end = tokenizer.token_to_id(EOS)
        assert end is not None
        ids = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        return [*ids, *[end] * MAX_MODEL_LEN]

    def _finish_reason(self, token_id: int, num_output_tokens: int) -> tuple[FinishReason | None, int | None]:
        sampling = self._request.sampling
        if token_id in self._engine.tokenizer.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
        room = self._engine.max_model_len - len(self._request.prompt_token_ids)
        if num_output_tokens >= min(room, sampling.max_tokens or room):
            return FinishReason.LENGTH, None
        return None, None


class _Progress:
    """Makes deltas with their counts and logprobs."""

    def __init__(self, request: GenerationRequest, num_cached_tokens: int, num_drafts: tuple[int, int]) -> None:
        self._request = request
        self._num_cached_tokens = num_cached_tokens
        self._num_drafts = num_drafts
        self.num_output_tokens = 0
        self.latest = CompletionDelta("", ())

    def delta(
        self,
        pieces: tuple[str, ...],
        token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> CompletionDelta:
        sampling = self._request.sampling
        prompt = self._request.prompt_token_ids
        is_first = self.num_output_tokens == 0
        self.num_output_tokens += len(token_ids)
        self.latest = CompletionDelta(
            text="".join(pieces),
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_accepted_drafts=self._num_drafts[0],
            num_rejected_drafts=self._num_drafts[1],
            logprobs=fake_logprobs(token_ids, sampling.logprobs),
            prompt_logprobs=fake_logprobs(prompt[1:], sampling.prompt_logprobs) if is_first else (),
            timings=None if reason is None else RequestTimings(10.0, 10.5, 11.0, 13.0),
            pieces=pieces if len(pieces) > 1 else (),
        )
        return self.latest


def fake_logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[PositionLogprobs, ...]:
    """Each token's logprob is `-(id + 1) / 100`; the likeliest others are the ids from 0 on."""
    if num_top is None:
        return ()
    top = tuple(fake_logprob(token_id, rank) for rank, token_id in enumerate(range(num_top), start=1))
    return tuple(PositionLogprobs(fake_logprob(token_id, token_id + 1), top) for token_id in token_ids)


def fake_logprob(token_id: int, rank: int) -> TokenLogprob:
    return TokenLogprob(token_id, -(token_id + 1) / 100, rank)
