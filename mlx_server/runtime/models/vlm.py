"""mlx-vlm's models with the interface of mlx-lm's: their text parts, which are served like any other model, and
images."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from mlx_server.environment import install_command
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models import deepseek_v4
from mlx_server.runtime.models.vlm_encoders import BY_PART
from mlx_server.runtime.vision import EncodedImage, ImageRows, ReadsImages

_PACKAGE = "mlx_vlm"
INSTALL = install_command("vision")

_PARTS = ("text", "vision", "perceiver", "projector", "audio")
"""The parts of a configuration that mlx-vlm's loader knows."""

_PLACEHOLDERS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
"""Names of the token of images. Files have one of them; some of mlx-vlm's classes have defaults for others."""


def is_installed() -> bool:
    """Whether mlx-vlm is installed; imports nothing of it."""
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


def placeholder_id(config: Mapping[str, Any]) -> int:
    """The token of images by a config.json; -1 if it names none."""
    named = (config[name] for name in _PLACEHOLDERS if config.get(name) is not None)
    return int(next(named, -1))


def vlm_module(name: str) -> ModuleType:
    """mlx-vlm's module with that name, such as `models.qwen3_vl`. Any thread. Raises `ModelLoadError` without mlx-vlm,
    and `ImportError` for unknown names.

    Does not run the package's `__init__`, which imports everything that mlx-vlm's server needs (OpenCV, datasets,
    sound): this takes seconds and must be installed. Its models need none of it.
    """
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            raise ModelLoadError(f"mlx-vlm is not installed. Install it: {INSTALL}.")
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def vlm_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any] | None:
    """mlx-vlm's classes for the model of `config` and for its arguments, in mlx-lm's form; None if it has none. Raises
    `ModelLoadError` without mlx-vlm, and `ImportError` if one of its modules needs another package."""
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
    """Makes arguments from a configuration as mlx-vlm's loader does."""

    module: ModuleType

    def from_dict(self, config: Mapping[str, Any]) -> Any:
        own = copy.deepcopy(dict(config))  # mlx-vlm's classes change it
        own.setdefault("text_config", own.pop("llm_config", {}))
        own.setdefault("vision_config", {})
        own.setdefault("audio_config", {})
        if (placeholder := placeholder_id(own)) >= 0:
            own |= {name: placeholder for name in _PLACEHOLDERS[:2] if own.get(name) is None}
        if own.get("model_type") == "gemma3":
            _complete_gemma3(own)
        made = self.module.ModelConfig.from_dict(own)
        if placeholder >= 0 and not any(hasattr(made, name) for name in _PLACEHOLDERS[:2]):
            made.image_token_id = placeholder
        return vlm_module("utils").update_module_configs(made, self.module, own, list(_PARTS))


def _complete_gemma3(config: dict[str, Any]) -> None:
    """Adds values that Gemma 3's files give only once; mlx-vlm would use the defaults of another model. It divides
    images by the root of the top-level `hidden_size`, while the text part multiplies by its own, and looks for the
    tokens of an image in the text part."""
    text = config["text_config"]
    if "hidden_size" in text:
        config["hidden_size"] = text["hidden_size"]
    if "mm_tokens_per_image" in config:
        text["mm_tokens_per_image"] = config["mm_tokens_per_image"]


