"""The fields that all generating routes share, and how they become `SamplingParams`.

Every field may be null, which means "not given": many clients send null for what they leave out. Numbers and
booleans are not coerced from text, as OpenAI does not. A field that is not declared is tolerated; a declared
one is honoured, or refused by `refuse_unsupported` when its value asks for something that we do not do.
docs/parameters.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from mlx_server.api.body_reader import FIRST_ERROR, Strings, at_most
from mlx_server.api.generation import Truncation
from mlx_server.api.openai.document import describe
from mlx_server.engine.grammar.spec import STRUCTURED_FIELDS, StructuredSpec, parse_structured
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StringOrList = Annotated[
    Strings,
    at_most(MAX_STOP_STRINGS, "strings"),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
Ints = Annotated[list[Int], FIRST_ERROR]

MAX_CHOICES = 128
_RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern="^[!-~]+$")]


def _describe(schema: dict[str, Any], body: type[GenerationFields]) -> None:
    describe(schema, body.refused)


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class GenerationFields(BaseModel):
    """What both endpoints take. Subclasses add their prompt, their logprobs and their token limit."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_describe)

    model: str | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = Field(None, ge=1, le=MAX_CHOICES)

    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Number], at_most(MAX_LOGIT_BIAS, "tokens")] | None = None
    allowed_token_ids: Ints | None = None
    seed: Int | None = None

    stop: StringOrList | None = None
    stop_token_ids: Annotated[Ints, at_most(MAX_STOP_TOKEN_IDS, "ids")] | None = None
    include_stop_str_in_output: Bool | None = None
    no_stop_trim: Bool | None = None
    ignore_eos: Bool | None = None
    min_tokens: Int | None = Field(None, ge=0)
    skip_special_tokens: Bool | None = None

    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: Bool | None = None

    priority: Int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^@/\\\u0000]+$")
    request_id: _RequestId | None = None
    rid: _RequestId | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: str | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None

    bad_words: Strings | None = None
    logprob_token_ids: Ints | None = None
    use_beam_search: Bool | None = None
    length_penalty: Number | None = None
    stop_regex: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    return_prompt_text: Bool | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bad_words": ([],),
        "logprob_token_ids": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "stop_regex": ([], ""),
        "prompt_embeds": ([],),
        "lora_path": ([], ""),
        "return_prompt_text": (False,),
    }
    """Fields of features that we do not have, with the values besides null that ask for nothing."""

    def check(self) -> None:
        """What no single field can tell; raises `InvalidRequestError` with the field's name."""
        for name, neutral in self.refused.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                remedy = f"use {_SUCCESSORS[name]}" if name in _SUCCESSORS else "leave it out"
                raise InvalidRequestError(f"{name} is not supported by this server; {remedy}.", name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only for stream: true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed; set stream to false.", "prompt_logprobs")

    @property
    def client_id(self) -> str | None:
        """The id that the client gave its request."""
        return self.rid if self.request_id is None else self.request_id

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    def structured(self, own_format: dict[str, Any] | None = None) -> StructuredSpec | None:
        """What the output must look like; `own_format` is the protocol's own way to say it, as a `response_format`.
        Raises `InvalidRequestError`."""
        fields = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        return parse_structured(fields if own_format is None else {**fields, "response_format": own_format})

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None is the rest of the context."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """None for none, else how many beside the sampled token's."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The parameters of one choice, with the model's `defaults` for what is not given. Raises
        `InvalidRequestError` for values out of range."""
        given = {name: getattr(self, name) for name in _SAME_NAMES if getattr(self, name) is not None}
        return replace(
            defaults,
            **given,
            max_tokens=self.output_limit,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            logit_bias=_bias_by_id(self.logit_bias or {}),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output or self.no_stop_trim),
        )


ONE_ANSWER_OF_TEXT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (False,),
}
"""What protocols refuse besides whose answers are one message, and have no place for tokens."""

_SUCCESSORS = {"functions": "tools", "function_call": "tool_choice", "lora_path": "model, like `model:adapter`"}
_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


def _bias_by_id(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias must map token ids, as text, to numbers.", "logit_bias") from None
