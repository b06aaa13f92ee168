"""One generation means the same whatever the protocol, streamed or whole, however many tokens a step gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from tests.api.doors import Asked, Chat, Door, Generate, Messages, Ollama, Part, Responses, Said, Text, by_library
from tests.api.random_outputs import FAMILIES, TOOLS, Family, cut, family_named, random_output
from tests.api.rich_worlds import mask
from tests.api.worlds import World, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
STEPS = (1, 1, 2, 3, 7, 1000)
CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE, TEXT = Chat(), Responses(), Messages(), Ollama(), Generate(), Text()


@dataclass(frozen=True)
class Case:
    """What a model of the family writes for each choice, and what it is asked. The request is aborted after so many
    tokens, unless it has ended."""

    family: Family
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    asked: Asked
    aborted_after: int | None = None


def random_case(name: str, random: Random) -> Case:
    family, n = family_named(name), random.choice((1, 1, 1, 3))
    asked = Asked(n=n, tools=random.choice((TOOLS, TOOLS, TOOLS, ())), num_top=random.choice((None, 0, 2)))
    texts = [random_output(family, random) for _ in range(n)]
    if not asked.tools and random.random() < 0.5:
        asked, texts = replace(asked, schema=SCHEMA), [json.dumps({"a": "é"}, ensure_ascii=False)] * n
    has_markers = name == "harmony" or random.random() < 0.7
    ids = [cut(family, text, random, has_markers=has_markers) for text in texts]
    ids = [some[: random.randrange(len(some) + 1)] if random.random() < 0.1 else some for some in ids]
    if random.random() < 0.5:
        asked = replace(asked, max_tokens=random.randrange(1, len(ids[0]) + 2))
    if random.random() < 0.4 and texts[0]:
        at = random.randrange(len(texts[0]))
        asked = replace(asked, stop=(texts[0][at : at + random.choice((1, 2, 4))],))
    asked = replace(asked, is_parallel=random.random() < 0.8)
    return Case(family, texts, ids, asked, random.randrange(1, 30) if random.random() < 0.15 else None)


class Asking:
    """Asks for one generation through all protocols."""

    def __init__(self, world: World, case: Case, random: Random) -> None:
        self._world, self._engine, self._case, self._random = world, world.engine, case, random
        family = case.family
        self._engine.tokenizer, self._engine.chat, self._engine.grammars = (
            family.tokenizer,
            family.chat,
            family.grammars,
        )
        self._engine.max_model_len = 2000
        self._engine.requests.clear()
        self._engine.script = lambda request: case.ids[request.sample_index]

    async def ask(self, door: Door, asked: Asked) -> tuple[Said, ...]:
        """What is said whole, and the same streamed."""
        whole = await self._answer(lambda: door.whole(self._world, asked))
        streamed = await self._answer(lambda: door.streamed(self._world, asked))
        assert len(streamed) == len(whole)
        for one, other in zip(streamed, whole, strict=True):
            assert_alike(one.parts, other.parts, may_differ_if_cut=False)
            assert replace(one, parts=other.parts) == other
        try:
            read = await self._answer(lambda: door.by_client(self._world, asked))
        except ValueError:
            assert any(is_unreadable(part) for said in streamed for part in said.parts), streamed
            return tuple(whole)
        for one, other in zip(read, whole, strict=True):
            assert_alike(one.parts, other.parts, may_differ_if_cut=True)
            end = one.end if door is not CHAT else (one.end[0], other.end[1])
            assert replace(one, parts=other.parts, end=end) == other
        return tuple(whole)

    async def by_library(self, asked: Asked) -> Said:
        return (await self._answer(lambda: self._alone(asked)))[0]

    async def _alone(self, asked: Asked) -> list[Said]:
        return [await by_library(self._world, asked)]

    async def _answer(self, ask: Callable[[], Awaitable[list[Said]]]) -> list[Said]:
        engine = self._engine
        engine.pause_after, engine.num_paused = self._case.aborted_after, 0
        engine.tokens_per_delta = 1 if engine.pause_after else self._random.choice(STEPS)
        answering = asyncio.ensure_future(ask())
        await until(lambda: answering.done() or engine.num_paused)
        if not answering.done():
            await self._world.http.post("/abort_requests", json={"abort_all": True})
        return await answering


def objects_of(arguments: Any) -> list[Any]:
    """What the arguments may be in a protocol that has objects."""
    if not isinstance(arguments, str):
        return [arguments]
    try:
        value = json.loads(arguments)
    except ValueError:
        return [{}, {"invalid_json": arguments}]
    return [value, {"invalid_json": arguments}] if isinstance(value, dict) else [{}]


def is_unreadable(part: Part) -> bool:
    """Whether it is a call whose arguments are no JSON."""
    return part[0] == "call" and {"invalid_json": part[1][1]} in objects_of(part[1][1])


def assert_alike(parts: Sequence[Part], others: Sequence[Part], *, may_differ_if_cut: bool) -> None:
    """The same kinds, texts, names and arguments; these may be a text in one and an object in the other."""
    assert [part[0] for part in parts] == [part[0] for part in others]
    for (kind, said), (_, other) in zip(parts, others, strict=True):
        if kind != "call" or isinstance(said[1], str) == isinstance(other[1], str):
            assert said == other or may_differ_if_cut
        else:
            assert said[0] == other[0]
            assert other[1] in objects_of(said[1])


async def check(world: World, case: Case, random: Random) -> None:
    asking, asked = Asking(world, case, random), case.asked
    one = replace(asked, n=1)
    (chat,) = await asking.ask(CHAT, one)
    (responses,) = await asking.ask(RESPONSES, one)
    assert (responses.by_kind(), responses.tokens) == (chat.parts, chat.tokens)
    (messages,) = await asking.ask(MESSAGES, one)
    assert messages.tokens == chat.tokens
    assert_alike(responses.parts, messages.parts, may_differ_if_cut=False)
    ollama = await asking.ask(OLLAMA, one) if asked.is_parallel else ()
    for said in ollama:
        assert (*said.tokens[:2], said.logprobs) == (*chat.tokens[:2], chat.logprobs)
        whole = chat.parts[:-1] if len(said.calls) < len(chat.calls) else chat.parts
        assert_alike(whole, said.parts, may_differ_if_cut=False)
    assert_ends(chat, responses, messages, ollama)
    if asked.n > 1:
        first, *_ = await asking.ask(CHAT, asked)
        assert replace(first, tokens=chat.tokens) == chat
    await check_texts(asking, replace(one, tools=()))
    if asked.schema is not None:
        masks = {mask(request.constraint) for request in world.engine.requests}
        assert len(masks) == 2, "one for chats, whose reasoning is free, and one for raw prompts"


def assert_ends(chat: Said, responses: Said, messages: Said, ollama: Sequence[Said]) -> None:
    reason, stop = chat.end
    is_cut_off = reason in ("length", "abort")
    assert all(said.end == ("length" if is_cut_off else "stop",) for said in ollama)
    expected = {"length": ("incomplete", "max_output_tokens"), "abort": ("cancelled", None)}
    if reason == "stop" and chat.calls:  # a stop string stands in the arguments of a call
        assert stop is not None
        expected["stop"] = ("incomplete", None)
    assert responses.end == expected.get(reason, ("completed", None))
    if is_cut_off or reason == "tool_calls":
        assert messages.end == ("max_tokens" if is_cut_off else "tool_use", None)
    else:
        assert messages.end == (("end_turn", None) if stop is None else ("stop_sequence", stop))


async def check_texts(asking: Asking, asked: Asked) -> None:
    """Protocols without calls, and those that show all that the model writes."""
    (split,) = await asking.ask(CHAT, asked)
    (generated,) = await asking.ask(GENERATE, asked)
    assert (generated.parts, generated.tokens[:2]) == (split.parts, split.tokens[:2])
    (unsplit,) = await asking.ask(CHAT, replace(asked, splits_reasoning=False))
    if unsplit.end[0] != "abort":  # by a route that is for the server's requests
        library = await asking.by_library(asked)
        assert (library.parts, library.end, library.logprobs) == (unsplit.parts, unsplit.end, unsplit.logprobs)
    (raw,) = await asking.ask(TEXT, asked)
    if not asked.stop:  # it may stand in a special token, which is no text here
        assert (raw.tokens[1], raw.logprobs) == (split.tokens[1], split.logprobs)


async def check_random(world: World, name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    case = random_case(name, random)
    try:
        await check(world, case, random)
    except BaseException as error:
        asked = replace(case.asked, tools=case.asked.tools[:1])
        error.add_note(f"{name} {seed}: {case.texts} {asked} aborted after {case.aborted_after}")
        raise


async def test_reasoning_that_follows_text_stays_behind_it(world: World):
    """gpt-oss says what it is going to do, and then reasons on."""
    messages = (
        "commentary<|message|>I look.",
        "analysis<|message|>Hm.",
        "analysis<|message|>So.",
        "final<|message|>Yes.",
        "commentary to=functions.f <|constrain|>json<|message|>{}",
    )
    text, family = "<|end|><|start|>assistant".join(f"<|channel|>{one}" for one in messages), family_named("harmony")
    asked, random = Asked(tools=TOOLS), Random(0)
    asking = Asking(world, Case(family, [text], [cut(family, text, random, has_markers=True)], asked), random)
    for door in RESPONSES, MESSAGES:
        (said,) = await asking.ask(door, asked)
        kinds, shown = zip(*said.parts, strict=True)
        assert kinds == ("text", "reasoning", "text", "call")
        assert shown[:3] == ("I look.", "Hm.\nSo.", "\nYes.")
    body = {**MESSAGES.body(asked), "thinking": {"type": "disabled"}}
    hidden = (await world.http.post(MESSAGES.path, json=body)).json()
    assert [block.get("text") for block in hidden["content"]] == ["I look.\nYes.", None]


@pytest.mark.parametrize("name", FAMILIES)
async def test_all_protocols_say_the_same(world: World, name: str):
    for seed in range(2):
        await check_random(world, name, seed)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
async def test_all_protocols_say_the_same_of_many_outputs(world: World, name: str):
    for seed in range(2, 60):
        await check_random(world, name, seed)
