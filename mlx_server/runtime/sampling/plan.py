"""What the sampler needs of a request, worked out once when it is admitted: host arrays and a draw method."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_server.outputs import NewRequestData
from mlx_server.runtime.sampling.draw import DrawMethod, choose_method
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenOffsets:
    """What is added to the logits of some tokens: ids int32 and values float32, of one length."""

    token_ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request's share of every step. `banned` adds -inf to what may not end the output too early.

    `seed_key` and a position give the key of the noise there, whatever happened in between: preemption,
    prefix hits and batch mates do not change a request's stream.
    """

    params: SamplingParams
    method: DrawMethod
    seed_key: bytes
    bias: TokenOffsets | None
    banned: TokenOffsets | None
    allowed_bitmask: npt.NDArray[np.uint8] | None

    def noise_key(self, position: int) -> bytes:
        """Eight bytes for the token at `position` of the output."""
        return hashlib.blake2b(position.to_bytes(8, "little"), key=self.seed_key, digest_size=8).digest()


def plan_request(data: NewRequestData, vocab_size: int, entropy: bytes) -> RequestPlan:
    """Plans a request; ids outside the vocabulary are ignored here, the door refuses them.

    Without a seed the noise comes from the request's id and the process's `entropy`, so that a request that
    resumes goes on with the stream it had.
    """
    params = data.sampling
    name = data.request_id.encode() if params.seed is None else params.seed.to_bytes(8, "little", signed=True)
    key = entropy if params.seed is None else b"seed"
    bias = params.logit_bias
    stops = data.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else frozenset()
    return RequestPlan(
        params=params,
        method=choose_method(params, vocab_size),
        seed_key=hashlib.blake2b(name, key=key, digest_size=32).digest(),
        bias=_offsets({token_id: bias[token_id] for token_id in _known(bias, vocab_size)}),
        banned=_offsets(dict.fromkeys(_known(stops, vocab_size), -np.inf)),
        allowed_bitmask=_bitmask(params.allowed_token_ids, vocab_size),
    )


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


def _offsets(values: dict[int, float]) -> TokenOffsets | None:
    if not values:
        return None
    return TokenOffsets(np.array(list(values), np.int32), np.array(list(values.values()), np.float32))


def _bitmask(token_ids: Iterable[int] | None, vocab_size: int) -> npt.NDArray[np.uint8] | None:
    if token_ids is None:
        return None
    is_allowed = np.zeros(vocab_size, dtype=np.bool_)
    is_allowed[_known(token_ids, vocab_size)] = True
    return np.packbits(is_allowed, bitorder="little")
