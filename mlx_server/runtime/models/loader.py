"""From a model's name, as a user gives it, to its folder, to a model in memory, and to a runner that has passed the
probe."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import mlx.core as mx
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_mlx_model

from mlx_server.config import FULL_KV, CacheConfig
from mlx_server.errors import DownloadError, ModelLoadError, ServeError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.adapters import AdapterRows, apply_adapter, install_adapters, merged_adapter
from mlx_server.runtime.backends import choose_backend
from mlx_server.runtime.kv_cache import PagedKVCache
from mlx_server.runtime.layers import attention_specs, discover_layers, plan_pools
from mlx_server.runtime.model_runner import FirstSteps, ModelRunner, measure_first_steps
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.blueprint import DTYPES, model_classes
from mlx_server.runtime.models.bundled import SMOLLM2, pull_bundled
from mlx_server.runtime.models.folder import missing_parts
from mlx_server.runtime.probe import Probe
from mlx_server.runtime.seam import install_seam

_HUB_ID = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
_HUB_FILES = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.py",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "tiktoken.model",
    "model*.safetensors",
)


def resolve_model(name: str) -> Path:
    """The folder of `smollm2` (pulled if need be), of an existing folder, or of a model of the Hugging Face hub.

    The folder is complete, as far as its files tell without being loaded. Raises `ModelLoadError` when `name`
    is none of the three or its folder lacks something, `DownloadError` when fetching fails.
    """
    if name == SMOLLM2.name:
        return pull_bundled()
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ModelLoadError(
            f"{name} is a file; a model is a folder with config.json, model*.safetensors and a tokenizer."
        )
    if _HUB_ID.fullmatch(name) is None:
        raise ModelLoadError(
            f"There is no model {name}: it is no folder here, no hub id (owner/name), and not `{SMOLLM2.name}`."
        )
    return _checked(_hub_snapshot(name))


def _checked(folder: Path) -> Path:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelLoadError(f"{folder} cannot be read; check its permissions.")
    missing = missing_parts(folder)
    if missing:
        raise ModelLoadError(f"{folder} is no model in mlx-lm format; it lacks {', and '.join(missing)}.")
    return folder


def _hub_snapshot(name: str) -> Path:
    """In the hub's own cache: complete files are not fetched again, and then no network is needed."""
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError as error:
        raise DownloadError(
            f"{name} asks for an agreement: accept it at https://huggingface.co/{name}, then set HF_TOKEN "
            "or run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"The hub has no model {name}, or it is private. Check the spelling; for a private one set HF_TOKEN."
        ) from error
    except Exception as error:  # the hub's client lets the errors of its HTTP library through
        raise DownloadError(
            f"Cannot fetch {name} from the hub, and it is neither in the hub's cache nor a folder here "
            f"({_first_line(error)}). Check the connection and HF_HUB_OFFLINE, or give a folder."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


logger = logging.getLogger(__name__)

T = TypeVar("T")
Pieces = Generator[float, None, T]
"""Work on the MLX thread that can be interrupted at each yield; what it yields is the share of weights read."""

_DEFAULT_CONTEXT = 8192
_PIECE_BYTES = 64 * 2**20
"""Weights that are read in one piece, without another model's step in between."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An evaluated mlx-lm model and its configuration. `folder` is None for random weights. `adapters` are those that
    rows of a batch may have."""

    name: str
    model: Any
    config: dict[str, Any]
    folder: Path | None
    adapters: AdapterRows = field(default_factory=AdapterRows)

    def setting(self, *names: str) -> int | None:
        """The first of these numbers in the configuration or in the model's own arguments: mlx-lm fills in what a
        configuration leaves out."""
        nested = self.config.get("text_config")
        models: tuple[Any, ...] = (getattr(self.model, "language_model", None), self.model)
        arguments = [vars(model.args) for model in models if hasattr(model, "args")]
        places = (nested if isinstance(nested, dict) else {}, self.config, *arguments)
        found = (place[name] for name in names for place in places if isinstance(place.get(name), int))
        return next(found, None)

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Raises `ModelLoadError` if nothing tells."""
        size = self.setting("vocab_size")
        if size is None:
            raise ModelLoadError(f"The configuration of {self.name} has no vocab_size; add it to config.json.")
        return size

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(int(array.nbytes) for _, array in tree_flatten(self.model.parameters()))

    @property
    def max_model_len(self) -> int:
        """The context length the model was made for, in tokens."""
        names = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length", "n_ctx")
        return self.setting(*names) or _DEFAULT_CONTEXT


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the floors above need to know of a runner that is ready.

    Its pool has `num_blocks` at first and may grow to `max_blocks`; a block holds 32 tokens of one of its layer
    groups. `windows` are the tokens that each group sees, None for all. `level` says how much of the model runs
    group by group instead of once a step. `max_num_seqs` is how many requests it has room for: as many as asked for
    unless each keeps much recurrent state (`is_recurrent`). States take `state_bytes` in all, `num_checkpoints` that
    are kept for prefixes included. `first_steps` are measured last.
    """

    num_blocks: int
    max_blocks: int
    block_bytes: int
    windows: tuple[int | None, ...]
    backend: str
    context_doubling_tokens: float
    level: str
    max_num_seqs: int
    is_recurrent: bool
    num_checkpoints: int
    state_bytes: int
    first_steps: FirstSteps | None = None


def find_folder(name: str) -> Path | None:
    """The folder of the model with that name, folder or hub id, fetched if need be; None for random weights.
    Any thread, and as long as a download takes. Raises `ModelLoadError` or `DownloadError`."""
    return None if random_models.is_random(name) else resolve_model(name)


def load(
    name: str, dtype: str = "auto", *, adapters: Sequence[Adapter] = (), trust_remote_code: bool = False
) -> LoadedModel:
    """`find_folder` and `load_in_pieces` at once. MLX thread."""
    folder = find_folder(name)
    return exhaust(load_in_pieces(name, folder, dtype, adapters=adapters, trust_remote_code=trust_remote_code))


def load_in_pieces(
    name: str,
    folder: Path | None,
    dtype: str = "auto",
    *,
    adapters: Sequence[Adapter] = (),
    trust_remote_code: bool = False,
) -> Pieces[LoadedModel]:
    """Loads a model from its folder, with its adapters, each in theirs. MLX thread; raises `ModelLoadError`.

    Yields the share of the weights that is in memory, each time other models' steps may come in between.
    `auto` keeps the model's own type on a GPU; on the CPU it is float32, since products of half-precision
    numbers are over ten times slower there.
    """
    install_seam()
    model, config = random_models.build(name) if folder is None else _load_folder(folder, trust_remote_code)
    merged = merged_adapter(adapters)
    if merged is not None:
        apply_adapter(model, merged)
    rows = install_adapters(model, adapters if merged is None else ())
    wanted = DTYPES.get(dtype) or (mx.float32 if mx.default_device() == mx.cpu else None)
    if wanted is not None:
        model.set_dtype(wanted)
    yield 0.0
    yield from _evaluate(model)
    return LoadedModel(name, model, config, folder, rows)


def _evaluate(model: Any) -> Pieces[None]:
    """Reads and converts the weights, which are lazy until then."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
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
    yield 1.0


def exhaust(work: Pieces[T]) -> T:
    """Does all pieces, one after another."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def _load_folder(folder: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_mlx_model(
            folder, lazy=True, get_model_classes=model_classes, trust_remote_code=trust_remote_code
        )
    except ServeError:
        raise
    except Exception as error:  # mlx-lm raises errors of any kind
        raise ModelLoadError(f"Cannot load the model in {folder}: {type(error).__name__}: {error}") from error
    return model, config


