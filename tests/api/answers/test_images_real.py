"""Images from HTTP to the vision encoder and back: tiny models of random weights in whole folders, behind the true
application, against what mlx-vlm makes of the same ids and of its processor's own arrays."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mlx.utils import tree_flatten
from PIL import Image

from mlx_server.config import BLOCK_SIZE, Config
from mlx_server.engine.vision.families import FAMILIES
from mlx_server.engine.vision.processors import processor_for_pillow
from mlx_server.pool.model_pool import ModelPool
from mlx_server.request import PromptImage
from mlx_server.runtime.checks.image_families import image_token_id
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.vlm import vlm_module
from tests.api.real_worlds import RealWorld, started
from tests.api.worlds import Site, user
from tests.picture_worlds import (
    GEMMA,
    GEMMA_4,
    INTERN_VL,
    LFM_2,
    PIXTRAL,
    QWEN,
    SMOLVLM,
    VisionFolder,
    data_url,
    encoded,
    picture,
)
from tests.tiny_models import save_model_folder
from tests.vision_configs import CONFIGS
from tests.vision_worlds import TinyVlm, build_tiny, plain_greedy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),  # transformers, of the folder
]

CAT, DOG = (encoded(picture(seed)) for seed in (0, 1))
QUESTION = "What is this? Say it in a few words, and leave nothing out."
TEXT = {"type": "text", "text": QUESTION}
NUM_TOKENS = 8
NUM_IMAGE_TOKENS = {"qwen2_5_vl": 6, "qwen3_5": 6, "gemma3": 16, "gemma4": 6 * 10, "smolvlm": 20, "mistral3": 6}
NUM_IMAGE_TOKENS |= {"internvl": 7 * 4, "lfm2_vl": 6 * 16 + 12}
NUM_ENCODED = {**dict.fromkeys(NUM_IMAGE_TOKENS, 1), "smolvlm": 5, "internvl": 7, "lfm2_vl": 7}
"""Calls of the encoder for an image: each of the tiles and the whole are encoded by themselves."""

OPTIONS: dict[str, dict[str, Any]] = {
    "smolvlm": {"return_row_col_info": False},
    "mistral3": {"patch_size": 28},
    "internvl": {"crop_to_patches": True},
}
"""Of the processors' calls."""


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


@dataclass(frozen=True)
class Seer:
    """A model that sees, in its folder and in mlx-vlm's class, and the server that is asked."""

    vlm: TinyVlm
    folder: Path
    model: tuple[ModelPool, Config]

    @property
    def kind(self) -> str:
        return self.vlm.loaded.name

    @property
    def image_token_id(self) -> int:
        return image_token_id(self.vlm.config)

    def plain(self, token_ids: list[int], *pictures: bytes) -> list[int]:
        """What mlx-vlm's class answers, given its processor's arrays for the images."""
        options = OPTIONS.get(self.kind, {})
        read = FAMILIES[self.kind].load_processor or processor_for_pillow
        processor = read(self.folder, self.vlm.loaded.config)
        images = []
        for data in pictures:
            arrays = processor(Image.open(io.BytesIO(data)), return_tensors="np", **options)
            images.append(PromptImage(0, 1, bytes(32), dict(arrays)))
        return plain_greedy(self.vlm, (token_ids, tuple(images)), NUM_TOKENS)


def write_folder(path: Path, host: VisionFolder) -> TinyVlm:
    """A folder as such models come, with weights and tokens that fit each other."""
    tokenizer = host.tokenizer()
    model_type = host.config["model_type"]
    config = {"model_type": model_type, **CONFIGS[model_type]}
    names = {
        "image_token_id": host.image_token,
        "image_token_index": host.image_token,
        "vision_start_token_id": "<|vision_start|>",
    }
    config |= {key: tokenizer.token_to_id(name) for key, name in names.items() if key in config}
    assert tokenizer.vocab_size <= CONFIGS[model_type].get("vocab_size", 320)
    model = build_tiny(config)
    save_model_folder(model, config, path, tokenizer.hf)
    (path / "preprocessor_config.json").write_text(json.dumps(host.processor))
    plain = vlm_module(f"models.{model_type}").Model(model.config)
    plain.load_weights(tree_flatten(model.parameters()))
    return TinyVlm(LoadedModel(model_type, model, config, path), plain)


SQUARE = {"size": {"height": 112, "width": 112}, "image_seq_length": 16}
HOSTS = {
    "qwen": QWEN,
    "gemma": replace(GEMMA, processor={**GEMMA.processor, **SQUARE}),
    "smolvlm": SMOLVLM,
    "mistral": PIXTRAL,
    "internvl": replace(INTERN_VL, config={**INTERN_VL.config, "model_type": "internvl"}),
    "lfm2": LFM_2,
    "qwen3_5": replace(QWEN, config={**QWEN.config, "model_type": "qwen3_5"}),
    "gemma4": replace(GEMMA_4, processor={**GEMMA_4.processor, "max_soft_tokens": 70}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=HOSTS)
async def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seer]:
    path = tmp_path_factory.mktemp("seer")
    vlm = write_folder(path, HOSTS[request.param])
    async with started(path, "seer") as model:
        encoder = model[0].engines()[0]._loaded_parts().runner.images  # there is no other way to it
        assert encoder is not None
        encoder.max_bytes = 0  # so that only cached prefixes spare the encoder its work
        yield Seer(vlm, path, model)


