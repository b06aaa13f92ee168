"""Makes a chat of any protocol ready to generate: prompt, grammar, and the parser of the output.

    ChatCall -> ChatPlanner.plan() -> Plan -> GenerationJob

The work grows with the prompt and the schema, so it runs in the request's turn, in threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from mlx_server.api.answers.generation import Plan, Prompt, Truncation
from mlx_server.api.answers.images import ImageLoader, RequestImages
from mlx_server.api.answers.output_parser import OutputParser
from mlx_server.api.http.text_turns import TextTurn
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.grammar.constraints import CompiledGrammar
from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec
from mlx_server.engine.grammar.structural_tag import LarkWriter, json_expression, json_options
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.text.messages import UnseenPartError
from mlx_server.engine.text.reasoning import Dialect, ReasoningConstraint
from mlx_server.engine.text.splitters import new_splitter
from mlx_server.engine.tools.formats import Tool
from mlx_server.engine.tools.grammar import force_tool_calls
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.engine.vision.parts import ImageParts, Pictures, cut_images
from mlx_server.errors import InvalidRequestError
from mlx_server.request import TokenConstraint

_TEXTS = ("content", "reasoning")


class Turns:
    """Messages built from pieces: consecutive pieces of one role become one message, with texts joined by line breaks.

    For protocols whose messages are not those of chat templates: Anthropic's are lists of blocks, and the Responses API
    has an item each for reasoning, text and calls of one turn. Templates need whole turns, one system message, and no
    two turns of one role in a row."""

    def __init__(self) -> None:
        # Texts are lists of pieces here: joining each piece at once would copy a long text thousands of times.
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def messages(self) -> list[dict[str, Any]]:
        """OpenAI's messages, as `ChatCall` takes them."""
        return [
            {**message, **{field: "\n".join(message[field]) for field in _TEXTS if field in message}}
            for message in self._messages
        ]

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last turn is the assistant's, so that the model continues it."""
        return bool(self._messages) and self._messages[-1]["role"] == "assistant"

    @property
    def has_open_calls(self) -> bool:
        """Whether the last turn has calls without results."""
        return self.ends_with_answer and "tool_calls" in self._messages[-1]

    def instruct(self, text: str) -> None:
        """Instructions. Many templates refuse them after the beginning, so later ones go into the user's turn."""
        is_beginning = all(message["role"] == "system" for message in self._messages)
        self._append_text("system" if is_beginning else "user", text)

    def say(self, text: str) -> None:
        """What the user wrote."""
        self._append_text("user", text)

    def answer(self, text: str) -> None:
        """What the assistant wrote; an empty text opens its turn."""
        self._append_text("assistant", text)

    def think(self, text: str) -> None:
        """The assistant's reasoning; the template decides whether the model sees it."""
        _append(self._turn("assistant").setdefault("reasoning", []), text)

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """What a tool returned. Some templates also need the tool's name."""
        message = {"role": "tool", "tool_call_id": call_id, "content": [text]}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self._messages.append(message)

    def _append_text(self, role: str, text: str) -> None:
        _append(self._turn(role)["content"], text)

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def _append(pieces: list[str], text: str) -> None:
    if text:
        pieces.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools there are and what the model must do with them. `allowed` has the names of tools that it may call
    (None: all). `is_parallel`: whether it may make several calls in a turn; None allows that, but a call that it must
    make is the only one if its prompt asks for one at a time. `patterns` are regexes for the argument of tools that
    take one text; they hold in every mode. `fields` are the request's fields of the tools' parameters, by the tools'
    names, if they are not those of chat completions."""

    tools: Sequence[Tool] = ()
    mode: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    is_parallel: bool | None = None
    patterns: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_patterns(self) -> bool:
        """Whether some calls need a grammar even if the model may choose whether to call."""
        return self.mode != "none" and any(tool["function"]["name"] in self.patterns for tool in self._allowed_tools())

    @property
    def shown(self) -> Sequence[Tool] | None:
        """The tools in the prompt. If a grammar keeps the model to the allowed tools, the prompt has all of them, so
        that prompts stay alike and share their cached prefix."""
        if self.mode == "none" or not self.tools:
            return None
        return self.tools if self.mode == "required" else self._allowed_tools()

    def _allowed_tools(self) -> Sequence[Tool]:
        if self.allowed is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in self.allowed]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """What a request of any protocol says. `max_reasoning_tokens` None is no bound. Without `splits_reasoning` the
    reasoning stays in the content, markers included. With `has_open_schemas`, tools' schemas are not closed.
    `prediction` is a text that the answer is expected to repeat in large part."""

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse = field(default_factory=ToolUse)
    options: ChatOptions = field(default_factory=ChatOptions)
    structured: StructuredSpec | None = None
    truncation: Truncation = field(default_factory=Truncation)
    max_reasoning_tokens: int | None = None
    splits_reasoning: bool = True
    has_open_schemas: bool = False
    prediction: str = ""

    @property
    def grammar_param(self) -> str | None:
        """The field that asks for a grammar; None if none does."""
        if self.structured is not None:
            return self.structured.param
        return "tools" if self.tool_use.mode == "required" or self.tool_use.has_patterns else None


Read = Callable[[ImageParts | None], ChatCall]
"""Makes the call of a request. Images are added to the parts and marked in the messages; without parts (the model takes
no images), they are refused or replaced by a note."""


class ChatPlanner:
    """Plans chats for any engine."""

    def __init__(self, images: ImageLoader) -> None:
        self._images = images

    async def plan(self, engine: AsyncEngine, read: Read, turn: TextTurn, images: RequestImages | None = None) -> Plan:
        """`read` makes the call of the request, in a worker thread, since a chat may have thousands of messages.
        `images` remembers its images, for a request that is planned several times. Raises `InvalidRequestError` and
        `UnsupportedError`. Work in the thread goes on when this is cancelled."""
        written = await self._write(engine, read, turn, images, plans=True)
        if written.plan is not None:
            return written.plan
        param = written.call.grammar_param or ""
        return await engine.grammars.threads.run(lambda: _plan(engine, written), param, turn.requester)

    async def render(
        self, engine: AsyncEngine, read: Read, turn: TextTurn, images: RequestImages | None = None
    ) -> Prompt:
        """The prompt alone; `read`, `images` and what is raised are as for `plan`."""
        return (await self._write(engine, read, turn, images, plans=False)).prompt

    async def _write(
        self, engine: AsyncEngine, read: Read, turn: TextTurn, images: RequestImages | None, *, plans: bool
    ) -> _Written:
        """The call and its prompt, and with `plans` the plan, if the call needs no grammar. Without images,
        one turn in a thread makes all of it; with images, two turns, and the images are prepared between them."""
        seeing, owner = engine.vision, turn.requester.key
        parts = None if seeing is None else ImageParts()

        def write(call: ChatCall, pictures: Pictures | None) -> _Written:
            written = _written(engine, owner, call, pictures, is_counted=not plans)
            if call.grammar_param is not None or not plans:
                return written
            return replace(written, plan=_plan(engine, written))

        def begin() -> ChatCall | _Written:
            try:
                call = read(parts)
                return call if parts is not None and parts.found else write(call, None)
            except UnseenPartError as error:
                raise UnseenPartError(error.kind, error.where, engine.info.no_vision) from error

        begun = await turn.in_thread(begin)
        if not isinstance(begun, ChatCall):
            return begun
        assert seeing is not None
        assert parts is not None
        call, known = begun, images or RequestImages()
        pictures = await self._images.prepare(seeing, parts, turn.requester, engine.max_model_len, known)
        return await turn.in_thread(lambda: write(call, pictures))


@dataclass(frozen=True, slots=True)
class _Written:
    """A call and its prompt, text included. `is_open`: the prompt has opened the reasoning; `is_one`: it asks for one
    call at a time."""

    call: ChatCall
    prompt: Prompt
    is_open: bool
    is_one: bool
    prediction_token_ids: tuple[int, ...]
    plan: Plan | None = None


def _written(
    engine: AsyncEngine, owner: str, call: ChatCall, pictures: Pictures | None, *, is_counted: bool
) -> _Written:
    """Renders and tokenizes the prompt of `call` for `owner`. A text that is far too long (`Truncation.part`) is
    tokenized in part only."""
    tokenizer, max_model_len = engine.tokenizer, engine.max_model_len

    def cut(text: str) -> str:
        return call.truncation.part(text, tokenizer, max_model_len, is_counted=is_counted)

    prompt = engine.chat.format(call.messages, call.tool_use.shown, call.options, cut, owner, pictures)
    token_ids = call.truncation.apply(prompt.token_ids, max_model_len)
    if prompt.images and len(token_ids) < len(prompt.token_ids):
        raise cut_images()
    part = tokenizer.part_of(call.prediction, max_model_len) if engine.config.looks_up else ""
    predicted = tokenizer.encode(part, add_special_tokens=False)[:max_model_len] if part else ()
    shown = Prompt(tuple(token_ids), prompt.text, prompt.images)
    return _Written(call, shown, prompt.opens_reasoning, prompt.asks_for_one_call, tuple(predicted))


def _plan(engine: AsyncEngine, written: _Written) -> Plan:
    call, is_open, tools, dialect = written.call, written.is_open, written.call.tool_use.shown, engine.chat.dialect
    target = _target(engine, dialect, call, is_one=written.is_one)
    kept_token_ids = dialect.kept_token_ids(engine.tokenizer, with_tools=bool(tools))
    if target.grammar is not None:
        kept_token_ids |= target.grammar.kept_token_ids
    is_parallel, is_forced = call.tool_use.is_parallel is not False, call.tool_use.mode == "required"
    used_ids = {str(made.get("id")) for message in call.messages for made in message.get("tool_calls") or ()}
    splits_reasoning = call.splits_reasoning  # the parser must not hold the call, whose messages may have megabytes

    def new_parser() -> OutputParser:
        splitter = new_splitter(dialect, tools, is_open)
        extractor = None if tools is None else ToolCallExtractor(dialect.tool_parser, tools, used_ids=used_ids)
        if splits_reasoning:
            return OutputParser(splitter, extractor, is_parallel, is_forced)
        return OutputParser(None, extractor, is_parallel, is_forced, splitter if is_forced else None)

    return Plan(
        prompts=(written.prompt,),
        new_parser=new_parser,
        new_constraint=_constraints(engine, dialect, target, is_open, call.max_reasoning_tokens),
        kept_token_ids=kept_token_ids,
        continues_text=call.options.continue_final_message,
        reasoning=None if dialect.reasoning is None else dialect.reasoning.span(is_open),
        prediction_token_ids=written.prediction_token_ids,
        notes=() if target.grammar is None else tuple(dict.fromkeys((*target.grammar.notes, *target.notes))),
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """What the output after the reasoning may be. `is_opened`: the grammar includes the text between the two. `notes`
    name keywords that are not enforced, besides those of the grammar."""

    grammar: CompiledGrammar | None
    is_opened: bool = False
    notes: tuple[str, ...] = ()


def _target(engine: AsyncEngine, dialect: Dialect, call: ChatCall, *, is_one: bool) -> _Target:
    tool_use, structured, compile_ = call.tool_use, call.structured, engine.grammars.compile
    is_free = tool_use.mode == "auto" and structured is None
    if tool_use.shown is None or (is_free and not tool_use.has_patterns):
        return _Target(None if structured is None else compile_(structured))
    asked = {
        "tools": tool_use.tools,
        "is_parallel": (is_free or not is_one) if tool_use.is_parallel is None else tool_use.is_parallel,
        "is_closed": not call.has_open_schemas,
        "patterns": tool_use.patterns,
        "fields": tool_use.fields,
        "allowed": None if tool_use.allowed is None else sorted(tool_use.allowed),
        "is_free": is_free,
    }
    forced = engine.grammars.written(partial(force_tool_calls, engine.tokenizer, dialect.tool_parser), asked)
    if tool_use.mode == "required" or structured is None:
        return _Target(compile_(forced.spec), forced.is_opened, forced.notes)
    compile_(structured)  # for its errors: as a part of a grammar, a schema's unknown keywords are ignored
    reasoning = dialect.reasoning
    opening = reasoning.answer_start if reasoning is not None and forced.is_opened else ""
    begin = LarkWriter(engine.tokenizer.added_tokens).literal(opening)
    return _Target(compile_(_either(structured, forced.spec, begin)), forced.is_opened, forced.notes)


def _either(answer: StructuredSpec, calls: StructuredSpec, begin: str) -> StructuredSpec:
    """A grammar for `begin` and the answer, or for calls instead: with `response_format` a model may still call
    tools."""
    if answer.kind is not StructuredKind.JSON_SCHEMA:
        raise InvalidRequestError(
            f"{answer.param} and tools exclude each other unless it is JSON; set tool_choice to none or required.",
            answer.param,
        )
    head, _, rules = calls.source.partition("\n")
    start = head.removeprefix("start: ")
    assert start != head, "a grammar of calls begins with its start rule"
    schema = json_expression(json.loads(answer.source), {**json_options(answer.whitespace_pattern), "lenient": True})
    return replace(
        calls, source=f"start: answer | calls\nanswer: {begin} {schema}\ncalls: {start}\n{rules}", param=answer.param
    )


def _constraints(
    engine: AsyncEngine, dialect: Dialect, target: _Target, is_open: bool, max_reasoning_tokens: int | None
) -> Callable[[], TokenConstraint] | None:
    """Makes cursors over one output each; None when nothing is constrained."""
    markers, grammar = dialect.reasoning, target.grammar
    if markers is None or (grammar is None and max_reasoning_tokens is None):
        return None if grammar is None else grammar.start
    return lambda: ReasoningConstraint(
        engine.tokenizer,
        markers,
        engine.grammars.vocab_size,
        is_open=is_open,
        answer=None if grammar is None else grammar.start(),
        is_answer_opened=target.is_opened,
        max_tokens=max_reasoning_tokens,
    )
