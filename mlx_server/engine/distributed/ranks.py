"""One model on several machines (`--tensor-parallel-size`), as its engine sees it, and what is refused with it.

Each machine is a rank. Rank 0 has HTTP, the scheduler and the memory budget. It sends every step to the others before
it launches the step itself (`leader.py`), and they run the step with their part of the model (`follower.py`). `Ranks`
is the engine's interface to them; this class itself is for one process with the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

from mlx_server.config import FULL_KV, Config
from mlx_server.environment import install_command
from mlx_server.errors import ConfigError
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.executor import StepRunner
from mlx_server.runtime.layers.sharding import Group
from mlx_server.runtime.memory import MemoryReading, read_memory
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo

T = TypeVar("T")

_RANK = "MLX_RANK"


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model; MLX may use `limit_bytes`. The answer describes the weights."""

    number: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class MakeRunner:
    """Make the runner. The answer describes it."""

    number: int
    room: PoolRoom


class Ranks:
    """All ranks of a model, as rank 0 controls them. This class is for a single process: there is no other rank."""

    group: Group | None = None

    def read_memory(self) -> MemoryReading:
        """The memory of the rank with the least room. Any thread."""
        return read_memory()

    async def load(self, limit_bytes: int, work: Awaitable[LoadedModel]) -> LoadedModel:
        """Has all ranks load their part of the model while `work` loads this rank's. Raises `ModelLoadError` if one
        fails."""
        return await work

    async def make_runner(self, room: PoolRoom, work: Awaitable[tuple[T, RunnerInfo]]) -> tuple[T, RunnerInfo]:
        """Has all ranks make their runner while `work` makes this rank's. Raises as `load` does."""
        return await work

    def leading(self, runner: StepRunner) -> StepRunner:
        """A runner whose steps all ranks launch."""
        return runner

    def unload(self) -> None:
        """Has the others unload after all steps. Does nothing if there are no others any more."""

    def close(self) -> None:
        """Ends the other ranks, since this process is about to end. Returns when they have ended, or after a few
        seconds."""


ALONE = Ranks()


def own_rank(size: int) -> int:
    """The rank of this process. Raises `ConfigError`."""
    rank = os.environ.get(_RANK, "")
    if not rank.isdecimal():
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but {_RANK} is not set: start the ranks with "
            f"`mlx.launch --hosts HOST,HOST -- mlx-serve serve --tensor-parallel-size {size} ...`."
        )
    return int(rank)


def check_shardable(config: Config) -> None:
    """Raises `ConfigError` for settings that do not work with several ranks, or were never tried. Loading checks the
    model itself (`shard_model`)."""
    if find_spec("msgspec") is None:
        raise ConfigError(f"--tensor-parallel-size needs msgspec. Install it: {install_command('fleet')}.")
    model, speculate = config.model, config.scheduler.speculate
    unfit: list[tuple[str, object, str]] = [
        ("adapter", model.adapter, "LoRA adapters are not split between ranks"),
        ("draft_model", model.draft_model, "a draft model would wait for all ranks for each token"),
        ("speculate", speculate if speculate in ("model", "mtp") else None, "only `auto`, `ngram` and `off` work"),
        ("batch_invariant", model.batch_invariant, "sums over ranks round differently from those on one machine"),
        ("kv_bits", None if config.cache.kv_bits == FULL_KV else config.cache.kv_bits, "this was never tried"),
        ("kv_disk", config.memory.kv_disk, "a block's content would have to come from all ranks"),
        ("models", ", ".join(entry.id for entry in config.models), "only one model at a time works"),
        ("model_folders", config.pool.model_folders, "only one model at a time works"),
        ("pulled_models", config.pool.pulled_models, "only one model at a time works"),
    ]
    for name, value, reason in unfit:
        if value:
            raise ConfigError(
                f"{name} is {value}, which does not work with --tensor-parallel-size "
                f"{config.fleet.tensor_parallel_size}: {reason}. Leave one of them out."
            )


def described_weights(loaded: LoadedModel) -> str:
    """A description that must be equal on all ranks."""
    return f"{loaded.weight_bytes} bytes of weights"


def described_runner(info: RunnerInfo) -> str:
    """A description that must be equal on all ranks."""
    pool = f"{info.num_blocks} to {info.max_blocks} blocks of {info.block_bytes} bytes"
    return f"{pool}, {info.max_num_seqs} requests with states of {info.state_bytes} bytes, {info.level or 'one run'}"
