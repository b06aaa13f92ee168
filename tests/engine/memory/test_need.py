"""Each term of what steps and encoders are estimated to take, in small numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.config import Config, ModelConfig, SchedulerConfig
from mlx_server.engine.memory import need
from mlx_server.engine.memory.need import MemoryNeed, estimate_need, step_bytes, vision_bytes
from mlx_server.engine.vision.encoders import encoder_pixels

MODEL = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
}
"""Queries of 8 numbers, keys and values of 8 together, and an MLP that is 32 wide: 8 x 8 + 3 x 16 + 3 x 32 = 208
elements a token in a layer, and 64 in the two widest arrays."""

WORK = {"weights_bytes": 0, "num_tokens": 10, "num_seqs": 4, "context_tokens": 20, "item_bytes": 2}
FEW, MANY = 5, 2**40
"""Elements after which a command buffer ends. With few, 12 buffers are held; with many, two whole steps."""


@pytest.mark.parametrize(
    ("model", "work", "num_elements"),
    [
        ({}, {}, 60 + 320 + 640),  # 12 buffers of 5; 2 layers x 20 rows x 8; 10 tokens x 64
        ({}, {"weights_bytes": 4 * 3 * 2080}, 30 + 320 + 640),  # half of a layer's elements are weights
        ({}, {"context_tokens": 40_000}, 60 + 2 * 32_768 * 8 + 640),
        ({"head_dim": 128}, {}, 60 + 2 * 20 * 256 + 640),
        ({"head_dim": 129}, {}, 78 + 2 * 20 * 258 + 640),  # 1.3 times as much, since logits are stored
        ({"head_dim": 128, "qk_rope_head_dim": 32}, {}, 78 + 2 * 20 * 256 + 640),  # as for keys longer than values
        ({"num_key_value_heads": 2}, {}, 60 + 640 + 640),
        ({"num_key_value_heads": None}, {}, 60 + 640 + 640),
        ({"intermediate_size": 50}, {}, 60 + 320 + 1000),
        ({"intermediate_size": 3}, {}, 60 + 320 + 160),
        ({"moe_intermediate_size": 16, "num_experts_per_tok": 3}, {}, 60 + 320 + 960),
        ({"num_attention_heads": None, "num_key_value_heads": None}, {}, 60 + 640 + 640),
        ({"num_attention_heads": 1}, {}, 60 + 640 + 640),
    ],
)
def test_what_command_buffers_hold(model: dict[str, Any], work: dict[str, int], num_elements: int) -> None:
    assert step_bytes({**MODEL, **model}, **{**WORK, **work}, buffer_elements=FEW) == 2 * num_elements


@pytest.mark.parametrize(
    ("model", "work", "num_elements"),
    [
        ({}, {}, 208),
        ({}, {"num_tokens": 20}, 416),
        ({}, {"num_seqs": 5}, 208),
        ({"intermediate_size": 50}, {}, 64 + 48 + 150),
        ({"moe_intermediate_size": 16, "num_experts_per_tok": 2}, {}, 64 + 48 + 2 * (32 + 48)),
        ({"shared_expert_intermediate_size": 7}, {}, 208 + 21),
        (  # a recurrent layer's keys and values, 2 x 12 + 15, count twice
            {
                "linear_num_key_heads": 3,
                "linear_key_head_dim": 4,
                "linear_num_value_heads": 3,
                "linear_value_head_dim": 5,
            },
            {},
            64 + 3 * 2 * 39 + 96,
        ),
        ({"num_hidden_layers": None, "n_layers": 3}, {}, 208),
    ],
)
def test_what_two_steps_compute(model: dict[str, Any], work: dict[str, int], num_elements: int) -> None:
    done = {**WORK, **work}
    num_rows, num_sampled = 10, 6 * done["num_seqs"] * 100
    expected = 2 * ((3 * num_rows * num_elements + 320) * 2 + num_sampled * 4)
    assert step_bytes({**MODEL, **model}, **done, buffer_elements=MANY) == expected


def test_what_attention_by_row_adds() -> None:
    """4 cores run 8 threadgroups each, 16 for each of 2 KV heads: so a token's 8 queries have 8 x 16 results in
    float32, beside 64 + 3 x 24 + 96 elements of 2 bytes."""
    parts, others = 8 * 16, 232
    bytes_each = (parts * 4 + others * 2) / (parts + others)
    expected = 2 * ((3 * 10 * (parts + others) + 2 * 20 * 16) * bytes_each + 6 * 4 * 100 * 4)
    model = {**MODEL, "num_key_value_heads": 2}
    assert step_bytes(model, **WORK, buffer_elements=MANY, by_row_cores=4) == pytest.approx(expected, abs=1)


def test_two_models_need_the_weights_of_both_and_the_steps_of_one() -> None:
    assert MemoryNeed(1, 20, 300).plus(MemoryNeed(4, 50, 600)) == MemoryNeed(5, 50, 900)
    assert MemoryNeed(1, 50, 300).plus(MemoryNeed(4, 20, 600)).total_bytes == 5 + 50 + 900


def test_an_image_is_encoded_between_the_steps_of_the_model_and_between_those_that_draft() -> None:
    seeing, large_draft = MemoryNeed(1, 20, 300, encoder_bytes=7000), MemoryNeed(4, 50, 600)
    assert seeing.plus(large_draft) == MemoryNeed(5, 50, 900, 7000)
    assert seeing.plus(large_draft).activation_bytes == 7050


TOWER = {
    "hidden_size": 64,
    "depth": 2,
    "num_heads": 4,
    "intermediate_size": 256,
    "patch_size": 10,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
NUM_PATCHES = 400
INPUT, LOGITS, LAYER, OUTPUT = 3 * 3 * 40_000, NUM_PATCHES**2, 6 * NUM_PATCHES, NUM_PATCHES * 1000
"""Of 40,000 pixels, the elements for one frame; of one head; for each number of a patch; and before patches are merged
for a text model that is 1,000 wide."""


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({}, 0),
        ({"num_heads": 6}, 2 * LOGITS),
        ({"num_heads": None, "head_dim": 32}, -2 * LOGITS),
        ({"num_heads": None}, -3 * LOGITS),
        ({"intermediate_size": 100}, 0),
        ({"intermediate_size": None}, 0),
        ({"intermediate_size": 300}, LAYER * 44),
        ({"hidden_size": 128}, LAYER * (64 + 256)),
        ({"embed_dim": 128}, LAYER * (64 + 256)),
        ({"temporal_patch_size": None}, -INPUT),
        ({"temporal_patch_size": 3}, INPUT),
        ({"spatial_merge_size": 4}, OUTPUT // 16 - OUTPUT // 4),
        ({"spatial_merge_size": None}, OUTPUT - OUTPUT // 4),
        ({"deepstack_visual_indexes": [1, 5]}, 2 * OUTPUT // 4),
        ({"image_size": 100}, 0),
    ],
)
def test_what_an_encoder_takes_on_a_cpu(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], more: int) -> None:
    """Besides a head's logits, two masks of their size."""
    monkeypatch.setattr(need, "is_metal", lambda: False)
    described = {"model_type": "qwen2_vl", "text_config": {"hidden_size": 1000}, "vision_config": {**TOWER, **changed}}
    expected = 2 * INPUT + 6 * LOGITS + OUTPUT // 4 + LAYER * (64 + 256) + more
    assert vision_bytes(described, max_pixels=40_000, item_bytes=2) == 4 * expected


