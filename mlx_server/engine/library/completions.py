"""What `LLM` and `AsyncLLM` share: requests made of prompts, chats and inputs, and results made of their outputs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tqdm import tqdm

from mlx_server.engine.embeddings import FloatArray
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.grammar.constraints import CompiledGrammar
from mlx_server.engine.grammar.spec import parse_structured
from mlx_server.engine.library.inputs import (
    Chat,
    Prompt,
    as_prompts,
    as_tools,
    bare_prompt,
    for_each,
    with_sources,
)
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.text.reasoning import ReasoningConstraint, ReasoningMarkers
from mlx_server.engine.vision.decoding import UnreadableImageError, read_base64
from mlx_server.engine.vision.parts import ImageParts, Pictures
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import CompletionDelta, PositionLogprobs
from mlx_server.request import FinishReason, PoolingParams, PromptImage, TokenConstraint, Vector
from mlx_server.sampling_params import SamplingParams, plain_ints

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `text` is empty for a model without a tokenizer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its `SamplingParams.n` answers. The properties are those of the first answer."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class PromptRequests:
    """A prompt and its requests, one for each answer."""

    text: str | None
    requests: tuple[GenerationRequest, ...]


class RequestBuilder:
    """Makes requests of prompts and chats. Any thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def prompts(self, prompts: Any, sampling: Any, adapters: Any) -> list[PromptRequests]:
        """Makes the requests of each prompt. `sampling` and `adapters` are one for all prompts, or one for each. Raises
        `InvalidRequestError`."""
        each = as_prompts(prompts)
        samplings = for_each(sampling, len(each), "prompts", "sampling_params", SamplingParams)
        return list(map(self.prompt, each, samplings, for_each(adapters, len(each), "prompts", "adapters", str)))

    def prompt(self, prompt: Prompt, sampling: SamplingParams | None, adapter: str | None) -> PromptRequests:
        """Raises `InvalidRequestError`."""
        prompt = bare_prompt(prompt)
        if isinstance(prompt, str):
            token_ids: Sequence[int] = self._engine.tokenizer.encode(prompt)
            return self._build(prompt, token_ids, sampling, adapter, continues_text=True)
        return self._build(None, plain_ints(prompt, "prompt"), sampling, adapter, continues_text=True)

    def chat(
        self,
        messages: Chat,
        sampling: SamplingParams | None,
        adapter: str | None,
        tools: Sequence[dict[str, Any]] | None,
        options: ChatOptions,
    ) -> PromptRequests:
        """Raises `InvalidRequestError`."""
        tools = as_tools(tools)
        seeing = self._engine.vision
        parts = None if seeing is None else ImageParts()
        marked = messages if parts is None else parts.mark_messages(with_sources(messages, self._max_pixels))
        pictures = None if seeing is None or parts is None or not parts.found else self._prepared(seeing, parts)
        prompt = self._engine.chat.format(marked, tools, options, pictures=pictures)
        dialect = self._engine.chat.dialect
        return self._build(
            prompt.text,
            prompt.token_ids,
            sampling,
            adapter,
            continues_text=options.continue_final_message,
            images=prompt.images,
            kept_token_ids=dialect.kept_token_ids(self._engine.tokenizer, with_tools=bool(tools)),
            reasoning=dialect.reasoning,
            is_open=prompt.opens_reasoning,
        )

    @property
    def _max_pixels(self) -> int:
        return self._engine.config.server.max_image_pixels

    def _prepared(self, seeing: SeeingModel, parts: ImageParts) -> Pictures:
        prepared = {}
        for index, part in enumerate(parts.found):
            try:
                if part.source.lower().startswith(("http:", "https:", "file:")):
                    raise UnreadableImageError(
                        "is at a URL, which the library does not open. Give its bytes, its pathlib.Path or a data URL"
                    )
                prepared[index] = seeing.prepare(read_base64(part.source), self._max_pixels)
            except UnreadableImageError as error:
                if not part.is_noted:
                    raise InvalidRequestError(f"{part.where} is an image that {error}.", part.where) from error
        return Pictures(seeing, parts, prepared)

    def _build(
        self,
        text: str | None,
        token_ids: Sequence[int],
        sampling: SamplingParams | None,
        adapter: str | None,
        *,
        continues_text: bool,
        images: tuple[PromptImage, ...] = (),
        kept_token_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningMarkers | None = None,
        is_open: bool = False,
    ) -> PromptRequests:
        sampling = self._engine.default_sampling if sampling is None else sampling
        grammar = self._grammar(sampling)
        if grammar is not None:
            kept_token_ids |= grammar.kept_token_ids
        adapter = None if adapter == self._engine.names.merged else adapter  # all requests use it
        each = replace(sampling, n=1, structured_outputs=None)
        number = next(_ids)
        requests = [
            GenerationRequest(
                request_id=f"llm-{number}-{index}",
                prompt_token_ids=token_ids,
                sampling=each.of_sample(index),
                adapter=adapter,
                num_samples=sampling.n,
                sample_index=index,
                constraint=None if grammar is None else self._constraint(grammar, reasoning, is_open),
                kept_token_ids=kept_token_ids,
                continues_text=continues_text,
                reasoning=None if reasoning is None else reasoning.span(is_open),
                images=images,
            )
            for index in range(sampling.n)
        ]
        return PromptRequests(text, tuple(requests))

    def _constraint(
        self, grammar: CompiledGrammar, reasoning: ReasoningMarkers | None, is_open: bool
    ) -> TokenConstraint:
        """Binds the answer to the grammar, but not the reasoning before it, which the prompt may have opened."""
        answer, engine = grammar.start(), self._engine
        if reasoning is None:
            return answer
        vocab_size = engine.grammars.vocab_size
        return ReasoningConstraint(engine.tokenizer, reasoning, vocab_size, is_open=is_open, answer=answer)

    def _grammar(self, sampling: SamplingParams) -> CompiledGrammar | None:
        if sampling.structured_outputs is None:
            return None
        spec = parse_structured({"structured_outputs": sampling.structured_outputs})
        return None if spec is None else self._engine.grammars.compile(spec)


