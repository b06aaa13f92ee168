"""A model's weights and its runner, by the settings of a configuration: the same on all ranks that share a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_server.config import Config, ModelConfig
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, Pieces, RunnerInfo, load_in_pieces, make_runner
from mlx_server.runtime.models.resolve import find_folder
from mlx_server.runtime.sharding import Group


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """What `make_runner` is told of the memory: its own words."""

    max_num_tokens: int
    kv_limit_bytes: int
    state_limit_bytes: int


def find_model(settings: ModelConfig) -> Path | None:
    """The folder of a model, which is fetched or converted first if need be; None for random weights. Any thread."""
    return find_folder(settings.model, settings.dtype, settings.quantize, trust_remote_code=settings.trust_remote_code)


def read_model(settings: ModelConfig, folder: Path | None, group: Group | None = None) -> Pieces[LoadedModel]:
    """`load_in_pieces`."""
    return load_in_pieces(
        settings.model,
        folder,
        settings.dtype,
        adapters=settings.adapters,
        trust_remote_code=settings.trust_remote_code,
        batch_invariant=settings.batch_invariant,
        pooling=settings.pooling,
        group=group,
    )


def make_model_runner(config: Config, loaded: LoadedModel, room: PoolRoom) -> Pieces[tuple[ModelRunner, RunnerInfo]]:
    """`make_runner`."""
    return make_runner(
        loaded,
        backend=config.model.attention_backend,
        pool=config.cache,
        max_num_tokens=room.max_num_tokens,
        kv_limit_bytes=room.kv_limit_bytes,
        state_limit_bytes=room.state_limit_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        drafts=config.drafts,
        batch_invariant=config.model.batch_invariant,
    )