def make_runner(
    loaded: LoadedModel,
    *,
    backend: str,
    pool: CacheConfig,
    max_num_tokens: int,
    max_num_seqs: int,
    kv_limit_bytes: int,
    state_limit_bytes: int,
) -> Pieces[tuple[ModelRunner, RunnerInfo]]:
    """A runner with its pools, after its results were compared with plain mlx-lm's. MLX thread; yields
    where other models' steps may come in between.

    The pool never needs room for more than `max_num_tokens`, and may take `kv_limit_bytes`. It starts small, unless its
    number of blocks is given. At most `max_num_seqs` requests run at a time. Recurrent state, which does not grow,
    takes shares of `state_limit_bytes`, the memory that is free now. Raises `ModelLoadError` if the model cannot be
    paged or gives other logits in a ragged batch, `InsufficientMemoryError` or `ConfigError` if the pool or the backend
    asked for is impossible.
    """
    install_seam()
    layers = discover_layers(loaded.model)
    yield 1.0
    cache = PagedKVCache(layers, choose_backend(backend, attention_specs(layers)))
    probe = Probe(loaded.model, loaded.vocab_size, loaded.adapters)
    runner = ModelRunner(loaded.model, cache, loaded.vocab_size, loaded.adapters)
    try:
        probe.find_level(runner)
        if pool.kv_bits != FULL_KV:
            _quantize_kv(runner, probe, int(pool.kv_bits), backend)
        yield 1.0
        cache.warm_up()
        yield 1.0
        runner.warm_up_sampler()
        yield 1.0
        mx.clear_cache()  # frees what the probe has used
        plan = plan_pools(
            cache,
            pool,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            kv_limit_bytes=kv_limit_bytes,
            state_limit_bytes=state_limit_bytes,
        )
        cache.allocate(plan.num_blocks, plan.max_blocks, num_slots=plan.num_slots, num_checkpoints=plan.num_checkpoints)
        first_steps = yield from measure_first_steps(runner, plan.num_blocks, max_num_tokens)
    except BaseException:
        runner.close()
        raise
    info = RunnerInfo(
        num_blocks=plan.num_blocks,
        max_blocks=plan.max_blocks,
        block_bytes=plan.block_bytes,
        windows=cache.windows,
        backend=cache.backend.name,
        context_doubling_tokens=_context_doubling(loaded),
        level=str(runner.forward.level),
        max_num_seqs=plan.num_slots,
        is_recurrent=bool(cache.recurrent),
        num_checkpoints=plan.num_checkpoints,
        state_bytes=plan.state_bytes,
        first_steps=first_steps,
    )
    return runner, info


