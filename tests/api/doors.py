"""One generation through every protocol: how each asks for it, and what its answers and streams say, in common terms.

Streams are checked against the grammar of their protocol on the way.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import anthropic
import ollama
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from mlx_server.engine.library.completions import RequestBuilder, complete
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.sampling_params import SamplingParams
from tests.api.worlds import World, user

Part = tuple[str, Any]
"""`("reasoning", text)`, `("text", text)`, or `("call", (name, arguments))`; the arguments are a text or an object, as
the protocol gives them."""

_MESSAGES_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_RESPONSES_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

_USAGE = {"stream_options": {"include_usage": True}}

_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
}
_ITEMS = {"message": ("text", "output_text"), "reasoning": ("reasoning", "reasoning_text")}
"""By the type of a response's item: its kind of part, and the part's type."""

_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
"""By the type of a delta of a message: the type of its block, and its member."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for, as far as a protocol can. `tools` are OpenAI's. `num_top` log-probabilities are wanted beside
    each token's own. Only chat completions can leave the reasoning in the content (`splits_reasoning`)."""

    max_tokens: int = 400
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None
    num_top: int | None = None
    n: int = 1
    is_parallel: bool = True
    splits_reasoning: bool = True


@dataclass(frozen=True, kw_only=True)
class Said:
    """One choice. `end` is in the protocol's own terms. `tokens` counts those of the prompt, of all choices, and of
    their reasoning (None if the protocol does not). `logprobs` are tokens and their log-probabilities."""

    parts: tuple[Part, ...]
    end: tuple[Any, ...]
    tokens: tuple[int | None, ...]
    logprobs: tuple[tuple[str, float], ...] = ()

    def by_kind(self) -> tuple[Part, ...]:
        """For protocols without an order: the reasoning, the text, the calls."""
        whole = [(kind, "".join(text for known, text in self.parts if known == kind)) for kind in ("reasoning", "text")]
        return (*filter(lambda part: part[1], whole), *self.calls)

    @property
    def calls(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part[0] == "call")


class Door(ABC):
    """A protocol's route, or the library."""

    path: str
    asks_for_usage = False
    """Whether a stream counts its tokens only if it is asked to."""

    async def whole(self, world: World, asked: Asked) -> list[Said]:
        answer = await world.http.post(self.path, json={"model": "fake", **self.body(asked), "stream": False})
        assert answer.status_code == 200, answer.text
        return self.read(answer.json())

    async def streamed(self, world: World, asked: Asked) -> list[Said]:
        body = {"model": "fake", **self.body(asked), "stream": True, **(_USAGE if self.asks_for_usage else {})}
        answer = await world.http.post(self.path, json=body)
        assert answer.status_code == 200, answer.text
        return self.read_stream(answer.text, asked)

    @abstractmethod
    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        """What the protocol's official client makes of a stream."""

    @abstractmethod
    def body(self, asked: Asked) -> dict[str, Any]: ...

    @abstractmethod
    def read(self, answer: dict[str, Any]) -> list[Said]: ...

    @abstractmethod
    def read_stream(self, text: str, asked: Asked) -> list[Said]: ...


def _events(text: str) -> Iterator[tuple[str | None, str]]:
    """The name and the data of each server-sent event."""
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        assert len(name) <= 1
        yield name[0].removeprefix("event: ") if name else None, data.removeprefix("data: ")


class _Completions(Door):
    """What chat and text completions have in common."""

    asks_for_usage = True

    def body(self, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop, "n": asked.n}
        if asked.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": asked.schema}}
        return body

    def read(self, answer: dict[str, Any]) -> list[Said]:
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
        return [self._said([choice], answer["usage"]) for choice in answer["choices"]]

    def read_stream(self, text: str, asked: Asked) -> list[Said]:
        """One end a choice and nothing after it, then the usage, then `[DONE]`."""
        *events, done = [data for name, data in _events(text) if name is None]
        *chunks, counted = map(json.loads, events)
        assert (done, counted["choices"]) == ("[DONE]", [])
        choices: dict[int, list[dict[str, Any]]] = {}
        for chunk in chunks:
            assert all(chunk[key] == counted[key] for key in ("id", "object", "created", "model"))
            assert chunk["usage"] is None
            (choice,) = chunk["choices"]
            earlier = choices.setdefault(choice["index"], [])
            assert all(one["finish_reason"] is None for one in earlier)
            earlier.append(choice)
        assert sorted(choices) == list(range(asked.n))
        return [self._said(choices[index], counted["usage"]) for index in range(asked.n)]

    @abstractmethod
    def _said(self, pieces: list[dict[str, Any]], usage: dict[str, Any]) -> Said:
        """One choice, in pieces."""

    def _tokens(self, usage: dict[str, Any]) -> tuple[int, ...]:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"], num_reasoning


