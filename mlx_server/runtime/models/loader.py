"""Loads a model from its folder into memory, and makes a runner that has passed the probe."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.config import FULL_KV, Config, ModelConfig
from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.attention.backends import choose_in_pieces
from mlx_server.runtime.attention.interface import BidirectionalBackend
from mlx_server.runtime.attention.regroup import Scope
from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import PoolPlan, PoolRoom, attention_specs, discover_layers, plan_pools
from mlx_server.runtime.checks.image_probe import find_image_fault
from mlx_server.runtime.checks.invariance import check_invariance, compute_by_row
from mlx_server.runtime.checks.kv_loss import quantize_kv
from mlx_server.runtime.checks.probe import Probe
from mlx_server.runtime.checks.step_costs import FirstSteps, context_doubling, measure_first_steps
from mlx_server.runtime.kernels.gpu.product_choice import gpu_products
from mlx_server.runtime.kernels.gpu.products import ProductKernels
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.adapter_files import apply_adapter, merged_adapter
from mlx_server.runtime.layers.adapters import AdapterRows, install_adapters
from mlx_server.runtime.layers.cpu import bfloat16_weights, install_native, native_library
from mlx_server.runtime.layers.sharding import NO_IMAGES, Group, agreement, shard_model
from mlx_server.runtime.memory import return_freed_memory
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.blueprint import DTYPES, load_folder, read_folder, why_no_vision
from mlx_server.runtime.models.folder import CONTEXT_KEYS
from mlx_server.runtime.models.resolve import find_adapter, find_folder
from mlx_server.runtime.pooling import Pooler, PoolingSpec, load_dense, read_pooling
from mlx_server.runtime.vision import IMAGE_SHARE, ImageEncoder

T = TypeVar("T")
Pieces = Generator[float, None, T]
"""Work on the MLX thread that can be interrupted at each yield; it yields the share of weights that was read."""

_DEFAULT_CONTEXT = 8192
_PIECE_BYTES = 64 * 2**20
"""How much of the weights is read without another model's step in between."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An evaluated mlx-lm model and its configuration. `folder` is None for random weights. `adapters` are those that
    rows of a batch may use. `pooling` is what it gives besides text, or instead of it; None if nothing. `no_vision`
    says why its vision encoder was not loaded; empty if it was. `group` has the ranks that share the model."""

    name: str
    model: Any
    config: dict[str, Any]
    folder: Path | None
    adapters: AdapterRows = field(default_factory=AdapterRows)
    pooling: PoolingSpec | None = None
    no_vision: str = ""
    group: Group | None = None

    def setting(self, *names: str) -> int | None:
        """The first of these numbers in the configuration or in the model's arguments, in which mlx-lm fills in
        defaults."""
        nested = self.config.get("text_config")
        models: tuple[Any, ...] = (getattr(self.model, "language_model", None), self.model)
        arguments = [vars(model.args) for model in models if hasattr(model, "args")]
        places = (nested if isinstance(nested, dict) else {}, self.config, *arguments)
        found = (place[name] for name in names for place in places if isinstance(place.get(name), int))
        return next(found, None)

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Raises `ModelLoadError` if it is unknown."""
        size = self.setting("vocab_size")
        if size is None:
            raise ModelLoadError(f"The configuration of {self.name} has no vocab_size; add it to config.json.")
        return size

    @property
    def weight_bytes(self) -> int:
        """The memory of the weights."""
        return sum(int(array.nbytes) for _, array in tree_flatten(self.model.parameters()))

    @property
    def max_model_len(self) -> int:
        """The context length the model was made for, in tokens."""
        return self.setting(*CONTEXT_KEYS) or _DEFAULT_CONTEXT


@dataclass(frozen=True, slots=True)
class RunnerInfo(PoolPlan):
    """What the engine needs to know about a runner: its pools, and more.

    A block has 32 tokens of one layer group. `windows` are the tokens that each group sees, None for all. `level` says
    how much of the model runs group by group instead of once a step. `max_num_seqs` is how many requests it has room
    for: as many as configured, unless each keeps much recurrent state (`is_recurrent`). `no_vision` says why the model
    takes no images; empty if it does.
    """

    windows: tuple[int | None, ...]
    backend: str
    context_doubling_tokens: float
    level: str
    is_recurrent: bool
    first_steps: FirstSteps | None
    no_vision: str


def load(
    name: str, dtype: Any = "auto", *, adapters: Sequence[Adapter] = (), trust_remote_code: bool = False
) -> LoadedModel:
    """`find_folder` and `load_in_pieces` together. MLX thread."""
    settings = ModelConfig(model=name, dtype=dtype, trust_remote_code=trust_remote_code)
    folder, found = find_folder(name, dtype), [find_adapter(adapter) for adapter in adapters]
    return exhaust(load_in_pieces(settings, folder, found))


