"""The load-time check of images: compares logits in a ragged batch, with an image that is cut by the end of a chunk,
with mlx-vlm's own forward pass."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_server.outputs import ImageJob, NewRequestData, ScheduledChunk
from mlx_server.request import PromptImage, Request
from mlx_server.runtime.checks.image_families import (
    IMAGE_FAMILIES,
    TEXT_ONLY,
    ImageFamily,
    image_token_id,
    not_served,
    sees_both_ways,
)
from mlx_server.runtime.checks.probe import TOLERANCES, TrialRequests, relative_error
from mlx_server.runtime.layers.adapters import is_adapted
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.vlm import vlm_module
from mlx_server.runtime.vision import ImageEncoder, ImagePieces, ImageRows, ReadsImages
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_BEFORE, _AFTER = 5, 7
"""Text tokens before and after the image."""


def find_image_fault(model: Any, runner: ModelRunner, vocab_size: int) -> Generator[float, None, str]:
    """Returns the reason why images are not served; empty if they are. Releases the runner's pools. MLX thread; yields
    after each step."""
    if not isinstance(model, ReadsImages) or len(model.children()) == 1:
        return TEXT_ONLY
    family = IMAGE_FAMILIES.get(model.model_type)
    if family is None:
        fault = not_served(model.model_type)
    elif any(is_adapted(part) for part in model.encoder_parts):
        fault = "one of its adapters changes the vision encoder, and all requests share the encoder's results"
    else:
        fault = yield from _difference(model, runner, vocab_size, family)
    if fault:
        logger.warning("Images are not served: %s.", fault)
    return fault


def _difference(
    model: ReadsImages, runner: ModelRunner, vocab_size: int, family: ImageFamily
) -> Generator[float, None, str]:
    """What is wrong with an image in a ragged batch; empty if nothing is."""
    try:
        sample = family.sample(model.config, np.random.default_rng(0))
        worst, dtype = yield from _error(model, runner, vocab_size, *sample)
    except Exception as error:  # any error of the model's code
        return f"its images cannot be computed in a ragged batch: {type(error).__name__}: {error}"
    finally:
        runner.cache.release()
    tolerance = TOLERANCES[dtype]
    if not worst <= tolerance:
        return f"with an image its logits differ by {worst:.1e} of the largest, more than {tolerance:g}"
    return ""


def _error(
    model: Any, runner: ModelRunner, vocab_size: int, placeholders: list[int], inputs: dict[str, Any]
) -> Generator[float, None, tuple[float, mx.Dtype]]:
    """The largest difference of logits relative to the largest logit, and their type."""
    rng = np.random.default_rng(1)
    text = rng.integers(1, min(vocab_size, image_token_id(model.config)), size=_BEFORE + _AFTER + 1).tolist()
    start = getattr(model.config, "vision_start_token_id", None)
    before = text[:_BEFORE] + ([] if start is None else [start])
    prompt = [*before, *placeholders, *text[_BEFORE:-1]]
    if max(prompt) >= vocab_size:  # MLX would read beyond the embeddings
        raise ValueError(f"its token {max(prompt)} for images is not one of its {vocab_size} tokens")
    image = PromptImage(len(before), len(placeholders), bytes(32), inputs, sees_both_ways(model.config))
    plain = _plain_logits(model, prompt, text[-1], image)
    mx.eval(plain)
    yield 1.0
    ours = yield from _ragged_logits(model, runner, prompt, text[-1], image)
    return relative_error(ours, plain), plain.dtype


def _plain_logits(model: Any, prompt: list[int], following: int, image: PromptImage) -> mx.array:
    """mlx-vlm's own logits after the prompt and after one more token: `[2, vocabulary]`. For a bidirectional image with
    our masks: mlx-vlm's let all tokens of a prompt see each other in Gemma 3, and all layers see both ways in
    Gemma 4. Of a model without a plain one, its own for the prompt alone."""
    whole, ids = model.plain(), mx.array([prompt])
    arrays = {name: mx.array(value) for name, value in image.inputs.items()}
    if whole is None:
        encoded = model.embed_image(ids[:, image.start : image.end], arrays)
        rows = ImageRows(np.arange(image.start, image.end, dtype=np.int32), encoded, None)
        caches = make_prompt_cache(model)
        both = [model(ids, cache=caches, image_rows=rows), model(mx.array([[following]]), cache=caches)]
        return mx.stack([logits[0, -1] for logits in both])
    caches = vlm_module("models.cache").make_prompt_cache(whole.language_model)
    if image.is_bidirectional:
        caches = [_MaskedCache(image, in_windows=model.spans_in_windows) for _ in caches]
        made = whole.get_input_embeddings(ids, arrays.pop("pixel_values"), mask=mx.ones_like(ids), **arrays)
        parts = {"inputs_embeds": made.inputs_embeds, "per_layer_inputs": made.per_layer_inputs}
        given = {name: part for name, part in parts.items() if part is not None}
        first = whole.language_model(ids, cache=caches, **given)
    else:
        first = model.module.Model.__call__(whole, ids, arrays.pop("pixel_values"), mask=None, cache=caches, **arrays)
    second = whole.language_model(mx.array([[following]]), cache=caches)
    return mx.stack([first.logits[0, -1], second.logits[0, -1]])


class _MaskedCache(KVCache):  # type: ignore[misc]
    """Keeps everything, and masks as transformers does: a placeholder sees its whole `image` and what precedes it,
    within the window; `in_windows`, without a window only what precedes it."""

    def __init__(self, image: PromptImage, *, in_windows: bool) -> None:
        super().__init__()
        self._image = image
        self._in_windows = in_windows

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        queries, keys = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        start, end = self._image.start, self._image.end
        is_within = (queries >= start) & (queries < end) & (keys >= start) & (keys < end)
        mask = keys <= queries
        if window_size is not None or not self._in_windows:
            mask = mask | is_within
        return mask if window_size is None else mask & (keys > queries - window_size)


def _ragged_logits(
    model: Any, runner: ModelRunner, prompt: list[int], following: int, image: PromptImage
) -> Generator[float, None, mx.array]:
    """The same logits from three steps with two requests. The image's first chunk ends within the image, or after it if
    it is bidirectional; the text request decodes from the second step on."""
    encoder = ImageEncoder(model, max_bytes=0)
    trial = TrialRequests(
        runner, {"image": [*prompt, following], "text": [*prompt[: image.start], following, following]}
    )
    most = len(prompt) + 1
    request = Request("image", prompt, SamplingParams(), arrival_s=0.0, max_total_tokens=most, images=(image,))
    job = ImageJob(request, image)
    encoder.keep(job, ImagePieces(model, job.token_ids, image.inputs).encoded)
    encoder.add(NewRequestData.of(request, None))

    def run(*chunks: ScheduledChunk) -> mx.array:
        """Logits of the last row, which belongs to the request with the image."""
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks])
        return trial.run(chunks, [len(positions) - 1], images=encoder.rows(chunks, positions))[0]

    chunk = trial.chunk
    num_first = image.num_tokens + 1 if image.is_bidirectional else max(1, image.num_tokens // 2)
    cut, end, num_text = image.start + num_first, len(prompt), image.start + 1
    run(chunk("text", 0, num_text), chunk("image", 0, cut))
    yield 1.0
    last = run(chunk("text", num_text, num_text + 1), chunk("image", cut, end))
    yield 1.0
    decoded = run(chunk("image", end, end + 1))
    return mx.stack([last, decoded])
