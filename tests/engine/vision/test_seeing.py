"""An image file as encoders and prompts have it: as the processors of transformers and mlx-vlm say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from mlx_server.engine.vision import families, seeing
from mlx_server.engine.vision.decoding import UnreadableImageError, decode
from mlx_server.engine.vision.encoders import encoder_pixels
from mlx_server.engine.vision.families import PreparedImage
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.vlm import vlm_module
from tests.picture_worlds import (
    DEEPSEEK_OCR,
    FOLDERS,
    GEMMA,
    GEMMA_3N,
    GEMMA_4,
    GLM,
    INTERN_VL,
    KIMI,
    LFM_2,
    MINICPM,
    PIXTRAL,
    QWEN,
    SMOLVLM,
    VisionFolder,
    encoded,
    picture,
)


def load(folder: VisionFolder, path: Path) -> SeeingModel:
    return folder.load(path, folder.tokenizer())


def test_qwens_images_have_a_token_for_each_four_patches(tmp_path: Path):
    found = load(QWEN, tmp_path).prepare(encoded(picture(size=(56, 84))))
    (piece,) = found.pieces
    assert (found.text, piece.num_tokens) == ("<|image_pad|>", 2 * 3)
    assert piece.inputs["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert piece.inputs["pixel_values"].shape == (24, 3 * 2 * 14 * 14)


def test_gemmas_images_are_one_square(tmp_path: Path):
    found = load(GEMMA, tmp_path).prepare(encoded(picture(size=(200, 30))))
    (piece,) = found.pieces
    assert found.text == "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    assert (piece.num_tokens, piece.inputs["pixel_values"].shape) == (4, (1, 3, 56, 56))
    assert set(piece.inputs) == {"pixel_values"}


@pytest.mark.parametrize("size", [(64, 64), (200, 30)])
def test_gemma_3ns_images_are_a_square_with_the_token_behind_it(tmp_path: Path, size: tuple[int, int]):
    theirs = vlm_module("models.gemma3n.processing_gemma3n").Gemma3nProcessor
    model, tokenizer = load(GEMMA_3N, tmp_path), GEMMA_3N.tokenizer()
    tokens = {"boi": "<start_of_image>", "eoi": "<image|>", "image": "<image_soft_token>"}
    for name, token in {**tokens, "boa": "<start_of_image>", "eoa": "<image|>", "audio": "<image|>"}.items():
        setattr(tokenizer.hf, f"{name}_token", token)
        setattr(tokenizer.hf, f"{name}_token_id", tokenizer.token_to_id(token))
    expected = plain(
        theirs(None, model.processor, tokenizer.hf, image_seq_length=4)(picture(size=size), "See <image_soft_token>")
    )
    found = model.prepare(encoded(picture(size=size)))
    assert spread(model, found) == expected["input_ids"][0].tolist()
    as_reference(found, expected, 0)


def test_smolvlms_images_are_tiles_that_are_pieces(tmp_path: Path):
    found = load(SMOLVLM, tmp_path).prepare(encoded(picture(size=(112, 56))))
    fake = "<fake_token_around_image>"
    assert found.text == (f"{fake}<row_1_col_1><image>{fake}<row_1_col_2><image>\n\n{fake}<global-img><image>{fake}")
    assert [piece.num_tokens for piece in found.pieces] == [4, 4, 4]
    assert {piece.inputs["pixel_values"].shape for piece in found.pieces} == {(1, 1, 3, 56, 56)}
    assert len({piece.digest for piece in found.pieces}) == 3


@pytest.mark.parametrize(("merged", "rows", "columns"), [(1, 4, 6), (2, 2, 3)])
def test_pixtrals_images_are_rows_with_breaks_between(tmp_path: Path, merged: int, rows: int, columns: int):
    folder = dataclasses.replace(PIXTRAL, config={**PIXTRAL.config, "spatial_merge_size": merged})
    model = load(folder, tmp_path)
    found = model.prepare(encoded(picture(size=(84, 56))))
    (piece,) = found.pieces
    row = [model.image_token_id] * columns
    between = model.tokenizer.token_to_id("[IMG_BREAK]")
    assert list(piece.token_ids) == [*([*row, between] * (rows - 1)), *row]
    assert found.text == "[IMG][IMG_END]"
    assert piece.inputs["image_sizes"].tolist() == [[56, 84]]
    assert piece.inputs["pixel_values"].shape == (1, 3, 56, 84)


def test_gemma_4s_images_have_a_token_for_each_square_of_patches(tmp_path: Path):
    model = load(GEMMA_4, tmp_path)
    for size in [(48, 24), (200, 30), (31, 90)]:
        found = model.prepare(encoded(picture(size=size)))
        theirs = plain(model.processor(picture(size=size), return_tensors="np"))
        (piece,) = found.pieces
        assert found.text == "<|image><|image|><image|>"
        assert piece.num_tokens == theirs["num_soft_tokens_per_image"][0] <= 140
        assert set(piece.token_ids) == {model.image_token_id}
        num_patches = 9 * piece.num_tokens
        for name, array in piece.inputs.items():
            assert np.array_equal(array, theirs[name][:, :num_patches]), "without the padding"
        assert (theirs["image_position_ids"][:, num_patches:] == -1).all()


def test_gemma_4_unifieds_patches_are_squares_of_small_ones(tmp_path: Path):
    folder = dataclasses.replace(GEMMA_4, config={**GEMMA_4.config, "model_type": "gemma4_unified"})
    model, image = load(folder, tmp_path), picture(size=(48, 24))
    (piece,) = model.prepare(encoded(image)).pieces
    pixels, places = piece.inputs["pixel_values"][0], piece.inputs["image_position_ids"][0]
    width, height = 12 * (places.max(axis=0) + 1)
    assert width == 2 * height
    scaled = np.asarray(image.resize((width, height), 3), np.float32) / 255  # bicubic, as the processor's
    for patch, (column, row) in zip(pixels, places, strict=True):
        square = scaled[12 * row : 12 * row + 12, 12 * column : 12 * column + 12]
        assert np.abs(patch.reshape(12, 12, 3) - square).max() < 0.01


@pytest.mark.parametrize(
    ("model_type", "said", "expected"),
    [
        ("gemma4", {}, False),
        ("gemma4", {"use_bidirectional_attention": "vision"}, True),
        ("gemma4_unified", {}, True),
        ("gemma4_unified", {"use_bidirectional_attention": None}, False),
    ],
)
def test_gemma_4s_images_are_seen_both_ways_by_the_setting_or_its_default(
    tmp_path: Path, model_type: str, said: dict[str, Any], expected: bool
):
    """The default of transformers, and of the model that is loaded, is another one for each."""
    config = {**GEMMA_4.config, "model_type": model_type, "text_config": said}
    assert load(dataclasses.replace(GEMMA_4, config=config), tmp_path).is_bidirectional == expected


@pytest.mark.parametrize(("max_pixels", "most"), [(10**9, 280), (280 * 144, 280), (280 * 144 - 1, 140), (1024, 70)])
def test_gemma_4s_images_have_at_most_the_tokens_that_fit(tmp_path: Path, max_pixels: int, most: int):
    folder = dataclasses.replace(GEMMA_4, processor={**GEMMA_4.processor, "max_soft_tokens": 280})
    found = load(folder, tmp_path).prepare(encoded(picture(size=(400, 380))), max_pixels)
    assert 0.8 * most < found.num_tokens <= most


def plain(arrays: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(arrays[name]) for name in arrays}


def as_reference(found: PreparedImage, reference: dict[str, np.ndarray], axis: int) -> None:
    for name in found.pieces[0].inputs:
        joined = np.concatenate([piece.inputs[name] for piece in found.pieces], axis=axis)
        assert np.array_equal(joined, reference[name]), name


def test_gemma_3_is_as_transformers_processor_has_it(tmp_path: Path):
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    model, tokenizer = load(GEMMA, tmp_path), GEMMA.tokenizer()
    for name, token in {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}.items():
        setattr(tokenizer.hf, f"{name}_token", token)
        setattr(tokenizer.hf, f"{name}_token_id", tokenizer.token_to_id(token))
    processor = Gemma3Processor(model.processor, tokenizer.hf, image_seq_length=4)
    theirs = processor(images=picture(), text="See <start_of_image>", return_tensors="np")
    found = model.prepare(encoded(picture()))
    as_reference(found, plain(theirs), 0)
    ids = tokenizer.encode(f"See {found.text}", add_special_tokens=False)
    spread = [i for token in ids for i in [token] * (4 if token == model.image_token_id else 1)]
    assert spread == theirs["input_ids"][0].tolist()


def test_tiles_are_as_transformers_processor_has_them(tmp_path: Path):
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    model, tokenizer = load(SMOLVLM, tmp_path), SMOLVLM.tokenizer()
    tokenizer.hf.image_token = "<image>"
    processor = Idefics3Processor(model.processor, tokenizer.hf, image_seq_len=4)
    for size in [(112, 56), (56, 56), (80, 112)]:
        image = picture(size=size)
        theirs = processor(images=[image], text="See <image>", return_tensors="np")
        found = model.prepare(encoded(image))
        as_reference(found, plain(theirs), 1)
        ids = tokenizer.encode(f"See {found.text}", add_special_tokens=False)
        spread = [i for token in ids for i in [token] * (4 if token == model.image_token_id else 1)]
        assert spread == theirs["input_ids"][0].tolist(), size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of mlx-vlm's imports
def test_qwen_3_is_as_mlx_vlms_processor_has_it(tmp_path: Path):
    theirs = pytest.importorskip("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    numbers = {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    bounds = {"min_pixels": 4096, "max_pixels": 200_704}
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", **numbers, **bounds}
    folder = dataclasses.replace(QWEN, config={**QWEN.config, "model_type": "qwen3_vl"}, processor=processor)
    model, reference = load(folder, tmp_path), theirs.Qwen3VLImageProcessor(**numbers, **bounds)
    for size in [(56, 84), (640, 480)]:
        image = picture(size=size)
        (piece,), expected = model.prepare(encoded(image)).pieces, plain(reference(image))
        assert np.array_equal(piece.inputs["image_grid_thw"], expected["image_grid_thw"])
        assert np.abs(piece.inputs["pixel_values"] - expected["pixel_values"]).max() < 1e-6


SIZES = [(56, 84), (33, 20), (90, 31), (200, 30), (1, 1), (640, 480)]


def spread(model: SeeingModel, found: PreparedImage) -> list[int]:
    """The ids of an image in a prompt, with all its placeholders."""
    pieces = iter(found.pieces)
    ids = model.tokenizer.encode(f"See {found.text}", add_special_tokens=False)
    return [i for token in ids for i in (next(pieces).token_ids if token == model.image_token_id else [token])]


@pytest.mark.parametrize("size", SIZES)
def test_lfm_2s_views_are_as_mlx_vlms_processor_has_them(tmp_path: Path, size: tuple[int, int]):
    theirs = vlm_module("models.lfm2_vl.processing_lfm2_vl")
    model, tokenizer = load(LFM_2, tmp_path), LFM_2.tokenizer()
    for name, token in {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>"}.items():
        setattr(tokenizer.hf, f"{name}_token", token)
        setattr(tokenizer.hf, f"{name}_token_id", tokenizer.token_to_id(token))
    tokenizer.hf.image_thumbnail_token = "<|img_thumbnail|>"
    processor = theirs.Lfm2VlProcessor(model.processor, tokenizer.hf)
    expected = plain(processor(images=[picture(size=size)], text="See <image>"))
    found = model.prepare(encoded(picture(size=size)))
    assert spread(model, found) == expected["input_ids"][0].tolist()
    assert len(found.pieces) == len(expected["spatial_shapes"])
    for view, piece in enumerate(found.pieces):
        height, width = expected["spatial_shapes"][view]
        assert piece.inputs["spatial_shapes"].tolist() == [[height, width]]
        assert np.array_equal(piece.inputs["pixel_values"][0], expected["pixel_values"][view, : height * width])
        assert expected["pixel_attention_mask"][view].sum() == height * width == piece.inputs["pixel_values"].shape[1]


@pytest.mark.parametrize("size", [(200, 30), (1300, 700)])
@pytest.mark.parametrize("model_type", ["deepseekocr", "deepseekocr_2"])
def test_views_of_deepseek_ocr_are_as_mlx_vlms_processor_has_them(
    tmp_path: Path, model_type: str, size: tuple[int, int]
):
    config = {**DEEPSEEK_OCR.config, "model_type": model_type}
    model = load(dataclasses.replace(DEEPSEEK_OCR, config=config), tmp_path)
    module = vlm_module(f"models.{model_type}.processing_deepseekocr")
    processor = getattr(module, "DeepseekOCR2Processor" if model_type == "deepseekocr_2" else "DeepseekOCRProcessor")
    theirs = SimpleNamespace(
        image_token="<image>",
        image_token_id=model.image_token_id,
        image_transform=module.ImageTransform(),
        encode=lambda text, **_: model.tokenizer.encode(text, add_special_tokens=False),
    )
    ids, (tiles, whole), _, (grid,), _ = processor.tokenize_with_images(theirs, "See <image>", [picture(size=size)])
    found = model.prepare(encoded(picture(size=size)))
    assert spread(model, found) == ids[1:], "behind the first token"
    views = [view for piece in found.pieces for view in piece.inputs["pixel_values"]]
    wanted = [*(tiles if len(views) > 1 else ()), *whole]
    assert len(views) == len(wanted)
    for ours, other in zip(views, wanted, strict=True):
        assert np.abs(ours - np.array(other.astype(mx.float32))).max() < 2**-7, "mlx-vlm rounds to bfloat16"
    if model_type == "deepseekocr" and len(views) > 1:
        assert found.pieces[0].inputs["images_spatial_crop"].tolist() == [grid.tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_minicpms_tiles_are_as_mlx_vlms_processor_has_them(tmp_path: Path, size: tuple[int, int]):
    module = vlm_module("models.minicpmv4_6.processing_minicpmv4_6")
    own = module.MiniCPMVImageProcessor(max_slice_nums=4, scale_resolution=112)
    model, expected = load(MINICPM, tmp_path), own([[picture(size=size)]])
    theirs = object.__new__(module.MiniCPMVProcessor)
    theirs.image_processor, theirs.tokenizer, theirs.image_token = own, model.tokenizer.hf, "<|image_pad|>"
    ids = theirs._build_placeholder_ids_for_image(expected["tgt_sizes"][0], expected["grids"][0][0], 0, 16)
    found = model.prepare(encoded(picture(size=size)))
    shown = dataclasses.replace(found, text=found.text.replace(families.NUMBER, "0"))
    assert spread(model, shown) == [*model.tokenizer.encode("See ", add_special_tokens=False), *ids]
    for piece, pixels, sizes in zip(found.pieces, expected["pixel_values"][0], expected["tgt_sizes"][0], strict=True):
        assert np.array_equal(piece.inputs["pixel_values"], pixels)
        assert piece.inputs["tgt_sizes"].tolist() == [sizes.tolist()]


@pytest.mark.parametrize("mode", ["4x", "16x"])
@pytest.mark.parametrize("size", SIZES)
def test_minicpms_tiles_have_the_sizes_of_transformers(tmp_path: Path, size: tuple[int, int], mode: str):
    theirs = MiniCPMV4_6ImageProcessorPil(**{**MINICPM.processor, "downsample_mode": mode})
    expected = theirs(picture(size=size), return_tensors="np")
    folder = dataclasses.replace(MINICPM, config={**MINICPM.config, "downsample_mode": mode})
    found = load(folder, tmp_path).prepare(encoded(picture(size=size)))
    sizes = [piece.inputs["tgt_sizes"][0].tolist() for piece in found.pieces]
    assert sizes == np.asarray(expected["target_sizes"]).tolist()
    each = 4 if mode == "4x" else 16
    assert [piece.num_tokens for piece in found.pieces] == [height * width // each for height, width in sizes]


@pytest.mark.parametrize("size", SIZES)
def test_intern_vls_tiles_are_as_mlx_vlms_processor_has_them(tmp_path: Path, size: tuple[int, int]):
    theirs = vlm_module("models.internvl_chat.processor").InternVLImageProcessor(size=56, dynamic_max_num=4)
    model = load(INTERN_VL, tmp_path)
    expected = np.array(theirs.preprocess([picture(size=size)])["pixel_values"])
    found = model.prepare(encoded(picture(size=size)))
    tiles = np.concatenate([piece.inputs["pixel_values"] for piece in found.pieces], axis=1)
    assert tiles.shape == expected.shape
    assert np.abs(tiles - expected).max() < 1e-5
    count = 4 * len(found.pieces)
    shown = f"See <img>{'<IMG_CONTEXT>' * count}</img>"
    assert spread(model, found) == model.tokenizer.encode(shown, add_special_tokens=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Pillow, of mlx-vlm's
@pytest.mark.parametrize("size", SIZES)
def test_kimis_patches_are_as_mlx_vlms_processor_has_them(tmp_path: Path, size: tuple[int, int]):
    model = load(KIMI, tmp_path)
    theirs = vlm_module("models.kimi_vl.processing_kimi_vl").KimiVLImageProcessor(**KIMI.processor)
    (piece,), expected = model.prepare(encoded(picture(size=size))).pieces, plain(theirs(picture(size=size)))
    assert np.array_equal(piece.inputs["image_grid_hws"], expected["image_grid_hws"])
    assert np.abs(piece.inputs["pixel_values"] - expected["pixel_values"]).max() < 1e-6
    assert piece.num_tokens == expected["image_grid_hws"].prod() // 4 <= 256 // 4 + 16


@pytest.mark.parametrize(
    ("model_type", "around", "processor"),
    [
        ("glm4v", GLM, {}),
        ("glm4v_moe", GLM, {"image_processor_type": "Glm46VImageProcessor"}),
        ("glm_ocr", GLM, {"image_processor_type": "Glm46VImageProcessorFast"}),
        ("dots_ocr", QWEN, {"temporal_patch_size": 1}),
        ("paddleocr_vl", QWEN, {"image_processor_type": "PaddleOCRVLImageProcessor", "min_pixels": 1568}),
    ],
)
def test_patches_are_as_the_processor_has_them(
    tmp_path: Path, model_type: str, around: VisionFolder, processor: dict[str, Any]
):
    config = {**around.config, "model_type": model_type}
    model = load(dataclasses.replace(around, config=config, processor={**around.processor, **processor}), tmp_path)
    for size in [(56, 84), (300, 200), (1, 1)]:
        (piece,) = model.prepare(encoded(picture(size=size))).pieces
        theirs = plain(model.processor(picture(size=size), return_tensors="np"))
        assert np.array_equal(piece.inputs["image_grid_thw"], theirs["image_grid_thw"])
        pixels = piece.inputs["pixel_values"]
        assert np.array_equal(pixels[0] if model_type == "paddleocr_vl" else pixels, theirs["pixel_values"])
        assert piece.num_tokens == theirs["image_grid_thw"].prod() // 4


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("max_pixels", [1024, 20_000])
def test_inputs_are_bounded_by_the_pixels(tmp_path: Path, name: str, max_pixels: int):
    processor = dict(FOLDERS[name].processor)
    if name == "qwen":
        processor |= {"min_pixels": 3136, "max_pixels": 2**26}
    model = load(dataclasses.replace(FOLDERS[name], processor=processor), tmp_path)
    found = model.prepare(encoded(picture(size=(700, 500))), max_pixels)
    if name in ("qwen", "pixtral", "glm", "kimi"):
        rounding = 2 * 28 * 500  # Pixtral's and Kimi's sides are rounded up
        most = max_pixels * 2 if name in ("qwen", "glm") else max_pixels + rounding
        assert found.pieces[0].inputs["pixel_values"].size <= 3 * most
    elif name == "gemma4":
        assert found.num_tokens <= (140 if max_pixels > 140 * 144 else 70)
    else:  # these have sizes of their own
        assert found.num_tokens <= (16 * 17 + 1 if name == "deepseekocr" else 11 * 16)


def test_equal_images_have_equal_digests_and_others_other_ones(tmp_path: Path):
    (tmp_path / "a").mkdir()
    model, again = load(QWEN, tmp_path), load(QWEN, tmp_path / "a")
    digests = [model.prepare(encoded(picture(seed))).pieces[0].digest for seed in (0, 1)]
    assert len({*digests}) == 2
    assert {len(digest) for digest in digests} == {32}
    lossless = encoded(picture(0), "WEBP", lossless=True)
    assert again.prepare(lossless).pieces[0].digest == digests[0], "the pixels count, not the file"
    assert families.piece([1], {"a": np.zeros((2, 3))}).digest != families.piece([1], {"a": np.zeros((3, 2))}).digest


def test_an_image_that_was_seen_is_not_prepared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = load(QWEN, tmp_path)
    first = model.prepare(encoded(picture(0)))
    monkeypatch.setattr(model._kept, "_limit", first.num_bytes * 2)
    assert model.prepare(encoded(picture(0))) is first
    model.prepare(encoded(picture(1)))
    assert model.prepare(encoded(picture(0))) is first
    model.prepare(encoded(picture(2)))  # in the place of the one that was used the longest ago
    assert model.prepare(encoded(picture(0))) is first
    model.prepare(encoded(picture(1)))
    model.prepare(encoded(picture(2)))
    assert model.prepare(encoded(picture(0))) is not first


def test_an_image_is_kept_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, data = load(QWEN, tmp_path), encoded(picture())
    decoded: list[int] = []
    monkeypatch.setattr(seeing, "decode", lambda *asked: decoded.append(1) or decode(*asked))
    for owner, count in [("a", 1), ("b", 2), ("a", 2), ("b", 2)]:
        model.prepare(data, owner=owner)
        assert len(decoded) == count


@pytest.mark.parametrize("name", sorted(FOLDERS.keys() - {"internvl"}))  # whose config.json has all that is needed
def test_a_folder_without_its_processor_is_reported(tmp_path: Path, name: str):
    folder = FOLDERS[name]
    tokenizer = folder.tokenizer()
    config = {**folder.config, "image_token_id": tokenizer.token_to_id(folder.image_token)}
    with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json"):
        SeeingModel.load(tmp_path, config, tokenizer)


def test_what_has_no_eyes_or_unknown_ones_is_none(tmp_path: Path):
    tokenizer = QWEN.tokenizer()
    for config in ({"model_type": "qwen3"}, {"model_type": "gemma3"}, {**QWEN.config, "model_type": "of_tomorrow"}):
        assert SeeingModel.load(tmp_path, config, tokenizer) is None


def test_an_image_token_that_is_none_is_reported(tmp_path: Path):
    tokenizer = QWEN.tokenizer()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN.processor))
    with pytest.raises(ModelLoadError, match="image_token_id is 99999"):
        SeeingModel.load(tmp_path, {**QWEN.config, "image_token_id": 99999}, tokenizer)


def test_an_image_that_a_processor_cannot_take_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("no columns")

    model = load(QWEN, tmp_path)
    monkeypatch.setattr(type(model.processor), "__call__", fail)
    with pytest.raises(UnreadableImageError, match=r"cannot be prepared for qwen2_5_vl \(56 x 84 pixels\): no columns"):
        model.prepare(encoded(picture(size=(56, 84))))


@pytest.mark.parametrize(
    ("folder", "size"),
    [(PIXTRAL, (5000, 1)), (LFM_2, (50_000, 1)), (KIMI, (1, 9000)), (GLM, (1, 300)), (MINICPM, (5000, 1))],
)
def test_extreme_proportions_are_refused_with_a_remedy(tmp_path: Path, folder: VisionFolder, size: tuple[int, int]):
    told = rf"cannot be prepared for \w+ \({size[0]} x {size[1]} pixels\): .*[^.]\. Send it with other proportions$"
    with pytest.raises(UnreadableImageError, match=told):
        load(folder, tmp_path).prepare(encoded(picture(size=size)))


@pytest.mark.parametrize("folder", [KIMI, LFM_2, GEMMA_4, MINICPM], ids=lambda folder: folder.config["model_type"])
@pytest.mark.parametrize("size", [(640, 480), (600, 60), (3, 4), (60, 60)])
def test_the_encoder_gets_no_more_pixels_than_are_booked(tmp_path: Path, folder: VisionFolder, size: tuple[int, int]):
    model = load(folder, tmp_path)
    most = encoder_pixels(tmp_path, folder.config, 50_000_000)
    found = model.prepare(encoded(picture(size=size)))
    assert max(piece.inputs["pixel_values"].size for piece in found.pieces) <= 3 * most


@pytest.mark.parametrize("folder", [LFM_2, MINICPM], ids=lambda folder: folder.config["model_type"])
@pytest.mark.parametrize("size", [(640, 480), (60, 10), (1, 1)])
def test_images_that_are_made_larger_than_the_limit_are_booked(
    tmp_path: Path, folder: VisionFolder, size: tuple[int, int]
):
    found = load(folder, tmp_path).prepare(encoded(picture(size=size)), 256)
    most = encoder_pixels(tmp_path, folder.config, 256)
    assert max(piece.inputs["pixel_values"].size for piece in found.pieces) <= 3 * most


def test_every_family_takes_images_of_one_pixel_and_thin_ones(tmp_path: Path):
    for name, folder in FOLDERS.items():
        (tmp_path / name).mkdir()
        model = load(folder, tmp_path / name)
        for size in [(1, 1), (60, 1), (1, 60)]:
            found = model.prepare(encoded(picture(size=size)))
            assert 0 < found.num_tokens <= 300, (name, size)
            assert all(np.isfinite(piece.inputs["pixel_values"]).all() for piece in found.pieces)