def load_in_pieces(
    settings: ModelConfig,
    folder: Path | None,
    adapters: Sequence[Adapter] = (),
    group: Group | None = None,
    *,
    sees: bool = True,
) -> Pieces[LoadedModel]:
    """Loads a model and its adapters from their folders. MLX thread. Raises `ModelLoadError`.

    Yields the share of the weights that is in memory, each time other models' steps may run in between. The dtype
    `auto` keeps the model's own type on a GPU; on the CPU it computes in float32, because products in half precision
    are over ten times slower there, and keeps weights in bfloat16 where the native products can read them. With
    `batch_invariant`, each product on a GPU uses one kernel for any number of rows, if there is one. Unless it `sees`,
    a model is loaded without a vision encoder. With a `group` of ranks, each reads and keeps its own part only, and
    none sees.
    """
    install_seam()
    name, no_vision, trust_remote_code = settings.model, "", settings.trust_remote_code
    if folder is None:
        model, config = random_models.build(name)
    elif group is not None or not sees:
        model, config = read_folder(folder, trust_remote_code)
        no_vision = why_no_vision(folder) or NO_IMAGES
    else:
        model, config, no_vision = load_folder(folder, trust_remote_code)
    yield 0.0
    spec = read_pooling(folder, name, config, settings.pooling)
    merged = merged_adapter(adapters)
    if merged is not None:
        apply_adapter(model, merged)
    rows = install_adapters(model, adapters if merged is None else ())
    yield 0.0
    loaded = LoadedModel(name, model, config, folder, rows, spec, no_vision, group)
    if group is not None:
        shard_model(model, loaded.setting, group)
    exact = settings.batch_invariant
    yield from prepare_weights(model, settings.dtype, batch_invariant=exact, is_alone=group is None)
    return loaded


def prepare_weights(model: Any, dtype: str, *, batch_invariant: bool = False, is_alone: bool = True) -> Pieces[None]:
    """Converts the lazy weights of a built model to their type, loads them, and installs this machine's products. As
    `load_in_pieces`. Ranks of a model keep MLX's products on GPUs: those that each measured to be faster might differ,
    and so might the experts that they choose."""
    _drop_dynamic_scaling(model)
    chosen = compute_dtype(dtype)
    kept = bfloat16_weights(model) if dtype == "auto" and native_library() is not None else ()
    yield 0.0
    if chosen is not None:
        model.set_dtype(chosen)
    yield 0.0
    if chosen == mx.float32:
        install_native(model, kept)
    yield 0.0
    yield from evaluate([array for _, array in tree_flatten(model.parameters())])
    if is_metal() and is_alone:
        text = getattr(model, "language_model", model)  # a vision encoder never has few rows
        for _ in gpu_products(text, ProductKernels.of_metal(), exact=batch_invariant):
            yield 1.0


def compute_dtype(dtype: str) -> mx.Dtype | None:
    """The type of the setting --dtype in which a model computes here; None if that is its own."""
    return DTYPES.get(dtype) or (mx.float32 if mx.default_device() == mx.cpu else None)


def _drop_dynamic_scaling(model: Any) -> None:
    """Replaces rotary embeddings that change beyond the model's context length only, since longer contexts are not
    served. mlx-lm's code for them takes one request at a time."""
    for module in model.modules():
        rope: Any = getattr(module, "rope", None)
        if type(rope).__name__ == "DynamicNTKScalingRoPE":  # of two modules, with other names for the same
            base = getattr(rope, "original_base", None) or rope.base
            module.rope = nn.RoPE(rope.dims, rope.traditional, base, getattr(rope, "scale", 1.0))


def evaluate(arrays: Sequence[mx.array]) -> Pieces[None]:
    """Reads and converts lazy weights. MLX thread.

    mlx-lm draws initial weights for all layers before it has those of a file. The thread's random state would keep the
    graph of these draws, since nothing computes them, so it begins again."""
    total_bytes = sum(array.nbytes for array in arrays)
    done_bytes = piece_bytes = 0
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        piece_bytes += array.nbytes
        if piece_bytes >= _PIECE_BYTES:
            mx.eval(*piece)
            done_bytes += piece_bytes
            piece, piece_bytes = [], 0
            yield done_bytes / total_bytes
    mx.eval(*piece)
    mx.random.seed(0)
    yield 1.0