class VlmModel(ReadsImages):
    """The base of a model class of mlx-vlm's: calls the language part with the interface of mlx-lm's models, and puts
    embeddings of images in the place of their placeholders.

    A language part with positions in several axes (M-RoPE) always gets positions, because it would otherwise use those
    of the last prompt.
    """

    @property
    def args(self) -> Any:
        return getattr(self.config, "text_config", self.config)

    @property
    def has_positions(self) -> bool:
        return hasattr(self.language_model, "get_rope_index")

    @property
    def _has_axes(self) -> bool:
        """Whether the language part rotates by positions in several axes, also those of texts."""
        ropes = [getattr(self.args, name, None) or {} for name in ("rope_scaling", "rope_parameters")]
        return hasattr(self.args, "mrope_section") or any("mrope_section" in rope for rope in ropes)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        body: Any = getattr(self.language_model, "model", None)
        original = getattr(body, "_deepstack_process", None)
        if original is not None:
            object.__setattr__(body, "_deepstack_process", partial(_add_deepstack, original))
        rope = getattr(getattr(self, "vision_tower", None), "rope_pos_emb", None)
        if rope is not None:
            object.__setattr__(rope, "get_freqs_cis", partial(_frequencies_within, rope, rope.get_freqs_cis))
        if type(body).__name__ == "Ministral3":
            body.__class__ = _by_row(type(body))
        _mend(self.language_model)

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None, image_rows: ImageRows | None = None) -> Any:
        """Logits `[B, L, vocabulary]` for ids `[B, L]`."""
        more = {} if image_rows is None else self._arguments(ids, image_rows)
        if self.has_positions and "position_ids" not in more:
            more["position_ids"] = _text_positions(ids, cache or (), self._has_axes)
        if self.language_model is self:  # Phi-3 Vision, which would read ids from the device
            output = super().__call__(ids, self.model.embed_tokens(ids), cache=cache)
        else:
            output = self.language_model(ids, cache=cache, **more)
        return getattr(output, "logits", output)

    def _arguments(self, ids: mx.array, image_rows: ImageRows) -> dict[str, Any]:
        """The arguments of the language part besides ids and caches."""
        more: dict[str, Any] = {}
        if image_rows.positions is not None:
            more["position_ids"] = mx.array(image_rows.positions).reshape(3, *ids.shape)
        images = image_rows.images
        if images is not None:
            embeddings = self.get_input_embeddings(ids).inputs_embeds
            more["inputs_embeds"] = image_rows.put(images.embeddings, embeddings)
            if images.deepstack:
                nothing = mx.zeros_like(embeddings)
                more["deepstack_visual_embeds"] = [image_rows.put(layer, nothing) for layer in images.deepstack]
        return more

    def embed_image(self, ids: mx.array, inputs: dict[str, mx.array]) -> EncodedImage:
        if self.model_type in BY_PART:
            return EncodedImage(BY_PART[self.model_type](self, ids, inputs), ())
        if self.model_type in ("qwen3_vl", "qwen3_vl_moe"):  # whose call for a whole prompt waits for the device, too
            pixels = inputs["pixel_values"].astype(self.vision_tower.patch_embed.proj.weight.dtype)
            embeddings, layers = self.vision_tower(pixels, inputs["image_grid_thw"])
            return EncodedImage(embeddings, tuple(layers))
        others = {name: value for name, value in inputs.items() if name != "pixel_values"}
        made = self.get_input_embeddings(ids, inputs["pixel_values"], mask=mx.ones_like(ids), **others)
        return EncodedImage(made.inputs_embeds[0], ())

    def plain(self) -> Any:
        return None if self.model_type in BY_PART else self

    def make_cache(self) -> list[Any]:
        """mlx-vlm's own caches."""
        part = self.language_model
        made: list[Any] = vlm_module("models.cache").make_prompt_cache(self.model if part is self else part)
        if self.model_type == "deepseek_v4":
            deepseek_v4.mend_caches(made)
        return made

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """In the order of mlx-vlm's loader: by the whole model, then by each part."""
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
    """The model class of one of mlx-vlm's modules, with the interface of mlx-lm's models."""
    members = {"module": module, "model_type": model_type}
    return type(module.Model.__name__, (VlmModel, module.Model), members)


def _add_deepstack(original: Any, hidden: mx.array, mask: mx.array | None, embeddings: mx.array) -> mx.array:
    """Adds the vision encoder's embeddings for this layer to hidden states `[B, L, D]`. Without a mask, they are for
    all rows. mlx-vlm's `original` loops over the requests of a batch and waits for the device each time."""
    if mask is None:
        return hidden + embeddings
    added: mx.array = original(hidden, mask, embeddings)
    return added