def _quantize_kv(runner: ModelRunner, probe: Probe, bits: int, backend: str) -> None:
    """Stores K/V in fewer bits from now on, with a backend that reads them, and logs the difference of the logits."""
    cache = runner.cache
    whole_bytes = cache.block_bytes
    cache.quantize(bits)
    cache.backend = choose_backend(backend, attention_specs(cache.layers))
    logger.info(
        "K/V of %d bits take %.0f %% of the memory and are read by the %s backend; logits differ by up to %.1e of the "
        "largest.",
        bits,
        100 * cache.block_bytes / max(1, whole_bytes),
        cache.backend.name,
        probe.error(runner),
    )


def _context_doubling(loaded: LoadedModel) -> float:
    """The context at which attention costs a token as many operations as the weights do."""
    num_parameters = sum(_num_elements(array) for _, array in tree_flatten(loaded.model.parameters()))
    num_heads = loaded.setting("num_attention_heads", "n_heads") or 1
    hidden_size = loaded.setting("hidden_size", "dim") or 1
    head_dim = loaded.setting("head_dim") or hidden_size // num_heads
    num_layers = loaded.setting("num_hidden_layers", "n_layers") or 1
    embedding = loaded.vocab_size * hidden_size
    return max(1.0, (num_parameters - embedding) / (2.0 * num_layers * num_heads * head_dim))


def _num_elements(array: mx.array) -> int:
    # Packed quantised weights hold several values a word; four bits a value is close enough for a cost.
    return int(array.size) * (8 if array.dtype == mx.uint32 else 1)


def release(last_references: list[object]) -> None:
    """Drops a model's last references on the thread of its arrays' streams, and gives MLX's cached memory back to the
    system. MLX thread."""
    last_references.clear()
    gc.unfreeze()  # the server freezes what it has loaded
    gc.collect()
    mx.clear_cache()


def is_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device() != mx.cpu)


def is_metal() -> bool:
    """Whether that GPU is Apple's."""
    return is_gpu() and bool(mx.metal.is_available())
