"""Whether a model sees images in a ragged batch: one, cut by a chunk's end, against mlx-vlm's own forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, NewRequestData, ScheduledChunk
from mlx_server.request import PromptImage
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.checks.probe import TOLERANCES, relative_error
from mlx_server.runtime.layers.adapters import is_adapted
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.vlm import VlmModel
from mlx_server.runtime.vision import ImageEncoder
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_BEFORE, _AFTER = 5, 7
"""Tokens of text around the image."""

TEXT_ONLY = "it is a model of text"

Sample = tuple[list[int], dict[str, Any]]
"""The placeholders of an image and what the encoder takes for it."""

MakeSample = Callable[[Any, np.random.Generator], Sample]


def _by_grid(config: Any, rng: np.random.Generator) -> Sample:
    """Of models whose processor cuts images into patches: 2 x 3 placeholders."""
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    height, width = 2 * merge, 3 * merge
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = rng.standard_normal((height * width, size), dtype=np.float32)
    return [image_token_id(config)] * 6, {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}


def _by_tile(config: Any, rng: np.random.Generator) -> Sample:
    """Of models that see square tiles, each by itself."""
    vision = config.vision_config
    num_tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    pixels = rng.standard_normal((1, 1, 3, vision.image_size, vision.image_size), dtype=np.float32)
    return [image_token_id(config)] * num_tokens, {"pixel_values": pixels}


def _by_row(config: Any, rng: np.random.Generator) -> Sample:
    """Of models that put a token between rows: 2 x 3 placeholders, and one of text between them."""
    unit = _merged_patch(config)
    pixels = rng.standard_normal((1, config.vision_config.num_channels, 2 * unit, 3 * unit), dtype=np.float32)
    row = [image_token_id(config)] * 3
    return [*row, 1, *row], {"pixel_values": pixels, "image_sizes": np.array([[2 * unit, 3 * unit]])}


def _by_square(config: Any, rng: np.random.Generator) -> Sample:
    """Of models that make one square of every image."""
    side = config.vision_config.image_size
    pixels = rng.standard_normal((1, config.vision_config.num_channels, side, side), dtype=np.float32)
    return [image_token_id(config)] * config.text_config.mm_tokens_per_image, {"pixel_values": pixels}


def _merged_patch(config: Any) -> int:
    """The pixels along a side of what is one placeholder."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


SAMPLES: Mapping[str, MakeSample] = {
    "qwen2_vl": _by_grid,
    "qwen2_5_vl": _by_grid,
    "qwen3_vl": _by_grid,
    "qwen3_vl_moe": _by_grid,
    "gemma3": _by_square,
    "idefics3": _by_tile,
    "smolvlm": _by_tile,
    "pixtral": _by_row,
    "mistral3": _by_row,
}
"""The families whose images are served, by `model_type`, and what each one's encoder takes."""


BIDIRECTIONAL = ("gemma3",)
"""Those of them in which the placeholders of an image see each other both ways."""