def _frequencies_within(rope: Any, original: Any, sides: mx.array, grid_shapes: Any = None) -> mx.array:
    """The rotations of an image with these `sides` `[1, 2]` in patches. Kimi-VL's `original` makes them for 512 x 512
    patches, in hundreds of megabytes, and takes the first ones."""
    height_and_width: Any = sides[0].tolist()
    rope.max_height, rope.max_width = height_and_width
    made: mx.array = original(sides, grid_shapes)
    return made


def _by_row(body_class: type[nn.Module]) -> type[nn.Module]:
    """Ministral 3's body with queries scaled by the position of each row. mlx-vlm's own code uses the first row's
    position for the whole batch, and waits for the device to read it."""

    def call(
        self: Any, inputs: mx.array, cache: Sequence[Any] | None = None, inputs_embeds: mx.array | None = None
    ) -> mx.array:
        hidden = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        caches, rope = cache or [None] * len(self.layers), self.config.rope_parameters
        offset = mx.array(0 if caches[0] is None else caches[0].offset).reshape(-1, 1)
        periods = mx.floor((offset + mx.arange(inputs.shape[1])) / rope["original_max_position_embeddings"])
        scale = (1 + rope["llama_4_scaling_beta"] * mx.log(1 + periods))[:, None, :, None].astype(hidden.dtype)
        mask, windowed = create_attention_mask(hidden, caches[self.fa_idx]), None
        if self.swa_idx is not None:
            windowed = create_attention_mask(hidden, caches[self.swa_idx], window_size=self.sliding_window)
        for layer, own in zip(self.layers, caches):
            hidden = layer(hidden, scale, windowed if layer.use_sliding else mask, cache=own)
        return self.norm(hidden)  # type: ignore[no-any-return]

    return type(body_class.__name__, (body_class,), {"__call__": call})


def _text_positions(ids: mx.array, caches: Sequence[Any], has_axes: bool) -> mx.array:
    """Positions of text tokens: equal in all axes, `[3, B, L]`, or `[B, L]`."""
    offset = next((cache.offset for cache in caches if hasattr(cache, "update_and_fetch")), 0)
    rows = mx.array(offset, dtype=mx.int32).reshape(-1, 1) + mx.arange(ids.shape[1], dtype=mx.int32)
    return mx.broadcast_to(rows, (3, *ids.shape) if has_axes else ids.shape)


def _mend(language_model: nn.Module) -> None:
    """Mends what the probe at load may not see: it occurs with longer or shorter texts."""
    object.__setattr__(language_model, "_batch_invariant_decode", None)  # Qwen's, which goes around the layers
    for part in language_model.modules():
        kind = type(part).__name__
        if kind == "HyV4Indexer":  # its compiled choice of keys is right for the first context's length only
            part.__class__ = type(part).__base__
        elif type(part).__module__.endswith("deepseek_v4.language"):
            deepseek_v4.mend(part)
        elif kind == "SuScaledRoPE":  # chooses by a call's longest context; mlx-lm's takes the long ones
            part._short_freqs, part._short_scale = part._long_freqs, part._long_scale
        elif kind == "Qwen4ExpQSAIndexer":
            object.__setattr__(part, "build_mask", partial(_mask_within, part.build_mask))


def _mask_within(build_mask: Callable[[Any], mx.array], selection: Any) -> mx.array:
    """The mask of the blocks that are chosen, of which -1 means none. mlx-vlm writes to four places before the mask for
    a block -1, which in contexts of two tokens are not in the array."""
    chosen = selection.selected_blocks
    selection.selected_blocks = mx.where(chosen < 0, selection.key_len, chosen)  # behind the mask: not written
    return build_mask(selection)
