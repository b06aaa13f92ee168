"""How much memory models take: one ledger for all models of a process, and what a model will need, told from its files
before anything of it is loaded. What is promised counts, not what was touched: weights, KV pools and room for the
temporaries of steps. What the system itself says of its memory is read on each question, so that other programs count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.config import FULL_KV, Config, MemoryConfig, ModelConfig
from mlx_server.errors import InsufficientMemoryError
from mlx_server.runtime.adapters import adapter_tensors
from mlx_server.runtime.layers import plan_pools
from mlx_server.runtime.memory import MAX_IN_FLIGHT, MemoryReading, bounded_memory, max_elements, read_memory
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.blueprint import foresee_cache
from mlx_server.runtime.models.folder import TensorHeader, read_headers
from mlx_server.runtime.models.loader import find_folder, is_gpu, is_metal
from mlx_server.setting import parse_share

_AUTO_SHARE = 0.9
"""Of what the device recommends: under the pressure at which nobody is admitted any more."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model takes when it is loaded: weights, room for a step's activations, first KV blocks and states."""

    weights_bytes: int
    activation_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.kv_bytes


class MemoryBudget:
    """What all models of the process may hold together. While there are any, MLX is told so, too. Event-loop thread
    only."""

    def __init__(
        self, limit_bytes: int, reserve_bytes: int = 0, read: Callable[[], MemoryReading] = read_memory
    ) -> None:
        """`limit_bytes` bounds what is held; `reserve_bytes` of the system's memory are left to others. `read` reads
        the memory as it is at that moment."""
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self._read = read
        self._shares: list[MemoryShare] = []
        self._bound = ExitStack()

    @classmethod
    def of(cls, settings: MemoryConfig, read: Callable[[], MemoryReading] = read_memory) -> MemoryBudget:
        """The budget that `[memory]` describes, on this machine."""
        reading = read()
        if settings.memory_limit == "auto":
            limit = int(_AUTO_SHARE * reading.device_bytes)
        else:
            limit = parse_share(settings.memory_limit, reading.device_bytes)
        return cls(limit, parse_share(settings.memory_reserve, reading.total_bytes), read)

    def read(self) -> MemoryReading:
        """The memory with all that is booked for steps of loaded models in use, whether one runs now or not."""
        loaded = [share for share in self._shares if share.is_settled]
        steps = sum(share.need.activation_bytes for share in loaded)
        return self._read().with_steps(sum(share.need.total_bytes for share in loaded) - steps, steps)

    @property
    def held_bytes(self) -> int:
        return sum(share.need.total_bytes for share in self._shares)

    @property
    def free_bytes(self) -> int:
        """What may be taken now: within the limit, without touching the reserve or what models still load."""
        return self.free_beside(self.pending_bytes())

    def pending_bytes(self, asking: MemoryShare | None = None) -> int:
        """What is being loaded for others than `asking`: not yet seen in the system's memory, and not free all the
        same."""
        return sum(s.need.total_bytes for s in self._shares if s is not asking and not s.is_settled)

    def free_beside(self, pending_bytes: int) -> int:
        """What may be taken now if so much of the system's memory is promised."""
        unused = self.read().available_bytes - self.reserve_bytes - pending_bytes
        return max(0, min(self.limit_bytes - self.held_bytes, unused))

    def missing_bytes(self, need: MemoryNeed) -> int:
        """How much must be given back before `need` fits; 0 if it fits."""
        return max(0, need.total_bytes - self.free_bytes)

    def take(self, owner: str, need: MemoryNeed) -> MemoryShare:
        """Books what loading `owner` will take. Raises `InsufficientMemoryError`, with the numbers."""
        if self.missing_bytes(need):
            raise InsufficientMemoryError(self._refusal(owner, need))
        if not self._shares:
            self._bound.enter_context(bounded_memory(self.limit_bytes))
        share = MemoryShare(self, owner, need)
        self._shares.append(share)
        return share

    def forget(self, share: MemoryShare) -> None:
        """The share's owner holds nothing any more."""
        self._shares.remove(share)
        if not self._shares:
            self._bound.close()

    def _refusal(self, owner: str, need: MemoryNeed) -> str:
        reading = self.read()
        holders = ", ".join(f"{share.owner} {_mib(share.need.total_bytes)}" for share in self._shares)
        return (
            f"The model {owner} needs {_mib(need.total_bytes)} (weights {_mib(need.weights_bytes)}, activations "
            f"{_mib(need.activation_bytes)}, first KV blocks {_mib(need.kv_bytes)}), and {_mib(self.free_bytes)} may "
            f"be taken: the limit is {_mib(self.limit_bytes)}, held are {_mib(self.held_bytes)}"
            f"{f' ({holders})' if holders else ''}; {_mib(reading.available_bytes)} are available on the system, "
            f"of which {_mib(self.reserve_bytes)} stay in reserve. Unload a model, take a smaller or quantised one, "
            "lower --max-num-batched-tokens, close other programs, or raise --memory-limit."
        )


