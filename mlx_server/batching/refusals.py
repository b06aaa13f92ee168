"""The errors with which the scheduler ends requests that it had accepted."""

from __future__ import annotations

from mlx_server.errors import InvalidRequestError, OverloadedError, QueueFullError, QueueTimeoutError, ServeError
from mlx_server.request import Request

_DISPLACED_RETRY_S = 5.0


def displacement(num_waiting: int) -> ServeError:
    """For a request that must leave a full queue."""
    return QueueFullError(
        f"The queue is full ({num_waiting} requests wait), and a request of a better tier has taken this one's place. "
        "Try again later.",
        "displaced",
        _DISPLACED_RETRY_S,
    )


def expiry(waited_s: float, timeout_s: float) -> ServeError:
    """For a request that has waited too long for its first step."""
    return QueueTimeoutError(
        f"The request waited {waited_s:.1f} s for its first step; the limit is {timeout_s:g} s "
        "(--queue-timeout-s). Try again when the server is less busy."
    )


def starvation(request: Request, most_tokens: int, waited_s: float) -> ServeError:
    """For a request that waited for memory although no other was running; the pool holds `most_tokens`."""
    return OverloadedError(
        f"There is no memory for the request's {request.num_tokens} tokens and the next: the KV pool holds "
        f"{most_tokens} and could not grow for {waited_s:g} s. Try again later, unload a model, or shorten the prompt."
    )


def unseen(error: str) -> ServeError:
    """For a request with an image that the vision encoder could not encode."""
    return ServeError(
        f"The model's vision encoder failed on an image of the request: {error}. The server and other requests go "
        "on. Send the image smaller or in another form, or without it; the server's log has the whole error."
    )


def grammar_error(request: Request, token_id: int) -> ServeError:
    """For a request whose grammar does not allow its next token. It is the request's own fault if the grammar is too
    complex, or if the request forbids all tokens that the grammar allows: a row without any allowed token gives token
    0."""
    sampling, num_tokens = request.sampling, len(request.output_token_ids) - 1
    given_up = None if request.constraint is None else request.constraint.error
    if given_up is not None:
        return InvalidRequestError(f"The grammar cannot be followed beyond {num_tokens} tokens of output: {given_up}.")
    if sampling.allowed_token_ids is not None:
        return InvalidRequestError(
            f"The grammar allows none of allowed_token_ids after {num_tokens} tokens of output; add those that it "
            "needs, or leave the field out.",
            "allowed_token_ids",
        )
    if num_tokens < sampling.min_tokens:
        return InvalidRequestError(
            f"The grammar allows only stop tokens after {num_tokens} tokens of output; min_tokens is "
            f"{sampling.min_tokens}. Lower min_tokens, or leave it out.",
            "min_tokens",
        )
    return ServeError(f"Token {token_id} does not fit the request's grammar; the output would be invalid.")
