"""What K/V in fewer bits, in the pool or on disk, cost a model on a text: perplexity, and how often the most likely
token is the same.

Everything runs through the server's own pools and kernels. With `--outlying-keys F` the model is also measured with two
rotary pairs of each key head made F times as large and the queries' as much smaller, which changes nothing where K/V
are whole.

example:
  mlx-serve bench kv-bits --text docs/memory.md --outlying-keys 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.bench.arguments import from_1
from mlx_server.bench.tables import render_table
from mlx_server.config import BLOCK_SIZE, DEFAULT_MODEL, FEWER_KV
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError, ServeError
from mlx_server.kv_disk.rounding import Rounding
from mlx_server.outputs import CopyPlace
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import attention_specs, discover_layers
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.checks.kv_loss import KvLoss, all_logits
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, load
from mlx_server.runtime.pooling import Pooler, load_dense

_ON_DISK = "8 bits on disk"
_FEWER = [(bits.words, bits) for bits in map(KvBits.of, FEWER_KV)]
_PAIRS = (3, 20)
"""Of a head's rotary pairs, those that are made larger."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench kv-bits`."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="a folder, a hub id, a GGUF file, or the bundled one")
    add("--text", type=Path, required=True, help="file of the text that is measured on")
    add("--num-tokens", type=from_1, default=320, metavar="TOKENS", help="of the text")
    add("--outlying-keys", type=float, action="append", default=[], metavar="F", help="also with keys that stick out")


def run(args: argparse.Namespace) -> int:
    """Prints a table."""
    loaded = load(args.model)
    if loaded.folder is None:
        raise ServeError(f"{args.model} has no tokenizer, and a text is measured.")
    text = args.text.read_text(encoding="utf-8")
    token_ids = Tokenizer.from_folder(loaded.folder).encode(text)[: args.num_tokens]
    rows = list(_rows(loaded, token_ids, "as it is"))
    for factor in args.outlying_keys:
        scale_keys(loaded, factor)
        rows += _rows(loaded, token_ids, f"keys x {factor:g}")
        scale_keys(loaded, 1 / factor)
    print(render_table(("model", "K/V", "perplexity", "nats", "same token", "bytes a token"), rows))
    return 0


def _rows(loaded: LoadedModel, token_ids: Sequence[int], name: str) -> Iterator[tuple[str, ...]]:
    wanted: mx.array | None = None
    for stored, bits in (("whole", None), *_FEWER, (_ON_DISK, None)):
        runner = _make_runner(loaded, bits)
        try:
            token_bytes = runner.cache.block_bytes // BLOCK_SIZE
            if stored == _ON_DISK:
                contents = BlockContents(runner.cache)
                if (dtype := contents.dtype()) is None:
                    continue
                rounding = Rounding(dtype, runner.cache.block_bytes)
                logits = all_logits(runner, token_ids, partial(_round, contents, rounding))
                token_bytes = rounding.packed_bytes // BLOCK_SIZE
            else:
                logits = all_logits(runner, token_ids)
        finally:
            runner.close()
        wanted = logits if wanted is None else wanted
        loss = KvLoss.of(wanted, logits)
        perplexity = f"{_perplexity(logits, token_ids):.2f}"
        yield name, stored, perplexity, f"{loss.divergence:.4f}", f"{loss.agreement:.1%}", f"{token_bytes:,}"


def _round(contents: BlockContents, rounding: Rounding, blocks: list[CopyPlace]) -> None:
    """As blocks are when they come back from the disk in 8 bits."""
    packed = [rounding.pack(content) for content in contents.read(blocks)]
    contents.write([(place, rounding.unpack(one)) for place, one in zip(blocks, packed) if one is not None])


def _make_runner(loaded: LoadedModel, bits: KvBits | None) -> ModelRunner:
    install_seam()
    layers = discover_layers(loaded.model)
    cache = PagedKVCache(layers, choose_backend("auto", attention_specs(layers)))
    if bits is not None:
        cache.quantize(bits)
        cache.backend = choose_backend("auto", attention_specs(cache.layers))
    return ModelRunner(loaded.model, cache, loaded.vocab_size, loaded.adapters, Pooler(load_dense(loaded.pooling)))


def _perplexity(logits: mx.array, token_ids: Sequence[int]) -> float:
    """Of the tokens behind those that have logits."""
    inner, first = logits[:-1], len(token_ids) - len(logits)
    nats = mx.logsumexp(inner, axis=-1) - inner[mx.arange(len(inner)), mx.array(list(token_ids[first + 1 :]))]
    return float(np.exp(nats.mean().item()))


def scale_keys(loaded: LoadedModel, factor: float) -> None:
    """Makes some rotary pairs of each key head `factor` times as large, and the queries' as much smaller: their
    products stay. For models that rotate halves of heads and have projections of their own for q and k."""
    heads, kv_heads = loaded.setting("num_attention_heads"), loaded.setting("num_key_value_heads")
    for layer in loaded.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        if heads is None or kv_heads is None or attention is None or not hasattr(attention, "k_proj"):
            raise ConfigError(f"--outlying-keys: {loaded.name} has no q_proj and k_proj.")
        _scale_rows(attention.k_proj, kv_heads, factor)
        _scale_rows(attention.q_proj, heads, 1 / factor)


def _scale_rows(projection: Any, num_heads: int, factor: float) -> None:
    dim = projection.weight.shape[0] // num_heads
    by = np.ones((num_heads, dim), np.float32)
    for pair in _PAIRS:
        by[:, [pair % (dim // 2), pair % (dim // 2) + dim // 2]] = factor
    rows = mx.array(by.reshape(-1, 1))
    for part in ("scales", "biases") if "scales" in projection else ("weight",):
        setattr(projection, part, (getattr(projection, part) * rows).astype(getattr(projection, part).dtype))
    if "bias" in projection:
        projection.bias = (projection.bias * rows[:, 0]).astype(projection.bias.dtype)