class MemoryShare:
    """What one model holds of a budget, which is its `need`. `grow` and `shrink` change its KV part."""

    def __init__(self, budget: MemoryBudget, owner: str, need: MemoryNeed) -> None:
        self.owner = owner
        self.need = need
        self.is_settled = False
        self._budget = budget

    def growable_bytes(self, pressure: float) -> int:
        """What `grow` would book at most without bringing the memory to that pressure."""
        pending = self._budget.pending_bytes(self)
        return max(0, min(self._free_bytes, self._budget.read().room_below(pressure) - pending))

    @property
    def kv_limit_bytes(self) -> int:
        """What the KV pool could ever have: all that the weights and activations leave of the budget."""
        return max(0, self._budget.limit_bytes - self.need.weights_bytes - self.need.activation_bytes)

    @property
    def kv_room_bytes(self) -> int:
        """What it could have now: what is booked for it, and what is free."""
        return min(self.kv_limit_bytes, self.need.kv_bytes + self._free_bytes)

    def read(self) -> MemoryReading:
        """The machine's memory now."""
        return self._budget.read()

    def settle(self, need: MemoryNeed) -> None:
        """The model is loaded: books what it really took instead of what was estimated."""
        self.need = need
        self.is_settled = True

    def grow(self, num_bytes: int) -> bool:
        """Books more for the KV pool; False, and nothing booked, if that much is not free."""
        if num_bytes > self._free_bytes:
            return False
        self._add_kv(num_bytes)
        return True

    def shrink(self, num_bytes: int) -> None:
        """So much of the KV pool has been given back."""
        assert num_bytes <= self.need.kv_bytes, "more is given back than was taken"
        self._add_kv(-num_bytes)

    def release(self) -> None:
        """The model is unloaded."""
        self._budget.forget(self)

    @property
    def _free_bytes(self) -> int:
        return self._budget.free_beside(self._budget.pending_bytes(self))

    def _add_kv(self, num_bytes: int) -> None:
        self.need = replace(self.need, kv_bytes=self.need.kv_bytes + num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


_STEPS_LAUNCHED = 2
_WORD_BYTES = 4
"""Of packed weights, which are most; of others, this counts fewer elements than there are, and so more temporaries."""

_SAMPLER_ARRAYS = 6
_FUSED_DIMS = range(129)
"""Head dimensions for which MLX keeps the logits of prompts' attention to itself."""

_LOGITS_SHARE = 1.3
"""What command buffers with such logits hold beside others: they end late by half of these."""

_LONG_CONTEXT = 32768
_LAYERS_GATHERED = 2
"""A prompt's chunk attends over rows gathered from the pool: those of so many layers are there at a time. At longer
contexts than that there may be more than is booked, and MLX waits where there is no room."""


def step_bytes(
    described: Mapping[str, Any],
    *,
    weights_bytes: int,
    num_tokens: int,
    num_seqs: int,
    context_tokens: int,
    item_bytes: int,
    buffer_elements: int,
) -> int:
    """The most that steps of up to `num_tokens` tokens, of which `num_seqs` rows sample, have in memory beside weights
    and pools, with contexts of up to `context_tokens`. Activations take `item_bytes` each; a command buffer ends at
    `buffer_elements`.

    MLX keeps what a command buffer of Metal uses until it has ended, and has up to 12 in flight. Each ends at a number
    of elements of all buffers that it uses, weights included. So temporaries take as much of these as they are of all
    that a layer uses, but no more than two steps, the most that are launched, make in all.

    Llama-3-8B in 4 bits, 2,048 tokens, 96 x 2^20 elements (a Mac with 16 GiB): a layer has about 0.19 G elements of
    temporaries and 0.035 G of weights, so 12 x 96 x 2^20 x 2 bytes x 0.85 = 1.9 GiB, and 0.4 GiB for what is wide and
    long. MLX's rules replayed over such steps (`tests/replay`) have a peak of 1.6 GiB."""
    num_layers = max(1, _number(described, "num_hidden_layers", "n_layers", "num_layers"))
    per_token = _row_elements(described)
    layer = num_tokens * per_token
    share = layer / (layer + weights_bytes / _WORD_BYTES / num_layers)
    logits = 1.0 if _head_dim(described) in _FUSED_DIMS else _LOGITS_SHARE
    gathered = _LAYERS_GATHERED * min(context_tokens, _LONG_CONTEXT) * _key_value_width(described)
    in_flight = MAX_IN_FLIGHT * share * buffer_elements * logits + gathered + num_tokens * _widest(described)
    sampled = _SAMPLER_ARRAYS * num_seqs * _number(described, "vocab_size") * 4
    launched = _STEPS_LAUNCHED * ((num_layers * layer + gathered) * item_bytes + sampled)
    return math.ceil(min(in_flight * item_bytes, launched))


def _row_elements(described: Mapping[str, Any]) -> int:
    """Elements that a layer makes for each token; of layers of several kinds, those of each."""
    hidden = _number(described, "hidden_size", "dim", "d_model")
    mixer = 3 * max(_attention_width(described), 2 * _recurrent_width(described))
    experts = _number(described, "num_experts_per_tok", "moe_k", "top_k_experts")
    width = _inner_width(described)
    if not experts:
        return 8 * hidden + mixer + 3 * width
    shared = _number(described, "shared_expert_intermediate_size")
    return 8 * hidden + mixer + experts * (4 * hidden + 3 * width) + 3 * shared


def _widest(described: Mapping[str, Any]) -> int:
    """Elements for each token of the two largest arrays that one operation uses."""
    hidden = _number(described, "hidden_size", "dim", "d_model")
    experts = max(1, _number(described, "num_experts_per_tok", "moe_k", "top_k_experts"))
    return 2 * experts * max(hidden, _inner_width(described))


def _inner_width(described: Mapping[str, Any]) -> int:
    """Of the MLP, or of one expert: Mixtral names its as if it were the only one."""
    hidden = _number(described, "hidden_size", "dim", "d_model")
    return _number(described, "moe_intermediate_size") or _number(described, "intermediate_size") or 4 * hidden


def _attention_width(described: Mapping[str, Any]) -> int:
    """Of queries, keys and values together."""
    return _num_heads(described) * _head_dim(described) + _key_value_width(described)


def _key_value_width(described: Mapping[str, Any]) -> int:
    num_kv_heads = _number(described, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or _num_heads(described)
    return 2 * num_kv_heads * _head_dim(described)


def _head_dim(described: Mapping[str, Any]) -> int:
    own = _number(described, "head_dim")
    return own or _number(described, "hidden_size", "dim", "d_model") // _num_heads(described)


def _num_heads(described: Mapping[str, Any]) -> int:
    return max(1, _number(described, "num_attention_heads", "n_heads", "num_heads"))


def _recurrent_width(described: Mapping[str, Any]) -> int:
    keys = _number(described, "linear_num_key_heads") * _number(described, "linear_key_head_dim")
    return 2 * keys + _number(described, "linear_num_value_heads") * _number(described, "linear_value_head_dim")


def _number(described: Mapping[str, Any], *names: str) -> int:
    """The first of them that there is; of a list, one for each layer, the largest."""
    for name in names:
        value = described.get(name)
        numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
        if numbers:
            return max(numbers)
    return 0


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_STORED_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Types in which a model may compute, the smallest first: what is smaller is packed, what is larger a norm or scale."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FIRST_STATES = 4
"""Requests whose recurrent state is foreseen, with the states kept for their prefixes: as many run at a time where
there is no more room. The rest is taken as far as there is some when the model is loaded."""

_HELD_AT_A_TIME = 4
"""Arrays of the largest sizes that a step on the CPU has at once, with some to spare: its peak was never above that,
and above a fifth of it."""

_NO_BOUND = 2**62

_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision_\w+|visual|audio_tower|embed_(vision|audio)|multi_modal_projector|mm_projector)\."
)
"""Weights of models that can see or hear, of which mlx-lm loads the text part."""


