"""mlx-vlm's models behind the interface of mlx-lm's: their text parts, which are served like any other model, and what
they make of images."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.ministral3 import _get_llama_4_attn_scale

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.vision import ImageRows

_PACKAGE = "mlx_vlm"
INSTALL = "pip install 'mlx-server[vision]'"

_PARTS = ("text", "vision", "perceiver", "projector", "audio")
"""Of a configuration, as mlx-vlm's loader has them."""


def is_installed() -> bool:
    """Whether mlx-vlm is here; imports nothing of it."""
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


def vlm_module(name: str) -> ModuleType:
    """mlx-vlm's module of that name, as in `models.qwen3_vl`. Any thread. Raises `ModelLoadError` without mlx-vlm, and
    `ImportError` for what it does not have.

    The package's own `__init__` is not run: it imports all that mlx-vlm serves with (OpenCV, datasets, sound), which
    takes seconds and has to be installed. Its models need none of that.
    """
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            raise ModelLoadError(f"mlx-vlm is not installed. Install it: {INSTALL}.")
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def vlm_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any] | None:
    """mlx-vlm's classes of the model of `config` and of its arguments, in mlx-lm's manner; None if it has none. Raises
    `ModelLoadError` without mlx-vlm, and `ImportError` if one of its modules needs what is not installed."""
    model_type = vlm_module("utils").get_model_type(dict(config))
    name = f"{_PACKAGE}.models.{model_type}"
    if importlib.util.find_spec(name) is None:
        return None
    module = vlm_module(f"models.{model_type}")
    if not hasattr(module, "Model") or not hasattr(module, "ModelConfig"):
        return None
    return _served(module, model_type), _Arguments(module)


@dataclass(frozen=True)
class _Arguments:
    """Makes arguments of a configuration as mlx-vlm's loader does."""

    module: ModuleType

    def from_dict(self, config: Mapping[str, Any]) -> Any:
        own = copy.deepcopy(dict(config))  # mlx-vlm's classes write into it
        own.setdefault("text_config", own.pop("llm_config", {}))
        own.setdefault("vision_config", {})
        own.setdefault("audio_config", {})
        if own.get("model_type") == "gemma3":
            _complete_gemma3(own)
        made = self.module.ModelConfig.from_dict(own)
        return vlm_module("utils").update_module_configs(made, self.module, own, list(_PARTS))


def _complete_gemma3(config: dict[str, Any]) -> None:
    """Gemma 3's files do not say again what mlx-vlm then takes from another model: it divides images by the root of the
    whole's `hidden_size`, which the text part multiplies by its own, and looks for an image's tokens in that part."""
    text = config["text_config"]
    if "hidden_size" in text:
        config["hidden_size"] = text["hidden_size"]
    if "mm_tokens_per_image" in config:
        text["mm_tokens_per_image"] = config["mm_tokens_per_image"]


class VlmModel(nn.Module):  # type: ignore[misc]
    """What is put before a model class of mlx-vlm's: its language part is called as mlx-lm's models are, and embeddings
    of images stand in for those of their placeholders.

    A language part with positions in several axes (M-RoPE) always gets them: it would keep those of the last prompt
    otherwise.
    """

    module: ModuleType
    model_type: str
    language_model: Any
    config: Any

    @property
    def args(self) -> Any:
        return getattr(self.config, "text_config", self.config)

    @property
    def has_positions(self) -> bool:
        """Whether tokens have positions in three axes: time, height and width."""
        return hasattr(self.language_model, "get_rope_index")

    @property
    def has_encoder(self) -> bool:
        """Whether it is more than a language part."""
        return len(self.children()) > 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        body: Any = getattr(self.language_model, "model", None)
        original = getattr(body, "_deepstack_process", None)
        if original is not None:
            object.__setattr__(body, "_deepstack_process", partial(_add_deepstack, original))
        if type(body).__name__ == "Ministral3":
            body.__class__ = _by_row(type(body))

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None, image_rows: ImageRows | None = None) -> Any:
        """Logits `[B, L, vocabulary]` of ids `[B, L]`."""
        more: dict[str, Any] = {}
        if image_rows is not None:
            more = image_rows.arguments(self, ids)
        if self.has_positions and "position_ids" not in more:
            more["position_ids"] = _text_positions(ids, cache or ())
        output = self.language_model(ids, cache=cache, **more)
        return getattr(output, "logits", output)

    def make_cache(self) -> list[Any]:
        """mlx-vlm's own caches."""
        made: list[Any] = vlm_module("models.cache").make_prompt_cache(self.language_model)
        return made

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """In the order of mlx-vlm's loader: as the whole says, then as each part does."""
        clean = vlm_module("utils").sanitize_weights
        above = super()
        if hasattr(above, "sanitize"):
            weights = above.sanitize(weights)
        for part, name in (("VisionModel", "vision"), ("LanguageModel", "text"), ("AudioModel", "audio")):
            part_config = getattr(self.config, f"{name}_config", None)
            if hasattr(self.module, part) and part_config is not None:
                weights = clean(getattr(self.module, part), weights, part_config)
        return weights


@cache
def _served(module: ModuleType, model_type: str) -> type[nn.Module]:
    """The model class of one of mlx-vlm's modules, to be called as mlx-lm's are. Raises `ModelLoadError` for a model
    without a language part."""
    members = {"module": module, "model_type": model_type}
    return type(module.Model.__name__, (VlmModel, module.Model), members)


def _add_deepstack(original: Any, hidden: mx.array, mask: mx.array | None, embeddings: mx.array) -> mx.array:
    """Adds what the vision encoder has for this layer to hidden states `[B, L, D]`: without a mask it is there for all
    rows. mlx-vlm's `original` goes through a batch request by request, and waits for the device each time."""
    if mask is None:
        return hidden + embeddings
    added: mx.array = original(hidden, mask, embeddings)
    return added


def _by_row(body_class: type[nn.Module]) -> type[nn.Module]:
    """Ministral 3's body with queries scaled by the position of each row. mlx-vlm's own takes the first row's for all
    of a batch, and waits for the device to read it."""

    def call(
        self: Any, inputs: mx.array, cache: Sequence[Any] | None = None, inputs_embeds: mx.array | None = None
    ) -> mx.array:
        hidden = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        caches, rope = cache or [None] * len(self.layers), self.config.rope_parameters
        first = caches[0]
        scale = _get_llama_4_attn_scale(
            inputs.shape[1],
            0 if first is None else first.offset,
            rope["llama_4_scaling_beta"],
            rope["original_max_position_embeddings"],
        ).astype(hidden.dtype)
        mask, windowed = create_attention_mask(hidden, caches[self.fa_idx]), None
        if self.swa_idx is not None:
            windowed = create_attention_mask(hidden, caches[self.swa_idx], window_size=self.sliding_window)
        for layer, own in zip(self.layers, caches):
            hidden = layer(hidden, scale, windowed if layer.use_sliding else mask, cache=own)
        return self.norm(hidden)  # type: ignore[no-any-return]

    return type(body_class.__name__, (body_class,), {"__call__": call})


def _text_positions(ids: mx.array, caches: Sequence[Any]) -> mx.array:
    """Positions `[3, B, L]` of text: the same in all axes."""
    offset = next((cache.offset for cache in caches if hasattr(cache, "update_and_fetch")), 0)
    rows = mx.array(offset, dtype=mx.int32).reshape(-1, 1) + mx.arange(ids.shape[1], dtype=mx.int32)
    return mx.broadcast_to(rows, (3, *ids.shape))
