"""A chat's images in its prompt: where the template of each family has them, with as many tokens as they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.text.chat import ChatFormatter, ChatOptions, ChatPrompt
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.parts import UNREADABLE_NOTE, ImageParts, Pictures
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import InvalidRequestError
from tests.picture_worlds import FOLDERS, GEMMA, QWEN, SMOLVLM, VisionFolder, encoded, picture
from tests.text_worlds import CHAT_TEMPLATE

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


class Eyes:
    """A model's host side: chats become prompts, each image with the pixels of its number."""

    def __init__(self, folder: VisionFolder, path: Path, template: str | None = None) -> None:
        self.tokenizer: Tokenizer = folder.tokenizer()
        if template is not None:
            self.tokenizer.hf.chat_template = template
        self.model: SeeingModel = folder.load(path, self.tokenizer)
        self.chat = ChatFormatter(self.tokenizer)

    def read(self, messages: list[Any], *, unreadable: tuple[int, ...] = (), **options: Any) -> ChatPrompt:
        parts = ImageParts()
        marked = parts.mark_messages(messages)
        prepared = {
            index: self.model.prepare(encoded(picture(index)))
            for index in range(len(parts.found))
            if index not in unreadable
        }
        return self.chat.format(marked, options=ChatOptions(**options), pictures=Pictures(self.model, parts, prepared))

    def shown(self, prompt: ChatPrompt) -> str:
        """The prompt's text by its ids, each run of an image as its number in the request."""
        ids = list(prompt.token_ids)
        digests = {self.model.prepare(encoded(picture(seed))).pieces[0].digest: seed for seed in range(4)}
        pieces, start = [], 0
        for image in prompt.images:
            assert set(ids[image.start : image.end]) <= {
                self.model.image_token_id,
                self.tokenizer.token_to_id("[IMG_BREAK]"),
                self.model.config.get("eoi_token_id") if self.model.model_type == "gemma3n" else None,
            }
            pieces += [self.tokenizer.decode(ids[start : image.start], skip_special_tokens=False)]
            pieces += [f"#{digests.get(image.digest, '?')}#"]
            start = image.end
        rest = self.tokenizer.decode(ids[start:], skip_special_tokens=False)
        return "".join([*pieces, rest])


@pytest.fixture
def qwen(tmp_path: Path) -> Eyes:
    return Eyes(QWEN, tmp_path)


