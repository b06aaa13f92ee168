"""One request to a generating route, in any protocol: its engine, its plan, and its response.

body -> open_exchange() -> Exchange -> Plan -> Exchange.answer() with the protocol's Writer -> Response
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import Read
from mlx_server.api.answers.collect import Answer, collect
from mlx_server.api.answers.generation import Generation, GenerationJob, OutputEvent, Plan, Prompt
from mlx_server.api.answers.generation_service import lease_engine
from mlx_server.api.answers.images import RequestImages
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.context import ServerContext
from mlx_server.api.errors import ErrorInfo, error_info
from mlx_server.api.http import sse
from mlx_server.api.http.middleware import REQUEST_ID_HEADER
from mlx_server.api.http.text_turns import TextTurn, encode_in_pieces, turn_of
from mlx_server.api.openai.fields import GenerationFields
from mlx_server.api.probes import load_headers
from mlx_server.engine.embeddings import check_generates
from mlx_server.engine.engine import AsyncEngine
from mlx_server.outputs import CompletionDelta
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

NOT_ENFORCED_HEADER = "x-schema-not-enforced"
"""Names the keywords of the request's schema that its grammar does not enforce."""

MAX_POSITIONS = 64
"""Log-probabilities that a stream writes in one turn of the event loop: 50 microseconds a position with 20 tokens."""


class Writer(Protocol):
    """Writes one answer in a protocol's format: complete, or as the events of a stream. For a stream, the
    result of a method may be empty. `keep_alive` is sent on a silent stream."""

    response_id: str
    keep_alive: bytes = sse.KEEP_ALIVE
    media_type: str = sse.EVENT_STREAM

    def full_body(self, answer: Answer) -> dict[str, Any] | bytes:
        """Returns the body of an answer that is not streamed; bytes are JSON already."""
        ...

    def opening(self, has_output: bool) -> bytes:
        """Returns what comes before all output. `has_output`: some output follows at once."""
        return b""

    def write(self, event: OutputEvent) -> bytes: ...

    def closing(self) -> bytes:
        """Returns what follows the last output."""
        return b""

    def failure(self, error: ErrorInfo) -> bytes:
        """Returns what ends a stream after an error: its status was sent long before."""
        ...

    async def settle(self) -> None:
        """Does what must be done before the client sees the end of the answer."""
        return

    def close(self) -> None:
        """Called however the stream ends, also when the client has disconnected."""
        return


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, with the engine and the adapter that answer it. `request_id` is the client's id, if it sent one."""

    request: Request
    context: ServerContext
    body: GenerationFields
    engine: AsyncEngine
    adapter: str | None
    caller: Caller
    request_id: str
    sampling: SamplingParams

    @property
    def turn(self) -> TextTurn:
        """The request's turn, in which its text is processed."""
        return turn_of(self.request)

    @property
    def model_name(self) -> str:
        return self.engine.names.with_adapter(self.adapter)

    async def plan(self, read: Read, images: RequestImages | None = None) -> Plan:
        """Plans the chat that `read` makes of the body, in the request's turn; `images` are for several plans. Raises
        `ServeError`."""
        return await self.context.chats.plan(self.engine, read, self.turn, images)

    async def render(self, read: Read) -> Prompt:
        """Returns the chat's prompt only, and counts its tokens as read for the caller's quota. Raises `ServeError`."""
        prompt = await self.context.chats.render(self.engine, read, self.turn)
        self.context.quotas.add_read(self.caller, len(prompt.token_ids))
        return prompt

    async def answer(self, plan: Plan, writer: Writer) -> Response:
        """Generates what is planned and returns the response, written by `writer`: streamed if the body asks for it.
        Raises the `ServeError` that refuses the request, or that ends it before anything is sent."""
        if not self.body.stream:
            return await self._full_response(plan, writer)
        keep_alive_s = self.context.config.server.sse_keep_alive_s
        generation = await self._begin(plan, writer, keep_alive_s)

        def close() -> None:
            generation.close()
            writer.close()

        write_stream = partial(_write_stream, generation, writer)
        headers = self.headers(plan)
        return sse.EventStream(write_stream, keep_alive_s, close, headers, writer.keep_alive, writer.media_type)

    async def begin_alone(self, plan: Plan, writer: Writer) -> Callable[[sse.PieceWriter], Coroutine[Any, Any, None]]:
        """Starts to generate what is planned, for as long as it takes, whether or not the client stays. Call what it
        returns once: it writes the stream, and keeps the model until then. Raises the `ServeError` that refuses the
        request."""
        generation = await self._start(plan, writer)
        at_end = self.request.state.leases.pop_all()
        at_end.callback(writer.close)
        at_end.callback(generation.close)

        async def write_stream(out: sse.PieceWriter) -> None:
            with at_end:
                await _write_stream(generation, writer, out)

        return write_stream

    async def _begin(self, plan: Plan, writer: Writer, timeout_s: float) -> Generation:
        """Starts to generate and waits for the first output, but no longer than `timeout_s` (0: no limit), since a
        stream must not be silent longer. Clients and routers decide by the status whether to retry, and the status
        cannot change once the stream has begun."""
        with contextlib.ExitStack() as undo:
            generation = await self._start(plan, writer)
            undo.callback(generation.close)
            await generation.wait_for_output(timeout_s or None)
            undo.pop_all()
        return generation

    async def _full_response(self, plan: Plan, writer: Writer) -> Response:
        with contextlib.closing(await self._start(plan, writer)) as generation:
            answer = await collect(generation, self.body.num_samples)
        headers, sampling = self.headers(plan), self.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None and not self.body.return_token_ids:
            body = writer.full_body(answer)
            content = body if isinstance(body, bytes) else to_json(body, inf_nan_mode="null")
        else:  # 20 tokens at each of thousands of positions, or the prompt's ids for each of a thousand choices
            content = await self.turn.in_thread(lambda: encode_in_pieces(writer.full_body(answer), "choices"))
        await writer.settle()
        return Response(content, headers=headers, media_type="application/json")

    async def _start(self, plan: Plan, writer: Writer) -> Generation:
        self.body.forget_prompt()
        self.request.state.held_body.release()
        generation = await self.context.generations.start(self.engine, self._job(plan, writer.response_id))
        self.request.state.is_counted = True
        self.turn.end()
        return generation

    def _job(self, plan: Plan, response_id: str) -> GenerationJob:
        sampling = self.sampling
        if plan.end_token_ids and not sampling.ignore_eos:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *plan.end_token_ids))
        # Requests with different keys (isolation, salt) do not share prefixes.
        keys = self.caller.cache_keys(self.context.config.cache.isolation)
        return GenerationJob(
            request_id=self.request_id,
            response_id=response_id,
            plan=plan,
            sampling=sampling,
            n=self.body.num_samples,
            caller=self.caller,
            priority=self.caller.priority_at(self.request.url.path, self.body.priority),
            extra_keys=keys if self.body.cache_salt is None else (*keys, self.body.cache_salt),
            adapter=self.adapter,
        )

    def headers(self, plan: Plan) -> dict[str, str]:
        """The response headers: the request id, schema keywords that are not enforced, and the load if a router asks
        for it."""
        notes = {NOT_ENFORCED_HEADER: ", ".join(plan.notes)} if plan.notes else {}
        return {REQUEST_ID_HEADER: self.request_id, **notes, **load_headers(self.request.headers, self.engine.stats())}


