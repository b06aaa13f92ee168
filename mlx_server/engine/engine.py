"""The engine of one model: its scheduler, its steps on the MLX thread, and one stream for each request. Metrics and
traces are updated when a step is submitted, when it is done, and when a request ends."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mlx_server.batching.blocks.prefix_cache import CacheCleared
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import Config
from mlx_server.engine.adapters import LiveAdapters
from mlx_server.engine.embeddings import Pooling, check_generates
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.intake import Intake
from mlx_server.engine.loading import served_names
from mlx_server.engine.observed import ObservedExecutor, call_each, current_stats, notify
from mlx_server.engine.parts import EngineParts, GivenModels, Surroundings, load_parts, unload_parts
from mlx_server.engine.prefixes.kv_events import ModelEvents, follow
from mlx_server.engine.prefixes.model_on_disk import flush
from mlx_server.engine.request_stream import GenerationRequest, ModelLimits, OutputText, RequestStream, make_request
from mlx_server.engine.text.chat import ChatFormatter, TextTools
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    ServeError,
)
from mlx_server.observability.engine_metrics import EngineMetrics
from mlx_server.observability.tracing import NO_TRACER, EngineTracer, Tracing, open_tracing
from mlx_server.outputs import EngineStats, RequestOutput
from mlx_server.request import FinishReason, Request, RequestStatus
from mlx_server.runtime.checks.image_families import count_placeholders
from mlx_server.runtime.models.loader import RunnerInfo
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SHUTDOWN_RETRY_S = 5.0


class EngineState(enum.StrEnum):
    """LOADING -> READY -> STOPPING -> STOPPED. Any state becomes DEAD when loading, a step or the MLX thread fails."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DEAD = "dead"

    @property
    def is_loaded(self) -> bool:
        """Whether the engine has its parts, and all its properties can be read."""
        return self in (EngineState.READY, EngineState.STOPPING)