class Chat(_Completions):
    path = "/v1/chat/completions"

    def body(self, asked: Asked) -> dict[str, Any]:
        body = {**super().body(asked), "messages": user("Hi"), "separate_reasoning": asked.splits_reasoning}
        if asked.tools:
            body |= {"tools": asked.tools, "parallel_tool_calls": asked.is_parallel}
        if asked.num_top is not None:
            body |= {"logprobs": True, "top_logprobs": asked.num_top}
        return body

    def read_stream(self, text: str, asked: Asked) -> list[Said]:
        for _, data in _events(text):
            if data != "[DONE]" and '"abort"' not in data:  # vLLM's reason; the protocol has none
                ChatCompletionChunk.model_validate_json(data)
        return super().read_stream(text, asked)

    def _said(self, pieces: list[dict[str, Any]], usage: dict[str, Any]) -> Said:
        message = pieces[0].get("message") or self._joined([piece["delta"] for piece in pieces])
        assert message["role"] == "assistant"
        assert message.get("reasoning") == message.get("reasoning_content")
        calls = message.get("tool_calls") or []
        assert len({call["id"] for call in calls}) == len(calls)
        assert all(call["type"] == "function" for call in calls)
        texts = [("reasoning", message.get("reasoning")), ("text", message["content"])]
        functions = [("call", (call["function"]["name"], call["function"]["arguments"])) for call in calls]
        positions = [position for piece in pieces for position in (piece.get("logprobs") or {}).get("content") or ()]
        return Said(
            parts=(*[part for part in texts if part[1]], *functions),
            end=(pieces[-1]["finish_reason"], pieces[-1].get("stop_reason")),
            tokens=self._tokens(usage),
            logprobs=tuple((position["token"], position["logprob"]) for position in positions),
        )

    def _joined(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        opening, *grown = deltas
        assert opening == {"role": "assistant", "content": ""}
        message: dict[str, Any] = {**opening, "tool_calls": []}
        for delta in grown:
            assert all(delta.values())
            for key in delta.keys() - {"tool_calls"}:
                message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", ()):
                calls = message["tool_calls"]
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({**piece, "function": dict(piece["function"])})
                else:
                    assert (piece["index"], piece.keys()) == (len(calls) - 1, {"index", "function"})
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
            assert len(delta.get("tool_calls", ())) <= 1, "clients read one"
        return message

    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        """It does not accumulate fields that are not OpenAI's: the reason to stop."""
        body = {**self.body(asked), **_USAGE}
        chats = world.openai.chat.completions
        async with chats.stream(model="fake", messages=body.pop("messages"), extra_body=body) as stream:
            async for _ in stream:
                pass
        return self.read(stream.current_completion_snapshot.model_dump())


class Text(_Completions):
    """Raw prompts: all that the model writes, special tokens excepted."""

    path = "/v1/completions"

    def body(self, asked: Asked) -> dict[str, Any]:
        return {**super().body(asked), "prompt": "Hi", "logprobs": asked.num_top}

    def _said(self, pieces: list[dict[str, Any]], usage: dict[str, Any]) -> Said:
        found = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        text = "".join(piece["text"] for piece in pieces)
        return Said(
            parts=(("text", text),) if text else (),
            end=(pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]),
            tokens=self._tokens(usage),
            logprobs=tuple(pair for one in found for pair in zip(one["tokens"], one["token_logprobs"], strict=True)),
        )

    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        body = {**self.body(asked), **_USAGE}
        chunks = await world.openai.completions.create(
            model="fake", prompt=body.pop("prompt"), stream=True, extra_body=body
        )
        *pieces, last = [chunk.model_dump() async for chunk in chunks]
        choices = sorted((piece["choices"][0] for piece in pieces), key=lambda choice: choice["index"])
        return [self._said(list(own), last["usage"]) for _, own in groupby(choices, lambda choice: choice["index"])]


