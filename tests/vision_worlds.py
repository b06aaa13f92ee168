"""Tiny vision-language models with random weights, pictures for them, and mlx-vlm's own answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlx_server.request import PromptImage
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.models.vlm import vlm_module
from tests.vision_configs import BREAK, CONFIGS, IMAGE, ROWS, START


@dataclass(frozen=True)
class TinyVlm:
    """A model as it is served, and the same weights in mlx-vlm's own class."""

    loaded: LoadedModel
    plain: Any

    @property
    def config(self) -> Any:
        return self.loaded.model.config


def _shrink_mobilenet() -> None:
    """Gemma 3n's tower has no sizes in its configuration."""
    tower = vlm_module("models.gemma3n.vision")
    residual, inverted, attention = tower._er, tower._uir, tower._mmqa
    blocks = [
        [residual(3, 8, 2)],
        [inverted(3, 5, 16, 2, 2.0)],
        [inverted(5, 5, 32, 2, 2.0), attention(2, 8, 2), inverted(0, 0, 32, 1, 2.0, is_multiscale=True)],
        [inverted(5, 5, 64, 2, 2.0), attention(2, 8, 1), inverted(0, 0, 64, 1, 2.0, is_multiscale=True)],
    ]
    adapter = tower.MobileNetV5MultiScaleFusionAdapter
    tower.gemma3n_mobilenet_def = lambda: blocks
    tower.MobileNetV5MultiScaleFusionAdapter = lambda **_: adapter(in_chs=[96], out_chs=32, output_resolution=(2, 2))


def _shrink_sam(model_type: str) -> None:
    """DeepSeek-OCR's towers have no sizes in its configuration, either."""
    module = vlm_module(f"models.{model_type}.{model_type}")
    sizes = {"image_size": 128, "width": 16, "layers": 2, "heads": 2, "global_attn_indexes": (1,)}
    original = vlm_module("models.deepseekocr.config").SAMViTConfig
    module.SAMViTConfig = lambda: original(**sizes)
    encoder = vlm_module("models.deepseekocr.sam").SAMEncoder
    module.SAMEncoder = lambda **more: encoder(**{**more, "final_out_chans": 32})
    if model_type == "deepseekocr_2":
        vision = vlm_module("models.deepseekocr_2.vision")
        made = vlm_module("models.deepseekocr_2.config").Qwen2EncoderConfig
        small = {"layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
        vision.Qwen2EncoderConfig = lambda **more: made(**{**more, **small})


def build_tiny(config: dict[str, Any]) -> Any:
    if config["model_type"] == "gemma3n":
        _shrink_mobilenet()
    if config["model_type"].startswith("deepseekocr"):
        _shrink_sam(config["model_type"])
    model = build_random(config, 7, sees=True)
    if config["model_type"] == "gemma3":  # whose loader gives the head the embeddings' weights: small, or it says again
        text = model.language_model
        text.lm_head.weight = text.model.embed_tokens.weight = text.model.embed_tokens.weight / 10
        mx.eval(text.lm_head.weight)
    return model


def evaluate_constants(model: Any) -> None:
    """Lazy constants that are no parameters belong to the thread that makes them."""
    mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])


@lru_cache(maxsize=32)
def tiny_vlm(model_type: str) -> TinyVlm:
    config = {"model_type": model_type, **CONFIGS[model_type]}
    model = build_tiny(config)
    module = vlm_module(f"models.{config['model_type']}")
    plain = module.Model(model.config)
    names = {name for name, _ in tree_flatten(plain.parameters())}
    weights = {
        name.replace("model.language_model.", "language_model.model."): array
        for name, array in tree_flatten(model.parameters())
    }
    assert {name for name in names if name.split(".")[0] not in ("audio_tower", "embed_audio")} == weights.keys()
    plain.load_weights(list(weights.items()), strict=False)
    if model_type == "gemma3n":
        plain.get_input_embeddings = partial(_scaled, plain, plain.get_input_embeddings)
    plain.eval()  # InternVL drops paths at random while it is trained
    evaluate_constants(model)
    if CONFIGS[model_type]["vision_config"] is ROWS:
        mx.eval(model.vision_tower.vision_model.patch_positional_embedding.inv_freq)
    return TinyVlm(LoadedModel(model_type, model, config, None), plain)


