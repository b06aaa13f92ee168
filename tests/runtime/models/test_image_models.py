"""Which folders are loaded with a vision encoder, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.families import FAMILIES
from mlx_server.outputs import ImageJob, NewRequestData, ScheduledChunk
from mlx_server.request import PromptImage, Request
from mlx_server.runtime.attention import regroup
from mlx_server.runtime.attention.interface import ReferenceBackend, StepPlan
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.checks.image_families import IMAGE_FAMILIES, count_placeholders, sees_both_ways
from mlx_server.runtime.checks.image_probe import find_image_fault
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models import vlm
from mlx_server.runtime.models.blueprint import build_model
from mlx_server.runtime.models.loader import LoadedModel, Pieces, RunnerInfo, load, make_runner
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.models.vlm import VlmModel
from mlx_server.runtime.models.vlm_encoders import BY_PART
from mlx_server.runtime.vision import ImageEncoder, ImagePieces
from mlx_server.sampling_params import SamplingParams
from tests.tiny_models import byte_tokenizer, save_model_folder
from tests.vision_configs import CONFIGS, DEEPSEEK_OCR_2, IMAGE
from tests.vision_worlds import build_tiny, embedded_alone, picture, placeholders, prompt_of, tiny_vlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = tiny_vlm("qwen3_vl").loaded
    return save_model_folder(loaded.model, loaded.config, tmp_path_factory.mktemp("vlm"), byte_tokenizer())


def probe(loaded: LoadedModel, backend: str = "auto") -> Pieces[tuple[ModelRunner, RunnerInfo]]:
    return make_runner(
        loaded,
        Config(
            model=ModelConfig(attention_backend=backend),
            cache=CacheConfig(num_kv_blocks=16),
            scheduler=SchedulerConfig(max_num_seqs=2, speculate="off"),
        ),
        PoolRoom(256, 2**28, 2**28),
    )


def load_and_probe(folder: Path, backend: str = "auto") -> tuple[object, RunnerInfo]:
    loaded = load(str(folder))
    runner, info = exhaust(probe(loaded, backend))
    runner.close()
    return loaded.model, info


def test_no_piece_of_the_check_with_an_image_computes_more_than_one_step(folder: Path) -> None:
    """And at most one decode, so streams of other models wait for that."""
    loaded, calls = load(str(folder)), []
    body = loaded.model.language_model.model
    plain = type(body).__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(self, *args, **kwargs)

    body.__class__ = type("Counted", (type(body),), {"__call__": counted})
    counts = []
    for _ in probe(loaded):
        counts.append(len(calls))
        calls.clear()
    assert max(counts) == 2


def test_a_folder_with_an_encoder_is_loaded_with_it_and_booked(folder: Path) -> None:
    model, info = load_and_probe(folder)
    assert isinstance(model, VlmModel)
    assert info.no_vision == ""
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert estimate_need(Config(model=ModelConfig(model=str(folder)))).weights_bytes == num_bytes


def test_without_weights_of_an_encoder_the_text_part_is_loaded(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "model.safetensors"
    arrays = {name: array for name, array in mx.load(str(file)).items() if not name.startswith("vision")}
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    model, info = load_and_probe(tmp_path)
    assert not isinstance(model, VlmModel)
    assert info.no_vision == "its files have no weights of a vision encoder"


def test_without_the_extra_the_text_part_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "is_installed", lambda: False)
    model, info = load_and_probe(folder)
    assert not isinstance(model, VlmModel)
    assert "pip install '.[vision]'" in info.no_vision


def test_an_encoder_that_cannot_be_loaded_leaves_the_text_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: VlmModel, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        raise KeyError("patch_embed")

    monkeypatch.setattr(VlmModel, "sanitize", broken)
    model, info = load_and_probe(folder)
    assert not isinstance(model, VlmModel)
    assert "its vision encoder cannot be loaded" in info.no_vision
    assert str(folder) not in info.no_vision, "clients see it"
    assert "patch_embed" in caplog.text


def test_wrong_embeddings_are_found_by_the_probe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_server.runtime import vision

    monkeypatch.setattr(vision, "mrope_positions", lambda images, count, merge: vision.np.zeros((3, count), "int32"))
    assert "with an image its logits differ by" in load_and_probe(folder)[1].no_vision


def _image_token_in_tokenizer(path: Path, family: str, token: str, tokenizer: Any) -> Path:
    """A folder whose configuration does not name the token of images."""
    loaded = tiny_vlm(family).loaded
    config = {name: value for name, value in loaded.config.items() if name != "image_token_index"}
    folder = save_model_folder(loaded.model, config, path, tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(IMAGE): {"content": token, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_an_original_intern_vl_names_its_image_token_in_its_tokenizer(tmp_path: Path) -> None:
    """And its text part `llm_config`, with the context's length."""
    folder = _image_token_in_tokenizer(tmp_path, "internvl_chat", "<IMG_CONTEXT>", byte_tokenizer())
    model, info = load_and_probe(folder)
    assert info.no_vision == ""
    assert model.config.image_token_index == IMAGE  # type: ignore[attr-defined]
    assert load(str(folder)).max_model_len == 4096
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))  # type: ignore[attr-defined]
    assert estimate_need(Config(model=ModelConfig(model=str(folder)))).weights_bytes == num_bytes