async def open_exchange(
    body: GenerationFields, request: Request, context: ServerContext, *, generates: bool = True
) -> Exchange:
    """Checks the body and gets the engine; its model is loaded first if necessary. Raises `ServeError`; if the request
    `generates`, also if other requests of the caller have used up its quota while this one waited for its turn."""
    body.check()
    if body.client_id is not None:
        request.state.request_id = body.client_id
    caller = caller_of(request)
    if generates:
        context.quotas.check(caller, Demand())
    engine = await lease_engine(request, context.pool, body.model)
    if generates:
        check_generates(engine.pooling, engine.model_name)
    adapter = context.pool.offer(body.model).adapter
    if body.open_schemas is None:
        body.open_schemas = context.config.server.open_schemas
    sampling = body.sampling(engine.default_sampling)
    return Exchange(request, context, body, engine, adapter, caller, request.state.request_id, sampling)


async def _write_stream(generation: Generation, writer: Writer, out: sse.PieceWriter) -> None:
    """Writes a stream. Events that are available at the same time are written as one piece, or as several in turns of
    the event loop if their log-probabilities are many: of a long prompt, or while the client was slow."""
    sampling = generation.job.sampling
    has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    held: list[list[OutputEvent]] = []

    def emit(events: list[OutputEvent]) -> bool:
        if has_logprobs:
            events, *later = _in_turns(events)
            held.extend(later)
        piece = writer.write(events[0]) if len(events) == 1 else b"".join(map(writer.write, events))
        return (not piece or out.write(piece)) and not held

    async def drain() -> None:
        await out.drain()
        while held:
            await asyncio.sleep(0)
            if piece := b"".join(map(writer.write, held.pop(0))):
                out.write(piece)
                await out.drain()

    try:
        await _write_opening(generation, writer, out)
        await generation.feed(emit, drain)
        last = writer.closing()
    except Exception as error:
        info = error_info(error)
        if info.status == 500:
            logger.exception("A stream failed")
        last = writer.failure(info)
    await writer.settle()
    if last:
        out.write(last)
    await out.drain()


async def _write_opening(generation: Generation, writer: Writer, out: sse.PieceWriter) -> None:
    """Nothing holds the opening afterwards, which may have megabytes."""
    opening = writer.opening(generation.has_output)
    if opening and not out.write(opening):
        await out.drain()


def _in_turns(events: Iterable[OutputEvent]) -> list[list[OutputEvent]]:
    """The events in lists of at most `MAX_POSITIONS` log-probabilities. Those of a prompt are cut into several events;
    those of an event's tokens are not."""
    turns: list[list[OutputEvent]] = [[]]
    room = MAX_POSITIONS
    for event in events:
        for part in _cut(event):
            num_positions = len(part.logprobs) + len(part.delta.prompt_logprobs)
            if num_positions > room and turns[-1]:
                turns.append([])
                room = MAX_POSITIONS
            turns[-1].append(part)
            room -= num_positions
    return turns


def _cut(event: OutputEvent) -> Iterator[OutputEvent]:
    """The event; before it, one for each piece of its prompt's log-probabilities but the last."""
    delta, known = event.delta, event.delta.prompt_logprobs
    num_before = (max(0, len(known) - 1) // MAX_POSITIONS) * MAX_POSITIONS
    for start in range(0, num_before, MAX_POSITIONS):
        piece = CompletionDelta(
            "",
            (),
            num_prompt_tokens=delta.num_prompt_tokens,
            num_cached_tokens=delta.num_cached_tokens,
            prompt_logprobs=known[start : start + MAX_POSITIONS],
        )
        yield OutputEvent(event.index, delta=piece)
    if num_before:
        event = replace(event, delta=replace(delta, prompt_logprobs=known[num_before:]))
    yield event