def _scaled(plain: Any, original: Any, input_ids: mx.array, *arguments: Any, **more: Any) -> Any:
    """As transformers: mlx-vlm leaves the scale of text's embeddings out where there is an image."""
    made = original(input_ids, *arguments, **more)
    is_text = (input_ids < plain.config.vision_config.vocab_offset)[..., None]
    scaled = made.inputs_embeds * plain.config.text_config.hidden_size**0.5
    made.inputs_embeds = mx.where(is_text, scaled, made.inputs_embeds)
    return made


def picture(model_type: str, seed: int) -> PromptImage:
    """An image of noise in the form of the model's processor, at the start of a prompt; odd seeds make wider ones."""
    rng, vision = np.random.default_rng(seed), CONFIGS[model_type]["vision_config"]
    inputs: dict[str, Any]
    if vision.get("model_type") == "pixtral":
        unit = 14 * CONFIGS[model_type].get("spatial_merge_size", 1)
        num_rows, num_columns = 3, 4 + seed % 2
        num_tokens = num_rows * (num_columns + 1) - 1
        pixels = rng.standard_normal((1, 3, num_rows * unit, num_columns * unit), dtype=np.float32)
        inputs = {"pixel_values": pixels, "image_sizes": np.array([pixels.shape[2:]])}
    elif model_type == "gemma3":
        size, num_tokens = vision["image_size"], CONFIGS[model_type]["mm_tokens_per_image"]
        inputs = {"pixel_values": rng.standard_normal((1, 3, size, size), dtype=np.float32)}
    elif model_type == "minicpmv4_6":
        num_tokens, sides = 2 * (3 + seed % 2), np.array([[8, 12 + 4 * (seed % 2)]], np.int32)
        pixels = rng.standard_normal((3, 14, 14 * int(sides.prod())), dtype=np.float32)
        inputs = {"pixel_values": pixels, "tgt_sizes": sides}
    elif model_type == "deepseekocr":  # two tiles, or the whole image
        columns, side = 1 + seed % 2, 128 - 64 * (seed % 2)
        num_tokens = 3 if seed % 2 else 2 * 3 + 1
        pixels = rng.standard_normal((columns, 3, side, side), dtype=np.float32)
        inputs = {"pixel_values": pixels, "images_spatial_crop": np.array([[columns, 1]])}
    elif model_type == "gemma3n":
        num_tokens, inputs = 5, {"pixel_values": rng.standard_normal((1, 3, 64, 64), dtype=np.float32)}
    elif model_type.startswith("gemma4"):
        unit, side = vision.get("pooling_kernel_size", 1), vision.get("model_patch_size", vision["patch_size"])
        height, width = 3 * unit, (4 + seed % 2) * unit
        num_tokens = height * width // unit**2
        places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).reshape(1, -1, 2)
        pixels = rng.random((1, height * width, 3 * side**2), dtype=np.float32)
        inputs = {"pixel_values": pixels, "image_position_ids": places}
    elif model_type in ("idefics3", "smolvlm", "internvl", "internvl_chat"):
        size, num_tokens = (56, 56), 4
        inputs = {"pixel_values": rng.standard_normal((1, 1, 3, *size), dtype=np.float32)}
    else:
        height, width = 8, 8 + 2 * (seed % 2)
        num_tokens, side = height * width // 4, vision["patch_size"]
        inputs = patches(model_type, rng.standard_normal((height * width, 3, side, side), dtype=np.float32), height)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in inputs.values())).digest()
    return PromptImage(0, num_tokens, digest, inputs, model_type in ("gemma3", "gemma4_moe", "gemma4_unified"))


def patches(model_type: str, pixels: np.ndarray, height: int) -> dict[str, Any]:
    """The inputs for patches `[n, channels, rows, columns]` in the form of the model's processor."""
    width = len(pixels) // height
    if model_type == "lfm2_vl":
        own = pixels.reshape(1, len(pixels), -1)
        mask = np.ones(own.shape[:2], np.int32)
        return {"pixel_values": own, "pixel_attention_mask": mask, "spatial_shapes": np.array([[height, width]])}
    if model_type == "kimi_vl":
        return {"pixel_values": pixels, "image_grid_hws": np.array([[height, width]])}
    if model_type == "paddleocr_vl":
        pixels = pixels[None]
    else:
        times = CONFIGS[model_type]["vision_config"]["temporal_patch_size"]
        pixels = np.repeat(pixels[:, :, None], times, axis=2).reshape(len(pixels), -1)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}