def make_runner(loaded: LoadedModel, config: Config, room: PoolRoom) -> Pieces[tuple[ModelRunner, RunnerInfo]]:
    """A runner with its pools, after its logits were compared with plain mlx-lm's. MLX thread; yields where other
    models' steps may run in between.

    The pool starts small, unless its number of blocks is given. If anything may draft, there are also recurrent states
    behind drafts. Raises `ModelLoadError` if the model cannot be paged, gives other logits in a ragged batch, or is not
    batch-invariant although it must be; `InsufficientMemoryError` or `ConfigError` if the requested pool or backend is
    impossible.
    """
    install_seam()
    settings, kv_bits = config.model, config.cache.kv_bits
    layers = discover_layers(loaded.model)
    yield 1.0
    cache = PagedKVCache(layers, (yield from choose_in_pieces(settings.attention_backend, attention_specs(layers))))
    yield 1.0
    if settings.batch_invariant:
        yield from compute_by_row(loaded.model, cache.backend, tuple(loaded.adapters.by_name))
    probe = yield from Probe.in_pieces(loaded.model, loaded.vocab_size, loaded.adapters)
    pooler = Pooler(load_dense(loaded.pooling))
    runner = ModelRunner(loaded.model, cache, loaded.vocab_size, loaded.adapters, pooler)
    if loaded.group is not None:
        runner.sampler.agree = agreement(loaded.group)
    try:
        yield from probe.find_level(runner)
        no_vision = loaded.no_vision or (yield from find_image_fault(loaded.model, runner, loaded.vocab_size))
        is_bidirectional = _check_pooling(loaded, runner)
        if is_bidirectional:
            cache.backend = BidirectionalBackend(cache.backend.make_rows)
        elif kv_bits != FULL_KV:
            yield from quantize_kv(runner, loaded.vocab_size, kv_bits, settings.attention_backend)
            if settings.batch_invariant:
                yield from compute_by_row(loaded.model, cache.backend, tuple(loaded.adapters.by_name))
        yield 1.0
        if settings.batch_invariant:
            yield from check_invariance(runner, loaded.vocab_size)
        runner.warm_up_sampler()
        yield 1.0
        mx.clear_cache()  # frees the memory of the probe
        if not no_vision:
            runner.images = ImageEncoder(loaded.model, max_bytes=int(IMAGE_SHARE * room.kv_limit_bytes))
            room = replace(room, kv_limit_bytes=room.kv_limit_bytes - runner.images.max_bytes)
        max_num_seqs = config.scheduler.max_num_seqs
        plan = plan_pools(cache, config.cache, room, max_num_seqs=max_num_seqs, drafts=config.drafts)
        cache.allocate(plan.num_blocks, plan.max_blocks, num_slots=plan.all_slots, num_checkpoints=plan.num_checkpoints)
        first_steps = yield from measure_first_steps(runner, plan.num_blocks, room.max_num_tokens)
    except BaseException:
        runner.close()
        raise
    info = RunnerInfo(
        **asdict(plan),
        windows=cache.windows,
        backend=cache.backend.name,
        context_doubling_tokens=context_doubling(loaded.model, loaded.vocab_size, loaded.setting),
        level=str(runner.forward.level),
        is_recurrent=bool(cache.recurrent),
        first_steps=first_steps,
        no_vision=no_vision,
    )
    return runner, info


def _check_pooling(loaded: LoadedModel, runner: ModelRunner) -> bool:
    """Whether the model is a bidirectional embedder. Raises `ModelLoadError` if its code gives no access to hidden
    states, or does not allow bidirectional attention."""
    spec = loaded.pooling
    if spec is None or spec.is_reranker:
        return False
    if not runner.forward.can_select_rows:
        raise ModelLoadError(
            f"{loaded.name} cannot give vectors: mlx-lm's code for it does not separate its body from its head. Start "
            "it with --pooling off."
        )
    if spec.is_bidirectional and runner.forward.level.scope is not Scope.NOTHING:
        raise ModelLoadError(
            f"{loaded.name} is bidirectional, but mlx-lm's code for it computes causal attention only."
        )
    return spec.is_bidirectional


def wait_for_device() -> None:
    """Returns when the device has done all that it was given, or raises its error. MLX thread."""
    mx.synchronize()


def compute_something() -> None:
    """Adds two numbers on the device. Raises MLX's error if it cannot. MLX thread."""
    mx.eval(mx.array(1.0) + mx.array(2.0))


def release(last_references: list[object]) -> None:
    """Drops the last references to a model on the thread of its arrays' streams, and returns its memory and MLX's
    caches to the system. MLX thread."""
    last_references.clear()
    gc.collect()
    mx.clear_cache()
    return_freed_memory()


def is_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return bool(mx.default_device() != mx.cpu)


def is_metal() -> bool:
    """Whether MLX computes on Apple's GPU."""
    return is_gpu() and bool(mx.metal.is_available())