def _placeholders_by_grid(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    times, height, width = np.asarray(inputs["image_grid_thw"]).reshape(3).tolist()
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    _check(inputs["pixel_values"].shape == (times * height * width, size), height % merge == 0, width % merge == 0)
    return int(times * height * width // merge**2)


def _placeholders_by_tile(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    size = config.vision_config.image_size
    mask = inputs.get("pixel_attention_mask")
    _check(inputs["pixel_values"].shape == (1, 1, 3, size, size), mask is None or mask.shape == (1, 1, size, size))
    _check(bool(np.any(inputs["pixel_values"])))  # a tile of zeros is padding to the encoder
    return int((size // config.vision_config.patch_size) ** 2 // config.scale_factor**2)


def _placeholders_by_square(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    vision = config.vision_config
    _check(inputs["pixel_values"].shape == (1, vision.num_channels, vision.image_size, vision.image_size))
    return int(config.text_config.mm_tokens_per_image)


def _placeholders_by_row(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    unit, vision = _merged_patch(config), config.vision_config
    height, width = np.asarray(inputs["image_sizes"]).reshape(2).tolist()
    _check(inputs["pixel_values"].shape == (1, vision.num_channels, height, width))
    _check(height % unit == width % unit == 0, 0 < height <= vision.image_size, 0 < width <= vision.image_size)
    rows = [[True] * (width // unit)] * (height // unit)
    apart = [*chain.from_iterable([*row, False] for row in rows)][:-1]
    _check(list(is_image) in (apart, [*chain.from_iterable(rows)]))
    return len(is_image)


_COUNTS: Mapping[MakeSample, Callable[[Any, Mapping[str, Any], Sequence[bool]], int]] = {
    _by_grid: _placeholders_by_grid,
    _by_square: _placeholders_by_square,
    _by_tile: _placeholders_by_tile,
    _by_row: _placeholders_by_row,
}


def _check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("shapes that do not go together")


def count_placeholders(model: VlmModel, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> int | None:
    """How many placeholders an image with these arrays has; None if the model's encoder cannot take them, or if
    `token_ids`, which stand for it, are not such as it makes. Any thread."""
    placeholder = image_token_id(model.config)
    try:
        count = _COUNTS[SAMPLES[model.model_type]]
        return count(model.config, inputs, [token_id == placeholder for token_id in token_ids])
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def image_token_id(config: Any) -> int:
    """The id of a placeholder, as mlx-vlm's configuration has it."""
    names = ("image_token_index", "image_token_id")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None) is not None))


def not_served(model_type: Any) -> str:
    """Why models of a type that is not in `SAMPLES` take no images."""
    return f"images are served for models of type {', '.join(SAMPLES)}, and this one is of type {model_type}"


def find_fault(model: Any, runner: ModelRunner, vocab_size: int) -> str:
    """Why images are not served; empty if they are. The runner's pools are released. MLX thread."""
    if not isinstance(model, VlmModel) or not model.has_encoder:
        return TEXT_ONLY
    sample = SAMPLES.get(model.model_type)
    if sample is None:
        fault = not_served(model.model_type)
    elif any(is_adapted(part) for name, part in model.children().items() if name != "language_model"):
        fault = "one of its adapters changes the vision encoder, whose results all requests share"
    else:
        fault = _difference(model, runner, vocab_size, sample)
    if fault:
        logger.warning("Images are not served: %s.", fault)
    return fault


def _difference(model: VlmModel, runner: ModelRunner, vocab_size: int, sample: MakeSample) -> str:
    """Why an image in a ragged batch is not good enough, empty if it is."""
    try:
        worst, dtype = _error(model, runner, vocab_size, *sample(model.config, np.random.default_rng(0)))
    except Exception as error:  # the model's code met what it was not written for
        return f"its images cannot be computed in a ragged batch: {type(error).__name__}: {error}"
    finally:
        runner.cache.release()
    tolerance = TOLERANCES[dtype]
    if not worst <= tolerance:
        return f"with an image its logits differ by {worst:.1e} of the largest, more than {tolerance:g}"
    return ""


def _error(
    model: Any, runner: ModelRunner, vocab_size: int, placeholders: list[int], inputs: dict[str, Any]
) -> tuple[float, mx.Dtype]:
    """The largest difference of logits relative to the largest logit, and their type."""
    rng = np.random.default_rng(1)
    text = rng.integers(1, min(vocab_size, image_token_id(model.config)), size=_BEFORE + _AFTER + 1).tolist()
    start = getattr(model.config, "vision_start_token_id", None)
    before = text[:_BEFORE] + ([] if start is None else [start])
    prompt = [*before, *placeholders, *text[_BEFORE:-1]]
    image = PromptImage(len(before), len(placeholders), bytes(32), inputs, model.model_type in BIDIRECTIONAL)
    plain = _plain_logits(model, prompt, text[-1], image)
    mx.eval(plain)
    ours = _ragged_logits(model, runner, prompt, text[-1], image)
    return relative_error(ours, plain), plain.dtype


def _plain_logits(model: Any, prompt: list[int], following: int, image: PromptImage) -> mx.array:
    """Of mlx-vlm alone, after the prompt and after one more token: `[2, vocabulary]`. Where an image is bidirectional,
    with our masks: mlx-vlm's own let all tokens of such a prompt see each other."""
    caches = model.make_cache()
    arrays = {name: mx.array(value) for name, value in image.inputs.items()}
    ids = mx.array([prompt])
    if image.is_bidirectional:
        caches = [_MaskedCache(image) for _ in caches]
        made = model.get_input_embeddings(ids, arrays.pop("pixel_values"), mask=mx.ones_like(ids), **arrays)
        first = model.language_model(ids, inputs_embeds=made.inputs_embeds, cache=caches)
    else:
        first = model.module.Model.__call__(model, ids, arrays.pop("pixel_values"), mask=None, cache=caches, **arrays)
    second = model.language_model(mx.array([[following]]), cache=caches)
    return mx.stack([first.logits[0, -1], second.logits[0, -1]])


class _MaskedCache(KVCache):  # type: ignore[misc]
    """Keeps everything, and masks as transformers does: a placeholder sees all of its `image` beside what is before it,
    and a window hides what is before that."""

    def __init__(self, image: PromptImage) -> None:
        super().__init__()
        self._image = image

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        queries, keys = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        start, end = self._image.start, self._image.end
        is_within = (queries >= start) & (queries < end) & (keys >= start) & (keys < end)
        mask = (keys <= queries) | is_within
        return mask if window_size is None else mask & (keys > queries - window_size)


def _ragged_logits(model: Any, runner: ModelRunner, prompt: list[int], following: int, image: PromptImage) -> mx.array:
    """The same from three steps, with the end of the first chunk within the image, or behind one that is whole, and a
    prompt of text alone beside it, which decodes later."""
    encoder = ImageEncoder(model, max_bytes=0)
    windows = runner.cache.windows
    num_blocks = -(-(len(prompt) + 1) // BLOCK_SIZE)
    runner.cache.allocate(len(windows) * (num_blocks + 1), num_slots=3)
    tables = BlockTables(windows)
    ids_of = {"image": [*prompt, following], "text": [*prompt[: image.start], following, following]}
    for name in ids_of:
        tables.add(name)
    encoder.add(NewRequestData("image", tuple(prompt), (), SamplingParams(), frozenset(), images=(image,)))

    def blocks(first: int, count: int) -> BlockIds:
        """The blocks [first, first + count) of each layer group's own range."""
        starts = [group * (num_blocks + 1) + first for group in range(len(windows))]
        return tuple(tuple(range(start, start + count)) for start in starts)

    def run(*chunks: ScheduledChunk) -> mx.array:
        """Logits of the last row, which is the request's with the image."""
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids or ()]
        plans = tables.plan(chunks)
        logits = runner.forward(plans, mx.array(ids), [len(ids) - 1], images=encoder.rows(chunks, plans[0].positions))
        mx.eval(logits, *runner.cache.state())
        return logits[0]

    def chunk(name: str, start: int, end: int, block_ids: BlockIds = ()) -> ScheduledChunk:
        return ScheduledChunk(name, start, end - start, tuple(ids_of[name][start:end]), block_ids, True, 0)

    num_first = image.num_tokens + 1 if image.is_bidirectional else max(1, image.num_tokens // 2)
    cut, end, num_text = image.start + num_first, len(prompt), image.start + 1
    run(chunk("text", 0, num_text, blocks(0, 1)), chunk("image", 0, cut, blocks(1, num_blocks)))
    last = run(chunk("text", num_text, num_text + 1), chunk("image", cut, end))
    decoded = run(chunk("image", end, end + 1))
    if errors := encoder.take_news().errors:
        raise RuntimeError(errors["image"])
    return mx.stack([last, decoded])
