"""Sparse attention whose choices begin far behind the prompts of the check at load."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.utils import _get_classes

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.models.loader import LoadedModel, make_runner
from tests.architectures import config_of


def level_of(model: Any, config: dict[str, Any]) -> str:
    steps = make_runner(
        LoadedModel("sparse", model, config, None),
        Config(
            model=ModelConfig(attention_backend="reference"),
            cache=CacheConfig(num_kv_blocks=16),
            scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
        ),
        PoolRoom(512, 10**8, 10**8),
    )
    return exhaust(steps)[1].level


def sparse_model(kind: type[deepseek_v32.Indexer] = deepseek_v32.Indexer) -> tuple[Any, dict[str, Any]]:
    config = {**copy.deepcopy(config_of("deepseek_v32")), "index_topk": 2048}
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.eval(model.parameters())
    for layer in model.layers:
        layer.self_attn.indexer.__class__ = kind
    return model, config


class _WrongInLaterChunks(deepseek_v32.Indexer):
    """Takes the first tokens in chunks behind the first."""

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
        is_later = x.shape[1] > 1 and bool(mx.any(mx.array(cache.offset) > 0))
        chosen = super().__call__(x, qr, mask, cache=cache)
        if chosen is None or not is_later:
            return chosen
        return mx.broadcast_to(mx.arange(chosen.shape[-1], dtype=chosen.dtype), chosen.shape)


def test_layers_that_choose_as_plain_ones_do_keep_their_limit() -> None:
    model, config = sparse_model()
    assert level_of(model, config) == "mixers"
    assert {layer.self_attn.indexer.index_topk for layer in model.layers} == {2048}


def test_what_chooses_wrongly_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="where its layers choose the tokens that they attend to"):
        level_of(*sparse_model(_WrongInLaterChunks))