def test_deepseek_ocr_names_its_image_token_in_its_tokenizer_and_has_no_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{message['content']}} {% endfor %}"  # mlx-vlm saves it
    folder = _image_token_in_tokenizer(tmp_path, "deepseekocr", "<image>", tokenizer)
    model, info = load_and_probe(folder)
    assert info.no_vision == ""
    assert model.config.image_token_index == IMAGE  # type: ignore[attr-defined]
    prompt = ChatFormatter(Tokenizer.from_folder(folder)).format([{"role": "user", "content": "Free OCR."}])
    assert prompt.text == f"{tokenizer.bos_token or ''}Free OCR."


@pytest.mark.parametrize("names", [{}, {"image_token_index": 7}, {"image_token_id": 7, "image_token_index": None}])
def test_the_image_token_has_one_id_under_all_of_its_names(names: dict[str, int]) -> None:
    """mlx-vlm's GLM-4V has defaults of GLM-4.5V for both, and files name one."""
    config = {"model_type": "glm4v", **CONFIGS["glm4v"]}
    if names:
        config = {name: value for name, value in config.items() if name != "image_token_id"} | names
    made = build_model(config, sees=True).config
    assert made.image_token_id == made.image_token_index == (7 if names else IMAGE)


@pytest.fixture(scope="module")
def square_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Gemma 3, as it comes: the sizes of the text part are given there only."""
    loaded = tiny_vlm("gemma3").loaded
    return save_model_folder(loaded.model, loaded.config, tmp_path_factory.mktemp("vlm"), byte_tokenizer())


def test_rows_that_do_not_see_their_whole_image_are_found_by_the_probe(
    square_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_and_probe(square_folder)[1].no_vision == ""
    monkeypatch.setattr(StepPlan, "with_spans", lambda plan, spans: plan)
    assert "with an image its logits differ by" in load_and_probe(square_folder)[1].no_vision


def test_where_modules_run_by_group_an_image_is_not_seen_both_ways(
    square_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup, "LEVELS", regroup.LEVELS[-1:])
    assert "images that see both ways, in modules that run by group" in load_and_probe(square_folder)[1].no_vision


def test_rows_one_by_one_do_not_see_both_ways(square_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has the same bits in any batch."""
    plan = ReferenceBackend.plan
    monkeypatch.setattr(ReferenceBackend, "plan", lambda backend, step: plan(backend, step.by_row()))
    fault = load_and_probe(square_folder, "reference")[1].no_vision
    assert "tokens that see each other both ways cannot be computed one by one, as --batch-invariant requires" in fault


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_models_see_both_ways_for_the_scheduler_and_the_probe(name: str) -> None:
    config = tiny_vlm(name).loaded.config
    both_ways = FAMILIES[config["model_type"]].is_bidirectional(config)
    assert both_ways == sees_both_ways(tiny_vlm(name).config) == (name in ("gemma3", "gemma4_moe", "gemma4_unified"))


def test_images_of_gemma_3_are_as_large_as_its_text() -> None:
    """mlx-vlm divides them by what the text part multiplies by, and its default is another model's."""
    model, image = tiny_vlm("gemma3").loaded.model, picture("gemma3", 1)
    shown = model.multi_modal_projector(
        model.vision_tower(mx.array(image.inputs["pixel_values"]).transpose(0, 2, 3, 1))[0]
    )
    made = ImagePieces(model, [IMAGE] * image.num_tokens, image.inputs).encoded.embeddings * 64**0.5
    np.testing.assert_allclose(np.array(made), np.array(shown[0]), atol=1e-5)


@pytest.mark.parametrize("model_type", sorted(BY_PART.keys() & CONFIGS.keys()))
def test_encoding_does_not_wait_for_the_device(model_type: str) -> None:
    """What waits cannot be traced. The trace is not evaluated: MLX would have dozens of kernels compiled for it."""
    model, image = tiny_vlm(model_type).loaded.model, picture(model_type, 1)
    arrays = {name: mx.array(array) for name, array in image.inputs.items()}

    def embed(pixels: mx.array) -> mx.array:
        return BY_PART[model_type](model, mx.array([[IMAGE] * image.num_tokens]), {**arrays, "pixel_values": pixels})

    assert mx.compile(embed)(arrays["pixel_values"]).shape == embed(arrays["pixel_values"]).shape


