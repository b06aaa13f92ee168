"""Every error that a user can cause or meet, in one tree.

    ServeError
    |-- InvalidRequestError        the request is wrong; names the parameter
    |   `-- ContextLengthError     the prompt, or prompt and output, cannot fit the model
    |-- ModelNotFoundError         no such model here
    |-- AuthenticationError        no key, or an unknown one
    |-- PermissionDeniedError      the key may not do this
    |-- UnsupportedError           valid, but not something this model or server does
    |-- OverloadedError            try again later; carries the delay
    |   |-- QuotaExceededError     a tier's own limit
    |   |-- QueueFullError         the server's limit, or the place went to a request of a better tier
    |   `-- QueueTimeoutError      waited longer than the configured limit
    |-- InsufficientMemoryError    can never fit the memory of this machine
    |-- EngineDeadError            a step of the model has failed, or the MLX thread has died
    |-- ModelLoadError             a model's folder or weights cannot be served
    |   `-- UnknownModelError      no such folder, file or model of the hub
    |-- DownloadError              a download failed or the file is corrupt
    |   `-- InsufficientStorageError  the disk has no room for a model
    `-- ConfigError                a configuration file, flag or environment value is wrong

Messages say the value, the limit and the remedy. `api.errors` maps the tree onto HTTP statuses and each protocol's
form. `assert` is for our own bugs and never for a user's input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ServeError(Exception):
    """Root of all errors that are shown to users. `message` says what is wrong, the value, the limit and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(ServeError):
    """The request is wrong. `param` is the field at fault, by the client's name for it, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The tokens do not fit the model's context or the whole KV pool. `reason` is a metrics label."""

    reason = "context_length"

    @classmethod
    def of_prompt(
        cls, found: str, limit: int, remedy: str, *, whose: str = "", is_answered: bool = True
    ) -> ContextLengthError:
        """For a prompt of `found` tokens ("9031", "at least 9031") and a context of `limit`. If it `is_answered`, one
        token must be left for the answer."""
        room = ", and at least one must be left for the answer" if is_answered else ""
        return cls(  # agents shorten their conversation when they find these words and numbers
            f"The prompt is too long: {found} tokens > {limit - is_answered} maximum. This model's maximum context "
            f"length is {limit} tokens{whose}{room}. {remedy}",
            "input_tokens",
        )


class ModelNotFoundError(ServeError):
    """The model is not served here, or has no such adapter; `remedy` says what is served instead."""

    def __init__(self, model: str, remedy: str = "GET /v1/models lists what is served.") -> None:
        super().__init__(f"The model `{model}` does not exist. {remedy}")
        self.model = model


class AuthenticationError(ServeError):
    """No API key was sent, or it is unknown."""


class PermissionDeniedError(ServeError):
    """The key is known but may not do this."""


class UnsupportedError(ServeError):
    """A valid request for something that this model or server does not do."""


class OverloadedError(ServeError):
    """Refused for now; the client may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceededError(OverloadedError):
    """A tier or key has reached its own limit; other clients may still be served. `reason` is a metrics label."""

    reason = "tier_limit"


class QueueFullError(OverloadedError):
    """The queue of the whole server is full, and this request must go. `reason` names the limit (a metrics label)."""

    def __init__(self, message: str, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.reason = reason


class QueueTimeoutError(OverloadedError):
    """The request waited in the queue for longer than the configured limit. `reason` is a metrics label."""

    reason = "queue_timeout"


class InsufficientMemoryError(ServeError):
    """The model or the request can never fit the memory that may be used on this machine."""


class EngineDeadError(ServeError):
    """The model's engine or the MLX thread has died. What was open is lost; the pool replaces an engine, but a thread
    only the process can."""


class ModelLoadError(ServeError):
    """A model cannot be loaded: the folder is unreadable, a file is missing, or the architecture is unknown or
    refused."""


class UnknownModelError(ModelLoadError):
    """There is no folder or file of that name, and the hub has no such model or does not show it to this machine."""


class DownloadError(ServeError):
    """A download failed, was incomplete, or does not have the expected digest."""


class InsufficientStorageError(DownloadError):
    """The disk has no room for a model that is fetched, converted or quantised."""


class ConfigError(ServeError):
    """A setting is unknown or has a wrong value; the message names the nearest known one."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped name: `; did you mean ...?`, or nothing if none of `known` is similar. The
    dashes of flags do not count as similarity: `--url` is not similar to `--turns`."""
    bare = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""
