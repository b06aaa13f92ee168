"""The workloads of `bench throughput`, which are reproducible by name and seed, and the systems that it compares: this
engine, and mlx-lm's two ways to generate.

Most workloads are random token ids. Nothing random can be drafted, so these are chats:

edit        rename one function in a file of 60 lines: nearly all of the answer is in the prompt
tool-calls  repeat a list of tool calls, which differ in a few tokens
chat        write a long letter: little can be drafted, and speculation must not cost time
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from mlx_server import LLM, SamplingParams
from mlx_server.bench.serve.workloads import SHAPES, Shape, Span, fixed_shape
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError, ServeError
from mlx_server.runtime.models.loader import LoadedModel

SPECULATE = ("off", "auto", "ngram", "model", "mtp")


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt, after which exactly `num_output_tokens` are generated, even past an end of sequence."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at the start, in this order. This engine samples with `temperature` and seeds. The other
    systems stay greedy, since the time of a step does not depend on the tokens."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    temperature: float = 0.0

    def first(self, count: int | None) -> Workload:
        """The workload with its first `count` requests only, or all if None. Raises `ConfigError` if it has fewer."""
        if count is not None and count > len(self.requests):
            raise ConfigError(f"--num-requests is {count}, but {self.name} has only {len(self.requests)} requests.")
        return replace(self, requests=self.requests[:count])

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


WORKLOADS: MappingProxyType[str, Shape] = MappingProxyType(
    {name: SHAPES[name] for name in ("uniform", "shared-prefix", "mixed")} | {"decode": fixed_shape(64, 32, 256)}
)
"""Three of `bench serve`, and `decode`, in which nearly all steps decode."""


def make_workload(name: str, vocab_size: int, seed: int) -> Workload:
    """One of `WORKLOADS`, reproducible by name, vocabulary and seed. `KeyError` for any other name."""
    return _draw(name, WORKLOADS[name], vocab_size, f"{name}:{seed}")


def make_warm_up(vocab_size: int) -> Workload:
    """Two requests that are too short to fill a block of a prefix cache."""
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


_NUM_REQUESTS = 16
_NOUNS = ("order", "invoice", "ticket", "customer", "parcel", "payment", "report", "account", "message", "sensor")
_VERBS = ("load", "store", "check", "print", "count", "merge", "split", "update", "remove", "archive")
_TOPICS = (
    *("how bread is baked", "why the sky is blue", "the life of a lighthouse keeper", "how a bicycle stays upright"),
    *("the history of the printing press", "what to pack for a week in the mountains", "how to learn an instrument"),
    *("why cities are built beside rivers", "a day at a small railway station", "how bees find flowers"),
    *("what makes a good teacher", "the uses of salt", "how to repair an old chair", "what the tides are"),
    *("the rules of a fair argument", "how a letter crossed the sea two hundred years ago"),
)


def _edit(rng: random.Random, number: int) -> tuple[str, str]:
    functions = []
    for verb, noun in rng.sample([(verb, noun) for verb in _VERBS for noun in _NOUNS], 12):
        limit = rng.randrange(2, 90)
        functions.append(
            f"def {verb}_{noun}(items, limit={limit}):\n    chosen = [item for item in items if item.{noun} > limit]\n"
            f'    print("{verb}", len(chosen))\n    return chosen\n'
        )
    old = functions[2].partition("(")[0].removeprefix("def ")
    file = "\n".join(functions)
    request = f"Rewrite this file and rename the function {old} to {old}_{number}. Print the whole file.\n\n{file}"
    return request, f"```python\n{functions[0]}"


def _tool_calls(rng: random.Random, number: int) -> tuple[str, str]:
    folders = rng.sample(_NOUNS, 10)
    calls = [
        json.dumps({"name": "read_file", "arguments": {"path": f"src/{folder}/{verb}.py", "limit": 100}})
        for folder, verb in zip(folders, rng.sample(_VERBS, 10))
    ]
    request = "Repeat this list of tool calls three times, one call a line, and nothing else:\n" + "\n".join(calls)
    return request, calls[0].partition(' "arg')[0]


def _chat(rng: random.Random, number: int) -> tuple[str, str]:
    return f"Write a long letter to a friend about {_TOPICS[number % len(_TOPICS)]}.", ""


_KINDS: MappingProxyType[str, tuple[Callable[[random.Random, int], tuple[str, str]], int, float]] = MappingProxyType(
    {"edit": (_edit, 256, 0.0), "tool-calls": (_tool_calls, 192, 0.0), "chat": (_chat, 128, 0.8)}
)
"""By name: a function that gives the user's message and the beginning of the answer (so that small models comply), the
output tokens, and the temperature."""

CHAT_WORKLOADS = tuple(_KINDS)


def make_chat_workload(name: str, tokenizer: Tokenizer | None, seed: int) -> Workload:
    """One of `CHAT_WORKLOADS`, of 16 requests, reproducible by seed and tokenizer. Raises `ConfigError` for a model
    without a chat template, and `KeyError` for any other name."""
    text, num_output_tokens, temperature = _KINDS[name]
    if tokenizer is None or not tokenizer.hf.chat_template:
        raise ConfigError(f"The workload {name} needs chats, but the model has no tokenizer with a chat template.")
    rng = random.Random(f"{name}:{seed}")
    requests = []
    for number in range(_NUM_REQUESTS):
        request, begun = text(rng, number)
        messages = [{"role": "user", "content": request}]
        prompt = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = tuple(tokenizer.encode(prompt + begun, add_special_tokens=False))
        requests.append(WorkloadRequest(token_ids, num_output_tokens))
    return Workload(name, tuple(requests), temperature)


@dataclass(frozen=True, slots=True)
class Generated:
    """Output token ids of each request, in the workload's order. `num_cached_tokens` counts prompt tokens from a prefix
    cache, None without one; `num_host_bytes` is memory in use that MLX does not count."""

    token_ids: tuple[tuple[int, ...], ...]
    num_cached_tokens: int | None = None
    num_host_bytes: int = 0


class System(Protocol):
    """One row of the table."""

    @property
    def label(self) -> str: ...

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
        """Yields the function that generates. Its state, such as a prefix cache, ends with the session."""
        ...


def check_lengths(workload: Workload, generated: Generated, label: str) -> None:
    """Raises `ServeError` unless every request has its number of output tokens."""
    for index, (request, token_ids) in enumerate(zip(workload.requests, generated.token_ids, strict=True)):
        if len(token_ids) != request.num_output_tokens:
            raise ServeError(
                f"{label}: request {index} got {len(token_ids)} output tokens instead of "
                f"{request.num_output_tokens}; its speed cannot be compared. Is the context or the KV pool too small?"
            )


@dataclass(frozen=True, slots=True)
class OurEngine:
    """This project's engine with one combination of settings; the fields are `LLM`'s."""

    model: LoadedModel
    attention_backend: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: str
    speculate: str = "auto"
    draft_model: str | None = None

    @property
    def label(self) -> str:
        drafts = "" if self.speculate == "auto" else f", speculate {self.speculate}"
        return f"mlx-serve, {self.attention_backend}{drafts}"

    @contextmanager
    def session(self) -> Iterator[Callable[[Workload], Generated]]:
        """A new engine on the shared weights, with an empty prefix cache."""
        with LLM(
            self.model,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory=self.kv_cache_memory,
            attention_backend=self.attention_backend,
            speculate=self.speculate,
            draft_model=self.draft_model,
        ) as llm:
            yield lambda workload: _generate(llm, workload)


def _generate(llm: LLM, workload: Workload) -> Generated:
    completions = llm.generate(
        [request.prompt_token_ids for request in workload.requests],
        [
            SamplingParams(
                temperature=workload.temperature, seed=seed, max_tokens=request.num_output_tokens, ignore_eos=True
            )
            for seed, request in enumerate(workload.requests)
        ],
        use_tqdm=False,
    )
    return Generated(
        token_ids=tuple(completion.token_ids for completion in completions),
        num_cached_tokens=sum(completion.num_cached_tokens for completion in completions),
        num_host_bytes=_host_bytes(llm),
    )


def _host_bytes(llm: LLM) -> int:
    """The memory of a KV pool that MLX does not count, which is that of the blocks written so far."""
    return llm.stats().num_cached_blocks * llm.info.block_bytes if llm.info.backend == "cpu" else 0


@dataclass(frozen=True, slots=True)
class Sequential:
    """mlx-lm's `generate_step`, one request after the other."""

    model: Any
    label: str = "mlx-lm, one by one"

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
        return nullcontext(lambda workload: Generated(tuple(map(self._tokens, workload.requests))))

    def _tokens(self, request: WorkloadRequest) -> tuple[int, ...]:
        steps = generate_step(mx.array(request.prompt_token_ids), self.model, max_tokens=request.num_output_tokens)
        return tuple(token for token, _ in steps)


@dataclass(frozen=True, slots=True)
class Batched:
    """mlx-lm's `BatchGenerator`, which its server uses, with one setting of its prefill."""

    model: Any
    prefill_step_size: int
    prefill_batch_size: int
    completion_batch_size: int

    @property
    def label(self) -> str:
        return f"mlx-lm batch {self.prefill_step_size}x{self.prefill_batch_size}"

    def session(self) -> AbstractContextManager[Callable[[Workload], Generated]]:
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
