"""The fields that all generating routes share, and how they become `SamplingParams`.

Every field may be null, which means "not given": many clients send null for fields that they do not use. Numbers and
booleans are not read from text, as with OpenAI. A declared field is honoured, or `Refused` if its value asks for
something that this server does not do; undeclared fields are ignored. docs/parameters.md lists all fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    ValidationInfo,
)
from pydantic_core import CoreSchema, core_schema

from mlx_server.api.answers.generation import Truncation
from mlx_server.api.http.request_bounds import FIRST_ERROR, at_most
from mlx_server.api.openai.document import (
    TEXT,
    TOKEN_IDS,
    Choice,
    Format,
    Grammar,
    JsonSchemaField,
    Regex,
    ResponseFormat,
    StructuredOutputs,
    either,
    list_of,
)
from mlx_server.engine.grammar.spec import STRUCTURED_FIELDS, StructuredSpec, parse_structured
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import (
    FOR_LIBRARY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
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


_PROMPT_FIELDS = frozenset(
    ("context", "images", "input", "input_extra", "input_prefix", "input_suffix", "messages", "prompt", "suffix")
)
"""What prompts are made of, in all protocols."""

_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopList = Annotated[list[_StopString], FIRST_ERROR, Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[_StopList, BeforeValidator(_as_list, json_schema_input_type=_StopString | _StopList)]
Ints = Annotated[list[Int], FIRST_ERROR]
_LogitBias = Annotated[
    dict[int, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}}),
    at_most(MAX_LOGIT_BIAS, "tokens"),  # before any entry is looked at
]


@dataclass(frozen=True, slots=True)
class TextsOrIds:
    """For the type of a field: one text or prompt of token ids, or a list of up to `limit` of them, becomes a list.
    There may be millions of ids, so each is looked at once, in C."""

    limit: int
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        bounds = {"minItems": 1, "maxItems": self.limit}
        return either(TEXT, list_of(TEXT, **bounds), TOKEN_IDS, list_of(TOKEN_IDS, **bounds))

    def _read(self, value: Any) -> list[str | list[int]]:
        if isinstance(value, str) or (value and _are_ids(value)):
            return [value]
        if isinstance(value, list) and len(value) > self.limit:
            raise ValueError(f"has {len(value)} {self.what}; at most {self.limit} are taken at a time, send several")
        if isinstance(value, list) and value and all(isinstance(item, str) or _are_ids(item) for item in value):
            return value
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def no_limit(value: Any) -> Any:
    """-1, which llama.cpp and LM Studio send, means no limit."""
    return None if value == -1 and not isinstance(value, bool) else value


TokenLimit = Annotated[Annotated[Int, Field(ge=1)] | None, BeforeValidator(no_limit)]

Penalty = Annotated[Number, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern="^[!-~]+$")]


@dataclass(frozen=True, slots=True, eq=False)  # `Annotated` takes equal ones for the same, and 1.0 equals 1
class Refused:
    """For the type of a field that this server does not support: besides null it takes only the `neutral` values, which
    change nothing."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "leave it out"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": "Not supported: any other value is a 400."}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        """Raises `InvalidRequestError`."""
        if value is not None and value not in self.neutral:
            raise InvalidRequestError(
                f"{info.field_name} is not supported by this server; {self.remedy}.", info.field_name
            )
        return value


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class RequestFields(BaseModel):
    """The fields of every route that runs a model."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None

    @property
    def client_id(self) -> str | None:
        """The client's own id of the request."""
        return self.rid if self.request_id is None else self.request_id


