"""What the generating routes have in common: ids, the job, and how an answer is sent.

`usage` and `metrics` as OpenAI's and vLLM's clients read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.chat_plan import ChatPlan
from mlx_server.api.collect import Answer, Usage, collect
from mlx_server.api.context import ServerContext
from mlx_server.api.generation import Generation, GenerationJob
from mlx_server.api.generation_service import lease_engine
from mlx_server.api.middleware import REQUEST_ID_HEADER, load_headers, until_disconnect
from mlx_server.api.openai.fields import GenerationFields
from mlx_server.api.openai.logprobs import TokenNames
from mlx_server.api.sse import event_stream, openai_stream
from mlx_server.api.text_turns import TextTurn, turn_of
from mlx_server.engine.engine import AsyncEngine
from mlx_server.outputs import RequestTimings
from mlx_server.request import Priority
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and who answers it, with which adapter. `request_id` is the client's where it gave one."""

    request: Request
    context: ServerContext
    engine: AsyncEngine
    adapter: str | None
    caller: Caller
    request_id: str

    @property
    def turn(self) -> TextTurn:
        """When the request's text is worked on."""
        return turn_of(self.request)

    @property
    def model_name(self) -> str:
        """What the answer says that it is from."""
        return self.engine.names.with_adapter(self.adapter)

    @property
    def headers(self) -> dict[str, str]:
        """Of the response: the id, and the load for routers that ask."""
        return {REQUEST_ID_HEADER: self.request_id, **load_headers(self.request.headers, self.engine.stats())}

    def names(self, as_ids: bool) -> TokenNames:
        """How the engine's tokens are written."""
        return TokenNames(self.engine.tokenizer if self.engine.has_tokenizer else None, as_ids)

    def priority(self, body: GenerationFields) -> Priority:
        """The caller's on this path, lowered where the client wishes."""
        return self.caller.priority_at(self.request.url.path, body.priority)

    def extra_keys(self, body: GenerationFields) -> tuple[str, ...]:
        """What separates the request's prefixes from those of others."""
        return (*self.caller.cache_keys(self.context.config.cache.isolation), *body.extra_keys)

    def chat_job(
        self, plan: ChatPlan, body: GenerationFields, sampling: SamplingParams, response_id: str, n: int = 1
    ) -> GenerationJob:
        """The answer, or `n` answers, to a planned chat in any protocol."""
        return GenerationJob(
            request_id=self.request_id,
            response_id=response_id,
            prompts=[plan.prompt],
            sampling=sampling,
            n=n,
            caller=self.caller,
            priority=self.priority(body),
            extra_keys=self.extra_keys(body),
            adapter=self.adapter,
            new_parser=plan.new_parser,
            new_constraint=plan.new_constraint,
            kept_token_ids=plan.kept_token_ids,
            continues_text=plan.continues_text,
        )

    @property
    def keep_alive_s(self) -> float:
        """The longest silence of a stream; 0 is no bound."""
        return self.context.config.server.sse_keep_alive_s

    async def begin(self, job: GenerationJob) -> Generation:
        """Starts a job that is to be streamed and waits for its first output, but no longer than a stream may be
        silent. Raises what refuses or ends it until then: clients and routers try again by an answer's status, which
        cannot be changed once the stream has begun."""
        with contextlib.ExitStack() as undo:
            generation = self._start(job)
            undo.callback(generation.close)
            await until_disconnect(self.request, generation.wait_for_output(self.keep_alive_s or None))
            undo.pop_all()
        return generation

    async def stream(self, job: GenerationJob, chunks: Callable[[Generation], AsyncGenerator[bytes, None]]) -> Response:
        """Streams what `chunks` makes of `job`. Raises what `begin` raises."""
        generation = await self.begin(job)
        return event_stream(openai_stream(chunks(generation)), self.keep_alive_s, generation.close, self.headers)

    async def whole(self, job: GenerationJob, body: Callable[[Answer], dict[str, Any]]) -> Response:
        """Runs `job` to its end and sends what `body` makes of it. Raises `ServeError`."""
        with contextlib.closing(self._start(job)) as generation:
            answer = await until_disconnect(self.request, collect(generation, job.n))
        headers = self.headers
        if job.sampling.logprobs is None and job.sampling.prompt_logprobs is None:
            return JSONResponse(body(answer), headers=headers)
        # The names of twenty tokens at each of thousands of positions: streams would stand still meanwhile.
        return await self.turn.in_thread(lambda: JSONResponse(body(answer), headers=headers))

    def _start(self, job: GenerationJob) -> Generation:
        generation = self.context.generations.start(self.engine, job)
        self.request.state.is_counted = True
        self.turn.end()
        return generation


async def open_exchange(
    body: GenerationFields, request: Request, context: ServerContext, *, generates: bool = True
) -> Exchange:
    """Checks the body and finds the engine, which is loaded first if need be. Raises `ServeError`; if the request
    `generates`, also for a caller whose quota others have used up while it waited for its turn."""
    body.check()
    if body.client_id is not None:
        request.state.request_id = body.client_id
    caller = caller_of(request)
    if generates:
        context.quotas.check(caller, Demand())
    engine = await lease_engine(request, context.pool, body.model)
    return Exchange(request, context, engine, context.pool.offer(body.model).adapter, caller, request.state.request_id)


def usage_body(usage: Usage) -> dict[str, Any]:
    """Always with the details: they say how much of the prompt was not computed again."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def metrics_fields(timings: RequestTimings | None, num_output_tokens: int) -> dict[str, Any]:
    """`metrics`, the milliseconds of a request's stages; nothing where a job has no single timing.

    `generation_time_ms` is from the first output token to the end, `mean_itl_ms` the mean gap in it.
    """
    if timings is None or timings.finished_s is None:
        return {}
    first, end = timings.first_token_s, timings.finished_s
    generation_s = None if first is None else end - first
    gaps = max(num_output_tokens - 1, 0)
    has_gaps = generation_s is not None and gaps > 0 and generation_s > 0
    metrics = {
        "time_to_first_token_ms": _milliseconds(None if first is None else first - timings.arrival_s),
        "queue_time_ms": _milliseconds((timings.first_scheduled_s or end) - timings.arrival_s),
        "generation_time_ms": _milliseconds(generation_s),
        "mean_itl_ms": _milliseconds(generation_s / gaps) if generation_s and has_gaps else None,
        "tokens_per_second": round(gaps / generation_s, 3) if generation_s and has_gaps else None,
    }
    return {"metrics": metrics}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
