"""What `bench throughput` compares, and on what: workloads of random token ids, made by name and seed, and the systems
that generate them: this engine, and the two ways in which mlx-lm itself generates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, stream_generate

from mlx_server import LLM, SamplingParams
from mlx_server.bench.serve.workloads import SHAPES, Shape, Span, fixed_shape
from mlx_server.errors import ServeError
from mlx_server.runtime.models.loader import LoadedModel

_POOLS_BESIDE_MLX = frozenset({"cpu"})
"""Backends whose pools MLX's own count of memory does not see."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Generate exactly `num_output_tokens` after the prompt, greedily, whatever comes."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the start, in their order of arrival."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    def first(self, count: int | None) -> Workload:
        """The same with its first `count` requests only; None is all."""
        return Workload(self.name, self.requests[:count])

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


WORKLOADS: MappingProxyType[str, Shape] = MappingProxyType(
    {name: SHAPES[name] for name in ("uniform", "shared-prefix", "mixed")} | {"decode": fixed_shape(64, 32, 256)}
)
"""Those of `bench serve`, and decode, in which nearly all steps decode."""


def make_workload(name: str, vocab_size: int, seed: int) -> Workload:
    """One of `WORKLOADS`; name, vocabulary and seed decide every token. `KeyError` for any other name."""
    return _draw(name, WORKLOADS[name], vocab_size, f"{name}:{seed}")


def make_warm_up(vocab_size: int) -> Workload:
    """A few short requests, too short to leave a full block in any cache."""
    return _draw("warm-up", fixed_shape(2, 8, 4), vocab_size, "warm-up")


def _draw(name: str, shape: Shape, vocab_size: int, seed: str) -> Workload:
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    def length(span: Span) -> int:
        return span.low if span.low == span.high else span.draw(rng)

    prefix = tokens(shape.prefix_len)
    requests = (
        WorkloadRequest(prefix + tokens(length(shape.input_len)), length(shape.output_len))
        for _ in range(shape.num_prompts)
    )
    return Workload(name, tuple(requests))


@dataclass(frozen=True, slots=True)
class Generated:
    """Output ids of each request in the workload's order.

    `num_cached_tokens` counts prompt tokens that a prefix cache served, None where there is no such cache;
    `num_host_bytes` the memory in use beside MLX's own.
    """

    token_ids: tuple[tuple[int, ...], ...]
    num_cached_tokens: int | None = None
    num_host_bytes: int = 0


class System(Protocol):
    """One row of the table."""

    @property
    def label(self) -> str: ...

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
        """Gives the function that generates. What it builds up, a prefix cache say, ends with the session."""
        ...


def check_lengths(workload: Workload, generated: Generated, label: str) -> None:
    """Raises `ServeError` unless every request got exactly the tokens it asked for."""
    for index, (request, token_ids) in enumerate(zip(workload.requests, generated.token_ids, strict=True)):
        if len(token_ids) != request.num_output_tokens:
            raise ServeError(
                f"{label}: request {index} got {len(token_ids)} output tokens instead of "
                f"{request.num_output_tokens}; its speed cannot be compared. Is the context or the KV pool too small?"
            )


@dataclass(frozen=True, slots=True)
class OurEngine:
    """This project's engine with one setting; the fields are `LLM`'s."""

    model: LoadedModel
    attention_backend: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: str

    @property
    def label(self) -> str:
        return f"mlx-serve, {self.attention_backend}"

    @contextmanager
    def session(self) -> Iterator[Callable[[Workload], Generated]]:
        """An engine of its own on the shared weights: its prefix cache starts empty."""
        with LLM(
            self.model,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory=self.kv_cache_memory,
            attention_backend=self.attention_backend,
        ) as llm:
            yield lambda workload: _generate(llm, workload)


def _generate(llm: LLM, workload: Workload) -> Generated:
    completions = llm.generate(
        [request.prompt_token_ids for request in workload.requests],
        [
            SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
            for request in workload.requests
        ],
        progress=False,
    )
    return Generated(
        token_ids=tuple(completion.token_ids for completion in completions),
        num_cached_tokens=sum(completion.num_cached_tokens for completion in completions),
        num_host_bytes=_host_bytes(llm),
    )


def _host_bytes(llm: LLM) -> int:
    """What the pool takes beside MLX: such pools cost nothing before a block is written."""
    if llm.info.backend not in _POOLS_BESIDE_MLX:
        return 0
    return llm.stats().num_cached_blocks * llm.info.block_bytes


@dataclass(frozen=True, slots=True)
class Sequential:
    """`stream_generate`, one request after the other; its `generate_step` for a model without a tokenizer.

    `tokenizer` is mlx-lm's wrapper, None for a model of token ids only; it must know no end token.
    """

    model: Any
    tokenizer: Any | None
    label: str = "mlx-lm, one by one"

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
        """Nothing is kept between calls."""
        return nullcontext(self._generate)

    def _generate(self, workload: Workload) -> Generated:
        return Generated(tuple(tuple(self._tokens(request)) for request in workload.requests))

    def _tokens(self, request: WorkloadRequest) -> list[int]:
        prompt = mx.array(request.prompt_token_ids)
        count = request.num_output_tokens
        if self.tokenizer is None:
            return [token for token, _ in generate_step(prompt, self.model, max_tokens=count)]
        return [r.token for r in stream_generate(self.model, self.tokenizer, prompt, max_tokens=count)]


@dataclass(frozen=True, slots=True)
class Batched:
    """`BatchGenerator`, which mlx-lm's own server uses, with one setting of its prefill."""

    model: Any
    prefill_step_size: int
    prefill_batch_size: int
    completion_batch_size: int

    @property
    def label(self) -> str:
        return f"mlx-lm batch {self.prefill_step_size}x{self.prefill_batch_size}"

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
        """Nothing is kept between calls."""
        return nullcontext(self._generate)

    def _generate(self, workload: Workload) -> Generated:
        generator = BatchGenerator(
            self.model,
            prefill_step_size=self.prefill_step_size,
            prefill_batch_size=self.prefill_batch_size,
            completion_batch_size=self.completion_batch_size,
        )
        with closing(generator):
            uids = generator.insert(
                [list(request.prompt_token_ids) for request in workload.requests],
                max_tokens=[request.num_output_tokens for request in workload.requests],
            )
            outputs: dict[int, list[int]] = {uid: [] for uid in uids}
            num_running = len(uids)
            while num_running:
                for response in generator.next_generated():
                    outputs[response.uid].append(response.token)
                    num_running -= response.finish_reason is not None
        return Generated(tuple(tuple(outputs[uid]) for uid in uids))
