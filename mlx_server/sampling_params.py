"""Sampling and stopping parameters of a request, checked once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

from mlx_server.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 logits."""

MAX_LOGPROBS = 20

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10_000.0
"""Far beyond any useful value, and far from values with which float32 logits would overflow or vanish."""

MAX_TOP_K = 2**31 - 1
"""The device stores it as int32."""

MAX_TOKENS = 2**31 - 1
"""More than any context. Larger values count as this one, since unbounded integers would overflow later."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""Length of a stop string. Each output character is compared with all of them, on the thread that serves all
requests."""

MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 16_384
"""Tokens with a bias. All of them go to the device in each step; `allowed_token_ids` costs nothing there."""

MAX_SAMPLES = 128
"""Answers to one prompt."""

_SEED_SPAN = 2**63

FOR_LIBRARY = ("n", "structured_outputs")
"""Parameters that are turned into several requests, or a constraint, before the engine sees them."""

_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0, 100),
    "top_k": (-1, MAX_TOP_K),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-_SEED_SPAN, _SEED_SPAN - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_SAMPLES),
}
"""The smallest and the largest value of each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Immutable; raises `InvalidRequestError` for a bad value.

    `max_tokens` None means up to the end of the context. `top_k` 0 or -1 is off. `logprobs` None gives no
    log-probabilities, 0 only that of the sampled token, n also those of the n most likely tokens. Penalties follow the
    usual definitions: `repetition_penalty` divides or multiplies the logits of tokens in the prompt or output (CTRL,
    Keskar et al. 2019); `presence_penalty` and `frequency_penalty` are subtracted for tokens of the output (OpenAI).
    Without `speculate`, one token is computed in each step; the tokens are the same. With `is_scoring`, only
    the prompt's log-probabilities are wanted: the one token that `max_tokens` allows is not counted as output anywhere.

    `LLM` and `AsyncLLM` make `n` answers to a prompt, and handle `structured_outputs`: one of `json` (a schema),
    `json_object`, `regex`, `choice`, `grammar` and `structural_tag`, as in a request over HTTP. Code that submits
    requests to the engine itself makes one request for each answer, with its constraint.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculate: bool = True
    is_scoring: bool = False
    n: int = 1
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, nothing in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, nothing)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._take_plain_numbers()
        self._cut_token_counts()
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                _check(least <= value <= most, name, value, f"between {least} and {most}")
        if self.max_tokens is not None:
            wanted = f"at most {self.max_tokens}, the most output tokens"  # each protocol has its own name for those
            _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, wanted)
        _check(0.0 <= self.top_p <= 1.0, "top_p", self.top_p, "between 0 and 1")
        if self.allowed_token_ids is not None:
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "a non-empty list")
        _check_size("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "tokens")
        for token_id, bias in self.logit_bias.items():
            if not (token_id >= 0 and -100.0 <= bias <= 100.0):
                wanted = "token ids of at least 0, with values between -100 and 100"
                _check(False, "logit_bias", f"{token_id}: {bias}", wanted)
        _check_size("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        for stop in self.stop:
            _check(isinstance(stop, str), "stop", repr(stop), "a string, or several")
            _check(len(stop) > 0, "stop", list(self.stop), "non-empty strings")
            _check_size("stop", len(stop), MAX_STOP_CHARS, "characters a string")
        _check_size("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")

    def _take_plain_numbers(self) -> None:
        """Converts numbers of other libraries to Python's own, which is all that later code handles."""
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                object.__setattr__(self, name, plain_ints((value,), name)[0])
        for name in _FLOATS:
            value = getattr(self, name)
            if type(value) not in (int, float):
                _check(hasattr(value, "__float__"), name, repr(value), "a number")
                object.__setattr__(self, name, float(value))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, plain_ints(getattr(self, name), name))
        if self.logit_bias:
            ids = plain_ints(self.logit_bias, "logit_bias")
            object.__setattr__(self, "logit_bias", dict(zip(ids, map(float, self.logit_bias.values()), strict=True)))

    def _cut_token_counts(self) -> None:
        for name in ("max_tokens", "min_tokens"):
            if (getattr(self, name) or 0) > MAX_TOKENS:
                object.__setattr__(self, name, MAX_TOKENS)

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of answer `index` to a prompt: each answer has its own seed, so that answers differ and can be
        repeated."""
        if self.seed is None or index == 0:
            return self
        seed = self.seed + index
        return replace(self, seed=seed if seed < _SEED_SPAN else seed - 2 * _SEED_SPAN)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must know the tokens of the request so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def plain_ints(values: Iterable[SupportsIndex], name: str) -> tuple[int, ...]:
    """Python integers from integers of any library, such as NumPy. Raises `InvalidRequestError` for other values."""
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise InvalidRequestError(f"{name} must be made of integers: {error}.", name) from error


def _check_size(name: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise InvalidRequestError(f"{name} must have at most {limit} {what}, got {size}.", param=name)


def _check(is_good: bool, name: str, value: object, wanted: str) -> None:
    if not is_good:  # also taken by NaN, for which every comparison is false
        raise InvalidRequestError(f"{name} must be {wanted}, got {value}.", param=name)