class Responses(Door):
    path = "/v1/responses"

    def body(self, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"input": "Hi", "max_output_tokens": asked.max_tokens, "stop": asked.stop}
        if asked.tools:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in asked.tools]
            body["parallel_tool_calls"] = asked.is_parallel
        if asked.schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": asked.schema}}
        return body

    def read(self, answer: dict[str, Any]) -> list[Said]:
        usage, items, status = answer["usage"], answer["output"], answer["status"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert (answer["completed_at"] is not None) == (status == "completed")
        statuses = ["completed"] * len(items)
        if status != "completed":
            statuses[-1:] = ["incomplete"] * bool(items)
        assert [item["status"] for item in items] == statuses
        tokens = usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
        end = status, (answer["incomplete_details"] or {}).get("reason")
        return [Said(parts=tuple(map(self._part, items)), end=end, tokens=tokens)]

    def _part(self, item: dict[str, Any]) -> Part:
        if item["type"] == "function_call":
            return "call", (item["name"], item["arguments"])
        (part,) = item["content"]
        kind, part_type = _ITEMS[item["type"]]
        assert part["type"] == part_type
        return kind, part["text"]

    def read_stream(self, text: str, asked: Asked) -> list[Said]:
        events = []
        for number, (name, data) in enumerate(_events(text)):
            events.append(json.loads(data))
            assert (events[-1]["type"], events[-1]["sequence_number"]) == (name, number)
            _RESPONSES_EVENT.validate_python(events[-1])
        created, started, *grown, last = events
        assert (created["type"], started["type"]) == ("response.created", "response.in_progress")
        assert created["response"] == started["response"]
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        answer = last["response"]
        assert last["type"] == _LAST_EVENTS[answer["status"]]
        rest = iter(grown)
        assert [self._item(rest, index) for index in range(len(answer["output"]))] == answer["output"]
        assert next(rest, None) is None
        return self.read(answer)

    def _item(self, events: Iterator[dict[str, Any]], index: int) -> dict[str, Any]:
        """Reads the events of one item; returns it as it is at the end."""
        added, item = next(events), dict[str, Any]()
        assert added["type"] == "response.output_item.added"
        opened, grown, kinds = added["item"], "", list[str]()
        while not item:
            event = next(events)
            kind = event["type"].removeprefix("response.")
            assert event["output_index"] == added["output_index"] == index
            if kind == "output_item.done":
                item = event["item"]
                break
            assert event["item_id"] == opened["id"]
            if kind.endswith(".delta"):
                assert event["delta"]
                grown += event["delta"]
            assert all(event.get(key, grown) == grown for key in ("text", "arguments"))
            kinds.append(kind)
        name = _ITEMS[item["type"]][1] if item["type"] in _ITEMS else "function_call_arguments"
        before, after = (["content_part.added"], ["content_part.done"]) if item["type"] in _ITEMS else ([], [])
        assert [kind for kind, _ in groupby(kinds) if kind != f"{name}.delta"] == [*before, f"{name}.done", *after]
        assert (opened["status"], opened["id"]) == ("in_progress", item["id"])
        shown = self._part(item)[1]
        assert (shown if isinstance(shown, str) else shown[1]) == grown
        return item

    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        snapshots: dict[int, str] = {}
        async with world.openai.responses.stream(model="fake", input="Hi", extra_body=self.body(asked)) as events:
            async for event in events:
                if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                    snapshots[event.output_index] = event.snapshot
        assert event.type in _LAST_EVENTS.values()
        answer = event.response.model_dump()
        for index, snapshot in snapshots.items():
            shown = self._part(answer["output"][index])[1]
            assert snapshot == (shown if isinstance(shown, str) else shown[1])
        return self.read(answer)


class Messages(Door):
    path = "/v1/messages"

    def body(self, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": user("Hi"), "max_tokens": asked.max_tokens, "stop_sequences": asked.stop}
        body["thinking"] = {"type": "enabled"}
        if asked.tools:
            functions = [tool["function"] for tool in asked.tools]
            body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
            body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": not asked.is_parallel}
        if asked.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
        return body

    def read(self, answer: dict[str, Any]) -> list[Said]:
        usage = answer["usage"]
        num_prompt = sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
        tokens = num_prompt, usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]
        end = answer["stop_reason"], answer["stop_sequence"]
        return [Said(parts=tuple(map(self._part, answer["content"])), end=end, tokens=tokens)]

    def _part(self, block: dict[str, Any]) -> Part:
        if block["type"] == "tool_use":
            assert block["id"]
            return "call", (block["name"], block["input"])
        assert block["type"] == "text" or block["signature"]
        return ("text", block["text"]) if block["type"] == "text" else ("reasoning", block["thinking"])

    def read_stream(self, text: str, asked: Asked) -> list[Said]:
        """The arguments of calls are texts."""
        events = []
        for name, data in _events(text):
            event = json.loads(data)
            assert event["type"] == name
            if name != "ping":
                _MESSAGES_EVENT.validate_python(event)
                events.append(event)
        start, *grown, delta, stop = events
        assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
        message = start["message"]
        assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
        rest, blocks = iter(grown), list[dict[str, Any]]()
        for index, event in enumerate(rest):
            assert (event["type"], event["index"]) == ("content_block_start", index)
            blocks.append(self._block(rest, event["content_block"], index))
        return self.read({**message, **delta["delta"], "content": blocks, "usage": delta["usage"]})

    def _block(self, events: Iterator[dict[str, Any]], block: dict[str, Any], index: int) -> dict[str, Any]:
        """Reads the events of one block; returns it as it is at the end."""
        names = {name: "" for kind, name in _DELTAS.values() if kind == block["type"]}
        assert not any(block.get(name) for name in (*names, "input"))
        while (event := next(events))["type"] == "content_block_delta":
            delta = event["delta"]
            kind, name = _DELTAS[delta["type"]]
            assert (event["index"], kind, names.get("signature", "")) == (index, block["type"], "")
            assert delta[name]
            names[name] += delta[name]
        assert (event["type"], event["index"]) == ("content_block_stop", index)
        return {**block, **names, **({"input": names["partial_json"]} if block["type"] == "tool_use" else {})}

    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        """It parses the arguments of calls as far as they have come, and raises `ValueError` for those that are no
        JSON."""
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key="unused", max_retries=0) as client:
            stream = client.messages.stream(model="fake", max_tokens=1, messages=[], extra_body=self.body(asked))
            async with stream as events:
                return self.read((await events.get_final_message()).model_dump())


