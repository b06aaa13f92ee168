"""Estimates the memory that a model needs, from its files, before it is loaded."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_server.batching.limits import MIN_SAMPLED_ROWS
from mlx_server.config import BLOCK_SIZE, FEWER_KV, WHOLE_WEIGHTS, Config, ModelConfig
from mlx_server.engine.loading import draft_model_named, find_model
from mlx_server.engine.vision.encoders import encoder_pixels, encoder_sizes
from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.outputs import HELD_STATES
from mlx_server.runtime.cache.layers import PoolRoom, plan_pools
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.drafts.heads import HeadFiles, find_heads
from mlx_server.runtime.kernels.gpu.backend import most_metal_cores
from mlx_server.runtime.kernels.gpu.plan import DECODES_AT_ONCE
from mlx_server.runtime.kernels.gpu.rows import FUSED_DIMS
from mlx_server.runtime.kernels.gpu.shared_work import THREADGROUPS_PER_CORE
from mlx_server.runtime.layers.adapter_files import adapter_tensors, merged_adapter
from mlx_server.runtime.memory import MAX_IN_FLIGHT, first_kv_blocks, max_elements
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.blueprint import bfloat16_shapes, predict_cache, why_no_vision
from mlx_server.runtime.models.folder import (
    CONTEXT_KEYS,
    TensorHeader,
    drafter_as_model,
    is_assistant,
    only_drafts,
    read_headers,
    read_model_json,
)
from mlx_server.runtime.models.loader import is_gpu, is_metal
from mlx_server.runtime.models.resolve import find_adapter, find_folder
from mlx_server.runtime.models.vision_towers import SOUND


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model needs when it is loaded: weights, room for the activations of its steps and of its vision encoder,
    first KV blocks and states."""

    weights_bytes: int
    step_bytes: int
    kv_bytes: int
    encoder_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        return self.step_bytes + self.encoder_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.kv_bytes

    def plus(self, other: MemoryNeed) -> MemoryNeed:
        """The need of both models, whose steps never run at the same time, but each between the pieces of an image."""
        steps, encoder = max(self.step_bytes, other.step_bytes), max(self.encoder_bytes, other.encoder_bytes)
        return MemoryNeed(self.weights_bytes + other.weights_bytes, steps, self.kv_bytes + other.kv_bytes, encoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes in a `config.json`, whose names differ between models. `queries`, `keys_and_values` and `recurrent` are
    elements for each token in a layer; `inner` is the width of the MLP, or of one expert (Mixtral uses the same name
    for both); `num_experts` is the number of experts that run for a token."""

    num_layers: int
    vocab: int
    hidden: int
    inner: int
    head_dim: int
    queries: int
    num_kv_heads: int
    recurrent: int
    num_experts: int
    shared_expert: int

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> _Shape:
        size = partial(_first_size, described)
        hidden = size("hidden_size", "dim", "d_model")
        num_heads = max(1, size("num_attention_heads", "n_heads", "num_heads"))
        head_dim = size("head_dim") or hidden // num_heads
        recurrent_keys = size("linear_num_key_heads") * size("linear_key_head_dim")
        recurrent_values = size("linear_num_value_heads") * size("linear_value_head_dim")
        return cls(
            num_layers=max(1, size("num_hidden_layers", "n_layers", "num_layers")),
            vocab=size("vocab_size"),
            hidden=hidden,
            inner=size("moe_intermediate_size") or size("intermediate_size") or 4 * hidden,
            head_dim=head_dim,
            queries=num_heads * head_dim,
            num_kv_heads=size("num_key_value_heads", "n_kv_heads", "num_kv_heads") or num_heads,
            recurrent=2 * recurrent_keys + recurrent_values,
            num_experts=size("num_experts_per_tok", "moe_k", "top_k_experts"),
            shared_expert=size("shared_expert_intermediate_size"),
        )

    @property
    def keys_and_values(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def row_elements(self) -> int:
        """The elements that a layer computes for each token. If layers differ, this counts each kind."""
        mixer = 3 * max(self.queries + self.keys_and_values, 2 * self.recurrent)
        experts = self.num_experts * (4 * self.hidden + 3 * self.inner) if self.num_experts else 3 * self.inner
        return 8 * self.hidden + mixer + experts + 3 * self.shared_expert

    @property
    def widest_elements(self) -> int:
        """The elements for each token of the two largest arrays that one operation uses."""
        return 2 * max(1, self.num_experts) * max(self.hidden, self.inner)


def _first_size(described: Mapping[str, Any], *names: str) -> int:
    """The first size that is present, or the largest if it is a list (one for each layer). 0 if there is none."""
    for name in names:
        value = described.get(name)
        sizes = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
        if sizes:
            return max(sizes)
    return 0


_STEPS_LAUNCHED = 2
_WORD_BYTES = 4
"""Of packed weights, the common case. For others, this undercounts their elements, and so overestimates temporaries."""

_SAMPLER_ARRAYS = 6
_FUSED_DIMS = range(129)
"""Head dimensions for which MLX's attention over prompts does not store its logits; it does if keys are longer than
values, by a part for positions."""

_LOGITS_SHARE = 1.3
"""By how much command buffers are larger if logits are stored: they end late by half of these."""

_LONG_CONTEXT = 32768
_LAYERS_GATHERED = 2
"""A prompt's chunk attends over rows gathered from the pool, of at most so many layers at a time. At contexts longer
than `_LONG_CONTEXT` there may be more than is booked; MLX then waits until there is room."""


def step_bytes(
    described: Mapping[str, Any],
    *,
    weights_bytes: int,
    num_tokens: int,
    num_seqs: int,
    context_tokens: int,
    item_bytes: int,
    buffer_elements: int,
    by_row_cores: int = 0,
) -> int:
    """The peak memory of steps besides weights and pools, for up to `num_tokens` tokens, `num_seqs` sampled rows, and
    contexts of up to `context_tokens`. An activation takes `item_bytes`; a command buffer ends at `buffer_elements`.
    With --batch-invariant, attention over prompts is by row, on a GPU of `by_row_cores`: each token is computed in as
    many parts as fill the GPU, and each part has results in float32.

    MLX keeps what a Metal command buffer uses until the buffer has ended, and has up to 12 in flight. Each ends at a
    number of elements of all arrays that it uses, weights included. So the temporaries' share of these elements is
    their share of what a layer uses. It is at most what two steps, the most that are launched, compute in all.

    Llama-3-8B in 4 bits, 2,048 tokens, 96 x 2^20 elements (a Mac with 16 GiB): a layer has about 0.19 G elements of
    temporaries and 0.035 G of weights, so 12 x 96 x 2^20 x 2 bytes x 0.85 = 1.9 GiB, and 0.4 GiB for what is wide and
    long. MLX's rules replayed over such steps (`tests/replay`) have a peak of 1.6 GiB."""
    shape = _Shape.of(described)
    layer = num_tokens * shape.row_elements
    share = layer / (layer + weights_bytes / _WORD_BYTES / shape.num_layers)
    is_fused = shape.head_dim in _FUSED_DIMS and not _first_size(described, "qk_rope_head_dim")
    logits = 1.0 if is_fused else _LOGITS_SHARE
    bytes_each: float = item_bytes
    if by_row_cores:
        parts = shape.queries * -(-THREADGROUPS_PER_CORE * by_row_cores // shape.num_kv_heads)
        bytes_each = (shape.row_elements * item_bytes + parts * 4) / (shape.row_elements + parts)
        layer += num_tokens * parts
        share, logits = 1.0, 1.0
        buffer_elements += DECODES_AT_ONCE * parts // 2  # by which a buffer exceeds its limit, on average
    gathered = _LAYERS_GATHERED * min(context_tokens, _LONG_CONTEXT) * shape.keys_and_values
    in_flight = MAX_IN_FLIGHT * share * buffer_elements * logits + gathered + num_tokens * shape.widest_elements
    sampled = _SAMPLER_ARRAYS * num_seqs * shape.vocab * 4
    launched = _STEPS_LAUNCHED * ((shape.num_layers * layer + gathered) * bytes_each + sampled)
    return math.ceil(min(in_flight * bytes_each, launched))


_MASKS = 2
"""Some encoders make a mask, as large as the logits of a head, in another type first."""

_INPUT_COPIES = 3
"""Of an image before the encoder: as it came, in the encoder's type, and in the encoder's order."""

_ONE_HOTS = 4
"""Gemma 4's encoder looks both places of a patch up by a product, and makes a vector of zeros and a one for each."""

_PIXTRAL_HIDDEN, _PIXTRAL_LAYERS = 1024, 24
"""Values that Pixtral's config.json leaves out, from the hub."""


def vision_bytes(described: Mapping[str, Any], *, max_pixels: int, item_bytes: int) -> int:
    """The peak memory of a vision encoder besides its weights while it encodes up to `max_pixels`, including its
    output. `described` is a whole config.json. Attention is over all patches of an image.

    1.5 million pixels in patches of 14 x 14 are 7,653 patches; in float32, the logits of 16 heads take 3.5 GiB if they
    are stored, as on the CPU.
    """
    vision = encoder_sizes(described)
    size = partial(_first_size, vision)
    if each := size("elements_for_a_pixel"):
        return max_pixels * each * (item_bytes if is_metal() else _DTYPE_BYTES["float32"])
    patch = size("patch_size") or 14
    num_patches = max(1, max_pixels // patch**2)
    text = _first_size({**described, **(described.get("text_config") or {})}, "hidden_size")
    if described.get("model_type") == "gemma4_unified":  # its patches are large, and there are no layers
        patch = size("model_patch_size") or (size("patch_size") or 16) * (size("pooling_kernel_size") or 3)
        inner = size("mm_embed_dim") or text
        num_elements = _INPUT_COPIES * 3 * max_pixels + max_pixels // patch**2 * (_HELD_AT_A_TIME * inner + text)
        if is_metal():
            return num_elements * item_bytes
        return (num_elements + 3 * patch**2 * inner) * _DTYPE_BYTES["float32"]  # MLX turns the matrix there
    hidden = size("embed_dim") or size("hidden_size") or _PIXTRAL_HIDDEN
    num_heads = size("num_attention_heads", "num_heads") or max(1, hidden // (size("head_dim") or 64))
    inner = size("intermediate_size") or 4 * hidden
    is_fused = is_metal() and hidden // num_heads in FUSED_DIMS
    num_elements = _INPUT_COPIES * max(1, size("temporal_patch_size")) * 3 * max_pixels
    num_elements += ((size("num_masks") or _MASKS) + (0 if is_fused else num_heads)) * num_patches**2
    merge = size("spatial_merge_size", "pooling_kernel_size")
    merge = max(1, merge or _first_size(described, "spatial_merge_size", "scale_factor", "downsample_factor"))
    num_elements += _ONE_HOTS * num_patches * size("position_embedding_size")
    num_elements += num_patches // merge**2 * text * (1 + len(vision.get("deepstack_visual_indexes") or ()))
    if not is_metal():
        num_elements += _HELD_AT_A_TIME * num_patches * (hidden + max(inner, 4 * hidden))
        return num_elements * _DTYPE_BYTES["float32"]
    tower = {
        "num_hidden_layers": size("num_hidden_layers", "depth") or _PIXTRAL_LAYERS,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
    }
    launched = step_bytes(
        tower,
        weights_bytes=0,
        num_tokens=num_patches,
        num_seqs=0,
        context_tokens=0,
        item_bytes=item_bytes,
        buffer_elements=max_elements(),
    )
    return num_elements * item_bytes + launched


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_STORED_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Types in which a model may compute, smallest first: smaller ones are packed, larger ones are norms or scales."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FIRST_STATES = 4
"""The number of requests for which recurrent states are estimated, with the states kept for their prefixes. At least so
many run at a time; the model takes more if there is room when it is loaded."""

_HELD_AT_A_TIME = 6
"""How many arrays of the largest size a step on the CPU has at once, with a margin: measured peaks were between a fifth
of this and all of it."""

_NO_BOUND = 2**62

_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision_\w+|visual|audio_tower|embed_(vision|audio)|multi_modal_projector|mm_projector|mlp1|mlp_AR)\."
)
"""Weights of the vision and audio parts of models, which are not loaded if only the text part is."""

_WHOLE = re.compile(r"embed|lm_head|wte\b|norm")
"""Weights that are not split between the ranks of a model on several machines."""


def estimate_need(config: Config) -> MemoryNeed:
    """Estimates the need of the model of `config`, with its draft model or the heads that it needs. Fetches missing
    files. For bfloat16 weights on the CPU it also builds the native library if that is missing: not for the event loop.
    Raises `ModelLoadError` or `DownloadError`."""
    heads = _needed_heads(config) if config.needs_heads else None  # refused before the model is quantised
    need = _estimate_model(config)
    if heads is not None:
        return need.plus(heads)
    if config.draft_model is None:
        return need
    with draft_model_named():
        return need.plus(_estimate_model(config.draft_model, drafts=True))


def _needed_heads(config: Config) -> MemoryNeed:
    settings = config.model
    folder = find_folder(settings.model, settings.dtype)
    return estimate_heads(config, find_heads(folder, settings.model, settings.mtp_from), folder)


def estimate_heads(config: Config, files: HeadFiles, folder: Path | None) -> MemoryNeed:
    """Estimates the need of the head in `files` of the model in `folder`, with the hidden states kept for it. Weights
    in the model's own files are counted with the model, unless it is loaded from a folder that was quantised without
    them."""
    settings = config.model
    tensors: dict[str, TensorHeader] = {}
    for path, names in files.names.items():
        is_among = path.parent == folder and path.match("model*.safetensors")
        if settings.quantize != WHOLE_WEIGHTS or not is_among:
            headers = read_headers(path)
            tensors |= {name: headers[name] for name in names}
    weights_bytes = sum(_tensor_bytes(tensor, settings) for tensor in tensors.values())
    weights_bytes -= _spared_bytes(files.one_layer, tensors, settings)
    shape = _Shape.of({**files.config, **(files.config.get("text_config") or {})})
    num_held = config.scheduler.max_num_seqs * HELD_STATES * shape.hidden
    num_elements = num_held + first_kv_blocks(_NO_BOUND) * BLOCK_SIZE * shape.keys_and_values
    return MemoryNeed(weights_bytes, 0, num_elements * _item_bytes(settings, 2))


def _estimate_model(config: Config, *, drafts: bool = False) -> MemoryNeed:
    settings, num_ranks, sees, held, encoder_bytes = config.model, config.fleet.tensor_parallel_size, False, 0, 0
    folder = find_model(settings)
    if folder is None:
        described: Mapping[str, Any] = random_models.config_of(settings.model)
        kind = next(kind for kind, name in _STORED_DTYPES.items() if name == described["torch_dtype"])
        item_bytes = _item_bytes(settings, _ITEM_BYTES[kind])
        weights = _random_weight_bytes(described, item_bytes, num_ranks)
        stored = {kind}
    else:
        described = read_model_json(folder / "config.json")
        if only_drafts(described):
            described, held = drafter_as_model(described, config.scheduler.max_num_seqs)
        paths = sorted(folder.glob("model*.safetensors"))
        headers = [header for path in paths for header in read_headers(path).items()]
        sees = num_ranks == 1 and not drafts and not why_no_vision(folder)
        unread = SOUND if sees else _OTHER_TOWERS
        tensors = {name: tensor for name, tensor in headers if unread.search(name) is None}
        sizes = {name: _tensor_bytes(tensor, settings) for name, tensor in tensors.items()}
        weights = sum(size if _WHOLE.search(name) else size // num_ranks for name, size in sizes.items())
        if num_ranks == 1 and merged_adapter(settings.adapters) is None:  # split or merged layers are not bfloat16
            weights -= _spared_bytes(described, tensors, settings, sees=sees)
        stored = {tensor["dtype"] for tensor in tensors.values()}
    weights += sum(adapter_bytes(find_adapter(adapter), settings) for adapter in settings.adapters)
    text = {**described, **(described.get("text_config") or {})}
    if sees:
        item_bytes = _item_bytes(settings, 2)
        max_pixels = encoder_pixels(folder, described, config.server.max_image_pixels)
        encoder_bytes = vision_bytes(described, max_pixels=max_pixels, item_bytes=item_bytes)
    kv_bytes = _pool_bytes(config, described, stored) + held * _item_bytes(settings, 2)
    return MemoryNeed(weights, _activation_bytes(config, text, weights), kv_bytes, encoder_bytes)


def adapter_bytes(adapter: Adapter, settings: ModelConfig) -> int:
    """The bytes of an adapter whose files are here."""
    return sum(_tensor_bytes(tensor, settings) for tensor in adapter_tensors(adapter))


def _pool_bytes(config: Config, described: Mapping[str, Any], stored: Set[str]) -> int:
    """The bytes of the first KV blocks and the first requests' recurrent states, for weights of the types `stored`.
    Unknown, so 0, for a folder with code of its own; an assistant keeps nothing."""
    if "model_file" in described or is_assistant(described):
        return 0
    dtype: str = config.model.dtype
    if dtype == "auto":
        found = (name for kind, name in _STORED_DTYPES.items() if kind in stored and is_gpu())
        dtype = next(found, "float32")
    cache = predict_cache(described, dtype)
    if config.cache.kv_bits in FEWER_KV:  # what `auto` chooses is not known yet
        cache.quantize(KvBits.of(config.cache.kv_bits))
    plan = plan_pools(
        cache,
        config.cache,
        PoolRoom(_NO_BOUND, _NO_BOUND, _NO_BOUND),
        max_num_seqs=min(config.scheduler.max_num_seqs, _FIRST_STATES),
        drafts=config.drafts,
    )
    return plan.first_bytes // config.fleet.tensor_parallel_size


def _item_bytes(settings: ModelConfig, stored: int) -> int:
    """The bytes of a loaded number that takes `stored` bytes in the file."""
    if settings.dtype == "auto":
        return stored if is_gpu() else 4
    return _DTYPE_BYTES[settings.dtype]


def _tensor_bytes(tensor: TensorHeader, settings: ModelConfig) -> int:
    stored = _ITEM_BYTES.get(tensor["dtype"])
    if stored is None:  # packed numbers and integers stay as they are
        begin, end = tensor["data_offsets"]
        return int(end - begin)
    return int(math.prod(tensor["shape"]) * _item_bytes(settings, stored))


def _spared_bytes(
    described: Mapping[str, Any], tensors: Mapping[str, TensorHeader], settings: ModelConfig, *, sees: bool = False
) -> int:
    """By how much `_tensor_bytes` overestimates weights that stay in bfloat16 on the CPU. Compares the shapes of the
    model's layers with those of the files' tensors; tensors that the model's code joins or splits do not count."""
    if settings.dtype != "auto" or is_gpu() or "model_file" in described:
        return 0
    stored = Counter(
        tuple(sorted(tensor["shape"]))
        for name, tensor in tensors.items()
        if tensor["dtype"] == "BF16" and name.endswith("weight")
    )
    if not stored:
        return 0
    try:
        kept = Counter(tuple(sorted(shape)) for shape in bfloat16_shapes(described, sees=sees))
    except ModelLoadError:  # loading reports it, or continues without the encoder
        return 0
    spared = _DTYPE_BYTES["float32"] - _DTYPE_BYTES["bfloat16"]
    return int(spared * sum(count * math.prod(shape) for shape, count in (stored & kept).items()))


def _activation_bytes(config: Config, described: Mapping[str, Any], weights_bytes: int) -> int:
    """The bytes of the launched steps' activations. Without Metal, those of one step, in float32: hidden states in and
    out of the widest layer, the logits of sampled rows, and their temporaries."""
    settings = config.scheduler
    if is_metal():
        return step_bytes(
            described,
            weights_bytes=weights_bytes,
            num_tokens=settings.max_num_batched_tokens,
            num_seqs=max(settings.max_num_seqs, MIN_SAMPLED_ROWS),
            context_tokens=config.model.max_model_len or _first_size(described, *CONTEXT_KEYS) or _NO_BOUND,
            item_bytes=_item_bytes(config.model, 2),
            buffer_elements=max_elements(),
            by_row_cores=most_metal_cores() if config.model.batch_invariant else 0,
        )
    shape = _Shape.of(described)
    num_elements = settings.max_num_batched_tokens * (shape.hidden + max(shape.inner, 4 * shape.hidden))
    num_elements += max(settings.max_num_seqs, MIN_SAMPLED_ROWS) * shape.vocab
    return _HELD_AT_A_TIME * _DTYPE_BYTES["float32"] * num_elements


def _random_weight_bytes(described: Mapping[str, Any], item_bytes: int, num_ranks: int) -> int:
    """The bytes of a plain transformer's weights, or of a rank's part of them. Each group of packed weights has a scale
    and a bias."""
    shape = _Shape.of(described)
    layer = (2 * shape.queries + shape.keys_and_values + 3 * shape.inner) // num_ranks
    num_embeddings = 1 if described["tie_word_embeddings"] else 2
    num_parameters = shape.hidden * (shape.num_layers * layer + num_embeddings * shape.vocab)
    packed = described.get("quantization")
    each = item_bytes if packed is None else packed["bits"] / 8 + 2 * item_bytes / packed["group_size"]
    return int(num_parameters * each)