def test_images_that_are_scaled_to_a_square_take_what_the_square_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need, "is_metal", lambda: False)
    square = {"text_config": {"hidden_size": 1000}, "vision_config": {**TOWER, "image_size": 200}}
    for model_type in ("gemma3", "idefics3", "smolvlm"):
        for max_pixels in (1, 10**6):
            assert encoder_pixels(None, {"model_type": model_type, **square}, max_pixels) == 40_000
    without = {**square, "vision_config": {**TOWER, "patch_size": None}}
    patches_of_14 = {**square, "vision_config": {**TOWER, "patch_size": 14}}
    assert vision_bytes(without, max_pixels=50_000, item_bytes=2) == vision_bytes(
        patches_of_14, max_pixels=50_000, item_bytes=2
    )


def test_on_metal_steps_have_room_for_the_context_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need, "is_metal", lambda: True)
    monkeypatch.setattr(need, "max_elements", lambda: 1000)

    def activation_bytes(**settings: Any) -> int:
        scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4)
        model = ModelConfig(model="random:mini", dtype="float16", **settings)
        return estimate_need(Config(model=model, scheduler=scheduler)).activation_bytes

    own, longer, shorter = (activation_bytes(**one) for one in ({}, {"max_model_len": 2000}, {"max_model_len": 1000}))
    assert shorter < longer < own
    rows = (longer - shorter) // (2 * 1000 * 2)
    assert longer - shorter == 2 * 1000 * 2 * rows, "two layers' keys and values of float16 for 1,000 tokens"
    assert rows > 0


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_numbers_take_what_their_type_does(dtype: str, num_bytes: int) -> None:
    def weights_bytes(name: str) -> int:
        return estimate_need(Config(model=ModelConfig(model="random:mini", dtype=name))).weights_bytes

    assert 4 * weights_bytes(dtype) == num_bytes * weights_bytes("float32")