class GenerationFields(RequestFields):
    """The common fields. Subclasses add their prompt, their logprobs and their token limit."""

    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = Field(None, ge=1, le=MAX_SAMPLES)

    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, ge=0, le=1)
    top_k: Int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: _LogitBias | None = None
    allowed_token_ids: Annotated[list[Annotated[Int, Field(ge=0)]], FIRST_ERROR] | None = Field(None, min_length=1)
    seed: Int | None = Field(None, json_schema_extra={"format": "int64"})

    stop: StopStrings | None = None
    stop_token_ids: Ints | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: Bool | None = None
    no_stop_trim: Bool | None = None
    ignore_eos: Bool | None = None
    min_tokens: Int | None = Field(None, ge=0)
    skip_special_tokens: Bool | None = None

    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    add_special_tokens: Bool | None = None

    speculate: Bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^@/\\\u0000]+$")

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: JsonSchemaField = None
    guided_regex: Regex = None
    guided_choice: Choice = None
    guided_grammar: Grammar = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchemaField = None
    regex: Regex = None
    ebnf: Grammar = None
    grammar: Grammar = None
    format: Format = None
    open_schemas: Bool | None = None

    bad_words: Annotated[Any, Refused(([],))] = None
    logprob_token_ids: Annotated[Any, Refused(([],))] = None
    use_beam_search: Annotated[Any, Refused((False,))] = None
    length_penalty: Annotated[Any, Refused((1.0,))] = None
    stop_regex: Annotated[Any, Refused(([], ""))] = None
    prompt_embeds: Annotated[Any, Refused(([],))] = None
    lora_path: Annotated[Any, Refused(([], ""), "use model, like `model:adapter`")] = None
    return_prompt_text: Annotated[Any, Refused((False,))] = None
    dynatemp_range: Annotated[Any, Refused((0,))] = None
    typical_p: Annotated[Any, Refused((1,))] = None
    top_n_sigma: Annotated[Any, Refused((-1,))] = None
    repeat_last_n: Annotated[Any, Refused((-1,), "penalties look at the whole context")] = None
    dry_multiplier: Annotated[Any, Refused((0,))] = None
    xtc_probability: Annotated[Any, Refused((0,))] = None
    mirostat: Annotated[Any, Refused((0,))] = None
    adaptive_target: Annotated[Any, Refused((-1,))] = None
    samplers: Annotated[Any, Refused(([],))] = None
    min_keep: Annotated[Any, Refused((0,))] = None
    lora: Annotated[Any, Refused(([],), "use model, like `model:adapter`")] = None
    watermarking: Annotated[Any, Refused((False,))] = None
    custom_logit_processor: Annotated[Any, Refused()] = None
    n_predict: Annotated[Any, Refused((-1,), "use max_tokens")] = None
    t_max_predict_ms: Annotated[Any, Refused((0, -1), "use max_tokens")] = None
    n_indent: Annotated[Any, Refused((0,))] = None
    n_keep: Annotated[Any, Refused((0, -1))] = None
    n_discard: Annotated[Any, Refused((0,))] = None
    repetition_detection: Annotated[Any, Refused()] = None
    n_probs: Annotated[Any, Refused((0,), "use logprobs")] = None
    post_sampling_probs: Annotated[Any, Refused((False,))] = None
    response_fields: Annotated[Any, Refused(([],))] = None
    return_tokens: Annotated[Any, Refused((False,), "use return_token_ids")] = None
    return_prompt_token_ids: Annotated[Any, Refused((False,), "use return_token_ids")] = None
    return_hidden_states: Annotated[Any, Refused((False,))] = None
    return_routed_experts: Annotated[Any, Refused((False,))] = None
    return_meta_info: Annotated[Any, Refused((False,))] = None
    return_token_offsets: Annotated[Any, Refused((False,))] = None
    stream_reasoning: Annotated[Any, Refused((True,))] = None
    grammar_lazy: Annotated[Any, Refused((False,))] = None
    grammar_triggers: Annotated[Any, Refused(([],))] = None
    reasoning_budget_tokens: Annotated[Any, Refused((-1,), "use thinking_token_budget")] = None
    thinking_budget_tokens: Annotated[Any, Refused((-1,), "use thinking_token_budget")] = None
    reasoning_format: Annotated[Any, Refused(("auto", "deepseek"), "use separate_reasoning")] = None
    reasoning_in_content: Annotated[Any, Refused((False,))] = None
    thinking_forced_open: Annotated[Any, Refused((False,))] = None
    parse_tool_calls: Annotated[Any, Refused((True,))] = None
    web_search_options: Annotated[Any, Refused()] = None
    extra_key: Annotated[Any, Refused(([], ""), "use cache_salt")] = None
    session_params: Annotated[Any, Refused()] = None
    input_ids: Annotated[Any, Refused(([],), "send prompt to /v1/completions")] = None
    task: Annotated[Any, Refused()] = None

    def check(self) -> None:
        """Checks that need several fields. Raises `InvalidRequestError` with the field's name."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only for stream: true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed; set stream to false.", "prompt_logprobs")

    def forget_prompt(self) -> None:
        """Empties what only the prompt is made of: it may have megabytes that no prompt has, and a request may wait in
        the queue for long."""
        for name in _PROMPT_FIELDS & self.model_fields_set:
            setattr(self, name, type(getattr(self, name))())

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def prompt_truncation(self) -> Truncation:
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    def structured(
        self, own_format: dict[str, Any] | None = None, own_name: str = "response_format"
    ) -> StructuredSpec | None:
        """The format of the output; `own_format` is the protocol's own field for it, in the form of `response_format`,
        and called `own_name`. Raises `InvalidRequestError`."""
        fields = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        return parse_structured(fields if own_format is None else {**fields, "response_format": own_format}, own_name)

    @property
    def output_limit(self) -> int | None:
        """The most output tokens; None is the rest of the context."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities to give beside the sampled token's; None gives none at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The parameters of one choice; `defaults` are the model's. Raises `InvalidRequestError` for values out of
        range."""
        names = (field.name for field in dataclasses.fields(SamplingParams) if field.name not in FOR_LIBRARY)
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        if self.repeat_penalty is not None:
            given.setdefault("repetition_penalty", self.repeat_penalty)
        given |= {
            "max_tokens": self.output_limit,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "logit_bias": self.logit_bias or {},
            "stop": tuple(self.stop or ()),
            "include_stop_str_in_output": bool(self.include_stop_str_in_output or self.no_stop_trim),
        }
        return dataclasses.replace(defaults, **given)


class OneAnswerOfText(GenerationFields):
    """The fields of protocols whose answers are one message, with no place for tokens."""

    n: Annotated[Int | None, Refused((1,))] = None
    response_format: Annotated[Any, Refused()] = None
    prompt_logprobs: Annotated[Int | None, Refused()] = None
    return_token_ids: Annotated[Bool | None, Refused((False,))] = None
    return_tokens_as_token_ids: Annotated[Bool | None, Refused((False,))] = None
    add_special_tokens: Annotated[Bool | None, Refused((False,))] = None