@pytest.mark.slow
@pytest.mark.parametrize(("side", "num_tokens"), [(768, 144), (1024, 257)])
def test_views_of_deepseek_ocr_2_are_mlx_vlms(side: int, num_tokens: int) -> None:
    model = build_tiny({"model_type": "deepseekocr_2", **DEEPSEEK_OCR_2})
    pixels = np.random.default_rng(0).standard_normal((1, 3, side, side), dtype=np.float32)
    image = PromptImage(0, num_tokens, bytes(32), {"pixel_values": pixels, "images_spatial_crop": np.ones((1, 2))})
    ids = [IMAGE] * num_tokens
    assert count_placeholders(model, ids, image.inputs) == num_tokens
    wanted = embedded_alone(model, image)
    assert mx.allclose(ImagePieces(model, ids, image.inputs).encoded.embeddings, wanted, atol=1e-4)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_arrays_without_an_image_are_no_image(model_type: str) -> None:
    image, model = picture(model_type, 1), tiny_vlm(model_type).loaded.model
    for name in image.inputs:
        empty = {**image.inputs, name: image.inputs[name][:0]}
        assert count_placeholders(model, placeholders(image), empty) is None, name


def test_families_that_are_not_served_are_named() -> None:
    model = build_random({"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"]}, 1, sees=True)
    type(model).model_type = "of_tomorrow"
    try:
        fault = exhaust(find_image_fault(model, runner=None, vocab_size=320))  # type: ignore[arg-type]
    finally:
        type(model).model_type = "qwen3_vl"
    assert "this one is of type of_tomorrow" in fault
    assert all(name in fault for name in IMAGE_FAMILIES)


def test_a_token_for_images_that_the_vocabulary_does_not_have_leaves_the_model_blind() -> None:
    """MLX would read its embedding from memory that is not the model's."""
    model = build_random({"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"], "image_token_id": 10**6}, 1, sees=True)
    runner: Any = SimpleNamespace(cache=SimpleNamespace(release=lambda: None))
    fault = exhaust(find_image_fault(model, runner, vocab_size=320))
    assert "its token 1000000 for images is not one of its 320 tokens" in fault


def test_adapters_of_the_encoder_leave_the_model_blind() -> None:
    from mlx_server.runtime.layers.adapters import AdaptedLinear, LowRank

    model = build_random({"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"]}, 1, sees=True)
    merger = model.vision_tower.merger
    inputs = merger.linear_fc1.weight.shape[1]
    part = LowRank(0, mx.zeros((inputs, 2)), mx.zeros((2, merger.linear_fc1.weight.shape[0])))
    merger.linear_fc1 = AdaptedLinear(merger.linear_fc1, [part], AdapterRows(("one",)))
    fault = exhaust(find_image_fault(model, runner=None, vocab_size=320))  # type: ignore[arg-type]
    assert fault == "one of its adapters changes the vision encoder, and all requests share the encoder's results"


@pytest.mark.parametrize(("start", "stop"), [(0, 30), (20, 50), (29, 33), (32, 50), (60, 61)])
def test_positions_count_on_over_the_end_of_a_prompt(start: int, stop: int) -> None:
    """A request that was preempted while it answered may have a chunk of prompt and answer, behind an image of 4 x 4
    whose positions go up by four only, and in time not at all within it."""
    ids, images = prompt_of([[5, 6, 7], picture("qwen2_5_vl", 2), [8] * 10])
    assert ids.count(IMAGE) == 16
    request = Request("a", ids, SamplingParams(), arrival_s=0.0, max_total_tokens=99, images=images)
    encoder, job = ImageEncoder(tiny_vlm("qwen2_5_vl").loaded.model, max_bytes=0), ImageJob(request, images[0])
    pieces = encoder.begin(job)
    assert pieces is not None
    encoder.keep(job, pieces.encoded)
    encoder.add(NewRequestData("a", tuple(ids), (9,) * 40, SamplingParams(), frozenset(), images=images))
    rows = encoder.rows([ScheduledChunk("a", start, stop - start, None, (), True, 0)], np.arange(start, stop))
    assert rows is not None
    assert rows.positions is not None
    text = [min(place, 4) if place < 20 else place - 12 for place in range(start, stop)]
    assert rows.positions[0].tolist() == text