class Ollama(Door):
    path = "/api/chat"

    def body(self, asked: Asked) -> dict[str, Any]:
        options = {"num_predict": asked.max_tokens, "stop": asked.stop}
        body: dict[str, Any] = {"messages": user("Hi"), "options": options, "format": asked.schema}
        if asked.tools:
            body["tools"] = asked.tools
        return body if asked.num_top is None else {**body, "logprobs": True, "top_logprobs": asked.num_top}

    def read(self, answer: dict[str, Any]) -> list[Said]:
        return self._read([answer])

    def read_stream(self, text: str, asked: Asked) -> list[Said]:
        return self._read(list(map(json.loads, text.splitlines())))

    def _read(self, lines: list[dict[str, Any]]) -> list[Said]:
        *_, last = lines
        assert [line["done"] for line in lines] == [line is last for line in lines]
        positions = [position for line in lines for position in line.get("logprobs") or ()]
        said = Said(
            parts=tuple(part for line in lines for part in self._parts(line)),
            end=(last["done_reason"],),
            tokens=(last["prompt_eval_count"], last["eval_count"], None),
            logprobs=tuple((position["token"], position["logprob"]) for position in positions),
        )
        return [replace(said, parts=said.by_kind())]

    def _parts(self, line: dict[str, Any]) -> Iterable[Part]:
        message = line["message"]
        assert message["role"] == "assistant"
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [("reasoning", message.get("thinking") or ""), ("text", message["content"])]
        return [*texts, *(("call", (call["name"], call["arguments"])) for call in calls)]

    async def by_client(self, world: World, asked: Asked) -> list[Said]:
        client = ollama.AsyncClient(world.url)
        ask: Any = client.generate if "prompt" in self.body(asked) else client.chat
        lines = [part.model_dump() async for part in await ask("fake", stream=True, **self.body(asked))]
        await client._client.aclose()
        return self._read(lines)


class Generate(Ollama):
    """Without tools."""

    path = "/api/generate"

    def body(self, asked: Asked) -> dict[str, Any]:
        body = super().body(replace(asked, tools=()))
        del body["messages"]
        return {**body, "prompt": "Hi"}

    def _parts(self, line: dict[str, Any]) -> Iterable[Part]:
        return [("reasoning", line.get("thinking") or ""), ("text", line["response"])]


async def by_library(world: World, asked: Asked) -> Said:
    """What `LLM.chat` returns; reasoning and calls stay in its text."""
    structured = None if asked.schema is None else {"json": asked.schema}
    sampling = SamplingParams(
        max_tokens=asked.max_tokens, stop=asked.stop, logprobs=asked.num_top, structured_outputs=structured
    )
    engine: Any = world.engine
    prompt = RequestBuilder(engine).chat(user("Hi"), sampling, None, asked.tools or None, ChatOptions())
    (found,) = await complete(engine, [prompt], use_tqdm=False)
    token_text = engine.tokenizer.token_text
    return Said(
        parts=(("text", found.text),) if found.text else (),
        end=(found.finish_reason.value, found.stop_reason),
        tokens=(len(found.prompt_token_ids), len(found.token_ids), None),
        logprobs=tuple((token_text(at.token.token_id), at.token.logprob) for at in found.logprobs),
    )