def estimate_need(config: Config) -> MemoryNeed:
    """What loading the model of `config` takes. Fetches its files if they are not there, and reads what they say of
    themselves: not for the event loop's thread. Raises `ModelLoadError` or `DownloadError`."""
    folder = find_folder(config.model.model)
    settings = config.model
    if folder is None:
        described: Mapping[str, Any] = random_models.config_of(settings.model)
        kind = next(kind for kind, name in _STORED_DTYPES.items() if name == described["torch_dtype"])
        item_bytes = _item_bytes(settings, _ITEM_BYTES[kind])
        weights = int(_num_parameters(described) * _parameter_bytes(described, item_bytes))
        stored = {kind}
    else:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        paths = sorted(folder.glob("model*.safetensors"))
        headers = [header for path in paths for header in read_headers(path).items()]
        tensors = [tensor for name, tensor in headers if _OTHER_TOWERS.search(name) is None]
        weights = sum(_tensor_bytes(tensor, settings) for tensor in tensors)
        stored = {tensor["dtype"] for tensor in tensors}
    for adapter in settings.adapters:
        weights += sum(_tensor_bytes(tensor, settings) for tensor in adapter_tensors(adapter))
    text = {**described, **(described.get("text_config") or {})}
    return MemoryNeed(weights, _activation_bytes(config, text, weights), _pool_bytes(config, described, stored))