def placeholders(image: PromptImage) -> list[int]:
    """The token ids of an image in a prompt."""
    if "pixel_values" in image.inputs and image.inputs["pixel_values"].shape[2:] == (64, 64):  # Gemma 3n's
        return [*[IMAGE] * (image.num_tokens - 1), IMAGE - 1]
    if "image_sizes" not in image.inputs:
        return [IMAGE] * image.num_tokens
    num_columns = (image.num_tokens + 1) // 3 - 1
    return [*([IMAGE] * num_columns + [BREAK]) * 3][:-1]


Prompt = tuple[list[int], tuple[PromptImage, ...]]


def prompt_of(parts: Sequence[Sequence[int] | PromptImage]) -> Prompt:
    """Token ids of text and images, and the images in their places."""
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, PromptImage):
            ids.append(START)
            images.append(replace(part, start=len(ids)))
            ids += placeholders(part)
        else:
            ids += part
    return ids, tuple(images)


def plain_greedy(vlm: TinyVlm, prompt: Prompt, num_tokens: int) -> list[int]:
    """The answer of mlx-vlm's own class, for the whole prompt alone."""
    ids, images = prompt
    model = vlm.plain
    if vlm.config.model_type == "gemma3n":
        return _greedy_without_caches(model, ids, images, num_tokens)
    if vlm.config.model_type in ("deepseekocr", "minicpmv4_6"):
        return _stitched_greedy(model, ids, images, num_tokens)
    if vlm.config.model_type == "gemma3":
        return _dense_greedy(model, ids, images, num_tokens)
    caches = vlm_module("models.cache").make_prompt_cache(model.language_model)
    if getattr(vlm.config.text_config, "use_bidirectional_attention", None):
        caches = [_WithMasks(ids, vlm.config) for _ in caches]
    names = images[0].inputs if images else ()
    arrays = {name: mx.array(_stacked(name, [image.inputs[name] for image in images])) for name in names}
    if not images:
        model.language_model._rope_deltas = model.language_model._position_ids = None
    logits = model(mx.array([ids]), arrays.pop("pixel_values", None), mask=None, cache=caches, **arrays).logits[0, -1]
    tokens = [int(mx.argmax(logits).item())]
    while len(tokens) < num_tokens:
        logits = model.language_model(mx.array([tokens[-1:]]), cache=caches).logits[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
    return tokens


def _greedy_without_caches(model: Any, ids: Sequence[int], images: Sequence[PromptImage], num_tokens: int) -> list[int]:
    """Gemma 3n. With caches, mlx-vlm's queries of layers that share K/V have the positions of later tokens."""
    tokens: list[int] = []
    pixels = mx.array(np.concatenate([image.inputs["pixel_values"] for image in images])) if images else None
    while len(tokens) < num_tokens:
        tokens.append(int(mx.argmax(model(mx.array([[*ids, *tokens]]), pixels).logits[0, -1]).item()))
    return tokens


def _stitched_greedy(model: Any, ids: Sequence[int], images: Sequence[PromptImage], num_tokens: int) -> list[int]:
    """For models whose code in mlx-vlm takes one image of a prompt, with all of its tiles."""
    embeddings = model.language_model.model.embed_tokens(mx.array([ids]))
    for image in images:
        embeddings[0, image.start : image.end] = embedded_alone(model, image)
    if hasattr(model.language_model, "_rope_deltas"):
        model.language_model._rope_deltas = model.language_model._position_ids = None
    caches = vlm_module("models.cache").make_prompt_cache(model.language_model)
    logits = model.language_model(mx.array([ids]), inputs_embeds=embeddings, cache=caches).logits[0, -1]
    tokens = [int(mx.argmax(logits).item())]
    while len(tokens) < num_tokens:
        logits = model.language_model(mx.array([tokens[-1:]]), cache=caches).logits[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
    return tokens


def embedded_alone(model: Any, image: PromptImage) -> mx.array:
    """The embeddings `[n, D]` of a piece of an image by mlx-vlm's own code, which puts tiles before the whole image."""
    if model.config.model_type == "minicpmv4_6":
        pixels, sizes = image.inputs["pixel_values"], image.inputs["tgt_sizes"]
        bounds = [np.array([[0, image.num_tokens]])]
        ids = mx.full((1, image.num_tokens), IMAGE)
        return model.get_input_embeddings(ids, [[pixels]], tgt_sizes=[sizes], image_bound=bounds).inputs_embeds[0]
    pixels, grid = mx.array(image.inputs["pixel_values"]), mx.array(image.inputs["images_spatial_crop"])
    side, is_first = pixels.shape[-1], model.config.model_type == "deepseekocr"
    is_whole = side == (128 if is_first else 1024)
    whole = pixels if is_whole else mx.ones((1, 3, 128, 128) if is_first else (1, 3, 1024, 1024))
    count = image.num_tokens + (0 if is_whole else 7 if is_first else 257)
    made = model.get_input_embeddings(
        mx.full((1, count), IMAGE),
        [mx.zeros((1, 3, side, side)) if is_whole else pixels, whole],
        images_spatial_crop=grid,
        images_seq_mask=mx.ones((1, count), mx.bool_),
    ).inputs_embeds
    return made[0, : image.num_tokens]


def _dense_greedy(model: Any, ids: Sequence[int], images: Sequence[PromptImage], num_tokens: int) -> list[int]:
    """Gemma 3 as transformers defines it, without a cache. In mlx-vlm's own masks, all tokens of a prompt with an image
    see each other."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.append(int(mx.argmax(dense_logits(model, [*ids, *tokens], images)[-1]).item()))
    return tokens


def dense_logits(model: Any, ids: Sequence[int], images: Sequence[PromptImage]) -> mx.array:
    """Logits `[L, vocabulary]` of Gemma 3 by mlx-vlm's layers with full masks: a token sees all tokens up to itself and
    all of its own image, but in layers with a window no token that is `sliding_window` or more before it."""
    body, config = model.language_model.model, model.config.text_config
    hidden = body.embed_tokens(mx.array([ids])) * config.hidden_size**0.5
    is_image = np.array(ids) == model.config.image_token_index
    for place, image in zip(np.flatnonzero(np.diff(is_image, prepend=False) & is_image).tolist(), images, strict=True):
        pixels = mx.array(image.inputs["pixel_values"]).transpose(0, 2, 3, 1)
        shown = model.multi_modal_projector(model.vision_tower(pixels)[0])
        hidden[:, place : place + shown.shape[1]] = shown
    place, owner = np.arange(len(ids)), np.cumsum(np.diff(is_image, prepend=False))
    sees = (place <= place[:, None]) | ((owner == owner[:, None]) & is_image)
    windowed = sees & (place > place[:, None] - config.sliding_window)
    for layer in body.layers:
        hidden = layer(hidden, mx.array(windowed if layer.self_attn.is_sliding else sees), None)
    logits: mx.array = model.language_model.lm_head(body.norm(hidden))[0]
    return logits


class _WithMasks(KVCache):
    """Keeps everything, with the masks of transformers for Gemma 4: in layers with a window, tokens of an image also
    see later ones of theirs. mlx-vlm's masks are so in all layers."""

    def __init__(self, ids: Sequence[int], config: Any) -> None:
        super().__init__()
        is_image = np.zeros(len(ids) + 32, bool)
        is_image[: len(ids)] = np.array(ids) == config.image_token_id
        owner = np.cumsum(np.diff(is_image, prepend=False))
        self._is_of_one = (owner == owner[:, None]) & is_image

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        rows, end = slice(self.offset, self.offset + N), self.offset + N
        behind = np.arange(self.offset, end)[:, None] - np.arange(end)
        if window_size is None:
            return mx.array(behind >= 0)
        return mx.array(((behind >= 0) | self._is_of_one[rows, :end]) & (behind < window_size))


def _stacked(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Joins images as a processor does: tiles along their second axis, pixels padded to the widest image, and patches
    to the most patches."""
    if arrays[0].ndim == 3 or name == "pixel_attention_mask":
        most, missing = max(array.shape[1] for array in arrays), -1 if name == "image_position_ids" else 0
        filled = [np.full((len(array), most, *array.shape[2:]), missing, array.dtype) for array in arrays]
        for whole, array in zip(filled, arrays, strict=True):
            whole[:, : array.shape[1]] = array
        arrays = filled
    if arrays[0].ndim == 4:
        widest = max(array.shape[3] for array in arrays)
        arrays = [np.pad(array, [(0, 0)] * 3 + [(0, widest - array.shape[3])]) for array in arrays]
    return np.concatenate(arrays, 1 if arrays[0].ndim == 5 else 0)
