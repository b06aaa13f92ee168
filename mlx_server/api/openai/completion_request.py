"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema

from mlx_server.api.openai.fields import Bool, GenerationFields, Int
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import MAX_LOGPROBS

MAX_SEQUENCES = 1024
"""Most completions of one request: prompts times samples."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions only."""


def _as_prompts(value: Any) -> Any:
    """One prompt or several, as text or token ids, becomes a list of prompts."""
    if isinstance(value, list) and len(value) > MAX_SEQUENCES and type(value[0]) is not int:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_SEQUENCES} are taken at a time, send several")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(_is_prompt(item) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and _are_ids(value))


def _are_ids(values: list[Any]) -> bool:
    """In C: there may be millions."""
    return set(map(type, values)) <= {int}


_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[int]],
    SkipValidation,  # of what `_as_prompts` has looked at: once for each of millions of ids is enough
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(GenerationFields):
    """All fields of a text completion that mean something here."""

    prompt: Prompts
    max_tokens: Int | None = Field(None, json_schema_extra={"minimum": 0})
    logprobs: Int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    echo: Bool | None = None
    best_of: Int | None = Field(None, ge=1)
    suffix: str | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationFields.refused, "suffix": ("",)}

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.num_samples > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts with n={self.num_samples} are more than {MAX_SEQUENCES} completions; "
                "send several requests.",
                "prompt",
            )
        if self.best_of is not None and self.best_of != self.num_samples:
            raise InvalidRequestError("best_of is only supported when it equals n.", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, got 0 (0 needs echo: true).", "max_tokens")

    @property
    def is_scoring(self) -> bool:
        """Whether only the prompt is wanted: `echo` with `max_tokens` 0, as evaluation harnesses ask."""
        return self.max_tokens == 0

    @property
    def output_limit(self) -> int:
        """To score a prompt, one token is generated and dropped."""
        if self.is_scoring:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Those asked for, and those that an echo shows."""
        echoed = self.logprobs if self.echo else None
        return max((k for k in (echoed, self.prompt_logprobs) if k is not None), default=None)