@pytest_asyncio.fixture(loop_scope="session")
async def world(site: Site, seer: Seer) -> AsyncIterator[RealWorld]:
    world = RealWorld(site, site.serve(*seer.model))
    world.engine.reset_prefix_cache()
    yield world
    await world.settled()


of_any_family = pytest.mark.parametrize("seer", ["qwen"], indirect=True)
"""For what does not depend on the family."""


async def ask(world: RealWorld, content: Any, **more: Any) -> dict[str, Any]:
    """A greedy chat, with its ids; a list as `messages`."""
    body = {"messages": user(content), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    response = await world.http.post("/v1/chat/completions", json={"return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def said(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def num_encoded(world: RealWorld) -> int:
    metrics = (await world.http.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("mlx_serve:images_encoded")]
    return int(float(line.split()[-1]))


async def test_an_image_is_answered_as_by_mlx_vlm(world: RealWorld, seer: Seer):
    for pictures in ([CAT], [CAT, DOG]):
        answer = await ask(world, [*map(image, pictures), TEXT])
        ids = answer["prompt_token_ids"]
        num_images = ids.count(seer.image_token_id)
        assert num_images == len(pictures) * NUM_IMAGE_TOKENS[seer.kind]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert said(answer) == seer.plain(ids, *pictures)


async def test_images_are_told_apart_and_recognized(world: RealWorld, seer: Seer):
    """One that was seen takes the cached prefix, and neither takes the other's."""
    before, each = await num_encoded(world), NUM_ENCODED[seer.kind]
    cat, dog = [await ask(world, [image(data), TEXT], logprobs=True) for data in (CAT, DOG)]
    assert await num_encoded(world) - before == 2 * each
    assert cat["prompt_token_ids"] == dog["prompt_token_ids"]
    assert cached(dog) == 0, "the image begins within the first block"
    first, second = (answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in (cat, dog))
    assert abs(first - second) > 1e-3
    for data, known in ((DOG, dog), (CAT, cat)):
        again = await ask(world, [image(data), TEXT])
        assert said(again) == said(known)
        assert cached(again) == (again["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert await num_encoded(world) - before == 2 * each


async def test_the_next_turn_encodes_nothing(world: RealWorld, seer: Seer):
    messages = user([image(CAT), TEXT])
    first = await ask(world, None, messages=messages)
    before = await num_encoded(world)
    messages += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Is it?"}]
    second = await ask(world, None, messages=messages)
    assert said(second) == seer.plain(second["prompt_token_ids"], CAT)
    start = second["prompt_token_ids"].index(seer.image_token_id)
    assert cached(second) >= (first["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE > start
    assert await num_encoded(world) == before
    messages += [{"role": "assistant", "content": "Yes."}, *user([TEXT, image(DOG)])]
    third = await ask(world, None, messages=messages)
    assert said(third) == seer.plain(third["prompt_token_ids"], CAT, DOG)
    assert await num_encoded(world) - before == NUM_ENCODED[seer.kind]


@of_any_family
async def test_every_protocol_and_a_stream_ask_the_same(world: RealWorld, seer: Seer):
    known = await ask(world, [image(CAT), TEXT])
    text, count = known["choices"][0]["message"]["content"], known["usage"]["prompt_tokens"]
    before = await num_encoded(world)
    pixels = data_url(CAT).partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": pixels}}
    parts = [{"type": "input_image", "image_url": data_url(CAT)}, {"type": "input_text", "text": QUESTION}]
    rest = {"temperature": 0, "ignore_eos": True}
    options = {"stream": False, "options": {"temperature": 0, "num_predict": NUM_TOKENS}}

    async def post(path: str, **body: Any) -> Any:
        response = await world.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    anthropic = await post("/v1/messages", max_tokens=NUM_TOKENS, messages=user([block, TEXT]), **rest)
    usage = anthropic["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert usage["cache_read_input_tokens"] == (count - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert anthropic["content"][0]["text"] == text
    responses = await post("/v1/responses", max_output_tokens=NUM_TOKENS, input=user(parts), **rest)
    assert responses["usage"]["input_tokens"] == count
    assert responses["output"][0]["content"][0]["text"] == text
    ollama = await post("/api/chat", messages=[{**user(QUESTION)[0], "images": [pixels]}], **options)
    assert (ollama["prompt_eval_count"], ollama["message"]["content"]) == (count, text)
    chunks = await world.openai.chat.completions.create(
        model="seer",
        messages=user([image(CAT), TEXT]),  # type: ignore[arg-type]
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]) == text
    assert await num_encoded(world) == before


@of_any_family
async def test_text_beside_images_is_answered_as_alone(world: RealWorld, seer: Seer):
    alone = await ask(world, QUESTION)
    assert said(alone) == seer.plain(alone["prompt_token_ids"])
    world.engine.reset_prefix_cache()
    text, cat, dog = await asyncio.gather(
        ask(world, QUESTION), ask(world, [image(CAT), TEXT]), ask(world, [TEXT, image(DOG)])
    )
    assert said(text) == said(alone)
    assert said(cat) == seer.plain(cat["prompt_token_ids"], CAT)
    assert said(dog) == seer.plain(dog["prompt_token_ids"], DOG)


@of_any_family
async def test_the_model_says_that_it_sees(world: RealWorld):
    (card,) = (await world.http.get("/v1/models")).json()["data"]
    assert card["capabilities"] == ["completion", "vision"]
    assert "vision" in (await world.http.get("/api/tags")).json()["models"][0]["capabilities"]