class AsyncEngine:
    """Serves one model on the MLX thread. All methods must be called on the event loop's thread.

    Text needs a tokenizer. The engine of a model without one (random weights) generates token ids only, and its
    `tokenizer`, `chat` and `grammars` raise `InvalidRequestError`.
    """

    def __init__(
        self,
        config: Config,
        around: Surroundings | None = None,
        *,
        given: GivenModels | None = None,
        max_chunk_tokens: int | None = None,
        metrics: EngineMetrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Loads nothing; `start` does. With `around`, the engine uses its MLX thread, which the caller stops; without
        it, the engine has a thread of its own. `given` models are not loaded again. `max_chunk_tokens` bounds one
        prompt's share of a step. `metrics` of an earlier engine of the model are continued. By default, `tracing` is as
        `config` says."""
        self.config = config
        self._given = given or GivenModels()
        self.names = served_names(config.model, self._given.model)
        self.model_name = self.names.model
        self.state = EngineState.LOADING
        self.error: str | None = None
        self._around = around or Surroundings.alone(config.memory)
        self._owns_thread = around is None
        self._max_chunk_tokens = max_chunk_tokens
        self._metrics = metrics
        self._tracing = tracing or open_tracing(config.observability)
        self._tracer: EngineTracer = NO_TRACER
        self._parts: EngineParts | None = None
        self._intake: Intake  # once there are parts
        self._limits: ModelLimits  # likewise
        self.adapters: LiveAdapters  # likewise
        self._streams: dict[str, RequestStream] = {}
        self._pending_callbacks: dict[Callable[[], None], None] = {}  # an ordered set of callbacks
        self._loop_task: asyncio.Task[None] | None = None
        self._events: ModelEvents | None = None
        self._stop_turn = asyncio.Lock()
        self._clock = time.monotonic

    # --- properties -----------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together: the least of the limits of model, setting and pool."""
        return self._loaded_parts().max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text().tokenizer

    @property
    def chat(self) -> ChatFormatter:
        return self._text().chat

    @property
    def grammars(self) -> GrammarCompiler:
        return self._text().grammars

    @property
    def pooling(self) -> Pooling | None:
        """The model's vectors and scores, if it has them, beside or instead of text."""
        return self._loaded_parts().pooling

    @property
    def vision(self) -> SeeingModel | None:
        """Prepares images for the model; None if the model takes no images."""
        return self._loaded_parts().vision

    @property
    def has_tokenizer(self) -> bool:
        return self._loaded_parts().text is not None

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters for fields that a request leaves out: the model's own, or OpenAI's defaults."""
        text = self._loaded_parts().text
        return SamplingParams() if text is None else text.default_sampling

    @property
    def num_streams(self) -> int:
        """The number of requests that were submitted and have not ended."""
        return len(self._streams)

    @property
    def info(self) -> RunnerInfo:
        """Pool size, attention backend and similar facts."""
        return self._loaded_parts().info

    @property
    def metrics(self) -> EngineMetrics:
        """The metrics since the model was first loaded; they continue when the model is unloaded and loaded again."""
        assert self._metrics is not None, "nothing was counted before"
        return self._metrics

    @property
    def scheduler(self) -> ContinuousBatchingScheduler:
        """For introspection only; `submit` requests to the engine."""
        return self._loaded_parts().scheduler

    # --- lifecycle ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the model and starts to serve. If that fails, raises `ServeError`, and the engine is dead."""
        try:
            self._parts = await load_parts(
                self.config, self._around, given=self._given, max_chunk_tokens=self._max_chunk_tokens
            )
        except Exception as error:
            self.state, self.error = EngineState.DEAD, str(error)
            raise
        self.state, self._intake = EngineState.READY, Intake(self._parts.scheduler, self._clock)
        self._limits = ModelLimits(
            model_name=self.model_name,
            vocab_size=self._parts.loaded.vocab_size,
            max_model_len=self._parts.max_model_len,
            eos_token_ids=frozenset() if self._parts.text is None else self._parts.text.tokenizer.eos_token_ids,
            no_vision=self._parts.info.no_vision,
            count_placeholders=partial(count_placeholders, self._parts.loaded.model),
            largest_chunk=self._parts.scheduler.limits.largest_chunk,
        )
        self.adapters = LiveAdapters(self._parts, self._around.thread, self.config.model, self._requests)
        for name in self._parts.loaded.adapters.by_name.keys() - set(self.names.adapters):
            self.adapters.unload(name)  # it went while the model was loading
        self._metrics = self._metrics or EngineMetrics(self.max_model_len, self.config.scheduler.aging_rate)
        settings = self.config.observability
        if settings.kv_cache_metrics:
            blocks = self._parts.scheduler.blocks
            blocks.observer = self._metrics.follow_kv_blocks(settings.kv_cache_metrics_sample, self._clock)
        self._tracer = self._tracing.tracer(self.model_name, self._clock, self._decode if self.has_tokenizer else None)
        self._loop_task = asyncio.create_task(self._run(), name=f"scheduler of {self.model_name}")
        self._parts.watch.join(*self._parts.guards)
        if self._around.events is not None:
            blocks, is_on_disk = self._parts.scheduler.blocks, self._parts.is_on_disk
            self._events = follow(self._around.events, self.config, self.names.with_adapter, blocks, is_on_disk)

    async def stop(self) -> None:
        """Stops accepting requests, fails open ones, and unloads. Calls at the same time end together."""
        async with self._stop_turn:
            if self.state is EngineState.READY:
                self.state = EngineState.STOPPING
            for request_id in self._fail_streams(
                lambda: OverloadedError(f"The model {self.model_name} was shut down.", _SHUTDOWN_RETRY_S)
            ):
                self.scheduler.finish_request(request_id, FinishReason.ERROR)
            if self._parts is not None:
                await self.adapters.close()
                self._parts.watch.leave(*self._parts.guards)
                self._parts.scheduler.stop()
                if self._loop_task is not None and not self._loop_task.cancelled():
                    await self._loop_task
                if self._parts.disk is not None and self.state is not EngineState.DEAD:
                    try:
                        await flush(self._parts.disk, self._parts.scheduler, self._parts.executor)
                    except Exception:  # the model is unloaded nevertheless
                        logger.exception("Prefixes of %s were not all kept on disk", self.model_name)
            if self.state is not EngineState.DEAD:
                self.state = EngineState.STOPPED
            if self._events is not None:
                self._events.add(CacheCleared())
            await self._unload()
            if self._owns_thread:
                await asyncio.to_thread(self._around.close)

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, generation: GenerationRequest) -> RequestStream:
        """`submit_all` of one request."""
        return self.submit_all((generation,))[0]

    def submit_all(self, generations: Sequence[GenerationRequest]) -> list[RequestStream]:
        """Accepts the requests of one call, all or none, and returns their streams in order. They enter the queue as
        `Intake` says. Samples of a prompt follow its first one. Raises `InvalidRequestError`, `ContextLengthError`,
        `OverloadedError` or a subclass, `EngineDeadError`, or `ModelNotFoundError` for an unknown adapter."""
        parts, generation = self._accepting_parts(), generations[0]
        try:
            streams: list[RequestStream] = []
            for each in generations:
                request = self._make(each, parts, streams[-1].request if each.sample_index and streams else None)
                text = None if parts.text is None or each.pooling is not None else OutputText(each, self.tokenizer)
                streams.append(RequestStream(request, text, self._end_request))
            displaced = self._intake.begin(streams)
        except (ContextLengthError, QueueFullError, QuotaExceededError) as error:
            notify(self.metrics.on_rejected, generation.tier or generation.priority.name.lower(), error.reason)
            raise
        self._deliver(displaced)
        for generation, stream in zip(generations, streams):
            if generation.sample_index == 0:
                notify(self.metrics.on_submitted, generation.num_samples)
            notify(self._tracer.on_submitted, stream.request)
            self._streams[stream.request_id] = stream
        return streams

    def hold_adapter(self, name: str) -> tuple[str, Callable[[], None]]:
        """`LiveAdapters.hold`. Raises like `submit`."""
        self._accepting_parts()
        self.names.check(name)
        return self.adapters.hold(name)

    def reset_prefix_cache(self) -> bool:
        """Forgets prefixes in memory, not on disk. Returns False, and does nothing, while requests hold blocks."""
        return self._loaded_parts().reset_prefix_cache()

    async def check_pool_moves(self) -> int:
        """Returns how many copies of K or V buffers by MLX this method has found since its first call. It stays 0 while
        kernels write in place, as they should. Waits for launched steps."""
        cache = self._loaded_parts().runner.cache
        return await asyncio.wrap_future(self._around.thread.call(cache.check_moves))

    @property
    def idle_kv_bytes(self) -> int:
        """The most bytes that `give_memory` could free now."""
        return 0 if self._parts is None else sum(guard.num_idle_bytes for guard in self._parts.guards)

    async def give_memory(self, num_bytes: int, timeout_s: float = 5.0) -> int:
        """Frees idle KV blocks, cached ones included, up to `num_bytes`, for other models. Waits up to `timeout_s` for
        each KV pool. Returns how many bytes are free for them. Requests continue."""
        is_ready = self.state is EngineState.READY
        return await self._loaded_parts().give_memory(num_bytes, timeout_s) if is_ready else 0

    def stats(self) -> EngineStats:
        """Returns the current values and all counters, which include earlier loads of the model. While the model is not
        loaded, only the counters of earlier loads are set."""
        past = EngineStats() if self._metrics is None else self._metrics.past
        if self._parts is None:
            return EngineStats().plus(past)
        used = map(self.adapters.used_by, (RequestStatus.RUNNING, RequestStatus.WAITING))
        running, waiting = (tuple(map(self.names.with_adapter, names)) for names in used)
        now = current_stats(self._parts, len(self.names.adapters), running, waiting)
        return now.plus(self._parts.scheduler.counters, self._parts.guard.counters, past)

    # --- internals ------------------------------------------------------------------------------------------

    def _make(self, generation: GenerationRequest, parts: EngineParts, sample: Request | None) -> Request:
        """The request, which has not entered the queue."""
        if generation.adapter_key is None:
            self.names.check(generation.adapter)
        if generation.request_id in self._streams:
            message = f"The request id {generation.request_id} is in use; choose another."
            raise InvalidRequestError(message, "request_id")
        if parts.text is None and generation.sampling.stop:
            raise InvalidRequestError("Stop strings need a tokenizer, and this model has none.", "stop")
        if generation.pooling is None:
            check_generates(parts.pooling, self.model_name)
        request = make_request(generation, self._limits, self._clock(), sample)
        if generation.adapter is not None:
            request.adapter_key = generation.adapter_key or parts.loaded.adapters.by_name[generation.adapter]
        return request

    def _fill(self) -> None:
        """Lets more requests of accepted calls enter the queue."""
        if self.state.is_loaded:
            self._deliver(self._intake.fill())

    def _requests(self) -> Iterator[Request]:
        return (stream.request for stream in self._streams.values())

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _unload(self) -> None:
        if self._metrics is not None:
            self._metrics.past = self.stats()
        self._given, self._loop_task = GivenModels(), None
        if self._parts is not None:
            await unload_parts(self._take_parts(), self._around, has_failed=self.state is EngineState.DEAD)

    def _take_parts(self) -> EngineParts:
        """The parts, of which the engine keeps no reference, so that they can be freed."""
        parts, self._parts = self._loaded_parts(), None
        del self._intake, self._limits, self.adapters
        return parts

    async def _run(self) -> None:
        """Runs the scheduler's loop. An error in it fails all requests and makes the engine dead."""
        parts = self._loaded_parts()
        try:
            executor = ObservedExecutor(parts.executor, parts.images, self.metrics, self._tracer)
            await parts.scheduler.run(executor, self._clock, self._deliver)
        except asyncio.CancelledError:  # by the end of the event loop, unless it was by who cancels `stop`
            self.state = EngineState.DEAD
            self.error = "its event loop has ended, as at the end of asyncio.run; start, use and stop it in one loop"
            self._fail_streams(self._death_error)
            raise
        except BaseException as error:  # a panic in a native library is not an Exception
            self._die(error, parts)

    def _die(self, error: BaseException, parts: EngineParts) -> None:
        self.state = EngineState.DEAD
        self.error = f"{type(error).__name__}: {error}"
        logger.error("The engine of %s has died: %s", self.model_name, self.error, exc_info=error)
        self._fail_streams(self._death_error)
        try:
            parts.scheduler.fail_all()
        except Exception:  # the error may have interrupted a step
            logger.exception("The scheduler of %s was left as it is", self.model_name)
        self._around.on_death()

    def _death_error(self) -> EngineDeadError:
        return EngineDeadError(f"The engine of {self.model_name} has died: {self.error}")

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Puts a step's outputs on their streams. The readers are called later, in one callback after the scheduler's
        turn, so that the next step is submitted to the device before anything is sent to clients."""
        if not outputs:
            return
        if not self._pending_callbacks:
            asyncio.get_running_loop().call_soon(self._notify_readers)
        if self._intake.has_calls:
            self._pending_callbacks[self._fill] = None
            outputs = [output for output in outputs if output.error is None or not self._intake.takes_back(output)]
        now, streams = self._clock(), self._streams
        delivered = [(stream, output) for output in outputs if (stream := streams.get(output.request_id)) is not None]
        notify(self.metrics.on_tokens, [stream.request for stream, output in delivered if output.new_token_ids], now)
        for stream, output in delivered:
            self._pending_callbacks[stream.on_output] = None
            try:
                stream.put(output, now)
            except Exception as error:  # an error in one request's text must not end other requests
                logger.exception("The output of %s cannot be shown", output.request_id)
                self._loaded_parts().scheduler.finish_request(output.request_id, FinishReason.ERROR)
                stream.fail(ServeError(f"The output cannot be turned into text: {error}"))
                self._forget(output.request_id, FinishReason.ERROR)
            if stream.is_complete:
                self._forget(output.request_id, output.finish_reason or FinishReason.STOP, output.error)

    def _notify_readers(self) -> None:
        callbacks, self._pending_callbacks = self._pending_callbacks, {}
        call_each(callbacks)

    def _forget(self, request_id: str, reason: FinishReason, error: ServeError | None = None) -> None:
        """Removes the stream of a request that has ended, and reports its end to metrics and traces once."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            request, now = stream.request, self._clock()
            if isinstance(error, (QueueTimeoutError, QueueFullError)):
                notify(self.metrics.on_rejected, request.tier, error.reason)
            stream.summary = notify(self.metrics.on_finished, request, reason, now)
            notify(self._tracer.on_finished, request, reason, now)
            self.adapters.on_end()

    def _end_request(self, request_id: str, reason: FinishReason, num_void: int) -> None:
        self._forget(request_id, reason)
        self.scheduler.finish_request(request_id, reason, num_void)
        self._intake.fill_soon(self._fill)

    def _fail_streams(self, new_error: Callable[[], ServeError]) -> list[str]:
        """Fails every stream, and returns the ids of their requests. Each stream gets its own exception, because one
        exception that is raised many times collects all their tracebacks."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.fail(new_error())
            self._forget(stream.request_id, FinishReason.ERROR)
        return [stream.request_id for stream in streams]

    def _loaded_parts(self) -> EngineParts:
        if self._parts is None:
            raise OverloadedError(f"The model {self.model_name} is not loaded ({self.state.value}).", _SHUTDOWN_RETRY_S)
        return self._parts

    def _accepting_parts(self) -> EngineParts:
        if self.state is EngineState.DEAD:
            raise self._death_error()
        if self.state is not EngineState.READY:
            raise OverloadedError(f"The model {self.model_name} is {self.state.value}.", _SHUTDOWN_RETRY_S)
        if self._loop_task is not None and self._loop_task.get_loop() is not asyncio.get_running_loop():
            raise InvalidRequestError(f"{self.model_name} was started in another event loop; use it in that one.")
        return self._loaded_parts()

    def _text(self) -> TextTools:
        text = self._loaded_parts().text
        if text is None:
            raise InvalidRequestError(
                f"The model {self.model_name} has no tokenizer; send token ids, and ask for token ids back.", "prompt"
            )
        return text
