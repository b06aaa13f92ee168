"""Messages to a prompt, by the chat template that the model brings along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from mlx_server.engine.messages import normalise_messages
from mlx_server.engine.tokenizer import Tokenizer
from mlx_server.engine.tool_formats import Tool
from mlx_server.engine.tool_prompt import write_tools_into_messages
from mlx_server.errors import InvalidRequestError

Message = dict[str, Any]

_RESERVED_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)

_PROBE = "What is seen of this?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How to write the prompt.

    `add_generation_prompt` opens the assistant's turn (None: unless a message is continued);
    `continue_final_message` leaves the last message open. `chat_template` replaces the model's own; it runs in a
    sandbox, but nothing bounds its time. `template_kwargs` are variables for the template; `reasoning_effort` is
    one, too, and sets `enable_thinking` where that is not given.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the model reads. `token_ids` are those of `text`, or of the part of it that was to be tokenized."""

    text: str
    token_ids: tuple[int, ...]


class ChatFormatter:
    """Writes prompts for one model. Every method may be called from any thread.

    `renderer` is a chat template in Python, for models that have one instead of a Jinja template; it takes the
    messages, and the template's variables as keywords.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: Callable[..., str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._own_wants_parts: bool | None = None

    def format(
        self,
        messages: Sequence[Any],
        tools: Sequence[Tool] | None = None,
        options: ChatOptions | None = None,
        cut: Callable[[str], str] | None = None,
    ) -> ChatPrompt:
        """The prompt for OpenAI's messages and tools; `cut` says what of its text is to be tokenized, None all of it.
        Raises `InvalidRequestError`, for content that is no text, too. Takes time in proportion to the prompt: not for
        the event loop."""
        text = self.render(messages, tools, options)
        part = text if cut is None else cut(text)
        return ChatPrompt(text, tuple(self._tokenizer.encode(part, add_special_tokens=False)))

    def render(
        self, messages: Sequence[Any], tools: Sequence[Tool] | None = None, options: ChatOptions | None = None
    ) -> str:
        """The prompt's text alone; raises as `format` does."""
        options = options or ChatOptions()
        variables = _template_variables(options)
        if self._renderer is not None and options.chat_template is None:
            chat = normalise_messages(messages, parses_arguments=False)
            return _guarded(self._renderer, chat, {"tools": tools, **variables})
        template = self._template(options, tools)
        chat = normalise_messages(messages, knows_developer="developer" in template)
        if tools and "tools" not in template:
            chat, tools = write_tools_into_messages(chat, tools), None
        if self._wants_parts(options, template):
            chat = [_with_parts(message) for message in chat]
        return self._apply(chat, template, {"tools": tools, **variables})

    def _template(self, options: ChatOptions, tools: Sequence[Tool] | None) -> str:
        if options.chat_template is not None:
            return options.chat_template
        if self._tokenizer.hf.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template. Send the prompt as text to /v1/completions, "
                "or send a chat_template with the request.",
                "messages",
            )
        template: str = self._tokenizer.hf.get_chat_template(None, tools)  # some models have several
        return template

    def _apply(self, chat: list[Message], template: str, variables: Mapping[str, Any]) -> str:
        own = {"chat_template": template, "tokenize": False}
        return _guarded(self._tokenizer.hf.apply_chat_template, chat, {**variables, **own})

    def _wants_parts(self, options: ChatOptions, template: str) -> bool:
        """Whether the template drops content that is a plain string, and shows lists of parts. Found by trying."""
        if options.chat_template is not None:
            return self._probe(template)
        if self._own_wants_parts is None:
            self._own_wants_parts = self._probe(template)
        return self._own_wants_parts

    def _probe(self, template: str) -> bool:
        message = {"role": "user", "content": _PROBE}
        return not self._shows_probe(message, template) and self._shows_probe(_with_parts(message), template)

    def _shows_probe(self, message: Message, template: str) -> bool:
        try:
            return _PROBE in self._apply([message], template, {"add_generation_prompt": True})
        except InvalidRequestError:
            return False


def _template_variables(options: ChatOptions) -> dict[str, Any]:
    reserved = sorted(_RESERVED_KWARGS & options.template_kwargs.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {reserved[0]}; it has a request field of its own.",
            "chat_template_kwargs",
        )
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other.", "continue_final_message"
        )
    variables = dict(options.template_kwargs)
    if options.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", options.reasoning_effort)
        variables.setdefault("enable_thinking", options.reasoning_effort != "none")
    variables["continue_final_message"] = options.continue_final_message
    variables["add_generation_prompt"] = (
        not options.continue_final_message if options.add_generation_prompt is None else options.add_generation_prompt
    )
    return variables


def _guarded(render: Callable[..., str], chat: list[Message], variables: Mapping[str, Any]) -> str:
    """Renders; whatever a template raises was caused by the messages, the variables or the request's template."""
    try:
        return render(chat, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"The chat template is not valid, line {error.lineno}: {error.message}.", "chat_template"
        ) from error
    except Exception as error:  # templates call methods of any value, so any exception can come out
        raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if content else []}
