"""One model over several machines (`--tensor-parallel-size`), as its engine sees it, and all that is refused there.

Each machine is a rank. Rank 0 has HTTP, the scheduler and the books of memory; it tells the others of every step before
it launches it itself (`leader.py`), and they do the same with their part of the model (`follower.py`). `Ranks` is what
an engine says to them, and here nobody listens: one process has the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

from mlx_server.config import FULL_KV, Config
from mlx_server.engine.loading import PoolRoom
from mlx_server.errors import ConfigError
from mlx_server.runtime.executor import StepRunner
from mlx_server.runtime.layers.sharding import Group
from mlx_server.runtime.memory import MemoryReading, read_memory
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo

T = TypeVar("T")

_RANK = "MLX_RANK"


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model; MLX may take `limit_bytes`. Answered with what is loaded."""

    number: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class MakeRunner:
    """Make its runner. Answered with what came of it."""

    number: int
    room: PoolRoom


class Ranks:
    """All ranks of a model, told by rank 0; of one process by itself, as here, nothing is told."""

    group: Group | None = None

    def read_memory(self) -> MemoryReading:
        """Of the rank that has least room. Any thread."""
        return read_memory()

    async def load(self, limit_bytes: int, work: Awaitable[LoadedModel]) -> LoadedModel:
        """Has all ranks load their part of the model while `work` loads this one's. Raises `ModelLoadError` if one
        cannot."""
        return await work

    async def make_runner(self, room: PoolRoom, work: Awaitable[tuple[T, RunnerInfo]]) -> tuple[T, RunnerInfo]:
        """Has all ranks make their runner while `work` makes this one's. Raises as `load` does."""
        return await work

    def leading(self, runner: StepRunner) -> StepRunner:
        """A runner whose steps all ranks launch."""
        return runner

    def unload(self) -> None:
        """Has the others unload behind all steps. Does nothing if there are no others any more."""

    def close(self) -> None:
        """The process is about to end: so do the others. Returns when they have, or soon."""


ALONE = Ranks()


def own_rank(size: int) -> int:
    """Which rank this process is. Raises `ConfigError`."""
    rank = os.environ.get(_RANK, "")
    if not rank.isdecimal():
        raise ConfigError(
            f"--tensor-parallel-size is {size}, and {_RANK} is not set: start the ranks with "
            f"`mlx.launch --hosts HOST,HOST -- mlx-serve serve --tensor-parallel-size {size} ...`."
        )
    return int(rank)


def check_shardable(config: Config) -> None:
    """Refuses by name what does not work with several ranks, or was never tried. Raises `ConfigError`. What the model
    itself does not allow is found when it is loaded (`shard_model`)."""
    if find_spec("msgspec") is None:
        raise ConfigError("--tensor-parallel-size needs msgspec: install it with `pip install 'mlx-server[fleet]'`.")
    model, speculate = config.model, config.scheduler.speculate
    unfit: list[tuple[str, object, str]] = [
        ("adapter", model.adapter, "LoRA adapters are not cut for ranks"),
        ("draft_model", model.draft_model, "a draft model would wait for all ranks for each token"),
        ("speculate", speculate if speculate in ("model", "mtp") else None, "only `auto`, `ngram` and `off` work"),
        ("batch_invariant", model.batch_invariant, "sums over ranks round in another order than one machine's"),
        ("kv_bits", None if config.cache.kv_bits == FULL_KV else config.cache.kv_bits, "this was never tried"),
        ("kv_disk", config.memory.kv_disk, "a block's content would have to come from all ranks"),
        ("models", ", ".join(entry.id for entry in config.models), "one model at a time can be spread"),
        ("model_folders", config.pool.model_folders, "one model at a time can be spread"),
        ("pulled_models", config.pool.pulled_models, "one model at a time can be spread"),
    ]
    for name, value, reason in unfit:
        if value:
            raise ConfigError(
                f"{name} is {value}, which does not go with --tensor-parallel-size {config.fleet.tensor_parallel_size}"
                f": {reason}. Leave one of both out."
            )


def described_weights(loaded: LoadedModel) -> str:
    """What must be the same on all ranks."""
    return f"{loaded.weight_bytes} bytes of weights"


def described_runner(info: RunnerInfo) -> str:
    """What must be the same on all ranks."""
    pool = f"{info.num_blocks} to {info.max_blocks} blocks of {info.block_bytes} bytes"
    return f"{pool}, {info.max_num_seqs} requests with states of {info.state_bytes} bytes, {info.level or 'one run'}"
