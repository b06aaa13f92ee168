"""Chats for `bench throughput` whose answers are text, as drafts need it: of random tokens nothing can be foretold.

edit        a file of 60 lines and the wish to rename one function: the answer is nearly all there already
tool-calls  an agent's calls so far and the next files: each call is like the last but for a few tokens
chat        a question with a long answer of its own words: little can be drafted, and nothing may be lost
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import MappingProxyType

from mlx_server.bench.systems import Workload, WorkloadRequest
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError

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
    wish = f"Rewrite this file and rename the function {old} to {old}_{number}. Print the whole file.\n\n{file}"
    return wish, f"```python\n{functions[0]}"


def _tool_calls(rng: random.Random, number: int) -> tuple[str, str]:
    folders = rng.sample(_NOUNS, 10)
    calls = [
        json.dumps({"name": "read_file", "arguments": {"path": f"src/{folder}/{verb}.py", "limit": 100}})
        for folder, verb in zip(folders, rng.sample(_VERBS, 10))
    ]
    wish = "Repeat this list of tool calls three times, one call a line, and nothing else:\n" + "\n".join(calls)
    return wish, calls[0].partition(' "arg')[0]


def _chat(rng: random.Random, number: int) -> tuple[str, str]:
    return f"Write a long letter to a friend about {_TOPICS[number % len(_TOPICS)]}.", ""


_KINDS: MappingProxyType[str, tuple[Callable[[random.Random, int], tuple[str, str]], int, float]] = MappingProxyType(
    {"edit": (_edit, 256, 0.0), "tool-calls": (_tool_calls, 192, 0.0), "chat": (_chat, 128, 0.8)}
)
"""By name: what the user says and how the answer begins, so that small models do it; output tokens; temperature."""

CHAT_WORKLOADS = tuple(_KINDS)


def make_chat_workload(name: str, tokenizer: Tokenizer | None, seed: int) -> Workload:
    """16 requests of one of `CHAT_WORKLOADS`; seed and tokenizer decide every token. Raises `ConfigError` for a model
    without text or chats; `KeyError` for another name."""
    text, num_output_tokens, temperature = _KINDS[name]
    if tokenizer is None or not tokenizer.hf.chat_template:
        raise ConfigError(f"The workload {name} is made of chats, and the model has no tokenizer with a chat template.")
    rng = random.Random(f"{name}:{seed}")
    requests = []
    for number in range(_NUM_REQUESTS):
        wish, begun = text(rng, number)
        messages = [{"role": "user", "content": wish}]
        prompt = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = tuple(tokenizer.encode(prompt + begun, add_special_tokens=False))
        requests.append(WorkloadRequest(token_ids, num_output_tokens))
    return Workload(name, tuple(requests), temperature)
