"""What is made of a request's hidden states where no token is wanted: one vector."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PoolingMethod(enum.StrEnum):
    """Which positions of a prompt of N tokens count how much, as sentence-transformers defines and names them."""

    LAST = "lasttoken"
    """The last one alone, which in a causal model has seen all others."""

    CLS = "cls_token"
    """The first one alone."""

    MEAN = "mean_tokens"
    """Each 1 / N."""

    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    """Each 1 / sqrt(N)."""

    WEIGHTED_MEAN = "weightedmean_tokens"
    """Position i, counted from 1, i / (1 + 2 + ... + N) (SGPT, Muennighoff 2022)."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """For a request that ends with its prompt. Its result is the pooled hidden state, taken behind the model's last
    norm and sent through the dense layers of the model's folder; or, if `logit_ids` are given, the logits of these
    tokens after the last position. `is_whole` asks for all of the prompt in one step: each position sees all others."""

    method: PoolingMethod = PoolingMethod.LAST
    logit_ids: tuple[int, ...] = ()
    is_whole: bool = False


Vector = bytes
"""Of float32 numbers, in the byte order of this machine."""