def _pool_bytes(config: Config, described: Mapping[str, Any], stored: Set[str]) -> int:
    """Of the first KV blocks and of the first requests' recurrent state, with weights that are `stored` so. What code
    of the folder's own keeps is not known before it runs."""
    if "model_file" in described:
        return 0
    dtype: str = config.model.dtype
    if dtype == "auto":
        found = (name for kind, name in _STORED_DTYPES.items() if kind in stored and is_gpu())
        dtype = next(found, "float32")
    cache = foresee_cache(described, dtype)
    if config.cache.kv_bits != FULL_KV:
        cache.quantize(int(config.cache.kv_bits))
    plan = plan_pools(
        cache,
        config.cache,
        max_num_tokens=_NO_BOUND,
        max_num_seqs=min(config.scheduler.max_num_seqs, _FIRST_STATES),
        kv_limit_bytes=_NO_BOUND,
        state_limit_bytes=_NO_BOUND,
    )
    return plan.first_bytes


def _item_bytes(settings: ModelConfig, stored: int) -> int:
    """Bytes of a number that is stored in so many, once it is loaded."""
    if settings.dtype == "auto":
        return stored if is_gpu() else 4
    return _DTYPE_BYTES[settings.dtype]


def _tensor_bytes(tensor: TensorHeader, settings: ModelConfig) -> int:
    stored = _ITEM_BYTES.get(tensor["dtype"])
    if stored is None:  # packed or whole numbers stay as they are
        begin, end = tensor["data_offsets"]
        return int(end - begin)
    return int(math.prod(tensor["shape"]) * _item_bytes(settings, stored))


def _activation_bytes(config: Config, described: Mapping[str, Any], weights_bytes: int) -> int:
    """Of the steps that are launched. Off Metal, of one: hidden states in and out of the widest layer, and the logits
    of those that sample, in float32, with all that is made of them meanwhile."""
    settings = config.scheduler
    if is_metal():
        return step_bytes(
            described,
            weights_bytes=weights_bytes,
            num_tokens=settings.max_num_batched_tokens,
            num_seqs=settings.max_num_seqs,
            context_tokens=config.model.max_model_len or described.get("max_position_embeddings") or _NO_BOUND,
            item_bytes=_item_bytes(config.model, 2),
            buffer_elements=max_elements(),
        )
    hidden = _number(described, "hidden_size", "dim", "d_model")
    widest = max(_number(described, "intermediate_size"), 4 * hidden)
    num_elements = settings.max_num_batched_tokens * (hidden + widest)
    num_elements += settings.max_num_seqs * _number(described, "vocab_size")
    return _HELD_AT_A_TIME * _DTYPE_BYTES["float32"] * num_elements


def _parameter_bytes(described: Mapping[str, Any], item_bytes: int) -> float:
    """Of one weight; a group of packed ones has a scale and a bias."""
    packed = described.get("quantization")
    return item_bytes if packed is None else packed["bits"] / 8 + 2 * item_bytes / packed["group_size"]


def _num_parameters(described: Mapping[str, Any]) -> int:
    """Of a plain transformer."""
    hidden, vocabulary = described["hidden_size"], described["vocab_size"]
    head_dim, num_heads = described["head_dim"], described["num_attention_heads"]
    attention = 2 * hidden * head_dim * (num_heads + described["num_key_value_heads"])
    layer = attention + 3 * hidden * described["intermediate_size"]
    embeddings = 1 if described["tie_word_embeddings"] else 2
    return int(described["num_hidden_layers"] * layer + embeddings * vocabulary * hidden)