SAID = {
    "qwen": (
        "<|im_start|>user\nLook:<|vision_start|>#0#<|vision_end|> and <|vision_start|>#1#<|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "gemma": (
        "<start_of_turn>user\nLook:\n\n<start_of_image>#0#<end_of_image>\n\nand\n\n<start_of_image>#1#<end_of_image>"
        "\n\n<end_of_turn>\n<start_of_turn>model\n"
    ),
    "gemma3n": (
        "<start_of_turn>user\nLook:\n\n<start_of_image>#0#\n\nand\n\n<start_of_image>#1#\n\n<end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    "deepseekocr": "Look:\n#0#\n and \n#1#",
    "minicpm": (
        "<|im_start|>user\nLook:<image_id>0</image_id><image>#0#</image> and <image_id>1</image_id><image>#1#</image>"
        "<|im_end|>\n<|im_start|>assistant\n"
    ),
    "smolvlm": (
        "<|im_start|>User: Look:@<row_1_col_1>#0#@<row_1_col_2>#?#\n@<row_2_col_1>#?#@<row_2_col_2>#?#\n\n"
        "@<global-img>#?#@ and @<row_1_col_1>#1#@<row_1_col_2>#?#\n@<row_2_col_1>#?#@<row_2_col_2>#?#\n\n"
        "@<global-img>#?#@<end_of_utterance>\nAssistant:"
    ).replace("@", "<fake_token_around_image>"),
    "pixtral": "[INST]Look:#0#[IMG_END] and #1#[IMG_END][/INST]",
    "glm": (
        "<|im_start|>user\nLook:<|begin_of_image|>#0#<|end_of_image|> and <|begin_of_image|>#1#<|end_of_image|>"
        "<|im_end|>\n<|im_start|>assistant\n"
    ),
    "kimi": (
        "<|im_start|>user\nLook:<|media_start|>image<|media_content|>#0#<|media_end|> and "
        "<|media_start|>image<|media_content|>#1#<|media_end|><|im_end|>\n<|im_start|>assistant\n"
    ),
    "lfm2": (
        "<|im_start|>user\nLook:<|image_start|><|img_row_1_col_1|>#0#<|img_row_1_col_2|>#?#<|img_row_2_col_1|>#?#"
        "<|img_row_2_col_2|>#?#<|img_row_3_col_1|>#?#<|img_row_3_col_2|>#?#<|img_thumbnail|>#?#<|image_end|> and "
        "<|image_start|><|img_row_1_col_1|>#1#<|img_row_1_col_2|>#?#<|img_row_2_col_1|>#?#<|img_row_2_col_2|>#?#"
        "<|img_row_3_col_1|>#?#<|img_row_3_col_2|>#?#<|img_thumbnail|>#?#<|image_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "internvl": (
        "<|im_start|>user\nLook:<img>#0##?##?#</img>\n and <img>#1##?##?#</img>\n<|im_end|>\n<|im_start|>assistant\n"
    ),
    "gemma4": (
        "<start_of_turn>user\nLook:<|image>#0#<image|>and<|image>#1#<image|><end_of_turn>\n<start_of_turn>model\n"
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_users_images_stand_where_the_template_has_them(tmp_path: Path, name: str):
    eyes = Eyes(FOLDERS[name], tmp_path)
    prompt = eyes.read([{"role": "user", "content": [text("Look:"), IMAGE, text(" and "), IMAGE]}])
    assert eyes.shown(prompt) == SAID[name]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_prompt_goes_on_as_it_began(tmp_path: Path, name: str):
    eyes = Eyes(FOLDERS[name], tmp_path)
    first = [{"role": "user", "content": [IMAGE, text("What is this?")]}]
    more = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": [text("And this?"), IMAGE]}]
    begun = eyes.read(first, add_generation_prompt=False)
    gone_on = eyes.read([*first, *more])
    assert gone_on.token_ids[: len(begun.token_ids)] == begun.token_ids
    shared = gone_on.images[: len(begun.images)]
    assert [(image.start, image.digest) for image in shared] == [(image.start, image.digest) for image in begun.images]
    assert len(gone_on.images) == 2 * len(begun.images)


def test_a_results_image_stands_in_it(qwen: Eyes):
    prompt = qwen.read([{"role": "tool", "content": [text("Shot:"), IMAGE]}, {"role": "user", "content": "So?"}])
    result = "<tool_response>\nShot:<|vision_start|>#0#<|vision_end|>\n</tool_response>"
    assert result in qwen.shown(prompt), "a history without tools is text, as this template is given it"


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_images_of_others_stand_in_their_texts(qwen: Eyes, role: str):
    prompt = qwen.read([{"role": role, "content": [text("Shot:"), IMAGE]}, {"role": "user", "content": "So?"}])
    assert f"<|im_start|>{role}\nShot:\n<|vision_start|>#0#<|vision_end|><|im_end|>" in qwen.shown(prompt)


def test_what_cannot_be_read_is_noted(qwen: Eyes):
    content = [IMAGE, text("and"), IMAGE]
    prompt = qwen.read([{"role": "tool", "content": content}, {"role": "user", "content": "So?"}], unreadable=(0,))
    assert len(prompt.images) == 1
    assert f"<tool_response>\n{UNREADABLE_NOTE}\nand<|vision_start|>#1#" in qwen.shown(prompt)


def test_neighbours_that_are_merged_keep_their_images(tmp_path: Path):
    eyes = Eyes(GEMMA, tmp_path)
    prompt = eyes.read(
        [{"role": "user", "content": [IMAGE, text("a")]}, {"role": "user", "content": [text("b"), IMAGE]}]
    )
    shown = eyes.shown(prompt)
    assert shown.index("#0#") < shown.index("a\n\nb") < shown.index("#1#")


def test_a_template_of_strings_gets_the_familys_form(tmp_path: Path):
    eyes = Eyes(QWEN, tmp_path, CHAT_TEMPLATE)
    prompt = eyes.read([{"role": "user", "content": [text("Look"), IMAGE]}])
    assert eyes.shown(prompt).startswith("<|user|>Look\n<|vision_start|>#0#<|vision_end|><|end|>")


@pytest.mark.parametrize("folder", [QWEN, GEMMA, SMOLVLM], ids=lambda folder: folder.config["model_type"])
def test_the_image_token_in_a_text_is_text(tmp_path: Path, folder: VisionFolder):
    """Nobody's words may stand for an image, or shift another's."""
    eyes = Eyes(folder, tmp_path)
    words = f"say {folder.image_token}<start_of_image> please"
    prompt = eyes.read([{"role": "user", "content": [text(words), IMAGE, text(words)]}])
    runs = [prompt.token_ids[image.start : image.end] for image in prompt.images]
    tokens = sum(run.count(eyes.model.image_token_id) for run in runs)
    assert list(prompt.token_ids).count(eyes.model.image_token_id) == tokens
    assert prompt.text.count(words) == 2
    decoded = eyes.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    assert decoded.count("say ") == decoded.count(f"{folder.image_token}<start_of_image> please") == 2


def test_a_template_that_leaves_images_out_is_reported(tmp_path: Path):
    eyes = Eyes(QWEN, tmp_path, QWEN.template.replace("message in messages", "message in messages[-1:]"))
    messages = [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "a"}]
    with pytest.raises(InvalidRequestError, match="shows 0 of the 1 images in the messages"):
        eyes.read([*messages, {"role": "user", "content": "b"}])
