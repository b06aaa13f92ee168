"""Splits a model across several machines with mlx-lm's own `shard` (tensor parallelism): each rank has its part of the
heads and widths of each layer, and the ranks sum their results twice in each layer.

All ranks must run the same collective operations in the same order; otherwise all of them wait forever. So each rank
does the same work on its MLX thread, and nothing that differs between machines (a time, a random number, a reading of
memory) may decide what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_server.errors import ConfigError, ModelLoadError

Group = mx.distributed.Group

NO_IMAGES = "it is spread over several machines (--tensor-parallel-size), which have no part for its vision encoder"

_JOIN_S = 120.0
_NOT_REACHED = "Couldn't connect"
"""Part of the error message of MLX's ring when it cannot connect to a rank."""

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""The settings that mlx-lm divides by the number of ranks without a check."""


def join_group(rank: int, size: int) -> Group:
    """Joins the group of all ranks that `mlx.launch` has started, and returns it once all are there. Raises
    `ConfigError`. MLX thread.

    MLX tries to reach a rank for a few seconds only, and a rank may take longer to start. In a ring the last rank
    connects first, while the others wait for a connection. So only the last rank may try again.
    """
    deadline_s = time.monotonic() + _JOIN_S
    while True:
        try:
            group = mx.distributed.init(strict=True)
            break
        except Exception as error:  # MLX's backends raise errors of any kind
            if rank < size - 1 or _NOT_REACHED not in str(error) or time.monotonic() > deadline_s:
                raise ConfigError(
                    f"The ranks cannot be joined: {error}. Start all of them with `mlx.launch`, at the same time."
                ) from error
    if group.size() != size:
        raise ConfigError(f"--tensor-parallel-size is {size}, and {group.size()} ranks were started.")
    return group


def from_first(group: Group, data: bytes) -> bytes:
    """Returns rank 0's `data` on all ranks. The other ranks must pass as many bytes. MLX thread."""
    mine = mx.array(list(data), dtype=mx.int32) * int(group.rank() == 0)
    return bytes(mx.distributed.all_sum(mine, group=group).tolist())  # type: ignore[arg-type]


def shard_model(model: Any, setting: Callable[[str], int | None], group: Group) -> None:
    """Reduces a model to this rank's part, which is lazy until it is evaluated. `setting` returns a number from the
    model's configuration. Call after loading and before any layer is replaced. Raises `ModelLoadError`. MLX thread."""
    kind, size = getattr(model, "model_type", type(model).__name__), group.size()
    if not hasattr(model, "shard"):
        raise ModelLoadError(
            f"Models of type {kind} cannot be spread over several machines: mlx-lm's code for them has no `shard`. "
            "Leave --tensor-parallel-size out."
        )
    for name in _DIVIDED:
        number = setting(name)
        if number and number % size:
            raise ModelLoadError(
                f"The model has {name} {number}, which {size} ranks cannot share evenly; choose a "
                "--tensor-parallel-size that divides it."
            )
    try:
        model.shard(group)
    except Exception as error:  # mlx-lm and MLX raise errors of any kind
        raise ModelLoadError(f"The model cannot be cut for {size} ranks: {type(error).__name__}: {error}") from error


def agreement(group: Group) -> Callable[[mx.array], mx.array]:
    """Returns a function that gives all ranks the token ids that rank 0 has sampled. The others sample, too, and may
    get other ids: machines of different kinds round differently, and each has its own random number generator.

    The factor keeps the graph the same on all ranks: if a rank did not have to sample first, it would begin with this
    sum.
    """
    factor = int(group.rank() == 0)
    return lambda token_ids: mx.distributed.all_sum(token_ids * factor, group=group)
