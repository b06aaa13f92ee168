"""Images in pieces: the encoder computes what it would as a whole, and nothing before the first piece."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.outputs import ImageJob, NewRequestData
from mlx_server.request import Request
from mlx_server.runtime.vision import ImageEncoder, ImagePieces
from mlx_server.sampling_params import SamplingParams
from tests.vision_configs import CONFIGS
from tests.vision_worlds import picture, prompt_of, tiny_vlm


@pytest.mark.parametrize("num_outputs", [1, 7])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_pieces_have_the_bits_of_the_whole(monkeypatch, model_type, num_outputs):
    model, image = tiny_vlm(model_type).loaded.model, picture(model_type, 1)
    ids, (image,) = prompt_of([image])
    token_ids = ids[image.start : image.end]
    arrays = {name: mx.array(value) for name, value in image.inputs.items()}
    whole = model.embed_image(mx.array([token_ids]), arrays)
    classes = [type(module) for module in model.modules()]
    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", lambda *_: pytest.fail("the device is waited for"))
        pieces = ImagePieces(model, token_ids, image.inputs)
    assert [type(module) for module in model.modules()] == classes
    count, num_left = 0, pieces.num_left
    while pieces.num_left:
        pieces.submit(num_outputs).item()
        count += 1
    assert count == -(-num_left // num_outputs)
    assert count > 1 or num_outputs > 1
    for one, other in zip(whole.arrays, pieces.encoded.arrays, strict=True):
        assert np.array_equal(np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)))


def test_the_last_two_encoded_images_are_kept_until_they_are_used():
    model = tiny_vlm("qwen2_5_vl").loaded.model
    encoder, jobs = ImageEncoder(model, max_bytes=0), []
    for seed in range(3):
        ids, images = prompt_of([range(5, 15), picture("qwen2_5_vl", seed)])
        request = Request(f"r{seed}", ids, SamplingParams(), arrival_s=0.0, max_total_tokens=99, images=images)
        jobs.append(ImageJob(request, images[0]))
        pieces = encoder.begin(jobs[-1])
        assert pieces is not None
        while pieces.num_left:
            pieces.submit(99).item()
        encoder.keep(jobs[-1], pieces.encoded)
    request = jobs[0].request
    encoder.add(
        NewRequestData("other", tuple(request.prompt_token_ids), (), request.sampling, frozenset(), images=images)
    )
    encoder.drop("other")
    assert [encoder.begin(job) is None for job in jobs] == [False, True, True]


def test_images_of_requests_that_never_start_stay_within_the_limit():
    """They were ended while they waited for a seat, so no step and no end of a request evicts them."""
    encoder = ImageEncoder(tiny_vlm("qwen2_5_vl").loaded.model, max_bytes=0)
    for seed in range(5):
        ids, images = prompt_of([range(5, 15), picture("qwen2_5_vl", seed)])
        request = Request(f"r{seed}", ids, SamplingParams(), arrival_s=0.0, max_total_tokens=99, images=images)
        job = ImageJob(request, images[0])
        pieces = encoder.begin(job)
        assert pieces is not None
        pieces.submit(pieces.num_left).item()
        encoder.keep(job, pieces.encoded)
    assert len(encoder._encoded) == 2


class _Arrays(dict[str, Any]):
    """Of an image; may be referred to weakly."""


def test_the_arrays_of_an_image_are_not_kept_until_the_step_that_drops_its_request():
    """A server at rest has no such step, and they may have hundreds of megabytes."""
    encoder = ImageEncoder(tiny_vlm("qwen2_5_vl").loaded.model, max_bytes=0)
    ids, (image,) = prompt_of([range(5, 15), picture("qwen2_5_vl", 1)])
    arrays = _Arrays(image.inputs)
    images = (replace(image, inputs=arrays),)
    encoder.add(NewRequestData("a", tuple(ids), (), SamplingParams(), frozenset(), images=images))
    kept = weakref.ref(arrays)
    del images, arrays
    assert kept() is None