async def complete(engine: AsyncEngine, prompts: Sequence[PromptRequests], use_tqdm: bool) -> list[Completion]:
    """Completes all prompts in one continuous batch."""
    answers = iter(await run_all(engine, [one.requests for one in prompts], "Completions", use_tqdm))
    return [_completion(one, list(itertools.islice(answers, len(one.requests)))) for one in prompts]


async def run_all(
    engine: AsyncEngine, calls: Iterable[Sequence[GenerationRequest]], what: str, use_tqdm: bool
) -> list[list[CompletionDelta]]:
    """Submits the requests of all calls, and returns the deltas of each request, in the same order. If one fails or the
    wait is cancelled, all are aborted."""
    streams: list[RequestStream] = []
    try:
        for requests in calls:
            streams += engine.submit_all(requests)
        with tqdm(total=len(streams), desc=what, disable=None if use_tqdm else True) as bar:
            return list(await asyncio.gather(*(_deltas(stream, bar) for stream in streams)))
    finally:
        for stream in streams:
            stream.abort()


def _completion(prompt: PromptRequests, answers: Sequence[Sequence[CompletionDelta]]) -> Completion:
    first = answers[0]
    return Completion(
        prompt=prompt.text,
        prompt_token_ids=tuple(prompt.requests[0].prompt_token_ids),
        outputs=tuple(_output(index, deltas) for index, deltas in enumerate(answers)),
        num_cached_tokens=first[-1].num_cached_tokens,
        prompt_logprobs=tuple(itertools.chain.from_iterable(delta.prompt_logprobs for delta in first)),
    )


async def _deltas(stream: RequestStream, bar: tqdm[NoReturn]) -> list[CompletionDelta]:
    deltas = [delta async for delta in stream]
    bar.update()
    return deltas


def _output(index: int, deltas: Sequence[CompletionDelta]) -> CompletionOutput:
    last = deltas[-1]
    assert last.finish_reason is not None
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
    )


@dataclass(frozen=True, slots=True)
class Embedding:
    """One input's vector, float32."""

    prompt_token_ids: tuple[int, ...]
    embedding: FloatArray


async def pool(
    engine: AsyncEngine, inputs: Sequence[Sequence[int]], params: PoolingParams, use_tqdm: bool
) -> list[Vector]:
    """The pooled result of each input, computed in one continuous batch."""
    requests = [
        GenerationRequest(
            request_id=f"llm-{next(_ids)}", prompt_token_ids=token_ids, sampling=SamplingParams(), pooling=params
        )
        for token_ids in inputs
    ]
    results = []
    for (delta,) in await run_all(engine, zip(requests), "Inputs", use_tqdm):
        assert delta.pooled is not None
        results.append(delta.pooled)
    return results
