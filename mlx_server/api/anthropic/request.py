"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

Beside Anthropic's own fields, those of sampling that OpenAI's routes take are honoured (`min_p`, `seed`,
`cache_salt` ...). What a field of Anthropic's means for hosted models only, like `cache_control`, is tolerated.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, Field

from mlx_server.api.anthropic.conversation import MessageParam, TextBlock, read_conversation
from mlx_server.api.chat_plan import ChatCall, ToolUse
from mlx_server.api.openai.fields import ONE_ANSWER_OF_TEXT, Bool, GenerationFields, Int, StringOrList
from mlx_server.api.sizes import FIRST_ERROR, MESSAGES, TOOLS
from mlx_server.engine.chat import ChatOptions
from mlx_server.engine.structured_spec import STRUCTURED_FIELDS, StructuredSpec, parse_structured
from mlx_server.errors import InvalidRequestError


class ToolParam(BaseModel):
    """A tool that the client runs; tools that Anthropic's servers run have another `type`."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def as_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ToolChoice(BaseModel):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Bool | None = None


class Thinking(BaseModel):
    """Whether the model reasons first, for how many tokens at most, and whether the client sees it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(BaseModel):
    """What the answer must look like."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How the answer is to be written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesFields(GenerationFields):
    """What makes the prompt, in both bodies."""

    messages: Annotated[list[MessageParam], FIRST_ERROR, MESSAGES] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    tools: Annotated[list[ToolParam], FIRST_ERROR, TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop: StringOrList | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.refused,
        **ONE_ANSWER_OF_TEXT,
        "mcp_servers": ([],),
    }

    @property
    def thinks(self) -> bool:
        """Off unless asked for: simple clients take an answer's first block for its text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinks and self.thinking.display != "omitted"

    def call(self) -> ChatCall:
        """The chat without what concerns sampling. Raises `InvalidRequestError`."""
        turns = read_conversation(self.system, self.messages)
        if not turns.messages():
            raise InvalidRequestError("messages has no content; send at least one text.", "messages")
        return ChatCall(
            messages=turns.messages(),
            tool_use=tool_use(self.tools or [], self.tool_choice),
            options=ChatOptions(
                continue_final_message=turns.ends_with_answer,
                template_kwargs={"enable_thinking": self.thinks, **(self.chat_template_kwargs or {})},
                reasoning_effort=None if self.output_config is None else self.output_config.effort,
            ),
            structured=self.structured(),
            truncation=self.truncation,
            max_reasoning_tokens=None if self.thinking is None else self.thinking.budget_tokens,
        )

    def structured(self) -> StructuredSpec | None:
        """As in the base class, with Anthropic's own way to ask for a schema."""
        config = self.output_config
        wanted = self.output_format if config is None or config.format is None else config.format
        fields = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        if wanted is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.json_schema}}
        return parse_structured(fields)


class CountTokensRequest(MessagesFields):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesFields):
    """The body of POST /v1/messages."""

    max_tokens: Int = Field(ge=1)

    @property
    def output_limit(self) -> int:
        return self.max_tokens


def tool_use(tools: list[ToolParam], choice: ToolChoice | None) -> ToolUse:
    """Anthropic's `tools` and `tool_choice`. Raises `InvalidRequestError`."""
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise InvalidRequestError(
                f"tools[{index}] is of type {tool.type}; this server runs no tools of its own, "
                "so leave it out or define it with an input_schema.",
                f"tools[{index}].type",
            )
    shown = [tool.as_openai() for tool in tools]
    if choice is None:
        return ToolUse(tools=shown)
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return ToolUse(tools=shown, mode="none" if choice.type == "none" else "auto", is_parallel=is_parallel)
    if not tools:
        raise InvalidRequestError(f"tool_choice {choice.type} needs tools.", "tool_choice")
    if choice.type == "any":
        return ToolUse(tools=shown, mode="required", is_parallel=is_parallel)
    names = [tool.name for tool in tools]
    if choice.name not in names:
        raise InvalidRequestError(
            f"tool_choice.name is {choice.name}, which is not in tools: {', '.join(names)}.", "tool_choice.name"
        )
    return ToolUse(tools=shown, mode="required", allowed=frozenset((choice.name,)), is_parallel=False)
